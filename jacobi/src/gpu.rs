//! One GPU through the CUDA driver: context, stream, memory, kernels.

use crate::failure::{Failure, Outcome};
use anabranch_kernels::{twin, Launch, PTX, TWINS};
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys;
use std::collections::HashMap;
use std::ffi::{c_void, CString};

/// Driver functions that this program calls. A missing one would panic inside the bindings, so they are asked for first.
const NEEDED: &[&str] = &[
    "cuInit",
    "cuDeviceGetCount",
    "cuDeviceGet",
    "cuDeviceGetName",
    "cuDeviceGetUuid",
    "cuDevicePrimaryCtxRetain",
    "cuDevicePrimaryCtxRelease_v2",
    "cuCtxSetCurrent",
    "cuMemGetInfo_v2",
    "cuMemAlloc_v2",
    "cuMemFree_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuStreamCreate",
    "cuStreamSynchronize",
    "cuStreamDestroy_v2",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuModuleUnload",
    "cuLaunchKernel",
];

/// Names a driver call in its error.
fn driver<T>(call: &str, outcome: Result<T, DriverError>) -> Outcome<T> {
    outcome.map_err(|e| Failure::input(format!("{call} failed: {:?}", e.0)))
}

/// Address of a symbol of the driver library, if it has it.
pub fn symbol(name: &str) -> Option<*const c_void> {
    let name = CString::new(name).ok()?;
    // SAFETY: only called once the library is known to be there; the symbol is looked up, not called.
    unsafe {
        sys::culib()
            .get::<*const c_void>(name.as_bytes_with_nul())
            .ok()
            .map(|s| *s)
    }
}

/// Finds the driver library and initializes it. Returns the number of devices, at least 1.
///
/// # Errors
/// Where there is no driver, no device, or a driver too old.
pub fn init() -> Outcome<u32> {
    // SAFETY: loads and unloads the driver library, whose constructors may run anywhere.
    if !unsafe { sys::is_culib_present() } {
        return Err(Failure::input(
            "no CUDA driver (libcuda.so.1): run on a machine with a GPU, or on the simulated one with LD_LIBRARY_PATH=.../simcuda",
        ));
    }
    if let Some(missing) = NEEDED.iter().find(|name| symbol(name).is_none()) {
        return Err(Failure::input(format!(
            "the CUDA driver has no {missing}: it is too old, or no CUDA driver at all"
        )));
    }
    driver("cuInit", result::init())?;
    let devices = driver("cuDeviceGetCount", result::device::get_count())?;
    if devices < 1 {
        return Err(Failure::input(
            "the CUDA driver shows no device: check CUDA_VISIBLE_DEVICES",
        ));
    }
    Ok(devices as u32)
}

/// One device with its primary context, a stream of its own and the kernels.
pub struct Gpu {
    device: sys::CUdevice,
    stream: sys::CUstream,
    module: sys::CUmodule,
    functions: HashMap<&'static str, sys::CUfunction>,
    /// The device's name.
    pub name: String,
    /// The device's identity, the same in every process.
    pub uuid: [u8; 16],
}

impl Gpu {
    /// Opens a device on this thread. [`init`] must have succeeded.
    pub fn open(ordinal: u32) -> Outcome<Gpu> {
        let device = driver("cuDeviceGet", result::device::get(ordinal as i32))?;
        let name = driver("cuDeviceGetName", result::device::get_name(device))?;
        let uuid = driver("cuDeviceGetUuid", result::device::get_uuid(device))?
            .bytes
            .map(|b| b as u8);
        // SAFETY: `device` is what cuDeviceGet returned; the context is released in `drop`.
        let context = driver("cuDevicePrimaryCtxRetain", unsafe {
            result::primary_ctx::retain(device)
        })?;
        // SAFETY: the context was just retained.
        driver("cuCtxSetCurrent", unsafe {
            result::ctx::set_current(context)
        })?;
        let stream = driver(
            "cuStreamCreate",
            result::stream::create(result::stream::StreamKind::NonBlocking),
        )?;
        let image = CString::new(PTX).map_err(|_| Failure::input("the kernels hold a NUL"))?;
        // SAFETY: a NUL-terminated PTX text, alive during the call.
        let module = driver("cuModuleLoadData", unsafe {
            result::module::load_data(image.as_ptr().cast())
        })?;
        let mut functions = HashMap::new();
        for twin in TWINS {
            let symbol = CString::new(twin.name)
                .map_err(|_| Failure::input("a kernel's name holds a NUL"))?;
            // SAFETY: the module was just loaded and stays so until `drop`.
            let function = driver(twin.name, unsafe {
                result::module::get_function(module, symbol)
            })?;
            functions.insert(twin.name, function);
        }
        Ok(Gpu {
            device,
            stream,
            module,
            functions,
            name,
            uuid,
        })
    }

    /// Free and total memory of the device in bytes.
    pub fn memory(&self) -> Outcome<(u64, u64)> {
        let (free, total) = driver("cuMemGetInfo", result::mem_get_info())?;
        Ok((free as u64, total as u64))
    }

    /// Allocates device memory. The contents are undefined.
    pub fn allocate(&self, bytes: u64) -> Outcome<Buffer> {
        // SAFETY: the context is current; the buffer frees the memory once.
        let address = driver("cuMemAlloc", unsafe {
            result::malloc_sync(bytes.max(1) as usize)
        })?;
        Ok(Buffer { address, bytes })
    }

    /// Launches a kernel on this GPU's stream, by name, with its arguments zero-extended to 64 bits.
    ///
    /// # Safety
    /// Addresses among the arguments must name device memory of the extent that the kernel touches.
    pub unsafe fn launch(&self, kernel: &str, values: &[u64], shape: Launch) -> Outcome<()> {
        let function = *self
            .functions
            .get(kernel)
            .ok_or_else(|| Failure::input(format!("no kernel {kernel}")))?;
        assert_eq!(
            twin(kernel).map(|t| t.params.len()),
            Some(values.len()),
            "{kernel}"
        );
        let mut values = values.to_vec();
        // Little-endian: the address of a zero-extended 32-bit argument is that of its low half.
        let mut pointers: Vec<*mut c_void> = values
            .iter_mut()
            .map(|v| std::ptr::from_mut(v).cast())
            .collect();
        let grid = (shape.grid[0], shape.grid[1], shape.grid[2]);
        let block = (shape.block[0], shape.block[1], shape.block[2]);
        // SAFETY: one pointer for each parameter, copied by the driver before it returns; the caller answers for the rest.
        let outcome =
            unsafe { result::launch_kernel(function, grid, block, 0, self.stream, &mut pointers) };
        driver(kernel, outcome)
    }

    /// Waits for all that was launched on this GPU's stream.
    pub fn synchronize(&self) -> Outcome<()> {
        // SAFETY: the stream lives until `drop`.
        driver("cuStreamSynchronize", unsafe {
            result::stream::synchronize(self.stream)
        })
    }

    /// Copies host memory to the start of a buffer and waits for it.
    pub fn upload<T: Copy>(&self, to: &Buffer, from: &[T]) -> Outcome<()> {
        assert!(std::mem::size_of_val(from) as u64 <= to.bytes);
        if from.is_empty() {
            return Ok(());
        }
        // SAFETY: within the buffer, and `from` outlives the copy, which is waited for.
        driver("cuMemcpyHtoDAsync", unsafe {
            result::memcpy_htod_async(to.address, from, self.stream)
        })?;
        self.synchronize()
    }

    /// Copies from `offset` bytes into a buffer to host memory and waits for it.
    pub fn download<T: Copy>(&self, to: &mut [T], from: &Buffer, offset: u64) -> Outcome<()> {
        assert!(offset + std::mem::size_of_val(to) as u64 <= from.bytes);
        if to.is_empty() {
            return Ok(());
        }
        // SAFETY: within the buffer, and `to` outlives the copy, which is waited for.
        driver("cuMemcpyDtoHAsync", unsafe {
            result::memcpy_dtoh_async(to, from.address + offset, self.stream)
        })?;
        self.synchronize()
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        // SAFETY: stream, module and context were made by `open` and are released once. Errors have no one to go to.
        unsafe {
            let _ = result::stream::destroy(self.stream);
            let _ = result::module::unload(self.module);
            let _ = result::primary_ctx::release(self.device);
        }
    }
}

/// Device memory, freed when dropped. Must not outlive its [`Gpu`].
pub struct Buffer {
    /// Device address.
    pub address: u64,
    /// Length in bytes.
    pub bytes: u64,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated by `Gpu::allocate`, freed once.
        let _ = unsafe { result::free_sync(self.address) };
    }
}
