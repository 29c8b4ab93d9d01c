//! The programs that lay the simulated driver beside the vendor's, run on the simulated one.
#![allow(missing_docs, clippy::undocumented_unsafe_blocks)]

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds a program of `conformance/` and runs it on this driver; what it printed.
fn run(program: &str, arguments: &[&str], env: &[(&str, &str)]) -> String {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let folder = tempfile::tempdir().unwrap();
    // Cargo puts the library beside the tests.
    let library = std::env::current_exe()
        .unwrap()
        .with_file_name("libsimcuda.so");
    assert!(library.exists(), "{library:?}");
    std::os::unix::fs::symlink(&library, folder.path().join("libcuda.so.1")).unwrap();
    let binary: PathBuf = folder.path().join(program);
    let built = Command::new("gcc")
        .args(["-O1", "-o"])
        .arg(&binary)
        .arg(root.join("conformance").join(format!("{program}.c")))
        .args(["-ldl", "-pthread", "-lm"])
        .status()
        .expect("gcc");
    assert!(built.success());
    let mut command = Command::new(&binary);
    for var in [
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "SIMCUDA_GPUS",
        "SIMCUDA_REPORT",
        "SIMCUDA_FAULT",
    ] {
        command.env_remove(var);
    }
    let out = command
        .args(arguments)
        .env("LD_LIBRARY_PATH", folder.path())
        .env("SIMCUDA_TOPOLOGY", "hgx-h200")
        .env("SIMCUDA_JOB", format!("{program} {}", std::process::id()))
        .envs(env.iter().copied())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    assert!(
        out.status.success(),
        "{program}: {}\n{}",
        out.status,
        String::from_utf8_lossy(&out.stderr)
    );
    text
}

/// The project's kernels.
fn ptx() -> String {
    let ptx = Path::new(env!("CARGO_MANIFEST_DIR")).join("../kernels/src/kernels.ptx");
    ptx.to_str().unwrap().to_owned()
}

/// Every call of the list is answered: none is missing, hangs or kills its process.
#[test]
fn every_call_is_answered() {
    let text = run("conformance", &[&ptx()], &[]);
    let answers: Vec<&str> = text.lines().filter(|l| l.contains(" | ")).collect();
    assert!(answers.len() > 1500, "{} answers", answers.len());
    // The write that one of these waits is for was refused: they wait for ever, as on the vendor's driver.
    let endless = "memop | cuStreamSynchronize | holding waits | SIGNAL 14";
    for line in answers
        .into_iter()
        .filter(|line| !line.starts_with(endless))
    {
        for bad in ["SIGNAL ", "EXIT ", "ABSENT |", "no context |"] {
            assert!(!line.contains(bad), "{line}");
        }
    }
}

/// The simulated H200 node does what the measured one did, within 10 %, and nobody reacted too late meanwhile.
#[test]
fn the_h200_node_is_as_fast_as_the_measured_one() {
    let measured = include_str!("../conformance/measured.tsv");
    let env = [("SIMCUDA_DATA", "0"), ("SIMCUDA_CHECK", "0")];
    let text = run("fidelity", &[], &env) + &run("turns", &[&ptx()], &env);
    let simulated: HashMap<&str, f64> = text
        .lines()
        .filter_map(|line| {
            let mut fields = line.split('\t');
            Some((fields.next()?, fields.next()?.parse().ok()?))
        })
        .collect();
    let late = simulated["late"];
    let (alone, in_turns) = (simulated["turns.down.alone"], simulated["turns.down"]);
    assert!(
        in_turns < 1.1 * alone,
        "copies down take no turns: {in_turns} us, {alone} us alone"
    );
    assert!(late < 2.0, "late by {late} % of the time: void");
    let mut rows = 0;
    let mut off = Vec::new();
    for line in measured
        .lines()
        .filter(|l| !l.starts_with('#') && !l.is_empty())
    {
        let mut fields = line.split('\t');
        let (row, value) = (fields.next().unwrap(), fields.next().unwrap());
        let value: f64 = value.parse().unwrap();
        let ratio = simulated.get(row).unwrap_or_else(|| panic!("{row}")) / value;
        rows += 1;
        if (ratio - 1.0).abs() > 0.1 {
            off.push(format!("{row}: {ratio:.3}"));
        }
    }
    assert!(rows > 60, "{rows} rows");
    assert!(off.is_empty(), "{off:?}");
}
