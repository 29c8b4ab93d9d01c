//! Modules, libraries, functions, occupancy.

use super::{out, text};
use crate::capture::illegal;
use crate::driver::driver;
use crate::errors::*;
use crate::module::{entries, Function, Module};
use crate::types::*;
use core::ffi::{c_char, c_int, c_uint, c_void};
use std::collections::HashMap;

/// First bytes of images that are not text: ELF, fat binary.
const BINARY: [&[u8]; 2] = [b"\x7fELF", &[0x50, 0xed, 0x55, 0xba]];

/// Loads an image; a simulated GPU runs no machine code, so it has to be PTX.
fn load_image(image: *const c_void, in_context: bool) -> Res<CUmodule> {
    let d = driver()?;
    if image.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: an image has at least four bytes.
    let head = unsafe { core::slice::from_raw_parts(image.cast::<u8>(), 4) };
    if in_context {
        d.state.lock().context()?;
    }
    if BINARY.contains(&head) {
        return Err(INVALID_IMAGE);
    }
    // SAFETY: what is no binary image is NUL-terminated text.
    let source = unsafe { text(image.cast())? };
    let kernels = entries(&source);
    if kernels.is_empty() && !source.contains(".version") {
        return Err(INVALID_IMAGE);
    }
    let mut st = d.state.lock();
    illegal(&mut st)?;
    let context = if in_context { st.context()?.0 } else { 0 };
    let handle = st.handle();
    st.modules.insert(
        handle,
        Module {
            kernels,
            functions: HashMap::new(),
            context,
        },
    );
    d.charge(d.topology.calls.alloc_us);
    Ok(handle)
}

fn load_file(path: CString, in_context: bool) -> Res<CUmodule> {
    // SAFETY: the caller's string.
    let path = unsafe { text(path)? };
    let mut bytes = std::fs::read(path).map_err(|_| FILE_NOT_FOUND)?;
    bytes.extend([0; 4]);
    load_image(bytes.as_ptr().cast(), in_context)
}

fn function(module: CUmodule, name: CString) -> Res<CUfunction> {
    let d = driver()?;
    // SAFETY: the caller's string.
    let name = unsafe { text(name)? };
    let mut st = d.state.lock();
    let m = st.modules.get(&module).ok_or(INVALID_HANDLE)?;
    if let Some(known) = m.functions.get(&name) {
        return Ok(*known);
    }
    if !m.kernels.contains(&name) {
        return Err(NOT_FOUND);
    }
    let handle = st.handle();
    let twin = anabranch_kernels::twin(&name);
    let c_name = std::ffi::CString::new(name.clone()).map_err(|_| INVALID_VALUE)?;
    st.functions.insert(
        handle,
        Function {
            name: c_name,
            module,
            twin,
            dynamic_shared: 0,
        },
    );
    if let Some(m) = st.modules.get_mut(&module) {
        m.functions.insert(name, handle);
    }
    Ok(handle)
}

fn unload(module: CUmodule) -> Res {
    let d = driver()?;
    let mut st = d.state.lock();
    let gone = st.modules.remove(&module).ok_or(INVALID_HANDLE)?;
    for handle in gone.functions.values() {
        st.functions.remove(handle);
    }
    Ok(())
}

fn blocks_per_multiprocessor(func: CUfunction, block: c_int, shared: usize) -> Res<c_int> {
    let d = driver()?;
    if !d.state.lock().functions.contains_key(&func) {
        return Err(INVALID_HANDLE);
    }
    if block < 1 {
        return Err(INVALID_VALUE);
    }
    if block > 1024 {
        return Ok(0);
    }
    let by_threads = 2048 / block;
    let by_shared = (d.topology.gpu.shared_kib as usize * 1024)
        .checked_div(shared)
        .unwrap_or(32) as c_int;
    Ok(by_threads.min(by_shared).min(32))
}

fn attribute(func: CUfunction, attribute: c_int) -> Res<c_int> {
    let d = driver()?;
    let st = d.state.lock();
    let f = st.functions.get(&func).ok_or(INVALID_HANDLE)?;
    Ok(match attribute {
        0 => 1024,
        1..=3 | 7 => 0,
        4 => 32,
        5 | 6 => d.topology.gpu.compute_capability[0] * 10 + d.topology.gpu.compute_capability[1],
        8 => f.dynamic_shared.max(48 << 10),
        9 => -1,
        10..=15 => 0,
        _ => return Err(INVALID_VALUE),
    })
}

fn set_attribute(func: CUfunction, attribute: c_int, value: c_int) -> Res {
    let d = driver()?;
    let mut st = d.state.lock();
    let limit = d.topology.gpu.shared_kib << 10;
    let f = st.functions.get_mut(&func).ok_or(INVALID_HANDLE)?;
    match attribute {
        8 if (0..=limit).contains(&value) => f.dynamic_shared = value,
        9 => {}
        _ => return Err(INVALID_VALUE),
    }
    Ok(())
}

fn parameter(func: CUfunction, index: usize) -> Res<(usize, usize)> {
    let d = driver()?;
    let st = d.state.lock();
    let twin = st
        .functions
        .get(&func)
        .ok_or(INVALID_HANDLE)?
        .twin
        .ok_or(NOT_SUPPORTED)?;
    let mut at = 0usize;
    for (i, size) in twin.params.iter().enumerate() {
        at = at.next_multiple_of(*size);
        if i == index {
            return Ok((at, *size));
        }
        at += size;
    }
    Err(INVALID_VALUE)
}

driver! {
    fn cuModuleLoad(module: *mut CUmodule, path: CString) {
        out(module, load_file(path, true)?)
    }

    fn cuModuleLoadData(module: *mut CUmodule, image: *const c_void) {
        out(module, load_image(image, true)?)
    }

    fn cuModuleLoadDataEx(module: *mut CUmodule, image: *const c_void, _count: c_uint, _options: *mut c_uint, _values: *mut *mut c_void) {
        out(module, load_image(image, true)?)
    }

    fn cuModuleUnload(module: CUmodule) {
        unload(module)
    }

    fn cuModuleGetFunction(func: *mut CUfunction, module: CUmodule, name: CString) {
        out(func, function(module, name)?)
    }

    fn cuModuleGetFunctionCount(count: *mut c_uint, module: CUmodule) {
        let d = driver()?;
        let n = d.state.lock().modules.get(&module).ok_or(INVALID_HANDLE)?.kernels.len();
        out(count, n as c_uint)
    }

    fn cuModuleGetLoadingMode(mode: *mut c_uint) {
        driver()?;
        out(mode, 2)
    }

    fn cuModuleGetGlobal_v2(_dptr: *mut CUdeviceptr, _bytes: *mut usize, module: CUmodule, _name: CString) {
        let d = driver()?;
        d.state.lock().modules.get(&module).ok_or(INVALID_HANDLE)?;
        Err(NOT_FOUND)
    }

    fn cuLibraryLoadData(library: *mut CUlibrary, image: *const c_void, _jit: *mut c_uint, _jit_values: *mut *mut c_void, _jit_count: c_uint, _options: *mut c_uint, _values: *mut *mut c_void, _count: c_uint) {
        out(library, load_image(image, false)?)
    }

    fn cuLibraryLoadFromFile(library: *mut CUlibrary, path: CString, _jit: *mut c_uint, _jit_values: *mut *mut c_void, _jit_count: c_uint, _options: *mut c_uint, _values: *mut *mut c_void, _count: c_uint) {
        out(library, load_file(path, false)?)
    }

    fn cuLibraryUnload(library: CUlibrary) {
        unload(library)
    }

    fn cuLibraryGetKernel(kernel: *mut CUfunction, library: CUlibrary, name: CString) {
        out(kernel, function(library, name)?)
    }

    fn cuLibraryGetModule(module: *mut CUmodule, library: CUlibrary) {
        out(module, library)
    }

    fn cuKernelGetFunction(func: *mut CUfunction, kernel: CUfunction) {
        let d = driver()?;
        d.state.lock().functions.get(&kernel).ok_or(INVALID_HANDLE)?;
        out(func, kernel)
    }

    fn cuKernelGetAttribute(value: *mut c_int, attrib: c_int, kernel: CUfunction, _dev: CUdevice) {
        out(value, attribute(kernel, attrib)?)
    }

    fn cuKernelSetAttribute(attrib: c_int, value: c_int, kernel: CUfunction, _dev: CUdevice) {
        set_attribute(kernel, attrib, value)
    }

    fn cuFuncGetAttribute(value: *mut c_int, attrib: c_int, func: CUfunction) {
        out(value, attribute(func, attrib)?)
    }

    fn cuFuncSetAttribute(func: CUfunction, attrib: c_int, value: c_int) {
        set_attribute(func, attrib, value)
    }

    fn cuFuncSetCacheConfig(func: CUfunction, _config: c_uint) {
        let d = driver()?;
        d.state.lock().functions.get(&func).ok_or(INVALID_HANDLE)?;
        Ok(())
    }

    fn cuFuncGetModule(module: *mut CUmodule, func: CUfunction) {
        let d = driver()?;
        let handle = d.state.lock().functions.get(&func).ok_or(INVALID_HANDLE)?.module;
        out(module, handle)
    }

    fn cuFuncGetName(name: *mut *const c_char, func: CUfunction) {
        let d = driver()?;
        let st = d.state.lock();
        out(name, st.functions.get(&func).ok_or(INVALID_HANDLE)?.name.as_ptr())
    }

    fn cuFuncGetParamInfo(func: CUfunction, index: usize, offset: *mut usize, size: *mut usize) {
        let (at, bytes) = parameter(func, index)?;
        out(offset, at)?;
        super::maybe(size, bytes);
        Ok(())
    }

    fn cuFuncIsLoaded(state: *mut c_uint, func: CUfunction) {
        let d = driver()?;
        d.state.lock().functions.get(&func).ok_or(INVALID_HANDLE)?;
        out(state, 1)
    }

    fn cuFuncLoad(func: CUfunction) {
        let d = driver()?;
        d.state.lock().functions.get(&func).ok_or(INVALID_HANDLE)?;
        Ok(())
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks: *mut c_int, func: CUfunction, block: c_int, shared: usize) {
        out(blocks, blocks_per_multiprocessor(func, block, shared)?)
    }

    fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks: *mut c_int, func: CUfunction, block: c_int, shared: usize, _flags: c_uint) {
        out(blocks, blocks_per_multiprocessor(func, block, shared)?)
    }

    fn cuOccupancyMaxPotentialBlockSize(grid: *mut c_int, block: *mut c_int, func: CUfunction, _of_block: CUoccupancyB2DSize, shared: usize, limit: c_int) {
        let d = driver()?;
        let size = if limit > 0 { limit.min(1024) } else { 1024 };
        let each = blocks_per_multiprocessor(func, size, shared)?;
        out(grid, each.max(1) * d.topology.gpu.multiprocessors)?;
        out(block, size)
    }

    fn cuOccupancyMaxPotentialBlockSizeWithFlags(grid: *mut c_int, block: *mut c_int, func: CUfunction, _of_block: CUoccupancyB2DSize, shared: usize, limit: c_int, _flags: c_uint) {
        let d = driver()?;
        let size = if limit > 0 { limit.min(1024) } else { 1024 };
        let each = blocks_per_multiprocessor(func, size, shared)?;
        out(grid, each.max(1) * d.topology.gpu.multiprocessors)?;
        out(block, size)
    }
}
