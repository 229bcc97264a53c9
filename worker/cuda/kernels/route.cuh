// Choice of experts for a token from router logits; src/reference/router.rs of the kernels crate is the specification.
//
// One warp per token; lane `lane` holds experts lane, lane + 32, ... Values are compared by an integer `rank` that
// orders them as the specification does: a NaN is last, zeros are equal, and ties go to the lower index.

#pragma once

#include "quads.cuh"

constexpr int MOST_CHOICES = 32;
constexpr int LANE_EXPERTS = MOST_EXPERTS / 32;
constexpr unsigned NO_RANK = 0;    // below every value: not eligible, or taken

// What a router is given, and what it chooses.
struct Router {
    Rows logits;       // [tokens][n_experts]
    const float* bias; // [n_experts] or null: corrects the choice only
    unsigned* experts; // [tokens][top_k], ascending for each token
    float* weights;    // [tokens][top_k]
    int n_experts;
    int top_k;
    int groups;
    int top_groups;
    bool sigmoid;
    bool normalize;
    float scaling;
};

// Scratch memory shared by the lanes of a warp.
struct RouteScratch {
    float biased[MOST_EXPERTS];
    float chosen[MOST_CHOICES];
};

__device__ __forceinline__ unsigned rank_of(float x) {
    if (isnan(x)) return 1;
    unsigned bits = x == 0.0f ? 0u : float_bits(x);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ float value_of(unsigned rank) {
    if (rank == 1) return bits_float(0x7fc00000u);
    return bits_float(rank & 0x80000000u ? rank & 0x7fffffffu : ~rank);
}

__device__ __forceinline__ float warp_sum(float x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

__device__ __forceinline__ float warp_max(float x) {
    for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

// Scores of this lane's experts; those past n_experts are zero.
__device__ __forceinline__ void score(float (&scores)[LANE_EXPERTS], const Router& router, int token, int lane) {
    int n_experts = router.n_experts;
    float largest = bits_float(0xff800000u);
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; ++j) {
        int e = lane + 32 * j;
        scores[j] = e < n_experts ? row_value(router.logits, (long long)token * n_experts, e) : bits_float(0xff800000u);
        largest = fmaxf(largest, scores[j]);
    }
    if (router.sigmoid) {
#pragma unroll
        for (int j = 0; j < LANE_EXPERTS; ++j) scores[j] = 1.0f / (1.0f + expf(-scores[j]));
        return;
    }
    largest = warp_max(largest);
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; ++j) {
        scores[j] = lane + 32 * j < n_experts ? expf(scores[j] - largest) : 0.0f;
        sum += scores[j];
    }
    float total = warp_sum(sum);
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; ++j) scores[j] = scores[j] / total;
}

// Bit g is set if group g is among the top_groups; a group's score is the sum of its two best biased scores. Lane g
// scores group g, and starts at a column of its own so that lanes read different banks.
__device__ __forceinline__ unsigned eligible_groups(const float* biased, int group_size, int groups, int top_groups, int lane) {
    unsigned best = NO_RANK;
    unsigned second = NO_RANK;
    if (lane < groups) {
        for (int i = 0; i < group_size; ++i) {
            unsigned rank = rank_of(biased[lane * group_size + (i + lane) % group_size]);
            second = max(second, min(best, rank));
            best = max(best, rank);
        }
    }
    unsigned mine = NO_RANK;
    if (lane < groups) mine = rank_of(second == NO_RANK ? value_of(best) : value_of(best) + value_of(second));
    int ahead = 0;
    for (int g = 0; g < groups; ++g) {
        unsigned rank = __shfl_sync(ALL_LANES, mine, g);
        ahead += rank > mine || (rank == mine && g < lane);
    }
    return __ballot_sync(ALL_LANES, lane < groups && ahead < top_groups);
}

// Takes the best of all lanes' experts: sets its bit in its lane's `taken`, and its rank to NO_RANK.
__device__ __forceinline__ void take_best(unsigned (&ranks)[LANE_EXPERTS], unsigned& taken, int lane) {
    unsigned rank = NO_RANK;
    unsigned slot = 0;
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; ++j) {
        if (ranks[j] > rank) {
            rank = ranks[j];
            slot = j;
        }
    }
    unsigned best = rank;
    for (int step = 16; step > 0; step /= 2) best = max(best, __shfl_xor_sync(ALL_LANES, best, step));
    unsigned lowest = rank == best ? 32 * slot + lane : MOST_EXPERTS;
    for (int step = 16; step > 0; step /= 2) lowest = min(lowest, __shfl_xor_sync(ALL_LANES, lowest, step));
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; ++j) {
        if (best != NO_RANK && lowest == 32 * j + lane) {
            ranks[j] = NO_RANK;
            taken |= 1u << j;
        }
    }
}

// Chooses the experts of a token, with one warp.
__device__ __forceinline__ void route_token(const Router& router, RouteScratch& scratch, int token) {
    int lane = threadIdx.x % 32;
    float scores[LANE_EXPERTS];
    score(scores, router, token, lane);
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; ++j) {
        int e = lane + 32 * j;
        if (e < router.n_experts) scratch.biased[e] = router.bias ? scores[j] + router.bias[e] : scores[j];
    }
    __syncwarp();

    int group_size = router.n_experts / router.groups;
    unsigned eligible = ALL_LANES;
    if (router.groups > 1) eligible = eligible_groups(scratch.biased, group_size, router.groups, router.top_groups, lane);
    unsigned ranks[LANE_EXPERTS];
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; ++j) {
        int e = lane + 32 * j;
        ranks[j] = e < router.n_experts && (eligible >> (e / group_size) & 1) ? rank_of(scratch.biased[e]) : NO_RANK;
    }
    unsigned taken = 0;
    for (int k = 0; k < router.top_k; ++k) take_best(ranks, taken, lane);

    // Slots are assigned in ascending order of expert: all lanes' first experts, then their second ones.
    int first = 0;
#pragma unroll
    for (int j = 0; j < LANE_EXPERTS; ++j) {
        unsigned lanes = __ballot_sync(ALL_LANES, taken >> j & 1);
        if (taken >> j & 1) {
            int slot = first + __popc(lanes & ((1u << lane) - 1));
            router.experts[(long long)token * router.top_k + slot] = 32 * j + lane;
            scratch.chosen[slot] = scores[j];
        }
        first += __popc(lanes);
    }
    __syncwarp();
    if (lane >= router.top_k) return;
    float divisor = 1.0f;
    if (router.normalize) {
        float sum = 0.0f;
        for (int k = 0; k < router.top_k; ++k) sum += scratch.chosen[k];
        divisor = sum + 1e-20f;
    }
    router.weights[(long long)token * router.top_k + lane] = __fmul_rn(scratch.chosen[lane] / divisor, router.scaling);
}
