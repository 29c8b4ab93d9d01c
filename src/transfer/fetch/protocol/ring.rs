//! How a receiver empties its sender's ring, into which pieces of the payload are put (`serve.rs` is the other
//! side).

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::cuda::{ContextKey, Copy, Error, InFlight, Mapping, Purpose};
use crate::node::{Entry, OnGpu, Peer, Ring, FIRST_CELL, UNIT_BYTES};
use crate::policy::pipeline::piece_bytes;
use crate::transfer::fault::{self, Of};
use crate::transfer::fetch::claim::{Claim, Lost};
use crate::transfer::fetch::Destination;
use crate::transfer::gpu::{is_for_now, Gpu};
use crate::transfer::memory;

/// From so many bytes on, messages are written to host memory past the caches: pieces that a device wrote are
/// then copied at 16 GB/s, and otherwise at 8 to 9. The program reads shorter messages from its caches. With
/// a limit of 256 KiB windows of 4 lose (`docs/decisions/past-the-caches.md`).
const STREAMED_BYTES_MIN: u64 = 512 << 10;

/// Pieces on a GPU are read on so many lanes in turn: one copy starts while another runs.
const LANES: u64 = 2;

/// How the ring is filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Filled {
    /// It has the whole payload already, in host memory.
    Already,
    /// Piece by piece, in host memory.
    InHost,
    /// The same, from the start again, after it was filled on the GPU. What lies there in front is skipped.
    InHostAnew,
    /// Piece by piece, in memory of the sender's GPU.
    OnGpu,
}

/// What went wrong with a copy out of the ring.
pub struct Trouble {
    pub error: Error,
    /// The copy is gone; otherwise it can be made again.
    pub is_lost: bool,
}

/// The reader of a ring.
#[derive(Default)]
pub struct RingReader {
    /// Pieces in flight to a device, oldest first.
    flying: VecDeque<(InFlight, u64)>,
    arrived: u64,
    /// Entries given back to the sender.
    popped: u64,
}

impl RingReader {
    /// Copies that write to the receiver's buffer.
    pub fn into_copies(self) -> impl Iterator<Item = InFlight> {
        self.flying.into_iter().map(|(copy, _)| copy)
    }

    /// Nothing that has arrived so far counts. The copies in flight are the caller's to wait for, each before
    /// it gives its entry back ([`RingReader::skip`]).
    pub fn begin_anew(&mut self) -> impl Iterator<Item = InFlight> + '_ {
        self.arrived = 0;
        self.flying.drain(..).map(|(copy, _)| copy)
    }

    /// Gives the oldest entry back, whose bytes do not count.
    pub fn skip(&mut self, claim: &Claim, ring: &Ring<'_>) -> Result<(), Lost> {
        self.pop(&claim.peer, ring, false)
    }

    /// Fails if a counter of the ring was written over. To be called even if the ring has nothing yet: a side
    /// that believes such a counter waits for ever.
    pub fn check(&self, ring: &Ring<'_>) -> Result<(), Lost> {
        match ring.is_emptied_to(self.popped) {
            true => Ok(()),
            false => Err(Lost::Corrupt),
        }
    }

    /// Empties the ring into the receiver's buffer. Returns whether anything moved, and what went wrong.
    pub fn empty(
        &mut self,
        claim: &Claim,
        gpu: &mut Gpu,
        ring: &Ring<'_>,
        filled: Filled,
    ) -> Result<(bool, Option<Trouble>), Lost> {
        let (has_started, stopped) = self.start(claim, gpu, ring, filled)?;
        let (has_ended, lost) = self.settle(claim, ring)?;
        let stopped = stopped.map(|error| Trouble {
            error,
            is_lost: false,
        });
        Ok((has_started || has_ended, lost.or(stopped)))
    }

    /// Starts what can be brought out of the ring. Returns whether anything moved, and what stopped it.
    pub fn start(
        &mut self,
        claim: &Claim,
        gpu: &mut Gpu,
        ring: &Ring<'_>,
        filled: Filled,
    ) -> Result<(bool, Option<Error>), Lost> {
        let mut moved = false;
        loop {
            let entry = ring.peek(self.flying.len()).map_err(|_| Lost::Corrupt)?;
            let Some(entry) = entry else {
                // The whole payload was there before the slot was in this state.
                let is_short = self.flying.is_empty() && self.arrived < claim.wanted;
                if filled == Filled::Already && is_short {
                    return Err(Lost::Corrupt);
                }
                return Ok((moved, None));
            };
            let is_of_before = filled == Filled::InHostAnew && entry.on_gpu().is_some();
            if is_of_before && self.flying.is_empty() {
                self.skip(claim, ring)?;
                moved = true;
                continue;
            }
            match self.start_entry(claim, gpu, ring, entry, filled)? {
                Started::Yes => moved = true,
                Started::NotNow => return Ok((moved, None)),
                Started::Failed(error) => return Ok((moved, Some(error))),
            }
        }
    }

    /// Checks an entry, and brings its piece or starts the copy that does.
    fn start_entry(
        &mut self,
        claim: &Claim,
        gpu: &mut Gpu,
        ring: &Ring<'_>,
        entry: Entry,
        filled: Filled,
    ) -> Result<Started, Lost> {
        let (peer, wanted, to) = (&claim.peer, claim.wanted, claim.to);
        if entry.on_gpu().is_some() != (filled == Filled::OnGpu) {
            return Err(Lost::Corrupt);
        }
        let flying: u64 = self.flying.iter().map(|(_, bytes)| bytes).sum();
        let started = self.arrived + flying;
        let bytes = u64::from(entry.bytes);
        // Every piece in host memory but the last has this length.
        let step = match (entry.on_gpu(), entry.piece.checked_sub(FIRST_CELL)) {
            (Some(_), _) => bytes,
            (None, Some(_)) => u64::from(peer.layout().cell_bytes),
            (None, None) => piece_bytes(u64::from(peer.layout().chunk_bytes), wanted),
        };
        let left = wanted - started;
        if bytes == 0 || bytes > left || bytes != step.min(left) {
            return Err(Lost::Corrupt);
        }
        let piece = match entry.on_gpu() {
            None => {
                let (start, _) = peer.piece_of(entry).ok_or(Lost::Corrupt)?;
                Piece::Host(start)
            }
            Some(place) => match reach(gpu, to, peer, place, bytes) {
                Ok(piece) => piece,
                Err(Reach::Corrupt) => return Err(Lost::Corrupt),
                Err(Reach::Driver(error)) => return Ok(Started::Failed(error)),
            },
        };
        match (to, piece) {
            (Destination::Host(_), Piece::OnGpu { .. }) => Err(Lost::Corrupt),
            (Destination::Host(address), Piece::Host(start)) => {
                // SAFETY: the receive can hold `wanted` bytes from `address`, of which these are the
                // next. The piece is mapped and `bytes` long, and the sender does not reuse it before it
                // is popped.
                unsafe {
                    let to = address.add(started as usize);
                    let is_long = wanted >= STREAMED_BYTES_MIN;
                    memory::copy(to, start.as_ptr(), bytes as usize, is_long);
                }
                self.arrived += bytes;
                self.pop(peer, ring, self.arrived == wanted)?;
                Ok(Started::Yes)
            }
            (Destination::Device { context, address }, piece) => {
                let dst = address + started;
                let is_eager = filled == Filled::Already;
                let lane = (self.popped + self.flying.len() as u64) % LANES;
                match begin(gpu, context, peer, piece, dst, bytes, is_eager, lane) {
                    Ok(copy) => {
                        self.flying.push_back((copy, bytes));
                        Ok(Started::Yes)
                    }
                    Err(error) if is_for_now(&error) => Ok(Started::NotNow),
                    Err(error) => Ok(Started::Failed(error)),
                }
            }
        }
    }

    /// Gives back the entries whose copies have ended. Returns whether there were any, and what went wrong.
    fn settle(&mut self, claim: &Claim, ring: &Ring<'_>) -> Result<(bool, Option<Trouble>), Lost> {
        let mut moved = false;
        while let Some((copy, bytes)) = self.flying.front_mut() {
            match copy.poll() {
                Ok(false) => break,
                Ok(true) => {
                    self.arrived += *bytes;
                    self.flying.pop_front();
                    self.pop(&claim.peer, ring, self.arrived == claim.wanted)?;
                    moved = true;
                }
                Err(error) => {
                    let is_lost = copy.is_lost();
                    return Ok((moved, Some(Trouble { error, is_lost })));
                }
            }
        }
        Ok((moved, None))
    }

    /// Whether all of the message is there.
    pub fn is_done(&self, claim: &Claim) -> bool {
        self.arrived == claim.wanted
    }

    /// Gives the oldest piece back. Once its entry is popped, the piece is the sender's again: what was read of it
    /// counts only if this rank was the one to pop it. The sender waits for pieces that it can fill again. After
    /// the last piece, the ATS tells it everything.
    fn pop(&mut self, peer: &Peer, ring: &Ring<'_>, is_last: bool) -> Result<(), Lost> {
        self.popped += 1;
        let is_ours = ring.pop() == Ok(true) && ring.is_emptied_to(self.popped);
        if !is_last {
            peer.ring_doorbell();
        }
        match is_ours {
            true => Ok(()),
            false => Err(Lost::Corrupt),
        }
    }
}

impl Trouble {
    /// Counts it. Returns whether the copy is not made again.
    pub fn is_end(&self, claim: &mut Claim) -> bool {
        claim.failures += 1;
        self.is_lost || claim.failures >= fault::ATTEMPTS || self.error.context_is_gone()
    }

    /// Says that the copy is made again.
    pub fn tell_again(&self, claim: &Claim) {
        let of = Of::From(claim.message.source);
        fault::tried_again(of, claim.life.fault_path(), &self.error);
    }
}

/// What has become of an entry.
enum Started {
    Yes,
    /// The engine has no room for the copy now.
    NotNow,
    Failed(Error),
}

/// Where the piece of a ring entry is.
enum Piece {
    /// In the sender's segment.
    Host(NonNull<u8>),
    /// On the sender's GPU.
    OnGpu {
        address: u64,
        mapping: Option<Arc<Mapping>>,
    },
}

/// Why a piece on a GPU cannot be read.
enum Reach {
    Driver(Error),
    /// The entry names no such piece.
    Corrupt,
}

/// A piece on its sender's GPU, mapped.
fn reach(
    gpu: &mut Gpu,
    to: Destination,
    peer: &Peer,
    place: OnGpu,
    bytes: u64,
) -> Result<Piece, Reach> {
    let Destination::Device { context, .. } = to else {
        return Err(Reach::Corrupt);
    };
    let reached = gpu.reach_relay(context, peer, place.row);
    // The sender keeps its exported memory as long as an entry names it.
    let reached = reached.map_err(Reach::Driver)?.ok_or(Reach::Corrupt)?;
    let offset = u64::from(place.unit) * UNIT_BYTES;
    if offset + bytes > reached.exported.bytes {
        return Err(Reach::Corrupt);
    }
    Ok(Piece::OnGpu {
        address: reached.base + offset,
        mapping: reached.mapping,
    })
}

/// Starts the copy of a piece to a device. `lane` is for a piece on a GPU.
#[allow(
    clippy::too_many_arguments,
    reason = "environment, driver and message apart; transfers without MPI are to bring them together"
)]
fn begin(
    gpu: &mut Gpu,
    context: ContextKey,
    peer: &Peer,
    piece: Piece,
    dst: u64,
    bytes: u64,
    is_eager: bool,
    lane: u64,
) -> Result<InFlight, Error> {
    let source = peer.world_rank();
    let src = match piece {
        Piece::OnGpu { address, mapping } => {
            let src = address;
            let copy = Copy::Linear { dst, src, bytes };
            return gpu.queue_on(context, Purpose::GetStaged, lane, copy, mapping);
        }
        Piece::Host(start) => start.as_ptr().expose_provenance() as u64,
    };
    if let Some((start, length)) = peer.staging() {
        // SAFETY: the peer's segment stays mapped while the node is registered; pins are dropped before that,
        // at finalize.
        unsafe { gpu.pin(context, start.as_ptr(), length) };
    }
    let copy = Copy::Up { dst, src, bytes };
    if is_eager {
        // A whole message is in order with direct copies, on their lane. Together with others that have
        // landed it costs the device less.
        gpu.pull(context, source, copy, None)
    } else {
        gpu.copy_on(context, Purpose::HostToDevice, 0, copy, None)
    }
}
