//! RTR: a receiver tells the sender about a receive before the message is sent. The sender then writes to the
//! buffer at once, before its message is matched (a rendezvous begun by the receiver).
//!
//! An RTR lies in the receiver's segment, one line for each stream that may have one. It names the message
//! that was received last, so that the sender knows that the message it is about to send is the next of the
//! stream, which this receive must match. The RTR may leave out the beginning of the message, which then
//! comes as the receiver asks for it.
//!
//! ```text
//!         receiver            sender
//! Free ───open──▶ Open ───take──▶ Taken ───land──▶ Landed     what it was to write is in the buffer
//!   ▲               │               └─────refuse──▶ Refused   nothing is written to it any more
//!   └─withdraw──────┘
//!   └─close (receiver): from any state
//! ```

use super::map::will_write_at;
use super::slot::put;
use super::staged_part::{StagedPartError, Target, TARGET_WORDS};
use super::{digest, mix};
use std::sync::atomic::{fence, AtomicU64, AtomicUsize, Ordering};

/// Where the RTR is that this process took last.
static LAST_TAKEN: AtomicUsize = AtomicUsize::new(0);

/// Sender: is about to look for an RTR, mostly at the same place as the last time. This fetches the line that
/// the receiver has written there while the message is looked at.
#[inline]
pub fn expect() {
    let address = LAST_TAKEN.load(Ordering::Relaxed);
    if address != 0 {
        will_write_at(address);
    }
}

/// Lines for the RTRs of one rank.
pub const RTRS: usize = 64;

const STATE_BITS: u32 = 3;
const STATE_MASK: u64 = (1 << STATE_BITS) - 1;
/// The part of a message that is left out is a multiple of so many bytes, and less than [`REST_UNITS`] of
/// these.
const REST_UNIT: u64 = 64 << 10;
const REST_SHIFT: u32 = 48;
const REST_UNITS: u64 = 1 << (u64::BITS - REST_SHIFT);
/// There is no RTR, but one will be sent for the next receive.
const SOON: u64 = STATE_MASK;

/// The state of an RTR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum RtrState {
    /// The sender may take it.
    Open = 1,
    /// The sender is writing to the buffer.
    Taken = 2,
    /// The sender has written what it was to write.
    Landed = 3,
    /// The sender could not write it, and writes no more.
    Refused = 4,
}

/// The receive of an RTR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Waiting {
    /// Identity of the communicator.
    pub communicator: u64,
    /// World rank of the sender.
    pub source: u32,
    /// Tag.
    pub tag: i32,
    /// Nonce of the message of the same stream that was received last.
    pub after: u64,
    /// Length of the buffer: the message must be as long.
    pub bytes: u64,
    /// Where it begins in its allocation.
    pub offset: u64,
    /// Bytes at the beginning of the message that the sender does not write: see [`Waiting::leaving`].
    pub rest: u64,
    /// CU_POINTER_ATTRIBUTE_BUFFER_ID of the allocation.
    pub buffer_id: u64,
}

impl Waiting {
    /// The same receive, but the sender leaves out so much of the beginning of the message, or somewhat less.
    /// `None` if an RTR cannot say that.
    pub fn leaving(self, rest: u64) -> Option<Waiting> {
        let rest = rest / REST_UNIT * REST_UNIT;
        let is_told = rest < self.bytes.max(1)
            && rest / REST_UNIT < REST_UNITS
            && self.offset >> REST_SHIFT == 0;
        is_told.then_some(Waiting { rest, ..self })
    }

    fn words(&self) -> [u64; 6] {
        [
            self.communicator,
            u64::from(self.source) << 32 | u64::from(self.tag as u32),
            self.after,
            self.bytes,
            self.offset | (self.rest / REST_UNIT) << REST_SHIFT,
            self.buffer_id,
        ]
    }

    /// The line for this stream, at sender and receiver.
    pub fn line(&self) -> u32 {
        let words = self.words();
        (mix(words[0] ^ mix(words[1])) >> 32) as u32 % RTRS as u32
    }
}

/// Names an RTR of a receiver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RtrId {
    /// Its line.
    pub line: u32,
    /// The tag of its present use, which is never used again.
    pub tag: u64,
    /// How much of the beginning of the message the sender leaves out, bytes.
    pub rest: u64,
}

/// An RTR as it lies in shared memory. The receiver always writes the first line; it writes the second only
/// if the allocation is another one.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Rtr {
    /// Tag and state.
    word: AtomicU64,
    waiting: [AtomicU64; 6],
    digest: AtomicU64,
    target: [AtomicU64; TARGET_WORDS],
}

impl Rtr {
    /// Whether the receiver may open it.
    pub(super) fn is_free(&self) -> bool {
        matches!(self.word.load(Ordering::Relaxed), 0 | SOON)
    }

    /// Receiver: an RTR will be sent for the next receive of the stream, too. The sender may wait a moment
    /// for it.
    pub(super) fn promise(&self) {
        let order = (Ordering::Release, Ordering::Relaxed);
        // Fails if it is open for another stream.
        let _ = self.word.compare_exchange(0, SOON, order.0, order.1);
    }

    /// Sender: whether an RTR will be sent soon.
    pub fn is_promised(&self) -> bool {
        self.word.load(Ordering::Relaxed) == SOON
    }

    /// Receiver: sends an RTR for a receive. The target names its allocation.
    pub(super) fn open(&self, tag: u64, waiting: &Waiting, target: &Target) {
        let relaxed = Ordering::Relaxed;
        self.word.store(0, relaxed);
        fence(Ordering::Release);
        let of_allocation = Target {
            offset: 0,
            ..*target
        };
        // Words that stay the same stay in the sender's cache.
        let words = of_allocation.words(target.buffer_id);
        let places = self.target.iter().zip(words);
        places.for_each(|(place, word)| put(place, word));
        let words = waiting.words();
        let places = self.waiting.iter().zip(words);
        places.for_each(|(place, word)| place.store(word, relaxed));
        self.digest.store(digest_of(tag, &words), relaxed);
        self.word
            .store(pack(tag, RtrState::Open), Ordering::Release);
    }

    /// Sender: the tag of an RTR that is open and is about this receive, as far as the sender knows it. The
    /// receiver decides the offset, the allocation and what is left out.
    pub fn find(&self, expected: &Waiting) -> Option<(u64, Waiting)> {
        let word = self.word.load(Ordering::Acquire);
        if word & STATE_MASK != RtrState::Open as u64 {
            return None;
        }
        let tag = word >> STATE_BITS;
        let words: [u64; 6] = std::array::from_fn(|at| self.waiting[at].load(Ordering::Relaxed));
        let found = Waiting {
            offset: words[4] & ((1 << REST_SHIFT) - 1),
            rest: (words[4] >> REST_SHIFT) * REST_UNIT,
            buffer_id: words[5],
            ..*expected
        };
        let is_it = found.words() == words;
        let is_whole = self.digest.load(Ordering::Relaxed) == digest_of(tag, &words);
        (is_it && is_whole).then_some((tag, found))
    }

    /// Sender: the receiver's buffer. Read it before taking the RTR.
    pub fn target(&self, waiting: &Waiting) -> Result<Target, StagedPartError> {
        let words = std::array::from_fn(|at| self.target[at].load(Ordering::Relaxed));
        let target = Target::from_words(&words, waiting.buffer_id)?;
        Ok(Target {
            offset: waiting.offset,
            ..target
        })
    }

    /// Sender: takes the RTR, to write to the buffer. False if the receiver has withdrawn it.
    pub fn take(&self, tag: u64) -> bool {
        LAST_TAKEN.store(std::ptr::from_ref(self).addr(), Ordering::Relaxed);
        // What was read before belongs to this use, because no tag comes twice.
        self.swap(tag, RtrState::Open, RtrState::Taken)
    }

    /// Sender: has written what it was to write.
    pub fn land(&self, tag: u64) {
        self.swap(tag, RtrState::Taken, RtrState::Landed);
    }

    /// Sender: writes no more, and has not written all of it.
    pub fn refuse(&self, tag: u64) {
        self.swap(tag, RtrState::Taken, RtrState::Refused);
    }

    /// Receiver: withdraws the RTR. False if the sender has taken it, and may still write.
    pub(super) fn withdraw(&self, tag: u64) -> bool {
        let word = pack(tag, RtrState::Open);
        let order = (Ordering::AcqRel, Ordering::Acquire);
        match self.word.compare_exchange(word, 0, order.0, order.1) {
            Ok(_) => true,
            Err(now) if now == pack(tag, RtrState::Refused) => {
                self.close();
                true
            }
            Err(now) => now >> STATE_BITS != tag,
        }
    }

    /// Receiver: the state. `None` if somebody has written over it.
    pub fn state(&self, tag: u64) -> Option<RtrState> {
        let word = self.word.load(Ordering::Acquire);
        let all = [
            RtrState::Open,
            RtrState::Taken,
            RtrState::Landed,
            RtrState::Refused,
        ];
        all.into_iter().find(|state| word == pack(tag, *state))
    }

    /// Whether a sender is writing to the buffer, whatever the RTR is about.
    pub fn is_taken(&self) -> bool {
        self.word.load(Ordering::Acquire) & STATE_MASK == RtrState::Taken as u64
    }

    /// How much of the beginning of the message a sender leaves out, bytes, whatever the RTR is about.
    pub fn leaves(&self) -> u64 {
        (self.waiting[4].load(Ordering::Relaxed) >> REST_SHIFT) * REST_UNIT
    }

    /// Receiver: is done with it.
    pub(super) fn close(&self) {
        self.word.store(0, Ordering::Release);
    }

    fn swap(&self, tag: u64, from: RtrState, to: RtrState) -> bool {
        let (from, to) = (pack(tag, from), pack(tag, to));
        self.word
            .compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }
}

fn pack(tag: u64, state: RtrState) -> u64 {
    tag << STATE_BITS | state as u64
}

fn digest_of(tag: u64, words: &[u64; 6]) -> u64 {
    let mut all = [tag; 8];
    all[..6].copy_from_slice(words);
    digest(&all)
}

#[cfg(test)]
#[path = "rtr_tests.rs"]
mod tests;
