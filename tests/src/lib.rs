//! The harness of the end-to-end tests: it builds what it loads, compiles the programs of `programs/` with each MPI
//! library, launches them with that library's own launcher over the simulated driver, and reads what the preloaded
//! library counted.
//!
//! Environment variables: `CI=true` turns a missing MPI library into a failure; `TEST_LAYOUT=FOLDER` tests what lies in
//! that folder instead of building; `TEST_PROFILE=release|debug` picks the profile of what is built (default: debug);
//! `TEST_KEEP=1` keeps the files of each run. On a machine with GPUs `ci/gpu-test` sets `TEST_DRIVER=real`, `TEST_MPI` and
//! `TEST_PROGRAMS` to folders of MPI libraries and of compiled programs, and `TEST_SCRATCH` to one for the files of runs.

// What a test says goes through the harness, which collects it.
#![allow(clippy::print_stderr)]

mod compile;
mod job;
mod machine;
pub mod nodes;
mod process;
pub mod ranks;
mod stats;

pub use compile::{all_programs, program, CompileError};
pub use job::{Job, Outcome};
pub use machine::{
    built, cannot_be_made_here, in_ci, mpi_or_skip, needs_simulator, on_real_gpus,
    python_with_mpi4py, scratch_folder, skip, solver, Built, ALL_MPI,
};
pub use process::{run_bounded, Finished};
pub use stats::{Report, Stats};
