// Elements of a stored weight as f32, for kernels that read weights without mma. WEIGHT_TYPE as in the contract:
// 0 f32, 1 fp16, 2 bf16, 3 fp8 e4m3 with block scales.
#pragma once

#include "common.cuh"

// A finite number in the exponent range of f16 or e4m3, shifted into f32's fields, is too small by a power of two: the
// product by that power is exact, also for subnormals.
__device__ __forceinline__ float f16_to_float(unsigned short x) {
    unsigned sign = (unsigned)(x & 0x8000u) << 16;
    unsigned magnitude = (unsigned)(x & 0x7fffu) << 13;
    if (magnitude >= 0x0f800000u) return bits_float(sign | 0x7f800000u | magnitude);
    return bits_float(sign | float_bits(__fmul_rn(bits_float(magnitude), bits_float(0x77800000u))));
}

__device__ __forceinline__ float e4m3_to_float(unsigned char x) {
    unsigned sign = (unsigned)(x & 0x80u) << 24;
    unsigned magnitude = (unsigned)(x & 0x7fu) << 20;
    return bits_float(sign | float_bits(__fmul_rn(bits_float(magnitude), bits_float(0x7b800000u))));
}

__device__ __forceinline__ float4 f16_quad(uint2 bits) {
    return make_float4(f16_to_float((unsigned short)bits.x), f16_to_float((unsigned short)(bits.x >> 16)),
                       f16_to_float((unsigned short)bits.y), f16_to_float((unsigned short)(bits.y >> 16)));
}

__device__ __forceinline__ float4 bf16_quad(uint2 bits) {
    return make_float4(bits_float(bits.x << 16), bits_float(bits.x & 0xffff0000u), bits_float(bits.y << 16),
                       bits_float(bits.y & 0xffff0000u));
}

// A product of code and scale is rounded once, as the specification does.
__device__ __forceinline__ float4 e4m3_quad(unsigned codes, float scale) {
    return make_float4(__fmul_rn(e4m3_to_float((unsigned char)codes), scale),
                       __fmul_rn(e4m3_to_float((unsigned char)(codes >> 8)), scale),
                       __fmul_rn(e4m3_to_float((unsigned char)(codes >> 16)), scale),
                       __fmul_rn(e4m3_to_float((unsigned char)(codes >> 24)), scale));
}

#if WEIGHT_TYPE == 0
typedef float4 QuadBits;
#elif WEIGHT_TYPE == 3
typedef unsigned QuadBits;
#else
typedef uint2 QuadBits;
#endif

// Four columns as stored. Kept so until they are used, they can be loaded ahead: a conversion behind the load would wait for it.
struct StoredQuad {
    QuadBits bits;
    float scale;       // of FP8
};

// Loads columns c..c+3 of row r; c is a multiple of 4, so one scale applies to all, and rows are padded, so all exist.
__device__ __forceinline__ StoredQuad stored_quad(const Weight& w, int r, int c) {
    StoredQuad quad;
    long long first = ((long long)r * w.ld + c) >> 2;
    quad.bits = static_cast<const QuadBits*>(w.data)[first];
    quad.scale = 1.0f;
#if WEIGHT_TYPE == 3
    quad.scale = w.scales[(long long)((w.first_row + r) / BLOCK) * w.scale_cols + c / BLOCK];
#endif
    return quad;
}

__device__ __forceinline__ float4 quad_value(const StoredQuad& quad) {
#if WEIGHT_TYPE == 0
    return quad.bits;
#elif WEIGHT_TYPE == 1
    return f16_quad(quad.bits);
#elif WEIGHT_TYPE == 2
    return bf16_quad(quad.bits);
#elif WEIGHT_TYPE == 3
    return e4m3_quad(quad.bits, quad.scale);
#endif
}

__device__ __forceinline__ float4 weight_quad(const Weight& w, int r, int c) { return quad_value(stored_quad(w, r, c)); }
