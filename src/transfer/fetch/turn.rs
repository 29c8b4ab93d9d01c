//! Which sender's long messages are read first, if several ranks send to this one over a switch.
//!
//! All that comes to a GPU over a switch comes in by one port, and all that is read from a GPU leaves by one.
//! A GPU that reads from several others reads from one after the other, in the order that its engines choose.
//! If each reads from each, then half of the time two read from the same GPU while nobody reads from another
//! (four H200s: a third of what they can carry is lost). So this rank reads long messages of several senders
//! in turns, some of one sender together if they are shorter. The next messages are of the sender from which
//! the fewest others read. Each rank writes in its segment from whom it reads. Ranks do not agree on an
//! order: two may still choose the same sender, which costs them the time of a batch.
//!
//! If a rank has lately read from several, it takes turns from the first message on. Otherwise it would read
//! all of the window of whoever happened to send first before it chooses (a model: 0.72 of what the ports
//! carry, and 0.89 with turns from the first message on; `docs/decisions/first-sender-of-a-turn.md`).

use std::sync::Arc;

use parking_lot::Mutex;

use crate::cuda::clock_ns;
use crate::node::Segment;
use crate::policy::stepped;
pub use crate::policy::turn::{from, Start, WINDOW_FROM};
use crate::policy::turn::{hold_ns, Place, State, World};
use crate::stats::{self, Counter};

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// The segment in which this rank writes from whom it reads.
    segment: Option<Arc<Segment>>,
}

/// The turns of the senders of long messages to one GPU.
#[derive(Debug, Default)]
pub struct Turns(Arc<Shared>);

/// The node, as a message's turn sees it.
struct Node<'a> {
    /// How many others read from a rank.
    readers: &'a dyn Fn(u32) -> u32,
    since_ns: u64,
    bytes: u64,
}

impl World for Node<'_> {
    fn readers(&self, rank: u32) -> u32 {
        (self.readers)(rank)
    }

    fn may_hold(&self) -> bool {
        clock_ns().saturating_sub(self.since_ns) < hold_ns(self.bytes)
    }
}

/// The turn of a message that is being read, or waits for its turn.
#[derive(Debug)]
pub struct Turn {
    shared: Arc<Shared>,
    rank: u32,
    bytes: u64,
    place: Place,
    /// Since when it waits, by [`clock_ns`].
    since_ns: u64,
}

impl Turns {
    /// For a rank that writes in its segment from whom it reads.
    pub fn new(segment: Arc<Segment>) -> Turns {
        Turns(Arc::new(Shared {
            segment: Some(segment),
            ..Shared::default()
        }))
    }

    /// Whether messages of a sender wait: then those behind them wait as well, and stay in order.
    pub fn are_waiting(&self, rank: u32) -> bool {
        self.0.state.lock().is_waiting(rank)
    }

    /// Enters a message that is to be read. It is read at once if no other sender's message is being read or
    /// waits, and none of its own sender waits. `readers`: how many others read from a rank.
    pub fn enter(&self, rank: u32, bytes: u64, readers: &dyn Fn(u32) -> u32) -> Turn {
        let mut state = self.0.state.lock();
        let world = Node {
            readers,
            since_ns: 0,
            bytes,
        };
        let place = stepped!("turn.enter", state, (rank, bytes), &world, |world| state
            .enter(rank, bytes, world));
        let must_wait = matches!(place, Place::Waiting(_));
        stats::add(Counter::GetsQueued, u64::from(must_wait));
        self.0.say_if_first(place, rank);
        Turn {
            shared: Arc::clone(&self.0),
            rank,
            bytes,
            place,
            since_ns: if must_wait { clock_ns() } else { 0 },
        }
    }
}

impl Shared {
    /// Writes that this rank reads from another, if a batch of that one's messages begins.
    fn say_if_first(&self, place: Place, rank: u32) {
        if State::begins_batch(place) {
            self.say(Some(rank));
        }
    }

    fn say(&self, rank: Option<u32>) {
        if let Some(segment) = &self.segment {
            segment.set_reading(rank);
        }
    }
}

impl Turn {
    /// Whether it still waits.
    pub fn is_waiting(&self) -> bool {
        matches!(self.place, Place::Waiting(_))
    }

    /// How its copy begins, once its turn has come.
    pub fn start(&self) -> Option<Start> {
        match self.place {
            Place::Waiting(_) => None,
            Place::Reading { start, .. } => Some(start),
        }
    }

    /// Whether the next message of its sender waits and belongs to the same batch.
    pub fn is_followed(&self) -> bool {
        self.shared.state.lock().is_followed(self.rank)
    }

    /// Whether it is to be read now. `readers`: how many others read from a rank.
    pub fn may_start(&mut self, readers: &dyn Fn(u32) -> u32) -> bool {
        let Place::Waiting(number) = self.place else {
            return true;
        };
        let mut state = self.shared.state.lock();
        let (rank, bytes) = (self.rank, self.bytes);
        let world = Node {
            readers,
            since_ns: self.since_ns,
            bytes,
        };
        let begun = stepped!(
            "turn.comes",
            state,
            (rank, number, bytes),
            &world,
            |world| state.may_start(rank, number, bytes, world)
        );
        let Some(place) = begun else {
            return false;
        };
        self.place = place;
        self.shared.say_if_first(place, self.rank);
        true
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        match self.place {
            Place::Waiting(number) => state.wait_no_more(self.rank, number),
            Place::Reading { batch, .. } => {
                if state.is_over(batch) {
                    self.shared.say(None);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::VecDeque;

    use crate::policy::turn::{ALONE_FROM, FEW, TOGETHER_BYTES};

    const NOBODY: &dyn Fn(u32) -> u32 = &|_| 0;
    /// Two of one sender are not read together.
    const LONG: u64 = TOGETHER_BYTES / 2 + 1;
    /// Four of one sender are read together.
    const SHORT: u64 = TOGETHER_BYTES / 4;

    fn is_first(turn: &Turn) -> bool {
        matches!(turn.start(), Some(Start::Beside | Start::Behind))
    }

    #[test]
    fn what_is_short_for_its_window_is_read_at_once() {
        let from = [1, 2, FEW, FEW + 1, 16].map(|depth| super::from(depth) >> 10);
        assert_eq!(from, [4096, 1536, 1536, 2048, 2048]);
        assert!((0..100).all(|depth| super::from(depth) >= WINDOW_FROM));
    }

    #[test]
    fn one_sender_alone_never_waits() {
        let turns = Turns::default();
        let all: Vec<Turn> = (0..16).map(|_| turns.enter(3, LONG, NOBODY)).collect();
        assert!(all.iter().all(|turn| !turn.is_waiting()));
        drop(all);
        assert!(
            !turns.enter(4, LONG, NOBODY).is_waiting(),
            "nothing is read any more"
        );
    }

    #[test]
    fn the_next_is_of_whom_the_fewest_read() {
        let turns = Turns::default();
        let first = turns.enter(1, LONG, NOBODY);
        let mut second: Vec<Turn> = (0..2).map(|_| turns.enter(2, LONG, NOBODY)).collect();
        let mut third = turns.enter(3, LONG, NOBODY);
        assert!(!first.is_waiting() && third.is_waiting());
        assert!(second.iter().all(Turn::is_waiting));
        // One more is launched before the first ends.
        let of_two = |rank: u32| u32::from(rank == 2);
        assert!(!second[0].may_start(&of_two), "others read from that one");
        assert!(
            !second[1].may_start(NOBODY),
            "it is not the first of its sender"
        );
        assert!(third.may_start(&of_two));
        assert!(!second[0].may_start(NOBODY), "two are under way");
        drop(first);
        assert!(second[0].may_start(&of_two), "there is no other");
        drop(third);
        assert!(second[1].may_start(NOBODY));
    }

    #[test]
    fn behind_one_that_waits_its_sender_s_others_wait() {
        let turns = Turns::default();
        let first = turns.enter(1, LONG, NOBODY);
        let mut second = turns.enter(2, LONG, NOBODY);
        assert!(turns.are_waiting(2) && !turns.are_waiting(1));
        // The first sender's messages wait as well: the senders take turns from now on.
        let mut again = turns.enter(1, LONG, NOBODY);
        assert!(again.is_waiting());
        assert!(again.may_start(NOBODY), "its turn goes on");
        drop((first, again));
        assert!(second.may_start(NOBODY));
        drop(second);
        assert!(!turns.enter(5, LONG, NOBODY).is_waiting());
    }

    /// Messages that are launched together are in order, and another sender's begin a launch of their own.
    #[test]
    fn short_ones_of_a_sender_are_read_together() {
        let turns = Turns::default();
        let first = turns.enter(1, SHORT, NOBODY);
        let mut window: Vec<Turn> = (0..9).map(|_| turns.enter(2, SHORT, NOBODY)).collect();
        assert!(is_first(&first) && !first.is_waiting());
        assert!(window.iter().all(Turn::is_waiting));
        let come = |window: &mut Vec<Turn>, readers: &dyn Fn(u32) -> u32| -> Vec<bool> {
            let came = |turn: &mut Turn| turn.is_waiting() && turn.may_start(readers);
            window.iter_mut().map(came).collect()
        };
        // All of the batch start, whoever reads from the sender meanwhile; then two batches are under way.
        let mut came = come(&mut window, NOBODY);
        assert_eq!(came, [[true; 4].as_slice(), &[false; 5]].concat());
        let firsts: Vec<bool> = window.iter().map(is_first).collect();
        assert_eq!(firsts, [[true].as_slice(), &[false; 8]].concat());
        assert_eq!(window[0].start(), Some(Start::Beside), "one is read");
        assert!(!window[3].is_followed(), "the batch is full");
        drop(first);
        let others = turns.enter(3, SHORT, NOBODY);
        came = come(&mut window, NOBODY);
        assert_eq!(came, [[false; 4].as_slice(), &[true; 4], &[false]].concat());
        assert_eq!(window[4].start(), Some(Start::Behind), "several are");
        // A message of a batch that is over makes no room in the batch.
        window.drain(0..3);
        assert!(!window[5].may_start(NOBODY) && others.is_waiting());
        window.remove(0);
        assert!(window[4].may_start(&|rank| u32::from(rank == 3)) && is_first(&window[4]));
    }

    /// This holds even if others read from the sender by now, and one of another sender would be next.
    #[test]
    fn a_batch_that_has_begun_is_filled() {
        let turns = Turns::default();
        let first = turns.enter(1, LONG, NOBODY);
        let mut second: Vec<Turn> = (0..2).map(|_| turns.enter(2, SHORT, NOBODY)).collect();
        let mut third = turns.enter(3, SHORT, NOBODY);
        assert!(second[0].may_start(NOBODY) && second[0].is_followed());
        let of_two = |rank: u32| u32::from(rank == 2);
        drop(first);
        assert!(!third.may_start(&of_two) && second[1].may_start(&of_two) && !is_first(&second[1]));
        assert!(!second[1].is_followed(), "no more wait");
        assert!(third.may_start(&of_two) && is_first(&third));
    }

    /// Nobody waits for a message that is too long for a batch that has begun.
    #[test]
    fn a_batch_waits_for_no_message_that_it_cannot_take() {
        let turns = Turns::default();
        let first = turns.enter(1, SHORT, NOBODY);
        let mut other = turns.enter(2, SHORT, NOBODY);
        let mut long = turns.enter(1, LONG, NOBODY);
        let mut longer = turns.enter(1, LONG, NOBODY);
        let of_one = |rank: u32| u32::from(rank == 1);
        assert!(long.may_start(&of_one), "the batch takes that one, too");
        assert!(!longer.may_start(&of_one) && other.may_start(&of_one));
        drop((first, other, long));
        assert!(longer.may_start(NOBODY));
    }

    #[test]
    fn nobody_is_passed_over_for_ever() {
        let turns = Turns::default();
        let mut reading = VecDeque::from([turns.enter(1, LONG, NOBODY)]);
        let mut waiting = turns.enter(2, LONG, NOBODY);
        let of_two = |rank: u32| 3 * u32::from(rank == 2);
        let mut others = 0;
        while !waiting.may_start(&of_two) {
            let mut next = turns.enter(1, LONG, NOBODY);
            while !next.may_start(&of_two) {
                if waiting.may_start(&of_two) {
                    assert!((8..100).contains(&others), "{others}");
                    return;
                }
                reading.pop_front();
            }
            reading.push_back(next);
            others += 1;
            assert!(others < 100);
        }
    }

    #[test]
    fn two_long_ones_are_not_read_at_once() {
        let turns = Turns::default();
        let first = turns.enter(1, ALONE_FROM, NOBODY);
        let mut second = turns.enter(2, ALONE_FROM, NOBODY);
        assert!(!second.may_start(NOBODY));
        drop(first);
        assert!(second.may_start(NOBODY));
    }

    /// A rank that has lately read from several does not read a whole window of one of them, nor first what
    /// others read already.
    #[test]
    fn who_reads_from_several_chooses_from_the_first_message_on() {
        let turns = Turns::default();
        drop((turns.enter(1, LONG, NOBODY), turns.enter(2, LONG, NOBODY)));
        let mut window: Vec<Turn> = (0..4).map(|_| turns.enter(1, LONG, NOBODY)).collect();
        let waiting: Vec<bool> = window.iter().map(Turn::is_waiting).collect();
        assert_eq!(waiting, [false, false, true, true]);
        let mut other = turns.enter(2, LONG, NOBODY);
        let of_one = |rank: u32| u32::from(rank == 1);
        window.remove(0);
        assert!(!window[1].may_start(&of_one) && other.may_start(&of_one));
        drop((window, other));
        // Nothing is read: a message of a sender from whom others read waits a fifth of its time for another,
        // and no longer.
        let long = 1 << 30;
        let mut first = turns.enter(1, long, &of_one);
        assert!(first.is_waiting() && !first.may_start(&of_one));
        let mut second = turns.enter(2, long, &of_one);
        assert!(second.may_start(&of_one) && !first.may_start(&of_one));
        drop((first, second));
        let mut alone = turns.enter(1, LONG, &of_one);
        while !alone.may_start(&of_one) {
            std::thread::yield_now();
        }
        drop(alone);
        let mut free = turns.enter(1, long, &of_one);
        assert!(
            !free.may_start(&of_one) && free.may_start(NOBODY),
            "nobody reads from it any more"
        );
    }

    #[test]
    fn who_gives_up_keeps_nobody_waiting() {
        let turns = Turns::default();
        let first = turns.enter(1, LONG, NOBODY);
        let gone = turns.enter(2, LONG, NOBODY);
        let mut behind = turns.enter(2, LONG, NOBODY);
        assert!(!behind.may_start(NOBODY));
        drop(gone);
        assert!(behind.may_start(NOBODY));
        drop((first, behind));
        assert!(!turns.enter(1, LONG, NOBODY).is_waiting());
    }
}
