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

// The same of four columns, in registers: most slots and leaves change few of them, and only those are read and written.
struct Quads {
    Sums sums;
    int column;
    int hidden;
    float4 of[PARTIAL_SUMS];
    unsigned here;                                                                 // one bit a level: read, or known
    unsigned changed;

    __device__ __forceinline__ float4& read(int level) {
        if ((here >> level & 1) == 0) of[level] = load_quad(sums.at(level), column, hidden);
        here |= 1u << level;
        return of[level];
    }
    __device__ __forceinline__ float4& change(int level) {
        changed |= 1u << level;
        return read(level);
    }
    __device__ __forceinline__ void clear(int level) {
        of[level] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        here |= 1u << level;
        changed |= 1u << level;
    }
    __device__ __forceinline__ void store(int level) {
        if ((changed >> level & 1) != 0) store_quad(sums.at(level), column, hidden, of[level]);
    }
};

// Adds slots that are all of one leaf, to which more may come.
__device__ __forceinline__ void add_to_leaf(const Sums& sums, const Slots& slots, int leaf) {
    float* row = sums.at(level_of(leaf));
    float4 sum = load_quad(row, slots.column, slots.hidden);
    int slot = 0;
    add_slots(sum, slot, slots, 0x7fffffff);
    store_quad(row, slots.column, slots.hidden, sum);
}

// Whether the next slot that has a row is of an expert before `end_expert`.
__device__ __forceinline__ bool has_slot(int& slot, const Slots& slots, int end_expert) {
    while (slot < slots.count && slots.positions[slot] < 0 && slots.chosen[slot] < end_expert) ++slot;
    return slot < slots.count && slots.chosen[slot] < end_expert;
}

__device__ __forceinline__ void add_leaves(const Sums& to, const Slots& slots, int experts, int begin, int end) {
    Quads sums = {to, slots.column, slots.hidden, {}, 0, 0};
    int slot = 0;
#pragma unroll
    for (int leaf = 0; leaf < LEAVES; ++leaf) {
        if (leaf < begin || leaf > end) continue;
        int level = level_of(leaf), end_expert = (leaf + 1) * experts / LEAVES;
        if (leaf > begin) sums.clear(level);
        if (has_slot(slot, slots, end_expert)) add_slots(sums.change(level), slot, slots, end_expert);
        if (leaf == end) continue;
#pragma unroll
        for (; level >= level_of(leaf + 1) && level > 0; --level) {
            float4& sum = sums.change(level - 1);
            sum = add_quads(sum, sums.read(level));
        }
    }
#pragma unroll
    for (int level = 0; level < PARTIAL_SUMS; ++level)
        if (level <= level_of(end)) sums.store(level);
}

// out[token] = the token's slots times their weights. If more calls of the same sum follow, partial sums: those before the
// leaf `end` and its own. An earlier launch left such sums at the leaf `begin`, or begin is negative. end = LEAVES: no calls
// follow. A negative position is a slot that has no row here; chosen[slot] is its expert. Grid (tokens, ceil(hidden / 1024)), or
// (tokens, 1), where blocks of most tokens have nothing to do; 256 threads.
extern "C" __global__ void experts_combine(
    float* out, float* state, const float* d, const int* positions, const int* chosen, const float* weights, int tokens,
    int per_token, int hidden, int experts, int begin, int end, long long stride) {
    long long token = blockIdx.x;
    if (token >= tokens) return;
    long long first = token * per_token;
    Sums to = {out + token * hidden, state + token * hidden, stride};
    Slots slots = {positions + first, chosen + first, weights + first, d, per_token, hidden, 0};
    if (begin == end) {
        bool some = false;
        for (int slot = 0; slot < per_token; ++slot) some |= slots.positions[slot] >= 0;
        if (!some) return;
    }
    for (slots.column = quad_column(); slots.column < hidden; slots.column += gridDim.y * QUAD_COLS) {
        if (begin == end) {
            add_to_leaf(to, slots, begin);
        } else {
            add_leaves(to, slots, experts, begin, end);
        }
    }
}
