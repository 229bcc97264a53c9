// The host side of wgmma.cuh.
#pragma once

#define wgmma_m64n128k32(...) hearth_host::multiply_by_warpgroup(HEARTH_HOST_SITE, __VA_ARGS__)
#define wgmma_m64n64k16(...) hearth_host::multiply_by_warpgroup(HEARTH_HOST_SITE, __VA_ARGS__)
#define wgmma_transposed(...) hearth_host::multiply_transposed(HEARTH_HOST_SITE, __VA_ARGS__)
#define wgmma_m64n128k16(...) hearth_host::multiply_by_warpgroup(HEARTH_HOST_SITE, __VA_ARGS__)
#define wgmma_fence() hearth_host_wgmma_fence()
#define wgmma_commit() hearth_host_wgmma_commit()
#define wgmma_wait() hearth_host_wgmma_wait(HEARTH_HOST_SITE, 0)
#define wgmma_wait_all_but_one() hearth_host_wgmma_wait(HEARTH_HOST_SITE, 1)

namespace hearth_host {

__forceinline__ void multiply_by_warpgroup(HearthHostSite site, float (&d)[64], unsigned long long a, unsigned long long b, int accumulate) {
    hearth_host_wgmma(site, d, a, b, accumulate);
}

template <int N>
__forceinline__ void multiply_by_warpgroup(HearthHostSite site, float (&d)[N][4], const unsigned (&a)[4], unsigned long long b, int accumulate) {
    hearth_host_wgmma_bf16(site, d[0], a, b, accumulate, N * 8, 0);
}

template <int N>
__forceinline__ void multiply_transposed(HearthHostSite site, float (&d)[N], const unsigned (&a)[4], unsigned long long b, int accumulate) {
    static_assert(N == 64 || N == 32, "128 or 64 columns");
    hearth_host_wgmma_bf16(site, d, a, b, accumulate, 2 * N, 1);
}

}  // namespace hearth_host

// The model has the address of the accumulators, so that the compiler keeps their contents at every call.
template <int N>
__forceinline__ void keep_in_order(float (&)[N]) {}
template <int N>
__forceinline__ void keep_in_order(float (&)[N][4]) {}
__forceinline__ void fence_async_proxy() { hearth_host_fence_async_proxy(); }
__forceinline__ unsigned shared_address(const void* shared) { return hearth_host_shared_address(shared); }
