// Every kind of memory against every other: cuMemAlloc, managed, from a pool, and mapped page by page with seams inside
// the message. One case for each kind of the sender's, so that counters can be told apart.
#include "transfer.h"

enum memory { PLAIN, MANAGED, POOL, MAPPED, MEMORY_COUNT };
static const char *const memory_name[] = {"plain", "managed", "pool", "mapped"};

typedef struct { int type, id; } location;
typedef struct { unsigned type, handle_types; location where; void *meta; unsigned char flags[8]; } allocation_prop;
typedef struct { location where; unsigned flags; } access_desc;
typedef unsigned long long generic_handle;
enum { PINNED = 1, ON_DEVICE = 1, ATTACH_GLOBAL = 1, READ_WRITE = 3 };

static struct {
    CUresult (*managed)(CUdeviceptr *, size_t, unsigned);
    CUresult (*pool)(CUdeviceptr *, size_t, void *);
    CUresult (*pool_free)(CUdeviceptr, void *);
    CUresult (*granularity)(size_t *, const allocation_prop *, unsigned);
    CUresult (*reserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
    CUresult (*unreserve)(CUdeviceptr, size_t);
    CUresult (*create)(generic_handle *, size_t, const allocation_prop *, unsigned long long);
    CUresult (*discard)(generic_handle);
    CUresult (*map)(CUdeviceptr, size_t, size_t, generic_handle, unsigned long long);
    CUresult (*unmap)(CUdeviceptr, size_t);
    CUresult (*set_access)(CUdeviceptr, size_t, const access_desc *, size_t);
    CUresult (*ipc)(void *, CUdeviceptr);
} more;

static allocation_prop here = {.type = PINNED, .where = {ON_DEVICE, 0}};
static size_t page;

static void *function(const char *name) {
    void *f = dlsym(cu.library, name);
    CHECK(f != NULL, "%s", name);
    return f;
}

static void more_load(void) {
    if (page) return;
    *(void **)&more.managed = function("cuMemAllocManaged");
    *(void **)&more.pool = function("cuMemAllocAsync");
    *(void **)&more.pool_free = function("cuMemFreeAsync");
    *(void **)&more.granularity = function("cuMemGetAllocationGranularity");
    *(void **)&more.reserve = function("cuMemAddressReserve");
    *(void **)&more.unreserve = function("cuMemAddressFree");
    *(void **)&more.create = function("cuMemCreate");
    *(void **)&more.discard = function("cuMemRelease");
    *(void **)&more.map = function("cuMemMap");
    *(void **)&more.unmap = function("cuMemUnmap");
    *(void **)&more.set_access = function("cuMemSetAccess");
    *(void **)&more.ipc = function("cuIpcGetMemHandle");
    int count;
    CU(cu.device_count(&count));
    here.where.id = me % number_from("GPUS", count);
    here.handle_types = number_from("HANDLE_TYPES", 0);
    CU(more.granularity(&page, &here, 0));
}

// Memory behind some pages of a reservation, a piece for each, held by nothing but the mapping.
static void back(CUdeviceptr at, size_t pages) {
    for (size_t i = 0; i < pages; i++) {
        generic_handle handle;
        CU(more.create(&handle, page, &here, 0));
        CU(more.map(at + i * page, page, 0, handle, 0));
        CU(more.discard(handle));
    }
    access_desc mine = {here.where, READ_WRITE};
    CU(more.set_access(at, pages * page, &mine, 1));
}

typedef struct { buf b; enum memory memory; CUdeviceptr start; size_t pages; } block;

// A buffer as buf_new makes it, in any kind of memory. Mapped memory has a seam in the middle of the message.
static block block_new(enum memory memory, size_t bytes, size_t offset) {
    block k = {.memory = memory, .b = {.bytes = bytes, .kind = DEVICE, .lead = GUARD + offset}};
    buf *b = &k.b;
    b->total = b->lead + bytes + GUARD;
    switch (memory) {
    case PLAIN: CU(cu.alloc(&k.start, b->total)); break;
    case MANAGED: CU(more.managed(&k.start, b->total, ATTACH_GLOBAL)); b->kind = HOST; break;
    case POOL: CU(more.pool(&k.start, b->total, NULL)); CU(cu.synchronize()); break;
    default: {
        size_t before = (b->lead + bytes / 2 + page - 1) / page; // pages before the seam in the middle
        k.pages = before + (b->total - b->lead - bytes / 2 + page - 1) / page;
        CU(more.reserve(&k.start, k.pages * page, 0, 0, 0));
        back(k.start, k.pages);
        b->base = (unsigned char *)(uintptr_t)(k.start + before * page - bytes / 2 - b->lead);
    }
    }
    if (memory != MAPPED) b->base = (unsigned char *)(uintptr_t)k.start;
    b->p = b->base + b->lead;
    char handle[64];
    CHECK((more.ipc(handle, (CUdeviceptr)(uintptr_t)b->p) == 0) == (memory == PLAIN), "legacy IPC covers plain memory only");
    buf_poison(*b);
    return k;
}

static void block_free(block k) {
    switch (k.memory) {
    case POOL: CU(more.pool_free(k.start, NULL)); CU(cu.synchronize()); break;
    case MAPPED: CU(cu.synchronize()); CU(more.unmap(k.start, k.pages * page)); CU(more.unreserve(k.start, k.pages * page)); break;
    default: CU(cu.release(k.start));
    }
}

static const size_t sizes[] = {0, 1, 61, 4096, 100001, (4 << 20) + 3};
enum { SIZE_COUNT = sizeof sizes / sizeof *sizes };

static void from(enum memory memory) {
    static const enum send_way outs[] = {SEND, SSEND, ISEND};
    static const enum receive_way ins[] = {RECV, IRECV_WAIT, MPROBE_MRECV};
    static char name[120];
    if (peer == MPI_PROC_NULL) return;
    more_load();
    for (int to = 0; to < MEMORY_COUNT; to++)
        for (int i = 0; i < SIZE_COUNT; i++)
            for (int way = 0; way < 3; way++) {
                size_t n = sizes[i];
                uint64_t seed = 1000 * memory + 100 * to + 10 * i + way;
                snprintf(name, sizeof name, "%s to %s, %zu bytes, way %d", memory_name[memory], memory_name[to], n, way);
                running = name;
                if (me % 2 == 0) {
                    block k = block_new(memory, n, 2 * (seed % 7) + 1);
                    buf_fill(k.b, seed);
                    transfer_send(outs[way], k.b.p, n, peer, i, MPI_COMM_WORLD);
                    BUF_CHECK(k.b, seed, n);
                    block_free(k);
                } else {
                    block k = block_new(to, n, 2 * (seed % 5) + 3);
                    MPI_Status s;
                    transfer_receive(ins[way], outs[way], k.b.p, n, n, peer, i, MPI_COMM_WORLD, &s);
                    STATUS_CHECK(&s, peer, i, n);
                    BUF_CHECK(k.b, seed, n);
                    block_free(k);
                }
            }
}

static void from_plain(void) { from(PLAIN); running = "from_plain"; }
static void from_managed(void) { from(MANAGED); running = "from_managed"; }
static void from_pool(void) { from(POOL); running = "from_pool"; }
static void from_mapped(void) { from(MAPPED); running = "from_mapped"; }

// Both directions in one call, each rank with another kind at each end.
static void both_ways(void) {
    if (peer == MPI_PROC_NULL) return;
    more_load();
    for (int out = 0; out < MEMORY_COUNT; out++)
        for (int in = 0; in < MEMORY_COUNT; in++)
            for (int i = 0; i < SIZE_COUNT; i++) {
                size_t n = sizes[i];
                MPI_Status s;
                block a = block_new((out + me) % MEMORY_COUNT, n, 3), b = block_new((in + me) % MEMORY_COUNT, n, 9);
                buf_fill(a.b, 100 * i + me);
                OK(MPI_Sendrecv(a.b.p, n, MPI_BYTE, peer, 1, b.b.p, n, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &s));
                STATUS_CHECK(&s, peer, 1, n);
                BUF_CHECK(b.b, 100 * i + peer, n);
                block_free(a);
                block_free(b);
            }
}

static void to_self(void) {
    more_load();
    for (int out = 0; out < MEMORY_COUNT; out++)
        for (int in = 0; in < MEMORY_COUNT; in++)
            for (int i = 0; i < SIZE_COUNT; i++) {
                size_t n = sizes[i];
                MPI_Request r;
                MPI_Status s;
                block a = block_new(out, n, 5), b = block_new(in, n, 7);
                buf_fill(a.b, n + out);
                OK(MPI_Irecv(b.b.p, n, MPI_BYTE, me, 4, MPI_COMM_WORLD, &r));
                OK(MPI_Send(a.b.p, n, MPI_BYTE, me, 4, MPI_COMM_WORLD));
                OK(MPI_Wait(&r, &s));
                STATUS_CHECK(&s, me, 4, n);
                BUF_CHECK(b.b, n + out, n);
                block_free(a);
                block_free(b);
            }
}

// A segment that grows behind what is sent, loses its first page, and gets another one at the same address.
static void grown(void) {
    enum { PAGES = 6 };
    if (peer == MPI_PROC_NULL) return;
    more_load();
    CUdeviceptr p;
    CU(more.reserve(&p, PAGES * page, 0, 0, 0));
    unsigned char *at = (unsigned char *)(uintptr_t)p;
    back(p, 1);
    for (size_t pages = 1; pages <= PAGES; pages++) {
        size_t n = pages * page - 11;
        unsigned char *image = scratch(n);
        pattern(image, n, me % 2 == 0 ? pages : 99);
        memory_put(DEVICE, at + 5, image, n);
        if (me % 2 == 0) OK(MPI_Send(at + 5, n, MPI_BYTE, peer, 0, MPI_COMM_WORLD));
        else OK(MPI_Recv(at + 5, n, MPI_BYTE, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        BYTES_CHECK(DEVICE, at + 5, n, pages);
        free(image);
        CU(cu.synchronize());
        if (pages < PAGES) back(p + pages * page, 1);
        CU(more.unmap(p, page));
        back(p, 1);
    }
    CU(more.unmap(p, PAGES * page));
    CU(more.unreserve(p, PAGES * page));
}

// A segment of chunks of different sizes, as frameworks have them: messages within one and across seams; a chunk that is unmapped and
// mapped elsewhere in it, and another one in its place; a chunk more behind all. The receiver answers from a segment of its own.
static void segment(void) {
    enum { PAGES = 12, MESSAGES = 24 };
    static const size_t chunks[][2] = {{0, 3}, {3, 1}, {4, 5}}; // from which page on, and how many
    if (peer == MPI_PROC_NULL) return;
    more_load();
    CUdeviceptr p;
    generic_handle handles[3], fourth;
    access_desc mine = {here.where, READ_WRITE};
    CU(more.reserve(&p, PAGES * page, 0, 0, 0));
    unsigned char *at = (unsigned char *)(uintptr_t)p;
    for (int i = 0; i < 3; i++) {
        CU(more.create(&handles[i], chunks[i][1] * page, &here, 0));
        CU(more.map(p + chunks[i][0] * page, chunks[i][1] * page, 0, handles[i], 0));
    }
    CU(more.set_access(p, 9 * page, &mine, 1));
    uint64_t random = number_from("SEED", 1) * 0x9e3779b97f4a7c15u;
    size_t pages = 9;
    for (int i = 0; i < MESSAGES; i++) {
        if (i == 8) { // a hole, filled by what was elsewhere
            CU(cu.synchronize());
            CU(more.unmap(p + 3 * page, page));
            CU(more.map(p + 9 * page, page, 0, handles[1], 0));
            CU(more.set_access(p + 9 * page, page, &mine, 1));
            back(p + 3 * page, 1);
            pages = 10;
        }
        if (i == 16) {
            CU(more.create(&fourth, 2 * page, &here, 0));
            CU(more.map(p + 10 * page, 2 * page, 0, fourth, 0));
            CU(more.set_access(p + 10 * page, 2 * page, &mine, 1));
            CU(more.discard(fourth));
            pages = 12;
        }
        random = random * 6364136223846793005u + 1442695040888963407u;
        // Ranks that share a GPU send longer ones in another way.
        size_t n = (64 << 10) + (random >> 20) % (15 << 20), start = (random >> 10) % (pages * page - n + 1);
        unsigned char *image = scratch(pages * page);
        pattern(image, pages * page, 1000 + i);
        int sends = (i + me) % 2 == 0;
        if (sends) pattern(image + start, n, i);
        memory_put(DEVICE, at, image, pages * page);
        if (sends) OK(MPI_Send(at + start, n, MPI_BYTE, peer, i, MPI_COMM_WORLD));
        else OK(MPI_Recv(at + start, n, MPI_BYTE, peer, i, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        pattern(image + start, n, i);
        unsigned char *found = scratch(pages * page);
        memory_get(DEVICE, found, at, pages * page);
        CHECK(!memcmp(found, image, pages * page), "message %d of %zu bytes at %zu", i, n, start);
        free(found);
        free(image);
    }
    // Peers are told now and then of what has changed.
    for (int i = 0, flag; i < 30; i++) {
        OK(MPI_Iprobe(MPI_ANY_SOURCE, MESSAGES, MPI_COMM_WORLD, &flag, MPI_STATUS_IGNORE));
        usleep(10000);
    }
    CU(cu.synchronize());
    for (int i = 0; i < 3; i++) CU(more.discard(handles[i]));
    CU(more.unmap(p, PAGES * page));
    CU(more.unreserve(p, PAGES * page));
}

// Short messages only, from one chunk, in whose place another one comes half way.
static void short_ones(void) {
    enum { MESSAGES = 80, N = 1001, AREA = 64 << 10 };
    if (peer == MPI_PROC_NULL) return;
    more_load();
    CUdeviceptr p;
    CU(more.reserve(&p, page, 0, 0, 0));
    back(p, 1);
    unsigned char *at = (unsigned char *)(uintptr_t)p, *image = scratch(AREA), *found = scratch(AREA);
    for (int i = 0; i < MESSAGES; i++) {
        if (i == MESSAGES / 2) {
            CU(cu.synchronize());
            CU(more.unmap(p, page));
            back(p, 1);
        }
        size_t start = 37 * i, n = 1 + (size_t)i * N / MESSAGES;
        pattern(image, AREA, 1000 + i);
        if (me % 2 == 0) {
            pattern(image + start, n, i);
            memory_put(DEVICE, at, image, AREA);
            // A synchronous send: the receiver reads the last message of each chunk even where it comes late.
            int is_last = i % (MESSAGES / 2) == MESSAGES / 2 - 1;
            OK((is_last ? MPI_Ssend : MPI_Send)(at + start, n, MPI_BYTE, peer, i, MPI_COMM_WORLD));
        } else {
            memory_put(DEVICE, at, image, AREA);
            OK(MPI_Recv(at + start, n, MPI_BYTE, peer, i, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            pattern(image + start, n, i);
            memory_get(DEVICE, found, at, AREA);
            CHECK(!memcmp(found, image, AREA), "message %d of %zu bytes", i, n);
        }
        barrier();
    }
    free(image);
    free(found);
    CU(cu.synchronize());
    CU(more.unmap(p, page));
    CU(more.unreserve(p, page));
}

// Memsets and device-to-device copies return before they have happened. What the program then sends is what they write,
// and what it receives is not written over by them.
static void unfinished(void) {
    enum { N = 1 << 20, AREA = 16 << 20, ROUNDS = 8 };
    static const enum memory kinds[] = {PLAIN, POOL, MAPPED};
    static char name[120];
    if (peer == MPI_PROC_NULL) return;
    more_load();
    CUresult (*set)(CUdeviceptr, unsigned char, size_t), (*within)(CUdeviceptr, CUdeviceptr, size_t);
    *(void **)&set = function("cuMemsetD8_v2");
    *(void **)&within = function("cuMemcpyDtoD_v2");
    unsigned char *image = scratch(N);
    for (int k = 0; k < 3; k++)
        for (int copy = 0; copy < 2; copy++) {
            snprintf(name, sizeof name, "unfinished %s in %s memory", copy ? "copy" : "memset", memory_name[kinds[k]]);
            running = name;
            block b = block_new(kinds[k], AREA, 0), other = block_new(PLAIN, AREA, 0);
            CUdeviceptr p = (CUdeviceptr)(uintptr_t)b.b.p, q = (CUdeviceptr)(uintptr_t)other.b.p;
            CU(set(q, me % 2 ? 9 : 0x3c, AREA));
            CU(set(p, 1, AREA));
            CU(cu.synchronize());
            for (int i = 1; i <= ROUNDS; i++) {
                if (copy) CU(within(p, q, AREA));
                else CU(set(p, me % 2 ? 9 : i == ROUNDS ? 0x3c : i, AREA));
            }
            unsigned char *tail = b.b.p + AREA - N;
            if (me % 2 == 0) OK(MPI_Send(tail, N, MPI_BYTE, peer, k, MPI_COMM_WORLD));
            else OK(MPI_Recv(tail, N, MPI_BYTE, peer, k, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            CU(cu.synchronize());
            memory_get(DEVICE, image, tail, N);
            for (int i = 0; i < N; i++) CHECK(image[i] == 0x3c, "byte %d is %d", i, image[i]);
            block_free(b);
            block_free(other);
        }
    free(image);
    running = "unfinished";
}

// Both directions at once, many messages each, of random lengths: staging is short. How many are long enough for memory of the GPU
// is told.
static void windows(void) {
    enum { WINDOW = 16, ROUNDS = 6, LONG = 64 << 10, LONGEST = 7 << 20 };
    static const enum memory kinds[] = {POOL, MAPPED};
    if (peer == MPI_PROC_NULL) return;
    more_load();
    uint64_t random = number_from("SEED", 1) * 0x9e3779b97f4a7c15u + me;
    long on_gpu = 0;
    for (int round = 0; round < ROUNDS; round++) {
        block out[WINDOW], in[WINDOW];
        MPI_Request r[2 * WINDOW];
        size_t lengths[WINDOW], theirs[WINDOW];
        for (int i = 0; i < WINDOW; i++) {
            random = random * 6364136223846793005u + 1442695040888963407u;
            // Up to 256 KiB as a rule, and a few long ones.
            lengths[i] = (random >> 20) % (i % 5 ? 256 << 10 : LONGEST) + 1;
        }
        OK(MPI_Sendrecv(lengths, sizeof lengths, MPI_BYTE, peer, 9, theirs, sizeof theirs, MPI_BYTE, peer, 9, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        for (int i = 0; i < WINDOW; i++) {
            out[i] = block_new(kinds[i % 2], lengths[i], i);
            in[i] = block_new(kinds[i / 2 % 2], theirs[i], 3 * i);
            buf_fill(out[i].b, 1000 * round + 10 * i + me % 2);
            on_gpu += theirs[i] >= LONG;
        }
        barrier();
        for (int i = 0; i < WINDOW; i++) OK(MPI_Irecv(in[i].b.p, theirs[i], MPI_BYTE, peer, i, MPI_COMM_WORLD, &r[i]));
        for (int i = 0; i < WINDOW; i++) OK(MPI_Isend(out[i].b.p, lengths[i], MPI_BYTE, peer, i, MPI_COMM_WORLD, &r[WINDOW + i]));
        OK(MPI_Waitall(2 * WINDOW, r, MPI_STATUSES_IGNORE));
        for (int i = 0; i < WINDOW; i++) {
            BUF_CHECK(in[i].b, 1000 * round + 10 * i + (me + 1) % 2, theirs[i]);
            BUF_CHECK(out[i].b, 1000 * round + 10 * i + me % 2, lengths[i]);
            block_free(out[i]);
            block_free(in[i]);
        }
    }
    long all = 0;
    OK(MPI_Reduce(&on_gpu, &all, 1, MPI_LONG, MPI_SUM, 0, MPI_COMM_WORLD));
    if (me == 0) printf("long: %ld\n", all);
}

// Host memory that the program has registered with the driver, whole pages or from the middle of one, at either end.
static void registered(void) {
    CUresult (*pin)(void *, size_t, unsigned), (*unpin)(void *);
    *(void **)&pin = function("cuMemHostRegister_v2");
    *(void **)&unpin = function("cuMemHostUnregister");
    if (peer == MPI_PROC_NULL) return;
    FOR_PAIRS(from, to)
        for (int i = 0; i < SIZE_COUNT; i++) {
            size_t n = sizes[i];
            enum kind mine = me % 2 == 0 ? from : to;
            buf b = buf_new(mine, n, 2 * i + 1);
            if (mine == HOST) CU(pin(b.base, b.total, 0));
            if (me % 2 == 0) { buf_fill(b, i); OK(MPI_Send(b.p, n, MPI_BYTE, peer, i, MPI_COMM_WORLD)); }
            else OK(MPI_Recv(b.p, n, MPI_BYTE, peer, i, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            BUF_CHECK(b, i, n);
            if (mine == HOST) CU(unpin(b.base));
            buf_free(b);
        }
}

// The receiver's program has the sender's allocation open itself, for half of the messages.
static void held_by_program(void) {
    typedef struct { char bytes[64]; } handle;
    enum { N = 100001, MESSAGES = 8 };
    CUresult (*export)(handle *, CUdeviceptr), (*open)(CUdeviceptr *, handle, unsigned), (*close)(CUdeviceptr);
    *(void **)&export = function("cuIpcGetMemHandle");
    *(void **)&open = function("cuIpcOpenMemHandle_v2");
    *(void **)&close = function("cuIpcCloseMemHandle");
    if (peer == MPI_PROC_NULL) return;
    buf b = buf_new(DEVICE, N, 3);
    CUdeviceptr theirs = 0;
    handle h;
    if (me % 2 == 0) {
        CU(export(&h, (CUdeviceptr)(uintptr_t)b.base));
        OK(MPI_Send(&h, sizeof h, MPI_BYTE, peer, 1, MPI_COMM_WORLD));
    } else {
        OK(MPI_Recv(&h, sizeof h, MPI_BYTE, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        CU(open(&theirs, h, 1));
    }
    for (int i = 0; i < MESSAGES; i++) {
        if (me % 2 == 0) {
            buf_fill(b, i);
            OK(MPI_Ssend(b.p, N, MPI_BYTE, peer, 2, MPI_COMM_WORLD));
        } else {
            OK(MPI_Recv(b.p, N, MPI_BYTE, peer, 2, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            BUF_CHECK(b, i, N);
            // What the program has mapped it still reads.
            if (theirs) BYTES_CHECK(DEVICE, (unsigned char *)(uintptr_t)theirs + b.lead, N, i);
            if (theirs && i == MESSAGES / 2 - 1) { CU(close(theirs)); theirs = 0; }
        }
        int done = 1;
        OK(MPI_Sendrecv_replace(&done, 1, MPI_INT, peer, 3, peer, 3, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    }
    buf_free(b);
}

// Mapped memory outlives the contexts of its device. Without one nothing can be read there, so the send fails, with a reason.
static void without_context(void) {
    CUresult (*drop)(CUdevice);
    *(void **)&drop = function("cuDevicePrimaryCtxRelease_v2");
    more_load();
    for (int i = 0; i < 2; i++) { // the ranks become acquainted
        buf b = buf_new(DEVICE, 1, 0);
        OK(MPI_Sendrecv_replace(b.p, 1, MPI_BYTE, peer, 0, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        buf_free(b);
        barrier();
    }
    if (me == 0) {
        block k = block_new(MAPPED, 5000, 0);
        CU(cu.synchronize());
        CU(cu.set_current(NULL));
        CU(drop(here.where.id));
        OK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
        CHECK(MPI_Send(k.b.p, 5000, MPI_BYTE, 1, 1, MPI_COMM_WORLD) != MPI_SUCCESS, "sent without a context");
        OK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL));
        CU(cu.retain(&context, here.where.id));
        CU(cu.set_current(context));
        block_free(k);
    }
    barrier();
}

static const struct test_case cases[] = {
    {"from_plain", from_plain}, {"from_managed", from_managed}, {"from_pool", from_pool}, {"from_mapped", from_mapped},
    {"both_ways", both_ways}, {"to_self", to_self}, {"grown", grown}, {"segment", segment}, {"short_ones", short_ones},
    {"unfinished", unfinished}, {"registered", registered}, {"held_by_program", held_by_program},
    {"windows", windows}, {0},
};
// By its name only: a message fails in it.
static const struct test_case failing[] = {{"without_context", without_context}, {0}};

int main(int argc, char **argv) {
    int fails = argc == 2 && !strcmp(argv[1], failing->name);
    return run_cases(argc, argv, fails ? failing : cases, MPI_THREAD_SINGLE);
}
