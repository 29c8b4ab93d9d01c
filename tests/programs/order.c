// Matching order, wildcards, and what a receive that is too small leaves behind.
#include "transfer.h"

// One tag, sizes mixed from nothing to a megabyte, blocking and non-blocking, host and device: they match as sent.
static void one_tag(void) {
    enum { K = 80 };
    FOR_PAIRS(from, to) {
        uint64_t state = 4242;
        buf b[K];
        MPI_Request r[K];
        for (int i = 0; i < K; i++) {
            size_t n = (size_t[]){0, 5, 61, 61, 700, 17000, 66000, 1 << 20}[next_random(&state) % 8];
            int mixed = next_random(&state) % 4 == 0;
            b[i] = buf_new(mixed ? (enum kind)(i & 1) : me % 2 ? to : from, n, i % 9);
        }
        for (int i = 0; i < K; i++) {
            r[i] = MPI_REQUEST_NULL;
            if (me % 2 == 0) {
                buf_fill(b[i], i);
                // The receiver posts these in order, blocking ones too, so blocking sends get on.
                if (i % 4 == 3) OK(MPI_Send(b[i].p, b[i].bytes, MPI_BYTE, peer, 1, MPI_COMM_WORLD));
                else if (i % 4 == 2) OK(MPI_Issend(b[i].p, b[i].bytes, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &r[i]));
                else OK(MPI_Isend(b[i].p, b[i].bytes, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &r[i]));
            } else if (i % 5 == 4) OK(MPI_Recv(b[i].p, b[i].bytes, MPI_BYTE, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            else OK(MPI_Irecv(b[i].p, b[i].bytes, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &r[i]));
        }
        OK(MPI_Waitall(K, r, MPI_STATUSES_IGNORE));
        for (int i = 0; i < K; i++) { if (me % 2) BUF_CHECK(b[i], i, b[i].bytes); buf_free(b[i]); }
    }
}

static size_t wild_size(int rank, int i) { return (size_t[]){61, 3, 4000, 50000, 61, 200001, 0, 16384}[(rank * 3 + i) % 8]; }

// Rank 0 takes from anyone; what it gets from each rank is in that rank's order.
static void from_anyone(void) {
    enum { K = 24 };
    for (int round = 0; round < 3; round++) {
        barrier(); // a wildcard must not take the next round's messages
        if (me) {
            buf b[K];
            MPI_Request r[K];
            for (int i = 0; i < K; i++) {
                b[i] = buf_new((enum kind)((i + me) & 1), wild_size(me, i), i % 4);
                buf_fill(b[i], me * 1000 + i);
                OK(MPI_Isend(b[i].p, b[i].bytes, MPI_BYTE, 0, i, MPI_COMM_WORLD, &r[i]));
            }
            OK(MPI_Waitall(K, r, MPI_STATUSES_IGNORE));
            for (int i = 0; i < K; i++) buf_free(b[i]);
            continue;
        }
        int next[64] = {0}, total = K * (ranks - 1);
        buf *b = scratch(total * sizeof *b);
        MPI_Request *r = scratch(total * sizeof *r);
        MPI_Status s;
        for (int i = 0; i < total; i++) {
            b[i] = buf_new((enum kind)(i & 1), 200001, i % 3);
            if (round == 0) OK(MPI_Irecv(b[i].p, 200001, MPI_BYTE, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &r[i]));
        }
        for (int i = 0; i < total; i++) {
            if (round == 0) OK(MPI_Wait(&r[i], &s));
            else if (round == 1) OK(MPI_Recv(b[i].p, 200001, MPI_BYTE, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &s));
            else {
                MPI_Message m;
                OK(MPI_Mprobe(MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &m, &s));
                STATUS_CHECK(&s, s.MPI_SOURCE, s.MPI_TAG, wild_size(s.MPI_SOURCE, s.MPI_TAG));
                OK(MPI_Mrecv(b[i].p, 200001, MPI_BYTE, &m, &s));
            }
            CHECK(s.MPI_SOURCE > 0 && s.MPI_SOURCE < ranks, "source");
            EQUAL(s.MPI_TAG, next[s.MPI_SOURCE]++);
            STATUS_CHECK(&s, s.MPI_SOURCE, s.MPI_TAG, wild_size(s.MPI_SOURCE, s.MPI_TAG));
            BUF_CHECK(b[i], s.MPI_SOURCE * 1000 + s.MPI_TAG, wild_size(s.MPI_SOURCE, s.MPI_TAG));
        }
        for (int i = 0; i < total; i++) buf_free(b[i]);
        free(b);
        free(r);
    }
}

static int class_of(int code) { int c; MPI_Error_class(code, &c); return c; }

// Open MPI itself writes beyond the end of a host receive that is too small (5000 bytes into 100, seen on 4.1.4 and
// 5.0.11); what the preloaded library serves stays inside on any MPI.
static int must_stay_inside(enum kind to) {
#ifdef OPEN_MPI
    return with_preload && to == DEVICE && role == 'D';
#else
    (void)to;
    return 1;
#endif
}

// What fits into a receive may have been written; nothing beyond was.
static void untouched(buf b, size_t room) {
    size_t beyond = b.lead + room;
    unsigned char *image = scratch(b.total);
    memory_get(b.kind, image, b.base, b.total);
    for (size_t i = beyond; i < b.total; i++) EQUAL(image[i], 0xa5);
    free(image);
}

// A receive smaller than its message: MPI_ERR_TRUNCATE, nothing written beyond it, the sender not stuck, and the next
// message unharmed. The receive is posted before or after the message has come; blocking, non-blocking or in a set.
static void truncated(void) {
    size_t sent[] = {100, 61, 61, 62, 61, 5000, 20000, 70000, 70000, 1000000, 1000000};
    size_t room[] = {64, 60, 0, 61, 1, 100, 61, 60, 69999, 1000, 0};
    OK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    FOR_PAIRS(from, to)
        for (int i = 0; i < 11; i++)
            for (int how = 0; how < 4; how++) {
                size_t n = sent[i];
                MPI_Request r[2];
                MPI_Status s[2];
                if (me % 2 == 0) {
                    buf b = buf_new(from, n, 1), next = buf_new(from, n, 2);
                    buf_fill(b, 1);
                    buf_fill(next, 2);
                    if (how != 1) barrier();
                    OK(MPI_Isend(b.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD, &r[0]));
                    OK(MPI_Isend(next.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD, &r[1]));
                    if (how == 1) barrier();
                    MPI_Waitall(2, r, s); // whether the sender hears of it is the library's affair, but it goes on
                    buf_free(b);
                    buf_free(next);
                } else {
                    buf b = buf_new(to, n, 3), next = buf_new(to, n, 4);
                    int rc;
                    memset(s, 0, sizeof s);
                    if (how == 1) { barrier(); rc = MPI_Recv(b.p, room[i], MPI_BYTE, peer, 5, MPI_COMM_WORLD, s); }
                    else {
                        OK(MPI_Irecv(b.p, room[i], MPI_BYTE, peer, 5, MPI_COMM_WORLD, &r[0]));
                        if (how >= 2) OK(MPI_Irecv(next.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD, &r[1]));
                        barrier();
                        if (how < 2) rc = MPI_Wait(&r[0], s);
                        else if (how == 2) {
                            rc = MPI_Waitall(2, r, s);
                            EQUAL(class_of(rc), MPI_ERR_IN_STATUS);
                            rc = s[0].MPI_ERROR;
                            if (class_of(s[1].MPI_ERROR) == MPI_ERR_PENDING) OK(MPI_Wait(&r[1], MPI_STATUS_IGNORE));
                            else EQUAL(s[1].MPI_ERROR, MPI_SUCCESS);
                        } else {
                            int left = 2, count, at[2], codes[2] = {0, 0};
                            while (left) {
                                rc = MPI_Waitsome(2, r, &count, at, s);
                                CHECK(rc == MPI_SUCCESS || class_of(rc) == MPI_ERR_IN_STATUS, "Waitsome");
                                for (int k = 0; k < count; k++) if (rc) codes[at[k]] = s[k].MPI_ERROR;
                                left -= count;
                            }
                            rc = codes[0];
                            EQUAL(codes[1], MPI_SUCCESS);
                        }
                    }
                    EQUAL(class_of(rc), MPI_ERR_TRUNCATE);
                    if (must_stay_inside(to)) untouched(b, room[i]);
                    if (how < 2) OK(MPI_Recv(next.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
                    BUF_CHECK(next, 2, n);
                    buf_free(b);
                    buf_free(next);
                }
                barrier();
            }
    OK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL));
}

static int handled;
static void handler(MPI_Comm *comm, int *code, ...) { (void)comm; handled = class_of(*code); }

// The communicator's own handler is the one that hears of a truncation, and only once.
static void handler_called(void) {
    MPI_Comm comm;
    MPI_Errhandler mine;
    OK(MPI_Comm_dup(MPI_COMM_WORLD, &comm));
    OK(MPI_Comm_create_errhandler(handler, &mine));
    OK(MPI_Comm_set_errhandler(comm, mine));
    if (peer != MPI_PROC_NULL) for (int i = 0; i < 2; i++)
        FOR_PAIRS(from, to) {
            size_t n = i ? 70000 : 100;
            buf b = buf_new(me % 2 ? to : from, n, 1);
            handled = 0;
            if (me % 2 == 0) {
                buf_fill(b, 3);
                MPI_Send(b.p, n, MPI_BYTE, peer, 5, comm);
            } else {
                // A blocking receive: MPICH 4 raises what Wait meets on another communicator.
                MPI_Recv(b.p, n - 1, MPI_BYTE, peer, 5, comm, MPI_STATUS_IGNORE);
                EQUAL(handled, MPI_ERR_TRUNCATE);
            }
            barrier();
            buf_free(b);
        }
    OK(MPI_Errhandler_free(&mine));
    OK(MPI_Comm_free(&comm));
}

// Arguments that are wrong are refused as the library refuses them.
static void wrong_arguments(void) {
    MPI_Request r;
    buf b = buf_new(DEVICE, 100, 0);
    OK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    // The first before this rank has told of its device, unless another case has.
    EQUAL(class_of(MPI_Send(b.p, 1, MPI_DATATYPE_NULL, 0, 1, MPI_COMM_WORLD)), MPI_ERR_TYPE);
    EQUAL(class_of(MPI_Send(b.p, -1, MPI_BYTE, 0, 1, MPI_COMM_WORLD)), MPI_ERR_COUNT);
    EQUAL(class_of(MPI_Isend(b.p, 1, MPI_BYTE, ranks, 1, MPI_COMM_WORLD, &r)), MPI_ERR_RANK);
    EQUAL(class_of(MPI_Recv(b.p, 1, MPI_BYTE, ranks + 5, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE)), MPI_ERR_RANK);
    EQUAL(class_of(MPI_Send(b.p, 1, MPI_BYTE, 0, -7, MPI_COMM_WORLD)), MPI_ERR_TAG);
    EQUAL(class_of(MPI_Isend(b.p, 1, MPI_DATATYPE_NULL, 0, 1, MPI_COMM_WORLD, &r)), MPI_ERR_TYPE);
    EQUAL(class_of(MPI_Irecv(b.p, 1, MPI_DATATYPE_NULL, 0, 1, MPI_COMM_WORLD, &r)), MPI_ERR_TYPE);
    OK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL));
    buf_free(b);
}

// Bytes that look at random like anything at all, of a descriptor's length: they arrive as they were sent.
static void look_alikes(void) {
    FOR_PAIRS(from, to)
        for (int i = 0; i < 50; i++) {
            buf b = buf_new(me % 2 ? to : from, 61, i % 3);
            if (me % 2 == 0) { buf_fill(b, i); OK(MPI_Send(b.p, 61, MPI_BYTE, peer, 0, MPI_COMM_WORLD)); }
            else { OK(MPI_Recv(b.p, 61, MPI_BYTE, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE)); BUF_CHECK(b, i, 61); }
            buf_free(b);
        }
}

static const struct test_case cases[] = {
    {"one_tag", one_tag}, {"from_anyone", from_anyone}, {"truncated", truncated}, {"handler_called", handler_called},
    {"wrong_arguments", wrong_arguments}, {"look_alikes", look_alikes}, {0},
};
int main(int argc, char **argv) { return run_cases(argc, argv, cases, MPI_THREAD_SINGLE); }
