// Rotary position embedding, in place.

#include "common.cuh"

constexpr int ROPE_THREADS = 256;
constexpr int ROPE_HEADS = 8;      // heads per block: they share the angles
constexpr int MAX_PAIRS = 512;

// Grid (rows, ceil(heads / 8)), 256 threads; pairs <= 512. x [rows][heads][head_dim]: rotates the first 2 * pairs elements of each
// head by position * inv_freq; a pair is (i, i + pairs), or (2i, 2i + 1) when interleaved.
extern "C" __global__ void rope(
    float* x, const unsigned* positions, const float* inv_freq, float magnitude, int interleaved, int rows, int heads, int head_dim,
    int pairs) {
    __shared__ float cosines[MAX_PAIRS];
    __shared__ float sines[MAX_PAIRS];
    int row = blockIdx.x;
    if (row >= rows) return;
    for (int i = threadIdx.x; i < pairs; i += ROPE_THREADS) {
        float angle = __fmul_rn((float)positions[row], inv_freq[i]);
        cosines[i] = __fmul_rn(cosf(angle), magnitude);
        sines[i] = __fmul_rn(sinf(angle), magnitude);
    }
    __syncthreads();

    int first_head = blockIdx.y * ROPE_HEADS;
    int count = min(ROPE_HEADS, heads - first_head) * pairs;
    float* block = x + ((long long)row * heads + first_head) * head_dim;
    for (int i = threadIdx.x; i < count; i += ROPE_THREADS) {
        int pair = i % pairs;
        float* head = block + i / pairs * head_dim;
        float* first = head + (interleaved ? 2 * pair : pair);
        float* second = head + (interleaved ? 2 * pair + 1 : pair + pairs);
        float a = *first;
        float b = *second;
        // Products are rounded before they are added, as the specification does.
        *first = __fadd_rn(__fmul_rn(a, cosines[pair]), -__fmul_rn(b, sines[pair]));
        *second = __fadd_rn(__fmul_rn(b, cosines[pair]), __fmul_rn(a, sines[pair]));
    }
}
