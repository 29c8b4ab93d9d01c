// A job that spawns another: messages between the two, within the new one, and within the old one.
#include "transfer.h"

static void exchange(MPI_Comm comm, int other, int seed_out, int seed_in) {
    size_t sizes[] = {5, 61, 5000, 100001};
    FOR_PAIRS(out, in)
        for (int i = 0; i < 4; i++) {
            buf a = buf_new(out, sizes[i], 1), b = buf_new(in, sizes[i], 2);
            MPI_Request r[2];
            buf_fill(a, seed_out);
            OK(MPI_Irecv(b.p, sizes[i], MPI_BYTE, other, 1, comm, &r[0]));
            OK(MPI_Isend(a.p, sizes[i], MPI_BYTE, other, 1, comm, &r[1]));
            OK(MPI_Waitall(2, r, MPI_STATUSES_IGNORE));
            BUF_CHECK(b, seed_in, sizes[i]);
            buf_free(a);
            buf_free(b);
        }
}

// Sends that have completed arrive, though their ranks wait for those of the other job from then on. They are the first from
// each rank to its receiver, which comes late.
static void on_their_way(MPI_Comm all, int rank, int half, int sends) {
    int other = sends ? half + (rank + 1) % half : (rank - 1) % half;
    for (size_t n = 61; n < 16384; n = n * 3 + 1) {
        buf b = buf_new(DEVICE, n, 1);
        if (sends) {
            buf_fill(b, n);
            OK(MPI_Sendrecv(b.p, n, MPI_BYTE, other, 7, NULL, 0, MPI_BYTE, MPI_PROC_NULL, 7, all, MPI_STATUS_IGNORE));
        } else {
            if (n == 61) usleep(300000);
            OK(MPI_Recv(b.p, n, MPI_BYTE, other, 7, all, MPI_STATUS_IGNORE));
            BUF_CHECK(b, n, n);
        }
        buf_free(b);
    }
}

int main(int argc, char **argv) {
    start(&argc, &argv, MPI_THREAD_SINGLE);
    running = "spawn";
    MPI_Comm parent, children, all;
    int rank;
    OK(MPI_Comm_get_parent(&parent));
    if (parent == MPI_COMM_NULL) {
        OK(MPI_Comm_spawn(argv[0], MPI_ARGV_NULL, ranks, MPI_INFO_NULL, 0, MPI_COMM_WORLD, &children, MPI_ERRCODES_IGNORE));
        exchange(children, me, 100 + me, 200 + me);
        exchange(MPI_COMM_WORLD, peer, me, peer);
        OK(MPI_Intercomm_merge(children, 0, &all));
    } else {
        exchange(parent, me, 200 + me, 100 + me);
        exchange(MPI_COMM_WORLD, peer, 300 + me, 300 + peer);
        OK(MPI_Intercomm_merge(parent, 1, &all));
        children = parent;
    }
    OK(MPI_Comm_rank(all, &rank));
    exchange(all, rank ^ 1, rank, rank ^ 1);
    int size;
    OK(MPI_Comm_size(all, &size));
    on_their_way(all, rank, size / 2, parent == MPI_COMM_NULL);
    OK(MPI_Comm_disconnect(&children));
    // MPICH 5.0.2 ends a rank whose message is not there yet.
    OK(MPI_Barrier(all));
    OK(MPI_Comm_free(&all));
    if (me == 0 && parent == MPI_COMM_NULL) printf("passed 1 cases\n");
    OK(MPI_Finalize());
    return 0;
}
