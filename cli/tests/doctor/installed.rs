//! Without a program the MPI of the machine is told, as far as its launcher gives it away.

use std::fs;
use std::path::Path;

use serde_json::Value;

use super::{set_mode, Installation, Seen};

/// A launcher in a folder of its own that does what the script says.
fn launcher(installation: &Installation, prefix: &str, name: &str, script: &str) {
    let folder = installation.path(prefix).join("bin");
    fs::create_dir_all(&folder).expect("created");
    let file = folder.join(name);
    fs::write(&file, format!("#!/bin/sh\n{script}\n")).expect("written");
    set_mode(&file, 0o755);
}

fn seen(installation: &Installation, path: &Path) -> Seen {
    let mut command = installation.with_gpus();
    command
        .env("PATH", path)
        .args(["--no-gpu-test", "--timeout", "5"]);
    Seen::by(&mut command, installation, &[])
}

#[test]
fn the_launcher_in_path_leads_to_its_library() {
    let installation = Installation::new();
    for (prefix, launched_by, says, library, abi) in [
        (
            "a",
            "mpirun",
            "echo 'mpirun (Open MPI) 5.0.11'",
            "lib/libmpi.so.40",
            "Open MPI",
        ),
        (
            "b",
            "mpiexec",
            "echo 'HYDRA build details:'",
            "lib64/libmpich.so.12",
            "MPICH",
        ),
    ] {
        launcher(&installation, prefix, launched_by, says);
        let bin = installation.path(prefix).join("bin");
        let without = seen(&installation, &bin);
        assert_eq!(without.status, 0, "{}", without.text);
        let found = &without.json["installed_mpi"];
        assert_eq!(found["mpi"], Value::Null, "{}", without.text);
        let note = found["note"].as_str().expect("a note");
        assert!(note.contains(abi) && note.contains("give ./app"), "{note}");

        let library = format!("{prefix}/{library}");
        let file = installation.path(&library);
        fs::create_dir_all(file.parent().expect("a folder")).expect("created");
        installation.gcc(&library, "int MPI_Send;", &["-shared", "-fPIC"]);
        let with = seen(&installation, &bin);
        let found = &with.json["installed_mpi"];
        assert_eq!(
            found["launcher"].as_str(),
            bin.join(launched_by).to_str(),
            "{}",
            with.text
        );
        assert_eq!(found["mpi"]["path"].as_str(), file.to_str());
        assert_eq!(found["mpi"]["abi"], abi);
        assert_eq!(found["note"], Value::Null);
        // The line to switch it on is that of this MPI.
        let switch_on = with.json["verdict"]["switch_on"].as_str().expect("a line");
        assert!(switch_on.starts_with(launched_by), "{switch_on}");
    }
}

#[test]
fn what_cannot_be_told_without_a_program_is_said() {
    let installation = Installation::new();
    let note = |prefix: &str| {
        let seen = seen(&installation, &installation.path(prefix).join("bin"));
        assert_eq!(seen.status, 0, "{}", seen.text);
        assert!(
            seen.text.contains("anabranch doctor ./app"),
            "{}",
            seen.text
        );
        let note = &seen.json["installed_mpi"]["note"];
        note.as_str().expect("a note").to_owned()
    };
    assert!(note("nothing").contains("no mpirun or mpiexec"));
    launcher(&installation, "other", "mpirun", "echo 'somebody else'");
    assert!(note("other").contains("not a launcher of an MPI that is known"));
    launcher(&installation, "hung", "mpirun", "while :; do :; done");
    assert!(note("hung").contains("no answer in 5 s"));
}

#[test]
fn with_a_program_its_own_mpi_counts() {
    let installation = Installation::new();
    launcher(
        &installation,
        "a",
        "mpirun",
        "echo 'mpirun (Open MPI) 4.1.4'",
    );
    let mut command = installation.with_gpus();
    command
        .env("PATH", installation.path("a").join("bin"))
        .arg("--no-gpu-test");
    let seen = Seen::by(&mut command, &installation, &["/bin/true"]);
    assert_eq!(seen.json["installed_mpi"], Value::Null, "{}", seen.text);
    assert!(!seen.text.contains("launcher in PATH"), "{}", seen.text);
}
