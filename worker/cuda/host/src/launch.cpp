#include "launch.h"

#include <cstring>

namespace hearth {

void Launch::set_shape(unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                       unsigned shared_bytes) {
    grid[0] = grid_x, grid[1] = grid_y, grid[2] = grid_z;
    block[0] = block_x, block[1] = block_y, block[2] = block_z;
    dynamic_shared_bytes = shared_bytes;
}

void Launch::set_values(void** parameters) {
    values.clear();
    offsets.clear();
    for (size_t i = 0; i < function->parameter_bytes.size(); i++) {
        // 16 is the largest alignment of a parameter.
        size_t offset = (values.size() + 15) / 16 * 16;
        offsets.push_back(offset);
        values.resize(offset + function->parameter_bytes[i]);
        memcpy(values.data() + offset, parameters[i], function->parameter_bytes[i]);
    }
}

CUresult Launch::check(unsigned opt_in_shared_bytes) const {
    constexpr uint64_t MAX_GRID[3] = {0x7fffffff, 65535, 65535};
    constexpr unsigned MAX_BLOCK[3] = {1024, 1024, 64};
    for (int i = 0; i < 3; i++) {
        if (grid[i] == 0 || grid[i] > MAX_GRID[i] || block[i] == 0 || block[i] > MAX_BLOCK[i]) return CUDA_ERROR_INVALID_VALUE;
    }
    if ((uint64_t)block[0] * block[1] * block[2] > function->max_threads) return CUDA_ERROR_INVALID_VALUE;
    if (dynamic_shared_bytes > function->max_dynamic_shared_bytes) return CUDA_ERROR_INVALID_VALUE;
    if ((uint64_t)dynamic_shared_bytes + function->static_shared_bytes > opt_in_shared_bytes) return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

}  // namespace hearth
