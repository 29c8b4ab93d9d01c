//! A put after an RTR: the sender writes the message to the receive's buffer before the message is matched
//! (see [`crate::engine::rtr`]).

use std::sync::Arc;

use crate::cuda::{ContextKey, Copy, Error, Export, InFlight, Mapping, Purpose};
use crate::engine::core::Core;
use crate::engine::Env;
use crate::node::rtr::Rtr;
use crate::node::{Peer, RtrId, Target, Waiting};
use crate::policy::decided_by;
use crate::policy::rtr::{self, WriteFacts};
use crate::transfer::put::{failed, Put};
use crate::transfer::serve::staged_parts::PUT_LANE;
use crate::transfer::stream::Stream;
use crate::transfer::ONE_WAY_FROM;

impl Core {
    /// Begins to write a message to the receive of an RTR, if there is an RTR for this message. `after`: the
    /// nonce of the message before it in its stream. A message that `completes_alone`, whatever its receiver
    /// does, is written whole or not at all.
    #[allow(
        clippy::too_many_arguments,
        reason = "environment, driver and message apart; transfers without MPI are to bring them together"
    )]
    pub(super) fn put_for_rtr(
        &mut self,
        env: &Env,
        peer: &Arc<Peer>,
        stream: Stream,
        after: u64,
        bytes: u64,
        (context, address): (ContextKey, u64),
        completes_alone: bool,
    ) -> Option<Put> {
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
        let told = RtrId {
            line: next.line,
            tag,
            rest: waiting.rest,
        };
        Some(Put::new(peer, told, next.copy?))
    }
}

/// The next message of a stream, with all that decides whether it is written to the receive of an RTR.
struct Next<'a> {
    core: &'a mut Core,
    env: &'a Env,
    peer: &'a Arc<Peer>,
    stream: Stream,
    /// The receive that the RTR must describe.
    expected: Waiting,
    from: (ContextKey, u64),
    completes_alone: bool,
    line: u32,
    /// The RTR that was found: its tag and its receive.
    found: Option<(u64, Waiting)>,
    target: Option<Target>,
    mapping: Option<Arc<Mapping>>,
    copy: Option<InFlight>,
}

impl Next<'_> {
    fn rtr(&self) -> Option<&Rtr> {
        self.peer.gpu_page()?.rtr(self.line)
    }

    fn find(&mut self) -> Option<(u64, Waiting)> {
        let rtr = self.peer.gpu_page()?.rtr(self.line)?;
        let last = self.core.history.sent.last(self.env.seen(), self.stream)?;
        last.find(rtr, &self.expected)
    }
}

impl WriteFacts for Next<'_> {
    fn may_send_rtr(&mut self) -> bool {
        self.env.may_send_rtr()
    }

    fn is_only(&mut self) -> bool {
        self.core.history.mix.is_only(self.peer.world_rank())
    }

    fn may_put(&mut self) -> bool {
        self.core.gpu.may_put(self.peer.world_rank())
    }

    fn is_told_of_any(&mut self) -> bool {
        self.rtr().is_some()
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
        let rtr = self.rtr();
        rtr.is_some_and(|rtr| rtr.find(&self.expected).is_some())
    }

    fn is_written_to(&mut self) -> bool {
        self.core.is_written_to(self.env)
    }

    fn is_told_of(&mut self) -> bool {
        self.found = self.find();
        self.found.is_some()
    }

    fn is_rest_fit(&mut self) -> bool {
        let (Some((_, waiting)), Some(rtr)) = (&self.found, self.rtr()) else {
            return false;
        };
        let (rest, target) = (waiting.rest, rtr.target(waiting).ok());
        self.target = target;
        // No receiver leaves out the whole message.
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
        let Some(rtr) = peer.gpu_page().and_then(|gpu_page| gpu_page.rtr(self.line)) else {
            return false;
        };
        let Core { history, gpu, .. } = &mut *self.core;
        let Some(last) = history.sent.last(env.seen(), stream) else {
            return false;
        };
        // The receiver may withdraw its RTR, and free the buffer.
        let mut is_kept = || last.find(rtr, &self.expected).is_some();
        match gpu.map_while(self.from.0, peer, &export, &mut is_kept) {
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
                log::debug!("to rank {}: not pushed: {error}", peer.world_rank());
            }
        }
        self.mapping.is_some()
    }

    fn takes(&mut self) -> bool {
        let tag = self.found.as_ref().map(|(tag, _)| *tag);
        let rtr = self.rtr();
        tag.zip(rtr).is_some_and(|(tag, rtr)| rtr.take(tag))
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
        match gpu.copy_on(context, Purpose::Put, PUT_LANE, copy, Some(mapping)) {
            Ok(copy) => self.copy = Some(copy),
            Err(error) => {
                if let Some(rtr) = self.peer.gpu_page().and_then(|it| it.rtr(self.line)) {
                    rtr.refuse(tag);
                }
                failed(gpu, self.peer, &error);
            }
        }
        self.copy.is_some()
    }
}
