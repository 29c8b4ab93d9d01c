//! The engine's streams in every context.
//!
//! A context has a few lanes for each [`Purpose`], so that copies that use different engines do not queue
//! behind each other. On one lane copies run in the order in which they are launched. All streams of a
//! context are made when it is first used: making one later could get stuck behind a wait that the program
//! has pending on its device.

use super::copy::Copy;
use super::error::Result;
use super::measure::Timed;
use super::queue::{Gathered, InFlight, Queue};
use super::state::{ContextKey, Entered};
use super::types::{Event, EVENT_DISABLE_TIMING, STREAM_LEGACY, STREAM_PER_THREAD};
use super::Mapping;
use std::sync::Arc;

/// What a lane is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// Gets from a peer's memory, and copies inside a device.
    Get,
    /// Puts into a peer's memory.
    Put,
    /// From the device to the host.
    DeviceToHost,
    /// Gets out of staging memory on another GPU. They do not wait behind copies from the peer itself.
    GetStaged,
    /// From the host to the device.
    HostToDevice,
}

impl Purpose {
    const COUNT: usize = 5;
    const ALL: [Purpose; Self::COUNT] = [
        Purpose::Get,
        Purpose::Put,
        Purpose::DeviceToHost,
        Purpose::GetStaged,
        Purpose::HostToDevice,
    ];

    /// Lanes of this purpose in each context. One copy fills a link; more lanes let transfers overlap their
    /// start-up.
    const fn lanes(self) -> usize {
        match self {
            // A driver has few queues for copies between GPUs (four by default). Streams take the queues in
            // turn, in the order in which the streams are made, and a copy that waits in a queue keeps those
            // behind it waiting. So four lanes of one purpose do not get into each other's way. With one
            // other stream between them, the lanes of the first three relays do not wait for what is read
            // from the first rank itself. See `docs/decisions/four-streams-a-purpose.md`.
            Purpose::Get | Purpose::Put | Purpose::GetStaged => 4,
            Purpose::DeviceToHost | Purpose::HostToDevice => 1,
        }
    }
}

#[derive(Debug)]
struct ContextLanes {
    key: ContextKey,
    lanes: [Vec<Arc<Queue>>; Purpose::COUNT],
    /// Gets of peers that have joined those of another peer.
    joined: Vec<Joined>,
    used: u64,
}

/// Gets from a peer on another lane than its own, until the last of them is over: copies from one peer stay
/// in order.
#[derive(Debug)]
struct Joined {
    affinity: u64,
    lane: Arc<Queue>,
    last: u64,
}

impl ContextLanes {
    fn lane(&mut self, purpose: Purpose, affinity: u64) -> &Arc<Queue> {
        if purpose == Purpose::Get {
            self.joined.retain(|row| !row.lane.has_finished(row.last));
            if let Some(at) = self.joined_at(affinity) {
                return &self.joined[at].lane;
            }
        }
        let row = &self.lanes[purpose as usize];
        &row[(affinity % row.len() as u64) as usize]
    }

    /// A copy was queued or launched on the lane of this affinity.
    fn note_last(&mut self, purpose: Purpose, affinity: u64, copy: &InFlight) {
        let joined = (purpose == Purpose::Get).then(|| self.joined_at(affinity));
        if let Some(at) = joined.flatten() {
            self.joined[at].last = copy.number();
        }
    }

    fn joined_at(&self, affinity: u64) -> Option<usize> {
        self.joined.iter().position(|row| row.affinity == affinity)
    }

    /// Has the gets from a peer follow those from others that are not known to be done, on the lane of these.
    fn follow_others(&mut self, affinity: u64) {
        let own = Arc::clone(self.lane(Purpose::Get, affinity));
        if own.load() > 0 {
            return;
        }
        let mut lanes = self.lanes[Purpose::Get as usize].iter();
        if let Some(lane) = lanes.find(|lane| lane.load() > 0) {
            self.joined.push(Joined {
                affinity,
                last: lane.queued(),
                lane: Arc::clone(lane),
            });
        }
    }

    /// The lane that copies for this lane should join, if nothing else is under way on it.
    fn gathering(&self, own: &Arc<Queue>, bytes: u64) -> Option<Arc<Queue>> {
        let lanes = self.lanes[Purpose::Get as usize].iter();
        let mut others = lanes.filter(|lane| !Arc::ptr_eq(lane, own));
        let lane = others.find(|lane| lane.gathered(0).is_some_and(|all| all.takes(bytes)))?;
        (own.load() == 0).then(|| Arc::clone(lane))
    }
}

/// The engine's streams in every context it has used.
pub struct Lanes {
    contexts: Vec<ContextLanes>,
    clock: u64,
    /// Lanes with copies queued since the last [`Lanes::launch`].
    fresh: Vec<(Purpose, Arc<Queue>)>,
}

/// Contexts that have lanes at one time: programs have one per device, some a few.
const CONTEXTS_MAX: usize = 64;

impl Default for Lanes {
    fn default() -> Lanes {
        Lanes::new()
    }
}

impl Lanes {
    /// No lanes yet.
    #[must_use]
    pub fn new() -> Lanes {
        Lanes {
            contexts: Vec::new(),
            clock: 0,
            fresh: Vec::new(),
        }
    }

    /// Makes the lanes of a context, unless it has them. Call it when a context is met first.
    pub fn open(&mut self, key: ContextKey) -> Result<()> {
        self.find_or_open(key).map(|_| ())
    }

    /// Queues a copy on a lane of a context. [`Lanes::launch`] launches it together with others; their order
    /// does not matter. `affinity` spreads transfers over the lanes of one purpose (a peer's number, say),
    /// unless a few short gets can be launched in one batch: four H200s each of which reads 1 KiB to 2 MiB
    /// from the others are done 2.5 to 3.5 us sooner by one batch than by three lanes (see
    /// `docs/decisions/one-batch-for-several-senders.md`). The mapping is kept open until the copy is done.
    pub fn add(
        &mut self,
        key: ContextKey,
        purpose: Purpose,
        affinity: u64,
        copy: Copy,
        mapping: Option<Arc<Mapping>>,
    ) -> Result<InFlight> {
        let is_first = self.fresh.is_empty();
        let lanes = self.find_or_open(key)?;
        let own = Arc::clone(lanes.lane(purpose, affinity));
        let others = (purpose == Purpose::Get && !is_first)
            .then(|| lanes.gathering(&own, copy.bytes()))
            .flatten();
        if let Some(lane) = others {
            let queued = lane.add(copy, mapping);
            lanes.joined.push(Joined {
                affinity,
                lane,
                last: queued.number(),
            });
            return Ok(queued);
        }
        let queued = own.add(copy, mapping);
        lanes.note_last(purpose, affinity, &queued);
        if !self.fresh.iter().any(|(_, known)| Arc::ptr_eq(known, &own)) {
            self.fresh.push((purpose, own));
        }
        Ok(queued)
    }

    /// The next gets from a peer follow those from others, unless some of its own are under way. Launches on
    /// several lanes share the device's engines and end late, together; those on one lane follow each other
    /// without a gap.
    pub fn follow_others(&mut self, key: ContextKey, affinity: u64) -> Result<()> {
        self.find_or_open(key)?.follow_others(affinity);
        Ok(())
    }

    /// Launches a copy at once if its lane has little to do. Otherwise it is launched together with those
    /// that come meanwhile, when one of them is polled. Their order does not matter.
    pub fn submit_soon(
        &mut self,
        key: ContextKey,
        purpose: Purpose,
        copy: Copy,
    ) -> Result<InFlight> {
        let lane = self.find_or_open(key)?.lane(purpose, 0);
        let queued = lane.add(copy, None);
        lane.launch();
        Ok(queued)
    }

    /// What waits to be launched, if these are only gets that others may join (see [`Lanes::add`]), each
    /// behind at most `behind` launches that are not known to be done.
    #[must_use]
    pub fn gathered(&self, behind: usize) -> Option<Gathered> {
        let mut fresh = self.fresh.iter();
        let first = Gathered::default();
        let all = fresh.try_fold(first, |all, (purpose, lane)| {
            let lane = (*purpose == Purpose::Get).then(|| lane.gathered(behind))??;
            Some(Gathered {
                count: all.count + lane.count,
                longest: all.longest.max(lane.longest),
                bytes: all.bytes + lane.bytes,
            })
        });
        all.filter(|all| *all != first)
    }

    /// Launches queued copies on lanes that have little to do. The other lanes launch theirs when they are
    /// polled.
    pub fn launch(&mut self) {
        if self.fresh.is_empty() {
            return;
        }
        self.fresh.drain(..).for_each(|(_, lane)| lane.launch());
    }

    /// Call while more is being queued: launches what makes a batch by itself.
    pub fn launch_ahead(&self) {
        self.fresh.iter().for_each(|(_, lane)| lane.launch_ahead());
    }

    /// Starts copies at once, one after the other, on a lane of a context.
    ///
    /// Host memory must be pinned, or the driver may copy before it returns. Nothing here waits for the
    /// device. On an error no copy of this call runs any more.
    pub fn submit(
        &mut self,
        key: ContextKey,
        purpose: Purpose,
        copies: &[Copy],
    ) -> Result<InFlight> {
        self.submit_on(key, purpose, 0, copies, None)
    }

    /// Like [`Lanes::submit`], on the lane that [`Lanes::add`] would take, with a mapping that is kept open
    /// meanwhile.
    pub fn submit_on(
        &mut self,
        key: ContextKey,
        purpose: Purpose,
        affinity: u64,
        copies: &[Copy],
        mapping: Option<Arc<Mapping>>,
    ) -> Result<InFlight> {
        let lanes = self.find_or_open(key)?;
        let entered = Entered::enter_same(key)?;
        let lane = lanes.lane(purpose, affinity);
        let copies = lane.submit(&entered, copies, mapping)?;
        lanes.note_last(purpose, affinity, &copies);
        Ok(copies)
    }

    /// Like [`Lanes::submit_on`], and measures the time that each copy takes on the device.
    pub fn submit_timed(
        &mut self,
        key: ContextKey,
        purpose: Purpose,
        affinity: u64,
        copies: &[Copy],
        mapping: Option<Arc<Mapping>>,
    ) -> Result<(InFlight, Timed)> {
        let lanes = self.find_or_open(key)?;
        let entered = Entered::enter_same(key)?;
        let timed = Timed::new(&entered, key, copies)?;
        let lane = lanes.lane(purpose, affinity);
        let copies = lane.submit_marked(&entered, copies, mapping, timed.marks())?;
        lanes.note_last(purpose, affinity, &copies);
        Ok((copies, timed))
    }

    /// Launches on a lane that are not known to be done, plus copies that wait for one.
    pub fn load(&mut self, key: ContextKey, purpose: Purpose, affinity: u64) -> Result<usize> {
        Ok(self.find_or_open(key)?.lane(purpose, affinity).load())
    }

    /// Lets all further copies of a context wait for what its default streams have pending now. This is for
    /// memory on which memsets and device-to-device copies called as synchronous cannot be made so: they may
    /// still be under way there.
    ///
    /// Nothing is enqueued if those streams are idle, which is the rule, or if the legacy stream cannot be
    /// used because a stream is being captured. The awaited work is work of the program that it believes to
    /// be over. Returns true if there is none, for certain.
    pub fn after_default_streams(&mut self, key: ContextKey) -> Result<bool> {
        let lanes = self.find_or_open(key)?;
        let entered = Entered::enter_same(key)?;
        let driver = entered.driver();
        let mut capturing = 0;
        let usable = driver.stream_is_capturing(STREAM_LEGACY, &mut capturing);
        let idle = |stream| driver.stream_query(stream).is_ok();
        if usable.is_err() {
            return Ok(false);
        }
        if idle(STREAM_LEGACY) && idle(STREAM_PER_THREAD) {
            return Ok(true);
        }
        let mut event = Event::NULL;
        driver.event_create(&mut event, EVENT_DISABLE_TIMING)?;
        // An event of the legacy stream also follows the program's blocking streams, the one of its thread
        // among them.
        let ordered = driver.event_record(event, STREAM_LEGACY).and_then(|()| {
            let mut lanes = lanes.lanes.iter().flatten();
            lanes.try_for_each(|lane| lane.follow(&entered, event))
        });
        // SAFETY: as above; the driver keeps it for those that wait.
        let destroyed = unsafe { driver.event_destroy(event) };
        ordered.and(destroyed).map(|()| false)
    }

    /// Waits for every lane and destroys it: at finalize.
    pub fn close(&mut self) {
        self.fresh.clear();
        self.contexts.drain(..).for_each(close);
    }

    /// Contexts that have lanes.
    #[must_use]
    pub fn contexts(&self) -> usize {
        self.contexts.len()
    }

    fn find_or_open(&mut self, key: ContextKey) -> Result<&mut ContextLanes> {
        self.clock += 1;
        let clock = self.clock;
        let place = match self.contexts.iter().position(|lanes| lanes.key == key) {
            Some(place) => place,
            None => {
                self.drop_lost(key);
                let lanes = open(key)?;
                self.contexts.push(lanes);
                self.contexts.len() - 1
            }
        };
        let lanes = &mut self.contexts[place];
        lanes.used = clock;
        Ok(lanes)
    }

    /// Drops lanes of contexts that are gone and, where there are too many, those unused for longest.
    fn drop_lost(&mut self, new: ContextKey) {
        let (kept, lost): (Vec<_>, Vec<_>) = self
            .contexts
            .drain(..)
            .partition(|lanes| lanes.key.handle != new.handle && lanes.key.is_alive());
        self.contexts = kept;
        lost.into_iter().for_each(close);
        if self.contexts.len() >= CONTEXTS_MAX {
            if let Some(oldest) =
                (0..self.contexts.len()).min_by_key(|place| self.contexts[*place].used)
            {
                close(self.contexts.swap_remove(oldest));
            }
        }
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        self.close();
    }
}

fn open(key: ContextKey) -> Result<ContextLanes> {
    let entered = Entered::enter_same(key)?;
    let mut lanes = ContextLanes {
        key,
        lanes: Default::default(),
        joined: Vec::new(),
        used: 0,
    };
    for purpose in Purpose::ALL {
        for _ in 0..purpose.lanes() {
            match Queue::open(&entered, key, purpose) {
                Ok(lane) => lanes.lanes[purpose as usize].push(lane),
                Err(error) => {
                    close(lanes);
                    return Err(error);
                }
            }
        }
    }
    Ok(lanes)
}

/// Drains and destroys the streams of a context. Nothing is left to do where it is gone.
fn close(lanes: ContextLanes) {
    let entered = Entered::enter_same(lanes.key).ok();
    for lane in lanes.lanes.iter().flatten() {
        lane.close(entered.as_ref());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn purposes_index_their_streams() {
        for (place, purpose) in Purpose::ALL.into_iter().enumerate() {
            assert_eq!(purpose as usize, place);
            assert!(purpose.lanes() > 0);
        }
    }
}
