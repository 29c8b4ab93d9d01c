//! Copies of host memory.

/// Like [`std::ptr::copy_nonoverlapping`], past the caches if they are of no use.
///
/// # Safety
/// As there.
pub unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize, is_past_caches: bool) {
    // SAFETY: both are valid for as many bytes and do not overlap, as the caller says.
    unsafe {
        if is_past_caches {
            past_caches(to, from, bytes);
        } else {
            to.copy_from_nonoverlapping(from, bytes);
        }
    }
}

/// Like [`std::ptr::copy_nonoverlapping`], but what is written does not go through the caches. So memory that
/// is not in them is not read first, which costs half of the time of a long copy.
///
/// # Safety
/// As there.
#[cfg(target_arch = "x86_64")]
unsafe fn past_caches(to: *mut u8, from: *const u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    const UNIT: usize = size_of::<__m128i>();
    const LINE: usize = 4 * UNIT;
    let head = to.align_offset(LINE).min(bytes);
    let lines = (bytes - head) / LINE;
    let tail = head + lines * LINE;
    // SAFETY: all of it lies within the `bytes` of both, which do not overlap.
    let plain =
        |at: usize, bytes| unsafe { to.add(at).copy_from_nonoverlapping(from.add(at), bytes) };
    plain(0, head);
    for line in 0..lines {
        let at = head + line * LINE;
        // SAFETY: as above; every store is to a multiple of 16, as `head` ends on a line.
        unsafe {
            let source = from.add(at).cast::<__m128i>();
            let target = to.add(at).cast::<__m128i>();
            let row = [0, 1, 2, 3].map(|unit| _mm_loadu_si128(source.add(unit)));
            _mm_stream_si128(target, row[0]);
            _mm_stream_si128(target.add(1), row[1]);
            _mm_stream_si128(target.add(2), row[2]);
            _mm_stream_si128(target.add(3), row[3]);
        }
    }
    plain(tail, bytes - tail);
    // Such stores are not ordered with later ones. Whoever is told that the bytes are there must find them.
    // SAFETY: every processor of this architecture has it.
    unsafe { _mm_sfence() };
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn past_caches(to: *mut u8, from: *const u8, bytes: usize) {
    // SAFETY: both are valid for as many bytes and do not overlap, as the caller says.
    unsafe { to.copy_from_nonoverlapping(from, bytes) };
}

#[cfg(test)]
mod tests {
    use super::past_caches;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn copies_what_it_should_and_nothing_else(
            bytes in 0_usize..1000,
            from in 0_usize..70,
            to in 0_usize..70,
            seed in any::<u64>(),
        ) {
            let noise = |at: usize| (seed.rotate_left(at as u32 % 64) >> 17) as u8 ^ at as u8;
            let source: Vec<u8> = (0..1100).map(noise).collect();
            let mut target = vec![0xa5_u8; 1200];
            // SAFETY: both ranges lie within their vectors, which are two.
            unsafe {
                past_caches(target.as_mut_ptr().add(to), source.as_ptr().add(from), bytes);
            }
            prop_assert_eq!(&target[to..to + bytes], &source[from..from + bytes]);
            prop_assert!(target[..to].iter().chain(&target[to + bytes..]).all(|byte| *byte == 0xa5));
        }
    }
}
