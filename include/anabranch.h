/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * What a program may ask of libanabranch.so. The library is preloaded, not linked: call through ANABRANCH_CALL, which
 * looks a function up (-ldl where the C library still wants it), so that the program also runs without the library:
 *
 *     anabranch_message m;
 *     if (ANABRANCH_CALL(0, anabranch_last, &m, sizeof m))
 *         printf("%s: %s\n", ANABRANCH_CALL("", anabranch_path_name, m.path), m.reason ? m.reason : "taken");
 *
 * All functions may be called by any thread at any time, before MPI_Init and after MPI_Finalize too. Strings are never
 * freed.
 */
#ifndef ANABRANCH_H
#define ANABRANCH_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A function of this file, or NULL where the library is not there. (ISO C lets no pointer to an object be cast to one to a
 * function, but POSIX says of dlsym's that both look alike.) */
#ifdef __cplusplus
#define ANABRANCH_FUNCTION(name) (reinterpret_cast<decltype(&name)>(dlsym((void *)0, #name)))
#else
#define ANABRANCH_FUNCTION(name) \
    (((union { void *object; __typeof__(&name) function; }){dlsym((void *)0, #name)}).function)
#endif

/* ANABRANCH_CALL(otherwise, name, ARGUMENTS...): the result of a function of this file, or `otherwise` where the library is not
 * there. (One macro for each number of arguments: before C23 and C++20 `...` stands for one at least.) */
#define ANABRANCH_CALL(...) \
    ANABRANCH_CALL_OF(__VA_ARGS__, ANABRANCH_CALL3, ANABRANCH_CALL2, ANABRANCH_CALL1, ANABRANCH_CALL0, 0, 0)(__VA_ARGS__)
#define ANABRANCH_CALL_OF(otherwise, name, a, b, c, call, ...) call
#define ANABRANCH_CALL0(otherwise, name) (ANABRANCH_FUNCTION(name) ? ANABRANCH_FUNCTION(name)() : (otherwise))
#define ANABRANCH_CALL1(otherwise, name, a) (ANABRANCH_FUNCTION(name) ? ANABRANCH_FUNCTION(name)(a) : (otherwise))
#define ANABRANCH_CALL2(otherwise, name, a, b) \
    (ANABRANCH_FUNCTION(name) ? ANABRANCH_FUNCTION(name)((a), (b)) : (otherwise))
#define ANABRANCH_CALL3(otherwise, name, a, b, c) \
    (ANABRANCH_FUNCTION(name) ? ANABRANCH_FUNCTION(name)((a), (b), (c)) : (otherwise))

/* Version of the library, as in "0.1.0". */
const char *anabranch_version(void);

/* ---- counters --------------------------------------------------------------------------------------------------- */

/* Present value of a counter of this process, or UINT64_MAX if no counter has this name.
 * Counters only grow. Useful ones: "sends_device", "sends_rts", "receives_direct" and
 * "receives_direct_bytes", "fallback_too_small", "verify_mismatches". */
uint64_t anabranch_counter(const char *name);

/* Name of counter number index, for index = 0, 1, ...; NULL past the last one. The names and their meaning are those of
 * the JSON that ANABRANCH_STATS=FILE writes (docs/names.md has those of counters that were renamed), and "fallback_REASON", "fallback_REASON_bytes" for its fallbacks. */
const char *anabranch_counter_name(unsigned index);

/* What a counter counts, in words; NULL if no counter has this name. For a fallback: its reason. */
const char *anabranch_counter_text(const char *name);

/* Name of reason number index why a message is not taken, as in "too_small"; NULL past the last one. */
const char *anabranch_reason_name(unsigned index);

/* ---- what happened to a message ------------------------------------------------------------------------------------ */

/* By which path a message went. More may be added. */
enum {
    ANABRANCH_UNKNOWN = 0,   /* it is not known yet, or the message failed */
    ANABRANCH_NATIVE = 1,    /* by the MPI library, from or to memory of the host */
    ANABRANCH_BCOPY = 2,     /* by the MPI library, copied from or to the device by this one */
    ANABRANCH_DIRECT = 3,    /* taken: straight from the sender's device memory, by get or put */
    ANABRANCH_SELF = 4,      /* taken: from a rank to itself, copied in place */
    ANABRANCH_HOST_PIPELINE = 5, /* taken: through a ring in host memory */
    ANABRANCH_EAGER = 6,     /* taken: from host memory, into which the sender had copied it */
    ANABRANCH_MULTIPATH = 7, /* taken: by several paths at once; bytes_by_path tells its parts */
    ANABRANCH_RELAY = 8,     /* only in bytes_by_path: over other GPUs */
    ANABRANCH_GPU_PIPELINE = 9, /* taken: through a ring in memory of the sender's GPU */
    ANABRANCH_PATHS = 16,    /* room for more */
    /* Former names. */
    ANABRANCH_VALUE = ANABRANCH_BCOPY,
    ANABRANCH_HOST_RING = ANABRANCH_HOST_PIPELINE,
    ANABRANCH_SEVERAL = ANABRANCH_MULTIPATH,
    ANABRANCH_GPU_RING = ANABRANCH_GPU_PIPELINE
};

/* Name of a path, as in "host_pipeline"; NULL for other numbers. */
const char *anabranch_path_name(int path);

typedef struct anabranch_message {
    int is_send;        /* 1: sent by this rank; 0: received */
    int is_complete;    /* 1: towards the program, or so anabranch_last says; 0: not yet */
    int is_taken;       /* 1: this library has moved the payload from buffer to buffer */
    int path;           /* ANABRANCH_DIRECT, ... */
    uint64_t bytes;     /* payload; 0 while a receive does not know its message */
    uint64_t bytes_by_path[ANABRANCH_PATHS]; /* which part of it went by which path, once that is known; of a message that went by
                          several, once it is complete, those that went by ANABRANCH_DIRECT, ANABRANCH_RELAY and
                          ANABRANCH_HOST_PIPELINE, and at ANABRANCH_UNKNOWN what need not come, as a later message was received in its place */
    const char *reason; /* why it was not taken, or not by the direct path: a name of anabranch_reason_name; or NULL */
} anabranch_message;

/* Fills *message with what is known of a request that the program has not completed, inactive persistent ones included.
 * `request` points to an MPI_Request of any MPI library, `size` is sizeof *message. Returns 1, or 0 where this library has
 * nothing to do with the request (a null one, or an operation on host memory left to the MPI library); *message is then
 * left as it is. A sender learns the path only when its receiver is through with the message, and takes one that its receiver
 * copied all by itself (ANABRANCH_OWNER=one) for a direct one. */
int anabranch_request(const void *request, anabranch_message *message, size_t size);

/* Likewise for the latest operation that this library has completed on the calling thread: a blocking send or receive, or
 * the last request of a wait or test; of a send and a receive in one call, the receive. Each is told once: returns 0 if
 * there was none since the last call. Operations on host memory that the MPI library completes by itself are not told of;
 * a receive that was watched for a message of this library's, and met another, is told of as ANABRANCH_NATIVE. */
int anabranch_last(anabranch_message *message, size_t size);

/* ---- which paths, in one run -------------------------------------------------------------------------------------- */

/* Messages that this process receives from here on take these paths only: a list as ANABRANCH_PATHS has it, as in "direct" or
 * "direct,host", or NULL for those of ANABRANCH_PATHS again, which are the most that may be chosen. So a program can compare them
 * in turns in one run (`anabranch compare --turns` does so). Messages under way keep theirs, and ranks need not agree: who
 * receives a message chooses its paths.
 *
 * Returns 0, or -1 where nothing has changed: this is no such list, it has a path that ANABRANCH_PATHS leaves out, or the library
 * takes no messages (before MPI_Init, after MPI_Finalize, or where it is off). */
int anabranch_paths(const char *list);

/* ---- the clock of a simulated node ----------------------------------------------------------------------------------- */

/* The time of the simulated node (`anabranch run --sim`), ns, as this process sees it: what a program reads before and after
 * what it measures in place of a clock of the machine, which tells nothing there. It moves while copies move; 0 before cuInit.
 * UINT64_MAX where no node is simulated: the driver is a GPU's, or none is loaded yet. */
uint64_t anabranch_simulated_ns(void);

/* ---- with and without, in one run -------------------------------------------------------------------------------------- */

/* Stands aside (on is not 0): from here on this process's messages are left to the MPI library, as if this library were not
 * there, until anabranch_aside(0). So a program can measure itself with and without in turns, which tells differences
 * apart that launches scatter more than (`anabranch compare --turns` does so).
 *
 * All ranks that exchange messages call it at the same place of the program, where every message has been received and no
 * other thread is in MPI:
 *
 *     MPI_Barrier(comm);
 *     if (ANABRANCH_CALL(0, anabranch_aside, 1) != 0) ...
 *     MPI_Barrier(comm);
 *
 * Returns 0, or how many messages and requests of this process are in the way, inactive persistent requests included; then
 * nothing has changed, and the ranks for which it returned 0 must be called back by anabranch_aside(0). That ranks agree is not
 * checked: a rank that stands aside receives 61 bytes in place of a message from one that does not. Before MPI_Init and
 * after MPI_Finalize it does nothing. */
int anabranch_aside(int on);

#ifdef __cplusplus
}
#endif

#endif
