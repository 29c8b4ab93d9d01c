//! Whose long messages are read first, where several ranks send to this one over a switch: see
//! `transfer/fetch/turn.rs`.

use std::collections::VecDeque;

#[cfg(any(test, feature = "golden"))]
use serde::{Deserialize, Serialize};

use super::peers::PeerMix;

/// Single messages of so many bytes are read in turns. Each takes 10 us and more, beside which a launch of
/// its own is little. Four H100s, each to every other, times the speed without the library, read at once and
/// in turns: 3 MiB 1.14 to 1.16 and 1.07 to 1.10, 4 MiB 1.09 to 1.11 and 1.11 to 1.19
/// (`docs/results/h100-x4-many.txt`, 10 and 12).
pub const SINGLE_FROM: u64 = 4 << 20;
/// The same limit for messages of windows: several of one sender are launched together. The same machines,
/// each message launched by itself at once, and in turns (means of three launches): windows of 4 of 1.5 MiB
/// 0.99 and 1.04, of 2 MiB 0.98 and 1.10, of 2.5 MiB 0.99 and 1.12; windows of 8 1.06 and 1.07, 1.07 and
/// 1.18, 1.07 and 1.20 (the same, 12). With slower processors, windows of 4 had 0.97 and 0.98, 0.96 and 1.01,
/// 0.94 and 1.04, but of 1.25 MiB 0.96 and 0.93.
pub const WINDOW_FROM: u64 = 1536 << 10;
/// The same limit for windows deeper than [`FEW`], whose batches are long as it is: windows of 16 of 1.5 MiB
/// 1.14 and 1.01, of 2 MiB 1.09 and 1.21, of 2.5 MiB 1.09 and 1.22.
pub const DEEP_FROM: u64 = 2 << 20;
/// Windows of more messages are deep.
pub const FEW: u32 = 8;
/// So many bytes of one sender are read together. Four H100s, batches of 4, 6, 8 and 10 MiB: windows of 4 of
/// 2 MiB 1.17, 1.06, 1.11 and 1.11, windows of 16 of 4 MiB 0.99, 1.01, 1.18 and 1.11 (the same, 12). With 12
/// MiB, windows of 16 have a twentieth more, and windows of 4 of 5 MiB have 1.17 instead of 1.26.
pub const TOGETHER_BYTES: u64 = 8 << 20;
/// While others wait, a batch is launched behind one that is being read, so that it begins when that ends.
pub const AHEAD: usize = 2;
/// Two batches whose messages have so many bytes are not launched at once: they would be read at the same
/// time, and the cost of a launch is little beside them.
pub const ALONE_FROM: u64 = 48 << 20;
/// Where nothing is read yet, a message may wait for one of another sender for this part of a nanosecond a
/// byte, a fifth of the time that it takes. It waits as long as others read from its own sender, which then
/// has no more to give.
pub const HOLD_SHIFT: u32 = 11;
/// A sender whose messages have been passed over so often is next.
pub const PATIENCE: u32 = 32;

/// From how many bytes on messages of a window so deep are read in turns.
pub fn from(depth: u32) -> u64 {
    match depth {
        0 | 1 => SINGLE_FROM,
        2..=FEW => WINDOW_FROM,
        _ => DEEP_FROM,
    }
}

/// The waiting messages of one sender.
#[derive(Debug)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
struct Sender {
    rank: u32,
    /// Numbers and bytes of the messages, oldest first.
    waiting: VecDeque<(u64, u64)>,
    /// Batches of other senders that were read instead while this one waited.
    passed_over: u32,
}

/// Messages of one sender that are read together.
#[derive(Debug)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
struct Batch {
    number: u64,
    rank: u32,
    /// Bytes of all messages that were ever part of it.
    bytes: u64,
    /// How many messages those are.
    count: u32,
    /// How many of them are not over.
    reading: u32,
}

impl Batch {
    /// Whether the batch takes one more message of a sender.
    fn takes(&self, rank: u32, bytes: u64) -> bool {
        self.rank == rank && self.bytes.saturating_add(bytes) <= TOGETHER_BYTES
    }
}

/// Whose messages are read and whose wait, on one GPU.
#[derive(Debug, Default)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub struct State {
    senders: Vec<Sender>,
    /// What is being read, oldest first.
    batches: VecDeque<Batch>,
    number: u64,
    /// The senders from which this rank has read of late.
    peer_mix: PeerMix,
}

/// How the copy of a message begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub enum Start {
    /// With its batch.
    InBatch,
    /// As the first of a batch, beside what is read before it. The two copies have a lane each, and the
    /// second one starts up meanwhile.
    Beside,
    /// As the first of a batch, behind what is read before it. If each of two lanes had several copies, they
    /// would share the device's engines and end late, together.
    Behind,
}

/// Where a message stands.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub enum Place {
    /// It waits under this number.
    Waiting(u64),
    /// It is read, as part of the batch of this number.
    Reading {
        /// The batch's number.
        batch: u64,
        /// How its copy begins.
        start: Start,
    },
}

/// What a choice asks about the node.
pub trait World {
    /// How many others read from a rank.
    fn readers(&self, rank: u32) -> u32;
    /// The message has not waited long.
    fn may_hold(&self) -> bool;
}

/// For how long a message of so many bytes may wait, ns.
pub fn hold_ns(bytes: u64) -> u64 {
    bytes >> HOLD_SHIFT
}

impl State {
    /// A message is to be read from a sender: at once, if nobody else's is being read or waits, and none of
    /// its own.
    pub fn enter(&mut self, rank: u32, bytes: u64, world: &impl World) -> Place {
        self.peer_mix.note_other(rank);
        let is_chosen = || {
            self.peer_mix.are_several()
                && !self.joins(rank, bytes)
                && (self.is_full(bytes) || world.readers(rank) > 0)
        };
        let must_wait = !self.senders.is_empty()
            || self.batches.iter().any(|batch| batch.rank != rank)
            || is_chosen();
        match must_wait {
            true => Place::Waiting(self.wait(rank, bytes)),
            false => self.begin(rank, bytes),
        }
    }

    /// Where a message that waits under this number is read, if it may be read now.
    pub fn may_start(
        &mut self,
        rank: u32,
        number: u64,
        bytes: u64,
        world: &impl World,
    ) -> Option<Place> {
        let own = self.senders.iter().find(|one| one.rank == rank);
        let first = own.and_then(|own| own.waiting.front());
        let is_first = first.is_some_and(|(first, _)| *first == number);
        let has_room = || self.joins(rank, bytes) || !self.is_full(bytes);
        if !is_first || !has_room() || self.next(world) != Some(rank) {
            return None;
        }
        if self.batches.is_empty() && world.readers(rank) > 0 && world.may_hold() {
            return None;
        }
        self.wait_no_more(rank, number);
        Some(self.begin(rank, bytes))
    }

    /// A message of a batch is over. Returns whether nothing is read any more.
    pub fn is_over(&mut self, batch: u64) -> bool {
        let mut batches = self.batches.iter_mut();
        if let Some(batch) = batches.find(|one| one.number == batch) {
            batch.reading -= 1;
        }
        self.batches.retain(|one| one.reading > 0);
        self.batches.is_empty()
    }

    /// Whether a message that has this place is the first of a batch.
    pub fn begins_batch(place: Place) -> bool {
        matches!(place, Place::Reading { start, .. } if start != Start::InBatch)
    }

    /// Whether messages of a sender wait.
    pub fn is_waiting(&self, rank: u32) -> bool {
        self.senders.iter().any(|sender| sender.rank == rank)
    }

    /// Whether the next message of a sender waits, and is part of the batch that was begun last.
    pub fn is_followed(&self, rank: u32) -> bool {
        let own = self.senders.iter().find(|one| one.rank == rank);
        own.is_some_and(|own| self.goes_on(own))
    }

    /// One more message of a sender waits. Returns its number.
    fn wait(&mut self, rank: u32, bytes: u64) -> u64 {
        self.number += 1;
        let row = (self.number, bytes);
        match self.senders.iter_mut().find(|one| one.rank == rank) {
            Some(sender) => sender.waiting.push_back(row),
            None => self.senders.push(Sender {
                rank,
                waiting: VecDeque::from([row]),
                passed_over: 0,
            }),
        }
        self.number
    }

    /// A message waits no longer. Those behind it still do.
    pub fn wait_no_more(&mut self, rank: u32, number: u64) {
        if let Some(sender) = self.senders.iter_mut().find(|one| one.rank == rank) {
            sender.waiting.retain(|waiting| waiting.0 != number);
        }
        self.senders.retain(|one| !one.waiting.is_empty());
    }

    /// Whether a message is part of the batch that was begun last.
    fn joins(&self, rank: u32, bytes: u64) -> bool {
        let last = self.batches.back();
        last.is_some_and(|last| last.takes(rank, bytes))
    }

    /// Whether the first waiting message of a sender is part of the batch that was begun last.
    fn goes_on(&self, sender: &Sender) -> bool {
        let first = sender.waiting.front();
        first.is_some_and(|(_, bytes)| self.joins(sender.rank, *bytes))
    }

    /// Whether no further batch is launched that begins with a message of so many bytes.
    fn is_full(&self, bytes: u64) -> bool {
        self.batches.len() >= if bytes < ALONE_FROM { AHEAD } else { 1 }
    }

    /// Whose message is next.
    fn next(&self, world: &impl World) -> Option<u32> {
        let longest = self.senders.iter().max_by_key(|one| one.passed_over);
        if let Some(overdue) = longest.filter(|one| one.passed_over >= PATIENCE) {
            return Some(overdue.rank);
        }
        if let Some(same) = self.senders.iter().find(|one| self.goes_on(one)) {
            return Some(same.rank);
        }
        // Of several that are alike, the current sender goes on, and after it the one that has waited
        // longest.
        let current = self.batches.back().map(|last| last.rank);
        let key = |one: &&Sender| {
            let is_another = current != Some(one.rank);
            let since = one.waiting.front().map(|(number, _)| *number);
            (world.readers(one.rank), is_another, since)
        };
        self.senders.iter().min_by_key(key).map(|one| one.rank)
    }

    /// A message of this sender is read from now on.
    fn begin(&mut self, rank: u32, bytes: u64) -> Place {
        let last = self.batches.back_mut();
        if let Some(last) = last.filter(|last| last.takes(rank, bytes)) {
            last.bytes += bytes;
            last.count += 1;
            last.reading += 1;
            return Place::Reading {
                batch: last.number,
                start: Start::InBatch,
            };
        }
        let start = match self.batches.iter().any(|batch| batch.count > 1) {
            true => Start::Behind,
            false => Start::Beside,
        };
        self.number += 1;
        let number = self.number;
        self.batches.push_back(Batch {
            number,
            rank,
            bytes,
            count: 1,
            reading: 1,
        });
        for other in &mut self.senders {
            other.passed_over = match other.rank == rank {
                true => 0,
                false => other.passed_over + 1,
            };
        }
        Place::Reading {
            batch: number,
            start,
        }
    }
}
