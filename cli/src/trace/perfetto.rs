//! A trace that Perfetto's viewer opens (ui.perfetto.dev): the messages of its protocol buffers that are needed, by their
//! numbers in perfetto/trace/*.proto.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{self, Write};

use anabranch_engine::trace::record;
use prost::Message as _;

use super::job::{Job, Rank};
use super::message::{Half, Message};
use super::ucp;

#[derive(Clone, PartialEq, prost::Message)]
struct Packet {
    #[prost(uint64, optional, tag = "8")]
    timestamp: Option<u64>,
    #[prost(uint32, tag = "10")]
    sequence: u32,
    #[prost(message, optional, tag = "11")]
    event: Option<Event>,
    #[prost(message, optional, tag = "60")]
    track: Option<Track>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Event {
    #[prost(message, repeated, tag = "4")]
    notes: Vec<Note>,
    #[prost(int32, tag = "9")]
    kind: i32,
    #[prost(uint64, tag = "11")]
    track: u64,
    #[prost(string, optional, tag = "23")]
    name: Option<String>,
    #[prost(fixed64, repeated, packed = "false", tag = "47")]
    flows: Vec<u64>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Note {
    #[prost(uint64, optional, tag = "3")]
    number: Option<u64>,
    #[prost(string, optional, tag = "6")]
    text: Option<String>,
    #[prost(string, tag = "10")]
    name: String,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Track {
    #[prost(uint64, tag = "1")]
    uuid: u64,
    #[prost(string, optional, tag = "2")]
    name: Option<String>,
    #[prost(message, optional, tag = "3")]
    process: Option<Process>,
    #[prost(uint64, optional, tag = "5")]
    parent: Option<u64>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct Process {
    #[prost(int32, tag = "1")]
    pid: i32,
    #[prost(string, tag = "6")]
    name: String,
}

const BEGIN: i32 = 1;
const END: i32 = 2;

struct Writer<W> {
    to: W,
    bytes: Vec<u8>,
}

impl<W: Write> Writer<W> {
    /// A packet of a trace: field 1, with its length.
    fn put(&mut self, packet: &Packet) -> io::Result<()> {
        self.bytes.clear();
        prost::encoding::encode_key(
            1,
            prost::encoding::WireType::LengthDelimited,
            &mut self.bytes,
        );
        packet
            .encode_length_delimited(&mut self.bytes)
            .map_err(io::Error::other)?;
        self.to.write_all(&self.bytes)
    }

    fn track(&mut self, track: Track) -> io::Result<()> {
        self.put(&Packet {
            sequence: 1,
            track: Some(track),
            ..Packet::default()
        })
    }

    fn slice(&mut self, (begin, end): (u64, u64), event: Event) -> io::Result<()> {
        let track = event.track;
        let packet = |at, event| Packet {
            timestamp: Some(at),
            sequence: 1,
            event: Some(event),
            track: None,
        };
        self.put(&packet(begin, event))?;
        self.put(&packet(
            end.max(begin),
            Event {
                kind: END,
                track,
                ..Event::default()
            },
        ))
    }
}

fn rank_track(rank: u32) -> u64 {
    (u64::from(rank) + 1) << 40
}

fn thread_track(rank: u32, thread: u64) -> u64 {
    rank_track(rank) + 1 + thread
}

/// Slices on one track may not overlap, so messages take turns on as many as they need.
fn lane(busy: &mut Vec<u64>, (begin, end): (u64, u64)) -> u64 {
    let free = busy.iter().position(|until| *until <= begin);
    let at = free.unwrap_or_else(|| {
        busy.push(0);
        busy.len() - 1
    });
    busy[at] = end.max(begin.saturating_add(1));
    at as u64
}

/// Writes it.
pub fn write(job: &Job, to: impl Write) -> io::Result<()> {
    let mut out = Writer {
        to,
        bytes: Vec::new(),
    };
    for rank in &job.ranks {
        let number = rank.header.rank;
        out.track(Track {
            uuid: rank_track(number),
            process: Some(Process {
                pid: rank.header.pid as i32,
                name: format!("rank {number} on {}", rank.header.host),
            }),
            ..Track::default()
        })?;
        write_calls(&mut out, rank)?;
        write_ucp(&mut out, rank)?;
    }
    let mut lanes: Vec<(u32, u64, Vec<u64>)> = Vec::new();
    for (flow, message) in job.messages.iter().enumerate() {
        let both = message.sender.is_some() && message.receiver.is_some();
        let flow = both.then_some(flow as u64 + 1);
        for (half, rank, side) in [
            (&message.sender, message.source, 0),
            (&message.receiver, message.destination, 1),
        ] {
            if let (Some(half), Some(rank)) = (half, rank) {
                write_half(&mut out, &mut lanes, (message, half), (rank, side), flow)?;
            }
        }
    }
    write_copies(&mut out, job)?;
    out.to.flush()
}

/// Copies from one place to another on one kind of path, and the tracks that they need.
struct LinkTracks {
    first: u64,
    busy: Vec<u64>,
}

/// Copies by link, each with the number of its message.
fn write_copies<W: Write>(out: &mut Writer<W>, job: &Job) -> io::Result<()> {
    const LINKS: u64 = 1 << 60;
    if !job.copies.is_empty() {
        out.track(Track {
            uuid: LINKS,
            process: Some(Process {
                pid: 0,
                name: "links".into(),
            }),
            ..Track::default()
        })?;
    }
    let mut links: BTreeMap<(usize, usize, &str), LinkTracks> = BTreeMap::new();
    for copy in &job.copies {
        let first = LINKS + ((links.len() as u64 + 1) << 32);
        let link = links
            .entry((copy.from, copy.to, copy.path))
            .or_insert(LinkTracks {
                first,
                busy: Vec::new(),
            });
        let span = (copy.launched_ns, copy.end_ns);
        let known = link.busy.len();
        let track = link.first + lane(&mut link.busy, span);
        if link.busy.len() > known {
            let name = |place: usize| job.places[place].name.as_str();
            out.track(Track {
                uuid: track,
                name: Some(format!(
                    "{} to {}, {}",
                    name(copy.from),
                    name(copy.to),
                    copy.path
                )),
                parent: Some(LINKS),
                ..Track::default()
            })?;
        }
        let mut notes = vec![
            note("bytes", copy.bytes),
            note("hop", copy.hop.into()),
            note("uncertain ns", copy.uncertain_ns),
        ];
        notes.extend(copy.message.map(|number| note("message", number as u64)));
        let event = Event {
            kind: BEGIN,
            track,
            name: Some(format!("{} by {}", copy.path, copy.by)),
            notes,
            flows: Vec::new(),
        };
        out.slice(span, event)?;
    }
    Ok(())
}

fn note(name: &str, number: u64) -> Note {
    Note {
        number: Some(number),
        name: name.into(),
        ..Note::default()
    }
}

fn write_calls<W: Write>(out: &mut Writer<W>, rank: &Rank) -> io::Result<()> {
    let number = rank.header.rank;
    let threads: BTreeSet<u64> = rank.calls.iter().map(|call| call.number >> 32).collect();
    for thread in threads {
        out.track(Track {
            uuid: thread_track(number, thread),
            name: Some(format!("MPI calls of thread {thread}")),
            parent: Some(rank_track(number)),
            ..Track::default()
        })?;
    }
    for call in &rank.calls {
        let event = Event {
            kind: BEGIN,
            track: thread_track(number, call.number >> 32),
            name: Some(rank.function(call).to_owned()),
            notes: vec![
                note("bytes", call.bytes),
                note("calls", u64::from(call.times)),
            ],
            flows: Vec::new(),
        };
        out.slice((call.begin, call.end), event)?;
    }
    Ok(())
}

/// Calls of UCX, below the thread that made them.
fn write_ucp<W: Write>(out: &mut Writer<W>, rank: &Rank) -> io::Result<()> {
    let number = rank.header.rank;
    let track = |call: &record::Ucp| rank_track(number) + (3 << 36) + (call.call >> 32);
    let threads: BTreeMap<u64, u64> = rank
        .ucp
        .calls
        .iter()
        .map(|call| (track(call), call.call >> 32))
        .collect();
    for (track, thread) in threads {
        out.track(Track {
            uuid: track,
            name: Some(format!("UCX calls of thread {thread}")),
            parent: Some(rank_track(number)),
            ..Track::default()
        })?;
    }
    for call in &rank.ucp.calls {
        let transports = Note {
            text: Some(rank.ucp.transports(call.endpoint)),
            name: "transports".into(),
            ..Note::default()
        };
        let event = Event {
            kind: BEGIN,
            track: track(call),
            name: Some(ucp::function(rank, call)),
            notes: vec![note("bytes", call.bytes.unwrap_or(0)), transports],
            flows: Vec::new(),
        };
        out.slice((call.begin, call.end), event)?;
    }
    Ok(())
}

fn write_half<W: Write>(
    out: &mut Writer<W>,
    lanes: &mut Vec<(u32, u64, Vec<u64>)>,
    (message, half): (&Message, &Half),
    (rank, side): (u32, u64),
    flow: Option<u64>,
) -> io::Result<()> {
    let begin = half.begin_ns();
    let end = half.landed_ns().or(half.done_ns()).unwrap_or(half.at_ns());
    let found = lanes
        .iter()
        .position(|(of, on, _)| (*of, *on) == (rank, side));
    let at = found.unwrap_or_else(|| {
        lanes.push((rank, side, Vec::new()));
        lanes.len() - 1
    });
    let known = lanes[at].2.len();
    let turn = lane(&mut lanes[at].2, (begin, end));
    let track = rank_track(rank) + (1 << 36) * (side + 1) + turn;
    if lanes[at].2.len() > known {
        out.track(Track {
            uuid: track,
            name: Some(format!("{} {turn}", ["sends", "receives"][side as usize])),
            parent: Some(rank_track(rank)),
            ..Track::default()
        })?;
    }
    let mut notes = vec![
        note("bytes", message.bytes),
        note("tag", u64::from(message.tag as u32)),
    ];
    let others = [("from", message.source), ("to", message.destination)];
    notes.extend(
        others
            .iter()
            .filter_map(|(name, rank)| Some(note(name, u64::from((*rank)?)))),
    );
    let event = Event {
        kind: BEGIN,
        track,
        name: Some(half.protocol().unwrap_or("message").to_owned()),
        notes,
        flows: flow.into_iter().collect(),
    };
    out.slice((begin, end), event)
}
