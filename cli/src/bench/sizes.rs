//! The sizes of a measurement, as given on the command line.

use anabranch_engine::config::{format_size, parse_size};

/// A count of bytes is a C int in MPI: longer messages are counts of blocks.
const BYTES_MAX: u64 = i32::MAX as u64;
/// Length of a block, bytes.
pub const BLOCK: usize = 64;
/// Largest message.
const MAX: u64 = 32 << 30;

/// Message sizes in bytes, in the order in which they are measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes(pub Vec<usize>);

/// Reads `MIN:MAX`, all powers of two between (and 0 if MIN is), or a list `A,B,...`.
///
/// # Errors
/// A sentence that says what is wrong.
pub fn parse(text: &str) -> Result<Sizes, String> {
    match text.split_once(':') {
        Some((min, max)) => range(size(min)?, size(max)?),
        None => text
            .split(',')
            .map(size)
            .collect::<Result<_, _>>()
            .map(Sizes),
    }
}

fn size(text: &str) -> Result<usize, String> {
    let bytes = parse_size(text.trim())
        .ok_or_else(|| format!("{text:?} is no size: write 0, 16K, 4M or 1G"))?;
    if bytes > MAX {
        return Err(format!(
            "{} is too large: at most {} in one message",
            format_size(bytes),
            format_size(MAX)
        ));
    }
    if bytes > BYTES_MAX && bytes % BLOCK as u64 != 0 {
        return Err(format!(
            "{bytes} is no multiple of {BLOCK}: a message of more than {BYTES_MAX} bytes is sent as a count of {BLOCK} bytes each"
        ));
    }
    usize::try_from(bytes).map_err(|_| format!("{text} is too large"))
}

/// A length near this one that is odd, or the next that can be sent where it would be too long for that.
pub fn odd(bytes: usize) -> usize {
    let odd = bytes.saturating_sub(1) | 1;
    match bytes {
        0 => 0,
        _ if odd as u64 <= BYTES_MAX => odd,
        _ => (bytes - 1) / BLOCK * BLOCK,
    }
}

fn range(min: usize, max: usize) -> Result<Sizes, String> {
    if min > max {
        return Err(format!("{min} is more than {max}: write MIN:MAX"));
    }
    let zero = (min == 0).then_some(0);
    let powers = (0..=MAX.ilog2())
        .map(|shift| 1usize << shift)
        .filter(|size| (min..=max).contains(size));
    let sizes: Vec<usize> = zero.into_iter().chain(powers).collect();
    if sizes.is_empty() {
        return Err(format!(
            "no power of two from {min} to {max}: write a list, as in {min},{max}"
        ));
    }
    Ok(Sizes(sizes))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_powers_of_two_and_lists_are_exact() {
        assert_eq!(parse("0:4"), Ok(Sizes(vec![0, 1, 2, 4])));
        assert_eq!(parse("1K:4K"), Ok(Sizes(vec![1024, 2048, 4096])));
        assert_eq!(parse("3:9"), Ok(Sizes(vec![4, 8])));
        assert_eq!(parse("256M"), Ok(Sizes(vec![268435456])));
        assert_eq!(parse("7,1K,0"), Ok(Sizes(vec![7, 1024, 0])));
        assert_eq!(parse("1:1G").map(|sizes| sizes.0.len()), Ok(31));
        assert_eq!(parse("1G:32G").map(|sizes| sizes.0.len()), Ok(6));
        let large = vec![2_147_483_647, 2_147_483_712, 17_179_869_184];
        assert_eq!(parse("2147483647,2147483712,16G"), Ok(Sizes(large)));
    }

    #[test]
    fn odd_lengths_can_be_sent() {
        assert_eq!([0, 1, 2, 4096, 4097].map(odd), [0, 1, 1, 4095, 4097]);
        assert_eq!(odd(2 << 30), 2_147_483_647);
        assert_eq!(odd((2 << 30) + 64), 2 << 30);
        assert_eq!(odd(16 << 30), 17_179_869_120);
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in ["", "4:2", "5:7", "1:33G", "x", "1:2:3", "-1", "1,,2"] {
            assert!(parse(text).is_err(), "{text}");
        }
        let why = |text| parse(text).expect_err("no size that can be sent");
        assert!(why("64G").contains("at most 32G in one message"));
        assert!(why("4K,2147483649").contains("2147483649 is no multiple of 64"));
    }
}
