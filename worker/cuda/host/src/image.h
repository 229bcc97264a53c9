// The model's replacement for a cubin: a header, the entry points and the shared object that g++ built.
#pragma once

#include <cstdint>

namespace hearth {

constexpr char IMAGE_MAGIC[16] = "HearthHostModel";
constexpr uint32_t IMAGE_VERSION = 1;

struct ImageHeader {
    char magic[16];
    uint32_t version;
    uint32_t checks;
    uint32_t capability;     // 10 * major + minor
    uint32_t entry_count;    // number of ImageEntry after the header
    uint64_t object_offset;
    uint64_t object_bytes;
};

struct ImageEntry {
    char name[128];
};

}  // namespace hearth
