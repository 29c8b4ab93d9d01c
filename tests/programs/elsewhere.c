// Device memory in calls that are the MPI library's: collectives, windows, files, packing. Without data, so that an MPI library that
// does not know device memory does not touch it.
#include "sim.h"

static void all(void) {
    buf b = buf_new(DEVICE, 4096, 0), c = buf_new(DEVICE, 4096, 0), h = buf_new(HOST, 4096, 0);
    MPI_Request r;
    MPI_Win w;
    MPI_File f;
    MPI_Status s;
    char path[4096];
    int position = 0;
    for (int i = 0; i < 3; i++) {
        OK(MPI_Allreduce(MPI_IN_PLACE, h.p, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD));
        OK(MPI_Alltoall(h.p, 1, MPI_INT, h.p + 1024, 1, MPI_INT, MPI_COMM_WORLD));
        printf("device memory at %p\n", (void *)b.p);
        OK(MPI_Allreduce(b.p, c.p, 0, MPI_INT, MPI_SUM, MPI_COMM_WORLD));
        OK(MPI_Bcast(b.p, 0, MPI_INT, 0, MPI_COMM_WORLD));
        OK(MPI_Allgather(h.p, 0, MPI_INT, b.p, 0, MPI_INT, MPI_COMM_WORLD));
        OK(MPI_Iallreduce(b.p, c.p, 0, MPI_INT, MPI_SUM, MPI_COMM_WORLD, &r));
        OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
        OK(MPI_Win_create(h.p, 4096, 1, MPI_INFO_NULL, MPI_COMM_WORLD, &w));
        OK(MPI_Win_fence(0, w));
        OK(MPI_Put(b.p, 0, MPI_INT, 0, 0, 0, MPI_INT, w));
        OK(MPI_Win_fence(0, w));
        OK(MPI_Win_free(&w));
        OK(MPI_Pack(b.p, 0, MPI_INT, h.p, 100, &position, MPI_COMM_WORLD));
    }
    snprintf(path, sizeof path, "%s/elsewhere.data", getenv("SCRATCH"));
    OK(MPI_File_open(MPI_COMM_WORLD, path, MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &f));
    OK(MPI_File_write_at(f, 0, b.p, 0, MPI_INT, &s));
    OK(MPI_File_read_all(f, b.p, 0, MPI_INT, &s));
    OK(MPI_File_close(&f));
    buf_free(b);
    buf_free(c);
    buf_free(h);
}

static const struct test_case cases[] = {{"all", all}, {0}};
int main(int argc, char **argv) { return run_cases(argc, argv, cases, MPI_THREAD_SINGLE); }
