//! Pieces of staging memory, of any length up to a block's, out of a row of units.
//!
//! A piece is a run of units, taken word by word with compare-and-swap, so that several processes may take
//! pieces of one row. The words say who has a unit, so the units of a dead process can be recognized and
//! taken back.

use std::sync::atomic::{AtomicU64, Ordering};

/// Size of a unit, bytes.
pub const UNIT_BYTES: u64 = 256 << 10;

/// Nobody has the unit.
const FREE: u64 = 0;
/// Nobody may have it: the memory is being given back.
const CLOSED: u64 = u64::MAX;

/// Units that a piece of so many bytes needs.
pub fn units_of(bytes: u64) -> u32 {
    u32::try_from(bytes.div_ceil(UNIT_BYTES)).unwrap_or(u32::MAX)
}

/// Who has a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Taker {
    /// World rank.
    pub rank: u32,
    /// How the rank knows the piece; another number for each piece.
    pub tag: u32,
}

impl Taker {
    fn word(self) -> u64 {
        // Never FREE, and never CLOSED: world ranks end far below 2^32 - 2.
        (u64::from(self.rank) + 1) << 32 | u64::from(self.tag)
    }

    fn of(word: u64) -> Option<Taker> {
        if word == FREE || word == CLOSED {
            return None;
        }
        Some(Taker {
            rank: ((word >> 32) as u32).wrapping_sub(1),
            tag: word as u32,
        })
    }
}

/// A row of units, in blocks: no piece crosses the border of a block.
#[derive(Clone, Copy, Debug)]
pub struct Units<'a> {
    words: &'a [AtomicU64],
    block: u32,
}

impl<'a> Units<'a> {
    /// Of these words, `block` units to a block.
    pub fn new(words: &'a [AtomicU64], block: u32) -> Units<'a> {
        Units { words, block }
    }

    /// Takes a piece of so many units. Returns its first one. `None` if no run is free.
    pub fn take(&self, count: u32, taker: Taker) -> Option<u32> {
        if count == 0 || count > self.block {
            return None;
        }
        let total = self.words.len() as u32;
        let mut first = 0;
        while first + count <= total {
            // The first unit of the next block, where this one has no room left.
            let in_block = first % self.block;
            if in_block + count > self.block {
                first += self.block - in_block;
                continue;
            }
            match self.take_run(first, count, taker) {
                Ok(()) => return Some(first),
                Err(taken) => first = taken + 1,
            }
        }
        None
    }

    /// Takes all units of a run, or none. On failure returns the unit that is not free.
    fn take_run(&self, first: u32, count: u32, taker: Taker) -> Result<(), u32> {
        for unit in first..first + count {
            let taken = self.words[unit as usize].compare_exchange(
                FREE,
                taker.word(),
                Ordering::AcqRel,
                Ordering::Relaxed,
            );
            if taken.is_err() {
                self.give(first, unit - first, taker);
                return Err(unit);
            }
        }
        Ok(())
    }

    /// Gives a piece back. What is not the taker's is left alone.
    pub fn give(&self, first: u32, count: u32, taker: Taker) {
        for unit in first..first.saturating_add(count) {
            if let Some(word) = self.words.get(unit as usize) {
                let _ =
                    word.compare_exchange(taker.word(), FREE, Ordering::AcqRel, Ordering::Relaxed);
            }
        }
    }

    /// Who has a unit.
    pub fn taker(&self, unit: u32) -> Option<Taker> {
        Taker::of(self.words.get(unit as usize)?.load(Ordering::Acquire))
    }

    /// The ranks that have units.
    pub fn takers(&self) -> impl Iterator<Item = u32> + '_ {
        let words = self.words.iter();
        words.filter_map(|word| Some(Taker::of(word.load(Ordering::Acquire))?.rank))
    }

    /// Takes back the units of a dead rank. Returns how many there were.
    pub fn reclaim(&self, rank: u32) -> u64 {
        let is_reclaimed = |word: &&AtomicU64| {
            let now = word.load(Ordering::Acquire);
            Taker::of(now).is_some_and(|taker| taker.rank == rank)
                && word
                    .compare_exchange(now, FREE, Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
        };
        self.words.iter().filter(is_reclaimed).count() as u64
    }

    /// Lets nobody take a unit any more. True once nobody has one.
    pub fn close(&self) -> bool {
        self.words.iter().fold(true, |closed, word| {
            let now = word.compare_exchange(FREE, CLOSED, Ordering::AcqRel, Ordering::Relaxed);
            closed & matches!(now, Ok(_) | Err(CLOSED))
        })
    }

    /// Lets units be taken again.
    pub fn open(&self) {
        for word in self.words {
            let _ = word.compare_exchange(CLOSED, FREE, Ordering::AcqRel, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: Taker = Taker { rank: 0, tag: 7 };
    const B: Taker = Taker { rank: 1, tag: 7 };

    fn words(count: usize) -> Vec<AtomicU64> {
        (0..count).map(|_| AtomicU64::new(0)).collect()
    }

    #[test]
    fn pieces_do_not_overlap_and_stay_in_their_block() {
        let words = words(12);
        let units = Units::new(&words, 4);
        assert_eq!(units.take(3, A), Some(0));
        assert_eq!(units.take(2, A), Some(4), "not 3 and 4: two blocks");
        assert_eq!(units.take(1, B), Some(3));
        assert_eq!(units.take(4, B), Some(8));
        assert_eq!(units.take(3, B), None);
        assert_eq!(units.take(5, B), None, "longer than a block");
        assert_eq!(units.taker(8), Some(B));
        units.give(8, 4, A);
        assert_eq!(units.take(4, A), None, "was not A's to give");
        units.give(8, 4, B);
        assert_eq!(units.take(4, A), Some(8));
    }

    #[test]
    fn what_the_dead_had_is_free_again_and_nothing_else() {
        let words = words(8);
        let units = Units::new(&words, 8);
        assert_eq!((units.take(3, A), units.take(3, B)), (Some(0), Some(3)));
        assert_eq!(units.takers().collect::<Vec<_>>(), [0, 0, 0, 1, 1, 1]);
        assert_eq!(units.reclaim(0), 3);
        assert_eq!(units.take(4, B), None);
        assert_eq!(units.take(3, B), Some(0));
    }

    #[test]
    fn a_row_is_closed_once_nobody_has_a_unit() {
        let words = words(8);
        let units = Units::new(&words, 8);
        assert_eq!(units.take(2, A), Some(0));
        assert!(!units.close());
        assert_eq!(units.take(1, B), None);
        units.give(0, 2, A);
        assert!(units.close() && units.close());
        assert_eq!(units.take(1, B), None);
        units.open();
        assert_eq!(units.take(8, B), Some(0));
    }

    #[test]
    fn threads_never_get_the_same_unit() {
        let words = words(16);
        let owned = self::words(16);
        std::thread::scope(|scope| {
            for rank in 0..4 {
                let (words, owned) = (&words, &owned);
                scope.spawn(move || {
                    let units = Units::new(words, 16);
                    for round in 0..2_000_u32 {
                        let taker = Taker { rank, tag: round };
                        let count = 1 + (round * 7 + rank) % 5;
                        let Some(first) = units.take(count, taker) else {
                            std::thread::yield_now();
                            continue;
                        };
                        let mine = &owned[first as usize..(first + count) as usize];
                        for unit in mine {
                            assert_eq!(unit.swap(1, Ordering::AcqRel), 0);
                        }
                        mine.iter()
                            .for_each(|unit| unit.store(0, Ordering::Release));
                        units.give(first, count, taker);
                    }
                });
            }
        });
        assert_eq!(
            Units::new(&words, 16).take(16, A),
            Some(0),
            "all given back"
        );
    }
}
