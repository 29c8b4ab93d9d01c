// Programs that are right, and pass on a plain MPI, must not hang because a library carries their messages.
#include "transfer.h"

enum { PATTERNS = 6 };

// Receives into device memory from host memory, which the MPI library carries. After it all know who uses a device, so that
// from then on how each message goes is certain.
static void acquainted(void) {
    buf from = buf_new(HOST, 1000, 1), to = buf_new(DEVICE, 1000, 1);
    buf_fill(from, me);
    OK(MPI_Sendrecv(from.p, 1000, MPI_BYTE, peer, 5, to.p, 1000, MPI_BYTE, peer, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    if (peer != MPI_PROC_NULL) BUF_CHECK(to, peer, 1000);
    buf_free(from);
    buf_free(to);
}

struct blocking { MPI_Comm made; MPI_Win window; void *memory; MPI_File file; };

static const char *file_name(void) {
    static char name[300];
    const char *folder = getenv("SCRATCH");
    snprintf(name, sizeof name, "%s/pending.dat", folder ? folder : "/tmp");
    return name;
}

enum { BARRIER, ALLREDUCE, COMM_DUP, WIN_FENCE, WRITE_ALL };

static void enter(int what, struct blocking *state) {
    int one = 1, sum = 0;
    switch (what) {
    case BARRIER: OK(MPI_Barrier(MPI_COMM_WORLD)); break;
    case ALLREDUCE: OK(MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD)); EQUAL(sum, ranks); break;
    case COMM_DUP: OK(MPI_Comm_dup(MPI_COMM_WORLD, &state->made)); OK(MPI_Comm_free(&state->made)); break;
    case WIN_FENCE: OK(MPI_Win_fence(0, state->window)); break;
    case WRITE_ALL: OK(MPI_File_write_at_all(state->file, me * 4, &one, 1, MPI_INT, MPI_STATUS_IGNORE)); break;
    }
}

// A transfer is pending on one side or on both while each rank is inside a blocking call that is not about it.
static void pending(int what) {
    size_t sizes[] = {100, 61, 70000, 4 << 20};
    struct blocking state;
    if (what == WIN_FENCE) {
        OK(MPI_Win_allocate(64, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &state.memory, &state.window));
        OK(MPI_Win_fence(0, state.window));
    }
    if (what == WRITE_ALL) OK(MPI_File_open(MPI_COMM_WORLD, file_name(), MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &state.file));
    FOR_ENDS(from, to)
        for (int i = 0; i < 4; i++)
            for (int how = 0; how < PATTERNS; how++) {
                size_t n = sizes[i];
                MPI_Request r = MPI_REQUEST_NULL;
                if (peer == MPI_PROC_NULL) { enter(what, &state); continue; }
                buf b = buf_new(me % 2 ? to : from, n, 1);
                uint64_t seed = how * 10 + i;
                if (me % 2 == 0) {
                    buf_fill(b, seed);
                    switch (how) {
                    case 0: // both sides pending
                    case 1: // the receiver blocks in its receive while the sender is in the call
                        OK(MPI_Isend(b.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD, &r));
                        enter(what, &state);
                        break;
                    case 2: // the sender blocks in its send while the receiver is in the call
                        OK(MPI_Ssend(b.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD));
                        enter(what, &state);
                        break;
                    case 3:
                        OK(MPI_Issend(b.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD, &r));
                        enter(what, &state);
                        break;
                    case 4:
                        OK(MPI_Send(b.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD));
                        enter(what, &state);
                        break;
                    default: // the send comes only after the call: only the receive is pending
                        enter(what, &state);
                        OK(MPI_Send(b.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD));
                    }
                } else if (how == 1) {
                    OK(MPI_Recv(b.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
                    enter(what, &state);
                } else {
                    OK(MPI_Irecv(b.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD, &r));
                    enter(what, &state);
                }
                OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
                BUF_CHECK(b, seed, n);
                buf_free(b);
            }
    if (what == WIN_FENCE) { OK(MPI_Win_fence(0, state.window)); OK(MPI_Win_free(&state.window)); }
    if (what == WRITE_ALL) { OK(MPI_File_close(&state.file)); if (me == 0) unlink(file_name()); }
}

static void pending_barrier(void) { pending(BARRIER); }
static void pending_allreduce(void) { pending(ALLREDUCE); }
static void pending_comm_dup(void) { pending(COMM_DUP); }
static void pending_win_fence(void) { pending(WIN_FENCE); }
static void pending_write_all(void) { pending(WRITE_ALL); }

// Send against Send. Natively this works for messages below some limit (4 KiB and more); programs rely on it. For device
// memory it works up to the preloaded library's own limit, 16 KiB.
static void head_to_head(void) {
    size_t sizes[] = {0, 1, 61, 1000, 2048, 4000, 4096, 16383, 16384};
    if (peer == MPI_PROC_NULL) return;
    // Of two sends one must complete alone, so of a pair of ranks one must have a device.
    int devices = with_preload && (role_of(me) == 'D' || role_of(peer) == 'D');
    for (int kinds = 0; kinds < 4; kinds++)
        for (int i = 0; i < (devices ? 9 : 5); i++)
            for (int k = 0; k < 20; k++) {
                size_t n = sizes[i];
                enum kind out = kinds & 1, in = kinds >> 1;
                if (i > 4 && out == HOST) continue;
                buf a = buf_new(out, n, 1), b = buf_new(in, n, 2);
                buf_fill(a, me + k);
                OK(MPI_Send(a.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD));
                OK(MPI_Recv(b.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
                BUF_CHECK(b, peer + k, n);
                buf_free(a);
                buf_free(b);
            }
}

// 1000 Isends of 1 MiB, received in the reverse order of their tags: nothing bounded may be held by the unmatched ones.
static void reverse_tags(void) {
    enum { K = 1000, BUFFERS = 8 };
    size_t n = 1 << 20;
    if (me > 1) return;
    static MPI_Request r[K];
    if (me == 0) {
        buf b[BUFFERS];
        for (int i = 0; i < BUFFERS; i++) { b[i] = buf_new(i == 3 ? HOST : DEVICE, n, i); buf_fill(b[i], i); }
        for (int i = 0; i < K; i++) OK(MPI_Isend(b[i % BUFFERS].p, n, MPI_BYTE, 1, i, MPI_COMM_WORLD, &r[i]));
        OK(MPI_Waitall(K, r, MPI_STATUSES_IGNORE));
        for (int i = 0; i < BUFFERS; i++) buf_free(b[i]);
    } else {
        buf b[2] = {buf_new(HOST, n, 5), buf_new(DEVICE, n, 7)};
        for (int i = K - 1; i >= 0; i--) {
            buf to = b[i / 3 % 2];
            OK(MPI_Recv(to.p, n, MPI_BYTE, 0, i, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            if (i % 37 == 0) BUF_CHECK(to, i % BUFFERS, n);
        }
        buf_free(b[0]);
        buf_free(b[1]);
    }
}

// Many small sends each way before the first receive.
static void unreceived(enum kind kind, int many, size_t n) {
    if (me > 1) return;
    buf a = buf_new(kind, n, 1), b = buf_new(kind, n, 2);
    buf_fill(a, me);
    for (int k = 0; k < many; k++) OK(MPI_Send(a.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD));
    for (int k = 0; k < many; k++) {
        OK(MPI_Recv(b.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        if (k % 10007 == 0) BUF_CHECK(b, peer, n);
    }
    buf_free(a);
    buf_free(b);
}
static void unreceived_host(void) { unreceived(HOST, 70000, 1024); }
// More than 16 bits count, and more bytes than may be in flight by value (64 MiB): the simulated driver takes its time for each.
static void unreceived_device(void) { unreceived(DEVICE, 70000, 1024); }
// As many bytes in fewer messages, of which each may still be sent before it is received by a plain library, too.
static void unreceived_bytes(void) { unreceived(DEVICE, 34000, 2000); }
// A burst of short messages, each of its own length and contents.
static void unreceived_short(void) {
    if (me > 1) return;
    enum { MANY = 10000, PLACES = 5, LONGEST = 256 };
    buf b[PLACES];
    for (int i = 0; i < PLACES; i++) b[i] = buf_new(DEVICE, LONGEST, i);
    for (int k = 0; k < MANY; k++) {
        buf_fill(b[k % PLACES], me * MANY + k);
        OK(MPI_Send(b[k % PLACES].p, 1 + k * 37 % LONGEST, MPI_BYTE, peer, 5, MPI_COMM_WORLD));
    }
    for (int k = 0; k < MANY; k++) {
        buf to = b[k % 3];
        size_t n = 1 + k * 37 % LONGEST;
        buf_poison(to);
        OK(MPI_Recv(to.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        BUF_CHECK(to, peer * MANY + k, n);
    }
    for (int i = 0; i < PLACES; i++) buf_free(b[i]);
}

// A receiver, then a sender, that computes for long between posting and waiting; the other side waits in MPI.
static void busy(void) {
    if (peer == MPI_PROC_NULL) return;
    size_t sizes[] = {61, 70000, 4 << 20};
    FOR_ENDS(from, to)
        for (int i = 0; i < 3; i++)
            for (int who = 0; who < 2; who++) {
                size_t n = sizes[i];
                MPI_Request r;
                buf b = buf_new(me % 2 ? to : from, n, 1);
                if (me % 2 == 0) { buf_fill(b, i); OK(MPI_Isend(b.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD, &r)); }
                else OK(MPI_Irecv(b.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD, &r));
                int is_long = i == 2 && from && to;
                if (me % 2 == who) usleep(!is_long ? 50000 : who ? 2000000 : 1000000);
                OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
                BUF_CHECK(b, i, n);
                buf_free(b);
            }
}

// Each rank sends to all before it receives from any, beside collectives of another communicator.
static void everyone(void) {
    MPI_Comm c;
    OK(MPI_Comm_dup(MPI_COMM_WORLD, &c));
    size_t n = 200000;
    buf *out = scratch(ranks * sizeof *out), *in = scratch(ranks * sizeof *in);
    MPI_Request *r = scratch(2 * ranks * sizeof *r);
    for (int round = 0; round < 5; round++) {
        for (int i = 0; i < ranks; i++) {
            out[i] = buf_new((enum kind)((me + i + round) & 1), n, 1);
            in[i] = buf_new((enum kind)((me * 3 + i) & 1), n, 2);
            buf_fill(out[i], me * 100 + i);
            OK(MPI_Isend(out[i].p, n, MPI_BYTE, i, round, MPI_COMM_WORLD, &r[i]));
        }
        OK(MPI_Barrier(c));
        for (int i = 0; i < ranks; i++) OK(MPI_Irecv(in[i].p, n, MPI_BYTE, i, round, MPI_COMM_WORLD, &r[ranks + i]));
        OK(MPI_Barrier(c));
        OK(MPI_Waitall(2 * ranks, r, MPI_STATUSES_IGNORE));
        for (int i = 0; i < ranks; i++) { BUF_CHECK(in[i], i * 100 + me, n); buf_free(in[i]); buf_free(out[i]); }
    }
    OK(MPI_Comm_free(&c));
    free(out);
    free(in);
    free(r);
}

static const struct test_case cases[] = {
    {"acquainted", acquainted}, {"pending_barrier", pending_barrier}, {"pending_allreduce", pending_allreduce}, {"pending_comm_dup", pending_comm_dup},
    {"pending_win_fence", pending_win_fence}, {"pending_write_all", pending_write_all}, {"head_to_head", head_to_head},
    {"reverse_tags", reverse_tags}, {"unreceived_host", unreceived_host}, {"unreceived_device", unreceived_device},
    {"unreceived_bytes", unreceived_bytes}, {"unreceived_short", unreceived_short},
    {"busy", busy}, {"everyone", everyone}, {0},
};
int main(int argc, char **argv) { return run_cases(argc, argv, cases, MPI_THREAD_SINGLE); }
