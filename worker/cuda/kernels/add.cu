// Sums in place.

#include "quads.cuh"

// Grid ceil(n / 1024), 256 threads: x += delta over n elements.
extern "C" __global__ void add(float* x, const float* delta, long long n) {
    long long first = 4 * ((long long)blockIdx.x * QUAD_THREADS + threadIdx.x);
    if (first + 4 <= n) {
        float4 sum = *reinterpret_cast<const float4*>(x + first);
        float4 d = *reinterpret_cast<const float4*>(delta + first);
        sum.x += d.x;
        sum.y += d.y;
        sum.z += d.z;
        sum.w += d.w;
        *reinterpret_cast<float4*>(x + first) = sum;
        return;
    }
    for (long long i = first; i < n; ++i) x[i] += delta[i];
}
