//! The sizes of a measurement, as given on the command line.

use anabranch_engine::config::{format_size, parse_size};

/// A count of bytes is a C int in MPI.
const MAX: u64 = i32::MAX as u64;

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
            "{} is too large: at most 2147483647 bytes (2G less one) in one message",
            format_size(bytes)
        ));
    }
    usize::try_from(bytes).map_err(|_| format!("{text} is too large"))
}

fn range(min: usize, max: usize) -> Result<Sizes, String> {
    if min > max {
        return Err(format!("{min} is more than {max}: write MIN:MAX"));
    }
    let zero = (min == 0).then_some(0);
    let powers = (0..31)
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
    }

    #[test]
    fn what_is_no_size_is_refused() {
        for text in ["", "4:2", "5:7", "1:2G", "x", "1:2:3", "-1", "1,,2"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
