//! Datatypes: when they end, what blocks of theirs cost, and what an MPI library says of memory.

use crate::support::{job, on, on_every_mpi};
use anabranch_tests::{needs_simulator, Outcome};
use xtask::mpi::Mpi;

on_every_mpi!(
    freed_in_another_thread,
    many_small_blocks,
    gaps_stay_the_programs,
    kinds_of_memory,
);

/// All messages are right, all of them are accounted for, and nothing is said.
fn quiet(outcome: Outcome) -> Outcome {
    outcome.stats().check_complete();
    assert!(!outcome.finished.stderr.contains("warn"), "{outcome}");
    outcome
}

/// A case whose types another thread frees, while it makes and frees others all the time.
fn freed_elsewhere(mpi: &Mpi, case: &str, sends: u64) {
    let outcome = quiet(job(mpi, 2, "type_lives").args(&[case]).passes());
    let stats = outcome.stats();
    assert_eq!(stats.total("sends_device"), sends, "{case} {outcome}");
    // Two rounds of three have gaps at the sender.
    let gaps = stats.fallback("non_contiguous");
    assert_eq!(gaps, sends * 2 / 3, "{case} {outcome}");
    // The first ones may find a peer that is not ready.
    let taken = stats.total("sends_rts");
    assert!(taken + 2 >= sends / 3, "{case} {outcome}");
    assert_eq!(stats.fallback("unknown_type"), 0, "{case} {outcome}");
    let outcome = job(mpi, 2, "type_lives").args(&[case]).roles("DH").passes();
    quiet(outcome);
}

/// The types of pending sends and receives.
fn freed_in_another_thread(mpi: &Mpi) {
    freed_elsewhere(mpi, "send_pending", 60);
    freed_elsewhere(mpi, "receive_pending", 60);
}

/// The types of persistent requests, between their initialization and their starts.
#[test]
fn freed_before_starts() {
    for name in ["openmpi", "mpich"] {
        on(name, |mpi| freed_elsewhere(mpi, "before_starts", 240));
    }
}

/// Blocks of few bytes are read with the gaps between them: a copy for each 64 KiB that they lie in, at most.
fn many_small_blocks(mpi: &Mpi) {
    needs_simulator("counted copies");
    for case in ["gather_eights", "gather_lengths"] {
        let outcome = quiet(job(mpi, 2, "blocks").args(&[case]).passes());
        let stats = outcome.stats();
        let spans = outcome.finished.stdout.lines();
        let spans = spans.filter_map(|line| line.strip_prefix("span "));
        let spans: Vec<u64> = spans.filter_map(|span| span.parse().ok()).collect();
        assert_eq!(spans.len(), 4, "{outcome}");
        let most: u64 = spans.iter().map(|span| span.div_ceil(64 << 10)).sum();
        let copies = outcome.report.copies(stats.pid(0), "device_to_host");
        assert!((1..=most).contains(&copies), "{copies} {most} {outcome}");
        assert_eq!(stats.total("sends_device"), 4, "{outcome}");
        assert_eq!(stats.fallback("non_contiguous"), 4, "{outcome}");
    }
}

/// What lies between the blocks of a receive is never written to, also while the message comes.
fn gaps_stay_the_programs(mpi: &Mpi) {
    for case in ["scatter_eights", "scatter_lengths"] {
        let outcome = quiet(job(mpi, 2, "blocks").args(&[case]).passes());
        let stats = outcome.stats();
        assert_eq!(stats.total("sends_device"), 4, "{outcome}");
        assert!(stats.total("sends_bcopy") <= 2, "{outcome}");
    }
}

/// What the MPI library says of the memory that it knows is the same with the library: that takes messages only, so a
/// program must not be told that all calls know device memory.
fn kinds_of_memory(mpi: &Mpi) {
    let asked = || job(mpi, 2, "kinds_asked");
    // Lines of different ranks come in any order.
    let answers = |outcome: &Outcome| {
        let lines = outcome.finished.stdout.lines();
        let mut lines: Vec<String> = lines.map(str::to_owned).collect();
        lines.sort();
        lines
    };
    let alone = answers(&asked().roles("H").without_preload().passes());
    assert!(alone.len() > 40, "{alone:?}");
    let hosts = asked().roles("H").passes();
    assert_eq!(answers(&hosts), alone, "{hosts}");
    let devices = quiet(asked().passes());
    assert_eq!(answers(&devices), alone, "{devices}");
    let stats = devices.stats();
    assert_eq!(stats.total("sends_device"), 8, "{devices}");
    assert!(stats.total("sends_rts") >= 6, "{devices}");
}
