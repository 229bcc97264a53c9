// cp.async: the bytes land at the wait and no earlier, so that after a missing wait or barrier a reader sees the old contents.
#pragma once

#include "executor.h"

namespace hearth {

// Drops the copies that the thread's block never waited for.
void abandon_copies(Fiber& fiber);

}  // namespace hearth
