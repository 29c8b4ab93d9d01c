//! Calls without a request of the engine's: passed on as they are, and the receives that they complete are noted.

use std::ffi::{c_int, c_void};

use super::{Requests, Statuses};
use crate::engine::core::Core;
use crate::engine::early::Before;
use crate::engine::{Engine, NativeScope};
use crate::mpi::{native, Handle, Status};

impl Engine {
    /// The scope of a call of which all requests are native, so that it may be passed on as it is. Asked under a scope.
    pub(super) unsafe fn enter_if_native(
        &self,
        requests: Requests,
        blocks: bool,
    ) -> Option<NativeScope> {
        let core = self.core.lock();
        let is_native = core.table.is_empty()
            || (0..requests.count).all(|i| {
                // SAFETY: the program's array.
                let handle = unsafe { self.env.abi.load(requests.array, i) };
                !core.table.contains_key(&handle)
            });
        is_native.then(|| match blocks {
            true => self.leave_to_helper(&core),
            false => NativeScope::UNSEEN,
        })
    }

    /// As [`Engine::natively`] for one request.
    #[inline]
    pub(super) unsafe fn one_natively(
        &self,
        request: *mut Handle,
        status: *mut c_void,
        flag: Option<*mut c_int>,
        call: impl FnOnce(*mut c_void) -> c_int,
    ) -> c_int {
        let abi = self.env.abi;
        let Some(latest) = self.latest_watched() else {
            return call(status);
        };
        let mut own = Status::new();
        let to = if abi.ignores_status(status) {
            own.as_mut_ptr()
        } else {
            status
        };
        // SAFETY: the program's request and flag; the status is the program's or a local.
        unsafe {
            let handle = abi.read(request);
            let code = call(to);
            if flag.is_none_or(|flag| flag.read() != 0) {
                let mut core = self.core.lock();
                let now = abi.read(request);
                if now == abi.normalize(abi.request_null) || core.is_persistent_handle(now) {
                    core.note_completed(&self.env, handle, latest, to);
                }
            }
            code
        }
    }

    /// Calls a native completion function on the program's own array, and forgets the receives that it completes: all,
    /// or the one whose index it writes to `only`, with the one status.
    pub(super) unsafe fn natively(
        &self,
        requests: Requests,
        statuses: Statuses,
        flag: Option<*mut c_int>,
        only: Option<*mut c_int>,
        call: impl FnOnce(*mut c_void) -> c_int,
    ) -> c_int {
        // SAFETY: passed on.
        unsafe {
            let Some(mut before) = self.note_before(requests.array, requests.count) else {
                return call(statuses.0);
            };
            let to = before.statuses(self.env.abi, statuses.0);
            let code = call(to);
            if flag.is_none_or(|flag| flag.read() != 0) {
                match only {
                    Some(index) => self.note_only(&before, index.read(), to, code),
                    None => self.note_all(&before, requests, to, code),
                }
            }
            before.done();
            code
        }
    }

    pub(super) unsafe fn some_natively(
        &self,
        requests: Requests,
        outcount: *mut c_int,
        indices: *mut c_int,
        statuses: Statuses,
        block: bool,
        count: c_int,
    ) -> c_int {
        // SAFETY: passed on.
        unsafe {
            let mut before = self.note_before(requests.array, requests.count);
            let to = before.as_mut().map_or(statuses.0, |before| {
                before.statuses(self.env.abi, statuses.0)
            });
            let code = {
                if block {
                    native::waitsome(count, requests.array, outcount, indices, to)
                } else {
                    native::testsome(count, requests.array, outcount, indices, to)
                }
            };
            let Some(before) = before else { return code };
            let done = outcount.read();
            if done > 0 && done != self.env.abi.undefined {
                let mut core = self.core.lock();
                for k in 0..done as usize {
                    let i = indices.add(k).read() as usize;
                    self.note_one(&mut core, &before, i, self.env.abi.status_at(to, k), code);
                }
            }
            before.done();
            code
        }
    }

    unsafe fn note_only(&self, before: &Before, index: c_int, status: *mut c_void, code: c_int) {
        let Ok(i) = usize::try_from(index) else {
            return;
        };
        if i < before.count() && index != self.env.abi.undefined {
            // SAFETY: passed on.
            unsafe { self.note_one(&mut self.core.lock(), before, i, status, code) };
        }
    }

    unsafe fn note_all(
        &self,
        before: &Before,
        requests: Requests,
        statuses: *mut c_void,
        code: c_int,
    ) {
        let abi = self.env.abi;
        let null = abi.normalize(abi.request_null);
        let mut core = self.core.lock();
        for i in 0..before.count() {
            // SAFETY: the program's array, and statuses of that number.
            unsafe {
                // A request that is still there was not completed, or is persistent.
                let now = abi.load(requests.array, i);
                if now == null || core.is_persistent_handle(now) {
                    self.note_one(&mut core, before, i, abi.status_at(statuses, i), code);
                }
            }
        }
    }

    /// One of the requests of a completing call, which has returned `code`, is complete.
    #[inline]
    unsafe fn note_one(
        &self,
        core: &mut Core,
        before: &Before,
        i: usize,
        status: *mut c_void,
        code: c_int,
    ) {
        let abi = self.env.abi;
        let handle = before.handle(abi, i);
        // SAFETY: passed on; where the call has failed as a whole, it has filled no status.
        unsafe {
            if code == abi.success || code == abi.err_in_status {
                core.note_completed(&self.env, handle, before.latest(), status);
            } else {
                core.note_completed(&self.env, handle, before.latest(), Status::new().as_ptr());
            }
        }
    }
}
