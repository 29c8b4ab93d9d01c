//! Stream capture.

use super::{array, load, maybe, out};
use crate::capture;
use crate::driver::driver;
use crate::errors::*;
use crate::state::State;
use crate::types::*;
use core::ffi::{c_uint, c_void};
use std::cell::RefCell;

thread_local! {
    /// Dependencies that cuStreamGetCaptureInfo hands out live until the thread's next such call.
    static DEPENDENCIES: RefCell<Vec<CUgraphNode>> = const { RefCell::new(Vec::new()) };
}

/// Status (0 none, 1 active, 2 invalidated), identity, graph and dependencies.
fn info(st: &State, stream: CUstream) -> (c_uint, u64, CUgraph, Vec<CUgraphNode>) {
    let part = st.streams.get(&stream).and_then(|s| s.capture.clone());
    match part.and_then(|p| st.captures.get(&p.id).map(|c| (p, c))) {
        None => (0, 0, 0, Vec::new()),
        Some((part, c)) if c.invalid => (2, part.id, 0, Vec::new()),
        Some((part, c)) => (1, part.id, c.graph, part.deps),
    }
}

unsafe fn report(
    stream: CUstream,
    status: *mut c_uint,
    id: *mut u64,
    graph: *mut CUgraph,
    deps: *mut *const CUgraphNode,
    count: *mut usize,
) -> Res {
    let d = driver()?;
    let mut st = d.state.lock();
    let stream = st.stream_handle(d, stream)?;
    // While a blocking stream of its context is captured, the legacy stream cannot be used; asking breaks nothing.
    if st.streams.get(&stream).is_some_and(|s| s.legacy) {
        capture::capturing(&st, stream)?;
    }
    let (value, identity, handle, nodes) = info(&st, stream);
    // SAFETY: the caller's pointers or null.
    unsafe {
        out(status, value)?;
        if value == 0 {
            return Ok(());
        }
        maybe(id, identity);
        maybe(graph, handle);
        maybe(count, nodes.len());
        let held = DEPENDENCIES.with(|held| {
            *held.borrow_mut() = nodes;
            held.borrow().as_ptr()
        });
        maybe(deps, held);
    }
    Ok(())
}

unsafe fn update(stream: CUstream, deps: *mut CUgraphNode, count: usize, flags: c_uint) -> Res {
    let d = driver()?;
    // SAFETY: the caller's array.
    let nodes = unsafe { array(deps, count)? };
    let mut st = d.state.lock();
    let stream = st.stream_handle(d, stream)?;
    if !capture::capturing(&st, stream)? {
        return Err(ILLEGAL_STATE);
    }
    if nodes.iter().any(|n| !st.node_graph.contains_key(n)) {
        return Err(INVALID_VALUE);
    }
    if let Some(part) = st.streams.get_mut(&stream).and_then(|s| s.capture.as_mut()) {
        // 0 adds to what the next node follows, 1 replaces it.
        if flags & 1 == 1 {
            part.deps.clear();
        }
        part.deps.extend(nodes);
    }
    Ok(())
}

driver! {
    fn cuStreamBeginCapture_v2(stream: CUstream, mode: c_uint) {
        let d = driver()?;
        let mut st = d.state.lock();
        let stream = st.stream_handle(d, stream)?;
        capture::begin(&mut st, stream, mode, None)
    }

    fn cuStreamBeginCaptureToGraph(stream: CUstream, graph: CUgraph, deps: *const CUgraphNode, _edges: *const c_void, count: usize, mode: c_uint) {
        let d = driver()?;
        let deps = array(deps, count)?;
        let mut st = d.state.lock();
        let stream = st.stream_handle(d, stream)?;
        capture::begin(&mut st, stream, mode, Some((graph, deps)))
    }

    fn cuStreamEndCapture(stream: CUstream, graph: *mut CUgraph) {
        let d = driver()?;
        let mut st = d.state.lock();
        let stream = st.stream_handle(d, stream)?;
        match capture::end(&mut st, stream) {
            Ok(handle) => out(graph, handle),
            Err(code) => {
                maybe(graph, 0);
                Err(code)
            }
        }
    }

    fn cuStreamIsCapturing(stream: CUstream, status: *mut c_uint) {
        report(stream, status, core::ptr::null_mut(), core::ptr::null_mut(), core::ptr::null_mut(), core::ptr::null_mut())
    }

    fn cuStreamGetCaptureInfo(stream: CUstream, status: *mut c_uint, id: *mut u64) {
        report(stream, status, id, core::ptr::null_mut(), core::ptr::null_mut(), core::ptr::null_mut())
    }

    fn cuStreamGetCaptureInfo_v2(stream: CUstream, status: *mut c_uint, id: *mut u64, graph: *mut CUgraph, deps: *mut *const CUgraphNode, count: *mut usize) {
        report(stream, status, id, graph, deps, count)
    }

    fn cuStreamGetCaptureInfo_v3(stream: CUstream, status: *mut c_uint, id: *mut u64, graph: *mut CUgraph, deps: *mut *const CUgraphNode, edges: *mut *const c_void, count: *mut usize) {
        maybe(edges, core::ptr::null());
        report(stream, status, id, graph, deps, count)
    }

    fn cuStreamUpdateCaptureDependencies(stream: CUstream, deps: *mut CUgraphNode, count: usize, flags: c_uint) {
        update(stream, deps, count, flags)
    }

    fn cuStreamUpdateCaptureDependencies_v2(stream: CUstream, deps: *mut CUgraphNode, _edges: *const c_void, count: usize, flags: c_uint) {
        update(stream, deps, count, flags)
    }

    fn cuThreadExchangeStreamCaptureMode(mode: *mut c_uint) {
        let wanted = load(mode)?;
        if wanted > capture::RELAXED {
            return Err(INVALID_VALUE);
        }
        out(mode, capture::exchange_mode(wanted))
    }
}
