// Where the library's helper thread may run: prints it beside where the process may, once a few messages have gone.
#include "transfer.h"

enum { ROOM = 300 };

// What follows `prefix` in the first line of a thread's file that begins with it; an empty text if there is none.
static void look_up(const char *thread, const char *file, const char *prefix, char found[ROOM]) {
    char path[ROOM], line[ROOM];
    size_t length = strlen(prefix);
    snprintf(path, sizeof path, "/proc/self/task/%s/%s", thread, file);
    found[0] = 0;
    FILE *open = fopen(path, "r");
    while (open && !found[0] && fgets(line, sizeof line, open))
        if (!strncmp(line, prefix, length)) {
            line[strcspn(line, "\n")] = 0;
            snprintf(found, ROOM, "%s", line + length);
        }
    if (open) fclose(open);
}

int main(int argc, char **argv) {
    start(&argc, &argv, MPI_THREAD_SINGLE);
    running = "bound";
    buf b = buf_new(DEVICE, 100001, 1);
    for (int i = 0; i < 20; i++) {
        buf_fill(b, i);
        if (me % 2 == 0) OK(MPI_Send(b.p, 100001, MPI_BYTE, peer, 1, MPI_COMM_WORLD));
        OK(MPI_Recv(b.p, 100001, MPI_BYTE, peer, 1, MPI_COMM_WORLD, MPI_STATUS_IGNORE));
        BUF_CHECK(b, i, 100001);
        if (me % 2) OK(MPI_Send(b.p, 100001, MPI_BYTE, peer, 1, MPI_COMM_WORLD));
        usleep(20000);
    }
    char own[ROOM], helper[ROOM] = "", name[ROOM];
    snprintf(name, sizeof name, "%d", getpid());
    look_up(name, "status", "Cpus_allowed_list:\t", own);
    DIR *threads = opendir("/proc/self/task");
    for (struct dirent *thread; threads && (thread = readdir(threads));) {
        look_up(thread->d_name, "comm", "", name);
        if (!strcmp(name, "anabranch")) look_up(thread->d_name, "status", "Cpus_allowed_list:\t", helper);
    }
    if (threads) closedir(threads);
    printf("rank %d: processors %s, helper %s\n", me, own, helper);
    fflush(stdout);
    barrier();
    if (me == 0) printf("passed 1 cases\n");
    OK(MPI_Finalize());
    return 0;
}
