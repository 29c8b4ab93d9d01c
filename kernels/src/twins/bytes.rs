//! Twins of `fill_bytes`, `fill_pattern`, `compare_pattern` and `compare_buffers`.

use crate::access::{Access, AccessKind, Fault, Memory, Translate};
use crate::generator::{pattern_byte, pattern_word};
use crate::params::{Launch, Params};

pub fn fill_accesses(p: &Params, _: Launch) -> Vec<Access> {
    vec![Access::run(p.u64(0), p.u64(1), AccessKind::Write)]
}

pub fn compare_pattern_accesses(p: &Params, _: Launch) -> Vec<Access> {
    vec![
        Access::run(p.u64(0), p.u64(1), AccessKind::Read),
        Access::run(p.u64(4), 16, AccessKind::Atomic),
    ]
}

pub fn compare_buffers_accesses(p: &Params, _: Launch) -> Vec<Access> {
    vec![
        Access::run(p.u64(0), p.u64(2), AccessKind::Read),
        Access::run(p.u64(1), p.u64(2), AccessKind::Read),
        Access::run(p.u64(3), 16, AccessKind::Atomic),
    ]
}

/// (dst, bytes, value)
///
/// # Safety
/// As for [`super::Twin::run`].
pub unsafe fn fill(p: &Params, _: Launch, translate: Translate<'_>) -> Result<(), Fault> {
    // SAFETY: the caller's promise on `translate`.
    let dst = unsafe { Memory::<u8>::new(translate, p.u64(0), p.u64(1))? };
    (0..p.u64(1)).for_each(|i| dst.set(i, p.u32(2) as u8));
    Ok(())
}

/// Calls `visit(offset, byte)` for each byte of the pattern from `start` on, computing each word once.
#[inline(always)]
fn pattern(seed: u64, start: u64, bytes: u64, mut visit: impl FnMut(u64, u8)) {
    let mut i = 0;
    while i < bytes && start.wrapping_add(i) % 8 != 0 {
        visit(i, pattern_byte(seed, start.wrapping_add(i)));
        i += 1;
    }
    while i + 8 <= bytes {
        let word = pattern_word(seed, start.wrapping_add(i) / 8).to_le_bytes();
        word.iter().zip(i..).for_each(|(&byte, at)| visit(at, byte));
        i += 8;
    }
    (i..bytes).for_each(|i| visit(i, pattern_byte(seed, start.wrapping_add(i))));
}

/// (dst, bytes, seed, start)
///
/// # Safety
/// As for [`super::Twin::run`].
pub unsafe fn fill_pattern(p: &Params, _: Launch, translate: Translate<'_>) -> Result<(), Fault> {
    // SAFETY: the caller's promise on `translate`.
    let dst = unsafe { Memory::<u8>::new(translate, p.u64(0), p.u64(1))? };
    pattern(p.u64(2), p.u64(3), p.u64(1), |i, byte| dst.set(i, byte));
    Ok(())
}

/// Adds to result[0] how many bytes differ, lowers result[1] to the first of them.
fn report(result: Memory<u64>, differing: u64, first: u64) {
    if differing != 0 {
        result.set(0, result.get(0).wrapping_add(differing));
        result.set(1, result.get(1).min(first));
    }
}

/// (src, bytes, seed, start, result)
///
/// # Safety
/// As for [`super::Twin::run`].
pub unsafe fn compare_pattern(
    p: &Params,
    _: Launch,
    translate: Translate<'_>,
) -> Result<(), Fault> {
    // SAFETY: the caller's promise on `translate`.
    let (src, result) = unsafe {
        (
            Memory::<u8>::new(translate, p.u64(0), p.u64(1))?,
            Memory::<u64>::new(translate, p.u64(4), 2)?,
        )
    };
    let (mut differing, mut first) = (0, u64::MAX);
    pattern(p.u64(2), p.u64(3), p.u64(1), |i, byte| {
        if src.get(i) != byte {
            differing += 1;
            first = first.min(i);
        }
    });
    report(result, differing, first);
    Ok(())
}

/// (a, b, bytes, result)
///
/// # Safety
/// As for [`super::Twin::run`].
pub unsafe fn compare_buffers(
    p: &Params,
    _: Launch,
    translate: Translate<'_>,
) -> Result<(), Fault> {
    let bytes = p.u64(2);
    // SAFETY: the caller's promise on `translate`.
    let (a, b, result) = unsafe {
        let a = Memory::<u8>::new(translate, p.u64(0), bytes)?;
        (
            a,
            Memory::<u8>::new(translate, p.u64(1), bytes)?,
            Memory::<u64>::new(translate, p.u64(3), 2)?,
        )
    };
    let (mut differing, mut first) = (0, u64::MAX);
    for i in 0..bytes {
        if a.get(i) != b.get(i) {
            differing += 1;
            first = first.min(i);
        }
    }
    report(result, differing, first);
    Ok(())
}
