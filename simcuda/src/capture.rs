//! Stream capture: what would run becomes nodes of a graph, and what must not be called meanwhile.

use crate::errors::*;
use crate::event::{Event, EventState};
use crate::graph::{Graph, Node, NodeKind};
use crate::state::{State, NON_BLOCKING};
use crate::types::{CUgraph, CUgraphNode, CUstream};
use crate::work::Work;
use std::cell::Cell;
use std::sync::Arc;
use std::thread::ThreadId;

/// CU_STREAM_CAPTURE_MODE_GLOBAL.
pub const GLOBAL: u32 = 0;
/// CU_STREAM_CAPTURE_MODE_RELAXED.
pub const RELAXED: u32 = 2;

/// A capture under way.
pub struct Capture {
    /// Graph that grows.
    pub graph: CUgraph,
    /// Mode of cuStreamBeginCapture.
    pub mode: u32,
    /// Stream that began it and must end it.
    pub origin: CUstream,
    /// Thread that began it.
    pub thread: ThreadId,
    /// Broken by an illegal call.
    pub invalid: bool,
    /// The graph is the caller's own.
    pub borrowed: bool,
}

/// A stream's part in a capture.
#[derive(Clone)]
pub struct Part {
    /// Identity of the capture.
    pub id: u64,
    /// Nodes that the next one follows.
    pub deps: Vec<CUgraphNode>,
}

thread_local! {
    static MODE: Cell<u32> = const { Cell::new(GLOBAL) };
}

/// cuThreadExchangeStreamCaptureMode.
pub fn exchange_mode(mode: u32) -> u32 {
    MODE.with(|m| m.replace(mode))
}

/// Refuses a call that may conflict with a capture under way, and breaks that capture.
pub fn illegal(st: &mut State) -> Res {
    if st.captures.is_empty() || MODE.with(Cell::get) == RELAXED {
        return Ok(());
    }
    let global = MODE.with(Cell::get) == GLOBAL;
    let thread = std::thread::current().id();
    let mut hit = false;
    for capture in st.captures.values_mut() {
        let own = capture.thread == thread && capture.mode != RELAXED;
        if own || (global && capture.mode == GLOBAL) {
            capture.invalid = true;
            hit = true;
        }
    }
    if hit {
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    Ok(())
}

/// As [`illegal`], for calls that only captures in global mode forbid.
pub fn illegal_globally(st: &mut State) -> Res {
    if st.captures.values().any(|capture| capture.mode == GLOBAL) {
        return illegal(st);
    }
    Ok(())
}

/// As [`capturing`], for work that is about to enter the stream: work in the legacy stream breaks the captures that it
/// would have to wait for.
pub fn entering(st: &mut State, stream: CUstream) -> Res<bool> {
    let answer = capturing(st, stream);
    if answer == Err(STREAM_CAPTURE_IMPLICIT) {
        let context = st.streams.get(&stream).map(|s| s.context);
        let joined = st.streams.values().filter(|s| {
            Some(s.context) == context && s.flags & NON_BLOCKING == 0 && s.capture.is_some()
        });
        let ids: Vec<u64> = joined
            .filter_map(|s| s.capture.as_ref().map(|part| part.id))
            .collect();
        for id in ids {
            if let Some(capture) = st.captures.get_mut(&id) {
                capture.invalid = true;
            }
        }
    }
    answer
}

/// True when work in `stream` goes to a graph; an error when the capture is broken.
pub fn capturing(st: &State, stream: CUstream) -> Res<bool> {
    let Some(s) = st.streams.get(&stream) else {
        return Err(INVALID_HANDLE);
    };
    if let Some(part) = &s.capture {
        return match st.captures.get(&part.id) {
            Some(capture) if !capture.invalid => Ok(true),
            _ => Err(STREAM_CAPTURE_INVALIDATED),
        };
    }
    // The legacy stream would wait for the captured one.
    let joins = |o: &crate::state::Stream| {
        o.capture.is_some() && o.context == s.context && o.flags & NON_BLOCKING == 0
    };
    if s.legacy && st.streams.values().any(joins) {
        return Err(STREAM_CAPTURE_IMPLICIT);
    }
    Ok(false)
}

/// Refuses a call that asks about a stream's progress while it is captured.
pub fn no_query(st: &mut State, stream: CUstream) -> Res {
    unless_captured(st, stream)?;
    illegal(st)
}

/// Refuses a call about a stream that is captured, and breaks that capture.
pub fn unless_captured(st: &mut State, stream: CUstream) -> Res {
    let part = st.streams.get(&stream).and_then(|s| s.capture.clone());
    if let Some(capture) = part.and_then(|p| st.captures.get_mut(&p.id)) {
        capture.invalid = true;
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    Ok(())
}

/// cuStreamBeginCapture into a new graph, or after `deps` of an existing one.
pub fn begin(
    st: &mut State,
    stream: CUstream,
    mode: u32,
    into: Option<(CUgraph, Vec<CUgraphNode>)>,
) -> Res {
    if mode > RELAXED {
        return Err(INVALID_VALUE);
    }
    let s = st.streams.get(&stream).ok_or(INVALID_HANDLE)?;
    if s.legacy {
        return Err(STREAM_CAPTURE_UNSUPPORTED);
    }
    if s.capture.is_some() {
        return Err(ILLEGAL_STATE);
    }
    let borrowed = into.is_some();
    let (graph, deps) = match into {
        Some((graph, _)) if !st.graphs.contains_key(&graph) => return Err(INVALID_VALUE),
        Some(into) => into,
        None => (st.add_graph(Graph::default()), Vec::new()),
    };
    let id = st.handle() as u64;
    let thread = std::thread::current().id();
    st.captures.insert(
        id,
        Capture {
            graph,
            mode,
            origin: stream,
            thread,
            invalid: false,
            borrowed,
        },
    );
    if let Some(s) = st.streams.get_mut(&stream) {
        s.capture = Some(Part { id, deps });
    }
    Ok(())
}

/// cuStreamEndCapture.
pub fn end(st: &mut State, stream: CUstream) -> Res<CUgraph> {
    let part = st
        .streams
        .get(&stream)
        .ok_or(INVALID_HANDLE)?
        .capture
        .clone()
        .ok_or(ILLEGAL_STATE)?;
    let capture = st.captures.get(&part.id).ok_or(ILLEGAL_STATE)?;
    if capture.origin != stream {
        return Err(STREAM_CAPTURE_UNMATCHED);
    }
    if capture.mode != RELAXED && capture.thread != std::thread::current().id() {
        return Err(STREAM_CAPTURE_WRONG_THREAD);
    }
    let (graph, invalid, borrowed) = (capture.graph, capture.invalid, capture.borrowed);
    let joined = st
        .graphs
        .get(&graph)
        .map(|g| g.ancestors(&part.deps))
        .unwrap_or_default();
    let mut unjoined = false;
    for s in st.streams.values_mut() {
        if s.capture.as_ref().is_some_and(|p| p.id == part.id) {
            unjoined |= s
                .capture
                .take()
                .is_some_and(|p| p.deps.iter().any(|n| !joined.contains(n)));
        }
    }
    st.captures.remove(&part.id);
    let error = if invalid {
        STREAM_CAPTURE_INVALIDATED
    } else if unjoined {
        STREAM_CAPTURE_UNJOINED
    } else {
        return Ok(graph);
    };
    if !borrowed {
        st.remove_graph(graph);
    }
    Err(error)
}

/// Adds a node for `work` where `stream` has got to.
pub fn add_work(st: &mut State, stream: CUstream, work: Work) -> Res {
    add_node(st, stream, NodeKind::Work(work), 0)
}

/// Adds a node where `stream` has got to.
pub fn add_node(st: &mut State, stream: CUstream, kind: NodeKind, function: usize) -> Res {
    let s = st.streams.get(&stream).ok_or(INVALID_HANDLE)?;
    let (gpu, part) = (s.gpu, s.capture.clone().ok_or(ILLEGAL_STATE)?);
    let graph = st
        .captures
        .get(&part.id)
        .ok_or(STREAM_CAPTURE_INVALIDATED)?
        .graph;
    let node = st.add_node(
        graph,
        Node {
            kind,
            deps: part.deps,
            gpu,
            function,
            origin: 0,
        },
    )?;
    if let Some(s) = st.streams.get_mut(&stream) {
        s.capture = Some(Part {
            id: part.id,
            deps: vec![node],
        });
    }
    Ok(())
}

/// cuEventRecord in a captured stream: the event stands for the nodes so far.
pub fn record(st: &State, stream: CUstream, event: &Event) -> Res {
    let part = st
        .streams
        .get(&stream)
        .and_then(|s| s.capture.clone())
        .ok_or(ILLEGAL_STATE)?;
    let graph = st
        .captures
        .get(&part.id)
        .ok_or(STREAM_CAPTURE_INVALIDATED)?
        .graph;
    *event.state.lock() = EventState::Captured(graph, part.deps);
    Ok(())
}

/// cuStreamWaitEvent where the event, the stream, or both belong to a capture. False when neither does.
pub fn wait(st: &mut State, stream: CUstream, event: &Arc<Event>) -> Res<bool> {
    let own = st
        .streams
        .get(&stream)
        .ok_or(INVALID_HANDLE)?
        .capture
        .clone();
    let state = event.state.lock().clone();
    let EventState::Captured(graph, nodes) = state else {
        let Some(part) = own else { return Ok(false) };
        if let Some(capture) = st.captures.get_mut(&part.id) {
            capture.invalid = true;
        }
        return Err(STREAM_CAPTURE_ISOLATION);
    };
    let id = st
        .captures
        .iter()
        .find(|(_, c)| c.graph == graph && !c.invalid)
        .map(|(id, _)| *id);
    let id = id.ok_or(STREAM_CAPTURE_INVALIDATED)?;
    let mut deps = match own {
        Some(part) if part.id != id => return Err(STREAM_CAPTURE_MERGE),
        Some(part) => part.deps,
        None => Vec::new(),
    };
    deps.extend(nodes);
    deps.sort_unstable();
    deps.dedup();
    if let Some(s) = st.streams.get_mut(&stream) {
        s.capture = Some(Part { id, deps });
    }
    Ok(true)
}
