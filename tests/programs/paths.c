// Long messages that may come over several paths.
#include "transfer.h"
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>

enum { TAG = 5, ROUNDS = 3 };

// The first long message of a pair comes straight; by the next ones staging is there.
static size_t base_bytes(void) { return (size_t)number_from("BYTES", 24 << 20); }

// One pair, lengths and places that are odd, each message into memory that nothing else has touched.
static void odd_sizes(void) {
    static const size_t more[] = {0, 1, 4095, 65537, 1000003};
    if (me > 1) return;
    for (int round = 0; round < ROUNDS; round++)
        for (size_t i = 0; i < sizeof more / sizeof *more; i++) {
            size_t bytes = base_bytes() + more[i];
            buf b = buf_new(DEVICE, bytes, 7 * i + round);
            if (me == 0) {
                buf_fill(b, 100 * round + i);
                OK(MPI_Send(b.p, bytes, MPI_BYTE, 1, TAG, MPI_COMM_WORLD));
                BUF_CHECK(b, 100 * round + i, bytes);
            } else {
                MPI_Status s;
                OK(MPI_Recv(b.p, bytes, MPI_BYTE, 0, TAG, MPI_COMM_WORLD, &s));
                STATUS_CHECK(&s, 0, TAG, bytes);
                BUF_CHECK(b, 100 * round + i, bytes);
            }
            buf_free(b);
        }
}

// Whether a process is stopped; for a child of a process with threads.
static int is_stopped(const char *status) {
    char text[256] = {0};
    int file = open(status, O_RDONLY);
    if (file < 0 || read(file, text, sizeof text - 1) <= 0) _exit(1);
    close(file);
    return strstr(text, "State:\tT") != NULL;
}

// Lets rank 0 go on after each call of the driver in which it was stopped, a while later.
static pid_t reviver(void) {
    int late = number_from("LATE_US", 0);
    if (me != 0 || !late) return 0;
    pid_t rank = getpid();
    char status[64];
    snprintf(status, sizeof status, "/proc/%d/status", (int)rank);
    pid_t child = fork();
    CHECK(child >= 0, "fork");
    if (child == 0)
        for (;; usleep(1000))
            if (is_stopped(status)) {
                usleep(late);
                kill(rank, SIGCONT);
            }
    return child;
}

static void end_reviver(pid_t child) {
    if (child == 0) return;
    kill(child, SIGKILL);
    CHECK(waitpid(child, NULL, 0) == child, "waitpid");
}

// A window of messages, each to a place of its own, or all but the last to one place as bandwidth tests do.
// Until both ranks have used a device and said so, messages go by value.
static void until_ready(buf in) {
    for (int i = 0; i < 5; i++) {
        if (me == 0) OK(MPI_Send(in.p, 1000, MPI_BYTE, 1, TAG, MPI_COMM_WORLD));
        OK(MPI_Recv(in.p, 1000, MPI_BYTE, !me, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        if (me == 1) OK(MPI_Send(in.p, 1000, MPI_BYTE, 0, TAG, MPI_COMM_WORLD));
    }
}

static void window_to(int one_place) {
    enum { WINDOW = 5 };
    if (me > 1) return;
    pid_t child = reviver();
    size_t bytes = base_bytes() + 11;
    if (one_place) {
        // One that came by value would not be in order with those that are received in its place.
        buf in = buf_new(DEVICE, 1000, 3);
        until_ready(in);
        buf_free(in);
    }
    for (int round = 0; round < ROUNDS; round++) {
        buf b[WINDOW];
        MPI_Request r[WINDOW];
        for (int i = 0; i < WINDOW; i++) {
            int shared = one_place && i > 0;
            b[i] = shared ? b[0] : buf_new(DEVICE, bytes, i);
            if (me == 0 && !shared) buf_fill(b[i], 10 * round + i);
            if (me == 0) OK(MPI_Isend(b[i].p, bytes, MPI_BYTE, 1, TAG, MPI_COMM_WORLD, &r[i]));
            else OK(MPI_Irecv(b[i].p, bytes, MPI_BYTE, 0, TAG, MPI_COMM_WORLD, &r[i]));
        }
        OK(MPI_Waitall(WINDOW, r, MPI_STATUSES_IGNORE));
        for (int i = 0; i < (one_place ? 1 : WINDOW); i++) {
            BUF_CHECK(b[i], 10 * round + i, bytes);
            buf_free(b[i]);
        }
    }
    end_reviver(child);
}
// The first message goes by value, as it is sent before its receiver has made a call of MPI since a rank has used a device,
// and the others to its place by descriptors.
static void one_place_early(void) {
    enum { WINDOW = 16 };
    if (me > 1) return;
    size_t bytes = base_bytes() + 11;
    buf b = buf_new(DEVICE, bytes, 5);
    MPI_Request r[WINDOW];
    char ready;
    if (me == 0) {
        buf_fill(b, 77);
        OK(MPI_Isend(b.p, bytes, MPI_BYTE, 1, TAG, MPI_COMM_WORLD, &r[0]));
        meet("sent");
        OK(MPI_Recv(&ready, 1, MPI_BYTE, 1, TAG + 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        for (int i = 1; i < WINDOW; i++) OK(MPI_Isend(b.p, bytes, MPI_BYTE, 1, TAG, MPI_COMM_WORLD, &r[i]));
    } else {
        meet("sent");
        for (int i = 0; i < WINDOW; i++) OK(MPI_Irecv(b.p, bytes, MPI_BYTE, 0, TAG, MPI_COMM_WORLD, &r[i]));
        OK(MPI_Send(&ready, 1, MPI_BYTE, 0, TAG + 1, MPI_COMM_WORLD));
    }
    OK(MPI_Waitall(WINDOW, r, MPI_STATUSES_IGNORE));
    BUF_CHECK(b, 77, bytes);
    buf_free(b);
}

static void window(void) { window_to(0); }
static void one_place(void) { window_to(1); }

// Deep windows to one place: some while the links are not known yet, then a pause in which they become known, then the others.
// On a busy machine the thread that asks the system for the links may take longer than all windows would.
static void deep_windows(void) {
    enum { WINDOW = 16, BEFORE = 5, AFTER = 30 };
    if (me > 1) return;
    size_t bytes = base_bytes();
    buf b = buf_new(DEVICE, bytes, 0);
    until_ready(b);
    for (int round = 0; round < BEFORE + AFTER; round++) {
        MPI_Request r[WINDOW];
        char done = 0;
        if (round == BEFORE) sleep(1);
        if (me == 0) buf_fill(b, round);
        for (int i = 0; i < WINDOW; i++)
            if (me == 0) OK(MPI_Isend(b.p, bytes, MPI_BYTE, 1, TAG, MPI_COMM_WORLD, &r[i]));
            else OK(MPI_Irecv(b.p, bytes, MPI_BYTE, 0, TAG, MPI_COMM_WORLD, &r[i]));
        OK(MPI_Waitall(WINDOW, r, MPI_STATUSES_IGNORE));
        BUF_CHECK(b, round, bytes);
        // As bandwidth tests do: the next window begins when this one has arrived.
        if (me == 0) OK(MPI_Recv(&done, 1, MPI_BYTE, 1, TAG + 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        else OK(MPI_Send(&done, 1, MPI_BYTE, 0, TAG + 1, MPI_COMM_WORLD));
    }
    buf_free(b);
}

// The two ranks send to each other at once, one message at a time, from and to memory that nothing else has touched.
static void exchange(void) {
    static const size_t more[] = {0, 1, 4095, 65537};
    if (me > 1) return;
    for (int round = 0; round < 2 * ROUNDS; round++)
        for (size_t i = 0; i < sizeof more / sizeof *more; i++) {
            size_t bytes = base_bytes() + more[i];
            buf out = buf_new(DEVICE, bytes, 5 * i + round), in = buf_new(DEVICE, bytes, 3 * i + me);
            buf_fill(out, 1000 * me + 10 * round + i);
            MPI_Status s;
            if (round % 2) {
                OK(MPI_Sendrecv(out.p, bytes, MPI_BYTE, !me, TAG, in.p, bytes, MPI_BYTE, !me, TAG, MPI_COMM_WORLD, &s));
            } else {
                MPI_Request r[2];
                MPI_Status both[2];
                OK(MPI_Irecv(in.p, bytes, MPI_BYTE, !me, TAG, MPI_COMM_WORLD, &r[0]));
                OK(MPI_Isend(out.p, bytes, MPI_BYTE, !me, TAG, MPI_COMM_WORLD, &r[1]));
                OK(MPI_Waitall(2, r, both));
                s = both[0];
            }
            STATUS_CHECK(&s, !me, TAG, bytes);
            BUF_CHECK(in, 1000 * !me + 10 * round + i, bytes);
            BUF_CHECK(out, 1000 * me + 10 * round + i, bytes);
            buf_free(in);
            buf_free(out);
        }
}

// The same, several messages at once, in odd rounds received in one place, where the last one is what is left.
static void exchange_windows(void) {
    enum { WINDOW = 5 };
    if (me > 1) return;
    pid_t child = reviver();
    size_t bytes = base_bytes() + 11;
    buf first = buf_new(DEVICE, 1000, 3);
    until_ready(first);
    buf_free(first);
    for (int round = 0; round < 2 * ROUNDS; round++) {
        int places = round % 2 ? 1 : WINDOW;
        buf out[WINDOW], in[WINDOW];
        MPI_Request r[2 * WINDOW];
        for (int i = 0; i < WINDOW; i++) {
            out[i] = buf_new(DEVICE, bytes, 5 * i + round);
            in[i] = i < places ? buf_new(DEVICE, bytes, 3 * i + me) : in[0];
            buf_fill(out[i], 1000 * me + 10 * round + i);
        }
        for (int i = 0; i < WINDOW; i++) OK(MPI_Irecv(in[i].p, bytes, MPI_BYTE, !me, TAG, MPI_COMM_WORLD, &r[i]));
        for (int i = 0; i < WINDOW; i++) OK(MPI_Isend(out[i].p, bytes, MPI_BYTE, !me, TAG, MPI_COMM_WORLD, &r[WINDOW + i]));
        OK(MPI_Waitall(2 * WINDOW, r, MPI_STATUSES_IGNORE));
        for (int i = 0; i < places; i++) BUF_CHECK(in[i], 1000 * !me + 10 * round + (places == 1 ? WINDOW - 1 : i), bytes);
        for (int i = 0; i < WINDOW; i++) {
            BUF_CHECK(out[i], 1000 * me + 10 * round + i, bytes);
            buf_free(out[i]);
            if (i < places) buf_free(in[i]);
        }
    }
    end_reviver(child);
}

// Between messages from device memory one that comes through staging: all are received in one place, and the last one is what is
// left there.
static void in_between(buf staged) {
    enum { WINDOW = 4 };
    size_t bytes = staged.bytes;
    buf in = buf_new(DEVICE, bytes, 3), out[WINDOW];
    for (int i = 0; i < WINDOW; i++) out[i] = buf_new(DEVICE, bytes, i);
    until_ready(in);
    // The first one from host memory goes by value, which the MPI library may bring after what is sent behind it.
    for (int i = 0; i < 2; i++) {
        if (me == 0) OK(MPI_Send(staged.p, bytes, MPI_BYTE, 1, TAG, MPI_COMM_WORLD));
        else OK(MPI_Recv(in.p, bytes, MPI_BYTE, 0, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
    }
    for (int round = 0; round < 3 * ROUNDS; round++) {
        MPI_Request r[WINDOW];
        int at = round % WINDOW; // which of the window comes so: the last one every fourth time
        for (int i = 0; i < WINDOW; i++) {
            if (me == 0) buf_fill(i == at ? staged : out[i], 10 * round + i);
        }
        barrier();
        for (int i = 0; i < WINDOW; i++) {
            unsigned char *from = i == at ? staged.p : out[i].p;
            if (me == 0) OK(MPI_Isend(from, bytes, MPI_BYTE, 1, TAG, MPI_COMM_WORLD, &r[i]));
            else OK(MPI_Irecv(in.p, bytes, MPI_BYTE, 0, TAG, MPI_COMM_WORLD, &r[i]));
        }
        OK(MPI_Waitall(WINDOW, r, MPI_STATUSES_IGNORE));
        if (me == 1) BUF_CHECK(in, 10 * round + WINDOW - 1, bytes);
    }
    for (int i = 0; i < WINDOW; i++) buf_free(out[i]);
    buf_free(in);
}

// It is from host memory.
static void host_in_between(void) {
    if (me > 1) return;
    buf host = buf_new(HOST, base_bytes() + 7, 3);
    in_between(host);
    buf_free(host);
}

// It is from a pool, which cannot be exported.
static void pool_in_between(void) {
    if (me > 1) return;
    CUresult (*from_pool)(CUdeviceptr *, size_t, void *), (*to_pool)(CUdeviceptr, void *);
    *(void **)&from_pool = dlsym(cu.library, "cuMemAllocAsync");
    *(void **)&to_pool = dlsym(cu.library, "cuMemFreeAsync");
    size_t bytes = base_bytes() + 7;
    CUdeviceptr block;
    CU(from_pool(&block, bytes, NULL));
    CU(cu.synchronize());
    buf pool = {.p = (unsigned char *)(uintptr_t)block, .bytes = bytes, .kind = DEVICE};
    in_between(pool);
    CU(to_pool(block, NULL));
}

// Every allocation of the library's on a device fails, then the first few only, then none.
static void pressure(void) {
    int (*plan)(const char *);
    *(void **)&plan = dlsym(cu.library, "simcudaFaults");
    size_t bytes = base_bytes() + 5;
    for (int i = 0; i < 6 && me <= 1; i++) {
        buf b = buf_new(DEVICE, bytes, i);
        if (me == 0) buf_fill(b, i);
        OK(MPI_Barrier(MPI_COMM_WORLD));
        CHECK(plan(getenv("PLAN")) == 0, "a plan of errors");
        if (me == 0) OK(MPI_Send(b.p, bytes, MPI_BYTE, 1, TAG, MPI_COMM_WORLD));
        else OK(MPI_Recv(b.p, bytes, MPI_BYTE, 0, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        usleep(20000); // staging that was asked for is taken meanwhile
        OK(MPI_Barrier(MPI_COMM_WORLD));
        CHECK(plan(NULL) == 0, "no more errors");
        BUF_CHECK(b, i, bytes);
        buf_free(b);
    }
}

// Every rank sends to every other at once.
static void everyone(void) {
    size_t bytes = base_bytes() + 3;
    for (int round = 0; round < ROUNDS; round++) {
        buf *b = scratch(2 * ranks * sizeof *b);
        MPI_Request *r = scratch(2 * ranks * sizeof *r);
        int n = 0;
        for (int other = 0; other < ranks; other++) {
            if (other == me) continue;
            b[n] = buf_new(DEVICE, bytes, other);
            OK(MPI_Irecv(b[n].p, bytes, MPI_BYTE, other, TAG, MPI_COMM_WORLD, &r[n]));
            n++;
        }
        int receives = n;
        for (int step = 1; step < ranks; step++) {
            int other = (me + step) % ranks;
            b[n] = buf_new(DEVICE, bytes, step);
            buf_fill(b[n], 1000 * me + other);
            OK(MPI_Isend(b[n].p, bytes, MPI_BYTE, other, TAG, MPI_COMM_WORLD, &r[n]));
            n++;
        }
        OK(MPI_Waitall(n, r, MPI_STATUSES_IGNORE));
        for (int i = 0; i < n; i++) {
            int from = i < me ? i : i + 1;
            if (i < receives) BUF_CHECK(b[i], 1000 * from + me, bytes);
            buf_free(b[i]);
        }
        free(b);
        free(r);
    }
}

// A receive that is too small, between two that are not.
static void truncated(void) {
    if (me > 1) return;
    size_t bytes = base_bytes();
    OK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_RETURN));
    for (int i = 0; i < 3; i++) {
        size_t room = i == 1 ? bytes - 1 : bytes;
        buf b = buf_new(DEVICE, me ? room : bytes, 1);
        if (me == 0) {
            buf_fill(b, i);
            OK(MPI_Send(b.p, bytes, MPI_BYTE, 1, TAG, MPI_COMM_WORLD));
        } else {
            int code = MPI_Recv(b.p, room, MPI_BYTE, 0, TAG, MPI_COMM_WORLD, MPI_STATUS_IGNORE), class = MPI_SUCCESS;
            MPI_Error_class(code, &class);
            EQUAL(class, i == 1 ? MPI_ERR_TRUNCATE : MPI_SUCCESS);
            if (i != 1) BUF_CHECK(b, i, bytes);
        }
        buf_free(b);
    }
    OK(MPI_Comm_set_errhandler(MPI_COMM_WORLD, MPI_ERRORS_ARE_FATAL));
}

int main(int argc, char **argv) {
    static const struct test_case cases[] = {
        {"odd_sizes", odd_sizes}, {"window", window}, {"one_place", one_place}, {"one_place_early", one_place_early},
        {"deep_windows", deep_windows}, {"pool_in_between", pool_in_between}, {"host_in_between", host_in_between},
        {"pressure", pressure}, {"everyone", everyone}, {"truncated", truncated}, {"exchange", exchange},
        {"exchange_windows", exchange_windows}, {0},
    };
    return run_cases(argc, argv, cases, MPI_THREAD_SINGLE);
}
