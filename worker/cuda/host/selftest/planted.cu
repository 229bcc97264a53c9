// One entry point for each kind of error that the host model reports, and correct twins of those that a small change
// fixes. Each takes (float* out, const float* in, int n): `in` holds n written floats, `out` has room for n. Unless
// noted otherwise, a launch is one block of n = 64 threads, without dynamic shared memory. README.md lists how each error's text begins.
#include "common.cuh"
#include "wgmma.cuh"

// Reads in[n], the float past the end. "out of bounds"
extern "C" __global__ void out_of_bounds_read(float* out, const float* in, int n) { out[threadIdx.x] = in[threadIdx.x + 1]; }

// Writes out[n]. "out of bounds"
extern "C" __global__ void out_of_bounds_write(float* out, const float* in, int n) { out[threadIdx.x + 1] = in[threadIdx.x]; }

// Reads `out`, which the caller has allocated but not written. "read of unwritten memory"
extern "C" __global__ void read_of_unwritten(float* out, const float* in, int n) { out[threadIdx.x] += in[threadIdx.x]; }

// Writes one float past a shared array of n = 64. "shared memory out of bounds"
extern "C" __global__ void shared_out_of_bounds(float* out, const float* in, int n) {
    __shared__ float tile[64];
    __shared__ float next[64];
    next[threadIdx.x] = 0.0f;
    tile[threadIdx.x + 1] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = tile[63 - threadIdx.x] + next[threadIdx.x];
}

// The same in dynamic shared memory, of which the launch provides 4 * n bytes. "shared memory out of bounds"
extern "C" __global__ void dynamic_out_of_bounds(float* out, const float* in, int n) {
    HEARTH_DYNAMIC_SHARED(float, tile);
    tile[threadIdx.x + 1] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x + 1];
}

// Reads a shared element that no thread has written. "read of unwritten shared memory"
extern "C" __global__ void shared_unwritten(float* out, const float* in, int n) {
    __shared__ float tile[64];
    if (threadIdx.x != 5) tile[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x];
}

// Reverses a row without a barrier between writing and reading. "shared memory race"
extern "C" __global__ void shared_race(float* out, const float* in, int n) {
    __shared__ float tile[64];
    tile[threadIdx.x] = 0.0f;
    __syncthreads();
    tile[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = tile[63 - threadIdx.x];
}

extern "C" __global__ void shared_race_sound(float* out, const float* in, int n) {
    __shared__ float tile[64];
    tile[threadIdx.x] = in[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = tile[63 - threadIdx.x];
}

// The second round overwrites what a slower thread is still reading: one barrier too few. "shared memory race"
extern "C" __global__ void shared_reuse(float* out, const float* in, int n) {
    __shared__ float tile[64];
    float sum = 0.0f;
    for (int turn = 0; turn < 2; turn++) {
        tile[threadIdx.x] = in[threadIdx.x];
        __syncthreads();
        sum += tile[63 - threadIdx.x];
    }
    out[threadIdx.x] = sum;
}

// Lanes exchange values through shared memory and rely on running in lockstep. "shared memory race"
extern "C" __global__ void missing_syncwarp(float* out, const float* in, int n) {
    __shared__ float tile[64];
    tile[threadIdx.x] = 0.0f;
    __syncthreads();
    tile[threadIdx.x] = in[threadIdx.x];
    __shfl_sync(0xffffffffu, 0, 0);
    out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

extern "C" __global__ void missing_syncwarp_sound(float* out, const float* in, int n) {
    __shared__ float tile[64];
    tile[threadIdx.x] = in[threadIdx.x];
    __syncwarp();
    out[threadIdx.x] = tile[threadIdx.x ^ 1];
}

// __syncwarp orders the lanes of one warp, not those of two. "shared memory race"
extern "C" __global__ void syncwarp_across_warps(float* out, const float* in, int n) {
    __shared__ float tile[64];
    tile[threadIdx.x] = 0.0f;
    __syncthreads();
    tile[threadIdx.x] = in[threadIdx.x];
    __syncwarp();
    out[threadIdx.x] = tile[threadIdx.x ^ 32];
}

// A copy into shared memory is committed but never waited for. "cp.async not waited for"
extern "C" __global__ void missing_cp_async_wait(float* out, const float* in, int n) {
    __shared__ __align__(16) float tile[64];
    if (threadIdx.x < 16) cp_async_16(tile + 4 * threadIdx.x, in + 4 * threadIdx.x, true);
    cp_async_commit();
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x];
}

// Each thread waits for its own copies, and reads another's. "shared memory race", or, if the order of threads is
// shuffled and the reader comes first, "cp.async not waited for".
extern "C" __global__ void missing_cp_async_barrier(float* out, const float* in, int n) {
    __shared__ __align__(16) float tile[64];
    tile[threadIdx.x] = 0.0f;
    __syncthreads();
    if (threadIdx.x < 16) cp_async_16(tile + 4 * threadIdx.x, in + 4 * threadIdx.x, true);
    cp_async_commit();
    cp_async_wait<0>();
    out[threadIdx.x] = tile[threadIdx.x];
}

extern "C" __global__ void cp_async_sound(float* out, const float* in, int n) {
    __shared__ __align__(16) float tile[64];
    if (threadIdx.x < 16) cp_async_16(tile + 4 * threadIdx.x, in + 4 * threadIdx.x, true);
    cp_async_commit();
    cp_async_wait<0>();
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x];
}

// Half of the block skips the barrier. "divergent barrier"
extern "C" __global__ void divergent_barrier(float* out, const float* in, int n) {
    if (threadIdx.x >= 32) return;
    __syncthreads();
    out[threadIdx.x] = in[threadIdx.x];
}

// Both halves wait, each at its own barrier. "divergent barrier"
extern "C" __global__ void two_barriers(float* out, const float* in, int n) {
    if (threadIdx.x >= 32) {
        __syncthreads();
        out[threadIdx.x] = in[threadIdx.x];
    } else {
        __syncthreads();
    }
}

// Half of the block does not reach a named barrier. "divergent barrier"
extern "C" __global__ void missed_named_barrier(float* out, const float* in, int n) {
    if (threadIdx.x < 32) barrier_sync<1, 64>();
    out[threadIdx.x] = in[threadIdx.x];
}

// Both halves wait, at barriers of different names. "divergent barrier"
extern "C" __global__ void two_named_barriers(float* out, const float* in, int n) {
    if (threadIdx.x < 32) barrier_sync<1, 64>();
    if (threadIdx.x >= 32) barrier_sync<2, 64>();
    out[threadIdx.x] = in[threadIdx.x];
}

// The two halves of the block reach the same barriers at different places: the second reads what the first has written before one.
extern "C" __global__ void named_barrier_sound(float* out, const float* in, int n) {
    __shared__ float tile[32];
    bool is_behind = threadIdx.x >= 32;
    if (is_behind) barrier_sync<1, 64>();
    if (!is_behind) tile[threadIdx.x] = in[threadIdx.x];
    if (!is_behind) barrier_sync<1, 64>();
    out[threadIdx.x] = is_behind ? tile[threadIdx.x - 32] : 0.0f;
}

// The same, but it writes after the barrier. Half of it is still behind. "shared memory race"
extern "C" __global__ void named_barrier_too_early(float* out, const float* in, int n) {
    __shared__ float tile[32];
    if (threadIdx.x < 32) tile[threadIdx.x] = 0.0f;
    __syncthreads();
    bool is_behind = threadIdx.x >= 32;
    if (is_behind) barrier_sync<1, 64>();
    if (!is_behind) barrier_sync<1, 64>();
    if (!is_behind) tile[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = is_behind ? tile[threadIdx.x - 32] : 0.0f;
}

// Lane 7 does not take part in a shuffle that names it. "divergent warp operation"
extern "C" __global__ void divergent_shuffle(float* out, const float* in, int n) {
    if (threadIdx.x % 32 == 7) return;
    out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, in[threadIdx.x], 1);
}

// All threads add to one location without atomics. "global memory race"
extern "C" __global__ void global_race(float* out, const float* in, int n) {
    if (threadIdx.x == 0) out[0] = 0.0f;
    __syncthreads();
    out[0] += in[threadIdx.x];
}

extern "C" __global__ void global_race_sound(float* out, const float* in, int n) {
    if (threadIdx.x == 0) out[0] = 0.0f;
    __syncthreads();
    atomicAdd(out, in[threadIdx.x]);
}

// Launched with two blocks: the second reads what the first wrote, in no fixed order. "global memory race"
extern "C" __global__ void race_between_blocks(float* out, const float* in, int n) {
    if (blockIdx.x == 0) out[threadIdx.x] = in[threadIdx.x];
    if (blockIdx.x == 1 && threadIdx.x == 3) out[4] = out[3];
}

// Reads 16 bytes from an address that is a multiple of 4. "misaligned address"
extern "C" __global__ void misaligned(float* out, const float* in, int n) {
    if (threadIdx.x == 0) *reinterpret_cast<uint4*>(out) = load_16(in + 1);
}

// Reads `in`; the caller frees it before the launch. "use of freed memory"
extern "C" __global__ void use_after_free(float* out, const float* in, int n) { out[threadIdx.x] = in[threadIdx.x]; }

// Each quarter of a warp sums and votes on its own. Sound.
extern "C" __global__ void partial_masks_sound(float* out, const float* in, int n) {
    unsigned quarter = 0xffu << (threadIdx.x % 32 / 8 * 8);
    float sum = in[threadIdx.x];
    for (int distance = 4; distance > 0; distance /= 2) sum += __shfl_xor_sync(quarter, sum, distance);
    out[threadIdx.x] = __any_sync(quarter, sum > 0.0f) ? sum : 0.0f;
}

// The kernels below are launched with 128 threads and OPERAND_BYTES of dynamic shared memory: a warpgroup multiplies zeros.
constexpr int OPERAND_BYTES = 25 * 1024;

struct Planted {
    bool fences_proxy;
    bool fences_accumulators;
    bool overwrites;    // an operand, before the wait
};

__device__ __forceinline__ void multiply_zeros(float* out, const float* in, int n, const Planted& planted) {
    HEARTH_DYNAMIC_SHARED(unsigned char, unaligned);
    unsigned char* tile = unaligned + (0u - shared_address(unaligned)) % 1024;
    for (int i = threadIdx.x; i < 24 * 64; i += blockDim.x) cp_async_16(tile + i * 16, in, false);
    cp_async_commit();
    cp_async_wait<0>();
    if (planted.fences_proxy) fence_async_proxy();
    __syncthreads();
    float sum[64];
    for (int i = 0; i < 64; ++i) sum[i] = 1.0f;
    unsigned long long layout = 64ull << 32 | 1ull << 62;
    unsigned start = shared_address(tile);
    if (planted.fences_accumulators) wgmma_fence();
    wgmma_m64n128k32(sum, layout | start >> 4, layout | (start + 8 * 1024) >> 4, 0);
    wgmma_commit();
    if (planted.overwrites && threadIdx.x == 127) tile[0] = 1;
    wgmma_wait();
    if ((int)threadIdx.x < n) out[threadIdx.x] = sum[0];
}

// "wgmma without fence.proxy.async"
extern "C" __global__ void missing_proxy_fence(float* out, const float* in, int n) { multiply_zeros(out, in, n, {false, true, false}); }

// "wgmma without wgmma.fence"
extern "C" __global__ void missing_wgmma_fence(float* out, const float* in, int n) { multiply_zeros(out, in, n, {true, false, false}); }

// "shared memory race"
extern "C" __global__ void wgmma_operand_overwritten(float* out, const float* in, int n) { multiply_zeros(out, in, n, {true, true, true}); }

extern "C" __global__ void wgmma_sound(float* out, const float* in, int n) { multiply_zeros(out, in, n, {true, true, false}); }

// The same with bf16 and the second operand transposed, of which the last 8 columns of the last k are overwritten before or
// after all but the latest group have been waited for: theirs, or that of a product of something else.
__device__ __forceinline__ void multiply_zeros_transposed(float* out, const float* in, int n, bool waits) {
    HEARTH_DYNAMIC_SHARED(unsigned char, unaligned);
    unsigned char* tile = unaligned + (0u - shared_address(unaligned)) % 1024;
    for (int i = threadIdx.x; i < 24 * 64; i += blockDim.x) cp_async_16(tile + i * 16, in, false);
    cp_async_commit();
    cp_async_wait<0>();
    fence_async_proxy();
    __syncthreads();
    float sum[64], other[32];
    for (int i = 0; i < 64; ++i) sum[i] = other[i / 2] = 1.0f;
    unsigned ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
    unsigned long long operand = transposed_descriptor(shared_address(tile), 4096);
    wgmma_fence();
    wgmma_transposed(sum, ones, operand, 0);
    wgmma_commit();
    wgmma_transposed(other, ones, descriptor_after(operand, 8192), 1);
    wgmma_commit();
    if (waits) wgmma_wait_all_but_one();
    __syncthreads();
    // Column 120 is in chunk 7 of the second part of k 15, which the swizzle moves to chunk 0.
    if (threadIdx.x == 127) tile[4096 + 15 * 128] = 1;
    wgmma_wait();
    if ((int)threadIdx.x < n) out[threadIdx.x] = sum[0] + other[0];
}

// "shared memory race"
extern "C" __global__ void wgmma_transposed_overwritten(float* out, const float* in, int n) { multiply_zeros_transposed(out, in, n, false); }

extern "C" __global__ void wgmma_transposed_sound(float* out, const float* in, int n) { multiply_zeros_transposed(out, in, n, true); }
