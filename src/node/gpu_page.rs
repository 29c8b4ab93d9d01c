//! The GPU page: the part of a segment that is about memory on GPUs and messages over several paths. It holds
//! the GPUs that the owner sees, the owner's freed allocations, and the offers and RTRs that the owner as a
//! receiver makes to its senders. Its memory is taken when it is first needed.

use super::relay::{Exported, GpuRow, Wiring, GPUS_MAX};
use super::retired::Retired;
use super::rtr::{Rtr, RtrId, RtrState, Waiting, RTRS};
use super::slot::Slot;
use super::staged_part::{Asked, Offer, Part, Target, Way, STAGED_PARTS};
use super::units::{units_of, Taker, Units, UNIT_BYTES};
use super::view::View;
use super::Segment;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Messages that a rank can receive over several paths at one time.
pub const OFFERS: usize = 64;
/// Size of a GPU page, bytes.
pub const GPU_PAGE_BYTES: usize = size_of::<GpuPage>();

/// A GPU page as it lies in shared memory.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct GpuPage {
    gpus: AtomicU32,
    /// How often peers have asked for staging.
    wishes: AtomicU32,
    rows: [GpuRow; GPUS_MAX],
    retired: Retired,
    offers: [Offer; OFFERS],
    rtrs: [Rtr; RTRS],
}

super::map::shared!(GpuPage);

impl GpuPage {
    /// The GPUs that the owner sees.
    pub fn gpus(&self) -> &[GpuRow] {
        let count = self.gpus.load(Ordering::Acquire) as usize;
        &self.rows[..count.min(GPUS_MAX)]
    }

    /// How often peers have asked for staging.
    pub fn wishes(&self) -> u32 {
        self.wishes.load(Ordering::Acquire)
    }

    /// The owner's freed allocations.
    pub fn retired(&self) -> &Retired {
        &self.retired
    }

    /// An offer of the owner's.
    pub fn offer(&self, index: u32) -> Option<&Offer> {
        self.offers.get(index as usize)
    }

    /// An RTR of the owner's.
    pub fn rtr(&self, line: u32) -> Option<&Rtr> {
        self.rtrs.get(line as usize)
    }
}

/// What the owner of a GPU page knows of it.
#[derive(Debug, Default)]
pub(super) struct Own {
    is_tried: bool,
    /// Offers that are not in use.
    idle: Vec<u32>,
    tags: u64,
    /// Which units of the wide region are in use, and in how many blocks they are.
    wide: Vec<AtomicU64>,
    blocks: u32,
    is_refused: bool,
    tag: u32,
}

/// A piece of this rank's wide staging.
#[derive(Debug)]
pub struct Wide {
    /// Its first unit.
    pub unit: u32,
    count: u32,
    taker: Taker,
}

impl View {
    /// Asks the owner for staging memory on one of its GPUs, once.
    pub fn wish_for(&self, row: usize) {
        let Some(gpu_page) = self.gpu_page() else {
            return;
        };
        if gpu_page.gpus().get(row).is_some_and(GpuRow::wish) {
            gpu_page.wishes.fetch_add(1, Ordering::AcqRel);
            self.ring_doorbell();
        }
    }
}

impl Slot {
    /// Receiver: has claimed the message, and offers its sender to bring a part of it.
    pub fn ask(&self, nonce: u64, asked: Asked) {
        self.asked().store(asked.pack(nonce), Ordering::Release);
    }

    /// Sender: the receiver's offer.
    pub fn offered(&self, nonce: u64) -> Option<Asked> {
        Asked::unpack(self.asked().load(Ordering::Acquire), nonce)
    }
}

impl View {
    /// The owner's RTR in this line, or the room for one.
    pub fn rtr(&self, line: u32) -> Option<&Rtr> {
        self.gpu_page()?.rtr(line)
    }
}

impl Segment {
    /// Provides memory for the GPU page. False if there is none.
    pub fn prepare_gpu_page(&self) -> bool {
        let mut own = self.own_gpu_page().lock();
        if !std::mem::replace(&mut own.is_tried, true) {
            match self.reserve_gpu_page() {
                Ok(()) => own.idle = (0..OFFERS as u32).rev().collect(),
                Err(error) => log::warn!(
                    "no memory for messages over several paths ({error}): each takes one"
                ),
            }
        }
        self.gpu_page().is_some()
    }

    /// Lists the GPUs that this rank sees, and marks those that it uses.
    pub fn list_gpus(&self, uuids: &[[u8; 16]], used: &[u8; 16]) {
        let Some(gpu_page) = self.gpu_page() else {
            return;
        };
        let known = gpu_page.gpus().len();
        for (row, uuid) in gpu_page.rows.iter().zip(uuids).skip(known) {
            row.list(uuid);
        }
        let count = uuids.len().min(GPUS_MAX).max(known);
        gpu_page.gpus.store(count as u32, Ordering::Release);
        let mine = gpu_page.gpus().iter().find(|row| row.uuid() == *used);
        if let Some(row) = mine {
            row.set_used();
        }
    }

    /// Publishes the links of a GPU that this rank sees.
    pub fn tell_wiring(&self, uuid: &[u8; 16], wiring: &Wiring) {
        let Some(gpu_page) = self.gpu_page() else {
            return;
        };
        if let Some(row) = gpu_page.gpus().iter().find(|row| row.uuid() == *uuid) {
            row.wire(wiring);
            self.traffic().touch();
        }
    }

    /// Publishes what is exported on a GPU, or that nothing is.
    pub fn publish_relay(&self, row: usize, exported: Option<&Exported>) {
        if let Some(row) = self
            .gpu_page()
            .and_then(|gpu_page| gpu_page.gpus().get(row))
        {
            match exported {
                Some(exported) => row.publish(exported),
                None => row.withdraw(),
            }
        }
    }

    /// Tells peers that this rank has freed an allocation.
    pub fn retire(&self, base: u64, buffer_id: u64) {
        if let Some(gpu_page) = self.gpu_page() {
            let _own = self.own_gpu_page().lock();
            gpu_page.retired.tell(base, buffer_id);
        }
    }

    /// Sends an RTR for a receive. `None` if the line for its stream is in use.
    pub fn open_rtr(&self, waiting: &Waiting, target: &Target) -> Option<RtrId> {
        let line = waiting.line();
        let rtr = self.rtr(line)?;
        if !rtr.is_free() {
            return None;
        }
        let mut own = self.own_gpu_page().lock();
        own.tags += 1;
        let tag = own.tags;
        rtr.open(tag, waiting, target);
        let rest = waiting.rest;
        Some(RtrId { line, tag, rest })
    }

    /// State of an RTR that was sent. `None` if somebody has written over it.
    pub fn rtr_state(&self, told: RtrId) -> Option<RtrState> {
        self.rtr(told.line)?.state(told.tag)
    }

    /// Withdraws an RTR. False if the sender has taken it, and may still write to the buffer.
    pub fn withdraw(&self, told: RtrId) -> bool {
        self.rtr(told.line).is_none_or(|rtr| rtr.withdraw(told.tag))
    }

    /// An RTR will be sent for the next receive of the stream, too.
    pub fn promise_rtr(&self, told: RtrId) {
        if let Some(rtr) = self.rtr(told.line) {
            rtr.promise();
        }
    }

    /// Refuses an RTR in the sender's place, which has died while it wrote to the buffer.
    pub fn withdraw_rtr(&self, told: RtrId) {
        if let Some(rtr) = self.rtr(told.line) {
            rtr.refuse(told.tag);
        }
    }

    /// The RTR is not needed any more.
    pub fn close_rtr(&self, told: RtrId) {
        if let Some(rtr) = self.rtr(told.line) {
            rtr.close();
        }
    }

    /// Writes an offer. `None` where all are in use.
    pub fn open_offer(
        &self,
        parts: &[Part],
        target: Option<&Target>,
        behind: Option<Asked>,
    ) -> Option<Asked> {
        let gpu_page = self.gpu_page()?;
        let has_target = |part: &Part| part.way != Way::Put || target.is_some();
        if parts.is_empty() || parts.len() > STAGED_PARTS || !parts.iter().all(has_target) {
            return None;
        }
        let mut own = self.own_gpu_page().lock();
        let index = own.idle.pop()?;
        own.tags += 1;
        let tag = own.tags;
        gpu_page.offer(index)?.open(tag, parts, target, behind);
        Some(Asked {
            index,
            tag,
            is_all_put: parts.iter().all(|part| part.way == Way::Put),
        })
    }

    /// The offer is over.
    pub fn close_offer(&self, asked: Asked) {
        if let Some(offer) = self
            .gpu_page()
            .and_then(|gpu_page| gpu_page.offer(asked.index))
        {
            offer.close();
            self.own_gpu_page().lock().idle.push(asked.index);
        }
    }

    /// Takes a piece of the wide staging region. The region grows up to its bound if it may by so many bytes.
    /// `None` if all is in use.
    pub fn take_wide(&self, bytes: u64, mut may_grow: impl FnMut(u64) -> bool) -> Option<Wide> {
        let layout = self.layout();
        let block = units_of(u64::from(layout.wide_block_bytes));
        let count = units_of(bytes);
        if count > block || layout.wide_blocks == 0 {
            return None;
        }
        let mut own = self.own_gpu_page().lock();
        own.tag = own.tag.wrapping_add(1);
        let taker = Taker {
            rank: self.world_rank(),
            tag: own.tag,
        };
        loop {
            if let Some(unit) = Units::new(&own.wide, block).take(count, taker) {
                return Some(Wide { unit, count, taker });
            }
            let is_at_its_end = own.blocks == layout.wide_blocks || own.is_refused;
            if is_at_its_end || !may_grow(u64::from(layout.wide_block_bytes)) {
                return None;
            }
            if let Err(error) = self.reserve_wide(own.blocks) {
                own.is_refused = true;
                log::warn!("staging stays at {} blocks: {error}", own.blocks);
                return None;
            }
            own.blocks += 1;
            let units = (own.blocks * block) as usize;
            own.wide.resize_with(units, || AtomicU64::new(0));
        }
    }

    /// Gives a piece back.
    pub fn give_wide(&self, piece: &Wide) {
        let block = units_of(u64::from(self.layout().wide_block_bytes));
        let own = self.own_gpu_page().lock();
        Units::new(&own.wide, block.max(1)).give(piece.unit, piece.count, piece.taker);
    }

    /// Units of wide staging in use.
    pub fn wide_in_use(&self) -> usize {
        let own = self.own_gpu_page().lock();
        Units::new(&own.wide, 1).takers().count()
    }
}

/// Length of the blocks of a wide region, and their number.
pub(super) fn blocks_of(bytes: u64) -> (u32, u32) {
    const BLOCK_BYTES_MAX: u64 = 16 << 20;
    let block = bytes.min(BLOCK_BYTES_MAX) / UNIT_BYTES * UNIT_BYTES;
    match bytes.checked_div(block) {
        Some(blocks) => (block as u32, blocks.min(1 << 12) as u32),
        None => (0, 0),
    }
}

pub(super) type OwnGpuPage = Mutex<Own>;
