//! Which receives their senders are told of (RTR), which messages a receive claims early, and which receives a sender writes to: see
//! `engine/invite.rs`.

#[cfg(any(test, feature = "golden"))]
use serde::{Deserialize, Serialize};

use super::facts;

/// Receives of a stream that must have been alone before one is told of: in a window of messages each would be in the way of
/// the next.
const ALONE: u32 = 2;
/// Receives told of in vain, one after the other, until none is for a while; and where messages go both ways at once.
const IN_VAIN: u32 = 3;
const IN_VAIN_BOTH_WAYS: u32 = 16;
/// For how many receives.
const SILENT: u32 = 32;
/// From so many bytes on only memory in large pages is written to by senders.
const LARGE_PAGES_FROM: u64 = 1 << 20;

/// How the receives of a stream have fared of late.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub struct Streak {
    /// Receives of it that must be alone before one is told of.
    crowd: u32,
    /// Receives that were told of in vain since one was not.
    in_vain: u32,
    /// Receives of which nobody is told.
    silent: u32,
}

impl Default for Streak {
    fn default() -> Streak {
        Streak {
            crowd: ALONE,
            in_vain: 0,
            silent: 0,
        }
    }
}

impl Streak {
    /// A message has come in a receive that was told of or not, written by its sender or not, while this rank sends to its
    /// sender or does not. Returns whether the next receive will be told of, if that is alone.
    pub fn came(&mut self, was_told: bool, is_written: bool, sends_to: bool) -> bool {
        if is_written {
            self.in_vain = 0;
        } else if was_told {
            self.in_vain += 1;
            let most = if sends_to { IN_VAIN_BOTH_WAYS } else { IN_VAIN };
            if self.in_vain >= most {
                (self.in_vain, self.silent) = (0, SILENT);
            }
        }
        self.silent == 0 && self.crowd == 0
    }

    /// A receive is about to be posted, beside others of its stream or alone: whether its sender is to be told, where it is
    /// alone as those before it were.
    pub fn posting(&mut self, is_alone: bool) -> Option<bool> {
        if !is_alone {
            self.crowd = ALONE;
            return None;
        }
        let (is_usual, is_due) = (self.crowd == 0, self.silent == 0);
        self.crowd = self.crowd.saturating_sub(1);
        self.silent = self.silent.saturating_sub(1);
        is_usual.then_some(is_due)
    }
}

facts! {
    /// What decides whether the sender of a receive is told of it.
    trait TellFacts {
        /// Ranks may write to each other, and this one sees all that its program does.
        fn may_invite() -> bool;
        /// A message of its length is likely to take one copy.
        fn is_likely_direct() -> bool;
        /// The part of such a message that host memory brings, where that is known.
        fn rest() -> Option<u64>;
        /// The two buffers are on different GPUs, and of different ranks.
        fn is_apart() -> bool;
        /// This rank deals with no other one.
        fn is_only() -> bool;
        /// Nothing that its sender wrote to this rank has failed.
        fn may_put() -> bool;
        /// Its buffer, or some of it, is written to or checked.
        fn is_written() -> bool;
        /// Its buffer is that of another receive, too.
        fn is_shared() -> bool;
        /// Its buffer is exported.
        fn is_exported() -> bool;
        /// Its length.
        fn bytes() -> u64;
        /// Its buffer is in large pages.
        fn is_in_large_pages() -> bool;
        /// Tries to tell its sender.
        fn tells() -> bool;
    }
}

/// Whether the sender of a receive is told of it, and has been.
pub fn tell(facts: &mut impl TellFacts) -> bool {
    if !facts.may_invite() {
        return false;
    }
    // Of one that is split all that is likely to go directly.
    if !facts.is_likely_direct() && facts.rest().is_none() {
        return false;
    }
    // Two processes on one GPU take turns there, and one of them makes all copies; what a rank sends to itself it maps nowhere.
    let is_fit = facts.is_apart() && facts.is_only() && facts.may_put();
    if !is_fit || facts.is_written() || facts.is_shared() || !facts.is_exported() {
        return false;
    }
    if facts.bytes() >= LARGE_PAGES_FROM && !facts.is_in_large_pages() {
        return false;
    }
    facts.tells()
}

facts! {
    /// What decides whether a sender writes to a receive of which it may have been told.
    trait WriteFacts {
        /// Ranks may write to each other, and this one sees all that its program does.
        fn may_invite() -> bool;
        /// This rank deals with no other one.
        fn is_only() -> bool;
        /// Nothing that this rank wrote to its receiver has failed.
        fn may_put() -> bool;
        /// Its receiver tells of receives at all.
        fn is_told_of_any() -> bool;
        /// The message is so long that a GPU had better not write it and read another.
        fn is_long() -> bool;
        /// This rank reads so long a message from its receiver.
        fn is_reading() -> bool;
        /// A message is announced that this rank waits for.
        fn is_announced() -> bool;
        /// Its receiver has told of a receive for it by now.
        fn is_told_of_now() -> bool;
        /// A sender writes to a receive of this rank's.
        fn is_written_to() -> bool;
        /// Its receiver tells of a receive for it, now or in a moment.
        fn is_told_of() -> bool;
        /// What is left to host memory leaves something to write, and the message may be written in parts.
        fn is_rest_fit() -> bool;
        /// The receiver's buffer holds it.
        fn is_held() -> bool;
        /// Tries to map the receiver's buffer.
        fn is_mapped() -> bool;
        /// Tries to take the receive, which its receiver may withdraw.
        fn takes() -> bool;
        /// Tries to launch the copy.
        fn is_launched() -> bool;
    }
}

/// Whether a sender writes to a receive of which it was told, and has begun.
pub fn write(facts: &mut impl WriteFacts) -> bool {
    if !(facts.may_invite() && facts.is_only() && facts.may_put() && facts.is_told_of_any()) {
        return false;
    }
    // What this rank reads from there it would write one after the other.
    let is_long = facts.is_long();
    if is_long && facts.is_reading() {
        return false;
    }
    // Its receiver waits, and this rank will read what that has sent: it reads this short one meanwhile.
    // To write this one, too, takes two launches of this rank's, one after the other.
    let reads_first =
        !is_long && facts.is_announced() && facts.is_told_of_now() && !facts.is_written_to();
    !reads_first
        && facts.is_told_of()
        && facts.is_rest_fit()
        && facts.is_held()
        && facts.is_mapped()
        && facts.takes()
        && facts.is_launched()
}
