//! How much of a message goes over each path of a set, and in how many chunks.
//!
//! For a given number of chunks a path's time is a line in its share, `T_i = a_i + b_i m_i` (see [`crate::model`]; `a` has
//! everything that does not depend on the share). Whatever ends before the others could have carried more, so in the
//! best split all end together. With the sum of the shares being the message, that gives
//!
//! ```text
//! T = (n + sum(a_i / b_i)) / sum(1 / b_i)        m_i = (T - a_i) / b_i
//! ```
//!
//! A path whose share comes out negative could not even start in that time: it is dropped, and the rest is solved again.
//! The number of chunks is the one that ends first: more of them fill the pipeline sooner, and each costs an alpha on the
//! slowest hop. The derivative of T is zero at `c = sqrt(m F / (k alpha))`, with `F` the time of a byte on all hops but
//! the slowest and `k` the messages of the window. Shares and chunks are solved in turn until neither changes.

use super::contention::{self, Evenly, Occupancy, Rates};
use super::launched;
use super::paths::{Candidate, Engines, Path, PathKind, Planner, SegmentSet};
use super::{Launcher, Message, Options, MAX_PATHS, SLOTS_MIN};
use crate::policy::launch::{BATCH_BYTES_MAX, BATCH_COUNT_MAX, LAUNCHES_MAX};
use crate::topology::Place;

/// Where two copies of a hop are under way at a time, what a launch counts against more chunks: it costs the message nothing
/// as long as threads keep up, but their time.
const IN_TURN_LAUNCH_WEIGHT: f64 = 0.5;
/// Launches of one thread for each path that fit into the time of a chunk there, at least.
const IN_TURN_LAUNCHES: f64 = 3.0;
/// How much slower one hop of a relay may be than another.
const IN_TURN_UNEVEN_MAX: f64 = 1.1;
/// There, what filling the pipeline takes longer, in chunks: half a one if those of the two lanes come evenly, a whole one if
/// they come in pairs.
const IN_TURN_CHUNKS: f64 = 0.75;

/// What a launch counts against more chunks, where one thread makes all of them and does not keep up: the least comes first.
const LAUNCHER_WEIGHTS: [f64; 6] = [0.125, 0.25, 0.5, 1.0, 2.0, 4.0];

/// The thread keeps up where a split takes no longer than this, in times of its pipelines.
const KEEPS_UP: f64 = 1.002;

/// One message between two GPUs, and what may be done with it.
pub struct Problem<'a> {
    planner: &'a Planner,
    candidates: &'a [Candidate],
    occupancy: &'a Occupancy,
    message: &'a Message,
    options: &'a Options,
    allowed: u32,
    puts: bool,
}

/// A share of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Part {
    /// The path, by its number in the [`Problem`].
    pub candidate: u8,
    /// Length of the share.
    pub bytes: u64,
    /// Length of a chunk.
    pub chunk_bytes: u64,
    /// Number of chunks.
    pub chunks: u32,
    /// Slots at each staging place.
    pub slots: u32,
    /// The copies of each hop go on two streams in turn.
    pub in_turn: bool,
    /// When it ends, for the whole window.
    pub us: f64,
}

/// A message split over paths.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Split {
    /// When the last path ends, for the whole window.
    pub us: f64,
    parts: [Part; MAX_PATHS],
    len: u8,
}

impl Split {
    /// The shares, in the order of their launches. None is empty, unless the message is.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.parts[..usize::from(self.len)]
    }
}

/// The pipeline of one path: what its time depends on but for its share.
#[derive(Clone, Copy, Default)]
pub(super) struct Pipeline {
    startup_us: f64,
    pub(super) epsilon_us: f64,
    alpha_us: [f64; super::MAX_HOPS],
    /// What a direct copy that is launched in a batch takes beside its bytes, but for the first of the batch.
    batched_us: Option<f64>,
    us_per_byte: [f64; super::MAX_HOPS],
    pub(super) hops: usize,
    /// Two copies of each hop are under way at a time, so that what a copy takes beside its bytes is hidden.
    in_turn: bool,
    /// What a chunk counts beside its time when the number of chunks is chosen: its launches.
    counted_us: f64,
    /// Time of a chunk at least.
    least_us: f64,
    /// Another path of the plan goes over one of its links. If this one ran ahead there, as far as it has slots, it would take from
    /// that one what both need until the end.
    shares: bool,
}

/// A path's time as a line in its share.
#[derive(Clone, Copy, Default, PartialEq)]
struct Affine {
    at_zero_us: f64,
    us_per_byte: f64,
}

impl Pipeline {
    /// Time of one chunk on a hop.
    pub(super) fn chunk_us(&self, hop: usize, bytes: f64) -> f64 {
        self.alpha_us[hop] + bytes * self.us_per_byte[hop]
    }

    /// From the end of one chunk on a hop to that of the next: what does not depend on its length, and the time of a byte.
    /// Of two copies at a time one is through with what it costs beside its bytes while those of the other move.
    fn period(&self, hop: usize, bytes: f64) -> (f64, f64) {
        let (alpha_us, us_per_byte) = (self.alpha_us[hop], self.us_per_byte[hop]);
        if !self.in_turn {
            (alpha_us, us_per_byte)
        } else if alpha_us < bytes * us_per_byte {
            (0.0, us_per_byte)
        } else {
            (alpha_us / 2.0, us_per_byte / 2.0)
        }
    }

    fn period_us(&self, hop: usize, bytes: f64) -> f64 {
        let (fixed_us, us_per_byte) = self.period(hop, bytes);
        fixed_us + bytes * us_per_byte
    }

    /// Time of a byte on a hop, in as much as filling the pipeline takes longer where two copies share it.
    fn shared(&self, hop: usize) -> f64 {
        let chunks = if self.in_turn { IN_TURN_CHUNKS } else { 0.0 };
        chunks * self.us_per_byte[hop]
    }

    fn slowest(&self, bytes: f64) -> usize {
        let mut slowest = 0;
        for hop in 1..self.hops {
            if self.period_us(hop, bytes) > self.period_us(slowest, bytes) {
                slowest = hop;
            }
        }
        slowest
    }

    /// The whole time of `share` bytes of each of `window` messages, in `chunks` chunks each, through rings of `slots`.
    fn us(&self, share: f64, chunks: u32, window: u32, slots: u32) -> f64 {
        let bytes = share / f64::from(chunks);
        let mut sum = 0.0;
        let mut period: f64 = 0.0;
        for hop in 0..self.hops {
            sum += self.chunk_us(hop, bytes);
            period = period.max(self.period_us(hop, bytes));
        }
        sum += bytes * self.shared(self.slowest(bytes));
        let all = f64::from(chunks) * f64::from(window);
        if self.hops > 1 && all > f64::from(slots) {
            period = period.max(self.round_trip_us(bytes) / f64::from(slots));
        }
        let saved_us = self.saved_us(share, window);
        self.startup_us + self.epsilon_us + sum + (all - 1.0) * period - saved_us
    }

    /// What direct copies of a window need not take, as those that wait for others are launched in batches.
    fn saved_us(&self, share: f64, window: u32) -> f64 {
        let Some(batched_us) = self.batched_us.filter(|_| self.hops == 1) else {
            return 0.0;
        };
        let (window, alone) = (f64::from(window), LAUNCHES_MAX as f64);
        let in_batch = (BATCH_BYTES_MAX as f64 / share.max(1.0)).ceil();
        let in_batch = in_batch.min(BATCH_COUNT_MAX as f64);
        let launches = alone + ((window - alone) / in_batch).ceil();
        (window - launches).max(0.0) * (self.alpha_us[0] - batched_us).max(0.0)
    }

    /// From one use of a slot to the next: the copy into it, the copy out of it, a hand-over each way.
    fn round_trip_us(&self, bytes: f64) -> f64 {
        let stages = (self.hops - 1) as f64;
        let lanes = if self.in_turn { 2.0 } else { 1.0 };
        let one = |hop: usize| self.alpha_us[hop] + lanes * bytes * self.us_per_byte[hop];
        let both = (1..self.hops).map(|hop| one(hop - 1) + one(hop));
        both.fold(0.0, f64::max) + 2.0 * self.epsilon_us / stages
    }

    fn affine(&self, share: f64, chunks: u32, window: u32) -> Affine {
        let bytes = share / f64::from(chunks);
        let slowest = self.slowest(bytes);
        let again = f64::from(chunks) * f64::from(window) - 1.0;
        let (fixed_us, us_per_byte) = self.period(slowest, bytes);
        let sum = |of_hops: &[f64], period: f64| {
            of_hops[..self.hops].iter().sum::<f64>() + again * period
        };
        let shared = self.shared(slowest);
        Affine {
            at_zero_us: self.startup_us + self.epsilon_us + sum(&self.alpha_us, fixed_us)
                - self.saved_us(share, window),
            us_per_byte: (sum(&self.us_per_byte, us_per_byte) + shared) / f64::from(chunks),
        }
    }

    /// Chunks that a share needs at least.
    fn fewest(&self, share: f64, options: &Options) -> u32 {
        if self.hops == 1 {
            return 1;
        }
        ((share / options.chunk_bytes_max() as f64).ceil() as u32).max(1)
    }

    /// The number of chunks, of those allowed, that ends first.
    fn chunks(&self, share: f64, window: u32, options: &Options) -> u32 {
        if self.hops == 1 {
            return 1;
        }
        let fewest = self.fewest(share, options);
        let least = self.least_us / self.us_per_byte[self.slowest(share / f64::from(fewest))];
        let most = ((share / least.max(options.chunk_bytes_min as f64)) as u32)
            .min(options.chunks_max)
            .max(fewest);
        // Which hop is slowest may itself depend on the chunks; a second look settles it.
        let mut best = fewest;
        for _ in 0..2 {
            let slowest = self.slowest(share / f64::from(best));
            let others: f64 = (0..self.hops)
                .filter(|hop| *hop != slowest)
                .map(|hop| self.us_per_byte[hop])
                .sum();
            let others = others + self.shared(slowest);
            let alpha_us = if self.in_turn {
                0.0
            } else {
                self.alpha_us[slowest]
            };
            let chunk_us = alpha_us + self.counted_us;
            let optimum = (share * others / (f64::from(window) * chunk_us.max(1e-6))).sqrt();
            let below = (optimum.floor().min(f64::from(most)) as u32).clamp(fewest, most);
            let above = (below + 1).min(most);
            let us = |chunks| {
                let counted_us = f64::from(chunks) * f64::from(window) * self.counted_us;
                self.us(share, chunks, window, u32::MAX) + counted_us
            };
            best = if us(above) < us(below) { above } else { below };
        }
        best
    }

    /// Slots that keep the slowest hop busy, as far as there is room for them.
    fn slots(&self, part: &Part, window: u32, options: &Options) -> u32 {
        if self.hops == 1 {
            return 0;
        }
        let bytes = part.bytes as f64 / f64::from(part.chunks);
        let period = self.period_us(self.slowest(bytes), bytes);
        let wanted = (self.round_trip_us(bytes) / period).ceil().min(1e6) as u32 + 1;
        // A slot that is used again is waited for, which is two more calls for the one thread that launches all.
        let wanted = if options.launcher.is_some() && window == 1 && !self.shares {
            part.chunks
        } else {
            wanted
        };
        let room =
            (options.staging_bytes / part.chunk_bytes.max(1)).min(u64::from(u32::MAX)) as u32;
        wanted
            .max(SLOTS_MIN)
            .min(room)
            .min(part.chunks.saturating_mul(window))
    }
}

/// So many transfers of others make a crowd of those that go through the host's memory.
const CROWD: u32 = 2;

/// What is being solved: the shares of one set of paths.
struct Solution {
    shares: [f64; MAX_PATHS],
    chunks: [u32; MAX_PATHS],
    us: f64,
}

impl<'a> Problem<'a> {
    pub(crate) fn new(
        planner: &'a Planner,
        candidates: &'a [Candidate],
        occupancy: &'a Occupancy,
        message: &'a Message,
        options: &'a Options,
    ) -> Problem<'a> {
        let may = |candidate: &Candidate| match candidate.path.kind() {
            PathKind::Direct => options.direct,
            PathKind::Host => options.host,
            PathKind::Relay => {
                let depth = candidate.path.via().len() as u32;
                let may_lead_over = |place: &Place| match place {
                    Place::Gpu(gpu) => options.relays_over >> gpu & 1 == 1,
                    Place::Host => false,
                };
                options.relay
                    && options.relays_max > 0
                    && candidate.path.via().iter().all(may_lead_over)
                    && depth <= options.relay_depth_max
                    && !(options.direct && planner.is_in_the_way(candidates, candidate))
            }
        };
        let bits = candidates
            .iter()
            .enumerate()
            .filter(|(_, candidate)| may(candidate));
        Problem {
            planner,
            candidates,
            occupancy,
            message,
            options,
            allowed: bits.fold(0, |set, (at, _)| set | 1 << at),
            puts: planner.puts(message.from, message.to, message),
        }
    }

    /// The paths that may be taken, as a set of their numbers.
    #[must_use]
    pub fn allowed(&self) -> u32 {
        self.allowed
    }

    /// The direct path's number, if there is one, allowed or not.
    #[must_use]
    pub fn direct(&self) -> Option<u32> {
        let is_direct = |candidate: &Candidate| candidate.path.kind() == PathKind::Direct;
        self.candidates
            .iter()
            .position(is_direct)
            .map(|at| at as u32)
    }

    /// A path.
    #[must_use]
    pub fn path(&self, number: u32) -> &Path {
        &self.candidates[number as usize].path
    }

    /// A path's rate while nothing else is under way, bytes a microsecond.
    #[must_use]
    pub fn rate(&self, number: u32) -> f64 {
        self.candidates[number as usize].rate()
    }

    /// A further path is worth its launches if the message then takes less than this part of its time.
    #[must_use]
    pub fn worth(&self, number: u32) -> f64 {
        let candidate = &self.candidates[number as usize];
        let by_host = candidate.path.kind() == PathKind::Host;
        let others = if by_host {
            let back = u32::from(self.options.both_ways);
            self.occupancy.flows(&candidate.segments).max(back)
        } else {
            0
        };
        let knows_host = self.planner.model().knows_host();
        let is_crowded = self.occupancy.copies() > self.options.copies_max;
        if by_host && is_crowded && (!knows_host || self.planner.is_switched()) {
            return 0.0;
        }
        let least = match others {
            CROWD.. => self.options.gain_min_crowded,
            // What is gained at least, where what the host carries is still to be found out by such messages.
            1.. if self.message.window == 1 && knows_host => self.options.gain_min_beside,
            _ => 0.0,
        };
        let gain = self.options.gain_min.max(least);
        // A hair, if that is nothing, for rounding.
        1.0 - gain.max(1e-9)
    }

    /// Whether messages are split only to have a part of each in host memory.
    pub(super) fn is_for_host_alone(&self, split: &Split) -> bool {
        let mut kinds = split
            .parts()
            .iter()
            .map(|part| self.path(u32::from(part.candidate)).kind());
        kinds.all(|kind| kind != PathKind::Relay) && split.parts().len() > 1
    }

    /// What is allowed.
    #[must_use]
    pub fn options(&self) -> &Options {
        self.options
    }

    /// The message.
    #[must_use]
    pub fn message(&self) -> &Message {
        self.message
    }

    /// The set of the one path that ends first, of those allowed.
    #[must_use]
    pub fn fallback(&self) -> u32 {
        let us = |number: &u32| self.split(1 << number).us;
        let first = numbers(self.allowed).min_by(|x, y| us(x).total_cmp(&us(y)));
        first.map_or(0, |number| 1 << number)
    }

    /// The best split over a set of paths, which must not be empty. A path that helps nothing is left out of it.
    ///
    /// # Panics
    /// If the set is empty or names a path that is not there.
    #[must_use]
    pub fn split(&self, set: u32) -> Split {
        let first = &self.candidates[set.trailing_zeros() as usize].path;
        let paths = set.count_ones() as usize;
        let is_left = self.options.is_left_to_receiver(paths, first);
        let Some(launcher) = self.options.launcher.filter(|_| !is_left) else {
            return self.split_by(set, 0.0);
        };
        // With fewer chunks, where pipelines wait for launches.
        let weighed = |weight: f64| {
            let split = self.split_by(set, weight * launcher.joined_us());
            let pipelined_us = split.parts().iter().map(|part| part.us).fold(0.0, f64::max);
            (split, split.us <= KEEPS_UP * pipelined_us)
        };
        let (mut best, mut keeps_up) = weighed(0.0);
        for weight in LAUNCHER_WEIGHTS {
            if keeps_up {
                break;
            }
            let split;
            (split, keeps_up) = weighed(weight);
            if split.us < best.us {
                best = split;
            }
        }
        best
    }

    /// The same, each launch of a chunk counting so much when the number of chunks is chosen. With two copies of a hop of a relay at
    /// a time if that is faster: with few chunks they only hold each other up.
    fn split_by(&self, set: u32, launch_us: f64) -> Split {
        let split = self.split_as(set, launch_us, self.options.relays_in_turn);
        if !split.parts().iter().any(|part| part.in_turn) {
            return split;
        }
        let one_by_one = self.split_as(set, launch_us, false);
        if one_by_one.us < split.us {
            one_by_one
        } else {
            split
        }
    }

    fn split_as(&self, set: u32, launch_us: f64, in_turn: bool) -> Split {
        let mut chosen = [&self.candidates[0]; MAX_PATHS];
        let mut which = [0u8; MAX_PATHS];
        let mut len = 0;
        for number in numbers(set).take(MAX_PATHS) {
            chosen[len] = &self.candidates[number as usize];
            which[len] = number as u8;
            len += 1;
        }
        assert!(len > 0, "a split over no path");
        let capacities = self
            .planner
            .capacities(self.options.host_part(self.message.window));
        let evenly = Evenly {
            segments: match self.options.both_ways {
                true => self.planner.of_host(),
                false => &SegmentSet::EMPTY,
            },
            where_used: self.message.window == 1,
        };
        let rates = contention::rates(&chosen[..len], capacities, self.occupancy, &evenly);
        let is_left = self.options.is_left_to_receiver(len, &chosen[0].path);
        let puts = self.puts && !is_left;
        let launcher = self.options.launcher.filter(|_| !is_left);
        // Who launches copy behind copy takes as long for each at least; where one thread launches all, its time is counted apart.
        let least_us = launcher.map_or(self.planner.model().launch_us, |_| 0.0);
        // Those before it are launched first.
        let startup_us_of = |position: usize| match launcher {
            // Each by an idle stream, and those before it handed on, but for the direct one.
            Some(launcher) => {
                let each_us = launcher.joined_us() + launcher.calls.idle_us;
                each_us * (position + 1) as f64 - launcher.calls.event_us + launcher.finish_us
            }
            None => {
                let model = self.planner.model();
                model.launch_us * (position + 1) as f64 + model.finish_us
            }
        };
        let batches = self.options.batches || is_left;
        let mut engines = Engines::new(self.planner, puts, self.options.relays_put);
        let mut pipelines = [Pipeline::default(); MAX_PATHS];
        for at in 0..len {
            let put = engines.next(&chosen[at].path);
            pipelines[at] = self.pipeline(chosen[at], at, &rates, put, startup_us_of(at), least_us);
            pipelines[at].batched_us = pipelines[at].batched_us.filter(|_| batches);
            pipelines[at].counted_us = launch_us * pipelines[at].hops as f64;
            let mut others = (0..len).filter(|other| *other != at);
            let common = |other: usize| chosen[at].segments.common(&chosen[other].segments);
            pipelines[at].shares = others.any(|other| !common(other).is_empty());
        }
        if in_turn {
            self.take_turns(&chosen[..len], &mut pipelines[..len]);
        }
        let pipelines = &pipelines[..len];
        if len > 1 {
            let solution = self.solve(pipelines);
            let dropped = (0..len).filter(|at| solution.shares[*at] < self.options.align as f64);
            let rest = dropped.fold(set, |set, at| set & !(1 << which[at]));
            // Those that are left may get in each other's way less.
            if rest != set {
                let rest = if rest == 0 { 1 << which[0] } else { rest };
                return self.split_as(rest, launch_us, in_turn);
            }
            return self.round(pipelines, &which, &solution, launcher);
        }
        let share = self.message.bytes as f64;
        let mut solution = Solution {
            shares: [0.0; MAX_PATHS],
            chunks: [1; MAX_PATHS],
            us: 0.0,
        };
        solution.shares[0] = share;
        solution.chunks[0] = pipelines[0].chunks(share, self.message.window, self.options);
        self.round(pipelines, &which, &solution, launcher)
    }

    #[allow(clippy::too_many_arguments, reason = "the terms of one formula")]
    fn pipeline(
        &self,
        candidate: &Candidate,
        position: usize,
        rates: &Rates,
        put: [bool; super::MAX_HOPS],
        startup_us: f64,
        least_us: f64,
    ) -> Pipeline {
        let mut pipeline = Pipeline {
            startup_us,
            epsilon_us: candidate.epsilon_us,
            hops: candidate.legs().len(),
            ..Pipeline::default()
        };
        let found = match candidate.path.kind() {
            PathKind::Host => self.options.host_rate.factor(),
            PathKind::Direct | PathKind::Relay => 1.0,
        };
        for (hop, leg) in candidate.legs().iter().enumerate() {
            let pace = if put[hop] { leg.put } else { leg.get };
            let rate = rates[position][hop].min(pace.rate) * found;
            pipeline.alpha_us[hop] = pace.alpha_us.max(least_us) + leg.chunk_us;
            pipeline.batched_us = pace.batched_us;
            // A segment that is taken altogether still lets a byte through now and then.
            pipeline.us_per_byte[hop] = 1.0 / rate.max(1e-3);
        }
        pipeline
    }

    /// Two copies of a hop at a time: where the engines of a GPU are enough for them, and no other message is under way.
    fn take_turns(&self, chosen: &[&Candidate], pipelines: &mut [Pipeline]) {
        let is_relay = |candidate: &&Candidate| candidate.path.kind() == PathKind::Relay;
        let relays = chosen.iter().copied().filter(is_relay).count() as u32;
        let engines = self.planner.topology().costs.peer_engines;
        let is_alone = self.message.window == 1 && self.occupancy.is_free();
        // With hops of different rates the two lanes do not stay in turn: predictions were 13 % too high there.
        let is_even = |pipeline: &Pipeline| {
            let rates = &pipeline.us_per_byte[..pipeline.hops];
            let (least, most) = rates
                .iter()
                .fold((f64::MAX, 0.0_f64), |(least, most), rate| {
                    (least.min(*rate), most.max(*rate))
                });
            most <= IN_TURN_UNEVEN_MAX * least
        };
        let are_even = chosen
            .iter()
            .zip(&*pipelines)
            .all(|(path, pipeline)| !is_relay(path) || is_even(pipeline));
        if !is_alone || !are_even || 2 * relays > engines {
            return;
        }
        let launch_us = self.planner.model().launch_us;
        for (_, pipeline) in chosen
            .iter()
            .zip(pipelines)
            .filter(|(path, _)| is_relay(path))
        {
            pipeline.in_turn = true;
            pipeline.counted_us += launch_us * IN_TURN_LAUNCH_WEIGHT;
            pipeline.least_us = launch_us * IN_TURN_LAUNCHES * f64::from(relays);
        }
    }

    /// Longest share that a path may have in so many chunks: the direct copy needs none.
    fn share_max(&self, pipeline: &Pipeline, chunks: u32) -> f64 {
        if pipeline.hops == 1 {
            return f64::INFINITY;
        }
        let chunks = chunks.min(self.options.chunks_most());
        self.options.chunk_bytes_max() as f64 * f64::from(chunks)
    }

    /// Shares and chunks in turn: as many chunks as the shares need, and also shares that the chunks of the turn before have
    /// room for, as a little less in fewer chunks may end sooner.
    fn solve(&self, pipelines: &[Pipeline]) -> Solution {
        let free = self.settle(pipelines, false);
        let fitting = self.settle(pipelines, true);
        if fitting.us < free.us {
            fitting
        } else {
            free
        }
    }

    fn settle(&self, pipelines: &[Pipeline], is_fitting: bool) -> Solution {
        const ROUNDS: usize = 8;
        let len = pipelines.len();
        let window = self.message.window;
        let total = self.message.bytes as f64;
        let mut shares = [0.0; MAX_PATHS];
        let mut chunks = [1; MAX_PATHS];
        let speed = |pipeline: &Pipeline| {
            1.0 / pipeline.us_per_byte[..pipeline.hops]
                .iter()
                .copied()
                .fold(0.0, f64::max)
        };
        let all: f64 = pipelines.iter().map(speed).sum();
        for at in 0..len {
            shares[at] = total * speed(&pipelines[at]) / all;
            chunks[at] = pipelines[at].chunks(shares[at], window, self.options);
        }
        let mut best: Option<Solution> = None;
        for _ in 0..ROUNDS {
            let mut lines = [Affine::default(); MAX_PATHS];
            for at in 0..len {
                lines[at] = pipelines[at].affine(shares[at], chunks[at], window);
            }
            let mut most = [f64::INFINITY; MAX_PATHS];
            for at in 0..len {
                let chunks = if is_fitting {
                    chunks[at]
                } else {
                    self.options.chunks_most()
                };
                most[at] = self.share_max(&pipelines[at], chunks);
            }
            shares = self.equal_ends(&most[..len], &lines[..len]);
            let mut needed = chunks;
            for at in 0..len {
                needed[at] = chunks[at].max(pipelines[at].fewest(shares[at], self.options));
            }
            let end = |at: usize| pipelines[at].us(shares[at], needed[at], window, u32::MAX);
            let us = (0..len)
                .filter(|at| shares[*at] > 0.0)
                .map(end)
                .fold(0.0, f64::max);
            if best.as_ref().is_none_or(|best| us < best.us) {
                best = Some(Solution {
                    shares,
                    chunks: needed,
                    us,
                });
            }
            let mut changed = false;
            for at in 0..len {
                // A path without a share may have one in a single chunk.
                let now = pipelines[at].chunks(shares[at], window, self.options);
                changed |=
                    now != chunks[at] || pipelines[at].affine(shares[at], now, window) != lines[at];
                chunks[at] = now;
            }
            if !changed {
                break;
            }
        }
        best.unwrap_or(Solution {
            shares,
            chunks,
            us: 0.0,
        })
    }

    /// The closed form: shares with which all paths end together. Negative ones are dropped, those beyond what a path may
    /// carry are held there, and the rest is solved again.
    fn equal_ends(&self, most: &[f64], lines: &[Affine]) -> [f64; MAX_PATHS] {
        let mut shares = [0.0; MAX_PATHS];
        let mut open = [false; MAX_PATHS];
        open[..lines.len()].fill(true);
        let mut left = self.message.bytes as f64;
        loop {
            let (mut sum, mut speed) = (left, 0.0);
            for (line, _) in lines.iter().zip(&open).filter(|(_, open)| **open) {
                sum += line.at_zero_us / line.us_per_byte;
                speed += 1.0 / line.us_per_byte;
            }
            if speed == 0.0 {
                return shares;
            }
            let end = sum / speed;
            let mut again = false;
            for (at, line) in lines.iter().enumerate() {
                if open[at] {
                    shares[at] = (end - line.at_zero_us) / line.us_per_byte;
                    if shares[at] <= 0.0 {
                        (shares[at], open[at], again) = (0.0, false, true);
                    }
                }
            }
            if !again {
                // Only once nobody is negative: what is held back from one is for the others to carry.
                for (at, most) in most.iter().enumerate() {
                    if open[at] && shares[at] > *most {
                        (shares[at], open[at], again) = (*most, false, true);
                        left -= most;
                    }
                }
            }
            if !again {
                return shares;
            }
        }
    }

    /// Whole bytes: each path but the first gets a multiple of the alignment, the first the rest.
    fn round(
        &self,
        pipelines: &[Pipeline],
        which: &[u8; MAX_PATHS],
        solution: &Solution,
        launcher: Option<Launcher>,
    ) -> Split {
        let len = pipelines.len();
        let (window, options) = (self.message.window, self.options);
        let mut split = Split {
            us: 0.0,
            parts: [Part::default(); MAX_PATHS],
            len: len as u8,
        };
        let mut left = self.message.bytes;
        for at in (0..len).rev() {
            let share = solution.shares[at] as u64 / options.align * options.align;
            let bytes = if at == 0 { left } else { share.min(left) };
            left -= bytes;
            let mut part = Part {
                candidate: which[at],
                bytes,
                chunk_bytes: bytes,
                chunks: 1,
                slots: 0,
                in_turn: pipelines[at].in_turn,
                us: 0.0,
            };
            if pipelines[at].hops > 1 {
                // The first may have been given a little more than was solved for.
                let fewest = bytes.div_ceil(options.chunk_bytes_max());
                let most = u64::from(options.chunks_max).max(fewest);
                let chunks = u64::from(solution.chunks[at])
                    .max(fewest)
                    .clamp(1, most.max(1));
                part.chunk_bytes = bytes.div_ceil(chunks).next_multiple_of(options.align);
                part.chunks = bytes.div_ceil(part.chunk_bytes.max(1)).max(1) as u32;
            }
            part.slots = pipelines[at].slots(&part, window, options);
            part.us = pipelines[at].us(bytes as f64, part.chunks, window, part.slots);
            split.us = split.us.max(part.us);
            // More chunks than there may be, only because nobody else takes the rest: not if the direct path could.
            if part.chunks > options.chunks_most() && options.direct {
                split.us = f64::INFINITY;
            }
            split.parts[at] = part;
        }
        let copies = split.parts().iter().zip(pipelines);
        let copies: f64 = copies
            .map(|(part, pipeline)| f64::from(part.chunks) * pipeline.hops as f64)
            .sum();
        // A thread that needs less than half of the time is no question.
        let may_matter = |launcher: &Launcher| {
            let launches_us = launcher.joined_us() * copies * f64::from(window);
            split.us.is_finite() && (window == 1 || 2.0 * launches_us > split.us)
        };
        if let Some(launcher) = launcher.filter(may_matter) {
            split.us = launched::us(split.parts(), pipelines, options.order, window, &launcher);
            // What a path takes by itself is a little less exact.
            let parts = &mut split.parts[..len];
            parts
                .iter_mut()
                .for_each(|part| part.us = part.us.min(split.us));
        }
        split
    }
}

/// The numbers in a set.
pub fn numbers(mut set: u32) -> impl Iterator<Item = u32> {
    std::iter::from_fn(move || {
        if set == 0 {
            return None;
        }
        let number = set.trailing_zeros();
        set &= set - 1;
        Some(number)
    })
}
