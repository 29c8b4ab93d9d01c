//! `jacobi`: a Jacobi solver with one MPI rank per GPU, the application that the library is shown and tested with.
//!
//! The set-up is that of the multi-path papers' evaluations (sections on the Jacobi solver): ranks form a ring, each
//! exchanges the edges of its part with its two neighbours by `MPI_Sendrecv` on device buffers, one direction after
//! the other. So rows are periodic by default, and columns end at fixed values.

mod app;
mod args;
mod check;
mod clock;
mod domain;
mod exchange;
mod failure;
mod field;
mod gpu;
mod picture;
mod reference;
mod report;
mod selftest;
mod solver;

use clap::Parser;
use failure::{complain, BAD_INPUT};
use mpi::traits::*;
use std::panic::{catch_unwind, AssertUnwindSafe};

fn main() {
    let Some(universe) = mpi::initialize() else {
        complain("MPI was initialized before the program started");
        std::process::exit(BAD_INPUT);
    };
    let world = universe.world();
    let code = catch_unwind(AssertUnwindSafe(|| guarded(&world)))
        .unwrap_or_else(|_| world.abort(BAD_INPUT));
    drop(universe);
    std::process::exit(code);
}

/// Parses and runs. Ends the job where the ranks cannot end in step.
fn guarded(world: &impl Communicator) -> i32 {
    let args = match args::Args::try_parse() {
        Ok(args) => args,
        Err(e) => return usage(world, &e),
    };
    match app::run(world, &args) {
        Ok(()) => 0,
        Err(failure) if failure.agreed => {
            if world.rank() == 0 {
                complain(&failure.message);
            }
            failure.code
        }
        Err(failure) => {
            complain(&format!("rank {}: {}", world.rank(), failure.message));
            // A launcher may drop what it has not handed on when it hears of MPI_Abort.
            std::thread::sleep(std::time::Duration::from_millis(100));
            world.abort(failure.code)
        }
    }
}

/// Help and version go to stdout as they are; an error becomes one line.
fn usage(world: &impl Communicator, error: &clap::Error) -> i32 {
    if !error.use_stderr() {
        if world.rank() == 0 {
            let _ = error.print();
        }
        return 0;
    }
    if world.rank() == 0 {
        complain(&format!(
            "{} (see jacobi --help)",
            one_line(&error.to_string())
        ));
    }
    BAD_INPUT
}

/// An error of the command line without its usage notes, which follow an empty line.
fn one_line(text: &str) -> String {
    let error = text.split("\n\n").next().unwrap_or_default();
    let parts: Vec<&str> = error.lines().map(str::trim).collect();
    parts.join(" ").trim_start_matches("error: ").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_command_line_are_one_line() {
        let error = args::Args::try_parse_from(["jacobi", "--type", "half"]).unwrap_err();
        let line = one_line(&error.to_string());
        assert!(
            line.starts_with("invalid value 'half' for '--type <TYPE>'"),
            "{line}"
        );
        assert!(
            line.contains("float, double") && !line.contains('\n'),
            "{line}"
        );
    }
}
