/* How fast a node is, by driver calls of one process: the figures by which the simulated node is judged, one line
 * "row <tab> value <tab> unit" each.
 *   gcc -O2 -o fidelity fidelity.c -ldl -pthread -lm && ./fidelity [PREFIX ...] > table.tsv
 * Runs unchanged on the vendor's driver (two GPUs; some rows ask for 3, 4 or 8) and on the simulated one, whose clock it
 * then reads. Medians of 9 on hardware. Some 20 s there. PREFIX: only the rows that begin so, or so. */
#define _GNU_SOURCE
#include "driver.h"
#include <unistd.h>

#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define MAX_GPUS 8
#define LARGEST (1024 * MIB)

static char **only; /* ends with a null pointer */
static int gpus, repeats = 9;
static CUcontext ctx[MAX_GPUS];
/* Of each GPU: where it sends from, where it receives; a stream each for direct copies, to the host, from the host. */
static CUdeviceptr from[MAX_GPUS], to[MAX_GPUS];
static CUstream direct[MAX_GPUS], down[MAX_GPUS], up[MAX_GPUS];
static char *host[MAX_GPUS];
static volatile uint32_t *flags;
enum { CHUNKS = 64 };
static CUevent events[MAX_GPUS][CHUNKS];

#define Q(call) ok(p_##call, #call)
static void ok(CUresult r, const char *what) {
    if (r) {
        fprintf(stderr, "%s: error %d\n", what, r);
        exit(1);
    }
}

static void use(int gpu) { Q(cuCtxSetCurrent(ctx[gpu])); }

static void settle(void) {
    for (int g = gpus - 1; g >= 0; g--) {
        use(g);
        Q(cuCtxSynchronize());
    }
}

static double median(double *t, int n) {
    qsort(t, n, sizeof *t, by_value);
    return t[n / 2];
}

static int wanted(const char *row) {
    for (char **prefix = only; *prefix; prefix++) if (!strncmp(row, *prefix, strlen(*prefix))) return 1;
    return !*only;
}

static void report(const char *row, double value, const char *unit) {
    printf("%s\t%.4g\t%s\n", row, value, unit);
    fflush(stdout);
}

/* Median time of what follows `prepare` in microseconds, with everything idle before and GPU 0 current. */
#define TIME(us, prepare, ...) \
    do { \
        double samples[32]; \
        for (int turn = -1; turn < repeats; turn++) { \
            settle(); \
            prepare; \
            double began = now_us(); \
            __VA_ARGS__; \
            double took = now_us() - began; \
            if (turn >= 0) samples[turn] = took; \
        } \
        us = median(samples, repeats); \
    } while (0)

static double rate(double bytes, double us) { return bytes / us / 1000; }

static void setup(void) {
    load_driver();
    Q(cuInit(0));
    Q(cuDeviceGetCount(&gpus));
    if (gpus > MAX_GPUS) gpus = MAX_GPUS;
    if (gpus < 2) {
        fprintf(stderr, "fidelity: two GPUs are needed\n");
        exit(1);
    }
    if (simcuda_clock_ns) repeats = 3;
    for (int g = 0; g < gpus; g++) {
        Q(cuDevicePrimaryCtxRetain(&ctx[g], g));
        use(g);
        Q(cuMemAlloc_v2(&from[g], LARGEST));
        Q(cuMemAlloc_v2(&to[g], LARGEST));
        Q(cuStreamCreate(&direct[g], 1));
        Q(cuStreamCreate(&down[g], 1));
        Q(cuStreamCreate(&up[g], 1));
        for (int i = 0; i < CHUNKS; i++) Q(cuEventCreate(&events[g][i], 2));
        Q(cuMemHostAlloc((void **)&host[g], 256 * MIB, 3));
    }
    use(0);
    Q(cuMemHostAlloc((void **)&flags, 4 * MAX_GPUS * CHUNKS, 3));
    for (int g = 0; g < gpus; g++) {
        use(g);
        for (int k = 0; k < gpus; k++)
            if (k != g) Q(cuCtxEnablePeerAccess(ctx[k], 0));
    }
}

/* ---- one pair, direct -------------------------------------------------------------------------------------------- */

static void curve(void) {
    static const double sizes[] = {0.000244140625, 0.25, 1, 4, 16, 64, 256, 512};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        size_t bytes = sizes[i] * MIB;
        char row[64];
        double us;
        snprintf(row, sizeof row, i ? "push.%gMiB" : "push.256B", sizes[i]);
        if (wanted(row)) {
            TIME(us, use(0), Q(cuMemcpyAsync(to[1], from[0], bytes, direct[0])); Q(cuStreamSynchronize(direct[0])));
            if (i) report(row, rate(bytes, us), "GB/s");
            else report(row, us, "us");
        }
        snprintf(row, sizeof row, i ? "pull.%gMiB" : "pull.256B", sizes[i]);
        if (wanted(row)) {
            TIME(us, use(1), Q(cuMemcpyAsync(to[1], from[0], bytes, direct[1])); Q(cuStreamSynchronize(direct[1])));
            if (i) report(row, rate(bytes, us), "GB/s");
            else report(row, us, "us");
        }
    }
}

static void loop(int gpu, size_t bytes, int n) {
    for (int i = 0; i < n; i++) Q(cuMemcpyAsync(to[1] + i * bytes, from[0] + i * bytes, bytes, direct[gpu]));
}

static CUgraphExec chain(int gpu, size_t bytes, int n) {
    CUgraph g;
    CUgraphNode node = NULL;
    CUgraphExec exec;
    Q(cuGraphCreate(&g, 0));
    for (int i = 0; i < n; i++) {
        Copy3D copy = {.srcKind = 2, .srcDevice = from[0] + i * bytes, .dstKind = 2, .dstDevice = to[1] + i * bytes,
            .width = bytes, .height = 1, .depth = 1};
        CUgraphNode before = node;
        Q(cuGraphAddMemcpyNode(&node, g, i ? &before : NULL, i ? 1 : 0, &copy, ctx[gpu]));
    }
    Q(cuGraphInstantiateWithFlags(&exec, g, 0));
    return exec;
}

static void batch(int gpu, size_t bytes, size_t n) {
    CUdeviceptr dst[64], src[64];
    size_t sizes[64], first = 0, fail;
    CopyAttributes order = {.order = 1};
    for (size_t i = 0; i < n; i++) dst[i] = to[1] + i * bytes, src[i] = from[0] + i * bytes, sizes[i] = bytes;
    if (p_cuMemcpyBatchAsync_v2) Q(cuMemcpyBatchAsync_v2(dst, src, sizes, n, &order, &first, 1, direct[gpu]));
    else Q(cuMemcpyBatchAsync(dst, src, sizes, n, &order, &first, 1, &fail, direct[gpu]));
}

static void windows(void) {
    static const size_t sizes[] = {64, 256, 1024, 4096};
    char row[64];
    double us;
    for (int i = 0; i < 4; i++) {
        size_t bytes = sizes[i] * KIB;
        for (int gpu = 0; gpu < 2; gpu++) {
            const char *side = gpu ? "pull" : "push";
            snprintf(row, sizeof row, "window16.%s.loop.%zuKiB", side, sizes[i]);
            if (wanted(row)) {
                TIME(us, use(gpu), loop(gpu, bytes, 16); Q(cuStreamSynchronize(direct[gpu])));
                report(row, us, "us");
            }
            snprintf(row, sizeof row, "window16.%s.batch.%zuKiB", side, sizes[i]);
            if (wanted(row)) {
                TIME(us, use(gpu), batch(gpu, bytes, 16); Q(cuStreamSynchronize(direct[gpu])));
                report(row, us, "us");
            }
        }
        snprintf(row, sizeof row, "window16.push.graph.%zuKiB", sizes[i]);
        if (wanted(row)) {
            use(0);
            CUgraphExec exec = chain(0, bytes, 16);
            TIME(us, use(0), Q(cuGraphLaunch(exec, direct[0])); Q(cuStreamSynchronize(direct[0])));
            report(row, us, "us");
            Q(cuGraphExecDestroy(exec));
        }
    }
    if (wanted("window64.push.loop.4KiB")) {
        TIME(us, use(0), loop(0, 4096, 64); Q(cuStreamSynchronize(direct[0])));
        report("window64.push.loop.4KiB", us, "us");
    }
    if (wanted("window64.push.batch.4KiB")) {
        TIME(us, use(0), batch(0, 4096, 64); Q(cuStreamSynchronize(direct[0])));
        report("window64.push.batch.4KiB", us, "us");
    }
}

/* ---- what calls cost the caller ---------------------------------------------------------------------------------- */

static void calls(void) {
    double us;
    if (wanted("call.copy.256B")) {
        TIME(us, use(0), Q(cuMemcpyAsync(to[1], from[0], 256, direct[0])));
        report("call.copy.256B", us, "us");
    }
    if (wanted("call.copy.each.of.16")) {
        TIME(us, use(0), loop(0, 4096, 16));
        report("call.copy.each.of.16", us / 16, "us");
    }
    if (wanted("call.down")) {
        TIME(us, use(0), Q(cuMemcpyDtoHAsync_v2(host[0], from[0], 65536, down[0])));
        report("call.down", us, "us");
    }
    if (wanted("call.up")) {
        TIME(us, use(1), Q(cuMemcpyHtoDAsync_v2(to[1], host[0], 65536, up[1])));
        report("call.up", us, "us");
    }
    if (wanted("call.event.record")) {
        TIME(us, use(0), for (int i = 0; i < 16; i++) Q(cuEventRecord(events[0][i], down[0])));
        report("call.event.record", us / 16, "us");
    }
    if (wanted("call.event.record.behind.copy")) {
        TIME(us, use(0); Q(cuMemcpyDtoHAsync_v2(host[0], from[0], 64 * MIB, down[0])), Q(cuEventRecord(events[0][0], down[0])));
        report("call.event.record.behind.copy", us, "us");
    }
    if (wanted("call.event.wait.other.gpu")) {
        TIME(us, use(0); Q(cuMemcpyDtoHAsync_v2(host[0], from[0], 64 * MIB, down[0])); Q(cuEventRecord(events[0][0], down[0])); use(1),
            Q(cuStreamWaitEvent(up[1], events[0][0], 0)));
        report("call.event.wait.other.gpu", us, "us");
    }
    if (wanted("call.write.value")) {
        TIME(us, use(0), for (int i = 0; i < 16; i++) Q(cuStreamWriteValue32_v2(down[0], (size_t)&flags[i], 1, 0)));
        report("call.write.value", us / 16, "us");
    }
    if (wanted("call.wait.value")) {
        TIME(us, use(1); flags[0] = 1, for (int i = 0; i < 4; i++) Q(cuStreamWaitValue32_v2(up[1], (size_t)&flags[0], 1, 0)));
        report("call.wait.value", us / 4, "us");
    }
    if (wanted("call.stream.query.idle")) {
        TIME(us, use(0), for (int i = 0; i < 16; i++) Q(cuStreamQuery(direct[0])));
        report("call.stream.query.idle", us / 16, "us");
    }
    if (wanted("call.stream.synchronize.idle")) {
        TIME(us, use(0), for (int i = 0; i < 16; i++) Q(cuStreamSynchronize(direct[0])));
        report("call.stream.synchronize.idle", us / 16, "us");
    }
    /* A flag that the stream writes, seen by a polling host. */
    if (wanted("flag.alone")) {
        TIME(us, use(0); flags[0] = 0, Q(cuStreamWriteValue32_v2(direct[0], (size_t)&flags[0], 1, 0)); while (!flags[0]) {});
        report("flag.alone", us, "us");
    }
    if (wanted("flag.behind.256B")) {
        TIME(us, use(0); flags[0] = 0, Q(cuMemcpyAsync(to[1], from[0], 256, direct[0]));
            Q(cuStreamWriteValue32_v2(direct[0], (size_t)&flags[0], 1, 0)); while (!flags[0]) {});
        report("flag.behind.256B", us, "us");
    }
    if (wanted("register.64MiB")) {
        char *block = aligned_alloc(MIB, 64 * MIB);
        memset(block, 1, 64 * MIB);
        use(0);
        double began = now_us();
        Q(cuMemHostRegister_v2(block, 64 * MIB, 3));
        report("register.64MiB", now_us() - began, "us");
        Q(cuMemHostUnregister(block));
        free(block);
    }
    if (wanted("graph.one.gpu.launch.16")) {
        use(0);
        CUgraphExec exec = chain(0, 65536, 16);
        TIME(us, use(0), Q(cuGraphLaunch(exec, direct[0])));
        report("graph.one.gpu.launch.16", us, "us");
        Q(cuGraphExecDestroy(exec));
    }
    /* A graph over two GPUs: copies of 64 KiB, every third waits for the two before it. */
    static const int counts[] = {3, 6, 12, 24, 48};
    for (int k = 0; k < 5; k++) {
        char row[64];
        snprintf(row, sizeof row, "graph.two.gpus.launch.%d", counts[k]);
        if (!wanted(row)) continue;
        CUgraph g;
        CUgraphNode node[48];
        CUgraphExec exec;
        Q(cuGraphCreate(&g, 0));
        for (int i = 0; i < counts[k]; i++) {
            int third = i % 3;
            Copy3D copy = {.srcKind = 2, .dstKind = 2, .dstDevice = to[1] + i * 65536, .width = 65536, .height = 1, .depth = 1};
            copy.srcDevice = from[0] + i * 65536;
            if (third == 1) copy.dstKind = 1, copy.dstHost = host[0] + i * 65536;
            if (third == 2) copy.srcKind = 1, copy.srcHost = host[0] + (i - 1) * 65536;
            Q(cuGraphAddMemcpyNode(&node[i], g, third == 2 ? &node[i - 1] : NULL, third == 2, &copy, ctx[third == 2]));
        }
        use(0);
        double began = now_us();
        Q(cuGraphInstantiateWithFlags(&exec, g, 0));
        double made = now_us() - began;
        TIME(us, use(0), Q(cuGraphLaunch(exec, direct[0])));
        report(row, us, "us");
        snprintf(row, sizeof row, "graph.two.gpus.instantiate.%d", counts[k]);
        report(row, made, "us");
        Q(cuGraphExecDestroy(exec));
    }
}

/* ---- the host's memory ------------------------------------------------------------------------------------------- */

static void host_links(void) {
    char row[64];
    double us;
    for (int n = 1; n <= gpus; n *= 2) {
        snprintf(row, sizeof row, "down.%dgpus", n);
        if (wanted(row)) {
            TIME(us, , for (int g = 0; g < n; g++) use(g), Q(cuMemcpyDtoHAsync_v2(host[g], from[g], 256 * MIB, down[g]));
                for (int g = 0; g < n; g++) Q(cuStreamSynchronize(down[g])));
            report(row, rate(n * 256.0 * MIB, us), "GB/s");
        }
        snprintf(row, sizeof row, "up.%dgpus", n);
        if (wanted(row)) {
            TIME(us, , for (int g = 0; g < n; g++) use(g), Q(cuMemcpyHtoDAsync_v2(to[g], host[g], 256 * MIB, up[g]));
                for (int g = 0; g < n; g++) Q(cuStreamSynchronize(up[g])));
            report(row, rate(n * 256.0 * MIB, us), "GB/s");
        }
    }
}

enum Hand { EVENTS, FLAGS };

/* One message from GPU a to GPU b: `part` bytes through the host in `n` chunks. */
static void by_host(int a, int b, size_t at, size_t part, int n, enum Hand hand, int turn) {
    size_t chunk = (part / n + 255) & ~(size_t)255;
    for (int i = 0; i < n; i++) {
        size_t start = i * chunk, bytes = i == n - 1 ? part - start : chunk;
        int k = (turn * n + i) % CHUNKS;
        use(a);
        Q(cuMemcpyDtoHAsync_v2(host[a] + start, from[a] + at + start, bytes, down[a]));
        if (hand == EVENTS) Q(cuEventRecord(events[a][k], down[a]));
        else Q(cuStreamWriteValue32_v2(down[a], (size_t)&flags[a * CHUNKS + i], turn + 1, 0));
        use(b);
        if (hand == EVENTS) Q(cuStreamWaitEvent(up[b], events[a][k], 0));
        else Q(cuStreamWaitValue32_v2(up[b], (size_t)&flags[a * CHUNKS + i], turn + 1, 0));
        Q(cuMemcpyHtoDAsync_v2(to[b] + at + start, host[a] + start, bytes, up[b]));
    }
}

/* A window of messages of `mib`, `percent` of each by host. Both directions when `both`. */
static double mixed(size_t mib, double percent, int n, enum Hand hand, int host_first, int window, int both) {
    size_t bytes = mib * MIB, part = percent ? (size_t)(bytes * percent / 100) & ~(size_t)255 : 0, rest = bytes - part;
    double us;
    TIME(us, memset((void *)flags, 0, 4 * MAX_GPUS * CHUNKS),
        for (int w = 0; w < window; w++) {
            if (part && host_first) by_host(0, 1, rest, part, n, hand, w);
            if (rest) { use(0); Q(cuMemcpyAsync(to[1], from[0], rest, direct[0])); }
            if (rest && both) { use(1); Q(cuMemcpyAsync(to[0], from[1], rest, direct[1])); }
            if (part && !host_first) by_host(0, 1, rest, part, n, hand, w);
            if (part && both) by_host(1, 0, rest, part, n, hand, w);
        }
        Q(cuStreamSynchronize(direct[0])); if (both) Q(cuStreamSynchronize(direct[1]));
        if (part) Q(cuStreamSynchronize(up[1])); if (part && both) Q(cuStreamSynchronize(up[0])));
    return rate((both ? 2.0 : 1.0) * bytes * window, us);
}

static void mix(const char *name, size_t mib, double percent, int n, enum Hand hand, int host_first, int window, int both) {
    char row[96];
    snprintf(row, sizeof row, "%s.%zuMiB.%gpercent.%dchunks", name, mib, percent, n);
    if (wanted(row)) report(row, mixed(mib, percent, n, hand, host_first, window, both), "GB/s");
}

static void shares(void) {
    static const struct { size_t mib; double percent; int n; } one[] = {
        {16, 2, 4}, {16, 4, 4}, {16, 6, 4}, {16, 8, 4}, {64, 4, 4}, {64, 6, 4}, {64, 8, 4}, {64, 10, 4}, {64, 8, 8}, {64, 8, 16},
        {256, 6, 4}, {256, 8, 4}, {256, 11, 4}, {256, 8, 8}, {256, 8, 20}, {256, 10, 8}, {256, 11, 8}, {256, 12, 8}, {256, 15, 8}, {256, 10, 16},
        {512, 8, 8}, {512, 10, 8}, {512, 11, 8}, {512, 12, 8}, {512, 15, 8}, {512, 10, 16}};
    for (size_t i = 0; i < sizeof one / sizeof *one; i++) {
        mix("mixed.events", one[i].mib, one[i].percent, one[i].n, EVENTS, 0, 1, 0);
        mix("mixed.flags", one[i].mib, one[i].percent, one[i].n, FLAGS, 0, 1, 0);
    }
    mix("host.first", 64, 8, 4, EVENTS, 1, 1, 0);
    mix("host.first", 64, 8, 8, EVENTS, 1, 1, 0);
    mix("host.first", 64, 8, 16, EVENTS, 1, 1, 0);
    mix("host.first", 256, 10, 8, EVENTS, 1, 1, 0);
    for (int n = 4; n <= 32; n *= 2) mix("host.alone", 256, 100, n, EVENTS, 0, 1, 0);
    for (int n = 4; n <= 32; n *= 2) mix("host.alone", 64, 100, n, EVENTS, 0, 1, 0);
    mix("window16.mixed", 64, 8, 4, FLAGS, 0, 16, 0);
    mix("window16.mixed", 256, 10, 4, FLAGS, 0, 16, 0);
    mix("window16.mixed", 512, 10, 4, FLAGS, 0, 16, 0);
    for (size_t mib = 64; mib <= 512; mib *= mib == 64 ? 4 : 2) mix("both", mib, 0, 0, EVENTS, 0, 1, 1);
    mix("both.mixed", 64, 4, 4, FLAGS, 0, 1, 1);
    mix("both.mixed", 256, 8, 4, FLAGS, 0, 1, 1);
    mix("both.mixed", 512, 10, 8, FLAGS, 0, 1, 1);
    mix("both.window16", 64, 0, 0, FLAGS, 0, 16, 1);
    mix("both.window16.mixed", 64, 6, 4, FLAGS, 0, 16, 1);
    mix("both.window16.mixed", 256, 10, 4, FLAGS, 0, 16, 1);
    mix("both.window16.mixed", 512, 10, 4, FLAGS, 0, 16, 1);
}

/* ---- more GPUs --------------------------------------------------------------------------------------------------- */

static void relay(size_t mib, double percent) {
    char row[96];
    snprintf(row, sizeof row, "relay.%zuMiB.%gpercent.8chunks", mib, percent);
    if (gpus < 3 || !wanted(row)) return;
    size_t bytes = mib * MIB, chunk = (size_t)(bytes * percent / 800) & ~(size_t)255, part = 8 * chunk, rest = bytes - part;
    double us;
    TIME(us, use(0), Q(cuMemcpyAsync(to[1], from[0], rest, direct[0]));
        for (int i = 0; i < 8; i++) {
            use(0);
            Q(cuMemcpyAsync(to[2] + i * chunk, from[0] + rest + i * chunk, chunk, down[0]));
            Q(cuEventRecord(events[0][i], down[0]));
            use(2);
            Q(cuStreamWaitEvent(direct[2], events[0][i], 0));
            Q(cuMemcpyAsync(to[1] + rest + i * chunk, to[2] + i * chunk, chunk, direct[2]));
        }
        Q(cuStreamSynchronize(direct[0])); Q(cuStreamSynchronize(direct[2])));
    report(row, rate(bytes, us), "GB/s");
}

static void ring(int n, size_t mib, double percent, int chunks) {
    char row[96];
    snprintf(row, sizeof row, "ring%d.%zuMiB.%gpercent.%dchunks", n, mib, percent, chunks);
    if (gpus < n || !wanted(row)) return;
    size_t bytes = mib * MIB, part = (size_t)(bytes * percent / 100) & ~(size_t)255, rest = bytes - part;
    double us;
    TIME(us, , for (int g = 0; g < n; g++) {
            int next = (g + 1) % n;
            use(g);
            Q(cuMemcpyAsync(to[next], from[g], rest, direct[g]));
            if (part) by_host(g, next, rest, part, chunks, EVENTS, 0);
        }
        for (int g = 0; g < n; g++) {
            Q(cuStreamSynchronize(direct[g]));
            if (part) Q(cuStreamSynchronize(up[g]));
        });
    report(row, rate(bytes, us), "GB/s");
}

static void alltoall(int n, size_t mib) {
    char row[96];
    snprintf(row, sizeof row, "alltoall%d.%zuMiB", n, mib);
    if (gpus < n || !wanted(row)) return;
    size_t each = mib * MIB / n;
    double us;
    TIME(us, , for (int k = 1; k < n; k++) for (int g = 0; g < n; g++) {
            use(g);
            int peer = (g + k) % n;
            Q(cuMemcpyAsync(to[peer] + g * each, from[g] + peer * each, each, direct[g]));
        }
        for (int g = 0; g < n; g++) Q(cuStreamSynchronize(direct[g])));
    report(row, us, "us");
}

int main(int argc, char **argv) {
    (void)argc;
    only = argv + 1;
    setup();
    curve();
    windows();
    calls();
    host_links();
    shares();
    relay(512, 20);
    relay(512, 10);
    relay(64, 10);
    for (int n = 2; n <= 8; n *= 2) {
        ring(n, 64, 0, 0);
        ring(n, 64, 2, 1);
        ring(n, 64, 2, 2);
        ring(n, 64, 2, 4);
        ring(n, 256, 0, 0);
        ring(n, 256, 2, 4);
        alltoall(n, 64);
        alltoall(n, 1024);
    }
    settle();
    if (simcuda_late_ns) report("late", simcuda_late_ns() / 1000.0 / now_us() * 100, "percent");
    return 0;
}
