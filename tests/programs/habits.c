// How programs use CUDA around their messages: default streams, work that is pending, captures, several GPUs, contexts of
// their own, resets, forks, threads. After every MPI call the calling thread's contexts and capture mode are what they
// were, and each message is seen to have gone by the path that it should (include/anabranch.h).
#include "sim.h"
#include "../../include/anabranch.h"
#include <pthread.h>
#include <sys/wait.h>

typedef void *CUstream, *CUgraph, *CUgraphNode, *CUgraphExec;
enum { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2, ACTIVE = 1, INVALIDATED = 2, NON_BLOCKING = 1, CAPTURE_INVALIDATED = 901 };
enum { TINY = 10, SMALL = 5000, LARGE = (1 << 20) + 3, HUGE = 8 << 20 };

static struct {
    CUresult (*stream_create)(CUstream *, unsigned);
    CUresult (*stream_destroy)(CUstream);
    CUresult (*stream_synchronize)(CUstream);
    CUresult (*stream_synchronize_ptsz)(CUstream);
    CUresult (*set)(CUdeviceptr, unsigned char, size_t, CUstream);
    CUresult (*set_ptsz)(CUdeviceptr, unsigned char, size_t, CUstream);
    CUresult (*copy)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
    CUresult (*copy_ptsz)(CUdeviceptr, CUdeviceptr, size_t, CUstream);
    CUresult (*begin)(CUstream, unsigned);
    CUresult (*end)(CUstream, CUgraph *);
    CUresult (*is_capturing)(CUstream, unsigned *);
    CUresult (*exchange_mode)(unsigned *);
    CUresult (*nodes)(CUgraph, CUgraphNode *, size_t *);
    CUresult (*instantiate)(CUgraphExec *, CUgraph, unsigned long long);
    CUresult (*launch)(CUgraphExec, CUstream);
    CUresult (*exec_destroy)(CUgraphExec);
    CUresult (*graph_destroy)(CUgraph);
    CUresult (*context_create)(CUcontext *, unsigned, CUdevice);
    CUresult (*context_destroy)(CUcontext);
    CUresult (*push)(CUcontext);
    CUresult (*pop)(CUcontext *);
    CUresult (*reset)(CUdevice);
    CUresult (*host_function)(CUstream, void (*)(void *), void *);
    CUresult (*pool_alloc)(CUdeviceptr *, size_t, CUstream);
    CUresult (*pool_free)(CUdeviceptr, CUstream);
} more;

static void more_load(void) {
    static const struct { void *at; const char *name; } wanted[] = {
        {&more.stream_create, "cuStreamCreate"}, {&more.stream_destroy, "cuStreamDestroy_v2"},
        {&more.stream_synchronize, "cuStreamSynchronize"}, {&more.stream_synchronize_ptsz, "cuStreamSynchronize_ptsz"},
        {&more.set, "cuMemsetD8Async"}, {&more.set_ptsz, "cuMemsetD8Async_ptsz"},
        {&more.copy, "cuMemcpyAsync"}, {&more.copy_ptsz, "cuMemcpyAsync_ptsz"},
        {&more.begin, "cuStreamBeginCapture_v2"}, {&more.end, "cuStreamEndCapture"}, {&more.is_capturing, "cuStreamIsCapturing"},
        {&more.exchange_mode, "cuThreadExchangeStreamCaptureMode"}, {&more.nodes, "cuGraphGetNodes"},
        {&more.instantiate, "cuGraphInstantiateWithFlags"}, {&more.launch, "cuGraphLaunch"},
        {&more.exec_destroy, "cuGraphExecDestroy"}, {&more.graph_destroy, "cuGraphDestroy"},
        {&more.context_create, "cuCtxCreate_v2"}, {&more.context_destroy, "cuCtxDestroy_v2"},
        {&more.push, "cuCtxPushCurrent_v2"}, {&more.pop, "cuCtxPopCurrent_v2"}, {&more.reset, "cuDevicePrimaryCtxReset_v2"},
        {&more.host_function, "cuLaunchHostFunc"},
        {&more.pool_alloc, "cuMemAllocAsync"}, {&more.pool_free, "cuMemFreeAsync"},
    };
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *f = dlsym(cu.library, wanted[i].name);
        CHECK(f, "%s", wanted[i].name);
        *(void **)wanted[i].at = f;
    }
}

// ---- what a call leaves behind ------------------------------------------------------------------------------------

enum { DEPTH = 8 };
typedef struct { CUcontext stack[DEPTH]; int depth; unsigned mode; } traces;

// The thread's stack of contexts, from the current one down, and its capture mode.
static traces traces_now(void) {
    traces t = {.mode = RELAXED};
    CU(more.exchange_mode(&t.mode));
    CUcontext c = NULL;
    while (t.depth < DEPTH && cu.get_current(&c) == 0 && c) CU(more.pop(&t.stack[t.depth++]));
    for (int i = t.depth; i-- > 0;) CU(more.push(t.stack[i]));
    unsigned mode = t.mode;
    CU(more.exchange_mode(&mode));
    return t;
}

static void traces_check(const char *file, int line, traces before) {
    traces now = traces_now();
    if (now.mode != before.mode) fail(file, line, "capture mode %u, not %u", now.mode, before.mode);
    if (now.depth != before.depth) fail(file, line, "%d contexts on the stack, not %d", now.depth, before.depth);
    for (int i = 0; i < now.depth; i++)
        if (now.stack[i] != before.stack[i]) fail(file, line, "context %d on the stack is another", i);
}
#define KEEPS(call) do { traces before_ = traces_now(); OK(call); traces_check(__FILE__, __LINE__, before_); } while (0)

// ---- messages -----------------------------------------------------------------------------------------------------

// The latest message of this thread went by this path. What is below the eager limit takes one of two.
static void went_at(const char *file, int line, size_t bytes, int path) {
    anabranch_message m;
    if (!with_preload) return;
    if (!ANABRANCH_CALL(0, anabranch_last, &m, sizeof m)) fail(file, line, "nothing is known of the message");
    int direct_too = path == ANABRANCH_EAGER && m.path == ANABRANCH_DIRECT;
    if (m.bytes != bytes || (m.path != path && !direct_too))
        fail(file, line, "%llu bytes by path %d (%s), not %zu by %d", (unsigned long long)m.bytes, m.path, m.reason ? m.reason : "-",
             bytes, path);
}
#define WENT(bytes, path) went_at(__FILE__, __LINE__, bytes, path)

static const size_t sizes[] = {TINY, SMALL, LARGE};
static const int paths[] = {ANABRANCH_EAGER, ANABRANCH_EAGER, ANABRANCH_DIRECT};

// Buffers as the current context allocates them; `at` is what tells one use of them from another.
static void both_ways_at(const char *file, int line, int at) {
    for (int i = 0; i < 3; i++)
        for (int from = 0; from < 2; from++) {
            buf b = buf_new(DEVICE, sizes[i], 3);
            if (me == from) {
                buf_fill(b, 100 * at + i);
                KEEPS(MPI_Send(b.p, sizes[i], MPI_BYTE, peer, at, MPI_COMM_WORLD));
            } else {
                MPI_Status s;
                KEEPS(MPI_Recv(b.p, sizes[i], MPI_BYTE, peer, at, MPI_COMM_WORLD, &s));
                STATUS_CHECK(&s, peer, at, sizes[i]);
                buf_check_at(file, line, b, 100 * at + i, sizes[i]);
            }
            went_at(file, line, sizes[i], paths[i]);
            buf_free(b);
        }
}
#define BOTH_WAYS(at) both_ways_at(__FILE__, __LINE__, at)

// Each has met a device buffer, and has told the other: from now on descriptors are sent.
static void acquaint(void) {
    anabranch_message m;
    for (int i = 0; i < 2; i++) {
        buf b = buf_new(DEVICE, 1, 0);
        OK(MPI_Sendrecv_replace(b.p, 1, MPI_BYTE, peer, 0, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        buf_free(b);
        barrier();
    }
    ANABRANCH_CALL(0, anabranch_last, &m, sizeof m);
}

static CUdeviceptr address(const void *p) { return (CUdeviceptr)(uintptr_t)p; }

static void all_are(CUdeviceptr p, size_t bytes, unsigned char value) {
    unsigned char *image = scratch(bytes);
    CU(cu.down(image, p, bytes));
    CHECK(image[0] == value && !memcmp(image, image + 1, bytes - 1), "not all bytes are %d", value);
    free(image);
}

// ---- cases --------------------------------------------------------------------------------------------------------

// Work on the default streams, legacy and per thread, brings a message to its buffer and takes it away. Beside it, other
// work is pending on them, and is not disturbed.
static void default_streams(void) {
    for (int per_thread = 0; per_thread < 2; per_thread++) {
        CUresult (*set)(CUdeviceptr, unsigned char, size_t, CUstream) = per_thread ? more.set_ptsz : more.set;
        CUresult (*copy)(CUdeviceptr, CUdeviceptr, size_t, CUstream) = per_thread ? more.copy_ptsz : more.copy;
        CUresult (*synchronize)(CUstream) = per_thread ? more.stream_synchronize_ptsz : more.stream_synchronize;
        CUdeviceptr other;
        CU(cu.alloc(&other, HUGE));
        for (int i = 0; i < 3; i++) {
            size_t n = sizes[i];
            buf b = buf_new(DEVICE, n, 0), c = buf_new(DEVICE, n, 0);
            if (me == 0) {
                // MPI's rule: what the send reads is there before the call.
                CU(set(address(b.p), 40 + i, n, NULL));
                CU(synchronize(NULL));
                CU(set(other, 70 + i, HUGE, NULL));
                KEEPS(MPI_Send(b.p, n, MPI_BYTE, 1, 1, MPI_COMM_WORLD));
            } else {
                CU(set(other, 70 + i, HUGE, NULL));
                KEEPS(MPI_Recv(b.p, n, MPI_BYTE, 0, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
                // What comes after the receive sees the message without more ado.
                CU(copy(address(c.p), address(b.p), n, NULL));
                CU(synchronize(NULL));
                all_are(address(c.p), n, 40 + i);
            }
            WENT(n, paths[i]);
            CU(synchronize(NULL));
            all_are(other, HUGE, 70 + i);
            buf_free(b);
            buf_free(c);
        }
        CU(cu.release(other));
    }
}

// Work of many streams is pending when messages are sent and received, and when they are waited for.
static void pending_work(void) {
    enum { STREAMS = 6 };
    CUstream streams[STREAMS];
    CUdeviceptr other[STREAMS];
    for (int i = 0; i < STREAMS; i++) {
        CU(more.stream_create(&streams[i], i % 2 ? NON_BLOCKING : 0));
        CU(cu.alloc(&other[i], HUGE / 4));
    }
    for (int round = 0; round < 3; round++) {
        MPI_Request r[2];
        buf a = buf_new(DEVICE, LARGE, 1), b = buf_new(DEVICE, LARGE, 2);
        buf_fill(a, 10 * round + me);
        for (int i = 0; i < STREAMS; i++)
            for (int k = 0; k < 3; k++) CU(more.set(other[i], 10 * round + i + k, HUGE / 4, streams[i]));
        KEEPS(MPI_Irecv(b.p, LARGE, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &r[0]));
        KEEPS(MPI_Isend(a.p, LARGE, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &r[1]));
        KEEPS(MPI_Wait(&r[1], MPI_STATUS_IGNORE));
        WENT(LARGE, ANABRANCH_DIRECT);
        KEEPS(MPI_Wait(&r[0], MPI_STATUS_IGNORE));
        WENT(LARGE, ANABRANCH_DIRECT);
        BUF_CHECK(b, 10 * round + peer, LARGE);
        for (int i = 0; i < STREAMS; i++) {
            CU(more.stream_synchronize(streams[i]));
            all_are(other[i], HUGE / 4, 10 * round + i + 2);
        }
        buf_free(a);
        buf_free(b);
    }
    for (int i = 0; i < STREAMS; i++) { CU(more.stream_destroy(streams[i])); CU(cu.release(other[i])); }
}

static volatile int released;
static void hold(void *nothing) { (void)nothing; while (!released) usleep(200); }

// The legacy default stream stands still until the messages are through: a copy that waited for it would wait for ever.
// (The first message of an allocation may wait for that stream: the driver drains it when SYNC_MEMOPS is set.)
static void held(void) {
    buf out[3], in[3];
    for (int i = 0; i < 3; i++) {
        out[i] = buf_new(DEVICE, sizes[i], 1);
        in[i] = buf_new(DEVICE, sizes[i], 2);
    }
    for (int round = 0; round < 3; round++) {
        MPI_Request r[3];
        for (int i = 0; i < 3; i++) {
            buf_poison(in[i]);
            buf_fill(out[i], 10 * round + i + me);
        }
        released = 0;
        if (round > 0) CU(more.host_function(NULL, hold, NULL));
        for (int i = 0; i < 3; i++) KEEPS(MPI_Irecv(in[i].p, sizes[i], MPI_BYTE, peer, i, MPI_COMM_WORLD, &r[i]));
        for (int i = 0; i < 3; i++) {
            KEEPS(MPI_Send(out[i].p, sizes[i], MPI_BYTE, peer, i, MPI_COMM_WORLD));
            WENT(sizes[i], paths[i]);
        }
        KEEPS(MPI_Waitall(3, r, MPI_STATUSES_IGNORE));
        released = 1;
        for (int i = 0; i < 3; i++) BUF_CHECK(in[i], 10 * round + i + peer, sizes[i]);
    }
    for (int i = 0; i < 3; i++) { buf_free(out[i]); buf_free(in[i]); }
}

static unsigned capture_status(CUstream stream) {
    unsigned status = 99;
    CU(more.is_capturing(stream, &status));
    return status;
}

// Begins a capture, ends it, and finds in it what the program has put there: `wanted` nodes.
static void capture_end(CUstream stream, size_t wanted, CUdeviceptr p, size_t bytes, unsigned char value) {
    CUgraph graph;
    CUgraphExec exec;
    size_t count = 0;
    EQUAL(capture_status(stream), ACTIVE);
    CU(more.end(stream, &graph));
    CU(more.nodes(graph, NULL, &count));
    EQUAL(count, wanted);
    CU(more.instantiate(&exec, graph, 0));
    CU(more.launch(exec, stream));
    CU(more.stream_synchronize(stream));
    all_are(p, bytes, value);
    CU(more.exec_destroy(exec));
    CU(more.graph_destroy(graph));
}

// Messages by every path between the begin and the end of a capture, in each mode. The first round is this rank's first use
// of the GPU with the library: streams, events and pinned memory come into being during the capture.
static void capture(void) {
    static const unsigned modes[] = {GLOBAL, THREAD_LOCAL, RELAXED};
    CUstream stream;
    CUdeviceptr mine, pool;
    CU(more.stream_create(&stream, NON_BLOCKING));
    CU(cu.alloc(&mine, SMALL));
    CU(more.pool_alloc(&pool, LARGE, NULL));
    CU(cu.synchronize());
    for (int round = 0; round < 3; round++) {
        buf out[3], in[3], pooled = buf_new(DEVICE, LARGE, 0);
        for (int i = 0; i < 3; i++) {
            out[i] = buf_new(DEVICE, sizes[i], 1);
            in[i] = buf_new(DEVICE, sizes[i], 2);
            buf_fill(out[i], 10 * round + i);
        }
        CU(more.begin(stream, modes[round]));
        CU(more.set(mine, 1, SMALL, stream));
        if (round == 0)
            for (int i = 0; i < 2; i++) { // as in acquaint
                KEEPS(MPI_Sendrecv(out[0].p, 1, MPI_BYTE, peer, 0, in[0].p, 1, MPI_BYTE, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
                barrier();
            }
        for (int i = 0; i < 3; i++) {
            MPI_Request r;
            KEEPS(MPI_Irecv(in[i].p, sizes[i], MPI_BYTE, peer, i, MPI_COMM_WORLD, &r));
            EQUAL(capture_status(stream), ACTIVE);
            KEEPS(MPI_Send(out[i].p, sizes[i], MPI_BYTE, peer, i, MPI_COMM_WORLD));
            WENT(sizes[i], paths[i]);
            EQUAL(capture_status(stream), ACTIVE);
            KEEPS(MPI_Wait(&r, MPI_STATUS_IGNORE));
            WENT(sizes[i], paths[i]);
        }
        CU(more.set(mine, 7 + round, SMALL, stream));
        // Served by the helper thread while this one is inside a barrier.
        MPI_Request r;
        if (me == 0) KEEPS(MPI_Isend((void *)(uintptr_t)pool, LARGE, MPI_BYTE, 1, 9, MPI_COMM_WORLD, &r));
        else { KEEPS(MPI_Recv(pooled.p, LARGE, MPI_BYTE, 0, 9, MPI_COMM_WORLD, MPI_STATUS_IGNORE)); WENT(LARGE, ANABRANCH_GPU_PIPELINE); }
        KEEPS(MPI_Barrier(MPI_COMM_WORLD));
        if (me == 0) { KEEPS(MPI_Wait(&r, MPI_STATUS_IGNORE)); WENT(LARGE, ANABRANCH_GPU_PIPELINE); }
        capture_end(stream, 2, mine, SMALL, 7 + round);
        for (int i = 0; i < 3; i++) { BUF_CHECK(in[i], 10 * round + i, sizes[i]); buf_free(out[i]); buf_free(in[i]); }
        buf_free(pooled);
    }
    CU(more.pool_free(pool, NULL));
    CU(cu.synchronize());
    CU(cu.release(mine));
    CU(more.stream_destroy(stream));
}

// Errors of the program's own making stay what they were: a capture that it has broken, an error code that it holds.
static void own_errors(void) {
    CUstream stream;
    CUdeviceptr mine;
    CUgraph graph;
    buf out = buf_new(DEVICE, LARGE, 1), in = buf_new(DEVICE, LARGE, 2);
    MPI_Request r;
    buf_fill(out, me);
    CU(more.stream_create(&stream, NON_BLOCKING));
    CU(more.begin(stream, GLOBAL));
    CHECK(cu.alloc(&mine, SMALL) != 0, "an allocation in a global capture breaks it");
    EQUAL(capture_status(stream), INVALIDATED);
    KEEPS(MPI_Irecv(in.p, LARGE, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &r));
    KEEPS(MPI_Send(out.p, LARGE, MPI_BYTE, peer, 1, MPI_COMM_WORLD));
    WENT(LARGE, ANABRANCH_DIRECT);
    KEEPS(MPI_Wait(&r, MPI_STATUS_IGNORE));
    EQUAL(capture_status(stream), INVALIDATED);
    EQUAL(more.end(stream, &graph), CAPTURE_INVALIDATED);
    CHECK(cu.release(12345) != 0, "no allocation");
    BUF_CHECK(in, peer, LARGE);
    BOTH_WAYS(2);
    CU(more.stream_destroy(stream));
    buf_free(out);
    buf_free(in);
}

// The other calls that complete or look at messages: none of them leaves anything behind.
static void calls(void) {
    buf a = buf_new(DEVICE, LARGE, 1), b = buf_new(DEVICE, LARGE, 2);
    for (int way = 0; way < 6; way++) {
        MPI_Request r[2];
        MPI_Message m;
        MPI_Status s;
        int flag = 0, index;
        buf_fill(a, 10 * way + me);
        buf_poison(b);
        if (way < 4) KEEPS(MPI_Isend(a.p, LARGE, MPI_BYTE, peer, way, MPI_COMM_WORLD, &r[0]));
        switch (way) {
        case 0:
            KEEPS(MPI_Irecv(b.p, LARGE, MPI_BYTE, peer, way, MPI_COMM_WORLD, &r[1]));
            while (!flag) KEEPS(MPI_Testall(2, r, &flag, MPI_STATUSES_IGNORE));
            break;
        case 1:
            while (!flag) KEEPS(MPI_Iprobe(peer, way, MPI_COMM_WORLD, &flag, &s));
            STATUS_CHECK(&s, peer, way, LARGE);
            KEEPS(MPI_Recv(b.p, LARGE, MPI_BYTE, peer, way, MPI_COMM_WORLD, &s));
            KEEPS(MPI_Wait(&r[0], MPI_STATUS_IGNORE));
            break;
        case 2:
            KEEPS(MPI_Mprobe(peer, way, MPI_COMM_WORLD, &m, &s));
            KEEPS(MPI_Imrecv(b.p, LARGE, MPI_BYTE, &m, &r[1]));
            KEEPS(MPI_Waitany(2, r, &index, MPI_STATUS_IGNORE));
            KEEPS(MPI_Wait(&r[1 - index], MPI_STATUS_IGNORE));
            break;
        case 3:
            KEEPS(MPI_Recv_init(b.p, LARGE, MPI_BYTE, peer, way, MPI_COMM_WORLD, &r[1]));
            KEEPS(MPI_Startall(1, &r[1]));
            for (flag = 0; !flag;) KEEPS(MPI_Request_get_status(r[1], &flag, MPI_STATUS_IGNORE));
            KEEPS(MPI_Waitall(2, r, MPI_STATUSES_IGNORE));
            KEEPS(MPI_Request_free(&r[1]));
            break;
        case 4:
            KEEPS(MPI_Sendrecv(a.p, LARGE, MPI_BYTE, peer, way, b.p, LARGE, MPI_BYTE, peer, way, MPI_COMM_WORLD, &s));
            WENT(LARGE, ANABRANCH_DIRECT);
            break;
        default: {
            MPI_Datatype halves; // every other kilobyte, by value
            KEEPS(MPI_Type_vector(LARGE / 2048, 1024, 2048, MPI_BYTE, &halves));
            KEEPS(MPI_Type_commit(&halves));
            buf_fill(b, 10 * way + me);
            KEEPS(MPI_Sendrecv_replace(b.p, 1, halves, peer, way, peer, way, MPI_COMM_WORLD, &s));
            WENT((size_t)(LARGE / 2048) * 1024, ANABRANCH_VALUE);
            KEEPS(MPI_Type_free(&halves));
            unsigned char *want = scratch(LARGE), *image = scratch(LARGE);
            pattern(want, LARGE, 10 * way + peer);
            memory_get(DEVICE, image, b.p, LARGE);
            for (int i = 0; i < LARGE / 2048; i++) CHECK(!memcmp(want + 2048 * i, image + 2048 * i, 1024), "run %d", i);
            free(want);
            free(image);
        }
        }
        if (way < 5) BUF_CHECK(b, 10 * way + peer, LARGE);
        KEEPS(MPI_Barrier(MPI_COMM_WORLD));
    }
    buf_free(a);
    buf_free(b);
}

// Two GPUs a rank, the same ones for both ranks where there are fewer than four: a buffer of either, whichever is current, or
// none at all.
static void several_gpus(void) {
    CUcontext gpu[2];
    int count;
    CU(cu.device_count(&count));
    if (count < 2) {
        if (me == 0) printf("left out: several_gpus, with one GPU\n");
        return;
    }
    for (int i = 0; i < 2; i++) CU(cu.retain(&gpu[i], (2 * me + i) % count));
    for (int from = 0; from < 2; from++)
        for (int to = 0; to < 2; to++)
            for (int i = 0; i < 3; i++) {
                MPI_Request r[2];
                size_t n = sizes[i];
                CU(cu.set_current(gpu[from]));
                buf a = buf_new(DEVICE, n, 1);
                buf_fill(a, 10 * from + i);
                CU(cu.set_current(gpu[to]));
                buf b = buf_new(DEVICE, n, 2);
                CU(cu.set_current(gpu[!to]));
                KEEPS(MPI_Irecv(b.p, n, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &r[0]));
                CU(cu.set_current(gpu[!from]));
                KEEPS(MPI_Isend(a.p, n, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &r[1]));
                CU(cu.set_current(NULL));
                KEEPS(MPI_Wait(&r[1], MPI_STATUS_IGNORE));
                WENT(n, paths[i]);
                KEEPS(MPI_Wait(&r[0], MPI_STATUS_IGNORE));
                WENT(n, paths[i]);
                CU(cu.set_current(gpu[to]));
                BUF_CHECK(b, 10 * from + i, n);
                buf_free(b);
                CU(cu.set_current(gpu[from]));
                buf_free(a);
            }
    // From one GPU to the other of the same rank.
    MPI_Request r;
    buf a = buf_new(DEVICE, LARGE, 1);
    buf_fill(a, 5);
    CU(cu.set_current(gpu[0]));
    buf b = buf_new(DEVICE, LARGE, 1);
    KEEPS(MPI_Irecv(b.p, LARGE, MPI_BYTE, me, 1, MPI_COMM_WORLD, &r));
    KEEPS(MPI_Send(a.p, LARGE, MPI_BYTE, me, 1, MPI_COMM_WORLD));
    WENT(LARGE, ANABRANCH_SELF);
    KEEPS(MPI_Wait(&r, MPI_STATUS_IGNORE));
    BUF_CHECK(b, 5, LARGE);
    buf_free(b);
    CU(cu.set_current(gpu[1]));
    buf_free(a);
    CU(cu.set_current(context));
}

// Contexts that the program makes and destroys between messages, on one side or on both. Memory that the other side has
// mapped goes with them.
static void own_contexts(void) {
    int count = 0;
    CU(cu.device_count(&count));
    for (int round = 0; round < 6; round++) {
        CUcontext own = NULL;
        int mine = round % 3 == 2 || round % 3 == me; // who has one this time
        if (mine) CU(more.context_create(&own, 0, me % count));
        BOTH_WAYS(round);
        // Still allocated when its context goes.
        buf left = buf_new(DEVICE, LARGE, 1);
        MPI_Request r;
        buf_fill(left, round + me);
        buf in = buf_new(DEVICE, LARGE, 1);
        KEEPS(MPI_Irecv(in.p, LARGE, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &r));
        KEEPS(MPI_Send(left.p, LARGE, MPI_BYTE, peer, 1, MPI_COMM_WORLD));
        WENT(LARGE, ANABRANCH_DIRECT);
        KEEPS(MPI_Wait(&r, MPI_STATUS_IGNORE));
        BUF_CHECK(in, round + peer, LARGE);
        barrier();
        if (mine) CU(more.context_destroy(own));
        else { buf_free(left); buf_free(in); }
        CU(cu.set_current(context));
        barrier();
    }
    BOTH_WAYS(9);
}

// cudaDeviceReset: everything on the device is gone, the library's streams, events and pinned memory too.
static void reset(void) {
    for (int round = 0; round < 6; round++) {
        BOTH_WAYS(round);
        barrier();
        if (round % 3 == 2 || round % 3 == me) {
            int count = 0;
            CUdevice device;
            CU(cu.device_count(&count));
            CU(cu.device_get(&device, me % number_from("GPUS", count)));
            CU(more.reset(device));
            // As cudaDeviceReset leaves it, there is no context until the next one is asked for.
            CU(cu.retain(&context, device));
            CU(cu.set_current(context));
        }
        barrier();
    }
    BOTH_WAYS(9);
}

// Children that do not use MPI: one that exits as a program does, one that executes another program, one that is there while
// messages are under way.
static void children(void) {
    for (int round = 0; round < 3; round++) {
        MPI_Request r[2];
        buf a = buf_new(DEVICE, LARGE, 1), b = buf_new(DEVICE, LARGE, 1);
        buf_fill(a, 10 * round + me);
        BOTH_WAYS(round);
        KEEPS(MPI_Irecv(b.p, LARGE, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &r[0]));
        KEEPS(MPI_Issend(a.p, LARGE, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &r[1]));
        anabranch_message known;
        EQUAL(ANABRANCH_CALL(0, anabranch_request, &r[0], &known, sizeof known), with_preload);
        int gate[2];
        CHECK(!pipe(gate), "pipe");
        fflush(NULL);
        pid_t child = fork();
        CHECK(child >= 0, "fork");
        if (child == 0) {
            char byte;
            anabranch_message m;
            alarm(60);
            close(gate[1]);
            if (round == 2 && read(gate[0], &byte, 1) != 0) _exit(5); // until the parent is through
            // The library is out of work here.
            if (ANABRANCH_CALL(0, anabranch_request, &r[0], &m, sizeof m)) _exit(8);
            if (round == 1) { execl("/bin/sh", "sh", "-c", "exit 7", (char *)NULL); _exit(6); }
            if (round == 0) exit(7);
            _exit(7);
        }
        close(gate[0]);
        KEEPS(MPI_Wait(&r[1], MPI_STATUS_IGNORE));
        WENT(LARGE, ANABRANCH_DIRECT);
        KEEPS(MPI_Wait(&r[0], MPI_STATUS_IGNORE));
        WENT(LARGE, ANABRANCH_DIRECT);
        BUF_CHECK(b, 10 * round + peer, LARGE);
        close(gate[1]);
        int status;
        EQUAL(waitpid(child, &status, 0), child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 7, "child %d ended with %#x", round, status);
        BOTH_WAYS(round);
        buf_free(a);
        buf_free(b);
    }
}

// Another thread calls MPI: it has no context, and has none afterwards.
static buf handed[2][3];
static void *messenger(void *nothing) {
    (void)nothing;
    CUcontext none = &none;
    CU(cu.get_current(&none));
    CHECK(!none, "a new thread has a context");
    for (int i = 0; i < 3; i++) {
        MPI_Request r;
        KEEPS(MPI_Irecv(handed[1][i].p, sizes[i], MPI_BYTE, peer, i, MPI_COMM_WORLD, &r));
        KEEPS(MPI_Send(handed[0][i].p, sizes[i], MPI_BYTE, peer, i, MPI_COMM_WORLD));
        WENT(sizes[i], paths[i]);
        KEEPS(MPI_Wait(&r, MPI_STATUS_IGNORE));
        WENT(sizes[i], paths[i]);
    }
    CU(cu.get_current(&none));
    CHECK(!none, "the thread has a context now");
    return NULL;
}

static void *user_of_the_gpu(void *nothing) {
    (void)nothing;
    device_start(me);
    for (int i = 0; i < 3; i++) {
        for (int k = 0; k < 2; k++) handed[k][i] = buf_new(DEVICE, sizes[i], 1);
        buf_fill(handed[0][i], 10 * i + me);
    }
    return NULL;
}

static void *judge(void *nothing) {
    (void)nothing;
    device_start(me);
    for (int i = 0; i < 3; i++) {
        BUF_CHECK(handed[1][i], 10 * i + peer, sizes[i]);
        for (int k = 0; k < 2; k++) buf_free(handed[k][i]);
    }
    return NULL;
}

static void in_a_thread(void *(*work)(void *)) {
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, work, NULL), "pthread_create");
    CHECK(!pthread_join(thread, NULL), "pthread_join");
}

// Every thread may call MPI: one uses the GPU, another calls MPI.
static void other_threads(void) {
    user_of_the_gpu(NULL);
    in_a_thread(messenger);
    judge(NULL);
}

// Only this thread calls MPI, and it has no context: another uses the GPU.
static void funneled(void) {
    in_a_thread(user_of_the_gpu);
    CU(cu.set_current(NULL));
    messenger(NULL);
    in_a_thread(judge);
    CU(cu.set_current(context));
}

// Another thread captures globally, which forbids every thread what could break its capture: not this library.
static pthread_barrier_t meeting;
static void *capturer(void *nothing) {
    (void)nothing;
    CUstream stream;
    CUdeviceptr mine;
    device_start(me);
    CU(more.stream_create(&stream, NON_BLOCKING));
    CU(cu.alloc(&mine, SMALL));
    CU(more.begin(stream, GLOBAL));
    CU(more.set(mine, 9, SMALL, stream));
    pthread_barrier_wait(&meeting);
    pthread_barrier_wait(&meeting);
    capture_end(stream, 1, mine, SMALL, 9);
    CU(cu.release(mine));
    CU(more.stream_destroy(stream));
    return NULL;
}

static void captured_elsewhere(void) {
    pthread_t thread;
    CHECK(!pthread_barrier_init(&meeting, NULL, 2), "pthread_barrier_init");
    user_of_the_gpu(NULL);
    CHECK(!pthread_create(&thread, NULL, capturer, NULL), "pthread_create");
    pthread_barrier_wait(&meeting);
    CU(cu.set_current(NULL));
    messenger(NULL);
    CU(cu.set_current(context));
    pthread_barrier_wait(&meeting);
    CHECK(!pthread_join(thread, NULL), "pthread_join");
    judge(NULL);
}

static const struct test_case cases[] = {
    {"capture", capture}, // first: the library has made nothing yet
    {"acquaint", acquaint}, {"default_streams", default_streams}, {"pending_work", pending_work}, {"held", held},
    {"own_errors", own_errors}, {"calls", calls},
    {"several_gpus", several_gpus}, {"own_contexts", own_contexts}, {"reset", reset}, {"children", children},
    {"funneled", funneled}, {"other_threads", other_threads}, {"captured_elsewhere", captured_elsewhere}, {0},
};

int main(int argc, char **argv) {
    // A driver of which the loader knows nothing, private to this program.
    const char *hidden = getenv("HIDDEN_DRIVER");
    if (hidden && !dlopen(hidden, RTLD_NOW | RTLD_LOCAL)) { fprintf(stderr, "FAILED: %s\n", dlerror()); return 3; }
    if (argc > 1) {
        driver_load();
        more_load();
        return run_cases(argc, argv, cases, number_from("THREADS", 0) ? MPI_THREAD_MULTIPLE : MPI_THREAD_FUNNELED);
    }
    return 2;
}
