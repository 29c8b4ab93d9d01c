// Calls and messages of known numbers and sizes, so that what the library has counted can be told from the program alone.
#include "sim.h"

// Each rank sends STEPS messages of (me + 1) * UNIT bytes to the next one, by MPI_Send and MPI_Recv in turns.
enum { STEPS = 6, UNIT = 40000 };

static void ring(void) {
    int right = (me + 1) % ranks, left = (me + ranks - 1) % ranks;
    size_t out = (size_t)(me + 1) * UNIT, in = (size_t)(left + 1) * UNIT;
    buf a = buf_new(DEVICE, out, 8), b = buf_new(DEVICE, in, 16);
    for (int step = 0; step < STEPS; step++) {
        buf_fill(a, step * 100 + me);
        buf_poison(b);
        if (me % 2 == 0) OK(MPI_Send(a.p, (int)out, MPI_BYTE, right, 3, MPI_COMM_WORLD));
        OK(MPI_Recv(b.p, (int)in, MPI_BYTE, left, 3, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        if (me % 2 == 1) OK(MPI_Send(a.p, (int)out, MPI_BYTE, right, 3, MPI_COMM_WORLD));
        BUF_CHECK(b, step * 100 + left, in);
    }
    buf_free(a);
    buf_free(b);
}

// Rank 0 sends one message of each of these sizes to each other rank, 1 << rank times, on a communicator in which ranks are
// the other way round. Nobody sends anything back.
static void fan(void) {
    size_t sizes[] = {1, 1000, 1024, 65535, 65536, 300000, 5000000};
    MPI_Comm back;
    OK(MPI_Comm_split(MPI_COMM_WORLD, 0, ranks - me, &back));
    int first = ranks - 1; // rank 0 of the world
    for (int i = 0; i < 7; i++) {
        size_t n = sizes[i];
        buf a = buf_new(DEVICE, n, 8);
        MPI_Request r;
        if (me == 0)
            for (int to = 1; to < ranks; to++)
                for (int times = 0; times < 1 << to; times++) {
                    buf_fill(a, to);
                    OK(MPI_Isend(a.p, (int)n, MPI_BYTE, ranks - 1 - to, 4, back, &r));
                    OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
                }
        else
            for (int times = 0; times < 1 << me; times++) {
                buf_poison(a);
                OK(MPI_Irecv(a.p, (int)n, MPI_BYTE, first, 4, back, &r));
                OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
                BUF_CHECK(a, me, n);
            }
        buf_free(a);
    }
    OK(MPI_Comm_free(&back));
}

// As many calls of each as its number says, on every rank; messages to oneself.
static void calls(void) {
    char token = 1, got;
    int flag, sum;
    MPI_Request r[2];
    MPI_Status s;
    for (int i = 0; i < 3; i++) OK(MPI_Allreduce(&me, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD));
    for (int i = 0; i < 5; i++) OK(MPI_Iprobe(0, 77, MPI_COMM_SELF, &flag, &s));
    for (int i = 0; i < 7; i++) {
        OK(MPI_Irecv(&got, 1, MPI_BYTE, 0, 9, MPI_COMM_SELF, &r[0]));
        OK(MPI_Isend(&token, 1, MPI_BYTE, 0, 9, MPI_COMM_SELF, &r[1]));
        OK(MPI_Waitall(2, r, MPI_STATUSES_IGNORE));
    }
    for (int i = 0; i < 11; i++) {
        OK(MPI_Sendrecv(&token, 1, MPI_BYTE, 0, 8, &got, 1, MPI_BYTE, 0, 8, MPI_COMM_SELF, &s));
    }
    for (int i = 0; i < 13; i++) OK(MPI_Bcast(&sum, 1, MPI_INT, 0, MPI_COMM_WORLD));
}

// Rank 1 sleeps 0.3 s before it sends: rank 0 is in MPI_Recv for that long.
static void late(void) {
    buf a = buf_new(DEVICE, 100, 1);
    buf_fill(a, 1);
    OK(MPI_Barrier(MPI_COMM_WORLD));
    if (me == 1) {
        usleep(300000);
        OK(MPI_Send(a.p, 100, MPI_BYTE, 0, 5, MPI_COMM_WORLD));
    } else if (me == 0) {
        OK(MPI_Recv(a.p, 100, MPI_BYTE, 1, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    }
    buf_free(a);
}

static const struct test_case cases[] = {{"ring", ring}, {"fan", fan}, {"calls", calls}, {"late", late}, {0}};
int main(int argc, char **argv) { return run_cases(argc, argv, cases, MPI_THREAD_SINGLE); }
