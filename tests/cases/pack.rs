//! What `ci/gpu-test pack` takes along: not a test of anything.

use anabranch_tests::{all_programs, program, solver, ALL_MPI};
use std::fs;
use std::path::PathBuf;
use xtask::mpi::Mpi;

/// The programs for each MPI library that is carried, and the solver, in the folder that TEST_PACK names.
#[test]
#[ignore = "makes what ci/gpu-test carries; TEST_PACK=FOLDER"]
fn programs() {
    let folder = PathBuf::from(std::env::var_os("TEST_PACK").expect("TEST_PACK=FOLDER"));
    for name in ALL_MPI.iter().filter(|name| name.contains('5')) {
        let mpi = anabranch_tests::mpi_or_skip(name).expect("the wheels are installed");
        let place = folder.join("programs").join(name);
        fs::create_dir_all(&place).expect("a folder for programs");
        for name in all_programs() {
            let built = program(mpi, &name).unwrap_or_else(|error| panic!("{}", error.0));
            fs::copy(built, place.join(name)).expect("copied");
        }
        take_solver(mpi, &folder);
    }
}

fn take_solver(mpi: &Mpi, folder: &std::path::Path) {
    if mpi.has_solver() {
        let built = solver(mpi);
        let name = built.file_name().expect("a name");
        fs::create_dir_all(folder.join("bin")).expect("a folder for programs");
        fs::copy(&built, folder.join("bin").join(name)).expect("copied");
    }
}
