//! What the tests share.

use anabranch_tests::{mpi_or_skip, program, Job};
use xtask::mpi::Mpi;

/// A job of a compiled test program.
pub fn job(mpi: &Mpi, ranks: usize, name: &str) -> Job {
    let path =
        program(mpi, name).unwrap_or_else(|error| panic!("{name} does not compile:\n{}", error.0));
    Job::new(mpi, ranks, &path)
}

/// Runs a test on one MPI library, if it is there.
pub fn on(name: &str, test: impl FnOnce(&Mpi)) {
    if let Some(mpi) = mpi_or_skip(name) {
        test(mpi);
    }
}

/// Makes of each function a test on every MPI library: `NAME::openmpi`, `NAME::mpich`, ...
macro_rules! on_every_mpi {
    ($($name:ident),* $(,)?) => {$(
        mod $name {
            #[test]
            fn openmpi() { $crate::support::on("openmpi", super::$name); }
            #[test]
            fn mpich() { $crate::support::on("mpich", super::$name); }
            #[test]
            fn openmpi5() { $crate::support::on("openmpi5", super::$name); }
            #[test]
            fn mpich5() { $crate::support::on("mpich5", super::$name); }
            #[test]
            fn mpich5_abi() { $crate::support::on("mpich5-abi", super::$name); }
        }
    )*};
}
pub(crate) use on_every_mpi;
