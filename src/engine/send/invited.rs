//! A send whose receiver has told of its receive: the message is written there before it is matched (see
//! [`crate::engine::invite`]).

use std::sync::Arc;

use crate::cuda::{ContextKey, Copy, Error, Export, InFlight, Purpose};
use crate::engine::core::Core;
use crate::engine::counts::Stream;
use crate::engine::fault::{self, Of, Path};
use crate::engine::gpu::Gpu;
use crate::engine::invite::ONE_WAY_FROM;
use crate::engine::serve::tracks::PUSH_LANE;
use crate::engine::Env;
use crate::node::{Peer, Told, Waiting};
use crate::stats::{self, Counter};

/// A message, perhaps without its beginning, on its way to a receive that was told of.
pub(super) struct Pushed {
    peer: Arc<Peer>,
    told: Told,
    /// None once it is over.
    copy: Option<InFlight>,
}

/// How far it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pushing {
    /// On its way.
    Flying,
    /// Over just now; all of it is there, or not.
    Ended {
        /// All of it is there.
        has_landed: bool,
    },
    /// Over before.
    Over,
}

impl Core {
    /// Begins to write a message to the receive that its receiver has told of, if there is one that is for this message. `after`: the
    /// nonce of the one before it in its stream. One that `completes_alone`, whatever its receiver does, is written whole or not at all.
    #[allow(clippy::too_many_arguments)]
    pub(super) fn push_invited(
        &mut self,
        env: &Env,
        peer: &Arc<Peer>,
        stream: Stream,
        after: u64,
        bytes: u64,
        (context, address): (ContextKey, u64),
        completes_alone: bool,
    ) -> Option<Pushed> {
        let rank = peer.world_rank();
        if !env.may_invite() || !self.company.is_only(rank) || !self.gpu.may_push(rank) {
            return None;
        }
        let expected = Waiting {
            communicator: stream.comm,
            source: env.world_rank,
            tag: stream.tag,
            after,
            bytes,
            offset: 0,
            rest: 0,
            buffer_id: 0,
        };
        let line = expected.line();
        let invitation = peer.board()?.invitation(line)?;
        // What this rank reads from there it would write one after the other.
        let is_reading = |id: &usize| self.reads_from(*id, peer.world_rank());
        if bytes >= ONE_WAY_FROM && self.moving.iter().any(is_reading) {
            return None;
        }
        // Its receiver waits, and this rank will read what that has sent: it reads this short one meanwhile.
        // To write this one, too, takes two launches of this rank's, one after the other.
        let is_waiting = bytes < ONE_WAY_FROM && self.is_announced(env);
        if is_waiting && invitation.find(&expected).is_some() && !self.is_written_to(env) {
            return None;
        }
        let last = self.last_sent.last(env, stream)?;
        let (tag, waiting) = last.find(invitation, &expected)?;
        let target = invitation.target(&waiting).ok()?;
        // Nobody leaves all of it.
        let rest = waiting.rest;
        if rest >= bytes || (rest > 0 && completes_alone) {
            return None;
        }
        let export = Export::from(&target);
        if !export.holds(bytes) {
            return None;
        }
        // Its receiver may withdraw it, and free the buffer.
        let mut is_kept = || last.find(invitation, &expected).is_some();
        let mapping = match self.gpu.map_while(context, peer, &export, &mut is_kept) {
            Ok(mapping) => mapping,
            Err(_) if !is_kept() => return None,
            Err(error) => {
                // That this buffer cannot be mapped here says nothing of others, and what cannot be is no fault.
                if error.code().is_some() && !error.is_refusal() {
                    failed(&mut self.gpu, peer, &error);
                } else if error != Error::AlreadyMapped {
                    self.gpu.push_failed(peer.world_rank());
                }
                log::debug!("to rank {}: not pushed: {error}", peer.world_rank());
                return None;
            }
        };
        if !invitation.take(tag) {
            return None;
        }
        let copy = Copy::Linear {
            dst: mapping.address_of(target.offset) + rest,
            src: address + rest,
            bytes: bytes - rest,
        };
        match self
            .gpu
            .copy_on(context, Purpose::Push, PUSH_LANE, copy, Some(mapping))
        {
            Ok(copy) => Some(Pushed {
                peer: Arc::clone(peer),
                told: Told { line, tag, rest },
                copy: Some(copy),
            }),
            Err(error) => {
                invitation.refuse(tag);
                failed(&mut self.gpu, peer, &error);
                None
            }
        }
    }
}

fn failed(gpu: &mut Gpu, peer: &Peer, error: &Error) {
    gpu.push_failed(peer.world_rank());
    stats::add(Counter::DriverRetries, 1);
    if peer.goes_on() {
        let of = Of::To(peer.world_rank());
        fault::survived(of, Path::Direct, error, "left to its receiver");
    }
}

impl Pushed {
    /// Whether it is on its way.
    pub(super) fn is_flying(&self) -> bool {
        self.copy.is_some()
    }

    /// Whether it is all of the message: nothing is left that the receiver asks for.
    pub(super) fn is_whole(&self) -> bool {
        self.told.rest == 0
    }

    /// Which receive it is for.
    pub(super) fn told(&self) -> Told {
        self.told
    }

    /// Looks how far it is, and tells the receiver once it is over.
    pub(super) fn poll(&mut self, gpu: &mut Gpu) -> Pushing {
        let Some(copy) = &mut self.copy else {
            return Pushing::Over;
        };
        let has_landed = match copy.poll() {
            Ok(false) => return Pushing::Flying,
            Ok(true) => true,
            Err(error) if copy.is_lost() => {
                failed(gpu, &self.peer, &error);
                false
            }
            Err(error) => {
                fault::tried_again(Of::To(self.peer.world_rank()), Path::Direct, &error);
                return Pushing::Flying;
            }
        };
        self.end(has_landed);
        Pushing::Ended { has_landed }
    }

    fn end(&mut self, has_landed: bool) {
        // What it kept is let go of once its receiver knows.
        let _copy = self.copy.take();
        let board = self.peer.board();
        if let Some(invitation) = board.and_then(|board| board.invitation(self.told.line)) {
            if has_landed {
                invitation.land(self.told.tag);
            } else {
                invitation.refuse(self.told.tag);
            }
        }
        self.peer.rouse();
    }

    /// Whether nothing of it runs any more, well or not.
    pub(super) fn is_over(&mut self) -> bool {
        self.copy.as_mut().is_none_or(InFlight::is_over)
    }

    /// Its message could not be sent: waits until nothing is written any more, which is as long as the copy takes, and leaves
    /// the receive to the next message.
    pub(super) fn abandon(mut self) {
        while !self.is_over() {
            std::thread::yield_now();
        }
        self.end(false);
    }
}
