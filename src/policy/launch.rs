//! When copies are launched, and together with which.

#[cfg(any(test, feature = "golden"))]
use serde::{Deserialize, Serialize};

/// Launches in flight beyond which copies are collected for a batch.
pub const LAUNCHES_MAX: usize = 2;
/// Copies in a batch. The first of them waits until the driver has taken the last, half a microsecond for
/// each.
pub const BATCH_COUNT_MAX: usize = 32;
/// A batch that holds so many bytes takes no more. It is marked as done as a whole, and the gap to the next
/// batch, 3 us, is nothing beside the 170 us that these bytes take at 400 GB/s.
pub const BATCH_BYTES_MAX: u64 = 64 << 20;
/// Copies of so many bytes are launched without those that are still to be queued, so that the device can
/// begin. To claim a message takes a processor 1.3 us, and the MPI library may first have to bring the next
/// one. Two H100s, windows of 16, GB/s, all but the first two in one batch, and launched as soon as 4 MiB
/// wait: 1 MiB 144 and 187, both ways 249 and 303; 4 MiB 297 and 309. (With 2 MiB: 186, 268, 316. With 1 MiB,
/// more launches: 152, 261, 297.)
pub const AHEAD_BYTES: u64 = 4 << 20;

/// How long short gets are held while messages of other senders are on their way that may join them. In one
/// batch the device brings three in 12 us; by three launches it takes 14 to 15, and each launch takes the
/// processor 1.5 us. Four H200s, each receives from the other three, single messages, times the speed without
/// the library: 1 KiB 0.86 without holding, 0.93 with 1 us, 1.05 with 2; 512 KiB 0.90, 0.95, 0.97, and less
/// with 3. Windows of 4 on four H100s, with 1.5 and 3 us: 16 KiB 1.05 and 1.12, 1.25 MiB 1.00 and 0.98. See
/// `docs/decisions/hold-short-launches.md`.
const HOLD_NS: u64 = 2000;
/// A copy of more bytes is not held for those of other senders: the link could use the time. Windows of 4 of
/// 1.25 MiB from each of three had 0.96 when not held and 1.00 when held
/// (`docs/decisions/hold-short-launches.md`).
const HOLD_LONGEST: u64 = 1536 << 10;
/// How long messages of one sender are held. The MPI library brings one of them at a time. They are held if
/// all of them, those in flight included, are not more than makes a batch by itself ([`AHEAD_BYTES`]);
/// windows of 16 of 1 MiB, of which two were held, had 1.32 instead of 1.40. They are held behind a launch in
/// flight, too; otherwise the second message would go alone.
///
/// Messages of several senders are held as long while others are on their way: the links are busy, and each
/// launch takes a processor 2 to 4 us.
///
/// Two H100s, windows of 8 of 64 KiB both ways, times the speed without the library: 1.07 launched as they
/// came, 1.23 held, 1.18 held for 3 us only. All figures are in `docs/decisions/hold-short-launches.md`.
const HOLD_MORE_NS: u64 = 4500;

/// Short gets that wait to be launched, and what else is under way.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub struct Short {
    /// Messages that were announced and have not arrived.
    pub announced: u64,
    /// Receives whose payload is on its way, those that wait included.
    pub moving: usize,
    /// This rank deals with several others.
    pub are_several: bool,
    /// How many gets wait.
    pub count: usize,
    /// Bytes of the longest.
    pub longest: u64,
}

/// Whether short gets wait for announced messages, and for how long at most, ns.
pub fn hold(short: &Short) -> Option<u64> {
    let under_way = short.announced.saturating_add(short.moving as u64);
    let may_wait = match short.are_several {
        true => short.longest <= HOLD_LONGEST,
        // The messages of a window are alike.
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

/// Whether a copy joins a batch of so many copies and bytes. `is_apart`: the batch would mix up its order.
pub fn joins(count: usize, bytes: u64, is_apart: bool) -> bool {
    count < BATCH_COUNT_MAX && bytes < BATCH_BYTES_MAX && !is_apart
}

/// Whether a get of so many bytes waits for `count` others that are gathered, `gathered` bytes in all.
pub fn waits_for(count: usize, gathered: u64, bytes: u64) -> bool {
    count < BATCH_COUNT_MAX && gathered.saturating_add(bytes) <= AHEAD_BYTES
}
