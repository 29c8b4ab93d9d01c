//! A protocol of the tests: the receiver copies the message to host memory of its own, and from there to its
//! place. It shows what adding a protocol takes, and that the rest of the transfers does not mind.

use std::cell::Cell;

use super::{Next, Progress, Protocol, Refusal, Whole};
use crate::cuda::{ContextKey, Copy, InFlight, Purpose};
use crate::stats::Reason;
use crate::transfer::fetch::claim::{Claim, Lost};
use crate::transfer::fetch::Destination;
use crate::transfer::gpu::Gpu;
use crate::transfer::life;
use crate::transfer::Env;

thread_local! {
    static PRICE: Cell<Option<u32>> = const { Cell::new(None) };
    static BROUGHT: Cell<u64> = const { Cell::new(0) };
}

/// Lets this thread's messages come by this protocol, at this price.
pub fn offer(price: u32) {
    PRICE.set(Some(price));
}

/// How many bytes this thread has got by this protocol.
pub fn brought() -> u64 {
    BROUGHT.get()
}

/// A message on its way over the receiver's host memory.
pub struct Bounce {
    host: Vec<u8>,
    context: ContextKey,
    to: u64,
    copy: InFlight,
    is_up: bool,
}

impl Whole for Bounce {
    fn needs(claim: &Claim) -> bool {
        PRICE.get().is_some() && claim.may_be_pulled()
    }

    fn price(_: &Claim) -> u32 {
        PRICE.get().unwrap_or(u32::MAX)
    }

    fn begin(claim: &Claim, gpu: &mut Gpu) -> Result<Bounce, Refusal> {
        let Destination::Device { context, address } = claim.to else {
            return Err(None);
        };
        let mapping = claim.map(gpu, context)?;
        let mut host = vec![0; claim.wanted as usize];
        let copy = Copy::Linear {
            dst: host.as_mut_ptr().expose_provenance() as u64,
            src: mapping.address_of(claim.message.offset),
            bytes: claim.wanted,
        };
        let copy = gpu.copy_on(context, Purpose::DeviceToHost, 0, copy, Some(mapping));
        Ok(Bounce {
            host,
            context,
            to: address,
            copy: copy.map_err(|error| Some((Reason::DriverError, error)))?,
            is_up: false,
        })
    }
}

impl Protocol for Bounce {
    fn name(&self) -> life::Protocol {
        life::Protocol::Get
    }

    fn progress(&mut self, claim: &mut Claim, _: &Env, gpu: &mut Gpu) -> Result<Progress, Lost> {
        match self.copy.poll() {
            Ok(false) => return Ok(Progress::Pending(false)),
            Ok(true) => {}
            Err(error) if self.copy.is_lost() => {
                claim.survived_through_host(&error);
                return Ok(Progress::Instead(Next::HostPipeline));
            }
            Err(_) => return Ok(Progress::Pending(true)),
        }
        if self.is_up {
            return Ok(Progress::Landed(life::Protocol::Get));
        }
        let copy = Copy::Linear {
            dst: self.to,
            src: self.host.as_ptr().expose_provenance() as u64,
            bytes: claim.wanted,
        };
        match gpu.copy_on(self.context, Purpose::HostToDevice, 0, copy, None) {
            Ok(copy) => (self.copy, self.is_up) = (copy, true),
            Err(error) => return Err(Lost::Driver(error)),
        }
        Ok(Progress::Pending(true))
    }

    fn abort(self) -> Vec<InFlight> {
        vec![self.copy]
    }

    fn reads_lent_buffer(&self) -> bool {
        true
    }

    fn count(&mut self, claim: &Claim, _: &Env) {
        BROUGHT.set(BROUGHT.get() + claim.wanted);
    }
}
