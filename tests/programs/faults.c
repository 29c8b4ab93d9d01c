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

static MPI_Comm comm; // the ranks of MPI_COMM_WORLD in reverse: what is said names those
static int at(int rank) { return ranks - 1 - rank; }
static int handled, handled_code, device_number, arrived, lost, positions;

static void on_error(MPI_Comm *c, int *code, ...) {
    (void)c;
    char text[MPI_MAX_ERROR_STRING];
    int length = 0, rank = -1, class = -1;
    // A handler may call MPI.
    if (MPI_Error_string(*code, text, &length) != MPI_SUCCESS || length != (int)strlen(text)) FAIL("an error without a text");
    if (MPI_Error_class(*code, &class) != MPI_SUCCESS || class != MPI_ERR_OTHER) FAIL("class %d of %s", class, text);
    if (MPI_Comm_rank(comm, &rank) != MPI_SUCCESS || rank != at(me)) FAIL("the handler's MPI call");
    fprintf(stderr, "rank %d is told: %s\n", me, text);
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

enum { RUN = 4, STRIDE = 2 * RUN }; // a message by value: runs of its bytes with as much room between them

// Writes a message in runs into its buffer, or checks that all of it is as it was written.
static void in_runs(buf b, uint64_t seed, int is_written) {
    unsigned char *all = scratch(b.total), *found = scratch(b.total), *bytes = scratch(b.bytes);
    memset(all, 0xa5, b.total);
    pattern(bytes, b.bytes, seed);
    for (size_t i = 0; i < b.bytes; i += RUN) memcpy(all + b.lead + i / RUN * STRIDE, bytes + i, RUN);
    memory_get(b.kind, found, b.base, b.total);
    if (is_written) CHECK(!memcmp(all, found, b.total), "the sender's buffer was written to");
    else memory_put(b.kind, b.base, all, b.total);
    free(all);
    free(found);
    free(bytes);
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
    int is_in_runs = path == VALUE && me == 0;
    b.total = b.lead + b.bytes * (is_in_runs ? STRIDE / RUN : 1) + GUARD;
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
    if (is_in_runs) in_runs(b, seed, 0);
    else if (me == 0) buf_fill(b, seed);
    MPI_Datatype type = MPI_BYTE;
    int count = b.bytes;
    if (is_in_runs) {
        OK(MPI_Type_vector(b.bytes / RUN, RUN, STRIDE, MPI_BYTE, &type));
        OK(MPI_Type_commit(&type));
        count = 1;
    }
    barrier();
    handled = 0;
    int rc, before = handled, sent = 0, sent_late = 0;
    if (me == side) CHECK(more.plan(plan) == 0, "a plan of errors");
    if (me == 0) {
        rc = MPI_Send(b.p, count, type, at(1), 7, comm);
        OK(MPI_Send(&rc, 1, MPI_INT, 1, 8, MPI_COMM_WORLD));
    } else {
        MPI_Request r, word;
        MPI_Status s;
        int flag = 0, code_known = 0, patience = 2000;
        if (path == EAGER_LATE) usleep(3000);
        OK(MPI_Irecv(&sent, 1, MPI_INT, 0, 8, MPI_COMM_WORLD, &word));
        rc = MPI_Irecv(b.p, b.bytes, MPI_BYTE, at(0), 7, comm, &r);
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
        if (rc == MPI_SUCCESS && !sent_late) STATUS_CHECK(&s, at(0), 7, b.bytes);
    }
    const char *hit = me == side ? more.hit() : NULL;
    if (me == side) CHECK(more.plan(NULL) == 0, "no more errors");
    if (rc != MPI_SUCCESS) {
        CHECK(handled == 1 && handled_code == rc, "code %d, the handler was called %d times with %d", rc, handled, handled_code);
        lost++;
    } else {
        CHECK(handled == 0, "an error was raised (%d), and none returned", handled_code);
        if (me == 1 && !sent_late) { BUF_CHECK(b, seed, b.bytes); arrived++; }
        if (is_in_runs) in_runs(b, seed, 1);
        else if (me == 0) BUF_CHECK(b, seed, b.bytes); // nothing was written to the sender's
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

// How many of so many messages without faults took the path. What a receiver may do in time for the sender or not is either.
static int taken(enum path path, int messages) {
    static const struct { int rank; const char *counters[2]; } by[] = {
        [DIRECT] = {1, {"receives_direct"}}, [HOST_RING] = {1, {"receives_host_ring"}}, [DEVICE_TO_HOST] = {1, {"receives_host_ring"}},
        [HOST_TO_DEVICE] = {1, {"receives_host_ring"}}, [VALUE] = {0, {"sends_value"}},
        [EAGER] = {1, {"receives_eager", "receives_direct"}}, [EAGER_LATE] = {1, {"receives_eager"}}, [SEVERAL] = {1, {"receives_several"}}};
    int count = 0;
    for (int i = 0; i < 2; i++) if (by[path].counters[i]) count -= (int)more.counter(by[path].counters[i]);
    for (int i = 0; i < messages; i++) message(path, -1, "", i);
    for (int i = 0; i < 2; i++) if (by[path].counters[i]) count += (int)more.counter(by[path].counters[i]);
    OK(MPI_Bcast(&count, 1, MPI_INT, by[path].rank, MPI_COMM_WORLD));
    return count;
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
    handled++;
    handled_code = *code;
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
        OK(MPI_Send(a.p, bytes, MPI_BYTE, at(1), 1, comm));
        OK(MPI_Recv(b.p, bytes, MPI_BYTE, at(1), 2, comm, MPI_STATUS_IGNORE));
        BYTES_CHECK(DEVICE, b.p, bytes, 2);
        OK(MPI_Barrier(MPI_COMM_WORLD));
    } else {
        char plan[80];
        MPI_Request r, in;
        MPI_Status s;
        buf_fill(b, 2);
        OK(MPI_Isend(b.p, bytes, MPI_BYTE, at(0), 2, comm, &r));
        snprintf(plan, sizeof plan, "cuMemcpyAsync:1+=%d", code);
        CHECK(more.plan(plan) == 0, "a plan of errors");
        OK(MPI_Irecv(a.p, bytes, MPI_BYTE, at(0), 1, comm, &in));
        int rc = MPI_Waitall(1, &in, &s);
        CHECK(rc == MPI_ERR_IN_STATUS && handled == 1, "code %d, %d calls of the handler", rc, handled);
        CHECK(s.MPI_ERROR == handled_code, "%d in the status, the handler got %d", s.MPI_ERROR, handled_code);
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
    OK(MPI_Comm_split(MPI_COMM_WORLD, 0, -me, &comm));
    OK(MPI_Comm_create_errhandler(on_error, &handler));
    OK(MPI_Comm_set_errhandler(comm, handler));
    int cases = 0;
    for (int i = 0; i < 3; i++) message(DIRECT, -1, "", i);
    if (!strcmp(argv[1], "handler")) { handler_that_waits(code); cases = 1; }
    else for (int path = 0; path < PATH_COUNT; path++) {
        if (!selected(path_name[path], argc - 2, argv + 2)) continue;
        cases++;
        // The first one of a stream from host memory goes natively, and a sender that is late may be waited for.
        int count = 0;
        for (int tries = 0; tries < 5 && count < 2; tries++) count = taken(path, 3);
        CHECK(count >= 2, "%d of 3 messages without faults took the path %s", count, path_name[path]);
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
