// Rotary position embedding, in place.

#include "rotate.cuh"

constexpr int ROPE_THREADS = 256;
constexpr int ROPE_HEADS = 8;      // heads per block: they share the angles
constexpr int MOST_PAIRS = 512;

// Grid (rows, ceil(heads / 8)), 256 threads; pairs <= 512. x [rows][heads][head_dim]: rotates 2 * pairs elements of each head,
// from `first` on, by position * inv_freq; a pair is (i, i + pairs), or (2i, 2i + 1) when interleaved.
extern "C" __global__ void rope(
    float* x, const unsigned* positions, const float* inv_freq, float magnitude, int interleaved, int rows, int heads, int head_dim,
    int first, int pairs) {
    __shared__ Turn turns[MOST_PAIRS];
    int row = blockIdx.x;
    if (row >= rows) return;
    for (int i = threadIdx.x; i < pairs; i += ROPE_THREADS) turns[i] = turn_of(positions[row], inv_freq[i], magnitude);
    __syncthreads();

    int first_head = blockIdx.y * ROPE_HEADS;
    int count = min(ROPE_HEADS, heads - first_head) * pairs;
    float* block = x + ((long long)row * heads + first_head) * head_dim + first;
    for (int i = threadIdx.x; i < count; i += ROPE_THREADS) {
        int pair = i % pairs;
        float* head = block + i / pairs * head_dim;
        rotate(head[first_of_pair(pair, interleaved != 0)], head[second_of_pair(pair, pairs, interleaved != 0)], turns[pair]);
    }
}
