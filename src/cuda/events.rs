//! Copies in flight, and the events that tell when they are done.

use super::error::{Error, Result};
use super::state::{ContextKey, Entered};
use super::types::{code, Event, EVENT_DISABLE_TIMING};
use super::Mapping;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

/// Copies submitted together, until they are done.
#[derive(Debug)]
#[must_use = "poll it until the copies are done"]
pub struct InFlight {
    key: ContextKey,
    event: Option<Event>,
    pool: Arc<EventPool>,
    mapping: Option<Arc<Mapping>>,
    place: Place,
    /// Polls since the driver was last asked.
    skipped: u32,
    /// Questions about it that the driver has answered with an error.
    failures: u32,
    lost: Option<Error>,
}

/// How far a lane has got: the number of the latest submission known to be done. Submissions on a lane end in order.
pub(super) type Finished = Arc<AtomicU64>;

/// Which submission of which lane it is.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) number: u64,
    pub(super) finished: Finished,
}

/// Polls of a copy that is not the oldest of its lane for each that asks the driver: whoever polls the oldest one finds
/// out for all, unless nobody does.
const SKIPS_MAX: u32 = 8;

/// The events of a context, shared between its lanes and the copies in flight on them.
#[derive(Debug, Default)]
pub(super) struct EventPool(Mutex<Events>);

#[derive(Debug, Default)]
struct Events {
    free: Vec<Event>,
    /// Copies that were dropped before they were done. Their events and mappings are kept until they are.
    abandoned: Vec<(Event, Option<Arc<Mapping>>)>,
    made: usize,
    state: State,
}

/// What has become of the lanes of a context.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum State {
    #[default]
    Open,
    /// Closed after every copy was done.
    Drained,
    /// Gone with the context.
    Lost,
}

/// Errors in a row that the driver answers questions about a copy with, before it is waited for.
const FAILURES_MAX: u32 = 3;
/// Copies that may be in flight in one context.
const EVENTS_MAX: usize = 4096;

impl InFlight {
    /// Copies whose end the event marks.
    pub(super) fn new(
        key: ContextKey,
        event: Event,
        pool: Arc<EventPool>,
        place: Place,
    ) -> InFlight {
        InFlight {
            key,
            event: Some(event),
            pool,
            mapping: None,
            place,
            skipped: 0,
            failures: 0,
            lost: None,
        }
    }

    /// Keeps a mapping open until the copies are done, even if this is dropped before.
    pub fn holding(mut self, mapping: Arc<Mapping>) -> InFlight {
        self.mapping = Some(mapping);
        self
    }

    /// Whether the copies are done. Does not wait. After an error it may be asked again, unless [`InFlight::is_lost`].
    pub fn poll(&mut self) -> Result<bool> {
        let Some(event) = self.event else {
            return self.lost.map_or(Ok(true), Err);
        };
        match self.ask(event) {
            Ok(false) => return Ok(false),
            Ok(true) => self.pool.give(self.key, event),
            Err(error) => {
                self.failures += 1;
                if !error.context_is_gone() {
                    if self.failures < FAILURES_MAX {
                        return Err(error);
                    }
                    // The last question is one that waits: the copies end by themselves, if anything does.
                    if self.pool.wait(self.key, event).is_ok() {
                        self.pool.give(self.key, event);
                        (self.event, self.mapping) = (None, None);
                        return Ok(true);
                    }
                }
                // The event is not used again: it may be gone, or stuck behind a fault.
                self.lost = Some(error);
            }
        }
        (self.event, self.mapping) = (None, None);
        self.lost.map_or(Ok(true), Err)
    }

    /// After an error: the context is gone or has faulted, the copies never finish, and what they wrote is unknown.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.lost.is_some()
    }

    /// Whether nothing of it runs any more, well or not.
    pub fn is_over(&mut self) -> bool {
        !matches!(self.poll(), Ok(false) | Err(_)) || self.is_lost()
    }
}

impl InFlight {
    /// Asks the driver only where the lane's order does not tell: a query costs half a microsecond, and a window of
    /// messages is polled again and again.
    fn ask(&mut self, event: Event) -> Result<bool> {
        let Place { number, finished } = &self.place;
        let latest = finished.load(Ordering::Acquire);
        if *number <= latest {
            return Ok(true);
        }
        if *number > latest + 1 && self.skipped < SKIPS_MAX {
            self.skipped += 1;
            return Ok(false);
        }
        self.skipped = 0;
        let done =
            Entered::enter_same(self.key).and_then(|entered| self.pool.query(&entered, event))?;
        if done {
            finished.fetch_max(*number, Ordering::AcqRel);
        }
        Ok(done)
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if let Some(event) = self.event.take() {
            self.pool.abandon(self.key, event, self.mapping.take());
        }
    }
}

impl EventPool {
    /// An idle event of the context that is entered.
    pub(super) fn take(&self, entered: &Entered) -> Result<Event> {
        if let Some(event) = self.0.lock().free.pop() {
            return Ok(event);
        }
        self.reclaim(entered);
        let mut events = self.0.lock();
        if let Some(event) = events.free.pop() {
            return Ok(event);
        }
        if events.made >= EVENTS_MAX {
            return Err(Error::Exhausted("copies in flight"));
        }
        let mut event = Event::NULL;
        // SAFETY: `event` is written; a context is entered.
        unsafe {
            let driver = entered.driver();
            driver.event_create(&raw mut event, EVENT_DISABLE_TIMING)?;
        }
        events.made += 1;
        Ok(event)
    }

    /// Gives back the event of copies that are done: for the next ones, or to the driver where the lanes are closed.
    pub(super) fn give(&self, key: ContextKey, event: Event) {
        let mut events = self.0.lock();
        if events.state == State::Open {
            events.free.push(event);
            return;
        }
        drop(events);
        if let Ok(entered) = Entered::enter_same(key) {
            // SAFETY: made in this context, which still exists, and in nobody's hands any more.
            let _ = unsafe { entered.driver().event_destroy(event) };
        }
    }

    /// Keeps what unfinished copies need until they are done. Closed lanes have none.
    fn abandon(&self, key: ContextKey, event: Event, mapping: Option<Arc<Mapping>>) {
        let mut events = self.0.lock();
        if events.state == State::Open {
            events.abandoned.push((event, mapping));
            return;
        }
        drop(events);
        self.give(key, event);
    }

    /// Whether an event has happened, in the context that is entered.
    fn query(&self, entered: &Entered, event: Event) -> Result<bool> {
        match self.0.lock().state {
            State::Open => {}
            State::Drained => return Ok(true),
            State::Lost => return Err(Error::ContextLost),
        }
        // SAFETY: the event belongs to the context that is entered, which still is the one it was made in.
        match unsafe { entered.driver().event_query(event) } {
            Ok(()) => Ok(true),
            Err(error) if error.is(code::NOT_READY) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Waits for an event.
    fn wait(&self, key: ContextKey, event: Event) -> Result<()> {
        let entered = Entered::enter_same(key)?;
        if self.0.lock().state != State::Open {
            return Err(Error::ContextLost);
        }
        // SAFETY: the event belongs to the context that is entered, which still is the one it was made in.
        unsafe { entered.driver().event_synchronize(event) }
    }

    /// Whether copies were dropped before they were done.
    pub(super) fn has_abandoned(&self) -> bool {
        !self.0.lock().abandoned.is_empty()
    }

    /// Releases what belonged to dropped copies that are done by now.
    pub(super) fn reclaim(&self, entered: &Entered) {
        let abandoned = std::mem::take(&mut self.0.lock().abandoned);
        let mut finished = Vec::new();
        for row in abandoned {
            match self.query(entered, row.0) {
                Ok(false) => self.0.lock().abandoned.push(row),
                // After a fault the event is good for nothing, but the copy does not run either.
                Ok(true) | Err(_) => finished.push(row),
            }
        }
        self.0.lock().free.extend(finished.iter().map(|row| row.0));
        // Mappings close outside the lock.
        drop(finished);
    }

    /// Ends the pool. `drain` waits for all copies of the context; it is given the context, if that still exists.
    pub(super) fn close(&self, key: ContextKey, drain: impl FnOnce(&Entered) -> bool) {
        let entered = Entered::enter_same(key);
        let drained = entered.as_ref().is_ok_and(drain);
        let mut events = self.0.lock();
        events.state = if drained { State::Drained } else { State::Lost };
        let abandoned = std::mem::take(&mut events.abandoned);
        let idle = std::mem::take(&mut events.free);
        drop(events);
        if let Ok(entered) = &entered {
            for event in idle.into_iter().chain(abandoned.iter().map(|row| row.0)) {
                // SAFETY: made in this context, and in nobody's hands any more.
                let _ = unsafe { entered.driver().event_destroy(event) };
            }
        }
        // Mappings of abandoned copies close here, after the streams have run dry.
        drop(abandoned);
    }
}
