#include "transfer.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "config.h"
#include "stream_races.h"

namespace hearth {
namespace {

size_t extent(size_t width_bytes, size_t pitch, size_t rows) { return rows == 0 ? 0 : (rows - 1) * pitch + width_bytes; }

uint64_t host_range(Side side, const void* address, size_t bytes) {
    const HostRange* range = side == Side::HOST ? host_memory().find(address, bytes) : nullptr;
    return range != nullptr ? range->id : 0;
}

Fault gone(const char* what, const void* address, size_t bytes) {
    return {CUDA_ERROR_ILLEGAL_ADDRESS, format("copy of freed memory: the %s of a copy, %zu bytes at %p, was freed or unregistered before "
                                               "its stream was synchronised", what, bytes, address)};
}

Fault check_device(Device& device, const char* what, const void* address, size_t bytes) {
    if (device.memory.holds(address, bytes)) return {};
    return {CUDA_ERROR_ILLEGAL_ADDRESS, format("copy of freed memory: the %s of a copy, %zu bytes at %p, lies %s when its stream runs",
                                               what, bytes, address, device.memory.describe(address).c_str())};
}

// Of the host's source; 0 where there is none, it cannot be read, or without checks.
uint64_t source_checksum(const Transfer& t) {
    if (t.from_side != Side::HOST || !config().checks) return 0;
    uint64_t sum = 1;
    uint64_t words[512];
    for (size_t row = 0; row < t.rows; row++) {
        const char* from = (const char*)t.from + row * t.from_pitch;
        for (size_t done = 0; done < t.width_bytes; done += sizeof words) {
            size_t bytes = std::min(sizeof words, t.width_bytes - done);
            words[(bytes - 1) / 8] = 0;
            if (!read_host(words, from + done, bytes)) return 0;
            for (size_t i = 0; i < (bytes + 7) / 8; i++) sum = (sum ^ words[i]) * 0x9e3779b97f4a7c15u, sum ^= sum >> 29;
        }
    }
    return sum;
}

Fault check_source(const Transfer& t) {
    if (source_checksum(t) == t.checksum) return {};
    return {CUDA_ERROR_LAUNCH_FAILED, format("source of a copy changed: %zu rows of %zu bytes at %p are not what they were when the copy "
                                             "was queued", t.rows, t.width_bytes, t.from)};
}

Fault copy_row(Device& device, const Transfer& t, char* to, const char* from) {
    size_t to_offset = to - device.memory.base(), from_offset = from - device.memory.base();
    Fault fault;
    if (t.from_side == Side::DEVICE) fault = touch(device, from, t.width_bytes, false);
    if (!fault && t.to_side == Side::DEVICE) fault = touch(device, to, t.width_bytes, true);
    if (fault) return fault;
    if (t.to_side == Side::HOST) {
        if (!write_host(to, from, t.width_bytes)) return gone("destination", to, t.width_bytes);
    } else if (t.from_side == Side::HOST) {
        if (!read_host(to, from, t.width_bytes)) return gone("source", from, t.width_bytes);
        device.shadow.set_written_range(to_offset, t.width_bytes, true);
    } else {
        memmove(to, from, t.width_bytes);
        device.shadow.copy_written_range(to_offset, from_offset, t.width_bytes);
    }
    return {};
}

Fault run(Device& device, const Transfer& t) {
    size_t to_bytes = extent(t.width_bytes, t.to_pitch, t.rows), from_bytes = extent(t.width_bytes, t.from_pitch, t.rows);
    if (host_range(t.to_side, t.to, to_bytes) != t.to_range) return gone("destination", t.to, to_bytes);
    if (host_range(t.from_side, t.from, from_bytes) != t.from_range) return gone("source", t.from, from_bytes);
    Fault fault;
    if (t.to_side == Side::DEVICE) fault = check_device(device, "destination", t.to, to_bytes);
    if (!fault && t.from_side == Side::DEVICE) fault = check_device(device, "source", t.from, from_bytes);
    if (!fault) fault = check_source(t);
    if (config().slow_registered_us > 0 && t.from_side == Side::HOST) {
        const HostRange* range = host_memory().find(t.from, from_bytes);
        if (range != nullptr && range->registered) usleep(config().slow_registered_us);
    }
    begin_operation("a copy");
    for (size_t row = 0; row < t.rows && !fault; row++) {
        fault = copy_row(device, t, (char*)t.to + row * t.to_pitch, (const char*)t.from + row * t.from_pitch);
    }
    return fault;
}

// Fills in the host ranges; returns whether the device addresses are currently allocated.
bool prepare(Device& device, Transfer& t) {
    size_t to_bytes = extent(t.width_bytes, t.to_pitch, t.rows), from_bytes = extent(t.width_bytes, t.from_pitch, t.rows);
    if (t.to_side == Side::DEVICE && !device.memory.holds(t.to, to_bytes)) return false;
    if (t.from_side == Side::DEVICE && !device.memory.holds(t.from, from_bytes)) return false;
    if (t.rows > 1 && (t.to_pitch < t.width_bytes || t.from_pitch < t.width_bytes)) return false;
    t.to_range = host_range(t.to_side, t.to, to_bytes);
    t.from_range = host_range(t.from_side, t.from, from_bytes);
    t.checksum = source_checksum(t);
    return true;
}

Fault run_fill(Device& device, const Fill& fill) {
    size_t bytes = fill.width * fill.element_bytes;
    if (Fault fault = check_device(device, "destination", fill.to, extent(bytes, fill.pitch, fill.rows))) return fault;
    begin_operation("a fill");
    for (size_t row = 0; row < fill.rows; row++) {
        char* to = fill.to + row * fill.pitch;
        if (Fault fault = touch(device, to, bytes, true)) return fault;
        for (size_t i = 0; i < bytes; i += fill.element_bytes) memcpy(to + i, &fill.value, fill.element_bytes);
        device.shadow.set_written_range(to - device.memory.base(), bytes, true);
    }
    return {};
}

bool check_fill(Device& device, const Fill& fill) {
    size_t bytes = fill.width * fill.element_bytes;
    bool known_size = fill.element_bytes == 1 || fill.element_bytes == 2 || fill.element_bytes == 4;
    return known_size && (uintptr_t)fill.to % fill.element_bytes == 0 &&
           (bytes == 0 || device.memory.holds(fill.to, extent(bytes, fill.pitch, fill.rows)));
}

}  // namespace

CUresult add_transfer(Device& device, Stream* stream, Transfer t) {
    if (t.width_bytes == 0 || t.rows == 0) return CUDA_SUCCESS;
    if (!prepare(device, t)) return CUDA_ERROR_INVALID_VALUE;
    return device.streams.add(stream, [&device, t] { return run(device, t); });
}

CUresult do_transfer(Device& device, Transfer t) {
    if (t.width_bytes == 0 || t.rows == 0) return CUDA_SUCCESS;
    if (!prepare(device, t)) return CUDA_ERROR_INVALID_VALUE;
    return device.streams.run_now([&] { return run(device, t); });
}

CUresult add_fill(Device& device, Stream* stream, const Fill& fill) {
    if (!check_fill(device, fill)) return CUDA_ERROR_INVALID_VALUE;
    if (fill.width == 0) return CUDA_SUCCESS;
    return device.streams.add(stream, [&device, fill] { return run_fill(device, fill); });
}

CUresult do_fill(Device& device, const Fill& fill) {
    if (!check_fill(device, fill)) return CUDA_ERROR_INVALID_VALUE;
    if (fill.width == 0) return CUDA_SUCCESS;
    return device.streams.run_now([&] { return run_fill(device, fill); });
}

}  // namespace hearth
