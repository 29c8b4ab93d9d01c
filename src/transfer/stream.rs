//! Streams of messages, and how a receiver would prefer to get them.

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
