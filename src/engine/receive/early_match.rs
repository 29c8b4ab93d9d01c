//! Early match: a receive claims its message before the MPI library has brought the RTS, and fetches the
//! payload as soon as the sender's slot has the message.
//!
//! The rules of [`crate::engine::rtr`] say which message a receive takes. The receiver knows which message of
//! the stream it received last, and that no other receive is in the way. The sender says in the slot that it
//! has sent nothing else since. Before the receive completes, what the MPI library brings is compared with
//! what was claimed.

use std::sync::Arc;

use super::Receive;
use crate::engine::core::Core;
use crate::engine::Env;
use crate::node::{Peer, Rts, Slot, SlotState, RTS_BYTES};
use crate::stats::{self, Counter};
use crate::transfer::fault::{self, Of};
use crate::transfer::fetch::{flag, Landed};
use crate::transfer::history::Last;
use crate::transfer::stream::Stream;

/// What is known of a receive's message before its RTS arrives.
pub(super) enum EarlyMatch {
    /// Nothing.
    No,
    /// Which message it will be.
    EarlyRts(EarlyRts),
    /// The message was claimed. The MPI library is to bring this RTS.
    Claimed(Rts),
    /// The message was claimed, and its sender died before it sent the RTS.
    Orphaned,
}

/// The message that follows a known one.
pub(super) struct EarlyRts {
    peer: Arc<Peer>,
    stream: Stream,
    /// Nonce, number and slot of the message before it.
    nonce: u64,
    sequence: u64,
    slot: u32,
}

impl EarlyRts {
    /// The RTS of the message, if the message lies in the slot that the one before it had.
    fn find(&self, env: &Env) -> Option<Rts> {
        let slot = self.peer.slot(self.slot)?;
        let nonce = slot.nonce()?;
        let is_open = matches!(slot.state(nonce), Ok(SlotState::Posted | SlotState::Eager));
        let message = slot.read(nonce).ok().filter(|_| is_open)?;
        let is_it = message.communicator == self.stream.comm
            && message.source == self.stream.peer
            && message.tag == self.stream.tag
            && message.destination == env.world_rank
            && message.flags & (flag::PUT_EARLY | flag::HOST | flag::FOLLOWS) == flag::FOLLOWS
            && message.sequence == self.sequence.wrapping_add(1);
        is_it.then(|| Rts {
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
    /// The message that the receive expects, if its slot holds another message than before.
    fn seems_to_be_sent(&self) -> Option<&EarlyRts> {
        let (EarlyMatch::EarlyRts(expected), true) = (&self.early_match, self.life.is_offered())
        else {
            return None;
        };
        let nonce = expected.peer.slot(expected.slot).and_then(Slot::nonce);
        nonce
            .is_some_and(|nonce| nonce != expected.nonce)
            .then_some(expected)
    }

    pub(super) fn is_expecting(&self) -> bool {
        matches!(self.early_match, EarlyMatch::EarlyRts(_))
    }
}

impl Core {
    /// The message that a receive about to be posted takes, derived from the one before it.
    pub(super) fn expect(&self, env: &Env, stream: Stream, last: &Last) -> Option<EarlyRts> {
        // If the two ranks deal with each other only, the receiver sends an RTR where that is of use.
        let is_told = env.may_send_rtr() && self.history.mix.is_only(stream.peer);
        if !env.config.early_match || is_told || stream.peer == env.world_rank {
            return None;
        }
        let peer = env.node.peer(stream.peer)?;
        Some(EarlyRts {
            peer,
            stream,
            nonce: last.nonce,
            sequence: last.sequence,
            slot: last.slot,
        })
    }

    /// Claims those of the expected messages that have been sent. No MPI call.
    pub(super) fn claim_early(&mut self, env: &Env) -> bool {
        if self.expected == 0 {
            return false;
        }
        let sender = |receive: &Receive| {
            let expected = receive.seems_to_be_sent()?;
            // Others are claimed first. The slot's lines are brought meanwhile.
            expected.peer.will_claim(expected.slot);
            Some(expected.stream.peer)
        };
        self.take_each(env, sender, |core, id| core.claim_expected(env, id))
    }

    fn claim_expected(&mut self, env: &Env, id: usize) -> bool {
        let EarlyMatch::EarlyRts(expected) = &self.receives[id].early_match else {
            return false;
        };
        let Some(rts) = expected.find(env) else {
            return false;
        };
        let landed = Landed::early_match(rts, Arc::clone(&expected.peer));
        let is_claimed = self.claim(env, id, landed).is_ok();
        if is_claimed {
            self.note_landed(env.abi, id);
            self.awaited += 1;
            stats::add(Counter::MatchedEarly, 1);
            self.receives[id].early_match = EarlyMatch::Claimed(rts);
        } else {
            // The RTS will tell.
            self.expect_no_more(id);
        }
        is_claimed
    }

    /// The receive claims no message early, whatever it takes.
    pub(super) fn expect_no_more(&mut self, id: usize) {
        let receive = &mut self.receives[id];
        if receive.is_expecting() {
            self.expected -= 1;
            receive.early_match = EarlyMatch::No;
        }
    }

    /// Whether the receive has claimed a message whose RTS the MPI library has not brought yet.
    pub(super) fn awaits_rts(&self, id: usize) -> bool {
        matches!(self.receives[id].early_match, EarlyMatch::Claimed(_))
    }

    /// Gives up claimed messages whose senders died before they sent the RTS. `is_dead` is asked about each
    /// sender.
    pub(in crate::engine) fn orphan_claimed(
        &mut self,
        env: &Env,
        mut is_dead: impl FnMut(&Peer) -> bool,
    ) {
        if self.awaited == 0 {
            return;
        }
        for (_, receive) in &mut self.receives {
            let (EarlyMatch::Claimed(claimed), true) = (&receive.early_match, receive.is_placed())
            else {
                continue;
            };
            let sender = claimed.sender;
            let peer = env.node.peer(sender);
            if peer.is_some_and(|peer| is_dead(&peer)) {
                // It was never announced.
                self.taken -= 1;
                self.awaited -= 1;
                receive.early_match = EarlyMatch::Orphaned;
                let of = Of::From(sender);
                receive.lose(env.abi, fault::died(of, fault::Path::Rts, true));
                stats::add(Counter::DeadPeers, 1);
            }
        }
    }

    /// A receive whose RTS will not come any more is cancelled.
    pub(super) fn end_orphaned(&mut self, id: usize) {
        let receive = &mut self.receives[id];
        if let EarlyMatch::Orphaned = receive.early_match {
            receive.early_match = EarlyMatch::No;
            receive.native.cancel();
        }
    }

    /// The native receive is complete: what has landed must be the RTS of the claimed message.
    pub(super) fn check_early_match(&mut self, env: &Env, id: usize, bytes: u64) {
        let receive = &mut self.receives[id];
        let EarlyMatch::Claimed(claimed) = receive.early_match else {
            return;
        };
        self.awaited -= 1;
        receive.early_match = EarlyMatch::No;
        let landed = receive.read_landed().filter(|_| bytes == RTS_BYTES as u64);
        let job = env.node.launch().hash;
        let is_it = |bytes: &[u8; RTS_BYTES]| Rts::decode(bytes, job) == Ok(claimed);
        if landed.as_ref().is_some_and(is_it) {
            return;
        }
        // A claimed message is never sent only if somebody has written over the sender's slot.
        stats::add(Counter::Corrupt, 1);
        stats::add(Counter::Errors, 1);
        let why = "its slot was written over: another message was sent";
        let why = fault::lost(receive.of(), fault::Path::Rts, &why);
        receive.lose(env.abi, why);
        // The other message does not count as taken, as the claimed one was counted.
        let is_other = |landed: &Landed| landed.rts().nonce != claimed.nonce;
        let landed = landed.and_then(|bytes| Landed::read(env, &bytes).ok());
        if let Some(landed) = landed.filter(is_other) {
            landed.turn_down(env);
        }
    }
}
