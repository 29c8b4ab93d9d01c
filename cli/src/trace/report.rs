//! What a trace says, in tables for people and in numbers for programs.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use serde::Serialize;

use super::advice::{advice, Advice};
use super::job::{Job, Place};
use super::links::{links, Link};
use super::message::{Half, Message};
use super::ucp;
use crate::table;

/// Messages that the report names one by one.
const SLOWEST: usize = 8;

/// Messages, bytes and times of a group.
#[derive(Default, Serialize)]
pub struct Group {
    pub messages: u64,
    pub bytes: u64,
    /// Median and longest time from offer to arrival, us.
    pub median_us: f64,
    pub longest_us: f64,
    #[serde(skip)]
    times: Vec<u64>,
}

impl Group {
    fn add(&mut self, message: &Message) {
        self.messages += 1;
        self.bytes = self.bytes.saturating_add(message.bytes);
        self.times.extend(message.took_ns());
    }

    fn row(&self, name: &str) -> Vec<String> {
        vec![
            name.to_owned(),
            self.messages.to_string(),
            self.bytes.to_string(),
            format!("{:.2}", self.median_us),
            format!("{:.2}", self.longest_us),
        ]
    }

    fn end(&mut self) {
        self.times.sort_unstable();
        let at = |place: usize| self.times.get(place).map_or(0.0, |ns| *ns as f64 * 1e-3);
        self.median_us = at(self.times.len() / 2);
        self.longest_us = at(self.times.len().saturating_sub(1));
    }
}

/// Calls of one function.
#[derive(Default, Serialize)]
pub struct Calls {
    pub calls: u64,
    pub bytes: u64,
    /// Time in them, ms.
    pub total_ms: f64,
    pub longest_us: f64,
}

/// What a job did.
#[derive(Serialize)]
pub struct Report {
    /// Of this format.
    pub schema: u32,
    pub span_ms: f64,
    pub ranks: Vec<Row>,
    pub notes: Vec<String>,
    pub recorded: u64,
    pub dropped: u64,
    /// By function.
    pub calls: BTreeMap<String, Calls>,
    /// By protocol, where they were received.
    pub received: BTreeMap<String, Group>,
    /// By protocol, where they were sent.
    pub sent: BTreeMap<String, Group>,
    /// Messages and bytes that each rank has sent to each: source, destination, messages, bytes.
    pub pairs: Vec<(u32, u32, u64, u64)>,
    /// GPUs and host memories, by number, and what went from one to the other.
    pub places: Vec<Place>,
    pub links: Vec<Link>,
    /// What could be better.
    pub advice: Vec<Advice>,
    /// Sends of device buffers that did not go by the library's own ways, by reason: messages and bytes.
    pub fallbacks: BTreeMap<String, (u64, u64)>,
    /// Calls of UCX's functions.
    pub ucp: Vec<ucp::Row>,
}

/// A rank.
#[derive(Serialize)]
pub struct Row {
    pub rank: u32,
    pub host: String,
    pub pid: u32,
    pub calls: u64,
    /// Time in MPI calls, ms.
    pub in_calls_ms: f64,
    pub recorded: u64,
    pub dropped: u64,
}

impl Report {
    /// Sums a job up.
    pub fn new(job: &Job) -> Report {
        let mut calls: BTreeMap<String, Calls> = BTreeMap::new();
        let mut fallbacks: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        for rank in &job.ranks {
            for call in &rank.calls {
                let row = calls.entry(rank.function(call).to_owned()).or_default();
                let took = call.inside as f64;
                row.calls += u64::from(call.times);
                row.bytes = row.bytes.saturating_add(call.bytes);
                row.total_ms += took * 1e-6;
                row.longest_us = row.longest_us.max(took * 1e-3 / f64::from(call.times));
            }
            for fallback in &rank.fallbacks {
                let name = rank.header.reasons.get(usize::from(fallback.reason));
                let row = fallbacks
                    .entry(name.cloned().unwrap_or_default())
                    .or_default();
                *row = (row.0 + 1, row.1.saturating_add(fallback.bytes));
            }
        }
        let mut received: BTreeMap<&'static str, Group> = BTreeMap::new();
        let mut sent = BTreeMap::new();
        let mut pairs: BTreeMap<(u32, u32), (u64, u64)> = BTreeMap::new();
        for message in &job.messages {
            // Nothing is brought of a message that is empty, or too long.
            let by = |half: &Option<Half>| Some(half.as_ref()?.protocol().unwrap_or("none"));
            for (groups, half) in [
                (&mut received, &message.receiver),
                (&mut sent, &message.sender),
            ] {
                if let Some(protocol) = by(half) {
                    groups.entry(protocol).or_default().add(message);
                }
            }
            // Of those that the MPI library carries, each end is a message here.
            let is_counted = !message.is_by_mpi || message.sender.is_some();
            let ends = (message.source, message.destination);
            if let (Some(from), Some(to), true) = (ends.0, ends.1, is_counted) {
                let pair = pairs.entry((from, to)).or_default();
                *pair = (pair.0 + 1, pair.1.saturating_add(message.bytes));
            }
        }
        received
            .values_mut()
            .chain(sent.values_mut())
            .for_each(Group::end);
        let links = links(job);
        Report {
            schema: 1,
            span_ms: job.span_ns as f64 * 1e-6,
            ranks: rows(job),
            notes: job.notes.clone(),
            recorded: job.ranks.iter().map(|rank| rank.recorded).sum(),
            dropped: job.dropped(),
            calls,
            received: named(received),
            sent: named(sent),
            pairs: pairs
                .into_iter()
                .map(|((from, to), (count, bytes))| (from, to, count, bytes))
                .collect(),
            places: job.places.clone(),
            advice: advice(job, &links),
            links,
            fallbacks,
            ucp: ucp::rows(job),
        }
    }

    /// For people. Of the messages the slowest are named.
    pub fn text(&self, messages: &[Message]) -> String {
        let mut text = format!(
            "{} rank{}, {:.3} ms from the first record to the last, {} records, {} dropped\n",
            self.ranks.len(),
            if self.ranks.len() == 1 { "" } else { "s" },
            self.span_ms,
            self.recorded,
            self.dropped
        );
        for note in &self.notes {
            let _ = writeln!(text, "! {note}");
        }
        let head = ["rank", "host", "MPI calls", "ms in them"];
        let rows = self.ranks.iter().map(|row| {
            let calls = row.calls.to_string();
            vec![
                row.rank.to_string(),
                row.host.clone(),
                calls,
                format!("{:.3}", row.in_calls_ms),
            ]
        });
        part(&mut text, "Ranks", "><>>", &head, rows);
        self.calls_text(&mut text);
        let head = ["protocol", "messages", "bytes", "median us", "longest us"];
        for (title, groups) in [
            ("Messages received, from offer to arrival", &self.received),
            ("Messages sent", &self.sent),
        ] {
            part(
                &mut text,
                title,
                "<>>>>",
                &head,
                groups.iter().map(|(name, group)| group.row(name)),
            );
        }
        self.links_text(&mut text);
        self.ucp_text(&mut text);
        let head = ["reason", "messages", "bytes"];
        let rows = self.fallbacks.iter().map(|(reason, (messages, bytes))| {
            vec![reason.clone(), messages.to_string(), bytes.to_string()]
        });
        part(
            &mut text,
            "Sends of device buffers that the library did not carry",
            "<>>",
            &head,
            rows,
        );
        let rows = self.pairs.iter().map(|(from, to, messages, bytes)| {
            let numbers = [u64::from(*from), u64::from(*to), *messages, *bytes];
            numbers.map(|number| number.to_string()).to_vec()
        });
        part(
            &mut text,
            "Messages from rank to rank",
            ">>>>",
            &["from", "to", "messages", "bytes"],
            rows,
        );
        part(
            &mut text,
            "The slowest messages",
            ">>>>><",
            &SHORT,
            slowest(messages).into_iter().map(short),
        );
        for Advice {
            what,
            evidence,
            try_this,
        } in &self.advice
        {
            let _ = write!(text, "\n* {what}\n    {evidence}\n    try: {try_this}\n");
        }
        text
    }

    fn links_text(&self, text: &mut String) {
        let several = self
            .places
            .iter()
            .any(|place| place.host != self.places[0].host);
        let name = |number: usize| {
            let place = &self.places[number];
            match several {
                true => format!("{} {}", place.host, place.name),
                false => place.name.clone(),
            }
        };
        let rows = self.links.iter().map(|link| {
            vec![
                name(link.from),
                name(link.to),
                link.path.to_owned(),
                link.copies.to_string(),
                link.bytes.to_string(),
                format!("{:.3}", link.busy_ms),
                format!("{:.2}", link.gb_s),
            ]
        });
        let head = ["from", "to", "path", "copies", "bytes", "busy ms", "GB/s"];
        part(text, "Copies from place to place", "<<<>>>>", &head, rows);
    }

    fn ucp_text(&self, text: &mut String) {
        let key = |row: &ucp::Row| {
            (
                row.call.clone(),
                row.function.clone(),
                row.transports.clone(),
            )
        };
        let rows = ucp::merged(&self.ucp, key).into_iter().map(|row| {
            vec![
                row.call,
                row.function,
                row.calls.to_string(),
                row.bytes.to_string(),
                format!("{:.3}", row.inside_ns as f64 * 1e-6),
                row.under_way.to_string(),
                row.transports,
            ]
        });
        let head = [
            "MPI call",
            "UCX call",
            "calls",
            "bytes",
            "ms in them",
            "left under way",
            "transports",
        ];
        part(text, "Calls of UCX", "<<>>>><", &head, rows);
    }

    fn calls_text(&self, text: &mut String) {
        let mut by_time: Vec<_> = self.calls.iter().collect();
        by_time.sort_by(|one, other| other.1.total_ms.total_cmp(&one.1.total_ms));
        let rows = by_time.into_iter().map(|(name, row)| {
            let mean = row.total_ms * 1e3 / row.calls as f64;
            vec![
                name.clone(),
                row.calls.to_string(),
                format!("{:.3}", row.total_ms),
                format!("{mean:.2}"),
                format!("{:.2}", row.longest_us),
                row.bytes.to_string(),
            ]
        });
        let head = ["call", "calls", "ms", "mean us", "longest us", "bytes"];
        part(text, "Calls, longest together first", "<>>>>>", &head, rows);
    }
}

/// A table with its title, unless it is empty.
fn part(
    text: &mut String,
    title: &str,
    alignment: &str,
    head: &[&str],
    rows: impl Iterator<Item = Vec<String>>,
) {
    *text += &table::titled(title, alignment, head, rows);
}

fn named(groups: BTreeMap<&'static str, Group>) -> BTreeMap<String, Group> {
    let rows = groups.into_iter();
    rows.map(|(name, group)| (name.to_owned(), group)).collect()
}

fn rows(job: &Job) -> Vec<Row> {
    let row = |rank: &super::job::Rank| {
        let calls = rank.calls.iter().map(|call| u64::from(call.times));
        let times = rank.calls.iter().map(|call| call.inside);
        Row {
            rank: rank.header.rank,
            host: rank.header.host.clone(),
            pid: rank.header.pid,
            calls: calls.sum(),
            in_calls_ms: times.fold(0_u64, u64::saturating_add) as f64 * 1e-6,
            recorded: rank.recorded,
            dropped: rank.end.map_or(0, |end| end.dropped),
        }
    };
    job.ranks.iter().map(row).collect()
}

const SHORT: [&str; 6] = ["at ms", "from", "to", "bytes", "us", "protocol"];

fn short(message: &Message) -> Vec<String> {
    let rank = |rank: Option<u32>| rank.map_or_else(|| "?".into(), |rank| rank.to_string());
    vec![
        format!("{:.3}", message.begin_ns() as f64 * 1e-6),
        rank(message.source),
        rank(message.destination),
        message.bytes.to_string(),
        message
            .took_ns()
            .map_or_else(|| "-".into(), |ns| format!("{:.2}", ns as f64 * 1e-3)),
        message.protocol().to_owned(),
    ]
}

/// The messages that took longest.
fn slowest(messages: &[Message]) -> Vec<&Message> {
    let mut all: Vec<&Message> = messages
        .iter()
        .filter(|message| message.took_ns().is_some())
        .collect();
    all.sort_by_key(|message| std::cmp::Reverse(message.took_ns()));
    all.truncate(SLOWEST);
    all
}

/// Columns of [`csv`].
const COLUMNS: &str = "number,source,destination,tag,communicator,bytes,protocol,posted_ns,offered_ns,claimed_ns,moving_ns,landed_ns,done_ns,sender_call,receiver_call";

/// A line for each message.
pub fn csv(messages: &[Message]) -> String {
    let mut text = format!("{COLUMNS}\n");
    let show = |number: Option<u64>| number.map_or_else(String::new, |number| number.to_string());
    for (number, message) in messages.iter().enumerate() {
        let (sender, receiver) = (message.sender.as_ref(), message.receiver.as_ref());
        let end = receiver.or(sender);
        let cells = [
            number.to_string(),
            show(message.source.map(u64::from)),
            show(message.destination.map(u64::from)),
            message.tag.to_string(),
            format!("{:016x}", message.communicator),
            message.bytes.to_string(),
            message.protocol().to_owned(),
            show(receiver.and_then(Half::posted_ns)),
            show(sender.map(Half::at_ns)),
            show(receiver.map(Half::at_ns)),
            show(end.and_then(Half::moving_ns)),
            show(end.and_then(Half::landed_ns)),
            show(end.and_then(Half::done_ns)),
            show(sender.map(|half| half.call)),
            show(receiver.map(|half| half.call)),
        ];
        text += &cells.join(",");
        text.push('\n');
    }
    text
}
