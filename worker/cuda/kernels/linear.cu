// Linear layers: y[r][n] = bias[n] + sum over k of x[r][k] w[n][k], with x as written by split.cu.
//
// linear_decode takes 1..8 rows and reads each weight once, at memory speed. If its blocks are too few to fill the
// device, the grid has one row per segment, and linear_fold follows. linear_tiled takes any number of rows; it needs
// 96 KiB of dynamic shared memory. Where its blocks would leave most of the device idle, each tile is cut over several
// (gridDim.z): the first adds up its segments, the others keep theirs apart, and linear_fold adds them in order.
#include "matmul.cuh"

// Stores the lane's sums of 16 outputs from `output` and tokens `token` .. `token + 7` to y[row][n] where they exist.
__device__ __forceinline__ void store_sums(float* y, const float (&sum)[4], const float* bias, int output, int token, int rows, int n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int column = output + i / 2 * 8 + (threadIdx.x & 31) / 4;
        int row = token + (threadIdx.x & 3) * 2 + i % 2;
        if (column >= n || row >= rows) continue;
        y[(long long)row * n + column] = bias != nullptr ? __fadd_rn(sum[i], bias[column]) : sum[i];
    }
}

extern "C" __global__ void linear_decode(
    float* y, float* partials, const void* terms, const float* scales, Weight w, const float* bias, int rows, int n, int padded) {
    __shared__ __align__(128) unsigned char stages[2 * DECODE_STAGE_BYTES];
    Tokens x = {static_cast<const unsigned char*>(terms), scales, nullptr, 0, rows, rows, padded};
    int output = blockIdx.x * TILE_OUTPUTS + threadIdx.x / 32 * 16;
    int first = 0, end = padded / BLOCK;
    if (gridDim.y > 1) {
        first = blockIdx.y * BLOCKS_OF_SEGMENT;
        end = min(first + BLOCKS_OF_SEGMENT, end);
    }
    float total[1][1][4];
    decode_products(total, w, output, n, x, first, end, stages);
    if (gridDim.y > 1) {
        store_sums(partials + (long long)blockIdx.y * rows * n, total[0][0], nullptr, output, 0, rows, n);
    } else {
        store_sums(y, total[0][0], bias, output, 0, rows, n);
    }
}

// y = bias + the sum of the partials in order; any one-dimensional grid.
extern "C" __global__ void linear_fold(
    float* y, const float* partials, const float* bias, int rows, int n, int segments) {
    long long count = (long long)rows * n;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (long long)gridDim.x * blockDim.x) {
        float total = 0.0f;
        for (int segment = 0; segment < segments; ++segment) total = __fadd_rn(total, partials[segment * count + i]);
        y[i] = bias != nullptr ? __fadd_rn(total, bias[i % n]) : total;
    }
}

// Stores a thread's sums of a tile.
__device__ __forceinline__ void store_tile(
    float* y, const float (&sums)[2][4][4], const float* bias, int output, int first_row, int rows, int n) {
#pragma unroll
    for (int i = 0; i < 8; ++i)
        store_sums(y, sums[i / 4][i % 4], bias, output + warp_output() + i / 4 * 16, first_row + warp_token() + i % 4 * 8, rows, n);
}

extern "C" __global__ void linear_tiled(
    float* y, float* partials, const void* terms, const float* scales, Weight w, const float* bias, int rows, int n, int padded) {
    HEARTH_DYNAMIC_SHARED(unsigned char, shared);
    GridPlace place = place_in_groups(GROUP_ROWS);
    int first_row = place.row * TILE_TOKENS, output = place.column * TILE_OUTPUTS;
    int count = min(rows - first_row, TILE_TOKENS);
    Tokens x = {static_cast<const unsigned char*>(terms), scales, nullptr, first_row, count, rows, padded};
    Half halves[2] = {{w, output}, {w, output + HALF_OUTPUTS}};
    int blocks = padded / BLOCK, segments = (blocks + BLOCKS_OF_SEGMENT - 1) / BLOCKS_OF_SEGMENT;
    int each = (segments + gridDim.z - 1) / gridDim.z, first = blockIdx.z * each;
    float total[2][4][4];
    auto keep_apart = [&](int segment) {
        if (blockIdx.z == 0) return;
        store_tile(partials + (long long)(segment - each + 1) * rows * n, total, nullptr, output, first_row, rows, n);
        clear(total);
    };
    int end = min((first + each) * BLOCKS_OF_SEGMENT, blocks);
    tiled_products(total, halves, n, x, first * BLOCKS_OF_SEGMENT, end, shared, keep_apart);
    if (blockIdx.z > 0) return;
    bool is_whole = gridDim.z == 1;
    store_tile(is_whole ? y : partials, total, is_whole ? bias : nullptr, output, first_row, rows, n);
}
