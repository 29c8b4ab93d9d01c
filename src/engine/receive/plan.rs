//! Who makes a receive, where it lands natively, and how it is posted.

use std::ffi::c_int;
use std::sync::Arc;

use super::{Receive, Target};
use crate::cuda::Lent;
use crate::engine::args::RecvArgs;
use crate::engine::comms;
use crate::engine::core::Core;
use crate::engine::layout::Layout;
use crate::engine::lift::Shape;
use crate::engine::matched::Matched;
use crate::engine::native::{native_irecv, raise_told};
use crate::engine::place::{HostRuns, LentRuns, Place};
use crate::engine::types::{self, TypeInfo};
use crate::engine::Engine;
use crate::mpi::owned::{OwnRequest, OwnType};
use crate::mpi::{Abi, Comm, Request, Slot};
use crate::node::RTS_BYTES;
use crate::stats::{self, Counter};
use crate::transfer::fault;
use crate::transfer::life::State;

/// A receive ready to be posted natively with these arguments.
pub struct Prepared {
    receive: Receive,
    /// The program's.
    args: RecvArgs,
    /// It is posted as bytes.
    is_of_bytes: bool,
    /// The type of all of them, if they are too many for a count.
    long: Option<OwnType>,
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
    pub fn plan_receive(&self, args: &RecvArgs, watch: Watch) -> Result<Plan, c_int> {
        let env = &self.env;
        let abi = env.abi;
        if args.source == abi.proc_null || args.count < 0 {
            return Ok(Plan::Native);
        }
        let Some(info) = types::info(abi, args.datatype) else {
            env.unseen.note_receive();
            return Ok(Plan::Native);
        };
        let capacity = info.bytes(args.count);
        let place = Place::of(abi, args.buffer, args.count, args.datatype, &info);
        let address = match place {
            Place::Host(address) => address.cast_mut(),
            other => return self.plan_device(args, &info, capacity, other),
        };
        // A persistent receive outlives the current state of the node.
        let live = self.live() || watch == Watch::Lasting;
        if !live && watch == Watch::IfLive {
            return Ok(Plan::Native);
        }
        let dense = info.dense(args.count) || capacity == 0;
        let room = if dense { capacity } else { 0 };
        // SAFETY: the program's buffer, which is one run in host memory then.
        let landed = unsafe { Lent::new(address.cast(), room) };
        let small = capacity < RTS_BYTES as u64;
        let is_free = || {
            let core = self.core.lock();
            !core.places.overlap(address.addr(), capacity)
        };
        if !live || (dense && !small && is_free()) {
            if !dense {
                let prepared = Prepared::new(abi, args, capacity, landed, Target::Unseen);
                return Ok(Plan::Watched(Box::new(prepared)));
            }
            let prepared = Prepared::new(abi, args, capacity, landed, Target::InPlace);
            return self.by_bytes(args, prepared);
        }
        let runs = if dense {
            HostRuns::of(landed)
        } else {
            let layout = self.layout(args)?;
            // SAFETY: the program's buffer as its datatype has it, which was found to be in host memory.
            unsafe { HostRuns::new(LentRuns::new(args.buffer, layout, capacity)) }
        };
        self.land(args, capacity, Target::HostRuns(runs))
    }

    /// Has the engine post what the MPI library could make as it is, where one request or one wait stands for
    /// more than that.
    pub fn watch_native(&self, args: &RecvArgs) -> Box<Prepared> {
        let info = types::info(self.env.abi, args.datatype);
        let capacity = info.map_or(0, |info| info.bytes(args.count.max(0)));
        // SAFETY: no bytes: it may be any memory.
        let landed = unsafe { Lent::new(args.buffer.cast(), 0) };
        Box::new(Prepared::new(
            self.env.abi,
            args,
            capacity,
            landed,
            Target::LeftToMpi,
        ))
    }

    fn is_off_node(&self, comm: Comm, source: c_int) -> bool {
        let identity = comms::identity(self.env.abi, comm);
        identity
            .and_then(|id| id.world_rank(source))
            .is_some_and(|world| self.env.node.proves_off_node(world))
    }

    fn layout(&self, args: &RecvArgs) -> Result<Arc<Layout>, c_int> {
        types::layout(self.env.abi, args.datatype).ok_or_else(|| {
            let why = "the MPI library does not tell how its datatype is laid out";
            refuse(self.env.abi, args.comm, args.source, why)
        })
    }

    /// A receive into device memory, at least in part.
    fn plan_device(
        &self,
        args: &RecvArgs,
        info: &TypeInfo,
        capacity: u64,
        place: Place,
    ) -> Result<Plan, c_int> {
        self.use_device();
        if self.env.cuda_aware && self.is_off_node(args.comm, args.source) {
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
                shape: Shape::Runs(args.buffer.addr() as u64, self.layout(args)?),
            },
            Place::Several(layout) => {
                // SAFETY: the program's buffer, as its datatype has it.
                Target::Several(unsafe { LentRuns::new(args.buffer, layout, capacity) })
            }
            Place::Host(_) => return Ok(Plan::Native),
        };
        self.land(args, capacity, target)
    }

    /// A receive into a landing range that has room for an RTS. A natively truncated RTS could not be read,
    /// and not every library then tells how long the message was.
    fn land(&self, args: &RecvArgs, capacity: u64, target: Target) -> Result<Plan, c_int> {
        let mut prepared = Prepared::new(self.env.abi, args, capacity, Lent::NONE, target);
        prepared.receive.room = capacity.max(RTS_BYTES as u64);
        prepared.is_to_land = true;
        self.by_bytes(args, prepared)
    }

    /// Posts it as bytes where it lands. An RTS is no whole number of elements of most other types, and MPICH
    /// 5 aborts on that.
    fn by_bytes(&self, args: &RecvArgs, mut prepared: Prepared) -> Result<Plan, c_int> {
        let abi = self.env.abi;
        let room = prepared.receive.room;
        prepared.is_of_bytes = true;
        if c_int::try_from(room).is_err() {
            prepared.long = Some(types::bytes_type(abi, room).ok_or_else(|| {
                let why = format!("the MPI library makes no datatype of {room} bytes");
                refuse(abi, args.comm, args.source, &why)
            })?);
        }
        Ok(Plan::Watched(Box::new(prepared)))
    }

    /// Posts a prepared receive by `post`, which gets its arguments and the place of the request.
    pub fn post_receive(
        &self,
        prepared: Box<Prepared>,
        post: impl FnOnce(&RecvArgs, Slot<'_, Request>) -> c_int,
    ) -> Result<usize, c_int> {
        self.note_activity();
        self.env.node.meet();
        // Under the lock, so that no probe counts while this receive takes its message unseen.
        self.post_locked(&mut self.core.lock(), prepared, post)
    }

    /// Call [`Node::meet`](crate::node::Node::meet) before: ranks that have come since this one was ready offer it
    /// nothing until then.
    fn post_locked(
        &self,
        core: &mut Core,
        mut prepared: Box<Prepared>,
        post: impl FnOnce(&RecvArgs, Slot<'_, Request>) -> c_int,
    ) -> Result<usize, c_int> {
        let abi = self.env.abi;
        if prepared.is_to_land {
            prepared.land(core, abi)?;
        }
        prepared.receive.cover();
        let is_posted = !prepared.receive.persistent;
        if is_posted {
            prepared.receive.life.transition(State::Offered);
        }
        // Before the native call, so that the sender finds it while it is being posted. Under the lock
        // nothing comes between.
        if let Some(posting) = prepared.receive.posting(abi).filter(|_| is_posted) {
            let known = core.match_early(&self.env, &posting, None);
            (prepared.receive.rtr, prepared.receive.early_match) = known;
        }
        let args = prepared.to_post(abi);
        let posted = OwnRequest::made(abi, |request| post(&args, request));
        let mut receive = prepared.receive;
        match posted {
            Ok(request) => receive.native = request,
            Err(code) => {
                if let Some(landing) = receive.landing.take() {
                    core.landings.give(landing);
                }
                if let Some(rtr) = receive.rtr {
                    self.env.node.own().withdraw(rtr);
                }
                return Err(code);
            }
        }
        core.serial += 1;
        receive.serial = core.serial;
        let id = core.receives.insert(receive);
        if is_posted {
            core.note_posted(&self.env, id);
            core.keep_apart(&self.env, id);
        }
        Ok(id)
    }

    /// Posts a prepared receive.
    pub fn post_irecv(&self, prepared: Box<Prepared>) -> Result<usize, c_int> {
        self.post_receive(prepared, native_irecv)
    }

    /// As [`Engine::post_irecv`], and gives the program the request.
    pub fn irecv(&self, prepared: Box<Prepared>, request: Slot<'_, Request>) -> c_int {
        self.note_activity();
        self.env.node.meet();
        let mut core = self.core.lock();
        match self.post_locked(&mut core, prepared, native_irecv) {
            Ok(id) => core.hand_out_receive(self.env.abi, id, request),
            Err(code) => code,
        }
    }
}

impl Prepared {
    fn new(abi: &Abi, args: &RecvArgs, capacity: u64, landed: Lent, target: Target) -> Prepared {
        Prepared {
            receive: Receive {
                from: Some((args.source, args.tag)),
                ..Receive::new(OwnRequest::null(abi), args.comm, capacity, landed, target)
            },
            args: *args,
            is_of_bytes: false,
            long: None,
            is_to_land: false,
        }
    }

    /// Takes the range in which it lands.
    fn land(&mut self, core: &mut Core, abi: &Abi) -> Result<(), c_int> {
        let receive = &mut self.receive;
        let Some(landing) = core.landings.take(receive.room) else {
            let why = format!("no address space for {} bytes", receive.room);
            return Err(refuse(abi, receive.comm, self.args.source, &why));
        };
        receive.landed = landing.first(receive.room);
        receive.landing = Some(landing);
        Ok(())
    }

    /// The arguments for the native call; source, tag and communicator are the program's.
    fn to_post(&self, abi: &Abi) -> RecvArgs {
        if !self.is_of_bytes {
            return self.args;
        }
        let (count, datatype) = match &self.long {
            Some(whole) => (1, whole.get()),
            None => (self.receive.room as i64, abi.byte),
        };
        // SAFETY: where it lands is room for as many bytes: the program's buffer, or a landing range.
        unsafe {
            self.args
                .with_payload(self.receive.landed.as_ptr().cast(), count, datatype)
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
fn refuse(abi: &Abi, comm: Comm, source: c_int, why: &str) -> c_int {
    let of = comms::sender(abi, comm, source);
    raise_told(abi, comm, &fault::refused(of, &why))
}
