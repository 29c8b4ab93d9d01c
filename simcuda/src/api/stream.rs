//! Streams.

use super::out;
use crate::capture::no_query;
use crate::driver::driver;
use crate::errors::*;
use crate::event::{Event, EventState};
use crate::graph::wait_work;
use crate::ops::{enter, finish, issue, query};
use crate::state::State;
use crate::types::*;
use crate::work::{HostCode, UserData, Work};
use core::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::Ordering::Acquire;

fn create(stream: *mut CUstream, flags: c_uint, priority: c_int) -> Res {
    let d = driver()?;
    if flags > 1 {
        return Err(INVALID_VALUE);
    }
    let mut st = d.state.lock();
    let (context, c) = st.context()?;
    let gpu = c.gpu;
    let handle = st.make_stream(d, context, gpu, flags, priority.clamp(-5, 0), false);
    // SAFETY: the caller's pointer, checked for null.
    unsafe { out(stream, handle) }
}

fn field<T>(stream: CUstream, of: impl FnOnce(&crate::state::Stream) -> T) -> Res<T> {
    let d = driver()?;
    let mut st = d.state.lock();
    let stream = st.stream_handle(d, stream)?;
    st.streams.get(&stream).map(of).ok_or(INVALID_HANDLE)
}

/// Calls that are not made of a stream while it is captured, whatever the mode.
fn never_captured(stream: CUstream) -> Res {
    let d = driver()?;
    let mut st = d.state.lock();
    let stream = st.stream_handle(d, stream)?;
    crate::capture::unless_captured(&mut st, stream)
}

fn host(stream: CUstream, code: impl FnOnce(CUstream) -> HostCode) -> Res {
    let d = driver()?;
    let mut st = d.state.lock();
    issue(
        d,
        &mut st,
        stream,
        Work::Host(code(stream)),
        d.topology.calls.launch_us,
    )?;
    Ok(())
}

/// Whether an event of this process, made on another GPU than the stream's, is still to come.
fn is_pending_elsewhere(st: &State, stream: CUstream, event: &Event) -> bool {
    let of_event = st.contexts.get(&event.context).map(|c| c.gpu);
    let of_stream = st.streams.get(&stream).map(|s| s.gpu);
    let is_pending =
        matches!(&*event.state.lock(), EventState::Recorded(op) if !op.done.load(Acquire));
    is_pending && event.shared.lock().is_none() && of_event != of_stream
}

driver! {
    fn cuStreamCreate(stream: *mut CUstream, flags: c_uint) {
        create(stream, flags, 0)
    }

    fn cuStreamCreateWithPriority(stream: *mut CUstream, flags: c_uint, priority: c_int) {
        create(stream, flags, priority)
    }

    fn cuStreamDestroy_v2(stream: CUstream) {
        let d = driver()?;
        let mut st = d.state.lock();
        st.sticky()?;
        if st.streams.get(&stream).ok_or(INVALID_HANDLE)?.legacy {
            return Err(INVALID_HANDLE);
        }
        // Pending work goes on; only the handle is gone.
        let Some(gone) = st.streams.remove(&stream) else { return Err(INVALID_HANDLE) };
        st.orphans.retain(|(_, op)| !op.done.load(std::sync::atomic::Ordering::Acquire));
        if let Some(tail) = gone.tail {
            st.orphans.push((gone.context, tail));
        }
        if let Some(capture) = gone.capture.and_then(|p| st.captures.get_mut(&p.id)) {
            capture.invalid = true;
        }
        Ok(())
    }

    fn cuStreamQuery(stream: CUstream) {
        let d = driver()?;
        let tails = {
            let mut st = d.state.lock();
            let stream = st.stream_handle(d, stream)?;
            no_query(&mut st, stream)?;
            st.stream_deps_for_sync(stream)
        };
        for tail in &tails {
            query(d, tail)?;
        }
        Ok(())
    }

    fn cuStreamSynchronize(stream: CUstream) {
        let d = driver()?;
        let tails = {
            let mut st = d.state.lock();
            let stream = st.stream_handle(d, stream)?;
            no_query(&mut st, stream)?;
            st.stream_deps_for_sync(stream)
        };
        finish(d, &tails)
    }

    fn cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint) {
        super::event::external(stream, flags)?;
        let d = driver()?;
        let mut st = d.state.lock();
        let stream = st.stream_handle(d, stream)?;
        let event = st.events.get(&event).cloned().ok_or(INVALID_HANDLE)?;
        if crate::capture::wait(&mut st, stream, &event)? {
            return Ok(());
        }
        if event.shared.lock().is_none() && matches!(*event.state.lock(), EventState::Empty) {
            return Ok(());
        }
        let mut deps = st.stream_deps(stream);
        let (work, history) = match is_pending_elsewhere(&st, stream, &event) {
            true => (Work::Await, wait_work(d, &event, &mut deps).1),
            false => wait_work(d, &event, &mut deps),
        };
        enter(d, &mut st, stream, work, d.topology.calls.event_us, &deps, &history)?;
        Ok(())
    }

    fn cuStreamAddCallback(stream: CUstream, callback: CUstreamCallback, data: *mut c_void, flags: c_uint) {
        if callback.is_none() || flags != 0 {
            return Err(INVALID_VALUE);
        }
        never_captured(stream)?;
        host(stream, |s| HostCode::Callback(callback, s, UserData(data)))
    }

    fn cuLaunchHostFunc(stream: CUstream, function: CUhostFn, data: *mut c_void) {
        if function.is_none() {
            return Err(INVALID_VALUE);
        }
        host(stream, |_| HostCode::Function(function, UserData(data)))
    }

    fn cuStreamGetCtx(stream: CUstream, context: *mut CUcontext) {
        out(context, field(stream, |s| s.context)?)
    }

    fn cuStreamGetDevice(stream: CUstream, dev: *mut CUdevice) {
        let d = driver()?;
        let gpu = field(stream, |s| s.gpu)?;
        out(dev, d.ordinal(gpu).unwrap_or(0) as CUdevice)
    }

    fn cuStreamGetFlags(stream: CUstream, flags: *mut c_uint) {
        out(flags, field(stream, |s| s.flags)?)
    }

    fn cuStreamGetPriority(stream: CUstream, priority: *mut c_int) {
        out(priority, field(stream, |s| s.priority)?)
    }

    fn cuStreamGetId(stream: CUstream, id: *mut u64) {
        never_captured(stream)?;
        out(id, field(stream, |s| s.uid)?)
    }

    /// Which streams may touch managed memory is not looked at.
    fn cuStreamAttachMemAsync(stream: CUstream, dptr: CUdeviceptr, _length: usize, _flags: c_uint) {
        field(stream, |_| ())?;
        let st = driver()?.state.lock();
        match st.memory.device_at(dptr).map(|a| &a.kind) {
            Some(crate::memory::Kind::Managed) => Ok(()),
            _ => Err(INVALID_VALUE),
        }
    }
}
