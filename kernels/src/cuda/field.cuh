// Filling, hashing and sampling a field. All of it depends on global coordinates only, never on the decomposition.
#pragma once
#include "common.cuh"

// Tiles of 2^tile_shift cells on a side give the field large features, a quarter of noise on top makes each cell unique.
template <class R>
static __device__ __forceinline__ typename R::T cell_value(u64 seed, i64 row, i64 col, u32 tile_shift) {
    typedef typename R::T T;
    T tile = R::unit(cell_word(~seed, row >> tile_shift, col >> tile_shift));
    T noise = R::unit(cell_word(seed, row, col));
    return R::add(R::mul(tile, (T)0.75), R::mul(noise, (T)0.25));
}

template <class R>
static __device__ __forceinline__ void fill(typename R::T *out, u64 rows, u64 cols, u64 pitch, i64 row0, i64 col0, u64 seed, u32 tile_shift) {
    for (u64 r = FIRST(y); r < rows; r += STRIDE(y))
        for (u64 c = FIRST(x); c < cols; c += STRIDE(x))
            out[r * pitch + c] = cell_value<R>(seed, row0 + (i64)r, col0 + (i64)c, tile_shift);
}

KERNEL field_fill_f32(float *out, u64 rows, u64 cols, u64 pitch, i64 row0, i64 col0, u64 seed, u32 tile_shift) { fill<F32>(out, rows, cols, pitch, row0, col0, seed, tile_shift); }
KERNEL field_fill_f64(double *out, u64 rows, u64 cols, u64 pitch, i64 row0, i64 col0, u64 seed, u32 tile_shift) { fill<F64>(out, rows, cols, pitch, row0, col0, seed, tile_shift); }

// Adds to *sum a word for each cell, from its global coordinates and its bits. Addition of integers
// commutes, so that any decomposition and any order of threads gives the same hash.
template <class R>
static __device__ __forceinline__ void hash(const typename R::T *field, u64 rows, u64 cols, u64 pitch, i64 row0, i64 col0, u64 *sum) {
    u64 mine = 0;
    for (u64 r = FIRST(y); r < rows; r += STRIDE(y))
        for (u64 c = FIRST(x); c < cols; c += STRIDE(x))
            mine += mix(cell_word(0, row0 + (i64)r, col0 + (i64)c) ^ R::bits(field[r * pitch + c]));
    if (mine) atomicAdd(sum, mine);
}

KERNEL field_hash_f32(const float *field, u64 rows, u64 cols, u64 pitch, i64 row0, i64 col0, u64 *sum) { hash<F32>(field, rows, cols, pitch, row0, col0, sum); }
KERNEL field_hash_f64(const double *field, u64 rows, u64 cols, u64 pitch, i64 row0, i64 col0, u64 *sum) { hash<F64>(field, rows, cols, pitch, row0, col0, sum); }

// Nearest-cell picture: pixel (y, x) of a height x width picture shows global cell (y * global_rows / height,
// x * global_cols / width). Writes the pixels whose cell lies in this block of the field, leaves the others.
template <class R>
static __device__ __forceinline__ void sample(float *picture, u64 height, u64 width, const typename R::T *field, u64 rows, u64 cols, u64 pitch, u64 row0, u64 col0, u64 global_rows, u64 global_cols) {
    for (u64 y = FIRST(y); y < height; y += STRIDE(y)) {
        u64 r = y * global_rows / height - row0;
        for (u64 x = FIRST(x); x < width; x += STRIDE(x)) {
            u64 c = x * global_cols / width - col0;
            if (r < rows && c < cols) picture[y * width + x] = (float)field[r * pitch + c];
        }
    }
}

KERNEL field_sample_f32(float *picture, u64 height, u64 width, const float *field, u64 rows, u64 cols, u64 pitch, u64 row0, u64 col0, u64 global_rows, u64 global_cols) { sample<F32>(picture, height, width, field, rows, cols, pitch, row0, col0, global_rows, global_cols); }
KERNEL field_sample_f64(float *picture, u64 height, u64 width, const double *field, u64 rows, u64 cols, u64 pitch, u64 row0, u64 col0, u64 global_rows, u64 global_cols) { sample<F64>(picture, height, width, field, rows, cols, pitch, row0, col0, global_rows, global_cols); }
