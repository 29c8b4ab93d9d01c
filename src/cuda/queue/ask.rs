//! How far copies are, by what the driver answers.

use super::{End, Mapped, Queue, State};
use crate::cuda::driver::clock_ns;
use crate::cuda::error::{Error, Result};
use crate::cuda::state::Entered;
use crate::cuda::types::code;
use crate::stats::{self, Counter};
use crate::trace;
use std::sync::atomic::Ordering;
use std::sync::Arc;

/// Errors in a row that the driver answers questions about a copy with, before it is waited for.
const FAILURES_MAX: u32 = 3;
/// The same where the context cannot even be entered.
const ENTER_FAILURES_MAX: u32 = 1000;
/// Polls of a copy that is not the oldest of its stream, and during which nobody has asked the driver, before it does: whoever
/// polls the oldest one finds out for all, unless nobody does. A rank that tests 16 receives between kernels asked three times in each
/// test where each copy asked now and then, half a microsecond each.
const SKIPS_MAX: u32 = 8;

/// A copy, or several submitted together, until they are done.
///
/// Dropped before it is launched, the copy is never made; dropped in flight it runs on, and what it needs is kept.
#[derive(Debug)]
#[must_use = "poll it until the copies are done"]
pub struct InFlight {
    queue: Arc<Queue>,
    number: u64,
    _owner: Arc<()>,
    /// Polls since the driver was last asked, by whomever, and which time that was.
    skipped: u32,
    asked: u32,
    /// Questions about it that the driver has answered with an error.
    failures: u32,
    lost: Option<Error>,
}

impl InFlight {
    /// The copy of this number, for as long as somebody has this.
    pub(super) fn new(queue: Arc<Queue>, number: u64, owner: Arc<()>) -> InFlight {
        InFlight {
            asked: queue.asked.load(Ordering::Relaxed),
            queue,
            number,
            _owner: owner,
            skipped: 0,
            failures: 0,
            lost: None,
        }
    }

    /// Whether the copies are done. Does not wait. After an error it may be asked again, unless [`InFlight::is_lost`].
    pub fn poll(&mut self) -> Result<bool> {
        self.refused()?;
        let finished = self.queue.finished.load(Ordering::Acquire);
        if self.number <= finished {
            return Ok(true);
        }
        // A query costs a fifth of a microsecond and more, and every copy of a window is polled in every round.
        let asked = self.queue.asked.load(Ordering::Relaxed);
        if std::mem::replace(&mut self.asked, asked) != asked {
            self.skipped = 0;
        }
        if self.number > finished + 1 && self.skipped < SKIPS_MAX {
            self.skipped += 1;
            return Ok(false);
        }
        self.skipped = 0;
        if let Err(error) = self.queue.advance() {
            self.failures += 1;
            if self.failures >= FAILURES_MAX && !self.queue.is_lost() {
                // The last question is one that waits: the copies end by themselves, if anything does.
                self.queue.wait(self.failures);
            }
            if self.queue.is_lost() {
                self.lost = Some(error);
            }
            return Err(error);
        }
        self.refused()?;
        Ok(self.number <= self.queue.finished.load(Ordering::Acquire))
    }

    /// Whether the copies were found to be done when another one was asked about.
    pub fn is_known_done(&self) -> bool {
        self.queue.has_finished(self.number)
    }

    /// Its number on its stream.
    pub(in crate::cuda) fn number(&self) -> u64 {
        self.number
    }

    /// When they can be over at the earliest, by [`clock_ns`], where that is known.
    #[must_use]
    pub fn due_ns(&self) -> Option<u64> {
        let due_ns = self.queue.due_ns.load(Ordering::Relaxed);
        (due_ns != 0).then_some(due_ns)
    }

    /// The error for which the copies were not made, if they were not. It is told by the queue once, and kept here.
    fn refused(&mut self) -> Result<()> {
        if self.lost.is_none() && self.queue.failures.load(Ordering::Acquire) != 0 {
            self.lost = self.queue.take_failure(self.number);
        }
        self.lost.map_or(Ok(()), Err)
    }

    /// After an error: the copies could not be launched, or the context is gone or has faulted; they never finish, and
    /// what they wrote is unknown.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.lost.is_some()
    }

    /// Whether nothing of it runs any more, well or not.
    pub fn is_over(&mut self) -> bool {
        match self.poll() {
            Ok(is_done) => is_done || self.is_lost(),
            Err(_) => {
                let is_lost = self.is_lost();
                stats::add(Counter::DriverRetries, u64::from(!is_lost));
                is_lost
            }
        }
    }
}

impl Queue {
    /// Asks the driver how far the stream has got, and gives it more.
    fn advance(&self) -> Result<()> {
        let mut done = Mapped::default();
        let mut state = self.state.lock();
        // Only compared, whether it is another than before, and written under the lock.
        let asked = self.asked.load(Ordering::Relaxed);
        self.asked.store(asked.wrapping_add(1), Ordering::Relaxed);
        match state.end {
            Some(End::Drained) => return Ok(()),
            Some(End::Lost(error)) => return Err(error),
            None => {}
        }
        let entered = Entered::ask(self.key);
        let asked = entered.and_then(|entered| {
            self.reap(&mut state, &entered, &mut done)?;
            if !state.is_fresh {
                self.launch_waiting(&mut state, &entered);
            }
            Ok(())
        });
        if let Err(error) = asked {
            // Any other is for the owners of the copies, who ask again, and at last wait.
            if error.context_is_gone() {
                self.lose(&mut state, error);
            }
        }
        drop(state);
        asked
    }

    /// Takes note of launches that are done, oldest first.
    pub(super) fn reap(
        &self,
        state: &mut State,
        entered: &Entered,
        done: &mut Mapped,
    ) -> Result<()> {
        while let Some(oldest) = state.flying.front() {
            let asked = match oldest.event {
                Some(event) => entered.driver().event_query(event),
                None => entered.driver().stream_query(self.stream),
            };
            match asked {
                Ok(()) => self.pop(state, done),
                Err(error) if error.is(code::NOT_READY) => {
                    if state.forecast.is_kept() {
                        state.forecast.note_pending(clock_ns());
                    }
                    state.asked = trace::asked();
                    break;
                }
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// The oldest launch is done.
    fn pop(&self, state: &mut State, done: &mut Mapped) {
        if let Some(oldest) = state.flying.pop_front() {
            oldest.traced.ended(state.asked);
            done.append(oldest.mappings);
            state.idle.extend(oldest.event);
            self.finished.fetch_max(oldest.last, Ordering::AcqRel);
            if state.forecast.is_kept() {
                state.forecast.note_over(clock_ns());
            }
            self.forecast(state);
        }
    }

    /// Another launch is the oldest.
    pub(super) fn forecast(&self, state: &mut State) {
        let oldest = state.flying.front().and_then(|launch| launch.extent);
        state.forecast.begin(oldest);
        let due_ns = state.forecast.due_ns().unwrap_or(0);
        self.due_ns.store(due_ns, Ordering::Relaxed);
    }

    /// Waits for all that is launched. Where even that fails, nothing more can be had of the stream. A thread that cannot enter
    /// the context leaves the question to one that is in it already, as long as this is not its last failure: copies that run
    /// on would write over what is brought another way.
    fn wait(&self, failures: u32) {
        let mut done = Mapped::default();
        let mut state = self.state.lock();
        let entered = Entered::enter_same(self.key);
        if let Err(error) = &entered {
            if failures < ENTER_FAILURES_MAX && !error.context_is_gone() {
                return;
            }
        }
        let waited = entered.and_then(|entered| entered.driver().stream_synchronize(self.stream));
        match waited {
            Ok(()) => {
                while !state.flying.is_empty() {
                    self.pop(&mut state, &mut done);
                }
            }
            Err(error) => self.lose(&mut state, error),
        }
    }

    fn is_lost(&self) -> bool {
        matches!(self.state.lock().end, Some(End::Lost(_)))
    }

    /// Nothing more can be had of the stream.
    fn lose(&self, state: &mut State, error: Error) {
        state.end.get_or_insert(End::Lost(error));
        state.waiting.clear();
    }

    fn take_failure(&self, number: u64) -> Option<Error> {
        let mut state = self.state.lock();
        let mut failed = state.failed.iter();
        let place = failed.position(|(member, _)| member.number == number)?;
        let (_, error) = state.failed.swap_remove(place);
        self.failures.store(state.failed.len(), Ordering::Release);
        Some(error)
    }
}
