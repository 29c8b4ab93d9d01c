// A tool that takes NVTX ranges and writes a line for each: to $NVTX_RECORD.PID. It is brought in by NVTX_INJECTION64_PATH,
// or as libnvToolsExt.so.1.

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

// As NVTX 3 has them, and as NVTX 2 had them.
struct attributes {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;
    int32_t message_type;
    const char *message;
};
typedef void (*function)(void);
struct callbacks {
    size_t size;
    int (*table)(int module, function ***table, unsigned *count);
};
struct versions {
    size_t size;
    uint32_t version, reserved;
    void (*set)(uint32_t);
};

static FILE *out;
static int version = 2;
static uint64_t last;
static int domain;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void begin(void) {
    if (out) return;
    char name[4096];
    snprintf(name, sizeof name, "%s.%d", getenv("NVTX_RECORD"), (int)getpid());
    out = fopen(name, "w");
    if (!out) abort();
    setvbuf(out, NULL, _IOLBF, 1 << 16);
}

static void wrong(const char *what) { fprintf(out, "wrong %s\n", what); }

void *nvtxDomainCreateA(const char *name) {
    pthread_mutex_lock(&lock);
    begin();
    fprintf(out, "domain %s\n", name);
    pthread_mutex_unlock(&lock);
    return &domain;
}

uint64_t nvtxDomainRangeStartEx(void *in, const struct attributes *about) {
    pthread_mutex_lock(&lock);
    uint64_t id = ++last;
    if (in != &domain) wrong("domain");
    if (about->version != version || about->size != 48 || sizeof *about != 48) wrong("attributes");
    if (about->payload_type != 1 || about->message_type != 1) wrong("types");
    fprintf(out, "start %llu %llu %s\n", (unsigned long long)id, (unsigned long long)about->payload, about->message);
    pthread_mutex_unlock(&lock);
    return id;
}

void nvtxDomainRangeEnd(void *in, uint64_t id) {
    pthread_mutex_lock(&lock);
    if (in != &domain) wrong("domain");
    fprintf(out, "end %llu\n", (unsigned long long)id);
    pthread_mutex_unlock(&lock);
}

int InitializeInjectionNvtx2(const void *(*export)(uint32_t)) {
    // Nothing but domains, as a tool that a user has told so.
    static const unsigned counts[] = {0, 16, 9, 15, 7, 16, 7};
    if (getenv("NVTX_REFUSE")) return 0;
    begin();
    const struct callbacks *callbacks = export(1);
    const struct versions *versions = export(3);
    if (!callbacks || callbacks->size != sizeof *callbacks) wrong("callbacks");
    if (!versions || versions->size != sizeof *versions || versions->version != 3) wrong("versions");
    versions->set(3);
    if (export(0) || export(4)) wrong("export");
    function **table;
    unsigned count;
    for (int module = 1; module < 7; module++) {
        if (!callbacks->table(module, &table, &count) || count != counts[module]) wrong("module");
        for (unsigned number = 1; number < count; number++)
            if (!table[number]) wrong("slot");
        if (table[0] || table[count]) wrong("end");
    }
    if (callbacks->table(0, &table, &count) || callbacks->table(7, &table, &count)) wrong("no module");
    if (callbacks->table(-1, NULL, NULL) || !callbacks->table(5, &table, NULL)) wrong("no place");
    if (getenv("NVTX_TAKE_NONE")) return 1;
    version = 3;
    *table[2] = (function)nvtxDomainRangeStartEx;
    *table[3] = (function)nvtxDomainRangeEnd;
    *table[12] = (function)nvtxDomainCreateA;
    return 1;
}
