//! Allocations that a rank had exported and has freed, for peers that have them mapped: a mapping keeps freed
//! memory alive, until the device has none left.

use std::sync::atomic::{fence, AtomicU64, Ordering};

/// Allocations that are named. A peer that has missed more of them unmaps all.
const ROWS: usize = 64;

/// What a rank tells of its freed allocations, as it lies in shared memory.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Retired {
    /// How many allocations have been freed so far.
    count: AtomicU64,
    rows: [Row; ROWS],
}

/// Address and number of an allocation.
#[derive(Debug)]
#[repr(C)]
struct Row {
    base: AtomicU64,
    buffer_id: AtomicU64,
}

/// Which allocations are gone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Gone {
    /// Allocations, by address and number.
    These(Vec<(u64, u64)>),
    /// More than the list names.
    Many,
}

impl Retired {
    /// Owner, one thread at a time: an allocation was freed.
    pub(super) fn tell(&self, base: u64, buffer_id: u64) {
        let count = self.count.load(Ordering::Relaxed);
        let row = &self.rows[count as usize % ROWS];
        row.base.store(base, Ordering::Relaxed);
        row.buffer_id.store(buffer_id, Ordering::Relaxed);
        self.count.store(count.wrapping_add(1), Ordering::Release);
    }

    /// What has gone since the number in `seen`, which becomes the present number. If somebody else has
    /// written here, the cost is a mapping that has to be made again.
    pub fn since(&self, seen: &mut u64) -> Option<Gone> {
        let now = self.count.load(Ordering::Acquire);
        let before = std::mem::replace(seen, now);
        let new = now.wrapping_sub(before);
        if new == 0 {
            return None;
        }
        if new >= ROWS as u64 {
            return Some(Gone::Many);
        }
        let rows = (0..new).map(|at| {
            let row = &self.rows[before.wrapping_add(at) as usize % ROWS];
            let (base, number) = (&row.base, &row.buffer_id);
            (base.load(Ordering::Relaxed), number.load(Ordering::Relaxed))
        });
        let rows = rows.collect();
        fence(Ordering::Acquire);
        // Written over meanwhile?
        let later = self.count.load(Ordering::Relaxed);
        if later.wrapping_sub(before) >= ROWS as u64 {
            return Some(Gone::Many);
        }
        Some(Gone::These(rows))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn empty() -> Retired {
        Retired {
            count: AtomicU64::new(0),
            rows: std::array::from_fn(|_| Row {
                base: AtomicU64::new(0),
                buffer_id: AtomicU64::new(0),
            }),
        }
    }

    #[test]
    fn each_is_told_once_and_in_order() {
        let retired = empty();
        let mut seen = 0;
        assert_eq!(retired.since(&mut seen), None);
        retired.tell(10, 1);
        retired.tell(20, 2);
        assert_eq!(
            retired.since(&mut seen),
            Some(Gone::These(vec![(10, 1), (20, 2)]))
        );
        assert_eq!(retired.since(&mut seen), None);
        for round in 0..1000 {
            retired.tell(round, round + 5);
            assert_eq!(
                retired.since(&mut seen),
                Some(Gone::These(vec![(round, round + 5)]))
            );
        }
    }

    #[test]
    fn who_has_missed_too_many_lets_go_of_all() {
        let retired = empty();
        let (mut in_time, mut late) = (0, 0);
        for at in 0..ROWS as u64 {
            if at == 1 {
                assert!(retired.since(&mut in_time).is_some());
            }
            retired.tell(at, at);
        }
        assert!(
            matches!(retired.since(&mut in_time), Some(Gone::These(rows)) if rows.len() == ROWS - 1)
        );
        assert_eq!(retired.since(&mut late), Some(Gone::Many));
        assert_eq!(retired.since(&mut late), None);
    }
}
