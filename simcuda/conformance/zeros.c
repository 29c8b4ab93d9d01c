/* Every function of a driver, called with nothing: by name, with zeros for arguments, and with pointers to zeros in the
 * places of the first ones. A line each: the function, the way it was called, and its answer, or what ended the process.
 *   zeros < NAMES        one name a line */
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

/* No function of the driver has more arguments. */
typedef int (*Any)(uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t, uintptr_t,
                   uintptr_t, uintptr_t);
enum { NAMES_MAX = 4096, BY_ADDRESS = 2, WAYS = 5 };
static const char *const ways[WAYS] = {"before cuInit", "zeros", "by cuGetProcAddress", "one pointer", "two pointers"};
static char names[NAMES_MAX][80];
static int count;
static void *library;
static _Alignas(64) char nothing[1 << 16];

static int call(Any function, uintptr_t a, uintptr_t b, uintptr_t c, uintptr_t d, uintptr_t e) {
    return function(a, b, c, d, e, 0, 0, 0, 0, 0, 0, 0);
}

static Any named(const char *name) {
    Any function;
    *(void **)&function = dlsym(library, name);
    return function;
}

/* As a program built for CUDA 13.0 asks for it. */
static Any by_address(const char *name) {
    Any function = 0;
    int status = 0;
    call(named("cuGetProcAddress_v2"), (uintptr_t)name, (uintptr_t)&function, 13000, 0, (uintptr_t)&status);
    return function;
}

/* All calls from this one on, until one kills the process or is obeyed: what it did is not for the next one to meet. */
static void work(int first, int way, int done) {
    uintptr_t context = 0, a = way > BY_ADDRESS ? (uintptr_t)nothing : 0, b = way > BY_ADDRESS + 1 ? a : 0;
    if (way) {
        call(named("cuInit"), 0, 0, 0, 0, 0);
        call(named("cuDevicePrimaryCtxRetain"), (uintptr_t)&context, 0, 0, 0, 0);
        call(named("cuCtxSetCurrent"), context, 0, 0, 0, 0);
    }
    for (int i = first, answer = 1; i < count && answer; i++) {
        Any function = way == BY_ADDRESS ? by_address(names[i]) : named(names[i]);
        alarm(10);
        if (function) printf("%s | %s | %d\n", names[i], ways[way], answer = call(function, a, b, 0, 0, 0));
        else printf("%s | %s | ABSENT\n", names[i], ways[way]);
        fflush(stdout);
        if (write(done, &i, sizeof i) != sizeof i) _exit(1);
    }
    _exit(0);
}

int main(void) {
    char line[80];
    while (count < NAMES_MAX && fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        strcpy(names[count++], line);
    }
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    for (int way = 0; way < WAYS; way++)
        for (int next = 0; next < count;) {
            int done[2], status, seen, last = -1;
            if (pipe(done)) return 1;
            pid_t child = fork();
            if (child == 0) work(next, way, done[1]);
            close(done[1]);
            while (read(done[0], &seen, sizeof seen) == sizeof seen) last = seen;
            close(done[0]);
            waitpid(child, &status, 0);
            if (last >= 0) next = last + 1;
            if (WIFEXITED(status) && WEXITSTATUS(status) == 0 && last >= 0) continue;
            if (next == count) break;
            if (WIFSIGNALED(status)) printf("%s | %s | SIGNAL %d\n", names[next], ways[way], WTERMSIG(status));
            else printf("%s | %s | EXIT %d\n", names[next], ways[way], WEXITSTATUS(status));
            fflush(stdout);
            next++;
        }
    return 0;
}
