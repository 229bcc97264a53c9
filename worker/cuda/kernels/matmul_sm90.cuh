// Products of many tokens by wgmma: included by matmul.cuh, as the other implementation of `tiled_products`.
//
// A warpgroup computes 64 outputs, one half of the tile, for 128 tokens, or for 64 if there are no more. Weights pass through shared
// memory to registers, where each becomes bf16 once for all tokens; tokens are read from shared memory by the tensor core, in the
// swizzled layout that it wants. A k step has the 16 columns that it has in `multiply_unit`, four consecutive ones of each quad
// lane. In the step these fours lie side by side, so that tokens are copied 8 bytes at a time, and a lane multiplies two columns of
// each of two fours. Of a sum's three parts the dot product and the segment are in registers, the total in shared memory.
#pragma once

static_assert(TERMS == 1 && !E4M3_MMA && WEIGHT_TERMS == 1 && WARPS == 8, "two warpgroups, one product a k step");

constexpr int STEPS_OF_STAGE = STAGE_UNITS * STEPS;
constexpr int BLOCK_STAGES = BLOCK / STAGE_COLS;
constexpr int TOKEN_BYTES = STAGE_COLS * TERM_BYTES;                               // of a stage: a row of the swizzled layout
constexpr int PIECES = TOKEN_BYTES / 8;                                            // fours of columns
constexpr int COPY_TOKENS = COPY_THREADS / PIECES;                                 // whose pieces a warpgroup copies at once
constexpr int COPIED_STAGES = STAGES / 2 - 1;                                      // that are on their way from a warpgroup
static_assert(TOKEN_BYTES == 128 && STEPS_OF_STAGE == 4 && COPY_TOKENS % 8 == 0, "a row of a stage is one of the swizzle's");
static_assert(STAGE_BYTES % PATTERN_BYTES == 0 && WEIGHT_STAGE_BYTES % PATTERN_BYTES == 0, "matrices begin with a pattern");
static_assert(BLOCK_STAGES == 2 && STAGES >= 4 && STAGES % 2 == 0, "warpgroups and fragments take turns in the stages of a block");

__device__ __forceinline__ int warp_output() { return threadIdx.x / 32 * 16; }
__device__ __forceinline__ int warp_token() { return 0; }

__device__ __forceinline__ unsigned char* stage_memory(unsigned char* given) {
    return given + (0u - shared_address(given)) % PATTERN_BYTES;
}

// Source of a thread's copies into every second stage: the weights', and one piece of every COPY_TOKENS-th token.
template <int N>
struct TileCopy {
    static constexpr int COPIES = N * 8 / COPY_TOKENS;

    WeightCopy weights;
    const unsigned char* piece;                                                    // in row 0, of the next stage
    int rows[COPIES];
    int row_bytes;
    int place;                                                                     // of the piece, in the first token's row
};

// Byte of a piece in the tokens of a stage.
__device__ __forceinline__ int piece_place(int token, int piece) {
    int unit = piece / (4 * STEPS), quad = piece / STEPS % 4, step = unit * STEPS + piece % STEPS;
    int chunk = step * 2 + quad / 2;
    return token * TOKEN_BYTES + (chunk ^ (token & 7)) * 16 + quad % 2 * 8;
}

// Tokens that do not exist are copies of the last: nothing is stored of their sums.
template <int N>
__device__ __forceinline__ TileCopy<N> tile_copy(const Half (&halves)[2], int n, const Tokens& x, int first_stage) {
    TileCopy<N> copy;
    copy.weights = weight_copy(halves, n);
    int token = threadIdx.x % COPY_THREADS / PIECES, piece = threadIdx.x % PIECES;
    copy.piece = x.terms + piece * 8 + first_stage * TOKEN_BYTES;
    copy.row_bytes = x.padded * TERM_BYTES;
    copy.place = piece_place(token, piece);
#pragma unroll
    for (int i = 0; i < TileCopy<N>::COPIES; ++i) copy.rows[i] = token_row(x, min(token + i * COPY_TOKENS, x.count - 1));
    return copy;
}

// Starts the copies of stage `index` of `stages`, the second after the previous call's, to `stage`; an index past the last gives an
// empty group.
template <int N>
__device__ __forceinline__ void tile_stage(unsigned char* stage, TileCopy<N>& copy, int index, int stages) {
    if (index < stages) {
        weight_stage(stage, copy.weights, index);
        unsigned char* tokens = stage + WEIGHT_STAGE_BYTES + copy.place;
#pragma unroll
        for (int i = 0; i < TileCopy<N>::COPIES; ++i)
            cp_async_8(tokens + i * (COPY_TOKENS * TOKEN_BYTES), copy.piece + (long long)copy.rows[i] * copy.row_bytes);
    }
    copy.piece += 2 * TOKEN_BYTES;
    cp_async_commit();
}

// A warp's weights of one stage, for each k step.
struct Fragments {
    unsigned of[STEPS_OF_STAGE][4];
};

// Columns 2 * pair and 2 * pair + 1 of the four that 16 bytes of a row have for k step `step`.
__device__ __forceinline__ unsigned weight_pair(const uint4& bytes, int step, int pair) {
    if constexpr (WEIGHT_TYPE == WEIGHTS_FP8) {
        return e4m3x2_to_bf16x2(sign_extend_pair(word(bytes, step), pair));
    } else {
        return pair == 0 ? word(bytes, 2 * step) : word(bytes, 2 * step + 1);
    }
}

__device__ __forceinline__ void load_fragments(Fragments& a, const unsigned char* weights) {
    int row = warp_output() + (threadIdx.x & 31) / 4, four = (threadIdx.x & 3) / 2, pair = threadIdx.x & 1;
    int place = place_weights<WEIGHT_CHUNKS>(row, four) * 16;
#pragma unroll
    for (int i = 0; i < STAGE_UNITS * 4; ++i) {
        int unit = i / 4, lower = i % 2, second = i / 2 % 2;
        // The chunk is a number of bits of which each place has the exclusive or with the same.
        int chunk = unit * 4 + second * 2;
        uint4 bytes = load_16(weights + lower * (8 * WEIGHT_CHUNKS * 16) + (place ^ chunk * 16));
#pragma unroll
        for (int step = 0; step < STEPS; ++step) a.of[unit * STEPS + step][lower + 2 * second] = weight_pair(bytes, step, pair);
    }
}

// Starts the products of one stage: dot += them, or = if it is the block's first.
template <int N>
__device__ __forceinline__ void multiply_stage(float (&dot)[N][4], const Fragments& a, unsigned tokens, bool accumulates) {
    unsigned long long first = matrix_descriptor(tokens);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS_OF_STAGE; ++step) {
        unsigned long long b = descriptor_after(first, step * 32);
        if constexpr (N == 16) {
            wgmma_m64n128k16(dot, a.of[step], b, step > 0 || accumulates);
        } else {
            wgmma_m64n64k16(dot, a.of[step], b, step > 0 || accumulates);
        }
    }
    wgmma_commit();
}

// Memory of a thread's totals: four of them every THREADS float4.
__device__ __forceinline__ float4* totals(unsigned char* shared) {
    return reinterpret_cast<float4*>(shared + STAGES * STAGE_BYTES) + threadIdx.x;
}

// sums += the thread's total, unless it is the first segment's, which starts from zero; the total becomes that.
template <int N>
__device__ __forceinline__ void add_to_total(float (&sums)[1][N][4], float4* total, bool is_first, bool is_last) {
#pragma unroll
    for (int i = 0; i < N; ++i) {
        float (&sum)[4] = sums[0][i];
        float4 before = is_first ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : total[i * THREADS];
        sum[0] = __fadd_rn(before.x, sum[0]);
        sum[1] = __fadd_rn(before.y, sum[1]);
        sum[2] = __fadd_rn(before.z, sum[2]);
        sum[3] = __fadd_rn(before.w, sum[3]);
        if (!is_last) total[i * THREADS] = make_float4(sum[0], sum[1], sum[2], sum[3]);
    }
}

// As `tiled_products`, for at most 8 N tokens. While the tensor core multiplies one stage, the next one's weights are converted, and
// it has the second stage of a block before it is through with the first. Warpgroups meet once a stage, when they have given the
// tensor core work: while one adds up its block, it multiplies for the other. They copy stages in turn, since the fence that makes
// copies visible may wait for later ones, too: these are then older.
template <int N, class AtSegment, class AtEnd>
__device__ __forceinline__ void products_of(
    const Half (&halves)[2], int n, const Tokens& x, int first, int end, unsigned char* shared, AtSegment at_segment, AtEnd at_end) {
    int stages = end * BLOCK_STAGES, index = first * BLOCK_STAGES;
    // The first warpgroup copies the first stage of every block.
    int turn = threadIdx.x / COPY_THREADS;
    TileCopy<N> copy = tile_copy<N>(halves, n, x, index + turn);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i)
        if (i % 2 == turn) tile_stage(shared + i * STAGE_BYTES, copy, index + i, stages);
    // Where the stage that is multiplied and the one that is filled lie; where tokens of the first do.
    int stage = 0, filled = (STAGES - 1) * STAGE_BYTES;
    unsigned tokens = shared_address(shared) + WEIGHT_STAGE_BYTES;

    const Half mine = warp_output() < HALF_OUTPUTS ? halves[0] : halves[1];
    ScaleRows<1, N> scale_at = scale_rows<1, N>(mine.w, mine.first + warp_output() % HALF_OUTPUTS, n, x, 0);
    float dot[1][N][4], sums[1][N][4];
    clear(dot);
    clear(sums);
    Fragments a[BLOCK_STAGES];
    cp_async_wait<COPIED_STAGES>();
    fence_async_proxy();
    __syncthreads();
    load_fragments(a[0], shared);
    bool has_total = false;
    for (int block = first; block < end; ++block) {
        Scales<1, N> scales = load_scales(scale_at, block);
        keep_in_order(dot[0]);
#pragma unroll
        for (int s = 0; s < BLOCK_STAGES; ++s, ++index) {
            multiply_stage(dot[0], a[s], tokens + stage, s > 0);
            if (s > 0) wgmma_wait_all_but_one();
            // After the barrier the next stage is complete, and both warpgroups have left the previous one, which is filled again.
            if (turn != s) {
                cp_async_wait<COPIED_STAGES - 1>();
                fence_async_proxy();
            }
            __syncthreads();
            if (turn != s) tile_stage(shared + filled, copy, index + STAGES - 1, stages);
            filled = stage;
            stage = stage == (STAGES - 1) * STAGE_BYTES ? 0 : stage + STAGE_BYTES;
            if (index + 1 < stages) load_fragments(a[s ^ 1], shared + stage);
        }
        wgmma_wait();
        keep_in_order(dot[0]);
        fold_block(sums, dot, scales);
        bool is_last = block + 1 == end;
        if ((block + 1) % BLOCKS_OF_SEGMENT != 0 && !is_last) continue;
        add_to_total(sums, totals(shared), !has_total, is_last);
        has_total = !at_segment(block / BLOCKS_OF_SEGMENT, sums);
        if (!is_last) clear(sums);
    }
    at_end(sums);
}

// As the other implementation.
template <class AtSegment, class AtEnd>
__device__ __forceinline__ void tiled_products(
    const Half (&halves)[2], int n, const Tokens& x, int first, int end, unsigned char* shared, AtSegment at_segment, AtEnd at_end) {
    if (x.count > TILE_TOKENS / 2) {
        products_of<TILE_TOKENS / 8>(halves, n, x, first, end, shared, at_segment, at_end);
    } else {
        products_of<TILE_TOKENS / 16>(halves, n, x, first, end, shared, at_segment, at_end);
    }
}

// Float of a token's output in the 512 bytes where a warp exchanges its sums of 8 tokens and 16 outputs. Lanes write one sum each
// of 4 tokens, and read four of 8 tokens: in both cases to or from all banks.
__device__ __forceinline__ int exchange_place(int token, int output) {
    return (token ^ (token >> 2 & 1)) * 16 + ((output / 4) ^ (token & 2)) * 4 + output % 4;
}

// As the other implementation. Four consecutive outputs of a token come together in the memory of the warp's totals, which are no
// longer needed.
template <int N>
__device__ __forceinline__ void store_tile(
    float* y, const float (&sums)[1][N][4], const float* bias, int output, int count, int n, unsigned char* shared) {
    int lane = threadIdx.x & 31, group = lane / 4, quad = lane & 3;
    float* area = reinterpret_cast<float*>(totals(shared) - lane);
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N * 4; ++i)
        area[i / 4 * (THREADS * 4) + exchange_place(quad * 2 + i % 2, group + i / 2 % 2 * 8)] = sums[0][i / 4][i % 4];
    __syncwarp();
    int column = output + warp_output() + quad * 4, left = n - column;
    float bias_of[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) bias_of[i] = bias != nullptr && i < left ? bias[column + i] : 0.0f;
    y += (long long)group * n + column;
#pragma unroll
    for (int i = 0; i < N; ++i, y += 8ll * n) {
        if (i * 8 + group >= count) return;
        float4 sum = *reinterpret_cast<const float4*>(area + i * (THREADS * 4) + exchange_place(group, quad * 4));
        if (bias != nullptr) {
            sum.x = __fadd_rn(sum.x, bias_of[0]);
            sum.y = __fadd_rn(sum.y, bias_of[1]);
            sum.z = __fadd_rn(sum.z, bias_of[2]);
            sum.w = __fadd_rn(sum.w, bias_of[3]);
        }
        if (n % 4 == 0) {
            if (left > 0) *reinterpret_cast<float4*>(y) = sum;
            continue;
        }
        if (left > 0) y[0] = sum.x;
        if (left > 1) y[1] = sum.y;
        if (left > 2) y[2] = sum.z;
        if (left > 3) y[3] = sum.w;
    }
}

// As the other implementation.
template <int N, class Of>
__device__ __forceinline__ void take_gates(float (&sums)[1][N][4], unsigned char* shared, Of of) {
    bool gate = warp_output() < HALF_OUTPUTS;
    float4* own = totals(shared);
#pragma unroll
    for (int i = 0; i < N; ++i)
        if (gate) own[i * THREADS] = make_float4(sums[0][i][0], sums[0][i][1], sums[0][i][2], sums[0][i][3]);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (gate) continue;
        float4 gates = own[i * THREADS - THREADS / 2];
        sums[0][i][0] = of(gates.x, sums[0][i][0]);
        sums[0][i][1] = of(gates.y, sums[0][i][1]);
        sums[0][i][2] = of(gates.z, sums[0][i][2]);
        sums[0][i][3] = of(gates.w, sums[0][i][3]);
    }
}
