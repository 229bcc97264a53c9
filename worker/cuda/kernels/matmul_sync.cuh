// Products of many tokens by mma.sync: included by matmul.cuh, as one of two implementations of `tiled_products`.
#pragma once

// Source of a thread's copies into each stage: the weights', and one 16-byte column of chunks of the tokens' rows.
struct TileCopy {
    static constexpr int TOKEN_STEP = THREADS / TERM_CHUNKS;
    static constexpr int TOKEN_COPIES = TILE_TOKENS / TOKEN_STEP;

    WeightCopy weights;
    const unsigned char* tokens[TOKEN_COPIES];
    int tokens_left;
    long long term_bytes;
};

__device__ __forceinline__ TileCopy tile_copy(const Half (&halves)[2], int n, const Tokens& x) {
    TileCopy copy;
    copy.weights = weight_copy(halves, n);
    int token = threadIdx.x / TERM_CHUNKS;
    copy.tokens_left = x.count - token;
    copy.term_bytes = (long long)x.term_rows * x.padded * TERM_BYTES;
#pragma unroll
    for (int i = 0; i < TileCopy::TOKEN_COPIES; ++i) {
        int row = token_row(x, min(token + i * TileCopy::TOKEN_STEP, x.count - 1));
        copy.tokens[i] = x.terms + (long long)row * x.padded * TERM_BYTES + threadIdx.x % TERM_CHUNKS * 16;
    }
    return copy;
}

// Starts the copies of stage `index` of `stages`; an index past the last gives an empty group.
__device__ __forceinline__ void tile_stage(unsigned char* shared, const TileCopy& copy, int index, int stages) {
    if (index < stages) {
        unsigned char* weights = shared + index % STAGES * STAGE_BYTES;
        weight_stage(weights, copy.weights, index);
        unsigned char* terms = weights + WEIGHT_STAGE_BYTES;
        int row = threadIdx.x / TERM_CHUNKS, chunk = threadIdx.x % TERM_CHUNKS;
#pragma unroll
        for (int i = 0; i < TERMS * TileCopy::TOKEN_COPIES; ++i) {
            int term = i / TileCopy::TOKEN_COPIES, step = i % TileCopy::TOKEN_COPIES;
            const unsigned char* source = copy.tokens[step] + term * copy.term_bytes + index * (TERM_CHUNKS * 16);
            int at = place_terms<TERM_CHUNKS>(term * TILE_TOKENS + row + step * TileCopy::TOKEN_STEP, chunk) * 16;
            cp_async_16(terms + at, source, step * TileCopy::TOKEN_STEP < copy.tokens_left);
        }
    }
    cp_async_commit();
}

// A warp computes the tile's outputs `warp_output()` .. + 31 for tokens `warp_token()` .. + 31. With at most 32 tokens
// the first four warps do all the work, one per scheduler.
__device__ __forceinline__ int warp_output() { return threadIdx.x / 32 % 4 * 32; }
__device__ __forceinline__ int warp_token() { return threadIdx.x / 128 * 32; }
// Where stages begin in the memory that a block was given.
__device__ __forceinline__ unsigned char* stage_memory(unsigned char* given) { return given; }

// dot += a warp's products of one stage; `tokens` of its 32 exist.
__device__ __forceinline__ void multiply_stage(float (&dot)[2][4][4], const unsigned char* weights, int tokens) {
    if (tokens <= 0) return;
    const unsigned char* terms = weights + WEIGHT_STAGE_BYTES;
    int row = warp_output() + (threadIdx.x & 31) / 4;
#pragma unroll 1
    for (int unit = 0; unit < STAGE_UNITS; ++unit) {
        int chunk = unit * 4 + (threadIdx.x & 3);
        uint4 upper[2], lower[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            upper[m] = load_16(weights + place_weights<WEIGHT_CHUNKS>(row + m * 16, chunk) * 16);
            lower[m] = load_16(weights + place_weights<WEIGHT_CHUNKS>(row + m * 16 + 8, chunk) * 16);
        }
        if (tokens > 16) {
            multiply_unit<2, 4, 4, TILE_TOKENS, TERM_CHUNKS>(dot, upper, lower, terms, warp_token(), unit);
        } else {
            multiply_unit<2, 4, 2, TILE_TOKENS, TERM_CHUNKS>(dot, upper, lower, terms, warp_token(), unit);
        }
    }
}

// The products of the halves' outputs (rows from n on do not exist) with at most TILE_TOKENS tokens over the blocks
// `first` .. `end - 1`, summed as the contract requires; `first` begins a segment. `at_segment(s, sums)` follows the addition of
// segment s, and returns whether it has taken the sums, so that the next segment starts from zero; `at_end(sums)` follows the
// last. Sums are [m][n][4], of m x 16 outputs from `warp_output()` by n x 8 tokens from `warp_token()`. `shared`: the memory of the
// stages, and by wgmma of the totals behind it.
template <class AtSegment, class AtEnd>
__device__ __forceinline__ void tiled_products(
    const Half (&halves)[2], int n, const Tokens& x, int first, int end, unsigned char* shared, AtSegment at_segment, AtEnd at_end) {
    TileCopy copy = tile_copy(halves, n, x);
    constexpr int BLOCK_STAGES = BLOCK / STAGE_COLS;
    int stages = end * BLOCK_STAGES;
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) tile_stage(shared, copy, first * BLOCK_STAGES + i, stages);

    const Half mine = warp_output() < HALF_OUTPUTS ? halves[0] : halves[1];
    ScaleRows<2, 4> scale_at = scale_rows<2, 4>(mine.w, mine.first + warp_output() % HALF_OUTPUTS, n, x, warp_token());
    float dot[2][4][4], segment[2][4][4], total[2][4][4];
    clear(segment);
    clear(total);
    for (int block = first; block < end; ++block) {
        Scales<2, 4> scales = load_scales(scale_at, block);
        clear(dot);
#pragma unroll 1
        for (int s = 0; s < BLOCK_STAGES; ++s) {
            int index = block * BLOCK_STAGES + s;
            // After the barrier this stage is complete, and every warp has left the previous one, which is filled again.
            cp_async_wait<STAGES - 2>();
            __syncthreads();
            tile_stage(shared, copy, index + STAGES - 1, stages);
            multiply_stage(dot, shared + index % STAGES * STAGE_BYTES, x.count - warp_token());
        }
        fold_block(segment, dot, scales);
        fold_segment(total, segment, block, end);
        if ((block + 1) % BLOCKS_OF_SEGMENT != 0 && block + 1 != end) continue;
        if (at_segment(block / BLOCKS_OF_SEGMENT, total)) clear(total);
    }
    at_end(total);
}

// Stores a thread's sums of a tile whose outputs begin at `output`, and whose `count` tokens begin at row 0 of y.
template <int M, int N>
__device__ __forceinline__ void store_tile(
    float* y, const float (&sums)[M][N][4], const float* bias, int output, int count, int n, unsigned char* shared) {
#pragma unroll
    for (int i = 0; i < M * N; ++i)
        store_sums(y, sums[i / N][i % N], bias, output + warp_output() + i / N * 16, warp_token() + i % N * 8, count, n);
}

// sums = of(gate's sum, sum) in warps of the second half of the tile. The first half's pass through the memory of the stages, each to
// the lane that has the other's sum for the same column and slot: the warp with the same outputs of the other half.
template <int M, int N, class Of>
__device__ __forceinline__ void take_gates(float (&sums)[M][N][4], unsigned char* shared, Of of) {
    bool gate = warp_output() < HALF_OUTPUTS;
    int pair = threadIdx.x / 128 * 2 + warp_output() % HALF_OUTPUTS / 32;
    float* gates = reinterpret_cast<float*>(shared) + pair * (M * N * 4 * 32) + (threadIdx.x & 31);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < M * N * 4; ++i)
        if (gate) gates[i * 32] = sums[i / (N * 4)][i / 4 % N][i % 4];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < M * N * 4; ++i) {
        float& sum = sums[i / (N * 4)][i / 4 % N][i % 4];
        if (!gate) sum = of(gates[i * 32], sum);
    }
}
