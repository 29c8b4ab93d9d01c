//! The CUDA driver as the command uses it, over the library's table of its functions: host-only measurements work where
//! there is no driver.

use std::ffi::{c_int, c_void, CStr};

use anabranch_engine::cuda::types::{
    code, Context as Handle, Device, Event as EventHandle, Stream as StreamHandle,
    EVENT_DISABLE_TIMING, IPC_LAZY_ENABLE_PEER_ACCESS, STREAM_NON_BLOCKING,
};
use anabranch_engine::cuda::{self, Driver as Table, Error};
use anyhow::{anyhow, Context};
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

/// A device address.
pub type DevicePtr = u64;
/// An exported allocation (`CUipcMemHandle`).
pub type IpcHandle = [u8; 64];

/// The CUDA driver of this process.
pub struct Driver {
    table: &'static Table,
    /// For functions that only the simulated driver has.
    library: Library,
}

/// A context of a device, current where [`Driver::enter`] made it so.
#[derive(Clone, Copy)]
pub struct DeviceContext {
    handle: Handle,
}

/// A stream.
#[derive(Clone, Copy)]
pub struct Stream(StreamHandle);

/// An event.
#[derive(Clone, Copy)]
pub struct Event(EventHandle);

impl Driver {
    /// Loads and initializes the driver.
    ///
    /// # Errors
    /// There is none, or it finds no usable device.
    pub fn load() -> anyhow::Result<Driver> {
        let driver = Driver::open().map_err(|_| {
            anyhow!("no CUDA driver (libcuda.so.1) on this machine: measure host buffers with `H H`, or use a simulated node with anabranch run --sim hgx-h200")
        })?;
        driver.init()?;
        Ok(driver)
    }

    /// Loads the driver, and does no more.
    ///
    /// # Errors
    /// What the dynamic loader says of it.
    pub fn open() -> anyhow::Result<Driver> {
        // SAFETY: loading the system's driver runs its initializers, which is what they are for.
        let library = unsafe { Library::open(Some("libcuda.so.1"), RTLD_NOW | RTLD_LOCAL) }?;
        cuda::arm();
        let table = cuda::driver()
            .context("this libcuda.so.1 lacks functions that every CUDA driver has")?;
        Ok(Driver { table, library })
    }

    /// The driver's functions.
    pub fn table(&self) -> &'static Table {
        self.table
    }

    /// Initializes the driver, which needs a device.
    pub fn init(&self) -> anyhow::Result<()> {
        // SAFETY: cuInit takes a zero.
        Ok(unsafe { self.table.init(0) }?)
    }

    /// The file that the driver was loaded from.
    pub fn file(&self) -> Option<String> {
        // SAFETY: every driver has this function; only its address is used.
        let function =
            unsafe { self.library.get::<*const c_void>(b"cuDriverGetVersion\0") }.ok()?;
        // SAFETY: Dl_info is plain data for which zero is a valid value.
        let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
        // SAFETY: any address may be asked for; the result is a live local.
        let known = unsafe { libc::dladdr(function.as_raw_ptr(), &raw mut info) };
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
        self.table.driver_get_version(&mut version)?;
        Ok(version)
    }

    /// Whether `device` may reach the memory of `peer` itself.
    pub fn can_access(&self, device: u32, peer: u32) -> anyhow::Result<bool> {
        let (device, peer) = (self.device(device)?, self.device(peer)?);
        let mut can = 0;
        (self.table).device_can_access_peer(&mut can, device, peer)?;
        Ok(can != 0)
    }

    /// Number of devices that this process may use.
    ///
    /// # Errors
    /// What the driver reports, as for all calls below.
    pub fn device_count(&self) -> anyhow::Result<u32> {
        let mut count = 0;
        self.table.device_get_count(&mut count)?;
        Ok(u32::try_from(count)?)
    }

    /// A device.
    pub fn device(&self, ordinal: u32) -> anyhow::Result<Device> {
        let mut device = 0;
        let ordinal = c_int::try_from(ordinal)?;
        self.table.device_get(&mut device, ordinal)?;
        Ok(device)
    }

    /// Name of a device.
    pub fn device_name(&self, ordinal: u32) -> anyhow::Result<String> {
        let device = self.device(ordinal)?;
        let mut name = [0u8; 128];
        // SAFETY: the driver writes at most 127 bytes and a NUL.
        unsafe { (self.table).device_get_name(name.as_mut_ptr().cast(), 127, device) }?;
        Ok(CStr::from_bytes_until_nul(&name)?
            .to_string_lossy()
            .into_owned())
    }

    /// Identity of a device on this machine, whatever else a process may see.
    pub fn device_uuid(&self, ordinal: u32) -> anyhow::Result<[u8; 16]> {
        let device = self.device(ordinal)?;
        let mut uuid = [0; 16];
        self.table.device_get_uuid(&mut uuid, device)?;
        Ok(uuid)
    }

    /// The primary context of a device, made current in this thread.
    pub fn enter(&self, ordinal: u32) -> anyhow::Result<DeviceContext> {
        let device = self.device(ordinal)?;
        let mut handle = Handle::NULL;
        self.table.primary_ctx_retain(&mut handle, device)?;
        let context = DeviceContext { handle };
        self.select(context)?;
        Ok(context)
    }

    /// Makes a context current in this thread.
    pub fn select(&self, context: DeviceContext) -> anyhow::Result<()> {
        // SAFETY: the handle came from the driver and is retained until the process ends.
        Ok(unsafe { self.table.ctx_set_current(context.handle) }?)
    }

    /// Lets the current context reach the memory of `other`.
    pub fn enable_peer(&self, other: DeviceContext) -> anyhow::Result<()> {
        // SAFETY: as for `select`.
        match unsafe { self.table.ctx_enable_peer_access(other.handle, 0) } {
            Err(error) if error.is(code::PEER_ACCESS_ALREADY_ENABLED) => Ok(()),
            result => Ok(result?),
        }
    }

    /// Waits for all work of the current context.
    pub fn synchronize(&self) -> anyhow::Result<()> {
        Ok(self.table.ctx_synchronize()?)
    }

    /// Allocates device memory in the current context.
    pub fn alloc(&self, bytes: usize) -> anyhow::Result<DevicePtr> {
        let mut address = 0;
        self.table
            .mem_alloc(&mut address, bytes)
            .with_context(|| of_bytes(bytes))?;
        Ok(address)
    }

    /// Frees what `alloc` gave.
    pub fn free(&self, address: DevicePtr) -> anyhow::Result<()> {
        // SAFETY: an unknown address is an error code.
        Ok(unsafe { self.table.mem_free(address) }?)
    }

    /// Copies to device memory, complete on return.
    pub fn write(&self, to: DevicePtr, bytes: &[u8]) -> anyhow::Result<()> {
        // SAFETY: the slice is readable; a bad device address is an error code.
        unsafe {
            self.table
                .memcpy_htod(to, bytes.as_ptr().cast(), bytes.len())
        }?;
        // The call may return while the last bytes are still on their way from the driver's own buffer.
        self.synchronize()
    }

    /// Copies from device memory.
    pub fn read(&self, from: DevicePtr, bytes: &mut [u8]) -> anyhow::Result<()> {
        // SAFETY: the slice is writable; a bad device address is an error code.
        let result = unsafe {
            self.table
                .memcpy_dtoh(bytes.as_mut_ptr().cast(), from, bytes.len())
        };
        Ok(result?)
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
        Ok(unsafe { self.table.memcpy_dtod_async(to, from, bytes, stream.0) }?)
    }

    /// Enqueues the filling of device memory with zeros.
    pub fn fill_async(&self, to: DevicePtr, bytes: usize, stream: Stream) -> anyhow::Result<()> {
        // SAFETY: a bad address is an error code; the stream came from the driver.
        Ok(unsafe { self.table.memset_d8_async(to, 0, bytes, stream.0) }?)
    }

    /// Creates an event in the current context.
    pub fn event(&self) -> anyhow::Result<Event> {
        let mut event = EventHandle::NULL;
        (self.table).event_create(&mut event, EVENT_DISABLE_TIMING)?;
        Ok(Event(event))
    }

    /// Enqueues an event.
    pub fn record(&self, event: Event, stream: Stream) -> anyhow::Result<()> {
        Ok(self.table.event_record(event.0, stream.0)?)
    }

    /// Waits for what was enqueued before an event.
    pub fn wait_event(&self, event: Event) -> anyhow::Result<()> {
        Ok(self.table.event_synchronize(event.0)?)
    }

    /// Has a stream wait for an event.
    pub fn wait_behind(&self, stream: Stream, event: Event) -> anyhow::Result<()> {
        Ok(self.table.stream_wait_event(stream.0, event.0, 0)?)
    }

    /// Destroys an event.
    pub fn destroy_event(&self, event: Event) -> anyhow::Result<()> {
        // SAFETY: the event came from the driver and is not used again.
        Ok(unsafe { self.table.event_destroy(event.0) }?)
    }

    /// Creates a non-blocking stream in the current context.
    pub fn stream(&self) -> anyhow::Result<Stream> {
        let mut stream = StreamHandle::NULL;
        (self.table).stream_create(&mut stream, STREAM_NON_BLOCKING)?;
        Ok(Stream(stream))
    }

    /// Whether all that a stream was given is over.
    pub fn is_over(&self, stream: Stream) -> anyhow::Result<bool> {
        match self.table.stream_query(stream.0) {
            Err(error) if error.is(code::NOT_READY) => Ok(false),
            result => Ok(result.map(|()| true)?),
        }
    }

    /// Waits for a stream.
    pub fn wait(&self, stream: Stream) -> anyhow::Result<()> {
        Ok(self.table.stream_synchronize(stream.0)?)
    }

    /// Destroys a stream.
    pub fn destroy(&self, stream: Stream) -> anyhow::Result<()> {
        // SAFETY: the stream came from the driver and is not used again.
        Ok(unsafe { self.table.stream_destroy(stream.0) }?)
    }

    /// Exports an allocation to other processes.
    pub fn export(&self, address: DevicePtr) -> anyhow::Result<IpcHandle> {
        let mut handle = cuda::IpcHandle([0; 64]);
        self.table.ipc_get_mem_handle(&mut handle, address)?;
        Ok(handle.0)
    }

    /// Maps an allocation of another process.
    pub fn open_handle(&self, handle: IpcHandle) -> anyhow::Result<DevicePtr> {
        let (mut address, handle) = (0, cuda::IpcHandle(handle));
        let flags = IPC_LAZY_ENABLE_PEER_ACCESS;
        (self.table).ipc_open_mem_handle(&mut address, handle, flags)?;
        Ok(address)
    }

    /// Unmaps what `open` mapped.
    pub fn close(&self, address: DevicePtr) -> anyhow::Result<()> {
        // SAFETY: an unknown address is an error code.
        Ok(unsafe { self.table.ipc_close_mem_handle(address) }?)
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

impl Stream {
    /// The driver's handle.
    pub fn handle(self) -> StreamHandle {
        self.0
    }
}

/// What an allocation was to be.
pub fn of_bytes(bytes: usize) -> String {
    format!("allocating {bytes} bytes")
}

/// Whether a call failed as the driver does not support it.
pub fn is_unsupported(error: &Error) -> bool {
    matches!(error, Error::Missing(_)) || error.is(code::NOT_SUPPORTED)
}
