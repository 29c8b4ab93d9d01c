//! What the ranks of a job have recorded: read from their files, both sides of each message brought together.

use std::collections::{BTreeSet, HashMap};
use std::path::PathBuf;

use anabranch_engine::trace::read::Header;
use anabranch_engine::trace::record::{self, NO_PEER};
use anyhow::Result;
use serde::Serialize;

use super::clocks;
use super::copies;
use super::message;
pub use super::message::Message;
use super::read::{self, Read};
use super::ucp;
use crate::Failure;

/// What a rank has recorded, but for its messages.
pub struct Rank {
    pub header: Header,
    pub calls: Vec<record::Call>,
    /// Calls that had not returned when the process ended.
    pub inside: Vec<record::Call>,
    pub fallbacks: Vec<record::Fallback>,
    pub ucp: ucp::Recorded,
    /// Records in the file.
    pub recorded: u64,
    /// The last record, if the process ended in order.
    pub end: Option<record::End>,
    /// Bytes that are no records.
    pub torn: u64,
}

impl Rank {
    /// The function of a call.
    pub fn function(&self, call: &record::Call) -> &str {
        let name = self.header.functions.get(usize::from(call.function));
        name.map_or("?", String::as_str)
    }
}

/// A GPU, or the memory of a host.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Place {
    /// The host that it is on.
    pub host: String,
    /// `GPU 0`, as the driver numbers it where it was first seen, or `host memory`.
    pub name: String,
    /// `GPU-...`; empty for host memory.
    pub uuid: String,
    /// PCI address; empty for host memory.
    pub pci: String,
    /// Its node of memory; -1: not known.
    pub numa: i32,
}

/// Bytes that were copied from one place to another for a message. Times are nanoseconds since the first record of the job.
#[derive(Clone, Debug, Serialize)]
pub struct Copy {
    /// Number of the message, if its sides were recorded.
    pub message: Option<usize>,
    /// World rank of the process that launched it.
    pub rank: u32,
    /// `direct`, `relay` or `host`.
    pub path: &'static str,
    /// Which hop of its path, from 0 on, and which chunk of the message there.
    pub hop: u8,
    pub chunk: u32,
    /// Places ([`Job::places`]).
    pub from: usize,
    pub to: usize,
    pub bytes: u64,
    /// When it was launched, and when it was seen to have ended.
    pub launched_ns: u64,
    pub end_ns: u64,
    /// It ended so much earlier at most, ns: nobody looked in between.
    pub uncertain_ns: u64,
    /// `streams`, `batch`, `graph`, `kernel` or `cpu`.
    pub by: &'static str,
}

/// What was expected of a message that is split.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Plan {
    /// When the last message of its window was to end, us after it was begun.
    pub predicted_us: f64,
    /// Bytes straight, over other GPUs, and over host memory.
    pub direct_bytes: u64,
    pub relay_bytes: u64,
    pub host_bytes: u64,
}

/// A job.
pub struct Job {
    /// When the first thing happened, ns since 1970.
    pub begun_unix_ns: u64,
    /// Files that cannot be read, and why.
    pub left_out: Vec<String>,
    pub ranks: Vec<Rank>,
    pub messages: Vec<Message>,
    pub places: Vec<Place>,
    pub copies: Vec<Copy>,
    /// What was expected of split messages, by their numbers.
    pub plans: HashMap<usize, Plan>,
    /// What a reader should know: ranks that are missing, files that are torn, records that were dropped.
    pub notes: Vec<String>,
    /// From the first record to the last, ns.
    pub span_ns: u64,
}

impl Job {
    /// Reads the files of a job's ranks.
    pub fn read(files: &[PathBuf]) -> Result<Job> {
        let (mut read, mut left_out) = (Vec::new(), Vec::new());
        for file in files {
            match read::file(file) {
                Ok(one) => read.push((one, file)),
                Err(error) => left_out.push(format!("{error:#}")),
            }
        }
        if read.is_empty() {
            return Err(Failure::new(2, left_out.join("; ")).into());
        }
        read.sort_by_key(|(read, _)| read.rank.header.rank);
        check_same_job(&read)?;
        let size = read.first().map_or(0, |(read, _)| read.rank.header.size);
        let mut read: Vec<Read> = read.into_iter().map(|(read, _)| read).collect();
        let mut notes = Vec::new();
        note_missing(&read, size, &mut notes);
        if read.iter().any(|read| read.rank.header.is_simulated) {
            notes.push("times are those of a simulated node, whose ranks have clocks of their own: they tell little of what passes in host code".into());
        }
        for read in &read {
            rank_notes(&read.rank, &mut notes);
        }
        let hosts: BTreeSet<&str> = read.iter().map(|read| &*read.rank.header.host).collect();
        let hosts_count = hosts.len();
        if hosts_count > 1 {
            read.iter_mut().for_each(Read::by_time_of_day);
            notes.extend(clocks::bring_together(&mut read));
        }
        let begin = read.iter().map(Read::first_ns).min().unwrap_or(0);
        let begun_unix_ns = match (hosts_count, read.first()) {
            (1, Some(first)) => first.unix_ns(begin),
            _ => begin,
        };
        read.iter_mut().for_each(|read| read.set_begin(begin));
        let (places, numbers) = copies::places(&read);
        let (messages, of_ids) = message::join(&mut read);
        let (copies, plans) = copies::of_messages(&mut read, &of_ids, &numbers);
        let ranks: Vec<Rank> = read.into_iter().map(|read| read.rank).collect();
        let ends = ranks
            .iter()
            .flat_map(|rank| rank.calls.iter().map(|call| call.end));
        let done = messages
            .iter()
            .filter_map(|message| message.receiver.as_ref()?.done_ns());
        let span_ns = ends.chain(done).max().unwrap_or(0);
        Ok(Job {
            begun_unix_ns,
            left_out,
            ranks,
            messages,
            places,
            copies,
            plans,
            notes,
            span_ns,
        })
    }

    /// Records that were lost.
    pub fn dropped(&self) -> u64 {
        self.ranks
            .iter()
            .filter_map(|rank| rank.end)
            .fold(0, |all, end| all.saturating_add(end.dropped))
    }
}

/// Whether two ranks may be of one run. On one host its identity says so; each host has its own, and then both must have run
/// at the same time.
fn are_of_one_run(one: &Read, other: &Read) -> bool {
    let (first, second) = (&one.rank.header, &other.rank.header);
    if first.host == second.host {
        return first.job == second.job;
    }
    let (begin, end) = one.time_of_day();
    let (other_begin, other_end) = other.time_of_day();
    first.size == second.size && begin <= other_end && other_begin <= end
}

fn check_same_job(read: &[(Read, &PathBuf)]) -> Result<()> {
    for pair in read.windows(2) {
        let [(one, first), (other, second)] = pair else {
            continue;
        };
        let files = format!("{} and {}", first.display(), second.display());
        let is_one_run = are_of_one_run(one, other);
        let (one, other) = (&one.rank.header, &other.rank.header);
        if !is_one_run {
            let wrong = format!("{files} are of different runs: name the files of one");
            return Err(Failure::new(2, wrong).into());
        }
        if one.rank == other.rank {
            let wrong = format!("{files} are both of rank {}", one.rank);
            return Err(Failure::new(2, wrong).into());
        }
    }
    Ok(())
}

/// Ranks without a file, the first few by number.
fn note_missing(read: &[Read], size: u32, notes: &mut Vec<String>) {
    let missing = u64::from(size).saturating_sub(read.len() as u64);
    if missing == 0 {
        return;
    }
    let is_there = |rank: &u32| {
        read.binary_search_by_key(rank, |other| other.rank.header.rank)
            .is_ok()
    };
    let first: Vec<String> = (0..size)
        .filter(|rank| !is_there(rank))
        .take(8)
        .map(|rank| rank.to_string())
        .collect();
    let more = match missing - first.len() as u64 {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    notes.push(format!(
        "no file of rank {}{more}: only one side of messages with them is known",
        first.join(", ")
    ));
}

fn rank_notes(rank: &Rank, notes: &mut Vec<String>) {
    let number = rank.header.rank;
    match rank.end {
        None => notes.push(format!(
            "the file of rank {number} has no end: the process still runs, was killed, or found no room for it; what it did last is missing"
        )),
        Some(end) if !end.is_finalized => {
            notes.push(format!("rank {number} ended by MPI_Abort, or without MPI_Finalize"));
        }
        Some(_) => {}
    }
    if let Some(end) = rank.end.filter(|end| end.dropped > 0) {
        notes.push(format!(
            "rank {number}: {} records were dropped",
            end.dropped
        ));
    }
    for call in &rank.inside {
        let peer = match call.peer {
            NO_PEER => String::new(),
            peer => format!(", rank {peer}, tag {}", call.tag),
        };
        notes.push(format!(
            "rank {number}: {} had not returned when the process ended{peer}",
            rank.function(call)
        ));
    }
    if rank.torn > 0 {
        notes.push(format!(
            "rank {number}: {} bytes of its file are no records",
            rank.torn
        ));
    }
}
