//! What a program that never touches a device buffer pays for each call, in instructions.

use crate::support::on;
use anabranch_tests::{needs_simulator, scratch_folder, skip, Job};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use xtask::layout::repository_root;
use xtask::mpi::Mpi;

/// Kinds of call, how many are counted for each round, and instructions that the library may add to one.
///
/// What tests load is built in a moment, not optimized, and takes three to five times as many as what users load, whose bar
/// is a time: `ci/overhead` holds that against it (`docs/results/host-overhead.txt`). Here a quarter more than was found is
/// too many, so that what makes the one slower is seen in the other. Found with Open MPI 4.1 and MPICH 4.0: 1267 and 1270,
/// 2060 and 2102, 248 and 248, 2023 and 1602.
const BARS: [(&str, f64, f64); 4] = [
    ("self", 1.0, 1590.0),
    ("selfwindow", 128.0, 2630.0),
    ("iprobe", 100.0, 310.0),
    ("testsome", 10.0, 2530.0),
];

/// Rounds that are counted.
const ROUNDS: f64 = 2.0;

fn host_calls(mpi: &Mpi, folder: &Path) -> PathBuf {
    let program = folder.join("host_calls");
    let source = repository_root().join("tests/overhead/host_calls.c");
    let mut compiler = Command::new(&mpi.mpicc);
    compiler.args(["-O2", "-o"]).arg(&program).arg(source);
    let output = compiler.arg("-ldl").output().expect("the compiler runs");
    assert!(output.status.success(), "{output:?}");
    program
}

/// Instructions of each kind of call, by the function that makes them: those of the MPI library's own, and the preloaded ones.
fn counted(profile: &str) -> BTreeMap<(&str, &str), f64> {
    let mut counts = BTreeMap::new();
    let (mut caller, mut callee) = ("", "");
    let mut lines = profile.lines();
    while let Some(line) = lines.next() {
        if let Some(name) = line.strip_prefix("fn=") {
            caller = name;
        } else if let Some(name) = line.strip_prefix("cfn=") {
            callee = name;
        } else if line.starts_with("calls=") {
            // The line after it: where, and how many in all that was called.
            let cost = lines.next().and_then(|line| line.split(' ').nth(1));
            let cost: f64 = cost.and_then(|cost| cost.parse().ok()).expect("a cost");
            *counts.entry((caller, callee)).or_default() += cost;
        }
    }
    counts
}

fn few_instructions(mpi: &Mpi, bytes: &str) {
    needs_simulator("callgrind");
    if Command::new("valgrind").arg("--version").output().is_err() {
        return skip("valgrind", "ci/setup as root");
    }
    let folder = scratch_folder("overhead");
    let file = folder.join("callgrind.out");
    let to_file = format!("--callgrind-out-file={}", file.display());
    let callgrind = ["valgrind", "--tool=callgrind", "--trace-children=yes"];
    let plainly = ["--compress-strings=no", "--compress-pos=no", &to_file];
    let outcome = Job::new(mpi, 1, &host_calls(mpi, &folder))
        // What is counted by call is no part of what a program pays without it.
        .env("ANABRANCH_STATS_DETAILS", "off")
        .args(&["counted", bytes, &ROUNDS.to_string()])
        .ranks_under(&[&callgrind[..], &plainly].concat())
        .run();
    assert_eq!(outcome.finished.code, Some(0), "{outcome}");
    assert!(outcome.stats().is_idle(), "{outcome}");
    let profile = fs::read_to_string(&file).expect("callgrind's file");
    let counts = counted(&profile);
    for (mode, calls, most) in BARS {
        let of = |caller| counts.get(&(caller, mode)).map(|sum| sum / ROUNDS / calls);
        let (own, preloaded) = of("natively").zip(of("preloaded")).expect(mode);
        let added = preloaded - own;
        eprintln!(
            "{}, {bytes} bytes, {mode}: {own:.0}, and {added:.0} more",
            mpi.name
        );
        // Not even a look whether there is anything to do is free.
        assert!(added > 1.0, "{mode}: the library was not in its calls");
        assert!(
            added <= most,
            "{mode}: {added:.0} instructions, not {most} at most"
        );
    }
    let _ = fs::remove_dir_all(folder);
}

#[test]
fn instructions_with_openmpi() {
    on("openmpi", |mpi| {
        few_instructions(mpi, "65536");
        few_instructions(mpi, "4194304");
    });
}

#[test]
fn instructions_with_mpich() {
    on("mpich", |mpi| {
        few_instructions(mpi, "65536");
        few_instructions(mpi, "4194304");
    });
}
