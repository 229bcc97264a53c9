// Column ranges of a row's groups, split and joined.

#include "quads.cuh"

// Four columns are copied at once if no group begins or ends inside them, else one.
__device__ __forceinline__ void copy_columns(float* to, const float* from, bool quads) {
    if (quads) {
        *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
    } else {
        *to = *from;
    }
}

// Grid (rows, ceil(groups * cols / 1024)), 256 threads: y [rows][groups][cols] are columns first..first+cols of each
// group of x [rows][groups][width].
extern "C" __global__ void columns(float* y, const float* x, int rows, int groups, int width, int first, int cols) {
    int row = blockIdx.x;
    int start = quad_column();
    if (row >= rows) return;
    bool quads = (width | first | cols) % 4 == 0;
    const float* in = x + (long long)row * groups * width;
    float* out = y + (long long)row * groups * cols;
    int end = min(start + 4, groups * cols);
    for (int i = start; i < end; i += quads ? 4 : 1) {
        copy_columns(out + i, in + i / cols * width + first + i % cols, quads);
    }
}

// Grid (rows, ceil(groups * (a_cols + b_cols) / 1024)), 256 threads: y [rows][groups][a_cols +
// b_cols] is each group of a followed by that of b.
extern "C" __global__ void interleave(float* y, const float* a, const float* b, int rows, int groups, int a_cols, int b_cols) {
    int row = blockIdx.x;
    int start = quad_column();
    if (row >= rows) return;
    bool quads = (a_cols | b_cols) % 4 == 0;
    int width = a_cols + b_cols;
    const float* in_a = a + (long long)row * groups * a_cols;
    const float* in_b = b + (long long)row * groups * b_cols;
    float* out = y + (long long)row * groups * width;
    int end = min(start + 4, groups * width);
    for (int i = start; i < end; i += quads ? 4 : 1) {
        int group = i / width;
        int c = i % width;
        copy_columns(out + i, c < a_cols ? in_a + group * a_cols + c : in_b + group * b_cols + c - a_cols, quads);
    }
}
