//! The batch executor: as streams, with chunks of one lane handed over by one call, up to half a staging ring.

use super::{Executor, ExecutorName, Job};
use crate::exec::{schedule, Ended, Exec, Row, Running};
use crate::plan::Plan;
use crate::stats::Counter;

pub(super) struct Batch;

impl Executor for Batch {
    fn name(&self) -> ExecutorName {
        ExecutorName::Batch
    }

    fn counter(&self) -> Counter {
        Counter::OneOwnerBatch
    }

    fn is_possible(&self, _: &Exec, row: &Row) -> bool {
        row.together.is_some()
    }

    /// A pipeline of batches is filled by a batch, no longer by a chunk.
    fn delay_ns(&self, plan: &Plan) -> f64 {
        let paths = plan.paths().iter().filter(|path| path.slots > 1);
        let filling = paths.map(|path| {
            let chunk_us = path.predicted_us * path.chunk_bytes as f64 / path.bytes as f64;
            f64::from(schedule::together(path) - 1) * chunk_us * 1000.0
        });
        filling.fold(0.0, f64::max)
    }

    fn launch(&self, exec: &mut Exec, job: &Job, running: &mut Running) -> Ended<bool> {
        let Some(units) = &job.together else {
            return Ok(false);
        };
        exec.launch_units(self.name(), units, job, running)?;
        Ok(true)
    }
}
