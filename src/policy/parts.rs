//! The parts of a message that go by staging.

#[cfg(any(test, feature = "golden"))]
use serde::{Deserialize, Serialize};

use super::history::Planned;
use crate::node::staged_part::STAGED_PART_CHUNKS_MAX;
use crate::node::UNIT_BYTES;

/// How long the chunks of a part of so many bytes are, where the plan made some as long as `planned`. The
/// staging must have room for a piece that is filled, one that is emptied (two of each if chunks alternate
/// between lanes), and one that is handed over. The number of chunks is limited, too.
pub fn chunk_bytes(bytes: u64, planned: u64, in_turn: bool, room: u64) -> u64 {
    let pieces = if in_turn { 5 } else { 3 };
    let most = (room / pieces / UNIT_BYTES * UNIT_BYTES).max(UNIT_BYTES);
    let least = bytes.div_ceil(u64::from(STAGED_PART_CHUNKS_MAX));
    planned.min(most).max(least).max(1)
}

/// How a message was planned: over several paths, or directly, either for want of staging or although it
/// would be split on an idle node.
pub fn planned(is_split: bool, lacks_staging: bool, would_split: bool) -> Planned {
    if is_split {
        Planned::Split
    } else if lacks_staging {
        Planned::DirectForNow
    } else if would_split {
        Planned::DirectBesideOthers
    } else {
        Planned::Direct
    }
}

/// What a receiver claims back at one time at least, bytes, if so much is left.
const CLAIM_BYTES_MIN: u64 = 1 << 20;

/// A part with chunks that its sender has not begun.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub struct Left {
    /// Its number.
    pub number: usize,
    /// The first chunk, and how many.
    pub chunks: (u32, u32),
    /// Bytes of a chunk.
    pub chunk_bytes: u64,
}

/// The part from which a receiver with nothing else to do takes chunks over, and how many at most: half of
/// the part that has most left, because the sender goes on with the other half.
pub fn claim_back(open: &[Left]) -> Option<(usize, u32)> {
    let bytes = |left: &Left| u64::from(left.chunks.1) * left.chunk_bytes;
    let rank = |left: &&Left| (bytes(left), left.chunks.0, left.number);
    let most = open.iter().max_by_key(rank)?;
    let chunks = (bytes(most) / 2).max(CLAIM_BYTES_MIN);
    let chunks = chunks.div_ceil(most.chunk_bytes.max(1));
    (bytes(most) > 0).then_some((most.number, chunks as u32))
}

/// Takes parts (through host memory, offset, bytes). Returns how much of a message they bring, if all go
/// through host memory, are its beginning, and are less than half of it.
pub fn rest(parts: &[(bool, u64, u64)], bytes: u64) -> Option<u64> {
    let rest = parts.iter().map(|(_, _, bytes)| bytes).sum();
    let end = parts
        .iter()
        .map(|(_, offset, bytes)| offset + bytes)
        .max()?;
    let is_rest = parts.iter().all(|(is_host, _, _)| *is_host) && end == rest;
    (is_rest && rest < bytes / 2).then_some(rest)
}
