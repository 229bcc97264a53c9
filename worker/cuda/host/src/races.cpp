#include "races.h"

#include <algorithm>

#include "access.h"
#include "device.h"
#include "stream_order.h"

namespace hearth {
namespace {

bool is_thread(unsigned who) { return who < MAX_THREADS; }

// The warp of all threads of `who`, or -1 if there are several.
int warp_of(unsigned who) {
    if (is_thread(who)) return (int)(who / 32);
    return who < BLOCK_SET ? (int)(who - WARP_SET) : -1;
}

bool in_earlier_block(Label label) { return label_time(label) < race_clock.block_start(); }

// One label for accesses that are not ordered among each other.
Label merge(Label a, Label b, bool is_shared) {
    uint32_t time = std::max(label_time(a), label_time(b));
    unsigned who_a = label_who(a) & ~ATOMIC, who_b = label_who(b) & ~ATOMIC;
    if (!is_shared && (who_a == GRID_SET || in_earlier_block(a))) return make_label(time, GRID_SET);
    int warp = warp_of(who_a);
    if (warp < 0 || warp != warp_of(who_b)) return make_label(time, BLOCK_SET);
    return make_label(time, WARP_SET + warp);
}

}  // namespace

bool ordered(Label before, bool is_shared, const Fiber& fiber) {
    unsigned who = label_who(before);
    if (who == PENDING) return false;
    if (is_shared && before < race_clock.barrier_floor()) return true;
    if (!is_shared && before < race_clock.launch_floor()) return stream_order.is_before(before);
    who &= ~ATOMIC;
    if (who == GRID_SET || in_earlier_block(before)) return false;
    if (before < race_clock.barrier_floor() || who == fiber.thread) return true;
    return warp_of(who) == (int)fiber.warp() && label_time(before) < label_time(fiber.label);
}

Label add_read(Label reads, bool is_shared, const Fiber& fiber) {
    return ordered(reads, is_shared, fiber) ? fiber.label : merge(reads, fiber.label, is_shared);
}

namespace {

void note_atomic(Label& write, bool is_shared, const Fiber& fiber) {
    Label sum = ordered(write, is_shared, fiber) ? fiber.label : merge(write, fiber.label, is_shared);
    write = (Label)((unsigned)sum | ATOMIC);
}

void check_byte(Space& space, bool is_shared, size_t offset, const Access& access) {
    Label& write = *space.shadow->writes(offset);
    Label& read = *space.shadow->reads(offset);
    size_t byte = space.base + offset - access.address;
    bool among_atomics = access.use == Use::ATOMIC && label_who(write) != PENDING && (label_who(write) & ATOMIC) != 0;
    if (!among_atomics && !ordered(write, is_shared, access.fiber)) fail_race(access, is_shared, byte, write, true);
    if (access.use == Use::READ) {
        read = add_read(read, is_shared, access.fiber);
        return;
    }
    if (!ordered(read, is_shared, access.fiber)) fail_race(access, is_shared, byte, read, false);
    if (access.use == Use::ATOMIC) return note_atomic(write, is_shared, access.fiber);
    write = access.use == Use::WRITE ? access.fiber.label : PENDING_LABEL;
}

}  // namespace

void check_slowly(Space& space, bool is_shared, size_t offset, unsigned bytes, const Access& access) {
    const char* address = space.base + offset;
    bool held = is_shared ? offset + bytes <= space.bytes : executor().device().memory.holds(address, bytes);
    if (held && &space == &shared_memory.arrays()) held = shared_memory.in_array(address, bytes);
    if (!held) fail_out_of_bounds(access);
    bool reads = access.use == Use::READ || access.use == Use::ATOMIC;
    bool pending = false;
    for (unsigned i = 0; i < bytes; i++) pending |= *space.shadow->writes(offset + i) == PENDING_LABEL;
    if (reads && !pending && !space.shadow->written(offset, bytes)) fail_unwritten(access, is_shared);
    for (unsigned i = 0; i < bytes; i++) check_byte(space, is_shared, offset + i, access);
    if (access.use == Use::WRITE || access.use == Use::ATOMIC) space.shadow->set_written(offset, bytes);
}

void mark_landed(const Fiber& fiber, const void* shared, unsigned bytes) {
    Space& space = shared_memory.dynamic().contains(shared) ? shared_memory.dynamic() : shared_memory.arrays();
    size_t offset = space.offset(shared);
    for (unsigned i = 0; i < bytes; i++) *space.shadow->writes(offset + i) = fiber.label;
    space.shadow->set_written(offset, bytes);
}

void mark_abandoned(const void* shared, unsigned bytes) {
    Space& space = shared_memory.dynamic().contains(shared) ? shared_memory.dynamic() : shared_memory.arrays();
    for (unsigned i = 0; i < bytes; i++) *space.shadow->writes(space.offset(shared) + i) = 0;
}

}  // namespace hearth
