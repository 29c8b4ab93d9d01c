//! Receives of which this rank sends an RTR: see [`crate::engine::rtr`].

use std::ffi::c_int;

use super::early_match::EarlyMatch;
use super::{Receive, Target, Work};
use crate::cuda::{overlap, Buffer, Uuid};
use crate::engine::comms;
use crate::engine::core::Core;
use crate::engine::lift::Shape;
use crate::engine::Env;
use crate::mpi::{Abi, Comm};
use crate::node::{RtrId, RtrState, Target as Place, Waiting};
use crate::policy::decided_by;
use crate::policy::rtr::{self, TellFacts};
use crate::stats::{self, Counter};
use crate::transfer::history::Last;
use crate::transfer::stream::Stream;

/// At most this many receives are searched for one that may take the same message.
const LOOKED_THROUGH: usize = 64;

/// A receive of which this rank may send an RTR, with everything that decides it.
struct Posted<'a> {
    core: &'a mut Core,
    env: &'a Env,
    posting: &'a Posting,
    stream: Stream,
    last: &'a Last,
    me: Option<usize>,
    /// Bytes of the message that are left to the path through host memory.
    rest: u64,
    target: Option<Place>,
    rtr: Option<RtrId>,
}

impl Posted<'_> {
    fn ends(&self) -> [Uuid; 2] {
        [self.last.device, self.posting.buffer.uuid]
    }

    fn place(&self) -> (u64, u64) {
        (self.posting.buffer.address, self.posting.bytes)
    }

    fn tell(&self) -> Option<RtrId> {
        let target = self.target.as_ref()?;
        let waiting = Waiting {
            communicator: self.stream.comm,
            source: self.stream.peer,
            tag: self.stream.tag,
            after: self.last.nonce,
            bytes: self.posting.bytes,
            offset: target.offset,
            rest: 0,
            buffer_id: target.buffer_id,
        };
        let waiting = waiting.leaving(self.rest)?;
        let rtr = self.env.node.own().open_rtr(&waiting, target)?;
        stats::add(Counter::RtrsSent, 1);
        Some(rtr)
    }
}

impl TellFacts for Posted<'_> {
    fn may_send_rtr(&mut self) -> bool {
        self.env.may_send_rtr()
    }

    fn is_likely_direct(&mut self) -> bool {
        let (sender, bytes, ends) = (self.stream.peer, self.posting.bytes, self.ends());
        !self.env.may_split(bytes)
            || self
                .core
                .history
                .windows
                .is_likely_direct(sender, ends, bytes, 1)
    }

    fn rest(&mut self) -> Option<u64> {
        let (sender, bytes, ends) = (self.stream.peer, self.posting.bytes, self.ends());
        let rest = self.core.history.windows.rest(sender, ends, bytes)?;
        self.rest = rest;
        Some(rest)
    }

    fn is_apart(&mut self) -> bool {
        let [from, to] = self.ends();
        from != to && self.stream.peer != self.env.world_rank
    }

    fn is_only(&mut self) -> bool {
        self.core.history.mix.is_only(self.stream.peer)
    }

    fn may_put(&mut self) -> bool {
        self.core.gpu.may_put(self.stream.peer)
    }

    fn is_written(&mut self) -> bool {
        self.core.is_written(self.place())
    }

    fn is_shared(&mut self) -> bool {
        self.core.is_shared(self.env, self.me, self.place())
    }

    fn is_exported(&mut self) -> bool {
        let buffer = &self.posting.buffer;
        let gpu = &mut self.core.gpu;
        let export = gpu
            .prepare(buffer)
            .and_then(|_| gpu.export(self.env, buffer));
        match export {
            Ok(export) => self.target = Some(Place::from(&export)),
            Err(error) => {
                // Memory that can be exported in principle.
                stats::add(Counter::DriverRetries, 1);
                let address = buffer.address;
                log::debug!("device buffer {address:#x}: no RTR is sent: {error}");
            }
        }
        self.target.is_some()
    }

    fn bytes(&mut self) -> u64 {
        self.posting.bytes
    }

    fn is_in_large_pages(&mut self) -> bool {
        let target = self.target.as_ref();
        target.is_some_and(Place::is_in_large_pages)
    }

    fn tells(&mut self) -> bool {
        self.rtr = self.tell();
        self.rtr.is_some()
    }
}

/// A receive into one run of device memory that names its source and its tag.
#[derive(Clone, Copy)]
pub(super) struct Posting {
    buffer: Buffer,
    bytes: u64,
    comm: Comm,
    source: c_int,
    tag: c_int,
}

impl Receive {
    pub(super) fn posting(&self, abi: &Abi) -> Option<Posting> {
        let Target::Device {
            buffer,
            shape: Shape::Dense(_),
        } = &self.target
        else {
            return None;
        };
        let (source, tag) = self.from?;
        let is_named = source != abi.any_source && tag != abi.any_tag && source != abi.proc_null;
        // A persistent receive may outlive its communicator, whose handle then says nothing.
        let is_on_comm = !self.named.is_before();
        (is_named && is_on_comm && self.matched.is_none() && buffer.ipc).then_some(Posting {
            buffer: *buffer,
            bytes: self.capacity,
            comm: self.comm,
            source,
            tag,
        })
    }

    /// Whether it is pending, and may take the message that the other receive is for.
    fn competes(&self, abi: &Abi, with: &Posting) -> bool {
        let is_pending = self.life.is_offered() && self.arrival.is_none() && self.matched.is_none();
        let is_same_comm = abi.normalize(self.comm) == abi.normalize(with.comm);
        let may_match = self.from.is_none_or(|(source, tag)| {
            (source == with.source || source == abi.any_source)
                && (tag == with.tag || tag == abi.any_tag)
        });
        is_pending && is_same_comm && may_match
    }
}

impl Core {
    /// Whether an RTR was sent and the sender is writing to this receive, or has written.
    pub(in crate::engine) fn is_written_to(&self, env: &Env) -> bool {
        let own = env.node.own();
        let is_taken = |rtr| matches!(own.rtr_state(rtr), Some(RtrState::Taken | RtrState::Landed));
        let mut receives = self.receives.iter();
        receives.any(|(_, receive)| receive.rtr.is_some_and(is_taken))
    }

    /// Called before a receive is posted: the RTR that was sent of it, or else what is known of its message.
    /// `me`: the receive's own index, if it is among the others already.
    pub(super) fn match_early(
        &mut self,
        env: &Env,
        posting: &Posting,
        me: Option<usize>,
    ) -> (Option<RtrId>, EarlyMatch) {
        let Some((stream, last, is_due)) = self.one_before(env, posting, me) else {
            return (None, EarlyMatch::No);
        };
        let rtr = is_due.then(|| self.send_rtr(env, posting, stream, &last, me));
        match rtr.flatten() {
            Some(rtr) => (Some(rtr), EarlyMatch::No),
            None => {
                let expected = self.expect(env, stream, &last);
                (None, expected.map_or(EarlyMatch::No, EarlyMatch::EarlyRts))
            }
        }
    }

    /// The message that the receive's message follows, if that is certain, its stream, and whether an RTR is
    /// due.
    fn one_before(
        &mut self,
        env: &Env,
        posting: &Posting,
        me: Option<usize>,
    ) -> Option<(Stream, Last, bool)> {
        if !env.sees_all() || !self.early.is_empty() || !self.matched.is_empty() {
            return None;
        }
        let identity = comms::identity(env.abi, posting.comm)?;
        let stream = Stream {
            comm: identity.id,
            peer: identity.world_rank(posting.source)?,
            tag: posting.tag,
        };
        let is_alone = self.receives.len() <= LOOKED_THROUGH
            && !self
                .receives
                .iter()
                .any(|(id, other)| Some(id) != me && other.competes(env.abi, posting));
        let (last, is_due) = self.history.received.posting(stream, is_alone)?;
        Some((stream, last, is_due))
    }

    /// Sends an RTR of the receive if that is of use.
    fn send_rtr(
        &mut self,
        env: &Env,
        posting: &Posting,
        stream: Stream,
        last: &Last,
        me: Option<usize>,
    ) -> Option<RtrId> {
        let mut posted = Posted {
            core: self,
            env,
            posting,
            stream,
            last,
            me,
            rest: 0,
            target: None,
            rtr: None,
        };
        decided_by!("rtr.tell", &mut posted, rtr::tell);
        posted.rtr
    }

    /// Whether a message is on its way to some of these bytes of device memory, or is being checked there.
    fn is_written(&self, place: (u64, u64)) -> bool {
        self.moving.iter().any(|id| {
            let receive = &self.receives[*id];
            let is_checked = receive
                .guard
                .as_ref()
                .is_some_and(|guard| guard.is_at(place));
            is_checked
                || match &receive.work {
                    Work::Fetch(fetch) => fetch.under_way().is_some_and(|row| row.overlaps(place)),
                    Work::Lift(lifting) => overlap(lifting.under_way().to, place),
                    _ => false,
                }
        })
    }

    /// Whether a receive reads so much of this sender's memory that this rank should not write there
    /// meanwhile.
    pub(in crate::engine) fn reads_from(&self, id: usize, rank: u32) -> bool {
        matches!(&self.receives[id].work, Work::Fetch(fetch) if fetch.reads_from(rank))
    }

    /// Called for a receive of whose message nothing is known yet: makes sure that nobody writes to its
    /// buffer any more. False if its sender does, or if its message was claimed.
    pub(in crate::engine) fn withdraw(&mut self, env: &Env, id: usize) -> bool {
        let own = env.node.own();
        let Some(rtr) = self.receives[id].rtr else {
            self.expect_no_more(id);
            return !self.awaits_rts(id);
        };
        let mut is_withdrawn = own.withdraw(rtr);
        if !is_withdrawn && self.is_from_the_dead(env, id) {
            // The dead sender writes no more, and its RTS may never have gone.
            own.withdraw_rtr(rtr);
            is_withdrawn = own.withdraw(rtr);
        }
        if is_withdrawn {
            self.receives[id].rtr = None;
        }
        is_withdrawn
    }

    /// Whether the rank that a receive names has died.
    fn is_from_the_dead(&self, env: &Env, id: usize) -> bool {
        let from = self.receives[id].from;
        let stream = from.and_then(|(source, tag)| self.stream_of(env, id, source, tag));
        let peer = stream.and_then(|stream| env.node.peer(stream.peer));
        peer.is_some_and(|peer| !peer.alive())
    }
}
