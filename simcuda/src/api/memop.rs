//! Stream memory operations.

use super::array;
use crate::driver::{driver, Driver};
use crate::errors::*;
use crate::memory::Place;
use crate::ops::{issue, resolve};
use crate::state::State;
use crate::types::*;
use crate::work::{MemOp, Work};
use core::ffi::c_uint;

/// Operations one call may carry; the driver's limit.
const BATCH_MAX: u32 = 256;

fn operation(
    d: &Driver,
    st: &State,
    bytes: usize,
    address: u64,
    value: u64,
    wait: Option<u32>,
) -> Res<MemOp> {
    // GEQ, EQ, AND, NOR, and CU_STREAM_WAIT_VALUE_FLUSH.
    let known = wait.is_none_or(|flags| flags & !(3 | 1 << 30) == 0);
    if address % bytes as u64 != 0 || !known {
        return Err(INVALID_VALUE);
    }
    let place = resolve(d, st, address, bytes as u64)?;
    if matches!(place, Place::Pageable(_)) {
        return Err(INVALID_VALUE);
    }
    Ok(MemOp {
        place,
        bytes,
        value,
        wait,
    })
}

/// A single write has no flags here: writes without a barrier before them are refused.
fn plain_write(flags: c_uint) -> Res {
    if flags == 0 {
        return Ok(());
    }
    Err(INVALID_VALUE)
}

/// The operations of a batch.
pub(crate) fn operations(
    d: &Driver,
    st: &State,
    params: &[CUstreamBatchMemOpParams],
) -> Res<Vec<MemOp>> {
    let mut ops = Vec::new();
    for p in params {
        match p.operation {
            MEM_OP_WAIT_32 => ops.push(operation(
                d,
                st,
                4,
                p.address,
                p.value & 0xffff_ffff,
                Some(p.flags),
            )?),
            MEM_OP_WAIT_64 => ops.push(operation(d, st, 8, p.address, p.value, Some(p.flags))?),
            MEM_OP_WRITE_32 => {
                ops.push(operation(d, st, 4, p.address, p.value & 0xffff_ffff, None)?)
            }
            MEM_OP_WRITE_64 => ops.push(operation(d, st, 8, p.address, p.value, None)?),
            // Flushes and barriers order what is ordered here anyway.
            MEM_OP_FLUSH | MEM_OP_BARRIER => {}
            _ => return Err(INVALID_VALUE),
        }
    }
    Ok(ops)
}

fn single(stream: CUstream, bytes: usize, address: u64, value: u64, wait: Option<u32>) -> Res {
    let d = driver()?;
    let mut st = d.state.lock();
    st.context()?;
    let op = operation(d, &st, bytes, address, value, wait)?;
    issue(
        d,
        &mut st,
        stream,
        Work::MemOps(vec![op]),
        d.topology.calls.event_us,
    )?;
    Ok(())
}

unsafe fn batch(stream: CUstream, count: c_uint, params: *mut CUstreamBatchMemOpParams) -> Res {
    let d = driver()?;
    if count > BATCH_MAX {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller's array.
    let params = unsafe { array(params, count as usize)? };
    let mut st = d.state.lock();
    st.context()?;
    // Each wait is an operation of its own, so that the writes before it are seen first.
    for op in operations(d, &st, &params)? {
        issue(
            d,
            &mut st,
            stream,
            Work::MemOps(vec![op]),
            d.topology.calls.event_us / f64::from(count.max(1)),
        )?;
    }
    Ok(())
}

driver! {
    fn cuStreamWriteValue32_v2(stream: CUstream, address: CUdeviceptr, value: u32, flags: c_uint) {
        plain_write(flags)?;
        single(stream, 4, address, u64::from(value), None)
    }

    fn cuStreamWriteValue64_v2(stream: CUstream, address: CUdeviceptr, value: u64, flags: c_uint) {
        plain_write(flags)?;
        single(stream, 8, address, value, None)
    }

    fn cuStreamWaitValue32_v2(stream: CUstream, address: CUdeviceptr, value: u32, flags: c_uint) {
        single(stream, 4, address, u64::from(value), Some(flags))
    }

    fn cuStreamWaitValue64_v2(stream: CUstream, address: CUdeviceptr, value: u64, flags: c_uint) {
        single(stream, 8, address, value, Some(flags))
    }

    fn cuStreamBatchMemOp_v2(stream: CUstream, count: c_uint, params: *mut CUstreamBatchMemOpParams, _flags: c_uint) {
        batch(stream, count, params)
    }
}
