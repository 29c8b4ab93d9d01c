//! The few CUDA driver calls that a measurement needs, resolved at run time: host-only
//! measurements work where there is no driver.

use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::ptr;

use anyhow::{anyhow, bail, Context};
use libloading::os::unix::{Library, Symbol, RTLD_LOCAL, RTLD_NOW};

/// A device address.
pub type DevicePtr = u64;
/// Opaque handles of the driver.
type Handle = *mut c_void;
/// An exported allocation (`CUipcMemHandle`).
pub type IpcHandle = [u8; 64];

#[repr(C)]
struct IpcByValue(IpcHandle);

macro_rules! functions {
    ($( $field:ident = $symbol:literal ($( $argument:ty ),*); )*) => {
        struct Functions { $( $field: unsafe extern "C" fn($( $argument ),*) -> c_int ),* }

        impl Functions {
            fn resolve(library: &Library) -> anyhow::Result<Functions> {
                Ok(Functions { $(
                    // SAFETY: the driver's documentation gives the function of this name this signature.
                    $field: *unsafe { library.get($symbol) }.with_context(|| missing($symbol))?,
                )* })
            }
        }
    };
}

functions! {
    init = b"cuInit\0" (c_uint);
    version = b"cuDriverGetVersion\0" (*mut c_int);
    can_access = b"cuDeviceCanAccessPeer\0" (*mut c_int, c_int, c_int);
    device_count = b"cuDeviceGetCount\0" (*mut c_int);
    device_get = b"cuDeviceGet\0" (*mut c_int, c_int);
    device_name = b"cuDeviceGetName\0" (*mut c_char, c_int, c_int);
    device_uuid = b"cuDeviceGetUuid\0" (*mut [u8; 16], c_int);
    retain = b"cuDevicePrimaryCtxRetain\0" (*mut Handle, c_int);
    set_current = b"cuCtxSetCurrent\0" (Handle);
    synchronize = b"cuCtxSynchronize\0" ();
    enable_peer = b"cuCtxEnablePeerAccess\0" (Handle, c_uint);
    alloc = b"cuMemAlloc_v2\0" (*mut DevicePtr, usize);
    free = b"cuMemFree_v2\0" (DevicePtr);
    to_device = b"cuMemcpyHtoD_v2\0" (DevicePtr, *const c_void, usize);
    to_host = b"cuMemcpyDtoH_v2\0" (*mut c_void, DevicePtr, usize);
    copy_async = b"cuMemcpyDtoDAsync_v2\0" (DevicePtr, DevicePtr, usize, Handle);
    fill_async = b"cuMemsetD8Async\0" (DevicePtr, u8, usize, Handle);
    event_create = b"cuEventCreate\0" (*mut Handle, c_uint);
    event_record = b"cuEventRecord\0" (Handle, Handle);
    event_synchronize = b"cuEventSynchronize\0" (Handle);
    event_destroy = b"cuEventDestroy_v2\0" (Handle);
    stream_create = b"cuStreamCreate\0" (*mut Handle, c_uint);
    stream_synchronize = b"cuStreamSynchronize\0" (Handle);
    stream_destroy = b"cuStreamDestroy_v2\0" (Handle);
    ipc_export = b"cuIpcGetMemHandle\0" (*mut IpcByValue, DevicePtr);
    ipc_open = b"cuIpcOpenMemHandle_v2\0" (*mut DevicePtr, IpcByValue, c_uint);
    ipc_close = b"cuIpcCloseMemHandle\0" (DevicePtr);
    error_name = b"cuGetErrorName\0" (c_int, *mut *const c_char);
}

fn missing(symbol: &[u8]) -> String {
    format!(
        "the CUDA driver lacks {}",
        String::from_utf8_lossy(&symbol[..symbol.len() - 1])
    )
}

const STREAM_NON_BLOCKING: c_uint = 1;
const EVENT_DISABLE_TIMING: c_uint = 2;
const IPC_LAZY_ENABLE_PEER_ACCESS: c_uint = 1;
const PEER_ACCESS_ALREADY_ENABLED: c_int = 704;

fn open_library() -> Result<Library, libloading::Error> {
    // SAFETY: loading the system's driver runs its initializers, which is what they are for.
    unsafe { Library::open(Some("libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) }
}

/// The CUDA driver of this process.
pub struct Driver {
    functions: Functions,
    library: Library,
}

/// A context of a device, current where [`Driver::enter`] made it so.
#[derive(Clone, Copy)]
pub struct DeviceContext {
    handle: Handle,
}

/// A stream.
#[derive(Clone, Copy)]
pub struct Stream(Handle);

/// An event.
#[derive(Clone, Copy)]
pub struct Event(Handle);

impl Driver {
    /// Loads and initializes the driver.
    ///
    /// # Errors
    /// There is none, or it finds no usable device.
    pub fn load() -> anyhow::Result<Driver> {
        let library = open_library().map_err(|_| {
            anyhow!("no CUDA driver (libcuda.so.1) on this machine: measure host buffers with `H H`, or use a simulated node with anabranch run --sim hgx-h200")
        })?;
        let driver = Driver::of(library)?;
        driver.init()?;
        Ok(driver)
    }

    /// Loads the driver, and does no more.
    ///
    /// # Errors
    /// What the dynamic loader says of it.
    pub fn open() -> anyhow::Result<Driver> {
        Driver::of(open_library()?)
    }

    fn of(library: Library) -> anyhow::Result<Driver> {
        Ok(Driver {
            functions: Functions::resolve(&library)?,
            library,
        })
    }

    /// Initializes the driver, which needs a device.
    pub fn init(&self) -> anyhow::Result<()> {
        // SAFETY: cuInit takes a zero.
        self.check(unsafe { (self.functions.init)(0) }, "cuInit")
    }

    /// The file that the driver was loaded from.
    pub fn file(&self) -> Option<String> {
        // SAFETY: Dl_info is plain data for which zero is a valid value.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        let address = self.functions.version as *const c_void;
        // SAFETY: any address may be asked for; the result is a live local.
        let known = unsafe { libc::dladdr(address, &raw mut info) };
        if known == 0 || info.dli_fname.is_null() {
            return None;
        }
        // SAFETY: the name of a loaded object, which stays loaded as long as `self`.
        let name = unsafe { CStr::from_ptr(info.dli_fname) };
        Some(name.to_string_lossy().into_owned())
    }

    /// The version of CUDA that the driver supports, as in 12080 for 12.8.
    pub fn version(&self) -> anyhow::Result<c_int> {
        let mut version = 0;
        // SAFETY: the driver writes one int.
        let code = unsafe { (self.functions.version)(&raw mut version) };
        self.check(code, "cuDriverGetVersion")?;
        Ok(version)
    }

    /// Whether `device` may reach the memory of `peer` itself.
    pub fn can_access(&self, device: u32, peer: u32) -> anyhow::Result<bool> {
        let (device, peer) = (self.device(device)?, self.device(peer)?);
        let mut can = 0;
        // SAFETY: the driver writes one int.
        let code = unsafe { (self.functions.can_access)(&raw mut can, device, peer) };
        self.check(code, "cuDeviceCanAccessPeer")?;
        Ok(can != 0)
    }

    /// A function that not every driver has.
    ///
    /// # Errors
    /// This driver lacks it.
    pub fn function<T>(&self, symbol: &[u8]) -> anyhow::Result<Symbol<T>> {
        // SAFETY: the caller names the signature that the driver's documentation gives.
        unsafe { self.library.get(symbol) }.with_context(|| missing(symbol))
    }

    /// `Ok` for the code of success.
    ///
    /// # Errors
    /// What the driver says of the code, with the call's name.
    pub fn check(&self, code: c_int, call: &str) -> anyhow::Result<()> {
        if code == 0 {
            return Ok(());
        }
        let mut name: *const c_char = ptr::null();
        // SAFETY: the driver writes a pointer to a static string, or leaves it null.
        unsafe { (self.functions.error_name)(code, &raw mut name) };
        if name.is_null() {
            bail!("{call}: CUDA error {code}");
        }
        // SAFETY: not null, so it is the driver's static string.
        let name = unsafe { CStr::from_ptr(name) };
        bail!("{call}: {}", name.to_string_lossy())
    }

    /// Number of devices that this process may use.
    ///
    /// # Errors
    /// What the driver reports, as for all calls below.
    pub fn device_count(&self) -> anyhow::Result<u32> {
        let mut count = 0;
        // SAFETY: the driver writes one int.
        let code = unsafe { (self.functions.device_count)(&raw mut count) };
        self.check(code, "cuDeviceGetCount")?;
        Ok(u32::try_from(count)?)
    }

    fn device(&self, ordinal: u32) -> anyhow::Result<c_int> {
        let mut device = 0;
        let ordinal = c_int::try_from(ordinal)?;
        // SAFETY: the driver writes one int.
        let code = unsafe { (self.functions.device_get)(&raw mut device, ordinal) };
        self.check(code, "cuDeviceGet")?;
        Ok(device)
    }

    /// Name of a device.
    pub fn device_name(&self, ordinal: u32) -> anyhow::Result<String> {
        let device = self.device(ordinal)?;
        let mut name = [0u8; 128];
        // SAFETY: the driver writes at most 127 bytes and a NUL.
        let code = unsafe { (self.functions.device_name)(name.as_mut_ptr().cast(), 127, device) };
        self.check(code, "cuDeviceGetName")?;
        Ok(CStr::from_bytes_until_nul(&name)?
            .to_string_lossy()
            .into_owned())
    }

    /// Identity of a device on this machine, whatever else a process may see.
    pub fn device_uuid(&self, ordinal: u32) -> anyhow::Result<[u8; 16]> {
        let device = self.device(ordinal)?;
        let mut uuid = [0; 16];
        // SAFETY: the driver writes 16 bytes.
        let code = unsafe { (self.functions.device_uuid)(&raw mut uuid, device) };
        self.check(code, "cuDeviceGetUuid")?;
        Ok(uuid)
    }

    /// The primary context of a device, made current in this thread.
    pub fn enter(&self, ordinal: u32) -> anyhow::Result<DeviceContext> {
        let device = self.device(ordinal)?;
        let mut handle = ptr::null_mut();
        // SAFETY: the driver writes one handle.
        let code = unsafe { (self.functions.retain)(&raw mut handle, device) };
        self.check(code, "cuDevicePrimaryCtxRetain")?;
        let context = DeviceContext { handle };
        self.select(context)?;
        Ok(context)
    }

    /// Makes a context current in this thread.
    pub fn select(&self, context: DeviceContext) -> anyhow::Result<()> {
        // SAFETY: the handle came from the driver and is retained until the process ends.
        let code = unsafe { (self.functions.set_current)(context.handle) };
        self.check(code, "cuCtxSetCurrent")
    }

    /// Lets the current context reach the memory of `other`.
    pub fn enable_peer(&self, other: DeviceContext) -> anyhow::Result<()> {
        // SAFETY: as for `select`.
        match unsafe { (self.functions.enable_peer)(other.handle, 0) } {
            PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            code => self.check(code, "cuCtxEnablePeerAccess"),
        }
    }

    /// Waits for all work of the current context.
    pub fn synchronize(&self) -> anyhow::Result<()> {
        // SAFETY: no arguments.
        let code = unsafe { (self.functions.synchronize)() };
        self.check(code, "cuCtxSynchronize")
    }

    /// Allocates device memory in the current context.
    pub fn alloc(&self, bytes: usize) -> anyhow::Result<DevicePtr> {
        let mut address = 0;
        // SAFETY: the driver writes one address.
        let code = unsafe { (self.functions.alloc)(&raw mut address, bytes) };
        self.check(code, &format!("cuMemAlloc of {bytes} bytes"))?;
        Ok(address)
    }

    /// Frees what `alloc` gave.
    pub fn free(&self, address: DevicePtr) -> anyhow::Result<()> {
        // SAFETY: an unknown address is an error code.
        let code = unsafe { (self.functions.free)(address) };
        self.check(code, "cuMemFree")
    }

    /// Copies to device memory, complete on return.
    pub fn write(&self, to: DevicePtr, bytes: &[u8]) -> anyhow::Result<()> {
        // SAFETY: the slice is readable; a bad device address is an error code.
        let code = unsafe { (self.functions.to_device)(to, bytes.as_ptr().cast(), bytes.len()) };
        self.check(code, "cuMemcpyHtoD")?;
        // The call may return while the last bytes are still on their way from the driver's own buffer.
        self.synchronize()
    }

    /// Copies from device memory.
    pub fn read(&self, from: DevicePtr, bytes: &mut [u8]) -> anyhow::Result<()> {
        // SAFETY: the slice is writable; a bad device address is an error code.
        let code =
            unsafe { (self.functions.to_host)(bytes.as_mut_ptr().cast(), from, bytes.len()) };
        self.check(code, "cuMemcpyDtoH")
    }

    /// Enqueues a copy between device memories.
    pub fn copy_async(
        &self,
        to: DevicePtr,
        from: DevicePtr,
        bytes: usize,
        stream: Stream,
    ) -> anyhow::Result<()> {
        // SAFETY: bad addresses are an error code; the stream came from the driver.
        let code = unsafe { (self.functions.copy_async)(to, from, bytes, stream.0) };
        self.check(code, "cuMemcpyDtoDAsync")
    }

    /// Enqueues the filling of device memory with zeros.
    pub fn fill_async(&self, to: DevicePtr, bytes: usize, stream: Stream) -> anyhow::Result<()> {
        // SAFETY: a bad address is an error code; the stream came from the driver.
        let code = unsafe { (self.functions.fill_async)(to, 0, bytes, stream.0) };
        self.check(code, "cuMemsetD8Async")
    }

    /// Creates an event in the current context.
    pub fn event(&self) -> anyhow::Result<Event> {
        let mut event = ptr::null_mut();
        // SAFETY: the driver writes one handle.
        let code = unsafe { (self.functions.event_create)(&raw mut event, EVENT_DISABLE_TIMING) };
        self.check(code, "cuEventCreate")?;
        Ok(Event(event))
    }

    /// Enqueues an event.
    pub fn record(&self, event: Event, stream: Stream) -> anyhow::Result<()> {
        // SAFETY: both came from the driver.
        let code = unsafe { (self.functions.event_record)(event.0, stream.0) };
        self.check(code, "cuEventRecord")
    }

    /// Waits for what was enqueued before an event.
    pub fn wait_event(&self, event: Event) -> anyhow::Result<()> {
        // SAFETY: the event came from the driver.
        let code = unsafe { (self.functions.event_synchronize)(event.0) };
        self.check(code, "cuEventSynchronize")
    }

    /// Destroys an event.
    pub fn destroy_event(&self, event: Event) -> anyhow::Result<()> {
        // SAFETY: the event came from the driver and is not used again.
        let code = unsafe { (self.functions.event_destroy)(event.0) };
        self.check(code, "cuEventDestroy")
    }

    /// Creates a non-blocking stream in the current context.
    pub fn stream(&self) -> anyhow::Result<Stream> {
        let mut stream = ptr::null_mut();
        // SAFETY: the driver writes one handle.
        let code = unsafe { (self.functions.stream_create)(&raw mut stream, STREAM_NON_BLOCKING) };
        self.check(code, "cuStreamCreate")?;
        Ok(Stream(stream))
    }

    /// Waits for a stream.
    pub fn wait(&self, stream: Stream) -> anyhow::Result<()> {
        // SAFETY: the stream came from the driver.
        let code = unsafe { (self.functions.stream_synchronize)(stream.0) };
        self.check(code, "cuStreamSynchronize")
    }

    /// Destroys a stream.
    pub fn destroy(&self, stream: Stream) -> anyhow::Result<()> {
        // SAFETY: the stream came from the driver and is not used again.
        let code = unsafe { (self.functions.stream_destroy)(stream.0) };
        self.check(code, "cuStreamDestroy")
    }

    /// Exports an allocation to other processes.
    pub fn export(&self, address: DevicePtr) -> anyhow::Result<IpcHandle> {
        let mut handle = IpcByValue([0; 64]);
        // SAFETY: the driver writes 64 bytes.
        let code = unsafe { (self.functions.ipc_export)(&raw mut handle, address) };
        self.check(code, "cuIpcGetMemHandle")?;
        Ok(handle.0)
    }

    /// Maps an allocation of another process.
    pub fn open_handle(&self, handle: IpcHandle) -> anyhow::Result<DevicePtr> {
        let mut address = 0;
        let flags = IPC_LAZY_ENABLE_PEER_ACCESS;
        // SAFETY: the driver writes one address; a bad handle is an error code.
        let code =
            unsafe { (self.functions.ipc_open)(&raw mut address, IpcByValue(handle), flags) };
        self.check(code, "cuIpcOpenMemHandle")?;
        Ok(address)
    }

    /// Unmaps what `open` mapped.
    pub fn close(&self, address: DevicePtr) -> anyhow::Result<()> {
        // SAFETY: an unknown address is an error code.
        let code = unsafe { (self.functions.ipc_close)(address) };
        self.check(code, "cuIpcCloseMemHandle")
    }

    /// The clock of a simulated node, in ns; `None` on real hardware.
    pub fn simulated_clock(&self) -> Option<unsafe extern "C" fn() -> u64> {
        // SAFETY: only the simulated driver has this symbol, with this signature.
        unsafe { self.library.get(b"simcuda_clock_ns\0") }
            .ok()
            .map(|symbol| *symbol)
    }

    /// By how much programs on a simulated node have acted later than they could have, in ns; `None` on real hardware.
    pub fn simulated_lateness(&self) -> Option<unsafe extern "C" fn() -> u64> {
        // SAFETY: only the simulated driver has this symbol, with this signature.
        unsafe { self.library.get(b"simcuda_late_ns\0") }
            .ok()
            .map(|symbol| *symbol)
    }
}
