// Filling and comparing raw memory, at any alignment and of any length.
#pragma once
#include "common.cuh"

typedef unsigned char u8;

// result[0] gains the number of differing bytes, result[1] falls to the offset of the first;
// the caller sets them to 0 and to the largest u64.
static __device__ __forceinline__ void report(u64 *result, u64 differing, u64 first) {
    if (differing == 0) return;
    atomicAdd(&result[0], differing);
    atomicMin(&result[1], first);
}

KERNEL fill_bytes(u8 *dst, u64 bytes, u32 value) {
    u64 head = (8 - ((u64)dst & 7)) & 7;
    if (head > bytes) head = bytes;
    u64 words = (bytes - head) / 8, tail = head + 8 * words;
    u64 word = (value & 0xff) * 0x0101010101010101ull;
    for (u64 i = FIRST(x); i < words; i += STRIDE(x)) *(u64 *)(dst + head + 8 * i) = word;
    for (u64 i = FIRST(x); i < head; i += STRIDE(x)) dst[i] = (u8)value;
    for (u64 i = tail + FIRST(x); i < bytes; i += STRIDE(x)) dst[i] = (u8)value;
}

// Byte i of dst becomes byte (start + i) of the pattern of `seed`.
KERNEL fill_pattern(u8 *dst, u64 bytes, u64 seed, u64 start) {
    if (bytes == 0) return;
    u64 last = (start + bytes - 1) / 8;
    for (u64 w = start / 8 + FIRST(x); w <= last; w += STRIDE(x)) {
        u64 word = pattern_word(seed, w);
        i64 at = (i64)(8 * w - start);
        if (at >= 0 && (u64)at + 8 <= bytes && (((u64)dst + at) & 7) == 0) {
            *(u64 *)(dst + at) = word;
            continue;
        }
        for (int k = 0; k < 8; k++)
            if (at + k >= 0 && (u64)(at + k) < bytes) dst[at + k] = (u8)(word >> (8 * k));
    }
}

// Compares memory with the pattern that fill_pattern with the same arguments would have left there.
KERNEL compare_pattern(const u8 *src, u64 bytes, u64 seed, u64 start, u64 *result) {
    if (bytes == 0) return;
    u64 last = (start + bytes - 1) / 8, differing = 0, first = ~0ull;
    for (u64 w = start / 8 + FIRST(x); w <= last; w += STRIDE(x)) {
        u64 word = pattern_word(seed, w);
        i64 at = (i64)(8 * w - start);
        for (int k = 0; k < 8; k++) {
            if (at + k < 0 || (u64)(at + k) >= bytes || src[at + k] == (u8)(word >> (8 * k))) continue;
            if (differing++ == 0) first = (u64)(at + k);
        }
    }
    report(result, differing, first);
}

KERNEL compare_buffers(const u8 *a, const u8 *b, u64 bytes, u64 *result) {
    u64 differing = 0, first = ~0ull;
    for (u64 i = FIRST(x); i < bytes; i += STRIDE(x))
        if (a[i] != b[i] && differing++ == 0) first = i;
    report(result, differing, first);
}
