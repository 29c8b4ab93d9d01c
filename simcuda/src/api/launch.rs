//! Kernel launches.

use super::load;
use crate::driver::{driver, Driver};
use crate::errors::*;
use crate::memory::{Found, Place};
use crate::ops::issue;
use crate::state::State;
use crate::types::*;
use crate::work::{KernelLaunch, Work};
use anabranch_kernels::{Launch, Params, Twin};
use core::ffi::{c_uint, c_void};

/// CU_LAUNCH_PARAM_END, _BUFFER_POINTER, _BUFFER_SIZE.
const PARAM_END: usize = 0;
const PARAM_BUFFER: usize = 1;
const PARAM_SIZE: usize = 2;

/// Arguments by pointers or as one buffer.
unsafe fn arguments(twin: &Twin, params: *mut *mut c_void, extra: *mut *mut c_void) -> Res<Params> {
    if !params.is_null() && !extra.is_null() {
        return Err(INVALID_VALUE);
    }
    if !params.is_null() {
        // SAFETY: the caller gives one pointer a parameter, each to a value of its size.
        return Ok(unsafe { Params::from_pointers(twin, params) });
    }
    if extra.is_null() {
        return if twin.params.is_empty() {
            Ok(Params::from_values(&[]))
        } else {
            Err(INVALID_VALUE)
        };
    }
    let (mut buffer, mut size) = (core::ptr::null::<u8>(), 0usize);
    let mut at = extra;
    // SAFETY: the list ends with PARAM_END; its pairs are as the driver API says.
    unsafe {
        loop {
            match *at as usize {
                PARAM_END => break,
                PARAM_BUFFER => buffer = (*at.add(1)).cast(),
                PARAM_SIZE => size = *(*at.add(1)).cast::<usize>(),
                _ => return Err(INVALID_VALUE),
            }
            at = at.add(2);
        }
        if buffer.is_null() {
            return Err(INVALID_VALUE);
        }
        Params::from_packed(twin, core::slice::from_raw_parts(buffer, size)).ok_or(INVALID_VALUE)
    }
}

/// A launch with its ranges resolved. Ranges that are no memory stay out: touching them is the fault it would be.
pub(crate) unsafe fn prepare(
    d: &Driver,
    st: &State,
    p: &CUDA_KERNEL_NODE_PARAMS_v1,
    gpu: usize,
) -> Res<KernelLaunch> {
    let function = st.functions.get(&p.func).ok_or(INVALID_HANDLE)?;
    let twin = function.twin.ok_or(NOT_FOUND)?;
    let grid = [p.gridDimX, p.gridDimY, p.gridDimZ];
    let block = [p.blockDimX, p.blockDimY, p.blockDimZ];
    let threads: u64 = block.iter().map(|b| u64::from(*b)).product();
    let too_many = p.blockDimZ > 64 || p.gridDimY > 65_535 || p.gridDimZ > 65_535;
    if grid.contains(&0) || threads == 0 || threads > 1024 || too_many {
        return Err(INVALID_VALUE);
    }
    if p.sharedMemBytes as i64 > i64::from(d.topology.gpu.shared_kib) << 10 {
        return Err(INVALID_VALUE);
    }
    // SAFETY: passed on from the caller.
    let params = unsafe { arguments(twin, p.kernelParams, p.extra)? };
    let launch = Launch { grid, block };
    let place = |a: anabranch_kernels::Access| {
        let span = a.span_bytes();
        if span == 0 {
            return None;
        }
        match st.memory.resolve(a.address, span, |x| d.vm.contains(x)) {
            Ok(Found::Live(Place::Pageable(_))) | Err(_) => None,
            Ok(Found::Live(place)) => Some((a, place)),
            Ok(Found::Freed) => {
                d.report.freed_in_use(&format!(
                    "use after free: kernel {} touches {:#x}, freed before",
                    twin.name, a.address
                ));
                None
            }
        }
    };
    let ranges = (twin.accesses)(&params, launch)
        .into_iter()
        .filter_map(place)
        .collect();
    Ok(KernelLaunch {
        twin,
        params,
        launch,
        ranges,
        gpu,
    })
}

unsafe fn launch(p: CUDA_KERNEL_NODE_PARAMS_v1, stream: CUstream) -> Res {
    let d = driver()?;
    let mut st = d.state.lock();
    let context = st.context()?.0;
    let stream = st.stream_handle(d, stream)?;
    let s = st.streams.get(&stream).ok_or(INVALID_HANDLE)?;
    if s.context != context {
        return Err(INVALID_HANDLE);
    }
    let gpu = s.gpu;
    // SAFETY: passed on from the caller.
    let kernel = unsafe { prepare(d, &st, &p, gpu)? };
    if crate::capture::capturing(&st, stream)? {
        let kind = crate::graph::NodeKind::Work(Work::Kernel(kernel));
        return crate::capture::add_node(&mut st, stream, kind, p.func);
    }
    issue(
        d,
        &mut st,
        stream,
        Work::Kernel(kernel),
        d.topology.calls.launch_us,
    )?;
    Ok(())
}

driver! {
    fn cuLaunchKernel(f: CUfunction, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint, stream: CUstream, params: *mut *mut c_void, extra: *mut *mut c_void) {
        launch(
            CUDA_KERNEL_NODE_PARAMS_v1 {
                func: f,
                gridDimX: gx,
                gridDimY: gy,
                gridDimZ: gz,
                blockDimX: bx,
                blockDimY: by,
                blockDimZ: bz,
                sharedMemBytes: shared,
                kernelParams: params,
                extra,
            },
            stream,
        )
    }

    fn cuLaunchCooperativeKernel(f: CUfunction, gx: c_uint, gy: c_uint, gz: c_uint, bx: c_uint, by: c_uint, bz: c_uint, shared: c_uint, stream: CUstream, params: *mut *mut c_void) {
        launch(
            CUDA_KERNEL_NODE_PARAMS_v1 {
                func: f,
                gridDimX: gx,
                gridDimY: gy,
                gridDimZ: gz,
                blockDimX: bx,
                blockDimY: by,
                blockDimZ: bz,
                sharedMemBytes: shared,
                kernelParams: params,
                extra: core::ptr::null_mut(),
            },
            stream,
        )
    }

    fn cuLaunchKernelEx(config: *const CUlaunchConfig, f: CUfunction, params: *mut *mut c_void, extra: *mut *mut c_void) {
        let c = load(config)?;
        launch(
            CUDA_KERNEL_NODE_PARAMS_v1 {
                func: f,
                gridDimX: c.gridDimX,
                gridDimY: c.gridDimY,
                gridDimZ: c.gridDimZ,
                blockDimX: c.blockDimX,
                blockDimY: c.blockDimY,
                blockDimZ: c.blockDimZ,
                sharedMemBytes: c.sharedMemBytes,
                kernelParams: params,
                extra,
            },
            c.hStream,
        )
    }
}
