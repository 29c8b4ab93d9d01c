//! The part of a segment that is about memory on GPUs and messages over several paths: the GPUs that its owner sees, the
//! allocations of its that are gone, and what it tells and offers its senders as a receiver. Its memory is taken when it is first needed.

use super::invite::{Invitation, Invited, Told, Waiting, INVITATIONS};
use super::relay::{Exported, GpuRow, Wiring, GPUS_MAX};
use super::retired::Retired;
use super::slot::Slot;
use super::track::{Asked, Offer, Part, Target, Way, TRACKS};
use super::units::{units_of, Taker, Units, UNIT_BYTES};
use super::view::View;
use super::Segment;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Messages that a rank receives over several paths at one time.
pub const OFFERS: usize = 64;
/// Size of a board, bytes.
pub const BOARD_BYTES: usize = size_of::<Board>();

/// A board as it lies in shared memory.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Board {
    gpus: AtomicU32,
    /// How often peers have raised a wish.
    wishes: AtomicU32,
    rows: [GpuRow; GPUS_MAX],
    retired: Retired,
    offers: [Offer; OFFERS],
    invitations: [Invitation; INVITATIONS],
}

impl Board {
    /// The GPUs that the owner sees.
    pub fn gpus(&self) -> &[GpuRow] {
        let count = self.gpus.load(Ordering::Acquire) as usize;
        &self.rows[..count.min(GPUS_MAX)]
    }

    /// How often peers have asked for staging.
    pub fn wishes(&self) -> u32 {
        self.wishes.load(Ordering::Acquire)
    }

    /// Allocations of the owner's that are no more.
    pub fn retired(&self) -> &Retired {
        &self.retired
    }

    /// An offer of the owner's.
    pub fn offer(&self, index: u32) -> Option<&Offer> {
        self.offers.get(index as usize)
    }

    /// An invitation of the owner's.
    pub fn invitation(&self, line: u32) -> Option<&Invitation> {
        self.invitations.get(line as usize)
    }
}

/// What the owner of a board knows of it.
#[derive(Debug, Default)]
pub(super) struct Own {
    is_tried: bool,
    /// Offers that are not in use.
    idle: Vec<u32>,
    tags: u64,
    /// Units of the wide region, and in how many blocks they are.
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
        let Some(board) = self.board() else { return };
        if board.gpus().get(row).is_some_and(GpuRow::wish) {
            board.wishes.fetch_add(1, Ordering::AcqRel);
            self.ring_doorbell();
        }
    }
}

impl Slot {
    /// Receiver: has claimed the message, and offers its sender a part in bringing it.
    pub fn ask(&self, nonce: u64, asked: Asked) {
        self.asked().store(asked.pack(nonce), Ordering::Release);
    }

    /// Sender: what the receiver has offered.
    pub fn offered(&self, nonce: u64) -> Option<Asked> {
        Asked::unpack(self.asked().load(Ordering::Acquire), nonce)
    }
}

impl Segment {
    /// Has memory for the board. False where there is none.
    pub fn prepare_board(&self) -> bool {
        let mut own = self.own_board().lock();
        if !std::mem::replace(&mut own.is_tried, true) {
            match self.reserve_board() {
                Ok(()) => own.idle = (0..OFFERS as u32).rev().collect(),
                Err(error) => log::warn!(
                    "no memory for messages over several paths ({error}): each takes one"
                ),
            }
        }
        self.board().is_some()
    }

    /// Lists the GPUs that this rank sees, and marks those that it uses.
    pub fn list_gpus(&self, uuids: &[[u8; 16]], used: &[u8; 16]) {
        let Some(board) = self.board() else { return };
        let known = board.gpus().len();
        for (row, uuid) in board.rows.iter().zip(uuids).skip(known) {
            row.list(uuid);
        }
        let count = uuids.len().min(GPUS_MAX).max(known);
        board.gpus.store(count as u32, Ordering::Release);
        let mine = board.gpus().iter().find(|row| row.uuid() == *used);
        if let Some(row) = mine {
            row.set_used();
        }
    }

    /// Says what links a GPU has that this rank sees.
    pub fn tell_wiring(&self, uuid: &[u8; 16], wiring: &Wiring) {
        let Some(board) = self.board() else { return };
        if let Some(row) = board.gpus().iter().find(|row| row.uuid() == *uuid) {
            row.wire(wiring);
            self.traffic().touch();
        }
    }

    /// Says what is exported on a GPU, or that nothing is.
    pub fn publish_relay(&self, row: usize, exported: Option<&Exported>) {
        if let Some(row) = self.board().and_then(|board| board.gpus().get(row)) {
            match exported {
                Some(exported) => row.publish(exported),
                None => row.withdraw(),
            }
        }
    }

    /// Tells peers that an allocation of this rank's is no more.
    pub fn retire(&self, base: u64, buffer_id: u64) {
        if let Some(board) = self.board() {
            let _own = self.own_board().lock();
            board.retired.tell(base, buffer_id);
        }
    }

    /// Tells the sender of a receive. `None` where the line for its stream is in use.
    pub fn invite(&self, waiting: &Waiting, target: &Target) -> Option<Told> {
        let line = waiting.line();
        let invitation = self.board()?.invitation(line)?;
        if !invitation.is_free() {
            return None;
        }
        let mut own = self.own_board().lock();
        own.tags += 1;
        let tag = own.tags;
        invitation.open(tag, waiting, target);
        let rest = waiting.rest;
        Some(Told { line, tag, rest })
    }

    fn invitation(&self, told: Told) -> Option<&Invitation> {
        self.board()?.invitation(told.line)
    }

    /// How far a receive is that its sender was told of. `None` where somebody has written over that.
    pub fn invited(&self, told: Told) -> Option<Invited> {
        self.invitation(told)?.state(told.tag)
    }

    /// Its sender is not to take it any more. False if it has, and may still write to the buffer.
    pub fn withdraw(&self, told: Told) -> bool {
        self.invitation(told)
            .is_none_or(|invitation| invitation.withdraw(told.tag))
    }

    /// The next receive of the stream will be told of, too.
    pub fn promise_invitation(&self, told: Told) {
        if let Some(invitation) = self.invitation(told) {
            invitation.promise();
        }
    }

    /// Its sender has died while it wrote to the buffer.
    pub fn take_invitation_back(&self, told: Told) {
        if let Some(invitation) = self.invitation(told) {
            invitation.refuse(told.tag);
        }
    }

    /// Nothing is to be known of it any more.
    pub fn close_invitation(&self, told: Told) {
        if let Some(invitation) = self.invitation(told) {
            invitation.close();
        }
    }

    /// Writes an offer. `None` where all are in use.
    pub fn open_offer(
        &self,
        parts: &[Part],
        target: Option<&Target>,
        behind: Option<Asked>,
    ) -> Option<Asked> {
        let board = self.board()?;
        let has_target = |part: &Part| part.way != Way::Push || target.is_some();
        if parts.is_empty() || parts.len() > TRACKS || !parts.iter().all(has_target) {
            return None;
        }
        let mut own = self.own_board().lock();
        let index = own.idle.pop()?;
        own.tags += 1;
        let tag = own.tags;
        board.offer(index)?.open(tag, parts, target, behind);
        Some(Asked { index, tag })
    }

    /// The offer is over.
    pub fn close_offer(&self, asked: Asked) {
        if let Some(offer) = self.board().and_then(|board| board.offer(asked.index)) {
            offer.close();
            self.own_board().lock().idle.push(asked.index);
        }
    }

    /// Takes a piece of the wide staging region, which grows up to its bound if it may by so many bytes. `None` where all
    /// is in use.
    pub fn take_wide(&self, bytes: u64, mut may_grow: impl FnMut(u64) -> bool) -> Option<Wide> {
        let layout = self.layout();
        let block = units_of(u64::from(layout.wide_block_bytes));
        let count = units_of(bytes);
        if count > block || layout.wide_blocks == 0 {
            return None;
        }
        let mut own = self.own_board().lock();
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
        let own = self.own_board().lock();
        Units::new(&own.wide, block.max(1)).give(piece.unit, piece.count, piece.taker);
    }

    /// Units of wide staging in use.
    pub fn wide_in_use(&self) -> usize {
        let own = self.own_board().lock();
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

pub(super) type OwnBoard = Mutex<Own>;
