//! What has landed in a receive: an RTS, whose payload is fetched, or a bcopy payload, which is brought to
//! where it belongs.

use std::ffi::c_int;
use std::sync::Arc;

use slab::Slab;
use smallvec::SmallVec;

use super::check::ToCheck;
use super::finish::Quiet;
use super::lifting::Lifting;
use super::{Arrival, Receive, Target, Work};
use crate::cuda::{self, Buffer};
use crate::engine::core::Core;
use crate::engine::lift::{Lift, Shape, Way};
use crate::engine::place::{scatter, LentRuns, Parts};
use crate::engine::send::HOST_BYTES_MIN;
use crate::engine::Env;
use crate::mpi::{native, Abi, Out, Status, StatusOut, StatusRef};
use crate::node::{rts, RTS_BYTES};
use crate::stats::{self, Counter};
use crate::trace::{self, record};
use crate::transfer::fault::{self, Of};
use crate::transfer::fetch::{
    flag, Destination, Fetch, Landed, NotTaken, OrderToken, Others, RouteContext, Rows, Step,
};
use crate::transfer::gpu::Gpu;
use crate::transfer::life::{Outcome, Protocol, State};
use crate::transfer::stream::Wish;

/// Between sends of at least this length a program begins to receive. Claiming a message and launching its
/// copy takes 5 to 8 us, in which nothing is sent. Where many receives are posted, messages shorter than the
/// second constant are better begun together. Two H100s both ways, speed relative to that without the
/// library, without and with this, windows of 2, 4 and 16: 1 MiB 0.91 and 0.91, 0.87 and 0.94, 1.11 and 1.06;
/// 2 MiB 0.89 and 0.90, 0.90 and 1.00, 1.07 and 1.03; 4 MiB 0.92 and 0.95, 0.96 and 1.01, 1.08 and 1.08;
/// 32 MiB 0.97 and 1.00, 0.98 and 1.02, 1.04 and 1.05 (`docs/results/h100-x2-between.txt`; see
/// `docs/decisions/windows-before-the-wait.md`).
const BETWEEN_FROM: u64 = 1 << 20;
const BETWEEN_MANY_FROM: u64 = 4 << 20;
/// This many posted receives count as many.
const MANY: usize = 8;

/// The messages of `moving` that are under way to device memory, oldest first.
fn under_way(moving: &[usize], receives: &Slab<Receive>) -> Rows {
    let rows = moving.iter().filter_map(|id| match &receives[*id].work {
        Work::Fetch(fetch) => fetch.under_way(),
        Work::Lift(lifting) => Some(lifting.under_way()),
        _ => None,
    });
    let mut all: Rows = rows.collect();
    // Mostly they are sorted already.
    if !all.is_sorted_by_key(|row| row.began) {
        all.sort_by_key(|row| row.began);
    }
    all
}

impl Core {
    /// Counts what has arrived in posted receives.
    pub(in crate::engine) fn settle(&mut self, env: &Env) {
        let ids: Vec<usize> = self.receives.iter().map(|(id, _)| id).collect();
        for id in ids {
            self.look_at_arrival(env, id);
        }
    }

    /// Asks MPI whether a receive has completed natively.
    pub(super) fn look_at_arrival(&mut self, env: &Env, id: usize) {
        let receive = &self.receives[id];
        if receive.arrival.is_some() || receive.life.is_prepared() {
            return;
        }
        let (mut flag, mut status) = (0, Status::new());
        let code = {
            let _quiet = Quiet::enter(env.abi);
            let seen = StatusOut::of(&mut status);
            receive.native.status(Out::of(&mut flag), seen)
        };
        if flag != 0 || code != env.abi.success {
            // First what somebody waits for, so that the device works while the rest is recorded.
            if code == env.abi.success && self.take_landed(env, id) {
                self.launch(env);
                // The MPI library has usually brought others with it, or brings them one by one.
                self.take_announced(env);
                self.serve_if_asked(env);
            }
            self.arrive(env, id, &status, code);
        }
    }

    /// The program has sent a message of `bytes`, and may send more before it waits for what it receives. If
    /// long messages are on their way to this rank, this rank begins with the first one now, and does what
    /// the receivers of its own messages have asked for: the links are idle until then.
    pub(in crate::engine) fn begin_between(&mut self, env: &Env, bytes: u64) {
        let are_many = self.posted >= MANY;
        if bytes < BETWEEN_FROM || (are_many && bytes < BETWEEN_MANY_FROM) {
            return;
        }
        // With messages of several ranks, the first message need not be that of the first receive.
        let is_first = self.moving.is_empty() && !self.history.mix.are_several();
        if is_first && self.is_announced(env) {
            let posted = self.receives.iter();
            let posted = posted.filter(|(_, receive)| receive.life.is_offered());
            let first = posted.min_by_key(|(_, receive)| receive.serial);
            if let Some(id) = first.map(|(id, _)| id) {
                self.look_at_arrival(env, id);
                stats::add(Counter::BegunBetween, u64::from(!self.moving.is_empty()));
            }
        }
        self.serve_if_asked(env);
    }

    /// The native receive is complete.
    fn arrive(&mut self, env: &Env, id: usize, status: &Status, code: c_int) {
        let abi = env.abi;
        let seen = StatusRef::of(status);
        let (source, tag) = (abi.status_source(seen), abi.status_tag(seen));
        let (bytes, cancelled) = (env.length_of(seen), is_cancelled(seen));
        self.receives[id].arrival = Some(Arrival {
            source,
            tag,
            bytes,
            status: *status,
            code,
        });
        // A message that did not fit is counted once its error is known.
        let fits = bytes <= self.receives[id].room;
        if bytes == RTS_BYTES as u64 && fits && !cancelled && self.receives[id].matched.is_none() {
            if let Some(stream) = self.stream_of(env, id, source, tag) {
                self.received.take(stream);
            }
        }
        self.check_early_match(env, id, bytes);
        if !self.receives[id].life.is_offered() {
            return;
        }
        self.note_landed(env.abi, id);
        if cancelled {
            self.withdraw(env, id);
            stats::add(Counter::Cancelled, 1);
            self.receives[id].life.end(Outcome::Cancelled);
            return;
        }
        let taken = bytes == RTS_BYTES as u64
            && self.receives[id].may_hold_rts()
            && match self.take_rts(env, id) {
                Ok(()) => true,
                Err(NotTaken::Lost) => {
                    self.lose_rts(env, id, source);
                    true
                }
                Err(NotTaken::Bad) => {
                    stats::add(Counter::BadRts, 1);
                    false
                }
                Err(NotTaken::Value) => false,
            };
        if !taken {
            if !self.withdraw(env, id) {
                // This only happens if a message that its sender did not send is written where another one
                // belongs.
                log::error!(
                    "a receive was taken by a message that it is not for: its RTR was written over"
                );
                stats::add(Counter::Corrupt, 1);
            }
            self.take_value(env, id, bytes, source);
            self.check_value(env, id, bytes, source, tag);
        }
    }

    /// An RTS has arrived that its slot does not confirm. Its bytes are not the program's.
    fn lose_rts(&mut self, env: &Env, id: usize, source: c_int) {
        let why = "its sender gave it up, or its slot was written over";
        let why = fault::lost(self.sender(env, id, source), fault::Path::Rts, &why);
        stats::add(Counter::Errors, 1);
        self.taken += 1;
        let receive = &mut self.receives[id];
        receive.lose(env.abi, why);
        receive.length = Some(0);
        receive.end();
    }

    /// The message of a receive, named by the rank that the MPI library reports.
    pub(super) fn sender(&self, env: &Env, id: usize, source: c_int) -> Of {
        self.stream_of(env, id, source, 0)
            .map_or(Of::FromLocal(source), |stream| Of::From(stream.peer))
    }

    /// Looks for RTSs where posted receives land. No MPI call.
    ///
    /// Several may have landed since the last look. Those of one sender are taken in the order of their
    /// receives, which is the order of their messages, as some messages wait for those before them.
    fn scan_landed(&mut self, env: &Env) -> bool {
        let sender = |receive: &Receive| {
            let landed = receive.seems_to_have_rts().then(|| receive.read_landed());
            landed.flatten().map(|bytes| rts::sender(&bytes))
        };
        self.take_each(env, sender, |core, id| core.take_landed(env, id))
    }

    /// Takes messages of those receives for which `sender` finds one that seems to be there; `sender` names
    /// its sender. Returns whether there was any.
    ///
    /// One sender's messages are taken in the order of their receives, and the senders by their [`distance`].
    pub(super) fn take_each(
        &mut self,
        env: &Env,
        sender: impl Fn(&Receive) -> Option<u32>,
        mut take: impl FnMut(&mut Core, usize) -> bool,
    ) -> bool {
        let candidates = self.receives.iter();
        let mut candidates: SmallVec<[(u32, u64, usize); 8]> = candidates
            .filter_map(|(id, receive)| {
                let distance = distance(env.world_rank, sender(receive)?);
                Some((distance, receive.serial, id))
            })
            .collect();
        candidates.sort_unstable();
        let mut found = false;
        for (.., id) in candidates {
            if take(self, id) {
                found = true;
                self.gpu.launch_ahead();
                // Others may have claimed this rank's messages meanwhile, and wait for its part.
                self.serve_if_asked(env);
            }
        }
        found
    }

    /// Like [`Core::scan_landed`], if an RTS is on its way, with all copies launched at the end.
    pub(in crate::engine) fn take_announced(&mut self, env: &Env) -> bool {
        let mut found = self.claim_early(env);
        let is_announced = self.is_announced(env);
        if is_announced {
            found |= self.scan_landed(env);
        }
        if found || is_announced {
            self.launch(env);
        }
        found
    }

    /// If an RTS has landed in a posted receive, claims its message. An RTS that is not valid may be half
    /// written: it is judged when MPI says that it has arrived.
    fn take_landed(&mut self, env: &Env, id: usize) -> bool {
        let seems = self.receives[id].seems_to_have_rts();
        let is_taken = seems && self.take_rts(env, id).is_ok();
        if is_taken {
            self.note_landed(env.abi, id);
        }
        is_taken
    }

    /// If an RTS has landed, claims its message.
    fn take_rts(&mut self, env: &Env, id: usize) -> Result<(), NotTaken> {
        // A copy, because a payload that goes to host memory overwrites it.
        let bytes = self.receives[id].read_landed().ok_or(NotTaken::Value)?;
        self.claim(env, id, Landed::read(env, &bytes)?)
    }

    /// Claims the message of an RTS that has landed or will land.
    pub(super) fn claim(&mut self, env: &Env, id: usize, landed: Landed) -> Result<(), NotTaken> {
        if let (Target::Device { buffer, .. }, Ok(Destination::Device { context, .. })) =
            (&self.receives[id].target, self.receives[id].destination())
        {
            let (buffer, bytes) = (*buffer, self.receives[id].capacity);
            self.survey(env, &buffer, context, bytes);
        }
        let rts = landed.rts();
        let (sends_to, is_putting) = self.exchanges_with(rts.sender);
        let receive = &mut self.receives[id];
        let of = Of::From(rts.sender);
        receive.of = Some(of);
        let to = match receive.destination() {
            Ok(to) => to,
            Err(error) => {
                let why = fault::lost(of, fault::Path::Direct, &error);
                stats::add(Counter::Errors, 1);
                receive.lose(env.abi, why);
                Destination::Host(receive.landed.as_ptr())
            }
        };
        let mut kept = None;
        if let (Target::Device { buffer, .. }, Destination::Device { context, .. }) =
            (&receive.target, to)
        {
            if let Err(error) = self.gpu.prepare(buffer) {
                log::debug!("device buffer {:#x}: {error}", buffer.address);
            }
            self.gpu.relays.note(env, buffer, context);
            kept = Some(*buffer);
        }
        let (rtr, capacity) = (receive.rtr.take(), receive.capacity);
        let place = self.receives[id].written(capacity);
        let checks = self.checks_at(id, place);
        let begun = self.with_routes(
            kept.as_ref(),
            (sends_to, is_putting),
            (checks, u64::MAX),
            |gpu, routes| Fetch::begin(env, gpu, landed, to, capacity, routes, rtr),
        );
        let mut fetch = begun?;
        let (was_told, source) = (rtr.is_some(), fetch.message().source);
        if kept.is_some() && fetch.message().flags & flag::HOST == 0 {
            self.note_peer_mix(env, source);
        }
        let known = &mut self.history.received;
        let is_next = known.note(env.seen(), fetch.message(), &rts, was_told, sends_to)
            && self.history.mix.is_only(source);
        if let (Some(rtr), true) = (rtr, is_next) {
            env.node.own().promise_rtr(rtr);
        }
        fetch.set_began(self.taken);
        let receive = &mut self.receives[id];
        fetch.life().trace_post(receive.post);
        let length = fetch.length();
        receive.length = Some(length);
        receive.uncover(length);
        if length > receive.capacity {
            receive.code = env.abi.err_truncate;
            receive.length = Some(receive.capacity);
            stats::add(Counter::Truncated, 1);
        }
        if let Some(landing) = &mut receive.landing {
            landing.note_touched(RTS_BYTES as u64);
        }
        let to_check = ToCheck::of_fetch(env, &fetch);
        receive.life.transition(State::Matched);
        receive.work = Work::Fetch(fetch);
        self.expect_check(id, to_check);
        self.taken += 1;
        self.set_moving(id);
        Ok(())
    }

    /// Gives `find_way` what it needs to route a message besides the messages taken before it: what goes
    /// between the two ranks in the other direction, and the checks that must end first.
    fn with_routes<T>(
        &mut self,
        buffer: Option<&Buffer>,
        (sends_to, is_putting): (bool, bool),
        (checks, before): (Vec<Arc<OrderToken>>, u64),
        find_way: impl FnOnce(&mut Gpu, RouteContext<'_>) -> T,
    ) -> T {
        let (moving, receives) = (&self.moving, &self.receives);
        let find = || {
            let mut rows = under_way(moving, receives);
            rows.retain(|row| row.began <= before);
            rows
        };
        let others = Others::new(&find);
        let are_several = self.history.mix.are_several();
        let routes = RouteContext {
            router: &mut self.router,
            buffer,
            others: &others,
            checks,
            history: &mut self.history,
            sends_to,
            is_putting,
            computes: self.pace.computes(),
            are_several,
        };
        find_way(&mut self.gpu, routes)
    }

    /// What was received in the place of a message has been checked. The message is planned now, as if it was
    /// claimed this moment, but without those claimed after it.
    fn set_out(&mut self, env: &Env, id: usize) {
        let receive = &mut self.receives[id];
        let Work::Fetch(mut fetch) = std::mem::replace(&mut receive.work, Work::Nothing) else {
            return;
        };
        let buffer = match (&receive.target, receive.destination()) {
            (Target::Device { buffer, .. }, Ok(Destination::Device { .. })) => Some(*buffer),
            _ => None,
        };
        let exchange = self.exchanges_with(fetch.message().source);
        let before = (Vec::new(), fetch.began());
        self.with_routes(buffer.as_ref(), exchange, before, |gpu, mut routes| {
            fetch.set_out_behind(env, gpu, &mut routes);
        });
        self.receives[id].work = Work::Fetch(fetch);
    }

    /// A message that is to come through its sender's staging waits for what was received in its place
    /// before.
    fn put_in_order(&mut self, id: usize) {
        let staged = match &self.receives[id].work {
            Work::Fetch(fetch) if fetch.wants_order() => fetch.staged(),
            _ => return,
        };
        let (moving, receives) = (&self.moving, &mut self.receives);
        let others = moving.iter().filter(|other| **other != id);
        let before = |other: &usize| match (&mut receives[*other].work, &staged) {
            (Work::Fetch(fetch), Some(staged)) => fetch.end_before(staged),
            (Work::Lift(lifting), Some(staged)) => lifting.end_before(staged),
            _ => None,
        };
        let tokens = others.filter_map(before).collect();
        if let Work::Fetch(fetch) = &mut receives[id].work {
            fetch.set_order(&mut self.gpu, tokens);
        }
    }

    /// What must end before a bcopy payload of this receive may be lifted to these bytes of device memory:
    /// what is being written there, or read to be checked.
    fn ends_at(&mut self, id: usize, place: (u64, u64)) -> Vec<Arc<OrderToken>> {
        let checks = self.checks_at(id, place);
        let (moving, receives) = (&self.moving, &mut self.receives);
        let ends = moving
            .iter()
            .filter_map(|id| match &mut receives[*id].work {
                Work::Fetch(fetch) => fetch.end(place),
                Work::Lift(lifting) => lifting.end(place),
                _ => None,
            });
        ends.chain(checks).collect()
    }

    /// A bcopy payload or a native message has landed.
    fn take_value(&mut self, env: &Env, id: usize, bytes: u64, source: c_int) {
        self.spare_rts(env, id, bytes);
        if self.receives[id].is_for_device() {
            self.receives[id].of = Some(self.sender(env, id, source));
        }
        let of = self.receives[id].of;
        let arrival = self.receives[id].arrival.filter(|_| trace::on());
        let from = arrival.and_then(|arrival| self.stream_of(env, id, source, arrival.tag));
        let receive = &mut self.receives[id];
        if let Some(landing) = &mut receive.landing {
            landing.note_touched(bytes);
        }
        if bytes > receive.capacity && receive.capacity < receive.room {
            // There was more room natively than in the program's buffer.
            receive.code = crate::mpi::abi().map_or(1, |abi| abi.err_truncate);
            stats::add(Counter::Truncated, 1);
        }
        if receive.is_for_device() {
            let (tag, comm) = from.map_or((0, 0), |from| (from.tag, from.comm));
            receive.life.trace(comm, || record::Message {
                peer: of
                    .and_then(Of::rank)
                    .map_or(record::NO_PEER, |rank| rank as i32),
                tag,
                ..trace::about(record::Side::Receiver, bytes)
            });
            receive.life.trace_post(receive.post);
            receive.life.meter.came_from(of.and_then(Of::rank));
        }
        receive.life.transition(State::Matched);
        if receive.is_for_device() {
            receive.life.arrive(Protocol::Bcopy, bytes);
            self.wish_for_rts(env, id, bytes);
        } else {
            receive.life.arrive(Protocol::Native, bytes);
        }
        self.deliver(env, id, bytes);
    }

    /// A long bcopy payload for device memory has landed. The next message of its stream is better fetched in
    /// pieces, so that the device takes one piece while the next one comes.
    fn wish_for_rts(&self, env: &Env, id: usize, bytes: u64) {
        let Some(arrival) = self.receives[id]
            .arrival
            .filter(|_| bytes >= HOST_BYTES_MIN)
        else {
            return;
        };
        if let Some(stream) = self.stream_of(env, id, arrival.source, arrival.tag) {
            let key = Wish::Rts.key(stream.comm, stream.peer, stream.tag);
            env.node.own().set_wish(key, true);
        }
    }

    /// Called before bytes are brought to the program's memory: reads an RTS that has landed in their place.
    fn spare_rts(&mut self, env: &Env, id: usize, bytes: u64) {
        let receive = &self.receives[id];
        let Target::HostRuns(runs) = &receive.target else {
            return;
        };
        let mut pieces = runs.pieces(0, bytes.min(receive.capacity));
        let is_shared = pieces.any(|(_, run)| self.places.overlap(run.address(), run.bytes()));
        drop(pieces);
        if is_shared {
            self.scan_landed(env);
        }
    }

    /// Brings packed bytes from where they landed to where they belong.
    fn deliver(&mut self, env: &Env, id: usize, bytes: u64) {
        let receive = &mut self.receives[id];
        let bytes = bytes.min(receive.capacity);
        receive.work = Work::Nothing;
        match &receive.target {
            Target::InPlace | Target::Unseen | Target::LeftToMpi => {}
            Target::HostRuns(runs) => {
                scatter(receive.landed.part(0, bytes), runs.pieces(0, bytes));
            }
            Target::Device { .. } | Target::Several(_) if bytes == 0 => {}
            Target::Device { buffer, shape } => {
                let (buffer, shape, landed) =
                    (*buffer, shape.clone(), receive.landed.part(0, bytes));
                let of = receive.of();
                let place = shape.place(bytes);
                let lift = self.gpu.prepare(&buffer);
                let lift = lift.map(|context| Lift::new(Way::Up, context, shape, landed, of));
                self.begin_lifting(env, id, lift.map(|lift| vec![lift]), place);
            }
            Target::Several(runs) => {
                let runs = runs.clone();
                self.deliver_in_parts(env, id, &runs, bytes);
            }
        }
    }

    /// Brings packed bytes to a buffer in several places.
    fn deliver_in_parts(&mut self, env: &Env, id: usize, runs: &LentRuns, bytes: u64) {
        let (landed, of) = (
            self.receives[id].landed.part(0, bytes),
            self.receives[id].of(),
        );
        let parts = Parts::of(runs, bytes);
        scatter(landed, parts.host.into_iter());
        let lifts: cuda::Result<Vec<Lift>> = parts
            .device
            .into_iter()
            .map(|part| {
                let context = self.gpu.prepare(&part.buffer)?;
                let packed = part.gathered(landed);
                let shape = Shape::Runs(part.buffer.address, part.layout);
                Ok(Lift::owned(context, shape, packed, of))
            })
            .collect();
        self.begin_lifting(env, id, lifts, runs.place(bytes));
    }

    /// Has landed bytes lifted to a place.
    fn begin_lifting(
        &mut self,
        env: &Env,
        id: usize,
        lifts: cuda::Result<Vec<Lift>>,
        place: (u64, u64),
    ) {
        match lifts {
            Ok(lifts) => {
                let after = self.ends_at(id, place);
                let mut lifting = Lifting::new(lifts, place, after, self.taken);
                // Its first pieces are launched when this round ends. An error comes up again.
                let _copies = self.receives[id].life.copies();
                let _ = lifting.poll(&mut self.gpu);
                let receive = &mut self.receives[id];
                let protocol = receive.life.protocol().unwrap_or(Protocol::Bcopy);
                receive.life.transition(State::Moving(protocol));
                receive.work = Work::Lift(Box::new(lifting));
                self.set_moving(id);
            }
            Err(error) => self.spoil(env, id, &error),
        }
    }

    /// The payload cannot be brought to where it belongs.
    fn spoil(&mut self, env: &Env, id: usize, error: &cuda::Error) {
        let receive = &mut self.receives[id];
        let why = fault::lost(receive.of(), fault::Path::Bcopy, error);
        stats::add(Counter::Errors, 1);
        receive.lose(env.abi, why);
        receive.work = Work::Nothing;
        receive.end();
        self.drop_check(id);
    }

    /// Moves a receive on. Returns whether anything moved, and whether it is done. No MPI call.
    pub(in crate::engine) fn advance_receive(&mut self, env: &Env, id: usize) -> (bool, bool) {
        let Some(receive) = self.receives.get_mut(id) else {
            return (false, true);
        };
        let may_set_out = match &mut receive.work {
            Work::Fetch(fetch) => fetch.may_set_out(),
            _ => false,
        };
        if may_set_out {
            self.set_out(env, id);
            return (true, false);
        }
        self.put_in_order(id);
        let receive = &mut self.receives[id];
        let _copies = receive.life.copies();
        match &mut receive.work {
            Work::Fetch(fetch) => match fetch.poll(env, &mut self.gpu) {
                Step::Pending(moved) => (moved, false),
                Step::Done => {
                    let bytes = fetch.length();
                    (receive.life, receive.reason) = (fetch.life(), fetch.reason());
                    receive.parts = fetch.parts();
                    self.fetched(env, id, bytes);
                    let is_placed = self.receives[id].is_placed();
                    (true, is_placed && !self.begin_check(id))
                }
                Step::Failed(why) => {
                    stats::add(Counter::Errors, 1);
                    receive.life = fetch.life();
                    receive.lose(env.abi, why);
                    receive.work = Work::Nothing;
                    self.drop_check(id);
                    (true, true)
                }
            },
            Work::Lift(lifting) => match lifting.poll(&mut self.gpu) {
                Ok(false) => (false, false),
                Ok(true) => {
                    receive.life.transition(State::Landed);
                    receive.work = Work::Nothing;
                    (true, !self.begin_check(id))
                }
                Err(error) => {
                    self.spoil(env, id, &error);
                    (true, true)
                }
            },
            Work::Check(_) => self.advance_check(env, id),
            _ => (false, true),
        }
    }

    /// The payload of an RTS has arrived where it was fetched to.
    fn fetched(&mut self, env: &Env, id: usize, bytes: u64) {
        self.spare_rts(env, id, bytes);
        let receive = &mut self.receives[id];
        let to_host = !matches!(
            &receive.target,
            Target::Device {
                shape: Shape::Dense(_),
                ..
            }
        );
        let bytes = if receive.code == 0 { bytes } else { 0 };
        if to_host {
            stats::add(Counter::HostFetched, 1);
            stats::add(Counter::HostFetchedBytes, bytes);
        }
        if !to_host || bytes == 0 || receive.dense_host().is_some() {
            receive.work = Work::Nothing;
            return;
        }
        if let Some(landing) = &mut receive.landing {
            landing.note_touched(bytes);
        }
        let moving = self.moving.len();
        self.deliver(env, id, bytes);
        // It is in the list already.
        self.moving.truncate(moving);
    }

    /// Ends a receive whose sender has died.
    pub(in crate::engine) fn fail_receive(&mut self, env: &Env, id: usize) {
        if let Work::Fetch(fetch) = &mut self.receives[id].work {
            if fetch.give_up_on_the_dead(env, &mut self.gpu) {
                stats::add(Counter::DeadPeers, 1);
            }
        }
    }
}

/// Bytes that a status reports.
pub(in crate::engine) fn received(abi: &Abi, status: StatusRef<'_>) -> u64 {
    let mut bytes = 0i64;
    let code = native::get_elements_x(status, abi.byte, Out::of(&mut bytes));
    if code == abi.success {
        u64::try_from(bytes).unwrap_or(0)
    } else {
        0
    }
}

/// Whether a status is that of a cancelled operation.
pub(in crate::engine) fn is_cancelled(status: StatusRef<'_>) -> bool {
    let mut flag = 0;
    native::test_cancelled(status, Out::of(&mut flag));
    flag != 0
}

/// How far a sender is behind one's own rank. Of several senders the nearest comes first. If all ranks began
/// with rank 0, then rank 1, all would read from the same GPU at a time and share its link.
fn distance(own: u32, sender: u32) -> u32 {
    own.wrapping_sub(sender)
}

#[cfg(test)]
mod tests {
    use super::distance;

    #[test]
    fn no_two_ranks_read_from_the_same_one_at_a_time() {
        for ranks in 2..10 {
            let orders: Vec<Vec<u32>> = (0..ranks)
                .map(|own| {
                    let mut senders: Vec<u32> = (0..ranks).filter(|rank| *rank != own).collect();
                    senders.sort_by_key(|sender| distance(own, *sender));
                    senders
                })
                .collect();
            for at in 0..ranks as usize - 1 {
                let mut read: Vec<u32> = orders.iter().map(|order| order[at]).collect();
                read.sort_unstable();
                read.dedup();
                assert_eq!(read.len(), orders.len(), "{ranks} ranks, {at}: {orders:?}");
            }
        }
    }
}
