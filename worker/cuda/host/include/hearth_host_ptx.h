// The host side of ptx.cuh: the instructions that the model carries out, by their fragment layouts in the PTX ISA.
#pragma once

#define HEARTH_DYNAMIC_SHARED(T, name) T* const name = static_cast<T*>(hearth_host_dynamic_shared())

// Macros for the same reason as the warp operations.
#define mma_bf16(...) hearth_host::multiply<hearth_host_mma_bf16>(HEARTH_HOST_SITE, __VA_ARGS__)
#define mma_e4m3(...) hearth_host::multiply<hearth_host_mma_e4m3>(HEARTH_HOST_SITE, __VA_ARGS__)
#define ldmatrix_x4(...) hearth_host::load_matrices(HEARTH_HOST_SITE, 0, __VA_ARGS__)
#define ldmatrix_x4_trans(...) hearth_host::load_matrices(HEARTH_HOST_SITE, 1, __VA_ARGS__)
#define cp_async_16(...) hearth_host_cp_async_16(HEARTH_HOST_SITE, __VA_ARGS__)

namespace hearth_host {

template <HearthHostFloats (*mma)(HearthHostSite, HearthHostFloats, HearthHostWords, HearthHostPair)>
__forceinline__ void multiply(HearthHostSite site, float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    HearthHostFloats sum = mma(site, {{d[0], d[1], d[2], d[3]}}, {{a[0], a[1], a[2], a[3]}}, {{b[0], b[1]}});
    for (int i = 0; i < 4; i++) d[i] = sum.v[i];
}

__forceinline__ void load_matrices(HearthHostSite site, int transposed, unsigned (&r)[4], const void* shared) {
    HearthHostWords words = hearth_host_ldmatrix(site, shared, transposed);
    for (int i = 0; i < 4; i++) r[i] = words.v[i];
}

// Exponent and mantissa in a float's place, smaller by 2^120 (biases 127 and 7): the product is exact, subnormals included.
__forceinline__ unsigned e4m3_to_bf16(unsigned code) {
    float shifted = __uint_as_float(((code & 0x80u) << 24) | ((code & 0x7fu) << 20));
    return __float_as_uint(shifted * 0x1p120f) >> 16;
}

}  // namespace hearth_host

__forceinline__ void cp_async_commit() { hearth_host_cp_async_commit(); }

template <int N>
__forceinline__ void cp_async_wait() {
    hearth_host_cp_async_wait(N);
}

__forceinline__ uint4 load_16(const void* address) { return *static_cast<const uint4*>(address); }
__forceinline__ uint4 load_stream_16(const void* global) { return load_16(global); }

__forceinline__ void e4m3x4_to_bf16x4(unsigned codes, unsigned& low_pair, unsigned& high_pair) {
    low_pair = hearth_host::e4m3_to_bf16(codes & 0xffu) | (hearth_host::e4m3_to_bf16((codes >> 8) & 0xffu) << 16);
    high_pair = hearth_host::e4m3_to_bf16((codes >> 16) & 0xffu) | (hearth_host::e4m3_to_bf16(codes >> 24) << 16);
}
