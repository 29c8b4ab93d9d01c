//! Put: the sender writes the message to the receiver's buffer, after the receiver has sent an RTR.

use super::{Next, Orphan, Progress, Protocol};
use crate::cuda::InFlight;
use crate::node::{RtrId, RtrState};
use crate::stats::{self, Counter};
use crate::transfer::fetch::claim::{Claim, Lost};
use crate::transfer::gpu::Gpu;
use crate::transfer::life;
use crate::transfer::Env;

/// A message that its sender writes.
pub struct Put(RtrId);

impl Put {
    /// Waits for what the sender writes after this RTR.
    pub fn new(told: RtrId) -> Put {
        Put(told)
    }

    /// The sender writes no more, and part of the message is missing: this rank reads it.
    fn read_instead(&self, env: &Env) -> Next {
        env.node.own().close_rtr(self.0);
        stats::add(Counter::Retries, 1);
        Next::Whole
    }
}

impl Protocol for Put {
    fn name(&self) -> life::Protocol {
        life::Protocol::Put
    }

    fn progress(&mut self, _: &mut Claim, env: &Env, _: &mut Gpu) -> Result<Progress, Lost> {
        match env.node.own().rtr_state(self.0) {
            Some(RtrState::Taken) => Ok(Progress::Pending(false)),
            // Nobody could be asked for the rest of the message.
            Some(RtrState::Landed) if self.0.rest > 0 => {
                Ok(Progress::Instead(self.read_instead(env)))
            }
            Some(RtrState::Landed) => Ok(Progress::Landed(life::Protocol::Put)),
            Some(RtrState::Refused) => Ok(Progress::Instead(self.read_instead(env))),
            Some(RtrState::Open) | None => Err(Lost::Corrupt),
        }
    }

    /// The sender's copies are waited for by the sender.
    fn abort(self) -> Vec<InFlight> {
        Vec::new()
    }

    fn reads_lent_buffer(&self) -> bool {
        false
    }

    fn count(&mut self, claim: &Claim, env: &Env) {
        has_landed(env, self.0);
        stats::add(Counter::PutBytes, claim.wanted);
    }

    fn send_ats(&self, claim: &Claim) -> bool {
        claim.peer.send_ats_unheard(claim.slot, claim.nonce)
    }

    fn orphan(&mut self, _: &Claim, env: &Env) -> Orphan {
        // The sender writes no more. The rest is read from its memory, which is there as long as it is
        // mapped: until its mappings are dropped, after all that uses them has been given up.
        env.node.own().withdraw_rtr(self.0);
        match env.node.own().rtr_state(self.0) {
            Some(RtrState::Refused) => Orphan::Instead(self.read_instead(env)),
            _ => Orphan::GoesOn,
        }
    }

    fn is_by_copies(&self) -> bool {
        true
    }
}

/// The put that follows an RTR has landed.
pub(super) fn has_landed(env: &Env, told: RtrId) {
    let own = env.node.own();
    own.close_rtr(told);
    own.promise_rtr(told);
    stats::add(Counter::PutEarlyReceives, 1);
}
