// Tens of thousands of small blocks at irregular distances, on the device: a send of them, and a receive into them.
#include "transfer.h"

enum { BLOCKS = 20000, PITCH = 24, ROUNDS = 4 };

static int lengths[BLOCKS], places[BLOCKS];
static size_t span, bytes;

// The same on both ranks. Blocks of eight bytes, or of 1 to 15; two of them are at most 31 bytes apart.
static void draw_blocks(int round, int of_eight) {
    uint64_t state = 77 + round;
    span = bytes = 0;
    for (int i = 0; i < BLOCKS; i++) {
        lengths[i] = of_eight ? 8 : 1 + (int)(next_random(&state) % 15);
        places[i] = (int)span;
        span += lengths[i] + next_random(&state) % (PITCH - 8);
        bytes += lengths[i];
    }
    span = places[BLOCKS - 1] + lengths[BLOCKS - 1];
    CHECK(span < 4 * bytes, "as dense as the test wants it");
}

static MPI_Datatype type_of_blocks(int of_eight) {
    MPI_Datatype t;
    if (of_eight) OK(MPI_Type_create_indexed_block(BLOCKS, 8, places, MPI_BYTE, &t));
    else OK(MPI_Type_indexed(BLOCKS, lengths, places, MPI_BYTE, &t));
    OK(MPI_Type_commit(&t));
    return t;
}

// What of an image lies in the blocks, one after the other.
static unsigned char *pick(const unsigned char *image) {
    unsigned char *out = scratch(bytes), *at = out;
    for (int i = 0; i < BLOCKS; i++) {
        memcpy(at, image + places[i], lengths[i]);
        at += lengths[i];
    }
    return out;
}

// The whole allocation, what lies around the data included. `now` has room for it.
static void check_image(buf b, const unsigned char *image, unsigned char *now, int round) {
    memory_get(b.kind, now, b.base, b.total);
    for (size_t i = 0; i < b.total; i++)
        if (now[i] != image[i]) FAIL("round %d, byte %zd is %02x, not %02x", round, (ssize_t)i - (ssize_t)b.lead, now[i], image[i]);
}

// The sender's driver is asked for nothing else that reads device memory: the test counts its copies.
static void gather(int of_eight) {
    for (int round = 0; me < 2 && round < ROUNDS; round++) {
        draw_blocks(round, of_eight);
        unsigned char *image = scratch(span);
        pattern(image, span, round + 1);
        MPI_Datatype t = type_of_blocks(of_eight);
        if (me == 0) {
            buf b = buf_new(DEVICE, span, round);
            memory_put(b.kind, b.p, image, span);
            if (round % 2) OK(MPI_Send(b.p, 1, t, 1, round, MPI_COMM_WORLD));
            else {
                MPI_Request r;
                OK(MPI_Isend(b.p, 1, t, 1, round, MPI_COMM_WORLD, &r));
                OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
            }
            buf_free(b);
            printf("span %zu\n", span);
        } else {
            buf b = buf_new(DEVICE, bytes, 3);
            MPI_Status s;
            unsigned char *expected = pick(image), *now = scratch(b.total), *whole = scratch(b.total);
            OK(MPI_Recv(b.p, bytes, MPI_BYTE, 0, round, MPI_COMM_WORLD, &s));
            STATUS_CHECK(&s, 0, round, bytes);
            memset(whole, 0xa5, b.total);
            memcpy(whole + b.lead, expected, bytes);
            check_image(b, whole, now, round);
            free(expected);
            free(now);
            free(whole);
            buf_free(b);
        }
        OK(MPI_Type_free(&t));
        free(image);
    }
}
static void gather_eights(void) { gather(1); }
static void gather_lengths(void) { gather(0); }

// Gap k, behind block 100 k, is the program's, which writes to it while the receive is under way.
static void write_gaps(unsigned char *p, unsigned char *image, int from, int to, int value) {
    for (int k = from; k < to; k++) {
        int end = places[100 * k] + lengths[100 * k], gap = places[100 * k + 1] - end;
        memset(image + end, value + k, gap);
        memory_put(role == 'H' ? HOST : DEVICE, p + end, image + end, gap);
    }
}

static void scatter(int of_eight) {
    enum { GAPS = BLOCKS / 100 };
    for (int round = 0; me < 2 && round < ROUNDS; round++) {
        draw_blocks(round, of_eight);
        unsigned char *data = scratch(bytes);
        pattern(data, bytes, round + 1);
        if (me == 0) {
            buf b = buf_new(DEVICE, bytes, round);
            memory_put(b.kind, b.p, data, bytes);
            OK(MPI_Recv(NULL, 0, MPI_BYTE, 1, TAG_READY, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
            OK(MPI_Send(b.p, bytes, MPI_BYTE, 1, round, MPI_COMM_WORLD));
            buf_free(b);
        } else {
            MPI_Datatype t = type_of_blocks(of_eight);
            buf b = buf_new(DEVICE, span, 3);
            MPI_Request r;
            MPI_Status s;
            int flag = 0, count;
            unsigned char *expected = scratch(b.total), *now = scratch(b.total), *image = expected + b.lead, *at = data;
            memset(expected, 0xa5, b.total);
            OK(MPI_Irecv(b.p, 1, t, 0, round, MPI_COMM_WORLD, &r));
            write_gaps(b.p, image, 0, GAPS / 2, 1);
            OK(MPI_Send(NULL, 0, MPI_BYTE, 0, TAG_READY, MPI_COMM_WORLD));
            for (int k = GAPS / 2; k < GAPS || !flag; k++) {
                if (k < GAPS) write_gaps(b.p, image, k, k + 1, 1);
                if (!flag) OK(MPI_Test(&r, &flag, &s));
            }
            OK(MPI_Get_elements(&s, MPI_BYTE, &count));
            EQUAL(count, bytes);
            for (int i = 0; i < BLOCKS; i++) {
                memcpy(image + places[i], at, lengths[i]);
                at += lengths[i];
            }
            check_image(b, expected, now, round);
            free(expected);
            free(now);
            buf_free(b);
            OK(MPI_Type_free(&t));
        }
        free(data);
    }
}
static void scatter_eights(void) { scatter(1); }
static void scatter_lengths(void) { scatter(0); }

static const struct test_case cases[] = {
    {"gather_eights", gather_eights}, {"gather_lengths", gather_lengths},
    {"scatter_eights", scatter_eights}, {"scatter_lengths", scatter_lengths}, {0},
};
int main(int argc, char **argv) { return run_cases(argc, argv, cases, MPI_THREAD_SINGLE); }
