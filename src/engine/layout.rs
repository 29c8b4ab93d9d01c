//! The typemap of a non-contiguous datatype as runs of bytes (MPI 4.1 section 5.1).
//!
//! Such a receive lands packed, and its bytes are scattered at completion by these runs; a device buffer is gathered
//! and scattered by them too. They are computed when the operation is posted: the type may be freed right after.

use std::ffi::{c_int, c_void};

use crate::engine::types::{self, Combiner, TypeInfo};
use crate::mpi::{native, Abi, Handle};

/// A gapless run of data bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// From the buffer address, bytes.
    pub offset: i64,
    /// Bytes.
    pub length: u64,
}

/// The runs of one item, in typemap order: that is the order of the bytes on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    runs: Vec<Run>,
    /// Distance from one item to the next, bytes.
    extent: i64,
    /// Bytes of data in one item.
    size: u64,
}

/// A piece of a message: `length` bytes at `packed` on the wire belong at `offset` from the buffer address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// From the buffer address, bytes.
    pub offset: i64,
    /// From the start of the packed bytes.
    pub packed: u64,
    /// Bytes.
    pub length: u64,
}

impl Layout {
    /// Layout of `datatype`.
    ///
    /// # Safety
    /// `datatype` is a valid handle and `info` describes it.
    pub unsafe fn of(abi: &Abi, datatype: Handle, info: &TypeInfo) -> Option<Layout> {
        let mut runs = Runs(Vec::new());
        // SAFETY: passed on.
        let known = unsafe { flatten(abi, datatype, 0, 0, &mut runs) };
        let mut runs = runs.0;
        if !known || runs.iter().map(|run| run.length).sum::<u64>() != info.size {
            // SAFETY: passed on.
            runs = unsafe { unpack_markers(abi, datatype, info) }?;
        }
        Some(Layout {
            runs,
            extent: info.extent,
            size: info.size,
        })
    }

    /// One run of `bytes` from the buffer address.
    pub fn dense(bytes: u64) -> Layout {
        Layout {
            runs: vec![Run {
                offset: 0,
                length: bytes,
            }],
            extent: bytes as i64,
            size: bytes,
        }
    }

    /// Where its bytes start, if they are one run without end: from the buffer address.
    pub fn one_run(&self) -> Option<i64> {
        match self.runs.as_slice() {
            [run] if self.extent == self.size as i64 => Some(run.offset),
            _ => None,
        }
    }

    /// The pieces of wire bytes `from..to`.
    pub fn pieces(&self, from: u64, to: u64) -> Pieces<'_> {
        let item = from.checked_div(self.size).unwrap_or(0);
        let mut packed = item * self.size;
        let mut run = 0;
        while let Some(next) = self
            .runs
            .get(run)
            .filter(|next| packed + next.length <= from)
        {
            packed += next.length;
            run += 1;
        }
        Pieces {
            layout: self,
            item: item as i64,
            run,
            packed,
            from,
            to: if self.size == 0 { from } else { to },
        }
    }
}

/// Iterator of [`Layout::pieces`].
#[derive(Debug)]
pub struct Pieces<'a> {
    layout: &'a Layout,
    item: i64,
    run: usize,
    /// Wire position of the start of the current run.
    packed: u64,
    from: u64,
    to: u64,
}

impl Iterator for Pieces<'_> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        if self.packed >= self.to {
            return None;
        }
        if self.run == self.layout.runs.len() {
            self.run = 0;
            self.item += 1;
        }
        let run = self.layout.runs[self.run];
        let start = self.packed.max(self.from);
        let end = (self.packed + run.length).min(self.to);
        let offset = self.item * self.layout.extent + run.offset + (start - self.packed) as i64;
        self.packed += run.length;
        self.run += 1;
        Some(Piece {
            offset,
            packed: start,
            length: end - start,
        })
    }
}

struct Runs(Vec<Run>);

impl Runs {
    fn push(&mut self, offset: i64, length: u64) {
        if length == 0 {
            return;
        }
        match self.0.last_mut() {
            Some(last) if last.offset + last.length as i64 == offset => last.length += length,
            _ => self.0.push(Run { offset, length }),
        }
    }
}

const DEPTH_MAX: u32 = 32;

/// Adds the runs of one item at `base`; false where a constructor is not understood.
unsafe fn flatten(abi: &Abi, datatype: Handle, base: i64, depth: u32, runs: &mut Runs) -> bool {
    if depth > DEPTH_MAX {
        return false;
    }
    // SAFETY: passed on.
    let Some(info) = (unsafe { types::info(abi, datatype) }) else {
        return false;
    };
    if info.gapless {
        runs.push(base + info.true_lb, info.size);
        return true;
    }
    // SAFETY: passed on.
    let Some(contents) = (unsafe { types::Contents::of(abi, datatype) }) else {
        return false;
    };
    if contents.combiner == Combiner::Named {
        // The pair types of MPI_MINLOC are the only predefined ones with a gap: a value, then an aligned int.
        let int = size_of::<c_int>() as u64;
        if info.size <= int {
            return false;
        }
        runs.push(base, info.size - int);
        runs.push(base + info.true_extent - int as i64, int);
        return true;
    }
    let blocks = contents.blocks();
    let Some(blocks) = blocks else { return false };
    for block in blocks {
        let inner = contents.types[block.datatype];
        // SAFETY: a handle owned by `contents`.
        let Some(inner_info) = (unsafe { types::info(abi, inner) }) else {
            return false;
        };
        let displacement = match block.displacement {
            types::Displacement::Bytes(bytes) => bytes,
            types::Displacement::Items(items) => items * inner_info.extent,
        };
        let start = base + displacement;
        if inner_info.dense(block.count) {
            runs.push(start + inner_info.true_lb, inner_info.bytes(block.count));
            continue;
        }
        for i in 0..block.count {
            // SAFETY: passed on.
            if !unsafe { flatten(abi, inner, start + i * inner_info.extent, depth + 1, runs) } {
                return false;
            }
        }
    }
    true
}

/// Learns the typemap from the library itself: bytes that name their own position are unpacked into an image of the
/// item, one byte of the position at a time. Right for any type; costs six times the span of an item.
unsafe fn unpack_markers(abi: &Abi, datatype: Handle, info: &TypeInfo) -> Option<Vec<Run>> {
    let size = usize::try_from(info.size)
        .ok()
        .filter(|size| c_int::try_from(*size).is_ok())?;
    let span = usize::try_from(info.true_extent).ok()?;
    let image = |wire: &dyn Fn(usize) -> u8, fill: u8| -> Option<Vec<u8>> {
        let packed: Vec<u8> = (0..size).map(wire).collect();
        let mut image = vec![fill; span];
        let mut position: c_int = 0;
        // SAFETY: the item's data spans `true_extent` bytes from `true_lb`, which is where the image begins.
        let code = unsafe {
            native::unpack(
                packed.as_ptr().cast::<c_void>().cast_mut(),
                size as c_int,
                &raw mut position,
                image
                    .as_mut_ptr()
                    .wrapping_offset(-(info.true_lb as isize))
                    .cast(),
                1,
                datatype,
                abi.comm_self,
            )
        };
        (code == abi.success).then_some(image)
    };
    let mask = image(&|_| 1, 0)?;
    let planes: Vec<Vec<u8>> = (0..4)
        .map(|k| image(&|i| (i >> (8 * k)) as u8, 0))
        .collect::<Option<_>>()?;
    let position = |byte: usize| {
        (0..4)
            .map(|k| (planes[k][byte] as u64) << (8 * k))
            .sum::<u64>()
    };
    let mut bytes: Vec<(u64, i64)> = (0..span)
        .filter(|b| mask[*b] == 1)
        .map(|b| (position(b), b as i64 + info.true_lb))
        .collect();
    bytes.sort_unstable();
    let mut runs = Runs(Vec::new());
    for (_, offset) in &bytes {
        runs.push(*offset, 1);
    }
    (bytes.len() as u64 == info.size).then_some(runs.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(runs: &[(i64, u64)], extent: i64) -> Layout {
        Layout {
            runs: runs
                .iter()
                .map(|(offset, length)| Run {
                    offset: *offset,
                    length: *length,
                })
                .collect(),
            extent,
            size: runs.iter().map(|r| r.1).sum(),
        }
    }

    /// Byte-by-byte reference: where each wire byte belongs.
    fn reference(layout: &Layout, bytes: u64) -> Vec<i64> {
        let mut all = Vec::new();
        let mut item = 0;
        while (all.len() as u64) < bytes {
            for run in &layout.runs {
                all.extend((0..run.length as i64).map(|i| item * layout.extent + run.offset + i));
            }
            item += 1;
        }
        all.truncate(bytes as usize);
        all
    }

    #[test]
    fn pieces_cover_every_byte_once_in_wire_order() {
        for layout in [
            layout(&[(0, 3), (8, 5)], 16),
            layout(&[(12, 4), (0, 1)], 20),
            layout(&[(-3, 7)], -9),
        ] {
            let want = reference(&layout, 200);
            for from in [0u64, 1, 3, 7, 8, 9, 40] {
                for to in [from, from + 1, from + 2, 57, 123, 200] {
                    let mut got = Vec::new();
                    let mut at = from;
                    for piece in layout.pieces(from, to) {
                        assert_eq!(piece.packed, at);
                        at += piece.length;
                        got.extend((0..piece.length as i64).map(|i| piece.offset + i));
                    }
                    let end = (to as usize).max(from as usize);
                    assert_eq!(got, want[from as usize..end], "{from}..{to}");
                }
            }
        }
    }

    #[test]
    fn runs_that_touch_are_merged() {
        let mut runs = Runs(Vec::new());
        runs.push(0, 4);
        runs.push(4, 4);
        runs.push(0, 0);
        runs.push(16, 1);
        assert_eq!(
            runs.0,
            [
                Run {
                    offset: 0,
                    length: 8
                },
                Run {
                    offset: 16,
                    length: 1
                }
            ]
        );
    }
}
