//! The pieces in which a message goes through its sender's staging.

#[cfg(any(test, feature = "golden"))]
use serde::{Deserialize, Serialize};

use crate::node::UNIT_BYTES;

/// Pieces of a message that is longer than one piece: few enough to cost little each, and so many that one
/// side works while the other does.
const PIECES: u64 = 4;
/// Least length of a piece, bytes. On H200 the copy of one piece to a device takes 12 us and filling it 27;
/// windows of messages of 512 KiB to the host lost a quarter with pieces of 64 KiB.
const PIECE_BYTES_MIN: u64 = 256 << 10;

/// Length of every piece but the last of a message of `total` bytes, in staging with so much room.
pub fn piece_bytes(room: u64, total: u64) -> u64 {
    let even = total.div_ceil(PIECES).next_multiple_of(PIECE_BYTES_MIN);
    room.min(even)
}

/// How messages go through memory of their sender's GPU.
#[derive(Debug)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub struct OnGpu {
    /// From so many bytes on; shorter ones go through host memory.
    pub bytes_min: u64,
    /// The first piece is this part of a message, within bounds, because it is copied before anything crosses
    /// a link. Each piece after it is as long as all before it, up to a bound, because each costs a launch on
    /// both sides.
    first_part: u64,
    first_bytes: std::ops::RangeInclusive<u64>,
    piece_bytes_max: u64,
}

impl OnGpu {
    /// For two ranks on different GPUs.
    const APART: OnGpu = OnGpu {
        bytes_min: 64 << 10,
        first_part: 8,
        first_bytes: 1 << 20..=4 << 20,
        piece_bytes_max: 16 << 20,
    };
    /// Where both ranks use one GPU, the copies of each wait for the other's process: some 80 us each on an
    /// H200, whatever their size. Windows of 4, GB/s in pieces of 4 to 16 MiB and through host memory: 4 MiB
    /// 14 and 30, 16 MiB 50 and 37, 256 MiB 151 and 41; both ways 27 and 40, 87 and 41, 243 and 41
    /// (`docs/results/h200-frameworks-memory.txt`, 4).
    const SHARED: OnGpu = OnGpu {
        bytes_min: 16 << 20,
        first_part: 4,
        first_bytes: 4 << 20..=16 << 20,
        piece_bytes_max: 16 << 20,
    };

    /// Between ranks that do or do not share a GPU.
    pub fn between(is_shared: bool) -> &'static OnGpu {
        if is_shared {
            &OnGpu::SHARED
        } else {
            &OnGpu::APART
        }
    }

    /// Length of the piece after the first `issued` of `total` bytes.
    pub fn piece_bytes(&self, total: u64, issued: u64) -> u64 {
        let first = (total / self.first_part).next_multiple_of(UNIT_BYTES);
        let first = first.clamp(*self.first_bytes.start(), *self.first_bytes.end());
        let next = issued.clamp(first, self.piece_bytes_max);
        let left = total - issued;
        // Leaves no short piece behind it.
        if left < next + next / 2 {
            left
        } else {
            next
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_on_a_gpu_are_the_whole_message_and_no_longer_than_allowed() {
        for on_gpu in [OnGpu::between(false), OnGpu::between(true)] {
            for total in (0..400).map(|step| on_gpu.bytes_min + step * 777_777) {
                let (mut issued, mut pieces) = (0, 0);
                while issued < total {
                    let bytes = on_gpu.piece_bytes(total, issued);
                    assert!(bytes > 0 && bytes < on_gpu.piece_bytes_max * 3 / 2);
                    (issued, pieces) = (issued + bytes, pieces + 1);
                }
                assert!(issued == total && pieces < 30, "{total}: {pieces} pieces");
            }
        }
    }
}
