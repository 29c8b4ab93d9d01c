//! Executors: ways of handing the copies of a plan to the driver. One is a file here and a line in [`of`].
//!
//! All launch the same schedule, and all of it before the call returns. What one copy waits for is the order
//! of a stream, an event or an edge of a graph here. Where each rank makes the copies of its own GPU
//! (`transfer/fetch/protocol/multipath.rs`, `transfer/serve/staged_parts.rs`), a hop that is the other rank's
//! is handed over by the CPU, chunk by chunk, as soon as one is there. So nothing can be launched before what
//! it waits for is done: such plans run on streams, and no batch or graph of them can be made.

mod batch;
mod graph;
mod streams;

use std::sync::Arc;

use super::costs::Class;
use super::schedule::{Binding, Shape, Unit};
use super::{Ended, Exec, Row, Running};
use crate::cuda::ContextKey;
use crate::plan::Plan;
use crate::stats::Counter;

/// How a plan is launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(usize)]
pub enum ExecutorName {
    /// Copy by copy on streams.
    Streams = 0,
    /// In batches on streams.
    Batch = 1,
    /// As a CUDA graph.
    Graph = 2,
}

impl ExecutorName {
    /// All of them.
    pub const ALL: [ExecutorName; 3] = [
        ExecutorName::Streams,
        ExecutorName::Batch,
        ExecutorName::Graph,
    ];

    /// Name, as the option has it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            ExecutorName::Streams => "streams",
            ExecutorName::Batch => "batch",
            ExecutorName::Graph => "graph",
        }
    }
}

/// A plan that is to be launched.
pub(super) struct Job {
    pub(super) shape: Shape,
    pub(super) class: Class,
    pub(super) launcher: ContextKey,
    pub(super) binding: Binding,
    /// Plans that write to parts of the receiver's buffer: this one writes there after them.
    pub(super) after: Vec<u64>,
    /// Its copies one by one, and in batches, if there are any.
    pub(super) single: Arc<Vec<Unit>>,
    pub(super) together: Option<Arc<Vec<Unit>>>,
}

/// A way of launching a plan.
pub(super) trait Executor {
    fn name(&self) -> ExecutorName;

    /// What counts its launches.
    fn counter(&self) -> Counter;

    /// Whether it can launch plans of this shape, as far as is known before.
    fn is_possible(&self, exec: &Exec, row: &Row) -> bool;

    /// By how much a plan takes longer than it was predicted to, ns.
    fn delay_ns(&self, _: &Plan) -> f64 {
        0.0
    }

    /// Launches a plan. False if that is not possible; then nothing of it runs.
    ///
    /// # Errors
    /// Some of it may run.
    fn launch(&self, exec: &mut Exec, job: &Job, running: &mut Running) -> Ended<bool>;
}

/// The executor of this name.
pub(super) fn of(name: ExecutorName) -> &'static dyn Executor {
    match name {
        ExecutorName::Streams => &streams::Streams,
        ExecutorName::Batch => &batch::Batch,
        ExecutorName::Graph => &graph::Graph,
    }
}
