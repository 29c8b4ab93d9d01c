/* A tool inside the executable: its MPI_Wait hides that of a preloaded library and calls PMPI_Wait. Prints "ok". */
#include <mpi.h>
#include <stdio.h>

static int waits;

int MPI_Wait(MPI_Request *request, MPI_Status *status) {
    ++waits;
    return PMPI_Wait(request, status);
}

int main(int argc, char **argv) {
    MPI_Request request;
    int value = 1, got = 0;
    MPI_Init(&argc, &argv);
    MPI_Irecv(&got, 1, MPI_INT, 0, 5, MPI_COMM_SELF, &request);
    MPI_Send(&value, 1, MPI_INT, 0, 5, MPI_COMM_SELF);
    MPI_Wait(&request, MPI_STATUS_IGNORE);
    if (got == 1 && waits == 1) puts("ok");
    MPI_Finalize();
    return 0;
}
