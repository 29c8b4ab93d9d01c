//! Twins of `jacobi_step_*` (out, in, rows, cols, pitch).

use super::{rectangle, rectangle_elements};
use crate::access::{Access, AccessKind, Fault, Memory, Translate};
use crate::params::{Launch, Params};
use crate::real::Real;

pub fn accesses<T: Real>(p: &Params, _: Launch) -> Vec<Access> {
    let (out, input, rows, cols, pitch) = (p.u64(0), p.u64(1), p.u64(2), p.u64(3), p.u64(4));
    if rows == 0 || cols == 0 {
        return Vec::new();
    }
    let bytes = T::BYTES;
    let above = input.wrapping_sub(pitch.wrapping_mul(bytes));
    let below = input.wrapping_add(rows.wrapping_mul(pitch).wrapping_mul(bytes));
    vec![
        rectangle(out, rows, cols, pitch, bytes, AccessKind::Write),
        rectangle(
            input.wrapping_sub(bytes),
            rows,
            cols + 2,
            pitch,
            bytes,
            AccessKind::Read,
        ),
        rectangle(above, 1, cols, pitch, bytes, AccessKind::Read),
        rectangle(below, 1, cols, pitch, bytes, AccessKind::Read),
    ]
}

/// # Safety
/// As for [`super::Twin::run`].
pub unsafe fn run<T: Real>(p: &Params, _: Launch, translate: Translate<'_>) -> Result<(), Fault> {
    let (rows, cols, pitch) = (p.u64(2), p.u64(3), p.u64(4));
    if rows == 0 || cols == 0 {
        return Ok(());
    }
    // SAFETY: the caller's promise on `translate`. The input reaches from the row above the first to the row below the last.
    let (out, input) = unsafe {
        let first = p.u64(1).wrapping_sub(pitch.wrapping_mul(T::BYTES));
        let reach = rectangle_elements(rows + 2, cols, pitch);
        (
            Memory::<T>::new(translate, p.u64(0), rectangle_elements(rows, cols, pitch))?,
            Memory::<T>::new(translate, first, reach)?,
        )
    };
    for r in 0..rows {
        let row = (r + 1) * pitch;
        for c in 0..cols {
            let i = row + c;
            let across = input.get(i - 1).add(input.get(i + 1));
            let along = input.get(i - pitch).add(input.get(i + pitch));
            out.set(r * pitch + c, across.add(along).mul(T::QUARTER));
        }
    }
    Ok(())
}
