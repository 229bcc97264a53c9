// Copies and fills as pieces of a stream's work.
#pragma once

#include <cstddef>
#include <cstdint>

#include "device.h"

namespace hearth {

enum class Side : uint8_t { HOST, DEVICE };

struct Transfer {
    Side to_side;
    void* to;
    size_t to_pitch;
    Side from_side;
    const void* from;
    size_t from_pitch;
    size_t width_bytes;
    size_t rows;
    // The driver's ranges of the host buffers at the time of the call; 0 for pageable memory.
    uint64_t to_range = 0;
    uint64_t from_range = 0;
    // Of the host's bytes at the time of the call.
    uint64_t checksum = 0;
};

inline Transfer transfer(Side to_side, void* to, Side from_side, const void* from, size_t bytes) {
    return {to_side, to, bytes, from_side, from, bytes, bytes, 1};
}

// Checks the device addresses and queues the copy.
CUresult add_transfer(Device& device, Stream* stream, Transfer transfer);
// The same, immediately, after all work that it has to wait for.
CUresult do_transfer(Device& device, Transfer transfer);

struct Fill {
    char* to;
    size_t pitch;
    unsigned value;
    unsigned element_bytes;     // 1, 2 or 4
    size_t width;               // in elements
    size_t rows;
};

CUresult add_fill(Device& device, Stream* stream, const Fill& fill);
CUresult do_fill(Device& device, const Fill& fill);

}  // namespace hearth
