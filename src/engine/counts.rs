//! Sequence numbers of messages that are exactly as long as an RTS.
//!
//! A probe that sees such a message must tell an RTS from a native message of that length without receiving
//! it. So sender and receiver both count all messages of that length per (communicator, source, destination,
//! tag), native ones included. Messages of one such stream do not overtake one another (MPI 4.1 section 3.5),
//! so the numbers agree.

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;

/// A stream of messages between two ranks, as one of them sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Stream {
    /// Identity of the communicator.
    pub comm: u64,
    /// World rank of the other side.
    pub peer: u32,
    /// Tag.
    pub tag: i32,
}

/// How a receiver would prefer to get the next message of a stream. Nothing is known of a message that is not
/// matched, so what happened to the one before is taken as a sign.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// By RTS, although it is in its sender's host memory, because it will be brought to a device.
    Rts,
    /// In a cell, without waiting to see whether the receiver reads the device memory, because it will be
    /// brought to host memory.
    Cell,
}

impl Wish {
    /// A number that both sender and receiver of a message can compute, for
    /// [`View::wishes`](crate::node::View::wishes).
    pub fn key(self, comm: u64, source: u32, tag: i32) -> u64 {
        let words = (u64::from(source) << 32) | u64::from(tag as u32);
        let mixed = (comm ^ words.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ self as u64)
            .wrapping_mul(0xd6e8_feb8_6659_fd93);
        mixed >> 32
    }
}

/// Streams whose numbers are kept. Beyond that the counts are no longer trusted and RTSs are no longer used.
const STREAMS_MAX: usize = 1 << 20;

/// The counts of one direction.
#[derive(Debug, Default)]
pub struct Counts {
    next: HashMap<Stream, u64, FxBuildHasher>,
    overflowed: bool,
}

impl Counts {
    /// The number of the next message of the stream, which this call counts.
    pub fn take(&mut self, stream: Stream) -> u64 {
        if self.next.len() >= STREAMS_MAX && !self.next.contains_key(&stream) {
            self.overflowed = true;
            return u64::MAX;
        }
        let next = self.next.entry(stream).or_insert(0);
        *next += 1;
        *next - 1
    }

    /// Number of the next message of the stream.
    pub fn peek(&self, stream: Stream) -> u64 {
        self.next.get(&stream).copied().unwrap_or(0)
    }

    /// Whether a stream could not be counted.
    pub fn overflowed(&self) -> bool {
        self.overflowed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn streams_are_counted_apart() {
        let mut counts = Counts::default();
        let a = Stream {
            comm: 1,
            peer: 2,
            tag: 3,
        };
        let b = Stream { tag: 4, ..a };
        assert_eq!((counts.take(a), counts.take(a), counts.take(b)), (0, 1, 0));
        assert_eq!(
            (
                counts.peek(a),
                counts.peek(b),
                counts.peek(Stream { peer: 9, ..a })
            ),
            (2, 1, 0)
        );
    }
}
