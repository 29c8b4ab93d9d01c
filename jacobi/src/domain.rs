//! How the domain is split over ranks, and how a rank lays out its part.

use crate::args::{Boundary, Dims, Size};
use crate::failure::{Failure, Outcome};

/// The part of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Global index of its first row.
    pub row0: u64,
    /// Its rows.
    pub rows: u64,
    /// Global index of its first column.
    pub col0: u64,
    /// Its columns.
    pub cols: u64,
    /// Ranks of its neighbours; `None` beyond a fixed edge. A rank may be its own neighbour.
    pub neighbours: Neighbours,
}

/// Ranks around a part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Neighbours {
    /// Towards row -1.
    pub up: Option<i32>,
    /// Towards the row behind the last.
    pub down: Option<i32>,
    /// Towards column -1.
    pub left: Option<i32>,
    /// Towards the column behind the last.
    pub right: Option<i32>,
}

/// `length` items in `parts` parts that differ by one at most: first item and number of items of part `index`.
fn split(length: u64, parts: u32, index: u32) -> (u64, u64) {
    let (parts, index) = (u64::from(parts), u64::from(index));
    let (base, extra) = (length / parts, length % parts);
    (
        index * base + index.min(extra),
        base + u64::from(index < extra),
    )
}

impl Part {
    /// Part of `rank`. Ranks are numbered row by row in the grid.
    ///
    /// # Errors
    /// Where a halo has more elements than an MPI count can say.
    pub fn new(size: Size, dims: Dims, boundary: Boundary, rank: u32) -> Outcome<Part> {
        let (p, q) = (rank / dims.cols, rank % dims.cols);
        let (row0, rows) = split(size.rows, dims.rows, p);
        let (col0, cols) = split(size.cols, dims.cols, q);
        let row_neighbours = boundary != Boundary::Fixed;
        let col_neighbours = boundary == Boundary::Torus;
        let at = |p: u32, q: u32| (p * dims.cols + q) as i32;
        let neighbours = Neighbours {
            up: before(p, dims.rows, row_neighbours).map(|p| at(p, q)),
            down: after(p, dims.rows, row_neighbours).map(|p| at(p, q)),
            left: before(q, dims.cols, col_neighbours).map(|q| at(p, q)),
            right: after(q, dims.cols, col_neighbours).map(|q| at(p, q)),
        };
        let part = Part {
            row0,
            rows,
            col0,
            cols,
            neighbours,
        };
        let row_count = neighbours.up.or(neighbours.down).map_or(0, |_| cols);
        let col_count = neighbours.left.or(neighbours.right).map_or(0, |_| rows);
        let longest = row_count.max(col_count);
        if longest > i32::MAX as u64 {
            return Err(Failure::input(format!("a halo of {longest} cells is more than an MPI count can say (2^31 - 1): split that dimension with --dims")));
        }
        Ok(part)
    }

    /// Cells of the part.
    pub fn cells(&self) -> u64 {
        self.rows * self.cols
    }
}

fn before(i: u32, n: u32, periodic: bool) -> Option<u32> {
    if i > 0 {
        Some(i - 1)
    } else {
        periodic.then_some(n - 1)
    }
}

fn after(i: u32, n: u32, periodic: bool) -> Option<u32> {
    if i + 1 < n {
        Some(i + 1)
    } else {
        periodic.then_some(0)
    }
}

/// Where the cells of a part, with one halo cell on each side, lie in a buffer. In elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// From a cell to the one below.
    pub pitch: u64,
    /// Index of interior cell (0, 0).
    pub origin: u64,
    /// Elements of the buffer.
    pub elements: u64,
}

/// Rows of wide fields start at multiples of this many bytes, so that warps load whole lines.
const LINE_BYTES: u64 = 128;

impl Layout {
    /// Layout of `rows` x `cols` interior cells of `element_bytes`.
    pub fn new(rows: u64, cols: u64, element_bytes: u64) -> Layout {
        let line = LINE_BYTES / element_bytes;
        // Narrow fields stay dense: padding would multiply their memory.
        let (pitch, lead) = if cols >= 8 * line {
            ((cols + 2).next_multiple_of(line), line)
        } else {
            (cols + 2, 1)
        };
        let origin = pitch + lead;
        Layout {
            pitch,
            origin,
            elements: origin + rows * pitch + cols + 1,
        }
    }

    /// Index of a cell; -1 and `rows` or `cols` name the halo.
    pub fn at(&self, row: i64, col: i64) -> u64 {
        (self.origin as i64 + row * self.pitch as i64 + col) as u64
    }
}

/// Side of a tile of the initial field, as a power of two: some sixteen tiles along the longer side of the domain.
pub fn tile_shift(size: Size) -> u32 {
    (size.rows.max(size.cols) / 16).max(1).ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const BOUNDARIES: [Boundary; 3] = [Boundary::Ring, Boundary::Fixed, Boundary::Torus];

    proptest! {
        #[test]
        fn parts_cover_each_cell_once(rows in 1u64..40, cols in 1u64..40, p in 1u32..6, q in 1u32..6) {
            prop_assume!(rows >= u64::from(p) && cols >= u64::from(q));
            let mut seen = vec![0; (rows * cols) as usize];
            for rank in 0..p * q {
                let part = Part::new(Size { rows, cols }, Dims { rows: p, cols: q }, Boundary::Ring, rank).unwrap();
                for r in part.row0..part.row0 + part.rows {
                    for c in part.col0..part.col0 + part.cols {
                        seen[(r * cols + c) as usize] += 1;
                    }
                }
            }
            prop_assert!(seen.iter().all(|&n| n == 1));
        }

        #[test]
        fn neighbours_are_mutual(p in 1u32..5, q in 1u32..5, which in 0usize..3) {
            let (size, dims) = (Size { rows: 20, cols: 20 }, Dims { rows: p, cols: q });
            let of = |rank| Part::new(size, dims, BOUNDARIES[which], rank).unwrap();
            for rank in 0..p * q {
                let n = of(rank).neighbours;
                let me = Some(rank as i32);
                prop_assert!(n.up.is_none_or(|other| of(other as u32).neighbours.down == me));
                prop_assert!(n.left.is_none_or(|other| of(other as u32).neighbours.right == me));
                prop_assert!(n.down.is_none_or(|other| of(other as u32).neighbours.up == me));
                prop_assert!(n.right.is_none_or(|other| of(other as u32).neighbours.left == me));
            }
        }

        #[test]
        fn cells_and_halo_have_places_of_their_own(rows in 1u64..6, cols in 1u64..700, wide: bool) {
            let layout = Layout::new(rows, cols, if wide { 8 } else { 4 });
            let mut used = vec![false; layout.elements as usize];
            for r in -1..=rows as i64 {
                let corners = r >= 0 && r < rows as i64;
                for c in if corners { -1..=cols as i64 } else { 0..=cols as i64 - 1 } {
                    let i = layout.at(r, c) as usize;
                    prop_assert!(i < used.len() && !used[i]);
                    used[i] = true;
                }
            }
        }
    }

    #[test]
    fn the_papers_domain_fits_mpi_counts() {
        let size = Size {
            rows: 8,
            cols: 1 << 30,
        };
        assert!(Part::new(size, Dims { rows: 4, cols: 1 }, Boundary::Ring, 0).is_ok());
        let wide = Size {
            rows: 8,
            cols: 1 << 32,
        };
        assert!(
            Part::new(wide, Dims { rows: 4, cols: 1 }, Boundary::Ring, 0)
                .unwrap_err()
                .message
                .contains("--dims")
        );
        assert!(Part::new(wide, Dims { rows: 1, cols: 4 }, Boundary::Ring, 0).is_ok());
    }
}
