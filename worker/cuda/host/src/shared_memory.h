// Shared memory of the running block: the dynamic part, and the arrays in the kernel's object.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "launch.h"
#include "shadow.h"

namespace hearth {

// A range of addresses with its shadow.
struct Space {
    char* base = nullptr;
    size_t bytes = 0;
    Shadow* shadow = nullptr;

    bool contains(const void* address) const { return (size_t)((const char*)address - base) < bytes; }
    size_t offset(const void* address) const { return (const char*)address - base; }
};

class SharedMemory {
public:
    SharedMemory();

    void begin_launch(const Function& function, unsigned dynamic_bytes);
    // Invalidates everything that an earlier block left: with checks it counts as unwritten, without it becomes NaN.
    void begin_block();

    Space& dynamic() { return dynamic_; }
    Space& arrays() { return arrays_; }
    // Whether the bytes, which are in arrays(), belong to one array and not to a gap.
    bool in_array(const void* address, size_t bytes) const;

private:
    Space dynamic_;
    Space arrays_;
    const Module* module_ = nullptr;
    std::unique_ptr<Shadow> dynamic_shadow_;
};

extern SharedMemory& shared_memory;

}  // namespace hearth
