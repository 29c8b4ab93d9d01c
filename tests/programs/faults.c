// Driver calls that fail, one after the other: each message arrives as it was sent, or the error handler is called.
//
//   faults once CODE PATH...       the Nth driver call (of FUNCTION, or of any) fails once, for every N that a transfer reaches, on
//                                  the sender's side and on the receiver's
//   faults lasting CODE PATH...    all calls of one function fail, for every function that a transfer calls
//   faults handler CODE            an error handler waits for a rank that waits for a message of this one
//
// Every message has contexts, streams, events, mappings and pinned memory of its own: the program makes a new context
// for it, so that the calls that are made once for a context are among those that fail.
#include "transfer.h"

static struct {
    int (*plan)(const char *);
    unsigned long long (*calls)(void);
    const char *(*hit)(void);
    CUresult (*create)(CUcontext *, unsigned, CUdevice);
    CUresult (*destroy)(CUcontext);
    CUresult (*pool)(CUdeviceptr *, size_t, void *);
    CUresult (*pool_free)(CUdeviceptr, void *);
    uint64_t (*counter)(const char *);
} more;

enum path { DIRECT, HOST_RING, DEVICE_TO_HOST, HOST_TO_DEVICE, VALUE, EAGER, EAGER_LATE, SEVERAL, PATH_COUNT };
static const char *const path_name[] = {"direct", "host_ring", "device_to_host", "host_to_device", "value", "eager", "eager_late", "several"};
static const size_t path_bytes[] = {300001, 150001, 150001, 300001, 40000, 9001, 9001, 4000011};

static MPI_Comm comm;
static int handled, handled_code, device_number, arrived, lost, positions;

static void on_error(MPI_Comm *c, int *code, ...) {
    (void)c;
    char text[MPI_MAX_ERROR_STRING];
    int length = 0, rank = -1;
    // A handler may call MPI.
    if (MPI_Error_string(*code, text, &length) != MPI_SUCCESS || length < 5) FAIL("an error without a text");
    if (MPI_Comm_rank(comm, &rank) != MPI_SUCCESS || rank != me) FAIL("the handler's MPI call");
    handled++;
    handled_code = *code;
}

static void more_load(void) {
    device_start(me);
    *(void **)&more.plan = dlsym(cu.library, "simcudaFaults");
    *(void **)&more.calls = dlsym(cu.library, "simcudaFaultCalls");
    *(void **)&more.hit = dlsym(cu.library, "simcudaFaultHit");
    *(void **)&more.create = dlsym(cu.library, "cuCtxCreate_v2");
    *(void **)&more.destroy = dlsym(cu.library, "cuCtxDestroy_v2");
    *(void **)&more.pool = dlsym(cu.library, "cuMemAllocAsync");
    *(void **)&more.pool_free = dlsym(cu.library, "cuMemFreeAsync");
    *(void **)&more.counter = dlsym(RTLD_DEFAULT, "anabranch_counter");
    CHECK(more.counter, "the library");
    CHECK(more.plan && more.calls && more.hit && more.create && more.destroy && more.pool && more.pool_free, "the simulated driver");
    int count;
    CU(cu.device_count(&count));
    device_number = me % count;
}

// Sends one message, with errors planned on one side. Returns the function that was hit, if any.
static const char *message(enum path path, int side, const char *plan, uint64_t seed) {
    int on_device = me == 0 ? path != HOST_TO_DEVICE : path != DEVICE_TO_HOST;
    CUcontext own = NULL, current = NULL;
    if (on_device) {
        CU(more.create(&own, 0, device_number));
        CU(cu.set_current(own));
    }
    buf b = {.bytes = path_bytes[path], .kind = on_device, .lead = GUARD + seed % 13};
    b.total = b.lead + b.bytes + GUARD;
    CUdeviceptr block = 0;
    if (!on_device) b.base = scratch(b.total);
    else {
        // What comes from a pool cannot be exported.
        if (path == HOST_RING) { CU(more.pool(&block, b.total, NULL)); CU(cu.synchronize()); }
        else CU(cu.alloc(&block, b.total));
        b.base = (unsigned char *)(uintptr_t)block;
    }
    b.p = b.base + b.lead;
    buf_poison(b);
    if (me == 0) buf_fill(b, seed);
    // Every other byte: such a message goes by value.
    MPI_Datatype type = MPI_BYTE;
    int count = b.bytes;
    if (path == VALUE && me == 0) {
        OK(MPI_Type_vector(1, b.bytes, b.bytes + 5, MPI_BYTE, &type));
        OK(MPI_Type_create_resized(type, 0, b.bytes + 64, &type));
        OK(MPI_Type_commit(&type));
        count = 1;
    }
    barrier();
    handled = 0;
    int rc, before = handled, sent = 0, sent_late = 0;
    if (me == side) CHECK(more.plan(plan) == 0, "a plan of errors");
    if (me == 0) {
        rc = MPI_Send(b.p, count, type, 1, 7, comm);
        OK(MPI_Send(&rc, 1, MPI_INT, 1, 8, MPI_COMM_WORLD));
    } else {
        MPI_Request r, word;
        MPI_Status s;
        int flag = 0, code_known = 0, patience = 2000;
        if (path == EAGER_LATE) usleep(3000);
        OK(MPI_Irecv(&sent, 1, MPI_INT, 0, 8, MPI_COMM_WORLD, &word));
        rc = MPI_Irecv(b.p, b.bytes, MPI_BYTE, 0, 7, comm, &r);
        if (rc == MPI_SUCCESS) {
            while (!flag) {
                rc = MPI_Test(&r, &flag, &s);
                if (rc != MPI_SUCCESS) break;
                if (!code_known) OK(MPI_Test(&word, &code_known, MPI_STATUS_IGNORE));
                else if (sent != MPI_SUCCESS && --patience == 0) { // it was never sent
                    OK(MPI_Cancel(&r));
                    rc = MPI_Wait(&r, &s);
                    int cancelled = 0;
                    OK(MPI_Test_cancelled(&s, &cancelled));
                    if (cancelled) sent_late = 1;
                    break;
                }
            }
        }
        if (!code_known) OK(MPI_Wait(&word, MPI_STATUS_IGNORE));
        if (rc == MPI_SUCCESS && !sent_late) STATUS_CHECK(&s, 0, 7, b.bytes);
    }
    const char *hit = me == side ? more.hit() : NULL;
    if (me == side) CHECK(more.plan(NULL) == 0, "no more errors");
    if (rc != MPI_SUCCESS) {
        CHECK(handled == 1 && handled_code == rc, "code %d, the handler was called %d times with %d", rc, handled, handled_code);
        lost++;
    } else {
        CHECK(handled == 0, "an error was raised (%d), and none returned", handled_code);
        if (me == 1 && !sent_late) { BUF_CHECK(b, seed, b.bytes); arrived++; }
        if (me == 0) BUF_CHECK(b, seed, b.bytes); // nothing was written to the sender's
    }
    if (on_device) {
        CU(cu.get_current(&current));
        CHECK(current == own, "another context is current");
        if (path == HOST_RING) CU(more.pool_free(block, NULL)); else CU(cu.release(block));
        CU(more.destroy(own));
        CU(cu.set_current(context));
    } else free(b.base);
    if (type != MPI_BYTE) OK(MPI_Type_free(&type));
    barrier();
    return hit;
}

// What both ranks have counted of things that went wrong.
static unsigned long long noted(void) {
    static const char *const names[] = {"retries", "driver_retries", "tracks_retired", "fallback_mapping_failed", "fallback_driver_error",
                                        "fallback_not_exportable", "fallback_out_of_memory", "fallback_no_context", "staging_refused"};
    unsigned long long sum = 0, all;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) sum += more.counter(names[i]);
    OK(MPI_Allreduce(&sum, &all, 1, MPI_UNSIGNED_LONG_LONG, MPI_SUM, MPI_COMM_WORLD));
    return all;
}

static void once(enum path path, int side, int code, int step, int first, int last) {
    static char name[200], plan[120];
    const char *function = getenv("FUNCTION") ? getenv("FUNCTION") : "*";
    // How often a message asks whether its copies are done is not always the same.
    for (int at = first, misses = 0; misses < 8 && at <= last; at += step) {
        snprintf(plan, sizeof plan, "%s:%d=%d", function, at, code);
        snprintf(name, sizeof name, "%s, call %d of rank %d fails", path_name[path], at, side);
        running = name;
        int before = lost;
        unsigned long long noted_before = noted();
        const char *hit = message(path, side, plan, at + 1000 * path);
        if (me == side && hit && number_from("VERBOSE", 0)) fprintf(stderr, "%s: %s%s\n", name, hit, lost > before ? " LOST" : "");
        if (noted() == noted_before && me == side && hit) fprintf(stderr, "uncounted: %s on %s\n", hit, path_name[path]);
        int was_hit = hit != NULL;
        OK(MPI_Bcast(&was_hit, 1, MPI_INT, side, MPI_COMM_WORLD));
        misses = was_hit ? 0 : misses + 1;
        positions += was_hit;
    }
}

static void lasting(enum path path, int side, int code) {
    static const char *const functions[] = {
        "cuPointerSetAttribute", "cuCtxPushCurrent", "cuCtxGetId", "cuThreadExchangeStreamCaptureMode",
        "cuStreamCreate", "cuEventCreate", "cuEventRecord", "cuEventQuery", "cuStreamQuery", "cuEventSynchronize", "cuStreamSynchronize",
        "cuMemcpyAsync", "cuMemcpy2DAsync", "cuMemHostRegister", "cuIpcGetMemHandle", "cuIpcOpenMemHandle", "cuIpcCloseMemHandle"};
    static char name[200], plan[120];
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        snprintf(plan, sizeof plan, "%s:1+=%d", functions[i], code);
        snprintf(name, sizeof name, "%s, %s always fails on rank %d", path_name[path], functions[i], side);
        running = name;
        int before = lost;
        const char *hit = message(path, side, plan, i + 1000 * path);
        if (me == side && number_from("VERBOSE", 0)) fprintf(stderr, "%s:%s%s\n", name, hit ? " hit" : "", lost > before ? " LOST" : "");
        positions += hit != NULL;
    }
}

static void on_error_wait(MPI_Comm *c, int *code, ...) {
    (void)c;
    (void)code;
    handled++;
    CHECK(more.plan(NULL) == 0, "no more errors");
    OK(MPI_Barrier(MPI_COMM_WORLD)); // rank 0 comes here once it has the message that is under way to it
}

// The handler is called when the engine is free: its helper serves the other rank meanwhile.
static void handler_that_waits(int code) {
    MPI_Errhandler handler;
    OK(MPI_Comm_create_errhandler(on_error_wait, &handler));
    OK(MPI_Comm_set_errhandler(comm, handler));
    size_t bytes = 1000003;
    buf a = buf_new(DEVICE, bytes, 1);
    CUdeviceptr block;
    CU(more.pool(&block, bytes, NULL)); // it takes rank 1 to bring what lies there
    CU(cu.synchronize());
    buf b = {.p = (unsigned char *)(uintptr_t)block, .bytes = bytes, .kind = DEVICE};
    if (me == 0) {
        buf_fill(a, 1);
        OK(MPI_Send(a.p, bytes, MPI_BYTE, 1, 1, comm));
        OK(MPI_Recv(b.p, bytes, MPI_BYTE, 1, 2, comm, MPI_STATUS_IGNORE));
        BYTES_CHECK(DEVICE, b.p, bytes, 2);
        OK(MPI_Barrier(MPI_COMM_WORLD));
    } else {
        char plan[80];
        MPI_Request r;
        buf_fill(b, 2);
        OK(MPI_Isend(b.p, bytes, MPI_BYTE, 0, 2, comm, &r));
        snprintf(plan, sizeof plan, "cuMemcpyAsync:1+=%d", code);
        CHECK(more.plan(plan) == 0, "a plan of errors");
        int rc = MPI_Recv(a.p, bytes, MPI_BYTE, 0, 1, comm, MPI_STATUS_IGNORE);
        CHECK(rc != MPI_SUCCESS && handled == 1, "code %d, %d calls of the handler", rc, handled);
        OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
    }
    CU(more.pool_free(block, NULL));
    buf_free(a);
    OK(MPI_Errhandler_free(&handler));
}

int main(int argc, char **argv) {
    start(&argc, &argv, MPI_THREAD_SINGLE);
    more_load();
    CHECK(argc > 2 && ranks == 2, "arguments");
    int is_once = !strcmp(argv[1], "once"), code = atoi(argv[2]);
    MPI_Errhandler handler;
    OK(MPI_Comm_dup(MPI_COMM_WORLD, &comm));
    OK(MPI_Comm_create_errhandler(on_error, &handler));
    OK(MPI_Comm_set_errhandler(comm, handler));
    int cases = 0;
    for (int i = 0; i < 3; i++) message(DIRECT, -1, "", i);
    if (!strcmp(argv[1], "handler")) { handler_that_waits(code); cases = 1; }
    else for (int path = 0; path < PATH_COUNT; path++) {
        if (!selected(path_name[path], argc - 2, argv + 2)) continue;
        cases++;
        for (int i = 0; i < 3; i++) message(path, -1, "", i); // both know of each other's devices
        for (int side = 0; side < 2; side++) {
            int touches = side == 0 ? path != HOST_TO_DEVICE : path != DEVICE_TO_HOST;
            if (!touches) continue;
            if (is_once) once(path, side, code, number_from("STEP", 1), number_from("FIRST", 1), number_from("LAST", 1 << 30));
            else lasting(path, side, code);
        }
    }
    CHECK(cases > 0, "no such path");
    fprintf(stderr, "rank %d: %d positions, %d arrived, %d lost\n", me, positions, arrived, lost);
    OK(MPI_Errhandler_free(&handler));
    OK(MPI_Comm_free(&comm));
    return finish(cases);
}
