// Linear layers: y[r][n] = bias[n] + sum over k of x[r][k] w[n][k], with x as written by split.cu.
//
// linear_decode takes 1..8 rows and reads each weight once, at memory speed. If its blocks are too few to fill the
// device, the grid has one row per segment, and the reader of y adds these (row_quad). linear_tiled takes any number of
// rows. Where its blocks would leave most of the device idle, each tile is cut over several (gridDim.z): the first adds up its
// segments, the others keep theirs apart, and the reader of y adds all.
#include "matmul.cuh"

// One of several products, and the column of blocks in it.
struct JointPart {
    Weight w;
    float* y;
    const float* bias;
    int n;
    int column;
};

// Parts are chosen one by one: parameters that are indexed would be copied to local memory.
__device__ __forceinline__ JointPart joint_part(const Joint& joint, int column) {
    JointPart part = {joint.w[0], joint.y[0], joint.bias[0], joint.n[0], column};
    int first = 0;
#pragma unroll
    for (int i = 1; i < MOST_JOINT; ++i) {
        first += (joint.n[i - 1] + TILE_OUTPUTS - 1) / TILE_OUTPUTS;
        if (i < joint.count && column >= first) part = {joint.w[i], joint.y[i], joint.bias[i], joint.n[i], column - first};
    }
    return part;
}

// Grid (columns of blocks of all products, segments or 1), 256 threads.
extern "C" __global__ void __launch_bounds__(THREADS, DECODE_BLOCKS_PER_SM) linear_decode(const void* terms, const float* scales, Joint joint, int rows, int padded) {
    __shared__ __align__(128) unsigned char stages[2 * DECODE_STAGE_BYTES];
    JointPart part = joint_part(joint, blockIdx.x);
    float* y = part.y;
    const float* bias = part.bias;
    Tokens x = {static_cast<const unsigned char*>(terms), scales, nullptr, 0, rows, rows, padded};
    int output = part.column * TILE_OUTPUTS + threadIdx.x / 32 * 16;
    int first = 0, end = padded / BLOCK;
    if (gridDim.y > 1) {
        first = blockIdx.y * BLOCKS_OF_SEGMENT;
        end = min(first + BLOCKS_OF_SEGMENT, end);
        y += (long long)blockIdx.y * rows * part.n;
        bias = nullptr;
    }
    float total[1][1][4];
    decode_products(total, part.w, output, part.n, x, first, end, stages);
    store_sums(y, total[0][0], bias, output, 0, rows, part.n);
}

extern "C" __global__ void TILED_BOUNDS linear_tiled(
    float* y, const void* terms, const float* scales, Weight w, const float* bias, int rows, int n, int padded) {
    HEARTH_DYNAMIC_SHARED(unsigned char, given);
    unsigned char* shared = stage_memory(given);
    GridPlace place = place_in_groups(GROUP_ROWS);
    int first_row = place.row * TILE_TOKENS, output = place.column * TILE_OUTPUTS;
    int count = min(rows - first_row, TILE_TOKENS);
    Tokens x = {static_cast<const unsigned char*>(terms), scales, nullptr, first_row, count, rows, padded};
    Half halves[2] = {{w, output}, {w, output + HALF_OUTPUTS}};
    int blocks = padded / BLOCK, segments = (blocks + BLOCKS_OF_SEGMENT - 1) / BLOCKS_OF_SEGMENT;
    int each = (segments + gridDim.z - 1) / gridDim.z, first = blockIdx.z * each;
    int end = min((first + each) * BLOCKS_OF_SEGMENT, blocks);
    float* tile = y + (long long)first_row * n;
    auto keep_apart = [&](int segment, const auto& sums) {
        if (blockIdx.z == 0) return false;
        store_tile(tile + (long long)(segment - each + 1) * rows * n, sums, nullptr, output, count, n, shared);
        return true;
    };
    auto store = [&](const auto& sums) {
        if (blockIdx.z == 0) store_tile(tile, sums, gridDim.z == 1 ? bias : nullptr, output, count, n, shared);
    };
    tiled_products(halves, n, x, first * BLOCKS_OF_SEGMENT, end, shared, keep_apart, store);
}
