// Messages that look like descriptors and are none: they are the user's data, and arrive as they were sent.
#include "transfer.h"

static uint64_t mix(uint64_t z) {
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

// The digest in a descriptor's last four bytes.
static uint32_t seal(const unsigned char *d) {
    uint64_t sum = 0, words[8] = {0};
    memcpy(words, d, 57);
    for (uint64_t i = 0; i < 8; i++) words[i] ^= mix((i + 1) * 0x9e3779b97f4a7c15u);
    for (int i = 0; i < 8; i += 2) {
        unsigned __int128 product = (unsigned __int128)words[i] * words[i + 1];
        sum += (uint64_t)(product >> 64) ^ (uint64_t)product;
    }
    return mix(sum) >> 32;
}

static void put(unsigned char *at, uint64_t value, int bytes) { for (int i = 0; i < bytes; i++) at[i] = value >> (8 * i); }

static void forge(unsigned char *d, int kind) {
    static const unsigned char magic[8] = {0xa7, 'A', 'n', 'B', 0xd3, 0x1c, 0xe9, 0x9b};
    pattern(d, 61, kind + 1);
    memcpy(d, magic, 8);
    if (kind % 4 == 0) return; // the checksum is wrong
    put(d + 16, kind % 4 == 1 ? 1000000 : 0, 4);
    put(d + 20, kind, 4);
    put(d + 32, kind, 8);
    put(d + 40, kind % 4 == 2 ? ~0ull : 100000, 8);
    put(d + 48, kind % 4 == 3 ? 999 : 1, 2);
    memset(d + 50, 0, 7);
    put(d + 57, seal(d), 4); // the checksum is right, the rest is not
}

static void forged(void) {
    unsigned char d[61];
    for (int i = 0; i < 57; i++) d[i] = i + 1;
    CHECK(seal(d) == 0x6e4d1966u, "the check value of the seal");
    FOR_ENDS(from, to)
        for (int i = 0; i < 40; i++)
            for (enum receive_way way = 0; way < 6; way++) {
                forge(d, i);
                buf b = buf_new(me % 2 ? to : from, 61, i % 3);
                if (me % 2 == 0) {
                    memory_put(b.kind, b.p, d, 61);
                    OK(MPI_Send(b.p, 61, MPI_BYTE, peer, 1, MPI_COMM_WORLD));
                } else {
                    unsigned char got[61];
                    MPI_Status s;
                    transfer_receive(way, SEND, b.p, 61, 61, peer, 1, MPI_COMM_WORLD, &s);
                    STATUS_CHECK(&s, peer, 1, 61);
                    memory_get(b.kind, got, b.p, 61);
                    CHECK(!memcmp(got, d, 61), "the user's data");
                }
                buf_free(b);
            }
}

static const struct test_case cases[] = {{"forged", forged}, {0}};
int main(int argc, char **argv) { return run_cases(argc, argv, cases, MPI_THREAD_SINGLE); }
