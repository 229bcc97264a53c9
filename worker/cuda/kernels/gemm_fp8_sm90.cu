// FP8 weights times FP8 activations by wgmma, which only sm_90a has: elsewhere, and in the host model, this file is empty. Parameters and
// result are those of linear_decode, for any number of rows; a block has 128 outputs and 128 tokens: grid (ceil(n / 128), ceil(rows / 128),
// segments or 1), 256 threads, SHARED_BYTES of dynamic shared memory. With gridDim.z > 1 each z computes one segment into `partials`.
//
// Copies are cp.async and waits are for groups and barriers of the block, so no wait depends on a count that could be wrong.
//
// The order of the sums is the contract's, but the bits are not those of mma.sync: for 9.0 the compiler makes an e4m3 mma.sync of f16
// products, while wgmma adds the products of e4m3 in the tensor core's own shorter form. So that a row's bits do not depend on the
// batch, a weight for which this kernel is used must have it for every number of rows.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL

#include "common.cuh"

constexpr int THREADS = 256;                            // two warpgroups of 64 tokens each
constexpr int TILE = 128;                               // outputs, tokens, and bytes of a row in a stage
constexpr int MATRIX_BYTES = TILE * BLOCK;
constexpr int STAGE_BYTES = 2 * MATRIX_BYTES;           // tokens, then weights
constexpr int STAGES = 6;
constexpr int SUMS = TILE / 2;                          // of a lane
constexpr int GROUP_ROWS = 8;                           // of place_in_groups
constexpr int PATTERN_BYTES = 1024;                     // one repetition of the 128-byte swizzle
constexpr int SHARED_BYTES = STAGES * STAGE_BYTES + PATTERN_BYTES;
constexpr int COPY_ROWS = THREADS / 8;                  // rows that all threads copy at once, eight chunks of 16 bytes each
constexpr int COPIES = TILE / COPY_ROWS;
static_assert(SHARED_BYTES <= 227 * 1024, "a block of compute capability 9.0 has no more");

// d (64 tokens x 128 outputs) = or += a (64 x 32) * b (32 x 128), both in shared memory. The registers of a lane are laid out as PTX ISA
// 9.7.15.5.1.1 (accumulator D of wgmma.mma_async.m64nNk32) says: d[4 j + i] is row 16 * warp + lane / 4 + i / 2 * 8,
// column 8 j + lane % 4 * 2 + i % 2.
__device__ __forceinline__ void wgmma_m64n128k32(float (&d)[64], unsigned long long a, unsigned long long b, int accumulate) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %66, 0; "
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, %64, %65, p, 1, 1; }"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
          "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]), "+f"(d[15]),
          "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]), "+f"(d[22]), "+f"(d[23]),
          "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]),
          "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]),
          "+f"(d[40]), "+f"(d[41]), "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]),
          "+f"(d[48]), "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]),
          "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
        : "l"(a), "l"(b), "r"(accumulate));
}

// Registers and shared memory that other instructions wrote are seen by the wgmma that follow (PTX ISA 9.7.15.7.1).
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
// The compiler does not know that wgmma writes its accumulators until the wait: they are neither read nor written across this.
__device__ __forceinline__ void keep_in_order(float (&d)[SUMS]) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) asm volatile("" : "+f"(d[i])::"memory");
}
// wgmma reads shared memory through the async proxy: what this thread's copies wrote is made visible there.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// The descriptor of a K-major matrix whose rows are 128 bytes (PTX ISA 9.7.15.5.1.2, Shared Memory Matrix Layout: Strides, and Matrix
// Descriptor Format). In units of 16 bytes: bits 0..13 the start; 16..29 the leading dimension offset, which this
// layout does not use; 32..45 the stride from eight rows to the next, 1024 bytes; 49..51 base offset 0, as patterns begin at multiples of
// 1024 bytes; 62..63 = 1, the 128-byte swizzle. The next 32 columns begin 32 bytes further: the swizzle is of address bits.
__device__ __forceinline__ unsigned long long matrix_descriptor(unsigned shared) {
    return (unsigned long long)(shared >> 4 & 0x3fffu) | 1ull << 16 | (unsigned long long)(PATTERN_BYTES >> 4) << 32 | 1ull << 62;
}

// The 128-byte swizzle exchanges the 16-byte chunks of a row by the row's place among eight: address bits 4..6 ^= bits 7..9.
__device__ __forceinline__ int swizzled(int row, int chunk) { return row * BLOCK + (chunk ^ (row & 7)) * 16; }

// Bytes of a tile's operands: the first row of tokens and of weights, how many rows from there on exist, and how far rows are apart.
struct Operands {
    const unsigned char* tokens;
    const unsigned char* weights;
    int tokens_left;
    int weights_left;
    int padded;
    int ld;
};

// Starts the copy of block `block`; rows that do not exist are zeros. An empty group from block `end` on keeps the count of groups.
__device__ __forceinline__ void copy_stage(unsigned char* shared, const Operands& from, int block, int end) {
    if (block < end) {
        unsigned char* stage = shared + block % STAGES * STAGE_BYTES;
        int row = threadIdx.x / 8, chunk = threadIdx.x % 8;
        long long column = (long long)block * BLOCK + chunk * 16;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            int at = row + i * COPY_ROWS;
            cp_async_16(stage + swizzled(at, chunk), from.tokens + (long long)at * from.padded + column, at < from.tokens_left);
            cp_async_16(stage + MATRIX_BYTES + swizzled(at, chunk), from.weights + (long long)at * from.ld + column, at < from.weights_left);
        }
    }
    cp_async_commit();
}

// Starts the products of block `block`.
__device__ __forceinline__ void multiply_block(float (&dot)[SUMS], unsigned char* shared, int block) {
    unsigned stage = shared_address(shared) + block % STAGES * STAGE_BYTES;
    unsigned long long a = matrix_descriptor(stage + threadIdx.x / 128 * (64 * BLOCK)), b = matrix_descriptor(stage + MATRIX_BYTES);
    keep_in_order(dot);
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < BLOCK / 32; ++step) wgmma_m64n128k32(dot, a + step * 2, b + step * 2, step);
    wgmma_commit();
}

// Where the scales of a lane's tokens (group, group + 8) stand, and those of the outputs before and from the one where the weight's
// scale changes, which is output `change` of the tile.
struct ScaleRows {
    const float* token[2];
    const float* weight[2];
    int change;
};

__device__ __forceinline__ ScaleRows scale_rows(const float* scales, const Weight& w, int output, int token, int rows, int n, int padded) {
    ScaleRows at;
#pragma unroll
    for (int i = 0; i < 2; ++i) at.token[i] = scales + (long long)min(token + i * 8, rows - 1) * (padded / BLOCK);
    int first = w.first_row + output, last = w.first_row + min(output + TILE, n) - 1;
    at.weight[0] = w.scales != nullptr ? w.scales + (long long)(first / BLOCK) * w.scale_cols : nullptr;
    at.weight[1] = w.scales != nullptr ? w.scales + (long long)(last / BLOCK) * w.scale_cols : nullptr;
    at.change = BLOCK - first % BLOCK;
    return at;
}

// A block's scales: [weight before or from the change][token].
struct Scales {
    float of[2][2];
};

__device__ __forceinline__ Scales load_scales(const ScaleRows& at, int block) {
    Scales scales;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float weight = at.weight[i / 2] != nullptr ? at.weight[i / 2][block] : 1.0f;
        scales.of[i / 2][i % 2] = __fmul_rn(weight, at.token[i % 2][block]);
    }
    return scales;
}

// segment = fmaf(dot, scale, segment), as fold_block of matmul.cuh. All lanes go the same way, and seldom the second.
__device__ __forceinline__ void fold_block(float (&segment)[SUMS], const float (&dot)[SUMS], const Scales& scales, int change) {
    if (change == TILE) {
#pragma unroll
        for (int i = 0; i < SUMS; ++i) segment[i] = fmaf(dot[i], scales.of[0][i / 2 % 2], segment[i]);
        return;
    }
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        int column = i / 4 * 8 + (threadIdx.x & 3) * 2 + i % 2;
        segment[i] = fmaf(dot[i], column < change ? scales.of[0][i / 2 % 2] : scales.of[1][i / 2 % 2], segment[i]);
    }
}

// total = the products of the tile over blocks `first` .. `end - 1`; `first` begins a segment.
__device__ __forceinline__ void multiply_tile(
    float (&total)[SUMS], unsigned char* shared, const Operands& from, const ScaleRows& scale_at, int first, int end) {
    float dot[SUMS], segment[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) dot[i] = segment[i] = total[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < STAGES - 1; ++i) copy_stage(shared, from, first + i, end);
#pragma unroll 1
    for (int block = first; block < end; ++block) {
        // Past the barrier this stage is whole, and both warpgroups have left the one before it, which is filled again.
        cp_async_wait<STAGES - 2>();
        fence_async_proxy();
        __syncthreads();
        multiply_block(dot, shared, block);
        copy_stage(shared, from, block + STAGES - 1, end);
        Scales scales = load_scales(scale_at, block);
        wgmma_wait();
        keep_in_order(dot);
        fold_block(segment, dot, scales, scale_at.change);
        if ((block + 1) % (SEGMENT / BLOCK) != 0 && block + 1 != end) continue;
#pragma unroll
        for (int i = 0; i < SUMS; ++i) {
            total[i] = __fadd_rn(total[i], segment[i]);
            segment[i] = 0.0f;
        }
    }
}

__device__ __forceinline__ void store_sums(
    float* y, const float (&total)[SUMS], const float* bias, int output, int token, int rows, int n) {
#pragma unroll
    for (int i = 0; i < SUMS; ++i) {
        int column = output + i / 4 * 8 + (threadIdx.x & 3) * 2 + i % 2, row = token + i / 2 % 2 * 8;
        if (column >= n || row >= rows) continue;
        y[(long long)row * n + column] = bias != nullptr ? __fadd_rn(total[i], bias[column]) : total[i];
    }
}

extern "C" __global__ void gemm_fp8_sm90(
    float* y, float* partials, const void* terms, const float* scales, Weight w, const float* bias, int rows, int n, int padded) {
    HEARTH_DYNAMIC_SHARED(unsigned char, unaligned);
    unsigned char* shared = unaligned + (0u - shared_address(unaligned)) % PATTERN_BYTES;
    GridPlace place = place_in_groups(GROUP_ROWS);
    int output = place.column * TILE, first_row = place.row * TILE;
    Operands from = {
        static_cast<const unsigned char*>(terms) + (long long)first_row * padded,
        static_cast<const unsigned char*>(w.data) + (long long)output * w.ld,
        rows - first_row,
        n - output,
        padded,
        w.ld,
    };
    int token = first_row + threadIdx.x / 32 * 16 + (threadIdx.x & 31) / 4;
    ScaleRows scale_at = scale_rows(scales, w, output, token, rows, n, padded);
    int first = 0, end = padded / BLOCK;
    if (gridDim.z > 1) {
        first = blockIdx.z * (SEGMENT / BLOCK);
        end = min(first + SEGMENT / BLOCK, end);
    }
    float total[SUMS];
    multiply_tile(total, shared, from, scale_at, first, end);
    if (gridDim.z > 1) {
        store_sums(partials + (long long)blockIdx.z * rows * n, total, nullptr, output, token, rows, n);
    } else {
        store_sums(y, total, bias, output, token, rows, n);
    }
}

#endif
