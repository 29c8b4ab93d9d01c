//! Waiting: blocking calls, polls, the background thread, and when time may move.
//!
//! Time moves when every process of the node is parked in a blocking call, polls without change,
//! or has made no call that issues or takes up work for a while, and nobody has an ended
//! operation whose effects are not yet applied. Whoever waits looks whether that is so. A process
//! that has merely lost its core to others (no CPU time used, still runnable) is waited for, within
//! a bound.

use crate::driver::Driver;
use crate::job::{futex_wait, futex_wake, real_ns};
use crate::sched::pump;
use crate::shared::Proc;
use crate::state::State;
use std::sync::atomic::Ordering::*;

/// Polls without change after which a process counts as waiting.
const IDLE_POLLS: u32 = 3;
/// The same since some process has last done something, of which it may have told the others in memory that they share: a
/// process that polls several streams in turn looks there in between. For measurements it takes more: one that polls many
/// streams has seen only a part of its own after 8, and acts late.
pub const TURN_POLLS: u32 = 8;
/// Copies with so many bytes left to move are given the strict rule: with it 200,000 small ones took minutes.
const STRICT_BYTES_MIN: f64 = 65536.0;
/// The same where they are waited for by blocking calls. A rank that has received all of a long exchange waits for its peers to
/// say so too, and makes no call of the driver meanwhile; they say so, launch a kernel and wait for that.
const LONG_BYTES_MIN: f64 = 8.0 * 1024.0 * 1024.0;
/// Longest sleep of a waiter that has promised to watch the node.
const WATCH_NS: u64 = 200_000;
/// Sleep of a waiter while another watches.
const SLEEP_NS: u64 = 500_000;
/// CPU time without a call after which a process is no longer taken to be about to make one.
const QUIET_CPU_NS: u64 = 50_000;
/// CPU time within which a process that looks for messages again and again has looked at what another has just written.
const LOOK_CPU_NS: u64 = 30_000;
/// Turns in which a process that acts on what others tell it has polled at least once. One that has not, one that computes
/// or is in a barrier while others work, is not given time to look: 200,000 messages that nobody receives took minutes.
const ACTING_TURNS: u64 = 1000;
/// A process that got too little CPU time to look is waited for so long at most.
const LOOK_NS: u64 = STARVED_NS;
/// A process that got no core for this long is not waited for any more.
const STARVED_NS: u64 = 100_000_000;
/// Rounds without movement after which dead processes are looked for.
const REAP_ROUNDS: u32 = 20;

thread_local! {
    static THREAD: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

/// The kernel's number of the calling thread.
fn thread_id() -> u32 {
    THREAD.with(|t| {
        if t.get() == 0 {
            // Not libc's, which glibc 2.28 lacks.
            t.set(
                rustix::thread::gettid()
                    .as_raw_nonzero()
                    .get()
                    .unsigned_abs(),
            );
        }
        t.get()
    })
}

/// CPU time of a process (0: this one) without that of its background thread.
fn program_cpu(p: &Proc, pid: u32) -> Option<u64> {
    let worker = p.worker_cpu.load(Relaxed);
    crate::job::cpu_ns(pid).map(|cpu| cpu.saturating_sub(worker))
}

enum Time {
    /// Time moved, or there is work to take up.
    Moved,
    /// Some process is busy; look again after so many nanoseconds.
    Busy(u64),
    /// Nothing is under way.
    Idle,
}

/// A thread is inside a call of the driver.
pub struct Inside(&'static Driver);

impl Drop for Inside {
    fn drop(&mut self) {
        self.0.job.me().inside.fetch_sub(1, Relaxed);
    }
}

impl Driver {
    /// The calling thread is inside a call until what is returned is dropped.
    pub fn inside(&'static self) -> Inside {
        self.job.me().inside.fetch_add(1, Relaxed);
        Inside(self)
    }

    /// A call that issued or took up work.
    pub fn active(&self) {
        let me = self.job.me();
        me.active_at.store(real_ns(), Relaxed);
        me.active_cpu
            .store(program_cpu(me, 0).unwrap_or(0), Relaxed);
        me.active_thread.store(thread_id(), Relaxed);
        me.idle_polls.store(0, Relaxed);
        me.awake.store(0, Relaxed);
        // Whatever it has done, it may have told others of by now.
        let turn = self.job.shared().turn.fetch_add(1, Relaxed) + 1;
        me.base_turn.store(turn, Relaxed);
        me.base_cpu.store(0, Relaxed);
        me.told.store(1, Relaxed);
    }

    /// Finished operations were taken up, which took `ns`: whoever waits for one is about to act, also before it says so
    /// itself. So is one that does not wait, and has made no call as long as its copies were made: those of 256 MiB keep a
    /// processor for a tenth of a second.
    pub fn wake(&self, ns: u64) {
        let me = self.job.me();
        // Whoever polls several operations in turn is to have polled this one, too, before time moves on.
        self.job.shared().turn.fetch_add(1, Relaxed);
        me.told.store(1, Relaxed);
        let waits = me.parked.load(Relaxed) > 0 || me.idle_polls.load(Relaxed) >= IDLE_POLLS;
        if waits || ns >= self.quiet_ns / 2 {
            me.active_at.store(real_ns(), Relaxed);
            me.active_cpu
                .store(program_cpu(me, 0).unwrap_or(0), Relaxed);
        }
        if waits {
            me.awake.store(1, Relaxed);
        }
    }

    /// Lets the calling thread's virtual time pass by the cost of a call; returns the new time.
    ///
    /// Host code acts on what some host of the node knows. If time has gone beyond all of that, then it was taken to
    /// be waiting when it was not, and acts too late: that is counted.
    pub fn charge(&self, us: f64) -> u64 {
        let me = self.job.me();
        let now = self.job.now();
        let known = &self.job.shared().known;
        self.late(now.saturating_sub(known.load(Relaxed)));
        let now = me.host_time.load(Relaxed).max(now) + (us * 1000.0) as u64;
        me.host_time.store(now, Relaxed);
        known.fetch_max(now, Relaxed);
        now
    }

    fn late(&self, ns: u64) {
        if ns > 0 {
            self.job.shared().late.fetch_add(ns, Relaxed);
        }
    }

    /// The host code, which was waiting for it, now knows of something that happened at `time`. It could have known then,
    /// or when it was through with the calls that it had made before.
    pub fn woken(&self, time: u64) {
        let could = time.max(self.job.me().host_time.load(Relaxed));
        self.late(self.job.now().saturating_sub(could));
        self.learned(self.job.now());
    }

    /// The host code now knows of something that happened at `time`.
    pub fn learned(&self, time: u64) {
        self.job.me().host_time.fetch_max(time, Relaxed);
        self.job.shared().known.fetch_max(time, Relaxed);
    }

    /// Virtual time as this process's host code sees it.
    pub fn host_now(&self) -> u64 {
        self.job.me().host_time.load(Relaxed).max(self.job.now())
    }

    /// Wakes whoever takes up work for a process.
    pub fn notify(&self, slot: usize) {
        let proc = &self.job.shared().procs[slot];
        if proc.parked.load(SeqCst) > 0 {
            futex_wake(&proc.word);
        } else {
            futex_wake(&proc.worker_word);
        }
    }

    /// How long a process is still to be waited for. Where `is_strict`, one that makes no calls is given the time to look
    /// at what others may have told it.
    fn quiet_in(&self, slot: usize, now: u64, is_strict: bool) -> u64 {
        let p = &self.job.shared().procs[slot];
        let turn = self.job.shared().turn.load(Relaxed);
        let polls = if is_strict {
            self.has_polled(p)
        } else {
            p.idle_polls.load(Relaxed) >= IDLE_POLLS
        };
        let waits = p.parked.load(Relaxed) > 0 || polls;
        if waits && p.awake.load(Relaxed) == 0 {
            return 0;
        }
        let since = now.saturating_sub(p.active_at.load(Relaxed));
        if since < self.quiet_ns {
            return self.quiet_ns - since;
        }
        // Nothing is known of the threads of a process in another pid namespace.
        if !self.job.sees(p) {
            return 0;
        }
        // It may only have lost its core: then it is not quiet, just late.
        let pid = p.pid.load(Relaxed);
        let used = program_cpu(p, pid).map_or(u64::MAX, |cpu| {
            cpu.saturating_sub(p.active_cpu.load(Relaxed))
        });
        let over = used >= QUIET_CPU_NS || since >= self.quiet_ns + STARVED_NS;
        let is_runnable = || match crate::job::thread_state(pid, p.active_thread.load(Relaxed)) {
            Some('R') => true,
            Some('T' | 't') | None => false,
            // One that sleeps inside a call which does not block waits for a lock of the driver.
            Some(_) => p.inside.load(Relaxed) > p.parked.load(Relaxed),
        };
        if over || !is_runnable() {
            let acts = turn.saturating_sub(p.polled_turn.load(Relaxed)) <= ACTING_TURNS;
            return if !is_strict || !acts || self.has_looked(p, pid, turn, now) || !is_runnable() {
                0
            } else {
                20_000
            };
        }
        WATCH_NS
    }

    /// Whether a process has polled often enough in this turn to have seen what there is.
    fn has_polled(&self, p: &Proc) -> bool {
        p.turn_polls.load(Relaxed) >= self.turn_polls
            && p.polled_turn.load(Relaxed) == self.job.shared().turn.load(Relaxed)
    }

    /// Whether a process that makes no calls has had the time to see what another has last told it, by ways that are not
    /// the driver's: ranks of a job meet in shared memory.
    fn has_looked(&self, p: &Proc, pid: u32, turn: u64, now: u64) -> bool {
        let cpu = program_cpu(p, pid).unwrap_or(u64::MAX);
        if p.base_turn.swap(turn, Relaxed) != turn {
            p.base_cpu.store(cpu, Relaxed);
            p.base_at.store(now, Relaxed);
            return false;
        }
        // As long as it polls, its polls say how far it has got.
        let since = p.base_cpu.load(Relaxed).max(p.polled_cpu.load(Relaxed));
        cpu.saturating_sub(since) >= LOOK_CPU_NS
            || now.saturating_sub(p.base_at.load(Relaxed)) >= LOOK_NS
    }

    /// Whether a process with ended operations to take up has been stopped: it keeps nobody's GPU from going on then, and takes
    /// them up before it tells anybody of them.
    fn is_stopped(&self, p: &Proc, now: u64) -> bool {
        now.saturating_sub(p.unapplied_at.load(Acquire)) >= STARVED_NS
            && self.job.sees(p)
            && crate::job::stopped(p.pid.load(Relaxed))
    }

    /// Moves time to the next end of an operation if nobody is busy. `polls`: for one that polls, and does not wait.
    fn advance(&self, polls: bool) -> Time {
        let shared = self.job.shared();
        let me = self.job.slot;
        if self.closed.load(Acquire) {
            return Time::Idle;
        }
        if shared.procs[me].unapplied.load(Acquire) > 0 {
            return Time::Busy(20_000);
        }
        let real = real_ns();
        let mut body = self.job.lock();
        if body.active_len == 0 {
            return Time::Idle;
        }
        // Where all that is under way is waited for by blocking calls, those who made them have nothing to add; others that
        // they have told something before may have, which matters beside what takes long. And only what takes some time has
        // others beside it whose order tells.
        let is_strict = body.active[..body.active_len as usize].iter().any(|row| {
            let flow = &body.flows[usize::from(*row)];
            let proc = &shared.procs[usize::from(flow.proc)];
            let is_waited_for = proc.parked.load(Relaxed) != 0;
            let least = if is_waited_for {
                LONG_BYTES_MIN
            } else {
                STRICT_BYTES_MIN
            };
            flow.remaining >= least
        });
        if is_strict && polls && !self.has_polled(&shared.procs[me]) {
            return Time::Busy(20_000);
        }
        let mut busy = 0;
        for (slot, p) in shared.procs.iter().enumerate() {
            if p.pid.load(Acquire) == 0 {
                continue;
            }
            if p.unapplied.load(Acquire) > 0 && !self.is_stopped(p, real) {
                busy = busy.max(50_000);
            }
            // The caller itself waits, or it would not be here.
            if slot != me {
                busy = busy.max(self.quiet_in(slot, real, is_strict));
            }
        }
        if busy > 0 {
            return Time::Busy(busy);
        }
        let ended = body.ended();
        let now = crate::clock::advance(&self.machine, &mut body, self.job.now(), u64::MAX);
        shared.clock.store(now, Release);
        let mut any = false;
        for (slot, (before, after)) in ended.iter().zip(body.ended()).enumerate() {
            if after == *before {
                continue;
            }
            any = true;
            let proc = &shared.procs[slot];
            if proc.unapplied.fetch_add(after - before, AcqRel) == 0 {
                proc.unapplied_at.store(real, Release);
            }
            if slot != me {
                self.notify(slot);
            }
        }
        if any {
            Time::Moved
        } else {
            Time::Idle
        }
    }

    /// How long a waiter sleeps before it looks again; only one of the node looks often.
    fn nap(&self, wanted: u64) -> u64 {
        let real = real_ns();
        let watch = &self.job.shared().watch_until;
        let until = watch.load(Relaxed);
        let nap = wanted.clamp(20_000, WATCH_NS);
        if until > real && until < real + SLEEP_NS {
            return SLEEP_NS;
        }
        match watch.compare_exchange(until, real + nap + WATCH_NS, Relaxed, Relaxed) {
            Ok(_) => nap,
            Err(_) => SLEEP_NS,
        }
    }

    fn release_watch(&self) {
        self.job.shared().watch_until.store(0, Relaxed);
    }

    /// Blocks until `done` says so. `done` sees the state after everything that ended was taken up.
    pub fn wait_until(&'static self, mut done: impl FnMut(&mut State) -> bool) {
        let me = self.job.me();
        let mut parked = false;
        let mut rounds = 0u32;
        loop {
            let seen = me.word.load(Acquire);
            {
                let mut st = self.state.lock();
                pump(self, &mut st);
                if done(&mut st) {
                    break;
                }
                if me.parked.load(Relaxed) <= u32::from(parked) {
                    me.awake.store(0, Relaxed);
                }
            }
            if !parked {
                me.parked.fetch_add(1, SeqCst);
                parked = true;
                continue;
            }
            let polls = self.state.lock().sched.polls();
            match self.advance(false) {
                Time::Moved => rounds = 0,
                Time::Busy(ns) => {
                    rounds += 1;
                    let nap = self.nap(ns);
                    futex_wait(&me.word, seen, nap);
                    if nap != SLEEP_NS {
                        self.release_watch();
                    }
                }
                Time::Idle => {
                    rounds += 1;
                    futex_wait(&me.word, seen, if polls { 50_000 } else { SLEEP_NS });
                }
            }
            if rounds % REAP_ROUNDS == REAP_ROUNDS - 1 {
                let mut body = self.job.lock();
                self.job.reap(&mut body);
            }
        }
        if parked {
            me.parked.fetch_sub(1, SeqCst);
        }
        self.active();
    }

    /// One look whether `done` holds; a caller that looks in vain again and again lets time move.
    pub fn poll(&'static self, mut done: impl FnMut(&mut State) -> bool) -> bool {
        let me = self.job.me();
        for round in 0..2 {
            {
                let mut st = self.state.lock();
                pump(self, &mut st);
                if done(&mut st) {
                    return true;
                }
                me.awake.store(0, Relaxed);
            }
            // Not before the look: what was taken up for it has begun a turn, and the looks before have not seen that.
            let turn = &self.job.shared().turn;
            let seen = turn.load(Relaxed);
            if me.polled_turn.swap(seen, Relaxed) != seen {
                me.turn_polls.store(0, Relaxed);
            }
            let polls = me.turn_polls.fetch_add(1, Relaxed) + 1;
            if polls >= self.turn_polls && me.told.swap(0, Relaxed) != 0 {
                // It looks in vain after it has done something: by now it has told the others of that, by ways that are not
                // the driver's. They are to look once more, too; so is it, if another has begun a turn meanwhile.
                match turn.compare_exchange(seen, seen + 1, Relaxed, Relaxed) {
                    Ok(_) => me.polled_turn.store(seen + 1, Relaxed),
                    Err(_) => me.told.store(1, Relaxed),
                }
            }
            if round == 1 || me.idle_polls.fetch_add(1, Relaxed) < IDLE_POLLS {
                break;
            }
            if !matches!(self.advance(true), Time::Moved) {
                break;
            }
        }
        me.polled_cpu
            .store(program_cpu(me, 0).unwrap_or(0), Relaxed);
        // Host code that looks sees time pass.
        self.learned(self.job.now());
        // Time waits for a process that has not looked often enough, so it keeps its core: on a busy machine each yield takes
        // milliseconds.
        if self.has_polled(me) {
            std::thread::yield_now();
        }
        false
    }

    /// Wakes the background thread if it sleeps for good.
    pub fn wake_worker(&self) {
        if self.worker_asleep.swap(false, AcqRel) {
            futex_wake(&self.job.me().worker_word);
        }
    }

    /// The background thread: takes up work while the program is elsewhere.
    pub fn work(&'static self) {
        let me = self.job.me();
        let mut rounds = 0u32;
        while !self.closed.load(Acquire) {
            let seen = me.worker_word.load(Acquire);
            if me.parked.load(SeqCst) > 0 {
                // Whoever is parked takes up the work; look in now and then, in case it leaves.
                futex_wait(&me.worker_word, seen, 1_000_000);
                continue;
            }
            let (idle, polls) = {
                let mut st = self.state.lock();
                pump(self, &mut st);
                (st.sched.idle(), st.sched.polls())
            };
            if idle {
                self.worker_asleep.store(true, Release);
                if self.state.lock().sched.idle() {
                    futex_wait(&me.worker_word, seen, 100_000_000);
                }
                self.worker_asleep.store(false, Release);
                continue;
            }
            me.worker_cpu.store(crate::job::thread_cpu_ns(), Relaxed);
            // Unlike a waiter, this thread does not speak for the program: that must be quiet itself.
            let own = self.quiet_in(self.job.slot, real_ns(), true);
            if own > 0 {
                futex_wait(&me.worker_word, seen, own.min(WATCH_NS));
                continue;
            }
            rounds += 1;
            if rounds % REAP_ROUNDS == 0 {
                let mut body = self.job.lock();
                self.job.reap(&mut body);
            }
            match self.advance(false) {
                Time::Moved => rounds = 0,
                Time::Busy(ns) => {
                    let nap = self.nap(ns);
                    futex_wait(&me.worker_word, seen, nap);
                    if nap != SLEEP_NS {
                        self.release_watch();
                    }
                }
                Time::Idle => {
                    futex_wait(&me.worker_word, seen, if polls { 50_000 } else { SLEEP_NS })
                }
            }
        }
    }
}
