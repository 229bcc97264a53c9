// Threads of a block as fibers: stacks, and the switch from one to another.
#pragma once

#include <cstddef>
#include <cstdint>

// Saves the callee-saved registers on the running stack, stores its pointer in *save and goes on with the stack `load`.
extern "C" void hearth_host_switch_stack(void** save, void* load);

namespace hearth {

constexpr unsigned MAX_THREADS = 1024;

// One stack for each thread of the largest block, each with a guard page below: an overflow faults instead of spoiling a neighbour.
class Stacks {
public:
    Stacks();
    char* low(unsigned thread) const { return base_ + thread * (size_t)STRIDE + PAGE; }
    char* high(unsigned thread) const { return base_ + (thread + 1) * (size_t)STRIDE; }
    // A stack pointer that, switched to, starts `entry`, which must not return.
    void* prepare(unsigned thread, void (*entry)()) const;

private:
    static constexpr size_t PAGE = 4096;
    static constexpr size_t STRIDE = 128 * 1024;
    char* base_;
};

}  // namespace hearth
