// wgmma: products that a warp has started and not waited for.
#pragma once

#include "executor.h"

namespace hearth {

// Called once all lanes have arrived: starts their products, or finishes those of their oldest groups.
void start_product(Executor& executor, unsigned warp);
void finish_products(Executor& executor, unsigned warp);

// Drops the products that the thread's block never waited for.
void abandon_products(Fiber& fiber);

}  // namespace hearth
