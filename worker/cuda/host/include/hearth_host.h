// NVRTC's built-in declarations, for g++: included before every kernel of the host model. No system header is
// included, so that a kernel that uses one fails here as it does under NVRTC.
#pragma once

// `__global__` and `__launch_bounds__` are left in place: entry points are found by them after preprocessing.
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(bytes) __attribute__((aligned(bytes)))

// Threads of a block are fibers of one host thread and blocks run one after the other, so a static belongs to the
// block. The optimiser must keep it as written: `used` tells it that others access it across calls.
#define __shared__ static __attribute__((used))

typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;

#include "hearth_host_abi.h"

#include "hearth_host_types.h"

#include "hearth_host_math.h"

#include "hearth_host_warp.h"

#include "hearth_host_atomic.h"

#include "hearth_host_launch.h"
