// A job that hangs, for those who look at what it waits for: rank 0 sends what rank 1 never receives.
#include "transfer.h"

static void unanswered(void) {
    size_t n = 3 << 20;
    buf b = buf_new(DEVICE, n, 1);
    for (int i = 0; i < 3; i++) {
        if (me == 0) OK(MPI_Ssend(b.p, n, MPI_BYTE, 1, 5, MPI_COMM_WORLD));
        else OK(MPI_Recv(b.p, n, MPI_BYTE, 0, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    }
    if (me == 0) OK(MPI_Ssend(b.p, n, MPI_BYTE, 1, 77, MPI_COMM_WORLD));
    else OK(MPI_Recv(b.p, n, MPI_BYTE, 0, 78, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
}

static const struct test_case cases[] = {{"unanswered", unanswered}, {0}};
int main(int argc, char **argv) { return run_cases(argc, argv, cases, MPI_THREAD_SINGLE); }
