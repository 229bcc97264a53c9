// The driver API: initialisation, devices, contexts, errors, and lookup of entries.
#include <dlfcn.h>

#include <cstdio>
#include <cstring>

#include "config.h"
#include "device.h"

using namespace hearth;

namespace {

int attribute(const Device& device, CUdevice_attribute which, bool& known) {
    switch (which) {
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X:
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y: return 1024;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z: return 64;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X:
        case CU_DEVICE_ATTRIBUTE_MAX_PITCH: return 0x7fffffff;
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y:
        case CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z: return 65535;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK: return SHARED_BYTES;
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: return device.opt_in_shared_bytes();
        case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: return device.multiprocessor_shared_bytes();
        case CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK: return 1024;
        case CU_DEVICE_ATTRIBUTE_TOTAL_CONSTANT_MEMORY: return 65536;
        case CU_DEVICE_ATTRIBUTE_WARP_SIZE: return 32;
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK:
        case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: return 65536;
        case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: return 1000000;
        case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: return 1000000;
        case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: return 128;
        case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: return 4;
        case CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: return 4 << 20;
        case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: return 1536;
        case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: return 24;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: return config().capability_major;
        case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: return config().capability_minor;
        case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: return device.ordinal + 1;
        case CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT: return 2;
        case CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM: return config().host_register;
        case CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED: return config().read_only_register;
        case CU_DEVICE_ATTRIBUTE_GPU_OVERLAP:
        case CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS:
        case CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING:
        case CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED:
        case CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED: return 1;
        case CU_DEVICE_ATTRIBUTE_KERNEL_EXEC_TIMEOUT:
        case CU_DEVICE_ATTRIBUTE_INTEGRATED:
        case CU_DEVICE_ATTRIBUTE_COMPUTE_MODE:
        case CU_DEVICE_ATTRIBUTE_ECC_ENABLED:
        case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID:
        case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID:
        case CU_DEVICE_ATTRIBUTE_TCC_DRIVER:
        case CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY:
        case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS:
        case CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS:
        case CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH:
        case CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES: return 0;
    }
    known = false;
    return 0;
}

struct ErrorText {
    CUresult code;
    const char* name;
    const char* text;
};

const ErrorText ERRORS[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", "too many resources requested for launch"},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED",
     "part or all of the requested memory range is already mapped"},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED",
     "pointer does not correspond to a registered memory region"},
    {CUDA_ERROR_MISALIGNED_ADDRESS, "CUDA_ERROR_MISALIGNED_ADDRESS", "misaligned address"},
    {CUDA_ERROR_LAUNCH_FAILED, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "operation not supported"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const ErrorText* find_error(CUresult code) {
    for (const ErrorText& error : ERRORS) {
        if (error.code == code) return &error;
    }
    return nullptr;
}

// Finds the device for an ordinal, for entries that need no context.
CUresult find_device(int ordinal, Device*& found) {
    if (!initialised()) return CUDA_ERROR_NOT_INITIALIZED;
    found = device(ordinal);
    return found != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}

}  // namespace

HEARTH_API CUresult cuInit(unsigned flags) {
    std::lock_guard<std::recursive_mutex> lock(driver_mutex());
    if (flags != 0) return CUDA_ERROR_INVALID_VALUE;
    if (config().devices == 0 || devices_lost()) return CUDA_ERROR_NO_DEVICE;
    initialise();
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuDriverGetVersion(int* version) {
    *version = config().driver_version;
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuDeviceGetCount(int* count) {
    if (!initialised()) return CUDA_ERROR_NOT_INITIALIZED;
    *count = config().devices;
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuDeviceGet(CUdevice* result, int ordinal) {
    Device* found;
    *result = ordinal;
    return find_device(ordinal, found);
}

HEARTH_API CUresult cuDeviceGetName(char* name, int length, CUdevice ordinal) {
    Device* found;
    if (CUresult status = find_device(ordinal, found); status != CUDA_SUCCESS) return status;
    snprintf(name, length, "Hearth host model");
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuDeviceGetUuid_v2(CUuuid* uuid, CUdevice ordinal) {
    Device* found;
    if (CUresult status = find_device(ordinal, found); status != CUDA_SUCCESS) return status;
    memcpy(uuid->bytes, "HearthHostModel", 15);
    uuid->bytes[15] = (unsigned char)ordinal;
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice ordinal) { return cuDeviceGetUuid_v2(uuid, ordinal); }

HEARTH_API CUresult cuDeviceTotalMem_v2(size_t* bytes, CUdevice ordinal) {
    Device* found;
    if (CUresult status = find_device(ordinal, found); status != CUDA_SUCCESS) return status;
    *bytes = config().memory_bytes;
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute which, CUdevice ordinal) {
    Device* found;
    if (CUresult status = find_device(ordinal, found); status != CUDA_SUCCESS) return status;
    bool known = true;
    *value = attribute(*found, which, known);
    return known ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

HEARTH_API CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice ordinal) {
    std::lock_guard<std::recursive_mutex> lock(driver_mutex());
    Device* found;
    if (CUresult status = find_device(ordinal, found); status != CUDA_SUCCESS) return status;
    found->retained++;
    *context = found;
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice ordinal) {
    std::lock_guard<std::recursive_mutex> lock(driver_mutex());
    Device* found;
    if (CUresult status = find_device(ordinal, found); status != CUDA_SUCCESS) return status;
    if (found->retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    found->retained--;
    return found->streams.synchronize_all();
}

HEARTH_API CUresult cuCtxSetCurrent(CUcontext context) {
    if (!initialised()) return CUDA_ERROR_NOT_INITIALIZED;
    if (context != nullptr && context->retained == 0) return CUDA_ERROR_INVALID_CONTEXT;
    current_device() = context;
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuCtxGetCurrent(CUcontext* context) {
    if (!initialised()) return CUDA_ERROR_NOT_INITIALIZED;
    *context = current_device();
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuCtxGetDevice(CUdevice* ordinal) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    *ordinal = entry->ordinal;
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuCtxSynchronize() {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    return entry->streams.synchronize_all();
}

HEARTH_API CUresult cuGetErrorName(CUresult code, const char** name) {
    const ErrorText* error = find_error(code);
    *name = error != nullptr ? error->name : nullptr;
    return error != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

HEARTH_API CUresult cuGetErrorString(CUresult code, const char** text) {
    const ErrorText* error = find_error(code);
    *text = error != nullptr ? error->text : nullptr;
    return error != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

// Returns the newest version of the entry, as callers get by including cuda.h.
HEARTH_API CUresult cuGetProcAddress_v2(const char* symbol, void** address, int, uint64_t, int* found) {
    Dl_info self;
    dladdr(reinterpret_cast<void*>(cuInit), &self);
    void* library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
    *address = dlsym(library, (std::string(symbol) + "_v2").c_str());
    if (*address == nullptr) *address = dlsym(library, symbol);
    dlclose(library);
    if (found != nullptr) *found = *address != nullptr ? 0 : 1;
    return *address != nullptr ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}
