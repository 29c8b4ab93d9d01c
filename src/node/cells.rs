//! Cells for eager payloads: which are in use, whole or by pieces.
//!
//! A program may send thousands of short messages before its receivers come. Each should take little more
//! room than its length. So a cell is cut into pieces of one size, a power of two times the granule, for as
//! long as one of them is out.

use super::pool::Pool;
use super::view::Layout;

/// Pieces that a cell is cut into at most: one bit of a word each.
const PIECES_MAX: u32 = 64;
/// Smaller pieces would save no room beside the slot that each message has, too.
const GRANULE_MIN: u32 = 256;
/// Sizes of pieces: 1, 2, ... 32 granules, and whole cells.
const SIZES: usize = 1 + PIECES_MAX.ilog2() as usize;

impl Layout {
    /// The unit of a piece's offset in its cell, bytes.
    pub(super) fn granule(&self) -> u32 {
        let granule = self.cell_bytes.div_ceil(PIECES_MAX).max(GRANULE_MIN);
        granule.next_multiple_of(64)
    }

    /// Granules of a cell: the difference between the numbers of the first pieces of two cells.
    pub(super) fn granules(&self) -> u32 {
        self.cell_bytes.div_ceil(self.granule()).max(1)
    }
}

/// Which pieces of which cells are in use.
#[derive(Debug, Default)]
pub(super) struct Cells {
    /// Cells of which nothing is in use.
    whole: Pool,
    /// How each cell is cut.
    cuts: Vec<Cut>,
    /// For each size, the cells with pieces of it of which some are free and some are not.
    open: [Vec<u32>; SIZES],
    cell_bytes: u32,
    granule: u32,
    granules: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Cut {
    /// Its pieces are two to the power of this granules long.
    size: usize,
    /// One bit for each piece that is free.
    free: u64,
    /// Whether it is cut at all.
    is_cut: bool,
}

impl Cells {
    pub(super) fn fill(&mut self, layout: &Layout) {
        self.whole.fill(layout.cells);
        self.cuts = vec![Cut::default(); layout.cells as usize];
        (self.cell_bytes, self.granule) = (layout.cell_bytes, layout.granule());
        self.granules = layout.granules();
    }

    /// How many pieces of a size a cell has: 1 where it is not cut for that size.
    fn pieces(&self, size: usize) -> u32 {
        (self.cell_bytes / (self.granule << size)).max(1)
    }

    fn all(&self, size: usize) -> u64 {
        u64::MAX >> (u64::BITS - self.pieces(size))
    }

    /// Takes a piece with room for so many bytes. Returns its number.
    pub(super) fn take(&mut self, bytes: u64) -> Option<u32> {
        if self.cuts.is_empty() || bytes > u64::from(self.cell_bytes) {
            return None;
        }
        let fits = |size: &usize| u64::from(self.granule) << size >= bytes;
        let size = (0..SIZES)
            .find(|size| fits(size) || self.pieces(*size) == 1)
            .filter(|size| self.pieces(*size) > 1);
        let Some(wanted) = size else {
            return self.whole.take().map(|cell| cell * self.granules);
        };
        // A cell that is cut already; one cut for longer pieces only if there is no other room.
        if self.open[wanted].is_empty() {
            if let Some(cell) = self.whole.take() {
                self.cuts[cell as usize] = Cut {
                    size: wanted,
                    free: self.all(wanted),
                    is_cut: true,
                };
                self.open[wanted].push(cell);
            }
        }
        let size = (wanted..SIZES).find(|size| !self.open[*size].is_empty())?;
        let cell = *self.open[size].last()?;
        let cut = &mut self.cuts[cell as usize];
        let piece = cut.free.trailing_zeros();
        cut.free &= cut.free - 1;
        if cut.free == 0 {
            self.open[size].pop();
        }
        Some(cell * self.granules + (piece << size))
    }

    /// Gives a piece back. False if it is not out.
    pub(super) fn give(&mut self, number: u32) -> bool {
        let Some((cell, at)) = number
            .checked_div(self.granules)
            .map(|cell| (cell, number % self.granules))
        else {
            return false;
        };
        let Some(&Cut { size, free, is_cut }) = self.cuts.get(cell as usize) else {
            return false;
        };
        if !is_cut {
            return at == 0 && self.whole.give(cell);
        }
        let bit = 1_u64 << (at >> size);
        let is_out = at & ((1 << size) - 1) == 0 && bit & self.all(size) != 0 && free & bit == 0;
        if !is_out {
            return false;
        }
        let free = free | bit;
        self.cuts[cell as usize].free = free;
        let open = &mut self.open[size];
        if free == bit {
            open.push(cell);
        }
        if free == self.all(size) {
            // The one opened last is the likeliest.
            if let Some(at) = self.open[size].iter().rposition(|&other| other == cell) {
                self.open[size].swap_remove(at);
            }
            self.cuts[cell as usize].is_cut = false;
            return self.whole.give(cell);
        }
        true
    }

    /// Cells of which nothing is in use.
    pub(super) fn free(&self) -> usize {
        self.whole.free()
    }
}

#[cfg(test)]
#[path = "cells_tests.rs"]
mod tests;
