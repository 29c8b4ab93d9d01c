//! At what rate paths move bytes where segments are shared, by each other and with what else is under way.
//!
//! Hardware divides a segment among those who use it. That is taken to be max-min fair: nobody gets more by taking from
//! someone who has less. What other messages use is told by an [`Occupancy`].

use super::paths::{Candidate, SegmentSet, MAX_HOPS};
use super::MAX_PATHS;
use crate::model::BYTES_PER_US;
use crate::topology::Topology;

/// Transfers that use one segment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(
    any(test, feature = "golden"),
    derive(serde::Serialize, serde::Deserialize)
)]
pub struct Load {
    /// How many.
    pub flows: u32,
    /// What they would take of it together if nobody else were there, GB/s.
    pub gb_s: f64,
}

/// What other transfers use of one segment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(
    any(test, feature = "golden"),
    derive(serde::Serialize, serde::Deserialize)
)]
struct Loads {
    /// Direct copies, and what takes the place of one between two GPUs that have no link.
    firm: Load,
    /// Those that give way to these: by way of staging beside a direct copy.
    yielding: Load,
}

/// What other transfers use of each segment.
#[derive(Clone, Debug, Default, PartialEq)]
#[cfg_attr(
    any(test, feature = "golden"),
    derive(serde::Serialize, serde::Deserialize)
)]
pub struct Occupancy {
    loads: Vec<Loads>,
    busy: SegmentSet,
    /// Something is under way on segments that do not matter, see [`Occupancy::on`].
    is_elsewhere: bool,
    /// How many direct copies there are between GPUs, wherever they run.
    copies: u32,
}

/// Rates by their bits: what is equal hashes alike, as none of them is negative.
impl std::hash::Hash for Occupancy {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        for load in &self.loads {
            for load in [load.firm, load.yielding] {
                (load.flows, load.gb_s.to_bits()).hash(state);
            }
        }
        (self.copies, self.is_elsewhere).hash(state);
    }
}

impl Occupancy {
    /// Nothing is under way.
    #[must_use]
    pub fn free() -> Occupancy {
        Occupancy::default()
    }

    /// Adds transfers that run through `segments` (indices into [`Topology::segments`]) and would take `gb_s` together.
    /// They `yield` to others if they go by staging between two GPUs that have a link.
    pub fn add(&mut self, segments: &[u16], flows: u32, gb_s: f64, yields: bool) {
        for &segment in segments {
            let at = usize::from(segment);
            if self.loads.len() <= at {
                self.loads.resize(at + 1, Loads::default());
            }
            let load = if yields {
                &mut self.loads[at].yielding
            } else {
                &mut self.loads[at].firm
            };
            load.flows = load.flows.saturating_add(flows);
            load.gb_s += gb_s;
            self.busy.insert(segment);
        }
    }

    /// Adds direct copies between two GPUs. What they use of segments is added apart.
    pub fn add_copies(&mut self, copies: u32) {
        self.copies = self.copies.saturating_add(copies);
    }

    /// What plans over these segments depend on: of all others, whether anything is under way there. What differs elsewhere only is one
    /// question, with one answer.
    pub(crate) fn on(mut self, segments: &SegmentSet) -> Occupancy {
        let matters = |at: usize| u16::try_from(at).is_ok_and(|at| segments.contains(at));
        for (at, loads) in self.loads.iter_mut().enumerate() {
            if !matters(at) {
                *loads = Loads::default();
            }
        }
        let is_used = |loads: &Loads| *loads != Loads::default();
        let used = self.loads.iter().rposition(is_used);
        self.loads.truncate(used.map_or(0, |last| last + 1));
        let busy = self.busy.common(segments);
        self.is_elsewhere |= busy != self.busy;
        self.busy = busy;
        self
    }

    /// How many direct copies others make between GPUs of the node.
    #[must_use]
    pub fn copies(&self) -> u32 {
        self.copies
    }

    /// Adds what a plan uses while it runs.
    pub fn add_plan(&mut self, topology: &Topology, plan: &super::Plan) {
        for path in plan.paths() {
            let bytes = path.bytes as f64 * f64::from(plan.message.window);
            let gb_s = bytes / (plan.predicted_us * BYTES_PER_US);
            let yields = path.path.yields(topology);
            for ends in path.path.places().windows(2) {
                if let Some(hop) = topology.hop(ends[0], ends[1]) {
                    self.add(hop.segments(), 1, gb_s, yields);
                }
            }
        }
    }

    /// How many transfers of others use one of these segments, at most.
    pub(crate) fn flows(&self, segments: &SegmentSet) -> u32 {
        let busy = self.busy.common(segments).iter();
        let flows = busy.map(|segment| {
            let loads = self.of(segment);
            loads.firm.flows.saturating_add(loads.yielding.flows)
        });
        flows.max().unwrap_or(0)
    }

    /// Whether nothing is under way.
    #[must_use]
    pub fn is_free(&self) -> bool {
        self.busy.is_empty() && !self.is_elsewhere
    }

    /// What others use of a segment.
    fn of(&self, segment: u16) -> Loads {
        self.loads
            .get(usize::from(segment))
            .copied()
            .unwrap_or_default()
    }
}

/// Segments of which a half is left to what comes back. If the first that plans took all, what comes back would find too little to be worth
/// it, and both would take as long as that: two H200s both ways, windows of 16 of 16 MiB, 0.974 of one path, and 1.000 so.
pub(crate) struct Evenly<'a> {
    /// Which.
    pub segments: &'a SegmentSet,
    /// It is left also where one other is seen to use them and wants less: who finds that its part was late wants less the next time,
    /// and would be late again with what the other then takes. Of windows those behind a message use what it leaves.
    pub where_used: bool,
}

impl Evenly<'_> {
    fn contains(&self, segment: u16, flows: u32) -> bool {
        (flows == 0 || (flows == 1 && self.where_used)) && self.segments.contains(segment)
    }
}

/// Rates of each hop of each path, bytes a microsecond.
pub(crate) type Rates = [[f64; MAX_HOPS]; MAX_PATHS];

/// Rates of the hops of `paths` while all of them move bytes.
///
/// What yields has only what the others leave that do not, and these do not count with it: a chunk takes two links or
/// more on its way, and where each rank took its part of the others' links for such chunks, all had less.
///
/// See [`Evenly`] for those that what comes back uses, too.
pub(crate) fn rates(
    paths: &[&Candidate],
    capacities: &[f64],
    occupancy: &Occupancy,
    evenly: &Evenly<'_>,
) -> Rates {
    let mut rates = [[0.0; MAX_HOPS]; MAX_PATHS];
    let mut used = SegmentSet::default();
    let mut shared = SegmentSet::default();
    for (of_hops, path) in rates.iter_mut().zip(paths) {
        for (rate, leg) in of_hops.iter_mut().zip(path.legs()) {
            *rate = leg.rate();
        }
        shared = shared.with(&used.common(&path.segments));
        used = used.with(&path.segments);
    }
    let contended = shared.with(&used.common(&occupancy.busy.with(evenly.segments)));
    if contended.is_empty() {
        return rates;
    }
    let own = fair_shares(paths, &shared, capacities);
    for segment in contended.iter() {
        let at = usize::from(segment);
        let mut load = 0.0;
        let mut count = 0.0;
        let mut all_yield = true;
        for (path, own) in paths.iter().zip(&own) {
            if path.segments.contains(segment) {
                load += own;
                count += 1.0;
                all_yield &= path.yields;
            }
        }
        // What others leave: all that they do not want, or as much for each of ours as for each of theirs.
        let others = occupancy.of(segment);
        let (capacity, others) = if all_yield {
            let firm = others.firm.gb_s * BYTES_PER_US;
            ((capacities[at] - firm).max(0.0), others.yielding)
        } else {
            (capacities[at], others.firm)
        };
        let by_want = capacity - others.gb_s * BYTES_PER_US;
        let by_count = capacity * count / (count + f64::from(others.flows));
        let is_even = all_yield && evenly.contains(segment, others.flows);
        let left = match is_even {
            true => capacity / 2.0,
            false => by_want.max(by_count).min(capacity),
        };
        let (scale, spare) = if left < load {
            (left / load, 0.0)
        } else {
            (1.0, left - load)
        };
        for ((of_hops, path), own) in rates.iter_mut().zip(paths).zip(&own) {
            for (rate, leg) in of_hops.iter_mut().zip(path.legs()) {
                if leg.segments().contains(&segment) {
                    *rate = rate.min(own * scale + spare);
                }
            }
        }
    }
    rates
}

/// Max-min fair rates of the paths among themselves, each at most that of its slowest hop.
fn fair_shares(paths: &[&Candidate], shared: &SegmentSet, capacities: &[f64]) -> [f64; MAX_PATHS] {
    let mut rates = [0.0; MAX_PATHS];
    let mut open = [false; MAX_PATHS];
    open[..paths.len()].fill(true);
    while open.iter().any(|open| *open) {
        // Who has least is held by its own hops or by its tightest segment, whatever the others get.
        let mut least = (f64::INFINITY, 0);
        for (at, path) in paths.iter().enumerate().filter(|(at, _)| open[*at]) {
            let mut rate = path.rate();
            for segment in path.segments.common(shared).iter() {
                let mut left = capacities[usize::from(segment)];
                let mut sharers = 0.0;
                for (other, path) in paths.iter().enumerate() {
                    if path.segments.contains(segment) {
                        left -= rates[other];
                        sharers += f64::from(u8::from(open[other]));
                    }
                }
                rate = rate.min(left.max(0.0) / sharers);
            }
            if rate < least.0 {
                least = (rate, at);
            }
        }
        rates[least.1] = least.0;
        open[least.1] = false;
    }
    rates
}
