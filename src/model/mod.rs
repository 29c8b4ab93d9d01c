//! What a copy takes, as numbers: the extended Hockney model.
//!
//! A copy of `m` bytes takes `alpha + m / beta`, where `alpha` is what each copy costs before its bytes move
//! and `beta` the rate of its hop. A staged path is a pipeline of such copies, hop behind hop, in `c` chunks.
//! With the time of one chunk on hop `j`, `t_j = alpha_j + m / (c beta_j)`, the whole takes
//!
//! ```text
//! T = startup + sum(epsilon) + sum(t_j) + (c - 1) max(t_j)
//! ```
//!
//! where `epsilon` is the hand-over at each staging place: from the end of the copy into it to the start of
//! the copy out of it. The first chunk passes all hops one after the other, each later one follows at the
//! pace of the slowest hop. Messages of a window follow one another in the same pipeline, so that only the
//! first pays for filling it.
//!
//! The numbers are data. [`Model::nominal`] takes them from a topology until the node has been measured;
//! measured ones are kept in a file ([`cache`]) that is valid for one machine and driver.

pub mod cache;
pub mod fit;
mod host_part;
pub mod links;

pub use host_part::HostPart;

use crate::topology::{Fabric, Place, SegmentKind, Topology};
use serde::{Deserialize, Serialize};

/// A copy over one hop by one engine.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// What each copy costs before its bytes move.
    pub alpha_us: f64,
    /// Rate, GB/s (10^9 bytes a second).
    pub gb_s: f64,
    /// The part of itself by which the rate falls short now and then. Shares are computed with the rate less
    /// this: a path that is given too much holds up the whole message, one that is given too little only
    /// helps less.
    #[serde(default)]
    pub spread: f64,
    /// The cost of each copy in a batch after the first; None if nobody has measured that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub batched_us: Option<f64>,
}

/// Whether a number can be a time.
fn time(what: &str, us: f64) -> Result<(), String> {
    match us.is_finite() && us >= 0.0 {
        true => Ok(()),
        false => Err(format!("{what} is {us} us, must not be negative")),
    }
}

impl Line {
    /// Whether the numbers can be used.
    ///
    /// # Errors
    /// The first that cannot be used, in one line.
    pub fn check(&self) -> Result<(), String> {
        time("alpha_us", self.alpha_us)?;
        time("batched_us", self.batched_us.unwrap_or(0.0))?;
        if !(self.gb_s.is_finite() && self.gb_s > 0.0) {
            return Err(format!("gb_s is {}, must be positive", self.gb_s));
        }
        if !(0.0..1.0).contains(&self.spread) {
            return Err(format!("spread is {}, must be from 0 to 1", self.spread));
        }
        Ok(())
    }

    /// The rate to count on.
    #[must_use]
    pub fn sure_gb_s(&self) -> f64 {
        self.gb_s * (1.0 - self.spread)
    }
}

/// One directed hop.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct HopModel {
    /// From.
    pub from: Place,
    /// To.
    pub to: Place,
    /// By the engine of the source.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub push: Option<Line>,
    /// By the engine of the destination.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull: Option<Line>,
}

/// What staging costs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Staging {
    /// From the end of the copy of a chunk into staging memory to the start of the copy out of it.
    pub epsilon_us: f64,
    /// What each chunk adds to the copy into staging memory: its flag, and a launch that nothing hides.
    pub chunk_us: f64,
}

/// Staging costs of one path, where they differ from those of its kind.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PathModel {
    /// From.
    pub from: Place,
    /// Staging places, in order.
    pub via: Vec<Place>,
    /// To.
    pub to: Place,
    /// The costs, at each staging place.
    pub staging: Staging,
}

/// The rate of a segment for all who use it together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct SegmentModel {
    /// Which.
    pub kind: SegmentKind,
    /// Rate, GB/s.
    pub gb_s: f64,
}

/// How long calls take the thread that makes them.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Calls {
    /// A launch on a stream in which something is under way.
    pub launch_us: f64,
    /// The additional cost of a launch on a stream in which nothing is under way.
    pub idle_us: f64,
    /// To record an event behind a copy, or to let a stream wait for one.
    pub event_us: f64,
}

/// All numbers of a node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Model {
    /// A launch, to the calling thread.
    pub launch_us: f64,
    /// The further costs of a thread that launches many copies, if they were measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calls: Option<Calls>,
    /// From the end of the last copy until the waiter knows.
    pub finish_us: f64,
    /// From the end of a copy to the start of one by another GPU that waits for its event, beyond the wait of
    /// a copy behind it on its own stream; if it was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hand_over_us: Option<f64>,
    /// Staging on a GPU.
    pub relay: Staging,
    /// Staging in host memory.
    pub host: Staging,
    /// How the GPUs are connected, if copies to two GPUs at once have shown it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fabric: Option<Fabric>,
    /// Directed hops.
    pub hops: Vec<HopModel>,
    /// Capacities of segments. A segment without one carries what its fastest hop does.
    #[serde(default)]
    pub segments: Vec<SegmentModel>,
    /// Paths with staging costs of their own.
    #[serde(default)]
    pub paths: Vec<PathModel>,
}

/// The hand-over of a chunk in host memory between two processes, each of which drives its own GPU and polls
/// for the other's flags. From a measurement on H200: in chunks of 1 MiB, which take 19 us on the wire, a
/// path passes 30 GB/s. That is 35 us a chunk, of which 2.5 are the copy's own. See
/// `docs/decisions/host-hand-over-cost.md`.
const HOST_HAND_OVER_US: f64 = 13.5;

/// [`Model::hand_over_us`] until it is measured: as found on H200 (`docs/results/h200-x2-beside.txt`).
const EVENT_HAND_OVER_US: f64 = 1.5;

/// The parts of a model that no measurement gives, by their names in JSON: the cost of a hand-over between
/// processes.
pub const ASSUMED: [&str; 2] = ["relay", "host"];

/// How far the rate of a PCIe link is to be trusted: on H200 a host share two points too large (of a tenth of
/// the message) costs more than the path gains.
pub const PCIE_SPREAD: f64 = 0.05;

impl Model {
    /// The model that follows from the figures of a topology.
    #[must_use]
    pub fn nominal(topology: &Topology) -> Model {
        let costs = &topology.costs;
        let hop = |(from, to, hop): (Place, Place, &crate::topology::Hop)| {
            let line = |extra: f64| Line {
                alpha_us: costs.setup_us + extra,
                gb_s: hop.gb_s,
                spread: if hop.is_nvlink() { 0.0 } else { PCIE_SPREAD },
                batched_us: None,
            };
            let (mut push, mut pull) = (Some(line(0.0)), Some(line(costs.pull_extra_us)));
            if from == Place::Host {
                (push, pull) = (None, Some(line(0.0)));
            }
            if to == Place::Host {
                pull = None;
            }
            HopModel {
                from,
                to,
                push,
                pull,
            }
        };
        Model {
            launch_us: costs.launch_us,
            calls: None,
            finish_us: costs.finish_us,
            hand_over_us: None,
            relay: Staging {
                // The flag is written, seen at the next look but one, and answered by a launch.
                epsilon_us: costs.flag_us + 2.0 * costs.query_us + costs.launch_us,
                chunk_us: costs.flag_us,
            },
            host: Staging {
                epsilon_us: HOST_HAND_OVER_US,
                chunk_us: HOST_HAND_OVER_US,
            },
            fabric: None,
            hops: topology.hops().map(hop).collect(),
            segments: topology
                .segments
                .iter()
                .map(|segment| SegmentModel {
                    kind: segment.kind,
                    gb_s: segment.gb_s,
                })
                .collect(),
            paths: Vec::new(),
        }
    }

    /// The same node, where one process makes all copies of a message: chunks are handed over by an event or
    /// an edge of a graph, and nobody polls between them.
    #[must_use]
    pub fn of_one(&self) -> Model {
        let staging = Staging {
            epsilon_us: self.hand_over_us.unwrap_or(EVENT_HAND_OVER_US),
            chunk_us: 0.0,
        };
        Model {
            relay: staging,
            host: staging,
            paths: Vec::new(),
            ..self.clone()
        }
    }

    /// The numbers of a hop.
    #[must_use]
    pub fn hop(&self, from: Place, to: Place) -> Option<&HopModel> {
        self.hops
            .iter()
            .find(|hop| hop.from == from && hop.to == to)
    }

    /// The staging costs of a path.
    #[must_use]
    pub fn staging(&self, from: Place, via: &[Place], to: Place) -> Staging {
        let own = self
            .paths
            .iter()
            .find(|path| path.from == from && path.to == to && path.via == via);
        match (own, via) {
            (Some(path), _) => path.staging,
            (None, [Place::Host]) => self.host,
            (None, _) => self.relay,
        }
    }

    /// Whether the rate of the host's memory was measured for several at once, not only for one.
    #[must_use]
    pub fn knows_host(&self) -> bool {
        self.segments.iter().any(|segment| segment.kind.is_host())
    }

    /// The rates of segments, by their index in the topology; the host's memory counts with a part of its
    /// rate.
    #[must_use]
    pub fn capacities(&self, topology: &Topology, host: HostPart) -> Vec<f64> {
        let told = |kind: SegmentKind| {
            let segment = self.segments.iter().find(|segment| segment.kind == kind);
            segment.map(|segment| segment.gb_s)
        };
        let kinds = topology.segments.iter().map(|segment| segment.kind);
        let (mut capacities, is_at_least): (Vec<f64>, Vec<bool>) = kinds
            .map(|kind| match told(kind) {
                // At least the rate that a single copy reaches.
                Some(gb_s) if kind.is_host() => (host.factor() * gb_s, true),
                Some(gb_s) => (gb_s, false),
                None => (0.0, true),
            })
            .unzip();
        for hop in &self.hops {
            let Some(way) = topology.hop(hop.from, hop.to) else {
                continue;
            };
            let fastest = [hop.push, hop.pull]
                .iter()
                .flatten()
                .map(|line| line.gb_s)
                .fold(0.0, f64::max);
            for segment in way.segments().iter().map(|segment| usize::from(*segment)) {
                if is_at_least[segment] {
                    capacities[segment] = capacities[segment].max(fastest);
                }
            }
        }
        for (segment, capacity) in topology.segments.iter().zip(&mut capacities) {
            // It may have been found to carry more than the fastest copy takes.
            if segment.kind.is_host() && told(segment.kind).is_none() {
                *capacity *= host.factor().max(1.0);
            }
        }
        capacities
    }

    /// Whether the numbers can be used, and each hop of a topology has some, as is the case if all of it was
    /// measured at once.
    ///
    /// # Errors
    /// The first that is wrong or missing, in one line.
    pub fn check_for(&self, topology: &Topology) -> Result<(), String> {
        self.check()?;
        let is_missing = |from: Place, to: Place| {
            let hop = self.hop(from, to);
            hop.is_none_or(|hop| hop.push.is_none() && hop.pull.is_none())
        };
        let mut hops = topology.hops();
        match hops.find(|(from, to, _)| is_missing(*from, *to)) {
            Some((from, to, _)) => Err(format!("no numbers of the hop from {from} to {to}")),
            None => Ok(()),
        }
    }

    /// Whether the numbers can be used.
    ///
    /// # Errors
    /// The first that cannot be used, in one line.
    pub fn check(&self) -> Result<(), String> {
        time("launch_us", self.launch_us)?;
        if let Some(calls) = &self.calls {
            time("launch_us", calls.launch_us)?;
            time("idle_us", calls.idle_us)?;
            time("event_us", calls.event_us)?;
        }
        time("finish_us", self.finish_us)?;
        time("hand_over_us", self.hand_over_us.unwrap_or(0.0))?;
        let of_paths = self.paths.iter().map(|path| &path.staging);
        for staging in [&self.relay, &self.host].into_iter().chain(of_paths) {
            time("epsilon_us", staging.epsilon_us)?;
            time("chunk_us", staging.chunk_us)?;
        }
        for hop in &self.hops {
            for line in [hop.push, hop.pull].iter().flatten() {
                line.check()
                    .map_err(|why| format!("{} to {}: {why}", hop.from, hop.to))?;
            }
        }
        let usable = |segment: &&SegmentModel| segment.gb_s.is_finite() && segment.gb_s > 0.0;
        match self.segments.iter().find(|segment| !usable(segment)) {
            Some(bad) => Err(format!(
                "{}: gb_s is {}, must be positive",
                bad.kind, bad.gb_s
            )),
            None => Ok(()),
        }
    }
}

/// Bytes that a rate of one GB/s moves in a microsecond.
pub const BYTES_PER_US: f64 = 1e3;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::topology::tests::shipped;

    #[test]
    fn a_nominal_model_has_the_figures_of_its_topology() {
        let topology = shipped("beluga");
        let model = Model::nominal(&topology);
        model.check().expect("usable");
        let hop = model.hop(Place::Gpu(0), Place::Gpu(1)).expect("a hop");
        assert_eq!(
            hop.push.map(|line| (line.alpha_us, line.gb_s)),
            Some((2.5, 48.0))
        );
        assert_eq!(hop.pull.map(|line| line.alpha_us), Some(5.3));
        // A copy between host and device is driven by the device.
        let down = model.hop(Place::Host, Place::Gpu(1)).expect("a hop");
        assert!(down.push.is_none() && down.pull.is_some());
    }

    #[test]
    fn a_segment_that_was_not_measured_carries_its_fastest_hop() {
        let topology = shipped("hgx-h200");
        let mut model = Model::nominal(&topology);
        model.segments.clear();
        let fast = Line {
            alpha_us: 1.0,
            gb_s: 400.0,
            spread: 0.0,
            batched_us: None,
        };
        let hop = model
            .hops
            .iter_mut()
            .find(|hop| hop.from == Place::Gpu(2) && hop.to == Place::Gpu(3));
        hop.expect("a hop").push = Some(fast);
        let capacities = model.capacities(&topology, HostPart::ALL);
        let of = |kind| {
            let at = topology
                .segments
                .iter()
                .position(|segment| segment.kind == kind);
            capacities[at.expect("a segment")]
        };
        assert_eq!(of(SegmentKind::PortOut(2)), 400.0);
        assert_eq!(of(SegmentKind::PortOut(1)), 396.0);
        assert_eq!(of(SegmentKind::HostWrite), 55.0);
    }

    #[test]
    fn numbers_that_cannot_be_are_refused() {
        let good = Model::nominal(&shipped("narval"));
        let broken: [fn(&mut Model); 6] = [
            |model| {
                let push = model.hops[0].push.as_mut();
                push.expect("a hop").batched_us = Some(-0.5);
            },
            |model| model.launch_us = f64::NAN,
            |model| model.host.chunk_us = -1.0,
            |model| {
                model.hops[3].push = Some(Line {
                    alpha_us: 1.0,
                    gb_s: 0.0,
                    spread: 0.0,
                    batched_us: None,
                })
            },
            |model| {
                model.hops[0].push = Some(Line {
                    alpha_us: 1.0,
                    gb_s: 1.0,
                    spread: 1.0,
                    batched_us: None,
                })
            },
            |model| model.segments[0].gb_s = -3.0,
        ];
        for change in broken {
            let mut model = good.clone();
            change(&mut model);
            assert!(model.check().is_err());
        }
    }
}
