// Sums of squares of a group of columns for rms_norm.cu and what it is fused with.
//
// A group's sum of squares is computed by a warp up to 256 columns and by a block above: each lane sums its columns in
// ascending order, and the lanes' sums are combined in one fixed tree. The order therefore depends on `cols` alone.
#pragma once

#include "quads.cuh"

constexpr int NORM_THREADS = 256;
constexpr int NORM_WARPS = NORM_THREADS / 32;
constexpr int WARP_COLS = 256;     // widest group for a warp

__device__ __forceinline__ float warp_sum(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

__device__ __forceinline__ float block_sum(float x) {
    __shared__ float sums[NORM_WARPS];
    float sum = warp_sum(x);
    if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    float total = 0.0f;
    for (int i = 0; i < NORM_WARPS; ++i) total += sums[i];
    return total;
}

__device__ __forceinline__ void add_squares(float& squares, float4 v) {
    squares = fmaf(v.x, v.x, squares);
    squares = fmaf(v.y, v.y, squares);
    squares = fmaf(v.z, v.z, squares);
    squares = fmaf(v.w, v.w, squares);
}

__device__ __forceinline__ float inverse_norm(float total, float eps, int cols) {
    return 1.0f / sqrtf(__fadd_rn(total / (float)cols, eps));
}

__device__ __forceinline__ float4 normed(float4 v, float inverse, float4 w) {
    return make_float4(__fmul_rn(__fmul_rn(v.x, inverse), w.x), __fmul_rn(__fmul_rn(v.y, inverse), w.y),
                       __fmul_rn(__fmul_rn(v.z, inverse), w.z), __fmul_rn(__fmul_rn(v.w, inverse), w.w));
}
