//! A message through its sender's ring in staging memory: of the host, or of the sender's GPU (`serve.rs` is
//! the other side).

use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::Arc;

use super::{flag, Destination, Fetch, Lost, Path, Step, AGAIN_THROUGH_HOST};
use crate::cuda::{ContextKey, Copy, Error, InFlight, Mapping, Purpose};
use crate::engine::fault::{self, Of};
use crate::engine::gpu::{is_for_now, Gpu};
use crate::engine::memory;
use crate::engine::serve::{self, piece_bytes};
use crate::engine::story;
use crate::node::{OnGpu, Peer, Ring, State, FIRST_CELL, UNIT_BYTES};
use crate::stats::{self, Counter, Reason};

/// Messages of so many bytes are written to host memory past the caches: pieces that a device wrote are copied at 16 GB/s
/// then, and at 8 to 9 otherwise. The program reads shorter ones from its caches. From 256 KiB on windows of 16 gain, too, but
/// those of 4 lose (two H100s, times the speed without the library, from 1 MiB on, 512 and 256 KiB: 256 KiB 1.67, 1.81, 1.99 and
/// 1.95, 2.02, 1.71; 512 KiB 1.45, 1.76, 1.79, both ways 0.90, 1.04, 1.05; `docs/results/h100-x2-upwards.txt`).
const STREAMED_BYTES_MIN: u64 = 512 << 10;

/// Pieces on a GPU are read on so many lanes in turn: one copy starts while another is under way.
const LANES: u64 = 2;

/// A message on its way out of its sender's ring.
pub struct Draw {
    /// Pieces in flight to a device, oldest first.
    flying: VecDeque<(InFlight, u64)>,
    arrived: u64,
    /// Entries given back to the sender.
    popped: u64,
    /// The state in which the slot stays meanwhile: WantGpu or WantHost where the sender fills the ring for
    /// this receiver, Hosted (or Claimed) where it has put the whole payload there by itself.
    state: State,
    /// It comes anew in host memory: entries on the GPU are passed over.
    is_anew: bool,
    /// Copies out of such entries, whose bytes do not count. The message does not begin anew before they are
    /// over.
    passed_over: VecDeque<InFlight>,
}

impl Draw {
    /// Nothing has arrived yet.
    pub fn new(state: State) -> Draw {
        Draw {
            flying: VecDeque::new(),
            arrived: 0,
            popped: 0,
            state,
            is_anew: false,
            passed_over: VecDeque::new(),
        }
    }

    /// Whether its sender had put all of it there before this receiver came.
    fn is_eager(&self) -> bool {
        !matches!(self.state, State::WantGpu | State::WantHost)
    }

    /// The path, as the user reads it.
    pub fn told(&self) -> fault::Path {
        match self.state {
            State::WantGpu => fault::Path::GpuRing,
            State::WantHost => fault::Path::HostRing,
            _ => fault::Path::Eager,
        }
    }

    /// The path, for a program that asks.
    pub fn way(&self) -> story::Path {
        match self.state {
            State::WantGpu => story::Path::GpuRing,
            State::WantHost => story::Path::HostRing,
            _ => story::Path::Eager,
        }
    }

    /// By which counters it counts.
    fn counters(&self) -> (Counter, Counter) {
        match self.state {
            State::WantGpu => (Counter::GpuRingReceives, Counter::GpuRingBytes),
            State::WantHost => (Counter::HostRingReceives, Counter::HostRingBytes),
            _ => (Counter::EagerReceives, Counter::EagerBytes),
        }
    }

    /// Copies that write to the receiver's buffer.
    pub fn into_copies(self) -> Vec<InFlight> {
        let flying = self.flying.into_iter().map(|(copy, _)| copy);
        flying.chain(self.passed_over).collect()
    }

    /// Memory of the GPU is not the way any more.
    fn begin_anew(&mut self) {
        self.state = State::WantHost;
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

/// Where a piece is that a ring entry names.
enum Piece {
    /// In the sender's segment.
    Host(NonNull<u8>),
    /// On its GPU.
    OnGpu {
        address: u64,
        mapping: Option<Arc<Mapping>>,
    },
}

impl Fetch {
    /// Whether a message that cannot be read where it is may come through memory of its sender's GPU: the
    /// sender has some there, and this rank has it mapped now.
    pub(super) fn may_come_by_gpu_ring(&self, gpu: &mut Gpu) -> bool {
        let Destination::Device { context, .. } = self.to else {
            return false;
        };
        // What fits into a cell may lie there already.
        let is_hosted = self.wanted <= u64::from(self.peer.layout().cell_bytes);
        let is_host = self.message.flags & flag::HOST != 0;
        let is_shared = self.device == self.message.device;
        let bytes_min = serve::OnGpu::between(is_shared).bytes_min;
        if is_host || is_hosted || self.own || self.wanted < bytes_min {
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
        let mut gpus = self.peer.board()?.gpus().iter();
        let row = gpus.position(|gpu| gpu.uuid() == self.message.device)?;
        u8::try_from(row).ok()
    }

    /// Starts what can be brought out of the ring. Whether anything moved, and what stopped it.
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
        let Path::Ring(draw) = &mut self.path else {
            return Ok((false, None));
        };
        if draw.state == State::WantGpu && now == Ok(State::WantHost) {
            // So says its sender.
            draw.begin_anew();
        }
        if now != Ok(draw.state) {
            return Err(why_gone);
        }
        // Also where nothing is to be had yet: a side that believes a counter that was written over waits for ever.
        if !ring.is_emptied_to(draw.popped) {
            return Err(Lost::Corrupt);
        }
        let mut moved = false;
        let mut trouble = None;
        while let Some(copy) = draw.passed_over.front_mut() {
            if !copy.is_over() {
                return Ok((moved, None));
            }
            draw.passed_over.pop_front();
            draw.pop(&peer, &ring, false)?;
            moved = true;
        }
        loop {
            let entry = ring.peek(draw.flying.len()).map_err(|_| Lost::Corrupt)?;
            let Some(entry) = entry else {
                // The whole payload was there before the message was in this state.
                if draw.is_eager() && draw.flying.is_empty() && draw.arrived < wanted {
                    return Err(Lost::Corrupt);
                }
                break;
            };
            if draw.is_anew && entry.on_gpu().is_some() && draw.flying.is_empty() {
                draw.pop(&peer, &ring, false)?;
                moved = true;
                continue;
            }
            if entry.on_gpu().is_some() != (draw.state == State::WantGpu) {
                return Err(Lost::Corrupt);
            }
            let flying: u64 = draw.flying.iter().map(|(_, bytes)| bytes).sum();
            let started = draw.arrived + flying;
            let bytes = u64::from(entry.bytes);
            // Every piece in host memory but the last is as long.
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
                    // SAFETY: the receive can hold `wanted` bytes from `address`, of which these are the next; the
                    // piece is mapped, `bytes` long, and the sender's until it is popped.
                    unsafe {
                        let to = address.add(started as usize);
                        let is_long = wanted >= STREAMED_BYTES_MIN;
                        memory::copy(to, start.as_ptr(), bytes as usize, is_long);
                    }
                    draw.arrived += bytes;
                    draw.pop(&peer, &ring, draw.arrived == wanted)?;
                    moved = true;
                }
                (Destination::Device { context, address }, piece) => {
                    let dst = address + started;
                    let is_eager = draw.is_eager();
                    let lane = (draw.popped + draw.flying.len() as u64) % LANES;
                    match begin(gpu, context, &peer, piece, dst, bytes, is_eager, lane) {
                        Ok(copy) => draw.flying.push_back((copy, bytes)),
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
        let wanted = self.wanted;
        let Path::Ring(draw) = &mut self.path else {
            return Ok(Step::Pending(false));
        };
        let mut is_lost = false;
        while let Some((copy, bytes)) = draw.flying.front_mut() {
            match copy.poll() {
                Ok(false) => break,
                Ok(true) => {
                    draw.arrived += *bytes;
                    draw.flying.pop_front();
                    draw.pop(&peer, &ring, draw.arrived == wanted)?;
                    moved = true;
                }
                Err(error) => {
                    is_lost = copy.is_lost();
                    trouble = Some(error);
                    break;
                }
            }
        }
        if draw.arrived == wanted && draw.passed_over.is_empty() {
            let counters = draw.counters();
            return Ok(self.complete(counters));
        }
        let is_on_gpu = draw.state == State::WantGpu;
        if let Some(error) = trouble {
            self.failures += 1;
            let is_last = self.failures >= fault::ATTEMPTS || error.context_is_gone();
            if is_on_gpu && (is_lost || is_last) {
                return self.leave_gpu_ring(gpu, &error);
            }
            if is_lost || is_last {
                return Err(Lost::Driver(error));
            }
            let of = Of::From(self.message.source);
            fault::tried_again(of, self.path.told(), &error);
        }
        Ok(Step::Pending(moved))
    }

    /// Has the message come anew through host memory.
    fn leave_gpu_ring(&mut self, gpu: &mut Gpu, error: &Error) -> Result<Step, Lost> {
        self.survived(error, AGAIN_THROUGH_HOST);
        stats::add(Counter::Retries, 1);
        stats::fallback(Reason::DriverError, self.wanted);
        self.reason = Some(Reason::DriverError);
        self.failures = 0;
        if let Some(row) = self.row_of_sender() {
            gpu.relays.blame(self.message.source, row);
        }
        if let Some(slot) = self.slot() {
            // Its sender may have been quicker.
            let _ = slot.want_host(self.nonce);
        }
        if let Path::Ring(draw) = &mut self.path {
            draw.begin_anew();
        }
        self.peer.ring_doorbell();
        Ok(Step::Pending(true))
    }
}

/// Why a piece on a GPU cannot be read.
enum Reach {
    Driver(Error),
    /// It is none.
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
    // The sender keeps what is exported as long as an entry names it.
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

/// Starts the copy of a piece to a device; of one on a GPU on this lane.
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
            return gpu.queue_on(context, Purpose::PullStaged, lane, copy, mapping);
        }
        Piece::Host(start) => start.as_ptr().expose_provenance() as u64,
    };
    if let Some((start, length)) = peer.staging() {
        // SAFETY: the peer's segment stays mapped while the node is registered; pins are dropped before that, at finalize.
        unsafe { gpu.pin(context, start.as_ptr(), length) };
    }
    let copy = Copy::Up { dst, src, bytes };
    if is_eager {
        // A whole message is in order with direct copies, on their lane, and together with others that have
        // landed it costs the device less.
        gpu.pull(context, source, copy, None)
    } else {
        gpu.copy_on(context, Purpose::HostToDevice, 0, copy, None)
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
