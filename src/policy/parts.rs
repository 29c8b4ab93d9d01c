//! The parts of a message that are brought by staging.

use super::history::Planned;
use crate::node::track::TRACK_CHUNKS_MAX;
use crate::node::UNIT_BYTES;

/// How long the chunks of a part of so many bytes are, of which the plan has some as long as `planned`: room for a piece that is
/// filled, one that is emptied (two of each in turn), and one that is handed over must be in so much staging, and there may be so
/// many chunks at most.
pub fn chunk_bytes(bytes: u64, planned: u64, in_turn: bool, room: u64) -> u64 {
    let pieces = if in_turn { 5 } else { 3 };
    let most = (room / pieces / UNIT_BYTES * UNIT_BYTES).max(UNIT_BYTES);
    let least = bytes.div_ceil(u64::from(TRACK_CHUNKS_MAX));
    planned.min(most).max(least).max(1)
}

/// How a message was planned: over several paths, or without, for want of staging, or though it would be split on an idle node.
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

/// What parts (through host memory, offset, bytes) bring of a message, if all go through host memory, are its beginning, and
/// less than half of it.
pub fn rest(parts: &[(bool, u64, u64)], bytes: u64) -> Option<u64> {
    let rest = parts.iter().map(|(_, _, bytes)| bytes).sum();
    let end = parts
        .iter()
        .map(|(_, offset, bytes)| offset + bytes)
        .max()?;
    let is_rest = parts.iter().all(|(is_host, _, _)| *is_host) && end == rest;
    (is_rest && rest < bytes / 2).then_some(rest)
}
