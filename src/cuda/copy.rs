//! Copies, and how the driver is told to make them.

use super::driver::Driver;
use super::error::{Error, Result};
use super::state::Entered;
use super::types::{
    code, memory_type, BatchAttributes, Context, Memcpy2d, Stream, SOURCE_ORDER_STREAM,
};
use smallvec::SmallVec;
use std::ffi::c_void;
use std::ops::{Range, RangeInclusive};
use std::sync::atomic::{AtomicBool, Ordering};

/// A copy. Addresses are of the unified address space.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Copy {
    /// Contiguous bytes, wherever they are.
    Linear {
        /// Destination.
        dst: u64,
        /// Source.
        src: u64,
        /// Bytes.
        bytes: u64,
    },
    /// Contiguous bytes of pinned host memory, to a device.
    Up {
        /// Destination.
        dst: u64,
        /// Source.
        src: u64,
        /// Bytes.
        bytes: u64,
    },
    /// Contiguous bytes between two contexts of this process, whether or not they have peer access.
    Peer {
        /// Destination.
        dst: u64,
        /// Context of the destination.
        dst_context: Context,
        /// Source.
        src: u64,
        /// Context of the source.
        src_context: Context,
        /// Bytes.
        bytes: u64,
    },
    /// Rows of equal length at equal distances.
    Rows {
        /// Destination of the first row.
        dst: u64,
        /// Bytes from row to row in the destination.
        dst_pitch: u64,
        /// Source of the first row.
        src: u64,
        /// Bytes from row to row in the source.
        src_pitch: u64,
        /// Bytes of a row, at most the smaller pitch.
        width: u64,
        /// Rows.
        rows: u64,
    },
}

impl Copy {
    /// Bytes that it moves.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        match self {
            Copy::Linear { bytes, .. } | Copy::Up { bytes, .. } | Copy::Peer { bytes, .. } => {
                *bytes
            }
            Copy::Rows { width, rows, .. } => width * rows,
        }
    }

    /// Whether the two may write to the same bytes.
    #[must_use]
    pub fn overlaps(&self, other: &Copy) -> bool {
        let place = |copy: &Copy| match *copy {
            Copy::Linear { dst, bytes, .. }
            | Copy::Up { dst, bytes, .. }
            | Copy::Peer { dst, bytes, .. } => (dst, bytes),
            Copy::Rows {
                dst,
                dst_pitch,
                rows,
                ..
            } => (dst, dst_pitch.saturating_mul(rows)),
        };
        overlap(place(self), place(other))
    }
}

/// Whether two ranges, each an address and a length, have bytes in common.
#[must_use]
pub fn overlap(one: (u64, u64), other: (u64, u64)) -> bool {
    let is_before_end = |start: u64, of: (u64, u64)| start < of.0.saturating_add(of.1);
    is_before_end(one.0, other) && is_before_end(other.0, one)
}

/// Set once the driver has turned out to have no batches.
static NO_BATCHES: AtomicBool = AtomicBool::new(false);

/// Starts copies on a stream, as one batch if the driver has batches. Nobody may rely on their order. From
/// the second on, a copy of a batch costs a device 1 to 3 us less, and its process 1 us less, than one
/// started by itself. Where several are short and from host memory, the first goes ahead (see
/// [`SENT_ALONG_MAX`]).
///
/// After an error some of them may have been started.
pub(crate) fn start_all(entered: &Entered, stream: Stream, copies: &[Copy]) -> Result<()> {
    if let [first @ Copy::Up { dst, src, bytes }, others @ ..] = copies {
        if may_be_sent_along(first) && others.iter().any(may_be_sent_along) {
            let ahead = in_rows(*dst, *src, *bytes, AHEAD_IN_ROWS);
            start(entered, stream, &ahead)?;
            return start_together(entered, stream, others);
        }
    }
    start_together(entered, stream, copies)
}

/// Starts copies, all in one batch.
fn start_together(entered: &Entered, stream: Stream, copies: &[Copy]) -> Result<()> {
    if copies.len() > 1 && !NO_BATCHES.load(Ordering::Relaxed) {
        if let Some(arrays) = Arrays::of(copies) {
            match arrays.start(entered.driver(), stream) {
                Err(Error::Missing(_)) => NO_BATCHES.store(true, Ordering::Relaxed),
                Err(error) if error.is(code::NOT_SUPPORTED) => {
                    NO_BATCHES.store(true, Ordering::Relaxed);
                }
                result => return result,
            }
        }
    }
    copies
        .iter()
        .try_for_each(|copy| start(entered, stream, copy))
}

/// One entry for each copy of a batch: for a few nothing is allocated.
pub(super) type OfEach<T> = SmallVec<[T; 8]>;

/// The arguments of a batch.
struct Arrays {
    dsts: OfEach<u64>,
    srcs: OfEach<u64>,
    sizes: OfEach<usize>,
}

impl Arrays {
    /// `None` if some copy is not one run of bytes.
    fn of(copies: &[Copy]) -> Option<Arrays> {
        let mut arrays = Arrays {
            dsts: OfEach::with_capacity(copies.len()),
            srcs: OfEach::with_capacity(copies.len()),
            sizes: OfEach::with_capacity(copies.len()),
        };
        for copy in copies {
            let (Copy::Linear { dst, src, bytes } | Copy::Up { dst, src, bytes }) = *copy else {
                return None;
            };
            if bytes == 0 {
                return None;
            }
            arrays.dsts.push(dst);
            arrays.srcs.push(src);
            arrays.sizes.push(usize::try_from(bytes).ok()?);
        }
        Some(arrays)
    }

    fn start(mut self, driver: &Driver, stream: Stream) -> Result<()> {
        let mut attributes = BatchAttributes {
            source_order: SOURCE_ORDER_STREAM,
            ..BatchAttributes::default()
        };
        let (mut first, mut failed) = (0usize, 0usize);
        let count = self.sizes.len();
        let (dsts, srcs) = (self.dsts.as_mut_ptr(), self.srcs.as_mut_ptr());
        let sizes = self.sizes.as_mut_ptr();
        let (like, from, failed) = (&raw mut attributes, &raw mut first, &raw mut failed);
        // SAFETY: three arrays of `count` entries, one row of attributes that holds from entry 0 on. The driver
        // checks addresses; the engine must keep them valid.
        let newer =
            unsafe { driver.memcpy_batch_async(dsts, srcs, sizes, count, like, from, 1, stream) };
        match newer {
            // CUDA 12.8 and 12.9.
            // SAFETY: as above; the number of a copy is written.
            Err(Error::Missing(_)) => unsafe {
                driver
                    .memcpy_batch_async_12(dsts, srcs, sizes, count, like, from, 1, failed, stream)
            },
            result => result,
        }
    }
}

/// Starts one copy.
pub(crate) fn start(entered: &Entered, stream: Stream, copy: &Copy) -> Result<()> {
    if copy.bytes() == 0 {
        return Ok(());
    }
    let driver = entered.driver();
    // SAFETY: the driver checks device addresses. The engine must keep host memory valid until the copy is done,
    // and does so by holding buffers in the transfer.
    let linear = |dst, src, bytes| unsafe { driver.memcpy_async(dst, src, size(bytes)?, stream) };
    match *copy {
        Copy::Linear { dst, src, bytes } => linear(dst, src, bytes),
        Copy::Up { dst, src, bytes } => start(entered, stream, &in_rows(dst, src, bytes, IN_ROWS)),
        Copy::Peer {
            dst,
            dst_context,
            src,
            src_context,
            bytes,
        } => {
            let bytes = size(bytes)?;
            // SAFETY: as above.
            unsafe { driver.memcpy_peer_async(dst, dst_context, src, src_context, bytes, stream) }
        }
        Copy::Rows {
            dst,
            dst_pitch,
            src,
            src_pitch,
            width,
            rows,
        } => {
            let copy = rows_copy(
                dst,
                size(dst_pitch)?,
                src,
                size(src_pitch)?,
                size(width)?,
                size(rows)?,
            );
            // SAFETY: as above.
            match unsafe { driver.memcpy_2d_async(&raw const copy, stream) } {
                // Row by row then.
                Err(Error::Missing(_)) => (0..rows).try_for_each(|row| {
                    linear(dst + row * dst_pitch, src + row * src_pitch, width)
                }),
                result => result,
            }
        }
    }
}

/// A copy from host memory of fewer bytes is read by the processor that launches it and sent along with the
/// command, if it is one run and its stream has nothing to do (driver 580): 6 us for 24 KiB, and twice that
/// if another core has written them. A copy of rows, one behind another on its stream, and a longer one take
/// 2 us to launch, in a batch 0.6 to 0.9, and the device reads. So the first of a batch goes ahead: 16 of 8
/// KiB that another core has written are launched in 2.3 us each by a batch and in 0.9 with one ahead, and
/// done after 3.2 and 1.9; of 16 KiB 2.6 and 0.6, 4.1 and 1.8 (`docs/results/h100-x1-upwards.txt`, 7).
const SENT_ALONG_MAX: u64 = 28 << 10;
/// Lengths in bytes of copies that should not be sent along when they come alone, so they are made in rows.
/// Single messages of 12 to 24 KiB from host memory, two processes, times the speed without the library:
/// acknowledged 0.82 to 0.86 in one run, 0.96 to 1.0 in rows; round trips 1.3 to 1.5 and 1.4 to 1.7
/// (`docs/results/h100-x1-upwards.txt`).
const IN_ROWS: Range<u64> = 10 << 10..SENT_ALONG_MAX;
/// The same for a copy that goes ahead of others, which are launched the sooner.
const AHEAD_IN_ROWS: Range<u64> = 4 << 10..SENT_ALONG_MAX;
/// Rows into which such a copy is cut: the fewest that divide it.
const ROWS: RangeInclusive<u64> = 2..=16;

fn may_be_sent_along(copy: &Copy) -> bool {
    matches!(copy, Copy::Up { bytes, .. } if *bytes < SENT_ALONG_MAX)
}

/// The copy that brings pinned host memory to a device: in rows, if its length is one of these.
fn in_rows(dst: u64, src: u64, bytes: u64, lengths: Range<u64>) -> Copy {
    let rows = ROWS.into_iter().find(|rows| bytes % rows == 0);
    match rows.filter(|_| lengths.contains(&bytes)) {
        None => Copy::Linear { dst, src, bytes },
        Some(rows) => Copy::Rows {
            dst,
            dst_pitch: bytes / rows,
            src,
            src_pitch: bytes / rows,
            width: bytes / rows,
            rows,
        },
    }
}

fn size(value: u64) -> Result<usize> {
    usize::try_from(value).map_err(|_| Error::Exhausted("address space"))
}

fn rows_copy(
    dst: u64,
    dst_pitch: usize,
    src: u64,
    src_pitch: usize,
    width: usize,
    rows: usize,
) -> Memcpy2d {
    Memcpy2d {
        src_x_in_bytes: 0,
        src_y: 0,
        src_memory_type: memory_type::UNIFIED,
        src_host: std::ptr::null(),
        src_device: src,
        src_array: std::ptr::null_mut::<c_void>(),
        src_pitch,
        dst_x_in_bytes: 0,
        dst_y: 0,
        dst_memory_type: memory_type::UNIFIED,
        dst_host: std::ptr::null_mut(),
        dst_device: dst,
        dst_array: std::ptr::null_mut::<c_void>(),
        dst_pitch,
        width_in_bytes: width,
        height: rows,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::types::Memcpy3d;

    #[test]
    fn bytes_of_copies() {
        assert_eq!(
            Copy::Linear {
                dst: 0,
                src: 0,
                bytes: 7
            }
            .bytes(),
            7
        );
        let rows = Copy::Rows {
            dst: 0,
            dst_pitch: 16,
            src: 0,
            src_pitch: 8,
            width: 4,
            rows: 3,
        };
        assert_eq!(rows.bytes(), 12);
    }

    #[test]
    fn copies_from_host_memory_are_cut_into_rows_that_cover_them() {
        for bytes in (0..64 << 10).chain([1 << 20]) {
            for lengths in [IN_ROWS, AHEAD_IN_ROWS] {
                let may_be = lengths.contains(&bytes);
                match in_rows(1000, 5000, bytes, lengths) {
                    // Lengths that programs send can be cut into rows.
                    Copy::Linear { .. } => assert!(!may_be || bytes % 4 != 0, "{bytes}"),
                    Copy::Rows {
                        dst: 1000,
                        dst_pitch,
                        src: 5000,
                        src_pitch,
                        width,
                        rows,
                    } => {
                        assert!(dst_pitch == width && src_pitch == width, "{bytes}");
                        assert!(may_be && width * rows == bytes && rows > 1, "{bytes}");
                    }
                    other => panic!("{other:?}"),
                }
            }
        }
        let is_in_rows = |bytes| {
            in_rows(0, 0, bytes, IN_ROWS)
                != (Copy::Linear {
                    dst: 0,
                    src: 0,
                    bytes,
                })
        };
        assert!(is_in_rows(20 << 10));
        assert!(!is_in_rows(16411), "a prime");
        assert!(!is_in_rows(8 << 10), "short");
    }

    #[test]
    fn the_layout_is_that_of_the_driver_on_64_bits() {
        // CUDA_MEMCPY2D in cuda.h: 16 members, the two 32-bit ones padded.
        assert_eq!(std::mem::size_of::<Memcpy2d>(), 128);
        assert_eq!(std::mem::offset_of!(Memcpy2d, dst_memory_type), 72);
        assert_eq!(std::mem::offset_of!(Memcpy2d, width_in_bytes), 112);
        // CUDA_MEMCPY3D: 25 members, likewise.
        assert_eq!(std::mem::size_of::<Memcpy3d>(), 200);
        assert_eq!(std::mem::offset_of!(Memcpy3d, dst_memory_type), 120);
        assert_eq!(std::mem::offset_of!(Memcpy3d, width_in_bytes), 176);
    }
}
