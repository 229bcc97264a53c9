// Products of many tokens by wgmma: included by matmul.cuh, as the other implementation of `tiled_products`.
//
// A warpgroup computes 64 outputs, one half of the tile, for 64 tokens. Weights pass through shared memory to registers, where they
// become bf16; tokens are read from shared memory by the tensor core, in the swizzled layout that it wants. A k step has the
// 16 columns that it has in `multiply_unit`; where in the step each lies follows from the lanes' fragments, so tokens are copied in
// pieces of two columns.
#pragma once

static_assert(TERMS == 1 && !E4M3_MMA && WEIGHT_TERMS == 1 && WARPS == 8, "two warpgroups, one product a k step");

constexpr int MATRIX_COLS = 64;                                                    // of a matrix in the swizzled layout: 128 bytes
constexpr int MATRIX_BYTES = TILE_TOKENS * 128;
constexpr int MATRICES = STAGE_COLS / MATRIX_COLS;                                 // of a stage
constexpr int ROWS_OF_WARP = TILE_TOKENS / WARPS;                                  // tokens whose copies a warp starts
constexpr int STEPS_OF_STAGE = STAGE_UNITS * STEPS;
static_assert(STEPS_OF_STAGE == MATRICES * 4 && STAGE_BYTES % PATTERN_BYTES == 0, "matrices begin with a pattern");

__device__ __forceinline__ int warp_output() { return threadIdx.x / 32 * 16; }
__device__ __forceinline__ int warp_token() { return 0; }
__device__ __forceinline__ int warp_pair() { return threadIdx.x / 32 % 4; }

__device__ __forceinline__ unsigned char* stage_memory(unsigned char* given) {
    return given + (0u - shared_address(given)) % PATTERN_BYTES;
}

// Source of a thread's copies into each stage: the weights', and one piece of two columns of the rows of its warp's tokens,
// which are 8 rows apart.
struct TileCopy {
    WeightCopy weights;
    const unsigned char* tokens;
    int token_rows[ROWS_OF_WARP];
    int token_row_bytes;
    int tokens_left;
    int token_place;                                                               // of the piece, in the matrix
};

// Byte of a piece of two columns in a swizzled row: pieces of a k step are where the lanes that multiply them expect them.
__device__ __forceinline__ int piece_place(int row, int piece) {
    constexpr int QUAD_PIECES = UNIT / 8;                                          // of a lane in a unit
    constexpr int UNIT_PIECES = 4 * QUAD_PIECES;
    int unit = piece / UNIT_PIECES, quad = piece % UNIT_PIECES / QUAD_PIECES;
    int chunk = unit * QUAD_PIECES + piece % QUAD_PIECES;                          // two of a k step
    return row * 128 + (chunk ^ (row & 7)) * 16 + quad * 4;
}

__device__ __forceinline__ TileCopy tile_copy(const Half (&halves)[2], int n, const Tokens& x) {
    TileCopy copy;
    copy.weights = weight_copy(halves, n);
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    copy.tokens = x.terms + lane * 4;
    copy.token_row_bytes = x.padded * TERM_BYTES;
    copy.tokens_left = x.count - warp;
    copy.token_place = piece_place(warp, lane);
#pragma unroll
    for (int i = 0; i < ROWS_OF_WARP; ++i) copy.token_rows[i] = token_row(x, min(warp + i * WARPS, x.count - 1));
    return copy;
}

// Starts the copies of stage `index` of `stages`; an index past the last gives an empty group.
__device__ __forceinline__ void tile_stage(unsigned char* shared, const TileCopy& copy, int index, int stages) {
    if (index < stages) {
        unsigned char* weights = shared + index % STAGES * STAGE_BYTES;
        weight_stage(weights, copy.weights, index);
        unsigned char* tokens = weights + WEIGHT_STAGE_BYTES + copy.token_place;
#pragma unroll
        for (int i = 0; i < ROWS_OF_WARP; ++i) {
            const unsigned char* source = copy.tokens + (long long)copy.token_rows[i] * copy.token_row_bytes + index * (STAGE_COLS * TERM_BYTES);
#pragma unroll
            for (int m = 0; m < MATRICES; ++m)
                cp_async_4(tokens + m * MATRIX_BYTES + i * (WARPS * 128), source + m * 128, i * WARPS < copy.tokens_left);
        }
    }
    cp_async_commit();
}

// A warp's weights of one stage, for each k step.
struct Fragments {
    unsigned of[STEPS_OF_STAGE][WEIGHT_TERMS][4];
};

__device__ __forceinline__ void load_fragments(Fragments& a, const unsigned char* weights) {
    int row = warp_output() + (threadIdx.x & 31) / 4;
#pragma unroll
    for (int unit = 0; unit < STAGE_UNITS; ++unit) {
        int chunk = unit * 4 + (threadIdx.x & 3);
        uint4 upper = load_16(weights + place_64<WEIGHT_CHUNKS>(row, chunk) * 16);
        uint4 lower = load_16(weights + place_64<WEIGHT_CHUNKS>(row + 8, chunk) * 16);
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            row_fragment(a.of[unit * STEPS + step], upper, step, 0);
            row_fragment(a.of[unit * STEPS + step], lower, step, 1);
        }
    }
}

// Starts the products of one stage: dot += them, or = if it is the block's first.
__device__ __forceinline__ void multiply_stage(float (&dot)[WARP_N][4], const Fragments& a, const unsigned char* weights, bool accumulates) {
    unsigned tokens = shared_address(weights) + WEIGHT_STAGE_BYTES;
    keep_in_order(dot);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS_OF_STAGE; ++step) {
        unsigned long long b = matrix_descriptor(tokens + step / 4 * MATRIX_BYTES + step % 4 * 32);
        wgmma_m64n64k16(dot, a.of[step][0], b, step > 0 || accumulates);
    }
    wgmma_commit();
}

// As the other implementation. While the tensor core multiplies one stage, the next one's weights are converted.
template <class AtSegment>
__device__ __forceinline__ void tiled_products(
    float (&total)[WARP_M][WARP_N][4], const Half (&halves)[2], int n, const Tokens& x, int first, int end, unsigned char* shared,
    AtSegment at_segment) {
    TileCopy copy = tile_copy(halves, n, x);
    constexpr int BLOCK_STAGES = BLOCK / STAGE_COLS;
    static_assert(STAGES >= 4, "two stages are on their way while one is multiplied and one converted");
    int stages = end * BLOCK_STAGES, index = first * BLOCK_STAGES;
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) tile_stage(shared, copy, index + i, stages);

    const Half mine = warp_output() < HALF_OUTPUTS ? halves[0] : halves[1];
    ScaleRows<WARP_M, WARP_N> scale_at = scale_rows<WARP_M, WARP_N>(mine.w, mine.first + warp_output() % HALF_OUTPUTS, n, x, 0);
    float dot[WARP_M][WARP_N][4], segment[WARP_M][WARP_N][4];
    clear(dot);
    clear(segment);
    clear(total);
    Fragments a[2];
    cp_async_wait<STAGES - 2>();
    fence_async_proxy();
    __syncthreads();
    load_fragments(a[0], shared + index % STAGES * STAGE_BYTES);
    for (int block = first; block < end; ++block) {
        Scales<WARP_M, WARP_N> scales = load_scales(scale_at, block);
#pragma unroll
        for (int s = 0; s < BLOCK_STAGES; ++s, ++index) {
            multiply_stage(dot[0], a[0], shared + index % STAGES * STAGE_BYTES, s > 0);
            // After the barrier the next stage is complete, and both warpgroups have left the previous one, which is filled again.
            cp_async_wait<STAGES - 3>();
            fence_async_proxy();
            __syncthreads();
            tile_stage(shared, copy, index + STAGES - 1, stages);
            if (index + 1 < stages) load_fragments(a[1], shared + (index + 1) % STAGES * STAGE_BYTES);
            wgmma_wait();
            keep_in_order(dot[0]);
            a[0] = a[1];
        }
        fold_block(segment, dot, scales);
        fold_segment(total, segment, block, end);
        if ((block + 1) % BLOCKS_OF_SEGMENT == 0 || block + 1 == end) at_segment(block / BLOCKS_OF_SEGMENT);
    }
}

// The products over all columns.
__device__ __forceinline__ void tiled_products(
    float (&total)[WARP_M][WARP_N][4], const Half (&halves)[2], int n, const Tokens& x, unsigned char* shared) {
    tiled_products(total, halves, n, x, 0, x.padded / BLOCK, shared, [](int) {});
}
