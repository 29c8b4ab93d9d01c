//! The helper thread: keeps promises to peers while the program computes or is inside a native call.
//!
//! It makes no MPI call. It sleeps on this rank's doorbell, which peers ring, and works only while no thread
//! of the program drives the engine.

use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::thread::set_current_timer_slack;

use crate::engine::{engine, Engine, Env};
use crate::mpi::guard;
use crate::node::cpus::Home;
use crate::node::Readiness;
use crate::stats::{self, Counter};
use crate::transfer::thread;

/// Longest sleep with nothing to do. A missed wake-up is noticed at most this late.
const IDLE_SLEEP: Duration = Duration::from_millis(100);
/// Longest sleep while something is owed whose turn has not come.
const OWED_SLEEP_MAX: Duration = Duration::from_millis(1);
const OWED_SLEEP_MIN: Duration = Duration::from_micros(50);
/// How long a program must have made no call before a helper that was woken works in its place. Longer than a
/// program takes from one call to the next while it posts its messages.
const PAUSE_MIN: Duration = Duration::from_micros(20);
/// The same for a program that has gone on making calls.
const PAUSE_MAX: Duration = Duration::from_micros(500);
/// The same for a program that has done little else. Each end of a pause takes the core away from a program
/// that is bound to it. Two H100s, 4 KiB both ways, two ranks each bound to a core of a virtual machine: 12.5
/// us with pauses of 0.5 ms, 11.8 of 8 ms; with 20 us a round trip took 16 us instead of 9
/// (`docs/decisions/helper-lets-the-program-go-first.md`).
const PAUSE_BUSY_MAX: Duration = Duration::from_millis(4);
/// A program is busy if it makes a call this often on average. One that computes for a millisecond between
/// two calls is to be told apart.
const BUSY: Duration = Duration::from_micros(100);
/// How long one call may go on waiting before the helper sleeps until it is woken.
const WAIT_MAX: Duration = Duration::from_millis(20);
/// How long a program is taken to go on making calls for which the library stands aside.
const ASIDE_MAX: Duration = Duration::from_secs(1);
/// For so many wake-ups the helper does not count on a call that waits, once it came late because of that.
const DOUBTS: u32 = 16;
/// Rounds of yielding before the first sleep, while something is owed.
const YIELDS: u32 = 200;

/// The thread, from outside.
pub struct Handle {
    thread: Mutex<Option<JoinHandle<()>>>,
    stop: AtomicBool,
    panics: AtomicU8,
}

impl Handle {
    /// Not started.
    pub const fn new() -> Handle {
        Handle {
            thread: Mutex::new(None),
            stop: AtomicBool::new(false),
            panics: AtomicU8::new(0),
        }
    }

    /// Starts the thread; false if the system has none to give.
    pub fn start(&self) -> bool {
        let mut thread = self.thread.lock();
        if thread.is_some() {
            return true;
        }
        match thread::spawn("anabranch", run) {
            Ok(handle) => *thread = Some(handle),
            Err(error) => {
                log::warn!("no helper thread ({error}): peers send this rank plain messages only")
            }
        }
        thread.is_some()
    }

    /// Wakes it, if it sleeps.
    pub fn wake(&self, env: &Env) {
        env.node.own().wake_sleepers();
    }

    /// Stops it and waits until it has ended.
    pub fn stop(&self, env: &Env) {
        self.stop.store(true, Ordering::SeqCst);
        self.wake(env);
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

/// The helper gives up after so many panics, rather than fail for ever.
const PANICS_MAX: u8 = 8;

fn run() {
    let Some(engine) = engine() else { return };
    // Sleeps of this thread end within a microsecond of their time, not 50.
    let _ = set_current_timer_slack(NonZeroU64::new(1000));
    let home = Home::of_this_thread();
    loop {
        match std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| serve(engine, &home))) {
            Ok(()) => return,
            Err(_) => {
                stats::add(Counter::Panics, 1);
                log::error!("the helper thread met an internal error");
                if engine.helper.panics.fetch_add(1, Ordering::Relaxed) >= PANICS_MAX {
                    engine.env.node.own().set_ready(Readiness::No);
                    return;
                }
            }
        }
    }
}

/// How long the next pause is, after a pause in which the program made so many calls.
fn next_pause(pause: Duration, calls: u32) -> Duration {
    let is_busy = BUSY.saturating_mul(calls) >= pause;
    let most = if is_busy { PAUSE_BUSY_MAX } else { PAUSE_MAX };
    (pause * 2).min(most)
}

fn serve(engine: &Engine, home: &Home) {
    let own = engine.env.node.own();
    let mut ranks = 0;
    let (mut idle, mut doubts) = (0u32, 0u32);
    let mut may_be_late = false;
    while !engine.helper.stop.load(Ordering::SeqCst) {
        if idle == 0 {
            let now = engine.env.node.local_size();
            // Another rank may be bound to the processor on which this thread runs.
            if std::mem::replace(&mut ranks, now) != now {
                home.leave(&engine.env.processes());
            }
        }
        let seen = own.doorbell();
        let (moved, owed) = engine.help();
        let is_late = std::mem::take(&mut may_be_late);
        if moved {
            stats::add(Counter::HelperServed, 1);
            idle = 0;
            if is_late {
                doubts = DOUBTS;
            }
            std::thread::yield_now();
            continue;
        }
        idle = idle.saturating_add(1);
        if owed && idle < YIELDS {
            std::thread::yield_now();
            continue;
        }
        let sleep = if owed {
            let doublings = (idle - YIELDS).min(8);
            (OWED_SLEEP_MIN * (1 << doublings)).min(OWED_SLEEP_MAX)
        } else {
            IDLE_SLEEP
        };
        if own.wait_doorbell(seen, sleep) != seen {
            stats::add(Counter::HelperWakeups, 1);
            idle = 0;
            may_be_late = engine.leave_it_to_the_program(doubts == 0);
            doubts = doubts.saturating_sub(1);
        } else if !owed {
            engine.collect_garbage();
        }
    }
}

impl Engine {
    /// A thread of the program has done some of the engine's work.
    #[inline]
    pub(super) fn note_activity(&self) {
        // The count is only compared, so one that is lost between threads does no harm.
        let count = self.activity.load(Ordering::Relaxed);
        self.activity
            .store(count.wrapping_add(1), Ordering::Relaxed);
    }

    /// Waits while the program makes one call after the other: the program looks by itself, and the helper
    /// would only make it wait for the lock. Peers need not wake this thread meanwhile, which saves them a
    /// system call for each message. With `counts_on_it` the helper waits also while one call waits, as
    /// another call mostly follows. Returns whether it paused so long that what came meanwhile was kept
    /// waiting.
    fn leave_it_to_the_program(&self, counts_on_it: bool) -> bool {
        let (mut pause, mut silence) = (PAUSE_MIN, Duration::ZERO);
        while !self.helper.stop.load(Ordering::SeqCst) {
            let before = self.activity.load(Ordering::Relaxed);
            std::thread::sleep(pause);
            let calls = self.activity.load(Ordering::Relaxed).wrapping_sub(before);
            if calls != 0 {
                silence = Duration::ZERO;
            } else {
                silence += pause;
                // So that the helper sleeps as much as it otherwise would, in both turns of a program that
                // measures with and without the library.
                if guard::is_aside() && silence < ASIDE_MAX {
                    continue;
                }
                let waits = self.driving.load(Ordering::Acquire) != 0;
                let is_due = !waits && silence >= self.patience();
                if is_due || (waits && (!counts_on_it || silence > WAIT_MAX)) {
                    break;
                }
            }
            pause = next_pause(pause, calls);
        }
        pause > PAUSE_MIN
    }

    /// See [`Core::patience`].
    fn patience(&self) -> Duration {
        let core = self.core.try_lock();
        core.map_or(Duration::ZERO, |core| core.patience())
    }

    /// Nothing has happened for a while.
    fn collect_garbage(&self) {
        if let Some(mut core) = self.core.try_lock() {
            core.is_inside = self.is_inside();
            core.collect_garbage(&self.env);
        }
    }

    /// One round of the helper: whether anything moved, and whether anything is owed.
    fn help(&self) -> (bool, bool) {
        if self.driving.load(Ordering::SeqCst) != 0 {
            return (false, false);
        }
        let Some(mut core) = self.core.try_lock() else {
            return (false, true);
        };
        core.is_inside = self.is_inside();
        let moved = core.progress(&self.env);
        let owed = core.is_owing(&self.env);
        if !moved && !owed {
            core.say_if_nothing_is_received(&self.env);
        }
        (moved, owed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The pause after `pauses` pauses in a program that makes a call at these intervals.
    fn after(pauses: u32, mut pause: Duration, every: Duration) -> Duration {
        for _ in 0..pauses {
            let calls = pause.as_nanos() / every.as_nanos();
            pause = next_pause(pause, calls as u32);
        }
        pause
    }

    #[test]
    fn pauses_are_as_long_as_calls_are_dense() {
        let us = Duration::from_micros;
        assert_eq!(after(1, PAUSE_MIN, us(10)), 2 * PAUSE_MIN);
        // A pause is no longer than the program has gone on making calls.
        let mut sum = Duration::ZERO;
        for pauses in 0..20 {
            let pause = after(pauses, PAUSE_MIN, us(10));
            assert!(pause <= sum + PAUSE_MIN, "{pause:?} after {sum:?}");
            sum += pause;
        }
        assert_eq!(after(20, PAUSE_MIN, us(10)), us(4000));
        // A program that computes in between is found out as early as ever, whatever it did before.
        assert_eq!(after(20, PAUSE_MIN, us(150)), us(500));
        assert_eq!(after(20, PAUSE_MIN, us(3000)), us(500));
        assert_eq!(after(1, PAUSE_BUSY_MAX, us(3000)), us(500));
        assert_eq!(next_pause(PAUSE_BUSY_MAX, u32::MAX), PAUSE_BUSY_MAX);
    }
}
