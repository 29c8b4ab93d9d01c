//! What the ranks of a job have recorded: read from their files, both sides of each message brought together.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use anabranch_engine::trace::read::{Header, Reader, Unreadable};
use anabranch_engine::trace::record::{self, Record, NO_PEER};
use anyhow::{Context, Result};
use serde::Serialize;

use crate::Failure;

/// What a rank has recorded, but for its messages.
pub struct Rank {
    pub header: Header,
    pub calls: Vec<record::Call>,
    pub fallbacks: Vec<record::Fallback>,
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

/// One side of a message. Times are nanoseconds since the first record of the job.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Half {
    /// When the receive was posted.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub posted_ns: Option<u64>,
    /// When it was offered (sender), or claimed (receiver).
    pub at_ns: u64,
    /// When it was matched, and when its payload began to move, had arrived, and nothing was left to do.
    pub matched_ns: Option<u64>,
    pub moving_ns: Option<u64>,
    pub landed_ns: Option<u64>,
    pub done_ns: Option<u64>,
    /// By which protocol at last.
    pub protocol: Option<String>,
    /// Number of the call that began it.
    pub call: u64,
}

/// A message.
#[derive(Clone, Debug, Serialize)]
pub struct Message {
    /// Its number in this job.
    pub number: usize,
    /// The MPI library carries it, and nothing says which of its two ends belong together.
    pub is_by_mpi: bool,
    /// World ranks; absent where only the MPI library knows the other side.
    pub source: Option<u32>,
    pub destination: Option<u32>,
    pub tag: i32,
    pub bytes: u64,
    /// Identity of the communicator, in hexadecimal digits.
    pub communicator: String,
    pub sender: Option<Half>,
    pub receiver: Option<Half>,
}

impl Message {
    /// The protocol by which it came.
    pub fn protocol(&self) -> &str {
        let mut halves = [&self.receiver, &self.sender].into_iter().flatten();
        halves
            .find_map(|half| half.protocol.as_deref())
            .unwrap_or("none")
    }

    /// Its offer, or where only its receive is known its claim.
    pub fn begin_ns(&self) -> u64 {
        let half = self.sender.as_ref().or(self.receiver.as_ref());
        half.map_or(0, |half| half.at_ns)
    }

    /// From its beginning to its arrival.
    pub fn took_ns(&self) -> Option<u64> {
        let arrived = |half: &Option<Half>| {
            half.as_ref()
                .and_then(|half| half.landed_ns.or(half.done_ns))
        };
        let end = arrived(&self.receiver).or(arrived(&self.sender))?;
        Some(end.saturating_sub(self.begin_ns()))
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

/// A job.
pub struct Job {
    /// The first record, by the clock of the files.
    pub begin_ns: u64,
    pub ranks: Vec<Rank>,
    pub messages: Vec<Message>,
    pub places: Vec<Place>,
    pub copies: Vec<Copy>,
    /// What a reader should know: ranks that are missing, files that are torn, records that were dropped.
    pub notes: Vec<String>,
    /// From the first record to the last, ns.
    pub span_ns: u64,
}

impl Job {
    /// Reads the files of a job's ranks.
    pub fn read(files: &[PathBuf]) -> Result<Job> {
        let mut read = Vec::new();
        for file in files {
            let (rank, halves) = read_rank(file)?;
            read.push((rank, halves, file));
        }
        read.sort_by_key(|(rank, ..)| rank.header.rank);
        let (first, _, first_file) = read.first().context("no file")?;
        let (job, size) = (first.header.job, first.header.size);
        for (rank, _, file) in &read {
            if rank.header.job != job {
                let files = format!("{} and {}", first_file.display(), file.display());
                return Err(Failure::new(
                    2,
                    format!("{files} are of different runs: name the files of one"),
                )
                .into());
            }
        }
        for pair in read.windows(2) {
            if pair[0].0.header.rank == pair[1].0.header.rank {
                let files = format!("{} and {}", pair[0].2.display(), pair[1].2.display());
                let rank = pair[0].0.header.rank;
                return Err(Failure::new(2, format!("{files} are both of rank {rank}")).into());
            }
        }
        let (mut ranks, halves): (Vec<Rank>, Vec<_>) = read
            .into_iter()
            .map(|(rank, halves, _)| (rank, halves))
            .unzip();
        let mut notes = Vec::new();
        note_missing(&ranks, size, &mut notes);
        if ranks.iter().any(|rank| rank.header.is_simulated) {
            notes.push("times are those of a simulated node, whose ranks have clocks of their own: they tell little of what passes in host code".into());
        }
        for rank in &ranks {
            rank_notes(rank, &mut notes);
        }
        let begin = first_ns(&ranks, &halves);
        let messages = join(&ranks, halves, begin);
        for rank in &mut ranks {
            for call in &mut rank.calls {
                (call.begin, call.end) = (
                    call.begin.saturating_sub(begin),
                    call.end.saturating_sub(begin),
                );
            }
        }
        let ends = ranks
            .iter()
            .flat_map(|rank| rank.calls.iter().map(|call| call.end));
        let landed = messages
            .iter()
            .filter_map(|message| message.receiver.as_ref()?.done_ns);
        let span_ns = ends.chain(landed).max().unwrap_or(0);
        Ok(Job {
            begin_ns: begin,
            ranks,
            messages,
            places: Vec::new(),
            copies: Vec::new(),
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

/// Ranks without a file, the first few by number.
fn note_missing(ranks: &[Rank], size: u32, notes: &mut Vec<String>) {
    let missing = u64::from(size).saturating_sub(ranks.len() as u64);
    if missing == 0 {
        return;
    }
    let is_there = |rank: &u32| {
        ranks
            .binary_search_by_key(rank, |other| other.header.rank)
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
    if rank.torn > 0 {
        notes.push(format!(
            "rank {number}: {} bytes of its file are no records",
            rank.torn
        ));
    }
}

/// What the times of a file mean: ticks, by its first and its last pair, or nanoseconds.
struct Clock {
    from: record::Sync,
    rate: f64,
}

impl Clock {
    fn new(syncs: &[record::Sync]) -> Clock {
        let same = record::Sync { ticks: 0, ns: 0 };
        let (from, to) = match (syncs.first(), syncs.last()) {
            (Some(from), Some(to)) if to.ticks > from.ticks && to.ns > from.ns => (*from, *to),
            _ => {
                return Clock {
                    from: same,
                    rate: 1.0,
                }
            }
        };
        let rate = (to.ns - from.ns) as f64 / (to.ticks - from.ticks) as f64;
        Clock { from, rate }
    }

    fn ns(&self, at: u64) -> u64 {
        let since = at.wrapping_sub(self.from.ticks) as i64;
        self.from
            .ns
            .saturating_add_signed((since as f64 * self.rate) as i64)
    }

    fn span_ns(&self, span: u64) -> u64 {
        (span as f64 * self.rate) as u64
    }
}

/// One side of a message, as it was recorded.
struct Side {
    about: record::Message,
    half: Half,
}

fn read_rank(file: &Path) -> Result<(Rank, BTreeMap<u64, Side>)> {
    let unreadable = |error: Unreadable| Failure::new(2, format!("{}: {error}", file.display()));
    let open = File::open(file).with_context(|| file.display().to_string())?;
    let mut reader = Reader::new(BufReader::with_capacity(1 << 20, open)).map_err(unreadable)?;
    let (mut calls, mut fallbacks) = (Vec::new(), Vec::new());
    let (mut end, mut recorded) = (None, 0);
    let mut sides: BTreeMap<u64, Side> = BTreeMap::new();
    // A thread's records may lie behind those of another that came later.
    let (mut changes, mut posted, mut syncs) = (Vec::new(), Vec::new(), Vec::new());
    while let Some(record) = reader
        .next_record()
        .with_context(|| file.display().to_string())?
    {
        recorded += 1;
        match record {
            Record::Call(call) => calls.push(call),
            Record::Fallback(fallback) => fallbacks.push(fallback),
            Record::Message(about) => {
                let half = Half {
                    at_ns: about.at,
                    call: about.call,
                    ..Half::default()
                };
                sides.insert(about.id, Side { about, half });
            }
            Record::Change(change) => changes.push(change),
            Record::Posted(post) => posted.push(post),
            Record::End(last) => (end, recorded) = (Some(last), recorded - 1),
            Record::Sync(sync) => syncs.push(sync),
        }
    }
    let clock = Clock::new(&syncs);
    for call in &mut calls {
        (call.begin, call.end) = (clock.ns(call.begin), clock.ns(call.end));
        call.inside = clock.span_ns(call.inside);
    }
    for side in sides.values_mut() {
        side.about.at = clock.ns(side.about.at);
        side.half.at_ns = side.about.at;
    }
    let changed = changes
        .iter_mut()
        .map(|change: &mut record::Change| &mut change.at);
    let posts = posted
        .iter_mut()
        .map(|post: &mut record::Posted| &mut post.at);
    let fallen = fallbacks
        .iter_mut()
        .map(|fallback: &mut record::Fallback| &mut fallback.at);
    changed
        .chain(posts)
        .chain(fallen)
        .for_each(|at| *at = clock.ns(*at));
    changes.sort_by_key(|change| change.at);
    for change in changes {
        if let Some(side) = sides.get_mut(&change.id) {
            note_change(&reader.header, &mut side.half, &change);
        }
    }
    for post in posted {
        if let Some(side) = sides.get_mut(&post.id) {
            (side.half.posted_ns, side.half.call) = (Some(post.at), post.call);
        }
    }
    let rank = Rank {
        header: reader.header,
        calls,
        fallbacks,
        recorded,
        end,
        torn: reader.torn,
    };
    Ok((rank, sides))
}

fn note_change(header: &Header, half: &mut Half, change: &record::Change) {
    let state = header.states.get(usize::from(change.state));
    match state.map(String::as_str) {
        Some("matched") => _ = half.matched_ns.get_or_insert(change.at),
        Some("moving") => _ = half.moving_ns.get_or_insert(change.at),
        // Packed bytes land a second time, where they belong.
        Some("landed") => half.landed_ns = Some(change.at),
        Some("done") => _ = half.done_ns.get_or_insert(change.at),
        _ => return,
    }
    if let Some(number) = usize::from(change.protocol).checked_sub(1) {
        half.protocol = header.protocols.get(number).cloned();
    }
}

fn first_ns(ranks: &[Rank], halves: &[BTreeMap<u64, Side>]) -> u64 {
    let calls = ranks
        .iter()
        .flat_map(|rank| rank.calls.iter().map(|call| call.begin));
    let sides = halves.iter().flat_map(|sides| sides.values());
    let sides = sides.map(|side| {
        side.half
            .posted_ns
            .map_or(side.about.at, |at| at.min(side.about.at))
    });
    calls.chain(sides).min().unwrap_or(0)
}

/// Both sides of a message have its sender and the same number.
fn join(ranks: &[Rank], halves: Vec<BTreeMap<u64, Side>>, begin: u64) -> Vec<Message> {
    let mut joined: BTreeMap<(u32, u64), Message> = BTreeMap::new();
    let mut others = Vec::new();
    for (rank, sides) in ranks.iter().zip(halves) {
        let own = rank.header.rank;
        for Side { about, mut half } in sides.into_values() {
            for time in [
                Some(&mut half.at_ns),
                half.posted_ns.as_mut(),
                half.matched_ns.as_mut(),
                half.moving_ns.as_mut(),
                half.landed_ns.as_mut(),
                half.done_ns.as_mut(),
            ] {
                time.into_iter()
                    .for_each(|time| *time = time.saturating_sub(begin));
            }
            let peer = (about.peer != NO_PEER).then_some(about.peer as u32);
            let is_sender = about.side == record::Side::Sender;
            let (source, destination) = if is_sender {
                (Some(own), peer)
            } else {
                (peer, Some(own))
            };
            let (sender, receiver) = if is_sender {
                (Some(half), None)
            } else {
                (None, Some(half))
            };
            let message = Message {
                source,
                destination,
                tag: about.tag,
                bytes: about.bytes,
                number: 0,
                is_by_mpi: about.nonce == 0,
                communicator: format!("{:016x}", about.comm),
                sender,
                receiver,
            };
            let Some(source) = source.filter(|_| about.nonce != 0) else {
                others.push(message);
                continue;
            };
            match joined.get_mut(&(source, about.nonce)) {
                Some(known) if is_sender => known.sender = message.sender,
                Some(known) => known.receiver = message.receiver,
                None => {
                    joined.insert((source, about.nonce), message);
                }
            }
        }
    }
    let mut messages: Vec<Message> = joined.into_values().chain(others).collect();
    messages.sort_by_key(Message::begin_ns);
    for (number, message) in messages.iter_mut().enumerate() {
        message.number = number;
    }
    messages
}
