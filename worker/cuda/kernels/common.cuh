// Types and conversions shared by all kernels. The structs match the Rust side field by field (src/backend/tensor.rs).
#pragma once

#include "ptx.cuh"

// A matrix [n][ld] of weights; in FP8, row r, column c has scale scales[(first_row + r) / 128 * scale_cols + c / 128].
struct Weight {
    const void* data;
    const float* scales;
    int ld;
    int first_row;
    int scale_cols;
    int reserved;
};

// One routed expert: down(silu(gate x) * (up x)).
struct Expert {
    Weight gate;
    Weight up;
    Weight down;
};

// `count` sorted slots from `first`, all of expert `expert` (an index into the table of experts).
struct Tile {
    int expert;
    int first;
    int count;
    int reserved;
};

// `tokens` consecutive tokens of one sequence: batch rows from `first_row`, absolute positions from `start`; their
// blocks are in the table of blocks from `table`.
struct AttentionTile {
    int first_row;
    int tokens;
    int start;
    int table;
};

// Activations [rows][cols] as a kernel reads them: values, or a product's segments, which their reader adds in order from zero,
// and the bias to the sum. `values` is null if there are none.
struct Rows {
    const float* values;
    const float* bias;
    long long stride;      // elements from one segment to the next
    int segments;          // 0: values
    int reserved;
};

// Values of WEIGHT_TYPE; 2 is bf16.
constexpr int WEIGHTS_F32 = 0;
constexpr int WEIGHTS_F16 = 1;
constexpr int WEIGHTS_FP8 = 3;

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int MOST_EXPERTS = 512;  // of a router
constexpr int MOST_JOINT = 3;      // products of the same rows in one launch

// Products y[i] = x w[i] of the same rows: y[i] [rows][n[i]], or its partial sums [segments][rows][n[i]].
struct Joint {
    Weight w[MOST_JOINT];
    float* y[MOST_JOINT];
    const float* bias[MOST_JOINT];
    int n[MOST_JOINT];
    int count;
};

constexpr int BLOCK = 128;         // columns of one scale
constexpr int SEGMENT = 512;       // columns of one partial sum
constexpr int KEY_TILE = 64;       // positions of one softmax step
constexpr int KEY_SPLIT = 512;     // positions of one partial attention

// Position of this block in a grid (columns of outputs, rows of tiles of tokens).
struct GridPlace {
    int column;
    int row;
};

// Blocks that run together process up to `rows` rows of few columns instead of one row of many: they then read the
// same weights at the same time, so that these come from memory once, and fewer bytes of both operands overall.
__device__ __forceinline__ GridPlace place_in_groups(int rows) {
    int columns = gridDim.x, block = blockIdx.y * columns + blockIdx.x;
    int first = block / (rows * columns) * rows, left = min(rows, (int)gridDim.y - first);
    int rest = block - first * columns;
    return {rest / left, first + rest % left};
}

__device__ __forceinline__ unsigned float_bits(float x) { return __float_as_uint(x); }
__device__ __forceinline__ float bits_float(unsigned x) { return __uint_as_float(x); }

// bf16 <-> f32, round to nearest even, NaN stays NaN.
__device__ __forceinline__ float bf16_to_float(unsigned short x) { return bits_float((unsigned)x << 16); }
__device__ __forceinline__ unsigned short float_to_bf16(float x) {
    unsigned bits = float_bits(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (unsigned short)((bits >> 16) | 0x40u);
    return (unsigned short)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Removes the nearest bf16 of x (ties to even) from x and returns it: what is left has eight bits fewer. Where that would
// be infinite, x is truncated instead. A number that is not finite is its own leading term, with a bit that keeps a NaN
// one, and leaves zero.
__device__ __forceinline__ unsigned take_nearest(float& x) {
    unsigned bits = float_bits(x);
    if ((bits & 0x7f800000u) == 0x7f800000u) {
        x = 0.0f;
        return ((bits & 0x007fffffu) != 0 ? bits | 0x00400000u : bits) >> 16;
    }
    unsigned rounded = bits + 0x7fffu + (bits >> 16 & 1u);
    unsigned term = ((rounded & 0x7f800000u) == 0x7f800000u ? bits : rounded) >> 16;
    x = __fsub_rn(x, bits_float(term << 16));
    return term;
}

// Converts two e4m3, each given as a signed 16-bit integer, to bf16. Exponent and mantissa shifted into place, below
// the sign, form a bf16 that is too small by 2^120 (biases 127 and 7), including subnormals,
// so one exact product by 2^120 (0x7b80) remains.
__device__ __forceinline__ unsigned e4m3x2_to_bf16x2(unsigned extended) {
    return multiply_bf16x2((extended << 4) & 0x87f087f0u, 0x7b807b80u);
}

// Four e4m3, none of them NaN, as bf16 in the same order: bytes 0 and 1 in low_pair, 2 and 3 in high_pair.
__device__ __forceinline__ void e4m3x4_to_bf16x4(unsigned codes, unsigned& low_pair, unsigned& high_pair) {
    low_pair = e4m3x2_to_bf16x2(sign_extend_pair<0>(codes));
    high_pair = e4m3x2_to_bf16x2(sign_extend_pair<1>(codes));
}
