//! The details of a rank's statistics, for the rank that writes them to a file: words that its owner writes once, in
//! MPI_Finalize. Their memory is taken then; a job without such a file takes none.

use super::view::View;
use std::sync::atomic::{AtomicU64, Ordering};

/// Words that a rank can say.
pub const DETAIL_WORDS: usize = 1 << 18;
/// Room for them, bytes.
pub(super) const DETAILS_BYTES: u64 = DETAIL_WORDS as u64 * 8;

/// The words as they lie in shared memory. Only the first ones are backed by memory.
#[derive(Debug)]
#[repr(C, align(64))]
pub(super) struct DetailWords([AtomicU64; DETAIL_WORDS]);

super::map::shared!(DetailWords);

impl DetailWords {
    /// Owner: writes as many as there is room for, and says how many that are.
    pub(super) fn write(&self, words: &[u64]) -> usize {
        for (word, value) in self.0.iter().zip(words) {
            word.store(*value, Ordering::Relaxed);
        }
        words.len().min(DETAIL_WORDS)
    }
}

impl View {
    /// What the owner has said, if it has.
    pub fn details(&self) -> Option<Vec<u64>> {
        let (words, count) = self.detail_words()?;
        let words = words.0.iter().take(count);
        Some(words.map(|word| word.load(Ordering::Relaxed)).collect())
    }
}
