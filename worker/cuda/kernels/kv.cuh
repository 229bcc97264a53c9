// Elements of the paged cache, by KV_TYPE: 0 f32, 1 bf16.
#pragma once

#include "quads.cuh"

#if KV_TYPE == 0
typedef float Element;
#else
typedef unsigned short Element;
#endif

__device__ __forceinline__ void store_elements(Element* to, float4 v) {
#if KV_TYPE == 0
    *reinterpret_cast<float4*>(to) = v;
#else
    *reinterpret_cast<uint2*>(to) = make_uint2(float_to_bf16(v.x) | (unsigned)float_to_bf16(v.y) << 16,
                                               float_to_bf16(v.z) | (unsigned)float_to_bf16(v.w) << 16);
#endif
}

__device__ __forceinline__ float load_element(const Element* from) {
#if KV_TYPE == 0
    return *from;
#else
    return bf16_to_float(*from);
#endif
}

__device__ __forceinline__ void store_element(Element* to, float v) {
#if KV_TYPE == 0
    *to = v;
#else
    *to = float_to_bf16(v);
#endif
}


// Stores elements c..c+3 of those before `end`; `aligned` as in quads.cuh.
__device__ __forceinline__ void store_elements(Element* to, int c, int end, bool aligned, float4 v) {
    if (aligned) {
        store_elements(to + c, v);
        return;
    }
    store_element(to + c, v.x);
    if (c + 1 < end) store_element(to + c + 1, v.y);
    if (c + 2 < end) store_element(to + c + 2, v.z);
    if (c + 3 < end) store_element(to + c + 3, v.w);
}
