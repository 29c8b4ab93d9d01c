//! What the library takes of host memory and of GPUs: within its bounds by default, and given back at MPI_Finalize.

use crate::support::{job, model, on};
use anabranch_tests::{Job, Outcome};
use xtask::mpi::Mpi;

/// Of pinned memory a rank, and of memory a GPU.
const BOUND: u64 = 64 << 20;

/// Two of four ranks' GPUs, the others as relays. The program compares the free memory of each before MPI_Init and after
/// MPI_Finalize.
fn staging(mpi: &Mpi, assign: &str, paths: &str) -> Job {
    job(mpi, 2, "memory")
        .args(&["staging"])
        .env("SIMCUDA_TOPOLOGY", "beluga")
        .env("ANABRANCH_OWNER", assign)
        .env("ANABRANCH_PATHS", paths)
        // Or a receiver of small messages has the cells of their sender pinned, which are counted there.
        .env("ANABRANCH_EAGER", "0")
}

fn pinned(outcome: &Outcome, rank: u64) -> u64 {
    outcome.report.pinned_bytes_max(outcome.stats().pid(rank))
}

/// All kinds of staging at once: bounce buffers for values, the ring to host memory, and the host path of long messages.
#[test]
fn a_rank_pins_32_mib_at_most_and_64_if_it_drives_plans() {
    on("openmpi", |mpi| {
        let model = model("beluga").display().to_string();
        // Who takes the staging of the host path: the sender, or the receiver that drives plans. (A receiver has the sender's
        // staging pinned, too, which is counted there.)
        for (assign, rank, bound) in [("two", 0, BOUND / 2), ("one", 1, BOUND)] {
            let outcome = staging(mpi, assign, "host")
                .env("ANABRANCH_MODEL", &model)
                .passes();
            let stats = outcome.stats();
            stats.check_complete();
            assert!(stats.total("multipath_host_bytes") > 200 << 20, "{outcome}");
            assert!(stats.total("receives_bcopy") > 16, "{outcome}");
            let driven = stats.total("one_owner_by_streams") + stats.total("one_owner_by_graph");
            assert_eq!(driven > 0, assign == "one", "{outcome}");
            let most = pinned(&outcome, rank);
            // More than the host ring and bounce buffers, or than two plans, have.
            assert!(
                (bound * 5 / 8..=bound).contains(&most),
                "{assign}: {most}, {outcome}"
            );
        }
    });
}

/// The option holds for plans that one rank drives, too.
#[test]
fn path_staging_bounds_driven_plans() {
    on("openmpi", |mpi| {
        let model = model("beluga").display().to_string();
        for (bytes, goes, allowed) in [("0", false, 8 << 20), ("6M", true, 14 << 20)] {
            let outcome = staging(mpi, "one", "")
                .env("ANABRANCH_MODEL", &model)
                .env("ANABRANCH_MULTIPATH_STAGING", bytes)
                .passes();
            let stats = outcome.stats();
            stats.check_complete();
            let total = |name| stats.total(name);
            assert_eq!(
                total("multipath_host_bytes") > 0,
                goes,
                "{bytes}: {outcome}"
            );
            assert_eq!(total("one_owner_failed"), 0, "{bytes}: {outcome}");
            // Beside what the option allows: bounce buffers.
            let most = pinned(&outcome, 1);
            assert!(most <= allowed, "{bytes}: {most}, {outcome}");
        }
    });
}

/// Staging for others' messages, and what links are measured by.
#[test]
fn a_gpu_gives_64_mib_at_most_and_has_all_of_it_back() {
    on("openmpi", |mpi| {
        for assign in ["two", "one"] {
            // No file: the ranks measure, by memory of their own on each GPU.
            let outcome = staging(mpi, assign, "direct,relay,host")
                .env("ROUNDS", "4")
                .passes();
            let stats = outcome.stats();
            stats.check_complete();
            assert!(stats.total("multipath_relay_bytes") > 0, "{outcome}");
            let line = "in use on a GPU: ";
            let stdout = &outcome.finished.stdout;
            let used = stdout.lines().find_map(|text| text.strip_prefix(line));
            let used: u64 = used.and_then(|text| text.parse().ok()).expect("a number");
            assert!((16 << 20..=BOUND).contains(&used), "{assign}: {used}");
        }
    });
}

/// What is mapped goes beyond the bound while messages need it, and is unmapped for others then, not before.
#[test]
fn mappings_are_unmapped_for_others_beyond_their_bound() {
    on("openmpi", |mpi| {
        for (bound, evicts) in [("100M", true), ("64G", false)] {
            let outcome = staging(mpi, "two", "direct")
                .env("ANABRANCH_MAPPINGS", bound)
                .passes();
            let stats = outcome.stats();
            stats.check_complete();
            let total = |name| stats.total(name);
            // Two windows of eight allocations of 48 MiB: more than twice the bound is under way at once.
            assert!(total("receives_direct_bytes") >= 768 << 20, "{outcome}");
            assert_eq!(total("mappings_evicted") > 0, evicts, "{bound}: {outcome}");
        }
    });
}

/// Who reads the summary sees by whom and how the copies of long messages were made.
#[test]
fn the_summary_tells_how_plans_were_driven() {
    on("openmpi", |mpi| {
        let model = model("beluga").display().to_string();
        for (how, line) in [
            ("streams", "driven by one rank, copy by copy"),
            ("graph", "driven by one rank, as a graph"),
        ] {
            let outcome = staging(mpi, "one", "direct,relay")
                .env("ANABRANCH_MODEL", &model)
                .env("ANABRANCH_EXECUTOR", how)
                .env("ANABRANCH_STATS", "1")
                .passes();
            let lines: Vec<&str> = outcome.finished.stderr.lines().map(str::trim).collect();
            let of = |name: &str| lines.iter().find_map(|text| text.strip_prefix(name));
            let count = of(line).and_then(|count| count.trim().parse::<u64>().ok());
            // Two windows of eight.
            assert!(
                count.is_some_and(|count| (8..=16).contains(&count)),
                "{outcome}"
            );
            assert_eq!(of("graphs built").is_some(), how == "graph", "{outcome}");
        }
    });
}
