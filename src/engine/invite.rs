//! Receives of which their sender is told before it sends, so that it writes to their buffer at once instead of waiting until
//! its message is matched and its receiver has begun to read it.
//!
//! Whose message it will be is MPI's to say, and follows from its rules (MPI 4.1 section 3.5: messages of one stream do not
//! overtake one another, and a message goes to the first receive posted that it matches). A receive that names its source and
//! its tag takes the message behind the last one of that stream that was received, if no other receive that might is pending.
//! The receiver tells the sender which that last one was. The sender knows what it has sent since: nothing, or it does not
//! take the receive. What it sends by the MPI library alone, to whomever, counts as something (`Unseen`). Where several threads
//! call MPI at once nobody could know, and no receive is told of: with MPI_THREAD_MULTIPLE, from the moment on that a second thread
//! has called MPI. It waits for the core first ([`guard::before_another_calls`]), under whose lock a receive is told of and posted,
//! and a message begun and its descriptor sent: what the first thread does so is done, or not begun, when the second goes on.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;

use crate::cuda::Uuid;
use crate::engine::counts::Stream;
use crate::engine::fetch::flag;
use crate::engine::Env;
use crate::mpi::guard;
use crate::node::invite::Invitation;
use crate::node::{Descriptor, Message, Waiting};
use crate::policy::rtr::Streak;
use crate::policy::stepped;

/// Streams that are remembered.
const STREAMS_MAX: usize = 1 << 12;
/// From so many bytes on a GPU had better not write to a peer's memory and read it at once, in either order: by a process that
/// has it mapped both are made one after the other (two H200s, 16 MiB each way: 99 us, by two that write 55; 4 MiB 34 and 22).
pub const ONE_WAY_FROM: u64 = 256 << 10;
/// How long a sender waits for a receive of which it is to be told: two ranks that send to each other, at once or in turns, come
/// to it within a microsecond.
const PATIENCE: Duration = Duration::from_nanos(1500);

/// Senders that have waited in vain so often, one time after the other, wait no more until they find a receive.
const WAITS: u32 = 4;
/// What the program sends and receives and the engine does not see.
#[derive(Debug, Default)]
pub struct Unseen {
    sends: AtomicU64,
    receives: AtomicBool,
}

impl Unseen {
    /// A message is about to go by the MPI library.
    #[inline]
    pub fn note_send(&self) {
        // One thread at a time: from the second one on no receive is told of.
        let sends = self.sends.load(Ordering::Relaxed);
        self.sends.store(sends.wrapping_add(1), Ordering::Relaxed);
    }

    /// A receive that may match anything is posted by the MPI library alone.
    #[cold]
    pub fn note_receive(&self) {
        self.receives.store(true, Ordering::Relaxed);
    }

    fn sends(&self) -> u64 {
        self.sends.load(Ordering::Relaxed)
    }
}

impl Env {
    /// Whether this rank tells of receives, and takes those of others. To be asked under the core's lock by who acts on it.
    pub(super) fn may_invite(&self) -> bool {
        let config = &self.config;
        config.invite && config.push > 0 && self.paths().direct && self.sees_all()
    }

    /// Whether this rank knows of all that it sends and receives, in their order.
    pub(super) fn sees_all(&self) -> bool {
        let is_seen = !self.unseen.receives.load(Ordering::Relaxed) && !guard::has_passed_on();
        is_seen && !(self.multiple && guard::has_several_callers())
    }
}

/// Forgets all streams where there is no room for one more.
fn make_room<T>(known: &mut HashMap<Stream, T, FxBuildHasher>, stream: Stream) {
    if known.len() >= STREAMS_MAX && !known.contains_key(&stream) {
        known.clear();
    }
}

/// As sender: the last message of each stream.
#[derive(Debug, Default)]
pub struct Sent(HashMap<Stream, LastSent, FxBuildHasher>);

/// The last message of a stream.
#[derive(Clone, Copy, Debug, Default)]
pub struct LastSent {
    /// Its nonce.
    pub nonce: u64,
    /// Its slot.
    pub slot: u32,
    /// Waits for a receive that were in vain since one was not.
    pub waited: u32,
    /// Messages that had gone by the MPI library before it.
    unseen: u64,
}

impl Sent {
    /// A message has been sent by descriptor.
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
    /// Looks for the receive that the next message will find, for a moment where its sender may be about to be told of it.
    pub fn find(&mut self, invitation: &Invitation, expected: &Waiting) -> Option<(u64, Waiting)> {
        let mut found = invitation.find(expected);
        if found.is_none() {
            if !invitation.is_promised() {
                self.waited = 0;
                return None;
            }
            if self.waited >= WAITS {
                return None;
            }
            let began = Instant::now();
            while found.is_none() && began.elapsed() < PATIENCE {
                std::hint::spin_loop();
                found = invitation.find(expected);
            }
        }
        self.waited = match found {
            Some(_) => 0,
            None => self.waited + 1,
        };
        found
    }
}

/// As receiver: the last message of a stream.
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

/// As receiver: what is known of each stream.
#[derive(Debug, Default)]
pub struct Received(HashMap<Stream, Last, FxBuildHasher>);

impl Received {
    /// A message has come by descriptor, in a receive that was told of or not, while this rank sends to its sender or does not.
    /// Returns whether the next receive will be told of, if that is alone.
    pub fn note(
        &mut self,
        env: &Env,
        message: &Message,
        descriptor: &Descriptor,
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
        last.nonce = descriptor.nonce;
        (last.sequence, last.slot) = (descriptor.sequence, descriptor.slot);
        last.device = message.device;
        let is_written = message.flags & flag::INVITED != 0;
        let streak = &mut last.streak;
        stepped!(
            "rtr.came",
            streak,
            (was_told, is_written, sends_to),
            streak.came(was_told, is_written, sends_to)
        )
    }

    /// A receive is about to be posted, beside others of its stream or alone: the message behind which its own comes, where it is
    /// alone as those before it were, and whether its sender is to be told.
    pub fn posting(&mut self, stream: Stream, is_alone: bool) -> Option<(Last, bool)> {
        let last = self.0.get_mut(&stream)?;
        let streak = &mut last.streak;
        let is_due = stepped!("rtr.posting", streak, is_alone, streak.posting(is_alone))?;
        Some((*last, is_due))
    }
}
