//! A put after an RTR: the sender writes the message to the receive's buffer before the message is matched
//! (see [`crate::engine::rtr`]).

use std::sync::Arc;

use crate::cuda::ContextKey;
use crate::engine::core::Core;
use crate::engine::Env;
use crate::node::rtr::Rtr;
use crate::node::{Peer, Waiting};
use crate::policy::decided_by;
use crate::policy::rtr::{self, WriteFacts};
use crate::transfer::put::{Attempt, Put};
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
            attempt: None,
            put: None,
        };
        decided_by!("rtr.write", &mut next, rtr::write);
        next.put
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
    attempt: Option<Attempt>,
    put: Option<Put>,
}

impl Next<'_> {
    fn rtr(&self) -> Option<&Rtr> {
        self.peer.rtr(self.line)
    }

    fn find(&mut self) -> Option<(u64, Waiting)> {
        let rtr = self.peer.rtr(self.line)?;
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
        let Some(found) = self.found else {
            return false;
        };
        self.attempt = Attempt::new(self.peer, self.line, found);
        let rest = self.attempt.as_ref().map(Attempt::rest);
        // No receiver leaves out the whole message.
        rest.is_some_and(|rest| rest < self.expected.bytes && !(rest > 0 && self.completes_alone))
    }

    fn is_held(&mut self) -> bool {
        let attempt = self.attempt.as_ref();
        attempt.is_some_and(|attempt| attempt.holds(self.expected.bytes))
    }

    fn is_mapped(&mut self) -> bool {
        let (env, stream) = (self.env, self.stream);
        let rtr = self.peer.rtr(self.line);
        let Core { history, gpu, .. } = &mut *self.core;
        let last = history.sent.last(env.seen(), stream);
        let (Some(attempt), Some(rtr), Some(last)) = (&mut self.attempt, rtr, last) else {
            return false;
        };
        let mut is_kept = || last.find(rtr, &self.expected).is_some();
        attempt.map(gpu, self.from.0, &mut is_kept)
    }

    fn takes(&mut self) -> bool {
        self.attempt.as_ref().is_some_and(Attempt::take)
    }

    fn is_launched(&mut self) -> bool {
        let (gpu, from, bytes) = (&mut self.core.gpu, self.from, self.expected.bytes);
        let attempt = self.attempt.as_mut();
        self.put = attempt.and_then(|attempt| attempt.launch(gpu, from, bytes));
        self.put.is_some()
    }
}
