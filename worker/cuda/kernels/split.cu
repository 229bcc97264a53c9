// Activations as the B operand of linear.cu and experts.cu: three bf16 terms, the first of them, or e4m3 with a scale for
// each row and 128 columns. Columns from `cols` up to `padded` are zeros.
#include "common.cuh"

constexpr int ACTIVATIONS_F32 = 0;
constexpr int ACTIVATIONS_FP8 = 2;
constexpr int TERMS = ACTIVATIONS == ACTIVATIONS_F32 ? 3 : 1;
constexpr float E4M3_MAX = 448.0f;

// Removes the nearest bf16 of x (ties to even) from x and returns it: what is left has eight bits fewer. Where that would
// be infinite, x is truncated instead. A number that is not finite is its own leading term, with a bit that keeps a NaN
// one, and leaves zero.
__device__ __forceinline__ unsigned take_term(float& x) {
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

// The nearest e4m3, ties to even; magnitudes from 448 saturate, NaN stays NaN.
__device__ __forceinline__ unsigned float_to_e4m3(float x) {
    unsigned bits = float_bits(x) & 0x7fffffffu, sign = float_bits(x) >> 24 & 0x80u;
    float magnitude = bits_float(bits);
    if (bits > 0x7f800000u) return sign | 0x7fu;
    if (magnitude >= E4M3_MAX) return sign | 0x7eu;
    // Subnormal codes count multiples of 2^-9: the sum with 2^23 rounds them to an integer in its low bits.
    if (magnitude < 0.015625f) return sign | (float_bits(__fadd_rn(magnitude * 512.0f, 8388608.0f)) & 0xfu);
    unsigned rounded = bits + 0x7ffffu + (bits >> 20 & 1u);
    return sign | min((rounded >> 20) - ((127u - 7u) << 3), 0x7eu);
}

// Loads columns `col` .. `col + 3` of a row; rows of a multiple of four columns are aligned to 16.
__device__ __forceinline__ void load_columns(float (&v)[4], const float* row, int col, int cols) {
    if (cols % 4 == 0) {
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (col < cols) x = *reinterpret_cast<const float4*>(row + col);
        v[0] = x.x;
        v[1] = x.y;
        v[2] = x.z;
        v[3] = x.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = col + i < cols ? row[col + i] : 0.0f;
    }
}

// The scale of a warp's 128 columns: maps their greatest finite magnitude to 448; 1 if all are zero.
__device__ __forceinline__ float block_scale(const float (&v)[4]) {
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        unsigned bits = float_bits(v[i]) & 0x7fffffffu;
        if (bits < 0x7f800000u) most = max(most, bits);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) most = max(most, __shfl_xor_sync(0xffffffffu, most, step));
    if (most == 0) return 1.0f;
    return fmaxf(__fdiv_rn(bits_float(most), E4M3_MAX), bits_float(0x00800000u));
}

// One warp per row and 128 columns; any one-dimensional grid whose blocks are whole warps.
extern "C" __global__ void split(const float* x, void* terms, float* scales, int rows, int cols, int padded) {
    int lane = threadIdx.x & 31, blocks = padded / BLOCK;
    long long count = (long long)rows * blocks, warps = (long long)gridDim.x * (blockDim.x / 32);
    for (long long item = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; item < count; item += warps) {
        long long row = item / blocks;
        int col = (int)(item % blocks) * BLOCK + lane * 4;
        float v[4];
        load_columns(v, x + row * cols, col, cols);
        long long at = row * padded + col;
        if constexpr (ACTIVATIONS == ACTIVATIONS_FP8) {
            float scale = block_scale(v);
            unsigned codes = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) codes |= float_to_e4m3(__fdiv_rn(v[i], scale)) << 8 * i;
            reinterpret_cast<unsigned*>(terms)[at / 4] = codes;
            if (lane == 0) scales[item] = scale;
        } else {
#pragma unroll
            for (int term = 0; term < TERMS; ++term) {
                unsigned bits[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) bits[i] = take_term(v[i]);
                uint2 pairs = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
                reinterpret_cast<uint2*>(terms)[((long long)term * rows * padded + at) / 4] = pairs;
            }
        }
    }
}
