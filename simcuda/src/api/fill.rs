//! Memsets.

use crate::driver::driver;
use crate::errors::*;
use crate::memory::{Kind, Place};
use crate::ops::{finish, issue, resolve, Mode};
use crate::types::*;
use crate::work::{Copy, Fill, Work};

fn fill(
    dst: u64,
    pitch: usize,
    element: usize,
    value: u32,
    width: usize,
    height: usize,
    stream: CUstream,
    mode: Mode,
) -> Res {
    let d = driver()?;
    let mut st = d.state.lock();
    st.context()?;
    if width == 0 || height == 0 {
        return Ok(());
    }
    if dst % element as u64 != 0
        || (height > 1 && (pitch < width * element || pitch % element != 0))
    {
        return Err(INVALID_VALUE);
    }
    let span = Copy::span(width * element, height, pitch);
    let dst = resolve(d, &st, dst, span)?;
    let host = dst.gpu().is_none();
    // What belongs to another context's device is reached with peer access only.
    let own = st.stream_handle(d, stream)?;
    let own = st.streams.get(&own).ok_or(INVALID_HANDLE)?;
    if let Place::Device(a, _) = &dst {
        let other = a.gpu != own.gpu && a.import.is_none() && matches!(a.kind, Kind::Plain);
        let peers = st.contexts.get(&own.context).map(|c| &c.peers);
        if other && !peers.is_some_and(|peers| peers.contains(&a.context)) {
            return Err(INVALID_VALUE);
        }
    }
    if matches!(dst, Place::Pageable(_)) {
        return Err(INVALID_VALUE);
    }
    // Into device memory it returns early unless the buffer asks otherwise.
    let drained = matches!(&dst, Place::Device(a, _) if a.drains());
    let work = Work::Fill(Fill {
        dst,
        element,
        value,
        width,
        height,
        pitch,
    });
    let op = issue(d, &mut st, stream, work, d.topology.calls.async_us)?;
    drop(st);
    match op {
        Some(op) if mode == Mode::Sync && (host || drained) => finish(d, &[op]),
        _ => Ok(()),
    }
}

driver! {
    fn cuMemsetD8_v2(dst: CUdeviceptr, value: u8, n: usize) {
        fill(dst, n, 1, u32::from(value), n, 1, 0, Mode::Sync)
    }

    fn cuMemsetD16_v2(dst: CUdeviceptr, value: u16, n: usize) {
        fill(dst, n * 2, 2, u32::from(value), n, 1, 0, Mode::Sync)
    }

    fn cuMemsetD32_v2(dst: CUdeviceptr, value: u32, n: usize) {
        fill(dst, n * 4, 4, value, n, 1, 0, Mode::Sync)
    }

    fn cuMemsetD8Async(dst: CUdeviceptr, value: u8, n: usize, stream: CUstream) {
        fill(dst, n, 1, u32::from(value), n, 1, stream, Mode::Async)
    }

    fn cuMemsetD16Async(dst: CUdeviceptr, value: u16, n: usize, stream: CUstream) {
        fill(dst, n * 2, 2, u32::from(value), n, 1, stream, Mode::Async)
    }

    fn cuMemsetD32Async(dst: CUdeviceptr, value: u32, n: usize, stream: CUstream) {
        fill(dst, n * 4, 4, value, n, 1, stream, Mode::Async)
    }

    fn cuMemsetD2D8_v2(dst: CUdeviceptr, pitch: usize, value: u8, width: usize, height: usize) {
        fill(dst, pitch, 1, u32::from(value), width, height, 0, Mode::Sync)
    }

    fn cuMemsetD2D16_v2(dst: CUdeviceptr, pitch: usize, value: u16, width: usize, height: usize) {
        fill(dst, pitch, 2, u32::from(value), width, height, 0, Mode::Sync)
    }

    fn cuMemsetD2D32_v2(dst: CUdeviceptr, pitch: usize, value: u32, width: usize, height: usize) {
        fill(dst, pitch, 4, value, width, height, 0, Mode::Sync)
    }

    fn cuMemsetD2D8Async(dst: CUdeviceptr, pitch: usize, value: u8, width: usize, height: usize, stream: CUstream) {
        fill(dst, pitch, 1, u32::from(value), width, height, stream, Mode::Async)
    }

    fn cuMemsetD2D16Async(dst: CUdeviceptr, pitch: usize, value: u16, width: usize, height: usize, stream: CUstream) {
        fill(dst, pitch, 2, u32::from(value), width, height, stream, Mode::Async)
    }

    fn cuMemsetD2D32Async(dst: CUdeviceptr, pitch: usize, value: u32, width: usize, height: usize, stream: CUstream) {
        fill(dst, pitch, 4, value, width, height, stream, Mode::Async)
    }
}
