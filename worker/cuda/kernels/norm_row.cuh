// The norm of a group of columns, which is also stored as products take it if the group is a row (terms.cuh).
#pragma once

#include "norm.cuh"
#include "terms.cuh"

struct NormOut {
    float* y;
    void* terms;       // null: none
    float* scales;
    long long groups;
    int padded;
};

// Normalises one group with `width` lanes, of which this is lane `lane`: x, or with ADD the sum of the residual, x and `more`,
// which is stored in the residual. In the second pass each lane reads only columns that it wrote itself in the first.
template <bool ADD>
__device__ __forceinline__ void norm_group(
    const NormOut& out, float* residual, const Rows& x, const Rows& more, const float* weight, float eps, long long group, int cols,
    int lane, int width) {
    long long at = group * cols;
    float squares = 0.0f;
    for (int c = 4 * lane; c < cols; c += 4 * width) {
        float4 v = row_quad(x, at, c, cols);
        if (ADD) {
            if (more.values != nullptr) v = add_quads(v, row_quad(more, at, c, cols));
            v = add_quads(load_quad(residual + at, c, cols), v);
            store_quad(residual + at, c, cols, v);
        }
        add_squares(squares, v);
    }
    float total = width == 32 ? warp_sum(squares) : block_sum(squares);
    float inverse = inverse_norm(total, eps, cols);
    int end = out.terms != nullptr ? out.padded : cols;
    for (int c = 4 * lane; c < end; c += 4 * width) {
        float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (c < cols) {
            v = ADD ? load_quad(residual + at, c, cols) : row_quad(x, at, c, cols);
            v = normed(v, inverse, load_quad(weight, c, cols));
            store_quad(out.y + at, c, cols, v);
        }
        if (out.terms != nullptr) store_terms(out.terms, out.scales, v, group, c, out.groups, out.padded);
    }
}
