// The router's choice and the order of work that follows from it, for the few tokens of a step (route.cuh, moe_sort.cuh).

#include "moe_sort.cuh"
#include "route.cuh"

constexpr int WARPS = 16;      // whose scratch memory fits, and whose threads are as many as experts

union RouteSortMemory {
    RouteScratch scratches[WARPS];
    Counts<WARPS> counts;
};

// One block of 512 threads; parameters as of route and moe_sort.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) route_sort(
    Rows logits, const float* bias, unsigned* experts, float* weights, int tokens, int n_experts, int top_k, int groups, int top_groups,
    int sigmoid, int normalize, float scaling, int tile_rows, int* slot_rows, int* positions, Tile* tiles, int* tile_count) {
    __shared__ RouteSortMemory memory;
    int warp = threadIdx.x / 32;
    Router router = {logits, bias, experts, weights, n_experts, top_k, groups, top_groups, sigmoid != 0, normalize != 0, scaling};
    for (int token = warp; token < tokens; token += WARPS) route_token(router, memory.scratches[warp], token);
    __syncthreads();
    sort_slots(memory.counts, experts, tokens, top_k, n_experts, tile_rows, slot_rows, positions, tiles, tile_count);
}
