//! Virtual memory management. Of the handles that other processes can open, file descriptors are simulated.

use super::{array, load, out};
use crate::driver::{driver, Driver};
use crate::errors::*;
use crate::memory::Kind;
use crate::types::*;
use crate::virt::{self, FILE_DESCRIPTOR, GRANULARITY};
use core::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd, RawFd};

/// Pinned memory of a device, and the device's ordinal.
fn ordinal(d: &Driver, p: &CUmemAllocationProp) -> Res<usize> {
    match p.kind {
        MEM_ALLOCATION_TYPE_PINNED => {}
        // CU_MEM_ALLOCATION_TYPE_MANAGED, since CUDA 13.0.
        2 => return Err(NOT_SUPPORTED),
        _ => return Err(INVALID_VALUE),
    }
    if p.requestedHandleTypes & !FILE_DESCRIPTOR != 0 {
        return Err(NOT_SUPPORTED);
    }
    virt::device(d, p.location.kind, p.location.id)
}

/// Of the kinds of handle that there are (files, two of Windows', fabric handles) the first is simulated.
fn is_file_descriptor(kind: c_uint) -> Res {
    match kind {
        FILE_DESCRIPTOR => Ok(()),
        2 | 4 | 8 => Err(NOT_SUPPORTED),
        _ => Err(INVALID_VALUE),
    }
}

driver! {
    fn cuMemAddressReserve(ptr: *mut CUdeviceptr, size: usize, alignment: usize, addr: CUdeviceptr, flags: c_ulonglong) {
        let d = driver()?;
        if ptr.is_null() || flags != 0 {
            return Err(INVALID_VALUE);
        }
        out(ptr, virt::reserve(d, &mut d.state.lock(), size as u64, alignment as u64, addr)?)
    }

    fn cuMemAddressFree(ptr: CUdeviceptr, size: usize) {
        let d = driver()?;
        virt::unreserve(&mut d.state.lock(), ptr, size as u64)
    }

    fn cuMemCreate(handle: *mut CUmemGenericAllocationHandle, size: usize, prop: *const CUmemAllocationProp, flags: c_ulonglong) {
        let d = driver()?;
        let prop = load(prop)?;
        let ordinal = ordinal(d, &prop)?;
        if handle.is_null() || flags != 0 {
            return Err(INVALID_VALUE);
        }
        out(handle, virt::create(d, &mut d.state.lock(), ordinal, size as u64, prop.requestedHandleTypes)?)
    }

    fn cuMemExportToShareableHandle(shareable: *mut c_void, handle: CUmemGenericAllocationHandle, kind: c_uint, flags: c_ulonglong) {
        let d = driver()?;
        if shareable.is_null() || flags != 0 {
            return Err(INVALID_VALUE);
        }
        is_file_descriptor(kind)?;
        let file = virt::export(d, &d.state.lock(), handle)?;
        d.charge(d.topology.calls.ipc_open_us);
        out(shareable.cast::<c_int>(), file.into_raw_fd())
    }

    fn cuMemImportFromShareableHandle(handle: *mut CUmemGenericAllocationHandle, shareable: *mut c_void, kind: c_uint) {
        let d = driver()?;
        if handle.is_null() {
            return Err(INVALID_VALUE);
        }
        is_file_descriptor(kind)?;
        let number = RawFd::try_from(shareable.addr()).ok().filter(|number| *number >= 0).ok_or(INVALID_VALUE)?;
        // SAFETY: the program's own, open while this is called; one that is not is refused when it is
        // duplicated.
        let file = unsafe { BorrowedFd::borrow_raw(number) };
        let imported = virt::import(d, &mut d.state.lock(), file)?;
        d.charge(d.topology.calls.ipc_open_us);
        out(handle, imported)
    }

    fn cuMemRelease(handle: CUmemGenericAllocationHandle) {
        let d = driver()?;
        virt::release(d, &mut d.state.lock(), handle)
    }

    fn cuMemMap(ptr: CUdeviceptr, size: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: c_ulonglong) {
        let d = driver()?;
        // "Currently must be zero", both of them.
        if flags != 0 {
            return Err(INVALID_VALUE);
        }
        if offset != 0 {
            return Err(NOT_SUPPORTED);
        }
        virt::map(d, &mut d.state.lock(), ptr, size as u64, handle)
    }

    fn cuMemUnmap(ptr: CUdeviceptr, size: usize) {
        let d = driver()?;
        virt::unmap(d, &mut d.state.lock(), ptr, size as u64)
    }

    fn cuMemSetAccess(ptr: CUdeviceptr, size: usize, desc: *const CUmemAccessDesc, count: usize) {
        let d = driver()?;
        let wanted = array(desc, count)?;
        if wanted.is_empty() {
            return Err(INVALID_VALUE);
        }
        virt::set_access(d, &d.state.lock(), ptr, size as u64, &wanted)
    }

    fn cuMemGetAccess(flags: *mut c_ulonglong, location: *const CUmemLocation, ptr: CUdeviceptr) {
        let d = driver()?;
        let location = load(location)?;
        virt::device(d, location.kind, location.id)?;
        let a = virt::at(&d.state.lock(), ptr)?;
        match &a.kind {
            Kind::Mapped(m) => out(flags, c_ulonglong::from(m.access_of(location.id))),
            _ => Err(INVALID_VALUE),
        }
    }

    fn cuMemGetAllocationGranularity(granularity: *mut usize, prop: *const CUmemAllocationProp, option: c_uint) {
        let d = driver()?;
        ordinal(d, &load(prop)?)?;
        if option > 1 {
            return Err(INVALID_VALUE);
        }
        out(granularity, GRANULARITY as usize)
    }

    fn cuMemGetAllocationPropertiesFromHandle(prop: *mut CUmemAllocationProp, handle: CUmemGenericAllocationHandle) {
        let d = driver()?;
        let st = d.state.lock();
        let physical = st.memory.virt.physical(handle)?;
        out(prop, CUmemAllocationProp {
            kind: MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: physical.handle_types,
            location: CUmemLocation { kind: 1, id: physical.ordinal as c_int },
            win32HandleMetaData: core::ptr::null_mut(),
            allocFlags: [0; 8],
        })
    }

    fn cuMemRetainAllocationHandle(handle: *mut CUmemGenericAllocationHandle, addr: *mut c_void) {
        let d = driver()?;
        if handle.is_null() {
            return Err(INVALID_VALUE);
        }
        out(handle, virt::retain(d, &mut d.state.lock(), addr as u64)?)
    }
}
