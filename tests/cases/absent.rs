//! Functions that the MPI library or the driver lacks, one at a time: what needs one is off, the rest works, and messages arrive.

use crate::support::{self, job, on, over_an_mpi_that_knows_cuda};
use anabranch_tests::{built, scratch_folder, Outcome, Stats};
use std::fs;
use std::path::Path;
use xtask::mpi::Mpi;

/// Keeps the function $HIDE names, in each of its versions, from the library, whose every look-up it notes in $ASKED. The
/// program and the MPI library find what they ask for: the call is passed on as it came, so that the C library sees who calls.
const LOADER: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
static size_t base(const char *name) {
    size_t n = strlen(name);
    return n > 3 && !strcmp(name + n - 3, "_v2") ? n - 3 : n;
}
__attribute__((optimize("O2"))) void *dlsym(void *library, const char *name) {
    static void *(*real)(void *, const char *);
    Dl_info from;
    const char *hidden = getenv("HIDE"), *asked = getenv("ASKED");
    if (!real) *(void **)&real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.34");
    if (!real) *(void **)&real = dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    if (dladdr(__builtin_return_address(0), &from) && strstr(from.dli_fname, "libanabranch")) {
        FILE *file = asked ? fopen(asked, "a") : 0;
        if (file) { fprintf(file, "%s\n", name); fclose(file); }
        if (hidden && base(hidden) == base(name) && !memcmp(hidden, name, base(name))) return 0;
    }
    return real(library, name);
}
"#;

/// The job of two ranks over an MPI library that knows CUDA, so that its messages arrive without this library, too.
fn run(mpi: &Mpi, loader: &str, variable: &str, value: &str) -> Outcome {
    let preload = format!("{loader}:{}", built().library.display());
    let job = over_an_mpi_that_knows_cuda(job(mpi, 2, "absent"));
    job.env("LD_PRELOAD", &preload)
        .env(variable, value)
        .passes()
}

/// The number behind a word that the program has printed.
fn printed(outcome: &Outcome, word: &str) -> u64 {
    let line = |line: &str| line.strip_prefix(word)?.trim().parse().ok();
    let found = outcome.finished.stdout.lines().find_map(line);
    found.unwrap_or_else(|| panic!("no {word}: {outcome}"))
}

/// Hides each function whose name begins with this that the library looks up in such a job; how many those are.
fn each(mpi: &Mpi, prefix: &str, is_fine: impl Fn(&str, &Outcome)) -> usize {
    let folder = scratch_folder("absent");
    let loader = support::shared_object(&folder, "loader", LOADER);
    let asked = folder.join("asked");
    run(mpi, &loader, "ASKED", &asked.display().to_string());
    let names = names(&asked, prefix);
    for name in &names {
        is_fine(name, &run(mpi, &loader, "HIDE", name));
    }
    let _ = fs::remove_dir_all(folder);
    names.len()
}

/// Without suffixes, each once. Every program calls MPI_Finalize.
fn names(asked: &Path, prefix: &str) -> Vec<String> {
    let text = fs::read_to_string(asked).expect("what was looked up");
    let named = text.lines().filter(|name| name.starts_with(prefix));
    let base = |name: &str| name.strip_suffix("_v2").unwrap_or(name).to_owned();
    let mut names: Vec<String> = named.map(base).collect();
    names.retain(|name| name != "PMPI_Finalize");
    names.sort();
    names.dedup();
    names
}

/// Every message from a device was taken, and all of its payload has come, with no word of it.
fn is_at_work(outcome: &Outcome) -> &Stats {
    assert!(!outcome.finished.stderr.contains("anabranch"), "{outcome}");
    takes_all(outcome)
}

fn takes_all(outcome: &Outcome) -> &Stats {
    let stats = outcome.stats();
    stats.check_complete();
    let sent = printed(outcome, "from devices");
    assert!(sent > 40, "{outcome}");
    assert_eq!(stats.total("sends_device"), sent, "{outcome}");
    stats
}

/// Nothing was taken, and why is said in so many lines: by each rank what is of its own node, by the first what is of the job.
fn is_inert(outcome: &Outcome, said: &str, count: usize) {
    let idle = outcome.stats.as_ref().is_none_or(Stats::is_idle);
    assert!(idle, "{outcome}");
    let stderr = outcome.finished.stderr.lines();
    let lines: Vec<&str> = stderr.filter(|line| line.contains("anabranch")).collect();
    assert_eq!(lines.len(), count, "{outcome}");
    for line in lines {
        assert!(line.contains(said), "{said}: {outcome}");
        assert!(line.contains("every message stays native"), "{outcome}");
    }
}

/// UCX's `sbrk` sets the break to what it has just read of it, also where it is only asked: if another thread's `malloc` moves it
/// in between, memory of the program's is gone.
const BREAK: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
void *sbrk(intptr_t bytes) {
    static void *(*real)(intptr_t);
    Dl_info from;
    if (dladdr(__builtin_return_address(0), &from) && strstr(from.dli_fname, "libanabranch")) {
        fputs("the library calls sbrk\n", stderr);
        abort();
    }
    if (!real) *(void **)&real = dlvsym(RTLD_NEXT, "sbrk", "GLIBC_2.2.5");
    return real(bytes);
}
"#;

/// Where the C library does not say where the heap ends, only the kernel is asked.
#[test]
fn the_program_break() {
    let folder = scratch_folder("break");
    let loader = support::shared_object(&folder, "loader", LOADER);
    let asked = support::shared_object(&folder, "asked", BREAK);
    for name in ["mpich", "openmpi"] {
        on(name, |mpi| {
            let before = format!("{asked}:{loader}");
            let outcome = run(mpi, &before, "HIDE", "__curbrk");
            goes_directly(name, &outcome);
        });
    }
    let _ = fs::remove_dir_all(folder);
}

/// What the engine calls for messages of other functions: without it, it does nothing.
const ENGINE_NEEDS: [&str; 24] = [
    "PMPI_Bsend",
    "PMPI_Comm_create_keyval",
    "PMPI_Comm_rank",
    "PMPI_Comm_set_attr",
    "PMPI_Get_elements_x",
    "PMPI_Grequest_complete",
    "PMPI_Grequest_start",
    "PMPI_Ibsend",
    "PMPI_Improbe",
    "PMPI_Imrecv",
    "PMPI_Iprobe",
    "PMPI_Irecv",
    "PMPI_Isend",
    "PMPI_Recv",
    "PMPI_Request_get_status",
    "PMPI_Sendrecv",
    "PMPI_Status_set_cancelled",
    "PMPI_Status_set_elements_x",
    "PMPI_Test",
    "PMPI_Type_dup",
    "PMPI_Type_get_extent",
    "PMPI_Type_get_true_extent",
    "PMPI_Type_size_x",
    "PMPI_Wait",
];

/// What lacks this function does without.
fn goes_directly(name: &str, outcome: &Outcome) {
    let stats = is_at_work(outcome);
    assert!(stats.total("sends_rts") > 20, "{name}: {outcome}");
    assert!(stats.total("receives_direct") > 0, "{name}: {outcome}");
}

#[test]
fn each_function_of_the_mpi_library() {
    on("mpich", |mpi| {
        let count = each(mpi, "PMPI", |name, outcome| match name {
            "PMPI_Get_library_version" => is_inert(outcome, "is not a known one", 2),
            _ if ENGINE_NEEDS.contains(&name) => {
                // Without its rank, each takes itself for the first.
                let count = if name == "PMPI_Comm_rank" { 2 } else { 1 };
                let said = format!("the MPI library lacks {name}, ");
                is_inert(outcome, &said, count);
            }
            // Nothing is known of any type then, not even that its bytes lie side by side.
            "PMPI_Type_get_envelope" => {
                let stats = is_at_work(outcome);
                assert_eq!(stats.total("sends_rts"), 0, "{name}: {outcome}");
                assert_eq!(
                    stats.total("sends_bcopy"),
                    stats.total("sends_device"),
                    "{name}: {outcome}"
                );
            }
            _ => goes_directly(name, outcome),
        });
        // Those of the list, and others that messages can do without.
        assert!(count > 35, "{count} functions");
    });
}

#[test]
fn each_function_of_the_driver() {
    const BASIC: [&str; 11] = [
        "cuCtxGetCurrent",
        "cuCtxPopCurrent",
        "cuCtxPushCurrent",
        "cuEventCreate",
        "cuEventDestroy",
        "cuEventQuery",
        "cuEventRecord",
        "cuMemcpyAsync",
        "cuPointerGetAttributes",
        "cuStreamCreate",
        "cuStreamQuery",
    ];
    on("mpich", |mpi| {
        let count = each(mpi, "cu", |name, outcome| match name {
            _ if BASIC.contains(&name) => {
                is_inert(outcome, &format!("libcuda.so.1 lacks {name}"), 2)
            }
            // What is not exported or not mapped comes through host memory.
            "cuIpcGetMemHandle" | "cuIpcOpenMemHandle" => {
                let stats = is_at_work(outcome);
                assert_eq!(stats.total("receives_direct"), 0, "{name}: {outcome}");
                assert!(
                    stats.total("receives_host_pipeline") > 5,
                    "{name}: {outcome}"
                );
            }
            // Nothing is pinned, which each rank says once.
            "cuMemHostRegister" => {
                let stats = takes_all(outcome);
                assert!(stats.total("receives_direct") > 0, "{name}: {outcome}");
                assert!(stats.total("pinning_refused") > 0, "{name}: {outcome}");
                let lines = outcome.finished.stderr.lines();
                let said = lines.filter(|line| line.contains("anabranch"));
                let said: Vec<&str> = said.collect();
                assert!(said.len() <= 2, "{name}: {outcome}");
                let expected = "cannot be pinned: the cuda driver has no cuMemHostRegister_v2";
                assert!(
                    said.iter().all(|line| line.contains(expected)),
                    "{name}: {outcome}"
                );
            }
            _ => goes_directly(name, outcome),
        });
        assert!(count > 60, "{count} functions");
    });
}
