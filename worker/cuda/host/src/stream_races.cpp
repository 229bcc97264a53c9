#include "stream_races.h"

#include "config.h"
#include "executor.h"

namespace hearth {
namespace {

struct Conflict {
    Label with = 0;
    bool wrote = false;
    size_t byte = 0;
    explicit operator bool() const { return with != 0; }
};

// Finds an access to one of the bytes that does not come before the running operation: a write, or any if `reads` matter.
Conflict find_conflict(Shadow& shadow, size_t offset, size_t bytes, bool reads) {
    for (size_t i = 0; i < bytes; i++) {
        Label write = *shadow.writes(offset + i), read = *shadow.reads(offset + i);
        if (!stream_order.is_before(write)) return {write, true, i};
        if (reads && !stream_order.is_before(read)) return {read, false, i};
    }
    return {};
}

std::string describe(const Conflict& conflict) {
    return format("whose byte %zu was %s by %s with no event between", conflict.byte, conflict.wrote ? "written" : "read",
                  stream_order.describe(conflict.with).c_str());
}

}  // namespace

void begin_operation(const char* name) {
    executor().advance_clock(&RaceClock::begin_launch);
    stream_order.begin(race_clock.now(), name);
}

Fault touch(Device& device, const char* address, size_t bytes, bool writes) {
    if (!config().checks) return {};
    Shadow& shadow = device.shadow;
    size_t offset = address - device.memory.base();
    const Label mine = make_label(race_clock.now(), GRID_SET);
    if (Conflict conflict = find_conflict(shadow, offset, bytes, writes)) {
        return {CUDA_ERROR_LAUNCH_FAILED,
                format("race between streams: %s %s %zu bytes at %p, %s, %s", stream_order.describe(mine).c_str(),
                       writes ? "writes" : "reads", bytes, (const void*)address, device.memory.describe(address).c_str(),
                       describe(conflict).c_str())};
    }
    for (size_t i = 0; i < bytes; i++) *(writes ? shadow.writes(offset + i) : shadow.reads(offset + i)) = mine;
    return {};
}

Fault check_free(Device& device, const char* address, size_t bytes) {
    if (!config().checks) return {};
    begin_operation("cuMemFreeAsync");
    // If all that ran comes before, no byte has to be looked at.
    if (stream_order.settled_floor() == race_clock.launch_floor()) return {};
    Conflict conflict = find_conflict(device.shadow, address - device.memory.base(), bytes, true);
    if (!conflict) return {};
    return {CUDA_ERROR_ILLEGAL_ADDRESS, format("free of memory in use: an allocation of %zu bytes at %p, %s", bytes, (const void*)address,
                                               describe(conflict).c_str())};
}

}  // namespace hearth
