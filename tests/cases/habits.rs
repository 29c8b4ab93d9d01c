//! How programs use CUDA around their messages. The program itself looks at every call for what it leaves behind, and at
//! every message for the path that it has taken.

use crate::support::{self, job, knows_cuda, on, on_every_mpi};
use anabranch_tests::{built, Job, Outcome};
use xtask::mpi::Mpi;

/// All cases in which one thread calls MPI. `capture` is the first: the library has made no stream and no event yet.
const CASES: [&str; 13] = [
    "capture",
    "acquaint",
    "default_streams",
    "pending_work",
    "held",
    "own_errors",
    "calls",
    "several_gpus",
    "own_contexts",
    "reset",
    "children",
    "funneled",
    "captured_elsewhere",
];

on_every_mpi!(habits, threads);

fn complete(job: Job) -> Outcome {
    let outcome = job.passes();
    let stats = outcome.stats();
    stats.check_complete();
    assert_eq!(stats.ranks(), 2, "{outcome}");
    assert_eq!(stats.total("retries"), 0, "{outcome}");
    for reason in ["mapping_failed", "driver_error", "no_context"] {
        assert_eq!(stats.fallback(reason), 0, "{reason}:\n{outcome}");
    }
    outcome
}

fn habits(mpi: &Mpi) {
    let outcome = complete(job(mpi, 2, "habits").args(&CASES));
    // The program has seen each of its messages; the children of its forks have left the counters alone.
    assert!(outcome.stats().total("receives_direct") > 50, "{outcome}");
    assert_eq!(
        outcome.stats().total("receives_gpu_pipeline"),
        3,
        "one for each capture:\n{outcome}"
    );
}

/// Any thread may call MPI.
fn threads(mpi: &Mpi) {
    let cases = [
        "acquaint",
        "other_threads",
        "captured_elsewhere",
        "children",
    ];
    complete(job(mpi, 2, "habits").args(&cases).env("THREADS", "1"));
}

/// Kernels that block, one hardware queue for all streams, and both: what is pending is waited for, but nobody waits for ever.
#[test]
fn environments() {
    let cases = ["capture", "default_streams", "pending_work", "several_gpus"];
    for (name, variables) in [
        ("openmpi", &["CUDA_LAUNCH_BLOCKING"][..]),
        ("mpich", &["CUDA_DEVICE_MAX_CONNECTIONS"]),
        (
            "mpich5",
            &["CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS"],
        ),
    ] {
        on(name, |mpi| {
            let job = job(mpi, 2, "habits").args(&cases);
            complete(variables.iter().fold(job, |job, name| job.env(name, "1")));
        });
    }
}

/// The program has loaded its driver by a path of its own, for itself alone, and the loader finds no other.
#[test]
fn a_driver_that_is_private_to_the_program() {
    for name in ["openmpi", "mpich"] {
        on(name, |mpi| {
            let driver = built().simcuda.join("libcuda.so.1");
            let job = job(mpi, 2, "habits").args(&["acquaint", "pending_work", "children"]);
            complete(
                job.without_driver()
                    .roles("D")
                    .env("HIDDEN_DRIVER", &driver.display().to_string()),
            );
        });
    }
}

/// The program is right by itself, with device memory that the host may read in the place of an MPI library that knows CUDA.
#[test]
fn natively() {
    for name in ["openmpi", "mpich"] {
        on(name, |mpi| {
            if !knows_cuda(mpi) {
                return;
            }
            let job = support::natively(mpi, 2, "habits", &CASES).expect("some cases");
            job.without_preload().passes();
        });
    }
}
