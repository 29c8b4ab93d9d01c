//! RTR: a receiver tells the sender of a receive before the message is sent. The sender then writes to that
//! buffer at once, instead of waiting until its message is matched and its receiver has begun to read it.
//!
//! MPI decides which message a receive gets, and its rules let both sides know it (MPI 4.1 section 3.5:
//! messages of one stream do not overtake one another, and a message goes to the first receive posted that it
//! matches). A receive that names its source and its tag takes the message behind the last one of that stream
//! that was received, if no other receive that might take it is pending. The receiver tells the sender which
//! message was the last one. The sender knows what it has sent since: if it has sent anything, it does not
//! take the RTR. A message that the MPI library sends alone, to any rank, counts as something (`Unseen`).
//!
//! If several threads call MPI at once, nobody can know the order, and no RTR is sent: with
//! MPI_THREAD_MULTIPLE, from the moment on at which a second thread has called MPI. That thread waits for the
//! core first ([`guard::before_another_calls`]). Under the core's lock a receive is posted and its RTR sent,
//! and a message is begun and its RTS sent: whatever the first thread does of this is done, or not begun,
//! when the second goes on.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;

use crate::cuda::Uuid;
use crate::engine::counts::Stream;
use crate::engine::fetch::flag;
use crate::engine::Env;
use crate::mpi::guard;
use crate::node::rtr::Rtr;
use crate::node::{Message, Rts, Waiting};
use crate::policy::rtr::Streak;
use crate::policy::stepped;

/// How many streams are remembered.
const STREAMS_MAX: usize = 1 << 12;
/// From so many bytes on, a GPU had better not write to a peer's memory and read it at once, in either order:
/// for a process that has it mapped, one is made after the other (two H200s, 16 MiB each way: 99 us, and 55
/// if both write; `docs/decisions/no-read-beside-write.md`).
pub const ONE_WAY_FROM: u64 = 256 << 10;
/// How long a sender waits for an RTR: two ranks that send to each other, at once or in turns, reach this
/// point within a microsecond of each other.
const PATIENCE: Duration = Duration::from_nanos(1500);

/// A sender that has waited in vain so often in succession waits no more until it finds an RTR.
const WAITS: u32 = 4;
/// What the program sends and receives without the engine seeing it.
#[derive(Debug, Default)]
pub struct Unseen {
    sends: AtomicU64,
    receives: AtomicBool,
}

impl Unseen {
    /// A message is about to go by the MPI library.
    #[inline]
    pub fn note_send(&self) {
        // One thread at a time: from the second one on, no RTR is sent.
        let sends = self.sends.load(Ordering::Relaxed);
        self.sends.store(sends.wrapping_add(1), Ordering::Relaxed);
    }

    /// The MPI library alone posts a receive that may match anything.
    #[cold]
    pub fn note_receive(&self) {
        self.receives.store(true, Ordering::Relaxed);
    }

    fn sends(&self) -> u64 {
        self.sends.load(Ordering::Relaxed)
    }
}

impl Env {
    /// Whether this rank sends RTRs, and takes those of others. Whoever acts on the answer must ask under the
    /// core's lock.
    pub(super) fn may_send_rtr(&self) -> bool {
        let config = &self.config;
        config.rtr && config.put > 0 && self.paths().direct && self.sees_all()
    }

    /// Whether this rank knows of all that it sends and receives, in the right order.
    pub(super) fn sees_all(&self) -> bool {
        let is_seen = !self.unseen.receives.load(Ordering::Relaxed) && !guard::has_passed_on();
        is_seen && !(self.multiple && guard::has_several_callers())
    }
}

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
    pub fn note(&mut self, env: &Env, stream: Stream, nonce: u64, slot: u32) {
        if !env.sees_all() {
            return;
        }
        make_room(&mut self.0, stream);
        let last = self.0.entry(stream).or_default();
        (last.nonce, last.slot, last.unseen) = (nonce, slot, env.unseen.sends());
    }

    /// The last message of a stream, if that is known.
    pub fn last(&mut self, env: &Env, stream: Stream) -> Option<&mut LastSent> {
        let last = self.0.get_mut(&stream)?;
        (last.unseen == env.unseen.sends()).then_some(last)
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
        env: &Env,
        message: &Message,
        rts: &Rts,
        was_told: bool,
        sends_to: bool,
    ) -> bool {
        if !env.sees_all() || message.flags & flag::HOST != 0 {
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
