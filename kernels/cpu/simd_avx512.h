/* simd_avx512.h: vectors of sixteen floats for AVX-512 F, BW, VL and DQ. The names are explained in simd_portable.h. */
#ifndef QUIRE_KERNELS_CPU_SIMD_AVX512_H
#define QUIRE_KERNELS_CPU_SIMD_AVX512_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define SIMD_LANES      16
#define SIMD_ROWS_MAX   6 /* 6 x 4 sums, 6 rows and a column: 31 of the 32 registers */
#define SIMD_NAME(name) name##_avx512

typedef __m512 vf;

static inline vf vf_set1(float x) {
    return _mm512_set1_ps(x);
}
static inline vf vf_zero(void) {
    return _mm512_setzero_ps();
}
static inline vf vf_load(const float *p) {
    return _mm512_loadu_ps(p);
}
static inline void vf_store(float *p, vf x) {
    _mm512_storeu_ps(p, x);
}

static inline __mmask16 lanes_below(int64_t n) {
    return (__mmask16)((1u << n) - 1u);
} /* 0 <= n <= 16 */
static inline vf vf_load_n(const float *p, int64_t n) {
    return _mm512_maskz_loadu_ps(lanes_below(n), p);
}
static inline void vf_store_n(float *p, vf x, int64_t n) {
    _mm512_mask_storeu_ps(p, lanes_below(n), x);
}

static inline vf vf_add(vf a, vf b) {
    return _mm512_add_ps(a, b);
}
static inline vf vf_sub(vf a, vf b) {
    return _mm512_sub_ps(a, b);
}
static inline vf vf_mul(vf a, vf b) {
    return _mm512_mul_ps(a, b);
}
static inline vf vf_div(vf a, vf b) {
    return _mm512_div_ps(a, b);
}
static inline vf vf_fma(vf a, vf b, vf c) {
    return _mm512_fmadd_ps(a, b, c);
}
static inline vf vf_fnma(vf a, vf b, vf c) {
    return _mm512_fnmadd_ps(a, b, c);
}
static inline vf vf_max(vf a, vf b) {
    return _mm512_max_ps(a, b);
}
static inline vf vf_min(vf a, vf b) {
    return _mm512_min_ps(a, b);
}
static inline vf vf_abs(vf x) {
    return _mm512_andnot_ps(_mm512_set1_ps(-0.0f), x);
}
static inline vf vf_copysign(vf size, vf sign) {
    return _mm512_or_ps(vf_abs(size), _mm512_and_ps(_mm512_set1_ps(-0.0f), sign));
}

static inline vf vf_swap_pairs(vf x) {
    return _mm512_permute_ps(x, 0xb1);
}

static inline vf vf_load_f16(const uint16_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
static inline vf vf_load_f16_n(const uint16_t *p, int64_t n) {
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(lanes_below(n), p));
}
static inline void vf_store_f16(uint16_t *p, vf x) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
static inline void vf_store_f16_n(uint16_t *p, vf x, int64_t n) {
    _mm256_mask_storeu_epi16(p, lanes_below(n), _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

static inline vf vf_load_quads(const float *const *p) {
    __m256 low = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p[0])), _mm_loadu_ps(p[1]), 1);
    __m256 high = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p[2])), _mm_loadu_ps(p[3]), 1);
    return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
}
static inline __m128i quads2_f16(const uint16_t *const *p) {
    __m128 low = _mm_castsi128_ps(_mm_loadl_epi64((const __m128i *)p[0]));
    return _mm_castps_si128(_mm_loadh_pi(low, (const __m64 *)p[1]));
}
static inline vf vf_load_quads_f16(const uint16_t *const *p) {
    return _mm512_cvtph_ps(_mm256_inserti128_si256(_mm256_castsi128_si256(quads2_f16(p)), quads2_f16(p + 2), 1));
}
static inline vf vf_repeat_quad(const float *p) {
    return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
}
static inline void vf_store_quads(float *out, int64_t step, vf x, int64_t quads) {
    _mm_storeu_ps(out, _mm512_castps512_ps128(x));
    if (quads > 1) _mm_storeu_ps(out + step, _mm512_extractf32x4_ps(x, 1));
    if (quads > 2) _mm_storeu_ps(out + 2 * step, _mm512_extractf32x4_ps(x, 2));
    if (quads > 3) _mm_storeu_ps(out + 3 * step, _mm512_extractf32x4_ps(x, 3));
}

static inline vf vf_sum_quads(vf a, vf b, vf c, vf d) {
    __m512 ac = _mm512_add_ps(_mm512_unpacklo_ps(a, c), _mm512_unpackhi_ps(a, c));
    __m512 bd = _mm512_add_ps(_mm512_unpacklo_ps(b, d), _mm512_unpackhi_ps(b, d));
    return _mm512_add_ps(_mm512_unpacklo_ps(ac, bd), _mm512_unpackhi_ps(ac, bd));
}
static inline float vf_hsum(vf a) {
    __m512 quads = vf_sum_quads(a, a, a, a);
    __m256 halves = _mm256_add_ps(_mm512_castps512_ps256(quads), _mm512_extractf32x8_ps(quads, 1));
    return _mm_cvtss_f32(_mm_add_ss(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1)));
}

static inline float vf_hmax(vf a) {
    __m256 h = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    m = _mm_max_ss(m, _mm_movehdup_ps(m));
    return _mm_cvtss_f32(m);
}

static inline vf vf_keep(vf x, int32_t lo, int32_t hi) {
    __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __mmask16 from = _mm512_cmpge_epi32_mask(lane, _mm512_set1_epi32(lo));
    __mmask16 inside = _mm512_mask_cmplt_epi32_mask(from, lane, _mm512_set1_epi32(hi));
    return _mm512_mask_blend_ps(inside, _mm512_set1_ps(-INFINITY), x);
}

static inline uint32_t vf_bits_ge(vf a, vf b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_GE_OQ);
}
static inline uint32_t vf_bits_gt(vf a, vf b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ);
}
static inline uint32_t vf_bits_eq(vf a, vf b) {
    return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
}
static inline uint32_t vf_bits_nan(vf a) {
    return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
}

static inline vf vf_pow2_of_shifted(vf t) {
    __m512i n = _mm512_slli_epi32(_mm512_castps_si512(t), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(n, _mm512_set1_epi32(0x3f800000)));
}
static inline vf vf_zero_below(vf y, vf x, vf lo) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, lo, _CMP_NLT_UQ), y);
}

#include "kernels/cpu/simd_math.h"

#endif
