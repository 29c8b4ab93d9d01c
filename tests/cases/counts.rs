//! What is not taken is counted, with its reason. The programs say how many messages they send, and how long.

use crate::support::{job, on_every_mpi, over_an_mpi_that_knows_cuda};
use anabranch_tests::needs_simulator;
use xtask::mpi::{Family, Mpi};

on_every_mpi!(
    partitioned,
    spinning_on_a_partition,
    intercommunicators,
    unknown_types,
    without_context,
);

/// Partitioned sends are the MPI library's. Each start of one from a device buffer is a message that was not taken.
fn partitioned(mpi: &Mpi) {
    if mpi.family == Family::OpenMpi4 {
        return; // it has no partitioned communication
    }
    let job = job(mpi, 2, "partitioned").args(&["from_device", "from_host", "freed"]);
    let outcome = over_an_mpi_that_knows_cuda(job).passes();
    let stats = outcome.stats();
    stats.check_complete();
    for (counter, value) in [
        ("sends_device", 5),
        ("sends_native", 5),
        // Of 4 partitions of 1001 integers each.
        ("sends_native_bytes", 5 * 16_016),
        ("sends_descriptor", 0),
    ] {
        assert_eq!(stats.total(counter), value, "{counter}:\n{outcome}");
    }
    assert_eq!(stats.fallback("partitioned"), 5, "{outcome}");
    assert_eq!(stats.fallback_bytes("partitioned"), 80_080, "{outcome}");
}

/// The helper does what a rank owes that looks at nothing but a partition.
fn spinning_on_a_partition(mpi: &Mpi) {
    if mpi.family == Family::OpenMpi4 {
        return; // it has no partitioned communication
    }
    let outcome = job(mpi, 2, "partitioned").args(&["spinning"]).passes();
    let stats = outcome.stats();
    stats.check_complete();
    let long = (1 << 20) + 7;
    assert!(stats.total("sends_descriptor_bytes") >= long, "{outcome}");
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
