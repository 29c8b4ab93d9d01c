//! Wrong input of every kind: a line that says what to do, or a fallback; never a crash or a wrong result.

use crate::support::{self, anabranch, job, on, on_every_mpi};
use anabranch_tests::ranks::{self, Rank};
use anabranch_tests::{built, run_bounded, scratch_folder, solver, Finished};
use std::collections::BTreeSet;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use xtask::mpi::Mpi;

on_every_mpi!(forged_descriptors);

/// What looks like a descriptor and is none is the user's data.
fn forged_descriptors(mpi: &Mpi) {
    for roles in ["D", "DH", "HD"] {
        let outcome = job(mpi, 2, "forged").roles(roles).passes();
        assert!(outcome.stats().total("bad_rts") > 0, "{outcome}");
        assert_eq!(outcome.stats().total("panics"), 0, "{outcome}");
    }
}

/// It failed, and said why in one line that names the culprit.
#[track_caller]
fn refused(finished: &Finished, culprit: &str) {
    assert!(finished.code.is_some_and(|code| code != 0), "{finished:?}");
    let lines: Vec<&str> = finished
        .stderr
        .lines()
        .filter(|line| !line.trim().is_empty())
        .collect();
    assert_eq!(lines.len(), 1, "{finished:?}");
    assert!(lines[0].contains(culprit), "{finished:?}");
    assert_eq!(finished.stdout, "", "{finished:?}");
}

#[test]
fn more_ranks_than_simulated_gpus() {
    on("openmpi", |_| {
        let finished = anabranch(
            &[
                "run",
                "--sim",
                "narval",
                "--mpi",
                "openmpi",
                "-np",
                "5",
                "--",
                "/bin/true",
            ],
            &[],
        );
        refused(&finished, "5");
        assert!(finished.stderr.contains('4'), "{finished:?}");
    });
}

/// Counters that cannot be written cost the program nothing, and a line names the file.
#[test]
fn statistics_that_cannot_be_written() {
    on("openmpi", |mpi| {
        let file = "/no/such/folder/stats.json";
        let outcome = job(mpi, 2, "p2p").env("ANABRANCH_STATS", file).run();
        outcome.check_passed();
        let lines = outcome
            .finished
            .stderr
            .lines()
            .filter(|line| line.contains(file));
        let lines: Vec<&str> = lines.collect();
        assert_eq!(lines.len(), 1, "{outcome}");
        assert!(
            lines[0].contains("name a file that can be written"),
            "{outcome}"
        );
    });
}

/// The launcher of another MPI starts each process as a world of its own. One whose MPI does not know CUDA is not given device
/// addresses for that.
#[test]
fn the_launcher_of_another_mpi() {
    on("openmpi", |program_of| {
        on("mpich", |launcher_of| {
            let folder = scratch_folder("launcher");
            let mut command = Command::new(&launcher_of.mpirun);
            command
                .args(["-np", "2"])
                .args([&built().command, Path::new("exec"), &solver(program_of)])
                .args(["--size", "128x128", "--iterations", "5"])
                .env("LD_LIBRARY_PATH", &built().simcuda)
                .env("SIMCUDA_TOPOLOGY", "narval")
                .env("ANABRANCH_LOG", "info")
                .env_remove("LD_PRELOAD");
            let finished = run_bounded(&mut command, &folder, Duration::from_secs(120));
            assert_eq!(finished.code, Some(0), "{finished:?}");
            let fields = finished.stdout.matches("5 done").count();
            assert_eq!(fields, 2, "{finished:?}");
            let said = "rank 0 of its world, but rank 1 of the launcher's; all device buffers";
            assert!(finished.stderr.contains(said), "{finished:?}");
            let _ = fs::remove_dir_all(folder);
        });
    });
}

#[test]
#[allow(
    clippy::too_many_lines,
    reason = "a table of bad files and what is said"
)]
fn topology_files_that_are_wrong() {
    on("openmpi", |_| {
        let folder = scratch_folder("topology");
        let good = fs::read_to_string(
            xtask::layout::repository_root().join("simcuda/topologies/narval.toml"),
        )
        .expect("narval");
        let change = |from: &str, to: &str| {
            assert!(good.contains(from), "{from}");
            good.replacen(from, to, 1)
        };
        // What is wrong, the field that the line names, and what it says is to be done.
        let cases = [
            (
                "negative",
                negative_figure(&good),
                "link between GPU 0 and 1: gb_s is -",
                "must be a positive rate in GB/s",
            ),
            (
                "missing",
                missing_figure(&good),
                "[[link]]: missing field `gb_s`",
                "add it",
            ),
            (
                "unlinked",
                missing_link(&good),
                "link between GPU 0 and 2 is missing",
                "add a [[link]]",
            ),
            (
                "no-links",
                change("\nlinks = 4", "\nlinks = 0"),
                "link between GPU 0 and 1: links is 0",
                "must be 1 to",
            ),
            (
                "minus-one",
                change("\nlinks = 4", "\nlinks = -1"),
                "links of [[link]]: invalid value",
                "correct it",
            ),
            (
                "backwards",
                change("\nasync_us = ", "\nasync_us = -"),
                "calls.async_us is -",
                "must be 0 or more",
            ),
            (
                "text",
                change("\nsetup_us = ", "\nsetup_us = true #"),
                "setup_us of [copy]: invalid type",
                "correct it",
            ),
            (
                "unknown",
                change("\nsetup_us = ", "\nset_up_us = "),
                "set_up_us of [copy]: unknown field",
                "expected one of `setup_us`",
            ),
            (
                "nobody",
                change("\ncount = 4", "\ncount = 0"),
                "gpu.count is 0",
                "must be 1 to",
            ),
            (
                "cut",
                good[..good.len() / 2].to_owned() + "\n[[",
                "[[",
                "correct it",
            ),
            ("empty", String::new(), "missing field `name`", "add it"),
        ];
        for (name, text, field, remedy) in cases {
            let file = folder.join(name).with_extension("toml");
            let file = file.display().to_string();
            fs::write(&file, text).expect("topology");
            let finished = anabranch(
                &[
                    "run",
                    "--sim",
                    &file,
                    "--mpi",
                    "openmpi",
                    "-np",
                    "2",
                    "--",
                    "/bin/true",
                ],
                &[],
            );
            refused(&finished, &file);
            for part in [field, remedy] {
                assert!(finished.stderr.contains(part), "{part}: {finished:?}");
            }
            assert!(!finished.stderr.contains("lacks"), "{finished:?}");
            // Who looks at the same file without the simulator is told alike, but for fields that the planner does not know.
            if name != "unknown" {
                let finished = anabranch(&["topo", "--topology", &file], &[]);
                refused(&finished, &file);
                assert!(finished.stderr.contains(field), "{field}: {finished:?}");
            }
        }
        let finished = anabranch(
            &[
                "run",
                "--sim",
                "atlantis",
                "--mpi",
                "openmpi",
                "-np",
                "2",
                "--",
                "/bin/true",
            ],
            &[],
        );
        refused(&finished, "atlantis");
        let _ = fs::remove_dir_all(folder);
    });
}

/// The first link's bandwidth, made negative.
fn negative_figure(text: &str) -> String {
    let (before, links) = text.split_once("[[link]]").expect("a topology with links");
    format!(
        "{before}[[link]]{}",
        links.replacen("gb_s = ", "gb_s = -", 1)
    )
}

/// The first link without its bandwidth.
fn missing_figure(text: &str) -> String {
    let (before, links) = text.split_once("[[link]]").expect("a topology with links");
    format!(
        "{before}[[link]]{}",
        links.replacen("gb_s = ", "# gb_s = ", 1)
    )
}

/// Without the second link.
fn missing_link(text: &str) -> String {
    let mut sections = text.split("[[link]]");
    let kept = sections.by_ref().take(2).collect::<Vec<_>>();
    let rest = sections.skip(1).collect::<Vec<_>>();
    [kept, rest].concat().join("[[link]]")
}

/// More GPUs than the topology has: said once, with what to do, whoever finds it out.
#[test]
fn more_gpus_than_the_topology_has() {
    on("openmpi", |mpi| {
        let run = |gpus: &str| {
            let node = ["run", "--sim", "narval", "--gpus", gpus, "--mpi", "openmpi"];
            anabranch(&[&node[..], &["-np", "2", "--", "/bin/true"]].concat(), &[])
        };
        let finished = run("9");
        refused(&finished, "--sim narval");
        let said = "has 4 GPUs, 9 asked for (--gpus, SIMCUDA_GPUS): ask for 1 to 4, or take a topology with more";
        assert!(finished.stderr.contains(said), "{finished:?}");
        let finished = run("1");
        refused(&finished, "2 ranks");
        for remedy in ["use -np 1", "--gpus 2", "--oversubscribe-gpus"] {
            assert!(finished.stderr.contains(remedy), "{finished:?}");
        }
        // The driver in a program, with nobody between.
        let outcome = job(mpi, 1, "p2p").env("SIMCUDA_GPUS", "9").run();
        let stderr = &outcome.finished.stderr;
        let prefixed = |line: &&str| line.starts_with("simcuda: topology \"");
        assert_eq!(stderr.lines().filter(prefixed).count(), 1, "{outcome}");
        assert!(!stderr.contains("simcuda: simcuda:"), "{outcome}");
    });
}

/// What a command writes to standard error, write by write: a socket of datagrams keeps them apart, where a pipe does not.
fn writes_to_stderr(command: &mut Command) -> Vec<String> {
    let (ours, theirs) = UnixDatagram::pair().expect("a pair of sockets");
    ours.set_read_timeout(Some(Duration::from_millis(100)))
        .expect("a timeout");
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(OwnedFd::from(theirs))
        .spawn()
        .expect("started");
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut writes = Vec::new();
    let mut buffer = vec![0; 1 << 16];
    loop {
        let has_ended = child.try_wait().expect("waited for").is_some();
        match ours.recv(&mut buffer) {
            Ok(n) => writes.push(String::from_utf8_lossy(&buffer[..n]).into_owned()),
            Err(_) if has_ended => return writes,
            Err(_) if Instant::now() < deadline => {}
            Err(_) => {
                let _ = child.kill();
                let _ = child.wait();
                panic!("{command:?} does not end: {writes:?}");
            }
        }
    }
}

/// Ranks share their launcher's standard error: what is written in pieces has another's text between them.
#[test]
fn a_line_on_stderr_is_one_write() {
    on("mpich", |mpi| {
        let solve = solver(mpi);
        let solve = solve.to_str().expect("a path of UTF-8");
        let options = [
            ("LD_LIBRARY_PATH", built().simcuda.to_str().expect("UTF-8")),
            ("SIMCUDA_TOPOLOGY", "narval"),
            ("ANABRANCH_LOG", "trace"),
            ("ANABRANCH_STATS", "1"),
            ("ANABRANCH_CHUNKS", "nonsense"),
        ];
        let too_many = [("SIMCUDA_GPUS", "9")];
        let missing = [("ANABRANCH_LIBRARY", "/no/such/library.so")];
        let small = ["--size", "64x64", "--iterations", "2"];
        // Arguments, variables, and how some of the lines begin.
        type Case<'a> = (&'a [&'a str], &'a [(&'a str, &'a str)], &'a [&'a str]);
        let cases: [Case; 6] = [
            (
                &["exec", solve, small[0], small[1], small[2], small[3]],
                &[],
                &["anabranch[0]: ", "anabranch: warn: ANABRANCH_CHUNKS"],
            ),
            (
                &["exec", solve, small[0], small[1]],
                &too_many,
                &["simcuda: topology", "jacobi: "],
            ),
            (&["exec", solve, "--type", "half"], &[], &["jacobi: "]),
            (&["exec", solve], &missing, &["anabranch: "]),
            (&["exec", "/no/such/program"], &[], &["anabranch: "]),
            (&["run", "--no-such-option"], &[], &["error: "]),
        ];
        for (arguments, environment, expected) in cases {
            let mut command = Command::new(&built().command);
            command
                .args(arguments)
                .envs(options)
                .envs(environment.iter().copied())
                .env_remove("LD_PRELOAD");
            let writes = writes_to_stderr(&mut command);
            for start in expected {
                let found = writes.iter().any(|write| write.starts_with(start));
                assert!(found, "{command:?}: no {start:?} in {writes:#?}");
            }
            for write in &writes {
                assert!(write.ends_with('\n'), "{command:?}: {writes:#?}");
            }
        }
    });
}

#[test]
fn a_library_that_does_not_exist() {
    let finished = anabranch(
        &["exec", "/bin/true"],
        &[("ANABRANCH_LIBRARY", "/no/such/libanabranch.so")],
    );
    refused(&finished, "/no/such/libanabranch.so");
}

#[test]
fn a_command_that_does_not_exist() {
    let finished = anabranch(&["exec", "/no/such/program"], &[]);
    assert_eq!(finished.code, Some(127), "{finished:?}");
    refused(&finished, "/no/such/program");
}

/// Directories of jobs in /dev/shm that no process has mapped or locked. Those of jobs that begin while this looks are not
/// meant: a file is there a moment before its job has mapped it.
pub(crate) fn abandoned() -> BTreeSet<PathBuf> {
    let before = unheld();
    std::thread::sleep(Duration::from_millis(500));
    unheld().intersection(&before).cloned().collect()
}

fn unheld() -> BTreeSet<PathBuf> {
    let is_ours = |path: &PathBuf| {
        let name = path.file_name().map(|name| name.to_string_lossy());
        name.is_some_and(|name| name.starts_with("anabranch-"))
    };
    let paths = |folder| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path())
    };
    // Listed before processes are looked at: a job that begins in between is not among them.
    let mut ours: BTreeSet<PathBuf> = paths("/dev/shm").filter(is_ours).collect();
    for process in paths("/proc") {
        if let Ok(maps) = fs::read_to_string(process.join("maps")) {
            ours.retain(|path| !maps.contains(&path.display().to_string()));
        }
    }
    // A killed rank gives up its memory first, which may take long, and its files and their locks after that.
    let locks = fs::read_to_string("/proc/locks").unwrap_or_default();
    ours.retain(|path| fs::metadata(path).is_ok_and(|about| !is_locked(&locks, about.ino())));
    ours
}

/// Whether some process holds a lock on the file with this inode. Lines are such as
/// `1: FLOCK  ADVISORY  READ 4711 00:1c:42 0 EOF`.
fn is_locked(locks: &str, inode: u64) -> bool {
    let of = |line: &str| {
        line.split_whitespace()
            .nth(5)?
            .rsplit(':')
            .next()?
            .parse()
            .ok()
    };
    locks.lines().any(|line| of(line) == Some(inode))
}

/// Kills a job in which the first rank takes part, and the second does or does not. What they shared by then: how many
/// segments, and the names of their directory.
fn killed_with(mpi: &Mpi, second_takes_part: bool) -> (usize, BTreeSet<PathBuf>) {
    const PATIENCE: Duration = Duration::from_secs(60);
    built(); // or the ranks would be waited for until it is
    let mut job = job(mpi, 2, "deadlock").args(&["acquainted", "unreceived_host"]);
    if !second_takes_part {
        job = job.without_preload_on(1).roles("DH");
    }
    let folder = job.folder().to_path_buf();
    let (outcome, seen) = std::thread::scope(|scope| {
        let killer = scope.spawn(move || {
            let find = |number| ranks::find(&folder, "deadlock", number, PATIENCE);
            let pair = [find(0)?, find(1)?];
            let deadline = Instant::now() + PATIENCE;
            // Once the first case is over both have come through MPI_Init, and the second takes seconds.
            let is_on = || {
                let said = fs::read_to_string(folder.join("stdout"));
                said.is_ok_and(|text| text.contains("ok acquainted"))
            };
            while !is_on() && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(2));
            }
            let segments = pair.iter().filter(|rank| rank.segment().is_some()).count();
            let names = pair.iter().flat_map(Rank::named_files).collect();
            pair.iter().for_each(|rank| rank.signal(libc::SIGKILL));
            Some((segments, names))
        });
        (job.run(), killer.join().expect("no panic"))
    });
    let finished = &outcome.finished;
    assert!(finished.code.is_some_and(|code| code != 0), "{outcome}");
    assert_eq!(finished.left_behind, 0, "{outcome}");
    seen.unwrap_or_else(|| panic!("the ranks were not found:\n{outcome}"))
}

/// Ranks that are killed leave at most a page in /dev/shm, and the next job takes it away.
#[test]
fn a_dead_job_leaves_nothing_to_the_next() {
    on("mpich", |mpi| {
        // Segments have no names; nor has the directory where all that the launcher has counted are registered.
        assert_eq!(killed_with(mpi, true), (2, BTreeSet::new()));
        // One that waits for a rank which never registers has, and none of its ranks is left to remove it.
        let (segments, left) = killed_with(mpi, false);
        assert_eq!((segments, left.len()), (1, 1), "{left:?}");
        // It is a page, if no other test's job has taken it away already.
        let found = left.iter().filter_map(|path| fs::metadata(path).ok());
        assert!(found.map(|about| about.len()).all(|bytes| bytes == 4096));
        job(mpi, 2, "p2p")
            .args(&["medium", "pieces"])
            .passes()
            .stats()
            .check_complete();
        let still: Vec<_> = left.iter().filter(|path| path.exists()).collect();
        assert!(still.is_empty(), "{still:?}");
    });
}

/// A C library that refuses memory for the segments of ranks in pieces of more than $ROOM bytes.
const SCARCE_MEMORY: &str = r#"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
int posix_fallocate(int file, off_t offset, off_t bytes) {
    char link[40], name[40] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    int is_segment = readlink(link, name, sizeof name - 1) > 0 && strstr(name, "memfd:anabranch");
    if (is_segment && bytes > atoll(getenv("ROOM"))) return ENOSPC;
    return syscall(SYS_fallocate, file, 0, offset, bytes) ? errno : 0;
}
"#;

/// Memory to share runs out: less staging or values, said in a line, and never a SIGBUS.
#[test]
fn no_room_in_shared_memory() {
    on("mpich", |mpi| {
        let folder = scratch_folder("scarce");
        let scarce = support::shared_object(&folder, "scarce", SCARCE_MEMORY);
        let preload = format!("{scarce}:{}", built().library.display());
        let with_room = |room: u64| {
            job(mpi, 2, "p2p")
                .args(&["medium"])
                .env("LD_PRELOAD", &preload)
                .env("ROOM", &room.to_string())
                .env("ANABRANCH_STAGING", "16G")
                .passes()
        };
        let scarce = with_room(64 << 20);
        scarce.stats().check_complete();
        assert!(
            scarce.stats().total("receives_host_pipeline") > 0,
            "{scarce}"
        );
        // Of the rank that sends: the other one needs no staging.
        for part in [
            "anabranch[0]: warn: no memory for staging of 16384 chunks",
            ": 64 of them are used",
        ] {
            assert!(scarce.finished.stderr.contains(part), "{part}: {scarce}");
        }
        let none = with_room(16 << 10);
        none.stats().check_complete();
        assert_eq!(none.stats().total("sends_rts"), 0, "{none}");
        assert!(none.stats().fallback("out_of_memory") > 0, "{none}");
        let said = "no memory for staging (No space left on device";
        assert!(none.finished.stderr.contains(said), "{none}");
        let _ = fs::remove_dir_all(folder);
    });
}
