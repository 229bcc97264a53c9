// wgmma may read its operands from shared memory at any time between its start and the wait, and owns its accumulators
// during that time. The model therefore checks the operands at both ends and multiplies at the wait; accumulators are
// NaN in between. A warp has 16 of the 64 rows, and needs no other warp for them.
#include "warpgroup.h"

#include <cmath>
#include <cstring>

#include "access.h"
#include "config.h"
#include "elements.h"

namespace hearth {
namespace {

// Rows of a warp, and the most of any shape: 128 columns of 32 e4m3 or 16 bf16.
constexpr int WARP_ROWS = 16, OUTPUTS = 128, DEPTH = 32;
// Bytes of a row of an operand.
constexpr unsigned ROW_BYTES = 32;
constexpr unsigned WARPGROUP = 128;
// Shared addresses start after the part that the driver reserves, aligned no further than the kernels' declaration requires.
constexpr unsigned SHARED_START = 1024 + 128;

// A matrix as described in PTX ISA 9.7.15.5.1.2, with rows of 128 bytes and the 128-byte swizzle. If its columns are contiguous,
// a row is one k, with a part of the columns.
struct Matrix {
    unsigned start;
    unsigned stride;     // from eight rows to the next
    unsigned leading;    // from one part of the columns to the next

    unsigned piece(unsigned row, unsigned byte) const {
        unsigned address = start + byte / 128 * leading + row / 8 * stride + row % 8 * 128 + byte % 128;
        return address ^ (address >> 7 & 7u) << 4;
    }
};

Matrix matrix(Executor& e, unsigned long long descriptor, const Fiber& fiber) {
    bool is_swizzled = descriptor >> 62 == 1, has_offset = (descriptor >> 49 & 7u) != 0;
    if (!is_swizzled || has_offset) {
        e.fail(CUDA_ERROR_LAUNCH_FAILED, "wgmma descriptor", "only the 128-byte swizzle without a base offset is modelled", fiber);
    }
    auto field = [descriptor](int shift) { return unsigned(descriptor >> shift & 0x3fffu) << 4; };
    return {field(0), field(32), field(16)};
}

// Returns 16 bytes that the warp's wgmma reads.
const unsigned char* operand(const Matrix& from, unsigned row, unsigned byte, const Fiber& fiber, const HearthHostSite& site) {
    const char* address = shared_memory.dynamic().base + (int)(from.piece(row, byte) - SHARED_START);
    if (config().checks) check_shared_access({Use::READ, address, 16, 16, fiber, {nullptr, &site}});
    return reinterpret_cast<const unsigned char*>(address);
}

unsigned sums(const Product& product) { return product.columns / 2; }

float bf16_value(unsigned bits) {
    unsigned word = bits << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

void read(float (*to)[DEPTH], const Matrix& from, unsigned first, unsigned rows, bool is_bf16, const Fiber& fiber, const HearthHostSite& site) {
    for (unsigned row = 0; row < rows; row++) {
        for (unsigned byte = 0; byte < ROW_BYTES; byte += 16) {
            const unsigned char* codes = operand(from, first + row, byte, fiber, site);
            for (int i = 0; i < 16; i++) {
                if (!is_bf16) to[row][byte + i] = e4m3_values[codes[i]];
                else if (i % 2 == 0) to[row][(byte + i) / 2] = bf16_value(codes[i] | codes[i + 1] << 8);
            }
        }
    }
}

// Each k has all columns, of bf16.
void read_transposed(float (*to)[DEPTH], const Matrix& from, unsigned columns, const Fiber& fiber, const HearthHostSite& site) {
    for (unsigned k = 0; k < 16; k++) {
        for (unsigned column = 0; column < columns; column += 8) {
            const unsigned char* codes = operand(from, k, column * 2, fiber, site);
            for (int i = 0; i < 8; i++) to[column + i][k] = bf16_value(codes[2 * i] | codes[2 * i + 1] << 8);
        }
    }
}

struct Operands {
    float a[WARP_ROWS][DEPTH];
    float b[OUTPUTS][DEPTH];
};

// Lane `lane`'s part of a: registers as those of mma.
void take_registers(Operands& to, unsigned lane, const Product& product) {
    for (int i = 0; i < 4; i++) {
        float* at = &to.a[lane / 4 + i % 2 * 8][lane % 4 * 2 + i / 2 * 8];
        at[0] = bf16_value(product.registers[i] & 0xffffu);
        at[1] = bf16_value(product.registers[i] >> 16);
    }
}

void read(Executor& e, Operands& to, const Product& product, const Fiber& fiber) {
    unsigned first = fiber.thread % WARPGROUP / 32 * WARP_ROWS;
    if (!product.is_bf16) read(to.a, matrix(e, product.a, fiber), first, WARP_ROWS, false, fiber, product.site);
    if (product.is_transposed) return read_transposed(to.b, matrix(e, product.b, fiber), product.columns, fiber, product.site);
    read(to.b, matrix(e, product.b, fiber), 0, product.columns, product.is_bf16, fiber, product.site);
}

// As mma adds them.
float add_products(float d, const float* a, const float* b, bool is_bf16) {
    if (is_bf16) {
        double sum = d;
        for (int k = 0; k < 16; k++) sum += (double)a[k] * b[k];
        return (float)sum;
    }
    for (int k = 0; k < 32; k++) d += a[k] * b[k];
    return d;
}

void multiply(Executor& e, unsigned warp, size_t index) {
    static Operands operands;
    const Product& first = e.lane(warp, 0).products[index];
    read(e, operands, first, e.lane(warp, 0));
    if (first.is_bf16)
        for (unsigned lane = 0; lane < 32; lane++) take_registers(operands, lane, e.lane(warp, lane).products[index]);
    for (unsigned lane = 0; lane < 32; lane++) {
        Product& product = e.lane(warp, lane).products[index];
        if (product.is_first) memcpy(product.d, product.before, sums(product) * sizeof(float));
        for (unsigned i = 0; i < sums(product); i++) {
            const float* a = operands.a[lane / 4 + i / 2 % 2 * 8];
            const float* b = operands.b[i / 4 * 8 + lane % 4 * 2 + i % 2];
            product.d[i] = add_products(product.accumulate ? product.d[i] : 0.0f, a, b, product.is_bf16);
        }
    }
}

}  // namespace

void start_product(Executor& e, unsigned warp) {
    const Fiber& self = *running_fiber;
    if (e.launch().threads() % WARPGROUP != 0) {
        e.fail(CUDA_ERROR_LAUNCH_FAILED, "wgmma", "the block is not made of warpgroups of 128 threads", self);
    }
    const Product& asked = self.operand.product;
    for (unsigned lane = 0; lane < 32; lane++) {
        const Fiber& fiber = e.lane(warp, lane);
        const Product& product = fiber.operand.product;
        if (product.a != asked.a || product.b != asked.b || product.accumulate != asked.accumulate) {
            e.fail(CUDA_ERROR_LAUNCH_FAILED, "wgmma", "its lanes do not agree on the operands", fiber);
        }
        if (!fiber.accumulators_fenced) e.fail(CUDA_ERROR_LAUNCH_FAILED, "wgmma without wgmma.fence", "", fiber);
    }
    for (unsigned thread = 0; thread < e.launch().threads(); thread++) {
        const Fiber& fiber = e.lane(thread / 32, thread % 32);
        if (fiber.copies_unfenced) {
            e.fail(CUDA_ERROR_LAUNCH_FAILED, "wgmma without fence.proxy.async", "copies of " + e.thread_text(thread) + " are not visible to it", self);
        }
    }
    static Operands checked;
    if (config().checks) read(e, checked, asked, self);
    for (unsigned lane = 0; lane < 32; lane++) {
        Fiber& fiber = e.lane(warp, lane);
        Product product = fiber.operand.product;
        product.is_first = true;
        for (const Product& other : fiber.products) product.is_first &= other.d != product.d;
        if (product.is_first) {
            memcpy(product.before, product.d, sums(product) * sizeof(float));
            for (unsigned i = 0; i < sums(product); i++) product.d[i] = NAN;
        }
        fiber.products.push_back(product);
    }
}

void finish_products(Executor& e, unsigned warp) {
    const Fiber& self = *running_fiber;
    size_t groups = self.operand.source;
    if (self.product_group_ends.size() > groups) {
        size_t finished = self.product_group_ends.size() - groups, count = self.product_group_ends[finished - 1];
        for (size_t i = 0; i < count; i++) multiply(e, warp, i);
        for (unsigned lane = 0; lane < 32; lane++) {
            Fiber& fiber = e.lane(warp, lane);
            fiber.products.erase(fiber.products.begin(), fiber.products.begin() + count);
            auto& ends = fiber.product_group_ends;
            ends.erase(ends.begin(), ends.begin() + finished);
            for (size_t& end : ends) end -= count;
        }
    }
    // The next instructions may touch accumulators.
    for (unsigned lane = 0; lane < 32; lane++) e.lane(warp, lane).accumulators_fenced = false;
}

void abandon_products(Fiber& fiber) {
    fiber.products.clear();
    fiber.product_group_ends.clear();
    fiber.accumulators_fenced = fiber.copies_unfenced = false;
}

}  // namespace hearth

using namespace hearth;

void hearth_host_wgmma(HearthHostSite site, float* d, unsigned long long a, unsigned long long b, int accumulate) {
    running_fiber->operand.product = {d, a, b, false, false, 128, {}, accumulate != 0, false, site, {}};
    executor().wait_warp(site, WarpOperation::WGMMA, 0xffffffffu);
}

void hearth_host_wgmma_bf16(HearthHostSite site, float* d, const unsigned* a, unsigned long long b, int accumulate, int columns,
                            int is_transposed) {
    running_fiber->operand.product = {
        d, 0, b, true, is_transposed != 0, unsigned(columns), {a[0], a[1], a[2], a[3]}, accumulate != 0, false, site, {}};
    executor().wait_warp(site, WarpOperation::WGMMA, 0xffffffffu);
}

void hearth_host_wgmma_fence() { running_fiber->accumulators_fenced = true; }

void hearth_host_wgmma_commit() { running_fiber->product_group_ends.push_back(running_fiber->products.size()); }

void hearth_host_wgmma_wait(HearthHostSite site, int groups) {
    running_fiber->operand.source = groups;
    executor().wait_warp(site, WarpOperation::WGMMA_WAIT, 0xffffffffu);
}

void hearth_host_fence_async_proxy() { running_fiber->copies_unfenced = false; }

unsigned hearth_host_shared_address(const void* shared) {
    return SHARED_START + (unsigned)shared_memory.dynamic().offset(shared);
}
