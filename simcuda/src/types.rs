//! C types and constants of the driver API, as far as this driver reads them.
//!
//! Layouts follow the 64-bit `cuda.h`; names and meanings are the vendor's.
#![allow(missing_docs, non_camel_case_types, non_snake_case)]

use core::ffi::{c_char, c_int, c_uint, c_void};

pub type CUresult = c_int;
pub type CUdevice = c_int;
pub type CUdeviceptr = u64;
/// Every opaque handle is an integer the driver looks up, so a stale one is an error and no crash.
pub type Handle = usize;
pub type CUcontext = Handle;
pub type CUstream = Handle;
pub type CUevent = Handle;
pub type CUmodule = Handle;
pub type CUlibrary = Handle;
pub type CUfunction = Handle;
pub type CUgraph = Handle;
pub type CUgraphNode = Handle;
pub type CUgraphExec = Handle;
pub type CUmemoryPool = Handle;
pub type CUmemGenericAllocationHandle = u64;
pub type CUhostFn = Option<unsafe extern "C" fn(*mut c_void)>;
pub type CUstreamCallback = Option<unsafe extern "C" fn(CUstream, CUresult, *mut c_void)>;
pub type CUoccupancyB2DSize = Option<unsafe extern "C" fn(c_int) -> usize>;

pub const STREAM_LEGACY: CUstream = 1;
pub const STREAM_PER_THREAD: CUstream = 2;

pub const MEMORYTYPE_HOST: c_uint = 1;
pub const MEMORYTYPE_DEVICE: c_uint = 2;
pub const MEMORYTYPE_ARRAY: c_uint = 3;
pub const MEMORYTYPE_UNIFIED: c_uint = 4;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUuuid {
    pub bytes: [u8; 16],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUipcHandle {
    pub reserved: [u8; 64],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_MEMCPY2D {
    pub srcXInBytes: usize,
    pub srcY: usize,
    pub srcMemoryType: c_uint,
    pub srcHost: *const c_void,
    pub srcDevice: CUdeviceptr,
    pub srcArray: usize,
    pub srcPitch: usize,
    pub dstXInBytes: usize,
    pub dstY: usize,
    pub dstMemoryType: c_uint,
    pub dstHost: *mut c_void,
    pub dstDevice: CUdeviceptr,
    pub dstArray: usize,
    pub dstPitch: usize,
    pub WidthInBytes: usize,
    pub Height: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_MEMCPY3D {
    pub srcXInBytes: usize,
    pub srcY: usize,
    pub srcZ: usize,
    pub srcLOD: usize,
    pub srcMemoryType: c_uint,
    pub srcHost: *const c_void,
    pub srcDevice: CUdeviceptr,
    pub srcArray: usize,
    pub reserved0: *mut c_void,
    pub srcPitch: usize,
    pub srcHeight: usize,
    pub dstXInBytes: usize,
    pub dstY: usize,
    pub dstZ: usize,
    pub dstLOD: usize,
    pub dstMemoryType: c_uint,
    pub dstHost: *mut c_void,
    pub dstDevice: CUdeviceptr,
    pub dstArray: usize,
    pub reserved1: *mut c_void,
    pub dstPitch: usize,
    pub dstHeight: usize,
    pub WidthInBytes: usize,
    pub Height: usize,
    pub Depth: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUmemLocation {
    pub kind: c_uint,
    pub id: c_int,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUmemAccessDesc {
    pub location: CUmemLocation,
    pub flags: c_uint,
}

pub const MEM_ALLOCATION_TYPE_PINNED: c_uint = 1;

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUmemAllocationProp {
    pub kind: c_uint,
    pub requestedHandleTypes: c_uint,
    pub location: CUmemLocation,
    pub win32HandleMetaData: *mut c_void,
    pub allocFlags: [u8; 8],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUmemPoolProps {
    pub allocType: c_uint,
    pub handleTypes: c_uint,
    pub location: CUmemLocation,
    pub win32SecurityAttributes: *mut c_void,
    pub maxSize: usize,
    pub usage: u16,
    pub reserved: [u8; 54],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUmemcpyAttributes {
    pub srcAccessOrder: c_uint,
    pub srcLocHint: CUmemLocation,
    pub dstLocHint: CUmemLocation,
    pub flags: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_KERNEL_NODE_PARAMS_v1 {
    pub func: CUfunction,
    pub gridDimX: c_uint,
    pub gridDimY: c_uint,
    pub gridDimZ: c_uint,
    pub blockDimX: c_uint,
    pub blockDimY: c_uint,
    pub blockDimZ: c_uint,
    pub sharedMemBytes: c_uint,
    pub kernelParams: *mut *mut c_void,
    pub extra: *mut *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_KERNEL_NODE_PARAMS_v2 {
    pub v1: CUDA_KERNEL_NODE_PARAMS_v1,
    pub kern: usize,
    pub ctx: CUcontext,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_MEMSET_NODE_PARAMS {
    pub dst: CUdeviceptr,
    pub pitch: usize,
    pub value: c_uint,
    pub elementSize: c_uint,
    pub width: usize,
    pub height: usize,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_HOST_NODE_PARAMS {
    pub func: CUhostFn,
    pub userData: *mut c_void,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_BATCH_MEM_OP_NODE_PARAMS {
    pub ctx: CUcontext,
    pub count: c_uint,
    pub paramArray: *mut CUstreamBatchMemOpParams,
    pub flags: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUDA_GRAPH_INSTANTIATE_PARAMS {
    pub flags: u64,
    pub hUploadStream: CUstream,
    pub hErrNode_out: CUgraphNode,
    pub result_out: c_uint,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUgraphExecUpdateResultInfo {
    pub result: c_uint,
    pub errorNode: CUgraphNode,
    pub errorFromNode: CUgraphNode,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUlaunchConfig {
    pub gridDimX: c_uint,
    pub gridDimY: c_uint,
    pub gridDimZ: c_uint,
    pub blockDimX: c_uint,
    pub blockDimY: c_uint,
    pub blockDimZ: c_uint,
    pub sharedMemBytes: c_uint,
    pub hStream: CUstream,
    pub attrs: *mut c_void,
    pub numAttrs: c_uint,
}

/// The wait and write members of the C union share one layout; 48 bytes in all.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUstreamBatchMemOpParams {
    pub operation: c_uint,
    pub address: CUdeviceptr,
    pub value: u64,
    pub flags: c_uint,
    pub alias: CUdeviceptr,
    pub pad: u64,
}

pub const MEM_OP_WAIT_32: c_uint = 1;
pub const MEM_OP_WRITE_32: c_uint = 2;
pub const MEM_OP_FLUSH: c_uint = 3;
pub const MEM_OP_WAIT_64: c_uint = 4;
pub const MEM_OP_WRITE_64: c_uint = 5;
pub const MEM_OP_BARRIER: c_uint = 6;

/// A pointer that the C caller lets the driver read a string from.
pub type CString = *const c_char;

#[cfg(test)]
mod tests {
    use super::*;
    use core::mem::size_of;

    /// Sizes of the same structs in the vendor's 64-bit headers.
    #[test]
    fn layouts_match_the_c_headers() {
        assert_eq!(size_of::<CUDA_MEMCPY2D>(), 128);
        assert_eq!(size_of::<CUDA_MEMCPY3D>(), 200);
        assert_eq!(size_of::<CUDA_KERNEL_NODE_PARAMS_v1>(), 56);
        assert_eq!(size_of::<CUDA_KERNEL_NODE_PARAMS_v2>(), 72);
        assert_eq!(size_of::<CUstreamBatchMemOpParams>(), 48);
        assert_eq!(size_of::<CUmemcpyAttributes>(), 24);
        assert_eq!(size_of::<CUlaunchConfig>(), 56);
        assert_eq!(size_of::<CUmemAccessDesc>(), 12);
        assert_eq!(size_of::<CUmemAllocationProp>(), 32);
        assert_eq!(size_of::<CUmemPoolProps>(), 88);
    }
}
