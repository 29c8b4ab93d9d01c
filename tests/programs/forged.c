// Messages that look like descriptors and are none: they are the user's data, and arrive as they were sent.
#include "transfer.h"

static uint32_t crc32(const unsigned char *p, size_t n) {
    uint32_t crc = ~0u;
    for (size_t i = 0; i < n; i++) {
        crc ^= p[i];
        for (int k = 0; k < 8; k++) crc = crc >> 1 ^ (crc & 1 ? 0xedb88320u : 0);
    }
    return ~crc;
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
    put(d + 57, crc32(d, 57), 4); // the checksum is right, the rest is not
}

static void forged(void) {
    CHECK(crc32((const unsigned char *)"123456789", 9) == 0xcbf43926u, "the check value of CRC-32");
    unsigned char d[61];
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
