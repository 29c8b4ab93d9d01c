// What the library takes of the GPUs and of host memory, at most and in the end.
#include "sim.h"

enum { TAG = 7, MIB = 1 << 20, GPUS_MAX = 16, BOUND = 64 * MIB };

static int gpus;
static CUcontext contexts[GPUS_MAX];
static size_t before[GPUS_MAX];

static size_t free_on(int gpu) {
    static CUresult (*info)(size_t *, size_t *);
    size_t free = 0, total = 0;
    CUcontext current;
    if (!info) *(void **)&info = dlsym(cu.library, "cuMemGetInfo_v2");
    CHECK(info, "cuMemGetInfo");
    CU(cu.get_current(&current));
    CU(cu.set_current(contexts[gpu]));
    CU(info(&free, &total));
    CU(cu.set_current(current));
    return free;
}

// A window from rank 0 to rank 1.
static void window(int count, size_t bytes, MPI_Datatype type, int elements, int rounds) {
    enum { MOST = 32 };
    buf b[MOST];
    MPI_Request r[MOST];
    for (int i = 0; i < count; i++) b[i] = buf_new(DEVICE, bytes, i);
    for (int round = 0; round < rounds; round++) {
        for (int i = 0; i < count; i++) {
            if (me == 0 && type == MPI_BYTE) buf_fill(b[i], 10 * round + i);
            if (me == 0) OK(MPI_Isend(b[i].p, elements, type, 1, TAG, MPI_COMM_WORLD, &r[i]));
            else OK(MPI_Irecv(b[i].p, elements, type, 0, TAG, MPI_COMM_WORLD, &r[i]));
        }
        OK(MPI_Waitall(count, r, MPI_STATUSES_IGNORE));
        for (int i = 0; i < count && type == MPI_BYTE && me == 1; i++) BUF_CHECK(b[i], 10 * round + i, bytes);
    }
    for (int i = 0; i < count; i++) buf_free(b[i]);
}

// Of each kind of staging as much as there is use for.
static void staging(void) {
    buf small = buf_new(DEVICE, 1000, 1);
    for (int i = 0; i < 5; i++) {
        if (me == 0) OK(MPI_Send(small.p, 1000, MPI_BYTE, 1, TAG, MPI_COMM_WORLD));
        OK(MPI_Recv(small.p, 1000, MPI_BYTE, !me, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        if (me == 1) OK(MPI_Send(small.p, 1000, MPI_BYTE, 0, TAG, MPI_COMM_WORLD));
    }
    buf_free(small);
    // By value, through bounce buffers.
    MPI_Datatype rows;
    OK(MPI_Type_vector(1024, 2048, 4096, MPI_BYTE, &rows));
    OK(MPI_Type_commit(&rows));
    window(16, 4 * MIB, rows, 1, 2);
    OK(MPI_Type_free(&rows));
    // Down to host memory, through the ring.
    size_t bytes = 8 * MIB;
    buf b = buf_new(me == 0 ? DEVICE : HOST, bytes, 3);
    if (me == 0) {
        buf_fill(b, 5);
        OK(MPI_Send(b.p, bytes, MPI_BYTE, 1, TAG, MPI_COMM_WORLD));
    } else {
        OK(MPI_Recv(b.p, bytes, MPI_BYTE, 0, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        BUF_CHECK(b, 5, bytes);
    }
    buf_free(b);
    // Split.
    size_t large = number_from("BYTES", 48 * MIB);
    window(8, large, MPI_BYTE, (int)large, number_from("ROUNDS", 2));
    // What is left now is the library's: as soon as it has unmapped what was freed.
    size_t most = 0;
    for (int look = 0;; look++) {
        most = 0;
        for (int gpu = 0; gpu < gpus; gpu++) {
            size_t used = before[gpu] - free_on(gpu);
            if (used > most) most = used;
        }
        if (most <= BOUND) break;
        CHECK(look < 1000, "%zu bytes of a GPU stay in use", most);
        int flag;
        OK(MPI_Iprobe(MPI_ANY_SOURCE, TAG + 1, MPI_COMM_WORLD, &flag, MPI_STATUS_IGNORE));
        usleep(5000);
    }
    barrier();
    if (me == 0) printf("in use on a GPU: %zu\n", most);
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {{"staging", staging}, {0}};
    driver_load();
    CU(cu.device_count(&gpus));
    CHECK(gpus <= GPUS_MAX, "so many GPUs");
    for (int gpu = 0; gpu < gpus; gpu++) CU(cu.retain(&contexts[gpu], gpu));
    meet("contexts");
    for (int gpu = 0; gpu < gpus; gpu++) before[gpu] = free_on(gpu);
    meet("begin");
    int result = run_cases(argc, argv, cases, MPI_THREAD_SINGLE);
    running = "after MPI_Finalize";
    meet("finalized");
    // The simulated driver gives memory that others had open back when its owner asks next.
    for (int gpu = 0; gpu < gpus; gpu++) free_on(gpu);
    meet("asked");
    for (int gpu = 0; gpu < gpus; gpu++) CHECK(free_on(gpu) == before[gpu], "GPU %d: %zu of %zu", gpu, free_on(gpu), before[gpu]);
    meet("end");
    return result;
}
