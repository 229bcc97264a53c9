// Vector types with CUDA's alignment, and the indices of the running thread.
#pragma once

// A vector is copied as a whole, by one access that must be aligned, as on the device; g++ would otherwise copy a struct by members.
#define HEARTH_HOST_VECTOR(type, name, count, members, parameters, initializers, arguments)                        \
    struct __attribute__((aligned(count * sizeof(type)))) name {                                                   \
        typedef type Whole __attribute__((vector_size(count * sizeof(type))));                                     \
        union {                                                                                                    \
            struct {                                                                                               \
                type members;                                                                                      \
            };                                                                                                     \
            Whole whole;                                                                                           \
        };                                                                                                         \
        name() = default;                                                                                          \
        __forceinline__ constexpr name parameters : initializers {}                                                \
        __forceinline__ name(const name& other) : whole(other.whole) {}                                            \
        __forceinline__ name& operator=(const name& other) {                                                       \
            whole = other.whole;                                                                                   \
            return *this;                                                                                          \
        }                                                                                                          \
    };                                                                                                             \
    __forceinline__ name make_##name parameters { return name arguments; }

#define HEARTH_HOST_UNPACK(...) __VA_ARGS__
#define HEARTH_HOST_VECTOR_2(type, name)                                                                           \
    HEARTH_HOST_VECTOR(type, name, 2, HEARTH_HOST_UNPACK(x, y), (type x, type y), HEARTH_HOST_UNPACK(x(x), y(y)), (x, y))
#define HEARTH_HOST_VECTOR_3(type, name)                                                                           \
    struct name {                                                                                                  \
        type x, y, z;                                                                                              \
    };                                                                                                             \
    __forceinline__ name make_##name(type x, type y, type z) { return {x, y, z}; }
#define HEARTH_HOST_VECTOR_4(type, name)                                                                           \
    HEARTH_HOST_VECTOR(type, name, 4, HEARTH_HOST_UNPACK(x, y, z, w), (type x, type y, type z, type w),            \
                       HEARTH_HOST_UNPACK(x(x), y(y), z(z), w(w)), (x, y, z, w))

HEARTH_HOST_VECTOR_2(signed char, char2)
HEARTH_HOST_VECTOR_4(signed char, char4)
HEARTH_HOST_VECTOR_2(unsigned char, uchar2)
HEARTH_HOST_VECTOR_4(unsigned char, uchar4)
HEARTH_HOST_VECTOR_2(short, short2)
HEARTH_HOST_VECTOR_4(short, short4)
HEARTH_HOST_VECTOR_2(unsigned short, ushort2)
HEARTH_HOST_VECTOR_4(unsigned short, ushort4)
HEARTH_HOST_VECTOR_2(int, int2)
HEARTH_HOST_VECTOR_3(int, int3)
HEARTH_HOST_VECTOR_4(int, int4)
HEARTH_HOST_VECTOR_2(unsigned, uint2)
HEARTH_HOST_VECTOR_3(unsigned, uint3)
HEARTH_HOST_VECTOR_4(unsigned, uint4)
HEARTH_HOST_VECTOR_2(float, float2)
HEARTH_HOST_VECTOR_3(float, float3)
HEARTH_HOST_VECTOR_4(float, float4)
HEARTH_HOST_VECTOR_2(long long, longlong2)
HEARTH_HOST_VECTOR_2(unsigned long long, ulonglong2)
HEARTH_HOST_VECTOR_2(double, double2)

#undef HEARTH_HOST_VECTOR
#undef HEARTH_HOST_VECTOR_2
#undef HEARTH_HOST_VECTOR_3
#undef HEARTH_HOST_VECTOR_4
#undef HEARTH_HOST_UNPACK

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};

constexpr int warpSize = 32;

namespace hearth_host {

// Assembly, because an ordinary load would be instrumented as an access by the kernel.
inline __attribute__((always_inline)) unsigned load_index(const unsigned& index) {
    unsigned value;
#if defined(__x86_64__)
    asm("movl %1, %0" : "=r"(value) : "m"(index));
#elif defined(__aarch64__)
    asm("ldr %w0, %1" : "=r"(value) : "m"(index));
#else
#error "the host model knows x86-64 and aarch64"
#endif
    return value;
}

inline __attribute__((always_inline)) uint3 load_indices(const unsigned (&index)[3]) {
    return {load_index(index[0]), load_index(index[1]), load_index(index[2])};
}

}  // namespace hearth_host

#define threadIdx (hearth_host::load_indices(hearth_host_indices.thread))
#define blockIdx (hearth_host::load_indices(hearth_host_indices.block))
#define blockDim (hearth_host::load_indices(hearth_host_indices.block_dim))
#define gridDim (hearth_host::load_indices(hearth_host_indices.grid_dim))
