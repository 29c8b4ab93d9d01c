//! Waiting inside the engine.

use std::sync::atomic::Ordering;

use parking_lot::MutexGuard;

use crate::cuda::clock_ns;
use crate::engine::core::GARBAGE_CALLS;
use crate::engine::send::DRAINING_TESTS_MAX;
use crate::engine::{requests, Core, Engine};
use crate::mpi::owned::OwnRequest;
use crate::mpi::Out;
use crate::node::{Backoff, Segment};

/// Marks a thread of the program as driving the engine.
struct Driving<'a> {
    engine: &'a Engine,
    /// The helper was asleep when this began, and peers have been told that they need not wake it.
    attends: bool,
    left: Left,
}

/// What there was to do when a thread last gave the core back.
enum Left {
    /// The thread has not looked.
    Unknown,
    /// Nothing that a peer could want.
    Nothing,
    /// Something is under way: the doorbell's value then, and whether there was something to do at once.
    Some { bell: u32, owes: bool },
}

impl Driving<'_> {
    /// This thread is about to give the core back, and does nothing afterwards.
    fn end(&mut self, core: &Core) {
        let env = &self.engine.env;
        // The helper may have fallen asleep meanwhile.
        if env.node.own().sleeps() {
            core.say_if_nothing_is_received(env);
        }
        // Another thread may post something meanwhile.
        self.left = if core.is_at_rest() && !env.multiple {
            Left::Nothing
        } else {
            // Read before the look: what comes after the look rings again.
            let bell = env.node.own().doorbell();
            let owes = core.is_owing(env);
            Left::Some { bell, owes }
        };
    }
}

impl Drop for Driving<'_> {
    fn drop(&mut self) {
        let Engine {
            env, core, driving, ..
        } = self.engine;
        let own = env.node.own();
        if self.attends {
            // Before the last look, so that peers that ring from now on wake the helper.
            own.leave_unattended();
        }
        // All of this is sequentially consistent, as is the helper's look at both. If the helper has seen a
        // ring and this thread still at work, it has left the ring to this thread, which sees it here.
        let is_last = driving.fetch_sub(1, Ordering::SeqCst) == 1;
        let owes = || match self.left {
            Left::Nothing => false,
            Left::Some { bell, owes } if own.doorbell() == bell => owes,
            Left::Some { .. } | Left::Unknown => core.lock().is_owing(env),
        };
        if is_last && owes() {
            self.engine.helper.wake(env);
        }
    }
}

/// A thread that will soon wait in the engine. Peers need not wake the helper until this ends, because the
/// thread looks at what they have said when it waits.
#[derive(Debug)]
pub(super) struct Attending<'a>(Option<&'a Segment>);

impl Drop for Attending<'_> {
    fn drop(&mut self) {
        if let Some(own) = self.0 {
            own.leave_unattended();
        }
    }
}

impl Engine {
    /// To be called before a call posts what it then waits for.
    pub(super) fn attend(&self) -> Attending<'_> {
        let own = self.env.node.own();
        let attends = own.sleeps();
        if attends {
            own.attend();
        }
        Attending(attends.then_some(own))
    }

    fn drive(&self) -> Driving<'_> {
        self.driving.fetch_add(1, Ordering::SeqCst);
        self.note_activity();
        let own = self.env.node.own();
        // A helper that is awake need not be woken. Saying so would write to a cache line that peers write
        // to.
        let attends = own.sleeps();
        if attends {
            own.attend();
        }
        Driving {
            engine: self,
            attends,
            left: Left::Unknown,
        }
    }

    /// One step under the lock, then progress of everything else.
    pub(super) fn once<T>(&self, step: impl FnOnce(&Engine, &mut Core) -> T) -> T {
        let mut driving = self.drive();
        let mut core = self.core.lock();
        core.is_inside = true;
        let now_ns = clock_ns();
        core.pace.begin_test(now_ns);
        self.env.node.own().set_computing(core.pace.is_apart());
        core.progress_of_test(&self.env, now_ns);
        if core.rounds % GARBAGE_CALLS == 0 {
            core.collect_garbage(&self.env);
        }
        self.tidy(&mut core);
        (core.asked, core.passed_over) = (false, false);
        let result = step(self, &mut core);
        core.gpu.launch();
        self.try_ready(&mut core);
        if std::mem::take(&mut core.progress_wanted) {
            self.progress();
        }
        core.pace.end_test(clock_ns());
        driving.end(&core);
        result
    }

    /// A call of the program is about to test requests of the MPI library alone. Runs one progress step if the
    /// engine has work pending; the step says nothing of whether the program computes.
    pub(super) fn begin_native_test(&self, mut core: MutexGuard<'_, Core>) {
        if !core.note_native_test(&self.env) {
            return;
        }
        drop(core);
        let mut driving = self.drive();
        let mut core = self.core.lock();
        core.is_inside = true;
        core.was_native_step_useful = core.progress(&self.env);
        self.tidy(&mut core);
        core.gpu.launch();
        self.try_ready(&mut core);
        core.progress_wanted = false;
        driving.end(&core);
    }

    /// Repeats `step` until it has a result, and makes everything else progress in between. A step that waits
    /// for something that the MPI library must bring tests a native request, or sets `progress_wanted`.
    pub(super) fn until<T>(&self, mut step: impl FnMut(&Engine, &mut Core) -> Option<T>) -> T {
        let mut driving = self.drive();
        let mut backoff = Backoff::new();
        let mut has_begun = false;
        loop {
            {
                let mut core = self.core.lock();
                // On a processor that others want, it may take a while until this thread is back.
                (core.is_inside, core.is_waiting) = (true, !backoff.is_yielding());
                if !std::mem::replace(&mut has_begun, true) {
                    core.pace.begin_wait();
                    self.env.node.own().set_computing(core.pace.is_apart());
                }
                if core.progress(&self.env) {
                    backoff.reset();
                }
                self.tidy(&mut core);
                let mut has_moved = false;
                loop {
                    (core.asked, core.passed_over) = (false, false);
                    let result = step(self, &mut core);
                    core.is_waiting &= result.is_none();
                    core.launch(&self.env);
                    if let Some(result) = result {
                        core.progress_wanted = false;
                        self.try_ready(&mut core);
                        driving.end(&core);
                        return result;
                    }
                    if std::mem::take(&mut core.progress_wanted) {
                        self.progress();
                        break;
                    }
                    // This call mostly waits for what has just ended, so the rest of a round can wait.
                    if has_moved || backoff.is_yielding() || !core.look_closer(&self.env) {
                        break;
                    }
                    has_moved = true;
                }
                core.is_waiting = false;
                if has_moved {
                    backoff.reset();
                    continue;
                }
            }
            backoff.snooze();
        }
    }

    /// Ends what ends by itself but needs an MPI call: freed requests, and sends whose payload MPI still
    /// carries.
    fn tidy(&self, core: &mut Core) {
        if !core.orphans.is_empty() {
            self.reap_orphans(core);
        }
        if !core.draining.is_empty() {
            core.test_draining(&self.env, DRAINING_TESTS_MAX);
        }
    }

    /// Lets the MPI library progress when no request of its own is being tested, by asking for the status of
    /// a generalized request that never completes. (A probe on MPI_COMM_SELF is not enough: MPICH 5 then
    /// looks at little else.)
    fn progress(&self) {
        let abi = self.env.abi;
        let mut flag = 0;
        let request = self
            .progress
            .get_or_init(|| requests::start_generalized(abi).unwrap_or(OwnRequest::null(abi)));
        request.status(Out::of(&mut flag), abi.no_status());
    }

    /// Ends the request of [`Engine::progress`]. Called before MPI is finalized.
    pub(super) fn end_progress(&self) {
        let abi = self.env.abi;
        if let Some(request) = self.progress.get().filter(|own| !own.is_null(abi)) {
            // SAFETY: nobody asks about it any more.
            requests::drop_request(abi, unsafe { OwnRequest::given(request.handle()) });
        }
    }
}
