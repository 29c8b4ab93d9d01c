//! The project's CUDA kernels as PTX, and a host twin of each.
//!
//! A twin does on the host what its kernel does on a GPU, **bit for bit** on finite input: both use only IEEE
//! operations with explicit rounding, and add across threads either integers or in a fixed order. The software
//! CUDA driver runs twins in place of kernels, programs compare kernels with twins on real GPUs, and host
//! references are computed by twins.
//!
//! ```
//! let twin = anabranch_kernels::twin("jacobi_step_f32").unwrap();
//! assert_eq!(twin.params.len(), 5);
//! assert!(anabranch_kernels::PTX.contains(".entry jacobi_step_f32"));
//! ```
//!
//! # Conventions of the kernels
//! Pitches count elements, sizes are 64 bits wide, and every kernel loops over its grid, so that any launch shape
//! gives the same result. The exception is `norm_*`, whose partial results depend on the number of blocks and which
//! needs blocks of [`NORM_THREADS`] threads. A pointer to a field points to its interior cell (0, 0).

mod access;
pub mod generator;
mod params;
mod real;
mod shape;
mod twins;

pub use access::{Access, AccessKind, Fault, Memory, Translate};
pub use params::{Launch, Params};
pub use real::Real;
pub use shape::{shape_1d, shape_2d, shape_norm, shape_step, NORM_BLOCKS_MAX, NORM_THREADS};
pub use twins::{twin, Twin, TWINS};

/// The kernels as PTX text (compute capability 6.0, PTX ISA 7.8), without a final NUL.
///
/// Loads on every driver since R520 and every GPU since Pascal. Made from `src/cuda` by `build_ptx.py`.
pub const PTX: &str = include_str!("kernels.ptx");

#[cfg(test)]
mod tests;
