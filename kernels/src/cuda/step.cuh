// One Jacobi sweep: each interior cell becomes the mean of its four neighbours.
// `in` and `out` point to interior cell (0, 0); rows -1 and `rows` and columns -1 and `cols` are halo.
#pragma once
#include "common.cuh"

// Rows that a thread does one below the other: it loads each cell of its column once, and has their loads in flight together.
#define STEP_ROWS 4

template <class R>
static __device__ __forceinline__ void step(typename R::T *__restrict__ out, const typename R::T *__restrict__ in, u64 rows, u64 cols, u64 pitch) {
    typedef typename R::T T;
    for (u64 first = FIRST(y) * STEP_ROWS; first < rows; first += STRIDE(y) * STEP_ROWS) {
        for (u64 c = FIRST(x); c < cols; c += STRIDE(x)) {
            const T *p = in + first * pitch + c;
            T *o = out + first * pitch + c;
            T above = *(p - pitch), here = *p;
#pragma unroll
            for (u32 k = 0; k < STEP_ROWS; k++) {
                if (first + k >= rows) break;
                T below = *(p + pitch);
                T across = R::add(p[-1], p[1]);
                T along = R::add(above, below);
                *o = R::mul(R::add(across, along), (T)0.25);
                above = here;
                here = below;
                p += pitch;
                o += pitch;
            }
        }
    }
}

KERNEL jacobi_step_f32(float *out, const float *in, u64 rows, u64 cols, u64 pitch) { step<F32>(out, in, rows, cols, pitch); }
KERNEL jacobi_step_f64(double *out, const double *in, u64 rows, u64 cols, u64 pitch) { step<F64>(out, in, rows, cols, pitch); }
