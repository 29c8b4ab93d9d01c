//! The counter-based generator behind fills and patterns: a value depends on a seed and coordinates, on no state.

use crate::real::Real;

/// The finalizer of SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
#[inline(always)]
pub fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58476d1ce4e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d049bb133111eb);
    x ^ (x >> 31)
}

/// The word of the cell at global coordinates (`row`, `col`), which may be negative.
#[inline(always)]
pub fn cell_word(seed: u64, row: i64, col: i64) -> u64 {
    let row_word = mix(seed.wrapping_add((row as u64).wrapping_mul(0x9e3779b97f4a7c15)));
    mix(row_word.wrapping_add((col as u64).wrapping_mul(0xd1342543de82ef95)))
}

/// Initial value of a cell: in [0, 1), three quarters from its tile of `2^tile_shift` cells on a side, the rest noise.
#[inline(always)]
pub fn cell_value<T: Real>(seed: u64, row: i64, col: i64, tile_shift: u32) -> T {
    let tile = T::unit(cell_word(!seed, row >> tile_shift, col >> tile_shift));
    let noise = T::unit(cell_word(seed, row, col));
    tile.mul(T::THREE_QUARTERS).add(noise.mul(T::QUARTER))
}

/// What one cell adds (modulo 2^64) to the hash of a field. `bits` are the value's, zero-extended.
#[inline(always)]
pub fn cell_hash(row: i64, col: i64, bits: u64) -> u64 {
    mix(cell_word(0, row, col) ^ bits)
}

/// Word number `index` of the byte pattern of `seed`; byte `i` of the pattern is byte `i % 8` of word `i / 8`.
#[inline(always)]
pub fn pattern_word(seed: u64, index: u64) -> u64 {
    mix(mix(seed).wrapping_add(index.wrapping_mul(0x9e3779b97f4a7c15)))
}

/// Byte `i` of the pattern of `seed`.
#[inline(always)]
pub fn pattern_byte(seed: u64, i: u64) -> u8 {
    (pattern_word(seed, i / 8) >> (8 * (i % 8))) as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    /// First outputs of SplitMix64 seeded with 1234567, as published with the reference implementation.
    #[test]
    fn mix_is_the_finalizer_of_splitmix64() {
        let golden = 0x9e3779b97f4a7c15u64;
        let state = |n: u64| 1234567u64.wrapping_add(golden.wrapping_mul(n));
        assert_eq!(mix(state(1)), 6457827717110365317);
        assert_eq!(mix(state(2)), 3203168211198807973);
        assert_eq!(mix(state(3)), 9817491932198370423);
    }

    #[test]
    fn values_lie_in_the_unit_interval_and_tiles_show() {
        for i in -100i64..100 {
            let v: f64 = cell_value(7, i, -i, 4);
            assert!((0.0..1.0).contains(&v), "{v}");
        }
        let (a, b): (f32, f32) = (cell_value(7, 16, 32, 4), cell_value(7, 31, 47, 4));
        assert!(
            (a - b).abs() <= 0.25,
            "cells of one tile differ by the noise only"
        );
    }
}
