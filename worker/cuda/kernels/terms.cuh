// The form in which products take activations, by ACTIVATIONS: three bf16 terms, the first of them, or e4m3 with a scale for
// each row and 128 columns. Columns from `cols` up to `padded` are zeros.
#pragma once

#include "common.cuh"

constexpr int ACTIVATIONS_F32 = 0;
constexpr int ACTIVATIONS_FP8 = 2;
constexpr int TERMS = ACTIVATIONS == ACTIVATIONS_F32 ? 3 : 1;
constexpr float E4M3_MAX = 448.0f;

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

// The scale of a warp's 128 columns: maps their greatest finite magnitude to 448; 1 if all are zero.
__device__ __forceinline__ float block_scale(const float (&v)[4]) {
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        unsigned bits = float_bits(v[i]) & 0x7fffffffu;
        if (bits < 0x7f800000u) most = max(most, bits);
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) most = max(most, __shfl_xor_sync(ALL_LANES, most, step));
    if (most == 0) return 1.0f;
    return fmaxf(__fdiv_rn(bits_float(most), E4M3_MAX), bits_float(0x00800000u));
}

// Stores columns `col` .. `col + 3` of a row. FP8: all lanes of a warp call it, lane by lane for the 128 columns of a scale.
__device__ __forceinline__ void store_terms(
    void* terms, float* scales, float (&v)[4], long long row, int col, long long rows, int padded) {
    long long at = row * padded + col;
    if constexpr (ACTIVATIONS == ACTIVATIONS_FP8) {
        float scale = block_scale(v);
        unsigned codes = 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) codes |= float_to_e4m3(__fdiv_rn(v[i], scale)) << 8 * i;
        reinterpret_cast<unsigned*>(terms)[at / 4] = codes;
        if (col % BLOCK == 0) scales[at / BLOCK] = scale;
    } else {
#pragma unroll
        for (int term = 0; term < TERMS; ++term) {
            unsigned bits[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) bits[i] = take_nearest(v[i]);
            uint2 pairs = make_uint2(bits[0] | bits[1] << 16, bits[2] | bits[3] << 16);
            reinterpret_cast<uint2*>(terms)[(term * rows * padded + at) / 4] = pairs;
        }
    }
}

__device__ __forceinline__ void store_terms(
    void* terms, float* scales, float4 quad, long long row, int col, long long rows, int padded) {
    float v[4] = {quad.x, quad.y, quad.z, quad.w};
    store_terms(terms, scales, v, row, col, rows, padded);
}

// Stores one column; not for FP8, whose scales take 128.
__device__ __forceinline__ void store_term(void* terms, float v, long long row, int col, long long rows, int padded) {
#pragma unroll
    for (int term = 0; term < TERMS; ++term) {
        unsigned bits = take_nearest(v);
        static_cast<unsigned short*>(terms)[(term * rows + row) * padded + col] = (unsigned short)bits;
    }
}
