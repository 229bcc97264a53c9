// Sum of the routed experts' outputs, in the order of hearth_kernels::expert_sum: leaf i of 8 holds a token's experts from
// i * experts / 8 to (i + 1) * experts / 8 - 1, summed from zero in their order; leaves are added pairwise. No product is
// contracted with its addition.

#include "quads.cuh"

constexpr int LEAVES = 8, PARTIAL_SUMS = 4;

// Number of partial sums that wait while a leaf is taken: its own is the next one.
__device__ constexpr int level_of(int leaf) { return (leaf & 1) + (leaf >> 1 & 1) + (leaf >> 2 & 1); }

// Slots of a token, and the columns of their outputs that a thread adds.
struct Slots {
    const int* positions;
    const int* chosen;
    const float* weights;
    const float* d;
    int count;
    int hidden;
    int column;
};

// sum += the outputs times their weights of the slots from `slot` on whose expert is before `end_expert`.
__device__ __forceinline__ void add_slots(float4& sum, int& slot, const Slots& slots, int end_expert) {
    for (; slot < slots.count && slots.chosen[slot] < end_expert; ++slot) {
        int position = slots.positions[slot];
        if (position < 0) continue;
        float weight = slots.weights[slot];
        float4 x = load_quad(slots.d + (long long)position * slots.hidden, slots.column, slots.hidden);
        sum = add_quads(sum, make_float4(__fmul_rn(weight, x.x), __fmul_rn(weight, x.y), __fmul_rn(weight, x.z), __fmul_rn(weight, x.w)));
    }
}

// Partial sums of one token: the first one in out, the others in state [PARTIAL_SUMS - 1][stride].
struct Sums {
    float* out;
    float* state;
    long long stride;

    __device__ __forceinline__ float* at(int level) const { return level == 0 ? out : state + (level - 1) * stride; }
};

// Adds slots that are all of one leaf, to which more may come: only its own sum changes, and none without slots.
__device__ __forceinline__ void add_to_leaf(const Sums& sums, const Slots& slots, int leaf) {
    bool some = false;
    for (int slot = 0; slot < slots.count; ++slot) some |= slots.positions[slot] >= 0;
    if (!some) return;
    float* row = sums.at(level_of(leaf));
    float4 sum = load_quad(row, slots.column, slots.hidden);
    int slot = 0;
    add_slots(sum, slot, slots, 0x7fffffff);
    store_quad(row, slots.column, slots.hidden, sum);
}

// out[token] = the token's slots times their weights. If more calls of the same sum follow, partial sums: those before the
// leaf `end` and its own. An earlier launch left such sums at the leaf `begin`, or begin is negative. end = LEAVES: no calls
// follow. A negative position is a slot that has no row here; chosen[slot] is its expert. Grid (tokens, ceil(hidden / 1024)),
// 256 threads.
extern "C" __global__ void experts_combine(
    float* out, float* state, const float* d, const int* positions, const int* chosen, const float* weights, int tokens,
    int per_token, int hidden, int experts, int begin, int end, long long stride) {
    long long token = blockIdx.x;
    int column = quad_column();
    if (token >= tokens || column >= hidden) return;
    long long first = token * per_token;
    Slots slots = {positions + first, chosen + first, weights + first, d, per_token, hidden, column};
    Sums to = {out + token * hidden, state + token * hidden, stride};
    if (begin == end) return add_to_leaf(to, slots, begin);
    float4 sums[PARTIAL_SUMS] = {};
#pragma unroll
    for (int level = 0; level < PARTIAL_SUMS; ++level)
        if (begin >= 0 && level <= level_of(begin)) sums[level] = load_quad(to.at(level), column, hidden);
    int slot = 0;
#pragma unroll
    for (int leaf = 0; leaf < LEAVES; ++leaf) {
        if (leaf < begin || leaf > end) continue;
        float4& sum = sums[level_of(leaf)];
        if (leaf != begin) sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        add_slots(sum, slot, slots, (leaf + 1) * experts / LEAVES);
        if (leaf == end) continue;
#pragma unroll
        for (int level = level_of(leaf); level >= level_of(leaf + 1) && level > 0; --level)
            sums[level - 1] = add_quads(sums[level - 1], sums[level]);
    }
    store_quad(to.out, column, hidden, sums[0]);
    if (end == LEAVES) return;
#pragma unroll
    for (int level = 1; level < PARTIAL_SUMS; ++level)
        if (level <= level_of(end)) store_quad(to.at(level), column, hidden, sums[level]);
}
