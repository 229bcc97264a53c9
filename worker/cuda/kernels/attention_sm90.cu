// Causal attention of prompts over the paged cache by wgmma, which only sm_90a has: on other architectures this file is empty. Rows of
// work, tiles and bits are those of attention.cu with one term.
//
// Options: K_DIM, V_DIM, multiples of 64: 192 and 128 at most, for which there are registers.
//
// Grid (tiles, kv_heads * row_blocks), 256 threads, SHARED_BYTES of dynamic shared memory. A block walks all positions of 128 rows.
//
// Each of two warpgroups has 64 rows. The second is half a tile behind the first: while one computes the softmax of its tile, the
// tensor cores multiply for the other. Two barriers a tile keep them so; these and copy groups are all that is waited for.
//
// A stage holds what a warpgroup multiplies between two softmaxes: the keys of tile t and the values of tile t - 1, which are
// zeros for t = 0. With matrices of 64 positions by 64 columns, 128 bytes a row and swizzled, keys are a K-major operand and values one with
// contiguous columns.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#define VALUE_IN_KEY 0
#define ATTENTION_TERMS 1
#define ROWS 128
#define QUERIES_SHARED 0

#include "attention.cuh"
#include "wgmma.cuh"

constexpr int SPLIT_TILES = KEY_SPLIT / KEY_TILE;
constexpr int MATRIX_COLS = 64;
constexpr int MATRIX_BYTES = KEY_TILE * 128;
constexpr int KEYS_BYTES = K_DIM / MATRIX_COLS * MATRIX_BYTES;
constexpr int STAGE_BYTES = KEYS_BYTES + V_DIM / MATRIX_COLS * MATRIX_BYTES;
constexpr int STAGES = K_DIM + V_DIM <= 256 ? 4 : 3;
constexpr int SUMS = V_DIM / 2;                                                     // of a thread: two rows, a quarter of the columns
constexpr int KEPT_PAIRS = V_DIM / 8 + 1;                                           // of a row of a thread: (m, l) and o
constexpr int KEPT_BYTES = ATTENTION_THREADS * 2 * KEPT_PAIRS * 8;
constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + KEPT_BYTES + PATTERN_BYTES;
constexpr int GROUP_THREADS = 128;
constexpr int HALF_TILE = 1;                                                        // the barrier between softmaxes

static_assert(K_DIM % MATRIX_COLS == 0 && V_DIM % MATRIX_COLS == 0, "whole matrices");
static_assert(K_DIM <= 192 && V_DIM <= 128, "queries, scores, values and their sums are in registers");
static_assert(SHARED_BYTES <= 226 * 1024, "a block of compute capability 9.0 has no more");
static_assert(ATTENTION_THREADS == 2 * GROUP_THREADS && COLUMN_WARPS == 1, "a warp has all columns of its rows");
static_assert(ATTENTION_THREADS == 4 * KEY_TILE, "four threads copy a position");

// What this thread copies: of one position of each tile, two chunks of 16 bytes of each 128, one in either half. The two positions
// of eight neighbouring threads begin with different halves, so that their chunks are in different banks.
struct Copy {
    const unsigned char* keys;        // this head's keys in a record at the layer's start, and the first chunk in them
    const unsigned char* values;
    int other;                        // bytes from there to the other chunk
    int place;                        // of the first chunk in a matrix, swizzled; the other's is in the other half
    const unsigned* blocks;
    unsigned block_tokens;
    unsigned inverse;                 // floor((2^32 - 1) / block_tokens)
    unsigned token_bytes;
    int position;                     // in a tile
    int last;                         // position that a row of the block may see
    int end;                          // tiles
    unsigned record;                  // of the tile that was looked up last
    unsigned earlier;                 // of the tile before
};

// Finds the record of this thread's position in a tile: arbitrary if no row sees the position, as it is not read then. The quotient
// by the inverse is at most one too small.
__device__ __forceinline__ void look_up(Copy& from, int tile) {
    from.earlier = from.record;
    unsigned position = tile * KEY_TILE + from.position;
    if ((int)position > from.last) return;
    unsigned block = (unsigned)((unsigned long long)position * from.inverse >> 32);
    unsigned rest = position - block * from.block_tokens;
    if (rest >= from.block_tokens) {
        rest -= from.block_tokens;
        ++block;
    }
    from.record = from.blocks[block] * from.block_tokens + rest;
}

template <int DIM>
__device__ __forceinline__ void copy_chunks(unsigned char* stage, const Copy& from, const unsigned char* first, bool valid) {
#pragma unroll
    for (int m = 0; m < DIM / MATRIX_COLS; ++m) {
        cp_async_16(stage + from.place + m * MATRIX_BYTES, first + m * 128, valid);
        cp_async_16(stage + (from.place ^ 64) + m * MATRIX_BYTES, first + from.other + m * 128, valid);
    }
}

// Starts the copy of stage `index`, whose tile was looked up last; past the last stage, an empty group keeps the group count.
// Positions after the last become zeros, so that the contents of unused records, including NaN, never meet a probability.
__device__ __forceinline__ void copy_stage(unsigned char* stages, const Copy& from, int index) {
    if (index <= from.end) {
        unsigned char* to = stages + index % STAGES * STAGE_BYTES;
        int position = index * KEY_TILE + from.position;
        copy_chunks<K_DIM>(to, from, from.keys + (unsigned long long)from.record * from.token_bytes, position <= from.last);
        copy_chunks<V_DIM>(
            to + KEYS_BYTES, from, from.values + (unsigned long long)from.earlier * from.token_bytes,
            index > 0 && position - KEY_TILE <= from.last);
    }
    cp_async_commit();
}

// Starts the products of the queries with a tile's keys.
__device__ __forceinline__ void start_scores(float (&scores)[KEY_TILE / 8][4], const unsigned (&queries)[QUERY_STEPS][4], unsigned stage) {
    unsigned long long keys = matrix_descriptor(stage);
#pragma unroll
    for (int step = 0; step < QUERY_STEPS; ++step)
        wgmma_m64n64k16(scores, queries[step], descriptor_after(keys, step / 4 * MATRIX_BYTES + step % 4 * 32), step > 0);
    wgmma_commit();
}

// Starts the products of the probabilities with the values of their tile.
__device__ __forceinline__ void start_values(float (&sums)[SUMS], const unsigned (&p)[KEY_TILE / STEP][TERMS][4], unsigned stage) {
    unsigned long long values = transposed_descriptor(stage + KEYS_BYTES, MATRIX_BYTES);
#pragma unroll
    for (int step = 0; step < KEY_TILE / STEP; ++step)
        wgmma_transposed(sums, p[step][0], descriptor_after(values, step * STEP * 128), step > 0);
    wgmma_commit();
}

__device__ __forceinline__ void add_values(State& state, const float (&factors)[2], const float (&sums)[SUMS]) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        float& o = state.o[i / 8][i / 4 % 2][i % 4];
        o = fmaf(o, factors[i / 2 % 2], sums[i]);
    }
}

// The splits before this thread's current one, merged: float2 [2][KEPT_PAIRS][ATTENTION_THREADS] in shared memory, of each row o
// and then (m, l); no thread touches another's.
__device__ __forceinline__ float2& kept_pair(float2* kept, int h, int pair) { return kept[(h * KEPT_PAIRS + pair) * ATTENTION_THREADS]; }

__device__ __forceinline__ float2 state_pair(const State& state, int h, int column) {
    const float* of_columns = state.o[column / 2][column % 2];
    return make_float2(of_columns[2 * h], of_columns[2 * h + 1]);
}

__device__ __forceinline__ float2 merge_pair(float2 before, float2 split, const Merge& merge) {
    return make_float2(merge_value(before.x, split.x, merge), merge_value(before.y, split.y, merge));
}

// Adds a finished split to the kept ones.
__device__ __forceinline__ void keep_split(float2* kept, const State& state, const Work& work, int split) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (work.positions[h] < split * KEY_SPLIT) continue;
        float2 total = make_float2(state.m[h], state.l[h]);
        Merge merge = {0.0f, 1.0f};
        if (split > 0) {
            total = kept_pair(kept, h, V_DIM / 8);
            merge = merge_split(total.x, total.y, state.m[h], state.l[h]);
        }
        kept_pair(kept, h, V_DIM / 8) = total;
#pragma unroll
        for (int c = 0; c < V_DIM / 8; ++c) {
            float2 pair = state_pair(state, h, c);
            kept_pair(kept, h, c) = split > 0 ? merge_pair(kept_pair(kept, h, c), pair, merge) : pair;
        }
    }
}

// Adds the block's last split, of which a row may have no position, and writes the result.
__device__ __forceinline__ void write_rows(float* out, float2* kept, const State& state, const Work& work, int split, const Lane& at) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        if (work.positions[h] < 0) continue;
        bool has_split = work.positions[h] >= split * KEY_SPLIT;
        float2 total = make_float2(state.m[h], state.l[h]);
        Merge merge = {0.0f, 1.0f};
        if (split > 0) {
            total = kept_pair(kept, h, V_DIM / 8);
            if (has_split) merge = merge_split(total.x, total.y, state.m[h], state.l[h]);
        }
        float* to = out + (long long)work.rows[h] * V_DIM + 2 * at.quad;
#pragma unroll
        for (int c = 0; c < V_DIM / 8; ++c) {
            float2 pair = state_pair(state, h, c);
            if (split > 0) pair = has_split ? merge_pair(kept_pair(kept, h, c), pair, merge) : kept_pair(kept, h, c);
            *reinterpret_cast<float2*>(to + c * 8) = make_float2(pair.x / total.y, pair.y / total.y);
        }
    }
}

// Softmax of a tile's scores for both rows. If all rows of the warp see the whole tile, nothing is masked.
__device__ __forceinline__ void softmax_tile(
    unsigned (&p)[KEY_TILE / STEP][TERMS][4], float (&factors)[2], State& state, const float (&scores)[KEY_TILE / 8][4], int first,
    const Work& work, const Lane& at) {
    int last = first + KEY_TILE - 1;
    if (__all_sync(ALL_LANES, last <= work.positions[0] && last <= work.positions[1])) {
#pragma unroll
        for (int h = 0; h < 2; ++h) factors[h] = softmax_row<false>(p, state, h, row_scores(scores, h, at), first, work.positions[h], at);
    } else {
#pragma unroll
        for (int h = 0; h < 2; ++h) factors[h] = softmax_row(p, state, h, row_scores(scores, h, at), first, work.positions[h], at);
    }
}

// The block's rows of work: of one kv head and one tile.
struct Rows128 {
    AttentionTile tile;
    int kv_head;
    int group;
    int first;
    int count;
};

__device__ __forceinline__ Rows128 block_rows(const AttentionTile* tiles, int heads, int kv_heads) {
    Rows128 rows;
    int row_blocks = gridDim.y / kv_heads;
    rows.tile = tiles[blockIdx.x];
    rows.kv_head = blockIdx.y / row_blocks;
    rows.group = heads / kv_heads;
    rows.first = blockIdx.y % row_blocks * ROWS;
    rows.count = rows.tile.tokens * rows.group;
    return rows;
}

__device__ __forceinline__ Work this_work(const Rows128& rows, int heads, const Lane& at) {
    Work work;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int row = rows.first + at.row + at.group + 8 * h;
        work.positions[h] = row < rows.count ? rows.tile.start + row / rows.group : -1;
        work.rows[h] = (rows.tile.first_row + row / rows.group) * heads + rows.kv_head * rows.group + row % rows.group;
    }
    return work;
}

__device__ __forceinline__ Copy this_copy(
    const Rows128& rows, const unsigned char* layer, const unsigned* blocks, int kv_heads, int block_tokens, int token_bytes) {
    Copy from;
    from.position = threadIdx.x / 4;
    int chunk = threadIdx.x % 4 + from.position % 2 * 4;
    from.keys = layer + rows.kv_head * K_DIM * 2 + chunk * 16;
    from.values = layer + (kv_heads * K_DIM + rows.kv_head * V_DIM) * 2 + chunk * 16;
    from.other = (chunk ^ 4) * 16 - chunk * 16;
    from.place = from.position * 128 + (chunk ^ (from.position & 7)) * 16;
    from.blocks = blocks + rows.tile.table;
    from.block_tokens = block_tokens;
    from.inverse = 0xffffffffu / block_tokens;
    from.token_bytes = token_bytes;
    from.last = rows.tile.start + (min(rows.first + ROWS, rows.count) - 1) / rows.group;
    from.end = from.last / KEY_TILE + 1;
    from.record = 0;
    return from;
}

__device__ __forceinline__ void load_queries(unsigned (&queries)[QUERY_STEPS][4], const float* q, float scale, const Work& work, const Lane& at) {
    Queries own;
    own.scale = scale;
#pragma unroll
    for (int h = 0; h < 2; ++h) own.rows[h] = work.positions[h] >= 0 ? q + (long long)work.rows[h] * K_DIM : nullptr;
#pragma unroll
    for (int step = 0; step < QUERY_STEPS; ++step) {
        unsigned a[TERMS][4];
        query_fragments(a, own, step * STEP + 2 * at.quad);
#pragma unroll
        for (int i = 0; i < 4; ++i) queries[step][i] = a[0][i];
    }
}

// Computes attention of the block's rows over all tiles: state becomes that of the last split.
__device__ __forceinline__ void walk_tiles(
    State& state, float2* kept, unsigned char* stages, const unsigned (&queries)[QUERY_STEPS][4], Copy& from, const Work& work, const Lane& at) {
    bool is_behind = threadIdx.x >= GROUP_THREADS;
    unsigned shared = shared_address(stages);
    float scores[KEY_TILE / 8][4], sums[SUMS], factors[2] = {1.0f, 1.0f};
    unsigned p[KEY_TILE / STEP][TERMS][4] = {};
    clear(state);
    cp_async_wait<STAGES - 2>();
    fence_async_proxy();
    __syncthreads();
    if (is_behind) barrier_sync<HALF_TILE, ATTENTION_THREADS>();
#pragma unroll 1
    for (int t = 0; t < from.end; ++t) {
        unsigned stage = shared + t % STAGES * STAGE_BYTES;
        keep_in_order(sums);
        keep_in_order(scores);
        wgmma_fence();
        start_values(sums, p, stage);
        start_scores(scores, queries, stage);
        wgmma_wait_all_but_one();
        keep_in_order(sums);
        add_values(state, factors, sums);
        if (t > 0 && t % SPLIT_TILES == 0) {
            keep_split(kept, state, work, t / SPLIT_TILES - 1);
            clear(state);
        }
        look_up(from, t - 1 + STAGES);
        // After the barrier the next stage is complete, and both warpgroups have left the previous one, which is filled again.
        cp_async_wait<STAGES - 3>();
        fence_async_proxy();
        barrier_sync<HALF_TILE, ATTENTION_THREADS>();
        wgmma_wait();
        keep_in_order(scores);
        copy_stage(stages, from, t - 1 + STAGES);
        softmax_tile(p, factors, state, scores, t * KEY_TILE, work, at);
        if (!is_behind || t + 1 < from.end) barrier_sync<HALF_TILE, ATTENTION_THREADS>();
    }
    keep_in_order(sums);
    wgmma_fence();
    start_values(sums, p, shared + from.end % STAGES * STAGE_BYTES);
    wgmma_wait();
    keep_in_order(sums);
    add_values(state, factors, sums);
}

// As `attention` of attention.cu, without splits.
extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS, 1) attention_sm90(
    float* out, const float* q, const unsigned char* layer, const AttentionTile* tiles, const unsigned* blocks, int heads, int kv_heads,
    int block_tokens, int token_bytes, float scale) {
    HEARTH_DYNAMIC_SHARED(unsigned char, unaligned);
    unsigned char* stages = unaligned + (0u - shared_address(unaligned)) % PATTERN_BYTES;
    float2* kept = reinterpret_cast<float2*>(stages + STAGES * STAGE_BYTES) + threadIdx.x;
    Rows128 rows = block_rows(tiles, heads, kv_heads);
    if (rows.first >= rows.count) return;
    Copy from = this_copy(rows, layer, blocks, kv_heads, block_tokens, token_bytes);
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) {
        look_up(from, i);
        copy_stage(stages, from, i);
    }
    Lane at = this_lane();
    Work work = this_work(rows, heads, at);
    unsigned queries[QUERY_STEPS][4];
    load_queries(queries, q, scale, work, at);
    State state;
    walk_tiles(state, kept, stages, queries, from, work, at);
    // Computed again, since there are no registers to keep it.
    work = this_work(block_rows(tiles, heads, kv_heads), heads, at);
    write_rows(out, kept, state, work, (from.end - 1) / SPLIT_TILES, at);
}

#endif
