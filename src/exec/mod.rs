//! Runs a plan by one process, which drives all hops, with contexts on the GPUs that take part.
//!
//! A plan becomes a [`Schedule`]: copies on lanes, and what each waits for. One of three executors launches all
//! of it before the call returns, so that no work of the CPU is left afterwards:
//! streams, batches or a graph ([`executor`]). The executor is chosen by what the launches of each have cost ([`costs`]), or forced. All use streams of
//! the engine's own, which wait only for copies launched before. If a launch fails half way, the call waits
//! until nothing of it runs any more, and only then reports the error.

pub mod costs;
mod executor;
pub mod graphs;
pub mod schedule;
pub mod staging;
pub mod tracks;

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::{Arc, Weak};

use slab::Slab;

use crate::cuda::types::code;
use crate::cuda::{Budget, ContextKey, Entered, Error, Mapping, Result};
use crate::plan::{Plan, DRIVES_MAX};
use crate::stats::{self, Counter};
use crate::topology::{Place, MAX_GPUS};
use costs::{Class, Costs};
pub use executor::ExecutorName;
use executor::Job;
use graphs::Graphs;

use schedule::{Binding, Lane, Schedule, Shape, Unit};
use staging::{Lease, Staging};
use tracks::{Mark, Tracks, Way};

/// Schedules that are remembered.
const SCHEDULES_MAX: usize = 64;
/// Errors in a row in the driver's answers about a plan, before its streams are waited for.
const FAILURES_MAX: u32 = 3;
/// After so many graphs in a row could not be launched, none is built any more.
const GRAPH_FAILURES_MAX: u32 = 3;

/// Bounds, and what is forced.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Staging memory on each GPU.
    pub gpu_bytes_max: u64,
    /// Pinned staging memory; others may also take from it.
    pub host_budget: Budget,
    /// CUDA graphs that are kept; none with 0.
    pub graphs_max: usize,
    /// The executor, if it is not to be chosen.
    pub forced: Option<ExecutorName>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            gpu_bytes_max: 64 << 20,
            host_budget: Budget::new(48 << 20),
            graphs_max: 32,
            forced: None,
        }
    }
}

/// What is to be moved, by a plan.
pub struct Request<'a> {
    /// The plan.
    pub plan: &'a Plan,
    /// The context of each GPU that takes part, by its number in the plan's topology.
    pub contexts: [Option<ContextKey>; MAX_GPUS],
    /// Start of the message, as the engine of each GPU that reads it reaches it.
    pub source: [u64; MAX_GPUS],
    /// Start of the receiver's buffer.
    pub target: u64,
    /// Kept open until the copies are done.
    pub mappings: Vec<Arc<Mapping>>,
    /// Plans ([`Drive::number`]) that write to parts of the receiver's buffer: this one writes there after
    /// them.
    pub after: Vec<u64>,
}

/// Why a plan did not come to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{error}")]
pub struct Failure {
    /// What went wrong.
    pub error: Error,
    /// The GPU, or host memory, over which the failed path leads. `None`: the direct path failed, or
    /// something that all paths share.
    pub place: Option<Place>,
}

impl Failure {
    /// A failure of a path over a place, if there is one.
    #[must_use]
    pub fn new(error: Error, place: Option<Place>) -> Failure {
        Failure { error, place }
    }

    /// Makes errors failures of paths over a place.
    pub fn at(place: Place) -> impl Fn(Error) -> Failure {
        move |error| Failure::new(error, Some(place))
    }

    /// Makes errors failures of the path that a lane belongs to.
    fn of<'a>(schedule: &'a Schedule, lane: &'a Lane) -> impl Fn(Error) -> Failure + 'a {
        move |error| {
            // Without the context of an end no path is left.
            let is_end = error.context_is_gone() && schedule.relay(lane.gpu()).is_none();
            Failure::new(error, schedule.place(lane).filter(|_| !is_end))
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure::new(error, None)
    }
}

/// What becomes of a plan.
pub type Ended<T> = std::result::Result<T, Failure>;

/// A plan under way. If it is dropped before its end, the plan runs on, and what it needs is kept.
#[derive(Debug)]
#[must_use = "poll it until the copies are done"]
pub struct Drive {
    id: usize,
    /// Which one: from 1 on, in the order of the launches.
    pub number: u64,
    _owner: Arc<()>,
    /// How it was launched.
    pub how: ExecutorName,
    over: Option<Ended<()>>,
}

impl Drive {
    /// Whether nothing of it runs any more, well or not.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.over.is_some()
    }
}

/// What is known of a shape.
struct Row {
    shape: Shape,
    schedule: Arc<Schedule>,
    single: Arc<Vec<Unit>>,
    together: Option<Arc<Vec<Unit>>>,
    /// In the windows of such messages each is received in the place of the one before. Nothing can be
    /// launched behind a graph there before all of it has ended.
    is_in_place: bool,
    used: u64,
}

/// A plan under way.
struct Running {
    number: u64,
    schedule: Arc<Schedule>,
    contexts: [Option<ContextKey>; MAX_GPUS],
    target: u64,
    owner: Weak<()>,
    /// Events behind its last copies.
    ends: VecDeque<Mark>,
    /// All streams that it uses.
    ways: Vec<Way>,
    /// Events between its copies.
    marks: Vec<Mark>,
    leases: Vec<Lease>,
    _mappings: Vec<Arc<Mapping>>,
    graph: Option<u64>,
    failures: u32,
    /// Why not all of it was launched.
    error: Option<Failure>,
    /// Nobody knows whether its copies have ended: the driver did not answer, not even when waited for.
    is_unsure: bool,
}

/// What drives plans.
pub struct Exec {
    settings: Settings,
    tracks: Tracks,
    staging: Staging,
    graphs: Graphs,
    costs: Costs,
    rows: Vec<Row>,
    running: Slab<Running>,
    /// Plans of which nobody knows whether they have ended. Their memory and events are not used again before
    /// that is known.
    unsure: Vec<Running>,
    clock: u64,
    graph_failures: u32,
    /// Plans that were launched.
    launched: u64,
    /// Plans that have ended.
    ended: u64,
}

impl Exec {
    /// Nothing is made before a plan needs it.
    #[must_use]
    pub fn new(settings: Settings) -> Exec {
        Exec {
            staging: Staging::new(settings.gpu_bytes_max, settings.host_budget.clone()),
            graphs: Graphs::new(settings.graphs_max),
            settings,
            tracks: Tracks::default(),
            costs: Costs::default(),
            rows: Vec::new(),
            running: Slab::new(),
            unsure: Vec::new(),
            clock: 0,
            graph_failures: 0,
            launched: 0,
            ended: 0,
        }
    }

    /// The primary context of a device, made if there is none, and kept until [`Exec::close`].
    ///
    /// # Errors
    /// As [`Tracks::hold`].
    pub fn hold(&mut self, ordinal: i32) -> Result<ContextKey> {
        self.tracks.hold(ordinal)
    }

    /// Launches a plan. After [`Error::Exhausted`], while plans are under way ([`Exec::is_busy`]), it may
    /// work later.
    ///
    /// # Errors
    /// Nothing of it runs.
    pub fn launch(&mut self, request: Request<'_>) -> Ended<Drive> {
        self.reap();
        if self.running.len() + self.unsure.len() >= DRIVES_MAX as usize {
            return Err(Error::Exhausted("plans under way").into());
        }
        let plan = request.plan;
        let at = self.look_up(plan)?;
        let (job, mut running) = self.prepare(at, request)?;
        let is_behind = !self.ends_of(&job.after, |_| true).is_empty();
        if is_behind {
            self.rows[at].is_in_place = true;
        } else if self.is_under_way(&running.schedule) {
            self.rows[at].is_in_place = false;
        }
        let mut how = self.choose(job.class, at, plan, !is_behind);
        if let Err(failure) = self.launch_by(&mut how, &job, &mut running) {
            running.error = Some(failure);
            self.mark_ends(&mut running);
            if running.ends.is_empty() {
                self.end(running);
                return Err(failure);
            }
        }
        stats::add(executor::of(how).counter(), 1);
        stats::add(Counter::OneOwnerBehind, u64::from(is_behind));
        let (owner, number) = (Arc::new(()), running.number);
        running.owner = Arc::downgrade(&owner);
        let id = self.running.insert(running);
        Ok(Drive {
            id,
            number,
            _owner: owner,
            how,
            over: None,
        })
    }

    /// Opens what a plan needs, and takes its staging.
    fn prepare(&mut self, at: usize, request: Request<'_>) -> Ended<(Job, Running)> {
        let row = &self.rows[at];
        let schedule = Arc::clone(&row.schedule);
        let (shape, single, together) = (
            row.shape.clone(),
            Arc::clone(&row.single),
            row.together.clone(),
        );
        let launcher =
            request.contexts[usize::from(request.plan.message.to)].ok_or(Error::NoContext)?;
        self.open(&schedule, &request, launcher)?;
        let leases = self
            .staging
            .take(&schedule.rings, &request.contexts, launcher)?;
        self.launched += 1;
        let job = Job {
            shape,
            class: (schedule.steps.len().ilog2(), schedule.gpus.count_ones()),
            launcher,
            binding: Binding {
                source: request.source,
                target: request.target,
                rings: leases.iter().map(|lease| lease.address).collect(),
            },
            after: request.after,
            single,
            together,
        };
        let running = Running {
            number: self.launched,
            contexts: only(&request.contexts, schedule.gpus),
            schedule,
            target: request.target,
            owner: Weak::new(),
            ends: VecDeque::new(),
            ways: Vec::new(),
            marks: Vec::new(),
            leases,
            _mappings: request.mappings,
            graph: None,
            failures: 0,
            error: None,
            is_unsure: false,
        };
        Ok((job, running))
    }

    /// Launches a plan by this executor, or on streams if that turns out not to be possible; `how` says by
    /// which.
    fn launch_by(&mut self, how: &mut ExecutorName, job: &Job, running: &mut Running) -> Ended<()> {
        if !executor::of(*how).launch(self, job, running)? {
            *how = ExecutorName::Streams;
            executor::of(*how).launch(self, job, running)?;
        }
        Ok(())
    }

    fn is_under_way(&self, schedule: &Arc<Schedule>) -> bool {
        let mut running = self.running.iter();
        running.any(|(_, other)| Arc::ptr_eq(&other.schedule, schedule))
    }

    /// Marks the end of what was launched of a plan, on each of its streams; waits for those that cannot be
    /// marked.
    fn mark_ends(&mut self, running: &mut Running) {
        running.marks.extend(running.ends.drain(..));
        for way in &running.ways {
            let marked =
                Entered::enter_same(way.key).and_then(|entered| self.tracks.record(&entered, *way));
            match marked {
                Ok(mark) => running.ends.push_back(mark),
                Err(_) => running.is_unsure |= !synchronize(std::slice::from_ref(way)),
            }
        }
    }

    /// Events behind the last copies of those plans that are chosen and have not ended.
    fn ends_of(&self, numbers: &[u64], is_chosen: impl Fn(&Running) -> bool) -> Vec<Mark> {
        let running = self.running.iter().map(|(_, running)| running);
        running
            .filter(|running| numbers.contains(&running.number) && is_chosen(running))
            .flat_map(|running| running.ends.iter().copied())
            .collect()
    }

    /// Whether plans are under way, so that exhausted resources come back.
    #[must_use]
    pub fn is_busy(&self) -> bool {
        !self.running.is_empty()
    }

    /// How many plans have ended, well or not. Until that changes, exhausted resources stay exhausted.
    #[must_use]
    pub fn ended(&self) -> u64 {
        self.ended
    }

    /// Whether the copies are done. Does not wait, unless the driver answers nothing but errors. A plan that
    /// follows another on the same streams is done only once that one is known to be done: the caller must
    /// poll all that are kept.
    ///
    /// # Errors
    /// They were not all made, and none runs any more.
    pub fn poll(&mut self, drive: &mut Drive) -> Ended<bool> {
        if let Some(over) = drive.over {
            return over.map(|()| true);
        }
        match self.advance(drive.id) {
            None => Ok(false),
            Some(result) => {
                drive.over = Some(result);
                let running = self.running.remove(drive.id);
                self.end(running);
                result.map(|()| true)
            }
        }
    }

    /// What launches have cost, by the number of copies (a power of two), the number of GPUs, and the
    /// executor.
    #[must_use]
    pub fn costs(&self) -> &Costs {
        &self.costs
    }

    /// Staging memory in a context, bytes.
    #[must_use]
    pub fn staging_in(&self, key: ContextKey) -> u64 {
        self.staging.bytes_in(key)
    }

    /// Gives staging back on GPUs that have little memory left.
    pub fn mind_memory(&mut self) {
        self.staging.mind_memory();
    }

    /// Pinned staging memory, bytes.
    #[must_use]
    pub fn staging_in_host(&self) -> u64 {
        self.staging.host_bytes()
    }

    /// Pinned staging memory that plans may have, bytes.
    #[must_use]
    pub fn staging_in_host_max(&self) -> u64 {
        self.staging.host_bytes_max()
    }

    /// Gives pinned staging memory back that no plan uses.
    pub fn free_idle_host(&mut self) {
        self.staging.free_idle_host();
    }

    /// Graphs that are kept.
    #[must_use]
    pub fn graphs(&self) -> usize {
        self.graphs.len()
    }

    /// Waits for everything under way and gives back everything but the contexts: mappings in them are closed
    /// next.
    pub fn close(&mut self) {
        // Destroying streams waits for them.
        let unsure = std::mem::take(&mut self.unsure);
        let all: Vec<Running> = self.running.drain().chain(unsure).collect();
        for mut running in all {
            synchronize(&running.ways);
            running.is_unsure = false;
            self.end(running);
        }
        self.graphs.clear();
        self.tracks.close_streams();
        self.staging.clear();
        self.rows.clear();
    }

    /// Gives the contexts back, after [`Exec::close`].
    pub fn release(&mut self) {
        self.tracks.close();
    }

    /// The place of the plan's row, made if there is none.
    fn look_up(&mut self, plan: &Plan) -> Result<usize> {
        self.clock += 1;
        let shape = Shape::of(plan);
        let place = match self.rows.iter().position(|row| row.shape == shape) {
            Some(place) => place,
            None => {
                let schedule = Schedule::of(plan).ok_or(Error::Exhausted("copies of a plan"))?;
                if self.rows.len() >= SCHEDULES_MAX {
                    let oldest = (0..self.rows.len()).min_by_key(|row| self.rows[*row].used);
                    oldest.map(|row| self.rows.swap_remove(row));
                }
                let together = schedule.units(true);
                self.rows.push(Row {
                    shape,
                    single: Arc::new(schedule.units(false)),
                    together: (together.len() < schedule.steps.len()).then(|| Arc::new(together)),
                    schedule: Arc::new(schedule),
                    is_in_place: false,
                    used: 0,
                });
                self.rows.len() - 1
            }
        };
        self.rows[place].used = self.clock;
        Ok(place)
    }

    /// Opens streams in each context that makes copies, and its access to the memory they touch. The sender's
    /// memory is reached by its mappings.
    fn open(
        &mut self,
        schedule: &Schedule,
        request: &Request<'_>,
        launcher: ContextKey,
    ) -> Ended<()> {
        self.tracks.open(launcher)?;
        for lane in &schedule.lanes {
            let opened = self.open_lane(schedule, lane, request);
            opened.map_err(Failure::of(schedule, lane))?;
        }
        Ok(())
    }

    fn open_lane(&mut self, schedule: &Schedule, lane: &Lane, request: &Request<'_>) -> Result<()> {
        let context = |gpu: u8| request.contexts[usize::from(gpu)].ok_or(Error::NoContext);
        let own = context(lane.gpu())?;
        self.tracks.open(own)?;
        for base in [lane.from, lane.to] {
            match base {
                schedule::Base::Source => {}
                schedule::Base::Target => {
                    self.tracks.allow(own, context(request.plan.message.to)?)?;
                }
                schedule::Base::Ring(ring) => {
                    if let Place::Gpu(gpu) = schedule.rings[usize::from(ring)].at {
                        self.tracks.allow(own, context(gpu)?)?;
                    }
                }
            }
        }
        Ok(())
    }

    fn choose(&self, class: Class, at: usize, plan: &Plan, is_first: bool) -> ExecutorName {
        let row = &self.rows[at];
        let is_alone = plan.message.window == 1;
        let may_be_graph = is_first && (is_alone || !row.is_in_place);
        let possible = |how| executor::of(how).is_possible(self, row);
        if let Some(forced) = self.settings.forced {
            return if possible(forced) {
                forced
            } else {
                ExecutorName::Streams
            };
        }
        let possible = |how| possible(how) && (may_be_graph || how != ExecutorName::Graph);
        let window = f64::from(plan.message.window);
        let plan_ns =
            |how| (plan.predicted_us * 1000.0 + executor::of(how).delay_ns(plan)) / window;
        self.costs.choose(class, is_alone, possible, plan_ns)
    }

    /// Whether it is in order behind one that somebody still asks about.
    fn is_behind_another(&self, id: usize) -> bool {
        let Some(running) = self.running.get(id) else {
            return false;
        };
        let mut others = self.running.iter().map(|(_, other)| other);
        others.any(|other| {
            other.number < running.number
                && other.owner.strong_count() > 0
                && running.error.is_none()
                && running.graph.is_none()
                && other.is_on_streams_of(running)
        })
    }

    /// Asks the driver how far a plan has got. `None`: not to its end.
    fn advance(&mut self, id: usize) -> Option<Ended<()>> {
        // A plan that is in order behind another need not be asked about before that one has ended. Otherwise
        // each look at a window would ask the driver about each message, and a thread that has to launch the
        // next ones has no time for that.
        if self.is_behind_another(id) {
            return None;
        }
        let Some(running) = self.running.get_mut(id) else {
            return Some(Err(Error::Exhausted("plans under way").into()));
        };
        while let Some(end) = running.ends.front() {
            let asked = Entered::enter_same(end.key)
                .and_then(|entered| entered.driver().event_query(end.event));
            match asked {
                Ok(()) => {
                    running.failures = 0;
                    running.marks.extend(running.ends.pop_front());
                }
                Err(error) if error.is(code::NOT_READY) => {
                    running.failures = 0;
                    return None;
                }
                Err(error) => {
                    running.failures += 1;
                    if running.failures < FAILURES_MAX && !error.context_is_gone() {
                        stats::add(Counter::DriverRetries, 1);
                        return None;
                    }
                    // The last question waits: the copies end by themselves, if anything does.
                    if !synchronize(&running.ways) {
                        let place = running.place_of(end.key);
                        running.error.get_or_insert(Failure::new(error, place));
                        running.is_unsure = !error.context_is_gone();
                    }
                    running.marks.extend(running.ends.drain(..));
                }
            }
        }
        Some(running.error.map_or(Ok(()), Err))
    }

    /// Gives back what a plan had, when nothing of it runs any more.
    fn end(&mut self, running: Running) {
        self.ended += 1;
        if running.is_unsure {
            self.unsure.push(running);
            return;
        }
        for mark in running.marks.into_iter().chain(running.ends) {
            self.tracks.give_back(mark);
        }
        for lease in &running.leases {
            self.staging.give_back(lease);
        }
        if let Some(id) = running.graph {
            if running.error.is_some() {
                self.graphs.destroy(id);
            } else {
                self.graphs.ended(id);
            }
        }
    }

    /// Ends plans that nobody waits for any more.
    fn reap(&mut self) {
        for mut running in std::mem::take(&mut self.unsure) {
            running.is_unsure = !synchronize(&running.ways);
            self.end(running);
        }
        let unowned: Vec<usize> = self
            .running
            .iter()
            .filter(|(_, running)| running.owner.strong_count() == 0)
            .map(|(id, _)| id)
            .collect();
        for id in unowned {
            if self.advance(id).is_some() {
                let running = self.running.remove(id);
                self.end(running);
            }
        }
    }
}

impl Running {
    /// The GPU of a context, if the message goes over it.
    fn place_of(&self, key: ContextKey) -> Option<Place> {
        let gpu = self.contexts.iter().position(|of| *of == Some(key))?;
        self.schedule.relay(u8::try_from(gpu).ok()?)
    }

    /// Whether another plan, launched on streams as well, writes on the same streams as this one, the same
    /// bytes on each.
    fn is_in_order_with(&self, other: &Running) -> bool {
        self.target == other.target && self.is_on_streams_of(other)
    }

    /// Whether all copies of another plan, launched on streams as well, are on the same streams as this
    /// one's.
    fn is_on_streams_of(&self, other: &Running) -> bool {
        Arc::ptr_eq(&self.schedule, &other.schedule)
            && self.contexts == other.contexts
            && self.graph.is_none()
            && self.error.is_none()
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        self.close();
        self.release();
    }
}

/// The contexts of the GPUs that take part.
fn only(contexts: &[Option<ContextKey>; MAX_GPUS], gpus: u32) -> [Option<ContextKey>; MAX_GPUS] {
    std::array::from_fn(|gpu| contexts[gpu].filter(|_| gpus & (1 << gpu) != 0))
}

/// Waits for streams. False if one of them could not be waited for. Work in a context that is gone has ended.
fn synchronize(ways: &[Way]) -> bool {
    let waited = |way: &Way| {
        let entered = Entered::enter_same(way.key)?;
        entered.driver().stream_synchronize(way.stream)
    };
    ways.iter().fold(true, |all, way| {
        let ended = match waited(way).or_else(|_| waited(way)) {
            Ok(()) => true,
            Err(error) => error.context_is_gone(),
        };
        all & ended
    })
}
