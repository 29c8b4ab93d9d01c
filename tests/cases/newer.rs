//! What MPI 4.0 and 4.1 have added: what a program finds works, and what neither the MPI library has nor can be made of
//! other functions is not to be found.

use crate::support::{job, on_every_mpi};
use anabranch_tests::{built, mpi_or_skip, Job, ALL_MPI};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use xtask::mpi::{Family, Mpi};

on_every_mpi!(works, works_where_nothing_is_taken);

/// Names that a shared library defines for others.
fn exported(library: &Path) -> BTreeSet<String> {
    let output = Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(library)
        .output()
        .expect("nm");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let names = text
        .lines()
        .filter_map(|line| line.split_whitespace().nth(2));
    names
        .map(|name| name.split('@').next().unwrap_or_default().to_owned())
        .collect()
}

/// How many functions the program has called, which it asks for by name.
fn called(job: Job) -> u64 {
    let outcome = job.passes();
    let stdout = &outcome.finished.stdout;
    let told = stdout
        .lines()
        .find_map(|line| line.strip_prefix("functions called: "));
    told.and_then(|n| n.parse().ok()).expect("told")
}

/// What the library gets wrong by itself, for the program; and that a count too large for the plain function is refused, as
/// Open MPI has no other.
fn with_faults(mpi: &Mpi, job: Job) -> Job {
    match mpi.family {
        Family::OpenMpi4 => job.env("PLAIN_ONLY", "1"),
        Family::OpenMpi5 => job.env("PLAIN_ONLY", "1").env("FAULTS", "types"),
        Family::Mpich | Family::StandardAbi => job.env("FAULTS", "isendrecv waitsome"),
    }
}

fn works(mpi: &Mpi) {
    for (ranks, roles) in [(3, "D"), (2, "H")] {
        let found = called(with_faults(mpi, job(mpi, ranks, "newer").roles(roles)));
        // With three ranks all that there are.
        assert!(found >= if ranks > 2 { 46 } else { 44 }, "{found}");
    }
}

/// Also with ANABRANCH=off, and without a driver.
fn works_where_nothing_is_taken(mpi: &Mpi) {
    let off = job(mpi, 3, "newer").roles("H").env("ANABRANCH", "off");
    let without = job(mpi, 3, "newer").without_driver();
    for job in [off, without] {
        let found = called(with_faults(mpi, job.without_device()));
        assert!(found >= 46, "{found}");
    }
}

/// Each exported function is in every MPI library, or one of those that are made of others.
#[test]
fn nothing_is_exported_that_a_library_may_lack() {
    let ours = exported(&built().library);
    let ours: BTreeSet<&str> = ours
        .iter()
        .filter_map(|name| {
            name.strip_prefix('P')
                .filter(|name| name.starts_with("MPI_"))
        })
        .collect();
    let made_of_others = |name: &str| {
        let plain = name.strip_suffix("_c").unwrap_or(name);
        name.ends_with("_c")
            || plain.ends_with("_init") && !plain.contains("send") && !plain.contains("ecv")
            || plain.starts_with("MPI_Isendrecv")
            || plain.starts_with("MPI_Request_get_status_")
            || ["MPI_Comm_idup_with_info", "MPI_Comm_create_from_group"].contains(&name)
            || name == "MPI_Intercomm_create_from_groups"
    };
    for name in ALL_MPI {
        let Some(mpi) = mpi_or_skip(name) else {
            continue;
        };
        let folder = mpi
            .library_folder
            .clone()
            .unwrap_or_else(|| "/usr/lib/x86_64-linux-gnu".into());
        let file = match name {
            "openmpi" | "openmpi5" => "libmpi.so.40",
            "mpich" => "libmpich.so.12",
            "mpich5" => "libmpi.so.12",
            _ => "libmpi_abi.so.1",
        };
        let theirs = exported(&folder.join(file));
        assert!(theirs.len() > 400, "{name}");
        let lacking = ours.iter().filter(|function| !theirs.contains(**function));
        let lost: Vec<_> = lacking
            .filter(|function| !made_of_others(function))
            .collect();
        assert!(lost.is_empty(), "{name}: {lost:?}");
    }
}
