// Threads of a block as fibers: stacks, and switching between them.
#pragma once

#include <cstddef>
#include <cstdint>

// Saves the callee-saved registers on the running stack, stores its pointer in *save and continues on the stack `load`.
extern "C" void hearth_host_switch_stack(void** save, void* load);

namespace hearth {

constexpr unsigned MAX_THREADS = 1024;

// One stack per thread of the largest block, each with a guard below: an overflow faults instead of corrupting a neighbour.
class Stacks {
public:
    Stacks();
    char* low(unsigned thread) const { return base_ + thread * STRIDE + GUARD; }
    char* high(unsigned thread) const { return base_ + (thread + 1) * STRIDE; }
    // Returns a stack pointer that, when switched to, starts `entry`, which must not return.
    void* prepare(unsigned thread, void (*entry)()) const;

private:
    static constexpr size_t GUARD = 64 * 1024;      // the largest page size of any system
    static constexpr size_t STRIDE = 192 * 1024;
    char* base_;
};

}  // namespace hearth
