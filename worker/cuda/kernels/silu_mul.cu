// The gate of a SwiGLU feed-forward block.

#include "quads.cuh"

// x * sigmoid(x) * up. A large negative x has an infinite exponential, and the quotient is then zero, as it should be.
__device__ __forceinline__ float silu_times(float x, float up) { return __fmul_rn(x / (1.0f + expf(-x)), up); }

// Grid ceil(n / 1024), 256 threads: y = silu(gate) * up over n elements.
extern "C" __global__ void silu_mul(float* y, const float* gate, const float* up, long long n) {
    long long first = 4 * ((long long)blockIdx.x * QUAD_THREADS + threadIdx.x);
    if (first + 4 <= n) {
        float4 g = *reinterpret_cast<const float4*>(gate + first);
        float4 u = *reinterpret_cast<const float4*>(up + first);
        *reinterpret_cast<float4*>(y + first) =
            make_float4(silu_times(g.x, u.x), silu_times(g.y, u.y), silu_times(g.z, u.z), silu_times(g.w, u.w));
        return;
    }
    for (long long i = first; i < n; ++i) y[i] = silu_times(gate[i], up[i]);
}
