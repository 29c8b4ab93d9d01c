//! The checksums of a message, beside its slot. They exist only if the sender has `ANABRANCH_VERIFY` on.
//!
//! A sheet is written before its message is posted and stays as it is until the slot is freed. So a receiver
//! that has claimed the message may read it at leisure. The nonce tells a sheet that is about another
//! message.

use std::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};

/// Size of a sheet, bytes.
pub const SHEET_BYTES: usize = 256;
/// Checksums of a message: one for each of so many blocks, or fewer.
pub const BLOCKS: usize = (SHEET_BYTES - 8) / 4;
/// The checksums of a message, in the order of its blocks.
pub type Sums = [u32; BLOCKS];

/// A sheet as it lies in shared memory.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Sheet {
    nonce: AtomicU64,
    sums: [AtomicU32; BLOCKS],
}

super::map::shared!(Sheet);

const _: () = assert!(size_of::<Sheet>() == SHEET_BYTES);

impl Sheet {
    /// Owner: writes the checksums of the message that is about to be posted under this nonce.
    pub(super) fn write(&self, nonce: u64, sums: &Sums) {
        self.nonce.store(0, Ordering::Relaxed);
        fence(Ordering::Release);
        for (word, sum) in self.sums.iter().zip(sums) {
            word.store(*sum, Ordering::Relaxed);
        }
        self.nonce.store(nonce, Ordering::Release);
    }

    /// The checksums, if they were about the message with this nonce from the first one read to the last.
    pub fn read(&self, nonce: u64) -> Option<Sums> {
        if self.nonce.load(Ordering::Acquire) != nonce {
            return None;
        }
        let sums = std::array::from_fn(|block| self.sums[block].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        (self.nonce.load(Ordering::Relaxed) == nonce).then_some(sums)
    }
}
