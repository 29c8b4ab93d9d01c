//! A multipath message with one owner (`ANABRANCH_OWNER=one`): this rank makes every copy, as it sees all
//! GPUs involved.
//!
//! The sender need only do what every message needs: leave its buffer as it is until it sees the ATS.

use std::sync::Arc;

use super::{Next, Progress, Protocol};
use crate::config::Owner;
use crate::cuda::{reach, ContextKey, Error, Export, InFlight, Mapping, Uuid};
use crate::exec::{Drive, Ended, ExecutorName, Failure, Request};
use crate::node::{Message, Peer};
use crate::plan::{PathKind, Plan};
use crate::stats::{self, Counter};
use crate::topology::{Place, MAX_GPUS};
use crate::trace::{self, Copying, Launched};
use crate::transfer::fault::{self, Of, Path};
use crate::transfer::fetch::claim::{Claim, Lost};
use crate::transfer::fetch::order_token::OrderToken;
use crate::transfer::fetch::RouteContext;
use crate::transfer::gpu::{is_for_now, Gpu};
use crate::transfer::life;
use crate::transfer::route::{RouteUse, Routed};
use crate::transfer::story::Parts;
use crate::transfer::Env;

/// The depth that a window is taken to have if several messages of a pair are under way. With the number
/// itself, each message of a window would get its own plan and graph.
const WINDOW: u32 = 16;
/// After so many failed plans whose failure lies with the path over one place, no plan uses that place.
const PLACE_FAILURES_MAX: u32 = 2;
/// After so many plans that failed for other reasons, this rank makes no more one-owner transfers.
const FAILURES_MAX: u32 = 3;

/// After so many plans that ended well, earlier failures do not count any more.
const FORGIVEN_AFTER: u32 = 8;

/// The failures of this rank's one-owner plans.
#[derive(Default)]
pub struct Troubles {
    /// By the place that a path led over: a GPU, or host memory (`None`).
    places: Vec<(Option<Uuid>, Trouble)>,
    /// Failures that lie with no such place.
    others: Trouble,
}

/// How often something has failed lately.
#[derive(Clone, Copy, Default)]
struct Trouble {
    failures: u32,
    /// Plans that have ended well since.
    since: u32,
}

impl Trouble {
    /// Counts one more failure. Returns whether it was the last that is allowed.
    fn note(&mut self, most: u32) -> bool {
        self.failures += 1;
        self.since = 0;
        self.failures == most
    }

    /// A plan has ended well. What has reached its limit of failures stays there.
    fn forgive(&mut self, most: u32) {
        self.since = self.since.saturating_add(1);
        if self.since >= FORGIVEN_AFTER && self.failures < most {
            self.failures = 0;
        }
    }
}

impl Troubles {
    /// Whether paths may lead over a place.
    fn may_lead_over(&self, place: Option<&Uuid>) -> bool {
        let known = self.places.iter().find(|(of, _)| of.as_ref() == place);
        known.is_none_or(|(_, trouble)| trouble.failures < PLACE_FAILURES_MAX)
    }

    /// Whether this rank makes no more one-owner transfers.
    fn is_end(&self) -> bool {
        self.others.failures >= FAILURES_MAX
    }

    /// Counts one more failure. Returns whether it was the last: no more plans over this place or, without a
    /// place, no more at all.
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

    /// A plan whose paths lead over these places has ended well.
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

/// Records a message whose plan failed, and reports it; `again` says what is done instead.
fn note(
    gpu: &mut Gpu,
    peer: &Peer,
    failure: &Failure,
    uuid: impl Fn(u8) -> Option<Uuid>,
    again: &str,
) {
    // A GPU without an identity counts as no place.
    let place = match failure.place {
        Some(Place::Host) => Some(None),
        Some(Place::Gpu(number)) => uuid(number).map(Some),
        None => None,
    };
    let is_last = gpu.one_owner.note(place);
    stats::add(Counter::OneOwnerFailed, 1);
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
    // Failures because the sender has died are reported when its messages are given up.
    if peer.goes_on() {
        fault::survived(Of::From(peer.world_rank()), Path::Multipath, &why, &end);
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

/// The result of an attempt to begin.
pub enum Begun {
    /// It is under way, or waits for others of this rank.
    OneOwnerTransfer(Box<OneOwnerTransfer>),
    /// One direct copy is best; the links are reserved for it.
    Direct(Box<Routed>),
    /// One owner is not the way for this message.
    No,
}

/// The result of a step.
enum Step {
    /// Not over yet; whether something has been launched.
    Pending(bool),
    /// All bytes are there.
    Arrived,
    /// It failed, which has been reported, and nothing of it runs any more.
    Lost,
}

/// A message of which this rank makes all copies.
pub struct OneOwnerTransfer {
    peer: Arc<Peer>,
    routed: Routed,
    /// Its copies, for the trace, and when they were last seen not to be over.
    traced: Launched,
    asked: u64,
    /// The GPUs, by their numbers in the plan.
    gpus: [Option<Uuid>; MAX_GPUS],
    contexts: [Option<ContextKey>; MAX_GPUS],
    source: [u64; MAX_GPUS],
    target: u64,
    mappings: Vec<Arc<Mapping>>,
    drive: Option<Drive>,
    /// The messages that this one is written over. Nothing is launched before these are over, or before this
    /// rank has launched each of them as a whole, so that the driver keeps the order.
    after: Vec<After>,
    /// Its plan failed.
    is_lost: bool,
    token: Arc<OrderToken>,
    /// How many plans of this rank had ended when this one was last refused.
    seen: u64,
}

/// A message under way that another one is written over.
struct After {
    token: Arc<OrderToken>,
    /// The other one covers all of it.
    is_covered: bool,
}

impl After {
    fn all(routes: &RouteContext<'_>, place: (u64, u64)) -> Vec<After> {
        let rows = routes.overlapping(place).filter_map(|row| {
            let token = row.token.clone()?;
            let is_covered = row.to == place;
            Some(After { token, is_covered })
        });
        rows.collect()
    }

    fn is_under_way(&self) -> bool {
        !self.token.is_over()
    }

    /// The plan behind which the other message may be launched.
    fn drive(&self) -> Option<u64> {
        self.token.drive().filter(|_| self.is_covered)
    }
}

impl OneOwnerTransfer {
    /// Begins, if this rank is to own all copies and sees the GPUs. `depth`: of the message's window.
    #[allow(
        clippy::too_many_arguments,
        reason = "environment, driver and message apart; transfers without MPI are to bring them together"
    )]
    pub fn begin(
        env: &Env,
        gpu: &mut Gpu,
        routes: &mut RouteContext<'_>,
        peer: &Arc<Peer>,
        message: &Message,
        to: To,
        depth: u32,
    ) -> Begun {
        let is_one = env.config.owner == Owner::One;
        let Some(uuid) = routes.to().filter(|_| is_one) else {
            return Begun::No;
        };
        let is_seen = |uuid: &_| reach::by_uuid(uuid).is_some();
        if gpu.one_owner.is_end() || !is_seen(&message.device) || !is_seen(&uuid) {
            return Begun::No;
        }
        let may_relay = |uuid: &Uuid| is_seen(uuid) && gpu.one_owner.may_lead_over(Some(uuid));
        let usable = RouteUse {
            relay: &may_relay,
            // From what this rank's wide staging has left.
            host: gpu.exec.staging_in_host_max() >= routes.router.staging_bytes()
                && gpu.one_owner.may_lead_over(None),
            paths: env.paths(),
            may_put: true,
            goes_directly: false,
            is_begun: false,
            goes_both_ways: false,
            assign: Owner::One,
        };
        let routed = routes.router.plan(
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
        match OneOwnerTransfer::launch(gpu, routes, peer, message, to, routed) {
            Ok(one_owner) => Begun::OneOwnerTransfer(Box::new(one_owner)),
            Err(failure) => {
                let again = "moved by both ranks instead";
                let uuid = |number| routes.router.uuid(Place::Gpu(number));
                note(gpu, peer, &failure, uuid, again);
                Begun::No
            }
        }
    }

    fn launch(
        gpu: &mut Gpu,
        routes: &RouteContext<'_>,
        peer: &Arc<Peer>,
        message: &Message,
        to: To,
        routed: Routed,
    ) -> Ended<OneOwnerTransfer> {
        let mut one_owner = OneOwnerTransfer {
            peer: Arc::clone(peer),
            gpus: std::array::from_fn(|number| routes.router.uuid(Place::Gpu(number as u8))),
            contexts: contexts(gpu, routes, &routed.plan, to.context)?,
            routed,
            source: [0; MAX_GPUS],
            target: to.address,
            mappings: Vec::new(),
            drive: None,
            after: After::all(routes, (to.address, message.length)),
            is_lost: false,
            token: Arc::new(OrderToken::undivided(false)),
            seen: u64::MAX,
            traced: Launched::default(),
            asked: 0,
        };
        let export = Export::from(message);
        if !export.holds(message.length) {
            return Err(Error::Exhausted("the sender's allocation").into());
        }
        for path in one_owner.routed.plan.paths() {
            let reader = usize::from(path.engines[0]);
            if one_owner.source[reader] != 0 {
                continue;
            }
            let context = one_owner.contexts[reader].ok_or(Error::NoContext)?;
            let place = relay(&one_owner.routed.plan, path.engines[0]);
            let mapping = gpu.map(context, peer, &export);
            let mapping = mapping.map_err(|error| Failure::new(error, place))?;
            one_owner.source[reader] = mapping.address_of(export.offset);
            one_owner.mappings.push(mapping);
        }
        one_owner.try_launch(gpu)?;
        Ok(one_owner)
    }

    /// Launches, unless other messages must end first. Returns whether it did.
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
                self.after.iter().for_each(|after| after.token.follow());
                self.token.set_drive(drive.number);
                if trace::on() {
                    let is_graph = drive.how == ExecutorName::Graph;
                    self.traced = self.launched(is_graph);
                }
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

    /// How it is moved.
    pub fn plan(&self) -> &Plan {
        &self.routed.plan
    }

    /// What the trace is told: the chunks of each hop as one copy.
    fn launched(&self, is_graph: bool) -> Launched {
        let plan = &self.routed.plan;
        let place = |place: &Place| match *place {
            Place::Host => None,
            Place::Gpu(number) => self.gpus[usize::from(number)],
        };
        let copies = plan.paths().iter().flat_map(|path| {
            let hops = path.path.places().windows(2).enumerate();
            hops.map(move |(hop, ends)| {
                let _way = trace::via_relay(path.path.kind() == PathKind::Relay);
                Copying::new([place(&ends[0]), place(&ends[1])], hop as u8, path.bytes, 0)
            })
        });
        let launched = Launched::now(copies.flatten());
        if is_graph {
            launched.by_graph()
        } else {
            launched
        }
    }

    /// The order token, for later messages that are received in the same place.
    pub fn token(&self) -> &Arc<OrderToken> {
        &self.token
    }

    /// Moves it on, without blocking.
    fn poll(&mut self, gpu: &mut Gpu) -> Step {
        if self.is_lost {
            self.after.retain(After::is_under_way);
            return match (self.after.is_empty(), self.token.has_follower()) {
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
                self.traced.ended(self.asked);
                let paths = self.routed.plan.paths().iter();
                let places = paths.flat_map(|path| path.path.via());
                gpu.one_owner
                    .forgive(places.filter_map(|place| match *place {
                        Place::Host => Some(None),
                        Place::Gpu(number) => Some(Some(self.gpus[usize::from(number)]?)),
                    }));
                Step::Arrived
            }
            Ok((false, launched)) => {
                self.asked = trace::asked();
                Step::Pending(launched)
            }
            Err(failure) => {
                // Later messages that are received in its place wait for what is done instead.
                self.token.set_drive(0);
                let again = "again straight from the sender's GPU";
                let uuid = |number| self.gpus.get(usize::from(number)).copied().flatten();
                note(gpu, &self.peer, &failure, uuid, again);
                self.is_lost = true;
                Step::Pending(true)
            }
        }
    }

    /// Bytes by the kind of path that they came by.
    fn bytes(&self) -> Bytes {
        let mut bytes = [
            (Counter::MultipathDirectBytes, 0),
            (Counter::MultipathRelayBytes, 0),
            (Counter::MultipathHostBytes, 0),
            (Counter::MultipathOvertakenBytes, 0),
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

impl Protocol for OneOwnerTransfer {
    fn name(&self) -> life::Protocol {
        life::Protocol::OneOwner
    }

    fn progress(&mut self, _: &mut Claim, _: &Env, gpu: &mut Gpu) -> Result<Progress, Lost> {
        Ok(match self.poll(gpu) {
            Step::Pending(moved) => Progress::Pending(moved),
            Step::Arrived => Progress::Landed(life::Protocol::OneOwner),
            Step::Lost => {
                stats::add(Counter::Retries, 1);
                Progress::Instead(Next::Whole)
            }
        })
    }

    /// It fails only once nothing of it is in flight.
    fn abort(self) -> Vec<InFlight> {
        Vec::new()
    }

    fn reads_lent_buffer(&self) -> bool {
        true
    }

    fn count(&mut self, _: &Claim, _: &Env) {
        for (counter, bytes) in self.bytes() {
            stats::add(counter, bytes);
        }
    }

    fn parts(&self) -> Option<Parts> {
        let [_, relay, host, overtaken] = self.bytes().map(|(_, bytes)| bytes);
        Some(Parts {
            relay,
            host,
            overtaken,
        })
    }
}

/// Bytes, with the counter of each.
type Bytes = [(Counter, u64); 4];

/// The context of each GPU of a plan: the buffer's own for the receiver's GPU, the primary one elsewhere.
fn contexts(
    gpu: &mut Gpu,
    routes: &RouteContext<'_>,
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
            let uuid = routes.router.uuid(Place::Gpu(number));
            let device = uuid.and_then(|uuid| reach::by_uuid(&uuid));
            let held = device.ok_or(Error::NoContext);
            let held = held.and_then(|device| gpu.exec.hold(device.ordinal));
            held.map_err(|error| Failure::new(error, relay(plan, number)))?
        });
    }
    Ok(contexts)
}

/// A GPU as a place that a path leads over; `None` if the GPU is an end of the message.
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
