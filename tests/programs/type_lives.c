// A thread of each rank frees the datatypes of operations that another one has posted and not completed, and makes and frees
// others all the time, so that handles are used again at once.
#include "transfer.h"
#include <pthread.h>

enum { ROUNDS = 60, SPAN = 1 << 18, TAG_FREED = 31000 };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static MPI_Datatype given;
static int is_given, is_over;
static long made;

// A type whose blocks are `length` bytes, `pitch` apart. It is made in one of several ways.
static MPI_Datatype make(int way, int blocks, int length, int pitch) {
    MPI_Datatype t, inner;
    switch (way % 4) {
    case 0: OK(MPI_Type_vector(blocks, length, pitch, MPI_BYTE, &t)); break;
    case 1: OK(MPI_Type_create_hvector(blocks, length, pitch, MPI_BYTE, &t)); break;
    case 2: { // of a type that is gone before this one is used
        OK(MPI_Type_contiguous(length, MPI_BYTE, &inner));
        OK(MPI_Type_create_hvector(blocks, 1, pitch, inner, &t));
        OK(MPI_Type_free(&inner));
        break;
    }
    default: { // a duplicate, which has no attributes of the first
        OK(MPI_Type_vector(blocks, length, pitch, MPI_BYTE, &inner));
        OK(MPI_Type_dup(inner, &t));
        OK(MPI_Type_free(&inner));
    }
    }
    OK(MPI_Type_commit(&t));
    return t;
}

static void *freer(void *argument) {
    uint64_t state = 5 + me;
    (void)argument;
    for (int stop = 0; !stop;) {
        pthread_mutex_lock(&lock);
        if (is_given) {
            OK(MPI_Type_free(&given));
            is_given = 0;
            pthread_cond_signal(&changed);
        }
        stop = is_over;
        pthread_mutex_unlock(&lock);
        // Others, some of which are used, so that something is known of them.
        MPI_Datatype some[6];
        for (int i = 0; i < 6; i++) {
            int length = 1 + next_random(&state) % 9, size;
            some[i] = make(next_random(&state) % 4, 1 + next_random(&state) % 300, length, length + next_random(&state) % 5);
            if (i % 2) {
                unsigned char out[300 * 14], in[sizeof out];
                OK(MPI_Sendrecv(out, 1, some[i], 0, 1, in, 1, some[i], 0, 1, MPI_COMM_SELF, MPI_STATUS_IGNORE));
            } else OK(MPI_Type_size(some[i], &size));
        }
        for (int i = 0; i < 6; i++) OK(MPI_Type_free(&some[i]));
        made += 6;
    }
    return NULL;
}

// Has the other thread free a type; returns when it has, or at once.
static void give(MPI_Datatype t, int until_freed) {
    pthread_mutex_lock(&lock);
    while (is_given) pthread_cond_wait(&changed, &lock);
    given = t;
    is_given = 1;
    while (is_given && until_freed) pthread_cond_wait(&changed, &lock);
    pthread_mutex_unlock(&lock);
}

static void lay(unsigned char *to, const unsigned char *from, int blocks, int length, int pitch) {
    for (int i = 0; i < blocks; i++) memcpy(to + (size_t)i * pitch, from + (size_t)i * length, length);
}

// One message each way of a pair's: with gaps at both ends, at one, at none.
static void round_of(int round, int persistent, int receive_first) {
    uint64_t state = 1000 + round;
    int length = 1 + next_random(&state) % 60, gap_out = round % 3 ? 1 + next_random(&state) % 9 : 0;
    int gap_in = round % 2 ? 1 + next_random(&state) % 9 : 0, blocks = (round % 5 ? 1000 : 3000) - round, repeats = persistent ? 2 : 1;
    size_t n = (size_t)blocks * length;
    int mine = length + (me % 2 ? gap_in : gap_out), until_freed = round % 4 != 3;
    buf b = buf_new(DEVICE, SPAN, 8);
    MPI_Request r;
    MPI_Status s;
    MPI_Datatype t = make(round, blocks, length, mine);
    unsigned char *data = scratch(n), *expected = scratch(b.total), *now = scratch(b.total);
    if (me % 2 == 0 && persistent) OK(MPI_Send_init(b.p, 1, t, peer, 3, MPI_COMM_WORLD, &r));
    if (me % 2 && persistent) OK(MPI_Recv_init(b.p, 1, t, peer, 3, MPI_COMM_WORLD, &r));
    if (persistent) give(t, until_freed);
    for (int k = 0; k < repeats; k++) {
        pattern(data, n, 10 * round + k);
        memset(expected, 0xa5, b.total);
        lay(expected + b.lead, data, blocks, length, mine);
        if (me % 2 == 0) {
            memory_put(b.kind, b.base, expected, b.total);
            if (receive_first) OK(MPI_Recv(NULL, 0, MPI_BYTE, peer, TAG_FREED, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            if (persistent) OK(MPI_Start(&r));
            else {
                OK(MPI_Isend(b.p, 1, t, peer, 3, MPI_COMM_WORLD, &r));
                give(t, until_freed);
            }
            // The receiver waits for this, so the type is gone while the send is pending.
            if (!receive_first) OK(MPI_Send(NULL, 0, MPI_BYTE, peer, TAG_FREED, MPI_COMM_WORLD));
            OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
        } else {
            int got;
            buf_poison(b);
            if (!receive_first) OK(MPI_Recv(NULL, 0, MPI_BYTE, peer, TAG_FREED, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            if (persistent) OK(MPI_Start(&r));
            else {
                OK(MPI_Irecv(b.p, 1, t, peer, 3, MPI_COMM_WORLD, &r));
                give(t, until_freed);
            }
            if (receive_first) OK(MPI_Send(NULL, 0, MPI_BYTE, peer, TAG_FREED, MPI_COMM_WORLD));
            OK(MPI_Wait(&r, &s));
            OK(MPI_Get_elements(&s, MPI_BYTE, &got));
            EQUAL(got, n);
        }
        memory_get(b.kind, now, b.base, b.total);
        for (size_t i = 0; i < b.total; i++)
            if (now[i] != expected[i])
                FAIL("round %d.%d, blocks of %d at %d: byte %zd is %02x, not %02x", round, k, length, mine, (ssize_t)i - (ssize_t)b.lead, now[i], expected[i]);
    }
    if (persistent) OK(MPI_Request_free(&r));
    free(data);
    free(expected);
    free(now);
    buf_free(b);
}

static void rounds(int persistent, int receive_first) {
    pthread_t thread;
    if (peer == MPI_PROC_NULL) return;
    is_over = 0;
    CHECK(!pthread_create(&thread, NULL, freer, NULL), "pthread_create");
    for (int round = 0; round < ROUNDS; round++) round_of(round, persistent, receive_first);
    pthread_mutex_lock(&lock);
    is_over = 1;
    pthread_mutex_unlock(&lock);
    pthread_join(thread, NULL);
    CHECK(!is_given && made > 100, "types were made anew and freed");
}
static void send_pending(void) { rounds(0, 0); }
static void receive_pending(void) { rounds(0, 1); }
static void before_starts(void) { rounds(1, 0); rounds(1, 1); }

static const struct test_case cases[] = {
    {"send_pending", send_pending}, {"receive_pending", receive_pending}, {"before_starts", before_starts}, {0},
};
int main(int argc, char **argv) { return run_cases(argc, argv, cases, MPI_THREAD_MULTIPLE); }
