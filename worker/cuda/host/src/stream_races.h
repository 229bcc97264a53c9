// Checks of copies, fills and frees: whether what other streams do with the same bytes is ordered with them.
#pragma once

#include "device.h"

namespace hearth {

// Begins an operation that touches whole ranges; `name` is for reports.
void begin_operation(const char* name);

// Notes that the running operation reads or writes bytes of the device, and reports what it races with.
Fault touch(Device& device, const char* address, size_t bytes, bool writes);

// Reports an operation that may still use an allocation which is freed.
Fault check_free(Device& device, const char* address, size_t bytes);

}  // namespace hearth
