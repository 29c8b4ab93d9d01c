//! When copies are launched, and together with which.

#[cfg(any(test, feature = "golden"))]
use serde::{Deserialize, Serialize};

/// Launches in flight beyond which copies are collected for a batch.
pub const LAUNCHES_MAX: usize = 2;
/// Copies in a batch: the first of them waits until the driver has taken the last, half a microsecond each.
pub const BATCH_COUNT_MAX: usize = 32;
/// A batch that holds so many bytes takes no more: it is marked as done as a whole, and the gap to the next one, 3 us, is
/// nothing beside the 170 us that these take at 400 GB/s.
pub const BATCH_BYTES_MAX: u64 = 64 << 20;
/// Copies of so many bytes are launched without those that are still to be queued, so that the device begins with them: to claim a
/// message takes a processor 1.3 us, and the next one may have to be brought by the MPI library first. Windows of 16 on two H100s, GB/s,
/// all in one batch but the first two and as soon as 4 MiB wait: 1 MiB 144 and 187, both ways 249 and 303; 4 MiB 297 and 309. (2 MiB:
/// 186, 268, 316; 1 MiB, more launches: 152, 261, 297.)
pub const AHEAD_BYTES: u64 = 4 << 20;

/// For how long short pulls are not launched while messages of others are on their way that may go with them: in one batch the
/// device brings three in 12 us that take it 14 to 15 by three launches, each of which takes the processor 1.5, too. Four H200s each of
/// which receives from the other three, single messages of 1 KiB, times the speed without the library: 0.86 without, 0.93 with 1 us,
/// 1.05 with 2; of 512 KiB 0.90, 0.95, 0.97, and less with 3. Windows of 4 on four H100s, with 1.5 and 3 us: of 16 KiB 1.05 and 1.12, of
/// 1.25 MiB 1.00 and 0.98.
const HOLD_NS: u64 = 2000;
/// A copy of more bytes is not held back for those of other senders: the link has the time that it would wait. Windows of 4 of 1.25 MiB
/// from each of three, not held and held: 0.96 and 1.00 (`docs/results/h100-x4-many.txt`, 13).
const HOLD_LONGEST: u64 = 1536 << 10;
/// For how long messages of one sender are held, of which the MPI library brings one at a time, if all of them, those in flight among
/// them, are not more than makes a batch by itself ([`AHEAD_BYTES`]; windows of 16 of 1 MiB, of which two were held, had 1.32 where they
/// have 1.40). Two H100s, times the speed without the library, launched as they came and so: windows of 3 of 64 KiB 1.15 and 1.36, both
/// ways 0.77 and 0.97; of 4 1.16 and 1.36, 0.86 and 1.06; of 8 1.43 and 1.58, 1.07 and 1.23. Held for 3 us those of 8 have 1.52 and 1.18
/// (`docs/results/h100-x2-short-windows.txt`). Also behind a launch in flight, or the second message would go alone: windows of 4 of
/// 1 MiB both ways 0.948 and 0.997, of 16 of 256 KiB 1.41 and 1.58, both ways 1.14 and 1.24 (the same, 4).
///
/// Those of several senders, too, while others are on their way: the links are busy, and each launch takes a processor 2 to 4 us. Four
/// H100s, each from three: windows of 4 of 512 KiB 1.03 and 1.10, of 1 MiB 0.98 and 1.00, of 16 of 512 KiB 1.09 and 1.16
/// (`docs/results/h100-x4-many.txt`, 13).
const HOLD_MORE_NS: u64 = 4500;

/// Short pulls that wait to be launched, and what else there is.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub struct Short {
    /// Messages that have been announced and have not come.
    pub announced: u64,
    /// Receives whose payload is on its way, these among them.
    pub moving: usize,
    /// This rank deals with several others.
    pub are_several: bool,
    /// How many pulls wait.
    pub count: usize,
    /// Bytes of the longest.
    pub longest: u64,
}

/// Whether short pulls wait for those that are announced, and for how long at most, ns.
pub fn hold(short: &Short) -> Option<u64> {
    let under_way = short.announced.saturating_add(short.moving as u64);
    let may_wait = match short.are_several {
        true => short.longest <= HOLD_LONGEST,
        // Those of a window are alike.
        false => under_way.saturating_mul(short.longest) <= AHEAD_BYTES,
    };
    // Nothing else is under way: the links are idle meanwhile.
    let is_first = short.moving <= short.count;
    may_wait.then_some(match short.are_several && is_first {
        true => HOLD_NS,
        false => HOLD_MORE_NS,
    })
}

/// Whether a stream with so many launches in flight takes one more.
pub fn has_room(flying: usize) -> bool {
    flying < LAUNCHES_MAX
}

/// Whether copies of so many bytes are launched while more are being queued.
pub fn goes_ahead(bytes: u64) -> bool {
    bytes >= AHEAD_BYTES
}

/// Whether a copy joins a batch of so many copies and bytes. It `is_apart` where a batch would mix up its order.
pub fn joins(count: usize, bytes: u64, is_apart: bool) -> bool {
    count < BATCH_COUNT_MAX && bytes < BATCH_BYTES_MAX && !is_apart
}

/// Whether a pull of so many bytes waits for others that are gathered, so many of so many bytes.
pub fn waits_for(count: usize, gathered: u64, bytes: u64) -> bool {
    count < BATCH_COUNT_MAX && gathered.saturating_add(bytes) <= AHEAD_BYTES
}
