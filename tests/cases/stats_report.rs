//! What `anabranch report` says of a job's statistics, also of files that are damaged, missing or of another run.

use crate::stats_details::{counted, number, ranks};
use crate::support::{anabranch, job, on};
use anabranch_tests::nodes::nodes_permitted;
use anabranch_tests::{built, run_bounded, scratch_folder, Finished};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

/// `anabranch report`.
fn report(files: &[&Path], options: &[&str]) -> Finished {
    let files: Vec<String> = files
        .iter()
        .map(|file| file.display().to_string())
        .collect();
    let mut words = vec!["report"];
    words.extend(files.iter().map(String::as_str));
    words.extend(options);
    anabranch(&words, &[])
}

fn json(files: &[&Path]) -> Value {
    let finished = report(files, &["--json"]);
    assert_eq!(finished.code, Some(0), "{finished:?}");
    serde_json::from_str(&finished.stdout).expect("JSON")
}

/// The row of a table that begins with these words.
fn row<'a>(text: &'a str, words: &[&str]) -> Vec<&'a str> {
    let rows = text
        .lines()
        .map(|line| line.split_whitespace().collect::<Vec<_>>());
    let mut rows = rows.filter(|row| row.starts_with(words));
    rows.next()
        .unwrap_or_else(|| panic!("no row {words:?} in\n{text}"))
}

/// The report has the ring's bytes in its matrix, its calls, and the reasons of what was not taken with what to do.
#[test]
fn a_ring_is_reported() {
    on("openmpi", |mpi| {
        let folder = scratch_folder("stats");
        let file = folder.join("r");
        counted(mpi, 4, ("counted", &["ring"]), &file);
        let finished = report(&[&file], &[]);
        assert_eq!(
            (finished.code, finished.stderr.as_str()),
            (Some(0), ""),
            "{finished:?}"
        );
        let text = &finished.stdout;
        let host = fs::read_to_string("/proc/sys/kernel/hostname").expect("a name");
        let head = text.lines().next().unwrap_or_default();
        assert!(
            head.contains(": 4 ranks on ") && head.contains(host.trim_end()),
            "{head}"
        );
        assert_eq!(row(text, &["MPI_Send"])[1], "24", "{text}");
        let matrix = text
            .split("\nMessages from rank to rank\n")
            .nth(1)
            .expect("a matrix");
        assert_eq!(row(matrix, &["1"]), ["1", ".", ".", "6", "."], "{text}");
        assert_eq!(row(matrix, &["3"]), ["3", "6", ".", ".", "."], "{text}");
        let matrix = text
            .split("\nBytes from rank to rank\n")
            .nth(1)
            .expect("a matrix");
        // 6 times 160,000 bytes.
        assert_eq!(row(matrix, &["3"])[1], "937.5K", "{text}");
        let value = json(&[&file]);
        let pairs = value["pairs"].as_array().expect("pairs");
        let found: Vec<[u64; 4]> = pairs
            .iter()
            .map(|pair| ["from", "to", "messages", "bytes"].map(|name| number(&pair[name])))
            .collect();
        assert_eq!(
            found,
            [
                [0, 1, 6, 240_000],
                [1, 2, 6, 480_000],
                [2, 3, 6, 720_000],
                [3, 0, 6, 960_000]
            ]
        );
        let in_calls: u64 = value["calls"]
            .as_array()
            .expect("calls")
            .iter()
            .map(|it| number(&it["calls"]))
            .sum();
        let by_rank: u64 = value["ranks"]
            .as_array()
            .expect("ranks")
            .iter()
            .map(|it| number(&it["calls"]))
            .sum();
        assert_eq!(in_calls, by_rank);
        // To a file, and as text beside it.
        let to = folder.join("out.json");
        let finished = report(&[&file], &[&format!("--json={}", to.display())]);
        assert!(
            finished.code == Some(0) && finished.stdout.contains("MPI_Send"),
            "{finished:?}"
        );
        let written = fs::read_to_string(&to).expect("written");
        assert_eq!(
            serde_json::from_str::<Value>(&written).expect("JSON"),
            value
        );
        let _ = fs::remove_dir_all(folder);
    });
}

/// What was not taken is there with its reason and with what to do.
#[test]
fn reasons_are_reported() {
    on("openmpi", |mpi| {
        let folder = scratch_folder("stats");
        // Buffered sends go by the MPI library.
        let file = folder.join("p");
        let (_, stats) = counted(mpi, 2, ("p2p", &[]), &file);
        let buffered = number(&stats["totals"]["fallbacks"]["buffered"]["messages"]);
        assert!(buffered > 0, "{stats:#}");
        let text = report(&[&file], &[]).stdout;
        assert_eq!(
            row(&text, &["a", "buffered", "send"])[3],
            buffered.to_string(),
            "{text}"
        );
        assert!(text.contains("buffered: use MPI_Send"), "{text}");
        let _ = fs::remove_dir_all(folder);
    });
}

/// More ranks than a matrix has room for: the pairs with most bytes.
#[test]
fn many_ranks_are_reported_by_pairs() {
    on("openmpi", |mpi| {
        let folder = scratch_folder("stats");
        let file = folder.join("r");
        counted(mpi, 18, ("counted", &["ring"]), &file);
        let text = report(&[&file], &[]).stdout;
        assert!(
            text.contains("The 20 pairs of ranks with most bytes, of 18"),
            "{text}"
        );
        let pairs = text.split("with most bytes").nth(1).expect("pairs");
        assert_eq!(row(pairs, &["17", "0", "6"])[3], "4218.8K", "{text}");
        assert!(!text.contains("from \\ to"), "{text}");
        let _ = fs::remove_dir_all(folder);
    });
}

/// Two nodes: each has its file, which together are the job.
#[test]
fn the_files_of_two_nodes_are_one_job() {
    if !nodes_permitted() {
        return;
    }
    on("openmpi", |mpi| {
        let folder = scratch_folder("stats");
        job(mpi, 4, "counted")
            .args(&["ring"])
            .on_two_nodes()
            .env("ANABRANCH_TRACE_BY_MACHINE", "on")
            .env(
                "ANABRANCH_STATS",
                &folder.join("s-%r.json").display().to_string(),
            )
            .run()
            .check_passed();
        let files = [folder.join("s-0.json"), folder.join("s-2.json")];
        let [first, second] = [0, 1].map(|file: usize| files[file].as_path());
        let value = json(&[second, first]);
        assert_eq!(value["notes"], Value::Array(vec![]), "{value:#}");
        assert_eq!(
            value["hosts"].as_array().map(Vec::len),
            Some(2),
            "{value:#}"
        );
        let pairs = value["pairs"].as_array().expect("pairs");
        assert_eq!(
            pairs.iter().map(|pair| number(&pair["bytes"])).sum::<u64>(),
            2_400_000,
            "{value:#}"
        );
        // From node to node it is the MPI library that carries them.
        let by_mpi = |from: u64| {
            let pair = pairs
                .iter()
                .find(|pair| pair["from"] == from)
                .expect("a pair");
            (number(&pair["bytes_by_mpi"]), number(&pair["bytes"]))
        };
        assert_eq!(by_mpi(1), (480_000, 480_000), "{value:#}");
        assert_eq!(by_mpi(3), (960_000, 960_000), "{value:#}");
        // One of the two: what it knows is shown, and what is missing is said.
        let finished = report(&[first], &[]);
        assert!(
            finished.code == Some(0) && finished.stdout.contains("2 of 4 ranks"),
            "{finished:?}"
        );
        assert!(
            finished.stdout.contains("! no file has rank 2, 3:"),
            "{finished:?}"
        );
        assert!(finished.stdout.contains("MPI_Send"), "{finished:?}");
        let _ = fs::remove_dir_all(folder);
    });
}

/// What cannot be used is named in one line, and what can is shown.
#[test]
fn damaged_files() {
    on("openmpi", |mpi| {
        let folder = scratch_folder("stats");
        let [good, other] = ["good", "other"].map(|name| folder.join(name));
        for file in [&good, &other] {
            counted(mpi, 2, ("counted", &["late"]), file);
        }
        let text = fs::read_to_string(&good).expect("a file");
        let bad = folder.join("bad");
        let missing = folder.join("missing");
        let cases: [(Option<String>, &str); 7] = [
            (None, "No such file"),
            (Some(String::new()), "it is empty"),
            (Some("hello".into()), "it is not JSON"),
            (Some(text[..text.len() / 2].into()), "it ends early"),
            (Some("{\"schema\": 3}".into()), "no counters of ranks"),
            (
                Some(text.replace("\"schema\": 3", "\"schema\": 7")),
                "its schema is 7",
            ),
            (
                Some(text.replace("\"pid\"", "\"dip\"")),
                "it was changed, or is damaged",
            ),
        ];
        for (content, said) in cases {
            let file = match content {
                Some(content) => {
                    fs::write(&bad, content).expect("written");
                    &bad
                }
                None => &missing,
            };
            let alone = report(&[file], &[]);
            assert_eq!(alone.code, Some(2), "{alone:?}");
            assert!(alone.stdout.is_empty(), "{alone:?}");
            let lines: Vec<&str> = alone.stderr.lines().collect();
            assert_eq!(lines.len(), 1, "{alone:?}");
            let name = file.display().to_string();
            assert!(
                lines[0].contains(&name) && lines[0].contains(said),
                "{said}: {alone:?}"
            );
            let beside = report(&[file, &good], &[]);
            assert_eq!(beside.code, Some(1), "{beside:?}");
            assert!(
                beside.stdout.contains("MPI_Recv") && beside.stderr.contains(said),
                "{beside:?}"
            );
        }
        for (files, said) in [
            ([&good, &other], "of another run"),
            ([&good, &good], "it has rank 0"),
        ] {
            let finished = report(&files.map(PathBuf::as_path), &[]);
            assert_eq!(finished.code, Some(1), "{finished:?}");
            assert!(
                finished.stderr.contains(said) && finished.stderr.lines().count() == 1,
                "{finished:?}"
            );
            assert_eq!(row(&finished.stdout, &["MPI_Recv"])[1], "1", "{finished:?}");
        }
        let none = report(&[], &[]);
        assert!(
            none.code == Some(2) && none.stderr.contains("FILE"),
            "{none:?}"
        );
        let _ = fs::remove_dir_all(folder);
    });
}

/// A file of an older library has its counters.
#[test]
fn a_file_of_an_older_library() {
    on("openmpi", |mpi| {
        let folder = scratch_folder("stats");
        let [file, bad] = ["new", "old"].map(|name| folder.join(name));
        let (_, old) = counted(mpi, 2, ("counted", &["late"]), &file);
        // As an older library has it.
        let rank = |rank: &Value| {
            let fields = ["rank", "pid", "counters", "fallbacks"];
            Value::from_iter(fields.map(|name| (name.to_owned(), rank[name].clone())))
        };
        let old = serde_json::json!({
            "schema": 2,
            "version": "0.0.9",
            "ranks": ranks(&old).iter().map(rank).collect::<Vec<_>>(),
            "totals": old["totals"],
        });
        fs::write(&bad, old.to_string()).expect("written");
        let finished = report(&[&bad], &[]);
        assert_eq!(finished.code, Some(0), "{finished:?}");
        assert!(
            finished
                .stdout
                .contains("version 0.0.9 has written counters only"),
            "{finished:?}"
        );
        let _ = fs::remove_dir_all(folder);
    });
}

/// Counters alone, where no more is wanted.
#[test]
fn counters_alone() {
    on("openmpi", |mpi| {
        let folder = scratch_folder("stats");
        let file = folder.join("s");
        job(mpi, 2, "counted")
            .args(&["late"])
            .env("ANABRANCH_STATS", &file.display().to_string())
            .env("ANABRANCH_STATS_DETAILS", "off")
            .passes();
        let value = json(&[&file]);
        assert_eq!(value["calls"], Value::Array(vec![]), "{value:#}");
        let note = value["notes"][0].as_str().unwrap_or_default();
        assert!(note.contains("counters only"), "{value:#}");
        assert_eq!(value["ranks"][1]["sent_bytes"], 100, "{value:#}");
        let _ = fs::remove_dir_all(folder);
    });
}

/// One command counts and reports.
#[test]
fn counted_and_reported_in_one_go() {
    on("openmpi", |mpi| {
        let folder = scratch_folder("stats");
        let file = folder.join("s.json");
        fs::write(&file, "of another run").expect("written");
        let run = |command: &str| {
            let mut whole = Command::new(&built().command);
            whole
                .args(["run", "--sim", "hgx-h200", "-np", "2", "--mpi"])
                .arg(&mpi.mpirun)
                .arg("--stats")
                .arg(&file)
                .arg("--")
                .args(command.split(' '))
                .env_remove("LD_PRELOAD")
                .env("OMPI_MCA_btl", "^ofi");
            run_bounded(&mut whole, &folder, Duration::from_secs(100))
        };
        let bench = built().command.display().to_string();
        let finished = run(&format!("{bench} bench bw -m 64K -i 20 -W 4"));
        assert_eq!(finished.code, Some(0), "{finished:?}");
        assert!(finished.stderr.contains("MPI_Isend"), "{finished:?}");
        assert!(
            finished
                .stderr
                .contains("Messages received, by path and size"),
            "{finished:?}"
        );
        assert!(json(&[&file])["notes"][0]
            .as_str()
            .is_some_and(|note| note.contains("simulated node")));
        // A program without MPI counts nothing, and the file of before is not taken for its.
        let finished = run("true");
        assert!(
            finished.stderr.contains("no rank has counted anything"),
            "{finished:?}"
        );
        let _ = fs::remove_dir_all(folder);
    });
}
