//! Landing ranges: untouched host memory into which a native receive is posted in place of a device buffer.
//!
//! A range has the capacity of the receive, but costs only the pages that a message fills: an RTS touches
//! one. Measured: a receive of 16 GiB into such a range posts in 1 to 10 microseconds. In a fresh range a
//! large bcopy message costs a fault for each page, so ranges are pooled, and the memory that the pool may
//! keep resident is bounded.

use std::num::NonZeroUsize;
use std::ptr::NonNull;

use crate::cuda::Lent;

/// Smallest range: one page.
const RANGE_MIN: usize = 4096;
/// Ranges kept per size class. A program may have thousands of receives pending; the mapping is what costs.
const KEPT_PER_CLASS: usize = 1024;

/// Address space behind a range, bytes. Open MPI 4.1.4 and 5.0.11 were seen to write past a receive that is
/// too small for its message.
const SLACK: usize = 1 << 20;

/// A private, zero-on-demand range of host memory.
#[derive(Debug)]
pub struct Landing {
    start: NonNull<u8>,
    length: NonZeroUsize,
    /// Bytes at the start that may be resident, judging by what was received into it.
    touched: usize,
}

// SAFETY: the range is plain memory owned by this value alone.
unsafe impl Send for Landing {}

// All by libc: MPI libraries patch its munmap and madvise, to forget what they have registered with a network.
impl Landing {
    fn map(length: usize) -> Option<Landing> {
        let length = NonZeroUsize::new(length)?;
        let mapped = length.get().checked_add(SLACK)?;
        let access = libc::PROT_READ | libc::PROT_WRITE;
        let kind = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: a fresh private anonymous mapping, no existing memory involved.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), mapped, access, kind, -1, 0) };
        if start == libc::MAP_FAILED {
            return None;
        }
        Some(Landing {
            start: NonNull::new(start.cast())?,
            length,
            touched: 0,
        })
    }

    /// Its first bytes, to be used as long as this lives.
    pub fn first(&self, bytes: u64) -> Lent {
        let length = self.length.get() as u64;
        // SAFETY: plain memory owned by this value alone, which nobody touches but the receive that has taken it.
        unsafe { Lent::new(self.start.as_ptr(), length) }.part(0, bytes)
    }

    /// Notes that a message of `bytes` may have filled the start of the range.
    pub fn note_touched(&mut self, bytes: u64) {
        self.touched = self.touched.max(
            usize::try_from(bytes)
                .unwrap_or(usize::MAX)
                .min(self.length.get()),
        );
    }

    fn forget_contents(&mut self) {
        // SAFETY: our own mapping; its contents are no longer wanted.
        unsafe {
            libc::madvise(
                self.start.as_ptr().cast(),
                self.length.get(),
                libc::MADV_DONTNEED,
            )
        };
        self.touched = 0;
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        // SAFETY: our own mapping of that length, not used after this.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.length.get() + SLACK) };
    }
}

/// Ranges waiting to be reused, by power-of-two size.
#[derive(Debug)]
pub struct Pool {
    classes: [Vec<Landing>; usize::BITS as usize],
    resident: usize,
    resident_max: usize,
}

impl Pool {
    /// A pool that keeps at most `resident_max` bytes of filled pages.
    pub fn new(resident_max: usize) -> Pool {
        Pool {
            classes: [const { Vec::new() }; usize::BITS as usize],
            resident: 0,
            resident_max,
        }
    }

    /// A range of at least `capacity` bytes whose first bytes are not an old RTS; `None` if the address space
    /// is exhausted.
    pub fn take(&mut self, capacity: u64) -> Option<Landing> {
        let capacity = usize::try_from(capacity)
            .ok()?
            .max(RANGE_MIN)
            .checked_next_power_of_two()?;
        let class = capacity.trailing_zeros() as usize;
        let landing = match self.classes[class].pop() {
            Some(kept) => {
                self.resident -= kept.touched;
                kept
            }
            None => Landing::map(capacity)?,
        };
        landing.first(64).write(&[0; 64]);
        Some(landing)
    }

    /// Takes a range back.
    pub fn give(&mut self, mut landing: Landing) {
        if self.resident + landing.touched > self.resident_max {
            landing.forget_contents();
        }
        let class = landing.length.trailing_zeros() as usize;
        if self.classes[class].len() < KEPT_PER_CLASS {
            self.resident += landing.touched;
            self.classes[class].push(landing);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_reused_and_clean_at_the_front() {
        let mut pool = Pool::new(1 << 20);
        let mut first = pool.take(5000).unwrap();
        let range = first.first(5000);
        range.write(&[0xee; 5000]);
        first.note_touched(5000);
        pool.give(first);
        assert_eq!(pool.resident, 5000);
        let again = pool.take(8000).unwrap();
        assert_eq!(again.first(0).address(), range.address());
        assert_eq!(range.first::<65>()[63..], [0, 0xee]);
        assert_eq!(pool.resident, 0);
    }

    #[test]
    fn resident_memory_is_bounded() {
        let mut pool = Pool::new(10_000);
        let mut ranges: Vec<_> = (0..4).map(|_| pool.take(4096).unwrap()).collect();
        for range in &mut ranges {
            range.note_touched(4096);
        }
        for range in ranges {
            pool.give(range);
        }
        assert!(pool.resident <= 10_000, "{}", pool.resident);
    }

    #[test]
    fn a_huge_range_is_cheap() {
        let mut pool = Pool::new(0);
        let range = pool.take(1 << 36).expect("64 GiB of address space");
        pool.give(range);
    }
}
