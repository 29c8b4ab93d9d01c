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

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::cuda::clock_ns;
use crate::engine::invite::Company;
use crate::node::Segment;
use crate::stats::{self, Counter};

/// Single messages of so many bytes are read in turns: 10 us and more each, beside which a launch by itself is little. Four H100s, each to
/// every other, times the speed without the library, at once and in turns: 3 MiB 1.14 to 1.16 and 1.07 to 1.10, 4 MiB 1.09 to 1.11 and 1.11 to
/// 1.19 (`docs/results/h100-x4-many.txt`, 10 and 12).
const SINGLE_FROM: u64 = 4 << 20;
/// Those of windows: several of one sender are launched together. The same, each launched by itself at once, and in turns (means of three
/// launches): windows of 4 of 1.5 MiB 0.99 and 1.04, of 2 MiB 0.98 and 1.10, of 2.5 MiB 0.99 and 1.12; of 8 1.06 and 1.07, 1.07 and 1.18, 1.07 and 1.20
/// (the same, 12; where processors are slower, windows of 4 0.97 and 0.98, 0.96 and 1.01, 0.94 and 1.04, but of 1.25 MiB 0.96 and 0.93).
pub const WINDOW_FROM: u64 = 1536 << 10;
/// Those of windows deeper than [`FEW`], whose batches are long as it is: of 16 of 1.5 MiB 1.14 and 1.01, of 2 MiB 1.09 and 1.21, of 2.5 MiB 1.09
/// and 1.22.
const DEEP_FROM: u64 = 2 << 20;
/// Windows of more messages are deep.
const FEW: u32 = 8;
/// So many bytes of one sender are read together. Four H100s, batches of 4, 6, 8 and 10 MiB: windows of 4 of 2 MiB 1.17, 1.06, 1.11 and 1.11, of 16
/// of 4 MiB 0.99, 1.01, 1.18 and 1.11 (the same, 12). 12 MiB have a twentieth more in windows of 16, and in those of 4 of 5 MiB 1.17 instead
/// of 1.26.
const TOGETHER_BYTES: u64 = 8 << 20;
/// While others wait a batch is launched behind one that is being read, so that it begins when that ends.
const AHEAD: usize = 2;
/// Two of so many bytes are not launched at once: they would be read at the same time, and what a launch costs is little beside them.
const ALONE_FROM: u64 = 48 << 20;
/// A message may wait this part of a nanosecond a byte, a fifth of the time that it takes, for one of another sender where nothing
/// is read yet: as long as others read from its own, which then has no more to give.
const HOLD_SHIFT: u32 = 11;
/// A sender whose messages have been passed over so often is next.
const PATIENCE: u32 = 32;

/// From how many bytes on messages of a window so deep are read in turns.
pub fn from(depth: u32) -> u64 {
    match depth {
        0 | 1 => SINGLE_FROM,
        2..=FEW => WINDOW_FROM,
        _ => DEEP_FROM,
    }
}

/// The messages of one sender that wait.
#[derive(Debug)]
struct Sender {
    rank: u32,
    /// Numbers and bytes of those, oldest first.
    waiting: VecDeque<(u64, u64)>,
    /// Batches of others that were read instead since it waits.
    passed_over: u32,
}

/// Messages of one sender that are read together.
#[derive(Debug)]
struct Batch {
    number: u64,
    rank: u32,
    /// Of all that were ever part of it.
    bytes: u64,
    /// How many those are.
    count: u32,
    /// How many of them are not over.
    reading: u32,
}

impl Batch {
    /// Whether one more of a sender is part of it.
    fn takes(&self, rank: u32, bytes: u64) -> bool {
        self.rank == rank && self.bytes.saturating_add(bytes) <= TOGETHER_BYTES
    }
}

#[derive(Debug, Default)]
struct State {
    senders: Vec<Sender>,
    /// What is being read, oldest first.
    batches: VecDeque<Batch>,
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

/// How the copy of a message begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Start {
    /// With its batch.
    InBatch,
    /// As the first of a batch, beside what is read before it: two copies have a lane each, and the second one starts up meanwhile.
    Beside,
    /// As the first of a batch, behind what is read before it: several copies of each of two lanes share the device's engines, and end late
    /// together.
    Behind,
}

/// Where a message stands.
#[derive(Clone, Copy, Debug)]
enum Place {
    /// It waits under this number.
    Waiting(u64),
    /// It is read, as part of the batch of this number.
    Reading { batch: u64, start: Start },
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
        let state = self.0.state.lock();
        let mut senders = state.senders.iter();
        senders.any(|sender| sender.rank == rank)
    }

    /// A message is to be read from a sender: at once, if nobody else's is being read or waits, and none of its own. `readers`: how
    /// many others read from a rank.
    pub fn enter(&self, rank: u32, bytes: u64, readers: &dyn Fn(u32) -> u32) -> Turn {
        let mut state = self.0.state.lock();
        state.company.note_other(rank);
        let is_chosen = || {
            state.company.are_several()
                && !state.joins(rank, bytes)
                && (state.is_full(bytes) || readers(rank) > 0)
        };
        let must_wait = !state.senders.is_empty()
            || state.batches.iter().any(|batch| batch.rank != rank)
            || is_chosen();
        stats::add(Counter::TurnsWaited, u64::from(must_wait));
        let place = match must_wait {
            true => Place::Waiting(state.wait(rank, bytes)),
            false => self.0.begin(&mut state, rank, bytes),
        };
        Turn {
            shared: Arc::clone(&self.0),
            rank,
            bytes,
            place,
            since_ns: if must_wait { clock_ns() } else { 0 },
        }
    }
}

impl State {
    /// One more message of a sender waits. Returns its number.
    fn wait(&mut self, rank: u32, bytes: u64) -> u64 {
        self.number += 1;
        let row = (self.number, bytes);
        match self.senders.iter_mut().find(|one| one.rank == rank) {
            Some(sender) => sender.waiting.push_back(row),
            None => self.senders.push(Sender {
                rank,
                waiting: VecDeque::from([row]),
                passed_over: 0,
            }),
        }
        self.number
    }

    /// A message waits no more. Those behind it still do.
    fn wait_no_more(&mut self, rank: u32, number: u64) {
        if let Some(sender) = self.senders.iter_mut().find(|one| one.rank == rank) {
            sender.waiting.retain(|waiting| waiting.0 != number);
        }
        self.senders.retain(|one| !one.waiting.is_empty());
    }

    /// Whether a message is part of the batch that was begun last.
    fn joins(&self, rank: u32, bytes: u64) -> bool {
        let last = self.batches.back();
        last.is_some_and(|last| last.takes(rank, bytes))
    }

    /// Whether the first message of a sender that waits is.
    fn goes_on(&self, sender: &Sender) -> bool {
        let first = sender.waiting.front();
        first.is_some_and(|(_, bytes)| self.joins(sender.rank, *bytes))
    }

    /// Whether no further batch is launched whose first message has so many bytes.
    fn is_full(&self, bytes: u64) -> bool {
        self.batches.len() >= if bytes < ALONE_FROM { AHEAD } else { 1 }
    }

    /// Whose message is next. `readers`: how many others read from a rank.
    fn next(&self, readers: &dyn Fn(u32) -> u32) -> Option<u32> {
        let longest = self.senders.iter().max_by_key(|one| one.passed_over);
        if let Some(overdue) = longest.filter(|one| one.passed_over >= PATIENCE) {
            return Some(overdue.rank);
        }
        if let Some(same) = self.senders.iter().find(|one| self.goes_on(one)) {
            return Some(same.rank);
        }
        // Of several alike the current one goes on, and after it the one that has waited longest.
        let current = self.batches.back().map(|last| last.rank);
        let key = |one: &&Sender| {
            let is_another = current != Some(one.rank);
            let since = one.waiting.front().map(|(number, _)| *number);
            (readers(one.rank), is_another, since)
        };
        self.senders.iter().min_by_key(key).map(|one| one.rank)
    }
}

impl Shared {
    /// A message of this sender is read from now on.
    fn begin(&self, state: &mut State, rank: u32, bytes: u64) -> Place {
        if let Some(last) = state
            .batches
            .back_mut()
            .filter(|last| last.takes(rank, bytes))
        {
            last.bytes += bytes;
            last.count += 1;
            last.reading += 1;
            return Place::Reading {
                batch: last.number,
                start: Start::InBatch,
            };
        }
        let start = match state.batches.iter().any(|batch| batch.count > 1) {
            true => Start::Behind,
            false => Start::Beside,
        };
        state.number += 1;
        let number = state.number;
        state.batches.push_back(Batch {
            number,
            rank,
            bytes,
            count: 1,
            reading: 1,
        });
        self.say(Some(rank));
        for other in &mut state.senders {
            other.passed_over = match other.rank == rank {
                true => 0,
                false => other.passed_over + 1,
            };
        }
        Place::Reading {
            batch: number,
            start,
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
        let state = self.shared.state.lock();
        let own = state.senders.iter().find(|one| one.rank == self.rank);
        own.is_some_and(|own| state.goes_on(own))
    }

    /// Whether it is to be read now. `readers`: how many others read from a rank.
    pub fn comes(&mut self, readers: &dyn Fn(u32) -> u32) -> bool {
        let Place::Waiting(number) = self.place else {
            return true;
        };
        let mut state = self.shared.state.lock();
        let own = state.senders.iter().find(|one| one.rank == self.rank);
        let first = own.and_then(|own| own.waiting.front());
        let is_first = first.is_some_and(|(first, _)| *first == number);
        let has_room = || state.joins(self.rank, self.bytes) || !state.is_full(self.bytes);
        if !is_first || !has_room() || state.next(readers) != Some(self.rank) {
            return false;
        }
        let may_hold = || clock_ns().saturating_sub(self.since_ns) < self.bytes >> HOLD_SHIFT;
        if state.batches.is_empty() && readers(self.rank) > 0 && may_hold() {
            return false;
        }
        state.wait_no_more(self.rank, number);
        self.place = self.shared.begin(&mut state, self.rank, self.bytes);
        true
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.shared.state.lock();
        match self.place {
            Place::Waiting(number) => state.wait_no_more(self.rank, number),
            Place::Reading { batch, .. } => {
                let mut batches = state.batches.iter_mut();
                if let Some(batch) = batches.find(|one| one.number == batch) {
                    batch.reading -= 1;
                }
                state.batches.retain(|one| one.reading > 0);
                if state.batches.is_empty() {
                    self.shared.say(None);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
