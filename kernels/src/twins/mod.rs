//! The registry of twins.

mod bytes;
mod columns;
mod field;
mod norm;
mod step;

use crate::access::{Access, AccessKind, Fault, Translate};
use crate::params::{Launch, Params};

/// A kernel as the host sees it.
pub struct Twin {
    /// The kernel's name in the PTX.
    pub name: &'static str,
    /// Size of each parameter in bytes (4 or 8), in order; also its alignment.
    pub params: &'static [usize],
    /// What a launch touches. Ranges of one kind may overlap; reads are what the kernel may read, writes what it may write.
    pub accesses: fn(&Params, Launch) -> Vec<Access>,
    run: unsafe fn(&Params, Launch, Translate<'_>) -> Result<(), Fault>,
}

impl Twin {
    /// Does what the kernel does, on the calling thread.
    ///
    /// # Errors
    /// A [`Fault`] as a GPU would raise it; memory may be half written then.
    ///
    /// # Safety
    /// `translate` must return null or a pointer to memory that is readable and writable for the length asked for
    /// until this function returns.
    pub unsafe fn run(
        &self,
        params: &Params,
        launch: Launch,
        translate: Translate<'_>,
    ) -> Result<(), Fault> {
        if params.values().len() != self.params.len()
            || launch.grid.contains(&0)
            || launch.block.contains(&0)
        {
            return Err(Fault::InvalidLaunch);
        }
        // SAFETY: the caller's promise on `translate` is what the twins ask for.
        unsafe { (self.run)(params, launch, translate) }
    }

    /// Bytes that a launch moves to and from memory: its cost where memory bandwidth is what limits it.
    pub fn bytes_touched(&self, params: &Params, launch: Launch) -> u64 {
        (self.accesses)(params, launch)
            .iter()
            .map(Access::bytes)
            .fold(0, u64::saturating_add)
    }
}

impl std::fmt::Debug for Twin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Twin")
            .field("name", &self.name)
            .field("params", &self.params)
            .finish()
    }
}

const P: usize = 8; // a pointer or a 64-bit number
const W: usize = 4; // a 32-bit number

macro_rules! twins {
    ($($name:literal: [$($size:expr),*], $accesses:expr, $run:expr;)*) => {
        &[$(Twin { name: $name, params: &[$($size),*], accesses: $accesses, run: $run }),*]
    };
}

/// All twins, one for each kernel of the PTX.
pub static TWINS: &[Twin] = twins! {
    "jacobi_step_f32": [P, P, P, P, P], step::accesses::<f32>, step::run::<f32>;
    "jacobi_step_f64": [P, P, P, P, P], step::accesses::<f64>, step::run::<f64>;
    "norm_max_f32": [P, P, P, P, P, P], norm::accesses::<f32>, norm::run::<f32, norm::Max>;
    "norm_max_f64": [P, P, P, P, P, P], norm::accesses::<f64>, norm::run::<f64, norm::Max>;
    "norm_l2_f32": [P, P, P, P, P, P], norm::accesses::<f32>, norm::run::<f32, norm::SumOfSquares>;
    "norm_l2_f64": [P, P, P, P, P, P], norm::accesses::<f64>, norm::run::<f64, norm::SumOfSquares>;
    "field_fill_f32": [P, P, P, P, P, P, P, W], field::fill_accesses::<f32>, field::fill::<f32>;
    "field_fill_f64": [P, P, P, P, P, P, P, W], field::fill_accesses::<f64>, field::fill::<f64>;
    "field_hash_f32": [P, P, P, P, P, P, P], field::hash_accesses::<f32>, field::hash::<f32>;
    "field_hash_f64": [P, P, P, P, P, P, P], field::hash_accesses::<f64>, field::hash::<f64>;
    "field_sample_f32": [P, P, P, P, P, P, P, P, P, P, P], field::sample_accesses::<f32>, field::sample::<f32>;
    "field_sample_f64": [P, P, P, P, P, P, P, P, P, P, P], field::sample_accesses::<f64>, field::sample::<f64>;
    "pack_column_b32": [P, P, P, P], columns::pack_accesses::<u32>, columns::pack::<u32>;
    "pack_column_b64": [P, P, P, P], columns::pack_accesses::<u64>, columns::pack::<u64>;
    "unpack_column_b32": [P, P, P, P], columns::unpack_accesses::<u32>, columns::unpack::<u32>;
    "unpack_column_b64": [P, P, P, P], columns::unpack_accesses::<u64>, columns::unpack::<u64>;
    "fill_bytes": [P, P, W], bytes::fill_accesses, bytes::fill;
    "fill_pattern": [P, P, P, P], bytes::fill_accesses, bytes::fill_pattern;
    "compare_pattern": [P, P, P, P, P], bytes::compare_pattern_accesses, bytes::compare_pattern;
    "compare_buffers": [P, P, P, P], bytes::compare_buffers_accesses, bytes::compare_buffers;
};

/// The twin of the kernel of that name.
pub fn twin(name: &str) -> Option<&'static Twin> {
    TWINS.iter().find(|t| t.name == name)
}

/// A rectangle of a field: `rows` x `cols` elements of `element_bytes`, `pitch` elements apart.
fn rectangle(
    address: u64,
    rows: u64,
    cols: u64,
    pitch: u64,
    element_bytes: u64,
    kind: AccessKind,
) -> Access {
    if rows == 0 || cols == 0 {
        return Access::run(address, 0, kind);
    }
    Access {
        address,
        row_bytes: cols.wrapping_mul(element_bytes),
        pitch_bytes: pitch.wrapping_mul(element_bytes),
        rows,
        kind,
    }
}

/// Elements from the first to behind the last of such a rectangle.
fn rectangle_elements(rows: u64, cols: u64, pitch: u64) -> u64 {
    if rows == 0 || cols == 0 {
        return 0;
    }
    (rows - 1).saturating_mul(pitch).saturating_add(cols)
}
