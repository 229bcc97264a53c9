// One launch of a kernel: copies of everything that the caller may change or free before it runs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "cuda_api.h"

namespace hearth {

struct Function {
    Module* module;
    std::string name;
    void (*call)(void** values);
    std::vector<unsigned> parameter_bytes;
    unsigned max_threads;            // of __launch_bounds__, or 1024
    unsigned static_shared_bytes;
    unsigned max_dynamic_shared_bytes;
};

struct Launch {
    Function* function = nullptr;
    unsigned grid[3] = {0, 0, 0};
    unsigned block[3] = {0, 0, 0};
    unsigned dynamic_shared_bytes = 0;
    std::vector<char> values;
    std::vector<size_t> offsets;

    unsigned threads() const { return block[0] * block[1] * block[2]; }
    void set_shape(unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                   unsigned shared_bytes);
    // Reads the values behind cuLaunchKernel's kernelParams.
    void set_values(void** parameters);
    // Checks the limits that the driver checks at the call.
    CUresult check(unsigned opt_in_shared_bytes) const;
};

}  // namespace hearth
