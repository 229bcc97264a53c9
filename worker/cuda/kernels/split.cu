// Activations as the B operand of linear.cu and experts.cu (terms.cuh).
#include "terms.cuh"

// Loads columns `col` .. `col + 3` of a row; rows of a multiple of four columns are aligned to 16.
__device__ __forceinline__ void load_columns(float (&v)[4], const float* row, int col, int cols) {
    if (cols % 4 == 0) {
        float4 x = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (col < cols) x = *reinterpret_cast<const float4*>(row + col);
        v[0] = x.x;
        v[1] = x.y;
        v[2] = x.z;
        v[3] = x.w;
    } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = col + i < cols ? row[col + i] : 0.0f;
    }
}

// One warp per row and 128 columns; any one-dimensional grid whose blocks are whole warps.
extern "C" __global__ void split(const float* x, void* terms, float* scales, int rows, int cols, int padded) {
    int lane = threadIdx.x & 31, blocks = padded / BLOCK;
    long long count = (long long)rows * blocks, warps = (long long)gridDim.x * (blockDim.x / 32);
    for (long long item = (long long)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; item < count; item += warps) {
        long long row = item / blocks;
        int col = (int)(item % blocks) * BLOCK + lane * 4;
        float v[4];
        load_columns(v, x + row * cols, col, cols);
        store_terms(terms, scales, v, row, col, rows, padded);
    }
}
