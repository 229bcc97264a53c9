// What experts on the host need, in its own memory: a kernel of the step writes it there, so that no copy is queued and one
// wait is enough.

#include "quads.cuh"

// Grid (rows + 1, ceil(cols / 1024)), 256 threads: to = experts [choices], weights [choices], and x [rows][cols] from element
// `first` on, a multiple of 4.
extern "C" __global__ void hand_over(float* to, const float* experts, const float* weights, const float* x, int choices,
                                     int first, int rows, int cols) {
    int i = blockIdx.x;
    if (i == rows) {
        if (blockIdx.y > 0) return;
        for (int c = threadIdx.x; c < choices; c += QUAD_THREADS) {
            to[c] = experts[c];    // Moved, whatever the bits mean.
            to[choices + c] = weights[c];
        }
        return;
    }
    int c = quad_column();
    if (c >= cols) return;
    long long row = (long long)i * cols;
    store_quad(to + first + row, c, cols, load_quad(x + row, c, cols));
}
