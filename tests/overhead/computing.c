// What a rank that computes loses to messages that are received meanwhile. Rank 1 works on streams of its own: kernels, copies
// from the host, copies to it, all three at once; with $ONLY_KERNELS the first alone. A unit of work is $LAUNCHES (8) of each.
// Rank 0 sends to it, or is yet to send. Every byte of the first round's messages is verified.
//   computing KERNELS.ptx BYTES MESSAGES WORK_US ROUNDS
// Messages are MESSAGES of BYTES, each in a place of its own; a round of work takes about WORK_US, and should be over before they
// are there. With $TURNS the library stands aside in every second round: then all is printed twice, first without it. Prints for
// each kind of work, and for each state of its receives, medians of ROUNDS that take turns:
//   WORK STATE US RATIO LOST GB/S BESIDE TEST
//     STATE   none: nothing is posted; pending: receives are posted, and nothing is sent; served: it is sent, and rank 1 makes no
//             MPI call (nothing arrives then, as only the MPI library matches); tested: it calls MPI_Testall between units
//     US      time of a unit of work
//     RATIO   speed beside that of `none`
//     LOST    what is lost of the speed beyond what messages took of the link from the host, which counts for copies from there
//     GB/S    what messages took of that link
//     BESIDE  the part of the work that was done before all messages were there; 1 where that is not asked
//     TEST    how long MPI_Testall took of a unit, us, and the longest call of a round
#define _GNU_SOURCE
#include "../../include/anabranch.h"
#include "../../simcuda/conformance/driver.h"
#include <mpi.h>

enum { NONE, PENDING, SERVED, TESTED, STATES };
enum { KERNELS = 1, UP = 2, DOWN = 4 };
enum { WORKS = 4, MOST = 64, COPY = 4 << 20, FILLED = 8 << 20, EMPTY = 0xEE };
static const char *const states[STATES] = {"none", "pending", "served", "tested"};
static const struct { const char *name; int kinds; } works[WORKS] = {
    {"kernels", KERNELS}, {"up", UP}, {"down", DOWN}, {"all", KERNELS | UP | DOWN}};

#define Q(call) ok(p_##call, #call)
static void ok(CUresult r, const char *what) {
    if (r) {
        fprintf(stderr, "%s: error %d\n", what, r);
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
}

static int me, messages, launches = 8;
static size_t bytes;
static CUdeviceptr data, filled, copied;
static void *host[2];
static CUstream streams[3];
static CUfunction kernel;
static MPI_Request requests[MOST];

static void setup(const char *kernels) {
    CUcontext context;
    CUmodule module;
    int gpus;
    load_driver();
    Q(cuInit(0));
    Q(cuDeviceGetCount(&gpus));
    Q(cuDevicePrimaryCtxRetain(&context, me % gpus));
    Q(cuCtxSetCurrent(context));
    for (int i = 0; i < 3; i++) Q(cuStreamCreate(&streams[i], 1));
    Q(cuMemAlloc_v2(&data, bytes * messages));
    Q(cuMemAlloc_v2(&filled, FILLED));
    Q(cuMemAlloc_v2(&copied, 2 * COPY));
    for (int i = 0; i < 2; i++) {
        Q(cuMemHostAlloc(&host[i], COPY, 0));
        memset(host[i], i + 1, COPY);
    }
    for (int k = 0; k < messages; k++) Q(cuMemsetD8Async(data + bytes * k, me ? EMPTY : k + 1, bytes, streams[0]));
    Q(cuCtxSynchronize());
    Q(cuModuleLoadData(&module, read_file(kernels)));
    Q(cuModuleGetFunction(&kernel, module, "fill_pattern"));
}

/* A unit of work on this rank's GPU, to its end. */
static void unit(int kinds) {
    for (int i = 0; i < launches; i++) {
        if (kinds & KERNELS) {
            unsigned long long length = FILLED, seed = i, start = 0;
            void *params[] = {&filled, &length, &seed, &start};
            Q(cuLaunchKernel(kernel, 264, 1, 1, 256, 1, 1, 0, streams[0], params, NULL));
        }
        if (kinds & UP) Q(cuMemcpyHtoDAsync_v2(copied, host[0], COPY, streams[1]));
        if (kinds & DOWN) Q(cuMemcpyDtoHAsync_v2(host[1], copied + COPY, COPY, streams[2]));
    }
    for (int i = 0; i < 3; i++) if (kinds >> i & 1) Q(cuStreamSynchronize(streams[i]));
}

static int units_in(int kinds, double work_us) {
    unit(kinds);
    double began = now_us();
    for (int i = 0; i < 4; i++) unit(kinds);
    return 1 + (int)(4 * work_us / (now_us() - began));
}

static uint64_t by_host(void) { return ANABRANCH_CALL(0, anabranch_counter, "multipath_host_bytes"); }

/* With the library, or without. */
static void set_aside(int on) {
    MPI_Barrier(MPI_COMM_WORLD);
    int left = ANABRANCH_CALL(-1, anabranch_aside, on);
    if (left) {
        fprintf(stderr, left < 0 ? "TURNS: the library is not there\n" : "the library cannot stand aside: messages are in the way\n");
        MPI_Abort(MPI_COMM_WORLD, 1);
    }
    MPI_Barrier(MPI_COMM_WORLD);
}

struct round { double us, host_gb_s, beside, test_us, longest_us; };

static void transfer(void) {
    for (int k = 0; k < messages; k++) {
        CUdeviceptr place = data + bytes * k;
        if (me) MPI_Irecv((void *)place, (int)bytes, MPI_BYTE, 0, k, MPI_COMM_WORLD, &requests[k]);
        else MPI_Isend((void *)place, (int)bytes, MPI_BYTE, 1, k, MPI_COMM_WORLD, &requests[k]);
    }
}

static struct round one(int kinds, int state, int units) {
    struct round r = {0, 0, 1, 0, 0};
    int are_here = 0;
    if (me && state != NONE) transfer();
    MPI_Barrier(MPI_COMM_WORLD);
    if (!me && (state == SERVED || state == TESTED)) {
        transfer();
        MPI_Waitall(messages, requests, MPI_STATUSES_IGNORE);
    }
    if (me) {
        uint64_t before = by_host();
        double began = now_us(), last = 0;
        for (int i = 0; i < units; i++) {
            unit(kinds);
            if (state == TESTED && !are_here) {
                double asked = now_us();
                MPI_Testall(messages, requests, &are_here, MPI_STATUSES_IGNORE);
                double answered = now_us();
                r.test_us += (answered - asked) / units;
                if (answered - asked > r.longest_us) r.longest_us = answered - asked;
                if (are_here) last = answered;
            }
        }
        double ended = now_us();
        r.us = (ended - began) / units;
        r.host_gb_s = (by_host() - before) / (ended - began) * 1e-3;
        if (are_here) r.beside = (last - began) / (ended - began);
    }
    MPI_Barrier(MPI_COMM_WORLD);
    if (!me && state == PENDING) {
        transfer();
        MPI_Waitall(messages, requests, MPI_STATUSES_IGNORE);
    }
    if (me && state != NONE && !are_here) MPI_Waitall(messages, requests, MPI_STATUSES_IGNORE);
    return r;
}

/* Rank 1: each message has the bytes that rank 0 has filled it with; then they are taken out again. */
static void verify(void) {
    for (int k = 0; me && k < messages; k++) {
        for (size_t done = 0; done < bytes; done += COPY) {
            size_t part = bytes - done < COPY ? bytes - done : COPY;
            unsigned char *found = host[1];
            Q(cuMemcpyDtoHAsync_v2(found, data + bytes * k + done, part, streams[2]));
            Q(cuStreamSynchronize(streams[2]));
            if (found[0] == k + 1 && !memcmp(found, found + 1, part - 1)) continue;
            fprintf(stderr, "message %d is not what was sent, within %d bytes from %zu on\n", k, COPY, done);
            MPI_Abort(MPI_COMM_WORLD, 1);
        }
    }
    if (me) Q(cuMemsetD8Async(data, EMPTY, bytes * messages, streams[0]));
    Q(cuStreamSynchronize(streams[0]));
}

/* Of one field of some rounds. */
static double median_of(const struct round *rounds, int n, size_t field) {
    double values[n];
    for (int i = 0; i < n; i++) values[i] = *(const double *)((const char *)&rounds[i] + field);
    qsort(values, n, sizeof *values, by_value);
    return values[n / 2];
}

int main(int argc, char **argv) {
    int provided;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_SINGLE, &provided);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    if (argc != 6 || (messages = atoi(argv[3])) < 1 || messages > MOST) {
        fprintf(stderr, "computing KERNELS.ptx BYTES MESSAGES(1..%d) WORK_US ROUNDS, two ranks\n", MOST);
        MPI_Abort(MPI_COMM_WORLD, 2);
    }
    bytes = strtoull(argv[2], NULL, 10);
    double work_us = atof(argv[4]);
    int rounds = atoi(argv[5]);
    if (getenv("LAUNCHES")) launches = atoi(getenv("LAUNCHES"));
    setup(argv[1]);
    int turns = getenv("TURNS") ? 2 : 1;
    struct round *found = calloc((size_t)turns * STATES * rounds, sizeof *found);
    for (int w = 0; w < (getenv("ONLY_KERNELS") ? 1 : WORKS); w++) {
        int units = me == 1 ? units_in(works[w].kinds, work_us) : 0;
        for (int i = -1; i < rounds; i++) /* the first of each does not count: memory is mapped, links are measured */
            for (int turn = 0; turn < turns; turn++) {
                if (turns > 1) set_aside(turn == 0);
                for (int state = 0; state < STATES; state++) {
                    struct round r = one(works[w].kinds, state, units);
                    if (i < 0 && state != NONE) verify();
                    found[(turn * STATES + state) * rounds + (i < 0 ? 0 : i)] = r;
                }
            }
        for (int turn = 0; me == 1 && turn < turns; turn++) {
            if (turns > 1) printf("-- %s\n", turn ? "with it" : "without the library");
            struct round *of_turn = found + (size_t)turn * STATES * rounds;
#define MEDIAN(state, field) median_of(of_turn + (state) * rounds, rounds, offsetof(struct round, field))
            double alone = MEDIAN(NONE, us), link = launches * 1.0 * COPY * 1e-3 / alone;
            for (int state = 0; state < STATES; state++) {
                double with = MEDIAN(state, us), host_gb_s = MEDIAN(state, host_gb_s);
                /* What the messages took of the link that copies up go over, as a share of it. */
                double taken = works[w].kinds & UP && link > 0 ? host_gb_s / link : 0;
                double ratio = alone / with, lost = 1 - ratio - (taken < 1 ? taken : 1);
                printf("%-8s %-8s %9.1f %6.3f %6.3f %6.1f %5.2f %6.2f %7.1f\n", works[w].name, states[state], with, ratio, lost > 0 ? lost : 0, host_gb_s, MEDIAN(state, beside), MEDIAN(state, test_us), MEDIAN(state, longest_us));
            }
        }
    }
    fflush(stdout);
    MPI_Finalize();
    return 0;
}
