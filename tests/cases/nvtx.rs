//! Messages as ranges of NVTX, as a tool gets them that the tests bring themselves.

use crate::support::{job, on, on_every_mpi, shared_object};
use crate::tracing::{files, json, RECEIVED};
use anabranch_tests::{built, needs_simulator, on_real_gpus, scratch_folder, Job, Outcome};
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use xtask::mpi::Mpi;

on_every_mpi!(ranges_are_the_messages,);

const TOOL: &str = include_str!("nvtx_tool.c");

/// What the tool of a process was told.
#[derive(Default)]
struct Told {
    domains: Vec<String>,
    /// Names and payloads of ranges by their numbers, and how often each was ended.
    ranges: BTreeMap<u64, (String, u64, u32)>,
    /// Ranges that had not been ended at a time, at most.
    open_at_once: usize,
}

impl Told {
    fn read(text: &str) -> Told {
        let mut told = Told::default();
        let mut open = 0;
        for line in text.lines() {
            let words: Vec<&str> = line.splitn(4, ' ').collect();
            let number = |at: usize| words[at].parse::<u64>().expect("a number");
            match words[0] {
                "domain" => told.domains.push(words[1].to_owned()),
                "start" => {
                    let range = (words[3].to_owned(), number(2), 0);
                    assert!(told.ranges.insert(number(1), range).is_none(), "{line}");
                    open += 1;
                    told.open_at_once = told.open_at_once.max(open);
                }
                "end" => {
                    told.ranges.get_mut(&number(1)).expect("it was begun").2 += 1;
                    open -= 1;
                }
                _ => panic!("{line}"),
            }
        }
        told
    }

    /// What the tool of each rank was told.
    fn of_ranks(folder: &Path) -> Vec<Told> {
        let entries = fs::read_dir(folder).expect("the folder").flatten();
        let records = entries.filter(|entry| {
            let name = entry.file_name();
            name.to_string_lossy().starts_with("ranges.")
        });
        records
            .map(|record| Told::read(&fs::read_to_string(record.path()).expect("a record")))
            .collect()
    }
}

/// A job whose ranks write what a tool is told into files of this folder.
fn told(job: Job, folder: &Path) -> Job {
    let record = folder.join("ranges").display().to_string();
    job.env("NVTX_RECORD", &record).env("ANABRANCH_NVTX", "1")
}

/// Ranges of a name, and their bytes.
fn sums(all: &[Told], is_named: impl Fn(&str) -> bool) -> [u64; 2] {
    let ranges = all.iter().flat_map(|told| told.ranges.values());
    let ranges = ranges.filter(|(name, ..)| is_named(name));
    ranges.fold([0, 0], |[count, sum], (_, bytes, _)| {
        [count + 1, sum + bytes]
    })
}

/// Each process has one domain, each range was ended once, and they are the messages that were counted.
fn check(all: &[Told], ranks: usize, outcome: &Outcome) {
    assert_eq!(all.len(), ranks, "{outcome}");
    for told in all {
        assert_eq!(told.domains, ["Anabranch"], "{outcome}");
        // They end when messages do, not with the program.
        assert!(told.open_at_once * 2 < told.ranges.len(), "{outcome}");
        for (name, bytes, ended) in told.ranges.values() {
            assert_eq!(*ended, 1, "{name} of {bytes} bytes\n{outcome}");
        }
    }
    let stats = outcome.stats();
    let mut received = [0, 0];
    for (counter, protocols) in RECEIVED {
        let is_of = |name: &str| {
            let protocol = name.strip_prefix("receive ");
            protocol.is_some_and(|protocol| protocols.contains(&protocol))
        };
        let counted = ["", "_bytes"].map(|what| stats.total(&format!("{counter}{what}")));
        // A protocol that gives way to another leaves its name.
        let ranges = sums(all, is_of);
        assert_eq!(ranges[0] > 0, counted[0] > 0, "{counter}\n{outcome}");
        received = [0, 1].map(|at| received[at] + counted[at]);
    }
    let ranges = sums(all, |name| name != "send" && name != "receive native");
    assert_eq!(ranges, received, "{outcome}");
    assert!(received[0] > 0, "{outcome}");
    let counters = ["sends_rts", "sends_host_rts", "sends_bcopy"];
    let sent = ["", "_bytes"].map(|what| {
        let each = counters.map(|counter| stats.total(&format!("{counter}{what}")));
        each.iter().sum::<u64>()
    });
    assert_eq!(sums(all, |name| name == "send"), sent, "{outcome}");
}

/// A tool by its own library: as many ranges as messages, with their bytes, beside a trace and without one.
fn ranges_are_the_messages(mpi: &Mpi) {
    for (program, ranks, is_traced) in [
        ("p2p", 2, false),
        ("requests", 2, true),
        ("threads", 2, false),
    ] {
        let folder = scratch_folder("nvtx");
        let tool = shared_object(&folder, "tool", TOOL);
        let mut job = told(job(mpi, ranks, program), &folder).env("NVTX_INJECTION64_PATH", &tool);
        if is_traced {
            let name = folder.join("trace").display().to_string();
            job = job.env("ANABRANCH_TRACE", &name);
        }
        let outcome = job.passes();
        check(&Told::of_ranks(&folder), ranks, &outcome);
        let traces = files(&folder, ranks);
        if is_traced {
            let report = json(&traces);
            assert_eq!(report["dropped"], 0, "{outcome}");
            assert!(!report["messages"].as_array().expect("messages").is_empty());
        } else {
            assert!(traces.iter().all(|file| !file.exists()), "{outcome}");
        }
        let _ = fs::remove_dir_all(folder);
    }
}

/// A tool that brings the library of NVTX 2.
#[test]
fn through_the_library_of_nvtx_2() {
    needs_simulator("a folder of libraries beside the simulated driver's");
    on("openmpi", |mpi| {
        let folder = scratch_folder("nvtx");
        let tool = shared_object(&folder, "tool", TOOL);
        fs::rename(tool, folder.join("libnvToolsExt.so.1")).expect("renamed");
        let libraries = format!("{}:{}", built().simcuda.display(), folder.display());
        let job = told(job(mpi, 2, "p2p").args(&["ring"]), &folder);
        let outcome = job.env("LD_LIBRARY_PATH", &libraries).passes();
        check(&Told::of_ranks(&folder), 2, &outcome);
        let _ = fs::remove_dir_all(folder);
    });
}

/// No tool, one that is not there, and one that does nothing: a line of each rank, and the program runs as without.
#[test]
fn without_a_tool() {
    on("openmpi", |mpi| {
        let folder = scratch_folder("nvtx");
        let tool = shared_object(&folder, "tool", TOOL);
        let nowhere = folder.join("nowhere.so").display().to_string();
        let driver = built().simcuda.join("libcuda.so.1").display().to_string();
        for (variables, why) in [
            (vec![], "NVTX_INJECTION64_PATH is not set"),
            (vec![("NVTX_INJECTION64_PATH", &*nowhere)], "nowhere.so"),
            (
                vec![("NVTX_INJECTION64_PATH", &*driver)],
                "InitializeInjectionNvtx2",
            ),
            (
                vec![("NVTX_INJECTION64_PATH", &*tool), ("NVTX_REFUSE", "1")],
                "it refuses to begin",
            ),
            (
                vec![("NVTX_INJECTION64_PATH", &*tool), ("NVTX_TAKE_NONE", "1")],
                "the tool takes no ranges",
            ),
        ] {
            if variables.is_empty() && on_real_gpus() {
                continue; // CUDA may have brought the library of NVTX 2 there
            }
            let mut job = told(job(mpi, 2, "p2p").args(&["ring"]), &folder);
            for (name, value) in variables {
                job = job.env(name, value);
            }
            let outcome = job.passes();
            let lines = outcome.finished.stderr.lines();
            let lines: Vec<&str> = lines
                .filter(|line| line.contains("ANABRANCH_NVTX"))
                .collect();
            assert_eq!(lines.len(), 2, "{why}\n{outcome}");
            assert!(
                lines.iter().all(|line| line.contains(why)),
                "{why}\n{outcome}"
            );
            outcome.stats().check_complete();
        }
        let _ = fs::remove_dir_all(folder);
    });
}
