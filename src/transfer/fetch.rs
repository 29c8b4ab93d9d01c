//! The receiver's side of a transfer: it brings the payload that an RTS names.

mod claim;
mod order_token;
pub mod protocol;
mod put_target;
mod route_context;
mod start;
mod turn;

use std::sync::Arc;

use crate::cuda::{overlap, ContextKey, InFlight};
use crate::node::{Corruption, Message, Peer, Refused, RtrId, Rts, SlotState, Sums};
use crate::policy::history::InFlightGuard;
use crate::stats::{self, Counter, Reason};
use crate::transfer::fault::{self, Of};
pub use crate::transfer::fetch::claim::AGAIN_THROUGH_HOST;
use crate::transfer::fetch::claim::{Claim, Lost};
pub use crate::transfer::fetch::order_token::{are_left, OrderToken, OrderTokenEnd};
use crate::transfer::fetch::protocol::eager::Eager;
use crate::transfer::fetch::protocol::pipeline::Pipeline;
use crate::transfer::fetch::protocol::put::Put;
use crate::transfer::fetch::protocol::{Moving, Next, Orphan, Progress};
pub use crate::transfer::fetch::route_context::{
    asks_for_depth, uses_host, Others, RouteContext, Rows, UnderWay,
};
pub use crate::transfer::fetch::turn::Turns;
use crate::transfer::fetch::turn::{Start, Turn};
use crate::transfer::gpu::Gpu;
use crate::transfer::life::{self, After, Life, Outcome, Protocol};
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

/// What is done for the message now.
enum Path {
    /// Nothing to bring.
    Nothing,
    /// A protocol brings it.
    Moving(Moving),
    /// A get that waits for its turn: messages of another sender are read first.
    QueuedForTurn,
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
    /// The state of a message. None if there is nothing to bring.
    fn state(&self) -> Option<life::State> {
        Some(match self {
            Path::Nothing => return None,
            Path::Moving(protocol) => life::State::Moving(protocol.name()),
            Path::QueuedForTurn => life::State::Queued(After::Turn),
            Path::Unordered | Path::Queued { .. } => life::State::Queued(After::Place),
            Path::QueuedForCheck { .. } => life::State::Queued(After::Check),
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
    claim: Claim,
    path: Path,
    /// For a message that may be split.
    flight: Option<InFlightGuard>,
    /// For a message that later ones in its place must know about: it ends when nothing of the message is
    /// written any more.
    token: Option<OrderTokenEnd>,
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
    /// `capacity` is what the receive can hold; nothing is fetched of a longer message. `rtr`: the RTR that
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
        rtr: Option<RtrId>,
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
        let put = rtr.filter(|rtr| matches!(&claimed, Some((message, _)) if is_for(message, *rtr)));
        let is_withdrawn = put.is_some() || rtr.is_none_or(|rtr| env.node.own().withdraw(rtr));
        let claimed = claimed.filter(|(message, _)| {
            let is_put = message.flags & flag::PUT_EARLY != 0;
            let is_right = is_put == put.is_some() && is_withdrawn;
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
        let mut life = Life::matched();
        life.trace_message(&message, rts.nonce);
        // Of what is written before it is matched nobody here knows when that began.
        life.meter.begin(message.source, put.is_none());
        let _copies = life.copies();
        let mut fetch = Box::new(Fetch {
            claim: Claim {
                peer,
                slot: rts.slot,
                nonce: rts.nonce,
                message,
                wanted,
                to,
                life,
                own,
                device: routes.to().unwrap_or_default(),
                reason: None,
                failures: 0,
                routed: None,
                turn: None,
            },
            path: Path::Nothing,
            flight: None,
            token: None,
            began: 0,
            end: None,
        });
        fetch.note_wish(env);
        fetch.flight = fetch.enter(env, &mut routes);
        let put = put.filter(|_| wanted > 0);
        if put.is_some_and(|rtr| fetch.begin_rest(env, gpu, &mut routes, rtr)) {
            return Ok(fetch);
        }
        if let Some(rtr) = put {
            fetch.move_by(Moving::Put(Put::new(rtr)));
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
        let _copies = self.claim.life.copies();
        // Messages behind it wait for its end, whichever path it takes now.
        self.end = self.token.take();
        self.path = Path::Nothing;
        if self.claim.peer.alive() || is_eager {
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
        let message = &self.claim.message;
        let to_host = matches!(self.claim.to, Destination::Host(_));
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
        self.claim.message.length
    }

    /// The message as its sender describes it.
    pub fn message(&self) -> &Message {
        &self.claim.message
    }

    /// The checksums of the message, if its sender has taken any and its payload is wanted. Call this only
    /// while the message is claimed.
    pub fn sums(&self) -> Option<Sums> {
        if self.claim.message.flags & flag::SUMS == 0 || self.claim.wanted == 0 {
            return None;
        }
        let sums = self
            .claim
            .peer
            .sheet(self.claim.slot)
            .and_then(|sheet| sheet.read(self.claim.nonce));
        if sums.is_none() {
            log::warn!(
                "verify: the checksums of a message from rank {} cannot be read",
                self.claim.message.source
            );
        }
        sums
    }

    /// How far the payload has come.
    pub fn life(&self) -> Life {
        self.claim.life
    }

    /// Changes the path of the message.
    fn set_path(&mut self, path: Path) {
        if let Some(state) = path.state() {
            self.claim.life.reach(state);
        }
        self.path = path;
    }

    fn move_by(&mut self, protocol: Moving) {
        self.set_path(Path::Moving(protocol));
    }

    /// How many bytes came by which path, if the message came by several. Call this once the payload is
    /// there.
    pub fn parts(&self) -> Option<story::Parts> {
        self.moving()?.parts()
    }

    /// The protocol that brings it, if one does now.
    fn moving(&self) -> Option<&dyn protocol::Protocol> {
        match &self.path {
            Path::Moving(protocol) => Some(&**protocol),
            _ => None,
        }
    }

    /// Why the payload does not come by the direct path, if that was tried.
    pub fn reason(&self) -> Option<Reason> {
        let is_exported = self.claim.message.flags & (flag::EXPORTED | flag::HOST) != 0;
        let to_device = matches!(self.claim.to, Destination::Device { .. });
        self.claim
            .reason
            .or((to_device && !self.claim.own && !is_exported).then_some(Reason::NotExportable))
    }

    /// Whether this rank reads so much of a sender's memory that it had better not write there at the same
    /// time.
    pub fn reads_from(&self, rank: u32) -> bool {
        let is_read = self.moving().is_some_and(|by| by.reads_peer());
        is_read && self.claim.message.source == rank && self.claim.wanted >= ONE_WAY_FROM
    }

    /// Whether copies of whole messages bring it, so that there are no pieces to look after.
    pub fn is_by_copies(&self) -> bool {
        self.moving().is_some_and(|by| by.is_by_copies())
    }

    /// The earliest time at which it can be over, by the clock of copies, if that is known.
    pub fn due_ns(&self) -> Option<u64> {
        self.moving()?.due_ns()
    }

    /// Sets the number of the message, in the order in which this rank has taken its messages.
    pub fn set_began(&mut self, began: u64) {
        self.began = began;
    }

    /// What other messages that are received meanwhile must know of this one. None if it goes to host memory.
    pub fn under_way(&self) -> Option<UnderWay> {
        Some(UnderWay {
            began: self.began,
            source: self.claim.message.source,
            to: self.claim.place()?,
            token: self.token.as_ref().map(|end| Arc::clone(end.token())),
        })
    }

    /// What a bcopy payload waits for before it is copied to its place. None if this message is written
    /// elsewhere.
    pub fn end(&mut self, place: (u64, u64)) -> Option<Arc<OrderToken>> {
        overlap(self.claim.place()?, place).then(|| match &self.token {
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
            Path::Moving(protocol) => protocol.is_staged(),
            path => matches!(path, Path::Unordered),
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
            source: self.claim.message.source,
            place: self.claim.place()?,
            kind: self.claim.message.flags & (flag::HOST | flag::EXPORTED),
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
        &self.claim.peer
    }

    /// Moves the transfer on, without blocking.
    pub fn poll(&mut self, env: &Env, gpu: &mut Gpu) -> Step {
        let _copies = self.claim.life.copies();
        let step = self.step(env, gpu);
        if let (Step::Pending(false), Some(routed)) = (&step, &mut self.claim.routed) {
            routed.look();
        }
        step
    }

    fn step(&mut self, env: &Env, gpu: &mut Gpu) -> Step {
        match &mut self.path {
            Path::Nothing => {
                self.claim.send_ats();
                self.claim.life.transition(life::State::Landed);
                Step::Done
            }
            Path::Moving(protocol) => match protocol.progress(&mut self.claim, env, gpu) {
                Ok(Progress::Pending(moved)) => Step::Pending(moved),
                Ok(Progress::Landed(by)) => self.land(env, by),
                Ok(Progress::Instead(next)) => {
                    self.begin_instead(gpu, next);
                    Step::Pending(true)
                }
                Err(why) => self.fail(&why),
            },
            Path::QueuedForTurn => {
                let turn = self.claim.turn.as_mut();
                let is_its_turn =
                    turn.is_none_or(|turn| turn.may_start(&|rank| readers(env, rank)));
                if is_its_turn {
                    self.start_its_turn(gpu);
                }
                Step::Pending(is_its_turn)
            }
            Path::Queued { tokens, then } => {
                tokens.retain(|token| !token.is_over());
                if !tokens.is_empty() {
                    return Step::Pending(false);
                }
                match then {
                    Then::Eager => self.move_by(Moving::Eager(Eager::new(SlotState::Eager))),
                    Then::Staging => self.want_pipeline(gpu),
                    Then::Start => {
                        self.start(gpu);
                        gpu.launch();
                    }
                }
                Step::Pending(true)
            }
            Path::Unordered | Path::QueuedForCheck { .. } => Step::Pending(false),
            Path::Draining(copies, why) => {
                copies.retain_mut(|copy| !copy.is_over());
                if !copies.is_empty() {
                    return Step::Pending(false);
                }
                let why = std::mem::take(why);
                (self.claim.routed, self.token) = (None, None);
                self.claim.send_ats();
                self.claim.life.end(Outcome::Failed);
                Step::Failed(why)
            }
        }
    }

    fn start_its_turn(&mut self, gpu: &mut Gpu) {
        let begins = self.claim.turn.as_ref().and_then(Turn::start);
        if begins != Some(Start::InBatch) {
            // Not in one launch with the batch before it, which ends sooner.
            gpu.launch();
        }
        self.start(gpu);
        if !self.claim.turn.as_ref().is_some_and(Turn::is_followed) {
            gpu.launch();
        }
    }

    /// The protocol could not bring it, and has nothing in flight any more.
    fn begin_instead(&mut self, gpu: &mut Gpu, next: Next) {
        match next {
            Next::Whole => {
                self.start(gpu);
                gpu.launch();
            }
            Next::HostPipeline => {
                let pipeline = Pipeline::ask_for_host(&mut self.claim);
                self.move_by(Moving::Pipeline(pipeline));
            }
        }
    }

    /// The payload is there. It counts only if the slot was about this message to the last: a sender that has
    /// given the slot up or written over it may have changed the buffer meanwhile.
    fn land(&mut self, env: &Env, by: Protocol) -> Step {
        let Path::Moving(protocol) = &mut self.path else {
            return Step::Pending(false);
        };
        if protocol.reads_lent_buffer() && self.claim.is_eager_all_the_same() {
            self.move_by(Moving::Eager(Eager::new(SlotState::Claimed)));
            return Step::Pending(true);
        }
        protocol.count(&self.claim, env);
        if !protocol.send_ats(&self.claim) {
            let why = self.claim.why_gone();
            return self.fail(&why);
        }
        (self.claim.routed, self.claim.turn) = (None, None);
        (self.flight, self.token) = (None, None);
        self.claim.life.arrive(by, self.claim.wanted);
        Step::Done
    }

    /// The sender has died. Its memory is still there as long as it is mapped, so a copy that reads it comes
    /// to its end. Returns false in that case.
    pub fn give_up_on_the_dead(&mut self, env: &Env, gpu: &mut Gpu) -> bool {
        let orphan = match &mut self.path {
            Path::Moving(protocol) => protocol.orphan(&self.claim, env),
            Path::Nothing => Orphan::Lost,
            Path::QueuedForTurn
            | Path::Draining(..)
            | Path::Unordered
            | Path::Queued { .. }
            | Path::QueuedForCheck { .. } => Orphan::GoesOn,
        };
        match orphan {
            Orphan::GoesOn => return false,
            Orphan::Instead(next) => {
                self.begin_instead(gpu, next);
                return false;
            }
            Orphan::Lost => {}
        }
        self.fail(&Lost::Dead);
        true
    }

    /// The message is lost. The sender is told, and the receive ends, once nothing writes to its buffer any
    /// more.
    fn fail(&mut self, why: &Lost) -> Step {
        let (of, path) = (
            Of::From(self.claim.message.source),
            self.claim.life.fault_path(),
        );
        let text = if *why == Lost::Dead || !self.claim.peer.goes_on() {
            fault::died(of, path, true)
        } else {
            fault::lost(of, path, why)
        };
        if *why == Lost::Corrupt {
            stats::add(Counter::Corrupt, 1);
        }
        let copies = match std::mem::replace(&mut self.path, Path::Nothing) {
            Path::Moving(protocol) => protocol.abort(),
            Path::Draining(copies, _) => copies,
            Path::Nothing
            | Path::QueuedForTurn
            | Path::Unordered
            | Path::Queued { .. }
            | Path::QueuedForCheck { .. } => Vec::new(),
        };
        self.set_path(Path::Draining(copies, text));
        Step::Pending(true)
    }

    /// For a copy that is known to be done: prefetches the cache lines in which the ATS will be written.
    pub fn will_send_ats(&self) {
        if self.moving().is_some_and(|by| by.is_known_done()) {
            self.claim.peer.will_send_ats(self.claim.slot);
        }
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

/// Whether the sender writes the message to the receive of this RTR.
fn is_for(message: &Message, rtr: RtrId) -> bool {
    message.flags & flag::PUT_EARLY != 0 && message.extra == [rtr.tag, u64::from(rtr.line)]
}
