/* How two processes take turns on one GPU, lines as those of fidelity.c: what a small operation takes until it is known to
 * be over, when the other process has made one since ("turns.*") and when this one made the last ("turns.*.alone").
 *   gcc -O2 -o turns turns.c -ldl && ./turns KERNELS.ptx > table.tsv
 * Runs unchanged on the vendor's driver (one GPU is enough) and on the simulated one, whose clock it then reads. Medians of
 * 21 on hardware. */
#define _GNU_SOURCE
#include "driver.h"
#include <sched.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { BYTES = 4096, ROUNDS = 21 };

static CUstream stream;
static CUdeviceptr one, two;
static void *host;
static CUfunction kernel;
/* Whose turn it is: the parent's (0) or the child's (1). */
static volatile int *turn;

#define Q(call) ok(p_##call, #call)
static void ok(CUresult r, const char *what) {
    if (r) {
        fprintf(stderr, "%s: error %d\n", what, r);
        exit(1);
    }
}

static void setup(const char *kernels) {
    CUcontext context;
    CUmodule module;
    load_driver();
    Q(cuInit(0));
    Q(cuDevicePrimaryCtxRetain(&context, 0));
    Q(cuCtxSetCurrent(context));
    Q(cuStreamCreate(&stream, 1));
    Q(cuMemAlloc_v2(&one, BYTES));
    Q(cuMemAlloc_v2(&two, BYTES));
    Q(cuMemHostAlloc(&host, BYTES, 0));
    Q(cuModuleLoadData(&module, read_file(kernels)));
    Q(cuModuleGetFunction(&kernel, module, "fill_bytes"));
}

enum { UP, DOWN, WITHIN, FILL, KERNEL, KINDS };
static const char *const names[KINDS] = {"up", "down", "within", "fill", "kernel"};

static void operation(int kind) {
    switch (kind) {
    case UP: Q(cuMemcpyHtoDAsync_v2(one, host, BYTES, stream)); break;
    case DOWN: Q(cuMemcpyDtoHAsync_v2(host, one, BYTES, stream)); break;
    case WITHIN: Q(cuMemcpyDtoDAsync_v2(two, one, BYTES, stream)); break;
    case FILL: Q(cuMemsetD8Async(one, 7, BYTES, stream)); break;
    case KERNEL: {
        unsigned long long count = BYTES;
        unsigned value = 3;
        void *params[] = {&one, &count, &value};
        Q(cuLaunchKernel(kernel, 4, 1, 1, 128, 1, 1, 0, stream, params, NULL));
        break;
    }
    }
    Q(cuStreamSynchronize(stream));
}

static void await(int whose) {
    while (*turn != whose) sched_yield();
    __sync_synchronize();
}

static void give(int whose) {
    __sync_synchronize();
    *turn = whose;
}

/* Both make the same operations, one after the other. */
static void in_turns(int kind, double *samples) {
    for (int i = 0; i < ROUNDS; i++) {
        await(0);
        double began = now_us();
        operation(kind);
        samples[i] = now_us() - began;
        give(1);
    }
    await(0);
}

static void report(const char *format, int kind, double *samples) {
    qsort(samples, ROUNDS, sizeof *samples, by_value);
    printf(format, names[kind]);
    printf("\t%.4g\tus\n", samples[ROUNDS / 2]);
    fflush(stdout);
}

int main(int argc, char **argv) {
    if (argc != 2) {
        fprintf(stderr, "usage: turns KERNELS.ptx\n");
        return 2;
    }
    turn = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (turn == MAP_FAILED) return 1;
    /* Should the other process be no more. */
    alarm(60);
    /* A child of fork must not use the driver of its parent. */
    pid_t child = fork();
    if (child < 0) return 1;
    setup(argv[1]);
    if (child == 0) {
        alarm(60);
        for (int kind = 0; kind < KINDS; kind++)
            for (int i = 0; i < ROUNDS; i++) {
                await(1);
                operation(kind);
                give(0);
            }
        return 0;
    }
    double samples[ROUNDS];
    for (int kind = 0; kind < KINDS; kind++) {
        for (int i = 0; i < ROUNDS; i++) {
            double began = now_us();
            operation(kind);
            samples[i] = now_us() - began;
        }
        report("turns.%s.alone", kind, samples);
        in_turns(kind, samples);
        report("turns.%s", kind, samples);
    }
    int status = 1;
    waitpid(child, &status, 0);
    return status != 0;
}
