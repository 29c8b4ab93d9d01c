//! Events.

use super::out;
use crate::capture;
use crate::driver::{driver, Driver};
use crate::errors::*;
use crate::event::{Event, EventState, DISABLE_TIMING, INTERPROCESS};
use crate::graph::recorded;
use crate::ops::{enter_only, finish, kick, query};
use crate::sched::OpState;
use crate::types::*;
use crate::work::Work;
use core::ffi::c_uint;
use parking_lot::Mutex;
use std::sync::atomic::Ordering::{Acquire, Relaxed};
use std::sync::Arc;

fn get(d: &Driver, event: CUevent) -> Res<Arc<Event>> {
    d.state
        .lock()
        .events
        .get(&event)
        .cloned()
        .ok_or(INVALID_HANDLE)
}

/// The operation of this process that a query has to look at; `None` when there is nothing to wait for.
fn recorded_op(event: &Event) -> Res<Option<Arc<OpState>>> {
    match &*event.state.lock() {
        EventState::Empty => Ok(None),
        EventState::Recorded(op) => Ok(Some(op.clone())),
        EventState::Captured(..) => Err(CAPTURED_EVENT),
    }
}

fn record(stream: CUstream, event: CUevent) -> Res {
    let d = driver()?;
    let event = get(d, event)?;
    let mut st = d.state.lock();
    let stream = st.stream_handle(d, stream)?;
    if st.streams.get(&stream).map(|s| s.context) != Some(event.context) {
        return Err(INVALID_HANDLE);
    }
    if capture::capturing(&st, stream)? {
        return capture::record(&st, stream, &event);
    }
    let deps = st.stream_deps(stream);
    let work = Work::Record(event.clone());
    let op = enter_only(
        d,
        &mut st,
        stream,
        work,
        d.topology.calls.event_us,
        &deps,
        &[],
    )?;
    recorded(d, &event, &op);
    kick(d, &mut st);
    Ok(())
}

/// The one flag of records and waits: in a capture, a node of its own. It means nothing outside.
pub(crate) fn external(stream: CUstream, flags: c_uint) -> Res {
    if flags > 1 {
        return Err(INVALID_VALUE);
    }
    let d = driver()?;
    let mut st = d.state.lock();
    let stream = st.stream_handle(d, stream)?;
    if flags == 1 && !capture::capturing(&st, stream)? {
        return Err(ILLEGAL_STATE);
    }
    Ok(())
}

/// Waits for, or looks at, an event that other processes record too.
fn shared_done(d: &'static Driver, event: &Event, block: bool) -> Res<bool> {
    let Some((row, id)) = *event.shared.lock() else {
        return Ok(false);
    };
    let Some((number, history)) = crate::ipc::event_now(d, row, id) else {
        return Ok(true);
    };
    let reached =
        |_: &mut crate::state::State| crate::ipc::event_reached(d, row, id, number).is_some();
    if block {
        d.wait_until(reached);
    } else if !d.poll(reached) {
        return Err(NOT_READY);
    }
    if let Some((time, known)) = crate::ipc::event_reached(d, row, id, number) {
        d.learned(time);
        let seen = OpState {
            id: 0,
            done: true.into(),
            end: time.into(),
            known: known.into(),
            history: Arc::new(history),
            error: 0.into(),
            observed: false.into(),
        };
        crate::sched::observe_in(d, &mut d.state.lock(), &seen);
    }
    Ok(true)
}

driver! {
    fn cuEventCreate(event: *mut CUevent, flags: c_uint) {
        let d = driver()?;
        if flags > 7 || (flags & INTERPROCESS != 0 && flags & DISABLE_TIMING == 0) {
            return Err(INVALID_VALUE);
        }
        let mut st = d.state.lock();
        let context = st.context()?.0;
        let shared = if flags & INTERPROCESS != 0 { Some(crate::ipc::share_event(d)?) } else { None };
        let handle = st.handle();
        let made = Event { flags, context, state: Mutex::new(EventState::Empty), shared: Mutex::new(shared), opened: false };
        st.events.insert(handle, Arc::new(made));
        out(event, handle)
    }

    fn cuEventDestroy_v2(event: CUevent) {
        let d = driver()?;
        d.state.lock().events.remove(&event).map(|_| ()).ok_or(INVALID_HANDLE)
    }

    fn cuEventRecord(event: CUevent, stream: CUstream) {
        record(stream, event)
    }

    fn cuEventRecordWithFlags(event: CUevent, stream: CUstream, flags: c_uint) {
        external(stream, flags)?;
        record(stream, event)
    }

    fn cuEventQuery(event: CUevent) {
        let d = driver()?;
        let event = get(d, event)?;
        capture::illegal(&mut d.state.lock())?;
        failed(d, &event)?;
        if shared_done(d, &event, false)? {
            return Ok(());
        }
        match recorded_op(&event)? {
            Some(op) => query(d, &op),
            None => Ok(()),
        }
    }

    fn cuEventSynchronize(event: CUevent) {
        let d = driver()?;
        let event = get(d, event)?;
        capture::illegal(&mut d.state.lock())?;
        if shared_done(d, &event, true)? {
            return Ok(());
        }
        match recorded_op(&event)? {
            Some(op) => finish(d, &[op]),
            None => Ok(()),
        }
    }

    fn cuEventElapsedTime(ms: *mut f32, start: CUevent, end: CUevent) {
        elapsed(ms, start, end)
    }

    fn cuEventElapsedTime_v2(ms: *mut f32, start: CUevent, end: CUevent) {
        elapsed(ms, start, end)
    }
}

/// The error of the event's context, if there is one.
fn failed(d: &Driver, event: &Event) -> Res {
    match d.state.lock().contexts.get(&event.context) {
        Some(context) if context.error != 0 => Err(context.error),
        _ => Ok(()),
    }
}

unsafe fn elapsed(ms: *mut f32, start: CUevent, end: CUevent) -> Res {
    let d = driver()?;
    if ms.is_null() {
        return Err(INVALID_HANDLE);
    }
    let mut times = [0u64; 2];
    for (time, event) in times.iter_mut().zip([start, end]) {
        let event = get(d, event)?;
        if event.flags & DISABLE_TIMING != 0 {
            return Err(INVALID_HANDLE);
        }
        let op = recorded_op(&event)?.ok_or(INVALID_HANDLE)?;
        if !op.done.load(Acquire) {
            return Err(NOT_READY);
        }
        *time = op.end.load(Relaxed);
    }
    // SAFETY: the caller's pointer, checked for null.
    unsafe { out(ms, (times[1] as f64 - times[0] as f64) as f32 / 1e6) }
}
