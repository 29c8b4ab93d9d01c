//! Habits of nodes: GPUs that a rank does not see or cannot map, little or no `/dev/shm`, limits, containers, other jobs
//! and other nodes. Messages arrive by whatever way is left, and the counters say which and why.

use crate::support::{self, job, on, on_every_mpi, over_an_mpi_that_knows_cuda};
use anabranch_tests::nodes::{nodes_permitted, own_container, own_mounts, permitted};
use anabranch_tests::{built, Job, Outcome};
use std::process::Command;
use std::thread;
use xtask::mpi::{Family, Mpi};

on_every_mpi!(hidden_gpus, one_sided_view, refused_for_good);

/// The libraries that run well over TCP alone. MPICH 4.0.2 (over UCX) is not among them: without any library of ours,
/// MPI_Finalize does not end in five of a hundred runs. Nor is MPICH 5 where there is no `/dev/shm`: it does not start.
const OVER_TCP: [&str; 4] = ["openmpi", "openmpi5", "mpich5", "mpich5-abi"];
const WITHOUT_SHM: [&str; 2] = ["openmpi", "openmpi5"];

fn words(command: &[String]) -> Vec<&str> {
    command.iter().map(String::as_str).collect()
}

/// Runs it, all is well, and nothing was said.
#[track_caller]
fn quiet(job: Job) -> Outcome {
    let outcome = job.passes();
    outcome.stats().check_complete();
    let said = |line: &&str| line.starts_with("anabranch[");
    let lines: Vec<&str> = outcome.finished.stderr.lines().filter(said).collect();
    assert!(lines.is_empty(), "{lines:?}\n{outcome}");
    outcome
}

/// No message went by descriptor, each for this reason.
#[track_caller]
fn all_by_value(outcome: &Outcome, reason: &str) {
    let stats = outcome.stats();
    assert!(stats.total("sends_device") > 0, "{outcome}");
    assert_eq!(stats.total("sends_rts"), 0, "{outcome}");
    assert_eq!(
        stats.total("sends_bcopy"),
        stats.total("sends_device"),
        "{outcome}"
    );
    assert!(stats.fallback(reason) > 0, "{outcome}");
    assert!(stats.total("receives_bcopy") > 0, "{outcome}");
}

/// Between two nodes messages go by value, and within each of them by descriptor.
#[test]
fn two_nodes() {
    if nodes_permitted() {
        for name in OVER_TCP {
            on(name, on_two_nodes);
        }
    }
}

fn on_two_nodes(mpi: &Mpi) {
    let cases = ["medium", "both_ways"];
    let outcome = quiet(job(mpi, 2, "p2p").args(&cases).on_two_nodes());
    assert_eq!(outcome.stats().ranks(), 2, "{outcome}");
    all_by_value(&outcome, "not_on_node");
    assert_eq!(outcome.stats().fallback("not_registered"), 0, "{outcome}");
    // It says that it does not know device memory, and is handed none.
    assert_eq!(outcome.stats().total("receives_native"), 0, "{outcome}");

    // Pairs of one node, and a ring over all.
    let cases = ["medium", "ring", "both_ways"];
    let outcome = quiet(job(mpi, 4, "p2p").args(&cases).on_two_nodes());
    let stats = outcome.stats();
    assert_eq!(stats.ranks(), 4, "{outcome}");
    for rank in 0..4 {
        assert!(stats.of_rank(rank, "sends_rts") > 0, "{outcome}");
    }
    // Rank 1 sends to rank 2, rank 3 to rank 0, 20 times; and every odd rank to its left in `ring` only.
    assert_eq!(stats.fallback("not_on_node"), 40, "{outcome}");
    assert!(stats.total("receives_direct") > 0, "{outcome}");
}

/// What an MPI library answers that knows device memory, put in the place of its own answer by the dynamic linker.
const KNOWS_CUDA: &str = r#"
#define _GNU_SOURCE
#include <link.h>
#include <string.h>
unsigned la_version(unsigned version) { return version; }
unsigned la_objopen(struct link_map *map, Lmid_t id, uintptr_t *cookie) { return LA_FLG_BINDTO | LA_FLG_BINDFROM; }
static int yes(void) { return 1; }
uintptr_t la_symbind64(Elf64_Sym *symbol, unsigned index, uintptr_t *from, uintptr_t *to, unsigned *flags, const char *name) {
    const char *plain = name + (name[0] == 'P');
    return strcmp(plain, "MPIX_Query_cuda_support") ? symbol->st_value : (uintptr_t)yes;
}
"#;

/// An MPI library that knows device memory, or of which that is said, receives into it what comes from another node; what
/// is sent there goes by host memory all the same.
#[test]
fn two_nodes_over_an_mpi_that_knows_cuda() {
    if !nodes_permitted() {
        return;
    }
    let check = |mpi: &Mpi, adjust: fn(Job) -> Job| {
        let job = job(mpi, 2, "p2p").args(&["ring", "both_ways", "pieces", "reallocated"]);
        let outcome = quiet(over_an_mpi_that_knows_cuda(adjust(job)).on_two_nodes());
        let stats = outcome.stats();
        // Of each call that sends and receives at once nine sizes, to the device from two kinds of memory.
        let calls = if mpi.family == Family::OpenMpi4 { 2 } else { 4 };
        let exchanged = 20 + 2 * 9 * calls;
        // And Irecv and Recv.
        let streamed = 64 + 60;
        for (rank, counter, count) in [
            (0, "receives_native", exchanged),
            (1, "receives_native", exchanged + streamed),
            (0, "sends_bcopy", exchanged + streamed),
            (1, "sends_bcopy", exchanged),
        ] {
            assert_eq!(stats.of_rank(rank, counter), count, "{counter}:\n{outcome}");
        }
        assert_eq!(stats.total("receives_bcopy"), 0, "{outcome}");
    };
    on("openmpi", |mpi| {
        check(mpi, |job| job.env("ANABRANCH_MPI_CUDA", "yes"))
    });
    // The one exports its answer under one name, the other under two.
    for name in ["openmpi5", "mpich5"] {
        on(name, |mpi| {
            check(mpi, |job| {
                let audit = support::shared_object(job.folder(), "audit", KNOWS_CUDA);
                job.env("LD_AUDIT", &audit)
            });
        });
    }
}

/// The kernel keeps the files of other processes from one rank, as it does where those are not dumpable. A rank may be late
/// as well: it enters the directory of the node when the other one is ready.
const KEPT_OUT: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int is_rank(const char *name) {
    const char *rank = getenv("OMPI_COMM_WORLD_RANK") ? getenv("OMPI_COMM_WORLD_RANK") : getenv("PMI_RANK");
    return rank && getenv(name) && !strcmp(rank, getenv(name));
}
int ftruncate64(int fd, off64_t bytes) {
    static int (*next)(int, off64_t);
    char link[64], path[64] = {0};
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    if (is_rank("LATE") && readlink(link, path, sizeof path - 1) > 0 && strstr(path, "anabranch")) usleep(700000);
    if (!next) next = dlsym(RTLD_NEXT, "ftruncate64");
    return next(fd, bytes);
}
ssize_t readlink(const char *path, char *to, size_t bytes) {
    static ssize_t (*next)(const char *, char *, size_t);
    const char *rest = strncmp(path, "/proc/", 6) ? "" : strchr(path + 6, '/');
    if (rest && !strncmp(rest, "/fd/", 4) && atoi(path + 6) > 0 && atoi(path + 6) != getpid() && is_rank("KEPT_OUT")) {
        errno = EACCES;
        return -1;
    }
    if (!next) next = dlsym(RTLD_NEXT, "readlink");
    return next(path, to, bytes);
}
"#;

/// One of two ranks cannot open the other's segment. The other can open the first one's, but its RTS would not be understood
/// there: messages go by value both ways, also if one rank enters the directory when the other one is ready.
fn one_sided_view(mpi: &Mpi) {
    for without_view in ["0", "1"] {
        let together = job(mpi, 2, "p2p").args(&["medium", "both_ways"]);
        check_one_sided(kept_out(together, without_view, ""));
        for late in ["0", "1"] {
            check_one_sided(kept_out(job(mpi, 2, "newcomer"), without_view, late));
        }
    }
    // Where both can, messages of the one that is late go by RTS once it has been met.
    let outcome = quiet(kept_out(job(mpi, 2, "newcomer"), "", "0"));
    let stats = outcome.stats();
    assert_eq!(stats.total("sends_device"), 40, "{outcome}");
    assert!(stats.total("sends_rts") >= 37, "{outcome}");
}

fn kept_out(job: Job, without_view: &str, late: &str) -> Job {
    let kept_out = support::shared_object(job.folder(), "kept_out", KEPT_OUT);
    let preload = format!("{kept_out}:{}", built().library.display());
    job.env("LD_PRELOAD", &preload)
        .env("KEPT_OUT", without_view)
        .env("LATE", late)
}

#[track_caller]
fn check_one_sided(job: Job) {
    let outcome = job.passes();
    outcome.stats().check_complete();
    all_by_value(&outcome, "not_registered");
    // Each by itself, as neither meets the other.
    for rank in 0..2 {
        let said = format!("anabranch[{rank}]: warn: of 2 ranks on this host only 1 can be");
        assert!(outcome.finished.stderr.contains(&said), "{outcome}");
    }
    let lines = outcome.finished.stderr.matches("anabranch[").count();
    assert_eq!(lines, 2, "{outcome}");
    assert_eq!(outcome.stats().ranks(), 2, "{outcome}");
}

/// Each rank sees its own GPU only, and maps the other's memory all the same.
fn hidden_gpus(mpi: &Mpi) {
    let outcome = quiet(own_gpu(job(mpi, 2, "p2p").args(&["medium", "both_ways"])));
    let stats = outcome.stats();
    for rank in 0..2 {
        assert!(stats.of_rank(rank, "receives_direct") > 0, "{outcome}");
    }
    assert_eq!(stats.total("mappings_refused"), 0, "{outcome}");
    assert_eq!(stats.fallback("mapping_failed"), 0, "{outcome}");
}

fn own_gpu(job: Job) -> Job {
    let own = "CUDA_VISIBLE_DEVICES=${OMPI_COMM_WORLD_RANK-$PMI_RANK} exec \"$@\"";
    job.ranks_under(&["sh", "-c", own, "sh"])
}

/// The driver opens no memory of the other rank's. It is asked so many times by each rank, and then no more.
fn refused(mpi: &Mpi, code: &str, attempts: u64) -> Outcome {
    let fault = format!("cuIpcOpenMemHandle:1+={code}");
    let job = job(mpi, 2, "p2p").args(&["medium", "both_ways"]);
    let outcome = own_gpu(job).env("SIMCUDA_FAULT", &fault).passes();
    let stats = outcome.stats();
    stats.check_complete();
    for rank in 0..2 {
        assert_eq!(
            stats.of_rank(rank, "mappings_refused"),
            attempts,
            "{outcome}"
        );
        assert!(
            stats.of_rank(rank, "receives_host_pipeline") > 0,
            "{outcome}"
        );
    }
    assert_eq!(stats.total("receives_direct"), 0, "{outcome}");
    assert!(
        stats.fallback("mapping_failed") > 20,
        "every message says why:\n{outcome}"
    );
    outcome
}

/// A driver that says that this pair of GPUs cannot be is asked once: a control group has taken a GPU away, say.
fn refused_for_good(mpi: &Mpi) {
    let outcome = refused(mpi, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", 1);
    // That is how the machine is, and no fault.
    assert!(!outcome.finished.stderr.contains("]: warn:"), "{outcome}");
}

/// Where it does not say so clearly, a second time.
#[test]
fn refused_for_no_clear_reason() {
    on("openmpi", |mpi| {
        refused(mpi, "CUDA_ERROR_UNKNOWN", 2);
    });
}

/// Two jobs of one user on a node do not meet.
#[test]
fn two_jobs_at_once() {
    for name in ["mpich", "openmpi"] {
        on(name, |mpi| {
            thread::scope(|scope| {
                let run = || quiet(job(mpi, 2, "traffic").args(&["rounds", "15"]));
                let other = scope.spawn(run);
                for outcome in [run(), other.join().expect("no panic")] {
                    assert_eq!(outcome.stats().ranks(), 2, "{outcome}");
                    assert!(outcome.stats().total("sends_rts") > 0, "{outcome}");
                }
            });
        });
    }
}

/// A `/dev/shm` of a container's usual size, of which the rings take nothing: they have no name there.
#[test]
fn little_shared_memory() {
    let own = own_mounts("mount -t tmpfs -o size=64m tmpfs /dev/shm");
    if !permitted(&own) {
        return;
    }
    on("mpich", |mpi| {
        let job = job(mpi, 2, "traffic")
            .args(&["rounds", "10"])
            .env("ANABRANCH_STAGING", "128M");
        let outcome = quiet(job.under(&words(&own)));
        assert!(
            outcome.stats().total("receives_host_pipeline") > 0,
            "{outcome}"
        );
    });
}

/// A `/dev/shm` in which the ranks cannot meet: each goes on by itself.
fn no_shared_memory(mpi: &Mpi, script: &str, why: &str) {
    let own = own_mounts(script);
    if !permitted(&own) {
        return;
    }
    let job = job(mpi, 2, "p2p").args(&["medium", "both_ways", "to_self"]);
    let outcome = job.native_over_tcp().under(&words(&own)).passes();
    let stats = outcome.stats();
    stats.check_complete();
    assert_eq!(stats.ranks(), 2, "{outcome}");
    assert!(stats.fallback("not_registered") > 0, "{outcome}");
    assert_eq!(stats.fallback("not_on_node"), 0, "{outcome}");
    // A rank still knows itself, and nobody else.
    assert!(stats.total("receives_self") > 0, "{outcome}");
    assert!(stats.total("receives_bcopy") > 0, "{outcome}");
    assert_eq!(stats.total("receives_direct"), 0, "{outcome}");
    assert_eq!(stats.total("mappings_opened"), 0, "{outcome}");
    let warnings: Vec<_> = outcome
        .finished
        .stderr
        .lines()
        .filter(|line| line.starts_with("anabranch[") && line.contains("]: warn: "))
        .collect();
    assert_eq!(warnings.len(), 2, "one of each rank:\n{outcome}");
    for warning in warnings {
        assert!(
            warning.contains("/dev/shm/anabranch-") && warning.contains(why),
            "{outcome}"
        );
    }
}

#[test]
fn shared_memory_that_is_full() {
    let fill = "mount -t tmpfs -o size=64k tmpfs /dev/shm && \
                head -c 65536 /dev/zero > /dev/shm/all && [ $(stat -f -c %a /dev/shm) = 0 ]";
    for name in WITHOUT_SHM {
        on(name, |mpi| no_shared_memory(mpi, fill, "No space left"));
    }
}

#[test]
fn shared_memory_that_is_read_only() {
    let lock = "mount -t tmpfs -o ro tmpfs /dev/shm";
    for name in WITHOUT_SHM {
        on(name, |mpi| no_shared_memory(mpi, lock, "Read-only"));
    }
}

/// There a rank over an MPI library that knows device memory leaves all to that.
#[test]
fn no_shared_memory_over_an_mpi_that_knows_cuda() {
    let own = own_mounts("mount -t tmpfs -o ro tmpfs /dev/shm");
    if !permitted(&own) {
        return;
    }
    on("openmpi", |mpi| {
        let job = over_an_mpi_that_knows_cuda(job(mpi, 2, "p2p").args(&["medium", "both_ways"]));
        let job = job.env("ANABRANCH_MPI_CUDA", "yes").native_over_tcp();
        let outcome = job.under(&words(&own)).passes();
        assert!(outcome.stats.is_none(), "{outcome}");
        let said = |line: &&str| line.contains("]: warn: ") && line.contains("/dev/shm/anabranch-");
        let lines: Vec<_> = outcome.finished.stderr.lines().filter(said).collect();
        let why = "Read-only file system";
        let so = "; every message of this rank stays native";
        assert_eq!(lines.len(), 2, "{outcome}");
        let are_right = lines
            .iter()
            .all(|line| line.contains(why) && line.ends_with(so));
        assert!(are_right, "{outcome}");
    });
}

/// It is full for one rank and not for the other one.
#[test]
fn shared_memory_of_one_rank_only() {
    let full = "[ ${OMPI_COMM_WORLD_RANK-$PMI_RANK} = 0 ] || mount -t tmpfs -o ro tmpfs /dev/shm";
    let own = own_mounts(&format!("{{ {full}; }}"));
    if !permitted(&own_mounts("mount -t tmpfs tmpfs /mnt")) {
        return;
    }
    on("openmpi", |mpi| {
        let job = job(mpi, 2, "p2p").args(&["medium", "both_ways"]);
        let outcome = job.native_over_tcp().ranks_under(&words(&own)).passes();
        outcome.stats().check_complete();
        all_by_value(&outcome, "not_registered");
    });
}

/// Little memory may be locked, and the driver pins none of the program's.
#[test]
fn no_locked_memory() {
    let limit = "ulimit -l 64 && exec \"$@\"";
    for name in ["openmpi", "mpich"] {
        on(name, |mpi| {
            let outcome = job(mpi, 2, "traffic")
                .args(&["rounds", "10"])
                .env(
                    "SIMCUDA_FAULT",
                    "cuMemHostRegister:1+=CUDA_ERROR_OUT_OF_MEMORY",
                )
                .ranks_under(&["sh", "-c", limit, "sh"])
                .passes();
            outcome.stats().check_complete();
            assert!(
                outcome.stats().total("receives_host_pipeline") > 0,
                "{outcome}"
            );
        });
    }
}

/// A driver whose pinned memory counts as locked, and little that may be locked, or some: what cannot be pinned is used all the
/// same, each rank says so once, and no more is pinned than may be. Without a limit nothing is said.
#[test]
fn locked_memory_is_limited() {
    on("mpich", |mpi| {
        let pinned = |outcome: &Outcome| {
            let of = |rank| outcome.report.pinned_bytes_max(outcome.stats().pid(rank));
            of(0).max(of(1))
        };
        let under = |kib: &str, memlock: &str| {
            let limit = format!("ulimit -l {kib} && exec \"$@\"");
            let outcome = job(mpi, 2, "traffic")
                .args(&["rounds", "10"])
                .env("SIMCUDA_MEMLOCK", memlock)
                .ranks_under(&["sh", "-c", &limit, "sh"])
                .passes();
            let stats = outcome.stats();
            stats.check_complete();
            assert!(stats.total("receives_host_pipeline") > 0, "{outcome}");
            let said = outcome.finished.stderr.lines();
            let lines = said.filter(|line| line.contains("of host memory cannot be pinned: "));
            let lines = lines.count();
            let refused = [0, 1].map(|rank| stats.of_rank(rank, "pinning_refused"));
            (lines, refused, outcome)
        };
        let (lines, refused, outcome) = under("64", "0");
        assert_eq!((lines, refused), (0, [0, 0]), "{outcome}");
        let most = pinned(&outcome);
        assert!(most > 4 << 20, "{most} {outcome}");
        let (lines, refused, outcome) = under("64", "1");
        let told = refused.iter().filter(|refused| **refused > 0).count();
        assert!(told > 0 && lines == told, "{refused:?} {outcome}");
        assert!(pinned(&outcome) <= 64 << 10, "{outcome}");
        // Room for what is pinned in pieces, but not for the staging; if a process may lock as much here.
        let hard = Command::new("sh").args(["-c", "ulimit -H -l"]).output();
        let hard = String::from_utf8_lossy(&hard.expect("sh").stdout).into_owned();
        if hard.trim().parse().is_ok_and(|kib: u64| kib < 4096) {
            return;
        }
        let (lines, refused, outcome) = under("4096", "1");
        let told = refused.iter().filter(|refused| **refused > 0).count();
        assert!(told > 0 && lines == told, "{refused:?} {outcome}");
        let pinned = pinned(&outcome);
        assert!(pinned > 64 << 10 && pinned <= 4 << 20, "{pinned} {outcome}");
    });
}

/// Each rank is in a container of its own on one node, and cannot see the other one's processes.
fn containers(mpi: &Mpi, script: &str) {
    let container = own_container(script);
    if !permitted(&container) {
        return;
    }
    let job = job(mpi, 2, "p2p").args(&["medium", "both_ways"]);
    let outcome = job.native_over_tcp().ranks_under(&words(&container));
    let outcome = outcome.passes();
    outcome.stats().check_complete();
    assert_eq!(outcome.stats().ranks(), 2, "{outcome}");
    all_by_value(&outcome, "not_registered");
    // Each says so once.
    let said = outcome.finished.stderr.lines();
    let said: Vec<&str> = said.filter(|line| line.starts_with("anabranch[")).collect();
    assert_eq!(said.len(), 2, "{outcome}");
    for line in said {
        let is_right = line.contains("of 2 ranks on this host only 1 can be reached")
            && line.contains("one PID namespace");
        assert!(is_right, "{outcome}");
    }
}

#[test]
fn two_containers() {
    for name in OVER_TCP {
        on(name, |mpi| containers(mpi, "mount -t tmpfs tmpfs /dev/shm"));
    }
}

/// Containers that share the host's `/dev/shm` share the simulated GPUs with it: pids alone tell them apart.
#[test]
fn two_containers_with_the_hosts_shared_memory() {
    for name in OVER_TCP {
        on(name, |mpi| containers(mpi, "true"));
    }
}
