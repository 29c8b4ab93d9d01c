//! The receiver's side of a multipath message with two owners. The receiver reads its own part from the
//! sender's memory, and empties the staging that the sender fills with the rest (`staged_part.rs`;
//! `serve/staged_parts.rs` is the other side).
//!
//! The receiver reads whatever the sender does not bring: chunks that the sender has not begun when the
//! receiver has nothing left to do, chunks of a staged part that has failed, and all that the sender has
//! begun if it then does nothing more. Only a sender that writes to the receiver's buffer is waited for,
//! until it writes no more or has died.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use super::gaps::{gaps, longest_gap};
use super::put::has_landed;
use super::staged_part::{StagedPart, Staging};
use super::{Next, Orphan, Progress};
use crate::cuda::{clock_ns, ContextKey, Copy, Error, InFlight, Mapping, Purpose};
use crate::node::staged_part::{StagedPartOf, STAGED_PARTS};
use crate::node::{Asked, Part, Peer, RtrId, RtrState, StagedPartError};
use crate::policy::decided;
use crate::policy::parts::{claim_back, Left};
use crate::stats::{self, Counter};
use crate::transfer::fault::{self, Of, Path, Trouble};
use crate::transfer::fetch::claim::{Claim, Lost};
use crate::transfer::fetch::order_token::OrderToken;
use crate::transfer::fetch::put_target::{PutTarget, TURN_PATIENCE};
use crate::transfer::gpu::Gpu;
use crate::transfer::life::Protocol;
use crate::transfer::route::HostFared;
use crate::transfer::story::Parts;
use crate::transfer::Env;

/// A receiver that has not looked for this long cannot tell how long its sender has done nothing.
const ABSENCE: Duration = Duration::from_millis(500);
/// The clock is read once in so many looks.
const LOOKS: u32 = 32;

/// What this rank needs to read the sender's memory.
pub struct Direct {
    /// Context of the receiver's buffer.
    pub context: ContextKey,
    /// Address of the receiver's buffer.
    pub to: u64,
    /// Address of the sender's buffer in this process.
    pub from: u64,
    /// The sender's allocation.
    pub mapping: Arc<Mapping>,
    /// This rank may read it even if nothing stands in the way of the other paths.
    pub is_path: bool,
    /// The receiver's buffer, if the sender is to put the direct part there.
    pub put: Option<PutTarget>,
}

/// When the part in host memory, and all other parts, were over, in nanoseconds.
#[derive(Default)]
struct Ends {
    host: Option<u64>,
    others: Option<u64>,
}

/// Since when this rank waits for somebody.
#[derive(Clone, Copy)]
struct Since {
    by_devices_ns: u64,
    at: Instant,
}

impl Since {
    fn now() -> Since {
        Since {
            by_devices_ns: clock_ns(),
            at: Instant::now(),
        }
    }

    /// By the devices' clock, which a simulated node moves no further than its ranks have come. If nothing
    /// moves that clock, none of them will come.
    fn is_within(&self, patience: Duration) -> bool {
        let by_devices = clock_ns().saturating_sub(self.by_devices_ns);
        Duration::from_nanos(by_devices) <= patience && self.at.elapsed() <= ABSENCE
    }
}

/// A multipath message under way, two owners.
pub struct Multipath {
    peer: Arc<Peer>,
    direct: Direct,
    asked: Asked,
    length: u64,
    slot: (u32, u64),
    /// It has been offered to the sender.
    is_asked: bool,
    token: Arc<OrderToken>,
    /// The message before it.
    before: Option<Before>,
    /// The RTR after which the sender already writes part of it, until that part has landed.
    rtr: Option<RtrId>,
    /// This rank's reads of the sender's memory.
    gets: Vec<Get>,
    staged_parts: Vec<StagedPart>,
    /// The message must come another way, or not at all, once nothing is in flight.
    lost: Option<Loss>,
    /// The sender has died, and writes nowhere any more.
    is_orphan: bool,
    /// The sender is to put a part, and has not begun.
    is_putter_awaited: bool,
    /// Since when this rank waits for that, with no message before it.
    awaited: Option<Since>,
    /// When its parts were over, if that is wanted.
    ends: Option<Ends>,
    is_open: bool,
    looks: u32,
    /// When the clock was last read, and when something last moved.
    looked: Instant,
    moved: Instant,
    by_direct: u64,
    /// Bytes that its sender has put after an RTR.
    by_put: u64,
    /// Bytes that were not brought, because the bytes of the message behind it are in their place.
    overtaken: u64,
}

/// An earlier message from the same sender.
#[derive(Clone)]
pub struct Before {
    /// How far that message is.
    pub token: Arc<OrderToken>,
    /// Both are received in the same place, and are split alike.
    pub is_below: bool,
    /// The last message that its sender still has to work on, wherever that one is received.
    pub last: Option<Arc<OrderToken>>,
}

impl Before {
    /// Whether its sender has nothing left to do before this message.
    fn is_over(&self) -> bool {
        let last = self.last.as_ref();
        self.token.is_over() && last.is_none_or(|token| token.is_over())
    }
}

/// Why the message does not come as it began.
#[derive(Clone, Copy)]
enum Loss {
    /// A copy of this rank's failed.
    Driver(Error),
    /// The RTR by which its sender writes was written over.
    WrittenOver,
}

struct Get {
    copy: InFlight,
    bytes: u64,
}

/// The result of a step.
enum Step {
    /// Under way; whether something moved.
    Pending(bool),
    /// All of it is there.
    Arrived,
    /// It must come another way; nothing is in flight.
    Lost(Error),
    /// The RTR by which its sender writes was written over; nothing is in flight.
    Corrupt,
}

impl Multipath {
    /// Queues the direct part, then asks the sender for the others. None if there is nothing to ask for.
    ///
    /// Behind a message that is received in the same place, it takes that message's parts. Otherwise, what
    /// has no staging goes directly as well. With an `rtr`, the sender already writes a part, which nobody
    /// else brings.
    #[allow(
        clippy::too_many_arguments,
        reason = "environment, driver and message apart; transfers without MPI are to bring them together"
    )]
    pub fn begin(
        env: &Env,
        gpu: &mut Gpu,
        peer: &Arc<Peer>,
        slot: (u32, u64),
        direct: Direct,
        length: u64,
        parts: &[Part],
        before: Option<Before>,
        rtr: Option<RtrId>,
    ) -> Option<Multipath> {
        let mut staged_parts: Vec<StagedPart> = Vec::new();
        let below = before.as_ref().filter(|before| before.is_below);
        let parts = below.map_or(parts, |before| &before.token.parts[..]);
        let until = rtr.map_or(length, |rtr| rtr.rest);
        // The put comes first, as it takes longest: 8 us would pass before the sender has begun all others.
        let put = match (&direct.put, below) {
            (Some(_), None) => longest_gap(parts, until),
            _ => None,
        };
        for part in put.iter().chain(parts) {
            match Staging::reach(env, gpu, &direct, peer, part) {
                Some(staging) if staged_parts.len() < STAGED_PARTS => {
                    staged_parts.push(StagedPart::new(staged_parts.len(), *part, staging))
                }
                _ => {}
            }
        }
        let offered: Vec<Part> = staged_parts
            .iter()
            .map(|staged_part| staged_part.part)
            .collect();
        if offered.is_empty() || (below.is_some() && offered.len() != parts.len()) {
            return None;
        }
        if let Some(before) = below {
            before.token.follow();
        }
        let target = direct.put.as_ref().map(|put| &put.target);
        let behind = before.as_ref().and_then(|before| before.token.asked);
        let asked = env.node.own().open_offer(&offered, target, behind)?;
        let mut multipath = Multipath {
            peer: Arc::clone(peer),
            direct,
            asked,
            length,
            slot,
            is_asked: false,
            token: Arc::new(OrderToken::new(offered.clone(), Some(asked))),
            before,
            rtr,
            gets: Vec::new(),
            staged_parts,
            lost: None,
            is_orphan: false,
            is_putter_awaited: false,
            awaited: None,
            ends: None,
            is_open: true,
            looks: 0,
            looked: Instant::now(),
            moved: Instant::now(),
            by_direct: 0,
            by_put: 0,
            overtaken: 0,
        };
        if multipath.rtr.is_some() {
            // The sender's put is on no lane of this message.
            multipath.token.set_out_of_order();
        }
        for (offset, bytes) in gaps(&offered, until) {
            multipath.get(gpu, offset, bytes);
        }
        multipath.ask();
        Some(multipath)
    }

    /// How far it is, for the message behind it.
    pub fn token(&self) -> &Arc<OrderToken> {
        &self.token
    }

    /// Offers the message to its sender, if the message before it is offered. True if that was done now.
    fn ask(&mut self) -> bool {
        let may_ask = |before: &Before| before.token.is_offered();
        if self.is_asked || !self.before.as_ref().is_none_or(may_ask) {
            return false;
        }
        self.is_asked = true;
        self.token.set_offered();
        self.is_putter_awaited = self.staged_parts.iter().any(StagedPart::is_put);
        let (slot, nonce) = self.slot;
        if let Some(slot) = self.peer.slot(slot) {
            slot.ask(nonce, self.asked);
            self.peer.ring_doorbell();
        }
        true
    }

    /// Notes in the order token how far it is.
    fn leave_token(&self) {
        for staged_part in &self.staged_parts {
            if !staged_part.is_retired
                && !staged_part.is_cut
                && staged_part.launched == staged_part.end
            {
                self.token.set_launched(staged_part.number);
            }
        }
    }

    /// Brings bytes that their staged part will not bring any more, by a copy of this rank that is not on the
    /// part's lane.
    fn bring_otherwise(&mut self, gpu: &mut Gpu, number: usize, (offset, bytes): (u64, u64)) {
        // If a message follows, what its sender puts for that one may be there already.
        if self.staged_parts[number].is_put() || self.token.is_launched(number) {
            if self.token.has_follower() {
                self.overtaken += bytes;
                return;
            }
            self.token.set_out_of_order();
        }
        self.get(gpu, offset, bytes);
        gpu.launch();
    }

    /// Queues a copy from the sender's memory.
    fn get(&mut self, gpu: &mut Gpu, offset: u64, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let copy = Copy::Linear {
            dst: self.direct.to + offset,
            src: self.direct.from + offset,
            bytes,
        };
        let (context, rank) = (self.direct.context, self.peer.world_rank());
        let mapping = Some(Arc::clone(&self.direct.mapping));
        match gpu.pull(context, rank, copy, mapping) {
            Ok(copy) => self.gets.push(Get { copy, bytes }),
            Err(error) => self.lost = Some(Loss::Driver(error)),
        }
    }

    /// Moves on, without waiting.
    fn poll(&mut self, env: &Env, gpu: &mut Gpu) -> Step {
        if let Some(loss) = self.lost {
            let moved = self.poll_put(env, gpu);
            if !self.is_drained(env) || self.is_behind() {
                return Step::Pending(moved);
            }
            self.close(env);
            return match loss {
                Loss::WrittenOver => Step::Corrupt,
                // What follows it may have been written.
                Loss::Driver(_) if self.token.has_follower() => Step::Arrived,
                Loss::Driver(error) => Step::Lost(error),
            };
        }
        let mut moved = self.poll_put(env, gpu) | self.ask() | self.poll_gets();
        for number in 0..self.staged_parts.len() {
            moved |= self.poll_staged_part(env, gpu, number);
        }
        if self.lost.is_some() {
            // The sender may still bring what it has claimed.
            let asked = self.asked;
            for staged_part in &self.staged_parts {
                shared(env, asked, staged_part.number).map(|shared| shared.take_back(u32::MAX));
            }
            self.token.set_out_of_order();
            return Step::Pending(true);
        }
        self.leave_token();
        self.before.take_if(|before| before.is_over());
        if self.is_putter_awaited && self.before.is_none() {
            moved |= self.await_putter(env, gpu);
        }
        let is_put = |staged_part: &StagedPart| staged_part.is_put() && !staged_part.is_done();
        let is_idle = self.gets.is_empty()
            && self.rtr.is_none()
            && !self.staged_parts.iter().all(StagedPart::is_done)
            && !self.staged_parts.iter().any(is_put);
        let is_alone = !self.token.has_follower() && !self.is_behind();
        if is_idle && is_alone && self.direct.is_path && self.is_lane_free(gpu) {
            moved |= self.claim_back(env, gpu);
        }
        self.note_ends();
        if self.gets.is_empty()
            && self.rtr.is_none()
            && self.staged_parts.iter().all(StagedPart::is_done)
        {
            self.close(env);
            return Step::Arrived;
        }
        self.watch(env, gpu, moved);
        Step::Pending(moved)
    }

    /// Looks how far the sender's put is.
    fn poll_put(&mut self, env: &Env, gpu: &mut Gpu) -> bool {
        let Some(rtr) = self.rtr else {
            return false;
        };
        let (own, bytes) = (env.node.own(), self.length - rtr.rest);
        match own.rtr_state(rtr) {
            Some(RtrState::Taken) => return false,
            Some(RtrState::Landed) => {
                has_landed(env, rtr);
                self.by_put = bytes;
            }
            Some(RtrState::Refused) => {
                own.close_rtr(rtr);
                stats::add(Counter::Retries, 1);
                if self.lost.is_none() {
                    self.get(gpu, rtr.rest, bytes);
                    gpu.launch();
                }
            }
            Some(RtrState::Open) | None => {
                self.lost = Some(Loss::WrittenOver);
            }
        }
        self.rtr = None;
        true
    }

    /// Looks whether the sender has begun to put. A sender that does not begin is not waited for.
    fn await_putter(&mut self, env: &Env, gpu: &mut Gpu) -> bool {
        let Some(number) = self.staged_parts.iter().position(StagedPart::is_put) else {
            return false;
        };
        let claimed = shared(env, self.asked, number).map(|shared| shared.claimed());
        if self.staged_parts[number].is_retired || !matches!(claimed, Some(Ok((0, _)))) {
            self.is_putter_awaited = false;
            return false;
        }
        let since = *self.awaited.get_or_insert_with(Since::now);
        let push = self.direct.put.as_ref();
        // Bytes to which the following message may have been written are not read any more: the sender gets
        // more time.
        let patience_min = match self.token.has_follower() {
            true => TURN_PATIENCE,
            false => Duration::ZERO,
        };
        if push.is_some_and(|push| since.is_within(push.patience.max(patience_min))) {
            return false;
        }
        self.is_putter_awaited = false;
        self.take_over(env, gpu, number, u32::MAX)
    }

    /// Whether a message that is received in the same place is not over.
    fn is_behind(&self) -> bool {
        let before = self.before.as_ref();
        before.is_some_and(|before| before.is_below && !before.token.is_over())
    }

    fn poll_gets(&mut self) -> bool {
        let before = self.gets.len();
        let (mut arrived, mut lost) = (0, None);
        let rank = self.peer.world_rank();
        self.gets.retain_mut(|get| match get.copy.poll() {
            Ok(true) => {
                arrived += get.bytes;
                false
            }
            Ok(false) => true,
            Err(error) => {
                if get.copy.is_lost() {
                    lost = Some(Loss::Driver(error));
                } else {
                    fault::tried_again(Of::From(rank), Path::Multipath, &error);
                }
                true
            }
        });
        self.by_direct += arrived;
        self.lost = self.lost.or(lost);
        self.gets.len() != before
    }

    fn poll_staged_part(&mut self, env: &Env, gpu: &mut Gpu, number: usize) -> bool {
        let staged_part = &mut self.staged_parts[number];
        if staged_part.is_done() {
            return false;
        }
        let shared = shared(env, self.asked, staged_part.number);
        let below = self.before.as_ref().filter(|before| before.is_below);
        let may_launch = below.is_none_or(|before| before.token.is_launched(staged_part.number));
        let step = match &shared {
            Some(shared) => staged_part.poll(gpu, shared, &self.peer, &self.direct, may_launch),
            None => Err(StagedPartError::Stale.into()),
        };
        let moved = match step {
            Ok(moved) => moved,
            Err(trouble) => {
                self.retire(env, number, Some(&trouble));
                if self.staged_parts[number].is_put() {
                    gpu.put_failed(self.peer.world_rank());
                }
                if let Trouble::Driver(_) = trouble {
                    self.staged_parts[number].blame(gpu);
                }
                true
            }
        };
        // This rank reads what an abandoned staged part has not brought, once nothing writes there.
        let staged_part = &self.staged_parts[number];
        let is_left = staged_part.is_retired && staged_part.flying.is_empty();
        if is_left && !self.is_behind() && !self.is_written(env, staged_part) {
            let staged_part = &mut self.staged_parts[number];
            let (first, count) = (staged_part.emptied, staged_part.end - staged_part.emptied);
            staged_part.end = staged_part.emptied;
            let span = staged_part.part.span(first, count);
            self.bring_otherwise(gpu, number, span);
            return true;
        }
        moved
    }

    /// Abandons a staged part. Without trouble, the reason is that the sender is late.
    fn retire(&mut self, env: &Env, number: usize, trouble: Option<&Trouble>) {
        let asked = self.asked;
        let staged_part = &mut self.staged_parts[number];
        if staged_part.is_retired {
            return;
        }
        staged_part.is_retired = true;
        if let Some(shared) = shared(env, asked, staged_part.number) {
            // The sender may bring in vain what it has claimed already.
            let _ = shared.take_back(u32::MAX);
        }
        stats::add(Counter::PathsAbandoned, 1);
        let of = Of::From(self.peer.world_rank());
        if self.peer.goes_on() {
            let remedy = "its part is taken directly";
            match trouble {
                Some(trouble) => fault::survived(of, Path::Multipath, trouble, remedy),
                None => fault::late(of, Path::Multipath, &"its sender does not go on", remedy),
            }
        }
    }

    /// Whether the receiver has nothing else to read from this sender.
    fn is_lane_free(&self, gpu: &mut Gpu) -> bool {
        let load = gpu.load(
            self.direct.context,
            Purpose::Get,
            u64::from(self.peer.world_rank()),
        );
        load.is_ok_and(|load| load == 0)
    }

    /// Takes back chunks that the sender has not begun, from the staged part that has most of them left.
    fn claim_back(&mut self, env: &Env, gpu: &mut Gpu) -> bool {
        let asked = self.asked;
        let left = |staged_part: &StagedPart| {
            let (next, end) = shared(env, asked, staged_part.number)?.claimed().ok()?;
            Some(Left {
                number: staged_part.number,
                chunks: (next, end - next),
                chunk_bytes: staged_part.part.chunk_bytes,
            })
        };
        let open = self
            .staged_parts
            .iter()
            .filter(|staged_part| !staged_part.is_retired);
        let open: SmallVec<[Left; 8]> = open.filter_map(left).collect();
        let claimed = decided!("parts.claim_back", open.as_slice(), claim_back(&open));
        claimed.is_some_and(|(number, most)| self.take_over(env, gpu, number, most))
    }

    /// Reads all chunks that the sender has not begun. False if there are none.
    fn take_over_all(&mut self, env: &Env, gpu: &mut Gpu) -> bool {
        let mut took = false;
        for number in 0..self.staged_parts.len() {
            if !self.staged_parts[number].is_retired {
                took |= self.take_over(env, gpu, number, u32::MAX);
            }
        }
        took
    }

    /// Reads the last chunks of a staged part that the sender has not begun. False if there are none.
    fn take_over(&mut self, env: &Env, gpu: &mut Gpu, number: usize, most: u32) -> bool {
        let staged_part = &mut self.staged_parts[number];
        let Some(shared) = shared(env, self.asked, staged_part.number) else {
            return false;
        };
        let Ok((first, count)) = shared.take_back(most) else {
            return false;
        };
        if count == 0 {
            return false;
        }
        staged_part.end = first;
        staged_part.is_cut = true;
        let span = staged_part.part.span(first, count);
        stats::add(Counter::ChunksClaimedBack, u64::from(count));
        self.bring_otherwise(gpu, number, span);
        true
    }

    /// Stops waiting for a sender that brings nothing.
    fn watch(&mut self, env: &Env, gpu: &mut Gpu, moved: bool) {
        self.looks = self.looks.wrapping_add(1);
        if moved {
            self.looks = 0;
        }
        // This rank's own copies may take long, too.
        let is_flying = |staged_part: &StagedPart| !staged_part.flying.is_empty();
        let is_at_work = !self.gets.is_empty() || self.staged_parts.iter().any(is_flying);
        if moved || is_at_work || self.before.is_some() {
            if self.looks % LOOKS == 0 {
                self.moved = Instant::now();
                self.looked = self.moved;
            }
            return;
        }
        if self.looks % LOOKS == 0 {
            let now = Instant::now();
            let patience = Duration::from_micros(env.config.patience_us.into());
            if now.duration_since(self.looked) > ABSENCE {
                self.moved = now;
            }
            self.looked = now;
            if now.duration_since(self.moved) > patience {
                // A sender that waits for staging has begun none of the missing chunks: other messages have
                // all the staging.
                if !self.take_over_all(env, gpu) {
                    self.leave_sender(env);
                }
                self.moved = now;
            }
        }
    }

    fn leave_sender(&mut self, env: &Env) {
        for number in 0..self.staged_parts.len() {
            let staged_part = &self.staged_parts[number];
            // A put in progress is waited for in any case, and so are this rank's own copies, if only those
            // are left.
            if staged_part.launched < staged_part.end && !self.is_written(env, staged_part) {
                self.retire(env, number, None);
            }
        }
    }

    /// Whether the sender may be writing to the receiver's buffer.
    fn is_written(&self, env: &Env, staged_part: &StagedPart) -> bool {
        let shared = || shared(env, self.asked, staged_part.number);
        let is_being_filled = || shared().is_some_and(|shared| shared.is_being_filled());
        staged_part.is_put() && !self.is_orphan && is_being_filled()
    }

    fn close(&mut self, env: &Env) {
        if std::mem::replace(&mut self.is_open, false) {
            env.node.own().close_offer(self.asked);
        }
    }

    /// Whether nothing writes to the receiver's buffer any more.
    fn is_drained(&mut self, env: &Env) -> bool {
        self.gets.retain_mut(|get| !get.copy.is_over());
        for staged_part in &mut self.staged_parts {
            staged_part
                .flying
                .retain_mut(|flying| !flying.copy.is_over());
        }
        let is_quiet = |staged_part: &StagedPart| {
            staged_part.flying.is_empty() && !self.is_written(env, staged_part)
        };
        self.gets.is_empty() && self.rtr.is_none() && self.staged_parts.iter().all(is_quiet)
    }

    /// Records when its parts are over.
    pub fn time_parts(&mut self) {
        self.ends = Some(Ends::default());
    }

    fn note_ends(&mut self) {
        let Some(ends) = &mut self.ends else { return };
        let staged_parts = &self.staged_parts;
        let is_over = |is_host: bool| {
            let mut staged_parts = staged_parts
                .iter()
                .filter(|staged_part| staged_part.is_host() == is_host);
            staged_parts.all(StagedPart::is_done)
        };
        if ends.host.is_none() && is_over(true) {
            ends.host = Some(clock_ns());
        }
        let is_got = self.gets.is_empty() && self.rtr.is_none();
        if ends.others.is_none() && is_got && is_over(false) {
            ends.others = Some(clock_ns());
        }
    }

    /// How the part in host memory fared. None if that was not wanted, or if it tells nothing.
    fn host_fared(&self) -> Option<HostFared> {
        let ends = self.ends.as_ref()?;
        if self
            .staged_parts
            .iter()
            .any(|staged_part| staged_part.is_retired)
        {
            return None;
        }
        let is_taken_over = |staged_part: &StagedPart| staged_part.is_host() && staged_part.is_cut;
        if self.staged_parts.iter().any(is_taken_over) {
            return Some(HostFared::TakenOver);
        }
        let lead_ns = ends.others? as f64 - ends.host? as f64;
        Some(HostFared::Before(1e-3 * lead_ns))
    }

    /// Whether it comes by the direct path alone, because its sender puts all of it.
    fn is_direct(&self) -> bool {
        self.staged_parts.iter().all(StagedPart::is_put)
    }

    /// Bytes that have not come straight from the sender's memory.
    fn bytes_by_path(&self) -> Parts {
        if self.lost.is_some() {
            return Parts {
                overtaken: self.length,
                ..Parts::default()
            };
        }
        let mut parts = Parts {
            overtaken: self.overtaken,
            ..Parts::default()
        };
        for staged_part in &self.staged_parts {
            match staged_part.staging {
                Staging::Host => parts.host += staged_part.arrived,
                Staging::Relay { .. } => parts.relay += staged_part.arrived,
                Staging::Put => {}
            }
        }
        parts
    }

    /// The protocol by which it has come.
    fn came_by(&self) -> Protocol {
        match self.is_direct() {
            true if self.put_bytes() > 0 => Protocol::Put,
            true => Protocol::Get,
            false => Protocol::Multipath,
        }
    }

    /// Of a message that comes by the direct path alone: bytes that its sender has put.
    fn put_bytes(&self) -> u64 {
        let parts = self.staged_parts.iter();
        parts.map(|part| part.arrived).sum::<u64>() + self.by_put
    }

    /// Counts its bytes by the path that they came by.
    fn count_bytes(&self) {
        let is_lost = self.lost.is_some();
        let overtaken = if is_lost { self.length } else { self.overtaken };
        stats::add(Counter::MultipathOvertakenBytes, overtaken);
        if self.is_direct() {
            stats::add(Counter::PutBytes, self.put_bytes());
            return;
        }
        if is_lost {
            return;
        }
        stats::add(Counter::MultipathDirectBytes, self.by_direct);
        stats::add(Counter::MultipathPutBytes, self.by_put);
        for staged_part in &self.staged_parts {
            let counter = match staged_part.staging {
                Staging::Host => Counter::MultipathHostBytes,
                Staging::Relay { .. } => Counter::MultipathRelayBytes,
                Staging::Put => Counter::MultipathPutBytes,
            };
            stats::add(counter, staged_part.arrived);
        }
    }
}

impl super::Protocol for Multipath {
    fn name(&self) -> Protocol {
        match self.is_direct() {
            true => Protocol::Get,
            false => Protocol::Multipath,
        }
    }

    fn progress(&mut self, claim: &mut Claim, env: &Env, gpu: &mut Gpu) -> Result<Progress, Lost> {
        match self.poll(env, gpu) {
            Step::Pending(moved) => Ok(Progress::Pending(moved)),
            Step::Arrived => Ok(Progress::Landed(self.came_by())),
            Step::Corrupt => Err(Lost::Corrupt),
            Step::Lost(error) => {
                claim.survived_through_host(&error);
                Ok(Progress::Instead(Next::HostPipeline))
            }
        }
    }

    /// It fails only once nothing of it is in flight.
    fn abort(self) -> Vec<InFlight> {
        Vec::new()
    }

    fn reads_lent_buffer(&self) -> bool {
        true
    }

    fn count(&mut self, claim: &Claim, _: &Env) {
        self.count_bytes();
        if let (Some(routed), Some(how)) = (&claim.routed, self.host_fared()) {
            routed.record_host_lateness(how);
        }
    }

    /// What its sender has not brought is read from the sender's memory, which is there as long as it is
    /// mapped.
    fn orphan(&mut self, claim: &Claim, env: &Env) -> Orphan {
        fault::died(Of::From(claim.message.source), Path::Multipath, false);
        self.is_orphan = true;
        if let Some(rtr) = self.rtr {
            // It writes no more.
            env.node.own().withdraw_rtr(rtr);
        }
        self.leave_sender(env);
        Orphan::GoesOn
    }

    fn reads_peer(&self) -> bool {
        !self.is_direct() && self.rtr.is_none() && self.by_put == 0
    }

    fn is_by_copies(&self) -> bool {
        self.is_direct()
    }

    fn parts(&self) -> Option<Parts> {
        (!self.is_direct()).then(|| self.bytes_by_path())
    }
}

fn shared(env: &Env, asked: Asked, number: usize) -> Option<StagedPartOf<'_>> {
    let offer = env.node.own().gpu_page()?.offer(asked.index)?;
    offer.staged_part(asked.tag, number)
}
