//! Requests that are freed, cancelled, or looked at without being completed.

use std::ffi::c_int;

use super::split::Codes;
use super::{Look, Requests};
use crate::engine::core::{Core, Entry};
use crate::engine::{Engine, Env, NativeScope};
use crate::mpi::owned::OwnRequest;
use crate::mpi::{abi, native, several, Function, Out, Outs, Request, Slot, StatusOut, Statuses};

impl Engine {
    /// `MPI_Request_free`.
    pub fn free(&self, request: Slot<'_, Request>) -> c_int {
        let abi = self.env.abi;
        let handle = request.read(abi);
        let mut core = self.core.lock();
        core.take_over_one(&self.env, handle);
        let Some(entry) = core.table.remove(&handle) else {
            let standby = core.take_native_persistent(handle);
            drop(core);
            if let Some(send) = standby {
                request.write(abi, abi.request_null);
                return send.release(abi);
            }
            return native::request_free(request);
        };
        request.write(abi, abi.request_null);
        match entry {
            Entry::Receive(id) if core.is_idle(id) => return core.forget_receive(id).free(),
            Entry::Persistent(id) => {
                core.native_persistents.remove(&handle);
                let persistent = core.persistents.remove(id);
                if let Some(send) = persistent.active {
                    core.orphans.push((abi.request_null, Entry::Send(send)));
                }
                return persistent.release(abi);
            }
            Entry::Collective(id) if !core.is_collective_active(id) => {
                return core.free_collective(&self.env, id);
            }
            // An erroneous call (MPI 4.1 section 6.12): the collective is completed.
            Entry::Collective(_) => {}
            Entry::Receive(id) => core.set_transient(id),
            Entry::Send(_) => {}
        }
        core.orphans.push((handle, entry));
        self.reap_orphans(&mut core);
        abi.success
    }

    /// Completes requests that the program has freed, once their operations are complete.
    pub(in crate::engine) fn reap_orphans(&self, core: &mut Core) {
        let mut i = 0;
        while i < core.orphans.len() {
            let (handle, entry) = core.orphans[i];
            if self.look_quietly(core, entry) == Look::Pending {
                i += 1;
                continue;
            }
            core.orphans.swap_remove(i);
            match entry {
                Entry::Send(send) if handle == self.env.abi.request_null => {
                    core.retire_send(&self.env, send);
                }
                Entry::Collective(id) => {
                    core.free_collective(&self.env, id);
                }
                _ => {
                    self.finish(core, handle, entry, self.env.abi.no_status());
                }
            }
        }
    }

    /// `MPI_Cancel`. A receive is cancelled natively. An engine send cannot be cancelled (MPI 4.1 section
    /// 3.8.4 allows an implementation to complete it instead).
    pub fn cancel(&self, request: Slot<'_, Request>) -> c_int {
        let handle = request.read(self.env.abi);
        let is_completed_instead = {
            let mut core = self.core.lock();
            match core.table.get(&handle).copied() {
                Some(Entry::Send(_) | Entry::Persistent(_) | Entry::Collective(_)) => true,
                // Not if its sender already writes to it.
                Some(Entry::Receive(id)) => !core.withdraw(&self.env, id),
                None => false,
            }
        };
        if is_completed_instead {
            self.env.abi.success
        } else {
            native::cancel(request)
        }
    }

    /// `MPI_Request_get_status`. `natively` is the call itself.
    pub fn get_status(
        &self,
        request: Request,
        flag: Out<'_, c_int>,
        status: StatusOut<'_>,
        natively: impl FnOnce() -> c_int,
    ) -> c_int {
        let handle = self.env.abi.normalize(request);
        let _scope = NativeScope::brief(self);
        let Some(entry) = self.entry(handle) else {
            return natively();
        };
        self.once(|engine, core| {
            let look = engine.look(core, entry);
            flag.write(c_int::from(look != Look::Pending));
            engine.peek(core, entry, look, status)
        })
    }

    /// The status of an engine request that has been looked at: unchanged if it is pending, empty if it is
    /// inactive.
    fn peek(&self, core: &mut Core, entry: Entry, look: Look, status: StatusOut<'_>) -> c_int {
        match (look, entry) {
            (Look::Pending, _) => self.env.abi.success,
            (Look::Ready, Entry::Receive(id)) => core.peek_status(&self.env, id, status),
            // The status of a send says nothing, so that of a null request does as well.
            _ => empty(&self.env, status),
        }
    }

    /// `MPI_Request_get_status_any` (MPI 4.1 section 3.7.6).
    pub fn get_status_any(
        &self,
        requests: Requests<'_>,
        index: Out<'_, c_int>,
        flag: Out<'_, c_int>,
        status: StatusOut<'_>,
    ) -> c_int {
        let abi = self.env.abi;
        if Function::RequestGetStatusAny.available() {
            let _scope = NativeScope::brief(self);
            if let Some(_inside) = self.enter_if_native(requests, false) {
                return several::request_get_status_any(requests, index, flag, status);
            }
        }
        self.once(|engine, core| {
            let mut split = engine.split(core, requests);
            let mut active = false;
            let found = engine.any_native(&mut split, status, &mut active, native_any);
            let found = found.or_else(|| {
                let (i, _, entry) = engine.first_ready(core, &split, true, &mut active)?;
                Some((i, engine.peek(core, entry, Look::Ready, status)))
            });
            core.progress_wanted |= found.is_none() && active;
            flag.write(c_int::from(found.is_some() || !active));
            let (at, code) = match found {
                Some((i, code)) => (i as c_int, code),
                None if active => (abi.undefined, abi.success),
                // Made of other functions, this leaves no field unchanged, like a call that completes
                // several requests.
                None => {
                    let code = empty(&engine.env, status);
                    if let Some(status) = status.at(abi) {
                        abi.set_status_error(status, abi.success);
                    }
                    (abi.undefined, code)
                }
            };
            index.write(at);
            code
        })
    }

    /// `MPI_Request_get_status_all`.
    pub fn get_status_all(
        &self,
        requests: Requests<'_>,
        flag: Out<'_, c_int>,
        statuses: Statuses<'_>,
    ) -> c_int {
        let abi = self.env.abi;
        flag.write(1);
        for i in 0..requests.len() {
            let (mut one, status) = (0, statuses.get(abi, i));
            let own = Out::of(&mut one);
            let natively = || requests.status(abi, i, own, status);
            let code = self.get_status(requests.get(abi, i), own, status, natively);
            if code != abi.success {
                return code;
            }
            if one == 0 {
                flag.write(0);
            }
        }
        abi.success
    }

    /// `MPI_Request_get_status_some`.
    pub fn get_status_some(
        &self,
        requests: Requests<'_>,
        outcount: Out<'_, c_int>,
        indices: Outs<'_, c_int>,
        statuses: Statuses<'_>,
    ) -> c_int {
        let abi = self.env.abi;
        if Function::RequestGetStatusSome.available() {
            let _scope = NativeScope::brief(self);
            if let Some(_inside) = self.enter_if_native(requests, false) {
                return several::request_get_status_some(requests, outcount, indices, statuses);
            }
        }
        self.once(|engine, core| {
            let mut codes = Codes::new(engine, statuses);
            let mut done: Vec<usize> = Vec::new();
            let mut split = engine.split(core, requests);
            let mut active = codes.test_native_some(&mut split, &mut done, native_some);
            active |= engine.each_ready(core, &mut split, true, |core, i, _, entry| {
                let code = engine.peek(core, entry, Look::Ready, codes.status(done.len()));
                codes.note(done.len(), code);
                done.push(i);
            });
            core.progress_wanted |= done.is_empty() && active;
            let is_nothing = done.is_empty() && !active;
            outcount.write(if is_nothing {
                abi.undefined
            } else {
                done.len() as c_int
            });
            for (k, i) in done.iter().enumerate() {
                indices.write(k, *i as c_int);
            }
            codes.result(done.len())
        })
    }
}

/// The status of a null request.
fn empty(env: &Env, status: StatusOut<'_>) -> c_int {
    OwnRequest::null(env.abi).wait(status)
}

/// `MPI_Request_get_status_any` on native requests. If the library lacks it, they are asked about one by one,
/// and an inactive one counts as complete, because nothing tells it apart.
fn native_any(
    requests: Requests<'_>,
    index: Out<'_, c_int>,
    flag: Out<'_, c_int>,
    status: StatusOut<'_>,
) -> c_int {
    if Function::RequestGetStatusAny.available() {
        return several::request_get_status_any(requests, index, flag, status);
    }
    let Some(abi) = abi() else { return 0 };
    for i in 0..requests.len() {
        let code = requests.status(abi, i, flag, status);
        if code != abi.success || flag.read() != 0 {
            index.write(i as c_int);
            return code;
        }
    }
    abi.success
}

/// `MPI_Request_get_status_some` on native requests. Without it in the library, like [`native_any`].
fn native_some(
    requests: Requests<'_>,
    outcount: Out<'_, c_int>,
    indices: Outs<'_, c_int>,
    statuses: Statuses<'_>,
) -> c_int {
    if Function::RequestGetStatusSome.available() {
        return several::request_get_status_some(requests, outcount, indices, statuses);
    }
    let Some(abi) = abi() else { return 0 };
    let mut done = 0;
    for i in 0..requests.len() {
        let mut flag = 0;
        let status = statuses.get(abi, done);
        let code = requests.status(abi, i, Out::of(&mut flag), status);
        if code != abi.success {
            return code;
        }
        if flag != 0 {
            indices.write(done, i as c_int);
            done += 1;
        }
    }
    outcount.write(done as c_int);
    abi.success
}
