// Receives of which their sender is told before it sends. In every case the two ranks draw the same script from a seed, send to
// each other as it says, and check every byte, also those around and behind a message.
//   invite CASE...; $SEED, $STEPS, $LENGTH, $MEET, $SECOND; $BYTES of the longest
#include "transfer.h"
#include <pthread.h>

enum { TAG = 5, OTHER = 6, SIDE = 7, SIZES = 6 };

static size_t lengths[SIZES] = {1, 61, 4096, 65537, 300001, (1 << 20) + 24};
static buf out[SIZES], in[SIZES];
static uint64_t drawn, contents;

static void begin(void) {
    drawn = 0x1234567 + 977 * (uint64_t)number_from("SEED", 1);
    next_random(&drawn);
    lengths[SIZES - 1] = number_from("BYTES", lengths[SIZES - 1]);
    for (int i = 0; i < SIZES; i++) {
        out[i] = buf_new(DEVICE, lengths[i], 3 * i);
        in[i] = buf_new(DEVICE, lengths[i], 5 * i + 1);
    }
}

static void end(void) {
    for (int i = 0; i < SIZES; i++) { buf_free(out[i]); buf_free(in[i]); }
}

static int steps(void) { return number_from("STEPS", 60); }

// What a rank sends next is never what was there before.
static uint64_t seed_of(int rank) { return 2 * ++contents + rank; }

// Both ranks send a message of the same length to each other, by one way or another.
static void exchange_by(int way, int i) {
    MPI_Status s[2];
    MPI_Request r[2];
    uint64_t mine, its;
    if (me == 0) { mine = seed_of(0); its = seed_of(1); } else { its = seed_of(0); mine = seed_of(1); }
    buf_fill(out[i], mine);
    buf_poison(in[i]);
    size_t n = lengths[i];
    switch (way) {
    case 0: case 1: case 2:
        OK(MPI_Irecv(in[i].p, n, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, &r[0]));
        // Each is told of the other's receive before it sends, if that is to be sure.
        if (number_from("MEET", 0)) barrier();
        if (way == 2) OK(MPI_Issend(out[i].p, n, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, &r[1]));
        else OK(MPI_Isend(out[i].p, n, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, &r[1]));
        if (way == 1) {
            OK(MPI_Wait(&r[1], &s[1]));
            // The buffer is the program's again: what was sent is what it was.
            buf_fill(out[i], mine ^ 0x5555);
            OK(MPI_Wait(&r[0], &s[0]));
        } else OK(MPI_Waitall(2, r, s));
        break;
    case 3: OK(MPI_Sendrecv(out[i].p, n, MPI_BYTE, peer, TAG, in[i].p, n, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, &s[0])); break;
    case 4:
        OK(MPI_Recv_init(in[i].p, n, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, &r[0]));
        OK(MPI_Send_init(out[i].p, n, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, &r[1]));
        OK(MPI_Startall(2, r));
        OK(MPI_Waitall(2, r, s));
        for (int k = 0; k < 2; k++) OK(MPI_Request_free(&r[k]));
        break;
    }
    STATUS_CHECK(&s[0], peer, TAG, n);
    BUF_CHECK(in[i], its, n);
}

// The same again and again, as solvers do.
static void exchange(void) {
    begin();
    for (int way = 0; way < 5; way++)
        for (int step = 0; step < steps() / 5; step++) exchange_by(way, step % SIZES);
    end();
}

static void *look(void *unused) {
    int flag;
    (void)unused;
    OK(MPI_Iprobe(peer, SIDE, MPI_COMM_WORLD, &flag, MPI_STATUS_IGNORE));
    CHECK(!flag, "nobody sends that");
    return NULL;
}

// One length, so that it is mostly the invited way. With $SECOND another thread has called MPI before.
static void steady(void) {
    pthread_t second;
    begin();
    if (number_from("SECOND", 0)) {
        CHECK(!pthread_create(&second, NULL, look, NULL), "pthread_create");
        pthread_join(second, NULL);
    }
    for (int step = 0; step < steps(); step++) exchange_by(0, number_from("LENGTH", 3));
    end();
}

// The longest, by all ways, each several times in a row.
static void longest(void) {
    begin();
    for (int step = 0; step < steps(); step++) exchange_by(step / 4 % 5, SIZES - 1);
    end();
}

// What only one rank draws.
static uint64_t next_of(int rank) {
    static uint64_t own[2];
    own[rank] += drawn;
    return next_random(&own[rank]);
}

// A message from one rank to the other that no receive was told of in advance, or whose receive takes another one first.
static void between(int from, int kind, int i) {
    size_t n = lengths[i];
    int to = !from, is_sender = me == from;
    uint64_t seed = seed_of(from), more = seed_of(from);
    MPI_Status s;
    MPI_Request r, second;
    char go = 'g';
    int flag;
    buf b = out[i], t = in[i];
    if (is_sender) buf_fill(b, seed); else buf_poison(t);
    switch (kind) {
    case 0: // blocking, one way
        if (is_sender) OK(MPI_Send(b.p, n, MPI_BYTE, to, TAG, MPI_COMM_WORLD));
        else OK(MPI_Recv(t.p, n, MPI_BYTE, from, TAG, MPI_COMM_WORLD, &s));
        break;
    case 1: { // from host memory, in the same stream
        buf host = buf_new(HOST, n, 1);
        buf_fill(host, seed);
        if (is_sender) OK(MPI_Send(host.p, n, MPI_BYTE, to, TAG, MPI_COMM_WORLD));
        else OK(MPI_Recv(t.p, n, MPI_BYTE, from, TAG, MPI_COMM_WORLD, &s));
        buf_free(host);
        break;
    }
    case 2: // from anyone
        if (is_sender) OK(MPI_Send(b.p, n, MPI_BYTE, to, TAG, MPI_COMM_WORLD));
        else OK(MPI_Recv(t.p, n, MPI_BYTE, MPI_ANY_SOURCE, MPI_ANY_TAG, MPI_COMM_WORLD, &s));
        break;
    case 3: { // into more room: what is behind it stays
        buf roomy = buf_new(DEVICE, 2 * n + 9, 2);
        if (is_sender) OK(MPI_Send(b.p, n, MPI_BYTE, to, TAG, MPI_COMM_WORLD));
        else {
            OK(MPI_Recv(roomy.p, roomy.bytes, MPI_BYTE, from, TAG, MPI_COMM_WORLD, &s));
            BUF_CHECK(roomy, seed, n);
            STATUS_CHECK(&s, from, TAG, n);
        }
        buf_free(roomy);
        return;
    }
    case 4: { // two receives, of which the second is for any tag
        buf two = buf_new(DEVICE, n, 7);
        if (is_sender) {
            buf_fill(two, more);
            OK(MPI_Send(two.p, n, MPI_BYTE, to, OTHER, MPI_COMM_WORLD));
            OK(MPI_Send(b.p, n, MPI_BYTE, to, TAG, MPI_COMM_WORLD));
        } else {
            OK(MPI_Irecv(t.p, n, MPI_BYTE, from, TAG, MPI_COMM_WORLD, &r));
            OK(MPI_Irecv(two.p, n, MPI_BYTE, from, MPI_ANY_TAG, MPI_COMM_WORLD, &second));
            OK(MPI_Wait(&second, MPI_STATUS_IGNORE));
            OK(MPI_Wait(&r, &s));
            BUF_CHECK(two, more, n);
        }
        buf_free(two);
        break;
    }
    case 5: { // behind a receive from anyone, which takes the first
        buf two = buf_new(DEVICE, n, 7);
        if (is_sender) {
            buf_fill(two, more);
            OK(MPI_Send(two.p, n, MPI_BYTE, to, TAG, MPI_COMM_WORLD));
            OK(MPI_Send(b.p, n, MPI_BYTE, to, TAG, MPI_COMM_WORLD));
        } else {
            OK(MPI_Irecv(two.p, n, MPI_BYTE, MPI_ANY_SOURCE, TAG, MPI_COMM_WORLD, &second));
            OK(MPI_Irecv(t.p, n, MPI_BYTE, from, TAG, MPI_COMM_WORLD, &r));
            OK(MPI_Wait(&r, &s));
            OK(MPI_Wait(&second, MPI_STATUS_IGNORE));
            BUF_CHECK(two, more, n);
        }
        buf_free(two);
        break;
    }
    case 6: // told of, and cancelled before anything is sent
        if (is_sender) {
            OK(MPI_Recv(&go, 1, MPI_BYTE, to, SIDE, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            OK(MPI_Send(b.p, n, MPI_BYTE, to, TAG, MPI_COMM_WORLD));
        } else {
            buf unused = buf_new(DEVICE, n, 4);
            OK(MPI_Irecv(unused.p, n, MPI_BYTE, from, TAG, MPI_COMM_WORLD, &r));
            OK(MPI_Cancel(&r));
            OK(MPI_Wait(&r, &s));
            OK(MPI_Test_cancelled(&s, &flag));
            CHECK(flag, "nothing was sent that it could take");
            buf_free(unused);
            OK(MPI_Send(&go, 1, MPI_BYTE, from, SIDE, MPI_COMM_WORLD));
            OK(MPI_Recv(t.p, n, MPI_BYTE, from, TAG, MPI_COMM_WORLD, &s));
        }
        break;
    case 7: { // with gaps: packed, and sent by value
        MPI_Datatype gaps;
        OK(MPI_Type_vector(2, 1, 2, MPI_BYTE, &gaps));
        OK(MPI_Type_commit(&gaps));
        buf rows = buf_new(DEVICE, 3, 0);
        if (is_sender) buf_fill(rows, more);
        if (is_sender) OK(MPI_Send(rows.p, 1, gaps, to, TAG, MPI_COMM_WORLD));
        else {
            unsigned char expected[3], got[3] = {0};
            pattern(expected, 3, more);
            OK(MPI_Recv(rows.p, 2, MPI_BYTE, from, TAG, MPI_COMM_WORLD, &s));
            STATUS_CHECK(&s, from, TAG, 2);
            memory_get(rows.kind, got, rows.p, 3);
            CHECK(got[0] == expected[0] && got[1] == expected[2] && got[2] == 0xa5, "a message with gaps");
        }
        OK(MPI_Type_free(&gaps));
        buf_free(rows);
        if (is_sender) OK(MPI_Send(b.p, n, MPI_BYTE, to, TAG, MPI_COMM_WORLD));
        else OK(MPI_Recv(t.p, n, MPI_BYTE, from, TAG, MPI_COMM_WORLD, &s));
        break;
    }
    case 8: // seen by a probe first
        if (is_sender) OK(MPI_Send(b.p, n, MPI_BYTE, to, TAG, MPI_COMM_WORLD));
        else {
            MPI_Message message;
            OK(MPI_Mprobe(from, TAG, MPI_COMM_WORLD, &message, &s));
            STATUS_CHECK(&s, from, TAG, n);
            OK(MPI_Mrecv(t.p, n, MPI_BYTE, &message, &s));
        }
        break;
    case 9: // an empty one in between
        if (is_sender) {
            OK(MPI_Send(b.p, 0, MPI_BYTE, to, TAG, MPI_COMM_WORLD));
            OK(MPI_Send(b.p, n, MPI_BYTE, to, TAG, MPI_COMM_WORLD));
        } else {
            buf none = buf_new(DEVICE, n, 4);
            OK(MPI_Irecv(none.p, n, MPI_BYTE, from, TAG, MPI_COMM_WORLD, &r));
            OK(MPI_Wait(&r, &s));
            STATUS_CHECK(&s, from, TAG, 0);
            BUF_CHECK(none, 0, 0);
            buf_free(none);
            OK(MPI_Recv(t.p, n, MPI_BYTE, from, TAG, MPI_COMM_WORLD, &s));
        }
        break;
    case 10: { // a shorter one of the stream into the receive that was told of
        size_t less = n / 2 + 1;
        if (is_sender) {
            OK(MPI_Send(b.p, less, MPI_BYTE, to, TAG, MPI_COMM_WORLD));
            return;
        }
        OK(MPI_Irecv(t.p, n, MPI_BYTE, from, TAG, MPI_COMM_WORLD, &r));
        OK(MPI_Wait(&r, &s));
        STATUS_CHECK(&s, from, TAG, less);
        // The pattern of a longer one: whole words of it, and the first bytes of the next.
        unsigned char *expected = scratch(n), *got = scratch(n);
        pattern(expected, n, seed);
        memset(expected + less, 0xa5, n - less);
        memory_get(t.kind, got, t.p, n);
        CHECK(!memcmp(expected, got, n), "a shorter message of %zu bytes in %zu", less, n);
        free(expected);
        free(got);
        return;
    }
    case 11: { // posted behind a message that a probe has taken, and that is not received yet
        buf two = buf_new(DEVICE, n, 7);
        MPI_Request sent[2];
        if (is_sender) {
            buf_fill(two, more);
            OK(MPI_Isend(two.p, n, MPI_BYTE, to, TAG, MPI_COMM_WORLD, &sent[0]));
            OK(MPI_Isend(b.p, n, MPI_BYTE, to, TAG, MPI_COMM_WORLD, &sent[1]));
            OK(MPI_Waitall(2, sent, MPI_STATUSES_IGNORE));
        } else {
            MPI_Message message;
            OK(MPI_Mprobe(from, TAG, MPI_COMM_WORLD, &message, MPI_STATUS_IGNORE));
            OK(MPI_Irecv(t.p, n, MPI_BYTE, from, TAG, MPI_COMM_WORLD, &r));
            OK(MPI_Wait(&r, &s));
            OK(MPI_Mrecv(two.p, n, MPI_BYTE, &message, MPI_STATUS_IGNORE));
            BUF_CHECK(two, more, n);
        }
        buf_free(two);
        break;
    }
    case 12: // cancelled while it may be on its way
        if (is_sender) OK(MPI_Send(b.p, n, MPI_BYTE, to, TAG, MPI_COMM_WORLD));
        else {
            OK(MPI_Irecv(t.p, n, MPI_BYTE, from, TAG, MPI_COMM_WORLD, &r));
            for (int looks = next_of(me) % 4; looks > 0; looks--) OK(MPI_Request_get_status(r, &flag, MPI_STATUS_IGNORE));
            OK(MPI_Cancel(&r));
            OK(MPI_Wait(&r, &s));
            OK(MPI_Test_cancelled(&s, &flag));
            if (flag) OK(MPI_Recv(t.p, n, MPI_BYTE, from, TAG, MPI_COMM_WORLD, &s));
        }
        break;
    default: FAIL("no such kind");
    }
    if (!is_sender) {
        STATUS_CHECK(&s, from, TAG, n);
        BUF_CHECK(t, seed, n);
    } else if (role == 'D') BUF_CHECK(b, seed, n);
}
enum { KINDS = 13 };

// Exchanges, and in between whatever may come.
static void script(void) {
    begin();
    for (int step = 0; step < steps(); step++) {
        uint64_t pick = next_random(&drawn);
        int i = pick / 1000 % SIZES;
        if (pick % 3) exchange_by(pick / 100000 % 5, i);
        else between(pick / 7 % 2, pick / 100 % KINDS, i);
    }
    end();
}

// Each of them once, right after an exchange in which receives were told of.
static void each(void) {
    begin();
    for (int kind = 0; kind < KINDS; kind++)
        for (int from = 0; from < 2; from++)
            for (int i = 1; i < SIZES; i += 2) {
                for (int k = 0; k < 4; k++) exchange_by(0, i);
                between(from, kind, i);
            }
    for (int k = 0; k < 4; k++) exchange_by(3, 3);
    end();
}

// Two threads of each rank send in one stream, the second from host memory as well: which message comes first is not known, but
// each comes once, and whole.
enum { JOINED_MAX = 256 };
static int taken[2 * JOINED_MAX];
static int has_called;

static uint64_t seed_in_stream(int rank, int number) { return 900000 + 100000 * (uint64_t)rank + number; }

static void take(buf b, size_t n) {
    unsigned char *got = scratch(n), *expected = scratch(n);
    int number = 0;
    memory_get(b.kind, got, b.p, n);
    for (; number < 2 * steps(); number++) {
        pattern(expected, n, seed_in_stream(peer, number));
        if (!memcmp(got, expected, n)) break;
    }
    CHECK(number < 2 * steps(), "a message that was not sent, or not whole");
    CHECK(!taken[number]++, "message %d came twice", number);
    free(got);
    free(expected);
}

static void *second_in_stream(void *unused) {
    size_t n = lengths[2];
    (void)unused;
    if (role == 'D') device_start(me);
    buf from[2] = {buf_new(HOST, n, 3), buf_new(DEVICE, n, 7)};
    // Any moment of the other's.
    struct timespec pause = {0, (long)(drawn >> 20) % 2000000};
    nanosleep(&pause, NULL);
    for (int i = 0; i < steps(); i++) {
        buf b = from[i % 4 == 3];
        buf_fill(b, seed_in_stream(me, steps() + i));
        OK(MPI_Send(b.p, n, MPI_BYTE, peer, TAG, MPI_COMM_WORLD));
        __atomic_store_n(&has_called, 1, __ATOMIC_SEQ_CST);
    }
    buf_free(from[0]);
    buf_free(from[1]);
    return NULL;
}

static void joined(void) {
    static buf out_of[JOINED_MAX];
    static MPI_Request sent[JOINED_MAX];
    size_t n = lengths[2];
    pthread_t second;
    int alone = 0;
    drawn = 0x7654321 + 31 * (uint64_t)number_from("SEED", 1) + me;
    next_random(&drawn);
    memset(taken, 0, sizeof taken);
    CHECK(steps() <= JOINED_MAX, "$STEPS");
    buf t = buf_new(DEVICE, n, 8);
    for (int i = 0; i < 2 * steps(); i++) {
        // The first is told of receives while it is alone.
        if (i == steps() / 3) CHECK(!pthread_create(&second, NULL, second_in_stream, NULL), "pthread_create");
        MPI_Request r;
        MPI_Status s;
        buf_poison(t);
        alone += !__atomic_load_n(&has_called, __ATOMIC_SEQ_CST);
        OK(MPI_Irecv(t.p, n, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, &r));
        if (i < steps()) {
            out_of[i] = buf_new(DEVICE, n, 3);
            buf_fill(out_of[i], seed_in_stream(me, i));
            OK(MPI_Isend(out_of[i].p, n, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, &sent[i]));
        }
        OK(MPI_Wait(&r, &s));
        STATUS_CHECK(&s, peer, TAG, n);
        take(t, n);
    }
    OK(MPI_Waitall(steps(), sent, MPI_STATUSES_IGNORE));
    pthread_join(second, NULL);
    for (int i = 0; i < steps(); i++) buf_free(out_of[i]);
    buf_free(t);
    printf("posted alone: %d\n", alone);
}

// From one GPU of a rank to another one of its own: it has that memory, and maps it nowhere.
static void own(void) {
    CUcontext other, mine = context;
    CUdevice device;
    int count = 0;
    CU(cu.device_count(&count));
    CHECK(count >= 2 * ranks, "%d GPUs", count);
    CU(cu.device_get(&device, ranks + me));
    CU(cu.retain(&other, device));
    buf from = buf_new(DEVICE, 4096, 3);
    CU(cu.set_current(other));
    buf to = buf_new(DEVICE, 4096, 5);
    for (int step = 0; step < 8; step++) {
        MPI_Request r[2];
        CU(cu.set_current(mine));
        buf_fill(from, 50 + step);
        CU(cu.set_current(other));
        buf_poison(to);
        OK(MPI_Irecv(to.p, 4096, MPI_BYTE, me, TAG, MPI_COMM_WORLD, &r[0]));
        OK(MPI_Isend(from.p, 4096, MPI_BYTE, me, TAG, MPI_COMM_WORLD, &r[1]));
        OK(MPI_Waitall(2, r, MPI_STATUSES_IGNORE));
        BUF_CHECK(to, 50 + step, 4096);
    }
    buf_free(to);
    CU(cu.set_current(mine));
    buf_free(from);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {{"exchange", exchange}, {"steady", steady}, {"longest", longest}, {"each", each}, {"script", script},
        {"joined", joined}, {"own", own}, {0}};
    return run_cases(argc, argv, cases, number_from("THREADS", 0) ? MPI_THREAD_MULTIPLE : MPI_THREAD_SINGLE);
}
