//! `anabranch config` as users meet it.

use std::process::Command;

/// Runs `anabranch config` with only these variables of ours.
fn config(arguments: &[&str], variables: &[(&str, &str)]) -> (String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_anabranch"));
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("ANABRANCH")) {
        command.env_remove(name);
    }
    let output = command
        .arg("config")
        .args(arguments)
        .envs(variables.iter().copied())
        .output()
        .expect("started");
    assert!(output.status.success());
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("UTF-8");
    (text(output.stdout), text(output.stderr))
}

#[test]
fn every_option_is_listed_with_default_value_and_meaning() {
    let (stdout, stderr) = config(&[], &[("ANABRANCH_EAGER", "64k")]);
    assert_eq!(stderr, "");
    let line = stdout
        .lines()
        .find(|line| line.starts_with("ANABRANCH_EAGER "))
        .expect("listed");
    let words: Vec<&str> = line.split_whitespace().collect();
    assert_eq!(&words[..3], ["ANABRANCH_EAGER", "16K", "64K*"]);
    assert!(words.len() > 6, "a meaning follows: {line}");
    assert!(!stdout.contains("INJECT_PANIC"));
    assert!(config(&["--all"], &[]).0.contains("ANABRANCH_INJECT_PANIC"));
}

#[test]
fn json_has_the_same_rows() {
    let (stdout, _) = config(&["--json"], &[("ANABRANCH_MPI_CUDA", "no")]);
    let rows: serde_json::Value = serde_json::from_str(&stdout).expect("JSON");
    let rows = rows.as_array().expect("a list");
    let row = rows
        .iter()
        .find(|row| row["name"] == "ANABRANCH_MPI_CUDA")
        .expect("listed");
    assert_eq!(
        (&row["default"], &row["effective"]),
        (&"auto".into(), &"no".into())
    );
    for row in rows {
        for key in ["name", "default", "effective", "accepts", "doc"] {
            assert!(row[key].is_string(), "{row}");
        }
    }
}

#[test]
fn what_is_not_understood_is_said_on_stderr() {
    let (stdout, stderr) = config(&[], &[("ANABRANCH_STAT", "1"), ("ANABRANCH_SLOTS", "many")]);
    assert_eq!(stderr.lines().count(), 2, "{stderr}");
    assert!(stderr.contains("did you mean ANABRANCH_STATS?"), "{stderr}");
    assert!(
        stderr.contains("ANABRANCH_SLOTS=many") && stderr.contains("using 1048576"),
        "{stderr}"
    );
    assert!(stdout.lines().all(|line| !line.starts_with("anabranch:")));
}
