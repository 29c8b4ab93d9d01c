//! This rank's own segment: slots for its outbox, and staging memory.

use super::cells::Cells;
use super::details::DETAIL_WORDS;
use super::gpu_page::{OwnGpuPage, GPU_PAGE_BYTES};
use super::map::Mapping;
use super::pool::Pool;
use super::sheet::{Sums, SHEET_BYTES};
use super::slot::{Message, Slot, SLOT_BYTES};
use super::sys::{self, GuardedFd};
use super::traffic::{HostLinkRates, Measured, Traffic};
use super::view::{Layout, Owner, Readiness, View, FIRST_CELL, HEADER_BYTES};
use super::{mix, Options};
use parking_lot::Mutex;
use std::io;
use std::ops::Deref;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;
use std::time::Duration;

/// Slots that the outbox grows by at first (one step is 64 KiB); it doubles from then on, up to the largest
/// step.
const SLOT_STEP_MIN: u32 = 256;
const SLOT_STEP_MAX: u32 = 16_384;

/// The segment of this process.
#[derive(Debug)]
pub struct Segment {
    view: View,
    file: GuardedFd,
    outbox: Mutex<Outbox>,
    staging: Mutex<Staging>,
    /// Whether there is memory for staging, which is asked for once and for all.
    has_staging: OnceLock<bool>,
    gpu_page: OwnGpuPage,
    nonce_base: u64,
    nonces: AtomicU64,
}

impl Deref for Segment {
    type Target = View;
    fn deref(&self) -> &View {
        &self.view
    }
}

/// Which slots are in use.
#[derive(Debug, Default)]
struct Outbox {
    ready: u32,
    free: Vec<u32>,
    /// Where in `free` a slot is; [`IN_USE`] where it is not.
    places: Vec<u32>,
    /// Memory ran out once. It is asked for again only after so many allocations have failed.
    refusals: u32,
    is_refusal_told: bool,
}

/// The place of a slot that is in use.
const IN_USE: u32 = u32::MAX;

impl Outbox {
    fn is_free(&self, index: u32) -> bool {
        self.places
            .get(index as usize)
            .is_some_and(|&place| place != IN_USE)
    }

    /// Takes a slot that is free.
    fn take(&mut self, index: u32) {
        let place = std::mem::replace(&mut self.places[index as usize], IN_USE);
        self.free.swap_remove(place as usize);
        if let Some(&moved) = self.free.get(place as usize) {
            self.places[moved as usize] = place;
        }
    }

    fn give(&mut self, index: u32) {
        self.places[index as usize] = self.free.len() as u32;
        self.free.push(index);
    }
}

/// Which pieces of staging are in use.
#[derive(Debug, Default)]
struct Staging {
    chunks: Pool,
    cells: Cells,
}

impl Segment {
    pub(super) fn create(owner: Owner, options: &Options) -> io::Result<Self> {
        let layout = options.layout();
        if !layout.is_sane() {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let fd = sys::memfd(c"anabranch")?;
        std::fs::File::from(fd.try_clone()?).set_len(layout.bytes())?;
        sys::allocate(fd.as_fd(), 0, HEADER_BYTES)?;
        sys::seal_size(fd.as_fd())?;
        let map = Mapping::new(fd.as_fd(), layout.bytes())?;
        let view = View::create(map, layout, owner)
            .ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))?;
        Ok(Self {
            view,
            file: GuardedFd::new(fd, sys::FD_MINIMUM)?,
            outbox: Mutex::default(),
            staging: Mutex::default(),
            has_staging: OnceLock::new(),
            gpu_page: OwnGpuPage::default(),
            nonce_base: sys::random_u64(),
            nonces: AtomicU64::new(0),
        })
    }

    /// Number of the memfd, for peers to open through `/proc`.
    pub(super) fn file_number(&self) -> i32 {
        self.file.number()
    }

    /// Says whether the helper runs, so that peers may send RTS.
    pub fn set_ready(&self, ready: Readiness) {
        self.view.set_ready(ready);
    }

    /// Says which ranks this one has met, and whose segments it cannot open: see [`View::has_met`].
    pub(super) fn set_met(&self, generation: u32, refused: impl Iterator<Item = u32>) {
        self.view.set_met(generation, refused);
    }

    /// Says whether this rank has a wish: see [`View::wishes`].
    pub fn set_wish(&self, key: u64, wanted: bool) {
        self.view.set_wish(key, wanted);
    }

    /// Says that this rank is in Finalize and receives nothing more.
    pub fn set_finalizing(&self) {
        self.view.set_finalizing();
    }

    /// Says from whom this rank reads long messages.
    pub fn set_reading(&self, rank: Option<u32>) {
        self.view.set_reading(rank);
    }

    /// Says that the counters are final.
    pub fn set_published(&self) {
        self.view.set_published();
    }

    /// Lists a GPU that this rank uses.
    pub fn list_link_rates(&self, link_rates: &HostLinkRates) {
        self.view.traffic().list(link_rates);
    }

    /// Publishes what this rank uses of a hop, in one of the rows for that.
    pub fn write_traffic(&self, row: usize, traffic: &Traffic) {
        self.view.traffic().write(row, traffic);
    }

    /// Publishes what this rank has measured of a hop. False if there is no room.
    pub fn tell_measured(&self, measured: &Measured) -> bool {
        self.view.traffic().tell(measured)
    }

    /// Wakes whoever sleeps in [`Segment::wait_doorbell`].
    pub fn wake_sleepers(&self) {
        self.view.wake_sleepers();
    }

    /// Whether anybody sleeps in [`Segment::wait_doorbell`], or is about to sleep.
    pub fn sleeps(&self) -> bool {
        self.view.sleeps()
    }

    /// From now on a thread of this process looks at the doorbell again and again. Peers save the system call
    /// that would wake its sleepers.
    pub fn attend(&self) {
        self.view.attend();
    }

    /// The thread no longer looks at the doorbell. It must look once more after this call.
    pub fn leave_unattended(&self) {
        self.view.leave_unattended();
    }

    /// Whether peers have been told that this rank has no receive posted.
    pub fn receives_nothing(&self) -> bool {
        self.view.receives_nothing()
    }

    /// Tells peers that this rank has no receive posted, and need not be woken for what they send; or that it
    /// may have one. The latter must be said before one is posted.
    pub fn set_receives_nothing(&self, nothing: bool) {
        self.view.set_receives_nothing(nothing);
    }

    /// Says whether this rank is likely to compute while messages that it sends are under way, and to look
    /// after them in between.
    pub fn set_computing(&self, computes: bool) {
        self.view.set_computing(computes);
    }

    /// Sleeps until the doorbell has rung since it read `seen`, or for `timeout`. Returns what it reads now.
    pub fn wait_doorbell(&self, seen: u32, timeout: Duration) -> u32 {
        self.view.wait_doorbell(seen, timeout)
    }

    /// Takes a slot: the wanted one, if it is free. `None` if all are in use, or there is no memory for more:
    /// the message then goes by bcopy.
    pub fn alloc(&self, wanted: Option<u32>) -> Option<u32> {
        let mut outbox = self.outbox.lock();
        if outbox.free.is_empty() {
            self.grow(&mut outbox)?;
        }
        let wanted = wanted.filter(|&wanted| outbox.is_free(wanted));
        let index = wanted.or_else(|| outbox.free.last().copied())?;
        outbox.take(index);
        Some(index)
    }

    /// Gives a slot back, whatever its state. RTS that still name it are refused from now on. Freeing a slot
    /// that is not in use does nothing, and returns false.
    pub fn free(&self, index: u32) -> bool {
        let mut outbox = self.outbox.lock();
        if index >= outbox.ready || outbox.is_free(index) {
            return false;
        }
        if let Some(slot) = self.view.slot(index) {
            slot.clear();
        }
        outbox.give(index);
        true
    }

    /// Slots in use.
    pub fn slots_in_use(&self) -> usize {
        let outbox = self.outbox.lock();
        outbox.places.len() - outbox.free.len()
    }

    /// Writes a message into a slot that was taken before, and makes it visible. Returns the nonce for its
    /// RTS; `None` if the slot is not one of ours.
    pub fn post(&self, index: u32, message: &Message) -> Option<u64> {
        self.post_with(index, message, None)
    }

    /// Like [`Segment::post`], with the checksums of the message for a segment that has sheets.
    pub fn post_with(&self, index: u32, message: &Message, sums: Option<&Sums>) -> Option<u64> {
        let slot: &Slot = self.view.slot(index)?;
        let nonce = self.fresh_nonce();
        if let Some(sums) = sums {
            self.view.sheet(index)?.write(nonce, sums);
        }
        slot.post(nonce, message);
        Some(nonce)
    }

    /// Random in the process, never repeated in it before 2^56 messages, never 0, low 8 bits clear.
    fn fresh_nonce(&self) -> u64 {
        loop {
            let count = self.nonces.fetch_add(1, Ordering::Relaxed);
            let nonce = mix(self.nonce_base ^ count.wrapping_mul(0x9e37_79b9_7f4a_7c15)) & !0xff;
            if nonce != 0 {
                return nonce;
            }
        }
    }

    fn grow(&self, outbox: &mut Outbox) -> Option<()> {
        const RETRY_AFTER: u32 = 1024;
        let step = outbox
            .ready
            .clamp(SLOT_STEP_MIN, SLOT_STEP_MAX)
            .min(self.view.layout().slots - outbox.ready);
        if step == 0 {
            return None;
        }
        if outbox.refusals > 0 {
            outbox.refusals -= 1;
            return None;
        }
        let layout = self.view.layout();
        let (first, count) = (u64::from(outbox.ready), u64::from(step));
        let region = |start: u64, item: usize| {
            self.reserve(start + first * item as u64, count * item as u64)
        };
        let reserved = region(layout.slots_offset(), SLOT_BYTES).and_then(|()| {
            if layout.sheets == 0 {
                return Ok(());
            }
            region(layout.sheets_offset(), SHEET_BYTES)
        });
        if let Err(error) = reserved {
            if !std::mem::replace(&mut outbox.is_refusal_told, true) {
                log::warn!("no memory for more message slots ({error}): messages go by value");
            }
            outbox.refusals = RETRY_AFTER;
            return None;
        }
        let first = outbox.ready;
        outbox.ready += step;
        outbox.places.resize(outbox.ready as usize, IN_USE);
        (first..outbox.ready)
            .rev()
            .for_each(|index| outbox.give(index));
        self.view.set_slots_ready(outbox.ready);
        Some(())
    }

    fn reserve(&self, offset: u64, bytes: u64) -> io::Result<()> {
        sys::allocate(self.file.get()?, offset, bytes)
    }

    pub(super) fn own_gpu_page(&self) -> &OwnGpuPage {
        &self.gpu_page
    }

    pub(super) fn reserve_gpu_page(&self) -> io::Result<()> {
        self.reserve(self.view.layout().gpu_page_offset(), GPU_PAGE_BYTES as u64)?;
        self.view.set_gpu_page_ready();
        Ok(())
    }

    /// Has the system find memory for the first block of wide staging, which takes a while;
    /// [`Segment::take_wide`] then finds it there.
    ///
    /// # Errors
    /// There is no memory.
    pub fn find_wide_pages(&self) -> io::Result<()> {
        let layout = self.view.layout();
        if layout.wide_blocks == 0 {
            return Err(io::Error::from_raw_os_error(libc::ENOMEM));
        }
        self.reserve(layout.wide_offset(), layout.wide_block_bytes.into())
    }

    /// Says the details of this rank's statistics, which are final. What there is no room for is left out.
    ///
    /// # Errors
    /// There is no memory.
    pub fn publish_details(&self, words: &[u64]) -> io::Result<()> {
        let words = &words[..words.len().min(DETAIL_WORDS)];
        let offset = self.view.layout().details_offset();
        self.reserve(offset, (size_of_val(words) as u64).max(1))?;
        self.view.write_details(words);
        Ok(())
    }

    /// Allocates memory for one more block of wide staging than there are.
    pub(super) fn reserve_wide(&self, blocks: u32) -> io::Result<()> {
        let layout = self.view.layout();
        let bytes = u64::from(layout.wide_block_bytes);
        self.reserve(layout.wide_offset() + u64::from(blocks) * bytes, bytes)?;
        self.view.set_wide_ready(blocks + 1);
        Ok(())
    }

    /// Takes a staging chunk. `None` if all are in use, or there is no memory for any.
    pub fn take_chunk(&self) -> Option<u32> {
        self.prepare_staging();
        self.staging.lock().chunks.take()
    }

    /// Takes a cell for an eager payload of so many bytes, or a piece of one. `None` if all are in use, none
    /// is so long, or there is no memory for any.
    pub fn take_cell(&self, bytes: u64) -> Option<u32> {
        self.prepare_staging();
        let cell = self.staging.lock().cells.take(bytes);
        cell.map(|number| FIRST_CELL + number)
    }

    /// Gives a chunk or a cell back. Giving back what is not out does nothing, and returns false.
    pub fn give(&self, piece: u32) -> bool {
        let mut staging = self.staging.lock();
        match piece.checked_sub(FIRST_CELL) {
            Some(index) => staging.cells.give(index),
            None => staging.chunks.give(piece),
        }
    }

    /// Chunks, and cells of which nothing is in use (0 before the first use).
    pub fn free_pieces(&self) -> (usize, usize) {
        let staging = self.staging.lock();
        (staging.chunks.free(), staging.cells.free())
    }

    /// Allocates the staging region, unless it is allocated already. False if there is none. The CUDA part
    /// registers `View::staging`.
    pub fn prepare_staging(&self) -> bool {
        // Every message asks this.
        *self.has_staging.get_or_init(|| {
            self.fill(&mut self.staging.lock());
            self.staging().is_some()
        })
    }

    /// On first use: allocates memory for the cells and as many chunks as can be had, halving their number
    /// each time.
    fn fill(&self, staging: &mut Staging) {
        let layout = self.view.layout();
        let start = layout.cells_offset();
        if let Err(error) = self.reserve(start, (layout.chunks_offset() - start).max(1)) {
            log::warn!("no memory for staging ({error}): messages that need it go by value");
            return;
        }
        let chunks = self.reserve_chunks(&layout);
        staging.cells.fill(&layout);
        staging.chunks.fill(chunks);
        self.view.set_staging_ready(layout.cells, chunks);
    }

    fn reserve_chunks(&self, layout: &Layout) -> u32 {
        let mut chunks = layout.chunks;
        let mut refused = None;
        while chunks > 0 {
            let bytes = u64::from(chunks) * u64::from(layout.chunk_bytes);
            match self.reserve(layout.chunks_offset(), bytes) {
                Ok(()) => break,
                Err(error) => refused = Some(error),
            }
            chunks /= 2;
        }
        if let Some(error) = refused {
            log::warn!(
                "no memory for staging of {} chunks ({error}): {chunks} of them are used",
                layout.chunks
            );
        }
        chunks
    }
}

#[cfg(test)]
#[path = "segment_tests.rs"]
mod tests;
