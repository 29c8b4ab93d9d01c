//! The receiver's side of the pipeline: a message comes through its sender's ring, in staging memory of the
//! host or of the sender's GPU (`serve.rs` is the other side).

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{flag, Destination, Fetch, Lost, Path, Step, AGAIN_THROUGH_HOST};
use crate::cuda::{ContextKey, Copy, Error, InFlight, Mapping, Purpose};
use crate::node::{OnGpu, Peer, Ring, SlotState, FIRST_CELL, UNIT_BYTES};
use crate::policy::pipeline::{self, piece_bytes};
use crate::stats::{self, Counter, Reason};
use crate::transfer::fault::{self, Of};
use crate::transfer::gpu::{is_for_now, Gpu};
use crate::transfer::life::{self, Protocol};
use crate::transfer::memory;

/// From so many bytes on, messages are written to host memory past the caches: pieces that a device wrote are
/// then copied at 16 GB/s, and otherwise at 8 to 9. The program reads shorter messages from its caches. With
/// a limit of 256 KiB windows of 4 lose (`docs/decisions/past-the-caches.md`).
const STREAMED_BYTES_MIN: u64 = 512 << 10;

/// Pieces on a GPU are read on so many lanes in turn: one copy starts while another runs.
const LANES: u64 = 2;

/// A message that comes out of its sender's ring.
pub struct PipelineReceive {
    /// Pieces in flight to a device, oldest first.
    flying: VecDeque<(InFlight, u64)>,
    arrived: u64,
    /// Entries given back to the sender.
    popped: u64,
    /// The state in which the slot stays meanwhile: WantGpu or WantHost if the sender fills the ring for this
    /// receiver, Eager (or Claimed) if the sender has put the whole payload there by itself.
    state: SlotState,
    /// It comes again from the start, in host memory: entries on the GPU are skipped.
    is_anew: bool,
    /// Copies out of skipped entries, whose bytes do not count. The message does not start again before they
    /// are over.
    passed_over: VecDeque<InFlight>,
}

impl PipelineReceive {
    /// Nothing has arrived yet.
    pub fn new(state: SlotState) -> PipelineReceive {
        PipelineReceive {
            flying: VecDeque::new(),
            arrived: 0,
            popped: 0,
            state,
            is_anew: false,
            passed_over: VecDeque::new(),
        }
    }

    /// Whether its sender had put the whole payload there before this receiver came.
    fn is_eager(&self) -> bool {
        !matches!(self.state, SlotState::WantGpu | SlotState::WantHost)
    }

    /// The protocol, as its receiver sees it.
    pub fn protocol(&self) -> Protocol {
        match self.state {
            SlotState::WantGpu => Protocol::GpuPipeline,
            SlotState::WantHost => Protocol::HostPipeline,
            _ => Protocol::Eager,
        }
    }

    /// Copies that write to the receiver's buffer.
    pub fn into_copies(self) -> Vec<InFlight> {
        let flying = self.flying.into_iter().map(|(copy, _)| copy);
        flying.chain(self.passed_over).collect()
    }

    /// Memory of the GPU is not used any more.
    fn begin_anew(&mut self) {
        self.state = SlotState::WantHost;
        self.is_anew = true;
        self.arrived = 0;
        let flying = self.flying.drain(..);
        self.passed_over.extend(flying.map(|(copy, _)| copy));
    }

    /// Gives the oldest piece back.
    fn pop(&mut self, peer: &Peer, ring: &Ring<'_>, is_last: bool) -> Result<(), Lost> {
        pop(peer, ring, &mut self.popped, is_last)
    }
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

impl Fetch {
    /// Whether a message that cannot be read in place may come through memory of its sender's GPU: the sender
    /// has staging there, and this rank has that mapped now.
    pub(super) fn may_come_by_gpu_pipeline(&self, gpu: &mut Gpu) -> bool {
        let Destination::Device { context, .. } = self.to else {
            return false;
        };
        // A message that fits into a cell may lie there already.
        let fits_a_cell = self.wanted <= u64::from(self.peer.layout().cell_bytes);
        let is_host = self.message.flags & flag::HOST != 0;
        let is_shared = self.device == self.message.device;
        let bytes_min = pipeline::OnGpu::between(is_shared).bytes_min;
        if is_host || fits_a_cell || self.own || self.wanted < bytes_min {
            return false;
        }
        let Some(row) = self.row_of_sender() else {
            return false;
        };
        let owner = self.message.source;
        if gpu.relays.is_bad(owner, row) {
            return false;
        }
        match gpu.reach_relay(context, &self.peer, row) {
            Ok(reached) => reached.is_some(),
            Err(error) => {
                gpu.relays.blame(owner, row);
                self.survived(&error, "through host memory instead");
                false
            }
        }
    }

    /// Which of the sender's GPUs the message is on.
    fn row_of_sender(&self) -> Option<u8> {
        let mut gpus = self.peer.gpu_page()?.gpus().iter();
        let row = gpus.position(|gpu| gpu.uuid() == self.message.device)?;
        u8::try_from(row).ok()
    }

    /// Starts what can be brought out of the ring. Returns whether anything moved, and what stopped it.
    #[allow(
        clippy::too_many_lines,
        reason = "one entry of a ring, checked and begun; to be a protocol of its own"
    )]
    pub(super) fn empty_ring(&mut self, gpu: &mut Gpu) -> Result<(bool, Option<Error>), Lost> {
        let peer = Arc::clone(&self.peer);
        let slot = peer.slot(self.slot).ok_or(Lost::Corrupt)?;
        let ring = slot.ring(self.nonce);
        let now = slot.state(self.nonce);
        let why_gone = self.why_gone();
        let (wanted, to) = (self.wanted, self.to);
        let Path::Pipeline(receive) = &mut self.path else {
            return Ok((false, None));
        };
        if receive.state == SlotState::WantGpu && now == Ok(SlotState::WantHost) {
            // Its sender says so.
            receive.begin_anew();
            self.life.reach(life::State::Moving(receive.protocol()));
        }
        if now != Ok(receive.state) {
            return Err(why_gone);
        }
        // Checked even if the ring has nothing yet: a side that believes a counter that was written over
        // waits for ever.
        if !ring.is_emptied_to(receive.popped) {
            return Err(Lost::Corrupt);
        }
        let mut moved = false;
        let mut trouble = None;
        while let Some(copy) = receive.passed_over.front_mut() {
            if !copy.is_over() {
                return Ok((moved, None));
            }
            receive.passed_over.pop_front();
            receive.pop(&peer, &ring, false)?;
            moved = true;
        }
        loop {
            let entry = ring.peek(receive.flying.len()).map_err(|_| Lost::Corrupt)?;
            let Some(entry) = entry else {
                // The whole payload was there before the slot was in this state.
                if receive.is_eager() && receive.flying.is_empty() && receive.arrived < wanted {
                    return Err(Lost::Corrupt);
                }
                break;
            };
            if receive.is_anew && entry.on_gpu().is_some() && receive.flying.is_empty() {
                receive.pop(&peer, &ring, false)?;
                moved = true;
                continue;
            }
            if entry.on_gpu().is_some() != (receive.state == SlotState::WantGpu) {
                return Err(Lost::Corrupt);
            }
            let flying: u64 = receive.flying.iter().map(|(_, bytes)| bytes).sum();
            let started = receive.arrived + flying;
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
                Some(place) => match reach(gpu, to, &peer, place, bytes) {
                    Ok(piece) => piece,
                    Err(Reach::Corrupt) => return Err(Lost::Corrupt),
                    Err(Reach::Driver(error)) => {
                        trouble = Some(error);
                        break;
                    }
                },
            };
            match (to, piece) {
                (Destination::Host(_), Piece::OnGpu { .. }) => return Err(Lost::Corrupt),
                (Destination::Host(address), Piece::Host(start)) => {
                    // SAFETY: the receive can hold `wanted` bytes from `address`, of which these are the
                    // next. The piece is mapped and `bytes` long, and the sender does not reuse it before it
                    // is popped.
                    unsafe {
                        let to = address.add(started as usize);
                        let is_long = wanted >= STREAMED_BYTES_MIN;
                        memory::copy(to, start.as_ptr(), bytes as usize, is_long);
                    }
                    receive.arrived += bytes;
                    receive.pop(&peer, &ring, receive.arrived == wanted)?;
                    moved = true;
                }
                (Destination::Device { context, address }, piece) => {
                    let dst = address + started;
                    let is_eager = receive.is_eager();
                    let lane = (receive.popped + receive.flying.len() as u64) % LANES;
                    match begin(gpu, context, &peer, piece, dst, bytes, is_eager, lane) {
                        Ok(copy) => receive.flying.push_back((copy, bytes)),
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

    /// Empties the ring into the receiver's buffer, piece by piece.
    pub(super) fn poll_pipeline(&mut self, gpu: &mut Gpu) -> Result<Step, Lost> {
        let (mut moved, mut trouble) = self.empty_ring(gpu)?;
        let peer = Arc::clone(&self.peer);
        let slot = peer.slot(self.slot).ok_or(Lost::Corrupt)?;
        let ring = slot.ring(self.nonce);
        let wanted = self.wanted;
        let Path::Pipeline(receive) = &mut self.path else {
            return Ok(Step::Pending(false));
        };
        let mut is_lost = false;
        while let Some((copy, bytes)) = receive.flying.front_mut() {
            match copy.poll() {
                Ok(false) => break,
                Ok(true) => {
                    receive.arrived += *bytes;
                    receive.flying.pop_front();
                    receive.pop(&peer, &ring, receive.arrived == wanted)?;
                    moved = true;
                }
                Err(error) => {
                    is_lost = copy.is_lost();
                    trouble = Some(error);
                    break;
                }
            }
        }
        if receive.arrived == wanted && receive.passed_over.is_empty() {
            let protocol = receive.protocol();
            return Ok(self.complete(protocol));
        }
        let is_on_gpu = receive.state == SlotState::WantGpu;
        if let Some(error) = trouble {
            self.failures += 1;
            let is_last = self.failures >= fault::ATTEMPTS || error.context_is_gone();
            if is_on_gpu && (is_lost || is_last) {
                return self.leave_gpu_pipeline(gpu, &error);
            }
            if is_lost || is_last {
                return Err(Lost::Driver(error));
            }
            let of = Of::From(self.message.source);
            fault::tried_again(of, self.life.told(), &error);
        }
        Ok(Step::Pending(moved))
    }

    /// Makes the message come again from the start, through host memory.
    fn leave_gpu_pipeline(&mut self, gpu: &mut Gpu, error: &Error) -> Result<Step, Lost> {
        self.survived(error, AGAIN_THROUGH_HOST);
        stats::add(Counter::Retries, 1);
        stats::fallback(Reason::DriverError, self.wanted);
        self.reason = Some(Reason::DriverError);
        self.failures = 0;
        if let Some(row) = self.row_of_sender() {
            gpu.relays.blame(self.message.source, row);
        }
        if let Some(slot) = self.slot() {
            // Its sender may have been faster.
            let _ = slot.want_host(self.nonce);
        }
        if let Path::Pipeline(receive) = &mut self.path {
            receive.begin_anew();
        }
        self.peer.ring_doorbell();
        Ok(Step::Pending(true))
    }
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

/// Gives a piece back. Once its entry is popped, the piece is the sender's again: what was read of it counts
/// only if this rank was the one to pop it. The sender waits for pieces that it can fill again. After the
/// last piece, the ATS tells it everything.
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
