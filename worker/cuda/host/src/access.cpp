// The callbacks of -fsanitize=thread: g++ calls one before every access by a kernel. They are the model's hot path.
#include "access.h"

#include "device.h"
#include "module.h"
#include "races.h"
#include "stream_order.h"

namespace hearth {
namespace {

Space global;             // of the running launch's device
const Module* module;     // of the running kernel

// Whether the accesses in `labels` are ordered before the one by `fiber`.
template <bool SHARED, unsigned BYTES>
inline bool ordered_quickly(const Label* labels, const Fiber& fiber) {
    const Label floor = SHARED ? race_clock.barrier_floor() : stream_order.settled_floor(), mine = fiber.label;
    int recent = 0, differs = 0;
    for (unsigned i = 0; i < BYTES; i++) {
        recent |= (labels[i] >= floor) & (labels[i] != mine);
        differs |= labels[i] ^ labels[0];
    }
    if (!recent) return true;
    if (!differs) return ordered(labels[0], SHARED, fiber);
    for (unsigned i = 0; i < BYTES; i++) {
        if ((i == 0 || labels[i] != labels[i - 1]) && !ordered(labels[i], SHARED, fiber)) return false;
    }
    return true;
}

// The quick checks return false on every error, which check_slowly then describes.
template <bool SHARED, unsigned BYTES>
inline bool read_quickly(Space& space, size_t offset, const Fiber& fiber) {
    Shadow& shadow = *space.shadow;
    if (!shadow.written(offset, BYTES) || !ordered_quickly<SHARED, BYTES>(shadow.writes(offset), fiber)) return false;
    Label* reads = shadow.reads(offset);
    const Label floor = SHARED ? race_clock.barrier_floor() : stream_order.settled_floor(), mine = fiber.label;
    int recent = 0, differs = 0;
    for (unsigned i = 0; i < BYTES; i++) {
        recent |= reads[i] >= floor;
        differs |= reads[i] ^ reads[0];
    }
    if (recent && differs) {
        Label before = 0, sum = 0;
        for (unsigned i = 0; i < BYTES; i++) {
            if (i == 0 || reads[i] != before) {
                before = reads[i];
                sum = add_read(before, SHARED, fiber);
            }
            reads[i] = sum;
        }
        return true;
    }
    const Label sum = !recent || reads[0] == mine ? mine : add_read(reads[0], SHARED, fiber);
    if (differs || sum != reads[0]) {
        for (unsigned i = 0; i < BYTES; i++) reads[i] = sum;
    }
    return true;
}

inline bool in_bounds(const Space& space, const char* address, unsigned bytes) {
    if (&space == &global) return executor().device().memory.holds(address, bytes);
    if (&space == &shared_memory.dynamic()) return space.offset(address) + bytes <= space.bytes;
    return shared_memory.in_array(address, bytes);
}

// Bytes that were written before need no bounds check.
template <bool SHARED, unsigned BYTES>
inline bool write_quickly(Space& space, size_t offset, const Fiber& fiber) {
    Shadow& shadow = *space.shadow;
    Label* writes = shadow.writes(offset);
    if (!ordered_quickly<SHARED, BYTES>(writes, fiber) || !ordered_quickly<SHARED, BYTES>(shadow.reads(offset), fiber)) return false;
    if (!shadow.written(offset, BYTES)) {
        if (!in_bounds(space, space.base + offset, BYTES)) return false;
        shadow.set_written(offset, BYTES);
    }
    for (unsigned i = 0; i < BYTES; i++) writes[i] = fiber.label;
    return true;
}

template <bool SHARED, unsigned BYTES>
inline bool access_quickly(Use use, Space& space, size_t offset, const Fiber& fiber) {
    if (use == Use::READ) return read_quickly<SHARED, BYTES>(space, offset, fiber);
    return use == Use::WRITE && write_quickly<SHARED, BYTES>(space, offset, fiber);
}

// For sizes known only at run time.
template <bool SHARED>
bool piece_quickly(Use use, Space& space, size_t offset, unsigned bytes, const Fiber& fiber) {
    switch (bytes) {
        case 16: return access_quickly<SHARED, 16>(use, space, offset, fiber);
        case 8: return access_quickly<SHARED, 8>(use, space, offset, fiber);
        case 4: return access_quickly<SHARED, 4>(use, space, offset, fiber);
        case 2: return access_quickly<SHARED, 2>(use, space, offset, fiber);
        default: return access_quickly<SHARED, 1>(use, space, offset, fiber);
    }
}

bool on_stack(const void* address, const Fiber& fiber) {
    return (const char*)address >= fiber.stack_low && (const char*)address < fiber.stack_high;
}

// Handles memory without a shadow: pinned and registered host memory, and tables of constants in the kernel's object.
void check_elsewhere(const Access& access) {
    if (const HostRange* range = host_memory().find(access.address, access.bytes)) {
        if (access.use != Use::READ && range->read_only) fail_out_of_bounds(access);
        return;
    }
    if (access.use != Use::READ || !module->contains(access.address)) fail_out_of_bounds(access);
}

// Checks in power-of-two pieces that are aligned to their size.
void check_pieces(Space& space, bool is_shared, const Access& access) {
    size_t offset = space.offset(access.address), left = access.bytes;
    while (left > 0) {
        unsigned piece = 16;
        while (piece > left || offset % piece != 0) piece /= 2;
        bool quick = is_shared ? piece_quickly<true>(access.use, space, offset, piece, access.fiber)
                               : piece_quickly<false>(access.use, space, offset, piece, access.fiber);
        if (!quick) check_slowly(space, is_shared, offset, piece, access);
        offset += piece;
        left -= piece;
    }
}

template <Use USE, unsigned BYTES>
__attribute__((noinline)) void access_slowly(const void* address, const void* code) {
    check_access({USE, static_cast<const char*>(address), BYTES, BYTES, *running_fiber, {code, nullptr}});
}

template <Use USE, unsigned BYTES>
inline void access(const void* address, const void* code) {
    const Fiber& fiber = *running_fiber;
    bool aligned = (uintptr_t)address % BYTES == 0;
    if (aligned && shared_memory.dynamic().contains(address)) {
        if (access_quickly<true, BYTES>(USE, shared_memory.dynamic(), shared_memory.dynamic().offset(address), fiber)) return;
    } else if (aligned && global.contains(address)) {
        if (access_quickly<false, BYTES>(USE, global, global.offset(address), fiber)) return;
    } else if (aligned && shared_memory.arrays().contains(address)) {
        if (access_quickly<true, BYTES>(USE, shared_memory.arrays(), shared_memory.arrays().offset(address), fiber)) return;
    } else if (on_stack(address, fiber)) {
        return;
    }
    access_slowly<USE, BYTES>(address, code);
}

}  // namespace

void begin_access_checks(Device& device) {
    global = {device.memory.base(), device.memory.reserved_bytes(), &device.shadow};
    module = executor().launch().function->module;
}

void check_access(const Access& access) {
    if ((uintptr_t)access.address % access.alignment != 0) fail_misaligned(access);
    if (shared_memory.dynamic().contains(access.address)) return check_pieces(shared_memory.dynamic(), true, access);
    if (shared_memory.arrays().contains(access.address)) return check_pieces(shared_memory.arrays(), true, access);
    if (global.contains(access.address)) return check_pieces(global, false, access);
    if (!on_stack(access.address, access.fiber)) check_elsewhere(access);
}

void check_shared_access(const Access& access) {
    if ((uintptr_t)access.address % access.alignment != 0) fail_misaligned(access);
    if (shared_memory.dynamic().contains(access.address)) return check_pieces(shared_memory.dynamic(), true, access);
    if (shared_memory.arrays().contains(access.address)) return check_pieces(shared_memory.arrays(), true, access);
    fail_out_of_bounds(access);
}

void check_global_access(const Access& access) {
    if ((uintptr_t)access.address % access.alignment != 0) fail_misaligned(access);
    if (global.contains(access.address)) return check_pieces(global, false, access);
    check_elsewhere(access);
}

}  // namespace hearth

#define HEARTH_CALLBACK extern "C" __attribute__((visibility("default"))) void

#define HEARTH_CALLBACKS(bytes)                                                                                         \
    HEARTH_CALLBACK __tsan_read##bytes(void* a) { hearth::access<hearth::Use::READ, bytes>(a, __builtin_return_address(0)); } \
    HEARTH_CALLBACK __tsan_write##bytes(void* a) { hearth::access<hearth::Use::WRITE, bytes>(a, __builtin_return_address(0)); }
HEARTH_CALLBACKS(1)
HEARTH_CALLBACKS(2)
HEARTH_CALLBACKS(4)
HEARTH_CALLBACKS(8)
HEARTH_CALLBACKS(16)

// Aggregates, and accesses whose type promises less alignment than their size.
HEARTH_CALLBACK __tsan_read_range(void* address, unsigned long bytes) {
    hearth::check_access({hearth::Use::READ, static_cast<const char*>(address), bytes, 1, *hearth::running_fiber,
                          {__builtin_return_address(0), nullptr}});
}

HEARTH_CALLBACK __tsan_write_range(void* address, unsigned long bytes) {
    hearth::check_access({hearth::Use::WRITE, static_cast<const char*>(address), bytes, 1, *hearth::running_fiber,
                          {__builtin_return_address(0), nullptr}});
}

// Called by every object when it is loaded.
HEARTH_CALLBACK __tsan_init() {}
