//! Device memory that comes and goes: freed memory is not kept in use by mappings, an address is not taken for what it was,
//! staging is given back where memory runs short.

use crate::support::{job, model, on, on_every_mpi};
use xtask::mpi::Mpi;

on_every_mpi!(allocations);

/// A message each from hundreds of allocations, one large one, one address over and over, and the far end of 16 GiB.
fn allocations(mpi: &Mpi) {
    let cases = ["rounds", "freed_and_silent", "one_address", "in_the_middle"];
    check(mpi, &cases, 500);
}

/// With one library, whichever there is: what happens is the engine's affair.
#[test]
fn ten_thousand_allocations() {
    on("openmpi", |mpi| check(mpi, &["rounds"], 10_000));
}

/// Memory, open files and mappings of both ranks are compared by the program.
fn check(mpi: &Mpi, cases: &[&str], rounds: u64) {
    let outcome = job(mpi, 2, "churn")
        .args(cases)
        .env("ROUNDS", &rounds.to_string())
        .env("WATCHDOG", "300")
        // Little of it is touched.
        .env("SIMCUDA_HOST_MIB", "all")
        .limit_seconds(320)
        .passes();
    let stats = outcome.stats();
    stats.check_complete();
    let total = |counter| stats.total(counter);
    assert!(total("receives_direct") > rounds - 10, "{outcome}");
    // All that were freed but the very last, which nobody looks at any more.
    assert!(total("allocations_retired") > rounds - 10, "{outcome}");
    assert!(total("mappings_closed") > rounds - 10, "{outcome}");
    assert_eq!(stats.fallback("mapping_failed"), 0, "{outcome}");
}

on_every_mpi!(mappings_stay_while_the_program_is_away);

fn mappings_stay_while_the_program_is_away(mpi: &Mpi) {
    let outcome = job(mpi, 2, "churn").args(&["while_away"]).passes();
    let stats = outcome.stats();
    stats.check_complete();
    assert!(stats.of_rank(1, "mappings_closed") > 0, "{outcome}");
    assert!(stats.of_rank(0, "allocations_retired") > 0, "{outcome}");
}

#[test]
fn staging_is_given_back_where_memory_runs_short() {
    on("openmpi", |mpi| {
        let outcome = job(mpi, 4, "churn")
            .args(&["short_of_memory"])
            .env("SIMCUDA_TOPOLOGY", "beluga")
            .env("SIMCUDA_HOST_MIB", "all")
            .env("ANABRANCH_MODEL", &model("beluga").display().to_string())
            .env("ANABRANCH_PATHS", "direct,relay")
            .passes();
        let stats = outcome.stats();
        assert!(stats.total("multipath_relay_bytes") > 0, "{outcome}");
        // By whoever exported it: two GPUs.
        assert_eq!(stats.total("relays_returned"), 2, "{outcome}");
    });
}
