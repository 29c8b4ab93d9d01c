//! Random datatypes, whose handles come and go all the time: what arrives is what both typemaps say.
//!
//! `SEED=.. TREES=..` in the environment repeats what failed (`programs/type_trees.c` knows more such
//! variables), and `ci/long types` does many more trees.

use crate::support::{job, on_every_mpi};
use anabranch_tests::{Job, Outcome};
use xtask::mpi::Mpi;

on_every_mpi!(random_types, without_the_library);

/// Of the trees, or of the time: which percentage goes to which roles of the two ranks.
const ROLES: [(&str, u64); 3] = [("D", 80), ("HD", 10), ("DH", 10)];
/// Without `TREES` so many at least, and more as long as there is time.
const TREES_MIN: u64 = 300;
const SECONDS: u64 = 4;

fn random_types(mpi: &Mpi) {
    let wanted: Option<u64> = variable("TREES");
    for (roles, percent) in ROLES {
        let part = |all: u64| (all * percent).div_ceil(100);
        let mut job = trees_job(mpi).roles(roles);
        let trees_min = part(wanted.unwrap_or(TREES_MIN));
        job = match wanted {
            Some(_) => job.env("TREES", &trees_min.to_string()),
            None => job
                .env("TREES", "1000000")
                .env("SECONDS", &part(SECONDS).to_string())
                .env("LEAST", &trees_min.to_string()),
        };
        // The program's own watch is set anew with every few trees.
        let outcome = job.limit_seconds(1000).env("WATCHDOG", "100").passes();
        assert!(trees(&outcome) >= trees_min, "{outcome}");
        let stats = outcome.stats();
        stats.check_complete();
        if trees_min >= 100 {
            assert!(stats.total("sends_rts") > 0, "{outcome}");
            assert!(stats.fallback("non_contiguous") > 0, "{outcome}");
            assert!(stats.total("receives_bcopy") > 0, "{outcome}");
        }
    }
}

/// The program is right by itself.
fn without_the_library(mpi: &Mpi) {
    let job = trees_job(mpi).roles("H").without_preload();
    let outcome = job.env("TREES", "1000").passes();
    assert_eq!(trees(&outcome), 1000, "{outcome}");
}

fn trees_job(mpi: &Mpi) -> Job {
    let job = job(mpi, 2, "type_trees");
    // To read host memory of a type from its peer, MPICH 5.0.2 allocates a list of more pieces than there are where neighbours
    // become one, and passes the rest to process_vm_readv as malloc left it: errno 22, without the library always with
    // SEED=3948061916 FIRST=978 TREES=1. Here malloc leaves zeros. (Without CMA such messages fail more often: "Invalid datatype".)
    match mpi.name.starts_with("mpich5") {
        true => job.env("MALLOC_PERTURB_", "255"),
        false => job,
    }
}

/// How many it says it has done.
fn trees(outcome: &Outcome) -> u64 {
    let said = outcome.finished.stdout.lines();
    let mut said = said.filter_map(|line| line.strip_prefix("passed ")?.strip_suffix(" cases"));
    said.next()
        .and_then(|number| number.parse().ok())
        .unwrap_or_else(|| panic!("no number of trees:\n{outcome}"))
}

fn variable(name: &str) -> Option<u64> {
    let text = std::env::var(name).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{name}={text}")))
}
