// Messages of random datatypes whose handles come and go all the time, between the two ranks of each pair.
// Each tree number stands for one exchange of one to four messages. Both ranks draw it from the seed, so that
// each knows what the other sends. What a receive must leave behind is computed byte by byte from both
// typemaps (typemap.h).
//   SEED=N       what all is drawn from; without it, a new one
//   FIRST=N      number of the first tree (default 0)
//   TREES=N      how many trees, at most (default 1000)
//   SECONDS=N    no tree begins after that time, but for the first LEAST=N
//   WITHOUT=...  what is not drawn: a list of overlap, threads, callbacks, bottom, large, transposed, and
//                shapes and basic types by name, as in "overlap,darray,mpi_long_double"
//   TREE_SHOW=1  describes each tree before its messages are sent
#include "typemap.h"
#include "../../include/anabranch.h"
#include <errno.h>
#include <pthread.h>
#include <semaphore.h>
#include <sys/random.h>
#include <time.h>

enum { MESSAGES = 4, SECTION = 7 << 20, ATTACHED = 32 << 20, LEFTOVERS = 256 };

// ---- one exchange ----------------------------------------------------------------------------------------

#define PLANS(X) X(ONE) X(SEVERAL) X(BOTH_WAYS) X(REPLACED)
#define OUT_WAYS(X) X(BY_SEND) X(BY_SSEND) X(BY_BSEND) X(BY_ISEND) X(BY_ISSEND) X(BY_IBSEND) \
    X(BY_SEND_INIT) X(BY_SSEND_INIT)
#define IN_WAYS(X) X(BY_RECV) X(BY_IRECV) X(BY_PROBE) X(BY_MRECV) X(BY_IMRECV) X(BY_RECV_INIT)
enum plan { PLANS(ENUM) PLAN_COUNT };
enum out_way { OUT_WAYS(ENUM) OUT_WAY_COUNT };
enum in_way { IN_WAYS(ENUM) IN_WAY_COUNT };
static const char *const plan_name[] = {PLANS(NAME)};
static const char *const out_way_name[] = {OUT_WAYS(NAME)};
static const char *const in_way_name[] = {IN_WAYS(NAME)};

struct end {
    struct node *type;
    long count;
    enum kind kind;
    int is_bottom, is_large; // by absolute addresses; by the call with a large count
    long low, high;          // its items lie in there, from the address that is passed
};

struct message {
    int from; // which rank of the pair sends it
    int tag;
    long bytes;
    uint64_t data;
    enum out_way out_way;
    struct end out, in;
};

static struct {
    enum plan plan;
    int messages, repeats;
    enum in_way in_way;
    struct message message[MESSAGES];
} tree;

static uint64_t seed;
static uint64_t common, own; // states: of what both ranks draw, and of what each draws for itself
static int side;             // 0 or 1: which rank of the pair this is
static char headline[200];   // what `running` says
static int without_overlap, without_threads, without_callbacks, without_bottom;
static long messages_sent, device_sends; // the latter with data

static void describe_end(FILE *to, const char *name, const struct end *e, int owner) {
    fprintf(to, "    %s: rank %d, %s%s%s, %ld of ", name, owner, e->kind == DEVICE ? "device" : "host",
            e->is_bottom ? ", from MPI_BOTTOM" : "", e->is_large ? ", large count" : "", e->count);
    describe(to, e->type);
    fprintf(to, "\n");
}

static void explain(FILE *to) {
    if (!tree.messages) return;
    fprintf(to, "%s: %s", headline, plan_name[tree.plan]);
    if (tree.plan == ONE) fprintf(to, ", %s", in_way_name[tree.in_way]);
    fprintf(to, tree.repeats > 1 ? ", %d times\n" : "\n", tree.repeats);
    for (int i = 0; i < tree.messages; i++) {
        struct message *m = &tree.message[i];
        fprintf(to, "  message %d, %ld bytes, tag %d", i, m->bytes, m->tag);
        fprintf(to, tree.plan == ONE || tree.plan == SEVERAL ? ", %s\n" : "\n", out_way_name[m->out_way]);
        describe_end(to, "sent", &m->out, (me & ~1) + m->from);
        describe_end(to, "received", &m->in, (me & ~1) + !m->from);
    }
    fflush(to);
}

static void give_up(const char *file, int line, const char *format, ...) {
    char text[4000];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    fprintf(stderr, "FAILED rank %d, %s, %s:%d: %s\n", me, headline, file, line, text);
    explain(stderr);
    usleep(300000); // a launcher that is told to abort may lose what was just written
    MPI_Abort(MPI_COMM_WORLD, 3);
    _exit(3);
}

// ---- the ends of handles ---------------------------------------------------------------------------------

// A handle that is freed inside another call of MPI, or by another thread.
struct victim { MPI_Datatype type; };

static int type_key, copied_key, comm_key;
static MPI_Datatype leftovers[LEFTOVERS];
static int leftover_count;

static struct victim *victim_of(MPI_Datatype type) {
    struct victim *v = scratch(sizeof *v);
    v->type = type;
    return v;
}

static int end_victim(void *victim) {
    struct victim *v = victim;
    int rc = MPI_Type_free(&v->type);
    free(v);
    return rc;
}

static int type_attribute_ends(MPI_Datatype type, int key, void *value, void *extra) {
    (void)type, (void)key, (void)extra;
    return end_victim(value);
}

static int type_is_copied(MPI_Datatype type, int key, void *extra, void *value, void *copy, int *flag) {
    (void)type, (void)key, (void)extra, (void)copy;
    *flag = 0;
    return end_victim(value);
}

static int comm_attribute_ends(MPI_Comm comm, int key, void *value, void *extra) {
    (void)comm, (void)key, (void)extra;
    return end_victim(value);
}

static int request_is_asked(void *victim, MPI_Status *status) {
    (void)victim;
    OK(MPI_Status_set_elements(status, MPI_BYTE, 0));
    OK(MPI_Status_set_cancelled(status, 0));
    status->MPI_SOURCE = MPI_UNDEFINED;
    status->MPI_TAG = MPI_UNDEFINED;
    return MPI_SUCCESS;
}

static int request_is_cancelled(void *victim, int complete) {
    (void)victim, (void)complete;
    return MPI_SUCCESS;
}

// A generalized request that is complete; whoever waits for it frees the type.
static MPI_Request request_around(MPI_Datatype type) {
    MPI_Request r;
    OK(MPI_Grequest_start(request_is_asked, end_victim, request_is_cancelled, victim_of(type), &r));
    OK(MPI_Grequest_complete(r));
    return r;
}

// The other thread frees what it is given while this one waits for it.
static struct { pthread_t thread; sem_t asked, done; MPI_Datatype *type; int rc; } other;

static void sem_take(sem_t *s) { while (sem_wait(s)) CHECK(errno == EINTR, "a semaphore"); }

static void *free_for_others(void *nothing) {
    for (;;) {
        sem_take(&other.asked);
        if (!other.type) return nothing;
        other.rc = MPI_Type_free(other.type);
        sem_post(&other.done);
    }
}

static void other_thread_start(void) {
    if (without_threads) return;
    CHECK(!sem_init(&other.asked, 0, 0) && !sem_init(&other.done, 0, 0), "semaphores");
    CHECK(!pthread_create(&other.thread, NULL, free_for_others, NULL), "a thread");
}

static void other_thread_end(void) {
    if (without_threads) return;
    other.type = NULL;
    sem_post(&other.asked);
    CHECK(!pthread_join(other.thread, NULL), "a thread");
}

static void release_by_thread(MPI_Datatype type) {
    other.type = &type;
    sem_post(&other.asked);
    sem_take(&other.done);
    OK(other.rc);
}

static void release_with(MPI_Datatype parent, MPI_Datatype type) {
    void *value;
    int is_there;
    OK(MPI_Type_get_attr(parent, type_key, &value, &is_there));
    if (is_there || without_callbacks) release(type);
    else OK(MPI_Type_set_attr(parent, type_key, victim_of(type)));
}

static void release_later(MPI_Datatype type) {
    if (leftover_count == LEFTOVERS) release(type);
    else leftovers[leftover_count++] = type;
}

static void release(MPI_Datatype type) {
    MPI_Datatype carrier = MPI_DATATYPE_NULL, copy = MPI_DATATYPE_NULL;
    MPI_Comm comm;
    MPI_Request r;
    int flag = 0, way = below(30);
    if (way < 6 && without_callbacks) way = 20;
    if ((way == 6 || way == 7) && without_threads) way = 20;
    switch (way) {
    case 0: // as an attribute of another type
        OK(MPI_Type_dup(MPI_INT, &carrier));
        OK(MPI_Type_set_attr(carrier, type_key, victim_of(type)));
        OK(MPI_Type_free(&carrier));
        break;
    case 1: // as another type is copied
        OK(MPI_Type_dup(MPI_INT, &carrier));
        OK(MPI_Type_set_attr(carrier, copied_key, victim_of(type)));
        OK(MPI_Type_dup(carrier, &copy));
        OK(MPI_Type_free(&copy));
        OK(MPI_Type_free(&carrier));
        break;
    case 2: // as an attribute is taken off a communicator
        OK(MPI_Comm_set_attr(MPI_COMM_WORLD, comm_key, victim_of(type)));
        OK(MPI_Comm_delete_attr(MPI_COMM_WORLD, comm_key));
        break;
    case 3: // as a communicator is freed
        OK(MPI_Comm_dup(MPI_COMM_SELF, &comm));
        OK(MPI_Comm_set_attr(comm, comm_key, victim_of(type)));
        OK(MPI_Comm_free(&comm));
        break;
    case 4: // as a request is waited for
        r = request_around(type);
        OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
        break;
    case 5:
        r = request_around(type);
        while (!flag) OK(MPI_Test(&r, &flag, MPI_STATUS_IGNORE));
        break;
    case 6:
    case 7: release_by_thread(type); break;
    default: OK(MPI_Type_free(&type));
    }
}

static void release_leftovers(void) {
    while (leftover_count) release(leftovers[--leftover_count]);
}

// Types of the pool whose time is over.
static void release_pool(int all) {
    for (int s = 0; s < SLOTS; s++) {
        if (pool[s].type == MPI_DATATYPE_NULL || (!all && pool[s].epoch == epoch_of(s))) continue;
        release(pool[s].type);
        pool[s].type = MPI_DATATYPE_NULL;
    }
}

static int is_large(const struct node *n) {
    int large = n->large;
    for (int i = 0; i < n->inners; i++) large |= n->inner[i]->large;
    return LARGE_CONSTRUCTORS && large;
}

static int is_predefined(int combiner) {
    return combiner == MPI_COMBINER_NAMED || combiner == MPI_COMBINER_F90_INTEGER
        || combiner == MPI_COMBINER_F90_REAL || combiner == MPI_COMBINER_F90_COMPLEX;
}

// Asks for the inner types, as libraries do, and frees the handles that it gets.
static void take_apart(MPI_Datatype type) {
    int integers, places, types, combiner, unused;
    MPI_Datatype inner[MEMBERS];
    OK(MPI_Type_get_envelope(type, &integers, &places, &types, &combiner));
    CHECK(!is_predefined(combiner) && types <= MEMBERS, "combiner %d, %d types", combiner, types);
    int *i = keep((integers + 1) * sizeof *i);
    MPI_Aint *a = keep((places + 1) * sizeof *a);
    OK(MPI_Type_get_contents(type, integers, places, types, i, a, inner));
    for (int k = 0; k < types; k++) {
        OK(MPI_Type_get_envelope(inner[k], &unused, &unused, &unused, &combiner));
        if (!is_predefined(combiner)) release(inner[k]);
    }
}

// Types that nobody sends take the handles that have just come free.
static void churn(void) {
    __typeof__(limits) kept = limits;
    limits.bytes = 4000;
    limits.runs = 500;
    limits.span = 20000;
    limits.may_overlap = chance(30);
    limits.grain = 0;
    for (long left = below(4); left > 0; left--) {
        struct node *n = draw_tree(between(1, 3));
        if (!is_made(n)) continue;
        MPI_Datatype t = make(n);
        if (chance(30)) OK(MPI_Type_commit(&t));
        if (chance(30) && !is_large(n)) take_apart(t);
        if (chance(50)) release_later(t);
        else release(t);
    }
    limits = kept;
}

// ---- memory of the program's -----------------------------------------------------------------------------

// Where the items of one end lie, with guards around them.
struct place {
    enum kind kind;
    unsigned char *base; // a guard, the items, a guard
    size_t total;
    uintptr_t address; // that is passed
    CUdeviceptr own;   // an allocation of its own, or 0
};

static unsigned char *sections[2]; // of each kind, one for each message

static unsigned char *area(int which, size_t bytes) {
    static struct { unsigned char *p; size_t bytes; } kept[6];
    if (kept[which].bytes < bytes || !kept[which].p) {
        free(kept[which].p);
        kept[which].p = scratch(bytes);
        kept[which].bytes = bytes;
    }
    return kept[which].p;
}

static void sections_start(void) {
    sections[HOST] = scratch((size_t)MESSAGES * SECTION);
    if (role == 'H') return;
    CUdeviceptr p;
    CU(cu.alloc(&p, (size_t)MESSAGES * SECTION));
    sections[DEVICE] = (unsigned char *)(uintptr_t)p;
}

static void sections_end(void) {
    free(sections[HOST]);
    if (role != 'H') CU(cu.release((CUdeviceptr)(uintptr_t)sections[DEVICE]));
}

static struct place place_new(int section, const struct end *e) {
    struct place p = {.kind = e->kind, .total = 2 * GUARD + e->high - e->low};
    long align = e->type->align, before = GUARD - e->low;
    long at = round_up(below(chance(50) ? 64 : 5000) + before, align) - before;
    if (at < 0) at += align;
    CHECK(p.total + at <= SECTION, "a message spans too much");
    p.base = sections[p.kind] + (size_t)section * SECTION;
    if (p.kind == DEVICE && chance(4)) {
        CU(cu.alloc(&p.own, p.total + at));
        p.base = (unsigned char *)(uintptr_t)p.own;
    }
    p.base += at;
    p.address = (uintptr_t)p.base + before;
    CHECK(p.address % align == 0, "alignment");
    return p;
}

static void place_end(struct place *p) {
    if (p->own) CU(cu.release(p->own));
}

// The bytes of the items and between them are those of the seed.
static void place_fill(struct place *p, uint64_t data) {
    unsigned char *image = area(0, p->total);
    memset(image, 0xa5, p->total);
    pattern(image + GUARD, p->total - 2 * GUARD, data);
    memory_put(p->kind, p->base, image, p->total);
}

static void place_poison(struct place *p) {
    unsigned char *image = area(0, p->total);
    memset(image, 0xa5, p->total);
    memory_put(p->kind, p->base, image, p->total);
}

// Bytes of a message or of a buffer, and which of them nobody need bring.
struct bytes { unsigned char *p, *loose; };

static struct bytes bytes_area(int which, size_t count) {
    struct bytes b = {area(2 * which, count), area(2 * which + 1, count)};
    memset(b.loose, 0, count);
    return b;
}

// The first `count` bytes of a message, from or to the items of an end.
static void each_run(const struct end *e, long count, struct bytes items, struct bytes wire, int is_sent) {
    long done = 0;
    for (long item = 0; done < count; item++) {
        CHECK(item < e->count && e->type->size, "more bytes than items");
        for (long r = 0; r < e->type->run_count && done < count; r++) {
            struct run run = e->type->runs[r];
            long n = least_of(run.bytes, count - done), at = item * extent_of(e->type) + run.at - e->low;
            if (is_sent) {
                memcpy(wire.p + done, items.p + at, n);
                memset(wire.loose + done, run.is_loose, n);
            } else {
                memcpy(items.p + at, wire.p + done, n);
                if (run.is_loose) memset(items.loose + at, 1, n);
                else memcpy(items.loose + at, wire.loose + done, n);
            }
            done += n;
        }
    }
}

static uint64_t data_of(const struct message *m, int repeat) { return word_of(m->data, repeat); }

static struct bytes wire_of(const struct message *m, int repeat) {
    struct bytes items = bytes_area(0, m->out.high - m->out.low), wire = bytes_area(1, m->bytes);
    pattern(items.p, m->out.high - m->out.low, data_of(m, repeat));
    each_run(&m->out, m->bytes, items, wire, 1);
    return wire;
}

// The bytes of a place as they must be, as far as that is known; the guards are.
static struct bytes expected_of(const struct place *p) {
    struct bytes expected = bytes_area(2, p->total);
    memset(expected.p, 0xa5, p->total);
    return expected;
}

static void place_compare(struct place *p, const struct message *m, const struct end *e,
                          struct bytes expected, const char *what, int repeat) {
    unsigned char *now = area(0, p->total);
    memory_get(p->kind, now, p->base, p->total);
    if (!memcmp(now, expected.p, p->total)) return;
    long wrong = 0, first = -1;
    for (size_t i = 0; i < p->total; i++)
        if (now[i] != expected.p[i] && !expected.loose[i]) {
            if (!wrong++) first = i;
        }
    if (wrong)
        FAIL("message %d, %s, time %d: %ld of %ld bytes are wrong, the first at %ld from the address that "
             "was passed: %02x, not %02x", (int)(m - tree.message), what, repeat + 1, wrong, e->high - e->low,
             first - GUARD + e->low, now[first], expected.p[first]);
}

// What was sent is as it was.
static void check_sent(struct place *p, const struct message *m, int repeat) {
    struct bytes expected = expected_of(p);
    pattern(expected.p + GUARD, p->total - 2 * GUARD, data_of(m, repeat));
    place_compare(p, m, &m->out, expected, "what was sent", repeat);
}

// The message is where the receiver's type has its bytes, and all others are as they were: poison, or what
// was sent from the same buffer.
static void check_received(struct place *p, const struct message *m, int repeat, const struct message *sent) {
    struct bytes expected = expected_of(p);
    if (sent) pattern(expected.p + GUARD, p->total - 2 * GUARD, data_of(sent, repeat));
    struct bytes items = {expected.p + GUARD, expected.loose + GUARD};
    each_run(&m->in, m->bytes, items, wire_of(m, repeat), 0);
    place_compare(p, m, &m->in, expected, "what was received", repeat);
}

// ---- a type in use ---------------------------------------------------------------------------------------

struct use {
    const struct end *end;
    MPI_Datatype type;
    int is_owned, is_gone; // its handle is to be freed; was freed
    void *address;
    long count;
};

static struct use use_of(const struct end *e, const struct place *p) {
    struct use u = {.end = e, .type = make(e->type), .is_owned = is_made(e->type), .count = e->count,
                    .address = (void *)p->address};
    if (u.is_owned) OK(MPI_Type_commit(&u.type));
    if (!e->is_bottom) return u;
    MPI_Datatype absolute;
    MPI_Aint address;
    int count = e->count;
    OK(MPI_Get_address(u.address, &address));
    OK(MPI_Type_create_hindexed(1, &count, &address, u.type, &absolute));
    if (u.is_owned) release(u.type);
    OK(MPI_Type_commit(&absolute));
    u.type = absolute;
    u.is_owned = 1;
    u.address = MPI_BOTTOM;
    u.count = 1;
    return u;
}

static void let_go(struct use *u) {
    if (u->is_owned && !u->is_gone) release(u->type);
    u->is_gone = u->is_owned;
}

// Right after an operation has begun the program may do without the type, and others may get its handle.
static void let_go_early(struct use *u) {
    if (chance(60)) let_go(u);
    if (chance(50)) churn();
}

static void check_status(MPI_Status *s, const struct message *m, const struct use *u) {
    int count = -1, elements = -1;
    OK(MPI_Get_count(s, MPI_BYTE, &count));
    OK(MPI_Get_elements(s, MPI_BYTE, &elements));
    EQUAL(s->MPI_SOURCE, peer);
    EQUAL(s->MPI_TAG, m->tag);
    EQUAL(count, m->bytes);
    EQUAL(elements, m->bytes);
    if (!u || u->is_gone || u->end->is_bottom || !m->in.type->size) return;
    OK(MPI_Get_count(s, u->type, &count));
    EQUAL(count, m->bytes % m->in.type->size ? MPI_UNDEFINED : m->bytes / m->in.type->size);
}

static void count_sent(const struct message *m) {
    messages_sent++;
    if (m->out.kind == DEVICE && m->bytes) device_sends++;
}

#define CALL(u, function, ...) do { \
        if ((u)->end->is_large) OK(function##_c((u)->address, (u)->count, (u)->type, __VA_ARGS__)); \
        else OK(function((u)->address, (u)->count, (u)->type, __VA_ARGS__)); } while (0)

// What is buffered is gone once the buffer was detached.
static void make_room(long bytes) {
    static unsigned char *buffer;
    static long used;
    void *detached;
    int size;
    used += bytes + 4096;
    if (buffer && used < ATTACHED / 2) return;
    if (buffer) OK(MPI_Buffer_detach(&detached, &size));
    else buffer = scratch(ATTACHED);
    OK(MPI_Buffer_attach(buffer, ATTACHED));
    used = bytes + 4096;
}

static void begin_send(const struct message *m, struct use *u, MPI_Request *r) {
    *r = MPI_REQUEST_NULL;
    if (m->out_way == BY_BSEND || m->out_way == BY_IBSEND) make_room(m->bytes);
    switch (m->out_way) {
    case BY_SEND: CALL(u, MPI_Send, peer, m->tag, MPI_COMM_WORLD); break;
    case BY_SSEND: CALL(u, MPI_Ssend, peer, m->tag, MPI_COMM_WORLD); break;
    case BY_BSEND: CALL(u, MPI_Bsend, peer, m->tag, MPI_COMM_WORLD); break;
    case BY_ISEND: CALL(u, MPI_Isend, peer, m->tag, MPI_COMM_WORLD, r); break;
    case BY_ISSEND: CALL(u, MPI_Issend, peer, m->tag, MPI_COMM_WORLD, r); break;
    case BY_IBSEND: CALL(u, MPI_Ibsend, peer, m->tag, MPI_COMM_WORLD, r); break;
    case BY_SEND_INIT: CALL(u, MPI_Send_init, peer, m->tag, MPI_COMM_WORLD, r); break;
    default: CALL(u, MPI_Ssend_init, peer, m->tag, MPI_COMM_WORLD, r);
    }
}

static int is_persistent(const struct message *m) {
    return m->out_way == BY_SEND_INIT || m->out_way == BY_SSEND_INIT;
}

static void complete(MPI_Request *r, MPI_Status *s) {
    int flag = 0;
    if (chance(60)) OK(MPI_Wait(r, s));
    else while (!flag) OK(MPI_Test(r, &flag, s));
}

// ---- exchanges -------------------------------------------------------------------------------------------

static void send_one(struct message *m) {
    struct place p = place_new(0, &m->out);
    struct use u = use_of(&m->out, &p);
    MPI_Request r = MPI_REQUEST_NULL;
    if (is_persistent(m)) {
        begin_send(m, &u, &r);
        let_go_early(&u);
    }
    for (int i = 0; i < tree.repeats; i++) {
        place_fill(&p, data_of(m, i));
        count_sent(m);
        if (is_persistent(m)) OK(MPI_Start(&r));
        else begin_send(m, &u, &r);
        if (is_persistent(m) || (r != MPI_REQUEST_NULL && i == tree.repeats - 1)) let_go_early(&u);
        complete(&r, MPI_STATUS_IGNORE);
        if (chance(25)) check_sent(&p, m, i);
    }
    if (is_persistent(m)) OK(MPI_Request_free(&r));
    let_go(&u);
    place_end(&p);
}

static void receive_one(struct message *m) {
    struct place p = place_new(0, &m->in);
    struct use u = use_of(&m->in, &p);
    MPI_Request r = MPI_REQUEST_NULL;
    MPI_Message found;
    MPI_Status s;
    int tag = chance(15) ? MPI_ANY_TAG : m->tag;
    if (tree.in_way == BY_RECV_INIT) {
        CALL(&u, MPI_Recv_init, peer, tag, MPI_COMM_WORLD, &r);
        let_go_early(&u);
    }
    for (int i = 0; i < tree.repeats; i++) {
        int flag = 0, is_last = i == tree.repeats - 1;
        place_poison(&p);
        switch (tree.in_way) {
        case BY_RECV: CALL(&u, MPI_Recv, peer, tag, MPI_COMM_WORLD, &s); break;
        case BY_IRECV:
            CALL(&u, MPI_Irecv, peer, tag, MPI_COMM_WORLD, &r);
            if (is_last) let_go_early(&u);
            complete(&r, &s);
            break;
        case BY_PROBE:
            if (chance(50)) OK(MPI_Probe(peer, tag, MPI_COMM_WORLD, &s));
            else while (!flag) OK(MPI_Iprobe(peer, tag, MPI_COMM_WORLD, &flag, &s));
            check_status(&s, m, &u);
            CALL(&u, MPI_Recv, peer, tag, MPI_COMM_WORLD, &s);
            break;
        case BY_MRECV:
        case BY_IMRECV:
            if (chance(50)) OK(MPI_Mprobe(peer, tag, MPI_COMM_WORLD, &found, &s));
            else while (!flag) OK(MPI_Improbe(peer, tag, MPI_COMM_WORLD, &flag, &found, &s));
            check_status(&s, m, &u);
            if (chance(30)) churn();
            if (tree.in_way == BY_MRECV) CALL(&u, MPI_Mrecv, &found, &s);
            else {
                CALL(&u, MPI_Imrecv, &found, &r);
                if (is_last) let_go_early(&u);
                complete(&r, &s);
            }
            break;
        default:
            OK(MPI_Start(&r));
            let_go_early(&u);
            complete(&r, &s);
        }
        check_status(&s, m, &u);
        check_received(&p, m, i, NULL);
    }
    if (tree.in_way == BY_RECV_INIT) OK(MPI_Request_free(&r));
    let_go(&u);
    place_end(&p);
}

// Several messages under way at once, and generalized requests beside them that free a type at their end.
static void several(void) {
    struct place p[MESSAGES];
    struct use u[MESSAGES];
    MPI_Request r[2 * MESSAGES];
    MPI_Status s[2 * MESSAGES], one;
    int count = tree.messages, flag = 0, index, done, at[2 * MESSAGES];
    for (int i = 0; i < tree.messages; i++) {
        struct message *m = &tree.message[i];
        int is_sent = m->from == side;
        p[i] = place_new(i, is_sent ? &m->out : &m->in);
        if (is_sent) place_fill(&p[i], data_of(m, 0));
        else place_poison(&p[i]);
        u[i] = use_of(is_sent ? &m->out : &m->in, &p[i]);
        if (is_sent) { count_sent(m); begin_send(m, &u[i], &r[i]); }
        else CALL(&u[i], MPI_Irecv, peer, m->tag, MPI_COMM_WORLD, &r[i]);
        if (u[i].is_owned && !without_callbacks && chance(15)) {
            r[count++] = MPI_REQUEST_NULL;
            u[i].is_gone = 2;
        } else let_go_early(&u[i]);
    }
    for (int i = 0, next = tree.messages; i < tree.messages; i++)
        if (u[i].is_gone == 2) r[next++] = request_around(u[i].type);
    switch (below(5)) {
    case 0:
        OK(MPI_Waitall(count, r, s));
        break;
    case 1: while (!flag) OK(MPI_Testall(count, r, &flag, s)); break;
    case 2:
        for (int left = count; left; left--) {
            OK(MPI_Waitany(count, r, &index, &one));
            s[index] = one;
        }
        break;
    case 3:
        for (int left = count; left; left -= done) {
            MPI_Status some_of[2 * MESSAGES];
            OK(MPI_Testsome(count, r, &done, at, some_of));
            for (int k = 0; k < done; k++) s[at[k]] = some_of[k];
        }
        break;
    default: for (int i = count; i-- > 0;) OK(MPI_Wait(&r[i], &s[i]));
    }
    for (int i = 0; i < tree.messages; i++) {
        struct message *m = &tree.message[i];
        if (m->from == side) check_sent(&p[i], m, 0);
        else { check_status(&s[i], m, &u[i]); check_received(&p[i], m, 0, NULL); }
        let_go(&u[i]);
        place_end(&p[i]);
    }
}

static void both_ways(void) {
    struct message *out = &tree.message[side], *in = &tree.message[!side];
    struct place from = place_new(0, &out->out), to = place_new(1, &in->in);
    struct use a = use_of(&out->out, &from), b = use_of(&in->in, &to);
    MPI_Status s;
    place_fill(&from, data_of(out, 0));
    place_poison(&to);
    count_sent(out);
    if (out->out.is_large)
        OK(MPI_Sendrecv_c(a.address, a.count, a.type, peer, out->tag, b.address, b.count, b.type, peer,
                          in->tag, MPI_COMM_WORLD, &s));
    else
        OK(MPI_Sendrecv(a.address, a.count, a.type, peer, out->tag, b.address, b.count, b.type, peer,
                        in->tag, MPI_COMM_WORLD, &s));
    check_status(&s, in, &b);
    check_received(&to, in, 0, NULL);
    check_sent(&from, out, 0);
    let_go(&a);
    let_go(&b);
    place_end(&from);
    place_end(&to);
}

static void replaced(void) {
    struct message *out = &tree.message[side], *in = &tree.message[!side];
    struct place p = place_new(0, &out->out);
    struct use u = use_of(&out->out, &p);
    MPI_Status s;
    for (int i = 0; i < tree.repeats; i++) {
        place_fill(&p, data_of(out, i));
        count_sent(out);
        CALL(&u, MPI_Sendrecv_replace, peer, out->tag, peer, in->tag, MPI_COMM_WORLD, &s);
        check_status(&s, in, &u);
        check_received(&p, in, i, out);
    }
    let_go(&u);
    place_end(&p);
}

// ---- drawing an exchange ---------------------------------------------------------------------------------

// Of a message's bytes, at most; returns how many there are to be exactly, or -1.
static long draw_limits(void) {
    int class = below(100); // of size
    limits.bytes = class < 55 ? 200 : class < 84 ? 4096 : class < 94 ? 65536 : 1 << 20;
    limits.runs = 1000;
    limits.span = least_of(most_of(4 * limits.bytes, 4096), 3 << 19);
    limits.may_overlap = 0;
    limits.grain = 0;
    return class < 15 ? 61 : class < 17 ? 0 : -1;
}

static long draw_count(struct node *type) {
    long most = room_for(type);
    int way = below(100);
    if (way < 3) return 0;
    if (way < 60) return 1;
    return way < 95 ? least_of(most, between(2, 5)) : magnitude(least_of(most, 3000));
}

// As many items as are asked for, if they do not overlap one another; else one.
static long apart(struct node *type, long count) {
    return count > 1 && overlaps(row_of(type, count)) ? 1 : count;
}

static struct node *bytes_node(void) { return leaf_node(byte_leaf); }

static void finish_end(struct end *e, int owner) {
    long last = (e->count - 1) * extent_of(e->type);
    e->low = e->high = 0;
    if (e->count && e->type->size) {
        e->low = e->type->first + least_of(0, last);
        e->high = e->type->end + most_of(0, last);
    }
    e->kind = chance(65) ? DEVICE : HOST;
    if (role_of((me & ~1) + owner) == 'H') e->kind = HOST;
    e->is_bottom = chance(6) && e->high > e->low && !without_bottom;
    e->is_large = chance(15) && large_counts && !without_large;
}

// MPICH receives long messages in pieces that end where a basic item of the sender's ends, and fails where
// that is within one of the receiver's: if the types differ, the receiver's basic items are single bytes.
// MPICH 4 cuts anywhere, so that they must be of one size even if the types are the same.
static long grain_received(int is_one_type) {
#ifdef OPEN_MPI
    (void)is_one_type;
    return 0;
#else
    if (limits.bytes <= 4096 || (is_one_type && MPI_VERSION > 4)) return 0;
    return is_one_type ? 1L << below(4) : 1;
#endif
}

static void draw_message(struct message *m, int from, int both_replaced) {
    long exact = draw_limits();
    int height = between(1, 5);
    struct end *out = &m->out, *in = &m->in;
    int way = both_replaced ? 4 * below(2) : below(5);
    limits.may_overlap = !without_overlap && !both_replaced && chance(30);
    switch (way) {
    case 0: // one type at both ends
        limits.may_overlap = 0;
        limits.grain = grain_received(1);
        out->type = in->type = exact >= 0 ? draw_fitting(exact, height) : draw_tree(height);
        out->count = apart(out->type, exact >= 0 ? 1 : draw_count(out->type));
        in->count = both_replaced ? out->count : apart(in->type, out->count + below(3));
        if (in->count < out->count) in->count = out->count;
        break;
    case 1: // received as bytes
        out->type = exact >= 0 ? draw_fitting(exact, height) : draw_tree(height);
        out->count = exact >= 0 ? 1 : draw_count(out->type);
        in->type = bytes_node();
        in->count = out->count * out->type->size + (chance(50) ? 0 : below(300));
        break;
    case 2: // sent as bytes or as another type: to room for more
    case 3: {
        int may_overlap = limits.may_overlap;
        limits.may_overlap = 0;
        limits.grain = grain_received(0);
        in->type = exact >= 0 ? draw_fitting(exact, height) : draw_tree(height);
        in->count = apart(in->type, draw_count(in->type) + below(3));
        long most = least_of(in->count, room_for(in->type));
        long items = exact >= 0 ? least_of(in->count, 1) : chance(60) ? most : below(most + 1);
        long bytes = items * in->type->size;
        if (exact < 0 && in->type->grain && chance(40)) // a part of an item at the end
            bytes = below(most * in->type->size / in->type->grain + 1) * in->type->grain;
        limits.may_overlap = may_overlap;
        limits.grain = 0;
        out->type = way == 2 ? bytes_node() : draw_fitting(bytes, between(1, 4));
        out->count = way == 2 ? bytes : 1;
        break;
    }
    default: // another type of as many bytes
        if (both_replaced) limits.grain = grain_received(0);
        out->type = exact >= 0 ? draw_fitting(exact, height) : draw_tree(height);
        out->count = exact >= 0 ? 1 : draw_count(out->type);
        if (both_replaced) out->count = apart(out->type, out->count);
        limits.may_overlap = 0;
        limits.grain = grain_received(0);
        in->type = draw_fitting(out->count * out->type->size, between(1, 4));
        in->count = 1;
    }
    m->bytes = out->count * out->type->size;
    m->from = from;
    m->tag = chance(80) ? 5 : between(6, 8);
    m->data = draw();
    m->out_way = below(OUT_WAY_COUNT);
    finish_end(out, from);
    finish_end(in, !from);
}

static void draw_exchange(void) {
    int plan = below(100);
    tree.messages = 0;
    tree.plan = plan < 55 ? ONE : plan < 78 ? SEVERAL : plan < 90 ? BOTH_WAYS : REPLACED;
    tree.repeats = 1;
    tree.in_way = below(IN_WAY_COUNT);
    for (int i = 0; i < MESSAGES; i++) tree.message[i] = (struct message){0};
    struct message *m = tree.message;
    int first = below(2);
    switch (tree.plan) {
    case ONE:
        draw_message(m, first, 0);
        if (tree.in_way == BY_RECV_INIT || is_persistent(m) || chance(15)) tree.repeats = between(1, 3);
        tree.messages = 1;
        break;
    case SEVERAL:
        tree.messages = between(2, MESSAGES);
        for (int i = 0; i < tree.messages; i++) {
            static const enum out_way pending[] = {BY_ISEND, BY_ISSEND, BY_IBSEND};
            draw_message(&m[i], below(2), 0);
            m[i].out_way = pending[below(3)];
        }
        break;
    case BOTH_WAYS:
        draw_message(&m[0], 0, 0);
        draw_message(&m[1], 1, 0);
        tree.messages = 2;
        break;
    default:
        draw_message(&m[0], 0, 1);
        m[1] = m[0];
        m[1].from = 1;
        m[1].data = draw();
        m[1].out = m[0].in;
        m[1].in = m[0].out;
        tree.repeats = chance(20) ? 2 : 1;
        tree.messages = 2;
    }
}

static void exchange(void) {
    switch (tree.plan) {
    case ONE:
        if (tree.message[0].from == side) send_one(tree.message);
        else receive_one(tree.message);
        break;
    case SEVERAL: several(); break;
    case BOTH_WAYS: both_ways(); break;
    default: replaced();
    }
}

// ---- the program -----------------------------------------------------------------------------------------

static void on_crash(int number) {
    char line[300];
    int length = snprintf(line, sizeof line, "FAILED rank %d: %s: signal %d\n", me, headline, number);
    if (write(2, line, length)) {}
    signal(number, SIG_DFL);
    raise(number);
}

// Errors are told with the tree in which they came, whoever made the call.
static void on_error(MPI_Comm *comm, int *error, ...) {
    (void)comm;
    FAIL("an error of MPI: %s", words_of(*error));
}

static void handle_errors(MPI_Errhandler handler) {
    OK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, handler));
    OK(MPI_Comm_set_errhandler(MPI_COMM_SELF, handler));
}

static uint64_t common_seed(void) {
    const char *text = getenv("SEED");
    uint64_t s = 0;
    if (text && *text) s = strtoull(text, NULL, 10);
    else if (me == 0) {
        CHECK(getrandom(&s, sizeof s, 0) == sizeof s, "getrandom");
        s >>= 32;
    }
    OK(MPI_Bcast(&s, 1, MPI_UINT64_T, 0, MPI_COMM_WORLD));
    return s;
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + t.tv_nsec / 1e9;
}

static long run_trees(long first, long trees, long seconds) {
    static struct store here;
    int is_shown = number_from("TREE_SHOW", 0);
    double begun = now();
    long n = first, least = number_from("LEAST", 0);
    for (; n < first + trees; n++) {
        int is_over = seconds && n - first >= least && now() - begun >= seconds;
        if ((n - first) % 16 == 0) {
            OK(MPI_Bcast(&is_over, 1, MPI_INT, 0, MPI_COMM_WORLD));
            if (is_over) break;
            alarm(number_from("WATCHDOG", 100));
        }
        tree.messages = 0;
        snprintf(headline, sizeof headline,
                 "SEED=%llu FIRST=%ld TREES=1 (with those before it FIRST=%ld TREES=%ld)",
                 (unsigned long long)seed, n, first, n - first + 1);
        store = &here;
        store_clear(store);
        common = word_of(seed + me / 2, n);
        own = word_of(common, side);
        pool_time = n;
        state = &own;
        release_pool(0);
        state = &common;
        draw_exchange();
        state = &own;
        if (is_shown && !side) explain(stdout);
        exchange();
        release_leftovers();
    }
    tree.messages = 0;
    release_pool(1);
    return n - first;
}

int main(int argc, char **argv) {
    without_threads = is_left_out("threads");
    start(&argc, &argv, without_threads ? MPI_THREAD_SINGLE : MPI_THREAD_SERIALIZED);
    CHECK(ranks % 2 == 0, "an even number of ranks");
    running = headline;
    signal(SIGSEGV, on_crash);
    signal(SIGBUS, on_crash);
    MPI_Errhandler handler;
    OK(MPI_Comm_create_errhandler(on_error, &handler));
    handle_errors(MPI_ERRORS_RETURN); // not every library has Fortran's types
    find_leaves();
    handle_errors(handler);
    side = me % 2;
    seed = common_seed();
    pool_seed = word_of(seed + me / 2, -1);
    look_for_large_counts();
    without_overlap = is_left_out("overlap");
    without_callbacks = is_left_out("callbacks");
    without_bottom = is_left_out("bottom");
    without_large = is_left_out("large");
    for (int s = 0; s < SHAPE_COUNT; s++) without[s] = is_left_out(shape_name[s]);
    for (int s = 0; s < SLOTS; s++) pool[s].type = MPI_DATATYPE_NULL, pool[s].epoch = -1;
    OK(MPI_Type_create_keyval(MPI_TYPE_NULL_COPY_FN, type_attribute_ends, &type_key, NULL));
    OK(MPI_Type_create_keyval(type_is_copied, MPI_TYPE_NULL_DELETE_FN, &copied_key, NULL));
    OK(MPI_Comm_create_keyval(MPI_COMM_NULL_COPY_FN, comm_attribute_ends, &comm_key, NULL));
    sections_start();
    other_thread_start();
    long trees = run_trees(number_from("FIRST", 0), number_from("TREES", 1000), number_from("SECONDS", 0));
    other_thread_end();
    sections_end();
    snprintf(headline, sizeof headline, "SEED=%llu, end", (unsigned long long)seed);
    if (with_preload) EQUAL(ANABRANCH_CALL(UINT64_MAX, anabranch_counter, "sends_device"), device_sends);
    if (!without_callbacks) { // a type that ends in MPI_Finalize
        MPI_Datatype last;
        OK(MPI_Type_vector(3, 1, 2, MPI_INT, &last));
        OK(MPI_Comm_set_attr(MPI_COMM_SELF, comm_key, victim_of(last)));
    }
    if (me == 0) {
        printf("SEED=%llu: %ld trees, %ld messages of rank 0\n", (unsigned long long)seed, trees,
               messages_sent);
        fflush(stdout);
    }
    return finish(trees);
}
