// Threads of a block as fibers: stacks, and the switch from one to another.
#pragma once

#include <cstddef>
#include <cstdint>

// Saves the callee-saved registers on the running stack, stores its pointer in *save and goes on with the stack `load`.
extern "C" void hearth_host_switch_stack(void** save, void* load);

namespace hearth {

constexpr unsigned MAX_THREADS = 1024;

// One stack for each thread of the largest block, each with a guard below: an overflow faults instead of spoiling a neighbour.
class Stacks {
public:
    Stacks();
    char* low(unsigned thread) const { return base_ + thread * STRIDE + GUARD; }
    char* high(unsigned thread) const { return base_ + (thread + 1) * STRIDE; }
    // A stack pointer that, switched to, starts `entry`, which must not return.
    void* prepare(unsigned thread, void (*entry)()) const;

private:
    static constexpr size_t GUARD = 64 * 1024;      // the largest page that a system has
    static constexpr size_t STRIDE = 192 * 1024;
    char* base_;
};

}  // namespace hearth
