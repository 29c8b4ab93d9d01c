// Driver calls that fail, one after the other: each message arrives as it was sent, or the error handler is called.
//
//   faults once CODE PATH...       the Nth driver call (of FUNCTION, or of any) fails once, for every N that a transfer reaches, on
//                                  the sender's side and on the receiver's; with SAMPLE=K one in K of them, by SEED
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

enum path { DIRECT, HOST_RING, DEVICE_TO_HOST, HOST_TO_DEVICE, VALUE, EAGER, EAGER_LATE, EAGER_TO_HOST, HOSTED, SELF, SEVERAL, ONE, PUSH,
    INVITED, GPU_RING, PATH_COUNT };
static const char *const path_name[] = {"direct", "host_ring", "device_to_host", "host_to_device", "value", "eager", "eager_late",
    "eager_to_host", "hosted", "self", "several", "one", "push", "invited", "gpu_ring"};
static const size_t path_bytes[] = {300001, 150001, 150001, 300001, 40000, 9001, 9001, 9001, 12001, 300001, 8000011, 4000011, 2200003,
    300001, 5000001};

static MPI_Comm comm; // the ranks of MPI_COMM_WORLD in reverse: what is said names those
static int at(int rank) { return ranks - 1 - rank; }
static int handled, handled_code, device_number, arrived, lost, positions;
static int from_host(enum path path) { return path == HOST_TO_DEVICE || path == HOSTED; }
static int to_host(enum path path) { return path == DEVICE_TO_HOST || path == EAGER_TO_HOST; }

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

// A rank that awaits a message, and the word of its sender's whether that was sent at all.
struct awaited {
    MPI_Request request, word;
    int rc, sent, is_known, is_over, is_cancelled, patience;
    MPI_Status status;
};

static void await_from(struct awaited *a, buf b, int from) {
    *a = (struct awaited){.patience = 2000};
    OK(MPI_Irecv(&a->sent, 1, MPI_INT, from, 8, MPI_COMM_WORLD, &a->word));
    a->rc = MPI_Irecv(b.p, b.bytes, MPI_BYTE, at(from), 7, comm, &a->request);
    a->is_over = a->rc != MPI_SUCCESS;
}

// Looks after it. What was never sent is cancelled after a while.
static int has_come(struct awaited *a) {
    if (!a->is_known) OK(MPI_Test(&a->word, &a->is_known, MPI_STATUS_IGNORE));
    if (!a->is_over) {
        a->rc = MPI_Test(&a->request, &a->is_over, &a->status);
        if (a->rc != MPI_SUCCESS) a->is_over = 1;
    }
    if (!a->is_over && a->is_known && a->sent != MPI_SUCCESS && --a->patience == 0) {
        OK(MPI_Cancel(&a->request));
        a->rc = MPI_Wait(&a->request, &a->status);
        OK(MPI_Test_cancelled(&a->status, &a->is_cancelled));
        a->is_over = 1;
    }
    return a->is_over && a->is_known;
}

static buf room(size_t bytes, size_t offset, size_t unit) {
    buf b = {.bytes = bytes, .kind = DEVICE, .lead = GUARD + offset};
    CUdeviceptr block;
    b.total = (b.lead + bytes + GUARD + unit - 1) / unit * unit;
    CU(cu.alloc(&block, b.total));
    b.base = (unsigned char *)(uintptr_t)block;
    b.p = b.base + b.lead;
    buf_poison(b);
    return b;
}

static void note_ends(int failures, int code) {
    CHECK(handled == failures, "%d of the operations failed, the handler was called %d times", failures, handled);
    CHECK(!failures || handled_code == code || failures > 1, "code %d, the handler was called with %d", code, handled_code);
    lost += failures;
}

// Each rank sends to the other, or (`is_self`) one to itself, with errors planned on one side.
static const char *exchange(enum path path, int side, const char *plan, uint64_t seed) {
    CUcontext own = NULL, current = NULL;
    CU(more.create(&own, 0, device_number));
    CU(cu.set_current(own));
    int is_self = path == SELF;
    int other = is_self ? me : 1 - me;
    // What is pushed needs a buffer of whole pages.
    buf out = room(path_bytes[path], seed % 13, 1), in = room(path_bytes[path], seed % 7, 64 << 10);
    buf_fill(out, seed + me);
    barrier();
    if (path == INVITED) {
        // What a rank has told the other by MPI alone is nothing of the stream: a message of that comes before the one that is invited.
        MPI_Status s;
        OK(MPI_Sendrecv(out.p, out.bytes, MPI_BYTE, at(other), 7, in.p, in.bytes, MPI_BYTE, at(other), 7, comm, &s));
        BUF_CHECK(in, seed + other, in.bytes);
        buf_poison(in);
    }
    handled = 0;
    const char *hit = NULL;
    if (me == side) CHECK(more.plan(plan) == 0, "a plan of errors");
    if (!is_self || me == 0) {
        struct awaited a;
        MPI_Request request = MPI_REQUEST_NULL;
        await_from(&a, in, other);
        // Each is told of the other's receive before it sends.
        if (path == INVITED) barrier();
        int rc = MPI_Isend(out.p, out.bytes, MPI_BYTE, at(other), 7, comm, &request), is_sent = rc != MPI_SUCCESS, is_told = 0;
        while (!has_come(&a) || !is_told) {
            if (!is_sent) {
                rc = MPI_Test(&request, &is_sent, MPI_STATUS_IGNORE);
                if (rc != MPI_SUCCESS) is_sent = 1;
            }
            if (is_sent && !is_told) { OK(MPI_Send(&rc, 1, MPI_INT, other, 8, MPI_COMM_WORLD)); is_told = 1; }
        }
        if (me == side) hit = more.hit();
        if (me == side) CHECK(more.plan(NULL) == 0, "no more errors");
        note_ends((rc != MPI_SUCCESS) + (a.rc != MPI_SUCCESS), rc != MPI_SUCCESS ? rc : a.rc);
        if (a.rc == MPI_SUCCESS && !a.is_cancelled) {
            STATUS_CHECK(&a.status, at(other), 7, in.bytes);
            BUF_CHECK(in, seed + other, in.bytes);
            arrived++;
        }
        BUF_CHECK(out, seed + me, out.bytes);
    }
    CU(cu.get_current(&current));
    CHECK(current == own, "another context is current");
    buf_free(out);
    buf_free(in);
    CU(more.destroy(own));
    CU(cu.set_current(context));
    barrier();
    return hit;
}

// Sends one message, with errors planned on one side. Returns the function that was hit, if any.
static const char *message(enum path path, int side, const char *plan, uint64_t seed) {
    if (path == PUSH || path == SELF || path == INVITED) return exchange(path, side, plan, seed);
    int on_device = me == 0 ? !from_host(path) : !to_host(path);
    CUcontext own = NULL, current = NULL;
    // Staging on the GPU is in the context in which it was first wanted.
    int is_fresh = on_device && path != GPU_RING;
    if (is_fresh) {
        CU(more.create(&own, 0, device_number));
        CU(cu.set_current(own));
    } else own = context;
    buf b = {.bytes = path_bytes[path], .kind = on_device, .lead = GUARD + seed % 13};
    int is_in_runs = path == VALUE && me == 0;
    b.total = b.lead + b.bytes * (is_in_runs ? STRIDE / RUN : 1) + GUARD;
    CUdeviceptr block = 0;
    if (!on_device) b.base = scratch(b.total);
    else {
        // What comes from a pool cannot be exported.
        if (path == HOST_RING || path == GPU_RING) { CU(more.pool(&block, b.total, NULL)); CU(cu.synchronize()); }
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
    int rc, is_cancelled = 0;
    if (me == side) CHECK(more.plan(plan) == 0, "a plan of errors");
    if (me == 0) {
        rc = MPI_Send(b.p, count, type, at(1), 7, comm);
        OK(MPI_Send(&rc, 1, MPI_INT, 1, 8, MPI_COMM_WORLD));
    } else {
        struct awaited a;
        if (path == EAGER_LATE) usleep(3000);
        await_from(&a, b, 0);
        while (!has_come(&a)) {}
        rc = a.rc;
        is_cancelled = a.is_cancelled;
        if (rc == MPI_SUCCESS && !is_cancelled) STATUS_CHECK(&a.status, at(0), 7, b.bytes);
    }
    const char *hit = me == side ? more.hit() : NULL;
    if (me == side) CHECK(more.plan(NULL) == 0, "no more errors");
    note_ends(rc != MPI_SUCCESS, rc);
    if (rc == MPI_SUCCESS) {
        if (me == 1 && !is_cancelled) { BUF_CHECK(b, seed, b.bytes); arrived++; }
        if (is_in_runs) in_runs(b, seed, 1);
        else if (me == 0) BUF_CHECK(b, seed, b.bytes); // nothing was written to the sender's
    }
    if (on_device) {
        CU(cu.get_current(&current));
        CHECK(current == own, "another context is current");
        if (path == HOST_RING || path == GPU_RING) CU(more.pool_free(block, NULL)); else CU(cu.release(block));
        if (is_fresh) CU(more.destroy(own));
        CU(cu.set_current(context));
    } else free(b.base);
    if (type != MPI_BYTE) OK(MPI_Type_free(&type));
    barrier();
    return hit;
}

// What both ranks have counted of things that went wrong; in `told`, of those that the user is told of.
static unsigned long long noted(unsigned long long *told) {
    static const char *const names[] = {"driver_retries", "graphs_failed", "fallback_not_exportable", "fallback_no_context", "retries",
        "paths_abandoned", "one_owner_failed", "fallback_mapping_failed", "fallback_driver_error", "fallback_out_of_memory", "staging_refused", "errors"};
    enum { COUNT = sizeof names / sizeof *names, TOLD = 4 };
    unsigned long long sums[2] = {0}, all[2];
    for (size_t i = 0; i < COUNT; i++) sums[i >= TOLD] += more.counter(names[i]);
    OK(MPI_Allreduce(sums, all, 2, MPI_UNSIGNED_LONG_LONG, MPI_SUM, MPI_COMM_WORLD));
    *told = all[1];
    return all[0] + all[1];
}

// How many of so many messages without faults took the path. What a receiver may do in time for the sender or not is either.
static int taken(enum path path, int messages) {
    static const struct { int rank; const char *counters[2]; } by[] = {
        [DIRECT] = {1, {"receives_direct"}}, [HOST_RING] = {1, {"receives_host_pipeline"}}, [DEVICE_TO_HOST] = {1, {"receives_host_pipeline"}},
        [HOST_TO_DEVICE] = {1, {"receives_host_pipeline"}}, [VALUE] = {0, {"sends_bcopy"}},
        [EAGER] = {1, {"receives_eager", "receives_direct"}}, [EAGER_LATE] = {1, {"receives_eager"}},
        [EAGER_TO_HOST] = {1, {"receives_eager", "receives_host_pipeline"}}, [HOSTED] = {1, {"receives_eager"}}, [SELF] = {0, {"receives_self"}},
        [SEVERAL] = {1, {"receives_multipath"}}, [ONE] = {1, {"receives_multipath"}}, [PUSH] = {1, {"multipath_put_bytes"}},
        [INVITED] = {1, {"receives_put_early"}}, [GPU_RING] = {1, {"receives_gpu_pipeline"}}};
    int count = 0;
    for (int i = 0; i < 2; i++) if (by[path].counters[i]) count -= (int)more.counter(by[path].counters[i]);
    for (int i = 0; i < messages; i++) message(path, -1, "", i);
    for (int i = 0; i < 2; i++) if (by[path].counters[i]) count += (int)more.counter(by[path].counters[i]);
    OK(MPI_Bcast(&count, 1, MPI_INT, by[path].rank, MPI_COMM_WORLD));
    return count;
}

// Whether so many of some messages without faults take the path: on busy cores not all do.
static int is_taken(enum path path, int count, int tries) {
    while (tries--) if (taken(path, count + 1) >= count) return 1;
    return 0;
}

// Calls by which a rank asks how far copies are, and those around them by which it enters contexts and leaves them.
static int is_question(const char *function) {
    static const char *const names[] = {"cuEventQuery", "cuStreamQuery", "cuThreadExchangeStreamCaptureMode", "cuCtxGetId", "cuCtxGetCurrent",
                                        "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) if (!strcmp(function, names[i])) return 1;
    return 0;
}

static void once(enum path path, int side, int code, int first, int last) {
    static char name[200], plan[120];
    const char *function = getenv("FUNCTION") ? getenv("FUNCTION") : "*";
    uint64_t random = number_from("SEED", 1) * 0x9e3779b97f4a7c15u | 1;
    int sample = number_from("SAMPLE", 1), questions = 0, skipped = 0;
    // How often a message asks whether its copies are done is not always the same.
    for (int at = first, misses = 0; misses < (sample > 1 ? 2 : 8) && at <= last;) {
        snprintf(plan, sizeof plan, "%s:%d=%d", function, at, code);
        snprintf(name, sizeof name, "%s, call %d of rank %d fails", path_name[path], at, side);
        running = name;
        int before = lost;
        unsigned long long told_before, told, noted_before = noted(&told_before);
        const char *hit = message(path, side, plan, at + 1000 * path);
        if (me == side && hit && number_from("VERBOSE", 0)) fprintf(stderr, "%s: %s%s\n", name, hit, lost > before ? " LOST" : "");
        int is_noted = noted(&told) != noted_before;
        if (me == side && hit && !is_noted) fprintf(stderr, "uncounted: %s on %s\n", hit, path_name[path]);
        if (me == side && hit && told != told_before) fprintf(stderr, "to be told: %s on %s\n", hit, path_name[path]);
        int found[2] = {hit != NULL, hit && is_question(hit)};
        OK(MPI_Bcast(found, 2, MPI_INT, side, MPI_COMM_WORLD));
        misses = found[0] ? 0 : misses + 1;
        positions += found[0];
        questions = found[1] ? questions + 1 : 0;
        // After a push has failed there is no other.
        if (told != told_before || (path == INVITED && is_noted)) {
            // What failed once is forgiven, after some messages. Where it is not, the rest is for another process.
            if (path == ONE) for (int i = 0; i < 8; i++) message(path, -1, "", i);
            if ((path == SEVERAL || path == PUSH || path == INVITED) && !is_taken(path, 1, 5)) {
                if (me == 0) fprintf(stderr, "go on with call %d\n", at + 1);
                return;
            }
        }
        // Of what is asked again and again a part is enough: the calls before something else has been done come at another place
        // each time.
        enum { QUESTIONS = 24, SKIPPED = 16, AROUND = 5 };
        if (sample > 1) at += 1 + next_random(&random) % (2 * sample - 1);
        else if (questions > QUESTIONS) at += skipped = 1 + next_random(&random) % SKIPPED;
        else if (found[0] && !found[1] && skipped > AROUND) at -= AROUND, skipped = 0;
        else at++;
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
    // Not before: this rank may have to bring the message, and all its copies failed until now.
    OK(MPI_Send(NULL, 0, MPI_BYTE, 0, 3, MPI_COMM_WORLD));
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
        OK(MPI_Recv(NULL, 0, MPI_BYTE, 1, 3, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
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
        // The first one of a stream from host memory goes natively, and a sender that is late is not waited for.
        CHECK(is_taken(path, 2, 40), "messages without faults do not take the path %s", path_name[path]);
        for (int side = 0; side < 2; side++) {
            // A message to oneself has one side, and in an exchange each rank is both.
            if (side > 0 && (path == SELF || path == PUSH || path == INVITED)) continue;
            if (side != number_from("SIDE", side)) continue;
            if (is_once) once(path, side, code, number_from("FIRST", 1), number_from("LAST", 1 << 30));
            else lasting(path, side, code);
        }
    }
    CHECK(cases > 0, "no such path");
    fprintf(stderr, "rank %d: %d positions, %d arrived, %d lost\n", me, positions, arrived, lost);
    OK(MPI_Errhandler_free(&handler));
    OK(MPI_Comm_free(&comm));
    return finish(cases);
}
