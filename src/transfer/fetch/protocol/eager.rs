//! Eager: the sender has copied the payload into a cell in host memory before the receiver came.

use super::ring::{Filled, RingReader};
use super::{Progress, Protocol};
use crate::cuda::InFlight;
use crate::node::{Ring, SlotState};
use crate::transfer::fetch::claim::{Claim, Lost};
use crate::transfer::gpu::Gpu;
use crate::transfer::life;
use crate::transfer::Env;

/// A message whose payload its sender has put into its ring.
pub struct Eager {
    reader: RingReader,
    /// The state in which the slot stays meanwhile: Eager, or Claimed if the receiver saw the payload only
    /// after it had claimed the message.
    state: SlotState,
}

impl Eager {
    /// Nothing is taken out of the ring yet.
    pub fn new(state: SlotState) -> Eager {
        Eager {
            reader: RingReader::default(),
            state,
        }
    }

    /// Starts the copy out of the ring. If anything is wrong, the next [`Protocol::progress`] finds it again.
    pub fn start(&mut self, claim: &Claim, gpu: &mut Gpu) {
        if let Ok(ring) = self.ring(claim) {
            let _ = self.reader.start(claim, gpu, &ring, Filled::Already);
        }
    }

    fn ring<'a>(&self, claim: &'a Claim) -> Result<Ring<'a>, Lost> {
        let slot = claim.slot().ok_or(Lost::Corrupt)?;
        if slot.state(claim.nonce) != Ok(self.state) {
            return Err(claim.why_gone());
        }
        let ring = slot.ring(claim.nonce);
        self.reader.check(&ring)?;
        Ok(ring)
    }
}

impl Protocol for Eager {
    fn name(&self) -> life::Protocol {
        life::Protocol::Eager
    }

    fn progress(&mut self, claim: &mut Claim, _: &Env, gpu: &mut Gpu) -> Result<Progress, Lost> {
        let ring = self.ring(claim)?;
        let (moved, trouble) = self.reader.empty(claim, gpu, &ring, Filled::Already)?;
        if self.reader.is_done(claim) {
            return Ok(Progress::Landed(life::Protocol::Eager));
        }
        if let Some(trouble) = trouble {
            if trouble.is_end(claim) {
                return Err(Lost::Driver(trouble.error));
            }
            trouble.tell_again(claim);
        }
        Ok(Progress::Pending(moved))
    }

    fn abort(self) -> Vec<InFlight> {
        self.reader.into_copies().collect()
    }

    fn reads_lent_buffer(&self) -> bool {
        false
    }

    fn is_staged(&self) -> bool {
        true
    }
}
