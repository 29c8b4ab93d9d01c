// Device memory that comes and goes: what the library keeps of it must not keep it from the program.
#include "sim.h"
#include "../../include/anabranch.h"
#include <dirent.h>

enum { TAG = 9, MIB = 1 << 20 };

static size_t free_memory(void) {
    static CUresult (*info)(size_t *, size_t *);
    size_t free = 0, total = 0;
    if (!info) *(void **)&info = dlsym(cu.library, "cuMemGetInfo_v2");
    CHECK(info, "cuMemGetInfo");
    CU(info(&free, &total));
    return free;
}

// Waits until so much is free again, with MPI calls now and then.
static void until_free(size_t bytes) {
    for (int look = 0; free_memory() < bytes; look++) {
        CHECK(look < 2000, "%zd bytes stay in use: a mapping or staging was kept", (ssize_t)(bytes - free_memory()));
        int flag;
        OK(MPI_Iprobe(MPI_ANY_SOURCE, TAG + 1, MPI_COMM_WORLD, &flag, MPI_STATUS_IGNORE));
        usleep(5000);
    }
}

// Files that this process has open, and mappings that it has.
struct held { int files, mappings; };
static struct held held_now(void) {
    struct held now = {0, 0};
    DIR *folder = opendir("/proc/self/fd");
    CHECK(folder, "/proc/self/fd");
    while (readdir(folder)) now.files++;
    closedir(folder);
    FILE *maps = fopen("/proc/self/maps", "r");
    CHECK(maps, "/proc/self/maps");
    for (int c; (c = fgetc(maps)) != EOF;) now.mappings += c == '\n';
    fclose(maps);
    return now;
}

static CUdeviceptr allocate(size_t bytes) {
    CUdeviceptr p = 0;
    CU(cu.alloc(&p, bytes));
    return p;
}

static void *at(CUdeviceptr p) { return (void *)(uintptr_t)p; }

static void fill(CUdeviceptr p, size_t bytes, uint64_t seed) {
    unsigned char *image = scratch(bytes);
    pattern(image, bytes, seed);
    memory_put(DEVICE, at(p), image, bytes);
    free(image);
}

// From the first of a pair to the second.
static void pass(CUdeviceptr p, size_t bytes, uint64_t seed) {
    if (me % 2 == 0) {
        fill(p, bytes, seed);
        OK(MPI_Send(at(p), bytes, MPI_BYTE, peer, TAG, MPI_COMM_WORLD));
    } else {
        OK(MPI_Recv(at(p), bytes, MPI_BYTE, peer, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        BYTES_CHECK(DEVICE, at(p), bytes, seed);
    }
}

// Allocate, send, free: from first to last no more than a few rounds' memory is in use, and in the end what was before.
static void rounds(void) {
    if (me > 1) return;
    size_t bytes = 65537, block = 4 * MIB;
    int count = number_from("ROUNDS", 10000);
    CUdeviceptr keep = allocate(block);
    pass(keep, bytes, 1);
    pass(keep, bytes, 2);
    size_t before = free_memory();
    // From when all that is kept is there; what a hundredth of the rounds might leave is the heap's affair.
    enum { WARM = 100, SLACK = 40 };
    CHECK(count >= 5 * WARM, "ROUNDS");
    struct held held = {0, 0};
    for (int i = 0; i < count; i++) {
        if (i == WARM) held = held_now();
        CUdeviceptr p = allocate(block + (i % 3) * block);
        pass(p, bytes, i);
        CU(cu.release(p));
        CHECK(free_memory() + 100 * (size_t)MIB >= before, "memory of freed allocations stays in use");
    }
    until_free(before);
    struct held now = held_now();
    CHECK(now.files <= held.files, "%d files are open, after %d rounds %d were", now.files, WARM, held.files);
    CHECK(now.mappings <= held.mappings + SLACK, "%d mappings, after %d rounds %d", now.mappings, WARM, held.mappings);
    CU(cu.release(keep));
}

// A large allocation is freed, and no message follows that would show it. The rank that has it mapped makes no other call than one
// that tests a request of the MPI library, again and again, until the owner has its memory back.
static void freed_and_silent(void) {
    if (me > 1) return;
    enum { ALONE, ALL, ANY, SOME, KINDS };
    for (int kind = 0; kind < KINDS; kind++) {
        size_t before = free_memory(), block = (size_t)1024 * MIB;
        CUdeviceptr p = allocate(block);
        for (int i = 0; i < 6; i++) pass(p, 100001, 3 + i);
        CU(cu.release(p));
        if (me == 0) until_free(before);
        int done = me == 0, word = 0, count, at;
        MPI_Request r = MPI_REQUEST_NULL;
        if (me == 0) OK(MPI_Send(&word, 1, MPI_INT, peer, TAG + 2, MPI_COMM_WORLD));
        else OK(MPI_Irecv(&word, 1, MPI_INT, peer, TAG + 2, MPI_COMM_WORLD, &r));
        while (!done) {
            if (kind == ALONE) OK(MPI_Test(&r, &done, MPI_STATUS_IGNORE));
            if (kind == ALL) OK(MPI_Testall(1, &r, &done, MPI_STATUSES_IGNORE));
            if (kind == ANY) OK(MPI_Testany(1, &r, &at, &done, MPI_STATUS_IGNORE));
            if (kind == SOME) {
                OK(MPI_Testsome(1, &r, &count, &at, MPI_STATUSES_IGNORE));
                done = count == 1;
            }
            sched_yield();
        }
        until_free(before);
    }
}

// One address, another allocation: what it holds now is what arrives.
static void one_address(void) {
    if (me > 1) return;
    enum { TIMES = 20 };
    CUdeviceptr seen[TIMES];
    int again = 0;
    for (int i = 0; i < TIMES; i++) {
        CUdeviceptr p = seen[i] = allocate(2 * MIB + (i % 2) * MIB);
        for (int k = 0; k < i; k++) again += p == seen[k];
        pass(p + 7 * i, 300001, 50 + i);
        CU(cu.release(p));
    }
    // At either end: what a rank has mapped of its peer may lie where its own memory was.
    int others = 0;
    OK(MPI_Sendrecv(&again, 1, MPI_INT, !me, TAG, &others, 1, MPI_INT, !me, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    CHECK(again + others > 0, "no address came twice");
}

// Odd places of one allocation of 16 GiB.
static void in_the_middle(void) {
    if (me > 1) return;
    size_t size = ((size_t)16 << 30) + 5, bytes = 3 * MIB + 1;
    CUdeviceptr p = allocate(size);
    size_t places[] = {0, 12345, ((size_t)8 << 30) - 1, ((size_t)4 << 30) + 3, size - bytes};
    for (int i = 0; i < 5; i++) pass(p + places[me == 0 ? i : 4 - i], bytes, 70 + i);
    CU(cu.release(p));
}

// Ranks 0 and 1 send each other's way over the GPUs of 2 and 3, whose memory runs short meanwhile.
static void short_of_memory(void) {
    size_t bytes = 24 * MIB;
    CUdeviceptr p = allocate(bytes), hog = 0;
    size_t before = free_memory();
    // Everyone uses its device, and says so.
    for (int i = 0; i < 4; i++) pass(p, 100001, 30 + i);
    barrier();
    for (int i = 0; i < 6 && me < 2; i++) pass(p, bytes, i);
    barrier();
    if (me >= 2) {
        CHECK(free_memory() + 32 * (size_t)MIB < before, "there is no staging on this GPU");
        size_t left = 100 * (size_t)MIB;
        hog = allocate(free_memory() - left);
        until_free(left + 32 * (size_t)MIB);
    }
    for (int i = 0; i < 3 && me < 2; i++) pass(p, bytes, 10 + i);
    barrier();
    if (me >= 2) CU(cu.release(hog));
    barrier();
    for (int i = 0; i < number_from("LATER", 6) && me < 2; i++) pass(p, bytes, 20 + i);
    CU(cu.release(p));
}

static uint64_t closed(void) { return ANABRANCH_CALL(UINT64_MAX, anabranch_counter, "mappings_closed"); }

// A program that makes no MPI call may destroy its contexts: nothing of the library enters them then, not to close a mapping of
// what the other one has freed either. That waits for a call.
static void while_away(void) {
    CUdeviceptr p = allocate(4 * MIB);
    pass(p, MIB, 1);
    pass(p, MIB, 2);
    barrier();
    uint64_t before = closed();
    CHECK(before != UINT64_MAX, "the library");
    if (me == 0) {
        CU(cu.release(p));
        usleep(1500000);
    } else {
        usleep(700000);
        CHECK(closed() == before, "a mapping was closed while the program was away");
    }
    // The other one waits in it.
    barrier();
    if (me == 1) {
        CHECK(closed() > before, "no mapping was closed while the program waited");
        CU(cu.release(p));
    }
}

static const struct test_case cases[] = {
    {"rounds", rounds}, {"freed_and_silent", freed_and_silent}, {"one_address", one_address},
    {"in_the_middle", in_the_middle}, {"short_of_memory", short_of_memory}, {"while_away", while_away}, {0},
};

int main(int argc, char **argv) { return run_cases(argc, argv, cases, MPI_THREAD_SINGLE); }
