// wgmma: what a warp has started and not waited for.
#pragma once

#include "executor.h"

namespace hearth {

// All lanes have arrived: their products are under way, or those of their oldest groups are done.
void start_product(Executor& executor, unsigned warp);
void finish_products(Executor& executor, unsigned warp);

// Forgets the products that the thread's block never waited for.
void abandon_products(Fiber& fiber);

}  // namespace hearth
