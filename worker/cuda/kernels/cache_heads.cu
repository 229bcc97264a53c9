// Between the projections of grouped-query attention and attention itself: heads of queries and keys are normalised and rotated,
// keys and values are stored in the paged cache. The bits are those of rms_norm.cu, rope.cu and kv.cu one after the other.

#include "kv.cuh"
#include "norm.cuh"
#include "rotate.cuh"

constexpr int HEADS = NORM_WARPS;      // of a block, a warp each: they share the angles
constexpr int MOST_DIM = WARP_COLS;
constexpr int QUADS = MOST_DIM / 128;  // of a lane

// Grid (rows, ceil((heads + 2 * kv_heads) / 8)), 256 threads; head_dim <= 256. q [rows][heads][head_dim], k and v
// [rows][kv_heads][head_dim] as projected; norms [head_dim] or null. Queries go to `out`, which may be q's own values; keys
// and values to the record at byte offsets[row] of the layer, or nowhere if that is negative. The first 2 * pairs elements are rotated.
extern "C" __global__ void cache_heads(
    float* out, unsigned char* layer, Rows q, Rows k, Rows v, const float* q_norm, const float* k_norm, float eps,
    const unsigned* positions, const float* inv_freq, float magnitude, int interleaved, const long long* offsets, int heads, int kv_heads,
    int head_dim, int pairs) {
    __shared__ Turn turns[MOST_DIM / 2];
    __shared__ __align__(16) float values[HEADS][MOST_DIM];
    int row = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (int i = threadIdx.x; i < pairs; i += NORM_THREADS) turns[i] = turn_of(positions[row], inv_freq[i], magnitude);
    __syncthreads();

    int head = blockIdx.y * HEADS + warp;
    if (head >= heads + 2 * kv_heads) return;
    bool is_query = head < heads, is_value = head >= heads + kv_heads;
    int first = is_query ? head : is_value ? head - heads - kv_heads : head - heads;
    const Rows x = is_query ? q : is_value ? v : k;
    const float* weight = is_query ? q_norm : is_value ? nullptr : k_norm;
    long long start = (long long)row * (is_query ? heads : kv_heads) * head_dim;
    float* mine = values[warp];
    int from = first * head_dim;
    bool aligned = head_dim % 4 == 0;

    // Columns of a head are loaded as those of a row: the bias goes by the row's column.
    float4 loaded[QUADS];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        int c = 4 * lane + i * 128;
        if (c >= head_dim) continue;
        loaded[i] = row_quad(x, start, from + c, from + head_dim, aligned);
        add_squares(squares, loaded[i]);
    }
    if (weight != nullptr) {
        float inverse = inverse_norm(warp_sum(squares), eps, head_dim);
#pragma unroll
        for (int i = 0; i < QUADS; ++i) {
            int c = 4 * lane + i * 128;
            if (c < head_dim) loaded[i] = normed(loaded[i], inverse, load_quad(weight, c, head_dim));
        }
    }
#pragma unroll
    for (int i = 0; i < QUADS; ++i) {
        int c = 4 * lane + i * 128;
        if (c < head_dim) store_quad(mine, c, head_dim, loaded[i]);
    }
    __syncwarp();
    if (!is_value) {
        for (int pair = lane; pair < pairs; pair += 32) {
            float& a = mine[first_of_pair(pair, interleaved != 0)];
            float& b = mine[second_of_pair(pair, pairs, interleaved != 0)];
            rotate(a, b, turns[pair]);
        }
        __syncwarp();
    }
    if (!is_query && offsets[row] < 0) return;
    int column = (is_value ? kv_heads + first : first) * head_dim;
    Element* record = is_query ? nullptr : reinterpret_cast<Element*>(layer + offsets[row]) + column;
    for (int c = 4 * lane; c < head_dim; c += 128) {
        float4 quad = load_quad(mine, c, head_dim);
        if (is_query) {
            store_quad(out + start + column, c, head_dim, quad);
        } else {
            store_elements(record, c, head_dim, aligned, quad);
        }
    }
}
