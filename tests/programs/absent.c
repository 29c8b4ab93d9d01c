// Messages over an MPI library or a driver that lacks the function $HIDE names: every way to send against every way to receive
// that does without it, as no program calls what its MPI library lacks. Rank 0 says how many messages left a device.
#include "sim.h"

static int has(const char *name) {
    const char *hidden = getenv("HIDE");
    return !hidden || strncmp(hidden, "PMPI", 4) || strcmp(hidden + 1, name);
}

enum out { SEND, SSEND, ISEND, ISSEND, BSEND, IBSEND, PERSISTENT_OUT, SENDRECV_OUT, OUTS };
enum in { RECV, IRECV, PROBE, IPROBE, MPROBE, IMPROBE, PERSISTENT_IN, SENDRECV_IN, INS };
enum { NEEDED = 3 };
static const char *const out_needs[OUTS][NEEDED] = {
    {"MPI_Send"}, {"MPI_Ssend"}, {"MPI_Isend"}, {"MPI_Issend"}, {"MPI_Bsend", "MPI_Buffer_detach"}, {"MPI_Ibsend", "MPI_Buffer_detach"},
    {"MPI_Send_init", "MPI_Start", "MPI_Request_free"}, {"MPI_Sendrecv"}};
static const char *const in_needs[INS][NEEDED] = {
    {"MPI_Recv"}, {"MPI_Irecv"}, {"MPI_Probe", "MPI_Recv"}, {"MPI_Iprobe", "MPI_Irecv"}, {"MPI_Mprobe", "MPI_Mrecv"},
    {"MPI_Improbe", "MPI_Imrecv"}, {"MPI_Recv_init", "MPI_Start", "MPI_Request_free"}, {"MPI_Sendrecv"}};

static int can(const char *const needs[NEEDED]) {
    for (int i = 0; i < NEEDED && needs[i]; i++) if (!has(needs[i])) return 0;
    return 1;
}

static void complete(MPI_Request *request, MPI_Status *status) {
    int done = 0;
    if (has("MPI_Wait")) OK(MPI_Wait(request, status));
    else while (!done) OK(MPI_Test(request, &done, status));
}

static void all_here(void) {
    int one = 1, sum = 0;
    if (has("MPI_Barrier")) OK(MPI_Barrier(MPI_COMM_WORLD));
    else OK(MPI_Allreduce(&one, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD));
}

static void out(enum out way, const void *p, int n, MPI_Datatype type, int tag) {
    MPI_Request r = MPI_REQUEST_NULL;
    MPI_Comm comm = MPI_COMM_WORLD;
    switch (way) {
    case SEND: OK(MPI_Send(p, n, type, peer, tag, comm)); break;
    case SSEND: OK(MPI_Ssend(p, n, type, peer, tag, comm)); break;
    case ISEND: OK(MPI_Isend(p, n, type, peer, tag, comm, &r)); break;
    case ISSEND: OK(MPI_Issend(p, n, type, peer, tag, comm, &r)); break;
    case BSEND: OK(MPI_Bsend(p, n, type, peer, tag, comm)); break;
    case IBSEND: OK(MPI_Ibsend(p, n, type, peer, tag, comm, &r)); break;
    case PERSISTENT_OUT: OK(MPI_Send_init(p, n, type, peer, tag, comm, &r)); OK(MPI_Start(&r)); break;
    case SENDRECV_OUT:
        OK(MPI_Sendrecv(p, n, type, peer, tag, NULL, 0, MPI_BYTE, MPI_PROC_NULL, 0, comm, MPI_STATUS_IGNORE));
        break;
    default: FAIL("no such way");
    }
    complete(&r, MPI_STATUS_IGNORE);
    if (way == PERSISTENT_OUT) OK(MPI_Request_free(&r));
}

static void in(enum in way, void *p, int room, int n, MPI_Datatype type, int tag, MPI_Status *s) {
    MPI_Request r = MPI_REQUEST_NULL;
    MPI_Message m;
    MPI_Status probed;
    MPI_Comm comm = MPI_COMM_WORLD;
    int flag = 0, from = tag % 2 ? peer : MPI_ANY_SOURCE;
    memset(s, 0, sizeof *s);
    switch (way) {
    case RECV: OK(MPI_Recv(p, room, type, from, tag, comm, s)); break;
    case IRECV: OK(MPI_Irecv(p, room, type, from, tag, comm, &r)); break;
    case PROBE:
        OK(MPI_Probe(from, tag, comm, &probed));
        STATUS_CHECK(&probed, peer, tag, n);
        OK(MPI_Recv(p, room, type, from, tag, comm, s));
        break;
    case IPROBE:
        while (!flag) OK(MPI_Iprobe(from, tag, comm, &flag, &probed));
        STATUS_CHECK(&probed, peer, tag, n);
        OK(MPI_Irecv(p, room, type, from, tag, comm, &r));
        break;
    case MPROBE: OK(MPI_Mprobe(from, tag, comm, &m, &probed)); OK(MPI_Mrecv(p, room, type, &m, s)); break;
    case IMPROBE:
        while (!flag) OK(MPI_Improbe(from, tag, comm, &flag, &m, &probed));
        STATUS_CHECK(&probed, peer, tag, n);
        OK(MPI_Imrecv(p, room, type, &m, &r));
        break;
    case PERSISTENT_IN: OK(MPI_Recv_init(p, room, type, from, tag, comm, &r)); OK(MPI_Start(&r)); break;
    case SENDRECV_IN:
        OK(MPI_Sendrecv(NULL, 0, MPI_BYTE, MPI_PROC_NULL, 0, p, room, type, from, tag, comm, s));
        break;
    default: FAIL("no such way");
    }
    if (r != MPI_REQUEST_NULL) complete(&r, s);
    if (way == PERSISTENT_IN) OK(MPI_Request_free(&r));
    STATUS_CHECK(s, peer, tag, n);
}

static int from_devices, in_all;

// One message, of which each pair of ways has some: by turns in either direction, short and long, between devices and the host.
static void message(enum out outward, enum in inward) {
    static const size_t sizes[] = {5000, 61, 150001, 16384, 1, 400000, 70001};
    int number = in_all++, tag = 100 + number;
    size_t n = sizes[number % 7];
    enum kind from = number % 11 != 3, to = number % 13 != 5;
    MPI_Status s;
    from_devices += from == DEVICE;
    if (me == number % 2) {
        buf b = buf_new(from, n, number % 5);
        buf_fill(b, number);
        out(outward, b.p, n, MPI_BYTE, tag);
        BUF_CHECK(b, number, n);
        buf_free(b);
    } else {
        buf b = buf_new(to, n + 100, number % 3);
        in(inward, b.p, n + 100, n, MPI_BYTE, tag, &s);
        BUF_CHECK(b, number, n);
        buf_free(b);
    }
}

// Of every 48 bytes of a device 16: the gaps stay as they were.
static void with_gaps(void) {
    enum { ROWS = 2000, ROW = 48, PART = 16 };
    MPI_Datatype type;
    MPI_Status s;
    unsigned char *host = scratch(ROWS * ROW), *data = scratch(ROWS * PART);
    int tag = 100 + in_all++;
    from_devices++;
    OK(MPI_Type_vector(ROWS, PART, ROW, MPI_BYTE, &type));
    OK(MPI_Type_commit(&type));
    buf b = buf_new(DEVICE, ROWS * ROW, 0);
    pattern(data, ROWS * PART, 99);
    memset(host, 0x77, ROWS * ROW);
    for (int i = 0; i < ROWS && me == 0; i++) memcpy(host + i * ROW, data + i * PART, PART);
    memory_put(DEVICE, b.p, host, ROWS * ROW);
    if (me == 0) out(has("MPI_Send") ? SEND : ISEND, b.p, 1, type, tag);
    else in(has("MPI_Recv") ? RECV : IRECV, b.p, 1, ROWS * PART, type, tag, &s);
    memory_get(DEVICE, host, b.p, ROWS * ROW);
    for (int i = 0; i < ROWS; i++)
        for (int k = 0; k < ROW && (k < PART || i < ROWS - 1); k++)
            EQUAL(host[i * ROW + k], k < PART ? data[i * PART + k] : 0x77);
    if (has("MPI_Type_free")) OK(MPI_Type_free(&type));
    buf_free(b);
    free(host);
    free(data);
}

int main(int argc, char **argv) {
    int provided;
    signal(SIGALRM, on_alarm);
    alarm(number_from("WATCHDOG", 60));
    if (has("MPI_Init")) OK(MPI_Init(&argc, &argv));
    else OK(MPI_Init_thread(&argc, &argv, MPI_THREAD_SINGLE, &provided));
    OK(MPI_Comm_rank(MPI_COMM_WORLD, &me));
    peer = 1 - me;
    device_start(me);
    running = "messages";
    int buffered = has("MPI_Buffer_detach") && has("MPI_Buffer_attach"), size;
    void *attached = scratch(8 << 20);
    if (buffered) OK(MPI_Buffer_attach(attached, 8 << 20));
    all_here();
    for (int o = 0; o < OUTS; o++)
        for (int i = 0; i < INS; i++)
            if (can(out_needs[o]) && can(in_needs[i]) && (buffered || (o != BSEND && o != IBSEND))) message(o, i);
    with_gaps();
    all_here();
    if (buffered) OK(MPI_Buffer_detach(&attached, &size));
    if (me == 0) { printf("messages %d\nfrom devices %d\npassed 1 cases\n", in_all, from_devices); fflush(stdout); }
    running = "MPI_Finalize";
    OK(MPI_Finalize());
    return 0;
}
