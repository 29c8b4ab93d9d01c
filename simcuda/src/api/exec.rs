//! Executable graphs.

use super::{load, maybe, out};
use crate::driver::driver;
use crate::errors::*;
use crate::graph::{launch, Exec, NodeKind};
use crate::types::*;
use crate::work::{HostCode, UserData, Work};
use core::ffi::{c_char, c_uint};

fn instantiate(graph: CUgraph) -> Res<CUgraphExec> {
    let d = driver()?;
    let mut st = d.state.lock();
    crate::capture::illegal(&mut st)?;
    let exec = Exec::new(d, st.graphs.get(&graph).ok_or(INVALID_VALUE)?)?;
    d.charge(
        d.topology.calls.graph_instantiate_us + d.topology.calls.graph_node_us * exec.len() as f64,
    );
    let handle = st.handle();
    st.execs.insert(handle, exec);
    Ok(handle)
}

fn set(
    exec: CUgraphExec,
    node: CUgraphNode,
    make: impl FnOnce(&'static crate::driver::Driver, &crate::state::State) -> Res<NodeKind>,
) -> Res {
    let d = driver()?;
    let mut st = d.state.lock();
    let kind = make(d, &st)?;
    d.charge(d.topology.calls.event_us);
    st.execs
        .get_mut(&exec)
        .ok_or(INVALID_VALUE)?
        .set(node, kind)
}

/// CUgraphExecUpdateResult and the node that differs.
fn update(exec: CUgraphExec, graph: CUgraph) -> Res<Result<(), (u32, CUgraphNode)>> {
    let d = driver()?;
    let mut st = d.state.lock();
    let source = st.graphs.get(&graph).cloned().ok_or(INVALID_VALUE)?;
    d.charge(d.topology.calls.graph_launch_us);
    Ok(st
        .execs
        .get_mut(&exec)
        .ok_or(INVALID_VALUE)?
        .update(&source))
}

unsafe fn set_kernel(exec: CUgraphExec, node: CUgraphNode, p: CUDA_KERNEL_NODE_PARAMS_v1) -> Res {
    set(exec, node, |d, st| {
        let gpu = st.context()?.1.gpu;
        // SAFETY: passed on from the caller.
        Ok(NodeKind::Work(Work::Kernel(unsafe {
            super::launch::prepare(d, st, &p, gpu)?
        })))
    })
}

driver! {
    fn cuGraphInstantiate_v2(exec: *mut CUgraphExec, graph: CUgraph, error_node: *mut CUgraphNode, _log: *mut c_char, _size: usize) {
        maybe(error_node, 0);
        out(exec, instantiate(graph)?)
    }

    fn cuGraphInstantiateWithFlags(exec: *mut CUgraphExec, graph: CUgraph, flags: u64) {
        if flags & !0xf != 0 {
            return Err(INVALID_VALUE);
        }
        out(exec, instantiate(graph)?)
    }

    fn cuGraphInstantiateWithParams(exec: *mut CUgraphExec, graph: CUgraph, params: *mut CUDA_GRAPH_INSTANTIATE_PARAMS) {
        let mut p = load(params)?;
        let made = instantiate(graph);
        p.hErrNode_out = 0;
        // CUDA_GRAPH_INSTANTIATE_SUCCESS or _ERROR.
        p.result_out = c_uint::from(made.is_err());
        out(params, p)?;
        out(exec, made?)
    }

    fn cuGraphUpload(exec: CUgraphExec, stream: CUstream) {
        let d = driver()?;
        let mut st = d.state.lock();
        st.stream_handle(d, stream)?;
        st.execs.get(&exec).map(|_| ()).ok_or(INVALID_VALUE)
    }

    fn cuGraphLaunch(exec: CUgraphExec, stream: CUstream) {
        let d = driver()?;
        let mut st = d.state.lock();
        let stream = st.stream_handle(d, stream)?;
        crate::capture::unless_captured(&mut st, stream)?;
        crate::capture::entering(&mut st, stream)?;
        launch(d, &mut st, exec, stream)
    }

    fn cuGraphExecDestroy(exec: CUgraphExec) {
        let d = driver()?;
        // A launch under way goes on.
        d.state.lock().execs.remove(&exec).map(|_| ()).ok_or(INVALID_VALUE)
    }

    fn cuGraphExecGetFlags(exec: CUgraphExec, flags: *mut u64) {
        let d = driver()?;
        d.state.lock().execs.get(&exec).ok_or(INVALID_VALUE)?;
        out(flags, 0)
    }

    fn cuGraphExecUpdate(exec: CUgraphExec, graph: CUgraph, error_node: *mut CUgraphNode, result: *mut c_uint) {
        match update(exec, graph)? {
            Ok(()) => {
                maybe(error_node, 0);
                out(result, 0)
            }
            Err((code, node)) => {
                maybe(error_node, node);
                out(result, code)?;
                Err(GRAPH_EXEC_UPDATE_FAILURE)
            }
        }
    }

    fn cuGraphExecUpdate_v2(exec: CUgraphExec, graph: CUgraph, info: *mut CUgraphExecUpdateResultInfo) {
        let (result, node) = update(exec, graph)?.err().unwrap_or((0, 0));
        out(info, CUgraphExecUpdateResultInfo { result, errorNode: node, errorFromNode: 0 })?;
        if result == 0 { Ok(()) } else { Err(GRAPH_EXEC_UPDATE_FAILURE) }
    }

    fn cuGraphExecMemcpyNodeSetParams(exec: CUgraphExec, node: CUgraphNode, params: *const CUDA_MEMCPY3D, _context: CUcontext) {
        let p = load(params)?;
        set(exec, node, |d, st| super::graph::copy_kind(d, st, &p))
    }

    fn cuGraphExecMemsetNodeSetParams(exec: CUgraphExec, node: CUgraphNode, params: *const CUDA_MEMSET_NODE_PARAMS, _context: CUcontext) {
        let p = load(params)?;
        set(exec, node, |d, st| super::graph::fill_kind(d, st, &p))
    }

    fn cuGraphExecKernelNodeSetParams(exec: CUgraphExec, node: CUgraphNode, params: *const CUDA_KERNEL_NODE_PARAMS_v1) {
        set_kernel(exec, node, load(params)?)
    }

    fn cuGraphExecKernelNodeSetParams_v2(exec: CUgraphExec, node: CUgraphNode, params: *const CUDA_KERNEL_NODE_PARAMS_v2) {
        set_kernel(exec, node, load(params)?.v1)
    }

    fn cuGraphExecHostNodeSetParams(exec: CUgraphExec, node: CUgraphNode, params: *const CUDA_HOST_NODE_PARAMS) {
        let p = load(params)?;
        set(exec, node, |_, _| Ok(NodeKind::Work(Work::Host(HostCode::Function(p.func, UserData(p.userData))))))
    }

    fn cuGraphExecBatchMemOpNodeSetParams(exec: CUgraphExec, node: CUgraphNode, params: *const CUDA_BATCH_MEM_OP_NODE_PARAMS) {
        let p = load(params)?;
        set(exec, node, |d, st| super::graph::memop_kind(d, st, &p))
    }

    fn cuGraphExecEventRecordNodeSetEvent(exec: CUgraphExec, node: CUgraphNode, event: CUevent) {
        set(exec, node, |_, st| Ok(NodeKind::Record(st.events.get(&event).cloned().ok_or(INVALID_HANDLE)?)))
    }

    fn cuGraphExecEventWaitNodeSetEvent(exec: CUgraphExec, node: CUgraphNode, event: CUevent) {
        set(exec, node, |_, st| Ok(NodeKind::Wait(st.events.get(&event).cloned().ok_or(INVALID_HANDLE)?)))
    }
}
