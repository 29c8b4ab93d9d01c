//! A put after an RTR: the sender writes the message to the receive's buffer before the message is matched
//! (see [`crate::engine::rtr`]).

use std::sync::Arc;

use crate::cuda::{ContextKey, Copy, Error, Export, InFlight, Mapping, Purpose};
use crate::engine::core::Core;
use crate::engine::counts::Stream;
use crate::engine::fault::{self, Of, Path};
use crate::engine::gpu::Gpu;
use crate::engine::rtr::ONE_WAY_FROM;
use crate::engine::serve::staged_parts::PUT_LANE;
use crate::engine::Env;
use crate::node::rtr::Rtr;
use crate::node::{Peer, RtrId, Target, Waiting};
use crate::policy::decided_by;
use crate::policy::rtr::{self, WriteFacts};
use crate::stats::{self, Counter};

/// A put of a message, perhaps without its beginning, to the receive of an RTR.
pub(super) struct Put {
    peer: Arc<Peer>,
    told: RtrId,
    /// None once it is over.
    copy: Option<InFlight>,
}

/// How far a put is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PutStep {
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
        Some(Put {
            peer: Arc::clone(peer),
            told: RtrId {
                line: next.line,
                tag,
                rest: waiting.rest,
            },
            copy: Some(next.copy?),
        })
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
        let last = self.core.history.sent.last(self.env, self.stream)?;
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
        let Some(last) = history.sent.last(env, stream) else {
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

fn failed(gpu: &mut Gpu, peer: &Peer, error: &Error) {
    gpu.put_failed(peer.world_rank());
    stats::add(Counter::DriverRetries, 1);
    if peer.goes_on() {
        let of = Of::To(peer.world_rank());
        fault::survived(of, Path::Direct, error, "left to its receiver");
    }
}

impl Put {
    /// Whether the copy runs.
    pub(super) fn is_flying(&self) -> bool {
        self.copy.is_some()
    }

    /// Whether it is the whole message, so that the receiver asks for nothing more.
    pub(super) fn is_whole(&self) -> bool {
        self.told.rest == 0
    }

    /// The RTR that it is for.
    pub(super) fn told(&self) -> RtrId {
        self.told
    }

    /// Looks how far it is, and tells the receiver once it is over.
    pub(super) fn poll(&mut self, gpu: &mut Gpu) -> PutStep {
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
    pub(super) fn is_over(&mut self) -> bool {
        self.copy.as_mut().is_none_or(InFlight::is_over)
    }

    /// Its message could not be sent. Waits until nothing is written any more, which takes as long as the
    /// copy, and leaves the receive to the next message.
    pub(super) fn abandon(mut self) {
        while !self.is_over() {
            std::thread::yield_now();
        }
        self.end(false);
    }
}
