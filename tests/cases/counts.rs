//! What is not taken is counted, with its reason. The programs say how many messages they send, and how long.

use crate::support::{job, on_every_mpi, over_an_mpi_that_knows_cuda};
use anabranch_tests::needs_simulator;
use xtask::mpi::{Family, Mpi};

on_every_mpi!(
    partitioned,
    inside_calls_that_are_not_seen,
    intercommunicators,
    unknown_types,
    without_context,
    device_memory_elsewhere,
);

/// Partitioned communication is the MPI library's affair, of which nothing is seen.
fn partitioned(mpi: &Mpi) {
    if mpi.family == Family::OpenMpi4 {
        return; // it has no partitioned communication
    }
    let job = job(mpi, 2, "partitioned").args(&["from_device", "from_host", "freed"]);
    let outcome = over_an_mpi_that_knows_cuda(job).passes();
    let stats = outcome.stats();
    stats.check_complete();
    assert_eq!(stats.total("sends_device"), 0, "{outcome}");
}

/// The helper does what a rank owes that looks at nothing but a partition, or waits in a call of MPI 4.1 that is not seen.
fn inside_calls_that_are_not_seen(mpi: &Mpi) {
    if mpi.family == Family::OpenMpi4 {
        return; // it has no partitioned communication
    }
    let cases = ["spinning", "flushing"];
    let has_flush = mpi.name.starts_with("mpich5");
    let cases = &cases[..if has_flush { 2 } else { 1 }];
    let outcome = job(mpi, 2, "partitioned").args(cases).passes();
    let stats = outcome.stats();
    stats.check_complete();
    let long = cases.len() as u64 * ((1 << 20) + 7);
    assert!(stats.total("sends_rts_bytes") >= long, "{outcome}");
    assert_eq!(stats.total("sends_native"), 0, "{outcome}");
}

/// Messages between the groups of an intercommunicator go by value.
fn intercommunicators(mpi: &Mpi) {
    let outcome = job(mpi, 4, "comms").args(&["made"]).passes();
    let stats = outcome.stats();
    stats.check_complete();
    // Of each of the four ranks one of 61 bytes and one of 100001, to the device and to the host.
    assert_eq!(stats.fallback("intercomm"), 16, "{outcome}");
    let bytes = 4 * 2 * (61 + 100_001);
    assert_eq!(stats.fallback_bytes("intercomm"), bytes, "{outcome}");
    // What is made of two groups, or of a group alone, is known.
    assert_eq!(stats.fallback("unknown_comm"), 0, "{outcome}");
    let outcome = job(mpi, 4, "comms").args(&["merged"]).passes();
    assert_eq!(outcome.stats().fallback("unknown_comm"), 0, "{outcome}");
}

/// A send whose datatype the MPI library refuses to describe is left to it, which refuses the send.
fn unknown_types(mpi: &Mpi) {
    let outcome = job(mpi, 2, "order").args(&["wrong_arguments"]).passes();
    let stats = outcome.stats();
    // Two of each rank.
    assert_eq!(stats.fallback("unknown_type"), 4, "{outcome}");
    assert_eq!(stats.total("sends_native"), 4, "{outcome}");
    assert_eq!(stats.total("sends_native_bytes"), 0, "{outcome}");
}

/// Memory that has outlived every context of its device cannot be read, so its message is lost. The reason is counted.
fn without_context(mpi: &Mpi) {
    needs_simulator("what memory does without a context");
    let outcome = job(mpi, 2, "memory_kinds")
        .args(&["without_context"])
        .passes();
    let stats = outcome.stats();
    assert_eq!(stats.fallback("no_context"), 1, "{outcome}");
    assert_eq!(stats.fallback_bytes("no_context"), 5000, "{outcome}");
    assert_eq!(stats.fallback("driver_error"), 0, "{outcome}");
    assert_eq!(stats.total("errors"), 1, "{outcome}");
}

/// Device memory in calls that are the MPI library's is said once for each function and rank, unless the library knows it.
fn device_memory_elsewhere(mpi: &Mpi) {
    let outcome = job(mpi, 2, "elsewhere").passes();
    let lines = |function: &str| {
        let said = format!("warn: {function} is given device memory");
        outcome.finished.stderr.matches(&said).count()
    };
    for function in [
        "MPI_Allreduce",
        "MPI_Bcast",
        "MPI_Allgather",
        "MPI_Iallreduce",
        "MPI_Put",
        "MPI_Pack",
        "MPI_File_write_at",
        "MPI_File_read_all",
    ] {
        assert_eq!(lines(function), 2, "{function}: {outcome}");
    }
    // Each names the buffer that the program gave it.
    let given = outcome
        .finished
        .stderr
        .split("MPI_Bcast is given device memory (");
    for rest in given.skip(1) {
        let address = rest.split(')').next().unwrap_or_default();
        let printed = format!("device memory at {address}\n");
        assert!(outcome.finished.stdout.contains(&printed), "{outcome}");
    }
    assert_eq!(
        outcome.finished.stderr.matches("warn").count(),
        16,
        "{outcome}"
    );
    for job in [
        job(mpi, 2, "elsewhere").roles("H"),
        job(mpi, 2, "elsewhere").env("ANABRANCH_MPI_CUDA", "yes"),
    ] {
        let outcome = job.passes();
        assert!(!outcome.finished.stderr.contains("warn"), "{outcome}");
    }
}
