//! What a rank measures of its own links while the program runs, if nobody has measured the node before. It
//! does so once, when the first messages come that are long enough to be split.
//!
//! Each rank measures the path from its GPU to the host's memory and back by copies of its own. It measures
//! the path from a sender's GPU by the first messages that it reads, which are only cut into pieces for that.
//! Nothing is waited for: copies are launched, and looked at again whenever the engine makes progress. One
//! rank of the node at a time copies to and from the host, so that it measures its link and not what the
//! host's memory has left.

use std::sync::Arc;
use std::time::{Duration, Instant};

use hashbrown::HashMap;

use super::host_rate::{believed, Least, RUNS_MAX};
use super::kept::{self, KeptLinks};
use super::wiring;
use crate::cuda::{
    self, reach, uuid_text, ContextKey, Copy, Error, InFlight, Mapping, PinnedBuffer, Purpose,
    Result, StagedMemory, Timed, Uuid,
};
use crate::model::{fit, Line};
use crate::node::traffic::{Ends, HostLinkRates, Measured};
use crate::node::{Wide, Wiring};
use crate::stats::{self, Counter};
use crate::trace::record;
use crate::transfer::gpu::{is_for_now, Gpu};
use crate::transfer::Env;

/// Length of the copies that tell what each copy costs.
pub(super) const SMALL: u64 = 256 << 10;
/// Bytes that a rank has on each of its GPUs to measure with.
pub const LARGE: u64 = 4 << 20;
/// Messages of a pair that are timed; as many again with a message at least twice as long, until the rate is
/// known well.
const PULLS: u32 = 3;
/// So many are enough if the first ones tell the rate well.
const PULLS_WELL: u32 = 2;
/// If the first ones take longer than short copies by less than this, us, others of that length tell nothing
/// either, and timing would only slow them: in windows of 1 of 2 MiB both ways between two H200s messages 2
/// to 4 took 58 to 190 us instead of 20. Then one is timed after so many, in case the short ones were late.
const HOPE_US: f64 = 5.0;
const HOPELESS_PAUSE: u32 = 64;
/// Times tell a rate if they differ by this much, us. Events resolve half a microsecond, and if a piece takes
/// less than the launch of the next one, the launch is what is timed.
pub(super) const TELLS_US: f64 = 10.0;
/// Times that differ by this much tell the rate well.
const TELLS_WELL_US: f64 = 40.0;
/// A pair whose rate is not known well is timed again by messages that come alone: after so many messages
/// that came when no other of their sender's was under way, and then each time after that many times as many.
/// One of four launches of windows of 8 MiB both ways between two H100s measured 244 GB/s by its first
/// messages, instead of 390. It gave the host so much that it ran at 0.71 to 0.87 of the speed without the
/// library, while one path has 1.05.
const AGAIN: u32 = 4;
/// GPUs of other ranks that are remembered.
const PAIRS_MAX: usize = 1024;
/// The turn is taken away from a rank that keeps it longer: it has died, or computes.
const TURN: Duration = Duration::from_millis(200);
/// How often a GPU's own link is tried.
const ATTEMPTS: u32 = 3;

/// How far the measurement of a GPU's path to the host has come: first the way up, then the way down.
enum Stage {
    Waiting,
    Running(Run),
    Over,
}

/// Why a path was not measured.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Driver(#[from] Error),
    /// The program copied at the same time, or the processor was late with every launch.
    #[error("no two runs of copies took the same least time")]
    NoLine,
}

/// Copies under way.
struct Run {
    copies: InFlight,
    timed: Timed,
    host: HostMemory,
}

/// Pinned memory of the host to measure with.
enum HostMemory {
    /// A piece of the staging for messages: it is pinned by now when the first message comes.
    Wide(Wide, u64),
    /// If there is no such staging.
    Bounce(PinnedBuffer),
}

impl HostMemory {
    fn address(&self) -> u64 {
        match self {
            HostMemory::Wide(_, address) => *address,
            HostMemory::Bounce(buffer) => buffer.address(),
        }
    }
}

/// The least time that copies of some lengths took: other transfers, and a processor that is late with the
/// next launch, can only make them slower.
#[derive(Debug)]
struct Takes {
    small_us: f64,
    longer: Vec<(u64, f64)>,
}

impl Default for Takes {
    fn default() -> Takes {
        Takes {
            small_us: f64::INFINITY,
            longer: Vec::new(),
        }
    }
}

/// What the gets of a pair have taken.
#[derive(Debug, Default)]
struct Pulls {
    /// How many messages about as long as the longest were timed.
    often: u32,
    longest: u64,
    takes: Takes,
    /// Messages until one is timed again, and how many that were the last time.
    until: u32,
    pause: u32,
    /// The rate is known from an earlier run.
    is_kept: bool,
}

impl Pulls {
    /// A message has come alone. Returns whether it is to be timed again; from now on that is wanted.
    fn is_due(&mut self, bytes: u64) -> bool {
        if self.is_kept
            || self.is_wanted(bytes)
            || 2 * bytes < self.longest
            || self.takes.tell(TELLS_WELL_US)
        {
            return false;
        }
        if self.until > 0 {
            self.until -= 1;
            return false;
        }
        self.pause = self.pause.saturating_mul(AGAIN);
        (self.until, self.often) = (self.pause - 1, PULLS - 1);
        true
    }

    fn is_wanted(&self, bytes: u64) -> bool {
        let is_longer = bytes >= 2 * self.longest;
        let is_known = self.is_kept || (self.often >= PULLS_WELL && self.takes.tell(TELLS_WELL_US));
        !is_known && (self.often < PULLS || is_longer)
    }

    /// A message about as long as the longest has taken this long.
    fn took(&mut self, times: &[(u64, f64)]) {
        self.takes.add(times);
        if !self.takes.tell(HOPE_US) {
            self.often = PULLS;
            self.pause = self.pause.max(HOPELESS_PAUSE);
            self.until = self.pause;
        }
    }

    /// Counts one more message that is begun.
    fn count(&mut self, bytes: u64) {
        if bytes >= 2 * self.longest {
            (self.often, self.longest) = (0, bytes);
            (self.until, self.pause) = (AGAIN, AGAIN);
        }
        self.often += 1;
    }
}

impl Takes {
    /// Adds the times of copies that were launched together. The first copy only brings the engine up to
    /// speed, and keeps it busy until the others are launched.
    ///
    /// A copy's time is the most that a shorter one takes. With four H100s in a ring and messages of 8 MiB,
    /// one of three launches found that its rate was too fast to be told by that length. It was left with the
    /// rate of 4 MiB, which had been slow, and gave the host so much that it ran at 0.45 of the speed without
    /// the library.
    fn add(&mut self, times: &[(u64, f64)]) {
        for &(bytes, us) in times.iter().skip(1) {
            if bytes == SMALL {
                self.small_us = self.small_us.min(us);
                continue;
            }
            if !self.longer.iter().any(|row| row.0 == bytes) {
                let longer = self.longer.iter().filter(|row| row.0 > bytes);
                let least = longer.map(|row| row.1).fold(f64::INFINITY, f64::min);
                self.longer.push((bytes, least));
            }
            let shorter = self.longer.iter_mut().filter(|row| row.0 <= bytes);
            shorter.for_each(|(_, least)| *least = us.min(*least));
        }
    }

    /// Whether some of the longer copies took this much longer than the short ones.
    fn tell(&self, us: f64) -> bool {
        let mut longer = self.longer.iter();
        longer.any(|(_, least)| *least >= self.small_us + us)
    }

    /// The fastest line through the short copies and those that took long enough to tell one, if there is
    /// one.
    fn line(&self) -> Option<Line> {
        let lines = self.longer.iter();
        let lines = lines.filter(|(_, least)| *least >= self.small_us + TELLS_US);
        let lines = lines.filter_map(|long| fit::line(&[(SMALL, self.small_us), *long]));
        lines.max_by(|a, b| a.gb_s.total_cmp(&b.gb_s))
    }
}

/// A GPU that this rank uses.
struct Own {
    uuid: Uuid,
    context: ContextKey,
    /// Kept until the end: freeing device memory waits for the device.
    memory: Option<StagedMemory>,
    stage: Stage,
    failures: u32,
    /// The way up is known.
    has_up: bool,
    /// Runs the way that is measured now.
    runs: Vec<Least>,
}

/// What this rank measures.
#[derive(Default)]
pub struct Survey {
    is_on: bool,
    own: Vec<Own>,
    /// Gets that are timed, from which GPU to which.
    pulls: Vec<([Uuid; 2], Timed)>,
    /// What is known of pairs by their messages.
    timed: HashMap<Ends, Pulls>,
    /// Who has had the turn, as its rank plus one, and since when.
    holder: Option<(u32, Instant)>,
    has_turn: bool,
    /// What no copies can measure.
    wiring: Wires,
    /// What was known from an earlier run, and what is kept for the next.
    kept: KeptLinks,
}

/// How far the question has come which NVLinks there are.
#[derive(Default)]
enum Wires {
    #[default]
    Unasked,
    Asked(wiring::Asked),
    /// The answer is known from an earlier run, and not published yet.
    Kept(Vec<(Uuid, Wiring)>),
    Over,
}

impl Survey {
    /// Something is measured, or is to be.
    pub fn is_active(&self) -> bool {
        let is_open = |own: &Own| !matches!(own.stage, Stage::Over);
        let is_asked = matches!(self.wiring, Wires::Asked(_) | Wires::Kept(_));
        is_asked || (self.is_on && (!self.pulls.is_empty() || self.own.iter().any(is_open)))
    }

    /// Asks once for the links of this rank's GPUs.
    pub fn ask_for_links(&mut self, env: &Env) {
        if matches!(self.wiring, Wires::Unasked) {
            self.wiring = match self.kept.wiring(env) {
                Some(rows) => Wires::Kept(rows),
                None => wiring::Asked::ask(env).map_or(Wires::Over, Wires::Asked),
            };
        }
    }

    /// A long message to or from a GPU of this rank has come, and nobody has measured the node.
    pub fn meet(&mut self, env: &Env, uuid: &Uuid, context: ContextKey) {
        self.is_on = true;
        match self.own.iter_mut().find(|own| own.uuid == *uuid) {
            Some(own) if own.context == context || !matches!(own.stage, Stage::Over) => {}
            Some(own) => own.context = context,
            None => {
                env.node.own().list_link_rates(&link_rates(uuid));
                let stage = match self.recall(env, uuid) {
                    true => Stage::Over,
                    false => Stage::Waiting,
                };
                self.own.push(Own {
                    uuid: *uuid,
                    context,
                    memory: None,
                    stage,
                    failures: 0,
                    has_up: false,
                    runs: Vec::new(),
                });
            }
        }
    }

    /// Publishes what is known of a GPU from an earlier run. Returns whether its paths to the host and back
    /// are known.
    fn recall(&mut self, env: &Env, uuid: &Uuid) -> bool {
        let Some(links) = self.kept.get(env, uuid) else {
            return false;
        };
        for (from, line) in kept::pulls(links) {
            let ends = Ends::new(Some(&from), Some(uuid));
            tell(env, ends, None, Some(line));
            self.timed.entry(ends).or_default().is_kept = true;
        }
        let (Some(up), Some(down)) = (links.to_host, links.from_host) else {
            return false;
        };
        tell(env, Ends::new(Some(uuid), None), Some(up.into()), None);
        tell(env, Ends::new(None, Some(uuid)), None, Some(down.into()));
        true
    }

    /// Whether the time of such a message would tell something.
    pub fn wants(&self, from: &Uuid, to: &Uuid, bytes: u64) -> bool {
        // Asked for every message, so the test that rules most of them out comes first.
        if !self.is_on || bytes < 4 * SMALL || from == to {
            return false;
        }
        let known = self.timed.get(&Ends::new(Some(from), Some(to)));
        let is_wanted = known.is_none_or(|pulls| pulls.is_wanted(bytes));
        let has_room = self.timed.len() < PAIRS_MAX || known.is_some();
        is_wanted && has_room
    }

    /// A message has come while no other of its sender's was under way. It is timed if its time is to tell
    /// something once more.
    pub fn time_if_due(&mut self, from: &Uuid, to: &Uuid, bytes: u64) -> bool {
        if !self.is_on {
            return false;
        }
        let known = self.timed.get_mut(&Ends::new(Some(from), Some(to)));
        known.is_some_and(|pulls| pulls.is_due(bytes))
    }

    /// The pieces in which a message is read so that its time tells something, if it is to be timed.
    pub fn pieces(&self, from: &Uuid, to: &Uuid, copy: &Copy) -> Option<[Copy; 4]> {
        let Copy::Linear { dst, src, bytes } = *copy else {
            return None;
        };
        if !self.wants(from, to, bytes) {
            return None;
        }
        let piece = |offset: u64, bytes: u64| Copy::Linear {
            dst: dst + offset,
            src: src + offset,
            bytes,
        };
        let long = bytes - 2 * SMALL;
        Some([
            piece(0, long / 2),
            piece(long / 2, long - long / 2),
            piece(long, SMALL),
            piece(long + SMALL, SMALL),
        ])
    }

    /// A message of this length was begun in such pieces.
    fn pulled(&mut self, from: &Uuid, to: &Uuid, bytes: u64, timed: Timed) {
        let ends = Ends::new(Some(from), Some(to));
        self.timed.entry(ends).or_default().count(bytes);
        self.pulls.push(([*from, *to], timed));
    }

    /// Looks at what is under way, and begins what is next.
    pub fn advance(&mut self, env: &Env, gpu: &mut Gpu) {
        self.pulls.retain(|(gpus, timed)| match timed.times() {
            Ok(None) => true,
            Ok(Some(times)) => {
                let [from, to] = gpus;
                let ends = Ends::new(Some(from), Some(to));
                if let Some(pulls) = self.timed.get_mut(&ends) {
                    pulls.took(&times);
                    let line = pulls.takes.line();
                    tell(env, ends, None, line);
                    if let Some(line) = line.filter(|_| pulls.takes.tell(TELLS_WELL_US)) {
                        self.kept.note_pull(env, gpus, line);
                    }
                }
                false
            }
            Err(error) => {
                log::debug!("timing a pull: {error}");
                false
            }
        });
        self.advance_wiring(env);
        for at in 0..self.own.len() {
            if !matches!(self.own[at].stage, Stage::Over) {
                self.advance_own(env, gpu, at);
                // One after the other.
                break;
            }
        }
    }

    fn advance_wiring(&mut self, env: &Env) {
        // Published in the list of this rank's GPUs, which begins with its first buffer.
        let gpu_page = env.node.own().gpu_page();
        let has_list = gpu_page.is_some_and(|gpu_page| !gpu_page.gpus().is_empty());
        let is_there = match &self.wiring {
            Wires::Asked(asked) => asked.is_there(),
            Wires::Kept(_) => true,
            Wires::Unasked | Wires::Over => false,
        };
        if !is_there || !has_list {
            return;
        }
        let (rows, is_new) = match std::mem::replace(&mut self.wiring, Wires::Over) {
            Wires::Asked(asked) => (asked.answer(), true),
            Wires::Kept(rows) => (rows, false),
            Wires::Unasked | Wires::Over => return,
        };
        for (uuid, wiring) in &rows {
            log::debug!("links of {}: {wiring:?}", uuid_text(uuid));
            env.node.own().tell_wiring(uuid, wiring);
            if is_new {
                self.kept.note_wiring(env, uuid, wiring);
            }
        }
    }

    fn advance_own(&mut self, env: &Env, gpu: &mut Gpu, at: usize) {
        // The longest step, getting memory, needs no turn.
        if gpu.pages.are_awaited() {
            return;
        }
        let is_ready = match self.own[at].prepare(env, gpu) {
            Ok(()) => self.has_turn || self.take_turn(env),
            Err(error) => {
                self.own[at].failed(&error.into());
                false
            }
        };
        if !is_ready {
            return;
        }
        let stage = std::mem::replace(&mut self.own[at].stage, Stage::Over);
        let next = match stage {
            Stage::Waiting => self.own[at].start(env, gpu).map(Stage::Running),
            Stage::Running(mut run) => match run.least().transpose() {
                None => Ok(Stage::Running(run)),
                Some(result) => {
                    run.end(env);
                    result.and_then(|least| self.ran(env, gpu, at, least))
                }
            },
            Stage::Over => Ok(Stage::Over),
        };
        let own = &mut self.own[at];
        match next {
            Ok(next) => own.stage = next,
            Err(error) => own.failed(&error),
        }
        // Also while it waits: another rank may need the memory that this one lacks.
        if matches!(self.own[at].stage, Stage::Over | Stage::Waiting) {
            env.node.give_turn();
            self.has_turn = false;
        }
    }

    /// A run of copies is over. Publishes the rate if it can be believed now, and starts the next run.
    fn ran(
        &mut self,
        env: &Env,
        gpu: &mut Gpu,
        at: usize,
        least: Least,
    ) -> std::result::Result<Stage, Failure> {
        let own = &mut self.own[at];
        own.runs.push(least);
        if let Some(line) = believed(&own.runs) {
            own.runs.clear();
            stats::add(Counter::LinksMeasured, 1);
            self.kept.note_host(env, &own.uuid, !own.has_up, line);
            let uuid = Some(&own.uuid);
            if own.has_up {
                tell(env, Ends::new(None, uuid), None, Some(line));
                return Ok(Stage::Over);
            }
            tell(env, Ends::new(uuid, None), Some(line), None);
            own.has_up = true;
        } else if own.runs.len() >= RUNS_MAX {
            own.runs.clear();
            return Err(Failure::NoLine);
        }
        Ok(Stage::Running(own.start(env, gpu)?))
    }

    fn take_turn(&mut self, env: &Env) -> bool {
        let seen = match self.holder {
            Some((holder, since)) if since.elapsed() > TURN => holder,
            _ => 0,
        };
        match env.node.take_turn(seen) {
            Ok(()) => {
                self.has_turn = true;
                self.holder = None;
            }
            Err(other) if self.holder.is_none_or(|(holder, _)| holder != other) => {
                self.holder = Some((other, Instant::now()));
            }
            Err(_) => {}
        }
        self.has_turn
    }

    /// At finalize: stores what was measured for the next run.
    pub fn keep(&mut self, env: &Env) {
        self.kept.store(env);
    }

    /// At finalize, when no copy runs any more.
    pub fn close(&mut self) {
        if let Wires::Asked(asked) = std::mem::take(self).wiring {
            asked.leave();
        }
    }
}

impl Own {
    /// Gets memory to copy from and to.
    fn prepare(&mut self, env: &Env, gpu: &mut Gpu) -> Result<()> {
        if self.memory.is_none() {
            self.memory = Some(StagedMemory::allocate_private(self.context, LARGE)?);
            // The piece stays pinned.
            if let HostMemory::Wide(piece, _) = self.host(env, gpu)? {
                env.node.own().give_wide(&piece);
            }
        }
        Ok(())
    }

    fn host(&self, env: &Env, gpu: &mut Gpu) -> Result<HostMemory> {
        let own = env.node.own();
        if gpu.pages.are_there() {
            if let Some((piece, address)) = gpu.take_wide(self.context, own, LARGE) {
                if gpu.is_pinned(address, LARGE) {
                    return Ok(HostMemory::Wide(piece, address));
                }
                own.give_wide(&piece);
            }
        }
        let host = gpu.bounce(self.context, LARGE as usize)?;
        if !host.is_pinned() {
            return Err(Error::NoContext);
        }
        Ok(HostMemory::Bounce(host))
    }

    fn failed(&mut self, failure: &Failure) {
        self.failures += 1;
        log::debug!("measuring the way to the host: {failure}");
        let passes = matches!(failure, Failure::Driver(error) if is_for_now(error));
        self.stage = if self.failures < ATTEMPTS || passes {
            Stage::Waiting
        } else {
            Stage::Over
        };
    }

    /// Launches copies between the GPU and pinned memory of the host, the way that is not known yet.
    fn start(&mut self, env: &Env, gpu: &mut Gpu) -> std::result::Result<Run, Failure> {
        let address = self.memory.as_ref().ok_or(Error::NoContext)?.address();
        let host = self.host(env, gpu)?;
        let (dst, src, purpose) = if !self.has_up {
            (host.address(), address, Purpose::DeviceToHost)
        } else {
            (address, host.address(), Purpose::HostToDevice)
        };
        let copies = [LARGE, SMALL, LARGE, SMALL, LARGE, SMALL].map(|bytes| Copy::Linear {
            dst,
            src,
            bytes,
        });
        let (copies, timed) = gpu.timed(self.context, purpose, 0, &copies, None)?;
        Ok(Run {
            copies,
            timed,
            host,
        })
    }
}

impl Run {
    /// What the copies took, once they are done.
    fn least(&mut self) -> std::result::Result<Option<Least>, Failure> {
        if !self.copies.poll()? {
            return Ok(None);
        }
        Ok(self.timed.times()?.map(|times| Least::of(&times)))
    }

    /// Gives its memory back, unless copies may still run there after an error.
    fn end(mut self, env: &Env) {
        if let (true, HostMemory::Wide(piece, _)) = (self.copies.is_over(), &self.host) {
            env.node.own().give_wide(piece);
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        // After an error the copies may still run: nobody else may get the memory then.
        if let (false, HostMemory::Bounce(buffer)) = (self.copies.is_over(), &mut self.host) {
            log::debug!("pinned memory of {} bytes is given up", buffer.capacity());
            buffer.leak();
        }
    }
}

impl Gpu {
    /// Reads a message, and times that if it is wanted.
    pub fn pull_of(
        &mut self,
        context: ContextKey,
        ends: [&Uuid; 2],
        peer: u32,
        copy: Copy,
        mapping: Arc<Mapping>,
    ) -> Result<InFlight> {
        let [from, to] = ends;
        let Some(pieces) = self.survey.pieces(from, to, &copy) else {
            return self.pull(context, peer, copy, Some(mapping));
        };
        let (copies, timed) = self.timed(
            context,
            Purpose::Get,
            u64::from(peer),
            &pieces,
            Some(mapping),
        )?;
        let bytes = pieces.iter().map(Copy::bytes).sum();
        self.survey.pulled(from, to, bytes, timed);
        Ok(copies)
    }

    /// Moves the survey on.
    pub fn advance_survey(&mut self, env: &Env) {
        if self.survey.is_active() {
            let mut survey = std::mem::take(&mut self.survey);
            survey.advance(env, self);
            self.survey = survey;
        }
    }
}

/// Publishes what is known of a path now, in place of what this rank has published about it before. That may
/// be nothing.
fn tell(env: &Env, ends: Ends, push: Option<Line>, pull: Option<Line>) {
    let own = env.node.own();
    let told = |line: Line| (line.alpha_us as f32, line.gb_s as f32);
    let measured = Measured {
        ends,
        push: push.map(told),
        pull: pull.map(told),
    };
    let known = own.traffic().measured().find(|line| line.ends == ends);
    let is_told = known.is_some() || push.is_some() || pull.is_some();
    if is_told && known != Some(measured) {
        own.tell_measured(&measured);
    }
}

/// What peers are told of a GPU of this process.
fn link_rates(uuid: &Uuid) -> HostLinkRates {
    let pci = reach::by_uuid(uuid).and_then(|device| cuda::pci_address(device.device));
    // The system would describe whatever real device has the address of a simulated one.
    let real = pci.as_deref().filter(|_| !cuda::is_simulated());
    HostLinkRates {
        uuid: *uuid,
        pci: kept::pci_of(uuid).unwrap_or(u64::MAX),
        numa: real.and_then(numa_node),
    }
}

/// What a trace says of a GPU.
pub fn traced_place(uuid: Uuid) -> record::Place {
    let device = reach::by_uuid(&uuid);
    let rates = link_rates(&uuid);
    record::Place {
        number: 0,
        ordinal: device.map_or(-1, |device| device.ordinal),
        numa: rates
            .numa
            .and_then(|numa| i32::try_from(numa).ok())
            .or_else(|| reach::host_numa(device?))
            .unwrap_or(-1),
        pci: if rates.pci == u64::MAX { 0 } else { rates.pci },
        uuid,
    }
}

/// The NUMA node of a PCI device, if the machine has more than one.
fn numa_node(pci: &str) -> Option<u32> {
    let pci = pci.to_ascii_lowercase();
    // The driver writes the domain with four digits, as the system does, or with eight.
    let (domain, rest) = pci.split_once(':')?;
    let domain = u32::from_str_radix(domain, 16).ok()?;
    let file = format!("/sys/bus/pci/devices/{domain:04x}:{rest}/numa_node");
    std::fs::read_to_string(file).ok()?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 2 us and 50 GB/s, by hand: 7.24288 us for 256 KiB, 85.88608 us for 4 MiB, 43.94304 us for 2 MiB.
    #[test]
    fn a_launch_that_comes_late_spoils_nothing() {
        let is_right = |takes: &Takes| {
            let line = takes.line().expect("a line");
            assert!(
                (line.gb_s - 50.0).abs() < 1e-6 && (line.alpha_us - 2.0).abs() < 1e-6,
                "{line:?}"
            );
        };
        let mut takes = Takes::default();
        assert!(takes.line().is_none());
        takes.add(&[
            (LARGE, 300.0),
            (LARGE, 85.88608),
            (SMALL, 90.0),
            (SMALL, 7.24288),
        ]);
        is_right(&takes);
        // If the short copies all came late, they tell no line, or one that is too fast, until others come.
        let mut takes = Takes::default();
        takes.add(&[
            (LARGE, 85.9),
            (LARGE, 85.88608),
            (SMALL, 90.0),
            (SMALL, 86.0),
        ]);
        assert!(takes.line().is_none());
        takes.add(&[
            (2 << 20, 50.0),
            (2 << 20, 43.94304),
            (SMALL, 20.0),
            (SMALL, 40.0),
        ]);
        assert!(takes.line().expect("a line").gb_s > 55.0);
        takes.add(&[
            (2 << 20, 50.0),
            (2 << 20, 60.0),
            (SMALL, 20.0),
            (SMALL, 7.24288),
        ]);
        is_right(&takes);
    }

    /// 400 GB/s, give or take half a microsecond: 768 KiB take 1.3 us more than 256 KiB, so the rate could be
    /// anything from 200 to 1600. By messages of 2 MiB two H200s were found to have 72 to 260 GB/s.
    #[test]
    fn short_times_tell_no_rate() {
        let us = |bytes: u64| 3.0 + bytes as f64 / 400e3;
        let times = |message: u64, error: f64| {
            let long = message / 2 - SMALL;
            [
                (long, 0.0),
                (long, us(long) + error),
                (SMALL, us(SMALL)),
                (SMALL, us(SMALL) + error),
            ]
        };
        for error in [-0.5, 0.5] {
            let mut takes = Takes::default();
            takes.add(&times(2 << 20, error));
            takes.add(&times(8 << 20, error));
            assert!(takes.line().is_none(), "{takes:?}");
            takes.add(&times(16 << 20, error));
            let line = takes.line().expect("a line");
            assert!((0.93..1.07).contains(&(line.gb_s / 400.0)), "{line:?}");
            assert!(!takes.tell(TELLS_WELL_US));
            takes.add(&times(64 << 20, error));
            assert!(takes.tell(TELLS_WELL_US));
        }
    }

    /// A rate that is too fast to be told by a length is not timed again at that length for a while, but by
    /// one twice as long.
    #[test]
    fn messages_that_tell_nothing_are_not_timed_again() {
        const MIB: u64 = 1 << 20;
        let mut pulls = Pulls::default();
        let mut timed = |bytes: u64, us: f64| {
            let is_timed = pulls.is_wanted(bytes) || pulls.is_due(bytes);
            if is_timed {
                pulls.count(bytes);
                pulls.took(&[(bytes, 0.0), (bytes, us), (SMALL, 3.0)]);
            }
            is_timed
        };
        let mut of =
            |bytes: u64, us: f64| -> Vec<u32> { (0..400).filter(|_| timed(bytes, us)).collect() };
        assert_eq!(of(2 * MIB, 5.0), [0, 65, 322]);
        assert_eq!(of(4 * MIB, 7.5), [0, 65, 322]);
        assert_eq!(of(32 * MIB, 45.0), [0, 1], "it is known");
    }

    /// Three messages of about one length are timed, and three again of twice the length, while the rate is
    /// not known well; two if they tell it well.
    #[test]
    fn messages_are_timed_until_they_tell() {
        let mut pulls = Pulls::default();
        let mut timed = |bytes: u64, us: f64| {
            let is_wanted = pulls.is_wanted(bytes);
            if is_wanted {
                pulls.count(bytes);
                pulls.takes.add(&[(bytes, 0.0), (bytes, us), (SMALL, 4.0)]);
            }
            is_wanted
        };
        let mut of = |bytes, us| (0..5).filter(|_| timed(bytes, us)).count();
        assert_eq!(of(2 << 20, 6.0), 3);
        assert_eq!(of(3 << 20, 9.0), 0);
        assert_eq!(of(4 << 20, 12.0), 3);
        assert_eq!(of(32 << 20, 90.0), 2);
        assert_eq!(of(1 << 30, 2700.0), 0, "it is known");
    }

    /// Three slow messages told a wrong rate. Later ones correct it, ever more seldom, unless it is known
    /// well.
    #[test]
    fn a_rate_that_is_not_known_well_is_timed_again() {
        const MIB: u64 = 1 << 20;
        let pull = |pulls: &mut Pulls, bytes: u64, us: f64| {
            let is_timed = pulls.is_wanted(bytes) || pulls.is_due(bytes);
            if is_timed {
                assert!(pulls.is_wanted(bytes));
                pulls.count(bytes);
                pulls.takes.add(&[(bytes, 0.0), (bytes, us), (SMALL, 4.0)]);
            }
            is_timed
        };
        let mut pulls = Pulls::default();
        (0..3).for_each(|_| assert!(pull(&mut pulls, 8 * MIB, 20.0)));
        let line = pulls.takes.line().expect("slow");
        let timed: Vec<u32> = (0..100)
            .filter(|_| pull(&mut pulls, 8 * MIB, 13.5))
            .collect();
        assert_eq!(timed, [4, 20, 84]);
        assert!(
            line.gb_s < 520.0 && pulls.takes.line().is_none(),
            "{line:?}"
        );
        // A message that is far shorter says nothing. A longer one begins anew, and tells well.
        assert!((0..1000).all(|_| !pull(&mut pulls, MIB, 1.0)));
        let timed = (0..1000).filter(|_| pull(&mut pulls, 64 * MIB, 90.0));
        assert_eq!(timed.count(), 2);
        assert!(pulls.takes.tell(TELLS_WELL_US));
    }

    /// A rate that turns out to be too fast to be told leaves no times behind of shorter copies that were
    /// slow.
    #[test]
    fn no_copy_takes_longer_than_a_longer_one() {
        const MIB: u64 = 1 << 20;
        let mut takes = Takes::default();
        let add = |takes: &mut Takes, bytes: u64, us: f64| {
            takes.add(&[(bytes, 0.0), (bytes, us), (SMALL, 3.0)]);
            takes.line().map(|line| line.gb_s)
        };
        let is_about =
            |line: Option<f64>, gb_s: f64| line.is_some_and(|of| (of / gb_s - 1.0).abs() < 0.01);
        let slow = (2 * MIB - SMALL) as f64 / 12e3;
        assert!(is_about(add(&mut takes, 2 * MIB, 15.0), slow));
        let fast = (4 * MIB - SMALL) as f64 / 10.5e3;
        assert!(is_about(add(&mut takes, 4 * MIB, 13.5), fast));
        assert_eq!(add(&mut takes, 4 * MIB, 12.0), None);
        // Nor does a shorter message that is timed later tell one.
        assert_eq!(add(&mut takes, 3 * MIB, 15.0), None);
        let well = (32 * MIB - SMALL) as f64 / 80e3;
        assert!(is_about(add(&mut takes, 32 * MIB, 83.0), well));
        assert!(takes.tell(TELLS_WELL_US));
    }

    #[test]
    fn pieces_are_the_whole_message() {
        let mut survey = Survey::default();
        let copy = Copy::Linear {
            dst: 1000,
            src: 5_000_000,
            bytes: 3_000_001,
        };
        let (a, b) = ([1; 16], [2; 16]);
        assert!(survey.pieces(&a, &b, &copy).is_none());
        survey.is_on = true;
        let mut at = 0;
        for piece in survey.pieces(&a, &b, &copy).expect("timed") {
            let Copy::Linear { dst, src, bytes } = piece else {
                panic!("{piece:?}")
            };
            assert_eq!((dst, src), (1000 + at, 5_000_000 + at));
            at += bytes;
        }
        assert_eq!(at, 3_000_001);
        assert!(survey.pieces(&a, &a, &copy).is_none());
        let known = survey.timed.entry(Ends::new(Some(&a), Some(&b)));
        let known = known.or_default();
        (0..PULLS).for_each(|_| known.count(3_000_001));
        assert!(survey.pieces(&a, &b, &copy).is_none());
        assert!(survey.pieces(&b, &a, &copy).is_some());
    }
}
