// All ways to send against all ways to receive, over the four pairs of device and host buffers.
#include "transfer.h"

static void *attached;
static void attach(size_t bytes) { attached = scratch(bytes); OK(MPI_Buffer_attach(attached, bytes)); }
static void detach(void) { void *p; int n; OK(MPI_Buffer_detach(&p, &n)); CHECK(p == attached, "detach"); free(attached); }

// One message from the even rank to the odd one, checked to the last byte and beyond.
static void message(enum kind from, enum kind to, enum send_way out, enum receive_way in, size_t n, uint64_t seed) {
    if (!may_meet(out, in)) return;
    static char name[120];
    const char *outer = (const char *)running;
    snprintf(name, sizeof name, "%s, %s to %s, %zu bytes, pair %d%d", outer, send_way_name[out], receive_way_name[in], n, from, to);
    running = name;
    int tag = 7 + (int)(seed % 5);
    if (me % 2 == 0) {
        buf b = buf_new(from, n, seed % 13);
        buf_fill(b, seed);
        transfer_send(out, b.p, n, peer, tag, MPI_COMM_WORLD);
        BUF_CHECK(b, seed, n);
        buf_free(b);
    } else {
        buf b = buf_new(to, n, (seed + 3) % 17);
        MPI_Status s;
        memset(&s, 0, sizeof s);
        transfer_receive(in, out, b.p, n, n, peer, tag, MPI_COMM_WORLD, &s);
        STATUS_CHECK(&s, peer, tag, n);
        BUF_CHECK(b, seed, n);
        buf_free(b);
    }
    running = outer;
}

static void every_way_of(const size_t *sizes, int count) {
    look_for_large_counts();
    if (peer == MPI_PROC_NULL) return;
    attach(1 << 20);
    uint64_t seed = 1;
    FOR_ENDS(from, to)
        for (int out = 0; out < SEND_WAY_COUNT; out++)
            for (int in = 0; in < RECEIVE_WAY_COUNT; in++)
                for (int i = 0; i < count; i++) message(from, to, out, in, sizes[i], ++seed);
    detach();
}

static void small(void) { every_way_of((size_t[]){0, 1, 60, 61, 62, 5000}, 6); }
static void medium(void) { every_way_of((size_t[]){70001}, 1); }

static void large(void) {
    look_for_large_counts();
    if (peer == MPI_PROC_NULL) return;
    attach(8 << 20);
    size_t sizes[] = {16383, 16384, 16385, (1 << 20) + 1, (5 << 20) + 7};
    uint64_t seed = 1000;
    FOR_ENDS(from, to)
        for (int way = 0; way < SEND_WAY_COUNT; way++)
            for (int i = 0; i < 5; i++) {
                enum receive_way in = (way * 5 + i) % RECEIVE_WAY_COUNT;
                if (!may_meet(way, in)) in = IRECV_WAIT;
                message(from, to, way, in, sizes[i], ++seed);
            }
    detach();
}

// A receive with room to spare leaves what lies beyond the message alone.
static void room_to_spare(void) {
    if (peer == MPI_PROC_NULL) return;
    size_t sizes[] = {0, 3, 61, 4000, 100000, 3000000};
    FOR_ENDS(from, to)
        for (int i = 0; i < 6; i++)
            for (int way = 0; way < 3; way++) {
                uint64_t seed = 77 + i * 3 + way;
                if (me % 2 == 0) {
                    buf b = buf_new(from, sizes[i], 1);
                    buf_fill(b, seed);
                    OK(MPI_Send(b.p, sizes[i], MPI_BYTE, peer, 3, MPI_COMM_WORLD));
                    buf_free(b);
                } else {
                    buf b = buf_new(to, 4000000, 5);
                    MPI_Status s;
                    enum receive_way in = (enum receive_way[]){RECV, IRECV_WAIT, RECV_INIT}[way];
                    transfer_receive(in, SEND, b.p, b.bytes, sizes[i], peer, 3, MPI_COMM_WORLD, &s);
                    STATUS_CHECK(&s, peer, 3, sizes[i]);
                    BUF_CHECK(b, seed, sizes[i]);
                    buf_free(b);
                }
            }
}

// The calls that send and receive at once. Those that replace have both in one buffer.
enum { NOT_BLOCKING = 1, REPLACES = 2, TAKES_LARGE_COUNT = 4, BOTH_WAYS = 8 };

static void exchange(int how, buf a, buf b, int tag, MPI_Status *s) {
    size_t n = a.bytes;
    MPI_Request r = MPI_REQUEST_NULL;
    MPI_Comm c = MPI_COMM_WORLD;
    switch (how) {
    case 0: OK(MPI_Sendrecv(a.p, n, MPI_BYTE, peer, tag, b.p, n, MPI_BYTE, peer, tag, c, s)); break;
    case NOT_BLOCKING: OK(MPI_Isendrecv(a.p, n, MPI_BYTE, peer, tag, b.p, n, MPI_BYTE, peer, tag, c, &r)); break;
    case REPLACES: OK(MPI_Sendrecv_replace(a.p, n, MPI_BYTE, peer, tag, peer, tag, c, s)); break;
    case REPLACES | NOT_BLOCKING: OK(MPI_Isendrecv_replace(a.p, n, MPI_BYTE, peer, tag, peer, tag, c, &r)); break;
    case TAKES_LARGE_COUNT: OK(MPI_Sendrecv_c(a.p, n, MPI_BYTE, peer, tag, b.p, n, MPI_BYTE, peer, tag, c, s)); break;
    case TAKES_LARGE_COUNT | NOT_BLOCKING:
        OK(MPI_Isendrecv_c(a.p, n, MPI_BYTE, peer, tag, b.p, n, MPI_BYTE, peer, tag, c, &r));
        break;
    case TAKES_LARGE_COUNT | REPLACES: OK(MPI_Sendrecv_replace_c(a.p, n, MPI_BYTE, peer, tag, peer, tag, c, s)); break;
    default: OK(MPI_Isendrecv_replace_c(a.p, n, MPI_BYTE, peer, tag, peer, tag, c, &r));
    }
    if (!(how & NOT_BLOCKING)) return;
    CHECK(r != MPI_REQUEST_NULL, "a request");
    OK(MPI_Wait(&r, s));
    CHECK(r == MPI_REQUEST_NULL, "a completed request is null");
}

static void both_ways(void) {
    look_for_large_counts();
    if (peer == MPI_PROC_NULL) return;
    size_t sizes[] = {1, 61, 4096, 65536, 2000001};
    FOR_PAIRS(out, in)
        for (int i = 0; i < 5; i++)
            for (int how = 0; how < BOTH_WAYS; how++) {
                size_t n = sizes[i];
                // What takes a large count differs in the call alone: no long messages.
                if ((how & TAKES_LARGE_COUNT) && (!large_counts || i == 4)) continue;
                if ((how & NOT_BLOCKING) && !has_isendrecv()) continue;
                int seed = 100 * (how + 1), tag = how + 1;
                MPI_Status s;
                memset(&s, 0, sizeof s);
                buf a = buf_new(out, n, 3), b = buf_new(in, n, 9);
                buf_fill(a, seed + me);
                exchange(how, a, b, tag, &s);
                // MPICH by itself, to which all may be left where it can have device memory, gives those that do not block the
                // status of some other message.
                int is_ours = with_preload && (a.kind == DEVICE || b.kind == DEVICE) && !number_from("SIMCUDA_HOST_ACCESS", 0);
                if (is_ours || !(how & NOT_BLOCKING)) STATUS_CHECK(&s, peer, tag, n);
                BUF_CHECK(a, seed + (how & REPLACES ? peer : me), n);
                if (how & REPLACES) BUF_CHECK(b, 0, 0);
                else BUF_CHECK(b, seed + peer, n);
                buf_free(a);
                buf_free(b);
            }
}

// Streams of long messages from host memory whose receiver is now a device buffer and now host memory. Each is answered, so
// that its sender knows what the receiver made of the one before: after one for a device the next goes by descriptor. Those of
// the last two streams complete without their receivers, but for synchronous ones, and those of the last are received late.
static void from_host(void) {
    if (peer == MPI_PROC_NULL) return;
    const char *into = "DDDHHDDHD"; // by descriptor: the second, third, fourth, seventh and eighth
    const enum send_way ways[] = {SEND, ISEND, SSEND, SENDRECV_OUT};
    const size_t sizes[] = {65536, 70001, (1 << 20) + 1, (5 << 20) + 7, 300000, 8192, 16383};
    for (int stream = 0; stream < 7; stream++)
        for (int i = 0; into[i]; i++) {
            size_t n = sizes[stream];
            uint64_t seed = 4000 + stream * 100 + i;
            enum send_way way = ways[(stream + i) % 4];
            char answer = 1;
            if (me % 2 == 0) {
                buf b = buf_new(HOST, n, seed % 13);
                buf_fill(b, seed);
                transfer_send(way, b.p, n, peer, 40 + stream, MPI_COMM_WORLD);
                BUF_CHECK(b, seed, n);
                buf_poison(b); // it is the program's again
                buf_free(b);
                OK(MPI_Recv(&answer, 1, MPI_BYTE, peer, 39, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            } else {
                buf b = buf_new(into[i] == 'D' ? DEVICE : HOST, n + 100, (seed + 3) % 17);
                MPI_Status s;
                if (stream == 6) usleep(2000);
                transfer_receive(i % 2 ? IRECV_WAIT : RECV, way, b.p, n + 50, n, peer, 40 + stream, MPI_COMM_WORLD, &s);
                STATUS_CHECK(&s, peer, 40 + stream, n);
                BUF_CHECK(b, seed, n);
                buf_free(b);
                OK(MPI_Send(&answer, 1, MPI_BYTE, peer, 39, MPI_COMM_WORLD));
            }
        }
}

// The same by persistent requests, two started at once, which are completed in several ways. The last one is freed under way.
static void from_host_persistent(void) {
    if (peer == MPI_PROC_NULL) return;
    const size_t sizes[] = {8192, 65536, 300001, (5 << 20) + 7};
    for (int stream = 0; stream < 4; stream++) {
        const char *into = stream % 2 ? "DDDHHDDHD" : "DDDHHDDHDD"; // as above: five by descriptor, or six
        size_t n = sizes[stream];
        MPI_Request r[2];
        buf b[2];
        char answer = 1;
        if (me % 2 == 0) {
            MPI_Comm comm;
            MPI_Datatype word;
            OK(MPI_Comm_dup(MPI_COMM_WORLD, &comm));
            OK(MPI_Type_contiguous(n, MPI_BYTE, &word));
            OK(MPI_Type_commit(&word));
            for (int k = 0; k < 2; k++) {
                b[k] = buf_new(HOST, n, 3 * k + stream);
                OK((stream % 2 ? MPI_Ssend_init : MPI_Send_init)(b[k].p, 1, word, peer, k, comm, &r[k]));
            }
            OK(MPI_Type_free(&word)); // the requests keep it
            for (int i = 0; into[i]; i++) {
                for (int k = 0; k < 2; k++) buf_fill(b[k], 5000 + stream * 100 + i * 2 + k);
                if (i % 2) {
                    OK(MPI_Startall(2, r));
                } else {
                    OK(MPI_Start(&r[0]));
                    OK(MPI_Start(&r[1]));
                }
                int last = !into[i + 1], done = 0, index, indices[2];
                if (last) {
                    MPI_Request freed = r[1];
                    OK(MPI_Request_free(&r[1]));
                    CHECK(r[1] == MPI_REQUEST_NULL && freed != r[1], "a freed request is null");
                    OK(MPI_Wait(&r[0], MPI_STATUS_IGNORE));
                } else if (i % 4 == 0) {
                    OK(MPI_Waitall(2, r, MPI_STATUSES_IGNORE));
                } else if (i % 4 == 1) {
                    for (int left = 2; left; left -= done) OK(MPI_Testsome(2, r, &done, indices, MPI_STATUSES_IGNORE));
                } else if (i % 4 == 2) {
                    for (int k = 0; k < 2; k++) OK(MPI_Waitany(2, r, &index, MPI_STATUS_IGNORE));
                } else {
                    for (int k = 0; k < 2; k++)
                        for (done = 0; !done;) OK(MPI_Test(&r[k], &done, MPI_STATUS_IGNORE));
                }
                CHECK(r[0] != MPI_REQUEST_NULL && (last || r[1] != MPI_REQUEST_NULL), "a persistent request stays");
                OK(MPI_Wait(&r[0], MPI_STATUS_IGNORE)); // inactive
                BUF_CHECK(b[0], 5000 + stream * 100 + i * 2, n);
                if (!last) buf_poison(b[0]), buf_poison(b[1]);
                OK(MPI_Recv(&answer, 1, MPI_BYTE, peer, 39, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            }
            OK(MPI_Comm_free(&comm));
            OK(MPI_Request_free(&r[0]));
            buf_free(b[0]), buf_free(b[1]);
        } else {
            MPI_Comm comm;
            OK(MPI_Comm_dup(MPI_COMM_WORLD, &comm));
            for (int i = 0; into[i]; i++) {
                MPI_Status s[2];
                for (int k = 0; k < 2; k++) {
                    b[k] = buf_new(into[i] == 'D' ? DEVICE : HOST, n + 100, 3 * k + i);
                    OK(MPI_Irecv(b[k].p, n + 50, MPI_BYTE, peer, k, comm, &r[k]));
                }
                OK(MPI_Waitall(2, r, s));
                for (int k = 0; k < 2; k++) {
                    STATUS_CHECK(&s[k], peer, k, n);
                    BUF_CHECK(b[k], 5000 + stream * 100 + i * 2 + k, n);
                    buf_free(b[k]);
                }
                OK(MPI_Send(&answer, 1, MPI_BYTE, peer, 39, MPI_COMM_WORLD));
            }
            OK(MPI_Comm_free(&comm));
        }
    }
}

// Halo exchange as solvers do it: a ring of Sendrecv over all ranks.
static void ring(void) {
    size_t n = 300000;
    int right = (me + 1) % ranks, left = (me + ranks - 1) % ranks;
    buf a = buf_new(DEVICE, n, 8), b = buf_new(DEVICE, n, 16);
    for (int step = 0; step < 20; step++) {
        buf_fill(a, step * 100 + me);
        buf_poison(b);
        OK(MPI_Sendrecv(a.p, n, MPI_BYTE, right, 0, b.p, n, MPI_BYTE, left, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        BUF_CHECK(b, step * 100 + left, n);
    }
    buf_free(a);
    buf_free(b);
}

static void to_self(void) {
    size_t sizes[] = {0, 1, 61, 5000, 70000, 1 << 20};
    FOR_PAIRS(from, to)
        for (int i = 0; i < 6; i++) {
            size_t n = sizes[i];
            buf a = buf_new(from, n, 1), b = buf_new(to, n, 2);
            MPI_Request r[2];
            MPI_Status s;
            buf_fill(a, n + 1);
            OK(MPI_Irecv(b.p, n, MPI_BYTE, me, 4, MPI_COMM_WORLD, &r[0])); // posted, then sent
            OK(MPI_Send(a.p, n, MPI_BYTE, me, 4, MPI_COMM_WORLD));
            OK(MPI_Wait(&r[0], &s));
            STATUS_CHECK(&s, me, 4, n);
            BUF_CHECK(b, n + 1, n);
            buf_poison(b);
            OK(MPI_Isend(a.p, n, MPI_BYTE, 0, 5, MPI_COMM_SELF, &r[0])); // sent, then received
            OK(MPI_Probe(0, 5, MPI_COMM_SELF, &s));
            STATUS_CHECK(&s, 0, 5, n);
            OK(MPI_Recv(b.p, n, MPI_BYTE, 0, 5, MPI_COMM_SELF, &s));
            OK(MPI_Wait(&r[0], MPI_STATUS_IGNORE));
            BUF_CHECK(b, n + 1, n);
            buf_poison(b);
            OK(MPI_Sendrecv(a.p, n, MPI_BYTE, 0, 6, b.p, n, MPI_BYTE, 0, 6, MPI_COMM_SELF, &s));
            BUF_CHECK(b, n + 1, n);
            buf_free(a);
            buf_free(b);
        }
}

static void nobody(void) {
    buf b = buf_new(DEVICE, 100000, 1);
    MPI_Status s;
    MPI_Request r[2];
    MPI_Message m;
    int flag;
    OK(MPI_Send(b.p, b.bytes, MPI_BYTE, MPI_PROC_NULL, 1, MPI_COMM_WORLD));
    OK(MPI_Recv(b.p, b.bytes, MPI_BYTE, MPI_PROC_NULL, 1, MPI_COMM_WORLD, &s));
    STATUS_CHECK(&s, MPI_PROC_NULL, MPI_ANY_TAG, 0);
    OK(MPI_Isend(b.p, b.bytes, MPI_BYTE, MPI_PROC_NULL, 1, MPI_COMM_WORLD, &r[0]));
    OK(MPI_Irecv(b.p, b.bytes, MPI_BYTE, MPI_PROC_NULL, 1, MPI_COMM_WORLD, &r[1]));
    OK(MPI_Waitall(2, r, MPI_STATUSES_IGNORE));
    OK(MPI_Sendrecv(b.p, 10, MPI_BYTE, MPI_PROC_NULL, 1, b.p + 10, 10, MPI_BYTE, MPI_PROC_NULL, 1, MPI_COMM_WORLD, &s));
    STATUS_CHECK(&s, MPI_PROC_NULL, MPI_ANY_TAG, 0);
    OK(MPI_Probe(MPI_PROC_NULL, 1, MPI_COMM_WORLD, &s));
    STATUS_CHECK(&s, MPI_PROC_NULL, MPI_ANY_TAG, 0);
    OK(MPI_Improbe(MPI_PROC_NULL, 1, MPI_COMM_WORLD, &flag, &m, &s));
    CHECK(flag && m == MPI_MESSAGE_NO_PROC, "matched probe of nobody");
    OK(MPI_Mrecv(b.p, b.bytes, MPI_BYTE, &m, &s));
    STATUS_CHECK(&s, MPI_PROC_NULL, MPI_ANY_TAG, 0);
    BUF_CHECK(b, 0, 0);
    buf_free(b);
}

// Allocations that come and go: a mapping kept for an address must not outlive its allocation.
static void reallocated(void) {
    if (peer == MPI_PROC_NULL) return;
    for (int i = 0; i < 60; i++) {
        size_t n = 100000 + (i % 4) * 1000;
        buf b = buf_new(DEVICE, n, i % 3);
        if (me % 2 == 0) {
            buf_fill(b, i);
            OK(MPI_Ssend(b.p, n, MPI_BYTE, peer, 1, MPI_COMM_WORLD));
        } else {
            OK(MPI_Recv(b.p, n, MPI_BYTE, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            BUF_CHECK(b, i, n);
        }
        buf_free(b);
    }
}

// Many messages from pieces of one large allocation.
static void pieces(void) {
    if (peer == MPI_PROC_NULL) return;
    enum { N = 64 };
    size_t piece = 50001;
    buf b = buf_new(DEVICE, piece * N, 3);
    MPI_Request r[N];
    if (me % 2 == 0) buf_fill(b, 9);
    for (int i = 0; i < N; i++)
        if (me % 2 == 0) OK(MPI_Isend(b.p + i * piece, piece, MPI_BYTE, peer, i, MPI_COMM_WORLD, &r[i]));
        else OK(MPI_Irecv(b.p + i * piece, piece, MPI_BYTE, peer, i, MPI_COMM_WORLD, &r[i]));
    OK(MPI_Waitall(N, r, MPI_STATUSES_IGNORE));
    BUF_CHECK(b, 9, b.bytes);
    buf_free(b);
}

static const struct test_case cases[] = {
    {"small", small}, {"medium", medium}, {"large", large}, {"room_to_spare", room_to_spare}, {"both_ways", both_ways}, {"from_host", from_host}, {"from_host_persistent", from_host_persistent},
    {"ring", ring}, {"to_self", to_self}, {"nobody", nobody}, {"reallocated", reallocated}, {"pieces", pieces}, {0},
};
int main(int argc, char **argv) { return run_cases(argc, argv, cases, MPI_THREAD_SINGLE); }
