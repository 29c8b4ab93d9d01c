// What every test program shares: the CUDA driver by dlopen (no CUDA header needed), buffers on the device or the
// host with guards around them, and a runner of named cases.
//
// Each rank has a role, one letter of $ROLES (default D for all): a rank of role H never touches CUDA, so that its
// "device" buffers are host buffers, and the runner checks at the end that nobody made a context for it.
#ifndef SIM_H
#define SIM_H
#include <mpi.h>
#include <dirent.h>
#include <dlfcn.h>
#include <malloc.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// ---- the driver -----------------------------------------------------------------------------------------------

typedef int CUresult;
typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef void *CUcontext;

static struct {
    void *library;
    CUresult (*init)(unsigned);
    CUresult (*device_count)(int *);
    CUresult (*device_get)(CUdevice *, int);
    CUresult (*retain)(CUcontext *, CUdevice);
    CUresult (*primary_state)(CUdevice, unsigned *, int *);
    CUresult (*set_current)(CUcontext);
    CUresult (*get_current)(CUcontext *);
    CUresult (*alloc)(CUdeviceptr *, size_t);
    CUresult (*release)(CUdeviceptr);
    CUresult (*up)(CUdeviceptr, const void *, size_t);
    CUresult (*down)(void *, CUdeviceptr, size_t);
    CUresult (*synchronize)(void);
} cu;

static int me = -1, ranks = 0, peer = -1; // rank and size in MPI_COMM_WORLD; the other one of the pair 0 1, 2 3, ...
static char role = 'D';
static CUcontext context;
static volatile const char *running = "start";

static void fail(const char *file, int line, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "FAILED rank %d, case %s, %s:%d: ", me, (const char *)running, file, line);
    vfprintf(stderr, format, arguments);
    fprintf(stderr, "\n");
    fflush(stderr);
    va_end(arguments);
    int up = 0, down = 0;
    MPI_Initialized(&up);
    MPI_Finalized(&down);
    if (up && !down) MPI_Abort(MPI_COMM_WORLD, 3);
    _exit(3);
}
#define FAIL(...) fail(__FILE__, __LINE__, __VA_ARGS__)
#define CHECK(condition, ...) do { if (!(condition)) FAIL(#condition "; " __VA_ARGS__); } while (0)
#define EQUAL(a, b) do { long long a_ = (long long)(a), b_ = (long long)(b); \
        if (a_ != b_) FAIL("%s is %lld, not %s = %lld", #a, a_, #b, b_); } while (0)
#define OK(call) do { int rc_ = (call); if (rc_ != MPI_SUCCESS) FAIL("%s returned %d", #call, rc_); } while (0)
#define CU(call) do { int rc_ = (call); if (rc_ != 0) FAIL("%s returned CUDA error %d", #call, rc_); } while (0)

static void driver_load(void) {
    cu.library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!cu.library) FAIL("no CUDA driver: %s", dlerror());
    *(void **)&cu.init = dlsym(cu.library, "cuInit");
    *(void **)&cu.device_count = dlsym(cu.library, "cuDeviceGetCount");
    *(void **)&cu.device_get = dlsym(cu.library, "cuDeviceGet");
    *(void **)&cu.retain = dlsym(cu.library, "cuDevicePrimaryCtxRetain");
    *(void **)&cu.primary_state = dlsym(cu.library, "cuDevicePrimaryCtxGetState");
    *(void **)&cu.set_current = dlsym(cu.library, "cuCtxSetCurrent");
    *(void **)&cu.get_current = dlsym(cu.library, "cuCtxGetCurrent");
    *(void **)&cu.alloc = dlsym(cu.library, "cuMemAlloc_v2");
    *(void **)&cu.release = dlsym(cu.library, "cuMemFree_v2");
    *(void **)&cu.up = dlsym(cu.library, "cuMemcpyHtoD_v2");
    *(void **)&cu.down = dlsym(cu.library, "cuMemcpyDtoH_v2");
    *(void **)&cu.synchronize = dlsym(cu.library, "cuCtxSynchronize");
    CU(cu.init(0));
}

static char role_of(int rank) {
    const char *roles = getenv("ROLES");
    return roles && *roles ? roles[rank % strlen(roles)] : 'D';
}

static int number_from(const char *name, int otherwise) {
    const char *text = getenv(name);
    return text && *text ? atoi(text) : otherwise;
}

// All processes of the job have come here; without MPI.
static inline void meet(const char *phase) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s-%d", getenv("SCRATCH"), phase, (int)getpid());
    FILE *file = fopen(path, "w");
    CHECK(file && !fclose(file), "%s", path);
    for (int there = 0; there < number_from("PROCESSES", 2); usleep(1000)) {
        DIR *folder = opendir(getenv("SCRATCH"));
        CHECK(folder, "SCRATCH");
        there = 0;
        for (struct dirent *entry; (entry = readdir(folder));)
            there += !strncmp(entry->d_name, phase, strlen(phase)) && entry->d_name[strlen(phase)] == '-';
        closedir(folder);
    }
}

// Makes this rank's device current in the calling thread. $GPUS bounds how many GPUs the ranks share.
static void device_start(int rank) {
    if (!cu.library) driver_load();
    if (!context) {
        int count = 0;
        CUdevice device;
        CU(cu.device_count(&count));
        int gpus = number_from("GPUS", count);
        CHECK(gpus >= 1, "GPUS");
        if (gpus > count) gpus = count;
        CU(cu.device_get(&device, rank % gpus));
        CU(cu.retain(&context, device));
    }
    CU(cu.set_current(context));
}

// ---- buffers --------------------------------------------------------------------------------------------------

enum kind { HOST = 0, DEVICE = 1 };
enum { GUARD = 64, LARGE_HOST = 128 << 10 };

typedef struct {
    unsigned char *p;    // the payload
    size_t bytes;        // its size
    enum kind kind;      // where it really is
    unsigned char *base; // the allocation: a guard, an odd offset, the payload, a guard
    size_t total, lead;
    int is_map;          // host memory that is a mapping of its own
} buf;

static void memory_put(enum kind kind, void *to, const void *from, size_t bytes) {
    if (!bytes) return;
    if (kind == HOST) memcpy(to, from, bytes);
    else { CU(cu.up((CUdeviceptr)(uintptr_t)to, from, bytes)); CU(cu.synchronize()); }
}

static void memory_get(enum kind kind, void *to, const void *from, size_t bytes) {
    if (!bytes) return;
    if (kind == HOST) memcpy(to, from, bytes);
    else { CU(cu.synchronize()); CU(cu.down(to, (CUdeviceptr)(uintptr_t)from, bytes)); }
}

static void *scratch(size_t bytes) {
    void *p = malloc(bytes ? bytes : 1);
    if (!p) FAIL("no memory for %zu bytes", bytes);
    return p;
}

// Memory for the contents of a buffer, one of two of a thread; kept for the next, as fresh pages would take longer than the rest.
static unsigned char *image_of(int which, size_t bytes) {
    static _Thread_local struct { unsigned char *p; size_t bytes; } kept[2];
    if (!kept[which].p || kept[which].bytes < bytes) {
        free(kept[which].p);
        kept[which].p = scratch(bytes);
        kept[which].bytes = bytes;
    }
    return kept[which].p;
}

// The byte at position i of the data grown from a seed.
static inline uint64_t word_of(uint64_t seed, uint64_t i) {
    uint64_t z = seed * 0x9e3779b97f4a7c15u + i * 0xd1b54a32d192ed03u + 0x632be59bd9b4e019u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    return z ^ (z >> 27);
}

static void pattern(unsigned char *to, size_t bytes, uint64_t seed) {
    size_t i = 0;
    for (; i + 8 <= bytes; i += 8) { uint64_t w = word_of(seed, i / 8); memcpy(to + i, &w, 8); }
    uint64_t w = word_of(seed, i / 8);
    memcpy(to + i, &w, bytes - i);
}

static void buf_poison(buf b) {
    if (b.kind == HOST) { memset(b.base, 0xa5, b.total); return; }
    unsigned char *image = image_of(0, b.total);
    memset(image, 0xa5, b.total);
    memory_put(b.kind, b.base, image, b.total);
}

// Bytes of an allocation with room for so many: a multiple of $ALLOCATION, if that is set.
static size_t allocation(size_t bytes) {
    size_t unit = number_from("ALLOCATION", 1);
    return (bytes + unit - 1) / unit * unit;
}

// Host memory: of the heap, and now and then a mapping of its own.
static unsigned char *host_memory(size_t bytes, int *is_map) {
    static unsigned large;
    *is_map = bytes >= LARGE_HOST && ++large % 8 == 0;
    if (!*is_map) return scratch(bytes);
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) FAIL("no memory for %zu bytes", bytes);
    return p;
}

static buf buf_new(enum kind kind, size_t bytes, size_t offset) {
    buf b = {.bytes = bytes, .kind = role == 'H' ? HOST : kind, .lead = GUARD + offset};
    b.total = allocation(b.lead + bytes + GUARD);
    if (b.kind == HOST) b.base = host_memory(b.total, &b.is_map);
    else { CUdeviceptr p; CU(cu.alloc(&p, b.total)); b.base = (unsigned char *)(uintptr_t)p; }
    b.p = b.base + b.lead;
    buf_poison(b);
    return b;
}

static void buf_free(buf b) {
    if (b.is_map) munmap(b.base, b.total);
    else if (b.kind == HOST) free(b.base);
    else CU(cu.release((CUdeviceptr)(uintptr_t)b.base));
}

static void buf_fill(buf b, uint64_t seed) {
    if (b.kind == HOST) { pattern(b.p, b.bytes, seed); return; }
    unsigned char *image = image_of(0, b.bytes);
    pattern(image, b.bytes, seed);
    memory_put(b.kind, b.p, image, b.bytes);
}

// The first `bytes` bytes are those of the seed, and nothing else of the allocation was touched since buf_poison.
static void buf_check_at(const char *file, int line, buf b, uint64_t seed, size_t bytes) {
    unsigned char *image = image_of(0, b.total), *expected = image_of(1, b.total);
    memory_get(b.kind, image, b.base, b.total);
    memset(expected, 0xa5, b.total);
    pattern(expected + b.lead, bytes, seed);
    if (memcmp(image, expected, b.total))
        for (size_t i = 0; i < b.total; i++)
            if (image[i] != expected[i])
                fail(file, line, "%s buffer of %zu bytes, message of %zu: byte %zd is %02x, not %02x", b.kind ? "device" : "host",
                     b.bytes, bytes, (ssize_t)i - (ssize_t)b.lead, image[i], expected[i]);
}
#define BUF_CHECK(b, seed, bytes) buf_check_at(__FILE__, __LINE__, b, seed, bytes)

// The payload is the seed's; what lies around it is not looked at (for buffers filled or received into piecewise).
static void bytes_check_at(const char *file, int line, enum kind kind, const unsigned char *p, size_t bytes, uint64_t seed) {
    unsigned char *image = image_of(0, bytes), *expected = image_of(1, bytes);
    memory_get(kind, image, p, bytes);
    pattern(expected, bytes, seed);
    if (memcmp(image, expected, bytes)) fail(file, line, "wrong contents in a piece of %zu bytes", bytes);
}
#define BYTES_CHECK(kind, p, bytes, seed) bytes_check_at(__FILE__, __LINE__, kind, p, bytes, seed)

static void status_check_at(const char *file, int line, MPI_Status *s, int source, int tag, size_t bytes) {
    int count = -1, elements = -1;
    MPI_Get_count(s, MPI_BYTE, &count);
    MPI_Get_elements(s, MPI_BYTE, &elements);
    if (s->MPI_SOURCE != source || s->MPI_TAG != tag || count != (int)bytes || elements != (int)bytes)
        fail(file, line, "status: source %d (not %d) tag %d (not %d) count %d, elements %d (not %zu)", s->MPI_SOURCE, source,
             s->MPI_TAG, tag, count, elements, bytes);
}
#define STATUS_CHECK(s, source, tag, bytes) status_check_at(__FILE__, __LINE__, s, source, tag, bytes)

// ---- cases ----------------------------------------------------------------------------------------------------

struct test_case { const char *name; void (*run)(void); };
static int with_preload; // $WITH_PRELOAD: what only works because of the library may be asked for

// The four pairs of sender's and receiver's buffer: HH, HD, DH, DD.
#define FOR_PAIRS(from, to) \
    for (int from##_pair_ = 0; from##_pair_ < 4; from##_pair_++) \
        for (enum kind from = from##_pair_ >> 1, to = from##_pair_ & 1, from##_once_ = 1; from##_once_; from##_once_ = 0)

// The same where the even rank of each pair sends `from` and the odd one receives `to`: of the pairs that are the same
// because a rank has no device, only the first.
#define FOR_ENDS(from, to) FOR_PAIRS(from, to) if (!is_repeated(from, to))
static int is_repeated(enum kind from, enum kind to) {
    return (from == DEVICE && role_of(me & ~1) == 'H') || (to == DEVICE && role_of(me | 1) == 'H');
}

// xorshift: the same numbers on every rank that starts from the same seed.
static uint64_t next_random(uint64_t *state) {
    *state ^= *state << 13; *state ^= *state >> 7; *state ^= *state << 17;
    return *state;
}

static void on_alarm(int number) {
    (void)number;
    char line[200];
    int length = snprintf(line, sizeof line, "FAILED rank %d: case %s does not end\n", me, (const char *)running);
    if (write(2, line, length)) {}
    _exit(4);
}

// With more ranks than processors, MPICH's own keeps the processor from those that are waited for, a time slice each.
static void barrier(void) {
    MPI_Request r;
    int done = 0;
    if (ranks <= 2) { OK(MPI_Barrier(MPI_COMM_WORLD)); return; }
    OK(MPI_Ibarrier(MPI_COMM_WORLD, &r));
    while (!done) {
        OK(MPI_Test(&r, &done, MPI_STATUS_IGNORE));
        if (!done) sched_yield();
    }
}

// A rank that never touched CUDA has no context, neither current nor primary.
static void check_no_context(void) {
    int count = 0;
    driver_load();
    CUcontext current = NULL;
    CU(cu.get_current(&current));
    CHECK(current == NULL, "somebody made a context current on a host-only rank");
    CU(cu.device_count(&count));
    for (int i = 0; i < count; i++) {
        unsigned flags;
        int active = 1;
        CU(cu.primary_state(i, &flags, &active));
        CHECK(!active, "somebody made a primary context on a host-only rank");
    }
}

static int selected(const char *name, int argc, char **argv) {
    if (argc < 2) return 1;
    for (int i = 1; i < argc; i++) if (!strcmp(argv[i], name)) return 1;
    return 0;
}

static void start(int *argc, char ***argv, int threads) {
    // The heap keeps what is freed: fresh pages take longer than what is done with them.
    mallopt(M_MMAP_THRESHOLD, 128 << 20);
    mallopt(M_TRIM_THRESHOLD, 1 << 30);
    signal(SIGALRM, on_alarm);
    alarm(number_from("WATCHDOG", 100));
    int provided;
    OK(MPI_Init_thread(argc, argv, threads, &provided));
    CHECK(provided >= threads, "threads");
    OK(MPI_Comm_rank(MPI_COMM_WORLD, &me));
    OK(MPI_Comm_size(MPI_COMM_WORLD, &ranks));
    peer = (me ^ 1) < ranks ? me ^ 1 : MPI_PROC_NULL;
    role = role_of(me);
    with_preload = number_from("WITH_PRELOAD", 0);
    if (role == 'D') device_start(me);
}

static int finish(int cases) {
    running = "end";
    if (role == 'H' && !number_from("NO_DRIVER", 0)) check_no_context();
    OK(MPI_Barrier(MPI_COMM_WORLD));
    if (me == 0) { printf("passed %d cases\n", cases); fflush(stdout); }
    running = "MPI_Finalize";
    OK(MPI_Finalize());
    return 0;
}

static int run_cases(int argc, char **argv, const struct test_case *cases, int threads) {
    start(&argc, &argv, threads);
    int n = 0;
    for (; cases->name; cases++) {
        if (!selected(cases->name, argc, argv)) continue;
        running = cases->name;
        barrier();
        cases->run();
        barrier();
        n++;
        if (me == 0) { printf("ok %s\n", (const char *)running); fflush(stdout); }
    }
    CHECK(n > 0, "no such case");
    return finish(n);
}
#endif
