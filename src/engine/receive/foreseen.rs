//! Messages of which a receive knows that it takes them, before the MPI library has brought their descriptors: they are claimed, and
//! their payload is fetched, as soon as their senders' slots have them.
//!
//! Which message a receive takes is known by the rules of [`crate::engine::invite`]: the receiver knows which one of the stream it has
//! received last, and that no other receive is in the way; the sender says in the slot that it has sent nothing else since. What the MPI
//! library brings in the end is compared with what was claimed, before the receive completes.

use std::sync::Arc;

use super::{Receive, Stage};
use crate::engine::core::Core;
use crate::engine::counts::Stream;
use crate::engine::fault::{self, Of};
use crate::engine::fetch::{flag, Landed};
use crate::engine::invite::Last;
use crate::engine::Env;
use crate::mpi::native;
use crate::node::{Descriptor, Peer, Slot, State, DESCRIPTOR_BYTES};
use crate::stats::{self, Counter};

/// What is known beforehand of a receive's message.
pub(super) enum Foreseen {
    /// Nothing.
    No,
    /// Which one it will be.
    Expected(Expected),
    /// It was claimed: what the MPI library is to bring.
    Claimed(Descriptor),
    /// The same, and its sender has died before it sent that.
    Orphaned,
}

/// The message behind a certain one.
pub(super) struct Expected {
    peer: Arc<Peer>,
    stream: Stream,
    /// Nonce, number and slot of the one before it.
    nonce: u64,
    sequence: u64,
    slot: u32,
}

impl Expected {
    /// What its descriptor says, if it lies where the one before it did.
    fn find(&self, env: &Env) -> Option<Descriptor> {
        let slot = self.peer.slot(self.slot)?;
        let nonce = slot.nonce()?;
        let is_open = matches!(slot.state(nonce), Ok(State::Posted | State::Hosted));
        let message = slot.read(nonce).ok().filter(|_| is_open)?;
        let is_it = message.communicator == self.stream.comm
            && message.source == self.stream.peer
            && message.tag == self.stream.tag
            && message.destination == env.world_rank
            && message.flags & (flag::INVITED | flag::HOST | flag::FOLLOWS) == flag::FOLLOWS
            && message.sequence == self.sequence.wrapping_add(1);
        is_it.then(|| Descriptor {
            job: env.node.launch().hash,
            sender: self.stream.peer,
            slot: self.slot,
            nonce,
            sequence: message.sequence,
            length: message.length,
            digest: message.digest(),
        })
    }
}

impl Receive {
    /// The message that it expects, if the slot where that would be has another one than before.
    fn seems_to_be_sent(&self) -> Option<&Expected> {
        let (Foreseen::Expected(expected), Stage::Posted) = (&self.foreseen, &self.stage) else {
            return None;
        };
        let nonce = expected.peer.slot(expected.slot).and_then(Slot::nonce);
        nonce
            .is_some_and(|nonce| nonce != expected.nonce)
            .then_some(expected)
    }

    pub(super) fn is_expecting(&self) -> bool {
        matches!(self.foreseen, Foreseen::Expected(_))
    }
}

impl Core {
    /// The message that a receive takes which is about to be posted, by the one before it.
    pub(super) fn expect(&self, env: &Env, stream: Stream, last: &Last) -> Option<Expected> {
        // Between two that deal with each other only it is told of where that is of use.
        let is_told = env.may_invite() && self.company.is_only(stream.peer);
        if !env.config.foresee || is_told || stream.peer == env.world_rank {
            return None;
        }
        let peer = env.node.peer(stream.peer)?;
        Some(Expected {
            peer,
            stream,
            nonce: last.nonce,
            sequence: last.sequence,
            slot: last.slot,
        })
    }

    /// Claims what has been sent of the messages that are expected. No MPI call.
    pub(super) fn claim_foreseen(&mut self, env: &Env) -> bool {
        if self.expected == 0 {
            return false;
        }
        let sender = |receive: &Receive| {
            let expected = receive.seems_to_be_sent()?;
            // Others are claimed before it: what it says comes meanwhile.
            expected.peer.will_claim(expected.slot);
            Some(expected.stream.peer)
        };
        self.take_each(env, sender, |core, id| core.claim_expected(env, id))
    }

    fn claim_expected(&mut self, env: &Env, id: usize) -> bool {
        let Foreseen::Expected(expected) = &self.receives[id].foreseen else {
            return false;
        };
        let Some(descriptor) = expected.find(env) else {
            return false;
        };
        let landed = Landed::foreseen(descriptor, Arc::clone(&expected.peer));
        let is_claimed = self.claim(env, id, landed).is_ok();
        if is_claimed {
            self.note_landed(env.abi, id);
            self.awaited += 1;
            stats::add(Counter::ClaimedAhead, 1);
            self.receives[id].foreseen = Foreseen::Claimed(descriptor);
        } else {
            // Its descriptor will tell.
            self.expect_no_more(id);
        }
        is_claimed
    }

    /// Whatever a receive takes is not claimed ahead.
    pub(super) fn expect_no_more(&mut self, id: usize) {
        let receive = &mut self.receives[id];
        if receive.is_expecting() {
            self.expected -= 1;
            receive.foreseen = Foreseen::No;
        }
    }

    /// Whether a message was claimed whose descriptor the MPI library has not brought yet.
    pub(super) fn awaits_descriptor(&self, id: usize) -> bool {
        matches!(self.receives[id].foreseen, Foreseen::Claimed(_))
    }

    /// Gives up the messages that were claimed, and whose senders have died before they sent what the MPI library is to bring. `is_dead`
    /// is asked about each sender.
    pub(in crate::engine) fn orphan_claimed(
        &mut self,
        env: &Env,
        mut is_dead: impl FnMut(&Peer) -> bool,
    ) {
        if self.awaited == 0 {
            return;
        }
        for (_, receive) in &mut self.receives {
            let (Foreseen::Claimed(claimed), Stage::Done) = (&receive.foreseen, &receive.stage)
            else {
                continue;
            };
            let sender = claimed.sender;
            let peer = env.node.peer(sender);
            if peer.is_some_and(|peer| is_dead(&peer)) {
                // It was never announced.
                self.taken -= 1;
                self.awaited -= 1;
                receive.foreseen = Foreseen::Orphaned;
                let of = Of::From(sender);
                receive.lose(env.abi, fault::died(of, fault::Path::Descriptor, true));
                stats::add(Counter::DeadPeers, 1);
            }
        }
    }

    /// A receive whose descriptor does not come any more ends by being cancelled.
    ///
    /// # Safety
    /// MPI may be called.
    pub(super) unsafe fn end_orphaned(&mut self, id: usize) {
        let receive = &mut self.receives[id];
        if let Foreseen::Orphaned = receive.foreseen {
            receive.foreseen = Foreseen::No;
            let mut native = receive.native;
            // SAFETY: the receive's own request, which is active.
            unsafe { native::cancel(&raw mut native) };
        }
    }

    /// The native receive is complete: what has landed must be the descriptor of the message that was claimed.
    pub(super) fn check_foreseen(&mut self, env: &Env, id: usize, bytes: u64) {
        let receive = &mut self.receives[id];
        let Foreseen::Claimed(claimed) = receive.foreseen else {
            return;
        };
        self.awaited -= 1;
        receive.foreseen = Foreseen::No;
        let landed = receive
            .read_landed()
            .filter(|_| bytes == DESCRIPTOR_BYTES as u64);
        let job = env.node.launch().hash;
        let is_it = |bytes: &[u8; DESCRIPTOR_BYTES]| Descriptor::decode(bytes, job) == Ok(claimed);
        if landed.as_ref().is_some_and(is_it) {
            return;
        }
        // Only what somebody has written to the sender's slot is claimed and never sent.
        stats::add(Counter::Corrupt, 1);
        stats::add(Counter::Errors, 1);
        let why = "its slot was written over: another message was sent";
        let why = fault::lost(receive.of(), fault::Path::Descriptor, &why);
        receive.lose(env.abi, why);
        // It is not counted as taken, as the other was.
        let is_other = |landed: &Landed| landed.descriptor().nonce != claimed.nonce;
        let landed = landed.and_then(|bytes| Landed::read(env, &bytes).ok());
        if let Some(landed) = landed.filter(is_other) {
            landed.turn_down(env);
        }
    }
}
