//! All mutable state of the engine, and its progress.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use rustc_hash::FxBuildHasher;
use slab::Slab;

use crate::config::Config;
use crate::cuda::{clock_ns, Stay};
use crate::engine::collective::Collective;
use crate::engine::counts::Counts;
use crate::engine::early::Pending;
use crate::engine::matched::Matched;
use crate::engine::pace::Pace;
use crate::engine::persistent::PersistentSend;
use crate::engine::receive::{Places, Receive};
use crate::engine::requests;
use crate::engine::send::Send;
use crate::engine::{landing, Env};
use crate::mpi::{Message, Request};
use crate::node::Readiness;
use crate::policy::decided;
use crate::policy::launch::{self, Short, LAUNCHES_MAX};
use crate::stats::{self, Counter};
use crate::transfer::gpu::Gpu;
use crate::transfer::history::PeerHistory;
use crate::transfer::route::Router;

/// What a request handle held by the program stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Entry {
    /// A receive, under its native handle.
    Receive(usize),
    /// A non-blocking send of the engine's, under a generalized request.
    Send(usize),
    /// A persistent send of the engine's, under a persistent request that is never started.
    Persistent(usize),
    /// A persistent collective that the MPI library lacks, likewise.
    Collective(usize),
}

/// How often the peers of unfinished transfers are checked for being alive.
const LIVENESS_PERIOD: Duration = Duration::from_millis(250);

/// The clock is read once in this many rounds of progress. Few enough for a helper that sleeps a millisecond
/// between rounds.
const LIVENESS_ROUNDS: u32 = 64;

/// How often a copy that is waited for is looked at between two rounds.
const CLOSER_LOOKS: u32 = 3;

/// Such looks are made with at most this many sends out: one, and one before it whose ATS has not come yet.
const OPEN_LOOKED_AT: usize = 2;

/// Eager sends behind the oldest one that are looked at each time.
const HOSTED_LOOKED_AT: usize = 4;

/// How many rounds of progress lie between two looks whether it is time to collect garbage; fewer for a program
/// that makes calls which do not wait.
const GARBAGE_ROUNDS: u32 = 1024;
pub(super) const GARBAGE_CALLS: u32 = 8;
/// The same for calls that test requests of the MPI library alone. A program may make nothing else for long,
/// and the helper seldom finds it inside one of them.
const GARBAGE_NATIVE_TESTS: u32 = 64;
/// After a progress step in such a call that moved nothing, only every so many-th call makes one.
const IDLE_NATIVE_TESTS: u32 = 8;

/// Tests of a program that computes look again at what is under way after this part of the time that has
/// passed since something moved. So its end is seen at most that much later than it could have been.
const REST_SHARE: u64 = 8;
/// The delay is at most this, too: within it an event that no forecast knows of is seen, such as the death of
/// a peer.
const REST_MAX_NS: u64 = 5_000_000;

/// Until when the tests of a program that computes need not look at what is under way. With 12 messages of 1
/// GiB a test took 1.1 us of which the driver's answer was 0.3, and looking at them took as much (two H100s;
/// `docs/results/h200-x2-computing-turns.txt`).
#[derive(Debug, Default)]
struct Rest {
    until_ns: u64,
    /// When something last moved, as far as tests have seen.
    moved_ns: u64,
    /// Something has moved since then.
    has_moved: bool,
}

/// The engine's mutable state.
pub struct Core {
    /// Requests held by the program. No key is a native send request, because those are not unique.
    pub(super) table: HashMap<Request, Entry, FxBuildHasher>,
    pub(super) receives: Slab<Receive>,
    /// Receives posted while this rank is not live, under their native handles. Those are no keys of `table`.
    pub(super) early: Pending,
    pub(super) sends: Slab<Send>,
    pub(super) persistents: Slab<PersistentSend>,
    /// Native persistent sends from host memory, which the engine makes when their receiver wishes that.
    pub(super) native_persistents: HashMap<Request, usize, FxBuildHasher>,
    pub(super) collectives: Slab<Collective>,
    /// The request handles of sends that the program holds.
    pub(super) requests: requests::Pool,
    /// Receives whose payload is on its way.
    pub(super) moving: Vec<usize>,
    /// Incomplete receives and sends that the program has freed.
    pub(super) orphans: Vec<(Request, Entry)>,
    /// Sends whose RTS is out, except those that are `eager`.
    pub(super) open: Vec<usize>,
    /// Sends whose whole payload is in host memory, in the order in which it got there. Their receivers need
    /// nothing more of this rank, which gets the slots and cells back when they are done. There may be
    /// thousands.
    pub(super) eager: VecDeque<usize>,
    /// Which of `eager` is looked at next.
    hosted_turn: usize,
    /// The doorbell's value when all of `eager` were last looked at because there was no room.
    hosted_bell: u32,
    /// Payloads whose native send is not complete although the program's send is.
    pub(super) draining: VecDeque<(usize, u64)>,
    /// Bytes held by `draining`.
    pub(super) draining_bytes: u64,
    /// Messages that a matched probe has taken and that may be RTSs.
    pub(super) matched: HashMap<Message, Matched>,
    pub(super) sent: Counts,
    /// What was learnt about peers.
    pub(super) history: PeerHistory,
    pub(super) received: Counts,
    pub(super) gpu: Gpu,
    /// Chooses the paths of messages.
    pub(super) router: Router,
    /// When a message of this rank was last seen to be taken, among those that wait for that.
    pub(super) taken_at: Option<Instant>,
    pub(super) landings: landing::Pool,
    /// RTSs announced to this rank that it has taken.
    pub(super) taken: u64,
    /// Receives of which it is known which message they will take.
    pub(super) expected: usize,
    /// Receives whose messages were claimed before the MPI library brought their RTSs.
    pub(super) awaited: usize,
    /// Receives posted before this rank was live in which no RTS could be recognized.
    pub(super) blind: usize,
    /// Receives posted before this rank was live in which the RTS of a message shorter than an RTS could not
    /// be recognized.
    pub(super) blind_to_small: usize,
    /// The ranges of receives that land in the program's own memory.
    pub(super) places: Places,
    /// Posted receives in which an RTS may land.
    pub(super) posted: usize,
    /// Number given to the latest receive.
    pub(super) serial: u64,
    /// Something is waited for that only the MPI library's progress brings: see [`Engine::progress`].
    ///
    /// [`Engine::progress`]: crate::engine::Engine::progress
    pub(super) progress_wanted: bool,
    /// MPI has been asked in this round about a receive that is not complete.
    pub(super) asked: bool,
    /// After that, another receive that may be complete was passed over.
    pub(super) passed_over: bool,
    /// For calls that test for any of several requests: each call begins with another request.
    pub(super) turn: usize,
    pub(super) helper_runs: bool,
    pub(super) ready: Readiness,
    /// A send is to be looked at again whether or not a peer rings.
    pub(super) serving: bool,
    /// Not before this moment, unless a receiver rings.
    serve_at: Option<Instant>,
    /// A thread of the program works here, or one is inside an MPI call meanwhile. So the program does not
    /// destroy its contexts.
    pub(super) is_inside: bool,
    /// Set while that thread waits and comes back at once.
    pub(super) is_waiting: bool,
    /// Whether the program computes while messages are under way.
    pub(super) pace: Pace,
    rest: Rest,
    /// Since when queued copies have been held back for more to join, by [`clock_ns`]; 0 if none are.
    held_ns: u64,
    bell: u32,
    checked: Instant,
    pub(super) rounds: u32,
    native_tests: u32,
    /// The latest progress step in a call that tested native requests alone moved something.
    pub(super) was_native_step_useful: bool,
}

impl Core {
    /// Nothing under way.
    pub fn new(config: &Config) -> Core {
        Core {
            table: HashMap::default(),
            receives: Slab::new(),
            early: Pending::default(),
            sends: Slab::new(),
            persistents: Slab::new(),
            native_persistents: HashMap::default(),
            collectives: Slab::new(),
            requests: requests::Pool::default(),
            moving: Vec::new(),
            orphans: Vec::new(),
            open: Vec::new(),
            eager: VecDeque::new(),
            hosted_turn: 0,
            hosted_bell: 0,
            draining: VecDeque::new(),
            draining_bytes: 0,
            matched: HashMap::new(),
            sent: Counts::default(),
            history: PeerHistory::default(),
            received: Counts::default(),
            gpu: Gpu::new(config),
            router: Router::new(config),
            taken_at: None,
            landings: landing::Pool::new(usize::try_from(config.landing).unwrap_or(usize::MAX)),
            taken: 0,
            expected: 0,
            awaited: 0,
            blind: 0,
            blind_to_small: 0,
            places: Places::default(),
            posted: 0,
            serial: 0,
            progress_wanted: false,
            asked: false,
            passed_over: false,
            turn: 0,
            helper_runs: false,
            ready: Readiness::No,
            serving: false,
            serve_at: None,
            is_inside: false,
            is_waiting: false,
            pace: Pace::default(),
            rest: Rest::default(),
            held_ns: 0,
            bell: 0,
            checked: Instant::now(),
            rounds: 0,
            native_tests: 0,
            was_native_step_useful: true,
        }
    }

    /// Streams could not be counted any more, so that a probe could not tell an RTS from another message.
    pub fn counts_lost(&self) -> bool {
        self.sent.overflowed() || self.received.overflowed()
    }

    /// Nothing is under way and nothing is posted: no ring of a peer is about this rank's messages.
    pub fn is_at_rest(&self) -> bool {
        self.moving.is_empty() && self.sends_out() == 0 && self.posted == 0 && !self.serving
    }

    /// For a helper that sleeps, or is about to: tells peers that they need not wake it for what they send as
    /// long as no receive is posted. What comes meanwhile is seen once one is posted.
    pub fn say_if_nothing_is_received(&self, env: &Env) {
        let own = env.node.own();
        if self.posted == 0 && !own.receives_nothing() {
            own.set_receives_nothing(true);
        }
    }

    /// Something is worth another look soon: copies are under way, a peer is being served, one has rung, or
    /// an RTS is announced that may land in a posted receive.
    pub fn is_owing(&self, env: &Env) -> bool {
        !self.moving.is_empty() || self.serving || self.is_rung(env) || self.is_announced(env)
    }

    /// A receiver of this rank's messages has rung, and this rank has not looked since.
    fn is_rung(&self, env: &Env) -> bool {
        self.sends_out() > 0 && env.node.own().doorbell() != self.bell
    }

    /// Sends whose receivers are not done, as far as this rank has looked.
    pub(super) fn sends_out(&self) -> usize {
        self.open.len() + self.eager.len()
    }

    /// An RTS that may land in a posted receive is on its way.
    pub(super) fn is_announced(&self, env: &Env) -> bool {
        self.announced(env) > 0
    }

    /// How many such RTSs are on their way; 0 if nothing is posted.
    fn announced(&self, env: &Env) -> u64 {
        if self.posted == 0 {
            return 0;
        }
        // Messages that are matched early are taken before they are announced.
        let announced = env.node.own().announced();
        u64::try_from(announced.wrapping_sub(self.taken as u32) as i32).unwrap_or(0)
    }

    /// How long the helper may wait for the next call of a program that computes and tests in between. Such a
    /// program looks after its messages by itself, and what is under way needs nobody before.
    pub fn patience(&self) -> Duration {
        let mut moving = self.moving.iter();
        if self.serving || !moving.all(|id| self.receives[*id].is_by_copies()) {
            return Duration::ZERO;
        }
        self.pace.patience()
    }

    /// A message between device buffers goes to `rank`, or has come from it.
    pub(super) fn note_peer_mix(&mut self, env: &Env, rank: u32) {
        if rank != env.world_rank {
            self.history.mix.note_other(rank);
        }
    }

    /// The payload of a receive is on its way from now on.
    pub(super) fn set_moving(&mut self, id: usize) {
        self.moving.push(id);
        self.note_moved();
    }

    /// Something moved that the forecast did not have, so the next test looks again.
    fn note_moved(&mut self) {
        (self.rest.until_ns, self.rest.has_moved) = (0, true);
    }

    /// Like [`Core::progress`], for a test of the program's at that time. While the program computes, nothing
    /// is asked about what cannot be over yet.
    pub fn progress_of_test(&mut self, env: &Env, now_ns: u64) {
        if self.may_rest(env, now_ns) {
            self.rounds = self.rounds.wrapping_add(1);
            stats::add(Counter::TestsRested, 1);
            return;
        }
        self.progress(env);
        if std::mem::take(&mut self.rest.has_moved) {
            self.rest.moved_ns = now_ns;
        }
        if self.pace.computes() {
            self.rest.until_ns = self.looked_at_again_ns(now_ns);
        }
    }

    /// Whether everything under way is forecast to go on, and nobody has rung.
    fn may_rest(&self, env: &Env, now_ns: u64) -> bool {
        now_ns < self.rest.until_ns
            && self.pace.computes()
            && !self.moving.is_empty()
            && !self.is_announced(env)
            && (self.open.is_empty() || !self.serving)
            && !self.is_rung(env)
            && !self.gpu.relays.are_wished(env)
    }

    /// When the first transfer under way is to be looked at again; 0 unless all of them are copies of whole
    /// messages.
    fn looked_at_again_ns(&self, now_ns: u64) -> u64 {
        let later_ns = now_ns + now_ns.saturating_sub(self.rest.moved_ns) / REST_SHARE;
        let mut first_ns = now_ns + REST_MAX_NS;
        for id in &self.moving {
            let receive = &self.receives[*id];
            if !receive.is_by_copies() {
                return 0;
            }
            first_ns = first_ns.min(receive.due_ns().unwrap_or(later_ns));
        }
        first_ns
    }

    /// Moves on everything that can be moved without an MPI call. True if anything did.
    pub fn progress(&mut self, env: &Env) -> bool {
        let moved = self.progress_of_all(env);
        if moved {
            self.note_moved();
        }
        moved
    }

    fn progress_of_all(&mut self, env: &Env) -> bool {
        let _stay = Stay::begin();
        let mut moved = self.take_announced(env);
        // Oldest first: messages whose turn comes at the same time are launched together.
        let (mut kept, mut i, mut has_ended) = (0, 0, false);
        while i < self.moving.len() {
            let id = self.moving[i];
            let (did, done) = self.advance_receive(env, id);
            moved |= did || done;
            i += 1;
            if done {
                if !std::mem::replace(&mut has_ended, true) {
                    // Copies launched together with it are over, too.
                    let others = self.moving[i..].iter();
                    others.for_each(|id| self.receives[*id].will_end());
                }
            } else {
                self.moving[kept] = id;
                kept += 1;
            }
        }
        self.moving.truncate(kept);
        // Payloads that have landed together are lifted together.
        self.launch(env);
        moved |= self.gpu.relays.serve(env);
        self.gpu.advance_survey(env);
        if self.is_rung(env) || (!self.open.is_empty() && self.is_to_serve()) {
            moved |= self.serve(env);
        }
        self.rounds = self.rounds.wrapping_add(1);
        // The clock is read in some rounds only.
        if !moved
            && self.rounds % LIVENESS_ROUNDS == 0
            && (self.sends_out() > 0
                || !self.moving.is_empty()
                || self.awaited > 0
                || self.gpu.relays.are_lent())
            && self.checked.elapsed() > LIVENESS_PERIOD
        {
            self.checked = Instant::now();
            self.give_up_on_the_dead(env);
            self.gpu.relays.reclaim(env);
            // Also if nobody has rung: whoever writes over a slot does not ring.
            moved |= self.look_at_open_sends(env);
            moved |= self.close_received(env, usize::MAX);
        }
        if self.rounds % GARBAGE_ROUNDS == 0 {
            self.collect_garbage(env);
        }
        moved
    }

    /// Looks at the open sends. True if anything moved.
    fn serve(&mut self, env: &Env) -> bool {
        // Read before the look: what is said meanwhile is looked at the next time.
        self.bell = env.node.own().doorbell();
        self.look_at_open_sends(env)
    }

    /// Between the claims of two messages, does what the receiver asks of this rank, because the links are
    /// idle until then. With several ranks the links are mostly busy with messages of others, and a look at
    /// the sends would take their lines from the rank that is just claiming one.
    pub(super) fn serve_if_asked(&mut self, env: &Env) {
        if !self.history.mix.are_several() && self.is_rung(env) && self.serve(env) {
            stats::add(Counter::ServedBetween, 1);
        }
    }

    /// Looks a few times in a row at the only transfer under way. The rest of a round takes three times as
    /// long as the question whether a copy has ended, which is what a small message waits for. True if
    /// anything moved.
    pub(super) fn look_closer(&mut self, env: &Env) -> bool {
        // An RTS that has yet to land is not kept waiting.
        if self.posted != 0 {
            return false;
        }
        let _stay = Stay::begin();
        let mut moved = false;
        for _ in 0..CLOSER_LOOKS {
            moved = match (self.moving.as_slice(), self.open.as_slice()) {
                ([only], open) => {
                    // This rank may be writing what goes the other way.
                    let is_exchange =
                        (1..=OPEN_LOOKED_AT).contains(&open.len()) && self.is_to_serve();
                    let only = *only;
                    let mut moved = self.advance_only(env, only);
                    if !moved && is_exchange && self.look_at_open_sends(env) {
                        // The two mostly end together.
                        self.advance_only(env, only);
                        moved = true;
                    }
                    moved
                }
                ([], open) if open.len() <= OPEN_LOOKED_AT && self.is_to_serve() => {
                    self.look_at_open_sends(env)
                }
                _ => break,
            };
            if moved {
                break;
            }
            std::hint::spin_loop();
        }
        self.gpu.launch();
        moved
    }

    /// Launches what was queued. Short gets are held back for a moment if others are on their way that may
    /// join them.
    pub(super) fn launch(&mut self, env: &Env) {
        if self.is_to_hold(env) {
            return;
        }
        if std::mem::take(&mut self.held_ns) != 0 {
            stats::add(Counter::LaunchesHeld, 1);
        }
        self.gpu.launch();
    }

    fn is_to_hold(&mut self, env: &Env) -> bool {
        let announced = self.announced(env);
        if !self.is_waiting || announced == 0 {
            return false;
        }
        let Some(gathered) = self.gpu.gathered(LAUNCHES_MAX - 1) else {
            return false;
        };
        let short = Short {
            announced,
            moving: self.moving.len(),
            are_several: self.history.mix.are_several(),
            count: gathered.count,
            longest: gathered.longest,
        };
        let Some(most_ns) = decided!("launch.hold", short, launch::hold(&short)) else {
            return false;
        };
        let now_ns = clock_ns();
        if self.held_ns == 0 {
            self.held_ns = now_ns;
        }
        now_ns.saturating_sub(self.held_ns) < most_ns
    }

    /// Moves on the only receive whose payload is on its way. True if anything moved.
    fn advance_only(&mut self, env: &Env, id: usize) -> bool {
        let (did, done) = self.advance_receive(env, id);
        if done {
            self.moving.clear();
        }
        did || done
    }

    /// Collects garbage now and then. The program may destroy a context while it makes no MPI call, and a driver
    /// that is inside one may crash then: contexts are entered only while the program is inside a call.
    pub fn collect_garbage(&mut self, env: &Env) {
        let is_sending = !self.sends.is_empty();
        self.gpu.collect_garbage(env, self.is_inside, is_sending);
    }

    /// A call of the program tests requests of the MPI library alone. Returns true if a progress step is
    /// due (MPI 4.1 section 3.5): the helper may not get a processor beside a program that tests all the time.
    #[inline]
    pub(super) fn note_native_test(&mut self, env: &Env) -> bool {
        // The time until the next test of an engine request is not the program's own work.
        self.pace.interrupt();
        self.native_tests = self.native_tests.wrapping_add(1);
        if self.native_tests % GARBAGE_NATIVE_TESTS == 0 {
            self.is_inside = true;
            self.collect_garbage(env);
        }
        let is_due = self.was_native_step_useful || self.native_tests % IDLE_NATIVE_TESTS == 0;
        is_due && self.is_owing(env)
    }

    /// Sends are to be looked at in the next round.
    pub(super) fn serve_now(&mut self) {
        self.serve_from(None);
    }

    /// The same, or not before `moment`, if there is nothing to do for a send earlier.
    pub(super) fn serve_from(&mut self, moment: Option<Instant>) {
        self.serve_at = match (self.serving, self.serve_at, moment) {
            (true, Some(earlier), Some(moment)) => Some(earlier.min(moment)),
            (true, _, _) => None,
            (false, _, moment) => moment,
        };
        self.serving = true;
    }

    fn is_to_serve(&self) -> bool {
        let is_due = |at: &Instant| Instant::now() >= *at;
        self.serving && self.serve_at.as_ref().is_none_or(is_due)
    }

    fn look_at_open_sends(&mut self, env: &Env) -> bool {
        let mut moved = false;
        self.serving = false;
        stats::add(Counter::LooksAtSends, self.open.len() as u64);
        let mut i = 0;
        while i < self.open.len() {
            let id = self.open[i];
            let step = self.advance_send(env, id);
            moved |= step.moved;
            if step.serving {
                self.serve_from(step.until);
            }
            if step.closed || step.eager {
                self.open.swap_remove(i);
                self.eager.extend(step.eager.then_some(id));
            } else {
                i += 1;
            }
        }
        // One launch fills pieces of several messages.
        self.gpu.launch();
        moved | self.close_received(env, HOSTED_LOOKED_AT)
    }

    /// Closes eager sends whose receivers are done. All are looked at from the oldest on, as messages are
    /// mostly received in the order in which they were sent, until one is not done; then `others` more, in
    /// turn. True if there was one.
    pub(super) fn close_received(&mut self, env: &Env, others: usize) -> bool {
        let (mut moved, mut looks) = (false, 0);
        while let Some(id) = self.eager.front().copied() {
            looks += 1;
            if !self.is_closed_by_now(env, id) {
                break;
            }
            self.eager.pop_front();
            moved = true;
        }
        let others = others.min(self.eager.len());
        stats::add(Counter::LooksAtSends, looks + others as u64);
        for _ in 0..others {
            let at = match self.hosted_turn < self.eager.len() {
                true => self.hosted_turn,
                false => 0,
            };
            let id = self.eager[at];
            let is_closed = self.is_closed_by_now(env, id);
            if is_closed {
                self.eager.swap_remove_back(at);
            }
            moved |= is_closed;
            self.hosted_turn = at + usize::from(!is_closed);
        }
        moved
    }

    fn is_closed_by_now(&mut self, env: &Env, id: usize) -> bool {
        let step = self.advance_send(env, id);
        if step.serving {
            self.serve_from(step.until);
        }
        step.closed
    }

    /// Called when no slot or cell is free: looks at all eager sends if a receiver has rung since the last
    /// time. True if there is room now.
    pub(super) fn make_room(&mut self, env: &Env) -> bool {
        let bell = env.node.own().doorbell();
        std::mem::replace(&mut self.hosted_bell, bell) != bell
            && self.close_received(env, usize::MAX)
    }

    pub(super) fn all_sends_out(&self) -> Vec<usize> {
        self.open.iter().chain(&self.eager).copied().collect()
    }

    fn give_up_on_the_dead(&mut self, env: &Env) {
        let mut dead: HashMap<u32, bool> = HashMap::new();
        let mut is_dead = |peer: &crate::node::Peer| {
            peer.world_rank() != env.world_rank
                && *dead
                    .entry(peer.world_rank())
                    .or_insert_with(|| !peer.alive())
        };
        for id in self.all_sends_out() {
            if self.peer_of_send(id).is_some_and(|peer| is_dead(&peer)) {
                self.fail_send(env, id);
                self.serve_now();
            }
        }
        for id in self.moving.clone() {
            if self.peer_of_receive(id).is_some_and(&mut is_dead) {
                self.fail_receive(env, id);
            }
        }
        self.orphan_claimed(env, &mut is_dead);
        for (rank, _) in dead.into_iter().filter(|(_, dead)| *dead) {
            if let Some(peer) = env.node.peer(rank) {
                self.gpu.forget_peer(u64::from(peer.pid()));
            }
        }
    }
}
