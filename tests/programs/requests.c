// Requests in all their forms: completed one by one or in sets, mixed with the library's own, persistent, freed, cancelled.
#include "transfer.h"

enum { N = 12 };

// Message i of a set: sizes around every limit, kinds alternating, so that each set mixes taken and native requests.
static size_t set_size(int i) { return (size_t[]){0, 1, 60, 61, 62, 4096, 16384, 16385, 65537, 300001, 1000003, 61}[i]; }
static enum kind set_kind(int i, int round) { return ((i * 7 + round) >> (round & 1)) & 1; }

// The even rank sends the set in a scrambled order of tags.
static void send_set(int round) {
    buf b[N];
    MPI_Request r[N];
    for (int i = 0; i < N; i++) {
        b[i] = buf_new(set_kind(i, round + 1), set_size(i), i);
        buf_fill(b[i], round * 100 + i);
    }
    for (int k = 0; k < N; k++) {
        int i = (k * 5 + round) % N;
        if (k % 3 == 2) { OK(MPI_Isend(b[i].p, b[i].bytes, MPI_BYTE, peer, i, MPI_COMM_WORLD, &r[i])); }
        else if (k % 3 == 1) { OK(MPI_Issend(b[i].p, b[i].bytes, MPI_BYTE, peer, i, MPI_COMM_WORLD, &r[i])); }
        else { r[i] = MPI_REQUEST_NULL; OK(MPI_Send(b[i].p, b[i].bytes, MPI_BYTE, peer, i, MPI_COMM_WORLD)); }
    }
    OK(MPI_Waitall(N, r, MPI_STATUSES_IGNORE));
    for (int i = 0; i < N; i++) buf_free(b[i]);
}

static buf into[N];
static MPI_Request request[N];

static void post_set(int round) {
    for (int i = 0; i < N; i++) {
        into[i] = buf_new(set_kind(i, round), set_size(i), i);
        OK(MPI_Irecv(into[i].p, into[i].bytes, MPI_BYTE, peer, i, MPI_COMM_WORLD, &request[i]));
    }
}

static void check_one(int i, MPI_Status *s, int round) {
    CHECK(request[i] == MPI_REQUEST_NULL, "completed requests are null");
    if (s) STATUS_CHECK(s, peer, i, set_size(i));
    BUF_CHECK(into[i], round * 100 + i, set_size(i));
}

static void drop_set(void) { for (int i = 0; i < N; i++) buf_free(into[i]); }

static void check_empty(MPI_Status *s) {
    int count = -1;
    OK(MPI_Get_count(s, MPI_BYTE, &count));
    CHECK(s->MPI_SOURCE == MPI_ANY_SOURCE && s->MPI_TAG == MPI_ANY_TAG && count == 0, "the empty status");
}

static void completed_by(int round, int form) {
    int left = N, index, count, flag, indices[N], seen[N] = {0};
    MPI_Status s[N];
    memset(s, 0, sizeof s);
    switch (form) {
    case 0: // Waitall with statuses
        OK(MPI_Waitall(N, request, s));
        for (int i = 0; i < N; i++) check_one(i, &s[i], round);
        break;
    case 1: // Waitall without
        OK(MPI_Waitall(N, request, MPI_STATUSES_IGNORE));
        for (int i = 0; i < N; i++) check_one(i, NULL, round);
        break;
    case 2: // Waitany, Testany
    case 3:
        for (; left; left--) {
            flag = form == 2;
            if (form == 2) OK(MPI_Waitany(N, request, &index, s));
            else while (!flag) OK(MPI_Testany(N, request, &index, &flag, s));
            CHECK(index >= 0 && index < N && !seen[index]++, "an index once");
            check_one(index, s, round);
        }
        if (form == 2) OK(MPI_Waitany(N, request, &index, s));
        else OK(MPI_Testany(N, request, &index, &flag, s));
        CHECK(index == MPI_UNDEFINED && flag, "nothing left");
        check_empty(s);
        break;
    case 4: // Waitsome, Testsome
    case 5:
        while (left) {
            if (form == 4) { OK(MPI_Waitsome(N, request, &count, indices, s)); CHECK(count > 0, "some"); }
            else OK(MPI_Testsome(N, request, &count, indices, s));
            for (int k = 0; k < count; k++) {
                CHECK(!seen[indices[k]]++, "an index once");
                check_one(indices[k], &s[k], round);
                left--;
            }
        }
        if (form == 4) OK(MPI_Waitsome(N, request, &count, indices, s));
        else OK(MPI_Testsome(N, request, &count, indices, s));
        EQUAL(count, MPI_UNDEFINED);
        break;
    case 6: // Testall
        flag = 0;
        while (!flag) OK(MPI_Testall(N, request, &flag, s));
        for (int i = 0; i < N; i++) check_one(i, &s[i], round);
        break;
    default: // one by one, in reverse, by Wait and Test
        for (int i = N; i-- > 0;) {
            flag = 0;
            if (i % 2) OK(MPI_Wait(&request[i], s));
            else while (!flag) OK(MPI_Test(&request[i], &flag, s));
            check_one(i, s, round);
        }
    }
}

static void sets(void) {
    for (int round = 0; round < 16; round++)
        if (me % 2) {
            post_set(round);
            completed_by(round, round / 2);
            drop_set();
        } else send_set(round);
}

// Beside null requests, inactive persistent ones, and the library's own of other kinds.
static void mixed(void) {
    for (int round = 0; round < 4; round++) {
        if (me % 2 == 0) {
            MPI_Request r;
            OK(MPI_Ibarrier(MPI_COMM_WORLD, &r));
            send_set(round);
            OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
            continue;
        }
        MPI_Request all[2 * N + 3], idle;
        MPI_Status s[2 * N + 3];
        char unused;
        OK(MPI_Recv_init(&unused, 1, MPI_BYTE, peer, 999, MPI_COMM_WORLD, &idle));
        post_set(round);
        for (int i = 0; i < N; i++) { all[2 * i] = request[i]; all[2 * i + 1] = MPI_REQUEST_NULL; }
        all[2 * N] = idle;
        OK(MPI_Ibarrier(MPI_COMM_WORLD, &all[2 * N + 1]));
        OK(MPI_Isend(&unused, 0, MPI_BYTE, MPI_PROC_NULL, 1, MPI_COMM_WORLD, &all[2 * N + 2]));
        if (round % 2) OK(MPI_Waitall(2 * N + 3, all, s));
        else {
            int done = 0, flag;
            memset(s, 0, sizeof s);
            while (done != MPI_UNDEFINED) {
                MPI_Status one;
                OK(MPI_Waitany(2 * N + 3, all, &done, &one));
                if (done != MPI_UNDEFINED) s[done] = one;
            }
            OK(MPI_Testall(2 * N + 3, all, &flag, MPI_STATUSES_IGNORE));
            CHECK(flag, "all are done");
        }
        for (int i = 0; i < N; i++) { request[i] = all[2 * i]; check_one(i, &s[2 * i], round); }
        CHECK(all[2 * N] == idle, "an inactive request stays");
        CHECK(all[2 * N + 1] == MPI_REQUEST_NULL, "the barrier is done");
        OK(MPI_Request_free(&idle));
        drop_set();
    }
    MPI_Request none = MPI_REQUEST_NULL;
    MPI_Status s;
    int flag = 0;
    OK(MPI_Wait(&none, &s));
    check_empty(&s);
    OK(MPI_Test(&none, &flag, &s));
    CHECK(flag, "a null request is complete");
    OK(MPI_Waitall(0, NULL, MPI_STATUSES_IGNORE));
}

static void persistent(void) {
    enum { P = 6 };
    size_t sizes[P] = {0, 61, 1000, 70000, 1000001, 61};
    FOR_ENDS(from, to) {
        buf b[P];
        MPI_Request r[P];
        for (int i = 0; i < P; i++) {
            b[i] = buf_new(me % 2 ? to : from, sizes[i], i);
            if (me % 2) OK(MPI_Recv_init(b[i].p, sizes[i], MPI_BYTE, peer, i, MPI_COMM_WORLD, &r[i]));
            else if (i % 2) OK(MPI_Ssend_init(b[i].p, sizes[i], MPI_BYTE, peer, i, MPI_COMM_WORLD, &r[i]));
            else OK(MPI_Send_init(b[i].p, sizes[i], MPI_BYTE, peer, i, MPI_COMM_WORLD, &r[i]));
        }
        for (int round = 0; round < 4; round++) {
            MPI_Status s[P];
            for (int i = 0; i < P; i++) if (me % 2) buf_poison(b[i]); else buf_fill(b[i], round * 10 + i);
            if (round % 2) for (int i = P; i-- > 0;) OK(MPI_Start(&r[i]));
            else OK(MPI_Startall(P, r));
            if (round == 3) for (int i = 0; i < P; i++) OK(MPI_Wait(&r[i], &s[i]));
            else OK(MPI_Waitall(P, r, s));
            for (int i = 0; i < P; i++) {
                CHECK(r[i] != MPI_REQUEST_NULL, "a persistent request stays");
                if (me % 2) { STATUS_CHECK(&s[i], peer, i, sizes[i]); BUF_CHECK(b[i], round * 10 + i, sizes[i]); }
            }
        }
        // Persistent receives meet plain sends, and persistent sends plain receives.
        if (me % 2) { buf_poison(b[3]); OK(MPI_Start(&r[3])); OK(MPI_Wait(&r[3], MPI_STATUS_IGNORE)); BUF_CHECK(b[3], 500, sizes[3]); }
        else { buf_fill(b[3], 500); OK(MPI_Send(b[3].p, sizes[3], MPI_BYTE, peer, 3, MPI_COMM_WORLD)); }
        if (me % 2) { buf_poison(b[4]); OK(MPI_Recv(b[4].p, sizes[4], MPI_BYTE, peer, 4, MPI_COMM_WORLD, MPI_STATUS_IGNORE)); BUF_CHECK(b[4], 600, sizes[4]); }
        else { buf_fill(b[4], 600); OK(MPI_Start(&r[4])); OK(MPI_Wait(&r[4], MPI_STATUS_IGNORE)); }
        for (int i = 0; i < P; i++) { OK(MPI_Request_free(&r[i])); CHECK(r[i] == MPI_REQUEST_NULL, "freed"); buf_free(b[i]); }
    }
    MPI_Request nobody[2];
    buf b = buf_new(DEVICE, 100, 0);
    OK(MPI_Send_init(b.p, 100, MPI_BYTE, MPI_PROC_NULL, 0, MPI_COMM_WORLD, &nobody[0]));
    OK(MPI_Recv_init(b.p, 100, MPI_BYTE, MPI_PROC_NULL, 0, MPI_COMM_WORLD, &nobody[1]));
    for (int i = 0; i < 3; i++) { OK(MPI_Startall(2, nobody)); OK(MPI_Waitall(2, nobody, MPI_STATUSES_IGNORE)); }
    OK(MPI_Request_free(&nobody[0]));
    OK(MPI_Request_free(&nobody[1]));
    buf_free(b);
}

// A send whose request is freed still arrives; a receive whose request is freed still fills its buffer. Nothing says when
// it has: the second half looks again and again, unordered by nature, so it runs only where nobody checks for that.
static void freed(void) {
    int receives_too = number_from("SIMCUDA_CHECK", 1) == 0;
    size_t sizes[] = {61, 5000, 70000, 1000001};
    FOR_ENDS(from, to)
        for (int i = 0; i < 4; i++) {
            size_t n = sizes[i];
            MPI_Request r;
            buf b = buf_new(me % 2 ? to : from, n, 1);
            if (me % 2 == 0) {
                buf_fill(b, 40 + i);
                OK(MPI_Isend(b.p, n, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &r));
                OK(MPI_Request_free(&r));
                CHECK(r == MPI_REQUEST_NULL, "freed");
                OK(MPI_Recv(NULL, 0, MPI_BYTE, peer, 2, MPI_COMM_WORLD, MPI_STATUS_IGNORE)); // it has arrived
                if (receives_too) OK(MPI_Send(b.p, n, MPI_BYTE, peer, 3, MPI_COMM_WORLD));
            } else {
                OK(MPI_Recv(b.p, n, MPI_BYTE, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
                BUF_CHECK(b, 40 + i, n);
                buf_poison(b);
                if (receives_too) {
                    OK(MPI_Irecv(b.p, n, MPI_BYTE, peer, 3, MPI_COMM_WORLD, &r));
                    OK(MPI_Request_free(&r));
                }
                OK(MPI_Send(NULL, 0, MPI_BYTE, peer, 2, MPI_COMM_WORLD));
                unsigned char *now = scratch(n), *expected = scratch(n);
                pattern(expected, n, 40 + i);
                for (int flag; receives_too;) { // nothing says when: look until it is there (the watchdog ends a wait in vain)
                    OK(MPI_Iprobe(peer, 12345, MPI_COMM_WORLD, &flag, MPI_STATUS_IGNORE));
                    memory_get(b.kind, now, b.p, n);
                    if (!memcmp(now, expected, n)) break;
                    usleep(1000);
                }
                if (receives_too) BUF_CHECK(b, 40 + i, n);
                free(now);
                free(expected);
            }
            barrier();
            buf_free(b);
        }
}

static void get_status(void) {
    size_t sizes[] = {0, 61, 5000, 1000001};
    FOR_ENDS(from, to)
        for (int i = 0; i < 4; i++) {
            size_t n = sizes[i];
            MPI_Request r;
            MPI_Status s;
            int flag = 0;
            buf b = buf_new(me % 2 ? to : from, n, 1);
            if (me % 2 == 0) {
                buf_fill(b, 3);
                OK(MPI_Issend(b.p, n, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &r));
                while (!flag) OK(MPI_Request_get_status(r, &flag, &s));
                CHECK(r != MPI_REQUEST_NULL, "the request stays");
                OK(MPI_Wait(&r, &s));
            } else {
                OK(MPI_Irecv(b.p, n, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &r));
                while (!flag) OK(MPI_Request_get_status(r, &flag, &s));
                STATUS_CHECK(&s, peer, 1, n);
                BUF_CHECK(b, 3, n);
                OK(MPI_Request_get_status(r, &flag, MPI_STATUS_IGNORE));
                CHECK(flag, "still complete");
                memset(&s, 0, sizeof s);
                OK(MPI_Test(&r, &flag, &s));
                CHECK(flag && r == MPI_REQUEST_NULL, "complete");
                STATUS_CHECK(&s, peer, 1, n);
            }
            buf_free(b);
        }
}

// The functions of MPI 4.1 that look at several requests, where the library has them, or the preloaded one in its place.
#pragma weak MPI_Request_get_status_any
#pragma weak MPI_Request_get_status_all
#pragma weak MPI_Request_get_status_some
#if MPI_VERSION < 5
int MPI_Request_get_status_any(int, const MPI_Request *, int *, int *, MPI_Status *);
int MPI_Request_get_status_all(int, const MPI_Request *, int *, MPI_Status *);
int MPI_Request_get_status_some(int, const MPI_Request *, int *, int *, MPI_Status *);
#endif

enum { NULLS = N, IDLE_HOST, IDLE_DEVICE, LOOKED_AT }; // after the set: what is not active, and is to be passed over

// Looks at what is there, which completes nothing, then completes it.
static void looked_at_by(int form, MPI_Request *all, int round) {
    int index, flag = 0, count, indices[LOOKED_AT], left = N;
    MPI_Status s[LOOKED_AT], status;
    MPI_Request before[LOOKED_AT];
    memset(s, 0, sizeof s);
    while (left) {
        memcpy(before, all, sizeof before);
        switch (form) {
        case 0:
            OK(MPI_Request_get_status_any(LOOKED_AT, all, &index, &flag, s));
            if (!flag) EQUAL(index, MPI_UNDEFINED);
            indices[0] = index;
            count = flag != 0;
            break;
        case 1:
            OK(MPI_Request_get_status_all(LOOKED_AT, all, &flag, s));
            for (int i = 0; i < N; i++) indices[i] = i;
            for (int i = N; flag && i < LOOKED_AT; i++) check_empty(&s[i]);
            count = flag ? N : 0;
            break;
        default:
            OK(MPI_Request_get_status_some(LOOKED_AT, all, &count, indices, s));
        }
        CHECK(!memcmp(before, all, sizeof before), "no request changes");
        CHECK(count >= 0 && count <= left, "%d of %d", count, left);
        for (int k = 0; k < count; k++) {
            int i = indices[k];
            CHECK(i >= 0 && i < N && all[i] != MPI_REQUEST_NULL, "an active request once, not %d", i);
            STATUS_CHECK(&s[k], peer, i, set_size(i));
            BUF_CHECK(into[i], round * 100 + i, set_size(i));
            flag = 0;
            memset(&status, 0, sizeof status);
            OK(MPI_Test(&all[i], &flag, &status));
            CHECK(flag, "complete already");
            request[i] = all[i];
            check_one(i, &status, round);
            left--;
        }
    }
}

static void get_status_of_several(void) {
    for (int round = 0; round < 6; round++) {
        if (me % 2 == 0) {
            OK(MPI_Recv(NULL, 0, MPI_BYTE, peer, 1000, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            send_set(round);
            continue;
        }
        MPI_Request all[LOOKED_AT];
        MPI_Status s[LOOKED_AT];
        int index = 0, flag = 1, count, indices[LOOKED_AT], is_there = MPI_Request_get_status_any != NULL;
        buf idle[2] = {buf_new(HOST, 10, 0), buf_new(DEVICE, 10, 0)};
        post_set(round);
        memcpy(all, request, sizeof request);
        all[NULLS] = MPI_REQUEST_NULL;
        for (int k = 0; k < 2; k++) OK(MPI_Recv_init(idle[k].p, 10, MPI_BYTE, peer, 999, MPI_COMM_WORLD, &all[IDLE_HOST + k]));
        if (is_there) { // nothing was sent yet
            OK(MPI_Request_get_status_any(LOOKED_AT, all, &index, &flag, s));
            CHECK(!flag && index == MPI_UNDEFINED, "any: flag %d, index %d", flag, index);
            flag = 1;
            OK(MPI_Request_get_status_all(LOOKED_AT, all, &flag, s));
            CHECK(!flag, "all");
            OK(MPI_Request_get_status_some(LOOKED_AT, all, &count, indices, s));
            EQUAL(count, 0);
        }
        OK(MPI_Send(NULL, 0, MPI_BYTE, peer, 1000, MPI_COMM_WORLD));
        if (is_there) looked_at_by(round / 2, all, round);
        OK(MPI_Waitall(N, all, MPI_STATUSES_IGNORE));
        if (is_there) { // nothing active is left
            memset(s, 0, sizeof s);
            flag = index = count = 0;
            OK(MPI_Request_get_status_any(LOOKED_AT, all, &index, &flag, s));
            CHECK(flag && index == MPI_UNDEFINED, "any: flag %d, index %d", flag, index);
            check_empty(s);
            flag = 0;
            memset(s, 0, sizeof s);
            OK(MPI_Request_get_status_all(LOOKED_AT, all, &flag, s));
            CHECK(flag, "all");
            for (int i = 0; i < LOOKED_AT; i++) check_empty(&s[i]);
            OK(MPI_Request_get_status_some(LOOKED_AT, all, &count, indices, s));
            EQUAL(count, MPI_UNDEFINED);
            OK(MPI_Request_get_status_any(LOOKED_AT, all, &index, &flag, MPI_STATUS_IGNORE));
            OK(MPI_Request_get_status_all(LOOKED_AT, all, &flag, MPI_STATUSES_IGNORE));
            OK(MPI_Request_get_status_some(LOOKED_AT, all, &count, indices, MPI_STATUSES_IGNORE));
        }
        for (int k = 0; k < 2; k++) { OK(MPI_Request_free(&all[IDLE_HOST + k])); buf_free(idle[k]); }
        drop_set();
    }
}

static void cancelled(void) {
    size_t sizes[] = {10, 61, 5000, 1000001};
    FOR_ENDS(from, to)
        for (int i = 0; i < 4; i++) {
            size_t n = sizes[i];
            int flag = -1;
            MPI_Request r[2];
            MPI_Status s;
            buf b = buf_new(me % 2 ? to : from, n, 1);
            if (me % 2) { // nothing sent yet: the receive is cancelled, and the next one gets the message
                OK(MPI_Irecv(b.p, n, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &r[0]));
                OK(MPI_Cancel(&r[0]));
                OK(MPI_Wait(&r[0], &s));
                OK(MPI_Test_cancelled(&s, &flag));
                CHECK(flag == 1, "cancelled");
                barrier();
                OK(MPI_Recv(b.p, n, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &s));
                OK(MPI_Test_cancelled(&s, &flag));
                CHECK(flag == 0, "received");
                STATUS_CHECK(&s, peer, 1, n);
                BUF_CHECK(b, 8, n);
                // either cancelled or received, and never both
                buf_poison(b);
                OK(MPI_Irecv(b.p, n, MPI_BYTE, peer, 2, MPI_COMM_WORLD, &r[0]));
                barrier();
                OK(MPI_Cancel(&r[0]));
                OK(MPI_Wait(&r[0], &s));
                OK(MPI_Test_cancelled(&s, &flag));
                if (flag) OK(MPI_Recv(b.p, n, MPI_BYTE, peer, 2, MPI_COMM_WORLD, &s));
                STATUS_CHECK(&s, peer, 2, n);
                BUF_CHECK(b, 9, n);
            } else {
                buf_fill(b, 8);
                barrier();
                OK(MPI_Send(b.p, n, MPI_BYTE, peer, 1, MPI_COMM_WORLD));
                buf_fill(b, 9);
                barrier();
                OK(MPI_Send(b.p, n, MPI_BYTE, peer, 2, MPI_COMM_WORLD));
            }
            buf_free(b);
        }
}

// A send that is cancelled arrives, or was cancelled, and says which. The next message of its stream is what it is either way.
static void cancelled_sends(void) {
    size_t sizes[] = {10, 61, 5000, 1000001};
    for (int is_late = 0; is_late < 2; is_late++) // the receive is posted after the send is cancelled, or before it is made
        FOR_ENDS(from, to)
            for (int i = 0; i < 8; i++) {
                size_t n = sizes[i / 2], next = 70001;
                uint64_t seed = 10 * i + is_late;
                int flag = -1, was_cancelled = -1;
                MPI_Request r;
                MPI_Status s;
                MPI_Message m;
                memset(&s, 0, sizeof s);
                buf b = buf_new(me % 2 ? to : from, n, 1), after = buf_new(DEVICE, next, 3);
                if (me % 2 == 0) {
                    buf_fill(b, seed);
                    buf_fill(after, seed + 1);
                    if (!is_late) OK(MPI_Recv(NULL, 0, MPI_BYTE, peer, TAG_READY, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
                    if (i % 2) OK(MPI_Issend(b.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD, &r));
                    else OK(MPI_Isend(b.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD, &r));
                    OK(MPI_Cancel(&r));
                    CHECK(r != MPI_REQUEST_NULL, "a cancelled request stays until it is complete");
                    if (is_late) OK(MPI_Send(NULL, 0, MPI_BYTE, peer, TAG_SIDE, MPI_COMM_WORLD));
                    OK(MPI_Wait(&r, &s));
                    CHECK(r == MPI_REQUEST_NULL, "a completed request is null");
                    OK(MPI_Test_cancelled(&s, &flag));
                    BUF_CHECK(b, seed, n);
                    OK(MPI_Send(&flag, 1, MPI_INT, peer, TAG_SIDE, MPI_COMM_WORLD));
                    OK(MPI_Recv(NULL, 0, MPI_BYTE, peer, TAG_READY, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
                    OK(MPI_Send(after.p, next, MPI_BYTE, peer, 5, MPI_COMM_WORLD));
                } else {
                    if (is_late) OK(MPI_Recv(NULL, 0, MPI_BYTE, peer, TAG_SIDE, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
                    OK(MPI_Irecv(b.p, n, MPI_BYTE, peer, 5, MPI_COMM_WORLD, &r));
                    if (!is_late) OK(MPI_Send(NULL, 0, MPI_BYTE, peer, TAG_READY, MPI_COMM_WORLD));
                    OK(MPI_Recv(&flag, 1, MPI_INT, peer, TAG_SIDE, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
                    CHECK(flag == 0 || flag == 1, "%d", flag);
                    if (flag) OK(MPI_Cancel(&r)); // nothing will come
                    OK(MPI_Wait(&r, &s));
                    OK(MPI_Test_cancelled(&s, &was_cancelled));
                    EQUAL(was_cancelled, flag);
                    OK(MPI_Send(NULL, 0, MPI_BYTE, peer, TAG_READY, MPI_COMM_WORLD));
                    if (!flag) { STATUS_CHECK(&s, peer, 5, n); BUF_CHECK(b, seed, n); }
                    OK(MPI_Mprobe(peer, 5, MPI_COMM_WORLD, &m, &s));
                    STATUS_CHECK(&s, peer, 5, next);
                    OK(MPI_Mrecv(after.p, next, MPI_BYTE, &m, &s));
                    BUF_CHECK(after, seed + 1, next);
                }
                buf_free(b);
                buf_free(after);
            }
}

// Types other than bytes: counts in elements, and MPI_UNDEFINED where a message is no whole number of them.
static void counts(void) {
    FOR_ENDS(from, to) {
        MPI_Status s;
        int count;
        MPI_Datatype pair;
        OK(MPI_Type_contiguous(3, MPI_INT, &pair));
        OK(MPI_Type_commit(&pair));
        for (int ints = 0; ints < 40000; ints = ints * 3 + 1) {
            buf b = buf_new(me % 2 ? to : from, 200000, 4 + ints % 2);
            if (me % 2 == 0) { buf_fill(b, ints); OK(MPI_Send(b.p, ints, MPI_INT, peer, 0, MPI_COMM_WORLD)); }
            else {
                OK(MPI_Recv(b.p, 16000, pair, peer, 0, MPI_COMM_WORLD, &s));
                OK(MPI_Get_count(&s, MPI_INT, &count));
                EQUAL(count, ints);
                OK(MPI_Get_count(&s, pair, &count));
                EQUAL(count, ints % 3 ? MPI_UNDEFINED : ints / 3);
                OK(MPI_Get_elements(&s, pair, &count));
                EQUAL(count, ints);
                BUF_CHECK(b, ints, ints * sizeof(int));
            }
            buf_free(b);
        }
        OK(MPI_Type_free(&pair));
    }
}

// Receives from oneself on host memory. Once a synchronous send to one of them has returned, a call that reports what is
// complete reports it, and all others like it.
static void from_oneself(void) {
    const int groups[][4] = {{5, -1}, {-1}, {3, 1, 2, -1}, {-1}, {0, 4, -1}};
    for (int form = 0; form < 4; form++) {
        MPI_Request r[6];
        MPI_Status s[6];
        char in[6][40], text[40];
        int count, at, flag, indices[6], left = 6;
        memset(in, 0, sizeof in);
        for (int i = 0; i < 6; i++) OK(MPI_Irecv(in[i], sizeof in[i], MPI_CHAR, me, i, MPI_COMM_WORLD, &r[i]));
        for (size_t g = 0; g < sizeof groups / sizeof *groups; g++) {
            int sent = 0, seen = 0, expected = 0;
            for (const int *i = groups[g]; *i >= 0; i++, sent++) {
                snprintf(text, sizeof text, "%d: message %d of group %zu", form, *i, g);
                OK(MPI_Ssend(text, strlen(text) + 1, MPI_CHAR, me, *i, MPI_COMM_WORLD));
                expected |= 1 << *i;
            }
            if (form == 0 || (form == 1 && !sent)) {
                OK(MPI_Testsome(6, r, &count, indices, s));
                EQUAL(count, sent);
                for (int k = 0; k < count; k++) {
                    STATUS_CHECK(&s[k], me, indices[k], strlen(in[indices[k]]) + 1);
                    seen |= 1 << indices[k];
                }
            } else if (form == 1) {
                OK(MPI_Waitsome(6, r, &count, indices, MPI_STATUSES_IGNORE));
                EQUAL(count, sent);
                for (int k = 0; k < count; k++) seen |= 1 << indices[k];
            } else {
                for (int k = 0; k < sent; k++) {
                    if (form == 2) { OK(MPI_Testany(6, r, &at, &flag, s)); EQUAL(flag, 1); }
                    else { OK(MPI_Waitany(6, r, &at, s)); }
                    STATUS_CHECK(&s[0], me, at, strlen(in[at]) + 1);
                    seen |= 1 << at;
                }
                if (left > sent) { OK(MPI_Testany(6, r, &at, &flag, s)); EQUAL(flag, 0); }
            }
            EQUAL(seen, expected);
            left -= sent;
            for (int i = 0; i < 6; i++)
                if (seen >> i & 1) {
                    snprintf(text, sizeof text, "%d: message %d of group %zu", form, i, g);
                    CHECK(!strcmp(in[i], text) && r[i] == MPI_REQUEST_NULL, "what was sent");
                }
        }
        EQUAL(left, 0);
        OK(MPI_Testsome(6, r, &count, indices, s));
        EQUAL(count, MPI_UNDEFINED);
    }
}

static const struct test_case cases[] = {
    {"sets", sets}, {"from_oneself", from_oneself}, {"mixed", mixed}, {"persistent", persistent}, {"freed", freed}, {"get_status", get_status},
    {"get_status_of_several", get_status_of_several}, {"cancelled", cancelled}, {"cancelled_sends", cancelled_sends}, {"counts", counts}, {0},
};
int main(int argc, char **argv) { return run_cases(argc, argv, cases, MPI_THREAD_SINGLE); }
