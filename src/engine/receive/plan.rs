//! Who makes a receive, where it lands natively, and how it is posted.

use std::ffi::{c_int, c_void};
use std::sync::Arc;

use super::{Receive, RecvArgs, Target};
use crate::engine::comms;
use crate::engine::core::Core;
use crate::engine::layout::Layout;
use crate::engine::lift::Shape;
use crate::engine::matched::Matched;
use crate::engine::native::{native_irecv, raise_told};
use crate::engine::place::Place;
use crate::engine::types::{self, TypeInfo};
use crate::engine::Engine;
use crate::mpi::{native, Abi, Handle};
use crate::node::RTS_BYTES;
use crate::stats::{self, Counter};
use crate::transfer::fault;
use crate::transfer::life::State;

/// A receive ready to be posted natively with these arguments.
pub struct Prepared {
    receive: Receive,
    /// Buffer for the native call.
    pub buffer: *mut c_void,
    /// Count for the native call.
    pub count: i64,
    /// Datatype for the native call.
    pub datatype: Handle,
    /// The rank of the communicator that it receives from.
    source: c_int,
    /// The datatype was made for this call alone.
    temporary: bool,
    /// It lands in a range of the library's own, which is taken when it is posted.
    is_to_land: bool,
}

/// Which receives into host memory the engine watches.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Watch {
    /// Only where RTSs may arrive.
    IfLive,
    /// All.
    Always,
    /// All, so that an RTS is recognized whenever it comes.
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
            env.unseen.note_receive();
            return Ok(Plan::Native);
        };
        let capacity = info.bytes(args.count);
        // SAFETY: the program's handle.
        let place = unsafe { Place::of(abi, args.buffer, args.count, args.datatype, &info) };
        let address = match place {
            Place::Host(address) => address.cast_mut(),
            // SAFETY: passed on.
            other => return unsafe { self.plan_device(args, &info, capacity, other) },
        };
        // A persistent receive outlives the current state of the node.
        let live = self.live() || watch == Watch::Lasting;
        if !live && watch == Watch::IfLive {
            return Ok(Plan::Native);
        }
        let dense = info.dense(args.count) || capacity == 0;
        let small = capacity < RTS_BYTES as u64;
        let is_free = || {
            let core = self.core.lock();
            !core.places.overlap(address.addr(), capacity)
        };
        if !live || (dense && !small && is_free()) {
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
            return unsafe { self.by_bytes(args, prepared) };
        }
        let (base, layout) = if dense {
            (address.cast(), Arc::new(Layout::dense(capacity)))
        } else {
            // SAFETY: passed on.
            (args.buffer.cast(), unsafe { self.layout(args) }?)
        };
        // SAFETY: passed on.
        unsafe { self.land(args, capacity, Target::HostRuns { base, layout }) }
    }

    /// Has the engine post what the MPI library could make as it is, where one request or one wait stands for
    /// more than that.
    ///
    /// # Safety
    /// As [`Engine::plan_receive`].
    pub unsafe fn watch_native(&self, args: &RecvArgs) -> Box<Prepared> {
        // SAFETY: the program's handle.
        let info = unsafe { types::info(self.env.abi, args.datatype) };
        let capacity = info.map_or(0, |info| info.bytes(args.count.max(0)));
        let landed = args.buffer.cast();
        Box::new(Prepared::new(args, capacity, landed, Target::LeftToMpi))
    }

    unsafe fn is_off_node(&self, comm: Handle, source: c_int) -> bool {
        // SAFETY: passed on.
        let identity = unsafe { comms::identity(self.env.abi, comm) };
        identity
            .and_then(|id| id.world_rank(source))
            .is_some_and(|world| self.env.node.proves_off_node(world))
    }

    unsafe fn layout(&self, args: &RecvArgs) -> Result<Arc<Layout>, c_int> {
        // SAFETY: passed on.
        unsafe {
            types::layout(self.env.abi, args.datatype).ok_or_else(|| {
                let why = "the MPI library does not tell how its datatype is laid out";
                refuse(self.env.abi, args.comm, args.source, why)
            })
        }
    }

    /// A receive into device memory, at least in part.
    unsafe fn plan_device(
        &self,
        args: &RecvArgs,
        info: &TypeInfo,
        capacity: u64,
        place: Place,
    ) -> Result<Plan, c_int> {
        self.use_device();
        // SAFETY: passed on.
        if self.env.cuda_aware && unsafe { self.is_off_node(args.comm, args.source) } {
            stats::add(Counter::NativeReceives, 1);
            return Ok(Plan::Native);
        }
        let target = match place {
            Place::Device(buffer) if info.dense(args.count) => Target::Device {
                buffer,
                shape: Shape::Dense(buffer.address),
            },
            Place::Device(buffer) => Target::Device {
                buffer,
                // SAFETY: passed on.
                shape: Shape::Runs(args.buffer.addr() as u64, unsafe { self.layout(args) }?),
            },
            Place::Several(layout) => Target::Several {
                base: args.buffer.cast(),
                layout,
            },
            Place::Host(_) => return Ok(Plan::Native),
        };
        // SAFETY: passed on.
        unsafe { self.land(args, capacity, target) }
    }

    /// A receive into a landing range that has room for an RTS. A natively truncated RTS could not be read,
    /// and not every library then tells how long the message was.
    unsafe fn land(&self, args: &RecvArgs, capacity: u64, target: Target) -> Result<Plan, c_int> {
        let mut prepared = Prepared::new(args, capacity, std::ptr::null_mut(), target);
        prepared.receive.room = capacity.max(RTS_BYTES as u64);
        prepared.is_to_land = true;
        // SAFETY: passed on.
        unsafe { self.by_bytes(args, prepared) }
    }

    /// Posts it as bytes where it lands. An RTS is no whole number of elements of most other types, and MPICH
    /// 5 aborts on that.
    unsafe fn by_bytes(&self, args: &RecvArgs, mut prepared: Prepared) -> Result<Plan, c_int> {
        let abi = self.env.abi;
        prepared.buffer = prepared.receive.landed.cast();
        let room = prepared.receive.room;
        if c_int::try_from(room).is_ok() {
            (prepared.datatype, prepared.count) = (abi.byte, room as i64);
            return Ok(Plan::Watched(Box::new(prepared)));
        }
        // SAFETY: MPI may be called.
        let datatype = unsafe { types::bytes_type(abi, room) };
        // SAFETY: passed on.
        let datatype = datatype.ok_or_else(|| unsafe {
            let why = format!("the MPI library makes no datatype of {room} bytes");
            refuse(abi, args.comm, args.source, &why)
        })?;
        (prepared.datatype, prepared.count, prepared.temporary) = (datatype, 1, true);
        Ok(Plan::Watched(Box::new(prepared)))
    }

    /// Posts a prepared receive by `post`, which gets the buffer, count, datatype and place of the request.
    ///
    /// # Safety
    /// MPI may be called; `post` passes the arguments on to a native non-blocking receive.
    pub unsafe fn post_receive(
        &self,
        prepared: Box<Prepared>,
        post: impl FnOnce(&Prepared, *mut Handle) -> c_int,
    ) -> Result<usize, c_int> {
        self.note_activity();
        // Under the lock, so that no probe counts while this receive takes its message unseen.
        // SAFETY: passed on.
        unsafe { self.post_locked(&mut self.core.lock(), prepared, post) }
    }

    unsafe fn post_locked(
        &self,
        core: &mut Core,
        mut prepared: Box<Prepared>,
        post: impl FnOnce(&Prepared, *mut Handle) -> c_int,
    ) -> Result<usize, c_int> {
        let abi = self.env.abi;
        let mut request = abi.request_null;
        if prepared.is_to_land {
            // SAFETY: passed on.
            unsafe { prepared.land(core, abi) }?;
        }
        prepared.receive.cover();
        let is_posted = !prepared.receive.persistent;
        if is_posted {
            prepared.receive.life.transition(State::Offered);
        }
        // Before the native call, so that the sender finds it while it is being posted. Under the lock
        // nothing comes between.
        if let Some(posting) = prepared.receive.posting(abi).filter(|_| is_posted) {
            // SAFETY: the program's communicator.
            let known = unsafe { core.match_early(&self.env, &posting, None) };
            (prepared.receive.rtr, prepared.receive.early_match) = known;
        }
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
            if let Some(rtr) = receive.rtr {
                self.env.node.own().withdraw(rtr);
            }
            return Err(code);
        }
        receive.native = abi.normalize(request);
        core.serial += 1;
        receive.serial = core.serial;
        let id = core.receives.insert(receive);
        if is_posted {
            core.note_posted(&self.env, id);
            core.keep_apart(&self.env, id);
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

    /// As [`Engine::post_irecv`], and gives the program the request.
    ///
    /// # Safety
    /// As [`Engine::post_receive`]; `request` is the program's.
    pub unsafe fn irecv(
        &self,
        args: &RecvArgs,
        prepared: Box<Prepared>,
        request: *mut Handle,
    ) -> c_int {
        self.note_activity();
        let mut core = self.core.lock();
        // SAFETY: as in `post_irecv`.
        let posted = unsafe {
            self.post_locked(&mut core, prepared, |to, request| {
                native_irecv(&to.args(args), request)
            })
        };
        match posted {
            // SAFETY: the program's request.
            Ok(id) => unsafe { core.hand_out_receive(self.env.abi, id, request) },
            Err(code) => code,
        }
    }
}

impl Prepared {
    fn new(args: &RecvArgs, capacity: u64, landed: *mut u8, target: Target) -> Prepared {
        Prepared {
            receive: Receive {
                from: Some((args.source, args.tag)),
                ..Receive::new(args.comm, capacity, landed, target)
            },
            buffer: args.buffer,
            count: args.count,
            datatype: args.datatype,
            source: args.source,
            temporary: false,
            is_to_land: false,
        }
    }

    /// Takes the range in which it lands.
    unsafe fn land(&mut self, core: &mut Core, abi: &Abi) -> Result<(), c_int> {
        let receive = &mut self.receive;
        let Some(landing) = core.landings.take(receive.room) else {
            let why = format!("no address space for {} bytes", receive.room);
            // SAFETY: the program's communicator.
            return Err(unsafe { refuse(abi, receive.comm, self.source, &why) });
        };
        receive.landed = landing.start();
        receive.landing = Some(landing);
        self.buffer = receive.landed.cast();
        Ok(())
    }

    /// The arguments for the native call; source, tag and communicator are the program's.
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
        self
    }

    /// A matched probe has taken its message and has counted it.
    pub fn matched(mut self: Box<Self>, matched: Option<Matched>) -> Box<Self> {
        self.receive.matched = matched;
        self
    }
}

/// Reports a receive that cannot be posted.
unsafe fn refuse(abi: &Abi, comm: Handle, source: c_int, why: &str) -> c_int {
    // SAFETY: the program's communicator.
    unsafe {
        let of = comms::sender(abi, comm, source);
        raise_told(abi, comm, &fault::refused(of, &why))
    }
}
