// The arithmetic of attention over bf16 pages, used by attention.cu and, but for its products, by attention_sm90.cu: scores, online
// softmax and values of one tile of 64 positions by one warp, for 16 rows of work. A row's numbers depend only on its query,
// its position and the cache.
//
// The softmax state of a row is (m, l, o): the largest score so far, the sum of exp(score - m), and the sum of exp(score - m) times the
// value. So m + ln(l) is the log-sum-exp of the scores, and states of different positions merge by it (`merge_split`).
//
// Fragments are those of mma_bf16: a lane holds rows `group` and `group + 8` of its warp's 16, columns 2 * quad and 2 * quad + 1 of 8.
#pragma once

#include "common.cuh"

constexpr int WARP_ROWS = 16;
constexpr int ROW_WARPS = ROWS / WARP_ROWS;
constexpr int COLUMN_WARPS = ROW_WARPS == 1 ? 4 : 8 / ROW_WARPS;      // warps that share 16 rows: each scores some keys, sums some columns
constexpr int ATTENTION_THREADS = 32 * ROW_WARPS * COLUMN_WARPS;
constexpr int TERMS = ATTENTION_TERMS;                                 // bf16 terms of an f32: 3 are exact, 1 is rounded
constexpr int STEP = 16;                                               // k of one mma

// A warp that has all columns of its rows, rounded: queries, scores and probabilities stay in its registers.
constexpr bool IN_REGISTERS = COLUMN_WARPS == 1 && TERMS == 1;
constexpr int QUERY_STEPS = IN_REGISTERS ? K_DIM / STEP : 1;

constexpr int WARP_KEYS = KEY_TILE / COLUMN_WARPS;
constexpr int VALUE_UNITS = V_DIM / 16;                                // units of 16 columns
constexpr int WARP_UNITS = (VALUE_UNITS + COLUMN_WARPS - 1) / COLUMN_WARPS;

// Pitches in shared memory. 16 bytes more than whole 32-byte steps put the eight rows of an ldmatrix into different
// banks; f32 rows that lie 8 banks apart do the same for the four rows that half a warp reads by pairs.
constexpr int KEY_PITCH = K_DIM + 8;
constexpr int VALUE_PITCH = VALUE_IN_KEY ? KEY_PITCH : V_DIM + 8;
constexpr int SCORE_PITCH = KEY_TILE + 8;
constexpr int QUERY_PITCH = K_DIM + (K_DIM % 32 == 0 ? 8 : 24);

static_assert(K_DIM % 16 == 0 && V_DIM % 16 == 0, "dims are whole mma steps");
static_assert(!VALUE_IN_KEY || V_DIM <= K_DIM, "the value is the key's prefix");
static_assert(ROWS == 16 || ROWS == 32 || ROWS == 64 || ROWS == 128, "ROWS rows of work");

// A thread's position: lane of a warp, and the warp's rows and columns.
struct Lane {
    int lane;
    int group;
    int quad;
    int row;           // the warp's first row
    int column_warp;
};

// This thread's two rows of work: position -1 if there is no such row, else also the row of `out`, batch row * heads + head.
struct Work {
    int positions[2];
    int rows[2];
};

__device__ __forceinline__ Lane this_lane() {
    int lane = threadIdx.x % 32;
    int warp = threadIdx.x / 32;
    return {lane, lane / 4, lane % 4, warp / COLUMN_WARPS * WARP_ROWS, warp % COLUMN_WARPS};
}

// Queries in shared memory, if rounded, are bf16 and lie as ldmatrix wants them.
constexpr bool PACKED_QUERIES = QUERIES_SHARED && TERMS == 1;
constexpr int PACKED_PITCH = K_DIM + 8;

// The queries of this thread's rows `group` and `group + 8`: rows in shared memory, already multiplied by scale, or in
// global memory, where a row of work that does not exist is null. Or the row of packed ones whose address this lane gives.
struct Queries {
    const float* rows[2];
    const unsigned short* packed;
    float scale;
};

// The softmax state of this thread's two rows, and its part of their o: WARP_UNITS units of two fragments of 8 columns.
struct State {
    float m[2];
    float l[2];
    float o[WARP_UNITS][2][4];
};

constexpr float LOG2_E = 1.44269504f;

__device__ __forceinline__ float minus_infinity() { return bits_float(0xff800000u); }

__device__ __forceinline__ void clear(State& state) {
    for (int h = 0; h < 2; ++h) {
        state.m[h] = minus_infinity();
        state.l[h] = 0.0f;
    }
#pragma unroll
    for (int u = 0; u < WARP_UNITS; ++u) {
#pragma unroll
        for (int i = 0; i < 8; ++i) state.o[u][i / 4][i % 4] = 0.0f;
    }
}

// Splits x and y into pairs of bf16 terms: one, rounded; or three by truncation, whose sum is exact, term 0 being the
// most significant. A number that is not finite leaves a NaN in a later term, and its row's result is then NaN.
__device__ __forceinline__ void split_pair(float x, float y, unsigned (&terms)[TERMS]) {
    if constexpr (TERMS == 1) {
        terms[0] = round_pair(x, y);
        return;
    }
#pragma unroll
    for (int term = 0; term < TERMS; ++term) {
        unsigned high_x = float_bits(x) & 0xffff0000u;
        unsigned high_y = float_bits(y) & 0xffff0000u;
        terms[term] = high_x >> 16 | high_y;
        x = __fadd_rn(x, -bits_float(high_x));
        y = __fadd_rn(y, -bits_float(high_y));
    }
}

// Elements c and c + 1 of the query of row h, times scale.
__device__ __forceinline__ float2 query_pair(const Queries& queries, int h, int c) {
#if QUERIES_SHARED
    return *reinterpret_cast<const float2*>(queries.rows[h] + c);
#else
    if (queries.rows[h] == nullptr) return make_float2(0.0f, 0.0f);
    float2 q = *reinterpret_cast<const float2*>(queries.rows[h] + c);
    return make_float2(__fmul_rn(q.x, queries.scale), __fmul_rn(q.y, queries.scale));
#endif
}

// The A fragments of one k step of the queries, one register per term.
__device__ __forceinline__ void query_fragments(unsigned (&a)[TERMS][4], const Queries& queries, int c) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 q = query_pair(queries, i % 2, c + i / 2 * 8);
        unsigned terms[TERMS];
        split_pair(q.x, q.y, terms);
#pragma unroll
        for (int term = 0; term < TERMS; ++term) a[term][i] = terms[term];
    }
}

// Scores of the warp's rows with its share of the tile's keys, into `scores` [ROWS][SCORE_PITCH]. Each term of the
// queries has a separate chain over ascending k, so that several products are in flight; the chains are added from the least significant.
__device__ __forceinline__ void score_keys(float* scores, const Queries& queries, const unsigned short* keys, const Lane& at) {
    float sums[TERMS][WARP_KEYS / 8][4] = {};
    int first_key = at.column_warp * WARP_KEYS;
    const unsigned short* matrix = keys + (first_key + at.lane % 8 + at.lane / 16 * 8) * KEY_PITCH + at.lane / 8 % 2 * 8;
#pragma unroll 4
    for (int c = 0; c < K_DIM; c += STEP) {
        unsigned a[TERMS][4];
        if constexpr (PACKED_QUERIES) {
            ldmatrix_x4(a[0], queries.packed + c);
        } else {
            query_fragments(a, queries, c + 2 * at.quad);
        }
#pragma unroll
        for (int n = 0; n < WARP_KEYS / 8; n += 2) {
            unsigned k[4];
            ldmatrix_x4(k, matrix + n * 8 * KEY_PITCH + c);
            const unsigned first[2] = {k[0], k[1]};
            const unsigned second[2] = {k[2], k[3]};
#pragma unroll
            for (int term = 0; term < TERMS; ++term) {
                mma_bf16(sums[term][n], a[term], first);
                mma_bf16(sums[term][n + 1], a[term], second);
            }
        }
    }
#pragma unroll
    for (int n = 0; n < WARP_KEYS / 8; ++n) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float2 pair;
            pair.x = sums[TERMS - 1][n][2 * h];
            pair.y = sums[TERMS - 1][n][2 * h + 1];
#pragma unroll
            for (int term = TERMS - 2; term >= 0; --term) {
                pair.x = __fadd_rn(pair.x, sums[term][n][2 * h]);
                pair.y = __fadd_rn(pair.y, sums[term][n][2 * h + 1]);
            }
            int key = first_key + n * 8 + 2 * at.quad;
            *reinterpret_cast<float2*>(scores + (at.row + at.group + 8 * h) * SCORE_PITCH + key) = pair;
        }
    }
}

// Scores of the warp's rows with all keys of the tile, by queries that are fragments already.
__device__ __forceinline__ void score_keys(
    float (&scores)[KEY_TILE / 8][4], const unsigned (&queries)[QUERY_STEPS][4], const unsigned short* keys, const Lane& at) {
#pragma unroll
    for (int i = 0; i < KEY_TILE / 2; ++i) scores[i / 4][i % 4] = 0.0f;
    const unsigned short* matrix = keys + (at.lane % 8 + at.lane / 16 * 8) * KEY_PITCH + at.lane / 8 % 2 * 8;
#pragma unroll
    for (int step = 0; step < QUERY_STEPS; ++step) {
#pragma unroll
        for (int n = 0; n < KEY_TILE / 8; n += 2) {
            unsigned k[4];
            ldmatrix_x4(k, matrix + n * 8 * KEY_PITCH + step * STEP);
            const unsigned first[2] = {k[0], k[1]};
            const unsigned second[2] = {k[2], k[3]};
            mma_bf16(scores[n], queries[step], first);
            mma_bf16(scores[n + 1], queries[step], second);
        }
    }
}

// Row h's scores of this thread: two of each eight.
struct RowScores {
    float of[KEY_TILE / 8][2];
};

__device__ __forceinline__ RowScores row_scores(const float* scores, int h, const Lane& at) {
    const float* row = scores + (at.row + at.group + 8 * h) * SCORE_PITCH;
    RowScores s;
#pragma unroll
    for (int n = 0; n < KEY_TILE / 8; ++n) {
        float2 pair = *reinterpret_cast<const float2*>(row + n * 8 + 2 * at.quad);
        s.of[n][0] = pair.x;
        s.of[n][1] = pair.y;
    }
    return s;
}

__device__ __forceinline__ RowScores row_scores(const float (&scores)[KEY_TILE / 8][4], int h, const Lane&) {
    RowScores s;
#pragma unroll
    for (int i = 0; i < KEY_TILE / 4; ++i) s.of[i / 2][i % 2] = scores[i / 2][2 * h + i % 2];
    return s;
}

// exp(x - origin): where it is rounded to bf16, by the device's own instruction. With latents registers are short as it is, and more
// would be spilled.
__device__ __forceinline__ float probability(float x, float origin) {
    if constexpr (TERMS == 1 && !VALUE_IN_KEY) return exp2_approximate(__fmul_rn(x - origin, LOG2_E));
    return expf(x - origin);
}

// One softmax step of row h over the tile from position `first`: its scores become probabilities relative to the new
// m, as A fragments; a position after the row's own has probability 0. A tile wholly after it
// leaves m and l unchanged and gives the factor 1. MASKED may be false if no position of the tile is after the row's.
template <bool MASKED = true>
__device__ __forceinline__ float softmax_row(
    unsigned (&p)[KEY_TILE / STEP][TERMS][4], State& state, int h, const RowScores& scores, int first, int position, const Lane& at) {
    float s[KEY_TILE / 8][2];
    float largest = state.m[h];
#pragma unroll
    for (int n = 0; n < KEY_TILE / 8; ++n) {
        int key = n * 8 + 2 * at.quad;
        s[n][0] = !MASKED || first + key <= position ? scores.of[n][0] : minus_infinity();
        s[n][1] = !MASKED || first + key + 1 <= position ? scores.of[n][1] : minus_infinity();
        largest = fmaxf(largest, fmaxf(s[n][0], s[n][1]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
    // Before the row's first score everything is -inf, and only differences from a finite number are defined.
    float origin = largest == minus_infinity() ? 0.0f : largest;
    float factor = expf(state.m[h] - origin);
    // Added by intrinsic: a compiler that fused the last product inside expf into the sum would do so in one variant and not in another.
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < KEY_TILE / 8; ++n) {
        float x = probability(s[n][0], origin);
        float y = probability(s[n][1], origin);
        sum = __fadd_rn(__fadd_rn(sum, x), y);
        unsigned terms[TERMS];
        split_pair(x, y, terms);
#pragma unroll
        for (int term = 0; term < TERMS; ++term) p[n / 2][term][n % 2 * 2 + h] = terms[term];
    }
    sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 1));
    sum = __fadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, 2));
    state.l[h] = fmaf(state.l[h], factor, sum);
    state.m[h] = largest;
    return factor;
}

// Softmax of the tile and its values: o = o * factor + Σ p v, the sum starting from zero over ascending keys, each
// step's terms from the least significant. All warps of the same rows compute the same softmax, which is cheaper than exchanging it.
// Scores: in shared memory, or this thread's own.
template <class Scores>
__device__ __forceinline__ void attend_tile(
    State& state, const Scores& scores, const unsigned short* values, int first, const int (&positions)[2], const Lane& at) {
    unsigned p[KEY_TILE / STEP][TERMS][4];
    float factors[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) factors[h] = softmax_row(p, state, h, row_scores(scores, h, at), first, positions[h], at);
    const unsigned short* matrix = values + at.lane % 16 * VALUE_PITCH + at.lane / 16 * 8;
#pragma unroll
    for (int u = 0; u < WARP_UNITS; ++u) {
        int unit = at.column_warp * WARP_UNITS + u;
        if (unit >= VALUE_UNITS) break;
        float sums[2][4] = {};
#pragma unroll
        for (int k = 0; k < KEY_TILE / STEP; ++k) {
            unsigned v[4];
            ldmatrix_x4_trans(v, matrix + k * STEP * VALUE_PITCH + unit * 16);
            const unsigned left[2] = {v[0], v[1]};
            const unsigned right[2] = {v[2], v[3]};
#pragma unroll
            for (int term = TERMS - 1; term >= 0; --term) {
                mma_bf16(sums[0], p[k][term], left);
                mma_bf16(sums[1], p[k][term], right);
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            float& o = state.o[u][i / 4][i % 4];
            o = fmaf(o, factors[i % 4 / 2], sums[i / 4][i % 4]);
        }
    }
}

// Factors for the previously merged splits and for the split being merged.
struct Merge {
    float before;
    float split;
};

// Merges a split's (m, l) into those of all earlier ones, which are in m and l.
__device__ __forceinline__ Merge merge_split(float& m, float& l, float split_m, float split_l) {
    float largest = fmaxf(m, split_m);
    Merge merge = {expf(m - largest), expf(split_m - largest)};
    l = fmaf(l, merge.before, __fmul_rn(split_l, merge.split));
    m = largest;
    return merge;
}

__device__ __forceinline__ float merge_value(float before, float split, const Merge& merge) {
    return fmaf(before, merge.before, __fmul_rn(split, merge.split));
}
