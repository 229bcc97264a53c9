// Products of weights with activations for linear.cu and experts.cu. The kernel for few tokens (`decode_products`) and
// the one for many (`tiled_products`) differ in how bytes are moved; both compute an output with `multiply_unit`,
// `fold_block` and `fold_segment`, so their bits are the same. wgmma (matmul_sm90.cuh) multiplies the same sets of 16 columns in
// the same order, and adds a set as mma does.
//
// A unit is the 64 bytes of a weight's row that the four lanes of a quad read as 16 bytes each. The columns of a unit
// are mapped to the k positions of the mma so that each lane multiplies what it read: lane `quad` holds consecutive
// columns, and k step s of the unit takes every lane's s-th group of four (eight for e4m3 mma). The lanes' activations
// are mapped in the same way, so nothing is exchanged.
#pragma once

#include "terms.cuh"

// 1: products of many tokens go by wgmma, which only sm_90a has: for bf16 activations, and weights of one term.
#ifndef BY_WGMMA
#define BY_WGMMA 0
#endif
#if BY_WGMMA
#include "wgmma.cuh"
#endif

constexpr bool E4M3_MMA = ACTIVATIONS == ACTIVATIONS_FP8;
constexpr int WEIGHT_BYTES = WEIGHT_TYPE == WEIGHTS_F32 ? 4 : WEIGHT_TYPE == WEIGHTS_FP8 ? 1 : 2;
constexpr int WEIGHT_TERMS = WEIGHT_TYPE == WEIGHTS_F32 ? 3 : WEIGHT_TYPE == WEIGHTS_F16 ? 2 : 1;
constexpr int TERM_BYTES = E4M3_MMA ? 1 : 2;
static_assert(!E4M3_MMA || WEIGHT_TYPE == WEIGHTS_FP8, "FP8 activations need FP8 weights");

constexpr int UNIT = 64 / WEIGHT_BYTES;                       // columns
constexpr int UNITS = BLOCK / UNIT;                           // of a block
constexpr int STEPS = E4M3_MMA ? UNIT / 32 : UNIT / 16;       // mma k steps of a unit
constexpr int LOAD_STEPS = STEPS < 2 ? STEPS : 2;             // k steps whose activations one shared memory load brings
constexpr int LOADS = STEPS / LOAD_STEPS;
constexpr int LANE_BYTES = UNIT * TERM_BYTES / 4;             // of a unit's activations, for one lane
constexpr int BLOCKS_OF_SEGMENT = SEGMENT / BLOCK;

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;

__device__ __forceinline__ unsigned word(const uint4& v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

// The upper halves of two f32 as a pair of bf16.
__device__ __forceinline__ unsigned upper_pair(float first, float second) {
    return __byte_perm(float_bits(first), float_bits(second), 0x7632);
}

// Removes the leading bf16 (by truncation) from a finite x and returns it.
__device__ __forceinline__ float take_term(float& x) {
    float term = bits_float(float_bits(x) & 0xffff0000u);
    x = __fsub_rn(x, term);
    return term;
}

// The same for any x: a number that is not finite is its own term, with a bit that keeps a NaN one, and leaves zero.
__device__ __forceinline__ float take_first_term(float& x) {
    unsigned bits = float_bits(x);
    if ((bits & 0x7f800000u) != 0x7f800000u) return take_term(x);
    x = 0.0f;
    return bits_float((bits & 0x007fffffu) != 0 ? bits | 0x00400000u : bits);
}

// Splits the binary16 in the upper half of `upper` into its leading bf16 and, in `rest`, the remainder. Sign, exponent
// and mantissa in the positions of f32 are the value times 2^-112, including subnormals; a number that is not finite
// comes out as 65536 or more and gets its exponent back.
__device__ __forceinline__ float take_half_term(unsigned upper, float& rest) {
    float value = __fmul_rn(bits_float((unsigned)((int)upper >> 3) & 0x8fffe000u), bits_float(0x77800000u));
    float term = bits_float(float_bits(value) & 0xffff0000u);
    bool finite = fabsf(value) < 65536.0f;
    rest = finite ? __fsub_rn(value, term) : 0.0f;
    return finite ? term : bits_float(float_bits(term) | 0x7f800000u);
}

// The A registers `at` and `at + 2` (one row) of k step `step`, from the 16 bytes of that row; term 0 is the most significant.
__device__ __forceinline__ void row_fragment(unsigned (&a)[WEIGHT_TERMS][4], const uint4& bytes, int step, int at) {
    if constexpr (WEIGHT_TYPE == WEIGHTS_FP8 && !E4M3_MMA) {
        e4m3x4_to_bf16x4(word(bytes, step), a[0][at], a[0][at + 2]);
    } else if constexpr (WEIGHT_TYPE == WEIGHTS_F32) {
        float x[4];
        for (int i = 0; i < 4; ++i) x[i] = bits_float(word(bytes, i));
#pragma unroll
        for (int term = 0; term < WEIGHT_TERMS; ++term) {
            float taken[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) taken[i] = term == 0 ? take_first_term(x[i]) : take_term(x[i]);
            a[term][at] = upper_pair(taken[0], taken[1]);
            a[term][at + 2] = upper_pair(taken[2], taken[3]);
        }
    } else if constexpr (WEIGHT_TYPE == WEIGHTS_F16) {
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            unsigned halves = word(bytes, 2 * step + pair);
            float first_rest, second_rest;
            float first = take_half_term(halves << 16, first_rest), second = take_half_term(halves, second_rest);
            a[0][at + 2 * pair] = upper_pair(first, second);
            a[WEIGHT_TERMS - 1][at + 2 * pair] = upper_pair(first_rest, second_rest);
        }
    } else {
        a[0][at] = word(bytes, 2 * step);
        a[0][at + 2] = word(bytes, 2 * step + 1);
    }
}

// Position of 16-byte chunk `chunk` of row `row` in a shared memory matrix of CHUNKS chunks per row, when a quad reads
// 64 consecutive bytes of its row: the eight lanes that are served together (two rows) hit 128 different bytes of the banks.
template <int CHUNKS>
__device__ __forceinline__ int place_64(int row, int chunk) {
    return row * CHUNKS + (CHUNKS >= 8 ? chunk ^ ((row & 1) << 2) : chunk);
}

// The same where a quad reads 32 consecutive bytes: sixteen lanes (four rows) are served together.
template <int CHUNKS>
__device__ __forceinline__ int place_32(int row, int chunk) {
    return row * CHUNKS + (CHUNKS >= 8 ? chunk ^ ((row & 3) << 1) : chunk ^ (row & 2));
}

// The same for activations. A lane whose share of a unit is 32 bytes finds its two chunks four apart, so that a quad
// still reads 64 consecutive bytes; if the share is 8 bytes, a quad reads 32.
template <int CHUNKS>
__device__ __forceinline__ int place_terms(int row, int chunk) {
    if constexpr (LANE_BYTES == 32) chunk = (chunk & ~7) | (chunk & 1) << 2 | (chunk & 7) >> 1;
    return LANE_BYTES == 8 ? place_32<CHUNKS>(row, chunk) : place_64<CHUNKS>(row, chunk);
}

// The same for the weights of a stage. For wgmma two lanes of a quad read the same chunk.
template <int CHUNKS>
__device__ __forceinline__ int place_weights(int row, int chunk) {
    return BY_WGMMA ? place_32<CHUNKS>(row, chunk) : place_64<CHUNKS>(row, chunk);
}

// The B registers of LOAD_STEPS k steps for one row of activations.
template <int CHUNKS>
__device__ __forceinline__ void load_terms(unsigned (&b)[LOAD_STEPS][2], const unsigned char* matrix, int row, int unit, int load) {
    int quad = threadIdx.x & 3;
    int byte = unit * (4 * LANE_BYTES) + quad * LANE_BYTES + load * 16;
    const unsigned char* at = matrix + place_terms<CHUNKS>(row, byte / 16) * 16;
    if constexpr (LANE_BYTES == 8) {
        uint2 v = *reinterpret_cast<const uint2*>(at + byte % 16);
        b[0][0] = v.x;
        b[0][1] = v.y;
    } else {
        uint4 v = load_16(at);
#pragma unroll
        for (int step = 0; step < LOAD_STEPS; ++step) {
            b[step][0] = word(v, 2 * step);
            b[step][1] = word(v, 2 * step + 1);
        }
    }
}

__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    if constexpr (E4M3_MMA) {
        mma_e4m3(d, a, b);
    } else {
        mma_bf16(d, a, b);
    }
}

// dot += one unit of M x 16 outputs (rows of `upper` and, eight further, `lower`) by N x 8 tokens. `terms` holds one
// matrix of ROWS rows of CHUNKS chunks per term. The order for one output is: ascending k steps, in each the weight's
// terms from the least significant, for each of them the activation's terms from the least significant. Of the N
// groups of eight tokens the first USED are computed, two at a time, which gives the mma more independent sums, except
// where binary16 weights take up the registers.
template <int M, int N, int USED, int ROWS, int CHUNKS>
__device__ __forceinline__ void multiply_unit(
    float (&dot)[M][N][4], const uint4 (&upper)[M], const uint4 (&lower)[M], const unsigned char* terms, int first_row, int unit) {
    constexpr int GROUP = USED < 2 || WEIGHT_TYPE == WEIGHTS_F16 ? 1 : 2;
    int row = first_row + (threadIdx.x & 31) / 4;
#pragma unroll
    for (int load = 0; load < LOADS; ++load) {
        unsigned a[LOAD_STEPS][M][WEIGHT_TERMS][4];
#pragma unroll
        for (int step = 0; step < LOAD_STEPS; ++step) {
#pragma unroll
            for (int m = 0; m < M; ++m) {
                row_fragment(a[step][m], upper[m], load * LOAD_STEPS + step, 0);
                row_fragment(a[step][m], lower[m], load * LOAD_STEPS + step, 1);
            }
        }
#pragma unroll
        for (int n = 0; n < USED; n += GROUP) {
            unsigned b[GROUP][TERMS][LOAD_STEPS][2];
#pragma unroll
            for (int i = 0; i < GROUP * TERMS; ++i) {
                const unsigned char* matrix = terms + i % TERMS * (ROWS * CHUNKS * 16);
                load_terms<CHUNKS>(b[i / TERMS][i % TERMS], matrix, row + (n + i / TERMS) * 8, unit, load);
            }
#pragma unroll
            for (int i = 0; i < LOAD_STEPS * WEIGHT_TERMS * TERMS; ++i) {
                int step = i / (WEIGHT_TERMS * TERMS);
                int weight_term = WEIGHT_TERMS - 1 - i / TERMS % WEIGHT_TERMS;
                int term = TERMS - 1 - i % TERMS;
#pragma unroll
                for (int j = 0; j < GROUP * M; ++j)
                    multiply(dot[j % M][n + j / M], a[step][j % M][weight_term], b[j / M][term][step]);
            }
        }
    }
}

// Activations of a tile as written by split.cu: token i is row rows[i], or `first + i` without a list.
struct Tokens {
    const unsigned char* terms;
    const float* scales;
    const int* rows;
    int first;
    int count;
    int term_rows;
    int padded;
};

__device__ __forceinline__ int token_row(const Tokens& x, int token) {
    return x.rows != nullptr ? x.rows[token] : x.first + token;
}

// Start of the scales of a lane's M x 2 outputs and N x 2 tokens; -1: scale 1.
template <int M, int N>
struct ScaleRows {
    const float* weights;
    const float* tokens;
    int weight[M][2];
    int token[N][2];
};

template <int M, int N>
struct Scales {
    float weight[M][2];
    float token[N][2];
};

// For outputs `output + 16 m + 8 i + group` of w (those from n on do not exist) and tokens `token + 8 n + 2 quad + i` of x.
template <int M, int N>
__device__ __forceinline__ ScaleRows<M, N> scale_rows(const Weight& w, int output, int n, const Tokens& x, int token) {
    ScaleRows<M, N> rows;
    int group = (threadIdx.x & 31) / 4, quad = threadIdx.x & 3;
    rows.weights = w.scales;
    rows.tokens = x.scales;
#pragma unroll
    for (int i = 0; i < M * 2; ++i) {
        int row = output + i * 8 + group;
        bool some = WEIGHT_TYPE == WEIGHTS_FP8 && w.scales != nullptr && row < n;
        rows.weight[i / 2][i % 2] = some ? (w.first_row + row) / BLOCK * w.scale_cols : -1;
    }
#pragma unroll
    for (int i = 0; i < N * 2; ++i) {
        int at = token + i / 2 * 8 + quad * 2 + i % 2;
        bool some = E4M3_MMA && at < x.count;
        rows.token[i / 2][i % 2] = some ? token_row(x, at) * (x.padded / BLOCK) : -1;
    }
    return rows;
}

template <int M, int N>
__device__ __forceinline__ Scales<M, N> load_scales(const ScaleRows<M, N>& rows, int block) {
    Scales<M, N> scales;
#pragma unroll
    for (int i = 0; i < M * 2; ++i) {
        int row = rows.weight[i / 2][i % 2];
        scales.weight[i / 2][i % 2] = WEIGHT_TYPE == WEIGHTS_FP8 && row >= 0 ? rows.weights[row + block] : 1.0f;
    }
#pragma unroll
    for (int i = 0; i < N * 2; ++i) {
        int row = rows.token[i / 2][i % 2];
        scales.token[i / 2][i % 2] = E4M3_MMA && row >= 0 ? rows.tokens[row + block] : 1.0f;
    }
    return scales;
}

template <int M, int N>
__device__ __forceinline__ void clear(float (&sums)[M][N][4]) {
#pragma unroll
    for (int i = 0; i < M * N * 4; ++i) sums[i / (N * 4)][i / 4 % N][i % 4] = 0.0f;
}

// segment = fmaf(dot, scale, segment).
template <int M, int N>
__device__ __forceinline__ void fold_block(float (&segment)[M][N][4], const float (&dot)[M][N][4], const Scales<M, N>& scales) {
#pragma unroll
    for (int i = 0; i < M * N * 4; ++i) {
        int m = i / (N * 4), n = i / 4 % N, at = i % 4;
        float scale = scales.weight[m][at / 2];
        if constexpr (E4M3_MMA) scale = __fmul_rn(scale, scales.token[n][at % 2]);
        segment[m][n][at] = fmaf(dot[m][n][at], scale, segment[m][n][at]);
    }
}

// After block `block` of those before `end`: total += segment where a segment ends.
template <int M, int N>
__device__ __forceinline__ void fold_segment(float (&total)[M][N][4], float (&segment)[M][N][4], int block, int end) {
    if ((block + 1) % BLOCKS_OF_SEGMENT != 0 && block + 1 != end) return;
#pragma unroll
    for (int i = 0; i < M * N * 4; ++i) {
        float& sum = total[i / (N * 4)][i / 4 % N][i % 4];
        sum = __fadd_rn(sum, segment[i / (N * 4)][i / 4 % N][i % 4]);
    }
    clear(segment);
}

// Stores the lane's sums of 16 outputs from `output` and tokens `token` .. `token + 7` to y[token][n] where they exist.
__device__ __forceinline__ void store_sums(float* y, const float (&sum)[4], const float* bias, int output, int token, int count, int n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int column = output + i / 2 * 8 + (threadIdx.x & 31) / 4;
        int row = token + (threadIdx.x & 3) * 2 + i % 2;
        if (column >= n || row >= count) continue;
        y[(long long)row * n + column] = bias != nullptr ? __fadd_rn(sum[i], bias[column]) : sum[i];
    }
}

// ---- Few tokens: weights are loaded from memory straight into registers, each warp computes 16 outputs.

constexpr int DECODE_TOKENS = 8;
// Blocks of a multiprocessor, which registers must suffice for: FP8 takes more instructions for a byte, and so more warps; f32 in three
// terms takes registers.
constexpr int DECODE_BLOCKS_PER_SM =
    WEIGHT_TYPE == WEIGHTS_F32 ? 1 : WEIGHT_TYPE == WEIGHTS_FP8 && TERMS == 1 && !E4M3_MMA ? 3 : 2;
constexpr int RING = 4;                                                            // units in flight: 128 bytes a lane
constexpr int DECODE_BLOCKS = UNITS < RING ? RING / UNITS : 1;                     // blocks of one stage of activations
constexpr int DECODE_CHUNKS = DECODE_BLOCKS * BLOCK * TERM_BYTES / 16;             // of one row
constexpr int DECODE_STAGE_BYTES = TERMS * DECODE_TOKENS * DECODE_CHUNKS * 16;
static_assert(DECODE_BLOCKS * UNITS % RING == 0 && BLOCKS_OF_SEGMENT % DECODE_BLOCKS == 0, "a stage takes the ring round whole times");

// Starts the copy of the stage of activations that begins at `block`; tokens from x.count on and columns from `end` on are zeros.
__device__ __forceinline__ void decode_stage(unsigned char* stage, const Tokens& x, const unsigned char* row_terms, int block, int end) {
    int row = threadIdx.x / DECODE_CHUNKS, chunk = threadIdx.x % DECODE_CHUNKS;
    if (row < DECODE_TOKENS) {
        int byte = block * BLOCK * TERM_BYTES + chunk * 16;
        bool some = row < x.count && byte < end * BLOCK * TERM_BYTES;
#pragma unroll
        for (int term = 0; term < TERMS; ++term) {
            unsigned char* matrix = stage + term * (DECODE_TOKENS * DECODE_CHUNKS * 16);
            long long source = (long long)term * x.term_rows * x.padded * TERM_BYTES + byte;
            cp_async_16(matrix + place_terms<DECODE_CHUNKS>(row, chunk) * 16, row_terms + source, some);
        }
    }
    cp_async_commit();
}

// A lane's two rows of a weight. Where one does not exist, the last one is read, and its sums are not stored.
struct WeightRows {
    const unsigned char* upper;
    const unsigned char* lower;
};

__device__ __forceinline__ WeightRows weight_rows(const Weight& w, int output, int n) {
    int row = output + (threadIdx.x & 31) / 4;
    long long row_bytes = (long long)w.ld * WEIGHT_BYTES;
    const unsigned char* first = static_cast<const unsigned char*>(w.data) + (threadIdx.x & 3) * 16;
    return {first + min(row, n - 1) * row_bytes, first + min(row + 8, n - 1) * row_bytes};
}

// Where there is no such unit, the registers keep what they have: another value, as for lanes without a row, would be chosen
// behind the load, which would then be waited for long before it is used.
__device__ __forceinline__ void load_unit(uint4& upper, uint4& lower, const WeightRows& rows, int unit, int end_unit) {
    if (unit >= end_unit) return;
    upper = load_stream_16(rows.upper + (long long)unit * 64);
    lower = load_stream_16(rows.lower + (long long)unit * 64);
}

// total = the products of outputs `output` .. `output + 15` (those from n on do not exist) of w with at most 8 tokens
// over the blocks `first` .. `end - 1`, summed as the contract requires. `first` begins a segment. All threads of the
// block call it, with the same x and blocks. `stages`: two stages of shared memory.
__device__ __forceinline__ void decode_products(
    float (&total)[1][1][4], const Weight& w, int output, int n, const Tokens& x, int first, int end, unsigned char* stages) {
    int row = min((int)threadIdx.x / DECODE_CHUNKS, x.count - 1);
    const unsigned char* row_terms = x.terms + (long long)token_row(x, row) * x.padded * TERM_BYTES;
    WeightRows rows = weight_rows(w, output, n);
    ScaleRows<1, 1> scale_at = scale_rows<1, 1>(w, output, n, x, 0);
    uint4 upper[RING][1] = {}, lower[RING][1] = {};
#pragma unroll
    for (int i = 0; i < RING; ++i) load_unit(upper[i][0], lower[i][0], rows, first * UNITS + i, end * UNITS);
    decode_stage(stages, x, row_terms, first, end);

    float segment[1][1][4];
    clear(segment);
    clear(total);
    Scales<1, 1> scales[DECODE_BLOCKS];
#pragma unroll
    for (int b = 0; b < DECODE_BLOCKS; ++b) scales[b] = load_scales(scale_at, min(first + b, end - 1));
    for (int block = first; block < end; block += DECODE_BLOCKS) {
        int turn = (block - first) / DECODE_BLOCKS % 2;
        const unsigned char* stage = stages + turn * DECODE_STAGE_BYTES;
        // After the barrier every warp has left the other stage, so that it can be filled again.
        cp_async_wait<0>();
        __syncthreads();
        if (block + DECODE_BLOCKS < end) decode_stage(stages + (turn ^ 1) * DECODE_STAGE_BYTES, x, row_terms, block + DECODE_BLOCKS, end);
#pragma unroll
        for (int b = 0; b < DECODE_BLOCKS; ++b) {
            if (block + b >= end) break;
            float dot[1][1][4];
            clear(dot);
#pragma unroll
            for (int u = 0; u < UNITS; ++u) {
                int slot = (b * UNITS + u) % RING;
                multiply_unit<1, 1, 1, DECODE_TOKENS, DECODE_CHUNKS>(dot, upper[slot], lower[slot], stage, 0, b * UNITS + u);
                load_unit(upper[slot][0], lower[slot][0], rows, (block + b) * UNITS + u + RING, end * UNITS);
            }
            fold_block(segment, dot, scales[b]);
            fold_segment(total, segment, block + b, end);
            scales[b] = load_scales(scale_at, min(block + b + DECODE_BLOCKS, end - 1));
        }
    }
}

// ---- Many tokens: weights and activations pass through shared memory, each warp 32 outputs by 32 tokens (by wgmma 16 by 128).

// Kernels by wgmma may take all registers of a multiprocessor; others are given fewer without being told.
#if BY_WGMMA
#define TILED_BOUNDS __launch_bounds__(256, 1)
#else
#define TILED_BOUNDS
#endif
constexpr int TILE_OUTPUTS = 128;
constexpr int TILE_TOKENS = BY_WGMMA ? 128 : 64;
constexpr int HALF_OUTPUTS = TILE_OUTPUTS / 2;
constexpr int GROUP_ROWS = TERMS == 1 ? 8 : 4;                                     // of place_in_groups: tokens in three terms are larger
constexpr int STAGE_COLS = E4M3_MMA ? 128 : WEIGHT_TYPE == WEIGHTS_F32 ? 32 : 64;
constexpr int STAGE_UNITS = STAGE_COLS / UNIT;
constexpr int WEIGHT_CHUNKS = STAGE_COLS * WEIGHT_BYTES / 16;                      // of a row of a stage
constexpr int TERM_CHUNKS = STAGE_COLS * TERM_BYTES / 16;
constexpr int WEIGHT_STAGE_BYTES = TILE_OUTPUTS * WEIGHT_CHUNKS * 16;
constexpr int STAGE_BYTES = WEIGHT_STAGE_BYTES + TERMS * TILE_TOKENS * TERM_CHUNKS * 16;
constexpr int TILED_SHARED_BYTES = 96 * 1024;                                      // 8.9 and 12.0 have 99 KiB per block
constexpr int MOST_STAGES = TILED_SHARED_BYTES / STAGE_BYTES;
constexpr int STAGES = BY_WGMMA ? 144 * 1024 / STAGE_BYTES : MOST_STAGES < 4 ? MOST_STAGES : 4;
static_assert(STAGES >= 2, "a stage is filled while another is read");

// 64 consecutive outputs of one weight. A tile has two: an expert's gate and up, or neighbours of one weight.
struct Half {
    Weight w;
    int first;
};

// Threads that copy a stage: by wgmma those of one warpgroup.
constexpr int COPY_THREADS = BY_WGMMA ? THREADS / 2 : THREADS;

// Source of a thread's copies of weights into each stage: one 16-byte column of chunks of their rows.
struct WeightCopy {
    static constexpr int STEP = COPY_THREADS / WEIGHT_CHUNKS;                           // rows from one copy to the next
    static constexpr int COPIES = HALF_OUTPUTS / STEP;                             // of each half

    const unsigned char* rows[2];
    long long step_bytes[2];
    int rows_left[2];
};

__device__ __forceinline__ WeightCopy weight_copy(const Half (&halves)[2], int n) {
    WeightCopy copy;
    int thread = threadIdx.x % COPY_THREADS;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const Weight& w = halves[half].w;
        int row = halves[half].first + thread / WEIGHT_CHUNKS;
        long long row_bytes = (long long)w.ld * WEIGHT_BYTES;
        copy.rows[half] = static_cast<const unsigned char*>(w.data) + row * row_bytes + thread % WEIGHT_CHUNKS * 16;
        copy.step_bytes[half] = WeightCopy::STEP * row_bytes;
        copy.rows_left[half] = n - row;
    }
    return copy;
}

// Starts the copies of the weights of stage `index`.
__device__ __forceinline__ void weight_stage(unsigned char* weights, const WeightCopy& copy, int index) {
    static_assert(WeightCopy::STEP % 4 == 0, "the rows of a thread have their chunk at the same place");
    int thread = threadIdx.x % COPY_THREADS;
    weights += place_weights<WEIGHT_CHUNKS>(thread / WEIGHT_CHUNKS, thread % WEIGHT_CHUNKS) * 16;
#pragma unroll
    for (int i = 0; i < 2 * WeightCopy::COPIES; ++i) {
        int half = i / WeightCopy::COPIES, step = i % WeightCopy::COPIES;
        const unsigned char* source = copy.rows[half] + step * copy.step_bytes[half] + index * (WEIGHT_CHUNKS * 16);
        cp_async_16(weights + i * (WeightCopy::STEP * WEIGHT_CHUNKS * 16), source, step * WeightCopy::STEP < copy.rows_left[half]);
    }
}

#if BY_WGMMA
#include "matmul_sm90.cuh"
#else
#include "matmul_sync.cuh"
#endif

// The products over all columns.
template <class AtEnd>
__device__ __forceinline__ void tiled_products(const Half (&halves)[2], int n, const Tokens& x, unsigned char* shared, AtEnd at_end) {
    tiled_products(halves, n, x, 0, x.padded / BLOCK, shared, [](int, const auto&) { return false; }, at_end);
}
