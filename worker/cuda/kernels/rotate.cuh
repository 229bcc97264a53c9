// Rotary position embedding: a pair of elements of a head is rotated by position * inv_freq.
#pragma once

#include "common.cuh"

// Elements of a pair, (i, i + pairs) or (2i, 2i + 1).
__device__ __forceinline__ int first_of_pair(int pair, bool interleaved) { return interleaved ? 2 * pair : pair; }
__device__ __forceinline__ int second_of_pair(int pair, int pairs, bool interleaved) { return interleaved ? 2 * pair + 1 : pair + pairs; }

struct Turn {
    float cosine;
    float sine;
};

__device__ __forceinline__ Turn turn_of(unsigned position, float inv_freq, float magnitude) {
    float angle = __fmul_rn((float)position, inv_freq);
    return {__fmul_rn(cosf(angle), magnitude), __fmul_rn(sinf(angle), magnitude)};
}

// Products are rounded before they are added, as the specification does.
__device__ __forceinline__ void rotate(float& a, float& b, Turn turn) {
    float first = __fadd_rn(__fmul_rn(a, turn.cosine), -__fmul_rn(b, turn.sine));
    b = __fadd_rn(__fmul_rn(b, turn.cosine), __fmul_rn(a, turn.sine));
    a = first;
}
