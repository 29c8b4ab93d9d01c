// What a program that never touches a device buffer pays for each call. Each mode does one kind of call many times
// between two ranks (or one with itself) and prints the nanoseconds a call took.
//   host_calls MODE BYTES REPEATS [cuda] [alternated]
//   host_calls counted BYTES REPEATS
//       For callgrind: every mode of one rank, called by `natively` with the MPI library's own functions, and by `preloaded`
//       with those that are preloaded. What is called in between is a mode, with the instructions of so many rounds: a
//       hundred times as many of `iprobe` and ten times of `testsome`, as the MPI library looks at more in one of some calls.
//       cuda:       a program that uses a GPU, but gives MPI host memory, mapped apart
//       alternated: blocks of calls to what is preloaded and to the MPI library itself in turns, in one process: prints the
//                   medians of both and of the difference of neighbouring blocks, and the MPI library's own fastest block
// modes of two ranks: pingpong     Send and Recv in turn          window      Irecv or Isend of 64, Waitall
// modes of one rank:  self         Sendrecv with itself           selfwindow  Irecv and Isend of 64 each, Waitall
//                     iprobe       Iprobe that finds nothing      testsome    Testsome over 1000 requests, none complete
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { WINDOW = 64, LISTED = 1000, BLOCKS = 101 };
static int me, peer, bytes;
static char *data;

/* The calls that are timed: the program's, or the MPI library's own. */
static struct calls {
    int (*send)(const void *, int, MPI_Datatype, int, int, MPI_Comm);
    int (*recv)(void *, int, MPI_Datatype, int, int, MPI_Comm, MPI_Status *);
    int (*isend)(const void *, int, MPI_Datatype, int, int, MPI_Comm, MPI_Request *);
    int (*irecv)(void *, int, MPI_Datatype, int, int, MPI_Comm, MPI_Request *);
    int (*waitall)(int, MPI_Request[], MPI_Status *);
    int (*sendrecv)(const void *, int, MPI_Datatype, int, int, void *, int, MPI_Datatype, int, int, MPI_Comm, MPI_Status *);
    int (*iprobe)(int, int, MPI_Comm, int *, MPI_Status *);
    int (*testsome)(int, MPI_Request[], int *, int[], MPI_Status *);
} program = {MPI_Send, MPI_Recv, MPI_Isend, MPI_Irecv, MPI_Waitall, MPI_Sendrecv, MPI_Iprobe, MPI_Testsome};

static void pingpong(const struct calls *mpi, long repeats) {
    for (long i = 0; i < repeats; i++) {
        if (me == 0) mpi->send(data, bytes, MPI_BYTE, peer, 1, MPI_COMM_WORLD);
        mpi->recv(data, bytes, MPI_BYTE, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
        if (me == 1) mpi->send(data, bytes, MPI_BYTE, peer, 1, MPI_COMM_WORLD);
    }
}

static void window(const struct calls *mpi, long repeats) {
    MPI_Request r[WINDOW];
    char token;
    for (long i = 0; i < repeats; i++) {
        for (int k = 0; k < WINDOW; k++)
            if (me == 0) mpi->isend(data, bytes, MPI_BYTE, peer, k, MPI_COMM_WORLD, &r[k]);
            else mpi->irecv(data, bytes, MPI_BYTE, peer, k, MPI_COMM_WORLD, &r[k]);
        mpi->waitall(WINDOW, r, MPI_STATUSES_IGNORE);
        if (me == 1) mpi->send(&token, 1, MPI_BYTE, peer, 100, MPI_COMM_WORLD);
        else mpi->recv(&token, 1, MPI_BYTE, peer, 100, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
    }
}

static void self(const struct calls *mpi, long repeats) {
    for (long i = 0; i < repeats; i++)
        mpi->sendrecv(data, bytes, MPI_BYTE, 0, 1, data + bytes, bytes, MPI_BYTE, 0, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE);
}

static void selfwindow(const struct calls *mpi, long repeats) {
    MPI_Request r[2 * WINDOW];
    for (long i = 0; i < repeats; i++) {
        for (int k = 0; k < WINDOW; k++) mpi->irecv(data + bytes, bytes, MPI_BYTE, 0, k, MPI_COMM_WORLD, &r[k]);
        for (int k = 0; k < WINDOW; k++) mpi->isend(data, bytes, MPI_BYTE, 0, k, MPI_COMM_WORLD, &r[WINDOW + k]);
        mpi->waitall(2 * WINDOW, r, MPI_STATUSES_IGNORE);
    }
}

static void iprobe(const struct calls *mpi, long repeats) {
    int flag;
    for (long i = 0; i < repeats; i++) mpi->iprobe(peer, 1, MPI_COMM_WORLD, &flag, MPI_STATUS_IGNORE);
}

static MPI_Request listed[LISTED];

static void testsome(const struct calls *mpi, long repeats) {
    static int at[LISTED];
    int count;
    for (long i = 0; i < repeats; i++) mpi->testsome(LISTED, listed, &count, at, MPI_STATUSES_IGNORE);
}

/* A program that uses the GPU: the driver is initialized, and a context is current. */
static int use_cuda(void) {
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL), *context;
    if (!driver) return 0;
    int (*init)(unsigned) = (int (*)(unsigned))dlsym(driver, "cuInit");
    int (*retain)(void **, int) = (int (*)(void **, int))dlsym(driver, "cuDevicePrimaryCtxRetain");
    int (*current)(void *) = (int (*)(void *))dlsym(driver, "cuCtxSetCurrent");
    return init && retain && current && !init(0) && !retain(&context, 0) && !current(context);
}

/* Finds the MPI library itself: what is preloaded before it has the same names. */
static int find_mpi(struct dl_phdr_info *object, size_t size, void *found) {
    (void)size;
    void *handle = object->dlpi_name[0] ? dlopen(object->dlpi_name, RTLD_LAZY | RTLD_NOLOAD) : NULL;
    struct link_map *map;
    Dl_info of;
    void *send = handle ? dlsym(handle, "MPI_Send") : NULL;
    int is_its_own = send && !dlinfo(handle, RTLD_DI_LINKMAP, &map) && dladdr(send, &of) && of.dli_fbase == (void *)map->l_addr;
    int is_preloaded = is_its_own && dlsym(handle, "anabranch_version");
    if (is_its_own && !is_preloaded) *(void **)found = handle;
    return is_its_own && !is_preloaded;
}

static int library(struct calls *calls) {
    void *handle = NULL;
    dl_iterate_phdr(find_mpi, &handle);
    if (!handle) return 0;
    static const char *const names[] = {"MPI_Send", "MPI_Recv", "MPI_Isend", "MPI_Irecv", "MPI_Waitall", "MPI_Sendrecv", "MPI_Iprobe", "MPI_Testsome"};
    void **call = (void **)calls;
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++) if (!(call[i] = dlsym(handle, names[i]))) return 0;
    return 1;
}

/* Calls that follow each other in a round: in a ping-pong, those of both ranks. And rounds that are counted. */
static const struct mode { const char *name; void (*run)(const struct calls *, long); double calls; long rounds; } modes[] = {
    {"pingpong", pingpong, 4, 0}, {"window", window, WINDOW, 0}, {"self", self, 1, 1}, {"selfwindow", selfwindow, 2 * WINDOW, 1},
    {"iprobe", iprobe, 1, 100}, {"testsome", testsome, 1, 10},
};

static void list(void) { for (int k = 0; k < LISTED; k++) MPI_Irecv(data, 0, MPI_BYTE, peer, k, MPI_COMM_WORLD, &listed[k]); }
static void unlist(void) { for (int k = 0; k < LISTED; k++) { MPI_Cancel(&listed[k]); MPI_Wait(&listed[k], MPI_STATUS_IGNORE); } }

__attribute__((noipa)) static void natively(const struct mode *mode, const struct calls *own, long repeats) {
    mode->run(own, repeats);
    __asm__ volatile(""); /* no tail call, which would not be seen as one */
}

__attribute__((noipa)) static void preloaded(const struct mode *mode, long repeats) {
    mode->run(&program, repeats);
    __asm__ volatile("");
}

/* The first round of each is not counted: functions are looked for, and tables grow. */
static void counted(const struct calls *own, long repeats) {
    for (unsigned i = 0; i < sizeof modes / sizeof *modes; i++) {
        if (!modes[i].rounds) continue;
        if (modes[i].run == testsome) list();
        modes[i].run(own, 1);
        modes[i].run(&program, 1);
        natively(&modes[i], own, modes[i].rounds * repeats);
        preloaded(&modes[i], modes[i].rounds * repeats);
        if (modes[i].run == testsome) unlist();
    }
}

static double timed(void (*run)(const struct calls *, long), const struct calls *mpi, long repeats, double calls) {
    double begin = MPI_Wtime();
    run(mpi, repeats);
    return 1e9 * (MPI_Wtime() - begin) / repeats / calls;
}

static int ascending(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static double ranked(const double *values, int rank) {
    double sorted[BLOCKS];
    memcpy(sorted, values, sizeof sorted);
    qsort(sorted, BLOCKS, sizeof *sorted, ascending);
    return sorted[rank];
}

static double median(const double *values) { return ranked(values, BLOCKS / 2); }

int main(int argc, char **argv) {
    int with_cuda = 0, alternated = 0;
    for (int i = 4; i < argc; i++) {
        if (!strcmp(argv[i], "cuda")) with_cuda = 1;
        else if (!strcmp(argv[i], "alternated")) alternated = 1;
        else return 2;
    }
    if (argc < 4) return 2;
    if (with_cuda && !use_cuda()) { fprintf(stderr, "host_calls: no CUDA driver\n"); return 3; }
    int size;
    MPI_Init(&argc, &argv);
    MPI_Comm_rank(MPI_COMM_WORLD, &me);
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    peer = size == 1 ? 0 : 1 - me;
    bytes = atoi(argv[2]);
    long repeats = atol(argv[3]);
    data = with_cuda ? mmap(NULL, 2 * ((size_t)bytes + 1), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : calloc(2, bytes + 1);
    void (*mode)(const struct calls *, long) = NULL;
    double calls = 1;
    for (unsigned i = 0; i < sizeof modes / sizeof *modes; i++)
        if (!strcmp(argv[1], modes[i].name)) { mode = modes[i].run; calls = modes[i].calls; }
    struct calls own;
    int is_counted = !strcmp(argv[1], "counted");
    if ((!mode && !is_counted) || ((alternated || is_counted) && !library(&own))) { fprintf(stderr, "host_calls: no such mode, or no MPI library\n"); MPI_Abort(MPI_COMM_WORLD, 2); }
    if (mode == testsome) list();
    MPI_Barrier(MPI_COMM_WORLD);
    if (is_counted) {
        counted(&own, repeats);
    } else if (alternated) {
        /* Neighbouring blocks are as fast or slow as the machine is just then. */
        double without[BLOCKS], with[BLOCKS], difference[BLOCKS];
        for (int i = 0; i < BLOCKS; i++) {
            without[i] = timed(mode, &own, repeats, calls);
            with[i] = timed(mode, &program, repeats, calls);
            difference[i] = with[i] - without[i];
        }
        if (me == 0) printf("%.2f %.2f %.2f %.2f\n", median(without), median(with), median(difference), ranked(without, 0));
    } else {
        double took = timed(mode, &program, repeats, calls);
        if (me == 0) printf("%.2f\n", took);
    }
    if (mode == testsome) unlist();
    MPI_Finalize();
    return 0;
}
