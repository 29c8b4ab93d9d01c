//! The sender's side of a transfer through host memory: fills the ring of a slot.

use std::collections::VecDeque;

use crate::cuda::{ContextKey, InFlight, Purpose, Result};
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
    filling: VecDeque<(InFlight, u32, u32)>,
    /// Filled pieces that the receiver has not emptied, oldest first.
    filled: VecDeque<u32>,
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
        }
    }

    /// Fills what can be filled. True if anything moved.
    pub fn poll(&mut self, gpu: &mut Gpu, own: &Segment, ring: &Ring<'_>) -> Result<bool> {
        let mut moved = self.take_back(own, ring);
        while let Some((copy, piece, bytes)) = self.filling.front_mut() {
            if !copy.poll()? {
                break;
            }
            let entry = Entry {
                piece: *piece,
                bytes: *bytes,
            };
            if !ring.push(entry).unwrap_or(false) {
                break;
            }
            self.filled.push_back(*piece);
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
                    return Err(error);
                }
            }
        }
        Ok(moved)
    }

    fn start(&mut self, gpu: &mut Gpu, own: &Segment, piece: u32) -> Result<()> {
        if let Some((start, length)) = own.staging() {
            // SAFETY: this rank's segment stays mapped for the life of the process; pins are dropped at finalize.
            unsafe { gpu.pin(self.context, start.as_ptr(), length) };
        }
        let Some((address, size)) = own.piece(piece) else {
            return Err(crate::cuda::Error::Exhausted("staging"));
        };
        let bytes = (self.length - self.issued).min(u64::from(size));
        let to = address.as_ptr().expose_provenance() as u64;
        let copy = gpu.copy(
            self.context,
            Purpose::DeviceToHost,
            0,
            to,
            self.source + self.issued,
            bytes,
        )?;
        self.filling.push_back((copy, piece, bytes as u32));
        self.issued += bytes;
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
        while let Some((copy, piece, _)) = self.filling.front_mut() {
            if matches!(copy.poll(), Ok(false)) {
                return false;
            }
            own.give(*piece);
            self.filling.pop_front();
        }
        true
    }
}
