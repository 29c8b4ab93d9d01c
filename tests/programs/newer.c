// What MPI 4.0 and 4.1 have added, as programs ask for it at run time: each function that is found works, whether the MPI
// library has it or the preloaded one makes it of others. Prints the names of those that it has called.
#include "transfer.h"

// $FAULTS names what the MPI library itself gets wrong, so that it is not asked for: `isendrecv` (MPICH 4.0 and 5.0: no status, a
// crash with MPI_PROC_NULL), `waitsome` (MPICH: persistent collectives that are not complete), `types` (Open MPI 5.0: types of
// persistent collectives that were freed).
static int has_fault(const char *name) {
    const char *faults = getenv("FAULTS");
    return faults && strstr(faults, name);
}

enum { N = 5 };

static int called;

// Asks for a function of this type as a program does that was built without it.
#define FIND(name, ...) int (*name)(__VA_ARGS__) = (int (*)(__VA_ARGS__))dlsym(RTLD_DEFAULT, "MPI_" #name)
#define CALL(name, ...) do { if (name) { OK(name(__VA_ARGS__)); called++; if (me == 0) printf("called MPI_%s\n", #name); } } while (0)

typedef const void *cbuf_t;
typedef void *buf_t;
typedef MPI_Count C;
typedef MPI_Aint A;
typedef MPI_Datatype T;
typedef MPI_Comm W;
typedef MPI_Info I;
typedef MPI_Request R;

static int value(int from, int to, int i) { return from * 10000 + to * 100 + i; }

#define EXPECT(got, want) do { if ((got) != (want)) FAIL("%s: got %d, not %d", step, (int)(got), (int)(want)); } while (0)
static const char *step;

// Items that each rank has for the others, `counts[r]` of them for rank r at `places[r]`: ragged, with gaps.
static int *out, *in;
static C counts_out[64], counts_in[64];
static A places_out[64], places_in[64];
static int small_out[64], small_in[64];
static T types[64];

static void lay_out(void) {
    A at = 0, to = 0;
    for (int r = 0; r < ranks; r++) {
        counts_out[r] = (me + r) % 3 + 1; // as many from a to b as from b to a
        counts_in[r] = counts_out[r];
        places_out[r] = at;
        places_in[r] = to;
        at += counts_out[r] + 1;
        to += counts_in[r] + 2;
        types[r] = MPI_INT;
    }
    out = scratch(sizeof(int) * (at + 1));
    in = scratch(sizeof(int) * (to + 1));
    for (int r = 0; r < ranks; r++)
        for (int i = 0; i < counts_out[r]; i++) out[places_out[r] + i] = value(me, r, i);
}

static void clear_in(void) { for (int r = 0; r < ranks; r++) for (int i = 0; i < counts_in[r]; i++) in[places_in[r] + i] = -1; }
static void check_in(void) {
    for (int r = 0; r < ranks; r++) for (int i = 0; i < counts_in[r]; i++) EXPECT(in[places_in[r] + i], value(r, me, i));
}

static void run_persistently(R *r, void (*clear)(void), void (*check)(void)) {
    for (int i = 0; i < 3; i++) {
        clear();
        OK(MPI_Start(r));
        if (i == 1) { int done = 0; while (!done) OK(MPI_Test(r, &done, MPI_STATUS_IGNORE)); }
        else OK(MPI_Wait(r, MPI_STATUS_IGNORE));
        CHECK(*r != MPI_REQUEST_NULL, "a persistent request stays");
        check();
    }
    OK(MPI_Request_free(r));
    CHECK(*r == MPI_REQUEST_NULL, "freed");
}

// ---- collectives ----------------------------------------------------------------------------------------------

static int one[N * 64], all[N * 64];
static void fill_one(int base) { for (int i = 0; i < N; i++) one[i] = base + i; }

static void equal_parts(void) {
    FIND(Bcast_c, buf_t, C, T, int, W);
    FIND(Gather_c, cbuf_t, C, T, buf_t, C, T, int, W);
    FIND(Scatter_c, cbuf_t, C, T, buf_t, C, T, int, W);
    FIND(Allgather_c, cbuf_t, C, T, buf_t, C, T, W);
    FIND(Alltoall_c, cbuf_t, C, T, buf_t, C, T, W);
    FIND(Reduce_c, cbuf_t, buf_t, C, T, MPI_Op, int, W);
    FIND(Allreduce_c, cbuf_t, buf_t, C, T, MPI_Op, W);
    FIND(Scan_c, cbuf_t, buf_t, C, T, MPI_Op, W);
    FIND(Exscan_c, cbuf_t, buf_t, C, T, MPI_Op, W);
    FIND(Reduce_scatter_block_c, cbuf_t, buf_t, C, T, MPI_Op, W);
    FIND(Reduce_scatter_c, cbuf_t, buf_t, const C *, T, MPI_Op, W);
    int root = ranks - 1, sum = ranks * (ranks - 1) / 2;
    step = "Bcast";
    fill_one(me == root ? 70 : 0);
    CALL(Bcast_c, one, N, MPI_INT, root, MPI_COMM_WORLD);
    if (Bcast_c) for (int i = 0; i < N; i++) EXPECT(one[i], 70 + i);
    step = "Gather";
    fill_one(me * 100);
    memset(all, 0xff, sizeof all);
    CALL(Gather_c, one, N, MPI_INT, me == root ? all : NULL, me == root ? N : (C)1 << 40, MPI_INT, root, MPI_COMM_WORLD);
    if (Gather_c && me == root) for (int r = 0; r < ranks; r++) for (int i = 0; i < N; i++) EXPECT(all[r * N + i], r * 100 + i);
    step = "Scatter";
    memset(one, 0xff, sizeof one);
    CALL(Scatter_c, me == root ? all : NULL, N, MPI_INT, one, N, MPI_INT, root, MPI_COMM_WORLD);
    if (Scatter_c && Gather_c) for (int i = 0; i < N; i++) EXPECT(one[i], me * 100 + i);
    step = "Allgather";
    fill_one(me * 100);
    memset(all, 0xff, sizeof all);
    CALL(Allgather_c, one, N, MPI_INT, all, N, MPI_INT, MPI_COMM_WORLD);
    if (Allgather_c) for (int r = 0; r < ranks; r++) for (int i = 0; i < N; i++) EXPECT(all[r * N + i], r * 100 + i);
    step = "Alltoall in place";
    for (int r = 0; r < ranks; r++) all[r] = value(me, r, 0);
    CALL(Alltoall_c, MPI_IN_PLACE, (C)1 << 40, MPI_DATATYPE_NULL, all, 1, MPI_INT, MPI_COMM_WORLD);
    if (Alltoall_c) for (int r = 0; r < ranks; r++) EXPECT(all[r], value(r, me, 0));
    fill_one(me);
    step = "Reduce";
    CALL(Reduce_c, one, all, N, MPI_INT, MPI_SUM, root, MPI_COMM_WORLD);
    if (Reduce_c && me == root) for (int i = 0; i < N; i++) EXPECT(all[i], sum + ranks * i);
    step = "Allreduce";
    CALL(Allreduce_c, one, all, N, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (Allreduce_c) for (int i = 0; i < N; i++) EXPECT(all[i], sum + ranks * i);
    step = "Scan";
    CALL(Scan_c, one, all, N, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (Scan_c) for (int i = 0; i < N; i++) EXPECT(all[i], me * (me + 1) / 2 + (me + 1) * i);
    step = "Exscan";
    CALL(Exscan_c, one, all, N, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (Exscan_c && me) for (int i = 0; i < N; i++) EXPECT(all[i], me * (me - 1) / 2 + me * i);
    for (int r = 0; r < ranks; r++) { one[r] = me + r; counts_out[r] = 1; }
    step = "Reduce_scatter_block";
    CALL(Reduce_scatter_block_c, one, all, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (Reduce_scatter_block_c) EXPECT(all[0], sum + ranks * me);
    step = "Reduce_scatter";
    CALL(Reduce_scatter_c, one, all, counts_out, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
    if (Reduce_scatter_c) EXPECT(all[0], sum + ranks * me);
}

static void ragged_parts(void) {
    FIND(Gatherv_c, cbuf_t, C, T, buf_t, const C *, const A *, T, int, W);
    FIND(Scatterv_c, cbuf_t, const C *, const A *, T, buf_t, C, T, int, W);
    FIND(Allgatherv_c, cbuf_t, C, T, buf_t, const C *, const A *, T, W);
    FIND(Alltoallv_c, cbuf_t, const C *, const A *, T, buf_t, const C *, const A *, T, W);
    FIND(Alltoallw_c, cbuf_t, const C *, const A *, const T *, buf_t, const C *, const A *, const T *, W);
    lay_out();
    int root = ranks / 2;
    step = "Gatherv";
    clear_in();
    CALL(Gatherv_c, out + places_out[root], counts_out[root], MPI_INT, in, me == root ? counts_in : NULL, me == root ? places_in : NULL, MPI_INT, root, MPI_COMM_WORLD);
    if (Gatherv_c && me == root) check_in();
    step = "Scatterv";
    clear_in();
    CALL(Scatterv_c, out, me == root ? counts_out : NULL, me == root ? places_out : NULL, MPI_INT, in, counts_in[root], MPI_INT, root, MPI_COMM_WORLD);
    if (Scatterv_c) for (int i = 0; i < counts_in[root]; i++) EXPECT(in[i], value(root, me, i));
    step = "Alltoallv";
    clear_in();
    CALL(Alltoallv_c, out, counts_out, places_out, MPI_INT, in, counts_in, places_in, MPI_INT, MPI_COMM_WORLD);
    if (Alltoallv_c) check_in();
    step = "Alltoallw";
    A bytes_out[64], bytes_in[64];
    for (int r = 0; r < ranks; r++) { bytes_out[r] = places_out[r] * 4; bytes_in[r] = places_in[r] * 4; }
    clear_in();
    CALL(Alltoallw_c, out, counts_out, bytes_out, types, in, counts_in, bytes_in, types, MPI_COMM_WORLD);
    if (Alltoallw_c) check_in();
    step = "Allgatherv";
    C counts[64];
    A places[64];
    for (int r = 0; r < ranks; r++) { counts[r] = r + 1; places[r] = r * 9; }
    for (int i = 0; i <= me; i++) one[i] = me * 100 + i;
    CALL(Allgatherv_c, one, me + 1, MPI_INT, all, counts, places, MPI_INT, MPI_COMM_WORLD);
    if (Allgatherv_c) for (int r = 0; r < ranks; r++) for (int i = 0; i <= r; i++) EXPECT(all[r * 9 + i], r * 100 + i);
    free(out);
    free(in);
}

// A ring as a distributed graph, a torus, and their neighbourhood collectives: one has one neighbour each way, the other two each.
static void neighbours(void) {
    FIND(Neighbor_allgather_c, cbuf_t, C, T, buf_t, C, T, W);
    FIND(Neighbor_allgatherv_c, cbuf_t, C, T, buf_t, const C *, const A *, T, W);
    FIND(Neighbor_alltoall_c, cbuf_t, C, T, buf_t, C, T, W);
    FIND(Neighbor_alltoallv_c, cbuf_t, const C *, const A *, T, buf_t, const C *, const A *, T, W);
    FIND(Neighbor_alltoallw_c, cbuf_t, const C *, const A *, const T *, buf_t, const C *, const A *, const T *, W);
    W ring, line;
    int left = (me + ranks - 1) % ranks, right = (me + 1) % ranks, size[] = {ranks}, periods[] = {1};
    OK(MPI_Dist_graph_create_adjacent(MPI_COMM_WORLD, 1, &left, MPI_UNWEIGHTED, 1, &right, MPI_UNWEIGHTED, MPI_INFO_NULL, 0, &ring));
    OK(MPI_Cart_create(MPI_COMM_WORLD, 1, size, periods, 0, &line));
    C counts[] = {3, 3};
    A places[] = {1, 8}, bytes[] = {4, 32};
    T kinds[] = {MPI_INT, MPI_INT};
    fill_one(me * 100);
    step = "Neighbor_allgather";
    CALL(Neighbor_allgather_c, one, N, MPI_INT, all, N, MPI_INT, ring);
    if (Neighbor_allgather_c) for (int i = 0; i < N; i++) EXPECT(all[i], left * 100 + i);
    step = "Neighbor_allgatherv";
    CALL(Neighbor_allgatherv_c, one, 3, MPI_INT, all, counts, places, MPI_INT, ring);
    if (Neighbor_allgatherv_c) for (int i = 0; i < 3; i++) EXPECT(all[1 + i], left * 100 + i);
    step = "Neighbor_allgatherv on a torus";
    CALL(Neighbor_allgatherv_c, one, 3, MPI_INT, all, counts, places, MPI_INT, line);
    if (Neighbor_allgatherv_c) for (int i = 0; i < 3; i++) { EXPECT(all[1 + i], left * 100 + i); EXPECT(all[8 + i], right * 100 + i); }
    for (int k = 0; k < 2; k++) for (int i = 0; i < 3; i++) one[places[k] + i] = value(me, k, i);
    step = "Neighbor_alltoall";
    CALL(Neighbor_alltoall_c, one + 1, 3, MPI_INT, all, 3, MPI_INT, ring);
    if (Neighbor_alltoall_c) for (int i = 0; i < 3; i++) EXPECT(all[i], value(left, 0, i));
    if (ranks > 2) { // with two ranks both neighbours are the same, and who gets what is not for us to say
        step = "Neighbor_alltoallv";
        CALL(Neighbor_alltoallv_c, one, counts, places, MPI_INT, all, counts, places, MPI_INT, line);
        if (Neighbor_alltoallv_c) for (int i = 0; i < 3; i++) { EXPECT(all[1 + i], value(left, 1, i)); EXPECT(all[8 + i], value(right, 0, i)); }
        step = "Neighbor_alltoallw";
        CALL(Neighbor_alltoallw_c, one, counts, bytes, kinds, all, counts, bytes, kinds, line);
        if (Neighbor_alltoallw_c) for (int i = 0; i < 3; i++) { EXPECT(all[1 + i], value(left, 1, i)); EXPECT(all[8 + i], value(right, 0, i)); }
    }
    OK(MPI_Comm_free(&ring));
    OK(MPI_Comm_free(&line));
}

// ---- persistent collectives -----------------------------------------------------------------------------------

static int round_number;
static void next_round(void) { round_number++; fill_one(me == 0 ? round_number * 1000 : -1); }
static void check_bcast(void) { for (int i = 0; i < N; i++) EXPECT(one[i], round_number * 1000 + i); }
static void next_sum(void) { round_number++; fill_one(me + round_number); memset(all, 0xff, sizeof all); }
static void check_sum(void) { for (int i = 0; i < N; i++) EXPECT(all[i], ranks * (ranks - 1) / 2 + ranks * (round_number + i)); }
static void nothing(void) {}

static void persistent_collectives(void) {
    FIND(Bcast_init, buf_t, int, T, int, W, I, R *);
    FIND(Bcast_init_c, buf_t, C, T, int, W, I, R *);
    FIND(Allreduce_init, cbuf_t, buf_t, int, T, MPI_Op, W, I, R *);
    FIND(Allreduce_init_c, cbuf_t, buf_t, C, T, MPI_Op, W, I, R *);
    FIND(Alltoallv_init, cbuf_t, const int *, const int *, T, buf_t, const int *, const int *, T, W, I, R *);
    FIND(Alltoallv_init_c, cbuf_t, const C *, const A *, T, buf_t, const C *, const A *, T, W, I, R *);
    FIND(Alltoallw_init, cbuf_t, const int *, const int *, const T *, buf_t, const int *, const int *, const T *, W, I, R *);
    FIND(Barrier_init, W, I, R *);
    R r;
    T pair, copy;
    step = "Bcast_init";
    if (Bcast_init) {
        OK(MPI_Type_contiguous(N, MPI_INT, &pair)); // may be freed at once, and its handle come back
        OK(MPI_Type_commit(&pair));
        CALL(Bcast_init, one, 1, pair, 0, MPI_COMM_WORLD, MPI_INFO_NULL, &r);
        if (!has_fault("types")) OK(MPI_Type_free(&pair));
        OK(MPI_Type_vector(2, 1, 40, MPI_INT, &copy));
        OK(MPI_Type_commit(&copy));
        run_persistently(&r, next_round, check_bcast);
        OK(MPI_Type_free(&copy));
        if (has_fault("types")) OK(MPI_Type_free(&pair));
    }
    step = "Bcast_init_c";
    CALL(Bcast_init_c, one, N, MPI_INT, 0, MPI_COMM_WORLD, MPI_INFO_NULL, &r);
    if (Bcast_init_c) run_persistently(&r, next_round, check_bcast);
    step = "Allreduce_init";
    CALL(Allreduce_init, one, all, N, MPI_INT, MPI_SUM, MPI_COMM_WORLD, MPI_INFO_NULL, &r);
    if (Allreduce_init) run_persistently(&r, next_sum, check_sum);
    step = "Allreduce_init_c";
    CALL(Allreduce_init_c, one, all, N, MPI_INT, MPI_SUM, MPI_COMM_WORLD, MPI_INFO_NULL, &r);
    if (Allreduce_init_c) run_persistently(&r, next_sum, check_sum);
    lay_out();
    for (int k = 0; k < ranks; k++) small_out[k] = places_out[k], small_in[k] = places_in[k];
    int small_counts[64];
    for (int k = 0; k < ranks; k++) small_counts[k] = counts_out[k];
    step = "Alltoallv_init";
    CALL(Alltoallv_init, out, small_counts, small_out, MPI_INT, in, small_counts, small_in, MPI_INT, MPI_COMM_WORLD, MPI_INFO_NULL, &r);
    if (Alltoallv_init) run_persistently(&r, clear_in, check_in);
    step = "Alltoallv_init_c";
    CALL(Alltoallv_init_c, out, counts_out, places_out, MPI_INT, in, counts_in, places_in, MPI_INT, MPI_COMM_WORLD, MPI_INFO_NULL, &r);
    if (Alltoallv_init_c) run_persistently(&r, clear_in, check_in);
    for (int k = 0; k < ranks; k++) small_out[k] *= 4, small_in[k] *= 4;
    step = "Alltoallw_init";
    CALL(Alltoallw_init, out, small_counts, small_out, types, in, small_counts, small_in, types, MPI_COMM_WORLD, MPI_INFO_NULL, &r);
    if (Alltoallw_init) run_persistently(&r, clear_in, check_in);
    step = "Barrier_init";
    CALL(Barrier_init, MPI_COMM_WORLD, MPI_INFO_NULL, &r);
    if (Barrier_init) run_persistently(&r, nothing, nothing);
    // Several at once, beside other requests, in one array.
    step = "several";
    if (Bcast_init && Allreduce_init) {
        static int b[N], s[N], t[N];
        int word = me, got = -1;
        R q[5];
        OK(Bcast_init(b, N, MPI_INT, 0, MPI_COMM_WORLD, MPI_INFO_NULL, &q[0]));
        OK(Allreduce_init(s, t, N, MPI_INT, MPI_MAX, MPI_COMM_WORLD, MPI_INFO_NULL, &q[1]));
        OK(MPI_Send_init(&word, 1, MPI_INT, (me + 1) % ranks, 4, MPI_COMM_WORLD, &q[2]));
        OK(MPI_Recv_init(&got, 1, MPI_INT, (me + ranks - 1) % ranks, 4, MPI_COMM_WORLD, &q[3]));
        for (int round = 0; round < 3; round++) {
            for (int i = 0; i < N; i++) b[i] = me == 0 ? round + i : -1, s[i] = me * 10 + round, t[i] = -1;
            OK(MPI_Startall(4, q));
            OK(MPI_Irecv(&got, 0, MPI_INT, MPI_PROC_NULL, 0, MPI_COMM_WORLD, &q[4]));
            MPI_Status statuses[5];
            int done = 0, indices[5], count, flag;
            switch (has_fault("waitsome") ? 0 : round) {
            case 0: OK(MPI_Waitall(5, q, statuses)); break;
            case 1: while (done < 5) { OK(MPI_Waitsome(5, q, &count, indices, statuses)); done += count; } break;
            default:
                for (done = 0; done < 5; done++) { OK(MPI_Waitany(5, q, &flag, statuses)); CHECK(flag >= 0, "one of them"); }
                OK(MPI_Waitany(5, q, &flag, statuses));
                EQUAL(flag, MPI_UNDEFINED);
            }
            for (int i = 0; i < N; i++) { EXPECT(b[i], round + i); EXPECT(t[i], (ranks - 1) * 10 + round); }
            EXPECT(got, (me + ranks - 1) % ranks);
        }
        for (int i = 0; i < 4; i++) OK(MPI_Request_free(&q[i]));
    }
    free(out);
    free(in);
}

// ---- requests and messages ------------------------------------------------------------------------------------

static void pairs(void) {
    FIND(Isendrecv, cbuf_t, int, T, int, int, buf_t, int, T, int, int, W, R *);
    FIND(Isendrecv_c, cbuf_t, C, T, int, int, buf_t, C, T, int, int, W, R *);
    FIND(Isendrecv_replace, buf_t, int, T, int, int, int, int, W, R *);
    FIND(Isendrecv_replace_c, buf_t, C, T, int, int, int, int, W, R *);
    FIND(Sendrecv_c, cbuf_t, C, T, int, int, buf_t, C, T, int, int, W, MPI_Status *);
    int right = (me + 1) % ranks, left = (me + ranks - 1) % ranks;
    MPI_Status s;
    R r;
    for (int i = 0; i < 4; i++) {
        static const char *const names[] = {"Isendrecv", "Isendrecv_c", "Isendrecv_replace", "Isendrecv_replace_c"};
        step = names[i];
        fill_one(me * 100);
        memset(all, 0xff, sizeof all);
        memcpy(all, one, N * sizeof(int) * (i > 1));
        switch (i) {
        case 0: if (!Isendrecv) continue; CALL(Isendrecv, one, N, MPI_INT, right, 3, all, N + 2, MPI_INT, left, MPI_ANY_TAG, MPI_COMM_WORLD, &r); break;
        case 1: if (!Isendrecv_c) continue; CALL(Isendrecv_c, one, N, MPI_INT, right, 3, all, N, MPI_INT, MPI_ANY_SOURCE, 3, MPI_COMM_WORLD, &r); break;
        case 2: if (!Isendrecv_replace) continue; CALL(Isendrecv_replace, all, N, MPI_INT, right, 3, left, 3, MPI_COMM_WORLD, &r); break;
        default: if (!Isendrecv_replace_c) continue; CALL(Isendrecv_replace_c, all, N, MPI_INT, right, 3, left, 3, MPI_COMM_WORLD, &r);
        }
        if (i % 2) { int done = 0; while (!done) OK(MPI_Test(&r, &done, &s)); }
        else OK(MPI_Wait(&r, &s));
        CHECK(r == MPI_REQUEST_NULL, "complete");
        if (!has_fault("isendrecv")) STATUS_CHECK(&s, left, 3, N * sizeof(int));
        for (int k = 0; k < N; k++) EXPECT(all[k], left * 100 + k);
    }
    step = "Isendrecv with nobody";
    if (Isendrecv && !has_fault("isendrecv")) {
        OK(Isendrecv(one, N, MPI_INT, MPI_PROC_NULL, 3, all, N, MPI_INT, MPI_PROC_NULL, 3, MPI_COMM_WORLD, &r));
        OK(MPI_Wait(&r, &s));
        EQUAL(s.MPI_SOURCE, MPI_PROC_NULL);
        OK(Isendrecv(one, N, MPI_INT, right, 3, all, N, MPI_INT, MPI_PROC_NULL, 3, MPI_COMM_WORLD, &r));
        OK(MPI_Recv(all, N, MPI_INT, left, 3, MPI_COMM_WORLD, &s));
        OK(MPI_Wait(&r, &s));
        EQUAL(s.MPI_SOURCE, MPI_PROC_NULL);
    }
    step = "Sendrecv_c";
    CALL(Sendrecv_c, one, N, MPI_INT, right, 3, all, N, MPI_INT, left, 3, MPI_COMM_WORLD, &s);
    if (Sendrecv_c) STATUS_CHECK(&s, left, 3, N * sizeof(int));
    FIND(Request_get_status_any, int, const R *, int *, int *, MPI_Status *);
    FIND(Request_get_status_all, int, const R *, int *, MPI_Status *);
    FIND(Request_get_status_some, int, const R *, int *, int *, MPI_Status *);
    if (Request_get_status_any && Request_get_status_all && Request_get_status_some) {
        MPI_Status list[3];
        int word[3], flag, which, count, indices[3];
        R q[3] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL, MPI_REQUEST_NULL};
        step = "Request_get_status";
        CALL(Request_get_status_any, 3, q, &which, &flag, &s);
        CHECK(flag && which == MPI_UNDEFINED, "nothing is active");
        for (int i = 0; i < 2; i++) OK(MPI_Irecv(&word[i], 1, MPI_INT, left, 10 + i, MPI_COMM_WORLD, &q[i]));
        OK(MPI_Barrier(MPI_COMM_WORLD));
        OK(Request_get_status_any(3, q, &which, &flag, &s));
        EQUAL(flag, 0);
        OK(Request_get_status_some(3, q, &count, indices, list));
        EQUAL(count, 0);
        OK(MPI_Barrier(MPI_COMM_WORLD));
        OK(MPI_Send(&me, 1, MPI_INT, right, 11, MPI_COMM_WORLD));
        for (flag = 0; !flag;) OK(Request_get_status_any(3, q, &which, &flag, &s));
        EQUAL(which, 1);
        STATUS_CHECK(&s, left, 11, sizeof(int));
        CALL(Request_get_status_some, 3, q, &count, indices, list);
        EQUAL(count, 1);
        EQUAL(indices[0], 1);
        OK(Request_get_status_all(3, q, &flag, list));
        EQUAL(flag, 0);
        OK(MPI_Barrier(MPI_COMM_WORLD));
        OK(MPI_Send(&me, 1, MPI_INT, right, 10, MPI_COMM_WORLD));
        for (flag = 0; !flag;) OK(Request_get_status_all(3, q, &flag, list));
        CALL(Request_get_status_all, 3, q, &flag, list);
        STATUS_CHECK(&list[0], left, 10, sizeof(int));
        OK(MPI_Waitall(3, q, list));
    }
}

static void communicators(void) {
    FIND(Comm_idup_with_info, W, I, W *, R *);
    FIND(Comm_create_from_group, MPI_Group, const char *, I, MPI_Errhandler, W *);
    W c;
    R r;
    int sum;
    CALL(Comm_idup_with_info, MPI_COMM_WORLD, MPI_INFO_NULL, &c, &r);
    if (Comm_idup_with_info) {
        OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
        OK(MPI_Allreduce(&me, &sum, 1, MPI_INT, MPI_SUM, c));
        EQUAL(sum, ranks * (ranks - 1) / 2);
        OK(MPI_Comm_free(&c));
    }
    if (Comm_create_from_group) {
        MPI_Group world, some;
        MPI_Errhandler handler;
        OK(MPI_Comm_group(MPI_COMM_WORLD, &world));
        OK(MPI_Group_incl(world, 2, (int[]){1, 0}, &some));
        if (me < 2) {
            CALL(Comm_create_from_group, some, "two of them", MPI_INFO_NULL, MPI_ERRORS_RETURN, &c);
            OK(MPI_Comm_get_errhandler(c, &handler));
            CHECK(handler == MPI_ERRORS_RETURN, "the handler that was given");
            OK(MPI_Allreduce(&me, &sum, 1, MPI_INT, MPI_SUM, c));
            EQUAL(sum, 1);
            OK(MPI_Comm_free(&c));
        }
        OK(MPI_Group_free(&some));
        OK(MPI_Group_free(&world));
    }
}

// ---- windows, files, buffers ----------------------------------------------------------------------------------

static void windows(void) {
    FIND(Win_create_c, buf_t, A, A, I, W, MPI_Win *);
    FIND(Win_allocate_c, A, A, I, W, void *, MPI_Win *);
    FIND(Win_allocate_shared_c, A, A, I, W, void *, MPI_Win *);
    FIND(Put_c, cbuf_t, C, T, int, A, C, T, MPI_Win);
    FIND(Get_c, buf_t, C, T, int, A, C, T, MPI_Win);
    FIND(Accumulate_c, cbuf_t, C, T, int, A, C, T, MPI_Op, MPI_Win);
    FIND(Buffer_detach_c, void *, C *);
    MPI_Win w;
    int *memory, right = (me + 1) % ranks;
    static int own[N * 2];
    step = "Win_create";
    CALL(Win_create_c, own, sizeof own, 4, MPI_INFO_NULL, MPI_COMM_WORLD, &w);
    if (Win_create_c) {
        fill_one(me * 100);
        memset(own, 0, sizeof own);
        OK(MPI_Win_fence(0, w));
        if (Put_c) CALL(Put_c, one, N, MPI_INT, right, 2, N, MPI_INT, w);
        else OK(MPI_Put(one, N, MPI_INT, right, 2, N, MPI_INT, w));
        OK(MPI_Win_fence(0, w));
        for (int i = 0; i < N; i++) EXPECT(own[2 + i], (me + ranks - 1) % ranks * 100 + i);
        CALL(Get_c, all, N, MPI_INT, right, 2, N, MPI_INT, w);
        OK(MPI_Win_fence(0, w));
        if (Get_c) for (int i = 0; i < N; i++) EXPECT(all[i], me * 100 + i);
        CALL(Accumulate_c, one, N, MPI_INT, right, 2, N, MPI_INT, MPI_SUM, w);
        OK(MPI_Win_fence(0, w));
        if (Accumulate_c) for (int i = 0; i < N; i++) EXPECT(own[2 + i], 2 * ((me + ranks - 1) % ranks * 100 + i));
        OK(MPI_Win_free(&w));
    }
    step = "Win_allocate";
    CALL(Win_allocate_c, 64, 8, MPI_INFO_NULL, MPI_COMM_WORLD, &memory, &w);
    if (Win_allocate_c) { memory[15] = 1; OK(MPI_Win_free(&w)); }
    CALL(Win_allocate_shared_c, 64, 8, MPI_INFO_NULL, MPI_COMM_WORLD, &memory, &w);
    if (Win_allocate_shared_c) { memory[15] = 1; OK(MPI_Win_free(&w)); }
    step = "Buffer_detach";
    static char attached[5000];
    void *back = NULL;
    C bytes = 0;
    OK(MPI_Buffer_attach(attached, sizeof attached));
    if (!Buffer_detach_c) { int n; OK(MPI_Buffer_detach(&back, &n)); return; }
    CALL(Buffer_detach_c, &back, &bytes);
    EQUAL(bytes, sizeof attached);
    CHECK(back == attached, "the buffer");
}

static void files(void) {
    FIND(File_write_at_all_c, MPI_File, MPI_Offset, cbuf_t, C, T, MPI_Status *);
    FIND(File_read_at_all_c, MPI_File, MPI_Offset, buf_t, C, T, MPI_Status *);
    FIND(File_read_ordered_c, MPI_File, buf_t, C, T, MPI_Status *);
    char path[4096];
    MPI_File f;
    MPI_Status s;
    snprintf(path, sizeof path, "%s/newer.data", getenv("SCRATCH"));
    OK(MPI_File_open(MPI_COMM_WORLD, path, MPI_MODE_CREATE | MPI_MODE_RDWR, MPI_INFO_NULL, &f));
    fill_one(me * 100);
    CALL(File_write_at_all_c, f, me * N * 4, one, N, MPI_INT, &s);
    if (!File_write_at_all_c) OK(MPI_File_write_at_all(f, me * N * 4, one, N, MPI_INT, &s));
    OK(MPI_File_sync(f));
    OK(MPI_Barrier(MPI_COMM_WORLD));
    int other = (me + 1) % ranks;
    CALL(File_read_at_all_c, f, other * N * 4, all, N, MPI_INT, &s);
    if (File_read_at_all_c) for (int i = 0; i < N; i++) EXPECT(all[i], other * 100 + i);
    CALL(File_read_ordered_c, f, all, N, MPI_INT, &s);
    OK(MPI_File_close(&f));
}

// ---- what does not fit an int ---------------------------------------------------------------------------------

static int raised, raised_class;
static void on_error(MPI_Comm *comm, int *code, ...) {
    (void)comm;
    char text[MPI_MAX_ERROR_STRING];
    int length;
    OK(MPI_Error_class(*code, &raised_class));
    OK(MPI_Error_string(*code, text, &length));
    CHECK(strstr(text, "takes no more than 2147483647"), "%s", text);
    raised++;
}

static void large(void) {
    FIND(Sendrecv_c, cbuf_t, C, T, int, int, buf_t, C, T, int, int, W, MPI_Status *);
    FIND(Bcast_c, buf_t, C, T, int, W);
    FIND(Alltoallv_c, cbuf_t, const C *, const A *, T, buf_t, const C *, const A *, T, W);
    FIND(Allreduce_c, cbuf_t, buf_t, C, T, MPI_Op, W);
    if (!Sendrecv_c || !Bcast_c || !Alltoallv_c || !Allreduce_c) return;
    C many = ((C)1 << 31) + 3;
    MPI_Status s;
    MPI_Count got;
    T none, line;
    step = "large counts";
    // Items without data, and a few with data far apart.
    OK(MPI_Type_contiguous(0, MPI_INT, &none));
    OK(MPI_Type_commit(&none));
    OK(Sendrecv_c(one, many, none, (me + 1) % ranks, 1, all, many, none, MPI_ANY_SOURCE, 1, MPI_COMM_WORLD, &s));
    OK(MPI_Get_elements_x(&s, MPI_INT, &got));
    EQUAL(got, 0);
    OK(Bcast_c(one, many, none, 0, MPI_COMM_WORLD));
    OK(MPI_Type_free(&none));
    // Room for more than there is to come.
    OK(MPI_Type_create_resized(MPI_INT, 0, 0, &line));
    OK(MPI_Type_commit(&line));
    fill_one(7);
    OK(Sendrecv_c(one, 1, MPI_INT, (me + 1) % ranks, 2, all, many, line, (me + ranks - 1) % ranks, 2, MPI_COMM_WORLD, &s));
    EXPECT(all[0], 7);
    OK(MPI_Get_elements_x(&s, MPI_INT, &got));
    EQUAL(got, 1);
    OK(MPI_Type_free(&line));
    // A displacement that no type can stand for: an error that says so, by the communicator's handler, where the plain function is
    // what there is.
    if (!dlsym(RTLD_NEXT, "MPI_Alltoallv_c") || !getenv("PLAIN_ONLY")) return;
    MPI_Errhandler handler;
    W c;
    C counts[64] = {0};
    A places[64] = {0};
    places[ranks - 1] = (A)1 << 33;
    OK(MPI_Comm_dup(MPI_COMM_WORLD, &c));
    OK(MPI_Comm_create_errhandler(on_error, &handler));
    OK(MPI_Comm_set_errhandler(c, handler));
    int code = Alltoallv_c(one, counts, places, MPI_INT, all, counts, places, MPI_INT, c), class;
    CHECK(code != MPI_SUCCESS && raised == 1, "refused");
    OK(MPI_Error_class(code, &class));
    EQUAL(class, MPI_ERR_COUNT);
    EQUAL(raised_class, MPI_ERR_COUNT);
    OK(MPI_Errhandler_free(&handler));
    OK(MPI_Comm_free(&c));
}

static void tell(void) { if (me == 0) printf("functions called: %d\n", called); }

static const struct test_case cases[] = {
    {"equal_parts", equal_parts}, {"ragged_parts", ragged_parts}, {"neighbours", neighbours},
    {"persistent_collectives", persistent_collectives}, {"pairs", pairs}, {"communicators", communicators},
    {"windows", windows}, {"files", files}, {"large", large}, {"tell", tell}, {0},
};
int main(int argc, char **argv) { return run_cases(argc, argv, cases, MPI_THREAD_SINGLE); }
