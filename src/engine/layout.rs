//! The typemap of a non-contiguous datatype as runs of bytes (MPI 4.1 section 5.1).
//!
//! A receive of such a type lands packed, and at completion its bytes are scattered by these runs. A device
//! buffer is gathered and scattered by them, too. An operation holds the layout from when it is posted,
//! because the type may be freed right afterwards.

use std::ffi::c_int;

use crate::engine::types::runs::{self, Run, RUNS_MAX};
use crate::engine::types::TypeInfo;
use crate::mpi::{native, Abi, Datatype, Out};

/// The runs of one item, in typemap order: that is the order of the bytes on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Each run with the position on the wire of its first byte, within the item.
    runs: Vec<(u64, Run)>,
    /// From the first byte of an item to behind the last, from the buffer address.
    bounds: (i64, i64),
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
    /// Layout of `datatype`; `None` if the library does not tell, or it has too many runs.
    pub fn of(abi: &Abi, datatype: Datatype, info: &TypeInfo) -> Option<Layout> {
        let runs = runs::runs_of(abi, datatype, RUNS_MAX)
            .filter(|runs| runs.iter().map(|run| run.length).sum::<u64>() == info.size);
        let runs = match runs {
            Some(runs) => runs,
            None => runs_by_packing(abi, datatype, info)?,
        };
        Some(Layout::new(runs, info.extent))
    }

    /// For items with these runs, at this distance.
    pub fn new(runs: Vec<Run>, extent: i64) -> Layout {
        let mut size = 0;
        let mut bounds = (i64::MAX, i64::MIN);
        let placed = runs
            .into_iter()
            .map(|run| {
                let at = size;
                size += run.length;
                let end = run.offset + run.length as i64;
                bounds = (bounds.0.min(run.offset), bounds.1.max(end));
                (at, run)
            })
            .collect();
        Layout {
            runs: placed,
            bounds,
            extent,
            size,
        }
    }

    /// One run of `bytes` from the buffer address.
    pub fn dense(bytes: u64) -> Layout {
        let run = Run {
            offset: 0,
            length: bytes,
        };
        Layout::new(vec![run], bytes as i64)
    }

    /// Memory that it takes.
    pub fn bytes_held(&self) -> usize {
        self.runs.capacity() * size_of::<(u64, Run)>()
    }

    /// The offset of its first byte from the buffer address, if its items form one endless run.
    pub fn one_run(&self) -> Option<i64> {
        match self.runs.as_slice() {
            [(_, run)] if self.extent == self.size as i64 => Some(run.offset),
            _ => None,
        }
    }

    /// The range that encloses the first `bytes` bytes on the wire, from the first to behind the last, from
    /// the buffer address. An item that is begun counts as a whole.
    pub fn bounds(&self, bytes: u64) -> (i64, i64) {
        if bytes == 0 || self.size == 0 {
            return (0, 0);
        }
        let last = (bytes.div_ceil(self.size) - 1) as i64 * self.extent;
        (self.bounds.0 + last.min(0), self.bounds.1 + last.max(0))
    }

    /// The pieces of wire bytes `from..to`.
    pub fn pieces(&self, from: u64, to: u64) -> Pieces<'_> {
        let item = from.checked_div(self.size).unwrap_or(0);
        let within = from - item * self.size;
        let run = self
            .runs
            .partition_point(|(at, run)| at + run.length <= within);
        Pieces {
            layout: self,
            item,
            run,
            from,
            to: if self.size == 0 { from } else { to },
        }
    }
}

/// Iterator of [`Layout::pieces`].
#[derive(Debug)]
pub struct Pieces<'a> {
    layout: &'a Layout,
    item: u64,
    run: usize,
    from: u64,
    to: u64,
}

impl Iterator for Pieces<'_> {
    type Item = Piece;

    fn next(&mut self) -> Option<Piece> {
        if self.from >= self.to {
            return None;
        }
        if self.run == self.layout.runs.len() {
            self.run = 0;
            self.item += 1;
        }
        let (at, run) = self.layout.runs[self.run];
        let packed = self.item * self.layout.size + at;
        let start = self.from;
        let end = (packed + run.length).min(self.to);
        self.from = end;
        self.run += 1;
        Some(Piece {
            offset: self.item as i64 * self.layout.extent + run.offset + (start - packed) as i64,
            packed: start,
            length: end - start,
        })
    }
}

/// Learns the typemap from the library itself: the bytes of an image of the item name their own position and
/// are packed, one byte of the position at a time. Correct for any type, even if items overlap. Costs the
/// span of an item in memory and up to eight times the time of packing it.
fn runs_by_packing(abi: &Abi, datatype: Datatype, info: &TypeInfo) -> Option<Vec<Run>> {
    let size = usize::try_from(info.size).ok()?;
    let room = c_int::try_from(size).ok()?;
    let span = usize::try_from(info.true_extent).ok()?;
    let mut image: Vec<u8> = Vec::new();
    image.try_reserve_exact(span).ok()?;
    let mut positions = vec![0u64; size];
    let mut packed = vec![0u8; size];
    let digits = 1 + span.max(1).ilog2() / 8;
    for digit in 0..digits {
        image.clear();
        image.extend((0..span).map(|at| (at >> (8 * digit)) as u8));
        let mut end: c_int = 0;
        let start = image.as_ptr().wrapping_offset(-(info.true_lb as isize));
        let (start, to) = (start.cast(), packed.as_mut_ptr().cast());
        let comm = abi.comm_self;
        // SAFETY: the item's data span `true_extent` bytes from `true_lb`, which is where the image begins.
        let code = unsafe { native::pack(start, 1, datatype, to, room, Out::of(&mut end), comm) };
        if code != abi.success || end != room {
            return None;
        }
        for (position, byte) in positions.iter_mut().zip(&packed) {
            *position |= u64::from(*byte) << (8 * digit);
        }
    }
    let mut runs: Vec<Run> = Vec::new();
    for position in positions {
        let offset = info.true_lb + position as i64;
        match runs.last_mut() {
            Some(last) if last.offset + last.length as i64 == offset => last.length += 1,
            _ => runs.push(Run { offset, length: 1 }),
        }
        if runs.len() > RUNS_MAX {
            return None;
        }
    }
    Some(runs)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(runs: &[(i64, u64)], extent: i64) -> Layout {
        let runs = runs.iter().map(|(offset, length)| Run {
            offset: *offset,
            length: *length,
        });
        Layout::new(runs.collect(), extent)
    }

    /// Byte-by-byte reference: where each wire byte belongs.
    fn reference(layout: &Layout, bytes: u64) -> Vec<i64> {
        let mut all = Vec::new();
        let mut item = 0;
        while (all.len() as u64) < bytes {
            for (_, run) in &layout.runs {
                all.extend((0..run.length as i64).map(|i| item * layout.extent + run.offset + i));
            }
            item += 1;
        }
        all.truncate(bytes as usize);
        all
    }

    fn some_layouts() -> [Layout; 4] {
        [
            layout(&[(0, 3), (8, 5)], 16),
            layout(&[(12, 4), (0, 1)], 20),
            layout(&[(-3, 7)], -9),
            layout(&[(5, 2), (5, 2), (1, 1)], 3),
        ]
    }

    #[test]
    fn pieces_cover_every_byte_once_in_wire_order() {
        for layout in some_layouts() {
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
    fn bounds_enclose_every_byte() {
        for layout in some_layouts() {
            for bytes in [1u64, 4, 5, 8, 40, 123] {
                let (first, end) = layout.bounds(bytes);
                let places = reference(&layout, bytes);
                assert!(places.iter().all(|at| (first..end).contains(at)));
            }
            let whole = layout.size * 7;
            let places = reference(&layout, whole);
            let (first, end) = layout.bounds(whole);
            assert_eq!(places.iter().min(), Some(&first));
            assert_eq!(places.iter().max(), Some(&(end - 1)));
        }
    }
}
