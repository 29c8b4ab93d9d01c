//! A put after an RTR: the sender writes a message to the receive's buffer before the message is matched.

use std::sync::Arc;

use crate::cuda::{Error, InFlight};
use crate::node::{Peer, RtrId};
use crate::stats::{self, Counter};
use crate::transfer::fault::{self, Of, Path};
use crate::transfer::gpu::Gpu;

/// A put of a message, perhaps without its beginning, to the receive of an RTR.
pub struct Put {
    peer: Arc<Peer>,
    told: RtrId,
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

/// Notes that a put to a peer has failed: its receiver reads the message.
pub fn failed(gpu: &mut Gpu, peer: &Peer, error: &Error) {
    gpu.put_failed(peer.world_rank());
    stats::add(Counter::DriverRetries, 1);
    if peer.goes_on() {
        let of = Of::To(peer.world_rank());
        fault::survived(of, Path::Direct, error, "left to its receiver");
    }
}

impl Put {
    /// A put that has just been launched.
    pub fn new(peer: &Arc<Peer>, told: RtrId, copy: InFlight) -> Put {
        Put {
            peer: Arc::clone(peer),
            told,
            copy: Some(copy),
        }
    }

    /// Whether the copy runs.
    pub fn is_flying(&self) -> bool {
        self.copy.is_some()
    }

    /// Whether it is the whole message, so that the receiver asks for nothing more.
    pub fn is_whole(&self) -> bool {
        self.told.rest == 0
    }

    /// The RTR that it is for.
    pub fn told(&self) -> RtrId {
        self.told
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
        let gpu_page = self.peer.gpu_page();
        if let Some(rtr) = gpu_page.and_then(|gpu_page| gpu_page.rtr(self.told.line)) {
            if has_landed {
                rtr.land(self.told.tag);
            } else {
                rtr.refuse(self.told.tag);
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
