// Read bandwidth of the device's memory with no computation: the yardstick for decode.
#include "common.cuh"

// Reads 16 * n bytes with as many loads in flight as a block can have; any one-dimensional grid, 512 threads. `sink`
// is written only for one combined value that the bytes never have, so that the loads cannot be optimised away.
extern "C" __global__ void __launch_bounds__(512) read_bandwidth(const uint4* from, long long n, unsigned* sink) {
    constexpr int LOADS = 8;
    long long step = (long long)gridDim.x * blockDim.x;
    unsigned sum = 0;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += LOADS * step) {
        uint4 v[LOADS];
#pragma unroll
        for (int j = 0; j < LOADS; ++j) v[j] = i + j * step < n ? load_stream_16(from + i + j * step) : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int j = 0; j < LOADS; ++j) sum |= v[j].x | v[j].y | v[j].z | v[j].w;
    }
    if (sum == 0xffffffffu) atomicAdd(sink, 1u);
}
