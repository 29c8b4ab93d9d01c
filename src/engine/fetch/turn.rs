//! Whose long messages are read first where several ranks send to this one over a switch.
//!
//! All that comes to a GPU over a switch comes by one port, and what is read from a GPU leaves by one. A GPU that reads from
//! several others does so from one after the other, as its engines see fit; where each reads from each, two read from the same one
//! while nobody reads from another, half of the time (four H200s: a third of what they can do is lost). So long messages of
//! several senders are read in turns, and the next one is a message of that sender from which the fewest others read.
//! Which one that is each rank says in its segment. It is said without any order among ranks: two may still choose the same
//! one, which costs them the time of a message.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::node::Segment;
use crate::stats::{self, Counter};

/// Messages of so many bytes are read in turns: 16 us and more each, beside which a launch by itself is little.
pub const TURN_FROM: u64 = 6 << 20;
/// While others wait a message is launched behind one that is being read, so that it begins when that ends.
const AHEAD: u32 = 2;
/// Two of so many bytes are not launched at once: they would be read at the same time, and what a launch costs is little beside them.
const ALONE_FROM: u64 = 48 << 20;
/// A sender whose messages have been passed over so often is next.
const PATIENCE: u32 = 32;

/// The messages of one sender.
#[derive(Debug)]
struct Sender {
    rank: u32,
    /// Messages that are being read.
    reading: u32,
    /// Numbers of those that wait, oldest first.
    waiting: VecDeque<u64>,
    /// Messages of others that were read instead since it waits.
    passed_over: u32,
}

#[derive(Debug, Default)]
struct State {
    senders: Vec<Sender>,
    /// The sender whose turn it is.
    current: Option<u32>,
    number: u64,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Where this rank says from whom it reads.
    segment: Option<Arc<Segment>>,
}

/// The turns of the senders of long messages to one GPU.
#[derive(Debug, Default)]
pub struct Turns(Arc<Shared>);

/// Of a message that is read, or waits for that.
#[derive(Debug)]
pub struct Turn {
    shared: Arc<Shared>,
    rank: u32,
    bytes: u64,
    /// Its number while it waits.
    number: Option<u64>,
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
        let state = self.0.state.lock();
        let mut senders = state.senders.iter();
        senders.any(|sender| sender.rank == rank && !sender.waiting.is_empty())
    }

    /// A message is to be read from a sender: at once, if nobody else's is being read or waits, and none of its own.
    pub fn enter(&self, rank: u32, bytes: u64) -> Turn {
        let mut state = self.0.state.lock();
        let is_in_the_way =
            |one: &Sender| !one.waiting.is_empty() || (one.rank != rank && one.reading > 0);
        let must_wait = state.senders.iter().any(is_in_the_way);
        let number = must_wait.then(|| {
            state.number += 1;
            state.number
        });
        let sender = state.sender(rank);
        match number {
            Some(number) => sender.waiting.push_back(number),
            None => sender.reading += 1,
        }
        if number.is_none() {
            self.0.begin(&mut state, rank);
        }
        stats::add(Counter::TurnsWaited, u64::from(number.is_some()));
        Turn {
            shared: Arc::clone(&self.0),
            rank,
            bytes,
            number,
        }
    }
}

impl State {
    fn sender(&mut self, rank: u32) -> &mut Sender {
        let at = match self.senders.iter().position(|one| one.rank == rank) {
            Some(at) => at,
            None => {
                self.senders.push(Sender {
                    rank,
                    reading: 0,
                    waiting: VecDeque::new(),
                    passed_over: 0,
                });
                self.senders.len() - 1
            }
        };
        &mut self.senders[at]
    }

    /// Whose message is next. `readers`: how many others read from a rank.
    fn next(&self, readers: &dyn Fn(u32) -> u32) -> Option<u32> {
        let waiting = || self.senders.iter().filter(|one| !one.waiting.is_empty());
        let longest = waiting().max_by_key(|one| one.passed_over);
        if let Some(overdue) = longest.filter(|one| one.passed_over >= PATIENCE) {
            return Some(overdue.rank);
        }
        // Of several alike the current one goes on, and after it the one that has waited longest.
        let key = |one: &&Sender| {
            let is_another = self.current != Some(one.rank);
            (readers(one.rank), is_another, one.waiting.front().copied())
        };
        waiting().min_by_key(key).map(|one| one.rank)
    }
}

impl Shared {
    /// A message of this sender is read from now on.
    fn begin(&self, state: &mut State, rank: u32) {
        state.current = Some(rank);
        self.say(Some(rank));
        for other in &mut state.senders {
            other.passed_over = match other.rank == rank || other.waiting.is_empty() {
                true => 0,
                false => other.passed_over + 1,
            };
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
        self.number.is_some()
    }

    /// Whether it is to be read now. `readers`: how many others read from a rank.
    pub fn comes(&mut self, readers: &dyn Fn(u32) -> u32) -> bool {
        let Some(number) = self.number else {
            return true;
        };
        let mut state = self.shared.state.lock();
        let reading: u32 = state.senders.iter().map(|one| one.reading).sum();
        let is_first = state.sender(self.rank).waiting.front() == Some(&number);
        let most = if self.bytes < ALONE_FROM { AHEAD } else { 1 };
        if !is_first || reading >= most || state.next(readers) != Some(self.rank) {
            return false;
        }
        let sender = state.sender(self.rank);
        sender.waiting.pop_front();
        sender.reading += 1;
        self.shared.begin(&mut state, self.rank);
        self.number = None;
        true
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        let number = self.number;
        let sender = state.sender(self.rank);
        match number {
            Some(number) => sender.waiting.retain(|waiting| *waiting != number),
            None => sender.reading -= 1,
        }
        if state.senders.iter().all(|one| one.reading == 0) {
            state.current = None;
            self.shared.say(None);
        }
        state
            .senders
            .retain(|one| one.reading > 0 || !one.waiting.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOBODY: &dyn Fn(u32) -> u32 = &|_| 0;

    #[test]
    fn one_sender_alone_never_waits() {
        let turns = Turns::default();
        let all: Vec<Turn> = (0..16).map(|_| turns.enter(3, TURN_FROM)).collect();
        assert!(all.iter().all(|turn| !turn.is_waiting()));
        drop(all);
        assert!(
            !turns.enter(4, TURN_FROM).is_waiting(),
            "nothing is read any more"
        );
    }

    #[test]
    fn the_next_is_of_whom_the_fewest_read() {
        let turns = Turns::default();
        let first = turns.enter(1, TURN_FROM);
        let mut second: Vec<Turn> = (0..2).map(|_| turns.enter(2, TURN_FROM)).collect();
        let mut third = turns.enter(3, TURN_FROM);
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
        let first = turns.enter(1, TURN_FROM);
        let mut second = turns.enter(2, TURN_FROM);
        assert!(turns.are_waiting(2) && !turns.are_waiting(1));
        // Of the first as well: they take turns from now on.
        let mut again = turns.enter(1, TURN_FROM);
        assert!(again.is_waiting());
        assert!(again.comes(NOBODY), "its turn goes on");
        drop((first, again));
        assert!(second.comes(NOBODY));
        drop(second);
        assert!(!turns.enter(5, TURN_FROM).is_waiting());
    }

    #[test]
    fn nobody_is_passed_over_for_ever() {
        let turns = Turns::default();
        let mut reading = VecDeque::from([turns.enter(1, TURN_FROM)]);
        let mut waiting = turns.enter(2, TURN_FROM);
        let of_two = |rank: u32| 3 * u32::from(rank == 2);
        let mut others = 0;
        while !waiting.comes(&of_two) {
            let mut next = turns.enter(1, TURN_FROM);
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
        let first = turns.enter(1, ALONE_FROM);
        let mut second = turns.enter(2, ALONE_FROM);
        assert!(!second.comes(NOBODY));
        drop(first);
        assert!(second.comes(NOBODY));
    }

    #[test]
    fn who_gives_up_keeps_nobody_waiting() {
        let turns = Turns::default();
        let first = turns.enter(1, TURN_FROM);
        let gone = turns.enter(2, TURN_FROM);
        let mut behind = turns.enter(2, TURN_FROM);
        assert!(!behind.comes(NOBODY));
        drop(gone);
        assert!(behind.comes(NOBODY));
        drop((first, behind));
        assert!(!turns.enter(1, TURN_FROM).is_waiting());
    }
}
