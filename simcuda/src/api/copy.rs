//! Copies.

use super::{array, load, maybe};
use crate::driver::{driver, Driver};
use crate::errors::*;
use crate::ops::{by_route, copy, enter_only, kick, linear, resolve, Mode};
use crate::state::State;
use crate::types::*;
use crate::work::{Copy, Work};
use core::ffi::c_void;

fn one(dst: u64, src: u64, bytes: usize, stream: CUstream, mode: Mode) -> Res {
    let d = driver()?;
    if bytes == 0 {
        d.state.lock().context()?;
        return Ok(());
    }
    let c = {
        let st = d.state.lock();
        st.context()?;
        linear(d, &st, dst, src, bytes)?
    };
    copy(d, vec![c], stream, mode)
}

/// Both ends must be device memory.
fn device(address: u64, bytes: usize) -> Res {
    let d = driver()?;
    let st = d.state.lock();
    // Mapped host memory is device memory too under unified addressing.
    if bytes > 0 && st.memory.device_at(address).is_none() && st.memory.host_at(address).is_none() {
        resolve(d, &st, address, bytes as u64)?;
        return Err(INVALID_VALUE);
    }
    Ok(())
}

/// Both ends of a copy of planes, as linear rows; planes that are not dense become copies of their own.
pub(crate) fn volume(d: &Driver, st: &State, c: &CUDA_MEMCPY3D) -> Res<Vec<Copy>> {
    if c.WidthInBytes == 0 || c.Height == 0 || c.Depth == 0 {
        return Ok(Vec::new());
    }
    let end = |kind: u32, host: u64, dev: u64| match kind {
        MEMORYTYPE_HOST => Ok(host),
        MEMORYTYPE_DEVICE | MEMORYTYPE_UNIFIED => Ok(dev),
        MEMORYTYPE_ARRAY => Err(NOT_SUPPORTED),
        _ => Err(INVALID_VALUE),
    };
    let src = end(c.srcMemoryType, c.srcHost as u64, c.srcDevice)?;
    let dst = end(c.dstMemoryType, c.dstHost as u64, c.dstDevice)?;
    let pitch = |p: usize| if p == 0 { c.WidthInBytes } else { p };
    let (sp, dp) = (pitch(c.srcPitch), pitch(c.dstPitch));
    if (sp < c.WidthInBytes || dp < c.WidthInBytes) && (c.Height > 1 || c.Depth > 1) {
        return Err(INVALID_VALUE);
    }
    let height = |h: usize| if h == 0 { c.Height } else { h };
    let (sh, dh) = (height(c.srcHeight), height(c.dstHeight));
    if c.Depth > 1 && (sh < c.srcY + c.Height || dh < c.dstY + c.Height) {
        return Err(INVALID_VALUE);
    }
    let first = |base: u64, x: usize, y: usize, z: usize, p: usize, h: usize| {
        base + (x + (z * h + y) * p) as u64
    };
    let (src, dst) = (
        first(src, c.srcXInBytes, c.srcY, c.srcZ, sp, sh),
        first(dst, c.dstXInBytes, c.dstY, c.dstZ, dp, dh),
    );
    let dense = sh == c.Height && dh == c.Height;
    let (rows, planes) = if dense {
        (c.Height * c.Depth, 1)
    } else {
        (c.Height, c.Depth)
    };
    let mut copies = Vec::new();
    for z in 0..planes {
        let (from, to) = (src + (z * sh * sp) as u64, dst + (z * dh * dp) as u64);
        let flat = rows == 1 || (sp == c.WidthInBytes && dp == c.WidthInBytes);
        let (width, height) = if flat {
            (c.WidthInBytes * rows, 1)
        } else {
            (c.WidthInBytes, rows)
        };
        copies.push(Copy {
            dst: resolve(d, st, to, Copy::span(width, height, dp))?,
            src: resolve(d, st, from, Copy::span(width, height, sp))?,
            width,
            height,
            dst_pitch: dp,
            src_pitch: sp,
            staged: None,
            flip: None,
            is_behind: false,
        });
    }
    Ok(copies)
}

fn flat(c: &CUDA_MEMCPY2D) -> CUDA_MEMCPY3D {
    CUDA_MEMCPY3D {
        srcXInBytes: c.srcXInBytes,
        srcY: c.srcY,
        srcZ: 0,
        srcLOD: 0,
        srcMemoryType: c.srcMemoryType,
        srcHost: c.srcHost,
        srcDevice: c.srcDevice,
        srcArray: c.srcArray,
        reserved0: core::ptr::null_mut(),
        srcPitch: c.srcPitch,
        srcHeight: 0,
        dstXInBytes: c.dstXInBytes,
        dstY: c.dstY,
        dstZ: 0,
        dstLOD: 0,
        dstMemoryType: c.dstMemoryType,
        dstHost: c.dstHost,
        dstDevice: c.dstDevice,
        dstArray: c.dstArray,
        reserved1: core::ptr::null_mut(),
        dstPitch: c.dstPitch,
        dstHeight: 0,
        WidthInBytes: c.WidthInBytes,
        Height: c.Height,
        Depth: 1,
    }
}

fn planes(c: &CUDA_MEMCPY3D, stream: CUstream, mode: Mode) -> Res {
    let d = driver()?;
    let copies = {
        let st = d.state.lock();
        st.context()?;
        volume(d, &st, c)?
    };
    copy(d, copies, stream, mode)
}

/// Copies without an order among them: one operation a route, side by side, joined at the end.
fn batch(
    dsts: Vec<u64>,
    srcs: Vec<u64>,
    sizes: Vec<usize>,
    during_call: bool,
    fail: *mut usize,
    stream: CUstream,
) -> Res {
    let d = driver()?;
    // SAFETY: the caller's pointer or null.
    unsafe { maybe(fail, usize::MAX) };
    if stream == 0 || stream == STREAM_LEGACY {
        return Err(INVALID_VALUE);
    }
    let mut st = d.state.lock();
    st.context()?;
    let mut copies = Vec::with_capacity(sizes.len());
    for (i, ((dst, src), bytes)) in dsts.iter().zip(&srcs).zip(&sizes).enumerate() {
        if *bytes == 0 {
            // SAFETY: as above.
            unsafe { maybe(fail, i) };
            return Err(INVALID_VALUE);
        }
        match linear(d, &st, *dst, *src, *bytes) {
            Ok(c) => copies.push(c),
            Err(code) => {
                // SAFETY: as above.
                unsafe { maybe(fail, i) };
                return Err(code);
            }
        }
    }
    let stream = st.stream_handle(d, stream)?;
    if crate::capture::capturing(&st, stream)?
        || copies
            .iter()
            .any(|c| matches!(c.dst, crate::memory::Place::Pageable(_)))
    {
        drop(st);
        return copy(d, copies, stream, Mode::Async);
    }
    for c in copies
        .iter_mut()
        .filter(|c| during_call && matches!(c.src, crate::memory::Place::Pageable(_)))
    {
        c.staged = Some(std::sync::Arc::new(crate::ops::stage(c)));
    }
    let before = st.stream_deps(stream);
    let mut parts = Vec::new();
    for (i, group) in by_route(d, &st, stream, copies).into_iter().enumerate() {
        let cost = if i == 0 {
            d.topology.calls.async_us
        } else {
            0.0
        };
        parts.push(branch(
            d,
            &mut st,
            stream,
            Work::Copy(group),
            cost,
            &before,
        )?);
    }
    enter_only(d, &mut st, stream, Work::Empty, 0.0, &parts, &[])?;
    kick(d, &mut st);
    Ok(())
}

/// An operation beside the stream's own order: it has an identity of its own for the checker.
fn branch(
    d: &'static Driver,
    st: &mut parking_lot::MutexGuard<'_, State>,
    stream: CUstream,
    work: Work,
    cost: f64,
    deps: &[std::sync::Arc<crate::sched::OpState>],
) -> Res<std::sync::Arc<crate::sched::OpState>> {
    let issued = d.charge(cost);
    let gpu = st.streams.get(&stream).ok_or(INVALID_HANDLE)?.gpu;
    let position = crate::sched::Position {
        stream: d.new_stream_uid(),
        index: 1,
        gpu,
        queue: crate::ops::queue(d, st, stream, &work),
    };
    Ok(st
        .sched
        .add(issued, d.observations(), work, position, deps, &[]))
}

driver! {
    fn cuMemcpy(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize) {
        one(dst, src, bytes, 0, Mode::Sync)
    }

    fn cuMemcpyAsync(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream) {
        one(dst, src, bytes, stream, Mode::Async)
    }

    fn cuMemcpyHtoD_v2(dst: CUdeviceptr, src: *const c_void, bytes: usize) {
        device(dst, bytes)?;
        one(dst, src as u64, bytes, 0, Mode::Sync)
    }

    fn cuMemcpyHtoDAsync_v2(dst: CUdeviceptr, src: *const c_void, bytes: usize, stream: CUstream) {
        device(dst, bytes)?;
        one(dst, src as u64, bytes, stream, Mode::Async)
    }

    fn cuMemcpyDtoH_v2(dst: *mut c_void, src: CUdeviceptr, bytes: usize) {
        device(src, bytes)?;
        one(dst as u64, src, bytes, 0, Mode::Sync)
    }

    fn cuMemcpyDtoHAsync_v2(dst: *mut c_void, src: CUdeviceptr, bytes: usize, stream: CUstream) {
        device(src, bytes)?;
        one(dst as u64, src, bytes, stream, Mode::Async)
    }

    fn cuMemcpyDtoD_v2(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize) {
        device(dst, bytes)?;
        device(src, bytes)?;
        one(dst, src, bytes, 0, Mode::Sync)
    }

    fn cuMemcpyDtoDAsync_v2(dst: CUdeviceptr, src: CUdeviceptr, bytes: usize, stream: CUstream) {
        device(dst, bytes)?;
        device(src, bytes)?;
        one(dst, src, bytes, stream, Mode::Async)
    }

    fn cuMemcpyPeer(dst: CUdeviceptr, dst_context: CUcontext, src: CUdeviceptr, src_context: CUcontext, bytes: usize) {
        peers(dst_context, src_context)?;
        one(dst, src, bytes, 0, Mode::Sync)
    }

    fn cuMemcpyPeerAsync(dst: CUdeviceptr, dst_context: CUcontext, src: CUdeviceptr, src_context: CUcontext, bytes: usize, stream: CUstream) {
        peers(dst_context, src_context)?;
        one(dst, src, bytes, stream, Mode::Async)
    }

    fn cuMemcpy2D_v2(copy: *const CUDA_MEMCPY2D) {
        planes(&flat(&load(copy)?), 0, Mode::Sync)
    }

    fn cuMemcpy2DUnaligned_v2(copy: *const CUDA_MEMCPY2D) {
        planes(&flat(&load(copy)?), 0, Mode::Sync)
    }

    fn cuMemcpy2DAsync_v2(copy: *const CUDA_MEMCPY2D, stream: CUstream) {
        planes(&flat(&load(copy)?), stream, Mode::Async)
    }

    fn cuMemcpy3D_v2(copy: *const CUDA_MEMCPY3D) {
        planes(&load(copy)?, 0, Mode::Sync)
    }

    fn cuMemcpy3DAsync_v2(copy: *const CUDA_MEMCPY3D, stream: CUstream) {
        planes(&load(copy)?, stream, Mode::Async)
    }

    fn cuMemcpyBatchAsync(dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr, sizes: *mut usize, count: usize, attrs: *mut CUmemcpyAttributes, attrs_idxs: *mut usize, attrs_count: usize, fail_idx: *mut usize, stream: CUstream) {
        let during_call = attributes(attrs, attrs_idxs, attrs_count, count)?;
        batch(array(dsts, count)?, array(srcs, count)?, array(sizes, count)?, during_call, fail_idx, stream)
    }

    fn cuMemcpyBatchAsync_v2(dsts: *mut CUdeviceptr, srcs: *mut CUdeviceptr, sizes: *mut usize, count: usize, attrs: *mut CUmemcpyAttributes, attrs_idxs: *mut usize, attrs_count: usize, stream: CUstream) {
        let during_call = attributes(attrs, attrs_idxs, attrs_count, count)?;
        batch(array(dsts, count)?, array(srcs, count)?, array(sizes, count)?, during_call, core::ptr::null_mut(), stream)
    }
}

fn peers(a: CUcontext, b: CUcontext) -> Res {
    let d = driver()?;
    let st = d.state.lock();
    st.context_or_current(a)?;
    st.context_or_current(b)?;
    Ok(())
}

/// The rules for a batch's attributes: at least one, the first for copy 0, indices rising.
/// True when some source must be read before the call returns.
unsafe fn attributes(
    attrs: *mut CUmemcpyAttributes,
    idxs: *mut usize,
    attr_count: usize,
    count: usize,
) -> Res<bool> {
    // SAFETY: the caller's arrays of these lengths.
    let (attrs, idxs) = unsafe { (array(attrs, attr_count)?, array(idxs, attr_count)?) };
    let rising = idxs.windows(2).all(|w| w[0] < w[1]);
    let orders = attrs.iter().all(|a| (1..=3).contains(&a.srcAccessOrder));
    if count == 0
        || attr_count == 0
        || attr_count > count
        || idxs[0] != 0
        || !rising
        || idxs[attr_count - 1] >= count
        || !orders
    {
        return Err(INVALID_VALUE);
    }
    Ok(attrs.iter().any(|a| a.srcAccessOrder == 2))
}
