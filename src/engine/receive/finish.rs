//! The end of a receive towards the program: its request, status and errors. Also releases the sender of a
//! message that did not fit.

use std::ffi::{c_int, c_void};

use super::early_match::EarlyMatch;
use super::Work;
use crate::engine::core::{Core, Entry};
use crate::engine::native::{raise, raise_told};
use crate::engine::Env;
use crate::mpi::{native, Abi, Family, Handle, Status};
use crate::node::{Peer, SlotState, RTS_BYTES};
use crate::stats::{self, Counter};
use crate::transfer::life::State;
use crate::transfer::story;
use crate::transfer::stream::Stream;

impl Core {
    /// The status of a complete receive, which stays as it is.
    ///
    /// # Safety
    /// MPI may be called; `status` is the program's.
    pub(in crate::engine) unsafe fn peek_status(
        &self,
        env: &Env,
        id: usize,
        status: *mut c_void,
    ) -> c_int {
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

    /// Completes a receive towards the program: the native request, the status, errors. The caller removes
    /// its entry from the table.
    ///
    /// # Safety
    /// MPI may be called; the receive is complete; `status` is the program's.
    pub(in crate::engine) unsafe fn finish_receive(
        &mut self,
        env: &Env,
        id: usize,
        status: *mut c_void,
    ) -> c_int {
        let abi = env.abi;
        let mut own = Status::new();
        let is_ignored = abi.ignores_status(status);
        let status = if is_ignored { own.as_mut_ptr() } else { status };
        // SAFETY: the request is complete.
        let mut code = unsafe { self.complete_natively(env, id, status) };
        let receive = &mut self.receives[id];
        story::tell(receive.story());
        let (comm, length, own_code) = (receive.comm, receive.length, receive.code);
        let why = receive.why.take();
        if code != abi.success {
            // SAFETY: passed on.
            unsafe { self.release_truncated(env, id, code) };
        } else {
            if let Some(length) = length.filter(|_| !is_ignored) {
                // SAFETY: a filled status.
                unsafe { native::status_set_elements_x(status, abi.byte, length as _) };
            }
            if own_code != abi.success {
                // SAFETY: the program's communicator.
                code = unsafe {
                    match why {
                        Some(why) => raise_told(abi, comm, &why),
                        None => raise(comm, own_code),
                    }
                };
            }
        }
        self.dismiss(id);
        code
    }

    /// Has MPI complete a request that it has reported complete, and fills the status.
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
        // Use the status seen on arrival: MPICH 5 makes a persistent request inactive when its status is
        // asked for.
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

    /// The receive is over: it is forgotten, or made ready to be started again.
    fn dismiss(&mut self, id: usize) {
        if self.receives[id].freed {
            let mut native = self.receives[id].native;
            // SAFETY: an inactive persistent request that nobody else knows any more.
            unsafe { native::request_free(&raw mut native) };
        }
        if self.receives[id].persistent && !self.receives[id].freed {
            let receive = &mut self.receives[id];
            receive.end();
            receive.life.transition(State::Prepared);
            receive.work = Work::Nothing;
            receive.arrival = None;
            receive.length = None;
            (receive.code, receive.why, receive.of) = (0, None, None);
            (receive.parts, receive.reason) = (None, None);
            (receive.to_check, receive.guard) = (None, None);
            receive.early_match = EarlyMatch::No;
        } else {
            self.forget_receive(id);
        }
    }

    pub(in crate::engine) fn forget_receive(&mut self, id: usize) {
        self.awaited -= usize::from(self.awaits_rts(id));
        let mut receive = self.receives.remove(id);
        receive.end();
        if let Some(landing) = receive.landing.take() {
            self.landings.give(landing);
        }
    }

    /// Gives up a posted receive: cancels it, and it ends by itself.
    ///
    /// # Safety
    /// MPI may be called; the request is in nobody's hands.
    pub(in crate::engine) unsafe fn abandon(&mut self, env: &Env, id: usize) {
        let mut native = self.receives[id].native;
        // A receive that its sender already writes to is completed, not cancelled.
        if self.withdraw(env, id) {
            // SAFETY: the receive's own request, which is active.
            unsafe { native::cancel(&raw mut native) };
        }
        self.orphans.push((0, Entry::Receive(id)));
    }

    /// A native receive has failed. If that was an RTS that did not fit, its sender is released.
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
        if self.receives[id].room >= RTS_BYTES as u64 || env.abi.family != Family::OpenMpi {
            return;
        }
        if let Some(matched) = self.receives[id].matched {
            self.taken += u64::from(matched.release(env));
            return;
        }
        if let Some(stream) = self.stream_of(env, id, arrival.source, arrival.tag) {
            if arrival.bytes == RTS_BYTES as u64 {
                // Receives posted before may have taken earlier messages of the stream uncounted.
                // SAFETY: called from the program's threads only.
                unsafe { self.settle(env) };
                let sequence = self.received.take(stream);
                self.taken += u64::from(release(env, stream, sequence));
            }
        }
    }
}

/// While it lives, errors of a receive are returned and raised nowhere. MPICH raises them on MPI_COMM_WORLD
/// (version 5 on MPI_COMM_SELF), whatever the receive's communicator, as soon as the status of the request is
/// asked for.
pub(super) struct Quiet {
    abi: &'static Abi,
    handlers: [(Handle, Handle); 2],
}

impl Quiet {
    /// `None` with libraries that raise errors on the right communicator.
    ///
    /// # Safety
    /// MPI may be called.
    pub(super) unsafe fn enter(abi: &'static Abi) -> Option<Quiet> {
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
            // SAFETY: the reference that `enter` got, which is ours to free.
            unsafe {
                if self.abi.normalize(*handler) != return_only {
                    native::comm_set_errhandler(*comm, *handler);
                }
                native::errhandler_free(handler);
            }
        }
    }
}

/// Sends the ATS of the message with this number of a stream, if a slot holds it. Returns whether one did.
pub(in crate::engine) fn release(env: &Env, stream: Stream, sequence: u64) -> bool {
    find_slot(env, stream, sequence, |peer, slot, nonce| {
        peer.send_ats(slot, nonce)
    })
    .unwrap_or(false)
}

/// The slot that holds the message with this number of a stream, if it went by RTS.
pub(in crate::engine) fn find_slot<T>(
    env: &Env,
    stream: Stream,
    sequence: u64,
    found: impl FnOnce(&Peer, u32, u64) -> T,
) -> Option<T> {
    let peer = env.node.peer(stream.peer)?;
    let mut index = 0;
    while let Some(slot) = peer.slot(index) {
        if let Some(nonce) = slot.nonce() {
            let open = matches!(slot.state(nonce), Ok(SlotState::Posted | SlotState::Eager));
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
