//! `anabranch run --ab`: the program without and with the library, in turns.

use crate::support::on;
use anabranch_tests::{built, program, run_bounded, scratch_folder, Finished};
use std::process::Command;
use std::time::Duration;
use xtask::mpi::Mpi;

fn compared(mpi: &Mpi, command: &[&str], env: &[(&str, &str)]) -> Finished {
    let folder = scratch_folder("ab");
    let mut run = Command::new(&built().command);
    run.args(["run", "--ab", "--sim", "hgx-h200", "-np", "2", "--mpi"])
        .arg(&mpi.mpirun)
        .arg("--")
        .args(command)
        .env_remove("LD_PRELOAD")
        .env("OMPI_MCA_btl", "^ofi");
    env.iter()
        .for_each(|(name, value)| _ = run.env(name, value));
    let finished = run_bounded(&mut run, &folder, Duration::from_secs(200));
    let _ = std::fs::remove_dir_all(folder);
    finished
}

/// Three pairs in turns and one launch more; what was carried is what the program sent.
#[test]
fn a_program_in_turns() {
    on("openmpi", |mpi| {
        let counted = program(mpi, "counted").unwrap_or_else(|error| panic!("{}", error.0));
        let counted = counted.display().to_string();
        // The MPI library knows no CUDA, and may touch device memory all the same.
        let allowed = &[("SIMCUDA_HOST_ACCESS", "1")];
        let finished = compared(mpi, &[&counted, "ring"], allowed);
        assert_eq!(finished.code, Some(0), "{finished:?}");
        let err = &finished.stderr;
        let launches: Vec<&str> = err
            .lines()
            .filter(|line| line.contains(" of 7: "))
            .collect();
        let with = launches
            .iter()
            .filter(|line| line.ends_with(": with the library"))
            .count();
        let without = launches
            .iter()
            .filter(|line| line.ends_with(": without the library"))
            .count();
        assert_eq!((launches.len(), with, without), (7, 3, 3), "{finished:?}");
        assert!(
            err.contains("x in all (") && err.contains("x in MPI calls"),
            "{finished:?}"
        );
        // Each of two ranks sends six messages.
        let carried = err
            .lines()
            .find(|line| line.contains("received in device memory:"))
            .expect("a line");
        let numbers = carried.split(' ').zip(carried.split(' ').skip(1));
        let messages = numbers.filter(|(_, unit)| unit.starts_with("messages"));
        let messages: u64 = messages
            .map(|(number, _)| number.parse::<u64>().expect("a number"))
            .sum();
        assert_eq!(messages, 12, "{carried}");
        assert_eq!(
            finished.stdout.matches("passed 1 cases").count(),
            7,
            "{finished:?}"
        );
    });
}

/// The one line that says why there is no ratio, the last one.
fn no_ratio(finished: &Finished) -> &str {
    let mut lines = finished.stderr.lines();
    let last = lines.next_back().unwrap_or_default();
    assert!(
        last.starts_with("anabranch: --ab: no ratio: "),
        "{finished:?}"
    );
    assert!(lines.all(|line| !line.contains("--ab: no")), "{finished:?}");
    last
}

/// Where there is nothing to compare with, no ratio is told.
#[test]
fn a_program_that_fails() {
    on("openmpi", |mpi| {
        let counted = program(mpi, "counted").unwrap_or_else(|error| panic!("{}", error.0));
        let counted = counted.display().to_string();
        let finished = compared(mpi, &[&counted, "ring"], &[]);
        assert_eq!(finished.code, Some(1), "{finished:?}");
        for said in [
            "without the library the program ended with status",
            "set SIMCUDA_HOST_ACCESS=1",
            "it ran to its end",
        ] {
            assert!(no_ratio(&finished).contains(said), "{said}: {finished:?}");
        }
        assert!(!finished.stderr.contains("x in all"), "{finished:?}");
        let finished = compared(mpi, &["/bin/sh", "-c", "exit 3"], &[]);
        assert_eq!(finished.code, Some(3), "{finished:?}");
        let said = no_ratio(&finished);
        assert!(
            said.contains("it ended with status 3")
                && said.contains("by anabranch run --sim hgx-h200 -np 2 -- /bin/sh -c exit 3"),
            "{finished:?}"
        );
        // One that ends at once, and has no MPI.
        let finished = compared(mpi, &["/bin/true"], &[]);
        assert_eq!(finished.code, Some(1), "{finished:?}");
        let said = no_ratio(&finished);
        assert!(
            said.contains("saw no MPI call") && said.contains("anabranch doctor /bin/true"),
            "{finished:?}"
        );
    });
}
