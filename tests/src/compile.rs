//! Compiles the programs of `programs/` with the compiler wrapper of each MPI library.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::SystemTime;
use xtask::layout::{repository_root, Layout};
use xtask::lock::Lock;
use xtask::mpi::Mpi;

/// A compiler's complaint.
#[derive(Debug)]
pub struct CompileError(pub String);

const FLAGS: [&str; 11] = [
    "-O1",
    "-g",
    "-std=gnu11",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-Wno-unused-function",
    "-Wno-unused-variable",
    "-Wno-implicit-fallthrough",
    "-Wno-stringop-overflow", // STATUSES_IGNORE and UNWEIGHTED are addresses that the compiler takes for empty arrays
    "-Wno-stringop-overread",
];

/// The named program (`p2p`, `halo_f08`), compiled for this MPI library if it is not there already.
///
/// # Errors
/// What the compiler said.
///
/// # Panics
/// If there is no source of that name, or none of TEST_PROGRAMS.
pub fn program(mpi: &Mpi, name: &str) -> Result<PathBuf, CompileError> {
    if let Some(packed) = std::env::var_os("TEST_PROGRAMS") {
        let program = Path::new(&packed).join(&mpi.name).join(name);
        assert!(
            program.exists(),
            "skipped: {name} for {} is not packed",
            mpi.name
        );
        return Ok(program);
    }
    let sources = repository_root().join("tests/programs");
    let folder = Layout::new(false)
        .target
        .join("test-programs")
        .join(&mpi.name);
    let program = folder.join(name);
    let _lock = Lock::take(&folder.join("lock")).expect("the lock file can be made and locked");
    let include = repository_root().join("include");
    if modified(&program) > newest(&sources).max(newest(&include)) {
        return Ok(program);
    }
    let c = sources.join(format!("{name}.c"));
    let fortran = sources.join(format!("{name}.f90"));
    if c.exists() {
        let mut command = Command::new(&mpi.mpicc);
        command
            .args(FLAGS)
            .arg("-o")
            .arg(&program)
            .arg(&c)
            .args(["-ldl", "-lpthread"]);
        run(&mut command, mpi)?;
    } else {
        assert!(
            fortran.exists(),
            "no program {name} in {}",
            sources.display()
        );
        let mpifort = mpi
            .mpifort
            .as_ref()
            .ok_or_else(|| CompileError(format!("{} has no Fortran compiler", mpi.name)))?;
        let support = folder.join(format!("{name}-support.o"));
        let mut command = Command::new(&mpi.mpicc);
        command
            .args(FLAGS)
            .arg("-c")
            .arg("-o")
            .arg(&support)
            .arg(sources.join("fortran_support.c"));
        run(&mut command, mpi)?;
        let mut command = Command::new(mpifort);
        command
            .current_dir(&folder)
            .args(["-O1", "-g", "-o"])
            .arg(&program)
            .arg(&fortran)
            .arg(&support)
            .arg("-ldl");
        run(&mut command, mpi)?;
    }
    Ok(program)
}

/// The names of all programs in C: those that every MPI library can have.
///
/// # Panics
/// If the folder of sources cannot be read.
pub fn all_programs() -> Vec<String> {
    let sources = fs::read_dir(repository_root().join("tests/programs")).expect("tests/programs");
    let mut names: Vec<String> = sources
        .flatten()
        .filter_map(|entry| {
            entry
                .file_name()
                .into_string()
                .ok()?
                .strip_suffix(".c")
                .map(str::to_owned)
        })
        .filter(|name| name != "fortran_support")
        .collect();
    names.sort();
    names
}

fn run(command: &mut Command, mpi: &Mpi) -> Result<(), CompileError> {
    let output = command
        .output()
        .map_err(|e| CompileError(format!("cannot start {}: {e}", mpi.mpicc.display())))?;
    if output.status.success() {
        return Ok(());
    }
    Err(CompileError(format!(
        "{command:?}\n{}",
        String::from_utf8_lossy(&output.stderr)
    )))
}

fn modified(file: &Path) -> Option<SystemTime> {
    fs::metadata(file).and_then(|about| about.modified()).ok()
}

fn newest(folder: &Path) -> Option<SystemTime> {
    fs::read_dir(folder)
        .ok()?
        .flatten()
        .filter_map(|entry| modified(&entry.path()))
        .max()
}
