//! Command lines that are wrong: what is said helps; and what all commands have in common.

use std::fs;
use std::process::Command;

use serde_json::Value;

mod common;
use common::{Installation, ANABRANCH};

/// Status, stdout and stderr of a command line.
fn anabranch(words: &[&str], variables: &[(&str, &str)]) -> (Option<i32>, String, String) {
    let mut command = Command::new(ANABRANCH);
    command
        .args(words)
        .env_remove("NO_COLOR")
        .env_remove("CLICOLOR_FORCE")
        .env_remove("LD_PRELOAD")
        .envs(variables.iter().copied());
    let output = command.output().expect("started");
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    let (stdout, stderr) = (text(output.stdout), text(output.stderr));
    (output.status.code(), stdout, stderr)
}

#[test]
fn what_was_meant_is_said() {
    for (words, hint) in [
        (
            &["run", "-np", "2", "jacobi", "--size", "9x9"][..],
            "behind --: anabranch run -np 2 -- jacobi --size 9x9",
        ),
        (&["confg"], "a similar subcommand exists: 'config'"),
        (&["config", "--jsn"], "a similar argument exists: '--json'"),
        (
            &["/bin/true"],
            "to run a program: anabranch run -np N -- /bin/true",
        ),
        (
            &["topo", "--topology", "belgua"],
            "did you mean beluga? Or give a file",
        ),
        (
            &[
                "plan",
                "--topology",
                "hgx-h20",
                "--from",
                "0",
                "--to",
                "1",
                "--size",
                "1M",
            ],
            "did you mean hgx-h200?",
        ),
        (
            &["compare", "--predicted", "narvall"],
            "did you mean narval?",
        ),
    ] {
        let (status, stdout, stderr) = anabranch(words, &[]);
        assert_eq!(
            (status, stdout.as_str()),
            (Some(2), ""),
            "{words:?}: {stderr}"
        );
        assert!(stderr.contains(hint), "{words:?}: {stderr}");
        assert!(!stderr.contains("count-gpus"), "{stderr}");
    }
}

/// Without a value stdout has JSON and nothing else; with a file, the text is there, too.
#[test]
fn json_means_one_thing() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("out.json");
    let to_file = format!("--json={}", file.display());
    let plan = "plan --topology narval --from 0 --to 1 --size 1M";
    for command in ["config", "topo --topology narval", plan] {
        let words: Vec<&str> = command.split(' ').collect();
        let with = |option| anabranch(&[&words[..], &[option]].concat(), &[]).1;
        let text = anabranch(&words, &[]).1;
        let alone: Value = serde_json::from_str(&with("--json")).expect("JSON");
        assert_eq!(
            serde_json::from_str::<Value>(&with("--json=-")).ok(),
            Some(alone.clone())
        );
        assert_eq!(with(&to_file), text, "{command}");
        let written = fs::read_to_string(&file).expect("written");
        assert_eq!(
            serde_json::from_str::<Value>(&written).ok(),
            Some(alone),
            "{command}"
        );
        let (status, stdout, stderr) =
            anabranch(&[&words[..], &["--json=/no/such/file"]].concat(), &[]);
        assert_eq!(
            (status, stdout.as_str()),
            (Some(2), ""),
            "{command}: {stderr}"
        );
        assert!(
            stderr.contains("--json=/no/such/file: No such file"),
            "{stderr}"
        );
        assert_eq!(stderr.lines().count(), 1, "{stderr}");
    }
}

#[test]
fn colours_are_for_terminals_that_want_them() {
    let coloured = |variables: &[(&str, &str)]| {
        let stdout = anabranch(&["config"], variables).1;
        stdout.contains('\u{1b}')
    };
    assert!(!coloured(&[]));
    assert!(coloured(&[("CLICOLOR_FORCE", "1")]));
    assert!(!coloured(&[("CLICOLOR_FORCE", "1"), ("NO_COLOR", "1")]));
}

/// An installed copy without the simulator names the file that is missing, and what to do.
#[test]
fn a_missing_simulator_is_named() {
    let installation = Installation::bare();
    for words in [
        &[
            "run",
            "--vanilla",
            "--sim",
            "narval",
            "-np",
            "1",
            "--",
            "/bin/true",
        ][..],
        &["doctor", "--sim", "narval"],
    ] {
        let output = Command::new(installation.path("bin/anabranch"))
            .args(words)
            .env("ANABRANCH_LIBRARY", "/no/such/libanabranch.so")
            .output()
            .expect("started");
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8(said).expect("UTF-8");
        assert_ne!(output.status.code(), Some(0), "{said}");
        if words[0] == "run" {
            let file = installation.path("lib/anabranch/simcuda/libcuda.so.1");
            let missing = format!("{} is missing; install it there", file.display());
            assert!(said.contains(&missing), "{said}");
            assert_eq!(said.lines().count(), 1, "{said}");
        } else {
            let first = said.lines().next().unwrap_or_default();
            assert!(
                first.starts_with("Not well on the simulated node narval: the library: "),
                "{said}"
            );
            assert!(said.contains("a message        not tried"), "{said}");
        }
    }
}
