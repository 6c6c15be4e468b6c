/* simd_portable.h: vectors of four floats in the compiler's own vector types, for processors without AVX2. One of three
 * headers with the same names (simd_portable.h, simd_avx2.h, simd_avx512.h); the *_impl.h files are written once
 * against these names and compiled once for each. Included by one .c file an instruction set; knows nothing of ops.
 *
 * vf_max(a, b) and vf_min(a, b) give b where either is NaN, as the x86 instructions do: callers order their arguments
 * so that NaN survives. The *_n functions touch the first n lanes only; the others read as 0. */
#ifndef QUIRE_KERNELS_CPU_SIMD_PORTABLE_H
#define QUIRE_KERNELS_CPU_SIMD_PORTABLE_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define SIMD_LANES      4
#define SIMD_ROWS_MAX   2 /* rows that the register file can hold beside 4 columns */
#define SIMD_NAME(name) name##_portable

typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
typedef uint32_t vu __attribute__((vector_size(16)));

static inline vf vf_set1(float x) {
    return (vf){x, x, x, x};
}
static inline vf vf_zero(void) {
    return vf_set1(0.0f);
}

static inline vf vf_load(const float *p) {
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}

static inline void vf_store(float *p, vf x) {
    memcpy(p, &x, sizeof x);
}

static inline vf vf_load_n(const float *p, int64_t n) {
    float x[4] = {0};
    memcpy(x, p, (size_t)n * sizeof *p);
    return vf_load(x);
}

static inline void vf_store_n(float *p, vf x, int64_t n) {
    memcpy(p, &x, (size_t)n * sizeof *p);
}

static inline vf vf_add(vf a, vf b) {
    return a + b;
}
static inline vf vf_sub(vf a, vf b) {
    return a - b;
}
static inline vf vf_mul(vf a, vf b) {
    return a * b;
}
static inline vf vf_div(vf a, vf b) {
    return a / b;
}
static inline vf vf_fma(vf a, vf b, vf c) {
    return a * b + c;
} /* a b + c */
static inline vf vf_fnma(vf a, vf b, vf c) {
    return c - a * b;
} /* c - a b */

static inline vf vf_choose(vi mask, vf yes, vf no) {
    return (vf)((mask & (vi)yes) | (~mask & (vi)no));
}
static inline vf vf_max(vf a, vf b) {
    return vf_choose(a > b, a, b);
}
static inline vf vf_min(vf a, vf b) {
    return vf_choose(a < b, a, b);
}

static inline vf vf_abs(vf x) {
    return (vf)((vi)x & 0x7fffffff);
}
static inline vf vf_copysign(vf size, vf sign) {
    return (vf)(((vi)size & 0x7fffffff) | ((vi)sign & (vi)vf_set1(-0.0f)));
}

/* Lanes 1 0 3 2 ... */
static inline vf vf_swap_pairs(vf x) {
    return (vf){x[1], x[0], x[3], x[2]};
}

/* IEEE half floats, widened: shifting the bits up leaves an exponent 112 too small (a subnormal becomes a
 * normal in the multiplication); infinity and NaN get theirs by hand. */
static inline vf vf_load_f16_n(const uint16_t *p, int64_t n) {
    uint16_t h[4] = {0};
    memcpy(h, p, (size_t)n * sizeof *p);
    vu bits = {h[0], h[1], h[2], h[3]};
    vu size = bits & 0x7fff;
    vu wide = (vu)((vf)(size << 13) * 0x1p112f);
    vu special = (vu)(size > 0x7bff) & 0x7f800000;
    return (vf)(wide | special | ((bits & 0x8000) << 16));
}

static inline vf vf_load_f16(const uint16_t *p) {
    return vf_load_f16_n(p, SIMD_LANES);
}

/* Rounds to nearest even. */
static inline uint16_t f16_of_f32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    uint32_t sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (size >= 0x47800000) return (uint16_t)(sign | 0x7c00);
    if (size < 0x38800000) { /* subnormal: let the adder round at 2^-24 */
        float magic;
        memcpy(&magic, &size, sizeof magic);
        magic += 0.5f;
        memcpy(&size, &magic, sizeof size);
        return (uint16_t)(sign | (size - 0x3f000000));
    }
    size += 0xc8000fff + ((size >> 13) & 1); /* exponent bias 127 -> 15, and half a unit less one, plus the odd bit */
    return (uint16_t)(sign | (size >> 13));
}

static inline void vf_store_f16_n(uint16_t *p, vf x, int64_t n) {
    for (int64_t i = 0; i < n; i++) p[i] = f16_of_f32(x[i]);
}

static inline void vf_store_f16(uint16_t *p, vf x) {
    vf_store_f16_n(p, x, SIMD_LANES);
}

static inline float vf_hsum(vf a) {
    return (a[0] + a[1]) + (a[2] + a[3]);
}

/* Quads are the 128-bit pieces of a vector, here one. Quad j of the loaded vector comes from p[j]. */
static inline vf vf_load_quads(const float *const *p) {
    return vf_load(p[0]);
}
static inline vf vf_load_quads_f16(const uint16_t *const *p) {
    return vf_load_f16(p[0]);
}
static inline vf vf_repeat_quad(const float *p) {
    return vf_load(p);
}

/* Quad j of x goes to out + j * step, for the first `quads`. */
static inline void vf_store_quads(float *out, int64_t step, vf x, int64_t quads) {
    vf_store(out, x);
}

/* Lane 4 j + v is the sum of quad j of the v-th argument, (0 + 2) + (1 + 3). */
static inline vf vf_sum_quads(vf a, vf b, vf c, vf d) {
    vf even = {a[0] + a[2], b[0] + b[2], c[0] + c[2], d[0] + d[2]};
    vf odd = {a[1] + a[3], b[1] + b[3], c[1] + c[3], d[1] + d[3]};
    return even + odd;
}

static inline float vf_hmax(vf a) {
    float m = a[0];
    for (int i = 1; i < 4; i++) m = m > a[i] ? m : a[i];
    return m;
}

/* Lanes lo <= i < hi of x, minus infinity elsewhere. */
static inline vf vf_keep(vf x, int32_t lo, int32_t hi) {
    vi lane = {0, 1, 2, 3};
    return vf_choose((lane >= lo) & (lane < hi), x, vf_set1(-INFINITY));
}

static inline uint32_t mask_bits(vi mask) {
    return (uint32_t)(mask[0] & 1) | (uint32_t)(mask[1] & 2) | (uint32_t)(mask[2] & 4) | (uint32_t)(mask[3] & 8);
}
/* Bit i is set where the comparison holds in lane i; NaN compares false. */
static inline uint32_t vf_bits_ge(vf a, vf b) {
    return mask_bits(a >= b);
}
static inline uint32_t vf_bits_gt(vf a, vf b) {
    return mask_bits(a > b);
}
static inline uint32_t vf_bits_eq(vf a, vf b) {
    return mask_bits(a == b);
}
static inline uint32_t vf_bits_nan(vf a) {
    return mask_bits(a != a);
}

/* 2^n for the whole number n in t, t = n + 1.5 * 2^23. */
static inline vf vf_pow2_of_shifted(vf t) {
    return (vf)(((vu)t << 23) + 0x3f800000);
}

/* y, but 0 where x < lo. */
static inline vf vf_zero_below(vf y, vf x, vf lo) {
    return (vf)((vi)y & ~(x < lo));
}

#include "kernels/cpu/simd_math.h"

#endif
