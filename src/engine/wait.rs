//! Waiting inside the engine.

use std::sync::atomic::Ordering;

use crate::cuda::clock_ns;
use crate::engine::core::HOUSE_CALLS;
use crate::engine::send::DRAINING_TESTS_MAX;
use crate::engine::{requests, Core, Engine};
use crate::mpi::native;
use crate::node::{Backoff, Segment};

/// Marks a thread of the program as driving the engine.
struct Driving<'a> {
    engine: &'a Engine,
    /// The helper was asleep when this began, and peers are told that they need not wake it.
    attends: bool,
    left: Left,
}

/// What there was to do when a thread gave the core back for the last time.
enum Left {
    /// It has not looked.
    Unknown,
    /// Nothing that a peer could want.
    Nothing,
    /// Something is under way: what the doorbell read then, and whether there was something to do at once.
    Some { bell: u32, owes: bool },
}

impl Driving<'_> {
    /// This thread is about to give the core back, and does nothing more.
    fn end(&mut self, core: &Core) {
        let env = &self.engine.env;
        // It may have fallen asleep meanwhile.
        if env.node.own().sleeps() {
            core.say_if_nothing_is_received(env);
        }
        // Another thread may post something meanwhile.
        self.left = if core.is_at_rest() && !env.multiple {
            Left::Nothing
        } else {
            // Read before the look: what comes after it has rung once more.
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
            // Before the last look: peers that ring from now on wake the helper.
            own.leave_unattended();
        }
        // All sequentially consistent, as is the helper's look at both: a helper that has seen a ring, and this thread still at
        // work, has left the ring to it, and it is seen here.
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

/// A thread that will soon wait in the engine: peers need not wake the helper before that. It looks at what
/// they have said when it waits, where this ends.
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
    /// Before a call posts what it then waits for.
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
        // A helper that is awake need not be woken, and to say so writes to a line that peers write to.
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
        if core.rounds % HOUSE_CALLS == 0 {
            core.keep_house(&self.env);
        }
        self.tidy(&mut core);
        (core.asked, core.passed_over) = (false, false);
        let result = step(self, &mut core);
        core.gpu.launch();
        self.try_ready(&mut core);
        if std::mem::take(&mut core.pump_wanted) {
            self.pump();
        }
        core.pace.end_test(clock_ns());
        driving.end(&core);
        result
    }

    /// Repeats `step` until it has a result, with progress of everything else in between. A step that waits for what
    /// the MPI library must bring tests a native request, or sets `pump_wanted`.
    pub(super) fn until<T>(&self, mut step: impl FnMut(&Engine, &mut Core) -> Option<T>) -> T {
        let mut driving = self.drive();
        let mut backoff = Backoff::new();
        let mut has_begun = false;
        loop {
            {
                let mut core = self.core.lock();
                // With a processor that others want it may be a while until this thread is back.
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
                        core.pump_wanted = false;
                        self.try_ready(&mut core);
                        driving.end(&core);
                        return result;
                    }
                    if std::mem::take(&mut core.pump_wanted) {
                        self.pump();
                        break;
                    }
                    // What has ended is mostly what this call waits for: the rest of a round can wait.
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

    /// Ends what ends by itself but needs an MPI call: freed requests, and values on their way.
    fn tidy(&self, core: &mut Core) {
        if !core.orphans.is_empty() {
            self.reap_orphans(core);
        }
        if !core.draining.is_empty() {
            core.test_draining(&self.env, DRAINING_TESTS_MAX);
        }
    }

    /// Lets the MPI library progress where no request of its own is being tested: the status of a generalized request
    /// that never completes is asked for. (A probe on MPI_COMM_SELF is not enough: MPICH 5 then looks at little else.)
    fn pump(&self) {
        let abi = self.env.abi;
        let mut flag = 0;
        let handle = *self.pump.get_or_init(|| {
            // SAFETY: the program's thread, inside an MPI call.
            unsafe { requests::start_generalized(abi) }.unwrap_or(abi.request_null)
        });
        // SAFETY: MPI is initialized while the engine is armed; the flag is a live local.
        unsafe { native::request_get_status(handle, &raw mut flag, abi.no_status()) };
    }

    /// Ends the request of [`Engine::pump`]: before MPI is finalized.
    pub(super) fn end_pump(&self) {
        if let Some(handle) = self
            .pump
            .get()
            .filter(|handle| **handle != self.env.abi.request_null)
        {
            // SAFETY: our own generalized request, used no more.
            unsafe { requests::drop_request(self.env.abi, *handle) };
        }
    }
}
