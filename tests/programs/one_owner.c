// Long messages between devices, in windows and one by one, at odd places and lengths, checked to the last byte.
#include "transfer.h"

static const size_t sizes[] = {(3 << 20) + 1, (8 << 20) - 3, (17 << 20) + 5};

// A window of messages from each rank of a pair to the other, at the same time.
static void both_ways(void) {
    enum { N = 5 };
    if (peer == MPI_PROC_NULL) return;
    for (int s = 0; s < 3; s++) {
        size_t n = sizes[s];
        buf out[N], in[N];
        MPI_Request r[2 * N];
        for (int i = 0; i < N; i++) {
            out[i] = buf_new(DEVICE, n, i);
            in[i] = buf_new(DEVICE, n, 2 * i + 1);
            buf_fill(out[i], 100 * s + 10 * i + me);
        }
        for (int i = 0; i < N; i++) {
            OK(MPI_Irecv(in[i].p, n, MPI_BYTE, peer, i, MPI_COMM_WORLD, &r[i]));
            OK(MPI_Isend(out[i].p, n, MPI_BYTE, peer, i, MPI_COMM_WORLD, &r[N + i]));
        }
        OK(MPI_Waitall(2 * N, r, MPI_STATUSES_IGNORE));
        for (int i = 0; i < N; i++) {
            BUF_CHECK(in[i], 100 * s + 10 * i + peer, n);
            buf_free(in[i]);
            buf_free(out[i]);
        }
    }
}

// The same message again and again, and from two places in turn.
static void again(void) {
    if (peer == MPI_PROC_NULL) return;
    size_t n = (8 << 20) + 77;
    buf b[2] = {buf_new(DEVICE, n, 1), buf_new(DEVICE, n, 8)};
    // Until both ranks have used a device and said so, messages go by value.
    for (int i = 0; i < 5; i++) {
        if (me % 2 == 0) OK(MPI_Send(b[0].p, 1000, MPI_BYTE, peer, 2, MPI_COMM_WORLD));
        OK(MPI_Recv(b[0].p, 1000, MPI_BYTE, peer, 2, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        if (me % 2) OK(MPI_Send(b[0].p, 1000, MPI_BYTE, peer, 2, MPI_COMM_WORLD));
    }
    for (int i = 0; i < 20; i++) {
        buf at = b[i < 12 ? 0 : i % 2];
        if (me % 2 == 0) {
            buf_fill(at, i);
            OK(MPI_Send(at.p, n, MPI_BYTE, peer, 3, MPI_COMM_WORLD));
            BUF_CHECK(at, i, n);
        } else {
            OK(MPI_Recv(at.p, n, MPI_BYTE, peer, 3, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            BUF_CHECK(at, i, n);
        }
    }
    buf_free(b[0]);
    buf_free(b[1]);
}

static const struct test_case cases[] = {{"both_ways", both_ways}, {"again", again}, {0}};
int main(int argc, char **argv) { return run_cases(argc, argv, cases, MPI_THREAD_SINGLE); }
