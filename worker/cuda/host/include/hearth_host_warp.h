// Barriers and warp operations. Each is a macro because barriers are distinguished by their source location: threads
// that wait at different locations have diverged.
#pragma once

namespace hearth_host {

// Values are passed as 64 bits; a float as its bit pattern.
template <class T>
__forceinline__ unsigned long long to_bits(T value) {
    if constexpr (sizeof(T) == 8) {
        return __builtin_bit_cast(unsigned long long, value);
    } else {
        static_assert(sizeof(T) == 4, "warp operations take 4 or 8 bytes");
        return __builtin_bit_cast(unsigned, value);
    }
}

template <class T>
__forceinline__ T from_bits(unsigned long long bits) {
    if constexpr (sizeof(T) == 8) {
        return __builtin_bit_cast(T, bits);
    } else {
        return __builtin_bit_cast(T, (unsigned)bits);
    }
}

template <class T>
__forceinline__ T shuffle(HearthHostSite site, unsigned mask, T value, int source) {
    return from_bits<T>(hearth_host_shuffle(site, mask, to_bits(value), source));
}

// Source lanes of the PTX ISA's `shfl.sync`: a lane past its segment keeps its own value.
template <class T>
__forceinline__ T shuffle_index(HearthHostSite site, unsigned mask, T value, int index, int width = 32) {
    int lane = (int)hearth_host_lane();
    return shuffle(site, mask, value, (lane & ~(width - 1)) | (index & (width - 1)));
}

template <class T>
__forceinline__ T shuffle_up(HearthHostSite site, unsigned mask, T value, unsigned delta, int width = 32) {
    int lane = (int)hearth_host_lane(), source = lane - (int)delta;
    return shuffle(site, mask, value, source < (lane & ~(width - 1)) ? lane : source);
}

template <class T>
__forceinline__ T shuffle_down(HearthHostSite site, unsigned mask, T value, unsigned delta, int width = 32) {
    int lane = (int)hearth_host_lane(), source = lane + (int)delta;
    return shuffle(site, mask, value, source > (lane | (width - 1)) ? lane : source);
}

template <class T>
__forceinline__ T shuffle_xor(HearthHostSite site, unsigned mask, T value, int lane_mask, int width = 32) {
    int lane = (int)hearth_host_lane(), source = lane ^ lane_mask;
    return shuffle(site, mask, value, source > (lane | (width - 1)) ? lane : source);
}

__forceinline__ void sync_warp(HearthHostSite site, unsigned mask = 0xffffffffu) { hearth_host_sync_warp(site, mask); }

template <class T>
__forceinline__ unsigned match_any(HearthHostSite site, unsigned mask, T value) {
    return hearth_host_match(site, mask, to_bits(value));
}

}  // namespace hearth_host

#define HEARTH_HOST_SITE (HearthHostSite{__FILE__, __LINE__})
#define __syncthreads() hearth_host_sync_threads(HEARTH_HOST_SITE)
#define __syncthreads_count(predicate) hearth_host_sync_threads_count(HEARTH_HOST_SITE, (predicate) != 0)
#define __syncthreads_or(predicate) (__syncthreads_count(predicate) != 0)
#define __syncthreads_and(predicate) (__syncthreads_count(!(predicate)) == 0)
#define __syncwarp(...) hearth_host::sync_warp(HEARTH_HOST_SITE __VA_OPT__(, ) __VA_ARGS__)
#define __shfl_sync(...) hearth_host::shuffle_index(HEARTH_HOST_SITE, __VA_ARGS__)
#define __shfl_up_sync(...) hearth_host::shuffle_up(HEARTH_HOST_SITE, __VA_ARGS__)
#define __shfl_down_sync(...) hearth_host::shuffle_down(HEARTH_HOST_SITE, __VA_ARGS__)
#define __shfl_xor_sync(...) hearth_host::shuffle_xor(HEARTH_HOST_SITE, __VA_ARGS__)
#define __ballot_sync(mask, predicate) hearth_host_ballot(HEARTH_HOST_SITE, mask, (predicate) != 0)
#define __any_sync(mask, predicate) (__ballot_sync(mask, predicate) != 0)
#define __all_sync(mask, predicate) (__ballot_sync(mask, !(predicate)) == 0)
#define __match_any_sync(...) hearth_host::match_any(HEARTH_HOST_SITE, __VA_ARGS__)
#define __activemask() hearth_host_active_mask()
#define __trap() hearth_host_trap(HEARTH_HOST_SITE)

// Fences order but do not synchronise; the model runs one thread at a time and needs none.
inline void __threadfence() { asm volatile("" ::: "memory"); }
inline void __threadfence_block() { asm volatile("" ::: "memory"); }
