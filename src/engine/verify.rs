//! `ANABRANCH_VERIFY`: checksums of a message, taken from its buffers by sender and receiver.
//!
//! A message has a checksum (CRC-32) for each of at most [`BLOCKS`] blocks, so that a mismatch has a place.
//! The checksums of a message that goes by RTS are computed before the RTS is sent and lie in the sender's
//! segment. The receiver compares them with what its own buffer holds in the end. A bcopy message is checked
//! on each side separately: at the sender the host copy against the buffer, at the receiver the buffer
//! against what has landed.
//!
//! Device memory is read through the bounce buffers of [`Lift`], by copies that end by themselves, so
//! checking waits for nobody. Host memory is read in steps that are short enough for the engine's lock.

use crate::cuda::Result;
use crate::engine::lift::Lift;
use crate::engine::place::HostRuns;
use crate::node::{Sums, BLOCKS};
use crate::stats::{self, Counter};
use crate::transfer::fault::Of;
use crate::transfer::gpu::Gpu;
use crate::transfer::story::Path;

/// Blocks are whole numbers of pages, so that an offset tells where to look.
const BLOCK_STEP: u64 = 4096;
/// Host memory read in one step, bytes.
const STEP_BYTES: u64 = 4 << 20;

/// Size of the blocks of a message, except the last one.
pub fn block_bytes(length: u64) -> u64 {
    length
        .div_ceil(BLOCKS as u64)
        .next_multiple_of(BLOCK_STEP)
        .max(BLOCK_STEP)
}

/// Offset of the first block in which two messages of this length differ.
pub fn first_difference(one: &Sums, other: &Sums, length: u64) -> Option<u64> {
    let block = one.iter().zip(other).position(|(a, b)| a != b)?;
    Some(block as u64 * block_bytes(length))
}

/// Checksums of a message whose bytes come in order.
pub struct Summing {
    block_bytes: u64,
    at: u64,
    sums: Sums,
    block: crc32fast::Hasher,
}

impl Summing {
    /// For a message of this length.
    pub fn new(length: u64) -> Summing {
        Summing {
            block_bytes: block_bytes(length),
            at: 0,
            sums: [0; BLOCKS],
            block: crc32fast::Hasher::new(),
        }
    }

    /// Takes the next bytes.
    pub fn feed(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let left = self.block_bytes - self.at % self.block_bytes;
            let now = bytes.len().min(usize::try_from(left).unwrap_or(usize::MAX));
            let (first, rest) = bytes.split_at(now);
            self.block.update(first);
            self.at += now as u64;
            bytes = rest;
            if self.at % self.block_bytes == 0 {
                self.end_block(self.at / self.block_bytes - 1);
            }
        }
    }

    fn end_block(&mut self, block: u64) {
        let block = usize::try_from(block).unwrap_or(usize::MAX);
        let sum = std::mem::take(&mut self.block).finalize();
        if let Some(word) = self.sums.get_mut(block) {
            *word = sum;
        }
    }

    /// The checksums of what was taken.
    pub fn sums(mut self) -> Sums {
        if self.at % self.block_bytes != 0 {
            self.end_block(self.at / self.block_bytes);
        }
        self.sums
    }

    /// The checksums of bytes that are all there.
    pub fn of(bytes: &[u8]) -> Sums {
        let mut summing = Summing::new(bytes.len() as u64);
        summing.feed(bytes);
        summing.sums()
    }
}

/// A buffer that is being read for its checksums.
pub enum Reading {
    /// Device memory.
    Device(Lift),
    /// Host memory.
    Host(HostReading),
    /// Finished: the checksums.
    Known(Sums),
}

/// Packed bytes of a message in host memory.
pub struct HostReading {
    runs: HostRuns,
    length: u64,
    summing: Summing,
}

impl HostReading {
    /// Of the first bytes of a message that stays as it is until the reading is over or dropped.
    pub fn new(runs: HostRuns, length: u64) -> HostReading {
        HostReading {
            runs,
            length,
            summing: Summing::new(length),
        }
    }

    /// One step; true once everything is read.
    fn step(&mut self) -> bool {
        let from = self.summing.at;
        let to = (from + STEP_BYTES).min(self.length);
        for (_, run) in self.runs.pieces(from, to) {
            // SAFETY: the message has arrived, and the program does not have it yet.
            self.summing.feed(unsafe { run.as_slice() });
        }
        to == self.length
    }
}

impl Reading {
    /// Reads on without waiting. Returns the checksums once they are known.
    pub fn poll(&mut self, gpu: &mut Gpu) -> Result<Option<Sums>> {
        let over = match self {
            Reading::Known(sums) => return Ok(Some(*sums)),
            Reading::Device(lift) => lift.poll(gpu)?,
            Reading::Host(reading) => reading.step(),
        };
        if !over {
            return Ok(None);
        }
        let sums = match self {
            Reading::Known(sums) => *sums,
            Reading::Device(lift) => lift.take_sums(),
            Reading::Host(reading) => {
                std::mem::replace(&mut reading.summing, Summing::new(0)).sums()
            }
        };
        *self = Reading::Known(sums);
        Ok(Some(sums))
    }
}

/// What is known of a message that is checked.
#[derive(Clone, Copy, Debug)]
pub struct About {
    /// Its other end.
    pub of: Of,
    /// World rank of this end.
    pub own: u32,
    /// Tag.
    pub tag: i32,
    /// Bytes.
    pub length: u64,
    /// The path that it took.
    pub path: Path,
}

impl About {
    /// Counts a checked message, and reports it if it is not as it was sent. Returns what its error handler
    /// is told then.
    pub fn judge(&self, expected: &Sums, found: &Sums) -> Option<Box<str>> {
        stats::add(Counter::Verified, 1);
        let offset = first_difference(expected, found, self.length)?;
        stats::add(Counter::VerifyMismatches, 1);
        stats::add(Counter::Errors, 1);
        let report = self.report(offset);
        log::error!("{report}");
        Some(report.into())
    }

    fn report(&self, offset: u64) -> String {
        let ends = match self.of {
            Of::To(_) | Of::ToLocal(_) => format!("from rank {} {}", self.own, self.of),
            _ => format!("{} to rank {}", self.of, self.own),
        };
        let block = block_bytes(self.length).min(self.length - offset);
        format!(
            "verify: a message of {} bytes {ends} with tag {}, path {}, is not what was sent: \
             the first difference lies in the {block} bytes from offset {offset} on",
            self.length,
            self.tag,
            self.path.name(),
        )
    }
}

/// A message that has arrived and is being checked.
pub struct Checking {
    /// What it should be.
    pub expected: Reading,
    /// What it is.
    pub found: Reading,
    /// What to call it.
    pub about: About,
}

impl Checking {
    /// Moves on without waiting. Returns the verdict once there is one: what is wrong, if anything.
    pub fn poll(&mut self, gpu: &mut Gpu) -> Result<Option<Option<Box<str>>>> {
        // Both are polled, so that a step of one does not wait for the other.
        let expected = self.expected.poll(gpu)?;
        let found = self.found.poll(gpu)?;
        Ok(match (expected, found) {
            (Some(expected), Some(found)) => Some(self.about.judge(&expected, &found)),
            _ => None,
        })
    }
}

#[cfg(test)]
#[path = "verify_tests.rs"]
mod tests;
