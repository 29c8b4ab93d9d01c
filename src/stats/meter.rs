//! Messages by protocol and size class, with the time that they took, and messages by the rank at their other end.
//!
//! A message is timed from when its receiver has claimed it to when its payload was seen to be there. What is not timed
//! is counted all the same: of messages that the MPI library carries, and of those that were written before they were
//! matched, nobody here knows when they began.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;

use crate::trace::clock::now;

/// Protocols that there may be.
pub const PROTOCOLS: usize = 16;
/// Size classes: 0 bytes, then from each power of two to the next.
pub const CLASSES: usize = 65;
/// Ranks that are counted one by one; the others together.
pub const PEERS_MAX: usize = 4096;
/// Stands for all ranks beyond them.
pub const OTHERS: u32 = u32::MAX - 1;
/// Stands for ranks that only the MPI library knows.
pub const UNKNOWN: u32 = u32::MAX;

/// How a send leaves, as the counters of sends have it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum SentBy {
    /// By RTS.
    Rts,
    /// From host memory by RTS.
    HostRts,
    /// Copied to host memory, then by the MPI library.
    Bcopy,
    /// By the MPI library as it is.
    Native,
}

impl SentBy {
    /// All of them, in order.
    pub const ALL: [SentBy; 4] = [SentBy::Rts, SentBy::HostRts, SentBy::Bcopy, SentBy::Native];

    /// Its name in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            SentBy::Rts => "rts",
            SentBy::HostRts => "host_rts",
            SentBy::Bcopy => "bcopy",
            SentBy::Native => "native",
        }
    }
}

/// Messages of one protocol and size class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate {
    /// How many.
    pub messages: u64,
    /// Their payload.
    pub bytes: u64,
    /// How many of them were timed.
    pub timed: u64,
    /// The payload of these.
    pub timed_bytes: u64,
    /// Their time together, and that of the fastest and the slowest: in the unit of the clock, or ns in
    /// [`Details`](super::Details).
    pub time: u64,
    /// See there.
    pub min: u64,
    /// See there.
    pub max: u64,
}

impl Rate {
    fn add(&mut self, bytes: u64, time: Option<u64>) {
        self.messages += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        let Some(time) = time else { return };
        self.min = if self.timed == 0 {
            time
        } else {
            self.min.min(time)
        };
        self.max = self.max.max(time);
        self.timed += 1;
        self.timed_bytes = self.timed_bytes.saturating_add(bytes);
        self.time = self.time.saturating_add(time);
    }
}

/// Messages and bytes.
pub type Sum = (u64, u64);

/// Messages that were received from a rank, by protocol, and sent to it, by way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pair {
    /// By protocol.
    pub received: [Sum; PROTOCOLS],
    /// By [`SentBy`].
    pub sent: [Sum; SentBy::ALL.len()],
}

fn add(sum: &mut Sum, bytes: u64) {
    *sum = (sum.0 + 1, sum.1.saturating_add(bytes));
}

/// What was counted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// By protocol and size class.
    pub rates: BTreeMap<(u8, u8), Rate>,
    /// By rank, [`OTHERS`] and [`UNKNOWN`] among them.
    pub pairs: BTreeMap<u32, Pair>,
}

impl Counted {
    const fn new() -> Counted {
        Counted {
            rates: BTreeMap::new(),
            pairs: BTreeMap::new(),
        }
    }

    fn pair(&mut self, peer: u32) -> &mut Pair {
        let is_full = self.pairs.len() >= PEERS_MAX && peer != UNKNOWN;
        let key = match is_full && !self.pairs.contains_key(&peer) {
            true => OTHERS,
            false => peer,
        };
        self.pairs.entry(key).or_default()
    }

    fn receive(&mut self, (peer, time): (u32, Option<u64>), protocol: u8, bytes: u64) {
        let rate = self.rates.entry((protocol, class_of(bytes))).or_default();
        rate.add(bytes, time);
        let pair = self.pair(peer);
        if let Some(sum) = pair.received.get_mut(usize::from(protocol)) {
            add(sum, bytes);
        }
    }

    fn send(&mut self, peer: u32, way: SentBy, bytes: u64) {
        add(&mut self.pair(peer).sent[way as usize], bytes);
    }
}

/// The class of a size: 0 of no bytes, else one more than the exponent of the power of two that it begins with.
pub fn class_of(bytes: u64) -> u8 {
    (u64::BITS - bytes.leading_zeros()) as u8
}

/// The smallest size of a class.
pub fn class_from(class: u8) -> u64 {
    match class {
        0 => 0,
        class => 1_u64.checked_shl(u32::from(class) - 1).unwrap_or(0),
    }
}

/// Messages are counted here.
static ON: AtomicBool = AtomicBool::new(false);
static COUNTED: Mutex<Counted> = Mutex::new(Counted::new());

/// From now on messages are counted.
pub fn set_on() {
    ON.store(true, Ordering::Relaxed);
}

#[inline(always)]
fn on() -> bool {
    ON.load(Ordering::Relaxed)
}

/// What was counted so far.
pub fn so_far() -> Counted {
    COUNTED.lock().clone()
}

/// What is known of a message that this rank receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Meter {
    peer: u32,
    /// When it was claimed; 0: it is not timed.
    at: u64,
}

impl Meter {
    /// Nothing is known.
    pub const NONE: Meter = Meter {
        peer: UNKNOWN,
        at: 0,
    };

    /// It was claimed just now, and comes from this rank.
    #[inline(always)]
    pub fn begin(&mut self, peer: u32, is_timed: bool) {
        if on() {
            self.peer = peer;
            self.at = if is_timed { now() } else { 0 };
        }
    }

    /// It comes from this rank, and is not timed.
    #[inline(always)]
    pub fn came_from(&mut self, peer: Option<u32>) {
        if on() {
            *self = Meter {
                peer: peer.unwrap_or(UNKNOWN),
                at: 0,
            };
        }
    }

    /// Its payload is there.
    #[inline(always)]
    pub fn arrived(&self, protocol: u8, bytes: u64) {
        if on() {
            self.count(protocol, bytes);
        }
    }

    #[cold]
    #[inline(never)]
    fn count(&self, protocol: u8, bytes: u64) {
        let time = (self.at != 0).then(|| now().saturating_sub(self.at));
        COUNTED.lock().receive((self.peer, time), protocol, bytes);
    }
}

/// A message is sent to a rank of MPI_COMM_WORLD, if that is known.
#[inline(always)]
pub fn sent(way: SentBy, bytes: u64, peer: impl FnOnce() -> Option<u32>) {
    if on() {
        count_sent(way, bytes, peer().unwrap_or(UNKNOWN));
    }
}

#[cold]
#[inline(never)]
fn count_sent(way: SentBy, bytes: u64, peer: u32) {
    COUNTED.lock().send(peer, way, bytes);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn classes_begin_at_powers_of_two() {
        for (bytes, class) in [
            (0, 0),
            (1, 1),
            (2, 2),
            (3, 2),
            (4, 3),
            (1023, 10),
            (1024, 11),
        ] {
            assert_eq!(class_of(bytes), class, "{bytes}");
        }
        assert_eq!(usize::from(class_of(u64::MAX)), CLASSES - 1);
        for class in 0..CLASSES as u8 {
            assert_eq!(class_of(class_from(class)), class);
        }
    }

    #[test]
    fn what_is_received_and_sent_is_counted_by_class_and_by_rank() {
        let mut counted = Counted::default();
        counted.receive((1, Some(50)), 4, 1000);
        counted.receive((1, Some(20)), 4, 600);
        counted.receive((2, None), 4, 1023);
        counted.receive((1, None), 1, 0);
        counted.send(2, SentBy::Bcopy, 7);
        let rate = counted.rates[&(4, 10)];
        let expected = Rate {
            messages: 3,
            bytes: 2623,
            timed: 2,
            timed_bytes: 1600,
            time: 70,
            min: 20,
            max: 50,
        };
        assert_eq!(rate, expected);
        assert_eq!(counted.rates[&(1, 0)].messages, 1);
        assert_eq!(counted.pairs[&1].received[4], (2, 1600));
        assert_eq!(counted.pairs[&1].received[1], (1, 0));
        assert_eq!(counted.pairs[&2].received[4], (1, 1023));
        assert_eq!(counted.pairs[&2].sent[SentBy::Bcopy as usize], (1, 7));
    }

    #[test]
    fn ranks_beyond_the_bound_are_counted_together() {
        let mut counted = Counted::default();
        let more = 100;
        for peer in 0..PEERS_MAX as u32 + more {
            counted.send(peer, SentBy::Rts, 1);
            counted.send(peer, SentBy::Rts, 1);
        }
        counted.send(UNKNOWN, SentBy::Rts, 1);
        assert_eq!(counted.pairs.len(), PEERS_MAX + 2);
        assert_eq!(counted.pairs[&0].sent[0], (2, 2));
        assert_eq!(counted.pairs[&OTHERS].sent[0].0, u64::from(2 * more));
        assert_eq!(counted.pairs[&UNKNOWN].sent[0].0, 1);
    }
}
