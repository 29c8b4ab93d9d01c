//! The graph executor: one CUDA graph over all contexts, kept and launched again, with its addresses changed
//! in place.

use std::sync::Arc;

use super::{Executor, ExecutorName, Job};
use crate::cuda::{clock_ns, ContextKey, Entered, Error, Result};
use crate::exec::graphs::Key;
use crate::exec::tracks::Mark;
use crate::exec::{synchronize, Ended, Exec, Row, Running, GRAPH_FAILURES_MAX};
use crate::stats::{self, Counter};

pub(super) struct Graph;

impl Executor for Graph {
    fn name(&self) -> ExecutorName {
        ExecutorName::Graph
    }

    fn counter(&self) -> Counter {
        Counter::OneOwnerGraph
    }

    fn is_possible(&self, exec: &Exec, _: &Row) -> bool {
        exec.settings.graphs_max > 0 && exec.graph_failures < GRAPH_FAILURES_MAX
    }

    /// A graph is launched behind everything that is written in its place before.
    fn launch(&self, exec: &mut Exec, job: &Job, running: &mut Running) -> Ended<bool> {
        let key = Key {
            shape: job.shape.clone(),
            contexts: running.contexts,
            launcher: job.launcher,
        };
        let behind = exec.ends_of(&job.after, |_| true);
        Ok(exec.launch_graph(job, &key, &behind, running))
    }
}

impl Exec {
    /// Launches a plan as a graph. False if that is not possible; then nothing of it runs.
    fn launch_graph(
        &mut self,
        job: &Job,
        key: &Key,
        behind: &[Mark],
        running: &mut Running,
    ) -> bool {
        let schedule = Arc::clone(&running.schedule);
        // A second try with a newly built graph.
        for _ in 0..2 {
            let begun = clock_ns();
            let (id, is_new) =
                match self
                    .graphs
                    .take(&mut self.tracks, key, &schedule, &job.binding)
                {
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
                    self.costs
                        .note(job.class, ExecutorName::Graph, clock_ns() - begun);
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
            entered
                .driver()
                .stream_wait_event(way.stream, mark.event, 0)
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
}
