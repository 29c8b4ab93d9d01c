// A rank without a device begins to take part while one of its threads is on its way out of a completing call: the request of a
// receive is freed already, and its handle may be that of another one, but the library has not heard of it.
#include "sim.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

enum { LENGTH = 61, LONG = 1000001, MESSAGES = 20, TAG = 1, TAG_SHORT = 2, TAG_TOKEN = 3 };
static atomic_int is_leaving, may_leave;
static int tag_of_thread;
static buf early;

// Open MPI and MPICH free the requests of an array in their order, and ask of the last one what its status is.
static int query(void *state, MPI_Status *status) {
    (void)state;
    atomic_store(&is_leaving, 1);
    while (!atomic_load(&may_leave)) sched_yield();
    OK(MPI_Status_set_elements(status, MPI_BYTE, 0));
    return MPI_Status_set_cancelled(status, 0);
}
static int freed(void *state) { (void)state; return MPI_SUCCESS; }
static int cancelled(void *state, int complete) { (void)state; (void)complete; return MPI_SUCCESS; }

static void *work(void *argument) {
    (void)argument;
    MPI_Request r[2];
    MPI_Status s[2];
    OK(MPI_Irecv(early.p, LENGTH, MPI_BYTE, peer, tag_of_thread, MPI_COMM_WORLD, &r[0]));
    OK(MPI_Grequest_start(query, freed, cancelled, NULL, &r[1]));
    OK(MPI_Grequest_complete(r[1]));
    OK(MPI_Waitall(2, r, s));
    STATUS_CHECK(&s[0], peer, tag_of_thread, LENGTH);
    BUF_CHECK(early, 7, LENGTH);
    return NULL;
}

static void token(int is_sender) {
    if (is_sender) OK(MPI_Send(NULL, 0, MPI_BYTE, peer, TAG_TOKEN, MPI_COMM_WORLD));
    else OK(MPI_Recv(NULL, 0, MPI_BYTE, peer, TAG_TOKEN, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
}

static void probed(size_t n, int seed) {
    MPI_Message m;
    MPI_Status s;
    buf b = buf_new(HOST, n, 1);
    OK(MPI_Mprobe(peer, TAG, MPI_COMM_WORLD, &m, &s));
    STATUS_CHECK(&s, peer, TAG, n);
    OK(MPI_Mrecv(b.p, n, MPI_BYTE, &m, &s));
    STATUS_CHECK(&s, peer, TAG, n);
    BUF_CHECK(b, seed, n);
    buf_free(b);
}

static void sent(enum kind kind, size_t n, int seed, int tag) {
    buf b = buf_new(kind, n, 3);
    buf_fill(b, seed);
    OK(MPI_Send(b.p, n, MPI_BYTE, peer, tag, MPI_COMM_WORLD));
    buf_free(b);
}

// What goes by descriptor, once the receiver is ready.
static size_t size_of(int i) { return i % 3 ? LONG + i : LENGTH; }
static void all_sent(void) { for (int i = 0; i < MESSAGES; i++) sent(DEVICE, size_of(i), 10 + i, TAG); }
static void all_probed(void) { for (int i = 0; i < MESSAGES; i++) probed(size_of(i), 10 + i); }

static void receiver(void) {
    pthread_t thread;
    early = buf_new(HOST, LENGTH, 1);
    CHECK(!pthread_create(&thread, NULL, work, NULL), "pthread_create");
    while (!atomic_load(&is_leaving)) sched_yield();
    token(1);
    probed(LENGTH, 8);
    buf b = buf_new(HOST, LENGTH, 1);
    MPI_Request r;
    OK(MPI_Irecv(b.p, LENGTH, MPI_BYTE, peer, TAG_SHORT, MPI_COMM_WORLD, &r));
    OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
    BUF_CHECK(b, 9, LENGTH);
    buf_free(b);
    atomic_store(&may_leave, 1);
    pthread_join(thread, NULL);
    buf_free(early);
    token(1);
    all_probed();
}

static void sender(void) {
    sent(HOST, LENGTH, 7, tag_of_thread);
    token(0);
    sent(DEVICE, LENGTH, 8, TAG);
    sent(DEVICE, LENGTH, 9, TAG_SHORT);
    token(0);
    all_sent();
}

static void taking_part(int tag) {
    tag_of_thread = tag;
    if (me == 0) receiver();
    else if (me == 1) sender();
}
static void same_stream(void) { taking_part(TAG); }
static void another_stream(void) { taking_part(TAG + 10); }

// The receive is completed together with a request that the library keeps an eye on from the start.
static void beside_persistent(void) {
    if (me == 0) {
        MPI_Request r[2];
        MPI_Status s[2];
        char byte = 0;
        early = buf_new(HOST, LENGTH, 1);
        OK(MPI_Recv_init(&byte, 1, MPI_BYTE, peer, TAG_SHORT, MPI_COMM_WORLD, &r[0]));
        OK(MPI_Start(&r[0]));
        OK(MPI_Irecv(early.p, LENGTH, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, &r[1]));
        OK(MPI_Waitall(2, r, s));
        STATUS_CHECK(&s[1], peer, TAG, LENGTH);
        BUF_CHECK(early, 7, LENGTH);
        EQUAL(byte, 'p');
        buf_free(early);
        OK(MPI_Request_free(&r[0]));
        token(1);
        probed(LENGTH, 8);
        token(1);
        all_probed();
    } else if (me == 1) {
        OK(MPI_Send("p", 1, MPI_BYTE, peer, TAG_SHORT, MPI_COMM_WORLD));
        sent(HOST, LENGTH, 7, TAG);
        token(0);
        sent(DEVICE, LENGTH, 8, TAG);
        token(0);
        all_sent();
    }
}

// A process begins to take part once: one case a run.
static const struct test_case cases[] = {
    {"same_stream", same_stream}, {"another_stream", another_stream}, {"beside_persistent", beside_persistent}, {0}};
int main(int argc, char **argv) { return run_cases(argc, argv, cases, MPI_THREAD_MULTIPLE); }
