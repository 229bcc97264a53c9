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

// Grid (rows, ceil(cols / 1024)), 256 threads: adds bias [cols] to each row of x.
extern "C" __global__ void add_bias(float* x, const float* bias, int rows, int cols) {
    int row = blockIdx.x;
    int c = quad_column();
    if (row >= rows || c >= cols) return;
    float* out = x + (long long)row * cols;
    float4 sum = load_quad(out, c, cols);
    float4 b = load_quad(bias, c, cols);
    sum.x += b.x;
    sum.y += b.y;
    sum.z += b.z;
    sum.w += b.w;
    store_quad(out, c, cols, sum);
}
