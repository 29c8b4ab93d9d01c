//! Wait, Test and their kin over arrays in which requests of the engine's lie beside native ones.
//!
//! Native requests are completed by the library's own Test functions on a compacted array; those of the engine are
//! looked at one by one. No handle changes before its operation is complete.

use std::ffi::{c_int, c_void};

use crate::engine::core::{Core, Entry};
use crate::engine::early::Before;
use crate::engine::native::raise;
use crate::engine::requests::finish_request;
use crate::engine::{Engine, Env, NativeScope};
use crate::mpi::{native, Handle, Status};

/// The statuses of a call: one, or an array, or ignored.
#[derive(Clone, Copy)]
pub struct Statuses(pub *mut c_void);

/// The requests of a call, in the program's memory.
#[derive(Clone, Copy)]
pub struct Requests {
    array: *mut c_void,
    count: usize,
}

impl Requests {
    /// An array of `count` handles.
    pub fn new(array: *mut c_void, count: c_int) -> Requests {
        Requests {
            array,
            count: usize::try_from(count).unwrap_or(0),
        }
    }
}

/// State of a request of the engine's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    Inactive,
    Pending,
    Ready,
}

/// The requests of a call, sorted.
struct Split {
    /// (index, handle, entry) of those of the engine.
    taken: Vec<(usize, Handle, Entry)>,
    /// Indices of the native ones, and their handles in the ABI's layout.
    native: Vec<usize>,
    handles: Vec<Handle>,
}

/// What became of a multiple completion.
enum Outcome {
    /// No request was active.
    Nothing,
    /// These were completed.
    Completed,
}

impl Engine {
    /// Whether a request can be given to the MPI library as it is: this rank has no request of the engine's.
    pub(super) fn all_native(&self) -> bool {
        self.core.lock().table.is_empty()
    }

    /// Whether a request of the program's is complete. If a send is not because its receiver has not come, the MPI library
    /// is made to progress after this step: that may be what the receiver waits for. A receive's own request has been
    /// tested.
    fn look(&self, core: &mut Core, entry: Entry) -> Look {
        let look = self.look_quietly(core, entry);
        let send = match entry {
            Entry::Receive(id) => core.companion_of(id),
            Entry::Send(id) => Some(id),
            Entry::Persistent(id) => core.persistents[id].active,
        };
        core.pump_wanted |=
            look == Look::Pending && send.is_some_and(|send| core.awaits_receiver(send));
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
        };
        if ready {
            Look::Ready
        } else {
            Look::Pending
        }
    }

    /// Completes a request of the engine's that is ready. Returns the handle to leave with the program, and a code.
    ///
    /// # Safety
    /// MPI may be called; `status` is the program's.
    unsafe fn finish(
        &self,
        core: &mut Core,
        handle: Handle,
        entry: Entry,
        status: *mut c_void,
    ) -> (Handle, c_int) {
        let env = &self.env;
        let null = env.abi.request_null;
        // SAFETY: the operations are complete.
        unsafe {
            match entry {
                Entry::Receive(id) => {
                    if let Some(send) = core.take_companion(id) {
                        core.retire_send(env, send);
                    }
                    let persistent = core.is_persistent(id);
                    if !persistent {
                        core.table.remove(&handle);
                    }
                    let code = core.finish_receive(env, id, status);
                    (if persistent { handle } else { null }, code)
                }
                Entry::Send(id) => {
                    core.table.remove(&handle);
                    let stands_for_null = core.sends[id].stands_for_null;
                    let (comm, code) = core.retire_send(env, id);
                    let native = finish_request(env, handle, status);
                    if stands_for_null {
                        empty_null_status(env, status);
                    }
                    (null, raised(env, comm, code, native))
                }
                Entry::Persistent(id) => {
                    let mut code = env.abi.success;
                    if let Some(send) = core.persistents[id].active.take() {
                        let (comm, own) = core.retire_send(env, send);
                        code = raised(env, comm, own, code);
                    }
                    let mut request = handle;
                    native::wait(&raw mut request, status);
                    (handle, code)
                }
            }
        }
    }

    unsafe fn split(&self, core: &Core, requests: Requests) -> Split {
        let abi = self.env.abi;
        let null = abi.normalize(abi.request_null);
        let mut split = Split {
            taken: Vec::new(),
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

    /// `MPI_Wait`.
    ///
    /// # Safety
    /// The arguments are those of the program's call, here and below.
    pub unsafe fn wait(&self, request: *mut Handle, status: *mut c_void) -> c_int {
        // SAFETY: passed on.
        let handle = unsafe { self.env.abi.read(request) };
        let scope = NativeScope::enter();
        if !self.core.lock().table.contains_key(&handle) {
            // SAFETY: passed on.
            return unsafe {
                self.one_natively(request, status, None, |status| {
                    native::wait(request, status)
                })
            };
        }
        drop(scope);
        self.until(|engine, core| {
            let entry = *core.table.get(&handle)?;
            match engine.look(core, entry) {
                Look::Pending => None,
                Look::Ready | Look::Inactive => {
                    // SAFETY: passed on.
                    let (left, code) =
                        unsafe { engine.finish_or_empty(core, handle, entry, status) };
                    // SAFETY: the program's request.
                    unsafe { engine.env.abi.write(request, left) };
                    Some(code)
                }
            }
        })
    }

    /// As [`Engine::finish`], also for an inactive persistent request: an empty status.
    unsafe fn finish_or_empty(
        &self,
        core: &mut Core,
        handle: Handle,
        entry: Entry,
        status: *mut c_void,
    ) -> (Handle, c_int) {
        // SAFETY: passed on.
        unsafe {
            match entry {
                Entry::Receive(id) if core.is_idle(id) => {
                    let mut request = handle;
                    (handle, native::wait(&raw mut request, status))
                }
                _ => self.finish(core, handle, entry, status),
            }
        }
    }

    /// `MPI_Test`.
    ///
    /// # Safety
    /// As [`Engine::wait`].
    pub unsafe fn test(
        &self,
        request: *mut Handle,
        flag: *mut c_int,
        status: *mut c_void,
    ) -> c_int {
        // SAFETY: passed on.
        let handle = unsafe { self.env.abi.read(request) };
        let _scope = NativeScope::brief(self);
        let entry = self.core.lock().table.get(&handle).copied();
        let Some(entry) = entry else {
            // SAFETY: passed on.
            return unsafe {
                self.one_natively(request, status, Some(flag), |status| {
                    native::test(request, flag, status)
                })
            };
        };
        self.once(|engine, core| {
            let look = engine.look(core, entry);
            // SAFETY: the program's flag and request.
            unsafe {
                flag.write(c_int::from(look != Look::Pending));
                if look == Look::Pending {
                    return engine.env.abi.success;
                }
                let (left, code) = engine.finish_or_empty(core, handle, entry, status);
                engine.env.abi.write(request, left);
                code
            }
        })
    }

    /// `MPI_Waitall` and, with a flag, `MPI_Testall`.
    ///
    /// # Safety
    /// As [`Engine::wait`].
    pub unsafe fn all(
        &self,
        requests: Requests,
        flag: Option<*mut c_int>,
        statuses: Statuses,
    ) -> c_int {
        let count = requests.count as c_int;
        let scope = self.completing(flag.is_none());
        // SAFETY: passed on, here and below.
        unsafe {
            if self.is_native(requests) {
                return self.natively(requests, statuses, flag, None, |to| match flag {
                    None => native::waitall(count, requests.array, to),
                    Some(flag) => native::testall(count, requests.array, flag, to),
                });
            }
            drop(scope);
            match flag {
                None => self.wait_all(requests, statuses),
                Some(flag) => self.test_all(requests, flag, statuses),
            }
        }
    }

    unsafe fn wait_all(&self, requests: Requests, statuses: Statuses) -> c_int {
        let abi = self.env.abi;
        // SAFETY: passed on.
        let mut split = unsafe { self.split(&self.core.lock(), requests) };
        let mut codes = Codes::new(self, requests, statuses);
        // SAFETY: passed on.
        unsafe { codes.clear_empty(requests, &split) };
        self.until(|engine, core| {
            split.taken.retain(|(i, handle, entry)| {
                if engine.look(core, *entry) == Look::Pending {
                    return true;
                }
                // SAFETY: the program's arrays.
                unsafe {
                    let (left, code) =
                        engine.finish_or_empty(core, *handle, *entry, codes.status(*i));
                    abi.store(requests.array, *i, left);
                    codes.note(*i, code);
                }
                false
            });
            // SAFETY: the compacted array is ours, the others the program's.
            unsafe { codes.test_native_all(&mut split, requests) };
            (split.taken.is_empty() && split.native.is_empty()).then_some(())
        });
        // SAFETY: the program's statuses.
        unsafe { codes.result(requests) }
    }

    unsafe fn test_all(&self, requests: Requests, flag: *mut c_int, statuses: Statuses) -> c_int {
        let abi = self.env.abi;
        self.once(|engine, core| {
            // SAFETY: the program's arrays and flag, here and below.
            let mut split = unsafe { engine.split(core, requests) };
            let ready = split
                .taken
                .iter()
                .filter(|(_, _, entry)| engine.look(core, *entry) == Look::Pending)
                .count()
                == 0;
            let mut codes = Codes::new(engine, requests, statuses);
            // SAFETY: the program's arrays, index, flag and status.
            unsafe {
                codes.clear_empty(requests, &split);
                if ready {
                    codes.test_native_all(&mut split, requests);
                }
                if !ready || !split.native.is_empty() {
                    core.pump_wanted = true;
                    flag.write(0);
                    return abi.success;
                }
                for (i, handle, entry) in std::mem::take(&mut split.taken) {
                    let (left, code) = engine.finish_or_empty(core, handle, entry, codes.status(i));
                    abi.store(requests.array, i, left);
                    codes.note(i, code);
                }
                flag.write(1);
                codes.result(requests)
            }
        })
    }

    /// `MPI_Waitany` and, with a flag, `MPI_Testany`.
    ///
    /// # Safety
    /// As [`Engine::wait`].
    pub unsafe fn any(
        &self,
        requests: Requests,
        index: *mut c_int,
        flag: Option<*mut c_int>,
        status: *mut c_void,
    ) -> c_int {
        let (abi, count) = (self.env.abi, requests.count as c_int);
        let scope = self.completing(flag.is_none());
        // SAFETY: passed on.
        if unsafe { self.is_native(requests) } {
            // SAFETY: passed on.
            return unsafe {
                self.natively(
                    requests,
                    Statuses(status),
                    flag,
                    Some(index),
                    |to| match flag {
                        None => native::waitany(count, requests.array, index, to),
                        Some(flag) => native::testany(count, requests.array, index, flag, to),
                    },
                )
            };
        }
        drop(scope);
        // SAFETY: passed on.
        let mut split = unsafe { self.split(&self.core.lock(), requests) };
        let mut step = |engine: &Engine, core: &mut Core| -> Option<c_int> {
            let mut active = false;
            // SAFETY: the program's arrays, index and status, here and below.
            if let Some((at, code)) =
                // SAFETY: the program's arrays, index, flag and status.
                unsafe { engine.any_native(&mut split, requests, status, &mut active) }
            {
                // SAFETY: the program's arrays, index, flag and status.
                unsafe { index.write(at as c_int) };
                return Some(code);
            }
            for (i, handle, entry) in &split.taken {
                match engine.look(core, *entry) {
                    Look::Inactive => {}
                    Look::Pending => active = true,
                    // SAFETY: the program's array and status; the operation is complete.
                    Look::Ready => unsafe {
                        let (left, code) = engine.finish(core, *handle, *entry, status);
                        abi.store(requests.array, *i, left);
                        index.write(*i as c_int);
                        return Some(code);
                    },
                }
            }
            if active {
                return None;
            }
            // SAFETY: the program's arrays, index, flag and status.
            unsafe {
                index.write(abi.undefined);
                let mut null = abi.request_null;
                native::wait(&raw mut null, status);
            }
            Some(abi.success)
        };
        match flag {
            None => self.until(step),
            Some(flag) => {
                let result = self.once(|engine, core| {
                    let result = step(engine, core);
                    if result.is_none() {
                        core.pump_wanted = true;
                    }
                    result
                });
                // SAFETY: the program's flag and index.
                unsafe {
                    flag.write(c_int::from(result.is_some()));
                    if result.is_none() {
                        index.write(abi.undefined);
                    }
                }
                result.unwrap_or(abi.success)
            }
        }
    }

    unsafe fn any_native(
        &self,
        split: &mut Split,
        requests: Requests,
        status: *mut c_void,
        active: &mut bool,
    ) -> Option<(usize, c_int)> {
        if split.native.is_empty() {
            return None;
        }
        let (abi, count) = (self.env.abi, split.native.len() as c_int);
        let (mut at, mut flag) = (abi.undefined, 0);
        // SAFETY: the compacted array is ours.
        let code = unsafe {
            native::testany(
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

    /// `MPI_Waitsome` (`block`) and `MPI_Testsome`.
    ///
    /// # Safety
    /// As [`Engine::wait`].
    pub unsafe fn some(
        &self,
        requests: Requests,
        outcount: *mut c_int,
        indices: *mut c_int,
        statuses: Statuses,
        block: bool,
    ) -> c_int {
        let (abi, count) = (self.env.abi, requests.count as c_int);
        let scope = self.completing(block);
        // SAFETY: passed on.
        if unsafe { self.is_native(requests) } {
            // SAFETY: passed on.
            return unsafe {
                self.some_natively(requests, outcount, indices, statuses, block, count)
            };
        }
        drop(scope);
        // SAFETY: passed on.
        let mut split = unsafe { self.split(&self.core.lock(), requests) };
        let mut codes = Codes::new(self, requests, statuses);
        let mut done: Vec<usize> = Vec::new();
        let mut step = |engine: &Engine, core: &mut Core| -> Option<Outcome> {
            // SAFETY: the program's arrays; statuses are filled in the order of `done`.
            let mut active = unsafe { codes.test_native_some(&mut split, requests, &mut done) };
            for (i, handle, entry) in &split.taken {
                match engine.look(core, *entry) {
                    Look::Inactive => {}
                    Look::Pending => active = true,
                    // SAFETY: as above.
                    Look::Ready => unsafe {
                        let (left, code) =
                            engine.finish(core, *handle, *entry, codes.status(done.len()));
                        abi.store(requests.array, *i, left);
                        codes.note(done.len(), code);
                        done.push(*i);
                    },
                }
            }
            match (done.is_empty(), active) {
                (false, _) => Some(Outcome::Completed),
                (true, false) => Some(Outcome::Nothing),
                (true, true) => None,
            }
        };
        let outcome = if block {
            Some(self.until(step))
        } else {
            self.once(|engine, core| {
                let outcome = step(engine, core);
                if outcome.is_none() {
                    core.pump_wanted = true;
                }
                outcome
            })
        };
        // SAFETY: the program's arrays have room for as many entries as there are requests.
        unsafe {
            outcount.write(match outcome {
                Some(Outcome::Nothing) => abi.undefined,
                _ => done.len() as c_int,
            });
            for (k, i) in done.iter().enumerate() {
                indices.add(k).write(*i as c_int);
            }
            codes.result(Requests {
                count: done.len(),
                ..requests
            })
        }
    }

    unsafe fn some_natively(
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

    /// The scope of a completing call, entered before it is decided who makes it.
    #[inline]
    fn completing(&self, blocks: bool) -> NativeScope {
        if blocks {
            NativeScope::enter()
        } else {
            NativeScope::brief(self)
        }
    }

    /// Whether all requests of a call are native, so that it may be passed on as it is. Asked under a scope.
    unsafe fn is_native(&self, requests: Requests) -> bool {
        let core = self.core.lock();
        core.table.is_empty()
            || (0..requests.count).all(|i| {
                // SAFETY: the program's array.
                let handle = unsafe { self.env.abi.load(requests.array, i) };
                !core.table.contains_key(&handle)
            })
    }

    /// Calls a native completion function on the program's own array, and forgets the receives that it completes: all,
    /// or the one whose index it writes to `only`, with the one status.
    unsafe fn natively(
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

    /// As [`Engine::natively`] for one request.
    #[inline]
    unsafe fn one_natively(
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
}

/// Statuses and error codes of a multiple completion (MPI 4.1 section 3.7.5).
struct Codes<'a> {
    engine: &'a Engine,
    statuses: Statuses,
    codes: Vec<(usize, c_int)>,
    native_failed: bool,
}

impl<'a> Codes<'a> {
    fn new(engine: &'a Engine, _requests: Requests, statuses: Statuses) -> Codes<'a> {
        Codes {
            engine,
            statuses,
            codes: Vec::new(),
            native_failed: false,
        }
    }

    unsafe fn status(&self, i: usize) -> *mut c_void {
        // SAFETY: the program's array of statuses.
        unsafe { self.engine.env.abi.status_at(self.statuses.0, i) }
    }

    fn note(&mut self, i: usize, code: c_int) {
        if code != self.engine.env.abi.success {
            self.codes.push((i, code));
        }
    }

    /// Null requests have empty statuses.
    unsafe fn clear_empty(&self, requests: Requests, split: &Split) {
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

    /// Tests all native requests that are left; once they are complete, none is left.
    unsafe fn test_native_all(&mut self, split: &mut Split, requests: Requests) {
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

    /// Tests the native requests; completed ones are appended to `done`. True while one is active.
    unsafe fn test_native_some(
        &mut self,
        split: &mut Split,
        requests: Requests,
        done: &mut Vec<usize>,
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
            let code = native::testsome(
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

    /// The code of the call. Where one operation has failed, every status gets its own code.
    unsafe fn result(&self, requests: Requests) -> c_int {
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

unsafe fn empty_null_status(env: &Env, status: *mut c_void) {
    if !env.abi.ignores_status(status) {
        // SAFETY: the program's status. What a receive from MPI_PROC_NULL returns (MPI 4.1 section 3.10).
        unsafe {
            env.abi.set_status_source(status, env.abi.proc_null);
            env.abi.set_status_tag(status, env.abi.any_tag);
        }
    }
}

/// Raises an error of the engine's; otherwise passes the native code on.
unsafe fn raised(env: &Env, comm: Handle, own: c_int, native: c_int) -> c_int {
    if own == env.abi.success {
        return native;
    }
    // SAFETY: the program's communicator.
    unsafe { raise(comm, own) }
}

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
    pub(super) fn reap_orphans(&self, core: &mut Core) {
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
}
