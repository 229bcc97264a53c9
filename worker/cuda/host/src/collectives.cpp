// Warp operations: each lane stores its operand and waits; the last one to arrive does the work for all.
#include <cstring>

#include "access.h"
#include "config.h"
#include "elements.h"
#include "warpgroup.h"

namespace hearth {
namespace {

void sync(Executor& e, unsigned warp, unsigned mask) {
    e.advance_clock(&RaceClock::warp_barrier);
    for (; mask != 0; mask &= mask - 1) {
        Fiber& fiber = e.lane(warp, __builtin_ctz(mask));
        fiber.label = make_label(race_clock.now(), fiber.thread);
    }
}

void shuffle(Executor& e, unsigned warp, unsigned mask) {
    unsigned long long values[32];
    for (unsigned left = mask; left != 0; left &= left - 1) {
        unsigned lane = __builtin_ctz(left);
        unsigned source = e.lane(warp, lane).operand.source & 31;
        if ((mask >> source & 1u) == 0) {
            e.fail(CUDA_ERROR_LAUNCH_FAILED, "shuffle from an absent lane", format("it reads lane %u", source), e.lane(warp, lane));
        }
        values[lane] = e.lane(warp, source).operand.value;
    }
    for (; mask != 0; mask &= mask - 1) e.lane(warp, __builtin_ctz(mask)).operand.value = values[__builtin_ctz(mask)];
}

void ballot(Executor& e, unsigned warp, unsigned mask) {
    unsigned votes = 0;
    for (unsigned left = mask; left != 0; left &= left - 1) {
        if (e.lane(warp, __builtin_ctz(left)).operand.value != 0) votes |= left & -left;
    }
    for (; mask != 0; mask &= mask - 1) e.lane(warp, __builtin_ctz(mask)).operand.value = votes;
}

void match(Executor& e, unsigned warp, unsigned mask) {
    unsigned long long values[32];
    for (unsigned left = mask; left != 0; left &= left - 1) values[__builtin_ctz(left)] = e.lane(warp, __builtin_ctz(left)).operand.value;
    for (unsigned left = mask; left != 0; left &= left - 1) {
        unsigned lane = __builtin_ctz(left), same = 0;
        for (unsigned other = mask; other != 0; other &= other - 1) {
            if (values[__builtin_ctz(other)] == values[lane]) same |= other & -other;
        }
        e.lane(warp, lane).operand.value = same;
    }
}

float bf16(unsigned bits) {
    bits <<= 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

template <bool E4M3>
float element(unsigned word, int i) {
    return E4M3 ? e4m3_values[word >> (8 * i) & 0xffu] : bf16(word >> (16 * i) & 0xffffu);
}

// Rows of eight columns: the width of the vector units, if any.
typedef float Row __attribute__((vector_size(32)));
typedef double WideRow __attribute__((vector_size(64)));
#if defined(__x86_64__)
#define HEARTH_WIDE __attribute__((target_clones("default", "avx2")))
#else
#define HEARTH_WIDE
#endif

HEARTH_WIDE void multiply_add_e4m3(Row* d, const float (*a)[32], const Row* b) {
    for (int row = 0; row < 16; row++) {
        Row sum = d[row];
        for (int k = 0; k < 32; k++) sum += a[row][k] * b[k];
        d[row] = sum;
    }
}

HEARTH_WIDE void multiply_add_bf16(Row* d, const float (*a)[32], const Row* b) {
    WideRow wide[16];
    for (int k = 0; k < 16; k++) wide[k] = __builtin_convertvector(b[k], WideRow);
    for (int row = 0; row < 16; row++) {
        WideRow sum = __builtin_convertvector(d[row], WideRow);
        for (int k = 0; k < 16; k++) sum += (double)a[row][k] * wide[k];
        d[row] = __builtin_convertvector(sum, Row);
    }
}

// Fragments of m16n8k16 (two elements per register) and m16n8k32 (four) are laid out alike: registers 0, 1 of A hold
// the first half of k in rows group and group + 8, registers 2, 3 the second half.
// A sum of e4m3 is over ascending k, with one rounding for each. One of bf16 is rounded once for all k, of which it hardly ever shows
// the order: on hardware it does not.
template <bool E4M3>
void mma(Executor& e, unsigned warp) {
    constexpr int per_word = E4M3 ? 4 : 2, half = 4 * per_word;
    float a[16][32];
    Row b[32], d[16];
    for (unsigned lane = 0; lane < 32; lane++) {
        const Operand& operand = e.lane(warp, lane).operand;
        int group = lane / 4, quad = lane % 4;
        for (int r = 0; r < 4; r++) {
            int row = group + (r & 1) * 8, first_k = quad * per_word + (r >> 1) * half;
            for (int i = 0; i < per_word; i++) a[row][first_k + i] = element<E4M3>(operand.a.v[r], i);
            d[group + (r >> 1) * 8][2 * quad + (r & 1)] = operand.d.v[r];
        }
        for (int r = 0; r < 2; r++) {
            for (int i = 0; i < per_word; i++) b[quad * per_word + r * half + i][group] = element<E4M3>(operand.b.v[r], i);
        }
    }
    if constexpr (E4M3) {
        multiply_add_e4m3(d, a, b);
    } else {
        multiply_add_bf16(d, a, b);
    }
    for (unsigned lane = 0; lane < 32; lane++) {
        for (int r = 0; r < 4; r++) e.lane(warp, lane).operand.d.v[r] = d[lane / 4 + (r >> 1) * 8][lane % 4 * 2 + (r & 1)];
    }
}

void ldmatrix(Executor& e, unsigned warp) {
    uint16_t elements[4][8][8];
    for (unsigned lane = 0; lane < 32; lane++) {
        Fiber& fiber = e.lane(warp, lane);
        if (config().checks) {
            check_shared_access({Use::READ, static_cast<const char*>(fiber.operand.row), 16, 16, fiber, {nullptr, &fiber.site}});
        }
        memcpy(elements[lane / 8][lane % 8], fiber.operand.row, 16);
    }
    for (unsigned lane = 0; lane < 32; lane++) {
        Operand& operand = e.lane(warp, lane).operand;
        unsigned group = lane / 4, first = lane % 4 * 2;
        for (int i = 0; i < 4; i++) {
            unsigned low = operand.transposed ? elements[i][first][group] : elements[i][group][first];
            unsigned high = operand.transposed ? elements[i][first + 1][group] : elements[i][group][first + 1];
            operand.a.v[i] = low | high << 16;
        }
    }
}

unsigned long long exchange(HearthHostSite site, WarpOperation operation, unsigned mask, unsigned long long value, int source) {
    Executor& e = executor();
    Fiber& self = *running_fiber;
    self.operand.value = value;
    self.operand.source = source;
    e.wait_warp(site, operation, mask);
    return self.operand.value;
}

HearthHostFloats multiply(HearthHostSite site, WarpOperation operation, HearthHostFloats d, HearthHostWords a, HearthHostPair b) {
    Executor& e = executor();
    Fiber& self = *running_fiber;
    self.operand.d = d;
    self.operand.a = a;
    self.operand.b = b;
    e.wait_warp(site, operation, 0xffffffffu);
    return self.operand.d;
}

}  // namespace

const char* operation_name(WarpOperation operation) {
    switch (operation) {
        case WarpOperation::SYNC: return "__syncwarp";
        case WarpOperation::SHUFFLE: return "a shuffle";
        case WarpOperation::BALLOT: return "a vote";
        case WarpOperation::MATCH: return "__match_any_sync";
        case WarpOperation::MMA_BF16: return "mma_bf16";
        case WarpOperation::MMA_E4M3: return "mma_e4m3";
        case WarpOperation::LDMATRIX: return "ldmatrix";
        case WarpOperation::WGMMA: return "wgmma";
        case WarpOperation::WGMMA_WAIT: break;
    }
    return "wgmma.wait_group";
}

void complete_warp_operation(Executor& e, unsigned warp, WarpOperation operation, unsigned mask) {
    switch (operation) {
        case WarpOperation::SYNC: return sync(e, warp, mask);
        case WarpOperation::SHUFFLE: return shuffle(e, warp, mask);
        case WarpOperation::BALLOT: return ballot(e, warp, mask);
        case WarpOperation::MATCH: return match(e, warp, mask);
        case WarpOperation::MMA_BF16: return mma<false>(e, warp);
        case WarpOperation::MMA_E4M3: return mma<true>(e, warp);
        case WarpOperation::LDMATRIX: return ldmatrix(e, warp);
        case WarpOperation::WGMMA: return start_product(e, warp);
        case WarpOperation::WGMMA_WAIT: return finish_products(e, warp);
    }
}

}  // namespace hearth

using namespace hearth;

void hearth_host_sync_threads(HearthHostSite site) { executor().wait_barrier(site, 0, false); }

void hearth_host_named_barrier(HearthHostSite site, unsigned id, unsigned threads) {
    Executor& e = executor();
    if (threads != e.launch().threads()) {
        e.fail(CUDA_ERROR_LAUNCH_FAILED, "named barrier", "only one of all threads of the block is modelled", *running_fiber);
    }
    e.wait_barrier(site, id, false);
}

int hearth_host_sync_threads_count(HearthHostSite site, int predicate) {
    return (int)executor().wait_barrier(site, 0, predicate != 0);
}

void hearth_host_sync_warp(HearthHostSite site, unsigned mask) { exchange(site, WarpOperation::SYNC, mask, 0, 0); }

unsigned long long hearth_host_shuffle(HearthHostSite site, unsigned mask, unsigned long long value, int source) {
    return exchange(site, WarpOperation::SHUFFLE, mask, value, source);
}

unsigned hearth_host_ballot(HearthHostSite site, unsigned mask, int predicate) {
    return (unsigned)exchange(site, WarpOperation::BALLOT, mask, predicate != 0, 0);
}

unsigned hearth_host_match(HearthHostSite site, unsigned mask, unsigned long long value) {
    return (unsigned)exchange(site, WarpOperation::MATCH, mask, value, 0);
}

// The model has no divergence: every lane that has not exited counts as active.
unsigned hearth_host_active_mask() { return executor().live_lanes(); }

unsigned hearth_host_lane() { return running_fiber->lane(); }

void hearth_host_trap(HearthHostSite site) {
    Executor& e = executor();
    e.fail(CUDA_ERROR_LAUNCH_FAILED, "trap", format("line %u", site.line), *running_fiber);
}

HearthHostFloats hearth_host_mma_bf16(HearthHostSite site, HearthHostFloats d, HearthHostWords a, HearthHostPair b) {
    return multiply(site, WarpOperation::MMA_BF16, d, a, b);
}

HearthHostFloats hearth_host_mma_e4m3(HearthHostSite site, HearthHostFloats d, HearthHostWords a, HearthHostPair b) {
    return multiply(site, WarpOperation::MMA_E4M3, d, a, b);
}

HearthHostWords hearth_host_ldmatrix(HearthHostSite site, const void* shared, int transposed) {
    Executor& e = executor();
    Fiber& self = *running_fiber;
    self.operand.row = shared;
    self.operand.transposed = transposed != 0;
    e.wait_warp(site, WarpOperation::LDMATRIX, 0xffffffffu);
    return self.operand.a;
}
