/* What a CUDA driver answers, call by call: one line "section | call | case | result | values" each, the same on every
 * run, so that the simulated driver's answers can be laid beside the vendor's.
 *   gcc -O1 -o conformance conformance.c -ldl -pthread && ./conformance [KERNELS.ptx] > answers.txt
 * Needs no CUDA header. Uses one GPU, a second one where there is one, and at most 1.5 GiB of each. Every section runs
 * in a process of its own with an alarm; what the manual leaves undefined stands in the section "undefined", where a
 * call that kills its process is an answer too. */
#define _GNU_SOURCE
#include "driver.h"
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
static const char *section = "", *ptx_path;

/* ---- lines ------------------------------------------------------------------------------------------------------- */

static void begin(const char *call, const char *kase) {
    printf("\n%s | %s | %s | ", section, call, kase);
    fflush(stdout);
}

static CUresult result(CUresult r) {
    const char *name = NULL;
    if (r == ABSENT) printf("ABSENT |");
    else if (!p_cuGetErrorName || p_cuGetErrorName(r, &name) || !name) printf("%d |", r);
    else printf("%d %s |", r, name + (strncmp(name, "CUDA_ERROR_", 11) ? 0 : 11));
    return r;
}

static void V(const char *format, ...) {
    va_list list;
    va_start(list, format);
    putchar(' ');
    vprintf(format, list);
    va_end(list);
}

#define C(name, kase, args) (begin(#name, kase), result(p_##name ? (p_##name args) : ABSENT))
/* A call that only prepares: no line. */
#define Q(name, args) (p_##name ? (p_##name args) : ABSENT)

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec * 1e-9;
}

static CUcontext context;
static int gpus;

static void start(void) {
    Q(cuInit, (0));
    Q(cuDeviceGetCount, (&gpus));
    if (Q(cuDevicePrimaryCtxRetain, (&context, 0)) || Q(cuCtxSetCurrent, (context))) {
        begin("start", "");
        printf("no context |");
        exit(0);
    }
}

static CUdeviceptr alloc(size_t bytes) {
    CUdeviceptr p = 0;
    Q(cuMemAlloc_v2, (&p, bytes));
    return p;
}

static void *pinned(size_t bytes) {
    void *p = NULL;
    Q(cuMemHostAlloc, (&p, bytes, 3));
    memset(p, 0, bytes);
    return p;
}

static CUstream stream(unsigned flags) {
    CUstream s = NULL;
    Q(cuStreamCreate, (&s, flags));
    return s;
}

/* ---- sections ---------------------------------------------------------------------------------------------------- */

static void before_init(void) {
    int n = 7;
    CUdeviceptr p;
    CUcontext c;
    const char *name = "x";
    C(cuDriverGetVersion, "before cuInit", (&n));
    V("%s", n >= 12000 ? "at least 12.0" : "old");
    C(cuGetErrorName, "700", (700, &name));
    V("%s", name);
    C(cuGetErrorName, "12345", (12345, &name));
    V("%s", name ? name : "null");
    C(cuGetErrorString, "2", (2, &name));
    V("%s", name);
    C(cuGetErrorString, "208", (208, &name));
    V("%s", name);
    C(cuGetErrorName, "null result", (1, NULL));
    C(cuDeviceGetCount, "before cuInit", (&n));
    C(cuDeviceGet, "before cuInit", (&n, 0));
    C(cuCtxGetCurrent, "before cuInit", (&c));
    C(cuMemAlloc_v2, "before cuInit", (&p, 4096));
    C(cuMemFree_v2, "before cuInit", (0));
    C(cuPointerGetAttribute, "before cuInit", (&n, 2, 4096));
    C(cuStreamQuery, "before cuInit", (NULL));
    C(cuInit, "flags 1", (1));
    C(cuInit, "flags 0", (0));
    C(cuInit, "again", (0));
    C(cuDeviceGetCount, "after", (&n));
    V("%s", n > 0 ? "some" : "none");
}

static void device(void) {
    Q(cuInit, (0));
    int n = -1, m = -1;
    CUdevice d = -1;
    char text[256];
    size_t bytes = 0;
    CUuuid id;
    C(cuDeviceGetCount, "null", (NULL));
    C(cuDeviceGet, "0", (&d, 0));
    V("%d", d);
    C(cuDeviceGet, "-1", (&d, -1));
    C(cuDeviceGet, "99", (&d, 99));
    C(cuDeviceGet, "null", (NULL, 0));
    C(cuDeviceGetName, "0", (text, 256, 0));
    V("%s", text);
    memset(text, 'x', 256);
    C(cuDeviceGetName, "room for 5", (text, 5, 0));
    V("%.5s", text);
    C(cuDeviceGetName, "room for 0", (text, 0, 0));
    C(cuDeviceGetName, "null", (NULL, 10, 0));
    C(cuDeviceGetName, "99", (text, 256, 99));
    C(cuDeviceGetUuid_v2, "0", (&id, 0));
    C(cuDeviceGetUuid_v2, "99", (&id, 99));
    C(cuDeviceGetUuid_v2, "null", (NULL, 0));
    C(cuDeviceTotalMem_v2, "0", (&bytes, 0));
    V("%s", bytes > (size_t)1 << 30 ? "above 1 GiB" : "small");
    C(cuDeviceTotalMem_v2, "99", (&bytes, 99));
    C(cuDeviceTotalMem_v2, "null", (NULL, 0));
    C(cuDeviceComputeCapability, "0", (&n, &m, 0));
    V("%d.%d", n, m);
    C(cuDeviceGetPCIBusId, "0", (text, 256, 0));
    V("length %zu", strlen(text));
    C(cuDeviceGetByPCIBusId, "its own", (&d, text));
    V("%d", d);
    C(cuDeviceGetByPCIBusId, "nonsense", (&d, "nonsense"));
    C(cuDeviceGetByPCIBusId, "null", (&d, NULL));
    C(cuDeviceGetPCIBusId, "room for 4", (text, 4, 0));
    C(cuDeviceGetPCIBusId, "99", (text, 256, 99));
    C(cuDeviceCanAccessPeer, "0 0", (&n, 0, 0));
    V("%d", n);
    C(cuDeviceCanAccessPeer, "0 99", (&n, 0, 99));
    C(cuDeviceCanAccessPeer, "null", (NULL, 0, 0));
    C(cuDeviceGetP2PAttribute, "0 0", (&n, 2, 0, 0));
    C(cuDeviceGetP2PAttribute, "0 99", (&n, 2, 0, 99));
    C(cuDeviceGetExecAffinitySupport, "0", (&n, 0, 0));
    for (int a = 1; a <= 137; a++) {
        char kase[32];
        /* Clocks, addresses on the bus and the node of the machine are its own. */
        int own = a == 13 || a == 33 || a == 34 || a == 36 || a == 50 || a == 134 || a == 131 || a == 132;
        snprintf(kase, sizeof kase, "attribute %d", a);
        n = -77;
        C(cuDeviceGetAttribute, kase, (&n, a, 0));
        if (!own) V("%d", n);
    }
    C(cuDeviceGetAttribute, "attribute 0", (&n, 0, 0));
    C(cuDeviceGetAttribute, "attribute 5000", (&n, 5000, 0));
    C(cuDeviceGetAttribute, "device 99", (&n, 1, 99));
    C(cuDeviceGetAttribute, "null", (NULL, 1, 0));
    void *entry = NULL;
    int status = -1;
    C(cuGetProcAddress_v2, "cuMemAlloc 12000", ("cuMemAlloc", &entry, 12000, 0, &status));
    V("%s status %d", entry == (void *)p_cuMemAlloc_v2 ? "cuMemAlloc_v2" : entry ? "another" : "null", status);
    C(cuGetProcAddress_v2, "cuMemAlloc_v2 by full name", ("cuMemAlloc_v2", &entry, 12000, 0, &status));
    V("%s status %d", entry ? "some" : "null", status);
    C(cuGetProcAddress_v2, "cuNoSuchThing", ("cuNoSuchThing", &entry, 12000, 0, &status));
    V("%s status %d", entry ? "some" : "null", status);
    C(cuGetProcAddress_v2, "cuMemcpyBatchAsync for 11000", ("cuMemcpyBatchAsync", &entry, 11000, 0, &status));
    V("%s status %d", entry ? "some" : "null", status);
    C(cuGetProcAddress_v2, "null name", (NULL, &entry, 12000, 0, &status));
    C(cuGetProcAddress_v2, "null result", ("cuMemAlloc", NULL, 12000, 0, &status));
    C(cuGetProcAddress_v2, "null status", ("cuMemAlloc", &entry, 12000, 0, NULL));
    C(cuProfilerStop, "without context", ());
}

static void contexts(void) {
    Q(cuInit, (0));
    CUcontext c = (void *)7, own = NULL, other = NULL, seen = NULL;
    CUdevice d = -1;
    unsigned flags = 99, version = 0;
    int active = -1, least = 5, greatest = 5;
    size_t limit = 0;
    CUdeviceptr p;
    unsigned long long id = 0, id2 = 0;
    C(cuCtxGetCurrent, "none yet", (&c));
    V("%s", c ? "some" : "null");
    C(cuCtxGetCurrent, "null", (NULL));
    C(cuCtxGetDevice, "without context", (&d));
    C(cuCtxSynchronize, "without context", ());
    C(cuCtxPopCurrent_v2, "without context", (&c));
    C(cuMemAlloc_v2, "without context", (&p, 64));
    C(cuMemGetInfo_v2, "without context", (&limit, &limit));
    C(cuStreamCreate, "without context", ((CUstream *)&c, 0));
    C(cuStreamQuery, "default, without context", (NULL));
    C(cuStreamSynchronize, "default, without context", (NULL));
    C(cuEventCreate, "without context", ((CUevent *)&c, 0));
    C(cuMemcpy, "without context", (0, 0, 16));
    C(cuModuleLoadData, "without context", ((CUmodule *)&c, "x"));
    C(cuCtxGetFlags, "without context", (&flags));
    C(cuCtxGetLimit, "without context", (&limit, 0));
    C(cuCtxEnablePeerAccess, "without context", (NULL, 0));
    C(cuDevicePrimaryCtxGetState, "inactive", (0, &flags, &active));
    V("flags %u active %d", flags, active);
    C(cuDevicePrimaryCtxRelease_v2, "not retained", (0));
    C(cuDevicePrimaryCtxReset_v2, "not retained", (0));
    C(cuDevicePrimaryCtxSetFlags_v2, "4", (0, 4));
    C(cuDevicePrimaryCtxSetFlags_v2, "nonsense", (0, 0x7fff));
    C(cuDevicePrimaryCtxSetFlags_v2, "0", (0, 0));
    C(cuDevicePrimaryCtxRetain, "99", (&c, 99));
    C(cuDevicePrimaryCtxRetain, "null", (NULL, 0));
    C(cuDevicePrimaryCtxRetain, "0", (&c, 0));
    C(cuDevicePrimaryCtxGetState, "active", (0, &flags, &active));
    V("flags %u active %d", flags, active);
    C(cuDevicePrimaryCtxRetain, "0 again", (&seen, 0));
    V("%s", seen == c ? "same" : "different");
    C(cuDevicePrimaryCtxRelease_v2, "0", (0));
    C(cuCtxPushCurrent_v2, "primary", (c));
    C(cuCtxPushCurrent_v2, "null", (NULL));
    C(cuCtxGetDevice, "primary", (&d));
    V("%d", d);
    C(cuCtxGetDevice, "null", (NULL));
    C(cuCtxGetFlags, "primary", (&flags));
    V("%u", flags);
    C(cuCtxGetFlags, "null", (NULL));
    C(cuCtxGetId, "current", (NULL, &id));
    C(cuCtxGetId, "primary", (c, &id2));
    V("%s", id == id2 ? "same" : "different");
    C(cuCtxGetApiVersion, "primary", (c, &version));
    V("%u", version);
    C(cuCtxGetApiVersion, "current", (NULL, &version));
    C(cuCtxGetStreamPriorityRange, "", (&least, &greatest));
    V("%d %d", least, greatest);
    C(cuCtxGetStreamPriorityRange, "nulls", (NULL, NULL));
    for (unsigned l = 0; l <= 8; l++) {
        char kase[32];
        snprintf(kase, sizeof kase, "limit %u", l);
        limit = 77;
        C(cuCtxGetLimit, kase, (&limit, l));
        V("%zu", limit);
    }
    C(cuCtxGetLimit, "limit 99", (&limit, 99));
    C(cuCtxGetLimit, "null", (NULL, 0));
    C(cuCtxSetLimit, "printf 2 MiB", (1, 2 << 20));
    C(cuCtxGetLimit, "printf after", (&limit, 1));
    V("%zu", limit);
    C(cuCtxSetLimit, "limit 99", (99, 1));
    C(cuCtxGetCacheConfig, "", (&flags));
    V("%u", flags);
    C(cuCtxSetCacheConfig, "1", (1));
    C(cuCtxGetSharedMemConfig, "", (&flags));
    V("%u", flags);
    C(cuCtxResetPersistingL2Cache, "", ());
    C(cuCtxDestroy_v2, "primary", (c));
    C(cuCtxGetCurrent, "after destroying the primary", (&seen));
    V("%s", seen == c ? "primary" : seen ? "another" : "null");
    C(cuCtxDestroy_v2, "null", (NULL));
    C(cuCtxCreate_v2, "device 99", (&own, 0, 99));
    C(cuCtxCreate_v2, "flags nonsense", (&own, 0xfffff, 0));
    C(cuCtxCreate_v2, "null", (NULL, 0, 0));
    C(cuCtxCreate_v2, "0", (&own, 0, 0));
    C(cuCtxGetCurrent, "after create", (&seen));
    V("%s", seen == own ? "the new one" : "another");
    C(cuCtxSetCurrent, "primary", (c));
    C(cuCtxPopCurrent_v2, "", (&other));
    V("%s", other == c ? "primary" : "another");
    C(cuCtxGetCurrent, "below", (&seen));
    V("%s", seen == c ? "primary" : seen == own ? "own" : seen ? "another" : "null");
    C(cuCtxPopCurrent_v2, "null", (NULL));
    C(cuCtxGetCurrent, "after", (&seen));
    V("%s", seen == c ? "primary" : seen == own ? "own" : seen ? "another" : "null");
    Q(cuCtxSetCurrent, (own));
    CUstream s = stream(0);
    p = alloc(4096);
    Q(cuCtxSetCurrent, (c));
    C(cuStreamQuery, "of another context", (s));
    C(cuStreamSynchronize, "of another context", (s));
    C(cuMemsetD8_v2, "memory of another context", (p, 1, 64));
    C(cuMemsetD8Async, "stream and memory of another context", (p, 1, 64, s));
    CUevent e = NULL;
    Q(cuEventCreate, (&e, 0));
    C(cuEventRecord, "stream of another context", (e, s));
    C(cuStreamWaitEvent, "stream of another context", (s, e, 0));
    C(cuStreamGetCtx, "of another context", (s, &seen));
    V("%s", seen == own ? "its own" : "another");
    C(cuMemFree_v2, "memory of another context", (p));
    C(cuCtxSynchronize, "primary", ());
    C(cuCtxSetFlags, "4", (4));
    C(cuCtxDestroy_v2, "own, not current", (own));
    C(cuCtxSetCurrent, "null", (NULL));
    C(cuCtxGetCurrent, "after null", (&seen));
    V("%s", seen ? "some" : "null");
    Q(cuCtxSetCurrent, (c));
    C(cuDevicePrimaryCtxReset_v2, "retained", (0));
    C(cuDevicePrimaryCtxGetState, "after reset", (0, &flags, &active));
    V("active %d", active);
    C(cuCtxSynchronize, "after reset", ());
    C(cuMemAlloc_v2, "after reset", (&p, 64));
    C(cuDevicePrimaryCtxRelease_v2, "last", (0));
    C(cuDevicePrimaryCtxRelease_v2, "once more", (0));
    C(cuMemAlloc_v2, "released context current", (&p, 64));
    C(cuCtxGetDevice, "released context current", (&d));
    C(cuCtxSynchronize, "released context current", ());
}

static void memory(void) {
    start();
    CUdeviceptr p = 0, q = 0, base = 0;
    size_t size = 0, total = 0, pitch = 0;
    void *h = NULL;
    unsigned flags = 77;
    C(cuMemAlloc_v2, "0 bytes", (&p, 0));
    C(cuMemAlloc_v2, "null", (NULL, 64));
    C(cuMemAlloc_v2, "1 TiB", (&p, (size_t)1 << 40));
    C(cuMemAlloc_v2, "largest size", (&p, (size_t)-1));
    C(cuMemAlloc_v2, "1 byte", (&p, 1));
    V("aligned %d", p % 256 == 0);
    C(cuMemGetAddressRange_v2, "of 1 byte", (&base, &size, p));
    V("%s size %zu", base == p ? "base" : "other", size);
    C(cuMemFree_v2, "1 byte", (p));
    C(cuMemAlloc_v2, "3 MiB and 5", (&p, 3 * MIB + 5));
    C(cuMemGetAddressRange_v2, "interior", (&base, &size, p + 1000));
    V("%s size %zu", base == p ? "base" : "other", size);
    C(cuMemGetAddressRange_v2, "last byte", (&base, &size, p + 3 * MIB + 4));
    C(cuMemGetAddressRange_v2, "null results", (NULL, NULL, p));
    C(cuMemGetAddressRange_v2, "null size", (&base, NULL, p));
    C(cuMemGetAddressRange_v2, "null address", (&base, &size, 0));
    C(cuMemGetAddressRange_v2, "stack address", (&base, &size, (CUdeviceptr)(size_t)&size));
    C(cuMemFree_v2, "interior", (p + 256));
    C(cuMemFree_v2, "null", (0));
    C(cuMemFree_v2, "stack address", ((CUdeviceptr)(size_t)&p));
    C(cuMemFree_v2, "whole", (p));
    C(cuMemFree_v2, "twice", (p));
    C(cuMemGetAddressRange_v2, "freed", (&base, &size, p));
    C(cuMemAllocPitch_v2, "100 x 10, 4", (&p, &pitch, 100, 10, 4));
    V("pitch %zu", pitch);
    C(cuMemFree_v2, "pitched", (p));
    C(cuMemAllocPitch_v2, "element 3", (&p, &pitch, 100, 10, 3));
    C(cuMemAllocPitch_v2, "width 0", (&p, &pitch, 0, 10, 4));
    C(cuMemAllocPitch_v2, "null pitch", (&p, NULL, 100, 10, 4));
    C(cuMemGetInfo_v2, "", (&size, &total));
    V("%s", size <= total && size > 0 ? "plausible" : "odd");
    C(cuMemGetInfo_v2, "null free", (NULL, &total));
    C(cuMemGetInfo_v2, "null total", (&size, NULL));
    p = alloc(2 * MIB), q = alloc(2 * MIB);
    C(cuMemGetAddressRange_v2, "behind 2 MiB", (&base, &size, p + 2 * MIB));
    V("%s", base == q ? "the next" : "another");
    C(cuMemHostAlloc, "0 bytes", (&h, 0, 0));
    C(cuMemHostAlloc, "null", (NULL, 64, 0));
    C(cuMemHostAlloc, "flags nonsense", (&h, 64, 0x100));
    C(cuMemHostAlloc, "4096", (&h, 4096, 0));
    C(cuMemHostGetFlags, "flags 0", (&flags, h));
    V("%u", flags);
    C(cuMemHostGetFlags, "interior", (&flags, (char *)h + 8));
    C(cuMemHostGetDevicePointer_v2, "base", (&p, h, 0));
    V("%s", p == (CUdeviceptr)(size_t)h ? "same" : "another");
    C(cuMemHostGetDevicePointer_v2, "interior", (&p, (char *)h + 100, 0));
    V("%s", p == (CUdeviceptr)(size_t)h + 100 ? "same" : "another");
    C(cuMemHostGetDevicePointer_v2, "flags 1", (&p, h, 1));
    C(cuMemHostGetDevicePointer_v2, "null result", (NULL, h, 0));
    C(cuMemGetAddressRange_v2, "pinned host", (&base, &size, (CUdeviceptr)(size_t)h));
    V("%s %zu", base == (CUdeviceptr)(size_t)h ? "base" : "other", size);
    C(cuMemFree_v2, "pinned host", ((CUdeviceptr)(size_t)h));
    C(cuMemHostUnregister, "allocated, not registered", (h));
    C(cuMemHostRegister_v2, "allocated before", (h, 4096, 0));
    C(cuMemFreeHost, "interior", ((char *)h + 8));
    C(cuMemFreeHost, "whole", (h));
    C(cuMemFreeHost, "twice", (h));
    C(cuMemFreeHost, "null", (NULL));
    C(cuMemAllocHost_v2, "4096", (&h, 4096));
    C(cuMemHostGetFlags, "cuMemAllocHost", (&flags, h));
    V("%u", flags);
    C(cuMemFreeHost, "", (h));
    C(cuMemHostAlloc, "portable, mapped, write-combined", (&h, 4096, 7));
    C(cuMemHostGetFlags, "flags 7", (&flags, h));
    V("%u", flags);
    Q(cuMemFreeHost, (h));
    char *m = mmap(NULL, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(m, 1, 1 << 20);
    C(cuMemHostGetFlags, "plain host memory", (&flags, m));
    C(cuMemHostGetDevicePointer_v2, "plain host memory", (&p, m, 0));
    C(cuMemHostUnregister, "not registered", (m));
    C(cuMemHostRegister_v2, "null", (NULL, 4096, 0));
    C(cuMemHostRegister_v2, "0 bytes", (m, 0, 0));
    C(cuMemHostRegister_v2, "flags nonsense", (m, 4096, 0x100));
    C(cuMemHostRegister_v2, "64 KiB", (m, 65536, 0));
    C(cuMemHostGetFlags, "registered", (&flags, m + 100));
    V("%u", flags);
    C(cuMemHostGetDevicePointer_v2, "registered", (&p, m + 100, 0));
    V("%s", p == (CUdeviceptr)(size_t)(m + 100) ? "same" : "another");
    C(cuMemGetAddressRange_v2, "registered", (&base, &size, (CUdeviceptr)(size_t)(m + 100)));
    V("%s %zu", base == (CUdeviceptr)(size_t)m ? "base" : "other", size);
    C(cuMemHostRegister_v2, "again", (m, 65536, 0));
    C(cuMemHostRegister_v2, "overlapping", (m + 32768, 65536, 0));
    C(cuMemHostRegister_v2, "neighbour", (m + 65536, 65536, 2));
    C(cuMemHostUnregister, "interior", (m + 4096));
    C(cuMemHostUnregister, "base", (m));
    C(cuMemHostUnregister, "twice", (m));
    C(cuMemHostUnregister, "neighbour", (m + 65536));
    C(cuMemHostRegister_v2, "not page-aligned", (m + 300001, 1000, 0));
    C(cuMemHostGetDevicePointer_v2, "same page, before", (&p, m + 299999, 0));
    C(cuMemHostUnregister, "not page-aligned", (m + 300001));
    C(cuMemHostUnregister, "null", (NULL));
    C(cuMemHostRegister_v2, "device memory", ((void *)(size_t)q, 4096, 0));
    char *hole = mmap(NULL, 1 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    C(cuMemHostRegister_v2, "inaccessible", (hole, 65536, 0));
    char *ro = mmap(NULL, 65536, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    C(cuMemHostRegister_v2, "read-only, flags 0", (ro, 65536, 0));
    if (Q(cuMemHostRegister_v2, (m, 65536, 0)) == 0) {
        C(cuMemFreeHost, "registered", (m));
    }
}

static void attributes(const char *kind, CUdeviceptr p, CUdeviceptr start_of) {
    static const char *names[] = {"", "context", "memory_type", "device_pointer", "host_pointer", "p2p_tokens",
        "sync_memops", "buffer_id", "is_managed", "device_ordinal", "is_legacy_ipc_capable", "range_start", "range_size",
        "mapped", "handle_types", "is_gpudirect_capable", "access_flags", "mempool", "mapping_size", "mapping_base",
        "memory_block_id"};
    char kase[96];
    for (unsigned a = 1; a <= 20; a++) {
        unsigned long long v[2] = {0x7777777777777777ull, 0};
        snprintf(kase, sizeof kase, "%s: %s", kind, names[a]);
        CUresult r = C(cuPointerGetAttribute, kase, (v, a, p));
        if (r) continue;
        if (a == 1) V("%s", v[0] == 0 ? "null" : v[0] == (size_t)context ? "the context" : "another");
        else if (a == 3 || a == 4) V("%s", v[0] == p ? "same" : "another");
        else if (a == 5) continue;
        else if (a == 11 || a == 19) V("%s", v[0] == start_of ? "start" : "another");
        else if (a == 7 || a == 20 || a == 17) V("%s", v[0] ? "some" : "0");
        else if (a == 12 || a == 18) V("%llu", v[0]);
        else if (a == 14) V("%llu", v[0]);
        else if (a == 8 || a == 10 || a == 13 || a == 15) V("%u", (unsigned)(unsigned char)v[0]);
        else V("%d", (int)v[0]);
    }
}

static void pointers(void) {
    start();
    CUdeviceptr d = alloc(2 * MIB + 512), managed = 0, mine = 0;
    void *h = NULL;
    Q(cuMemHostAlloc, (&h, 8192, 3));
    char *plain = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *registered = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(registered, 0, 65536);
    Q(cuMemHostRegister_v2, (registered, 65536, 0));
    Q(cuMemAllocManaged, (&managed, 1 * MIB, 1));
    Q(cuMemAllocAsync, (&mine, 1 * MIB, NULL));
    Q(cuStreamSynchronize, (NULL));
    attributes("device", d, d);
    attributes("device interior", d + 4096, d);
    attributes("pinned", (size_t)h + 8, (size_t)h);
    attributes("registered", (size_t)registered + 8, (size_t)registered);
    attributes("managed", managed + 8, managed);
    attributes("pool", mine + 8, mine);
    attributes("plain host", (size_t)plain, 0);
    attributes("null", 0, 0);
    unsigned which[6] = {2, 7, 9, 8, 1, 10};
    for (int k = 0; k < 5; k++) {
        const char *names[] = {"device", "pinned", "managed", "plain host", "null"};
        CUdeviceptr at[] = {d, (size_t)h, managed, (size_t)plain, 0};
        unsigned type = 99;
        unsigned long long buffer = 99;
        int ordinal = 99;
        unsigned char is_managed = 99, legacy = 99;
        void *ctx = (void *)99;
        void *to[6] = {&type, &buffer, &ordinal, &is_managed, &ctx, &legacy};
        C(cuPointerGetAttributes, names[k], (6, which, to, at[k]));
        V("type %u buffer %s ordinal %d managed %u context %s legacy %u", type, buffer ? "some" : "0", ordinal, is_managed,
            ctx == context ? "the context" : ctx ? "another" : "null", legacy);
    }
    C(cuPointerGetAttributes, "count 0", (0, which, (void **)which, d));
    unsigned bad[1] = {99};
    void *to[1] = {which};
    C(cuPointerGetAttributes, "attribute 99", (1, bad, to, d));
    C(cuPointerGetAttributes, "null lists", (1, NULL, NULL, d));
    C(cuPointerGetAttribute, "null result", (NULL, 2, d));
    C(cuPointerGetAttribute, "attribute 99", (which, 99, d));
    unsigned long long a = 0, b = 0;
    Q(cuPointerGetAttribute, (&a, 7, d));
    Q(cuMemFree_v2, (d));
    C(cuPointerGetAttribute, "buffer_id of freed memory", (&b, 7, d));
    CUdeviceptr again = alloc(2 * MIB + 512);
    C(cuPointerGetAttribute, "buffer_id after allocating again", (&b, 7, again));
    V("address %s, identity %s", again == d ? "same" : "another", a == b ? "same" : "another");
    int one = 1, zero = 0;
    C(cuPointerSetAttribute, "sync_memops 1, device", (&one, 6, again));
    int got = -1;
    C(cuPointerGetAttribute, "sync_memops after", (&got, 6, again));
    V("%d", got);
    C(cuPointerSetAttribute, "sync_memops 1, interior", (&one, 6, again + 4096));
    C(cuPointerSetAttribute, "sync_memops 0, device", (&zero, 6, again));
    C(cuPointerSetAttribute, "sync_memops 1, pool", (&one, 6, mine));
    C(cuPointerSetAttribute, "sync_memops 1, managed", (&one, 6, managed));
    C(cuPointerSetAttribute, "sync_memops 1, pinned", (&one, 6, (size_t)h));
    C(cuPointerSetAttribute, "sync_memops 1, registered", (&one, 6, (size_t)registered));
    C(cuPointerSetAttribute, "sync_memops 1, plain host", (&one, 6, (size_t)plain));
    C(cuPointerSetAttribute, "sync_memops 1, null", (&one, 6, 0));
    C(cuPointerSetAttribute, "attribute 7", (&one, 7, again));
    C(cuPointerSetAttribute, "null value", (NULL, 6, again));
}

static void copies(void) {
    start();
    CUdeviceptr d = alloc(1 * MIB), e = alloc(1 * MIB), freed = alloc(1 * MIB), last = 0;
    size_t room = 0;
    Q(cuMemFree_v2, (freed));
    unsigned char *h = pinned(1 * MIB), *m = malloc(1 * MIB);
    CUstream s = stream(1);
    memset(m, 5, 1 * MIB);
    Q(cuMemGetAddressRange_v2, (&last, &room, d));
    C(cuMemcpyHtoD_v2, "pageable", (d, m, 4096));
    C(cuMemcpyHtoD_v2, "0 bytes", (d, m, 0));
    C(cuMemcpyHtoD_v2, "0 bytes, null", (0, NULL, 0));
    C(cuMemcpyHtoD_v2, "null device", (0, m, 64));
    C(cuMemcpyHtoD_v2, "null host", (d, NULL, 64));
    C(cuMemcpyHtoD_v2, "host address as device", ((size_t)m, m, 64));
    C(cuMemcpyHtoD_v2, "pinned address as device", ((size_t)h, m, 64));
    C(cuMemcpyHtoD_v2, "device address as host", (d, (void *)(size_t)e, 64));
    C(cuMemcpyHtoD_v2, "beyond the end", (d + 1 * MIB - 32, m, 64));
    C(cuMemcpyHtoD_v2, "freed", (freed, m, 64));
    memset(h, 0, 4096);
    C(cuMemcpyDtoH_v2, "pinned", (h, d, 4096));
    V("%s", memcmp(h, m, 4096) ? "differs" : "equal");
    C(cuMemcpyDtoH_v2, "null host", (NULL, d, 64));
    C(cuMemcpyDtoH_v2, "beyond the end", (m, d + 1 * MIB - 32, 64));
    C(cuMemcpyDtoH_v2, "device address as host", ((void *)(size_t)e, d, 64));
    C(cuMemcpyDtoD_v2, "", (e, d, 4096));
    C(cuMemcpyDtoD_v2, "onto itself", (d, d, 4096));
    C(cuMemcpyDtoD_v2, "overlapping", (d + 100, d, 4096));
    C(cuMemcpyDtoD_v2, "pinned as source", (e, (size_t)h, 4096));
    C(cuMemcpyDtoD_v2, "pageable as source", (e, (size_t)m, 4096));
    C(cuMemcpyDtoD_v2, "freed source", (e, freed, 64));
    C(cuMemcpy, "device to device", (e, d, 64));
    C(cuMemcpy, "pageable to device", (d, (size_t)m, 64));
    C(cuMemcpy, "pinned to pageable", ((size_t)m, (size_t)h, 64));
    C(cuMemcpy, "pageable to pageable", ((size_t)m, (size_t)m + 4096, 64));
    C(cuMemcpy, "null to device", (d, 0, 64));
    C(cuMemcpy, "device to null", (0, d, 64));
    C(cuMemcpy, "0 bytes of nothing", (0, 0, 0));
    C(cuMemcpyAsync, "device to pinned", ((size_t)h, d, 4096, s));
    C(cuMemcpyAsync, "device to pageable", ((size_t)m, d, 4096, s));
    C(cuMemcpyAsync, "0 bytes", ((size_t)h, d, 0, s));
    C(cuMemcpyAsync, "legacy stream by name", ((size_t)h, d, 64, (CUstream)1));
    C(cuMemcpyAsync, "per-thread stream by name", ((size_t)h, d, 64, (CUstream)2));
    C(cuMemcpyHtoDAsync_v2, "pageable", (d, m, 4096, s));
    C(cuMemcpyHtoDAsync_v2, "beyond the end", (d + 1 * MIB - 32, m, 64, s));
    C(cuMemcpyDtoHAsync_v2, "pinned", (h, d, 4096, s));
    C(cuMemcpyDtoDAsync_v2, "", (e, d, 4096, s));
    C(cuMemcpyDtoDAsync_v2, "freed destination", (freed, d, 64, s));
    C(cuStreamSynchronize, "after the copies", (s));
    C(cuMemcpyPeer, "same context", (e, context, d, context, 4096));
    C(cuMemcpyPeer, "null contexts", (e, NULL, d, NULL, 4096));
    C(cuMemcpyPeerAsync, "same context", (e, context, d, context, 4096, s));
    C(cuMemcpyPeerAsync, "pinned source", (e, context, (size_t)h, context, 4096, s));
    Copy2D two = {.srcKind = 2, .srcDevice = d, .srcPitch = 512, .dstKind = 1, .dstHost = h, .dstPitch = 256, .width = 100, .height = 10};
    C(cuMemcpy2D_v2, "device to pinned", (&two));
    C(cuMemcpy2DUnaligned_v2, "device to pinned", (&two));
    C(cuMemcpy2DAsync_v2, "device to pinned", (&two, s));
    C(cuMemcpy2D_v2, "null", (NULL));
    two.srcPitch = 50;
    C(cuMemcpy2D_v2, "pitch below width", (&two));
    two.srcPitch = 512, two.width = 0;
    C(cuMemcpy2D_v2, "width 0", (&two));
    two.width = 100, two.height = 0;
    C(cuMemcpy2D_v2, "height 0", (&two));
    two.height = 10, two.srcKind = 9;
    C(cuMemcpy2D_v2, "memory type 9", (&two));
    two.srcKind = 4;
    C(cuMemcpy2D_v2, "unified", (&two));
    two.height = 5000;
    C(cuMemcpy2D_v2, "beyond the end", (&two));
    Copy3D three = {.srcKind = 2, .srcDevice = d, .srcPitch = 512, .srcHeight = 10, .dstKind = 2, .dstDevice = e, .dstPitch = 512, .dstHeight = 10, .width = 100, .height = 5, .depth = 3};
    C(cuMemcpy3D_v2, "device to device", (&three));
    C(cuMemcpy3DAsync_v2, "device to device", (&three, s));
    three.depth = 0;
    C(cuMemcpy3D_v2, "depth 0", (&three));
    three.depth = 3, three.srcHeight = 2;
    C(cuMemcpy3D_v2, "source height too small", (&three));
    CUdeviceptr to[3] = {d, d + 8192, d + 16384}, from[3] = {e, e + 8192, e + 16384};
    size_t sizes[3] = {4096, 4096, 4096}, index[2] = {0, 2}, fail = 77;
    CopyAttributes order[2] = {{.order = 1}, {.order = 1}};
#define BATCH(kase, to, from, sizes, n, attrs, idx, na, s) \
    do { \
        if (p_cuMemcpyBatchAsync_v2) C(cuMemcpyBatchAsync_v2, kase, (to, from, sizes, n, attrs, idx, na, s)); \
        else C(cuMemcpyBatchAsync, kase, (to, from, sizes, n, attrs, idx, na, &fail, s)); \
    } while (0)
    BATCH("three", to, from, sizes, 3, order, index, 1, s);
    BATCH("two attributes", to, from, sizes, 3, order, index, 2, s);
    BATCH("default stream", to, from, sizes, 3, order, index, 1, NULL);
    BATCH("legacy stream by name", to, from, sizes, 3, order, index, 1, (CUstream)1);
    BATCH("per-thread stream by name", to, from, sizes, 3, order, index, 1, (CUstream)2);
    BATCH("count 0", to, from, sizes, 0, order, index, 1, s);
    BATCH("no attributes", to, from, sizes, 3, NULL, NULL, 0, s);
    BATCH("null lists", NULL, NULL, NULL, 3, order, index, 1, s);
    size_t late[1] = {1};
    BATCH("first attribute for copy 1", to, from, sizes, 3, order, late, 1, s);
    size_t down[2] = {0, 0};
    BATCH("indices that do not rise", to, from, sizes, 3, order, down, 2, s);
    size_t far[2] = {0, 3};
    BATCH("index beyond the copies", to, from, sizes, 3, order, far, 2, s);
    CopyAttributes none[1] = {{.order = 0}};
    BATCH("access order 0", to, from, sizes, 3, none, index, 1, s);
    CopyAttributes during[1] = {{.order = 2}}, any[1] = {{.order = 3}};
    BATCH("access order during call", to, from, sizes, 3, during, index, 1, s);
    BATCH("access order any", to, from, sizes, 3, any, index, 1, s);
    size_t empty[3] = {4096, 0, 4096};
    BATCH("one of 0 bytes", to, from, empty, 3, order, index, 1, s);
    CUdeviceptr bad[3] = {e, freed, e};
    BATCH("freed source", to, bad, sizes, 3, order, index, 1, s);
    CUdeviceptr zero[3] = {e, 0, e};
    BATCH("null source", to, zero, sizes, 3, order, index, 1, s);
    CUdeviceptr host[3] = {(size_t)h, (size_t)h + 8192, (size_t)m};
    BATCH("to pinned and pageable", host, from, sizes, 3, order, index, 1, s);
    BATCH("from pinned and pageable", to, host, sizes, 3, order, index, 1, s);
    C(cuStreamSynchronize, "after the batches", (s));
}

static void fills(void) {
    start();
    CUdeviceptr d = alloc(1 * MIB), freed = alloc(1 * MIB);
    Q(cuMemFree_v2, (freed));
    unsigned char *h = pinned(65536), *m = malloc(65536);
    CUstream s = stream(1);
    C(cuMemsetD8_v2, "", (d, 7, 100));
    C(cuMemcpyDtoH_v2, "read back", (m, d, 101));
    V("%d %d", m[0], m[99]);
    C(cuMemsetD8_v2, "0 bytes", (d, 7, 0));
    C(cuMemsetD8_v2, "null", (0, 7, 64));
    C(cuMemsetD8_v2, "null, 0 bytes", (0, 7, 0));
    C(cuMemsetD8_v2, "beyond the end", (d + 1 * MIB - 32, 7, 64));
    C(cuMemsetD8_v2, "freed", (freed, 7, 64));
    C(cuMemsetD8_v2, "pinned host", ((size_t)h, 7, 64));
    V("%d", h[63]);
    C(cuMemsetD8_v2, "plain host", ((size_t)m, 7, 64));
    C(cuMemsetD16_v2, "", (d, 0x1234, 50));
    C(cuMemsetD16_v2, "odd address", (d + 1, 0x1234, 50));
    C(cuMemsetD32_v2, "", (d, 0x12345678, 50));
    C(cuMemsetD32_v2, "address 2 modulo 4", (d + 2, 0x12345678, 50));
    C(cuMemsetD8Async, "", (d, 7, 100, s));
    C(cuMemsetD16Async, "", (d, 7, 100, s));
    C(cuMemsetD32Async, "", (d, 7, 100, s));
    C(cuMemsetD32Async, "beyond the end", (d + 1 * MIB - 32, 7, 64, s));
    C(cuMemsetD2D8_v2, "", (d, 512, 7, 100, 10));
    C(cuMemsetD2D8_v2, "pitch below width", (d, 50, 7, 100, 10));
    C(cuMemsetD2D8_v2, "height 0", (d, 512, 7, 100, 0));
    C(cuMemsetD2D8_v2, "beyond the end", (d, 65536, 7, 100, 17));
    C(cuMemsetD2D16_v2, "", (d, 512, 7, 100, 10));
    C(cuMemsetD2D16_v2, "odd pitch", (d, 513, 7, 100, 10));
    C(cuMemsetD2D32_v2, "", (d, 512, 7, 100, 10));
    C(cuMemsetD2D32_v2, "pitch below width", (d, 300, 7, 100, 10));
    C(cuMemsetD2D8Async, "", (d, 512, 7, 100, 10, s));
    C(cuStreamSynchronize, "", (s));
}

static void nothing(void *p) { (void)p; }
static void callback(CUstream s, CUresult r, void *p) { (void)s, (void)r, (void)p; }

static void streams(void) {
    start();
    CUstream s = NULL, t = NULL;
    unsigned flags = 77;
    int n = 77;
    unsigned long long id = 0, id2 = 0;
    CUcontext c = NULL;
    CUdevice d = -1;
    C(cuStreamCreate, "null", (NULL, 0));
    C(cuStreamCreate, "flags 2", (&s, 2));
    C(cuStreamCreate, "flags 0", (&s, 0));
    C(cuStreamGetFlags, "flags 0", (s, &flags));
    V("%u", flags);
    C(cuStreamCreateWithPriority, "priority -100", (&t, 1, -100));
    C(cuStreamGetPriority, "-100", (t, &n));
    V("%d", n);
    C(cuStreamDestroy_v2, "", (t));
    C(cuStreamCreateWithPriority, "priority 100", (&t, 1, 100));
    C(cuStreamGetPriority, "100", (t, &n));
    V("%d", n);
    C(cuStreamCreateWithPriority, "priority -2", (&t, 0, -2));
    C(cuStreamGetPriority, "-2", (t, &n));
    V("%d", n);
    C(cuStreamGetPriority, "default", (NULL, &n));
    V("%d", n);
    C(cuStreamGetPriority, "null result", (s, NULL));
    C(cuStreamGetFlags, "default", (NULL, &flags));
    V("%u", flags);
    C(cuStreamGetFlags, "per-thread by name", ((CUstream)2, &flags));
    V("%u", flags);
    C(cuStreamGetId, "default", (NULL, &id));
    C(cuStreamGetId, "legacy by name", ((CUstream)1, &id2));
    V("%s", id == id2 ? "same" : "different");
    C(cuStreamGetCtx, "", (s, &c));
    V("%s", c == context ? "the context" : "another");
    C(cuStreamGetCtx, "default", (NULL, &c));
    V("%s", c == context ? "the context" : "another");
    C(cuStreamGetCtx, "null result", (s, NULL));
    C(cuStreamGetDevice, "", (s, &d));
    V("%d", d);
    C(cuStreamQuery, "idle", (s));
    C(cuStreamQuery, "default", (NULL));
    C(cuStreamQuery, "legacy by name", ((CUstream)1));
    C(cuStreamQuery, "per-thread by name", ((CUstream)2));
    C(cuStreamSynchronize, "default", (NULL));
    C(cuStreamAddCallback, "", (s, callback, NULL, 0));
    C(cuStreamAddCallback, "flags 1", (s, callback, NULL, 1));
    C(cuStreamAddCallback, "null function", (s, NULL, NULL, 0));
    C(cuLaunchHostFunc, "", (s, nothing, NULL));
    C(cuLaunchHostFunc, "null function", (s, NULL, NULL));
    C(cuLaunchHostFunc, "default stream", (NULL, nothing, NULL));
    C(cuStreamAttachMemAsync, "device memory", (s, alloc(4096), 0, 4));
    CUdeviceptr managed = 0;
    Q(cuMemAllocManaged, (&managed, 4096, 1));
    C(cuStreamAttachMemAsync, "managed memory, single", (s, managed, 0, 4));
    C(cuStreamAttachMemAsync, "managed memory, global", (s, managed, 0, 1));
    C(cuStreamDestroy_v2, "default", (NULL));
    C(cuStreamDestroy_v2, "legacy by name", ((CUstream)1));
    C(cuStreamDestroy_v2, "", (s));
    CUevent e = NULL, f = NULL, g = NULL;
    float ms = -1;
    C(cuEventCreate, "null", (NULL, 0));
    C(cuEventCreate, "flags 8", (&e, 8));
    C(cuEventCreate, "interprocess with timing", (&e, 4));
    C(cuEventCreate, "flags 0", (&e, 0));
    C(cuEventCreate, "flags 1", (&f, 1));
    C(cuEventCreate, "flags 2", (&g, 2));
    C(cuEventQuery, "never recorded", (e));
    C(cuEventSynchronize, "never recorded", (e));
    C(cuEventElapsedTime, "never recorded", (&ms, e, f));
    C(cuStreamWaitEvent, "never recorded", (t, e, 0));
    C(cuEventRecord, "default stream", (e, NULL));
    C(cuEventRecord, "", (f, t));
    C(cuEventRecordWithFlags, "flags 0", (f, t, 0));
    C(cuEventRecordWithFlags, "external outside capture", (f, t, 1));
    C(cuEventRecordWithFlags, "flags 8", (f, t, 8));
    C(cuStreamWaitEvent, "flags 0", (NULL, f, 0));
    C(cuStreamWaitEvent, "external outside capture", (t, f, 1));
    C(cuStreamWaitEvent, "flags 8", (t, f, 8));
    C(cuEventSynchronize, "", (f));
    C(cuEventSynchronize, "", (e));
    C(cuEventElapsedTime, "", (&ms, e, f));
    V("%s", ms >= 0 && ms < 1000 ? "plausible" : "odd");
    C(cuEventElapsedTime, "one without timing", (&ms, e, g));
    Q(cuEventRecord, (g, t));
    C(cuEventElapsedTime, "one recorded without timing", (&ms, e, g));
    C(cuEventElapsedTime, "null result", (NULL, e, f));
    C(cuEventQuery, "null", (NULL));
    C(cuEventSynchronize, "null", (NULL));
    C(cuEventRecord, "null", (NULL, t));
    C(cuStreamWaitEvent, "null", (t, NULL, 0));
    C(cuEventDestroy_v2, "null", (NULL));
    C(cuEventDestroy_v2, "", (e));
    CUipcHandle handle;
    C(cuIpcGetEventHandle, "not interprocess", (&handle, f));
}

static void memops(void) {
    start();
    CUdeviceptr d = alloc(4096);
    volatile uint32_t *h = pinned(4096);
    CUdeviceptr p = (size_t)h;
    uint32_t *m = malloc(4096);
    CUstream s = stream(1);
    C(cuStreamWriteValue32_v2, "pinned", (s, p, 5, 0));
    C(cuStreamWriteValue32_v2, "device", (s, d, 5, 0));
    C(cuStreamWriteValue32_v2, "plain host", (s, (size_t)m, 5, 0));
    C(cuStreamWriteValue32_v2, "null", (s, 0, 5, 0));
    C(cuStreamWriteValue32_v2, "misaligned", (s, p + 2, 5, 0));
    C(cuStreamWriteValue32_v2, "no barrier", (s, p, 6, 1));
    C(cuStreamWriteValue32_v2, "flags 8", (s, p, 6, 8));
    C(cuStreamWriteValue64_v2, "pinned", (s, p + 8, 0x500000001ull, 0));
    C(cuStreamWriteValue64_v2, "misaligned", (s, p + 4, 5, 0));
    C(cuStreamSynchronize, "", (s));
    V("%u %x %x", h[0], h[2], h[3]);
    C(cuStreamWaitValue32_v2, "geq, holds", (s, p, 5, 0));
    C(cuStreamWaitValue32_v2, "eq, holds", (s, p, 6, 1));
    C(cuStreamWaitValue32_v2, "and, holds", (s, p, 2, 2));
    C(cuStreamWaitValue32_v2, "nor, holds", (s, p, 1, 3));
    C(cuStreamWaitValue32_v2, "flags 8", (s, p, 1, 8));
    C(cuStreamWaitValue32_v2, "plain host", (s, (size_t)m, 0, 0));
    C(cuStreamWaitValue32_v2, "misaligned", (s, p + 1, 0, 0));
    C(cuStreamWaitValue64_v2, "geq, holds", (s, p + 8, 1, 0));
    C(cuStreamSynchronize, "holding waits", (s));
    C(cuStreamWaitValue32_v2, "does not hold", (s, p + 64, 1, 0));
    C(cuStreamQuery, "waiting", (s));
    h[16] = 1;
    C(cuStreamSynchronize, "released", (s));
    h[16] = 0x80000000u;
    C(cuStreamWaitValue32_v2, "geq is cyclic", (s, p + 64, 5, 0));
    usleep(5000);
    C(cuStreamQuery, "0x80000000 against 5", (s));
    h[16] = 5;
    Q(cuStreamSynchronize, (s));
    MemOp ops[3] = {{.operation = 2, .address = p + 128, .value = 9}, {.operation = 1, .address = p + 128, .value = 9},
        {.operation = 5, .address = p + 136, .value = 10}};
    C(cuStreamBatchMemOp_v2, "write, wait, write", (s, 3, ops, 0));
    C(cuStreamSynchronize, "batch", (s));
    V("%u %u", h[32], h[34]);
    C(cuStreamBatchMemOp_v2, "count 0", (s, 0, ops, 0));
    C(cuStreamBatchMemOp_v2, "null", (s, 1, NULL, 0));
    C(cuStreamBatchMemOp_v2, "count 257", (s, 257, ops, 0));
    C(cuStreamBatchMemOp_v2, "flags 1", (s, 1, ops, 1));
    ops[1].operation = 77;
    C(cuStreamBatchMemOp_v2, "operation 77", (s, 3, ops, 0));
    MemOp flush[1] = {{.operation = 3}};
    C(cuStreamBatchMemOp_v2, "flush", (s, 1, flush, 0));
    MemOp barrier[1] = {{.operation = 6}};
    C(cuStreamBatchMemOp_v2, "barrier", (s, 1, barrier, 0));
    C(cuStreamSynchronize, "", (s));
    C(cuStreamWriteValue32_v2, "default stream", (NULL, p, 1, 0));
}

/* Each call that may be illegal while a stream is captured, and what became of the capture. */
static void capture(void) {
    start();
    CUdeviceptr d = alloc(1 * MIB), e = alloc(1 * MIB), p = 0;
    char *h = pinned(65536), *m = calloc(1, 65536);
    CUstream s = stream(1), other = stream(1), blocking = stream(0), made = NULL;
    CUevent event = NULL, recorded = NULL, em = NULL;
    CUgraph graph = NULL, g2 = NULL;
    CUgraphExec exec = NULL;
    CUcontext c = NULL;
    CUmodule module = NULL;
    unsigned status = 7, mode;
    size_t size = 0;
    void *hp = NULL;
    float ms;
    unsigned long long id = 0;
    CUmemoryPool pool = NULL;
    CUipcHandle handle;
    AllocProp prop = {.type = 1, .location = {1, 0}};
    CUmemHandle mem = 0;
    Q(cuEventCreate, (&event, 0));
    Q(cuEventCreate, (&recorded, 0));
    Q(cuEventRecord, (recorded, other));
    Q(cuStreamSynchronize, (other));
    CUgraph empty = NULL;
    CUgraphNode node;
    Q(cuGraphCreate, (&empty, 0));
    Q(cuGraphAddEmptyNode, (&node, empty, NULL, 0));
    CUgraphExec ready = NULL;
    Q(cuGraphInstantiateWithFlags, (&ready, empty, 0));
    const char *modes[] = {"global", "thread", "relaxed"};
    for (unsigned k = 0; k < 3; k++) {
        char kase[128];
#define CAP(name, what, args) \
    do { \
        graph = NULL, status = 7; \
        Q(cuStreamBeginCapture_v2, (s, k)); \
        snprintf(kase, sizeof kase, "%s: %s", modes[k], what); \
        C(name, kase, args); \
        Q(cuStreamIsCapturing, (s, &status)); \
        CUresult end = Q(cuStreamEndCapture, (s, &graph)); \
        size_t nodes = 0; \
        if (graph) Q(cuGraphGetNodes, (graph, NULL, &nodes)), Q(cuGraphDestroy, (graph)); \
        V("status %u end %d nodes %zu", status, end, nodes); \
    } while (0)
        CAP(cuStreamQuery, "captured stream", (s));
        CAP(cuStreamQuery, "another stream", (other));
        CAP(cuStreamQuery, "default stream", (NULL));
        CAP(cuStreamSynchronize, "captured stream", (s));
        CAP(cuStreamSynchronize, "another stream", (other));
        CAP(cuCtxSynchronize, "", ());
        CAP(cuEventQuery, "recorded elsewhere", (recorded));
        CAP(cuEventSynchronize, "recorded elsewhere", (recorded));
        CAP(cuEventElapsedTime, "recorded elsewhere", (&ms, recorded, recorded));
        CAP(cuEventRecord, "captured stream", (event, s));
        CAP(cuEventRecord, "another stream", (recorded, other));
        CAP(cuEventCreate, "", (&em, 0));
        CAP(cuStreamWaitEvent, "recorded outside", (s, recorded, 0));
        CAP(cuStreamCreate, "", (&made, 0));
        CAP(cuStreamDestroy_v2, "", (made));
        CAP(cuMemAlloc_v2, "", (&p, 4096));
        CAP(cuMemFree_v2, "", (p));
        CAP(cuMemHostAlloc, "", (&hp, 4096, 0));
        CAP(cuMemFreeHost, "", (hp));
        CAP(cuMemHostRegister_v2, "", (m, 65536, 0));
        CAP(cuMemHostUnregister, "", (m));
        CAP(cuMemGetInfo_v2, "", (&size, &size));
        CAP(cuMemGetAddressRange_v2, "", (&p, &size, d));
        CAP(cuMemcpyDtoD_v2, "", (e, d, 64));
        CAP(cuMemcpyHtoD_v2, "", (d, m, 64));
        CAP(cuMemcpyDtoH_v2, "", (m, d, 64));
        CAP(cuMemsetD8_v2, "", (d, 1, 64));
        CAP(cuMemcpyAsync, "captured stream", (e, d, 64, s));
        CAP(cuMemcpyAsync, "captured stream, from pageable", (d, (size_t)m, 64, s));
        CAP(cuMemcpyAsync, "captured stream, to pageable", ((size_t)m, d, 64, s));
        CAP(cuMemcpyAsync, "captured stream, 0 bytes", (e, d, 0, s));
        CAP(cuMemcpyAsync, "captured stream, pinned", ((size_t)h, d, 64, s));
        CAP(cuMemcpyAsync, "another stream", (e, d, 64, other));
        CAP(cuMemcpyAsync, "default stream", (e, d, 64, NULL));
        CAP(cuMemcpyAsync, "another blocking stream", (e, d, 64, blocking));
        CAP(cuMemsetD8Async, "captured stream", (d, 1, 64, s));
        CAP(cuLaunchHostFunc, "captured stream", (s, nothing, NULL));
        CAP(cuStreamAddCallback, "captured stream", (s, callback, NULL, 0));
        CAP(cuStreamWriteValue32_v2, "captured stream", (s, (size_t)h, 1, 0));
        CAP(cuStreamWaitValue32_v2, "captured stream", (s, (size_t)h, 1, 0));
        CAP(cuMemAllocAsync, "captured stream", (&p, 4096, s));
        CAP(cuMemAllocAsync, "another stream", (&p, 4096, other));
        CAP(cuMemFreeAsync, "another stream", (p, other));
        CAP(cuMemAllocManaged, "", (&p, 4096, 1));
        CAP(cuPointerGetAttribute, "buffer_id", (&id, 7, d));
        status = 1;
        CAP(cuPointerSetAttribute, "sync_memops", (&status, 6, d));
        CAP(cuIpcGetMemHandle, "", (&handle, d));
        CAP(cuIpcCloseMemHandle, "not a mapping", (d));
        CAP(cuCtxCreate_v2, "", (&c, 0, 0));
        if (c) Q(cuCtxDestroy_v2, (c)), c = NULL;
        Q(cuCtxSetCurrent, (context));
        CAP(cuCtxGetCurrent, "", (&c));
        c = NULL;
        CAP(cuCtxSetLimit, "printf", (1, 1 << 20));
        CAP(cuDeviceGetDefaultMemPool, "", (&pool, 0));
        CAP(cuMemPoolTrimTo, "", (pool, 0));
        CAP(cuModuleLoadData, "not an image", (&module, "nonsense nonsense"));
        CAP(cuGraphCreate, "", (&g2, 0));
        CAP(cuGraphInstantiateWithFlags, "", (&exec, empty, 0));
        CAP(cuGraphLaunch, "captured stream", (ready, s));
        CAP(cuGraphLaunch, "another stream", (ready, other));
        CAP(cuGraphUpload, "another stream", (ready, other));
        CAP(cuMemAddressReserve, "", (&p, 2 * MIB, 0, 0, 0));
        CAP(cuMemCreate, "", (&mem, 2 * MIB, &prop, 0));
        CAP(cuMemMap, "", (p, 2 * MIB, 0, mem, 0));
        CAP(cuMemUnmap, "", (p, 2 * MIB));
        CAP(cuStreamBeginCapture_v2, "the same stream", (s, k));
        CAP(cuStreamGetId, "", (s, &id));
        CAP(cuDevicePrimaryCtxRetain, "", (&c, 0));
        c = NULL;
        CAP(cuMemHostGetDevicePointer_v2, "", (&p, h, 0));
        mode = 2;
        Q(cuThreadExchangeStreamCaptureMode, (&mode));
        CAP(cuMemAlloc_v2, "thread relaxed", (&p, 4096));
        CAP(cuMemcpyDtoH_v2, "thread relaxed", (m, d, 64));
        CAP(cuStreamQuery, "thread relaxed, another stream", (other));
        CAP(cuStreamQuery, "thread relaxed, captured stream", (s));
        CAP(cuEventQuery, "thread relaxed", (recorded));
        CAP(cuCtxSynchronize, "thread relaxed", ());
        Q(cuThreadExchangeStreamCaptureMode, (&mode));
    }
    /* A blocking stream and the legacy one. */
    Q(cuStreamBeginCapture_v2, (blocking, 2));
    C(cuMemcpyAsync, "default stream while a blocking one is captured", (e, d, 64, NULL));
    C(cuMemsetD8_v2, "while a blocking stream is captured, relaxed", (d, 1, 64));
    C(cuStreamEndCapture, "blocking", (blocking, &graph));
    C(cuStreamBeginCapture_v2, "default stream", (NULL, 0));
    C(cuStreamBeginCapture_v2, "mode 9", (s, 9));
    C(cuStreamEndCapture, "not capturing", (s, &graph));
    C(cuStreamIsCapturing, "not capturing", (s, &status));
    V("%u", status);
    C(cuStreamIsCapturing, "null result", (s, NULL));
    mode = 9;
    C(cuThreadExchangeStreamCaptureMode, "9", (&mode));
    C(cuThreadExchangeStreamCaptureMode, "null", (NULL));
    mode = 1;
    C(cuThreadExchangeStreamCaptureMode, "1", (&mode));
    V("was %u", mode);
    mode = 0;
    Q(cuThreadExchangeStreamCaptureMode, (&mode));
    /* Fork and join over an event. */
    size_t n = 0;
    Q(cuStreamBeginCapture_v2, (s, 0));
    C(cuMemsetD8Async, "fork: first", (d, 1, 64, s));
    C(cuEventRecord, "fork", (event, s));
    C(cuStreamWaitEvent, "fork", (other, event, 0));
    C(cuMemsetD8Async, "fork: second", (e, 1, 64, other));
    C(cuEventQuery, "captured event", (event));
    C(cuStreamEndCapture, "after asking a captured event", (s, &graph));
    Q(cuStreamBeginCapture_v2, (s, 0));
    Q(cuMemsetD8Async, (d, 1, 64, s));
    Q(cuEventRecord, (event, s));
    Q(cuStreamWaitEvent, (other, event, 0));
    Q(cuMemsetD8Async, (e, 1, 64, other));
    C(cuStreamEndCapture, "the joined stream", (other, &graph));
    C(cuStreamEndCapture, "unjoined", (s, &graph));
    V("%s", graph ? "graph" : "null");
    Q(cuStreamBeginCapture_v2, (s, 0));
    Q(cuMemsetD8Async, (d, 1, 64, s));
    Q(cuEventRecord, (event, s));
    Q(cuStreamWaitEvent, (other, event, 0));
    Q(cuMemsetD8Async, (e, 1, 64, other));
    Q(cuEventRecord, (event, other));
    Q(cuStreamWaitEvent, (s, event, 0));
    const CUgraphNode *deps = NULL;
    size_t count = 77;
    C(cuStreamGetCaptureInfo_v2, "joined", (s, &status, &id, &g2, &deps, &count));
    V("status %u dependencies %zu", status, count);
    C(cuStreamEndCapture, "joined", (s, &graph));
    Q(cuGraphGetNodes, (graph, NULL, &n));
    V("nodes %zu", n);
    C(cuEventQuery, "captured event afterwards", (event));
    C(cuStreamWaitEvent, "captured event afterwards", (other, event, 0));
    C(cuEventSynchronize, "captured event afterwards", (event));
    /* Destroying what is being captured. */
    Q(cuStreamBeginCapture_v2, (other, 2));
    C(cuStreamDestroy_v2, "captured", (other));
    other = stream(1);
    Q(cuStreamBeginCapture_v2, (s, 2));
    Q(cuStreamBeginCapture_v2, (other, 2));
    Q(cuMemsetD8Async, (d, 1, 64, s));
    Q(cuEventRecord, (event, s));
    C(cuStreamWaitEvent, "of another capture", (other, event, 0));
    C(cuStreamEndCapture, "first of two", (s, &graph));
    C(cuStreamEndCapture, "second of two", (other, &graph));
}

static int inside, most, order_at;
static char order_text[64];
static void note(void *p) {
    if (order_at < 63) order_text[order_at++] = *(char *)p;
}
static void enter(void *p) {
    (void)p;
    if (++inside > most) most = inside;
    usleep(2000);
    inside--;
}

static void graphs(void) {
    start();
    CUdeviceptr d = alloc(1 * MIB), e = alloc(1 * MIB), freed = alloc(1 * MIB);
    Q(cuMemFree_v2, (freed));
    volatile uint32_t *flag = pinned(4096);
    CUgraph g = NULL, clone = NULL, child = NULL;
    CUgraphNode a = NULL, b = NULL, c = NULL, x = NULL;
    CUgraphExec exec = NULL;
    CUstream s = stream(1), t = stream(1);
    unsigned type = 99;
    size_t n = 0;
    uint64_t flags = 77;
    C(cuGraphCreate, "flags 1", (&g, 1));
    C(cuGraphCreate, "null", (NULL, 0));
    C(cuGraphCreate, "", (&g, 0));
    Copy3D copy = {.srcKind = 2, .srcDevice = d, .dstKind = 2, .dstDevice = e, .width = 4096, .height = 1, .depth = 1};
    C(cuGraphAddMemcpyNode, "", (&a, g, NULL, 0, &copy, context));
    C(cuGraphAddMemcpyNode, "null context", (&x, g, NULL, 0, &copy, NULL));
    C(cuGraphAddMemcpyNode, "null params", (&x, g, NULL, 0, NULL, context));
    C(cuGraphAddMemcpyNode, "null graph", (&x, NULL, NULL, 0, &copy, context));
    C(cuGraphAddMemcpyNode, "null result", (NULL, g, NULL, 0, &copy, context));
    copy.srcDevice = freed;
    C(cuGraphAddMemcpyNode, "freed source", (&x, g, NULL, 0, &copy, context));
    copy.srcDevice = d, copy.width = 2 * MIB;
    C(cuGraphAddMemcpyNode, "beyond the end", (&x, g, NULL, 0, &copy, context));
    copy.width = 0;
    C(cuGraphAddMemcpyNode, "width 0", (&x, g, NULL, 0, &copy, context));
    copy.width = 4096;
    C(cuGraphAddMemcpyNode, "null list of 1", (&x, g, NULL, 1, &copy, context));
    MemsetNode set = {.dst = d, .pitch = 0, .value = 7, .element = 1, .width = 64, .height = 1};
    C(cuGraphAddMemsetNode, "", (&b, g, &a, 1, &set, context));
    set.element = 3;
    C(cuGraphAddMemsetNode, "element 3", (&x, g, NULL, 0, &set, context));
    set.element = 1, set.dst = freed;
    C(cuGraphAddMemsetNode, "freed", (&x, g, NULL, 0, &set, context));
    set.dst = d, set.height = 0;
    C(cuGraphAddMemsetNode, "height 0", (&x, g, NULL, 0, &set, context));
    set.height = 1;
    HostNode host = {nothing, NULL}, bad_host = {NULL, NULL};
    C(cuGraphAddHostNode, "", (&c, g, &b, 1, &host));
    C(cuGraphAddHostNode, "null function", (&x, g, NULL, 0, &bad_host));
    C(cuGraphAddEmptyNode, "", (&x, g, &c, 1));
    CUgraphNode twice[2] = {a, a};
    CUgraphNode dup = NULL;
    C(cuGraphAddEmptyNode, "the same dependency twice", (&dup, g, twice, 2));
    if (dup) Q(cuGraphDestroyNode, (dup));
    C(cuGraphNodeGetType, "copy", (a, &type));
    V("%u", type);
    C(cuGraphNodeGetType, "memset", (b, &type));
    V("%u", type);
    C(cuGraphNodeGetType, "host", (c, &type));
    V("%u", type);
    C(cuGraphNodeGetType, "empty", (x, &type));
    V("%u", type);
    C(cuGraphGetNodes, "count", (g, NULL, &n));
    V("%zu", n);
    CUgraphNode list[16];
    n = 16;
    C(cuGraphGetNodes, "room for 16", (g, list, &n));
    V("%zu", n);
    n = 2;
    C(cuGraphGetNodes, "room for 2", (g, list, &n));
    V("%zu", n);
    C(cuGraphGetNodes, "null count", (g, list, NULL));
    C(cuGraphGetRootNodes, "count", (g, NULL, &n));
    V("%zu", n);
    C(cuGraphGetEdges, "count", (g, NULL, NULL, &n));
    V("%zu", n);
    C(cuGraphNodeGetDependencies, "count", (c, NULL, &n));
    V("%zu", n);
    C(cuGraphAddDependencies, "again the same", (g, &a, &b, 1));
    C(cuGraphAddDependencies, "to itself", (g, &a, &a, 1));
    C(cuGraphAddDependencies, "a new one", (g, &a, &c, 1));
    C(cuGraphRemoveDependencies, "that one", (g, &a, &c, 1));
    C(cuGraphRemoveDependencies, "once more", (g, &a, &c, 1));
    C(cuGraphAddDependencies, "a cycle", (g, &c, &a, 1));
    C(cuGraphInstantiateWithFlags, "after a cycle", (&exec, g, 0));
    C(cuGraphRemoveDependencies, "the cycle's", (g, &c, &a, 1));
    if (exec) Q(cuGraphExecDestroy, (exec));
    exec = NULL;
    C(cuGraphInstantiateWithFlags, "null result", (NULL, g, 0));
    C(cuGraphInstantiateWithFlags, "null graph", (&exec, NULL, 0));
    C(cuGraphInstantiateWithFlags, "flags nonsense", (&exec, g, 0x8000));
    C(cuGraphInstantiateWithFlags, "", (&exec, g, 0));
    C(cuGraphExecGetFlags, "", (exec, &flags));
    V("%llu", (unsigned long long)flags);
    C(cuGraphUpload, "", (exec, s));
    C(cuGraphLaunch, "", (exec, s));
    C(cuGraphLaunch, "default stream", (exec, NULL));
    C(cuGraphLaunch, "null exec", (NULL, s));
    C(cuStreamSynchronize, "", (s));
    C(cuGraphExecMemcpyNodeSetParams, "same", (exec, a, &copy, context));
    copy.width = 8192;
    C(cuGraphExecMemcpyNodeSetParams, "another size", (exec, a, &copy, context));
    copy.dstKind = 1, copy.dstHost = (void *)flag, copy.width = 4096;
    C(cuGraphExecMemcpyNodeSetParams, "another kind", (exec, a, &copy, context));
    copy.dstKind = 2;
    C(cuGraphExecMemcpyNodeSetParams, "a memset node", (exec, b, &copy, context));
    C(cuGraphExecMemcpyNodeSetParams, "null node", (exec, NULL, &copy, context));
    C(cuGraphMemcpyNodeSetParams, "graph's own", (a, &copy));
    C(cuGraphMemcpyNodeSetParams, "a memset node", (b, &copy));
    set.value = 8;
    C(cuGraphExecMemsetNodeSetParams, "another value", (exec, b, &set, context));
    C(cuGraphMemsetNodeSetParams, "graph's own", (b, &set));
    C(cuGraphClone, "", (&clone, g));
    C(cuGraphNodeFindInClone, "", (&x, a, clone));
    C(cuGraphNodeFindInClone, "in the original", (&x, a, g));
    C(cuGraphClone, "null", (&clone, NULL));
    struct { unsigned result; CUgraphNode node, from; } update = {99, NULL, NULL};
    C(cuGraphExecUpdate_v2, "same graph", (exec, g, &update));
    V("%u", update.result);
    CUgraphNode more;
    Q(cuGraphAddEmptyNode, (&more, g, NULL, 0));
    C(cuGraphExecUpdate_v2, "one node more", (exec, g, &update));
    V("%u", update.result);
    C(cuGraphDestroyNode, "", (more));
    Q(cuGraphCreate, (&child, 0));
    Q(cuGraphAddEmptyNode, (&x, child, NULL, 0));
    C(cuGraphAddChildGraphNode, "", (&x, g, NULL, 0, child));
    C(cuGraphNodeGetType, "child", (x, &type));
    V("%u", type);
    C(cuGraphAddChildGraphNode, "itself", (&x, g, NULL, 0, g));
    CUevent ev = NULL;
    Q(cuEventCreate, (&ev, 2));
    C(cuGraphAddEventRecordNode, "", (&x, g, NULL, 0, ev));
    C(cuGraphNodeGetType, "record", (x, &type));
    V("%u", type);
    C(cuGraphAddEventWaitNode, "", (&x, g, NULL, 0, ev));
    C(cuGraphNodeGetType, "wait", (x, &type));
    V("%u", type);
    C(cuGraphDestroy, "", (g));
    C(cuGraphLaunch, "after its graph is gone", (exec, s));
    C(cuStreamSynchronize, "", (s));
    C(cuGraphExecDestroy, "", (exec));
    C(cuGraphDestroy, "null", (NULL));
    C(cuGraphExecDestroy, "null", (NULL));
    /* One executable graph in two streams at once: wait for the flag, then take it back. */
    Q(cuGraphCreate, (&g, 0));
    MemOp wait = {.operation = 1, .address = (size_t)flag, .value = 1}, write = {.operation = 2, .address = (size_t)flag, .value = 0};
    MemOpNode wn = {.ctx = context, .count = 1, .ops = &wait}, rn = {.ctx = context, .count = 1, .ops = &write};
    C(cuGraphAddBatchMemOpNode, "wait", (&a, g, NULL, 0, &wn));
    C(cuGraphNodeGetType, "memory operations", (a, &type));
    V("%u", type);
    C(cuGraphAddBatchMemOpNode, "write", (&b, g, &a, 1, &rn));
    C(cuGraphInstantiateWithFlags, "wait and write", (&exec, g, 0));
    flag[0] = 0;
    C(cuGraphLaunch, "waiting, one stream", (exec, s));
    C(cuGraphLaunch, "waiting, another stream", (exec, t));
    flag[0] = 1;
    double until = seconds() + 1;
    while (seconds() < until && Q(cuStreamQuery, (s)) && Q(cuStreamQuery, (t))) {}
    usleep(5000);
    int first = Q(cuStreamQuery, (s)), second = Q(cuStreamQuery, (t));
    C(cuStreamQuery, "first launch, one flag", (s));
    V("%s", first == 0 && second == 600 ? "alone" : "together");
    flag[0] = 1;
    C(cuStreamSynchronize, "second launch", (t));
    /* Host functions of two streams, and of one. */
    for (int i = 0; i < 4; i++) Q(cuLaunchHostFunc, (i % 2 ? s : t, enter, NULL));
    Q(cuCtxSynchronize, ());
    begin("host functions", "at once");
    printf("%d |", most);
    for (int i = 0; i < 4; i++) Q(cuLaunchHostFunc, (s, note, &"abcd"[i]));
    Q(cuStreamSynchronize, (s));
    begin("host functions", "order");
    printf("%s |", order_text);
}

static void kernels(void) {
    start();
    CUmodule m = NULL;
    CUfunction f = NULL, g = NULL;
    CUdeviceptr d = alloc(1 * MIB), p = 0;
    size_t size = 0;
    int n = -7;
    const char *name = NULL;
    CUstream s = stream(1);
    C(cuModuleLoadData, "null image", (&m, NULL));
    C(cuModuleLoadData, "nonsense", (&m, "this is not an image"));
    C(cuModuleLoadData, "cubin of no device", (&m, "\x7f" "ELF\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"));
    C(cuModuleLoad, "no such file", (&m, "/no/such/file.ptx"));
    C(cuModuleGetFunction, "null module", (&f, NULL, "fill_bytes"));
    FILE *file = ptx_path ? fopen(ptx_path, "r") : NULL;
    if (!file) return;
    char *text = calloc(1, 4 << 20);
    if (!fread(text, 1, (4 << 20) - 1, file)) return;
    C(cuModuleLoadData, "the project's PTX", (&m, text));
    C(cuModuleGetFunction, "no such kernel", (&f, m, "no_such_kernel"));
    C(cuModuleGetFunction, "null name", (&f, m, NULL));
    C(cuModuleGetFunction, "fill_bytes", (&f, m, "fill_bytes"));
    C(cuModuleGetFunction, "again", (&g, m, "fill_bytes"));
    V("%s", f == g ? "same" : "different");
    C(cuModuleGetGlobal_v2, "no such global", (&p, &size, m, "no_such_global"));
    unsigned count = 0;
    C(cuModuleGetFunctionCount, "", (&count, m));
    V("%u", count);
    C(cuFuncGetName, "", (&name, f));
    V("%s", name);
    for (int a = 0; a <= 16; a++) {
        char kase[32];
        snprintf(kase, sizeof kase, "attribute %d", a);
        C(cuFuncGetAttribute, kase, (&n, a, f));
        /* Registers, code size and versions depend on the compiler. */
        if (a != 4 && a != 5 && a != 6 && a != 3) V("%d", n);
    }
    C(cuFuncGetAttribute, "attribute 99", (&n, 99, f));
    C(cuFuncSetAttribute, "shared memory 64 KiB", (f, 8, 65536));
    C(cuFuncSetAttribute, "shared memory 1 GiB", (f, 8, 1 << 30));
    C(cuFuncSetAttribute, "read-only attribute", (f, 4, 1));
    size_t at = 77, bytes = 77;
    for (int i = 0; i <= 3; i++) {
        char kase[32];
        snprintf(kase, sizeof kase, "parameter %d", i);
        C(cuFuncGetParamInfo, kase, (f, i, &at, &bytes));
        if (i < 3) V("offset %zu size %zu", at, bytes);
    }
    C(cuOccupancyMaxActiveBlocksPerMultiprocessor, "256 threads", (&n, f, 256, 0));
    V("%d", n);
    C(cuOccupancyMaxActiveBlocksPerMultiprocessor, "0 threads", (&n, f, 0, 0));
    C(cuOccupancyMaxActiveBlocksPerMultiprocessor, "2000 threads", (&n, f, 2000, 0));
    unsigned long long count_of = 1000;
    unsigned value = 9;
    void *params[] = {&d, &count_of, &value};
    unsigned char *h = pinned(4096);
    C(cuLaunchKernel, "", (f, 4, 1, 1, 128, 1, 1, 0, s, params, NULL));
    C(cuLaunchKernel, "grid 0", (f, 0, 1, 1, 128, 1, 1, 0, s, params, NULL));
    C(cuLaunchKernel, "block 0", (f, 1, 1, 1, 0, 1, 1, 0, s, params, NULL));
    C(cuLaunchKernel, "block 1025", (f, 1, 1, 1, 1025, 1, 1, 0, s, params, NULL));
    C(cuLaunchKernel, "block z 65", (f, 1, 1, 1, 1, 1, 65, 0, s, params, NULL));
    C(cuLaunchKernel, "grid y 65536", (f, 1, 65536, 1, 1, 1, 1, 0, s, params, NULL));
    C(cuLaunchKernel, "shared memory 1 GiB", (f, 1, 1, 1, 1, 1, 1, 1 << 30, s, params, NULL));
    C(cuLaunchKernel, "no parameters", (f, 1, 1, 1, 1, 1, 1, 0, s, NULL, NULL));
    C(cuLaunchKernel, "both kinds of parameters", (f, 1, 1, 1, 1, 1, 1, 0, s, params, params));
    struct { unsigned long long p, n; unsigned v; } packed = {d, 500, 4};
    size_t packed_size = 20;
    void *extra[] = {(void *)1, &packed, (void *)2, &packed_size, NULL};
    C(cuLaunchKernel, "packed", (f, 4, 1, 1, 128, 1, 1, 0, s, NULL, extra));
    C(cuStreamSynchronize, "", (s));
    Q(cuMemcpyDtoH_v2, (h, d, 1000));
    V("%d %d", h[499], h[500]);
    CUlibrary l = NULL;
    CUkernel k = NULL;
    C(cuLibraryLoadData, "nonsense", (&l, "this is not an image", NULL, NULL, 0, NULL, NULL, 0));
    C(cuLibraryLoadData, "the project's PTX", (&l, text, NULL, NULL, 0, NULL, NULL, 0));
    C(cuLibraryGetKernel, "no such kernel", (&k, l, "no_such_kernel"));
    C(cuLibraryGetKernel, "fill_bytes", (&k, l, "fill_bytes"));
    C(cuKernelGetFunction, "", (&g, k));
    C(cuLaunchKernel, "a library's", (g, 4, 1, 1, 128, 1, 1, 0, s, params, NULL));
    C(cuStreamSynchronize, "", (s));
    CUgraph graph = NULL;
    CUgraphNode node = NULL;
    Q(cuGraphCreate, (&graph, 0));
    KernelNode kn = {.func = f, .gx = 1, .gy = 1, .gz = 1, .bx = 32, .by = 1, .bz = 1, .params = params};
    C(cuGraphAddKernelNode_v2, "", (&node, graph, NULL, 0, &kn));
    kn.gx = 0;
    C(cuGraphAddKernelNode_v2, "grid 0", (&node, graph, NULL, 0, &kn));
    kn.gx = 1, kn.func = NULL;
    C(cuGraphAddKernelNode_v2, "null function", (&node, graph, NULL, 0, &kn));
    C(cuLibraryUnload, "", (l));
    C(cuModuleUnload, "", (m));
    C(cuModuleUnload, "null", (NULL));
    C(cuLibraryUnload, "null", (NULL));
}

static void pools(void) {
    start();
    CUmemoryPool def = NULL, cur = NULL, mine = NULL;
    CUstream s = stream(1);
    CUdeviceptr p = 0, q = 0, plain = alloc(4096);
    uint64_t value = 77;
    int flag = 77;
    unsigned access = 77;
    C(cuDeviceGetDefaultMemPool, "", (&def, 0));
    C(cuDeviceGetMemPool, "", (&cur, 0));
    V("%s", cur == def ? "the default" : "another");
    C(cuDeviceGetDefaultMemPool, "99", (&def, 99));
    C(cuDeviceGetDefaultMemPool, "null", (NULL, 0));
    C(cuMemAllocAsync, "0 bytes", (&p, 0, s));
    C(cuMemAllocAsync, "null", (NULL, 64, s));
    C(cuMemAllocAsync, "1 TiB", (&p, (size_t)1 << 40, s));
    C(cuMemAllocAsync, "1000 bytes", (&p, 1000, s));
    CUdeviceptr base = 0;
    size_t size = 0;
    C(cuMemGetAddressRange_v2, "pool", (&base, &size, p + 100));
    V("%s size %zu", base == p ? "base" : "other", size);
    C(cuMemsetD8Async, "pool", (p, 1, 1000, s));
    C(cuMemsetD8Async, "pool, beyond the end by 1", (p, 1, 1001, s));
    C(cuMemFreeAsync, "interior", (p + 256, s));
    C(cuMemFreeAsync, "", (p, s));
    C(cuMemFreeAsync, "twice", (p, s));
    C(cuMemFreeAsync, "null", (0, s));
    C(cuMemFreeAsync, "plain memory", (plain, s));
    C(cuMemAllocAsync, "again", (&q, 1000, s));
    V("%s", p == q ? "same address" : "another address");
    C(cuMemFree_v2, "pool memory", (q));
    C(cuStreamSynchronize, "", (s));
    PoolProps props = {.type = 1, .location = {1, 0}};
    C(cuMemPoolCreate, "null", (NULL, &props));
    C(cuMemPoolCreate, "null props", (&mine, NULL));
    props.type = 9;
    C(cuMemPoolCreate, "type 9", (&mine, &props));
    props.type = 1, props.location.id = 99;
    C(cuMemPoolCreate, "device 99", (&mine, &props));
    props.location.id = 0;
    C(cuMemPoolCreate, "", (&mine, &props));
    for (unsigned a = 1; a <= 8; a++) {
        char kase[32];
        snprintf(kase, sizeof kase, "attribute %u", a);
        value = 0;
        C(cuMemPoolGetAttribute, kase, (mine, a, &value));
        V("%llu", (unsigned long long)(a <= 3 ? (unsigned)value : value));
    }
    C(cuMemPoolGetAttribute, "attribute 99", (mine, 99, &value));
    C(cuMemPoolGetAttribute, "null", (mine, 4, NULL));
    value = 64 * MIB;
    C(cuMemPoolSetAttribute, "release threshold", (mine, 4, &value));
    C(cuMemPoolSetAttribute, "reserved now, read-only", (mine, 5, &value));
    C(cuMemPoolSetAttribute, "high mark to non-zero", (mine, 6, &value));
    value = 0;
    C(cuMemPoolSetAttribute, "high mark to zero", (mine, 6, &value));
    flag = 0;
    C(cuMemPoolSetAttribute, "follow events 0", (mine, 1, &flag));
    C(cuMemAllocFromPoolAsync, "", (&p, 1 * MIB, mine, s));
    C(cuMemPoolGetAttribute, "used now", (mine, 7, &value));
    V("%llu", (unsigned long long)value);
    C(cuMemPoolGetAttribute, "reserved now", (mine, 5, &value));
    V("%llu", (unsigned long long)value);
    Location where = {1, 0}, nowhere = {1, 99};
    C(cuMemPoolGetAccess, "own device", (&access, mine, &where));
    V("%u", access);
    C(cuMemPoolGetAccess, "device 99", (&access, mine, &nowhere));
    AccessDesc desc = {{1, 0}, 0};
    C(cuMemPoolSetAccess, "take away from the own device", (mine, &desc, 1));
    desc.flags = 3;
    C(cuMemPoolSetAccess, "own device", (mine, &desc, 1));
    desc.flags = 9;
    C(cuMemPoolSetAccess, "flags 9", (mine, &desc, 1));
    C(cuDeviceSetMemPool, "", (0, mine));
    C(cuDeviceGetMemPool, "after", (&cur, 0));
    V("%s", cur == mine ? "mine" : "another");
    CUipcHandle handle;
    C(cuIpcGetMemHandle, "pool memory", (&handle, p));
    C(cuMemPoolDestroy, "with an allocation", (mine));
    C(cuDeviceGetMemPool, "after destroying", (&cur, 0));
    V("%s", cur == def ? "default" : "another");
    C(cuMemFreeAsync, "of a destroyed pool", (p, s));
    C(cuStreamSynchronize, "", (s));
    C(cuMemPoolDestroy, "the default", (def));
    C(cuMemPoolTrimTo, "0", (def, 0));
    C(cuMemPoolTrimTo, "null pool", (NULL, 0));
    C(cuMemAllocManaged, "0 bytes", (&p, 0, 1));
    C(cuMemAllocManaged, "flags 0", (&p, 64, 0));
    C(cuMemAllocManaged, "flags 3", (&p, 64, 3));
    C(cuMemAllocManaged, "flags 4", (&p, 64, 4));
    C(cuMemAllocManaged, "host", (&p, 64, 2));
    C(cuMemAllocManaged, "global", (&p, 65536, 1));
    C(cuMemsetD8_v2, "managed", (p, 3, 65536));
    Q(cuCtxSynchronize, ());
    V("%d", *(volatile char *)(size_t)(p + 65535));
    C(cuIpcGetMemHandle, "managed", (&handle, p));
    C(cuMemGetAddressRange_v2, "managed", (&base, &size, p + 1));
    V("%s size %zu", base == p ? "base" : "other", size);
    C(cuMemHostGetDevicePointer_v2, "managed", (&q, (void *)(size_t)p, 0));
    C(cuMemFree_v2, "managed", (p));
}

static void virtual_memory(void) {
    start();
    CUdeviceptr r = 0, fixed = 0;
    CUmemHandle a = 0, b = 0, back = 0;
    size_t gran = 0;
    AllocProp prop = {.type = 1, .location = {1, 0}}, got;
    AccessDesc access = {{1, 0}, 3}, none = {{1, 99}, 3};
    C(cuMemGetAllocationGranularity, "minimum", (&gran, &prop, 0));
    V("%zu", gran);
    C(cuMemGetAllocationGranularity, "recommended", (&gran, &prop, 1));
    V("%zu", gran);
    C(cuMemGetAllocationGranularity, "option 9", (&gran, &prop, 9));
    C(cuMemGetAllocationGranularity, "null", (NULL, &prop, 0));
    gran = 2 * MIB;
    C(cuMemAddressReserve, "0 bytes", (&r, 0, 0, 0, 0));
    C(cuMemAddressReserve, "odd size", (&r, gran + 1, 0, 0, 0));
    C(cuMemAddressReserve, "alignment 3", (&r, gran, 3, 0, 0));
    C(cuMemAddressReserve, "flags 1", (&r, gran, 0, 0, 1));
    C(cuMemAddressReserve, "null", (NULL, gran, 0, 0, 0));
    C(cuMemAddressReserve, "16 MiB", (&r, 8 * gran, 0, 0, 0));
    V("aligned %d", r % gran == 0);
    C(cuMemAddressReserve, "where something is", (&fixed, 8 * gran, 0, r, 0));
    V("%s", fixed == r ? "same" : "another");
    C(cuMemAddressFree, "another size", (fixed, gran));
    C(cuMemAddressFree, "", (fixed, 8 * gran));
    C(cuMemAddressFree, "twice", (fixed, 8 * gran));
    C(cuMemCreate, "0 bytes", (&a, 0, &prop, 0));
    C(cuMemCreate, "odd size", (&a, gran + 4096, &prop, 0));
    C(cuMemCreate, "flags 1", (&a, gran, &prop, 1));
    C(cuMemCreate, "null props", (&a, gran, NULL, 0));
    prop.type = 0;
    C(cuMemCreate, "type 0", (&a, gran, &prop, 0));
    prop.type = 1, prop.location.id = 99;
    C(cuMemCreate, "device 99", (&a, gran, &prop, 0));
    prop.location.id = 0;
    C(cuMemCreate, "1 TiB", (&a, (size_t)1 << 40, &prop, 0));
    C(cuMemCreate, "", (&a, gran, &prop, 0));
    C(cuMemCreate, "twice as large", (&b, 2 * gran, &prop, 0));
    C(cuMemGetAllocationPropertiesFromHandle, "", (&got, a));
    V("type %u location %u %d", got.type, got.location.kind, got.location.id);
    C(cuMemGetAllocationPropertiesFromHandle, "no handle", (&got, 0));
    C(cuMemMap, "offset", (r, gran, gran, b, 0));
    C(cuMemMap, "flags 1", (r, gran, 0, a, 1));
    C(cuMemMap, "a part of it", (r, gran, 0, b, 0));
    C(cuMemMap, "outside a reservation", (r + 64 * gran * 1024, gran, 0, a, 0));
    C(cuMemMap, "not aligned", (r + 4096, gran, 0, a, 0));
    C(cuMemMap, "", (r, gran, 0, a, 0));
    C(cuMemMap, "where it is mapped", (r, gran, 0, a, 0));
    C(cuMemMap, "a second place", (r + 4 * gran, gran, 0, a, 0));
    C(cuMemMap, "the neighbour", (r + gran, 2 * gran, 0, b, 0));
    unsigned long long may = 77;
    Location here = {1, 0};
    C(cuMemGetAccess, "before cuMemSetAccess", (&may, &here, r));
    V("%llu", may);
    C(cuMemSetAccess, "device 99", (r, gran, &none, 1));
    C(cuMemSetAccess, "count 0", (r, gran, &access, 0));
    C(cuMemSetAccess, "not mapped", (r + 6 * gran, gran, &access, 1));
    C(cuMemSetAccess, "part of a mapping", (r + gran, gran, &access, 1));
    C(cuMemSetAccess, "two mappings", (r, 3 * gran, &access, 1));
    C(cuMemGetAccess, "after", (&may, &here, r));
    V("%llu", may);
    C(cuMemsetD8_v2, "one mapping", (r, 5, gran));
    C(cuMemsetD8_v2, "across two mappings", (r, 6, 3 * gran));
    C(cuMemsetD8_v2, "beyond them", (r, 6, 3 * gran + 1));
    CUdeviceptr base = 0;
    size_t size = 0;
    C(cuMemGetAddressRange_v2, "second mapping", (&base, &size, r + gran + 5));
    V("%s size %zu", base == r + gran ? "base" : base == r ? "reservation" : "other", size);
    unsigned long long id = 0, id2 = 0;
    C(cuPointerGetAttribute, "buffer_id, first place", (&id, 7, r));
    C(cuPointerGetAttribute, "buffer_id, second mapping", (&id2, 7, r + gran));
    V("%s", id == id2 ? "same" : "different");
    attributes("mapped", r + 8, r);
    int one = 1;
    C(cuPointerSetAttribute, "sync_memops, mapped", (&one, 6, r));
    C(cuMemRetainAllocationHandle, "", (&back, (void *)(size_t)(r + 5)));
    V("%s", back == a ? "same" : "another");
    C(cuMemRelease, "", (back));
    C(cuMemRetainAllocationHandle, "not mapped", (&back, (void *)(size_t)(r + 6 * gran)));
    CUipcHandle handle;
    C(cuIpcGetMemHandle, "mapped", (&handle, r));
    C(cuMemFree_v2, "mapped", (r));
    C(cuMemRelease, "while mapped", (a));
    C(cuMemsetD8_v2, "released while mapped", (r, 5, gran));
    C(cuMemUnmap, "half of a mapping", (r + gran, gran));
    C(cuMemUnmap, "two mappings", (r, 3 * gran));
    C(cuMemUnmap, "twice", (r, gran));
    C(cuMemsetD8_v2, "unmapped", (r, 5, gran));
    C(cuMemAddressFree, "with a mapping", (r, 8 * gran));
    C(cuMemUnmap, "second place", (r + 4 * gran, gran));
    C(cuMemAddressFree, "", (r, 8 * gran));
    C(cuMemRelease, "the neighbour", (b));
    C(cuMemRelease, "no handle", (0));
}

static void peers(void) {
    start();
    if (gpus < 2) {
        begin("two GPUs", "");
        printf("SKIPPED |");
        return;
    }
    CUcontext second = NULL;
    int n = -7;
    Q(cuDevicePrimaryCtxRetain, (&second, 1));
    C(cuDeviceCanAccessPeer, "0 1", (&n, 0, 1));
    V("%d", n);
    for (unsigned a = 0; a <= 5; a++) {
        char kase[32];
        snprintf(kase, sizeof kase, "attribute %u", a);
        C(cuDeviceGetP2PAttribute, kase, (&n, a, 0, 1));
        V("%d", n);
    }
    CUdeviceptr d = alloc(1 * MIB);
    CUstream s = stream(1);
    Q(cuCtxSetCurrent, (second));
    CUdeviceptr e = alloc(1 * MIB);
    CUstream t = stream(1);
    CUevent ev = NULL;
    Q(cuEventCreate, (&ev, 2));
    Q(cuCtxSetCurrent, (context));
    C(cuMemcpyAsync, "to the other GPU, before peer access", (e, d, 4096, s));
    C(cuMemcpyPeerAsync, "before peer access", (e, second, d, context, 4096, s));
    C(cuMemcpyDtoDAsync_v2, "before peer access", (e, d, 4096, s));
    C(cuMemcpyAsync, "the other context's stream", (e, d, 4096, t));
    C(cuMemsetD8_v2, "the other GPU's memory, before peer access", (e, 1, 64));
    C(cuStreamSynchronize, "", (s));
    C(cuCtxEnablePeerAccess, "flags 1", (second, 1));
    C(cuCtxEnablePeerAccess, "itself", (context, 0));
    C(cuCtxEnablePeerAccess, "null", (NULL, 0));
    C(cuCtxDisablePeerAccess, "not enabled", (second));
    C(cuCtxEnablePeerAccess, "", (second, 0));
    C(cuCtxEnablePeerAccess, "again", (second, 0));
    C(cuMemcpyAsync, "to the other GPU", (e, d, 4096, s));
    C(cuMemcpyAsync, "from the other GPU", (d, e, 4096, s));
    C(cuMemsetD8_v2, "the other GPU's memory", (e, 1, 64));
    C(cuEventRecord, "event of the other context", (ev, s));
    C(cuEventRecord, "its own", (ev, t));
    C(cuStreamWaitEvent, "an event of the other context", (s, ev, 0));
    C(cuStreamSynchronize, "the other context's stream", (t));
    C(cuCtxDisablePeerAccess, "", (second));
    C(cuMemFree_v2, "the other GPU's memory", (e));
    Q(cuCtxSetCurrent, (second));
    e = alloc(1 * MIB);
    attributes("of the other GPU", e, e);
    Q(cuCtxSetCurrent, (context));
    unsigned flags = 9;
    C(cuPointerGetAttribute, "access_flags from the first GPU", (&flags, 16, e));
    V("%u", flags);
}

/* Two processes: `say` writes, `hear` reads. */
static int to_peer[2], to_self[2];
static void say(int fd, const void *p, size_t n) {
    if (write(fd, p, n) != (ssize_t)n) exit(1);
}
static void hear(int fd, void *p, size_t n) {
    for (size_t at = 0; at < n;) {
        ssize_t r = read(fd, (char *)p + at, n - at);
        if (r <= 0) exit(1);
        at += r;
    }
}

static void owner(int in, int out) {
    char word;
    CUipcHandle handle, inner, event_handle;
    CUevent ev = NULL;
    start();
    CUdeviceptr d = alloc(4 * MIB), freed = 0;
    CUdeviceptr other = alloc(64 * 1024);
    Q(cuMemsetD8_v2, (d, 0x5a, 4 * MIB));
    Q(cuEventCreate, (&ev, 6));
    Q(cuCtxSynchronize, ());
    Q(cuIpcGetMemHandle, (&handle, d));
    Q(cuIpcGetMemHandle, (&inner, other));
    Q(cuIpcGetEventHandle, (&event_handle, ev));
    say(out, &handle, sizeof handle);
    say(out, &inner, sizeof inner);
    say(out, &event_handle, sizeof event_handle);
    hear(in, &word, 1);
    freed = alloc(2 * MIB);
    Q(cuIpcGetMemHandle, (&handle, freed));
    Q(cuMemFree_v2, (freed));
    say(out, &handle, sizeof handle);
    hear(in, &word, 1);
    exit(0);
}

static void ipc(void) {
    if (pipe(to_peer) || pipe(to_self)) return;
    pid_t pid = fork();
    if (pid == 0) {
        alarm(15);
        if (!freopen("/dev/null", "w", stdout)) exit(1);
        owner(to_peer[0], to_self[1]);
    }
    start();
    CUipcHandle own, handle, second, event_handle, bad;
    CUdeviceptr d = alloc(4 * MIB), p = 0, q = 0, r = 0;
    unsigned char byte[4] = {0};
    CUevent ev = NULL, mine = NULL;
    C(cuIpcGetMemHandle, "base", (&own, d));
    C(cuIpcGetMemHandle, "interior", (&handle, d + 1000));
    V("%s", memcmp(&own, &handle, sizeof own) ? "differs" : "same");
    C(cuIpcGetMemHandle, "null address", (&handle, 0));
    C(cuIpcGetMemHandle, "null result", (NULL, d));
    C(cuIpcGetMemHandle, "pinned host", (&handle, (size_t)pinned(4096)));
    C(cuIpcGetMemHandle, "plain host", (&handle, (size_t)&p));
    C(cuIpcOpenMemHandle_v2, "of this process", (&p, own, 1));
    Q(cuEventCreate, (&mine, 6));
    C(cuIpcGetEventHandle, "", (&event_handle, mine));
    C(cuIpcOpenEventHandle, "of this process", (&ev, event_handle));
    C(cuIpcGetEventHandle, "null result", (NULL, mine));
    memset(&bad, 0, sizeof bad);
    C(cuIpcOpenMemHandle_v2, "all zeros", (&p, bad, 1));
    C(cuIpcOpenEventHandle, "all zeros", (&ev, bad));
    hear(to_self[0], &handle, sizeof handle);
    hear(to_self[0], &second, sizeof second);
    hear(to_self[0], &event_handle, sizeof event_handle);
    C(cuIpcOpenMemHandle_v2, "flags 0", (&p, handle, 0));
    if (p) Q(cuIpcCloseMemHandle, (p)), p = 0;
    C(cuIpcOpenMemHandle_v2, "flags 2", (&p, handle, 2));
    C(cuIpcOpenMemHandle_v2, "null result", (NULL, handle, 1));
    C(cuIpcOpenMemHandle_v2, "", (&p, handle, 1));
    C(cuMemcpyDtoH_v2, "mapped", (byte, p + 4 * MIB - 4, 4));
    V("%x", byte[3]);
    C(cuMemcpyDtoH_v2, "mapped, beyond the end", (byte, p + 4 * MIB - 2, 4));
    C(cuIpcOpenMemHandle_v2, "a second time", (&q, handle, 1));
    V("%s", q == p ? "same address" : q ? "another" : "null");
    C(cuIpcOpenMemHandle_v2, "small, of the same process", (&r, second, 1));
    CUdeviceptr base = 0;
    size_t size = 0;
    C(cuMemGetAddressRange_v2, "mapped", (&base, &size, p + 5));
    V("%s size %zu", base == p ? "base" : "other", size);
    C(cuMemGetAddressRange_v2, "mapped, small", (&base, &size, r + 5));
    V("%s size %zu", base == r ? "base" : "other", size);
    attributes("ipc", p + 8, p);
    int one = 1;
    C(cuPointerSetAttribute, "sync_memops, mapped", (&one, 6, p));
    C(cuIpcGetMemHandle, "of a mapping", (&own, p));
    C(cuMemFree_v2, "a mapping", (p));
    C(cuIpcCloseMemHandle, "interior", (p + 4096));
    C(cuIpcCloseMemHandle, "own memory", (d));
    C(cuIpcCloseMemHandle, "null", (0));
    CUcontext second_context = NULL;
    C(cuCtxCreate_v2, "second context", (&second_context, 0, 0));
    C(cuIpcOpenMemHandle_v2, "in a second context", (&q, handle, 1));
    V("%s", q == p ? "same address" : q ? "another" : "null");
    C(cuMemcpyDtoH_v2, "the second mapping", (byte, q, 4));
    if (q && q != p) C(cuIpcCloseMemHandle, "the second context's", (q));
    Q(cuCtxSetCurrent, (context));
    if (q == p) {
        C(cuIpcCloseMemHandle, "opened twice: first", (p));
        C(cuMemcpyDtoH_v2, "opened twice, closed once", (byte, p, 4));
    }
    C(cuIpcCloseMemHandle, "", (p));
    C(cuIpcCloseMemHandle, "twice", (p));
    C(cuMemcpyDtoH_v2, "closed", (byte, p, 4));
    C(cuIpcOpenMemHandle_v2, "after closing", (&p, handle, 1));
    Q(cuIpcCloseMemHandle, (p));
    C(cuIpcOpenEventHandle, "", (&ev, event_handle));
    C(cuEventQuery, "opened, never recorded", (ev));
    CUstream s = stream(1);
    C(cuEventRecord, "opened", (ev, s));
    C(cuEventSynchronize, "opened", (ev));
    C(cuIpcGetEventHandle, "opened", (&event_handle, ev));
    float ms;
    C(cuEventElapsedTime, "opened", (&ms, ev, ev));
    C(cuEventDestroy_v2, "opened", (ev));
    say(to_peer[1], "x", 1);
    hear(to_self[0], &handle, sizeof handle);
    C(cuIpcOpenMemHandle_v2, "freed by its owner", (&p, handle, 1));
    say(to_peer[1], "x", 1);
    waitpid(pid, NULL, 0);
    C(cuIpcOpenMemHandle_v2, "its owner is gone", (&p, second, 1));
}

static volatile int gate_open;
static void gate(void *p) {
    (void)p;
    for (int i = 0; i < 50 && !gate_open; i++) usleep(1000);
}

/* Which calls wait for work that is pending: a host function holds two streams for 50 ms, then the streams are asked. */
static void implicit(void) {
    start();
    CUdeviceptr d = alloc(8 * MIB), e = alloc(8 * MIB), victim = 0, p = 0;
    char *h = pinned(1 * MIB), *m = calloc(1, 1 << 20);
    void *hp = NULL;
    CUstream non = stream(1), blocking = stream(0), free_stream = stream(1), free_blocking = stream(0), made = NULL;
    CUevent ev = NULL, em = NULL;
    CUmemoryPool pool = NULL;
    CUgraph g = NULL;
    CUgraphNode node;
    CUgraphExec exec = NULL, exec2 = NULL;
    CUcontext c2 = NULL;
    AllocProp prop = {.type = 1, .location = {1, 0}};
    AccessDesc access = {{1, 0}, 3};
    CUmemHandle mem = 0;
    CUdeviceptr r = 0;
    CUipcHandle handle;
    int one = 1;
    size_t size;
    Q(cuEventCreate, (&ev, 2));
    Q(cuEventRecord, (ev, free_stream));
    Q(cuDeviceGetDefaultMemPool, (&pool, 0));
    Q(cuGraphCreate, (&g, 0));
    Q(cuGraphAddEmptyNode, (&node, g, NULL, 0));
    Q(cuGraphInstantiateWithFlags, (&exec, g, 0));
    Q(cuMemAddressReserve, (&r, 2 * MIB, 0, 0, 0));
    /* The first call of a kind may make what it needs. */
    Q(cuMemAllocAsync, (&p, 4096, free_stream));
    Q(cuMemFreeAsync, (p, free_stream));
    Q(cuMemcpyDtoD_v2, (d, e, 64));
    Q(cuMemcpyAsync, (d, (size_t)m, 64, free_stream));
    Q(cuMemcpyAsync, ((size_t)h, d, 64, free_stream));
    Q(cuMemsetD8Async, (d, 1, 64, free_stream));
    Q(cuGraphLaunch, (exec, free_stream));
    Q(cuLaunchHostFunc, (free_stream, nothing, NULL));
    Q(cuCtxSynchronize, ());
#define HELD(name, what, args) \
    do { \
        gate_open = 0; \
        Q(cuLaunchHostFunc, (non, gate, NULL)); \
        Q(cuLaunchHostFunc, (blocking, gate, NULL)); \
        C(name, what, args); \
        usleep(2000); \
        int a = Q(cuStreamQuery, (non)), b = Q(cuStreamQuery, (blocking)); \
        int l = Q(cuStreamQuery, (free_stream)), l2 = Q(cuStreamQuery, (free_blocking)); \
        gate_open = 1; \
        V("held non-blocking %d blocking %d, free non-blocking %d blocking %d", a, b, l, l2); \
        Q(cuCtxSynchronize, ()); \
    } while (0)
    HELD(cuMemAlloc_v2, "", (&victim, 1 * MIB));
    HELD(cuMemAlloc_v2, "large", (&p, 256 * MIB));
    HELD(cuMemFree_v2, "large", (p));
    HELD(cuMemFree_v2, "", (victim));
    HELD(cuMemHostAlloc, "", (&hp, 1 * MIB, 0));
    HELD(cuMemFreeHost, "", (hp));
    HELD(cuMemHostRegister_v2, "", (m, 1 << 20, 0));
    HELD(cuMemHostUnregister, "", (m));
    HELD(cuMemsetD8_v2, "", (d, 1, 1 * MIB));
    HELD(cuMemcpyDtoD_v2, "", (d, e, 1 * MIB));
    HELD(cuMemcpyHtoD_v2, "pageable", (d, m, 64));
    HELD(cuMemcpyHtoD_v2, "pageable, large", (d, m, 1 << 20));
    HELD(cuMemcpyHtoD_v2, "pinned", (d, h, 1 << 20));
    HELD(cuMemcpyDtoH_v2, "pageable", (m, d, 64));
    HELD(cuMemcpyDtoH_v2, "pinned", (h, d, 1 << 20));
    HELD(cuMemcpyAsync, "free stream", (d, e, 64, free_stream));
    HELD(cuMemcpyAsync, "free blocking stream", (d, e, 64, free_blocking));
    HELD(cuMemcpyAsync, "from pageable, free stream", (d, (size_t)m, 64, free_stream));
    HELD(cuMemcpyAsync, "to pageable, free stream", ((size_t)m, d, 64, free_stream));
    HELD(cuMemcpyAsync, "from pageable, default stream", (d, (size_t)m, 64, NULL));
    HELD(cuMemsetD8Async, "default stream", (d, 1, 64, NULL));
    HELD(cuEventSynchronize, "of a free stream", (ev));
    HELD(cuStreamSynchronize, "free stream", (free_stream));
    HELD(cuStreamSynchronize, "free blocking stream", (free_blocking));
    HELD(cuStreamSynchronize, "default stream", (NULL));
    HELD(cuCtxSynchronize, "", ());
    HELD(cuStreamCreate, "", (&made, 0));
    HELD(cuStreamDestroy_v2, "idle", (made));
    HELD(cuEventCreate, "", (&em, 0));
    HELD(cuEventDestroy_v2, "", (em));
    HELD(cuMemAllocAsync, "free stream", (&p, 1 * MIB, free_stream));
    HELD(cuMemFreeAsync, "free stream", (p, free_stream));
    HELD(cuMemPoolTrimTo, "", (pool, 0));
    HELD(cuPointerSetAttribute, "sync_memops", (&one, 6, d));
    HELD(cuIpcGetMemHandle, "", (&handle, d));
    HELD(cuMemGetInfo_v2, "", (&size, &size));
    HELD(cuGraphInstantiateWithFlags, "", (&exec2, g, 0));
    HELD(cuGraphLaunch, "free stream", (exec, free_stream));
    HELD(cuGraphExecDestroy, "", (exec2));
    HELD(cuMemCreate, "", (&mem, 2 * MIB, &prop, 0));
    HELD(cuMemMap, "", (r, 2 * MIB, 0, mem, 0));
    HELD(cuMemSetAccess, "", (r, 2 * MIB, &access, 1));
    HELD(cuMemUnmap, "", (r, 2 * MIB));
    HELD(cuMemRelease, "", (mem));
    HELD(cuMemAllocManaged, "", (&p, 1 * MIB, 1));
    HELD(cuMemFree_v2, "managed", (p));
    HELD(cuCtxCreate_v2, "", (&c2, 0, 0));
    Q(cuCtxSetCurrent, (context));
    HELD(cuCtxDestroy_v2, "another context", (c2));
    HELD(cuStreamDestroy_v2, "held", (blocking));
}

/* Calls named as if they waited, asked right after. */
static void early(void) {
    start();
    size_t n = 512 * MIB;
    CUdeviceptr d = alloc(n), e = alloc(n);
    if (!d || !e) return;
    char *h = pinned(64 * MIB);
    int one = 1;
    Q(cuMemcpyDtoD_v2, (d, e, n));
    Q(cuMemsetD8_v2, (d, 1, n));
    Q(cuCtxSynchronize, ());
#define AFTER(name, what, args) \
    do { \
        C(name, what, args); \
        V("then %d", Q(cuStreamQuery, (NULL))); \
        Q(cuCtxSynchronize, ()); \
    } while (0)
    AFTER(cuMemcpyDtoD_v2, "512 MiB", (d, e, n));
    AFTER(cuMemcpy, "512 MiB, device to device", (d, e, n));
    AFTER(cuMemsetD8_v2, "512 MiB", (d, 1, n));
    AFTER(cuMemsetD32_v2, "512 MiB", (d, 1, n / 4));
    AFTER(cuMemcpyHtoD_v2, "64 MiB, pinned", (d, h, 64 * MIB));
    AFTER(cuMemcpyDtoH_v2, "64 MiB, pinned", (h, d, 64 * MIB));
    AFTER(cuMemsetD8_v2, "64 MiB of pinned memory", ((size_t)h, 1, 64 * MIB));
    C(cuMemsetD8_v2, "512 MiB, then sync_memops", (d, 1, n));
    C(cuPointerSetAttribute, "sync_memops on what is being set", (&one, 6, d));
    V("then %d", Q(cuStreamQuery, (NULL)));
    AFTER(cuMemcpyDtoD_v2, "512 MiB, sync_memops on the destination", (d, e, n));
    AFTER(cuMemcpyDtoD_v2, "512 MiB, sync_memops on the source", (e, d, n));
    AFTER(cuMemsetD8_v2, "512 MiB, sync_memops", (d, 1, n));
    AFTER(cuMemcpyAsync, "512 MiB, sync_memops, stream call", (d, e, n, NULL));
    C(cuMemcpyDtoD_v2, "512 MiB, twice", (e, e, n / 2));
    C(cuPointerSetAttribute, "sync_memops on other memory", (&one, 6, e));
    V("then %d", Q(cuStreamQuery, (NULL)));
}

/* A wait pending on the device, and how many other streams stand still behind it. */
static void queues_with(const char *connections) {
    if (connections) setenv("CUDA_DEVICE_MAX_CONNECTIONS", connections, 1);
    else unsetenv("CUDA_DEVICE_MAX_CONNECTIONS");
    start();
    enum { N = 40 };
    CUstream waiting[8], others[N];
    CUdeviceptr d = alloc(1 * MIB);
    char *h = pinned(1 * MIB);
    volatile uint32_t *flag = pinned(4096);
    for (int i = 0; i < 8; i++) waiting[i] = stream(1);
    for (int i = 0; i < N; i++) others[i] = stream(1);
    for (int i = 0; i < N; i++) Q(cuMemcpyAsync, ((size_t)h + i * 4096, d + i * 4096, 4096, others[i]));
    for (int i = 0; i < N; i++) Q(cuMemsetD8Async, (d + i * 4096, 1, 4096, others[i]));
    Q(cuCtxSynchronize, ());
    int counts[] = {1, 2, 4, 8};
    for (int k = 0; k < 4; k++) {
        for (int behind = 0; behind < 2; behind++) {
            flag[0] = 0;
            for (int i = 0; i < counts[k]; i++) {
                Q(cuStreamWaitValue32_v2, (waiting[i], (size_t)flag, 1, 0));
                if (behind) Q(cuMemcpyAsync, ((size_t)h + 900000, d, 4096, waiting[i]));
            }
            for (int i = 0; i < N; i++) Q(cuMemcpyAsync, ((size_t)h + i * 4096, d + i * 4096, 4096, others[i]));
            usleep(20000);
            int copies = 0, fills = 0;
            for (int i = 0; i < N; i++) copies += Q(cuStreamQuery, (others[i])) == 600;
            flag[0] = 1;
            Q(cuCtxSynchronize, ());
            flag[0] = 0;
            for (int i = 0; i < counts[k]; i++) {
                Q(cuStreamWaitValue32_v2, (waiting[i], (size_t)flag, 1, 0));
                if (behind) Q(cuMemcpyAsync, ((size_t)h + 900000, d, 4096, waiting[i]));
            }
            for (int i = 0; i < N; i++) Q(cuMemsetD8Async, (d + i * 4096, 1, 4096, others[i]));
            usleep(20000);
            for (int i = 0; i < N; i++) fills += Q(cuStreamQuery, (others[i])) == 600;
            flag[0] = 1;
            Q(cuCtxSynchronize, ());
            char kase[96];
            snprintf(kase, sizeof kase, "connections %s, %d pending%s", connections ? connections : "default", counts[k],
                behind ? " with a copy to the host behind" : "");
            begin("waits", kase);
            printf("of 40 other streams stalled | copies to the host %d memsets %d", copies, fills);
        }
    }
}
static void queues_default(void) { queues_with(NULL); }
static void queues_one(void) { queues_with("1"); }
static void queues_many(void) { queues_with("32"); }

/* A fault on the device, and what works afterwards. */
static void sticky(void) {
    start();
    CUmodule m = NULL;
    CUfunction f = NULL;
    FILE *file = ptx_path ? fopen(ptx_path, "r") : NULL;
    if (!file) return;
    char *text = calloc(1, 4 << 20);
    if (!fread(text, 1, (4 << 20) - 1, file)) return;
    Q(cuModuleLoadData, (&m, text));
    Q(cuModuleGetFunction, (&f, m, "fill_bytes"));
    CUstream s = stream(1), t = stream(1);
    CUdeviceptr d = alloc(4096), p = 0x10000, q = 0;
    CUevent ev = NULL;
    char byte;
    Q(cuEventCreate, (&ev, 2));
    unsigned long long n = 100;
    unsigned value = 1;
    void *params[] = {&p, &n, &value};
    C(cuLaunchKernel, "illegal address", (f, 1, 1, 1, 32, 1, 1, 0, s, params, NULL));
    C(cuStreamSynchronize, "its stream", (s));
    C(cuStreamQuery, "another stream", (t));
    C(cuCtxSynchronize, "", ());
    C(cuMemAlloc_v2, "", (&q, 4096));
    C(cuMemFree_v2, "", (d));
    C(cuMemcpyDtoH_v2, "", (&byte, d, 1));
    C(cuMemsetD8Async, "", (d, 1, 1, t));
    C(cuStreamCreate, "", (&t, 0));
    C(cuEventQuery, "", (ev));
    C(cuEventRecord, "", (ev, t));
    C(cuPointerGetAttribute, "", (&q, 7, d));
    C(cuCtxGetDevice, "", ((CUdevice *)&q));
    C(cuStreamDestroy_v2, "", (s));
    C(cuDevicePrimaryCtxReset_v2, "", (0));
    C(cuMemAlloc_v2, "after reset", (&q, 4096));
}

/* What the manual leaves undefined. Each is asked in a process that may die of it. */
static int *undefined_at;
static void undefined(void) {
    start();
    CUdeviceptr d = alloc(4096);
    CUstream gone = stream(1), s = stream(1);
    CUevent no_event = NULL, ev = NULL;
    CUgraph g = NULL;
    CUgraphExec exec = NULL;
    CUgraphNode node = NULL;
    CUcontext c = NULL;
    CUmemoryPool pool = NULL;
    PoolProps props = {.type = 1, .location = {1, 0}};
    unsigned u;
    CUdeviceptr p = 0;
    void *garbage = (void *)0x123450;
    Q(cuStreamDestroy_v2, (gone));
    Q(cuEventCreate, (&no_event, 2));
    Q(cuEventDestroy_v2, (no_event));
    Q(cuEventCreate, (&ev, 2));
    Q(cuGraphCreate, (&g, 0));
    Q(cuGraphAddEmptyNode, (&node, g, NULL, 0));
    Q(cuGraphInstantiateWithFlags, (&exec, g, 0));
    Q(cuGraphExecDestroy, (exec));
    Q(cuGraphDestroy, (g));
    Q(cuCtxCreate_v2, (&c, 0, 0));
    Q(cuCtxDestroy_v2, (c));
    Q(cuCtxSetCurrent, (context));
    Q(cuMemPoolCreate, (&pool, &props));
    Q(cuMemPoolDestroy, (pool));
    int k = 0;
#define RISK(name, what, args) \
    do { \
        if (k++ >= *undefined_at) *undefined_at = k, C(name, what, args); \
    } while (0)
    RISK(cuStreamQuery, "destroyed stream", (gone));
    RISK(cuStreamSynchronize, "destroyed stream", (gone));
    RISK(cuMemsetD8Async, "destroyed stream", (d, 1, 1, gone));
    RISK(cuStreamDestroy_v2, "destroyed stream", (gone));
    RISK(cuStreamQuery, "garbage stream", (garbage));
    RISK(cuEventQuery, "destroyed event", (no_event));
    RISK(cuEventRecord, "destroyed event", (no_event, s));
    RISK(cuEventRecord, "garbage event", (garbage, s));
    RISK(cuEventDestroy_v2, "destroyed event", (no_event));
    RISK(cuStreamWaitEvent, "destroyed event", (s, no_event, 0));
    RISK(cuGraphLaunch, "destroyed exec", (exec, s));
    RISK(cuGraphDestroy, "destroyed graph", (g));
    RISK(cuGraphNodeGetType, "node of a destroyed graph", (node, &u));
    RISK(cuCtxSetCurrent, "destroyed context", (c));
    RISK(cuCtxPushCurrent_v2, "destroyed context", (c));
    RISK(cuCtxDestroy_v2, "destroyed context", (c));
    RISK(cuCtxSetCurrent, "garbage context", (garbage));
    RISK(cuCtxEnablePeerAccess, "garbage context", (garbage, 0));
    RISK(cuMemAllocFromPoolAsync, "destroyed pool", (&p, 4096, pool, s));
    RISK(cuModuleGetFunction, "garbage module", ((CUfunction *)&p, garbage, "x"));
    RISK(cuModuleUnload, "garbage module", (garbage));
    RISK(cuLaunchKernel, "garbage function", (garbage, 1, 1, 1, 1, 1, 1, 0, s, NULL, NULL));
    RISK(cuMemRelease, "garbage handle", (0x123450));
    (void)ev;
}

/* ---- the run ----------------------------------------------------------------------------------------------------- */

static int run(const char *name, void (*body)(void), unsigned limit) {
    section = name;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        alarm(limit);
        load_driver();
        body();
        fflush(stdout);
        _exit(0);
    }
    int status = 0;
    waitpid(pid, &status, 0);
    if (WIFSIGNALED(status)) printf("SIGNAL %d |", WTERMSIG(status));
    else if (WEXITSTATUS(status)) printf("EXIT %d |", WEXITSTATUS(status));
    return status;
}

int main(int argc, char **argv) {
    if (argc > 1) ptx_path = argv[1];
    const char *only = argc > 2 ? argv[2] : NULL;
    /* On a machine with other work sections take longer; but for the one that waits for what never comes. */
    unsigned patience = getenv("PATIENCE") ? atoi(getenv("PATIENCE")) : 1;
    static const struct { const char *name; void (*body)(void); unsigned limit; } sections[] = {
        {"before cuInit", before_init, 10}, {"device", device, 10}, {"context", contexts, 20}, {"memory", memory, 10},
        {"pointer", pointers, 10}, {"copy", copies, 10}, {"memset", fills, 10}, {"stream", streams, 10},
        {"memop", memops, 10}, {"capture", capture, 20}, {"graph", graphs, 10}, {"kernel", kernels, 10},
        {"pool", pools, 10}, {"virtual", virtual_memory, 10}, {"peer", peers, 15}, {"ipc", ipc, 15},
        {"implicit", implicit, 20}, {"early", early, 10}, {"queues", queues_default, 10}, {"queues", queues_one, 10},
        {"queues", queues_many, 10}, {"sticky", sticky, 10},
    };
    printf("# section | call | case | result | values");
    for (size_t i = 0; i < sizeof sections / sizeof *sections; i++)
        if (!only || !strcmp(only, sections[i].name))
            run(sections[i].name, sections[i].body, sections[i].limit * (strcmp(sections[i].name, "memop") ? patience : 1));
    undefined_at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (!only || !strcmp(only, "undefined"))
        for (int tries = 0; tries < 30 && run("undefined", undefined, 10); tries++) {}
    printf("\n");
    return 0;
}
