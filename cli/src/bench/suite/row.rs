//! One row of a suite on one rank: its iterations before what counts, its blocks, in turns where the library does something else
//! in each, and one that is verified.

use std::ffi::CString;
use std::time::{Duration, Instant};

use anyhow::{bail, Context};

use super::{verified, Ask, Fixed, Plan, Turn, ARRIVAL, SIMULATED_ARRIVAL};
use crate::bench::buffer::Place;
use crate::bench::check::Checker;
use crate::bench::counters::{Counters, Values};
use crate::bench::exchange::{Pair, Prepared, Spot};
use crate::bench::mpi::Requests;
use crate::bench::Clock;

/// A row whose first iteration takes longer than this is measured by one more, not by several blocks.
const LONG: Duration = Duration::from_millis(300);
/// Most blocks of a row.
const BLOCKS: usize = 16;
/// How long the first row of a launch goes on before it is measured, seconds: GPUs and processors that were idle are slow, and
/// memory is met for the first time. One H100, vanilla, latency of 4 KiB between a device and the host: 15.4 us in the first rows of
/// a launch after five iterations, 10.7 in later ones.
const FIRST_SETTLES: f64 = 0.05;
/// A row goes on before it is measured until iterations take at least this part of the time of those before them. A row of 50 ms
/// could else be over with what a library does once, when it meets the first messages that are so long: windows of 16 of 4 MiB on
/// two H100s take 0.25 ms, and some 3 ms each among the first few dozens.
const SETTLED: f64 = 0.9;
/// How often it goes on at most.
const SETTLES_MAX: u32 = 8;
/// How often each of those that take turns has one in a row, at least and at most. The more often, the less do they differ by what
/// changes meanwhile: two H100s have stretches of some 10 ms in which every message of 4 KiB takes a fifth longer.
const TURNS: std::ops::RangeInclusive<f64> = 5.0..=64.0;
/// Iterations of a turn at least, where so many fit into a row. What a library has learnt of a program's messages, it may have to
/// learn again after a turn of the other: of 5 iterations of 16 and 32 MiB there and back a tenth more were not written by
/// invited senders than of 20, which was 2 to 5 % of the time.
const TURN_ITERATIONS: f64 = 16.0;
/// The part of a turn's iterations that goes before those measured, and how many that are at least.
const TURN_SETTLES: u32 = 4;
const TURN_SETTLES_MIN: u32 = 2;
/// By so much more than one and a half times the median an iteration is slow, seconds.
const SLOW_BY: f64 = 200e-6;
/// A void block is repeated so often at most.
const REPEATS: u32 = 8;

/// What one rank did for a row.
#[derive(Default)]
pub(super) struct Done {
    /// Seconds of each block, of one turn after the other where there are turns.
    pub(super) blocks: Vec<f64>,
    /// Iterations of a block.
    pub(super) iterations: u32,
    /// Of the blocks, as [`late`](super::Measured::late).
    pub(super) late: f64,
    /// As [`slow`](super::Measured::slow).
    pub(super) slow: Option<u64>,
    /// Of each kind of turn.
    pub(super) parts: Vec<Part>,
}

/// What one rank did in the turns of one kind, whether they count or not.
#[derive(Default)]
pub(super) struct Part {
    /// Messages sent by the first of a pair, and acknowledgements.
    pub(super) messages: u64,
    pub(super) acknowledgements: u64,
    /// What the library counted.
    pub(super) counted: Values,
    /// Messages with wrong data.
    pub(super) errors: u64,
}

impl Part {
    /// Adds so many iterations.
    fn add(&mut self, ask: &Ask, rounds: u64) {
        self.messages += rounds * ask.window as u64;
        self.acknowledgements += rounds;
    }

    /// Adds what was counted from one time to another.
    pub(super) fn count(&mut self, before: &Values, after: &Values) {
        let values = before
            .iter()
            .zip(after)
            .map(|(before, after)| after - before);
        self.counted.resize(after.len(), 0);
        for (counted, value) in self.counted.iter_mut().zip(values) {
            *counted += value;
        }
    }
}

/// The turns of a plan: without any, the one turn is that of whatever there is.
pub(super) struct Turns {
    /// Each that differs from the others.
    pub(super) kinds: Vec<Turn>,
    /// Of which kind they are, in their order.
    pub(super) order: Vec<usize>,
}

impl Turns {
    pub(super) fn of(plan: &Plan) -> Turns {
        let all = match plan.turns.as_slice() {
            [] => &[Turn::Taking(None)],
            turns => turns,
        };
        let mut turns = Turns {
            kinds: Vec::new(),
            order: Vec::new(),
        };
        for turn in all {
            let known = turns.kinds.iter().position(|kind| kind == turn);
            turns.order.push(known.unwrap_or(turns.kinds.len()));
            if known.is_none() {
                turns.kinds.push(turn.clone());
            }
        }
        turns
    }
}

/// How a row began.
struct Settled {
    /// One iteration takes longer than [`LONG`].
    long: bool,
    /// Seconds of an iteration.
    each: f64,
    rounds: u64,
}

/// One row on one rank that takes part in it.
pub(super) struct Row<'a, 'p> {
    pub(super) plan: &'a Plan,
    pub(super) library: Option<&'a Counters>,
    pub(super) clock: &'a Clock,
    pub(super) simulated: bool,
    pub(super) requests: &'a mut Requests,
    pub(super) pair: &'a mut Pair<'p>,
    pub(super) place: Place,
    pub(super) ask: &'a Ask,
    /// The messages of an iteration, where they are persistent requests.
    pub(super) prepared: Option<Prepared>,
}

impl Row<'_, '_> {
    /// Measures it, and verifies it where that is asked for.
    pub(super) fn measure(mut self, turns: &Turns) -> anyhow::Result<Done> {
        let (window, legs) = (self.ask.window, self.pair.legs()[0].len().max(1));
        let places = match (self.place, self.simulated) {
            (Place::H, _) => ARRIVAL / self.ask.stride().max(1) / legs,
            (Place::D, true) => SIMULATED_ARRIVAL / self.ask.stride().max(1) / legs,
            (Place::D, false) => 1,
        };
        // Messages from different ranks never share one.
        let places = places.clamp(1, window);
        let place = |message: usize| {
            (message / window * places + message % window % places) * self.ask.stride()
        };
        let spot = |offset| Spot {
            offset,
            bytes: self.ask.bytes,
        };
        let out = vec![spot(0); window * legs];
        let into: Vec<Spot> = (0..window * legs)
            .map(|message| spot(place(message)))
            .collect();
        let spots = [&out[..], &into[..]];
        let mut done = Done::default();
        self.prepared = (self.ask.persistent).then(|| self.pair.prepare(&out, &into));
        if let Some(fixed) = self.ask.fixed {
            let mut part = Part::default();
            self.counted(&Turn::Taking(None), &mut part, |row| {
                row.as_users_do(spots, fixed, &mut done);
                Ok(())
            })?;
            part.add(self.ask, u64::from(fixed.warmup + fixed.iterations));
            done.parts.push(part);
            return self.end(turns, done);
        }
        let (mut long, mut each) = (false, 0.0f64);
        for kind in &turns.kinds {
            let mut part = Part::default();
            let found = self.counted(kind, &mut part, |row| Ok(row.settle(spots)))?;
            long |= found.long;
            each = each.max(found.each);
            part.add(self.ask, found.rounds);
            done.parts.push(part);
        }
        let (blocks, iterations) = self.extent(long, each);
        let settles = match (self.plan.turns.is_empty(), long) {
            (false, false) => (iterations / TURN_SETTLES).max(TURN_SETTLES_MIN),
            _ => 0,
        };
        done.iterations = iterations;
        let mut repeats = REPEATS;
        let mut parts = std::mem::take(&mut done.parts);
        for _ in 0..blocks {
            for kind in &turns.order {
                let part = &mut parts[*kind];
                let made = self.counted(&turns.kinds[*kind], part, |row| {
                    Ok(row.turn(spots, settles, iterations, &mut repeats, &mut done))
                })?;
                part.add(self.ask, made);
            }
        }
        done.parts = parts;
        self.end(turns, done)
    }

    /// Verifies it where that is asked for.
    fn end(&mut self, turns: &Turns, mut done: Done) -> anyhow::Result<Done> {
        if let Some(prepared) = self.prepared.take() {
            self.pair.discard(prepared);
        }
        if self.plan.verify {
            for (kind, part) in turns.kinds.iter().zip(&mut done.parts) {
                part.errors = self.counted(kind, part, Row::verify)?;
                part.messages += verified(self.ask) as u64;
                part.acknowledgements += 1;
            }
        }
        self.begin(&Turn::Taking(None))?;
        Ok(done)
    }

    /// One block of so many iterations, timed behind those before it without a pause, as the OSU benchmarks
    /// do.
    fn as_users_do(&mut self, spots: [&[Spot]; 2], fixed: Fixed, done: &mut Done) {
        self.pair.meet();
        for _ in 0..fixed.warmup {
            self.iteration(spots);
        }
        let mut times = Vec::with_capacity(fixed.iterations as usize + 1);
        times.push(self.clock.seconds());
        for _ in 0..fixed.iterations {
            self.iteration(spots);
            times.push(self.clock.seconds());
        }
        let mut each: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        each.sort_by(f64::total_cmp);
        let bound = 1.5 * each[each.len() / 2] + SLOW_BY;
        let slow = each.iter().filter(|seconds| **seconds > bound).count();
        done.slow = Some(slow as u64);
        done.iterations = fixed.iterations;
        done.blocks
            .push(self.reported(times[times.len() - 1] - times[0]));
    }

    fn iteration(&mut self, [out, into]: [&[Spot]; 2]) {
        match &mut self.prepared {
            Some(prepared) => self.pair.exchange_again(prepared),
            None => self.pair.exchange(out, into, self.requests),
        }
    }

    /// What is done in a turn of this kind, with what the library counts meanwhile.
    fn counted<T>(
        &mut self,
        kind: &Turn,
        part: &mut Part,
        what: impl FnOnce(&mut Self) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        self.begin(kind)?;
        let before = self.read();
        let done = what(self)?;
        part.count(&before, &self.read());
        Ok(done)
    }

    fn read(&self) -> Values {
        self.library.map(Counters::read).unwrap_or_default()
    }

    /// One block that counts, after so many iterations that do not. Gives how many iterations were made, those of void blocks too.
    fn turn(
        &mut self,
        spots: [&[Spot]; 2],
        settles: u32,
        iterations: u32,
        repeats: &mut u32,
        done: &mut Done,
    ) -> u64 {
        let mut rounds = 0;
        loop {
            if settles > 0 {
                self.block(spots, settles);
            }
            let before = self.clock.late_seconds().unwrap_or(0.0);
            let seconds = self.block(spots, iterations);
            rounds += u64::from(settles) + u64::from(iterations);
            let late = (self.clock.late_seconds().unwrap_or(0.0) - before) / seconds.max(1e-9);
            let late = f64::from_bits(self.decide(late.to_bits()));
            if late > self.plan.late_max && *repeats > 0 {
                *repeats -= 1;
                continue;
            }
            done.late = done.late.max(late);
            done.blocks.push(self.reported(seconds));
            return rounds;
        }
    }

    /// Has the library do on all ranks that take part what it does in turns of this kind, where the plan has turns.
    fn begin(&self, kind: &Turn) -> anyhow::Result<()> {
        if self.plan.turns.is_empty() {
            return Ok(());
        }
        let library = self.library.context("turns need the library")?;
        // All that was sent is received.
        self.pair.meet();
        let left = library.stand_aside(*kind == Turn::Aside);
        if left != 0 {
            bail!("the library cannot stand aside: {left} messages are in the way");
        }
        if let Turn::Taking(paths) = kind {
            let list = paths.as_deref().map(CString::new).transpose()?;
            if !library.choose_paths(list.as_deref()) {
                bail!("the library cannot take these paths only: {paths:?}");
            }
        }
        Ok(())
    }

    /// Iterations before those that are measured.
    fn settle(&mut self, spots: [&[Spot]; 2]) -> Settled {
        let mut rounds = 1;
        let first = Instant::now();
        self.block(spots, 1);
        let long = self.decide(u64::from(first.elapsed() > LONG)) != 0 && !self.simulated;
        let warmup = match (long, self.simulated) {
            (true, _) => 0,
            // What the library learns from the first messages, it knows after these.
            (false, true) => 7,
            (false, false) => 4,
        };
        let start = Instant::now();
        self.block(spots, warmup);
        rounds += u64::from(warmup);
        let mut each = start.elapsed().as_secs_f64() / f64::from(warmup.max(1));
        for _ in 0..SETTLES_MAX {
            let more = self.settling(long, each);
            if more == 0 {
                break;
            }
            let before = each;
            each = self.block(spots, more) / f64::from(more);
            rounds += u64::from(more);
            if self.decide(u64::from(each > SETTLED * before)) != 0 {
                break;
            }
        }
        Settled { long, each, rounds }
    }

    /// Iterations before those that are measured, beyond the first few; all ranks agree. None where every iteration takes as
    /// long, or too long for that.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fn settling(&self, long: bool, each: f64) -> u32 {
        if long || self.simulated {
            return 0;
        }
        let seconds = if self.ask.row == 0 {
            FIRST_SETTLES
        } else {
            self.plan.row_ms * 1e-3 / 4.0
        };
        let agreed = self.decide((seconds / each).clamp(0.0, 10000.0) as u64);
        u32::try_from(agreed).unwrap_or(0)
    }

    /// How many blocks there will be, and of how many iterations each; all ranks agree.
    #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fn extent(&self, long: bool, each: f64) -> (usize, u32) {
        let in_turns = !self.plan.turns.is_empty();
        let blocks = match (long, in_turns, self.simulated) {
            (true, false, _) => 1,
            (true, true, _) | (_, true, true) => *TURNS.start() as usize,
            (_, true, false) => {
                let fitting = self.plan.row_ms * 1e-3 / each / TURN_ITERATIONS;
                let fitting = fitting.clamp(*TURNS.start(), *TURNS.end());
                self.decide(fitting as u64) as usize
            }
            (_, false, _) => self.plan.blocks.clamp(1, BLOCKS),
        };
        let fitting = match (long, self.simulated) {
            // On a simulated node every iteration takes the same time.
            (true, _) | (_, true) => 1,
            _ => (self.plan.row_ms * 1e-3 / each / blocks as f64).clamp(1.0, 10000.0) as u32,
        };
        let wanted = if long {
            1
        } else {
            self.plan.iterations.unwrap_or(fitting)
        };
        let agreed = self.decide(u64::from(wanted));
        (blocks, u32::try_from(agreed).unwrap_or(1))
    }

    /// What rank 0 says, on all ranks that take part.
    fn decide(&self, mine: u64) -> u64 {
        match self.ask.kind {
            kind if kind.is_of_all() => self.pair.mpi.tell(mine),
            _ => {
                let theirs = self.pair.mpi.swap(self.pair.peer, mine);
                if self.pair.role == 0 {
                    mine
                } else {
                    theirs
                }
            }
        }
    }

    /// The time that counts of this rank's: the first of a pair measures, unless only the second sees the clock of the
    /// simulated node, because only its buffers are in device memory.
    fn reported(&self, seconds: f64) -> f64 {
        if self.ask.kind.is_round() {
            return seconds;
        }
        let here = u64::from(self.clock.simulated.is_some());
        let there = self.pair.mpi.swap(self.pair.peer, here);
        let counts = match (self.simulated, self.pair.role) {
            (true, 0) => here != 0,
            (true, _) => here != 0 && there == 0,
            (false, role) => role == 0,
        };
        if counts {
            seconds
        } else {
            0.0
        }
    }

    /// Iterations of the OSU benchmarks: in device memory every message of a window in one place.
    fn block(&mut self, spots: [&[Spot]; 2], iterations: u32) -> f64 {
        self.pair.meet();
        let start = self.clock.seconds();
        for _ in 0..iterations {
            self.iteration(spots);
        }
        self.clock.seconds() - start
    }

    /// One iteration with fresh random data over poison, each message at an odd place of its own.
    fn verify(&mut self) -> anyhow::Result<u64> {
        let ask = self.ask;
        let checker = Checker::new(self.plan.seed);
        let iteration = u32::try_from(ask.row).unwrap_or(0);
        let plan = checker.plan(self.pair, ask.bytes, verified(ask), iteration);
        checker.prepare(self.pair, &plan)?;
        self.prepared = (ask.persistent).then(|| self.pair.prepare(&plan.out, &plan.into));
        self.pair.meet();
        self.iteration([&plan.out, &plan.into]);
        if let Some(prepared) = self.prepared.take() {
            self.pair.discard(prepared);
        }
        let errors = checker.compare(self.pair, &plan)?;
        self.pair.meet();
        Ok(errors)
    }
}
