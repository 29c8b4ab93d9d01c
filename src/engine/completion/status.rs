//! Requests that are freed, cancelled, or looked at without being completed.

use std::ffi::{c_int, c_void};

use super::{Look, Requests, Statuses};
use crate::engine::core::{Core, Entry};
use crate::engine::{Engine, NativeScope};
use crate::mpi::{native, Handle};

impl Engine {
    /// `MPI_Request_free`.
    ///
    /// # Safety
    /// As [`Engine::wait`].
    pub unsafe fn free(&self, request: *mut Handle) -> c_int {
        let abi = self.env.abi;
        // SAFETY: passed on.
        let handle = unsafe { abi.read(request) };
        let mut core = self.core.lock();
        core.take_over_one(abi, handle);
        core.partitioned.remove(&handle);
        let Some(entry) = core.table.remove(&handle) else {
            drop(core);
            // SAFETY: passed on.
            return unsafe { native::request_free(request) };
        };
        // SAFETY: the requests are ours, or natively complete.
        unsafe {
            abi.write(request, abi.request_null);
            match entry {
                Entry::Receive(id) if core.is_idle(id) => {
                    let mut native = core.native_of(id);
                    core.forget_receive(id);
                    return native::request_free(&raw mut native);
                }
                Entry::Persistent(id) => {
                    let persistent = core.persistents.remove(id);
                    if let Some(send) = persistent.active {
                        core.orphans.push((0, Entry::Send(send)));
                    }
                    return persistent.release(abi);
                }
                Entry::Receive(id) => core.set_transient(id),
                Entry::Send(_) => {}
            }
        }
        core.orphans.push((handle, entry));
        self.reap_orphans(&mut core);
        abi.success
    }

    /// Completes what the program has freed, once it is complete.
    pub(in crate::engine) fn reap_orphans(&self, core: &mut Core) {
        let mut i = 0;
        while i < core.orphans.len() {
            let (handle, entry) = core.orphans[i];
            if self.look_quietly(core, entry) == Look::Pending {
                i += 1;
                continue;
            }
            core.orphans.swap_remove(i);
            // SAFETY: complete; nobody wants its status.
            unsafe {
                match entry {
                    Entry::Send(send) if handle == 0 => {
                        core.retire_send(&self.env, send);
                    }
                    _ => {
                        self.finish(core, handle, entry, self.env.abi.no_status());
                    }
                }
            }
        }
    }

    /// `MPI_Cancel`. A receive is cancelled natively; a send of the engine's cannot be (MPI 4.1 section 3.8.4 allows
    /// an implementation to complete it instead).
    ///
    /// # Safety
    /// As [`Engine::wait`].
    pub unsafe fn cancel(&self, request: *mut Handle) -> c_int {
        // SAFETY: passed on.
        unsafe {
            let handle = self.env.abi.read(request);
            let entry = self.core.lock().table.get(&handle).copied();
            match entry {
                Some(Entry::Send(_) | Entry::Persistent(_)) => self.env.abi.success,
                _ => native::cancel(request),
            }
        }
    }

    /// `MPI_Request_get_status`.
    ///
    /// # Safety
    /// As [`Engine::wait`].
    pub unsafe fn get_status(
        &self,
        request: Handle,
        flag: *mut c_int,
        status: *mut c_void,
    ) -> c_int {
        let handle = self.env.abi.normalize(request);
        let _scope = NativeScope::brief(self);
        let entry = self.core.lock().table.get(&handle).copied();
        let Some(entry) = entry else {
            // SAFETY: passed on.
            return unsafe { native::request_get_status(request, flag, status) };
        };
        self.once(|engine, core| {
            let look = engine.look(core, entry);
            // SAFETY: the program's flag and status.
            unsafe {
                flag.write(c_int::from(look != Look::Pending));
                match (look, entry) {
                    (Look::Pending, _) => engine.env.abi.success,
                    (Look::Ready, Entry::Receive(id)) => core.peek_status(&engine.env, id, status),
                    // The status of a send says nothing: that of a null request is as good.
                    _ => {
                        let mut null = engine.env.abi.request_null;
                        native::wait(&raw mut null, status)
                    }
                }
            }
        })
    }

    /// `MPI_Request_get_status_any` (MPI 4.1 section 3.7.6), on single queries.
    ///
    /// # Safety
    /// As [`Engine::wait`].
    pub unsafe fn get_status_any(
        &self,
        requests: Requests,
        index: *mut c_int,
        flag: *mut c_int,
        status: *mut c_void,
    ) -> c_int {
        let abi = self.env.abi;
        let null = abi.normalize(abi.request_null);
        let mut active = false;
        // SAFETY: the program's arrays.
        unsafe {
            for i in 0..requests.count {
                let handle = abi.load(requests.array, i);
                if handle == null {
                    continue;
                }
                active = true;
                let code = self.get_status(handle, flag, status);
                if code != abi.success || flag.read() != 0 {
                    index.write(i as c_int);
                    return code;
                }
            }
            index.write(abi.undefined);
            flag.write(c_int::from(!active));
        }
        abi.success
    }

    /// `MPI_Request_get_status_all`.
    ///
    /// # Safety
    /// As [`Engine::wait`].
    pub unsafe fn get_status_all(
        &self,
        requests: Requests,
        flag: *mut c_int,
        statuses: Statuses,
    ) -> c_int {
        let abi = self.env.abi;
        // SAFETY: the program's arrays.
        unsafe {
            flag.write(1);
            for i in 0..requests.count {
                let mut one = 0;
                let code = self.get_status(
                    abi.load(requests.array, i),
                    &raw mut one,
                    abi.status_at(statuses.0, i),
                );
                if code != abi.success {
                    return code;
                }
                if one == 0 {
                    flag.write(0);
                }
            }
        }
        abi.success
    }

    /// `MPI_Request_get_status_some`.
    ///
    /// # Safety
    /// As [`Engine::wait`].
    pub unsafe fn get_status_some(
        &self,
        requests: Requests,
        outcount: *mut c_int,
        indices: *mut c_int,
        statuses: Statuses,
    ) -> c_int {
        let abi = self.env.abi;
        let null = abi.normalize(abi.request_null);
        let (mut active, mut done) = (false, 0usize);
        // SAFETY: the program's arrays.
        unsafe {
            for i in 0..requests.count {
                let handle = abi.load(requests.array, i);
                if handle == null {
                    continue;
                }
                active = true;
                let mut one = 0;
                let code = self.get_status(handle, &raw mut one, abi.status_at(statuses.0, done));
                if code != abi.success {
                    return code;
                }
                if one != 0 {
                    indices.add(done).write(i as c_int);
                    done += 1;
                }
            }
            outcount.write(if active { done as c_int } else { abi.undefined });
        }
        abi.success
    }
}
