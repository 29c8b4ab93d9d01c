//! `anabranch doctor --sim`: an installation checked on a simulated node, without a GPU.

use crate::support::on;
use anabranch_tests::{built, run_bounded, scratch_folder, solver, Finished};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// What it says, and its JSON.
fn doctor(words: &[&str], change: impl FnOnce(&mut Command, &Path)) -> (Finished, Value) {
    let folder = scratch_folder("doctor-sim");
    let file = folder.join("doctor.json");
    let mut command = Command::new(&built().command);
    command
        .arg("doctor")
        .arg(format!("--json={}", file.display()))
        .args(["--timeout", "100"])
        .args(words)
        .env_remove("LD_PRELOAD")
        .env("OMPI_MCA_btl", "^ofi");
    change(&mut command, &folder);
    let finished = run_bounded(&mut command, &folder, Duration::from_secs(200));
    let text = fs::read_to_string(&file).unwrap_or_default();
    let json = serde_json::from_str(&text).unwrap_or_else(|_| panic!("no JSON: {finished:?}"));
    let _ = fs::remove_dir_all(folder);
    (finished, json)
}

fn first_line(finished: &Finished) -> &str {
    finished.stdout.lines().next().unwrap_or_default()
}

/// Each check passes, and the message went by the library: under the launcher of the MPI that a program is linked with.
#[test]
fn all_is_well() {
    for name in ["openmpi", "mpich"] {
        on(name, |mpi| {
            let solver = solver(mpi).display().to_string();
            let (finished, json) = doctor(&["--sim", "narval", &solver], |_, _| {});
            assert_eq!(finished.code, Some(0), "{finished:?}");
            let first = first_line(&finished);
            assert_eq!(
                first, "All is well on the simulated node narval.",
                "{finished:?}"
            );
            assert_eq!(json["well"], true, "{json:#}");
            let checks = json["checks"].as_array().expect("checks");
            assert!(checks.iter().all(|check| check["well"] == true), "{json:#}");
            let carried = checks.last().expect("a message")["text"].to_string();
            assert!(
                carried.contains("6 of 6 messages carried by the library"),
                "{carried}"
            );
            let next = format!("anabranch run --sim narval -np 2 -- {solver}");
            assert_eq!(json["next"], next.as_str(), "{json:#}");
        });
    }
}

/// The first line names what is wrong; what comes after it is not tried.
#[test]
fn what_is_wrong_is_said_first() {
    on("openmpi", |_| {
        let fails =
            |words: &[&str], change: &dyn Fn(&mut Command, &Path), said: &str, tried: usize| {
                let (finished, json) = doctor(words, |command, folder| change(command, folder));
                assert_eq!(finished.code, Some(1), "{finished:?}");
                assert!(first_line(&finished).contains(said), "{said}: {finished:?}");
                let checks = json["checks"].as_array().expect("checks");
                let count = checks
                    .iter()
                    .filter(|check| !check["well"].is_null())
                    .count();
                assert_eq!((checks.len(), count), (5, tried), "{json:#}");
            };
        let sim = ["--sim", "narval"];
        let off = |command: &mut Command, _: &Path| _ = command.env("ANABRANCH", "off");
        fails(&sim, &off, "the library: ANABRANCH=off is set: unset it", 1);
        let none = |_: &mut Command, _: &Path| {};
        fails(
            &["--sim", "narva"],
            &none,
            "the simulator: no such topology or file; did you mean narval?",
            2,
        );
        let no_launcher = |command: &mut Command, folder: &Path| _ = command.env("PATH", folder);
        fails(
            &sim,
            &no_launcher,
            "the MPI library: no mpirun or mpiexec",
            4,
        );
        // The ranks run, and no message can be taken.
        let no_helper =
            |command: &mut Command, _: &Path| _ = command.env("ANABRANCH_HELPER", "off");
        fails(
            &sim,
            &no_helper,
            "a message: the library carried none of 6 messages",
            5,
        );
    });
}
