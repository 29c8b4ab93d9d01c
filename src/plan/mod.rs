//! From a message to a plan: which paths, how much over each, in how many chunks.
//!
//! [`plan`] is pure. It touches no driver, keeps nothing, and gives the same plan for the same input. It works in steps:
//!
//! 1. [`paths`] lists the paths that may be taken between two GPUs: direct, over another GPU, over two, through host
//!    memory. The list does not depend on the message and is kept in a [`Planner`].
//! 2. [`contention`] says at what rate each path of a set moves bytes while all of them do, and while other messages use
//!    the same segments.
//! 3. [`shares`] splits a message over a set of paths so that all end at the same time, and chooses the chunks.
//! 4. [`policy`] chooses the set. The default takes what is predicted to end first.
//! 5. [`graph`] writes a plan down as copies and what each of them waits for.
//!
//! The direct path alone is one of the sets that are compared, so no plan is predicted to be slower than that.

pub mod contention;
pub mod graph;
mod launched;
pub mod paths;
pub mod policy;
pub mod shares;

pub use contention::Occupancy;
pub use graph::{Copy, Engine, Graph};
pub use paths::{Path, PathKind, Planner, MAX_HOPS};
pub use policy::{FastestEnd, Policy};

use crate::model::{Calls, HostPart, Model};
use crate::topology::{Place, Topology};
use serde::Serialize;

/// Paths that one plan uses at most.
pub const MAX_PATHS: usize = 8;
/// Chunks of a path beside the direct one at most, whatever its staging memory holds: its receiver counts them in 12 bits.
pub const CHUNKS_MOST: u32 = 4095;
/// Plans that one process makes all copies of, under way at once.
pub const DRIVES_MAX: u32 = 8;

/// What is to be moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[cfg_attr(any(test, feature = "golden"), derive(serde::Deserialize))]
pub struct Message {
    /// Number of the GPU that has it.
    pub from: u8,
    /// Number of the GPU that is to have it.
    pub to: u8,
    /// Length.
    pub bytes: u64,
    /// Messages like this one that follow each other without a pause; 1 for a single one.
    pub window: u32,
    /// The engine of the source may move it: its process waits and can launch. Otherwise the destination pulls.
    pub may_put: bool,
}

impl Message {
    /// A single message, pulled or pushed.
    #[must_use]
    pub fn new(from: u8, to: u8, bytes: u64) -> Message {
        Message {
            from,
            to,
            bytes,
            window: 1,
            may_put: true,
        }
    }
}

/// In what order the copies of a plan are launched.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[cfg_attr(any(test, feature = "golden"), derive(serde::Deserialize))]
#[serde(rename_all = "kebab-case")]
pub enum Order {
    /// The direct copy, then a chunk of each other path in turn. On H200, chunks that were launched before the direct
    /// copy cost more than they brought.
    #[default]
    DirectFirst,
    /// A chunk of each path in turn, the direct one among them.
    RoundRobin,
    /// One path after the other.
    PathByPath,
}

/// What a plan may do.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(
    any(test, feature = "golden"),
    derive(serde::Serialize, serde::Deserialize)
)]
pub struct Options {
    /// The direct path may be taken.
    pub direct: bool,
    /// Paths over other GPUs may be taken.
    pub relay: bool,
    /// The path through host memory may be taken.
    pub host: bool,
    /// How many paths over other GPUs at most.
    pub relays_max: u32,
    /// Over which GPUs, as a set of bits by their numbers.
    pub relays_over: u32,
    /// Their engines push to the receiver, as where one process makes all copies: a push begins sooner than a pull. A plan that
    /// is one copy only is left to the receiver then, which pulls it as it pulls everything that is not planned.
    pub relays_put: bool,
    /// The copies of a hop of such a path may go on two streams in turn, for a single message over few of these paths: what
    /// one costs beside its bytes is then hidden behind the bytes of the other.
    pub relays_in_turn: bool,
    /// Direct copies of a window that wait for others are launched in batches (`cuda::queue`).
    pub batches: bool,
    /// How many GPUs one such path may lead over: 1 or 2.
    pub relay_depth_max: u32,
    /// What the one thread pays that launches all copies; none where those that launch are several, or are through long before
    /// their copies.
    pub launcher: Option<Launcher>,
    /// Chunks of a path at most, unless its staging memory is too small for so few.
    pub chunks_max: u32,
    /// A chunk's length at least, but for the last of a path.
    pub chunk_bytes_min: u64,
    /// Where one path ends in the message and another begins is a multiple of this, and so are chunks. A power of two.
    pub align: u64,
    /// Staging memory that one path may use at each of its staging places.
    pub staging_bytes: u64,
    /// What each further path must gain, as a share of the predicted time, to be worth its launches.
    pub gain_min: f64,
    /// The same for the path through host memory while two others or more use the host, too. Their chunks come late now and
    /// then, and each message that waits for one holds others up: four H200s in a ring lost at every share.
    pub gain_min_crowded: f64,
    /// The same for a single message while another uses the host: two H200s, 32 MiB both ways, 3 % predicted, 0.93 of one path.
    pub gain_min_beside: f64,
    /// While others make more direct copies between GPUs than so many, nothing goes through host memory where GPUs are joined by a
    /// switch, or its rate was not measured for several at once. Four H200s in windows of 16 of 16 MiB, times one path: in a ring 0.92.
    pub copies_max: u32,
    /// What host memory alone must bring beside the direct path.
    pub least_gain: LeastGain,
    /// As much comes back, for which a half of the host's memory is left.
    pub both_ways: bool,
    /// What messages count on that use the host's memory beside others; what they do at first, if nothing was found out.
    pub host_part: Option<HostPart>,
    /// Of the rate that was measured of the path through the host, what one that uses it alone counts on.
    pub host_rate: HostPart,
    /// Order of launches.
    pub order: Order,
}

impl Default for Options {
    fn default() -> Options {
        Options {
            direct: true,
            relay: true,
            host: true,
            relays_max: MAX_PATHS as u32,
            relays_over: u32::MAX,
            relays_put: false,
            relays_in_turn: false,
            batches: false,
            relay_depth_max: 1,
            launcher: None,
            chunks_max: 1024,
            chunk_bytes_min: 64 << 10,
            align: 256,
            staging_bytes: 16 << 20,
            gain_min: 0.02,
            gain_min_crowded: 0.1,
            gain_min_beside: 0.04,
            copies_max: 2,
            least_gain: LeastGain::default(),
            both_ways: false,
            host_part: None,
            host_rate: HostPart::ALL,
            order: Order::default(),
        }
    }
}

/// What is to be gained at least by what is split for host memory alone, us.
///
/// An offer is made, found and closed for each such message, which is processor time of both ranks that no prediction counts, nobody is
/// invited to what may be split, and the host's memory carries less for several than for one.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(
    any(test, feature = "golden"),
    derive(serde::Serialize, serde::Deserialize)
)]
pub struct LeastGain {
    /// By a single message.
    pub single_us: f64,
    /// By all messages of a window together: while nobody else uses the links, and while others do.
    pub window_us: [f64; 2],
    /// By each message of a window beyond the fourth besides, while others use the links.
    pub each_us: f64,
}

/// Windows up to so deep must gain what is asked of any.
const SHALLOW: u32 = 4;

/// Where each rank makes its own copies.
///
/// Single messages: two H200s, times the speed without the library, split and written at once in one copy: 24 MiB, where 2 us are to be
/// gained, 1.07 and 1.10, both ways at once 0.91 and 1.02; 32 MiB, 4 us, 1.07 and 1.07, 0.98 and 1.03; 48 MiB, 7 us, 1.06 and 1.05, 1.02
/// and 1.03; 64 MiB, 10 us, 1.07 and 1.04, 1.04 and 1.04 (`docs/results/h200-x2-split.txt`), and later 1.064 and 1.045
/// (`h200-x2-turns.txt`, 5). Two H100s lose at 64 MiB both ways by the same figures: 0.985 of one path.
/// So did one of five machines with H200s, 0.974, of which the others have 0.996 to 1.031. With 12 us to be gained beside others all had 1.00
/// there, and of 96 MiB 1.00 instead of 1.03 to 1.05 (`h200-x2-one-path.txt`, 4 and 5).
///
/// Windows: two H100s, what the host's share should bring and what it brought, in turns with one path: 4 of 12 MiB 5.8 and -1.0 us, of 16
/// MiB 10.4 and 4.2; both ways at once, where it differs from message to message, 4 of 16 MiB 9.0 and -4.6, of 24 MiB 16 to 20 and -6, of
/// 32 MiB 15 to 26 and -13, of 48 MiB 23 to 42 and 14, 16 of 12 MiB 17 to 27 and 0 to 3 (`h100-x2-one-path.txt`, 7, and
/// `h100-x2-all-beside-one.txt`, 8 and 9). What it brings less than it should is the more the deeper a window is: both ways at once 4 of 32
/// MiB 25 and 6, 16 of 16 MiB 36 to 39 and -4 to -40, of 24 MiB 57 to 64 and 25, of 32 MiB 90 to 99 and 62 (`h100-x2-all-sizes.txt`).
pub const LEAST_GAIN: LeastGain = LeastGain {
    single_us: 6.0,
    window_us: [7.0, 20.0],
    each_us: 2.0,
};

/// The same where messages like it went directly so far, so that they do not go to and fro: a window of which some messages are split and
/// others go directly is slower than with one way for all, whichever that is (windows of 4 of 32 MiB both ways, times one path, by machine:
/// 0.965 of which half were split, 1.00 of which nearly all were).
pub const LEAST_GAIN_ANEW: LeastGain = LeastGain {
    single_us: 10.0,
    window_us: [7.0, 30.0],
    ..LEAST_GAIN
};

/// The same of single messages whose senders are told of the receive and write the direct part before the message is offered, so that to
/// split them costs no time before that: two H200s both ways, 64 MiB, with 6, 4 and 2 us to be gained 0.997, 1.000 and 1.044 of one path,
/// and nothing shorter loses (`docs/results/h200-x2-begun.txt`).
const BEGUN_US: f64 = 2.0;
const BEGUN_ANEW_US: f64 = 4.0;

impl LeastGain {
    /// Of messages that went directly so far, or did not, and whose senders begin before they are offered, or do not.
    #[must_use]
    pub fn of(goes_directly: bool, is_begun: bool) -> LeastGain {
        let (usual, begun_us) = match goes_directly {
            true => (LEAST_GAIN_ANEW, BEGUN_ANEW_US),
            false => (LEAST_GAIN, BEGUN_US),
        };
        let single_us = if is_begun { begun_us } else { usual.single_us };
        LeastGain { single_us, ..usual }
    }
}

/// What calls take the one thread that launches all copies of a message, us.
#[derive(Clone, Copy, Debug, PartialEq)]
#[cfg_attr(
    any(test, feature = "golden"),
    derive(serde::Serialize, serde::Deserialize)
)]
pub struct Launcher {
    /// Launches, and what is said of events.
    pub calls: Calls,
    /// From the end of the last copy until it knows.
    pub finish_us: f64,
}

/// What a call about an event takes, in launches, if it was not measured, and what a launch takes more on an idle stream. Such that
/// a copy of a relay, which is launched, handed on by an event, and perhaps the first of its stream, takes 1.4: 17 copies
/// over two GPUs took 33 us on H200, each of which took 1.4 us to launch.
const EVENT: f64 = 0.2;

impl Launcher {
    fn of(model: &Model) -> Launcher {
        let launch_us = model.launch_us;
        let unmeasured = Calls {
            launch_us,
            idle_us: EVENT * launch_us,
            event_us: EVENT * launch_us,
        };
        // A single copy, by which the end was measured, is launched on an idle stream.
        let measured_us =
            |calls: Calls| launch_us + model.finish_us - calls.launch_us - calls.idle_us;
        Launcher {
            calls: model.calls.unwrap_or(unmeasured),
            finish_us: model.calls.map_or(model.finish_us, measured_us).max(0.0),
        }
    }

    /// A copy of a relay, with the call about an event that joins it to the one behind or before it.
    fn joined_us(&self) -> f64 {
        self.calls.launch_us + self.calls.event_us
    }
}

/// Slots of a staging ring that a path needs at least, to fill one, empty another, and hand over a third.
pub const SLOTS_MIN: u32 = 3;

impl Options {
    /// What messages in windows so deep count on that use the host's memory beside others.
    pub(crate) fn host_part(&self, window: u32) -> HostPart {
        self.host_part.unwrap_or_else(|| HostPart::at_first(window))
    }

    /// What host memory alone must bring a window so deep beside the direct path, us.
    fn least_us(&self, window: u32, others: &Occupancy) -> f64 {
        match window {
            1 => self.least_gain.single_us,
            _ if others.is_free() && !self.both_ways => self.least_gain.window_us[0],
            _ => {
                let beyond = f64::from(window.saturating_sub(SHALLOW));
                self.least_gain.window_us[1] + self.least_gain.each_us * beyond
            }
        }
    }

    /// The same where each rank makes the copies of its own GPU, as of messages that follow others like them.
    #[must_use]
    pub fn by_each(self) -> Options {
        Options {
            relays_in_turn: true,
            batches: true,
            least_gain: LeastGain::of(false, true),
            ..self
        }
    }

    /// The same where one rank makes all copies: it needs nobody on the way, launches those of relays as it likes, and launches
    /// all of them.
    #[must_use]
    pub fn by_one(self, model: &Model) -> Options {
        Options {
            relay_depth_max: 2,
            relays_put: true,
            launcher: Some(Launcher::of(model)),
            ..self
        }
    }

    /// Whether a plan over so many paths, of which this is one, is left to the receiver: see `relays_put`.
    pub(crate) fn is_left_to_receiver(&self, paths: usize, path: &Path) -> bool {
        self.relays_put && paths == 1 && path.kind() == PathKind::Direct
    }

    /// A chunk's length at most, such that the staging memory holds [`SLOTS_MIN`] of them.
    #[must_use]
    pub fn chunk_bytes_max(&self) -> u64 {
        (self.staging_bytes / u64::from(SLOTS_MIN) / self.align * self.align).max(self.align)
    }

    /// Chunks of a path at most where its staging memory is too small for [`Options::chunks_max`]. Its share is no shorter for
    /// that: held to so many chunks of that memory's length, all paths were too short for a long message, which went directly.
    fn chunks_most(&self) -> u32 {
        self.chunks_max.max(CHUNKS_MOST)
    }

    /// # Errors
    /// What cannot be, in one line.
    pub fn check(&self) -> Result<(), PlanError> {
        let wrong = |text: String| Err(PlanError(text));
        if !self.direct && !self.relay && !self.host {
            return wrong("no path is allowed: direct, relay or host".into());
        }
        if !self.align.is_power_of_two() {
            return wrong(format!("alignment {} is no power of two", self.align));
        }
        if self.chunks_max == 0 {
            return wrong("0 chunks a path: must be at least 1".into());
        }
        if self.staging_bytes < self.align * u64::from(SLOTS_MIN) {
            return wrong(format!(
                "staging of {} bytes holds no {SLOTS_MIN} chunks of {}",
                self.staging_bytes, self.align
            ));
        }
        if !(0.0..1.0).contains(&self.gain_min) {
            return wrong(format!("least gain {}: must be from 0 to 1", self.gain_min));
        }
        Ok(())
    }
}

/// Why there is no plan; one line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize))]
pub struct PlanError(pub String);

/// One path of a plan.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PathPlan {
    /// The places that it leads over.
    pub path: Path,
    /// Where its part of the message begins.
    pub offset: u64,
    /// Length of its part.
    pub bytes: u64,
    /// Length of each chunk but the last.
    pub chunk_bytes: u64,
    /// Number of chunks.
    pub chunks: u32,
    /// Slots of `chunk_bytes` at each of its staging places; 0 without any.
    pub slots: u32,
    /// The GPU whose engine makes the copy of each hop.
    pub engines: [u8; MAX_HOPS],
    /// The copies of each hop go on two streams in turn.
    pub in_turn: bool,
    /// When it ends by the model, for the whole window.
    pub predicted_us: f64,
}

impl PathPlan {
    /// Where a chunk begins in the message, and its length.
    #[must_use]
    pub fn chunk(&self, index: u32) -> (u64, u64) {
        let begin = u64::from(index) * self.chunk_bytes;
        (
            self.offset + begin,
            self.chunk_bytes.min(self.bytes - begin),
        )
    }

    /// Bytes of staging that it needs at each of its staging places.
    #[must_use]
    pub fn staging_bytes(&self) -> u64 {
        u64::from(self.slots) * self.chunk_bytes
    }
}

/// How a message is moved.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Plan {
    /// The message.
    pub message: Message,
    /// Order of launches.
    pub order: Order,
    /// When the last message of the window has ended, by the model.
    pub predicted_us: f64,
    /// The same over the direct path alone; infinite if there is none.
    pub direct_us: f64,
    paths: [PathPlan; MAX_PATHS],
    len: u8,
}

#[cfg(any(test, feature = "golden"))]
impl Serialize for Plan {
    fn serialize<S: serde::Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let path = |part: &PathPlan| {
            let engines = part.engines[..part.path.hops()].to_vec();
            let bytes = (part.offset, part.bytes, part.chunk_bytes);
            let chunks = (part.chunks, part.slots, part.in_turn);
            (part.path.to_string(), bytes, chunks, engines)
        };
        let paths = self.paths().iter().map(path).collect::<Vec<_>>();
        (self.order, self.predicted_us, self.direct_us, paths).serialize(to)
    }
}

impl Plan {
    /// The paths, in the order of their launches.
    #[must_use]
    pub fn paths(&self) -> &[PathPlan] {
        &self.paths[..usize::from(self.len)]
    }

    /// Bandwidth by the model, GB/s.
    #[must_use]
    pub fn predicted_gb_s(&self) -> f64 {
        let bytes = self.message.bytes as f64 * f64::from(self.message.window);
        bytes / (self.predicted_us * crate::model::BYTES_PER_US)
    }

    /// How much faster than the direct path alone, by the model.
    #[must_use]
    pub fn gain(&self) -> f64 {
        self.direct_us / self.predicted_us
    }

    /// The part of the message that goes by paths of a kind.
    #[must_use]
    pub fn share(&self, kind: PathKind) -> f64 {
        let of_kind = self.paths().iter().filter(|path| path.path.kind() == kind);
        of_kind.map(|path| path.bytes).sum::<u64>() as f64 / (self.message.bytes as f64).max(1.0)
    }
}

/// Plans one message. Where many are planned, a [`Planner`] keeps what does not depend on the message.
///
/// # Errors
/// The GPUs are not there or are the same, or no path that is allowed leads from one to the other.
pub fn plan(
    topology: &Topology,
    model: &Model,
    occupancy: &Occupancy,
    message: &Message,
    options: &Options,
) -> Result<Plan, PlanError> {
    Planner::new(topology, model).plan(occupancy, message, options)
}

impl Planner {
    /// Plans one message with the default policy.
    ///
    /// # Errors
    /// As [`plan`].
    pub fn plan(
        &self,
        occupancy: &Occupancy,
        message: &Message,
        options: &Options,
    ) -> Result<Plan, PlanError> {
        self.plan_by(&FastestEnd, occupancy, message, options)
    }

    /// Plans one message with a policy.
    ///
    /// # Errors
    /// As [`plan`].
    pub fn plan_by(
        &self,
        policy: &dyn Policy,
        occupancy: &Occupancy,
        message: &Message,
        options: &Options,
    ) -> Result<Plan, PlanError> {
        options.check()?;
        let gpus = self.gpus();
        if let Some(gpu) = [message.from, message.to]
            .into_iter()
            .find(|gpu| usize::from(*gpu) >= gpus)
        {
            return Err(PlanError(format!("GPU {gpu} is not there: {gpus} GPUs")));
        }
        if message.from == message.to {
            return Err(PlanError(format!(
                "from GPU {} to itself: nothing to plan",
                message.from
            )));
        }
        if message.window == 0 {
            return Err(PlanError("a window of 0 messages".into()));
        }
        let candidates = self.between(message.from, message.to);
        let problem = shares::Problem::new(self, candidates, occupancy, message, options);
        if problem.allowed() == 0 {
            return Err(PlanError(format!(
                "no path that is allowed leads from GPU {} to GPU {}",
                message.from, message.to
            )));
        }
        let alone = problem.direct().map(|direct| problem.split(1 << direct));
        let chosen = policy.choose(&problem) & problem.allowed();
        let mut split = problem.split(if chosen == 0 {
            problem.fallback()
        } else {
            chosen
        });
        if let Some(alone) = alone.filter(|_| options.direct) {
            if alone.us <= split.us {
                split = alone;
            } else if alone.us - split.us < options.least_us(message.window, occupancy)
                && problem.is_for_host_alone(&split)
            {
                let without = Options {
                    host: false,
                    ..*options
                };
                return self.plan_by(policy, occupancy, message, &without);
            }
        }
        Ok(self.write_down(
            candidates,
            &split,
            alone.map(|alone| alone.us),
            message,
            options,
        ))
    }

    fn write_down(
        &self,
        candidates: &[paths::Candidate],
        split: &shares::Split,
        direct_us: Option<f64>,
        message: &Message,
        options: &Options,
    ) -> Plan {
        let mut plan = Plan {
            message: *message,
            order: options.order,
            predicted_us: split.us,
            direct_us: direct_us.unwrap_or(f64::INFINITY),
            paths: [PathPlan {
                path: candidates[0].path,
                offset: 0,
                bytes: 0,
                chunk_bytes: 0,
                chunks: 0,
                slots: 0,
                engines: [0; MAX_HOPS],
                in_turn: false,
                predicted_us: 0.0,
            }; MAX_PATHS],
            len: 0,
        };
        for part in split.parts() {
            let path = candidates[usize::from(part.candidate)].path;
            plan.paths[usize::from(plan.len)] = PathPlan {
                path,
                offset: 0,
                bytes: part.bytes,
                chunk_bytes: part.chunk_bytes,
                chunks: part.chunks,
                slots: part.slots,
                engines: [0; MAX_HOPS],
                in_turn: part.in_turn,
                predicted_us: part.us,
            };
            plan.len += 1;
        }
        // Staged parts come first in the message, each a multiple of the alignment; the odd end is the direct path's.
        let len = usize::from(plan.len);
        let mut offset = 0;
        for path in plan.paths[..len].iter_mut().rev() {
            path.offset = offset;
            offset += path.bytes;
        }
        self.assign_engines(&mut plan, message, options);
        plan
    }

    fn assign_engines(&self, plan: &mut Plan, message: &Message, options: &Options) {
        let len = usize::from(plan.len);
        let is_left = options.is_left_to_receiver(len, &plan.paths[0].path);
        let direct_is_put = !is_left && self.puts(message.from, message.to, message);
        let mut engines = paths::Engines::new(self, direct_is_put, options.relays_put);
        for path in &mut plan.paths[..len] {
            let put = engines.next(&path.path);
            for (hop, ends) in path.path.places().windows(2).enumerate() {
                path.engines[hop] = match (ends[0], ends[1]) {
                    (Place::Gpu(from), Place::Gpu(_)) if put[hop] => from,
                    (_, Place::Gpu(to)) => to,
                    (Place::Gpu(from), Place::Host) => from,
                    (Place::Host, Place::Host) => message.from,
                };
            }
        }
    }
}

#[cfg(test)]
mod tests;
