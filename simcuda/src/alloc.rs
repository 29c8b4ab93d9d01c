//! Physical memory of the GPUs: who has how much of it, and how device allocations come and go.

use crate::driver::Driver;
use crate::errors::*;
use crate::memory::{Allocation, Kind, ALIGN};
use crate::state::State;
use crate::types::CUcontext;
use crate::vm::{punch, PAGE};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;

/// Bytes of all kinds that all living processes have of a GPU.
pub fn used(d: &Driver, gpu: usize) -> u64 {
    let alive = d
        .job
        .shared()
        .procs
        .iter()
        .filter(|p| p.pid.load(Relaxed) != 0);
    alive.map(|p| p.used[gpu].load(Relaxed)).sum()
}

/// Takes memory of a GPU, at an offset of this process's file that is a multiple of `align`. Where too little is
/// left, what memory pools keep unused goes first.
pub fn take(d: &Driver, st: &mut State, gpu: usize, size: u64, align: u64) -> Res<u64> {
    reclaim_zombies(d, st);
    match try_take(d, st, gpu, size, align) {
        Err(OUT_OF_MEMORY) if crate::pool::trim_gpu(d, st, gpu) => {
            try_take(d, st, gpu, size, align)
        }
        outcome => outcome,
    }
}

fn try_take(d: &Driver, st: &mut State, gpu: usize, size: u64, align: u64) -> Res<u64> {
    {
        // Under the node's lock, so that two processes do not both take the last bytes.
        let mut body = d.job.lock();
        if used(d, gpu).saturating_add(size) > d.topology.memory_bytes() {
            d.job.reap(&mut body);
        }
        if used(d, gpu).saturating_add(size) > d.topology.memory_bytes() {
            return Err(OUT_OF_MEMORY);
        }
        if !d.host_memory.backs(d, size) {
            return Err(OUT_OF_MEMORY);
        }
        d.job.me().used[gpu].fetch_add(size, Relaxed);
    }
    let offset = st.memory.take(gpu, size, align);
    if offset.is_err() {
        d.job.me().used[gpu].fetch_sub(size, Relaxed);
    }
    offset
}

/// Of each GPU a process keeps the pages of so many bytes, the lowest, which are taken first: programs that allocate and
/// free in turn spent most of their time in getting fresh ones.
const KEPT_BYTES: u64 = 128 << 20;

/// Returns what [`take`] gave.
pub fn give_back(d: &Driver, st: &mut State, offset: u64, size: u64, gpu: usize) {
    let start = gpu as u64 * crate::vm::stride(d.topology.memory_bytes());
    let kept = (start + KEPT_BYTES).saturating_sub(offset).min(size);
    punch(&d.job.memory, offset + kept, size - kept);
    st.memory.free[gpu].give(offset, size);
    d.job.me().used[gpu].fetch_sub(size, Relaxed);
}

/// Plain or managed memory in a context.
///
/// Managed memory counts in full on the context's GPU and cannot be larger than what is free there. The vendor's
/// driver counts the pages that are resident, and lets a program ask for more than a GPU has.
pub fn allocate(
    d: &Driver,
    st: &mut State,
    context: CUcontext,
    gpu: usize,
    bytes: usize,
    kind: Kind,
) -> Res<u64> {
    let bytes = bytes as u64;
    let (unit, size) = held(&kind, bytes).ok_or(OUT_OF_MEMORY)?;
    let offset = take(d, st, gpu, size, unit)?;
    if matches!(kind, Kind::Managed) && d.vm.expose(&d.job.memory, offset, size, true).is_err() {
        give_back(d, st, offset, size, gpu);
        return Err(OUT_OF_MEMORY);
    }
    let address = d.vm.base + offset;
    st.memory.forget_freed(address, size);
    let buffer = d.new_buffer();
    let allocation = Allocation {
        context,
        buffer,
        space: buffer,
        kind,
        ..Allocation::own(address, bytes, d.vm.shadow(offset), gpu, offset)
    };
    st.memory.device.insert(address, Arc::new(allocation));
    d.charge(d.topology.calls.alloc_us);
    d.active();
    Ok(address)
}

/// Alignment, and the bytes taken for so many asked for. Host code reaches whole pages.
fn held(kind: &Kind, bytes: u64) -> Option<(u64, u64)> {
    let unit = if matches!(kind, Kind::Managed) {
        PAGE
    } else {
        ALIGN
    };
    Some((unit, bytes.checked_next_multiple_of(unit)?))
}

/// Takes an allocation or mapping out of the process. The caller has seen to pending work.
pub fn release(d: &Driver, st: &mut State, address: u64) {
    let Some(a) = st.memory.device.remove(&address) else {
        return;
    };
    a.freed.store(true, Relaxed);
    st.memory.remember_freed(a.address, a.size);
    let row = a.export_row.load(Relaxed);
    if a.import.is_some() {
        crate::ipc::forget_mapping(d, row, a.buffer);
        return;
    }
    let size = held(&a.kind, a.size).map_or(a.size, |(_, size)| size);
    let running = {
        let (mut body, own) = (d.job.lock(), d.job.slot as u16);
        body.running_on(a.space, own).and_then(|_| {
            // Copies of a process end with it.
            d.job.reap(&mut body);
            body.running_on(a.space, own)
        })
    };
    if let Some(record) = running {
        let what = crate::checker::describe(&record);
        d.report.freed_in_use(&format!(
            "process {} frees {address:#x} while in use: {what}",
            std::process::id()
        ));
    }
    if row != u32::MAX && crate::ipc::retire(d, row) {
        st.memory
            .zombies
            .push((row, a.buffer, a.offset, size, a.gpu));
        return;
    }
    if matches!(a.kind, Kind::Managed) {
        if let Err(e) = d.vm.expose(&d.job.memory, a.offset, size, false) {
            crate::report::complain(&format!(
                "cannot take managed memory back from host code: {e}"
            ));
        }
    }
    give_back(d, st, a.offset, size, a.gpu);
}

/// Memory that was freed while others had it mapped goes back when the last of them has closed it.
pub fn reclaim_zombies(d: &Driver, st: &mut State) {
    if st.memory.zombies.is_empty() {
        return;
    }
    let mut over = Vec::new();
    {
        let mut body = d.job.lock();
        st.memory.zombies.retain(|z| {
            let export = &mut body.exports[z.0 as usize];
            let closed = !export.mapped();
            if closed {
                export.buffer = 0;
                over.push(*z);
            }
            !closed
        });
    }
    for (_, _, offset, size, gpu) in over {
        give_back(d, st, offset, size, gpu);
    }
}

/// Reports that memory goes while an operation of this process is still under way on it: calls that free without
/// waiting leave that to the program.
pub fn check_unused(d: &Driver, st: &State, a: &Allocation) {
    if !d.checking {
        return;
    }
    if let Some((kind, stream)) = st.sched.under_way_on(a.space) {
        d.report.freed_in_use(&format!(
            "process {} frees or unmaps {:#x} while in use: {kind} in stream {stream}",
            std::process::id(),
            a.address
        ));
    }
}
