//! One message in its sender's outbox: what it is, how far it has got, and a small ring for its pipeline.
//!
//! The state is one word with the nonce of the slot's present use. So every transition is a compare-and-swap
//! that fails for a stale RTS, however late it comes.
//!
//! ```text
//!            owner               receiver: reads the buffer itself
//!   Free ───post──▶ Posted ───────claim──────────▶ Claimed ───send_ats─────▶ Done
//!                     │ │                             │                       ▲
//!                     │ │                             ├─want_gpu─▶ WantGpu ───┤
//!                     │ │                             ▼               │       │
//!                     │ └──want_host (receiver)──▶ WantHost ◀─want_host       │
//!                     │                               └──────send_ats─────────┤
//!                     ├───retire (owner: payload is in host memory)─▶ Eager ──┘
//!                     └───cancel (owner; from Eager too)─▶ Cancelled
//!   want_host: from WantGpu by either side, the payload then comes anew
//!   fail (either side): Posted, Claimed, WantGpu, WantHost, Eager ─▶ Failed
//!   free (owner only): any state ─▶ Free
//! ```

use super::ring::{Ring, RingCells};
use super::DIGEST_WORDS;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

/// Size of a slot, bytes.
pub const SLOT_BYTES: usize = 256;

/// Where a message stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum SlotState {
    /// Not in use.
    Free = 0,
    /// The receiver may read the message. Set by the owner.
    Posted = 1,
    /// The receiver reads the sender's buffer itself. Set by the receiver.
    Claimed = 2,
    /// The receiver waits for the owner to bring the payload through the pipeline in host memory. Set by the
    /// receiver.
    WantHost = 3,
    /// Eager: the payload lies in host memory (all of it is in the ring). The buffer is the user's again. Set
    /// by the owner.
    Eager = 4,
    /// The receiver has sent the ATS: it has all it wanted.
    Done = 5,
    /// The message cannot be received; the error code says why. Set by either side.
    Failed = 6,
    /// Cancelled before it was received. Set by the owner.
    Cancelled = 7,
    /// The receiver waits for the owner to bring the payload through the pipeline in memory of the owner's
    /// GPU. Set by the receiver.
    WantGpu = 8,
}

impl SlotState {
    fn from_bits(bits: u8) -> Option<Self> {
        const ALL: [SlotState; 9] = [
            SlotState::Free,
            SlotState::Posted,
            SlotState::Claimed,
            SlotState::WantHost,
            SlotState::Eager,
            SlotState::Done,
            SlotState::Failed,
            SlotState::Cancelled,
            SlotState::WantGpu,
        ];
        ALL.get(usize::from(bits)).copied()
    }

    /// True once the owner may free the slot and complete its send.
    pub const fn is_final(self) -> bool {
        matches!(
            self,
            SlotState::Done | SlotState::Failed | SlotState::Cancelled
        )
    }
}

/// Why a transition did not happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refused {
    /// The slot is in another state, from which this transition does not lead.
    State(SlotState),
    /// The slot is not (or no longer) about the message with this nonce.
    Stale,
}

pub(super) const STATE_MASK: u64 = 0xff;

/// Nonces leave the low 8 bits of the word to the state, and are never 0.
pub const fn is_nonce(value: u64) -> bool {
    value != 0 && value & STATE_MASK == 0
}

/// What a sender writes of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Message {
    /// Identity of the communicator.
    pub communicator: u64,
    /// World rank of the sender.
    pub source: u32,
    /// World rank of the receiver.
    pub destination: u32,
    /// Tag.
    pub tag: i32,
    /// Sequence number.
    pub sequence: u64,
    /// True length, bytes.
    pub length: u64,
    /// Flags of the engine.
    pub flags: u32,
    /// UUID of the GPU that holds the buffer.
    pub device: [u8; 16],
    /// CU_POINTER_ATTRIBUTE_BUFFER_ID: distinguishes an address that was freed and allocated anew.
    pub buffer_id: u64,
    /// Base address of the allocation.
    pub base: u64,
    /// Size of the allocation, bytes.
    pub allocation_bytes: u64,
    /// Where the message starts in the allocation, bytes.
    pub offset: u64,
    /// CUDA IPC handle of the allocation.
    pub ipc_handle: [u8; 64],
    /// For the engine's own use.
    pub extra: [u64; 2],
}

impl Message {
    /// A digest of all of it, 56 bits. It travels in the RTS, out of reach of a process that writes to the
    /// segment.
    pub fn digest(&self) -> u64 {
        let numbers = [
            self.communicator,
            u64::from(self.source) << 32 | u64::from(self.destination),
            u64::from(self.tag as u32),
            self.sequence,
            self.length,
            u64::from(self.flags),
            self.buffer_id,
            self.base,
            self.allocation_bytes,
            self.offset,
            self.extra[0],
            self.extra[1],
        ];
        let mut words = [0; DIGEST_WORDS];
        words[..numbers.len()].copy_from_slice(&numbers);
        let bytes = [&self.device[..], &self.ipc_handle[..]];
        let chunks = bytes.iter().flat_map(|bytes| bytes.chunks_exact(8));
        for (word, chunk) in words[numbers.len()..].iter_mut().zip(chunks) {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(chunk);
            *word = u64::from_ne_bytes(bytes);
        }
        super::digest(&words) >> 8
    }
}

impl Default for Message {
    fn default() -> Self {
        Self {
            communicator: 0,
            source: 0,
            destination: 0,
            tag: 0,
            sequence: 0,
            length: 0,
            flags: 0,
            device: [0; 16],
            buffer_id: 0,
            base: 0,
            allocation_bytes: 0,
            offset: 0,
            ipc_handle: [0; 64],
            extra: [0; 2],
        }
    }
}

/// A slot as it lies in shared memory.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Slot {
    word: AtomicU64,
    communicator: AtomicU64,
    source: AtomicU32,
    destination: AtomicU32,
    tag: AtomicI32,
    flags: AtomicU32,
    sequence: AtomicU64,
    length: AtomicU64,
    error: AtomicI32,
    buffer_id: AtomicU64,
    device: [AtomicU64; 2],
    base: AtomicU64,
    allocation_bytes: AtomicU64,
    offset: AtomicU64,
    extra: [AtomicU64; 2],
    ipc_handle: [AtomicU64; 8],
    ring: RingCells,
    /// The offer that the receiver has made, see `Slot::ask`.
    asked: AtomicU64,
}

super::map::shared!(Slot);

const _: () = assert!(size_of::<Slot>() == SLOT_BYTES);

impl Slot {
    /// The state, if the slot is (still) about the message with this nonce.
    pub fn state(&self, nonce: u64) -> Result<SlotState, Refused> {
        split(self.word.load(Ordering::Acquire), nonce)
    }

    /// Nonce of the present use; `None` while free.
    pub fn nonce(&self) -> Option<u64> {
        Some(self.word.load(Ordering::Acquire) & !STATE_MASK).filter(|&nonce| nonce != 0)
    }

    /// Owner: makes the message visible under a fresh nonce. Called through `Segment::post`.
    pub(super) fn post(&self, nonce: u64, message: &Message) {
        debug_assert!(is_nonce(nonce));
        self.word.store(0, Ordering::Relaxed);
        std::sync::atomic::fence(Ordering::Release);
        self.store(message);
        self.error.store(0, Ordering::Relaxed);
        self.ring.reset(nonce);
        self.asked.store(0, Ordering::Relaxed);
        self.word
            .store(nonce | SlotState::Posted as u64, Ordering::Release);
    }

    /// Owner: takes the slot out of use, whatever its state. Later transitions by others are refused as
    /// stale.
    pub(super) fn clear(&self) {
        self.word.store(0, Ordering::Release);
    }

    /// Receiver: Posted → Claimed. From now on until the ATS the sender's buffer must stay as it is.
    pub fn claim(&self, nonce: u64) -> Result<(), Refused> {
        self.transition(nonce, &[SlotState::Posted], SlotState::Claimed)
    }

    /// Receiver: Posted or Claimed → WantHost. The owner fills the ring; the receiver then does not touch the
    /// buffer. Either side: WantGpu → WantHost, if memory of the GPU cannot be used after all.
    pub fn want_host(&self, nonce: u64) -> Result<(), Refused> {
        let from = [SlotState::Posted, SlotState::Claimed, SlotState::WantGpu];
        self.transition(nonce, &from, SlotState::WantHost)
    }

    /// Receiver: Posted or Claimed → WantGpu. Like [`Slot::want_host`], with memory of the owner's GPU.
    pub fn want_gpu(&self, nonce: u64) -> Result<(), Refused> {
        self.transition(
            nonce,
            &[SlotState::Claimed, SlotState::Posted],
            SlotState::WantGpu,
        )
    }

    /// Owner: Posted → Eager, once the whole payload is in the ring. Refused if the receiver was faster.
    pub fn retire(&self, nonce: u64) -> Result<(), Refused> {
        self.transition(nonce, &[SlotState::Posted], SlotState::Eager)
    }

    /// Receiver: sends the ATS. It has what it wants (also of a truncated or empty message): any live state →
    /// Done.
    pub fn send_ats(&self, nonce: u64) -> Result<(), Refused> {
        self.transition(nonce, &Self::LIVE, SlotState::Done)?;
        self.error.store(witness(nonce), Ordering::Release);
        Ok(())
    }

    /// Owner: like [`Slot::state`]. A message for which the receiver has sent the ATS is final even if
    /// somebody has written another state over that: nobody would ever change it again.
    pub fn settled(&self, nonce: u64) -> Result<SlotState, Refused> {
        let state = self.state(nonce)?;
        if !state.is_final() && self.error.load(Ordering::Acquire) == witness(nonce) {
            return Ok(SlotState::Done);
        }
        Ok(state)
    }

    /// Either side: fails the message: any live state → Failed, with a code for the other side.
    pub fn fail(&self, nonce: u64, code: i32) -> Result<(), Refused> {
        let state = self.state(nonce)?;
        if !Self::LIVE.contains(&state) {
            return Err(Refused::State(state));
        }
        // Written first, so that a side that sees Failed sees a code. Losing a race here changes the code
        // only.
        self.error.store(code, Ordering::Relaxed);
        self.transition(nonce, &Self::LIVE, SlotState::Failed)
    }

    /// Receiver: fails a message that it cannot read, whatever state somebody has written there.
    pub fn turn_down(&self, nonce: u64, code: i32) {
        let _ = self.fail(nonce, code);
        if self.state(nonce).is_ok() {
            self.error.store(witness(nonce), Ordering::Release);
        }
    }

    /// Owner: gives up its part: any live state but Claimed → Failed. A receiver that reads the buffer itself
    /// is not disturbed.
    pub fn refuse(&self, nonce: u64, code: i32) -> Result<(), Refused> {
        match self.state(nonce)? {
            SlotState::Posted | SlotState::WantGpu | SlotState::WantHost | SlotState::Eager => {}
            other => return Err(Refused::State(other)),
        }
        self.error.store(code, Ordering::Relaxed);
        let from = [
            SlotState::Posted,
            SlotState::WantGpu,
            SlotState::WantHost,
            SlotState::Eager,
        ];
        self.transition(nonce, &from, SlotState::Failed)
    }

    /// Owner: Posted or Eager → Cancelled, after MPI has said that the message that carries the RTS is
    /// cancelled.
    pub fn cancel(&self, nonce: u64) -> Result<(), Refused> {
        self.transition(
            nonce,
            &[SlotState::Posted, SlotState::Eager],
            SlotState::Cancelled,
        )
    }

    /// The code given with Failed.
    pub fn error_code(&self) -> i32 {
        self.error.load(Ordering::Relaxed)
    }

    /// The ring for the message with this nonce. Operations on it are refused once the slot is reused.
    pub fn ring(&self, nonce: u64) -> Ring<'_> {
        Ring::new(&self.ring, nonce)
    }

    pub(super) fn asked(&self) -> &AtomicU64 {
        &self.asked
    }

    /// True length of the message, bytes (for probes, which need no more).
    pub fn length(&self) -> u64 {
        self.length.load(Ordering::Relaxed)
    }

    const LIVE: [SlotState; 5] = [
        SlotState::Claimed,
        SlotState::Posted,
        SlotState::WantGpu,
        SlotState::WantHost,
        SlotState::Eager,
    ];

    /// A transition from any of these states, the likeliest first.
    fn transition(&self, nonce: u64, from: &[SlotState], to: SlotState) -> Result<(), Refused> {
        if !is_nonce(nonce) {
            return Err(Refused::Stale);
        }
        // We do not read the word first: the line would be fetched twice, once to be read and once to be
        // written.
        let (mut state, next) = (from[0], nonce | to as u64);
        // Bounded: a slot has few transitions, and each failure has seen one (or a stale nonce, which ends
        // the loop).
        while from.contains(&state) {
            let word = nonce | state as u64;
            let order = (Ordering::AcqRel, Ordering::Acquire);
            state = match self.word.compare_exchange(word, next, order.0, order.1) {
                Ok(_) => return Ok(()),
                Err(now) => split(now, nonce)?,
            };
        }
        Err(Refused::State(state))
    }

    /// The message, if the slot held it under this nonce from the first byte read to the last.
    pub fn read(&self, nonce: u64) -> Result<Message, Refused> {
        split(self.word.load(Ordering::Acquire), nonce)?;
        let message = self.load();
        std::sync::atomic::fence(Ordering::Acquire);
        split(self.word.load(Ordering::Relaxed), nonce)?;
        Ok(message)
    }

    /// Beyond the first line, words that stay the same from one message to the next are not written again.
    /// Those lines then stay in the caches of both sides, and neither side has to fetch them.
    fn store(&self, message: &Message) {
        let relaxed = Ordering::Relaxed;
        self.communicator.store(message.communicator, relaxed);
        self.source.store(message.source, relaxed);
        self.destination.store(message.destination, relaxed);
        self.tag.store(message.tag, relaxed);
        self.sequence.store(message.sequence, relaxed);
        self.length.store(message.length, relaxed);
        self.flags.store(message.flags, relaxed);
        self.buffer_id.store(message.buffer_id, relaxed);
        put(&self.base, message.base);
        put(&self.allocation_bytes, message.allocation_bytes);
        put(&self.offset, message.offset);
        store_bytes(&self.device, &message.device);
        store_bytes(&self.ipc_handle, &message.ipc_handle);
        put(&self.extra[0], message.extra[0]);
        put(&self.extra[1], message.extra[1]);
    }

    fn load(&self) -> Message {
        let relaxed = Ordering::Relaxed;
        let mut message = Message {
            communicator: self.communicator.load(relaxed),
            source: self.source.load(relaxed),
            destination: self.destination.load(relaxed),
            tag: self.tag.load(relaxed),
            sequence: self.sequence.load(relaxed),
            length: self.length.load(relaxed),
            flags: self.flags.load(relaxed),
            buffer_id: self.buffer_id.load(relaxed),
            base: self.base.load(relaxed),
            allocation_bytes: self.allocation_bytes.load(relaxed),
            offset: self.offset.load(relaxed),
            extra: [self.extra[0].load(relaxed), self.extra[1].load(relaxed)],
            ..Message::default()
        };
        load_bytes(&self.device, &mut message.device);
        load_bytes(&self.ipc_handle, &mut message.ipc_handle);
        message
    }
}

/// The value of the error code once the receiver has sent the ATS: no code of MPI's.
fn witness(nonce: u64) -> i32 {
    (super::mix(nonce) as u32 | 1 << 31) as i32
}

/// Writes a word, unless it is there already.
pub(super) fn put(word: &AtomicU64, value: u64) {
    if word.load(Ordering::Relaxed) != value {
        word.store(value, Ordering::Relaxed);
    }
}

/// Nonce and state of a word, if the nonce is the one expected.
fn split(word: u64, nonce: u64) -> Result<SlotState, Refused> {
    if !is_nonce(nonce) || word & !STATE_MASK != nonce {
        return Err(Refused::Stale);
    }
    SlotState::from_bits((word & STATE_MASK) as u8).ok_or(Refused::Stale)
}

fn store_bytes(words: &[AtomicU64], bytes: &[u8]) {
    for (word, chunk) in words.iter().zip(bytes.chunks_exact(8)) {
        let mut value = [0_u8; 8];
        value.copy_from_slice(chunk);
        put(word, u64::from_ne_bytes(value));
    }
}

fn load_bytes(words: &[AtomicU64], bytes: &mut [u8]) {
    for (word, chunk) in words.iter().zip(bytes.chunks_exact_mut(8)) {
        chunk.copy_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
    }
}

#[cfg(test)]
#[path = "slot_tests.rs"]
mod tests;
