//! A claimed message, as every protocol sees it.

use std::sync::Arc;

use super::{flag, Destination, Turn};
use crate::cuda::{ContextKey, Error, Export, Mapping, Uuid};
use crate::node::{Message, Peer, Slot, SlotState};
use crate::stats::{self, Counter, Reason};
use crate::transfer::fault::{self, Of};
use crate::transfer::gpu::Gpu;
use crate::transfer::life::Life;
use crate::transfer::route::Routed;

/// What is done with a message whose transfer has failed.
pub const AGAIN_THROUGH_HOST: &str = "again through host memory";

/// A message that this rank has claimed.
pub struct Claim {
    pub(super) peer: Arc<Peer>,
    pub(super) slot: u32,
    pub(super) nonce: u64,
    pub(super) message: Message,
    /// How much of it is brought, bytes.
    pub(super) wanted: u64,
    pub(super) to: Destination,
    pub(super) life: Life,
    /// This rank has sent it.
    pub(super) own: bool,
    /// The GPU of the destination; zeros for host memory.
    pub(super) device: Uuid,
    /// Why the direct path was not taken.
    pub(super) reason: Option<Reason>,
    /// How many driver calls have failed.
    pub(super) failures: u32,
    /// The plan of a long message. The node knows which links it uses until the message is over.
    pub(super) routed: Option<Routed>,
    /// For a long message of one of several senders that are read in turns.
    pub(super) turn: Option<Turn>,
}

impl Claim {
    /// The message comes by this plan, or by none.
    pub(super) fn take_route(&mut self, routed: Option<Routed>) {
        if let Some(routed) = &routed {
            self.life.trace_plan(&routed.plan);
        }
        self.routed = routed;
    }

    pub(super) fn slot(&self) -> Option<&Slot> {
        self.peer.slot(self.slot)
    }

    /// Where in device memory it is received: address and length. None if it goes to host memory.
    pub(super) fn place(&self) -> Option<(u64, u64)> {
        match self.to {
            Destination::Device { address, .. } => Some((address, self.wanted)),
            Destination::Host(_) => None,
        }
    }

    /// Whether this rank can read the message from another rank's device memory into its own.
    pub(super) fn may_be_pulled(&self) -> bool {
        !self.own
            && self.message.flags & flag::EXPORTED != 0
            && matches!(self.to, Destination::Device { .. })
    }

    /// The sender's allocation, mapped.
    pub(super) fn map(
        &self,
        gpu: &mut Gpu,
        context: ContextKey,
    ) -> Result<Arc<Mapping>, Option<(Reason, Error)>> {
        let export = Export::from(&self.message);
        if !export.holds(self.wanted) {
            return Err(None);
        }
        gpu.map(context, &self.peer, &export)
            .map_err(|error| Some((Reason::MappingFailed, error)))
    }

    /// Whether the sender has put the payload of a claimed message into the ring after all. The sender may
    /// have begun to do so when the message was claimed. If the claim was made in a state that somebody had
    /// written over, the sender did it in time and has given the buffer back. The ring's content is right in
    /// both cases.
    pub(super) fn is_eager_all_the_same(&self) -> bool {
        // Only a message that fits into a cell is sent eagerly. For all others the sender's slot is not read
        // again.
        let may_be = self.message.length <= u64::from(self.peer.layout().cell_bytes);
        may_be
            && self
                .slot()
                .is_some_and(|slot| matches!(slot.ring(self.nonce).front(), Ok(Some(_))))
    }

    /// Why the slot is no longer about the message.
    pub(super) fn why_gone(&self) -> Lost {
        match self.slot().map(|slot| slot.state(self.nonce)) {
            Some(Ok(SlotState::Failed)) => Lost::GivenUp,
            Some(Err(_)) => Lost::Gone,
            _ => Lost::Corrupt,
        }
    }

    pub(super) fn survived(&self, error: &Error, remedy: &str) {
        let of = Of::From(self.message.source);
        // Failures because the sender has died are reported when its messages are given up.
        if self.peer.goes_on() {
            fault::survived(of, self.life.fault_path(), error, remedy);
        }
    }

    /// The driver has lost what was in flight. The message comes again through host memory.
    pub(super) fn survived_through_host(&mut self, error: &Error) {
        self.survived(error, AGAIN_THROUGH_HOST);
        stats::add(Counter::Retries, 1);
        stats::fallback(Reason::DriverError, self.wanted);
        self.reason = Some(Reason::DriverError);
    }

    /// Tells the sender that the receiver is done with the message. False if the slot is about another.
    pub(super) fn send_ats(&self) -> bool {
        self.peer.send_ats(self.slot, self.nonce)
    }
}

/// Why a message cannot be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// The driver failed once too often.
    Driver(Error),
    /// Its sender could not bring it.
    GivenUp,
    /// Its slot is about another message.
    Gone,
    /// Shared memory was written over.
    Corrupt,
    /// Its sender has died.
    Dead,
}

impl std::fmt::Display for Lost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Lost::Driver(error) => error.fmt(f),
            Lost::Gone => f.write_str("its sender gave it up, or its slot was written over"),
            Lost::GivenUp => f.write_str("the sender could not bring it"),
            Lost::Corrupt => f.write_str("its slot or ring in shared memory was written over"),
            Lost::Dead => f.write_str("the sender has died"),
        }
    }
}
