//! What is not taken is counted, with its reason. The programs say how many messages they send, and how long.

use crate::support::{job, on_every_mpi, over_an_mpi_that_knows_cuda};
use xtask::mpi::{Family, Mpi};

on_every_mpi!(partitioned, spinning_on_a_partition);

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
