//! One stream of the engine's own, and the copies that are queued, launched and in flight on it.
//!
//! The cost of a copy to the device, beside its bytes, falls from 3 us to 0.5 in a batch. So copies that may
//! be batched ([`Queue::add`]) are launched at once while the stream has little to do, and together once it
//! has done some of it. Two launches in flight keep it busy meanwhile.

mod ask;
mod launch;

pub use ask::InFlight;

use super::copy::{self, Copy, OfEach};
use super::error::{Error, Result};
use super::forecast::Forecast;
use super::lanes::Purpose;
use super::state::{ContextKey, Entered};
use super::types::{Event, Stream, Uuid, STREAM_NON_BLOCKING};
use super::Mapping;
use crate::policy::{decided, launch as policy};
use crate::trace::{self, Copying, Launched};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};

/// Copies that one stream may have in flight, launched one by one.
const IN_FLIGHT_MAX: usize = 1024;

/// Streams that were opened.
static OPENED: AtomicU32 = AtomicU32::new(0);

/// A stream and its copies. Numbers count copies in the order in which they were queued.
#[derive(Debug)]
pub(super) struct Queue {
    key: ContextKey,
    /// Number of the stream, in the order in which they were opened.
    number: u32,
    /// The GPU, and what copies here are for: only the trace asks, so that other programs need no driver that tells.
    gpu: OnceLock<Uuid>,
    purpose: Purpose,
    stream: Stream,
    /// Number of the latest copy known to be done; all before it are as well.
    finished: AtomicU64,
    /// Copies that could not be launched and whose owners do not know yet.
    failures: AtomicUsize,
    /// Times that the driver was asked how far it is.
    asked: AtomicU32,
    /// When the oldest launch can be over at the earliest, by [`super::driver::clock_ns`]; 0 where that is
    /// not known.
    due_ns: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Number of the latest copy queued.
    queued: u64,
    /// Copies that are not launched, oldest first.
    waiting: VecDeque<Waiting>,
    /// The latest of them were queued since the last [`Queue::launch`], which may hold them back for more.
    is_fresh: bool,
    /// Launches that are not known to be done, oldest first.
    flying: VecDeque<Launch>,
    forecast: Forecast,
    idle: Vec<Event>,
    /// When a launch was last seen not to be over, by the trace's clock; 0: not since it has begun.
    asked: u64,
    /// Copies that could not be made, until their owners are told.
    failed: Vec<(Member, Error)>,
    end: Option<End>,
}

impl State {
    /// There are copies to be launched, and the stream has little to do.
    fn may_launch(&self) -> bool {
        !self.waiting.is_empty() && policy::has_room(self.flying.len())
    }

    /// There are copies to be launched, and no more launches than these are in flight before them.
    fn is_unlaunched(&self, behind: usize) -> bool {
        self.is_fresh && self.flying.len() <= behind
    }
}

/// Copies that are to be launched next, and may wait for more.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Gathered {
    /// How many.
    pub count: usize,
    /// Bytes of the longest.
    pub longest: u64,
    /// Bytes of all.
    pub bytes: u64,
}

impl Gathered {
    /// Whether one more copy of so many bytes should join them: a batch of all is short.
    pub(super) fn takes(&self, bytes: u64) -> bool {
        let (count, all) = (self.count, self.bytes);
        decided!(
            "launch.waits_for",
            (count, all, bytes),
            policy::waits_for(count, all, bytes)
        )
    }
}

/// A copy's number, and whether anybody still wants it.
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
    traced: Option<Copying>,
}

/// Copies launched together.
#[derive(Debug)]
struct Launch {
    /// Number of the last of them.
    last: u64,
    /// Their bytes, and when they were launched, if they are worth a forecast.
    extent: Option<(u64, u64)>,
    /// Marks their end. None while nothing is launched behind them: then the stream itself is asked, which
    /// saves a message that comes alone the call.
    event: Option<Event>,
    /// Kept open until the copies are done, whether or not anybody still wants them.
    mappings: Mapped,
    traced: Launched,
}

/// Mappings that are kept open: mostly one, for which nothing is allocated.
#[derive(Debug, Default, Clone)]
struct Mapped {
    first: Option<Arc<Mapping>>,
    others: SmallVec<[Arc<Mapping>; 3]>,
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
            others: SmallVec::new(),
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

impl Queue {
    /// Makes a stream in the context that is entered, which is that of the key.
    pub(super) fn open(entered: &Entered, key: ContextKey, purpose: Purpose) -> Result<Arc<Queue>> {
        let mut stream = Stream::NULL;
        entered
            .driver()
            .stream_create(&mut stream, STREAM_NON_BLOCKING)?;
        Ok(Arc::new(Queue {
            key,
            number: OPENED.fetch_add(1, Ordering::Relaxed),
            gpu: OnceLock::new(),
            purpose,
            stream,
            finished: AtomicU64::new(0),
            failures: AtomicUsize::new(0),
            asked: AtomicU32::new(0),
            due_ns: AtomicU64::new(0),
            state: Mutex::default(),
        }))
    }

    /// Queues a copy for the next launch; see [`Queue::launch`]. Its order among others that wait is not
    /// kept.
    pub(super) fn add(self: &Arc<Queue>, copy: Copy, mapping: Option<Arc<Mapping>>) -> InFlight {
        let traced = self.traced(&copy, mapping.as_deref());
        let mut state = self.state.lock();
        let (member, owned) = self.member(&mut state);
        state.waiting.push_back(Waiting {
            member,
            copy,
            mapping,
            traced,
        });
        state.is_fresh = true;
        owned
    }

    /// Launches copies at once, one after the other and after all that are queued. On an error none of them
    /// runs any more.
    pub(super) fn submit(
        self: &Arc<Queue>,
        entered: &Entered,
        copies: &[Copy],
        mapping: Option<Arc<Mapping>>,
    ) -> Result<InFlight> {
        self.submit_marked(entered, copies, mapping, &[])
    }

    /// The same, with events recorded before the first copy and after each, as far as there are any. The
    /// events were made in the context that is entered, and are live.
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
            Some(event) => entered.driver().event_record(*event, self.stream),
            None => Ok(()),
        };
        let bytes = copies.iter().map(Copy::bytes).sum();
        let traced: OfEach<Copying> = copies
            .iter()
            .filter_map(|copy| self.traced(copy, mapping.as_deref()))
            .collect();
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
        note_traced(&mut state, traced);
        Ok(owned)
    }

    /// Launches that are not known to be done, and copies that wait for one.
    pub(super) fn load(&self) -> usize {
        let state = self.state.lock();
        state.flying.len() + state.waiting.len()
    }

    /// What is to be launched on this stream next, if at most `behind` launches are in flight on it.
    pub(super) fn gathered(&self, behind: usize) -> Option<Gathered> {
        let state = self.state.lock();
        state.is_unlaunched(behind).then(|| {
            let bytes = state.waiting.iter().map(|row| row.copy.bytes());
            bytes.fold(Gathered::default(), |all, bytes| Gathered {
                count: all.count + 1,
                longest: all.longest.max(bytes),
                bytes: all.bytes + bytes,
            })
        })
    }

    /// Number of the latest copy queued.
    pub(super) fn queued(&self) -> u64 {
        self.state.lock().queued
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
        entered.driver().stream_wait_event(self.stream, event, 0)
    }

    /// What the trace is told of a copy, if there is one.
    #[inline]
    fn traced(&self, copy: &Copy, mapping: Option<&Mapping>) -> Option<Copying> {
        if !trace::on() {
            return None;
        }
        let own = Some(*self.gpu.get_or_init(|| self.ask_gpu().unwrap_or_default()));
        let other = mapping.map_or(own, |mapping| Some(mapping.gpu()));
        let (from, to, hop) = match (self.purpose, copy) {
            (_, Copy::Up { .. }) | (Purpose::HostToDevice, _) => (None, own, 1),
            (Purpose::Get, _) => (other, own, 0),
            (Purpose::GetStaged, _) => (other, own, 1),
            (Purpose::Put, _) => (own, other, 0),
            (Purpose::DeviceToHost, _) => (other, None, 0),
        };
        Copying::new([from, to], hop, copy.bytes(), self.number)
    }

    /// The GPU of this stream's context.
    #[cold]
    fn ask_gpu(&self) -> Result<Uuid> {
        let entered = Entered::ask(self.key)?;
        let (mut device, mut gpu) = (0, Uuid::default());
        entered.driver().ctx_get_device(&mut device)?;
        entered.driver().device_get_uuid(&mut gpu, device)?;
        Ok(gpu)
    }

    fn member(self: &Arc<Queue>, state: &mut State) -> (Member, InFlight) {
        state.queued += 1;
        let owner = Arc::new(());
        let member = Member {
            number: state.queued,
            owner: Arc::downgrade(&owner),
        };
        let owned = InFlight::new(Arc::clone(self), state.queued, owner);
        (member, owned)
    }

    /// Waits for what is in flight, drops what waits and destroys the stream. `entered` is its context,
    /// unless that is gone.
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

/// What was launched last is recorded when it is over.
fn note_traced(state: &mut State, traced: impl IntoIterator<Item = Copying>) {
    if let Some(last) = state.flying.back_mut().filter(|_| trace::on()) {
        last.traced = Launched::now(traced.into_iter());
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
