// Shared by all kernels. Two rules keep each kernel bit for bit equal to its host twin:
// arithmetic goes through intrinsics with explicit rounding (so that the compiler contracts nothing),
// and everything summed across threads is either an integer or added in a fixed order.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct F32 {
    typedef float T;
    typedef u32 Bits;
    static __device__ T add(T a, T b) { return __fadd_rn(a, b); }
    static __device__ T sub(T a, T b) { return __fsub_rn(a, b); }
    static __device__ T mul(T a, T b) { return __fmul_rn(a, b); }
    // The upper 24 bits of a word as a number in [0, 1): exact.
    static __device__ T unit(u64 word) { return __fmul_rn(__uint2float_rn((u32)(word >> 40)), 5.9604644775390625e-8f); }
    static __device__ u64 bits(T a) { return __float_as_uint(a); }
};

struct F64 {
    typedef double T;
    typedef u64 Bits;
    static __device__ T add(T a, T b) { return __dadd_rn(a, b); }
    static __device__ T sub(T a, T b) { return __dsub_rn(a, b); }
    static __device__ T mul(T a, T b) { return __dmul_rn(a, b); }
    // The upper 53 bits of a word as a number in [0, 1): exact.
    static __device__ T unit(u64 word) { return __dmul_rn(__ull2double_rn(word >> 11), 1.1102230246251565404e-16); }
    static __device__ u64 bits(T a) { return (u64)__double_as_longlong(a); }
};

// The finalizer of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words.
static __device__ __forceinline__ u64 mix(u64 x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Counter-based generator: the word of a cell depends on its global coordinates alone.
static __device__ __forceinline__ u64 cell_word(u64 seed, i64 row, i64 col) {
    return mix(mix(seed + (u64)row * 0x9e3779b97f4a7c15ull) + (u64)col * 0xd1342543de82ef95ull);
}

// Word number `index` of the byte pattern of `seed`.
static __device__ __forceinline__ u64 pattern_word(u64 seed, u64 index) {
    return mix(mix(seed) + index * 0x9e3779b97f4a7c15ull);
}

// Global thread index and thread count in one dimension of a launch, 64 bits wide.
#define FIRST(d) ((u64)blockIdx.d * blockDim.d + threadIdx.d)
#define STRIDE(d) ((u64)gridDim.d * blockDim.d)

#define KERNEL extern "C" __global__ void
