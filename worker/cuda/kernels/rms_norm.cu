// Root-mean-square norm: y = x / sqrt(mean(x²) + eps) * weight over groups of `cols` columns. Where a group is a row, the row is
// also stored as products take it (terms.cuh).

#include "norm_row.cuh"

template <bool ADD>
__device__ __forceinline__ void norm(
    const NormOut& out, float* residual, const Rows& x, const Rows& more, const float* weight, float eps, int cols) {
    bool by_warp = cols <= WARP_COLS;
    int group = by_warp ? (int)(blockIdx.x * NORM_WARPS + threadIdx.x / 32) : (int)blockIdx.x;
    if (group >= out.groups) return;
    if (by_warp) {
        norm_group<ADD>(out, residual, x, more, weight, eps, group, cols, threadIdx.x % 32, 32);
    } else {
        norm_group<ADD>(out, residual, x, more, weight, eps, group, cols, threadIdx.x, NORM_THREADS);
    }
}

// 256 threads; grid ceil(groups / 8) up to 256 columns, `groups` above. x, y [groups][cols]; terms as split.cu writes them, or null.
extern "C" __global__ void rms_norm(
    float* y, void* terms, float* scales, Rows x, const float* weight, float eps, int groups, int cols, int padded) {
    norm<false>({y, terms, scales, groups, padded}, nullptr, x, {}, weight, eps, cols);
}

// The same grid for groups = rows. residual += delta + more, then y is the norm of the sum.
extern "C" __global__ void add_rms_norm(
    float* y, void* terms, float* scales, float* residual, Rows delta, Rows more, const float* weight, float eps, int rows, int cols,
    int padded) {
    norm<true>({y, terms, scales, rows, padded}, residual, delta, more, weight, eps, cols);
}
