// Random traffic. From a seed every rank draws the same script of rounds; in each round every rank posts its receives,
// sends, receives by matched probes what it left for later, and completes what it feels like. Everything is checked.
//   stress FIRST_SEED SEEDS
// $LONG percent of the messages, 3 if it is not said, are of up to 8 MiB.
#include "transfer.h"

enum { ROUNDS = 6, PER_ROUND = 40, COMMS = 3, LATER = 1000 };

struct letter { int from, to, tag, comm, later, send_kind, receive_kind, out, window; size_t bytes; uint64_t seed; };

static MPI_Comm comms[COMMS];
static uint64_t share_of_long;

static size_t random_size(uint64_t *state) {
    uint64_t pick = next_random(state) % 100;
    if (pick >= 100 - share_of_long) return next_random(state) % (8 << 20);
    if (pick < 5) return 0;
    if (pick < 25) return 61;
    if (pick < 50) return next_random(state) % 200;
    if (pick < 70) return next_random(state) % 20000;
    return next_random(state) % (1 << 20);
}

static struct letter draw(uint64_t *state, int i) {
    struct letter l;
    l.from = next_random(state) % ranks;
    l.to = next_random(state) % ranks;
    l.comm = next_random(state) % COMMS;
    l.tag = next_random(state) % 4;
    l.later = next_random(state) % 4 == 0;
    l.send_kind = next_random(state) % 3 != 0;
    l.receive_kind = next_random(state) % 3 != 0;
    l.out = next_random(state) % 4;
    l.window = next_random(state) % 8 == 0;
    l.bytes = random_size(state);
    l.seed = next_random(state) + i;
    if (l.later) l.tag += LATER; // what is received later has tags of its own: posting order is matching order
    return l;
}

struct open { buf b; struct letter *l; MPI_Request r; int receives; };

static void finish_one(struct open *o, MPI_Status *s) {
    if (o->receives) {
        STATUS_CHECK(s, o->l->from, o->l->tag, o->l->bytes);
        BUF_CHECK(o->b, o->l->seed, o->l->bytes);
    }
    buf_free(o->b);
}

// Completes all that is open, in a way drawn from the rank's own numbers.
static void complete(struct open *open, int count, uint64_t *state) {
    MPI_Request *r = scratch(count * sizeof *r);
    MPI_Status *s = scratch(count * sizeof *s);
    int *at = scratch(count * sizeof *at), some, index, flag = 0;
    for (int i = 0; i < count; i++) r[i] = open[i].r;
    switch (next_random(state) % 5) {
    case 0: OK(MPI_Waitall(count, r, s)); for (int i = 0; i < count; i++) finish_one(&open[i], &s[i]); break;
    case 1: while (!flag) OK(MPI_Testall(count, r, &flag, s)); for (int i = 0; i < count; i++) finish_one(&open[i], &s[i]); break;
    case 2: for (int left = count; left; left--) { OK(MPI_Waitany(count, r, &index, s)); finish_one(&open[index], s); } break;
    case 3:
        for (int left = count; left; left -= some) {
            OK(MPI_Testsome(count, r, &some, at, s));
            for (int k = 0; k < some; k++) finish_one(&open[at[k]], &s[k]);
        }
        break;
    default: for (int i = count; i-- > 0;) { OK(MPI_Wait(&r[i], s)); finish_one(&open[i], s); }
    }
    free(r);
    free(s);
    free(at);
}

static void receive_later(struct letter *l) {
    MPI_Message m;
    MPI_Status s;
    buf b = buf_new(l->receive_kind, l->bytes, l->seed % 11);
    if (l->window) {
        OK(MPI_Probe(l->from, l->tag, comms[l->comm], &s));
        STATUS_CHECK(&s, l->from, l->tag, l->bytes);
        OK(MPI_Recv(b.p, l->bytes, MPI_BYTE, l->from, l->tag, comms[l->comm], &s));
    } else {
        OK(MPI_Mprobe(l->from, l->tag, comms[l->comm], &m, &s));
        STATUS_CHECK(&s, l->from, l->tag, l->bytes);
        OK(MPI_Mrecv(b.p, l->bytes, MPI_BYTE, &m, &s));
    }
    STATUS_CHECK(&s, l->from, l->tag, l->bytes);
    BUF_CHECK(b, l->seed, l->bytes);
    buf_free(b);
}

static void one_round(uint64_t *script, uint64_t *own) {
    struct letter letters[PER_ROUND];
    struct open open[2 * PER_ROUND];
    int count = 0;
    for (int i = 0; i < PER_ROUND; i++) letters[i] = draw(script, i);
    for (int i = 0; i < PER_ROUND; i++) {
        struct letter *l = &letters[i];
        if (l->to != me || l->later) continue;
        struct open *o = &open[count++];
        *o = (struct open){.b = buf_new(l->receive_kind, l->bytes, l->seed % 7), .l = l, .receives = 1};
        OK(MPI_Irecv(o->b.p, l->bytes, MPI_BYTE, l->from, l->tag, comms[l->comm], &o->r));
    }
    for (int i = 0; i < PER_ROUND; i++) {
        struct letter *l = &letters[i];
        if (l->from != me) continue;
        buf b = buf_new(l->send_kind, l->bytes, l->seed % 5);
        MPI_Request r = MPI_REQUEST_NULL;
        buf_fill(b, l->seed);
        MPI_Comm comm = comms[l->comm];
        // Only what is received by a posted receive may be sent by a call that waits for it. To oneself, too.
        int out = l->later ? 2 + l->out % 2 : l->out;
        if (out == 0) OK(MPI_Send(b.p, l->bytes, MPI_BYTE, l->to, l->tag, comm));
        else if (out == 1) OK(MPI_Ssend(b.p, l->bytes, MPI_BYTE, l->to, l->tag, comm));
        else if (out == 2) OK(MPI_Isend(b.p, l->bytes, MPI_BYTE, l->to, l->tag, comm, &r));
        else OK(MPI_Issend(b.p, l->bytes, MPI_BYTE, l->to, l->tag, comm, &r));
        if (r == MPI_REQUEST_NULL) buf_free(b);
        else open[count++] = (struct open){.b = b, .l = l, .r = r};
    }
    for (int i = 0; i < PER_ROUND; i++) if (letters[i].to == me && letters[i].later) receive_later(&letters[i]);
    complete(open, count, own);
}

int main(int argc, char **argv) {
    start(&argc, &argv, MPI_THREAD_SINGLE);
    int first = argc > 1 ? atoi(argv[1]) : 1, seeds = argc > 2 ? atoi(argv[2]) : 4;
    share_of_long = number_from("LONG", 3);
    for (int seed = first; seed < first + seeds; seed++) {
        static char name[40];
        snprintf(name, sizeof name, "seed %d", seed);
        running = name;
        uint64_t script = seed * 7919 + 13, own = seed * 31 + me + 1;
        comms[0] = MPI_COMM_WORLD;
        OK(MPI_Comm_dup(MPI_COMM_WORLD, &comms[1]));
        OK(MPI_Comm_dup(comms[1], &comms[2]));
        for (int round = 0; round < ROUNDS; round++) {
            one_round(&script, &own);
            if (next_random(&script) % 3 == 0) barrier();
        }
        OK(MPI_Comm_free(&comms[1]));
        OK(MPI_Comm_free(&comms[2]));
        if (me == 0) { printf("ok %s\n", name); fflush(stdout); }
    }
    return finish(seeds);
}
