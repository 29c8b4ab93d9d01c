// One message for each path from rank 0 to rank 1, of which a copy may be made to write one wrong byte (SIMCUDA_CORRUPT).
//
// $WRONG is the offset of that byte, -1 if there is none, -2 if it is one that only the copies know. $SEEN says who is to notice: "receiver", "sender" or nobody: the
// call that completes the message there ends in MPI_ERR_OTHER, by way of the communicator's error handler, called once.
// $VERIFY_ON names the one rank that sets ANABRANCH_VERIFY for itself.
#include "sim.h"

enum { LARGE = (4 << 20) + 3, MEDIUM = 100001, SMALL = 5000, TAG = 77, SEED = 5 };

static MPI_Comm comm;
static int handler_calls;
static long wrong = -1;

static void handler(MPI_Comm *c, int *code, ...) {
    (void)c;
    int class = 0;
    MPI_Error_class(*code, &class);
    if (class == MPI_ERR_OTHER) handler_calls++;
}

// What a call that completes the message on this side has returned.
static void ended(int code) {
    const char *seen = getenv("SEEN") ? getenv("SEEN") : "";
    int noticed = !strcmp(seen, me == 1 ? "receiver" : "sender"), class = 0;
    OK(MPI_Error_class(code, &class));
    EQUAL(class, noticed ? MPI_ERR_OTHER : MPI_SUCCESS);
    EQUAL(handler_calls, noticed);
    handler_calls = 0;
}

// The payload is the seed's but for one bit of the wrong byte.
static void payload(const unsigned char *image, size_t bytes) {
    unsigned char *expected = scratch(bytes);
    pattern(expected, bytes, SEED);
    if (wrong == -2) {
        for (size_t i = 0; i < bytes && wrong < 0; i++) if (image[i] != expected[i]) wrong = (long)i;
        CHECK(wrong >= 0, "nothing was corrupted");
        printf("wrong byte %ld\n", wrong);
    }
    if (wrong >= 0) { CHECK((size_t)wrong < bytes, "WRONG"); CHECK(image[wrong] != expected[wrong], "nothing was corrupted"); }
    for (size_t i = 0; i < bytes; i++) if ((long)i != wrong) EQUAL(image[i], expected[i]);
    free(expected);
}

static void received(buf b) {
    unsigned char *image = scratch(b.bytes);
    memory_get(b.kind, image, b.p, b.bytes);
    payload(image, b.bytes);
    free(image);
}

static void one(size_t bytes, enum kind to) {
    buf b = buf_new(me == 0 ? DEVICE : to, bytes, 5);
    if (me == 0) { buf_fill(b, SEED); ended(MPI_Send(b.p, bytes, MPI_BYTE, 1, TAG, comm)); }
    if (me == 1) { ended(MPI_Recv(b.p, bytes, MPI_BYTE, 0, TAG, comm, MPI_STATUS_IGNORE)); received(b); }
    buf_free(b);
}

static void direct(void) { one(LARGE, DEVICE); }
static void several(void) { one((size_t)24 << 20 | 5, DEVICE); }
static void to_host(void) { one(LARGE, HOST); }

// The sender is complete before the receive is posted: the payload comes from a cell.
static void eager(void) {
    buf b = buf_new(DEVICE, SMALL, 5);
    if (me == 0) { buf_fill(b, SEED); ended(MPI_Send(b.p, SMALL, MPI_BYTE, 1, TAG, comm)); }
    barrier();
    if (me == 1) { ended(MPI_Recv(b.p, SMALL, MPI_BYTE, 0, TAG, comm, MPI_STATUS_IGNORE)); received(b); }
    buf_free(b);
}

// A buffered send goes by value, received by Irecv and Wait.
static void value(void) {
    buf b = buf_new(DEVICE, MEDIUM, 5);
    if (me == 0) {
        static char attached[MEDIUM + 4096];
        void *detached;
        int size;
        OK(MPI_Buffer_attach(attached, sizeof attached));
        buf_fill(b, SEED);
        ended(MPI_Bsend(b.p, MEDIUM, MPI_BYTE, 1, TAG, comm));
        OK(MPI_Buffer_detach(&detached, &size));
    }
    if (me == 1) {
        MPI_Request r;
        OK(MPI_Irecv(b.p, MEDIUM, MPI_BYTE, 0, TAG, comm, &r));
        ended(MPI_Wait(&r, MPI_STATUS_IGNORE));
        received(b);
    }
    buf_free(b);
}

// Rank 1 to itself, by a persistent receive that is started twice: the second message is right again.
static void self(void) {
    if (me != 1) return;
    buf a = buf_new(DEVICE, LARGE, 1), b = buf_new(DEVICE, LARGE, 3);
    MPI_Request r;
    buf_fill(a, SEED);
    OK(MPI_Recv_init(b.p, LARGE, MPI_BYTE, 1, TAG, comm, &r));
    OK(MPI_Start(&r));
    OK(MPI_Send(a.p, LARGE, MPI_BYTE, 1, TAG, comm));
    ended(MPI_Wait(&r, MPI_STATUS_IGNORE));
    received(b);
    wrong = -1;
    setenv("SEEN", "", 1);
    OK(MPI_Start(&r));
    OK(MPI_Send(a.p, LARGE, MPI_BYTE, 1, TAG, comm));
    ended(MPI_Wait(&r, MPI_STATUS_IGNORE));
    received(b);
    OK(MPI_Request_free(&r));
    buf_free(a);
    buf_free(b);
}

// Into every other run of 1000 bytes: brought to host memory, then scattered to the device.
static void scattered(void) {
    enum { RUN = 1000, RUNS = 100, BYTES = RUN * RUNS };
    if (me == 0) {
        buf b = buf_new(DEVICE, BYTES, 5);
        buf_fill(b, SEED);
        ended(MPI_Send(b.p, BYTES, MPI_BYTE, 1, TAG, comm));
        buf_free(b);
    } else if (me == 1) {
        buf b = buf_new(DEVICE, 2 * BYTES, 3);
        unsigned char *image = scratch(2 * BYTES), *packed = scratch(BYTES);
        MPI_Datatype type;
        OK(MPI_Type_vector(RUNS, RUN, 2 * RUN, MPI_BYTE, &type));
        OK(MPI_Type_commit(&type));
        ended(MPI_Recv(b.p, 1, type, 0, TAG, comm, MPI_STATUS_IGNORE));
        OK(MPI_Type_free(&type));
        memory_get(DEVICE, image, b.p, 2 * BYTES);
        for (int i = 0; i < RUNS; i++) memcpy(packed + i * RUN, image + 2 * i * RUN, RUN);
        payload(packed, BYTES);
        free(image);
        free(packed);
        buf_free(b);
    }
}

// Windows of messages that differ, received in one place, as bandwidth tests do: each is what was sent when it was there, and the last
// one is left. $WRONG_MESSAGES of them are not.
static void windows_to_one_place(int kind, int is_tag_each) {
    enum { WINDOW = 6, ROUNDS = 3 };
    if (me > 1) return;
    size_t bytes = (size_t)number_from("BYTES", 24 << 20) + 5;
    buf out[WINDOW], in = {0};
    MPI_Request r[WINDOW];
    long wrong_messages = 0;
    if (me == 0) for (int i = 0; i < WINDOW; i++) out[i] = buf_new(DEVICE, bytes, i);
    else in = buf_new(kind, bytes, 3);
    for (int round = 0; round < ROUNDS; round++) {
        for (int i = 0; i < WINDOW; i++) {
            int tag = TAG + (is_tag_each ? i : 0);
            if (me == 0) {
                buf_fill(out[i], 10 * round + i);
                OK(MPI_Isend(out[i].p, bytes, MPI_BYTE, 1, tag, comm, &r[i]));
            } else {
                OK(MPI_Irecv(in.p, bytes, MPI_BYTE, 0, tag, comm, &r[i]));
            }
        }
        for (int i = 0; i < WINDOW; i++) {
            int class = 0;
            OK(MPI_Error_class(MPI_Wait(&r[i], MPI_STATUS_IGNORE), &class));
            if (class == MPI_ERR_OTHER) wrong_messages++;
            else EQUAL(class, MPI_SUCCESS);
        }
        if (me == 1) BUF_CHECK(in, 10 * round + WINDOW - 1, bytes);
        OK(MPI_Sendrecv(NULL, 0, MPI_BYTE, peer, TAG, NULL, 0, MPI_BYTE, peer, TAG, comm, MPI_STATUS_IGNORE));
    }
    EQUAL(wrong_messages, me == 1 ? number_from("WRONG_MESSAGES", 0) : 0);
    if (me == 0) for (int i = 0; i < WINDOW; i++) buf_free(out[i]);
    else buf_free(in);
}

static void one_place(void) { windows_to_one_place(DEVICE, 0); }
static void one_place_by_tag(void) { windows_to_one_place(DEVICE, 1); }
static void one_place_in_host(void) { windows_to_one_place(HOST, 0); }

static const struct test_case cases[] = {
    {"direct", direct}, {"several", several}, {"to_host", to_host}, {"eager", eager}, {"value", value}, {"self", self}, {"scattered", scattered},
    {"one_place", one_place}, {"one_place_by_tag", one_place_by_tag}, {"one_place_in_host", one_place_in_host}, {0},
};

int main(int argc, char **argv) {
    static const char *const names[] = {"OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"};
    for (int i = 0; i < 3; i++)
        if (getenv(names[i])) {
            if (number_from("VERIFY_ON", -1) == atoi(getenv(names[i]))) setenv("ANABRANCH_VERIFY", "1", 1);
            break;
        }
    start(&argc, &argv, MPI_THREAD_SINGLE);
    wrong = number_from("WRONG", -1);
    MPI_Errhandler own;
    OK(MPI_Comm_dup(MPI_COMM_WORLD, &comm));
    OK(MPI_Comm_create_errhandler(handler, &own));
    OK(MPI_Comm_set_errhandler(comm, own));
    int n = 0;
    for (const struct test_case *c = cases; c->name; c++) {
        if (!selected(c->name, argc, argv)) continue;
        running = c->name;
        // Both are ready for descriptors: each has met a device buffer, and has said so to the other.
        for (int i = 0; i < 2; i++) {
            buf b = buf_new(DEVICE, 1, 0);
            OK(MPI_Sendrecv_replace(b.p, 1, MPI_BYTE, peer, 0, peer, 0, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            buf_free(b);
            barrier();
        }
        c->run();
        barrier();
        n++;
    }
    CHECK(n > 0, "no such case");
    OK(MPI_Errhandler_free(&own));
    OK(MPI_Comm_free(&comm));
    return finish(n);
}
