// Root-mean-square norm: y = x / sqrt(mean(x²) + eps) * weight over groups of `cols` columns.
//
// A group's sum of squares is computed by a warp up to 256 columns and by a block above: each lane sums its columns in
// ascending order, and the lanes' sums are combined in one fixed tree. The order therefore depends on `cols` alone.

#include "quads.cuh"

constexpr int NORM_THREADS = 256;
constexpr int NORM_WARPS = NORM_THREADS / 32;
constexpr int WARP_COLS = 256;     // widest group for a warp

__device__ __forceinline__ float warp_sum(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
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

// Normalises one group with `width` lanes, of which this is lane `lane`. With a residual, x is the delta: their sum is
// stored in the residual and normalised. In the second pass each lane reads only columns that it wrote itself in the first.
template <bool ADD>
__device__ __forceinline__ void norm_group(
    float* y, float* residual, const float* x, const float* weight, float eps, int cols, int lane, int width) {
    const float* source = ADD ? residual : x;
    float squares = 0.0f;
    for (int c = 4 * lane; c < cols; c += 4 * width) {
        float4 v = load_quad(source, c, cols);
        if (ADD) {
            float4 d = load_quad(x, c, cols);
            v = make_float4(v.x + d.x, v.y + d.y, v.z + d.z, v.w + d.w);
            store_quad(residual, c, cols, v);
        }
        squares = fmaf(v.x, v.x, squares);
        squares = fmaf(v.y, v.y, squares);
        squares = fmaf(v.z, v.z, squares);
        squares = fmaf(v.w, v.w, squares);
    }
    float total = width == 32 ? warp_sum(squares) : block_sum(squares);
    float inverse = 1.0f / sqrtf(__fadd_rn(total / (float)cols, eps));
    for (int c = 4 * lane; c < cols; c += 4 * width) {
        float4 v = load_quad(source, c, cols);
        float4 w = load_quad(weight, c, cols);
        store_quad(y, c, cols,
                   make_float4(__fmul_rn(__fmul_rn(v.x, inverse), w.x), __fmul_rn(__fmul_rn(v.y, inverse), w.y),
                               __fmul_rn(__fmul_rn(v.z, inverse), w.z), __fmul_rn(__fmul_rn(v.w, inverse), w.w)));
    }
}

template <bool ADD>
__device__ __forceinline__ void norm(float* y, float* residual, const float* x, const float* weight, float eps, int groups, int cols) {
    bool by_warp = cols <= WARP_COLS;
    int group = by_warp ? (int)(blockIdx.x * NORM_WARPS + threadIdx.x / 32) : (int)blockIdx.x;
    if (group >= groups) return;
    long long at = (long long)group * cols;
    float* sum = ADD ? residual + at : nullptr;
    if (by_warp) {
        norm_group<ADD>(y + at, sum, x + at, weight, eps, cols, threadIdx.x % 32, 32);
    } else {
        norm_group<ADD>(y + at, sum, x + at, weight, eps, cols, threadIdx.x, NORM_THREADS);
    }
}

// 256 threads; grid ceil(groups / 8) up to 256 columns, `groups` above. x, y [groups][cols].
extern "C" __global__ void rms_norm(float* y, const float* x, const float* weight, float eps, int groups, int cols) {
    norm<false>(y, nullptr, x, weight, eps, groups, cols);
}

// The same grid for groups = rows. residual += delta, then y is the norm of the sum.
extern "C" __global__ void add_rms_norm(float* y, float* residual, const float* delta, const float* weight, float eps, int rows, int cols) {
    norm<true>(y, residual, delta, weight, eps, rows, cols);
}
