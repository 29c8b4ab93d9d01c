//! Messages that are under way: their records, filled in as they go, until they are over and go into a ring. The
//! thread that writes the file copies those that have been under way for long, so that a process that is
//! killed, or waits for good, leaves what it waited for.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::OnceLock;

use super::record::{pack_span, Message, Moment, Outcome, Record, Words};
use super::ring::Line;

/// Messages that may be under way at a time: 1 MiB. One more is not followed, and counted as dropped.
const SLOTS: usize = 1 << 14;
/// Slots that are looked at for a free one.
const LOOKS: usize = 64;

/// A record. The first word is 0 while nobody has it, and 1 while it is being filled.
type Slot = [AtomicU64; 8];

static TABLE: OnceLock<Box<[Line]>> = OnceLock::new();

thread_local! {
    /// The slot to be looked at first.
    static HINT: Cell<u32> = const { Cell::new(u32::MAX) };
}

/// A message that is followed: the number of its slot and its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Followed(u64);

impl Followed {
    /// Nothing.
    pub const NONE: Followed = Followed(0);

    /// Whether it is any.
    #[inline]
    pub const fn is_any(self) -> bool {
        self.0 != 0
    }

    /// The message's number; 0: none.
    pub const fn id(self) -> u32 {
        (self.0 >> 32) as u32
    }

    /// Its slot, if it still has it.
    fn slot(self) -> Option<&'static Slot> {
        let slot = &TABLE
            .get()?
            .get((self.0 as u32).checked_sub(1)? as usize)?
            .0;
        let id = (slot[0].load(Ordering::Relaxed) >> 32) as u32;
        (id == self.id()).then_some(slot)
    }
}

/// Makes the table.
pub(super) fn start() {
    TABLE.get_or_init(|| (0..SLOTS).map(|_| Line::default()).collect());
}

/// A message is followed from now on. Its number is not 0.
pub(super) fn begin(message: &Message) -> Followed {
    let Some(table) = TABLE.get() else {
        return Followed::NONE;
    };
    let words = Record::Message(*message).encode();
    let hint = match HINT.get() {
        u32::MAX => message.id,
        hint => hint,
    };
    for look in 0..LOOKS {
        let place = (hint as usize).wrapping_add(look) % table.len();
        let slot = &table[place].0;
        let taken = slot[0].compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed);
        if taken.is_ok() {
            for (to, from) in slot.iter().zip(words).skip(1) {
                to.store(from, Ordering::Relaxed);
            }
            slot[0].store(words[0], Ordering::Release);
            HINT.set(place as u32 + 1);
            return Followed(u64::from(message.id) << 32 | (place as u64 + 1));
        }
    }
    Followed::NONE
}

/// A message has entered a state at a time. Only one thread changes a message at a time: it has it.
#[inline]
pub(super) fn enter(
    followed: Followed,
    at: u64,
    (state, protocol): (u8, u8),
    moment: Option<Moment>,
) {
    if let Some(slot) = followed.slot() {
        note(slot, at, (state, protocol), moment);
    }
}

/// As in `layout.rs`: state and protocol are in the first word, spans in the last two.
#[inline]
fn note(slot: &Slot, at: u64, (state, protocol): (u8, u8), moment: Option<Moment>) {
    let first = slot[0].load(Ordering::Relaxed);
    let first = first & !0xffff_0000 | u64::from(state) << 16 | u64::from(protocol) << 24;
    slot[0].store(first, Ordering::Relaxed);
    let Some(moment) = moment else { return };
    let (word, shift) = (6 + moment as usize / 2, 32 * (moment as u32 % 2));
    let before = slot[word].load(Ordering::Relaxed);
    // Packed bytes land a second time, where they belong.
    if before >> shift & 0xffff_ffff == 0 || moment == Moment::Landed {
        let span = pack_span(at.saturating_sub(slot[1].load(Ordering::Relaxed)));
        let kept = before & !(0xffff_ffff << shift);
        slot[word].store(kept | u64::from(span) << shift, Ordering::Relaxed);
    }
}

/// Changes anything of a message.
pub(super) fn update(followed: Followed, change: impl FnOnce(&mut Message)) {
    let Some(slot) = followed.slot() else { return };
    let before = load(slot);
    if let Some(Record::Message(mut message)) = Record::decode(&before) {
        change(&mut message);
        store_changed(slot, &before, &Record::Message(message).encode());
    }
}

/// The message is over: its record, and its slot is free.
pub(super) fn end(
    followed: Followed,
    at: u64,
    (state, protocol): (u8, u8),
    outcome: Outcome,
) -> Option<Words> {
    let slot = followed.slot()?;
    note(slot, at, (state, protocol), Some(Moment::Done));
    let mut words = load(slot);
    words[0] |= (outcome as u64) << 12;
    slot[0].store(0, Ordering::Release);
    // The next message of this thread gets it: it is in the processor's cache.
    HINT.set((followed.0 as u32).wrapping_sub(1));
    Some(words)
}

fn load(slot: &Slot) -> Words {
    std::array::from_fn(|word| slot[word].load(Ordering::Relaxed))
}

/// Most words stay as they are.
fn store_changed(slot: &Slot, before: &Words, after: &Words) {
    for (word, (from, to)) in before.iter().zip(after).enumerate() {
        if from != to {
            slot[word].store(*to, Ordering::Relaxed);
        }
    }
}

/// Those that are under way now.
pub(super) fn each(mut take: impl FnMut(&Message)) {
    for Line(slot) in TABLE.get().into_iter().flatten() {
        let first = slot[0].load(Ordering::Acquire);
        if first <= 1 {
            continue;
        }
        let words = load(slot);
        std::sync::atomic::fence(Ordering::Acquire);
        // Not if another message has it meanwhile.
        let is_same = slot[0].load(Ordering::Relaxed) >> 32 == first >> 32;
        if let (true, Some(Record::Message(message))) = (is_same, Record::decode(&words)) {
            take(&message);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::record::Side;
    use super::*;

    #[test]
    fn slots_are_found_again_and_given_back() {
        start();
        let message = |id| Message {
            id,
            nonce: u64::from(id),
            ..super::super::about(Side::Sender, 5)
        };
        // The table is that of all tests of this process: numbers that no other test has.
        let ids = 1_000_000..1_000_000 + SLOTS as u32 + 1;
        let followed: Vec<Followed> = ids.clone().map(|id| begin(&message(id))).collect();
        let (last, kept) = followed.split_last().expect("some");
        assert!(kept.iter().all(|followed| followed.is_any()));
        assert_eq!(*last, Followed::NONE);
        update(kept[3], |message| message.protocol = 9);
        let mut seen = 0;
        each(|message| {
            seen += usize::from(ids.contains(&message.id));
            assert_eq!(message.outcome, Outcome::UnderWay);
        });
        assert_eq!(seen, SLOTS);
        enter(kept[3], 70, (3, 8), Some(Moment::Moving));
        enter(kept[3], 80, (4, 9), Some(Moment::Moving));
        enter(kept[3], 90, (6, 9), Some(Moment::Landed));
        enter(kept[3], 95, (6, 9), Some(Moment::Landed));
        let ended = end(kept[3], 1 << 40, (7, 9), Outcome::Complete).expect("a message");
        let Some(Record::Message(ended)) = Record::decode(&ended) else {
            panic!("no message");
        };
        assert_eq!(
            (ended.state, ended.protocol, ended.nonce),
            (7, 9, 1_000_003)
        );
        assert_eq!(ended.after, [None, Some(70), Some(95), Some(1 << 40)]);
        assert_eq!(ended.outcome, Outcome::Complete);
        // Its number is no longer there, and the slot another message's.
        let other = begin(&message(1_000_003 + SLOTS as u32));
        assert!(other.is_any());
        update(kept[3], |_| panic!("it is over"));
        let is_over = |followed| end(followed, 0, (7, 0), Outcome::Complete).is_none();
        assert!(is_over(kept[3]));
        for followed in kept.iter().chain([&other]) {
            is_over(*followed);
        }
        each(|message| assert!(!ids.contains(&message.id)));
    }
}
