//! The receiver's side of a transfer: it brings the payload that an RTS names.

mod multipath;
pub mod one_owner;
mod order_token;
mod pipeline;
mod put;
mod route_context;
mod staged_part;
mod start;
mod turn;

use std::sync::Arc;

use crate::cuda::{overlap, ContextKey, Error, InFlight, Uuid};
use crate::node::{
    Corruption, Message, Peer, Refused, RtrId, RtrState, Rts, Slot, SlotState, Sums,
};
use crate::policy::history::InFlightGuard;
use crate::stats::{self, Counter, Reason};
use crate::transfer::fault::{self, Of};
use crate::transfer::fetch::multipath::Multipath;
use crate::transfer::fetch::one_owner::OneOwnerTransfer;
pub use crate::transfer::fetch::order_token::{are_left, OrderToken, OrderTokenEnd};
use crate::transfer::fetch::pipeline::PipelineReceive;
pub use crate::transfer::fetch::route_context::{
    asks_for_depth, uses_host, Others, RouteContext, Rows, UnderWay,
};
pub use crate::transfer::fetch::turn::Turns;
use crate::transfer::fetch::turn::{Start, Turn};
use crate::transfer::gpu::Gpu;
use crate::transfer::life::{self, After, Life, Outcome, Protocol};
use crate::transfer::route::Routed;
use crate::transfer::story;
use crate::transfer::stream::Wish;
use crate::transfer::Env;
use crate::transfer::ONE_WAY_FROM;

/// Flags of a slot's message.
pub mod flag {
    /// The IPC handle is valid; otherwise the payload comes through the host pipeline only.
    pub const EXPORTED: u32 = 1;
    /// The checksums of the message lie beside its slot.
    pub const SUMS: u32 = 2;
    /// The message is in host memory.
    pub const HOST: u32 = 4;
    /// Its sender writes it to a receive for which the receiver has sent an RTR. `extra` names the RTR.
    pub const PUT_EARLY: u32 = 8;
    /// Since the message before it in its stream, the sender has sent nothing that the receiver could not
    /// see.
    pub const FOLLOWS: u32 = 16;
}

/// What is done with a message whose transfer has failed.
pub const AGAIN_THROUGH_HOST: &str = "again through host memory";

/// Where the payload goes.
#[derive(Clone, Copy, Debug)]
pub enum Destination {
    /// Host memory.
    Host(*mut u8),
    /// Device memory.
    Device {
        /// Context of the memory.
        context: ContextKey,
        /// Address.
        address: u64,
    },
}

/// The path that the message takes.
enum Path {
    /// Nothing to bring.
    Nothing,
    /// Get: this rank reads the sender's device memory.
    Get(InFlight),
    /// Put: the sender writes it, after an RTR.
    Put(RtrId),
    /// A get that waits for its turn: messages of another sender are read first.
    QueuedForTurn,
    /// Multipath, two owners.
    Multipath(Box<Multipath>),
    /// It will come through its sender's staging, once it is known which other messages in its place it waits
    /// for: see [`Fetch::set_order`].
    Unordered,
    /// It begins once these messages are over. They are received in the same place and are written in other
    /// ways.
    Queued {
        tokens: Vec<Arc<OrderToken>>,
        then: Then,
    },
    /// It is planned once the payloads received before in the same place have been compared with what was
    /// sent.
    QueuedForCheck {
        checks: Vec<Arc<OrderToken>>,
        /// It then comes from the host memory where its sender has put it.
        is_eager: bool,
    },
    /// Multipath, one owner: this rank makes every copy.
    OneOwner(Box<OneOwnerTransfer>),
    /// Pipeline: through the sender's ring in host memory, or in memory of its GPU.
    Pipeline(PipelineReceive),
    /// The message is lost; the text says why. Copies into the program's buffer that still run are waited
    /// for.
    Draining(Vec<InFlight>, Box<str>),
}

/// What a message does once those that it waited for in its place are over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// It starts.
    Start,
    /// It comes from the host memory where its sender has put it.
    Eager,
    /// It comes through its sender's staging.
    Staging,
}

impl Path {
    fn pipeline(state: SlotState) -> Path {
        Path::Pipeline(PipelineReceive::new(state))
    }

    /// The state of a message that takes this path; `own` if this rank has sent it. None if there is nothing
    /// to bring.
    fn state(&self, own: bool) -> Option<life::State> {
        Some(match self {
            Path::Nothing => return None,
            Path::Get(_) if own => life::State::Moving(Protocol::Own),
            Path::Get(_) => life::State::Moving(Protocol::Get),
            Path::Put(_) => life::State::Moving(Protocol::Put),
            Path::QueuedForTurn => life::State::Queued(After::Turn),
            Path::Multipath(multipath) if multipath.is_direct() => {
                life::State::Moving(Protocol::Get)
            }
            Path::Multipath(_) => life::State::Moving(Protocol::Multipath),
            Path::Unordered | Path::Queued { .. } => life::State::Queued(After::Place),
            Path::QueuedForCheck { .. } => life::State::Queued(After::Check),
            Path::OneOwner(_) => life::State::Moving(Protocol::OneOwner),
            Path::Pipeline(pipeline) => life::State::Moving(pipeline.protocol()),
            Path::Draining(..) => life::State::Draining,
        })
    }
}

/// A message that will come through its sender's staging to device memory.
#[derive(Clone, Copy, Debug)]
pub struct Staged {
    /// See [`UnderWay::began`].
    began: u64,
    source: u32,
    place: (u64, u64),
    /// The kind of the sender's memory.
    kind: u32,
}

impl Staged {
    /// Whether this message is received in the same place as another that began before it.
    pub fn is_behind(&self, began: u64, place: (u64, u64)) -> bool {
        began < self.began && overlap(self.place, place)
    }

    /// Whether both are cut into the same pieces, which the same streams write.
    fn is_like(&self, other: &Staged) -> bool {
        (self.source, self.place, self.kind) == (other.source, other.place, other.kind)
    }
}

/// A transfer under way.
pub struct Fetch {
    peer: Arc<Peer>,
    slot: u32,
    nonce: u64,
    message: Message,
    wanted: u64,
    to: Destination,
    path: Path,
    life: Life,
    own: bool,
    /// The GPU of the destination; zeros for host memory.
    device: Uuid,
    /// Why the direct path was not taken.
    reason: Option<Reason>,
    /// How many driver calls have failed.
    failures: u32,
    /// The plan of a long message. The node knows which links it uses until the message is over.
    routed: Option<Routed>,
    /// For a message that may be split.
    flight: Option<InFlightGuard>,
    /// For a message that later ones in its place must know about: it ends when nothing of the message is
    /// written any more.
    token: Option<OrderTokenEnd>,
    /// For a long message of one of several senders that are read in turns.
    turn: Option<Turn>,
    /// The number of the message, in the order in which this rank has taken its messages.
    began: u64,
    /// Others that are behind a message without an order token wait for this.
    end: Option<OrderTokenEnd>,
}

// SAFETY: the destination belongs to a pending receive, which MPI has lent to the library until it completes.
unsafe impl Send for Fetch {}

/// The result of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Under way; whether something moved.
    Pending(bool),
    /// The payload is there, and the sender has been told (ATS).
    Done,
    /// The payload cannot be had.
    Failed(Box<str>),
}

/// Why the library does not serve a message that has landed as an RTS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotTaken {
    /// Ordinary bytes.
    Value,
    /// It claims to be an RTS, but fails the checks.
    Bad,
    /// It is an RTS, but its message cannot be had.
    Lost,
}

/// An RTS that has landed. Its message is not claimed yet.
pub struct Landed {
    rts: Rts,
    peer: Arc<Peer>,
}

impl Landed {
    /// What it says.
    pub fn rts(&self) -> Rts {
        self.rts
    }

    /// An RTS that has not landed yet, but will (early match).
    pub fn early_match(rts: Rts, peer: Arc<Peer>) -> Landed {
        Landed { rts, peer }
    }

    /// Tells the sender that nobody will receive the message.
    pub fn turn_down(&self, env: &Env) {
        if let Some(slot) = self.peer.slot(self.rts.slot) {
            slot.turn_down(self.rts.nonce, env.failed);
        }
        self.peer.ring_doorbell();
    }

    /// Reads what has landed.
    pub fn read(env: &Env, bytes: &[u8]) -> Result<Landed, NotTaken> {
        let rts = match Rts::decode(bytes, env.node.launch().hash) {
            Ok(rts) => rts,
            Err(crate::node::Rejection::NotAnRts) => return Err(NotTaken::Value),
            Err(crate::node::Rejection::Corrupt(why)) => {
                log::debug!("a message that begins like an RTS: {why}");
                return Err(NotTaken::Bad);
            }
        };
        let peer = env.node.peer(rts.sender).ok_or(NotTaken::Lost)?;
        peer.will_claim(rts.slot);
        Ok(Landed { rts, peer })
    }
}

impl Fetch {
    /// Claims the message of an RTS, if it is for this rank, and starts the transfer of its payload.
    /// `capacity` is what the receive can hold; nothing is fetched of a longer message. `told`: the RTR that
    /// this rank has sent for the receive.
    #[allow(
        clippy::too_many_arguments,
        reason = "environment, driver and message apart; transfers without MPI are to bring them together"
    )]
    pub fn begin(
        env: &Env,
        gpu: &mut Gpu,
        landed: Landed,
        to: Destination,
        capacity: u64,
        mut routes: RouteContext<'_>,
        told: Option<RtrId>,
    ) -> Result<Box<Fetch>, NotTaken> {
        let Landed { rts, peer } = landed;
        // The claim comes first: the cache line is then this core's to write, and is not fetched twice.
        let slot = peer.slot(rts.slot);
        let eager = match slot.map(|slot| slot.claim(rts.nonce)) {
            Some(Ok(())) => Some(false),
            Some(Err(Refused::State(SlotState::Eager))) => Some(true),
            _ => None,
        };
        let claimed = eager.and_then(|eager| match peer.validate(&rts) {
            Ok((_, message)) => (message.destination == env.world_rank).then_some((message, eager)),
            Err(why) => {
                stats::add(Counter::Corrupt, u64::from(why == Corruption::Digest));
                None
            }
        });
        // If the sender writes the message to this receive after its RTR, the message comes that way and no
        // other.
        let pushed =
            told.filter(|told| matches!(&claimed, Some((message, _)) if is_for(message, *told)));
        let is_withdrawn =
            pushed.is_some() || told.is_none_or(|told| env.node.own().withdraw(told));
        let claimed = claimed.filter(|(message, _)| {
            let is_put = message.flags & flag::PUT_EARLY != 0;
            let is_right = is_put == pushed.is_some() && is_withdrawn;
            stats::add(Counter::Corrupt, u64::from(!is_right));
            is_right
        });
        let Some((message, eager)) = claimed else {
            // The sender must not wait for a receiver that will never come.
            Landed { rts, peer }.turn_down(env);
            return Err(NotTaken::Lost);
        };
        let own = rts.sender == env.world_rank;
        let wanted = if message.length > capacity {
            0
        } else {
            message.length
        };
        let mut fetch = Box::new(Fetch {
            peer,
            slot: rts.slot,
            nonce: rts.nonce,
            message,
            wanted,
            to,
            path: Path::Nothing,
            life: Life::matched(),
            own,
            device: routes.to().unwrap_or_default(),
            reason: None,
            failures: 0,
            routed: None,
            flight: None,
            token: None,
            turn: None,
            began: 0,
            end: None,
        });
        fetch.note_wish(env);
        fetch.flight = fetch.enter(env, &mut routes);
        let pushed = pushed.filter(|_| wanted > 0);
        if pushed.is_some_and(|told| fetch.begin_rest(env, gpu, &mut routes, told)) {
            return Ok(fetch);
        }
        if let Some(told) = pushed {
            fetch.set_path(Path::Put(told));
            // Messages received in its place are not on a lane of the sender.
            fetch.leave_token(false);
            fetch.plan_meanwhile(env, gpu, routes);
        } else if wanted > 0 && !routes.checks.is_empty() {
            let checks = std::mem::take(&mut routes.checks);
            fetch.set_path(Path::QueuedForCheck {
                checks,
                is_eager: eager,
            });
            fetch.leave_token(false);
        } else if wanted > 0 {
            fetch.set_out(env, gpu, &mut routes, eager);
        }
        Ok(fetch)
    }

    /// Starts the transfer, from the sender's buffer or from the host memory where the sender has put the
    /// payload.
    fn set_out(&mut self, env: &Env, gpu: &mut Gpu, routes: &mut RouteContext<'_>, is_eager: bool) {
        if is_eager {
            self.start_eager(env, gpu, routes);
            return;
        }
        let depth = self.depth(env, routes);
        if !self.start_planned(env, gpu, routes, depth) {
            self.start_in_turn(env, gpu, routes, depth);
        }
    }

    /// Whether the message waited for checks of what was received in its place, and these are now over.
    pub fn may_set_out(&mut self) -> bool {
        let Path::QueuedForCheck { checks, .. } = &mut self.path else {
            return false;
        };
        checks.retain(|check| !check.is_over());
        checks.is_empty()
    }

    /// Starts a message that has waited for such checks.
    pub fn set_out_behind(&mut self, env: &Env, gpu: &mut Gpu, routes: &mut RouteContext<'_>) {
        let Path::QueuedForCheck { is_eager, .. } = self.path else {
            return;
        };
        // Messages behind it wait for its end, whichever path it takes now.
        self.end = self.token.take();
        self.path = Path::Nothing;
        if self.peer.alive() || is_eager {
            self.set_out(env, gpu, routes, is_eager);
        } else {
            // The sender brings nothing any more, but its memory can be read as long as it is mapped.
            self.start(gpu);
        }
        gpu.launch();
    }

    /// The number of the message, in the order in which this rank has taken its messages.
    pub fn began(&self) -> u64 {
        self.began
    }

    /// Tells the sender how this rank would rather receive the next message of the stream. The MPI library is
    /// best at messages from host memory to host memory.
    fn note_wish(&self, env: &Env) {
        let message = &self.message;
        let to_host = matches!(self.to, Destination::Host(_));
        let (wish, wanted) = if message.flags & flag::HOST != 0 {
            (Wish::Rts, !to_host)
        } else if message.length <= env.config.eager {
            (Wish::Cell, to_host)
        } else {
            return;
        };
        let key = wish.key(message.communicator, message.source, message.tag);
        let own = env.node.own();
        if own.wishes(key) != wanted {
            own.set_wish(key, wanted);
        }
    }

    /// True length of the message, bytes.
    pub fn length(&self) -> u64 {
        self.message.length
    }

    /// The message as its sender describes it.
    pub fn message(&self) -> &Message {
        &self.message
    }

    /// The checksums of the message, if its sender has taken any and its payload is wanted. Call this only
    /// while the message is claimed.
    pub fn sums(&self) -> Option<Sums> {
        if self.message.flags & flag::SUMS == 0 || self.wanted == 0 {
            return None;
        }
        let sums = self
            .peer
            .sheet(self.slot)
            .and_then(|sheet| sheet.read(self.nonce));
        if sums.is_none() {
            log::warn!(
                "verify: the checksums of a message from rank {} cannot be read",
                self.message.source
            );
        }
        sums
    }

    /// How far the payload has come.
    pub fn life(&self) -> Life {
        self.life
    }

    /// Changes the path of the message.
    fn set_path(&mut self, path: Path) {
        if let Some(state) = path.state(self.own) {
            self.life.reach(state);
        }
        self.path = path;
    }

    /// How many bytes came by which path, if the message came by several. Call this once the payload is
    /// there.
    pub fn parts(&self) -> Option<story::Parts> {
        match &self.path {
            Path::Multipath(multipath) if !multipath.is_direct() => Some(multipath.parts()),
            Path::OneOwner(one_owner) => Some(one_owner.parts()),
            _ => None,
        }
    }

    /// Why the payload does not come by the direct path, if that was tried.
    pub fn reason(&self) -> Option<Reason> {
        let is_exported = self.message.flags & (flag::EXPORTED | flag::HOST) != 0;
        let to_device = matches!(self.to, Destination::Device { .. });
        self.reason
            .or((to_device && !self.own && !is_exported).then_some(Reason::NotExportable))
    }

    /// Whether this rank reads so much of a sender's memory that it had better not write there at the same
    /// time.
    pub fn reads_from(&self, rank: u32) -> bool {
        let is_read = match &self.path {
            Path::Get(_) => !self.own,
            Path::Multipath(multipath) => multipath.reads(),
            _ => false,
        };
        is_read && self.message.source == rank && self.wanted >= ONE_WAY_FROM
    }

    /// Whether copies of whole messages bring it, so that there are no pieces to look after.
    pub fn is_by_copies(&self) -> bool {
        match &self.path {
            Path::Get(_) | Path::Put(_) => true,
            Path::Multipath(multipath) => multipath.is_direct(),
            _ => false,
        }
    }

    /// The earliest time at which it can be over, by the clock of copies, if that is known.
    pub fn due_ns(&self) -> Option<u64> {
        match &self.path {
            Path::Get(copy) => copy.due_ns(),
            _ => None,
        }
    }

    /// Sets the number of the message, in the order in which this rank has taken its messages.
    pub fn set_began(&mut self, began: u64) {
        self.began = began;
    }

    /// Where in device memory it is received: address and length. None if it goes to host memory.
    fn place(&self) -> Option<(u64, u64)> {
        match self.to {
            Destination::Device { address, .. } => Some((address, self.wanted)),
            Destination::Host(_) => None,
        }
    }

    /// What other messages that are received meanwhile must know of this one. None if it goes to host memory.
    pub fn under_way(&self) -> Option<UnderWay> {
        Some(UnderWay {
            began: self.began,
            source: self.message.source,
            to: self.place()?,
            token: self.token.as_ref().map(|end| Arc::clone(end.token())),
        })
    }

    /// What a bcopy payload waits for before it is copied to its place. None if this message is written
    /// elsewhere.
    pub fn end(&mut self, place: (u64, u64)) -> Option<Arc<OrderToken>> {
        overlap(self.place()?, place).then(|| match &self.token {
            Some(end) => Arc::clone(end.token()),
            None => {
                let end = self.end.get_or_insert_with(|| OrderTokenEnd::new(false));
                Arc::clone(end.token())
            }
        })
    }

    /// Whether it will come through its sender's staging, and it is not known yet which others it waits for.
    pub fn wants_order(&self) -> bool {
        matches!(self.path, Path::Unordered)
    }

    /// What a message that comes through its sender's staging, and was claimed after this one, waits for.
    /// None if this one is written elsewhere, or comes through staging in the same pieces: the streams keep
    /// such messages in order.
    pub fn end_before(&mut self, next: &Staged) -> Option<Arc<OrderToken>> {
        let this = self.staged()?;
        let is_staged = match &self.path {
            Path::Queued { then, .. } => *then == Then::Staging,
            path => matches!(path, Path::Pipeline(_) | Path::Unordered),
        };
        if !next.is_behind(this.began, this.place) || (is_staged && this.is_like(next)) {
            return None;
        }
        self.end(next.place)
    }

    /// What decides which others a message waits for that will come through staging. None if it goes to host
    /// memory.
    pub fn staged(&self) -> Option<Staged> {
        Some(Staged {
            began: self.began,
            source: self.message.source,
            place: self.place()?,
            kind: self.message.flags & (flag::HOST | flag::EXPORTED),
        })
    }

    /// Makes a message that [`Fetch::wants_order`] wait for these tokens. If there are none, its sender is
    /// asked at once.
    pub fn set_order(&mut self, gpu: &mut Gpu, tokens: Vec<Arc<OrderToken>>) {
        if tokens.is_empty() {
            self.want_pipeline(gpu);
            return;
        }
        self.set_path(Path::Queued {
            tokens,
            then: Then::Staging,
        });
    }

    /// The sender.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    fn slot(&self) -> Option<&Slot> {
        self.peer.slot(self.slot)
    }

    /// Moves the transfer on, without blocking.
    pub fn poll(&mut self, env: &Env, gpu: &mut Gpu) -> Step {
        let step = self.step(env, gpu);
        if let (Step::Pending(false), Some(routed)) = (&step, &mut self.routed) {
            routed.look();
        }
        step
    }

    #[allow(
        clippy::too_many_lines,
        reason = "one arm for each path; transfers of their own are to take them (protocols as tables)"
    )]
    fn step(&mut self, env: &Env, gpu: &mut Gpu) -> Step {
        match &mut self.path {
            Path::Nothing => {
                self.send_ats();
                self.life.transition(life::State::Landed);
                Step::Done
            }
            Path::Get(copy) => match copy.poll() {
                Ok(false) => Step::Pending(false),
                Ok(true) => {
                    if self.is_eager_all_the_same() {
                        self.set_path(Path::pipeline(SlotState::Claimed));
                        return Step::Pending(true);
                    }
                    self.complete(if self.own {
                        Protocol::Own
                    } else {
                        Protocol::Get
                    })
                }
                Err(error) => {
                    let is_lost = copy.is_lost();
                    let again = if is_lost {
                        AGAIN_THROUGH_HOST
                    } else {
                        "tried again"
                    };
                    self.survived(&error, again);
                    stats::add(Counter::Retries, 1);
                    if is_lost {
                        stats::fallback(Reason::DriverError, self.wanted);
                        self.reason = Some(Reason::DriverError);
                        self.want_host();
                    }
                    Step::Pending(true)
                }
            },
            Path::Put(told) => {
                let told = *told;
                match env.node.own().rtr_state(told) {
                    Some(RtrState::Taken) => Step::Pending(false),
                    Some(RtrState::Landed) if told.rest > 0 => {
                        // Nobody could be asked for the rest of the message.
                        self.pull_instead(env, gpu, told);
                        Step::Pending(true)
                    }
                    Some(RtrState::Landed) => {
                        has_landed(env, told);
                        stats::add(Counter::PutBytes, self.wanted);
                        self.complete(Protocol::Put)
                    }
                    Some(RtrState::Refused) => {
                        self.pull_instead(env, gpu, told);
                        Step::Pending(true)
                    }
                    Some(RtrState::Open) | None => self.fail(&Lost::Corrupt),
                }
            }
            Path::QueuedForTurn => {
                let turn = self.turn.as_mut();
                let is_its_turn =
                    turn.is_none_or(|turn| turn.may_start(&|rank| readers(env, rank)));
                if is_its_turn {
                    let begins = self.turn.as_ref().and_then(Turn::start);
                    if begins != Some(Start::InBatch) {
                        // Not in one launch with the batch before it, which ends sooner.
                        gpu.launch();
                    }
                    self.start(gpu);
                    if !self.turn.as_ref().is_some_and(Turn::is_followed) {
                        gpu.launch();
                    }
                }
                Step::Pending(is_its_turn)
            }
            Path::Queued { tokens, then } => {
                tokens.retain(|token| !token.is_over());
                if !tokens.is_empty() {
                    return Step::Pending(false);
                }
                match then {
                    Then::Eager => self.set_path(Path::pipeline(SlotState::Eager)),
                    Then::Staging => self.want_pipeline(gpu),
                    Then::Start => {
                        self.start(gpu);
                        gpu.launch();
                    }
                }
                Step::Pending(true)
            }
            Path::Unordered | Path::QueuedForCheck { .. } => Step::Pending(false),
            Path::Multipath(multipath) => match multipath.poll(env, gpu) {
                multipath::Step::Pending(moved) => Step::Pending(moved),
                multipath::Step::Arrived => {
                    let (arrived, fared) = (multipath.arrived(), multipath.host_fared());
                    if self.is_eager_all_the_same() {
                        self.set_path(Path::pipeline(SlotState::Claimed));
                        return Step::Pending(true);
                    }
                    arrived.count();
                    if let (Some(routed), Some(how)) = (&self.routed, fared) {
                        routed.record_host_lateness(how);
                    }
                    self.complete(arrived.protocol)
                }
                multipath::Step::Corrupt => self.fail(&Lost::Corrupt),
                multipath::Step::Lost(error) => {
                    self.survived(&error, AGAIN_THROUGH_HOST);
                    stats::add(Counter::Retries, 1);
                    stats::fallback(Reason::DriverError, self.wanted);
                    self.reason = Some(Reason::DriverError);
                    self.want_host();
                    Step::Pending(true)
                }
            },
            Path::OneOwner(one_owner) => match one_owner.poll(gpu) {
                one_owner::Step::Pending(moved) => Step::Pending(moved),
                one_owner::Step::Arrived => {
                    let bytes = one_owner.bytes();
                    if self.is_eager_all_the_same() {
                        self.set_path(Path::pipeline(SlotState::Claimed));
                        return Step::Pending(true);
                    }
                    one_owner::count(&bytes);
                    self.complete(Protocol::OneOwner)
                }
                one_owner::Step::Lost => {
                    stats::add(Counter::Retries, 1);
                    self.start(gpu);
                    gpu.launch();
                    Step::Pending(true)
                }
            },
            Path::Pipeline(_) => match self.poll_pipeline(gpu) {
                Ok(step) => step,
                Err(why) => self.fail(&why),
            },
            Path::Draining(copies, why) => {
                copies.retain_mut(|copy| !copy.is_over());
                if copies.is_empty() {
                    let why = std::mem::take(why);
                    (self.routed, self.token) = (None, None);
                    self.send_ats();
                    self.life.end(Outcome::Failed);
                    Step::Failed(why)
                } else {
                    Step::Pending(false)
                }
            }
        }
    }

    /// Whether the sender has put the payload of a claimed message into the ring after all. The sender may
    /// have begun to do so when the message was claimed. If the claim was made in a state that somebody had
    /// written over, the sender did it in time and has given the buffer back. The ring's content is right in
    /// both cases.
    fn is_eager_all_the_same(&self) -> bool {
        // Only a message that fits into a cell is sent eagerly. For all others the sender's slot is not read
        // again.
        let may_be = self.message.length <= u64::from(self.peer.layout().cell_bytes);
        may_be
            && self
                .slot()
                .is_some_and(|slot| matches!(slot.ring(self.nonce).front(), Ok(Some(_))))
    }

    /// The payload is there. It counts only if the slot was about this message to the last: a sender that has
    /// given the slot up or written over it may have changed the buffer meanwhile.
    fn complete(&mut self, protocol: Protocol) -> Step {
        if !self.send_ats() {
            let why = self.why_gone();
            return self.fail(&why);
        }
        (self.routed, self.flight, self.token, self.turn) = (None, None, None, None);
        self.life.arrive(protocol, self.wanted);
        Step::Done
    }

    /// Why the slot is no longer about the message.
    fn why_gone(&self) -> Lost {
        match self.slot().map(|slot| slot.state(self.nonce)) {
            Some(Ok(SlotState::Failed)) => Lost::GivenUp,
            Some(Err(_)) => Lost::Gone,
            _ => Lost::Corrupt,
        }
    }

    fn survived(&self, error: &Error, remedy: &str) {
        let of = Of::From(self.message.source);
        // Failures because the sender has died are reported when its messages are given up.
        if self.peer.goes_on() {
            fault::survived(of, self.life.told(), error, remedy);
        }
    }

    /// The sender writes no more to the receive after its RTR, and part of the message is missing: this rank
    /// reads it.
    fn pull_instead(&mut self, env: &Env, gpu: &mut Gpu, told: RtrId) {
        env.node.own().close_rtr(told);
        stats::add(Counter::Retries, 1);
        self.start(gpu);
        gpu.launch();
    }

    /// The sender has died. Its memory is still there as long as it is mapped, so a copy that reads it comes
    /// to its end. Returns false in that case.
    pub fn give_up_on_the_dead(&mut self, env: &Env, gpu: &mut Gpu) -> bool {
        if let Path::Multipath(multipath) = &mut self.path {
            fault::died(Of::From(self.message.source), fault::Path::Multipath, false);
            multipath.give_up_on_the_dead(env);
            return false;
        }
        if let Path::Put(told) = self.path {
            // The sender writes no more. The rest is read from its memory, which is there as long as it is
            // mapped: until its mappings are dropped, after all that uses them has been given up.
            env.node.own().withdraw_rtr(told);
            if env.node.own().rtr_state(told) == Some(RtrState::Refused) {
                self.pull_instead(env, gpu, told);
            }
            return false;
        }
        if matches!(
            self.path,
            Path::Get(_)
                | Path::QueuedForTurn
                | Path::OneOwner(_)
                | Path::Draining(..)
                | Path::Unordered
                | Path::Queued { .. }
                | Path::QueuedForCheck { .. }
        ) {
            return false;
        }
        self.fail(&Lost::Dead);
        true
    }

    /// The message is lost. The sender is told, and the receive ends, once nothing writes to its buffer any
    /// more.
    fn fail(&mut self, why: &Lost) -> Step {
        let (of, path) = (Of::From(self.message.source), self.life.told());
        let text = if *why == Lost::Dead || !self.peer.goes_on() {
            fault::died(of, path, true)
        } else {
            fault::lost(of, path, why)
        };
        if *why == Lost::Corrupt {
            stats::add(Counter::Corrupt, 1);
        }
        let copies = match std::mem::replace(&mut self.path, Path::Nothing) {
            Path::Get(copy) => vec![copy],
            Path::Pipeline(receive) => receive.into_copies(),
            Path::Draining(copies, _) => copies,
            // These have no copies in flight, or are drained.
            Path::Nothing
            | Path::Put(_)
            | Path::QueuedForTurn
            | Path::Multipath(_)
            | Path::OneOwner(_)
            | Path::Unordered
            | Path::Queued { .. }
            | Path::QueuedForCheck { .. } => Vec::new(),
        };
        self.set_path(Path::Draining(copies, text));
        Step::Pending(true)
    }

    /// For a copy that is known to be done: prefetches the cache lines in which the ATS will be written.
    pub fn will_send_ats(&self) {
        if let Path::Get(copy) = &self.path {
            if copy.is_known_done() {
                self.peer.will_send_ats(self.slot);
            }
        }
    }

    fn send_ats(&self) -> bool {
        if let Path::Put(_) = self.path {
            return self.peer.send_ats_unheard(self.slot, self.nonce);
        }
        self.peer.send_ats(self.slot, self.nonce)
    }
}

/// How many other ranks read long messages from a rank.
fn readers(env: &Env, rank: u32) -> u32 {
    let peers = env.node.peers();
    let others = peers
        .iter()
        .filter(|peer| peer.world_rank() != env.world_rank);
    others.filter(|peer| peer.reads_from(rank)).count() as u32
}

/// The put that follows an RTR has landed.
fn has_landed(env: &Env, told: RtrId) {
    let own = env.node.own();
    own.close_rtr(told);
    own.promise_rtr(told);
    stats::add(Counter::PutEarlyReceives, 1);
}

/// Whether the sender writes the message to the receive of this RTR.
fn is_for(message: &Message, told: RtrId) -> bool {
    message.flags & flag::PUT_EARLY != 0 && message.extra == [told.tag, u64::from(told.line)]
}

/// Why a message cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lost {
    Driver(Error),
    GivenUp,
    Gone,
    Corrupt,
    Dead,
}

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Lost::Driver(error) => error.fmt(f),
            Lost::Gone => f.write_str("its sender gave it up, or its slot was written over"),
            Lost::GivenUp => f.write_str("the sender could not bring it"),
            Lost::Corrupt => f.write_str("its slot or ring in shared memory was written over"),
            Lost::Dead => f.write_str("the sender has died"),
        }
    }
}
