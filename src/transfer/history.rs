//! What this rank has learnt of its peers at run time, and of the streams of messages between them.
//!
//! Two more records are elsewhere, because they are read by others than the holder of the core's lock: what a
//! receiver would prefer is in its segment, where its senders read it (`Wish`), and what the engine does not
//! see is counted by any thread ([`Seen`]).

use std::time::{Duration, Instant};

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;

use crate::cuda::Uuid;
use crate::node::rtr::Rtr;
use crate::node::{Message, Rts, Waiting};
use crate::policy::history::Depths;
use crate::policy::peers::{Exchanges, PeerMix};
use crate::policy::rtr::Streak;
use crate::policy::stepped;
use crate::transfer::fetch::flag;
use crate::transfer::stream::Stream;

/// See the module.
#[derive(Default)]
pub struct PeerHistory {
    /// Which ranks this rank deals with.
    pub mix: PeerMix,
    /// Which ranks it has recently sent long messages to.
    pub exchanges: Exchanges,
    /// How deep the windows of its peers are, and how plans for their messages turned out.
    pub windows: Depths,
    /// The last message of each stream that this rank sends.
    pub sent: Sent,
    /// The last message of each stream that it receives, and how its receives have fared.
    pub received: Received,
}

/// What this rank knows of all that it sends and receives.
#[derive(Clone, Copy, Debug)]
pub struct Seen {
    /// It knows of each message, and in which order they were sent and received.
    pub is_all: bool,
    /// How many messages have gone otherwise.
    pub others: u64,
}

/// How many streams are remembered.
const STREAMS_MAX: usize = 1 << 12;
/// How long a sender waits for an RTR: two ranks that send to each other, at once or in turns, reach this
/// point within a microsecond of each other.
const PATIENCE: Duration = Duration::from_nanos(1500);

/// A sender that has waited in vain so often in succession waits no more until it finds an RTR.
const WAITS: u32 = 4;

/// Forgets all streams if there is no room for one more.
fn make_room<T>(known: &mut HashMap<Stream, T, FxBuildHasher>, stream: Stream) {
    if known.len() >= STREAMS_MAX && !known.contains_key(&stream) {
        known.clear();
    }
}

/// For the sender: the last message of each stream.
#[derive(Debug, Default)]
pub struct Sent(HashMap<Stream, LastSent, FxBuildHasher>);

/// The last message of a stream.
#[derive(Clone, Copy, Debug, Default)]
pub struct LastSent {
    /// Its nonce.
    pub nonce: u64,
    /// Its slot.
    pub slot: u32,
    /// How often the sender has waited for an RTR in vain since it last found one.
    pub waited: u32,
    /// How many messages had gone by the MPI library before it.
    unseen: u64,
}

impl Sent {
    /// A message has been sent by RTS.
    pub fn note(&mut self, seen: Seen, stream: Stream, nonce: u64, slot: u32) {
        if !seen.is_all {
            return;
        }
        make_room(&mut self.0, stream);
        let last = self.0.entry(stream).or_default();
        (last.nonce, last.slot, last.unseen) = (nonce, slot, seen.others);
    }

    /// The last message of a stream, if that is known.
    pub fn last(&mut self, seen: Seen, stream: Stream) -> Option<&mut LastSent> {
        let last = self.0.get_mut(&stream)?;
        (last.unseen == seen.others).then_some(last)
    }
}

impl LastSent {
    /// Looks for the RTR that the next message will find. Waits a moment if the receiver may be about to send
    /// it.
    pub fn find(&mut self, rtr: &Rtr, expected: &Waiting) -> Option<(u64, Waiting)> {
        let mut found = rtr.find(expected);
        if found.is_none() {
            if !rtr.is_promised() {
                self.waited = 0;
                return None;
            }
            if self.waited >= WAITS {
                return None;
            }
            let began = Instant::now();
            while found.is_none() && began.elapsed() < PATIENCE {
                std::hint::spin_loop();
                found = rtr.find(expected);
            }
        }
        self.waited = match found {
            Some(_) => 0,
            None => self.waited + 1,
        };
        found
    }
}

/// For the receiver: the last message of a stream.
#[derive(Clone, Copy, Debug)]
pub struct Last {
    /// Its nonce.
    pub nonce: u64,
    /// Its number in the stream.
    pub sequence: u64,
    /// Its slot.
    pub slot: u32,
    /// The GPU that it came from.
    pub device: Uuid,
    /// How its receives have fared.
    streak: Streak,
}

/// For the receiver: what is known of each stream.
#[derive(Debug, Default)]
pub struct Received(HashMap<Stream, Last, FxBuildHasher>);

impl Received {
    /// A message has come by RTS. `was_told`: an RTR was sent for its receive. `sends_to`: this rank sends to
    /// its sender. Returns whether an RTR will be sent for the next receive, if that one is alone.
    pub fn note(
        &mut self,
        seen: Seen,
        message: &Message,
        rts: &Rts,
        was_told: bool,
        sends_to: bool,
    ) -> bool {
        if !seen.is_all || message.flags & flag::HOST != 0 {
            return false;
        }
        let stream = Stream {
            comm: message.communicator,
            peer: message.source,
            tag: message.tag,
        };
        make_room(&mut self.0, stream);
        let last = self.0.entry(stream).or_insert(Last {
            nonce: 0,
            sequence: 0,
            slot: 0,
            device: message.device,
            streak: Streak::default(),
        });
        last.nonce = rts.nonce;
        (last.sequence, last.slot) = (rts.sequence, rts.slot);
        last.device = message.device;
        let is_written = message.flags & flag::PUT_EARLY != 0;
        let streak = &mut last.streak;
        stepped!(
            "rtr.came",
            streak,
            (was_told, is_written, sends_to),
            streak.came(was_told, is_written, sends_to)
        )
    }

    /// A receive is about to be posted, alone in its stream or beside others. If it is alone, as those before
    /// it were: returns the message before its own, and whether an RTR is to be sent.
    pub fn posting(&mut self, stream: Stream, is_alone: bool) -> Option<(Last, bool)> {
        let last = self.0.get_mut(&stream)?;
        let streak = &mut last.streak;
        let is_due = stepped!("rtr.posting", streak, is_alone, streak.posting(is_alone))?;
        Some((*last, is_due))
    }
}
