//! Sends of device buffers.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::cuda::{self, Buffer, ContextKey, Kind};
use crate::engine::comms::{self, Identity};
use crate::engine::core::{Core, Entry};
use crate::engine::counts::Stream;
use crate::engine::fetch::flag;
use crate::engine::layout::Layout;
use crate::engine::lift::{Lift, Shape, Way};
use crate::engine::native::{native_isend, raise};
use crate::engine::requests::start_generalized;
use crate::engine::serve::{Hosting, Serve};
use crate::engine::types::{self, TypeInfo};
use crate::engine::{Engine, Env};
use crate::mpi::{native, Handle};
use crate::node::{Descriptor, Message, Peer, State, DESCRIPTOR_BYTES};
use crate::stats::{self, Counter, Reason};

/// Mode of a send (MPI 4.1 section 3.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Mode {
    Standard,
    Buffered,
    Synchronous,
    Ready,
}

/// The arguments of a send.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct SendArgs {
    pub mode: Mode,
    pub buffer: *const c_void,
    pub count: i64,
    pub datatype: Handle,
    pub dest: c_int,
    pub tag: c_int,
    pub comm: Handle,
}

// SAFETY: plain arguments; the buffer is only used by operations that MPI has lent it to.
unsafe impl std::marker::Send for SendArgs {}

/// Values that may be on their way although their send has completed, bytes: a standard send of a small device buffer
/// completes once its payload is in host memory.
const DRAINING_BYTES_MAX: u64 = 64 << 20;

/// How a send is to be made.
pub enum Sorted {
    /// By the MPI library, untouched.
    Native,
    /// By the MPI library; it is as long as a descriptor, and counted.
    Counted(Stream),
    /// By the engine.
    Device(Box<Buffer>, TypeInfo),
}

/// A send of the engine's.
pub struct Send {
    /// The generalized request in the program's hands; null for a blocking or persistent send.
    pub handle: Handle,
    /// The communicator, for its error handler.
    pub comm: Handle,
    /// The program's part is over: its buffer is free again.
    pub complete: bool,
    /// It is all that an `MPI_Isendrecv` with a receive from MPI_PROC_NULL does.
    pub stands_for_null: bool,
    /// An error to be raised at completion.
    pub code: c_int,
    kind: SendKind,
}

enum SendKind {
    Descriptor(Box<Out>),
    /// A value on its way: the native request, and the bytes that it sends.
    Value {
        native: Handle,
        data: Vec<u8>,
    },
    Over,
}

/// A descriptor that is out.
struct Out {
    peer: Arc<Peer>,
    slot: u32,
    nonce: u64,
    native: Handle,
    /// What the native send reads; kept until that is complete.
    _wire: Box<[u8; DESCRIPTOR_BYTES]>,
    context: ContextKey,
    source: u64,
    bytes: u64,
    serve: Option<Serve>,
    /// It completes without its receiver, as a standard send below the eager limit must.
    hosting: Option<Hosting>,
    /// The slot is in use: the receiver may still read it.
    is_open: bool,
}

/// What a look at an open send found.
#[derive(Clone, Copy, Debug, Default)]
pub struct Advance {
    pub moved: bool,
    /// Its host ring is being filled.
    pub serving: bool,
    /// The descriptor is dealt with.
    pub closed: bool,
}

impl Engine {
    /// Decides who makes a send.
    ///
    /// # Safety
    /// The arguments are those of the program's MPI call.
    pub unsafe fn sort_send(&self, args: &SendArgs) -> Sorted {
        let abi = self.env.abi;
        if args.count <= 0 || args.dest == abi.proc_null {
            return Sorted::Native;
        }
        // SAFETY: the program's handle.
        let Some(info) = (unsafe { types::info(abi, args.datatype) }) else {
            return Sorted::Native;
        };
        let bytes = info.bytes(args.count);
        let (first, _) = info.span(args.count);
        let address = args.buffer.wrapping_byte_offset(first as isize);
        if bytes > 0 {
            if let Kind::Device(buffer) = cuda::classify(address) {
                return Sorted::Device(Box::new(buffer), info);
            }
        }
        if bytes == DESCRIPTOR_BYTES as u64 {
            // SAFETY: the program's handle.
            if let Some(stream) = unsafe { self.stream(args.comm, args.dest, args.tag) } {
                return Sorted::Counted(stream);
            }
        }
        Sorted::Native
    }

    /// The stream of messages with a rank of a communicator that has an identity.
    pub(super) unsafe fn stream(&self, comm: Handle, rank: c_int, tag: c_int) -> Option<Stream> {
        // SAFETY: passed on.
        let identity = unsafe { comms::identity(self.env.abi, comm) }?;
        Some(Stream {
            comm: identity.id,
            peer: identity.world_rank(rank)?,
            tag,
        })
    }

    /// Counts a value that is as long as a descriptor and starts its send, under one lock: two threads must not count
    /// in one order and send in the other.
    ///
    /// # Safety
    /// As [`Engine::sort_send`]; `request` receives the native request.
    pub unsafe fn send_counted(
        &self,
        args: &SendArgs,
        stream: Stream,
        request: *mut Handle,
    ) -> c_int {
        let mut core = self.core.lock();
        // SAFETY: passed on.
        let code = unsafe { native_isend(args, request) };
        if code == self.env.abi.success {
            core.sent.take(stream);
        }
        code
    }

    /// Starts a native send that the engine completes beside its own.
    ///
    /// # Safety
    /// As [`Engine::sort_send`].
    pub unsafe fn start_native_send(
        &self,
        args: &SendArgs,
        stream: Option<Stream>,
    ) -> Result<usize, c_int> {
        let mut request = self.env.abi.request_null;
        // SAFETY: passed on.
        let code = unsafe {
            match stream {
                Some(stream) => self.send_counted(args, stream, &raw mut request),
                None => native_isend(args, &raw mut request),
            }
        };
        if code != self.env.abi.success {
            return Err(code);
        }
        Ok(self
            .core
            .lock()
            .insert_value(&self.env, args.comm, request, Vec::new(), false))
    }

    /// Starts a send of packed copies of a host buffer, which is free again at once.
    ///
    /// # Safety
    /// As [`Engine::sort_send`].
    pub unsafe fn start_copied_send(&self, args: &SendArgs) -> Result<usize, c_int> {
        let env = &self.env;
        // SAFETY: passed on.
        let data = unsafe { self.pack_host(args) }?;
        let mut core = self.core.lock();
        // SAFETY: the data are kept until the send is complete.
        let request = unsafe { self.send_packed_counted(&mut core, args, &data) }?;
        Ok(core.insert_value(env, args.comm, request, data, false))
    }

    /// Sends packed bytes, and counts them if they are as long as a descriptor.
    unsafe fn send_packed_counted(
        &self,
        core: &mut Core,
        args: &SendArgs,
        data: &[u8],
    ) -> Result<Handle, c_int> {
        // SAFETY: passed on.
        unsafe {
            let request = send_packed(&self.env, args, data)?;
            if data.len() == DESCRIPTOR_BYTES {
                if let Some(stream) = self.stream(args.comm, args.dest, args.tag) {
                    core.sent.take(stream);
                }
            }
            Ok(request)
        }
    }

    unsafe fn pack_host(&self, args: &SendArgs) -> Result<Vec<u8>, c_int> {
        let env = &self.env;
        // SAFETY: the program's buffer, datatype and communicator.
        unsafe {
            let refused = || raise(args.comm, env.abi.err_other);
            let info = types::info(env.abi, args.datatype).ok_or_else(refused)?;
            let layout = Layout::of(env.abi, args.datatype, &info).ok_or_else(refused)?;
            let bytes = info.bytes(args.count);
            let mut data = Vec::with_capacity(usize::try_from(bytes).unwrap_or(usize::MAX));
            for piece in layout.pieces(0, bytes) {
                let from = args
                    .buffer
                    .cast::<u8>()
                    .wrapping_offset(piece.offset as isize);
                data.extend_from_slice(std::slice::from_raw_parts(from, piece.length as usize));
            }
            Ok(data)
        }
    }

    /// Starts a send of a device buffer by value, whatever its length: the buffer is free again when this returns.
    ///
    /// # Safety
    /// As [`Engine::start_send`].
    pub unsafe fn start_value_send(
        &self,
        args: &SendArgs,
        buffer: &Buffer,
        info: &TypeInfo,
        reason: Reason,
    ) -> Result<usize, c_int> {
        self.use_device();
        let bytes = info.bytes(args.count);
        stats::add(Counter::SendsDevice, 1);
        stats::add(Counter::SendsDeviceBytes, bytes);
        stats::fallback(reason, bytes);
        // SAFETY: passed on.
        unsafe { self.send_value(args, buffer, info) }
    }

    /// Starts a send of a device buffer.
    ///
    /// # Safety
    /// As [`Engine::sort_send`], whose result this is.
    pub unsafe fn start_send(
        &self,
        args: &SendArgs,
        buffer: &Buffer,
        info: &TypeInfo,
    ) -> Result<usize, c_int> {
        self.use_device();
        let bytes = info.bytes(args.count);
        stats::add(Counter::SendsDevice, 1);
        stats::add(Counter::SendsDeviceBytes, bytes);
        let reason = {
            let mut core = self.core.lock();
            // SAFETY: passed on.
            match unsafe { core.send_descriptor(&self.env, args, buffer, info) } {
                Ok(id) => return Ok(id),
                Err(Unsent::Code(code)) => return Err(code),
                Err(Unsent::Reason(reason)) => reason,
            }
        };
        stats::fallback(reason, bytes);
        // SAFETY: passed on.
        unsafe { self.send_value(args, buffer, info) }
    }

    /// Copies the payload to host memory, then sends it natively.
    unsafe fn send_value(
        &self,
        args: &SendArgs,
        buffer: &Buffer,
        info: &TypeInfo,
    ) -> Result<usize, c_int> {
        let env = &self.env;
        let bytes = info.bytes(args.count);
        // SAFETY: passed on.
        let data = unsafe { self.bring_down(args, buffer, info) }.map_err(|error| {
            log::error!("device buffer of {bytes} bytes cannot be read: {error}");
            stats::add(Counter::Errors, 1);
            // SAFETY: the program's communicator.
            unsafe { raise(args.comm, env.abi.err_other) }
        })?;
        self.make_room_for_draining(bytes);
        let mut core = self.core.lock();
        // SAFETY: the data are kept until the native send is complete.
        let request = unsafe { self.send_packed_counted(&mut core, args, &data) }?;
        stats::add(Counter::SendsValue, 1);
        stats::add(Counter::SendsValueBytes, bytes);
        // The buffer is the program's again; only a synchronous send says more than that, and a standard send beyond
        // the eager limit may wait for its receiver like any other.
        let local = match args.mode {
            Mode::Standard | Mode::Ready => bytes <= env.config.eager,
            Mode::Buffered => true,
            Mode::Synchronous => false,
        };
        let id = core.insert_value(env, args.comm, request, data, local);
        Ok(id)
    }

    /// Packs a device buffer into host memory.
    unsafe fn bring_down(
        &self,
        args: &SendArgs,
        buffer: &Buffer,
        info: &TypeInfo,
    ) -> cuda::Result<Vec<u8>> {
        let bytes = info.bytes(args.count);
        let mut data: Vec<u8> = Vec::with_capacity(usize::try_from(bytes).unwrap_or(usize::MAX));
        let shape = if info.dense(args.count) {
            Shape::Dense(buffer.address)
        } else {
            // SAFETY: the program's handle.
            let layout = unsafe { Layout::of(self.env.abi, args.datatype, info) };
            let layout = layout.ok_or(cuda::Error::Exhausted("memory for a datatype's layout"))?;
            Shape::Runs(args.buffer.addr() as u64, Arc::new(layout))
        };
        let key = self.core.lock().gpu.prepare(buffer)?;
        // SAFETY: the vector has room for `bytes`, and is not touched before the copy is done.
        let mut lift = unsafe { Lift::new(Way::Down, key, shape, data.as_mut_ptr(), bytes) };
        // The copy ends by itself, so the MPI library is not made to progress meanwhile: see `Engine::serve_out`.
        self.until(|_, core| match lift.poll(&mut core.gpu) {
            Ok(true) => Some(Ok(())),
            Ok(false) => None,
            Err(error) => Some(Err(error)),
        })?;
        // SAFETY: the copy has filled `bytes` bytes.
        unsafe { data.set_len(bytes as usize) };
        Ok(data)
    }

    /// Waits until the values that are still on their way leave room for another.
    fn make_room_for_draining(&self, bytes: u64) {
        self.until(|engine, core| {
            core.test_draining(&engine.env);
            (core.draining.is_empty() || core.draining_bytes + bytes <= DRAINING_BYTES_MAX)
                .then_some(())
        });
    }

    /// Whether a send of the engine's is complete. Lets MPI progress as far as the send itself needs it.
    pub(super) fn look_at_send(&self, core: &mut Core, id: usize) -> bool {
        // SAFETY: the request is the send's own.
        unsafe { core.test_value(&self.env, id) };
        core.sends[id].complete
    }
}

/// Why a descriptor was not sent.
enum Unsent {
    /// The message goes by value.
    Reason(Reason),
    /// The MPI library refused it.
    Code(c_int),
}

impl Core {
    unsafe fn send_descriptor(
        &mut self,
        env: &Env,
        args: &SendArgs,
        buffer: &Buffer,
        info: &TypeInfo,
    ) -> Result<usize, Unsent> {
        let bytes = info.bytes(args.count);
        // SAFETY: passed on.
        let (identity, peer) =
            unsafe { self.route(env, args, info, bytes) }.map_err(Unsent::Reason)?;
        let context = self.gpu.prepare(buffer).map_err(|error| {
            log::debug!("device buffer {:#x}: {error}", buffer.address);
            Unsent::Reason(Reason::DriverError)
        })?;
        let own = env.node.own();
        let is_eager = bytes <= env.config.eager && args.mode != Mode::Synchronous;
        let cell = if is_eager {
            let fits = bytes <= u64::from(own.layout().cell_bytes);
            let cell = fits.then(|| own.take_cell()).flatten();
            Some(cell.ok_or(Unsent::Reason(Reason::NoSlot))?)
        } else {
            None
        };
        let give_back = |slot: Option<u32>| {
            cell.map(|cell| own.give(cell));
            slot.map(|slot| own.free(slot));
        };
        let Some(slot) = own.alloc() else {
            give_back(None);
            return Err(Unsent::Reason(Reason::NoSlot));
        };
        let stream = Stream {
            comm: identity.id,
            peer: peer.world_rank(),
            tag: args.tag,
        };
        let sequence = self.sent.peek(stream);
        let message = self.message(env, args, buffer, bytes, &identity, &peer, sequence);
        let Some(nonce) = own.post(slot, &message) else {
            give_back(Some(slot));
            return Err(Unsent::Reason(Reason::NoSlot));
        };
        let descriptor = Descriptor {
            job: env.node.launch().hash,
            sender: env.world_rank,
            slot,
            nonce,
            sequence,
            length: bytes,
        };
        let wire = Box::new(descriptor.encode());
        let mut request = env.abi.request_null;
        let carrier = SendArgs {
            mode: if args.mode == Mode::Ready {
                Mode::Ready
            } else {
                Mode::Standard
            },
            buffer: wire.as_ptr().cast(),
            count: DESCRIPTOR_BYTES as i64,
            datatype: env.abi.byte,
            ..*args
        };
        // SAFETY: the wire bytes are kept until the native send is complete.
        let code = unsafe { native_isend(&carrier, &raw mut request) };
        if code != env.abi.success {
            give_back(Some(slot));
            return Err(Unsent::Code(code));
        }
        self.sent.take(stream);
        peer.announce();
        peer.ring_doorbell();
        stats::add(Counter::SendsDescriptor, 1);
        stats::add(Counter::SendsDescriptorBytes, bytes);
        let out = Out {
            peer,
            slot,
            nonce,
            native: request,
            _wire: wire,
            context,
            source: buffer.address,
            bytes,
            serve: None,
            hosting: cell.map(|cell| Hosting::new(context, buffer.address, bytes, cell)),
            is_open: true,
        };
        let id = self.sends.insert(Send {
            handle: 0,
            comm: args.comm,
            complete: false,
            stands_for_null: false,
            code: env.abi.success,
            kind: SendKind::Descriptor(Box::new(out)),
        });
        self.open.push(id);
        // A small message is to be looked at before its receiver has done anything.
        self.serving |= is_eager;
        Ok(id)
    }

    fn insert_value(
        &mut self,
        env: &Env,
        comm: Handle,
        native: Handle,
        data: Vec<u8>,
        complete: bool,
    ) -> usize {
        let id = self.sends.insert(Send {
            handle: 0,
            comm,
            complete,
            stands_for_null: false,
            code: env.abi.success,
            kind: SendKind::Value { native, data },
        });
        // SAFETY: the native request was just made by the program's thread.
        unsafe { self.test_value(env, id) };
        id
    }

    /// Whether a message may go by descriptor, and to whom.
    unsafe fn route(
        &self,
        env: &Env,
        args: &SendArgs,
        info: &TypeInfo,
        bytes: u64,
    ) -> Result<(Arc<Identity>, Arc<Peer>), Reason> {
        if args.mode == Mode::Buffered {
            return Err(Reason::Buffered);
        }
        if bytes < env.config.threshold.max(DESCRIPTOR_BYTES as u64 + 1) {
            return Err(Reason::TooSmall);
        }
        if !info.dense(args.count) {
            return Err(Reason::NonContiguous);
        }
        // Without staging a receiver that cannot map the buffer could not be served.
        env.node.own().prepare_staging();
        if env.node.own().staging().is_none() || env.node.own().layout().chunks == 0 {
            return Err(Reason::OutOfMemory);
        }
        if !self.helper_runs {
            return Err(Reason::HelperOff);
        }
        if self.counts_lost() {
            return Err(Reason::UnknownComm);
        }
        // SAFETY: the program's handle.
        let identity = unsafe { comms::identity(env.abi, args.comm) }.ok_or(Reason::UnknownComm)?;
        let world = identity.world_rank(args.dest).ok_or(Reason::UnknownComm)?;
        let Some(peer) = env.node.peer(world) else {
            let off_node = env.node.proves_off_node(world);
            return Err(if off_node {
                Reason::NotOnNode
            } else {
                Reason::NotRegistered
            });
        };
        if !peer.ready() {
            return Err(Reason::NotReady);
        }
        Ok((identity, peer))
    }

    #[allow(clippy::too_many_arguments)]
    fn message(
        &mut self,
        env: &Env,
        args: &SendArgs,
        buffer: &Buffer,
        bytes: u64,
        identity: &Identity,
        peer: &Peer,
        sequence: u64,
    ) -> Message {
        let mut message = Message {
            communicator: identity.id,
            source: env.world_rank,
            destination: peer.world_rank(),
            tag: args.tag,
            sequence,
            length: bytes,
            base: buffer.address - buffer.offset,
            offset: buffer.offset,
            allocation_bytes: buffer.size,
            buffer_id: buffer.buffer_id,
            device: buffer.uuid,
            ..Message::default()
        };
        match self.gpu.export(buffer) {
            Ok(export) => {
                message.flags |= flag::EXPORTED;
                message.base = export.base;
                message.offset = export.offset;
                message.allocation_bytes = export.size;
                message.ipc_handle = export.handle.0;
            }
            Err(error) => {
                stats::fallback(Reason::NotExportable, bytes);
                log::debug!(
                    "device buffer {:#x} goes through host memory: {error}",
                    buffer.address
                );
            }
        }
        message
    }

    /// Looks whether the receiver has done its part, or wants something. No MPI call.
    pub(super) fn advance_send(&mut self, env: &Env, id: usize) -> Advance {
        let own = env.node.own();
        let send = &mut self.sends[id];
        let SendKind::Descriptor(out) = &mut send.kind else {
            return Advance {
                closed: true,
                ..Advance::default()
            };
        };
        let Some(slot) = own.slot(out.slot) else {
            return Advance {
                closed: true,
                ..Advance::default()
            };
        };
        let state = slot.state(out.nonce);
        let ring = slot.ring(out.nonce);
        let step = match (state, &mut out.hosting) {
            // The receiver reads the buffer itself, or has all that it needs.
            (Ok(State::Claimed | State::Hosted), _) | (Ok(State::Posted), None) => {
                return Advance::default()
            }
            (Ok(State::Posted), Some(hosting)) => {
                let step = hosting.poll(&mut self.gpu, own, &ring, false);
                // Refused where the receiver was quicker: it finds the payload in the ring, or has read the buffer.
                if matches!(step, Ok(true)) && slot.retire(out.nonce).is_ok() {
                    stats::add(Counter::SendsHosted, 1);
                    send.complete = true;
                }
                step
            }
            (Ok(State::WantHost), Some(hosting)) => {
                if hosting.is_in_ring() {
                    return Advance::default();
                }
                hosting.poll(&mut self.gpu, own, &ring, true)
            }
            (Ok(State::WantHost), None) => out
                .serve
                .get_or_insert_with(|| Serve::new(out.context, out.source, out.bytes))
                .poll(&mut self.gpu, own, &ring),
            _ => return self.close_send(env, id, state == Ok(State::Failed)),
        };
        if let Err(error) = &step {
            log::error!(
                "message of {} bytes to rank {}: {error}",
                out.bytes,
                out.peer.world_rank()
            );
            let _ = slot.fail(out.nonce, env.abi.err_other);
        }
        let moved = step.unwrap_or(true);
        if moved {
            out.peer.ring_doorbell();
        }
        Advance {
            moved,
            serving: true,
            closed: false,
        }
    }

    /// The receiver is through with a message, or will never be: ends what is under way and frees the slot.
    fn close_send(&mut self, env: &Env, id: usize, has_failed: bool) -> Advance {
        let own = env.node.own();
        let send = &mut self.sends[id];
        let SendKind::Descriptor(out) = &mut send.kind else {
            return Advance::default();
        };
        let drained = match (&mut out.serve, &mut out.hosting) {
            (Some(serve), _) => {
                serve.release_filled(own);
                serve.is_drained(own)
            }
            (None, Some(hosting)) => hosting.release(own),
            (None, None) => true,
        };
        if !drained {
            return Advance {
                moved: false,
                serving: true,
                closed: false,
            };
        }
        // A send that is complete already is nobody's error any more.
        if has_failed && !send.complete {
            send.code = env.abi.err_other;
            stats::add(Counter::Errors, 1);
        }
        own.free(out.slot);
        out.is_open = false;
        send.complete = true;
        Advance {
            moved: true,
            serving: false,
            closed: true,
        }
    }

    /// Whether a send completes only when its receiver comes. One below the eager limit completes by itself.
    pub(super) fn awaits_receiver(&self, id: usize) -> bool {
        matches!(&self.sends[id].kind, SendKind::Descriptor(out) if out.hosting.is_none())
    }

    pub(super) fn peer_of_send(&self, id: usize) -> Option<Arc<Peer>> {
        match &self.sends.get(id)?.kind {
            SendKind::Descriptor(out) => Some(Arc::clone(&out.peer)),
            _ => None,
        }
    }

    /// Whether a message must still be served in Finalize: its receiver may yet receive it, or is receiving it.
    pub(super) fn is_wanted(&self, env: &Env, id: usize) -> bool {
        let SendKind::Descriptor(out) = &self.sends[id].kind else {
            return false;
        };
        let state = env
            .node
            .own()
            .slot(out.slot)
            .and_then(|slot| slot.state(out.nonce).ok());
        !(out.peer.finalizing() && matches!(state, Some(State::Posted | State::Hosted)))
    }

    /// Ends a send whose receiver has died.
    pub(super) fn fail_send(&mut self, env: &Env, id: usize) {
        let send = &mut self.sends[id];
        let SendKind::Descriptor(out) = &mut send.kind else {
            return;
        };
        log::error!(
            "rank {} has died with a message of {} bytes to it unfinished",
            out.peer.world_rank(),
            out.bytes
        );
        stats::add(Counter::DeadPeers, 1);
        if let Some(slot) = env.node.own().slot(out.slot) {
            let _ = slot.fail(out.nonce, env.abi.err_other);
        }
    }

    /// Tests the native part of a send, if it has one.
    ///
    /// # Safety
    /// MPI may be called.
    pub(super) unsafe fn test_value(&mut self, env: &Env, id: usize) {
        let send = &mut self.sends[id];
        let native = match &mut send.kind {
            SendKind::Value { native, .. } => native,
            SendKind::Descriptor(out) => &mut out.native,
            SendKind::Over => return,
        };
        // SAFETY: our own request, or null.
        if unsafe { test_native(env, native) } {
            if let SendKind::Value { .. } = send.kind {
                send.complete = true;
                send.kind = SendKind::Over;
            }
        }
    }

    /// Tests values whose send has completed before they were on their way.
    pub(super) fn test_draining(&mut self, env: &Env) {
        let mut i = 0;
        while i < self.draining.len() {
            let id = self.draining[i];
            // SAFETY: called from the program's thread only.
            unsafe { self.test_value(env, id) };
            if self.is_gone(env, id) {
                self.draining.swap_remove(i);
                self.sends.remove(id);
            } else {
                i += 1;
            }
        }
        let bytes = |id: &usize| match &self.sends[*id].kind {
            SendKind::Value { data, .. } => data.len() as u64,
            _ => 0,
        };
        self.draining_bytes = self.draining.iter().map(bytes).sum();
    }

    fn is_gone(&self, env: &Env, id: usize) -> bool {
        match &self.sends[id].kind {
            SendKind::Over => true,
            SendKind::Descriptor(out) => {
                !out.is_open
                    && env.abi.normalize(out.native) == env.abi.normalize(env.abi.request_null)
            }
            SendKind::Value { .. } => false,
        }
    }

    /// Forgets a complete send, or lets what is left of it end by itself.
    ///
    /// # Safety
    /// MPI may be called; the send is complete.
    pub(super) unsafe fn retire_send(&mut self, env: &Env, id: usize) -> (Handle, c_int) {
        // SAFETY: passed on.
        unsafe { self.test_value(env, id) };
        let (comm, code) = (self.sends[id].comm, self.sends[id].code);
        if self.is_gone(env, id) {
            self.sends.remove(id);
        } else {
            if let SendKind::Value { data, .. } = &self.sends[id].kind {
                self.draining_bytes += data.len() as u64;
            }
            self.draining.push(id);
        }
        (comm, code)
    }

    /// Gives the program a request for a send.
    ///
    /// # Safety
    /// MPI may be called; `request` is the program's.
    pub(super) unsafe fn give_request(
        &mut self,
        env: &Env,
        id: usize,
        request: *mut Handle,
    ) -> c_int {
        // SAFETY: passed on.
        match unsafe { start_generalized(env.abi) } {
            Ok(handle) => {
                self.sends[id].handle = handle;
                self.table.insert(handle, Entry::Send(id));
                // SAFETY: the program's request.
                unsafe { env.abi.write(request, handle) };
                env.abi.success
            }
            Err(code) => code,
        }
    }
}

/// Tests one of our native requests; true once it is null.
unsafe fn test_native(env: &Env, request: &mut Handle) -> bool {
    let null = env.abi.normalize(env.abi.request_null);
    if env.abi.normalize(*request) == null {
        return true;
    }
    let mut flag = 0;
    // SAFETY: our own request.
    let code = unsafe { native::test(request, &raw mut flag, env.abi.no_status()) };
    flag != 0 || code != env.abi.success
}

/// Sends packed bytes natively in the mode of the arguments.
unsafe fn send_packed(env: &Env, args: &SendArgs, data: &[u8]) -> Result<Handle, c_int> {
    let mut request = env.abi.request_null;
    let mut bytes = SendArgs {
        buffer: data.as_ptr().cast(),
        count: data.len() as i64,
        datatype: env.abi.byte,
        ..*args
    };
    // SAFETY: the type is made here and freed once the send has been started.
    let code = unsafe {
        if args.mode == Mode::Buffered {
            // A buffered send copies before it returns, so its data need not be kept.
            let count =
                c_int::try_from(bytes.count).map_err(|_| raise(args.comm, env.abi.err_other))?;
            native::bsend(
                bytes.buffer,
                count,
                bytes.datatype,
                bytes.dest,
                bytes.tag,
                bytes.comm,
            )
        } else if c_int::try_from(bytes.count).is_ok() {
            native_isend(&bytes, &raw mut request)
        } else {
            let (mut block, count) =
                types::blocks(env.abi, bytes.count as u64).ok_or(env.abi.err_other)?;
            bytes.datatype = block;
            bytes.count = count;
            let code = native_isend(&bytes, &raw mut request);
            native::type_free(&raw mut block);
            code
        }
    };
    if code == env.abi.success {
        Ok(request)
    } else {
        Err(code)
    }
}
