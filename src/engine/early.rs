//! Receives while no rank of the node uses device memory ("early"): the MPI library makes them, and just enough is
//! remembered to take over those that are pending when that changes, and to count what is as long as a descriptor.
//!
//! A program that never touches a device pays only for this: one look at the address, one record a pending receive.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::hash::{BuildHasherDefault, Hasher};

use hashbrown::HashMap;

use crate::cuda;
use crate::engine::core::{Core, Entry};
use crate::engine::counts::Stream;
use crate::engine::receive::{is_cancelled, received, Receive, RecvArgs};
use crate::engine::send::SendArgs;
use crate::engine::types::{self, TypeInfo};
use crate::engine::{comms, Engine, Env, NativeScope};
use crate::mpi::{native, Abi, Family, Handle, Status};
use crate::node::DESCRIPTOR_BYTES;

/// A pending receive into host memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Early {
    /// Where the first byte lands.
    pub(super) landed: *mut u8,
    /// Bytes that there is room for.
    pub(super) capacity: u64,
    pub(super) comm: Handle,
    /// Number of the receive, which tells it from a later one under the same handle.
    pub(super) serial: u64,
    /// The bytes land in one run.
    pub(super) dense: bool,
}

// SAFETY: the pointer is to memory that MPI has lent the library until the receive completes; whoever holds the
// engine's lock may use it.
unsafe impl Send for Early {}

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
    by_handle: HashMap<Handle, Early, BuildHasherDefault<HandleHasher>>,
    /// Those whose handle the library has given to a later receive, so that they are complete, but whose thread is
    /// still on its way out of the completing call.
    displaced: Vec<(Handle, Early)>,
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
    fn insert(&mut self, handle: Handle, early: Early) {
        if let Some(before) = self.by_handle.insert(handle, early) {
            self.displaced.push((handle, before));
        }
    }

    /// Takes out the receive that a completing call was given as `handle` when the latest receive had the number
    /// `latest`.
    #[inline]
    fn take(&mut self, handle: Handle, latest: u64) -> Option<Early> {
        match self.by_handle.get(&handle) {
            Some(early) if early.serial <= latest => self.by_handle.remove(&handle),
            _ if self.displaced.is_empty() => None,
            _ => self.take_displaced(handle, latest),
        }
    }

    #[cold]
    fn take_displaced(&mut self, handle: Handle, latest: u64) -> Option<Early> {
        let candidates = self.displaced.iter().enumerate();
        let mine = candidates.filter(|(_, (of, early))| *of == handle && early.serial <= latest);
        let (at, _) = mine.max_by_key(|(_, (_, early))| early.serial)?;
        Some(self.displaced.swap_remove(at).1)
    }
}

/// Room for the handles and statuses of one completing call, kept by its thread.
#[derive(Default)]
pub(super) struct Scratch {
    handles: Vec<u8>,
    statuses: Vec<u8>,
}

/// What a thread keeps between calls, bytes: some 30,000 requests.
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
        if self.handles.capacity() + self.statuses.capacity() <= SCRATCH_MAX {
            let _ = SCRATCH.try_with(|scratch| scratch.set(Some(self)));
        }
    }

    /// Room for `bytes` bytes of statuses, of any content: MPI writes those of completed requests, and no other is read.
    fn statuses(&mut self, bytes: usize) -> *mut c_void {
        self.statuses.clear();
        self.statuses.reserve(bytes);
        self.statuses.as_mut_ptr().cast()
    }
}

/// The requests of a completing call as they were before it.
pub(super) struct Before {
    scratch: Box<Scratch>,
    count: usize,
    /// Number of the latest receive at that time.
    latest: u64,
}

impl Before {
    /// # Safety
    /// `array` holds `count` handles.
    unsafe fn note(abi: &Abi, array: *const c_void, count: usize, latest: u64) -> Before {
        let mut scratch = Scratch::take();
        scratch.handles.clear();
        // An empty array may be a null pointer.
        if count > 0 {
            // SAFETY: passed on.
            let bytes =
                unsafe { std::slice::from_raw_parts(array.cast::<u8>(), count * abi.handle_bytes) };
            scratch.handles.extend_from_slice(bytes);
        }
        Before {
            scratch,
            count,
            latest,
        }
    }

    #[inline]
    pub(super) fn handle(&self, abi: &Abi, i: usize) -> Handle {
        debug_assert!(i < self.count);
        // SAFETY: as many handles were noted.
        unsafe { abi.load(self.scratch.handles.as_ptr().cast(), i) }
    }

    #[inline]
    pub(super) fn count(&self) -> usize {
        self.count
    }

    #[inline]
    pub(super) fn latest(&self) -> u64 {
        self.latest
    }

    /// The statuses for the native call: the program's, or room of our own where it wants none, since the length of a
    /// message must be seen.
    pub(super) fn statuses(&mut self, abi: &Abi, statuses: *mut c_void) -> *mut c_void {
        if abi.ignores_status(statuses) {
            self.scratch.statuses(abi.status_bytes * self.count.max(1))
        } else {
            statuses
        }
    }

    pub(super) fn done(self) {
        self.scratch.keep();
    }
}

impl Env {
    /// Bytes that a status reports.
    ///
    /// # Safety
    /// The MPI library has filled the status, here and below.
    #[inline]
    pub(super) unsafe fn length_of(&self, status: *const c_void) -> u64 {
        // SAFETY: passed on.
        unsafe {
            let read = self.reads_lengths.then(|| self.abi.status_length(status));
            read.flatten()
                .unwrap_or_else(|| received(self.abi, &self.copy_status(status)))
        }
    }

    /// Whether a message that has completed a receive with this status is as long as a descriptor.
    ///
    /// # Safety
    /// As [`Env::length_of`].
    #[inline]
    pub(super) unsafe fn is_descriptor_long(&self, status: *const c_void) -> bool {
        // SAFETY: passed on.
        unsafe { self.length_of(status) == DESCRIPTOR_BYTES as u64 }
    }

    /// # Safety
    /// As [`Env::length_of`].
    pub(super) unsafe fn copy_status(&self, status: *const c_void) -> Status {
        let mut copy = Status::new();
        // SAFETY: a status of this ABI, no longer than our storage.
        unsafe {
            copy.as_mut_ptr()
                .cast::<u8>()
                .copy_from_nonoverlapping(status.cast(), self.abi.status_bytes)
        };
        copy
    }
}

/// Whether the length of a message can be read from its status, where this ABI is expected to have it. The library
/// itself is asked: it writes some lengths, and all must be found.
///
/// # Safety
/// MPI may be called.
pub(super) unsafe fn reads_lengths(abi: &Abi) -> bool {
    [0i64, 1, 61, 0x7fff_ffff, 0x8000_0000, 0x12_3456_789a]
        .into_iter()
        .all(|length| {
            let mut status = Status::new();
            // SAFETY: a live local; a predefined datatype.
            unsafe {
                native::status_set_elements_x(status.as_mut_ptr(), abi.byte, length as _)
                    == abi.success
                    && native::status_set_cancelled(status.as_mut_ptr(), 0) == abi.success
                    && abi.status_length(status.as_ptr()) == u64::try_from(length).ok()
                    && received(abi, &status) == length as u64
            }
        })
}

/// Length and first byte of a message that is in host memory for certain.
#[inline(always)]
fn host_run(info: &TypeInfo, buffer: *const c_void, count: i64) -> Option<(u64, *const c_void)> {
    let bytes = info.bytes(count);
    let first = buffer.wrapping_byte_offset(info.first(count) as isize);
    (bytes == 0 || !cuda::is_device(first)).then_some((bytes, first))
}

impl Engine {
    /// Entered at the start of a call that the MPI library is to make alone: while the scope lives, this rank does not
    /// become ready for descriptors. `None` if descriptors may be about.
    #[inline]
    pub fn early(&self) -> Option<NativeScope> {
        if self.live() {
            return None;
        }
        NativeScope::before_live(self)
    }

    /// Where a receive into host memory lands; `None` where it may be a device's.
    #[inline]
    unsafe fn host_landing(&self, args: &RecvArgs) -> Option<Early> {
        // SAFETY: the program's handle.
        let place = unsafe { self.host_place(args.buffer, args.count, args.datatype) };
        let (info, capacity, landed) = place?;
        // MPICH 5 aborts on a part of an element, which a descriptor is of most types: none may land there.
        let whole = info.size == 1 || self.env.abi.family == Family::OpenMpi;
        let dense = (info.dense(args.count) && whole) || capacity == 0;
        Some(Early {
            landed: landed.cast_mut().cast(),
            capacity,
            comm: args.comm,
            serial: 0,
            dense,
        })
    }

    /// The type, length and first byte of a message that is in host memory for certain.
    ///
    /// # Safety
    /// `datatype` is the program's handle.
    #[inline(always)]
    unsafe fn host_place(
        &self,
        buffer: *const c_void,
        count: i64,
        datatype: Handle,
    ) -> Option<(TypeInfo, u64, *const c_void)> {
        // SAFETY: passed on.
        let info = unsafe { types::info(self.env.abi, datatype) }?;
        let (bytes, first) = host_run(&info, buffer, count)?;
        Some((info, bytes, first))
    }

    /// Whether a receive is into host memory, or none at all.
    ///
    /// # Safety
    /// The arguments are those of the program's call, here and below.
    #[inline(always)]
    pub unsafe fn is_host_receive(&self, args: &RecvArgs) -> bool {
        // SAFETY: passed on.
        self.is_none(args)
            || unsafe { self.host_place(args.buffer, args.count, args.datatype) }.is_some()
    }

    #[inline]
    fn is_none(&self, args: &RecvArgs) -> bool {
        args.source == self.env.abi.proc_null || args.count < 0
    }

    /// Whether a send is of host memory for certain, and of a length that need not be counted.
    ///
    /// # Safety
    /// As [`Engine::is_host_receive`].
    #[inline(always)]
    pub unsafe fn is_host_send(&self, args: &SendArgs) -> bool {
        // SAFETY: passed on.
        self.sends_nothing(args)
            || unsafe { self.host_place(args.buffer, args.count, args.datatype) }
                .is_some_and(|(_, bytes, _)| bytes != DESCRIPTOR_BYTES as u64)
    }

    #[inline]
    fn sends_nothing(&self, args: &SendArgs) -> bool {
        args.dest == self.env.abi.proc_null || args.count <= 0
    }

    /// Both at once: where they are of one type, it is looked up once.
    ///
    /// # Safety
    /// As [`Engine::is_host_receive`].
    #[inline(always)]
    pub unsafe fn is_host_pair(&self, send: &SendArgs, receive: &RecvArgs) -> bool {
        // SAFETY: passed on, here and below.
        unsafe {
            if send.datatype != receive.datatype
                || self.sends_nothing(send)
                || self.is_none(receive)
            {
                return self.is_host_send(send) && self.is_host_receive(receive);
            }
            let Some(info) = types::info(self.env.abi, send.datatype) else {
                return false;
            };
            let sent = host_run(&info, send.buffer, send.count);
            sent.is_some_and(|(bytes, _)| bytes != DESCRIPTOR_BYTES as u64)
                && host_run(&info, receive.buffer, receive.count).is_some()
        }
    }

    /// `MPI_Irecv` by the MPI library, remembered; `None` if it is not for the MPI library alone.
    ///
    /// # Safety
    /// As [`Engine::is_host_receive`]; `natively` is the program's call.
    #[inline]
    pub unsafe fn irecv_early(
        &self,
        args: &RecvArgs,
        request: *mut Handle,
        natively: impl FnOnce() -> c_int,
    ) -> Option<c_int> {
        let _scope = self.early()?;
        if self.is_none(args) {
            return Some(natively());
        }
        // SAFETY: passed on.
        let early = unsafe { self.host_landing(args) }?;
        let code = if early.dense {
            // As bytes: once this rank takes part a descriptor may land there, which is no whole number of most other
            // types. What is too long for that is prepared like any other receive.
            let count = c_int::try_from(early.capacity).ok()?;
            // SAFETY: the same bytes as the program's.
            unsafe {
                native::irecv(
                    early.landed.cast(),
                    count,
                    self.env.abi.byte,
                    args.source,
                    args.tag,
                    args.comm,
                    request,
                )
            }
        } else {
            natively()
        };
        if code == self.env.abi.success {
            // SAFETY: the program's request, which the library has filled.
            let handle = unsafe { self.env.abi.read(request) };
            self.core.lock().remember(self, handle, early);
        }
        Some(code)
    }

    /// Counts the message of a blocking receive if it is as long as a descriptor. Where it was truncated, only some
    /// libraries tell its length.
    ///
    /// # Safety
    /// The receive on `comm` has filled `status` and returned `code`.
    #[inline]
    pub unsafe fn count_received(&self, comm: Handle, status: *mut c_void, code: c_int) {
        let told = code == self.env.abi.success || self.env.abi.family == Family::OpenMpi;
        // SAFETY: passed on.
        unsafe {
            if told && self.env.is_descriptor_long(status) {
                self.count_unwatched(comm, status);
            }
        }
    }

    /// The requests of a completing call; `None` if none is a receive that must be noted.
    ///
    /// # Safety
    /// `array` holds `count` handles.
    pub(super) unsafe fn note_before(&self, array: *const c_void, count: usize) -> Option<Before> {
        let latest = self.latest_watched()?;
        // SAFETY: passed on.
        Some(unsafe { Before::note(self.env.abi, array, count, latest) })
    }

    /// Number of the latest receive; `None` if no request of the program's must be noted when it completes.
    #[inline]
    pub(super) fn latest_watched(&self) -> Option<u64> {
        let core = self.core.lock();
        (!core.early.is_empty() || !core.table.is_empty()).then_some(core.serial)
    }
}

impl Core {
    /// Remembers a receive that the MPI library has just posted.
    #[inline]
    fn remember(&mut self, engine: &Engine, handle: Handle, mut early: Early) {
        self.serial += 1;
        early.serial = self.serial;
        if engine.is_live() {
            // Another thread has met a device meanwhile; this receive is in its way until it is complete.
            self.take_over(engine.env.abi, handle, &early);
        } else {
            self.early.insert(handle, early);
        }
    }

    /// Makes a full receive of one that the MPI library has posted.
    fn take_over(&mut self, abi: &Abi, handle: Handle, early: &Early) {
        let id = self.receives.insert(Receive::posted_early(handle, early));
        self.note_posted(abi, id);
        self.enter(abi, handle, id);
    }

    /// Makes full receives of those that `which` names.
    fn take_over_those(&mut self, abi: &Abi, which: impl Fn(Handle, &Early) -> bool) {
        let mut taken: Vec<(Handle, Early)> = Vec::new();
        self.early.by_handle.retain(|handle, early| {
            let named = which(*handle, early);
            if named {
                taken.push((*handle, *early));
            }
            !named
        });
        for (handle, early) in &taken {
            self.take_over(abi, *handle, early);
        }
    }

    /// Makes full receives of all: this rank is about to take part.
    pub(super) fn take_over_all(&mut self, abi: &Abi) {
        self.take_over_those(abi, |_, _| true);
    }

    /// Makes full receives of those on a communicator.
    pub(super) fn take_over_on(&mut self, abi: &Abi, comm: Handle) {
        self.early
            .displaced
            .retain(|(_, early)| abi.normalize(early.comm) != comm);
        self.take_over_those(abi, |_, early| abi.normalize(early.comm) == comm);
    }

    /// Makes a full receive of the one under a handle, if there is one.
    pub(super) fn take_over_one(&mut self, abi: &Abi, handle: Handle) {
        if let Some(early) = self.early.by_handle.remove(&handle) {
            self.take_over(abi, handle, &early);
        }
    }

    /// A request of the program's, given to a completing call as `handle`, was completed natively.
    ///
    /// # Safety
    /// `status` is its status.
    #[inline]
    pub(super) unsafe fn note_completed(
        &mut self,
        env: &Env,
        handle: Handle,
        latest: u64,
        status: *const c_void,
    ) {
        // SAFETY: passed on.
        unsafe {
            match self.early.take(handle, latest) {
                Some(early) => {
                    if env.is_descriptor_long(status) {
                        self.count_early(env, &early, status);
                    }
                }
                None if self.table.is_empty() => {}
                None => self.note_completed_entry(env, handle, latest, status),
            }
        }
    }

    #[cold]
    unsafe fn note_completed_entry(
        &mut self,
        env: &Env,
        handle: Handle,
        latest: u64,
        status: *const c_void,
    ) {
        if matches!(self.table.get(&handle), Some(Entry::Receive(_))) {
            // SAFETY: passed on.
            let copy = unsafe { env.copy_status(status) };
            self.remove_completed(env, handle, latest, Some(&copy));
        }
    }

    #[cold]
    unsafe fn count_early(&mut self, env: &Env, early: &Early, status: *const c_void) {
        let abi = env.abi;
        // A library that does not tell the length of a truncated message says nothing of use here.
        let truncated_silently =
            early.capacity < DESCRIPTOR_BYTES as u64 && abi.family != Family::OpenMpi;
        // SAFETY: a status that the MPI library has filled; a communicator that is not freed, or the receive would
        // have been taken over.
        unsafe {
            if truncated_silently || is_cancelled(&env.copy_status(status)) {
                return;
            }
            let Some(identity) = comms::identity(abi, early.comm) else {
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
}

#[cfg(test)]
mod tests {
    use super::*;

    fn early(serial: u64) -> Early {
        Early {
            landed: std::ptr::null_mut(),
            capacity: 100,
            comm: 1,
            serial,
            dense: true,
        }
    }

    #[test]
    fn a_recycled_handle_belongs_to_the_later_receive() {
        let mut pending = Pending::default();
        for serial in 1..=3 {
            pending.insert(7, early(serial));
        }
        // Calls that began when receive 1, 2 and 3 was the latest, ending in another order.
        assert_eq!(pending.take(7, 2).map(|early| early.serial), Some(2));
        assert_eq!(pending.take(7, 1).map(|early| early.serial), Some(1));
        assert!(pending.take(7, 2).is_none());
        assert_eq!(pending.take(7, 3).map(|early| early.serial), Some(3));
        assert!(pending.is_empty());
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
