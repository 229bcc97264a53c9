// Choice of a token for each row of logits, as the engine's sampler defines it: bias, repetition, frequency and
// presence penalties, mask, temperature, top_k, top_p among the remaining tokens, min_p, and the draw among the kept
// tokens in ascending order at the host's quantile.

#include "sample.cuh"
#include "select.cuh"

constexpr float LARGEST = 3.402823466e38f;

// A logit and its token; of equal logits the lower token is better.
struct Best {
    float value;
    int id;
};

struct SampleScratch {
    SelectScratch select;
    Best bests[SAMPLE_WARPS];
    int fault;
};

__device__ __forceinline__ Best better(Best a, Best b) {
    return b.value > a.value || (b.value == a.value && b.id < a.id) ? b : a;
}

// Keeps an adjusted logit finite, however large bias and penalty are.
__device__ __forceinline__ float finite(float x) { return fminf(fmaxf(x, -LARGEST), LARGEST); }

// The best over all threads; ends with a barrier.
__device__ __forceinline__ Best best_of_block(SampleScratch& scratch, Best best) {
    for (int step = 16; step > 0; step /= 2) {
        Best other = {__shfl_xor_sync(ALL_LANES, best.value, step), __shfl_xor_sync(ALL_LANES, best.id, step)};
        best = better(best, other);
    }
    if (threadIdx.x % 32 == 0) scratch.bests[threadIdx.x / 32] = best;
    __syncthreads();
    for (int w = 0; w < SAMPLE_WARPS; ++w) best = better(best, scratch.bests[w]);
    __syncthreads();
    return best;
}

// The largest raw logit. Copies the logits if `copy` is not null; fault becomes 1 + the first token whose logit is not finite.
__device__ __forceinline__ Best scan_logits(SampleScratch& scratch, float* copy, const float* logits, int vocab) {
    Range range = own_part(vocab);
    Best best = {bits_float(0xff800000u), vocab};
    if (threadIdx.x == 0) scratch.fault = vocab;
    __syncthreads();
    int fault = vocab;
#pragma unroll 8
    for (int id = range.begin + (int)(threadIdx.x % 32); id < range.end; id += 32) {
        float logit = logits[id];
        if (!isfinite(logit)) fault = min(fault, id);
        if (copy) copy[id] = logit;
        best = better(best, {logit, id});
    }
    if (fault < vocab) atomicMin(&scratch.fault, fault);
    return best_of_block(scratch, best);
}

// Applies bias and penalties of the listed tokens; z holds the raw logits. Barriers before and after.
__device__ __forceinline__ void adjust(float* z, const SampleRow& row, const UsedToken* used, const TokenBias* biases, int vocab) {
    for (int i = threadIdx.x; i < row.bias_count; i += SAMPLE_THREADS) {
        TokenBias entry = biases[row.first_bias + i];
        if (entry.token < (unsigned)vocab) z[entry.token] = finite(__fadd_rn(z[entry.token], entry.bias));
    }
    __syncthreads();
    for (int i = threadIdx.x; i < row.used_count; i += SAMPLE_THREADS) {
        UsedToken entry = used[row.first_used + i];
        if (entry.token >= (unsigned)vocab) continue;
        float logit = z[entry.token];
        if (row.repetition_penalty != 1.0f) {
            float factor = logit > 0.0f ? 1.0f / row.repetition_penalty : row.repetition_penalty;
            logit = finite(__fmul_rn(logit, factor));
        }
        if (entry.answer_count > 0 && (row.frequency_penalty != 0.0f || row.presence_penalty != 0.0f)) {
            float frequency = __fmul_rn(row.frequency_penalty, (float)entry.answer_count);
            logit = finite(__fadd_rn(__fadd_rn(logit, -frequency), -row.presence_penalty));
        }
        z[entry.token] = logit;
    }
    __syncthreads();
}

// The largest adjusted logit; tokens that the mask forbids become -inf.
__device__ __forceinline__ Best scan_adjusted(SampleScratch& scratch, float* z, const SampleRow& row, const unsigned* masks, int vocab) {
    Range range = own_part(vocab);
    Best best = {bits_float(0xff800000u), vocab};
#pragma unroll 4
    for (int id = range.begin + (int)(threadIdx.x % 32); id < range.end; id += 32) {
        float logit = z[id];
        if (row.mask_words >= 0) {
            unsigned word = id / 32 < row.mask_words ? masks[row.first_mask_word + id / 32] : 0;
            if ((word >> id % 32 & 1) == 0) {
                logit = bits_float(0xff800000u);
                z[id] = logit;
            }
        }
        best = better(best, {logit, id});
    }
    return best_of_block(scratch, best);
}

// e^x for x <= 0 as x = n ln 2 + r and the series of e^r, by single operations that are rounded as the host's are.
__device__ __forceinline__ float exp_of(float x) {
    constexpr float LEAST = -86.0f;              // below, the result is 0
    constexpr float ROUND = 12582912.0f;         // its sum with a small number rounds that to an integer
    constexpr float LOG2_E = 1.44269504f;
    constexpr float LN2_HIGH = 0.693359375f, LN2_LOW = -2.1219444e-4f;
    constexpr float SERIES[] = {1.0f / 5040.0f, 1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f, 1.0f};
    if (x < LEAST) return 0.0f;
    float n = __fsub_rn(__fadd_rn(__fmul_rn(x, LOG2_E), ROUND), ROUND);
    float r = __fsub_rn(__fsub_rn(x, __fmul_rn(n, LN2_HIGH)), __fmul_rn(n, LN2_LOW));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum = __fadd_rn(__fmul_rn(sum, r), SERIES[i]);
    return __fmul_rn(sum, bits_float((unsigned)((int)n + 127) << 23));
}

// Probabilities relative to the likeliest token's, as the sampler's `weight` computes them.
__device__ __forceinline__ void weigh(float* weights, const float* adjusted, float largest, float temperature, int vocab) {
    Range range = own_part(vocab);
#pragma unroll 4
    for (int id = range.begin + (int)(threadIdx.x % 32); id < range.end; id += 32)
        weights[id] = exp_of(__fdiv_rn(__fsub_rn(adjusted[id], largest), temperature));
    __syncthreads();
}

// The share top_p < 1 of a mass, rounded down, as the sampler's `share`.
__device__ __forceinline__ Mass share_of(Mass total, float top_p) {
    Mass units = __float2uint_rz(__fmul_rn(top_p, 4294967296.0f));
    return (total >> 32) * units + ((total & 0xffffffffull) * units >> 32);
}

// The key from which tokens are kept: positive weights, then top_k, top_p among those, min_p.
__device__ __forceinline__ Key filter(SelectScratch& scratch, const Weights& weights, const SampleRow& row) {
    constexpr unsigned NO_COUNT = 0xffffffffu;
    Key threshold = (Key)1 << 32;
    if (row.top_k > 0 && row.top_k < (unsigned)weights.vocab) {
        threshold = select_threshold(scratch, weights, threshold, row.top_k, NO_MASS);
    }
    if (row.top_p < 1.0f) {
        Mass total = sum_block(scratch, weights, threshold);
        Mass wanted = share_of(total, row.top_p);
        // Tokens below this mass have less than the rest together, so the search need not count them.
        Mass least = (total - wanted) / count_block(scratch, weights, threshold);
        float weight = __fmul_rn(__ull2float_rz(least), bits_float((127u - MASS_BITS) << 23));
        Key floor = max(threshold, (Key)float_bits(weight) << 32);
        threshold = select_threshold(scratch, weights, floor, NO_COUNT, wanted);
    }
    if (row.min_p > 0.0f) threshold = max(threshold, (Key)float_bits(row.min_p) << 32);
    return threshold;
}

// By one warp: the first kept token of the range at which the running sum exceeds the point.
__device__ __forceinline__ int draw_in_range(const Weights& weights, const Range& range, Key threshold, Mass sum, Mass point) {
    int lane = threadIdx.x % 32;
    for (int first = range.begin; first < range.end; first += 32) {
        int id = first + lane;
        float weight = id < range.end ? weights.values[id] : 0.0f;
        bool kept = id < range.end && key_of(weight, id) >= threshold;
        Mass running = sum + scan_sum(kept ? mass_of(weight) : 0, lane);
        unsigned reached = __ballot_sync(ALL_LANES, kept && running > point);
        if (reached != 0) return first + __ffs(reached) - 1;
        sum = shuffle(running, 31);
    }
    return 0;
}

// Draws at the quantile, in units of 2^-64: twice, the range is cut into the warps' parts, and the part in which the
// running sum exceeds the point is taken; the likeliest token is kept, so there is one. Then one warp walks the remaining
// range.
__device__ __forceinline__ void draw(unsigned* token, SelectScratch& scratch, const Weights& weights, Key threshold, Mass quantile) {
    Mass point = __umul64hi(quantile, sum_block(scratch, weights, threshold));
    Mass before = 0;
    Range range = {0, weights.vocab};
    for (int level = 0; level < 2; ++level) {
        sum_parts(scratch, weights, range, threshold);
        int chosen = 0;
        while (chosen < SAMPLE_WARPS - 1 && before + scratch.sums[chosen] <= point) before += scratch.sums[chosen++];
        range = part_of(range, chosen);
    }
    if (threadIdx.x >= 32) return;
    int id = draw_in_range(weights, range, threshold, before, point);
    if (threadIdx.x == 0) *token = (unsigned)id;
}

// Grid rows, 512 threads; vocab <= 2^20. logits [rows][vocab] are not modified; scratch [rows][vocab]. Row r's token
// is written to token[r] and fault[r] is 0; fault[r] is 1 + the first token whose logit is not finite, which then follows
// in fault[rows + r], or -1 if the mask leaves no token, and token[r] is then 0.
extern "C" __global__ void __launch_bounds__(SAMPLE_THREADS, 1) sample(
    unsigned* token, int* fault, const float* logits, float* scratch, int vocab, const SampleRow* rows, const UsedToken* used,
    const TokenBias* biases, const unsigned* masks) {
    __shared__ SampleScratch shared;
    SampleRow row = rows[blockIdx.x];
    const float* raw = logits + (long long)blockIdx.x * vocab;
    float* weights = scratch + (long long)blockIdx.x * vocab;
    bool adjusts = row.used_count > 0 || row.bias_count > 0 || row.mask_words >= 0;
    Best best = scan_logits(shared, adjusts ? weights : nullptr, raw, vocab);
    int bad = shared.fault < vocab ? shared.fault + 1 : 0;
    if (bad == 0 && adjusts) {
        adjust(weights, row, used, biases, vocab);
        best = scan_adjusted(shared, weights, row, masks, vocab);
        if (!(best.value > bits_float(0xff800000u))) bad = -1;
    }
    if (bad != 0 || row.temperature == 0.0f) {
        if (threadIdx.x == 0) {
            token[blockIdx.x] = bad == 0 ? (unsigned)best.id : 0u;
            fault[blockIdx.x] = bad;
            fault[gridDim.x + blockIdx.x] = bad > 0 ? (int)float_bits(raw[bad - 1]) : 0;
        }
        return;
    }
    if (threadIdx.x == 0) fault[blockIdx.x] = fault[gridDim.x + blockIdx.x] = 0;
    weigh(weights, adjusts ? weights : raw, best.value, row.temperature, vocab);
    Weights all = {weights, vocab};
    Key threshold = filter(shared.select, all, row);
    draw(&token[blockIdx.x], shared.select, all, threshold, row.quantile);
}
