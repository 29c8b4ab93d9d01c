//! A put after an RTR: the sender writes a message to the receive's buffer before the message is matched.

use std::sync::Arc;

use crate::cuda::{ContextKey, Copy, Error, Export, InFlight, Mapping, Purpose, Uuid};
use crate::node::{Peer, RtrId, Target, Waiting};
use crate::stats::{self, Counter};
use crate::trace;
use crate::transfer::fault::{self, Of, Path};
use crate::transfer::gpu::Gpu;
use crate::transfer::serve::staged_parts::PUT_LANE;
use crate::transfer::Env;

/// A put of a message, perhaps without its beginning, to the receive of an RTR.
pub struct Put {
    peer: Arc<Peer>,
    rtr: RtrId,
    /// None once it is over.
    copy: Option<InFlight>,
}

/// How far a put is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PutStep {
    /// The copy runs.
    Flying,
    /// It has just ended; all of it is there, or not.
    Ended {
        /// All of it is there.
        has_landed: bool,
    },
    /// It had ended before.
    Over,
}

impl Env {
    /// Whether this rank's options let it send RTRs, and put after those of others.
    pub fn are_rtrs_on(&self) -> bool {
        self.config.rtr && self.config.put > 0 && self.paths().direct
    }
}

/// A put that is about to begin: an RTR that was found, and its buffer.
pub struct Attempt {
    peer: Arc<Peer>,
    rtr: RtrId,
    target: Target,
    mapping: Option<Arc<Mapping>>,
}

impl Attempt {
    /// For an RTR of the peer's, found in this line: its tag, and its receive. None if its buffer cannot be
    /// read.
    pub fn new(peer: &Arc<Peer>, line: u32, (tag, waiting): (u64, Waiting)) -> Option<Attempt> {
        let target = peer.rtr(line)?.target(&waiting).ok()?;
        let rest = waiting.rest;
        Some(Attempt {
            peer: Arc::clone(peer),
            rtr: RtrId { line, tag, rest },
            target,
            mapping: None,
        })
    }

    /// Whether the receiver's buffer is on this GPU.
    pub fn is_on(&self, gpu: &Uuid) -> bool {
        self.target.device == *gpu
    }

    /// How much of the beginning of the message is left out, bytes.
    pub fn rest(&self) -> u64 {
        self.rtr.rest
    }

    /// Whether so many bytes lie within the receiver's allocation.
    pub fn holds(&self, bytes: u64) -> bool {
        Export::from(&self.target).holds(bytes)
    }

    /// Maps the receiver's buffer. `is_kept`: whether the RTR is still there; the receiver may withdraw it,
    /// and free the buffer.
    pub fn map(
        &mut self,
        gpu: &mut Gpu,
        context: ContextKey,
        is_kept: &mut dyn FnMut() -> bool,
    ) -> bool {
        let peer = &self.peer;
        match gpu.map_while(context, peer, &Export::from(&self.target), &mut *is_kept) {
            Ok(mapping) => self.mapping = Some(mapping),
            Err(_) if !is_kept() => {}
            Err(error) => {
                // If this buffer cannot be mapped here, others may still be; and it is no fault if a mapping
                // is refused.
                if error.code().is_some() && !error.is_refusal() {
                    failed(gpu, peer, &error);
                } else if error != Error::AlreadyMapped {
                    gpu.put_failed(peer.world_rank());
                }
                log::debug!("to rank {}: not put: {error}", peer.world_rank());
            }
        }
        self.mapping.is_some()
    }

    /// Takes the RTR. False if the receiver has withdrawn it.
    pub fn take(&self) -> bool {
        let rtr = self.peer.rtr(self.rtr.line);
        rtr.is_some_and(|rtr| rtr.take(self.rtr.tag))
    }

    /// Launches the copy, once the RTR is taken and its buffer mapped. `bytes`: of the whole message.
    pub fn launch(
        &mut self,
        gpu: &mut Gpu,
        (context, address): (ContextKey, u64),
        bytes: u64,
    ) -> Option<Put> {
        let mapping = self.mapping.take()?;
        // Its message is offered next.
        let _copies = trace::copies_of_next();
        let rest = self.rtr.rest;
        let copy = Copy::Linear {
            dst: mapping.address_of(self.target.offset) + rest,
            src: address + rest,
            bytes: bytes - rest,
        };
        match gpu.copy_on(context, Purpose::Put, PUT_LANE, copy, Some(mapping)) {
            Ok(copy) => Some(Put::new(&self.peer, self.rtr, copy)),
            Err(error) => {
                if let Some(rtr) = self.peer.rtr(self.rtr.line) {
                    rtr.refuse(self.rtr.tag);
                }
                failed(gpu, &self.peer, &error);
                None
            }
        }
    }
}

/// Notes that a put to a peer has failed: its receiver reads the message.
fn failed(gpu: &mut Gpu, peer: &Peer, error: &Error) {
    gpu.put_failed(peer.world_rank());
    stats::add(Counter::DriverRetries, 1);
    if peer.goes_on() {
        let of = Of::To(peer.world_rank());
        fault::survived(of, Path::Direct, error, "left to its receiver");
    }
}

impl Put {
    /// A put that has just been launched.
    fn new(peer: &Arc<Peer>, rtr: RtrId, copy: InFlight) -> Put {
        Put {
            peer: Arc::clone(peer),
            rtr,
            copy: Some(copy),
        }
    }

    /// Whether the copy runs.
    pub fn is_flying(&self) -> bool {
        self.copy.is_some()
    }

    /// Whether it is the whole message, so that the receiver asks for nothing more.
    pub fn is_whole(&self) -> bool {
        self.rtr.rest == 0
    }

    /// The RTR that it is for.
    pub fn rtr(&self) -> RtrId {
        self.rtr
    }

    /// Looks how far it is, and tells the receiver once it is over.
    pub fn poll(&mut self, gpu: &mut Gpu) -> PutStep {
        let Some(copy) = &mut self.copy else {
            return PutStep::Over;
        };
        let has_landed = match copy.poll() {
            Ok(false) => return PutStep::Flying,
            Ok(true) => true,
            Err(error) if copy.is_lost() => {
                failed(gpu, &self.peer, &error);
                false
            }
            Err(error) => {
                fault::tried_again(Of::To(self.peer.world_rank()), Path::Direct, &error);
                return PutStep::Flying;
            }
        };
        self.end(has_landed);
        PutStep::Ended { has_landed }
    }

    fn end(&mut self, has_landed: bool) {
        // The copy keeps its mapping until the receiver knows.
        let _copy = self.copy.take();
        if let Some(rtr) = self.peer.rtr(self.rtr.line) {
            if has_landed {
                rtr.land(self.rtr.tag);
            } else {
                rtr.refuse(self.rtr.tag);
            }
        }
        self.peer.ring_if_asleep();
    }

    /// Whether nothing of it runs any more, whether it succeeded or failed.
    pub fn is_over(&mut self) -> bool {
        self.copy.as_mut().is_none_or(InFlight::is_over)
    }

    /// Its message could not be sent. Waits until nothing is written any more, which takes as long as the
    /// copy, and leaves the receive to the next message.
    pub fn abandon(mut self) {
        while !self.is_over() {
            std::thread::yield_now();
        }
        self.end(false);
    }
}
