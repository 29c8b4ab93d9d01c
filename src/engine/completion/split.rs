//! The requests of a call, sorted. The native ones are tested in an array of their own, and their statuses
//! and codes are merged with those of the engine.

use std::ffi::c_int;

use smallvec::SmallVec;

use super::{Look, Requests};
use crate::engine::core::{Core, Entry};
use crate::engine::Engine;
use crate::mpi::owned::OwnRequest;
use crate::mpi::several::{self, Part};
use crate::mpi::{Out, Outs, Request, StatusOut, Statuses};

/// A native function like `MPI_Testany`: the requests, the index of one, whether one is complete, its status.
pub(super) type AskAny = fn(Requests<'_>, Out<'_, c_int>, Out<'_, c_int>, StatusOut<'_>) -> c_int;

/// A native function like `MPI_Testsome`: the requests, how many are complete, their indices and statuses.
pub(super) type AskSome = fn(Requests<'_>, Out<'_, c_int>, Outs<'_, c_int>, Statuses<'_>) -> c_int;

/// The requests of a call, sorted.
pub(super) struct Split<'a> {
    /// (index, handle, entry) of those of the engine.
    pub(super) taken: SmallVec<[(usize, Request, Entry); 8]>,
    /// The native ones.
    pub(super) native: Part<'a>,
}

impl Split<'_> {
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
    pub(super) fn split_turned<'a>(&self, requests: Requests<'a>) -> Split<'a> {
        let mut core = self.core.lock();
        let mut split = self.split(&core, requests);
        core.turn = core.turn.wrapping_add(1);
        if !split.taken.is_empty() {
            let by = core.turn % split.taken.len();
            split.taken.rotate_left(by);
        }
        split
    }

    pub(super) fn split<'a>(&self, core: &Core, requests: Requests<'a>) -> Split<'a> {
        let abi = self.env.abi;
        let null = abi.normalize(abi.request_null);
        let mut split = Split {
            taken: SmallVec::new(),
            native: Part::new(requests),
        };
        for i in 0..requests.len() {
            let handle = requests.get(abi, i);
            if handle == null {
                continue;
            }
            match core.table.get(&handle) {
                Some(entry) => split.taken.push((i, handle, *entry)),
                None => split.native.push(i),
            }
        }
        split.native.close(abi);
        split
    }

    /// The first engine request that is ready. Says whether one is active if none is ready. A call that does
    /// not come back `polls`: then MPI is asked about each receive before the answer is that none is ready.
    pub(super) fn first_ready(
        &self,
        core: &mut Core,
        split: &Split<'_>,
        polls: bool,
        active: &mut bool,
    ) -> Option<(usize, Request, Entry)> {
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
        split: &mut Split<'_>,
        polls: bool,
        mut ready: impl FnMut(&mut Core, usize, Request, Entry),
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
    pub(super) fn any_native(
        &self,
        split: &mut Split<'_>,
        status: StatusOut<'_>,
        active: &mut bool,
        ask: AskAny,
    ) -> Option<(usize, c_int)> {
        let native = &mut split.native;
        if native.is_empty() {
            return None;
        }
        let abi = self.env.abi;
        let (mut at, mut flag) = (abi.undefined, 0);
        let code = ask(native.slots(), Out::of(&mut at), Out::of(&mut flag), status);
        if flag == 0 && code == abi.success {
            *active = true;
            return None;
        }
        let k = usize::try_from(at)
            .ok()
            .filter(|k| *k < native.len() && at != abi.undefined)?;
        native.put_back(abi, k);
        Some((native.indices()[k], code))
    }
}

/// Statuses and error codes of a multiple completion (MPI 4.1 section 3.7.5).
pub(super) struct Codes<'a> {
    engine: &'a Engine,
    statuses: Statuses<'a>,
    codes: Vec<(usize, c_int)>,
    native_failed: bool,
}

impl<'a> Codes<'a> {
    pub(super) fn new(engine: &'a Engine, statuses: Statuses<'a>) -> Codes<'a> {
        Codes {
            engine,
            statuses,
            codes: Vec::new(),
            native_failed: false,
        }
    }

    pub(super) fn status(&self, i: usize) -> StatusOut<'a> {
        self.statuses.get(self.engine.env.abi, i)
    }

    pub(super) fn note(&mut self, i: usize, code: c_int) {
        if code != self.engine.env.abi.success {
            self.codes.push((i, code));
        }
    }

    /// Null requests have empty statuses.
    pub(super) fn clear_empty(&self, requests: Requests<'_>, split: &Split<'_>) {
        let abi = self.engine.env.abi;
        let active = split.taken.len() + split.native.len();
        if self.statuses.is_ignored(abi) || active == requests.len() {
            return;
        }
        for i in 0..requests.len() {
            if requests.get(abi, i) == abi.normalize(abi.request_null) {
                OwnRequest::null(abi).wait(self.status(i));
            }
        }
    }

    /// Tests all native requests that are left. Once they are complete, none is left.
    pub(super) fn test_native_all(&mut self, split: &mut Split<'_>) {
        let native = &mut split.native;
        if native.is_empty() {
            return;
        }
        let abi = self.engine.env.abi;
        // A call that fails as a whole fills none.
        let mut own = vec![0; native.len() * abi.status_bytes];
        let statuses = Statuses::within(abi, &mut own, native.len());
        let mut flag = 0;
        let code = several::testall(native.slots(), Out::of(&mut flag), statuses);
        if flag == 0 && code == abi.success {
            return;
        }
        for k in 0..native.len() {
            let i = native.indices()[k];
            native.put_back(abi, k);
            self.take_status(i, statuses.get(abi, k), code);
        }
        self.native_failed |= code != abi.success;
        native.clear();
    }

    /// Tests the native requests by `ask`, which is `MPI_Testsome` or a similar function, and appends
    /// completed ones to `done`. True while one is active.
    pub(super) fn test_native_some(
        &mut self,
        split: &mut Split<'_>,
        done: &mut Vec<usize>,
        ask: AskSome,
    ) -> bool {
        let native = &mut split.native;
        if native.is_empty() {
            return false;
        }
        let abi = self.engine.env.abi;
        let count = native.len();
        let mut own = vec![0; count * abi.status_bytes];
        let statuses = Statuses::within(abi, &mut own, count);
        let (mut completed, mut at) = (0, vec![0 as c_int; count]);
        let indices = Outs::of(&mut at);
        let code = ask(native.slots(), Out::of(&mut completed), indices, statuses);
        if completed == abi.undefined {
            return false;
        }
        let completed = usize::try_from(completed).unwrap_or(0).min(count);
        for (k, from) in at.iter().take(completed).enumerate() {
            let from = *from as usize;
            native.put_back(abi, from);
            self.take_status(done.len(), statuses.get(abi, k), code);
            done.push(native.indices()[from]);
        }
        self.native_failed |= code != abi.success;
        true
    }

    /// The status of a native request that a call has completed, as status `i`. The call returned `code`.
    fn take_status(&mut self, i: usize, from: StatusOut<'_>, code: c_int) {
        let abi = self.engine.env.abi;
        let Some(from) = from.at(abi) else { return };
        if let Some(to) = self.status(i).at(abi) {
            abi.copy_status(from.seen(), to);
        }
        let error = abi.status_error(from.seen());
        if code == abi.err_in_status && error != abi.success {
            self.codes.push((i, error));
        }
    }

    /// The code of the call, of so many operations. If one has failed, every status gets its own code.
    pub(super) fn result(&self, count: usize) -> c_int {
        let abi = self.engine.env.abi;
        if self.codes.is_empty() && !self.native_failed {
            return abi.success;
        }
        for i in 0..count {
            let Some(status) = self.status(i).at(abi) else {
                break;
            };
            let own = self.codes.iter().find(|(at, _)| *at == i);
            let code = own.map_or(abi.success, |(_, code)| *code);
            abi.set_status_error(status, code);
        }
        abi.err_in_status
    }
}
