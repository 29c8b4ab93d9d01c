//! The ledger of what messages use of the links, shared by the ranks of the node.
//!
//! Each rank writes what its own messages use, hop by hop, into its segment ([`crate::node::traffic`]), and
//! reads the rows of the others. It first writes what a message would take of idle links, then reads, then
//! plans with what it has read and writes that. So of two ranks that plan at the same moment at least one
//! knows of the other. If both do, each counts on its fair share.
//!
//! A rank that plans a moment before the others finds no trace of them. What it met while its message was
//! under way is remembered, from the bytes that the others had announced by its end, and counts for the next
//! message of the pair. So a program that repeats itself is known from its second round on.

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use parking_lot::Mutex;

use crate::cuda::Uuid;
use crate::model::BYTES_PER_US;
use crate::node::traffic::{Ends, Traffic, ROWS};
use crate::node::{Peer, Segment};
use crate::plan::{Occupancy, Plan, MAX_HOPS, MAX_PATHS};
use crate::topology::{Place, Topology};

/// How long a process that has messages under way is believed to be alive.
const ALIVE_FOR: Duration = Duration::from_millis(250);
/// No message moves more. A larger count means that somebody has written over it.
const BYTES_MAX: u64 = 1 << 48;

/// The hop between two places of a node, by a name that all ranks share.
pub(super) fn ends(uuids: &[Uuid], from: Place, to: Place) -> Ends {
    let gpu = |place: Place| match place {
        Place::Gpu(gpu) => uuids.get(usize::from(gpu)),
        Place::Host => None,
    };
    Ends::new(gpu(from), gpu(to))
}

/// Whose messages they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Who {
    /// Those that another rank leads.
    Rank(u32),
    /// Those of a pair of GPUs that this rank leads.
    Own(u8, u8),
}

/// A hop. What gives way to others on it is entered apart from what does not.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Hop {
    ends: Ends,
    yields: bool,
}

impl Hop {
    fn of(row: &Traffic) -> Hop {
        Hop {
            ends: row.ends,
            yields: row.yields,
        }
    }
}

/// Somebody's use of a hop.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Seen {
    who: Who,
    hop: Hop,
    flows: u32,
    gb_s: f64,
    /// Bytes so far.
    total: u64,
}

/// A plan's use of a hop.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Use {
    hop: Hop,
    gb_s: f64,
    bytes: u64,
}

/// The messages of one pair of GPUs. They follow each other over the same links, so several use as much as
/// one: what the latest plan says.
#[derive(Debug, Default)]
struct Pair {
    messages: u32,
    uses: Arc<[Use]>,
    /// Bytes so far, of each hop.
    totals: Vec<(Hop, u64)>,
    /// What others used while the latest message was under way.
    met: Vec<Seen>,
}

impl Pair {
    fn count(&mut self, uses: &[Use]) {
        for used in uses {
            match self.totals.iter_mut().find(|(hop, _)| *hop == used.hop) {
                Some((_, total)) => *total = total.wrapping_add(used.bytes),
                None => self.totals.push((used.hop, used.bytes)),
            }
        }
    }
}

#[derive(Default)]
struct Book {
    pairs: HashMap<(u8, u8), Pair>,
    /// What is published, row by row.
    rows: Vec<Traffic>,
    /// Reserve for further rows.
    spare: Vec<Traffic>,
    peers: Vec<Arc<Peer>>,
    alive: HashMap<u32, (Instant, bool)>,
}

type IsAlive = fn(&Peer) -> bool;

/// The ledger, as one rank sees it.
pub struct Ledger {
    segment: Option<Arc<Segment>>,
    is_alive: IsAlive,
    book: Mutex<Book>,
}

impl fmt::Debug for Ledger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let book = self.book.lock();
        f.debug_struct("Ledger").field("rows", &book.rows).finish()
    }
}

/// A message's entry in the ledger, until this is dropped.
#[must_use = "the links count as free again when this is dropped"]
#[derive(Debug)]
pub struct Reservation {
    ledger: Arc<Ledger>,
    pair: (u8, u8),
    /// Predicted time of the message, us.
    us: f64,
    /// What the others used when it began, and the bytes that they had moved by then.
    before: Vec<Seen>,
    /// The use that it has announced.
    announced: Arc<[Use]>,
    /// The use of others as found shortly before its end.
    met: Option<Vec<Seen>>,
    /// No message moves by it.
    is_withdrawn: bool,
}

impl Ledger {
    /// The ledger of a rank that publishes in this segment.
    pub(super) fn new(segment: Option<Arc<Segment>>, is_alive: IsAlive) -> Ledger {
        Ledger {
            segment,
            is_alive,
            book: Mutex::default(),
        }
    }

    /// The ranks of the node, except this one.
    pub(super) fn set_peers(&self, peers: Vec<Arc<Peer>>) {
        self.book.lock().peers = peers;
    }

    /// Publishes what a plan uses, then reads what others use.
    pub(super) fn reserve(
        self: &Arc<Ledger>,
        topology: &Topology,
        hops: &[Ends],
        plan: &Plan,
        uses: &Arc<[Use]>,
    ) -> (Reservation, Occupancy) {
        let pair = (plan.message.from, plan.message.to);
        let mut book = self.book.lock();
        let entry = book.pairs.entry(pair).or_default();
        entry.messages += 1;
        // The messages of a window mostly have the same plan: then all of it is published already.
        if entry.uses != *uses {
            entry.uses = Arc::clone(uses);
            self.publish(&mut book, &[]);
        }
        let seen = self.seen(&mut book, pair);
        let met = book.pairs.get(&pair).map_or(&[][..], |entry| &entry.met);
        let occupancy = occupancy(topology, hops, &seen, met);
        let reservation = Reservation {
            ledger: Arc::clone(self),
            pair,
            us: plan.predicted_us,
            before: seen,
            announced: Arc::default(),
            met: None,
            is_withdrawn: false,
        };
        (reservation, occupancy)
    }

    /// What everybody uses, except this pair of this rank.
    fn seen(&self, book: &mut Book, except: (u8, u8)) -> Vec<Seen> {
        let mut seen = Vec::with_capacity(16);
        for (pair, entry) in book.pairs.iter().filter(|(pair, _)| **pair != except) {
            seen.extend(entry.totals.iter().map(|(hop, total)| {
                let using = entry.uses.iter().find(|used| used.hop == *hop);
                Seen {
                    who: Who::Own(pair.0, pair.1),
                    hop: *hop,
                    flows: u32::from(using.is_some()),
                    gb_s: using.map_or(0.0, |used| used.gb_s),
                    total: *total,
                }
            }));
        }
        let Book { peers, alive, .. } = book;
        for peer in peers.iter() {
            let begin = seen.len();
            seen.extend(peer.traffic().traffic().map(|row| Seen {
                who: Who::Rank(peer.world_rank()),
                hop: Hop::of(&row),
                flows: row.flows,
                gb_s: f64::from(row.gb_s),
                total: row.total,
            }));
            let is_busy = seen[begin..].iter().any(|seen| seen.flows > 0);
            if is_busy && !self.is_alive(alive, peer) {
                seen.truncate(begin);
            }
        }
        seen
    }

    fn is_alive(&self, known: &mut HashMap<u32, (Instant, bool)>, peer: &Peer) -> bool {
        let rank = peer.world_rank();
        match known.get(&rank) {
            Some((_, false)) => false,
            Some((when, true)) if when.elapsed() < ALIVE_FOR => true,
            _ => {
                let alive = (self.is_alive)(peer);
                known.insert(rank, (Instant::now(), alive));
                alive
            }
        }
    }

    /// Brings the rows in shared memory up to date. The bytes of `begun` are those of a message that begins
    /// now.
    fn publish(&self, book: &mut Book, begun: &[Use]) {
        let mut rows = std::mem::take(&mut book.spare);
        rows.clear();
        rows.extend(book.rows.iter().map(|row| Traffic {
            flows: 0,
            gb_s: 0.0,
            ..*row
        }));
        for used in book.pairs.values().flat_map(|pair| &*pair.uses) {
            let known = rows.iter().position(|row| Hop::of(row) == used.hop);
            // If there is no fresh row, another hop takes an idle one.
            let idle = |row: &Traffic| row.flows == 0;
            let at = known
                .or((rows.len() < ROWS).then_some(rows.len()))
                .or_else(|| rows.iter().position(idle));
            let Some(at) = at else {
                // Too many hops at once: the others do not learn what these use.
                continue;
            };
            if known.is_none() {
                let fresh = Traffic {
                    ends: used.hop.ends,
                    yields: used.hop.yields,
                    flows: 0,
                    gb_s: 0.0,
                    total: 0,
                };
                if at == rows.len() {
                    rows.push(fresh);
                } else {
                    rows[at] = fresh;
                }
            }
            rows[at].flows += 1;
            rows[at].gb_s += used.gb_s as f32;
        }
        for used in begun {
            if let Some(row) = rows.iter_mut().find(|row| Hop::of(row) == used.hop) {
                row.total = row.total.wrapping_add(used.bytes);
            }
        }
        if let Some(segment) = &self.segment {
            for (at, row) in rows.iter().enumerate() {
                if book.rows.get(at) != Some(row) {
                    segment.write_traffic(at, row);
                }
            }
        }
        book.spare = std::mem::replace(&mut book.rows, rows);
    }
}

impl Reservation {
    /// Enters the plan that the message takes.
    pub(super) fn settle(&mut self, plan: &Plan, uses: Arc<[Use]>) {
        self.us = plan.predicted_us;
        let mut book = self.ledger.book.lock();
        if let Some(pair) = book.pairs.get_mut(&self.pair) {
            pair.count(&uses);
            pair.uses = Arc::clone(&uses);
        }
        self.ledger.publish(&mut book, &uses);
        self.announced = uses;
    }

    /// Looks at what others use, shortly before the message ends: at its end somebody waits for it, and lines
    /// that others have just written are slow to read. May be repeated.
    pub(super) fn look(&mut self) {
        let now = self.ledger.seen(&mut self.ledger.book.lock(), self.pair);
        self.met = Some(self.met_by(now));
    }

    /// The message takes another route: what others use meanwhile tells nothing about the next message.
    pub(super) fn withdraw(mut self) {
        self.is_withdrawn = true;
        let mut taken_back = self.announced.to_vec();
        for used in &mut taken_back {
            used.bytes = used.bytes.wrapping_neg();
        }
        let mut book = self.ledger.book.lock();
        if let Some(pair) = book.pairs.get_mut(&self.pair) {
            pair.count(&taken_back);
        }
        self.ledger.publish(&mut book, &taken_back);
    }

    /// What others have used since this was made, together with what they used then: whoever comes first now
    /// may come last the next time.
    fn met_by(&self, now: Vec<Seen>) -> Vec<Seen> {
        let used = |seen: Seen| {
            let before = self
                .before
                .iter()
                .find(|before| before.who == seen.who && before.hop == seen.hop);
            let bytes = seen
                .total
                .wrapping_sub(before.map_or(0, |before| before.total));
            let is_new = bytes > 0 && bytes < BYTES_MAX && self.us > 0.0;
            let new = is_new.then(|| Seen {
                flows: seen.flows.max(1),
                gb_s: bytes as f64 / (self.us * BYTES_PER_US),
                ..seen
            });
            new.or(before.copied().filter(|before| before.flows > 0))
        };
        now.into_iter().filter_map(used).collect()
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        if !self.is_withdrawn && self.met.is_none() {
            self.look();
        }
        let met = self.met.take().filter(|_| !self.is_withdrawn);
        let mut book = self.ledger.book.lock();
        if let Some(pair) = book.pairs.get_mut(&self.pair) {
            if let Some(met) = met {
                pair.met = met;
            }
            pair.messages -= 1;
            if pair.messages > 0 {
                // A pair uses what its latest plan says.
                return;
            }
            pair.uses = Arc::default();
        }
        self.ledger.publish(&mut book, &[]);
    }
}

/// What a plan uses of each hop while its messages move.
pub(super) fn uses(topology: &Topology, uuids: &[Uuid], plan: &Plan) -> Vec<Use> {
    let mut uses: Vec<Use> = Vec::with_capacity(MAX_PATHS * MAX_HOPS);
    for path in plan.paths() {
        let bytes = path.bytes as f64 * f64::from(plan.message.window);
        let gb_s = bytes / (plan.predicted_us * BYTES_PER_US);
        for places in path.path.places().windows(2) {
            if topology.hop(places[0], places[1]).is_none() {
                continue;
            }
            let hop = Hop {
                ends: ends(uuids, places[0], places[1]),
                yields: path.path.yields(topology),
            };
            match uses.iter_mut().find(|used| used.hop == hop) {
                Some(used) => {
                    used.gb_s += gb_s;
                    used.bytes += path.bytes;
                }
                None => uses.push(Use {
                    hop,
                    gb_s,
                    bytes: path.bytes,
                }),
            }
        }
    }
    uses
}

/// For each hop, the larger of what others use and what was met the last time.
fn occupancy(topology: &Topology, hops: &[Ends], seen: &[Seen], met: &[Seen]) -> Occupancy {
    let mut occupancy = Occupancy::free();
    let is_same = |a: &Seen, b: &Seen| a.who == b.who && a.hop == b.hop;
    if met.is_empty() && seen.iter().all(|seen| seen.flows == 0) {
        return occupancy;
    }
    let mut used: Vec<Seen> = seen.iter().filter(|seen| seen.flows > 0).copied().collect();
    for met in met {
        match used.iter_mut().find(|used| is_same(used, met)) {
            Some(used) => {
                used.gb_s = used.gb_s.max(met.gb_s);
                used.flows = used.flows.max(met.flows);
            }
            None => used.push(*met),
        }
    }
    if used.is_empty() {
        return occupancy;
    }
    for ((from, to, hop), ends) in topology.hops().zip(hops) {
        for used in used.iter().filter(|used| used.hop.ends == *ends) {
            let gb_s = coarse(used.gb_s);
            occupancy.add(hop.segments(), used.flows, gb_s, used.hop.yields);
            if from != Place::Host && to != Place::Host && !used.hop.yields {
                occupancy.add_copies(used.flows);
            }
        }
    }
    occupancy
}

/// Rounds a rate to a sixteenth of itself: plans that differ by less count as one plan.
fn coarse(gb_s: f64) -> f64 {
    const DROPPED: u32 = f32::MANTISSA_DIGITS - 1 - 4;
    let bits = (gb_s as f32).to_bits() + (1 << (DROPPED - 1));
    f64::from(f32::from_bits(bits & !((1 << DROPPED) - 1)))
}

#[cfg(test)]
#[path = "ledger_tests.rs"]
mod tests;
