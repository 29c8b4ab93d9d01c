// One message whose parts lie in host memory and on the device, in several allocations: structs of absolute addresses
// received at and sent from MPI_BOTTOM, and types that reach out of their buffer. Layouts are random; what must arrive, and
// what must stay as it was, is computed byte by byte from the list of fields.
#include "transfer.h"

enum { FIELDS_MAX = 9, ALLOCATION_BYTES = 200000 };

typedef struct { buf b; size_t at, bytes; } field;

static uint64_t state;
static uint64_t below(uint64_t bound) {
    state += 0x9e3779b97f4a7c15u;
    return word_of(state, 1) % bound;
}

typedef struct {
    field fields[FIELDS_MAX];
    int count, allocations;
    buf memory[FIELDS_MAX];
    size_t bytes;
    MPI_Datatype type;
} message;

// Fields in random pieces of up to four allocations, host and device by turns. Both ranks draw the same lengths.
static message message_new(size_t longest) {
    message m = {.count = 2 + below(FIELDS_MAX - 1), .allocations = 2 + below(3)};
    int lengths[FIELDS_MAX];
    MPI_Aint places[FIELDS_MAX];
    size_t used[FIELDS_MAX] = {0};
    enum kind first = below(2);
    for (int i = 0; i < m.allocations; i++) m.memory[i] = buf_new((first + i) % 2, ALLOCATION_BYTES, below(64));
    for (int i = 0; i < m.count; i++) {
        int where = i < m.allocations ? i : (int)below(m.allocations);
        field *f = &m.fields[i];
        used[where] += below(40);
        *f = (field){.b = m.memory[where], .at = used[where], .bytes = 1 + below(longest)};
        CHECK(f->at + f->bytes <= ALLOCATION_BYTES, "room");
        used[where] += f->bytes;
        lengths[i] = (int)f->bytes;
        places[i] = (MPI_Aint)(f->b.p + f->at);
        m.bytes += f->bytes;
    }
    OK(MPI_Type_create_hindexed(m.count, lengths, places, MPI_BYTE, &m.type));
    OK(MPI_Type_commit(&m.type));
    return m;
}

static void message_free(message *m) {
    for (int i = 0; i < m->allocations; i++) buf_free(m->memory[i]);
    if (m->type != MPI_DATATYPE_NULL) OK(MPI_Type_free(&m->type));
}

static void message_poison(message *m) {
    for (int i = 0; i < m->allocations; i++) buf_poison(m->memory[i]);
}

static void message_fill(message *m, const unsigned char *data) {
    for (int i = 0; i < m->count; i++) {
        field *f = &m->fields[i];
        memory_put(f->b.kind, f->b.p + f->at, data, f->bytes);
        data += f->bytes;
    }
}

// The first `bytes` bytes arrived; everything else of the allocations is as buf_poison left it.
static void message_check(message *m, const unsigned char *data, size_t bytes) {
    for (int a = 0; a < m->allocations; a++) {
        buf b = m->memory[a];
        unsigned char *expected = scratch(b.total), *now = scratch(b.total);
        memset(expected, 0xa5, b.total);
        size_t position = 0;
        for (int i = 0; i < m->count; i++) {
            field *f = &m->fields[i];
            if (f->b.base == b.base) {
                size_t here = position >= bytes ? 0 : bytes - position < f->bytes ? bytes - position : f->bytes;
                memcpy(expected + b.lead + f->at, data + position, here);
            }
            position += f->bytes;
        }
        memory_get(b.kind, now, b.base, b.total);
        for (size_t i = 0; i < b.total; i++)
            if (now[i] != expected[i]) FAIL("seed %llu: allocation %d byte %zu is %02x, not %02x", (unsigned long long)state, a, i, now[i], expected[i]);
        free(expected);
        free(now);
    }
}

static int sent_in_parts; // messages sent from several places at once

static void send_in_a_way(int way, const void *p, int count, MPI_Datatype *type, int tag) {
    MPI_Request r;
    sent_in_parts += *type != MPI_BYTE;
    switch (way) {
    case 0: OK(MPI_Send(p, count, *type, peer, tag, MPI_COMM_WORLD)); break;
    case 1: OK(MPI_Ssend(p, count, *type, peer, tag, MPI_COMM_WORLD)); break;
    case 2: OK(MPI_Bsend(p, count, *type, peer, tag, MPI_COMM_WORLD)); break;
    case 3:
        OK(MPI_Isend(p, count, *type, peer, tag, MPI_COMM_WORLD, &r));
        if (*type != MPI_BYTE) OK(MPI_Type_free(type));
        OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
        break;
    default:
        OK(MPI_Send_init(p, count, *type, peer, tag, MPI_COMM_WORLD, &r));
        if (*type != MPI_BYTE) OK(MPI_Type_free(type));
        run_persistent(&r);
    }
}

static void receive_in_a_way(int way, void *p, int count, MPI_Datatype *type, int tag, size_t bytes) {
    MPI_Request r;
    MPI_Status s;
    int got;
    switch (way) {
    case 0: OK(MPI_Recv(p, count, *type, peer, tag, MPI_COMM_WORLD, &s)); break;
    case 1:
    case 2: {
        MPI_Message m;
        OK(MPI_Mprobe(peer, tag, MPI_COMM_WORLD, &m, &s));
        OK(MPI_Get_elements(&s, MPI_BYTE, &got));
        EQUAL(got, bytes);
        OK(MPI_Mrecv(p, count, *type, &m, &s));
        break;
    }
    case 3:
        OK(MPI_Irecv(p, count, *type, peer, tag, MPI_COMM_WORLD, &r));
        if (*type != MPI_BYTE) OK(MPI_Type_free(type));
        OK(MPI_Wait(&r, &s));
        break;
    default:
        OK(MPI_Recv_init(p, count, *type, peer, tag, MPI_COMM_WORLD, &r));
        if (*type != MPI_BYTE) OK(MPI_Type_free(type));
        OK(MPI_Start(&r));
        OK(MPI_Wait(&r, &s));
        OK(MPI_Request_free(&r));
    }
    EQUAL(s.MPI_SOURCE, peer);
    OK(MPI_Get_elements(&s, MPI_BYTE, &got));
    EQUAL(got, bytes);
}

// A message in several places to one of several places, or to a plain buffer, or from one.
static void exchange(int round, size_t longest) {
    uint64_t common = (uint64_t)round * 1000003 + number_from("SEED", 1);
    state = common;
    int shape = (int)below(3), way = (int)below(5), received = (int)below(5); // 0: from several to several, 1: to one, 2: from one
    enum kind plain = below(2);
    // The receiver's fields are others than the sender's, and have room for at least as much.
    message m = {.type = MPI_DATATYPE_NULL};
    state = common * 3 + 7;
    message sent = message_new(longest);
    size_t bytes = sent.bytes;
    unsigned char *data = scratch(bytes);
    pattern(data, bytes, common);
    int sends = me % 2 == round % 2;
    if (sends && shape != 2) {
        message_fill(&sent, data);
        send_in_a_way(way, MPI_BOTTOM, 1, &sent.type, 7);
    } else if (sends) {
        buf b = buf_new(plain, bytes, 3);
        memory_put(b.kind, b.p, data, bytes);
        MPI_Datatype type = MPI_BYTE;
        send_in_a_way(way, b.p, (int)bytes, &type, 7);
        buf_free(b);
    } else if (shape == 1) {
        buf b = buf_new(plain, bytes, 5);
        MPI_Datatype type = MPI_BYTE;
        receive_in_a_way(received, b.p, (int)bytes, &type, 7, bytes);
        BUF_CHECK(b, common, bytes);
        buf_free(b);
    } else {
        for (state = common * 5 + 1;; message_free(&m)) {
            m = message_new(longest + 500);
            if (m.bytes >= bytes) break;
        }
        message_poison(&m);
        receive_in_a_way(received, MPI_BOTTOM, 1, &m.type, 7, bytes);
        message_check(&m, data, bytes);
        message_free(&m);
    }
    message_free(&sent);
    free(data);
}

static void exchange_all(int rounds, size_t longest) {
    unsigned char *room = scratch(1 << 20);
    int all;
    OK(MPI_Buffer_attach(room, 1 << 20));
    for (int round = 0; round < rounds; round++) exchange(round, longest);
    OK(MPI_Buffer_detach(&room, &all));
    free(room);
}

static void short_fields(void) { exchange_all(60, 40); }
static void long_fields(void) { exchange_all(40, 20000); }

// How many messages were sent from several places at once.
static void tell(void) {
    int all;
    OK(MPI_Reduce(&sent_in_parts, &all, 1, MPI_INT, MPI_SUM, 0, MPI_COMM_WORLD));
    if (me == 0) printf("sent in parts: %d\n", all);
}

// The lower address on the host and the other on the device, and the other way round: a vector of two blocks so far apart.
static void two_blocks(void) {
    for (int way = 0; way < 5; way++) {
        if (way == 2) continue; // nothing is attached
        for (int side = 0; side < 2; side++) {
            buf host = buf_new(HOST, 3000, 0), device = buf_new(DEVICE, 3000, 0);
            unsigned char *from = side ? device.p : host.p, *to = side ? host.p : device.p, data[2000];
            MPI_Datatype type, bytes = MPI_BYTE;
            pattern(data, sizeof data, way * 2 + side);
            OK(MPI_Type_create_hvector(2, 1000, to - from, MPI_BYTE, &type));
            OK(MPI_Type_commit(&type));
            if (me % 2 == 0) {
                memory_put(side ? device.kind : host.kind, from, data, 1000);
                memory_put(side ? host.kind : device.kind, to, data + 1000, 1000);
                send_in_a_way(way, from, 1, &type, 3);
                unsigned char back[2000];
                OK(MPI_Recv(back, 2000, MPI_BYTE, peer, 4, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
                CHECK(!memcmp(back, data, 2000), "what came back");
            } else {
                unsigned char now[2000];
                receive_in_a_way(way, from, 1, &type, 3, 2000);
                memory_get(side ? device.kind : host.kind, now, from, 1000);
                memory_get(side ? host.kind : device.kind, now + 1000, to, 1000);
                CHECK(!memcmp(now, data, 2000), "way %d side %d", way, side);
                send_in_a_way(0, now, 2000, &bytes, 4);
            }
            if (way < 3) OK(MPI_Type_free(&type));
            buf_free(host);
            buf_free(device);
        }
    }
}

static const struct test_case cases[] = {
    {"short_fields", short_fields}, {"long_fields", long_fields}, {"two_blocks", two_blocks}, {"tell", tell}, {0},
};
int main(int argc, char **argv) {
    return run_cases(argc, argv, cases, MPI_THREAD_SINGLE);
}
