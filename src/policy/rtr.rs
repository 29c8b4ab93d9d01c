//! For which receives an RTR is sent, which messages a receive matches early, and to which receives a sender
//! writes: see `engine/rtr.rs`.

#[cfg(any(test, feature = "golden"))]
use serde::{Deserialize, Serialize};

use super::facts;

/// So many receives of a stream must have been alone before the receiver sends an RTR for one: in a window of
/// messages each would be in the way of the next.
const ALONE: u32 = 2;
/// After so many RTRs in vain, one after the other, the receiver sends none for a while. The second number
/// holds where messages go both ways at once.
const IN_VAIN: u32 = 3;
const IN_VAIN_BOTH_WAYS: u32 = 16;
/// For so many receives no RTR is sent then.
const SILENT: u32 = 32;
/// From so many bytes on, senders write only to memory in large pages.
const LARGE_PAGES_FROM: u64 = 1 << 20;

/// How RTRs for the receives of a stream have fared of late.
#[derive(Clone, Copy, Debug)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub struct Streak {
    /// So many receives of the stream must still be alone before an RTR is sent for one.
    crowd: u32,
    /// RTRs sent in vain in a row.
    in_vain: u32,
    /// So many receives still get no RTR.
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
    /// A message has arrived. The arguments say whether an RTR was sent for its receive, whether its sender
    /// has written it, and whether this rank sends to its sender. Returns whether an RTR will be sent for the
    /// next receive, if that is alone.
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

    /// A receive is about to be posted, alone or beside others of its stream. If it is alone, as those before
    /// it were, returns whether to send an RTR.
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
    /// The facts that decide whether the receiver sends an RTR for a receive.
    trait TellFacts {
        /// Ranks may write to each other, and this one sees all that its program does.
        fn may_send_rtr() -> bool;
        /// A message of this length is likely to take one copy.
        fn is_likely_direct() -> bool;
        /// The part of such a message that goes through host memory, if that is known.
        fn rest() -> Option<u64>;
        /// The two buffers are on different GPUs and belong to different ranks.
        fn is_apart() -> bool;
        /// This rank deals with no other one.
        fn is_only() -> bool;
        /// No put from its sender to this rank has failed.
        fn may_put() -> bool;
        /// Its buffer, or some of it, is written to or checked.
        fn is_written() -> bool;
        /// Its buffer is also that of another receive.
        fn is_shared() -> bool;
        /// Its buffer is exported.
        fn is_exported() -> bool;
        /// Its length.
        fn bytes() -> u64;
        /// Its buffer is in large pages.
        fn is_in_large_pages() -> bool;
        /// Tries to send the RTR.
        fn tells() -> bool;
    }
}

/// Whether an RTR is to be sent for a receive, and was sent.
pub fn tell(facts: &mut impl TellFacts) -> bool {
    if !facts.may_send_rtr() {
        return false;
    }
    // Of a message that is split, the RTR is about the part that is likely to go directly.
    if !facts.is_likely_direct() && facts.rest().is_none() {
        return false;
    }
    // Two processes on one GPU take turns there, so one of them makes all copies. A rank maps nothing that it
    // sends to itself.
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
    /// The facts that decide whether a sender writes to a receive for which it may have an RTR.
    trait WriteFacts {
        /// Ranks may write to each other, and this one sees all that its program does.
        fn may_send_rtr() -> bool;
        /// This rank deals with no other one.
        fn is_only() -> bool;
        /// No put from this rank to the receiver has failed.
        fn may_put() -> bool;
        /// The receiver sends RTRs at all.
        fn is_told_of_any() -> bool;
        /// The message is so long that a GPU should not write it while it reads another.
        fn is_long() -> bool;
        /// This rank is reading a message of that length from the receiver.
        fn is_reading() -> bool;
        /// A message that this rank waits for is announced.
        fn is_announced() -> bool;
        /// The receiver has sent an RTR for the message by now.
        fn is_told_of_now() -> bool;
        /// A sender writes to a receive of this rank's.
        fn is_written_to() -> bool;
        /// The receiver sends an RTR for the message, now or in a moment.
        fn is_told_of() -> bool;
        /// The part that is left to host memory leaves something to write, and the message may be written in
        /// parts.
        fn is_rest_fit() -> bool;
        /// The message fits the receiver's buffer.
        fn is_held() -> bool;
        /// Tries to map the receiver's buffer.
        fn is_mapped() -> bool;
        /// Tries to take the RTR, which the receiver may withdraw.
        fn takes() -> bool;
        /// Tries to launch the copy.
        fn is_launched() -> bool;
    }
}

/// Whether the sender writes to a receive for which it has an RTR, and has begun.
pub fn write(facts: &mut impl WriteFacts) -> bool {
    if !(facts.may_send_rtr() && facts.is_only() && facts.may_put() && facts.is_told_of_any()) {
        return false;
    }
    // The GPU would do what this rank reads from there and what it writes one after the other.
    let is_long = facts.is_long();
    if is_long && facts.is_reading() {
        return false;
    }
    // The receiver waits, and this rank will read what the receiver has sent. The receiver meanwhile reads
    // this short message. If this rank wrote it, too, it would need two launches, one after the other.
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
