//! One copy, from a rank to itself.

use super::get::poll_copy;
use super::{Progress, Protocol, Refusal, Whole};
use crate::cuda::{Copy, InFlight};
use crate::stats::Reason;
use crate::transfer::fetch::claim::{Claim, Lost};
use crate::transfer::fetch::Destination;
use crate::transfer::gpu::Gpu;
use crate::transfer::life;
use crate::transfer::Env;

/// A message of a rank to itself.
pub struct Local(InFlight);

impl Whole for Local {
    fn needs(claim: &Claim) -> bool {
        claim.own && matches!(claim.to, Destination::Device { .. })
    }

    fn price(_: &Claim) -> u32 {
        1
    }

    fn begin(claim: &Claim, gpu: &mut Gpu) -> Result<Local, Refusal> {
        let Destination::Device { context, address } = claim.to else {
            return Err(None);
        };
        let copy = Copy::Linear {
            dst: address,
            src: claim.message.base + claim.message.offset,
            bytes: claim.wanted,
        };
        gpu.pull(context, claim.message.source, copy, None)
            .map(Local)
            .map_err(|error| Some((Reason::DriverError, error)))
    }
}

impl Protocol for Local {
    fn name(&self) -> life::Protocol {
        life::Protocol::Own
    }

    fn progress(&mut self, claim: &mut Claim, _: &Env, _: &mut Gpu) -> Result<Progress, Lost> {
        Ok(poll_copy(&mut self.0, claim, life::Protocol::Own))
    }

    fn abort(self) -> Vec<InFlight> {
        vec![self.0]
    }

    fn reads_lent_buffer(&self) -> bool {
        true
    }

    fn is_by_copies(&self) -> bool {
        true
    }

    fn is_known_done(&self) -> bool {
        self.0.is_known_done()
    }

    fn due_ns(&self) -> Option<u64> {
        self.0.due_ns()
    }
}
