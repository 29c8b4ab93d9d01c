//! The receiver's side of a transfer: brings the payload of a descriptor.

pub mod driven;
mod push;
mod ring;
mod several;
mod start;
mod track;
mod trail;
mod turn;
mod way;

use std::sync::Arc;

use crate::cuda::{overlap, ContextKey, Error, InFlight, Uuid};
use crate::engine::counts::Wish;
use crate::engine::fault::{self, Of};
use crate::engine::fetch::driven::Driven;
use crate::engine::fetch::ring::Draw;
use crate::engine::fetch::several::Several;
pub use crate::engine::fetch::trail::{are_left, Trail, TrailEnd};
pub use crate::engine::fetch::turn::Turns;
use crate::engine::fetch::turn::{Start, Turn};
pub use crate::engine::fetch::way::{asks_for_depth, uses_host, Others, Rows, UnderWay, Ways};
use crate::engine::gpu::Gpu;
use crate::engine::invite::ONE_WAY_FROM;
use crate::engine::route::Routed;
use crate::engine::story;
use crate::engine::Env;
use crate::node::{
    Corruption, Descriptor, Invited, Message, Peer, Refused, Slot, State, Sums, Told,
};
use crate::policy::history::Flight;
use crate::stats::{self, Counter, Reason};

/// Flags of a slot's message.
pub mod flag {
    /// The IPC handle is valid; otherwise the payload comes through the host ring only.
    pub const EXPORTED: u32 = 1;
    /// The checksums of the message lie beside its slot.
    pub const SUMS: u32 = 2;
    /// The message is in host memory.
    pub const HOST: u32 = 4;
    /// Its sender writes it to the receive of which it was told, and which `extra` names.
    pub const INVITED: u32 = 8;
    /// Since the message before it in its stream its sender has sent nothing that its receiver could not see.
    pub const FOLLOWS: u32 = 16;
}

/// What becomes of a message that has failed on its way.
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

/// By which path it comes.
enum Path {
    /// Nothing to bring.
    Nothing,
    /// Straight from the sender's device memory.
    Direct(InFlight),
    /// The same, written by the sender, who was told of the receive before.
    Pushed(Told),
    /// The same, but others are read first.
    Waiting,
    /// Over several paths at once.
    Several(Box<Several>),
    /// To come through its sender's staging, once it is known for which others in its place it waits: see [`Fetch::set_order`].
    Unordered,
    /// Not begun before these messages, which are received in the same place and written in other ways, are over.
    Held { trails: Vec<Arc<Trail>>, then: Then },
    /// Not planned before what was received in the same place has been compared with what was sent.
    Behind {
        checks: Vec<Arc<Trail>>,
        /// It then comes from the host memory where its sender has put it.
        is_hosted: bool,
    },
    /// The same as several paths, every copy being this rank's.
    Driven(Box<Driven>),
    /// Through the sender's ring in host memory, or in memory of its GPU.
    Ring(Draw),
    /// The message is lost, as the text says. Copies into the program's buffer that still run are waited for.
    Draining(Vec<InFlight>, Box<str>),
}

/// What becomes of a message that waits for others in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// It sets out.
    Start,
    /// It comes from the host memory where its sender has put it.
    Hosted,
    /// It comes through its sender's staging.
    Staging,
}

impl Path {
    fn ring(state: State) -> Path {
        Path::Ring(Draw::new(state))
    }

    /// As the user reads it.
    fn told(&self) -> fault::Path {
        match self {
            Path::Ring(draw) => draw.told(),
            Path::Several(_) | Path::Driven(_) => fault::Path::Several,
            _ => fault::Path::Direct,
        }
    }
}

/// A message that is to come through its sender's staging to device memory.
#[derive(Clone, Copy, Debug)]
pub struct Staged {
    /// See [`UnderWay::began`].
    began: u64,
    source: u32,
    place: (u64, u64),
    /// What its sender's memory is.
    kind: u32,
}

impl Staged {
    /// Whether it is behind another that began before, and is received in the same place.
    pub fn is_behind(&self, began: u64, place: (u64, u64)) -> bool {
        began < self.began && overlap(self.place, place)
    }

    /// Whether another is cut into the same pieces, which are written by the same streams.
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
    own: bool,
    /// The GPU of the destination; zeros for host memory.
    device: Uuid,
    /// Why the direct path was not taken.
    reason: Option<Reason>,
    /// Driver calls that have failed.
    failures: u32,
    /// The plan of a long message: what it uses of the links is known to the node until it is over.
    routed: Option<Routed>,
    /// Of one that may be split.
    flight: Option<Flight>,
    /// Of a message that others received in its place have to know of: ends when nothing of it is written any more.
    trail: Option<TrailEnd>,
    /// Of a long message that is read from one of several.
    turn: Option<Turn>,
    /// Which message of this rank it is.
    began: u64,
    /// What somebody waits for who is behind a message without a trail.
    end: Option<TrailEnd>,
}

// SAFETY: the destination belongs to a pending receive, which MPI has lent to the library until it completes.
unsafe impl Send for Fetch {}

/// What became of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    /// Under way; whether something moved.
    Pending(bool),
    /// The payload is there and the sender knows.
    Done,
    /// It cannot be had.
    Failed(Box<str>),
}

/// Why a landed message is no descriptor to be served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotTaken {
    /// Ordinary bytes.
    Value,
    /// It claims to be one, and is not believed.
    Bad,
    /// It is one, and its message cannot be had.
    Lost,
}

/// A descriptor that has landed, of a message that is not claimed yet.
pub struct Landed {
    descriptor: Descriptor,
    peer: Arc<Peer>,
}

impl Landed {
    /// What it says.
    pub fn descriptor(&self) -> Descriptor {
        self.descriptor
    }

    /// One that has not landed yet, and will.
    pub fn foreseen(descriptor: Descriptor, peer: Arc<Peer>) -> Landed {
        Landed { descriptor, peer }
    }

    /// Nobody will have its message.
    pub fn turn_down(&self, env: &Env) {
        if let Some(slot) = self.peer.slot(self.descriptor.slot) {
            slot.turn_down(self.descriptor.nonce, env.abi.err_other);
        }
        self.peer.ring_doorbell();
    }

    /// Reads what has landed.
    pub fn read(env: &Env, bytes: &[u8]) -> Result<Landed, NotTaken> {
        let descriptor = match Descriptor::decode(bytes, env.node.launch().hash) {
            Ok(descriptor) => descriptor,
            Err(crate::node::Rejection::NotADescriptor) => return Err(NotTaken::Value),
            Err(crate::node::Rejection::Corrupt(why)) => {
                log::debug!("a message that begins like a descriptor: {why}");
                return Err(NotTaken::Bad);
            }
        };
        let peer = env.node.peer(descriptor.sender).ok_or(NotTaken::Lost)?;
        peer.will_claim(descriptor.slot);
        Ok(Landed { descriptor, peer })
    }
}

impl Fetch {
    /// Claims the message of a descriptor, if it is for this rank, and sets its payload in motion. `capacity` is what the
    /// receive can hold: of a longer message nothing is fetched. `told`: what the sender was told of the receive.
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
        mut ways: Ways<'_>,
        told: Option<Told>,
    ) -> Result<Box<Fetch>, NotTaken> {
        let Landed { descriptor, peer } = landed;
        // Claimed first: the line is then this core's to write, and is not fetched twice.
        let slot = peer.slot(descriptor.slot);
        let hosted = match slot.map(|slot| slot.claim(descriptor.nonce)) {
            Some(Ok(())) => Some(false),
            Some(Err(Refused::State(State::Hosted))) => Some(true),
            _ => None,
        };
        let claimed = hosted.and_then(|hosted| match peer.validate(&descriptor) {
            Ok((_, message)) => {
                (message.destination == env.world_rank).then_some((message, hosted))
            }
            Err(why) => {
                stats::add(Counter::Corrupt, u64::from(why == Corruption::Digest));
                None
            }
        });
        // What its sender writes to this receive, and nothing else, comes that way.
        let pushed =
            told.filter(|told| matches!(&claimed, Some((message, _)) if is_for(message, *told)));
        let is_withdrawn =
            pushed.is_some() || told.is_none_or(|told| env.node.own().withdraw(told));
        let claimed = claimed.filter(|(message, _)| {
            let is_pushed = message.flags & flag::INVITED != 0;
            let is_right = is_pushed == pushed.is_some() && is_withdrawn;
            stats::add(Counter::Corrupt, u64::from(!is_right));
            is_right
        });
        let Some((message, hosted)) = claimed else {
            // Its sender must not wait for a receiver that will never come.
            Landed { descriptor, peer }.turn_down(env);
            return Err(NotTaken::Lost);
        };
        let own = descriptor.sender == env.world_rank;
        let wanted = if message.length > capacity {
            0
        } else {
            message.length
        };
        let mut fetch = Box::new(Fetch {
            peer,
            slot: descriptor.slot,
            nonce: descriptor.nonce,
            message,
            wanted,
            to,
            path: Path::Nothing,
            own,
            device: ways.to().unwrap_or_default(),
            reason: None,
            failures: 0,
            routed: None,
            flight: None,
            trail: None,
            turn: None,
            began: 0,
            end: None,
        });
        fetch.note_wish(env);
        fetch.flight = fetch.enter(env, &mut ways);
        let pushed = pushed.filter(|_| wanted > 0);
        if pushed.is_some_and(|told| fetch.begin_rest(env, gpu, &mut ways, told)) {
            return Ok(fetch);
        }
        if let Some(told) = pushed {
            fetch.path = Path::Pushed(told);
            // What is received in its place is on no lane of its sender's.
            fetch.leave_trail(false);
            fetch.plan_meanwhile(env, gpu, ways);
        } else if wanted > 0 && !ways.checks.is_empty() {
            let checks = std::mem::take(&mut ways.checks);
            fetch.path = Path::Behind {
                checks,
                is_hosted: hosted,
            };
            fetch.leave_trail(false);
        } else if wanted > 0 {
            fetch.set_out(env, gpu, &mut ways, hosted);
        }
        Ok(fetch)
    }

    /// Sets the payload in motion, from the sender's buffer or from where it has put it in host memory.
    fn set_out(&mut self, env: &Env, gpu: &mut Gpu, ways: &mut Ways<'_>, is_hosted: bool) {
        if is_hosted {
            self.start_hosted(env, gpu, ways);
            return;
        }
        let depth = self.depth(env, ways);
        if !self.start_several(env, gpu, ways, depth) {
            self.start_in_turn(env, gpu, ways, depth);
        }
    }

    /// Whether it waited for what was received in its place to be checked, and need not any more.
    pub fn may_set_out(&mut self) -> bool {
        let Path::Behind { checks, .. } = &mut self.path else {
            return false;
        };
        checks.retain(|check| !check.is_over());
        checks.is_empty()
    }

    /// Sets it out that waited so.
    pub fn set_out_behind(&mut self, env: &Env, gpu: &mut Gpu, ways: &mut Ways<'_>) {
        let Path::Behind { is_hosted, .. } = self.path else {
            return;
        };
        // Those behind it wait for its end, whichever way it goes now.
        self.end = self.trail.take();
        self.path = Path::Nothing;
        if self.peer.alive() || is_hosted {
            self.set_out(env, gpu, ways, is_hosted);
        } else {
            // It brings nothing any more; its memory is read as long as it is mapped.
            self.start(gpu);
        }
        gpu.launch();
    }

    /// Which message of this rank it is, in the order in which they were taken.
    pub fn began(&self) -> u64 {
        self.began
    }

    /// Lets the sender know how this rank would rather have the next message of the stream. From host memory to host memory
    /// the MPI library brings it best.
    fn note_wish(&self, env: &Env) {
        let message = &self.message;
        let to_host = matches!(self.to, Destination::Host(_));
        let (wish, wanted) = if message.flags & flag::HOST != 0 {
            (Wish::Descriptor, !to_host)
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

    /// The checksums of the message, if its sender has taken any and its payload is wanted. To be asked for as long as
    /// the message is claimed.
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

    /// By which path the payload comes, or came.
    pub fn way(&self) -> story::Path {
        match &self.path {
            Path::Ring(draw) => draw.way(),
            Path::Draining(..) | Path::Unordered | Path::Held { .. } | Path::Behind { .. } => {
                story::Path::Unknown
            }
            Path::Several(several) if several.is_direct() => story::Path::Direct,
            Path::Several(_) | Path::Driven(_) => story::Path::Several,
            Path::Nothing if self.wanted == 0 => story::Path::Unknown,
            Path::Nothing | Path::Direct(_) if self.own => story::Path::Own,
            Path::Nothing | Path::Direct(_) | Path::Pushed(_) | Path::Waiting => {
                story::Path::Direct
            }
        }
    }

    /// Which parts of the payload came by which path, if it came by several: to be asked for once it is there.
    pub fn parts(&self) -> Option<story::Parts> {
        match &self.path {
            Path::Several(several) if !several.is_direct() => Some(several.parts()),
            Path::Driven(driven) => Some(driven.parts()),
            _ => None,
        }
    }

    /// Why the payload does not come by the direct path, where that was tried.
    pub fn reason(&self) -> Option<Reason> {
        let is_exported = self.message.flags & (flag::EXPORTED | flag::HOST) != 0;
        let to_device = matches!(self.to, Destination::Device { .. });
        self.reason
            .or((to_device && !self.own && !is_exported).then_some(Reason::NotExportable))
    }

    /// Whether this rank reads so much of a sender's memory that it had better not write there meanwhile.
    pub fn reads_from(&self, rank: u32) -> bool {
        let is_read = match &self.path {
            Path::Direct(_) => !self.own,
            Path::Several(several) => several.reads(),
            _ => false,
        };
        is_read && self.message.source == rank && self.wanted >= ONE_WAY_FROM
    }

    /// Whether copies of whole messages bring it, so that nobody has to look after pieces meanwhile.
    pub fn is_by_copies(&self) -> bool {
        match &self.path {
            Path::Direct(_) | Path::Pushed(_) => true,
            Path::Several(several) => several.is_direct(),
            _ => false,
        }
    }

    /// When it can be over at the earliest, by the clock of copies, where that is known.
    pub fn due_ns(&self) -> Option<u64> {
        match &self.path {
            Path::Direct(copy) => copy.due_ns(),
            _ => None,
        }
    }

    /// Which message of this rank it is, in the order in which they were taken.
    pub fn set_began(&mut self, began: u64) {
        self.began = began;
    }

    /// Where in device memory it is received, an address and a length. None where it goes to host memory.
    fn place(&self) -> Option<(u64, u64)> {
        match self.to {
            Destination::Device { address, .. } => Some((address, self.wanted)),
            Destination::Host(_) => None,
        }
    }

    /// What another message is to know of it that is received meanwhile. None where it goes to host memory.
    pub fn under_way(&self) -> Option<UnderWay> {
        Some(UnderWay {
            began: self.began,
            source: self.message.source,
            to: self.place()?,
            trail: self.trail.as_ref().map(|end| Arc::clone(end.trail())),
        })
    }

    /// What a value waits for that is lifted to its place. None where it is written elsewhere.
    pub fn end(&mut self, place: (u64, u64)) -> Option<Arc<Trail>> {
        overlap(self.place()?, place).then(|| match &self.trail {
            Some(end) => Arc::clone(end.trail()),
            None => {
                let end = self.end.get_or_insert_with(|| TrailEnd::new(false));
                Arc::clone(end.trail())
            }
        })
    }

    /// Whether it is to come through its sender's staging, once it is known for which others it waits.
    pub fn wants_order(&self) -> bool {
        matches!(self.path, Path::Unordered)
    }

    /// What a message waits for that is to come through its sender's staging, and was claimed after this one. None where this one
    /// is written elsewhere, or through staging as well, piece by piece alike: such messages are in order by their streams.
    pub fn end_before(&mut self, next: &Staged) -> Option<Arc<Trail>> {
        let this = self.staged()?;
        let is_staged = match &self.path {
            Path::Held { then, .. } => *then == Then::Staging,
            path => matches!(path, Path::Ring(_) | Path::Unordered),
        };
        if !next.is_behind(this.began, this.place) || (is_staged && this.is_like(next)) {
            return None;
        }
        self.end(next.place)
    }

    /// What decides for which others a message waits that is to come through staging. None where it goes to host memory.
    pub fn staged(&self) -> Option<Staged> {
        Some(Staged {
            began: self.began,
            source: self.message.source,
            place: self.place()?,
            kind: self.message.flags & (flag::HOST | flag::EXPORTED),
        })
    }

    /// Has a message that [`Fetch::wants_order`] wait for these; for none of them its sender is asked at once.
    pub fn set_order(&mut self, gpu: &mut Gpu, trails: Vec<Arc<Trail>>) {
        if trails.is_empty() {
            self.want_ring(gpu);
            return;
        }
        self.path = Path::Held {
            trails,
            then: Then::Staging,
        };
    }

    /// The sender.
    pub fn peer(&self) -> &Peer {
        &self.peer
    }

    fn slot(&self) -> Option<&Slot> {
        self.peer.slot(self.slot)
    }

    /// Moves the transfer on, without waiting.
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
                self.acknowledge();
                Step::Done
            }
            Path::Direct(copy) => match copy.poll() {
                Ok(false) => Step::Pending(false),
                Ok(true) => {
                    if self.is_hosted_all_the_same() {
                        self.path = Path::ring(State::Claimed);
                        return Step::Pending(true);
                    }
                    let counters = if self.own {
                        (Counter::SelfReceives, Counter::SelfBytes)
                    } else {
                        (Counter::DirectReceives, Counter::DirectBytes)
                    };
                    self.complete(counters)
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
            Path::Pushed(told) => {
                let told = *told;
                match env.node.own().invited(told) {
                    Some(Invited::Taken) => Step::Pending(false),
                    Some(Invited::Landed) if told.rest > 0 => {
                        // Nobody could be asked for the rest of it.
                        self.pull_instead(env, gpu, told);
                        Step::Pending(true)
                    }
                    Some(Invited::Landed) => {
                        has_landed(env, told);
                        stats::add(Counter::DirectPushedBytes, self.wanted);
                        self.complete((Counter::DirectReceives, Counter::DirectBytes))
                    }
                    Some(Invited::Refused) => {
                        self.pull_instead(env, gpu, told);
                        Step::Pending(true)
                    }
                    Some(Invited::Open) | None => self.fail(&Lost::Corrupt),
                }
            }
            Path::Waiting => {
                let turn = self.turn.as_mut();
                let is_its_turn = turn.is_none_or(|turn| turn.comes(&|rank| readers(env, rank)));
                if is_its_turn {
                    let begins = self.turn.as_ref().and_then(Turn::start);
                    if begins != Some(Start::InBatch) {
                        // Not in one launch with the batch before it, which is over sooner.
                        gpu.launch();
                    }
                    self.start(gpu);
                    if !self.turn.as_ref().is_some_and(Turn::is_followed) {
                        gpu.launch();
                    }
                }
                Step::Pending(is_its_turn)
            }
            Path::Held { trails, then } => {
                trails.retain(|trail| !trail.is_over());
                if !trails.is_empty() {
                    return Step::Pending(false);
                }
                match then {
                    Then::Hosted => self.path = Path::ring(State::Hosted),
                    Then::Staging => self.want_ring(gpu),
                    Then::Start => {
                        self.start(gpu);
                        gpu.launch();
                    }
                }
                Step::Pending(true)
            }
            Path::Unordered | Path::Behind { .. } => Step::Pending(false),
            Path::Several(several) => match several.poll(env, gpu) {
                several::Step::Pending(moved) => Step::Pending(moved),
                several::Step::Arrived => {
                    let (arrived, fared) = (several.arrived(), several.host_fared());
                    if self.is_hosted_all_the_same() {
                        self.path = Path::ring(State::Claimed);
                        return Step::Pending(true);
                    }
                    arrived.count();
                    if let (Some(routed), Some(how)) = (&self.routed, fared) {
                        routed.fared(how);
                    }
                    self.complete(arrived.message)
                }
                several::Step::Corrupt => self.fail(&Lost::Corrupt),
                several::Step::Lost(error) => {
                    self.survived(&error, AGAIN_THROUGH_HOST);
                    stats::add(Counter::Retries, 1);
                    stats::fallback(Reason::DriverError, self.wanted);
                    self.reason = Some(Reason::DriverError);
                    self.want_host();
                    Step::Pending(true)
                }
            },
            Path::Driven(driven) => match driven.poll(gpu) {
                driven::Step::Pending(moved) => Step::Pending(moved),
                driven::Step::Arrived => {
                    let bytes = driven.bytes();
                    if self.is_hosted_all_the_same() {
                        self.path = Path::ring(State::Claimed);
                        return Step::Pending(true);
                    }
                    driven::count(&bytes);
                    self.complete((Counter::SeveralReceives, Counter::SeveralBytes))
                }
                driven::Step::Lost => {
                    stats::add(Counter::Retries, 1);
                    self.start(gpu);
                    gpu.launch();
                    Step::Pending(true)
                }
            },
            Path::Ring(_) => match self.poll_ring(gpu) {
                Ok(step) => step,
                Err(why) => self.fail(&why),
            },
            Path::Draining(copies, why) => {
                copies.retain_mut(|copy| !copy.is_over());
                if copies.is_empty() {
                    let why = std::mem::take(why);
                    (self.routed, self.trail) = (None, None);
                    self.acknowledge();
                    Step::Failed(why)
                } else {
                    Step::Pending(false)
                }
            }
        }
    }

    /// Whether the sender has put the payload of a claimed message into the ring: it was about to, when the message was
    /// claimed, and if the claim was made in a state that somebody had written, it did so in time and has given the
    /// buffer back. What is in the ring is right in both cases.
    fn is_hosted_all_the_same(&self) -> bool {
        // Only what fits into a cell is hosted; of all others the sender's slot is not looked at again.
        let may_be = self.message.length <= u64::from(self.peer.layout().cell_bytes);
        may_be
            && self
                .slot()
                .is_some_and(|slot| matches!(slot.ring(self.nonce).front(), Ok(Some(_))))
    }

    /// The payload is there. It is the sender's message only if the slot was about it to the last: who gives a slot up,
    /// or writes over it, may have changed the buffer meanwhile.
    fn complete(&mut self, (messages, bytes): (Counter, Counter)) -> Step {
        if !self.acknowledge() {
            let why = self.why_gone();
            return self.fail(&why);
        }
        (self.routed, self.flight, self.trail, self.turn) = (None, None, None, None);
        stats::add(messages, 1);
        stats::add(bytes, self.wanted);
        Step::Done
    }

    /// Why the slot is not about the message any more.
    fn why_gone(&self) -> Lost {
        match self.slot().map(|slot| slot.state(self.nonce)) {
            Some(Ok(State::Failed)) => Lost::GivenUp,
            Some(Err(_)) => Lost::Gone,
            _ => Lost::Corrupt,
        }
    }

    fn survived(&self, error: &Error, remedy: &str) {
        let of = Of::From(self.message.source);
        // What fails because the sender has died is told when its messages are given up.
        if self.peer.goes_on() {
            fault::survived(of, self.path.told(), error, remedy);
        }
    }

    /// Its sender writes no more to the receive of which it was told, and not all of it is there.
    fn pull_instead(&mut self, env: &Env, gpu: &mut Gpu, told: Told) {
        env.node.own().close_invitation(told);
        stats::add(Counter::Retries, 1);
        self.start(gpu);
        gpu.launch();
    }

    /// The sender has died. What is being read from its memory is still there, as long as it is mapped: such a copy comes
    /// to its end. False if so.
    pub fn give_up_on_the_dead(&mut self, env: &Env, gpu: &mut Gpu) -> bool {
        if let Path::Several(several) = &mut self.path {
            fault::died(Of::From(self.message.source), fault::Path::Several, false);
            several.give_up_on_the_dead(env);
            return false;
        }
        if let Path::Pushed(told) = self.path {
            // It writes no more, and what it has not is read from its memory, which is there as long as it is mapped: that is
            // until its mappings are dropped, when all that is under way with it has been given up.
            env.node.own().take_invitation_back(told);
            if env.node.own().invited(told) == Some(Invited::Refused) {
                self.pull_instead(env, gpu, told);
            }
            return false;
        }
        if matches!(
            self.path,
            Path::Direct(_)
                | Path::Waiting
                | Path::Driven(_)
                | Path::Draining(..)
                | Path::Unordered
                | Path::Held { .. }
                | Path::Behind { .. }
        ) {
            return false;
        }
        self.fail(&Lost::Dead);
        true
    }

    /// The message is lost. Its sender is told, and the receive ends, once nothing is written to its buffer any more.
    fn fail(&mut self, why: &Lost) -> Step {
        let (of, path) = (Of::From(self.message.source), self.path.told());
        let text = if *why == Lost::Dead || !self.peer.goes_on() {
            fault::died(of, path, true)
        } else {
            fault::lost(of, path, why)
        };
        if *why == Lost::Corrupt {
            stats::add(Counter::Corrupt, 1);
        }
        let copies = match std::mem::replace(&mut self.path, Path::Nothing) {
            Path::Direct(copy) => vec![copy],
            Path::Ring(draw) => draw.into_copies(),
            Path::Draining(copies, _) => copies,
            // Whole, or drained.
            Path::Nothing
            | Path::Pushed(_)
            | Path::Waiting
            | Path::Several(_)
            | Path::Driven(_)
            | Path::Unordered
            | Path::Held { .. }
            | Path::Behind { .. } => Vec::new(),
        };
        self.path = Path::Draining(copies, text);
        Step::Pending(true)
    }

    /// Has the lines brought in which its sender is told of a copy that is known to be done.
    pub fn will_acknowledge(&self) {
        if let Path::Direct(copy) = &self.path {
            if copy.is_known_done() {
                self.peer.will_acknowledge(self.slot);
            }
        }
    }

    fn acknowledge(&self) -> bool {
        if let Path::Pushed(_) = self.path {
            return self.peer.acknowledge_unheard(self.slot, self.nonce);
        }
        self.peer.acknowledge(self.slot, self.nonce)
    }
}

/// How many other ranks read long messages from one.
fn readers(env: &Env, rank: u32) -> u32 {
    let peers = env.node.peers();
    let others = peers
        .iter()
        .filter(|peer| peer.world_rank() != env.world_rank);
    others.filter(|peer| peer.reads_from(rank)).count() as u32
}

/// What its sender was invited to write is there.
fn has_landed(env: &Env, told: Told) {
    let own = env.node.own();
    own.close_invitation(told);
    own.promise_invitation(told);
    stats::add(Counter::InvitedReceives, 1);
}

/// Whether it is this receive of which its sender was told that a message is written to.
fn is_for(message: &Message, told: Told) -> bool {
    message.flags & flag::INVITED != 0 && message.extra == [told.tag, u64::from(told.line)]
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
