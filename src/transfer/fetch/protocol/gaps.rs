//! What the parts of a split message leave between them.

use crate::node::{Part, Way};

/// A put goes in copies as long as a chunk may be: two copies one behind the other take 3 us more than one.
const PUT_BYTES_MAX: u64 = 1 << 30;

/// What is to be put if other parts go by staging: the longest gap that these leave.
pub(super) fn longest_gap(parts: &[Part], until: u64) -> Option<Part> {
    let gaps = gaps(parts, until).into_iter();
    let (offset, bytes) = gaps.max_by_key(|(_, bytes)| *bytes)?;
    Some(Part {
        way: Way::Put,
        offset,
        bytes,
        chunk_bytes: bytes.min(PUT_BYTES_MAX),
        in_turn: false,
    })
}

/// The gaps that parts leave in a message up to the byte `until`.
pub(super) fn gaps(parts: &[Part], until: u64) -> Vec<(u64, u64)> {
    let mut spans: Vec<(u64, u64)> = parts.iter().map(|part| (part.offset, part.bytes)).collect();
    spans.sort_unstable();
    let (mut gaps, mut at) = (Vec::new(), 0);
    for (offset, bytes) in spans.into_iter().chain([(until, 0)]) {
        if offset > at {
            gaps.push((at, offset - at));
        }
        at = offset + bytes;
    }
    gaps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_what_parts_leave() {
        let part = |offset, bytes| Part {
            way: Way::Host,
            offset,
            bytes,
            chunk_bytes: 1,
            in_turn: false,
        };
        assert_eq!(gaps(&[part(0, 10), part(10, 5)], 20), [(15, 5)]);
        assert_eq!(gaps(&[part(12, 8), part(5, 5)], 20), [(0, 5), (10, 2)]);
        assert_eq!(gaps(&[part(0, 20)], 20), []);
    }
}
