/* MPI as a plugin brings it in: dlopen of argv[1] with RTLD_LOCAL, then calls as a plugin linked with it would make them:
 * through the global scope first, where a preloaded library is. Prints "ok". */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>

static void *look_up(void *library, const char *name) {
    void *found = dlsym(RTLD_DEFAULT, name);
    return found ? found : dlsym(library, name);
}

int main(int argc, char **argv) {
    void *library = argc > 1 ? dlopen(argv[1], RTLD_NOW | RTLD_LOCAL) : 0;
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    int (*init)(int *, char ***) = (int (*)(int *, char ***))look_up(library, "MPI_Init");
    int (*finalize)(void) = (int (*)(void))look_up(library, "MPI_Finalize");
    if (init(0, 0) || finalize()) return 1;
    puts("ok");
    return 0;
}
