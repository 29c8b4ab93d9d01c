// Calls of all kinds in an order that does not depend on what is fast: what a tool notes of them is the same in each run.
#include "transfer.h"

enum { COLUMN = 300 };

static void exchange(size_t n, int round) {
    buf a = buf_new(DEVICE, n, 1), b = buf_new(DEVICE, n, 2);
    MPI_Request r[2];
    MPI_Status s;
    MPI_Message m;
    buf_fill(a, me + round);
    int first = me % 2 == 0;
    if (first) OK(MPI_Send(a.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD));
    OK(MPI_Recv(b.p, n, MPI_BYTE, peer, MPI_ANY_TAG, MPI_COMM_WORLD, &s));
    STATUS_CHECK(&s, peer, 5, n);
    BUF_CHECK(b, peer + round, n);
    if (!first) OK(MPI_Ssend(a.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD));
    buf_poison(b);
    OK(MPI_Irecv(b.p, n, MPI_BYTE, MPI_ANY_SOURCE, 6, MPI_COMM_WORLD, &r[0]));
    OK(MPI_Isend(a.p, n, MPI_BYTE, peer, 6, MPI_COMM_WORLD, &r[1]));
    OK(MPI_Waitall(2, r, MPI_STATUSES_IGNORE));
    BUF_CHECK(b, peer + round, n);
    buf_poison(b);
    OK(MPI_Sendrecv(a.p, n, MPI_BYTE, peer, 7, b.p, n, MPI_BYTE, peer, 7, MPI_COMM_WORLD, &s));
    BUF_CHECK(b, peer + round, n);
    buf_poison(b);
    OK(MPI_Isend(a.p, n, MPI_BYTE, peer, 8, MPI_COMM_WORLD, &r[1]));
    OK(MPI_Mprobe(peer, 8, MPI_COMM_WORLD, &m, &s));
    STATUS_CHECK(&s, peer, 8, n);
    OK(MPI_Mrecv(b.p, n, MPI_BYTE, &m, &s));
    OK(MPI_Wait(&r[1], MPI_STATUS_IGNORE));
    BUF_CHECK(b, peer + round, n);
    OK(MPI_Send_init(a.p, n, MPI_BYTE, peer, 9, MPI_COMM_WORLD, &r[0]));
    OK(MPI_Recv_init(b.p, n, MPI_BYTE, peer, 9, MPI_COMM_WORLD, &r[1]));
    for (int i = 0; i < 2; i++) {
        buf_poison(b);
        OK(MPI_Startall(2, r));
        OK(MPI_Waitall(2, r, MPI_STATUSES_IGNORE));
        BUF_CHECK(b, peer + round, n);
    }
    for (int i = 0; i < 2; i++) OK(MPI_Request_free(&r[i]));
    buf_free(a);
    buf_free(b);
}

static void all(void) {
    size_t sizes[] = {0, 7, 61, 5000, 100001, 3 << 20};
    for (int i = 0; i < 6; i++) exchange(sizes[i], i);
    MPI_Comm c, d;
    MPI_Datatype column;
    int sum, one = 1;
    OK(MPI_Comm_dup(MPI_COMM_WORLD, &c));
    OK(MPI_Comm_split(c, me / 2, me, &d));
    OK(MPI_Barrier(d));
    OK(MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, c));
    EQUAL(sum, ranks);
    OK(MPI_Bcast(&one, 1, MPI_INT, 0, d));
    OK(MPI_Type_vector(COLUMN, 1, 40, MPI_DOUBLE, &column));
    OK(MPI_Type_commit(&column));
    buf a = buf_new(DEVICE, COLUMN * 320, 8), b = buf_new(DEVICE, COLUMN * 8, 8);
    if (me % 2) OK(MPI_Recv(b.p, COLUMN, MPI_DOUBLE, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    else OK(MPI_Send(a.p, 1, column, peer, 1, MPI_COMM_WORLD));
    OK(MPI_Type_free(&column));
    buf_free(a);
    buf_free(b);
    OK(MPI_Comm_free(&d));
    OK(MPI_Comm_free(&c));
}

static const struct test_case cases[] = {{"all", all}, {0}};
int main(int argc, char **argv) { return run_cases(argc, argv, cases, MPI_THREAD_SINGLE); }
