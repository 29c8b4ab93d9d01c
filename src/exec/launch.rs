//! The launches of a plan: as a graph, or copy by copy and in batches on streams.

use std::sync::Arc;

use super::costs::Class;
use super::graphs::Key;
use super::schedule::{Binding, Schedule, Unit};
use super::tracks::{Mark, Way};
use super::{synchronize, Exec, Executor, Failure, Running, GRAPH_FAILURES_MAX};
use crate::cuda::copy::{self, Copy};
use crate::cuda::{clock_ns, ContextKey, Entered, Error, Result};
use crate::stats::{self, Counter};

/// What has been launched of a plan's units.
struct Launched {
    schedule: Arc<Schedule>,
    /// The end of each unit that another waits for.
    marks: Vec<Option<Mark>>,
    /// The stream of each lane that has begun.
    ways: Vec<Option<Way>>,
    /// The context that is entered.
    entered: Option<(ContextKey, Entered)>,
    /// Room for the copies of a unit.
    copies: Vec<Copy>,
}

impl Exec {
    /// Launches a plan as a graph. False if that is not possible; then nothing of it runs.
    pub(super) fn launch_graph(
        &mut self,
        class: Class,
        key: &Key,
        binding: &Binding,
        behind: &[Mark],
        running: &mut Running,
    ) -> bool {
        let schedule = Arc::clone(&running.schedule);
        // A second try with a newly built graph.
        for _ in 0..2 {
            let begun = clock_ns();
            let (id, is_new) = match self.graphs.take(&mut self.tracks, key, &schedule, binding) {
                Ok(Some(taken)) => taken,
                Ok(None) => return false,
                Err(error) => {
                    self.graph_failed("built", &error);
                    return false;
                }
            };
            // What building takes is paid once.
            let begun = if is_new { clock_ns() } else { begun };
            match self.launch_instance(id, key.launcher, behind, running) {
                Ok(()) => {
                    self.costs.note(class, Executor::Graph, clock_ns() - begun);
                    self.graph_failures = 0;
                    running.graph = Some(id);
                    return true;
                }
                Err(error) => {
                    if synchronize(&running.ways) {
                        running.ways.clear();
                    } else {
                        running.is_unsure = true;
                    }
                    self.graphs.destroy(id);
                    self.graph_failed("launched", &error);
                }
            }
        }
        false
    }

    fn launch_instance(
        &mut self,
        id: u64,
        launcher: ContextKey,
        behind: &[Mark],
        running: &mut Running,
    ) -> Result<()> {
        let (exec, number) = self.graphs.exec(id).ok_or(Error::Exhausted("graphs"))?;
        let way = self.tracks.launcher(launcher, number)?;
        let entered = Entered::enter_same(launcher)?;
        let end = self.tracks.mark(&entered, launcher)?;
        running.ways.push(way);
        let waited = behind.iter().try_for_each(|mark| {
            // SAFETY: stream and event are live; the event was recorded behind copies launched before.
            unsafe {
                entered
                    .driver()
                    .stream_wait_event(way.stream, mark.event, 0)
            }
        });
        if let Err(error) = waited {
            self.tracks.give_back(end);
            return Err(error);
        }
        // SAFETY: the instance does not run, its contexts are live, and so are the addresses it is bound to;
        // the stream and the event belong to the context that is entered.
        let launched = unsafe {
            let driver = entered.driver();
            driver
                .graph_launch(exec, way.stream)
                .and_then(|()| driver.event_record(end.event, way.stream))
        };
        match launched {
            Ok(()) => running.ends.push_back(end),
            Err(_) => self.tracks.give_back(end),
        }
        launched
    }

    fn graph_failed(&mut self, what: &str, error: &Error) {
        self.graph_failures += 1;
        stats::add(Counter::GraphsFailed, 1);
        log::debug!("a graph could not be {what}: {error}");
        if self.graph_failures == GRAPH_FAILURES_MAX {
            log::warn!("cuda graphs are given up: {error}; plans go by streams");
        }
    }

    /// Launches a plan on streams. What it writes to the receiver's buffer comes behind these marks. After an
    /// error some of it may run.
    pub(super) fn launch_units(
        &mut self,
        units: &[Unit],
        binding: &Binding,
        behind: &[Mark],
        running: &mut Running,
    ) -> std::result::Result<(), Failure> {
        let schedule = Arc::clone(&running.schedule);
        let mut launched = Launched {
            schedule: Arc::clone(&schedule),
            marks: vec![None; units.len()],
            ways: vec![None; schedule.lanes.len()],
            entered: None,
            copies: Vec::new(),
        };
        for (number, unit) in units.iter().enumerate() {
            let lane = &schedule.lanes[usize::from(unit.lane)];
            self.launch_unit(number, unit, binding, behind, running, &mut launched)
                .map_err(Failure::of(&schedule, lane))?;
        }
        drop(launched.entered);
        // Every copy of a path is before its last one.
        for (lane, way) in schedule.lanes.iter().zip(launched.ways) {
            let (true, Some(way)) = (lane.is_last, way) else {
                continue;
            };
            let marked =
                Entered::enter_same(way.key).and_then(|inside| self.tracks.record(&inside, way));
            running
                .ends
                .push_back(marked.map_err(Failure::of(&schedule, lane))?);
        }
        Ok(())
    }

    #[allow(
        clippy::too_many_arguments,
        reason = "environment, driver and message apart; transfers without MPI are to bring them together"
    )]
    fn launch_unit(
        &mut self,
        number: usize,
        unit: &Unit,
        binding: &Binding,
        behind: &[Mark],
        running: &mut Running,
        launched: &mut Launched,
    ) -> Result<()> {
        let Launched {
            schedule,
            marks,
            ways,
            entered,
            copies,
        } = launched;
        let lane = &schedule.lanes[usize::from(unit.lane)];
        let gpu = lane.gpu();
        let key = running.contexts[usize::from(gpu)].ok_or(Error::NoContext)?;
        if entered.as_ref().is_none_or(|(now, _)| *now != key) {
            // One context is left before the next is entered.
            drop(entered.take());
            *entered = Some((key, Entered::enter_same(key)?));
        }
        let Some((_, inside)) = &entered else {
            return Err(Error::NoContext);
        };
        let mut first_waits: &[Mark] = &[];
        let way = match ways[usize::from(unit.lane)] {
            Some(way) => way,
            None => {
                if lane.is_last {
                    first_waits = behind;
                }
                let way = self.tracks.lane(key, lane.engine, lane.number)?;
                running.ways.push(way);
                *ways[usize::from(unit.lane)].insert(way)
            }
        };
        let waits = unit.waits.iter().filter_map(|before| marks[*before]);
        for mark in waits.chain(first_waits.iter().copied()) {
            // SAFETY: stream and event are live; the event was recorded behind copies launched before.
            unsafe {
                inside
                    .driver()
                    .stream_wait_event(way.stream, mark.event, 0)?;
            }
        }
        copies.clear();
        copies.extend(unit.steps.iter().map(|step| {
            let step = &schedule.steps[*step as usize];
            Copy::Linear {
                dst: binding.address(gpu, step.to),
                src: binding.address(gpu, step.from),
                bytes: step.bytes,
            }
        }));
        copy::start_all(inside, way.stream, copies)?;
        if unit.is_awaited {
            let mark = self.tracks.record(inside, way)?;
            running.marks.push(mark);
            marks[number] = Some(mark);
        }
        Ok(())
    }

    /// Marks the end of what was launched of a plan, on each of its streams; waits for those that cannot be
    /// marked.
    pub(super) fn mark_ends(&mut self, running: &mut Running) {
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
}
