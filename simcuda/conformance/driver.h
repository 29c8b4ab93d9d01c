/* The driver API as these programs call it: declared here, found by dlopen, so that one source runs on the simulated
 * driver and on the vendor's, and compiles where no CUDA is installed. Layouts and numbers are those of cuda.h. */
#ifndef ANABRANCH_DRIVER_H
#define ANABRANCH_DRIVER_H
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef void *CUcontext, *CUstream, *CUevent, *CUmodule, *CUlibrary, *CUfunction, *CUkernel, *CUgraph, *CUgraphNode;
typedef void *CUgraphExec, *CUmemoryPool;
typedef unsigned long long CUmemHandle;
typedef struct { char bytes[16]; } CUuuid;
typedef struct { char reserved[64]; } CUipcHandle;
typedef void (*CUhostFn)(void *);
typedef void (*CUstreamCallback)(CUstream, CUresult, void *);
typedef struct {
    size_t srcX, srcY; unsigned srcKind; const void *srcHost; CUdeviceptr srcDevice; void *srcArray; size_t srcPitch;
    size_t dstX, dstY; unsigned dstKind; void *dstHost; CUdeviceptr dstDevice; void *dstArray; size_t dstPitch;
    size_t width, height;
} Copy2D;
typedef struct {
    size_t srcX, srcY, srcZ, srcLOD; unsigned srcKind; const void *srcHost; CUdeviceptr srcDevice; void *srcArray, *r0;
    size_t srcPitch, srcHeight;
    size_t dstX, dstY, dstZ, dstLOD; unsigned dstKind; void *dstHost; CUdeviceptr dstDevice; void *dstArray, *r1;
    size_t dstPitch, dstHeight, width, height, depth;
} Copy3D;
typedef struct { CUdeviceptr dst; size_t pitch; unsigned value, element; size_t width, height; } MemsetNode;
typedef struct { CUhostFn fn; void *data; } HostNode;
typedef struct {
    CUfunction func; unsigned gx, gy, gz, bx, by, bz, shared; void **params, **extra; CUkernel kern; CUcontext ctx;
} KernelNode;
typedef struct { unsigned kind; int id; } Location;
typedef struct { Location location; unsigned flags; } AccessDesc;
typedef struct { unsigned type, handles; Location location; void *win32; unsigned char flags[8]; } AllocProp;
typedef struct {
    unsigned type, handles; Location location; void *win32; size_t max; unsigned short usage; unsigned char rest[54];
} PoolProps;
typedef struct { unsigned order; Location src, dst; unsigned flags; } CopyAttributes;
typedef struct { unsigned operation; CUdeviceptr address; uint64_t value; unsigned flags; CUdeviceptr alias; uint64_t pad; } MemOp;
typedef struct { CUcontext ctx; unsigned count; MemOp *ops; unsigned flags; } MemOpNode;

#define DRIVER_FUNCTIONS(X) \
    X(cuInit, (unsigned)) X(cuDriverGetVersion, (int *)) X(cuGetErrorName, (CUresult, const char **)) \
    X(cuGetErrorString, (CUresult, const char **)) X(cuGetProcAddress_v2, (const char *, void **, int, uint64_t, int *)) \
    X(cuDeviceGet, (CUdevice *, int)) X(cuDeviceGetCount, (int *)) X(cuDeviceGetName, (char *, int, CUdevice)) \
    X(cuDeviceGetUuid_v2, (CUuuid *, CUdevice)) X(cuDeviceTotalMem_v2, (size_t *, CUdevice)) \
    X(cuDeviceGetAttribute, (int *, int, CUdevice)) X(cuDeviceComputeCapability, (int *, int *, CUdevice)) \
    X(cuDeviceGetPCIBusId, (char *, int, CUdevice)) X(cuDeviceGetByPCIBusId, (CUdevice *, const char *)) \
    X(cuDeviceCanAccessPeer, (int *, CUdevice, CUdevice)) X(cuDeviceGetP2PAttribute, (int *, unsigned, CUdevice, CUdevice)) \
    X(cuDevicePrimaryCtxRetain, (CUcontext *, CUdevice)) X(cuDevicePrimaryCtxRelease_v2, (CUdevice)) \
    X(cuDevicePrimaryCtxReset_v2, (CUdevice)) X(cuDevicePrimaryCtxGetState, (CUdevice, unsigned *, int *)) \
    X(cuDevicePrimaryCtxSetFlags_v2, (CUdevice, unsigned)) X(cuDeviceGetExecAffinitySupport, (int *, unsigned, CUdevice)) \
    X(cuDeviceGetDefaultMemPool, (CUmemoryPool *, CUdevice)) X(cuDeviceGetMemPool, (CUmemoryPool *, CUdevice)) \
    X(cuDeviceSetMemPool, (CUdevice, CUmemoryPool)) \
    X(cuCtxCreate_v2, (CUcontext *, unsigned, CUdevice)) X(cuCtxDestroy_v2, (CUcontext)) \
    X(cuCtxPushCurrent_v2, (CUcontext)) X(cuCtxPopCurrent_v2, (CUcontext *)) X(cuCtxSetCurrent, (CUcontext)) \
    X(cuCtxGetCurrent, (CUcontext *)) X(cuCtxGetDevice, (CUdevice *)) X(cuCtxGetFlags, (unsigned *)) \
    X(cuCtxSetFlags, (unsigned)) X(cuCtxGetId, (CUcontext, unsigned long long *)) X(cuCtxSynchronize, (void)) \
    X(cuCtxGetApiVersion, (CUcontext, unsigned *)) X(cuCtxGetStreamPriorityRange, (int *, int *)) \
    X(cuCtxGetLimit, (size_t *, unsigned)) X(cuCtxSetLimit, (unsigned, size_t)) \
    X(cuCtxGetCacheConfig, (unsigned *)) X(cuCtxSetCacheConfig, (unsigned)) X(cuCtxResetPersistingL2Cache, (void)) \
    X(cuCtxGetSharedMemConfig, (unsigned *)) X(cuCtxSetSharedMemConfig, (unsigned)) \
    X(cuCtxEnablePeerAccess, (CUcontext, unsigned)) X(cuCtxDisablePeerAccess, (CUcontext)) \
    X(cuMemAlloc_v2, (CUdeviceptr *, size_t)) X(cuMemAllocPitch_v2, (CUdeviceptr *, size_t *, size_t, size_t, unsigned)) \
    X(cuMemFree_v2, (CUdeviceptr)) X(cuMemGetInfo_v2, (size_t *, size_t *)) \
    X(cuMemGetAddressRange_v2, (CUdeviceptr *, size_t *, CUdeviceptr)) X(cuMemHostAlloc, (void **, size_t, unsigned)) \
    X(cuMemAllocHost_v2, (void **, size_t)) X(cuMemFreeHost, (void *)) X(cuMemHostRegister_v2, (void *, size_t, unsigned)) \
    X(cuMemHostUnregister, (void *)) X(cuMemHostGetDevicePointer_v2, (CUdeviceptr *, void *, unsigned)) \
    X(cuMemHostGetFlags, (unsigned *, void *)) X(cuMemAllocManaged, (CUdeviceptr *, size_t, unsigned)) \
    X(cuPointerGetAttribute, (void *, unsigned, CUdeviceptr)) X(cuPointerSetAttribute, (const void *, unsigned, CUdeviceptr)) \
    X(cuPointerGetAttributes, (unsigned, unsigned *, void **, CUdeviceptr)) \
    X(cuMemcpy, (CUdeviceptr, CUdeviceptr, size_t)) X(cuMemcpyAsync, (CUdeviceptr, CUdeviceptr, size_t, CUstream)) \
    X(cuMemcpyHtoD_v2, (CUdeviceptr, const void *, size_t)) X(cuMemcpyHtoDAsync_v2, (CUdeviceptr, const void *, size_t, CUstream)) \
    X(cuMemcpyDtoH_v2, (void *, CUdeviceptr, size_t)) X(cuMemcpyDtoHAsync_v2, (void *, CUdeviceptr, size_t, CUstream)) \
    X(cuMemcpyDtoD_v2, (CUdeviceptr, CUdeviceptr, size_t)) X(cuMemcpyDtoDAsync_v2, (CUdeviceptr, CUdeviceptr, size_t, CUstream)) \
    X(cuMemcpyPeer, (CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t)) \
    X(cuMemcpyPeerAsync, (CUdeviceptr, CUcontext, CUdeviceptr, CUcontext, size_t, CUstream)) \
    X(cuMemcpy2D_v2, (const Copy2D *)) X(cuMemcpy2DUnaligned_v2, (const Copy2D *)) X(cuMemcpy2DAsync_v2, (const Copy2D *, CUstream)) \
    X(cuMemcpy3D_v2, (const Copy3D *)) X(cuMemcpy3DAsync_v2, (const Copy3D *, CUstream)) \
    X(cuMemcpyBatchAsync, (CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CopyAttributes *, size_t *, size_t, size_t *, CUstream)) \
    X(cuMemcpyBatchAsync_v2, (CUdeviceptr *, CUdeviceptr *, size_t *, size_t, CopyAttributes *, size_t *, size_t, CUstream)) \
    X(cuMemsetD8_v2, (CUdeviceptr, unsigned char, size_t)) X(cuMemsetD16_v2, (CUdeviceptr, unsigned short, size_t)) \
    X(cuMemsetD32_v2, (CUdeviceptr, unsigned, size_t)) X(cuMemsetD8Async, (CUdeviceptr, unsigned char, size_t, CUstream)) \
    X(cuMemsetD16Async, (CUdeviceptr, unsigned short, size_t, CUstream)) X(cuMemsetD32Async, (CUdeviceptr, unsigned, size_t, CUstream)) \
    X(cuMemsetD2D8_v2, (CUdeviceptr, size_t, unsigned char, size_t, size_t)) \
    X(cuMemsetD2D16_v2, (CUdeviceptr, size_t, unsigned short, size_t, size_t)) \
    X(cuMemsetD2D32_v2, (CUdeviceptr, size_t, unsigned, size_t, size_t)) \
    X(cuMemsetD2D8Async, (CUdeviceptr, size_t, unsigned char, size_t, size_t, CUstream)) \
    X(cuStreamCreate, (CUstream *, unsigned)) X(cuStreamCreateWithPriority, (CUstream *, unsigned, int)) \
    X(cuStreamDestroy_v2, (CUstream)) X(cuStreamQuery, (CUstream)) X(cuStreamSynchronize, (CUstream)) \
    X(cuStreamWaitEvent, (CUstream, CUevent, unsigned)) X(cuStreamAddCallback, (CUstream, CUstreamCallback, void *, unsigned)) \
    X(cuLaunchHostFunc, (CUstream, CUhostFn, void *)) X(cuStreamGetCtx, (CUstream, CUcontext *)) \
    X(cuStreamGetFlags, (CUstream, unsigned *)) X(cuStreamGetPriority, (CUstream, int *)) \
    X(cuStreamGetId, (CUstream, unsigned long long *)) X(cuStreamGetDevice, (CUstream, CUdevice *)) \
    X(cuStreamAttachMemAsync, (CUstream, CUdeviceptr, size_t, unsigned)) \
    X(cuStreamBeginCapture_v2, (CUstream, unsigned)) X(cuStreamEndCapture, (CUstream, CUgraph *)) \
    X(cuStreamBeginCaptureToGraph, (CUstream, CUgraph, const CUgraphNode *, const void *, size_t, unsigned)) \
    X(cuStreamIsCapturing, (CUstream, unsigned *)) X(cuThreadExchangeStreamCaptureMode, (unsigned *)) \
    X(cuStreamGetCaptureInfo_v2, (CUstream, unsigned *, unsigned long long *, CUgraph *, const CUgraphNode **, size_t *)) \
    X(cuStreamUpdateCaptureDependencies, (CUstream, CUgraphNode *, size_t, unsigned)) \
    X(cuStreamWriteValue32_v2, (CUstream, CUdeviceptr, uint32_t, unsigned)) \
    X(cuStreamWriteValue64_v2, (CUstream, CUdeviceptr, uint64_t, unsigned)) \
    X(cuStreamWaitValue32_v2, (CUstream, CUdeviceptr, uint32_t, unsigned)) \
    X(cuStreamWaitValue64_v2, (CUstream, CUdeviceptr, uint64_t, unsigned)) \
    X(cuStreamBatchMemOp_v2, (CUstream, unsigned, MemOp *, unsigned)) \
    X(cuEventCreate, (CUevent *, unsigned)) X(cuEventDestroy_v2, (CUevent)) X(cuEventRecord, (CUevent, CUstream)) \
    X(cuEventRecordWithFlags, (CUevent, CUstream, unsigned)) X(cuEventQuery, (CUevent)) X(cuEventSynchronize, (CUevent)) \
    X(cuEventElapsedTime, (float *, CUevent, CUevent)) \
    X(cuGraphCreate, (CUgraph *, unsigned)) X(cuGraphDestroy, (CUgraph)) X(cuGraphClone, (CUgraph *, CUgraph)) \
    X(cuGraphAddEmptyNode, (CUgraphNode *, CUgraph, const CUgraphNode *, size_t)) \
    X(cuGraphAddMemcpyNode, (CUgraphNode *, CUgraph, const CUgraphNode *, size_t, const Copy3D *, CUcontext)) \
    X(cuGraphAddMemsetNode, (CUgraphNode *, CUgraph, const CUgraphNode *, size_t, const MemsetNode *, CUcontext)) \
    X(cuGraphAddHostNode, (CUgraphNode *, CUgraph, const CUgraphNode *, size_t, const HostNode *)) \
    X(cuGraphAddKernelNode_v2, (CUgraphNode *, CUgraph, const CUgraphNode *, size_t, const KernelNode *)) \
    X(cuGraphAddBatchMemOpNode, (CUgraphNode *, CUgraph, const CUgraphNode *, size_t, const MemOpNode *)) \
    X(cuGraphAddEventRecordNode, (CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUevent)) \
    X(cuGraphAddEventWaitNode, (CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUevent)) \
    X(cuGraphAddChildGraphNode, (CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUgraph)) \
    X(cuGraphAddDependencies, (CUgraph, const CUgraphNode *, const CUgraphNode *, size_t)) \
    X(cuGraphRemoveDependencies, (CUgraph, const CUgraphNode *, const CUgraphNode *, size_t)) \
    X(cuGraphDestroyNode, (CUgraphNode)) X(cuGraphGetNodes, (CUgraph, CUgraphNode *, size_t *)) \
    X(cuGraphGetRootNodes, (CUgraph, CUgraphNode *, size_t *)) X(cuGraphGetEdges, (CUgraph, CUgraphNode *, CUgraphNode *, size_t *)) \
    X(cuGraphNodeGetType, (CUgraphNode, unsigned *)) X(cuGraphNodeFindInClone, (CUgraphNode *, CUgraphNode, CUgraph)) \
    X(cuGraphNodeGetDependencies, (CUgraphNode, CUgraphNode *, size_t *)) \
    X(cuGraphMemcpyNodeSetParams, (CUgraphNode, const Copy3D *)) X(cuGraphMemsetNodeSetParams, (CUgraphNode, const MemsetNode *)) \
    X(cuGraphExecMemcpyNodeSetParams, (CUgraphExec, CUgraphNode, const Copy3D *, CUcontext)) \
    X(cuGraphExecMemsetNodeSetParams, (CUgraphExec, CUgraphNode, const MemsetNode *, CUcontext)) \
    X(cuGraphExecUpdate_v2, (CUgraphExec, CUgraph, void *)) X(cuGraphExecGetFlags, (CUgraphExec, uint64_t *)) \
    X(cuGraphInstantiateWithFlags, (CUgraphExec *, CUgraph, unsigned long long)) X(cuGraphUpload, (CUgraphExec, CUstream)) \
    X(cuGraphLaunch, (CUgraphExec, CUstream)) X(cuGraphExecDestroy, (CUgraphExec)) \
    X(cuModuleLoadData, (CUmodule *, const void *)) X(cuModuleLoad, (CUmodule *, const char *)) X(cuModuleUnload, (CUmodule)) \
    X(cuModuleGetFunction, (CUfunction *, CUmodule, const char *)) \
    X(cuModuleGetGlobal_v2, (CUdeviceptr *, size_t *, CUmodule, const char *)) \
    X(cuModuleGetFunctionCount, (unsigned *, CUmodule)) X(cuFuncGetAttribute, (int *, int, CUfunction)) \
    X(cuFuncSetAttribute, (CUfunction, int, int)) X(cuFuncGetName, (const char **, CUfunction)) \
    X(cuFuncGetParamInfo, (CUfunction, size_t, size_t *, size_t *)) \
    X(cuLibraryLoadData, (CUlibrary *, const void *, void *, void **, unsigned, void *, void **, unsigned)) \
    X(cuLibraryUnload, (CUlibrary)) X(cuLibraryGetKernel, (CUkernel *, CUlibrary, const char *)) \
    X(cuKernelGetFunction, (CUfunction *, CUkernel)) \
    X(cuLaunchKernel, (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **)) \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessor, (int *, CUfunction, int, size_t)) \
    X(cuMemPoolCreate, (CUmemoryPool *, const PoolProps *)) X(cuMemPoolDestroy, (CUmemoryPool)) X(cuMemPoolTrimTo, (CUmemoryPool, size_t)) \
    X(cuMemPoolSetAttribute, (CUmemoryPool, unsigned, void *)) X(cuMemPoolGetAttribute, (CUmemoryPool, unsigned, void *)) \
    X(cuMemPoolSetAccess, (CUmemoryPool, const AccessDesc *, size_t)) X(cuMemPoolGetAccess, (unsigned *, CUmemoryPool, Location *)) \
    X(cuMemAllocAsync, (CUdeviceptr *, size_t, CUstream)) X(cuMemFreeAsync, (CUdeviceptr, CUstream)) \
    X(cuMemAllocFromPoolAsync, (CUdeviceptr *, size_t, CUmemoryPool, CUstream)) \
    X(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long)) X(cuMemAddressFree, (CUdeviceptr, size_t)) \
    X(cuMemCreate, (CUmemHandle *, size_t, const AllocProp *, unsigned long long)) X(cuMemRelease, (CUmemHandle)) \
    X(cuMemMap, (CUdeviceptr, size_t, size_t, CUmemHandle, unsigned long long)) X(cuMemUnmap, (CUdeviceptr, size_t)) \
    X(cuMemSetAccess, (CUdeviceptr, size_t, const AccessDesc *, size_t)) X(cuMemGetAccess, (unsigned long long *, const Location *, CUdeviceptr)) \
    X(cuMemGetAllocationGranularity, (size_t *, const AllocProp *, unsigned)) \
    X(cuMemGetAllocationPropertiesFromHandle, (AllocProp *, CUmemHandle)) X(cuMemRetainAllocationHandle, (CUmemHandle *, void *)) \
    X(cuIpcGetMemHandle, (CUipcHandle *, CUdeviceptr)) X(cuIpcOpenMemHandle_v2, (CUdeviceptr *, CUipcHandle, unsigned)) \
    X(cuIpcCloseMemHandle, (CUdeviceptr)) X(cuIpcGetEventHandle, (CUipcHandle *, CUevent)) \
    X(cuIpcOpenEventHandle, (CUevent *, CUipcHandle)) X(cuProfilerStart, (void)) X(cuProfilerStop, (void))

#define X(name, args) static CUresult (*p_##name) args __attribute__((unused));
DRIVER_FUNCTIONS(X)
#undef X
/* Only the simulated driver has these. */
static uint64_t (*simcuda_clock_ns)(void) __attribute__((unused));
static uint64_t (*simcuda_late_ns)(void) __attribute__((unused));

/* A function that this driver lacks. */
#define ABSENT (-1)

static void load_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(2);
    }
#define X(name, args) p_##name = (CUresult(*) args)dlsym(library, #name);
    DRIVER_FUNCTIONS(X)
#undef X
    simcuda_clock_ns = (uint64_t(*)(void))dlsym(library, "simcuda_clock_ns");
    simcuda_late_ns = (uint64_t(*)(void))dlsym(library, "simcuda_late_ns");
}

/* Microseconds since some moment, by the clock of the node: a simulated one has its own. */
__attribute__((unused)) static double now_us(void) {
    if (simcuda_clock_ns) return simcuda_clock_ns() / 1000.0;
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

/* The text of a file of up to 1 MiB, as of kernels. */
__attribute__((unused)) static char *read_file(const char *path) {
    FILE *f = fopen(path, "rb");
    if (!f) {
        perror(path);
        exit(1);
    }
    char *text = calloc(1, 1 << 20);
    if (fread(text, 1, (1 << 20) - 1, f) == 0) exit(1);
    fclose(f);
    return text;
}

/* For qsort of doubles. */
__attribute__((unused)) static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
#endif
