//! Receives while no rank of the node uses device memory ("early"). The MPI library makes them. The engine
//! remembers just enough to take over those that are pending when that changes, and to count messages that
//! are as long as an RTS.
//!
//! **Architecture invariant:** while a thread is inside a native call that may complete an early receive,
//! that receive may already be complete and its handle may belong to another request. So the receive belongs
//! to that call: nobody else takes it over or finds it by its handle. All others are taken over when no
//! thread is inside such a call, and only then peers may send RTSs.
//!
//! A program that never touches a device pays for this only: one look at the address, and one record for each
//! pending receive.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;

use hashbrown::HashMap;

use crate::cuda::{self, Start};
use crate::engine::args::{RecvArgs, SendArgs};
use crate::engine::comms::{Identity, Named};
use crate::engine::core::Core;
use crate::engine::place::Place;
use crate::engine::receive::{is_cancelled, received, Receive};
use crate::engine::types;
use crate::engine::{Engine, Env, NativeScope};
use crate::mpi::owned::OwnRequest;
use crate::mpi::{
    native, Abi, Comm, Copied, Datatype, Family, Request, Slot, Slots, Status, StatusAt, StatusRef,
    Statuses,
};
use crate::node::RTS_BYTES;
use crate::transfer::stream::Stream;

/// A pending receive into host memory.
#[derive(Clone, Debug)]
pub(super) struct Early {
    /// Where the first byte lands.
    pub(super) landed: Start,
    /// Bytes that there is room for.
    pub(super) capacity: u64,
    pub(super) comm: Comm,
    /// How the members of its communicator are known.
    pub(super) named: Named,
    /// Number of the receive, which tells it apart from a later one under the same handle. Never 0.
    pub(super) serial: u64,
    /// A native call that may complete it is under way. Not kept if only one thread calls MPI at a time.
    in_call: bool,
    /// The bytes land in one run.
    pub(super) dense: bool,
}

/// Spreads handles, which are addresses or small numbers.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct HandleHasher(u64);

impl Hasher for HandleHasher {
    #[inline]
    fn finish(&self) -> u64 {
        self.0
    }

    #[inline]
    fn write_usize(&mut self, handle: usize) {
        // Fibonacci hashing; the table takes its index from the low bits and its tags from the high ones.
        let product = (handle as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        self.0 = product ^ (product >> 32);
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_usize(usize::from(*byte) ^ self.0 as usize);
        }
    }
}

/// The pending receives of this kind.
#[derive(Debug, Default)]
pub(super) struct Pending {
    by_handle: HashMap<Request, Early, BuildHasherDefault<HandleHasher>>,
    /// Receives whose handle the library has given to a later receive. So they are complete, but their thread
    /// is still on its way out of the completing call.
    displaced: Vec<(Request, Early)>,
}

impl Pending {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.by_handle.is_empty() && self.displaced.is_empty()
    }

    /// How many receives are pending.
    pub(super) fn len(&self) -> usize {
        self.by_handle.len() + self.displaced.len()
    }

    #[inline]
    fn insert(&mut self, handle: Request, early: Early) {
        if let Some(before) = self.by_handle.insert(handle, early) {
            self.displaced.push((handle, before));
        }
    }

    /// A communicator of this identity is about to be freed.
    pub(super) fn keep_identity(
        &mut self,
        abi: &Abi,
        comm: Comm,
        identity: Option<&Arc<Identity>>,
    ) {
        let displaced = self.displaced.iter_mut().map(|(_, early)| early);
        for early in self.by_handle.values_mut().chain(displaced) {
            if abi.normalize(early.comm) == comm {
                early.named.keep(identity);
                early.comm = abi.comm_world;
            }
        }
    }

    /// The receive that a native call is given as `handle`. If several threads may call MPI, it belongs to
    /// that call until it is taken out or released.
    #[inline]
    fn claim(&mut self, handle: Request, among_several: bool) -> Option<Claim> {
        let early = self.by_handle.get_mut(&handle)?;
        // The call that has completed it has not ended, and a later request has the handle.
        if early.in_call {
            return None;
        }
        early.in_call = among_several;
        let serial = early.serial;
        Some(Claim { handle, serial })
    }

    /// The call has ended. The receive is still pending if it was not taken out.
    #[inline]
    fn release(&mut self, claim: Claim) {
        match self.by_handle.get_mut(&claim.handle) {
            Some(early) if early.serial == claim.serial => early.in_call = false,
            _ => {}
        }
    }

    /// The receive was completed.
    #[inline]
    fn take(&mut self, claim: Claim) -> Option<Early> {
        match self.by_handle.get(&claim.handle) {
            Some(early) if early.serial == claim.serial => self.by_handle.remove(&claim.handle),
            _ => self.take_displaced(claim.serial),
        }
    }

    #[cold]
    fn take_displaced(&mut self, serial: u64) -> Option<Early> {
        let mut displaced = self.displaced.iter();
        let at = displaced.position(|(_, early)| early.serial == serial)?;
        Some(self.displaced.swap_remove(at).1)
    }
}

/// An early receive that a native call may complete.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    handle: Request,
    serial: u64,
}

/// Room for what is known of the requests of one completing call. Each thread keeps its own.
#[derive(Default)]
pub(super) struct Scratch {
    handles: Copied<Request>,
    /// With the index of each request, in order, if several threads may call MPI at once.
    claims: Vec<(usize, Claim)>,
    statuses: Vec<u8>,
}

/// Bytes that a thread keeps between calls: some 30,000 requests.
const SCRATCH_MAX: usize = 1 << 20;

thread_local! {
    static SCRATCH: Cell<Option<Box<Scratch>>> = const { Cell::new(None) };
}

impl Scratch {
    fn take() -> Box<Scratch> {
        SCRATCH
            .try_with(Cell::take)
            .ok()
            .flatten()
            .unwrap_or_default()
    }

    fn keep(self: Box<Scratch>) {
        let claims = self.claims.capacity() * size_of::<(usize, Claim)>();
        if self.handles.capacity() + claims + self.statuses.capacity() <= SCRATCH_MAX {
            let _ = SCRATCH.try_with(|scratch| scratch.set(Some(self)));
        }
    }
}

/// The requests of a completing call, as they were before it.
pub(super) struct Before {
    scratch: Box<Scratch>,
}

impl Before {
    fn note(abi: &Abi, requests: Slots<'_, Request>) -> Before {
        let mut scratch = Scratch::take();
        scratch.claims.clear();
        requests.copy_to(abi, &mut scratch.handles);
        Before { scratch }
    }

    /// What was noted; and the statuses for the native call: the program's, or our own room if the program wants none,
    /// because the engine must see the length of a message.
    pub(super) fn split<'a>(
        &'a mut self,
        abi: &Abi,
        statuses: Statuses<'a>,
    ) -> (Noted<'a>, Statuses<'a>) {
        let Scratch {
            handles,
            claims,
            statuses: room,
        } = &mut *self.scratch;
        let statuses = match statuses.is_ignored(abi) {
            true => Statuses::within(abi, room, handles.len().max(1)),
            false => statuses,
        };
        (Noted { handles, claims }, statuses)
    }

    /// The call has been noted.
    pub(super) fn keep(self) {
        self.scratch.keep();
    }
}

/// See [`Before`].
#[derive(Clone, Copy)]
pub(super) struct Noted<'a> {
    handles: &'a Copied<Request>,
    claims: &'a [(usize, Claim)],
}

impl Noted<'_> {
    /// How many requests there are.
    #[inline(always)]
    pub(super) fn count(&self) -> usize {
        self.handles.len()
    }

    #[inline(always)]
    fn handle(&self, abi: &Abi, i: usize) -> Request {
        self.handles.get(abi, i)
    }

    /// The early receive that was claimed as the request of this index.
    fn claim(&self, i: usize) -> Option<Claim> {
        let at = self.claims.binary_search_by_key(&i, |(i, _)| *i).ok()?;
        Some(self.claims[at].1)
    }
}

impl Env {
    /// Bytes that a status reports.
    #[inline]
    pub(super) fn length_of(&self, status: StatusRef<'_>) -> u64 {
        let read = self.reads_lengths.then(|| self.abi.status_length(status));
        read.flatten().unwrap_or_else(|| received(self.abi, status))
    }

    /// Whether a message that has completed a receive with this status is as long as an RTS.
    #[inline]
    pub(super) fn is_rts_long(&self, status: StatusRef<'_>) -> bool {
        self.length_of(status) == RTS_BYTES as u64
    }
}

/// Whether the length of a message can be read from its status at the place where this ABI should have it.
/// Tests the library itself: it writes some lengths, and all must be found.
pub(super) fn reads_lengths(abi: &Abi) -> bool {
    [0i64, 1, 61, 0x7fff_ffff, 0x8000_0000, 0x12_3456_789a]
        .into_iter()
        .all(|length| {
            let mut status = Status::new();
            let at = StatusAt::of(&mut status);
            native::status_set_elements_x(at, abi.byte, length as _) == abi.success
                && native::status_set_cancelled(at, 0) == abi.success
                && abi.status_length(at.seen()) == u64::try_from(length).ok()
                && received(abi, at.seen()) == length as u64
        })
}

/// A message that is certainly in host memory.
#[derive(Clone, Copy)]
struct HostMessage {
    bytes: u64,
    first: *const c_void,
    /// The bytes are one run.
    dense: bool,
    /// Any number of bytes is a whole number of items.
    bytewise: bool,
}

/// A message of items that form one run, if they are certainly in host memory.
#[inline(always)]
fn host_run(run: types::Run, buffer: *const c_void, count: i64) -> Option<HostMessage> {
    let bytes = run.item.saturating_mul(count.max(0) as u64);
    let first = buffer.wrapping_byte_offset(run.first as isize);
    (bytes == 0 || !cuda::is_device(first)).then_some(HostMessage {
        bytes,
        first,
        dense: true,
        bytewise: run.item == 1,
    })
}

/// A message of any items; also used when a type is seen for the first time.
#[inline(never)]
fn host_items(
    abi: &Abi,
    buffer: *const c_void,
    count: i64,
    datatype: Datatype,
) -> Option<HostMessage> {
    let info = types::info(abi, datatype)?;
    let (bytes, dense) = (info.bytes(count), info.dense(count));
    let first = buffer.wrapping_byte_offset(info.first(count) as isize);
    let is_host = if dense {
        bytes == 0 || !cuda::is_device(first)
    } else {
        let place = Place::of_parts(abi, buffer, count, datatype, &info);
        matches!(place, Place::Host(_))
    };
    is_host.then_some(HostMessage {
        bytes,
        first,
        dense: dense || bytes == 0,
        bytewise: info.size == 1,
    })
}

impl Engine {
    /// Entered at the start of a call that the MPI library is to make alone. While the scope lives, this rank
    /// does not become ready for RTSs. `None` if RTSs may be on their way.
    #[inline]
    pub fn early(&self) -> Option<NativeScope> {
        if self.live() {
            return None;
        }
        NativeScope::before_live(self)
    }

    /// Where a receive into host memory lands; `None` if it may be into device memory.
    #[inline]
    fn host_landing(&self, args: &RecvArgs) -> Option<Early> {
        let message = self.host_message(args.buffer, args.count, args.datatype)?;
        // MPICH 5 aborts on a part of an element. For most types an RTS ends with one, so none may land
        // there.
        let whole = message.bytewise || self.env.abi.family == Family::OpenMpi;
        let dense = (message.dense && whole) || message.bytes == 0;
        Some(Early {
            landed: Start::of(message.first.cast_mut().cast()),
            capacity: message.bytes,
            comm: args.comm,
            named: Named::ByItself,
            serial: 0,
            in_call: false,
            dense,
        })
    }

    /// A message, if it is certainly in host memory.
    #[inline(always)]
    fn host_message(
        &self,
        buffer: *const c_void,
        count: i64,
        datatype: Datatype,
    ) -> Option<HostMessage> {
        match types::run(self.env.abi, datatype) {
            Some(run) => host_run(run, buffer, count),
            None => host_items(self.env.abi, buffer, count, datatype),
        }
    }

    /// Whether a receive is into host memory, or none at all.
    #[inline(always)]
    pub fn is_host_receive(&self, args: &RecvArgs) -> bool {
        self.is_none(args)
            || self
                .host_message(args.buffer, args.count, args.datatype)
                .is_some()
    }

    #[inline]
    fn is_none(&self, args: &RecvArgs) -> bool {
        args.source == self.env.abi.proc_null || args.count < 0
    }

    /// Whether a send is certainly of host memory, and of a length that need not be counted.
    #[inline(always)]
    pub fn is_host_send(&self, args: &SendArgs) -> bool {
        self.sends_nothing(args)
            || self
                .host_message(args.buffer, args.count, args.datatype)
                .is_some_and(|message| message.bytes != RTS_BYTES as u64)
    }

    #[inline]
    fn sends_nothing(&self, args: &SendArgs) -> bool {
        args.dest == self.env.abi.proc_null || args.count <= 0
    }

    /// Both at once. If they have the same type, it is looked up once.
    #[inline(always)]
    pub fn is_host_pair(&self, send: &SendArgs, receive: &RecvArgs) -> bool {
        let is_pair = send.datatype == receive.datatype
            && !self.sends_nothing(send)
            && !self.is_none(receive);
        let run = match is_pair {
            true => types::run(self.env.abi, send.datatype),
            false => None,
        };
        let Some(run) = run else {
            return self.is_host_send(send) && self.is_host_receive(receive);
        };
        host_run(run, send.buffer, send.count).is_some_and(|sent| sent.bytes != RTS_BYTES as u64)
            && host_run(run, receive.buffer, receive.count).is_some()
    }

    /// `MPI_Irecv` made by the MPI library and remembered; `None` if it is not for the MPI library alone.
    #[inline]
    pub fn irecv_early(
        &self,
        args: &RecvArgs,
        request: Slot<'_, Request>,
        natively: impl FnOnce() -> c_int,
    ) -> Option<c_int> {
        let _scope = self.early()?;
        if self.is_none(args) {
            return Some(natively());
        }
        let early = self.host_landing(args)?;
        let code = if early.dense {
            // As bytes: once this rank takes part an RTS may land there, and it is no whole number of
            // elements of most other types. A receive that is too long for that is prepared like any other.
            let count = c_int::try_from(early.capacity).ok()?;
            let (buffer, byte) = (early.landed.as_ptr().cast(), self.env.abi.byte);
            let (source, tag, comm) = (args.source, args.tag, args.comm);
            // SAFETY: the same bytes as the program's.
            unsafe { native::irecv(buffer, count, byte, source, tag, comm, request) }
        } else {
            natively()
        };
        if code == self.env.abi.success {
            let handle = request.read(self.env.abi);
            self.core.lock().remember(handle, early);
        }
        Some(code)
    }

    /// Counts the message of a blocking receive if it is as long as an RTS. If it was truncated, only some
    /// libraries tell its length.
    #[inline]
    pub fn count_received(&self, comm: Comm, status: StatusRef<'_>, code: c_int) {
        let told = code == self.env.abi.success || self.env.abi.family == Family::OpenMpi;
        if told && self.env.is_rts_long(status) {
            self.count_unwatched(comm, status);
        }
    }

    /// Takes note of the requests of a native completing call. Its early receives belong to that call until
    /// [`Engine::note_after`]. `None` if none is pending.
    pub(super) fn note_before(&self, requests: Slots<'_, Request>) -> Option<Before> {
        let mut core = self.core.lock();
        if core.early.is_empty() {
            return None;
        }
        let count = requests.len();
        let mut before = Before::note(self.env.abi, requests);
        if self.env.multiple {
            for i in 0..count {
                let handle = before.scratch.handles.get(self.env.abi, i);
                let claim = core.early.claim(handle, true);
                before.scratch.claims.extend(claim.map(|claim| (i, claim)));
            }
        }
        Some(before)
    }

    /// The call has ended. `done` says what it has completed, by index, with the statuses.
    pub(super) fn note_after<'a>(
        &self,
        noted: Noted<'_>,
        completed: impl Iterator<Item = (usize, StatusRef<'a>)>,
    ) {
        let (env, mut core) = (&self.env, self.core.lock());
        for (i, status) in completed {
            let claim = match env.multiple {
                true => noted.claim(i),
                false => core.early.claim(noted.handle(env.abi, i), false),
            };
            if let Some(claim) = claim {
                core.note_completed(env, claim, status);
            }
        }
        for (_, claim) in noted.claims {
            core.early.release(*claim);
        }
    }

    /// As [`Engine::note_before`] for one request, until [`Engine::note_after_one`].
    #[inline]
    pub(super) fn note_before_one(&self, handle: Request) -> Option<Claim> {
        let mut core = self.core.lock();
        if core.early.is_empty() {
            return None;
        }
        core.early.claim(handle, self.env.multiple)
    }

    /// The call has ended, and has completed the request if there is a status.
    #[inline]
    pub(super) fn note_after_one(&self, claim: Claim, status: Option<StatusRef<'_>>) {
        match status {
            Some(status) => self.core.lock().note_completed(&self.env, claim, status),
            None if self.env.multiple => self.core.lock().early.release(claim),
            None => {}
        }
    }

    /// A thread of the program asks for the state of a request that it completes. If this rank takes part by
    /// now, an early receive is taken over.
    #[inline]
    pub(super) fn take_over_if_live(&self, core: &mut Core, handle: Request) {
        if !core.early.is_empty() && self.is_live() {
            core.take_over_one(&self.env, handle);
        }
    }
}

impl Core {
    /// Remembers a receive that the MPI library has just posted.
    #[inline]
    fn remember(&mut self, handle: Request, mut early: Early) {
        self.serial += 1;
        early.serial = self.serial;
        self.early.insert(handle, early);
    }

    /// Makes a full receive of an early one, which the MPI library has posted.
    fn take_over(&mut self, env: &Env, handle: Request, early: Early) {
        // SAFETY: the MPI library has posted it, and from now on the engine ends it.
        let native = unsafe { OwnRequest::given(handle) };
        let id = self.receives.insert(Receive::posted_early(native, early));
        self.note_posted(env, id);
        self.enter(handle, id);
    }

    /// Makes full receives of all early ones: no thread is inside a call that may complete one natively.
    pub(super) fn take_over_all(&mut self, env: &Env) {
        for (handle, early) in std::mem::take(&mut self.early.by_handle) {
            debug_assert!(!early.in_call);
            self.take_over(env, handle, early);
        }
    }

    /// Makes a full receive of the early one under this handle, if there is one. To be called by the thread
    /// that completes it.
    pub(super) fn take_over_one(&mut self, env: &Env, handle: Request) {
        if let Some(claim) = self.early.claim(handle, true) {
            if let Some(early) = self.early.take(claim) {
                self.take_over(env, handle, early);
            }
        }
    }

    /// A native call has completed an early receive.
    #[inline]
    fn note_completed(&mut self, env: &Env, claim: Claim, status: StatusRef<'_>) {
        if let Some(early) = self.early.take(claim) {
            if env.is_rts_long(status) {
                self.count_early(env, &early, status);
            }
        }
    }

    #[cold]
    fn count_early(&mut self, env: &Env, early: &Early, status: StatusRef<'_>) {
        let abi = env.abi;
        // A library that does not tell the length of a truncated message says nothing useful here.
        let truncated_silently = early.capacity < RTS_BYTES as u64 && abi.family != Family::OpenMpi;
        if truncated_silently || is_cancelled(status) {
            return;
        }
        let Some(identity) = early.named.identity(abi, early.comm) else {
            return;
        };
        if let Some(peer) = identity.world_rank(abi.status_source(status)) {
            self.received.take(Stream {
                comm: identity.id,
                peer,
                tag: abi.status_tag(status),
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request() -> Request {
        Abi::STANDARD.request_null
    }

    fn early(serial: u64) -> Early {
        Early {
            landed: Start::of(std::ptr::null_mut()),
            capacity: 100,
            comm: Abi::STANDARD.comm_self,
            named: Named::ByItself,
            serial,
            in_call: false,
            dense: true,
        }
    }

    #[test]
    fn a_recycled_handle_belongs_to_the_later_receive() {
        let mut pending = Pending::default();
        let mut claims = Vec::new();
        for serial in 1..=3 {
            pending.insert(request(), early(serial));
            claims.extend(pending.claim(request(), true));
        }
        // Calls that completed receives 1, 2 and 3 under the same handle end in another order.
        for at in [1, 0, 2] {
            let taken = pending.take(claims[at]).map(|early| early.serial);
            assert_eq!(taken, Some(at as u64 + 1));
            assert!(pending.take(claims[at]).is_none());
        }
        assert!(pending.is_empty());
    }

    #[test]
    fn a_receive_is_of_one_call_at_a_time() {
        let mut pending = Pending::default();
        pending.insert(request(), early(1));
        let claim = pending.claim(request(), true).expect("it is nobody's");
        // By now there may be another request under its handle.
        assert!(pending.claim(request(), true).is_none());
        pending.release(claim);
        let claim = pending
            .claim(request(), true)
            .expect("the call has not completed it");
        assert!(pending.take(claim).is_some());
        assert!(pending.claim(request(), true).is_none());
    }

    #[test]
    fn neighbouring_handles_are_spread() {
        let hash = |handle: usize| {
            let mut hasher = HandleHasher::default();
            hasher.write_usize(handle);
            hasher.finish()
        };
        // Requests of Open MPI lie some hundred bytes apart, those of MPICH are consecutive.
        for step in [1usize, 64, 704, 4096] {
            let slots: std::collections::HashSet<u64> = (0..256)
                .map(|i| hash(0x5555_5000_0000 + i * step) % 1024)
                .collect();
            assert!(slots.len() > 150, "{step}: {} of 256", slots.len());
        }
    }
}
