//! The paths between two GPUs.

use super::Message;
use crate::model::{HostPart, Line, Model, BYTES_PER_US};
use crate::topology::{Fabric, Place, Topology, HOP_SEGMENTS, MAX_GPUS};
use serde::Serialize;
use std::fmt;
use std::sync::OnceLock;

/// Hops of one path at most.
pub const MAX_HOPS: usize = 3;
/// Paths that are looked at between two GPUs at most: a set of them is a word.
pub const MAX_CANDIDATES: usize = 32;

/// What a path leads over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum PathKind {
    /// Nothing: one copy.
    Direct,
    /// Other GPUs.
    Relay,
    /// Host memory.
    Host,
}

/// A path, as the places it leads over, both ends included.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Path {
    places: [Place; MAX_HOPS + 1],
    len: u8,
}

impl Path {
    /// # Panics
    /// With fewer than two places, or more than [`MAX_HOPS`] hops between them.
    #[must_use]
    pub fn new(over: &[Place]) -> Path {
        assert!(
            (2..=MAX_HOPS + 1).contains(&over.len()),
            "{over:?} is no path"
        );
        let mut places = [Place::Host; MAX_HOPS + 1];
        places[..over.len()].copy_from_slice(over);
        Path {
            places,
            len: over.len() as u8,
        }
    }

    /// The places, both ends included.
    #[must_use]
    pub fn places(&self) -> &[Place] {
        &self.places[..usize::from(self.len)]
    }

    /// The staging places.
    #[must_use]
    pub fn via(&self) -> &[Place] {
        &self.places[1..usize::from(self.len) - 1]
    }

    /// Copies that a chunk takes.
    #[must_use]
    pub fn hops(&self) -> usize {
        usize::from(self.len) - 1
    }

    /// What it leads over.
    #[must_use]
    pub fn kind(&self) -> PathKind {
        match self.via() {
            [] => PathKind::Direct,
            [Place::Host] => PathKind::Host,
            _ => PathKind::Relay,
        }
    }

    /// Whether its copies give way to those of others: it goes by staging between two GPUs that have links of their own.
    #[must_use]
    pub fn yields(&self, topology: &Topology) -> bool {
        let places = self.places();
        let direct = topology.hop(places[0], places[places.len() - 1]);
        self.kind() != PathKind::Direct && direct.is_some_and(|hop| hop.is_nvlink())
    }
}

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, place) in self.places().iter().enumerate() {
            write!(f, "{}{place}", if i == 0 { "" } else { "-" })?;
        }
        Ok(())
    }
}

impl fmt::Debug for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A set of segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(
    any(test, feature = "golden"),
    derive(serde::Serialize, serde::Deserialize)
)]
pub(crate) struct SegmentSet([u64; SegmentSet::WORDS]);

impl SegmentSet {
    /// Enough for a full mesh of as many GPUs as can be: six or fewer segments a GPU, of which two are of PCIe switches (they
    /// are nested, each of two GPUs at least, so there are fewer than GPUs), two a pair, two of the host.
    const WORDS: usize = (MAX_GPUS * 6 + MAX_GPUS * (MAX_GPUS - 1) + 2).div_ceil(64);

    /// None.
    pub const EMPTY: SegmentSet = SegmentSet([0; SegmentSet::WORDS]);

    pub fn insert(&mut self, segment: u16) {
        self.0[usize::from(segment / 64)] |= 1 << (segment % 64);
    }

    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|word| *word == 0)
    }

    pub fn contains(&self, segment: u16) -> bool {
        self.0[usize::from(segment / 64)] & (1 << (segment % 64)) != 0
    }

    pub fn with(mut self, other: &SegmentSet) -> SegmentSet {
        self.0
            .iter_mut()
            .zip(&other.0)
            .for_each(|(word, other)| *word |= other);
        self
    }

    pub fn common(mut self, other: &SegmentSet) -> SegmentSet {
        self.0
            .iter_mut()
            .zip(&other.0)
            .for_each(|(word, other)| *word &= other);
        self
    }

    pub fn iter(self) -> impl Iterator<Item = u16> {
        self.0.into_iter().enumerate().flat_map(|(at, mut word)| {
            std::iter::from_fn(move || {
                if word == 0 {
                    return None;
                }
                let bit = word.trailing_zeros();
                word &= word - 1;
                Some(at as u16 * 64 + bit as u16)
            })
        })
    }
}

/// What one engine makes of a hop.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Pace {
    /// Each copy, before its bytes move.
    pub alpha_us: f64,
    /// The same of one that is launched in one batch with those before it, if that was measured.
    pub batched_us: Option<f64>,
    /// Bytes a microsecond that can be counted on.
    pub rate: f64,
}

/// A hop of a candidate, with its numbers.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Leg {
    /// By the engine of the source; the same as `pulled` where it cannot.
    pub put: Pace,
    /// By the engine of the destination; the same as `pushed` where it cannot.
    pub get: Pace,
    /// What a chunk adds, if this is not the last hop.
    pub chunk_us: f64,
    segments: [u16; HOP_SEGMENTS],
    segment_count: u8,
}

impl Leg {
    pub fn segments(&self) -> &[u16] {
        &self.segments[..usize::from(self.segment_count)]
    }

    /// The faster engine's rate.
    pub fn rate(&self) -> f64 {
        self.put.rate.max(self.get.rate)
    }
}

/// A path that may be taken, with its numbers.
#[derive(Clone, Debug)]
pub(crate) struct Candidate {
    pub path: Path,
    legs: [Leg; MAX_HOPS],
    /// All hand-overs of one chunk.
    pub epsilon_us: f64,
    pub segments: SegmentSet,
    /// See [`Path::yields`].
    pub yields: bool,
}

impl Candidate {
    pub fn legs(&self) -> &[Leg] {
        &self.legs[..self.path.hops()]
    }

    /// Rate of the slowest hop.
    pub fn rate(&self) -> f64 {
        self.legs()
            .iter()
            .map(Leg::rate)
            .fold(f64::INFINITY, f64::min)
    }
}

/// Which end's engine makes the copies between GPUs: the source pushes into staging, the destination pulls out of it, a
/// relay pushes to the next. A GPU whose engines are all taken by other paths leaves the copy to the other end.
pub(crate) struct Engines {
    direct_is_put: bool,
    relays_put: bool,
    limit: u32,
    puts: u32,
    gets: u32,
}

impl Engines {
    /// The paths of a plan are asked about one after the other.
    pub fn new(planner: &Planner, direct_is_put: bool, relays_put: bool) -> Engines {
        Engines {
            direct_is_put,
            relays_put,
            limit: planner.topology.costs.peer_engines,
            puts: 0,
            gets: 0,
        }
    }

    /// For each hop of the next path, whether its source pushes.
    pub fn next(&mut self, path: &Path) -> [bool; MAX_HOPS] {
        let mut put = [true; MAX_HOPS];
        let last = path.hops() - 1;
        match path.kind() {
            PathKind::Direct => put[0] = self.direct_is_put,
            PathKind::Host => put[last] = false,
            PathKind::Relay => {
                put[0] = self.puts < self.limit;
                put[last] = self.relays_put || self.gets >= self.limit;
            }
        }
        if path.kind() != PathKind::Host {
            self.puts += u32::from(put[0]);
            self.gets += u32::from(!put[last]);
        }
        put
    }
}

/// The segments of the host's memory.
fn of_host(topology: &Topology) -> SegmentSet {
    let segments = topology.segments.iter().zip(0..);
    let mut of_host = SegmentSet::EMPTY;
    for (_, at) in segments.filter(|(segment, _)| segment.kind.is_host()) {
        of_host.insert(at);
    }
    of_host
}

/// What does not depend on the message: the topology and the model, and the paths of each pair that was asked for.
pub struct Planner {
    topology: Topology,
    model: Model,
    /// What segments carry, bytes a microsecond, for each part of the host's memory.
    capacities: Vec<Vec<f64>>,
    pairs: Vec<OnceLock<Pair>>,
    /// The segments of the host's memory.
    of_host: SegmentSet,
}

/// What leads from one GPU to another.
struct Pair {
    candidates: Vec<Candidate>,
    /// All segments of these.
    segments: SegmentSet,
}

impl Planner {
    /// Paths are listed when a pair is first asked for.
    #[must_use]
    pub fn new(topology: &Topology, model: &Model) -> Planner {
        let pairs = topology.gpus.len().pow(2);
        let capacities = |host| {
            let capacities = model.capacities(topology, host).into_iter();
            capacities.map(|gb_s| gb_s * BYTES_PER_US).collect()
        };
        Planner {
            capacities: HostPart::every().map(capacities).collect(),
            topology: topology.clone(),
            model: model.clone(),
            pairs: (0..pairs).map(|_| OnceLock::new()).collect(),
            of_host: of_host(topology),
        }
    }

    /// Whether all that comes to a GPU from others comes by one port.
    pub(crate) fn is_switched(&self) -> bool {
        self.topology.fabric == Fabric::Switch
    }

    /// Number of GPUs.
    #[must_use]
    pub fn gpus(&self) -> usize {
        self.topology.gpus.len()
    }

    /// The topology that it plans for.
    #[must_use]
    pub fn topology(&self) -> &Topology {
        &self.topology
    }

    /// The model that it plans with.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Whether the source had better push a direct copy.
    pub(crate) fn puts(&self, from: u8, to: u8, message: &Message) -> bool {
        let time =
            |line: &Line| line.alpha_us + message.bytes as f64 / (line.sure_gb_s() * BYTES_PER_US);
        match self.model.hop(Place::Gpu(from), Place::Gpu(to)) {
            Some(hop) => match (hop.push, hop.pull) {
                (Some(push), Some(pull)) => message.may_put && time(&push) < time(&pull),
                (push, _) => push.is_some(),
            },
            None => false,
        }
    }

    /// All paths between two GPUs that the planner knows: the direct one first, then by their rate.
    #[must_use]
    pub fn paths(&self, from: u8, to: u8) -> Vec<Path> {
        self.between(from, to)
            .iter()
            .map(|candidate| candidate.path)
            .collect()
    }

    /// The paths between two GPUs. Both must be there.
    pub(crate) fn between(&self, from: u8, to: u8) -> &[Candidate] {
        &self.pair(from, to).candidates
    }

    /// All segments over which a path may lead from one GPU to another.
    pub(crate) fn segments_between(&self, from: u8, to: u8) -> &SegmentSet {
        &self.pair(from, to).segments
    }

    /// Those of the host's memory.
    pub(crate) fn of_host(&self) -> &SegmentSet {
        &self.of_host
    }

    fn pair(&self, from: u8, to: u8) -> &Pair {
        let at = usize::from(from) * self.gpus() + usize::from(to);
        self.pairs[at].get_or_init(|| {
            let candidates = self.list(from, to);
            let all = candidates.iter().map(|candidate| candidate.segments);
            let segments = all.fold(SegmentSet::EMPTY, |all, one| all.with(&one));
            Pair {
                candidates,
                segments,
            }
        })
    }

    /// Whether a path must go through a segment that the direct copy fills by itself, as a relay behind a switch leaves
    /// by the same port. It could only take from the direct path what it carries: measured on H200, it loses at every
    /// size.
    pub(crate) fn is_in_the_way(&self, candidates: &[Candidate], other: &Candidate) -> bool {
        let Some(direct) = candidates
            .first()
            .filter(|path| path.path.kind() == PathKind::Direct)
        else {
            return false;
        };
        let mut common = direct.segments.common(&other.segments).iter();
        common.any(|segment| {
            direct.rate() >= 0.95 * self.capacities(HostPart::ALL)[usize::from(segment)]
        })
    }

    /// What segments carry, bytes a microsecond: the host's memory a part of what it does.
    pub(crate) fn capacities(&self, host: HostPart) -> &[f64] {
        &self.capacities[host.number()]
    }

    fn list(&self, from: u8, to: u8) -> Vec<Candidate> {
        let (a, b) = (Place::Gpu(from), Place::Gpu(to));
        let others: Vec<Place> = (0..self.gpus() as u8)
            .filter(|gpu| *gpu != from && *gpu != to)
            .map(Place::Gpu)
            .collect();
        let mut short = Vec::new();
        short.extend(self.candidate(&[a, Place::Host, b]));
        short.extend(
            others
                .iter()
                .filter_map(|via| self.candidate(&[a, *via, b])),
        );
        short.sort_by(|x, y| y.rate().total_cmp(&x.rate()));
        let mut listed: Vec<Candidate> = self.candidate(&[a, b]).into_iter().chain(short).collect();
        listed.truncate(MAX_CANDIDATES);
        let room = MAX_CANDIDATES - listed.len();
        let mut long = Vec::new();
        for first in &others {
            let over = others.iter().filter(|second| *second != first);
            long.extend(over.filter_map(|second| self.candidate(&[a, *first, *second, b])));
        }
        let long = self.order_by_use(&listed, long);
        listed.extend(long.into_iter().take(room));
        listed
    }

    /// A path with its numbers, if a copy can go every hop of it and all of them were measured. A relay goes by NVLink:
    /// over PCIe it would take the links that the host path has.
    fn candidate(&self, places: &[Place]) -> Option<Candidate> {
        let path = Path::new(places);
        let relay = path.kind() == PathKind::Relay;
        let staging = self
            .model
            .staging(places[0], path.via(), places[places.len() - 1]);
        let mut segments = SegmentSet::default();
        let mut legs = [Leg::default(); MAX_HOPS];
        for (at, ends) in places.windows(2).enumerate() {
            let hop = self.topology.hop(ends[0], ends[1])?;
            if relay && !hop.is_nvlink() {
                return None;
            }
            let numbers = self.model.hop(ends[0], ends[1])?;
            let capacity = hop
                .segments()
                .iter()
                .map(|segment| self.capacities(HostPart::ALL)[usize::from(*segment)]);
            let capacity = capacity.fold(f64::INFINITY, f64::min);
            let is_last = at + 2 == places.len();
            let pace = |line: Line| Pace {
                alpha_us: line.alpha_us,
                batched_us: line.batched_us,
                rate: (line.sure_gb_s() * BYTES_PER_US).min(capacity),
            };
            let mut leg = Leg {
                put: pace(numbers.push.or(numbers.pull)?),
                get: pace(numbers.pull.or(numbers.push)?),
                chunk_us: if is_last { 0.0 } else { staging.chunk_us },
                segment_count: hop.segments().len() as u8,
                ..Leg::default()
            };
            leg.segments[..hop.segments().len()].copy_from_slice(hop.segments());
            legs[at] = leg;
            hop.segments()
                .iter()
                .for_each(|segment| segments.insert(*segment));
        }
        Some(Candidate {
            epsilon_us: staging.epsilon_us * path.via().len() as f64,
            yields: path.yields(&self.topology),
            path,
            legs,
            segments,
        })
    }

    /// Orders long paths so that those come first which, together with the short ones, carry most. Which of them go
    /// together is a question of which links they share, so several orders are tried, always the same ones.
    fn order_by_use(&self, short: &[Candidate], long: Vec<Candidate>) -> Vec<Candidate> {
        const TRIES: u64 = 64;
        let mut left = self.capacities(HostPart::ALL).to_vec();
        let take = |left: &mut [f64], candidate: &Candidate| {
            let room = candidate
                .segments
                .iter()
                .map(|segment| left[usize::from(segment)]);
            let rate = room.fold(candidate.rate(), f64::min).max(0.0);
            candidate
                .segments
                .iter()
                .for_each(|segment| left[usize::from(segment)] -= rate);
            rate
        };
        for candidate in short {
            take(&mut left, candidate);
        }
        let mut order: Vec<usize> = (0..long.len()).collect();
        let mut best: Option<(f64, Vec<usize>)> = None;
        let mut random = 0x9e37_79b9_7f4a_7c15_u64;
        for _ in 0..TRIES {
            let mut left = left.clone();
            let rates: Vec<f64> = order.iter().map(|at| take(&mut left, &long[*at])).collect();
            let total = rates.iter().sum();
            if best
                .as_ref()
                .is_none_or(|(most, _)| total > most * (1.0 + 1e-9))
            {
                let mut used: Vec<usize> = (0..order.len()).collect();
                used.sort_by(|x, y| rates[*y].total_cmp(&rates[*x]));
                // One for which nothing is left by the others is not looked at again.
                used.retain(|at| rates[*at] > 0.0);
                best = Some((total, used.iter().map(|at| order[*at]).collect()));
            }
            for at in (1..order.len()).rev() {
                // A linear congruential generator (Knuth's MMIX): the order need not be random, only various.
                random = random
                    .wrapping_mul(6_364_136_223_846_793_005)
                    .wrapping_add(1_442_695_040_888_963_407);
                order.swap(at, (random >> 33) as usize % (at + 1));
            }
        }
        let order = best.map_or(Vec::new(), |(_, order)| order);
        order.into_iter().map(|at| long[at].clone()).collect()
    }
}
