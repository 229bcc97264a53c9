// FP8 weights times FP8 activations by wgmma, which only sm_90a has: on other architectures this file is empty.
// One product for any number of rows; a block has 128 outputs and 128 tokens:
// grid (ceil(n / 128), ceil(rows / 128), segments or 1), 256 threads, SHARED_BYTES of dynamic shared memory. With
// gridDim.z > 1 each z computes one segment into `partials`.
//
// Copies are cp.async, and waits are for copy groups and block barriers, so no wait depends on a count that could be wrong.
//
// The order of the sums is the contract's, but the bits are not those of mma.sync: for 9.0 the compiler builds an e4m3
// mma.sync from f16 products, while wgmma adds the e4m3 products in the tensor core's own shorter format. To keep a
// row's bits independent of the batch, a weight that uses this kernel must use it for every number of rows.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "common.cuh"
#include "wgmma.cuh"

constexpr int THREADS = 256;                            // two warpgroups of 64 tokens each
constexpr int TILE = 128;                               // outputs, tokens, and bytes of a row in a stage
constexpr int MATRIX_BYTES = TILE * BLOCK;
constexpr int STAGE_BYTES = 2 * MATRIX_BYTES;           // tokens, then weights
constexpr int STAGES = 6;
constexpr int SUMS = TILE / 2;                          // of a lane
constexpr int GROUP_ROWS = 8;                           // of place_in_groups
constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + PATTERN_BYTES;
constexpr int COPY_ROWS = THREADS / 8;                  // rows that all threads copy at once, eight chunks of 16 bytes each
constexpr int COPIES = TILE / COPY_ROWS;
static_assert(SHARED_BYTES <= 227 * 1024, "a block of compute capability 9.0 has no more");

// The 128-byte swizzle permutes the 16-byte chunks of a row by the row's index modulo eight: address bits 4..6 ^= bits 7..9.
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * BLOCK + (chunk ^ (row & 7)) * 16; }

// A tile's operands: the first row of tokens and of weights, the number of rows that exist from there, and the row distance.
struct Operands {
    const unsigned char* tokens;
    const unsigned char* weights;
    int tokens_left;
    int weights_left;
    int padded;
    int ld;
};

// Starts the copy of block `block`; rows that do not exist are zeros. From block `end` on, an empty group keeps the group count.
__device__ __forceinline__ void copy_stage(unsigned char* shared, const Operands& from, int block, int end) {
    if (block < end) {
        unsigned char* stage = shared + block % STAGES * STAGE_BYTES;
        int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
        long long column = (long long)block * BLOCK + chunk * 16;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            int at = row + i * COPY_ROWS;
            cp_async_16(stage + swizzled(at, chunk), from.tokens + (long long)at * from.padded + column, at < from.tokens_left);
            cp_async_16(stage + MATRIX_BYTES + swizzled(at, chunk), from.weights + (long long)at * from.ld + column, at < from.weights_left);
        }
    }
    cp_async_commit();
}

// Starts the products of block `block`.
__device__ __forceinline__ void multiply_block(float (&dot)[SUMS], unsigned char* shared, int block) {
    unsigned stage = shared_address(shared) + block % STAGES * STAGE_BYTES;
    unsigned long long a = matrix_descriptor(stage + threadIdx.x / 128 * (64 * BLOCK)), b = matrix_descriptor(stage + MATRIX_BYTES);
    keep_in_order(dot);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < BLOCK / 32; ++step) wgmma_m64n128k32(dot, a + step * 2, b + step * 2, step);
    wgmma_commit();
}

// Location of the scales of a lane's tokens (group, group + 8), and of those of the outputs before and from the one
// where the weight's scale changes, which is output `change` of the tile.
struct ScaleRows {
    const float* token[2];
    const float* weight[2];
    int change;
};

__device__ __forceinline__ ScaleRows scale_rows(const float* scales, const Weight& w, int output, int token, int rows, int n, int padded) {
    ScaleRows at;
#pragma unroll
    for (int i = 0; i < 2; ++i) at.token[i] = scales + (long long)min(token + i * 8, rows - 1) * (padded / BLOCK);
    int first = w.first_row + output, last = w.first_row + min(output + TILE, n) - 1;
    at.weight[0] = w.scales != nullptr ? w.scales + (long long)(first / BLOCK) * w.scale_cols : nullptr;
    at.weight[1] = w.scales != nullptr ? w.scales + (long long)(last / BLOCK) * w.scale_cols : nullptr;
    at.change = BLOCK - first % BLOCK;
    return at;
}

// A block's scales: [weight before or from the change][token].
struct Scales {
    float of[2][2];
};

__device__ __forceinline__ Scales load_scales(const ScaleRows& at, int block) {
    Scales scales;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float weight = at.weight[i / 2] != nullptr ? at.weight[i / 2][block] : 1.0f;
        scales.of[i / 2][i % 2] = __fmul_rn(weight, at.token[i % 2][block]);
    }
    return scales;
}

// segment = fmaf(dot, scale, segment), as fold_block of matmul.cuh. All lanes take the same branch, and rarely the second.
__device__ __forceinline__ void fold_block(float (&segment)[SUMS], const float (&dot)[SUMS], const Scales& scales, int change) {
    if (change == TILE) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) segment[i] = fmaf(dot[i], scales.of[0][i / 2 % 2], segment[i]);
        return;
    }
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        int column = i / 4 * 8 + (threadIdx.x & 3) * 2 + i % 2;
        segment[i] = fmaf(dot[i], column < change ? scales.of[0][i / 2 % 2] : scales.of[1][i / 2 % 2], segment[i]);
    }
}

// total = the products of the tile over blocks `first` .. `end - 1`; `first` begins a segment.
__device__ __forceinline__ void multiply_tile(
    float (&total)[SUMS], unsigned char* shared, const Operands& from, const ScaleRows& scale_at, int first, int end) {
    float dot[SUMS], segment[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) dot[i] = segment[i] = total[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) copy_stage(shared, from, first + i, end);
#pragma unroll 1
    for (int block = first; block < end; ++block) {
        // After the barrier this stage is complete, and both warpgroups have left the previous one, which is filled again.
        cp_async_wait<STAGES - 2>();
        fence_async_proxy();
        __syncthreads();
        multiply_block(dot, shared, block);
        copy_stage(shared, from, block + STAGES - 1, end);
        Scales scales = load_scales(scale_at, block);
        wgmma_wait();
        keep_in_order(dot);
        fold_block(segment, dot, scales, scale_at.change);
        if ((block + 1) % (SEGMENT / BLOCK) != 0 && block + 1 != end) continue;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            total[i] = __fadd_rn(total[i], segment[i]);
            segment[i] = 0.0f;
        }
    }
}

__device__ __forceinline__ void store_sums(
    float* y, const float (&total)[SUMS], const float* bias, int output, int token, int rows, int n) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        int column = output + i / 4 * 8 + (threadIdx.x & 3) * 2 + i % 2, row = token + i / 2 % 2 * 8;
        if (column >= n || row >= rows) continue;
        y[(long long)row * n + column] = bias != nullptr ? __fadd_rn(total[i], bias[column]) : total[i];
    }
}

extern "C" __global__ void gemm_fp8_sm90(
    float* y, float* partials, const void* terms, const float* scales, Weight w, const float* bias, int rows, int n, int padded) {
    HEARTH_DYNAMIC_SHARED(unsigned char, unaligned);
    unsigned char* shared = unaligned + (0u - shared_address(unaligned)) % PATTERN_BYTES;
    GridPlace place = place_in_groups(GROUP_ROWS);
    int output = place.column * TILE, first_row = place.row * TILE;
    Operands from = {
        static_cast<const unsigned char*>(terms) + (long long)first_row * padded,
        static_cast<const unsigned char*>(w.data) + (long long)output * w.ld,
        rows - first_row,
        n - output,
        padded,
        w.ld,
    };
    int token = first_row + threadIdx.x / 32 * 16 + (threadIdx.x & 31) / 4;
    ScaleRows scale_at = scale_rows(scales, w, output, token, rows, n, padded);
    int first = 0, end = padded / BLOCK;
    if (gridDim.z > 1) {
        first = blockIdx.z * (SEGMENT / BLOCK);
        end = min(first + SEGMENT / BLOCK, end);
    }
    float total[SUMS];
    multiply_tile(total, shared, from, scale_at, first, end);
    if (gridDim.z > 1) {
        store_sums(partials + (long long)blockIdx.z * rows * n, total, nullptr, output, token, rows, n);
    } else {
        store_sums(y, total, bias, output, token, rows, n);
    }
}

#endif
