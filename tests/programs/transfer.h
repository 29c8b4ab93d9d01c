// Every way to send a message and every way to receive one, by number.
#ifndef TRANSFER_H
#define TRANSFER_H
#include "sim.h"

// What takes a large count comes last.
#define SEND_WAYS(X) X(SEND) X(SSEND) X(BSEND) X(RSEND) X(ISEND) X(ISSEND) X(IBSEND) X(IRSEND) X(SENDRECV_OUT) \
    X(SEND_INIT) X(SSEND_INIT) X(BSEND_INIT) X(RSEND_INIT) \
    X(SEND_C) X(SSEND_C) X(BSEND_C) X(RSEND_C) X(ISEND_C) X(ISSEND_C) X(IBSEND_C) X(IRSEND_C) \
    X(SEND_INIT_C) X(SSEND_INIT_C) X(BSEND_INIT_C) X(RSEND_INIT_C)
#define RECEIVE_WAYS(X) X(RECV) X(IRECV_WAIT) X(IRECV_TEST) X(PROBE_RECV) X(IPROBE_RECV) X(MPROBE_MRECV) X(MPROBE_IMRECV) \
    X(IMPROBE_MRECV) X(SENDRECV_IN) X(RECV_INIT) \
    X(RECV_C) X(IRECV_C) X(MRECV_C) X(IMRECV_C) X(RECV_INIT_C)

#define ENUM(name) name,
#define NAME(name) #name,
enum send_way { SEND_WAYS(ENUM) SEND_WAY_COUNT };
enum receive_way { RECEIVE_WAYS(ENUM) RECEIVE_WAY_COUNT };
static const char *const send_way_name[] = {SEND_WAYS(NAME)};
static const char *const receive_way_name[] = {RECEIVE_WAYS(NAME)};

// The functions of MPI 4, where the library has them, or the preloaded one in its place.
#define LARGE_SENDS(X) X(MPI_Send_c) X(MPI_Ssend_c) X(MPI_Bsend_c) X(MPI_Rsend_c)
#define LARGE_ISENDS(X) X(MPI_Isend_c) X(MPI_Issend_c) X(MPI_Ibsend_c) X(MPI_Irsend_c) X(MPI_Send_init_c) X(MPI_Ssend_init_c) \
    X(MPI_Bsend_init_c) X(MPI_Rsend_init_c)
#if MPI_VERSION < 4 || defined(OPEN_MPI)
#define DECLARE_SEND(name) int name(const void *, MPI_Count, MPI_Datatype, int, int, MPI_Comm);
#define DECLARE_ISEND(name) int name(const void *, MPI_Count, MPI_Datatype, int, int, MPI_Comm, MPI_Request *);
LARGE_SENDS(DECLARE_SEND)
LARGE_ISENDS(DECLARE_ISEND)
int MPI_Recv_c(void *, MPI_Count, MPI_Datatype, int, int, MPI_Comm, MPI_Status *);
int MPI_Irecv_c(void *, MPI_Count, MPI_Datatype, int, int, MPI_Comm, MPI_Request *);
int MPI_Recv_init_c(void *, MPI_Count, MPI_Datatype, int, int, MPI_Comm, MPI_Request *);
int MPI_Mrecv_c(void *, MPI_Count, MPI_Datatype, MPI_Message *, MPI_Status *);
int MPI_Imrecv_c(void *, MPI_Count, MPI_Datatype, MPI_Message *, MPI_Request *);
int MPI_Sendrecv_c(const void *, MPI_Count, MPI_Datatype, int, int, void *, MPI_Count, MPI_Datatype, int, int, MPI_Comm, MPI_Status *);
int MPI_Sendrecv_replace_c(void *, MPI_Count, MPI_Datatype, int, int, int, int, MPI_Comm, MPI_Status *);
int MPI_Isendrecv(const void *, int, MPI_Datatype, int, int, void *, int, MPI_Datatype, int, int, MPI_Comm, MPI_Request *);
int MPI_Isendrecv_c(const void *, MPI_Count, MPI_Datatype, int, int, void *, MPI_Count, MPI_Datatype, int, int, MPI_Comm, MPI_Request *);
int MPI_Isendrecv_replace(void *, int, MPI_Datatype, int, int, int, int, MPI_Comm, MPI_Request *);
int MPI_Isendrecv_replace_c(void *, MPI_Count, MPI_Datatype, int, int, int, int, MPI_Comm, MPI_Request *);
int MPI_Info_create_env(int, char **, MPI_Info *);
#endif
#define WEAK(name) WEAKLY(weak name)
#define WEAKLY(words) _Pragma(#words)
LARGE_SENDS(WEAK)
LARGE_ISENDS(WEAK)
#pragma weak MPI_Recv_c
#pragma weak MPI_Irecv_c
#pragma weak MPI_Recv_init_c
#pragma weak MPI_Mrecv_c
#pragma weak MPI_Imrecv_c
#pragma weak MPI_Sendrecv_c
#pragma weak MPI_Sendrecv_replace_c
#pragma weak MPI_Isendrecv
#pragma weak MPI_Isendrecv_c
#pragma weak MPI_Isendrecv_replace
#pragma weak MPI_Isendrecv_replace_c
#pragma weak MPI_Info_create_env

// Whether every rank has the functions with large counts; the preloaded library has them all, and a rank may be without it.
// To be asked by all ranks together.
static int large_counts;
static void look_for_large_counts(void) {
    int here = MPI_Send_c != NULL;
    OK(MPI_Allreduce(&here, &large_counts, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD));
}

// Whether the library has what came with MPI 4.0: what the preloaded one exports it may lack, but this nobody intercepts.
static int has_isendrecv(void) { return MPI_Info_create_env != NULL; }

enum { TAG_READY = 32000, TAG_SIDE = 32001 }; // beside the message: "the receive is posted", the other half of a Sendrecv

static int is_ready_send(enum send_way way) {
    return way == RSEND || way == IRSEND || way == RSEND_INIT || way == RSEND_C || way == IRSEND_C || way == RSEND_INIT_C;
}

static int posts_first(enum receive_way way) {
    return way == IRECV_WAIT || way == IRECV_TEST || way == RECV_INIT || way == IRECV_C || way == RECV_INIT_C;
}

// A ready send needs a receive that is posted before. What takes a large count differs in the call alone: it meets its like
// and one other.
static int may_meet(enum send_way out, enum receive_way in) {
    int large_out = out >= SEND_C, large_in = in >= RECV_C;
    if ((large_out || large_in) && !large_counts) return 0;
    if (large_out != large_in && out != SEND && in != IRECV_WAIT) return 0;
    return !is_ready_send(out) || posts_first(in);
}

static void wait_one(MPI_Request *request) { OK(MPI_Wait(request, MPI_STATUS_IGNORE)); }

static void run_persistent(MPI_Request *request) {
    OK(MPI_Start(request));
    OK(MPI_Wait(request, MPI_STATUS_IGNORE));
    CHECK(*request != MPI_REQUEST_NULL, "a persistent request stays");
    OK(MPI_Request_free(request));
}

static void transfer_send(enum send_way way, const void *p, size_t n, int to, int tag, MPI_Comm comm) {
    MPI_Request r;
    char side = 's', back;
    if (is_ready_send(way)) OK(MPI_Recv(NULL, 0, MPI_BYTE, to, TAG_READY, comm, MPI_STATUS_IGNORE));
    switch (way) {
    case SEND: OK(MPI_Send(p, n, MPI_BYTE, to, tag, comm)); break;
    case SSEND: OK(MPI_Ssend(p, n, MPI_BYTE, to, tag, comm)); break;
    case BSEND: OK(MPI_Bsend(p, n, MPI_BYTE, to, tag, comm)); break;
    case RSEND: OK(MPI_Rsend(p, n, MPI_BYTE, to, tag, comm)); break;
    case ISEND: OK(MPI_Isend(p, n, MPI_BYTE, to, tag, comm, &r)); wait_one(&r); break;
    case ISSEND: OK(MPI_Issend(p, n, MPI_BYTE, to, tag, comm, &r)); wait_one(&r); break;
    case IBSEND: OK(MPI_Ibsend(p, n, MPI_BYTE, to, tag, comm, &r)); wait_one(&r); break;
    case IRSEND: OK(MPI_Irsend(p, n, MPI_BYTE, to, tag, comm, &r)); wait_one(&r); break;
    case SENDRECV_OUT:
        OK(MPI_Sendrecv(p, n, MPI_BYTE, to, tag, &back, 1, MPI_BYTE, to, TAG_SIDE, comm, MPI_STATUS_IGNORE));
        EQUAL(back, side);
        break;
    case SEND_INIT: OK(MPI_Send_init(p, n, MPI_BYTE, to, tag, comm, &r)); run_persistent(&r); break;
    case SSEND_INIT: OK(MPI_Ssend_init(p, n, MPI_BYTE, to, tag, comm, &r)); run_persistent(&r); break;
    case BSEND_INIT: OK(MPI_Bsend_init(p, n, MPI_BYTE, to, tag, comm, &r)); run_persistent(&r); break;
    case RSEND_INIT: OK(MPI_Rsend_init(p, n, MPI_BYTE, to, tag, comm, &r)); run_persistent(&r); break;
    case SEND_C: OK(MPI_Send_c(p, n, MPI_BYTE, to, tag, comm)); break;
    case SSEND_C: OK(MPI_Ssend_c(p, n, MPI_BYTE, to, tag, comm)); break;
    case BSEND_C: OK(MPI_Bsend_c(p, n, MPI_BYTE, to, tag, comm)); break;
    case RSEND_C: OK(MPI_Rsend_c(p, n, MPI_BYTE, to, tag, comm)); break;
    case ISEND_C: OK(MPI_Isend_c(p, n, MPI_BYTE, to, tag, comm, &r)); wait_one(&r); break;
    case ISSEND_C: OK(MPI_Issend_c(p, n, MPI_BYTE, to, tag, comm, &r)); wait_one(&r); break;
    case IBSEND_C: OK(MPI_Ibsend_c(p, n, MPI_BYTE, to, tag, comm, &r)); wait_one(&r); break;
    case IRSEND_C: OK(MPI_Irsend_c(p, n, MPI_BYTE, to, tag, comm, &r)); wait_one(&r); break;
    case SEND_INIT_C: OK(MPI_Send_init_c(p, n, MPI_BYTE, to, tag, comm, &r)); run_persistent(&r); break;
    case SSEND_INIT_C: OK(MPI_Ssend_init_c(p, n, MPI_BYTE, to, tag, comm, &r)); run_persistent(&r); break;
    case BSEND_INIT_C: OK(MPI_Bsend_init_c(p, n, MPI_BYTE, to, tag, comm, &r)); run_persistent(&r); break;
    case RSEND_INIT_C: OK(MPI_Rsend_init_c(p, n, MPI_BYTE, to, tag, comm, &r)); run_persistent(&r); break;
    default: FAIL("no such way to send");
    }
}

// Receives a message of n bytes into a buffer of `room` bytes. `out` says how it is sent, for what goes beside it.
static void transfer_receive(enum receive_way way, enum send_way out, void *p, size_t room, size_t n, int from, int tag, MPI_Comm comm,
                             MPI_Status *status) {
    MPI_Request r = MPI_REQUEST_NULL;
    MPI_Message m;
    MPI_Status probed;
    int flag = 0, count;
    char side = 's';
    MPI_Request beside = MPI_REQUEST_NULL;
    if (out == SENDRECV_OUT && way != SENDRECV_IN) OK(MPI_Isend(&side, 1, MPI_BYTE, from, TAG_SIDE, comm, &beside));
    memset(&probed, 0, sizeof probed);
    switch (way) {
    case RECV_C: OK(MPI_Recv_c(p, room, MPI_BYTE, from, tag, comm, status)); break;
    case RECV: OK(MPI_Recv(p, room, MPI_BYTE, from, tag, comm, status)); break;
    case IRECV_C:
    case IRECV_WAIT:
    case IRECV_TEST:
        if (way == IRECV_C) OK(MPI_Irecv_c(p, room, MPI_BYTE, from, tag, comm, &r));
        else OK(MPI_Irecv(p, room, MPI_BYTE, from, tag, comm, &r));
        if (is_ready_send(out)) OK(MPI_Send(NULL, 0, MPI_BYTE, from, TAG_READY, comm));
        if (way != IRECV_TEST) OK(MPI_Wait(&r, status));
        else while (!flag) OK(MPI_Test(&r, &flag, status));
        CHECK(r == MPI_REQUEST_NULL, "a completed request is null");
        break;
    case PROBE_RECV:
        OK(MPI_Probe(from, tag, comm, &probed));
        STATUS_CHECK(&probed, from, tag, n);
        OK(MPI_Recv(p, n, MPI_BYTE, from, tag, comm, status));
        break;
    case IPROBE_RECV:
        while (!flag) OK(MPI_Iprobe(from, tag, comm, &flag, &probed));
        STATUS_CHECK(&probed, from, tag, n);
        OK(MPI_Recv(p, n, MPI_BYTE, from, tag, comm, status));
        break;
    case MPROBE_MRECV:
    case MPROBE_IMRECV:
    case IMPROBE_MRECV:
    case MRECV_C:
    case IMRECV_C:
        if (way == IMPROBE_MRECV) while (!flag) OK(MPI_Improbe(from, tag, comm, &flag, &m, &probed));
        else OK(MPI_Mprobe(from, tag, comm, &m, &probed));
        STATUS_CHECK(&probed, from, tag, n);
        OK(MPI_Get_count(&probed, MPI_BYTE, &count));
        if (way == MPROBE_IMRECV) { OK(MPI_Imrecv(p, count, MPI_BYTE, &m, &r)); OK(MPI_Wait(&r, status)); }
        else if (way == IMRECV_C) { OK(MPI_Imrecv_c(p, count, MPI_BYTE, &m, &r)); OK(MPI_Wait(&r, status)); }
        else if (way == MRECV_C) OK(MPI_Mrecv_c(p, count, MPI_BYTE, &m, status));
        else OK(MPI_Mrecv(p, count, MPI_BYTE, &m, status));
        CHECK(m == MPI_MESSAGE_NULL, "a received message is null");
        break;
    case SENDRECV_IN: {
        int to = out == SENDRECV_OUT ? from : MPI_PROC_NULL;
        OK(MPI_Sendrecv(&side, 1, MPI_BYTE, to, TAG_SIDE, p, room, MPI_BYTE, from, tag, comm, status));
        break;
    }
    case RECV_INIT:
    case RECV_INIT_C:
        if (way == RECV_INIT_C) OK(MPI_Recv_init_c(p, room, MPI_BYTE, from, tag, comm, &r));
        else OK(MPI_Recv_init(p, room, MPI_BYTE, from, tag, comm, &r));
        OK(MPI_Start(&r));
        if (is_ready_send(out)) OK(MPI_Send(NULL, 0, MPI_BYTE, from, TAG_READY, comm));
        OK(MPI_Wait(&r, status));
        CHECK(r != MPI_REQUEST_NULL, "a persistent request stays");
        OK(MPI_Request_free(&r));
        break;
    default: FAIL("no such way to receive");
    }
    OK(MPI_Wait(&beside, MPI_STATUS_IGNORE));
}
#endif
