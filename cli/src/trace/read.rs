//! A rank's file: its records, with nanoseconds for times.

use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use anabranch_engine::trace::read::{Reader, Unreadable};
use anabranch_engine::trace::record::{self, Outcome, Record};
use anyhow::{Context, Result};

use super::job::Rank;
use super::message::Side;
use super::ucp;
use crate::Failure;

/// What a file has.
pub struct Read {
    pub rank: Rank,
    /// Sides of messages.
    pub sides: Vec<Side>,
    /// Identities of communicators, by number.
    pub comms: HashMap<u16, u64>,
    pub places: Vec<record::Place>,
    pub copies: Vec<record::Copied>,
    pub plans: Vec<record::Planned>,
}

/// What the times of a file mean: ticks, by its first and its last pair, or nanoseconds.
pub struct Clock {
    from: record::Sync,
    rate: f64,
}

impl Clock {
    fn new(syncs: Option<(record::Sync, record::Sync)>) -> Clock {
        match syncs {
            Some((from, to)) if to.ticks > from.ticks && to.ns > from.ns => Clock {
                from,
                rate: (to.ns - from.ns) as f64 / (to.ticks - from.ticks) as f64,
            },
            _ => Clock {
                from: record::Sync { ticks: 0, ns: 0 },
                rate: 1.0,
            },
        }
    }

    /// It was `ns` at `from`, and goes at this rate.
    pub fn at_rate(from: u64, ns: u64, rate: f64) -> Clock {
        let from = record::Sync { ticks: from, ns };
        Clock { from, rate }
    }

    pub fn ns(&self, at: u64) -> u64 {
        let since = at.wrapping_sub(self.from.ticks) as i64;
        self.from
            .ns
            .saturating_add_signed((since as f64 * self.rate) as i64)
    }

    pub fn span_ns(&self, span: u64) -> u64 {
        (span as f64 * self.rate) as u64
    }
}

impl Read {
    /// When the first thing happened that is recorded.
    pub fn first_ns(&self) -> u64 {
        let calls = self.rank.calls.iter().map(|call| call.begin);
        let sides = self.sides.iter().map(|side| side.half.begin_ns());
        calls.chain(sides).min().unwrap_or(u64::MAX)
    }

    /// When it was begun and when the last thing happened in it, ns since 1970.
    pub fn time_of_day(&self) -> (u64, u64) {
        let [opened, begun] = self.rank.header.opened;
        let calls = self.rank.calls.iter().map(|call| call.end);
        let sides = self.sides.iter().map(|side| side.half.begin_ns());
        let last = calls.chain(sides).max().unwrap_or(opened);
        (begun, self.unix_ns(last))
    }

    /// A time of its clock, ns since 1970.
    pub fn unix_ns(&self, at: u64) -> u64 {
        let [opened, begun] = self.rank.header.opened;
        begun.wrapping_add(at.wrapping_sub(opened))
    }

    /// Times are nanoseconds since 1970 from now on.
    pub fn by_time_of_day(&mut self) {
        let [opened, begun] = self.rank.header.opened;
        self.set_clock(&Clock::at_rate(opened, begun, 1.0));
    }

    /// Times are since then from now on.
    pub fn set_begin(&mut self, begin: u64) {
        for call in &mut self.rank.calls {
            call.begin = call.begin.saturating_sub(begin);
            call.end = call.end.saturating_sub(begin);
        }
        for fallback in &mut self.rank.fallbacks {
            fallback.at = fallback.at.saturating_sub(begin);
        }
        for call in &mut self.rank.ucp.calls {
            call.begin = call.begin.saturating_sub(begin);
            call.end = call.end.saturating_sub(begin);
        }
        self.sides
            .iter_mut()
            .for_each(|side| side.half.set_begin(begin));
        for copy in &mut self.copies {
            copy.launched = copy.launched.saturating_sub(begin);
            copy.end = copy.end.saturating_sub(begin);
        }
    }

    /// Times are nanoseconds from now on.
    pub fn set_clock(&mut self, clock: &Clock) {
        for call in &mut self.rank.calls {
            (call.begin, call.end) = (clock.ns(call.begin), clock.ns(call.end));
            call.inside = clock.span_ns(call.inside);
        }
        for fallback in &mut self.rank.fallbacks {
            fallback.at = clock.ns(fallback.at);
        }
        for call in &mut self.rank.ucp.calls {
            (call.begin, call.end) = (clock.ns(call.begin), clock.ns(call.end));
        }
        self.sides
            .iter_mut()
            .for_each(|side| side.half.set_clock(clock));
        for copy in &mut self.copies {
            (copy.launched, copy.end) = (clock.ns(copy.launched), clock.ns(copy.end));
            copy.uncertain = clock.span_ns(copy.uncertain);
        }
    }
}

/// Reads a rank's file.
pub fn file(file: &Path) -> Result<Read> {
    let unreadable = |error: Unreadable| Failure::new(2, format!("{}: {error}", file.display()));
    let open = File::open(file).with_context(|| file.display().to_string())?;
    let mut reader = Reader::new(BufReader::with_capacity(1 << 20, open)).map_err(unreadable)?;
    let mut read = Read {
        rank: Rank {
            header: reader.header.clone(),
            calls: Vec::new(),
            inside: Vec::new(),
            fallbacks: Vec::new(),
            ucp: ucp::Recorded::default(),
            recorded: 0,
            end: None,
            torn: 0,
        },
        sides: Vec::new(),
        comms: HashMap::new(),
        places: Vec::new(),
        copies: Vec::new(),
        plans: Vec::new(),
    };
    let mut syncs: Option<(record::Sync, record::Sync)> = None;
    // As they were when it was last looked: those that have ended since are there a second time.
    let (mut under_way, mut inside) = (HashMap::new(), HashMap::new());
    while let Some(record) = reader
        .next_record()
        .with_context(|| file.display().to_string())?
    {
        read.rank.recorded += 1;
        match record {
            Record::Call(call) if call.end == 0 => _ = inside.insert(call.number, call),
            Record::Call(call) => {
                inside.remove(&call.number);
                read.rank.calls.push(call);
            }
            Record::Fallback(fallback) => read.rank.fallbacks.push(fallback),
            Record::Message(message) if message.outcome == Outcome::UnderWay => {
                under_way.insert(message.id, message);
            }
            Record::Message(message) => {
                under_way.remove(&message.id);
                read.sides.push(Side::new(&message, &read.rank.header));
            }
            Record::Comm(comm) => _ = read.comms.insert(comm.number, comm.identity),
            Record::Place(place) => read.places.push(place),
            Record::Copied(copied) => read.copies.push(copied),
            Record::Planned(planned) => read.plans.push(planned),
            Record::Ucp(call) => read.rank.ucp.calls.push(call),
            Record::Lane(lane) => read.rank.ucp.add_lane(&lane),
            Record::End(last) => {
                read.rank.end = Some(last);
                read.rank.recorded -= 1;
            }
            Record::Sync(sync) => {
                syncs = Some((syncs.map_or(sync, |(first, _)| first), sync));
            }
        }
    }
    let header = &read.rank.header;
    let rest = under_way.values().map(|message| Side::new(message, header));
    read.sides.extend(rest);
    read.rank.inside = inside.into_values().collect();
    read.rank.torn = reader.torn;
    read.set_clock(&Clock::new(syncs));
    Ok(read)
}
