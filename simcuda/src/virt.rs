//! Virtual memory management: reservations of addresses, physical memory, and mappings of the one into the other.
//!
//! A reservation has a place of its own where copies find its bytes, of the same shape: neighbouring mappings are
//! neighbours there too, so that a copy across their seam is one run of bytes.

use crate::alloc::{check_unused, give_back, take};
use crate::driver::Driver;
use crate::errors::*;
use crate::ipc::Shareable;
use crate::memory::{Allocation, Kind};
use crate::state::State;
use crate::types::{CUdevice, CUmemAccessDesc};
use crate::vm::{Span, PAGE};
use parking_lot::Mutex;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::sync::Arc;

/// Minimum and recommended granularity: the page of recent GPUs.
pub const GRANULARITY: u64 = 2 << 20;
/// CU_MEM_ACCESS_FLAGS_PROT_READWRITE.
pub const READ_WRITE: u32 = 3;

/// What cuMemCreate made.
pub struct Physical {
    /// Handle.
    pub handle: u64,
    /// Bytes.
    pub size: u64,
    /// Ordinal of its device.
    pub ordinal: usize,
    /// CUmemAllocationHandleType of what it can be exported as.
    pub handle_types: u32,
    home: Home,
    offset: u64,
    gpu: usize,
    /// The checker's name for these bytes, wherever they are mapped.
    space: u64,
}

/// Where the bytes are.
enum Home {
    /// In this process's memory, and in this row of the job's once it was exported.
    Own(AtomicU32),
    /// In another process's, found by this row.
    Imported(OwnedFd, u32),
}

/// CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR.
pub const FILE_DESCRIPTOR: u32 = 1;

/// Physical memory at an address.
pub struct Mapped {
    span: Arc<Span>,
    physical: Arc<Physical>,
    access: Mutex<BTreeMap<CUdevice, u32>>,
}

impl Mapped {
    /// True when some device may access it.
    pub fn accessible(&self) -> bool {
        self.access.lock().values().any(|flags| *flags != 0)
    }

    /// Address and size of the reservation.
    pub fn reservation(&self) -> (u64, u64) {
        (self.span.address, self.span.size)
    }

    /// What its memory can be exported as.
    pub fn handle_types(&self) -> u32 {
        self.physical.handle_types
    }

    /// CUmemAccess_flags of a device.
    pub fn access_of(&self, device: CUdevice) -> u32 {
        self.access.lock().get(&device).copied().unwrap_or(0)
    }
}

struct Known {
    physical: Arc<Physical>,
    /// cuMemCreate and cuMemRetainAllocationHandle, less cuMemRelease.
    references: u32,
    mappings: u32,
}

/// Reservations and physical memory of this process.
#[derive(Default)]
pub struct Virtual {
    spans: BTreeMap<u64, Arc<Span>>,
    known: HashMap<u64, Known>,
}

impl Virtual {
    fn span_at(&self, address: u64) -> Option<&Arc<Span>> {
        let (_, span) = self.spans.range(..=address).next_back()?;
        span.contains(address).then_some(span)
    }

    /// True for an address in a reservation.
    pub fn reserved(&self, address: u64) -> bool {
        self.span_at(address).is_some()
    }

    /// Physical memory by a handle that was not released.
    pub fn physical(&self, handle: u64) -> Res<&Arc<Physical>> {
        let known = self.known.get(&handle).filter(|k| k.references > 0);
        known.map(|k| &k.physical).ok_or(INVALID_VALUE)
    }
}

/// cuMemAddressReserve.
///
/// A size that is no multiple of the granularity is refused; the reference leaves open whether the vendor's driver
/// is content with the host's page.
pub fn reserve(d: &Driver, st: &mut State, size: u64, align: u64, hint: u64) -> Res<u64> {
    if size == 0 || size % GRANULARITY != 0 || (align != 0 && !align.is_power_of_two()) {
        return Err(INVALID_VALUE);
    }
    let align = align.max(GRANULARITY);
    let span = d.vm.reserve(size, align, hint).map_err(|_| OUT_OF_MEMORY)?;
    let address = span.address;
    st.memory.forget_freed(address, size);
    st.memory.virt.spans.insert(address, Arc::new(span));
    Ok(address)
}

/// cuMemAddressFree: the whole reservation, nothing mapped in it.
///
/// What the vendor's driver says of a reservation with mappings is not documented; here it is an invalid value.
pub fn unreserve(st: &mut State, address: u64, size: u64) -> Res {
    let span = st.memory.virt.spans.get(&address).ok_or(INVALID_VALUE)?;
    if span.size != size
        || st
            .memory
            .device
            .range(address..address + size)
            .next()
            .is_some()
    {
        return Err(INVALID_VALUE);
    }
    st.memory.virt.spans.remove(&address);
    Ok(())
}

/// cuMemCreate.
pub fn create(
    d: &Driver,
    st: &mut State,
    ordinal: usize,
    size: u64,
    handle_types: u32,
) -> Res<u64> {
    if size == 0 || size % GRANULARITY != 0 {
        return Err(INVALID_VALUE);
    }
    let gpu = d.visible[ordinal];
    let offset = take(d, st, gpu, size, PAGE)?;
    let handle = know(st, |handle| Physical {
        handle,
        size,
        ordinal,
        handle_types,
        home: Home::Own(AtomicU32::new(u32::MAX)),
        offset,
        gpu,
        space: d.new_buffer(),
    });
    d.charge(d.topology.calls.alloc_us);
    d.active();
    Ok(handle)
}

/// A handle of what `make` makes, with one reference.
fn know(st: &mut State, make: impl FnOnce(u64) -> Physical) -> u64 {
    let handle = st.handle() as u64;
    let known = Known {
        physical: Arc::new(make(handle)),
        references: 1,
        mappings: 0,
    };
    st.memory.virt.known.insert(handle, known);
    handle
}

/// cuMemExportToShareableHandle, as a file. Another process's memory is not exported again.
pub fn export(d: &Driver, st: &State, handle: u64) -> Res<OwnedFd> {
    let p = st.memory.virt.physical(handle)?;
    match &p.home {
        Home::Own(row) if p.handle_types & FILE_DESCRIPTOR != 0 => {
            crate::ipc::export_shareable(d, row, p.space, (p.offset, p.size), p.gpu)
        }
        Home::Own(_) => Err(INVALID_VALUE),
        Home::Imported(..) => Err(NOT_SUPPORTED),
    }
}

/// cuMemImportFromShareableHandle, of a file. Memory whose owner has released it is not found any more,
/// though the vendor's driver keeps it as long as the file is open; once imported it stays.
pub fn import(d: &Driver, st: &mut State, file: BorrowedFd<'_>) -> Res<u64> {
    match crate::ipc::import_shareable(d, file)? {
        Shareable::Own(space) => {
            let mut known = st.memory.virt.known.values_mut();
            let known = known.find(|known| known.physical.space == space && known.references > 0);
            let known = known.ok_or(INVALID_VALUE)?;
            known.references += 1;
            Ok(known.physical.handle)
        }
        Shareable::Other {
            memory,
            row,
            export,
        } => {
            let gpu = export.gpu as usize;
            Ok(know(st, |handle| Physical {
                handle,
                size: export.size,
                ordinal: d.ordinal(gpu).unwrap_or(0),
                handle_types: FILE_DESCRIPTOR,
                home: Home::Imported(memory, row),
                offset: export.offset,
                gpu,
                space: export.buffer,
            }))
        }
    }
}

/// cuMemRelease.
pub fn release(d: &Driver, st: &mut State, handle: u64) -> Res {
    st.memory.virt.physical(handle)?;
    change(d, st, handle, |known| known.references -= 1);
    Ok(())
}

/// Memory without references and mappings goes back to its GPU.
fn change(d: &Driver, st: &mut State, handle: u64, by: impl FnOnce(&mut Known)) {
    let Some(known) = st.memory.virt.known.get_mut(&handle) else {
        return;
    };
    by(known);
    if known.references == 0 && known.mappings == 0 {
        let p = known.physical.clone();
        st.memory.virt.known.remove(&handle);
        let row = match &p.home {
            Home::Imported(_, row) => return crate::ipc::forget_mapping(d, *row, p.space),
            Home::Own(row) => row.load(Relaxed),
        };
        if row != u32::MAX && crate::ipc::retire(d, row) {
            let zombie = (row, p.space, p.offset, p.size, p.gpu);
            st.memory.zombies.push(zombie);
        } else {
            give_back(d, st, p.offset, p.size, p.gpu);
        }
    }
}

/// cuMemMap. All of the range must lie in one reservation and be free.
pub fn map(d: &Driver, st: &mut State, address: u64, size: u64, handle: u64) -> Res {
    if size == 0 || address % GRANULARITY != 0 || size % GRANULARITY != 0 {
        return Err(INVALID_VALUE);
    }
    let physical = st.memory.virt.physical(handle)?.clone();
    let span = st
        .memory
        .virt
        .span_at(address)
        .ok_or(INVALID_VALUE)?
        .clone();
    if size < physical.size {
        // "Mapping a part of the physical memory is not supported."
        return Err(NOT_SUPPORTED);
    }
    if size > physical.size || size > span.address + span.size - address {
        return Err(INVALID_VALUE);
    }
    let behind = st.memory.device.range(address..address + size).next();
    if behind.is_some() || st.memory.device_at(address).is_some() {
        return Err(INVALID_VALUE);
    }
    let file = match &physical.home {
        Home::Own(_) => &d.job.memory,
        Home::Imported(file, _) => file,
    };
    span.map(address, size, file, physical.offset)
        .map_err(|_| OUT_OF_MEMORY)?;
    let (shadow, gpu, offset) = (span.shadow(address), physical.gpu, physical.offset);
    st.memory.forget_freed(address, size);
    let allocation = Allocation {
        buffer: d.new_buffer(),
        space: physical.space,
        kind: Kind::Mapped(Mapped {
            span,
            physical,
            access: Mutex::default(),
        }),
        ..Allocation::own(address, size, shadow, gpu, offset)
    };
    st.memory.device.insert(address, Arc::new(allocation));
    change(d, st, handle, |known| known.mappings += 1);
    Ok(())
}

/// The mappings that make up a range exactly, in order.
fn mappings(st: &State, address: u64, size: u64) -> Res<Vec<Arc<Allocation>>> {
    let end = address.checked_add(size).ok_or(INVALID_VALUE)?;
    let (mut next, mut found) = (address, Vec::new());
    while next < end {
        let a = st.memory.device.get(&next).ok_or(INVALID_VALUE)?;
        if !matches!(a.kind, Kind::Mapped(_)) {
            return Err(INVALID_VALUE);
        }
        next += a.size;
        found.push(a.clone());
    }
    if next != end || found.is_empty() {
        return Err(INVALID_VALUE);
    }
    Ok(found)
}

/// cuMemUnmap: whole mappings. It waits for nothing, so work that is under way on them is reported.
pub fn unmap(d: &Driver, st: &mut State, address: u64, size: u64) -> Res {
    let is_empty = || {
        st.memory
            .device
            .range(address..address + size)
            .next()
            .is_none()
    };
    let reserved = st.memory.virt.span_at(address);
    if reserved.is_some_and(|span| size > 0 && size <= span.address + span.size - address)
        && st.memory.device_at(address).is_none()
        && is_empty()
    {
        return Ok(());
    }
    for a in mappings(st, address, size)? {
        let Kind::Mapped(m) = &a.kind else { continue };
        check_unused(d, st, &a);
        m.span.unmap(a.address, a.size).map_err(|_| UNMAP_FAILED)?;
        st.memory.device.remove(&a.address);
        a.freed.store(true, Relaxed);
        st.memory.remember_freed(a.address, a.size);
        change(d, st, m.physical.handle, |known| known.mappings -= 1);
    }
    Ok(())
}

/// cuMemSetAccess: on whole mappings.
pub fn set_access(
    d: &Driver,
    st: &State,
    address: u64,
    size: u64,
    wanted: &[CUmemAccessDesc],
) -> Res {
    let found = mappings(st, address, size)?;
    for w in wanted {
        accessor(d, w.location.kind, w.location.id)?;
        if ![0, 1, READ_WRITE].contains(&w.flags) {
            return Err(INVALID_VALUE);
        }
    }
    for a in found {
        if let Kind::Mapped(m) = &a.kind {
            let mut access = m.access.lock();
            access.extend(wanted.iter().map(|w| (w.location.id, w.flags)));
        }
    }
    Ok(())
}

/// Ordinal of a CUmemLocation, which must be a device: physical memory of the host is not simulated.
pub fn device(d: &Driver, kind: u32, id: CUdevice) -> Res<usize> {
    match kind {
        1 => {
            let ordinal = usize::try_from(id).ok().filter(|i| *i < d.visible.len());
            ordinal.ok_or(INVALID_DEVICE)
        }
        2..=4 => Err(NOT_SUPPORTED),
        _ => Err(INVALID_VALUE),
    }
}

/// As [`device`], for who may access memory: there a device that does not exist is one invalid value among others.
pub fn accessor(d: &Driver, kind: u32, id: CUdevice) -> Res<usize> {
    device(d, kind, id).map_err(|code| match code {
        INVALID_DEVICE => INVALID_VALUE,
        code => code,
    })
}

/// The mapping that holds an address.
pub fn at(st: &State, address: u64) -> Res<Arc<Allocation>> {
    let a = st.memory.device_at(address).ok_or(INVALID_VALUE)?;
    match a.kind {
        Kind::Mapped(_) => Ok(a.clone()),
        _ => Err(INVALID_VALUE),
    }
}

/// cuMemRetainAllocationHandle: the handle that was mapped, with one reference more.
pub fn retain(d: &Driver, st: &mut State, address: u64) -> Res<u64> {
    let a = at(st, address)?;
    let Kind::Mapped(m) = &a.kind else {
        return Err(INVALID_VALUE);
    };
    change(d, st, m.physical.handle, |known| known.references += 1);
    Ok(m.physical.handle)
}
