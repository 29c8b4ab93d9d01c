//! The requests of a call, sorted. The native ones are tested in an array of their own, and their statuses
//! and codes are merged with those of the engine.

use std::ffi::{c_int, c_void};

use smallvec::SmallVec;

use super::{Look, Requests, Statuses};
use crate::engine::core::{Core, Entry};
use crate::engine::Engine;
use crate::mpi::{native, Handle};

/// A native function on several requests. It takes their number, the array, two results, and statuses.
pub(super) type Ask = unsafe fn(c_int, *mut c_void, *mut c_int, *mut c_int, *mut c_void) -> c_int;

/// The requests of a call, sorted.
pub(super) struct Split {
    /// (index, handle, entry) of those of the engine.
    pub(super) taken: SmallVec<[(usize, Handle, Entry); 8]>,
    /// Indices of the native ones, and their handles in the ABI's layout.
    pub(super) native: Vec<usize>,
    pub(super) handles: Vec<Handle>,
}

impl Split {
    /// Prepares another round that begins with the next engine request: MPI may be asked about the first
    /// pending one only.
    pub(super) fn next(&mut self) {
        if !self.taken.is_empty() {
            self.taken.rotate_left(1);
        }
    }
}

impl Engine {
    /// Like [`Engine::split`], but each call begins with another of the engine's requests.
    pub(super) unsafe fn split_turned(&self, requests: Requests) -> Split {
        let mut core = self.core.lock();
        // SAFETY: passed on.
        let mut split = unsafe { self.split(&core, requests) };
        core.turn = core.turn.wrapping_add(1);
        if !split.taken.is_empty() {
            let by = core.turn % split.taken.len();
            split.taken.rotate_left(by);
        }
        split
    }

    pub(super) unsafe fn split(&self, core: &Core, requests: Requests) -> Split {
        let abi = self.env.abi;
        let null = abi.normalize(abi.request_null);
        let mut split = Split {
            taken: SmallVec::new(),
            native: Vec::new(),
            handles: Vec::new(),
        };
        for i in 0..requests.count {
            // SAFETY: the program's array has `count` handles.
            let handle = unsafe { abi.load(requests.array, i) };
            if handle == null {
                continue;
            }
            match core.table.get(&handle) {
                Some(entry) => split.taken.push((i, handle, *entry)),
                None => split.native.push(i),
            }
        }
        split.handles = vec![0; split.native.len()];
        for (k, i) in split.native.iter().enumerate() {
            // SAFETY: both arrays are long enough; a handle takes at most a word.
            unsafe {
                abi.store(
                    split.handles.as_mut_ptr().cast(),
                    k,
                    abi.load(requests.array, *i),
                )
            };
        }
        split
    }

    /// The first engine request that is ready. Says whether one is active if none is ready. A call that does
    /// not come back `polls`: then MPI is asked about each receive before the answer is that none is ready.
    pub(super) fn first_ready(
        &self,
        core: &mut Core,
        split: &Split,
        polls: bool,
        active: &mut bool,
    ) -> Option<(usize, Handle, Entry)> {
        let mut pass = |core: &mut Core, every: bool| {
            split.taken.iter().copied().find(|(_, _, entry)| {
                core.asked &= !every;
                let look = self.look(core, *entry);
                *active |= look == Look::Pending;
                look == Look::Ready
            })
        };
        let found = pass(core, false);
        if found.is_none() && polls && core.passed_over {
            return pass(core, true);
        }
        found
    }

    /// Calls `ready` for each engine request that is ready. True while one is active. MPI is asked about each
    /// receive if one of the requests is ready, and if the call `polls`.
    pub(super) fn each_ready(
        &self,
        core: &mut Core,
        split: &mut Split,
        polls: bool,
        mut ready: impl FnMut(&mut Core, usize, Handle, Entry),
    ) -> bool {
        let (mut active, mut found) = (false, false);
        let mut pass = |core: &mut Core, every: bool| {
            active = false;
            split.taken.retain(|(i, handle, entry)| {
                core.asked &= !every;
                match self.look(core, *entry) {
                    Look::Inactive => {}
                    Look::Pending => active = true,
                    Look::Ready => {
                        ready(core, *i, *handle, *entry);
                        found = true;
                        return false;
                    }
                }
                true
            });
            found
        };
        if (pass(core, false) || polls) && core.passed_over {
            pass(core, true);
        }
        active
    }

    /// The native request that `ask` names, which is `MPI_Testany` or a similar function. Says whether one is
    /// active if none is named.
    pub(super) unsafe fn any_native(
        &self,
        split: &mut Split,
        requests: Requests,
        status: *mut c_void,
        active: &mut bool,
        ask: Ask,
    ) -> Option<(usize, c_int)> {
        if split.native.is_empty() {
            return None;
        }
        let (abi, count) = (self.env.abi, split.native.len() as c_int);
        let (mut at, mut flag) = (abi.undefined, 0);
        // SAFETY: the compacted array is ours.
        let code = unsafe {
            ask(
                count,
                split.handles.as_mut_ptr().cast(),
                &raw mut at,
                &raw mut flag,
                status,
            )
        };
        if flag == 0 && code == abi.success {
            *active = true;
            return None;
        }
        let k = usize::try_from(at)
            .ok()
            .filter(|k| *k < split.native.len() && at != abi.undefined)?;
        // SAFETY: the program's array; the compacted one holds what the library left.
        unsafe {
            abi.store(
                requests.array,
                split.native[k],
                abi.load(split.handles.as_ptr().cast(), k),
            )
        };
        Some((split.native[k], code))
    }
}

/// Statuses and error codes of a multiple completion (MPI 4.1 section 3.7.5).
pub(super) struct Codes<'a> {
    engine: &'a Engine,
    statuses: Statuses,
    codes: Vec<(usize, c_int)>,
    native_failed: bool,
}

impl<'a> Codes<'a> {
    pub(super) fn new(engine: &'a Engine, _requests: Requests, statuses: Statuses) -> Codes<'a> {
        Codes {
            engine,
            statuses,
            codes: Vec::new(),
            native_failed: false,
        }
    }

    pub(super) unsafe fn status(&self, i: usize) -> *mut c_void {
        // SAFETY: the program's array of statuses.
        unsafe { self.engine.env.abi.status_at(self.statuses.0, i) }
    }

    pub(super) fn note(&mut self, i: usize, code: c_int) {
        if code != self.engine.env.abi.success {
            self.codes.push((i, code));
        }
    }

    /// Null requests have empty statuses.
    pub(super) unsafe fn clear_empty(&self, requests: Requests, split: &Split) {
        let abi = self.engine.env.abi;
        if abi.ignores_status(self.statuses.0)
            || split.taken.len() + split.native.len() == requests.count
        {
            return;
        }
        let null = abi.normalize(abi.request_null);
        for i in 0..requests.count {
            // SAFETY: the program's arrays; waiting for a null request fills an empty status.
            unsafe {
                if abi.load(requests.array, i) == null {
                    let mut request = abi.request_null;
                    native::wait(&raw mut request, self.status(i));
                }
            }
        }
    }

    /// Tests all native requests that are left. Once they are complete, none is left.
    pub(super) unsafe fn test_native_all(&mut self, split: &mut Split, requests: Requests) {
        if split.native.is_empty() {
            return;
        }
        let abi = self.engine.env.abi;
        let count = split.native.len();
        let mut own = vec![0u8; count * abi.status_bytes];
        let mut flag = 0;
        // SAFETY: arrays of our own, long enough; the program's arrays have an entry for every index.
        unsafe {
            let statuses = own.as_mut_ptr().cast::<c_void>();
            let code = native::testall(
                count as c_int,
                split.handles.as_mut_ptr().cast(),
                &raw mut flag,
                statuses,
            );
            if flag == 0 && code == abi.success {
                return;
            }
            for (k, i) in split.native.iter().enumerate() {
                abi.store(
                    requests.array,
                    *i,
                    abi.load(split.handles.as_ptr().cast(), k),
                );
                self.copy_status(*i, abi.status_at(statuses, k));
                if code == abi.err_in_status {
                    let error = abi.status_error(abi.status_at(statuses, k));
                    if error != abi.success {
                        self.codes.push((*i, error));
                    }
                }
            }
            self.native_failed |= code != abi.success;
        }
        split.native.clear();
        split.handles.clear();
    }

    /// Tests the native requests by `ask`, which is `MPI_Testsome` or a similar function, and appends
    /// completed ones to `done`. True while one is active.
    pub(super) unsafe fn test_native_some(
        &mut self,
        split: &mut Split,
        requests: Requests,
        done: &mut Vec<usize>,
        ask: Ask,
    ) -> bool {
        if split.native.is_empty() {
            return false;
        }
        let abi = self.engine.env.abi;
        let count = split.native.len();
        let mut own = vec![0u8; count * abi.status_bytes];
        let (mut completed, mut at) = (0, vec![0 as c_int; count]);
        // SAFETY: as in `test_native_all`.
        unsafe {
            let statuses = own.as_mut_ptr().cast::<c_void>();
            let array = split.handles.as_mut_ptr().cast();
            let code = ask(
                count as c_int,
                array,
                &raw mut completed,
                at.as_mut_ptr(),
                statuses,
            );
            if completed == abi.undefined {
                return false;
            }
            for (k, from) in at
                .iter()
                .take(usize::try_from(completed).unwrap_or(0))
                .enumerate()
            {
                let from = *from as usize;
                let i = split.native[from];
                abi.store(
                    requests.array,
                    i,
                    abi.load(split.handles.as_ptr().cast(), from),
                );
                let status = abi.status_at(statuses, k);
                self.copy_status(done.len(), status);
                if code == abi.err_in_status && abi.status_error(status) != abi.success {
                    self.codes.push((done.len(), abi.status_error(status)));
                }
                done.push(i);
            }
            self.native_failed |= code != abi.success;
        }
        true
    }

    unsafe fn copy_status(&self, i: usize, from: *const c_void) {
        let abi = self.engine.env.abi;
        if abi.ignores_status(self.statuses.0) {
            return;
        }
        // SAFETY: both are statuses of this ABI.
        unsafe {
            self.status(i)
                .cast::<u8>()
                .copy_from_nonoverlapping(from.cast(), abi.status_bytes)
        };
    }

    /// The code of the call. If one operation has failed, every status gets its own code.
    pub(super) unsafe fn result(&self, requests: Requests) -> c_int {
        let abi = self.engine.env.abi;
        if self.codes.is_empty() && !self.native_failed {
            return abi.success;
        }
        if !abi.ignores_status(self.statuses.0) {
            for i in 0..requests.count {
                let code = self
                    .codes
                    .iter()
                    .find(|(at, _)| *at == i)
                    .map_or(abi.success, |(_, code)| *code);
                // SAFETY: the program's statuses.
                unsafe { abi.set_status_error(self.status(i), code) };
            }
        }
        abi.err_in_status
    }
}
