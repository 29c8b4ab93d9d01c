//! Contexts.

use super::{maybe, out};
use crate::capture::illegal;
use crate::driver::{driver, Driver};
use crate::errors::*;
use crate::ops::finish;
use crate::state::{current, pop_current, push_current, set_current, Context, State};
use crate::types::*;
use core::ffi::{c_int, c_uint, c_void};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering::Relaxed;

fn ordinal(d: &Driver, device: CUdevice) -> Res<usize> {
    usize::try_from(device)
        .ok()
        .filter(|i| *i < d.visible.len())
        .ok_or(INVALID_DEVICE)
}

fn make(d: &Driver, st: &mut State, ordinal: usize, primary: bool, flags: u32) -> CUcontext {
    let handle = st.handle();
    enter(d, st, handle, ordinal, primary, flags);
    handle
}

fn enter(d: &Driver, st: &mut State, handle: CUcontext, ordinal: usize, primary: bool, flags: u32) {
    let gpu = d.visible[ordinal];
    let legacy = st.make_stream(d, handle, gpu, 0, 0, true);
    let context = Context {
        ordinal,
        gpu,
        primary,
        flags,
        id: d.new_stream_uid(),
        legacy,
        streams_made: 1,
        per_thread: HashMap::new(),
        peers: HashSet::new(),
        limits: HashMap::new(),
        error: 0,
    };
    st.devices.insert(handle, ordinal);
    st.contexts.insert(handle, context);
    d.job.me().contexts.fetch_or(1 << gpu, Relaxed);
}

fn create(context: *mut CUcontext, flags: c_uint, device: CUdevice) -> Res {
    let d = driver()?;
    let ordinal = ordinal(d, device)?;
    valid_flags(flags)?;
    let mut st = d.state.lock();
    let handle = make(d, &mut st, ordinal, false, flags);
    // SAFETY: the caller's pointer, checked for null.
    unsafe { out(context, handle) }?;
    push_current(handle);
    d.charge(d.topology.calls.alloc_us);
    Ok(())
}

/// At most one way to wait, and flags that there are.
fn valid_flags(flags: c_uint) -> Res {
    if flags & !0xff == 0 && matches!(flags & 7, 0 | 1 | 2 | 4) {
        return Ok(());
    }
    Err(INVALID_VALUE)
}

/// The limits of a context that nobody has changed: an H200's, as its driver (580) answers.
fn default_limit(d: &Driver, limit: c_uint) -> Res<usize> {
    Ok(match limit {
        0 => 1024,
        1 => 8_650_752,
        2 => 8 << 20,
        // Given up with the ninth generation.
        3 if d.topology.gpu.compute_capability[0] >= 9 => return Err(UNSUPPORTED_LIMIT),
        3 => 2,
        4 => 2048,
        5 => 64,
        6 => 11_796_480,
        7 => (d.topology.gpu.shared_kib as usize) << 10,
        8 => 0,
        _ => return Err(INVALID_VALUE),
    })
}

/// Waits for everything in a context, then takes it apart.
fn destroy(d: &'static Driver, handle: CUcontext) -> Res {
    let tails = d.state.lock().context_tails(handle);
    // What ran into an error is gone all the same.
    let _ = finish(d, &tails);
    let mut st = d.state.lock();
    let gone = st.contexts.remove(&handle).ok_or(INVALID_CONTEXT)?;
    if st.contexts.values().all(|c| c.gpu != gone.gpu) {
        d.job.me().contexts.fetch_and(!(1 << gone.gpu), Relaxed);
    }
    st.streams.retain(|_, s| s.context != handle);
    let owned: Vec<u64> = st
        .memory
        .device
        .values()
        .filter(|a| a.context == handle)
        .map(|a| a.address)
        .collect();
    for address in owned {
        crate::alloc::release(d, &mut st, address);
    }
    let hosts: Vec<u64> = st
        .memory
        .host
        .values()
        .filter(|r| r.context == handle)
        .map(|r| r.address)
        .collect();
    for address in hosts {
        super::memory::release_host(&mut st, address);
    }
    st.modules.retain(|_, m| m.context != handle);
    Ok(())
}

driver! {
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, dev: CUdevice) {
        let d = driver()?;
        let ordinal = ordinal(d, dev)?;
        let mut st = d.state.lock();
        let mut primary = st.primaries[ordinal];
        if primary.was_reset {
            primary.references = 0;
        }
        if primary.references == 0 {
            if primary.context == 0 {
                primary.context = st.handle();
            }
            if !st.contexts.contains_key(&primary.context) {
                primary.was_reset = false;
                enter(d, &mut st, primary.context, ordinal, true, primary.flags);
                d.charge(d.topology.calls.alloc_us);
            }
        }
        primary.references += 1;
        st.primaries[ordinal] = primary;
        out(context, primary.context)
    }

    fn cuDevicePrimaryCtxRelease_v2(dev: CUdevice) {
        let d = driver()?;
        let ordinal = ordinal(d, dev)?;
        let last = {
            let mut st = d.state.lock();
            let primary = &mut st.primaries[ordinal];
            primary.references = primary.references.checked_sub(1).ok_or(INVALID_CONTEXT)?;
            let is_there = !core::mem::take(&mut primary.was_reset);
            (primary.references == 0 && is_there).then_some(primary.context)
        };
        last.map_or(Ok(()), |context| destroy(d, context))
    }

    fn cuDevicePrimaryCtxReset_v2(dev: CUdevice) {
        let d = driver()?;
        let ordinal = ordinal(d, dev)?;
        let primary = d.state.lock().primaries[ordinal];
        if primary.references == 0 || primary.was_reset {
            return Ok(());
        }
        destroy(d, primary.context)?;
        // Whoever held it may still give it back, once.
        let primary = &mut d.state.lock().primaries[ordinal];
        (primary.references, primary.was_reset) = (1, true);
        Ok(())
    }

    fn cuDevicePrimaryCtxGetState(dev: CUdevice, flags: *mut c_uint, active: *mut c_int) {
        let d = driver()?;
        let primary = d.state.lock().primaries[ordinal(d, dev)?];
        out(flags, primary.flags)?;
        out(active, c_int::from(primary.references > 0 && !primary.was_reset))
    }

    fn cuDevicePrimaryCtxSetFlags_v2(dev: CUdevice, flags: c_uint) {
        let d = driver()?;
        valid_flags(flags)?;
        d.state.lock().primaries[ordinal(d, dev)?].flags = flags;
        Ok(())
    }

    fn cuCtxCreate_v2(context: *mut CUcontext, flags: c_uint, dev: CUdevice) {
        create(context, flags, dev)
    }

    fn cuCtxCreate_v3(context: *mut CUcontext, _params: *mut c_void, _count: c_int, flags: c_uint, dev: CUdevice) {
        create(context, flags, dev)
    }

    fn cuCtxCreate_v4(context: *mut CUcontext, _params: *mut c_void, flags: c_uint, dev: CUdevice) {
        create(context, flags, dev)
    }

    fn cuCtxDestroy_v2(context: CUcontext) {
        let d = driver()?;
        if context == 0 {
            return Err(INVALID_VALUE);
        }
        {
            let mut st = d.state.lock();
            illegal(&mut st)?;
            if st.contexts.get(&context).ok_or(INVALID_CONTEXT)?.primary {
                return Err(INVALID_CONTEXT);
            }
        }
        destroy(d, context)?;
        if current() == context {
            pop_current();
        }
        Ok(())
    }

    fn cuCtxPushCurrent_v2(context: CUcontext) {
        let d = driver()?;
        if context == 0 {
            return Err(INVALID_VALUE);
        }
        if !d.state.lock().contexts.contains_key(&context) {
            // Driver 580 pushes it, and crashes in popping it.
            d.report.freed_in_use(&format!(
                "use after free: process {} enters context {context:#x}, which is gone",
                std::process::id()
            ));
            return Err(INVALID_CONTEXT);
        }
        push_current(context);
        Ok(())
    }

    fn cuCtxPopCurrent_v2(context: *mut CUcontext) {
        driver()?;
        let popped = pop_current().ok_or(INVALID_CONTEXT)?;
        maybe(context, popped);
        Ok(())
    }

    fn cuCtxSetCurrent(context: CUcontext) {
        let d = driver()?;
        if context != 0 && !d.state.lock().contexts.contains_key(&context) {
            return Err(INVALID_CONTEXT);
        }
        set_current(context);
        Ok(())
    }

    fn cuCtxGetCurrent(context: *mut CUcontext) {
        driver()?;
        out(context, current())
    }

    fn cuCtxGetDevice(dev: *mut CUdevice) {
        let d = driver()?;
        // Also of a context that has failed, or is gone.
        let ordinal = d.state.lock().devices.get(&current()).copied();
        out(dev, ordinal.ok_or(INVALID_CONTEXT)? as CUdevice)
    }

    fn cuCtxGetDevice_v2(dev: *mut CUdevice, context: CUcontext) {
        let d = driver()?;
        let ordinal = d.state.lock().context_or_current(context)?.1.ordinal;
        out(dev, ordinal as CUdevice)
    }

    fn cuCtxGetId(context: CUcontext, id: *mut u64) {
        let d = driver()?;
        let value = d.state.lock().context_or_current(context)?.1.id;
        out(id, value)
    }

    fn cuCtxGetFlags(flags: *mut c_uint) {
        let d = driver()?;
        let value = d.state.lock().context()?.1.flags;
        // CU_CTX_MAP_HOST is what every context is.
        out(flags, value | 8)
    }

    fn cuCtxSetFlags(flags: c_uint) {
        let d = driver()?;
        let mut st = d.state.lock();
        let handle = st.context()?.0;
        if let Some(c) = st.contexts.get_mut(&handle) {
            c.flags = flags;
        }
        Ok(())
    }

    fn cuCtxGetApiVersion(context: CUcontext, version: *mut c_uint) {
        let d = driver()?;
        d.state.lock().context_or_current(context)?;
        out(version, 3020)
    }

    fn cuCtxSynchronize() {
        synchronize(0)
    }

    fn cuCtxSynchronize_v2(context: CUcontext) {
        synchronize(context)
    }

    fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) {
        driver()?.state.lock().context()?;
        maybe(least, 0);
        maybe(greatest, -5);
        Ok(())
    }

    fn cuCtxEnablePeerAccess(peer: CUcontext, flags: c_uint) {
        let d = driver()?;
        let mut st = d.state.lock();
        let handle = st.context()?.0;
        let other = st.contexts.get(&peer).ok_or(INVALID_CONTEXT)?.gpu;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        let own = st.contexts.get_mut(&handle).ok_or(INVALID_CONTEXT)?;
        if own.gpu == other {
            return Err(PEER_ACCESS_UNSUPPORTED);
        }
        if !own.peers.insert(peer) {
            return Err(PEER_ACCESS_ALREADY_ENABLED);
        }
        Ok(())
    }

    fn cuCtxDisablePeerAccess(peer: CUcontext) {
        let d = driver()?;
        let mut st = d.state.lock();
        let handle = st.context()?.0;
        let own = st.contexts.get_mut(&handle).ok_or(INVALID_CONTEXT)?;
        if own.peers.remove(&peer) {
            return Ok(());
        }
        Err(PEER_ACCESS_NOT_ENABLED)
    }

    fn cuCtxGetLimit(value: *mut usize, limit: c_uint) {
        let d = driver()?;
        let st = d.state.lock();
        let set = st.context()?.1.limits.get(&limit).copied();
        out(value, set.map_or_else(|| default_limit(d, limit), Ok)?)
    }

    fn cuCtxSetLimit(limit: c_uint, value: usize) {
        let d = driver()?;
        default_limit(d, limit)?;
        let mut st = d.state.lock();
        illegal(&mut st)?;
        let handle = st.context()?.0;
        if let Some(context) = st.contexts.get_mut(&handle) {
            context.limits.insert(limit, value);
        }
        Ok(())
    }

    fn cuCtxGetCacheConfig(config: *mut c_uint) {
        driver()?.state.lock().context()?;
        out(config, 0)
    }

    fn cuCtxSetCacheConfig(_config: c_uint) {
        driver()?.state.lock().context()?;
        Ok(())
    }

    fn cuCtxGetSharedMemConfig(config: *mut c_uint) {
        driver()?.state.lock().context()?;
        out(config, 1)
    }

    fn cuCtxSetSharedMemConfig(_config: c_uint) {
        driver()?.state.lock().context()?;
        Ok(())
    }

    fn cuCtxResetPersistingL2Cache() {
        driver()?.state.lock().context()?;
        Ok(())
    }
}

fn synchronize(context: CUcontext) -> Res {
    let d = driver()?;
    let tails = {
        let mut st = d.state.lock();
        let handle = st.context_or_current(context)?.0;
        if st
            .streams
            .values()
            .any(|s| s.context == handle && s.capture.is_some())
        {
            let captured: Vec<CUstream> = st
                .streams
                .iter()
                .filter(|(_, s)| s.capture.is_some())
                .map(|(h, _)| *h)
                .collect();
            for stream in captured {
                crate::capture::no_query(&mut st, stream)?;
            }
        }
        illegal(&mut st)?;
        st.context_tails(handle)
    };
    finish(d, &tails)
}
