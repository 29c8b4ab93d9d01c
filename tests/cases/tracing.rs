//! Traces of whole jobs: what was recorded is what the library counted, both sides of a message are one, and a file that is
//! damaged, alone or of another job is said to be.

use crate::support::{job, on, on_every_mpi};
use anabranch_tests::nodes::nodes_permitted;
use anabranch_tests::{built, run_bounded, scratch_folder};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use xtask::mpi::Mpi;

on_every_mpi!(recorded_as_counted,);

/// The files of the ranks, by rank.
pub fn files(folder: &Path, ranks: usize) -> Vec<PathBuf> {
    (0..ranks)
        .map(|rank| folder.join(format!("trace.{rank}")))
        .collect()
}

/// `anabranch trace`: its status, and what it wrote to stdout and to stderr.
pub fn trace(files: &[PathBuf], options: &[&str]) -> (i32, String, String) {
    let out = Command::new(&built().command)
        .arg("trace")
        .args(files)
        .args(options)
        .output()
        .expect("the command runs");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (
        out.status.code().unwrap_or(-1),
        text(&out.stdout),
        text(&out.stderr),
    )
}

pub fn json(files: &[PathBuf]) -> Value {
    let (code, out, err) = trace(files, &["--json", "--messages"]);
    assert_eq!(code, 0, "{err}");
    serde_json::from_str(&out).expect("JSON")
}

/// Counters of received messages, by the protocols that they count.
pub const RECEIVED: [(&str, &[&str]); 7] = [
    ("receives_direct", &["get", "put"]),
    ("receives_multipath", &["multipath", "one_owner"]),
    ("receives_eager", &["eager"]),
    ("receives_host_pipeline", &["host_pipeline"]),
    ("receives_gpu_pipeline", &["gpu_pipeline"]),
    ("receives_bcopy", &["bcopy"]),
    ("receives_self", &["self"]),
];

/// Programs with wildcards, probes, cancellation, persistent requests and threads: all that was counted was recorded, and
/// nothing else.
fn recorded_as_counted(mpi: &Mpi) {
    for (program, ranks) in [
        ("p2p", 2),
        ("requests", 2),
        ("probe", 2),
        ("threads", 2),
        ("comms", 4),
    ] {
        let folder = scratch_folder("trace");
        let outcome = job(mpi, ranks, program)
            .env(
                "ANABRANCH_TRACE",
                &folder.join("trace").display().to_string(),
            )
            // The clocks of a simulated node's ranks differ by what each has done.
            .env("ANABRANCH_TRACE_BY_MACHINE", "on")
            .passes();
        let stats = outcome.stats();
        let report = json(&files(&folder, ranks));
        assert_eq!(report["notes"], Value::Array(Vec::new()), "{program}");
        assert_eq!(report["dropped"], 0, "{program}");
        for (counter, protocols) in RECEIVED {
            for (field, suffix) in [("messages", ""), ("bytes", "_bytes")] {
                let of =
                    |protocol: &&str| report["received"][*protocol][field].as_u64().unwrap_or(0);
                let recorded: u64 = protocols.iter().map(of).sum();
                let counted = stats.total(&format!("{counter}{suffix}"));
                assert_eq!(recorded, counted, "{program}: {counter}{suffix}\n{outcome}");
            }
        }
        let fallbacks = report["fallbacks"].as_object().expect("fallbacks");
        for (reason, of) in fallbacks {
            assert_eq!(
                of[0],
                stats.fallback(reason),
                "{program}: {reason}\n{outcome}"
            );
            assert_eq!(
                of[1],
                stats.fallback_bytes(reason),
                "{program}: {reason}\n{outcome}"
            );
        }
        let messages = report["messages"].as_array().expect("messages");
        let rts = messages.iter().filter(|message| {
            !message["sender"].is_null() && message["sender"]["protocol"] != "bcopy"
        });
        let sent = stats.total("sends_rts") + stats.total("sends_host_rts");
        assert_eq!(rts.count() as u64, sent, "{program}\n{outcome}");
        check_messages(messages);
        check_copies(&report, program);
        let _ = fs::remove_dir_all(folder);
    }
}

/// What was copied of each message is the message: the first hops of its paths. A sender may have put it into host memory in
/// vain, as its receiver was faster and read it.
fn check_copies(report: &Value, program: &str) {
    let copies = report["copies"].as_array().expect("copies");
    let (mut by_gpus, mut by_host): (BTreeMap<u64, u64>, BTreeMap<u64, u64>) = Default::default();
    let mut of_none = 0;
    for copy in copies {
        assert!(
            copy["end_ns"].as_u64() >= copy["launched_ns"].as_u64(),
            "{program}: {copy}"
        );
        let Some(number) = copy["message"].as_u64() else {
            of_none += 1;
            continue;
        };
        if copy["hop"] == 0 {
            let paths = match copy["path"] == "host" {
                true => &mut by_host,
                false => &mut by_gpus,
            };
            *paths.entry(number).or_default() += copy["bytes"].as_u64().expect("bytes");
        }
    }
    // Links are measured by copies of their own.
    assert!(
        of_none * 20 <= copies.len(),
        "{program}: {of_none} of {}",
        copies.len()
    );
    let mut checked = 0;
    for message in report["messages"].as_array().expect("messages") {
        let (receiver, bytes) = (
            &message["receiver"],
            message["bytes"].as_u64().expect("bytes"),
        );
        let number = message["number"].as_u64().expect("a number");
        let copied = |by: &BTreeMap<u64, u64>| by.get(&number).copied().unwrap_or(0);
        let (direct, host) = (copied(&by_gpus), copied(&by_host));
        let is_right = match receiver["protocol"].as_str().unwrap_or("none") {
            _ if receiver["outcome"] != "complete" => continue,
            "get" | "put" | "gpu_pipeline" => direct == bytes || (direct == 0 && host == bytes),
            "multipath" | "one_owner" => direct + host == bytes,
            _ => continue,
        };
        checked += 1;
        assert!(is_right, "{program}: {direct} and {host} of {message}");
    }
    assert!(checked > 0, "{program}: no message came by copies");
}

/// Both sides of a message were there, in order.
fn check_messages(messages: &[Value]) {
    let mut joined = 0;
    for message in messages {
        let (sender, receiver) = (&message["sender"], &message["receiver"]);
        for half in [sender, receiver]
            .into_iter()
            .filter(|half| !half.is_null())
        {
            let times = ["at_ns", "matched_ns", "moving_ns", "landed_ns", "done_ns"];
            let times: Vec<u64> = times
                .iter()
                .filter_map(|name| half[name].as_u64())
                .collect();
            assert!(times.iter().all(|time| *time >= times[0]), "{message}");
            assert_ne!(half["outcome"], "under way", "{message}");
            assert_ne!(half["call"], 0, "{message}");
        }
        if sender.is_null() || receiver.is_null() || sender["protocol"] == "bcopy" {
            continue;
        }
        joined += 1;
        let offered = sender["at_ns"].as_u64().expect("a time");
        assert!(
            receiver["done_ns"]
                .as_u64()
                .is_none_or(|done| done >= offered),
            "{message}"
        );
        assert!(
            message["source"].is_u64() && message["destination"].is_u64(),
            "{message}"
        );
    }
    assert!(joined > 0, "no message has two sides");
}

/// Each call of the program is there once, with its communicator's ranks as those of MPI_COMM_WORLD.
#[test]
fn calls_are_those_of_the_program() {
    on("openmpi", |mpi| {
        let folder = scratch_folder("trace");
        let outcome = job(mpi, 2, "p2p")
            .args(&["ring"])
            .env(
                "ANABRANCH_TRACE",
                &folder.join("%h-trace.%r").display().to_string(),
            )
            .passes();
        let host = fs::read_to_string("/proc/sys/kernel/hostname").expect("a name");
        let files: Vec<PathBuf> = (0..2)
            .map(|rank| folder.join(format!("{}-trace.{rank}", host.trim_end())))
            .collect();
        let report = json(&files);
        // Twenty steps of both ranks, and the barriers and the abort handler of the frame.
        assert_eq!(
            report["calls"]["MPI_Sendrecv"]["calls"],
            2 * 20,
            "{outcome}"
        );
        assert_eq!(
            report["calls"]["MPI_Sendrecv"]["bytes"],
            2 * 20 * 300_000,
            "{outcome}"
        );
        let pairs: BTreeMap<(u64, u64), u64> = report["pairs"]
            .as_array()
            .expect("pairs")
            .iter()
            .map(|pair| {
                (
                    (
                        pair[0].as_u64().expect("a rank"),
                        pair[1].as_u64().expect("a rank"),
                    ),
                    pair[3].as_u64().expect("bytes"),
                )
            })
            .collect();
        let sent = outcome.stats().total("sends_rts_bytes");
        assert_eq!(pairs.values().sum::<u64>(), sent, "{outcome}");
        assert!(
            pairs
                .keys()
                .all(|(from, to)| from != to && *from < 2 && *to < 2),
            "{pairs:?}"
        );
        let _ = fs::remove_dir_all(folder);
    });
}

/// What is damaged, alone, of another job or none at all is said to be, and what there is of it is shown.
#[test]
fn damaged_files() {
    on("openmpi", |mpi| {
        let folder = scratch_folder("trace");
        for name in ["trace", "other"] {
            let name = folder.join(name).display().to_string();
            job(mpi, 2, "p2p")
                .args(&["ring"])
                .env("ANABRANCH_TRACE", &name)
                .passes();
        }
        let [first, second] = [0, 1].map(|rank| folder.join(format!("trace.{rank}")));
        let (code, out, _) = trace(std::slice::from_ref(&first), &[]);
        assert!(code == 0 && out.contains("no file of rank 1"), "{out}");
        // As of a rank that was killed while it wrote.
        let bytes = fs::read(&second).expect("a trace");
        let torn = folder.join("torn");
        fs::write(&torn, &bytes[..bytes.len() - 64 - 20]).expect("it is written");
        let (code, out, _) = trace(&[first.clone(), torn], &[]);
        assert!(
            code == 0 && out.contains("the file of rank 1 has no end"),
            "{out}"
        );
        assert!(out.contains("44 bytes of its file are no records"), "{out}");
        assert!(out.contains("MPI_Sendrecv"), "{out}");
        let mut newer = bytes.clone();
        newer[8] = 200;
        for (damaged, said) in [
            (newer, "its format is 200"),
            (bytes[..100].to_vec(), "it ends in its header"),
            (b"something else".to_vec(), "it is no trace"),
            (Vec::new(), "it is no trace"),
        ] {
            let file = folder.join("damaged");
            fs::write(&file, damaged).expect("it is written");
            let (code, out, err) = trace(&[first.clone(), file.clone()], &[]);
            assert!(
                code == 1 && err.contains(said) && err.contains("damaged"),
                "{said}: {code} {err}"
            );
            assert!(
                out.contains("MPI_Sendrecv") && out.contains("no file of rank 1"),
                "{said}: {out}"
            );
            let (code, out, err) = trace(&[file], &[]);
            assert!(code == 2 && err.contains(said) && out.is_empty(), "{err}");
        }
        let twice = [first.clone(), second.clone(), second.clone()];
        let (code, _, err) = trace(&twice, &[]);
        assert!(code == 2 && err.contains("are both of rank 1"), "{err}");
        let both = [second, first.clone()];
        for (options, said) in [
            (["--json=-", "--csv=-"], "stdout for one"),
            (["--around=nan", "--json=/dev/null"], "from 0 on"),
            (
                ["--message=1000000", "--json=/dev/null"],
                "there is no message",
            ),
        ] {
            let (code, _, err) = trace(&both, &options);
            assert!(code == 2 && err.contains(said), "{options:?}: {err}");
        }
        // A record with numbers that cannot be.
        let mut wild = bytes;
        let header = usize::from(wild[12]) + (usize::from(wild[13]) << 8);
        for record in wild[16 + header..].chunks_mut(64) {
            record[16..24].fill(0xff);
            record[40..56].fill(0xff);
        }
        let file = folder.join("wild");
        fs::write(&file, wild).expect("it is written");
        let (code, _, err) = trace(&[first.clone(), file], &["--perfetto=/dev/null"]);
        assert_eq!(code, 0, "{err}");
        let (code, _, err) = trace(&[first, folder.join("other.1")], &[]);
        assert!(code == 2 && err.contains("are of different runs"), "{err}");
        let _ = fs::remove_dir_all(folder);
    });
}

/// A folder that is not there: one line, and the program runs as without.
#[test]
fn a_folder_that_is_not_there() {
    on("openmpi", |mpi| {
        let outcome = job(mpi, 2, "p2p")
            .args(&["ring"])
            .env("ANABRANCH_TRACE", "/nowhere/trace")
            .passes();
        let lines = outcome.finished.stderr.lines();
        let lines: Vec<&str> = lines
            .filter(|line| line.contains("ANABRANCH_TRACE"))
            .collect();
        assert_eq!(lines.len(), 2, "{outcome}");
        assert!(
            lines.iter().all(
                |line| line.contains("/nowhere/trace.") && line.contains("nothing is recorded")
            ),
            "{outcome}"
        );
        outcome.stats().check_complete();
    });
}

/// One command records and reports, and a rank that is killed leaves what it had recorded until then.
#[test]
fn recorded_and_reported_in_one_go() {
    on("openmpi", |mpi| {
        let folder = scratch_folder("trace");
        let file = folder.join("t");
        let run = |command: &[&str]| {
            let mut whole = Command::new(&built().command);
            whole
                .args(["run", "--sim", "hgx-h200", "-np", "2", "--mpi"])
                .arg(&mpi.mpirun)
                .arg("--trace")
                .arg(&file);
            whole
                .arg("--")
                .args(command)
                .env_remove("LD_PRELOAD")
                .env("OMPI_MCA_btl", "^ofi");
            run_bounded(&mut whole, &folder, Duration::from_secs(100))
        };
        let bench = built().command.display().to_string();
        let finished = run(&[&bench, "bench", "bw", "-m", "64K", "-i", "20", "-W", "4"]);
        assert_eq!(finished.code, Some(0), "{finished:?}");
        let report = &finished.stderr;
        assert!(
            report.contains("MPI_Isend") && report.contains("Messages received"),
            "{finished:?}"
        );
        let notes: Vec<&str> = report
            .lines()
            .filter(|line| line.starts_with('!'))
            .collect();
        assert!(
            notes.len() == 1 && notes[0].contains("simulated") && report.contains(" 0 dropped"),
            "{finished:?}"
        );
        assert!(finished.stdout.contains("65536"), "{finished:?}");
        // Rank 1 kills itself a second after it has begun.
        let killed = format!("test $OMPI_COMM_WORLD_RANK = 1 && (sleep 2; kill -9 $$) & exec {bench} bench bw -m 64K -i 2000000 -W 4");
        let finished = run(&["/bin/sh", "-c", &killed]);
        assert_ne!(finished.code, Some(0), "{finished:?}");
        assert!(
            finished.stderr.contains("the file of rank 1 has no end"),
            "{finished:?}"
        );
        assert!(finished.stderr.contains("MPI_Isend"), "{finished:?}");
        let _ = fs::remove_dir_all(folder);
    });
}

/// By how many us the second host's clock was ahead, as a note says it, and how wrong that can be.
fn ahead_of_first(note: &Value) -> (f64, f64) {
    let text = note.as_str().expect("text");
    let number = |before: &str, after: &str| -> f64 {
        let rest = text
            .split(before)
            .nth(1)
            .unwrap_or_else(|| panic!("{text}"));
        let number = rest.split(after).next().expect("a number");
        number.parse().unwrap_or_else(|_| panic!("{text}"))
    };
    let sign = if text.contains(" us behind ") {
        -1.0
    } else {
        1.0
    };
    let ahead = sign * number("node2 was ", " us ");
    (ahead, number("are right to ", " us"))
}

/// Has a file say that the time of day was later when it was opened.
fn set_clock_ahead(file: &Path, by_ns: u64) {
    let bytes = fs::read(file).expect("a trace");
    let length = usize::from(bytes[12]) + (usize::from(bytes[13]) << 8);
    let (header, records) = bytes[16..].split_at(length);
    let mut header: Value = serde_json::from_slice(header).expect("a header");
    let opened = header["opened"][1].as_u64().expect("a time");
    header["opened"][1] = (opened + by_ns).into();
    let header = header.to_string().into_bytes();
    let length = (header.len() as u32).to_le_bytes();
    fs::write(file, [&bytes[..12], &length, &header, records].concat()).expect("it is written");
}

/// Files of two nodes, whose jobs have an identity on each, are one run; those of another run are not.
#[test]
fn two_nodes() {
    if !nodes_permitted() {
        return;
    }
    on("openmpi", |mpi| {
        let folder = scratch_folder("trace");
        let record = |name: &str| {
            let name = folder.join(name).display().to_string();
            job(mpi, 4, "p2p")
                .args(&["ring"])
                .on_two_nodes()
                .env("ANABRANCH_TRACE", &name)
                .env("ANABRANCH_TRACE_BY_MACHINE", "on")
                .run()
                .check_passed();
        };
        record("trace");
        let report = json(&files(&folder, 4));
        let notes = report["notes"].as_array().expect("notes");
        assert_eq!(notes.len(), 1, "{notes:?}");
        // Both have the clock of this machine.
        let (ahead, error) = ahead_of_first(&notes[0]);
        assert!(ahead.abs() <= error + 5.0 && error < 100_000.0, "{notes:?}");
        const SHIFT_NS: u64 = 20_000_000;
        for rank in report["ranks"].as_array().expect("ranks") {
            if rank["host"] == "node2" {
                let file = format!("trace.{}", rank["rank"]);
                set_clock_ahead(&folder.join(file), SHIFT_NS);
            }
        }
        let shifted = json(&files(&folder, 4));
        let (then, _) = ahead_of_first(&shifted["notes"][0]);
        assert!(
            (then - ahead - SHIFT_NS as f64 * 1e-3).abs() < 1.0,
            "{}",
            shifted["notes"]
        );
        // In all that is shown the shift is gone.
        let spans = [&report, &shifted].map(|report| report["span_ms"].as_f64().expect("ms"));
        assert!((spans[0] - spans[1]).abs() < 0.01, "{spans:?}");
        assert_eq!(report["ranks"].as_array().map(Vec::len), Some(4));
        assert_eq!(report["calls"]["MPI_Sendrecv"]["calls"], 4 * 20);
        // Both began within the job: far less than the time since the machines were started.
        assert!(
            report["span_ms"].as_f64().is_some_and(|ms| ms < 300_000.0),
            "{}",
            report["span_ms"]
        );
        std::thread::sleep(Duration::from_millis(200));
        record("other");
        let mixed = [folder.join("trace.0"), folder.join("other.3")];
        let (code, _, err) = trace(&mixed, &[]);
        assert!(code == 2 && err.contains("are of different runs"), "{err}");
        let _ = fs::remove_dir_all(folder);
    });
}

/// A job that hangs and is killed leaves what it waited for.
#[test]
fn what_a_hanging_job_waits_for() {
    on("openmpi", |mpi| {
        let folder = scratch_folder("trace");
        job(mpi, 2, "unanswered")
            .env(
                "ANABRANCH_TRACE",
                &folder.join("trace").display().to_string(),
            )
            .ranks_under(&[
                "/bin/sh",
                "-c",
                "(sleep 6; kill -9 $$) & exec \"$0\" \"$@\"",
            ])
            .run();
        let files = files(&folder, 2);
        let report = json(&files);
        let messages = report["messages"].as_array().expect("messages");
        let open: Vec<&Value> = messages
            .iter()
            .filter(|message| message["sender"]["outcome"] == "under way")
            .collect();
        assert!(open.len() == 1 && open[0]["tag"] == 77, "{open:?}");
        assert_eq!(open[0]["bytes"], 3 << 20);
        assert_eq!(open[0]["sender"]["state"], "offered");
        // The MPI library may have carried the first: one end of it says nothing of the other.
        for end in ["sender", "receiver"] {
            let complete = messages
                .iter()
                .filter(|message| message["tag"] == 5 && message[end]["outcome"] == "complete");
            assert_eq!(complete.count(), 3, "{end}: {messages:?}");
        }
        let (_, text, _) = trace(&files, &[]);
        for said in [
            "rank 0: MPI_Ssend had not returned when the process ended, rank 1, tag 77",
            "rank 1: MPI_Recv had not returned when the process ended, rank 0, tag 78",
            "1 messages were under way at the end",
            "the file of rank 0 has no end",
        ] {
            assert!(text.contains(said), "{said}\n{text}");
        }
        let _ = fs::remove_dir_all(folder);
    });
}

/// What the MPI library carries of device buffers has its tag, its ranks and its communicator at both ends; spawned processes
/// have files of their own.
#[test]
fn carried_by_mpi_and_spawned() {
    on("openmpi", |mpi| {
        let folder = scratch_folder("trace");
        let name = folder.join("trace").display().to_string();
        let outcome = job(mpi, 2, "p2p")
            .args(&["small"])
            .env("ANABRANCH_TRACE", &name)
            .env("ANABRANCH_THRESHOLD", "1G")
            .passes();
        let report = json(&files(&folder, 2));
        let messages = report["messages"].as_array().expect("messages");
        let by_mpi: Vec<&Value> = messages
            .iter()
            .filter(|message| message["is_by_mpi"] == true)
            .collect();
        assert!(
            by_mpi.len() as u64 > outcome.stats().total("sends_bcopy"),
            "{outcome}"
        );
        for message in &by_mpi {
            assert!(
                message["source"].is_u64() && message["destination"].is_u64(),
                "{message}"
            );
            assert_ne!(message["communicator"], "0000000000000000", "{message}");
        }
        let sent: u64 = by_mpi
            .iter()
            .filter(|message| message["receiver"].is_null())
            .count() as u64;
        assert_eq!(sent, outcome.stats().total("sends_bcopy"), "{outcome}");
        let outcome = job(mpi, 2, "spawn")
            .through_launcher()
            .env("ANABRANCH_TRACE", &folder.join("s").display().to_string())
            .passes();
        let names: Vec<String> = fs::read_dir(&folder)
            .expect("the folder")
            .flatten()
            .filter_map(|entry| entry.file_name().into_string().ok())
            .collect();
        let of_spawned = names
            .iter()
            .filter(|name| name.contains(".spawned-"))
            .count();
        assert!(of_spawned > 0, "{names:?}\n{outcome}");
        json(&[folder.join("s.0"), folder.join("s.1")]);
        let _ = fs::remove_dir_all(folder);
    });
}
