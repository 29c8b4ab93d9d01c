//! A message over several paths of which this rank drives every copy (assignment one): it sees all GPUs involved.
//!
//! Nothing is asked of the sender but what every message asks: that its buffer stays as it is until it is acknowledged.

use std::sync::Arc;

use crate::config::Assign;
use crate::cuda::{reach, ContextKey, Error, Export, Mapping, Uuid};
use crate::engine::fault::{self, Of, Path};
use crate::engine::fetch::trail::Trail;
use crate::engine::fetch::Ways;
use crate::engine::gpu::{is_for_now, Gpu};
use crate::engine::route::{RouteUse, Routed};
use crate::engine::story::Parts;
use crate::engine::Env;
use crate::exec::{Drive, Ended, Failure, Request};
use crate::node::{Message, Peer};
use crate::plan::{PathKind, Plan};
use crate::stats::{self, Counter};
use crate::topology::{Place, MAX_GPUS};

/// Messages that are taken to follow each other where several of a pair are under way. The number itself would give each
/// message of a window a plan, and a graph, of its own.
const WINDOW: u32 = 16;
/// Plans that did not come to their end because of the path over one place, after which none leads over it.
const PLACE_FAILURES_MAX: u32 = 2;
/// Plans that did not come to their end for another reason, after which no more are driven.
const FAILURES_MAX: u32 = 3;

/// Plans that come to their end, after which those that did not before do not count any more.
const FORGIVEN_AFTER: u32 = 8;

/// What has failed of the plans that this rank drove.
#[derive(Default)]
pub struct Troubles {
    /// By the places that messages were led over: GPUs, and host memory (`None`).
    places: Vec<(Option<Uuid>, Trouble)>,
    /// What no such place has to do with.
    others: Trouble,
}

/// How often something has failed of late.
#[derive(Clone, Copy, Default)]
struct Trouble {
    failures: u32,
    /// Plans that came to their end since.
    since: u32,
}

impl Trouble {
    /// Once more. Whether that was the last time.
    fn note(&mut self, most: u32) -> bool {
        self.failures += 1;
        self.since = 0;
        self.failures == most
    }

    /// A plan has come to its end. What has failed for the last time stays so.
    fn forgive(&mut self, most: u32) {
        self.since = self.since.saturating_add(1);
        if self.since >= FORGIVEN_AFTER && self.failures < most {
            self.failures = 0;
        }
    }
}

impl Troubles {
    /// Whether messages may be led over a place.
    fn may_lead_over(&self, place: Option<&Uuid>) -> bool {
        let known = self.places.iter().find(|(of, _)| of.as_ref() == place);
        known.is_none_or(|(_, trouble)| trouble.failures < PLACE_FAILURES_MAX)
    }

    /// Whether this rank drives messages no more.
    fn is_end(&self) -> bool {
        self.others.failures >= FAILURES_MAX
    }

    /// One more. Whether it was the last: there will be no more over this place or, without one, none at all.
    fn note(&mut self, place: Option<Option<Uuid>>) -> bool {
        let Some(place) = place else {
            return self.others.note(FAILURES_MAX);
        };
        let known = self.places.iter().position(|(of, _)| *of == place);
        let at = known.unwrap_or_else(|| {
            self.places.push((place, Trouble::default()));
            self.places.len() - 1
        });
        self.places[at].1.note(PLACE_FAILURES_MAX)
    }

    /// A plan that leads over these places has come to its end.
    fn forgive(&mut self, places: impl Iterator<Item = Option<Uuid>>) {
        self.others.forgive(FAILURES_MAX);
        if self.places.is_empty() {
            return;
        }
        for place in places {
            let known = self.places.iter_mut().find(|(of, _)| *of == place);
            if let Some((_, trouble)) = known {
                trouble.forgive(PLACE_FAILURES_MAX);
            }
        }
    }
}

/// Takes note of a message that did not come to its end, and says so; `again` is what is done instead.
fn note(
    gpu: &mut Gpu,
    peer: &Peer,
    failure: &Failure,
    uuid: impl Fn(u8) -> Option<Uuid>,
    again: &str,
) {
    // A GPU without an identity is as good as none.
    let place = match failure.place {
        Some(Place::Host) => Some(None),
        Some(Place::Gpu(number)) => uuid(number).map(Some),
        None => None,
    };
    let is_last = gpu.driven.note(place);
    stats::add(Counter::DrivenFailed, 1);
    stats::add(
        Counter::PlacesRetired,
        u64::from(is_last && place.is_some()),
    );
    let name = place.map(|uuid| match uuid {
        None => "host memory".to_owned(),
        Some(uuid) => match reach::by_uuid(&uuid) {
            Some(device) => format!("GPU {}", device.ordinal),
            None => "a GPU".to_owned(),
        },
    });
    let why = match &name {
        Some(name) => format!("over {name}: {failure}"),
        None => failure.to_string(),
    };
    let end = match &name {
        _ if !is_last => again.to_owned(),
        Some(name) => format!("{again}, and none is led over {name} any more"),
        None => format!("{again}, and this rank drives no message alone any more"),
    };
    // What fails because the sender has died is told when its messages are given up.
    if peer.goes_on() {
        fault::survived(Of::From(peer.world_rank()), Path::Several, &why, &end);
    }
}

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
    /// It did not come to its end, which has been told, and nothing of it runs any more.
    Lost,
}

/// A message whose copies are all this rank's.
pub struct Driven {
    peer: Arc<Peer>,
    routed: Routed,
    /// The GPUs, by their numbers in the plan.
    gpus: [Option<Uuid>; MAX_GPUS],
    contexts: [Option<ContextKey>; MAX_GPUS],
    source: [u64; MAX_GPUS],
    target: u64,
    mappings: Vec<Arc<Mapping>>,
    drive: Option<Drive>,
    /// Messages that it is written over: nothing is launched before they are over, or launched by this rank as a whole, so that the
    /// driver keeps the order.
    after: Vec<After>,
    /// It did not come to its end.
    is_lost: bool,
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
            let trail = row.trail.clone()?;
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
    #[allow(
        clippy::too_many_arguments,
        reason = "environment, driver and message apart; transfers without MPI are to bring them together"
    )]
    pub fn begin(
        env: &Env,
        gpu: &mut Gpu,
        ways: &mut Ways<'_>,
        peer: &Arc<Peer>,
        message: &Message,
        to: To,
        depth: u32,
    ) -> Begun {
        let is_one = env.config.assign == Assign::One;
        let Some(uuid) = ways.to().filter(|_| is_one) else {
            return Begun::No;
        };
        let is_seen = |uuid: &_| reach::by_uuid(uuid).is_some();
        if gpu.driven.is_end() || !is_seen(&message.device) || !is_seen(&uuid) {
            return Begun::No;
        }
        let may_relay = |uuid: &Uuid| is_seen(uuid) && gpu.driven.may_lead_over(Some(uuid));
        let usable = RouteUse {
            relay: &may_relay,
            // Of what the wide staging of this rank has left.
            host: gpu.exec.staging_in_host_max() >= ways.router.staging_bytes()
                && gpu.driven.may_lead_over(None),
            paths: env.paths(),
            may_push: true,
            goes_directly: false,
            is_begun: false,
            goes_both_ways: false,
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
            Err(failure) => {
                let again = "moved by both ranks instead";
                let uuid = |number| ways.router.uuid(Place::Gpu(number));
                note(gpu, peer, &failure, uuid, again);
                Begun::No
            }
        }
    }

    fn launch(
        gpu: &mut Gpu,
        ways: &Ways<'_>,
        peer: &Arc<Peer>,
        message: &Message,
        to: To,
        routed: Routed,
    ) -> Ended<Driven> {
        let mut driven = Driven {
            peer: Arc::clone(peer),
            gpus: std::array::from_fn(|number| ways.router.uuid(Place::Gpu(number as u8))),
            contexts: contexts(gpu, ways, &routed.plan, to.context)?,
            routed,
            source: [0; MAX_GPUS],
            target: to.address,
            mappings: Vec::new(),
            drive: None,
            after: After::all(ways, (to.address, message.length)),
            is_lost: false,
            trail: Arc::new(Trail::undivided(false)),
            seen: u64::MAX,
        };
        let export = Export::from(message);
        if !export.holds(message.length) {
            return Err(Error::Exhausted("the sender's allocation").into());
        }
        for path in driven.routed.plan.paths() {
            let reader = usize::from(path.engines[0]);
            if driven.source[reader] != 0 {
                continue;
            }
            let context = driven.contexts[reader].ok_or(Error::NoContext)?;
            let place = relay(&driven.routed.plan, path.engines[0]);
            let mapping = gpu.map(context, peer, &export);
            let mapping = mapping.map_err(|error| Failure::new(error, place))?;
            driven.source[reader] = mapping.address_of(export.offset);
            driven.mappings.push(mapping);
        }
        driven.try_launch(gpu)?;
        Ok(driven)
    }

    /// Launches, unless other messages have to end first; whether it did.
    fn try_launch(&mut self, gpu: &mut Gpu) -> Ended<bool> {
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
            Err(failure) if is_for_now(&failure.error) && gpu.exec.is_busy() => {
                self.seen = gpu.exec.ended();
                Ok(false)
            }
            Err(failure) => Err(failure),
        }
    }

    /// What messages behind it that are received in the same place have to know.
    pub fn trail(&self) -> &Arc<Trail> {
        &self.trail
    }

    /// Moves it on, without waiting.
    pub fn poll(&mut self, gpu: &mut Gpu) -> Step {
        if self.is_lost {
            self.after.retain(After::is_under_way);
            return match (self.after.is_empty(), self.trail.has_follower()) {
                (false, _) => Step::Pending(false),
                (true, false) => Step::Lost,
                // What follows it may have been written.
                (true, true) => Step::Arrived,
            };
        }
        let ended = match &mut self.drive {
            Some(drive) => gpu.exec.poll(drive).map(|done| (done, false)),
            None => self.try_launch(gpu).map(|launched| (false, launched)),
        };
        match ended {
            Ok((true, _)) => {
                let paths = self.routed.plan.paths().iter();
                let places = paths.flat_map(|path| path.path.via());
                gpu.driven.forgive(places.filter_map(|place| match *place {
                    Place::Host => Some(None),
                    Place::Gpu(number) => Some(Some(self.gpus[usize::from(number)]?)),
                }));
                Step::Arrived
            }
            Ok((false, launched)) => Step::Pending(launched),
            Err(failure) => {
                // What is received in its place from now on waits for what is done instead.
                self.trail.set_drive(0);
                let again = "again straight from the sender's GPU";
                let uuid = |number| self.gpus.get(usize::from(number)).copied().flatten();
                note(gpu, &self.peer, &failure, uuid, again);
                self.is_lost = true;
                Step::Pending(true)
            }
        }
    }

    /// What has not come straight from the sender's memory.
    pub fn parts(&self) -> Parts {
        let [_, relay, host, overtaken] = self.bytes().map(|(_, bytes)| bytes);
        Parts {
            relay,
            host,
            overtaken,
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
                _ if self.is_lost => 3,
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
) -> Ended<[Option<ContextKey>; MAX_GPUS]> {
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
            let held = device.ok_or(Error::NoContext);
            let held = held.and_then(|device| gpu.exec.hold(device.ordinal));
            held.map_err(|error| Failure::new(error, relay(plan, number)))?
        });
    }
    Ok(contexts)
}

/// A GPU, as a place that a plan leads over; `None` of one that is an end.
fn relay(plan: &Plan, gpu: u8) -> Option<Place> {
    let is_end = [plan.message.from, plan.message.to].contains(&gpu);
    (!is_end).then_some(Place::Gpu(gpu))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_fails_twice_is_left_and_driving_ends_with_the_third_other_failure() {
        let mut troubles = Troubles::default();
        let (one, other) = ([1; 16], [2; 16]);
        assert!(!troubles.note(Some(Some(one))) && !troubles.note(Some(None)));
        assert!(troubles.may_lead_over(Some(&one)) && troubles.may_lead_over(None));
        assert!(troubles.note(Some(Some(one))), "the second");
        assert!(!troubles.note(Some(Some(one))), "is told once");
        let may = [Some(&one), Some(&other), None].map(|place| troubles.may_lead_over(place));
        assert_eq!(may, [false, true, true]);
        assert!(troubles.note(Some(None)) && !troubles.may_lead_over(None));
        let last: Vec<bool> = (0..4).map(|_| troubles.note(None)).collect();
        assert_eq!(last, [false, false, true, false]);
        assert!(troubles.is_end());
        (0..100).for_each(|_| troubles.forgive([Some(one), None].into_iter()));
        assert!(troubles.is_end() && !troubles.may_lead_over(Some(&one)));
    }

    #[test]
    fn what_fails_now_and_then_only_is_not_left() {
        let mut troubles = Troubles::default();
        let one = Some([1; 16]);
        for _ in 0..5 {
            assert!(!troubles.note(Some(one)) && !troubles.note(None));
            (0..FORGIVEN_AFTER).for_each(|_| troubles.forgive([one].into_iter()));
        }
        assert!(!troubles.note(Some(one)));
        (1..FORGIVEN_AFTER).for_each(|_| troubles.forgive([one].into_iter()));
        (0..100).for_each(|_| troubles.forgive([None].into_iter()));
        assert!(
            troubles.note(Some(one)),
            "plans over other places do not count"
        );
    }
}
