//! A message through its sender's ring in host memory.

use std::sync::Arc;

use super::{Destination, Fetch, Lost, Path, Step};
use crate::cuda::{Copy, Error, Purpose};
use crate::engine::fault::{self, Of};
use crate::engine::gpu::{is_for_now, Gpu};
use crate::engine::memory;
use crate::engine::serve::piece_bytes;
use crate::node::{Peer, Ring, State, FIRST_CELL};
use crate::stats::Counter;

/// Messages of so many bytes are written to host memory past the caches: pieces that a device wrote are copied at 16 GB/s
/// then, and at 8 to 9 otherwise. The program reads shorter ones from its caches. From 256 KiB on windows of 16 gain, too, but
/// those of 4 lose (two H100s, times the speed without the library, from 1 MiB on, 512 and 256 KiB: 256 KiB 1.67, 1.81, 1.99 and
/// 1.95, 2.02, 1.71; 512 KiB 1.45, 1.76, 1.79, both ways 0.90, 1.04, 1.05; `docs/results/h100-x2-upwards.txt`).
const STREAMED_BYTES_MIN: u64 = 512 << 10;

impl Fetch {
    /// Starts what can be brought out of the ring. Whether anything moved, and what stopped it.
    pub(super) fn empty_ring(&mut self, gpu: &mut Gpu) -> Result<(bool, Option<Error>), Lost> {
        let peer = Arc::clone(&self.peer);
        let slot = peer.slot(self.slot).ok_or(Lost::Corrupt)?;
        let ring = slot.ring(self.nonce);
        let now = slot.state(self.nonce);
        let why_gone = self.why_gone();
        let Path::Ring {
            flying,
            arrived,
            popped,
            state,
        } = &mut self.path
        else {
            return Ok((false, None));
        };
        if now != Ok(*state) {
            return Err(why_gone);
        }
        // Also where nothing is to be had yet: a side that believes a counter that was written over waits for ever.
        if !ring.is_emptied_to(*popped) {
            return Err(Lost::Corrupt);
        }
        let mut moved = false;
        let mut trouble = None;
        loop {
            let entry = ring.peek(flying.len()).map_err(|_| Lost::Corrupt)?;
            let Some(entry) = entry else {
                // The whole payload was there before the message was in this state.
                if *state != State::WantHost && flying.is_empty() && *arrived < self.wanted {
                    return Err(Lost::Corrupt);
                }
                break;
            };
            let started: u64 = *arrived + flying.iter().map(|(_, bytes)| bytes).sum::<u64>();
            let (piece, bytes) = peer.piece_of(entry).ok_or(Lost::Corrupt)?;
            let bytes = bytes as u64;
            // Every piece but the last is as long.
            let step = match entry.piece.checked_sub(FIRST_CELL) {
                Some(_) => u64::from(peer.layout().cell_bytes),
                None => piece_bytes(u64::from(peer.layout().chunk_bytes), self.wanted),
            };
            if bytes != step.min(self.wanted - started) {
                return Err(Lost::Corrupt);
            }
            match self.to {
                Destination::Host(address) => {
                    // SAFETY: the receive can hold `wanted` bytes from `address`, of which these are the next; the
                    // piece is mapped, `bytes` long, and the sender's until it is popped.
                    unsafe {
                        let to = address.add(started as usize);
                        let is_long = self.wanted >= STREAMED_BYTES_MIN;
                        memory::copy(to, piece.as_ptr(), bytes as usize, is_long);
                    }
                    *arrived += bytes;
                    pop(&peer, &ring, popped, *arrived == self.wanted)?;
                    moved = true;
                }
                Destination::Device { context, address } => {
                    if let Some((start, length)) = peer.staging() {
                        // SAFETY: the peer's segment stays mapped while the node is registered; pins are dropped
                        // before that, at finalize.
                        unsafe { gpu.pin(context, start.as_ptr(), length) };
                    }
                    let from = piece.as_ptr().expose_provenance() as u64;
                    let copy = Copy::Up {
                        dst: address + started,
                        src: from,
                        bytes,
                    };
                    // A whole message is in order with direct copies, on their lane, and together with others that have
                    // landed it costs the device less.
                    let started = match state {
                        State::WantHost => {
                            gpu.copy_on(context, Purpose::HostToDevice, 0, copy, None)
                        }
                        _ => gpu.pull(context, self.message.source, copy, None),
                    };
                    match started {
                        Ok(copy) => flying.push_back((copy, bytes)),
                        Err(error) if is_for_now(&error) => break,
                        Err(error) => {
                            trouble = Some(error);
                            break;
                        }
                    }
                    moved = true;
                }
            }
        }
        Ok((moved, trouble))
    }

    /// Empties the ring into its place, piece by piece.
    pub(super) fn poll_ring(&mut self, gpu: &mut Gpu) -> Result<Step, Lost> {
        let (mut moved, mut trouble) = self.empty_ring(gpu)?;
        let peer = Arc::clone(&self.peer);
        let slot = peer.slot(self.slot).ok_or(Lost::Corrupt)?;
        let ring = slot.ring(self.nonce);
        let Path::Ring {
            flying,
            arrived,
            popped,
            state,
        } = &mut self.path
        else {
            return Ok(Step::Pending(false));
        };
        while let Some((copy, bytes)) = flying.front_mut() {
            match copy.poll() {
                Ok(false) => break,
                Ok(true) => {
                    *arrived += *bytes;
                    flying.pop_front();
                    pop(&peer, &ring, popped, *arrived == self.wanted)?;
                    moved = true;
                }
                Err(error) if copy.is_lost() => return Err(Lost::Driver(error)),
                Err(error) => {
                    trouble = Some(error);
                    break;
                }
            }
        }
        if *arrived == self.wanted {
            let counters = if *state != State::WantHost {
                (Counter::EagerReceives, Counter::EagerBytes)
            } else {
                (Counter::HostRingReceives, Counter::HostRingBytes)
            };
            return Ok(self.complete(counters));
        }
        if let Some(error) = trouble {
            self.failures += 1;
            if self.failures >= fault::ATTEMPTS || error.context_is_gone() {
                return Err(Lost::Driver(error));
            }
            let of = Of::From(self.message.source);
            fault::tried_again(of, self.path.told(), &error);
        }
        Ok(Step::Pending(moved))
    }
}

/// Gives a piece back. It is the sender's again once its entry is popped: what was read of it counts only if this was ours to do.
/// The sender waits for pieces that it can fill again; after the last one the acknowledgement tells it all.
fn pop(peer: &Peer, ring: &Ring<'_>, popped: &mut u64, is_last: bool) -> Result<(), Lost> {
    *popped += 1;
    let is_ours = ring.pop() == Ok(true) && ring.is_emptied_to(*popped);
    if !is_last {
        peer.ring_doorbell();
    }
    if is_ours {
        Ok(())
    } else {
        Err(Lost::Corrupt)
    }
}
