// The driver API: memory and copies.
#include "config.h"
#include "device.h"
#include "stream_races.h"
#include "transfer.h"

using namespace hearth;

namespace {

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

CUresult allocate(Device& device, CUdeviceptr* result, size_t bytes) {
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    char* address = device.memory.allocate(bytes);
    if (address == nullptr) {
        // Waiting work may free memory.
        if (CUresult status = device.streams.drain_all(); status != CUDA_SUCCESS) return status;
        address = device.memory.allocate(bytes);
    }
    *result = (CUdeviceptr)address;
    return address != nullptr ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

bool free_memory(Device& device, CUdeviceptr address) {
    char* begin = static_cast<char*>(pointer(address));
    size_t bytes = device.memory.size(begin);
    if (!device.memory.free(begin)) return false;
    device.shadow.forget_range(begin - device.memory.base(), bytes);
    return true;
}

// Copies on a stream, or immediately without one.
CUresult copy(CUstream handle, const Transfer& transfer) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    Stream* stream = entry->streams.find(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    return add_transfer(*entry, stream, transfer);
}

CUresult copy_now(const Transfer& transfer) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    return do_transfer(*entry, transfer);
}

CUresult fill(CUstream handle, CUdeviceptr to, unsigned value, unsigned element_bytes, size_t count) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    Stream* stream = entry->streams.find(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    return add_fill(*entry, stream, {static_cast<char*>(pointer(to)), 0, value, element_bytes, count, 1});
}

CUresult fill_now(CUdeviceptr to, unsigned value, unsigned element_bytes, size_t count) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    return do_fill(*entry, {static_cast<char*>(pointer(to)), 0, value, element_bytes, count, 1});
}

}  // namespace

HEARTH_API CUresult cuMemAlloc_v2(CUdeviceptr* result, size_t bytes) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    return allocate(*entry, result, bytes);
}

HEARTH_API CUresult cuMemAllocAsync(CUdeviceptr* result, size_t bytes, CUstream handle) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    if (entry->streams.find(handle) == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    return allocate(*entry, result, bytes);
}

HEARTH_API CUresult cuMemFree_v2(CUdeviceptr address) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    if (address == 0) return CUDA_SUCCESS;
    if (CUresult status = entry->streams.synchronize_all(); status != CUDA_SUCCESS) return status;
    return free_memory(*entry, address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

HEARTH_API CUresult cuMemFreeAsync(CUdeviceptr address, CUstream handle) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    Stream* stream = entry->streams.find(handle);
    if (stream == nullptr) return CUDA_ERROR_INVALID_HANDLE;
    Device* device = &*entry;
    if (device->memory.size(static_cast<char*>(pointer(address))) == 0) return CUDA_ERROR_INVALID_VALUE;
    return device->streams.add(stream, [device, address]() -> Fault {
        char* begin = static_cast<char*>(pointer(address));
        if (Fault fault = check_free(*device, begin, device->memory.size(begin))) return fault;
        if (free_memory(*device, address)) return {};
        return {CUDA_ERROR_ILLEGAL_ADDRESS, format("freed twice: the allocation at %p", pointer(address))};
    });
}

HEARTH_API CUresult cuMemGetInfo_v2(size_t* free_bytes, size_t* total_bytes) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    if (config().memory_info_error != 0) return static_cast<CUresult>(config().memory_info_error);
    *free_bytes = entry->memory.free_bytes();
    *total_bytes = config().memory_bytes;
    return CUDA_SUCCESS;
}

HEARTH_API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void* from, size_t bytes) {
    return copy_now(transfer(Side::DEVICE, pointer(to), Side::HOST, from, bytes));
}

HEARTH_API CUresult cuMemcpyDtoH_v2(void* to, CUdeviceptr from, size_t bytes) {
    return copy_now(transfer(Side::HOST, to, Side::DEVICE, pointer(from), bytes));
}

HEARTH_API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    return copy_now(transfer(Side::DEVICE, pointer(to), Side::DEVICE, pointer(from), bytes));
}

HEARTH_API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
    return copy(stream, transfer(Side::DEVICE, pointer(to), Side::HOST, from, bytes));
}

HEARTH_API CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy(stream, transfer(Side::HOST, to, Side::DEVICE, pointer(from), bytes));
}

HEARTH_API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream) {
    return copy(stream, transfer(Side::DEVICE, pointer(to), Side::DEVICE, pointer(from), bytes));
}

HEARTH_API CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* p, CUstream stream) {
    auto known = [](CUmemorytype type) { return type == CU_MEMORYTYPE_HOST || type == CU_MEMORYTYPE_DEVICE; };
    if (!known(p->srcMemoryType) || !known(p->dstMemoryType)) return CUDA_ERROR_NOT_SUPPORTED;
    bool from_host = p->srcMemoryType == CU_MEMORYTYPE_HOST, to_host = p->dstMemoryType == CU_MEMORYTYPE_HOST;
    const char* from = static_cast<const char*>(from_host ? p->srcHost : pointer(p->srcDevice));
    char* to = static_cast<char*>(to_host ? p->dstHost : pointer(p->dstDevice));
    Transfer t = {to_host ? Side::HOST : Side::DEVICE, to + p->dstY * p->dstPitch + p->dstXInBytes, p->dstPitch,
                  from_host ? Side::HOST : Side::DEVICE, from + p->srcY * p->srcPitch + p->srcXInBytes, p->srcPitch,
                  p->WidthInBytes, p->Height};
    return copy(stream, t);
}

HEARTH_API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t count) { return fill_now(to, value, 1, count); }

HEARTH_API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t count, CUstream stream) {
    return fill(stream, to, value, 1, count);
}

HEARTH_API CUresult cuMemsetD32Async(CUdeviceptr to, unsigned value, size_t count, CUstream stream) {
    return fill(stream, to, value, 4, count);
}

HEARTH_API CUresult cuMemHostAlloc(void** result, size_t bytes, unsigned) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    if (bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    *result = host_memory().allocate(bytes);
    return *result != nullptr ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

HEARTH_API CUresult cuMemAllocHost_v2(void** result, size_t bytes) { return cuMemHostAlloc(result, bytes, 0); }

HEARTH_API CUresult cuMemFreeHost(void* address) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    return host_memory().free(address) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

HEARTH_API CUresult cuMemHostRegister_v2(void* address, size_t bytes, unsigned flags) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    if (address == nullptr || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
    bool read_only = (flags & CU_MEMHOSTREGISTER_READ_ONLY) != 0;
    if (!config().host_register || (read_only && !config().read_only_register)) return CUDA_ERROR_NOT_SUPPORTED;
    return host_memory().add(address, bytes, read_only);
}

HEARTH_API CUresult cuMemHostUnregister(void* address) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    return host_memory().remove(address);
}

HEARTH_API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* result, void* address, unsigned flags) {
    Entry entry;
    if (entry.status() != CUDA_SUCCESS) return entry.status();
    if (flags != 0 || host_memory().find(address, 1) == nullptr) return CUDA_ERROR_INVALID_VALUE;
    *result = (CUdeviceptr)address;
    return CUDA_SUCCESS;
}
