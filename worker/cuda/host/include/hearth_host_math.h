// Arithmetic, bits and reinterpretation. Transcendental functions are the host's: their last bits differ from the device's.
#pragma once

#define HEARTH_HOST_INLINE inline __attribute__((always_inline))

extern "C" {
float expf(float);
float exp2f(float);
float expm1f(float);
float logf(float);
float log2f(float);
float log10f(float);
float log1pf(float);
float powf(float, float);
float sinf(float);
float cosf(float);
float tanf(float);
float tanhf(float);
float sqrtf(float);
float fabsf(float);
float fmaf(float, float, float);
float fmaxf(float, float);
float fminf(float, float);
float fmodf(float, float);
float floorf(float);
float ceilf(float);
float truncf(float);
float rintf(float);
float roundf(float);
float copysignf(float, float);
float ldexpf(float, int);
float frexpf(float, int*);
void sincosf(float, float*, float*);
double exp(double);
double exp2(double);
double log(double);
double log2(double);
double pow(double, double);
double sin(double);
double cos(double);
double sqrt(double);
double fabs(double);
double fma(double, double, double);
double fmax(double, double);
double fmin(double, double);
double floor(double);
double ceil(double);
double trunc(double);
double rint(double);
double ldexp(double, int);
}

HEARTH_HOST_INLINE float rsqrtf(float x) { return 1.0f / sqrtf(x); }

HEARTH_HOST_INLINE float exp(float x) { return expf(x); }
HEARTH_HOST_INLINE float exp2(float x) { return exp2f(x); }
HEARTH_HOST_INLINE float log(float x) { return logf(x); }
HEARTH_HOST_INLINE float log2(float x) { return log2f(x); }
HEARTH_HOST_INLINE float pow(float x, float y) { return powf(x, y); }
HEARTH_HOST_INLINE float sin(float x) { return sinf(x); }
HEARTH_HOST_INLINE float cos(float x) { return cosf(x); }
HEARTH_HOST_INLINE float sqrt(float x) { return sqrtf(x); }
HEARTH_HOST_INLINE float fabs(float x) { return fabsf(x); }
HEARTH_HOST_INLINE float floor(float x) { return floorf(x); }
HEARTH_HOST_INLINE float ceil(float x) { return ceilf(x); }
HEARTH_HOST_INLINE int abs(int x) { return x < 0 ? -x : x; }
HEARTH_HOST_INLINE long long llabs(long long x) { return x < 0 ? -x : x; }

HEARTH_HOST_INLINE bool isnan(float x) { return __builtin_isnan(x); }
HEARTH_HOST_INLINE bool isnan(double x) { return __builtin_isnan(x); }
HEARTH_HOST_INLINE bool isinf(float x) { return __builtin_isinf(x); }
HEARTH_HOST_INLINE bool isinf(double x) { return __builtin_isinf(x); }
HEARTH_HOST_INLINE bool isfinite(float x) { return __builtin_isfinite(x); }
HEARTH_HOST_INLINE bool isfinite(double x) { return __builtin_isfinite(x); }

#define HEARTH_HOST_MIN_MAX(type)                                     \
    HEARTH_HOST_INLINE type min(type a, type b) { return b < a ? b : a; } \
    HEARTH_HOST_INLINE type max(type a, type b) { return a < b ? b : a; }
HEARTH_HOST_MIN_MAX(int)
HEARTH_HOST_MIN_MAX(unsigned)
HEARTH_HOST_MIN_MAX(long)
HEARTH_HOST_MIN_MAX(unsigned long)
HEARTH_HOST_MIN_MAX(long long)
HEARTH_HOST_MIN_MAX(unsigned long long)
#undef HEARTH_HOST_MIN_MAX
HEARTH_HOST_INLINE unsigned min(int a, unsigned b) { return min((unsigned)a, b); }
HEARTH_HOST_INLINE unsigned min(unsigned a, int b) { return min(a, (unsigned)b); }
HEARTH_HOST_INLINE unsigned max(int a, unsigned b) { return max((unsigned)a, b); }
HEARTH_HOST_INLINE unsigned max(unsigned a, int b) { return max(a, (unsigned)b); }
HEARTH_HOST_INLINE float min(float a, float b) { return fminf(a, b); }
HEARTH_HOST_INLINE float max(float a, float b) { return fmaxf(a, b); }
HEARTH_HOST_INLINE double min(double a, double b) { return fmin(a, b); }
HEARTH_HOST_INLINE double max(double a, double b) { return fmax(a, b); }

// The build forbids contraction, so each of the plain operators rounds once.
HEARTH_HOST_INLINE float __fadd_rn(float a, float b) { return a + b; }
HEARTH_HOST_INLINE float __fsub_rn(float a, float b) { return a - b; }
HEARTH_HOST_INLINE float __fmul_rn(float a, float b) { return a * b; }
HEARTH_HOST_INLINE float __fdiv_rn(float a, float b) { return a / b; }
HEARTH_HOST_INLINE float __frcp_rn(float a) { return 1.0f / a; }
HEARTH_HOST_INLINE float __fsqrt_rn(float a) { return sqrtf(a); }
HEARTH_HOST_INLINE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
HEARTH_HOST_INLINE double __dadd_rn(double a, double b) { return a + b; }
HEARTH_HOST_INLINE double __dsub_rn(double a, double b) { return a - b; }
HEARTH_HOST_INLINE double __dmul_rn(double a, double b) { return a * b; }
HEARTH_HOST_INLINE double __ddiv_rn(double a, double b) { return a / b; }
HEARTH_HOST_INLINE double __fma_rn(double a, double b, double c) { return fma(a, b, c); }

// Conversions saturate and map NaN to zero, as on the device; a C++ cast would be undefined there.
HEARTH_HOST_INLINE int __float2int_rz(float x) {
    return isnan(x) ? 0 : x >= 2147483648.0f ? 2147483647 : x < -2147483648.0f ? -2147483647 - 1 : (int)x;
}
HEARTH_HOST_INLINE int __float2int_rn(float x) { return __float2int_rz(rintf(x)); }
HEARTH_HOST_INLINE int __float2int_rd(float x) { return __float2int_rz(floorf(x)); }
HEARTH_HOST_INLINE unsigned __float2uint_rz(float x) { return !(x > 0.0f) ? 0u : x >= 4294967296.0f ? 4294967295u : (unsigned)x; }
HEARTH_HOST_INLINE unsigned __float2uint_rn(float x) { return __float2uint_rz(rintf(x)); }
HEARTH_HOST_INLINE float __int2float_rn(int x) { return (float)x; }
HEARTH_HOST_INLINE float __uint2float_rn(unsigned x) { return (float)x; }
HEARTH_HOST_INLINE float __ull2float_rz(unsigned long long x) {
    int dropped = x == 0 ? 0 : 40 - __builtin_clzll(x);
    return (float)(dropped > 0 ? x >> dropped << dropped : x);
}

namespace hearth_host {

template <class To, class From>
HEARTH_HOST_INLINE To reinterpret(From from) {
    static_assert(sizeof(To) == sizeof(From), "one size");
    return __builtin_bit_cast(To, from);
}

}  // namespace hearth_host

HEARTH_HOST_INLINE unsigned __float_as_uint(float x) { return hearth_host::reinterpret<unsigned>(x); }
HEARTH_HOST_INLINE int __float_as_int(float x) { return hearth_host::reinterpret<int>(x); }
HEARTH_HOST_INLINE float __uint_as_float(unsigned x) { return hearth_host::reinterpret<float>(x); }
HEARTH_HOST_INLINE float __int_as_float(int x) { return hearth_host::reinterpret<float>(x); }
HEARTH_HOST_INLINE long long __double_as_longlong(double x) { return hearth_host::reinterpret<long long>(x); }
HEARTH_HOST_INLINE double __longlong_as_double(long long x) { return hearth_host::reinterpret<double>(x); }

HEARTH_HOST_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
HEARTH_HOST_INLINE int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
HEARTH_HOST_INLINE int __ffs(int x) { return __builtin_ffs(x); }
HEARTH_HOST_INLINE int __ffsll(long long x) { return __builtin_ffsll(x); }
HEARTH_HOST_INLINE int __clz(int x) { return x == 0 ? 32 : __builtin_clz((unsigned)x); }
HEARTH_HOST_INLINE int __clzll(long long x) { return x == 0 ? 64 : __builtin_clzll((unsigned long long)x); }
HEARTH_HOST_INLINE unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)(((unsigned long long)a * b) >> 32); }
HEARTH_HOST_INLINE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)(((unsigned __int128)a * b) >> 64);
}
HEARTH_HOST_INLINE int __mul24(int a, int b) { return ((a << 8) >> 8) * ((b << 8) >> 8); }
HEARTH_HOST_INLINE unsigned __brev(unsigned x) {
    unsigned reversed = 0;
    for (int bit = 0; bit < 32; bit++) reversed |= ((x >> bit) & 1u) << (31 - bit);
    return reversed;
}
HEARTH_HOST_INLINE unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
    unsigned long long bytes = ((unsigned long long)high << 32) | low;
    unsigned picked = 0;
    for (int i = 0; i < 4; i++) picked |= (unsigned)((bytes >> (8 * ((selector >> (4 * i)) & 7u))) & 0xffu) << (8 * i);
    return picked;
}
HEARTH_HOST_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)(((((unsigned long long)high << 32) | low) << (shift & 31u)) >> 32);
}
HEARTH_HOST_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return (unsigned)((((unsigned long long)high << 32) | low) >> (shift & 31u));
}

#undef HEARTH_HOST_INLINE
