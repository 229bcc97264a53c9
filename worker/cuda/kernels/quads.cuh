// Rows of f32 in quads: each thread takes four neighbouring columns with one 16-byte access if rows are aligned for it.
#pragma once

#include "common.cuh"

constexpr int QUAD_THREADS = 256;
constexpr int QUAD_COLS = 4 * QUAD_THREADS;    // columns of a block

// This thread's first column in a grid of (rows, ceil(cols / QUAD_COLS)) blocks.
__device__ __forceinline__ int quad_column() { return 4 * (int)(blockIdx.y * QUAD_THREADS + threadIdx.x); }

// Loads columns c..c+3 of a row, of which those from `end` on are zero. `aligned`: c, `end` and what is before the row are multiples
// of 4 elements.
__device__ __forceinline__ float4 load_quad(const float* row, int c, int end, bool aligned) {
    if (aligned) return *reinterpret_cast<const float4*>(row + c);
    float4 v = make_float4(row[c], 0.0f, 0.0f, 0.0f);
    if (c + 1 < end) v.y = row[c + 1];
    if (c + 2 < end) v.z = row[c + 2];
    if (c + 3 < end) v.w = row[c + 3];
    return v;
}

// The same for a row of `cols` columns that starts at a multiple of so many elements.
__device__ __forceinline__ float4 load_quad(const float* row, int c, int cols) { return load_quad(row, c, cols, cols % 4 == 0); }

// Stores a quad: columns from `end` on are not written.
__device__ __forceinline__ void store_quad(float* row, int c, int end, bool aligned, float4 v) {
    if (aligned) {
        *reinterpret_cast<float4*>(row + c) = v;
        return;
    }
    row[c] = v.x;
    if (c + 1 < end) row[c + 1] = v.y;
    if (c + 2 < end) row[c + 2] = v.z;
    if (c + 3 < end) row[c + 3] = v.w;
}

__device__ __forceinline__ void store_quad(float* row, int c, int cols, float4 v) { store_quad(row, c, cols, cols % 4 == 0, v); }

// Column c of a row that begins at element `row`.
__device__ __forceinline__ float row_value(const Rows& x, long long row, int c) {
    if (x.segments == 0) return x.values[row + c];
    float total = 0.0f;
    for (int segment = 0; segment < x.segments; ++segment) total = __fadd_rn(total, x.values[segment * x.stride + row + c]);
    return x.bias != nullptr ? __fadd_rn(total, x.bias[c]) : total;
}

__device__ __forceinline__ float4 add_quads(float4 a, float4 b) {
    return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

// Columns c..c+3 of the same, as load_quad.
__device__ __forceinline__ float4 row_quad(const Rows& x, long long row, int c, int end, bool aligned) {
    if (x.segments == 0) return load_quad(x.values + row, c, end, aligned);
    float4 total = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    for (int segment = 0; segment < x.segments; ++segment)
        total = add_quads(total, load_quad(x.values + segment * x.stride + row, c, end, aligned));
    return x.bias != nullptr ? add_quads(total, load_quad(x.bias, c, end, aligned)) : total;
}

__device__ __forceinline__ float4 row_quad(const Rows& x, long long row, int c, int cols) {
    return row_quad(x, row, c, cols, cols % 4 == 0);
}
