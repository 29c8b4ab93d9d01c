//! Which paths a message takes that is received.

use std::cell::OnceCell;
use std::sync::Arc;

use hashbrown::HashMap;
use smallvec::SmallVec;

use crate::config::Assign;
use crate::cuda::{overlap, Buffer, Uuid, AHEAD_BYTES};
use crate::engine::fetch::push::Exchanges;
use crate::engine::fetch::trail::{self, Trail};
use crate::engine::fetch::turn::WINDOW_FROM;
use crate::engine::gpu::Gpu;
use crate::engine::relays::Relay;
use crate::engine::route::{RouteUse, Routed, Router};
use crate::engine::Env;
use crate::node::track::{TRACKS, TRACK_CHUNKS_MAX};
use crate::node::{Message, Part, Peer, Way, UNIT_BYTES};
use crate::plan::PathKind;
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

/// A message that may be split is under way from its sender until this is dropped.
pub struct Flight {
    /// As many as there are of these, and one more, hold it.
    _of_sender: Arc<()>,
}

/// How many messages were under way at once from each sender: programs send windows of the same depth again and again, and
/// the first message of one is to be planned like the rest.
#[derive(Default)]
pub struct Depths(HashMap<u32, Depth>);

/// How a message was planned.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Planned {
    /// To go over several paths.
    Split,
    /// To take one direct copy for what others use of the links.
    DirectBesideOthers,
    /// To take one direct copy for now, as links are being measured, or for want of staging.
    DirectForNow,
    /// To take one direct copy, on an idle node as well.
    Direct,
}

/// Of one sender.
#[derive(Default)]
struct Depth {
    /// Held by each message that is under way.
    flights: Arc<()>,
    bytes: u64,
    /// Of the window before.
    last: u32,
    /// Of this window, so far.
    now: u32,
    /// Of single messages, and of those of windows.
    planned: [LastPlanned; 2],
    refused: Refused,
}

/// Single messages that were to be split, and went whole, as what went the other way did. Who would split and is not invited to write
/// loses what an invitation saves, so that this is tried less and less often.
#[derive(Default)]
struct Refused {
    /// Their length.
    bytes: u64,
    /// How many in a row.
    times: u32,
    /// So many go whole without being tried, and so many of these are left.
    pause: u32,
    left: u32,
}

/// So many messages in a row are offered to be split: who sees the first that it is not invited to write can offer the second one, too.
const TRIES: u32 = 2;
/// Between them, the first time and at most.
const PAUSE: [u32; 2] = [8, 1024];

/// What came of plans.
#[derive(Default)]
struct LastPlanned {
    /// Between these two GPUs messages of up to so many bytes took one direct copy.
    direct: Option<([Uuid; 2], u64)>,
    /// The last one may be split soon.
    is_for_now: bool,
    /// It went directly for want of staging or of measurements, which may be there now.
    lacked: bool,
    /// It went directly for what others used, and so many plans have said since that the next one need not.
    beside_others: Option<u32>,
    /// So many plans in a row said that it would go directly on an idle node, too.
    direct_ones: usize,
    /// Messages that were not planned since one was.
    unplanned: u32,
    /// Between these two GPUs the last one, of so many bytes, left so much to host memory, at its beginning.
    rest: Option<([Uuid; 2], u64, u64)>,
}

impl LastPlanned {
    /// Whether a message is likely to take one direct copy.
    fn is_likely_direct(&self, ends: [Uuid; 2], bytes: u64) -> bool {
        let direct = self.direct;
        direct.is_some_and(|(known, most)| known == ends && bytes <= most)
    }

    /// Whether one of the messages that go without a plan, mostly, is to be planned.
    fn is_planned_again(&mut self) -> bool {
        let of = PLANNED_OF[self.direct_ones.clamp(1, PLANNED_OF.len()) - 1];
        self.unplanned += 1;
        let is_planned = self.unplanned >= of;
        if is_planned {
            self.unplanned = 0;
        }
        is_planned
    }
}

/// Where single messages went directly beside others, so many plans in a row are to say that one be split. In an exchange of all ranks
/// again and again it takes some rounds until these are in step, and who begins before the others finds their links idle. Jacobi,
/// concurrent exchange on a simulated node of four GPUs, of 56 messages: 3.1 were split without this on average, and 3 of 14 launches
/// took 8 to 15 % longer; 1.6 with it, and none did (`docs/results/sim-paths.txt`).
const SPLIT_AFTER: u32 = 2;

/// Of messages of windows or of several ranks that go directly, and are short or launched together, one of so many is planned: there is
/// no time in which a plan costs nothing. It takes 4 to 5 us where others use the links, 15 to 20 where they never did so in that way
/// before (medians and 90th percentiles, each of four simulated H200s to all). The first of these at first, and the next one after each that
/// has brought nothing new: of windows of 16 of 2 MiB both ways one in 61 is a fiftieth of the time. None has a divisor in common with how
/// deep windows are, so that it is not the same message of each.
const PLANNED_OF: [u32; 5] = [61, 127, 251, 509, 1021];
/// Messages of windows, and those of a rank that deals with several others, go without a plan if they are shorter, mostly, where they
/// would go directly on an idle node, too. Windows of 16 of 2 MiB on two H100s, times the speed with `ANABRANCH_PATHS=direct`, each
/// planned and so: 0.99 and 1.00, both ways 0.986 and 0.994 (`docs/results/h100-x2-all-beside-one.txt`); of 4 both ways 0.962 and 0.987
/// (`h100-x2-all-sizes.txt`, 2). Single messages of 2 MiB on four H100s, each to all, once longer ones have told the ranks of
/// their links, times the speed without the library: each planned 0.87, one of 61 1.04 and 1.08 on two machines, with
/// `ANABRANCH_PATHS=direct` 1.09 and 1.105 (`docs/results/h100-x4-many.txt`, 9). Where each was planned only after all were launched 0.97.
const PLANNED_FROM: u64 = 4 << 20;
/// The same of a rank that sends to the sender, too, or deals with others: what it has to do comes in the way of both. Two H200s, windows of 16
/// both ways, each planned from 4 MiB on and from 16: 6 MiB 0.979 and 0.994, 8 MiB 0.984 and 0.999 of one path; one way 12 MiB 1.037 and 1.010, as
/// it takes longer until it is found that they gain (`docs/results/h200-x2-one-path.txt`, 1).
const PLANNED_FROM_BOTH: u64 = 16 << 20;
/// Single messages that are shorter are written without being planned, mostly, where they would go directly on an idle node, too.
const PLANNED_MEANWHILE_FROM: u64 = 64 << 20;
/// No window is taken for deeper.
const DEPTH_MAX: u32 = 16;

/// Whether a message is a single one (0), or one of a window.
fn kind(in_flight: u32) -> usize {
    usize::from(in_flight > 1)
}

impl Depths {
    /// A message begins to come that may be split.
    pub fn enter(&mut self, source: u32) -> Flight {
        let depth = self.0.entry(source).or_default();
        Flight {
            _of_sender: Arc::clone(&depth.flights),
        }
    }

    /// How many of a sender's have begun, and are not over.
    fn in_flight(&self, source: u32) -> u32 {
        let depth = self.0.get(&source);
        depth.map_or(0, |depth| Arc::strong_count(&depth.flights) as u32 - 1)
    }

    /// How deep the window is taken to be of a message that is one of `in_flight`.
    fn of(&mut self, source: u32, bytes: u64, in_flight: u32) -> u32 {
        let in_flight = in_flight.min(DEPTH_MAX);
        let depth = self.0.entry(source).or_default();
        if in_flight == 1 || depth.bytes != bytes {
            depth.last = if depth.bytes == bytes { depth.now } else { 0 };
            (depth.bytes, depth.now) = (bytes, 0);
        }
        depth.now = depth.now.max(in_flight);
        depth.now.max(depth.last)
    }

    /// Takes note of how a message in a window so deep was planned.
    fn planned(&mut self, source: u32, ends: [Uuid; 2], bytes: u64, in_flight: u32, how: Planned) {
        let depth = self.0.entry(source).or_default();
        let is_direct = how != Planned::Split;
        let last = &mut depth.planned[kind(in_flight)];
        last.is_for_now = matches!(how, Planned::DirectForNow | Planned::DirectBesideOthers);
        last.lacked = how == Planned::DirectForNow;
        last.beside_others = (how == Planned::DirectBesideOthers).then_some(0);
        let known = last.direct.filter(|(known, _)| *known == ends);
        let most = known.map_or(0, |(_, most)| most);
        (last.direct, last.direct_ones) = match how {
            Planned::Direct => (
                Some((ends, most.max(bytes))),
                last.direct_ones.saturating_add(1),
            ),
            _ if is_direct => (Some((ends, most.max(bytes))), 0),
            // Of a shorter one it says nothing.
            _ if most < bytes => (known, last.direct_ones),
            _ => (None, 0),
        };
    }

    /// Takes note of what goes through host memory of a single message that is split.
    fn note_rest(&mut self, source: u32, ends: [Uuid; 2], bytes: u64, rest: Option<u64>) {
        let depth = self.0.entry(source).or_default();
        depth.planned[kind(1)].rest = rest.map(|rest| (ends, bytes, rest));
    }

    /// What a single message is likely to leave to host memory, at its beginning, if it is likely to be split like the one before it.
    pub fn rest(&self, source: u32, ends: [Uuid; 2], bytes: u64) -> Option<u64> {
        let last = &self.0.get(&source)?.planned[kind(1)];
        let (known, length, rest) = last.rest?;
        (known == ends && length == bytes).then_some(rest)
    }

    /// Whether a single message goes directly all the same, though its plan is to split it: those before it did so beside others, who
    /// may come yet.
    fn waits_for_others(&mut self, source: u32) -> bool {
        let depth = self.0.entry(source).or_default();
        let Some(times) = &mut depth.planned[kind(1)].beside_others else {
            return false;
        };
        *times += 1;
        *times < SPLIT_AFTER
    }

    /// A single message was offered to be split, and goes whole. Whether those after it had better do so from the start.
    fn is_refused_again(&mut self, source: u32, bytes: u64) -> bool {
        let refused = &mut self.0.entry(source).or_default().refused;
        if refused.bytes != bytes {
            *refused = Refused {
                bytes,
                ..Refused::default()
            };
        }
        refused.times += 1;
        if refused.times < TRIES {
            return false;
        }
        let [least, most] = PAUSE;
        refused.times = 0;
        refused.pause = (2 * refused.pause).clamp(least, most);
        refused.left = refused.pause;
        true
    }

    /// Whether a single message goes whole, though it would be split, as those before it were offered in vain.
    fn goes_along(&mut self, source: u32, bytes: u64) -> bool {
        let refused = &mut self.0.entry(source).or_default().refused;
        let is_paused = refused.bytes == bytes && refused.left > 0;
        refused.left -= u32::from(is_paused);
        is_paused
    }

    /// A single message was split.
    fn agreed(&mut self, source: u32) {
        self.0.entry(source).or_default().refused = Refused::default();
    }

    /// Whether a message in a window so deep is likely to take one direct copy.
    pub fn is_likely_direct(
        &self,
        source: u32,
        ends: [Uuid; 2],
        bytes: u64,
        in_flight: u32,
    ) -> bool {
        let depth = self.0.get(&source);
        depth.is_some_and(|depth| depth.planned[kind(in_flight)].is_likely_direct(ends, bytes))
    }

    /// Whether the last message in a window so deep went directly only for want of staging or of
    /// measurements.
    fn lacked(&self, source: u32, in_flight: u32) -> bool {
        let depth = self.0.get(&source);
        depth.is_some_and(|depth| depth.planned[kind(in_flight)].lacked)
    }

    /// Whether a message is to take one direct copy without being planned, where a plan keeps others waiting. Those of `from` bytes are
    /// planned all the same, and so are those that may be split soon, unless all of their window goes in one launch.
    fn is_unplanned(
        &mut self,
        source: u32,
        ends: [Uuid; 2],
        bytes: u64,
        in_flight: u32,
        from: u64,
    ) -> bool {
        let Some(depth) = self.0.get_mut(&source) else {
            return false;
        };
        let last = &mut depth.planned[kind(in_flight)];
        // It would wait for the plan of its first message.
        let is_one_launch = in_flight > 1 && u64::from(in_flight) * bytes <= AHEAD_BYTES;
        bytes < from
            && last.is_likely_direct(ends, bytes)
            && (is_one_launch || !last.is_for_now)
            && !last.is_planned_again()
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
            let how = if !parts.is_empty() {
                Planned::Split
            } else if lacks_staging {
                Planned::DirectForNow
            } else if routed.would_be_split() {
                Planned::DirectBesideOthers
            } else {
                Planned::Direct
            };
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
            // Room for a piece that is filled, one that is emptied (two of each in turn), and one that is handed over.
            let pieces = if path.in_turn { 5 } else { 3 };
            let most = (room / pieces / UNIT_BYTES * UNIT_BYTES).max(UNIT_BYTES);
            let least = path.bytes.div_ceil(u64::from(TRACK_CHUNKS_MAX));
            Some(Part {
                way,
                offset: path.offset,
                bytes: path.bytes,
                chunk_bytes: path.chunk_bytes.min(most).max(least).max(1),
                in_turn: path.in_turn,
            })
        };
        let parts = routed.plan.paths().iter().filter(|path| path.bytes > 0);
        parts.filter_map(part).take(TRACKS).collect()
    }
}

/// What parts that all go through host memory bring of a message, if that is its beginning, and less than half of it.
fn rest_of(parts: &[Part], bytes: u64) -> Option<u64> {
    let rest = parts.iter().map(|part| part.bytes).sum();
    let end = parts.iter().map(|part| part.offset + part.bytes).max()?;
    let is_rest = parts.iter().all(|part| part.way == Way::Host) && end == rest;
    (is_rest && rest < bytes / 2).then_some(rest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_is_as_deep_as_the_one_before() {
        let mut depths = Depths::default();
        let mut window = |bytes, count: u32| -> Vec<u32> {
            (1..=count).map(|at| depths.of(3, bytes, at)).collect()
        };
        assert_eq!(window(100, 4), [1, 2, 3, 4]);
        assert_eq!(window(100, 4), [4, 4, 4, 4]);
        assert_eq!(window(100, 1), [4]);
        assert_eq!(window(100, 1), [1], "the depth has changed");
        assert_eq!(window(7, 2), [1, 2], "so has the length");
        assert_eq!(depths.of(4, 7, 1), 1, "another sender");
    }

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

    #[test]
    fn what_is_refused_is_offered_less_and_less_often() {
        let mut depths = Depths::default();
        // Of so many messages those that are offered, if the other end never does so.
        let mut offered = |count: u32| -> Vec<u32> {
            let mut is_offered = false;
            let mut offered = Vec::new();
            for at in 0..count {
                if is_offered {
                    offered.push(at);
                    is_offered = !depths.is_refused_again(3, 64);
                } else {
                    is_offered = !depths.goes_along(3, 64);
                }
            }
            offered
        };
        let first = offered(60);
        assert_eq!(first, [1, 2, 12, 13, 31, 32]);
        let all = offered(20000);
        let share = all.len() as f64 / 20000.0;
        assert!((0.001..0.01).contains(&share), "{share}");
        assert!(!depths.goes_along(3, 32), "another length");
        assert!(!depths.goes_along(4, 64), "another sender");
        depths.agreed(3);
        assert!(!depths.goes_along(3, 64), "it was split since");
    }

    #[test]
    fn of_windows_now_this_message_is_planned_and_now_that() {
        for (of, direct_ones) in PLANNED_OF.into_iter().zip(1..) {
            let mut last = LastPlanned {
                direct_ones,
                ..LastPlanned::default()
            };
            let planned = (0..16 * of).map(|_| last.is_planned_again());
            let planned = planned.collect::<Vec<_>>().into_iter().enumerate();
            let at = planned.filter_map(|(at, is)| is.then_some(at % 16));
            let mut at: Vec<usize> = at.collect();
            at.sort_unstable();
            assert_eq!(at, (0..16).collect::<Vec<_>>(), "one of {of}");
        }
    }

    #[test]
    fn what_brings_nothing_new_is_planned_less_and_less_often() {
        let mut depths = Depths::default();
        let (ends, bytes) = ([[1; 16], [2; 16]], PLANNED_FROM - 1);
        depths.planned(3, ends, bytes, 16, Planned::Direct);
        // How many messages come until one is planned, and it is planned so.
        let mut next = |how: Planned, planned: u64| {
            let is_unplanned =
                |depths: &mut Depths| depths.is_unplanned(3, ends, bytes, 16, PLANNED_FROM);
            let messages = (1..5000).find(|_| !is_unplanned(&mut depths));
            depths.planned(3, ends, planned, 16, how);
            messages.expect("one is planned")
        };
        let often = [(); 7].map(|()| next(Planned::Direct, bytes));
        assert_eq!(often, [61, 127, 251, 509, 1021, 1021, 1021]);
        let longer = next(Planned::Split, 2 * PLANNED_FROM);
        assert_eq!(longer, 1021);
        assert_eq!(next(Planned::DirectForNow, bytes), 1021, "says nothing");
        assert_eq!(next(Planned::Direct, bytes), 1, "for now");
        assert_eq!(next(Planned::Direct, bytes), 61, "from the start");
    }

    #[test]
    fn most_of_what_goes_directly_is_not_planned_where_that_keeps_others_waiting() {
        let mut depths = Depths::default();
        let (ends, short, long) = ([[1; 16], [2; 16]], PLANNED_FROM - 1, PLANNED_FROM);
        let unplanned = |depths: &mut Depths, bytes, in_flight| {
            let of_many = (0..10 * PLANNED_OF[0])
                .filter(|_| depths.is_unplanned(3, ends, bytes, in_flight, PLANNED_FROM));
            of_many.count() as u32
        };
        for in_flight in [1, 16] {
            assert_eq!(unplanned(&mut depths, short, in_flight), 0, "not known");
            depths.planned(3, ends, long, in_flight, Planned::Direct);
            assert_eq!(
                unplanned(&mut depths, short, in_flight),
                10 * (PLANNED_OF[0] - 1)
            );
            assert_eq!(unplanned(&mut depths, long, in_flight), 0);
            depths.planned(3, ends, long, in_flight, Planned::DirectForNow);
            assert_eq!(unplanned(&mut depths, short, in_flight), 0, "for now");
            let one_launch = AHEAD_BYTES / u64::from(in_flight);
            let few = 10 * (PLANNED_OF[0] - 1);
            let expected = if in_flight > 1 { few } else { 0 };
            assert_eq!(
                unplanned(&mut depths, one_launch.min(short), in_flight),
                expected
            );
            depths.planned(3, ends, short, in_flight, Planned::Split);
            assert_eq!(unplanned(&mut depths, short, in_flight), 0, "split");
        }
    }

    #[test]
    fn who_went_directly_beside_others_waits_for_them_once_more() {
        let mut depths = Depths::default();
        let ends = [[1; 16], [2; 16]];
        let mut after = |how: Planned| {
            depths.planned(3, ends, 100, 1, how);
            [0; 3].map(|_| depths.waits_for_others(3))
        };
        let others = [true, false, false];
        assert_eq!(after(Planned::DirectBesideOthers), others);
        assert_eq!(after(Planned::DirectBesideOthers), others, "again");
        for how in [Planned::Split, Planned::DirectForNow, Planned::Direct] {
            assert_eq!(after(how), [false; 3]);
        }
        depths.planned(3, ends, 100, 4, Planned::DirectBesideOthers);
        assert!(!depths.waits_for_others(3), "that was a window");
        assert!(!depths.waits_for_others(4), "another sender");
    }

    #[test]
    fn what_was_planned_to_go_directly_is_likely_to_do_so_again() {
        let mut depths = Depths::default();
        let (ends, others) = ([[1; 16], [2; 16]], [[1; 16], [3; 16]]);
        assert!(!depths.is_likely_direct(3, ends, 1, 1), "nothing is known");
        depths.planned(3, ends, 100, 1, Planned::Direct);
        depths.planned(3, ends, 50, 1, Planned::Direct);
        let likely = [
            (3, ends, 100),
            (3, ends, 101),
            (3, others, 100),
            (4, ends, 100),
        ];
        let likely =
            likely.map(|(source, ends, bytes)| depths.is_likely_direct(source, ends, bytes, 1));
        assert_eq!(likely, [true, false, false, false]);
        depths.planned(3, ends, 200, 1, Planned::Split);
        assert!(
            depths.is_likely_direct(3, ends, 100, 1),
            "longer ones may be split"
        );
        depths.planned(3, ends, 80, 1, Planned::Split);
        assert!(
            !depths.is_likely_direct(3, ends, 50, 1),
            "splitting pays again"
        );
        depths.planned(3, ends, 10, 1, Planned::Direct);
        depths.planned(3, others, 90, 1, Planned::Split);
        assert!(
            !depths.is_likely_direct(3, ends, 10, 1),
            "the last pair counts"
        );
        depths.planned(3, others, 70, 4, Planned::Direct);
        let windows = [2, 16, 1].map(|depth| depths.is_likely_direct(3, others, 70, depth));
        assert_eq!(
            windows,
            [true, true, false],
            "windows are planned by themselves"
        );
        let long = AHEAD_BYTES;
        let is_unplanned = |depths: &mut Depths, in_flight| {
            depths.is_unplanned(3, others, long, in_flight, 2 * long)
        };
        depths.planned(3, others, long, 4, Planned::Direct);
        depths.planned(3, others, long, 1, Planned::DirectForNow);
        assert!(is_unplanned(&mut depths, 4), "that was a single one");
        assert!(!is_unplanned(&mut depths, 1));
        depths.planned(3, others, long, 4, Planned::DirectForNow);
        assert!(depths.is_likely_direct(3, others, 70, 4));
        depths.planned(3, others, long, 1, Planned::Direct);
        assert!(is_unplanned(&mut depths, 1) && !is_unplanned(&mut depths, 4));
    }
}
