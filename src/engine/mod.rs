//! The engine: matching, progress, and the helper thread.
//!
//! Everything mutable is in [`Core`], behind one lock. A thread of the program takes it for short steps that
//! never block; the helper thread, which makes no MPI call, takes it while no thread of the program is in the
//! engine.

mod args;
pub mod aside;
pub mod choice;
mod collective;
pub mod comms;
pub mod completion;
mod core;
mod counts;
mod early;
mod helper;
pub mod inquiry;
mod landing;
mod layout;
pub mod lifecycle;
mod lift;
pub mod matched;
mod native;
mod native_memory;
mod pace;
pub mod persistent;
mod place;
pub mod probe;
mod receive;
mod requests;
pub mod rtr;
mod scope;
mod send;
pub mod sendrecv;
mod statistics;
mod survey;
pub mod tracing;
pub mod types;
mod verify;
mod wait;

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::OnceLock;

use parking_lot::Mutex;

pub use self::args::{Mode, RecvArgs, RecvFields, SendArgs, SendFields};
pub use self::collective::{Held, Pointers, Start};
pub use self::core::Core;
pub use self::native::{
    native_imrecv, native_irecv, native_isend, native_mrecv, native_recv, native_recv_init,
    native_send, native_send_init,
};
pub use self::receive::{Plan, Prepared, Watch};
pub use self::scope::NativeScope;
pub use self::send::{Sorted, HOST_BYTES_MIN};

use crate::mpi::owned::OwnRequest;
use crate::mpi::Abi;
use crate::node::Readiness;
use crate::transfer;

/// What does not change between `MPI_Init` and `MPI_Finalize`.
pub struct Env {
    /// What transfers need of it.
    pub transfer: transfer::Env,
    /// The MPI library's ABI.
    pub abi: &'static Abi,
    /// The program may call MPI from several threads at once (MPI_THREAD_MULTIPLE).
    pub multiple: bool,
    /// The MPI library may be handed device pointers.
    pub cuda_aware: bool,
    /// The length of a message can be read from its status, without asking the MPI library.
    pub reads_lengths: bool,
    /// Messages of the program that the engine does not see.
    pub unseen: rtr::Unseen,
}

impl Deref for Env {
    type Target = transfer::Env;

    fn deref(&self) -> &transfer::Env {
        &self.transfer
    }
}

/// The engine of this process.
pub struct Engine {
    /// What does not change.
    pub env: Env,
    core: Mutex<Core>,
    /// A rank of this node uses device memory, so RTSs may be sent.
    live: AtomicBool,
    /// Threads of the program that are driving the engine now. The helper stays out of their way.
    driving: AtomicU32,
    /// Calls of the program in which the engine had a part. A helper that was woken waits until they pause.
    activity: AtomicU32,
    /// Threads of the program inside a native call that may block, begun when this rank was live.
    native: AtomicU32,
    /// Threads of the program inside a native call that was begun before this rank was live.
    native_before_live: AtomicU32,
    /// A request that never completes, to make the MPI library progress.
    progress: OnceLock<OwnRequest>,
    helper: helper::Handle,
}

static ENGINE: OnceLock<Engine> = OnceLock::new();

/// The engine, once `MPI_Init` has armed it.
#[inline]
pub fn engine() -> Option<&'static Engine> {
    ENGINE.get()
}

impl Engine {
    /// Whether RTSs may be on their way. From the first time that this is true, this rank takes part.
    #[inline]
    pub fn live(&self) -> bool {
        self.live.load(Ordering::Acquire) || (self.env.node.device_in_use() && self.go_live())
    }

    /// Whether this rank takes part already.
    #[inline]
    fn is_live(&self) -> bool {
        self.live.load(Ordering::SeqCst)
    }

    /// Takes part: starts the helper. Once no receive is pending in which an RTS could not be recognized,
    /// lets the peers know that they may send RTSs.
    #[cold]
    #[inline(never)]
    fn go_live(&self) -> bool {
        let mut core = self.core.lock();
        if self.live.load(Ordering::Acquire) {
            return true;
        }
        core.helper_runs = self.env.config.helper && self.helper.start();
        core.gpu.open_parcels(&self.env);
        self.live.store(true, Ordering::SeqCst);
        self.try_ready(&mut core);
        true
    }

    /// A device buffer was met.
    fn use_device(&self) {
        if !self.env.node.own().device_user() {
            self.env.node.announce_device_use();
        }
        self.live();
    }

    /// Raises the ready flag as soon as nothing forbids it.
    fn try_ready(&self, core: &mut Core) {
        if core.ready == Readiness::All || !self.is_live() {
            return;
        }
        if self.native_before_live.load(Ordering::SeqCst) != 0 {
            return;
        }
        core.take_over_all(&self.env);
        if !core.helper_runs || core.blind != 0 {
            return;
        }
        let ready = if core.blind_to_small == 0 {
            Readiness::All
        } else {
            Readiness::Long
        };
        if ready != core.ready && !core.counts_lost() {
            self.env.node.meet();
            core.ready = ready;
            self.env.node.own().set_ready(ready);
            log::debug!("ready for RTSs: {ready:?}");
        }
    }
}
