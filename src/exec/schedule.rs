//! A plan as steps: its graph of copies, without addresses and without the order that a stream gives by
//! itself.
//!
//! A *lane* is a hop of a path: its copies follow one another. A *ring* is the staging of a path behind one
//! of its hops. The place of bytes is given as a [`Base`] and an offset, so that a schedule serves all messages
//! of its shape.

use crate::plan::graph::{End, Why};
use crate::plan::{Engine, PathPlan, Plan};
use crate::topology::{Place, MAX_GPUS};

/// Copies of a plan that one process drives, at most: all are launched at once.
pub const STEPS_MAX: usize = 4096;

/// What an address is relative to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    /// The message at its sender.
    Source,
    /// The message at its receiver.
    Target,
    /// A ring of the schedule.
    Ring(u8),
}

/// Where a copy reads or writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct At {
    /// What the offset is relative to.
    pub base: Base,
    /// Bytes from there.
    pub offset: u64,
}

/// Copies that follow one another, made by one engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    /// What makes them.
    pub engine: Engine,
    /// Where they read.
    pub from: Base,
    /// Where they write.
    pub to: Base,
    /// Number among the lanes of the same GPU and direction.
    pub number: u32,
    /// It brings bytes to the receiver.
    pub is_last: bool,
}

impl Lane {
    /// The GPU whose engine makes the copies.
    #[must_use]
    pub fn gpu(&self) -> u8 {
        match self.engine {
            Engine::Peer(gpu) | Engine::ToHost(gpu) | Engine::ToDevice(gpu) => gpu,
        }
    }
}

/// A staging ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ring {
    /// Where.
    pub at: Place,
    /// Its length.
    pub bytes: u64,
}

/// A copy, and the copies of other lanes that it waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Number of its lane.
    pub lane: u8,
    /// Number of its chunk in its path.
    pub chunk: u32,
    /// From.
    pub from: At,
    /// To.
    pub to: At,
    /// Length.
    pub bytes: u64,
    /// The copy that brings the bytes that this one moves.
    pub data: Option<u32>,
    /// The copy that empties the slot that it fills.
    pub slot: Option<u32>,
}

/// A plan without addresses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Schedule {
    /// The copies, each behind all that it waits for.
    pub steps: Vec<Step>,
    /// The lanes.
    pub lanes: Vec<Lane>,
    /// The rings.
    pub rings: Vec<Ring>,
    /// For each lane, how many chunks can be launched together: see [`together`].
    pub together: Vec<u32>,
    /// GPUs that the copies run on or are staged on, as bits.
    pub gpus: u32,
    /// GPUs of the sender and of the receiver.
    pub ends: [u8; 2],
}

/// What a schedule, and all that is kept of it, depends on.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Shape(Box<[u64]>);

impl Shape {
    /// The shape of a plan.
    #[must_use]
    pub fn of(plan: &Plan) -> Shape {
        let place = |place: &Place| match place {
            Place::Gpu(gpu) => u64::from(*gpu),
            Place::Host => u64::from(u8::MAX),
        };
        let mut words = vec![
            u64::from(plan.message.from) << 8 | u64::from(plan.message.to),
            plan.message.bytes,
            plan.order as u64,
        ];
        for path in plan.paths() {
            let places = path.path.places();
            let over = places.iter().fold(1, |word, next| word << 8 | place(next));
            let engines = path
                .engines
                .iter()
                .fold(0, |word, engine| word << 8 | u64::from(*engine));
            words.extend([
                over,
                engines,
                path.offset,
                path.bytes,
                path.chunk_bytes,
                u64::from(path.chunks) << 32 | u64::from(path.slots),
            ]);
        }
        Shape(words.into())
    }
}

/// How many chunks of a path can be launched together without emptying its pipeline: half a ring.
#[must_use]
pub fn together(path: &PathPlan) -> u32 {
    (path.slots / 2).max(1)
}

impl Schedule {
    /// The schedule of a plan. `None` if it is too long to be launched in one go, or uses GPUs that are not
    /// possible.
    #[must_use]
    #[allow(clippy::too_many_lines, reason = "one pass over a plan's graph")]
    pub fn of(plan: &Plan) -> Option<Schedule> {
        let copies: u64 = plan
            .paths()
            .iter()
            .map(|path| u64::from(path.chunks) * path.path.hops() as u64)
            .sum();
        if copies > STEPS_MAX as u64 {
            return None;
        }
        let mut schedule = Schedule {
            ends: [plan.message.from, plan.message.to],
            ..Schedule::default()
        };
        // Number of a path's first lane, and of its first ring.
        let mut firsts = Vec::new();
        for path in plan.paths() {
            firsts.push((schedule.lanes.len(), schedule.rings.len()));
            let first_ring = schedule.rings.len();
            let hops = path.path.hops();
            for at in path.path.via() {
                schedule.rings.push(Ring {
                    at: *at,
                    // A window's later messages have rings of their own.
                    bytes: u64::from(path.slots.min(path.chunks)) * path.chunk_bytes,
                });
            }
            for (hop, ends) in path.path.places().windows(2).enumerate() {
                let engine = match (ends[0], ends[1]) {
                    (Place::Host, _) => Engine::ToDevice(path.engines[hop]),
                    (_, Place::Host) => Engine::ToHost(path.engines[hop]),
                    _ => Engine::Peer(path.engines[hop]),
                };
                let alike = schedule.lanes.iter().filter(|lane| lane.engine == engine);
                let number = alike.count() as u32;
                schedule.lanes.push(Lane {
                    engine,
                    from: if hop == 0 {
                        Base::Source
                    } else {
                        Base::Ring((first_ring + hop - 1) as u8)
                    },
                    to: if hop + 1 == hops {
                        Base::Target
                    } else {
                        Base::Ring((first_ring + hop) as u8)
                    },
                    number,
                    is_last: hop + 1 == hops,
                });
                schedule.together.push(together(path));
            }
        }
        let graph = plan.graph();
        for copy in &graph.copies {
            let path = &plan.paths()[usize::from(copy.path)];
            let number = firsts[usize::from(copy.path)].0 + usize::from(copy.hop);
            let lane = schedule.lanes[number];
            let at = |base: Base, end: End| At {
                base,
                offset: match end {
                    End::Buffer { offset, .. } => offset,
                    End::Slot { slot, .. } => u64::from(slot) * path.chunk_bytes,
                },
            };
            schedule.steps.push(Step {
                lane: number as u8,
                chunk: copy.chunk,
                from: at(lane.from, copy.from),
                to: at(lane.to, copy.to),
                bytes: copy.bytes,
                data: None,
                slot: None,
            });
        }
        for edge in &graph.edges {
            let step = &mut schedule.steps[edge.after as usize];
            match edge.why {
                Why::Data => step.data = Some(edge.before),
                Why::Slot => step.slot = Some(edge.before),
                Why::Stream => {}
            }
        }
        let on = |gpu: u8| (usize::from(gpu) < MAX_GPUS).then(|| 1 << gpu);
        for lane in &schedule.lanes {
            schedule.gpus |= on(lane.gpu())?;
        }
        for ring in &schedule.rings {
            if let Place::Gpu(gpu) = ring.at {
                schedule.gpus |= on(gpu)?;
            }
        }
        Some(schedule)
    }

    /// The staging place for which a lane exists: a failure there does not concern the two ends of the
    /// message. `None` for a direct copy.
    #[must_use]
    pub fn place(&self, lane: &Lane) -> Option<Place> {
        let maker = self.relay(lane.gpu());
        let ring = |base| match base {
            Base::Ring(ring) => self.rings.get(usize::from(ring)).map(|ring| ring.at),
            Base::Source | Base::Target => None,
        };
        maker.or_else(|| ring(lane.to)).or_else(|| ring(lane.from))
    }

    /// A GPU as a staging place. `None` for an end.
    #[must_use]
    pub fn relay(&self, gpu: u8) -> Option<Place> {
        (!self.ends.contains(&gpu)).then_some(Place::Gpu(gpu))
    }

    /// The GPUs that take part.
    pub fn gpus(&self) -> impl Iterator<Item = u8> {
        let gpus = self.gpus;
        (0..MAX_GPUS as u8).filter(move |gpu| gpus & (1 << gpu) != 0)
    }

    /// Whether launching chunks together changes anything.
    #[must_use]
    pub fn has_batches(&self) -> bool {
        self.units(true).len() < self.steps.len()
    }

    /// The steps as they are launched: each alone, or (`together`) chunks of a lane that follow one another
    /// in a batch. Each unit is behind all that it waits for: a batch of chunks waits for slots that batches
    /// before it empty.
    #[must_use]
    pub fn units(&self, together: bool) -> Vec<Unit> {
        let mut units: Vec<Unit> = Vec::new();
        // Number of the unit of each step; the open unit of each lane.
        let mut unit_of = vec![usize::MAX; self.steps.len()];
        let mut open: Vec<Vec<u32>> = vec![Vec::new(); self.lanes.len()];
        let last_of = |lane: usize| {
            let chunks = self
                .steps
                .iter()
                .filter(|step| usize::from(step.lane) == lane);
            chunks.map(|step| step.chunk).max().unwrap_or(0)
        };
        let lasts: Vec<u32> = (0..self.lanes.len()).map(last_of).collect();
        for (number, step) in self.steps.iter().enumerate() {
            let lane = usize::from(step.lane);
            open[lane].push(number as u32);
            let most = if together { self.together[lane] } else { 1 };
            if (open[lane].len() as u32) < most && step.chunk < lasts[lane] {
                continue;
            }
            let steps = std::mem::take(&mut open[lane]);
            let mut waits: Vec<usize> = steps
                .iter()
                .flat_map(|step| {
                    let step = &self.steps[*step as usize];
                    [step.data, step.slot]
                })
                .flatten()
                .map(|before| unit_of[before as usize])
                .collect();
            waits.sort_unstable();
            waits.dedup();
            // Of the units of one lane, the latest is enough.
            let kept: Vec<usize> = waits
                .iter()
                .copied()
                .filter(|unit| {
                    let lane = units[*unit].lane;
                    !waits
                        .iter()
                        .any(|later| later > unit && units[*later].lane == lane)
                })
                .collect();
            for step in &steps {
                unit_of[*step as usize] = units.len();
            }
            for unit in &kept {
                units[*unit].is_awaited = true;
            }
            units.push(Unit {
                lane: step.lane,
                steps,
                waits: kept,
                is_awaited: false,
            });
        }
        units
    }
}

/// Copies launched together on the stream of a lane.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unit {
    /// Number of the lane.
    pub lane: u8,
    /// The steps.
    pub steps: Vec<u32>,
    /// Numbers of the units of other lanes that it waits for.
    pub waits: Vec<usize>,
    /// Another unit waits for it.
    pub is_awaited: bool,
}

/// The addresses that a schedule runs with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Binding {
    /// Start of the message at its sender, as the engine of each GPU reaches it.
    pub source: [u64; MAX_GPUS],
    /// Start of the message at its receiver.
    pub target: u64,
    /// Start of each ring.
    pub rings: Vec<u64>,
}

impl Binding {
    /// An address, for a copy that the engine of a GPU makes.
    #[must_use]
    pub fn address(&self, gpu: u8, at: At) -> u64 {
        let base = match at.base {
            Base::Source => self.source[usize::from(gpu)],
            Base::Target => self.target,
            Base::Ring(ring) => self.rings[usize::from(ring)],
        };
        base + at.offset
    }
}
