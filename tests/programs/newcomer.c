// Rank $LATE is late to leave MPI_Init. The other rank leaves it before, and receives on a device at once. Then messages go
// both ways.
#include "sim.h"

int main(int argc, char **argv) {
    enum { BYTES = 70001, ROUNDS = 20, TAG = 3 };
    start(&argc, &argv, MPI_THREAD_SINGLE);
    int early = me != number_from("LATE", 0);
    buf b = buf_new(DEVICE, BYTES, 5);
    for (int message = 0; message < 2 * ROUNDS; message++) {
        MPI_Status s;
        if (early == (message % 2 == 0)) {
            OK(MPI_Recv(b.p, BYTES, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, &s));
            STATUS_CHECK(&s, peer, TAG, BYTES);
            BUF_CHECK(b, message, BYTES);
        } else {
            buf_fill(b, message);
            OK(MPI_Send(b.p, BYTES, MPI_BYTE, peer, TAG, MPI_COMM_WORLD));
        }
    }
    buf_free(b);
    return finish(1);
}
