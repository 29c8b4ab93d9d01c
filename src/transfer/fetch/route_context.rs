//! Which paths a received message takes.

use std::cell::OnceCell;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::config::Owner;
use crate::cuda::{overlap, Buffer, Uuid};
use crate::node::staged_part::STAGED_PARTS;
use crate::node::{Message, Part, Peer, Way};
use crate::plan::PathKind;
use crate::policy::history::{Planned, PLANNED_FROM, PLANNED_FROM_BOTH, PLANNED_MEANWHILE_FROM};
use crate::policy::{decided, parts};
use crate::stats::{self, Counter};
use crate::topology::Place;
use crate::transfer::fetch::order_token::{self, OrderToken};
use crate::transfer::fetch::turn::WINDOW_FROM;
use crate::transfer::gpu::Gpu;
use crate::transfer::history::PeerHistory;
use crate::transfer::relays::Relay;
use crate::transfer::route::{RouteUse, Routed, Router};
use crate::transfer::Env;

/// What is known before a message is fetched.
pub struct RouteContext<'a> {
    /// Knows the node.
    pub router: &'a mut Router,
    /// The receiver's buffer; None if that is no device memory.
    pub buffer: Option<&'a Buffer>,
    /// The messages under way.
    pub others: &'a Others<'a>,
    /// Until these are over, payloads received before in its place are still compared with what was sent.
    pub checks: Vec<Arc<OrderToken>>,
    /// What was learnt of peers.
    pub history: &'a mut PeerHistory,
    /// This rank sends to the sender, too.
    pub sends_to: bool,
    /// This rank writes to a receive of the sender's, after an RTR.
    pub is_putting: bool,
    /// This rank computes while messages are under way.
    pub computes: bool,
    /// This rank deals with several others: while it plans a message of one, the messages of the others wait.
    pub are_several: bool,
}

/// A message that is being fetched into device memory.
pub struct UnderWay {
    /// The number of the message, in the order in which this rank has taken its messages.
    pub began: u64,
    /// World rank of its sender.
    pub source: u32,
    /// Address and length of the receiver's buffer.
    pub to: (u64, u64),
    /// How far it is, if it has an order token.
    pub token: Option<Arc<OrderToken>>,
}

impl UnderWay {
    /// Whether it is written to some of these bytes.
    pub fn overlaps(&self, place: (u64, u64)) -> bool {
        overlap(self.to, place)
    }
}

/// The messages under way, oldest first.
pub type Rows = SmallVec<[UnderWay; 16]>;

/// The messages under way. They are looked up when somebody asks: for most messages it does not matter which
/// they are.
pub struct Others<'a> {
    find: &'a dyn Fn() -> Rows,
    rows: OnceCell<Rows>,
}

impl<'a> Others<'a> {
    /// `find` looks them up.
    pub fn new(find: &'a dyn Fn() -> Rows) -> Others<'a> {
        Others {
            find,
            rows: OnceCell::new(),
        }
    }

    /// Oldest first.
    pub fn rows(&self) -> &[UnderWay] {
        self.rows.get_or_init(self.find)
    }
}

/// What is to be planned.
struct RouteKey {
    from: Uuid,
    to: Uuid,
    bytes: u64,
    in_flight: u32,
    host: bool,
    goes_directly: bool,
    is_begun: bool,
}

/// The route of one message.
pub struct Route {
    /// The links that the plan uses count as used until this is dropped.
    pub routed: Routed,
    /// The parts that go over staging.
    pub parts: Vec<Part>,
    /// Whether the plan itself has a direct path.
    pub has_direct: bool,
}

/// Whether the depth of the window matters for a message of so many bytes: if the message may be split, or if
/// a rank that deals with several others may read it in turns.
pub fn asks_for_depth(env: &Env, bytes: u64, are_several: bool) -> bool {
    env.may_split(bytes) || (are_several && bytes >= WINDOW_FROM)
}

/// From so many bytes on, both ends pin the beginning of the sender's staging in host memory with the first
/// message, whichever way that message goes: meanwhile no thread of the process can launch anything
/// (`docs/decisions/host-staging-ahead.md`). When the first message to be split waited for it, single
/// messages of 64 MiB both ways between two H200s took 5.5 times as long as without the library, on average
/// of 20.
const HOST_PINNED_FROM: u64 = 16 << 20;

/// Whether messages of so many bytes may sooner or later be split with host memory.
pub fn uses_host(env: &Env, bytes: u64) -> bool {
    bytes >= HOST_PINNED_FROM && env.may_split(bytes) && env.paths().host
}

impl RouteContext<'_> {
    /// The GPU of the receiver's buffer.
    pub fn to(&self) -> Option<Uuid> {
        self.buffer.map(|buffer| buffer.uuid)
    }

    /// The GPUs of both buffers.
    fn ends(&self, message: &Message) -> Option<[Uuid; 2]> {
        self.to().map(|to| [message.device, to])
    }

    /// Messages that are received in the same place, given as address and length.
    pub fn overlapping(&self, place: (u64, u64)) -> impl Iterator<Item = &UnderWay> {
        let rows = self.others.rows().iter();
        rows.filter(move |row| row.overlaps(place))
    }

    /// The order tokens of these messages.
    pub fn tokens(&self, place: (u64, u64)) -> Vec<Arc<OrderToken>> {
        if !order_token::are_left() {
            return Vec::new();
        }
        let overlapping = self.overlapping(place);
        overlapping.filter_map(|row| row.token.clone()).collect()
    }

    /// The depth that the window is taken to have, for a message that has begun, with an [`InFlightGuard`].
    /// Call this once for each message for which [`asks_for_depth`] is true, whichever way it goes in the
    /// end: what is done with the next window depends on it.
    pub fn depth(&mut self, message: &Message) -> u32 {
        let in_flight = self.history.windows.in_flight(message.source);
        self.history
            .windows
            .of(message.source, message.length, in_flight)
    }

    /// Whether the plan is likely to be one direct copy, for a message in a window of this depth. Then that
    /// copy is launched first, and the plan is made while it runs.
    pub fn is_likely_direct(&self, message: &Message, depth: u32) -> bool {
        let (source, bytes) = (message.source, message.length);
        let ends = self.ends(message);
        ends.is_some_and(|ends| {
            self.history
                .windows
                .is_likely_direct(source, ends, bytes, depth)
        })
    }

    /// Whether to plan a single message that its sender has begun to write. Few messages are planned of those
    /// that would go directly even on an idle node, and are not so long that host memory might pay.
    pub fn is_planned_meanwhile(&mut self, message: &Message) -> bool {
        let (source, bytes) = (message.source, message.length);
        let ends = self.ends(message);
        let depths = &mut self.history.windows;
        !ends
            .is_some_and(|ends| depths.is_unplanned(source, ends, bytes, 1, PLANNED_MEANWHILE_FROM))
    }

    /// Whether a message in a window of this depth is handled as if it could not be split.
    pub fn is_unplanned(&mut self, message: &Message, depth: u32) -> bool {
        let (source, bytes) = (message.source, message.length);
        let keeps_waiting = depth > 1 || self.are_several;
        let ends = self.ends(message).filter(|_| keeps_waiting);
        ends.is_some_and(|ends| {
            let from = match self.sends_to || self.are_several {
                true => PLANNED_FROM_BOTH,
                false => PLANNED_FROM,
            };
            self.history
                .windows
                .is_unplanned(source, ends, bytes, depth, from)
        })
    }

    /// Whether the message begins in that copy, and is planned meanwhile. A long message is planned first if
    /// the one before it only lacked what may be there by now: a plan takes 20 us, and otherwise one more
    /// message would not be split.
    pub fn begins_directly(&self, message: &Message, depth: u32) -> bool {
        let lacked = || self.history.windows.lacked(message.source, depth);
        self.is_likely_direct(message, depth) && (message.length < PLANNED_FROM_BOTH || !lacked())
    }

    /// If no other message of its sender is under way, and a message is due whose time tells the rate better
    /// than those before, this message takes one direct copy, which is timed. Returns whether it does.
    pub fn time_if_due(&self, gpu: &mut Gpu, message: &Message) -> bool {
        if self.history.windows.in_flight(message.source) > 1 {
            return false;
        }
        let ends = self.ends(message);
        ends.is_some_and(|[from, to]| gpu.survey.time_if_due(&from, &to, message.length))
    }

    /// Whether single messages like this one are split with host memory, and their senders begin to write
    /// them if they get the RTR in time.
    pub fn are_begun(&self, message: &Message) -> bool {
        let (source, bytes) = (message.source, message.length);
        let ends = self.ends(message);
        ends.is_some_and(|ends| self.history.windows.rest(source, ends, bytes).is_some())
    }

    /// A single message that was offered is written whole, like the message in the other direction.
    pub fn refused(&mut self, message: &Message) {
        if self
            .history
            .windows
            .is_refused_again(message.source, message.length)
        {
            self.note_direct(message);
        }
    }

    /// A single message that would be split is written whole. The next ones are written whole as well, if the
    /// other end wants that and wanted it before.
    pub fn would_split(&mut self, message: &Message) {
        if self.is_putting
            && self
                .history
                .windows
                .goes_along(message.source, message.length)
        {
            self.note_direct(message);
        }
    }

    /// A single message is split.
    pub fn agreed(&mut self, message: &Message) {
        self.history.windows.agreed(message.source);
    }

    /// A single message has taken one direct copy, whatever would have been planned.
    fn note_direct(&mut self, message: &Message) {
        if let Some(ends) = self.ends(message) {
            self.history
                .windows
                .planned(message.source, ends, message.length, 1, Planned::Direct);
        }
    }

    /// Chooses the route of a message in a window of this depth. `is_begun`: its sender already writes the
    /// direct part. `None`: one copy, and nobody needs to know.
    #[allow(
        clippy::too_many_arguments,
        reason = "environment, driver and message apart; transfers without MPI are to bring them together"
    )]
    pub fn choose(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        peer: &Peer,
        message: &Message,
        in_flight: u32,
        is_begun: bool,
    ) -> Option<Route> {
        let to = self.to()?;
        let bytes = message.length;
        let relays = if env.paths().relay {
            gpu.relays.candidates(env, message.source)
        } else {
            Vec::new()
        };
        let is_spared = env.paths().host && (self.computes || peer.computes());
        if is_spared {
            stats::add(Counter::HostSpared, 1);
            if relays.is_empty() {
                // Only one copy is left; a rank that computes would pay for each plan with computing time.
                return None;
            }
        }
        let key = RouteKey {
            from: message.device,
            to,
            bytes,
            in_flight,
            host: peer.layout().wide_blocks > 0 && !is_spared,
            goes_directly: self.is_likely_direct(message, in_flight),
            is_begun,
        };
        let find = |uuid: &Uuid| relays.iter().find(|relay| relay.uuid == *uuid);
        let Some(mut routed) = self.plan(env, &key, &|uuid| find(uuid).is_some()) else {
            self.note_unplanned(gpu, message, &key);
            return None;
        };
        let over = self.relays_of(&routed, &relays);
        let lacks_staging = over.iter().any(|relay| relay.bytes == 0);
        if lacks_staging {
            // Staging is taken once a plan gains from it; until it is there, messages do without.
            let missing = over.iter().filter(|relay| relay.bytes == 0);
            missing.for_each(|relay| gpu.relays.wish(env, relay));
            routed.withdraw();
            let is_there = |uuid: &Uuid| find(uuid).is_some_and(|relay| relay.bytes > 0);
            routed = self.plan(env, &key, &is_there)?;
        }
        let waits = in_flight == 1
            && routed.is_split()
            && self.history.windows.waits_for_others(message.source);
        if waits {
            routed.withdraw();
            let directly = RouteKey { host: false, ..key };
            routed = self.plan(env, &directly, &|_| false)?;
        }
        let parts = self.parts(&routed, &relays, peer);
        let kinds = routed.plan.paths().iter().map(|path| path.path.kind());
        let has_direct = kinds.into_iter().any(|kind| kind == PathKind::Direct);
        if !is_spared {
            let (source, ends) = (message.source, [key.from, key.to]);
            let (is_split, would_split) = (!parts.is_empty(), routed.would_be_split());
            let how = decided!(
                "parts.planned",
                (is_split, lacks_staging, would_split),
                parts::planned(is_split, lacks_staging, would_split)
            );
            if !waits {
                self.history
                    .windows
                    .planned(source, ends, bytes, in_flight, how);
            }
            if in_flight == 1 {
                let rest = rest_of(&parts, bytes);
                self.history.windows.note_rest(source, ends, bytes, rest);
            }
        }
        Some(Route {
            parts,
            has_direct,
            routed,
        })
    }

    /// Nothing is known of the two GPUs, so the message takes one direct copy. If messages of its length do
    /// not tell the rate of a fast link either, those after it take one direct copy, too.
    fn note_unplanned(&mut self, gpu: &Gpu, message: &Message, key: &RouteKey) {
        let (from, to) = (key.from, key.to);
        if !gpu.survey.wants(&from, &to, key.bytes) {
            let (source, in_flight) = (message.source, key.in_flight);
            let how = if gpu.survey.is_active() {
                Planned::DirectForNow
            } else {
                Planned::Direct
            };
            self.history
                .windows
                .planned(source, [from, to], key.bytes, in_flight, how);
        }
    }

    fn plan(&mut self, env: &Env, key: &RouteKey, relay: &dyn Fn(&Uuid) -> bool) -> Option<Routed> {
        let usable = RouteUse {
            relay,
            host: key.host,
            paths: env.paths(),
            may_put: false,
            goes_directly: key.goes_directly,
            is_begun: key.is_begun,
            goes_both_ways: self.sends_to,
            assign: Owner::Two,
        };
        let (from, to) = (key.from, key.to);
        self.router
            .plan(env, from, to, key.bytes, key.in_flight, usable)
    }

    fn relays_of(&self, routed: &Routed, relays: &[Relay]) -> Vec<Relay> {
        let places = routed.plan.paths().iter().flat_map(|path| path.path.via());
        let uuids = places.filter_map(|place| self.router.uuid(*place));
        uuids
            .filter_map(|uuid| relays.iter().find(|relay| relay.uuid == uuid).copied())
            .collect()
    }

    /// The parts of a plan that go over staging. The rest goes directly.
    fn parts(&self, routed: &Routed, relays: &[Relay], peer: &Peer) -> Vec<Part> {
        let part = |path: &crate::plan::PathPlan| {
            let (way, room) = match path.path.via() {
                [Place::Host] => (Way::Host, u64::from(peer.layout().wide_block_bytes)),
                [place @ Place::Gpu(_)] => {
                    let uuid = self.router.uuid(*place)?;
                    let relay = relays.iter().find(|relay| relay.uuid == uuid)?;
                    let way = Way::Relay {
                        owner: relay.owner,
                        row: relay.row,
                    };
                    (way, relay.bytes)
                }
                _ => return None,
            };
            let (bytes, chunk) = (path.bytes, path.chunk_bytes);
            let chunk_bytes = decided!(
                "parts.chunk_bytes",
                (bytes, chunk, path.in_turn, room),
                parts::chunk_bytes(bytes, chunk, path.in_turn, room)
            );
            Some(Part {
                way,
                offset: path.offset,
                bytes: path.bytes,
                chunk_bytes,
                in_turn: path.in_turn,
            })
        };
        let parts = routed.plan.paths().iter().filter(|path| path.bytes > 0);
        parts.filter_map(part).take(STAGED_PARTS).collect()
    }
}

/// How many bytes the parts bring, if they all go through host memory and are the beginning of the message
/// and less than half of it.
fn rest_of(parts: &[Part], bytes: u64) -> Option<u64> {
    let rows = parts
        .iter()
        .map(|part| (part.way == Way::Host, part.offset, part.bytes));
    let rows: Vec<_> = rows.collect();
    decided!("parts.rest", (&rows, bytes), parts::rest(&rows, bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::history::Depths;

    #[test]
    fn what_host_memory_brings_of_single_messages_is_remembered() {
        let part = |way, offset, bytes| Part {
            way,
            offset,
            bytes,
            chunk_bytes: 1,
            in_turn: false,
        };
        assert_eq!(rest_of(&[], 100), None, "one copy");
        assert_eq!(rest_of(&[part(Way::Host, 0, 10)], 100), Some(10));
        assert_eq!(rest_of(&[part(Way::Host, 10, 10)], 100), None, "amidst");
        assert_eq!(rest_of(&[part(Way::Host, 0, 60)], 100), None, "most of it");
        let relay = Way::Relay { owner: 0, row: 0 };
        let parts = [part(Way::Host, 0, 10), part(relay, 10, 10)];
        assert_eq!(rest_of(&parts, 100), None, "a relay, too");

        let (ends, others) = ([[1; 16], [2; 16]], [[1; 16], [3; 16]]);
        let mut depths = Depths::default();
        assert_eq!(depths.rest(3, ends, 100), None);
        depths.note_rest(3, ends, 100, Some(10));
        assert_eq!(depths.rest(3, ends, 100), Some(10));
        for (source, ends, bytes) in [(4, ends, 100), (3, others, 100), (3, ends, 101)] {
            assert_eq!(depths.rest(source, ends, bytes), None);
        }
        depths.note_rest(3, ends, 100, None);
        assert_eq!(depths.rest(3, ends, 100), None, "not any more");
    }
}
