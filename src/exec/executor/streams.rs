//! The streams executor: a stream for each hop of a path, with events between hops and where a slot is used
//! again. It launches copy by copy; what launches several with one call uses the same steps.

use std::sync::Arc;

use super::{Executor, ExecutorName, Job};
use crate::cuda::copy::{self, Copy};
use crate::cuda::{clock_ns, ContextKey, Entered, Error, Result};
use crate::exec::schedule::{Schedule, Unit};
use crate::exec::tracks::{Mark, Way};
use crate::exec::{Ended, Exec, Failure, Row, Running};
use crate::stats::Counter;

pub(super) struct Streams;

impl Executor for Streams {
    fn name(&self) -> ExecutorName {
        ExecutorName::Streams
    }

    fn counter(&self) -> Counter {
        Counter::OneOwnerStreams
    }

    fn is_possible(&self, _: &Exec, _: &Row) -> bool {
        true
    }

    fn launch(&self, exec: &mut Exec, job: &Job, running: &mut Running) -> Ended<bool> {
        exec.launch_units(self.name(), &job.single, job, running)?;
        Ok(true)
    }
}

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
    /// Launches a plan on streams, unit by unit, and notes what that takes. What it writes to the receiver's
    /// buffer comes behind the plans that it follows. After an error some of it may run.
    pub(super) fn launch_units(
        &mut self,
        by: ExecutorName,
        units: &[Unit],
        job: &Job,
        running: &mut Running,
    ) -> Ended<()> {
        // Plans that write the same bytes on the same streams are in order.
        let behind = self.ends_of(&job.after, |other| !other.is_in_order_with(running));
        let begun = clock_ns();
        self.launch_all(units, job, &behind, running)?;
        self.costs.note(job.class, by, clock_ns() - begun);
        Ok(())
    }

    fn launch_all(
        &mut self,
        units: &[Unit],
        job: &Job,
        behind: &[Mark],
        running: &mut Running,
    ) -> Ended<()> {
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
            let is_first = launched.ways[usize::from(unit.lane)].is_none();
            let behind = if is_first && lane.is_last {
                behind
            } else {
                &[]
            };
            let unit = (number, unit);
            self.launch_unit(unit, job, behind, running, &mut launched)
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

    /// Launches a unit behind those of other lanes that it waits for, and behind these marks.
    fn launch_unit(
        &mut self,
        (number, unit): (usize, &Unit),
        job: &Job,
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
        let way = match ways[usize::from(unit.lane)] {
            Some(way) => way,
            None => {
                let way = self.tracks.lane(key, lane.engine, lane.number)?;
                running.ways.push(way);
                *ways[usize::from(unit.lane)].insert(way)
            }
        };
        let waits = unit.waits.iter().filter_map(|before| marks[*before]);
        for mark in waits.chain(behind.iter().copied()) {
            inside
                .driver()
                .stream_wait_event(way.stream, mark.event, 0)?;
        }
        copies.clear();
        copies.extend(unit.steps.iter().map(|step| {
            let step = &schedule.steps[*step as usize];
            Copy::Linear {
                dst: job.binding.address(gpu, step.to),
                src: job.binding.address(gpu, step.from),
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
}
