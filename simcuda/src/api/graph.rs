//! Graphs.

use super::{array, load, out};
use crate::driver::{driver, Driver};
use crate::errors::*;
use crate::event::Event;
use crate::graph::{Graph, Node, NodeKind};
use crate::memory::Place;
use crate::ops::resolve;
use crate::state::State;
use crate::types::*;
use crate::work::{Copy, Fill, HostCode, UserData, Work};
use core::ffi::c_uint;
use std::sync::Arc;

/// Adds a node to a graph for the GPU of `context` (0: the current one).
unsafe fn add(
    to: *mut CUgraphNode,
    graph: CUgraph,
    deps: *const CUgraphNode,
    count: usize,
    context: CUcontext,
    make: impl FnOnce(&Driver, &mut State, usize) -> Res<(NodeKind, usize)>,
) -> Res {
    let d = driver()?;
    // SAFETY: the caller's array.
    let deps = unsafe { array(deps, count)? };
    let mut st = d.state.lock();
    let twice = |(at, dep): (usize, &CUgraphNode)| deps[..at].contains(dep);
    if !st.graphs.contains_key(&graph) || deps.iter().enumerate().any(twice) {
        return Err(INVALID_VALUE);
    }
    let gpu = match context {
        0 => st.context().map_or_else(|_| d.visible[0], |(_, c)| c.gpu),
        context => st.contexts.get(&context).ok_or(INVALID_CONTEXT)?.gpu,
    };
    let (kind, function) = make(d, &mut st, gpu)?;
    let node = st.add_node(
        graph,
        Node {
            kind,
            deps,
            gpu,
            function,
            origin: 0,
        },
    )?;
    // SAFETY: the caller's pointer, checked for null.
    unsafe { out(to, node) }
}

/// The one copy that a memcpy node may be.
pub(crate) fn copy_kind(d: &Driver, st: &State, c: &CUDA_MEMCPY3D) -> Res<NodeKind> {
    let copies = super::copy::volume(d, st, c)?;
    if copies.is_empty() {
        return Err(INVALID_VALUE);
    }
    Ok(NodeKind::Work(Work::Copy(copies)))
}

pub(crate) fn fill_kind(d: &Driver, st: &State, p: &CUDA_MEMSET_NODE_PARAMS) -> Res<NodeKind> {
    let element = p.elementSize as usize;
    if ![1, 2, 4].contains(&element) || p.width == 0 || p.height == 0 {
        return Err(INVALID_VALUE);
    }
    let dst = resolve(
        d,
        st,
        p.dst,
        Copy::span(p.width * element, p.height, p.pitch),
    )?;
    if matches!(dst, Place::Pageable(_)) {
        return Err(INVALID_VALUE);
    }
    let fill = Fill {
        dst,
        element,
        value: p.value,
        width: p.width,
        height: p.height,
        pitch: p.pitch,
    };
    Ok(NodeKind::Work(Work::Fill(fill)))
}

/// A batch as a node: its operations in order. Waits come first, as a node starts when they hold.
pub(crate) fn memop_kind(
    d: &Driver,
    st: &State,
    p: &CUDA_BATCH_MEM_OP_NODE_PARAMS,
) -> Res<NodeKind> {
    // SAFETY: the caller's array.
    let params = unsafe { array(p.paramArray, p.count as usize)? };
    Ok(NodeKind::Work(Work::MemOps(super::memop::operations(
        d, st, &params,
    )?)))
}

fn event_of(st: &State, event: CUevent) -> Res<Arc<Event>> {
    st.events.get(&event).cloned().ok_or(INVALID_HANDLE)
}

/// Writes handles into the caller's array, or only their number.
unsafe fn list(handles: &[usize], to: *mut usize, count: *mut usize) -> Res {
    // SAFETY: the caller's array has `*count` elements where it is not null.
    unsafe {
        let room = load(count)?;
        if !to.is_null() {
            for i in 0..room {
                to.add(i).write(handles.get(i).copied().unwrap_or(0));
            }
        }
        out(
            count,
            if to.is_null() {
                handles.len()
            } else {
                room.min(handles.len())
            },
        )
    }
}

unsafe fn edges(
    graph: CUgraph,
    from: *mut CUgraphNode,
    to: *mut CUgraphNode,
    count: *mut usize,
) -> Res {
    let d = driver()?;
    let st = d.state.lock();
    let nodes = &st.graphs.get(&graph).ok_or(INVALID_VALUE)?.nodes;
    let pairs: Vec<(usize, usize)> = nodes
        .iter()
        .flat_map(|(n, node)| node.deps.iter().map(|d| (*d, *n)))
        .collect();
    let (heads, tails): (Vec<usize>, Vec<usize>) = pairs.into_iter().unzip();
    // SAFETY: passed on from the caller.
    unsafe {
        let mut room = load(count)?;
        list(&heads, from, &raw mut room)?;
        list(&tails, to, count)
    }
}

unsafe fn change_edges(
    graph: CUgraph,
    from: *const CUgraphNode,
    to: *const CUgraphNode,
    count: usize,
    add: bool,
) -> Res {
    let d = driver()?;
    // SAFETY: the caller's arrays.
    let (from, to) = unsafe { (array(from, count)?, array(to, count)?) };
    let mut st = d.state.lock();
    let nodes = &mut st.graphs.get_mut(&graph).ok_or(INVALID_VALUE)?.nodes;
    for (a, b) in from.iter().zip(&to) {
        if a == b || !nodes.contains_key(a) {
            return Err(INVALID_VALUE);
        }
        let deps = &mut nodes.get_mut(b).ok_or(INVALID_VALUE)?.deps;
        match (deps.contains(a), add) {
            (false, true) => deps.push(*a),
            (true, false) => deps.retain(|d| d != a),
            _ => return Err(INVALID_VALUE),
        }
    }
    Ok(())
}

fn dependents(node: CUgraphNode) -> Res<Vec<CUgraphNode>> {
    let d = driver()?;
    let st = d.state.lock();
    let graph = st
        .node_graph
        .get(&node)
        .and_then(|g| st.graphs.get(g))
        .ok_or(INVALID_VALUE)?;
    Ok(graph
        .nodes
        .iter()
        .filter(|(_, n)| n.deps.contains(&node))
        .map(|(h, _)| *h)
        .collect())
}

driver! {
    fn cuGraphCreate(graph: *mut CUgraph, flags: c_uint) {
        let d = driver()?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let handle = d.state.lock().add_graph(Graph::default());
        out(graph, handle)
    }

    fn cuGraphDestroy(graph: CUgraph) {
        driver()?.state.lock().remove_graph(graph).map(|_| ()).ok_or(INVALID_VALUE)
    }

    fn cuGraphClone(clone: *mut CUgraph, original: CUgraph) {
        let d = driver()?;
        let mut st = d.state.lock();
        let source = st.graphs.get(&original).cloned().ok_or(INVALID_VALUE)?;
        let copy = st.clone_graph(&source);
        let handle = st.add_graph(copy);
        out(clone, handle)
    }

    fn cuGraphNodeFindInClone(node: *mut CUgraphNode, original: CUgraphNode, clone: CUgraph) {
        let d = driver()?;
        let st = d.state.lock();
        let nodes = &st.graphs.get(&clone).ok_or(INVALID_VALUE)?.nodes;
        let found = nodes.iter().find(|(_, n)| n.origin == original).map(|(h, _)| *h);
        out(node, found.ok_or(INVALID_VALUE)?)
    }

    fn cuGraphAddEmptyNode(node: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize) {
        add(node, graph, deps, count, 0, |_, _, _| Ok((NodeKind::Empty, 0)))
    }

    fn cuGraphAddMemcpyNode(node: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize, params: *const CUDA_MEMCPY3D, context: CUcontext) {
        let p = load(params)?;
        add(node, graph, deps, count, context, |d, st, _| Ok((copy_kind(d, st, &p)?, 0)))
    }

    fn cuGraphAddMemsetNode(node: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize, params: *const CUDA_MEMSET_NODE_PARAMS, context: CUcontext) {
        let p = load(params)?;
        add(node, graph, deps, count, context, |d, st, _| Ok((fill_kind(d, st, &p)?, 0)))
    }

    fn cuGraphAddKernelNode(node: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize, params: *const CUDA_KERNEL_NODE_PARAMS_v1) {
        let p = load(params)?;
        add(node, graph, deps, count, 0, |d, st, gpu| {
            Ok((NodeKind::Work(Work::Kernel(super::launch::prepare(d, st, &p, gpu)?)), p.func))
        })
    }

    fn cuGraphAddKernelNode_v2(node: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize, params: *const CUDA_KERNEL_NODE_PARAMS_v2) {
        let p = load(params)?;
        let mut v1 = p.v1;
        if v1.func == 0 {
            v1.func = p.kern;
        }
        add(node, graph, deps, count, p.ctx, |d, st, gpu| {
            Ok((NodeKind::Work(Work::Kernel(super::launch::prepare(d, st, &v1, gpu)?)), v1.func))
        })
    }

    fn cuGraphAddHostNode(node: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize, params: *const CUDA_HOST_NODE_PARAMS) {
        let p = load(params)?;
        if p.func.is_none() {
            return Err(INVALID_VALUE);
        }
        let code = HostCode::Function(p.func, UserData(p.userData));
        add(node, graph, deps, count, 0, |_, _, _| Ok((NodeKind::Work(Work::Host(code)), 0)))
    }

    fn cuGraphAddEventRecordNode(node: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize, event: CUevent) {
        add(node, graph, deps, count, 0, |_, st, _| Ok((NodeKind::Record(event_of(st, event)?), 0)))
    }

    fn cuGraphAddEventWaitNode(node: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize, event: CUevent) {
        add(node, graph, deps, count, 0, |_, st, _| Ok((NodeKind::Wait(event_of(st, event)?), 0)))
    }

    fn cuGraphAddBatchMemOpNode(node: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize, params: *const CUDA_BATCH_MEM_OP_NODE_PARAMS) {
        let p = load(params)?;
        add(node, graph, deps, count, p.ctx, |d, st, _| Ok((memop_kind(d, st, &p)?, 0)))
    }

    fn cuGraphAddChildGraphNode(node: *mut CUgraphNode, graph: CUgraph, deps: *const CUgraphNode, count: usize, child: CUgraph) {
        add(node, graph, deps, count, 0, |_, st, _| {
            let source = st.graphs.get(&child).cloned().ok_or(INVALID_VALUE)?;
            Ok((NodeKind::Child(st.clone_graph(&source)), 0))
        })
    }

    fn cuGraphMemcpyNodeSetParams(node: CUgraphNode, params: *const CUDA_MEMCPY3D) {
        let p = load(params)?;
        let d = driver()?;
        let mut st = d.state.lock();
        let kind = copy_kind(d, &st, &p)?;
        replace(&mut st, node, kind, 0)
    }

    fn cuGraphMemsetNodeSetParams(node: CUgraphNode, params: *const CUDA_MEMSET_NODE_PARAMS) {
        let p = load(params)?;
        let d = driver()?;
        let mut st = d.state.lock();
        let kind = fill_kind(d, &st, &p)?;
        replace(&mut st, node, kind, 0)
    }

    fn cuGraphKernelNodeSetParams(node: CUgraphNode, params: *const CUDA_KERNEL_NODE_PARAMS_v1) {
        set_kernel(node, load(params)?)
    }

    fn cuGraphKernelNodeSetParams_v2(node: CUgraphNode, params: *const CUDA_KERNEL_NODE_PARAMS_v2) {
        set_kernel(node, load(params)?.v1)
    }

    fn cuGraphBatchMemOpNodeSetParams(node: CUgraphNode, params: *const CUDA_BATCH_MEM_OP_NODE_PARAMS) {
        let p = load(params)?;
        let d = driver()?;
        let mut st = d.state.lock();
        let kind = memop_kind(d, &st, &p)?;
        replace(&mut st, node, kind, 0)
    }

    fn cuGraphEventRecordNodeSetEvent(node: CUgraphNode, event: CUevent) {
        let d = driver()?;
        let mut st = d.state.lock();
        let kind = NodeKind::Record(event_of(&st, event)?);
        replace(&mut st, node, kind, 0)
    }

    fn cuGraphEventWaitNodeSetEvent(node: CUgraphNode, event: CUevent) {
        let d = driver()?;
        let mut st = d.state.lock();
        let kind = NodeKind::Wait(event_of(&st, event)?);
        replace(&mut st, node, kind, 0)
    }

    fn cuGraphAddDependencies(graph: CUgraph, from: *const CUgraphNode, to: *const CUgraphNode, count: usize) {
        change_edges(graph, from, to, count, true)
    }

    fn cuGraphAddDependencies_v2(graph: CUgraph, from: *const CUgraphNode, to: *const CUgraphNode, _data: usize, count: usize) {
        change_edges(graph, from, to, count, true)
    }

    fn cuGraphRemoveDependencies(graph: CUgraph, from: *const CUgraphNode, to: *const CUgraphNode, count: usize) {
        change_edges(graph, from, to, count, false)
    }

    fn cuGraphDestroyNode(node: CUgraphNode) {
        let d = driver()?;
        let mut st = d.state.lock();
        let graph = st.node_graph.remove(&node).ok_or(INVALID_VALUE)?;
        if let Some(g) = st.graphs.get_mut(&graph) {
            g.nodes.remove(&node);
            g.nodes.values_mut().for_each(|n| n.deps.retain(|d| *d != node));
        }
        Ok(())
    }

    fn cuGraphGetNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize) {
        let d = driver()?;
        let st = d.state.lock();
        let all: Vec<usize> = st.graphs.get(&graph).ok_or(INVALID_VALUE)?.nodes.keys().copied().collect();
        list(&all, nodes, count)
    }

    fn cuGraphGetRootNodes(graph: CUgraph, nodes: *mut CUgraphNode, count: *mut usize) {
        let d = driver()?;
        let st = d.state.lock();
        let all = &st.graphs.get(&graph).ok_or(INVALID_VALUE)?.nodes;
        let roots: Vec<usize> = all.iter().filter(|(_, n)| n.deps.is_empty()).map(|(h, _)| *h).collect();
        list(&roots, nodes, count)
    }

    fn cuGraphGetEdges(graph: CUgraph, from: *mut CUgraphNode, to: *mut CUgraphNode, count: *mut usize) {
        edges(graph, from, to, count)
    }

    fn cuGraphNodeGetType(node: CUgraphNode, kind: *mut c_uint) {
        let d = driver()?;
        let code = d.state.lock().node_mut(node)?.kind.code();
        out(kind, code)
    }

    fn cuGraphNodeGetDependencies(node: CUgraphNode, deps: *mut CUgraphNode, count: *mut usize) {
        let d = driver()?;
        let all = d.state.lock().node_mut(node)?.deps.clone();
        list(&all, deps, count)
    }

    fn cuGraphNodeGetDependentNodes(node: CUgraphNode, nodes: *mut CUgraphNode, count: *mut usize) {
        list(&dependents(node)?, nodes, count)
    }

    fn cuGraphKernelNodeGetParams(node: CUgraphNode, params: *mut CUDA_KERNEL_NODE_PARAMS_v1) {
        out(params, kernel_params(node)?)
    }

    fn cuGraphKernelNodeGetParams_v2(node: CUgraphNode, params: *mut CUDA_KERNEL_NODE_PARAMS_v2) {
        out(params, CUDA_KERNEL_NODE_PARAMS_v2 { v1: kernel_params(node)?, kern: 0, ctx: 0 })
    }

    fn cuGraphDebugDotPrint(graph: CUgraph, path: CString, _flags: c_uint) {
        let d = driver()?;
        let path = super::text(path)?;
        let st = d.state.lock();
        let mut dot = String::from("digraph graph_1 {\n");
        for (handle, node) in &st.graphs.get(&graph).ok_or(INVALID_VALUE)?.nodes {
            dot += &format!("  n{handle:x} [label=\"type {} gpu {}\"];\n", node.kind.code(), node.gpu);
            node.deps.iter().for_each(|d| dot += &format!("  n{d:x} -> n{handle:x};\n"));
        }
        std::fs::write(path, dot + "}\n").map_err(|_| OPERATING_SYSTEM)
    }
}

/// Shape and function of a kernel node; its arguments were copied and are not handed out.
fn kernel_params(node: CUgraphNode) -> Res<CUDA_KERNEL_NODE_PARAMS_v1> {
    let d = driver()?;
    let mut st = d.state.lock();
    let n = st.node_mut(node)?;
    let NodeKind::Work(Work::Kernel(k)) = &n.kind else {
        return Err(INVALID_VALUE);
    };
    let ([gx, gy, gz], [bx, by, bz]) = (k.launch.grid, k.launch.block);
    Ok(CUDA_KERNEL_NODE_PARAMS_v1 {
        func: n.function,
        gridDimX: gx,
        gridDimY: gy,
        gridDimZ: gz,
        blockDimX: bx,
        blockDimY: by,
        blockDimZ: bz,
        sharedMemBytes: 0,
        kernelParams: core::ptr::null_mut(),
        extra: core::ptr::null_mut(),
    })
}

fn replace(st: &mut State, node: CUgraphNode, kind: NodeKind, function: usize) -> Res {
    let n = st.node_mut(node)?;
    if n.kind.code() != kind.code() {
        return Err(INVALID_VALUE);
    }
    n.kind = kind;
    n.function = function;
    Ok(())
}

unsafe fn set_kernel(node: CUgraphNode, p: CUDA_KERNEL_NODE_PARAMS_v1) -> Res {
    let d = driver()?;
    let mut st = d.state.lock();
    let gpu = st.node_mut(node)?.gpu;
    // SAFETY: passed on from the caller.
    let kernel = unsafe { super::launch::prepare(d, &st, &p, gpu)? };
    replace(&mut st, node, NodeKind::Work(Work::Kernel(kernel)), p.func)
}
