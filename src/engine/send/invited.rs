//! A send whose receiver has told of its receive: the message is written there before it is matched (see
//! [`crate::engine::invite`]).

use std::sync::Arc;

use crate::cuda::{ContextKey, Copy, Error, Export, InFlight, Mapping, Purpose};
use crate::engine::core::Core;
use crate::engine::counts::Stream;
use crate::engine::fault::{self, Of, Path};
use crate::engine::gpu::Gpu;
use crate::engine::invite::ONE_WAY_FROM;
use crate::engine::serve::tracks::PUSH_LANE;
use crate::engine::Env;
use crate::node::invite::Invitation;
use crate::node::{Peer, Target, Told, Waiting};
use crate::policy::decided_by;
use crate::policy::rtr::{self, WriteFacts};
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
    #[allow(
        clippy::too_many_arguments,
        reason = "environment, driver and message apart; transfers without MPI are to bring them together"
    )]
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
        let mut next = Next {
            core: self,
            env,
            peer,
            stream,
            expected,
            from: (context, address),
            completes_alone,
            line: expected.line(),
            found: None,
            target: None,
            mapping: None,
            copy: None,
        };
        decided_by!("rtr.write", &mut next, rtr::write);
        let (tag, waiting) = next.found?;
        Some(Pushed {
            peer: Arc::clone(peer),
            told: Told {
                line: next.line,
                tag,
                rest: waiting.rest,
            },
            copy: Some(next.copy?),
        })
    }
}

/// The next message of a stream, with all that decides whether it is written to a receive.
struct Next<'a> {
    core: &'a mut Core,
    env: &'a Env,
    peer: &'a Arc<Peer>,
    stream: Stream,
    /// The receive as it would be told of.
    expected: Waiting,
    from: (ContextKey, u64),
    completes_alone: bool,
    line: u32,
    /// The receive that was found.
    found: Option<(u64, Waiting)>,
    target: Option<Target>,
    mapping: Option<Arc<Mapping>>,
    copy: Option<InFlight>,
}

impl Next<'_> {
    fn invitation(&self) -> Option<&Invitation> {
        self.peer.board()?.invitation(self.line)
    }

    fn find(&mut self) -> Option<(u64, Waiting)> {
        let invitation = self.peer.board()?.invitation(self.line)?;
        let last = self.core.last_sent.last(self.env, self.stream)?;
        last.find(invitation, &self.expected)
    }
}

impl WriteFacts for Next<'_> {
    fn may_invite(&mut self) -> bool {
        self.env.may_invite()
    }

    fn is_only(&mut self) -> bool {
        self.core.company.is_only(self.peer.world_rank())
    }

    fn may_put(&mut self) -> bool {
        self.core.gpu.may_push(self.peer.world_rank())
    }

    fn is_told_of_any(&mut self) -> bool {
        self.invitation().is_some()
    }

    fn is_long(&mut self) -> bool {
        self.expected.bytes >= ONE_WAY_FROM
    }

    fn is_reading(&mut self) -> bool {
        let rank = self.peer.world_rank();
        let mut moving = self.core.moving.iter();
        moving.any(|id| self.core.reads_from(*id, rank))
    }

    fn is_announced(&mut self) -> bool {
        self.core.is_announced(self.env)
    }

    fn is_told_of_now(&mut self) -> bool {
        let invitation = self.invitation();
        invitation.is_some_and(|invitation| invitation.find(&self.expected).is_some())
    }

    fn is_written_to(&mut self) -> bool {
        self.core.is_written_to(self.env)
    }

    fn is_told_of(&mut self) -> bool {
        self.found = self.find();
        self.found.is_some()
    }

    fn is_rest_fit(&mut self) -> bool {
        let (Some((_, waiting)), Some(invitation)) = (&self.found, self.invitation()) else {
            return false;
        };
        let (rest, target) = (waiting.rest, invitation.target(waiting).ok());
        self.target = target;
        // Nobody leaves all of it.
        self.target.is_some() && rest < self.expected.bytes && !(rest > 0 && self.completes_alone)
    }

    fn is_held(&mut self) -> bool {
        let target = self.target.as_ref();
        target.is_some_and(|target| Export::from(target).holds(self.expected.bytes))
    }

    fn is_mapped(&mut self) -> bool {
        let Some(target) = &self.target else {
            return false;
        };
        let export = Export::from(target);
        let (env, stream, peer) = (self.env, self.stream, self.peer);
        let Some(invitation) = peer.board().and_then(|board| board.invitation(self.line)) else {
            return false;
        };
        let Core { last_sent, gpu, .. } = &mut *self.core;
        let Some(last) = last_sent.last(env, stream) else {
            return false;
        };
        // Its receiver may withdraw it, and free the buffer.
        let mut is_kept = || last.find(invitation, &self.expected).is_some();
        match gpu.map_while(self.from.0, peer, &export, &mut is_kept) {
            Ok(mapping) => self.mapping = Some(mapping),
            Err(_) if !is_kept() => {}
            Err(error) => {
                // That this buffer cannot be mapped here says nothing of others, and what cannot be is no fault.
                if error.code().is_some() && !error.is_refusal() {
                    failed(gpu, peer, &error);
                } else if error != Error::AlreadyMapped {
                    gpu.push_failed(peer.world_rank());
                }
                log::debug!("to rank {}: not pushed: {error}", peer.world_rank());
            }
        }
        self.mapping.is_some()
    }

    fn takes(&mut self) -> bool {
        let tag = self.found.as_ref().map(|(tag, _)| *tag);
        let invitation = self.invitation();
        tag.zip(invitation)
            .is_some_and(|(tag, invitation)| invitation.take(tag))
    }

    fn is_launched(&mut self) -> bool {
        let (Some((tag, waiting)), Some(target), Some(mapping)) =
            (&self.found, &self.target, self.mapping.take())
        else {
            return false;
        };
        let (tag, rest, (context, address)) = (*tag, waiting.rest, self.from);
        let copy = Copy::Linear {
            dst: mapping.address_of(target.offset) + rest,
            src: address + rest,
            bytes: self.expected.bytes - rest,
        };
        let gpu = &mut self.core.gpu;
        match gpu.copy_on(context, Purpose::Push, PUSH_LANE, copy, Some(mapping)) {
            Ok(copy) => self.copy = Some(copy),
            Err(error) => {
                if let Some(invitation) = self.peer.board().and_then(|it| it.invitation(self.line))
                {
                    invitation.refuse(tag);
                }
                failed(gpu, self.peer, &error);
            }
        }
        self.copy.is_some()
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
