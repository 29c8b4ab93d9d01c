// p2p with a tool in the executable, as linked profilers are: its functions hide those of a preloaded library and call on by
// their PMPI_ names.
#include "p2p.c"

static int sends, receives, exchanges, waits;

int MPI_Isend(const void *p, int n, MPI_Datatype type, int to, int tag, MPI_Comm comm, MPI_Request *request) {
    sends++;
    return PMPI_Isend(p, n, type, to, tag, comm, request);
}

int MPI_Irecv(void *p, int n, MPI_Datatype type, int from, int tag, MPI_Comm comm, MPI_Request *request) {
    receives++;
    return PMPI_Irecv(p, n, type, from, tag, comm, request);
}

int MPI_Sendrecv(const void *out, int n, MPI_Datatype type, int to, int tag, void *in, int m, MPI_Datatype into, int from, int mark,
                 MPI_Comm comm, MPI_Status *status) {
    exchanges++;
    return PMPI_Sendrecv(out, n, type, to, tag, in, m, into, from, mark, comm, status);
}

int MPI_Waitall(int n, MPI_Request *requests, MPI_Status *statuses) {
    waits++;
    return PMPI_Waitall(n, requests, statuses);
}

// What the cases `ring` and `pieces` call.
int MPI_Finalize(void) {
    EQUAL(sends, me % 2 ? 0 : 64);
    EQUAL(receives, me % 2 ? 64 : 0);
    EQUAL(exchanges, 20);
    EQUAL(waits, 1);
    return PMPI_Finalize();
}
