// One launch of a warp for each operation of ptx.cuh and of NVRTC's built-ins that the model executes.
#include "common.cuh"

// a [16][16], b [16][8] bf16 -> d [16][8], fragments by ldmatrix.
extern "C" __global__ void multiply_bf16(float* d, const unsigned short* a, const unsigned short* b) {
    HEARTH_DYNAMIC_SHARED(unsigned short, tiles);
    int lane = threadIdx.x, group = lane / 4, quad = lane % 4;
    cp_async_16(tiles + lane * 8, a + lane * 8, true);
    cp_async_16(tiles + 256 + lane * 8, lane < 16 ? b + lane * 8 : b, lane < 16);
    cp_async_commit();
    cp_async_wait<0>();
    __syncwarp();
    unsigned a_words[4], b_words[4];
    float sum[4] = {d[group * 8 + 2 * quad], d[group * 8 + 2 * quad + 1], d[(group + 8) * 8 + 2 * quad], d[(group + 8) * 8 + 2 * quad + 1]};
    ldmatrix_x4(a_words, tiles + (lane % 16) * 16 + lane / 16 * 8);
    ldmatrix_x4_trans(b_words, tiles + 256 + lane * 8);
    unsigned pair[2] = {b_words[0], b_words[1]};
    mma_bf16(sum, a_words, pair);
    for (int i = 0; i < 4; i++) d[(group + i / 2 * 8) * 8 + 2 * quad + i % 2] = sum[i];
    d[128 + lane] = __uint_as_float(b_words[2] | b_words[3]);    // zeros from copies that were not valid
}

// a [16][32], b [8][32] e4m3, both row by row -> d [16][8].
extern "C" __global__ void multiply_e4m3(float* d, const unsigned* a, const unsigned* b) {
    int lane = threadIdx.x, group = lane / 4, quad = lane % 4;
    unsigned a_words[4] = {a[group * 8 + quad], a[(group + 8) * 8 + quad], a[group * 8 + quad + 4], a[(group + 8) * 8 + quad + 4]};
    unsigned b_words[2] = {b[group * 8 + quad], b[group * 8 + quad + 4]};
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    mma_e4m3(sum, a_words, b_words);
    for (int i = 0; i < 4; i++) d[(group + i / 2 * 8) * 8 + 2 * quad + i % 2] = sum[i];
}

// 256 codes -> 256 bf16.
extern "C" __global__ void convert_e4m3(uint2* out, const unsigned* codes) {
    for (int i = threadIdx.x; i < 64; i += 32) {
        unsigned low, high;
        e4m3x4_to_bf16x4(codes[i], low, high);
        out[i] = make_uint2(low, high);
    }
}

// out [12][32]: result of each warp operation, lane by lane.
extern "C" __global__ void warp_operations(unsigned* out, const unsigned* in) {
    int lane = threadIdx.x;
    unsigned x = in[lane];
    unsigned all = 0xffffffffu;
    out[lane] = __shfl_sync(all, x, 5);
    out[32 + lane] = __shfl_sync(all, x, lane + 1, 8);
    out[64 + lane] = __shfl_up_sync(all, x, 3);
    out[96 + lane] = __shfl_up_sync(all, x, 3, 8);
    out[128 + lane] = __shfl_down_sync(all, x, 3, 16);
    out[160 + lane] = __float_as_uint(__shfl_xor_sync(all, __uint_as_float(x), 9));
    out[192 + lane] = __ballot_sync(all, x & 1u);
    out[224 + lane] = __match_any_sync(all, x % 5u);
    out[256 + lane] = __any_sync(all, x == in[7]) + 2 * __all_sync(all, x != in[7]);
    out[288 + lane] = __popc(x) | __clz((int)x) << 8 | __ffs((int)x) << 16;
    out[320 + lane] = __byte_perm(x, in[lane ^ 1], 0x5410);
    out[352 + lane] = __syncthreads_count(x & 1u);
}

// `cells`: sum, largest, smallest, bits, count by compare and swap; then a float.
extern "C" __global__ void atomics(int* cells, float* total, const int* in) {
    int x = in[threadIdx.x];
    atomicAdd(cells, x);
    atomicMax(cells + 1, x);
    atomicMin(cells + 2, x);
    atomicOr(cells + 3, 1 << (x & 31));
    int seen = 0, last;
    do {
        last = seen;
        seen = atomicCAS(cells + 4, last, last + 1);
    } while (seen != last);
    atomicAdd(total, 0.5f);
}
