//! Data that shows every way in which a message can arrive wrong: random, fresh in each iteration,
//! in a place of its own at an odd address, over poison that differs from it in every bit.

use std::ffi::c_int;
use std::hash::{BuildHasher, Hasher};

use super::buffer::Buffer;
use super::exchange::{Pair, Spot};

/// Bytes before and behind a message that must stay as they were.
const GUARD: usize = 64;
/// Messages start up to this many bytes past the start of their region.
const SHIFT: usize = 256;
/// All regions of one buffer together.
const BUDGET: usize = 1 << 30;
/// Data is made and compared in pieces of so many bytes, a multiple of 8: messages may be longer than half of the host's memory.
const PIECE: usize = 16 << 20;

/// Bytes that a message of this size takes in a buffer, with room for its shift and its guards.
pub fn region(bytes: usize) -> usize {
    (bytes + SHIFT + 2 * GUARD).next_multiple_of(256)
}

/// The window that fits: `wanted`, or what the regions of a buffer leave room for.
pub fn window(wanted: usize, bytes: usize) -> usize {
    wanted.min(BUDGET / region(bytes)).max(1)
}

/// A seed that nobody has used.
pub fn fresh_seed() -> u64 {
    // The standard library seeds each of these from the system's random numbers.
    std::collections::hash_map::RandomState::new()
        .build_hasher()
        .finish()
}

/// Fills a buffer with random data.
///
/// # Errors
/// What the driver reports.
pub fn fill_random(buffer: &Buffer, seed: u64) -> anyhow::Result<()> {
    let mut piece = vec![0u8; 1 << 20];
    let mut offset = 0;
    while offset < buffer.len() {
        let bytes = piece.len().min(buffer.len() - offset);
        random_bytes(mix(seed, offset as u64), &mut piece[..bytes]);
        buffer.write(offset, &piece[..bytes])?;
        offset += bytes;
    }
    Ok(())
}

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
fn splitmix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

fn mix(a: u64, b: u64) -> u64 {
    splitmix(a ^ splitmix(b))
}

/// Random bytes, the same for the same seed.
pub fn random_bytes(seed: u64, out: &mut [u8]) {
    random_bytes_at(seed, 0, out);
}

/// Those from a place on.
fn random_bytes_at(seed: u64, place: usize, out: &mut [u8]) {
    const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
    let mut state = seed.wrapping_add(STEP.wrapping_mul(place as u64 / 8));
    let mut next = || {
        state = state.wrapping_add(STEP);
        splitmix(state).to_le_bytes()
    };
    let mut out = out;
    if place % 8 != 0 {
        let word = &next()[place % 8..];
        let (begun, rest) = out.split_at_mut(word.len().min(out.len()));
        begun.copy_from_slice(&word[..begun.len()]);
        out = rest;
    }
    // Whole words apart from the rest: gigabytes of this are made for one comparison.
    let mut words = out.chunks_exact_mut(8);
    for word in &mut words {
        word.copy_from_slice(&next());
    }
    let rest = words.into_remainder();
    let bytes = rest.len();
    rest.copy_from_slice(&next()[..bytes]);
}

/// Where the messages of one iteration lie on this rank, and the seeds of their data.
pub struct Plan {
    /// Messages to send.
    pub out: Vec<Spot>,
    /// Messages to receive.
    pub into: Vec<Spot>,
    out_seeds: Vec<u64>,
    into_seeds: Vec<u64>,
    iteration: u32,
}

/// Makes and compares data.
pub struct Checker {
    seed: u64,
    reported: std::cell::Cell<u32>,
}

impl Checker {
    /// Data from a seed that both ranks share.
    pub fn new(seed: u64) -> Checker {
        Checker {
            seed,
            reported: std::cell::Cell::new(0),
        }
    }

    /// The seed.
    pub fn seed(&self) -> u64 {
        self.seed
    }

    /// The messages of one iteration.
    pub fn plan(&self, pair: &Pair<'_>, bytes: usize, window: usize, iteration: u32) -> Plan {
        let own = pair.mpi.rank;
        let [to, from] = pair.legs();
        let out: Vec<_> = to.into_iter().map(|rank| (own, rank)).collect();
        let into: Vec<_> = from.into_iter().map(|rank| (rank, own)).collect();
        self.plan_of([&out, &into], bytes, window, iteration)
    }

    /// Where the peer expects the messages of this rank.
    pub fn there(&self, pair: &Pair<'_>, bytes: usize, window: usize, iteration: u32) -> Vec<Spot> {
        let leg = [(pair.mpi.rank, pair.peer)];
        self.plan_of([&[], &leg], bytes, window, iteration).into
    }

    /// The messages between these senders and receivers, a window each. Both ends compute the same data for the same
    /// message, but place it at shifts of their own.
    fn plan_of(
        &self,
        [out, into]: [&[(c_int, c_int)]; 2],
        bytes: usize,
        window: usize,
        iteration: u32,
    ) -> Plan {
        let seeds = |legs: &[(c_int, c_int)]| -> Vec<u64> {
            let of_leg = |(sender, receiver): &(c_int, c_int)| {
                let ends =
                    u64::from(sender.unsigned_abs()) << 32 | u64::from(receiver.unsigned_abs());
                let base = mix(
                    mix(mix(self.seed, bytes as u64), u64::from(iteration)),
                    ends,
                );
                (0..window as u64).map(move |message| mix(base, message))
            };
            legs.iter().flat_map(of_leg).collect()
        };
        let spots = |seeds: &[u64], salt: u64| -> Vec<Spot> {
            let place = |(message, seed): (usize, &u64)| {
                let odd = usize::try_from(mix(*seed, salt) % SHIFT as u64).unwrap_or(0) | 1;
                Spot {
                    offset: message * region(bytes) + GUARD + odd,
                    bytes,
                }
            };
            seeds.iter().enumerate().map(place).collect()
        };
        let (out_seeds, into_seeds) = (seeds(out), seeds(into));
        Plan {
            out: spots(&out_seeds, 1),
            into: spots(&into_seeds, 2),
            out_seeds,
            into_seeds,
            iteration,
        }
    }

    /// Writes the data to send and the poison to receive over.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn prepare(&self, pair: &Pair<'_>, plan: &Plan) -> anyhow::Result<()> {
        let mut scratch = Vec::new();
        if pair.sends() {
            for (spot, seed) in plan.out.iter().zip(&plan.out_seeds) {
                for (place, bytes) in pieces(spot.bytes) {
                    scratch.resize(bytes, 0);
                    random_bytes_at(*seed, place, &mut scratch);
                    pair.send.write(spot.offset + place, &scratch)?;
                }
            }
        }
        if pair.receives() {
            for (spot, seed) in plan.into.iter().zip(&plan.into_seeds) {
                for (place, bytes) in pieces(spot.bytes + 2 * GUARD) {
                    scratch.resize(bytes, 0);
                    expected(*seed, spot.bytes, place, &mut scratch);
                    for byte in &mut scratch[common(GUARD, spot.bytes, place, bytes)] {
                        *byte = !*byte;
                    }
                    pair.receive.write(spot.offset - GUARD + place, &scratch)?;
                }
            }
        }
        Ok(())
    }

    /// Compares what arrived, guards included; returns the number of wrong messages.
    ///
    /// # Errors
    /// What the driver reports.
    pub fn compare(&self, pair: &Pair<'_>, plan: &Plan) -> anyhow::Result<u64> {
        if !pair.receives() {
            return Ok(0);
        }
        let mut errors = 0;
        let (mut wanted, mut found) = (Vec::new(), Vec::new());
        for (message, (spot, seed)) in plan.into.iter().zip(&plan.into_seeds).enumerate() {
            let mut difference = Difference::default();
            for (place, bytes) in pieces(spot.bytes + 2 * GUARD) {
                wanted.resize(bytes, 0);
                expected(*seed, spot.bytes, place, &mut wanted);
                found.resize(bytes, 0);
                pair.receive.read(spot.offset - GUARD + place, &mut found)?;
                difference.look(place, &wanted, &found);
            }
            if difference.wrong > 0 {
                errors += 1;
                self.report(
                    pair.mpi.rank,
                    plan.iteration,
                    message,
                    *spot,
                    &difference.told(spot.bytes),
                );
            }
        }
        Ok(errors)
    }

    fn report(&self, rank: c_int, iteration: u32, message: usize, spot: Spot, difference: &str) {
        const MOST: u32 = 10;
        self.reported.set(self.reported.get() + 1);
        if self.reported.get() > MOST {
            return; // Ten lines say which way it is wrong.
        }
        crate::complain(&format!(
            "rank {rank}: wrong data: iteration {iteration}, message {message} of {} bytes at offset {}: {difference}",
            spot.bytes, spot.offset
        ));
    }
}

/// Where the pieces of so many bytes begin, and how long they are.
fn pieces(bytes: usize) -> impl Iterator<Item = (usize, usize)> {
    let begins = (0..bytes).step_by(PIECE);
    begins.map(move |place| (place, PIECE.min(bytes - place)))
}

/// Which bytes of a piece of a region belong to a part of it.
fn common(part: usize, part_bytes: usize, place: usize, bytes: usize) -> std::ops::Range<usize> {
    let in_piece = |at: usize| at.clamp(place, place + bytes) - place;
    in_piece(part)..in_piece(part + part_bytes)
}

/// What a region holds from a place on after its message has arrived: guard, data, guard.
fn expected(seed: u64, bytes: usize, place: usize, out: &mut [u8]) {
    let parts = [
        (0, GUARD, !seed),
        (GUARD, bytes, seed),
        (GUARD + bytes, GUARD, !seed.rotate_left(32)),
    ];
    for (begin, length, seed) in parts {
        let here = common(begin, length, place, out.len());
        if !here.is_empty() {
            random_bytes_at(seed, place + here.start - begin, &mut out[here]);
        }
    }
}

/// How the bytes of a region differ from what is expected of it.
#[derive(Default)]
struct Difference {
    /// How many do.
    wrong: usize,
    /// The first of them: where in the region, what it should be, and what it is.
    first: Option<(usize, u8, u8)>,
}

impl Difference {
    /// Looks at the piece from a place on.
    fn look(&mut self, place: usize, wanted: &[u8], found: &[u8]) {
        // Whole pieces at once: gigabytes of this are compared.
        if wanted == found {
            return;
        }
        for (at, (should, is)) in wanted.iter().zip(found).enumerate() {
            if should != is {
                self.wrong += 1;
                self.first.get_or_insert((place + at, *should, *is));
            }
        }
    }

    /// The first wrong byte in words.
    fn told(&self, bytes: usize) -> String {
        let wrong = self.wrong;
        let Some((first, should, is)) = self.first else {
            return "none".into();
        };
        if first < GUARD {
            return format!(
                "{wrong} bytes differ, the first {} before its start",
                GUARD - first
            );
        }
        let at = first - GUARD;
        if at >= bytes {
            return format!(
                "{wrong} bytes differ, the first {} past its end",
                at - bytes
            );
        }
        let never = if is == !should {
            " (never written)"
        } else {
            ""
        };
        format!(
            "{wrong} bytes differ, the first is byte {at}: {is:#04x} instead of {should:#04x}{never}"
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_generator_is_splitmix64() {
        // First outputs for seed 0 of the reference implementation, splitmix64.c by Sebastiano Vigna.
        assert_eq!(splitmix(0), 0xe220_a839_7b1d_cdaf);
        assert_eq!(splitmix(0x9e37_79b9_7f4a_7c15), 0x6e78_9e6a_a1b9_65f4);
    }

    #[test]
    fn both_ranks_agree_on_the_data_and_place_it_oddly_apart() {
        let checker = Checker::new(5);
        let plan =
            |legs: [&[(c_int, c_int)]; 2], iteration| checker.plan_of(legs, 1000, 8, iteration);
        let (there, back) = ((0, 1), (1, 0));
        let (zero, one) = (plan([&[there], &[back]], 3), plan([&[back], &[there]], 3));
        assert_eq!(zero.out_seeds, one.into_seeds);
        assert_eq!(one.out_seeds, zero.into_seeds);
        assert_ne!(zero.out_seeds, zero.into_seeds);
        assert_ne!(zero.out_seeds, plan([&[there], &[back]], 4).out_seeds);
        assert!(zero
            .out
            .iter()
            .chain(&one.into)
            .all(|spot| spot.offset % 2 == 1));
        assert!(zero
            .out
            .iter()
            .zip(&one.into)
            .any(|(a, b)| a.offset != b.offset));
        for spots in zero.into.windows(2) {
            assert!(spots[0].offset + spots[0].bytes + GUARD <= spots[1].offset - GUARD);
        }
        let last = zero.into[7];
        assert!(last.offset + last.bytes + GUARD <= 8 * region(1000));
    }

    #[test]
    fn regions_stay_within_their_budget() {
        assert_eq!(window(64, 1), 64);
        assert_eq!(window(64, 512 << 20), 1);
        assert_eq!(window(16, 2_147_483_647), 1);
        assert!(window(64, 64 << 20) < 17);
    }

    #[test]
    fn differences_are_told_apart() {
        let mut wanted = [0; 100 + 2 * GUARD];
        expected(9, 100, 0, &mut wanted);
        let damaged = |at: usize, bits: u8| {
            let mut found = wanted;
            found[at] ^= bits;
            // In two pieces, as longer messages are looked at.
            let mut difference = Difference::default();
            difference.look(0, &wanted[..GUARD + 9], &found[..GUARD + 9]);
            difference.look(GUARD + 9, &wanted[GUARD + 9..], &found[GUARD + 9..]);
            difference.told(100)
        };
        assert!(damaged(GUARD - 1, 1).contains("1 before its start"));
        assert!(damaged(GUARD + 100, 1).contains("0 past its end"));
        assert!(damaged(GUARD + 7, 1).contains("byte 7"));
        assert!(damaged(GUARD + 7, 0xff).contains("never written"));
        assert!(damaged(GUARD + 70, 1).contains("byte 70"));
    }

    #[test]
    fn pieces_of_a_region_are_those_of_the_whole() {
        let bytes = 101;
        let mut whole = [0; 101 + 2 * GUARD];
        random_bytes(!5, &mut whole[..GUARD]);
        random_bytes(5, &mut whole[GUARD..GUARD + bytes]);
        random_bytes(!5u64.rotate_left(32), &mut whole[GUARD + bytes..]);
        for length in [1, 3, 8, 61, 64, 100, whole.len()] {
            let mut found = Vec::new();
            for place in (0..whole.len()).step_by(length) {
                let mut piece = vec![0; length.min(whole.len() - place)];
                expected(5, bytes, place, &mut piece);
                found.extend(piece);
            }
            assert_eq!(found, whole, "pieces of {length}");
        }
        let covered: usize = pieces(3 * PIECE + 5).map(|(_, bytes)| bytes).sum();
        assert_eq!(covered, 3 * PIECE + 5);
        assert_eq!(pieces(3 * PIECE + 5).last(), Some((3 * PIECE, 5)));
        assert_eq!(pieces(0).count(), 0);
    }
}
