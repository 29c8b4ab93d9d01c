//! The field of one part on its GPU: two buffers, and what kernels do with them.

use crate::args::{NormKind, Size};
use crate::domain::{tile_shift, Layout, Part};
use crate::failure::Outcome;
use crate::gpu::{Buffer, Gpu};
use anabranch_kernels::{shape_1d, shape_2d, shape_norm, shape_step, Real};
use mpi::datatype::Equivalence;

/// A cell's type: one that the kernels compute on and MPI sends.
pub trait Cell: Real + Equivalence {}
impl Cell for f32 {}
impl Cell for f64 {}

/// Every byte of fresh buffers: each cell is a NaN, so that a halo that was never received shows in the result.
const POISON: u64 = 0xff;

/// Two buffers with one halo cell on each side, of which each step reads the one and writes the other.
pub struct Field<T> {
    part: Part,
    size: Size,
    layout: Layout,
    buffers: [Buffer; 2],
    current: usize,
    partial: Buffer,
    partial_host: Vec<f64>,
    cell: std::marker::PhantomData<T>,
}

/// Device memory that [`Field::new`] allocates, in bytes.
pub fn bytes_needed(part: &Part, layout: &Layout, cell_bytes: u64) -> u64 {
    2 * layout.elements * cell_bytes + partial_results(part) * 8
}

fn partial_results(part: &Part) -> u64 {
    u64::from(shape_norm(part.rows, part.cols).grid[0])
}

impl<T: Cell> Field<T> {
    /// Allocates the field of a part of a domain. Fill it before use.
    pub fn new(gpu: &Gpu, part: Part, size: Size, layout: Layout) -> Outcome<Field<T>> {
        let bytes = layout.elements * T::BYTES;
        let buffers = [gpu.allocate(bytes)?, gpu.allocate(bytes)?];
        let results = partial_results(&part);
        let partial = gpu.allocate(results * 8)?;
        let partial_host = vec![0.0; results as usize];
        Ok(Field {
            part,
            size,
            layout,
            buffers,
            current: 0,
            partial,
            partial_host,
            cell: std::marker::PhantomData,
        })
    }

    /// The buffer that the next step reads.
    pub fn current(&self) -> &Buffer {
        &self.buffers[self.current]
    }

    fn address(&self, buffer: usize, row: i64, col: i64) -> u64 {
        self.buffers[buffer].address + self.layout.at(row, col) * T::BYTES
    }

    /// Launches a kernel of this cell type.
    ///
    /// # Safety
    /// As for [`Gpu::launch`].
    unsafe fn launch(
        &self,
        gpu: &Gpu,
        kernel: &str,
        values: &[u64],
        shape: anabranch_kernels::Launch,
    ) -> Outcome<()> {
        // SAFETY: passed on.
        unsafe { gpu.launch(&format!("{kernel}_{}", T::SUFFIX), values, shape) }
    }

    /// Sets both buffers anew: poison, then fixed edges, then the initial values in the one that is read first.
    pub fn reset(&mut self, gpu: &Gpu, seed: u64) -> Outcome<()> {
        self.current = 0;
        let (rows, cols) = (self.part.rows, self.part.cols);
        let n = self.part.neighbours;
        let (last_row, last_col) = (rows as i64, cols as i64);
        for buffer in 0..2 {
            let bytes = self.buffers[buffer].bytes;
            // SAFETY: exactly the buffer.
            unsafe {
                gpu.launch(
                    "fill_bytes",
                    &[self.buffers[buffer].address, bytes, POISON],
                    shape_1d(bytes / 8),
                )?
            };
            for (edge, row, col, rows, cols) in [
                (n.up, -1, 0, 1, cols),
                (n.down, last_row, 0, 1, cols),
                (n.left, 0, -1, rows, 1),
                (n.right, 0, last_col, rows, 1),
            ] {
                if edge.is_none() {
                    self.fill(gpu, buffer, row, col, rows, cols, seed)?;
                }
            }
        }
        self.fill(gpu, 0, 0, 0, rows, cols, seed)?;
        gpu.synchronize()
    }

    #[allow(clippy::too_many_arguments, reason = "a rectangle has four")]
    fn fill(
        &self,
        gpu: &Gpu,
        buffer: usize,
        row: i64,
        col: i64,
        rows: u64,
        cols: u64,
        seed: u64,
    ) -> Outcome<()> {
        let global_row = (self.part.row0 as i64 + row) as u64;
        let global_col = (self.part.col0 as i64 + col) as u64;
        let out = self.address(buffer, row, col);
        let values = [
            out,
            rows,
            cols,
            self.layout.pitch,
            global_row,
            global_col,
            seed,
            u64::from(tile_shift(self.size)),
        ];
        // SAFETY: a rectangle of cells and halo, inside the buffer by its layout.
        unsafe { self.launch(gpu, "field_fill", &values, shape_2d(rows, cols)) }
    }

    /// Computes the next iteration and makes it the current one. Returns at once: the stream does it.
    pub fn step(&mut self, gpu: &Gpu) -> Outcome<()> {
        let next = 1 - self.current;
        let (rows, cols) = (self.part.rows, self.part.cols);
        let values = [
            self.address(next, 0, 0),
            self.address(self.current, 0, 0),
            rows,
            cols,
            self.layout.pitch,
        ];
        // SAFETY: both buffers hold the part and its halo by the layout.
        unsafe { self.launch(gpu, "jacobi_step", &values, shape_step(rows, cols))? };
        self.current = next;
        Ok(())
    }

    /// What this part contributes to the norm of the last step's change: the largest change, or the sum of squares.
    pub fn partial_norm(&mut self, gpu: &Gpu, kind: NormKind) -> Outcome<f64> {
        let (rows, cols) = (self.part.rows, self.part.cols);
        let (new, old) = (
            self.address(self.current, 0, 0),
            self.address(1 - self.current, 0, 0),
        );
        let values = [
            new,
            old,
            rows,
            cols,
            self.layout.pitch,
            self.partial.address,
        ];
        let kernel = match kind {
            NormKind::Max => "norm_max",
            NormKind::L2 => "norm_l2",
        };
        // SAFETY: both buffers hold the part; `partial` has a place for each block of this shape.
        unsafe { self.launch(gpu, kernel, &values, shape_norm(rows, cols))? };
        gpu.download(&mut self.partial_host, &self.partial, 0)?;
        Ok(self
            .partial_host
            .iter()
            .copied()
            .fold(0.0, |a, b| join(kind, a, b)))
    }

    /// What this part adds to the hash of the field.
    pub fn partial_hash(&self, gpu: &Gpu) -> Outcome<u64> {
        let sum = gpu.allocate(8)?;
        gpu.upload(&sum, &[0u64])?;
        let (rows, cols) = (self.part.rows, self.part.cols);
        let field = self.address(self.current, 0, 0);
        let values = [
            field,
            rows,
            cols,
            self.layout.pitch,
            self.part.row0,
            self.part.col0,
            sum.address,
        ];
        // SAFETY: the buffer holds the part.
        unsafe { self.launch(gpu, "field_hash", &values, shape_hash(rows, cols))? };
        let mut host = [0u64];
        gpu.download(&mut host, &sum, 0)?;
        Ok(host[0])
    }

    /// The pixels of a picture that show this part; the others are zero.
    pub fn sample(&self, gpu: &Gpu, height: u64, width: u64) -> Outcome<Vec<f32>> {
        let mut pixels = vec![0f32; (height * width) as usize];
        let picture = gpu.allocate(height * width * 4)?;
        gpu.upload(&picture, &pixels)?;
        let p = &self.part;
        let field = self.address(self.current, 0, 0);
        let values = [
            picture.address,
            height,
            width,
            field,
            p.rows,
            p.cols,
            self.layout.pitch,
            p.row0,
            p.col0,
            self.size.rows,
            self.size.cols,
        ];
        // SAFETY: the buffer holds the part, the picture its pixels.
        unsafe { self.launch(gpu, "field_sample", &values, shape_2d(height, width))? };
        gpu.download(&mut pixels, &picture, 0)?;
        Ok(pixels)
    }

    /// The part's cells, row by row, without halo.
    pub fn download(&self, gpu: &Gpu) -> Outcome<Vec<T>> {
        let mut all = vec![T::default(); self.layout.elements as usize];
        gpu.download(&mut all, self.current(), 0)?;
        let row = |r: u64| {
            let first = self.layout.at(r as i64, 0) as usize;
            &all[first..first + self.part.cols as usize]
        };
        Ok((0..self.part.rows).flat_map(row).copied().collect())
    }
}

/// Fewer blocks than cells ask for: each thread ends in one atomic addition to the same word.
fn shape_hash(rows: u64, cols: u64) -> anabranch_kernels::Launch {
    let mut shape = shape_2d(rows, cols);
    shape.grid[0] = shape.grid[0].min(256);
    shape.grid[1] = shape.grid[1].min(1024 / shape.grid[0].min(1024));
    shape
}

/// Joins contributions to a norm, in the order of ranks.
pub fn join(kind: NormKind, a: f64, b: f64) -> f64 {
    match kind {
        NormKind::Max if b > a || b.is_nan() => b,
        NormKind::Max => a,
        NormKind::L2 => a + b,
    }
}

/// The norm from the joined contributions of all ranks.
pub fn finish(kind: NormKind, joined: f64) -> f64 {
    match kind {
        NormKind::Max => joined,
        NormKind::L2 => joined.sqrt(),
    }
}
