//! Device and pinned host memory.

use super::out;
use crate::alloc::{self, used};
use crate::capture::illegal;
use crate::driver::{driver, Driver};
use crate::errors::*;
use crate::memory::{host_space, HostRegion, Kind};
use crate::ops::finish;
use crate::state::State;
use crate::types::*;
use core::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

fn allocate(d: &'static Driver, bytes: usize) -> Res<u64> {
    if bytes == 0 {
        return Err(INVALID_VALUE);
    }
    let mut st = d.state.lock();
    illegal(&mut st)?;
    let (context, c) = st.context()?;
    let gpu = c.gpu;
    alloc::allocate(d, &mut st, context, gpu, bytes, Kind::Plain)
}

pub(crate) fn release_host(st: &mut State, address: u64) {
    let Some(region) = st.memory.host.remove(&address) else {
        return;
    };
    if region.owned {
        // SAFETY: allocated with this layout in `host_alloc`; pending work was drained before.
        unsafe { std::alloc::dealloc(region.address as *mut u8, layout(region.size as usize)) };
    }
}

fn layout(bytes: usize) -> std::alloc::Layout {
    // A page is a power of two and the size was accepted by `host_alloc`.
    std::alloc::Layout::from_size_align(bytes.next_multiple_of(4096), 4096)
        .unwrap_or(std::alloc::Layout::new::<u64>())
}

/// Where `SIMCUDA_MEMLOCK` says so, pinned memory counts as locked: more than the process may lock is refused.
fn may_lock(d: &Driver, st: &State, bytes: usize) -> Res {
    if !d.memlock {
        return Ok(());
    }
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: writes the struct it is given.
    let asked = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    let pinned: u64 = st.memory.host.values().map(|region| region.size).sum();
    if asked == 0 && pinned.saturating_add(bytes as u64) > limit.rlim_cur {
        return Err(OUT_OF_MEMORY);
    }
    Ok(())
}

fn host_alloc(to: *mut *mut c_void, bytes: usize, flags: c_uint) -> Res {
    let d = driver()?;
    if bytes > isize::MAX as usize / 2 || to.is_null() || flags & !7 != 0 {
        return Err(INVALID_VALUE);
    }
    if bytes == 0 {
        // SAFETY: not null.
        return unsafe { out(to, core::ptr::null_mut()) };
    }
    let mut st = d.state.lock();
    illegal(&mut st)?;
    let context = st.context()?.0;
    may_lock(d, &st, bytes)?;
    // SAFETY: not zero-sized.
    let p = unsafe { std::alloc::alloc_zeroed(layout(bytes)) };
    if p.is_null() {
        return Err(OUT_OF_MEMORY);
    }
    add_host(d, &mut st, p as u64, bytes as u64, flags, true, context);
    d.charge(d.topology.calls.alloc_us);
    // SAFETY: not null.
    unsafe { out(to, p.cast()) }
}

fn add_host(
    d: &Driver,
    st: &mut State,
    address: u64,
    size: u64,
    flags: u32,
    owned: bool,
    context: CUcontext,
) {
    let (space, space_start) = host_space(address, d.job.uid);
    let buffer = d.new_buffer();
    let region = HostRegion {
        address,
        size,
        flags,
        owned,
        context,
        buffer,
        space,
        space_start,
    };
    st.memory.host.insert(address, Arc::new(region));
    d.report
        .pinned(st.memory.host.values().map(|region| region.size).sum());
}

/// Work of the process that a free must wait for: everything, as the driver's implicit synchronization does.
fn drain(d: &'static Driver, context: Option<CUcontext>) -> Res {
    let tails = {
        let mut st = d.state.lock();
        illegal(&mut st)?;
        match context {
            Some(context) => st.context_tails(context),
            None => st.all_tails(),
        }
    };
    // An error of pending work belongs to the calls that wait for that work.
    let pending: Vec<_> = tails
        .into_iter()
        .filter(|t| !t.done.load(std::sync::atomic::Ordering::Acquire))
        .collect();
    if !pending.is_empty() {
        let _ = finish(d, &pending);
    }
    Ok(())
}

driver! {
    fn cuMemAlloc_v2(dptr: *mut CUdeviceptr, bytes: usize) {
        if dptr.is_null() {
            return Err(INVALID_VALUE);
        }
        out(dptr, allocate(driver()?, bytes)?)
    }

    fn cuMemAllocPitch_v2(dptr: *mut CUdeviceptr, pitch: *mut usize, width: usize, height: usize, element: c_uint) {
        if dptr.is_null() || pitch.is_null() || ![4, 8, 16].contains(&element) {
            return Err(INVALID_VALUE);
        }
        let row = width.checked_next_multiple_of(512).ok_or(OUT_OF_MEMORY)?;
        out(dptr, allocate(driver()?, row.checked_mul(height).ok_or(OUT_OF_MEMORY)?)?)?;
        out(pitch, row)
    }

    fn cuMemFree_v2(dptr: CUdeviceptr) {
        let d = driver()?;
        crate::capture::illegal_globally(&mut d.state.lock())?;
        if dptr == 0 {
            return Ok(());
        }
        let context = {
            let mut st = d.state.lock();
            st.sticky()?;
            let a = st.memory.device.get(&dptr).ok_or(INVALID_VALUE)?;
            match a.kind {
                // Without any wait, as the reference says.
                Kind::Pool(_) => return crate::pool::free(d, &mut st, dptr, None),
                Kind::Plain | Kind::Managed if a.import.is_none() => a.context,
                _ => return Err(INVALID_VALUE),
            }
        };
        drain(d, Some(context))?;
        let mut st = d.state.lock();
        alloc::reclaim_zombies(d, &mut st);
        alloc::release(d, &mut st, dptr);
        d.charge(d.topology.calls.alloc_us);
        d.active();
        Ok(())
    }

    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let d = driver()?;
        let gpu = {
            let mut st = d.state.lock();
            alloc::reclaim_zombies(d, &mut st);
            st.context()?.1.gpu
        };
        let all = d.topology.memory_bytes();
        super::maybe(free, crate::host::free(d, all, used(d, gpu)) as usize);
        super::maybe(total, all as usize);
        Ok(())
    }

    fn cuMemGetAddressRange_v2(base: *mut CUdeviceptr, size: *mut usize, dptr: CUdeviceptr) {
        let d = driver()?;
        let st = d.state.lock();
        let device = st.memory.device_at(dptr).map(|a| (a.address, a.size));
        let host = || st.memory.host_at(dptr).map(|r| (r.address, r.size));
        let (address, bytes) = device.or_else(host).ok_or(NOT_FOUND)?;
        super::maybe(base, address);
        super::maybe(size, bytes as usize);
        Ok(())
    }

    fn cuMemHostAlloc(pp: *mut *mut c_void, bytes: usize, flags: c_uint) {
        host_alloc(pp, bytes, flags)
    }

    fn cuMemAllocHost_v2(pp: *mut *mut c_void, bytes: usize) {
        host_alloc(pp, bytes, 0)
    }

    fn cuMemFreeHost(p: *mut c_void) {
        let d = driver()?;
        illegal(&mut d.state.lock())?;
        if p.is_null() {
            return Ok(());
        }
        let address = p as u64;
        if !d.state.lock().memory.host.get(&address).is_some_and(|r| r.owned) {
            return Err(INVALID_VALUE);
        }
        drain(d, None)?;
        release_host(&mut d.state.lock(), address);
        Ok(())
    }

    fn cuMemHostRegister_v2(p: *mut c_void, bytes: usize, flags: c_uint) {
        let d = driver()?;
        if p.is_null() || bytes == 0 || flags & !0xf != 0 {
            return Err(INVALID_VALUE);
        }
        let mut st = d.state.lock();
        illegal(&mut st)?;
        let context = st.context()?.0;
        let (start, end) = (p as u64, p as u64 + bytes as u64);
        if let Some(other) = st.memory.host.values().find(|r| r.address < end && start < r.address + r.size) {
            return Err(if other.owned { INVALID_VALUE } else { HOST_MEMORY_ALREADY_REGISTERED });
        }
        // CU_MEMHOSTREGISTER_READ_ONLY.
        let is_mapped = crate::memory::is_mapped(start, end, flags & 8 == 0);
        if d.vm.contains(start) || st.memory.virt.reserved(start) || !is_mapped {
            return Err(INVALID_VALUE);
        }
        may_lock(d, &st, bytes)?;
        add_host(d, &mut st, start, bytes as u64, flags, false, context);
        d.charge(d.topology.calls.register_us_per_mib * bytes as f64 / f64::from(1 << 20));
        Ok(())
    }

    fn cuMemHostUnregister(p: *mut c_void) {
        let d = driver()?;
        let address = p as u64;
        illegal(&mut d.state.lock())?;
        let st = d.state.lock();
        match st.memory.host.get(&address) {
            None if address == 0 || st.memory.host_at(address).is_some() => return Err(INVALID_VALUE),
            None => return Err(HOST_MEMORY_NOT_REGISTERED),
            Some(r) if r.owned => return Err(INVALID_VALUE),
            Some(_) => {}
        }
        drop(st);
        drain(d, None)?;
        release_host(&mut d.state.lock(), address);
        Ok(())
    }

    fn cuMemHostGetDevicePointer_v2(dptr: *mut CUdeviceptr, p: *mut c_void, flags: c_uint) {
        let d = driver()?;
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        d.state.lock().memory.host_at(p as u64).ok_or(INVALID_VALUE)?;
        out(dptr, p as u64)
    }

    fn cuMemHostGetFlags(flags: *mut c_uint, p: *mut c_void) {
        let d = driver()?;
        let value = d.state.lock().memory.host_at(p as u64).ok_or(INVALID_VALUE)?.flags;
        // Every pinned region is mapped under unified addressing.
        out(flags, value | 2)
    }

    fn cuMemGetLocationInfo(_info: *mut c_int) {
        Err(NOT_SUPPORTED)
    }
}
