//! Sequence numbers of messages that are exactly as long as an RTS.
//!
//! A probe that sees such a message must tell an RTS from a native message of that length without receiving
//! it. So sender and receiver both count all messages of that length per (communicator, source, destination,
//! tag), native ones included. Messages of one such stream do not overtake one another (MPI 4.1 section 3.5),
//! so the numbers agree.

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;

use crate::transfer::stream::Stream;

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
