//! What a trace shows that could be better, each with its evidence and what to try.

use std::collections::{BTreeMap, HashMap};

use anabranch_engine::stats::Reason;
use serde::Serialize;

use super::job::{Job, Place, Rank};
use super::links::Link;
use super::message::Message;

/// One finding.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// What is seen.
    pub what: String,
    /// By which numbers.
    pub evidence: String,
    /// What to try.
    pub try_this: String,
}

/// Messages of a finding, at least: a few may be by chance.
const MESSAGES_MIN: usize = 100;
/// Of the time that messages take, the part that makes waiting for a sender or a receiver worth a line.
const WAIT_SHARE: f64 = 0.25;
/// Messages up to this length are small, bytes, and this close one after the other they are a series, ns.
const SMALL_BYTES: u64 = 4096;
const SERIES_NS: u64 = 20_000;
/// Links that are busy for so much of the time from the first copy to the last carry bulk data.
const BUSY_SHARE: f64 = 0.3;
/// Messages from this length on can be split.
const SPLIT_BYTES: u64 = 2 << 20;

/// All findings about a job.
pub fn advice(job: &Job, links: &[Link]) -> Vec<Advice> {
    let mut all = Vec::new();
    not_carried(job, &mut all);
    late_ends(job, &mut all);
    small_in_series(job, &mut all);
    one_path_only(job, links, &mut all);
    wrong_numa(job, links, &mut all);
    under_way(job, &mut all);
    all
}

/// What to try against a reason, which another version may have and this one not.
fn remedy(reason: &str) -> String {
    let known = Reason::ALL.iter().find(|known| known.name() == reason);
    known.map_or_else(|| "anabranch doctor".into(), |known| known.advice().into())
}

fn not_carried(job: &Job, all: &mut Vec<Advice>) {
    let mut by_reason: BTreeMap<&str, (u64, u64)> = BTreeMap::new();
    for rank in &job.ranks {
        for fallback in &rank.fallbacks {
            let name = rank.header.reasons.get(usize::from(fallback.reason));
            let row = by_reason
                .entry(name.map_or("unknown", String::as_str))
                .or_default();
            *row = (row.0 + 1, row.1.saturating_add(fallback.bytes));
        }
    }
    for (reason, (messages, bytes)) in by_reason {
        all.push(Advice {
            what: format!("sends of device buffers were left to the MPI library: {reason}"),
            evidence: format!("{messages} messages, {bytes} bytes"),
            try_this: remedy(reason),
        });
    }
}

/// Messages, their time from the first end to the arrival, and the part before the other end came, ns.
type Waits = (usize, u64, u64);
/// Source, destination, and whether the sender was the later one.
type Late = (u32, u32, bool);
type Pairs = HashMap<Late, Waits>;

/// The pair whose messages waited longest for one end, if that was much of their time. Two that wait for each other in turns, as
/// in a ping-pong, wait by their nature.
fn latest(pairs: &Pairs, is_sender: bool) -> Option<((u32, u32), Waits)> {
    let of_end = pairs.iter().filter(|((.., late), _)| *late == is_sender);
    let is_much = |(_, (messages, time, waited)): &(_, &Waits)| {
        *messages >= MESSAGES_MIN && *waited as f64 >= WAIT_SHARE * (*time).max(1) as f64
    };
    let is_one_way = |((source, destination, _), (.., waited)): &(&Late, &Waits)| {
        let back = pairs.get(&(*destination, *source, is_sender));
        back.is_none_or(|(.., back)| *back < *waited / 2)
    };
    let worst = of_end.filter(is_much).filter(is_one_way);
    let worst = worst.max_by_key(|(_, (.., waited))| *waited)?;
    let ((source, destination, _), numbers) = worst;
    Some(((*source, *destination), *numbers))
}

/// Which end messages waited for, if that was much of their time.
fn late_ends(job: &Job, all: &mut Vec<Advice>) {
    let mut pairs = Pairs::new();
    for message in &job.messages {
        let (Some(source), Some(destination)) = (message.source, message.destination) else {
            continue;
        };
        let (Some(sender), Some(receiver)) = (&message.sender, &message.receiver) else {
            continue;
        };
        let (offered, posted) = (sender.begin_ns(), receiver.begin_ns());
        let Some(end) = receiver.landed_ns().or(receiver.done_ns()) else {
            continue;
        };
        let (begin, is_sender_late) = (offered.min(posted), posted < offered);
        let row = pairs
            .entry((source, destination, is_sender_late))
            .or_default();
        row.0 += 1;
        row.1 = row.1.saturating_add(end.saturating_sub(begin));
        row.2 = row.2.saturating_add(offered.abs_diff(posted));
    }
    for is_sender in [true, false] {
        let worst = latest(&pairs, is_sender).filter(|_| !job.ranks.iter().any(is_simulated));
        let Some(((source, destination), (messages, time, waited))) = worst else {
            continue;
        };
        let share = waited as f64 / time.max(1) as f64;
        let (late, early, of) = match is_sender {
            true => ("sender", "receiver", source),
            false => ("receiver", "sender", destination),
        };
        all.push(Advice {
            what: format!(
                "the {late} comes late: rank {of}, in messages from rank {source} to {destination}"
            ),
            evidence: format!(
                "in {messages} messages the {early} waited {:.3} ms, {:.0} % of their time",
                waited as f64 * 1e-6,
                share * 100.0
            ),
            try_this: match is_sender {
                true => format!("balance the work of rank {of}, or send earlier"),
                false => {
                    format!("post the receives of rank {of} earlier (MPI_Irecv before the work)")
                }
            },
        });
    }
}

/// Clocks of simulated ranks differ by what each has done.
fn is_simulated(rank: &Rank) -> bool {
    rank.header.is_simulated
}

fn small_in_series(job: &Job, all: &mut Vec<Advice>) {
    let mut last: HashMap<(u32, u32), u64> = HashMap::new();
    let mut series: BTreeMap<(u32, u32), (usize, u64)> = BTreeMap::new();
    // They are in the order of their beginnings.
    for message in job
        .messages
        .iter()
        .filter(|message| message.sender.is_some())
    {
        let (Some(source), Some(destination)) = (message.source, message.destination) else {
            continue;
        };
        if message.bytes > SMALL_BYTES {
            last.remove(&(source, destination));
            continue;
        }
        let begin = message.begin_ns();
        let before = last.insert((source, destination), begin);
        if before.is_some_and(|before| begin.saturating_sub(before) < SERIES_NS) {
            let row = series.entry((source, destination)).or_default();
            *row = (row.0 + 1, row.1.saturating_add(message.bytes));
        }
    }
    // An answer in between makes it an exchange, not a series.
    let answered: Vec<(u32, u32)> = series.keys().copied().collect();
    series.retain(|(from, to), (count, _)| {
        *count >= MESSAGES_MIN && !answered.contains(&(*to, *from))
    });
    let most = series.iter().max_by_key(|(_, (count, _))| *count);
    if let Some(((from, to), (count, bytes))) = most {
        all.push(Advice {
            what: format!("small messages in series from rank {from} to rank {to}"),
            evidence: format!(
                "{count} messages of {:.0} bytes on average followed the one before within {} us",
                *bytes as f64 / *count as f64,
                SERIES_NS / 1000
            ),
            try_this: "gather them in one buffer and send it once".into(),
        });
    }
}

/// A link between GPUs that carries all of long messages while no other path has carried any.
fn one_path_only(job: &Job, links: &[Link], all: &mut Vec<Advice>) {
    let launched = job.copies.first().map_or(0, |copy| copy.launched_ns);
    let over = job.copies.iter().map(|copy| copy.end_ns).max().unwrap_or(0);
    let span_ms = (over.saturating_sub(launched).max(1)) as f64 * 1e-6;
    let is_gpu = |place: usize| !job.places[place].uuid.is_empty();
    for link in links
        .iter()
        .filter(|link| is_gpu(link.from) && is_gpu(link.to))
    {
        let is_busy = link.busy_ms >= BUSY_SHARE * span_ms;
        if link.path != "direct" || link.from == link.to || !is_busy {
            continue;
        }
        let long = job.copies.iter().filter(|copy| {
            (copy.from, copy.to, copy.path) == (link.from, link.to, "direct")
                && copy.bytes >= SPLIT_BYTES
        });
        let long = long.count();
        let others = links.iter().filter(|other| other.path != "direct");
        let mut others = others.filter(|other| other.from == link.from || other.to == link.to);
        if long < 10 || others.next().is_some() {
            continue;
        }
        let paths = job
            .ranks
            .iter()
            .find_map(|rank| rank.header.options.get("ANABRANCH_PATHS"));
        let name = |place: usize| &job.places[place].name;
        all.push(Advice {
            what: format!(
                "the link from {} to {} carries all, and no other path any",
                name(link.from),
                name(link.to)
            ),
            evidence: format!(
                "{long} copies of 2 MiB and more, busy {:.0} % of the time from the first copy to the last, {:.1} GB/s",
                link.busy_ms * 100.0 / span_ms,
                link.gb_s
            ),
            try_this: match paths {
                Some(paths) => format!("unset ANABRANCH_PATHS, which is {paths}"),
                None => {
                    "anabranch plan tells what other paths would bring; ANABRANCH_PATHS names them"
                        .into()
                }
            },
        });
    }
}

/// A rank whose processors are near another memory than its GPU.
fn wrong_numa(job: &Job, links: &[Link], all: &mut Vec<Advice>) {
    for rank in &job.ranks {
        let (host, number) = (&rank.header.host, rank.header.rank);
        let near = &rank.header.numa;
        if near.is_empty() {
            continue;
        }
        let own = job.copies.iter().filter(|copy| copy.rank == number);
        let mut bytes: BTreeMap<usize, u64> = BTreeMap::new();
        for copy in own {
            let row = bytes.entry(copy.to).or_default();
            *row = row.saturating_add(copy.bytes);
        }
        let gpus = bytes.iter().filter(|(place, _)| {
            let place: &Place = &job.places[**place];
            place.host == *host && place.numa >= 0 && !place.uuid.is_empty()
        });
        let Some((place, bytes)) = gpus.max_by_key(|(_, bytes)| **bytes) else {
            continue;
        };
        let gpu = &job.places[*place];
        if near.contains(&gpu.numa) {
            continue;
        }
        let through_host = links.iter().any(|link| link.path == "host");
        all.push(Advice {
            what: format!("rank {number} runs far from its GPU"),
            evidence: format!(
                "its processors are on NUMA node {near:?}, {} on node {}; it copied {bytes} bytes there{}",
                gpu.name,
                gpu.numa,
                if through_host { ", and bytes go through host memory" } else { "" }
            ),
            try_this: "bind each rank to processors near its GPU (anabranch topo shows which; mpirun --map-by numa)"
                .into(),
        });
    }
}

/// Messages that were under way when their process ended.
fn under_way(job: &Job, all: &mut Vec<Advice>) {
    let is_open = |message: &&Message| {
        let mut halves = [&message.sender, &message.receiver].into_iter().flatten();
        halves.any(|half| half.is_under_way())
    };
    let mut open = job.messages.iter().filter(is_open).peekable();
    let Some(first) = open.peek() else { return };
    let rank = |rank: Option<u32>| rank.map_or_else(|| "?".into(), |rank| rank.to_string());
    let half = first.sender.as_ref().or(first.receiver.as_ref());
    let evidence = format!(
        "the first is message {}, from rank {} to {}, tag {}, {} bytes: {}",
        first.number,
        rank(first.source),
        rank(first.destination),
        first.tag,
        first.bytes,
        half.map_or("?", |half| half.state())
    );
    all.push(Advice {
        what: format!("{} messages were under way at the end", open.count()),
        evidence,
        try_this:
            "look at the last calls of both ranks: --message with its number shows what is known"
                .into(),
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_one_sided_waits_are_told() {
        let late = |rows: &[(Late, Waits)]| {
            let pairs: Pairs = rows.iter().copied().collect();
            latest(&pairs, true).map(|(ranks, _)| ranks)
        };
        let much = (200, 1000, 600);
        assert_eq!(late(&[((0, 1, true), much)]), Some((0, 1)));
        // The other end, too few, too short, and a ping-pong.
        assert_eq!(late(&[((0, 1, false), much)]), None);
        assert_eq!(late(&[((0, 1, true), (20, 1000, 600))]), None);
        assert_eq!(late(&[((0, 1, true), (200, 1000, 100))]), None);
        assert_eq!(
            late(&[((0, 1, true), much), ((1, 0, true), (200, 1000, 500))]),
            None
        );
        assert_eq!(
            late(&[((0, 1, true), much), ((1, 0, true), (200, 1000, 200))]),
            Some((0, 1))
        );
    }
}
