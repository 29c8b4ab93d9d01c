//! Memory pools. Pools that other processes could open are not simulated, nor are allocations in graphs.

use super::{array, load, out};
use crate::capture::illegal;
use crate::driver::{driver, Driver};
use crate::errors::*;
use crate::pool::{self, Pool};
use crate::types::*;
use crate::virt::{accessor, device, READ_WRITE};
use core::ffi::{c_int, c_uint, c_void};

fn ordinal(d: &Driver, dev: CUdevice) -> Res<usize> {
    device(d, 1, dev)
}

/// Reads an attribute, or writes it: what may be written, as the reference has it.
unsafe fn attribute(pool: &mut Pool, which: c_uint, value: *mut c_void, write: bool) -> Res {
    let (flags, word) = (value.cast::<c_int>(), value.cast::<u64>());
    let flag = match which {
        1 => Some(&mut pool.reuse.follow_events),
        2 => Some(&mut pool.reuse.opportunistic),
        3 => Some(&mut pool.reuse.internal),
        _ => None,
    };
    // SAFETY: the caller's pointer to the attribute's type; `load` and `out` refuse null.
    unsafe {
        match (which, flag) {
            (_, Some(flag)) if write => *flag = load(flags)? != 0,
            (_, Some(flag)) => out(flags, c_int::from(*flag))?,
            (4, _) if write => pool.threshold = load(word)?,
            (4, _) => out(word, pool.threshold)?,
            (5..=8, _) => {
                let counted = if which < 7 {
                    &mut pool.reserved
                } else {
                    &mut pool.used
                };
                match (which, write) {
                    (5 | 7, false) => out(word, counted.0)?,
                    (6 | 8, false) => out(word, counted.1)?,
                    // A high-water mark can be reset, and no more.
                    (6 | 8, true) if load(word)? == 0 => counted.1 = counted.0,
                    _ => return Err(INVALID_VALUE),
                }
            }
            _ => return Err(INVALID_VALUE),
        }
    }
    Ok(())
}

driver! {
    fn cuDeviceGetDefaultMemPool(pool_out: *mut CUmemoryPool, dev: CUdevice) {
        let d = driver()?;
        out(pool_out, pool::default_of(d, &mut d.state.lock(), ordinal(d, dev)?))
    }

    fn cuDeviceGetMemPool(pool_out: *mut CUmemoryPool, dev: CUdevice) {
        let d = driver()?;
        out(pool_out, pool::current_of(d, &mut d.state.lock(), ordinal(d, dev)?))
    }

    fn cuDeviceSetMemPool(dev: CUdevice, handle: CUmemoryPool) {
        let d = driver()?;
        d.state.lock().memory.pools.set_current(ordinal(d, dev)?, handle)
    }

    fn cuMemPoolCreate(pool_out: *mut CUmemoryPool, props: *const CUmemPoolProps) {
        let d = driver()?;
        let p = load(props)?;
        if pool_out.is_null() || p.allocType != MEM_ALLOCATION_TYPE_PINNED {
            return Err(INVALID_VALUE);
        }
        if p.handleTypes != 0 {
            return Err(NOT_SUPPORTED);
        }
        let ordinal = accessor(d, p.location.kind, p.location.id)?;
        out(pool_out, pool::create(d, &mut d.state.lock(), ordinal, p.maxSize as u64, false))
    }

    fn cuMemPoolDestroy(handle: CUmemoryPool) {
        let d = driver()?;
        pool::destroy(d, &mut d.state.lock(), handle)
    }

    fn cuMemPoolTrimTo(handle: CUmemoryPool, keep: usize) {
        let d = driver()?;
        let mut st = d.state.lock();
        illegal(&mut st)?;
        st.memory.pools.get(handle)?;
        pool::trim(d, &mut st, handle, keep as u64);
        Ok(())
    }

    fn cuMemPoolSetAttribute(handle: CUmemoryPool, attr: c_uint, value: *mut c_void) {
        let d = driver()?;
        attribute(d.state.lock().memory.pools.get(handle)?, attr, value, true)
    }

    fn cuMemPoolGetAttribute(handle: CUmemoryPool, attr: c_uint, value: *mut c_void) {
        let d = driver()?;
        attribute(d.state.lock().memory.pools.get(handle)?, attr, value, false)
    }

    /// Recorded for cuMemPoolGetAccess. Copies do not ask: whether the vendor's driver refuses a copy between
    /// devices whose access was not enabled, or takes another way, is not documented.
    fn cuMemPoolSetAccess(handle: CUmemoryPool, map: *const CUmemAccessDesc, count: usize) {
        let d = driver()?;
        let wanted = array(map, count)?;
        let mut st = d.state.lock();
        let pool = st.memory.pools.get(handle)?;
        for w in &wanted {
            let ordinal = accessor(d, w.location.kind, w.location.id)?;
            // The device's own access cannot be taken away.
            if ![0, 1, READ_WRITE].contains(&w.flags) {
                return Err(INVALID_VALUE);
            }
            if ordinal == pool.ordinal && w.flags != READ_WRITE {
                return Err(INVALID_DEVICE);
            }
        }
        pool.access.extend(wanted.iter().map(|w| (w.location.id as usize, w.flags)));
        Ok(())
    }

    fn cuMemPoolGetAccess(flags: *mut c_uint, handle: CUmemoryPool, location: *const CUmemLocation) {
        let d = driver()?;
        let location = load(location)?;
        let ordinal = accessor(d, location.kind, location.id)?;
        let mut st = d.state.lock();
        let pool = st.memory.pools.get(handle)?;
        let own = if ordinal == pool.ordinal { READ_WRITE } else { 0 };
        out(flags, pool.access.get(&ordinal).copied().unwrap_or(own))
    }

    fn cuMemAllocAsync(dptr: *mut CUdeviceptr, bytes: usize, stream: CUstream) {
        let d = driver()?;
        if dptr.is_null() {
            return Err(INVALID_VALUE);
        }
        let mut st = d.state.lock();
        let handle = st.stream_handle(d, stream)?;
        let context = st.streams.get(&handle).ok_or(INVALID_HANDLE)?.context;
        let ordinal = st.contexts.get(&context).ok_or(INVALID_CONTEXT)?.ordinal;
        let pool = pool::current_of(d, &mut st, ordinal);
        out(dptr, pool::allocate(d, &mut st, pool, bytes, stream)?)
    }

    fn cuMemAllocFromPoolAsync(dptr: *mut CUdeviceptr, bytes: usize, handle: CUmemoryPool, stream: CUstream) {
        let d = driver()?;
        if dptr.is_null() {
            return Err(INVALID_VALUE);
        }
        out(dptr, pool::allocate(d, &mut d.state.lock(), handle, bytes, stream)?)
    }

    /// Pool memory only; other memory is an invalid value here.
    fn cuMemFreeAsync(dptr: CUdeviceptr, stream: CUstream) {
        let d = driver()?;
        if dptr == 0 {
            let mut st = d.state.lock();
            let stream = st.stream_handle(d, stream)?;
            return pool::not_beside_a_capture(&mut st, stream);
        }
        pool::free(d, &mut d.state.lock(), dptr, Some(stream))
    }

    /// Global and host attachment, without difference: which streams may touch the memory is not looked at.
    fn cuMemAllocManaged(dptr: *mut CUdeviceptr, bytes: usize, flags: c_uint) {
        let d = driver()?;
        // CU_MEM_ATTACH_GLOBAL or CU_MEM_ATTACH_HOST.
        if dptr.is_null() || bytes == 0 || !matches!(flags, 1 | 2) {
            return Err(INVALID_VALUE);
        }
        let mut st = d.state.lock();
        illegal(&mut st)?;
        let (context, c) = st.context()?;
        let gpu = c.gpu;
        out(dptr, crate::alloc::allocate(d, &mut st, context, gpu, bytes, crate::memory::Kind::Managed)?)
    }
}
