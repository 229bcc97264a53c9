// Atomic operations, performed by the model so that it can distinguish them from plain accesses.
#pragma once

#define HEARTH_HOST_ATOMIC(name, type, width, operation)                                                    \
    __forceinline__ type name(type* address, type value) {                                                           \
        return hearth_host::from_bits<type>(                                                                \
            hearth_host_atomic_##width(address, operation, hearth_host::to_bits(value), 0));                \
    }
HEARTH_HOST_ATOMIC(atomicAdd, int, 32, HEARTH_HOST_ADD)
HEARTH_HOST_ATOMIC(atomicAdd, unsigned, 32, HEARTH_HOST_ADD)
HEARTH_HOST_ATOMIC(atomicAdd, float, 32, HEARTH_HOST_ADD_FLOAT)
HEARTH_HOST_ATOMIC(atomicAdd, unsigned long long, 64, HEARTH_HOST_ADD)
HEARTH_HOST_ATOMIC(atomicMax, int, 32, HEARTH_HOST_MAX)
HEARTH_HOST_ATOMIC(atomicMax, unsigned, 32, HEARTH_HOST_MAX_UNSIGNED)
HEARTH_HOST_ATOMIC(atomicMax, unsigned long long, 64, HEARTH_HOST_MAX_UNSIGNED)
HEARTH_HOST_ATOMIC(atomicMin, int, 32, HEARTH_HOST_MIN)
HEARTH_HOST_ATOMIC(atomicMin, unsigned, 32, HEARTH_HOST_MIN_UNSIGNED)
HEARTH_HOST_ATOMIC(atomicMin, unsigned long long, 64, HEARTH_HOST_MIN_UNSIGNED)
HEARTH_HOST_ATOMIC(atomicAnd, int, 32, HEARTH_HOST_AND)
HEARTH_HOST_ATOMIC(atomicAnd, unsigned, 32, HEARTH_HOST_AND)
HEARTH_HOST_ATOMIC(atomicOr, int, 32, HEARTH_HOST_OR)
HEARTH_HOST_ATOMIC(atomicOr, unsigned, 32, HEARTH_HOST_OR)
HEARTH_HOST_ATOMIC(atomicXor, int, 32, HEARTH_HOST_XOR)
HEARTH_HOST_ATOMIC(atomicXor, unsigned, 32, HEARTH_HOST_XOR)
HEARTH_HOST_ATOMIC(atomicExch, int, 32, HEARTH_HOST_EXCHANGE)
HEARTH_HOST_ATOMIC(atomicExch, unsigned, 32, HEARTH_HOST_EXCHANGE)
HEARTH_HOST_ATOMIC(atomicExch, float, 32, HEARTH_HOST_EXCHANGE)
#undef HEARTH_HOST_ATOMIC

#define HEARTH_HOST_ATOMIC_CAS(type, width)                                                                 \
    __forceinline__ type atomicCAS(type* address, type expected, type value) {                                       \
        return hearth_host::from_bits<type>(hearth_host_atomic_##width(                                     \
            address, HEARTH_HOST_COMPARE, hearth_host::to_bits(value), hearth_host::to_bits(expected)));    \
    }
HEARTH_HOST_ATOMIC_CAS(int, 32)
HEARTH_HOST_ATOMIC_CAS(unsigned, 32)
HEARTH_HOST_ATOMIC_CAS(unsigned long long, 64)
#undef HEARTH_HOST_ATOMIC_CAS

template <class T>
__forceinline__ T __ldg(const T* address) { return *address; }
