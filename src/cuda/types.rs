//! Handles, structures and constants of the driver's C interface, as far as the engine uses them.

use std::ffi::c_void;

/// What a driver function returns (`CUresult`).
pub type Code = i32;

/// Values of [`Code`] that the engine distinguishes.
#[allow(missing_docs)]
pub mod code {
    use super::Code;
    pub const SUCCESS: Code = 0;
    pub const INVALID_VALUE: Code = 1;
    pub const OUT_OF_MEMORY: Code = 2;
    pub const NOT_INITIALIZED: Code = 3;
    pub const DEINITIALIZED: Code = 4;
    pub const INVALID_DEVICE: Code = 101;
    pub const INVALID_CONTEXT: Code = 201;
    pub const MAP_FAILED: Code = 205;
    pub const ALREADY_MAPPED: Code = 208;
    pub const PEER_ACCESS_UNSUPPORTED: Code = 217;
    pub const INVALID_HANDLE: Code = 400;
    pub const NOT_READY: Code = 600;
    pub const ILLEGAL_ADDRESS: Code = 700;
    pub const PEER_ACCESS_ALREADY_ENABLED: Code = 704;
    pub const CONTEXT_IS_DESTROYED: Code = 709;
    pub const HOST_MEMORY_ALREADY_REGISTERED: Code = 712;
    pub const HOST_MEMORY_NOT_REGISTERED: Code = 713;
    pub const LAUNCH_FAILED: Code = 719;
    pub const NOT_SUPPORTED: Code = 801;
    pub const UNKNOWN: Code = 999;
}

macro_rules! handles {
    ($($(#[$doc:meta])* $name:ident)*) => { $(
        $(#[$doc])*
        ///
        /// Only an address, which is never dereferenced here. Invariant: it is null, or came from the driver and has not been
        /// destroyed; a context may have been, by the program, of which the driver says so.
        #[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
        #[repr(transparent)]
        pub struct $name(usize);

        impl $name {
            /// The null handle.
            pub const NULL: $name = $name(0);

            /// A handle that the driver has told as a number.
            ///
            /// # Safety
            /// It is as the type's invariant has it.
            #[must_use]
            pub unsafe fn told(number: usize) -> $name {
                $name(number)
            }

            /// Whether this is the null handle.
            #[must_use]
            pub fn is_null(self) -> bool {
                self.0 == 0
            }
        }
    )* };
}

handles! {
    /// A context (`CUcontext`).
    Context
    /// A stream (`CUstream`).
    Stream
    /// An event (`CUevent`).
    Event
    /// A graph (`CUgraph`).
    GraphHandle
    /// A node of a graph (`CUgraphNode`).
    GraphNode
    /// A graph that can be launched (`CUgraphExec`).
    GraphExec
}

/// A device handle (`CUdevice`), which a process gets for an ordinal.
pub type Device = i32;

/// A 16-byte device identity, the same in every process of a node (`CUuuid`).
pub type Uuid = [u8; 16];

/// An identity as nvidia-smi prints it.
#[must_use]
pub fn uuid_text(uuid: &Uuid) -> String {
    let mut text = String::from("GPU");
    for (at, byte) in uuid.iter().enumerate() {
        if [0, 4, 6, 8, 10].contains(&at) {
            text.push('-');
        }
        text += &format!("{byte:02x}");
    }
    text
}

/// An exported allocation (`CUipcMemHandle`).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(C)]
pub struct IpcHandle(pub [u8; 64]);

/// Memory types (`CUmemorytype`).
#[allow(missing_docs)]
pub mod memory_type {
    pub const UNREGISTERED: u32 = 0;
    pub const HOST: u32 = 1;
    pub const DEVICE: u32 = 2;
    pub const UNIFIED: u32 = 4;
}

/// Whether contexts of a device are made through MPS (`CU_DEVICE_ATTRIBUTE_MPS_ENABLED`).
pub const DEVICE_MPS_ENABLED: i32 = 133;

/// The NUMA node of the host that is nearest to a device (`CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID`).
pub const DEVICE_HOST_NUMA: i32 = 134;

/// Attributes of a pointer (`CUpointer_attribute`).
#[allow(missing_docs)]
pub mod attribute {
    pub const CONTEXT: i32 = 1;
    pub const MEMORY_TYPE: i32 = 2;
    pub const SYNC_MEMOPS: i32 = 6;
    pub const BUFFER_ID: i32 = 7;
    pub const IS_MANAGED: i32 = 8;
    pub const DEVICE_ORDINAL: i32 = 9;
    pub const IS_LEGACY_CUDA_IPC_CAPABLE: i32 = 10;
    pub const RANGE_START_ADDR: i32 = 11;
    pub const RANGE_SIZE: i32 = 12;
    pub const ALLOWED_HANDLE_TYPES: i32 = 14;
    pub const MEMPOOL_HANDLE: i32 = 17;
}

/// A file as the handle of physical memory (`CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`).
pub const HANDLE_TYPE_FILE: u32 = 1;

/// Physical memory that is to be made (`CUmemAllocationProp`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct MemProperties {
    kind: u32,
    handle_types: u32,
    location: u32,
    device: Device,
    win32: usize,
    flags: [u8; 8],
}

impl MemProperties {
    /// Of a device, and exportable by files.
    pub fn exportable(device: Device) -> MemProperties {
        const PINNED: u32 = 1;
        const ON_DEVICE: u32 = 1;
        MemProperties {
            kind: PINNED,
            handle_types: HANDLE_TYPE_FILE,
            location: ON_DEVICE,
            device,
            win32: 0,
            flags: [0; 8],
        }
    }
}

/// Who may do what with mapped memory (`CUmemAccessDesc`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct MemAccess {
    location: u32,
    device: Device,
    flags: u32,
}

impl MemAccess {
    /// A device reads and writes it.
    #[must_use]
    pub fn read_write(device: Device) -> MemAccess {
        const OF_A_DEVICE: u32 = 1;
        const READ_WRITE: u32 = 3;
        MemAccess {
            location: OF_A_DEVICE,
            device,
            flags: READ_WRITE,
        }
    }
}

/// Capture modes of a thread (`CUstreamCaptureMode`).
pub const CAPTURE_MODE_RELAXED: i32 = 2;
/// A stream that does not synchronize with stream 0.
pub const STREAM_NON_BLOCKING: u32 = 1;
/// The legacy default stream, whatever stream 0 means to the program.
pub const STREAM_LEGACY: Stream = Stream(1);
/// The default stream of the calling thread.
pub const STREAM_PER_THREAD: Stream = Stream(2);
/// An event with a time stamp.
pub const EVENT_DEFAULT: u32 = 0;
/// An event without a time stamp, the cheapest kind.
pub const EVENT_DISABLE_TIMING: u32 = 2;
/// Opening an IPC handle enables peer access if it must.
pub const IPC_LAZY_ENABLE_PEER_ACCESS: u32 = 1;
/// Registered host memory counts as pinned in every context of the process.
pub const HOST_REGISTER_PORTABLE: u32 = 1;
/// Registered host memory gets a device address (which memory operations write to).
pub const HOST_REGISTER_DEVICEMAP: u32 = 2;

/// The sources of a batch are read in the order of the stream (`CU_MEMCPY_SRC_ACCESS_ORDER_STREAM`).
pub const SOURCE_ORDER_STREAM: u32 = 1;

/// How copies of a batch are made (`CUmemcpyAttributes`).
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
#[allow(missing_docs)]
pub struct BatchAttributes {
    pub source_order: u32,
    /// Types and numbers of the places of source and destination: hints for managed memory.
    pub locations: [i32; 4],
    pub flags: u32,
}

/// A strided copy (`CUDA_MEMCPY2D`).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Memcpy2d {
    pub src_x_in_bytes: usize,
    pub src_y: usize,
    pub src_memory_type: u32,
    pub src_host: *const c_void,
    pub src_device: u64,
    pub src_array: *mut c_void,
    pub src_pitch: usize,
    pub dst_x_in_bytes: usize,
    pub dst_y: usize,
    pub dst_memory_type: u32,
    pub dst_host: *mut c_void,
    pub dst_device: u64,
    pub dst_array: *mut c_void,
    pub dst_pitch: usize,
    pub width_in_bytes: usize,
    pub height: usize,
}

/// A copy of planes (`CUDA_MEMCPY3D`), as nodes of graphs have it.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
#[allow(missing_docs)]
pub struct Memcpy3d {
    pub src_x_in_bytes: usize,
    pub src_y: usize,
    pub src_z: usize,
    pub src_lod: usize,
    pub src_memory_type: u32,
    pub src_host: *const c_void,
    pub src_device: u64,
    pub src_array: *mut c_void,
    pub reserved_0: *mut c_void,
    pub src_pitch: usize,
    pub src_height: usize,
    pub dst_x_in_bytes: usize,
    pub dst_y: usize,
    pub dst_z: usize,
    pub dst_lod: usize,
    pub dst_memory_type: u32,
    pub dst_host: *mut c_void,
    pub dst_device: u64,
    pub dst_array: *mut c_void,
    pub reserved_1: *mut c_void,
    pub dst_pitch: usize,
    pub dst_height: usize,
    pub width_in_bytes: usize,
    pub height: usize,
    pub depth: usize,
}

impl Memcpy3d {
    /// Contiguous bytes between addresses of the unified address space.
    #[must_use]
    pub fn linear(dst: u64, src: u64, bytes: usize) -> Memcpy3d {
        Memcpy3d {
            src_x_in_bytes: 0,
            src_y: 0,
            src_z: 0,
            src_lod: 0,
            src_memory_type: memory_type::UNIFIED,
            src_host: std::ptr::null(),
            src_device: src,
            src_array: std::ptr::null_mut(),
            reserved_0: std::ptr::null_mut(),
            src_pitch: bytes,
            src_height: 1,
            dst_x_in_bytes: 0,
            dst_y: 0,
            dst_z: 0,
            dst_lod: 0,
            dst_memory_type: memory_type::UNIFIED,
            dst_host: std::ptr::null_mut(),
            dst_device: dst,
            dst_array: std::ptr::null_mut(),
            reserved_1: std::ptr::null_mut(),
            dst_pitch: bytes,
            dst_height: 1,
            width_in_bytes: bytes,
            height: 1,
            depth: 1,
        }
    }
}
