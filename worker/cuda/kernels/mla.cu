// Latent attention's up-projections of each head: the queries into the latent space (absorb), and the latents out of it (expand).
//
// Both are products out[r][h][n] = Σ_k x[r][h][k] w[k][n] in f32, one chain of fmaf over ascending k for each output. The rows of
// head h in kv_b [heads * (nope + v)][rank] are nope rows of keys, then v rows of values. Absorbing takes w[k][n] from row k, column
// n of the keys; expanding takes it from row n, column k of the values.
//
// A block handles one head, 64 outputs and 32 rows; a thread sums 4 outputs of 4 rows. Weights are converted to f32
// once per block, in steps of 32 k; the next step's are being loaded while this one is summed.

#include "quads.cuh"
#include "rotate.cuh"
#include "terms.cuh"
#include "weight_element.cuh"

constexpr int MLA_THREADS = 128;
constexpr int MLA_OUTPUTS = 64;
constexpr int MLA_ROWS = 32;
constexpr int MLA_STEP = 32;
constexpr int MLA_QUADS = MLA_STEP * MLA_OUTPUTS / 4 / MLA_THREADS;            // weight quads of a thread in one step
constexpr int MLA_INPUTS = MLA_STEP * MLA_ROWS / MLA_THREADS;                  // inputs of a thread in one step
// Pitches are whole quads, to keep quads aligned, and not multiples of 32 banks, so that columns do not all fall into one.
constexpr int MLA_PITCH = MLA_OUTPUTS + 4;
constexpr int MLA_INPUT_PITCH = MLA_ROWS + 4;
// Blocks on a multiprocessor: with a fourth, a thread that converts FP8 and stores terms would spill registers.
constexpr int EXPAND_BLOCKS = WEIGHT_TYPE == WEIGHTS_FP8 ? 3 : 4;

struct MlaShape {
    int heads;
    int head;
    int first_row;     // of kv_b, of this head's part
    int k_count;
    int n_count;
    int rows;
    int in_pitch;      // elements of a row of inputs, and before this head's
    int in_first;
    int out_pitch;     // the same of outputs
    int out_first;
};

struct MlaTile {
    float weights[MLA_STEP][MLA_PITCH];
    float inputs[MLA_STEP][MLA_INPUT_PITCH];
};

// One thread's share of a step, on its way to shared memory.
struct MlaStep {
    StoredQuad weights[MLA_QUADS];
    float inputs[MLA_INPUTS];
};

// Location of this thread's quad `u` of a step in the step's part of kv_b: rows of k by columns of n to absorb, the
// reverse to expand. Neighbouring threads take neighbouring columns.
struct Place {
    int row;
    int col;
};

template <bool EXPAND>
__device__ __forceinline__ Place quad_place(int u) {
    constexpr int ROW_QUADS = (EXPAND ? MLA_STEP : MLA_OUTPUTS) / 4;
    return {(int)threadIdx.x / ROW_QUADS + u * (MLA_THREADS / ROW_QUADS), (int)threadIdx.x % ROW_QUADS * 4};
}

// Elements past the matrix are zero, in both weights and inputs.
template <bool EXPAND>
__device__ __forceinline__ void fetch_step(MlaStep& step, const Rows& x, const Weight& kv_b, const MlaShape& shape, int first_k) {
    int first_n = blockIdx.y * MLA_OUTPUTS;
    int rows = EXPAND ? shape.n_count - first_n : shape.k_count - first_k;
    int cols = EXPAND ? shape.k_count - first_k : shape.n_count - first_n;
    int first_row = shape.first_row + (EXPAND ? first_n : first_k);
    int first_col = EXPAND ? first_k : first_n;
#pragma unroll
    for (int u = 0; u < MLA_QUADS; ++u) {
        Place at = quad_place<EXPAND>(u);
        step.weights[u] = {};
        if (at.row < rows && at.col < cols) step.weights[u] = stored_quad(kv_b, first_row + at.row, first_col + at.col);
    }
    int k = first_k + threadIdx.x % MLA_STEP;
    int row = blockIdx.z * MLA_ROWS + threadIdx.x / MLA_STEP;
#pragma unroll
    for (int u = 0; u < MLA_INPUTS; ++u) step.inputs[u] = 0.0f;
    if (k >= shape.k_count) return;
#pragma unroll
    for (int u = 0; u < MLA_INPUTS; ++u) {
        int at = row + u * (MLA_THREADS / MLA_STEP);
        if (at >= shape.rows) break;
        long long first = (long long)at * shape.in_pitch;
        // Without partial sums nothing follows the load, so that it is not waited for here.
        if (x.segments == 0) {
            step.inputs[u] = x.values[first + shape.in_first + k];
        } else {
            step.inputs[u] = row_value(x, first, shape.in_first + k);
        }
    }
}

template <bool EXPAND>
__device__ __forceinline__ void store_step(MlaTile& tile, const MlaStep& step) {
#pragma unroll
    for (int u = 0; u < MLA_QUADS; ++u) {
        Place at = quad_place<EXPAND>(u);
        float4 w = quad_value(step.weights[u]);
        if (EXPAND) {
            tile.weights[at.col][at.row] = w.x;
            tile.weights[at.col + 1][at.row] = w.y;
            tile.weights[at.col + 2][at.row] = w.z;
            tile.weights[at.col + 3][at.row] = w.w;
        } else {
            *reinterpret_cast<float4*>(&tile.weights[at.row][at.col]) = w;
        }
    }
#pragma unroll
    for (int u = 0; u < MLA_INPUTS; ++u) {
        tile.inputs[threadIdx.x % MLA_STEP][threadIdx.x / MLA_STEP + u * (MLA_THREADS / MLA_STEP)] = step.inputs[u];
    }
}

// Adds a step to the sums of 4 outputs by 4 rows. Both loads are 16 bytes; lanes of equal rows read the same inputs.
__device__ __forceinline__ void sum_step(float (&sums)[4][4], const MlaTile& tile, int n, int row) {
#pragma unroll 4
    for (int k = 0; k < MLA_STEP; ++k) {
        float4 w = *reinterpret_cast<const float4*>(&tile.weights[k][n]);
        float4 x = *reinterpret_cast<const float4*>(&tile.inputs[k][row]);
        const float inputs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int r = 0; r < 4; ++r) {
            sums[r][0] = fmaf(inputs[r], w.x, sums[r][0]);
            sums[r][1] = fmaf(inputs[r], w.y, sums[r][1]);
            sums[r][2] = fmaf(inputs[r], w.z, sums[r][2]);
            sums[r][3] = fmaf(inputs[r], w.w, sums[r][3]);
        }
    }
}

template <bool EXPAND>
__device__ __forceinline__ void project(float* out, void* terms, int padded, const Rows& x, const Weight& kv_b, const MlaShape& shape) {
    __shared__ MlaTile tile;
    int n = threadIdx.x % (MLA_OUTPUTS / 4) * 4;
    int row = threadIdx.x / (MLA_OUTPUTS / 4) * 4;
    bool has_rows = (int)blockIdx.z * MLA_ROWS + row < shape.rows;
    float sums[4][4] = {};
    MlaStep step;
    fetch_step<EXPAND>(step, x, kv_b, shape, 0);
    for (int first_k = 0; first_k < shape.k_count; first_k += MLA_STEP) {
        __syncthreads();
        store_step<EXPAND>(tile, step);
        __syncthreads();
        if (first_k + MLA_STEP < shape.k_count) fetch_step<EXPAND>(step, x, kv_b, shape, first_k + MLA_STEP);
        if (has_rows) sum_step(sums, tile, n, row);
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
        int at = blockIdx.z * MLA_ROWS + row + r;
        int first = blockIdx.y * MLA_OUTPUTS + n;
        if (at >= shape.rows) continue;
        float* to = out + (long long)at * shape.out_pitch + shape.out_first;
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (first + c < shape.n_count) to[first + c] = sums[r][c];
        if (terms == nullptr) continue;
        if (shape.n_count % 4 == 0) {
            if (first < shape.n_count) store_terms(terms, nullptr, sums[r], at, shape.out_first + first, shape.rows, padded);
            continue;
        }
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (first + c < shape.n_count) store_term(terms, sums[r][c], at, shape.out_first + first + c, shape.rows, padded);
    }
}

// The columns of the terms past the last head's are zeros: one block of each 32 rows writes them.
__device__ __forceinline__ void pad_terms(void* terms, int rows, int cols, int padded) {
    if (terms == nullptr || blockIdx.x + 1 != gridDim.x || blockIdx.y + 1 != gridDim.y) return;
    int count = padded - cols;
    for (int i = threadIdx.x; i < MLA_ROWS * count; i += MLA_THREADS) {
        int row = blockIdx.z * MLA_ROWS + i / count;
        if (row < rows) store_term(terms, 0.0f, row, cols + i % count, rows, padded);
    }
}

// The rotated part of one head's queries for 32 rows.
__device__ __forceinline__ void rotate_queries(
    float* query, const Rows& q, const MlaShape& shape, const unsigned* positions, const float* inv_freq, float magnitude, bool interleaved,
    int rotated, int pairs) {
    int items = rotated - pairs, from = shape.in_first + shape.k_count;
    for (int i = threadIdx.x; i < MLA_ROWS * items; i += MLA_THREADS) {
        int row = blockIdx.z * MLA_ROWS + i / items, item = i % items;
        if (row >= shape.rows) return;
        long long at = (long long)row * shape.in_pitch;
        float* to = query + (long long)row * shape.out_pitch + shape.out_first + shape.n_count;
        if (item >= pairs) {
            to[pairs + item] = row_value(q, at, from + pairs + item);
            continue;
        }
        int first = first_of_pair(item, interleaved), second = second_of_pair(item, pairs, interleaved);
        float a = row_value(q, at, from + first), b = row_value(q, at, from + second);
        rotate(a, b, turn_of(positions[row], inv_freq[item], magnitude));
        to[first] = a;
        to[second] = b;
    }
}

// Grid (heads, ceil(rank / 64), ceil(rows / 32)), 128 threads: q_nope [rows][heads][nope] -> q_latent [rows][heads][rank].
extern "C" __global__ void __launch_bounds__(MLA_THREADS, 4) mla_absorb(
    float* q_latent, Rows q_nope, Weight kv_b, int rows, int heads, int nope, int v, int rank) {
    int head = blockIdx.x;
    MlaShape shape = {heads, head, head * (nope + v), nope, rank, rows, heads * nope, head * nope, heads * rank, head * rank};
    project<false>(q_latent, nullptr, 0, q_nope, kv_b, shape);
}

// Grid (heads, ceil(rank / 64) + 1, ceil(rows / 32)), 128 threads: q [rows][heads][nope + rotated] -> query [rows][heads][rank +
// rotated], the first part absorbed, and of the other one the first 2 * pairs elements rotated.
extern "C" __global__ void __launch_bounds__(MLA_THREADS, 4) mla_query(
    float* query, Rows q, Weight kv_b, const unsigned* positions, const float* inv_freq, float magnitude, int interleaved, int rows,
    int heads, int nope, int v, int rank, int rotated, int pairs) {
    int head = blockIdx.x, in = nope + rotated, out = rank + rotated;
    MlaShape shape = {heads, head, head * (nope + v), nope, rank, rows, heads * in, head * in, heads * out, head * out};
    if (blockIdx.y + 1 == gridDim.y) {
        rotate_queries(query, q, shape, positions, inv_freq, magnitude, interleaved != 0, rotated, pairs);
    } else {
        project<false>(query, nullptr, 0, q, kv_b, shape);
    }
}

// Grid (heads, ceil(v / 64), ceil(rows / 32)), 128 threads: latent [rows][heads][rank] -> out [rows][heads][v], and its terms as
// split.cu writes them if `terms` is not null.
extern "C" __global__ void __launch_bounds__(MLA_THREADS, EXPAND_BLOCKS) mla_expand(
    float* out, void* terms, Rows latent, Weight kv_b, int rows, int heads, int nope, int v, int rank, int padded) {
    int head = blockIdx.x;
    MlaShape shape = {heads, head, head * (nope + v) + nope, rank, v, rows, heads * rank, head * rank, heads * v, head * v};
    project<true>(out, terms, padded, latent, kv_b, shape);
    pad_terms(terms, rows, heads * v, padded);
}
