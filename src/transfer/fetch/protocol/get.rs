//! Get: the receiver reads the sender's device memory, in one copy.

use super::{Next, Progress, Protocol, Refusal, Whole};
use crate::cuda::{Copy, InFlight};
use crate::stats::{self, Counter, Reason};
use crate::transfer::fetch::claim::{Claim, Lost};
use crate::transfer::fetch::turn::{Start, Turn};
use crate::transfer::fetch::Destination;
use crate::transfer::gpu::Gpu;
use crate::transfer::life;
use crate::transfer::Env;

/// A message that is read.
pub struct Get(InFlight);

impl Whole for Get {
    fn needs(claim: &Claim) -> bool {
        claim.may_be_pulled()
    }

    fn price(_: &Claim) -> u32 {
        1
    }

    fn begin(claim: &Claim, gpu: &mut Gpu) -> Result<Get, Refusal> {
        let Destination::Device { context, address } = claim.to else {
            return Err(None);
        };
        let sender = claim.message.source;
        let mapping = claim.map(gpu, context)?;
        let copy = Copy::Linear {
            dst: address,
            src: mapping.address_of(claim.message.offset),
            bytes: claim.wanted,
        };
        let (from, to) = (claim.message.device, claim.device);
        let failed = |error| Some((Reason::DriverError, error));
        if claim.turn.as_ref().and_then(Turn::start) == Some(Start::Behind) {
            gpu.follow_others(context, sender).map_err(failed)?;
        }
        gpu.pull_of(context, [&from, &to], sender, copy, mapping)
            .map(Get)
            .map_err(failed)
    }
}

impl Protocol for Get {
    fn name(&self) -> life::Protocol {
        life::Protocol::Get
    }

    fn progress(&mut self, claim: &mut Claim, _: &Env, _: &mut Gpu) -> Result<Progress, Lost> {
        Ok(poll_copy(&mut self.0, claim, life::Protocol::Get))
    }

    fn abort(self) -> Vec<InFlight> {
        vec![self.0]
    }

    fn reads_lent_buffer(&self) -> bool {
        true
    }

    fn reads_peer(&self) -> bool {
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

/// Looks after the one copy by which a protocol brings a message. What the driver may still make again is tried
/// again.
pub(super) fn poll_copy(copy: &mut InFlight, claim: &mut Claim, by: life::Protocol) -> Progress {
    match copy.poll() {
        Ok(false) => Progress::Pending(false),
        Ok(true) => Progress::Landed(by),
        Err(error) if copy.is_lost() => {
            claim.survived_through_host(&error);
            Progress::Instead(Next::HostPipeline)
        }
        Err(error) => {
            claim.survived(&error, "tried again");
            stats::add(Counter::Retries, 1);
            Progress::Pending(true)
        }
    }
}
