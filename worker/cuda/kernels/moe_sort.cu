// From routing to work (moe_sort.cuh).

#include "moe_sort.cuh"

constexpr int SORT_WARPS = 32;

// One block of 1024 threads.
extern "C" __global__ void __launch_bounds__(32 * SORT_WARPS) moe_sort(
    const unsigned* experts, int tokens, int top_k, int n_experts, int tile_rows, int* slot_rows, int* positions, Tile* tiles,
    int* tile_count) {
    __shared__ Counts<SORT_WARPS> counts;
    sort_slots(counts, experts, tokens, top_k, n_experts, tile_rows, slot_rows, positions, tiles, tile_count);
}
