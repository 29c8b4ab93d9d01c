// What the Fortran programs need of sim.h.
#include "sim.h"

void sim_start(int rank, int size) {
    const char *roles = getenv("ROLES");
    signal(SIGALRM, on_alarm);
    alarm(number_from("WATCHDOG", 100));
    me = rank;
    ranks = size;
    peer = rank ^ 1;
    running = "fortran";
    if (roles && *roles) role = roles[rank % strlen(roles)];
    if (role == 'D') device_start(rank);
}

void *sim_new(size_t bytes) { return buf_new(DEVICE, bytes, 0).p; }

static enum kind kind_here(void) { return role == 'H' ? HOST : DEVICE; }

void sim_fill(void *p, size_t bytes, int seed) {
    unsigned char *image = scratch(bytes);
    pattern(image, bytes, seed);
    memory_put(kind_here(), p, image, bytes);
    free(image);
}

void sim_check(const void *p, size_t bytes, int seed) { BYTES_CHECK(kind_here(), p, bytes, seed); }
