// Memory that kernels may touch: the allocations of a device, and host memory that is pinned or registered.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "cuda_api.h"

namespace hearth {

// The addresses of one device. They are reserved at once and handed out in a ring, so that a freed address is reused
// late, with a gap after every allocation, so that an access past the end never reaches another allocation.
class DeviceMemory {
public:
    static constexpr size_t GRANULE = 512;    // alignment of cuMemAlloc

    explicit DeviceMemory(size_t budget_bytes);

    char* allocate(size_t bytes);    // null if over budget
    bool free(char* address);        // false if not the start of an allocation
    size_t size(const char* address) const;      // of the allocation that starts there, or 0
    size_t free_bytes() const { return budget_bytes_ - used_bytes_; }

    bool reserved(const void* address) const { return (size_t)((const char*)address - base_) < reserved_bytes_; }
    // Whether all bytes lie in one live allocation.
    bool holds(const void* address, size_t bytes) const {
        size_t offset = (const char*)address - base_;
        if (offset >= reserved_bytes_) return false;
        return offset + bytes <= ends_[offset / GRANULE];
    }
    // Describes the nearest allocation and the distance to the address, or says that it was freed.
    std::string describe(const void* address) const;
    char* base() const { return base_; }
    size_t reserved_bytes() const { return reserved_bytes_; }

private:
    char* find_gap(size_t bytes);

    size_t budget_bytes_;
    size_t used_bytes_ = 0;
    size_t reserved_bytes_;
    size_t cursor_ = 0;
    char* base_;
    uint64_t* ends_;                       // by granule: offset where its allocation ends, or 0
    std::map<size_t, size_t> live_;        // offset -> bytes
    std::map<size_t, size_t> freed_;       // of addresses that have not been reused
};

struct HostRange {
    size_t bytes;
    bool registered;     // by cuMemHostRegister, not allocated by the driver
    bool read_only;
    uint64_t id;         // never reused, so that a copy notices that its buffer has been replaced
};

class HostMemory {
public:
    void* allocate(size_t bytes);
    bool free(void* address);
    CUresult add(void* address, size_t bytes, bool read_only);
    CUresult remove(void* address);
    // The range that contains all these bytes, or null.
    const HostRange* find(const void* address, size_t bytes) const;

private:
    std::map<uintptr_t, HostRange> ranges_;
    uint64_t next_id_ = 1;
};

HostMemory& host_memory();

// Copies to or from memory of the process that may have been unmapped; returns false if so.
bool read_host(void* to, const void* from, size_t bytes);
bool write_host(void* to, const void* from, size_t bytes);

}  // namespace hearth
