// Rules for which accesses to a byte are ordered. An access is ordered after another if a barrier that both threads
// passed lies between them: __syncthreads for a block, __syncwarp for a warp. Nothing orders blocks within a launch.
#pragma once

#include "executor.h"

namespace hearth {

bool ordered(Label before, bool is_shared, const Fiber& fiber);

// The label of reads after adding one more.
Label add_read(Label reads, bool is_shared, const Fiber& fiber);

}  // namespace hearth
