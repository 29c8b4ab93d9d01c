//! The driver functions that the engine calls, found at run time.
//!
//! No CUDA library is linked. Each function is looked up by name in the `libcuda.so.1` of the process. A
//! missing function is an ordinary error ([`Error::Missing`]) of the call that needs it.

use super::error::{owned_text, Error, Result};
use super::types::{
    BatchAttributes, Code, Context, Device, Event, GraphExec, GraphHandle, GraphNode, IpcHandle,
    MemAccess, MemProperties, Memcpy2d, Memcpy3d, Stream, Uuid,
};
use std::ffi::{c_void, CStr};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, Ordering};
use std::sync::{Once, OnceLock};
use std::time::Instant;

/// Makes the table: a field, a look-up and a checked method per driver function. Where a function has several
/// versions of the same signature, the names are listed newest first.
macro_rules! driver_functions {
    ($( $(#[$doc:meta])* $kind:ident $method:ident = $symbol:literal $(| $older:literal)* ( $($arg:ident : $ty:ty),* $(,)? ); )*) => {
        /// The driver of this process.
        #[derive(Default)]
        pub struct Driver {
            $( pub(super) $method: Option<unsafe extern "C" fn($($ty),*) -> Code>, )*
        }

        impl Driver {
            fn resolve(look_up: impl Fn(&CStr) -> *mut c_void) -> Driver {
                Driver { $( $method: {
                    let found = [concat!($symbol, "\0") $(, concat!($older, "\0"))*]
                        .iter()
                        .filter_map(|name| CStr::from_bytes_with_nul(name.as_bytes()).ok())
                        .map(&look_up)
                        .find(|address| !address.is_null());
                    // SAFETY: a function of this name has this signature in the driver's published interface,
                    // and `Option` of a function pointer has the layout of a pointer that may be null.
                    found.map(|address| unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($ty),*) -> Code>(address)
                    })
                }, )* }
            }

            /// Every function of the table (C name), and whether this driver has it.
            #[must_use]
            pub fn coverage(&self) -> Vec<(&'static str, bool)> {
                vec![$( ($symbol, self.$method.is_some()), )*]
            }

            $( driver_method!($kind $(#[$doc])* $method = $symbol ($($arg: $ty),*)); )*
        }
    };
}

/// A checked method. A safe one takes references, and handles that are live by the invariant of their types; it neither
/// ends a handle nor touches memory that somebody may use.
macro_rules! driver_method {
    (raw $(#[$doc:meta])* $method:ident = $symbol:literal ($($arg:ident : $ty:ty),*)) => {
        $(#[$doc])*
        ///
        /// # Safety
        /// Pointers are valid for what the driver reads and writes through them; memory that is copied, mapped, unmapped or
        /// freed is not used otherwise, and handles that are ended are used no more.
        #[doc(alias = $symbol)]
        #[allow(clippy::too_many_arguments, reason = "as many as the driver's function has")]
        pub unsafe fn $method(&self, $($arg: $ty),*) -> Result<()> {
            const NAME: &str = $symbol;
            match self.$method {
                // SAFETY: the caller keeps the driver's own conditions.
                Some(function) => Error::check(NAME, unsafe { function($($arg),*) }),
                None => Err(Error::Missing(NAME)),
            }
        }
    };
    (safe $(#[$doc:meta])* $method:ident = $symbol:literal ($($arg:ident : $ty:ty),*)) => {
        $(#[$doc])*
        #[doc(alias = $symbol)]
        pub fn $method(&self, $($arg: $ty),*) -> Result<()> {
            const NAME: &str = $symbol;
            match self.$method {
                // SAFETY: references are valid, and handles live or null, by the invariants of their types; of an address or
                // a number that is none the driver says so.
                Some(function) => Error::check(NAME, unsafe { function($($arg),*) }),
                None => Err(Error::Missing(NAME)),
            }
        }
    };
}

driver_functions! {
    /// Initializes the driver (the engine never does; tests and the command do).
    raw init = "cuInit" (flags: u32);
    /// Version that the driver supports.
    safe driver_get_version = "cuDriverGetVersion" (version: &mut i32);
    /// Name of an error.
    safe get_error_name = "cuGetErrorName" (code: Code, text: &mut *const libc::c_char);
    /// Description of an error.
    safe get_error_string = "cuGetErrorString" (code: Code, text: &mut *const libc::c_char);

    /// Number of devices that this process sees.
    safe device_get_count = "cuDeviceGetCount" (count: &mut i32);
    /// Device of an ordinal.
    safe device_get = "cuDeviceGet" (device: &mut Device, ordinal: i32);
    /// Identity of a device (of its MIG instance where there is one).
    safe device_get_uuid = "cuDeviceGetUuid_v2" | "cuDeviceGetUuid" (uuid: &mut Uuid, device: Device);
    /// Name of a device.
    raw device_get_name = "cuDeviceGetName" (name: *mut libc::c_char, length: i32, device: Device);
    /// An attribute of a device.
    safe device_get_attribute = "cuDeviceGetAttribute" (value: &mut i32, attribute: i32, device: Device);
    /// PCI address of a device.
    raw device_get_pci_bus_id = "cuDeviceGetPCIBusId" (id: *mut libc::c_char, length: i32, device: Device);
    /// Memory of a device in bytes.
    safe device_total_mem = "cuDeviceTotalMem_v2" (bytes: &mut usize, device: Device);
    /// Whether a device can access a peer's memory.
    safe device_can_access_peer = "cuDeviceCanAccessPeer" (can: &mut i32, device: Device, peer: Device);

    /// An attribute of a pair of devices (the command).
    safe device_get_p2p_attribute = "cuDeviceGetP2PAttribute" (value: &mut i32, attribute: i32, from: Device, to: Device);

    /// Takes a reference to a device's primary context, making it if there is none.
    safe primary_ctx_retain = "cuDevicePrimaryCtxRetain" (context: &mut Context, device: Device);
    /// Gives back a reference to a device's primary context.
    raw primary_ctx_release = "cuDevicePrimaryCtxRelease_v2" | "cuDevicePrimaryCtxRelease" (device: Device);
    /// Whether a device's primary context exists.
    safe primary_ctx_get_state = "cuDevicePrimaryCtxGetState" (device: Device, flags: &mut u32, active: &mut i32);
    /// The thread's current context.
    safe ctx_get_current = "cuCtxGetCurrent" (context: &mut Context);
    /// Makes a context the thread's (the command).
    raw ctx_set_current = "cuCtxSetCurrent" (context: Context);
    /// Pushes a context on the thread's stack.
    raw ctx_push_current = "cuCtxPushCurrent_v2" (context: Context);
    /// Pops the thread's current context.
    raw ctx_pop_current = "cuCtxPopCurrent_v2" (context: *mut Context);
    /// Device of the current context.
    safe ctx_get_device = "cuCtxGetDevice" (device: &mut Device);
    /// An identity of a context that is never used again in this process.
    safe ctx_get_id = "cuCtxGetId" (context: Context, id: &mut u64);
    /// Makes a context (tests and contexts of the library's own).
    safe ctx_create = "cuCtxCreate_v2" (context: &mut Context, flags: u32, device: Device);
    /// Destroys a context made by [`Driver::ctx_create`].
    raw ctx_destroy = "cuCtxDestroy_v2" (context: Context);
    /// Waits for all work of the current context.
    safe ctx_synchronize = "cuCtxSynchronize" ();
    /// Lets the current context reach a peer context's memory.
    raw ctx_enable_peer_access = "cuCtxEnablePeerAccess" (peer: Context, flags: u32);
    /// Takes that back.
    raw ctx_disable_peer_access = "cuCtxDisablePeerAccess" (peer: Context);
    /// Destroys a device's primary context, whoever uses it (tests).
    raw primary_ctx_reset = "cuDevicePrimaryCtxReset_v2" | "cuDevicePrimaryCtxReset" (device: Device);
    /// Swaps the thread's capture mode.
    safe thread_exchange_stream_capture_mode = "cuThreadExchangeStreamCaptureMode" (mode: &mut i32);

    /// Allocates device memory in the current context.
    safe mem_alloc = "cuMemAlloc_v2" (address: &mut u64, bytes: usize);
    /// Memory from a pool (the command).
    raw mem_alloc_async = "cuMemAllocAsync" (address: *mut u64, bytes: usize, stream: Stream);
    /// Gives it back.
    raw mem_free_async = "cuMemFreeAsync" (address: u64, stream: Stream);
    /// Of which sizes physical memory is (the command).
    safe mem_get_allocation_granularity = "cuMemGetAllocationGranularity"
        (bytes: &mut usize, properties: &MemProperties, option: u32);
    /// Physical memory (the command).
    safe mem_create = "cuMemCreate" (handle: &mut u64, bytes: usize, properties: &MemProperties, flags: u64);
    /// A copy to a device, over on return but for the last bytes (the command).
    raw memcpy_htod = "cuMemcpyHtoD_v2" (dst: u64, src: *const c_void, bytes: usize);
    /// A copy from a device, over on return (the command).
    raw memcpy_dtoh = "cuMemcpyDtoH_v2" (dst: *mut c_void, src: u64, bytes: usize);
    /// Frees device memory.
    raw mem_free = "cuMemFree_v2" (address: u64);
    /// Free and total memory of the current device in bytes.
    safe mem_get_info = "cuMemGetInfo_v2" (free: &mut usize, total: &mut usize);
    /// Allocation that an address lies in.
    safe mem_get_address_range = "cuMemGetAddressRange_v2" (base: &mut u64, bytes: &mut usize, address: u64);
    /// Pins host memory.
    raw mem_host_register = "cuMemHostRegister_v2" (address: *mut c_void, bytes: usize, flags: u32);
    /// Unpins host memory.
    raw mem_host_unregister = "cuMemHostUnregister" (address: *mut c_void);
    /// Allocates pinned host memory (tests).
    raw mem_host_alloc = "cuMemHostAlloc" (address: *mut *mut c_void, bytes: usize, flags: u32);
    /// Frees pinned host memory (tests).
    raw mem_free_host = "cuMemFreeHost" (address: *mut c_void);

    /// Several attributes of a pointer at once; a pointer the driver does not know leaves zeros.
    raw pointer_get_attributes = "cuPointerGetAttributes"
        (count: u32, attributes: *const i32, data: *const *mut c_void, address: u64);
    /// Sets an attribute of a pointer's allocation.
    raw pointer_set_attribute = "cuPointerSetAttribute" (value: *const c_void, attribute: i32, address: u64);

    /// Exports an allocation.
    safe ipc_get_mem_handle = "cuIpcGetMemHandle" (handle: &mut IpcHandle, address: u64);
    /// Maps another process's allocation into the current context.
    safe ipc_open_mem_handle = "cuIpcOpenMemHandle_v2" | "cuIpcOpenMemHandle"
        (address: &mut u64, handle: IpcHandle, flags: u32);
    /// Unmaps it.
    raw ipc_close_mem_handle = "cuIpcCloseMemHandle" (address: u64);

    /// Takes a reference to the physical memory that is mapped at an address.
    raw mem_retain_allocation_handle = "cuMemRetainAllocationHandle" (handle: *mut u64, address: *mut c_void);
    /// Gives a reference to physical memory back.
    raw mem_release = "cuMemRelease" (handle: u64);
    /// A handle of physical memory for other processes: a file, where it was made for that.
    raw mem_export_to_shareable_handle = "cuMemExportToShareableHandle"
        (shareable: *mut c_void, handle: u64, kind: u32, flags: u64);
    /// Physical memory by such a handle.
    raw mem_import_from_shareable_handle = "cuMemImportFromShareableHandle"
        (handle: *mut u64, shareable: *mut c_void, kind: u32);
    /// Reserves addresses.
    safe mem_address_reserve = "cuMemAddressReserve"
        (address: &mut u64, bytes: usize, alignment: usize, wanted: u64, flags: u64);
    /// Gives reserved addresses back.
    raw mem_address_free = "cuMemAddressFree" (address: u64, bytes: usize);
    /// Maps physical memory at reserved addresses.
    raw mem_map = "cuMemMap" (address: u64, bytes: usize, offset: usize, handle: u64, flags: u64);
    /// Unmaps it.
    raw mem_unmap = "cuMemUnmap" (address: u64, bytes: usize);
    /// Says who may reach what is mapped.
    raw mem_set_access = "cuMemSetAccess" (address: u64, bytes: usize, access: *const MemAccess, count: usize);

    /// Makes a stream in the current context.
    safe stream_create = "cuStreamCreate" (stream: &mut Stream, flags: u32);
    /// Destroys a stream once its work is done.
    raw stream_destroy = "cuStreamDestroy_v2" (stream: Stream);
    /// Whether a stream has run dry.
    safe stream_query = "cuStreamQuery" (stream: Stream);
    /// Whether a stream is being captured. If another stream keeps the legacy stream from being used, this
    /// answers with an error and breaks nothing.
    safe stream_is_capturing = "cuStreamIsCapturing" (stream: Stream, status: &mut u32);
    /// Waits until a stream has run dry.
    safe stream_synchronize = "cuStreamSynchronize" (stream: Stream);
    /// Makes a stream wait for an event (of the library's own contexts).
    safe stream_wait_event = "cuStreamWaitEvent" (stream: Stream, event: Event, flags: u32);

    /// Makes an event in the current context.
    safe event_create = "cuEventCreate" (event: &mut Event, flags: u32);
    /// Destroys an event.
    raw event_destroy = "cuEventDestroy_v2" (event: Event);
    /// Records an event on a stream.
    safe event_record = "cuEventRecord" (event: Event, stream: Stream);
    /// Whether an event has happened.
    safe event_query = "cuEventQuery" (event: Event);
    /// Waits for an event.
    safe event_synchronize = "cuEventSynchronize" (event: Event);
    /// Milliseconds between two events that have happened.
    safe event_elapsed_time = "cuEventElapsedTime_v2" | "cuEventElapsedTime" (ms: &mut f32, start: Event, end: Event);

    /// Copies between any two addresses of the unified address space.
    raw memcpy_async = "cuMemcpyAsync" (dst: u64, src: u64, bytes: usize, stream: Stream);
    /// Copies from host to device.
    raw memcpy_htod_async = "cuMemcpyHtoDAsync_v2" (dst: u64, src: *const c_void, bytes: usize, stream: Stream);
    /// Copies from device to host.
    raw memcpy_dtoh_async = "cuMemcpyDtoHAsync_v2" (dst: *mut c_void, src: u64, bytes: usize, stream: Stream);
    /// Copies from device to device.
    raw memcpy_dtod_async = "cuMemcpyDtoDAsync_v2" (dst: u64, src: u64, bytes: usize, stream: Stream);
    /// Copies between two contexts, with or without peer access.
    raw memcpy_peer_async = "cuMemcpyPeerAsync"
        (dst: u64, dst_context: Context, src: u64, src_context: Context, bytes: usize, stream: Stream);
    /// Copies without an order among them.
    raw memcpy_batch_async = "cuMemcpyBatchAsync_v2"
        (dsts: *mut u64, srcs: *mut u64, sizes: *mut usize, count: usize, attributes: *mut BatchAttributes,
         firsts: *mut usize, attribute_count: usize, stream: Stream);
    /// The same as CUDA 12.8 has it, which names the copy that failed.
    raw memcpy_batch_async_12 = "cuMemcpyBatchAsync"
        (dsts: *mut u64, srcs: *mut u64, sizes: *mut usize, count: usize, attributes: *mut BatchAttributes,
         firsts: *mut usize, attribute_count: usize, failed: *mut usize, stream: Stream);
    /// Copies rows.
    raw memcpy_2d_async = "cuMemcpy2DAsync_v2" (copy: *const Memcpy2d, stream: Stream);
    /// Makes an empty graph.
    safe graph_create = "cuGraphCreate" (graph: &mut GraphHandle, flags: u32);
    /// Destroys a graph with its nodes; what was instantiated from it stays.
    raw graph_destroy = "cuGraphDestroy" (graph: GraphHandle);
    /// Adds a copy, which an engine of the context's device makes.
    raw graph_add_memcpy_node = "cuGraphAddMemcpyNode"
        (node: *mut GraphNode, graph: GraphHandle, dependencies: *const GraphNode, count: usize,
         copy: *const Memcpy3d, context: Context);
    /// Adds the recording of an event.
    raw graph_add_event_record_node = "cuGraphAddEventRecordNode"
        (node: *mut GraphNode, graph: GraphHandle, dependencies: *const GraphNode, count: usize, event: Event);
    /// Adds a wait for what an event stands for when the graph is launched.
    raw graph_add_event_wait_node = "cuGraphAddEventWaitNode"
        (node: *mut GraphNode, graph: GraphHandle, dependencies: *const GraphNode, count: usize, event: Event);
    /// Makes a graph ready to be launched.
    safe graph_instantiate = "cuGraphInstantiateWithFlags" (exec: &mut GraphExec, graph: GraphHandle, flags: u64);
    /// Changes a copy for the launches to come.
    raw graph_exec_memcpy_node_set_params = "cuGraphExecMemcpyNodeSetParams"
        (exec: GraphExec, node: GraphNode, copy: *const Memcpy3d, context: Context);
    /// Launches a graph in the order of a stream.
    raw graph_launch = "cuGraphLaunch" (exec: GraphExec, stream: Stream);
    /// Destroys what was instantiated.
    raw graph_exec_destroy = "cuGraphExecDestroy" (exec: GraphExec);
    /// Sets bytes of device memory.
    raw memset_d8_async = "cuMemsetD8Async" (dst: u64, value: u8, bytes: usize, stream: Stream);
}

/// The table, or null: before [`arm`], without a driver, and in forked children.
static DRIVER: AtomicPtr<Driver> = AtomicPtr::new(std::ptr::null_mut());
/// Set in a forked child: the driver does not survive a fork, so a child never gets the table again.
static FORKED: AtomicBool = AtomicBool::new(false);
const LIBRARY: &CStr = c"libcuda.so.1";

/// The driver, if [`arm`] or [`look_again`] found one. A load and a test.
#[inline]
pub fn driver() -> Option<&'static Driver> {
    // SAFETY: the pointer is null or from `Box::leak`, published by a release store.
    unsafe { DRIVER.load(Ordering::Acquire).as_ref() }
}

/// The driver, or the error that says there is none.
pub(super) fn required() -> Result<&'static Driver> {
    driver().ok_or(Error::NoDriver)
}

/// Finds the driver: the one in the process already, else by the system's search path. Loading it neither
/// initializes it nor touches a device. Returns whether there is one.
pub fn arm() -> bool {
    find(&[libc::RTLD_NOLOAD, 0])
}

/// Looks for a driver that the program has loaded since (from an unusual path, say). Loads nothing, and costs
/// almost nothing if no library has been loaded since the last look.
pub fn look_again() -> bool {
    static SEEN: AtomicU64 = AtomicU64::new(0);
    if driver().is_some() {
        return true;
    }
    let mut loaded = 0u64;
    // SAFETY: the call-back is called before the function returns, with the pointer given here.
    unsafe { libc::dl_iterate_phdr(Some(count_loads), (&raw mut loaded).cast()) };
    SEEN.swap(loaded, Ordering::Relaxed) != loaded && find(&[libc::RTLD_NOLOAD])
}

/// Stores how many libraries the process has ever loaded, and stops at the first object.
unsafe extern "C" fn count_loads(
    info: *mut libc::dl_phdr_info,
    _size: usize,
    loaded: *mut c_void,
) -> i32 {
    // SAFETY: the loader passes a valid record, and the caller a pointer to a live word.
    unsafe { *loaded.cast::<u64>() = (*info).dlpi_adds };
    1
}

fn find(extra_flags: &[i32]) -> bool {
    if driver().is_some() {
        return true;
    }
    if FORKED.load(Ordering::Relaxed) {
        return false;
    }
    for extra in extra_flags {
        // SAFETY: a NUL-terminated name; the library's constructors are those any CUDA program runs.
        let library =
            unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_LAZY | libc::RTLD_LOCAL | extra) };
        if !library.is_null() {
            publish(library);
            return driver().is_some();
        }
    }
    false
}

/// Without these the library can tell nothing about memory, or move nothing from or to it. Every driver of
/// CUDA 6 and later has them.
const BASIC: [&str; 11] = [
    "cuCtxGetCurrent",
    "cuCtxPushCurrent_v2",
    "cuCtxPopCurrent_v2",
    "cuPointerGetAttributes",
    "cuStreamCreate",
    "cuStreamQuery",
    "cuEventCreate",
    "cuEventRecord",
    "cuEventQuery",
    "cuEventDestroy_v2",
    "cuMemcpyAsync",
];

/// Makes the table out of a library, which stays loaded from now on.
fn publish(library: *mut c_void) {
    // SAFETY: `library` came from `dlopen` and is never closed.
    let table = Driver::resolve(|name| unsafe { libc::dlsym(library, name.as_ptr()) });
    let coverage = table.coverage();
    let lacks = |name: &&&'static str| coverage.contains(&(**name, false));
    if let Some(absent) = BASIC.iter().find(lacks) {
        log::warn!(
            "libcuda.so.1 lacks {absent}: device memory is not recognized, and every message stays native; use a newer driver"
        );
        return;
    }
    static FORK_HANDLER: Once = Once::new();
    FORK_HANDLER.call_once(|| {
        // SAFETY: the handler only stores to atomics, which is allowed in a child of a threaded process.
        unsafe { libc::pthread_atfork(None, None, Some(forget_in_child)) };
    });
    let table = Box::into_raw(Box::new(table));
    if DRIVER
        .compare_exchange(
            std::ptr::null_mut(),
            table,
            Ordering::Release,
            Ordering::Relaxed,
        )
        .is_err()
    {
        // SAFETY: another thread was first, so this table was never shared.
        drop(unsafe { Box::from_raw(table) });
    }
}

/// Whether the driver is the simulated one: only that one has a clock to read.
#[must_use]
pub fn is_simulated() -> bool {
    find_clock().is_some()
}

/// PCI address of a device, as the driver writes it.
#[must_use]
pub fn pci_address(device: Device) -> Option<String> {
    let mut text = [0u8; 32];
    let driver = required().ok()?;
    // SAFETY: the driver writes at most 31 characters and a NUL.
    unsafe { driver.device_get_pci_bus_id(text.as_mut_ptr().cast(), 31, device) }.ok()?;
    let text = CStr::from_bytes_until_nul(&text).ok()?;
    Some(text.to_str().ok()?.to_owned())
}

/// Version of the driver's interface, 0 if it does not tell.
#[must_use]
pub fn version() -> i32 {
    let mut version = 0;
    let asked = required().and_then(|driver| driver.driver_get_version(&mut version));
    asked.map_or(0, |()| version)
}

/// Whether this is a child forked after the driver was found.
pub(super) fn is_forked_child() -> bool {
    FORKED.load(Ordering::Relaxed)
}

/// From now on this process has no driver, whether or not one is there: for an engine that takes no message.
pub fn stay_away() {
    forget_in_child();
}

extern "C" fn forget_in_child() {
    FORKED.store(true, Ordering::Relaxed);
    DRIVER.store(std::ptr::null_mut(), Ordering::Release);
}

/// Which text of an error.
#[derive(Clone, Copy)]
pub(super) enum Text {
    Name,
    Description,
}

type Clock = unsafe extern "C" fn() -> u64;

/// Nanoseconds by the clock on which driver calls take time. A driver in software may have a clock of its
/// own, which stands still while the machine's runs; otherwise it is the machine's.
#[must_use]
pub fn clock_ns() -> u64 {
    static OWN: OnceLock<Option<Clock>> = OnceLock::new();
    static START: OnceLock<Instant> = OnceLock::new();
    match OWN.get_or_init(find_clock) {
        Some(own) => read(*own),
        None => START.get_or_init(Instant::now).elapsed().as_nanos() as u64,
    }
}

/// The same of a driver in software. `None`: the driver is a GPU's, or none is loaded yet.
#[must_use]
pub fn simulated_ns() -> Option<u64> {
    // Apart from the clock above, which is chosen once, when a driver is there.
    static OWN: OnceLock<Clock> = OnceLock::new();
    if FORKED.load(Ordering::Relaxed) {
        return None;
    }
    if OWN.get().is_none() {
        let _ = OWN.set(find_clock()?);
    }
    OWN.get().copied().map(read)
}

fn read(clock: Clock) -> u64 {
    // SAFETY: takes nothing, and may be called at any time once the driver is loaded.
    unsafe { clock() }
}

/// The clock of a driver in software.
fn find_clock() -> Option<Clock> {
    // SAFETY: NUL-terminated names; nothing is loaded that is not loaded already.
    let address = unsafe {
        let library = libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_LAZY | libc::RTLD_NOLOAD);
        if library.is_null() {
            return None;
        }
        libc::dlsym(library, c"simcuda_clock_ns".as_ptr())
    };
    // SAFETY: the simulated driver declares `uint64_t simcuda_clock_ns(void)`, and stays loaded.
    (!address.is_null()).then(|| unsafe { std::mem::transmute::<*mut c_void, Clock>(address) })
}

/// The driver's text for a code.
pub(super) fn error_text(code: Code, which: Text) -> Option<String> {
    let driver = driver()?;
    let mut text = std::ptr::null();
    match which {
        Text::Name => driver.get_error_name(code, &mut text),
        Text::Description => driver.get_error_string(code, &mut text),
    }
    .ok()?;
    // SAFETY: null, or a string that the driver never frees.
    unsafe { owned_text(text) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::types::code;

    unsafe extern "C" fn refuses() -> Code {
        code::NOT_SUPPORTED
    }

    #[test]
    fn absent_functions_are_ordinary_errors() {
        let empty = Driver::resolve(|_| std::ptr::null_mut());
        // SAFETY: nothing is called.
        let result = unsafe { empty.ctx_push_current(Context::NULL) };
        assert_eq!(result, Err(Error::Missing("cuCtxPushCurrent_v2")));
        assert!(empty.coverage().iter().all(|(_, found)| !found));
    }

    #[test]
    fn what_is_basic_is_in_the_table() {
        let table = Driver::default().coverage();
        for name in BASIC {
            assert!(table.iter().any(|(known, _)| *known == name), "{name}");
        }
    }

    #[test]
    fn an_older_name_serves_where_the_newer_is_absent() {
        let table = Driver::resolve(|name| match name.to_bytes() {
            b"cuDeviceGetUuid" => refuses as *mut c_void,
            _ => std::ptr::null_mut(),
        });
        let mut uuid = [0; 16];
        let error = table.device_get_uuid(&mut uuid, 0).unwrap_err();
        assert_eq!(
            error,
            Error::Driver {
                function: "cuDeviceGetUuid_v2",
                code: code::NOT_SUPPORTED
            }
        );
    }

    #[test]
    fn every_name_is_a_driver_function_once() {
        let names: Vec<_> = Driver::default()
            .coverage()
            .into_iter()
            .map(|(name, _)| name)
            .collect();
        let distinct: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(distinct.len(), names.len());
        assert!(names
            .iter()
            .all(|name| name.starts_with("cu") && !name.contains('\0')));
    }
}
