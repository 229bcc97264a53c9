// cp.async: the bytes land at the wait and no earlier, so that a missing wait or barrier leaves a reader with what was there before.
#pragma once

#include "executor.h"

namespace hearth {

// Forgets the copies that the thread's block never waited for.
void abandon_copies(Fiber& fiber);

}  // namespace hearth
