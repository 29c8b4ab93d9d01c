//! The end of a receive towards the program: its request, status and errors. Also releases the sender of a
//! message that did not fit.

use std::ffi::c_int;

use super::early_match::EarlyMatch;
use super::Work;
use crate::engine::core::{Core, Entry};
use crate::engine::native::{raise, raise_told};
use crate::engine::Env;
use crate::mpi::owned::{OwnErrhandler, OwnRequest};
use crate::mpi::{native, Abi, Comm, Family, Out, Status, StatusAt, StatusOut, StatusRef};
use crate::node::{Peer, SlotState, RTS_BYTES};
use crate::stats::{self, Counter};
use crate::transfer::life::State;
use crate::transfer::story;
use crate::transfer::stream::Stream;

impl Core {
    /// The status of a complete receive, which stays as it is.
    pub(in crate::engine) fn peek_status(
        &self,
        env: &Env,
        id: usize,
        status: StatusOut<'_>,
    ) -> c_int {
        let receive = &self.receives[id];
        if let (Some(arrival), Some(status)) = (receive.arrival, status.at(env.abi)) {
            env.abi.copy_status(StatusRef::of(&arrival.status), status);
            if let Some(length) = receive.length {
                native::status_set_elements_x(status, env.abi.byte, length as _);
            }
        }
        env.abi.success
    }

    /// Completes a receive towards the program: the native request, the status, errors. The caller removes
    /// its entry from the table.
    pub(in crate::engine) fn finish_receive(
        &mut self,
        env: &Env,
        id: usize,
        status: StatusOut<'_>,
    ) -> c_int {
        let abi = env.abi;
        let mut own = Status::new();
        let is_ignored = status.is_ignored(abi);
        let status = status.or(abi, &mut own);
        let mut code = self.complete_natively(env, id, status);
        let receive = &mut self.receives[id];
        story::tell(receive.story());
        let (comm, length, own_code) = (receive.comm, receive.length, receive.code);
        let why = receive.why.take();
        if code != abi.success {
            self.release_truncated(env, id, code);
        } else {
            if let Some(length) = length.filter(|_| !is_ignored) {
                native::status_set_elements_x(status, abi.byte, length as _);
            }
            if own_code != abi.success {
                code = match why {
                    Some(why) => raise_told(abi, comm, &why),
                    None => raise(comm, own_code),
                };
            }
        }
        self.dismiss(id);
        code
    }

    /// Has MPI complete a request that it has reported complete, and fills the status.
    fn complete_natively(&mut self, env: &Env, id: usize, status: StatusAt<'_>) -> c_int {
        let receive = &mut self.receives[id];
        let Some(arrival) = receive
            .arrival
            .filter(|arrival| receive.persistent || arrival.code != env.abi.success)
        else {
            // The request is complete, so this does not block.
            return receive.native.wait(status.out());
        };
        // Use the status seen on arrival: MPICH 5 makes a persistent request inactive when its status is
        // asked for.
        let quiet = Quiet::enter(env.abi);
        let code = receive.native.wait(env.abi.no_status());
        drop(quiet);
        env.abi.copy_status(StatusRef::of(&arrival.status), status);
        if arrival.code == env.abi.success {
            code
        } else {
            raise(receive.comm, arrival.code)
        }
    }

    /// The receive is over: it is forgotten, or made ready to be started again.
    fn dismiss(&mut self, id: usize) {
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
            let is_freed = self.receives[id].freed;
            let native = self.forget_receive(id);
            if is_freed {
                // Inactive, and nobody else knows it any more.
                native.free();
            }
        }
    }

    /// Forgets it. Returns its request, which has ended unless it is persistent.
    pub(in crate::engine) fn forget_receive(&mut self, id: usize) -> OwnRequest {
        self.awaited -= usize::from(self.awaits_rts(id));
        let mut receive = self.receives.remove(id);
        receive.end();
        if let Some(landing) = receive.landing.take() {
            self.landings.give(landing);
        }
        receive.native
    }

    /// Gives up a posted receive: cancels it, and it ends by itself.
    pub(in crate::engine) fn abandon(&mut self, env: &Env, id: usize) {
        // A receive that its sender already writes to is completed, not cancelled.
        if self.withdraw(env, id) {
            self.native_of(id).cancel();
        }
        self.orphans
            .push((env.abi.request_null, Entry::Receive(id)));
    }

    /// A native receive has failed. If that was an RTS that did not fit, its sender is released.
    fn release_truncated(&mut self, env: &Env, id: usize, code: c_int) {
        let mut class = 0;
        native::error_class(code, Out::of(&mut class));
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
                self.settle(env);
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
    handlers: [(Comm, Option<OwnErrhandler>); 2],
}

impl Quiet {
    /// `None` with libraries that raise errors on the right communicator.
    pub(super) fn enter(abi: &'static Abi) -> Option<Quiet> {
        if abi.family == Family::OpenMpi {
            return None;
        }
        let handlers = [abi.comm_world, abi.comm_self].map(|comm| {
            let handler =
                OwnErrhandler::made(abi, |handler| native::comm_get_errhandler(comm, handler));
            native::comm_set_errhandler(comm, abi.errors_return);
            (comm, handler.ok())
        });
        Some(Quiet { abi, handlers })
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        for (comm, handler) in &self.handlers {
            let handler = handler.as_ref().map(OwnErrhandler::get);
            let other = handler.filter(|one| !self.abi.are_same(*one, self.abi.errors_return));
            if let Some(handler) = other {
                native::comm_set_errhandler(*comm, handler);
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
