//! Receives: posted natively at once, completed by the engine where a descriptor or a value for a device lands.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use crate::cuda::{self, Buffer, ContextKey, Kind};
use crate::engine::comms::{self, Identity};
use crate::engine::core::{Core, Entry};
use crate::engine::counts::Stream;
use crate::engine::early::Early;
use crate::engine::fetch::{Destination, Fetch, NotTaken, Step};
use crate::engine::landing::Landing;
use crate::engine::layout::Layout;
use crate::engine::lift::{Lift, Shape, Way};
use crate::engine::matched::Matched;
use crate::engine::native::{native_irecv, raise};
use crate::engine::types::{self, TypeInfo};
use crate::engine::{Engine, Env};
use crate::mpi::{native, Abi, Family, Handle, Status};
use crate::node::{Peer, State, DESCRIPTOR_BYTES};
use crate::stats::{self, Counter};

/// The arguments of a receive.
#[derive(Clone, Copy, Debug)]
#[allow(missing_docs)]
pub struct RecvArgs {
    pub buffer: *mut c_void,
    pub count: i64,
    pub datatype: Handle,
    pub source: c_int,
    pub tag: c_int,
    pub comm: Handle,
}

/// What the bytes are received into, in the end.
enum Target {
    /// The native receive puts them in their place.
    InPlace,
    /// As above, but not in one run, so a descriptor is not recognized (posted before this rank was live).
    Unseen,
    /// Packed bytes in the landing range are scattered to host memory.
    HostRuns { base: *mut u8, layout: Arc<Layout> },
    /// To device memory, dense or by runs.
    Device { buffer: Buffer, shape: Shape },
}

enum Stage {
    /// A persistent receive that is not started.
    Idle,
    /// Nothing has landed yet, or nothing that was recognized.
    Posted,
    /// A descriptor has landed.
    Fetching(Box<Fetch>),
    /// The payload is in the landing range, on its way to the device.
    Lifting(Box<Lift>),
    /// The payload is where it belongs, or never will be.
    Done,
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
    /// The native request, which is also the handle in the program's hands.
    native: Handle,
    target: Target,
    stage: Stage,
    /// What the program's buffer holds, bytes.
    capacity: u64,
    /// What the native receive can take, bytes: a descriptor fits also where the program's buffer is smaller.
    room: u64,
    /// Where the first byte lands natively.
    landed: *mut u8,
    landing: Option<Landing>,
    comm: Handle,
    /// Kept where the communicator was freed before the receive was complete.
    identity: Option<Arc<Identity>>,
    arrival: Option<Arrival>,
    /// Length of the message, where that is not what the native status says.
    length: Option<u64>,
    /// Error found by the engine, to be raised at completion.
    code: c_int,
    persistent: bool,
    /// It is persistent, and the program has freed it.
    freed: bool,
    /// Its message was taken, and counted, by a matched probe.
    matched: Option<Matched>,
    /// A send that belongs to the same request (`MPI_Isendrecv`).
    companion: Option<usize>,
    /// For the removal of entries by threads that complete natively.
    serial: u64,
}

// SAFETY: the pointers are to memory that MPI has lent the library until the receive completes; whoever holds the
// engine's lock may use it.
unsafe impl Send for Receive {}

/// A receive ready to be posted natively with these arguments.
pub struct Prepared {
    receive: Receive,
    /// Buffer for the native call.
    pub buffer: *mut c_void,
    /// Count for the native call.
    pub count: i64,
    /// Datatype for the native call.
    pub datatype: Handle,
    /// The datatype was made for this call.
    temporary: bool,
}

/// Which receives into host memory the engine watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// Only where descriptors may be about.
    IfLive,
    /// All.
    Always,
    /// All, so that a descriptor is recognized whenever it comes.
    Lasting,
}

/// Who makes a receive.
pub enum Plan {
    /// The MPI library, untouched and unwatched.
    Native,
    /// The engine posts it.
    Watched(Box<Prepared>),
}

impl Engine {
    /// Decides who makes a receive, and prepares it.
    ///
    /// # Safety
    /// The arguments are those of the program's MPI call.
    pub unsafe fn plan_receive(&self, args: &RecvArgs, watch: Watch) -> Result<Plan, c_int> {
        let env = &self.env;
        let abi = env.abi;
        if args.source == abi.proc_null || args.count < 0 {
            return Ok(Plan::Native);
        }
        // SAFETY: the program's handle.
        let Some(info) = (unsafe { types::info(abi, args.datatype) }) else {
            return Ok(Plan::Native);
        };
        let capacity = info.bytes(args.count);
        let (first, _) = info.span(args.count);
        let address = args.buffer.wrapping_byte_offset(first as isize);
        if capacity > 0 {
            if let Kind::Device(buffer) = cuda::classify(address) {
                self.use_device();
                // SAFETY: passed on.
                if env.cuda_aware && unsafe { self.is_off_node(args.comm, args.source) } {
                    stats::add(Counter::NativeReceives, 1);
                    return Ok(Plan::Native);
                }
                // SAFETY: passed on.
                return unsafe { self.plan_device(args, &info, capacity, buffer) };
            }
        }
        // A persistent receive outlives the present state of the node.
        let live = self.live() || watch == Watch::Lasting;
        if !live && watch == Watch::IfLive {
            return Ok(Plan::Native);
        }
        let dense = info.dense(args.count) || capacity == 0;
        let small = capacity < DESCRIPTOR_BYTES as u64;
        if !live || (dense && !small) {
            if !dense {
                return Ok(Plan::Watched(Box::new(Prepared::new(
                    args,
                    capacity,
                    address.cast(),
                    Target::Unseen,
                ))));
            }
            let prepared = Prepared::new(args, capacity, address.cast(), Target::InPlace);
            // SAFETY: passed on.
            return unsafe { self.by_bytes(args, &info, prepared) };
        }
        let (base, layout) = if dense {
            (address.cast(), Arc::new(Layout::dense(capacity)))
        } else {
            // SAFETY: passed on.
            (args.buffer.cast(), unsafe { self.layout(args, &info) }?)
        };
        // SAFETY: passed on.
        unsafe { self.land(args, &info, capacity, Target::HostRuns { base, layout }) }
    }

    unsafe fn is_off_node(&self, comm: Handle, source: c_int) -> bool {
        // SAFETY: passed on.
        let identity = unsafe { comms::identity(self.env.abi, comm) };
        identity
            .and_then(|id| id.world_rank(source))
            .is_some_and(|world| self.env.node.proves_off_node(world))
    }

    unsafe fn layout(&self, args: &RecvArgs, info: &TypeInfo) -> Result<Arc<Layout>, c_int> {
        // SAFETY: passed on.
        unsafe {
            Layout::of(self.env.abi, args.datatype, info)
                .map(Arc::new)
                .ok_or_else(|| {
                    log::error!("the layout of a datatype cannot be determined");
                    raise(args.comm, self.env.abi.err_other)
                })
        }
    }

    unsafe fn plan_device(
        &self,
        args: &RecvArgs,
        info: &TypeInfo,
        capacity: u64,
        buffer: Buffer,
    ) -> Result<Plan, c_int> {
        let dense = info.dense(args.count);
        let shape = if dense {
            Shape::Dense(buffer.address)
        } else {
            // SAFETY: passed on.
            Shape::Runs(args.buffer.addr() as u64, unsafe {
                self.layout(args, info)
            }?)
        };
        // SAFETY: passed on.
        unsafe { self.land(args, info, capacity, Target::Device { buffer, shape }) }
    }

    /// A receive into a landing range, in which there is room for a descriptor: natively truncated, it could not be
    /// read, and not every library tells then how long the message was.
    unsafe fn land(
        &self,
        args: &RecvArgs,
        info: &TypeInfo,
        capacity: u64,
        target: Target,
    ) -> Result<Plan, c_int> {
        let room = capacity.max(DESCRIPTOR_BYTES as u64);
        let landing = self.take_landing(args, room)?;
        let mut prepared = Prepared::new(args, capacity, landing.start(), target);
        prepared.receive.room = room;
        prepared.receive.landing = Some(landing);
        // SAFETY: passed on.
        unsafe { self.by_bytes(args, info, prepared) }
    }

    /// Posts it as bytes from where it lands: a descriptor is no whole number of most other types, upon which MPICH 5
    /// aborts.
    unsafe fn by_bytes(
        &self,
        args: &RecvArgs,
        info: &TypeInfo,
        mut prepared: Prepared,
    ) -> Result<Plan, c_int> {
        let abi = self.env.abi;
        prepared.buffer = prepared.receive.landed.cast();
        let room = prepared.receive.room;
        if c_int::try_from(room).is_ok() {
            (prepared.datatype, prepared.count) = (abi.byte, room as i64);
            return Ok(Plan::Watched(Box::new(prepared)));
        }
        // SAFETY: MPI may be called.
        let blocks = unsafe {
            let items = c_int::try_from(args.count)
                .ok()
                .and_then(|_| types::bytes_type(abi, info.size));
            items
                .map(|item| (item, args.count))
                .or_else(|| types::blocks(abi, room))
        };
        // SAFETY: passed on.
        let (datatype, count) = blocks.ok_or_else(|| unsafe { raise(args.comm, abi.err_other) })?;
        (prepared.datatype, prepared.count, prepared.temporary) = (datatype, count, true);
        Ok(Plan::Watched(Box::new(prepared)))
    }

    fn take_landing(&self, args: &RecvArgs, capacity: u64) -> Result<Landing, c_int> {
        self.core.lock().landings.take(capacity).ok_or_else(|| {
            log::error!("no address space for a receive of {capacity} bytes");
            // SAFETY: the program's communicator.
            unsafe { raise(args.comm, self.env.abi.err_other) }
        })
    }

    /// Posts a prepared receive by `post`, which gets the buffer, count, datatype and place of the request.
    ///
    /// # Safety
    /// MPI may be called; `post` passes the arguments on to a native non-blocking receive.
    pub unsafe fn post_receive(
        &self,
        mut prepared: Box<Prepared>,
        post: impl FnOnce(&Prepared, *mut Handle) -> c_int,
    ) -> Result<usize, c_int> {
        let abi = self.env.abi;
        let mut request = abi.request_null;
        // Under the lock, so that no probe counts while this receive takes its message unseen.
        let mut core = self.core.lock();
        let code = post(&prepared, &raw mut request);
        if prepared.temporary {
            // SAFETY: made for this receive, which holds its own reference now.
            unsafe { native::type_free(&raw mut prepared.datatype) };
        }
        let mut receive = prepared.receive;
        if code != abi.success {
            if let Some(landing) = receive.landing.take() {
                core.landings.give(landing);
            }
            return Err(code);
        }
        receive.native = abi.normalize(request);
        core.serial += 1;
        receive.serial = core.serial;
        let is_posted = !matches!(receive.stage, Stage::Idle);
        let id = core.receives.insert(receive);
        if is_posted {
            core.note_posted(abi, id);
        }
        Ok(id)
    }

    /// Posts a prepared receive with the source, tag and communicator of the arguments.
    ///
    /// # Safety
    /// As [`Engine::post_receive`].
    pub unsafe fn post_irecv(
        &self,
        args: &RecvArgs,
        prepared: Box<Prepared>,
    ) -> Result<usize, c_int> {
        // SAFETY: the program's arguments, or a landing range in the place of its buffer.
        unsafe {
            self.post_receive(prepared, |to, request| {
                native_irecv(&to.args(args), request)
            })
        }
    }

    /// Whether a receive is complete; lets MPI progress.
    pub(super) fn look_at_receive(&self, core: &mut Core, id: usize) -> bool {
        // While the payload is on its way MPI has nothing to say that matters: asking it for each of a window of
        // receives would make it progress as many times.
        if !matches!(core.receives[id].stage, Stage::Fetching(_)) {
            // SAFETY: called from the program's threads only.
            unsafe { core.look_at_arrival(&self.env, id) };
        }
        core.is_received(id)
    }
}

impl Prepared {
    fn new(args: &RecvArgs, capacity: u64, landed: *mut u8, target: Target) -> Prepared {
        Prepared {
            receive: Receive::new(args.comm, capacity, landed, target),
            buffer: args.buffer,
            count: args.count,
            datatype: args.datatype,
            temporary: false,
        }
    }

    /// The arguments for the native call: the source, tag and communicator are the program's.
    pub fn args(&self, args: &RecvArgs) -> RecvArgs {
        RecvArgs {
            buffer: self.buffer,
            count: self.count,
            datatype: self.datatype,
            ..*args
        }
    }

    /// It is persistent, and not started yet.
    pub fn persistent(mut self: Box<Self>) -> Box<Self> {
        self.receive.persistent = true;
        self.receive.stage = Stage::Idle;
        self
    }

    /// A matched probe has taken its message and counted it.
    pub fn matched(mut self: Box<Self>, matched: Option<Matched>) -> Box<Self> {
        self.receive.matched = matched;
        self
    }
}

impl Receive {
    /// One that the MPI library has posted while this rank was not live.
    pub(super) fn posted_early(native: Handle, early: &Early) -> Receive {
        let target = if early.dense {
            Target::InPlace
        } else {
            Target::Unseen
        };
        Receive {
            native,
            serial: early.serial,
            ..Receive::new(early.comm, early.capacity, early.landed, target)
        }
    }

    fn new(comm: Handle, capacity: u64, landed: *mut u8, target: Target) -> Receive {
        Receive {
            native: 0,
            target,
            stage: Stage::Posted,
            capacity,
            room: capacity,
            landed,
            landing: None,
            comm,
            identity: None,
            arrival: None,
            length: None,
            code: 0,
            persistent: false,
            freed: false,
            matched: None,
            companion: None,
            serial: 0,
        }
    }

    fn may_hold_descriptor(&self) -> bool {
        self.room >= DESCRIPTOR_BYTES as u64 && !matches!(self.target, Target::Unseen)
    }

    /// A descriptor that lands here cannot be recognized, nor found by its number: no peer may send one meanwhile.
    fn is_blind(&self, abi: &Abi) -> bool {
        // A library that reports the true length of a truncated message lets the slot be found by number.
        let tells_length = abi.family == Family::OpenMpi;
        matches!(self.target, Target::Unseen)
            || (self.room < DESCRIPTOR_BYTES as u64 && !tells_length)
    }

    fn destination(&self) -> Result<Destination, cuda::Error> {
        match &self.target {
            Target::Device {
                buffer,
                shape: Shape::Dense(address),
            } => Ok(Destination::Device {
                context: ContextKey::of(buffer.context)?,
                address: *address,
            }),
            // Where the bytes landed, the packed payload has room.
            _ => Ok(Destination::Host(self.landed)),
        }
    }
}

impl Core {
    pub(super) fn note_posted(&mut self, abi: &Abi, id: usize) {
        let receive = &self.receives[id];
        self.blind += usize::from(receive.is_blind(abi));
        self.posted += usize::from(receive.may_hold_descriptor());
    }

    /// Nothing can land any more in what was posted.
    fn note_landed(&mut self, abi: &Abi, id: usize) {
        let receive = &self.receives[id];
        self.blind -= usize::from(receive.is_blind(abi));
        self.posted -= usize::from(receive.may_hold_descriptor());
    }

    pub(super) fn is_received(&self, id: usize) -> bool {
        let receive = &self.receives[id];
        matches!(receive.stage, Stage::Done) && receive.arrival.is_some()
    }

    /// A persistent receive that is not started.
    pub(super) fn is_idle(&self, id: usize) -> bool {
        matches!(self.receives[id].stage, Stage::Idle)
    }

    pub(super) fn is_persistent(&self, id: usize) -> bool {
        self.receives[id].persistent
    }

    pub(super) fn is_persistent_handle(&self, handle: Handle) -> bool {
        matches!(self.table.get(&handle), Some(Entry::Receive(id)) if self.is_persistent(*id))
    }

    /// A persistent receive that the program has freed while it is active: it ends once it is complete.
    pub(super) fn set_transient(&mut self, id: usize) {
        self.receives[id].freed = self.receives[id].persistent;
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

    /// The status of a complete receive that stays as it is.
    ///
    /// # Safety
    /// MPI may be called; `status` is the program's.
    pub(super) unsafe fn peek_status(&self, env: &Env, id: usize, status: *mut c_void) -> c_int {
        let receive = &self.receives[id];
        let (Some(arrival), false) = (receive.arrival, env.abi.ignores_status(status)) else {
            return env.abi.success;
        };
        // SAFETY: statuses of this ABI.
        unsafe {
            status
                .cast::<u8>()
                .copy_from_nonoverlapping(arrival.status.as_ptr().cast(), env.abi.status_bytes);
            if let Some(length) = receive.length {
                native::status_set_elements_x(status, env.abi.byte, length as _);
            }
        }
        env.abi.success
    }

    pub(super) fn native_of(&self, id: usize) -> Handle {
        self.receives[id].native
    }

    /// Counts what has arrived in posted receives.
    ///
    /// # Safety
    /// MPI may be called.
    pub(super) unsafe fn settle(&mut self, env: &Env) {
        let ids: Vec<usize> = self.receives.iter().map(|(id, _)| id).collect();
        for id in ids {
            // SAFETY: passed on.
            unsafe { self.look_at_arrival(env, id) };
        }
    }

    /// Gives a posted receive up: it is cancelled, and ends by itself.
    ///
    /// # Safety
    /// MPI may be called; the request is in nobody's hands.
    pub(super) unsafe fn abandon(&mut self, id: usize) {
        let mut native = self.receives[id].native;
        // SAFETY: the receive's own request, which is active.
        unsafe { native::cancel(&raw mut native) };
        self.orphans.push((0, Entry::Receive(id)));
    }

    /// Asks MPI whether a receive has completed natively.
    ///
    /// # Safety
    /// MPI may be called.
    pub(super) unsafe fn look_at_arrival(&mut self, env: &Env, id: usize) {
        let receive = &self.receives[id];
        if receive.arrival.is_some() || matches!(receive.stage, Stage::Idle) {
            return;
        }
        let (mut flag, mut status) = (0, Status::new());
        // SAFETY: the receive's own request, which is active.
        let code = unsafe {
            let _quiet = Quiet::enter(env.abi);
            native::request_get_status(receive.native, &raw mut flag, status.as_mut_ptr())
        };
        if flag != 0 || code != env.abi.success {
            // SAFETY: the status was filled.
            unsafe { self.arrive(env, id, &status, code) };
        }
    }

    /// The native receive is complete.
    ///
    /// # Safety
    /// `status` is its status.
    unsafe fn arrive(&mut self, env: &Env, id: usize, status: &Status, code: c_int) {
        let abi = env.abi;
        // SAFETY: passed on.
        let (source, tag, bytes, cancelled) = unsafe {
            let s = status.as_ptr();
            (
                abi.status_source(s),
                abi.status_tag(s),
                received(abi, status),
                is_cancelled(status),
            )
        };
        self.receives[id].arrival = Some(Arrival {
            source,
            tag,
            bytes,
            status: *status,
            code,
        });
        // A message that did not fit is counted when its error is known.
        let fits = bytes <= self.receives[id].room;
        if bytes == DESCRIPTOR_BYTES as u64
            && fits
            && !cancelled
            && self.receives[id].matched.is_none()
        {
            if let Some(stream) = self.stream_of(env, id, source, tag) {
                self.received.take(stream);
            }
        }
        if !matches!(self.receives[id].stage, Stage::Posted) {
            return;
        }
        self.note_landed(env.abi, id);
        if cancelled {
            stats::add(Counter::Cancelled, 1);
            self.receives[id].stage = Stage::Done;
            return;
        }
        let taken = bytes == DESCRIPTOR_BYTES as u64
            && self.receives[id].may_hold_descriptor()
            && match self.take_descriptor(env, id) {
                Ok(()) => true,
                Err(NotTaken::Bad) => {
                    stats::add(Counter::BadDescriptors, 1);
                    false
                }
                Err(NotTaken::Value) => false,
            };
        if !taken {
            self.take_value(id, bytes);
        }
    }

    fn stream_of(&self, env: &Env, id: usize, source: c_int, tag: c_int) -> Option<Stream> {
        let receive = &self.receives[id];
        let identity = match &receive.identity {
            Some(identity) => Arc::clone(identity),
            // SAFETY: the communicator is not freed, or its identity would have been kept.
            None => unsafe { comms::identity(env.abi, receive.comm) }?,
        };
        Some(Stream {
            comm: identity.id,
            peer: identity.world_rank(source)?,
            tag,
        })
    }

    /// If a descriptor has landed, claims its message.
    fn take_descriptor(&mut self, env: &Env, id: usize) -> Result<(), NotTaken> {
        let receive = &mut self.receives[id];
        let to = match receive.destination() {
            Ok(to) => to,
            Err(error) => {
                log::error!("device buffer of a receive cannot be written: {error}");
                receive.code = env.abi.err_other;
                Destination::Host(receive.landed)
            }
        };
        if let (Target::Device { buffer, .. }, Destination::Device { .. }) = (&receive.target, to) {
            if let Err(error) = self.gpu.prepare(buffer) {
                log::debug!("device buffer {:#x}: {error}", buffer.address);
            }
        }
        // A copy: a payload that goes to host memory is written over it.
        let mut bytes = [0u8; DESCRIPTOR_BYTES];
        // SAFETY: at least that many bytes are there, and MPI writes no more of them.
        unsafe {
            bytes
                .as_mut_ptr()
                .copy_from_nonoverlapping(receive.landed, DESCRIPTOR_BYTES)
        };
        let fetch = Fetch::begin(env, &mut self.gpu, &bytes, to, receive.capacity)?;
        let length = fetch.length();
        receive.length = Some(length);
        if length > receive.capacity {
            receive.code = env.abi.err_truncate;
            receive.length = Some(receive.capacity);
            stats::add(Counter::Truncated, 1);
        }
        if let Some(landing) = &mut receive.landing {
            landing.note_touched(DESCRIPTOR_BYTES as u64);
        }
        receive.stage = Stage::Fetching(Box::new(fetch));
        self.taken += 1;
        self.moving.push(id);
        Ok(())
    }

    /// A value has landed.
    fn take_value(&mut self, id: usize, bytes: u64) {
        let receive = &mut self.receives[id];
        if let Some(landing) = &mut receive.landing {
            landing.note_touched(bytes);
        }
        if bytes > receive.capacity && receive.capacity < receive.room {
            // There was more room natively than the program has.
            receive.code = crate::mpi::abi().map_or(1, |abi| abi.err_truncate);
            stats::add(Counter::Truncated, 1);
        }
        if let Target::Device { .. } = receive.target {
            stats::add(Counter::ValueReceives, 1);
            stats::add(Counter::ValueBytes, bytes);
        }
        self.deliver(id, bytes);
    }

    /// Brings packed bytes from where they landed to where they belong.
    fn deliver(&mut self, id: usize, bytes: u64) {
        let receive = &mut self.receives[id];
        let bytes = bytes.min(receive.capacity);
        receive.stage = Stage::Done;
        match &receive.target {
            Target::InPlace | Target::Unseen => {}
            Target::HostRuns { base, layout } => {
                for piece in layout.pieces(0, bytes) {
                    // SAFETY: the runs are those of the program's buffer and datatype; the landing range holds the
                    // packed bytes and overlaps nothing of the program's.
                    unsafe {
                        let to = base.wrapping_offset(piece.offset as isize);
                        to.copy_from_nonoverlapping(
                            receive.landed.add(piece.packed as usize),
                            piece.length as usize,
                        );
                    }
                }
            }
            Target::Device { .. } if bytes == 0 => {}
            Target::Device { buffer, shape } => {
                let (buffer, shape) = (*buffer, shape.clone());
                match self.gpu.prepare(&buffer) {
                    Ok(context) => {
                        // SAFETY: the landing range holds the bytes, and is kept until the receive is complete.
                        let lift =
                            unsafe { Lift::new(Way::Up, context, shape, receive.landed, bytes) };
                        receive.stage = Stage::Lifting(Box::new(lift));
                        self.moving.push(id);
                    }
                    Err(error) => self.spoil(id, &error),
                }
            }
        }
    }

    /// The payload cannot be brought to where it belongs.
    fn spoil(&mut self, id: usize, error: &cuda::Error) {
        log::error!("device buffer of a receive cannot be written: {error}");
        stats::add(Counter::Errors, 1);
        let receive = &mut self.receives[id];
        receive.code = crate::mpi::abi().map_or(1, |abi| abi.err_other);
        receive.stage = Stage::Done;
    }

    /// Moves a receive on. Returns whether anything moved, and whether it is through. No MPI call.
    pub(super) fn advance_receive(&mut self, _env: &Env, id: usize) -> (bool, bool) {
        let Some(receive) = self.receives.get_mut(id) else {
            return (false, true);
        };
        match &mut receive.stage {
            Stage::Fetching(fetch) => match fetch.poll(&mut self.gpu) {
                Step::Pending(moved) => (moved, false),
                Step::Done => {
                    let bytes = fetch.length();
                    self.fetched(id, bytes);
                    (true, !matches!(self.receives[id].stage, Stage::Lifting(_)))
                }
                Step::Failed => {
                    stats::add(Counter::Errors, 1);
                    receive.code = crate::mpi::abi().map_or(1, |abi| abi.err_other);
                    receive.stage = Stage::Done;
                    (true, true)
                }
            },
            Stage::Lifting(lift) => match lift.poll(&mut self.gpu) {
                Ok(false) => (false, false),
                Ok(true) => {
                    receive.stage = Stage::Done;
                    (true, true)
                }
                Err(error) => {
                    self.spoil(id, &error);
                    (true, true)
                }
            },
            _ => (false, true),
        }
    }

    /// The payload of a descriptor is where it was fetched to.
    fn fetched(&mut self, id: usize, bytes: u64) {
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
        if !to_host || bytes == 0 {
            receive.stage = Stage::Done;
            return;
        }
        if let Some(landing) = &mut receive.landing {
            landing.note_touched(bytes);
        }
        let moving = self.moving.len();
        self.deliver(id, bytes);
        // It is in the list already.
        self.moving.truncate(moving);
    }

    /// Looks into the landing places of posted receives for descriptors. No MPI call.
    pub(super) fn scan_landed(&mut self, env: &Env) -> bool {
        let candidates: Vec<usize> = self
            .receives
            .iter()
            .filter(|(_, receive)| {
                matches!(receive.stage, Stage::Posted)
                    && receive.may_hold_descriptor()
                    // SAFETY: the receive can hold a descriptor there; MPI may be writing it, which the checksum tells.
                    && unsafe { crate::node::descriptor::begins(receive.landed) }
            })
            .map(|(id, _)| id)
            .collect();
        let mut found = false;
        for id in candidates {
            // What is not believed may be half written yet: it is judged when MPI says that it has arrived.
            if self.take_descriptor(env, id).is_ok() {
                self.note_landed(env.abi, id);
                found = true;
            }
        }
        found
    }

    pub(super) fn peer_of_receive(&self, id: usize) -> Option<&Peer> {
        match &self.receives.get(id)?.stage {
            Stage::Fetching(fetch) => Some(fetch.peer()),
            _ => None,
        }
    }

    /// Ends a receive whose sender has died.
    pub(super) fn fail_receive(&mut self, env: &Env, id: usize) {
        let receive = &mut self.receives[id];
        if let Stage::Fetching(fetch) = &receive.stage {
            log::error!(
                "rank {} has died with a message of {} bytes from it unfinished",
                fetch.peer().world_rank(),
                fetch.length()
            );
            stats::add(Counter::DeadPeers, 1);
            receive.code = env.abi.err_other;
            receive.stage = Stage::Done;
        }
    }

    /// Completes a receive towards the program: the native request, the status, errors. Its entry in the table is the
    /// caller's.
    ///
    /// # Safety
    /// MPI may be called; the receive is complete; `status` is the program's.
    pub(super) unsafe fn finish_receive(
        &mut self,
        env: &Env,
        id: usize,
        status: *mut c_void,
    ) -> c_int {
        let abi = env.abi;
        let mut own = Status::new();
        let status = if abi.ignores_status(status) {
            own.as_mut_ptr()
        } else {
            status
        };
        // SAFETY: the request is complete.
        let mut code = unsafe { self.complete_natively(env, id, status) };
        let receive = &mut self.receives[id];
        let (comm, length, own_code) = (receive.comm, receive.length, receive.code);
        if code != abi.success {
            // SAFETY: passed on.
            unsafe { self.release_truncated(env, id, code) };
        } else {
            if let Some(length) = length {
                // SAFETY: a filled status.
                unsafe { native::status_set_elements_x(status, abi.byte, length as _) };
            }
            if own_code != abi.success {
                // SAFETY: the program's communicator.
                code = unsafe { raise(comm, own_code) };
            }
        }
        self.dismiss(id);
        code
    }

    /// Has MPI complete a request of which it has said that it is; fills the status.
    unsafe fn complete_natively(&self, env: &Env, id: usize, status: *mut c_void) -> c_int {
        let receive = &self.receives[id];
        let mut native = receive.native;
        let Some(arrival) = receive
            .arrival
            .filter(|arrival| receive.persistent || arrival.code != env.abi.success)
        else {
            // SAFETY: the request is complete, so this does not block.
            return unsafe { native::wait(&raw mut native, status) };
        };
        // What was seen when it arrived counts: MPICH 5 makes a persistent request inactive when its status is asked for.
        // SAFETY: a status of this ABI, a complete request, the program's communicator.
        unsafe {
            let quiet = Quiet::enter(env.abi);
            let code = native::wait(&raw mut native, env.abi.no_status());
            drop(quiet);
            status
                .cast::<u8>()
                .copy_from_nonoverlapping(arrival.status.as_ptr().cast(), env.abi.status_bytes);
            if arrival.code == env.abi.success {
                code
            } else {
                raise(receive.comm, arrival.code)
            }
        }
    }

    /// The receive is over: forgotten, or ready to be started again.
    fn dismiss(&mut self, id: usize) {
        if self.receives[id].freed {
            let mut native = self.receives[id].native;
            // SAFETY: a persistent request that is inactive, and that nobody else knows any more.
            unsafe { native::request_free(&raw mut native) };
        }
        if self.receives[id].persistent && !self.receives[id].freed {
            let receive = &mut self.receives[id];
            receive.stage = Stage::Idle;
            receive.arrival = None;
            receive.length = None;
            receive.code = 0;
        } else {
            self.forget_receive(id);
        }
    }

    pub(super) fn forget_receive(&mut self, id: usize) {
        let mut receive = self.receives.remove(id);
        if let Some(landing) = receive.landing.take() {
            self.landings.give(landing);
        }
    }

    /// A persistent receive is about to be started natively.
    pub(super) fn start_receive(&mut self, abi: &Abi, id: usize) {
        let receive = &mut self.receives[id];
        receive.stage = Stage::Posted;
        if receive.landing.is_some() {
            // SAFETY: a landing range is at least a page long.
            unsafe { receive.landed.write_bytes(0, DESCRIPTOR_BYTES) };
        }
        self.note_posted(abi, id);
    }

    /// A native receive has failed. If that was a descriptor that did not fit, its sender is released.
    unsafe fn release_truncated(&mut self, env: &Env, id: usize, code: c_int) {
        let mut class = 0;
        // SAFETY: a live local.
        unsafe { native::error_class(code, &raw mut class) };
        if class != env.abi.err_truncate {
            return;
        }
        stats::add(Counter::Truncated, 1);
        let Some(arrival) = self.receives[id].arrival else {
            return;
        };
        if self.receives[id].room >= DESCRIPTOR_BYTES as u64 || env.abi.family != Family::OpenMpi {
            return;
        }
        if let Some(matched) = self.receives[id].matched {
            self.taken += u64::from(matched.release(env));
            return;
        }
        if let Some(stream) = self.stream_of(env, id, arrival.source, arrival.tag) {
            if arrival.bytes == DESCRIPTOR_BYTES as u64 {
                // Receives posted before may have taken earlier messages of the stream uncounted.
                // SAFETY: called from the program's threads only.
                unsafe { self.settle(env) };
                let sequence = self.received.take(stream);
                self.taken += u64::from(release(env, stream, sequence));
            }
        }
    }

    /// Keeps the identity of a communicator about to be freed for the receives pending on it.
    ///
    /// # Safety
    /// `comm` is valid still.
    pub(super) unsafe fn keep_identity(&mut self, abi: &Abi, comm: Handle) {
        let comm = abi.normalize(comm);
        // SAFETY: passed on.
        let Some(identity) = (unsafe { comms::identity(abi, comm) }) else {
            return;
        };
        self.take_over_on(abi, comm);
        for (_, receive) in &mut self.receives {
            if abi.normalize(receive.comm) == comm {
                receive
                    .identity
                    .get_or_insert_with(|| Arc::clone(&identity));
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

    /// Puts a receive into the program's hands.
    pub(super) fn enter(&mut self, abi: &Abi, handle: Handle, id: usize) {
        if let Some(Entry::Receive(before)) = self.table.insert(handle, Entry::Receive(id)) {
            // It was completed natively, or its handle would not be free; its thread is on its way out of that call.
            if matches!(self.receives[before].stage, Stage::Posted) {
                self.note_landed(abi, before);
            }
            self.forget_receive(before);
        }
    }

    /// Removes a receive that was completed natively by a call made before this rank was live, when `latest` was the
    /// number of the latest receive: a greater number is that of a later one under the same handle.
    pub(super) fn remove_completed(
        &mut self,
        env: &Env,
        handle: Handle,
        latest: u64,
        status: Option<&Status>,
    ) {
        let Some(Entry::Receive(id)) = self.table.get(&handle).copied() else {
            return;
        };
        if self.receives[id].serial > latest {
            return;
        }
        if let Some(status) = status {
            // SAFETY: the status of this receive.
            unsafe { self.count_native(env, id, status) };
        }
        if matches!(self.receives[id].stage, Stage::Posted) {
            self.note_landed(env.abi, id);
        }
        if self.receives[id].persistent {
            self.dismiss(id);
        } else {
            self.table.remove(&handle);
            self.forget_receive(id);
        }
    }

    unsafe fn count_native(&mut self, env: &Env, id: usize, status: &Status) {
        let receive = &self.receives[id];
        // A library that does not tell the length of a truncated message says nothing of use here.
        let truncated_silently =
            receive.room < DESCRIPTOR_BYTES as u64 && env.abi.family != Family::OpenMpi;
        if receive.arrival.is_some() || receive.matched.is_some() || truncated_silently {
            return;
        }
        // SAFETY: passed on.
        if unsafe { received(env.abi, status) != DESCRIPTOR_BYTES as u64 || is_cancelled(status) } {
            return;
        }
        // SAFETY: as above.
        let (source, tag) = unsafe {
            (
                env.abi.status_source(status.as_ptr()),
                env.abi.status_tag(status.as_ptr()),
            )
        };
        if let Some(stream) = self.stream_of(env, id, source, tag) {
            self.received.take(stream);
        }
    }
}

/// While it lives, an error of a receive's is returned and raised nowhere. MPICH raises it on MPI_COMM_WORLD (version 5
/// on MPI_COMM_SELF), whatever the receive's communicator, as soon as the status of the request is asked for.
struct Quiet {
    abi: &'static Abi,
    handlers: [(Handle, Handle); 2],
}

impl Quiet {
    /// `None` with libraries that raise errors where they belong.
    ///
    /// # Safety
    /// MPI may be called.
    unsafe fn enter(abi: &'static Abi) -> Option<Quiet> {
        if abi.family == Family::OpenMpi {
            return None;
        }
        let mut quiet = Quiet {
            abi,
            handlers: [(abi.comm_world, 0), (abi.comm_self, 0)],
        };
        for (comm, handler) in &mut quiet.handlers {
            // SAFETY: predefined communicators and a live local.
            unsafe {
                native::comm_get_errhandler(*comm, handler);
                native::comm_set_errhandler(*comm, abi.errors_return);
            }
        }
        Some(quiet)
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        let return_only = self.abi.normalize(self.abi.errors_return);
        for (comm, handler) in &mut self.handlers {
            // SAFETY: what `enter` has got, which is a reference that is ours to free.
            unsafe {
                if self.abi.normalize(*handler) != return_only {
                    native::comm_set_errhandler(*comm, *handler);
                }
                native::errhandler_free(handler);
            }
        }
    }
}

/// Acknowledges the message with this number of a stream, if a slot holds it. True if one did.
pub fn release(env: &Env, stream: Stream, sequence: u64) -> bool {
    find_slot(env, stream, sequence, |peer, slot, nonce| {
        let released = peer
            .slot(slot)
            .is_some_and(|slot| slot.acknowledge(nonce).is_ok());
        peer.ring_doorbell();
        released
    })
    .unwrap_or(false)
}

/// The slot that holds the message with this number of a stream, if it went by descriptor.
pub fn find_slot<T>(
    env: &Env,
    stream: Stream,
    sequence: u64,
    found: impl FnOnce(&Peer, u32, u64) -> T,
) -> Option<T> {
    let peer = env.node.peer(stream.peer)?;
    let mut index = 0;
    while let Some(slot) = peer.slot(index) {
        if let Some(nonce) = slot.nonce() {
            let open = matches!(slot.state(nonce), Ok(State::Posted | State::Hosted));
            if let (true, Ok(message)) = (open, slot.read(nonce)) {
                if message.communicator == stream.comm
                    && message.destination == env.world_rank
                    && message.tag == stream.tag
                    && message.sequence == sequence
                {
                    return Some(found(&peer, index, nonce));
                }
            }
        }
        index += 1;
    }
    None
}

/// Bytes that a status reports.
///
/// # Safety
/// The status was filled by the MPI library.
pub unsafe fn received(abi: &Abi, status: &Status) -> u64 {
    let mut bytes = 0i64;
    // SAFETY: passed on; a live local.
    let code = unsafe {
        native::get_elements_x(
            status.as_ptr().cast_mut(),
            abi.byte,
            (&raw mut bytes).cast(),
        )
    };
    if code == abi.success {
        u64::try_from(bytes).unwrap_or(0)
    } else {
        0
    }
}

/// Whether a status is that of a cancelled operation.
///
/// # Safety
/// The status was filled by the MPI library.
pub unsafe fn is_cancelled(status: &Status) -> bool {
    let mut flag = 0;
    // SAFETY: a status that the MPI library has filled.
    unsafe { native::test_cancelled(status.as_ptr().cast_mut(), &raw mut flag) };
    flag != 0
}
