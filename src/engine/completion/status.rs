//! Requests that are freed, cancelled, or looked at without being completed.

use std::ffi::{c_int, c_void};

use super::split::Codes;
use super::{Look, Requests, Statuses};
use crate::engine::core::{Core, Entry};
use crate::engine::{Engine, Env, NativeScope};
use crate::mpi::{abi, native, Function, Handle};

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
        core.take_over_one(&self.env, handle);
        let Some(entry) = core.table.remove(&handle) else {
            let standby = core.take_native_persistent(handle);
            drop(core);
            if let Some(send) = standby {
                // SAFETY: the program's request, which is native and inactive or natively active.
                unsafe { abi.write(request, abi.request_null) };
                // SAFETY: MPI may be called.
                return unsafe { send.release(abi) };
            }
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
                    core.native_persistents.remove(&handle);
                    let persistent = core.persistents.remove(id);
                    if let Some(send) = persistent.active {
                        core.orphans.push((0, Entry::Send(send)));
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
            // SAFETY: complete; nobody wants its status.
            unsafe {
                match entry {
                    Entry::Send(send) if handle == 0 => {
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
    }

    /// `MPI_Cancel`. A receive is cancelled natively. An engine send cannot be cancelled (MPI 4.1 section
    /// 3.8.4 allows an implementation to complete it instead).
    ///
    /// # Safety
    /// As [`Engine::wait`].
    pub unsafe fn cancel(&self, request: *mut Handle) -> c_int {
        // SAFETY: passed on.
        unsafe {
            let handle = self.env.abi.read(request);
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
        let Some(entry) = self.entry(handle) else {
            // SAFETY: passed on.
            return unsafe { native::request_get_status(request, flag, status) };
        };
        self.once(|engine, core| {
            // SAFETY: the program's flag and status.
            unsafe {
                let look = engine.look(core, entry);
                flag.write(c_int::from(look != Look::Pending));
                engine.peek(core, entry, look, status)
            }
        })
    }

    /// The status of an engine request that has been looked at: unchanged if it is pending, empty if it is
    /// inactive.
    unsafe fn peek(&self, core: &mut Core, entry: Entry, look: Look, status: *mut c_void) -> c_int {
        // SAFETY: passed on.
        unsafe {
            match (look, entry) {
                (Look::Pending, _) => self.env.abi.success,
                (Look::Ready, Entry::Receive(id)) => core.peek_status(&self.env, id, status),
                // The status of a send says nothing, so that of a null request does as well.
                _ => empty(&self.env, status),
            }
        }
    }

    /// `MPI_Request_get_status_any` (MPI 4.1 section 3.7.6).
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
        if Function::RequestGetStatusAny.available() {
            let _scope = NativeScope::brief(self);
            // SAFETY: passed on.
            unsafe {
                if let Some(_inside) = self.enter_if_native(requests, false) {
                    let count = requests.count as c_int;
                    return native::request_get_status_any(
                        count,
                        requests.array,
                        index,
                        flag,
                        status,
                    );
                }
            }
        }
        self.once(|engine, core| {
            // SAFETY: the program's arrays, index, flag and status.
            unsafe {
                let mut split = engine.split(core, requests);
                let mut active = false;
                let found =
                    engine.any_native(&mut split, requests, status, &mut active, native_any);
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
                        if !abi.ignores_status(status) {
                            abi.set_status_error(status, abi.success);
                        }
                        (abi.undefined, code)
                    }
                };
                index.write(at);
                code
            }
        })
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
        if Function::RequestGetStatusSome.available() {
            let _scope = NativeScope::brief(self);
            // SAFETY: passed on.
            unsafe {
                if let Some(_inside) = self.enter_if_native(requests, false) {
                    let count = requests.count as c_int;
                    return native::request_get_status_some(
                        count,
                        requests.array,
                        outcount,
                        indices,
                        statuses.0,
                    );
                }
            }
        }
        self.once(|engine, core| {
            let mut codes = Codes::new(engine, requests, statuses);
            let mut done: Vec<usize> = Vec::new();
            // SAFETY: the program's arrays have room for as many entries as there are requests.
            unsafe {
                let mut split = engine.split(core, requests);
                let mut active =
                    codes.test_native_some(&mut split, requests, &mut done, native_some);
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
                    indices.add(k).write(*i as c_int);
                }
                codes.result(Requests {
                    count: done.len(),
                    ..requests
                })
            }
        })
    }
}

/// The status of a null request.
unsafe fn empty(env: &Env, status: *mut c_void) -> c_int {
    let mut null = env.abi.request_null;
    // SAFETY: passed on.
    unsafe { native::wait(&raw mut null, status) }
}

/// `MPI_Request_get_status_any` on native requests. If the library lacks it, they are asked about one by one,
/// and an inactive one counts as complete, because nothing tells it apart.
unsafe fn native_any(
    count: c_int,
    array: *mut c_void,
    index: *mut c_int,
    flag: *mut c_int,
    status: *mut c_void,
) -> c_int {
    // SAFETY: passed on.
    unsafe {
        if Function::RequestGetStatusAny.available() {
            return native::request_get_status_any(count, array, index, flag, status);
        }
        let Some(abi) = abi() else { return 0 };
        for i in 0..count {
            let handle = abi.load(array, i as usize);
            let code = native::request_get_status(handle, flag, status);
            if code != abi.success || flag.read() != 0 {
                index.write(i);
                return code;
            }
        }
        abi.success
    }
}

/// `MPI_Request_get_status_some` on native requests. Without it in the library, like [`native_any`].
unsafe fn native_some(
    count: c_int,
    array: *mut c_void,
    outcount: *mut c_int,
    indices: *mut c_int,
    statuses: *mut c_void,
) -> c_int {
    // SAFETY: passed on.
    unsafe {
        if Function::RequestGetStatusSome.available() {
            return native::request_get_status_some(count, array, outcount, indices, statuses);
        }
        let Some(abi) = abi() else { return 0 };
        let mut done = 0;
        for i in 0..count {
            let (handle, mut flag) = (abi.load(array, i as usize), 0);
            let status = abi.status_at(statuses, done);
            let code = native::request_get_status(handle, &raw mut flag, status);
            if code != abi.success {
                return code;
            }
            if flag != 0 {
                indices.add(done).write(i);
                done += 1;
            }
        }
        outcount.write(done as c_int);
        abi.success
    }
}
