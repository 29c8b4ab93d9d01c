//! CUDA graphs of plans, kept for the next plan of the same shape.
//!
//! An instance belongs to a shape and its contexts. Addresses are changed in place where they differ from
//! those of the launch before. An instance is never launched while it runs: a window of messages uses
//! several, a bounded number. If there are too many, the one that was unused for longest is destroyed.
//!
//! Graphs that run at the same time are kept in order lane by lane: the first copies of a lane wait for an
//! event that the graph before records behind its last one. Otherwise the direct copies of a window take all
//! engines, and the relays wait (simulated Beluga, windows of 256 MiB: 1.9 times one path, with the order
//! 3.0). See `docs/decisions/graphs-in-lane-order.md`.

use crate::cuda::types::{GraphExec, GraphHandle, GraphNode, Memcpy3d};
use crate::cuda::{ContextKey, Entered, Error, Result};
use crate::exec::schedule::{Base, Binding, Schedule, Shape};
use crate::exec::tracks::Tracks;
use crate::stats::{self, Counter};
use crate::topology::MAX_GPUS;

/// Instances of one shape at most.
pub const INSTANCES_MAX: usize = 4;

/// What an instance depends on, beside addresses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Key {
    /// The plan's shape.
    pub shape: Shape,
    /// The contexts of the GPUs.
    pub contexts: [Option<ContextKey>; MAX_GPUS],
    /// The context that launches it.
    pub launcher: ContextKey,
}

struct Instance {
    id: u64,
    key: Key,
    graph: GraphHandle,
    exec: GraphExec,
    nodes: Vec<GraphNode>,
    bound: Binding,
    runs: bool,
    seat: usize,
    used: u64,
}

/// The graphs of this process.
pub struct Graphs {
    rows: Vec<Instance>,
    count_max: usize,
    clock: u64,
}

impl Graphs {
    /// A cache of so many instances.
    #[must_use]
    pub fn new(count_max: usize) -> Graphs {
        Graphs {
            rows: Vec::new(),
            count_max,
            clock: 0,
        }
    }

    /// Instances in the cache.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Takes an instance that does not run, bound to the addresses. Returns its number, and whether it is
    /// new. `Ok(None)`: all that there may be are running. It counts as running until [`Graphs::ended`] or
    /// [`Graphs::destroy`].
    ///
    /// # Errors
    /// It cannot be built.
    pub fn take(
        &mut self,
        tracks: &mut Tracks,
        key: &Key,
        schedule: &Schedule,
        binding: &Binding,
    ) -> Result<Option<(u64, bool)>> {
        self.clock += 1;
        self.drop_lost(key);
        let seat = self.seat();
        // The one with the fewest addresses to change.
        let idle = self
            .rows
            .iter_mut()
            .filter(|row| !row.runs && row.key == *key);
        if let Some(row) = idle.min_by_key(|row| row.bound.differences(binding)) {
            match row.rebind(schedule, binding) {
                Ok(changed) => {
                    let counter = if changed {
                        Counter::GraphsUpdated
                    } else {
                        Counter::GraphsRelaunched
                    };
                    stats::add(counter, 1);
                    row.used = self.clock;
                    row.runs = true;
                    row.seat = seat;
                    return Ok(Some((row.id, false)));
                }
                Err(error) => {
                    log::debug!("a graph's addresses cannot be changed: {error}; built anew");
                    let id = row.id;
                    self.destroy(id);
                }
            }
        }
        if self.rows.iter().filter(|row| row.key == *key).count() >= INSTANCES_MAX
            || !self.make_room()
        {
            return Ok(None);
        }
        let (graph, nodes, exec) = build(tracks, key, schedule, binding)?;
        stats::add(Counter::GraphsBuilt, 1);
        self.rows.push(Instance {
            id: self.clock,
            key: key.clone(),
            graph,
            exec,
            nodes,
            bound: binding.clone(),
            runs: true,
            seat,
            used: self.clock,
        });
        Ok(Some((self.clock, true)))
    }

    /// What to launch of an instance, and a number that distinguishes instances that run at once.
    #[must_use]
    pub fn exec(&self, id: u64) -> Option<(GraphExec, usize)> {
        let row = self.rows.iter().find(|row| row.id == id)?;
        Some((row.exec, row.seat))
    }

    /// The lowest number that no running instance has.
    fn seat(&self) -> usize {
        let is_free = |seat: &usize| !self.rows.iter().any(|row| row.runs && row.seat == *seat);
        (0..self.rows.len())
            .find(is_free)
            .unwrap_or(self.rows.len())
    }

    /// An instance does not run any more.
    pub fn ended(&mut self, id: u64) {
        if let Some(row) = self.rows.iter_mut().find(|row| row.id == id) {
            row.runs = false;
        }
    }

    /// Whether an instance runs.
    #[must_use]
    pub fn runs(&self, id: u64) -> bool {
        self.rows.iter().any(|row| row.id == id && row.runs)
    }

    /// Destroys an instance.
    pub fn destroy(&mut self, id: u64) {
        self.retain(|row| row.id != id);
    }

    /// Destroys all: at finalize, when none runs.
    pub fn clear(&mut self) {
        self.retain(|_| false);
    }

    fn retain(&mut self, stays: impl Fn(&Instance) -> bool) {
        self.rows.retain(|row| {
            let stays = stays(row);
            if !stays {
                destroy(row.graph, Some(row.exec));
            }
            stays
        });
    }

    /// Destroys instances over contexts that are gone and whose handles are used again.
    fn drop_lost(&mut self, key: &Key) {
        let reused = |row: &Instance| {
            let pairs = row.key.contexts.iter().zip(&key.contexts);
            pairs
                .filter_map(|(old, new)| old.zip(*new))
                .any(|(old, new)| old.handle == new.handle && old.id != new.id)
        };
        if self.rows.iter().any(|row| !row.runs && reused(row)) {
            self.retain(|row| row.runs || !reused(row));
        }
    }

    /// Makes room for one more. False if all are running.
    fn make_room(&mut self) -> bool {
        while self.rows.len() >= self.count_max {
            let idle = self.rows.iter().filter(|row| !row.runs);
            let Some(oldest) = idle.min_by_key(|row| row.used).map(|row| row.id) else {
                return false;
            };
            self.destroy(oldest);
            stats::add(Counter::GraphsEvicted, 1);
        }
        true
    }
}

impl Instance {
    /// Changes the addresses that differ. Returns whether any did. After an error the instance is of no use.
    fn rebind(&mut self, schedule: &Schedule, binding: &Binding) -> Result<bool> {
        if self.bound == *binding {
            return Ok(false);
        }
        let entered = Entered::enter_same(self.key.launcher)?;
        for (step, node) in schedule.steps.iter().zip(&self.nodes) {
            let gpu = schedule.lanes[usize::from(step.lane)].gpu();
            let moved = |base: Base| self.bound.moved(binding, gpu, base);
            if !moved(step.from.base) && !moved(step.to.base) {
                continue;
            }
            let context = self.key.contexts[usize::from(gpu)].ok_or(Error::NoContext)?;
            let copy = linear(schedule, binding, step)?;
            // SAFETY: the node is of the graph that this was instantiated from, and `copy` is read.
            unsafe {
                entered.driver().graph_exec_memcpy_node_set_params(
                    self.exec,
                    *node,
                    &raw const copy,
                    context.handle,
                )?;
            }
        }
        self.bound.clone_from(binding);
        Ok(true)
    }
}

impl Binding {
    /// Whether an address changes from this to another binding.
    fn moved(&self, other: &Binding, gpu: u8, base: Base) -> bool {
        let zero = |base| crate::exec::schedule::At { base, offset: 0 };
        self.address(gpu, zero(base)) != other.address(gpu, zero(base))
    }

    /// How many addresses change.
    fn differences(&self, other: &Binding) -> usize {
        let pairs = self.rings.iter().zip(&other.rings);
        pairs.filter(|(a, b)| a != b).count() * 2
            + usize::from(self.source != other.source)
            + usize::from(self.target != other.target)
    }
}

fn linear(
    schedule: &Schedule,
    binding: &Binding,
    step: &crate::exec::schedule::Step,
) -> Result<Memcpy3d> {
    let gpu = schedule.lanes[usize::from(step.lane)].gpu();
    let bytes = usize::try_from(step.bytes).map_err(|_| Error::Exhausted("address space"))?;
    Ok(Memcpy3d::linear(
        binding.address(gpu, step.to),
        binding.address(gpu, step.from),
        bytes,
    ))
}

fn build(
    tracks: &mut Tracks,
    key: &Key,
    schedule: &Schedule,
    binding: &Binding,
) -> Result<(GraphHandle, Vec<GraphNode>, GraphExec)> {
    let entered = Entered::enter_same(key.launcher)?;
    let driver = entered.driver();
    let mut graph = GraphHandle::NULL;
    driver.graph_create(&mut graph, 0)?;
    let mut nodes: Vec<GraphNode> = Vec::with_capacity(schedule.steps.len());
    let mut latest: Vec<Option<GraphNode>> = vec![None; schedule.lanes.len()];
    let mut left: Vec<usize> = vec![0; schedule.lanes.len()];
    for step in &schedule.steps {
        left[usize::from(step.lane)] += 1;
    }
    let added = schedule.steps.iter().try_for_each(|step| {
        let number = usize::from(step.lane);
        let lane = &schedule.lanes[number];
        let context = key.contexts[usize::from(lane.gpu())].ok_or(Error::NoContext)?;
        // The other lanes follow these.
        let gate = match lane.from {
            Base::Source => Some(tracks.gate(context, lane.engine, lane.number)?),
            _ => None,
        };
        let mut node = GraphNode::NULL;
        if let (None, Some(gate)) = (latest[number], gate) {
            // SAFETY: `node` is written; the event is live as long as the streams of its context.
            unsafe {
                driver.graph_add_event_wait_node(
                    &raw mut node,
                    graph,
                    std::ptr::null(),
                    0,
                    gate,
                )?;
            }
            latest[number] = Some(node);
        }
        let mut before: Vec<GraphNode> = [step.data, step.slot]
            .into_iter()
            .flatten()
            .map(|step| nodes[step as usize])
            .chain(latest[number])
            .collect();
        before.dedup();
        let copy = linear(schedule, binding, step)?;
        // SAFETY: `node` is written, `before` names as many nodes of this graph, `copy` is read; the driver
        // checks addresses, which stay valid while a plan runs.
        unsafe {
            driver.graph_add_memcpy_node(
                &raw mut node,
                graph,
                before.as_ptr(),
                before.len(),
                &raw const copy,
                context.handle,
            )?;
        }
        latest[number] = Some(node);
        nodes.push(node);
        left[number] -= 1;
        if let (0, Some(gate)) = (left[number], gate) {
            let mut end = GraphNode::NULL;
            // SAFETY: `end` is written, and one node is read; the event as above.
            unsafe {
                driver.graph_add_event_record_node(
                    &raw mut end,
                    graph,
                    &raw const node,
                    1,
                    gate,
                )?;
            }
        }
        Ok(())
    });
    let mut exec = GraphExec::NULL;
    let made = added.and_then(|()| driver.graph_instantiate(&mut exec, graph, 0));
    match made {
        Ok(()) => Ok((graph, nodes, exec)),
        Err(error) => {
            destroy(graph, None);
            Err(error)
        }
    }
}

fn destroy(graph: GraphHandle, exec: Option<GraphExec>) {
    let Ok(entered) = Entered::relaxed() else {
        return;
    };
    let driver = entered.driver();
    // SAFETY: made by `build`, and used by nobody any more.
    let (exec, graph) = unsafe {
        (
            exec.map_or(Ok(()), |exec| driver.graph_exec_destroy(exec)),
            driver.graph_destroy(graph),
        )
    };
    if let Err(error) = exec.and(graph) {
        log::debug!("destroying a graph: {error}");
    }
}
