//! Whose long messages are read first where several ranks send to this one over a switch.
//!
//! All that comes to a GPU over a switch comes by one port, and what is read from a GPU leaves by one. A GPU that reads from
//! several others does so from one after the other, as its engines see fit; where each reads from each, two read from the same one
//! while nobody reads from another, half of the time (four H200s: a third of what they can do is lost). So long messages of
//! several senders are read in turns, and the next one is a message of that sender from which the fewest others read.
//! Which one that is each rank says in its segment. It is said without any order among ranks: two may still choose the same
//! one, which costs them the time of a message.
//!
//! Where a rank has read from several of late, that is so from the first message on: all of a window of whoever happened to send
//! first would be read before anybody chooses (a model: 0.72 of what the ports carry, 0.89 so, and 0.96 where also the first is one
//! of whom nobody reads).

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::cuda::clock_ns;
use crate::engine::invite::Company;
use crate::node::Segment;
use crate::stats::{self, Counter};

/// Messages of so many bytes are read in turns: 8 us and more each, beside which a launch by itself is little. Four H100s, each to every
/// other in windows of 4 and 16, times the speed without the library, from 6 MiB on and from there: 3 MiB 1.00 and 1.14, 1.07 and 1.05; 4 MiB
/// 0.98 and 1.23, 1.02 and 1.15 (`docs/results/h100-x4-many.txt`, 10).
pub const TURN_FROM: u64 = 3 << 20;
/// While others wait a message is launched behind one that is being read, so that it begins when that ends.
const AHEAD: u32 = 2;
/// Two of so many bytes are not launched at once: they would be read at the same time, and what a launch costs is little beside them.
const ALONE_FROM: u64 = 48 << 20;
/// A message may wait this part of a nanosecond a byte, a fifth of the time that it takes, for one of another sender where nothing
/// is read yet: as long as others read from its own, which then has no more to give.
const HOLD_SHIFT: u32 = 11;
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
    /// From whom has been read of late.
    company: Company,
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
    /// Since when, by [`clock_ns`].
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
        let state = self.0.state.lock();
        let mut senders = state.senders.iter();
        senders.any(|sender| sender.rank == rank && !sender.waiting.is_empty())
    }

    /// A message is to be read from a sender: at once, if nobody else's is being read or waits, and none of its own. `readers`: how
    /// many others read from a rank.
    pub fn enter(&self, rank: u32, bytes: u64, readers: &dyn Fn(u32) -> u32) -> Turn {
        let mut state = self.0.state.lock();
        let is_in_the_way =
            |one: &Sender| !one.waiting.is_empty() || (one.rank != rank && one.reading > 0);
        state.company.note_other(rank);
        let is_chosen =
            || state.company.are_several() && (state.is_full(bytes) || readers(rank) > 0);
        let must_wait = state.senders.iter().any(is_in_the_way) || is_chosen();
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
            since_ns: number.map_or(0, |_| clock_ns()),
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

    /// Whether no further message of so many bytes is launched.
    fn is_full(&self, bytes: u64) -> bool {
        let reading: u32 = self.senders.iter().map(|one| one.reading).sum();
        reading >= if bytes < ALONE_FROM { AHEAD } else { 1 }
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
        let is_first = state.sender(self.rank).waiting.front() == Some(&number);
        if !is_first || state.is_full(self.bytes) || state.next(readers) != Some(self.rank) {
            return false;
        }
        let is_idle = state.senders.iter().all(|one| one.reading == 0);
        let may_hold = || clock_ns().saturating_sub(self.since_ns) < self.bytes >> HOLD_SHIFT;
        if is_idle && readers(self.rank) > 0 && may_hold() {
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
        let all: Vec<Turn> = (0..16).map(|_| turns.enter(3, TURN_FROM, NOBODY)).collect();
        assert!(all.iter().all(|turn| !turn.is_waiting()));
        drop(all);
        assert!(
            !turns.enter(4, TURN_FROM, NOBODY).is_waiting(),
            "nothing is read any more"
        );
    }

    #[test]
    fn the_next_is_of_whom_the_fewest_read() {
        let turns = Turns::default();
        let first = turns.enter(1, TURN_FROM, NOBODY);
        let mut second: Vec<Turn> = (0..2).map(|_| turns.enter(2, TURN_FROM, NOBODY)).collect();
        let mut third = turns.enter(3, TURN_FROM, NOBODY);
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
        let first = turns.enter(1, TURN_FROM, NOBODY);
        let mut second = turns.enter(2, TURN_FROM, NOBODY);
        assert!(turns.are_waiting(2) && !turns.are_waiting(1));
        // Of the first as well: they take turns from now on.
        let mut again = turns.enter(1, TURN_FROM, NOBODY);
        assert!(again.is_waiting());
        assert!(again.comes(NOBODY), "its turn goes on");
        drop((first, again));
        assert!(second.comes(NOBODY));
        drop(second);
        assert!(!turns.enter(5, TURN_FROM, NOBODY).is_waiting());
    }

    #[test]
    fn nobody_is_passed_over_for_ever() {
        let turns = Turns::default();
        let mut reading = VecDeque::from([turns.enter(1, TURN_FROM, NOBODY)]);
        let mut waiting = turns.enter(2, TURN_FROM, NOBODY);
        let of_two = |rank: u32| 3 * u32::from(rank == 2);
        let mut others = 0;
        while !waiting.comes(&of_two) {
            let mut next = turns.enter(1, TURN_FROM, NOBODY);
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
        drop((
            turns.enter(1, TURN_FROM, NOBODY),
            turns.enter(2, TURN_FROM, NOBODY),
        ));
        let mut window: Vec<Turn> = (0..4).map(|_| turns.enter(1, TURN_FROM, NOBODY)).collect();
        let waiting: Vec<bool> = window.iter().map(Turn::is_waiting).collect();
        assert_eq!(waiting, [false, false, true, true]);
        let mut other = turns.enter(2, TURN_FROM, NOBODY);
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
        let mut alone = turns.enter(1, TURN_FROM, &of_one);
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
        let first = turns.enter(1, TURN_FROM, NOBODY);
        let gone = turns.enter(2, TURN_FROM, NOBODY);
        let mut behind = turns.enter(2, TURN_FROM, NOBODY);
        assert!(!behind.comes(NOBODY));
        drop(gone);
        assert!(behind.comes(NOBODY));
        drop((first, behind));
        assert!(!turns.enter(1, TURN_FROM, NOBODY).is_waiting());
    }
}
