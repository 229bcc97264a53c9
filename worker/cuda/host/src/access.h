// Checks of single accesses: bounds, alignment, bytes that were never written, races.
#pragma once

#include "executor.h"
#include "shared_memory.h"

namespace hearth {

enum class Use : uint8_t { READ, WRITE, ATOMIC, ASYNC_WRITE };

// Where in the kernel an access stands: an address of its code, or a place of its source.
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

// Called at the start of a launch: the addresses of its device.
void begin_access_checks(Device& device);

// Does not return when the access is in error.
void check_access(const Access& access);
// The same where only shared memory, or only other memory, will do.
void check_shared_access(const Access& access);
void check_global_access(const Access& access);

// A cp.async has landed: the bytes are this thread's writes.
void mark_landed(const Fiber& fiber, const void* shared);
// The launch ends without having waited for it.
void mark_abandoned(const void* shared);

// The rest of a check, where the quick one has not found that all is well. `offset` lies in `space`.
void check_slowly(Space& space, bool is_shared, size_t offset, unsigned bytes, const Access& access);

// End the launch with the text of an error.
[[noreturn]] void fail_misaligned(const Access& access);
[[noreturn]] void fail_out_of_bounds(const Access& access);
[[noreturn]] void fail_unwritten(const Access& access, bool is_shared);
[[noreturn]] void fail_race(const Access& access, bool is_shared, size_t byte, Label other, bool other_wrote);

}  // namespace hearth
