//! `include/anabranch.h`: what a program is told of the library, of its counters and of each message.

use crate::support::{job, knows_cuda, model, natively, on, on_every_mpi};
use xtask::mpi::Mpi;

on_every_mpi!(interface);

/// The program itself compares what it is told with what it has done; here the counters are seen to agree with that.
fn interface(mpi: &Mpi) {
    let outcome = job(mpi, 2, "interface").passes();
    let stats = outcome.stats();
    stats.check_complete();
    for (counter, messages) in [
        // Two alone, two persistent ones, two of Sendrecv, and one after the library stood aside.
        ("receives_direct", 7),
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
