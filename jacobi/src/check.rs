//! The final field against the host reference. Collective; rank 0 computes and compares.

use crate::args::{Args, Dims, NormKind};
use crate::domain::Part;
use crate::failure::{Failure, Outcome};
use crate::field::Cell;
use crate::reference::{self, Reference};
use crate::report::{bytes, Check};
use crate::solver::Ended;
use mpi::datatype::PartitionMut;
use mpi::traits::*;

/// Fields up to this many bytes are gathered and compared cell by cell, larger ones by hash.
const GATHERED_BYTES_MAX: u64 = 256 << 20;

/// Whether rank 0's host can hold the reference; asked before the work, not after.
pub fn fits(args: &Args, cell_bytes: u64) -> Outcome<()> {
    let needed = reference::bytes_needed(args.size, cell_bytes);
    match reference::bytes_available() {
        Some(free) if needed > free => {
            let (needed, free) = (bytes(needed), bytes(free));
            Err(Failure::input(format!("--check needs {needed} of host memory for the reference, {free} are free: use a smaller --size, or --dump-hash")))
        }
        _ => Ok(()),
    }
}

/// Compares. Every rank gets the result.
pub fn run<T: Cell>(
    world: &impl Communicator,
    args: &Args,
    dims: Dims,
    cells: Option<Vec<T>>,
    hash: u64,
    ended: &Ended,
) -> Outcome<Check> {
    let gathered = match cells {
        Some(cells) => gather(world, args, dims, &cells)?,
        None => None,
    };
    let by_cell = is_gathered(args, T::BYTES);
    let mut verdict = [0u64; 2];
    if world.rank() == 0 {
        let reference =
            reference::compute::<T>(args.size, args.boundary, args.seed, ended.iterations)?;
        verdict = compare(&reference, gathered.as_deref(), hash, args.norm, ended);
    }
    world.process_at_rank(0).broadcast_into(&mut verdict[..]);
    let mode = if by_cell { "cells" } else { "hash" };
    Ok(Check {
        mode,
        equal: verdict[0] == 1,
        differing_cells: by_cell.then_some(verdict[1]),
    })
}

/// Whether each cell is compared.
pub fn is_gathered(args: &Args, cell_bytes: u64) -> bool {
    args.size.rows * args.size.cols * cell_bytes <= GATHERED_BYTES_MAX
}

/// 1 where all is equal, and the number of differing cells.
fn compare<T: Cell>(
    reference: &Reference<T>,
    cells: Option<&[T]>,
    hash: u64,
    norm: NormKind,
    ended: &Ended,
) -> [u64; 2] {
    let pairs = cells
        .into_iter()
        .flat_map(|cells| cells.iter().zip(&reference.cells));
    let differing = pairs.filter(|(a, b)| a.bits() != b.bits()).count() as u64;
    // The largest change is exact, whoever computes it; the L2 norm is rounded differently for each number of ranks.
    let norm_equal = norm == NormKind::L2
        || ended
            .norm
            .is_none_or(|n| n.to_bits() == reference.norm_max.to_bits());
    let equal = differing == 0 && hash == reference.hash && norm_equal;
    [u64::from(equal), differing]
}

/// All cells on rank 0, in the order of the domain.
fn gather<T: Cell>(
    world: &impl Communicator,
    args: &Args,
    dims: Dims,
    mine: &[T],
) -> Outcome<Option<Vec<T>>> {
    let root = world.process_at_rank(0);
    if world.rank() != 0 {
        root.gather_varcount_into(mine);
        return Ok(None);
    }
    let part = |rank| Part::new(args.size, dims, args.boundary, rank);
    let parts: Vec<Part> = (0..world.size() as u32).map(part).collect::<Outcome<_>>()?;
    let counts: Vec<i32> = parts.iter().map(|p| p.cells() as i32).collect();
    let starts: Vec<i32> = counts
        .iter()
        .scan(0, |at, n| Some(std::mem::replace(at, *at + n)))
        .collect();
    let mut packed = vec![T::default(); (args.size.rows * args.size.cols) as usize];
    root.gather_varcount_into_root(
        mine,
        &mut PartitionMut::new(&mut packed[..], counts, &starts[..]),
    );
    let mut field = vec![T::default(); packed.len()];
    for (part, &start) in parts.iter().zip(&starts) {
        for (r, row) in packed[start as usize..]
            .chunks_exact(part.cols as usize)
            .take(part.rows as usize)
            .enumerate()
        {
            let to = ((part.row0 + r as u64) * args.size.cols + part.col0) as usize;
            field[to..to + row.len()].copy_from_slice(row);
        }
    }
    Ok(Some(field))
}
