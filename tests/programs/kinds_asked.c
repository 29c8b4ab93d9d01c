// What an MPI library says of the kinds of memory that it knows: by functions that it may lack, and by keys of infos.
#include "sim.h"

static void say(const char *name, int value) { printf("rank %d: %s %d\n", me, name, value); }

static void *found(const char *name) { return dlsym(RTLD_DEFAULT, name); }

// Whether a function is there, and what it says.
static void ask(const char *name) {
    int (*query)(void) = (int (*)(void))found(name);
    say(name, query ? query() : -1);
}

static void ask_of_kind(const char *name, int kind) {
    int is_supported = -7;
    int (*query)(int, int *) = (int (*)(int, int *))found(name);
    int rc = query ? query(kind, &is_supported) : -1;
    printf("rank %d: %s of %d: %s, %d\n", me, name, kind, !query ? "absent" : rc ? "error" : "success", is_supported);
}

static void show(const char *whose, MPI_Info info) {
    int keys = 0, flag = 0;
    char key[MPI_MAX_INFO_KEY + 1], value[MPI_MAX_INFO_VAL + 1] = "";
    OK(MPI_Info_get_nkeys(info, &keys));
    printf("rank %d: %s has %d keys\n", me, whose, keys);
    for (int i = 0; i < keys; i++) {
        OK(MPI_Info_get_nthkey(info, i, key));
        printf("rank %d: %s has %s\n", me, whose, key);
    }
    OK(MPI_Info_get(info, "mpi_memory_alloc_kinds", MPI_MAX_INFO_VAL, value, &flag));
    printf("rank %d: mpi_memory_alloc_kinds of %s: %d %s\n", me, whose, flag, flag ? value : "");
}

static void show_of_comm(const char *whose, MPI_Comm comm) {
    MPI_Info info;
    OK(MPI_Comm_get_info(comm, &info));
    show(whose, info);
    OK(MPI_Info_free(&info));
}

static void ask_all(void) {
    ask("MPIX_Query_cuda_support");
    ask("MPIX_Query_hip_support");
    ask("MPIX_Query_ze_support");
    ask("MPIX_Query_rocm_support");
    for (int kind = 0; kind < 3; kind++) ask_of_kind("MPIX_GPU_query_support", kind);
}

static void all(void) {
    static const char *const wanted[] = {"system", "mpi", "cuda", "system,mpi,cuda:device", "nonsense"};
    ask_all();
    show_of_comm("world", MPI_COMM_WORLD);
    show_of_comm("self", MPI_COMM_SELF);
    show("environment", MPI_INFO_ENV);
    // What is asked for may be granted to a communicator.
    for (int i = 0; i < 5; i++) {
        MPI_Comm comm;
        MPI_Info info;
        OK(MPI_Info_create(&info));
        OK(MPI_Info_set(info, "mpi_assert_memory_alloc_kinds", wanted[i]));
        OK(MPI_Info_set(info, "mpi_memory_alloc_kinds", wanted[i]));
        OK(MPI_Comm_dup_with_info(MPI_COMM_WORLD, info, &comm));
        show_of_comm(wanted[i], comm);
        OK(MPI_Comm_free(&comm));
        OK(MPI_Info_free(&info));
    }
    // Messages of this rank's device memory, so that the library is not idle.
    buf a = buf_new(DEVICE, 300000, 1), b = buf_new(DEVICE, 300000, 2);
    for (int round = 0; round < 4; round++) {
        MPI_Status s;
        buf_poison(b);
        buf_fill(a, me + round);
        OK(MPI_Sendrecv(a.p, a.bytes, MPI_BYTE, peer, 1, b.p, b.bytes, MPI_BYTE, peer, 1, MPI_COMM_WORLD, &s));
        STATUS_CHECK(&s, peer, 1, b.bytes);
        BUF_CHECK(b, peer + round, b.bytes);
    }
    buf_free(a);
    buf_free(b);
    ask_all();
}

static const struct test_case cases[] = {{"all", all}, {0}};
int main(int argc, char **argv) {
#ifdef OPEN_MPI
    ask("MPIX_Query_cuda_support"); // others end the program there
#endif
    return run_cases(argc, argv, cases, MPI_THREAD_SINGLE);
}
