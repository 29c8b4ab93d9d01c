// What a program may ask through include/anabranch.h: names, counters, and what became of each message, on both sides.
// Without the library (WITH_PRELOAD=0) every question has the answer for a library that is not there.
#include <fcntl.h>
#include <signal.h>
#include "sim.h"
#include "../../include/anabranch.h"

enum { LARGE = 1 << 20, SMALL = 3000, TINY = 10, TAG = 9 };

static CUresult (*pool_alloc)(CUdeviceptr *, size_t, void *);
static CUresult (*pool_free)(CUdeviceptr, void *);

static uint64_t counter(const char *name) { return ANABRANCH_CALL(UINT64_MAX, anabranch_counter, name); }

static int last(anabranch_message *m) {
    memset(m, 0xee, sizeof *m);
    return ANABRANCH_CALL(0, anabranch_last, m, sizeof *m);
}
static int ask(MPI_Request *r, anabranch_message *m) {
    memset(m, 0xee, sizeof *m);
    return ANABRANCH_CALL(0, anabranch_request, r, m, sizeof *m);
}

// The message that this thread has completed last: once told, it is told no more.
static void told_at(const char *file, int line, int is_send, int path, size_t bytes, const char *reason) {
    anabranch_message m;
    int known = last(&m);
    if (!with_preload) { if (known) fail(file, line, "known without the library"); return; }
    if (!known) fail(file, line, "nothing is known of the last message");
    const char *name = ANABRANCH_CALL("", anabranch_path_name, m.path);
    if (m.is_send != is_send || m.path != path || m.bytes != bytes || !m.is_complete || m.is_taken != (path >= ANABRANCH_DIRECT))
        fail(file, line, "send %d (not %d), path %d %s (not %d), %llu bytes (not %zu), complete %d, taken %d", m.is_send, is_send,
             m.path, name, path, (unsigned long long)m.bytes, bytes, m.is_complete, m.is_taken);
    for (int i = 0; i < ANABRANCH_PATHS; i++)
        if (m.bytes_by_path[i] != (i == path ? bytes : 0)) fail(file, line, "%llu bytes by path %d", (unsigned long long)m.bytes_by_path[i], i);
    if (!m.reason != !reason || (reason && strcmp(m.reason, reason)))
        fail(file, line, "reason %s, not %s", m.reason ? m.reason : "none", reason ? reason : "none");
    if (last(&m)) fail(file, line, "told twice");
}
#define TOLD(is_send, path, bytes, reason) told_at(__FILE__, __LINE__, is_send, path, bytes, reason)

// A request that is not complete.
static void pending_at(const char *file, int line, MPI_Request *r, int is_send, size_t bytes) {
    anabranch_message m;
    int known = ask(r, &m);
    if (known != with_preload) fail(file, line, "known: %d", known);
    if (known && (m.is_send != is_send || m.path != ANABRANCH_UNKNOWN || m.is_complete || m.is_taken || m.bytes != bytes))
        fail(file, line, "send %d, path %d, complete %d, taken %d, %llu bytes", m.is_send, m.path, m.is_complete, m.is_taken,
             (unsigned long long)m.bytes);
}
#define PENDING(r, is_send, bytes) pending_at(__FILE__, __LINE__, r, is_send, bytes)

static void names(void) {
    if (!with_preload) {
        CHECK(!ANABRANCH_FUNCTION(anabranch_version), "a library that is not there has a version");
        EQUAL(counter("sends_device"), UINT64_MAX);
        return;
    }
    const char *(*the_counter_name)(unsigned) = ANABRANCH_FUNCTION(anabranch_counter_name);
    const char *(*the_counter_text)(const char *) = ANABRANCH_FUNCTION(anabranch_counter_text);
    const char *(*the_reason_name)(unsigned) = ANABRANCH_FUNCTION(anabranch_reason_name);
    const char *(*the_path_name)(int) = ANABRANCH_FUNCTION(anabranch_path_name);
    CHECK(!strcmp(ANABRANCH_CALL("", anabranch_version), "0.1.0"), "version");
    int counters = 0, fallbacks = 0, reasons = 0;
    const char *name;
    for (; (name = the_counter_name(counters)); counters++) {
        CHECK(counter(name) != UINT64_MAX, "%s", name);
        CHECK(the_counter_text(name) && *the_counter_text(name), "%s has no text", name);
        fallbacks += !strncmp(name, "fallback_", 9);
    }
    for (; (name = the_reason_name(reasons)); reasons++) {
        char both[100];
        snprintf(both, sizeof both, "fallback_%s", name);
        CHECK(counter(both) != UINT64_MAX, "%s", both);
    }
    CHECK(reasons > 10 && fallbacks == 2 * reasons && counters > fallbacks + 20, "%d counters, %d reasons", counters, reasons);
    CHECK(!strcmp(the_counter_text("fallback_buffered"), "a buffered send"), "text");
    CHECK(counter("no_such") == UINT64_MAX && !the_counter_text("no_such") && counter(NULL) == UINT64_MAX, "no such counter");
    static const char *const paths[] = {"unknown", "native", "bcopy", "direct", "self", "host_pipeline", "eager", "multipath", "relay", "gpu_pipeline"};
    for (int i = 0; i < 10; i++) CHECK(!strcmp(the_path_name(i), paths[i]), "path %d", i);
    CHECK(!the_path_name(10) && !the_path_name(-1), "no such path");
}

static void warm_up(void) {
    for (int i = 0; i < 2; i++) {
        buf b = buf_new(DEVICE, 1, 0);
        OK(MPI_Sendrecv_replace(b.p, 1, MPI_BYTE, peer, 0, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        buf_free(b);
        barrier();
    }
    anabranch_message m;
    last(&m);
}

// Non-blocking: the request is asked before its other side has come, and after.
static void direct(void) {
    buf b = buf_new(DEVICE, LARGE, 3);
    MPI_Request r, null = MPI_REQUEST_NULL;
    anabranch_message m;
    uint64_t before = counter("receives_direct");
    if (me == 0) {
        buf_fill(b, 1);
        OK(MPI_Issend(b.p, LARGE, MPI_BYTE, 1, TAG, MPI_COMM_WORLD, &r));
        PENDING(&r, 1, LARGE);
        barrier();
        OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
        TOLD(1, ANABRANCH_DIRECT, LARGE, NULL);
        buf_fill(b, 2);
        barrier();
        OK(MPI_Isend(b.p, LARGE, MPI_BYTE, 1, TAG, MPI_COMM_WORLD, &r));
        OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
    } else {
        barrier();
        OK(MPI_Irecv(b.p, LARGE, MPI_BYTE, 0, TAG, MPI_COMM_WORLD, &r));
        OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
        TOLD(0, ANABRANCH_DIRECT, LARGE, NULL);
        BUF_CHECK(b, 1, LARGE);
        OK(MPI_Irecv(b.p, LARGE, MPI_BYTE, 0, TAG, MPI_COMM_WORLD, &r));
        PENDING(&r, 0, 0);
        barrier();
        OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
        TOLD(0, ANABRANCH_DIRECT, LARGE, NULL);
        BUF_CHECK(b, 2, LARGE);
        if (with_preload) EQUAL(counter("receives_direct"), before + 2);
    }
    EQUAL(ask(&r, &m), 0);
    EQUAL(ask(&null, &m), 0);
    EQUAL(ANABRANCH_CALL(0, anabranch_request, NULL, &m, sizeof m), 0);
    buf_free(b);
}

static void eager(void) {
    buf b = buf_new(DEVICE, SMALL, 3);
    if (me == 0) {
        OK(MPI_Send(b.p, SMALL, MPI_BYTE, 1, TAG, MPI_COMM_WORLD));
        TOLD(1, ANABRANCH_EAGER, SMALL, NULL);
        barrier();
    } else {
        barrier();
        OK(MPI_Recv(b.p, SMALL, MPI_BYTE, 0, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        TOLD(0, ANABRANCH_EAGER, SMALL, NULL);
    }
    buf_free(b);
}

static void by_value(void) {
    buf b = buf_new(DEVICE, SMALL, 3);
    static char attached[SMALL + 4096];
    void *detached;
    int size;
    if (me == 0) {
        OK(MPI_Buffer_attach(attached, sizeof attached));
        OK(MPI_Bsend(b.p, SMALL, MPI_BYTE, 1, TAG, MPI_COMM_WORLD));
        TOLD(1, ANABRANCH_VALUE, SMALL, "buffered");
        OK(MPI_Buffer_detach(&detached, &size));
    } else {
        OK(MPI_Recv(b.p, SMALL, MPI_BYTE, 0, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        TOLD(0, ANABRANCH_VALUE, SMALL, NULL);
    }
    buf_free(b);
}

static void to_self(void) {
    buf a = buf_new(DEVICE, LARGE, 3), b = buf_new(DEVICE, LARGE, 5);
    MPI_Request r;
    anabranch_message m;
    OK(MPI_Irecv(b.p, LARGE, MPI_BYTE, me, TAG, MPI_COMM_WORLD, &r));
    OK(MPI_Ssend(a.p, LARGE, MPI_BYTE, me, TAG, MPI_COMM_WORLD));
    TOLD(1, ANABRANCH_SELF, LARGE, NULL);
    // The receive is not complete towards the program, though its path is known.
    EQUAL(ask(&r, &m), with_preload);
    if (with_preload) CHECK(m.path == ANABRANCH_SELF && m.is_taken && !m.is_complete && m.bytes == LARGE, "path %d", m.path);
    OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
    TOLD(0, ANABRANCH_SELF, LARGE, NULL);
    buf_free(a);
    buf_free(b);
}

// Pool memory cannot be exported: it goes through memory of the sender's GPU. A receive into host memory has no direct path either,
// for no reason but that.
static void host_ring(void) {
    *(void **)&pool_alloc = dlsym(cu.library, "cuMemAllocAsync");
    *(void **)&pool_free = dlsym(cu.library, "cuMemFreeAsync");
    CUdeviceptr pool;
    buf b = buf_new(DEVICE, LARGE, 0), h = buf_new(HOST, LARGE, 0);
    if (me == 0) {
        CU(pool_alloc(&pool, LARGE, NULL));
        CU(cu.synchronize());
        OK(MPI_Send((void *)(uintptr_t)pool, LARGE, MPI_BYTE, 1, TAG, MPI_COMM_WORLD));
        TOLD(1, ANABRANCH_GPU_PIPELINE, LARGE, "not_exportable");
        CU(pool_free(pool, NULL));
        OK(MPI_Send(b.p, LARGE, MPI_BYTE, 1, TAG, MPI_COMM_WORLD));
        TOLD(1, ANABRANCH_HOST_RING, LARGE, NULL);
    } else {
        OK(MPI_Recv(b.p, LARGE, MPI_BYTE, 0, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        TOLD(0, ANABRANCH_GPU_PIPELINE, LARGE, "not_exportable");
        OK(MPI_Recv(h.p, LARGE, MPI_BYTE, 0, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        TOLD(0, ANABRANCH_HOST_RING, LARGE, NULL);
    }
    buf_free(b);
    buf_free(h);
}

// What the MPI library does by itself.
static void host(void) {
    buf h = buf_new(HOST, LARGE, 0);
    MPI_Request r;
    anabranch_message m;
    if (me == 0) {
        OK(MPI_Send(h.p, LARGE, MPI_BYTE, 1, TAG, MPI_COMM_WORLD));
        EQUAL(last(&m), 0);
        OK(MPI_Isend(h.p, LARGE, MPI_BYTE, 1, TAG, MPI_COMM_WORLD, &r));
        EQUAL(ask(&r, &m), 0);
        OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
        EQUAL(last(&m), 0);
    } else {
        for (int i = 0; i < 2; i++) {
            OK(MPI_Recv(h.p, LARGE, MPI_BYTE, 0, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            // The library has looked whether it is one of its own.
            if (last(&m)) CHECK(m.path == ANABRANCH_NATIVE && !m.is_taken && m.bytes == LARGE && !m.is_send, "path %d", m.path);
        }
    }
    buf_free(h);
}

// A persistent request is known while it is inactive; a call that sends and receives tells of the receive. A program that
// was built with a shorter structure gets no more than that.
static void persistent(void) {
    buf a = buf_new(DEVICE, LARGE, 1), b = buf_new(DEVICE, LARGE, 3);
    MPI_Request r;
    anabranch_message m;
    OK(MPI_Ssend_init(a.p, LARGE, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, &r));
    EQUAL(ask(&r, &m), with_preload);
    if (with_preload) CHECK(m.is_send && m.path == ANABRANCH_UNKNOWN && !m.is_complete, "path %d", m.path);
    OK(MPI_Start(&r));
    PENDING(&r, 1, LARGE);
    OK(MPI_Recv(b.p, LARGE, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    TOLD(0, ANABRANCH_DIRECT, LARGE, NULL);
    OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
    TOLD(1, ANABRANCH_DIRECT, LARGE, NULL);
    OK(MPI_Request_free(&r));
    OK(MPI_Sendrecv(a.p, LARGE, MPI_BYTE, peer, TAG, b.p, LARGE, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    memset(&m, 0xee, sizeof m);
    EQUAL(ANABRANCH_CALL(0, anabranch_last, &m, offsetof(anabranch_message, is_complete)), with_preload);
    EQUAL(m.is_send, with_preload ? 0 : (int)0xeeeeeeee);
    EQUAL(m.is_complete, (int)0xeeeeeeee);
    buf_free(a);
    buf_free(b);
}

// The library stands aside only where nothing of its own is under way, and goes on afterwards, on communicators made meanwhile too.
static void aside(void) {
    if (!with_preload) { EQUAL(ANABRANCH_CALL(-7, anabranch_aside, 1), -7); return; }
    int (*stand_aside)(int) = ANABRANCH_FUNCTION(anabranch_aside);
    buf b = buf_new(DEVICE, LARGE, 3), h = buf_new(HOST, LARGE, 0);
    MPI_Request r;
    MPI_Comm comm;
    anabranch_message m;
    EQUAL(stand_aside(0), 0);
    // A receive that is posted, a persistent request that rests, and a message that nobody has received.
    OK(MPI_Irecv(b.p, SMALL, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, &r));
    CHECK(stand_aside(1) > 0, "a receive is pending");
    barrier();
    OK(MPI_Ssend(b.p, 0, MPI_BYTE, peer, TAG, MPI_COMM_WORLD));
    OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
    OK(MPI_Ssend_init(b.p, LARGE, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, &r));
    CHECK(stand_aside(1) > 0, "a persistent request is there");
    OK(MPI_Request_free(&r));
    if (me == 0) {
        OK(MPI_Send(b.p, SMALL, MPI_BYTE, 1, TAG, MPI_COMM_WORLD));
        CHECK(stand_aside(1) > 0, "a message has not been received");
    }
    barrier();
    if (me == 1) OK(MPI_Recv(b.p, SMALL, MPI_BYTE, 0, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    barrier();
    EQUAL(stand_aside(1), 0);
    EQUAL(stand_aside(1), 0);
    last(&m);
    OK(MPI_Comm_dup(MPI_COMM_WORLD, &comm));
    for (int i = 0; i < 3; i++) {
        buf_fill(h, 10 * i + me);
        OK(MPI_Sendrecv_replace(h.p, LARGE, MPI_BYTE, peer, TAG, peer, TAG, comm, MPI_STATUS_IGNORE));
        BUF_CHECK(h, 10 * i + peer, LARGE);
        EQUAL(last(&m), 0);
    }
    barrier();
    EQUAL(stand_aside(0), 0);
    barrier();
    if (me == 0) {
        buf_fill(b, 5);
        OK(MPI_Ssend(b.p, LARGE, MPI_BYTE, 1, TAG, comm));
        TOLD(1, ANABRANCH_DIRECT, LARGE, NULL);
    } else {
        OK(MPI_Recv(b.p, LARGE, MPI_BYTE, 0, TAG, comm, MPI_STATUS_IGNORE));
        TOLD(0, ANABRANCH_DIRECT, LARGE, NULL);
        BUF_CHECK(b, 5, LARGE);
    }
    OK(MPI_Comm_free(&comm));
    buf_free(b);
    buf_free(h);
}

// Fewer paths may be chosen than the library was started with, and those again; what is no list changes nothing.
static void paths(void) {
    if (!with_preload) { EQUAL(ANABRANCH_CALL(-7, anabranch_paths, "direct"), -7); return; }
    int (*choose)(const char *) = ANABRANCH_FUNCTION(anabranch_paths);
    const char *all = getenv("ANABRANCH_PATHS");
    EQUAL(choose(NULL), 0);
    EQUAL(choose("direct"), 0);
    EQUAL(choose("direct, HOST"), all && !strstr(all, "host") ? -1 : 0);
    EQUAL(choose("relay,direct"), all && !strstr(all, "relay") ? -1 : 0);
    EQUAL(choose("nvlink"), -1);
    EQUAL(choose(""), -1);
    EQUAL(choose(NULL), 0);
}

// The clock of the simulated node is the one that its driver shows; elsewhere there is none.
static void simulated_clock(void) {
    uint64_t (*own)(void);
    *(void **)&own = dlsym(cu.library, "simcuda_clock_ns");
    if (!own || !with_preload) { CHECK(ANABRANCH_CALL(UINT64_MAX, anabranch_simulated_ns) == UINT64_MAX, "no node is simulated"); return; }
    buf a = buf_new(DEVICE, LARGE, 1), b = buf_new(DEVICE, LARGE, 3);
    uint64_t before = own(), begun = ANABRANCH_CALL(UINT64_MAX, anabranch_simulated_ns);
    OK(MPI_Sendrecv(a.p, LARGE, MPI_BYTE, peer, TAG, b.p, LARGE, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    uint64_t ended = ANABRANCH_CALL(UINT64_MAX, anabranch_simulated_ns), after = own();
    CHECK(before <= begun && ended <= after, "%llu, %llu to %llu, %llu", (unsigned long long)before, (unsigned long long)begun,
          (unsigned long long)ended, (unsigned long long)after);
    // No node that is simulated carries 1000 GB/s.
    CHECK(ended - begun > LARGE / 1000, "%llu ns", (unsigned long long)(ended - begun));
    anabranch_message m;
    last(&m);
    buf_free(a);
    buf_free(b);
}

static int is_stopped(int process) {
    char path[64], text[256] = {0};
    snprintf(path, sizeof path, "/proc/%d/status", process);
    int file = open(path, O_RDONLY);
    CHECK(file >= 0 && read(file, text, sizeof text - 1) > 0, "%s cannot be read", path);
    close(file);
    return strstr(text, "State:\tT") != NULL;
}

// Of messages that are split each byte is told on the path that it took, on both sides alike, as the counters have it. The
// sender of the last one is stopped from before it is received until it has arrived: its receiver reads all of it, and it
// comes by one path in the end, but it is one that was split.
static void split(void) {
    enum { MESSAGES = 6, RELAYED = 1, HOST = 2 };
    static const char *const parts[] = {"direct", "put", "relay", "host"};
    const char *expected = getenv("SPLIT");
    if (!expected || !with_preload || me > 1) return;
    int paths = atoi(expected);
    size_t bytes = 64 << 20;
    buf b = buf_new(DEVICE, bytes + MESSAGES, 0);
    uint64_t before[4], told[ANABRANCH_PATHS] = {0}, all = 0;
    warm_up();
    for (int i = 0; i < 4; i++) {
        char name[64];
        snprintf(name, sizeof name, "multipath_%s_bytes", parts[i]);
        before[i] = counter(name);
    }
    for (int i = 0; i < MESSAGES; i++) {
        anabranch_message m, other;
        MPI_Request r;
        size_t length = bytes + i;
        int stops = i == MESSAGES - 1, sender = (int)getpid();
        OK(MPI_Bcast(&sender, 1, MPI_INT, 0, MPI_COMM_WORLD));
        if (me == 0) {
            buf_fill(b, i);
            OK(MPI_Isend(b.p, length, MPI_BYTE, 1, TAG, MPI_COMM_WORLD, &r));
            if (stops) raise(SIGSTOP);
        } else {
            while (stops && !is_stopped(sender)) usleep(1000);
            OK(MPI_Irecv(b.p, length, MPI_BYTE, 0, TAG, MPI_COMM_WORLD, &r));
        }
        OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
        if (me == 1 && stops) kill(sender, SIGCONT);
        CHECK(last(&m) && m.is_complete && m.is_taken && m.bytes == length, "path %d, %llu bytes", m.path, (unsigned long long)m.bytes);
        if (me == 1) BUF_CHECK(b, i, length);
        uint64_t sum = 0;
        for (int path = 0; path < ANABRANCH_PATHS; path++) sum += m.bytes_by_path[path];
        EQUAL(sum, length);
        EQUAL(m.bytes_by_path[ANABRANCH_SEVERAL], 0);
        OK(MPI_Sendrecv(&m, sizeof m, MPI_BYTE, peer, TAG, &other, sizeof other, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        EQUAL(m.path, other.path);
        CHECK(!memcmp(m.bytes_by_path, other.bytes_by_path, sizeof m.bytes_by_path), "both sides are told the same of message %d", i);
        last(&other);
        if (stops) EQUAL(m.bytes_by_path[ANABRANCH_DIRECT], length);
        if (m.path != ANABRANCH_SEVERAL) continue;
        all += length;
        for (int path = 0; path < ANABRANCH_PATHS; path++) told[path] += m.bytes_by_path[path];
    }
    CHECK(all >= 2 * bytes, "%llu bytes were split", (unsigned long long)all);
    CHECK(told[ANABRANCH_DIRECT] > 0, "nothing came directly");
    CHECK(!told[ANABRANCH_RELAY] == !(paths & RELAYED), "%llu bytes over other GPUs", (unsigned long long)told[ANABRANCH_RELAY]);
    CHECK(!told[ANABRANCH_HOST_RING] == !(paths & HOST), "%llu bytes through host memory", (unsigned long long)told[ANABRANCH_HOST_RING]);
    EQUAL(told[ANABRANCH_UNKNOWN], 0);
    if (me == 1) {
        EQUAL(counter("multipath_direct_bytes") + counter("multipath_put_bytes") - before[0] - before[1], told[ANABRANCH_DIRECT]);
        EQUAL(counter("multipath_relay_bytes") - before[2], told[ANABRANCH_RELAY]);
        EQUAL(counter("multipath_host_bytes") - before[3], told[ANABRANCH_HOST_RING]);
    }
    buf_free(b);
}

static const struct test_case cases[] = {
    {"names", names}, {"warm_up", warm_up}, {"direct", direct}, {"eager", eager}, {"by_value", by_value}, {"to_self", to_self},
    {"host_ring", host_ring}, {"host", host}, {"persistent", persistent}, {"aside", aside},
    {"paths", paths}, {"split", split}, {"simulated_clock", simulated_clock}, {0},
};

int main(int argc, char **argv) {
    anabranch_message m;
    if (last(&m)) return 9; // before MPI_Init
    if (ANABRANCH_CALL(-1, anabranch_paths, NULL) != -1) return 8;
    if (ANABRANCH_CALL(UINT64_MAX, anabranch_simulated_ns) != UINT64_MAX) return 7; // no driver is loaded yet
    return run_cases(argc, argv, cases, MPI_THREAD_SINGLE);
}
