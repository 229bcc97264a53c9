// The gate of a SwiGLU feed-forward block.

#include "quads.cuh"
#include "terms.cuh"

// x * sigmoid(x) * up. A large negative x has an infinite exponential, and the quotient is then zero, as it should be.
__device__ __forceinline__ float silu_times(float x, float up) { return __fmul_rn(x / (1.0f + expf(-x)), up); }

// Grid (rows, ceil(padded / 1024)), 256 threads: y = silu(gate) * up over [rows][cols], and its terms as split.cu writes them.
extern "C" __global__ void silu_mul(float* y, void* terms, float* scales, Rows gate, Rows up, int rows, int cols, int padded) {
    int c = quad_column();
    // Whole warps leave: padded is a multiple of their columns.
    if (c >= padded) return;
    long long row = blockIdx.x, at = row * cols;
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (c < cols) {
        float4 g = row_quad(gate, at, c, cols);
        float4 u = row_quad(up, at, c, cols);
        v = make_float4(silu_times(g.x, u.x), silu_times(g.y, u.y), silu_times(g.z, u.z), silu_times(g.w, u.w));
        // The gate of a column that does not exist is zero, and so is the product.
        store_quad(y + at, c, cols, v);
    }
    store_terms(terms, scales, v, row, c, rows, padded);
}
