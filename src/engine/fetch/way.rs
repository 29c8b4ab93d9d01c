//! Which paths a message takes that is received.

use std::cell::OnceCell;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::config::Assign;
use crate::cuda::{overlap, Buffer, Uuid};
use crate::engine::fetch::trail::{self, Trail};
use crate::engine::fetch::turn::WINDOW_FROM;
use crate::engine::gpu::Gpu;
use crate::engine::relays::Relay;
use crate::engine::route::{RouteUse, Routed, Router};
use crate::engine::Env;
use crate::node::track::TRACKS;
use crate::node::{Message, Part, Peer, Way};
use crate::plan::PathKind;
use crate::policy::history::{
    Depths, Planned, PLANNED_FROM, PLANNED_FROM_BOTH, PLANNED_MEANWHILE_FROM,
};
use crate::policy::peers::Exchanges;
use crate::policy::{decided, parts};
use crate::stats::{self, Counter};
use crate::topology::Place;

/// What is asked before a message is fetched.
pub struct Ways<'a> {
    /// Who knows the node.
    pub router: &'a mut Router,
    /// The receiver's buffer; None where that is no device memory.
    pub buffer: Option<&'a Buffer>,
    /// The messages under way.
    pub others: &'a Others<'a>,
    /// Until these are over, what was received in its place is still compared with what was sent.
    pub checks: Vec<Arc<Trail>>,
    /// How deep the windows of messages were that came before.
    pub depths: &'a mut Depths,
    /// With whom messages go both ways.
    pub exchanges: &'a mut Exchanges,
    /// This rank sends to the sender, too.
    pub sends_to: bool,
    /// This rank writes to a receive of the sender's, of which it was told.
    pub is_pushing: bool,
    /// This rank computes while messages are under way.
    pub computes: bool,
    /// This rank deals with several others: while a plan is made for one's message, those of the others wait to be dealt with.
    pub are_several: bool,
}

/// A message that is being fetched into device memory.
pub struct UnderWay {
    /// Which message of this rank it is, in the order in which they were taken.
    pub began: u64,
    /// World rank of its sender.
    pub source: u32,
    /// Address and length of the receiver's buffer.
    pub to: (u64, u64),
    /// How far it is, if it comes over several paths.
    pub trail: Option<Arc<Trail>>,
}

impl UnderWay {
    /// Whether it is written to some of these bytes.
    pub fn overlaps(&self, place: (u64, u64)) -> bool {
        overlap(self.to, place)
    }
}

/// The messages under way, oldest first.
pub type Rows = SmallVec<[UnderWay; 16]>;

/// The messages under way, which are looked up when somebody asks: for most it does not matter who they are.
pub struct Others<'a> {
    find: &'a dyn Fn() -> Rows,
    rows: OnceCell<Rows>,
}

impl<'a> Others<'a> {
    /// To be looked up so.
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

/// What is planned.
struct Route {
    from: Uuid,
    to: Uuid,
    bytes: u64,
    in_flight: u32,
    host: bool,
    goes_directly: bool,
    is_begun: bool,
}

/// The way of one message.
pub struct Chosen {
    /// What the plan uses of the links counts as used until this is dropped.
    pub routed: Routed,
    /// The parts that go over staging.
    pub parts: Vec<Part>,
    /// Whether the rest is more than what must be.
    pub has_direct: bool,
}

/// Whether it matters how deep the window is of a message of so many bytes: if it may be split, or be read in turns by a rank that deals
/// with several others.
pub fn asks_for_depth(env: &Env, bytes: u64, are_several: bool) -> bool {
    env.may_split(bytes) || (are_several && bytes >= WINDOW_FROM)
}

/// From so many bytes on both ends have the beginning of the sender's staging in host memory pinned with the
/// first message, whichever way that goes: no thread of the process can launch anything meanwhile
/// (`docs/decisions/host-staging-ahead.md`). Where the first message to be split waited for it, single
/// messages of 64 MiB both ways between two H200s took 5.5 times as long as without the library, on average
/// of 20.
const HOST_PINNED_FROM: u64 = 16 << 20;

/// Whether messages of so many bytes may be split with host memory sooner or later.
pub fn uses_host(env: &Env, bytes: u64) -> bool {
    bytes >= HOST_PINNED_FROM && env.may_split(bytes) && env.paths().host
}

impl Ways<'_> {
    /// The GPU of the receiver's buffer.
    pub fn to(&self) -> Option<Uuid> {
        self.buffer.map(|buffer| buffer.uuid)
    }

    /// The GPUs of both buffers.
    fn ends(&self, message: &Message) -> Option<[Uuid; 2]> {
        self.to().map(|to| [message.device, to])
    }

    /// Those that are received in the same place, an address and a length.
    pub fn overlapping(&self, place: (u64, u64)) -> impl Iterator<Item = &UnderWay> {
        let rows = self.others.rows().iter();
        rows.filter(move |row| row.overlaps(place))
    }

    /// How far they are.
    pub fn trails(&self, place: (u64, u64)) -> Vec<Arc<Trail>> {
        if !trail::are_left() {
            return Vec::new();
        }
        let overlapping = self.overlapping(place);
        overlapping.filter_map(|row| row.trail.clone()).collect()
    }

    /// How deep the window is taken to be of a message that has begun, with a [`Flight`]. To be asked once for each that [`asks_for_depth`], whichever way it
    /// goes in the end: what is done with the next window depends on it.
    pub fn depth(&mut self, message: &Message) -> u32 {
        let in_flight = self.depths.in_flight(message.source);
        self.depths.of(message.source, message.length, in_flight)
    }

    /// Whether the plan of a message in a window so deep is likely to be one direct copy: then that is launched first, and the plan
    /// made while it runs.
    pub fn is_likely_direct(&self, message: &Message, depth: u32) -> bool {
        let (source, bytes) = (message.source, message.length);
        let ends = self.ends(message);
        ends.is_some_and(|ends| self.depths.is_likely_direct(source, ends, bytes, depth))
    }

    /// Whether a single message that its sender has begun to write is to be planned: of those that would go directly on an idle node,
    /// too, and are not so long that host memory might be worth it, few are.
    pub fn is_planned_meanwhile(&mut self, message: &Message) -> bool {
        let (source, bytes) = (message.source, message.length);
        let ends = self.ends(message);
        let depths = &mut *self.depths;
        !ends
            .is_some_and(|ends| depths.is_unplanned(source, ends, bytes, 1, PLANNED_MEANWHILE_FROM))
    }

    /// Whether a message in a window so deep goes as if it could not be split.
    pub fn is_unplanned(&mut self, message: &Message, depth: u32) -> bool {
        let (source, bytes) = (message.source, message.length);
        let keeps_waiting = depth > 1 || self.are_several;
        let ends = self.ends(message).filter(|_| keeps_waiting);
        ends.is_some_and(|ends| {
            let from = match self.sends_to || self.are_several {
                true => PLANNED_FROM_BOTH,
                false => PLANNED_FROM,
            };
            self.depths.is_unplanned(source, ends, bytes, depth, from)
        })
    }

    /// Whether it begins in that copy, and is planned meanwhile. A long one is planned before where the one
    /// before it only lacked what may be there by now: a plan takes 20 us, and it would be one more message
    /// that is not split.
    pub fn begins_directly(&self, message: &Message, depth: u32) -> bool {
        let lacked = || self.depths.lacked(message.source, depth);
        self.is_likely_direct(message, depth) && (message.length < PLANNED_FROM_BOTH || !lacked())
    }

    /// If no other message of its sender's is under way, and one is due whose time tells the rate better than those before, it takes one
    /// direct copy, and that is timed. Whether it is.
    pub fn time_if_due(&self, gpu: &mut Gpu, message: &Message) -> bool {
        if self.depths.in_flight(message.source) > 1 {
            return false;
        }
        let ends = self.ends(message);
        ends.is_some_and(|[from, to]| gpu.survey.time_if_due(&from, &to, message.length))
    }

    /// Whether single messages like this one are split with host memory, and begun by their senders, if these are told in time.
    pub fn are_begun(&self, message: &Message) -> bool {
        let (source, bytes) = (message.source, message.length);
        let ends = self.ends(message);
        ends.is_some_and(|ends| self.depths.rest(source, ends, bytes).is_some())
    }

    /// A single message that was offered is written whole, as what goes the other way is.
    pub fn refused(&mut self, message: &Message) {
        if self.depths.is_refused_again(message.source, message.length) {
            self.note_direct(message);
        }
    }

    /// A single message is written whole that would be split. So are the next ones, if the other end wants it so, and did before.
    pub fn would_split(&mut self, message: &Message) {
        if self.is_pushing && self.depths.goes_along(message.source, message.length) {
            self.note_direct(message);
        }
    }

    /// A single message goes over several paths.
    pub fn agreed(&mut self, message: &Message) {
        self.depths.agreed(message.source);
    }

    /// A single message has taken one direct copy, whatever would have been planned.
    fn note_direct(&mut self, message: &Message) {
        if let Some(ends) = self.ends(message) {
            self.depths
                .planned(message.source, ends, message.length, 1, Planned::Direct);
        }
    }

    /// Chooses the way of a message in a window so deep, of which its sender writes the direct part already or does not. `None`: one
    /// copy, and nobody needs to know.
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
    ) -> Option<Chosen> {
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
                // One copy is what is left; a rank that computes pays for each plan with its units of work.
                return None;
            }
        }
        let route = Route {
            from: message.device,
            to,
            bytes,
            in_flight,
            host: peer.layout().wide_blocks > 0 && !is_spared,
            goes_directly: self.is_likely_direct(message, in_flight),
            is_begun,
        };
        let find = |uuid: &Uuid| relays.iter().find(|relay| relay.uuid == *uuid);
        let Some(mut routed) = self.plan(env, &route, &|uuid| find(uuid).is_some()) else {
            self.note_unplanned(gpu, message, &route);
            return None;
        };
        let over = self.relays_of(&routed, &relays);
        let lacks_staging = over.iter().any(|relay| relay.bytes == 0);
        if lacks_staging {
            // Staging is taken once a plan gains from it; until it is there, messages go without.
            let missing = over.iter().filter(|relay| relay.bytes == 0);
            missing.for_each(|relay| gpu.relays.wish(env, relay));
            routed.withdraw();
            let is_there = |uuid: &Uuid| find(uuid).is_some_and(|relay| relay.bytes > 0);
            routed = self.plan(env, &route, &is_there)?;
        }
        let waits =
            in_flight == 1 && routed.is_split() && self.depths.waits_for_others(message.source);
        if waits {
            routed.withdraw();
            let directly = Route {
                host: false,
                ..route
            };
            routed = self.plan(env, &directly, &|_| false)?;
        }
        let parts = self.parts(&routed, &relays, peer);
        let kinds = routed.plan.paths().iter().map(|path| path.path.kind());
        let has_direct = kinds.into_iter().any(|kind| kind == PathKind::Direct);
        if !is_spared {
            let (source, ends) = (message.source, [route.from, route.to]);
            let (is_split, would_split) = (!parts.is_empty(), routed.would_be_split());
            let how = decided!(
                "parts.planned",
                (is_split, lacks_staging, would_split),
                parts::planned(is_split, lacks_staging, would_split)
            );
            if !waits {
                self.depths.planned(source, ends, bytes, in_flight, how);
            }
            if in_flight == 1 {
                let rest = rest_of(&parts, bytes);
                self.depths.note_rest(source, ends, bytes, rest);
            }
        }
        Some(Chosen {
            parts,
            has_direct,
            routed,
        })
    }

    /// Nothing is known of the two GPUs, so that the message takes one direct copy. Where messages of its length do not tell the rate
    /// of a fast link either, those after it will do so, too.
    fn note_unplanned(&mut self, gpu: &Gpu, message: &Message, route: &Route) {
        let (from, to) = (route.from, route.to);
        if !gpu.survey.wants(&from, &to, route.bytes) {
            let (source, in_flight) = (message.source, route.in_flight);
            let how = if gpu.survey.is_active() {
                Planned::DirectForNow
            } else {
                Planned::Direct
            };
            self.depths
                .planned(source, [from, to], route.bytes, in_flight, how);
        }
    }

    fn plan(&mut self, env: &Env, route: &Route, relay: &dyn Fn(&Uuid) -> bool) -> Option<Routed> {
        let usable = RouteUse {
            relay,
            host: route.host,
            paths: env.paths(),
            may_push: false,
            goes_directly: route.goes_directly,
            is_begun: route.is_begun,
            goes_both_ways: self.sends_to,
            assign: Assign::Own,
        };
        let (from, to) = (route.from, route.to);
        self.router
            .plan(env, from, to, route.bytes, route.in_flight, usable)
    }

    fn relays_of(&self, routed: &Routed, relays: &[Relay]) -> Vec<Relay> {
        let places = routed.plan.paths().iter().flat_map(|path| path.path.via());
        let uuids = places.filter_map(|place| self.router.uuid(*place));
        uuids
            .filter_map(|uuid| relays.iter().find(|relay| relay.uuid == uuid).copied())
            .collect()
    }

    /// The parts of a plan that go over staging. What is left out is direct.
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
        parts.filter_map(part).take(TRACKS).collect()
    }
}

/// What parts that all go through host memory bring of a message, if that is its beginning, and less than half of it.
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
