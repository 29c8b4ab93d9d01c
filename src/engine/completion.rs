//! Wait, Test and related calls over arrays that hold requests of the engine beside native ones.
//!
//! Native requests are completed by the library's own Test functions on a compacted array. Those of the
//! engine are looked at one by one. No handle changes before its operation is complete.

mod natively;
mod several;
mod split;
mod status;

use std::ffi::c_int;

use crate::engine::core::{Core, Entry};
use crate::engine::{Engine, Env, NativeScope};
use crate::mpi::{native, Out, Request, Slot, Slots, StatusOut};

/// The requests of a call, in the program's memory.
pub type Requests<'a> = Slots<'a, Request>;

/// State of an engine request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    Inactive,
    Pending,
    Ready,
}

impl Engine {
    /// What a request of the program is, if it is the engine's. To be asked by the thread that completes it.
    fn entry(&self, handle: Request) -> Option<Entry> {
        let mut core = self.core.lock();
        self.take_over_if_live(&mut core, handle);
        let entry = core.table.get(&handle).copied();
        if entry.is_none() {
            self.begin_native_test(core);
        }
        entry
    }

    /// Whether a request of the program is complete. If a send is not because its receiver has not come, the
    /// MPI library is made to progress after this step: the receiver may be waiting for that. A receive's own
    /// request has been tested.
    fn look(&self, core: &mut Core, entry: Entry) -> Look {
        let look = self.look_quietly(core, entry);
        let send = match entry {
            Entry::Receive(id) => core.companion_of(id),
            Entry::Send(id) => Some(id),
            Entry::Persistent(id) => core.persistents[id].active,
            Entry::Collective(_) => None,
        };
        // A send that completes by itself also ends sooner if its receiver finds its messages received: it
        // may be waiting for its own sends, as this rank is.
        let is_progressed = |send| core.awaits_receiver(send) || core.is_announced(&self.env);
        if look == Look::Pending && !core.progress_wanted {
            core.progress_wanted = send.is_some_and(is_progressed);
        }
        look
    }

    fn look_quietly(&self, core: &mut Core, entry: Entry) -> Look {
        let ready = match entry {
            Entry::Receive(id) if core.is_idle(id) => return Look::Inactive,
            Entry::Receive(id) => {
                let companion = core.companion_of(id);
                self.look_at_receive(core, id)
                    && companion.is_none_or(|send| self.look_at_send(core, send))
            }
            Entry::Send(id) => self.look_at_send(core, id),
            Entry::Persistent(id) => match core.persistents[id].active {
                Some(send) => self.look_at_send(core, send),
                None => return Look::Inactive,
            },
            Entry::Collective(id) if core.is_collective_active(id) => {
                core.is_collective_complete(&self.env, id)
            }
            Entry::Collective(_) => return Look::Inactive,
        };
        if ready {
            Look::Ready
        } else {
            Look::Pending
        }
    }

    /// Completes an engine request that is ready. Returns the handle to leave with the program, and a code.
    fn finish(
        &self,
        core: &mut Core,
        handle: Request,
        entry: Entry,
        status: StatusOut<'_>,
    ) -> (Request, c_int) {
        let env = &self.env;
        let null = env.abi.request_null;
        match entry {
            Entry::Receive(id) => {
                let sent = match core.take_companion(id) {
                    Some(send) => core.retire_send(env, send),
                    None => env.abi.success,
                };
                let persistent = core.is_persistent(id);
                if !persistent {
                    core.table.remove(&handle);
                }
                let received = core.finish_receive(env, id, status);
                (
                    if persistent { handle } else { null },
                    first_error(env, sent, received),
                )
            }
            Entry::Send(id) => {
                core.table.remove(&handle);
                let stands_for_null = core.sends[id].stands_for_null;
                let own = core.sends[id].handle.take();
                let code = core.retire_send(env, id);
                if let Some(own) = own {
                    core.requests.finish(env.abi, own, status);
                }
                if stands_for_null {
                    empty_null_status(env, status);
                }
                (null, code)
            }
            Entry::Persistent(id) => {
                let code = match core.persistents[id].active.take() {
                    Some(send) => core.retire_send(env, send),
                    None => env.abi.success,
                };
                if core.persistents[id].is_native {
                    core.table.remove(&handle);
                }
                core.persistents[id].empty(status);
                (handle, code)
            }
            Entry::Collective(id) => (handle, core.finish_collective(id, status)),
        }
    }

    /// Like [`Engine::finish`], also for an inactive persistent request, which gets an empty status.
    fn finish_or_empty(
        &self,
        core: &mut Core,
        handle: Request,
        entry: Entry,
        status: StatusOut<'_>,
    ) -> (Request, c_int) {
        match entry {
            Entry::Receive(id) if core.is_idle(id) => (handle, core.native_of(id).wait(status)),
            _ => self.finish(core, handle, entry, status),
        }
    }

    /// `MPI_Wait`.
    pub fn wait(&self, request: Slot<'_, Request>, status: StatusOut<'_>) -> c_int {
        let handle = request.read(self.env.abi);
        let scope = NativeScope::brief(self);
        let mut core = self.core.lock();
        self.take_over_if_live(&mut core, handle);
        if !core.table.contains_key(&handle) {
            let _inside = self.leave_to_helper(&core);
            drop(core);
            return self.one_natively(request, status, None, |status| {
                native::wait(request, status)
            });
        }
        drop(core);
        drop(scope);
        self.until(|engine, core| {
            let entry = *core.table.get(&handle)?;
            match engine.look(core, entry) {
                Look::Pending => None,
                Look::Ready | Look::Inactive => {
                    let (left, code) = engine.finish_or_empty(core, handle, entry, status);
                    request.write(engine.env.abi, left);
                    Some(code)
                }
            }
        })
    }

    /// `MPI_Test`.
    pub fn test(
        &self,
        request: Slot<'_, Request>,
        flag: Out<'_, c_int>,
        status: StatusOut<'_>,
    ) -> c_int {
        let handle = request.read(self.env.abi);
        let _scope = NativeScope::brief(self);
        let Some(entry) = self.entry(handle) else {
            return self.one_natively(request, status, Some(flag), |status| {
                native::test(request, flag, status)
            });
        };
        self.once(|engine, core| {
            let look = engine.look(core, entry);
            flag.write(c_int::from(look != Look::Pending));
            if look == Look::Pending {
                return engine.env.abi.success;
            }
            let (left, code) = engine.finish_or_empty(core, handle, entry, status);
            request.write(engine.env.abi, left);
            code
        })
    }
}

/// What a receive from MPI_PROC_NULL returns (MPI 4.1 section 3.10).
fn empty_null_status(env: &Env, status: StatusOut<'_>) {
    if let Some(status) = status.at(env.abi) {
        env.abi.set_status_source(status, env.abi.proc_null);
        env.abi.set_status_tag(status, env.abi.any_tag);
    }
}

/// The code of an operation that has two codes.
fn first_error(env: &Env, first: c_int, second: c_int) -> c_int {
    if first == env.abi.success {
        second
    } else {
        first
    }
}
