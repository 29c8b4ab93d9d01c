//! Whose long messages are read first where several ranks send to this one over a switch.
//!
//! All that comes to a GPU over a switch comes by one port, and what is read from a GPU leaves by one. A GPU that reads from
//! several others does so from one after the other, as its engines see fit; where each reads from each, two read from the same one
//! while nobody reads from another, half of the time (four H200s: a third of what they can do is lost). So long messages of
//! several senders are read in turns, some of one sender together where they are shorter, and the next ones are of that sender from
//! which the fewest others read.
//! Whose those are each rank says in its segment. It is said without any order among ranks: two may still choose the same
//! one, which costs them the time of a batch.
//!
//! Where a rank has read from several of late, that is so from the first message on: all of a window of whoever happened to send
//! first would be read before anybody chooses (a model: 0.72 of what the ports carry, 0.89 so, and 0.96 where also the first is one
//! of whom nobody reads).

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
    /// Where this rank says from whom it reads.
    segment: Option<Arc<Segment>>,
}

/// The turns of the senders of long messages to one GPU.
#[derive(Debug, Default)]
pub struct Turns(Arc<Shared>);

/// The node, as a message asks about it.
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

/// Of a message that is read, or waits for that.
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
    /// Of a rank that says in its segment from whom it reads.
    pub fn new(segment: Arc<Segment>) -> Turns {
        Turns(Arc::new(Shared {
            segment: Some(segment),
            ..Shared::default()
        }))
    }

    /// Whether messages of a sender wait: then those behind them do so as well, and stay in order.
    pub fn are_waiting(&self, rank: u32) -> bool {
        self.0.state.lock().is_waiting(rank)
    }

    /// A message is to be read from a sender: at once, if nobody else's is being read or waits, and none of its own. `readers`: how
    /// many others read from a rank.
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
        stats::add(Counter::TurnsWaited, u64::from(must_wait));
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
    /// Says that this rank reads from another, where a batch of that one's begins.
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

    /// How its copy begins, once it does.
    pub fn start(&self) -> Option<Start> {
        match self.place {
            Place::Waiting(_) => None,
            Place::Reading { start, .. } => Some(start),
        }
    }

    /// Whether the next message of its sender waits and is part of its batch.
    pub fn is_followed(&self) -> bool {
        self.shared.state.lock().is_followed(self.rank)
    }

    /// Whether it is to be read now. `readers`: how many others read from a rank.
    pub fn comes(&mut self, readers: &dyn Fn(u32) -> u32) -> bool {
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
            |world| state.comes(rank, number, bytes, world)
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
    /// No two of one sender are read together.
    const LONG: u64 = TOGETHER_BYTES / 2 + 1;
    /// Four are.
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
        // One more is launched ahead of the end of the first.
        let of_two = |rank: u32| u32::from(rank == 2);
        assert!(!second[0].comes(&of_two), "others read from that one");
        assert!(
            !second[1].comes(NOBODY),
            "it is not the first of its sender"
        );
        assert!(third.comes(&of_two));
        assert!(!second[0].comes(NOBODY), "two are under way");
        drop(first);
        assert!(second[0].comes(&of_two), "there is no other");
        drop(third);
        assert!(second[1].comes(NOBODY));
    }

    #[test]
    fn behind_one_that_waits_its_sender_s_others_wait() {
        let turns = Turns::default();
        let first = turns.enter(1, LONG, NOBODY);
        let mut second = turns.enter(2, LONG, NOBODY);
        assert!(turns.are_waiting(2) && !turns.are_waiting(1));
        // Of the first as well: they take turns from now on.
        let mut again = turns.enter(1, LONG, NOBODY);
        assert!(again.is_waiting());
        assert!(again.comes(NOBODY), "its turn goes on");
        drop((first, again));
        assert!(second.comes(NOBODY));
        drop(second);
        assert!(!turns.enter(5, LONG, NOBODY).is_waiting());
    }

    /// Those that are launched together are in order, and others' begin a launch of their own.
    #[test]
    fn short_ones_of_a_sender_are_read_together() {
        let turns = Turns::default();
        let first = turns.enter(1, SHORT, NOBODY);
        let mut window: Vec<Turn> = (0..9).map(|_| turns.enter(2, SHORT, NOBODY)).collect();
        assert!(is_first(&first) && !first.is_waiting());
        assert!(window.iter().all(Turn::is_waiting));
        let come = |window: &mut Vec<Turn>, readers: &dyn Fn(u32) -> u32| -> Vec<bool> {
            let came = |turn: &mut Turn| turn.is_waiting() && turn.comes(readers);
            window.iter_mut().map(came).collect()
        };
        // All of the batch come, whoever reads there meanwhile; then two are under way.
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
        // What is over of a batch makes no room in it.
        window.drain(0..3);
        assert!(!window[5].comes(NOBODY) && others.is_waiting());
        window.remove(0);
        assert!(window[4].comes(&|rank| u32::from(rank == 3)) && is_first(&window[4]));
    }

    /// Also where others read from it by now, and one of another sender would be next.
    #[test]
    fn a_batch_that_has_begun_is_filled() {
        let turns = Turns::default();
        let first = turns.enter(1, LONG, NOBODY);
        let mut second: Vec<Turn> = (0..2).map(|_| turns.enter(2, SHORT, NOBODY)).collect();
        let mut third = turns.enter(3, SHORT, NOBODY);
        assert!(second[0].comes(NOBODY) && second[0].is_followed());
        let of_two = |rank: u32| u32::from(rank == 2);
        drop(first);
        assert!(!third.comes(&of_two) && second[1].comes(&of_two) && !is_first(&second[1]));
        assert!(!second[1].is_followed(), "no more wait");
        assert!(third.comes(&of_two) && is_first(&third));
    }

    /// What is too long for a batch that has begun keeps nobody waiting for it.
    #[test]
    fn a_batch_waits_for_no_message_that_it_cannot_take() {
        let turns = Turns::default();
        let first = turns.enter(1, SHORT, NOBODY);
        let mut other = turns.enter(2, SHORT, NOBODY);
        let mut long = turns.enter(1, LONG, NOBODY);
        let mut longer = turns.enter(1, LONG, NOBODY);
        let of_one = |rank: u32| u32::from(rank == 1);
        assert!(long.comes(&of_one), "the batch takes that one, too");
        assert!(!longer.comes(&of_one) && other.comes(&of_one));
        drop((first, other, long));
        assert!(longer.comes(NOBODY));
    }

    #[test]
    fn nobody_is_passed_over_for_ever() {
        let turns = Turns::default();
        let mut reading = VecDeque::from([turns.enter(1, LONG, NOBODY)]);
        let mut waiting = turns.enter(2, LONG, NOBODY);
        let of_two = |rank: u32| 3 * u32::from(rank == 2);
        let mut others = 0;
        while !waiting.comes(&of_two) {
            let mut next = turns.enter(1, LONG, NOBODY);
            while !next.comes(&of_two) {
                if waiting.comes(&of_two) {
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
        assert!(!second.comes(NOBODY));
        drop(first);
        assert!(second.comes(NOBODY));
    }

    /// Who has read from several of late reads no window of one of them as a whole, nor first what others read already.
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
        assert!(!window[1].comes(&of_one) && other.comes(&of_one));
        drop((window, other));
        // Nothing is read: one of whom others read waits a fifth of its time for another, and no longer.
        let long = 1 << 30;
        let mut first = turns.enter(1, long, &of_one);
        assert!(first.is_waiting() && !first.comes(&of_one));
        let mut second = turns.enter(2, long, &of_one);
        assert!(second.comes(&of_one) && !first.comes(&of_one));
        drop((first, second));
        let mut alone = turns.enter(1, LONG, &of_one);
        while !alone.comes(&of_one) {
            std::thread::yield_now();
        }
        drop(alone);
        let mut free = turns.enter(1, long, &of_one);
        assert!(
            !free.comes(&of_one) && free.comes(NOBODY),
            "nobody reads from it any more"
        );
    }

    #[test]
    fn who_gives_up_keeps_nobody_waiting() {
        let turns = Turns::default();
        let first = turns.enter(1, LONG, NOBODY);
        let gone = turns.enter(2, LONG, NOBODY);
        let mut behind = turns.enter(2, LONG, NOBODY);
        assert!(!behind.comes(NOBODY));
        drop(gone);
        assert!(behind.comes(NOBODY));
        drop((first, behind));
        assert!(!turns.enter(1, LONG, NOBODY).is_waiting());
    }
}
