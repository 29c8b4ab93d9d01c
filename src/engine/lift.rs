//! Copies between the program's device memory and pageable host memory, in pieces, through pinned memory.
//!
//! Used for bcopy: up into a device buffer from a landing range, and down from a device buffer before its
//! payload is sent. A non-contiguous buffer is gathered and scattered by the runs of its datatype.

use std::collections::VecDeque;
use std::sync::Arc;

use crate::cuda::{ContextKey, Copy, Error, InFlight, Lent, PinnedBuffer, Purpose, Result};
use crate::engine::layout::Layout;
use crate::engine::verify::Summing;
use crate::node::{Sums, BLOCKS};
use crate::trace;
use crate::transfer::fault::{self, Of, Path};
use crate::transfer::gpu::{is_for_now, Gpu};

/// The direction of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Host to device.
    Up,
    /// Device to host.
    Down,
}

/// Where the bytes are in device memory.
#[derive(Clone, Debug)]
pub enum Shape {
    /// One run from this address.
    Dense(u64),
    /// Runs relative to this address.
    Runs(u64, Arc<Layout>),
}

impl Shape {
    /// The range that encloses so many bytes: address and length.
    pub fn place(&self, bytes: u64) -> (u64, u64) {
        match self {
            Shape::Dense(device) => (*device, bytes),
            Shape::Runs(device, layout) => {
                let (first, end) = layout.bounds(bytes);
                (device.wrapping_add_signed(first), (end - first) as u64)
            }
        }
    }
}

/// How many pieces are under way at a time: the device copies one while the CPU fills or empties another.
const PIECES: usize = 2;
/// Size of a piece, bytes: large enough to amortize a launch, small enough to overlap.
const PIECE_BYTES: u64 = 1 << 20;

struct Piece {
    copy: InFlight,
    bounce: PinnedBuffer,
    from: u64,
    bytes: u64,
    /// The bounce buffer is an image of the device memory from this address on, gaps included.
    span: Option<u64>,
}

/// Runs in device memory are read one by one if each part of this length has at most one. If there are more,
/// one copy reads them with their gaps, and the processor picks them out: a copy of a few bytes takes as long
/// as one of 64 KiB. Writes never do this: they would overwrite what the program writes to the gaps.
const SPAN_BYTES: u64 = 64 << 10;
/// Memory of more than so many times the wanted bytes is not read as a whole.
const SPAN_RATIO: u64 = 4;

/// A copy under way.
pub struct Lift {
    way: Way,
    context: ContextKey,
    shape: Shape,
    host: Lent,
    /// The memory that `host` points to, if the copy owns it.
    _owned: Vec<u8>,
    total: u64,
    issued: u64,
    pieces: VecDeque<Piece>,
    /// The bytes that come down are not kept: only their checksums are wanted.
    summing: Option<Box<Summing>>,
    /// The message that the payload belongs to.
    of: Of,
    /// How many driver calls have failed.
    failures: u32,
    /// The copy cannot be done; what is in flight is waited for.
    given_up: Option<Error>,
}

impl Lift {
    /// A copy between `host` and device memory; nothing is started yet.
    pub fn new(way: Way, context: ContextKey, shape: Shape, host: Lent, of: Of) -> Lift {
        Lift {
            way,
            context,
            shape,
            host,
            _owned: Vec::new(),
            total: host.bytes(),
            issued: 0,
            pieces: VecDeque::new(),
            summing: None,
            of,
            failures: 0,
            given_up: None,
        }
    }

    /// A copy of `total` bytes of device memory for their checksums alone.
    pub fn summing(context: ContextKey, shape: Shape, total: u64, of: Of) -> Lift {
        Lift {
            way: Way::Down,
            context,
            shape,
            host: Lent::NONE,
            _owned: Vec::new(),
            total,
            issued: 0,
            pieces: VecDeque::new(),
            summing: Some(Box::new(Summing::new(total))),
            of,
            failures: 0,
            given_up: None,
        }
    }

    /// A copy of these bytes to device memory.
    pub fn owned(context: ContextKey, shape: Shape, mut bytes: Vec<u8>, of: Of) -> Lift {
        let (host, total) = (bytes.as_mut_ptr(), bytes.len() as u64);
        // SAFETY: the vector is kept until the copy is dropped, and its elements do not move.
        let host = unsafe { Lent::new(host, total) };
        let mut lift = Lift::new(Way::Up, context, shape, host, of);
        lift._owned = bytes;
        lift
    }

    /// The checksums, once the whole copy is done.
    pub fn take_sums(&mut self) -> Sums {
        self.summing
            .take()
            .map_or([0; BLOCKS], |summing| summing.sums())
    }

    /// Starts what can be started and finishes what is done. True when everything is done. An error is
    /// returned only when nothing is in flight any more: the bounce buffers and the program's memory are then
    /// free again.
    pub fn poll(&mut self, gpu: &mut Gpu) -> Result<bool> {
        if self.given_up.is_none() {
            match self.step(gpu) {
                Ok(done) => return Ok(done),
                Err(error) if self.may_go_on(&error) => return Ok(false),
                Err(error) => self.given_up = Some(error),
            }
        }
        self.pieces.retain_mut(|piece| !piece.copy.is_over());
        match self.given_up {
            Some(error) if self.pieces.is_empty() => Err(error),
            _ => Ok(false),
        }
    }

    /// Whether it has ended, in success or failure, and nothing is in flight.
    pub fn is_over(&self) -> bool {
        self.pieces.is_empty() && (self.is_issued() || self.given_up.is_some())
    }

    /// Whether all of its copies are launched, or queued to be.
    pub fn is_issued(&self) -> bool {
        self.issued == self.total
    }

    /// Whether to go on after an error. A lost copy is not made again: its context is gone.
    fn may_go_on(&mut self, error: &Error) -> bool {
        self.failures += 1;
        let lost = self.pieces.iter().any(|piece| piece.copy.is_lost());
        let goes_on = !lost && !error.context_is_gone() && self.failures < fault::ATTEMPTS;
        if goes_on {
            let path = match self.summing {
                Some(_) => Path::Checksums,
                None => Path::Bcopy,
            };
            fault::tried_again(self.of, path, error);
        }
        goes_on
    }

    fn step(&mut self, gpu: &mut Gpu) -> Result<bool> {
        // A payload that is read to be checked is not moved.
        let _copies = self.summing.is_some().then(trace::copies_of_none);
        while let Some(piece) = self.pieces.front_mut() {
            if !piece.copy.poll()? {
                break;
            }
            if self.way == Way::Down {
                let piece = self.pieces.pop_front();
                piece.iter().for_each(|piece| self.take_down(piece));
            } else {
                self.pieces.pop_front();
            }
        }
        while self.pieces.len() < PIECES && self.issued < self.total {
            match self.start_piece(gpu) {
                Ok(()) => {}
                // Bounce memory or events are all in use: some will be free when other copies end.
                Err(error) if is_for_now(&error) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(self.pieces.is_empty() && self.issued == self.total)
    }

    fn start_piece(&mut self, gpu: &mut Gpu) -> Result<()> {
        let mut bytes = (self.total - self.issued).min(PIECE_BYTES);
        let span = self.span(bytes);
        if let Some(span) = &span {
            bytes = span.bytes;
        }
        let room = span.as_ref().map_or(bytes, |span| span.length);
        let bounce = gpu.bounce(self.context, room as usize)?;
        if self.way == Way::Up {
            bounce.fill(self.host.part(self.issued, bytes));
        }
        let copies = match &span {
            Some(span) => vec![oriented(
                self.way,
                span.start,
                bounce.address(),
                span.length,
            )],
            None => self.copies(bounce.address(), self.issued, bytes),
        };
        let purpose = match self.way {
            Way::Up => Purpose::HostToDevice,
            Way::Down => Purpose::DeviceToHost,
        };
        // Several payloads of a window land while the device works on one: together they cost the device
        // less.
        let copy = match copies.as_slice() {
            [only] if self.way == Way::Up && bytes == self.total => {
                gpu.queue(self.context, purpose, *only)?
            }
            all => gpu.copies(self.context, purpose, all)?,
        };
        self.pieces.push_back(Piece {
            copy,
            bounce,
            from: self.issued,
            bytes,
            span: span.map(|span| span.start),
        });
        self.issued += bytes;
        Ok(())
    }

    /// The next `bytes` bytes, or the first of them, if they are to be read with the gaps between them.
    fn span(&self, bytes: u64) -> Option<Span> {
        let (Way::Down, Shape::Runs(device, layout)) = (self.way, &self.shape) else {
            return None;
        };
        let from = self.issued;
        let copies = self.copies(0, from, bytes).len() as u64;
        let mut span: Option<Span> = None;
        for piece in layout.pieces(from, from + bytes) {
            let start = device.wrapping_add_signed(piece.offset);
            let before = span.unwrap_or(Span::at(start));
            let with = before.with(start, piece.length);
            if with.length > PIECE_BYTES {
                break;
            }
            span = Some(with);
        }
        let span = span?;
        // How many of the copies belong to the part that fits into a piece.
        let own = copies * span.bytes / bytes.max(1);
        let is_dense = span.length < span.bytes.saturating_mul(SPAN_RATIO);
        (copies > 1 && is_dense && own > span.length.div_ceil(SPAN_BYTES)).then_some(span)
    }

    /// A piece has come down.
    fn take_down(&mut self, piece: &Piece) {
        let packed = match (&self.shape, piece.span) {
            (Shape::Runs(device, layout), Some(start)) => {
                let mut packed = Vec::with_capacity(piece.bytes as usize);
                for run in layout.pieces(piece.from, piece.from + piece.bytes) {
                    let at = device.wrapping_add_signed(run.offset) - start;
                    let (at, length) = (at as usize, run.length as usize);
                    // SAFETY: the copy into the bounce buffer is done, and nobody else has the buffer.
                    packed.extend_from_slice(unsafe { piece.bounce.part(at, length) });
                }
                Some(packed)
            }
            _ => None,
        };
        let bytes = match &packed {
            Some(packed) => packed.as_slice(),
            // SAFETY: as above.
            None => unsafe { piece.bounce.part(0, piece.bytes as usize) },
        };
        match &mut self.summing {
            Some(summing) => summing.feed(bytes),
            None => self.host.part(piece.from, piece.bytes).write(bytes),
        }
    }

    fn copies(&self, bounce: u64, from: u64, bytes: u64) -> Vec<Copy> {
        match &self.shape {
            Shape::Dense(device) => vec![oriented(self.way, device + from, bounce, bytes)],
            Shape::Runs(device, layout) => {
                let pieces = layout.pieces(from, from + bytes).map(|piece| Row {
                    device: device.wrapping_add_signed(piece.offset),
                    bounce: bounce + (piece.packed - from),
                    bytes: piece.length,
                });
                rows(self.way, pieces)
            }
        }
    }
}

/// A part of device memory that is read with its gaps.
#[derive(Clone, Copy, Debug)]
struct Span {
    start: u64,
    length: u64,
    /// Bytes of the message in this part.
    bytes: u64,
}

impl Span {
    fn at(start: u64) -> Span {
        Span {
            start,
            length: 0,
            bytes: 0,
        }
    }

    /// Extends the span by another run of the message.
    fn with(self, start: u64, length: u64) -> Span {
        let first = self.start.min(start);
        let end = (self.start + self.length).max(start + length);
        Span {
            start: first,
            length: end - first,
            bytes: self.bytes + length,
        }
    }
}

fn oriented(way: Way, device: u64, bounce: u64, bytes: u64) -> Copy {
    match way {
        Way::Up => Copy::Up {
            dst: device,
            src: bounce,
            bytes,
        },
        Way::Down => Copy::Linear {
            dst: bounce,
            src: device,
            bytes,
        },
    }
}

#[derive(Clone, Copy, Debug)]
struct Row {
    device: u64,
    bounce: u64,
    bytes: u64,
}

/// Makes one strided copy of each train of rows of equal length at equal rising distances.
fn rows(way: Way, pieces: impl Iterator<Item = Row>) -> Vec<Copy> {
    let mut copies = Vec::new();
    let mut train: Vec<Row> = Vec::new();
    for row in pieces {
        let fits = match train.as_slice() {
            [] => true,
            [first] => row.bytes == first.bytes && row.device >= first.device + first.bytes,
            [first, second, ..] => {
                let pitch = second.device - first.device;
                row.bytes == first.bytes && row.device == first.device + pitch * train.len() as u64
            }
        };
        if !fits {
            emit(way, &mut train, &mut copies);
        }
        train.push(row);
    }
    emit(way, &mut train, &mut copies);
    copies
}

fn emit(way: Way, train: &mut Vec<Row>, copies: &mut Vec<Copy>) {
    match train.as_slice() {
        [] => {}
        [row] => copies.push(oriented(way, row.device, row.bounce, row.bytes)),
        [first, second, ..] => {
            let pitch = second.device - first.device;
            let (width, rows) = (first.bytes, train.len() as u64);
            copies.push(match way {
                Way::Up => Copy::Rows {
                    dst: first.device,
                    dst_pitch: pitch,
                    src: first.bounce,
                    src_pitch: width,
                    width,
                    rows,
                },
                Way::Down => Copy::Rows {
                    dst: first.bounce,
                    dst_pitch: width,
                    src: first.device,
                    src_pitch: pitch,
                    width,
                    rows,
                },
            });
        }
    }
    train.clear();
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::Context;
    use crate::engine::types::runs::Run;

    /// (device, bounce, bytes) of every byte that the copies move.
    fn bytes_of(copies: &[Copy]) -> Vec<(u64, u64)> {
        let mut all = Vec::new();
        for copy in copies {
            match *copy {
                Copy::Linear { dst, src, bytes } | Copy::Up { dst, src, bytes } => {
                    all.extend((0..bytes).map(|i| (dst + i, src + i)))
                }
                Copy::Rows {
                    dst,
                    dst_pitch,
                    src,
                    src_pitch,
                    width,
                    rows,
                } => {
                    for row in 0..rows {
                        all.extend(
                            (0..width)
                                .map(|i| (dst + row * dst_pitch + i, src + row * src_pitch + i)),
                        );
                    }
                }
                Copy::Peer { .. } => unreachable!("not used here"),
            }
        }
        all
    }

    #[test]
    fn trains_move_the_same_bytes() {
        for offsets in [
            vec![0u64, 16, 32, 48],
            vec![0, 16, 40, 64, 88],
            vec![40, 0, 16],
            vec![0, 4, 8],
        ] {
            let list: Vec<Row> = offsets
                .iter()
                .enumerate()
                .map(|(i, o)| Row {
                    device: 1000 + o,
                    bounce: 5 + 4 * i as u64,
                    bytes: 4,
                })
                .collect();
            let want: Vec<(u64, u64)> = list
                .iter()
                .flat_map(|row| (0..row.bytes).map(|i| (row.device + i, row.bounce + i)))
                .collect();
            assert_eq!(
                bytes_of(&rows(Way::Up, list.iter().copied())),
                want,
                "{offsets:?}"
            );
        }
    }

    const DEVICE: u64 = 1 << 40;

    /// The first piece of a message of these runs that is read with its gaps; `None` where its runs are read
    /// one by one.
    fn span_of(way: Way, runs: &[(i64, u64)], issued: u64) -> Option<Span> {
        let total = runs.iter().map(|run| run.1).sum();
        let list = runs.iter().map(|&(offset, length)| Run { offset, length });
        let layout = Arc::new(Layout::new(list.collect(), 1 << 30));
        let context = ContextKey {
            handle: Context::NULL,
            id: 0,
        };
        let shape = Shape::Runs(DEVICE, layout);
        let mut lift = Lift::summing(context, shape, total, Of::FromAny);
        lift.way = way;
        lift.issued = issued;
        lift.span((total - issued).min(PIECE_BYTES))
    }

    /// Runs of so many bytes, at distances that form no train: alternately `pitch` apart, and a byte more.
    fn uneven(count: i64, length: u64, pitch: i64) -> Vec<(i64, u64)> {
        let offset = |i: i64| i * pitch + (i / 2) % 2;
        (0..count).map(|i| (offset(i), length)).collect()
    }

    #[test]
    fn many_runs_are_read_with_their_gaps() {
        let runs = uneven(20_000, 8, 24);
        let span = span_of(Way::Down, &runs, 0).map(|span| (span.start, span.length, span.bytes));
        let (last, length) = runs[19_999];
        assert_eq!(span, Some((DEVICE, last as u64 + length, 160_000)));
        // From the middle of a run on.
        let span = span_of(Way::Down, &runs, 8 * 1000 + 3).map(|span| (span.start, span.bytes));
        let start = DEVICE + runs[1000].0 as u64 + 3;
        assert_eq!(span, Some((start, 160_000 - 8003)));
    }

    #[test]
    fn a_span_has_room_in_a_piece() {
        let mut issued = 0;
        let runs = uneven(200_000, 8, 24);
        let mut spans = 0;
        while issued < 1_600_000 {
            let Some(span) = span_of(Way::Down, &runs, issued) else {
                panic!("read one by one from {issued} on")
            };
            assert!(span.length <= PIECE_BYTES && span.bytes > 0);
            issued += span.bytes;
            spans += 1;
        }
        assert_eq!(issued, 1_600_000);
        // 4.8 MB.
        assert_eq!(spans, 5);
    }

    #[test]
    fn runs_are_read_one_by_one_where_that_is_less() {
        // Few of them: two in 48 KiB would be read by one copy less, but a train of 200,000 is one copy.
        assert!(span_of(Way::Down, &[(0, 8), (40, 8), (70, 8)], 0).is_some());
        assert!(span_of(Way::Down, &[(0, 1 << 15), (1 << 16, 1 << 15)], 0).is_none());
        let train: Vec<_> = (0..200_000).map(|i| (i * 24, 8)).collect();
        assert!(span_of(Way::Down, &train, 0).is_none());
        // Too far apart: more than four times the bytes.
        assert!(span_of(Way::Down, &uneven(20_000, 8, 31), 0).is_some());
        assert!(span_of(Way::Down, &uneven(20_000, 8, 33), 0).is_none());
        // What is written to device memory leaves the gaps alone.
        assert!(span_of(Way::Up, &uneven(20_000, 8, 24), 0).is_none());
    }

    #[test]
    fn runs_in_any_order_are_one_span() {
        let mut runs = uneven(20_000, 8, 24);
        let whole = span_of(Way::Down, &runs, 0).map(|span| (span.start, span.length));
        runs.reverse();
        runs.swap(3, 15_000);
        let span = span_of(Way::Down, &runs, 0).map(|span| (span.start, span.length));
        assert_eq!(span, whole);
        // Negative offsets: before the address that was passed.
        let before: Vec<_> = runs.iter().map(|&(o, n)| (o - 300_000, n)).collect();
        let span = span_of(Way::Down, &before, 0).map(|span| span.start);
        assert_eq!(span, Some(DEVICE - 300_000));
    }

    #[test]
    fn a_column_is_one_copy() {
        let list = (0..100).map(|i| Row {
            device: i * 64,
            bounce: i * 8,
            bytes: 8,
        });
        assert_eq!(rows(Way::Down, list).len(), 1);
    }
}
