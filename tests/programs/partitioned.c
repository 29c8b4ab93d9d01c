// Partitioned communication (MPI 4.1 chapter 4), which the MPI library carries out: its sends match its receives alone.
#include "sim.h"

// Open MPI has no such functions before version 5, and only MPICH 5 has the last.
#pragma weak MPI_Psend_init
#pragma weak MPI_Precv_init
#pragma weak MPI_Pready
#pragma weak MPI_Parrived
#pragma weak MPI_Buffer_flush
int MPI_Buffer_flush(void);
#if MPI_VERSION < 4
int MPI_Psend_init(const void *, int, MPI_Count, MPI_Datatype, int, int, MPI_Comm, MPI_Info, MPI_Request *);
int MPI_Precv_init(void *, int, MPI_Count, MPI_Datatype, int, int, MPI_Comm, MPI_Info, MPI_Request *);
int MPI_Pready(int, MPI_Request);
int MPI_Parrived(MPI_Request, int, int *);
#endif

enum { PARTS = 4, ITEMS = 1001, BYTES = PARTS * ITEMS * (int)sizeof(int), LARGE = (1 << 20) + 7 };

// Ends a partitioned send that has been started.
static void made_ready(MPI_Request *request) {
    for (int i = PARTS - 1; i >= 0; i--) OK(MPI_Pready(i, *request));
    OK(MPI_Wait(request, MPI_STATUS_IGNORE));
}

// Rank 0 sends five times by one request, from where the caller says, and rank 1 receives into host memory.
static void five_times(enum kind from) {
    buf b = buf_new(me ? HOST : from, BYTES, 3);
    MPI_Request r;
    if (me == 0) OK(MPI_Psend_init(b.p, PARTS, ITEMS, MPI_INT, 1, 7, MPI_COMM_WORLD, MPI_INFO_NULL, &r));
    else OK(MPI_Precv_init(b.p, PARTS, ITEMS, MPI_INT, 0, 7, MPI_COMM_WORLD, MPI_INFO_NULL, &r));
    for (int i = 0; i < 5; i++) {
        if (me == 0) buf_fill(b, 100 + i);
        else buf_poison(b);
        if (i % 2) OK(MPI_Startall(1, &r));
        else OK(MPI_Start(&r));
        if (me == 0) made_ready(&r);
        else { OK(MPI_Wait(&r, MPI_STATUS_IGNORE)); BUF_CHECK(b, 100 + i, BYTES); }
    }
    OK(MPI_Request_free(&r));
    buf_free(b);
}

static void from_device(void) { five_times(DEVICE); }
static void from_host(void) { five_times(HOST); }

// What comes after a request was freed has its handle, perhaps, but is no partitioned send. Its tag is another: Open MPI
// makes partitioned requests known to each other by messages with theirs.
static void freed(void) {
    buf b = buf_new(me ? HOST : DEVICE, BYTES, 0), other = buf_new(HOST, BYTES, 0);
    for (int i = 0; i < 20; i++) {
        MPI_Request r;
        if (me == 0) {
            OK(MPI_Psend_init(b.p, PARTS, ITEMS, MPI_INT, 1, 8, MPI_COMM_WORLD, MPI_INFO_NULL, &r));
            OK(MPI_Request_free(&r));
            buf_fill(other, i);
            OK(MPI_Send_init(other.p, BYTES, MPI_BYTE, 1, 9, MPI_COMM_WORLD, &r));
            OK(MPI_Start(&r));
            OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
        } else {
            OK(MPI_Precv_init(b.p, PARTS, ITEMS, MPI_INT, 0, 8, MPI_COMM_WORLD, MPI_INFO_NULL, &r));
            OK(MPI_Request_free(&r));
            OK(MPI_Recv_init(other.p, BYTES, MPI_BYTE, 0, 9, MPI_COMM_WORLD, &r));
            OK(MPI_Start(&r));
            OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
            BUF_CHECK(other, i, BYTES);
        }
        OK(MPI_Request_free(&r));
    }
    buf_free(b);
    buf_free(other);
}

// Both use the device, so that descriptors may come.
static void meet_devices(void) {
    for (int i = 0; i < 2; i++) {
        buf b = buf_new(DEVICE, 1, 0);
        OK(MPI_Sendrecv_replace(b.p, 1, MPI_BYTE, peer, 0, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        buf_free(b);
        barrier();
    }
}

// Rank 0 waits for its buffered message to leave, which rank 1 receives once its own long one is received.
static void flushing(void) {
    meet_devices();
    static char room[LARGE + 1000];
    buf b = buf_new(DEVICE, LARGE, 5), host = buf_new(HOST, LARGE, 1);
    MPI_Request r;
    if (me == 0) {
        void *back;
        int bytes;
        OK(MPI_Irecv(b.p, LARGE, MPI_BYTE, 1, 1, MPI_COMM_WORLD, &r));
        OK(MPI_Buffer_attach(room, sizeof room));
        buf_fill(host, 6);
        OK(MPI_Bsend(host.p, LARGE, MPI_BYTE, 1, 3, MPI_COMM_WORLD));
        OK(MPI_Buffer_flush());
        OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
        BUF_CHECK(b, 5, LARGE);
        OK(MPI_Buffer_detach(&back, &bytes));
    } else {
        buf_fill(b, 5);
        OK(MPI_Ssend(b.p, LARGE, MPI_BYTE, 0, 1, MPI_COMM_WORLD));
        OK(MPI_Recv(host.p, LARGE, MPI_BYTE, 0, 3, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        BUF_CHECK(host, 6, LARGE);
    }
    buf_free(b);
    buf_free(host);
}

// Rank 0 does nothing but look for a partition that rank 1 makes ready once its long message is received.
static void spinning(void) {
    meet_devices();
    buf b = buf_new(DEVICE, LARGE, 5);
    int token = me;
    MPI_Request r, p;
    if (me == 0) {
        OK(MPI_Irecv(b.p, LARGE, MPI_BYTE, 1, 1, MPI_COMM_WORLD, &r));
        OK(MPI_Precv_init(&token, 1, 1, MPI_INT, 1, 2, MPI_COMM_WORLD, MPI_INFO_NULL, &p));
        OK(MPI_Start(&p));
        for (int there = 0; !there;) OK(MPI_Parrived(p, 0, &there));
        OK(MPI_Wait(&p, MPI_STATUS_IGNORE));
        EQUAL(token, 1);
        OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
        BUF_CHECK(b, 5, LARGE);
    } else {
        buf_fill(b, 5);
        OK(MPI_Psend_init(&token, 1, 1, MPI_INT, 0, 2, MPI_COMM_WORLD, MPI_INFO_NULL, &p));
        OK(MPI_Start(&p));
        OK(MPI_Ssend(b.p, LARGE, MPI_BYTE, 0, 1, MPI_COMM_WORLD));
        OK(MPI_Pready(0, p));
        OK(MPI_Wait(&p, MPI_STATUS_IGNORE));
    }
    OK(MPI_Request_free(&p));
    buf_free(b);
}

static const struct test_case cases[] = {
    {"from_device", from_device}, {"from_host", from_host}, {"freed", freed}, {"spinning", spinning},
    {"flushing", flushing}, {0},
};
int main(int argc, char **argv) { return run_cases(argc, argv, cases, MPI_THREAD_SINGLE); }
