// Messages of every path in both directions at once, for tests that disturb the ranks from outside.
//
//   traffic endless        until somebody ends it
//   traffic rounds N       N rounds; every message arrives as it was sent
//   traffic tolerant N     N rounds; what does not arrive as it was sent ends in an error, of which the handler is told
//   traffic survivor       until an operation ends in an error: the other rank has died
//   traffic outlived N     N rounds, then every rank ends by itself: one that takes no part may have died
//   traffic turns PLAN     in turns, so that each message is written before it is matched, until the other rank has died; PLAN is
//                          what rank 0 does in driver calls while it sends the last one
//   traffic forged THEN    messages to rank 1, until it has claimed one that somebody else has written to rank 0's slot: then rank 0
//                          sends two more (THEN is send), or dies (kill)
//   traffic again          a message that is sent eagerly: then there is a file $SCRATCH/sent, and when there is a file
//                          $SCRATCH/written, it is received
//
// With $BYTES all messages are as long, between plain device buffers; with $WINDOW so many of them are under way each way.
// Ranks beyond the first two use their device once and send nothing from then on.
#include "transfer.h"
#include <errno.h>
#include <signal.h>

enum { WINDOW = 6, LARGEST = 3000001 };
static const size_t sizes[] = {9001, 70001, 300001, LARGEST, 4096, 1000003};

static CUresult (*from_pool)(CUdeviceptr *, size_t, void *);
static MPI_Comm comm;
static int handled, named, errors, good;
static size_t fixed_bytes;
static int window;

static void on_error(MPI_Comm *c, int *code, ...) {
    (void)c;
    char text[MPI_MAX_ERROR_STRING];
    char who[2][40];
    int length = 0, class = -1;
    if (MPI_Error_string(*code, text, &length) != MPI_SUCCESS || length < 5) FAIL("an error without a text");
    OK(MPI_Error_class(*code, &class));
    snprintf(who[0], sizeof who[0], "to rank %d, ", peer);
    snprintf(who[1], sizeof who[1], "from rank %d, ", peer);
    int is_named = strstr(text, "anabranch: message ") == text && (strstr(text, who[0]) || strstr(text, who[1]));
    // Of a rank that has died the MPI library itself may hear first.
    if (class == MPI_ERR_OTHER) CHECK(is_named && strstr(text, " path: "), "%s", text);
    handled++;
    named += is_named;
}

// Plain device memory, memory from a pool, which cannot be exported, or the host's.
static buf block(int sort, size_t bytes) {
    buf b = {.bytes = bytes, .kind = sort == 2 ? HOST : DEVICE, .lead = GUARD};
    b.total = allocation(bytes + 2 * GUARD);
    if (sort == 2) b.base = scratch(b.total);
    else {
        CUdeviceptr p;
        if (sort == 1) { CU(from_pool(&p, b.total, NULL)); CU(cu.synchronize()); }
        else CU(cu.alloc(&p, b.total));
        b.base = (unsigned char *)(uintptr_t)p;
    }
    b.p = b.base + b.lead;
    return b;
}

static int note(int code, const char *what) {
    if (code == MPI_SUCCESS) return 0;
    errors++;
    CHECK(handled > 0, "%s failed with %d, and no handler was called", what, code);
    return 1;
}

// Both ranks send and receive a window of messages. Returns how many operations ended in an error.
static int one_round(uint64_t number, int check) {
    static buf out[WINDOW], in[WINDOW];
    MPI_Request r[2 * WINDOW];
    size_t bytes[WINDOW];
    int failed = 0;
    for (int i = 0; i < window; i++) {
        bytes[i] = fixed_bytes ? fixed_bytes : sizes[(number + i) % (sizeof sizes / sizeof *sizes)];
        if (!out[i].base) {
            out[i] = block(fixed_bytes ? 0 : i % 3, fixed_bytes ? fixed_bytes : LARGEST);
            in[i] = block(fixed_bytes ? 0 : (i / 2) % 3, fixed_bytes ? fixed_bytes : LARGEST);
        }
        if (check) {
            buf b = {.p = out[i].p, .bytes = bytes[i], .kind = out[i].kind};
            buf_fill(b, number * 100 + me * 10 + i);
            b.p = in[i].p;
            b.kind = in[i].kind;
            buf_fill(b, 1);
        }
    }
    for (int i = 0; i < window; i++) {
        r[i] = r[window + i] = MPI_REQUEST_NULL;
        failed += note(MPI_Irecv(in[i].p, bytes[i], MPI_BYTE, peer, i, comm, &r[i]), "MPI_Irecv");
    }
    for (int i = 0; i < window; i++)
        failed += note(MPI_Isend(out[i].p, bytes[i], MPI_BYTE, peer, i, comm, &r[window + i]), "MPI_Isend");
    // In any order, so that what a dead rank has not sent, which natively never ends either, keeps nobody from hearing of the rest.
    for (int i = 0; i < 2 * window && !check; i++) {
        int at;
        int code = MPI_Waitany(2 * window, r, &at, MPI_STATUS_IGNORE);
        failed += note(code, "MPI_Waitany");
        if (code != MPI_SUCCESS) return failed;
    }
    for (int i = 0; i < 2 * window && check; i++) {
        int code = MPI_Wait(&r[i], MPI_STATUS_IGNORE);
        failed += note(code, "MPI_Wait");
        if (code == MPI_SUCCESS && i < window) {
            BYTES_CHECK(in[i].kind, in[i].p, bytes[i], number * 100 + peer * 10 + i);
            good++;
        }
    }
    return failed;
}

static int (*plan_faults)(const char *);
static uint64_t (*counter)(const char *);
static int peer_pid;

// Whether the other rank has died. Its launcher may not have waited for it yet.
static int has_died(void) {
    char path[40], line[256] = "", *state;
    snprintf(path, sizeof path, "/proc/%d/stat", peer_pid);
    FILE *file = fopen(path, "r");
    if (!file) return 1;
    if (!fgets(line, sizeof line, file)) *line = 0;
    fclose(file);
    state = strrchr(line, ')');
    return !state || state[2] == 'Z' || state[2] == 'X';
}

// Waits for an operation. Once the library has found that the other rank is dead, driver calls are no more what they were planned
// to be. A receive of which nothing has come for seconds after that death is cancelled, as natively it never ends either. Returns
// whether the message has come.
static int in_turn(MPI_Request *r, int is_receive, const char *what) {
    MPI_Status s;
    for (int done = 0, patience = 3000, cancelled = 0; !done;) {
        int code = MPI_Test(r, &done, &s);
        if (note(code, what)) return 0;
        if (done && is_receive) OK(MPI_Test_cancelled(&s, &cancelled));
        if (done) return !cancelled;
        if (!has_died()) continue;
        if (counter("dead_peers") > 0) plan_faults(NULL);
        usleep(1000);
        if (is_receive && --patience == 0) OK(MPI_Cancel(r));
        CHECK(patience > -3000, "%s never ends, nor can it be cancelled", what);
    }
    return 1;
}

// Each receive is posted before its message is sent: from some on the sender is told of it.
static void turns(const char *plan) {
    enum { LAST = 12 };
    int pid = getpid(), last = -1, lost = 0, sent = 0;
    MPI_Request out_request, in_request;
    buf out = block(0, fixed_bytes), in = block(0, fixed_bytes);
    *(void **)&plan_faults = dlsym(cu.library, "simcudaFaults");
    *(void **)&counter = dlsym(RTLD_DEFAULT, "anabranch_counter");
    CHECK(fixed_bytes && plan_faults && counter, "a length, the simulated driver and the library");
    OK(MPI_Sendrecv(&pid, 1, MPI_INT, peer, 1, &peer_pid, 1, MPI_INT, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    buf_fill(in, 1);
    OK(MPI_Irecv(in.p, in.bytes, MPI_BYTE, peer, 2, comm, &in_request));
    for (int number = 0; !errors; number++) {
        for (int half = 0; half < 2 && !errors; half++) {
            if (half == me) {
                buf_fill(out, 1000 + 2 * number + me);
                if (me == 0 && number == LAST) {
                    printf("rank 0: %d invited\n", (int)counter("receives_put_early"));
                    fflush(stdout);
                    CHECK(!plan_faults(plan), "a plan");
                }
                if (note(MPI_Isend(out.p, out.bytes, MPI_BYTE, peer, 2, comm, &out_request), "MPI_Isend")) break;
                sent += in_turn(&out_request, 0, "a send");
            } else if (lost) continue;
            else if (in_turn(&in_request, 1, "a receive")) {
                BYTES_CHECK(DEVICE, in.p, in.bytes, 1000 + 2 * number + peer);
                buf_fill(in, 1);
                last = number;
                OK(MPI_Irecv(in.p, in.bytes, MPI_BYTE, peer, 2, comm, &in_request));
            } else lost++;
        }
    }
    printf("survived: message %d was the last that came, %d cancelled, %d of %d errors in the library's words, %d sent\n", last, lost, named,
           errors, sent);
    printf("rank %d: %d invited, %d dead\n", me, (int)counter("receives_put_early"), (int)counter("dead_peers"));
    fflush(stdout);
    usleep(200000); // what this rank says last is passed on
    _exit(0);
}

static void forged(const char *then) {
    enum { BEFORE = 8 };
    int pid = getpid(), is_kill = !strcmp(then, "kill"), came = 0;
    char go = 'g';
    MPI_Request r;
    buf out = block(0, fixed_bytes), in = block(0, fixed_bytes);
    *(void **)&plan_faults = dlsym(cu.library, "simcudaFaults");
    *(void **)&counter = dlsym(RTLD_DEFAULT, "anabranch_counter");
    CHECK(fixed_bytes && plan_faults && counter, "a length, the simulated driver and the library");
    OK(MPI_Sendrecv(&pid, 1, MPI_INT, peer, 1, &peer_pid, 1, MPI_INT, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    // From here on both are known to use devices.
    for (int i = 0; i < 3; i++)
        OK(MPI_Sendrecv(out.p, out.bytes, MPI_BYTE, peer, 3, in.p, in.bytes, MPI_BYTE, peer, 3, comm, MPI_STATUS_IGNORE));
    for (int number = 0; number < BEFORE + 2; number++) {
        if (me == 0) {
            if (number == BEFORE) OK(MPI_Recv(&go, 1, MPI_BYTE, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            buf_fill(out, 2000 + number);
            if (note(MPI_Isend(out.p, out.bytes, MPI_BYTE, peer, 2, comm, &r), "MPI_Isend")) continue;
            came += in_turn(&r, 0, "a send");
            continue;
        }
        int before = (int)counter("matched_early"), done = 0;
        buf_fill(in, 1);
        OK(MPI_Irecv(in.p, in.bytes, MPI_BYTE, peer, 2, comm, &r));
        if (number == BEFORE) {
            while ((int)counter("matched_early") == before) {
                OK(MPI_Test(&r, &done, MPI_STATUS_IGNORE));
                CHECK(!done, "nothing was sent");
                usleep(1000);
            }
            if (is_kill) kill(peer_pid, SIGKILL);
            else OK(MPI_Send(&go, 1, MPI_BYTE, peer, 1, MPI_COMM_WORLD));
        }
        if (in_turn(&r, 1, "a receive")) {
            BYTES_CHECK(DEVICE, in.p, in.bytes, 2000 + number);
            came++;
        } else if (is_kill) break;
    }
    CHECK(errors == 1, "%d errors", errors);
    printf("rank %d: %d came, %d errors, %d in the library's words\n", me, came, errors, named);
    fflush(stdout);
    if (!is_kill) return;
    usleep(200000); // what this rank says last is passed on
    _exit(0);
}

// The message is complete at rank 0, which uses its buffer for something else. Somebody then writes to its slot.
static void again(void) {
    char path[512];
    int came = 0;
    MPI_Request r;
    buf out = block(0, fixed_bytes), in = block(0, fixed_bytes);
    *(void **)&counter = dlsym(RTLD_DEFAULT, "anabranch_counter");
    CHECK(fixed_bytes && counter, "a length and the library");
    // From here on both are known to use devices.
    for (int i = 0; i < 3; i++)
        OK(MPI_Sendrecv(out.p, out.bytes, MPI_BYTE, peer, 3, in.p, in.bytes, MPI_BYTE, peer, 3, comm, MPI_STATUS_IGNORE));
    OK(MPI_Barrier(comm)); // the only slot with an eager message is that of the next one
    snprintf(path, sizeof path, "%s/written", getenv("SCRATCH"));
    if (me == 0) {
        buf_fill(out, 3000);
        OK(MPI_Send(out.p, out.bytes, MPI_BYTE, peer, 2, comm));
        CHECK(counter("sends_eager") > 0, "it is not sent eagerly");
        buf_fill(out, 4000);
        char sent[512];
        snprintf(sent, sizeof sent, "%s/sent", getenv("SCRATCH"));
        FILE *file = fopen(sent, "w");
        CHECK(file && !fclose(file), "%s", sent);
    }
    while (access(path, R_OK)) usleep(1000);
    if (me == 1) {
        buf_fill(in, 1);
        if (!note(MPI_Irecv(in.p, in.bytes, MPI_BYTE, peer, 2, comm, &r), "MPI_Irecv") && !note(MPI_Wait(&r, MPI_STATUS_IGNORE), "MPI_Wait")) {
            BYTES_CHECK(DEVICE, in.p, in.bytes, 3000);
            came = 1;
        }
        printf("rank 1: %d came, %d errors\n", came, errors);
        fflush(stdout);
    }
    OK(MPI_Barrier(MPI_COMM_WORLD));
}

// A rank beyond the first two: the library learns of its device.
static void use_device(void) {
    buf out = block(0, 100000), in = block(0, 100000);
    OK(MPI_Sendrecv(out.p, out.bytes, MPI_BYTE, me, 1, in.p, in.bytes, MPI_BYTE, me, 1, comm, MPI_STATUS_IGNORE));
}

// It outlives others, and says what it has taken back of theirs.
static void look_on(void) {
    uint64_t (*counter)(const char *);
    *(void **)&counter = dlsym(RTLD_DEFAULT, "anabranch_counter");
    CHECK(counter, "the library");
    for (int i = 0; i < 300 && !counter("units_reclaimed"); i++) usleep(100000);
    printf("rank %d: %d units reclaimed\n", me, (int)counter("units_reclaimed"));
    fflush(stdout);
    usleep(200000); // what this rank says last is passed on
    _exit(0);
}

int main(int argc, char **argv) {
    start(&argc, &argv, MPI_THREAD_SINGLE);
    device_start(me);
    CHECK(ranks >= 2 && argc > 1, "arguments");
    fixed_bytes = number_from("BYTES", 0);
    window = number_from("WINDOW", WINDOW);
    CHECK(window > 0 && window <= WINDOW, "a window of %d", window);
    const char *mode = argv[1];
    running = mode;
    *(void **)&from_pool = dlsym(cu.library, "cuMemAllocAsync");
    MPI_Errhandler handler;
    OK(MPI_Comm_dup(MPI_COMM_WORLD, &comm));
    int tolerant = !strcmp(mode, "tolerant"), survives = !strcmp(mode, "survivor");
    int outlived = !strcmp(mode, "outlived"), in_turns = !strcmp(mode, "turns"), is_forged = !strcmp(mode, "forged");
    int is_again = !strcmp(mode, "again");
    if (tolerant || survives || outlived || in_turns || is_forged || is_again) {
        OK(MPI_Comm_create_errhandler(on_error, &handler));
        OK(MPI_Comm_set_errhandler(comm, handler));
        OK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    }
    if (ranks > 2) {
        if (me > 1) use_device();
        OK(MPI_Barrier(comm));
        if (me > 1 && (survives || outlived)) look_on();
        if (me > 1) return finish(1);
    }
    if (!strcmp(mode, "endless")) for (uint64_t i = 0;; i++) one_round(i, 0);
    if (in_turns) turns(argc > 2 ? argv[2] : "");
    if (is_again) {
        again();
        return finish(1);
    }
    if (is_forged) {
        forged(argc > 2 ? argv[2] : "");
        return finish(1);
    }
    if (survives) {
        while (!one_round(0, 0)) {}
        printf("survived: the handler was called %d times, %d of them with the library's words\n", handled, named);
        fflush(stdout);
        usleep(200000); // what this rank says last is passed on
        _exit(0);
    }
    int rounds = argc > 2 ? atoi(argv[2]) : 10;
    for (int i = 0; i < rounds; i++) {
        int failed = one_round(i, 1);
        CHECK(tolerant || !failed, "%d operations failed", failed);
    }
    if (outlived) {
        printf("rank %d: outlived\n", me);
        fflush(stdout);
        usleep(200000); // what this rank says last is passed on
        _exit(0);
    }
    fprintf(stderr, "rank %d: %d arrived, %d errors\n", me, good, errors);
    return finish(rounds);
}
