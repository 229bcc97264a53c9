// Atomic operations. One thread runs at a time, so the operation itself is plain; the point is the check.
#include <cstring>

#include "access.h"
#include "config.h"

namespace {

float to_float(unsigned bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

unsigned to_bits(float value) {
    unsigned bits;
    memcpy(&bits, &value, 4);
    return bits;
}

template <class U, class S>
U apply(HearthHostAtomic operation, U old, U value, U expected) {
    switch (operation) {
        case HEARTH_HOST_ADD: return old + value;
        case HEARTH_HOST_ADD_FLOAT: return to_bits(to_float((unsigned)old) + to_float((unsigned)value));
        case HEARTH_HOST_MAX: return (S)value > (S)old ? value : old;
        case HEARTH_HOST_MAX_UNSIGNED: return value > old ? value : old;
        case HEARTH_HOST_MIN: return (S)value < (S)old ? value : old;
        case HEARTH_HOST_MIN_UNSIGNED: return value < old ? value : old;
        case HEARTH_HOST_AND: return old & value;
        case HEARTH_HOST_OR: return old | value;
        case HEARTH_HOST_XOR: return old ^ value;
        case HEARTH_HOST_EXCHANGE: return value;
        case HEARTH_HOST_COMPARE: break;
    }
    return old == expected ? value : old;
}

template <class U, class S>
U atomic(void* address, HearthHostAtomic operation, U value, U expected, const void* code) {
    using namespace hearth;
    if (config().checks) {
        check_access({Use::ATOMIC, static_cast<const char*>(address), sizeof(U), sizeof(U), *running_fiber, {code, nullptr}});
    }
    U* place = static_cast<U*>(address);
    U old = *place;
    *place = apply<U, S>(operation, old, value, expected);
    return old;
}

}  // namespace

unsigned hearth_host_atomic_32(void* address, HearthHostAtomic operation, unsigned value, unsigned expected) {
    return atomic<unsigned, int>(address, operation, value, expected, __builtin_return_address(0));
}

unsigned long long hearth_host_atomic_64(void* address, HearthHostAtomic operation, unsigned long long value,
                                         unsigned long long expected) {
    return atomic<unsigned long long, long long>(address, operation, value, expected, __builtin_return_address(0));
}
