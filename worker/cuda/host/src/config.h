// The model's environment variables, read once.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace hearth {

struct Config {
    bool checks;
    bool shuffled;
    uint64_t seed;
    size_t memory_bytes;
    int devices;
    int driver_version;
    int capability_major;
    int capability_minor;
    bool host_register;
    bool read_only_register;
    unsigned slow_registered_us;
    int memory_info_error;
    uint64_t skipped_wait;
    std::string report;
    std::string lost;
};

const Config& config();

// Whether kernels are compiled with checks; the compiler library needs only this part of the configuration.
bool checks_wanted();

// Whether the devices have fallen off the bus: the file named by HEARTH_HOST_MODEL_LOST exists.
bool devices_lost();

}  // namespace hearth
