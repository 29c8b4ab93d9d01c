//! What traces are for: patterns, protocols, links and bindings that a user wants to tell apart, found in the report's data.

use crate::support::{job, on};
use crate::tracing::{files, json};
use anabranch_tests::{built, run_bounded, scratch_folder};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use xtask::mpi::Mpi;

const BYTES: u64 = 256 << 10;
const STEPS: u64 = 16;

/// A case of the program `patterns`, traced.
fn traced(mpi: &Mpi, ranks: usize, case: &str, env: &[(&str, &str)]) -> Value {
    let folder = scratch_folder("trace");
    let job = job(mpi, ranks, "patterns").args(&[case]);
    let job = job.env(
        "ANABRANCH_TRACE",
        &folder.join("trace").display().to_string(),
    );
    let job = env
        .iter()
        .fold(job, |job, (name, value)| job.env(name, value));
    job.passes();
    let report = json(&files(&folder, ranks));
    let _ = std::fs::remove_dir_all(folder);
    report
}

/// Messages and bytes by source and destination.
type Matrix = BTreeMap<(u64, u64), (u64, u64)>;

/// Messages and bytes that each rank sent to each.
fn pairs(report: &Value) -> Matrix {
    let pairs = report["pairs"].as_array().expect("pairs");
    let numbers = pairs.iter().map(|pair| {
        let number = |at: usize| pair[at].as_u64().expect("a number");
        ((number(0), number(1)), (number(2), number(3)))
    });
    numbers.collect()
}

/// The matrix of each pattern is what its definition says, and no two are the same.
#[test]
fn patterns_are_told_apart() {
    const RANKS: u64 = 4;
    on("openmpi", |mpi| {
        let ends = |from: u64, by: u64| (from, (from + by) % RANKS);
        let all = || 0..RANKS;
        let mut expected: Vec<(&str, Matrix)> = Vec::new();
        let ring = |messages: u64, bytes: u64| -> BTreeMap<_, _> {
            all()
                .map(|from| (ends(from, 1), (messages, messages * bytes)))
                .collect()
        };
        expected.push(("ring", ring(STEPS, BYTES)));
        expected.push(("allreduce_ring", ring(2 * (RANKS - 1), BYTES / RANKS)));
        let others = all().flat_map(|from| (1..RANKS).map(move |by| ends(from, by)));
        expected.push(("alltoall", others.map(|ends| (ends, (1, BYTES))).collect()));
        let line = all().flat_map(|from| [(from, from + 1), (from + 1, from)]);
        let line = line.filter(|(from, to)| *from < RANKS && *to < RANKS);
        expected.push((
            "neighbour",
            line.map(|ends| (ends, (STEPS, STEPS * BYTES))).collect(),
        ));
        let partners = all().flat_map(|from| [(from, from ^ 1), (from, from ^ 2)]);
        expected.push((
            "allreduce_doubling",
            partners.map(|ends| (ends, (1, BYTES))).collect(),
        ));
        let mut scattered = Matrix::new();
        for step in 0..STEPS {
            for from in all().filter(|from| (from + step) % 3 != 0) {
                let row = scattered.entry(ends(from, 1 + (step * step + 3 * step) % (RANKS - 1)));
                let row = row.or_default();
                *row = (row.0 + 1, row.1 + BYTES);
            }
        }
        expected.push(("scattered", scattered));
        let matrices: std::collections::BTreeSet<_> =
            expected.iter().map(|(_, of)| of.clone()).collect();
        assert_eq!(matrices.len(), expected.len(), "two patterns are one");
        for (case, expected) in expected {
            let report = traced(mpi, RANKS as usize, case, &[]);
            assert_eq!(pairs(&report), expected, "{case}");
            // Behind each cell stands the call that sent it.
            let sent: u64 = expected.values().map(|(messages, _)| messages).sum();
            let calls = report["calls"]["MPI_Sendrecv"]["calls"]
                .as_u64()
                .expect("calls");
            assert!(calls >= sent / 2, "{case}: {calls} calls, {sent} messages");
        }
    });
}

/// Which protocol a message goes by follows from its length, where nobody waits for it.
#[test]
fn eager_and_rendezvous_by_size() {
    on("openmpi", |mpi| {
        for eager in [4 << 10, 32 << 10] {
            let limit = format!("{eager}");
            let report = traced(mpi, 2, "sizes", &[("ANABRANCH_EAGER", &limit)]);
            let messages = report["messages"].as_array().expect("messages");
            let sizes: Vec<(u64, &str)> = messages
                .iter()
                .filter(|message| {
                    message["tag"] == 1 && message["receiver"]["protocol"].is_string()
                })
                .map(|message| {
                    let protocol = message["receiver"]["protocol"].as_str();
                    (
                        message["bytes"].as_u64().expect("bytes"),
                        protocol.expect("a protocol"),
                    )
                })
                .collect();
            assert_eq!(sizes.len(), 9, "1 KiB to 256 KiB: {sizes:?}");
            for (bytes, protocol) in &sizes {
                assert_eq!(
                    *protocol == "eager",
                    *bytes <= eager,
                    "{bytes} {protocol}, up to {eager}"
                );
            }
        }
    });
}

/// A bandwidth test on a simulated node, traced.
fn bench(mpi: &Mpi, node: &str, visible: &str, env: &[(&str, &str)]) -> Value {
    let folder = scratch_folder("trace");
    let file = folder.join("trace");
    let command = &built().command;
    let mut run = Command::new(command);
    run.args(["run", "--sim", node, "-np", "2", "--mpi"])
        .arg(&mpi.mpirun)
        .arg("--trace")
        .arg(&file)
        .arg("--")
        .arg(command)
        .args(["bench", "bw", "-m", "64M", "-i", "10", "-W", "2"])
        .env_remove("LD_PRELOAD")
        .env("CUDA_VISIBLE_DEVICES", visible)
        .env("OMPI_MCA_btl", "^ofi");
    env.iter()
        .for_each(|(name, value)| _ = run.env(name, value));
    let finished = run_bounded(&mut run, &folder, Duration::from_secs(200));
    assert_eq!(finished.code, Some(0), "{finished:?}");
    let report = json(&files(&folder, 2));
    let _ = std::fs::remove_dir_all(folder);
    report
}

fn advice<'a>(report: &'a Value, about: &str) -> Vec<&'a Value> {
    let all = report["advice"].as_array().expect("advice");
    let is_about = |one: &&Value| {
        one["what"]
            .as_str()
            .is_some_and(|what| what.contains(about))
    };
    all.iter().filter(is_about).collect()
}

/// Bytes by kind of path.
fn by_path(report: &Value) -> BTreeMap<&str, u64> {
    let mut bytes = BTreeMap::new();
    for link in report["links"].as_array().expect("links") {
        let path = link["path"].as_str().expect("a path");
        *bytes.entry(path).or_default() += link["bytes"].as_u64().expect("bytes");
    }
    bytes
}

/// One link carries all while others idle: found, with the option that keeps them idle; and not found where they carry, too.
#[test]
fn one_link_is_overloaded() {
    on("openmpi", |mpi| {
        let report = bench(mpi, "beluga", "0,1", &[("ANABRANCH_PATHS", "direct")]);
        let found = advice(&report, "carries all");
        assert_eq!(found.len(), 1, "{:?}", report["advice"]);
        assert_eq!(
            found[0]["try_this"],
            "unset ANABRANCH_PATHS, which is direct"
        );
        let bytes = by_path(&report);
        assert!(
            bytes["direct"] > 0 && !bytes.contains_key("relay"),
            "{bytes:?}"
        );
        let report = bench(
            mpi,
            "beluga",
            "0,1,2,3",
            &[("ANABRANCH_PATHS", "direct,relay")],
        );
        assert!(
            advice(&report, "carries all").is_empty(),
            "{:?}",
            report["advice"]
        );
        let bytes = by_path(&report);
        // A relay's bytes are copied twice.
        assert!(bytes["relay"] > bytes["direct"] / 4, "{bytes:?}");
    });
}

/// Ranks that run near another memory than their GPUs are found. This machine's processors are on node 0 at least.
#[test]
fn a_wrong_binding() {
    on("openmpi", |mpi| {
        let direct = &[("ANABRANCH_PATHS", "direct")];
        let report = bench(mpi, "hgx-h200", "6,7", direct);
        if !Path::new("/sys/devices/system/node/node1").exists()
            && Path::new("/sys/devices/system/node/node0").exists()
        {
            let found = advice(&report, "far from its GPU");
            assert!(!found.is_empty(), "{:?}", report["advice"]);
            assert!(found[0]["evidence"]
                .as_str()
                .is_some_and(|text| text.contains("on node 1")));
        }
        let report = bench(mpi, "hgx-h200", "0,1", direct);
        assert!(
            advice(&report, "far from its GPU").is_empty(),
            "{:?}",
            report["advice"]
        );
    });
}
