//! Twins of `field_fill_*`, `field_hash_*` and `field_sample_*`.

use super::{rectangle, rectangle_elements};
use crate::access::{Access, AccessKind, Fault, Memory, Translate};
use crate::generator::{cell_hash, cell_value};
use crate::params::{Launch, Params};
use crate::real::Real;

pub fn fill_accesses<T: Real>(p: &Params, _: Launch) -> Vec<Access> {
    vec![rectangle(
        p.u64(0),
        p.u64(1),
        p.u64(2),
        p.u64(3),
        T::BYTES,
        AccessKind::Write,
    )]
}

/// (out, rows, cols, pitch, row0, col0, seed, tile_shift)
///
/// # Safety
/// As for [`super::Twin::run`].
pub unsafe fn fill<T: Real>(p: &Params, _: Launch, translate: Translate<'_>) -> Result<(), Fault> {
    let (rows, cols, pitch) = (p.u64(1), p.u64(2), p.u64(3));
    let (row0, col0, seed, tile_shift) = (p.i64(4), p.i64(5), p.u64(6), p.u32(7));
    // SAFETY: the caller's promise on `translate`.
    let out =
        unsafe { Memory::<T>::new(translate, p.u64(0), rectangle_elements(rows, cols, pitch))? };
    for r in 0..rows {
        for c in 0..cols {
            out.set(
                r * pitch + c,
                cell_value(seed, row0 + r as i64, col0 + c as i64, tile_shift),
            );
        }
    }
    Ok(())
}

pub fn hash_accesses<T: Real>(p: &Params, _: Launch) -> Vec<Access> {
    let field = rectangle(
        p.u64(0),
        p.u64(1),
        p.u64(2),
        p.u64(3),
        T::BYTES,
        AccessKind::Read,
    );
    vec![field, Access::run(p.u64(6), 8, AccessKind::Atomic)]
}

/// (field, rows, cols, pitch, row0, col0, sum)
///
/// # Safety
/// As for [`super::Twin::run`].
pub unsafe fn hash<T: Real>(p: &Params, _: Launch, translate: Translate<'_>) -> Result<(), Fault> {
    let (rows, cols, pitch, row0, col0) = (p.u64(1), p.u64(2), p.u64(3), p.i64(4), p.i64(5));
    // SAFETY: the caller's promise on `translate`.
    let (field, sum) = unsafe {
        (
            Memory::<T>::new(translate, p.u64(0), rectangle_elements(rows, cols, pitch))?,
            Memory::<u64>::new(translate, p.u64(6), 1)?,
        )
    };
    let mut total = sum.get(0);
    for r in 0..rows {
        for c in 0..cols {
            let bits = field.get(r * pitch + c).bits();
            total = total.wrapping_add(cell_hash(row0 + r as i64, col0 + c as i64, bits));
        }
    }
    sum.set(0, total);
    Ok(())
}

pub fn sample_accesses<T: Real>(p: &Params, _: Launch) -> Vec<Access> {
    let (height, width) = (p.u64(1), p.u64(2));
    let field = rectangle(
        p.u64(3),
        p.u64(4),
        p.u64(5),
        p.u64(6),
        T::BYTES,
        AccessKind::Read,
    );
    vec![
        Access::run(
            p.u64(0),
            height.saturating_mul(width).saturating_mul(4),
            AccessKind::Write,
        ),
        field,
    ]
}

/// (picture, height, width, field, rows, cols, pitch, row0, col0, global_rows, global_cols)
///
/// # Safety
/// As for [`super::Twin::run`].
pub unsafe fn sample<T: Real>(
    p: &Params,
    _: Launch,
    translate: Translate<'_>,
) -> Result<(), Fault> {
    let (height, width) = (p.u64(1), p.u64(2));
    let (rows, cols, pitch, row0, col0) = (p.u64(4), p.u64(5), p.u64(6), p.u64(7), p.u64(8));
    let (global_rows, global_cols) = (p.u64(9), p.u64(10));
    // SAFETY: the caller's promise on `translate`.
    let (picture, field) = unsafe {
        let pixels = height.saturating_mul(width);
        (
            Memory::<f32>::new(translate, p.u64(0), pixels)?,
            Memory::<T>::new(translate, p.u64(3), rectangle_elements(rows, cols, pitch))?,
        )
    };
    for y in 0..height {
        let r = (y.wrapping_mul(global_rows) / height).wrapping_sub(row0);
        for x in 0..width {
            let c = (x.wrapping_mul(global_cols) / width).wrapping_sub(col0);
            if r < rows && c < cols {
                picture.set(y * width + x, field.get(r * pitch + c).narrow());
            }
        }
    }
    Ok(())
}
