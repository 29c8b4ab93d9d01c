//! One stream of the engine's own, and the copies that are queued, launched and in flight on it.
//!
//! What a copy costs the device beside its bytes falls from 3 us to 0.5 in a batch. So copies that may be batched
//! ([`Queue::add`]) are launched at once while the stream has little to do, and together once it has done some of it;
//! two launches in flight keep it busy meanwhile.

use super::copy::{self, Copy};
use super::driver::clock_ns;
use super::error::{Error, Result};
use super::forecast::{Forecast, FORECAST_FROM};
use super::state::{ContextKey, Entered};
use super::types::{code, Event, Stream, EVENT_DISABLE_TIMING, STREAM_NON_BLOCKING};
use super::Mapping;
use crate::stats::{self, Counter};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

/// Launches in flight beyond which copies are collected for a batch.
pub const LAUNCHES_MAX: usize = 2;
/// Copies in a batch: the first of them waits until the driver has taken the last, half a microsecond each.
pub const BATCH_COUNT_MAX: usize = 32;
/// A batch that holds so many bytes takes no more: it is marked as done as a whole, and the gap to the next one, 3 us, is
/// nothing beside the 170 us that these take at 400 GB/s.
pub const BATCH_BYTES_MAX: u64 = 64 << 20;
/// Copies of so many bytes are launched without those that are still to be queued, so that the device begins with them: to claim a
/// message takes a processor 1.3 us, and the next one may have to be brought by the MPI library first. Windows of 16 on two H100s, GB/s,
/// all in one batch but the first two and as soon as 4 MiB wait: 1 MiB 144 and 187, both ways 249 and 303; 4 MiB 297 and 309. (2 MiB:
/// 186, 268, 316; 1 MiB, more launches: 152, 261, 297.)
pub const AHEAD_BYTES: u64 = 4 << 20;
/// Copies that one stream may have in flight, launched one by one.
const IN_FLIGHT_MAX: usize = 1024;
/// Errors in a row that the driver answers questions about a copy with, before it is waited for.
const FAILURES_MAX: u32 = 3;
/// The same where the context cannot even be entered.
const ENTER_FAILURES_MAX: u32 = 1000;
/// Polls of a copy that is not the oldest of its stream, and during which nobody has asked the driver, before it does: whoever
/// polls the oldest one finds out for all, unless nobody does. A rank that tests 16 receives between kernels asked three times in each
/// test where each copy asked now and then, half a microsecond each.
const SKIPS_MAX: u32 = 8;

/// A stream and its copies. Numbers count copies in the order in which they were queued.
#[derive(Debug)]
pub(super) struct Queue {
    key: ContextKey,
    stream: Stream,
    /// Number of the latest copy known to be done; all before it are as well.
    finished: AtomicU64,
    /// Copies that could not be launched and whose owners do not know yet.
    failures: AtomicUsize,
    /// Times that the driver was asked how far it is.
    asked: AtomicU32,
    /// When the oldest launch can be over at the earliest, by [`clock_ns`]; 0 where that is not known.
    due_ns: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Number of the latest copy queued.
    queued: u64,
    /// Copies that are not launched, oldest first.
    waiting: VecDeque<Waiting>,
    /// The latest of them were queued since the last [`Queue::launch`], which may be held back for more.
    is_fresh: bool,
    /// Launches that are not known to be done, oldest first.
    flying: VecDeque<Launch>,
    forecast: Forecast,
    idle: Vec<Event>,
    /// Copies that could not be made, until their owners are told.
    failed: Vec<(Member, Error)>,
    end: Option<End>,
}

impl State {
    /// There are copies to be launched, and nothing is in flight before them.
    fn is_unlaunched(&self) -> bool {
        self.is_fresh && self.flying.is_empty()
    }
}

/// Copies that are to be launched next, and may wait for more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Gathered {
    /// Bytes of the longest.
    pub longest: u64,
    /// Bytes of all.
    pub bytes: u64,
}

/// A copy's number, and whether anybody wants it still.
#[derive(Debug, Clone)]
struct Member {
    number: u64,
    owner: Weak<()>,
}

impl Member {
    fn is_wanted(&self) -> bool {
        self.owner.strong_count() > 0
    }
}

#[derive(Debug)]
struct Waiting {
    member: Member,
    copy: Copy,
    mapping: Option<Arc<Mapping>>,
}

/// Copies launched together.
#[derive(Debug)]
struct Launch {
    /// Number of the last of them.
    last: u64,
    /// Their bytes, and when they were launched, of those that are worth a forecast.
    extent: Option<(u64, u64)>,
    /// Marks their end. None while nothing is launched behind them: then the stream itself is asked, which spares a message
    /// that comes alone the call.
    event: Option<Event>,
    /// Kept open until they are done, whoever still wants them.
    mappings: Mapped,
}

/// Mappings that are kept open: one, mostly, for which nothing is allocated.
#[derive(Debug, Default, Clone)]
struct Mapped {
    first: Option<Arc<Mapping>>,
    others: Vec<Arc<Mapping>>,
}

impl Mapped {
    fn push(&mut self, mapping: Arc<Mapping>) {
        match self.first {
            None => self.first = Some(mapping),
            Some(_) => self.others.push(mapping),
        }
    }

    fn append(&mut self, more: Mapped) {
        more.first
            .into_iter()
            .chain(more.others)
            .for_each(|mapping| self.push(mapping));
    }
}

impl From<Option<Arc<Mapping>>> for Mapped {
    fn from(first: Option<Arc<Mapping>>) -> Mapped {
        Mapped {
            first,
            others: Vec::new(),
        }
    }
}

/// What has become of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// Closed after every copy was done.
    Drained,
    /// Gone with its context, or faulted.
    Lost(Error),
}

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

    /// Its number on its stream.
    pub(super) fn number(&self) -> u64 {
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

/// Whether a copy is not for a batch that has these, of each of which it is said whether it reads a peer's memory. In a batch
/// copies have no order among them. Bandwidth tests receive a window in one place, where any message may be the last; but one
/// that lies in host memory is not to be written while another one is.
fn is_apart(batch: &[Copy], kinds: &[bool], next: &Copy, kind: bool) -> bool {
    let mut others = batch.iter().zip(kinds);
    others.any(|(copy, other)| *other != kind && copy.overlaps(next))
}

impl Queue {
    /// Makes a stream in the context that is entered, which is that of the key.
    pub(super) fn open(entered: &Entered, key: ContextKey) -> Result<Arc<Queue>> {
        let mut stream = Stream::NULL;
        // SAFETY: `stream` is written; the context is entered.
        unsafe {
            entered
                .driver()
                .stream_create(&raw mut stream, STREAM_NON_BLOCKING)?;
        }
        Ok(Arc::new(Queue {
            key,
            stream,
            finished: AtomicU64::new(0),
            failures: AtomicUsize::new(0),
            asked: AtomicU32::new(0),
            due_ns: AtomicU64::new(0),
            state: Mutex::default(),
        }))
    }

    /// Queues a copy for the next launch; see [`Queue::launch`]. Its order among others that wait is not kept.
    pub(super) fn add(self: &Arc<Queue>, copy: Copy, mapping: Option<Arc<Mapping>>) -> InFlight {
        let mut state = self.state.lock();
        let (member, owned) = self.member(&mut state);
        state.waiting.push_back(Waiting {
            member,
            copy,
            mapping,
        });
        state.is_fresh = true;
        owned
    }

    /// Launches copies at once, one after the other and after all that are queued. On an error none of them runs any more.
    pub(super) fn submit(
        self: &Arc<Queue>,
        entered: &Entered,
        copies: &[Copy],
        mapping: Option<Arc<Mapping>>,
    ) -> Result<InFlight> {
        self.submit_marked(entered, copies, mapping, &[])
    }

    /// The same, with events recorded before the first copy and after each, as far as there are any. They were made in the
    /// context that is entered, and are live.
    pub(super) fn submit_marked(
        self: &Arc<Queue>,
        entered: &Entered,
        copies: &[Copy],
        mapping: Option<Arc<Mapping>>,
        marks: &[Event],
    ) -> Result<InFlight> {
        // Mappings close after the lock is given back.
        let mut done = Mapped::default();
        let mut state = self.state.lock();
        if state.flying.len() >= IN_FLIGHT_MAX {
            self.reap(&mut state, entered, &mut done)?;
            if state.flying.len() >= IN_FLIGHT_MAX {
                return Err(Error::Exhausted("copies in flight"));
            }
        }
        while !state.waiting.is_empty() {
            self.launch_some(&mut state, entered);
        }
        let (member, owned) = self.member(&mut state);
        let record = |at: usize| match marks.get(at) {
            // SAFETY: stream and event were made in the context that is entered, and are live.
            Some(event) => unsafe { entered.driver().event_record(*event, self.stream) },
            None => Ok(()),
        };
        let bytes = copies.iter().map(Copy::bytes).sum();
        self.start(
            &mut state,
            entered,
            (member.number, bytes),
            &mut mapping.into(),
            || {
                record(0)?;
                copies.iter().enumerate().try_for_each(|(at, copy)| {
                    copy::start(entered, self.stream, copy)?;
                    record(at + 1)
                })
            },
        )?;
        Ok(owned)
    }

    /// Launches that are not known to be done, and copies that wait for one.
    pub(super) fn load(&self) -> usize {
        let state = self.state.lock();
        state.flying.len() + state.waiting.len()
    }

    /// Whether one more copy of so many bytes had better join those that are to be launched on this stream next: nothing is in
    /// flight on it, and a batch of them is short.
    pub(super) fn is_gathering(&self, bytes: u64) -> bool {
        let state = self.state.lock();
        let waiting = || state.waiting.iter().map(|row| row.copy.bytes());
        state.is_unlaunched()
            && state.waiting.len() < BATCH_COUNT_MAX
            && waiting().sum::<u64>().saturating_add(bytes) <= AHEAD_BYTES
    }

    /// What is to be launched on this stream next, where nothing is in flight on it.
    pub(super) fn gathered(&self) -> Option<Gathered> {
        let state = self.state.lock();
        let bytes = || state.waiting.iter().map(|row| row.copy.bytes());
        state.is_unlaunched().then(|| Gathered {
            longest: bytes().max().unwrap_or(0),
            bytes: bytes().sum(),
        })
    }

    /// Whether the copy of this number is known to be done.
    pub(super) fn has_finished(&self, number: u64) -> bool {
        self.finished.load(Ordering::Acquire) >= number
    }

    /// Lets everything that is launched from now on wait for an event of the context that is entered.
    pub(super) fn follow(&self, entered: &Entered, event: Event) -> Result<()> {
        let mut state = self.state.lock();
        if let Some(end) = state.end {
            return Err(end.error());
        }
        self.seal(&mut state, entered)?;
        // SAFETY: stream and event were made in the context that is entered, and are live.
        unsafe { entered.driver().stream_wait_event(self.stream, event, 0) }
    }

    fn member(self: &Arc<Queue>, state: &mut State) -> (Member, InFlight) {
        state.queued += 1;
        let owner = Arc::new(());
        let member = Member {
            number: state.queued,
            owner: Arc::downgrade(&owner),
        };
        let owned = InFlight {
            queue: Arc::clone(self),
            number: state.queued,
            _owner: owner,
            skipped: 0,
            asked: self.asked.load(Ordering::Relaxed),
            failures: 0,
            lost: None,
        };
        (member, owned)
    }

    /// Launches what waits, unless the stream has enough to do.
    pub(super) fn launch(&self) {
        let mut done = Mapped::default();
        let mut state = self.state.lock();
        state.is_fresh = false;
        if !state.waiting.is_empty() && state.flying.len() < LAUNCHES_MAX {
            self.feed(&mut state, &mut done);
        }
    }

    /// While more is being queued: launches what waits if that is much.
    pub(super) fn launch_ahead(&self) {
        let mut done = Mapped::default();
        let mut state = self.state.lock();
        let batch = state.waiting.iter().take(BATCH_COUNT_MAX);
        if batch.map(|row| row.copy.bytes()).sum::<u64>() >= AHEAD_BYTES {
            self.feed(&mut state, &mut done);
        }
    }

    /// Launches what waits. If the stream had enough to do when last asked, it is asked again first.
    fn feed(&self, state: &mut State, done: &mut Mapped) {
        let fed = Entered::ask(self.key).and_then(|entered| {
            if state.flying.len() >= LAUNCHES_MAX {
                self.reap(state, &entered, done)?;
            }
            self.launch_waiting(state, &entered);
            Ok(())
        });
        // Whoever polls one of the copies tries again, or finds out.
        if let Err(error) = fed {
            stats::add(Counter::DriverRetries, 1);
            log::debug!("launching copies: {error}");
        }
    }

    fn launch_waiting(&self, state: &mut State, entered: &Entered) {
        while !state.waiting.is_empty() && state.flying.len() < LAUNCHES_MAX {
            self.launch_some(state, entered);
        }
    }

    /// Launches the oldest of what waits, as many as make a batch. Those that the driver refuses have failed.
    fn launch_some(&self, state: &mut State, entered: &Entered) {
        if state.waiting.len() == 1 {
            // The rule, where a message is waited for: nothing is allocated for it.
            let only = state.waiting.pop_front();
            only.into_iter()
                .for_each(|only| self.launch_only(state, entered, only));
            return;
        }
        let (mut copies, mut members, mut mappings): (Vec<Copy>, _, _) =
            (Vec::new(), Vec::new(), Mapped::default());
        let (mut bytes, mut kinds): (u64, Vec<bool>) = (0, Vec::new());
        while copies.len() < BATCH_COUNT_MAX && bytes < BATCH_BYTES_MAX {
            let may_join =
                |next: &&Waiting| !is_apart(&copies, &kinds, &next.copy, next.mapping.is_some());
            let Some(next) = state.waiting.front().filter(may_join) else {
                break;
            };
            let kind = next.mapping.is_some();
            let Some(next) = state.waiting.pop_front() else {
                break;
            };
            if next.member.is_wanted() {
                kinds.push(kind);
                bytes += next.copy.bytes();
                copies.push(next.copy);
                members.push(next.member);
                next.mapping
                    .into_iter()
                    .for_each(|mapping| mappings.push(mapping));
            }
        }
        if copies.is_empty() {
            return;
        }
        let last = members.last().map_or(0, |member| member.number);
        let mut held = mappings.clone();
        let started = self.start(state, entered, (last, bytes), &mut held, || {
            copy::start_all(entered, self.stream, &copies)
        });
        if started.is_ok() {
            if copies.len() > 1 {
                stats::add(Counter::CopiesBatched, copies.len() as u64);
            }
            return;
        }
        stats::add(Counter::DriverRetries, 1);
        // One by one, so that only those fail that must. Copying twice what was started before does no harm: the sources
        // stay as they are until their copies are done.
        for (copy, member) in copies.iter().zip(members) {
            let mut held = mappings.clone();
            let this = (member.number, copy.bytes());
            let started = self.start(state, entered, this, &mut held, || {
                copy::start(entered, self.stream, copy)
            });
            if let Err(error) = started {
                self.fail(state, [member], error);
            }
        }
    }

    /// The same of one copy.
    fn launch_only(&self, state: &mut State, entered: &Entered, only: Waiting) {
        let Waiting {
            member,
            copy,
            mapping,
        } = only;
        if !member.is_wanted() {
            return;
        }
        let mut held = Mapped::from(mapping);
        let this = (member.number, copy.bytes());
        let mut start = || {
            self.start(state, entered, this, &mut held, || {
                copy::start(entered, self.stream, &copy)
            })
        };
        let started = start().or_else(|_| {
            stats::add(Counter::DriverRetries, 1);
            start()
        });
        if let Err(error) = started {
            self.fail(state, [member], error);
        }
    }

    /// Keeps an error for the owners of copies.
    fn fail(&self, state: &mut State, members: impl IntoIterator<Item = Member>, error: Error) {
        let rows = members.into_iter().map(|member| (member, error));
        state.failed.extend(rows);
        state.failed.retain(|(member, _)| member.is_wanted());
        self.failures.store(state.failed.len(), Ordering::Release);
    }

    /// Starts copies by `start`, the last of which has this number, of so many bytes in all, and notes them down: the mappings
    /// are kept until their end. On an error none runs any more, and the mappings are left to the caller.
    fn start(
        &self,
        state: &mut State,
        entered: &Entered,
        (last, bytes): (u64, u64),
        mappings: &mut Mapped,
        start: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        if let Some(end) = state.end {
            return Err(end.error());
        }
        self.seal(state, entered)?;
        if let Err(error) = start() {
            // What this call has started must not run on once its caller believes it failed.
            // SAFETY: the stream was made in the context that is entered, and is live.
            let _ = unsafe { entered.driver().stream_synchronize(self.stream) };
            return Err(error);
        }
        state.flying.push_back(Launch {
            last,
            extent: (bytes >= FORECAST_FROM).then(|| (bytes, clock_ns())),
            event: None,
            mappings: std::mem::take(mappings),
        });
        if state.flying.len() == 1 {
            self.forecast(state);
        }
        Ok(())
    }

    /// Marks the end of what was launched last, before anything comes behind it.
    fn seal(&self, state: &mut State, entered: &Entered) -> Result<()> {
        if state.flying.back().is_none_or(|last| last.event.is_some()) {
            return Ok(());
        }
        let event = self.take_event(state, entered)?;
        // SAFETY: both were made in the context that is entered, and are live.
        if let Err(error) = unsafe { entered.driver().event_record(event, self.stream) } {
            state.idle.push(event);
            return Err(error);
        }
        if let Some(last) = state.flying.back_mut() {
            last.event = Some(event);
        }
        Ok(())
    }

    fn take_event(&self, state: &mut State, entered: &Entered) -> Result<Event> {
        if let Some(event) = state.idle.pop() {
            return Ok(event);
        }
        let mut event = Event::NULL;
        // SAFETY: `event` is written; a context is entered.
        unsafe {
            entered
                .driver()
                .event_create(&raw mut event, EVENT_DISABLE_TIMING)?;
        }
        Ok(event)
    }

    /// Asks the driver how far the stream has got, and gives it more.
    fn advance(&self) -> Result<()> {
        // Only compared: whether it is another than before.
        self.asked.fetch_add(1, Ordering::Relaxed);
        let mut done = Mapped::default();
        let mut state = self.state.lock();
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
    fn reap(&self, state: &mut State, entered: &Entered, done: &mut Mapped) -> Result<()> {
        while let Some(oldest) = state.flying.front() {
            // SAFETY: event and stream belong to the context that is entered, which still is the one they were made in.
            let asked = unsafe {
                match oldest.event {
                    Some(event) => entered.driver().event_query(event),
                    None => entered.driver().stream_query(self.stream),
                }
            };
            match asked {
                Ok(()) => self.pop(state, done),
                Err(error) if error.is(code::NOT_READY) => {
                    if state.forecast.is_kept() {
                        state.forecast.note_pending(clock_ns());
                    }
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
    fn forecast(&self, state: &mut State) {
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
        // SAFETY: the stream is live in the entered context.
        let waited =
            entered.and_then(|entered| unsafe { entered.driver().stream_synchronize(self.stream) });
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

    /// Waits for what is in flight, drops what waits and destroys the stream. `entered` is its context, unless that is
    /// gone.
    pub(super) fn close(&self, entered: Option<&Entered>) {
        let mut state = self.state.lock();
        let never: Vec<Member> = state.waiting.drain(..).map(|row| row.member).collect();
        self.fail(&mut state, never, Error::ContextLost);
        let mut end = End::Lost(Error::ContextLost);
        if let Some(entered) = entered {
            let driver = entered.driver();
            // SAFETY: made in this context by `open`, and not used again.
            let (drained, destroyed) = unsafe {
                (
                    driver.stream_synchronize(self.stream),
                    driver.stream_destroy(self.stream),
                )
            };
            if drained.is_ok() {
                end = End::Drained;
                self.finished.store(state.queued, Ordering::Release);
            }
            if let Err(error) = drained.and(destroyed) {
                log::debug!("closing a lane: {error}");
            }
            let flying = state.flying.iter().filter_map(|launch| launch.event);
            for event in flying.chain(state.idle.iter().copied()) {
                // SAFETY: made in this context, and in nobody's hands any more.
                let _ = unsafe { driver.event_destroy(event) };
            }
        }
        state.idle.clear();
        state.end.get_or_insert(end);
        // Mappings close after the stream has run dry, and after the lock is given back.
        let flying = std::mem::take(&mut state.flying);
        drop(state);
        drop(flying);
    }
}

impl End {
    fn error(self) -> Error {
        match self {
            End::Drained => Error::ContextLost,
            End::Lost(error) => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_kinds_of_copies_to_one_place_are_not_in_one_batch() {
        let to = |dst, bytes| Copy::Linear {
            dst,
            src: 0x9000,
            bytes,
        };
        let rows = Copy::Rows {
            dst: 100,
            dst_pitch: 10,
            src: 0,
            src_pitch: 4,
            width: 4,
            rows: 5,
        };
        let batch = [to(0, 8), to(64, 8), rows];
        let kinds = [true, true, false];
        for (next, kind, expected) in [
            (to(0, 8), true, false),
            (to(0, 8), false, true),
            (to(7, 2), false, true),
            (to(8, 56), false, false),
            (to(60, 8), false, true),
            (to(149, 1), true, true),
            (to(150, 1), true, false),
            (to(149, 1), false, false),
        ] {
            let found = is_apart(&batch, &kinds, &next, kind);
            assert_eq!(found, expected, "{next:?} {kind}");
        }
    }
}
