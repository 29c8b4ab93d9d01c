//! Which ranks this rank deals with.

use hashbrown::HashMap;
#[cfg(any(test, feature = "golden"))]
use serde::{Deserialize, Serialize};

/// After so many messages between device buffers, sent and received, with one rank only, a rank counts as
/// having nothing to do with others any more.
const ALONE_WITH: u32 = 64;

/// The ranks with which this rank has exchanged messages between device buffers of late. RTRs are sent only
/// between two ranks that deal with each other only. A rank that also deals with others would read from some
/// and write to others, depending on whether an RTR comes in time, and a GPU does one after the other. Four
/// H200s in a ring, single messages, times the speed without the library: 1 KiB 0.81, 1 MiB 0.84, 16 MiB
/// 0.56; where all are read 1.03, 1.05 and 1.01 (`docs/results/h200-x4-many.txt`; see
/// `docs/decisions/no-read-beside-write.md`).
#[derive(Debug, Default)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub struct PeerMix {
    last: Option<u32>,
    /// Messages with the last rank since one with another rank.
    since: u32,
    /// There was another rank.
    had_others: bool,
}

impl PeerMix {
    /// A message goes to a rank, or has come from it.
    pub fn note_other(&mut self, rank: u32) {
        if self.last == Some(rank) {
            self.since = self.since.saturating_add(1);
        } else {
            self.had_others = self.last.is_some();
            (self.last, self.since) = (Some(rank), 0);
        }
    }

    /// Whether this rank deals with several others.
    pub fn are_several(&self) -> bool {
        self.had_others && self.since < ALONE_WITH
    }

    /// Whether this rank deals with nobody else.
    pub fn is_only(&self, rank: u32) -> bool {
        self.last
            .is_none_or(|last| last == rank && !self.are_several())
    }
}

/// A rank is taken to go on sending to another if it has sent to it within so many long messages, sent and
/// received: two windows each way.
const RECENT_WINDOWS: u64 = 4;
/// The same limit for other receivers, to be sure that there are none.
const RECENT: u64 = 64;

/// The ranks to which this rank has sent long messages of late.
#[derive(Debug, Default)]
#[cfg_attr(any(test, feature = "golden"), derive(Serialize, Deserialize))]
pub struct Exchanges {
    /// Long messages, sent and received.
    messages: u64,
    /// The number of the last one to each rank.
    sent: HashMap<u32, u64>,
}

impl Exchanges {
    /// A long message to a rank has begun.
    pub fn note_sent(&mut self, to: u32) {
        self.messages += 1;
        self.sent.insert(to, self.messages);
    }

    /// Whether a long message that begins to arrive is one of those that go both ways between its sender and
    /// this rank, and between no others that this rank knows of.
    pub fn received(&mut self, from: u32, depth: u32) -> bool {
        self.messages += 1;
        let age = |at: &u64| self.messages - at;
        let is_recent = |at| age(at) <= RECENT_WINDOWS * u64::from(depth);
        let mut others = self.sent.iter().filter(|(to, _)| **to != from);
        self.sent.get(&from).is_some_and(is_recent) && others.all(|(_, at)| age(at) > RECENT)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_ranks_are_alone_until_a_third_comes_and_a_while_after_it_went() {
        let mut peer_mix = PeerMix::default();
        assert!(peer_mix.is_only(3), "nothing is known");
        peer_mix.note_other(3);
        assert!(peer_mix.is_only(3) && !peer_mix.is_only(4));
        peer_mix.note_other(4);
        assert!(
            !peer_mix.is_only(3) && !peer_mix.is_only(4),
            "there are two"
        );
        for messages in 0..ALONE_WITH {
            assert!(!peer_mix.is_only(4), "{messages} messages later");
            peer_mix.note_other(4);
        }
        assert!(peer_mix.is_only(4));
        peer_mix.note_other(3);
        assert!(!peer_mix.is_only(3) && !peer_mix.is_only(4));
    }

    #[test]
    fn who_deals_with_two_in_turn_is_never_alone_with_one() {
        let mut peer_mix = PeerMix::default();
        peer_mix.note_other(1);
        for message in 0..1000 {
            peer_mix.note_other(message % 2);
            if message > 0 {
                assert!(!peer_mix.is_only(0) && !peer_mix.is_only(1), "{message}");
            }
        }
    }

    #[test]
    fn two_ranks_that_send_to_each_other_exchange() {
        let mut exchanges = Exchanges::default();
        assert!(!exchanges.received(3, 1), "nothing is sent");
        exchanges.note_sent(3);
        let received: Vec<bool> = (0..6).map(|_| exchanges.received(3, 1)).collect();
        assert_eq!(received, [true, true, true, true, false, false]);
        for depth in [1, 16] {
            for _ in 0..5 {
                (0..depth).for_each(|_| exchanges.note_sent(3));
                assert!((0..depth).all(|_| exchanges.received(3, depth)));
                assert!(!exchanges.received(4, depth), "nothing is sent to that one");
            }
        }
        exchanges.note_sent(4);
        exchanges.note_sent(3);
        assert!(!exchanges.received(3, 1), "two are sent to");
        for _ in 0..RECENT {
            exchanges.note_sent(3);
        }
        assert!(exchanges.received(3, 1), "the other was long ago");
    }
}
