// The host side of ptx.cuh: the instructions that the model executes, with their fragment layouts in the PTX ISA.
#pragma once

#define HEARTH_DYNAMIC_SHARED(T, name) T* const name = static_cast<T*>(hearth_host_dynamic_shared())

// Macros for the same reason as the warp operations.
#define mma_bf16(...) hearth_host::multiply<hearth_host_mma_bf16>(HEARTH_HOST_SITE, __VA_ARGS__)
#define mma_e4m3(...) hearth_host::multiply<hearth_host_mma_e4m3>(HEARTH_HOST_SITE, __VA_ARGS__)
#define ldmatrix_x4(...) hearth_host::load_matrices(HEARTH_HOST_SITE, 0, __VA_ARGS__)
#define ldmatrix_x4_trans(...) hearth_host::load_matrices(HEARTH_HOST_SITE, 1, __VA_ARGS__)
#define cp_async_16(...) hearth_host_cp_async(HEARTH_HOST_SITE, 16, __VA_ARGS__)
#define cp_async_8(...) hearth_host_cp_async(HEARTH_HOST_SITE, 8, __VA_ARGS__, 1)

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

// Rounds to nearest even; NaN becomes the one that the instructions produce.
__forceinline__ unsigned round_to_bf16(float x) {
    unsigned bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// The product of the bf16 in the upper halves of a and b, which f32 represents exactly if it is normal.
__forceinline__ unsigned multiply_bf16(unsigned a, unsigned b) {
    return round_to_bf16(__uint_as_float(a & 0xffff0000u) * __uint_as_float(b & 0xffff0000u));
}

}  // namespace hearth_host

__forceinline__ void cp_async_commit() { hearth_host_cp_async_commit(); }

template <int N>
__forceinline__ void cp_async_wait() {
    hearth_host_cp_async_wait(N);
}

template <int ID, int THREADS>
__forceinline__ void barrier_sync(HearthHostSite site = {__builtin_FILE(), __builtin_LINE()}) {
    hearth_host_named_barrier(site, ID, THREADS);
}

__forceinline__ uint4 load_16(const void* address) { return *static_cast<const uint4*>(address); }
__forceinline__ uint4 load_stream_16(const void* global) { return load_16(global); }

template <int PAIR>
__forceinline__ unsigned sign_extend_pair(unsigned bytes) {
    auto extended = [bytes](int i) { return static_cast<unsigned>(static_cast<signed char>(bytes >> (8 * i))); };
    return (extended(2 * PAIR) & 0xffffu) | extended(2 * PAIR + 1) << 16;
}

__forceinline__ unsigned sign_extend_pair(unsigned bytes, int pair) {
    return pair == 0 ? sign_extend_pair<0>(bytes) : sign_extend_pair<1>(bytes);
}

__forceinline__ unsigned round_pair(float first, float second) {
    return hearth_host::round_to_bf16(first) | hearth_host::round_to_bf16(second) << 16;
}

__forceinline__ unsigned multiply_bf16x2(unsigned a, unsigned b) {
    return hearth_host::multiply_bf16(a << 16, b << 16) | hearth_host::multiply_bf16(a, b) << 16;
}

__forceinline__ float exp2_approximate(float x) {
    float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;
}
