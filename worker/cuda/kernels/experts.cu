// Routed experts, grouped: slots (a token's choice of an expert) are sorted by expert and cut into tiles of one expert
// each by moe_sort.cu. A grid row is a tile, and rows past *tile_count return immediately, so that one launch fits
// every routing. Tiles of the decode kernels have at most 8 slots, those of the tiled kernels at most 64 (by wgmma 128), and tiles of
// one expert run together, so that its weights come from memory once.
//
// Gate and up share a block: its first 64 outputs are the gate's and the others are the up's for the same columns, so
// each token is read once and h is computed where both are available.
#include "matmul.cuh"

// The same as in silu_mul.cu.
__device__ __forceinline__ float silu_times(float x, float up) { return __fmul_rn(x / (1.0f + expf(-x)), up); }

// The tokens of a tile: rows of `rows` if the terms are the tokens' own, else the slots themselves.
__device__ __forceinline__ Tokens tile_tokens(
    const void* terms, const float* scales, const int* rows, const Tile& tile, int term_rows, int padded) {
    const int* tile_rows = rows != nullptr ? rows + tile.first : nullptr;
    return {static_cast<const unsigned char*>(terms), scales, tile_rows, tile.first, tile.count, term_rows, padded};
}

// Stores the lane's sums of 16 outputs from `output` as terms [TERMS][slots][padded] (split.cu), zeros from n on.
__device__ __forceinline__ void store_slot_terms(
    unsigned short* terms, const float (&sum)[4], const Tile& tile, int output, int n, int slots, int padded) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        int column = output + i / 2 * 8 + (threadIdx.x & 31) / 4;
        int slot = (threadIdx.x & 3) * 2 + i % 2;
        if (column >= padded || slot >= tile.count) continue;
        float rest = column < n ? sum[i] : 0.0f;
        unsigned short* to = terms + (long long)(tile.first + slot) * padded + column;
#pragma unroll
        for (int term = 0; term < TERMS; ++term) to[(long long)term * slots * padded] = (unsigned short)take_nearest(rest);
    }
}

// h[slot][inter] = silu(gate x) * (up x) with x the row slot_rows[slot] of x_rows; grid (ceil(inter / 64), tiles). With h_terms, h
// goes there instead, as split.cu writes it for `slots` slots; grid (h_padded / 64, tiles).
extern "C" __global__ void __launch_bounds__(THREADS, DECODE_BLOCKS_PER_SM) experts_gate_up_decode(
    float* h, unsigned short* h_terms, int slots, int h_padded, const void* terms, const float* scales, int x_rows,
    const Expert* experts, const Tile* tiles, const int* tile_count, const int* slot_rows, int inter, int padded) {
    __shared__ __align__(128) unsigned char stages[2 * DECODE_STAGE_BYTES];
    __shared__ float gates[WARPS / 2][4][32];
    if ((int)blockIdx.y >= *tile_count) return;
    Tile tile = tiles[blockIdx.y];
    Tokens x = tile_tokens(terms, scales, slot_rows, tile, x_rows, padded);
    int warp = threadIdx.x / 32, lane = threadIdx.x & 31, pair = warp % (WARPS / 2);
    bool gate = warp < WARPS / 2;
    int output = blockIdx.x * HALF_OUTPUTS + pair * 16;
    Weight w = gate ? experts[tile.expert].gate : experts[tile.expert].up;
    float total[1][1][4];
    decode_products(total, w, output, inter, x, 0, padded / BLOCK, stages);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        if (gate) gates[pair][i][lane] = total[0][0][i];
    __syncthreads();
    if (gate) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) total[0][0][i] = silu_times(gates[pair][i][lane], total[0][0][i]);
    if (h_terms != nullptr) {
        store_slot_terms(h_terms, total[0][0], tile, output, inter, slots, h_padded);
    } else {
        store_sums(h + (long long)tile.first * inter, total[0][0], nullptr, output, 0, tile.count, inter);
    }
}

extern "C" __global__ void TILED_BOUNDS experts_gate_up_tiled(
    float* h, const void* terms, const float* scales, int x_rows, const Expert* experts, const Tile* tiles, const int* tile_count,
    const int* slot_rows, int inter, int padded) {
    HEARTH_DYNAMIC_SHARED(unsigned char, given);
    unsigned char* shared = stage_memory(given);
    GridPlace place = place_in_groups(GROUP_ROWS);
    if (place.row >= *tile_count) return;
    Tile tile = tiles[place.row];
    Tokens x = tile_tokens(terms, scales, slot_rows, tile, x_rows, padded);
    int first = place.column * HALF_OUTPUTS;
    Half halves[2] = {{experts[tile.expert].gate, first}, {experts[tile.expert].up, first}};
    tiled_products(halves, inter, x, shared, [&](auto& sums) {
        take_gates(sums, shared, [](float gate, float up) { return silu_times(gate, up); });
        if (warp_output() < HALF_OUTPUTS) return;
        store_tile(h + (long long)tile.first * inter, sums, nullptr, first - HALF_OUTPUTS, tile.count, inter, shared);
    });
}

// d[slot][hidden] = down h, the terms of h by slot; grid (ceil(hidden / 128), tiles).
extern "C" __global__ void __launch_bounds__(THREADS, DECODE_BLOCKS_PER_SM) experts_down_decode(
    float* d, const void* terms, const float* scales, int slots, const Expert* experts, const Tile* tiles, const int* tile_count,
    int hidden, int padded) {
    __shared__ __align__(128) unsigned char stages[2 * DECODE_STAGE_BYTES];
    if ((int)blockIdx.y >= *tile_count) return;
    Tile tile = tiles[blockIdx.y];
    Tokens x = tile_tokens(terms, scales, nullptr, tile, slots, padded);
    int output = blockIdx.x * TILE_OUTPUTS + threadIdx.x / 32 * 16;
    Weight w = experts[tile.expert].down;
    float total[1][1][4];
    decode_products(total, w, output, hidden, x, 0, padded / BLOCK, stages);
    store_sums(d + (long long)tile.first * hidden, total[0][0], nullptr, output, 0, tile.count, hidden);
}

extern "C" __global__ void TILED_BOUNDS experts_down_tiled(
    float* d, const void* terms, const float* scales, int slots, const Expert* experts, const Tile* tiles, const int* tile_count,
    int hidden, int padded) {
    HEARTH_DYNAMIC_SHARED(unsigned char, given);
    unsigned char* shared = stage_memory(given);
    GridPlace place = place_in_groups(GROUP_ROWS);
    if (place.row >= *tile_count) return;
    Tile tile = tiles[place.row];
    Tokens x = tile_tokens(terms, scales, nullptr, tile, slots, padded);
    int output = place.column * TILE_OUTPUTS;
    Weight w = experts[tile.expert].down;
    Half halves[2] = {{w, output}, {w, output + HALF_OUTPUTS}};
    tiled_products(halves, hidden, x, shared, [&](const auto& sums) {
        store_tile(d + (long long)tile.first * hidden, sums, nullptr, output, tile.count, hidden, shared);
    });
}
