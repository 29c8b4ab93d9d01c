//! What a receiver offers its sender of a large message: staged parts, which the sender may bring by paths
//! with staging.
//!
//! An *offer* lies in the receiver's segment and is about one message. It has a *staged part* for each path
//! with staging: a part of the message, in chunks. The sender takes chunks in order, moves each into a piece
//! of staging memory and appends the piece to the staged part's ring. The receiver moves the chunk on and
//! gives the piece back. Only the receiver writes to its buffer, so it needs nobody's permission to read a
//! chunk from the sender's buffer itself: a sender that does not come does no harm. The one exception is a
//! part that the sender is to *put*, straight into the receiver's buffer ([`Target`]): only the sender can
//! say when it has stopped writing to the chunks that it has claimed there.
//!
//! ```text
//! claim   tag | end | next     the sender raises next, the receiver lowers end, and reads from there on
//! filled  tag | over | count   by the sender: chunks that lie in their pieces; over: no more will come
//! emptied tag | count          by the receiver: chunks whose pieces are the sender's again
//! ```
//!
//! Each word carries the tag of the offer's present use, which is never used again: a side that is late is
//! refused. An entry is scrambled with the tag and its position. Only one side moves each counter and knows
//! where it has left it, so it notices what somebody else writes there.

use super::{digest, mix, unmix};
use std::sync::atomic::{fence, AtomicU64, Ordering};
use thiserror::Error;

/// Staged parts of one offer.
pub const STAGED_PARTS: usize = 7;
/// The most staged parts whose chunks alternate between two lanes: these parts have four lanes.
pub const IN_TURN_MAX: usize = 2;
/// Chunks of a staged part that may be in their pieces at one time.
pub const STAGED_PART_ENTRIES: usize = 16;
/// The most chunks of a staged part.
pub const STAGED_PART_CHUNKS_MAX: u32 = COUNT as u32;
/// Size of an offer, bytes.
pub const OFFER_BYTES: usize = size_of::<Offer>();

/// An allocation that is not a whole number of these lies in small pages. Two copies that write to such
/// memory carry less than two that read it: 610 GB/s, 736 read (H200, 256 MiB and 4 or 16 KiB more; with 64
/// KiB, 512 KiB or 1 MiB more it is as without). See `docs/decisions/push-both-ways.md`.
const LARGE_PAGE_BYTES: u64 = 64 << 10;

const COUNT_BITS: u32 = 12;
const COUNT: u64 = (1 << COUNT_BITS) - 1;
const TAG_SHIFT: u32 = 2 * COUNT_BITS;
const TAG_MAX: u64 = u64::MAX >> TAG_SHIFT;
/// In the word `way`: see [`Way::Put`].
const PUSHED: u64 = 1 << 61;
/// In the name of an offer: see [`Asked::is_all_put`].
const ALL_PUT: u64 = 1 << (TAG_SHIFT - 1);
/// In the word `filled`: the sender brings no more.
const OVER: u64 = 1 << COUNT_BITS;

/// What a part goes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Pinned memory of the sender.
    Host,
    /// Memory of another GPU, exported by a rank.
    Relay {
        /// World rank of the exporter.
        owner: u32,
        /// Which of its GPUs.
        row: u8,
    },
    /// Nothing: the sender writes to the receiver's buffer.
    Put,
}

/// The receiver's buffer, for parts that are put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// CUDA IPC handle of the allocation.
    pub ipc_handle: [u8; 64],
    /// UUID of its GPU.
    pub device: [u8; 16],
    /// Base address of the allocation, in the receiver.
    pub base: u64,
    /// Size of the allocation, bytes.
    pub allocation_bytes: u64,
    /// Where the message belongs in it, bytes.
    pub offset: u64,
    /// CU_POINTER_ATTRIBUTE_BUFFER_ID.
    pub buffer_id: u64,
}

impl Target {
    /// Whether its allocation is a whole number of 64 KiB; otherwise it lies in small pages.
    pub fn is_in_large_pages(&self) -> bool {
        self.allocation_bytes % LARGE_PAGE_BYTES == 0
    }
}

/// A target as words, and one word for a digest of the others: the sender must not write anywhere else.
pub(super) const TARGET_WORDS: usize = 16;

impl Target {
    pub(super) fn words(&self, tag: u64) -> [u64; TARGET_WORDS] {
        let mut words = [0; TARGET_WORDS];
        let bytes = self.ipc_handle.chunks_exact(8);
        let bytes = bytes.chain(self.device.chunks_exact(8));
        for (word, chunk) in words.iter_mut().zip(bytes) {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(chunk);
            *word = u64::from_ne_bytes(bytes);
        }
        let numbers = [
            self.base,
            self.allocation_bytes,
            self.offset,
            self.buffer_id,
            tag,
        ];
        words[10..15].copy_from_slice(&numbers);
        words[15] = digest(&words);
        words
    }

    pub(super) fn from_words(
        words: &[u64; TARGET_WORDS],
        tag: u64,
    ) -> Result<Target, StagedPartError> {
        let mut target = Target {
            ipc_handle: [0; 64],
            device: [0; 16],
            base: words[10],
            allocation_bytes: words[11],
            offset: words[12],
            buffer_id: words[13],
        };
        let bytes = target.ipc_handle.chunks_exact_mut(8);
        let bytes = bytes.chain(target.device.chunks_exact_mut(8));
        for (word, chunk) in words.iter().zip(bytes) {
            chunk.copy_from_slice(&word.to_ne_bytes());
        }
        if target.words(tag) == *words {
            Ok(target)
        } else {
            Err(StagedPartError::Corrupt)
        }
    }
}

/// A part of a message that goes by a path with staging, or is put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// What it goes over.
    pub way: Way,
    /// Where it begins in the message.
    pub offset: u64,
    /// Length, at least 1.
    pub bytes: u64,
    /// Length of each chunk but the last.
    pub chunk_bytes: u64,
    /// The copies of each hop alternate between two lanes.
    pub in_turn: bool,
}

impl Part {
    /// Number of its chunks.
    pub fn chunks(&self) -> u32 {
        u32::try_from(self.bytes.div_ceil(self.chunk_bytes)).unwrap_or(u32::MAX)
    }

    /// Where some chunks begin in the message, and their length.
    pub fn span(&self, first: u32, count: u32) -> (u64, u64) {
        let begin = u64::from(first) * self.chunk_bytes;
        let end = (begin + u64::from(count) * self.chunk_bytes).min(self.bytes);
        (self.offset + begin, end.saturating_sub(begin))
    }

    /// The piece of this part that lies before a byte of the message.
    pub fn before(&self, end: u64) -> Option<Part> {
        let bytes = self.bytes.min(end.saturating_sub(self.offset));
        (bytes > 0).then_some(Part { bytes, ..*self })
    }

    /// Where a chunk begins in the message, and its length.
    pub fn chunk(&self, index: u32) -> (u64, u64) {
        self.span(index, 1)
    }

    /// The lane of a chunk, of the lanes that there are for staged parts.
    pub fn lane(&self, staged_part: usize, chunk: u32) -> u64 {
        let turn = if self.in_turn { chunk % 2 } else { 0 };
        staged_part as u64 + IN_TURN_MAX as u64 * u64::from(turn)
    }

    /// Whether it makes sense for a message of so many bytes.
    pub fn is_sane(&self, length: u64) -> bool {
        let end = self.offset.checked_add(self.bytes);
        self.bytes > 0
            && end.is_some_and(|end| end <= length)
            && self.chunk_bytes > 0
            && self.bytes.div_ceil(self.chunk_bytes) <= COUNT
    }
}

/// A chunk in its piece of staging: the first unit of the piece, and the chunk's length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Filled {
    /// First unit of the piece.
    pub unit: u32,
    /// Bytes in it.
    pub bytes: u32,
}

/// Why an operation on a staged part was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum StagedPartError {
    /// The offer is about another message by now, or about none.
    #[error("the offer is over")]
    Stale,
    /// Its words make no sense.
    #[error("the offer was written over")]
    Corrupt,
}

/// An offer as it lies in shared memory.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Offer {
    word: AtomicU64,
    /// The offer of the same receiver that the sender must claim first, as [`Asked::pack`] has it; 0 for
    /// none.
    behind: AtomicU64,
    target: [AtomicU64; TARGET_WORDS],
    staged_parts: [StagedPart; STAGED_PARTS],
}

super::map::shared!(Offer);

/// A staged part as it lies in shared memory.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct StagedPart {
    claim: AtomicU64,
    way: AtomicU64,
    offset: AtomicU64,
    bytes: AtomicU64,
    chunk_bytes: AtomicU64,
    emptied: AtomicU64,
    filled: Filler,
}

/// The words that the sender writes.
#[derive(Debug)]
#[repr(C, align(64))]
struct Filler {
    filled: AtomicU64,
    entries: [AtomicU64; STAGED_PART_ENTRIES],
}

/// How a slot names an offer to its sender: index and tag, scrambled with the message's nonce.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Asked {
    /// Which offer of the receiver's.
    pub index: u32,
    /// Tag of its present use.
    pub tag: u64,
    /// The sender is to put all of its share: the message takes the direct path only. A sender that comes
    /// when the offer is over knows the path from this.
    pub is_all_put: bool,
}

impl Asked {
    pub(super) fn pack(self, nonce: u64) -> u64 {
        let kind = if self.is_all_put { ALL_PUT } else { 0 };
        mix((self.tag << TAG_SHIFT | kind | u64::from(self.index)) ^ nonce)
    }

    pub(super) fn unpack(word: u64, nonce: u64) -> Option<Asked> {
        let packed = unmix(word) ^ nonce;
        let tag = packed >> TAG_SHIFT;
        (word != 0 && tag != 0).then_some(Asked {
            index: (packed & (ALL_PUT - 1)) as u32,
            tag,
            is_all_put: packed & ALL_PUT != 0,
        })
    }
}

impl Offer {
    /// Receiver: writes an offer. The tag is one that was never used before.
    pub(super) fn open(
        &self,
        tag: u64,
        parts: &[Part],
        target: Option<&Target>,
        behind: Option<Asked>,
    ) {
        debug_assert!((1..=TAG_MAX).contains(&tag) && parts.len() <= STAGED_PARTS);
        self.close();
        fence(Ordering::Release);
        let behind = behind.map_or(0, |behind| behind.pack(tag));
        self.behind.store(behind, Ordering::Relaxed);
        if let Some(target) = target {
            let words = target.words(tag);
            let places = self.target.iter().zip(words);
            places.for_each(|(place, word)| place.store(word, Ordering::Relaxed));
        }
        for (staged_part, part) in self.staged_parts.iter().zip(parts) {
            staged_part.open(tag, part);
        }
        self.word
            .store(tag << TAG_SHIFT | parts.len() as u64, Ordering::Release);
    }

    /// Receiver: the offer is over. A sender that is late is refused.
    pub(super) fn close(&self) {
        self.word.store(0, Ordering::Relaxed);
        for staged_part in &self.staged_parts {
            staged_part.claim.store(0, Ordering::Relaxed);
            staged_part.filled.filled.store(0, Ordering::Relaxed);
            staged_part.emptied.store(0, Ordering::Relaxed);
        }
    }

    /// Number of staged parts.
    pub fn len(&self, tag: u64) -> Result<usize, StagedPartError> {
        let word = self.word.load(Ordering::Acquire);
        if word >> TAG_SHIFT != tag || tag == 0 {
            return Err(StagedPartError::Stale);
        }
        let staged_parts = (word & ((1 << TAG_SHIFT) - 1)) as usize;
        if staged_parts > STAGED_PARTS {
            return Err(StagedPartError::Corrupt);
        }
        Ok(staged_parts)
    }

    /// Sender: the offer whose chunks must be claimed before any of this one.
    pub fn behind(&self, tag: u64) -> Option<Asked> {
        let word = self.behind.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        self.len(tag).ok()?;
        Asked::unpack(word, tag)
    }

    /// Sender: whether no chunk of it is left to claim.
    pub fn is_claimed(&self, tag: u64) -> bool {
        let staged_parts = self.len(tag).unwrap_or(0);
        let mut staged_parts = (0..staged_parts).filter_map(|number| self.staged_part(tag, number));
        staged_parts.all(|staged_part| staged_part.is_claimed() || staged_part.claimed().is_err())
    }

    /// Sender: where to put the part that is to be put.
    pub fn target(&self, tag: u64) -> Result<Target, StagedPartError> {
        self.len(tag)?;
        let words = std::array::from_fn(|at| self.target[at].load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        self.len(tag)?;
        Target::from_words(&words, tag)
    }

    /// A staged part, for the use with this tag.
    pub fn staged_part(&self, tag: u64, number: usize) -> Option<StagedPartOf<'_>> {
        let staged_part = self.staged_parts.get(number)?;
        (tag != 0).then_some(StagedPartOf { staged_part, tag })
    }
}

impl StagedPart {
    fn open(&self, tag: u64, part: &Part) {
        let way = match part.way {
            Way::Host => 0,
            Way::Put => PUSHED,
            Way::Relay { owner, row } => 1 << 63 | u64::from(row) << 32 | u64::from(owner),
        } | u64::from(part.in_turn) << 62;
        let relaxed = Ordering::Relaxed;
        self.way.store(way, relaxed);
        self.offset.store(part.offset, relaxed);
        self.bytes.store(part.bytes, relaxed);
        self.chunk_bytes.store(part.chunk_bytes, relaxed);
        let end = u64::from(part.chunks()) & COUNT;
        self.claim
            .store(tag << TAG_SHIFT | end << COUNT_BITS, relaxed);
        self.filled.filled.store(tag << TAG_SHIFT, relaxed);
        self.emptied.store(tag << TAG_SHIFT, relaxed);
    }
}

/// A staged part in one use.
#[derive(Clone, Copy, Debug)]
pub struct StagedPartOf<'a> {
    staged_part: &'a StagedPart,
    tag: u64,
}

impl StagedPartOf<'_> {
    /// The part that it is to carry. The other side chose its numbers: see [`Part::is_sane`].
    pub fn part(&self) -> Result<Part, StagedPartError> {
        self.word(&self.staged_part.claim, Ordering::Acquire)?;
        let relaxed = Ordering::Relaxed;
        let way = self.staged_part.way.load(relaxed);
        let part = Part {
            way: match (way >> 63, way & PUSHED) {
                (0, 0) => Way::Host,
                (0, _) => Way::Put,
                _ => Way::Relay {
                    owner: way as u32,
                    row: (way >> 32) as u8,
                },
            },
            offset: self.staged_part.offset.load(relaxed),
            bytes: self.staged_part.bytes.load(relaxed),
            chunk_bytes: self.staged_part.chunk_bytes.load(relaxed),
            in_turn: way >> 62 & 1 != 0,
        };
        fence(Ordering::Acquire);
        self.word(&self.staged_part.claim, relaxed)?;
        Ok(part)
    }

    /// How many chunks the sender has claimed, and the first chunk that it may not claim any more.
    pub fn claimed(&self) -> Result<(u32, u32), StagedPartError> {
        let word = self.word(&self.staged_part.claim, Ordering::Acquire)?;
        let (next, end) = ((word & COUNT) as u32, (word >> COUNT_BITS) as u32);
        if next > end {
            return Err(StagedPartError::Corrupt);
        }
        Ok((next, end))
    }

    /// Sender: claims chunk `next`, the one behind those that it has claimed so far. False if none is left.
    pub fn claim(&self, next: u32) -> Result<bool, StagedPartError> {
        loop {
            let (now, end) = self.claimed()?;
            if now != next {
                return Err(StagedPartError::Corrupt);
            }
            if now == end {
                return Ok(false);
            }
            if self.swap_claim((now, end), (now + 1, end)) {
                return Ok(true);
            }
        }
    }

    /// Whether the sender has claimed chunks that it has not brought yet, and may still bring.
    pub fn is_being_filled(&self) -> bool {
        match (self.claimed(), self.filled()) {
            (Ok((claimed, _)), Ok((filled, is_over))) => filled < claimed && !is_over,
            _ => false,
        }
    }

    /// Whether the sender has claimed all that it may.
    pub fn is_claimed(&self) -> bool {
        self.claimed().is_ok_and(|(next, end)| next == end)
    }

    /// Whether its receiver leaves nothing of it to the sender any more: it brings the rest itself, or is
    /// done with the message and may have freed its buffer.
    pub fn is_closed(&self) -> bool {
        self.is_claimed() || matches!(self.claimed(), Err(StagedPartError::Stale))
    }

    /// Receiver: claims the last `most` of the chunks that the sender has not claimed, or as many as there
    /// are. Returns the first and their number.
    pub fn take_back(&self, most: u32) -> Result<(u32, u32), StagedPartError> {
        loop {
            let (next, end) = self.claimed()?;
            let count = most.min(end - next);
            if count == 0 || self.swap_claim((next, end), (next, end - count)) {
                return Ok((end - count, count));
            }
        }
    }

    /// Sender: the next chunk lies in its piece. `filled` counts those before it. False if the ring is full.
    pub fn push(&self, filled: &mut u32, entry: Filled) -> Result<bool, StagedPartError> {
        let emptied = self.emptied()?;
        if emptied > *filled {
            return Err(StagedPartError::Corrupt);
        }
        if (*filled - emptied) as usize >= STAGED_PART_ENTRIES {
            return Ok(false);
        }
        let packed = u64::from(entry.bytes) << 32 | u64::from(entry.unit);
        let word = mix(packed ^ self.key(*filled));
        self.entry(*filled).store(word, Ordering::Relaxed);
        self.advance(&self.staged_part.filled.filled, *filled)?;
        *filled += 1;
        Ok(true)
    }

    /// Sender: no more will come than the ring holds.
    pub fn give_up(&self, filled: u32) {
        let word = self.tag << TAG_SHIFT | u64::from(filled);
        // A refusal is ignored: the offer is over, or not to be believed, and nobody waits.
        let _ = self.staged_part.filled.filled.compare_exchange(
            word,
            word | OVER,
            Ordering::AcqRel,
            Ordering::Relaxed,
        );
    }

    /// Chunks that the sender has put in their pieces, and whether no more will come.
    pub fn filled(&self) -> Result<(u32, bool), StagedPartError> {
        let word = self.word(&self.staged_part.filled.filled, Ordering::Acquire)?;
        if word & !(OVER | COUNT) != 0 {
            return Err(StagedPartError::Corrupt);
        }
        Ok(((word & COUNT) as u32, word & OVER != 0))
    }

    /// Receiver: a chunk in its piece. The other side chose its numbers.
    pub fn entry_of(&self, chunk: u32) -> Filled {
        let word = self.entry(chunk).load(Ordering::Relaxed);
        let packed = unmix(word) ^ self.key(chunk);
        Filled {
            unit: packed as u32,
            bytes: (packed >> 32) as u32,
        }
    }

    /// Chunks whose pieces are the sender's again.
    pub fn emptied(&self) -> Result<u32, StagedPartError> {
        let word = self.word(&self.staged_part.emptied, Ordering::Acquire)?;
        if word > COUNT {
            return Err(StagedPartError::Corrupt);
        }
        Ok(word as u32)
    }

    /// Receiver: has read the chunk behind the `emptied` ones before it.
    pub fn pop(&self, emptied: &mut u32) -> Result<(), StagedPartError> {
        self.advance(&self.staged_part.emptied, *emptied)?;
        *emptied += 1;
        Ok(())
    }

    fn swap_claim(&self, from: (u32, u32), to: (u32, u32)) -> bool {
        let word = |(next, end): (u32, u32)| {
            self.tag << TAG_SHIFT | u64::from(end) << COUNT_BITS | u64::from(next)
        };
        let claim = &self.staged_part.claim;
        claim
            .compare_exchange(word(from), word(to), Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    fn advance(&self, counter: &AtomicU64, from: u32) -> Result<(), StagedPartError> {
        let word = self.tag << TAG_SHIFT | u64::from(from);
        counter
            .compare_exchange(word, word + 1, Ordering::AcqRel, Ordering::Relaxed)
            .map(drop)
            .map_err(|now| {
                if now >> TAG_SHIFT == self.tag {
                    StagedPartError::Corrupt
                } else {
                    StagedPartError::Stale
                }
            })
    }

    /// A word without its tag, if that is ours.
    fn word(&self, word: &AtomicU64, order: Ordering) -> Result<u64, StagedPartError> {
        let word = word.load(order);
        if word >> TAG_SHIFT != self.tag {
            return Err(StagedPartError::Stale);
        }
        Ok(word & ((1 << TAG_SHIFT) - 1))
    }

    fn entry(&self, chunk: u32) -> &AtomicU64 {
        &self.staged_part.filled.entries[chunk as usize % STAGED_PART_ENTRIES]
    }

    /// The key that scrambles an entry.
    fn key(&self, chunk: u32) -> u64 {
        self.tag << TAG_SHIFT | u64::from(chunk)
    }
}

#[cfg(test)]
#[path = "staged_part_tests.rs"]
mod tests;
