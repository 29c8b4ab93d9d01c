// Probes report true sizes and never show what another receive has taken.
#include "transfer.h"

enum { COUNT = 60 };
static size_t size_of(uint64_t *state) {
    static const size_t sizes[] = {0, 1, 60, 61, 61, 61, 62, 100, 5000, 20000, 70001, 300000};
    return sizes[next_random(state) % 12];
}

// A long run of messages, many of exactly a descriptor's length, from host and device in turn.
static void interleaved(void) {
    for (int how = 0; how < 5; how++)
        FOR_ENDS(from, to) {
            uint64_t state = 99 + how;
            if (me % 2 == 0) {
                buf b[COUNT];
                MPI_Request r[COUNT];
                for (int i = 0; i < COUNT; i++) {
                    size_t n = size_of(&state);
                    b[i] = buf_new(i % 3 ? from : (enum kind)(i & 1), n, i % 7);
                    buf_fill(b[i], i);
                    OK(MPI_Isend(b[i].p, n, MPI_BYTE, peer, i % 2, MPI_COMM_WORLD, &r[i]));
                }
                OK(MPI_Waitall(COUNT, r, MPI_STATUSES_IGNORE));
                for (int i = 0; i < COUNT; i++) buf_free(b[i]);
                continue;
            }
            for (int i = 0; i < COUNT; i++) {
                size_t n = size_of(&state);
                int flag = 0, tag = how == 4 ? MPI_ANY_TAG : i % 2, source = how >= 3 ? MPI_ANY_SOURCE : peer, count;
                MPI_Status s;
                MPI_Message m;
                buf b = buf_new(to, n, i % 5);
                switch (how) {
                case 0: OK(MPI_Probe(source, tag, MPI_COMM_WORLD, &s)); break;
                case 1: while (!flag) OK(MPI_Iprobe(source, tag, MPI_COMM_WORLD, &flag, &s)); break;
                case 2: while (!flag) OK(MPI_Improbe(source, tag, MPI_COMM_WORLD, &flag, &m, &s)); break;
                case 3: OK(MPI_Mprobe(source, tag, MPI_COMM_WORLD, &m, &s)); break;
                default: OK(MPI_Probe(source, tag, MPI_COMM_WORLD, &s)); // twice: a probe takes nothing
                    OK(MPI_Probe(source, tag, MPI_COMM_WORLD, &s));
                }
                STATUS_CHECK(&s, peer, i % 2, n);
                OK(MPI_Get_count(&s, MPI_BYTE, &count));
                if (how == 2 || how == 3) OK(MPI_Mrecv(b.p, count, MPI_BYTE, &m, &s));
                else OK(MPI_Recv(b.p, count, MPI_BYTE, s.MPI_SOURCE, s.MPI_TAG, MPI_COMM_WORLD, &s));
                STATUS_CHECK(&s, peer, i % 2, n);
                BUF_CHECK(b, i, n);
                buf_free(b);
            }
        }
}

// Matched messages are received in another order than they came in, others passing by meanwhile.
static void matched_in_reverse(void) {
    enum { K = 8 };
    FOR_ENDS(from, to) {
        size_t sizes[K] = {61, 0, 61, 100000, 3, 61, 20000, 1000000};
        buf b[K + 1];
        MPI_Request r[K + 1];
        for (int i = 0; i <= K; i++) b[i] = buf_new(me % 2 ? to : from, i < K ? sizes[i] : 61, i);
        if (me % 2 == 0) {
            for (int i = 0; i <= K; i++) {
                buf_fill(b[i], i);
                OK(MPI_Isend(b[i].p, b[i].bytes, MPI_BYTE, peer, 5, MPI_COMM_WORLD, &r[i]));
            }
            OK(MPI_Waitall(K + 1, r, MPI_STATUSES_IGNORE));
        } else {
            MPI_Message m[K];
            MPI_Status s;
            for (int i = 0; i < K; i++) { OK(MPI_Mprobe(peer, 5, MPI_COMM_WORLD, &m[i], &s)); STATUS_CHECK(&s, peer, 5, sizes[i]); }
            OK(MPI_Recv(b[K].p, 61, MPI_BYTE, peer, 5, MPI_COMM_WORLD, &s)); // the ninth overtakes the matched ones
            BUF_CHECK(b[K], K, 61);
            for (int i = K; i-- > 0;) OK(MPI_Imrecv(b[i].p, sizes[i], MPI_BYTE, &m[i], &r[i]));
            for (int i = 0; i < K; i++) { OK(MPI_Wait(&r[i], &s)); STATUS_CHECK(&s, peer, 5, sizes[i]); BUF_CHECK(b[i], i, sizes[i]); }
        }
        for (int i = 0; i <= K; i++) buf_free(b[i]);
    }
}

// The message of a posted receive is not to be seen by a probe.
static void not_of_others(void) {
    size_t sizes[] = {4, 61, 70000};
    FOR_ENDS(from, to)
        for (int i = 0; i < 3; i++) {
            buf b = buf_new(me % 2 ? to : from, sizes[i], 1);
            if (me % 2 == 0) {
                MPI_Request r;
                buf_fill(b, i);
                barrier();
                OK(MPI_Isend(b.p, sizes[i], MPI_BYTE, peer, 5, MPI_COMM_WORLD, &r));
                barrier();
                OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
            } else {
                MPI_Request r;
                int flag;
                OK(MPI_Irecv(b.p, sizes[i], MPI_BYTE, peer, 5, MPI_COMM_WORLD, &r));
                barrier();
                barrier();
                for (int k = 0; k < 2000; k++) {
                    OK(MPI_Iprobe(peer, MPI_ANY_TAG, MPI_COMM_WORLD, &flag, MPI_STATUS_IGNORE));
                    CHECK(!flag, "a probe sees the message of a posted receive");
                }
                OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
                BUF_CHECK(b, i, sizes[i]);
            }
            buf_free(b);
        }
}

// Probing for one tag while receives for another are outstanding.
static void beside_pending(void) {
    FOR_ENDS(from, to) {
        enum { K = 10 };
        buf b[2 * K];
        MPI_Request r[2 * K];
        for (int i = 0; i < 2 * K; i++) b[i] = buf_new(me % 2 ? to : from, 61 + (i % 3) * 30000, i);
        if (me % 2 == 0) {
            for (int i = 0; i < 2 * K; i++) {
                buf_fill(b[i], i);
                OK(MPI_Isend(b[i].p, b[i].bytes, MPI_BYTE, peer, i % 2, MPI_COMM_WORLD, &r[i]));
            }
            OK(MPI_Waitall(2 * K, r, MPI_STATUSES_IGNORE));
        } else {
            MPI_Status s;
            for (int i = 0; i < K; i++) OK(MPI_Irecv(b[2 * i].p, b[2 * i].bytes, MPI_BYTE, peer, 0, MPI_COMM_WORLD, &r[i]));
            for (int i = 0; i < K; i++) {
                OK(MPI_Probe(MPI_ANY_SOURCE, 1, MPI_COMM_WORLD, &s));
                STATUS_CHECK(&s, peer, 1, b[2 * i + 1].bytes);
                OK(MPI_Recv(b[2 * i + 1].p, b[2 * i + 1].bytes, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &s));
            }
            OK(MPI_Waitall(K, r, MPI_STATUSES_IGNORE));
            for (int i = 0; i < 2 * K; i++) BUF_CHECK(b[i], i, b[i].bytes);
        }
        for (int i = 0; i < 2 * K; i++) buf_free(b[i]);
    }
}

static const struct test_case cases[] = {
    {"interleaved", interleaved}, {"matched_in_reverse", matched_in_reverse}, {"not_of_others", not_of_others},
    {"beside_pending", beside_pending}, {0},
};
int main(int argc, char **argv) { return run_cases(argc, argv, cases, MPI_THREAD_SINGLE); }
