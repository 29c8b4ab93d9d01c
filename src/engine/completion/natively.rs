//! Calls without an engine request: they are passed on as they are, and the receives that they complete are
//! noted.

use std::ffi::{c_int, c_void};

use super::{Requests, Statuses};
use crate::engine::core::Core;
use crate::engine::{Engine, NativeScope};
use crate::mpi::{native, Handle, Status};

impl Engine {
    /// The scope of a call whose requests are all native, so that it may be passed on as it is. To be asked
    /// under a scope.
    pub(super) unsafe fn enter_if_native(
        &self,
        requests: Requests,
        blocks: bool,
    ) -> Option<NativeScope> {
        let mut core = self.core.lock();
        let nothing_taken = core.table.is_empty() && (core.early.is_empty() || !self.is_live());
        // SAFETY: passed on.
        if !nothing_taken && !unsafe { self.are_native(&mut core, requests) } {
            return None;
        }
        Some(match blocks {
            true => self.leave_to_helper(&core),
            false => {
                self.begin_native_test(core);
                NativeScope::UNSEEN
            }
        })
    }

    /// Whether none of the requests is the engine's, after it has taken over what it must.
    #[inline(never)]
    unsafe fn are_native(&self, core: &mut Core, requests: Requests) -> bool {
        let handles = (0..requests.count).map(|i| {
            // SAFETY: the program's array.
            unsafe { self.env.abi.load(requests.array, i) }
        });
        let are_native = |core: &Core| handles.clone().all(|one| !core.table.contains_key(&one));
        let is_native = are_native(core);
        // Beside engine requests, early receives become engine requests, too. Then everything that is native
        // there is just tested.
        if core.early.is_empty() || (is_native && !self.is_live()) {
            return is_native;
        }
        for handle in handles.clone() {
            core.take_over_one(&self.env, handle);
        }
        are_native(core)
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
        // SAFETY: passed on.
        let handle = unsafe { abi.read(request) };
        let Some(claim) = self.note_before_one(handle) else {
            return call(status);
        };
        let mut own = Status::new();
        let to = if abi.ignores_status(status) {
            own.as_mut_ptr()
        } else {
            status
        };
        let code = call(to);
        // SAFETY: the program's request and flag; the status is the program's or a local.
        unsafe {
            let is_done = flag.is_none_or(|flag| flag.read() != 0)
                && abi.read(request) == abi.normalize(abi.request_null);
            let status = is_done.then_some(to.cast_const());
            self.note_after_one(claim, status);
        }
        code
    }

    /// Calls a native completion function on the program's own array, and forgets the early receives that it
    /// completes: all of them, or the one whose index it writes to `only`, with the one status.
    pub(super) unsafe fn natively(
        &self,
        requests: Requests,
        statuses: Statuses,
        flag: Option<*mut c_int>,
        only: Option<*mut c_int>,
        call: impl FnOnce(*mut c_void) -> c_int,
    ) -> c_int {
        // SAFETY: passed on.
        let before = unsafe { self.note_before(requests.array, requests.count) };
        let Some(mut before) = before else {
            return call(statuses.0);
        };
        let abi = self.env.abi;
        let to = before.statuses(abi, statuses.0);
        let code = call(to);
        // SAFETY: the program's flag and index, its array, and statuses of that number.
        unsafe {
            let is_over = flag.is_none_or(|flag| flag.read() != 0);
            // MPI_UNDEFINED is negative.
            let only = only.map(|index| usize::try_from(index.read()).unwrap_or(usize::MAX));
            let null = abi.normalize(abi.request_null);
            let named = match only {
                _ if !is_over => 0..0,
                Some(i) if i < before.count() => i..i + 1,
                Some(_) => 0..0,
                None => 0..before.count(),
            };
            // A request whose handle is still there was not completed.
            let completed = named.filter(|i| abi.load(requests.array, *i) == null);
            let completed = completed.map(|i| {
                let at = if only.is_some() { 0 } else { i };
                (i, self.filled(to, at, code))
            });
            self.note_after(before, completed);
        }
        code
    }

    #[allow(
        clippy::too_many_arguments,
        reason = "the parameters of MPI's own call"
    )]
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
            if let Some(before) = before {
                // MPI_UNDEFINED is negative.
                let done = usize::try_from(outcount.read()).unwrap_or(0);
                let completed = (0..done.min(before.count())).map(|k| {
                    let i = indices.add(k).read() as usize;
                    (i, self.filled(to, k, code))
                });
                self.note_after(before, completed);
            }
            code
        }
    }

    /// The status of a request that a call has completed; the call returned `code`. A call that has failed as
    /// a whole has filled none.
    unsafe fn filled(&self, statuses: *mut c_void, i: usize, code: c_int) -> *const c_void {
        static NONE: Status = Status::new();
        let abi = self.env.abi;
        if code == abi.success || code == abi.err_in_status {
            // SAFETY: passed on.
            unsafe { abi.status_at(statuses, i) }
        } else {
            NONE.as_ptr()
        }
    }
}
