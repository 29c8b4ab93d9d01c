//! Launch shapes that suit the kernels.

use crate::params::Launch;

/// Threads of a block of the `norm_*` kernels: exactly this many.
pub const NORM_THREADS: u32 = 256;
/// Most blocks, hence partial results, of a `norm_*` launch by [`shape_norm`].
pub const NORM_BLOCKS_MAX: u32 = 1024;

/// Rows that a thread of `jacobi_step_*` does, as `step.cuh` has it.
const STEP_ROWS: u64 = 4;
const THREADS: u64 = 256;
/// Largest grid in x and y that every GPU takes.
const GRID_X_MAX: u64 = (1 << 31) - 1;
const GRID_Y_MAX: u64 = 65535;

/// For kernels that loop in x over `items` (columns, words, bytes).
pub fn shape_1d(items: u64) -> Launch {
    let blocks = items.div_ceil(THREADS).clamp(1, 1 << 16);
    Launch {
        grid: [blocks as u32, 1, 1],
        block: [THREADS as u32, 1, 1],
    }
}

/// For kernels that loop over `rows` x `cols` cells. Narrow fields get blocks that span several rows.
pub fn shape_2d(rows: u64, cols: u64) -> Launch {
    let width = cols.clamp(1, THREADS).next_power_of_two();
    let height = THREADS / width;
    let grid_x = cols.div_ceil(width).clamp(1, GRID_X_MAX);
    let grid_y = rows.div_ceil(height).clamp(1, GRID_Y_MAX);
    Launch {
        grid: [grid_x as u32, grid_y as u32, 1],
        block: [width as u32, height as u32, 1],
    }
}

/// For the `jacobi_step_*` kernels, in which a thread does [`STEP_ROWS`] rows one below the other.
pub fn shape_step(rows: u64, cols: u64) -> Launch {
    shape_2d(rows.div_ceil(STEP_ROWS), cols)
}

/// For the `norm_*` kernels: about 16 cells a thread, at most [`NORM_BLOCKS_MAX`] blocks.
pub fn shape_norm(rows: u64, cols: u64) -> Launch {
    let cells_of_a_block = u64::from(NORM_THREADS) * 16;
    let blocks = rows
        .saturating_mul(cols)
        .div_ceil(cells_of_a_block)
        .clamp(1, u64::from(NORM_BLOCKS_MAX));
    Launch {
        grid: [blocks as u32, 1, 1],
        block: [NORM_THREADS, 1, 1],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shapes_stay_within_what_gpus_take() {
        for (rows, cols) in [(1, 1), (8, 1 << 30), (1 << 30, 8), (1031, 517), (2, 3)] {
            let s = shape_2d(rows, cols);
            assert!(
                s.block[0] * s.block[1] <= 256 && s.block[0] * s.block[1] >= 128,
                "{s:?}"
            );
            assert!(
                u64::from(s.grid[0]) * u64::from(s.block[0]) >= cols,
                "{s:?}"
            );
            assert!(s.grid[1] <= 65535, "{s:?}");
            assert!(shape_norm(rows, cols).grid[0] <= NORM_BLOCKS_MAX);
        }
    }
}
