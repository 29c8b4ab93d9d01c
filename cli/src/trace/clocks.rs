//! Clocks of several hosts, brought together by what their ranks told each other: no message ends before it is sent, and no
//! rank leaves a collective before all have entered it. Nothing is sent for it; the clocks of the day are where it begins.
//!
//! The offset of a host's clock is a line over time, between an upper and a lower bound at each message. Of all lines that
//! keep all bounds, one with the widest margin is taken; the others say how wrong it can be.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::read::{Clock, Read};

/// Clocks of machines that are set by a network run apart by less: half a millisecond in a second.
const DRIFT_MAX: f64 = 500e-6;
/// Bounds are kept for so many spans of time.
const SPANS: usize = 200;
/// Halvings of a range of slopes.
const STEPS: usize = 100;
/// Slopes by which it is told how wrong the chosen line can be.
const SLOPES: usize = 200;

/// All ranks enter before any leaves, if there are any bytes.
const TOGETHER: [&str; 5] = [
    "MPI_Allreduce",
    "MPI_Allgather",
    "MPI_Alltoall",
    "MPI_Reduce_scatter",
    "MPI_Reduce_scatter_block",
];
/// A message leaves while they run, or later.
const SENDS: [&str; 5] = [
    "MPI_Send",
    "MPI_Ssend",
    "MPI_Rsend",
    "MPI_Isend",
    "MPI_Issend",
];
/// A message has come when it returns.
const RECEIVE: &str = "MPI_Recv";
/// It takes a message, too, and nothing says when that came.
const TAKE: &str = "MPI_Irecv";
/// With these, which receive takes which message is not known from the calls.
const UNCLEAR: [&str; 12] = [
    "MPI_Sendrecv",
    "MPI_Sendrecv_replace",
    "MPI_Isendrecv",
    "MPI_Isendrecv_replace",
    "MPI_Bsend",
    "MPI_Ibsend",
    "MPI_Irsend",
    "MPI_Mrecv",
    "MPI_Imrecv",
    "MPI_Recv_init",
    "MPI_Send_init",
    "MPI_Cancel",
];

/// How far a host's clock is ahead of the first host's: `at_begin` at `begin`, and so much more for each ns after.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Offset {
    begin: f64,
    at_begin: f64,
    drift: f64,
    /// It is wrong by so much at most, ns.
    error: f64,
}

impl Offset {
    const NONE: Offset = Offset {
        begin: 0.0,
        at_begin: 0.0,
        drift: 0.0,
        error: 0.0,
    };

    fn at(&self, time: f64) -> f64 {
        self.at_begin + self.drift * (time - self.begin)
    }

    /// What makes times of this host those of the first one.
    fn clock(&self) -> Clock {
        let begin = self.begin as u64;
        let ahead = self.at(begin as f64).round() as i64;
        Clock::at_rate(begin, begin.saturating_add_signed(-ahead), 1.0 - self.drift)
    }
}

/// What is known of the offset between two hosts: times of the second one, and how far it is ahead of the first at most and at
/// least, ns.
#[derive(Default)]
pub struct Bounds {
    upper: Vec<(f64, f64)>,
    lower: Vec<(f64, f64)>,
}

/// The tightest bounds of each span of time, from the first one on.
struct Tightest {
    upper: Vec<(f64, f64)>,
    lower: Vec<(f64, f64)>,
    begin: f64,
    span: f64,
}

impl Tightest {
    /// The lines of one slope that keep all bounds: from where to where they begin. Where the first is above the second there are none.
    fn lines(&self, slope: f64) -> (f64, f64) {
        let least = self.lower.iter().map(|(at, bound)| bound - slope * at);
        let most = self.upper.iter().map(|(at, bound)| bound - slope * at);
        (
            least.fold(f64::MIN, f64::max),
            most.fold(f64::MAX, f64::min),
        )
    }

    fn margin(&self, slope: f64) -> f64 {
        let (least, most) = self.lines(slope);
        most - least
    }

    /// The slope with the widest margin, which has one maximum.
    fn widest(&self) -> f64 {
        let (mut from, mut to) = (-DRIFT_MAX, DRIFT_MAX);
        for _ in 0..STEPS {
            let third = (to - from) / 3.0;
            if self.margin(from + third) < self.margin(to - third) {
                from += third;
            } else {
                to -= third;
            }
        }
        f64::midpoint(from, to)
    }

    /// Where the margin is as wide as this, from `inside`, where it is, towards `outside`.
    fn border(&self, margin: f64, inside: f64, outside: f64) -> f64 {
        if self.margin(outside) >= margin {
            return outside;
        }
        let (mut inside, mut outside) = (inside, outside);
        for _ in 0..STEPS {
            let middle = f64::midpoint(inside, outside);
            match self.margin(middle) >= margin {
                true => inside = middle,
                false => outside = middle,
            }
        }
        inside
    }

    fn range(&self, margin: f64, inside: f64) -> [f64; 2] {
        [-DRIFT_MAX, DRIFT_MAX].map(|outside| self.border(margin, inside, outside))
    }
}

impl Bounds {
    fn tightest(&self) -> Option<Tightest> {
        let times = self.upper.iter().chain(&self.lower).map(|bound| bound.0);
        let (begin, end) = times.fold((f64::MAX, f64::MIN), |(begin, end), at| {
            (begin.min(at), end.max(at))
        });
        let kept = |bounds: &[(f64, f64)], is_upper: bool| -> Vec<(f64, f64)> {
            let mut kept: BTreeMap<usize, (f64, f64)> = BTreeMap::new();
            for (at, bound) in bounds {
                let span = (at - begin) / (end - begin).max(1.0) * SPANS as f64;
                let place = kept.entry(span as usize).or_insert((at - begin, *bound));
                if (*bound < place.1) == is_upper {
                    *place = (at - begin, *bound);
                }
            }
            kept.into_values().collect()
        };
        let (upper, lower) = (kept(&self.upper, true), kept(&self.lower, false));
        let is_bounded = !upper.is_empty() && !lower.is_empty();
        is_bounded.then_some(Tightest {
            upper,
            lower,
            begin,
            span: end - begin,
        })
    }

    /// The line, if there are bounds of both kinds and a line keeps them all.
    fn line(&self) -> Option<Offset> {
        let bounds = self.tightest()?;
        let widest = bounds.widest();
        let margin = bounds.margin(widest);
        if margin < 0.0 {
            return None;
        }
        // A short time says little of the slope: then it is that of even clocks.
        let [from, to] = bounds.range(0.9 * margin, widest);
        let slope = 0.0_f64.clamp(from, to);
        let (least, most) = bounds.lines(slope);
        let at_begin = f64::midpoint(least, most);
        let [from, to] = bounds.range(0.0, widest);
        let mut error: f64 = 0.0;
        for step in 0..=SLOPES {
            let other = from + (to - from) * step as f64 / SLOPES as f64;
            let (least, most) = bounds.lines(other);
            for at in [0.0, bounds.span] {
                let chosen = at_begin + slope * at;
                let (low, high) = (least + other * at, most + other * at);
                error = error.max(chosen - low).max(high - chosen);
            }
        }
        Some(Offset {
            begin: bounds.begin,
            at_begin,
            drift: slope,
            error,
        })
    }
}

/// A call, and how it can bound.
struct Seen<'a> {
    function: &'a str,
    begin: u64,
    end: u64,
    comm: u64,
    peer: i32,
    tag: i32,
    bytes: u64,
}

/// Calls of a rank in the order in which they were made; none where some were lost, as they are counted.
fn seen(read: &Read) -> Vec<Seen<'_>> {
    let rank = &read.rank;
    if rank.end.is_some_and(|end| end.dropped > 0) || rank.torn > 0 {
        return Vec::new();
    }
    let mut calls: Vec<Seen> = rank
        .calls
        .iter()
        .filter(|call| call.times == 1 && call.comm != 0)
        .map(|call| Seen {
            function: rank.function(call).trim_end_matches("_c"),
            begin: call.begin,
            end: call.end,
            comm: call.comm,
            peer: call.peer,
            tag: call.tag,
            bytes: call.bytes,
        })
        .collect();
    calls.sort_by_key(|call| call.begin);
    calls
}

/// Begins and ends of the same collectives on all ranks: by communicator and function, then by rank.
type Collectives<'a> = BTreeMap<(u64, &'a str), BTreeMap<usize, Vec<(u64, u64)>>>;
/// Sends and receives of one source, destination, communicator and tag, in order.
type Streams = HashMap<(u32, u32, u64, i32), (Vec<u64>, Vec<Option<u64>>)>;

/// Bounds between hosts, by their numbers, the smaller first.
fn bounds(read: &[Read], hosts: &[usize]) -> BTreeMap<(usize, usize), Bounds> {
    let mut found: BTreeMap<(usize, usize), Bounds> = BTreeMap::new();
    // It was `begin` on the one when it was not yet `end` on the other.
    let mut add = |(one, begin): (usize, u64), (other, end): (usize, u64)| {
        let (first, second) = (hosts[one], hosts[other]);
        // As whole numbers: since 1970 there are more nanoseconds than a float tells apart.
        let ahead = end.wrapping_sub(begin) as i64 as f64;
        match first.cmp(&second) {
            std::cmp::Ordering::Equal => {}
            std::cmp::Ordering::Less => {
                let bounds = found.entry((first, second)).or_default();
                bounds.upper.push((end as f64, ahead));
            }
            std::cmp::Ordering::Greater => {
                let bounds = found.entry((second, first)).or_default();
                bounds.lower.push((begin as f64, -ahead));
            }
        }
    };
    let mut collectives: Collectives = BTreeMap::new();
    let mut streams: Streams = HashMap::new();
    let mut unclear: BTreeSet<(u32, u64)> = BTreeSet::new();
    let calls: Vec<Vec<Seen>> = read.iter().map(seen).collect();
    for (at, calls) in calls.iter().enumerate() {
        let own = read[at].rank.header.rank;
        for call in calls {
            let name = call.function;
            let is_together = TOGETHER.contains(&name) && call.bytes > 0;
            if is_together || name == "MPI_Barrier" {
                let of_all = collectives.entry((call.comm, name)).or_default();
                of_all.entry(at).or_default().push((call.begin, call.end));
            }
            let takes = name == RECEIVE || name == TAKE;
            if UNCLEAR.contains(&name) || (takes && (call.peer < 0 || call.tag < 0)) {
                unclear.insert((own, call.comm));
            }
            let Ok(peer) = u32::try_from(call.peer) else {
                continue;
            };
            if SENDS.contains(&name) {
                let stream = streams.entry((own, peer, call.comm, call.tag));
                stream.or_default().0.push(call.begin);
            } else if takes {
                let end = (name == RECEIVE).then_some(call.end);
                let stream = streams.entry((peer, own, call.comm, call.tag));
                stream.or_default().1.push(end);
            }
        }
    }
    for of_all in collectives.values() {
        // Of a communicator of the same name elsewhere there may be another number of calls.
        let counts: BTreeSet<usize> = of_all.values().map(Vec::len).collect();
        if counts.len() != 1 {
            continue;
        }
        for (one, calls) in of_all {
            for (other, others) in of_all {
                for ((begin, _), (_, end)) in calls.iter().zip(others) {
                    add((*one, *begin), (*other, *end));
                }
            }
        }
    }
    let place: HashMap<u32, usize> = read
        .iter()
        .enumerate()
        .map(|(at, read)| (read.rank.header.rank, at))
        .collect();
    for ((source, destination, comm, _), (sent, received)) in &streams {
        let ends = [source, destination].map(|rank| place.get(rank).copied());
        let is_clear = [source, destination]
            .iter()
            .all(|rank| !unclear.contains(&(**rank, *comm)));
        if let ([Some(from), Some(to)], true) = (ends, is_clear && sent.len() == received.len()) {
            for (begin, end) in sent.iter().zip(received) {
                if let Some(end) = end {
                    add((from, *begin), (to, *end));
                }
            }
        }
    }
    found
}

/// Brings the clocks of hosts together, and says how well that can be done. Times are those of the day before.
pub fn bring_together(read: &mut [Read]) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    let mut hosts = Vec::new();
    for one in read.iter() {
        let host = &one.rank.header.host;
        let known = names.iter().position(|name| name == host);
        hosts.push(known.unwrap_or_else(|| {
            names.push(host.clone());
            names.len() - 1
        }));
    }
    let found = bounds(read, &hosts);
    let mut notes = Vec::new();
    let mut offsets = vec![None; names.len()];
    offsets[0] = Some(Offset::NONE);
    for host in 1..names.len() {
        // Against the hosts before, whose clocks are known by then: the one with which it is known best.
        let with = (0..host).filter_map(|other| {
            let known: Offset = offsets[other]?;
            let line = found.get(&(other, host))?.line()?;
            Some((other, known, line))
        });
        let best = with.min_by(|one, other| {
            (one.1.error + one.2.error).total_cmp(&(other.1.error + other.2.error))
        });
        offsets[host] = best.map(|(_, known, line)| Offset {
            begin: line.begin,
            at_begin: line.at_begin + known.at(line.begin),
            drift: line.drift + known.drift,
            error: line.error + known.error,
        });
        notes.push(match offsets[host] {
            Some(offset) => format!(
                "the clock of {} was {:.1} us {} that of {} and gained {:.2} us a second; between them times are right to {:.1} us, by the messages of both",
                names[host],
                offset.at_begin.abs() * 1e-3,
                if offset.at_begin < 0.0 { "behind" } else { "ahead of" },
                names[0],
                offset.drift * 1e6,
                offset.error * 1e-3
            ),
            None => format!(
                "times of {} are brought together with those of {} by their clocks of the day, and are as right as these: no messages both ways say more",
                names[host], names[0]
            ),
        });
    }
    for (one, host) in read.iter_mut().zip(&hosts) {
        if let Some(offset) = offsets[*host].filter(|offset| *offset != Offset::NONE) {
            one.set_clock(&offset.clock());
        }
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bounds as messages of a random delay make them, when the second clock is ahead by a line.
    fn made(line: impl Fn(f64) -> f64, count: usize, delay: f64) -> Bounds {
        let mut seed = 7_u64;
        let mut random = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) as f64 / f64::from(1_u32 << 31)
        };
        let mut bounds = Bounds::default();
        for at in 0..count {
            let time = at as f64 * 1e7;
            bounds
                .upper
                .push((time, line(time) + delay * (1.0 + 9.0 * random())));
            bounds
                .lower
                .push((time, line(time) - delay * (1.0 + 9.0 * random())));
        }
        bounds
    }

    #[test]
    fn a_line_between_bounds_is_found_and_its_error_told() {
        for (ahead, drift) in [(5e9, 0.0), (-3e6, 80e-6), (12_345.0, -499e-6), (0.0, 1e-9)] {
            for count in [1, 2, 50, 5_000] {
                let truth = |time: f64| ahead + drift * time;
                let found = made(truth, count, 2_000.0).line().expect("a line");
                let end = (count - 1) as f64 * 1e7;
                for at in [0.0, end / 2.0, end] {
                    let wrong = (found.at(at) - truth(at)).abs();
                    assert!(
                        wrong <= found.error + 1.0,
                        "{ahead} {drift} {count} at {at}: {wrong}, {found:?}"
                    );
                }
                // Delays are 20 us at most; with many messages some are short both ways.
                let most = if count >= 50 { 10_000.0 } else { 100_000.0 };
                assert!(found.error < most, "{count}: {found:?}");
            }
        }
    }

    #[test]
    fn what_cannot_be_is_no_line() {
        let both = |upper: &[(f64, f64)], lower: &[(f64, f64)]| Bounds {
            upper: upper.to_vec(),
            lower: lower.to_vec(),
        };
        assert_eq!(both(&[(0.0, 1.0)], &[]).line(), None);
        assert_eq!(both(&[], &[(0.0, 1.0)]).line(), None);
        assert_eq!(both(&[(0.0, 1.0)], &[(0.0, 2.0)]).line(), None);
        // A clock that was set while the job ran.
        let upper = [(0.0, 10.0), (1e9, 10.0), (2e9, 1e9)];
        let lower = [(0.0, -10.0), (1e9, -10.0), (2e9, 1e9 - 20.0)];
        assert_eq!(both(&upper, &lower).line(), None);
    }
}
