//! `include/anabranch.h`: what a program is told of the library, of its counters and of each message.

use crate::support::{job, knows_cuda, model, natively, on, on_every_mpi};
use anabranch_tests::scratch_folder;
use std::process::Command;
use xtask::mpi::Mpi;

on_every_mpi!(interface);

/// The program itself compares what it is told with what it has done; here the counters are seen to agree with that.
fn interface(mpi: &Mpi) {
    let outcome = job(mpi, 2, "interface").passes();
    let stats = outcome.stats();
    stats.check_complete();
    for (counter, messages) in [
        // Two alone, two persistent ones, two of Sendrecv, one after the library stood aside, and two by the simulated clock.
        ("receives_direct", 9),
        ("receives_self", 2),
        // From pool memory, and into host memory.
        ("receives_gpu_pipeline", 1),
        ("receives_host_pipeline", 1),
        // One alone, and one before the library stood aside.
        ("receives_eager", 2),
        // Four of the warm-up and one that is buffered; two that have no bytes are none to send.
        ("receives_bcopy", 7),
        ("sends_bcopy", 5),
    ] {
        assert_eq!(stats.total(counter), messages, "{counter}:\n{outcome}");
    }
    assert_eq!(stats.fallback("buffered"), 1, "{outcome}");
    assert_eq!(stats.fallback("not_exportable"), 1, "{outcome}");
}

/// Of a message that is split each byte is told on its path, on both sides.
#[test]
fn the_parts_of_messages_that_are_split() {
    for name in ["openmpi", "mpich5"] {
        on(name, |mpi| {
            // Over relays, and through host memory.
            for (topology, paths, split) in [
                ("beluga", "direct,relay,host", "3"),
                ("beluga", "direct,relay", "1"),
                ("hgx-h200", "direct,host", "2"),
            ] {
                let job = job(mpi, 2, "interface").args(&["split"]);
                job.env("SIMCUDA_TOPOLOGY", topology)
                    .env("ANABRANCH_MODEL", &model(topology).display().to_string())
                    .env("ANABRANCH_PATHS", paths)
                    .env("SPLIT", split)
                    .passes();
            }
        });
    }
}

/// A program that calls each function in each way that the header shows.
const EACH: &str = r#"
#include "anabranch.h"
#include <stdio.h>
int main(void) {
    anabranch_message m;
    int request = 0;
    unsigned long sum = 0;
    const char *(*by_number)(unsigned) = ANABRANCH_FUNCTION(anabranch_counter_name);
    if (by_number) puts(by_number(0));
    puts(ANABRANCH_CALL("none", anabranch_version));
    if (ANABRANCH_CALL(0, anabranch_last, &m, sizeof m))
        printf("%s: %s\n", ANABRANCH_CALL("", anabranch_path_name, m.path), m.reason ? m.reason : "taken");
    sum += ANABRANCH_CALL(UINT64_MAX, anabranch_simulated_ns) == UINT64_MAX;
    sum += ANABRANCH_CALL(UINT64_MAX, anabranch_counter, "sends_rts") == UINT64_MAX;
    sum += ANABRANCH_CALL("", anabranch_counter_text, "sends_rts")[0] == 0;
    sum += ANABRANCH_CALL("", anabranch_reason_name, 1000u)[0] == 0;
    sum += ANABRANCH_CALL(0, anabranch_request, &request, &m, sizeof m) == 0;
    sum += ANABRANCH_CALL(-1, anabranch_paths, "direct") == -1;
    sum += ANABRANCH_CALL(0, anabranch_aside, 0) == 0;
    return sum == 7 ? 0 : 1;
}
"#;

/// Compilers that are asked for ISO C99 or C++11 and nothing beyond it find nothing to say, and the program runs without the
/// library.
#[test]
fn the_header_is_standard_c_and_standard_cplusplus() {
    let include = xtask::layout::repository_root().join("include");
    let folder = scratch_folder("header");
    for (compiler, standard, name) in [
        ("gcc", "c99", "each.c"),
        ("gcc", "c11", "each.c"),
        ("g++", "c++11", "each.cpp"),
        ("g++", "c++17", "each.cpp"),
    ] {
        let source = folder.join(name);
        std::fs::write(&source, EACH).expect("written");
        let program = folder.join("each");
        let mut command = Command::new(compiler);
        command.arg(format!("-std={standard}"));
        command.args(["-Wall", "-Wextra", "-pedantic", "-Werror", "-I"]);
        command.arg(&include).arg(&source).arg("-o").arg(&program);
        let compiled = command
            .arg("-ldl")
            .output()
            .expect("a compiler: run ci/setup");
        let said = String::from_utf8_lossy(&compiled.stderr);
        assert!(
            compiled.status.success() && said.is_empty(),
            "{compiler} -std={standard}: {said}"
        );
        let ran = Command::new(&program).output().expect("it starts");
        assert!(ran.status.success(), "{compiler} -std={standard}: {ran:?}");
        assert_eq!(String::from_utf8_lossy(&ran.stdout), "none\n");
    }
    let _ = std::fs::remove_dir_all(folder);
}

/// No path can be chosen that the library was started without, and what is refused is said.
#[test]
fn paths_that_were_left_out() {
    on("openmpi", |mpi| {
        let job = job(mpi, 2, "interface").args(&["paths"]);
        let outcome = job.env("ANABRANCH_PATHS", "direct,host").passes();
        for said in [
            "\"relay,direct\" has a path that ANABRANCH_PATHS=direct,host leaves out",
            "\"nvlink\" is not a list out of direct, relay, host",
        ] {
            assert!(format!("{outcome}").contains(said), "{said}:\n{outcome}");
        }
    });
}

/// The same program runs where the library is not there.
#[test]
fn without_the_library() {
    for name in ["openmpi", "mpich"] {
        on(name, |mpi| {
            if !knows_cuda(mpi) {
                return;
            }
            let job = natively(mpi, 2, "interface", &[]).expect("some cases");
            job.without_preload().passes();
        });
    }
}
