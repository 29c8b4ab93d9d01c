// Patterns of communication that traces must tell apart. Each is run alone, once, on 256 KiB of device memory.
#include "transfer.h"

enum { BYTES = 256 << 10, STEPS = 16 };

static void exchange(buf out, buf in, size_t at, size_t n, int to, int from, int tag) {
    OK(MPI_Sendrecv(out.p + at, n, MPI_BYTE, to, tag, in.p + at, n, MPI_BYTE, from, tag, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
}

static buf out, in;

static void begin(void) {
    out = buf_new(DEVICE, BYTES, 0);
    in = buf_new(DEVICE, BYTES, 0);
    buf_fill(out, me);
}

static void end(void) {
    buf_free(out);
    buf_free(in);
}

static void ring(void) {
    begin();
    for (int i = 0; i < STEPS; i++) {
        exchange(out, in, 0, BYTES, (me + 1) % ranks, (me + ranks - 1) % ranks, i);
        BUF_CHECK(in, (me + ranks - 1) % ranks, BYTES);
    }
    end();
}

static void alltoall(void) {
    begin();
    for (int i = 1; i < ranks; i++) exchange(out, in, 0, BYTES, (me + i) % ranks, (me + ranks - i) % ranks, i);
    end();
}

// A line: no wrap around at its ends.
static void neighbour(void) {
    begin();
    for (int i = 0; i < STEPS; i++)
        for (int by = -1; by <= 1; by += 2) {
            int to = me + by, from = me - by;
            if (to < 0 || to >= ranks) to = MPI_PROC_NULL;
            if (from < 0 || from >= ranks) from = MPI_PROC_NULL;
            exchange(out, in, 0, BYTES, to, from, i);
        }
    end();
}

// Each step shifts by another distance: 1 + (s * s + 3 * s) mod (ranks - 1), and only ranks for which (rank + s) mod 3 is not 0 send.
static void scattered(void) {
    begin();
    for (int s = 0; s < STEPS; s++) {
        int by = 1 + (s * s + 3 * s) % (ranks - 1), to = (me + by) % ranks, from = (me + ranks - by) % ranks;
        if ((me + s) % 3 == 0) to = MPI_PROC_NULL;
        if ((from + s) % 3 == 0) from = MPI_PROC_NULL;
        exchange(out, in, 0, BYTES, to, from, s);
    }
    end();
}

// The messages of an allreduce as a ring makes them: each rank passes a part on, twice as often as there are others.
static void allreduce_ring(void) {
    begin();
    size_t n = BYTES / ranks;
    for (int i = 0; i < 2 * (ranks - 1); i++)
        exchange(out, in, 0, n, (me + 1) % ranks, (me + ranks - 1) % ranks, i);
    end();
}

// The same as recursive doubling makes them: all of it, with another partner in each step. `ranks` is a power of two.
static void allreduce_doubling(void) {
    begin();
    for (int by = 1; by < ranks; by *= 2) exchange(out, in, 0, BYTES, me ^ by, me ^ by, by);
    end();
}

// Sends that are received late: short ones are eager, long ones wait for their receiver.
static void sizes(void) {
    begin();
    // After that each knows that the other uses a device, and how messages go is certain.
    for (int i = 0; i < 2 && me < 2; i++) exchange(out, in, 0, 1000, 1 - me, 1 - me, 3);
    for (size_t n = 1 << 10; n <= BYTES; n *= 2) {
        MPI_Request r;
        if (me == 0) {
            OK(MPI_Isend(out.p, n, MPI_BYTE, 1, 1, MPI_COMM_WORLD, &r));
            for (int done = 0, i = 0; i < 200 && !done; i++) {
                OK(MPI_Test(&r, &done, MPI_STATUS_IGNORE));
                if (!done) usleep(500);
            }
            OK(MPI_Send(NULL, 0, MPI_BYTE, 1, 2, MPI_COMM_WORLD));
            OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
        } else if (me == 1) {
            OK(MPI_Recv(NULL, 0, MPI_BYTE, 0, 2, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            OK(MPI_Recv(in.p, n, MPI_BYTE, 0, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            BUF_CHECK(in, 0, n);
        }
    }
    end();
}

// Rank 0 sends by MPI_Send what only the MPI library carries: host memory, and device memory with gaps, which is packed. What
// goes by MPI_Sendrecv the library carries, but for what is sent before both ranks know each other.
static void layers(void) {
    begin();
    static char host[3000001];
    const size_t sizes[] = {8, 4000, 100000, sizeof host};
    for (int i = 0; i < 4; i++) exchange(out, in, 0, BYTES, 1 - me, 1 - me, i);
    for (int i = 0; i < 4; i++) {
        if (me == 0) OK(MPI_Send(host, sizes[i], MPI_BYTE, 1, 10 + i, MPI_COMM_WORLD));
        else OK(MPI_Recv(host, sizes[i], MPI_BYTE, 0, 10 + i, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    }
    MPI_Datatype gaps;
    OK(MPI_Type_vector(1000, 5, 9, MPI_BYTE, &gaps));
    OK(MPI_Type_commit(&gaps));
    if (me == 0) OK(MPI_Send(out.p, 1, gaps, 1, 20, MPI_COMM_WORLD));
    else OK(MPI_Recv(in.p, 1, gaps, 0, 20, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    OK(MPI_Type_free(&gaps));
    // These the library carries.
    for (int i = 0; i < 3; i++) {
        if (me == 0) OK(MPI_Send(out.p, BYTES, MPI_BYTE, 1, 30 + i, MPI_COMM_WORLD));
        else OK(MPI_Recv(in.p, BYTES, MPI_BYTE, 0, 30 + i, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    }
    BUF_CHECK(in, 1 - me, BYTES);
    // One-sided, from host memory.
    MPI_Win window;
    OK(MPI_Win_create(host, sizeof host, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &window));
    OK(MPI_Win_fence(0, window));
    if (me == 0) OK(MPI_Put(host, 700000, MPI_BYTE, 1, 1000000, 700000, MPI_BYTE, window));
    OK(MPI_Win_fence(0, window));
    OK(MPI_Win_free(&window));
    end();
}

static const struct test_case cases[] = {
    {"ring", ring}, {"alltoall", alltoall}, {"neighbour", neighbour}, {"scattered", scattered},
    {"allreduce_ring", allreduce_ring}, {"allreduce_doubling", allreduce_doubling}, {"sizes", sizes}, {"layers", layers}, {0},
};
int main(int argc, char **argv) { return run_cases(argc, argv, cases, MPI_THREAD_SINGLE); }
