//! Archives in OTF2, as OTF2's own `otf2-print` reads them: calls and messages are those of the trace, in order.

use crate::support::{job, on};
use crate::tracing::{files, json, trace};
use anabranch_engine::engine::comms;
use anabranch_tests::{built, cannot_be_made_here, scratch_folder};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use xtask::mpi::Mpi;

/// What `otf2-print` says of an archive, if it is installed. It ends with an error where the archive is wrong.
fn print(archive: &Path, options: &[&str]) -> Option<String> {
    let mut command = Command::new("otf2-print");
    command.args(options).arg(archive.join("traces.otf2"));
    let Ok(out) = command.output() else {
        let remedy = "install the Debian package otf2-tools, which ci/setup does";
        cannot_be_made_here("otf2-print", remedy);
        return None;
    };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (said, complaint) = (text(&out.stdout), text(&out.stderr));
    assert!(
        out.status.success() && complaint.is_empty(),
        "{}: {complaint}",
        archive.display()
    );
    Some(said)
}

/// An event, as it is printed.
#[derive(Debug)]
struct Event<'a> {
    kind: &'a str,
    location: u64,
    at: u64,
    about: &'a str,
}

impl<'a> Event<'a> {
    /// What is behind a name, up to the next comma or blank.
    fn text(&self, name: &str) -> &'a str {
        let behind = self.about.split(name).nth(1);
        let behind = behind.unwrap_or_else(|| panic!("no {name} in {self:?}"));
        behind.split([',', ' ']).next().unwrap_or_default()
    }

    fn number(&self, name: &str) -> u64 {
        let text = self.text(name);
        text.parse().unwrap_or_else(|_| panic!("{name} {text}"))
    }

    /// The name of a region or of a communicator.
    fn name(&self) -> &'a str {
        let mut parts = self.about.split('"');
        let place = usize::from(self.kind.contains("SEND") || self.kind.contains("RECV")) * 2;
        parts.nth(1 + place).unwrap_or_default()
    }
}

fn events(text: &str) -> Vec<Event<'_>> {
    let lines = text.lines().skip_while(|line| !line.starts_with("---"));
    let event = |line| {
        let mut rest: &str = line;
        let mut word = || {
            let (word, behind) = rest.split_once(' ').unwrap_or((rest, ""));
            rest = behind.trim_start();
            word
        };
        let (kind, location, at) = (word(), word(), word());
        Event {
            kind,
            location: location.parse().expect("a location"),
            at: at.parse().expect("a time"),
            about: rest,
        }
    };
    lines.skip(1).map(event).collect()
}

/// Messages by source, destination, communicator, tag and bytes.
type Messages = BTreeMap<(u64, u64, String, u64, u64), u32>;

/// One of the trace's messages, if it says who sent and who received it.
fn recorded(message: &Value) -> Option<(u64, u64, String, u64, u64)> {
    let number = |name: &str| message[name].as_u64();
    let comm = message["communicator"].as_str().expect("a communicator");
    let comm = match comm == format!("{:016x}", comms::world()) {
        true => "MPI_COMM_WORLD".to_owned(),
        false => format!("communicator {comm}"),
    };
    let ends = number("source").zip(number("destination"));
    let about = number("tag").zip(number("bytes"));
    let ((source, destination), (tag, bytes)) = ends.zip(about)?;
    Some((source, destination, comm, tag, bytes))
}

/// Messages of which both sides were recorded, and how many sides have no other. Of those that the MPI library carries, each
/// side is a message of the trace's.
fn paired(report: &Value) -> (Messages, u64) {
    let messages = report["messages"].as_array().expect("messages");
    let mut all = Messages::new();
    let mut by_mpi: BTreeMap<_, [u32; 2]> = BTreeMap::new();
    let mut sides = 0;
    for message in messages {
        let is_there = ["sender", "receiver"].map(|side| !message[side].is_null());
        sides += is_there.map(u64::from).iter().sum::<u64>();
        let Some(key) = recorded(message) else {
            continue;
        };
        if is_there == [true, true] {
            *all.entry(key).or_default() += 1;
        } else if message["is_by_mpi"] == true {
            by_mpi.entry(key).or_default()[usize::from(is_there[0])] += 1;
        }
    }
    for (key, [received, sent]) in by_mpi {
        let count = received.min(sent);
        if count > 0 {
            *all.entry(key).or_default() += count;
        }
    }
    let within: u32 = all.values().sum();
    (all, sides - 2 * u64::from(within))
}

/// What a location has come to.
#[derive(Default)]
struct Progress<'a> {
    at: u64,
    events: u64,
    within: Option<&'a str>,
    /// How each request that is not over will end.
    requests: BTreeMap<u64, &'static str>,
}

/// What an archive has.
#[derive(Default)]
struct Archive<'a> {
    sent: Messages,
    received: Messages,
    /// Calls by functions.
    calls: BTreeMap<&'a str, u64>,
    progress: BTreeMap<u64, Progress<'a>>,
}

impl<'a> Archive<'a> {
    /// Goes through all events: times do not go back, calls do not nest, messages are begun in calls that do that, and
    /// requests are over after they were begun.
    fn read(text: &'a str) -> Archive<'a> {
        let mut archive = Archive::default();
        for event in events(text) {
            let state = archive.progress.entry(event.location).or_default();
            assert!(event.at >= state.at, "{event:?} after {}", state.at);
            (state.at, state.events) = (event.at, state.events + 1);
            match event.kind {
                "ENTER" => {
                    assert_eq!(state.within.replace(event.name()), None, "{event:?}");
                    *archive.calls.entry(event.name()).or_default() += 1;
                }
                "LEAVE" => assert_eq!(state.within.take(), Some(event.name()), "{event:?}"),
                _ => archive.take_message(&event),
            }
        }
        for (location, state) in &archive.progress {
            assert_eq!(state.within, None, "location {location}");
            assert!(state.requests.is_empty(), "location {location}");
        }
        archive
    }

    fn take_message(&mut self, event: &Event<'a>) {
        let state = self.progress.entry(event.location).or_default();
        let within = state.within.unwrap_or_default();
        let is_in = |names: &[&str]| names.iter().any(|name| within.contains(name));
        let request = |state: &mut Progress, end| {
            state.requests.insert(event.number("Request: "), end);
        };
        match event.kind {
            "MPI_SEND" => assert!(is_in(&["_Send", "send"]), "{event:?} in {within}"),
            "MPI_ISEND" => {
                assert!(is_in(&["_I", "Start"]), "{event:?} in {within}");
                request(state, "MPI_ISEND_COMPLETE");
            }
            "MPI_IRECV_REQUEST" => {
                assert!(!within.is_empty(), "{event:?}");
                request(state, "MPI_IRECV");
            }
            "MPI_RECV" => assert!(is_in(&["ecv"]), "{event:?} in {within}"),
            "MPI_ISEND_COMPLETE" | "MPI_IRECV" => {
                let begun = state.requests.remove(&event.number("Request: "));
                assert_eq!(begun, Some(event.kind), "{event:?}");
            }
            _ => panic!("{event:?}"),
        }
        let own = event.location & u64::from(u32::MAX);
        let (ends, all) = match event.kind {
            "MPI_SEND" | "MPI_ISEND" => ((own, event.number("Receiver: ")), &mut self.sent),
            "MPI_RECV" | "MPI_IRECV" => ((event.number("Sender: "), own), &mut self.received),
            _ => return,
        };
        let (tag, bytes) = (event.number("Tag: "), event.number("Length: "));
        let key = (ends.0, ends.1, event.name().to_owned(), tag, bytes);
        *all.entry(key).or_default() += 1;
    }
}

/// Definitions say of each location how many events it has, and of each rank that its first location has its number.
fn check_definitions(text: &str, archive: &Archive, ranks: u64) {
    let mut defined = 0;
    for line in text.lines().filter(|line| line.starts_with("LOCATION ")) {
        let location: u64 = line["LOCATION ".len()..]
            .split_whitespace()
            .next()
            .and_then(|word| word.parse().ok())
            .expect("a location");
        let (rank, thread) = (location & u64::from(u32::MAX), location >> 32);
        let events = archive.progress.get(&location).map_or(0, |it| it.events);
        let about = format!(
            "Name: \"thread {thread}\" <{}, Type: CPU_THREAD, # Events: {events}, Group: \"rank {rank}\" <{rank}>",
            line.split('<').nth(1).and_then(|it| it.split(',').next()).unwrap_or_default()
        );
        assert!(line.ends_with(&about), "{line}\n{about}");
        defined += 1;
    }
    assert!(defined >= ranks && defined >= archive.progress.len() as u64);
    let groups = text.lines().filter(|line| line.starts_with("GROUP "));
    for group in groups {
        assert!(group.contains(&format!(", {ranks} Members: ")), "{group}");
    }
    let world = "Name: \"MPI_COMM_WORLD\"";
    assert!(
        text.lines()
            .any(|line| line.starts_with("COMM  ") && line.contains(world)),
        "{text}"
    );
}

/// Functions whose calls follow one another and are one event then.
fn is_test(function: &str) -> bool {
    ["Test", "robe", "Request_get_status"]
        .iter()
        .any(|part| function.contains(part))
}

/// Traces a program, and writes an archive: `None` without `otf2-print`. The folder, the report, and what is printed of events,
/// of definitions and by the command.
fn archived(mpi: &Mpi, program: &str, ranks: usize) -> Option<(PathBuf, Value, [String; 3])> {
    let folder = scratch_folder("otf2");
    let archive = folder.join("new/archive");
    job(mpi, ranks, program)
        .env(
            "ANABRANCH_TRACE",
            &folder.join("trace").display().to_string(),
        )
        .passes();
    let files = files(&folder, ranks);
    print(&folder, &["--version"])?;
    let (code, out, err) = trace(&files, &["--otf2", &archive.display().to_string()]);
    assert_eq!(code, 0, "{err}");
    let printed = [print(&archive, &[])?, print(&archive, &["-G"])?, out];
    Some((folder, json(&files), printed))
}

/// Programs with several threads, communicators, requests and wildcards: the archive has what the trace has.
#[test]
fn archives_are_what_was_recorded() {
    on("openmpi", |mpi| {
        for (program, ranks) in [("p2p", 2), ("threads", 2), ("comms", 4)] {
            let archived = archived(mpi, program, ranks);
            let Some((folder, report, [printed, definitions, text])) = archived else {
                return;
            };
            let archive = Archive::read(&printed);
            let (messages, alone) = paired(&report);
            assert!(messages.len() > 5, "{program}");
            assert_eq!(archive.sent, messages, "{program}");
            assert_eq!(archive.received, messages, "{program}");
            let note = format!("{alone} sides of messages are not in the OTF2 archive");
            assert!(
                text.contains(&note) || alone == 0,
                "{program}: {alone}: {text}"
            );
            let calls = report["calls"].as_object().expect("calls");
            assert_eq!(calls.len(), archive.calls.len(), "{program}");
            for (function, of) in calls {
                let (made, entered) = (of["calls"].as_u64(), archive.calls[function.as_str()]);
                let made = made.expect("a number");
                assert!(
                    entered == made || is_test(function) && entered <= made,
                    "{program}: {function}: {entered} of {made}"
                );
            }
            check_definitions(&definitions, &archive, ranks as u64);
            let _ = fs::remove_dir_all(folder);
        }
    });
}

/// A rank without a file has a location without events, and numbers that cannot be make an archive that can be read.
#[test]
fn archives_of_what_is_left() {
    on("openmpi", |mpi| {
        let Some((folder, report, _)) = archived(mpi, "p2p", 2) else {
            return;
        };
        let [first, second] = [0, 1].map(|rank| folder.join(format!("trace.{rank}")));
        let half = folder.join("half");
        let (code, out, err) = trace(
            std::slice::from_ref(&first),
            &["--otf2", &half.display().to_string()],
        );
        assert!(code == 0 && out.contains("no file of rank 1"), "{err}");
        let printed = print(&half, &[]).expect("it was there before");
        let archive = Archive::read(&printed);
        let all = report["messages"].as_array().expect("messages").iter();
        let to_missing =
            all.filter(|it| !it["sender"].is_null() && it["source"] == 0 && it["destination"] == 1);
        let sent = archive.sent.iter().filter(|(key, _)| key.1 == 1);
        assert_eq!(
            sent.map(|(_, count)| *count as usize).sum::<usize>(),
            to_missing.count()
        );
        assert!(archive
            .progress
            .keys()
            .all(|location| location & 0xffff_ffff == 0));
        let definitions = print(&half, &["-G"]).expect("it was there before");
        check_definitions(&definitions, &archive, 2);

        let mut bytes = fs::read(&second).expect("a trace");
        let header = usize::from(bytes[12]) + (usize::from(bytes[13]) << 8);
        for (number, record) in bytes[16 + header..].chunks_mut(64).enumerate() {
            record[16..24].fill(0xff);
            record[40 + number % 3 * 8..][..8].fill(0xff);
        }
        fs::write(&second, bytes).expect("it is written");
        let wild = folder.join("wild");
        let (code, _, err) = trace(&[first, second], &["--otf2", &wild.display().to_string()]);
        assert_eq!(code, 0, "{err}");
        let events = events(&print(&wild, &[]).expect("it was there before")).len();
        assert!(events > archive.progress.len(), "{events}");
        let _ = fs::remove_dir_all(folder);
    });
}

/// A folder that has something in it, or is none, and a library that is missing, or is another: one line says so.
#[test]
fn what_no_archive_can_be_made_of() {
    on("openmpi", |mpi| {
        let folder = scratch_folder("otf2");
        let name = folder.join("trace").display().to_string();
        job(mpi, 2, "p2p")
            .args(&["ring"])
            .env("ANABRANCH_TRACE", &name)
            .passes();
        let files = files(&folder, 2);
        let libraries = folder.join("libraries");
        fs::create_dir(&libraries).expect("made");
        let names = ["libotf2.so.10", "libopen-trace-format2.so.10"];
        let said = |to: &Path| {
            let mut command = Command::new(&built().command);
            command.arg("trace").args(&files).arg("--otf2").arg(to);
            let out = command.env("LD_LIBRARY_PATH", &libraries).output();
            let out = out.expect("the command runs");
            let err = String::from_utf8_lossy(&out.stderr).into_owned();
            assert!(!out.status.success() && err.lines().count() == 1, "{err}");
            assert!(out.stdout.is_empty(), "{out:?}");
            err
        };
        // What is found first is no library.
        for name in names {
            fs::write(libraries.join(name), "").expect("written");
        }
        let new = folder.join("archive");
        let err = said(&new);
        assert!(
            err.contains("libopen-trace-format2-10") && err.contains(names[0]),
            "{err}"
        );
        assert!(!new.exists(), "nothing is begun without the library");
        let other = built().simcuda.join("libcuda.so.1");
        fs::copy(other, libraries.join(names[0])).expect("copied");
        let err = said(&new);
        assert!(err.contains("lacks a function"), "{err}");
        fs::remove_dir_all(&libraries).expect("removed");
        let err = said(&folder);
        assert!(err.contains("is not empty: name a new folder"), "{err}");
        let err = said(&files[0]);
        assert!(err.contains("Not a directory"), "{err}");
        let _ = fs::remove_dir_all(folder);
    });
}
