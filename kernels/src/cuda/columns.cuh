// A column of a field made contiguous, and back. Elements of 4 and 8 bytes; pitches in elements.
#pragma once
#include "common.cuh"

template <class Word>
static __device__ __forceinline__ void copy_column(Word *dst, u64 dst_pitch, const Word *src, u64 src_pitch, u64 rows) {
    for (u64 r = FIRST(x); r < rows; r += STRIDE(x)) dst[r * dst_pitch] = src[r * src_pitch];
}

KERNEL pack_column_b32(u32 *packed, const u32 *column, u64 rows, u64 pitch) { copy_column(packed, (u64)1, column, pitch, rows); }
KERNEL pack_column_b64(u64 *packed, const u64 *column, u64 rows, u64 pitch) { copy_column(packed, (u64)1, column, pitch, rows); }
KERNEL unpack_column_b32(u32 *column, const u32 *packed, u64 rows, u64 pitch) { copy_column(column, pitch, packed, (u64)1, rows); }
KERNEL unpack_column_b64(u64 *column, const u64 *packed, u64 rows, u64 pitch) { copy_column(column, pitch, packed, (u64)1, rows); }
