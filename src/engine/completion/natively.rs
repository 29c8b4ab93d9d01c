//! Calls without an engine request: they are passed on as they are, and the receives that they complete are
//! noted.

use std::ffi::c_int;

use super::Requests;
use crate::engine::core::Core;
use crate::engine::{Engine, NativeScope};
use crate::mpi::{Filled, Out, Outs, Request, Slot, Status, StatusOut, StatusRef, Statuses};

impl Engine {
    /// The scope of a call whose requests are all native, so that it may be passed on as it is. To be asked
    /// under a scope.
    pub(super) fn enter_if_native(
        &self,
        requests: Requests<'_>,
        blocks: bool,
    ) -> Option<NativeScope> {
        let mut core = self.core.lock();
        let nothing_taken = core.table.is_empty() && (core.early.is_empty() || !self.is_live());
        if !nothing_taken && !self.are_native(&mut core, requests) {
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
    fn are_native(&self, core: &mut Core, requests: Requests<'_>) -> bool {
        let handles = (0..requests.len()).map(|i| requests.get(self.env.abi, i));
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
    pub(super) fn one_natively(
        &self,
        request: Slot<'_, Request>,
        status: StatusOut<'_>,
        flag: Option<Out<'_, c_int>>,
        call: impl FnOnce(StatusOut<'_>) -> c_int,
    ) -> c_int {
        let abi = self.env.abi;
        let handle = request.read(abi);
        let Some(claim) = self.note_before_one(handle) else {
            return call(status);
        };
        let mut own = Status::new();
        let to = status.or(abi, &mut own);
        let code = call(to.out());
        let is_done = flag.is_none_or(|flag| flag.read() != 0)
            && request.read(abi) == abi.normalize(abi.request_null);
        self.note_after_one(claim, is_done.then_some(to.seen()));
        code
    }

    /// Calls a native completion function on the program's own array, and forgets the early receives that it
    /// completes: all of them, or the one whose index it writes to `only`, with the one status.
    pub(super) fn natively(
        &self,
        requests: Requests<'_>,
        statuses: Statuses<'_>,
        flag: Option<Out<'_, c_int>>,
        only: Option<Out<'_, c_int>>,
        call: impl FnOnce(Statuses<'_>) -> c_int,
    ) -> c_int {
        let Some(mut before) = self.note_before(requests) else {
            return call(statuses);
        };
        let abi = self.env.abi;
        let (noted, to) = before.split(abi, statuses);
        let code = call(to);
        let is_over = flag.is_none_or(|flag| flag.read() != 0);
        // MPI_UNDEFINED is negative.
        let only = only.map(|index| usize::try_from(index.read()).unwrap_or(usize::MAX));
        let null = abi.normalize(abi.request_null);
        let named = match only {
            _ if !is_over => 0..0,
            Some(i) if i < noted.count() => i..i + 1,
            Some(_) => 0..0,
            None => 0..noted.count(),
        };
        // A request whose handle is still there was not completed.
        let completed = named.filter(|i| requests.get(abi, *i) == null);
        let filled = self.filled(to, code);
        let completed = completed.map(|i| {
            let at = if only.is_some() { 0 } else { i };
            (i, filled.get(abi, at).unwrap_or(StatusRef::of(&NONE)))
        });
        self.note_after(noted, completed);
        before.keep();
        code
    }

    /// `MPI_Waitsome` or `MPI_Testsome`, which is `call`, likewise.
    #[inline(never)]
    pub(super) fn some_natively(
        &self,
        requests: Requests<'_>,
        outcount: Out<'_, c_int>,
        indices: Outs<'_, c_int>,
        statuses: Statuses<'_>,
        call: impl Fn(Requests<'_>, Out<'_, c_int>, Outs<'_, c_int>, Statuses<'_>) -> c_int,
    ) -> c_int {
        let abi = self.env.abi;
        let mut before = self.note_before(requests);
        let (noted, to) = match &mut before {
            Some(before) => {
                let (noted, to) = before.split(abi, statuses);
                (Some(noted), to)
            }
            None => (None, statuses),
        };
        let code = call(requests, outcount, indices, to);
        if let Some(noted) = noted {
            // MPI_UNDEFINED is negative.
            let done = usize::try_from(outcount.read()).unwrap_or(0);
            let completed = (0..done.min(noted.count())).map(|k| {
                let status = self.filled(to, code).get(abi, k);
                let i = indices.read(k) as usize;
                (i, status.unwrap_or(StatusRef::of(&NONE)))
            });
            self.note_after(noted, completed);
        }
        if let Some(before) = before {
            before.keep();
        }
        code
    }

    /// The statuses of a call that returned `code`. One that has failed as a whole has filled none.
    fn filled<'a>(&self, statuses: Statuses<'a>, code: c_int) -> Filled<'a> {
        let abi = self.env.abi;
        match code == abi.success || code == abi.err_in_status {
            true => statuses.seen(abi),
            false => Filled::NONE,
        }
    }
}

/// The status of a request that a call has completed without filling it.
static NONE: Status = Status::new();
