// Sums of activations.

#include "quads.cuh"

// Grid (rows, ceil(cols / 1024)), 256 threads: y [rows][cols] = x + more, or x alone.
extern "C" __global__ void sum_rows(float* y, Rows x, Rows more, int rows, int cols) {
    int c = quad_column();
    if (c >= cols) return;
    long long at = (long long)blockIdx.x * cols;
    float4 v = row_quad(x, at, c, cols);
    if (more.values != nullptr) v = add_quads(v, row_quad(more, at, c, cols));
    store_quad(y + at, c, cols, v);
}

// The same grid: residual += delta + more, or delta alone.
extern "C" __global__ void add(float* residual, Rows delta, Rows more, int rows, int cols) {
    int c = quad_column();
    if (c >= cols) return;
    long long at = (long long)blockIdx.x * cols;
    float4 v = row_quad(delta, at, c, cols);
    if (more.values != nullptr) v = add_quads(v, row_quad(more, at, c, cols));
    float* to = residual + at;
    store_quad(to, c, cols, add_quads(load_quad(to, c, cols), v));
}
