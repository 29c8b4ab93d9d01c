//! `anabranch compare` over real launchers: rows that count, and rows that must not.

use crate::support::{on, some};
use anabranch_tests::{built, on_real_gpus, run_bounded, scratch_folder, Finished};
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use xtask::mpi::Mpi;

/// A comparison on a simulated node, with its temporary files in a folder.
fn command(mpi: &Mpi, folder: &Path) -> Command {
    let mut command = Command::new(&built().command);
    command
        .args(["compare", "--sim", "hgx-h200", "--mpi"])
        .arg(&mpi.mpirun)
        // Counts, not times.
        .args(["--late-max", "1000000"])
        .env_remove("LD_PRELOAD")
        .env("TMPDIR", folder)
        // As in `Job`: what looks for network adapters takes Open MPI up to a second in each launch.
        .env("OMPI_MCA_btl", "^ofi");
    command
}

/// Runs a comparison on a simulated node; its end, its JSON and its CSV.
fn compare(mpi: &Mpi, arguments: &[&str]) -> (Finished, Value, String) {
    let folder = scratch_folder("compare");
    let (json, csv) = (folder.join("out.json"), folder.join("out.csv"));
    let mut command = command(mpi, &folder);
    command
        .args(arguments)
        .arg(format!("--json={}", json.display()))
        .arg("--csv")
        .arg(&csv);
    let finished = run_bounded(&mut command, &folder, Duration::from_secs(400));
    let text = fs::read_to_string(&json).unwrap_or_default();
    let json = serde_json::from_str(&text).unwrap_or_else(|_| panic!("no JSON: {finished:?}"));
    let csv = fs::read_to_string(&csv).expect("CSV");
    let left: Vec<_> = fs::read_dir(&folder)
        .expect("the folder of the run")
        .flatten()
        .filter(|entry| entry.path().is_dir())
        .collect();
    assert!(left.is_empty(), "left behind: {left:?}");
    let _ = fs::remove_dir_all(folder);
    (finished, json, csv)
}

fn rows(json: &Value) -> &[Value] {
    json["rows"].as_array().expect("rows")
}

/// Two rounds of two configurations and the noise of the first: each row verified, timed and counted in each.
fn counts(mpi: &Mpi) {
    let (finished, json, csv) = compare(
        mpi,
        &[
            "--benches",
            "latency,bw,bibw,mbw-mr,ring,all-to-all",
            "--pairs",
            "DD,DH,HD",
            "--sizes",
            "4K,64K",
            "--windows",
            "1,4",
            "--rounds",
            "2",
            "--with",
            "small=ANABRANCH_THRESHOLD=16K",
        ],
    );
    assert_eq!(finished.code, Some(0), "{finished:?}\n{json:#}");
    assert_eq!(json["clean"], true, "{json:#}");
    assert_eq!(json["rounds"], 2);
    // Three pairs of two sizes, latency once and the others with two windows; ring and all-to-all from device to device.
    assert_eq!(rows(&json).len(), 3 * 2 * (1 + 3 * 2) + 2 * 2 * 2);
    for row in rows(&json) {
        for name in ["anabranch", "anabranch2", "small"] {
            let cell = &row["configurations"][name];
            assert_eq!(
                cell["launches"].as_array().map(Vec::len),
                Some(2),
                "{row:#}"
            );
            assert_eq!(cell["wrong_messages"], 0, "{row:#}");
            let by_descriptor = cell["counters"]["sends_rts_bytes"].as_u64().unwrap_or(0);
            let small = name == "small" && row["bytes"] == 4096;
            // Only the first of a pair sends from the device if the second's buffers are the host's.
            let none = small
                || (row["buffers"][0] == "H"
                    && row["bench"] != "latency"
                    && row["bench"] != "bibw");
            assert_eq!(by_descriptor < 4096, none, "{name}: {row:#}");
        }
        assert_eq!(row["configurations"]["anabranch"]["ratio"], Value::Null);
        assert!(row["configurations"]["small"]["ratio"]
            .as_f64()
            .is_some_and(|ratio| ratio > 0.0));
        assert!(row["floor"]
            .as_f64()
            .is_some_and(|floor| floor > 0.0 && floor <= 1.0));
    }
    assert_eq!(csv.lines().count(), 1 + 3 * rows(&json).len(), "{csv}");
    assert!(
        finished.stdout.contains("== mbw-mr D D, window 4, MB/s"),
        "{finished:?}"
    );
}

#[test]
fn counts_of_each_configuration() {
    for name in some(&["mpich5", "openmpi"], 1) {
        on(name, counts);
    }
}

/// What users measure first: a launch for each benchmark, its first messages among those that count,
/// persistent requests too.
fn first(mpi: &Mpi) {
    let (finished, json, csv) = compare(
        mpi,
        &[
            "--suite",
            "first",
            "--benches",
            "latency,bw,bibw",
            "--pairs",
            "DD,HD",
            "--windows",
            "4",
            "--sizes",
            "8,2M",
            "--rounds",
            "2",
        ],
    );
    assert_eq!(finished.code, Some(0), "{finished:?}\n{json:#}");
    assert_eq!(json["clean"], true, "{json:#}");
    assert_eq!(rows(&json).len(), 3 * 2 * 2 * 2, "{json:#}");
    for row in rows(&json) {
        let of = &row["configurations"]["anabranch"];
        // Two launches of so many iterations: no others come before them.
        let iterations = if row["bytes"] == 8 { 200 } else { 20 };
        assert_eq!(of["iterations"], 2 * iterations, "{row:#}");
        assert_eq!(of["wrong_messages"], 0, "{row:#}");
        let before = if row["bytes"] == 8 { 10 } else { 2 };
        let (window, ways, acknowledged) = match row["bench"].as_str() {
            Some("latency") => (1, 2, 0),
            Some("bw") => (4, 1, 1),
            _ => (4, 2, 0),
        };
        let messages = |iterations: u64| iterations * (window * ways + acknowledged);
        let from_device = match (row["buffers"][0].as_str(), ways) {
            (Some("D"), _) => messages(iterations + before),
            (_, 1) => iterations + before,
            _ => messages(iterations + before) / 2,
        };
        assert_eq!(of["counters"]["sends_device"], from_device, "{row:#}");
    }
    let persistent = csv.lines().filter(|line| line.contains("-persistent,"));
    assert_eq!(persistent.count(), 2 * 3 * 2 * 2, "{csv}");
    let text = &finished.stdout;
    assert!(
        text.contains(" rows take more than 1.02 of the time of anabranch in both halves"),
        "{text}"
    );
    assert!(
        text.contains("Iterations of 1M and more that took more than"),
        "{text}"
    );
}

#[test]
fn suite_of_first_runs() {
    for name in some(&["openmpi5", "mpich"], 1) {
        on(name, first);
    }
}

/// In turns within one launch the messages of each configuration go its way: those that the library counts are its own turns', and
/// all arrive.
fn in_turns(mpi: &Mpi) {
    let (finished, json, _) = compare(
        mpi,
        &[
            "--turns",
            "--benches",
            "latency,bw,bibw,ring",
            "--pairs",
            "DD,DH",
            "--sizes",
            "8,64K",
            "--windows",
            "4",
            "--np",
            "3",
            "--rounds",
            "1",
            "--configs",
            "vanilla,anabranch,vanilla2",
        ],
    );
    assert_eq!(finished.code, Some(0), "{finished:?}\n{json:#}");
    assert!(json["turns"] == true && json["clean"] == true, "{json:#}");
    for row in rows(&json) {
        let cells = &row["configurations"];
        for name in ["vanilla", "anabranch", "vanilla2"] {
            assert_eq!(cells[name]["wrong_messages"], 0, "{name}: {row:#}");
        }
        let counted = &cells["anabranch"]["counters"];
        let sent = counted["sends_device"].as_u64().unwrap_or(0);
        assert!(sent > 0, "{row:#}");
        // All of its messages went by descriptor that may: the row would be void else. None of the others is counted.
        assert_eq!(cells["vanilla"]["counters"], Value::Null, "{row:#}");
        // No time passes on a simulated node where the MPI library copies. The one that is packed for a GPU node asks CUDA to.
        let timed = cells["vanilla"]["launches"].as_array().map(Vec::len);
        assert!(on_real_gpus() || timed == Some(0), "{row:#}");
        let turns = cells["anabranch"]["turns"].as_array().map(Vec::len);
        assert_eq!(turns, Some(5), "{row:#}");
    }
}

#[test]
fn in_turns_on_openmpi() {
    on("openmpi", in_turns);
}

#[test]
fn in_turns_on_mpich5() {
    on("mpich5", in_turns);
}

/// Sets of paths take turns within one launch, too: messages go over theirs, and are counted with theirs.
#[test]
fn paths_in_turns() {
    on("openmpi", |mpi| {
        let arguments = [
            "--turns",
            "--benches",
            "bw",
            "--sizes",
            "64M",
            "--windows",
            "1",
            "--rounds",
            "1",
            "--configs",
            "one,relays,all,one2",
        ];
        let (finished, json, _) = compare(mpi, &[&arguments[..], &["--sim", "beluga"]].concat());
        assert_eq!(finished.code, Some(0), "{finished:?}\n{json:#}");
        let row = &rows(&json)[0];
        let count = |name: &str, counter: &str| {
            let counters = &row["configurations"][name]["counters"];
            counters[counter].as_u64().unwrap_or(0)
        };
        // By the window and its acknowledgements, as a row by itself has it.
        for name in ["one", "relays", "all", "one2"] {
            assert!(count(name, "sends_rts") > 5, "{name}: {row:#}");
        }
        let over = |name| {
            ["multipath_relay_bytes", "multipath_host_bytes"]
                .map(|counter| count(name, counter) > 0)
        };
        assert_eq!(over("one"), [false, false], "{row:#}");
        assert_eq!(over("relays"), [true, false], "{row:#}");
        assert_eq!(over("all"), [true, true], "{row:#}");
        let ratio = row["configurations"]["relays"]["ratio"].as_f64();
        assert!(ratio.is_some_and(|ratio| ratio > 1.5), "{row:#}");
    });
}

/// `--predicted` tells what `anabranch plan` does by the same file, beside what was measured without the acknowledgement.
#[test]
#[allow(
    clippy::too_many_lines,
    reason = "rows of one comparison beside those of plan"
)]
fn predictions_are_those_of_plan() {
    on("openmpi", |mpi| {
        let folder = scratch_folder("predicted");
        let (model, node) = (folder.join("model.json"), folder.join("node.toml"));
        let measured = Command::new(&built().command)
            .args(["topo", "--measure", "--model"])
            .arg(&model)
            .arg("--dump")
            .arg(&node)
            .env("SIMCUDA_TOPOLOGY", "beluga")
            .env("SIMCUDA_JOB", format!("predicted-{}", std::process::id()))
            .env("LD_LIBRARY_PATH", &built().simcuda)
            .output()
            .expect("started");
        assert!(measured.status.success(), "{measured:?}");
        let planned = |size: &str, window: &str, more: &[&str]| {
            let output = Command::new(&built().command)
                .args(["plan", "--from", "0", "--to", "1", "--json", "--topology"])
                .arg(&node)
                .args(["--size", size, "--window", window])
                .args(more)
                .output()
                .expect("started");
            assert!(output.status.success(), "{output:?}");
            let plan: Value = serde_json::from_slice(&output.stdout).expect("JSON");
            plan["predicted_us"].as_f64().expect("a time")
        };
        let arguments = [
            "--sim",
            "beluga",
            "--benches",
            "bw,bibw",
            "--sizes",
            "1M,64M",
            "--windows",
            "2",
            "--rounds",
            "1",
            "--configs",
            "one,relays,driven",
            "--predicted",
            node.to_str().expect("UTF-8"),
        ];
        let (finished, json, csv) = compare(mpi, &arguments);
        assert_eq!(finished.code, Some(0), "{finished:?}\n{json:#}");
        let figure = |row: &Value, name: &str| {
            let figures = &row["configurations"][name]["launches"];
            figures[0].as_f64().expect("a figure")
        };
        // The round trip of an acknowledgement is measured, too.
        let [acknowledgement, rows @ ..] = rows(&json) else {
            panic!("{json:#}")
        };
        assert_eq!(acknowledgement["bytes"], 4, "{acknowledgement:#}");
        assert_eq!(rows.len(), 4);
        let (bytes, window) = (f64::from(64 << 20), 2.0);
        for row in rows {
            let is_both_ways = row["bench"] == "bibw";
            for (name, options) in [
                ("one", "--paths direct"),
                ("relays", "--paths direct,relay"),
                ("driven", "--owner one"),
            ] {
                let predicted = &row["configurations"][name]["predicted"];
                if row["bytes"] == 1 << 20 {
                    assert_eq!(*predicted, Value::Null, "{row:#}");
                    continue;
                }
                let mut options: Vec<&str> = options.split(' ').collect();
                options.extend(is_both_ways.then_some("--both-ways"));
                let by_plan = planned("64M", "2", &options);
                let took = match is_both_ways {
                    true => 2.0 * window * bytes / figure(row, name),
                    false => window * bytes / figure(row, name) - figure(acknowledgement, name),
                };
                for (what, expected) in [
                    ("predicted_us", by_plan),
                    ("took_us", took),
                    ("error", took / by_plan - 1.0),
                ] {
                    let it = predicted[what].as_f64().expect("a number");
                    // Both directions of this node are alike to a few bytes.
                    let is_near = (it - expected).abs() <= 0.01 * expected.abs().max(1.0);
                    assert!(is_near, "{name}, {what}: {it}, {expected}\n{row:#}");
                }
            }
            if row["bytes"] != 1 << 20 {
                let us = |name: &str| {
                    let predicted = &row["configurations"][name]["predicted"];
                    predicted["predicted_us"].as_f64().expect("a time")
                };
                assert!(us("relays") < 0.7 * us("one"), "{row:#}");
            }
        }
        assert!(csv
            .lines()
            .next()
            .is_some_and(|head| head.contains(",predicted_us,took_us,")));
        assert!(
            finished.stdout.contains("relays: 2 predictions, off by"),
            "{finished:?}"
        );
        let _ = fs::remove_dir_all(folder);
    });
}

/// Before anything is measured.
#[test]
fn predictions_of_a_node_that_is_not_there_are_refused() {
    let refused = Command::new(&built().command)
        .args(["compare", "--predicted", "no-such"])
        .output()
        .expect("started");
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    let is_told =
        text.contains("--predicted no-such: No such file") && text.contains("one of beluga");
    assert!(is_told && refused.status.code() == Some(2), "{text}");
}

/// Messages of a short window, of which the MPI library brings one at a time, are launched together: two launches on a stream go
/// without waiting for each other, so none of these would be in a batch. Also those of several senders.
#[test]
fn short_windows_in_one_launch() {
    for name in some(&["mpich", "openmpi"], 1) {
        on(name, |mpi| {
            // The second: behind the first message, which is begun with while the program sends.
            for (bench, begins_early) in [
                ("bw --sizes 64K --windows 2", false),
                ("ring --np 2 --sizes 1M --windows 4", true),
                ("all-to-all --np 4 --sizes 1280K --windows 4", false),
            ] {
                let arguments = format!("--benches {bench} --iterations 60 --rounds 1");
                let arguments: Vec<&str> = arguments.split(' ').collect();
                let (finished, json, _) =
                    compare(mpi, &[&arguments[..], &["--configs", "anabranch"]].concat());
                assert_eq!(finished.code, Some(0), "{finished:?}\n{json:#}");
                let counters = &rows(&json)[0]["configurations"]["anabranch"]["counters"];
                let count = |name: &str| counters[name].as_u64().unwrap_or(0);
                let (held, batched) = (count("launches_held"), count("copies_batched"));
                assert!(held > 0 && batched >= held, "{bench}: {counters:#}");
                assert_eq!(
                    count("begun_between") > 0,
                    begins_early,
                    "{bench}: {counters:#}"
                );
            }
        });
    }
}

/// What would fail in every launch is told after one, in a line that says why.
#[test]
fn a_launch_that_fails_is_told_at_once() {
    on("openmpi", |mpi| {
        let folder = scratch_folder("compare-fails");
        let mut fails = command(mpi, &folder);
        fails.args(["--mpirun-arg", "--no-such-option"]);
        let finished = run_bounded(&mut fails, &folder, Duration::from_secs(60));
        assert_eq!(finished.code, Some(1), "{finished:?}");
        let lines: Vec<&str> = finished.stderr.lines().collect();
        assert!(lines[0].ends_with("check: one short launch"), "{lines:?}");
        let said = "anabranch: nothing was measured: a launch of anabranch failed: ";
        assert!(lines.len() == 2 && lines[1].starts_with(said), "{lines:?}");
        assert!(
            lines[1].ends_with("; -v shows all that was said"),
            "{lines:?}"
        );
        let _ = fs::remove_dir_all(folder);
    });
}

/// Configurations that cannot take turns within one launch are refused, with what to do.
#[test]
fn no_turns_for_what_is_read_once() {
    for (arguments, said) in [
        (
            &["--configs", "vanilla,best"][..],
            "needs a configuration with the library",
        ),
        (
            &["--configs", "vanilla,one,all,driven"],
            "one and driven differ",
        ),
        (
            &["--configs", "best,anabranch"],
            "best cannot have its own, use vanilla",
        ),
        (&["--benches", "jacobi"], "not with jacobi"),
    ] {
        let refused = Command::new(&built().command)
            .args(["compare", "--turns"])
            .args(arguments)
            .output()
            .expect("started");
        let text = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(text.contains(said), "{arguments:?}: {text}");
        assert_eq!(refused.status.code(), Some(2), "{text}");
    }
}

/// Where messages did not go as the pattern asks for, the row is void and the command fails.
#[test]
fn a_row_that_does_not_count() {
    on("openmpi", |mpi| {
        let (finished, json, _) = compare(
            mpi,
            &[
                "--benches",
                "bw",
                "--sizes",
                "64K",
                "--windows",
                "4",
                "--rounds",
                "1",
                "--with",
                "none=ANABRANCH_SLOTS=0",
            ],
        );
        assert_eq!(finished.code, Some(1), "{finished:?}");
        let cells = &rows(&json)[0]["configurations"];
        assert_eq!(
            cells["anabranch"]["void"].as_array().map(Vec::len),
            Some(0),
            "{json:#}"
        );
        let void = cells["none"]["void"].to_string();
        assert!(
            void.contains("sends_rts") && void.contains("fallback_no_slot"),
            "{json:#}"
        );
        assert!(finished.stdout.contains("VOID [none]"), "{finished:?}");
    });
}

/// A budget ends the comparison between two rounds; the first is always made.
#[test]
fn a_budget_ends_it_between_rounds() {
    on("openmpi", |mpi| {
        let (finished, json, _) = compare(
            mpi,
            &[
                "--benches",
                "latency",
                "--sizes",
                "64K",
                "--rounds",
                "50",
                "--budget",
                "1",
            ],
        );
        assert_eq!(finished.code, Some(0), "{finished:?}");
        let rounds = json["rounds"].as_u64().expect("rounds");
        assert!((1..50).contains(&rounds), "{json:#}");
    });
}

/// Configurations that go by a name do what it says: by which paths messages come, and who makes the copies.
#[test]
fn configurations_by_name() {
    let help = Command::new(&built().command)
        .args(["compare", "--help"])
        .output()
        .expect("started");
    let help = String::from_utf8_lossy(&help.stdout).into_owned();
    let help: Vec<&str> = help.split_whitespace().collect();
    let help = help.join(" ");
    let names = ["one", "relays", "host", "all", "driven"];
    for name in names {
        assert!(help.contains(&format!("{name} (")), "{name}: {help}");
    }
    let refused = Command::new(&built().command)
        .args(["compare", "--configs", "nothing"])
        .output()
        .expect("started");
    let refused = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.contains(&names.join(", ")), "{refused}");
    on("openmpi", |mpi| {
        let (finished, json, _) = compare(
            mpi,
            &[
                "--sim",
                "beluga",
                "--benches",
                "bw",
                "--sizes",
                "64M",
                "--windows",
                "4",
                "--iterations",
                "4",
                "--rounds",
                "1",
                "--configs",
                &names.join(","),
            ],
        );
        assert_eq!(finished.code, Some(0), "{finished:?}\n{json:#}");
        let cells = &rows(&json)[0]["configurations"];
        // Whether messages came over other GPUs, through host memory, and by copies of the receiver's alone.
        for (name, expected) in [
            ("one", [false, false, false]),
            ("relays", [true, false, false]),
            ("host", [false, true, false]),
            ("all", [true, true, false]),
            ("driven", [true, true, true]),
        ] {
            let counters = &cells[name]["counters"];
            let count = |name: &str| counters[name].as_u64().unwrap_or(0);
            let driven =
                ["streams", "batch", "graph"].map(|how| count(&format!("one_owner_by_{how}")));
            let seen = [
                count("multipath_relay_bytes") > 0,
                count("multipath_host_bytes") > 0,
                driven.iter().sum::<u64>() > 0,
            ];
            assert_eq!(seen, expected, "{name}: {counters:#}");
            assert!(count("sends_rts") > 0, "{name}: {counters:#}");
        }
    });
}

/// What was measured before a signal is not lost.
#[test]
fn a_signal_ends_it_with_what_there_is() {
    on("openmpi", |mpi| {
        let folder = scratch_folder("compare-stopped");
        let json = folder.join("out.json");
        let child = command(mpi, &folder)
            .args(["--benches", "bw", "--sizes", "4K", "--windows", "1"])
            .args(["--rounds", "999"])
            .arg(format!("--json={}", json.display()))
            .stdout(Stdio::piped())
            .spawn()
            .expect("started");
        let rounds = || {
            let text = fs::read_to_string(&json).unwrap_or_default();
            let json: Value = serde_json::from_str(&text).unwrap_or_default();
            json["rounds"].as_u64().unwrap_or(0)
        };
        let started = Instant::now();
        while rounds() < 1 {
            assert!(started.elapsed() < Duration::from_secs(300), "no round");
            std::thread::sleep(Duration::from_millis(20));
        }
        // SAFETY: kill takes no pointers; the child has not been waited for, so the number is its own.
        unsafe { libc::kill(i32::try_from(child.id()).expect("a pid"), libc::SIGTERM) };
        let ended = child.wait_with_output().expect("waited for");
        let said = String::from_utf8_lossy(&ended.stdout);
        assert_eq!(ended.status.code(), Some(130), "{said}");
        for part in [" of 999 rounds in", "then stopped by a signal", "== bw D D"] {
            assert!(said.contains(part), "{part}: {said}");
        }
        assert!(!said.contains("FAILED"), "{said}");
        // What was launched of the last round counts, too.
        let text = fs::read_to_string(&json).expect("JSON");
        let json: Value = serde_json::from_str(&text).expect("JSON");
        let launches = |name: &str| {
            let cell = &json["rows"][0]["configurations"][name];
            cell["launches"].as_array().map_or(0, Vec::len) as u64
        };
        let of_all = launches("anabranch") + launches("anabranch2");
        let complete = 2 * json["rounds"].as_u64().expect("rounds");
        let partly = u64::from(json["partial_round"] == true);
        assert_eq!(of_all, complete + partly, "{json:#}");
        assert_eq!(
            said.contains(", and part of one more"),
            partly == 1,
            "{said}"
        );
        let _ = fs::remove_dir_all(folder);
    });
}
