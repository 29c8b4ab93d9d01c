//! Completion of several requests: all, any, some.

use std::ffi::c_int;

use super::split::Codes;
use super::{Look, Requests};
use crate::engine::core::Core;
use crate::engine::{Engine, NativeScope};
use crate::mpi::owned::OwnRequest;
use crate::mpi::{several, Out, Outs, StatusOut, Statuses};

/// What became of a multiple completion.
enum Outcome {
    /// No request was active.
    Nothing,
    /// These were completed.
    Completed,
}

impl Engine {
    /// `MPI_Waitall` and, with a flag, `MPI_Testall`.
    pub fn all(
        &self,
        requests: Requests<'_>,
        flag: Option<Out<'_, c_int>>,
        statuses: Statuses<'_>,
    ) -> c_int {
        let scope = NativeScope::brief(self);
        if let Some(_inside) = self.enter_if_native(requests, flag.is_none()) {
            return self.natively(requests, statuses, flag, None, |to| match flag {
                None => several::waitall(requests, to),
                Some(flag) => several::testall(requests, flag, to),
            });
        }
        drop(scope);
        match flag {
            None => self.wait_all(requests, statuses),
            Some(flag) => self.test_all(requests, flag, statuses),
        }
    }

    #[inline(never)]
    fn wait_all(&self, requests: Requests<'_>, statuses: Statuses<'_>) -> c_int {
        let abi = self.env.abi;
        let sort = |core: &Core| {
            let split = self.split(core, requests);
            let codes = Codes::new(self, statuses);
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
                let (left, code) = engine.finish_or_empty(core, *handle, *entry, codes.status(*i));
                requests.set(abi, *i, left);
                codes.note(*i, code);
                false
            });
            codes.test_native_all(split);
            let is_over = split.taken.is_empty() && split.native.is_empty();
            is_over.then(|| codes.result(requests.len()))
        })
    }

    #[inline(never)]
    fn test_all(
        &self,
        requests: Requests<'_>,
        flag: Out<'_, c_int>,
        statuses: Statuses<'_>,
    ) -> c_int {
        let abi = self.env.abi;
        self.once(|engine, core| {
            let pending = |core: &mut Core| {
                core.progress_wanted = true;
                flag.write(0);
                abi.success
            };
            if engine.is_one_pending(core, requests) {
                return pending(core);
            }
            let mut split = engine.split(core, requests);
            let mut codes = Codes::new(engine, statuses);
            codes.clear_empty(requests, &split);
            codes.test_native_all(&mut split);
            if !split.native.is_empty() {
                return pending(core);
            }
            for (i, handle, entry) in split.taken {
                let (left, code) = engine.finish_or_empty(core, handle, entry, codes.status(i));
                requests.set(abi, i, left);
                codes.note(i, code);
            }
            flag.write(1);
            codes.result(requests.len())
        })
    }

    /// Whether one of the engine's requests is not complete. No other is looked at then, because a program
    /// that computes pays for everything between two units of its work.
    fn is_one_pending(&self, core: &mut Core, requests: Requests<'_>) -> bool {
        (0..requests.len()).any(|i| {
            let handle = requests.get(self.env.abi, i);
            let entry = core.table.get(&handle).copied();
            entry.is_some_and(|entry| self.look(core, entry) == Look::Pending)
        })
    }

    /// `MPI_Waitany` and, with a flag, `MPI_Testany`.
    pub fn any(
        &self,
        requests: Requests<'_>,
        index: Out<'_, c_int>,
        flag: Option<Out<'_, c_int>>,
        status: StatusOut<'_>,
    ) -> c_int {
        let scope = NativeScope::brief(self);
        if let Some(_inside) = self.enter_if_native(requests, flag.is_none()) {
            let statuses = Statuses::one(status);
            return self.natively(requests, statuses, flag, Some(index), |to| {
                let to = to.get(self.env.abi, 0);
                match flag {
                    None => several::waitany(requests, index, to),
                    Some(flag) => several::testany(requests, index, flag, to),
                }
            });
        }
        drop(scope);
        self.any_taken(requests, index, flag, status)
    }

    /// Used if the engine may have one of them. A function of its own, here and in the other calls: calls on
    /// host memory pay for each value that a function keeps.
    #[inline(never)]
    fn any_taken(
        &self,
        requests: Requests<'_>,
        index: Out<'_, c_int>,
        flag: Option<Out<'_, c_int>>,
        status: StatusOut<'_>,
    ) -> c_int {
        let abi = self.env.abi;
        let mut split = self.split_turned(requests);
        let mut step = |engine: &Engine, core: &mut Core| -> Option<c_int> {
            split.next();
            let mut active = false;
            if let Some((at, code)) =
                engine.any_native(&mut split, status, &mut active, several::testany)
            {
                index.write(at as c_int);
                return Some(code);
            }
            let polls = flag.is_some();
            if let Some((i, handle, entry)) = engine.first_ready(core, &split, polls, &mut active) {
                let (left, code) = engine.finish(core, handle, entry, status);
                requests.set(abi, i, left);
                index.write(i as c_int);
                return Some(code);
            }
            if active {
                return None;
            }
            index.write(abi.undefined);
            OwnRequest::null(abi).wait(status);
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
                flag.write(c_int::from(result.is_some()));
                if result.is_none() {
                    index.write(abi.undefined);
                }
                result.unwrap_or(abi.success)
            }
        }
    }

    /// `MPI_Waitsome` (`block`) and `MPI_Testsome`.
    #[inline(always)]
    pub fn some(
        &self,
        requests: Requests<'_>,
        outcount: Out<'_, c_int>,
        indices: Outs<'_, c_int>,
        statuses: Statuses<'_>,
        block: bool,
    ) -> c_int {
        let scope = NativeScope::brief(self);
        if let Some(_inside) = self.enter_if_native(requests, block) {
            return match block {
                true => {
                    self.some_natively(requests, outcount, indices, statuses, several::waitsome)
                }
                false => {
                    self.some_natively(requests, outcount, indices, statuses, several::testsome)
                }
            };
        }
        drop(scope);
        self.some_taken(requests, outcount, indices, statuses, block)
    }

    #[inline(never)]
    fn some_taken(
        &self,
        requests: Requests<'_>,
        outcount: Out<'_, c_int>,
        indices: Outs<'_, c_int>,
        statuses: Statuses<'_>,
        block: bool,
    ) -> c_int {
        let abi = self.env.abi;
        let mut split = self.split_turned(requests);
        let mut codes = Codes::new(self, statuses);
        let mut done: Vec<usize> = Vec::new();
        let mut step = |engine: &Engine, core: &mut Core| -> Option<Outcome> {
            split.next();
            let mut active = codes.test_native_some(&mut split, &mut done, several::testsome);
            let polls = !block || !done.is_empty();
            let ready = |core: &mut Core, i: usize, handle, entry| {
                let (left, code) = engine.finish(core, handle, entry, codes.status(done.len()));
                requests.set(abi, i, left);
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
        outcount.write(match outcome {
            Some(Outcome::Nothing) => abi.undefined,
            _ => done.len() as c_int,
        });
        for (k, i) in done.iter().enumerate() {
            indices.write(k, *i as c_int);
        }
        codes.result(done.len())
    }
}
