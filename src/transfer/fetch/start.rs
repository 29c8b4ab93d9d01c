//! How the transfer of a claimed message starts: by multipath, in one copy, or through the host.

use std::sync::Arc;

use super::protocol::eager::Eager;
use super::protocol::multipath::{self, Before, Multipath};
use super::protocol::one_owner::{self, Begun, OneOwnerTransfer};
use super::protocol::pipeline::Pipeline;
use super::protocol::Moving;
use super::put_target::PutTarget;
use super::{
    asks_for_depth, flag, order_token, readers, turn, uses_host, Destination, Fetch, OrderToken,
    OrderTokenEnd, Path, RouteContext, Then, Turns,
};
use crate::cuda::Error;
use crate::node::{Part, RtrId, SlotState};
use crate::policy::decided_by;
use crate::policy::history::InFlightGuard;
use crate::policy::start::{self as policy, OneOwner, Start, StartFacts};
use crate::stats::{self, Counter};
use crate::transfer::gpu::Gpu;
use crate::transfer::route::Routed;
use crate::transfer::Env;
use crate::transfer::ONE_WAY_FROM;

impl Fetch {
    /// Enters a message into the count of its sender's messages in flight, if that count matters for it.
    pub(super) fn enter(&self, env: &Env, routes: &mut RouteContext<'_>) -> Option<InFlightGuard> {
        let is_asked = asks_for_depth(env, self.claim.wanted, routes.are_several)
            && matches!(self.claim.to, Destination::Device { .. });
        is_asked.then(|| routes.history.windows.enter(self.claim.message.source))
    }

    /// The depth that the message's window is taken to have, if that matters.
    pub(super) fn depth(&self, env: &Env, routes: &mut RouteContext<'_>) -> Option<u32> {
        (self.claim.may_be_pulled() && asks_for_depth(env, self.claim.wanted, routes.are_several))
            .then(|| routes.depth(&self.claim.message))
    }

    /// Starts a message, unless one copy or its sender's staging is the way for it. `depth`: of its window,
    /// if that matters. Returns whether it is under way or waits for others.
    pub(super) fn start_planned(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        routes: &mut RouteContext<'_>,
        depth: Option<u32>,
    ) -> bool {
        let place = self.claim.place().unwrap_or_default();
        let mut setting = Setting {
            fetch: self,
            env,
            gpu,
            routes,
            depth,
            place,
            tokens: Vec::new(),
            is_below: false,
            before: None,
            put: None,
        };
        let start = decided_by!("start", &mut setting, policy::start);
        let Setting { tokens, before, .. } = setting;
        match start {
            Start::OneOwner | Start::Multipath | Start::Put | Start::GetPlanned => return true,
            Start::Get => {}
            Start::GetInOrder => self.leave_token(true),
            Start::Pipeline => {
                self.want_pipeline_in_order(gpu);
                return true;
            }
            Start::QueuedInPlace => {
                self.hold(tokens, Then::Start);
                return true;
            }
            Start::QueuedBehind => {
                let before = before.map(|before| before.token);
                self.hold(before.into_iter().collect(), Then::Start);
                return true;
            }
        }
        false
    }

    /// The message before it from the same sender or, with a place, the last one that is received there.
    fn before(&self, routes: &RouteContext<'_>, place: Option<(u64, u64)>) -> Option<Before> {
        let source = self.claim.message.source;
        let of_sender = routes.others.rows().iter().rev();
        let mut of_sender = of_sender.filter(|other| other.source == source).peekable();
        let last = of_sender.peek().and_then(|other| other.token.clone());
        let before = of_sender.find(|other| place.is_none_or(|place| other.overlaps(place)));
        let token = before?.token.clone()?;
        Some(Before {
            token,
            is_below: place.is_some(),
            last,
        })
    }

    /// After an RTR, the sender writes all of the message but its beginning. The beginning is planned now;
    /// what of it does not go over staging, the sender writes behind the rest. False if the sender writes the
    /// whole message, or if this is not possible.
    pub(super) fn begin_rest(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        routes: &mut RouteContext<'_>,
        told: RtrId,
    ) -> bool {
        if told.rest == 0 {
            return false;
        }
        let Some(depth) = self.depth(env, routes) else {
            return false;
        };
        let chosen = routes.choose(env, gpu, &self.claim.peer, &self.claim.message, depth, true);
        let (parts, routed) = match chosen {
            Some(chosen) => (chosen.parts, Some(chosen.routed)),
            None => (Vec::new(), None),
        };
        self.claim.take_route(routed);
        let parts: Vec<Part> = parts
            .iter()
            .filter_map(|part| part.before(told.rest))
            .collect();
        let put = routes.put_as_before(env, gpu, self.claim.message.source);
        let before = self.before(routes, None);
        let is_begun = self.begin_parts(env, gpu, &parts, put, false, before, Some(told));
        if is_begun && depth == 1 && !parts.is_empty() {
            routes.agreed(&self.claim.message);
        }
        is_begun
    }

    /// The payload lies in its sender's host memory. On its way to a device it stays in order with direct
    /// copies from the same sender, which may be received in the same place. It waits for messages that are
    /// written there in another way.
    pub(super) fn start_eager(&mut self, env: &Env, gpu: &mut Gpu, routes: &mut RouteContext<'_>) {
        self.move_by(Moving::Eager(Eager::new(SlotState::Eager)));
        let Some(place) = self.claim.place() else {
            return;
        };
        let tokens = routes.tokens(place);
        if !tokens.is_empty() {
            self.hold(tokens, Then::Eager);
            return;
        }
        if routes.is_for_sender(env, gpu, &self.claim.message) {
            self.leave_token(false);
        }
        if let Path::Moving(Moving::Eager(eager)) = &mut self.path {
            eager.start(&self.claim, gpu);
        }
    }

    /// Makes the message wait until these are over.
    fn hold(&mut self, tokens: Vec<Arc<OrderToken>>, then: Then) {
        self.set_path(Path::Queued { tokens, then });
        self.leave_token(false);
    }

    /// Makes later messages that are received in its place wait for it.
    pub(super) fn leave_token(&mut self, is_direct: bool) {
        self.token = Some(OrderTokenEnd::new(is_direct));
    }

    /// A message that is likely to take one direct copy takes it now. The plan is made while the copy runs,
    /// and counts for the next message.
    fn begin_directly(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        routes: &mut RouteContext<'_>,
        depth: u32,
    ) {
        self.start_in_turn(env, gpu, routes, Some(depth));
        gpu.launch();
        self.plan_now(env, gpu, routes, depth, false);
    }

    /// As [`Fetch::begin_directly`], for a message that its sender writes.
    pub(super) fn plan_meanwhile(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        mut routes: RouteContext<'_>,
    ) {
        if env.may_split(self.claim.wanted) {
            let depth = routes.depth(&self.claim.message);
            if depth == 1
                && routes.is_planned_meanwhile(&self.claim.message)
                && self.plan_now(env, gpu, &mut routes, depth, true)
            {
                routes.would_split(&self.claim.message);
            }
        }
    }

    /// Plans a message that has begun in one copy. `is_begun`: its sender has begun to write it. Returns
    /// whether it would be split.
    fn plan_now(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        routes: &mut RouteContext<'_>,
        depth: u32,
        is_begun: bool,
    ) -> bool {
        let chosen = routes.choose(
            env,
            gpu,
            &self.claim.peer,
            &self.claim.message,
            depth,
            is_begun,
        );
        let Some(chosen) = chosen else {
            return false;
        };
        let would_split = !chosen.parts.is_empty();
        if would_split {
            chosen.routed.withdraw();
        } else {
            self.claim.take_route(Some(chosen.routed));
        }
        would_split
    }

    #[allow(
        clippy::too_many_arguments,
        reason = "environment, driver and message apart; transfers without MPI are to bring them together"
    )]
    fn begin_multipath(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        routes: &mut RouteContext<'_>,
        before: Option<Before>,
        depth: u32,
        put: Option<PutTarget>,
    ) -> bool {
        // The sender may not have got the RTR in time: the message is then split as those around it are.
        let are_begun = depth == 1 && routes.are_begun(&self.claim.message);
        let chosen = routes.choose(
            env,
            gpu,
            &self.claim.peer,
            &self.claim.message,
            depth,
            are_begun,
        );
        let Some(chosen) = chosen else {
            return false;
        };
        self.claim.take_route(Some(chosen.routed));
        // Relays whose chunks go in turn need all lanes for puts: behind one long copy, every other chunk
        // would be late. A message in the place of another is split as that one was.
        let is_below = before.as_ref().is_some_and(|before| before.is_below);
        let has_lane = is_below || chosen.parts.iter().all(|part| !part.in_turn);
        let put = put.filter(|_| chosen.has_direct && has_lane);
        let (parts, has_direct) = (&chosen.parts, chosen.has_direct);
        let is_begun = self.begin_parts(env, gpu, parts, put, has_direct, before, None);
        if is_begun && depth == 1 && !parts.is_empty() {
            routes.agreed(&self.claim.message);
        }
        is_begun
    }

    /// Staging brings the parts; the rest goes directly, by put if there is a target for that. With
    /// `rtr`, the sender already writes all but the beginning.
    #[allow(
        clippy::too_many_arguments,
        reason = "environment, driver and message apart; transfers without MPI are to bring them together"
    )]
    fn begin_parts(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        parts: &[Part],
        put: Option<PutTarget>,
        has_direct: bool,
        before: Option<Before>,
        rtr: Option<RtrId>,
    ) -> bool {
        let Destination::Device { context, address } = self.claim.to else {
            return false;
        };
        // A message behind another in the same place is split as that one.
        let is_below = before.as_ref().is_some_and(|before| before.is_below);
        if parts.is_empty() && put.is_none() && !is_below {
            return false;
        }
        let mapping = match self.claim.map(gpu, context) {
            Ok(mapping) => mapping,
            // It is tried again, and reported, as a single copy.
            Err(reason) => {
                let is_fault = |error: &Error| error.code().is_some() && !error.is_refusal();
                let is_fault = reason.is_some_and(|(_, error)| is_fault(&error));
                stats::add(Counter::DriverRetries, u64::from(is_fault));
                return false;
            }
        };
        let direct = multipath::Direct {
            context,
            to: address,
            from: mapping.address_of(self.claim.message.offset),
            mapping,
            is_path: has_direct,
            put,
        };
        let slot = (self.claim.slot, self.claim.nonce);
        let peer = &self.claim.peer;
        let length = self.claim.wanted;
        let multipath = Multipath::begin(env, gpu, peer, slot, direct, length, parts, before, rtr);
        let is_begun = multipath.is_some();
        if let Some(mut multipath) = multipath {
            if self.claim.routed.as_ref().is_some_and(Routed::is_to_tell) {
                multipath.time_parts();
            }
            self.token = Some(OrderTokenEnd::of(multipath.token()));
            self.move_by(Moving::Multipath(Box::new(multipath)));
        }
        is_begun
    }

    /// Whether the message is read in turns if it takes one copy. `depth`: of its window, if that matters.
    fn may_turn(
        &self,
        env: &Env,
        gpu: &Gpu,
        routes: &mut RouteContext<'_>,
        depth: Option<u32>,
    ) -> bool {
        // A rank that deals with only one other rank has no choice whose message to read.
        let is_long = routes.are_several && self.claim.wanted >= turn::from(depth.unwrap_or(1));
        // Most short messages come where there was never a long one.
        let is_behind = |turns: &Turns| turns.are_waiting(self.claim.message.source);
        self.claim.may_be_pulled()
            && (is_long || gpu.turns.get(&self.claim.device).is_some_and(is_behind))
            && (routes.router).is_switched(env, &[self.claim.message.device, self.claim.device])
    }

    /// Starts the message now, or when its turn comes. `depth`: of its window, if that matters.
    pub(super) fn start_in_turn(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        routes: &mut RouteContext<'_>,
        depth: Option<u32>,
    ) {
        if self.may_turn(env, gpu, routes, depth) {
            let fresh = || Turns::new(env.node.own_shared());
            let turns = gpu.turns.entry(self.claim.device).or_insert_with(fresh);
            let turn = turns.enter(self.claim.message.source, self.claim.wanted, &|rank| {
                readers(env, rank)
            });
            let is_waiting = turn.is_waiting();
            self.claim.turn = Some(turn);
            if is_waiting {
                self.set_path(Path::QueuedForTurn);
                return;
            }
        }
        self.start(gpu);
    }

    pub(super) fn start(&mut self, gpu: &mut Gpu) {
        match Moving::begin_whole(&self.claim, gpu) {
            Ok(protocol) => self.move_by(protocol),
            Err(reason) => {
                if let Some((reason, error)) = reason {
                    stats::fallback(reason, self.claim.wanted);
                    self.claim.reason = Some(reason);
                    // It is no fault if two processes cannot share the memory, or if somebody else has caused
                    // the error.
                    if error.code().is_some() && !error.is_refusal() {
                        self.claim
                            .survived(&error, "through staging memory instead");
                    } else {
                        log::debug!(
                            "from rank {}: not direct: {error}",
                            self.claim.message.source
                        );
                    }
                }
                self.want_pipeline_in_order(gpu);
            }
        }
    }

    /// Makes the message come through its sender's ring, once what was received in its place before is over.
    fn want_pipeline_in_order(&mut self, gpu: &mut Gpu) {
        if self.claim.place().is_none() {
            self.want_pipeline(gpu);
            return;
        }
        if self.token.is_none() {
            // Later messages that are received in its place wait for it.
            self.leave_token(false);
        }
        self.claim.turn = None;
        self.set_path(Path::Unordered);
    }

    /// Asks the sender to bring the payload through its ring.
    pub(super) fn want_pipeline(&mut self, gpu: &mut Gpu) {
        let pipeline = Pipeline::ask(&mut self.claim, gpu);
        self.move_by(Moving::Pipeline(pipeline));
    }
}

/// A message, with all that decides how it starts.
struct Setting<'a, 'b> {
    fetch: &'a mut Fetch,
    env: &'a Env,
    gpu: &'a mut Gpu,
    routes: &'a mut RouteContext<'b>,
    depth: Option<u32>,
    /// Where it is received.
    place: (u64, u64),
    /// Order tokens of those that are received in its place.
    tokens: Vec<Arc<OrderToken>>,
    /// Another message is received in its place.
    is_below: bool,
    before: Option<Before>,
    put: Option<PutTarget>,
}

impl StartFacts for Setting<'_, '_> {
    fn is_to_device(&mut self) -> bool {
        matches!(self.fetch.claim.to, Destination::Device { .. })
    }

    fn is_staged(&mut self) -> bool {
        !self.fetch.claim.own && self.fetch.claim.message.flags & flag::EXPORTED == 0
    }

    fn may_be_split(&mut self) -> bool {
        self.fetch.claim.may_be_pulled()
            && self.fetch.claim.wanted == self.fetch.claim.message.length
    }

    fn window(&mut self) -> Option<u32> {
        let (env, wanted) = (self.env, self.fetch.claim.wanted);
        self.depth = self.depth.filter(|_| env.may_split(wanted));
        if let (Some(_), Destination::Device { context, .. }) = (self.depth, self.fetch.claim.to) {
            if uses_host(env, wanted) {
                self.gpu.pin_wide(context, &self.fetch.claim.peer, 0);
            }
        }
        self.depth
    }

    fn one_owner(&mut self) -> OneOwner {
        let Destination::Device { context, address } = self.fetch.claim.to else {
            return OneOwner::No;
        };
        let to = one_owner::To { context, address };
        let window = self.depth.unwrap_or(1);
        let (peer, message) = (&self.fetch.claim.peer, &self.fetch.claim.message);
        match OneOwnerTransfer::begin(self.env, self.gpu, self.routes, peer, message, to, window) {
            Begun::OneOwnerTransfer(one_owner) => {
                self.fetch.claim.life.trace_plan(one_owner.plan());
                self.fetch.token = Some(OrderTokenEnd::of(one_owner.token()));
                self.fetch.move_by(Moving::OneOwner(one_owner));
                OneOwner::Begun
            }
            Begun::Direct(routed) => {
                self.fetch.claim.take_route(Some(*routed));
                OneOwner::Direct
            }
            Begun::No => OneOwner::No,
        }
    }

    fn are_all_direct(&mut self) -> bool {
        self.tokens = self.routes.tokens(self.place);
        self.tokens.iter().all(|token| token.is_direct())
    }

    fn has_tokens(&mut self) -> bool {
        order_token::are_left()
    }

    fn is_below(&mut self) -> bool {
        self.is_below = self.routes.overlapping(self.place).next().is_some();
        self.is_below
    }

    fn is_unplanned(&mut self) -> bool {
        let depth = self.depth.unwrap_or(1);
        self.routes.is_unplanned(&self.fetch.claim.message, depth)
    }

    fn is_timed(&mut self) -> bool {
        self.routes.time_if_due(self.gpu, &self.fetch.claim.message)
    }

    fn is_for_sender(&mut self) -> bool {
        let message = &self.fetch.claim.message;
        self.routes.is_for_sender(self.env, self.gpu, message)
    }

    fn is_putting(&mut self) -> bool {
        self.routes.is_putting
    }

    fn are_alike(&mut self) -> bool {
        let (source, place) = (self.fetch.claim.message.source, self.place);
        self.routes.overlapping(place).all(|other| {
            let is_in_order = |token: &Arc<OrderToken>| token.is_in_order();
            other.source == source
                && other.to == place
                && other.token.as_ref().is_some_and(is_in_order)
        })
    }

    fn is_behind_any(&mut self) -> bool {
        self.tokens = self.routes.tokens(self.place);
        !self.tokens.is_empty()
    }

    fn has_before(&mut self) -> bool {
        let place = self.is_below.then_some(self.place);
        self.before = self.fetch.before(self.routes, place);
        self.before.is_some()
    }

    fn begins_put_in_turn(&mut self) -> bool {
        let source = self.fetch.claim.message.source;
        let before = self.before.as_ref().filter(|before| before.is_below);
        let is_in_order = before.is_none_or(|before| before.token.is_put());
        let put = self.routes.put_in_turn(self.env, self.gpu, source);
        let before = before.cloned();
        is_in_order
            && self
                .fetch
                .begin_parts(self.env, self.gpu, &[], put, true, before, None)
    }

    fn is_long(&mut self) -> bool {
        self.fetch.claim.wanted >= ONE_WAY_FROM
    }

    fn begins_put(&mut self) -> bool {
        let source = self.fetch.claim.message.source;
        let put = self.routes.put_as_before(self.env, self.gpu, source);
        let before = self.before.clone();
        let is_begun = self
            .fetch
            .begin_parts(self.env, self.gpu, &[], put, true, before, None);
        if is_begun && self.depth == Some(1) {
            // As the message in the other direction: the next ones had better get an RTR as well.
            self.routes.refused(&self.fetch.claim.message);
        }
        is_begun
    }

    fn is_put(&mut self) -> bool {
        let source = self.fetch.claim.message.source;
        let depth = self.depth.unwrap_or(1);
        self.put = match &self.before {
            // Like the message before it, whose lanes it uses.
            Some(Before {
                token,
                is_below: true,
                ..
            }) if token.is_put() => self.routes.put_as_before(self.env, self.gpu, source),
            Some(Before { is_below: true, .. }) => None,
            _ => self
                .routes
                .put(self.env, self.gpu, &self.fetch.claim.message, depth),
        };
        self.put.is_some()
    }

    fn begins_directly(&mut self) -> bool {
        let depth = self.depth.unwrap_or(1);
        let begins = self
            .routes
            .begins_directly(&self.fetch.claim.message, depth);
        if begins {
            self.fetch
                .begin_directly(self.env, self.gpu, self.routes, depth);
        }
        begins
    }

    fn begins_multipath(&mut self) -> bool {
        let depth = self.depth.unwrap_or(1);
        let (before, put) = (self.before.clone(), self.put.take());
        self.fetch
            .begin_multipath(self.env, self.gpu, self.routes, before, depth, put)
    }
}
