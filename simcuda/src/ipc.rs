//! Memory and events between processes.

use crate::driver::Driver;
use crate::errors::*;
use crate::event::Event;
use crate::memory::{Allocation, Kind};
use crate::sched::OpState;
use crate::shared::MAX_HISTORY;
use crate::state::State;
use crate::types::{CUcontext, CUipcHandle};
use std::fs::{File, OpenOptions};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU32, Ordering::*};
use std::sync::Arc;

const MEMORY_MAGIC: u64 = 0x5349_4d4d_454d_0001;
/// In the file that stands for physical memory that can be mapped elsewhere.
const SHAREABLE_MAGIC: u64 = 0x5349_4d53_4841_0001;
const EVENT_MAGIC: u64 = 0x5349_4d45_5654_0001;

fn pack(words: [u64; 6]) -> CUipcHandle {
    let mut reserved = [0; 64];
    for (i, w) in words.iter().enumerate() {
        reserved[i * 8..i * 8 + 8].copy_from_slice(&w.to_le_bytes());
    }
    let sum = crate::topology::fnv1a(&reserved[..48]);
    reserved[48..56].copy_from_slice(&sum.to_le_bytes());
    CUipcHandle { reserved }
}

fn unpack(handle: &CUipcHandle, magic: u64) -> Res<[u64; 6]> {
    let word = |i: usize| {
        u64::from_le_bytes(
            handle.reserved[i * 8..i * 8 + 8]
                .try_into()
                .unwrap_or_default(),
        )
    };
    if word(0) != magic || word(6) != crate::topology::fnv1a(&handle.reserved[..48]) {
        return Err(INVALID_VALUE);
    }
    Ok([word(0), word(1), word(2), word(3), word(4), word(5)])
}

/// cuIpcGetMemHandle: the handle of the allocation that holds an address.
pub fn export(d: &Driver, a: &Allocation) -> Res<CUipcHandle> {
    // Managed, pool and mapped memory have no legacy handle.
    if a.import.is_some() || !matches!(a.kind, Kind::Plain) {
        return Err(INVALID_VALUE);
    }
    let row = list(d, &a.export_row, a.buffer, (a.offset, a.size), a.gpu)?;
    Ok(pack([
        MEMORY_MAGIC,
        d.job.uid,
        u64::from(row),
        a.buffer,
        a.offset,
        a.size,
    ]))
}

/// The row of memory of this process that others may open.
fn list(
    d: &Driver,
    export_row: &AtomicU32,
    buffer: u64,
    (offset, size): (u64, u64),
    gpu: usize,
) -> Res<u32> {
    let mut body = d.job.lock();
    let row = export_row.load(Relaxed);
    if row != u32::MAX {
        return Ok(row);
    }
    let high = body.exports_high as usize;
    let free = body.exports[..high]
        .iter()
        .position(|e| e.buffer == 0)
        .unwrap_or(high);
    let export = body.exports.get_mut(free).ok_or(OUT_OF_MEMORY)?;
    *export = crate::shared::Export {
        buffer,
        owner: d.job.uid,
        offset,
        size,
        gpu: gpu as u32,
        mappers: [0; crate::shared::MAX_PROCS],
        freed: false,
    };
    body.exports_high = body.exports_high.max(free as u32 + 1);
    export_row.store(free as u32, Relaxed);
    Ok(free as u32)
}

/// Counts one mapping more of a row.
fn note_mapping(d: &Driver, row: u64, buffer: u64) -> Res<crate::shared::Export> {
    let mut body = d.job.lock();
    let export = body.exports.get_mut(row as usize).ok_or(INVALID_HANDLE)?;
    if export.buffer != buffer || export.freed {
        return Err(INVALID_VALUE);
    }
    let mine = &mut export.mappers[d.job.slot];
    *mine = mine.checked_add(1).ok_or(MAP_FAILED)?;
    Ok(*export)
}

/// The owner of a row frees what it is about. Whether others have it mapped: then it goes back when they have
/// closed it.
pub fn retire(d: &Driver, row: u32) -> bool {
    let mut body = d.job.lock();
    let export = &mut body.exports[row as usize];
    export.freed = true;
    if !export.mapped() {
        export.buffer = 0;
    }
    export.buffer != 0
}

/// cuMemExportToShareableHandle: a file that other processes find the memory by.
pub fn export_shareable(
    d: &Driver,
    export_row: &AtomicU32,
    buffer: u64,
    place: (u64, u64),
    gpu: usize,
) -> Res<OwnedFd> {
    let row = list(d, export_row, buffer, place, gpu)?;
    let (offset, size) = place;
    let handle = pack([
        SHAREABLE_MAGIC,
        d.job.uid,
        u64::from(row),
        buffer,
        offset,
        size,
    ]);
    let file = crate::job::nameless_file(c"simcuda-handle").map_err(|_| OUT_OF_MEMORY)?;
    file.write_all_at(&handle.reserved, 0)
        .map_err(|_| OUT_OF_MEMORY)?;
    Ok(file.into())
}

/// What a file of [`export_shareable`] leads to.
pub enum Shareable {
    /// This process's own memory, by its identity.
    Own(u64),
    /// Another's.
    Other {
        /// The file that has its bytes.
        memory: OwnedFd,
        /// Its row.
        row: u32,
        /// Its place and identity.
        export: crate::shared::Export,
    },
}

/// cuMemImportFromShareableHandle. The file stays the caller's.
pub fn import_shareable(d: &Driver, file: BorrowedFd<'_>) -> Res<Shareable> {
    let file = File::from(file.try_clone_to_owned().map_err(|_| INVALID_VALUE)?);
    let mut handle = CUipcHandle { reserved: [0; 64] };
    file.read_exact_at(&mut handle.reserved, 0)
        .map_err(|_| INVALID_VALUE)?;
    let [_, owner, row, buffer, ..] = unpack(&handle, SHAREABLE_MAGIC)?;
    if owner == d.job.uid {
        return Ok(Shareable::Own(buffer));
    }
    let export = note_mapping(d, row, buffer)?;
    match owner_memory(d, owner) {
        Some(memory) => Ok(Shareable::Other {
            memory,
            row: row as u32,
            export,
        }),
        None => {
            forget_mapping(d, row as u32, buffer);
            Err(MAP_FAILED)
        }
    }
}

/// cuIpcOpenMemHandle in `context`. As driver 580 does it: what is open in the context is opened once more and lies where
/// it lay; in another context of the same device it cannot be opened. With `SIMCUDA_IPC_ONCE` neither.
pub fn open(d: &Driver, st: &mut State, handle: &CUipcHandle, context: CUcontext) -> Res<u64> {
    let [_, owner, row, buffer, ..] = unpack(handle, MEMORY_MAGIC)?;
    if owner == d.job.uid {
        return Err(INVALID_CONTEXT);
    }
    let device = st.devices.get(&context);
    let open_here = |a: &&Arc<Allocation>| {
        a.buffer == buffer && a.import.is_some() && st.devices.get(&a.context) == device
    };
    if let Some(a) = st.memory.device.values().find(open_here) {
        if d.ipc_once {
            return Err(ALREADY_MAPPED);
        }
        if a.context != context {
            return Err(INVALID_HANDLE);
        }
        a.opened.fetch_add(1, Relaxed);
        return Ok(a.address);
    }
    let export = note_mapping(d, row, buffer)?;
    let mapped = owner_memory(d, owner).ok_or(MAP_FAILED).and_then(|file| {
        d.vm.import(&file, export.offset, export.size)
            .map_err(|_| MAP_FAILED)
    });
    let import = match mapped {
        Ok(import) => import,
        Err(code) => {
            forget_mapping(d, row as u32, buffer);
            return Err(code);
        }
    };
    let (address, shadow) = (import.address, import.shadow());
    let allocation = Allocation {
        context,
        buffer,
        space: buffer,
        import: Some(import),
        opened: AtomicU32::new(1),
        export_row: AtomicU32::new(row as u32),
        ..Allocation::own(
            address,
            export.size,
            shadow,
            export.gpu as usize,
            export.offset,
        )
    };
    st.memory.device.insert(address, Arc::new(allocation));
    Ok(address)
}

fn owner_memory(d: &Driver, owner: u64) -> Option<OwnedFd> {
    let procs = &d.job.shared().procs;
    let p = procs
        .iter()
        .find(|p| p.uid.load(Relaxed) == owner && p.pid.load(Acquire) != 0)?;
    // Legacy handles are for processes that can see each other: in another pid namespace the number is another's.
    if !d.job.sees(p) {
        return None;
    }
    let path = format!(
        "/proc/{}/fd/{}",
        p.pid.load(Relaxed),
        p.memory_fd.load(Relaxed)
    );
    Some(
        OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .ok()?
            .into(),
    )
}

/// cuIpcCloseMemHandle, as often as it was opened but once: whether it stays open.
pub fn close_one_of_several(a: &Allocation) -> bool {
    let others = |opened: u32| (opened > 1).then(|| opened - 1);
    a.opened.fetch_update(Relaxed, Relaxed, others).is_ok()
}

/// Takes one mapping off an export; the row goes with the last one if its owner has freed it or died.
pub fn forget_mapping(d: &Driver, row: u32, buffer: u64) {
    let mut body = d.job.lock();
    let export = &mut body.exports[row as usize];
    if export.buffer != buffer {
        return;
    }
    export.mappers[d.job.slot] = export.mappers[d.job.slot].saturating_sub(1);
    let owner = export.owner;
    let alive = d
        .job
        .shared()
        .procs
        .iter()
        .any(|p| p.uid.load(Relaxed) == owner && p.pid.load(Relaxed) != 0);
    // A living owner gives the row back itself, together with the memory.
    if !export.mapped() && export.freed && !alive {
        export.buffer = 0;
    }
}

/// cuIpcGetEventHandle.
pub fn export_event(d: &Driver, event: &Event) -> Res<CUipcHandle> {
    let own = (*event.shared.lock()).filter(|_| !event.opened);
    let (row, id) = own.ok_or(INVALID_HANDLE)?;
    Ok(pack([EVENT_MAGIC, d.job.uid, row as u64, id, 0, 0]))
}

/// Gives an event a row in the node's table.
pub fn share_event(d: &Driver) -> Res<(usize, u64)> {
    let mut body = d.job.lock();
    let row = body
        .events
        .iter()
        .position(|e| e.id == 0)
        .ok_or(OUT_OF_MEMORY)?;
    body.next_uid += 1;
    let id = body.next_uid;
    let event = &mut body.events[row];
    event.id = id;
    event.recorded = 0;
    event.completed = 0;
    event.time = 0;
    event.known = 0;
    event.references = 1;
    event.history_len = 0;
    Ok((row, id))
}

/// cuIpcOpenEventHandle: row and identity.
pub fn open_event(d: &Driver, handle: &CUipcHandle) -> Res<(usize, u64)> {
    let [_, owner, row, id, ..] = unpack(handle, EVENT_MAGIC).map_err(|_| MAP_FAILED)?;
    if owner == d.job.uid {
        return Err(INVALID_CONTEXT);
    }
    let mut body = d.job.lock();
    let event = body
        .events
        .get_mut(row as usize)
        .filter(|e| e.id == id)
        .ok_or(INVALID_HANDLE)?;
    event.references += 1;
    Ok((row as usize, id))
}

/// A handle to a shared event is gone.
pub fn drop_event(d: &Driver, row: usize, id: u64) {
    let mut body = d.job.lock();
    let event = &mut body.events[row];
    if event.id == id {
        event.references = event.references.saturating_sub(1);
        if event.references == 0 {
            event.id = 0;
        }
    }
}

/// A record call: the number it gets, with the history that waiters inherit.
pub fn event_recorded(d: &Driver, row: usize, id: u64, history: &[(u64, u64)]) {
    let mut body = d.job.lock();
    let event = &mut body.events[row];
    if event.id != id {
        return;
    }
    event.recorded += 1;
    event.history_len = history.len() as u32;
    for (to, from) in event.history.iter_mut().zip(history) {
        *to = *from;
    }
}

/// The record of `state` has completed.
pub fn event_completed(d: &Driver, row: usize, id: u64, state: &OpState, end: u64) {
    let mut body = d.job.lock();
    let event = &mut body.events[row];
    if event.id != id {
        return;
    }
    event.completed += 1;
    event.time = end;
    event.known = event.known.max(state.known.load(Relaxed));
    if event.history.len() < event.history_len as usize {
        // Waiters cannot inherit a history this long. Count the completion as seen by a host instead:
        // that orders at least as much, so nothing is reported wrongly.
        drop(body);
        let at = d.job.shared().observations.fetch_add(1, SeqCst) + 1;
        let mut body = d.job.lock();
        body.observe(&state.history, at);
        let event = &mut body.events[row];
        event.known = event.known.max(at);
    }
}

/// Time and knowledge of a record, once it has completed.
pub fn event_reached(d: &Driver, row: usize, id: u64, number: u64) -> Option<(u64, u64)> {
    let body = d.job.lock();
    let event = &body.events[row];
    (event.id != id || event.completed >= number).then_some((event.time, event.known))
}

/// Number of the last record, and what waiting for it orders after.
pub fn event_now(d: &Driver, row: usize, id: u64) -> Option<(u64, Vec<(u64, u64)>)> {
    let body = d.job.lock();
    let event = &body.events[row];
    if event.id != id || event.recorded == 0 {
        return None;
    }
    let len = (event.history_len as usize).min(MAX_HISTORY);
    Some((event.recorded, event.history[..len].to_vec()))
}
