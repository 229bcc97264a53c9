// Checks of single accesses: bounds, alignment, unwritten bytes, races.
#pragma once

#include "executor.h"
#include "shared_memory.h"

namespace hearth {

enum class Use : uint8_t { READ, WRITE, ATOMIC, ASYNC_WRITE };

// Location of an access in the kernel: an address in its code, or a source location.
struct Place {
    const void* code = nullptr;
    const HearthHostSite* site = nullptr;
};

struct Access {
    Use use;
    const char* address;
    size_t bytes;
    unsigned alignment;
    const Fiber& fiber;
    Place place;
};

// Called at the start of a launch, with its device.
void begin_access_checks(Device& device);

// Does not return if the access is an error.
void check_access(const Access& access);
// The same, if only shared memory, or only other memory, is valid.
void check_shared_access(const Access& access);
void check_global_access(const Access& access);

// Records that a cp.async has landed: the bytes count as written by this thread.
void mark_landed(const Fiber& fiber, const void* shared, unsigned bytes);
// Records that the launch ended without waiting for it.
void mark_abandoned(const void* shared, unsigned bytes);

// The rest of a check, if the quick one has not passed. `offset` is in `space`.
void check_slowly(Space& space, bool is_shared, size_t offset, unsigned bytes, const Access& access);

// Ends the launch with an error's text.
[[noreturn]] void fail_misaligned(const Access& access);
[[noreturn]] void fail_out_of_bounds(const Access& access);
[[noreturn]] void fail_unwritten(const Access& access, bool is_shared);
[[noreturn]] void fail_race(const Access& access, bool is_shared, size_t byte, Label other, bool other_wrote);

}  // namespace hearth
