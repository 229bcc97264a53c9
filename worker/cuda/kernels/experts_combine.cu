// Sum of the routed experts' outputs, in the order of hearth_kernels::expert_sum: leaf i of 8 holds a token's experts from
// i * experts / 8 to (i + 1) * experts / 8 - 1, summed from zero in their order; leaves are added pairwise. No product is
// contracted with its addition.

constexpr int LEAVES = 8, PARTIAL_SUMS = 4;

// Number of partial sums that wait while a leaf is taken: its own is the next one.
__device__ constexpr int level_of(int leaf) { return (leaf & 1) + (leaf >> 1 & 1) + (leaf >> 2 & 1); }

// out[token] = the token's slots times their weights. If more calls of the same sum follow, partial sums: those before the
// leaf `end` and its own, the first one in out and the others in state [PARTIAL_SUMS - 1][stride]. An earlier launch left such
// sums at the leaf `begin`, or begin is negative. end = LEAVES: no calls follow. A negative position is a slot that has no row here; chosen[slot] is its
// expert. Any one-dimensional grid.
extern "C" __global__ void experts_combine(
    float* out, float* state, const float* d, const int* positions, const int* chosen, const float* weights, int tokens,
    int per_token, int hidden, int experts, int begin, int end, long long stride) {
    long long count = (long long)tokens * hidden;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < count; i += (long long)gridDim.x * blockDim.x) {
        long long slot = i / hidden * per_token, last = slot + per_token, column = i % hidden;
        float sums[PARTIAL_SUMS] = {};
#pragma unroll
        for (int level = 0; level < PARTIAL_SUMS; ++level)
            if (begin >= 0 && level <= level_of(begin)) sums[level] = level == 0 ? out[i] : state[(level - 1) * stride + i];
#pragma unroll
        for (int leaf = 0; leaf < LEAVES; ++leaf) {
            if (leaf < begin || leaf > end) continue;
            float& sum = sums[level_of(leaf)];
            if (leaf != begin) sum = 0.0f;
            for (; slot < last && (LEAVES * (chosen[slot] + 1) - 1) / experts <= leaf; ++slot) {
                int position = positions[slot];
                if (position >= 0) sum = __fadd_rn(sum, __fmul_rn(weights[slot], d[(long long)position * hidden + column]));
            }
            if (leaf == end) continue;
#pragma unroll
            for (int level = level_of(leaf); level >= level_of(leaf + 1) && level > 0; --level)
                sums[level - 1] = __fadd_rn(sums[level - 1], sums[level]);
        }
        out[i] = sums[0];
        if (end == LEAVES) continue;
#pragma unroll
        for (int level = 1; level < PARTIAL_SUMS; ++level)
            if (level <= level_of(end)) state[(level - 1) * stride + i] = sums[level];
    }
}
