// A block's searches over the weights of one row's tokens, for sample.cu.
//
// Tokens rank by their key: weight bits, then the complement of the id, so that all keys differ, a greater weight
// comes first and ties go to the lower id. A set of likeliest tokens is then "all keys from a threshold on", and a
// search finds the threshold digit by digit from the top, with one histogram of the keys that share the digits found so far.
//
// Masses are integers in units of 2^-40, as the engine's sampler defines them (worker/engine/src/sampler/weight.rs): their
// sums are exact in any order, so a block chooses what the host chooses.
#pragma once

#include "common.cuh"

typedef unsigned long long Key;
typedef unsigned long long Mass;

constexpr int SAMPLE_THREADS = 512;
constexpr int SAMPLE_WARPS = SAMPLE_THREADS / 32;
constexpr int DIGITS = 256;
constexpr int FIRST_SHIFT = 55;            // of the first digit: a weight's exponent
constexpr int MASS_BITS = 40;
constexpr Mass NO_MASS = ~0ull;            // more than any sum

struct Weights {
    const float* values;
    int vocab;
};

// Number and mass of the keys in each bin. Keys of one bin share the exponent from the first digit on, and with it the
// shift from mantissa to mass: what is summed are mantissas, of which only those bits count that are in the mass. They
// are kept in halves of 12 bits, so that 2^20 of them fit.
struct Histogram {
    unsigned counts[DIGITS];
    unsigned low[DIGITS];
    unsigned high[DIGITS];
};

struct SelectScratch {
    Histogram histogram;
    Mass sums[SAMPLE_WARPS];
    int bin;
    unsigned count_before;
    Mass mass_before;
};

// Ids begin..end.
struct Range {
    int begin;
    int end;
};

// A warp's part of a range; lane `lane` takes begin + lane, begin + lane + 32, ...
__device__ __forceinline__ Range part_of(const Range& whole, int warp) {
    int length = ((whole.end - whole.begin + SAMPLE_WARPS - 1) / SAMPLE_WARPS + 31) / 32 * 32;
    int begin = min(whole.begin + warp * length, whole.end);
    return {begin, min(begin + length, whole.end)};
}

__device__ __forceinline__ Range own_part(int vocab) { return part_of({0, vocab}, threadIdx.x / 32); }

__device__ __forceinline__ Key key_of(float weight, int id) { return (Key)float_bits(weight) << 32 | ~(unsigned)id; }

// A mantissa without the bits that are below the unit of mass at this exponent field.
__device__ __forceinline__ unsigned counted_mantissa(unsigned weight_bits) {
    int exponent = (int)(weight_bits >> 23), dropped = 150 - MASS_BITS - exponent;
    unsigned mantissa = (weight_bits & 0x7fffffu) | (exponent != 0 ? 0x800000u : 0u);
    if (dropped <= 0) return mantissa;
    return dropped < 24 ? mantissa >> dropped : 0u;
}

// The mass of a sum of counted mantissas.
__device__ __forceinline__ Mass mass_of(Mass mantissas, int exponent) {
    return mantissas << max(exponent + MASS_BITS - 150, 0);
}

__device__ __forceinline__ Mass mass_of(float weight) {
    unsigned bits = float_bits(weight);
    return mass_of(counted_mantissa(bits), (int)(bits >> 23));
}

__device__ __forceinline__ Mass shuffle_xor(Mass x, int mask) {
    unsigned low = __shfl_xor_sync(ALL_LANES, (unsigned)x, mask);
    unsigned high = __shfl_xor_sync(ALL_LANES, (unsigned)(x >> 32), mask);
    return (Mass)high << 32 | low;
}

__device__ __forceinline__ Mass shuffle(Mass x, int lane) {
    unsigned low = __shfl_sync(ALL_LANES, (unsigned)x, lane);
    unsigned high = __shfl_sync(ALL_LANES, (unsigned)(x >> 32), lane);
    return (Mass)high << 32 | low;
}

// Sum of x over this lane and the lower ones.
__device__ __forceinline__ Mass scan_sum(Mass x, int lane) {
    for (int step = 1; step < 32; step *= 2) {
        Mass below = shuffle(x, max(lane - step, 0));
        if (lane >= step) x += below;
    }
    return x;
}

__device__ __forceinline__ Mass warp_sum(Mass x) {
    for (int step = 16; step > 0; step /= 2) x += shuffle_xor(x, step);
    return x;
}

// Each warp's sum, over its part of `whole`, of the masses with keys from `threshold` on, into scratch.sums, between two barriers.
__device__ __forceinline__ void sum_parts(SelectScratch& scratch, const Weights& weights, const Range& whole, Key threshold) {
    __syncthreads();
    Range range = part_of(whole, threadIdx.x / 32);
    Mass sum = 0;
#pragma unroll 4
    for (int id = range.begin + (int)(threadIdx.x % 32); id < range.end; id += 32) {
        float weight = weights.values[id];
        if (key_of(weight, id) >= threshold) sum += mass_of(weight);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) scratch.sums[threadIdx.x / 32] = sum;
    __syncthreads();
}

__device__ __forceinline__ Mass sum_block(SelectScratch& scratch, const Weights& weights, Key threshold) {
    sum_parts(scratch, weights, {0, weights.vocab}, threshold);
    Mass total = 0;
    for (int w = 0; w < SAMPLE_WARPS; ++w) total += scratch.sums[w];
    return total;
}

// Number of keys from `threshold` on.
__device__ __forceinline__ unsigned count_block(SelectScratch& scratch, const Weights& weights, Key threshold) {
    Range range = own_part(weights.vocab);
    if (threadIdx.x == 0) scratch.count_before = 0;
    __syncthreads();
    unsigned count = 0;
#pragma unroll 4
    for (int id = range.begin + (int)(threadIdx.x % 32); id < range.end; id += 32) {
        count += key_of(weights.values[id], id) >= threshold;
    }
    for (int step = 16; step > 0; step /= 2) count += __shfl_xor_sync(ALL_LANES, count, step);
    if (threadIdx.x % 32 == 0) atomicAdd(&scratch.count_before, count);
    __syncthreads();
    unsigned total = scratch.count_before;
    __syncthreads();
    return total;
}

// Fills the histogram with the keys from `floor` on that equal `prefix` above the digit at `shift`.
// Masses are skipped if only the count matters.
__device__ __forceinline__ void fill_histogram(
    Histogram& histogram, const Weights& weights, Key floor, Key prefix, int shift, int digit_bits, bool by_mass) {
    for (int i = threadIdx.x; i < DIGITS; i += SAMPLE_THREADS) {
        histogram.counts[i] = 0;
        histogram.low[i] = 0;
        histogram.high[i] = 0;
    }
    __syncthreads();
    Range range = own_part(weights.vocab);
    Key above = prefix >> shift >> digit_bits;
#pragma unroll 4
    for (int id = range.begin + (int)(threadIdx.x % 32); id < range.end; id += 32) {
        Key key = key_of(weights.values[id], id);
        if (key < floor || key >> shift >> digit_bits != above) continue;
        int bin = (int)(key >> shift) & ((1 << digit_bits) - 1);
        atomicAdd(&histogram.counts[bin], 1u);
        if (!by_mass) continue;
        unsigned mantissa = counted_mantissa((unsigned)(key >> 32));
        atomicAdd(&histogram.low[bin], mantissa & 0xfffu);
        atomicAdd(&histogram.high[bin], mantissa >> 12);
    }
    __syncthreads();
}

__device__ __forceinline__ Mass bin_mass(const Histogram& histogram, int bin, Key prefix, int shift) {
    int exponent = shift == FIRST_SHIFT ? bin : (int)(prefix >> FIRST_SHIFT);
    return mass_of(((Mass)histogram.high[bin] << 12) + histogram.low[bin], exponent);
}

// One warp's choice of the bin, from the greatest key down, in which count or mass is reached; if none, the last that
// holds a key. `bin` becomes -1 if the histogram is empty. Each lane adds up eight bins,
// and the lane in which it is reached walks them again.
__device__ __forceinline__ void choose_bin(SelectScratch& scratch, unsigned count, Mass mass, Key prefix, int shift) {
    constexpr int LANE_BINS = DIGITS / 32;
    const Histogram& histogram = scratch.histogram;
    int lane = threadIdx.x;
    int top = DIGITS - 1 - lane * LANE_BINS;
    unsigned own_count = 0;
    Mass own_mass = 0;
    for (int bin = top; bin > top - LANE_BINS; --bin) {
        own_count += histogram.counts[bin];
        own_mass += bin_mass(histogram, bin, prefix, shift);
    }
    unsigned count_here = scratch.count_before;
    Mass mass_here = scratch.mass_before;
    count_here += (unsigned)scan_sum(own_count, lane) - own_count;
    mass_here += scan_sum(own_mass, lane) - own_mass;
    bool reached = own_count > 0 && (count_here + own_count >= count || mass_here + own_mass >= mass);
    unsigned holders = __ballot_sync(ALL_LANES, own_count > 0);
    unsigned lanes = __ballot_sync(ALL_LANES, reached);
    int chosen = lanes != 0 ? __ffs(lanes) - 1 : 31 - __clz(holders);
    __syncwarp();
    if (lane == 0 && holders == 0) scratch.bin = -1;
    if (lane != chosen) return;
    for (int bin = top; bin > top - LANE_BINS; --bin) {
        if (histogram.counts[bin] == 0) continue;
        scratch.bin = bin;
        scratch.count_before = count_here;
        scratch.mass_before = mass_here;
        count_here += histogram.counts[bin];
        mass_here += bin_mass(histogram, bin, prefix, shift);
        if (count_here >= count || mass_here >= mass) break;
    }
}

// The key at which, counted from the greatest down, `count` keys or `mass` of weight are reached, of those from
// `floor` on; the least of them if neither is reached. NO_MASS is never reached. The search ends
// early when the current bin holds one key, or exactly the missing keys.
__device__ __forceinline__ Key select_threshold(SelectScratch& scratch, const Weights& weights, Key floor, unsigned count, Mass mass) {
    if (threadIdx.x == 0) {
        scratch.count_before = 0;
        scratch.mass_before = 0;
    }
    bool by_mass = mass != NO_MASS;
    Key prefix = 0;
    int shift = 63;
    while (shift > 0) {
        int digit_bits = shift == 39 ? 7 : 8;
        shift -= digit_bits;
        fill_histogram(scratch.histogram, weights, floor, prefix, shift, digit_bits, by_mass);
        if (threadIdx.x < 32) choose_bin(scratch, count, mass, prefix, shift);
        __syncthreads();
        if (scratch.bin < 0) return floor;
        prefix |= (Key)scratch.bin << shift;
        unsigned held = scratch.histogram.counts[scratch.bin];
        bool done = held == 1 || scratch.count_before + held == count;
        __syncthreads();
        if (done) break;
    }
    return max(prefix, floor);
}
