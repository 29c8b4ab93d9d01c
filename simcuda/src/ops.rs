//! Issuing operations into streams, and the copies that API calls make.

use crate::driver::Driver;
use crate::errors::*;
use crate::memory::{Found, Place};
use crate::sched::{pump, OpState, Position};
use crate::state::State;
use crate::types::CUstream;
use crate::work::{Copy, Work};
use parking_lot::MutexGuard;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;

/// Enters `work` at the end of a stream; `None` when the stream is being captured instead.
pub fn issue(
    d: &'static Driver,
    st: &mut MutexGuard<'_, State>,
    stream: CUstream,
    work: Work,
    cost_us: f64,
) -> Res<Option<Arc<OpState>>> {
    let stream = st.stream_handle(d, stream)?;
    if crate::capture::entering(st, stream)? {
        crate::capture::add_work(st, stream, work)?;
        return Ok(None);
    }
    let deps = st.stream_deps(stream);
    let waits = d.launch_blocking && matches!(work, Work::Kernel(_) | Work::Fill(_));
    let op = enter(d, st, stream, work, cost_us, &deps, &[])?;
    if waits {
        MutexGuard::unlocked(st, || finish(d, std::slice::from_ref(&op)))?;
    }
    Ok(Some(op))
}

/// Enters `work` at the end of a stream after `deps` and what `history` names.
#[allow(
    clippy::too_many_arguments,
    reason = "the parameters of the driver's own call"
)]
pub fn enter(
    d: &'static Driver,
    st: &mut MutexGuard<'_, State>,
    stream: CUstream,
    work: Work,
    cost_us: f64,
    deps: &[Arc<OpState>],
    history: &[(u64, u64)],
) -> Res<Arc<OpState>> {
    let state = enter_only(d, st, stream, work, cost_us, deps, history)?;
    kick(d, st);
    Ok(state)
}

/// The hardware queue that an operation of a stream takes: streams of a context share them in turn, one set for what
/// the multiprocessors and the front end do, one for the copies of each direction.
pub fn queue(d: &Driver, st: &State, stream: CUstream, work: &Work) -> u64 {
    let Some(s) = st.streams.get(&stream) else {
        return 0;
    };
    let copies = (d.connections / 2).max(1);
    let (class, count) = match work {
        Work::Kernel(_) | Work::Fill(_) | Work::MemOps(_) => (0, d.connections),
        Work::Copy(c) => match c.first().map(|c| (c.src.gpu(), c.dst.gpu())) {
            Some((Some(_), None)) => (1, copies),
            Some((None, Some(_))) => (2, copies),
            Some((Some(_), Some(_))) => (3, copies),
            _ => return 0,
        },
        _ => return 0,
    };
    ((s.context as u64) << 12) | (class << 8) | (s.ordinal % count)
}

/// Sees to what has been entered: starts what may start.
pub fn kick(d: &'static Driver, st: &mut MutexGuard<'_, State>) {
    d.active();
    pump(d, st);
    d.wake_worker();
}

/// As [`enter`], for a caller that has more to do before the operation may start.
#[allow(
    clippy::too_many_arguments,
    reason = "the parameters of the driver's own call"
)]
pub fn enter_only(
    d: &'static Driver,
    st: &mut MutexGuard<'_, State>,
    stream: CUstream,
    work: Work,
    cost_us: f64,
    deps: &[Arc<OpState>],
    history: &[(u64, u64)],
) -> Res<Arc<OpState>> {
    let issued = d.charge(cost_us);
    let queue = queue(d, st, stream, &work);
    let s = st.streams.get_mut(&stream).ok_or(INVALID_HANDLE)?;
    s.position += 1;
    let position = Position {
        stream: s.uid,
        index: s.position,
        gpu: s.gpu,
        queue,
    };
    let state = st
        .sched
        .add(issued, d.observations(), work, position, deps, history);
    if let Some(s) = st.streams.get_mut(&stream) {
        s.tail = Some(state.clone());
    }
    Ok(state)
}

/// Blocks until `ops` are complete and known to the host; the first error wins.
pub fn finish(d: &'static Driver, ops: &[Arc<OpState>]) -> Res {
    let done = |op: &Arc<OpState>| op.done.load(std::sync::atomic::Ordering::Acquire);
    let pending = !ops.iter().all(done);
    if pending {
        d.wait_until(|_| ops.iter().all(done));
    }
    let mut st = d.state.lock();
    let (mut error, mut last) = (0, 0);
    for op in ops {
        crate::sched::observe_in(d, &mut st, op);
        last = last.max(op.end.load(Relaxed));
        if error == 0 {
            error = op.error.load(Relaxed);
        }
    }
    crate::pool::settle(d, &mut st);
    drop(st);
    // What was over when it was asked for costs a look.
    let cost = if d.job.me().host_time.load(Relaxed) < last {
        d.topology.calls.sync_us
    } else {
        d.topology.calls.query_us
    };
    if pending {
        d.woken(last);
    }
    d.learned(last);
    d.charge(cost);
    d.active();
    if error == 0 {
        Ok(())
    } else {
        Err(error)
    }
}

/// One look whether an operation is complete.
pub fn query(d: &'static Driver, op: &Arc<OpState>) -> Res {
    let polled = d.job.me().idle_polls.load(Relaxed) > 0;
    let complete = d.poll(|st| {
        let done = op.done.load(std::sync::atomic::Ordering::Acquire);
        if done {
            let news = !op.observed.load(Relaxed);
            crate::sched::observe_in(d, st, op);
            if news && polled {
                d.woken(op.end.load(Relaxed));
            }
            d.learned(op.end.load(Relaxed));
            if news {
                d.active();
                d.charge(d.topology.calls.query_us);
            }
        }
        done
    });
    match op.error.load(Relaxed) {
        _ if !complete => Err(NOT_READY),
        0 => Ok(()),
        code => Err(code),
    }
}

/// Where `span` bytes at `address` are.
pub fn resolve(d: &Driver, st: &State, address: u64, span: u64) -> Res<Place> {
    match st.memory.resolve(address, span, |a| d.vm.contains(a))? {
        Found::Live(place) => Ok(place),
        Found::Freed => {
            let pid = std::process::id();
            d.report.freed_in_use(&format!(
                "use after free: process {pid} passes {address:#x}, which it has freed"
            ));
            Err(INVALID_VALUE)
        }
    }
}

/// A copy of one run of bytes.
pub fn linear(d: &Driver, st: &State, dst: u64, src: u64, bytes: usize) -> Res<Copy> {
    Ok(Copy {
        dst: resolve(d, st, dst, bytes as u64)?,
        src: resolve(d, st, src, bytes as u64)?,
        width: bytes,
        height: 1,
        dst_pitch: bytes,
        src_pitch: bytes,
        staged: None,
        flip: None,
        is_behind: false,
    })
}

/// How a copy call behaves towards the host.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// `...Async`.
    Async,
    /// Without: returns when the host may touch its memory; device to device it returns at once.
    Sync,
}

/// Issues copies of one stream call.
pub fn copy(d: &'static Driver, mut copies: Vec<Copy>, stream: CUstream, mode: Mode) -> Res {
    copies.retain(|c| c.width > 0 && c.height > 0);
    let mut st = d.state.lock();
    let stream = st.stream_handle(d, stream)?;
    let captured = crate::capture::entering(&mut st, stream)?;
    if copies.is_empty() {
        return Ok(());
    }
    let mut wait = false;
    let is_behind = !captured && !is_idle(&st, stream);
    for c in &mut copies {
        c.is_behind = is_behind;
        let to_host = c.dst.gpu().is_none();
        let drained = [&c.dst, &c.src]
            .into_iter()
            .any(|p| matches!(p, Place::Device(a, _) if a.drains()));
        wait |= match mode {
            Mode::Sync => to_host || c.src.gpu().is_none() || drained,
            Mode::Async => to_host && matches!(c.dst, Place::Pageable(_)),
        };
        if !captured && matches!(c.src, Place::Pageable(_)) && mode == Mode::Async {
            c.staged = Some(Arc::new(stage(c)));
        }
        if mode == Mode::Async {
            d.corruptions.mark(c);
        }
    }
    let mut last = None;
    for group in by_route(d, &st, stream, copies) {
        let cost = d.topology.calls.async_us + idle_cost(d, &st, stream);
        last = issue(d, &mut st, stream, Work::Copy(group), cost)?;
    }
    drop(st);
    match last {
        Some(op) if wait => finish(d, &[op]),
        _ => Ok(()),
    }
}

/// What a copy call costs more when nothing is under way in its stream.
fn idle_cost(d: &Driver, st: &State, stream: CUstream) -> f64 {
    if is_idle(st, stream) {
        d.topology.calls.first_us
    } else {
        0.0
    }
}

/// True when nothing is under way in a stream.
fn is_idle(st: &State, stream: CUstream) -> bool {
    let tail = st.streams.get(&stream).and_then(|s| s.tail.as_ref());
    tail.is_none_or(|op| op.done.load(std::sync::atomic::Ordering::Acquire))
}

/// The source's bytes as they are now.
pub fn stage(c: &Copy) -> Vec<u8> {
    let mut bytes = vec![0u8; c.width * c.height];
    for row in 0..c.height {
        // SAFETY: the program promises that its source is readable.
        unsafe {
            let src = c.src.pointer().add(row * c.src_pitch);
            core::ptr::copy_nonoverlapping(src, bytes.as_mut_ptr().add(row * c.width), c.width);
        }
    }
    bytes
}

/// Splits copies into runs that take the same way, in order.
pub fn by_route(d: &Driver, st: &State, stream: CUstream, copies: Vec<Copy>) -> Vec<Vec<Copy>> {
    let gpu = st.streams.get(&stream).map_or(0, |s| s.gpu);
    let key = |c: &Copy| {
        (
            c.way(&d.topology, &d.machine, gpu).0,
            c.src.gpu(),
            c.dst.gpu(),
        )
    };
    let mut groups: Vec<Vec<Copy>> = Vec::new();
    for c in copies {
        match groups.iter_mut().find(|g| key(&g[0]) == key(&c)) {
            Some(group) => group.push(c),
            None => groups.push(vec![c]),
        }
    }
    groups
}
