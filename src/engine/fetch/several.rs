//! The receiver's side of a message that comes over several paths: it pulls its own part straight from the sender's
//! memory, and empties the staging that the sender fills with the rest (`track.rs`; `serve/tracks.rs` is the other side).
//!
//! Whatever the sender does not bring, the receiver pulls itself: chunks that it has not begun with when the receiver has
//! nothing left to do, those of a track that has failed, and all that it has begun with if it then does nothing more. Only
//! where the sender writes to the receiver's buffer itself it is waited for, until it writes no more, or has died.

use std::sync::Arc;
use std::time::{Duration, Instant};

use smallvec::SmallVec;

use crate::cuda::{clock_ns, ContextKey, Copy, Error, InFlight, Mapping, Purpose};
use crate::engine::fault::{self, Of, Path, Trouble};
use crate::engine::fetch::has_landed;
use crate::engine::fetch::push::{Push, TURN_PATIENCE};
use crate::engine::fetch::track::{Staging, Track};
use crate::engine::fetch::trail::Trail;
use crate::engine::gpu::Gpu;
use crate::engine::route::HostFared;
use crate::engine::story::Parts;
use crate::engine::Env;
use crate::node::track::{TrackOf, TRACKS};
use crate::node::{Asked, Invited, Part, Peer, Told, TrackError, Way};
use crate::stats::{self, Counter};

/// A receiver that has not looked for so long does not know how long its sender has done nothing.
const ABSENCE: Duration = Duration::from_millis(500);
/// Looks for each that reads the clock.
const LOOKS: u32 = 32;
/// What it claims back at one time at least, bytes, if there is as much.
const CLAIM_BYTES_MIN: u64 = 1 << 20;

/// What is pushed goes in copies as long as a chunk may be: two behind each other cost 3 us more than one.
const PUSH_BYTES_MAX: u64 = 1 << 30;

/// What is needed to pull from the sender's memory.
pub struct Direct {
    /// Context of the receiver's buffer.
    pub context: ContextKey,
    /// Address of the receiver's buffer.
    pub to: u64,
    /// Address of the sender's, here.
    pub from: u64,
    /// The sender's allocation.
    pub mapping: Arc<Mapping>,
    /// It may be pulled from also where nothing stands in the way of the other paths.
    pub is_path: bool,
    /// The receiver's buffer, where the sender is to push the direct part instead.
    pub push: Option<Push>,
}

/// When the part in host memory, and all others, were over, nanoseconds.
#[derive(Default)]
struct Ends {
    host: Option<u64>,
    others: Option<u64>,
}

/// Since when somebody is waited for.
#[derive(Clone, Copy)]
struct Since {
    by_devices_ns: u64,
    at: Instant,
}

impl Since {
    fn now() -> Since {
        Since {
            by_devices_ns: clock_ns(),
            at: Instant::now(),
        }
    }

    /// By the devices' clock, which a simulated node moves no further than its ranks have come. Where nothing moves it, none of them
    /// will come.
    fn is_within(&self, patience: Duration) -> bool {
        let by_devices = clock_ns().saturating_sub(self.by_devices_ns);
        Duration::from_nanos(by_devices) <= patience && self.at.elapsed() <= ABSENCE
    }
}

/// A message on its way over several paths.
pub struct Several {
    peer: Arc<Peer>,
    direct: Direct,
    asked: Asked,
    length: u64,
    slot: (u32, u64),
    /// It has been offered to the sender.
    is_asked: bool,
    trail: Arc<Trail>,
    /// The message before it.
    before: Option<Before>,
    /// What its sender writes of it already, as it was told of the receive: until that has landed.
    invited: Option<Told>,
    /// Of the sender's memory, by this rank.
    pulls: Vec<Pull>,
    tracks: Vec<Track>,
    /// The message must come another way, or not at all, once nothing is in flight.
    lost: Option<Loss>,
    /// The sender has died, and writes nowhere any more.
    is_orphan: bool,
    /// The sender is to push, and has not begun.
    is_pusher_awaited: bool,
    /// Since when, with nothing before it.
    awaited: Option<Since>,
    /// When its parts were over, if that is asked for.
    ends: Option<Ends>,
    is_open: bool,
    looks: u32,
    /// When the clock was last read, and when something last moved.
    looked: Instant,
    moved: Instant,
    by_direct: u64,
    /// Bytes that its sender has written as it was told of the receive.
    by_invited: u64,
    /// Bytes that were not brought, as those of the message behind it are in their place.
    overtaken: u64,
}

/// A message from the same sender that has been begun before.
#[derive(Clone)]
pub struct Before {
    /// How far it is.
    pub trail: Arc<Trail>,
    /// It is received in the same place, and split alike.
    pub is_below: bool,
    /// The last of all that its sender still has to do with, wherever that is received.
    pub last: Option<Arc<Trail>>,
}

impl Before {
    /// Whether its sender has nothing to do before this message any more.
    fn is_over(&self) -> bool {
        let last = self.last.as_ref();
        self.trail.is_over() && last.is_none_or(|trail| trail.is_over())
    }
}

/// Why it does not come as it was begun.
#[derive(Clone, Copy)]
enum Loss {
    /// A copy of this rank's failed.
    Driver(Error),
    /// The invitation by which its sender writes was written over.
    WrittenOver,
}

struct Pull {
    copy: InFlight,
    bytes: u64,
}

/// How a step ended.
pub enum Step {
    /// Under way; whether something moved.
    Pending(bool),
    /// All of it is there.
    Arrived,
    /// It must come another way; nothing is in flight.
    Lost(Error),
    /// What its sender writes of it was written over; nothing is in flight.
    Corrupt,
}

impl Several {
    /// Queues the direct part, then asks the sender for the others. None where there is nothing to ask for.
    ///
    /// Behind a message that is received in the same place it takes that one's parts; otherwise what has no staging is
    /// direct as well. What its sender writes already, as it was `invited` to, is nobody else's.
    #[allow(
        clippy::too_many_arguments,
        reason = "environment, driver and message apart; transfers without MPI are to bring them together"
    )]
    pub fn begin(
        env: &Env,
        gpu: &mut Gpu,
        peer: &Arc<Peer>,
        slot: (u32, u64),
        direct: Direct,
        length: u64,
        parts: &[Part],
        before: Option<Before>,
        invited: Option<Told>,
    ) -> Option<Several> {
        let mut tracks: Vec<Track> = Vec::new();
        let below = before.as_ref().filter(|before| before.is_below);
        let parts = below.map_or(parts, |before| &before.trail.parts[..]);
        let until = invited.map_or(length, |told| told.rest);
        // First, as it takes longest: before the sender has begun with all others, 8 us would have gone.
        let pushed = match (&direct.push, below) {
            (Some(_), None) => longest_gap(parts, until),
            _ => None,
        };
        for part in pushed.iter().chain(parts) {
            match Staging::reach(env, gpu, &direct, peer, part) {
                Some(staging) if tracks.len() < TRACKS => {
                    tracks.push(Track::new(tracks.len(), *part, staging))
                }
                _ => {}
            }
        }
        let offered: Vec<Part> = tracks.iter().map(|track| track.part).collect();
        if offered.is_empty() || (below.is_some() && offered.len() != parts.len()) {
            return None;
        }
        if let Some(before) = below {
            before.trail.follow();
        }
        let target = direct.push.as_ref().map(|push| &push.target);
        let behind = before.as_ref().and_then(|before| before.trail.asked);
        let asked = env.node.own().open_offer(&offered, target, behind)?;
        let mut several = Several {
            peer: Arc::clone(peer),
            direct,
            asked,
            length,
            slot,
            is_asked: false,
            trail: Arc::new(Trail::new(offered.clone(), Some(asked))),
            before,
            invited,
            pulls: Vec::new(),
            tracks,
            lost: None,
            is_orphan: false,
            is_pusher_awaited: false,
            awaited: None,
            ends: None,
            is_open: true,
            looks: 0,
            looked: Instant::now(),
            moved: Instant::now(),
            by_direct: 0,
            by_invited: 0,
            overtaken: 0,
        };
        if several.invited.is_some() {
            // On no lane of its own.
            several.trail.set_out_of_order();
        }
        for (offset, bytes) in gaps(&offered, until) {
            several.pull(gpu, offset, bytes);
        }
        several.ask();
        Some(several)
    }

    /// How far it is, for the message behind it.
    pub fn trail(&self) -> &Arc<Trail> {
        &self.trail
    }

    /// Offers the message to its sender, if the one before it is. True if that was done now.
    fn ask(&mut self) -> bool {
        let may_ask = |before: &Before| before.trail.is_offered();
        if self.is_asked || !self.before.as_ref().is_none_or(may_ask) {
            return false;
        }
        self.is_asked = true;
        self.trail.set_offered();
        self.is_pusher_awaited = self.tracks.iter().any(Track::is_pushed);
        let (slot, nonce) = self.slot;
        if let Some(slot) = self.peer.slot(slot) {
            slot.ask(nonce, self.asked);
            self.peer.ring_doorbell();
        }
        true
    }

    /// Says how far it is.
    fn leave_trail(&self) {
        for track in &self.tracks {
            if !track.is_retired && !track.is_cut && track.launched == track.end {
                self.trail.set_launched(track.number);
            }
        }
    }

    /// Bytes of a track that are not brought by it any more come by a copy of this rank's, which is not on the track's lane.
    fn bring_otherwise(&mut self, gpu: &mut Gpu, number: usize, (offset, bytes): (u64, u64)) {
        // What its sender pushes for the message behind this one, if there is one, may be there before.
        if self.tracks[number].is_pushed() || self.trail.is_launched(number) {
            if self.trail.has_follower() {
                self.overtaken += bytes;
                return;
            }
            self.trail.set_out_of_order();
        }
        self.pull(gpu, offset, bytes);
        gpu.launch();
    }

    /// Queues a copy from the sender's memory.
    fn pull(&mut self, gpu: &mut Gpu, offset: u64, bytes: u64) {
        if bytes == 0 {
            return;
        }
        let copy = Copy::Linear {
            dst: self.direct.to + offset,
            src: self.direct.from + offset,
            bytes,
        };
        let (context, rank) = (self.direct.context, self.peer.world_rank());
        let mapping = Some(Arc::clone(&self.direct.mapping));
        match gpu.pull(context, rank, copy, mapping) {
            Ok(copy) => self.pulls.push(Pull { copy, bytes }),
            Err(error) => self.lost = Some(Loss::Driver(error)),
        }
    }

    /// Moves on, without waiting.
    pub fn poll(&mut self, env: &Env, gpu: &mut Gpu) -> Step {
        if let Some(loss) = self.lost {
            let moved = self.poll_invited(env, gpu);
            if !self.is_drained(env) || self.is_behind() {
                return Step::Pending(moved);
            }
            self.close(env);
            return match loss {
                Loss::WrittenOver => Step::Corrupt,
                // What follows it may have been written.
                Loss::Driver(_) if self.trail.has_follower() => Step::Arrived,
                Loss::Driver(error) => Step::Lost(error),
            };
        }
        let mut moved = self.poll_invited(env, gpu) | self.ask() | self.poll_pulls();
        for number in 0..self.tracks.len() {
            moved |= self.poll_track(env, gpu, number);
        }
        if self.lost.is_some() {
            // What the sender has claimed it may still bring.
            let asked = self.asked;
            for track in &self.tracks {
                shared(env, asked, track.number).map(|shared| shared.take_back(u32::MAX));
            }
            self.trail.set_out_of_order();
            return Step::Pending(true);
        }
        self.leave_trail();
        self.before.take_if(|before| before.is_over());
        if self.is_pusher_awaited && self.before.is_none() {
            moved |= self.await_pusher(env, gpu);
        }
        let is_pushed = |track: &Track| track.is_pushed() && !track.is_done();
        let is_idle = self.pulls.is_empty()
            && self.invited.is_none()
            && !self.tracks.iter().all(Track::is_done)
            && !self.tracks.iter().any(is_pushed);
        let is_alone = !self.trail.has_follower() && !self.is_behind();
        if is_idle && is_alone && self.direct.is_path && self.is_lane_free(gpu) {
            moved |= self.claim_back(env, gpu);
        }
        self.note_ends();
        if self.pulls.is_empty() && self.invited.is_none() && self.tracks.iter().all(Track::is_done)
        {
            self.close(env);
            return Step::Arrived;
        }
        self.watch(env, gpu, moved);
        Step::Pending(moved)
    }

    /// Looks how far its sender is with what it writes already.
    fn poll_invited(&mut self, env: &Env, gpu: &mut Gpu) -> bool {
        let Some(told) = self.invited else {
            return false;
        };
        let (own, bytes) = (env.node.own(), self.length - told.rest);
        match own.invited(told) {
            Some(Invited::Taken) => return false,
            Some(Invited::Landed) => {
                has_landed(env, told);
                self.by_invited = bytes;
            }
            Some(Invited::Refused) => {
                own.close_invitation(told);
                stats::add(Counter::Retries, 1);
                if self.lost.is_none() {
                    self.pull(gpu, told.rest, bytes);
                    gpu.launch();
                }
            }
            Some(Invited::Open) | None => {
                self.lost = Some(Loss::WrittenOver);
            }
        }
        self.invited = None;
        true
    }

    /// Looks whether the sender has begun to push. One that does not come is not waited for.
    fn await_pusher(&mut self, env: &Env, gpu: &mut Gpu) -> bool {
        let Some(number) = self.tracks.iter().position(Track::is_pushed) else {
            return false;
        };
        let claimed = shared(env, self.asked, number).map(|shared| shared.claimed());
        if self.tracks[number].is_retired || !matches!(claimed, Some(Ok((0, _)))) {
            self.is_pusher_awaited = false;
            return false;
        }
        let since = *self.awaited.get_or_insert_with(Since::now);
        let push = self.direct.push.as_ref();
        // What the message behind it may have been written to is not pulled any more: its sender is given more time.
        let patience_min = match self.trail.has_follower() {
            true => TURN_PATIENCE,
            false => Duration::ZERO,
        };
        if push.is_some_and(|push| since.is_within(push.patience.max(patience_min))) {
            return false;
        }
        self.is_pusher_awaited = false;
        self.take_over(env, gpu, number, u32::MAX)
    }

    /// Whether a message that is received in the same place is not over.
    fn is_behind(&self) -> bool {
        let before = self.before.as_ref();
        before.is_some_and(|before| before.is_below && !before.trail.is_over())
    }

    fn poll_pulls(&mut self) -> bool {
        let before = self.pulls.len();
        let (mut arrived, mut lost) = (0, None);
        let rank = self.peer.world_rank();
        self.pulls.retain_mut(|pull| match pull.copy.poll() {
            Ok(true) => {
                arrived += pull.bytes;
                false
            }
            Ok(false) => true,
            Err(error) => {
                if pull.copy.is_lost() {
                    lost = Some(Loss::Driver(error));
                } else {
                    fault::tried_again(Of::From(rank), Path::Several, &error);
                }
                true
            }
        });
        self.by_direct += arrived;
        self.lost = self.lost.or(lost);
        self.pulls.len() != before
    }

    fn poll_track(&mut self, env: &Env, gpu: &mut Gpu, number: usize) -> bool {
        let track = &mut self.tracks[number];
        if track.is_done() {
            return false;
        }
        let shared = shared(env, self.asked, track.number);
        let below = self.before.as_ref().filter(|before| before.is_below);
        let may_launch = below.is_none_or(|before| before.trail.is_launched(track.number));
        let step = match &shared {
            Some(shared) => track.poll(gpu, shared, &self.peer, &self.direct, may_launch),
            None => Err(TrackError::Stale.into()),
        };
        let moved = match step {
            Ok(moved) => moved,
            Err(trouble) => {
                self.retire(env, number, Some(&trouble));
                if self.tracks[number].is_pushed() {
                    gpu.push_failed(self.peer.world_rank());
                }
                if let Trouble::Driver(_) = trouble {
                    self.tracks[number].blame(gpu);
                }
                true
            }
        };
        // What a track that is not used any more has not brought is pulled, once nothing writes there.
        let track = &self.tracks[number];
        let is_left = track.is_retired && track.flying.is_empty();
        if is_left && !self.is_behind() && !self.is_written(env, track) {
            let track = &mut self.tracks[number];
            let (first, count) = (track.emptied, track.end - track.emptied);
            track.end = track.emptied;
            let span = track.part.span(first, count);
            self.bring_otherwise(gpu, number, span);
            return true;
        }
        moved
    }

    /// Leaves a track: its sender is late, where there is no trouble.
    fn retire(&mut self, env: &Env, number: usize, trouble: Option<&Trouble>) {
        let asked = self.asked;
        let track = &mut self.tracks[number];
        if track.is_retired {
            return;
        }
        track.is_retired = true;
        if let Some(shared) = shared(env, asked, track.number) {
            // What it has claimed already it may bring in vain.
            let _ = shared.take_back(u32::MAX);
        }
        stats::add(Counter::TracksRetired, 1);
        let of = Of::From(self.peer.world_rank());
        if self.peer.goes_on() {
            let remedy = "its part is taken directly";
            match trouble {
                Some(trouble) => fault::survived(of, Path::Several, trouble, remedy),
                None => fault::late(of, Path::Several, &"its sender does not go on", remedy),
            }
        }
    }

    /// Whether the receiver has nothing else to pull from this sender.
    fn is_lane_free(&self, gpu: &mut Gpu) -> bool {
        let load = gpu.load(
            self.direct.context,
            Purpose::Pull,
            u64::from(self.peer.world_rank()),
        );
        load.is_ok_and(|load| load == 0)
    }

    /// Takes over chunks that the sender has not begun with, from the track that has most of them left.
    fn claim_back(&mut self, env: &Env, gpu: &mut Gpu) -> bool {
        let asked = self.asked;
        let left = |track: &Track| {
            let (next, end) = shared(env, asked, track.number)?.claimed().ok()?;
            Some((u64::from(end - next) * track.part.chunk_bytes, next))
        };
        let open = self.tracks.iter().filter(|track| !track.is_retired);
        let open = open.filter_map(|track| Some((left(track)?, track.number)));
        let Some(((bytes, _), number)) = open.max().filter(|((bytes, _), _)| *bytes > 0) else {
            return false;
        };
        let chunk = self.tracks[number].part.chunk_bytes;
        // Half of what is left, as the sender goes on with the other half.
        let most = (bytes / 2).max(CLAIM_BYTES_MIN).div_ceil(chunk);
        self.take_over(env, gpu, number, most as u32)
    }

    /// Pulls all that the sender has not begun with. False where there is nothing of the kind.
    fn take_over_all(&mut self, env: &Env, gpu: &mut Gpu) -> bool {
        let mut took = false;
        for number in 0..self.tracks.len() {
            if !self.tracks[number].is_retired {
                took |= self.take_over(env, gpu, number, u32::MAX);
            }
        }
        took
    }

    /// Pulls the last of a track's chunks that the sender has not begun with. False where there is none.
    fn take_over(&mut self, env: &Env, gpu: &mut Gpu, number: usize, most: u32) -> bool {
        let track = &mut self.tracks[number];
        let Some(shared) = shared(env, self.asked, track.number) else {
            return false;
        };
        let Ok((first, count)) = shared.take_back(most) else {
            return false;
        };
        if count == 0 {
            return false;
        }
        track.end = first;
        track.is_cut = true;
        let span = track.part.span(first, count);
        stats::add(Counter::ChunksClaimedBack, u64::from(count));
        self.bring_otherwise(gpu, number, span);
        true
    }

    /// A sender that brings nothing is not waited for.
    fn watch(&mut self, env: &Env, gpu: &mut Gpu, moved: bool) {
        self.looks = self.looks.wrapping_add(1);
        if moved {
            self.looks = 0;
        }
        // This rank's own copies may take long, too.
        let is_flying = |track: &Track| !track.flying.is_empty();
        let is_at_work = !self.pulls.is_empty() || self.tracks.iter().any(is_flying);
        if moved || is_at_work || self.before.is_some() {
            if self.looks % LOOKS == 0 {
                self.moved = Instant::now();
                self.looked = self.moved;
            }
            return;
        }
        if self.looks % LOOKS == 0 {
            let now = Instant::now();
            let patience = Duration::from_micros(env.config.patience_us.into());
            if now.duration_since(self.looked) > ABSENCE {
                self.moved = now;
            }
            self.looked = now;
            if now.duration_since(self.moved) > patience {
                // A sender that waits for staging has begun with nothing that is missed: other messages have it all.
                if !self.take_over_all(env, gpu) {
                    self.leave_sender(env);
                }
                self.moved = now;
            }
        }
    }

    /// The sender has died: what it has not brought is read from its memory, which is there as long as it is mapped.
    pub fn give_up_on_the_dead(&mut self, env: &Env) {
        self.is_orphan = true;
        if let Some(told) = self.invited {
            // It writes no more.
            env.node.own().take_invitation_back(told);
        }
        self.leave_sender(env);
    }

    fn leave_sender(&mut self, env: &Env) {
        for number in 0..self.tracks.len() {
            let track = &self.tracks[number];
            // What is being pushed is waited for in any case, and so are this rank's own copies, if they are all.
            if track.launched < track.end && !self.is_written(env, track) {
                self.retire(env, number, None);
            }
        }
    }

    /// Whether the sender may be writing to the receiver's buffer.
    fn is_written(&self, env: &Env, track: &Track) -> bool {
        let shared = || shared(env, self.asked, track.number);
        let is_being_filled = || shared().is_some_and(|shared| shared.is_being_filled());
        track.is_pushed() && !self.is_orphan && is_being_filled()
    }

    fn close(&mut self, env: &Env) {
        if std::mem::replace(&mut self.is_open, false) {
            env.node.own().close_offer(self.asked);
        }
    }

    /// Whether nothing writes to the receiver's buffer any more.
    fn is_drained(&mut self, env: &Env) -> bool {
        self.pulls.retain_mut(|pull| !pull.copy.is_over());
        for track in &mut self.tracks {
            track.flying.retain_mut(|flying| !flying.copy.is_over());
        }
        let is_quiet = |track: &Track| track.flying.is_empty() && !self.is_written(env, track);
        self.pulls.is_empty() && self.invited.is_none() && self.tracks.iter().all(is_quiet)
    }

    /// Takes note of when its parts are over.
    pub fn time_parts(&mut self) {
        self.ends = Some(Ends::default());
    }

    fn note_ends(&mut self) {
        let Some(ends) = &mut self.ends else { return };
        let tracks = &self.tracks;
        let is_over = |is_host: bool| {
            let mut tracks = tracks.iter().filter(|track| track.is_host() == is_host);
            tracks.all(Track::is_done)
        };
        if ends.host.is_none() && is_over(true) {
            ends.host = Some(clock_ns());
        }
        let is_pulled = self.pulls.is_empty() && self.invited.is_none();
        if ends.others.is_none() && is_pulled && is_over(false) {
            ends.others = Some(clock_ns());
        }
    }

    /// How the part in host memory was. None where that was not asked for, or tells nothing.
    pub fn host_fared(&self) -> Option<HostFared> {
        let ends = self.ends.as_ref()?;
        if self.tracks.iter().any(|track| track.is_retired) {
            return None;
        }
        let is_taken_over = |track: &Track| track.is_host() && track.is_cut;
        if self.tracks.iter().any(is_taken_over) {
            return Some(HostFared::TakenOver);
        }
        let lead_ns = ends.others? as f64 - ends.host? as f64;
        Some(HostFared::Before(1e-3 * lead_ns))
    }

    /// Whether it comes by the direct path alone, as its sender pushes all of it.
    pub fn is_direct(&self) -> bool {
        self.tracks.iter().all(Track::is_pushed)
    }

    /// Whether this rank may read long parts of it from its sender's memory.
    pub fn reads(&self) -> bool {
        !self.is_direct() && self.invited.is_none() && self.by_invited == 0
    }

    /// What has not come straight from the sender's memory.
    pub fn parts(&self) -> Parts {
        if self.lost.is_some() {
            return Parts {
                overtaken: self.length,
                ..Parts::default()
            };
        }
        let mut parts = Parts {
            overtaken: self.overtaken,
            ..Parts::default()
        };
        for track in &self.tracks {
            match track.staging {
                Staging::Host => parts.host += track.arrived,
                Staging::Relay { .. } => parts.relay += track.arrived,
                Staging::Push => {}
            }
        }
        parts
    }

    /// What has come by which path.
    pub fn arrived(&self) -> Arrived {
        let is_lost = self.lost.is_some();
        let overtaken = if is_lost { self.length } else { self.overtaken };
        let mut bytes = SmallVec::from_slice(&[(Counter::SeveralOvertakenBytes, overtaken)]);
        if self.is_direct() {
            let pushed: u64 = self.tracks.iter().map(|track| track.arrived).sum();
            bytes.push((Counter::DirectPushedBytes, pushed + self.by_invited));
            let message = (Counter::DirectReceives, Counter::DirectBytes);
            return Arrived { message, bytes };
        }
        if !is_lost {
            bytes.push((Counter::SeveralDirectBytes, self.by_direct));
            bytes.push((Counter::SeveralPushedBytes, self.by_invited));
            bytes.extend(self.tracks.iter().map(|track| {
                let counter = match track.staging {
                    Staging::Host => Counter::SeveralHostBytes,
                    Staging::Relay { .. } => Counter::SeveralRelayBytes,
                    Staging::Push => Counter::SeveralPushedBytes,
                };
                (counter, track.arrived)
            }));
        }
        let message = (Counter::SeveralReceives, Counter::SeveralBytes);
        Arrived { message, bytes }
    }
}

/// How a message has come.
pub struct Arrived {
    /// The counters of messages that come so, and of their bytes.
    pub message: (Counter, Counter),
    bytes: SmallVec<[(Counter, u64); 4]>,
}

impl Arrived {
    /// Counts what came by which path.
    pub fn count(&self) {
        let bytes = self.bytes.iter();
        bytes.for_each(|(counter, bytes)| stats::add(*counter, *bytes));
    }
}

fn shared(env: &Env, asked: Asked, number: usize) -> Option<TrackOf<'_>> {
    let offer = env.node.own().board()?.offer(asked.index)?;
    offer.track(asked.tag, number)
}

/// What is to be pushed, where other parts go by staging: the longest part that they leave.
fn longest_gap(parts: &[Part], until: u64) -> Option<Part> {
    let gaps = gaps(parts, until).into_iter();
    let (offset, bytes) = gaps.max_by_key(|(_, bytes)| *bytes)?;
    Some(Part {
        way: Way::Push,
        offset,
        bytes,
        chunk_bytes: bytes.min(PUSH_BYTES_MAX),
        in_turn: false,
    })
}

/// What parts leave of a message, before a byte.
fn gaps(parts: &[Part], until: u64) -> Vec<(u64, u64)> {
    let mut spans: Vec<(u64, u64)> = parts.iter().map(|part| (part.offset, part.bytes)).collect();
    spans.sort_unstable();
    let (mut gaps, mut at) = (Vec::new(), 0);
    for (offset, bytes) in spans.into_iter().chain([(until, 0)]) {
        if offset > at {
            gaps.push((at, offset - at));
        }
        at = offset + bytes;
    }
    gaps
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gaps_are_what_parts_leave() {
        let part = |offset, bytes| Part {
            way: Way::Host,
            offset,
            bytes,
            chunk_bytes: 1,
            in_turn: false,
        };
        assert_eq!(gaps(&[part(0, 10), part(10, 5)], 20), [(15, 5)]);
        assert_eq!(gaps(&[part(12, 8), part(5, 5)], 20), [(0, 5), (10, 2)]);
        assert_eq!(gaps(&[part(0, 20)], 20), []);
    }
}
