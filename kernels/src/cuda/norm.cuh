// Norm of the difference of two fields, one partial result for each block of exactly 256 threads.
// Cell number i (row by row) belongs to thread i mod (number of threads), which adds its cells in rising
// order; then a tree of fixed shape adds the block's threads. The host adds the partial results in order.
#pragma once
#include "common.cuh"

#define NORM_THREADS 256

struct Max {
    // The largest difference. A NaN stays: a field that has one must not look converged.
    static __device__ double join(double a, double b) { return b > a || b != b ? b : a; }
    template <class R>
    static __device__ double cell(typename R::T a, typename R::T b) { return fabs((double)R::sub(a, b)); }
};

struct SumOfSquares {
    static __device__ double join(double a, double b) { return __dadd_rn(a, b); }
    template <class R>
    static __device__ double cell(typename R::T a, typename R::T b) {
        double d = __dsub_rn((double)a, (double)b);
        return __dmul_rn(d, d);
    }
};

template <class R, class Norm>
static __device__ __forceinline__ void norm(const typename R::T *__restrict__ a, const typename R::T *__restrict__ b, u64 rows, u64 cols, u64 pitch, double *partial) {
    __shared__ double tree[NORM_THREADS];
    u64 row_step = STRIDE(x) / cols, col_step = STRIDE(x) % cols;
    u64 r = FIRST(x) / cols, c = FIRST(x) % cols;
    double sum = 0.0;
    while (r < rows) {
        sum = Norm::join(sum, Norm::template cell<R>(a[r * pitch + c], b[r * pitch + c]));
        r += row_step;
        c += col_step;
        if (c >= cols) { c -= cols; r += 1; }
    }
    tree[threadIdx.x] = sum;
    for (u32 width = NORM_THREADS / 2; width > 0; width /= 2) {
        __syncthreads();
        if (threadIdx.x < width) tree[threadIdx.x] = Norm::join(tree[threadIdx.x], tree[threadIdx.x + width]);
    }
    if (threadIdx.x == 0) partial[blockIdx.x] = tree[0];
}

KERNEL norm_max_f32(const float *a, const float *b, u64 rows, u64 cols, u64 pitch, double *partial) { norm<F32, Max>(a, b, rows, cols, pitch, partial); }
KERNEL norm_max_f64(const double *a, const double *b, u64 rows, u64 cols, u64 pitch, double *partial) { norm<F64, Max>(a, b, rows, cols, pitch, partial); }
KERNEL norm_l2_f32(const float *a, const float *b, u64 rows, u64 cols, u64 pitch, double *partial) { norm<F32, SumOfSquares>(a, b, rows, cols, pitch, partial); }
KERNEL norm_l2_f64(const double *a, const double *b, u64 rows, u64 cols, u64 pitch, double *partial) { norm<F64, SumOfSquares>(a, b, rows, cols, pitch, partial); }
