// Operations that CUDA C++ offers only as inline PTX, each as a function. The host model implements its own version of each.
#pragma once

#ifdef HEARTH_HOST_MODEL
#include "hearth_host_ptx.h"
#else

// Dynamic shared memory as T*: one array for the whole file, since `extern __shared__` has one type, aligned for cp.async and swizzles.
extern __shared__ __align__(128) char hearth_dynamic_shared[];
#define HEARTH_DYNAMIC_SHARED(T, name) T* const name = reinterpret_cast<T*>(hearth_dynamic_shared)

__device__ __forceinline__ unsigned shared_address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

// d += a * b for 16x16 a and 16x8 b. With group = lane / 4 and quad = lane % 4, each register holds two consecutive k:
//   a[0]: row group,     k 2*quad and 2*quad+1      a[1]: row group + 8, the same k
//   a[2]: row group,     k 2*quad+8, 2*quad+9       a[3]: row group + 8, the same k
//   b[0]: column group,  k 2*quad, 2*quad+1         b[1]: column group,  k 2*quad+8, 2*quad+9
//   d[0], d[1]: row group, columns 2*quad, 2*quad+1 d[2], d[3]: row group + 8, the same columns
__device__ __forceinline__ void mma_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// d += a * b for 16x32 a and 32x8 b, from compute capability 8.9. As mma_bf16, but each register holds four
// consecutive k:
// 4*quad .. 4*quad+3 in a[0], a[1], b[0] and those plus 16 in a[2], a[3], b[1].
__device__ __forceinline__ void mma_e4m3(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Starts the copy of 16 bytes, both ends aligned to 16. If not `valid`, zeros are written and `global` is not read.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global), "r"(valid ? 16 : 0)
                 : "memory");
}

// The same for 8 bytes, always read.
__device__ __forceinline__ void cp_async_8(void* shared, const void* global) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(shared_address(shared)), "l"(global) : "memory");
}

// Closes the group of copies that this thread has started since the last group.
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most the N latest groups of this thread are in flight. Other threads see the bytes after a barrier.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// Named barrier ID (1 to 15) of all THREADS threads of the block: unlike __syncthreads, warps may reach it at different places.
template <int ID, int THREADS>
__device__ __forceinline__ void barrier_sync() {
    asm volatile("barrier.sync.aligned %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

// Four 8x8 matrices of 16-bit elements: lanes 8i..8i+7 give the rows of matrix i (16 bytes each, aligned to 16); r[i] holds the
// elements 2*quad and 2*quad+1 of row `group` of matrix i.
__device__ __forceinline__ void ldmatrix_x4(unsigned (&r)[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared))
                 : "memory");
}

// As ldmatrix_x4 with each matrix transposed: r[i] holds column `group`, rows 2*quad and 2*quad+1.
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&r)[4], const void* shared) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared_address(shared))
                 : "memory");
}

// 16 aligned bytes that are not written during the launch and are read only once: they do not occupy L1.
__device__ __forceinline__ uint4 load_stream_16(const void* global) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(global));
    return v;
}

// 16 aligned bytes.
__device__ __forceinline__ uint4 load_16(const void* address) { return *static_cast<const uint4*>(address); }

// Bytes 2 * PAIR and 2 * PAIR + 1 as signed 16-bit integers.
template <int PAIR>
__device__ __forceinline__ unsigned sign_extend_pair(unsigned bytes) {
    unsigned pair;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(pair) : "r"(bytes), "n"(PAIR == 0 ? 0x9180 : 0xb3a2));
    return pair;
}

// The same for a pair that is known when it runs.
__device__ __forceinline__ unsigned sign_extend_pair(unsigned bytes, int pair) {
    unsigned extended;
    asm("prmt.b32 %0, %1, 0, %2;" : "=r"(extended) : "r"(bytes), "r"(pair == 0 ? 0x9180 : 0xb3a2));
    return extended;
}

// Two f32 as bf16, rounded to nearest even, the first in the lower half.
__device__ __forceinline__ unsigned round_pair(float first, float second) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

// 2^x with an error of two units in the last place; results below the least normal number are zero.
__device__ __forceinline__ float exp2_approximate(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The products of two pairs of bf16, subnormals included; adding -0 keeps the sign of zero.
__device__ __forceinline__ unsigned multiply_bf16x2(unsigned a, unsigned b) {
    unsigned product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
    return product;
}

#endif
