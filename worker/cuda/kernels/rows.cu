// Rows of a matrix in a given order, and a tile that goes into another one.

#include "quads.cuh"

// Grid (count, ceil(cols / 1024)), 256 threads: y [count][cols], row i is row rows[i] of x.
extern "C" __global__ void gather_rows(float* y, const float* x, const unsigned* rows, int count, int cols) {
    int i = blockIdx.x;
    int c = quad_column();
    if (i >= count || c >= cols) return;
    store_quad(y + (long long)i * cols, c, cols, load_quad(x + (long long)rows[i] * cols, c, cols));
}

// Grid (count, ceil(cols / 1024)), 256 threads: columns first..first+cols of y [count][width] = x [count][cols].
extern "C" __global__ void put_tile(float* y, const float* x, int count, int cols, int width, int first) {
    int i = blockIdx.x;
    int c = quad_column();
    if (i >= count || c >= cols) return;
    bool aligned = (cols | width | first) % 4 == 0;
    store_quad(y + (long long)i * width + first, c, cols, aligned, load_quad(x + (long long)i * cols, c, cols, aligned));
}
