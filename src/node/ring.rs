//! The ring of a slot, for a pipeline: filled pieces of the owner's staging, on their way to the receiver.
//!
//! One producer (the owner), one consumer (the receiver), [`RING_ENTRIES`] entries. Head and tail carry the
//! nonce of the message beside an 8-bit count. So a side that is late (its message was given up, the slot
//! serves another) is refused and never moves the other message's counters. An entry is scrambled with the
//! nonce and its position. If somebody writes over it, or it is found at another position, it decodes to
//! noise, and its length is not the expected one.

use super::slot::{is_nonce, STATE_MASK};
use super::view::{FIRST_CELL, FIRST_ON_GPU};
use super::{mix, unmix};
use std::sync::atomic::{fence, AtomicU64, Ordering};
use thiserror::Error;

/// Entries in the ring of a slot.
pub const RING_ENTRIES: usize = 4;
const COUNT_MASK: u64 = STATE_MASK;

/// The ring as it lies in shared memory.
#[derive(Debug)]
#[repr(C)]
pub(super) struct RingCells {
    head: AtomicU64,
    tail: AtomicU64,
    entries: [AtomicU64; RING_ENTRIES],
}

impl RingCells {
    /// Owner: empties the ring for a new message, before it is posted.
    pub(super) fn reset(&self, nonce: u64) {
        self.head.store(nonce, Ordering::Relaxed);
        self.tail.store(nonce, Ordering::Relaxed);
    }
}

/// A filled piece of staging memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Which piece (see `View::piece`).
    pub piece: u32,
    /// Bytes in it.
    pub bytes: u32,
}

/// A piece of staging that its owner has exported on one of its GPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OnGpu {
    /// Which of the owner's GPUs.
    pub row: u8,
    /// Its first unit there.
    pub unit: u32,
}

const ROW_SHIFT: u32 = 16;

impl OnGpu {
    /// The piece's number in a ring entry.
    pub fn piece(self) -> u32 {
        FIRST_ON_GPU | u32::from(self.row) << ROW_SHIFT | self.unit
    }
}

impl Entry {
    /// Where the piece is, if it is on a GPU. The other side chose the numbers.
    pub fn on_gpu(&self) -> Option<OnGpu> {
        let number = self.piece.checked_sub(FIRST_ON_GPU)?;
        let row = u8::try_from(number >> ROW_SHIFT).ok()?;
        (self.piece < FIRST_CELL).then_some(OnGpu {
            row,
            unit: number & ((1 << ROW_SHIFT) - 1),
        })
    }
}

/// Why a ring operation was refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum RingError {
    /// The ring serves another message by now.
    #[error("the slot is in use for another message")]
    Stale,
    /// The counters make no sense.
    #[error("the host pipeline of a slot is corrupt")]
    Corrupt,
}

/// The ring of one message.
#[derive(Debug, Clone, Copy)]
pub struct Ring<'a> {
    cells: &'a RingCells,
    nonce: u64,
}

impl<'a> Ring<'a> {
    pub(super) fn new(cells: &'a RingCells, nonce: u64) -> Self {
        Self { cells, nonce }
    }

    /// Producer: appends a filled piece. False when the ring is full.
    pub fn push(&self, entry: Entry) -> Result<bool, RingError> {
        let (head, tail) = self.counters()?;
        if used(head, tail)? == RING_ENTRIES {
            return Ok(false);
        }
        let packed = (u64::from(entry.bytes) << 32) | u64::from(entry.piece);
        let word = mix(packed ^ self.key(tail));
        self.cells.entries[tail as usize % RING_ENTRIES].store(word, Ordering::Relaxed);
        self.advance(&self.cells.tail, tail)?;
        Ok(true)
    }

    /// Entries that were appended and not yet given back. A producer that remembers the order of its pieces
    /// may reuse all but the last so many.
    pub fn in_flight(&self) -> Result<usize, RingError> {
        let (head, tail) = self.counters()?;
        used(head, tail)
    }

    /// Consumer: the oldest filled piece. The other side chose its numbers: have `View::piece_of` check them.
    pub fn front(&self) -> Result<Option<Entry>, RingError> {
        self.peek(0)
    }

    /// Consumer: the entry `ahead` places behind the oldest, for copies that are under way together.
    pub fn peek(&self, ahead: usize) -> Result<Option<Entry>, RingError> {
        let (head, tail) = self.counters()?;
        if ahead >= used(head, tail)? {
            return Ok(None);
        }
        let at = head + ahead as u64;
        let word = self.cells.entries[at as usize % RING_ENTRIES].load(Ordering::Relaxed);
        let packed = unmix(word) ^ self.key(at);
        fence(Ordering::Acquire);
        self.count(self.cells.head.load(Ordering::Relaxed))?;
        Ok(Some(Entry {
            piece: (packed & 0xffff_ffff) as u32,
            bytes: (packed >> 32) as u32,
        }))
    }

    /// Consumer: gives the oldest piece back after reading it. False if there is none. What was read counts
    /// only if this succeeds.
    pub fn pop(&self) -> Result<bool, RingError> {
        let (head, tail) = self.counters()?;
        if used(head, tail)? == 0 {
            return Ok(false);
        }
        self.advance(&self.cells.head, head)?;
        Ok(true)
    }

    /// Whether so many entries have been given back, ever. Only the consumer moves that counter, so anything
    /// else means that it was written over.
    pub fn is_emptied_to(&self, popped: u64) -> bool {
        self.counters()
            .is_ok_and(|(head, _)| head == popped & COUNT_MASK)
    }

    /// The same for the producer: whether so many entries have been appended, ever. See
    /// [`Ring::is_emptied_to`].
    pub fn is_filled_to(&self, pushed: u64) -> bool {
        self.counters()
            .is_ok_and(|(_, tail)| tail == pushed & COUNT_MASK)
    }

    /// The key that scrambles the entry at a position.
    fn key(&self, position: u64) -> u64 {
        self.nonce | (position & COUNT_MASK)
    }

    /// Counts of head and tail. Head first: the tail read later is never behind it.
    fn counters(&self) -> Result<(u64, u64), RingError> {
        let head = self.count(self.cells.head.load(Ordering::Acquire))?;
        let tail = self.count(self.cells.tail.load(Ordering::Acquire))?;
        Ok((head, tail))
    }

    fn count(&self, word: u64) -> Result<u64, RingError> {
        if !is_nonce(self.nonce) || word & !COUNT_MASK != self.nonce {
            return Err(RingError::Stale);
        }
        Ok(word & COUNT_MASK)
    }

    fn advance(&self, counter: &AtomicU64, from: u64) -> Result<(), RingError> {
        let next = self.nonce | (from.wrapping_add(1) & COUNT_MASK);
        let swapped =
            counter.compare_exchange(self.nonce | from, next, Ordering::AcqRel, Ordering::Relaxed);
        // Each counter has one writer, so a lost race means that the slot was reused or scribbled over.
        swapped.map(drop).map_err(|now| match self.count(now) {
            Ok(_) => RingError::Corrupt,
            Err(error) => error,
        })
    }
}

fn used(head: u64, tail: u64) -> Result<usize, RingError> {
    let used = (tail.wrapping_sub(head) & COUNT_MASK) as usize;
    if used > RING_ENTRIES {
        return Err(RingError::Corrupt);
    }
    Ok(used)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    const NONCE: u64 = 0xabcd_ef00;

    fn cells() -> RingCells {
        let cells = RingCells {
            head: AtomicU64::new(0),
            tail: AtomicU64::new(0),
            entries: Default::default(),
        };
        cells.reset(NONCE);
        cells
    }

    fn entry(piece: u32) -> Entry {
        Entry {
            piece,
            bytes: piece ^ 0xffff_0000,
        }
    }

    #[test]
    fn pieces_on_gpus_are_told_from_others() {
        for on_gpu in [(0, 0), (15, 255), (3, 65_535)].map(|(row, unit)| OnGpu { row, unit }) {
            assert_eq!(entry(on_gpu.piece()).on_gpu(), Some(on_gpu));
        }
        for other in [0, FIRST_ON_GPU - 1, FIRST_CELL, u32::MAX] {
            assert_eq!(entry(other).on_gpu(), None, "{other:#x}");
        }
    }

    #[test]
    fn behaves_like_a_bounded_queue_beyond_the_count_of_8_bits() {
        let cells = cells();
        let ring = Ring::new(&cells, NONCE);
        let mut model = VecDeque::new();
        for step in 0..5_000_u32 {
            // A fixed irregular pattern that fills and empties the ring again and again.
            if (step * 7 + step / 11) % 5 < 3 {
                let fits = model.len() < RING_ENTRIES;
                assert_eq!(ring.push(entry(step)), Ok(fits));
                if fits {
                    model.push_back(entry(step));
                }
            } else {
                assert_eq!(ring.front(), Ok(model.front().copied()));
                assert_eq!(ring.peek(2), Ok(model.get(2).copied()));
                assert_eq!(ring.pop(), Ok(model.pop_front().is_some()));
            }
            assert_eq!(ring.in_flight(), Ok(model.len()));
        }
    }

    #[test]
    fn order_and_contents_hold_between_threads() {
        let cells = cells();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let ring = Ring::new(&cells, NONCE);
                let mut backoff = super::super::wait::Backoff::new();
                for piece in 0..20_000 {
                    while !ring.push(entry(piece)).expect("the ring is sound") {
                        backoff.snooze();
                    }
                    backoff.reset();
                }
            });
            let ring = Ring::new(&cells, NONCE);
            let mut backoff = super::super::wait::Backoff::new();
            for piece in 0..20_000 {
                let found = loop {
                    match ring.front().expect("the ring is sound") {
                        Some(found) => break found,
                        None => backoff.snooze(),
                    }
                };
                backoff.reset();
                assert_eq!(found, entry(piece));
                assert_eq!(ring.pop(), Ok(true));
            }
        });
    }

    #[test]
    fn what_is_written_over_is_not_what_was_appended() {
        for bit in 0..64 {
            let cells = cells();
            let ring = Ring::new(&cells, NONCE);
            assert_eq!(ring.push(entry(7)), Ok(true));
            cells.entries[0].fetch_xor(1 << bit, Ordering::Relaxed);
            let found = ring.front().unwrap().unwrap();
            assert_ne!(found.bytes, entry(7).bytes, "bit {bit}");
        }
        for value in [0, 1, 61, u64::MAX, 0x0123_4567_89ab_cdef] {
            assert_eq!(unmix(mix(value)), value);
        }
    }

    #[test]
    fn each_side_knows_where_it_is() {
        let cells = cells();
        let ring = Ring::new(&cells, NONCE);
        for n in 0..600 {
            assert!(ring.is_filled_to(n) && ring.is_emptied_to(n));
            assert_eq!(ring.push(entry(1)), Ok(true));
            assert!(ring.is_filled_to(n + 1) && !ring.is_filled_to(n) && ring.is_emptied_to(n));
            assert_eq!(ring.pop(), Ok(true));
        }
        cells.head.store(NONCE, Ordering::Relaxed);
        assert!(!ring.is_emptied_to(600));
        assert!(!Ring::new(&cells, 0x7700).is_filled_to(600));
    }

    #[test]
    fn a_late_side_is_refused_and_changes_nothing() {
        let cells = cells();
        let late = Ring::new(&cells, NONCE);
        assert_eq!(late.push(entry(1)), Ok(true));
        cells.reset(0x7700);
        let ring = Ring::new(&cells, 0x7700);
        assert_eq!(ring.push(entry(2)), Ok(true));
        assert_eq!(late.pop(), Err(RingError::Stale));
        assert_eq!(late.push(entry(3)), Err(RingError::Stale));
        assert_eq!(late.front(), Err(RingError::Stale));
        assert_eq!(ring.front(), Ok(Some(entry(2))));
        assert_eq!(ring.in_flight(), Ok(1));
        assert_eq!(Ring::new(&cells, 0).pop(), Err(RingError::Stale));
    }

    #[test]
    fn impossible_counters_are_refused() {
        let cells = cells();
        let ring = Ring::new(&cells, NONCE);
        for (head, tail) in [(0, 5), (1, 0), (0, 255), (200, 100)] {
            cells.head.store(NONCE | head, Ordering::Relaxed);
            cells.tail.store(NONCE | tail, Ordering::Relaxed);
            assert_eq!(ring.push(entry(1)), Err(RingError::Corrupt));
            assert_eq!(ring.pop(), Err(RingError::Corrupt));
            assert_eq!(ring.front(), Err(RingError::Corrupt));
            assert_eq!(ring.in_flight(), Err(RingError::Corrupt));
        }
    }
}
