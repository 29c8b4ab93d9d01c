// What a program that never touches a device buffer pays for each call. Each mode does one kind of call many times
// between two ranks (or one with itself) and prints the nanoseconds a call took; under callgrind the same modes are
// compared by instructions between two numbers of repetitions, so that start and end cancel out.
//   host_calls MODE BYTES REPEATS [cuda]      (cuda: a program that uses a GPU, but gives MPI host memory, mapped apart)
// modes of two ranks: pingpong     Send and Recv in turn          window      Irecv or Isend of 64, Waitall
// modes of one rank:  self         Sendrecv with itself           selfwindow  Irecv and Isend of 64 each, Waitall
//                     iprobe       Iprobe that finds nothing      testsome    Testsome over 1000 requests, none complete
#define _GNU_SOURCE
#include <dlfcn.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { WINDOW = 64, LISTED = 1000 };
static int me, peer, bytes;
static long repeats;
static char *data;

static void pingpong(void) {
    for (long i = 0; i < repeats; i++) {
        if (me == 0) MPI_Send(data, bytes, MPI_BYTE, peer, 1, MPI_COMM_WORLD);
        MPI_Recv(data, bytes, MPI_BYTE, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (me == 1) MPI_Send(data, bytes, MPI_BYTE, peer, 1, MPI_COMM_WORLD);
    }
}

static void window(void) {
    MPI_Request r[WINDOW];
    char token;
    for (long i = 0; i < repeats; i++) {
        for (int k = 0; k < WINDOW; k++)
            if (me == 0) MPI_Isend(data, bytes, MPI_BYTE, peer, k, MPI_COMM_WORLD, &r[k]);
            else MPI_Irecv(data, bytes, MPI_BYTE, peer, k, MPI_COMM_WORLD, &r[k]);
        MPI_Waitall(WINDOW, r, MPI_STATUSES_IGNORE);
        if (me == 1) MPI_Send(&token, 1, MPI_BYTE, peer, 100, MPI_COMM_WORLD);
        else MPI_Recv(&token, 1, MPI_BYTE, peer, 100, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
}

static void self(void) {
    for (long i = 0; i < repeats; i++)
        MPI_Sendrecv(data, bytes, MPI_BYTE, 0, 1, data + bytes, bytes, MPI_BYTE, 0, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

static void selfwindow(void) {
    MPI_Request r[2 * WINDOW];
    for (long i = 0; i < repeats; i++) {
        for (int k = 0; k < WINDOW; k++) MPI_Irecv(data + bytes, bytes, MPI_BYTE, 0, k, MPI_COMM_WORLD, &r[k]);
        for (int k = 0; k < WINDOW; k++) MPI_Isend(data, bytes, MPI_BYTE, 0, k, MPI_COMM_WORLD, &r[WINDOW + k]);
        MPI_Waitall(2 * WINDOW, r, MPI_STATUSES_IGNORE);
    }
}

static void iprobe(void) {
    int flag;
    for (long i = 0; i < repeats; i++) MPI_Iprobe(peer, 1, MPI_COMM_WORLD, &flag, MPI_STATUS_IGNORE);
}

static void testsome(void) {
    static MPI_Request r[LISTED];
    static int at[LISTED];
    int count;
    for (int k = 0; k < LISTED; k++) MPI_Irecv(data, 0, MPI_BYTE, peer, k, MPI_COMM_WORLD, &r[k]);
    for (long i = 0; i < repeats; i++) MPI_Testsome(LISTED, r, &count, at, MPI_STATUSES_IGNORE);
    for (int k = 0; k < LISTED; k++) { MPI_Cancel(&r[k]); MPI_Wait(&r[k], MPI_STATUS_IGNORE); }
}

// A program that uses the GPU: the driver is initialized, and a context is current.
static int use_cuda(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL), *context;
    if (!driver) return 0;
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
    int (*retain)(void **, int) = (int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain");
    int (*current)(void *) = (int (*)(void *))dlsym(driver, "cuCtxSetCurrent");
    return init && retain && current && !init(0) && !retain(&context, 0) && !current(context);
}

int main(int argc, char **argv) {
    int with_cuda = argc == 5 && !strcmp(argv[4], "cuda");
    if (argc != 4 && !with_cuda) return 2;
    if (with_cuda && !use_cuda()) { fprintf(stderr, "host_calls: no CUDA driver\n"); return 3; }
    int size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    peer = size == 1 ? 0 : 1 - me;
    bytes = atoi(argv[2]);
    repeats = atol(argv[3]);
    data = with_cuda ? mmap(NULL, 2 * ((size_t)bytes + 1), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : calloc(2, bytes + 1);
    static const struct { const char *name; void (*run)(void); double calls; } modes[] = {
        {"pingpong", pingpong, 2}, {"window", window, WINDOW}, {"self", self, 2}, {"selfwindow", selfwindow, 2 * WINDOW},
        {"iprobe", iprobe, 1}, {"testsome", testsome, 1},
    };
    void (*mode)(void) = NULL;
    double calls = 1;
    for (unsigned i = 0; i < sizeof modes / sizeof *modes; i++)
        if (!strcmp(argv[1], modes[i].name)) { mode = modes[i].run; calls = modes[i].calls; }
    if (!mode) MPI_Abort(MPI_COMM_WORLD, 2);
    MPI_Barrier(MPI_COMM_WORLD);
    double begin = MPI_Wtime();
    mode();
    double end = MPI_Wtime();
    if (me == 0) printf("%.2f\n", 1e9 * (end - begin) / repeats / calls);
    MPI_Finalize();
    return 0;
}
