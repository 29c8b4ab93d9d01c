//! The sender's side of a transfer through staging memory: fills the ring of a slot, piece by piece for a
//! receiver that asks for it ([`Serve`]), or with the whole of a small payload before anyone asks
//! ([`Hosting`]).
//!
//! The pieces are in pinned host memory, or on the sender's GPU where the receiver can read them there: for
//! buffers that cannot be exported (memory pools, mapped memory). All of a message is in one of the two.
//! Where memory of the GPU is not the way after all, either side says so, and the message begins anew in host
//! memory once the receiver has passed over what is in the ring.

pub mod tracks;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::cuda::{ContextKey, Copy, Error, InFlight, Purpose};
use crate::engine::gpu::{is_for_now, Gpu};
use crate::engine::memory;
use crate::engine::relays::PieceOnGpu;
use crate::node::{Entry, Ring, Segment, RING_ENTRIES, UNIT_BYTES};
use crate::stats::{self, Counter};

/// A message that its receiver wants through the ring. Pieces of staging are taken only now that it is
/// matched, so that no unmatched message can hold one.
pub struct Serve {
    source: Source,
    length: u64,
    issued: u64,
    /// Pieces being filled, oldest first.
    filling: VecDeque<Filling>,
    /// Filled pieces that the receiver has not emptied, oldest first.
    filled: VecDeque<Piece>,
    /// Entries that were appended to the ring.
    pushed: u64,
    /// How its pieces are on the GPU, if they are.
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

    /// Starts the copy of the first of `left` bytes of a message of `total` from `from`, as many as are to be
    /// in one piece.
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
                let copy = gpu.queue_on(context, Purpose::Push, FILL_LANE, copy, None)?;
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

/// Pieces in which a message moves, if it is longer than one of them: few enough to cost little each, and so many that
/// one side works while the other does.
const PIECES: u64 = 4;
/// A piece is no shorter than that, bytes. On H200 the copy of one to a device takes 12 us and filling it 27; windows of
/// messages of 512 KiB to the host lost a quarter in pieces of 64 KiB.
const PIECE_BYTES_MIN: u64 = 256 << 10;

/// Length of every piece but the last of a message of `total` bytes, in staging with so much room.
pub fn piece_bytes(room: u64, total: u64) -> u64 {
    let even = total.div_ceil(PIECES).next_multiple_of(PIECE_BYTES_MIN);
    room.min(even)
}

/// How messages go through memory of their sender's GPU.
pub struct OnGpu {
    /// From so many bytes on; shorter ones go through host memory.
    pub bytes_min: u64,
    /// The first piece is this part of a message, within bounds: it is copied before anything crosses a link.
    /// Each one after it is as long as all before it, up to a bound, as each costs a launch on both sides.
    first_part: u64,
    first_bytes: std::ops::RangeInclusive<u64>,
    piece_bytes_max: u64,
}

impl OnGpu {
    /// Between two GPUs.
    const APART: OnGpu = OnGpu {
        bytes_min: 64 << 10,
        first_part: 8,
        first_bytes: 1 << 20..=4 << 20,
        piece_bytes_max: 16 << 20,
    };
    /// Where both ranks use one GPU, their copies wait for each other's process: some 80 us each on an H200,
    /// whatever their size. Windows of 4, GB/s in pieces of 4 to 16 MiB and through host memory: 4 MiB 14 and
    /// 30, 16 MiB 50 and 37, 256 MiB 151 and 41; both ways 27 and 40, 87 and 41, 243 and 41
    /// (`docs/results/h200-frameworks-memory.txt`, 4).
    const SHARED: OnGpu = OnGpu {
        bytes_min: 16 << 20,
        first_part: 4,
        first_bytes: 4 << 20..=16 << 20,
        piece_bytes_max: 16 << 20,
    };

    /// Between ranks that do or do not share a GPU.
    pub fn between(is_shared: bool) -> &'static OnGpu {
        if is_shared {
            &OnGpu::SHARED
        } else {
            &OnGpu::APART
        }
    }

    /// Length of the piece behind the first `issued` of `total` bytes.
    fn piece_bytes(&self, total: u64, issued: u64) -> u64 {
        let first = (total / self.first_part).next_multiple_of(UNIT_BYTES);
        let first = first.clamp(*self.first_bytes.start(), *self.first_bytes.end());
        let next = issued.clamp(first, self.piece_bytes_max);
        let left = total - issued;
        // No short one behind it.
        if left < next + next / 2 {
            left
        } else {
            next
        }
    }
}

/// The lane of those for pushes on which pieces on the GPU are filled: not the one of pushes.
const FILL_LANE: u64 = tracks::PUSH_LANE - 1;

/// Messages of so many bytes are written to pieces past the caches: to an H200, single messages of 4 MiB come at 14 to 15 GB/s
/// then, of 16 MiB at 15 to 16, and otherwise at 11.4 and 12.6. Windows of 1 MiB would lose 7 %.
const STREAMED_BYTES_MIN: u64 = 2 << 20;

/// A piece of staging that a copy is filling.
struct Filling {
    /// None where the copy has failed and is to be made again.
    copy: Option<InFlight>,
    piece: Piece,
    from: u64,
    bytes: u32,
}

/// What stopped a step of the sender's part.
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

impl Serve {
    /// Nothing is started yet. Its receiver asks for pieces on the GPU, or for some in host memory.
    pub fn new(source: Source, length: u64, on_gpu: Option<&'static OnGpu>) -> Serve {
        Serve {
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

    /// Begins anew in host memory, once nothing is in pieces on the GPU any more. True if it has.
    fn start_over(&mut self, own: &Segment) -> bool {
        if !self.is_drained(own) || !self.filled.is_empty() {
            return false;
        }
        self.on_gpu = None;
        self.issued = 0;
        true
    }

    /// Fills one piece from host memory, if there is one and something to fill it with: no more at a time, since it is
    /// done under the engine's lock.
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
            // SAFETY: the program has lent the message to this send, and so much of it is left; the piece is this rank's,
            // nobody else's until it is in the ring, and as long.
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

    /// Starts what fills the next piece. False where no piece is to be had for now.
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
                let bytes = on_gpu.piece_bytes(self.length, self.issued);
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

    /// Gives every piece back, once the message is over. Copies into pieces that are still in flight are waited for
    /// by keeping their pieces out of use until then: see [`Serve::is_drained`].
    pub fn release_filled(&mut self, own: &Segment) {
        for piece in self.filled.drain(..) {
            piece.give(own);
        }
    }

    /// Drops what has landed of an aborted message; true once nothing is in flight.
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
    /// Whether the piece is filled. A copy that is lost is made again at the next call.
    fn poll(&mut self, gpu: &mut Gpu, own: &Segment, context: ContextKey) -> Result<bool, Error> {
        let copy = match &mut self.copy {
            Some(copy) => copy,
            none => {
                let left = u64::from(self.bytes);
                // As much as before.
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

/// Appends an entry to a ring of this rank's; false when it is full.
fn append(ring: &Ring<'_>, pushed: &mut u64, entry: Entry) -> Result<bool, Trouble> {
    if !ring.is_filled_to(*pushed) {
        return Err(Trouble::Corrupt);
    }
    let fits = ring.push(entry).map_err(|_| Trouble::Corrupt)?;
    *pushed += u64::from(fits);
    Ok(fits)
}

/// Copies of whole messages of up to so many bytes are launched together where several come one after the other. Windows of 16 from a
/// device to the host, times the speed without the library, each by itself and so: 1 B to 1 KiB, by cells, 0.98 to 1.04 and 1.53 to
/// 1.67, 8 KiB 1.03 and 1.44; 32 KiB 1.21 and 1.31; 256 KiB 1.36 and 1.24 (H100s, `docs/results/h100-x2-upwards.txt`, 4 and 5).
const TOGETHER_BYTES: u64 = 64 << 10;

/// Starts the copy of the first of `left` bytes of a message of `total` from `from` into a piece of this rank's staging,
/// as many as are to be in one.
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

/// How long a small message of a blocking send waits for its receiver to read the buffer itself. A receiver that waits
/// for it claims it about a microsecond after it was sent, and the copy to host memory, some 3 us of the sender's time, is
/// saved.
const BLOCKING_DELAY: Duration = Duration::from_micros(2);
/// The same for other sends: their receiver may be about to post, as this rank is, and then claims a whole window.
const DELAY: Duration = Duration::from_micros(30);

/// So many sends that are under way make the time longer by as much again, and none is waited for longer than so many times as long.
/// Their receivers are busy with each other's, and a copy to host memory for each takes the thread from those that it receives
/// itself. Four H200s, each to every other in windows of 16 of 1 to 16 KiB, times the speed without the library: 0.67 to 0.76, with no
/// such copies 1.31.
const SENDS_A_DELAY: u32 = 4;
const DELAYS_MAX: u32 = 16;

/// A payload of a standard send below the eager limit: copied into a cell of this rank's segment unless its receiver is
/// quick to read the buffer itself, so that the send completes without its receiver.
pub struct Hosting {
    source: Source,
    length: u64,
    cell: u32,
    sent: Instant,
    delay: Duration,
    /// The receiver cannot read the buffer itself.
    pub is_asked_for: bool,
    copy: Option<InFlight>,
    in_ring: bool,
}

impl Hosting {
    /// Nothing is started yet. The cell is this rank's, and holds `length` bytes. It is filled at once where the receiver
    /// is not expected to read the buffer: from host memory it never does.
    pub fn new(source: Source, length: u64, cell: u32, is_expected: bool) -> Hosting {
        Hosting {
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

    /// Starts the copy where nothing is waited for. What fails is tried again when it is polled.
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

    /// Whether the cell is filled; starts what fills it.
    fn fill(&mut self, gpu: &mut Gpu, own: &Segment) -> Result<bool, Error> {
        let (context, address) = match self.source {
            Source::Device { context, address } => (context, address),
            Source::Host(from) => {
                let (cell, _) = own.piece(self.cell).ok_or(Error::Exhausted("staging"))?;
                // SAFETY: the program has lent the message to this send; the cell is this rank's, nobody else's until it is
                // in the ring, and long enough by `Hosting::new`.
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

    /// Until when its receiver is waited for, if it is: where so many sends are under way, one of which was last seen to be taken by
    /// its receiver at this moment.
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

    /// Moves on. True if the payload has come to be in the ring, as its only entry.
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

    /// Whether the payload is in the ring, and the program's buffer not read any more.
    pub fn is_in_ring(&self) -> bool {
        self.in_ring
    }

    /// Gives the cell back of a message that was not sent: what has been started ends by itself.
    pub fn abandon(mut self, own: &Segment) {
        while !self.release(own) {
            std::thread::yield_now();
        }
    }

    /// Gives the cell back once the message is over; false while a copy into it is under way.
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
        let hosting = Hosting::new(source, 8, 0, true);
        let delays = |open, taken| {
            let until = hosting.waits_until(open, taken).expect("it waits");
            until.duration_since(hosting.sent).as_secs_f64() / DELAY.as_secs_f64()
        };
        assert_eq!(delays(1, None), 1.0);
        assert_eq!(delays(48, None), 13.0);
        assert_eq!(delays(100_000, None), f64::from(DELAYS_MAX), "bounded");
        let taken = |delays: u32| Some(hosting.sent + delays * DELAY);
        assert_eq!(delays(1, taken(3)), 4.0, "one was taken meanwhile");
        assert_eq!(delays(1, taken(90)), f64::from(DELAYS_MAX), "bounded");
        assert_eq!(delays(48, taken(3)), 13.0);
    }

    #[test]
    fn pieces_on_a_gpu_are_the_whole_message_and_no_longer_than_allowed() {
        for on_gpu in [OnGpu::between(false), OnGpu::between(true)] {
            for total in (0..400).map(|step| on_gpu.bytes_min + step * 777_777) {
                let (mut issued, mut pieces) = (0, 0);
                while issued < total {
                    let bytes = on_gpu.piece_bytes(total, issued);
                    assert!(bytes > 0 && bytes < on_gpu.piece_bytes_max * 3 / 2);
                    (issued, pieces) = (issued + bytes, pieces + 1);
                }
                assert!(issued == total && pieces < 30, "{total}: {pieces} pieces");
            }
        }
    }

    #[test]
    fn what_nobody_is_expected_to_read_is_filled_at_once() {
        let source = Source::Host(std::ptr::null());
        let hosting = Hosting::new(source, 8, 0, false);
        assert_eq!(hosting.waits_until(48, None), Some(hosting.sent));
        let mut hurried = Hosting::new(source, 8, 0, true);
        hurried.hurry();
        let until = hurried.waits_until(1, None).expect("it waits");
        assert_eq!(until.duration_since(hurried.sent), BLOCKING_DELAY);
    }
}
