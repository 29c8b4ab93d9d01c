// The same long message from one GPU to another, round after round: what becomes of it as the library gets to know the
// node. The rank of $COMPUTES works meanwhile, and tests in between.
#include "sim.h"

// Sends or receives, to the end.
static void transfer(buf b, size_t bytes, int works) {
    if (!works) {
        if (me == 0) OK(MPI_Send(b.p, (int)bytes, MPI_BYTE, 1, 1, MPI_COMM_WORLD));
        else OK(MPI_Recv(b.p, (int)bytes, MPI_BYTE, 0, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        return;
    }
    enum { WORK = 1 << 20 };
    static char host[WORK];
    buf work = buf_new(DEVICE, WORK, 0);
    MPI_Request request;
    if (me == 0) OK(MPI_Isend(b.p, (int)bytes, MPI_BYTE, 1, 1, MPI_COMM_WORLD, &request));
    else OK(MPI_Irecv(b.p, (int)bytes, MPI_BYTE, 0, 1, MPI_COMM_WORLD, &request));
    for (int done = 0; !done;) {
        CU(cu.up((CUdeviceptr)(uintptr_t)work.p, host, WORK));
        OK(MPI_Test(&request, &done, MPI_STATUS_IGNORE));
    }
    buf_free(work);
}

static void one_after_the_other(void) {
    if (me > 1) return;
    size_t bytes = (size_t)number_from("BYTES", 16 << 20);
    int rounds = (int)number_from("ROUNDS", 8), works = me == number_from("COMPUTES", -1);
    buf b = buf_new(DEVICE, bytes, 0);
    for (int round = 0; round < rounds; round++) {
        int answer = round;
        if (me == 0) {
            buf_fill(b, round);
            transfer(b, bytes, works);
            OK(MPI_Recv(&answer, 1, MPI_INT, 1, 2, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        } else {
            transfer(b, bytes, works);
            BUF_CHECK(b, round, bytes);
            OK(MPI_Send(&answer, 1, MPI_INT, 0, 2, MPI_COMM_WORLD));
        }
    }
    buf_free(b);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {{"one_after_the_other", one_after_the_other}, {0}};
    return run_cases(argc, argv, cases, MPI_THREAD_SINGLE);
}
