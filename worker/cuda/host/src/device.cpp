#include "device.h"

#include <atomic>

#include "config.h"
#include "module.h"

namespace hearth {
namespace {

// Never destroyed, like everything here that the driver's entries use: threads may still call them while the process exits.
std::vector<Device*>& devices = *new std::vector<Device*>;
std::atomic<bool> is_initialised = false;

}  // namespace

Device::Device(int ordinal)
    : ordinal(ordinal), memory(config().memory_bytes), shadow(config().checks ? memory.reserved_bytes() : 0), streams(*this) {}

// Compute capabilities and their shared memory: the CUDA C++ programming guide, "Technical Specifications per Compute Capability".
unsigned Device::multiprocessor_shared_bytes() const {
    switch (config().capability_major * 10 + config().capability_minor) {
        case 75: return 64 << 10;
        case 80: case 87: return 164 << 10;
        case 86: case 89: case 120: case 121: return 100 << 10;
        default: return config().capability_major >= 9 ? 228 << 10 : 96 << 10;
    }
}

// One KiB per block is reserved by the system.
unsigned Device::opt_in_shared_bytes() const { return multiprocessor_shared_bytes() - 1024; }

Device* device(int ordinal) { return ordinal >= 0 && (size_t)ordinal < devices.size() ? devices[ordinal] : nullptr; }

bool initialised() { return is_initialised; }

void initialise() {
    while (devices.size() < (size_t)config().devices) devices.push_back(new Device((int)devices.size()));
    is_initialised = true;
}

void forget_labels() {
    shared_memory.dynamic().shadow->forget_labels();
    for (Device* device : devices) {
        device->shadow.forget_labels();
        for (Module* module : device->modules) {
            if (module->shared_shadow != nullptr) module->shared_shadow->forget_labels();
        }
    }
}

Device*& current_device() {
    static thread_local Device* current = nullptr;
    return current;
}

std::recursive_mutex& driver_mutex() {
    static auto& mutex = *new std::recursive_mutex;
    return mutex;
}

Entry::Entry() : lock_(driver_mutex()), device_(current_device()) {
    if (device_ != nullptr && device_->error == CUDA_SUCCESS && devices_lost()) device_->error = CUDA_ERROR_UNKNOWN;
    status_ = !is_initialised ? CUDA_ERROR_NOT_INITIALIZED : device_ == nullptr ? CUDA_ERROR_INVALID_CONTEXT : device_->error;
}

}  // namespace hearth
