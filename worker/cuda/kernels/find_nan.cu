// FP8 weights are checked once for NaN codes (0x7f, 0xff), so that conversions need not handle them.
#include "common.cuh"

// Whether one of the four codes is NaN: without its sign a code is at most 0x7f, and adding one sets the sign bit of that one only.
__device__ __forceinline__ bool any_nan(unsigned codes) { return (((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u) != 0; }

// Sets *found |= 1 if one of n bytes is NaN; `fp8` is aligned to 16. Any one-dimensional grid.
extern "C" __global__ void find_nan(const unsigned char* fp8, long long n, int* found) {
    long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    long long step = (long long)gridDim.x * blockDim.x;
    bool some = false;
    for (long long i = thread; i < n / 16; i += step) {
        uint4 v = load_stream_16(fp8 + i * 16);
        some |= any_nan(v.x) || any_nan(v.y) || any_nan(v.z) || any_nan(v.w);
    }
    for (long long i = n / 16 * 16 + thread; i < n; i += step) some |= any_nan(fp8[i]);
    if (some) atomicOr(found, 1);
}
