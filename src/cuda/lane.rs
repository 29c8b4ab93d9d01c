//! Streams of the engine's own, and copies in flight on them.
//!
//! A context has a few lanes for each [`Purpose`], so that copies that use different engines do not queue behind each
//! other. On one lane copies run in the order of submission. All streams of a context are made when it is first used:
//! making one later could get stuck behind a wait that the program has pending on its device.

use super::error::{Error, Result};
use super::events::{EventPool, Finished, InFlight, Place};
use super::state::{ContextKey, Entered};
use super::types::{
    memory_type, Context, Memcpy2d, Stream, STREAM_LEGACY, STREAM_NON_BLOCKING, STREAM_PER_THREAD,
};
use std::ffi::c_void;
use std::sync::Arc;

/// What a lane is for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Purpose {
    /// Pulling from a peer's memory, and copies inside a device.
    Pull,
    /// Pushing into a peer's memory.
    Push,
    /// From the device to the host.
    DeviceToHost,
    /// From the host to the device.
    HostToDevice,
}

impl Purpose {
    const COUNT: usize = 4;
    const ALL: [Purpose; Self::COUNT] = [
        Purpose::Pull,
        Purpose::Push,
        Purpose::DeviceToHost,
        Purpose::HostToDevice,
    ];

    /// Lanes of this purpose in each context. One copy fills a link; more lanes let transfers overlap their start-up.
    const fn lanes(self) -> usize {
        match self {
            Purpose::Pull => 4,
            Purpose::Push => 2,
            Purpose::DeviceToHost | Purpose::HostToDevice => 1,
        }
    }
}

/// A copy. Addresses are of the unified address space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Copy {
    /// Contiguous bytes, wherever they are.
    Linear {
        /// Destination.
        dst: u64,
        /// Source.
        src: u64,
        /// Bytes.
        bytes: u64,
    },
    /// Contiguous bytes between two contexts of this process, whether or not they have peer access.
    Peer {
        /// Destination.
        dst: u64,
        /// Context of the destination.
        dst_context: Context,
        /// Source.
        src: u64,
        /// Context of the source.
        src_context: Context,
        /// Bytes.
        bytes: u64,
    },
    /// Rows of equal length at equal distances.
    Rows {
        /// Destination of the first row.
        dst: u64,
        /// Bytes from row to row in the destination.
        dst_pitch: u64,
        /// Source of the first row.
        src: u64,
        /// Bytes from row to row in the source.
        src_pitch: u64,
        /// Bytes of a row, at most the smaller pitch.
        width: u64,
        /// Rows.
        rows: u64,
    },
}

impl Copy {
    /// Bytes that it moves.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self {
            Copy::Linear { bytes, .. } | Copy::Peer { bytes, .. } => *bytes,
            Copy::Rows { width, rows, .. } => width * rows,
        }
    }
}

/// A word that the device writes once the copies before it are done, for a process that polls it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Flag {
    /// Device address of the word, in registered host memory (see [`super::pinned::device_address`]).
    pub address: u64,
    /// Value.
    pub value: u32,
}

#[derive(Debug)]
struct Lane {
    stream: Stream,
    /// Number of the latest submission.
    submitted: u64,
    finished: Finished,
}

#[derive(Debug)]
struct ContextLanes {
    key: ContextKey,
    lanes: [Vec<Lane>; Purpose::COUNT],
    events: Arc<EventPool>,
    used: u64,
}

/// The engine's streams in every context it has used.
pub struct Lanes {
    contexts: Vec<ContextLanes>,
    clock: u64,
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
        }
    }

    /// Makes the lanes of a context, unless it has them. To be called when a context is met first.
    pub fn open(&mut self, key: ContextKey) -> Result<()> {
        self.find_or_open(key).map(|_| ())
    }

    /// Starts copies, one after the other, on a lane of a context; then, if asked for, the flag is written.
    ///
    /// `affinity` picks among the lanes of one purpose: equal values keep the order of submission (a peer's number,
    /// say). Host memory must be pinned, or the driver may copy before it returns. Nothing here waits for the device.
    /// On an error no copy of this call runs any more.
    pub fn submit(
        &mut self,
        key: ContextKey,
        purpose: Purpose,
        affinity: u64,
        copies: &[Copy],
        flag: Option<Flag>,
    ) -> Result<InFlight> {
        let lanes = self.find_or_open(key)?;
        let entered = Entered::enter_same(key)?;
        let row = &mut lanes.lanes[purpose as usize];
        let index = usize::try_from(affinity % row.len() as u64).unwrap_or(0);
        let lane = &mut row[index];
        let stream = lane.stream;
        let event = lanes.events.take(&entered)?;
        let started = start(&entered, stream, copies, flag).and_then(|()| {
            // SAFETY: both were made in the context that is entered, and are live.
            unsafe { entered.driver().event_record(event, stream) }
        });
        if let Err(error) = started {
            // SAFETY: as above. What this call has started must not run on once its caller believes it failed.
            let _ = unsafe { entered.driver().stream_synchronize(stream) };
            lanes.events.give(key, event);
            return Err(error);
        }
        lane.submitted += 1;
        let place = Place {
            number: lane.submitted,
            finished: Arc::clone(&lane.finished),
        };
        Ok(InFlight::new(key, event, Arc::clone(&lanes.events), place))
    }

    /// One contiguous copy; see [`Lanes::submit`].
    pub fn copy_async(
        &mut self,
        key: ContextKey,
        purpose: Purpose,
        affinity: u64,
        dst: u64,
        src: u64,
        bytes: u64,
    ) -> Result<InFlight> {
        self.submit(
            key,
            purpose,
            affinity,
            &[Copy::Linear { dst, src, bytes }],
            None,
        )
    }

    /// Lets all further copies of a context wait for what its default streams have pending now. For memory on which
    /// memsets and device-to-device copies called as synchronous cannot be made so: they may still be under way there.
    ///
    /// Nothing is enqueued where those streams are idle, which is the rule, or where the legacy stream cannot be used
    /// because a stream is being captured. What is waited for is work of the program that it believes to be over.
    pub fn after_default_streams(&mut self, key: ContextKey) -> Result<()> {
        let lanes = self.find_or_open(key)?;
        let entered = Entered::enter_same(key)?;
        let driver = entered.driver();
        let mut capturing = 0;
        // SAFETY: one word is written; the handle names a stream of the entered context.
        let usable = unsafe { driver.stream_is_capturing(STREAM_LEGACY, &raw mut capturing) };
        // SAFETY: as above.
        let idle = |stream| unsafe { driver.stream_query(stream) }.is_ok();
        if usable.is_err() || (idle(STREAM_LEGACY) && idle(STREAM_PER_THREAD)) {
            return Ok(());
        }
        let event = lanes.events.take(&entered)?;
        // An event of the legacy stream also follows the program's blocking streams, the one of its thread among them.
        // SAFETY: event and lanes were made in the context that is entered, and are live.
        let ordered = unsafe { driver.event_record(event, STREAM_LEGACY) }.and_then(|()| {
            let mut streams = lanes.lanes.iter().flatten();
            // SAFETY: as above. The event may be recorded anew afterwards: a wait is for what was recorded before it.
            streams.try_for_each(|lane| unsafe { driver.stream_wait_event(lane.stream, event, 0) })
        });
        lanes.events.give(key, event);
        ordered
    }

    /// Releases events and mappings of copies that were dropped and have finished since. Cheap where there are none.
    pub fn reclaim(&mut self) {
        for lanes in &mut self.contexts {
            if !lanes.events.has_abandoned() {
                continue;
            }
            if let Ok(entered) = Entered::enter_same(lanes.key) {
                lanes.events.reclaim(&entered);
            }
        }
    }

    /// Waits for every lane and destroys it: at finalize.
    pub fn close(&mut self) {
        for lanes in self.contexts.drain(..) {
            close(lanes);
        }
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
        events: Arc::new(EventPool::default()),
        used: 0,
    };
    for purpose in Purpose::ALL {
        for _ in 0..purpose.lanes() {
            let mut stream = Stream::NULL;
            // SAFETY: `stream` is written; the context is entered.
            let made = unsafe {
                entered
                    .driver()
                    .stream_create(&raw mut stream, STREAM_NON_BLOCKING)
            };
            if let Err(error) = made {
                close(lanes);
                return Err(error);
            }
            lanes.lanes[purpose as usize].push(Lane {
                stream,
                submitted: 0,
                finished: Finished::default(),
            });
        }
    }
    Ok(lanes)
}

/// Drains and destroys the streams of a context. Nothing is left to do where it is gone.
fn close(lanes: ContextLanes) {
    lanes.events.close(lanes.key, |entered| {
        let driver = entered.driver();
        let mut drained = true;
        for Lane { stream, .. } in lanes.lanes.iter().flatten() {
            // SAFETY: made in this context by `open`, and not used again.
            let (finished, destroyed) = unsafe {
                (
                    driver.stream_synchronize(*stream),
                    driver.stream_destroy(*stream),
                )
            };
            drained &= finished.is_ok();
            if let Err(error) = finished.and(destroyed) {
                log::debug!("closing a lane: {error}");
            }
        }
        drained
    });
}

fn start(entered: &Entered, stream: Stream, copies: &[Copy], flag: Option<Flag>) -> Result<()> {
    copies
        .iter()
        .filter(|copy| copy.bytes() > 0)
        .try_for_each(|copy| start_copy(entered, stream, copy))?;
    match flag {
        // SAFETY: the stream is live in the entered context; the address is of registered memory by the caller's word,
        // and the driver checks that it knows it.
        Some(flag) => unsafe {
            entered
                .driver()
                .stream_write_value_32(stream, flag.address, flag.value, 0)
        },
        None => Ok(()),
    }
}

fn start_copy(entered: &Entered, stream: Stream, copy: &Copy) -> Result<()> {
    let driver = entered.driver();
    // SAFETY: the stream is live in the entered context. The driver checks device addresses; that host memory stays
    // valid until the copy is done is the engine's obligation, met by holding buffers in the transfer.
    unsafe {
        match *copy {
            Copy::Linear { dst, src, bytes } => driver.memcpy_async(dst, src, size(bytes)?, stream),
            Copy::Peer {
                dst,
                dst_context,
                src,
                src_context,
                bytes,
            } => driver.memcpy_peer_async(dst, dst_context, src, src_context, size(bytes)?, stream),
            Copy::Rows {
                dst,
                dst_pitch,
                src,
                src_pitch,
                width,
                rows,
            } => {
                let copy = rows_copy(
                    dst,
                    size(dst_pitch)?,
                    src,
                    size(src_pitch)?,
                    size(width)?,
                    size(rows)?,
                );
                driver.memcpy_2d_async(&raw const copy, stream)
            }
        }
    }
}

fn size(value: u64) -> Result<usize> {
    usize::try_from(value).map_err(|_| Error::Exhausted("address space"))
}

fn rows_copy(
    dst: u64,
    dst_pitch: usize,
    src: u64,
    src_pitch: usize,
    width: usize,
    rows: usize,
) -> Memcpy2d {
    Memcpy2d {
        src_x_in_bytes: 0,
        src_y: 0,
        src_memory_type: memory_type::UNIFIED,
        src_host: std::ptr::null(),
        src_device: src,
        src_array: std::ptr::null_mut::<c_void>(),
        src_pitch,
        dst_x_in_bytes: 0,
        dst_y: 0,
        dst_memory_type: memory_type::UNIFIED,
        dst_host: std::ptr::null_mut(),
        dst_device: dst,
        dst_array: std::ptr::null_mut::<c_void>(),
        dst_pitch,
        width_in_bytes: width,
        height: rows,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_copies() {
        assert_eq!(
            Copy::Linear {
                dst: 0,
                src: 0,
                bytes: 7
            }
            .bytes(),
            7
        );
        let rows = Copy::Rows {
            dst: 0,
            dst_pitch: 16,
            src: 0,
            src_pitch: 8,
            width: 4,
            rows: 3,
        };
        assert_eq!(rows.bytes(), 12);
    }

    #[test]
    fn purposes_index_their_streams() {
        for (place, purpose) in Purpose::ALL.into_iter().enumerate() {
            assert_eq!(purpose as usize, place);
            assert!(purpose.lanes() > 0);
        }
    }

    #[test]
    fn the_layout_is_that_of_the_driver_on_64_bits() {
        // CUDA_MEMCPY2D in cuda.h: 16 members, the two 32-bit ones padded.
        assert_eq!(std::mem::size_of::<Memcpy2d>(), 128);
        assert_eq!(std::mem::offset_of!(Memcpy2d, dst_memory_type), 72);
        assert_eq!(std::mem::offset_of!(Memcpy2d, width_in_bytes), 112);
    }
}
