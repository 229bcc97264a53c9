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

// Grid (rows, ceil(cols / 1024)), 256 threads: y [rows][cols] = x + more, or x alone.
extern "C" __global__ void sum_rows(float* y, Rows x, Rows more, int rows, int cols) {
    int c = quad_column();
    if (c >= cols) return;
    long long at = (long long)blockIdx.x * cols;
    float4 v = row_quad(x, at, c, cols);
    if (more.values != nullptr) v = add_quads(v, row_quad(more, at, c, cols));
    store_quad(y + at, c, cols, v);
}
