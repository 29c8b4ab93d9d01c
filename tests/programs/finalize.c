// MPI_Finalize after traffic, most of which nobody received. One mode per run:
//   eager KIND    1 KiB sends that no receive matches     isend KIND    4 MiB, its request freed, never received
//   both KIND     each rank does both to the other        late KIND     receives only long after the sender's last call but Finalize
//   apart KIND    all is received; after long messages both ways, also between host buffers, rank 1 is in MPI_Finalize
//                 long before rank 0
#include "transfer.h"

int main(int argc, char **argv) {
    const char *mode = argc > 1 ? argv[1] : "eager";
    enum kind kind = argc > 2 && !strcmp(argv[2], "host") ? HOST : DEVICE;
    start(&argc, &argv, MPI_THREAD_SINGLE);
    running = mode;
    size_t large = 4 << 20;
    buf small = buf_new(kind, 1024, 1), big = buf_new(kind, large, 3);
    buf_fill(small, 1);
    buf_fill(big, 2);
    MPI_Request r;
    // The sender has seen that its peer uses a device, if it does, so that it may send what is not by value.
    OK(MPI_Sendrecv_replace(small.p, 1024, MPI_BYTE, peer, 1, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    barrier();
    // Both have left the barrier before either sends: MPICH 5 refuses to finalize if it has taken in a message that nobody
    // receives, and a rank still in the barrier would.
    usleep(300000);
    int sends = me == 0 || !strcmp(mode, "both");
    if (sends && (!strcmp(mode, "eager") || !strcmp(mode, "both")))
        for (int i = 0; i < 10; i++) OK(MPI_Send(small.p, 1024, MPI_BYTE, peer, 5, MPI_COMM_WORLD));
    if (sends && (!strcmp(mode, "isend") || !strcmp(mode, "both"))) {
        OK(MPI_Isend(big.p, large, MPI_BYTE, peer, 6, MPI_COMM_WORLD, &r));
        OK(MPI_Request_free(&r));
    }
    if (!strcmp(mode, "late")) {
        if (me == 0) {
            OK(MPI_Isend(big.p, large, MPI_BYTE, peer, 7, MPI_COMM_WORLD, &r));
            OK(MPI_Request_free(&r));
        } else {
            usleep(500000);
            buf_poison(big);
            OK(MPI_Recv(big.p, large, MPI_BYTE, peer, 7, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            BUF_CHECK(big, 2, large);
        }
    }
    if (!strcmp(mode, "apart")) {
        buf host = buf_new(HOST, large, 3), in = buf_new(kind, large, 1);
        int before = peer == me + 1;
        for (int i = 0; i < 4; i++) {
            OK(MPI_Sendrecv(big.p, large, MPI_BYTE, peer, 8, in.p, large, MPI_BYTE, peer, 8, MPI_COMM_WORLD,
                            MPI_STATUS_IGNORE));
            if (before) OK(MPI_Send(host.p, large, MPI_BYTE, peer, 9, MPI_COMM_WORLD));
            OK(MPI_Recv(host.p, large, MPI_BYTE, peer, 9, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            if (!before) OK(MPI_Send(host.p, large, MPI_BYTE, peer, 9, MPI_COMM_WORLD));
        }
        barrier();
        BUF_CHECK(in, 2, large);
        if (me == 0) usleep(200000);
    }
    running = "MPI_Finalize";
    OK(MPI_Finalize());
    if (me == 0) printf("passed 1 cases\n");
    return 0;
}
