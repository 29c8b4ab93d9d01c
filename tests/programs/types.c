// Non-contiguous and unusual datatypes on the device and on the host, in all pairs. What a message must leave behind
// is computed on the host by MPI_Pack and MPI_Unpack.
#include "transfer.h"

enum { EXTENT = 1 << 19 }; // bytes of memory that a case's types may span
enum { TYPES = 12 };

// Type i, its count, and where in the memory it starts.
static MPI_Datatype make_type(int i, int *count, size_t *start) {
    MPI_Datatype t, u;
    *count = 1;
    *start = 0;
    switch (i) {
    case 0: OK(MPI_Type_contiguous(5000, MPI_DOUBLE, &t)); *count = 3; break;
    case 1: OK(MPI_Type_vector(200, 30, 77, MPI_INT, &t)); break;
    case 2: OK(MPI_Type_vector(61, 1, 2, MPI_BYTE, &t)); break; // as many bytes as a descriptor has
    case 3: OK(MPI_Type_create_hvector(1000, 13, 40, MPI_BYTE, &t)); *count = 5; break;
    case 4: {
        int lengths[] = {5, 0, 700, 1}, places[] = {3, 10, 1000, 40000};
        OK(MPI_Type_indexed(4, lengths, places, MPI_INT, &t));
        *count = 2;
        break;
    }
    case 5: {
        int lengths[] = {1, 7, 3};
        MPI_Aint places[] = {0, 24, 1000};
        MPI_Datatype kinds[] = {MPI_DOUBLE, MPI_CHAR, MPI_INT};
        OK(MPI_Type_create_struct(3, lengths, places, kinds, &u));
        OK(MPI_Type_create_resized(u, 0, 1024, &t));
        OK(MPI_Type_free(&u));
        *count = 200;
        break;
    }
    case 6: {
        int sizes[] = {64, 80}, part[] = {50, 30}, at[] = {7, 20};
        OK(MPI_Type_create_subarray(2, sizes, part, at, MPI_ORDER_C, MPI_DOUBLE, &t));
        break;
    }
    case 7: { // a negative lower bound: the data begin before the address that is passed
        int lengths[] = {100, 50}, places[] = {-200, 300};
        OK(MPI_Type_indexed(2, lengths, places, MPI_INT, &t));
        *count = 4;
        *start = 10000;
        break;
    }
    case 8: OK(MPI_Type_create_resized(MPI_INT, 0, 12, &t)); *count = 9000; break;
    case 9: OK(MPI_Type_dup(MPI_BYTE, &t)); *count = 70001; break;
    case 10: OK(MPI_Type_vector(3, 61, 100, MPI_BYTE, &t)); *count = 0; break;
    default: OK(MPI_Type_vector(300, 1, 300, MPI_FLOAT, &t)); // a column of a matrix
    }
    OK(MPI_Type_commit(&t));
    return t;
}

static size_t packed_size(MPI_Datatype t, int count) { int n; OK(MPI_Type_size(t, &n)); return (size_t)n * count; }

static unsigned char *pack(unsigned char *image, MPI_Datatype t, int count, size_t start) {
    int room, position = 0;
    OK(MPI_Pack_size(count, t, MPI_COMM_WORLD, &room));
    unsigned char *out = scratch(room + 1);
    OK(MPI_Pack(image + start, count, t, out, room, &position, MPI_COMM_WORLD));
    EQUAL(position, packed_size(t, count));
    return out;
}

// Sends with type `a`, receives with type `b` as many bytes (both of MPI_BYTE-compatible signature here).
static void exchange(int i, int as_bytes, enum kind from, enum kind to, int way, int free_early) {
    int count;
    size_t start;
    MPI_Datatype t = make_type(i, &count, &start);
    size_t n = packed_size(t, count);
    unsigned char *image = scratch(EXTENT);
    pattern(image, EXTENT, i + 1);
    unsigned char *data = pack(image, t, count, start);
    int typed = as_bytes != (me % 2 ? 1 : 2); // 0: typed at both ends, 1: the receiver takes bytes, 2: the sender sends bytes
    buf b = buf_new(me % 2 ? to : from, EXTENT, 8);
    void *p = typed ? b.p + start : b.p;
    MPI_Datatype mine = typed ? t : MPI_BYTE;
    int how_many = typed ? count : (int)n;
    MPI_Request r = MPI_REQUEST_NULL;
    MPI_Status s;
    if (me % 2 == 0) {
        if (typed) memory_put(b.kind, b.p, image, EXTENT);
        else memory_put(b.kind, b.p, data, n);
        switch (way) {
        case 0: OK(MPI_Send(p, how_many, mine, peer, 1, MPI_COMM_WORLD)); break;
        case 1: OK(MPI_Ssend(p, how_many, mine, peer, 1, MPI_COMM_WORLD)); break;
        default: OK(MPI_Isend(p, how_many, mine, peer, 1, MPI_COMM_WORLD, &r));
        }
        if (free_early) OK(MPI_Type_free(&t));
        OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
    } else {
        unsigned char *expected = scratch(EXTENT), *now = scratch(EXTENT);
        int position = 0;
        memset(expected, 0xa5, EXTENT);
        if (typed) OK(MPI_Unpack(data, n, &position, expected + start, how_many, mine, MPI_COMM_WORLD));
        else memcpy(expected, data, n);
        if (way == 1) OK(MPI_Recv(p, how_many, mine, peer, 1, MPI_COMM_WORLD, &s));
        else if (way == 3) {
            MPI_Message m;
            OK(MPI_Mprobe(peer, 1, MPI_COMM_WORLD, &m, &s));
            STATUS_CHECK(&s, peer, 1, n);
            OK(MPI_Mrecv(p, how_many, mine, &m, &s));
        } else {
            OK(MPI_Irecv(p, how_many, mine, peer, 1, MPI_COMM_WORLD, &r));
            if (free_early) {
                MPI_Datatype other; // takes the freed handle, if handles are used again
                OK(MPI_Type_free(&t));
                OK(MPI_Type_vector(10, 1, 3, MPI_INT, &other));
                OK(MPI_Type_commit(&other));
                OK(MPI_Wait(&r, &s));
                OK(MPI_Type_free(&other));
            } else OK(MPI_Wait(&r, &s));
        }
        int got;
        OK(MPI_Get_elements(&s, MPI_BYTE, &got));
        EQUAL(got, n);
        memory_get(b.kind, now, b.p, EXTENT);
        for (size_t k = 0; k < EXTENT; k++)
            if (now[k] != expected[k]) FAIL("type %d as_bytes %d pair %d%d way %d: byte %zu is %02x, not %02x", i, as_bytes, from, to, way, k, now[k], expected[k]);
        free(expected);
        free(now);
    }
    if (t != MPI_DATATYPE_NULL) OK(MPI_Type_free(&t));
    free(data);
    free(image);
    buf_free(b);
}

static void typed(void) {
    if (peer == MPI_PROC_NULL) return;
    FOR_ENDS(from, to)
        for (int i = 0; i < TYPES; i++)
            for (int as_bytes = 0; as_bytes < 3; as_bytes++) exchange(i, as_bytes, from, to, (i + as_bytes) % 4, 0);
}

static void freed_while_pending(void) {
    if (peer == MPI_PROC_NULL) return;
    FOR_ENDS(from, to)
        for (int i = 0; i < TYPES; i++) exchange(i, i % 3, from, to, 2, 1);
}

// MPI_BOTTOM and absolute addresses.
// A type that has the handle of one that a request held which is gone: the library may have kept that one's layout.
static void after_a_persistent_send(void) {
    if (me > 1) return;
    for (int round = 0; round < 3; round++) {
        buf once = buf_new(DEVICE, 5000, round), rows = buf_new(DEVICE, 3000, 2);
        MPI_Request r;
        MPI_Status s;
        MPI_Datatype gaps;
        buf_fill(once, round);
        if (me == 0) {
            OK(MPI_Send_init(once.p, 5000, MPI_BYTE, 1, 5, MPI_COMM_WORLD, &r));
            OK(MPI_Start(&r));
            OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
            OK(MPI_Request_free(&r));
        } else OK(MPI_Recv(once.p, 5000, MPI_BYTE, 0, 5, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        BUF_CHECK(once, round, 5000);
        OK(MPI_Type_vector(1000, 2, 3, MPI_BYTE, &gaps));
        OK(MPI_Type_commit(&gaps));
        if (me == 0) {
            buf_fill(rows, 10 + round);
            OK(MPI_Send(rows.p, 1, gaps, 1, 6, MPI_COMM_WORLD));
        } else {
            unsigned char *expected = scratch(3000), *got = scratch(2000);
            OK(MPI_Recv(rows.p, 2000, MPI_BYTE, 0, 6, MPI_COMM_WORLD, &s));
            STATUS_CHECK(&s, 0, 6, 2000);
            pattern(expected, 3000, 10 + round);
            memory_get(rows.kind, got, rows.p, 2000);
            for (int at = 0; at < 2000; at++) EQUAL(got[at], expected[at / 2 * 3 + at % 2]);
            free(expected);
            free(got);
        }
        OK(MPI_Type_free(&gaps));
        buf_free(once);
        buf_free(rows);
    }
}

static void bottom(void) {
    if (peer == MPI_PROC_NULL) return;
    size_t sizes[] = {61, 5000, 200000};
    FOR_ENDS(from, to)
        for (int i = 0; i < 3; i++) {
            int n = sizes[i];
            buf b = buf_new(me % 2 ? to : from, n, 2);
            MPI_Aint address;
            MPI_Datatype t;
            MPI_Status s;
            OK(MPI_Get_address(b.p, &address));
            OK(MPI_Type_create_hindexed(1, &n, &address, MPI_BYTE, &t));
            OK(MPI_Type_commit(&t));
            if (me % 2 == 0) { buf_fill(b, i); OK(MPI_Send(MPI_BOTTOM, 1, t, peer, 1, MPI_COMM_WORLD)); }
            else { OK(MPI_Recv(MPI_BOTTOM, 1, t, peer, 1, MPI_COMM_WORLD, &s)); STATUS_CHECK(&s, peer, 1, sizes[i]); BUF_CHECK(b, i, n); }
            OK(MPI_Type_free(&t));
            buf_free(b);
        }
}

// A typed receive that gets less than it has room for: whole blocks and a part of one.
static void partial(void) {
    if (peer == MPI_PROC_NULL) return;
    FOR_ENDS(from, to)
        for (int ints = 0; ints < 6000; ints = ints * 2 + 61) {
            MPI_Datatype t;
            OK(MPI_Type_vector(2000, 3, 8, MPI_INT, &t));
            OK(MPI_Type_commit(&t));
            if (me % 2 == 0) {
                buf b = buf_new(from, ints * 4, 4);
                buf_fill(b, ints);
                OK(MPI_Send(b.p, ints, MPI_INT, peer, 1, MPI_COMM_WORLD));
                buf_free(b);
            } else {
                buf b = buf_new(to, 2000 * 32, 0);
                MPI_Status s;
                int got;
                OK(MPI_Recv(b.p, 1, t, peer, 1, MPI_COMM_WORLD, &s));
                OK(MPI_Get_elements(&s, t, &got));
                EQUAL(got, ints);
                int *data = scratch(ints * 4 + 8), *now = scratch(b.bytes), poison;
                pattern((unsigned char *)data, ints * 4, ints);
                memory_get(b.kind, now, b.p, b.bytes);
                memset(&poison, 0xa5, 4);
                for (int k = 0; k < 16000; k++) {
                    int at = k % 8 < 3 ? k / 8 * 3 + k % 8 : ints;
                    if (k / 8 < 2000) EQUAL(now[k], at < ints ? data[at] : poison);
                }
                free(data);
                free(now);
                buf_free(b);
            }
            OK(MPI_Type_free(&t));
        }
}

static const struct test_case cases[] = {
    {"typed", typed}, {"freed_while_pending", freed_while_pending}, {"bottom", bottom}, {"partial", partial},
    {"after_a_persistent_send", after_a_persistent_send}, {0},
};
int main(int argc, char **argv) { return run_cases(argc, argv, cases, MPI_THREAD_SINGLE); }
