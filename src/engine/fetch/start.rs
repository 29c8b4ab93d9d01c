//! How a message that has been claimed sets out: over several paths, in one copy, or through the host.

use std::sync::Arc;

use super::driven::{self, Begun, Driven};
use super::push::Push;
use super::several::{self, Before, Several};
use super::{
    asks_for_depth, flag, readers, trail, turn, uses_host, Destination, Fetch, Path, Then, Trail,
    TrailEnd, Turn, Turns, Ways,
};
use crate::cuda::{ContextKey, Copy, Error, Export, InFlight, Mapping};
use crate::engine::gpu::Gpu;
use crate::engine::invite::ONE_WAY_FROM;
use crate::engine::route::Routed;
use crate::engine::Env;
use crate::node::{Part, State, Told};
use crate::policy::decided_by;
use crate::policy::history::Flight;
use crate::policy::start::{self as policy, OneOwner, Start, StartFacts};
use crate::stats::{self, Counter, Reason};

impl Fetch {
    /// Whether this rank can read it from another's device memory into its own.
    fn may_be_pulled(&self) -> bool {
        !self.own
            && self.message.flags & flag::EXPORTED != 0
            && matches!(self.to, Destination::Device { .. })
    }

    /// A message that begins to come, where it matters how many of its sender's do.
    pub(super) fn enter(&self, env: &Env, ways: &mut Ways<'_>) -> Option<Flight> {
        let is_asked = asks_for_depth(env, self.wanted, ways.are_several)
            && matches!(self.to, Destination::Device { .. });
        is_asked.then(|| ways.depths.enter(self.message.source))
    }

    /// How deep the window of a message is taken to be, where that is asked for.
    pub(super) fn depth(&self, env: &Env, ways: &mut Ways<'_>) -> Option<u32> {
        (self.may_be_pulled() && asks_for_depth(env, self.wanted, ways.are_several))
            .then(|| ways.depth(&self.message))
    }

    /// Sets a message in motion, unless one copy is the way for it, or its sender's staging. `depth` of its window, where that is
    /// asked for. Whether it is under way, or waits for others.
    pub(super) fn start_several(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        ways: &mut Ways<'_>,
        depth: Option<u32>,
    ) -> bool {
        let place = self.place().unwrap_or_default();
        let mut setting = Setting {
            fetch: self,
            env,
            gpu,
            ways,
            depth,
            place,
            trails: Vec::new(),
            is_below: false,
            before: None,
            push: None,
        };
        let start = decided_by!("start", &mut setting, policy::start);
        let Setting { trails, before, .. } = setting;
        match start {
            Start::OneOwner | Start::Multipath | Start::Put | Start::GetPlanned => return true,
            Start::Get => {}
            Start::GetInOrder => self.leave_trail(true),
            Start::Pipeline => {
                self.want_ring_in_order(gpu);
                return true;
            }
            Start::QueuedInPlace => {
                self.hold(trails, Then::Start);
                return true;
            }
            Start::QueuedBehind => {
                let before = before.map(|before| before.trail);
                self.hold(before.into_iter().collect(), Then::Start);
                return true;
            }
        }
        false
    }

    /// The message before it from the same sender, or the last of those that are received in a place.
    fn before(&self, ways: &Ways<'_>, place: Option<(u64, u64)>) -> Option<Before> {
        let source = self.message.source;
        let of_sender = ways.others.rows().iter().rev();
        let mut of_sender = of_sender.filter(|other| other.source == source).peekable();
        let last = of_sender.peek().and_then(|other| other.trail.clone());
        let before = of_sender.find(|other| place.is_none_or(|place| other.overlaps(place)));
        let trail = before?.trail.clone()?;
        Some(Before {
            trail,
            is_below: place.is_some(),
            last,
        })
    }

    /// Its sender, who was told of the receive, writes all but the beginning of it: that comes as it is planned now, and what of it does
    /// not go over staging is written behind the rest. False if it is whole, or that cannot be.
    pub(super) fn begin_rest(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        ways: &mut Ways<'_>,
        told: Told,
    ) -> bool {
        if told.rest == 0 {
            return false;
        }
        let Some(depth) = self.depth(env, ways) else {
            return false;
        };
        let chosen = ways.choose(env, gpu, &self.peer, &self.message, depth, true);
        let (parts, routed) = match chosen {
            Some(chosen) => (chosen.parts, Some(chosen.routed)),
            None => (Vec::new(), None),
        };
        self.routed = routed;
        let parts: Vec<Part> = parts
            .iter()
            .filter_map(|part| part.before(told.rest))
            .collect();
        let push = ways.push_as_before(env, gpu, self.message.source);
        let before = self.before(ways, None);
        let is_begun = self.begin_parts(env, gpu, &parts, push, false, before, Some(told));
        if is_begun && depth == 1 && !parts.is_empty() {
            ways.agreed(&self.message);
        }
        is_begun
    }

    /// The payload lies in its sender's host memory. On its way to a device it stays in order with direct copies from the same
    /// sender, which may be received in the same place, and waits for what is written there in another way.
    pub(super) fn start_hosted(&mut self, env: &Env, gpu: &mut Gpu, ways: &Ways<'_>) {
        self.path = Path::ring(State::Hosted);
        let Some(place) = self.place() else {
            return;
        };
        let trails = ways.trails(place);
        if !trails.is_empty() {
            self.hold(trails, Then::Hosted);
            return;
        }
        if ways.is_for_sender(env, gpu, &self.message) {
            self.leave_trail(false);
        }
        // What is wrong with it comes up again when it is polled.
        let _ = self.empty_ring(gpu);
    }

    /// Not begun before these are over.
    fn hold(&mut self, trails: Vec<Arc<Trail>>, then: Then) {
        self.path = Path::Held { trails, then };
        self.leave_trail(false);
    }

    /// Messages behind this one that are received in its place wait for it; others need not.
    pub(super) fn leave_trail(&mut self, is_direct: bool) {
        self.trail = Some(TrailEnd::new(is_direct));
    }

    /// A message that is likely to take one direct copy does so this time. What is planned while it runs counts for the next one.
    fn begin_directly(&mut self, env: &Env, gpu: &mut Gpu, ways: &mut Ways<'_>, depth: u32) {
        self.start_in_turn(env, gpu, ways, Some(depth));
        gpu.launch();
        self.plan_now(env, gpu, ways, depth, false);
    }

    /// As [`Fetch::begin_directly`], for one that its sender writes.
    pub(super) fn plan_meanwhile(&mut self, env: &Env, gpu: &mut Gpu, mut ways: Ways<'_>) {
        if env.may_split(self.wanted) {
            let depth = ways.depth(&self.message);
            if depth == 1
                && ways.is_planned_meanwhile(&self.message)
                && self.plan_now(env, gpu, &mut ways, depth, true)
            {
                ways.would_split(&self.message);
            }
        }
    }

    /// Plans what has begun in one copy, of which its sender knew before or did not. Whether it would be split.
    fn plan_now(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        ways: &mut Ways<'_>,
        depth: u32,
        is_begun: bool,
    ) -> bool {
        let chosen = ways.choose(env, gpu, &self.peer, &self.message, depth, is_begun);
        let Some(chosen) = chosen else {
            return false;
        };
        let would_split = !chosen.parts.is_empty();
        if would_split {
            chosen.routed.withdraw();
        } else {
            self.routed = Some(chosen.routed);
        }
        would_split
    }

    #[allow(
        clippy::too_many_arguments,
        reason = "environment, driver and message apart; transfers without MPI are to bring them together"
    )]
    fn begin_several(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        ways: &mut Ways<'_>,
        before: Option<Before>,
        depth: u32,
        push: Option<Push>,
    ) -> bool {
        // Its sender may not have been told in time: it goes as those around it.
        let are_begun = depth == 1 && ways.are_begun(&self.message);
        let chosen = ways.choose(env, gpu, &self.peer, &self.message, depth, are_begun);
        let Some(chosen) = chosen else {
            return false;
        };
        self.routed = Some(chosen.routed);
        // Relays whose chunks go in turn need all lanes for pushes: behind one long copy there every other chunk would be late. A
        // message in the place of another is split as that one was.
        let is_below = before.as_ref().is_some_and(|before| before.is_below);
        let has_lane = is_below || chosen.parts.iter().all(|part| !part.in_turn);
        let push = push.filter(|_| chosen.has_direct && has_lane);
        let (parts, has_direct) = (&chosen.parts, chosen.has_direct);
        let is_begun = self.begin_parts(env, gpu, parts, push, has_direct, before, None);
        if is_begun && depth == 1 && !parts.is_empty() {
            ways.agreed(&self.message);
        }
        is_begun
    }

    /// The parts are brought over staging, the rest directly: pushed, where there is a target for that. Where it was
    /// `invited` to, its sender writes all but the beginning already.
    #[allow(
        clippy::too_many_arguments,
        reason = "environment, driver and message apart; transfers without MPI are to bring them together"
    )]
    fn begin_parts(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        parts: &[Part],
        push: Option<Push>,
        has_direct: bool,
        before: Option<Before>,
        invited: Option<Told>,
    ) -> bool {
        let Destination::Device { context, address } = self.to else {
            return false;
        };
        // Behind one that is received in the same place it is split as that one.
        let is_below = before.as_ref().is_some_and(|before| before.is_below);
        if parts.is_empty() && push.is_none() && !is_below {
            return false;
        }
        let mapping = match self.map(gpu, context) {
            Ok(mapping) => mapping,
            // Tried again, and told, where there is one path.
            Err(reason) => {
                let is_fault = |error: &Error| error.code().is_some() && !error.is_refusal();
                let is_fault = reason.is_some_and(|(_, error)| is_fault(&error));
                stats::add(Counter::DriverRetries, u64::from(is_fault));
                return false;
            }
        };
        let direct = several::Direct {
            context,
            to: address,
            from: mapping.address_of(self.message.offset),
            mapping,
            is_path: has_direct,
            push,
        };
        let slot = (self.slot, self.nonce);
        let peer = &self.peer;
        let length = self.wanted;
        let several = Several::begin(env, gpu, peer, slot, direct, length, parts, before, invited);
        let is_begun = several.is_some();
        if let Some(mut several) = several {
            if self.routed.as_ref().is_some_and(Routed::is_to_tell) {
                several.time_parts();
            }
            self.trail = Some(TrailEnd::of(several.trail()));
            self.path = Path::Several(Box::new(several));
        }
        is_begun
    }

    /// The sender's allocation, mapped.
    fn map(
        &self,
        gpu: &mut Gpu,
        context: ContextKey,
    ) -> Result<Arc<Mapping>, Option<(Reason, Error)>> {
        let export = Export::from(&self.message);
        if !export.holds(self.wanted) {
            return Err(None);
        }
        gpu.map(context, &self.peer, &export)
            .map_err(|error| Some((Reason::MappingFailed, error)))
    }

    /// Whether it is read in turns, if it takes one copy. `depth` of its window, where that is asked for.
    fn may_turn(&self, env: &Env, gpu: &Gpu, ways: &mut Ways<'_>, depth: Option<u32>) -> bool {
        // Who deals with one other rank only has no choice whose message to read.
        let is_long = ways.are_several && self.wanted >= turn::from(depth.unwrap_or(1));
        // Of short messages most come where no long one ever did.
        let is_behind = |turns: &Turns| turns.are_waiting(self.message.source);
        self.may_be_pulled()
            && (is_long || gpu.turns.get(&self.device).is_some_and(is_behind))
            && (ways.router).is_switched(env, &[self.message.device, self.device])
    }

    /// Begins with it now, or when it is its turn. `depth` of its window, where that is asked for.
    pub(super) fn start_in_turn(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        ways: &mut Ways<'_>,
        depth: Option<u32>,
    ) {
        if self.may_turn(env, gpu, ways, depth) {
            let fresh = || Turns::new(env.node.own_shared());
            let turns = gpu.turns.entry(self.device).or_insert_with(fresh);
            let turn = turns.enter(self.message.source, self.wanted, &|rank| readers(env, rank));
            let is_waiting = turn.is_waiting();
            self.turn = Some(turn);
            if is_waiting {
                self.path = Path::Waiting;
                return;
            }
        }
        self.start(gpu);
    }

    pub(super) fn start(&mut self, gpu: &mut Gpu) {
        match self.start_direct(gpu) {
            Ok(copy) => self.path = Path::Direct(copy),
            Err(reason) => {
                if let Some((reason, error)) = reason {
                    stats::fallback(reason, self.wanted);
                    self.reason = Some(reason);
                    // What cannot be between these two processes, or somebody else has done, is no fault.
                    if error.code().is_some() && !error.is_refusal() {
                        self.survived(&error, "through staging memory instead");
                    } else {
                        log::debug!("from rank {}: not direct: {error}", self.message.source);
                    }
                }
                self.want_ring_in_order(gpu);
            }
        }
    }

    /// Has the message come through its sender's ring, once what was received in its place before is over.
    fn want_ring_in_order(&mut self, gpu: &mut Gpu) {
        if self.place().is_none() {
            self.want_ring(gpu);
            return;
        }
        if self.trail.is_none() {
            // What is received in its place from now on waits for it.
            self.leave_trail(false);
        }
        self.turn = None;
        self.path = Path::Unordered;
    }

    /// Asks the sender to bring the payload through its ring: in memory of its GPU, where this rank can read
    /// that.
    pub(super) fn want_ring(&mut self, gpu: &mut Gpu) {
        let wants_gpu = self.may_come_by_gpu_ring(gpu)
            && self
                .slot()
                .is_some_and(|slot| slot.want_gpu(self.nonce).is_ok());
        if wants_gpu {
            self.await_ring(State::WantGpu);
        } else {
            self.want_host();
        }
    }

    /// Queues the copy from the sender's memory; `Err(None)` where that is not the way for this pair of buffers.
    fn start_direct(&self, gpu: &mut Gpu) -> Result<InFlight, Option<(Reason, Error)>> {
        let Destination::Device { context, address } = self.to else {
            return Err(None);
        };
        let source = self.message.base + self.message.offset;
        let copy_from = |src| Copy::Linear {
            dst: address,
            src,
            bytes: self.wanted,
        };
        let sender = self.message.source;
        if self.own {
            return gpu
                .pull(context, sender, copy_from(source), None)
                .map_err(|error| Some((Reason::DriverError, error)));
        }
        if self.message.flags & flag::EXPORTED == 0 {
            return Err(None);
        }
        let mapping = self.map(gpu, context)?;
        let copy = copy_from(mapping.address_of(self.message.offset));
        let (from, to) = (self.message.device, self.device);
        let failed = |error| Some((Reason::DriverError, error));
        if self.turn.as_ref().and_then(Turn::start) == Some(turn::Start::Behind) {
            gpu.follow_others(context, sender).map_err(failed)?;
        }
        gpu.pull_of(context, [&from, &to], sender, copy, mapping)
            .map_err(failed)
    }

    /// Asks the sender to bring the payload through its ring in host memory.
    pub(super) fn want_host(&mut self) {
        if let Some(slot) = self.slot() {
            let _ = slot.want_host(self.nonce);
        }
        self.await_ring(State::WantHost);
    }

    /// The sender fills the ring from now on.
    fn await_ring(&mut self, state: State) {
        self.turn = None;
        self.path = Path::ring(state);
        self.peer.ring_doorbell();
    }
}

/// A message, with all that decides how it sets out.
struct Setting<'a, 'b> {
    fetch: &'a mut Fetch,
    env: &'a Env,
    gpu: &'a mut Gpu,
    ways: &'a mut Ways<'b>,
    depth: Option<u32>,
    /// Where it is received.
    place: (u64, u64),
    /// How far those are that are received in its place.
    trails: Vec<Arc<Trail>>,
    /// Another is received in its place.
    is_below: bool,
    before: Option<Before>,
    push: Option<Push>,
}

impl StartFacts for Setting<'_, '_> {
    fn is_to_device(&mut self) -> bool {
        matches!(self.fetch.to, Destination::Device { .. })
    }

    fn is_staged(&mut self) -> bool {
        !self.fetch.own && self.fetch.message.flags & flag::EXPORTED == 0
    }

    fn may_be_split(&mut self) -> bool {
        self.fetch.may_be_pulled() && self.fetch.wanted == self.fetch.message.length
    }

    fn window(&mut self) -> Option<u32> {
        let (env, wanted) = (self.env, self.fetch.wanted);
        self.depth = self.depth.filter(|_| env.may_split(wanted));
        if let (Some(_), Destination::Device { context, .. }) = (self.depth, self.fetch.to) {
            if uses_host(env, wanted) {
                self.gpu.pin_wide(context, &self.fetch.peer, 0);
            }
        }
        self.depth
    }

    fn one_owner(&mut self) -> OneOwner {
        let Destination::Device { context, address } = self.fetch.to else {
            return OneOwner::No;
        };
        let to = driven::To { context, address };
        let window = self.depth.unwrap_or(1);
        let (peer, message) = (&self.fetch.peer, &self.fetch.message);
        match Driven::begin(self.env, self.gpu, self.ways, peer, message, to, window) {
            Begun::Driven(driven) => {
                self.fetch.trail = Some(TrailEnd::of(driven.trail()));
                self.fetch.path = Path::Driven(driven);
                OneOwner::Begun
            }
            Begun::Direct(routed) => {
                self.fetch.routed = Some(*routed);
                OneOwner::Direct
            }
            Begun::No => OneOwner::No,
        }
    }

    fn are_all_direct(&mut self) -> bool {
        self.trails = self.ways.trails(self.place);
        self.trails.iter().all(|trail| trail.is_direct())
    }

    fn has_trails(&mut self) -> bool {
        trail::are_left()
    }

    fn is_below(&mut self) -> bool {
        self.is_below = self.ways.overlapping(self.place).next().is_some();
        self.is_below
    }

    fn is_unplanned(&mut self) -> bool {
        let depth = self.depth.unwrap_or(1);
        self.ways.is_unplanned(&self.fetch.message, depth)
    }

    fn is_timed(&mut self) -> bool {
        self.ways.time_if_due(self.gpu, &self.fetch.message)
    }

    fn is_for_sender(&mut self) -> bool {
        let message = &self.fetch.message;
        self.ways.is_for_sender(self.env, self.gpu, message)
    }

    fn is_putting(&mut self) -> bool {
        self.ways.is_pushing
    }

    fn are_alike(&mut self) -> bool {
        let (source, place) = (self.fetch.message.source, self.place);
        self.ways.overlapping(place).all(|other| {
            let is_in_order = |trail: &Arc<Trail>| trail.is_in_order();
            other.source == source
                && other.to == place
                && other.trail.as_ref().is_some_and(is_in_order)
        })
    }

    fn is_behind_any(&mut self) -> bool {
        self.trails = self.ways.trails(self.place);
        !self.trails.is_empty()
    }

    fn has_before(&mut self) -> bool {
        let place = self.is_below.then_some(self.place);
        self.before = self.fetch.before(self.ways, place);
        self.before.is_some()
    }

    fn begins_put_in_turn(&mut self) -> bool {
        let source = self.fetch.message.source;
        let before = self.before.as_ref().filter(|before| before.is_below);
        let is_in_order = before.is_none_or(|before| before.trail.is_pushed());
        let push = self.ways.push_in_turn(self.env, self.gpu, source);
        let before = before.cloned();
        is_in_order
            && self
                .fetch
                .begin_parts(self.env, self.gpu, &[], push, true, before, None)
    }

    fn is_long(&mut self) -> bool {
        self.fetch.wanted >= ONE_WAY_FROM
    }

    fn begins_put(&mut self) -> bool {
        let source = self.fetch.message.source;
        let push = self.ways.push_as_before(self.env, self.gpu, source);
        let before = self.before.clone();
        let is_begun = self
            .fetch
            .begin_parts(self.env, self.gpu, &[], push, true, before, None);
        if is_begun && self.depth == Some(1) {
            // As what goes the other way: the next ones had better be told of as well.
            self.ways.refused(&self.fetch.message);
        }
        is_begun
    }

    fn is_put(&mut self) -> bool {
        let source = self.fetch.message.source;
        let depth = self.depth.unwrap_or(1);
        self.push = match &self.before {
            // As the one before it, on whose lanes it follows.
            Some(Before {
                trail,
                is_below: true,
                ..
            }) if trail.is_pushed() => self.ways.push_as_before(self.env, self.gpu, source),
            Some(Before { is_below: true, .. }) => None,
            _ => self
                .ways
                .push(self.env, self.gpu, &self.fetch.message, depth),
        };
        self.push.is_some()
    }

    fn begins_directly(&mut self) -> bool {
        let depth = self.depth.unwrap_or(1);
        let begins = self.ways.begins_directly(&self.fetch.message, depth);
        if begins {
            self.fetch
                .begin_directly(self.env, self.gpu, self.ways, depth);
        }
        begins
    }

    fn begins_multipath(&mut self) -> bool {
        let depth = self.depth.unwrap_or(1);
        let (before, push) = (self.before.clone(), self.push.take());
        self.fetch
            .begin_several(self.env, self.gpu, self.ways, before, depth, push)
    }
}
