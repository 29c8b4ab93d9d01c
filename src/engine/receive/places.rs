//! Where in the program's own memory RTSs may land.
//!
//! Two receives pending at one place break the rules of MPI (MPI 4.1 section 3.7.2: a receive buffer belongs
//! to its receive). Yet the common bandwidth tests post a window of them. Natively the bytes that come last
//! stay. But an RTS that is overwritten before it was read is a lost message. So only the first receive lands
//! in place.

use std::collections::BTreeMap;

/// Ranges of pending receives, by start and receive.
#[derive(Debug, Default)]
pub struct Places(BTreeMap<(usize, usize), usize>);

impl Places {
    /// A receive is posted.
    pub fn insert(&mut self, receive: usize, start: usize, bytes: u64) {
        self.0.insert((start, receive), end(start, bytes));
    }

    /// Nothing can land in the receive any more.
    pub fn remove(&mut self, receive: usize, start: usize) {
        self.0.remove(&(start, receive));
    }

    /// Whether one of them overlaps these bytes. (Of ranges that overlap each other, posted before this rank
    /// was live, one may go unnoticed.)
    pub fn overlap(&self, start: usize, bytes: u64) -> bool {
        let before = self.0.range(..(end(start, bytes), 0)).next_back();
        before.is_some_and(|(_, end)| *end > start)
    }
}

fn end(start: usize, bytes: u64) -> usize {
    start.saturating_add(usize::try_from(bytes).unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_do_not_overlap() {
        let mut places = Places::default();
        places.insert(1, 1000, 100);
        places.insert(2, 1200, 100);
        for (start, bytes, expected) in [
            (900, 100, false),
            (900, 101, true),
            (1099, 1, true),
            (1100, 100, false),
            (1100, 101, true),
            (1050, 10, true),
            (0, 5000, true),
            (1300, u64::MAX, false),
        ] {
            assert_eq!(places.overlap(start, bytes), expected, "{start} {bytes}");
        }
        places.remove(1, 1000);
        assert!(!places.overlap(900, 300));
        assert!(places.overlap(900, 301));
    }
}
