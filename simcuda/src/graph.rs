//! Graphs and their executable form.

use crate::driver::Driver;
use crate::errors::*;
use crate::event::{Event, EventState};
use crate::sched::{pump, OpState, Position};
use crate::state::State;
use crate::types::{CUgraph, CUgraphExec, CUgraphNode, CUstream};
use crate::work::Work;
use parking_lot::MutexGuard;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

/// What a node does.
#[derive(Clone)]
pub enum NodeKind {
    /// Orders only.
    Empty,
    /// A copy, fill, kernel, host function or memory operations.
    Work(Work),
    /// Records an event.
    Record(Arc<Event>),
    /// Waits for an event.
    Wait(Arc<Event>),
    /// A graph inside.
    Child(Graph),
}

/// A node.
#[derive(Clone)]
pub struct Node {
    /// What it does.
    pub kind: NodeKind,
    /// Nodes it follows.
    pub deps: Vec<CUgraphNode>,
    /// Physical GPU of its context.
    pub gpu: usize,
    /// Function of a kernel node.
    pub function: usize,
    /// Node this one was cloned from.
    pub origin: CUgraphNode,
}

/// A graph; handles grow, so nodes are in creation order.
#[derive(Clone, Default)]
pub struct Graph {
    /// Nodes by handle.
    pub nodes: BTreeMap<CUgraphNode, Node>,
}

struct ExecNode {
    node: CUgraphNode,
    kind: NodeKind,
    deps: Vec<usize>,
    gpu: usize,
    chain: u64,
}

/// An executable graph.
pub struct Exec {
    nodes: Vec<ExecNode>,
    launches: u64,
    last: Option<Arc<OpState>>,
}

impl NodeKind {
    /// CUgraphNodeType.
    pub fn code(&self) -> u32 {
        match self {
            NodeKind::Work(Work::Kernel(_)) => 0,
            NodeKind::Work(Work::Copy(_)) => 1,
            NodeKind::Work(Work::Fill(_)) => 2,
            NodeKind::Work(Work::Host(_)) => 3,
            NodeKind::Child(_) => 4,
            NodeKind::Empty | NodeKind::Work(_) => match self {
                NodeKind::Work(Work::MemOps(_)) => 12,
                _ => 5,
            },
            NodeKind::Wait(_) => 6,
            NodeKind::Record(_) => 7,
        }
    }

    /// Of a copy: whether it begins and ends in device memory.
    fn direction(&self) -> Option<(bool, bool)> {
        match self {
            NodeKind::Work(Work::Copy(copies)) => copies
                .first()
                .map(|c| (c.src.gpu().is_some(), c.dst.gpu().is_some())),
            _ => None,
        }
    }
}

impl Graph {
    /// `nodes` and everything they follow.
    pub fn ancestors(&self, nodes: &[CUgraphNode]) -> HashSet<CUgraphNode> {
        let mut seen = HashSet::new();
        let mut open = nodes.to_vec();
        while let Some(n) = open.pop() {
            if seen.insert(n) {
                open.extend(
                    self.nodes
                        .get(&n)
                        .into_iter()
                        .flat_map(|n| n.deps.iter().copied()),
                );
            }
        }
        seen
    }

    /// Nodes in an order that respects the edges; an error when there is a cycle.
    fn order(&self) -> Res<Vec<CUgraphNode>> {
        let mut placed = HashSet::new();
        let mut order = Vec::with_capacity(self.nodes.len());
        while order.len() < self.nodes.len() {
            let before = order.len();
            for (handle, node) in &self.nodes {
                if !placed.contains(handle) && node.deps.iter().all(|d| placed.contains(d)) {
                    placed.insert(*handle);
                    order.push(*handle);
                }
            }
            if order.len() == before {
                return Err(INVALID_VALUE);
            }
        }
        Ok(order)
    }
}

impl State {
    /// Enters a graph.
    pub fn add_graph(&mut self, graph: Graph) -> CUgraph {
        let handle = self.handle();
        for node in graph.nodes.keys() {
            self.node_graph.insert(*node, handle);
        }
        self.graphs.insert(handle, graph);
        handle
    }

    /// Removes a graph with its nodes.
    pub fn remove_graph(&mut self, handle: CUgraph) -> Option<Graph> {
        let graph = self.graphs.remove(&handle)?;
        for node in graph.nodes.keys() {
            self.node_graph.remove(node);
        }
        Some(graph)
    }

    /// Adds a node.
    pub fn add_node(&mut self, graph: CUgraph, mut node: Node) -> Res<CUgraphNode> {
        node.deps.sort_unstable();
        node.deps.dedup();
        let known = &self.graphs.get(&graph).ok_or(INVALID_VALUE)?.nodes;
        if node.deps.iter().any(|d| !known.contains_key(d)) {
            return Err(INVALID_VALUE);
        }
        let handle = self.handle();
        self.node_graph.insert(handle, graph);
        if let Some(g) = self.graphs.get_mut(&graph) {
            g.nodes.insert(handle, node);
        }
        Ok(handle)
    }

    /// A copy with new node handles.
    pub fn clone_graph(&mut self, graph: &Graph) -> Graph {
        let map: HashMap<CUgraphNode, CUgraphNode> =
            graph.nodes.keys().map(|n| (*n, self.handle())).collect();
        let nodes = graph.nodes.iter().map(|(handle, node)| {
            let mut copy = node.clone();
            copy.deps = node
                .deps
                .iter()
                .filter_map(|d| map.get(d).copied())
                .collect();
            copy.origin = *handle;
            (map[handle], copy)
        });
        Graph {
            nodes: nodes.collect(),
        }
    }

    /// The node and its graph.
    pub fn node_mut(&mut self, node: CUgraphNode) -> Res<&mut Node> {
        let graph = self.node_graph.get(&node).ok_or(INVALID_VALUE)?;
        self.graphs
            .get_mut(graph)
            .and_then(|g| g.nodes.get_mut(&node))
            .ok_or(INVALID_VALUE)
    }
}

/// Lays a graph out, child graphs in place.
fn flatten(graph: &Graph, roots: &[usize], out: &mut Vec<ExecNode>) -> Res<Vec<usize>> {
    let mut index: HashMap<CUgraphNode, usize> = HashMap::new();
    let mut leaves: HashSet<usize> = HashSet::new();
    for handle in graph.order()? {
        let node = &graph.nodes[&handle];
        let mut deps: Vec<usize> = node.deps.iter().map(|d| index[d]).collect();
        if deps.is_empty() {
            deps = roots.to_vec();
        }
        deps.iter().for_each(|d| {
            leaves.remove(d);
        });
        let mut kind = node.kind.clone();
        if let NodeKind::Child(child) = &node.kind {
            let inner = flatten(child, &deps, out)?;
            if !inner.is_empty() {
                deps = inner;
            }
            kind = NodeKind::Empty;
        }
        out.push(ExecNode {
            node: handle,
            kind,
            deps,
            gpu: node.gpu,
            chain: 0,
        });
        index.insert(handle, out.len() - 1);
        leaves.insert(out.len() - 1);
    }
    let mut leaves: Vec<usize> = leaves.into_iter().collect();
    leaves.sort_unstable();
    Ok(leaves)
}

impl Exec {
    /// cuGraphInstantiate.
    pub fn new(d: &Driver, graph: &Graph) -> Res<Exec> {
        let mut nodes = Vec::new();
        flatten(graph, &[], &mut nodes)?;
        // Nodes that follow each other share a chain, so that histories stay short.
        let mut taken: HashSet<usize> = HashSet::new();
        for i in 0..nodes.len() {
            let free = nodes[i].deps.iter().copied().find(|d| !taken.contains(d));
            nodes[i].chain = match free {
                Some(dep) => {
                    taken.insert(dep);
                    nodes[dep].chain
                }
                None => d.new_stream_uid(),
            };
        }
        Ok(Exec {
            nodes,
            launches: 0,
            last: None,
        })
    }

    /// Number of nodes.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// True for a graph without nodes.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// cuGraphExec...NodeSetParams: the kind must stay the same.
    pub fn set(&mut self, node: CUgraphNode, kind: NodeKind) -> Res {
        let slot = self
            .nodes
            .iter_mut()
            .find(|n| n.node == node)
            .ok_or(INVALID_VALUE)?;
        if slot.kind.code() != kind.code() || slot.kind.direction() != kind.direction() {
            return Err(INVALID_VALUE);
        }
        slot.kind = kind;
        Ok(())
    }

    /// cuGraphExecUpdate: takes over the parameters of a graph of the same shape, or says why not
    /// (CUgraphExecUpdateResult and the node).
    pub fn update(&mut self, graph: &Graph) -> Result<(), (u32, CUgraphNode)> {
        const TOPOLOGY_CHANGED: u32 = 2;
        const TYPE_CHANGED: u32 = 3;
        let mut nodes = Vec::new();
        flatten(graph, &[], &mut nodes).map_err(|_| (1, 0))?;
        if nodes.len() != self.nodes.len() {
            return Err((TOPOLOGY_CHANGED, 0));
        }
        for (old, new) in self.nodes.iter().zip(&nodes) {
            if old.deps != new.deps {
                return Err((TOPOLOGY_CHANGED, new.node));
            }
            if old.kind.code() != new.kind.code() {
                return Err((TYPE_CHANGED, new.node));
            }
        }
        for (old, new) in self.nodes.iter_mut().zip(nodes) {
            old.kind = new.kind;
            old.gpu = new.gpu;
        }
        Ok(())
    }

    /// The last launch, for those who wait before destroying it.
    pub fn last(&self) -> Option<Arc<OpState>> {
        self.last.clone()
    }
}

/// cuGraphLaunch into a stream that is not captured.
pub fn launch(
    d: &'static Driver,
    st: &mut MutexGuard<'_, State>,
    exec: CUgraphExec,
    stream: CUstream,
) -> Res {
    let mut graph = st.execs.remove(&exec).ok_or(INVALID_VALUE)?;
    let outcome = enter_nodes(d, st, &mut graph, stream);
    st.execs.insert(exec, graph);
    outcome?;
    d.active();
    pump(d, st);
    d.wake_worker();
    Ok(())
}

fn enter_nodes(
    d: &'static Driver,
    st: &mut MutexGuard<'_, State>,
    graph: &mut Exec,
    stream: CUstream,
) -> Res {
    let calls = &d.topology.calls;
    let one_gpu = graph.nodes.windows(2).all(|w| w[0].gpu == w[1].gpu);
    let node_us = |node: &ExecNode| match (one_gpu, &node.kind) {
        (false, _) => calls.graph_node_us,
        (true, NodeKind::Work(Work::Copy(_))) => calls
            .graph_copy_one_gpu_us
            .unwrap_or(calls.graph_node_one_gpu_us),
        (true, _) => calls.graph_node_one_gpu_us,
    };
    let first = d.charge(calls.graph_launch_us);
    let issued = d.charge(graph.nodes.iter().map(node_us).sum());
    let mut handed_us = 0.0;
    let known = d.observations();
    let mut before = st.stream_deps(stream);
    // One executable graph never overlaps itself.
    before.extend(graph.last.clone());
    let mut states: Vec<Arc<OpState>> = Vec::with_capacity(graph.nodes.len());
    for (i, node) in graph.nodes.iter().enumerate() {
        let mut deps = match node.deps.is_empty() {
            true => before.clone(),
            false => node.deps.iter().map(|n| states[*n].clone()).collect(),
        };
        let index = graph.launches * graph.nodes.len() as u64 + i as u64 + 1;
        let position = Position {
            stream: node.chain,
            index,
            gpu: node.gpu,
            queue: 0,
        };
        let (work, more) = node_work(d, &node.kind, &mut deps);
        // The device begins with the first nodes while the call still hands over the last.
        let at = first + (handed_us * 1000.0) as u64;
        handed_us += node_us(node);
        let state = st.sched.add(at, known, work, position, &deps, &more);
        if let NodeKind::Record(event) = &node.kind {
            recorded(d, event, &state);
        }
        states.push(state);
    }
    graph.launches += 1;
    let s = st.streams.get_mut(&stream).ok_or(INVALID_HANDLE)?;
    s.position += 1;
    let position = Position {
        stream: s.uid,
        index: s.position,
        gpu: s.gpu,
        queue: 0,
    };
    before.extend(states);
    let state = st
        .sched
        .add(issued, known, Work::Empty, position, &before, &[]);
    graph.last = Some(state.clone());
    if let Some(s) = st.streams.get_mut(&stream) {
        s.tail = Some(state);
    }
    Ok(())
}

fn node_work(d: &Driver, kind: &NodeKind, deps: &mut Vec<Arc<OpState>>) -> (Work, Vec<(u64, u64)>) {
    match kind {
        NodeKind::Work(work) => (work.clone(), Vec::new()),
        NodeKind::Record(event) => (Work::Record(event.clone()), Vec::new()),
        NodeKind::Wait(event) => wait_work(d, event, deps),
        NodeKind::Empty | NodeKind::Child(_) => (Work::Empty, Vec::new()),
    }
}

/// What waiting for an event means now: an edge to an operation of this process, or a wait for a shared record.
pub fn wait_work(
    d: &Driver,
    event: &Event,
    deps: &mut Vec<Arc<OpState>>,
) -> (Work, Vec<(u64, u64)>) {
    if let Some((row, id)) = *event.shared.lock() {
        return match crate::ipc::event_now(d, row, id) {
            Some((number, history)) => (Work::SharedWait { row, id, number }, history),
            None => (Work::Empty, Vec::new()),
        };
    }
    if let EventState::Recorded(op) = &*event.state.lock() {
        deps.push(op.clone());
    }
    (Work::Empty, Vec::new())
}

/// An event now stands for `state`.
pub fn recorded(d: &Driver, event: &Event, state: &Arc<OpState>) {
    if let Some((row, id)) = *event.shared.lock() {
        crate::ipc::event_recorded(d, row, id, &state.history);
    }
    *event.state.lock() = EventState::Recorded(state.clone());
}
