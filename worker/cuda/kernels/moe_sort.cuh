// From routing to work: slots (token * top_k + j) sorted by expert, stably, and cut into tiles of one expert. One
// block of WARPS warps. Each warp takes a run of slots in order and counts its own, so the order never depends on which warp is faster.
#pragma once

#include "common.cuh"

// A warp's counts fit 16 bits, as do the sums over previous warps: of 65536 slots each warp has 2048.
template <int WARPS>
struct Counts {
    unsigned short of_warp[WARPS][MOST_EXPERTS];
    int first_slot[MOST_EXPERTS];
    int first_tile[MOST_EXPERTS];
    int slots_of_warps[WARPS];
    int tiles_of_warps[WARPS];
};

// Sum of `value` over the lanes before this one; `all` becomes the sum over all lanes.
__device__ __forceinline__ int sum_before(int value, int& all) {
    int lane = threadIdx.x & 31, sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int before = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += before;
    }
    all = __shfl_sync(ALL_LANES, sum, 31);
    return sum - value;
}

// The warp's slots of 32 from `base`, before `end`: the expert of this lane's slot (MOST_EXPERTS: none), the number of
// previous slots of the same expert in these 32, and whether it is the last of them.
// Experts that are not here have no position in the order.
struct Ranked {
    int expert;
    int rank;
    bool last;
};

__device__ __forceinline__ Ranked rank_slots(const unsigned* experts, int n_experts, int base, int end) {
    int lane = threadIdx.x & 31;
    unsigned expert = base + lane < end ? experts[base + lane] : MOST_EXPERTS;
    if (expert >= (unsigned)n_experts) expert = MOST_EXPERTS;
    unsigned same = __match_any_sync(ALL_LANES, expert);
    int rank = __popc(same & ((1u << lane) - 1u));
    return {(int)expert, rank, expert < MOST_EXPERTS && rank == __popc(same) - 1};
}

// of_warp becomes the number of the same expert's slots in previous warps; first_slot and first_tile become each expert's start.
template <int WARPS>
__device__ __forceinline__ void sum_counts(Counts<WARPS>& counts, int tile_rows, int* tile_count, int& slots, int& tiles) {
    int expert = threadIdx.x, lane = threadIdx.x & 31, warp = threadIdx.x / 32;
    slots = 0;
    if (expert < MOST_EXPERTS) {
        for (int w = 0; w < WARPS; ++w) {
            int here = counts.of_warp[w][expert];
            counts.of_warp[w][expert] = (unsigned short)slots;
            slots += here;
        }
    }
    tiles = (slots + tile_rows - 1) / tile_rows;
    int slots_of_warp, tiles_of_warp;
    int slots_before = sum_before(slots, slots_of_warp), tiles_before = sum_before(tiles, tiles_of_warp);
    if (lane == 0) {
        counts.slots_of_warps[warp] = slots_of_warp;
        counts.tiles_of_warps[warp] = tiles_of_warp;
    }
    __syncthreads();
    for (int w = 0; w < warp; ++w) {
        slots_before += counts.slots_of_warps[w];
        tiles_before += counts.tiles_of_warps[w];
    }
    if (expert < MOST_EXPERTS) {
        counts.first_slot[expert] = slots_before;
        counts.first_tile[expert] = tiles_before;
    }
    if (threadIdx.x == 32 * WARPS - 1) *tile_count = tiles_before + tiles;
}

// slot_rows[p] = the token of the p-th sorted slot; positions[slot] = p, or -1 if the slot's expert is n_experts or
// more (the slot is then in no tile); tiles of at most tile_rows slots, ascending.
template <int WARPS>
__device__ __forceinline__ void sort_slots(
    Counts<WARPS>& counts, const unsigned* experts, int tokens, int top_k, int n_experts, int tile_rows, int* slot_rows, int* positions, Tile* tiles,
    int* tile_count) {
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
    for (int i = lane; i < MOST_EXPERTS; i += 32) counts.of_warp[warp][i] = 0;
    __syncwarp();

    // Whole groups of 32, so that warps without a slot are the last ones.
    int slots = tokens * top_k;
    int run = (slots + 32 * WARPS - 1) / (32 * WARPS) * 32;
    int first = warp * run, end = min(first + run, slots);
    for (int base = first; base < end; base += 32) {
        Ranked slot = rank_slots(experts, n_experts, base, end);
        if (slot.last) counts.of_warp[warp][slot.expert] += (unsigned short)(slot.rank + 1);
        __syncwarp();
    }
    __syncthreads();
    int expert_slots, expert_tiles;
    sum_counts(counts, tile_rows, tile_count, expert_slots, expert_tiles);
    __syncthreads();

    for (int base = first; base < end; base += 32) {
        Ranked slot = rank_slots(experts, n_experts, base, end);
        int before = slot.expert < MOST_EXPERTS ? counts.of_warp[warp][slot.expert] : 0;
        __syncwarp();
        if (slot.last) counts.of_warp[warp][slot.expert] = (unsigned short)(before + slot.rank + 1);
        __syncwarp();
        if (slot.expert < MOST_EXPERTS) {
            int position = counts.first_slot[slot.expert] + before + slot.rank;
            slot_rows[position] = (base + lane) / top_k;
            positions[base + lane] = position;
        } else if (base + lane < end) {
            positions[base + lane] = -1;
        }
    }
    for (int i = 0; i < expert_tiles; ++i) {
        int first_slot = counts.first_slot[threadIdx.x] + i * tile_rows, count = min(tile_rows, expert_slots - i * tile_rows);
        tiles[counts.first_tile[threadIdx.x] + i] = {(int)threadIdx.x, first_slot, count, 0};
    }
}
