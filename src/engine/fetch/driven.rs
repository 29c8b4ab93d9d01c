//! A message over several paths of which this rank drives every copy (assignment one): it sees all GPUs involved.
//!
//! Nothing is asked of the sender but what every message asks: that its buffer stays as it is until it is acknowledged.

use std::sync::Arc;

use crate::config::Assign;
use crate::cuda::{reach, ContextKey, Error, Export, Mapping};
use crate::engine::fetch::trail::Trail;
use crate::engine::fetch::Ways;
use crate::engine::gpu::Gpu;
use crate::engine::route::{RouteUse, Routed};
use crate::engine::Env;
use crate::exec::{Drive, Request};
use crate::node::{Message, Peer};
use crate::plan::{PathKind, Plan};
use crate::stats::{self, Counter};
use crate::topology::{Place, MAX_GPUS};

/// Messages that are taken to follow each other where several of a pair are under way. The number itself would give each
/// message of a window a plan, and a graph, of its own.
const WINDOW: u32 = 16;
/// Plans that did not come to their end, after which no more are driven.
const FAILURES_MAX: u32 = 3;

/// Where a message goes.
#[derive(Clone, Copy)]
pub struct To {
    /// Context of the buffer.
    pub context: ContextKey,
    /// Its start.
    pub address: u64,
}

/// What became of the attempt to begin.
pub enum Begun {
    /// It is under way, or waits for others of this rank.
    Driven(Box<Driven>),
    /// One direct copy is best; the links are reserved for it.
    Direct(Box<Routed>),
    /// This is not the way for it.
    No,
}

/// What became of a step.
pub enum Step {
    /// Not at its end; whether something has been launched.
    Pending(bool),
    /// All bytes are there.
    Arrived,
    /// It did not come to its end, and nothing of it runs any more.
    Lost(Error),
}

/// A message whose copies are all this rank's.
pub struct Driven {
    routed: Routed,
    contexts: [Option<ContextKey>; MAX_GPUS],
    source: [u64; MAX_GPUS],
    target: u64,
    mappings: Vec<Arc<Mapping>>,
    drive: Option<Drive>,
    /// Messages that it is written over: nothing is launched before they are over, or launched by this rank as a whole, so that the
    /// driver keeps the order.
    after: Vec<After>,
    /// It did not come to its end.
    lost: Option<Error>,
    trail: Arc<Trail>,
    /// Plans of this rank that had ended when this one was last refused.
    seen: u64,
}

/// A message under way that another is written over.
struct After {
    trail: Arc<Trail>,
    /// All of it is.
    is_covered: bool,
}

impl After {
    fn all(ways: &Ways<'_>, place: (u64, u64)) -> Vec<After> {
        let rows = ways.overlapping(place).filter_map(|row| {
            let trail = Arc::clone(row.trail.as_ref()?);
            let is_covered = row.to == place;
            Some(After { trail, is_covered })
        });
        rows.collect()
    }

    fn is_under_way(&self) -> bool {
        !self.trail.is_over()
    }

    /// The plan behind which the other may be launched.
    fn drive(&self) -> Option<u64> {
        self.trail.drive().filter(|_| self.is_covered)
    }
}

impl Driven {
    /// Begins, if this rank is to drive messages and sees the GPUs; the message is one of a window so deep.
    pub fn begin(
        env: &Env,
        gpu: &mut Gpu,
        ways: &mut Ways<'_>,
        peer: &Peer,
        message: &Message,
        to: To,
        depth: u32,
    ) -> Begun {
        let is_one = env.config.assign == Assign::One;
        let Some(uuid) = ways.to().filter(|_| is_one) else {
            return Begun::No;
        };
        let is_seen = |uuid: &_| reach::by_uuid(uuid).is_some();
        if gpu.exec.failures() >= FAILURES_MAX || !is_seen(&message.device) || !is_seen(&uuid) {
            return Begun::No;
        }
        let usable = RouteUse {
            relay: &is_seen,
            // Of what the wide staging of this rank has left.
            host: gpu.exec.staging_in_host_max() >= ways.router.staging_bytes(),
            may_push: true,
            assign: Assign::One,
        };
        let routed = ways.router.plan(
            env,
            message.device,
            uuid,
            message.length,
            if depth > 1 { WINDOW } else { 1 },
            usable,
        );
        let Some(routed) = routed else {
            return Begun::No;
        };
        if !routed.is_split() {
            return Begun::Direct(Box::new(routed));
        }
        match Driven::launch(gpu, ways, peer, message, to, routed) {
            Ok(driven) => Begun::Driven(Box::new(driven)),
            Err(error) => {
                gpu.exec.note_failure();
                stats::add(Counter::DrivenFailed, 1);
                log::warn!(
                    "message from rank {}, several paths: {error}; taken straight from its GPU",
                    message.source
                );
                Begun::No
            }
        }
    }

    fn launch(
        gpu: &mut Gpu,
        ways: &Ways<'_>,
        peer: &Peer,
        message: &Message,
        to: To,
        routed: Routed,
    ) -> Result<Driven, Error> {
        let mut driven = Driven {
            contexts: contexts(gpu, ways, &routed.plan, to.context)?,
            routed,
            source: [0; MAX_GPUS],
            target: to.address,
            mappings: Vec::new(),
            drive: None,
            after: After::all(ways, (to.address, message.length)),
            lost: None,
            trail: Arc::new(Trail::undivided(false)),
            seen: u64::MAX,
        };
        let export = Export::from(message);
        if !export.holds(message.length) {
            return Err(Error::Exhausted("the sender's allocation"));
        }
        for path in driven.routed.plan.paths() {
            let reader = usize::from(path.engines[0]);
            if driven.source[reader] != 0 {
                continue;
            }
            let context = driven.contexts[reader].ok_or(Error::NoContext)?;
            let mapping = gpu.map(context, peer, &export)?;
            driven.source[reader] = mapping.address_of(export.offset);
            driven.mappings.push(mapping);
        }
        driven.try_launch(gpu)?;
        Ok(driven)
    }

    /// Launches, unless other messages have to end first; whether it did.
    fn try_launch(&mut self, gpu: &mut Gpu) -> Result<bool, Error> {
        self.after.retain(After::is_under_way);
        if self.seen == gpu.exec.ended() {
            return Ok(false);
        }
        let launched = self.after.iter().map(After::drive);
        let Some(after) = launched.collect::<Option<Vec<u64>>>() else {
            return Ok(false);
        };
        let request = Request {
            plan: &self.routed.plan,
            contexts: self.contexts,
            source: self.source,
            target: self.target,
            mappings: self.mappings.clone(),
            after,
        };
        match gpu.exec.launch(request) {
            Ok(drive) => {
                self.after.iter().for_each(|after| after.trail.follow());
                self.trail.set_drive(drive.number);
                self.drive = Some(drive);
                Ok(true)
            }
            Err(Error::Exhausted(_)) if gpu.exec.is_busy() => {
                self.seen = gpu.exec.ended();
                Ok(false)
            }
            Err(error) => Err(error),
        }
    }

    /// What messages behind it that are received in the same place have to know.
    pub fn trail(&self) -> &Arc<Trail> {
        &self.trail
    }

    /// Moves it on, without waiting.
    pub fn poll(&mut self, gpu: &mut Gpu) -> Step {
        if let Some(error) = self.lost {
            self.after.retain(After::is_under_way);
            return match (self.after.is_empty(), self.trail.has_follower()) {
                (false, _) => Step::Pending(false),
                (true, false) => Step::Lost(error),
                // What follows it may have been written.
                (true, true) => Step::Arrived,
            };
        }
        let ended = match &mut self.drive {
            Some(drive) => gpu.exec.poll(drive).map(|done| (done, false)),
            None => self.try_launch(gpu).map(|launched| (false, launched)),
        };
        match ended {
            Ok((true, _)) => Step::Arrived,
            Ok((false, launched)) => Step::Pending(launched),
            Err(error) => {
                // What is received in its place from now on waits for what is done instead.
                self.trail.set_drive(0);
                gpu.exec.note_failure();
                stats::add(Counter::DrivenFailed, 1);
                self.lost = Some(error);
                Step::Pending(true)
            }
        }
    }

    /// Bytes by the kind of path that they came by.
    pub fn bytes(&self) -> Bytes {
        let mut bytes = [
            (Counter::SeveralDirectBytes, 0),
            (Counter::SeveralRelayBytes, 0),
            (Counter::SeveralHostBytes, 0),
            (Counter::SeveralOvertakenBytes, 0),
        ];
        for path in self.routed.plan.paths() {
            let at = match path.path.kind() {
                _ if self.lost.is_some() => 3,
                PathKind::Direct => 0,
                PathKind::Relay => 1,
                PathKind::Host => 2,
            };
            bytes[at].1 += path.bytes;
        }
        bytes
    }
}

/// Bytes, and where they are counted.
pub type Bytes = [(Counter, u64); 4];

/// Counts bytes by the kind of path that they came by.
pub fn count(bytes: &Bytes) {
    for (counter, bytes) in bytes {
        stats::add(*counter, *bytes);
    }
}

/// The context of each GPU of a plan: the buffer's own for the receiver's, elsewhere the primary one.
fn contexts(
    gpu: &mut Gpu,
    ways: &Ways<'_>,
    plan: &Plan,
    own: ContextKey,
) -> Result<[Option<ContextKey>; MAX_GPUS], Error> {
    let mut contexts = [None; MAX_GPUS];
    let paths = plan.paths().iter();
    let numbers = paths.flat_map(|path| {
        let places = path.path.places().iter().filter_map(|place| match place {
            Place::Gpu(number) => Some(*number),
            Place::Host => None,
        });
        places.chain(path.engines[..path.path.hops()].iter().copied())
    });
    for number in numbers {
        let at = usize::from(number);
        if at >= MAX_GPUS || contexts[at].is_some() {
            continue;
        }
        contexts[at] = Some(if number == plan.message.to {
            own
        } else {
            let uuid = ways.router.uuid(Place::Gpu(number));
            let device = uuid.and_then(|uuid| reach::by_uuid(&uuid));
            gpu.exec.hold(device.ok_or(Error::NoContext)?.ordinal)?
        });
    }
    Ok(contexts)
}
