//! Twins of `pack_column_*` (packed, column, rows, pitch) and `unpack_column_*` (column, packed, rows, pitch).

use super::{rectangle, rectangle_elements};
use crate::access::{Access, AccessKind, Fault, Memory, Translate};
use crate::params::{Launch, Params};
use crate::real::Element;

const fn bytes<T>() -> u64 {
    std::mem::size_of::<T>() as u64
}

pub fn pack_accesses<T: Element>(p: &Params, _: Launch) -> Vec<Access> {
    vec![
        Access::run(
            p.u64(0),
            p.u64(2).wrapping_mul(bytes::<T>()),
            AccessKind::Write,
        ),
        rectangle(
            p.u64(1),
            p.u64(2),
            1,
            p.u64(3),
            bytes::<T>(),
            AccessKind::Read,
        ),
    ]
}

pub fn unpack_accesses<T: Element>(p: &Params, _: Launch) -> Vec<Access> {
    vec![
        rectangle(
            p.u64(0),
            p.u64(2),
            1,
            p.u64(3),
            bytes::<T>(),
            AccessKind::Write,
        ),
        Access::run(
            p.u64(1),
            p.u64(2).wrapping_mul(bytes::<T>()),
            AccessKind::Read,
        ),
    ]
}

/// # Safety
/// As for [`super::Twin::run`].
pub unsafe fn pack<T: Element>(
    p: &Params,
    _: Launch,
    translate: Translate<'_>,
) -> Result<(), Fault> {
    let (rows, pitch) = (p.u64(2), p.u64(3));
    // SAFETY: the caller's promise on `translate`.
    let (packed, column) = unsafe {
        (
            Memory::<T>::new(translate, p.u64(0), rows)?,
            Memory::<T>::new(translate, p.u64(1), rectangle_elements(rows, 1, pitch))?,
        )
    };
    for r in 0..rows {
        packed.set(r, column.get(r * pitch));
    }
    Ok(())
}

/// # Safety
/// As for [`super::Twin::run`].
pub unsafe fn unpack<T: Element>(
    p: &Params,
    _: Launch,
    translate: Translate<'_>,
) -> Result<(), Fault> {
    let (rows, pitch) = (p.u64(2), p.u64(3));
    // SAFETY: the caller's promise on `translate`.
    let (column, packed) = unsafe {
        (
            Memory::<T>::new(translate, p.u64(0), rectangle_elements(rows, 1, pitch))?,
            Memory::<T>::new(translate, p.u64(1), rows)?,
        )
    };
    for r in 0..rows {
        column.set(r * pitch, packed.get(r));
    }
    Ok(())
}
