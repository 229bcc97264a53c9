// Causal attention over the paged cache with bf16 pages, for decode and prefill; attention.cuh has the arithmetic.
//
// Options: K_DIM, V_DIM (multiples of 16), VALUE_IN_KEY, ATTENTION_TERMS (3: queries and probabilities unrounded;
// 1: rounded to bf16), and three that change the speed but never a bit:
//   ROWS            rows of work of a block: 16, 32, 64 or 128; 16 for decode, 64 or (one term, 192 / 128 elements at most) 128
//                   for prefill
//   BUFFERS         tiles of keys and values in shared memory: 2 loads one while the other is used
//   QUERIES_SHARED  1: the queries stay in shared memory, as f32, or as bf16 with one term; 0: they are read from global memory for
//                   each tile
//
// A row of work is a token of a tile with a query head of one kv head's group: row i is token i / group, head
// kv * group + i % group. A tile may hold any number of tokens. Grid (tiles, kv_heads * row_blocks, splits) with
// row_blocks = ceil(largest tokens * group / ROWS); 128 threads for ROWS = 16, else 256. Shared memory is 1 KiB static and,
// dynamic, these bytes:
//   128 * BUFFERS * (K_DIM + 8 + (VALUE_IN_KEY ? 0 : V_DIM + 8)) + 4 * ROWS * (72 + (QUERIES_SHARED ? K_DIM + (K_DIM % 32 ? 24 : 8) : 0))
// of which the second part is left out where scores stay in registers (IN_REGISTERS of attention.cuh); with one term a query takes
// 2 * (K_DIM + 8).
//
// With splits == 1 a block walks all positions and writes `out` [rows][heads][V_DIM]; `partials` is unused. With more,
// block z computes only the positions 512 z .. 512 z + 511 into partials [rows][heads][splits][m, l, o of V_DIM], and
// attention_merge combines them into `out`; `splits` then covers the longest row. The bits are the same either way.

#include "attention.cuh"

constexpr int SPLIT_TILES = KEY_SPLIT / KEY_TILE;
constexpr int STAGE = KEY_TILE * (KEY_PITCH + (VALUE_IN_KEY ? 0 : VALUE_PITCH));     // elements of one tile's keys and values
constexpr int MERGE_THREADS = 128;

static_assert(BUFFERS == 1 || BUFFERS == 2, "one tile or two in shared memory");
static_assert(!IN_REGISTERS || (BUFFERS == 2 && QUERIES_SHARED == 0), "queries in registers are read once, from global memory");

// The cache of one sequence as one kv head sees it, up to the last position that a row of the block may see.
struct Cache {
    const unsigned char* keys;     // this head's key in a record at the layer's start
    const unsigned char* values;
    const unsigned* blocks;
    int block_tokens;
    int token_bytes;
    int last;
};

// Byte offset in the layer of the record of `position`; arbitrary if no row sees the position, as it is not read then.
__device__ __forceinline__ long long record_offset(const Cache& cache, int position) {
    if (position > cache.last) return 0;
    long long record = (long long)cache.blocks[position / cache.block_tokens] * cache.block_tokens + position % cache.block_tokens;
    return record * cache.token_bytes;
}

// Starts the copy of one tile's keys or values. Positions after the last become zeros, so that the contents of
// unused records, including NaN, never meet a probability.
template <int DIM, int PITCH>
__device__ __forceinline__ void load_rows(unsigned short* to, const unsigned char* from, const long long* offsets, int first, int last) {
    constexpr int PARTS = DIM / 8;
    if constexpr (PARTS >= 32 && PACKED_QUERIES) {
        // A warp copies a record at a time, where there are registers for it.
#pragma unroll 1
        for (int key = threadIdx.x / 32; key < KEY_TILE; key += ATTENTION_THREADS / 32) {
            const unsigned char* record = from + offsets[key];
            bool valid = first + key <= last;
#pragma unroll
            for (int part = threadIdx.x % 32; part < PARTS; part += 32) cp_async_16(to + key * PITCH + part * 8, record + part * 16, valid);
        }
    } else {
#pragma unroll 2
        for (int i = threadIdx.x; i < KEY_TILE * PARTS; i += ATTENTION_THREADS) {
            int key = i / PARTS;
            int part = i % PARTS;
            cp_async_16(to + key * PITCH + part * 8, from + offsets[key] + part * 16, first + key <= last);
        }
    }
}

__device__ __forceinline__ void load_tile(unsigned short* stage, const Cache& cache, const long long* offsets, int first) {
    load_rows<K_DIM, KEY_PITCH>(stage, cache.keys, offsets, first, cache.last);
    if (!VALUE_IN_KEY) load_rows<V_DIM, VALUE_PITCH>(stage + KEY_TILE * KEY_PITCH, cache.values, offsets, first, cache.last);
    cp_async_commit();
}

// Loads the queries of the block's rows into shared memory, times scale, packed or not; rows without work are zero.
__device__ __forceinline__ void stage_queries(
    float* to, const float* q, const AttentionTile& tile, int first_row, int count, int group, int first_head, int heads, float scale) {
    for (int i = threadIdx.x; i < ROWS * K_DIM / 4; i += ATTENTION_THREADS) {
        int row = i / (K_DIM / 4);
        int c = i % (K_DIM / 4) * 4;
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (first_row + row < count) {
            long long token = tile.first_row + (first_row + row) / group;
            v = *reinterpret_cast<const float4*>(q + (token * heads + first_head + (first_row + row) % group) * K_DIM + c);
        }
        v = make_float4(__fmul_rn(v.x, scale), __fmul_rn(v.y, scale), __fmul_rn(v.z, scale), __fmul_rn(v.w, scale));
        if constexpr (PACKED_QUERIES) {
            unsigned short* packed = reinterpret_cast<unsigned short*>(to) + row * PACKED_PITCH + c;
            *reinterpret_cast<uint2*>(packed) = make_uint2(round_pair(v.x, v.y), round_pair(v.z, v.w));
        } else {
            *reinterpret_cast<float4*>(to + row * QUERY_PITCH + c) = v;
        }
    }
}

// Destination of finished splits of the block's rows.
struct Sink {
    float* out;
    float* partials;
    int splits;
};

// Writes row h of a finished split. If the block has only this split, it is written to the partial results as it is.
// Otherwise it is merged into `out`, which holds the previous splits unscaled, read and written by the same thread,
// with their (m, l) in registers; the row's last split writes the final result.
__device__ __forceinline__ void finish_split(
    const Sink& sink, float& m, float& l, const State& state, int h, int split, int row, int position, const Lane& at) {
    bool alone = sink.splits > 1;
    bool first = alone || split == 0;
    bool last = !alone && split == position / KEY_SPLIT;
    float* to = sink.out + (long long)row * V_DIM;
    Merge merge = {0.0f, 1.0f};
    if (first) {
        m = state.m[h];
        l = state.l[h];
    } else {
        merge = merge_split(m, l, state.m[h], state.l[h]);
    }
    if (alone) {
        float* partial = sink.partials + ((long long)row * sink.splits + split) * (2 + V_DIM);
        if (at.column_warp == 0 && at.quad == 0) *reinterpret_cast<float2*>(partial) = make_float2(m, l);
        to = partial + 2;
    }
    int first_unit = at.column_warp * WARP_UNITS;
    to += first_unit * 16 + 2 * at.quad;
#pragma unroll
    for (int u = 0; u < WARP_UNITS; ++u) {
        if (first_unit + u >= VALUE_UNITS) break;
#pragma unroll
        for (int f = 0; f < 2; ++f) {
            float2* pair = reinterpret_cast<float2*>(to + u * 16 + f * 8);
            float2 value = make_float2(state.o[u][f][2 * h], state.o[u][f][2 * h + 1]);
            if (!first) value = make_float2(merge_value(pair->x, value.x, merge), merge_value(pair->y, value.y, merge));
            if (last) value = make_float2(value.x / l, value.y / l);
            *pair = value;
        }
    }
}

// Computes attention of the block's rows over tiles first_tile..end_tile, with the shared memory that it was given.
// Record offsets are looked up one tile before the copy needs them and held in a register meanwhile, so that nothing
// waits for the table of blocks.
__device__ __forceinline__ void walk_tiles(
    const Sink& sink, unsigned short* stages, float* scores, const Queries& queries, const Cache& cache, const Work& work,
    int first_tile, int end_tile, const Lane& at) {
    __shared__ long long offsets[2][KEY_TILE];
    State state;
    clear(state);
    float m[2];
    float l[2];
    unsigned held[QUERY_STEPS][4];
    if constexpr (IN_REGISTERS) {
#pragma unroll
        for (int step = 0; step < QUERY_STEPS; ++step) {
            unsigned a[TERMS][4];
            query_fragments(a, queries, step * STEP + 2 * at.quad);
#pragma unroll
            for (int i = 0; i < 4; ++i) held[step][i] = a[0][i];
        }
    }
    bool looks_up = threadIdx.x < KEY_TILE;
    if (looks_up) offsets[first_tile % 2][threadIdx.x] = record_offset(cache, first_tile * KEY_TILE + threadIdx.x);
    if (BUFFERS == 2) {
        __syncthreads();
        load_tile(stages + first_tile % 2 * STAGE, cache, offsets[first_tile % 2], first_tile * KEY_TILE);
        if (looks_up) offsets[(first_tile + 1) % 2][threadIdx.x] = record_offset(cache, (first_tile + 1) * KEY_TILE + threadIdx.x);
    }
    for (int t = first_tile; t < end_tile; ++t) {
        if (BUFFERS == 1) {
            __syncthreads();
            load_tile(stages, cache, offsets[t % 2], t * KEY_TILE);
        }
        cp_async_wait<0>();
        __syncthreads();
        if (BUFFERS == 2 && t + 1 < end_tile) {
            load_tile(stages + (t + 1) % 2 * STAGE, cache, offsets[(t + 1) % 2], (t + 1) * KEY_TILE);
        }
        long long ahead = looks_up ? record_offset(cache, (t + BUFFERS) * KEY_TILE + threadIdx.x) : 0;
        const unsigned short* keys = stages + t % BUFFERS * STAGE;
        const unsigned short* values = VALUE_IN_KEY ? keys : keys + KEY_TILE * KEY_PITCH;
        if constexpr (IN_REGISTERS) {
            float own[KEY_TILE / 8][4];
            score_keys(own, held, keys, at);
            attend_tile(state, own, values, t * KEY_TILE, work.positions, at);
        } else {
            score_keys(scores, queries, keys, at);
            __syncthreads();
            attend_tile(state, scores, values, t * KEY_TILE, work.positions, at);
        }
        if (looks_up) offsets[(t + BUFFERS) % 2][threadIdx.x] = ahead;

        if (t + 1 < end_tile && (t + 1) % SPLIT_TILES != 0) continue;
        int split = t / SPLIT_TILES;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (work.positions[h] < split * KEY_SPLIT) continue;
            finish_split(sink, m[h], l[h], state, h, split, work.rows[h], work.positions[h], at);
        }
        clear(state);
    }
}

// heads is a multiple of kv_heads; blocks are tables of block numbers, of which a tile's starts at tile.table; a block
// holds block_tokens records of token_bytes: the keys of all kv heads, then their values
// unless the value is in the key. q [rows][heads][K_DIM].
extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS, 1) attention(
    float* out, float* partials, const float* q, const unsigned char* layer, const AttentionTile* tiles, const unsigned* blocks,
    int heads, int kv_heads, int block_tokens, int token_bytes, float scale, int splits) {
    HEARTH_DYNAMIC_SHARED(unsigned short, stages);
    float* scores = reinterpret_cast<float*>(stages + BUFFERS * STAGE);
    AttentionTile tile = tiles[blockIdx.x];
    int row_blocks = gridDim.y / kv_heads;
    int kv_head = blockIdx.y / row_blocks;
    int group = heads / kv_heads;
    int first_head = kv_head * group;
    int first_row = blockIdx.y % row_blocks * ROWS;
    int count = tile.tokens * group;
    if (first_row >= count) return;

    int last = tile.start + (min(first_row + ROWS, count) - 1) / group;
    int first_tile = splits == 1 ? 0 : blockIdx.z * SPLIT_TILES;
    int end_tile = last / KEY_TILE + 1;
    if (splits > 1) end_tile = min(end_tile, first_tile + SPLIT_TILES);
    if (first_tile >= end_tile) return;

    const unsigned char* keys = layer + kv_head * K_DIM * 2;
    const unsigned char* values = layer + (kv_heads * K_DIM + kv_head * V_DIM) * 2;
    Cache cache = {keys, values, blocks + tile.table, block_tokens, token_bytes, last};
    Lane at = this_lane();
    Queries queries;
    queries.scale = scale;
    queries.packed = reinterpret_cast<const unsigned short*>(scores + ROWS * SCORE_PITCH) + (at.row + at.lane % 16) * PACKED_PITCH + at.lane / 16 * 8;
    Work work;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        int row = first_row + at.row + at.group + 8 * h;
        bool exists = row < count;
        work.positions[h] = exists ? tile.start + row / group : -1;
        work.rows[h] = (tile.first_row + row / group) * heads + first_head + row % group;
#if QUERIES_SHARED
        queries.rows[h] = scores + ROWS * SCORE_PITCH + (at.row + at.group + 8 * h) * QUERY_PITCH;
#else
        queries.rows[h] = exists ? q + (long long)work.rows[h] * K_DIM : nullptr;
#endif
    }
#if QUERIES_SHARED
    stage_queries(scores + ROWS * SCORE_PITCH, q, tile, first_row, count, group, first_head, heads, scale);
#endif
    walk_tiles({out, partials, splits}, stages, scores, queries, cache, work, first_tile, end_tile, at);
}

// Grid (rows, heads), 128 threads: computes out [rows][heads][V_DIM] from the splits that each
// row reaches; positions are the rows' absolute ones.
extern "C" __global__ void __launch_bounds__(MERGE_THREADS) attention_merge(
    float* out, const float* partials, const int* positions, int rows, int heads, int splits) {
    int row = blockIdx.x;
    if (row >= rows) return;
    long long index = (long long)row * heads + blockIdx.y;
    const float* first = partials + index * splits * (2 + V_DIM);
    int count = positions[row] / KEY_SPLIT + 1;
    for (int c = threadIdx.x; c < V_DIM; c += MERGE_THREADS) {
        float m = first[0];
        float l = first[1];
        float value = first[2 + c];
        for (int split = 1; split < count; ++split) {
            const float* partial = first + split * (2 + V_DIM);
            Merge merge = merge_split(m, l, partial[0], partial[1]);
            value = merge_value(value, partial[2 + c], merge);
        }
        out[index * V_DIM + c] = value / l;
    }
}
