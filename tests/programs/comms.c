// Communicators made in every way, freed while messages are under way, and made again.
#include "transfer.h"

// Every pair of neighbours of a communicator exchanges messages of all kinds, with one tag that others use too.
static void exchange_on(MPI_Comm comm, int seed) {
    int rank, size;
    OK(MPI_Comm_rank(comm, &rank));
    OK(MPI_Comm_size(comm, &size));
    size_t sizes[] = {3, 61, 20000, 100001};
    FOR_PAIRS(from, to)
        for (int i = 0; i < 4; i++) {
            size_t n = sizes[i];
            int right = (rank + 1) % size, left = (rank + size - 1) % size;
            buf a = buf_new(from, n, 1), b = buf_new(to, n, 2);
            MPI_Request r[2];
            MPI_Status s[2];
            buf_fill(a, seed * 1000 + rank);
            OK(MPI_Irecv(b.p, n, MPI_BYTE, left, 1, comm, &r[0]));
            OK(MPI_Isend(a.p, n, MPI_BYTE, right, 1, comm, &r[1]));
            OK(MPI_Waitall(2, r, s));
            STATUS_CHECK(&s[0], left, 1, n);
            BUF_CHECK(b, seed * 1000 + left, n);
            buf_free(a);
            buf_free(b);
        }
}

static void used_and_freed(MPI_Comm comm, int seed) {
    if (comm == MPI_COMM_NULL) return;
    exchange_on(comm, seed);
    OK(MPI_Comm_free(&comm));
}

static void made(void) {
    MPI_Comm c, d, e;
    MPI_Group world, some;
    MPI_Request r;
    int dims[2] = {ranks / 2, 2}, periods[2] = {1, 0}, keep[2] = {1, 0};
    OK(MPI_Comm_dup(MPI_COMM_WORLD, &c));
    exchange_on(c, 1);
    OK(MPI_Comm_dup(c, &d)); // a copy of a copy, both in use
    exchange_on(d, 2);
    exchange_on(c, 3);
    OK(MPI_Comm_free(&c));
    used_and_freed(d, 4);
    OK(MPI_Comm_dup_with_info(MPI_COMM_WORLD, MPI_INFO_NULL, &c));
    used_and_freed(c, 5);
    OK(MPI_Comm_idup(MPI_COMM_WORLD, &c, &r));
    exchange_on(MPI_COMM_WORLD, 6);
    OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
    used_and_freed(c, 7);
    OK(MPI_Comm_split(MPI_COMM_WORLD, me % 2, -me, &c));
    used_and_freed(c, 8);
    OK(MPI_Comm_split(MPI_COMM_WORLD, me == 0 ? MPI_UNDEFINED : 1, 0, &c));
    used_and_freed(c, 9);
    OK(MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, me, MPI_INFO_NULL, &c));
    used_and_freed(c, 10);
    OK(MPI_Comm_group(MPI_COMM_WORLD, &world));
    OK(MPI_Group_incl(world, 2, (int[]){1, 0}, &some));
    OK(MPI_Comm_create(MPI_COMM_WORLD, some, &c));
    used_and_freed(c, 11);
    if (me < 2) { OK(MPI_Comm_create_group(MPI_COMM_WORLD, some, 77, &c)); used_and_freed(c, 12); }
    OK(MPI_Group_free(&some));
    OK(MPI_Group_free(&world));
    OK(MPI_Cart_create(MPI_COMM_WORLD, 2, dims, periods, 1, &c));
    if (c != MPI_COMM_NULL) {
        exchange_on(c, 13);
        OK(MPI_Cart_sub(c, keep, &d));
        used_and_freed(d, 14);
        used_and_freed(c, 15);
    }
    OK(MPI_Dist_graph_create_adjacent(MPI_COMM_WORLD, 1, (int[]){(me + ranks - 1) % ranks}, MPI_UNWEIGHTED, 1, (int[]){(me + 1) % ranks},
                                      MPI_UNWEIGHTED, MPI_INFO_NULL, 0, &c));
    used_and_freed(c, 16);
    exchange_on(MPI_COMM_SELF, 17);
    OK(MPI_Comm_split(MPI_COMM_WORLD, me % 2, me, &c));
    OK(MPI_Intercomm_create(c, 0, MPI_COMM_WORLD, 1 - me % 2, 5, &d));
    size_t sizes[] = {61, 100001};
    FOR_PAIRS(from, to)
        for (int i = 0; i < 2; i++) { // between the two groups of an intercommunicator, same rank to same rank
            int rank, remote;
            OK(MPI_Comm_rank(d, &rank));
            OK(MPI_Comm_remote_size(d, &remote));
            int other = rank < remote ? rank : MPI_PROC_NULL;
            buf a = buf_new(from, sizes[i], 1), b = buf_new(to, sizes[i], 2);
            buf_fill(a, me);
            OK(MPI_Sendrecv(a.p, sizes[i], MPI_BYTE, other, 2, b.p, sizes[i], MPI_BYTE, other, 2, d, MPI_STATUS_IGNORE));
            if (other != MPI_PROC_NULL) BUF_CHECK(b, me ^ 1, sizes[i]);
            buf_free(a);
            buf_free(b);
        }
    OK(MPI_Intercomm_merge(d, me % 2, &e));
    used_and_freed(e, 18);
    OK(MPI_Comm_disconnect(&d));
    OK(MPI_Comm_free(&c));
}

#if MPI_VERSION < 4
int MPI_Comm_create_from_group(MPI_Group, const char *, MPI_Info, MPI_Errhandler, MPI_Comm *);
int MPI_Intercomm_create_from_groups(MPI_Group, int, MPI_Group, int, const char *, MPI_Info, MPI_Errhandler, MPI_Comm *);
#endif
#pragma weak MPI_Comm_create_from_group
#pragma weak MPI_Intercomm_create_from_groups

// An intercommunicator of the even and the odd ranks.
static MPI_Comm two_sides(int tag) {
    MPI_Comm side, inter;
    OK(MPI_Comm_split(MPI_COMM_WORLD, me % 2, me, &side));
    OK(MPI_Intercomm_create(side, 0, MPI_COMM_WORLD, 1 - me % 2, tag, &inter));
    OK(MPI_Comm_free(&side));
    return inter;
}

// What is made of two groups, again and again of the same ones, in use side by side and freed while messages are under way.
static void merged(void) {
    MPI_Comm kept[3];
    for (int i = 0; i < 3; i++) {
        MPI_Comm inter = two_sides(5), copy, part;
        OK(MPI_Intercomm_merge(inter, (me + i) % 2, &kept[i]));
        OK(MPI_Comm_dup(inter, &copy));
        OK(MPI_Comm_free(&inter));
        OK(MPI_Intercomm_merge(copy, me % 2, &part)); // of a copy
        used_and_freed(part, 30 + i);
        OK(MPI_Comm_split(copy, me / 2, me, &inter)); // a part of it, which is of two groups as well
        OK(MPI_Comm_free(&copy));
        OK(MPI_Intercomm_merge(inter, me % 2, &copy));
        OK(MPI_Comm_free(&inter));
        used_and_freed(copy, 40 + i);
    }
    for (int i = 0; i < 3; i++) exchange_on(kept[i], 50 + i);
    for (int i = 0; i < 3; i++) {
        size_t n = i ? 61 : 100001;
        int rank, size;
        MPI_Comm part;
        MPI_Request r[2];
        OK(MPI_Comm_split(kept[i], 0, me, &part));
        OK(MPI_Comm_rank(part, &rank));
        OK(MPI_Comm_size(part, &size));
        buf a = buf_new(DEVICE, n, 1), b = buf_new(DEVICE, n, 2);
        buf_fill(a, rank);
        OK(MPI_Irecv(b.p, n, MPI_BYTE, (rank + 1) % size, 3, part, &r[0]));
        OK(MPI_Isend(a.p, n, MPI_BYTE, (rank + size - 1) % size, 3, part, &r[1]));
        OK(MPI_Comm_free(&part));
        OK(MPI_Comm_free(&kept[i]));
        OK(MPI_Waitall(2, r, MPI_STATUSES_IGNORE));
        BUF_CHECK(b, (rank + 1) % size, n);
        buf_free(a);
        buf_free(b);
    }
}

// Communicators of groups alone, without a parent.
static void from_groups(void) {
    if (!MPI_Comm_create_from_group || !MPI_Intercomm_create_from_groups) return;
    MPI_Group world, own, other;
    MPI_Comm c[2], inter;
    int evens[] = {0, 2}, odds[] = {1, 3};
    OK(MPI_Comm_group(MPI_COMM_WORLD, &world));
    OK(MPI_Group_incl(world, 2, me % 2 ? odds : evens, &own));
    OK(MPI_Group_incl(world, 2, me % 2 ? evens : odds, &other));
    for (int i = 0; i < 2; i++) OK(MPI_Comm_create_from_group(own, i ? "two" : "one", MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &c[i]));
    for (int i = 0; i < 2; i++) used_and_freed(c[i], 60 + i);
    for (int i = 0; i < 2; i++) {
        OK(MPI_Intercomm_create_from_groups(own, 1, other, 1, "both", MPI_INFO_NULL, MPI_ERRORS_ARE_FATAL, &inter));
        OK(MPI_Intercomm_merge(inter, me % 2, &c[0]));
        OK(MPI_Comm_free(&inter));
        used_and_freed(c[0], 70 + i);
    }
    OK(MPI_Group_free(&own));
    OK(MPI_Group_free(&other));
    OK(MPI_Group_free(&world));
}

// As the next one, on a communicator whose messages go by value.
static void inter_freed_while_pending(void) {
    if (peer == MPI_PROC_NULL) FAIL("an even number of ranks");
    size_t sizes[] = {5, 61, 1000001};
    FOR_ENDS(from, to)
        for (int i = 0; i < 3; i++) {
            size_t n = sizes[i];
            MPI_Comm inter = two_sides(8);
            MPI_Request r;
            buf a = buf_new(me % 2 ? to : from, n, 1);
            if (me % 2) OK(MPI_Irecv(a.p, n, MPI_BYTE, me / 2, 5, inter, &r));
            else { buf_fill(a, me); OK(MPI_Isend(a.p, n, MPI_BYTE, me / 2, 5, inter, &r)); }
            OK(MPI_Comm_free(&inter));
            OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
            if (me % 2) BUF_CHECK(a, me - 1, n);
            buf_free(a);
        }
}

// Handles come back with another meaning; identities must not.
static void remade(void) {
    for (int i = 0; i < 60; i++) {
        MPI_Comm c;
        if (i % 3 == 0) OK(MPI_Comm_dup(MPI_COMM_WORLD, &c));
        else if (i % 3 == 1) OK(MPI_Comm_split(MPI_COMM_WORLD, 0, i % 2 ? me : -me, &c));
        else OK(MPI_Comm_split(MPI_COMM_WORLD, me / 2, me, &c));
        int rank, size;
        OK(MPI_Comm_rank(c, &rank));
        OK(MPI_Comm_size(c, &size));
        size_t n = i % 4 ? 61 : 50000;
        buf a = buf_new(DEVICE, n, 1), b = buf_new(DEVICE, n, 2);
        buf_fill(a, i * 10 + rank);
        OK(MPI_Sendrecv(a.p, n, MPI_BYTE, (rank + 1) % size, 1, b.p, n, MPI_BYTE, (rank + size - 1) % size, 1, c, MPI_STATUS_IGNORE));
        BUF_CHECK(b, i * 10 + (rank + size - 1) % size, n);
        OK(MPI_Comm_free(&c));
        buf_free(a);
        buf_free(b);
    }
}

// A communicator may be freed while its messages are under way, and its handle be given to another at once.
static void freed_while_pending(void) {
    if (peer == MPI_PROC_NULL) FAIL("an even number of ranks");
    size_t sizes[] = {5, 61, 70000, 1000001};
    FOR_ENDS(from, to)
        for (int i = 0; i < 4; i++) {
            size_t n = sizes[i];
            MPI_Comm c, d;
            MPI_Request r, q;
            buf a = buf_new(me % 2 ? to : from, n, 1), b = buf_new(me % 2 ? to : from, n, 2);
            OK(MPI_Comm_dup(MPI_COMM_WORLD, &c));
            if (me % 2) OK(MPI_Irecv(a.p, n, MPI_BYTE, peer, 5, c, &r));
            else { buf_fill(a, 1); OK(MPI_Isend(a.p, n, MPI_BYTE, peer, 5, c, &r)); }
            OK(MPI_Comm_free(&c));
            OK(MPI_Comm_dup(MPI_COMM_WORLD, &d));
            if (me % 2) OK(MPI_Irecv(b.p, n, MPI_BYTE, peer, 5, d, &q));
            else { buf_fill(b, 2); OK(MPI_Isend(b.p, n, MPI_BYTE, peer, 5, d, &q)); }
            OK(MPI_Wait(&q, MPI_STATUS_IGNORE));
            OK(MPI_Wait(&r, MPI_STATUS_IGNORE));
            if (me % 2) { BUF_CHECK(a, 1, n); BUF_CHECK(b, 2, n); }
            OK(MPI_Comm_free(&d));
            buf_free(a);
            buf_free(b);
        }
}

// The same tag on two communicators: each message goes to its own.
static void side_by_side(void) {
    MPI_Comm c;
    OK(MPI_Comm_dup(MPI_COMM_WORLD, &c));
    FOR_ENDS(from, to) {
        enum { K = 20 };
        buf b[K];
        MPI_Request r[K];
        for (int i = 0; i < K; i++) {
            b[i] = buf_new(me % 2 ? to : from, i % 3 ? 61 : 30000, 1);
            if (me % 2 == 0) {
                buf_fill(b[i], i);
                OK(MPI_Isend(b[i].p, b[i].bytes, MPI_BYTE, peer, 1, i % 2 ? c : MPI_COMM_WORLD, &r[i]));
            }
        }
        if (me % 2) { // those of the copy first
            for (int i = 1; i < K; i += 2) OK(MPI_Irecv(b[i].p, b[i].bytes, MPI_BYTE, MPI_ANY_SOURCE, MPI_ANY_TAG, c, &r[i]));
            for (int i = 0; i < K; i += 2) OK(MPI_Irecv(b[i].p, b[i].bytes, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &r[i]));
        }
        OK(MPI_Waitall(K, r, MPI_STATUSES_IGNORE));
        for (int i = 0; i < K; i++) { if (me % 2) BUF_CHECK(b[i], i, b[i].bytes); buf_free(b[i]); }
    }
    OK(MPI_Comm_free(&c));
}

static const struct test_case cases[] = {
    {"made", made}, {"merged", merged}, {"from_groups", from_groups},
    {"inter_freed_while_pending", inter_freed_while_pending}, {"remade", remade},
    {"freed_while_pending", freed_while_pending}, {"side_by_side", side_by_side}, {0},
};
int main(int argc, char **argv) { return run_cases(argc, argv, cases, MPI_THREAD_SINGLE); }
