/* Matrix multiplication with AVX-512 (F, BW, VL, DQ) and VNNI.
 *
 * A vector holds 4 columns of 16 rows; vpdpbusd multiplies its unsigned bytes by the signed bytes of a word of x, which
 * it broadcasts from memory itself, and adds four products to 32 bits. q8 weights are kept as q + 128, and the sum then
 * starts at -128 * sum(x.q): still exact. A register tile is 1 group by up to 8 rows of x: 8 vectors of weights
 * unpacked once, 8 accumulators, and a chain of 8 vpdpbusd for each row, of which several are in flight. For 512
 * multiply-adds of q4: 8 products with 8 loads, and 4 operations to scale; 6 cycles where two vpdpbusd start a cycle,
 * 10 where one does. */
#if defined(__AVX512VNNI__)
#include <immintrin.h>
#include <string.h>

#include "kernels/cpu/linear_kernels.h"

#define INLINE static inline __attribute__((always_inline))

enum { LANES = GROUP_ROWS, TILE_ROWS = 8 };

/* ---- a block of a group -------------------------------------------------------------------------------------------
 */

/* How quants are packed: what the inner loops are compiled for. */
enum quant_kind { QUANT_Q4, QUANT_Q5, QUANT_Q8 };

INLINE size_t scales_at(enum quant_kind kind) {
    return kind == QUANT_Q8 ? 512 : kind == QUANT_Q5 ? 320 : 256;
}

INLINE __m512i load512(const uint8_t *p) {
    return _mm512_loadu_si512((const void *)p);
}

/* The word of columns 4v .. 4v+3 of 16 rows into w[v], unsigned bytes. */
INLINE void block_unpack(enum quant_kind kind, const uint8_t *quants, __m512i w[8]) {
    const __m512i nibble = _mm512_set1_epi8(15), fifth = _mm512_set1_epi8(16);
    if (kind == QUANT_Q8) {
        for (int v = 0; v < 8; v++) w[v] = load512(quants + 64 * v);
        return;
    }
    for (int v = 0; v < 4; v++) {
        __m512i both = load512(quants + 64 * v);
        w[v] = _mm512_and_si512(both, nibble);
        w[v + 4] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
    }
    if (kind != QUANT_Q5) return;
    __m512i high = load512(quants + 256);
    for (int v = 0; v < 8; v++) {
        __m512i bit =
            v <= 4 ? _mm512_slli_epi16(high, (unsigned)(4 - v) & 7) : _mm512_srli_epi16(high, (unsigned)(v - 4) & 7);
        w[v] = _mm512_or_si512(w[v], _mm512_and_si512(bit, fifth));
    }
}

INLINE __m512 half_load(const uint8_t *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

/* What q = 0 stands for, in units of d, where a block has no minimums of its own. */
INLINE float dtype_offset(enum dtype dtype) {
    return dtype == DTYPE_Q4_0 ? -8.0f : dtype == DTYPE_Q5_0 ? -16.0f : 0.0f;
}

/* Minimums of a block: read after the scales, or d * offset. */
INLINE __m512 block_min(enum quant_kind kind, const uint8_t *block, bool minimums, float offset, __m512 d) {
    return minimums ? half_load(block + scales_at(kind) + 32) : _mm512_mul_ps(d, _mm512_set1_ps(offset));
}

INLINE __m512i word(const struct act_block *x, int v) {
    int32_t q;
    memcpy(&q, x->q + 4 * v, 4);
    return _mm512_set1_epi32(q);
}

/* ---- results ------------------------------------------------------------------------------------------------------
 */

/* Bias, then what y held, then the store; lanes beyond the segment's last row are masked away. */
static __attribute__((noinline)) void row_store(const struct linear_job *job, int64_t row, int64_t first, __m512 acc) {
    int64_t lanes = job->segment->rows - first;
    __mmask16 mask = (__mmask16)(lanes >= LANES ? 0xffffu : (1u << lanes) - 1);
    float *y = job->y + row * job->y_stride + first;
    if (job->bias) acc = _mm512_add_ps(acc, _mm512_maskz_loadu_ps(mask, job->bias + first));
    if (job->accumulate) acc = _mm512_add_ps(acc, _mm512_maskz_loadu_ps(mask, y));
    _mm512_mask_storeu_ps(y, mask, acc);
}

/* ---- int8 activations ---------------------------------------------------------------------------------------------
 */

/* `rows` <= 8 rows of x, known when compiled, against one group. */
INLINE void tile_int8(enum quant_kind kind, int rows, const struct linear_job *job, int64_t group, int64_t row) {
    const uint8_t *block = job->segment->data + (size_t)group * job->segment->group_bytes;
    const struct group_layout layout = job->layout;
    const float offset = dtype_offset(job->segment->dtype);
    const struct act_block *x = job->q + row * job->blocks;
    __m512 acc[TILE_ROWS];
    for (int r = 0; r < rows; r++) acc[r] = _mm512_setzero_ps();
    prefetch_results(rows, job, group, row);
    for (int64_t b = 0; b < job->blocks; b++, x++, block += layout.block_bytes) {
        __m512 d = half_load(block + scales_at(kind));
        __m512 m = kind == QUANT_Q8 ? d : block_min(kind, block, layout.minimums_at, offset, d);
        __m512i w[8];
        block_unpack(kind, block, w);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const struct act_block *q = x + r * job->blocks;
            __m512i sum = kind == QUANT_Q8 ? _mm512_set1_epi32(q->correction) : _mm512_setzero_si512();
#pragma GCC unroll 8
            for (int v = 0; v < 8; v++) sum = _mm512_dpbusd_epi32(sum, w[v], word(q, v));
            __m512 scale = _mm512_mul_ps(d, _mm512_set1_ps(q->d));
            acc[r] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), scale, acc[r]);
            if (kind != QUANT_Q8) acc[r] = _mm512_fmadd_ps(m, _mm512_set1_ps(q->s), acc[r]);
        }
    }
    for (int r = 0; r < rows; r++) row_store(job, row + r, group * LANES, acc[r]);
}

INLINE void groups_int8(enum quant_kind kind, const struct linear_job *job, int64_t group_begin, int64_t group_end,
                        int64_t row_begin, int64_t row_end) {
    for (int64_t g = group_begin; g < group_end; g++) {
        struct prefetch next = prefetch_group(job, g + 1, group_end, row_end - row_begin, 8);
        int64_t row = row_begin;
        for (; row + 8 <= row_end; row += 8) {
            prefetch_some(&next);
            tile_int8(kind, 8, job, g, row);
        }
        for (; row + 4 <= row_end; row += 4) tile_int8(kind, 4, job, g, row);
        for (; row + 2 <= row_end; row += 2) tile_int8(kind, 2, job, g, row);
        if (row < row_end) tile_int8(kind, 1, job, g, row);
    }
}

static void linear_q4(const struct linear_job *job, int64_t group_begin, int64_t group_end, int64_t row_begin,
                      int64_t row_end) {
    groups_int8(QUANT_Q4, job, group_begin, group_end, row_begin, row_end);
}

static void linear_q5(const struct linear_job *job, int64_t group_begin, int64_t group_end, int64_t row_begin,
                      int64_t row_end) {
    groups_int8(QUANT_Q5, job, group_begin, group_end, row_begin, row_end);
}

static void linear_q8(const struct linear_job *job, int64_t group_begin, int64_t group_end, int64_t row_begin,
                      int64_t row_end) {
    groups_int8(QUANT_Q8, job, group_begin, group_end, row_begin, row_end);
}

/* ---- f32 activations ----------------------------------------------------------------------------------------------
 */

INLINE void quants_dequant(enum quant_kind kind, const struct linear_job *job, const uint8_t *block,
                           __m512 values[QUANT_BLOCK]) {
    const __m512i byte = _mm512_set1_epi32(255), zero = _mm512_set1_epi32(kind == QUANT_Q8 ? 128 : 0);
    __m512i w[8];
    __m512 d = half_load(block + scales_at(kind));
    __m512 m = block_min(kind, block, job->layout.minimums_at, dtype_offset(job->segment->dtype), d);
    block_unpack(kind, block, w);
    for (int v = 0; v < 8; v++) {
        for (int i = 0; i < 4; i++) {
            __m512i q = _mm512_and_si512(_mm512_srli_epi32(w[v], (unsigned)(8 * i)), byte);
            values[4 * v + i] = _mm512_fmadd_ps(d, _mm512_cvtepi32_ps(_mm512_sub_epi32(q, zero)), m);
        }
    }
}

/* f32 values of columns [0, count) of a block, 16 rows a vector. */
static __attribute__((noinline)) void block_dequant(const struct linear_job *job, const uint8_t *group, int64_t block,
                                                    int64_t count, __m512 values[QUANT_BLOCK]) {
    const int64_t begin = block * QUANT_BLOCK * LANES;
    const uint8_t *quants = group + (size_t)block * job->layout.block_bytes;
    switch (job->segment->dtype) {
    case DTYPE_F32:
        for (int64_t c = 0; c < count; c++) values[c] = _mm512_loadu_ps((const float *)group + begin + c * LANES);
        break;
    case DTYPE_F16:
        for (int64_t c = 0; c < count; c++) values[c] = half_load(group + (begin + c * LANES) * 2);
        break;
    case DTYPE_BF16:
        for (int64_t c = 0; c < count; c++) {
            __m256i half = _mm256_loadu_si256((const __m256i *)(group + (begin + c * LANES) * 2));
            values[c] = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
        }
        break;
    case DTYPE_Q8_0:
        quants_dequant(QUANT_Q8, job, quants, values);
        break;
    case DTYPE_Q5_0:
    case DTYPE_Q5_1:
        quants_dequant(QUANT_Q5, job, quants, values);
        break;
    default:
        quants_dequant(QUANT_Q4, job, quants, values);
        break;
    }
}

INLINE void tile_f32(int rows, const struct linear_job *job, int64_t group, int64_t row) {
    const uint8_t *data = job->segment->data + (size_t)group * job->segment->group_bytes;
    __m512 acc[TILE_ROWS];
    for (int r = 0; r < rows; r++) acc[r] = _mm512_setzero_ps();
    for (int64_t b = 0; b < job->blocks; b++) {
        __m512 values[QUANT_BLOCK];
        const float *x = job->x + row * job->x_stride + b * QUANT_BLOCK;
        int64_t left = job->cols - b * QUANT_BLOCK, count = left < QUANT_BLOCK ? left : QUANT_BLOCK;
        block_dequant(job, data, b, count, values);
        for (int64_t c = 0; c < count; c++)
            for (int r = 0; r < rows; r++)
                acc[r] = _mm512_fmadd_ps(values[c], _mm512_set1_ps(x[r * job->x_stride + c]), acc[r]);
    }
    for (int r = 0; r < rows; r++) row_store(job, row + r, group * LANES, acc[r]);
}

static void linear_f32(const struct linear_job *job, int64_t group_begin, int64_t group_end, int64_t row_begin,
                       int64_t row_end) {
    for (int64_t g = group_begin; g < group_end; g++) {
        int64_t row = row_begin;
        for (; row + 8 <= row_end; row += 8) tile_f32(8, job, g, row);
        for (; row + 2 <= row_end; row += 2) tile_f32(2, job, g, row);
        if (row < row_end) tile_f32(1, job, g, row);
    }
}

/* ---- the table ----------------------------------------------------------------------------------------------------
 */

const struct linear_kernels linear_kernels_avx512 = {
    .quantize = quantize_avx2,
    .int8 = {[DTYPE_Q4_0] = linear_q4,
             [DTYPE_Q4_1] = linear_q4,
             [DTYPE_Q5_0] = linear_q5,
             [DTYPE_Q5_1] = linear_q5,
             [DTYPE_Q8_0] = linear_q8},
    .f32 = {[DTYPE_F32] = linear_f32,
            [DTYPE_F16] = linear_f32,
            [DTYPE_BF16] = linear_f32,
            [DTYPE_Q4_0] = linear_f32,
            [DTYPE_Q4_1] = linear_f32,
            [DTYPE_Q5_0] = linear_f32,
            [DTYPE_Q5_1] = linear_f32,
            [DTYPE_Q8_0] = linear_f32},
};
#else
typedef int linear_avx512_is_not_of_this_architecture;
#endif
