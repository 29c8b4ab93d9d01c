//! RTS: what travels as an MPI message in place of the payload. Its 61 bytes name a slot of the sender's
//! outbox.
//!
//! | bytes | field |
//! | --- | --- |
//! | 0..8 | magic |
//! | 8..16 | job hash |
//! | 16..20 | world rank of the sender |
//! | 20..24 | slot |
//! | 24..32 | nonce |
//! | 32..40 | sequence number |
//! | 40..48 | true length, bytes |
//! | 48..50 | protocol version |
//! | 50..57 | digest of what the slot says of the message |
//! | 57..61 | seal: a digest of the 57 bytes before, 32 bits |
//!
//! All numbers are little-endian. Sender and receiver are on one node, but may be of different builds.

use super::{PROTOCOL_VERSION, SLOTS_MAX};
use thiserror::Error;

/// Length of an RTS on the wire, bytes: a length that few programs send.
pub const RTS_BYTES: usize = 61;
/// The first 8 bytes: no text, no small numbers, no common float.
const MAGIC: [u8; 8] = [0xa7, b'A', b'n', b'B', 0xd3, 0x1c, 0xe9, 0x9b];
const SEAL_AT: usize = RTS_BYTES - 4;

/// The contents of an RTS.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rts {
    /// Hash of the job.
    pub job: u64,
    /// World rank of the sender.
    pub sender: u32,
    /// Slot in the sender's outbox.
    pub slot: u32,
    /// Nonce of the slot's present use.
    pub nonce: u64,
    /// Sequence number of the message.
    pub sequence: u64,
    /// True length of the message, bytes.
    pub length: u64,
    /// [`Message::digest`](super::Message::digest) of the slot's contents, 56 bits.
    pub digest: u64,
}

/// Why bytes are not taken for an RTS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Rejection {
    /// Ordinary data: it does not start like an RTS.
    #[error("not an RTS")]
    NotAnRts,
    /// It starts like an RTS, but cannot be believed.
    #[error("corrupt RTS: {0}")]
    Corrupt(Corruption),
}

/// What is wrong with an RTS.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
pub enum Corruption {
    /// The seal is not that of the bytes before it.
    #[error("checksum differs")]
    Checksum,
    /// Sent by a library that speaks another protocol.
    #[error("protocol version {0} is not {PROTOCOL_VERSION}")]
    Version(u16),
    /// Another job's.
    #[error("it belongs to another job")]
    Job,
    /// The nonce or slot is out of range.
    #[error("a field is out of range")]
    Range,
    /// The slot holds another message by now, or never held this one.
    #[error("its slot does not hold this message")]
    Stale,
    /// The slot holds the message, but not as its sender described it.
    #[error("its slot was written over")]
    Digest,
}

/// Whether what lies at `landed` begins like an RTS: a cheap look before [`Rts::decode`].
///
/// # Safety
/// At least [`RTS_BYTES`] bytes are readable there. They may be written meanwhile.
#[inline]
pub unsafe fn begins(landed: *const u8) -> bool {
    // SAFETY: the caller says that the bytes are readable; the checksum later tells a torn read.
    unsafe { landed.cast::<[u8; 8]>().read_volatile() == MAGIC }
}

/// Whether these bytes begin like an RTS.
pub fn is_likely(bytes: &[u8; RTS_BYTES]) -> bool {
    bytes.starts_with(&MAGIC)
}

/// The world rank that these bytes name as their sender, if they are an RTS.
pub fn sender(bytes: &[u8; RTS_BYTES]) -> u32 {
    u32_at(bytes, 16)
}

impl Rts {
    /// The bytes on the wire.
    pub fn encode(&self) -> [u8; RTS_BYTES] {
        // Built of whole words, because the seal is made of them: bytes that were just written one by one are
        // not read as words at once.
        let words = [
            u64::from_le_bytes(MAGIC),
            self.job,
            u64::from(self.sender) | u64::from(self.slot) << 32,
            self.nonce,
            self.sequence,
            self.length,
            u64::from(PROTOCOL_VERSION) | self.digest << 16,
            self.digest >> 48 & 0xff,
        ];
        let mut bytes = [0_u8; RTS_BYTES];
        let (whole, rest) = bytes.split_at_mut(56);
        let places = whole.chunks_exact_mut(8).zip(words);
        places.for_each(|(place, word)| place.copy_from_slice(&word.to_le_bytes()));
        let last = words[7] | u64::from(seal_of(&words)) << 8;
        rest.copy_from_slice(&last.to_le_bytes()[..5]);
        bytes
    }

    /// Reads what landed in a receive buffer. `job` is the receiver's own. The caller must then check what
    /// the RTS says of a slot against the sender's segment (`Peer::validate`).
    pub fn decode(bytes: &[u8], job: u64) -> Result<Self, Rejection> {
        let bytes: &[u8; RTS_BYTES] = bytes.try_into().map_err(|_| Rejection::NotAnRts)?;
        if bytes[..8] != MAGIC {
            return Err(Rejection::NotAnRts);
        }
        let found = Self::checked(bytes, job);
        found.map_err(Rejection::Corrupt)
    }

    fn checked(bytes: &[u8; RTS_BYTES], job: u64) -> Result<Self, Corruption> {
        if u32_at(bytes, SEAL_AT) != seal(bytes) {
            return Err(Corruption::Checksum);
        }
        let version = u16::from_le_bytes([bytes[48], bytes[49]]);
        if version != PROTOCOL_VERSION {
            return Err(Corruption::Version(version));
        }
        let found = Self {
            job: u64_at(bytes, 8),
            sender: sender(bytes),
            slot: u32_at(bytes, 20),
            nonce: u64_at(bytes, 24),
            sequence: u64_at(bytes, 32),
            length: u64_at(bytes, 40),
            digest: u64_at(bytes, 49) >> 8,
        };
        if found.job != job {
            return Err(Corruption::Job);
        }
        let is_nonce = super::slot::is_nonce(found.nonce);
        if found.slot >= SLOTS_MAX || !is_nonce {
            return Err(Corruption::Range);
        }
        Ok(found)
    }
}

/// The seal over all bytes but the last four. It tells a message that is not an RTS, or is not all there yet.
fn seal(bytes: &[u8; RTS_BYTES]) -> u32 {
    let mut words = [0; 8];
    for (word, at) in words.iter_mut().zip((0..).step_by(8)).take(7) {
        *word = u64_at(bytes, at);
    }
    words[7] = u64::from(bytes[SEAL_AT - 1]);
    seal_of(&words)
}

/// The same seal from words; the last one has one byte.
fn seal_of(words: &[u64; 8]) -> u32 {
    (super::digest(words) >> 32) as u32
}

fn u32_at(bytes: &[u8; RTS_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn u64_at(bytes: &[u8; RTS_BYTES], at: usize) -> u64 {
    u64::from(u32_at(bytes, at)) | (u64::from(u32_at(bytes, at + 4)) << 32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const JOB: u64 = 0x1234_5678_9abc_def0;

    fn any_rts() -> impl Strategy<Value = Rts> {
        let words = (
            any::<u32>(),
            0..SLOTS_MAX,
            1..u64::MAX >> 8,
            any::<u64>(),
            any::<u64>(),
            0..u64::MAX >> 8,
        );
        words.prop_map(|(sender, slot, nonce, sequence, length, digest)| Rts {
            job: JOB,
            sender,
            slot,
            nonce: nonce << 8,
            sequence,
            length,
            digest,
        })
    }

    /// The seal by numbers of 128 bits and long multiplication, word after word, without the code under test.
    fn sealed_as(bytes: &[u8]) -> u32 {
        fn mix(mut z: u64) -> u64 {
            for (shift, factor) in [(30, 0xbf58_476d_1ce4_e5b9), (27, 0x94d0_49bb_1331_11eb)] {
                z = (z ^ (z >> shift)).wrapping_mul(factor);
            }
            z ^ (z >> 31)
        }
        let mut padded = bytes[..57].to_vec();
        padded.resize(64, 0);
        let keyed: Vec<u64> = (0..8)
            .map(|at| {
                let word = padded[8 * at..8 * at + 8].iter().rev();
                let word = word.fold(0, |word, &byte| word << 8 | u64::from(byte));
                word ^ mix((at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15))
            })
            .collect();
        let mut sum = 0_u64;
        for pair in keyed.chunks(2) {
            let mut product = 0_u128;
            for bit in 0..64 {
                if pair[1] >> bit & 1 == 1 {
                    product += u128::from(pair[0]) << bit;
                }
            }
            sum = sum.wrapping_add((product >> 64) as u64 ^ product as u64);
        }
        (mix(sum) >> 32) as u32
    }

    fn resealed(mut bytes: [u8; RTS_BYTES]) -> [u8; RTS_BYTES] {
        let seal = sealed_as(&bytes);
        bytes[57..].copy_from_slice(&seal.to_le_bytes());
        bytes
    }

    proptest! {
        #[test]
        fn survives_the_wire(rts in any_rts()) {
            prop_assert_eq!(Rts::decode(&rts.encode(), JOB), Ok(rts));
            prop_assert_eq!(resealed(rts.encode()), rts.encode());
        }

        #[test]
        fn every_flipped_bit_is_seen(rts in any_rts(), bit in 0..RTS_BYTES * 8) {
            let mut bytes = rts.encode();
            bytes[bit / 8] ^= 1 << (bit % 8);
            let expected = match bit / 8 {
                0..8 => Rejection::NotAnRts,
                _ => Rejection::Corrupt(Corruption::Checksum),
            };
            prop_assert_eq!(Rts::decode(&bytes, JOB), Err(expected));
        }

        #[test]
        fn other_data_is_not_an_rts(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            prop_assert_eq!(Rts::decode(&bytes, JOB), Err(Rejection::NotAnRts));
        }

        #[test]
        fn other_jobs_are_refused(rts in any_rts(), job in any::<u64>()) {
            prop_assume!(job != JOB);
            let refused = Err(Rejection::Corrupt(Corruption::Job));
            prop_assert_eq!(Rts::decode(&rts.encode(), job), refused);
        }

        #[test]
        fn nothing_crashes_behind_a_good_checksum(rest in proptest::collection::vec(any::<u8>(), 49)) {
            let mut bytes = [0_u8; RTS_BYTES];
            bytes[..8].copy_from_slice(&MAGIC);
            bytes[8..57].copy_from_slice(&rest);
            let job = u64_at(&bytes, 8);
            if let Ok(rts) = Rts::decode(&resealed(bytes), job) {
                prop_assert!(rts.slot < SLOTS_MAX);
            }
        }
    }

    #[test]
    fn the_seal_has_its_check_value() {
        // By numbers of any length (Python), from the words of these bytes.
        let bytes: [u8; RTS_BYTES] = std::array::from_fn(|at| at as u8 + 1);
        assert_eq!(seal(&bytes), 0x6e4d_1966);
    }

    #[test]
    fn fields_out_of_range_are_refused() {
        let good = Rts {
            job: JOB,
            sender: 1,
            slot: 2,
            nonce: 3 << 8,
            sequence: 4,
            length: 5,
            digest: 6,
        };
        let refused = |bytes: [u8; RTS_BYTES]| match Rts::decode(&resealed(bytes), JOB) {
            Err(Rejection::Corrupt(corruption)) => corruption,
            other => panic!("{other:?}"),
        };
        let slot = Rts {
            slot: SLOTS_MAX,
            ..good
        };
        assert_eq!(refused(slot.encode()), Corruption::Range);
        for nonce in [0, 0x101] {
            assert_eq!(refused(Rts { nonce, ..good }.encode()), Corruption::Range);
        }
        let mut bytes = good.encode();
        bytes[48] = 0x77;
        assert_eq!(refused(bytes), Corruption::Version(0x77));
        assert_eq!(
            Rts::decode(&good.encode()[..60], JOB),
            Err(Rejection::NotAnRts)
        );
    }
}
