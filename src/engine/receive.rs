//! Receives: posted natively at once. The engine completes those in which an RTS or a bcopy payload for a
//! device lands.

mod arrival;
mod check;
mod early_match;
mod finish;
mod lifting;
mod places;
mod plan;
mod rtr;

use std::ffi::c_int;

pub(super) use self::arrival::{is_cancelled, received};
use self::check::{Guard, ToCheck};
use self::early_match::EarlyMatch;
pub(super) use self::finish::{find_slot, release};
use self::lifting::Lifting;
pub(super) use self::places::Places;
pub use self::plan::{Plan, Prepared, Watch};

use crate::cuda::{self, Buffer, Lent};
use crate::engine::comms::{self, Named};
use crate::engine::core::{Core, Entry};
use crate::engine::early::Early;
use crate::engine::landing::Landing;
use crate::engine::lift::Shape;
use crate::engine::matched::Matched;
use crate::engine::place::{HostRuns, LentRuns};
use crate::engine::verify::Checking;
use crate::engine::{Engine, Env};
use crate::mpi::owned::OwnRequest;
use crate::mpi::{Abi, Comm, Family, Request, Slot, Status};
use crate::node::{rts, sys, Peer, RtrId, RTS_BYTES};
use crate::stats::Reason;
use crate::trace;
use crate::transfer::fault::Of;
use crate::transfer::fetch::{Destination, Fetch};
use crate::transfer::life::{Life, Outcome, Side, State};
use crate::transfer::story::{Parts, Story};
use crate::transfer::stream::Stream;

/// Where the bytes end up.
enum Target {
    /// The native receive puts them in place.
    InPlace,
    /// In place, but not in one run, so an RTS is not recognized (posted before this rank was live).
    Unseen,
    /// In place, and no RTS comes: the MPI library brings the message to whatever memory that is.
    LeftToMpi,
    /// Packed bytes in the landing range are scattered to host memory.
    HostRuns(HostRuns),
    /// To device memory, dense or by runs.
    Device { buffer: Buffer, shape: Shape },
    /// To device memory and elsewhere. Where each run belongs is found out once the bytes have landed.
    Several(LentRuns),
}

/// What the engine does for a receive meanwhile.
enum Work {
    /// Nothing.
    Nothing,
    /// Its payload is fetched.
    Fetch(Box<Fetch>),
    /// What has landed is lifted to the device.
    Lift(Box<Lifting>),
    /// Its payload is compared with what was sent.
    Check(Box<Checking>),
}

/// The native side of a receive, once it is complete.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    source: c_int,
    tag: c_int,
    bytes: u64,
    status: Status,
    /// MPICH reports the error of a receive when its status is asked for.
    code: c_int,
}

/// A receive that the engine watches.
pub struct Receive {
    /// The native request, whose handle is also in the program's hands; null before it is posted.
    native: OwnRequest,
    target: Target,
    work: Work,
    life: Life,
    /// When it was posted, for the trace.
    post: trace::Post,
    /// Bytes that the program's buffer holds.
    capacity: u64,
    /// Bytes that the native receive can take: an RTS fits even if the program's buffer is smaller.
    room: u64,
    /// Where it lands natively, if that is one run of host memory; else of no length, where the first byte lands.
    landed: Lent,
    landing: Option<Landing>,
    comm: Comm,
    /// Source and tag that it names; unknown if it was posted before this rank was live.
    from: Option<(c_int, c_int)>,
    /// The RTR that was sent of it, while its outcome is not known.
    rtr: Option<RtrId>,
    /// What is known of its message before the RTS arrives.
    early_match: EarlyMatch,
    /// How the members of its communicator are known.
    named: Named,
    arrival: Option<Arrival>,
    /// Length of the message, if the native status does not say it.
    length: Option<u64>,
    /// Error found by the engine, to be raised at completion.
    code: c_int,
    /// Which message `code` is about, and why, if the code says no more than MPI_ERR_OTHER.
    why: Option<Box<str>>,
    /// Its message, once that is known to be for a device or to come by RTS.
    of: Option<Of>,
    /// What the payload should be, and how it came. It is checked once it is where it belongs.
    to_check: Option<Box<ToCheck>>,
    /// Guards its place until it is checked.
    guard: Option<Guard>,
    /// Which part came by which path, if it was split.
    parts: Option<Parts>,
    /// Why it did not come by the direct path.
    reason: Option<Reason>,
    persistent: bool,
    /// It is persistent, and the program has freed it.
    freed: bool,
    /// The program has freed its request. The program may learn from another message that the receive is
    /// complete, and unmap the buffer, before the library knows.
    is_orphan: bool,
    /// Its message was taken, and counted, by a matched probe.
    matched: Option<Matched>,
    /// A send that belongs to the same request (`MPI_Isendrecv`).
    companion: Option<usize>,
    /// What the program's memory held where an RTS may land. A message shorter than an RTS must leave the
    /// rest as it was. Unknown if the receive was posted before this rank was live.
    covered: Option<[u8; RTS_BYTES]>,
    /// Lets threads that complete natively find entries to remove.
    serial: u64,
}

impl Engine {
    /// Whether a receive is complete; lets MPI progress.
    pub(super) fn look_at_receive(&self, core: &mut Core, id: usize) -> bool {
        core.end_orphaned(id);
        // Each question about an incomplete receive makes MPI progress, for all of them, and may yield the
        // core. So one question a round is enough. While a payload is on its way the answer does not matter,
        // except for the RTS of a message that was matched early.
        let is_claimed = core.awaits_rts(id);
        let receive = &core.receives[id];
        let is_posted = match receive.work {
            Work::Fetch(_) if !is_claimed => return false,
            _ => is_claimed || receive.life.is_offered(),
        };
        if is_posted && core.asked {
            core.passed_over = true;
        } else {
            core.look_at_arrival(&self.env, id);
            core.asked |= is_posted && core.receives[id].arrival.is_none();
        }
        core.is_received(id)
    }
}

impl Receive {
    /// See [`Fetch::is_by_copies`].
    pub(super) fn is_by_copies(&self) -> bool {
        matches!(&self.work, Work::Fetch(fetch) if fetch.is_by_copies())
    }

    /// Its sender will get the ATS soon: prepares for that.
    pub(super) fn will_end(&self) {
        if let Work::Fetch(fetch) = &self.work {
            fetch.will_send_ats();
        }
    }

    /// When the transfer can end at the earliest, if that is known.
    pub(super) fn due_ns(&self) -> Option<u64> {
        match &self.work {
            Work::Fetch(fetch) => fetch.due_ns(),
            _ => None,
        }
    }

    /// A receive that the MPI library has posted while this rank was not live.
    pub(super) fn posted_early(native: OwnRequest, early: Early) -> Receive {
        let (target, room) = match early.dense {
            true => (Target::InPlace, early.capacity),
            false => (Target::Unseen, 0),
        };
        // SAFETY: the program's buffer, which is one run in host memory if it is dense.
        let landed = unsafe { early.landed.lent(room) };
        Receive {
            life: Life::offered(Side::Receiver),
            serial: early.serial,
            named: early.named,
            ..Receive::new(native, early.comm, early.capacity, landed, target)
        }
    }

    fn new(native: OwnRequest, comm: Comm, capacity: u64, landed: Lent, target: Target) -> Receive {
        Receive {
            native,
            target,
            work: Work::Nothing,
            life: Life::new(Side::Receiver),
            post: trace::post(),
            capacity,
            room: capacity,
            landed,
            landing: None,
            comm,
            from: None,
            rtr: None,
            early_match: EarlyMatch::No,
            named: Named::ByItself,
            arrival: None,
            length: None,
            code: 0,
            why: None,
            of: None,
            to_check: None,
            guard: None,
            parts: None,
            reason: None,
            persistent: false,
            freed: false,
            is_orphan: false,
            matched: None,
            companion: None,
            covered: None,
            serial: 0,
        }
    }

    /// The message is lost, for the reason given.
    fn lose(&mut self, abi: &Abi, why: Box<str>) {
        (self.code, self.why) = (abi.err_other, Some(why));
    }

    /// The payload is where it belongs, or never will be.
    fn is_placed(&self) -> bool {
        self.life.is_over() && matches!(self.work, Work::Nothing)
    }

    /// It ends with the outcome that its code says, if it has not ended before.
    fn end(&mut self) {
        self.life.end(Outcome::of(self.code));
    }

    /// Its message, as lines for the user name it.
    fn of(&self) -> Of {
        self.of.unwrap_or(Of::FromAny)
    }

    /// What is known of it.
    pub(super) fn story(&self) -> Story {
        let (life, reason) = match &self.work {
            Work::Fetch(fetch) => (fetch.life(), fetch.reason()),
            _ => (self.life, self.reason),
        };
        let arrived = self.arrival.map_or(0, |arrival| arrival.bytes);
        Story {
            path: life.path(),
            bytes: self.length.unwrap_or(arrived),
            parts: self.parts,
            reason,
            ..Story::default()
        }
    }

    /// Its bytes belong in device memory, at least in part.
    fn is_for_device(&self) -> bool {
        matches!(self.target, Target::Device { .. } | Target::Several(_))
    }

    fn may_hold_rts(&self) -> bool {
        self.room >= RTS_BYTES as u64 && !matches!(self.target, Target::Unseen | Target::LeftToMpi)
    }

    /// An RTS that lands here can neither be recognized nor be found by its number: no peer may send one
    /// meanwhile.
    fn is_blind(&self, abi: &Abi) -> bool {
        // A library that reports the true length of a truncated message lets the slot be found by number.
        let tells_length = abi.family == Family::OpenMpi;
        match self.target {
            Target::Unseen => true,
            Target::LeftToMpi => false,
            _ => self.room < RTS_BYTES as u64 && !tells_length,
        }
    }

    /// An RTS does not fit here, although a message shorter than an RTS may.
    fn is_blind_to_small(&self) -> bool {
        let is_left = matches!(self.target, Target::LeftToMpi);
        let is_short = !is_left && !self.may_hold_rts();
        is_short || (self.place().is_some() && self.covered.is_none())
    }

    /// Whether something that begins like an RTS has landed. Only a look at the memory, if that is sure to be
    /// mapped.
    fn has_likely_rts(&self) -> bool {
        if self.is_orphan && self.place().is_some() {
            return self
                .read_landed()
                .is_some_and(|bytes| rts::is_likely(&bytes));
        }
        let landed = self.landed.part(0, RTS_BYTES as u64);
        // SAFETY: as many bytes are there; MPI may be writing them, which the checksum tells.
        unsafe { rts::begins(landed.as_ptr()) }
    }

    /// It is posted, and something that begins like an RTS has landed in it.
    fn seems_to_have_rts(&self) -> bool {
        self.life.is_offered() && self.may_hold_rts() && self.has_likely_rts()
    }

    /// A copy of what has landed, as long as an RTS. None if the program has unmapped it.
    fn read_landed(&self) -> Option<[u8; RTS_BYTES]> {
        if self.is_orphan && self.place().is_some() {
            return sys::read_own(self.landed.address());
        }
        // MPI may be writing, which the checksum tells.
        Some(self.landed.first())
    }

    /// Saves what an RTS would cover.
    fn cover(&mut self) {
        if let Target::InPlace = self.target {
            self.covered = self.may_hold_rts().then(|| self.landed.first());
        }
    }

    /// Restores what an RTS covered beyond its message of `length` bytes.
    fn uncover(&mut self, length: u64) {
        let (Target::InPlace, Some(covered)) = (&self.target, &self.covered) else {
            return;
        };
        if let Some(rest) = covered.get(length as usize..) {
            self.landed.part(length, rest.len() as u64).write(rest);
        }
    }

    /// Where in the program's memory an RTS may land.
    fn place(&self) -> Option<(usize, u64)> {
        let lands = matches!(self.target, Target::InPlace) && self.may_hold_rts();
        lands.then(|| (self.landed.address(), self.room))
    }

    /// The program's memory, if packed bytes lie there as they are, although they land elsewhere.
    fn dense_host(&self) -> Option<*mut u8> {
        match &self.target {
            Target::HostRuns(runs) => runs.one_run(),
            _ => None,
        }
    }

    fn destination(&self) -> Result<Destination, cuda::Error> {
        match &self.target {
            Target::Device {
                buffer,
                shape: Shape::Dense(address),
            } => Ok(Destination::Device {
                context: buffer.context_key()?,
                address: *address,
            }),
            // There is room for the packed payload where the bytes landed.
            _ => Ok(Destination::Host(
                self.dense_host().unwrap_or(self.landed.as_ptr()),
            )),
        }
    }
}

impl Core {
    pub(super) fn note_posted(&mut self, env: &Env, id: usize) {
        let (abi, own) = (env.abi, env.node.own());
        if own.receives_nothing() {
            own.set_receives_nothing(false);
        }
        let receive = &self.receives[id];
        self.blind += usize::from(receive.is_blind(abi));
        self.blind_to_small += usize::from(receive.is_blind_to_small());
        self.posted += usize::from(receive.may_hold_rts());
        self.expected += usize::from(receive.is_expecting());
        if let Some((start, bytes)) = receive.place() {
            self.places.insert(id, start, bytes);
        }
    }

    /// Nothing can land any more in this receive, which was posted.
    fn note_landed(&mut self, abi: &Abi, id: usize) {
        let receive = &self.receives[id];
        self.blind -= usize::from(receive.is_blind(abi));
        self.blind_to_small -= usize::from(receive.is_blind_to_small());
        self.posted -= usize::from(receive.may_hold_rts());
        if let Some((start, _)) = receive.place() {
            self.places.remove(id, start);
        }
        self.expect_no_more(id);
    }

    /// A persistent receive is about to be started natively.
    pub(super) fn start_receive(&mut self, env: &Env, id: usize) {
        let receive = &mut self.receives[id];
        receive.life.transition(State::Offered);
        receive.post = trace::post();
        if let Target::Device { buffer, .. } = &mut receive.target {
            // The program may since have freed its memory and allocated it again, in another context, under
            // the same handle.
            buffer.context_id = None;
        }
        if receive.landing.is_some() {
            receive.landed.write(&[0; RTS_BYTES]);
        }
        receive.cover();
        if let Some(posting) = self.receives[id].posting(env.abi) {
            let known = self.match_early(env, &posting, Some(id));
            let receive = &mut self.receives[id];
            (receive.rtr, receive.early_match) = known;
        }
        self.note_posted(env, id);
        self.keep_apart(env, id);
    }

    pub(super) fn is_received(&self, id: usize) -> bool {
        let receive = &self.receives[id];
        receive.is_placed() && receive.arrival.is_some()
    }

    /// Whether it is a persistent receive that is not started.
    pub(super) fn is_idle(&self, id: usize) -> bool {
        self.receives[id].life.is_prepared()
    }

    pub(super) fn is_persistent(&self, id: usize) -> bool {
        self.receives[id].persistent
    }

    /// The program has freed a persistent receive while it is active: it ends once it is complete.
    pub(super) fn set_transient(&mut self, id: usize) {
        self.receives[id].freed = self.receives[id].persistent;
        self.receives[id].is_orphan = true;
    }

    pub(super) fn companion_of(&self, id: usize) -> Option<usize> {
        self.receives[id].companion
    }

    pub(super) fn take_companion(&mut self, id: usize) -> Option<usize> {
        self.receives[id].companion.take()
    }

    pub(super) fn set_companion(&mut self, id: usize, send: usize) {
        self.receives[id].companion = Some(send);
    }

    /// The request of a receive that is posted, or persistent.
    pub(super) fn native_of(&mut self, id: usize) -> &mut OwnRequest {
        &mut self.receives[id].native
    }

    fn stream_of(&self, env: &Env, id: usize, source: c_int, tag: c_int) -> Option<Stream> {
        let receive = &self.receives[id];
        let identity = receive.named.identity(env.abi, receive.comm)?;
        Some(Stream {
            comm: identity.id,
            peer: identity.world_rank(source)?,
            tag,
        })
    }

    pub(super) fn peer_of_receive(&self, id: usize) -> Option<&Peer> {
        match &self.receives.get(id)?.work {
            Work::Fetch(fetch) => Some(fetch.peer()),
            _ => None,
        }
    }

    /// Keeps the identity of a communicator that is about to be freed, for the receives pending on it.
    /// Nothing asks about the communicator afterwards.
    pub(super) fn keep_identity(&mut self, abi: &Abi, comm: Comm) {
        let comm = abi.normalize(comm);
        let identity = comms::identity(abi, comm);
        self.early.keep_identity(abi, comm, identity.as_ref());
        for (_, receive) in &mut self.receives {
            if abi.normalize(receive.comm) == comm {
                receive.named.keep(identity.as_ref());
                // Errors are raised on a communicator that still exists.
                receive.comm = abi.comm_world;
            }
        }
        for (_, send) in &mut self.sends {
            if abi.normalize(send.comm) == comm {
                send.comm = abi.comm_world;
            }
        }
    }

    /// Gives the program the request of a receive.
    pub(super) fn hand_out_receive(
        &mut self,
        abi: &Abi,
        id: usize,
        request: Slot<'_, Request>,
    ) -> c_int {
        let handle = self.receives[id].native.handle();
        self.enter(handle, id);
        request.write(abi, handle);
        abi.success
    }

    /// Puts a receive into the program's hands.
    pub(super) fn enter(&mut self, handle: Request, id: usize) {
        let before = self.table.insert(handle, Entry::Receive(id));
        debug_assert!(before.is_none(), "a handle of two requests");
    }
}
