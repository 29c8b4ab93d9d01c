// MPI_THREAD_MULTIPLE: several threads of each rank exchange at once, by tags and by communicators of their own.
#include "transfer.h"
#include <pthread.h>

enum { THREADS = 4, MESSAGES = 40 };
static MPI_Comm of_thread[THREADS];
static int by_communicator;

static size_t size_of(int thread, int i) {
    uint64_t state = 17 + thread * 1000 + i;
    for (int k = 0; k < 4; k++) next_random(&state);
    return (size_t[]){1, 61, 61, 5000, 17000, 70001, 300000, 1000001}[next_random(&state) % 8];
}

static void *work(void *argument) {
    int t = (int)(intptr_t)argument;
    MPI_Comm comm = by_communicator ? of_thread[t] : MPI_COMM_WORLD;
    int tag = by_communicator ? 1 : t;
    if (role == 'D') device_start(me);
    for (int i = 0; i < MESSAGES; i++) {
        size_t n = size_of(t, i);
        buf a = buf_new((enum kind)(i & 1), n, 1), b = buf_new((enum kind)((i >> 1) & 1), n, 2);
        MPI_Request r[2];
        MPI_Status s;
        int flag = 0;
        buf_fill(a, t * 1000 + i + me * 100000);
        switch (i % 4) {
        case 0: OK(MPI_Sendrecv(a.p, n, MPI_BYTE, peer, tag, b.p, n, MPI_BYTE, peer, tag, comm, &s)); break;
        case 1:
            OK(MPI_Irecv(b.p, n, MPI_BYTE, peer, tag, comm, &r[0]));
            OK(MPI_Send(a.p, n, MPI_BYTE, peer, tag, comm));
            OK(MPI_Wait(&r[0], &s));
            break;
        case 2:
            OK(MPI_Irecv(b.p, n, MPI_BYTE, peer, tag, comm, &r[0]));
            OK(MPI_Isend(a.p, n, MPI_BYTE, peer, tag, comm, &r[1]));
            while (!flag) OK(MPI_Testall(2, r, &flag, MPI_STATUSES_IGNORE));
            break;
        default: {
            MPI_Message m;
            OK(MPI_Isend(a.p, n, MPI_BYTE, peer, tag, comm, &r[1]));
            OK(MPI_Mprobe(peer, tag, comm, &m, &s));
            STATUS_CHECK(&s, peer, tag, n);
            OK(MPI_Mrecv(b.p, n, MPI_BYTE, &m, &s));
            OK(MPI_Wait(&r[1], MPI_STATUS_IGNORE));
        }
        }
        BUF_CHECK(b, t * 1000 + i + peer * 100000, n);
        buf_free(a);
        buf_free(b);
    }
    return NULL;
}

static void threads(int communicators) {
    pthread_t thread[THREADS];
    by_communicator = communicators;
    for (int t = 0; t < THREADS; t++) OK(MPI_Comm_dup(MPI_COMM_WORLD, &of_thread[t]));
    if (peer != MPI_PROC_NULL) {
        for (int t = 0; t < THREADS; t++) CHECK(!pthread_create(&thread[t], NULL, work, (void *)(intptr_t)t), "pthread_create");
        for (int t = 0; t < THREADS; t++) pthread_join(thread[t], NULL);
    }
    for (int t = 0; t < THREADS; t++) OK(MPI_Comm_free(&of_thread[t]));
}
static void by_tag(void) { threads(0); }
static void by_comm(void) { threads(1); }

// One thread posts, another waits.
static MPI_Request handed_over[64];
static void *waiter(void *argument) { (void)argument; if (role == 'D') device_start(me); OK(MPI_Waitall(64, handed_over, MPI_STATUSES_IGNORE)); return NULL; }
static void handed(void) {
    if (peer == MPI_PROC_NULL) return;
    FOR_ENDS(from, to) {
        buf b[64];
        pthread_t thread;
        for (int i = 0; i < 64; i++) {
            b[i] = buf_new(me % 2 ? to : from, size_of(9, i), 1);
            if (me % 2) OK(MPI_Irecv(b[i].p, b[i].bytes, MPI_BYTE, peer, i, MPI_COMM_WORLD, &handed_over[i]));
            else { buf_fill(b[i], i); OK(MPI_Isend(b[i].p, b[i].bytes, MPI_BYTE, peer, i, MPI_COMM_WORLD, &handed_over[i])); }
        }
        CHECK(!pthread_create(&thread, NULL, waiter, NULL), "pthread_create");
        pthread_join(thread, NULL);
        for (int i = 0; i < 64; i++) { BUF_CHECK(b[i], i, b[i].bytes); buf_free(b[i]); }
    }
}

static const struct test_case cases[] = {{"by_tag", by_tag}, {"by_comm", by_comm}, {"handed", handed}, {0}};
int main(int argc, char **argv) { return run_cases(argc, argv, cases, MPI_THREAD_MULTIPLE); }
