//! Twins of `norm_*` (a, b, rows, cols, pitch, partial).

use super::{rectangle, rectangle_elements};
use crate::access::{Access, AccessKind, Fault, Memory, Translate};
use crate::params::{Launch, Params};
use crate::real::Real;
use crate::shape::NORM_THREADS;

/// How cells are joined to a norm.
pub trait Norm {
    /// Joins two partial results. Not commutative in its treatment of rounding: order matters.
    fn join(a: f64, b: f64) -> f64;
    /// What one cell contributes.
    fn cell<T: Real>(a: T, b: T) -> f64;
}

/// The largest difference; a NaN stays.
pub struct Max;
/// The sum of squared differences, in double precision.
pub struct SumOfSquares;

impl Norm for Max {
    #[inline(always)]
    fn join(a: f64, b: f64) -> f64 {
        if b > a || b.is_nan() {
            b
        } else {
            a
        }
    }
    #[inline(always)]
    fn cell<T: Real>(a: T, b: T) -> f64 {
        a.sub(b).widen().abs()
    }
}

impl Norm for SumOfSquares {
    #[inline(always)]
    fn join(a: f64, b: f64) -> f64 {
        a + b
    }
    #[inline(always)]
    fn cell<T: Real>(a: T, b: T) -> f64 {
        let d = a.widen() - b.widen();
        d * d
    }
}

pub fn accesses<T: Real>(p: &Params, launch: Launch) -> Vec<Access> {
    let (rows, cols, pitch) = (p.u64(2), p.u64(3), p.u64(4));
    vec![
        rectangle(p.u64(0), rows, cols, pitch, T::BYTES, AccessKind::Read),
        rectangle(p.u64(1), rows, cols, pitch, T::BYTES, AccessKind::Read),
        Access::run(p.u64(5), u64::from(launch.grid[0]) * 8, AccessKind::Write),
    ]
}

/// # Safety
/// As for [`super::Twin::run`].
pub unsafe fn run<T: Real, N: Norm>(
    p: &Params,
    launch: Launch,
    translate: Translate<'_>,
) -> Result<(), Fault> {
    if launch.block != [NORM_THREADS, 1, 1] || launch.grid[1..] != [1, 1] {
        return Err(Fault::InvalidLaunch);
    }
    let (rows, cols, pitch) = (p.u64(2), p.u64(3), p.u64(4));
    let elements = rectangle_elements(rows, cols, pitch);
    let blocks = launch.grid[0] as usize;
    // SAFETY: the caller's promise on `translate`.
    let (a, b, partial) = unsafe {
        let a = Memory::<T>::new(translate, p.u64(0), elements)?;
        let b = Memory::<T>::new(translate, p.u64(1), elements)?;
        (
            a,
            b,
            Memory::<f64>::new(translate, p.u64(5), blocks as u64)?,
        )
    };
    let mut threads = vec![0f64; blocks * NORM_THREADS as usize];
    let mut thread = 0;
    for r in 0..rows {
        for i in r * pitch..r * pitch + cols {
            threads[thread] = N::join(threads[thread], N::cell(a.get(i), b.get(i)));
            thread += 1;
            if thread == threads.len() {
                thread = 0;
            }
        }
    }
    for (block, tree) in threads.chunks_exact_mut(NORM_THREADS as usize).enumerate() {
        partial.set(block as u64, reduce::<N>(tree));
    }
    Ok(())
}

/// The tree of the kernel: its upper half is joined to its lower until one is left.
fn reduce<N: Norm>(tree: &mut [f64]) -> f64 {
    let mut width = tree.len() / 2;
    while width > 0 {
        for t in 0..width {
            tree[t] = N::join(tree[t], tree[t + width]);
        }
        width /= 2;
    }
    tree[0]
}
