//! What the tests share.

use anabranch_tests::{built, mpi_or_skip, program, scratch_folder, Job};
use std::path::PathBuf;
use std::process::Command;
use std::sync::OnceLock;
use xtask::mpi::Mpi;

/// A job of a compiled test program.
pub fn job(mpi: &Mpi, ranks: usize, name: &str) -> Job {
    let path =
        program(mpi, name).unwrap_or_else(|error| panic!("{name} does not compile:\n{}", error.0));
    Job::new(mpi, ranks, &path)
}

/// What `anabranch topo --measure` finds on a simulated node; once for each.
pub fn model(topology: &str) -> PathBuf {
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let folder = FOLDER.get_or_init(|| scratch_folder("models"));
    let file = folder.join(format!("{topology}.json"));
    if file.exists() {
        return file;
    }
    let draft = folder.join(format!("{topology}-{:?}.json", std::thread::current().id()));
    let output = Command::new(&built().command)
        .args(["topo", "--measure", "--model"])
        .arg(&draft)
        .env("SIMCUDA_TOPOLOGY", topology)
        .env(
            "SIMCUDA_JOB",
            format!("model-{topology}-{}", std::process::id()),
        )
        .env("LD_LIBRARY_PATH", &built().simcuda)
        .output()
        .expect("the command runs");
    assert!(output.status.success(), "{output:?}");
    std::fs::rename(&draft, &file).expect("kept");
    file
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
