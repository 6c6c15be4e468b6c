/* simd_avx2.h: vectors of eight floats for AVX2, FMA and F16C. The names are explained in simd_portable.h. */
#ifndef QUIRE_KERNELS_CPU_SIMD_AVX2_H
#define QUIRE_KERNELS_CPU_SIMD_AVX2_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define SIMD_LANES      8
#define SIMD_ROWS_MAX   3 /* 3 x 4 sums, 3 rows and a column fill the 16 registers */
#define SIMD_NAME(name) name##_avx2

typedef __m256 vf;

static inline vf vf_set1(float x) {
    return _mm256_set1_ps(x);
}
static inline vf vf_zero(void) {
    return _mm256_setzero_ps();
}
static inline vf vf_load(const float *p) {
    return _mm256_loadu_ps(p);
}
static inline void vf_store(float *p, vf x) {
    _mm256_storeu_ps(p, x);
}

static inline __m256i lanes_below(int64_t n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32((int)n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
static inline vf vf_load_n(const float *p, int64_t n) {
    return _mm256_maskload_ps(p, lanes_below(n));
}
static inline void vf_store_n(float *p, vf x, int64_t n) {
    _mm256_maskstore_ps(p, lanes_below(n), x);
}

static inline vf vf_add(vf a, vf b) {
    return _mm256_add_ps(a, b);
}
static inline vf vf_sub(vf a, vf b) {
    return _mm256_sub_ps(a, b);
}
static inline vf vf_mul(vf a, vf b) {
    return _mm256_mul_ps(a, b);
}
static inline vf vf_div(vf a, vf b) {
    return _mm256_div_ps(a, b);
}
static inline vf vf_fma(vf a, vf b, vf c) {
    return _mm256_fmadd_ps(a, b, c);
}
static inline vf vf_fnma(vf a, vf b, vf c) {
    return _mm256_fnmadd_ps(a, b, c);
}
static inline vf vf_max(vf a, vf b) {
    return _mm256_max_ps(a, b);
}
static inline vf vf_min(vf a, vf b) {
    return _mm256_min_ps(a, b);
}
static inline vf vf_abs(vf x) {
    return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
}
static inline vf vf_copysign(vf size, vf sign) {
    return _mm256_or_ps(vf_abs(size), _mm256_and_ps(_mm256_set1_ps(-0.0f), sign));
}

static inline vf vf_swap_pairs(vf x) {
    return _mm256_permute_ps(x, 0xb1);
}

static inline vf vf_load_f16(const uint16_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}
static inline vf vf_load_f16_n(const uint16_t *p, int64_t n) {
    uint16_t h[8] = {0};
    memcpy(h, p, (size_t)n * sizeof *p);
    return vf_load_f16(h);
}
static inline void vf_store_f16(uint16_t *p, vf x) {
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline void vf_store_f16_n(uint16_t *p, vf x, int64_t n) {
    uint16_t h[8];
    vf_store_f16(h, x);
    memcpy(p, h, (size_t)n * sizeof *p);
}

static inline vf vf_load_quads(const float *const *p) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p[0])), _mm_loadu_ps(p[1]), 1);
}
static inline __m128i quads2_f16(const uint16_t *const *p) {
    __m128 low = _mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)p[0]));
    return _mm_castps_si128(_mm_loadh_pi(low, (const __m64 *)p[1]));
}
static inline vf vf_load_quads_f16(const uint16_t *const *p) {
    return _mm256_cvtph_ps(quads2_f16(p));
}
static inline vf vf_repeat_quad(const float *p) {
    return _mm256_broadcast_ps((const __m128 *)p);
}
static inline void vf_store_quads(float *out, int64_t step, vf x, int64_t quads) {
    _mm_storeu_ps(out, _mm256_castps256_ps128(x));
    if (quads > 1) _mm_storeu_ps(out + step, _mm256_extractf128_ps(x, 1));
}

/* Unpacking takes 6 shuffles and 3 additions for all the sums of four vectors. */
static inline vf vf_sum_quads(vf a, vf b, vf c, vf d) {
    __m256 ac = _mm256_add_ps(_mm256_unpacklo_ps(a, c), _mm256_unpackhi_ps(a, c));
    __m256 bd = _mm256_add_ps(_mm256_unpacklo_ps(b, d), _mm256_unpackhi_ps(b, d));
    return _mm256_add_ps(_mm256_unpacklo_ps(ac, bd), _mm256_unpackhi_ps(ac, bd));
}
static inline float vf_hsum(vf a) {
    __m256 quads = vf_sum_quads(a, a, a, a);
    return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(quads), _mm256_extractf128_ps(quads, 1)));
}

static inline float vf_hmax(vf a) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    m = _mm_max_ss(m, _mm_movehdup_ps(m));
    return _mm_cvtss_f32(m);
}

static inline vf vf_keep(vf x, int32_t lo, int32_t hi) {
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i inside = _mm256_andnot_si256(_mm256_cmpgt_epi32(_mm256_set1_epi32(lo), lane),
                                         _mm256_cmpgt_epi32(_mm256_set1_epi32(hi), lane));
    return _mm256_blendv_ps(_mm256_set1_ps(-INFINITY), x, _mm256_castsi256_ps(inside));
}

static inline uint32_t vf_bits_ge(vf a, vf b) {
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GE_OQ));
}
static inline uint32_t vf_bits_gt(vf a, vf b) {
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ));
}
static inline uint32_t vf_bits_eq(vf a, vf b) {
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ));
}
static inline uint32_t vf_bits_nan(vf a) {
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}

static inline vf vf_pow2_of_shifted(vf t) {
    __m256i n = _mm256_slli_epi32(_mm256_castps_si256(t), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(n, _mm256_set1_epi32(0x3f800000)));
}
static inline vf vf_zero_below(vf y, vf x, vf lo) {
    return _mm256_andnot_ps(_mm256_cmp_ps(x, lo, _CMP_LT_OQ), y);
}

#include "kernels/cpu/simd_math.h"

#endif
