// Causal attention over the paged cache for any dimensions and for f32 pages: the path of small models and tests.
//
// One block per head and tile of tokens, one token after another. Positions are processed in tiles of 64 by absolute
// position: scores by one warp per key, an online softmax over the tiles in order, values by one thread per column.
// All sums are f32 in a fixed order.

#include "common.cuh"

constexpr int ANY_THREADS = 256;
constexpr int ANY_WARPS = ANY_THREADS / 32;
constexpr int MOST_DIM = 1024;
constexpr int THREAD_COLUMNS = MOST_DIM / ANY_THREADS;

// Location of the records of one sequence, and of this head's key and value within a record.
struct Records {
    const unsigned char* layer;
    const unsigned* blocks;
    int block_tokens;
    int token_bytes;
    int key;           // element of a record
    int value;
    bool f32;
};

__device__ __forceinline__ const unsigned char* record_at(const Records& r, int position) {
    long long index = (long long)r.blocks[position / r.block_tokens] * r.block_tokens + position % r.block_tokens;
    return r.layer + index * r.token_bytes;
}

__device__ __forceinline__ float element_at(const unsigned char* record, int i, bool f32) {
    if (f32) return reinterpret_cast<const float*>(record)[i];
    return bf16_to_float(reinterpret_cast<const unsigned short*>(record)[i]);
}

__device__ __forceinline__ float warp_sum(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

// Products of the query with `count` keys from position `first`, each by one warp, into `scores`; the tile's other scores are -inf.
__device__ __forceinline__ void score_tile(float* scores, const float* query, const Records& r, int first, int count, int k_dim) {
    int lane = threadIdx.x % 32;
    for (int j = threadIdx.x / 32; j < KEY_TILE; j += ANY_WARPS) {
        float score = bits_float(0xff800000u);
        if (j < count) {
            const unsigned char* record = record_at(r, first + j);
            float dot = 0.0f;
            for (int i = lane; i < k_dim; i += 32) dot = fmaf(query[i], element_at(record, r.key + i, r.f32), dot);
            score = warp_sum(dot);
        }
        if (lane == 0) scores[j] = score;
    }
}

// One softmax step of a warp over the tile's scores, which become probabilities relative to the new maximum m. l is
// the sum of the probabilities so far; the result is the factor for all earlier ones.
__device__ __forceinline__ float softmax_tile(float* scores, float& m, float& l) {
    int lane = threadIdx.x % 32;
    float a = scores[lane];
    float b = scores[lane + 32];
    float largest = fmaxf(m, warp_max(fmaxf(a, b)));
    float factor = expf(m - largest);
    float p = expf(a - largest);
    float q = expf(b - largest);
    scores[lane] = p;
    scores[lane + 32] = q;
    l = fmaf(l, factor, warp_sum(__fadd_rn(p, q)));
    m = largest;
    return factor;
}

// Attention of one query (in shared memory, times scale) over positions 0..=position.
__device__ __forceinline__ void attend(float* out, const float* query, const Records& r, int position, int k_dim, int v_dim) {
    __shared__ float scores[KEY_TILE];
    __shared__ float factor_and_sum[2];
    float m = bits_float(0xff800000u);
    float l = 0.0f;
    float o[THREAD_COLUMNS] = {};
    for (int first = 0; first <= position; first += KEY_TILE) {
        int count = min(KEY_TILE, position + 1 - first);
        score_tile(scores, query, r, first, count, k_dim);
        __syncthreads();
        if (threadIdx.x < 32) {
            float factor = softmax_tile(scores, m, l);
            if (threadIdx.x == 0) {
                factor_and_sum[0] = factor;
                factor_and_sum[1] = l;
            }
        }
        __syncthreads();
        float tile[THREAD_COLUMNS] = {};
        for (int j = 0; j < count; ++j) {
            const unsigned char* record = record_at(r, first + j);
#pragma unroll
            for (int u = 0; u < THREAD_COLUMNS; ++u) {
                int c = threadIdx.x + u * ANY_THREADS;
                if (c < v_dim) tile[u] = fmaf(scores[j], element_at(record, r.value + c, r.f32), tile[u]);
            }
        }
#pragma unroll
        for (int u = 0; u < THREAD_COLUMNS; ++u) o[u] = fmaf(o[u], factor_and_sum[0], tile[u]);
        l = factor_and_sum[1];
        __syncthreads();
    }
#pragma unroll
    for (int u = 0; u < THREAD_COLUMNS; ++u) {
        int c = threadIdx.x + u * ANY_THREADS;
        if (c < v_dim) out[c] = o[u] / l;
    }
}

// Grid (tiles, heads), 256 threads; k_dim and v_dim <= 1024. q [rows][heads][k_dim], out [rows][heads][v_dim]; head h reads kv head
// h / (heads / kv_heads). A record holds the keys of all kv heads, then their values unless the value is in the key.
extern "C" __global__ void __launch_bounds__(ANY_THREADS) attention_any(
    float* out, const float* q, const unsigned char* layer, const AttentionTile* tiles, const unsigned* blocks, int heads, int kv_heads,
    int k_dim, int v_dim, int value_in_key, int kv_f32, int block_tokens, int token_bytes, float scale) {
    __shared__ float query[MOST_DIM];
    AttentionTile tile = tiles[blockIdx.x];
    int head = blockIdx.y;
    int kv_head = head / (heads / kv_heads);
    Records records;
    records.layer = layer;
    records.blocks = blocks + tile.table;
    records.block_tokens = block_tokens;
    records.token_bytes = token_bytes;
    records.key = kv_head * k_dim;
    records.value = value_in_key ? records.key : kv_heads * k_dim + kv_head * v_dim;
    records.f32 = kv_f32 != 0;
    for (int t = 0; t < tile.tokens; ++t) {
        long long row = (long long)(tile.first_row + t) * heads + head;
        for (int i = threadIdx.x; i < k_dim; i += ANY_THREADS) query[i] = __fmul_rn(q[row * k_dim + i], scale);
        __syncthreads();
        attend(out + row * v_dim, query, records, tile.start + t, k_dim, v_dim);
        __syncthreads();
    }
}
