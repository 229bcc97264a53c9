// Rows of f32 in quads: each thread takes four neighbouring columns with one 16-byte access if rows are aligned for it.
#pragma once

#include "common.cuh"

constexpr int QUAD_THREADS = 256;
constexpr int QUAD_COLS = 4 * QUAD_THREADS;    // columns of a block

// This thread's first column in a grid of (rows, ceil(cols / QUAD_COLS)) blocks.
__device__ __forceinline__ int quad_column() { return 4 * (int)(blockIdx.y * QUAD_THREADS + threadIdx.x); }

// Loads columns c..c+3 of a row that starts at a multiple of `cols` elements; columns past `cols` are zero.
__device__ __forceinline__ float4 load_quad(const float* row, int c, int cols) {
    if (cols % 4 == 0) return *reinterpret_cast<const float4*>(row + c);
    float4 v = make_float4(row[c], 0.0f, 0.0f, 0.0f);
    if (c + 1 < cols) v.y = row[c + 1];
    if (c + 2 < cols) v.z = row[c + 2];
    if (c + 3 < cols) v.w = row[c + 3];
    return v;
}

// Stores a quad: columns past `cols` are not written.
__device__ __forceinline__ void store_quad(float* row, int c, int cols, float4 v) {
    if (cols % 4 == 0) {
        *reinterpret_cast<float4*>(row + c) = v;
        return;
    }
    row[c] = v.x;
    if (c + 1 < cols) row[c + 1] = v.y;
    if (c + 2 < cols) row[c + 2] = v.z;
    if (c + 3 < cols) row[c + 3] = v.w;
}
