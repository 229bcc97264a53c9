// The driver API: modules, functions and launches.
#include <algorithm>

#include "config.h"
#include "device.h"
#include "executor.h"
#include "module.h"

using namespace hearth;

HEARTH_API CUresult cuModuleLoadData(CUmodule* result, const void* image) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    std::unique_ptr<Module> module;
    if (CUresult status = Module::load(&*entry, image, module); status != CUDA_SUCCESS) return status;
    *result = module.release();
    entry->modules.insert(*result);
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuModuleLoadDataEx(CUmodule* result, const void* image, unsigned, void*, void**) {
    return cuModuleLoadData(result, image);
}

HEARTH_API CUresult cuModuleUnload(CUmodule module) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    if (entry->modules.count(module) == 0) return CUDA_ERROR_INVALID_HANDLE;
    CUresult status = entry->streams.synchronize_all();
    entry->modules.erase(module);
    delete module;
    return status;
}

HEARTH_API CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    if (entry->modules.count(module) == 0) return CUDA_ERROR_INVALID_HANDLE;
    auto found = module->functions.find(name);
    if (found == module->functions.end()) return CUDA_ERROR_NOT_FOUND;
    *function = found->second.get();
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute which, int value) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    if (which == CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT) return CUDA_SUCCESS;
    if (which != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value < 0) return CUDA_ERROR_INVALID_VALUE;
    if ((unsigned)value + function->static_shared_bytes > entry->opt_in_shared_bytes()) return CUDA_ERROR_INVALID_VALUE;
    function->max_dynamic_shared_bytes = value;
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuFuncGetAttribute(int* value, CUfunction_attribute which, CUfunction function) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    int version = config().capability_major * 10 + config().capability_minor;
    switch (which) {
        case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = (int)function->max_threads; break;
        case CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES: *value = (int)function->static_shared_bytes; break;
        case CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES: *value = (int)function->max_dynamic_shared_bytes; break;
        case CU_FUNC_ATTRIBUTE_PTX_VERSION:
        case CU_FUNC_ATTRIBUTE_BINARY_VERSION: *value = version; break;
        case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = (int)std::min(255u, 65536 / function->max_threads); break;
        case CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES:
        case CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES: *value = 0; break;
        default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuLaunchKernel(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                                   unsigned block_y, unsigned block_z, unsigned shared_bytes, CUstream handle, void** parameters,
                                   void** extra) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    Stream* stream = entry->streams.find(handle);
    if (stream == nullptr || function == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    if (extra != nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    Launch launch;
    launch.function = function;
    launch.set_shape(grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes);
    if (CUresult status = launch.check(entry->opt_in_shared_bytes()); status != CUDA_SUCCESS) return status;
    launch.set_values(parameters);
    Device* device = &*entry;
    return device->streams.add(stream, [device, launch = std::move(launch)] { return executor().run(*device, launch); });
}

// Limited by threads and shared memory; registers are unknown.
HEARTH_API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, CUfunction function, int threads,
                                                                         size_t shared_bytes, unsigned) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    if (threads <= 0) return CUDA_ERROR_INVALID_VALUE;
    size_t each = shared_bytes + function->static_shared_bytes + 1024;
    *blocks = (int)std::min<size_t>({24u, 1536u / (unsigned)threads, entry->multiprocessor_shared_bytes() / each});
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction function, int threads, size_t shared_bytes) {
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, threads, shared_bytes, 0);
}
