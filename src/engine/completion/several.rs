//! Completion of several requests: all, any, some.

use std::ffi::{c_int, c_void};

use super::split::Codes;
use super::{Look, Requests, Statuses};
use crate::engine::core::Core;
use crate::engine::{Engine, NativeScope};
use crate::mpi::native;

/// What became of a multiple completion.
enum Outcome {
    /// No request was active.
    Nothing,
    /// These were completed.
    Completed,
}

impl Engine {
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
        let scope = NativeScope::brief(self);
        // SAFETY: passed on, here and below.
        unsafe {
            if let Some(_inside) = self.enter_if_native(requests, flag.is_none()) {
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

    #[inline(never)]
    unsafe fn wait_all(&self, requests: Requests, statuses: Statuses) -> c_int {
        let abi = self.env.abi;
        // SAFETY: passed on.
        let sort = |core: &Core| unsafe {
            let split = self.split(core, requests);
            let codes = Codes::new(self, requests, statuses);
            codes.clear_empty(requests, &split);
            (split, codes)
        };
        let mut sorted = None;
        self.until(|engine, core| {
            // Sent messages are on their way before the requests are sorted.
            let (split, codes) = sorted.get_or_insert_with(|| sort(core));
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
            unsafe { codes.test_native_all(split, requests) };
            let is_over = split.taken.is_empty() && split.native.is_empty();
            // SAFETY: the program's statuses.
            is_over.then(|| unsafe { codes.result(requests) })
        })
    }

    #[inline(never)]
    unsafe fn test_all(&self, requests: Requests, flag: *mut c_int, statuses: Statuses) -> c_int {
        let abi = self.env.abi;
        self.once(|engine, core| {
            // SAFETY: the program's arrays and flag, here and below.
            unsafe {
                let pending = |core: &mut Core| {
                    core.progress_wanted = true;
                    flag.write(0);
                    abi.success
                };
                if engine.is_one_pending(core, requests) {
                    return pending(core);
                }
                let mut split = engine.split(core, requests);
                let mut codes = Codes::new(engine, requests, statuses);
                codes.clear_empty(requests, &split);
                codes.test_native_all(&mut split, requests);
                if !split.native.is_empty() {
                    return pending(core);
                }
                for (i, handle, entry) in split.taken {
                    let (left, code) = engine.finish_or_empty(core, handle, entry, codes.status(i));
                    abi.store(requests.array, i, left);
                    codes.note(i, code);
                }
                flag.write(1);
                codes.result(requests)
            }
        })
    }

    /// Whether one of the engine's requests is not complete. No other is looked at then, because a program
    /// that computes pays for everything between two units of its work.
    unsafe fn is_one_pending(&self, core: &mut Core, requests: Requests) -> bool {
        (0..requests.count).any(|i| {
            // SAFETY: the program's array has `count` handles.
            let handle = unsafe { self.env.abi.load(requests.array, i) };
            let entry = core.table.get(&handle).copied();
            entry.is_some_and(|entry| self.look(core, entry) == Look::Pending)
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
        let count = requests.count as c_int;
        let scope = NativeScope::brief(self);
        // SAFETY: passed on.
        if let Some(_inside) = unsafe { self.enter_if_native(requests, flag.is_none()) } {
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
        unsafe { self.any_taken(requests, index, flag, status) }
    }

    /// Used if the engine may have one of them. A function of its own, here and in the other calls: calls on
    /// host memory pay for each value that a function keeps.
    #[inline(never)]
    unsafe fn any_taken(
        &self,
        requests: Requests,
        index: *mut c_int,
        flag: Option<*mut c_int>,
        status: *mut c_void,
    ) -> c_int {
        let abi = self.env.abi;
        // SAFETY: passed on.
        let mut split = unsafe { self.split_turned(requests) };
        let mut step = |engine: &Engine, core: &mut Core| -> Option<c_int> {
            split.next();
            let mut active = false;
            // SAFETY: the program's arrays, index and status, here and below.
            if let Some((at, code)) =
                // SAFETY: the program's arrays, index, flag and status.
                unsafe {
                    engine.any_native(&mut split, requests, status, &mut active, native::testany)
                }
            {
                // SAFETY: the program's arrays, index, flag and status.
                unsafe { index.write(at as c_int) };
                return Some(code);
            }
            let polls = flag.is_some();
            if let Some((i, handle, entry)) = engine.first_ready(core, &split, polls, &mut active) {
                // SAFETY: the program's array and status; the operation is complete.
                unsafe {
                    let (left, code) = engine.finish(core, handle, entry, status);
                    abi.store(requests.array, i, left);
                    index.write(i as c_int);
                    return Some(code);
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
                        core.progress_wanted = true;
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
        let count = requests.count as c_int;
        let scope = NativeScope::brief(self);
        // SAFETY: passed on.
        if let Some(_inside) = unsafe { self.enter_if_native(requests, block) } {
            // SAFETY: passed on.
            return unsafe {
                self.some_natively(requests, outcount, indices, statuses, block, count)
            };
        }
        drop(scope);
        // SAFETY: passed on.
        unsafe { self.some_taken(requests, outcount, indices, statuses, block) }
    }

    #[inline(never)]
    unsafe fn some_taken(
        &self,
        requests: Requests,
        outcount: *mut c_int,
        indices: *mut c_int,
        statuses: Statuses,
        block: bool,
    ) -> c_int {
        let abi = self.env.abi;
        // SAFETY: passed on.
        let mut split = unsafe { self.split_turned(requests) };
        let mut codes = Codes::new(self, requests, statuses);
        let mut done: Vec<usize> = Vec::new();
        let mut step = |engine: &Engine, core: &mut Core| -> Option<Outcome> {
            split.next();
            // SAFETY: the program's arrays; statuses are filled in the order of `done`.
            let mut active = unsafe {
                codes.test_native_some(&mut split, requests, &mut done, native::testsome)
            };
            let polls = !block || !done.is_empty();
            // SAFETY: as above.
            let ready = |core: &mut Core, i: usize, handle, entry| unsafe {
                let (left, code) = engine.finish(core, handle, entry, codes.status(done.len()));
                abi.store(requests.array, i, left);
                codes.note(done.len(), code);
                done.push(i);
            };
            active |= engine.each_ready(core, &mut split, polls, ready);
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
                    core.progress_wanted = true;
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
}
