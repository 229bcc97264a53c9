// The management library (libnvidia-ml.so.1): the driver's devices, for profiles. Clocks and widths are those of a small card.
#include <cstdio>
#include <cstring>

#include "config.h"

using namespace hearth;

namespace {

constexpr int NVML_SUCCESS = 0;
constexpr int NVML_INVALID_ARGUMENT = 2;
constexpr int NVML_NOT_SUPPORTED = 3;
constexpr int NVML_DRIVER_NOT_LOADED = 9;
constexpr int CLOCK_MEMORY = 2;

struct Memory {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

// Handles are ordinals, starting from 1.
int ordinal(void* device) { return (int)(long)device - 1; }

int give(unsigned* to, unsigned value) {
    *to = value;
    return NVML_SUCCESS;
}

}  // namespace

#define ENTRY extern "C" __attribute__((visibility("default"))) int

ENTRY nvmlInit_v2() { return config().devices > 0 ? NVML_SUCCESS : NVML_DRIVER_NOT_LOADED; }
ENTRY nvmlShutdown() { return NVML_SUCCESS; }
ENTRY nvmlDeviceGetCount_v2(unsigned* count) { return give(count, (unsigned)config().devices); }

ENTRY nvmlDeviceGetHandleByIndex_v2(unsigned index, void** device) {
    if (index >= (unsigned)config().devices) return NVML_INVALID_ARGUMENT;
    *device = (void*)(long)(index + 1);
    return NVML_SUCCESS;
}

ENTRY nvmlDeviceGetUUID(void* device, char* text, unsigned length) {
    // The same as from cuDeviceGetUuid: "HearthHostModel", then the ordinal.
    snprintf(text, length, "GPU-48656172-7468-486f-7374-4d6f64656c%02x", ordinal(device));
    return NVML_SUCCESS;
}

ENTRY nvmlDeviceGetName(void*, char* text, unsigned length) {
    snprintf(text, length, "Hearth host model");
    return NVML_SUCCESS;
}

ENTRY nvmlDeviceGetMemoryInfo_v2(void*, Memory* memory) {
    memory->total = memory->free = config().memory_bytes;
    memory->reserved = memory->used = 0;
    return NVML_SUCCESS;
}

ENTRY nvmlDeviceGetCudaComputeCapability(void*, int* major, int* minor) {
    *major = config().capability_major;
    *minor = config().capability_minor;
    return NVML_SUCCESS;
}

ENTRY nvmlDeviceGetCurrPcieLinkGeneration(void*, unsigned* value) { return give(value, 4); }
ENTRY nvmlDeviceGetCurrPcieLinkWidth(void*, unsigned* value) { return give(value, 16); }
ENTRY nvmlDeviceGetMaxPcieLinkGeneration(void*, unsigned* value) { return give(value, 4); }
ENTRY nvmlDeviceGetMaxPcieLinkWidth(void*, unsigned* value) { return give(value, 16); }
ENTRY nvmlDeviceGetPowerManagementLimit(void*, unsigned* value) { return give(value, 100000); }
ENTRY nvmlDeviceGetMaxClockInfo(void*, int clock, unsigned* value) { return give(value, clock == CLOCK_MEMORY ? 10000 : 2500); }
ENTRY nvmlDeviceGetMemoryBusWidth(void*, unsigned* value) { return give(value, 128); }
ENTRY nvmlDeviceGetNumGpuCores(void*, unsigned* value) { return give(value, 3072); }
ENTRY nvmlDeviceGetMigMode(void*, unsigned*, unsigned*) { return NVML_NOT_SUPPORTED; }
