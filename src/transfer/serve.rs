//! The sender's side of the pipeline and of eager sends. It fills the ring of a slot piece by piece, for a
//! receiver that asks for it ([`PipelineSend`]), or with the whole of a small payload before anyone asks
//! ([`EagerSend`]).
//!
//! The pieces are in pinned host memory, or on the sender's GPU if the receiver can read them there: for
//! buffers that cannot be exported (memory pools, mapped memory). All of a message is in one of the two. If
//! memory of the GPU turns out not to work, either side says so, and the message starts again in host memory
//! once the receiver has skipped what is in the ring.

pub mod staged_parts;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::cuda::{ContextKey, Copy, Error, InFlight, Purpose};
use crate::node::{Entry, Ring, Segment, RING_ENTRIES};
use crate::policy::decided;
use crate::policy::pipeline::{piece_bytes, OnGpu};
use crate::stats::{self, Counter};
use crate::transfer::gpu::{is_for_now, Gpu};
use crate::transfer::memory;
use crate::transfer::relays::PieceOnGpu;

/// The sender's side of a pipeline message. It takes pieces of staging only once the message is matched, so
/// that no unmatched message can hold one.
pub struct PipelineSend {
    source: Source,
    length: u64,
    issued: u64,
    /// Pieces being filled, oldest first.
    filling: VecDeque<Filling>,
    /// Filled pieces that the receiver has not emptied, oldest first.
    filled: VecDeque<Piece>,
    /// Entries that were appended to the ring.
    pushed: u64,
    /// How its pieces on the GPU are cut, if they are there.
    on_gpu: Option<&'static OnGpu>,
}

/// A piece of staging that a message is in.
enum Piece {
    /// A chunk of this rank's segment.
    Host(u32),
    OnGpu(PieceOnGpu),
}

impl Piece {
    fn number(&self) -> u32 {
        match self {
            Piece::Host(number) => *number,
            Piece::OnGpu(piece) => piece.place.piece(),
        }
    }

    /// Starts the copy of the first of `left` bytes from `from`, as many as fit into one piece. `total`: the
    /// length of the message.
    #[allow(
        clippy::too_many_arguments,
        reason = "environment, driver and message apart; transfers without MPI are to bring them together"
    )]
    fn fill(
        &self,
        gpu: &mut Gpu,
        own: &Segment,
        context: ContextKey,
        from: u64,
        left: u64,
        total: u64,
    ) -> Result<(InFlight, u32), Error> {
        match self {
            Piece::Host(number) => bring_down(gpu, own, context, *number, from, left, total),
            Piece::OnGpu(on_gpu) => {
                let bytes = left.min(on_gpu.bytes);
                let copy = Copy::Linear {
                    dst: on_gpu.address,
                    src: from,
                    bytes,
                };
                let copy = gpu.queue_on(context, Purpose::Put, FILL_LANE, copy, None)?;
                Ok((copy, bytes as u32))
            }
        }
    }

    fn give(&self, own: &Segment) {
        match self {
            Piece::Host(number) => {
                own.give(*number);
            }
            Piece::OnGpu(piece) => piece.give(own),
        }
    }
}

/// Where a message is at its sender.
#[derive(Clone, Copy, Debug)]
pub enum Source {
    /// In device memory.
    Device {
        /// Context of the memory.
        context: ContextKey,
        /// Address.
        address: u64,
    },
    /// In host memory.
    Host(*const u8),
}

// SAFETY: the memory is lent to a send until it completes, by whatever thread.
unsafe impl Send for Source {}

/// A lane of the put streams, on which pieces on the GPU are filled. Puts use another one.
const FILL_LANE: u64 = staged_parts::PUT_LANE - 1;

/// From so many bytes on, messages are written to pieces past the caches: single messages of 4 MiB come to an
/// H200 at 14 to 15 GB/s, and otherwise at 11.4 (`docs/decisions/past-the-caches.md`).
const STREAMED_BYTES_MIN: u64 = 2 << 20;

/// A piece of staging that a copy is filling.
struct Filling {
    /// None if the copy has failed and must be made again.
    copy: Option<InFlight>,
    piece: Piece,
    from: u64,
    bytes: u32,
}

/// What stopped a step of the sender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trouble {
    /// A driver call failed; the step may be tried again.
    Driver(Error),
    /// Somebody has written over the ring.
    Corrupt,
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Trouble {
        Trouble::Driver(error)
    }
}

impl PipelineSend {
    /// Nothing is started yet. `on_gpu`: its receiver asks for pieces on the GPU, otherwise for pieces in
    /// host memory.
    pub fn new(source: Source, length: u64, on_gpu: Option<&'static OnGpu>) -> PipelineSend {
        PipelineSend {
            on_gpu,
            source,
            length,
            issued: 0,
            filling: VecDeque::new(),
            filled: VecDeque::new(),
            pushed: 0,
        }
    }

    /// Whether its pieces are on the GPU.
    pub fn is_on_gpu(&self) -> bool {
        self.on_gpu.is_some()
    }

    /// Fills what can be filled. True if anything moved. `may_be_on_gpu`: pieces on the GPU are (still)
    /// wanted.
    pub fn poll(
        &mut self,
        gpu: &mut Gpu,
        own: &Segment,
        ring: &Ring<'_>,
        may_be_on_gpu: bool,
    ) -> Result<bool, Trouble> {
        if !ring.is_filled_to(self.pushed) {
            return Err(Trouble::Corrupt);
        }
        let mut moved = self.take_back(own, ring);
        if self.is_on_gpu() && !may_be_on_gpu {
            return Ok(self.start_over(own) || moved);
        }
        let (context, address) = match self.source {
            Source::Device { context, address } => (context, address),
            Source::Host(address) => return Ok(self.fill(own, ring, address)? || moved),
        };
        while let Some(filling) = self.filling.front_mut() {
            if !filling.poll(gpu, own, context)? {
                break;
            }
            let entry = Entry {
                piece: filling.piece.number(),
                bytes: filling.bytes,
            };
            if !append(ring, &mut self.pushed, entry)? {
                break;
            }
            if let Some(filling) = self.filling.pop_front() {
                self.filled.push_back(filling.piece);
            }
            moved = true;
        }
        if self.is_on_gpu() && !gpu.relays.has_own(context) {
            return Err(Error::Exhausted("staging on the GPU").into());
        }
        while self.issued < self.length && self.filling.len() + self.filled.len() < RING_ENTRIES {
            match self.start(gpu, own, context, address) {
                Ok(true) => moved = true,
                Ok(false) => break,
                Err(error) if is_for_now(&error) => break,
                Err(error) => return Err(error.into()),
            }
        }
        Ok(moved)
    }

    /// Starts again in host memory, once nothing is in pieces on the GPU any more. True if it has.
    fn start_over(&mut self, own: &Segment) -> bool {
        if !self.is_drained(own) || !self.filled.is_empty() {
            return false;
        }
        self.on_gpu = None;
        self.issued = 0;
        true
    }

    /// Fills one piece from host memory, if there is one and something to fill it with. It fills one at a
    /// time, since this happens under the engine's lock.
    fn fill(&mut self, own: &Segment, ring: &Ring<'_>, source: *const u8) -> Result<bool, Trouble> {
        if self.issued == self.length || self.filled.len() == RING_ENTRIES {
            return Ok(false);
        }
        let Some(piece) = own.take_chunk() else {
            return Ok(false);
        };
        let entry = own.piece(piece).map(|(to, room)| {
            let step = piece_bytes(u64::from(room), self.length);
            let bytes = step.min(self.length - self.issued) as u32;
            // SAFETY: the program has lent the message to this send, and `bytes` of it are left. The piece is
            // `bytes` long and this rank's, and nobody else uses it before it is in the ring.
            unsafe {
                let from = source.add(self.issued as usize);
                let is_long = self.length >= STREAMED_BYTES_MIN;
                memory::copy(to.as_ptr(), from, bytes as usize, is_long);
            }
            Entry { piece, bytes }
        });
        let appended = match entry {
            Some(entry) => append(ring, &mut self.pushed, entry).map(|fits| fits.then_some(entry)),
            None => Ok(None),
        };
        match appended {
            Ok(Some(entry)) => {
                self.issued += u64::from(entry.bytes);
                self.filled.push_back(Piece::Host(piece));
                Ok(true)
            }
            other => {
                own.give(piece);
                other.map(|_| false)
            }
        }
    }

    /// Starts the copy into the next piece. False if no piece is free now.
    fn start(
        &mut self,
        gpu: &mut Gpu,
        own: &Segment,
        context: ContextKey,
        address: u64,
    ) -> Result<bool, Error> {
        let left = self.length - self.issued;
        let from = address + self.issued;
        let piece = match self.on_gpu {
            Some(on_gpu) => {
                let (total, issued) = (self.length, self.issued);
                let bytes = decided!(
                    "pipeline.piece_on_gpu",
                    (on_gpu, total, issued),
                    on_gpu.piece_bytes(total, issued)
                );
                gpu.relays.take_own(own, context, bytes).map(Piece::OnGpu)
            }
            None => own.take_chunk().map(Piece::Host),
        };
        let Some(piece) = piece else {
            return Ok(false);
        };
        match piece.fill(gpu, own, context, from, left, self.length) {
            Ok((copy, bytes)) => {
                self.filling.push_back(Filling {
                    copy: Some(copy),
                    piece,
                    from,
                    bytes,
                });
                self.issued += u64::from(bytes);
                Ok(true)
            }
            Err(error) => {
                piece.give(own);
                Err(error)
            }
        }
    }

    /// Takes back the pieces that the receiver has emptied.
    fn take_back(&mut self, own: &Segment, ring: &Ring<'_>) -> bool {
        let Ok(in_flight) = ring.in_flight() else {
            return false;
        };
        let mut moved = false;
        while self.filled.len() > in_flight {
            if let Some(piece) = self.filled.pop_front() {
                piece.give(own);
                moved = true;
            }
        }
        moved
    }

    /// Gives back the filled pieces, once the message is over. Pieces into which copies are still in flight
    /// stay out of use until these end: see [`PipelineSend::is_drained`].
    pub fn release_filled(&mut self, own: &Segment) {
        for piece in self.filled.drain(..) {
            piece.give(own);
        }
    }

    /// Drops what has landed of an aborted message. True once nothing is in flight.
    pub fn is_drained(&mut self, own: &Segment) -> bool {
        while let Some(filling) = self.filling.front_mut() {
            if filling.copy.as_mut().is_some_and(|copy| !copy.is_over()) {
                return false;
            }
            filling.piece.give(own);
            self.filling.pop_front();
        }
        true
    }
}

impl Filling {
    /// Whether the piece is filled. The next call makes a lost copy again.
    fn poll(&mut self, gpu: &mut Gpu, own: &Segment, context: ContextKey) -> Result<bool, Error> {
        let copy = match &mut self.copy {
            Some(copy) => copy,
            none => {
                let left = u64::from(self.bytes);
                // As many bytes as before.
                let again = (self.piece).fill(gpu, own, context, self.from, left, u64::MAX);
                none.insert(again?.0)
            }
        };
        let answer = copy.poll();
        if copy.is_lost() {
            self.copy = None;
        }
        answer
    }
}

/// Appends an entry to one of this rank's rings. False if the ring is full.
fn append(ring: &Ring<'_>, pushed: &mut u64, entry: Entry) -> Result<bool, Trouble> {
    if !ring.is_filled_to(*pushed) {
        return Err(Trouble::Corrupt);
    }
    let fits = ring.push(entry).map_err(|_| Trouble::Corrupt)?;
    *pushed += u64::from(fits);
    Ok(fits)
}

/// Copies of whole messages of up to so many bytes are launched together, if several come one after the
/// other. Windows of 16 of 1 B to 1 KiB from a device to the host then have 1.53 to 1.67 times the speed
/// without the library, and 0.98 to 1.04 with a launch each; 256 KiB would lose
/// (`docs/decisions/short-host-copies-in-batches.md`).
const TOGETHER_BYTES: u64 = 64 << 10;

/// Starts the copy of the first of `left` bytes from `from` into a piece of this rank's staging, as many as
/// fit into one. `total`: the length of the message.
#[allow(
    clippy::too_many_arguments,
    reason = "environment, driver and message apart; transfers without MPI are to bring them together"
)]
fn bring_down(
    gpu: &mut Gpu,
    own: &Segment,
    context: ContextKey,
    piece: u32,
    from: u64,
    left: u64,
    total: u64,
) -> Result<(InFlight, u32), Error> {
    if let Some((start, length)) = own.staging() {
        // SAFETY: this rank's segment stays mapped for the life of the process; pins are dropped at finalize.
        unsafe { gpu.pin(context, start.as_ptr(), length) };
    }
    let (address, size) = own.piece(piece).ok_or(Error::Exhausted("staging"))?;
    let bytes = left.min(piece_bytes(u64::from(size), total));
    let to = address.as_ptr().expose_provenance() as u64;
    let copy = if bytes == total && bytes <= TOGETHER_BYTES {
        let copy = Copy::Linear {
            dst: to,
            src: from,
            bytes,
        };
        gpu.copy_soon(context, Purpose::DeviceToHost, copy)?
    } else {
        gpu.copy(context, Purpose::DeviceToHost, to, from, bytes)?
    };
    Ok((copy, bytes as u32))
}

/// How long a small blocking send waits for its receiver to read the buffer itself. A receiver that waits for
/// the message claims it about a microsecond after it was sent. That saves the copy to host memory, some 3 us
/// of the sender's time.
const BLOCKING_DELAY: Duration = Duration::from_micros(2);
/// The same for other sends: their receiver may be about to post receives, as this rank is, and then claims a
/// whole window.
const DELAY: Duration = Duration::from_micros(30);

/// For each so many sends under way, the delay gets longer by its own length, up to `DELAYS_MAX` times its
/// length. The receivers are busy with each other's messages, and a copy to host memory for each send keeps
/// the thread from those that it receives itself. Four H200s, each to every other in windows of 16 of 1 to 16
/// KiB, times the speed without the library: 0.67 to 0.76, without such copies 1.31.
const SENDS_A_DELAY: u32 = 4;
const DELAYS_MAX: u32 = 16;

/// The payload of a standard send up to the eager limit. It is copied into a cell of this rank's segment,
/// unless the receiver is quick to read the buffer itself, so that the send completes without its receiver.
pub struct EagerSend {
    source: Source,
    length: u64,
    cell: u32,
    sent: Instant,
    delay: Duration,
    /// The receiver cannot read the buffer itself, and asks for the copy.
    pub is_asked_for: bool,
    copy: Option<InFlight>,
    in_ring: bool,
}

impl EagerSend {
    /// Nothing is started yet. The cell is this rank's, and holds `length` bytes. It is filled at once if the
    /// receiver is not expected to read the buffer: a buffer in host memory it never reads.
    pub fn new(source: Source, length: u64, cell: u32, is_expected: bool) -> EagerSend {
        EagerSend {
            source,
            length,
            cell,
            sent: Instant::now(),
            delay: if is_expected { DELAY } else { Duration::ZERO },
            is_asked_for: false,
            copy: None,
            in_ring: false,
        }
    }

    /// Starts the copy if there is nothing to wait for. A copy that fails is tried again at the next poll.
    pub fn begin(&mut self, gpu: &mut Gpu, own: &Segment) {
        let Source::Device { context, address } = self.source else {
            return;
        };
        if !self.delay.is_zero() {
            return;
        }
        match self.start(gpu, own, context, address) {
            Ok(copy) => self.copy = Some(copy),
            Err(error) if is_for_now(&error) => {}
            Err(error) => {
                stats::add(Counter::DriverRetries, 1);
                log::debug!("a copy into a cell: {error}");
            }
        }
    }

    fn start(
        &self,
        gpu: &mut Gpu,
        own: &Segment,
        context: ContextKey,
        from: u64,
    ) -> Result<InFlight, Error> {
        let (cell, bytes) = (self.cell, self.length);
        bring_down(gpu, own, context, cell, from, bytes, bytes).map(|(copy, _)| copy)
    }

    /// Whether the cell is filled. Starts the copy that fills it.
    fn fill(&mut self, gpu: &mut Gpu, own: &Segment) -> Result<bool, Error> {
        let (context, address) = match self.source {
            Source::Device { context, address } => (context, address),
            Source::Host(from) => {
                let (cell, _) = own.piece(self.cell).ok_or(Error::Exhausted("staging"))?;
                // SAFETY: the program has lent the message to this send. The cell is this rank's and, by
                // `EagerSend::new`, long enough; nobody else uses it before it is in the ring.
                unsafe { memory::copy(cell.as_ptr(), from, self.length as usize, false) };
                return Ok(true);
            }
        };
        let copy = match &mut self.copy {
            Some(copy) => copy,
            None => match self.start(gpu, own, context, address) {
                Ok(copy) => self.copy.insert(copy),
                Err(error) if is_for_now(&error) => return Ok(false),
                Err(error) => return Err(error),
            },
        };
        let answer = copy.poll();
        if copy.is_lost() {
            self.copy = None;
        }
        answer
    }

    /// Until when the send waits for its receiver, if it does. `open`: how many sends are under way. `taken`:
    /// when one of them was last seen to be taken by its receiver.
    pub fn waits_until(&self, open: usize, taken: Option<Instant>) -> Option<Instant> {
        if self.in_ring || self.copy.is_some() {
            return None;
        }
        let open = u32::try_from(open).unwrap_or(u32::MAX);
        let delays = (1 + open / SENDS_A_DELAY).min(DELAYS_MAX);
        let alone = self.sent + self.delay * delays;
        let longest = self.sent + self.delay * DELAYS_MAX;
        Some(taken.map_or(alone, |at| alone.max(at + self.delay).min(longest)))
    }

    /// Moves on. True once the payload is in the ring, as its only entry.
    pub fn poll(&mut self, gpu: &mut Gpu, own: &Segment, ring: &Ring<'_>) -> Result<bool, Trouble> {
        if self.in_ring && !ring.is_filled_to(1) {
            return Err(Trouble::Corrupt);
        }
        if self.in_ring {
            return Ok(false);
        }
        if !self.fill(gpu, own)? {
            return Ok(false);
        }
        self.copy = None;
        let entry = Entry {
            piece: self.cell,
            bytes: self.length as u32,
        };
        self.in_ring = append(ring, &mut 0, entry)?;
        Ok(self.in_ring)
    }

    /// The program waits for this message alone.
    pub fn hurry(&mut self) {
        self.delay = self.delay.min(BLOCKING_DELAY);
    }

    /// Whether the payload is in the ring, so that the program's buffer is not read any more.
    pub fn is_in_ring(&self) -> bool {
        self.in_ring
    }

    /// Gives back the cell of a message that was not sent. A copy that has been started ends by itself.
    pub fn abandon(mut self, own: &Segment) {
        while !self.release(own) {
            std::thread::yield_now();
        }
    }

    /// Gives the cell back once the message is over. False while a copy into it is under way.
    pub fn release(&mut self, own: &Segment) -> bool {
        if self.copy.as_mut().is_some_and(|copy| !copy.is_over()) {
            return false;
        }
        self.copy = None;
        own.give(self.cell);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receiver_is_waited_for_longer_where_many_are_under_way_or_one_is_taken() {
        let source = Source::Host(std::ptr::null());
        let eager_send = EagerSend::new(source, 8, 0, true);
        let delays = |open, taken| {
            let until = eager_send.waits_until(open, taken).expect("it waits");
            until.duration_since(eager_send.sent).as_secs_f64() / DELAY.as_secs_f64()
        };
        assert_eq!(delays(1, None), 1.0);
        assert_eq!(delays(48, None), 13.0);
        assert_eq!(delays(100_000, None), f64::from(DELAYS_MAX), "bounded");
        let taken = |delays: u32| Some(eager_send.sent + delays * DELAY);
        assert_eq!(delays(1, taken(3)), 4.0, "one was taken meanwhile");
        assert_eq!(delays(1, taken(90)), f64::from(DELAYS_MAX), "bounded");
        assert_eq!(delays(48, taken(3)), 13.0);
    }

    #[test]
    fn what_nobody_is_expected_to_read_is_filled_at_once() {
        let source = Source::Host(std::ptr::null());
        let eager_send = EagerSend::new(source, 8, 0, false);
        assert_eq!(eager_send.waits_until(48, None), Some(eager_send.sent));
        let mut hurried = EagerSend::new(source, 8, 0, true);
        hurried.hurry();
        let until = hurried.waits_until(1, None).expect("it waits");
        assert_eq!(until.duration_since(hurried.sent), BLOCKING_DELAY);
    }
}
