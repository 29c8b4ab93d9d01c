//! The receiver's side of the pipeline: the sender brings the message piece by piece through its ring, in
//! staging memory of the host or of its GPU (`serve.rs` is the other side).

use std::collections::VecDeque;

use super::ring::{Filled, RingReader};
use super::{Progress, Protocol};
use crate::cuda::{Error, InFlight};
use crate::node::{Refused, Ring, SlotState};
use crate::policy::pipeline;
use crate::transfer::fetch::claim::{Claim, Lost};
use crate::transfer::fetch::{flag, Destination};
use crate::transfer::gpu::Gpu;
use crate::transfer::life;
use crate::transfer::Env;

/// A message that its sender brings through its ring.
pub struct Pipeline {
    reader: RingReader,
    filled: Filled,
    /// Copies out of skipped entries, whose bytes do not count. The message does not start again before they
    /// are over.
    passed_over: VecDeque<InFlight>,
}

impl Pipeline {
    /// Asks the sender: through memory of its GPU, if this rank can read that.
    pub fn ask(claim: &mut Claim, gpu: &mut Gpu) -> Pipeline {
        let is_on_gpu = may_come_by_gpu(claim, gpu)
            && claim
                .slot()
                .is_some_and(|slot| slot.want_gpu(claim.nonce).is_ok());
        match is_on_gpu {
            true => Pipeline::asked(claim, Filled::OnGpu),
            false => Pipeline::ask_for_host(claim),
        }
    }

    /// Asks the sender to bring it through host memory.
    pub fn ask_for_host(claim: &mut Claim) -> Pipeline {
        if let Some(slot) = claim.slot() {
            let _ = slot.want_host(claim.nonce);
        }
        Pipeline::asked(claim, Filled::InHost)
    }

    /// The sender fills the ring from now on.
    fn asked(claim: &mut Claim, filled: Filled) -> Pipeline {
        claim.turn = None;
        claim.peer.ring_doorbell();
        Pipeline {
            reader: RingReader::default(),
            filled,
            passed_over: VecDeque::new(),
        }
    }

    fn is_on_gpu(&self) -> bool {
        self.filled == Filled::OnGpu
    }

    /// Memory of the GPU is not used any more.
    fn begin_anew(&mut self, claim: &mut Claim) {
        self.filled = Filled::InHostAnew;
        self.passed_over.extend(self.reader.begin_anew());
        claim.life.reach(life::State::Moving(self.name()));
    }

    /// The ring, if the slot is still about this message. `now`: the state of the slot.
    fn ring<'a>(
        &self,
        claim: &'a Claim,
        now: Option<Result<SlotState, Refused>>,
    ) -> Result<Ring<'a>, Lost> {
        let state = match self.is_on_gpu() {
            true => SlotState::WantGpu,
            false => SlotState::WantHost,
        };
        if now != Some(Ok(state)) {
            return Err(claim.why_gone());
        }
        let ring = claim.slot().ok_or(Lost::Corrupt)?.ring(claim.nonce);
        self.reader.check(&ring)?;
        Ok(ring)
    }

    /// Makes the message come again from the start, through host memory.
    fn leave_gpu(&mut self, claim: &mut Claim, gpu: &mut Gpu, error: &Error) {
        claim.survived_through_host(error);
        claim.failures = 0;
        if let Some(row) = row_of_sender(claim) {
            gpu.relays.blame(claim.message.source, row);
        }
        if let Some(slot) = claim.slot() {
            // Its sender may have been faster.
            let _ = slot.want_host(claim.nonce);
        }
        self.begin_anew(claim);
        claim.peer.ring_doorbell();
    }
}

impl Protocol for Pipeline {
    fn name(&self) -> life::Protocol {
        match self.is_on_gpu() {
            true => life::Protocol::GpuPipeline,
            false => life::Protocol::HostPipeline,
        }
    }

    fn progress(&mut self, claim: &mut Claim, _: &Env, gpu: &mut Gpu) -> Result<Progress, Lost> {
        // Read once: its sender may change it at any time.
        let now = claim.slot().map(|slot| slot.state(claim.nonce));
        if self.is_on_gpu() && now == Some(Ok(SlotState::WantHost)) {
            // Its sender says so.
            self.begin_anew(claim);
        }
        let ring = self.ring(claim, now)?;
        let mut moved = false;
        while let Some(copy) = self.passed_over.front_mut() {
            if !copy.is_over() {
                return Ok(Progress::Pending(moved));
            }
            self.passed_over.pop_front();
            self.reader.skip(claim, &ring)?;
            moved = true;
        }
        let (has_moved, trouble) = self.reader.empty(claim, gpu, &ring, self.filled)?;
        if self.reader.is_done(claim) {
            return Ok(Progress::Landed(self.name()));
        }
        if let Some(trouble) = trouble {
            match trouble.is_end(claim) {
                true if self.is_on_gpu() => {
                    self.leave_gpu(claim, gpu, &trouble.error);
                    return Ok(Progress::Pending(true));
                }
                true => return Err(Lost::Driver(trouble.error)),
                false => trouble.tell_again(claim),
            }
        }
        Ok(Progress::Pending(moved || has_moved))
    }

    fn abort(self) -> Vec<InFlight> {
        self.reader.into_copies().chain(self.passed_over).collect()
    }

    fn reads_lent_buffer(&self) -> bool {
        false
    }

    fn is_staged(&self) -> bool {
        true
    }
}

/// Whether a message that cannot be read in place may come through memory of its sender's GPU: the sender has
/// staging there, and this rank has that mapped now.
fn may_come_by_gpu(claim: &Claim, gpu: &mut Gpu) -> bool {
    let Destination::Device { context, .. } = claim.to else {
        return false;
    };
    // A message that fits into a cell may lie there already.
    let fits_a_cell = claim.wanted <= u64::from(claim.peer.layout().cell_bytes);
    let is_host = claim.message.flags & flag::HOST != 0;
    let is_shared = claim.device == claim.message.device;
    let bytes_min = pipeline::OnGpu::between(is_shared).bytes_min;
    if is_host || fits_a_cell || claim.own || claim.wanted < bytes_min {
        return false;
    }
    let Some(row) = row_of_sender(claim) else {
        return false;
    };
    let owner = claim.message.source;
    if gpu.relays.is_bad(owner, row) {
        return false;
    }
    match gpu.reach_relay(context, &claim.peer, row) {
        Ok(reached) => reached.is_some(),
        Err(error) => {
            gpu.relays.blame(owner, row);
            claim.survived(&error, "through host memory instead");
            false
        }
    }
}

/// Which of the sender's GPUs the message is on.
fn row_of_sender(claim: &Claim) -> Option<u8> {
    let mut gpus = claim.peer.gpu_page()?.gpus().iter();
    let row = gpus.position(|gpu| gpu.uuid() == claim.message.device)?;
    u8::try_from(row).ok()
}
