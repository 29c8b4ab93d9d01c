//! The sender's side of a transfer through host memory: fills the ring of a slot, piece by piece for a receiver that asks
//! for it ([`Serve`]), or with the whole of a small payload before anyone asks ([`Hosting`]).

pub mod tracks;

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use crate::cuda::{ContextKey, Error, InFlight, Purpose};
use crate::engine::gpu::{is_for_now, Gpu};
use crate::node::{Entry, Ring, Segment, RING_ENTRIES};

/// A message that its receiver wants through the host ring. Pieces of staging are taken only now that it is matched,
/// so that no unmatched message can hold one.
pub struct Serve {
    context: ContextKey,
    source: u64,
    length: u64,
    issued: u64,
    /// Pieces being filled, oldest first.
    filling: VecDeque<Filling>,
    /// Filled pieces that the receiver has not emptied, oldest first.
    filled: VecDeque<u32>,
    /// Entries that were appended to the ring.
    pushed: u64,
}

/// A piece of staging that a copy is filling.
struct Filling {
    /// None where the copy has failed and is to be made again.
    copy: Option<InFlight>,
    piece: u32,
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
    /// Nothing is started yet.
    pub fn new(context: ContextKey, source: u64, length: u64) -> Serve {
        Serve {
            context,
            source,
            length,
            issued: 0,
            filling: VecDeque::new(),
            filled: VecDeque::new(),
            pushed: 0,
        }
    }

    /// Fills what can be filled. True if anything moved.
    pub fn poll(&mut self, gpu: &mut Gpu, own: &Segment, ring: &Ring<'_>) -> Result<bool, Trouble> {
        if !ring.is_filled_to(self.pushed) {
            return Err(Trouble::Corrupt);
        }
        let mut moved = self.take_back(own, ring);
        while let Some(filling) = self.filling.front_mut() {
            if !filling.poll(gpu, own, self.context)? {
                break;
            }
            let entry = Entry {
                piece: filling.piece,
                bytes: filling.bytes,
            };
            if !append(ring, &mut self.pushed, entry)? {
                break;
            }
            self.filled.push_back(entry.piece);
            self.filling.pop_front();
            moved = true;
        }
        while self.issued < self.length && self.filling.len() + self.filled.len() < RING_ENTRIES {
            let Some(piece) = own.take_chunk() else { break };
            match self.start(gpu, own, piece) {
                Ok(()) => moved = true,
                Err(error) => {
                    own.give(piece);
                    if is_for_now(&error) {
                        break;
                    }
                    return Err(error.into());
                }
            }
        }
        Ok(moved)
    }

    fn start(&mut self, gpu: &mut Gpu, own: &Segment, piece: u32) -> Result<(), Error> {
        let left = self.length - self.issued;
        let from = self.source + self.issued;
        let (copy, bytes) = bring_down(gpu, own, self.context, piece, from, left)?;
        self.filling.push_back(Filling {
            copy: Some(copy),
            piece,
            from,
            bytes,
        });
        self.issued += u64::from(bytes);
        Ok(())
    }

    /// Takes back the pieces that the receiver has emptied.
    fn take_back(&mut self, own: &Segment, ring: &Ring<'_>) -> bool {
        let Ok(in_flight) = ring.in_flight() else {
            return false;
        };
        let mut moved = false;
        while self.filled.len() > in_flight {
            if let Some(piece) = self.filled.pop_front() {
                own.give(piece);
                moved = true;
            }
        }
        moved
    }

    /// Gives every piece back, once the message is over. Copies into pieces that are still in flight are waited for
    /// by keeping their pieces out of use until then: see [`Serve::is_drained`].
    pub fn release_filled(&mut self, own: &Segment) {
        for piece in self.filled.drain(..) {
            own.give(piece);
        }
    }

    /// Drops what has landed of an aborted message; true once nothing is in flight.
    pub fn is_drained(&mut self, own: &Segment) -> bool {
        while let Some(filling) = self.filling.front_mut() {
            if filling.copy.as_mut().is_some_and(|copy| !copy.is_over()) {
                return false;
            }
            own.give(filling.piece);
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
                none.insert(bring_down(gpu, own, context, self.piece, self.from, left)?.0)
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

/// Starts the copy of the first of `left` bytes from `from` into a piece of this rank's staging, as many as it holds.
fn bring_down(
    gpu: &mut Gpu,
    own: &Segment,
    context: ContextKey,
    piece: u32,
    from: u64,
    left: u64,
) -> Result<(InFlight, u32), Error> {
    if let Some((start, length)) = own.staging() {
        // SAFETY: this rank's segment stays mapped for the life of the process; pins are dropped at finalize.
        unsafe { gpu.pin(context, start.as_ptr(), length) };
    }
    let Some((address, size)) = own.piece(piece) else {
        return Err(crate::cuda::Error::Exhausted("staging"));
    };
    let bytes = left.min(u64::from(size));
    let to = address.as_ptr().expose_provenance() as u64;
    let copy = gpu.copy(context, Purpose::DeviceToHost, to, from, bytes)?;
    Ok((copy, bytes as u32))
}

/// How long a small message of a blocking send waits for its receiver to read the buffer itself. A receiver that waits
/// for it claims it about a microsecond after it was sent, and the copy to host memory, some 3 us of the sender's time, is
/// saved.
const BLOCKING_DELAY: Duration = Duration::from_micros(2);
/// The same for other sends: their receiver may be about to post, as this rank is, and then claims a whole window.
const DELAY: Duration = Duration::from_micros(30);

/// A payload of a standard send below the eager limit: copied into a cell of this rank's segment unless its receiver is
/// quick to read the buffer itself, so that the send completes without its receiver.
pub struct Hosting {
    context: ContextKey,
    source: u64,
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
    /// Nothing is started yet. The cell is this rank's, and holds `length` bytes.
    pub fn new(context: ContextKey, source: u64, length: u64, cell: u32) -> Hosting {
        Hosting {
            context,
            source,
            length,
            cell,
            sent: Instant::now(),
            delay: DELAY,
            is_asked_for: false,
            copy: None,
            in_ring: false,
        }
    }

    /// Moves on, at once if the receiver waits for it. True if the payload has come to be in the ring, as its only entry.
    pub fn poll(
        &mut self,
        gpu: &mut Gpu,
        own: &Segment,
        ring: &Ring<'_>,
        is_wanted: bool,
    ) -> Result<bool, Trouble> {
        if self.in_ring && !ring.is_filled_to(1) {
            return Err(Trouble::Corrupt);
        }
        if self.in_ring || (!is_wanted && self.copy.is_none() && self.sent.elapsed() < self.delay) {
            return Ok(false);
        }
        let copy = match &mut self.copy {
            Some(copy) => copy,
            None => match bring_down(gpu, own, self.context, self.cell, self.source, self.length) {
                Ok((copy, _)) => self.copy.insert(copy),
                Err(error) if is_for_now(&error) => return Ok(false),
                Err(error) => return Err(error.into()),
            },
        };
        let answer = copy.poll();
        if copy.is_lost() {
            self.copy = None;
        }
        if !answer? {
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
        self.delay = BLOCKING_DELAY;
    }

    /// Whether the payload is in the ring, and the program's buffer not read any more.
    pub fn is_in_ring(&self) -> bool {
        self.in_ring
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
