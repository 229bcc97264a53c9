// A device, which is also its primary context.
#pragma once

#include <memory>
#include <mutex>
#include <set>

#include "memory.h"
#include "shadow.h"
#include "stream.h"

namespace hearth {

struct Device {
    explicit Device(int ordinal);

    int ordinal;
    int retained = 0;
    CUresult error = CUDA_SUCCESS;     // sticky, like a context's after a failed launch
    DeviceMemory memory;
    Shadow shadow;                     // of `memory`; empty without checks
    Streams streams;
    std::set<Module*> modules;

    unsigned opt_in_shared_bytes() const;
    unsigned multiprocessor_shared_bytes() const;
};

constexpr unsigned SHARED_BYTES = 48 * 1024;    // available to a block without opting in

// All devices, created by cuInit; null for an ordinal that does not exist.
Device* device(int ordinal);
bool initialised();
void initialise();

// Clears every shadow's labels: of all devices, of all modules' shared arrays and of dynamic shared memory.
void forget_labels();

// The device that is current on the calling thread.
Device*& current_device();

// Held by every entry of the driver: only one runs at a time.
std::recursive_mutex& driver_mutex();

// Prologue of an entry that works in the current context: the lock, the device, and the error if it cannot continue.
class Entry {
public:
    Entry();
    CUresult status() const { return status_; }
    Device* operator->() const { return device_; }
    Device& operator*() const { return *device_; }

private:
    std::lock_guard<std::recursive_mutex> lock_;
    Device* device_;
    CUresult status_;
};

}  // namespace hearth
