//! The records of one thread that are not written yet: a ring, filled by its thread and emptied by whoever writes the
//! file. Neither waits for the other.

use std::sync::atomic::{AtomicU64, Ordering};

use super::record::Words;

/// Records that a thread may be ahead of the file: 2 MiB.
pub(super) const CAPACITY: usize = 1 << 15;

/// A record's place: a line of the processor's cache.
#[derive(Default)]
#[repr(align(64))]
pub(super) struct Line(pub(super) [AtomicU64; 8]);

pub(super) struct Ring {
    records: Box<[Line]>,
    filled: AtomicU64,
    emptied: AtomicU64,
    dropped: AtomicU64,
    /// The call that the thread is in, as a record; the first word is 0 if it is in none.
    current: Line,
}

/// Records further on, whose place is fetched for writing: the thread that writes the file had it last, and a store to it would
/// keep the next atomic operation of this thread waiting.
const AHEAD: u64 = 4;

#[inline]
fn expect_write(place: &Line) {
    #[cfg(target_arch = "x86_64")]
    {
        use core::arch::x86_64::{_mm_prefetch, _MM_HINT_ET0};
        // SAFETY: a hint about memory that is there.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(place.0.as_ptr().cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

impl Ring {
    pub(super) fn new(capacity: usize) -> Ring {
        Ring {
            records: (0..capacity).map(|_| Default::default()).collect(),
            filled: AtomicU64::new(0),
            emptied: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            current: Default::default(),
        }
    }

    /// Its thread: makes a call.
    #[inline]
    pub(super) fn set_current(&self, words: &Words) {
        for (to, from) in self.current.0.iter().zip(words).skip(1) {
            to.store(*from, Ordering::Relaxed);
        }
        self.current.0[0].store(words[0], Ordering::Release);
    }

    /// Its thread: the call returns.
    #[inline]
    pub(super) fn end_current(&self) {
        self.current.0[0].store(0, Ordering::Relaxed);
    }

    /// The call that its thread is in. Another one may have been begun meanwhile: whoever asks twice and gets
    /// the same has a call of long.
    pub(super) fn current(&self) -> Option<Words> {
        let first = self.current.0[0].load(Ordering::Acquire);
        (first != 0).then(|| {
            let word = |at: usize| self.current.0[at].load(Ordering::Relaxed);
            std::array::from_fn(|at| if at == 0 { first } else { word(at) })
        })
    }

    /// Its thread: adds a record, or counts it as dropped. True if the ring is half full since then.
    #[inline]
    pub(super) fn push(&self, words: &Words) -> bool {
        let filled = self.filled.load(Ordering::Relaxed);
        let length = filled - self.emptied.load(Ordering::Acquire);
        let capacity = self.records.len() as u64;
        if length >= capacity {
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return false;
        }
        let place = &self.records[(filled % capacity) as usize];
        for (to, from) in place.0.iter().zip(words) {
            to.store(*from, Ordering::Relaxed);
        }
        expect_write(&self.records[((filled + AHEAD) % capacity) as usize]);
        self.filled.store(filled + 1, Ordering::Release);
        length + 1 == capacity / 2
    }

    /// Takes what there is; one thread at a time.
    pub(super) fn drain(&self, mut take: impl FnMut(&Words)) {
        let filled = self.filled.load(Ordering::Acquire);
        let emptied = self.emptied.load(Ordering::Relaxed);
        for number in emptied..filled {
            let place = &self.records[(number % self.records.len() as u64) as usize];
            take(&std::array::from_fn(|word| {
                place.0[word].load(Ordering::Relaxed)
            }));
        }
        self.emptied.store(filled, Ordering::Release);
    }

    pub(super) fn take_dropped(&self) -> u64 {
        self.dropped.swap(0, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_lost_but_what_is_counted() {
        let ring = Ring::new(64);
        let mut seen = Vec::new();
        const COUNT: u64 = 200_000;
        std::thread::scope(|scope| {
            let filler = scope.spawn(|| (0..COUNT).filter(|at| ring.push(&[*at; 8])).count());
            while !filler.is_finished() {
                ring.drain(|words| seen.push(*words));
                std::thread::yield_now();
            }
            assert!(filler.join().expect("no panic") > 0);
        });
        ring.drain(|words| seen.push(*words));
        assert_eq!(seen.len() as u64 + ring.take_dropped(), COUNT);
        assert!(seen.windows(2).all(|two| two[0][0] < two[1][0]));
        assert!(seen
            .iter()
            .all(|words| words.iter().all(|word| *word == words[0])));
    }
}
