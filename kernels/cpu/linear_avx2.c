/* Matrix multiplication with AVX2, FMA and F16C.
 *
 * A vector holds 4 columns of 8 rows, half a group, so an activation block is taken as 8 words of 4 int8 and each is
 * broadcast. vpmaddubsw multiplies unsigned by signed bytes and adds pairs in 16 bits, saturating: q4: 15 * 127 * 2 =
 * 3810 a pair, 8 of them 30480: the whole block is summed in 16 bits and widened once. q5: 31 * 127 * 2 = 7874, 4 of
 * them 31496: two halves. q8: |w| times x with the sign of w, 128 * 127 * 2 = 32512: every product is widened at once.
 *
 * A register tile is a group by 4 rows of x: 8 sums, 4 vectors of weights (low and high nibbles of both halves), a
 * broadcast, a product and the mask fill the 16 registers. A word then costs 2 loads of weights and 4 broadcasts for 8
 * products, well below the 2 loads a cycle; for 256 multiply-adds of q4 there remain 8 products, 7 additions, 3 to
 * unpack and 5 to scale, 23 operations on 4 ports: 5.8 cycles at best, 7.2 measured on Zen 3 (104 G/s at 2.9 GHz). */
#if defined(__AVX2__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

#include "kernels/cpu/linear_kernels.h"

#define INLINE static inline __attribute__((always_inline))

enum { LANES = 8, HALVES = 2, VECTOR = 64 /* bytes of a packed vector: both halves */ };

/* ---- rounding x ---------------------------------------------------------------------------------------------------
 */

INLINE uint32_t max_u31(__m256i v) {
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(m);
}

INLINE int32_t sum_i32(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtsi128_si32(s);
}

void quantize_avx2(const float *x, int64_t cols, struct act_block *out) {
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* undoes the packing by halves */
    for (int64_t begin = 0; begin < cols; begin += QUANT_BLOCK, x += QUANT_BLOCK, out++) {
        __m256i bits[4], q[4];
        for (int i = 0; i < 4; i++)
            bits[i] = _mm256_and_si256(_mm256_castps_si256(_mm256_loadu_ps(x + 8 * i)), magnitude);
        /* |x| compared as integers: the order is the same, and a NaN is the greatest of all */
        uint32_t bits_max =
            max_u31(_mm256_max_epi32(_mm256_max_epi32(bits[0], bits[1]), _mm256_max_epi32(bits[2], bits[3])));
        float amax;
        memcpy(&amax, &bits_max, 4);
        float inverse = amax > 0 ? 127.0f / amax : 0.0f;
        bool finite = bits_max < 0x7f800000u && inverse < INFINITY;
        if (!finite) {
            if (bits_max < 0x7f800000u) amax = 0; /* so small that 127 / amax overflows: zero */
            *out = (struct act_block){.d = amax / 127.0f, .s = amax * 0.0f};
            continue;
        }
        __m256 scale = _mm256_set1_ps(inverse);
        for (int i = 0; i < 4; i++) q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), scale));
        int32_t sum = sum_i32(_mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3])));
        __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
        _mm256_storeu_si256((__m256i *)out->q, _mm256_permutevar8x32_epi32(bytes, order));
        out->d = amax / 127.0f;
        out->correction = -128 * sum;
        out->s = out->d * (float)sum;
    }
}

/* ---- a block of a group -------------------------------------------------------------------------------------------
 */

/* How quants are packed: what the inner loops are compiled for. */
enum quant_kind { QUANT_Q4, QUANT_Q5, QUANT_Q8 };

INLINE size_t scales_at(enum quant_kind kind) {
    return kind == QUANT_Q8 ? 512 : kind == QUANT_Q5 ? 320 : 256;
}

INLINE __m256i load256(const uint8_t *p) {
    return _mm256_loadu_si256((const __m256i *)p);
}

/* Adds the fifth bit of word v. */
INLINE __m256i fifth_bit(__m256i w, __m256i high, int v) {
    __m256i bit = v <= 4 ? _mm256_slli_epi16(high, 4 - v) : _mm256_srli_epi16(high, v - 4);
    return _mm256_or_si256(w, _mm256_and_si256(bit, _mm256_set1_epi8(16)));
}

INLINE __m256 half_load(const uint8_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

/* What q = 0 stands for, in units of d, where a block has no minimums of its own. */
INLINE float dtype_offset(enum dtype dtype) {
    return dtype == DTYPE_Q4_0 ? -8.0f : dtype == DTYPE_Q5_0 ? -16.0f : 0.0f;
}

INLINE __m256 block_scale(enum quant_kind kind, const uint8_t *block, int half) {
    return half_load(block + scales_at(kind) + 16 * half);
}

/* Minimums of half a block: read after the scales, or d * offset. */
INLINE __m256 block_min(enum quant_kind kind, const uint8_t *block, int half, bool minimums, float offset, __m256 d) {
    return minimums ? half_load(block + scales_at(kind) + 32 + 16 * half) : _mm256_mul_ps(d, _mm256_set1_ps(offset));
}

INLINE __m256i word(const struct act_block *x, int v) {
    int32_t q;
    memcpy(&q, x->q + 4 * v, 4);
    return _mm256_set1_epi32(q);
}

/* Keeps the compiler from regrouping sums: it would hold all products of a block at once, and spill them. */
#define KEEP_ORDER(v) __asm__("" : "+x"(v))

/* Word v of a group times word v of `rows` rows of x, added to sums: pairs in 16 bits, or for q8 in 32. */
INLINE void word_dot(enum quant_kind kind, int rows, const __m256i w[HALVES], const struct act_block *x,
                     int64_t x_blocks, int v, bool first, __m256i sum[HALVES][4]) {
    const __m256i ones = _mm256_set1_epi16(1);
    for (int r = 0; r < rows; r++) {
        __m256i words = word(x + r * x_blocks, v);
        for (int h = 0; h < HALVES; h++) {
            __m256i dot;
            if (kind == QUANT_Q8) {
                dot = _mm256_maddubs_epi16(_mm256_abs_epi8(w[h]), _mm256_sign_epi8(words, w[h]));
                dot = _mm256_madd_epi16(dot, ones);
                sum[h][r] = first ? dot : _mm256_add_epi32(sum[h][r], dot);
            } else {
                dot = _mm256_maddubs_epi16(w[h], words);
                sum[h][r] = first ? dot : _mm256_add_epi16(sum[h][r], dot);
            }
            KEEP_ORDER(sum[h][r]);
        }
    }
}

/* Integer dot products of a block of a group with a block of each row of x, 8 x 32 bits. */
INLINE void block_dot(enum quant_kind kind, int rows, const uint8_t *block, const struct act_block *x, int64_t x_blocks,
                      __m256i sum[HALVES][4]) {
    const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i low[HALVES], high[HALVES], low_sum[HALVES][4];
    if (kind == QUANT_Q8) {
#pragma GCC unroll 8
        for (int v = 0; v < 8; v++) {
            for (int h = 0; h < HALVES; h++) low[h] = load256(block + VECTOR * v + 32 * h);
            word_dot(kind, rows, low, x, x_blocks, v, v == 0, sum);
        }
        return;
    }
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) {
        for (int h = 0; h < HALVES; h++) {
            __m256i both = load256(block + VECTOR * v + 32 * h);
            low[h] = _mm256_and_si256(both, nibble);
            high[h] = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
            if (kind != QUANT_Q5) continue;
            low[h] = fifth_bit(low[h], load256(block + VECTOR * 4 + 32 * h), v);
            high[h] = fifth_bit(high[h], load256(block + VECTOR * 4 + 32 * h), v + 4);
        }
        if (kind == QUANT_Q5) { /* 4 products a sum */
            word_dot(kind, rows, low, x, x_blocks, v, v == 0, low_sum);
            word_dot(kind, rows, high, x, x_blocks, v + 4, v == 0, sum);
        } else {
            word_dot(kind, rows, low, x, x_blocks, v, v == 0, sum);
            word_dot(kind, rows, high, x, x_blocks, v + 4, false, sum);
        }
    }
    for (int h = 0; h < HALVES; h++) {
        for (int r = 0; r < rows; r++) {
            sum[h][r] = _mm256_madd_epi16(sum[h][r], ones);
            if (kind == QUANT_Q5) sum[h][r] = _mm256_add_epi32(sum[h][r], _mm256_madd_epi16(low_sum[h][r], ones));
        }
    }
}

/* ---- results ------------------------------------------------------------------------------------------------------
 */

static __attribute__((noinline)) void row_store(const struct linear_job *job, int64_t row, int64_t first, __m256 acc) {
    int64_t lanes = job->segment->rows - first;
    if (lanes <= 0) return; /* the second half of the last group */
    if (lanes < LANES) {
        float values[LANES];
        _mm256_storeu_ps(values, acc);
        linear_store_tail(job, row, first, lanes, values);
        return;
    }
    float *y = job->y + row * job->y_stride + first;
    if (job->bias) acc = _mm256_add_ps(acc, _mm256_loadu_ps(job->bias + first));
    if (job->accumulate) acc = _mm256_add_ps(acc, _mm256_loadu_ps(y));
    _mm256_storeu_ps(y, acc);
}

/* ---- int8 activations ---------------------------------------------------------------------------------------------
 */

/* `rows` <= 4 rows of x, known when compiled, against one group. */
INLINE void tile_int8(enum quant_kind kind, int rows, const struct linear_job *job, int64_t group, int64_t row) {
    const uint8_t *block = job->segment->data + (size_t)group * job->segment->group_bytes;
    const struct group_layout layout = job->layout;
    const float offset = dtype_offset(job->segment->dtype);
    const struct act_block *x = job->q + row * job->blocks;
    __m256 acc[HALVES][4];
    for (int h = 0; h < HALVES; h++)
        for (int r = 0; r < rows; r++) acc[h][r] = _mm256_setzero_ps();
    prefetch_results(rows, job, group, row);
    for (int64_t b = 0; b < job->blocks; b++, x++, block += layout.block_bytes) {
        __m256i sum[HALVES][4];
        block_dot(kind, rows, block, x, job->blocks, sum);
        for (int h = 0; h < HALVES; h++) {
            __m256 d = block_scale(kind, block, h);
            __m256 m = kind == QUANT_Q8 ? d : block_min(kind, block, h, layout.minimums_at, offset, d);
            for (int r = 0; r < rows; r++) {
                const struct act_block *q = x + r * job->blocks;
                __m256 scale = _mm256_mul_ps(d, _mm256_set1_ps(q->d));
                acc[h][r] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[h][r]), scale, acc[h][r]);
                if (kind != QUANT_Q8) acc[h][r] = _mm256_fmadd_ps(m, _mm256_set1_ps(q->s), acc[h][r]);
            }
        }
    }
    for (int h = 0; h < HALVES; h++)
        for (int r = 0; r < rows; r++) row_store(job, row + r, group * GROUP_ROWS + h * LANES, acc[h][r]);
}

INLINE void groups_int8(enum quant_kind kind, const struct linear_job *job, int64_t group_begin, int64_t group_end,
                        int64_t row_begin, int64_t row_end) {
    for (int64_t g = group_begin; g < group_end; g++) {
        struct prefetch next = prefetch_group(job, g + 1, group_end, row_end - row_begin, 4);
        int64_t row = row_begin;
        for (; row + 4 <= row_end; row += 4) {
            prefetch_some(&next);
            tile_int8(kind, 4, job, g, row);
        }
        if (row_end - row == 3) tile_int8(kind, 3, job, g, row);
        if (row_end - row == 2) tile_int8(kind, 2, job, g, row);
        if (row_end - row == 1) tile_int8(kind, 1, job, g, row);
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

/* Byte i of each of the 8 words of w as f32. */
INLINE __m256 word_byte(enum quant_kind kind, __m256i w, int i) {
    __m256i top = _mm256_slli_epi32(w, 24 - 8 * i);
    return _mm256_cvtepi32_ps(kind == QUANT_Q8 ? _mm256_srai_epi32(top, 24) : _mm256_srli_epi32(top, 24));
}

/* The words of columns 4v .. 4v+3 of half a block into w[v]. */
INLINE void block_unpack(enum quant_kind kind, const uint8_t *half, __m256i w[8]) {
    const __m256i low = _mm256_set1_epi8(15);
    if (kind == QUANT_Q8) {
        for (int v = 0; v < 8; v++) w[v] = load256(half + VECTOR * v);
        return;
    }
    for (int v = 0; v < 4; v++) {
        __m256i both = load256(half + VECTOR * v);
        w[v] = _mm256_and_si256(both, low);
        w[v + 4] = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
    }
    if (kind != QUANT_Q5) return;
    __m256i high = load256(half + VECTOR * 4);
    for (int v = 0; v < 8; v++) w[v] = fifth_bit(w[v], high, v);
}

INLINE void quants_dequant(enum quant_kind kind, const struct linear_job *job, const uint8_t *block, int half,
                           __m256 values[QUANT_BLOCK]) {
    __m256i w[8];
    __m256 d = block_scale(kind, block, half);
    __m256 m = block_min(kind, block, half, job->layout.minimums_at, dtype_offset(job->segment->dtype), d);
    block_unpack(kind, block + 32 * half, w);
    for (int v = 0; v < 8; v++)
        for (int i = 0; i < 4; i++) values[4 * v + i] = _mm256_fmadd_ps(d, word_byte(kind, w[v], i), m);
}

/* f32 values of columns [0, count) of half a block, 8 rows a vector. */
static __attribute__((noinline)) void block_dequant(const struct linear_job *job, const uint8_t *group, int64_t block,
                                                    int half, int64_t count, __m256 values[QUANT_BLOCK]) {
    const int64_t begin = block * QUANT_BLOCK * GROUP_ROWS + half * LANES;
    const uint8_t *quants = group + (size_t)block * job->layout.block_bytes;
    switch (job->segment->dtype) {
    case DTYPE_F32:
        for (int64_t c = 0; c < count; c++) values[c] = _mm256_loadu_ps((const float *)group + begin + c * GROUP_ROWS);
        break;
    case DTYPE_F16:
        for (int64_t c = 0; c < count; c++) values[c] = half_load(group + (begin + c * GROUP_ROWS) * 2);
        break;
    case DTYPE_BF16:
        for (int64_t c = 0; c < count; c++) {
            __m128i bits = _mm_loadu_si128((const __m128i *)(group + (begin + c * GROUP_ROWS) * 2));
            values[c] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
        }
        break;
    case DTYPE_Q8_0:
        quants_dequant(QUANT_Q8, job, quants, half, values);
        break;
    case DTYPE_Q5_0:
    case DTYPE_Q5_1:
        quants_dequant(QUANT_Q5, job, quants, half, values);
        break;
    default:
        quants_dequant(QUANT_Q4, job, quants, half, values);
        break;
    }
}

/* `rows` <= 8 rows of x, known when compiled, against half a group. */
INLINE void tile_f32(int rows, const struct linear_job *job, int64_t group, int half, int64_t row) {
    const uint8_t *data = job->segment->data + (size_t)group * job->segment->group_bytes;
    __m256 acc[8];
    for (int r = 0; r < rows; r++) acc[r] = _mm256_setzero_ps();
    for (int64_t b = 0; b < job->blocks; b++) {
        __m256 values[QUANT_BLOCK];
        const float *x = job->x + row * job->x_stride + b * QUANT_BLOCK;
        int64_t left = job->cols - b * QUANT_BLOCK, count = left < QUANT_BLOCK ? left : QUANT_BLOCK;
        block_dequant(job, data, b, half, count, values);
        for (int64_t c = 0; c < count; c++)
            for (int r = 0; r < rows; r++)
                acc[r] = _mm256_fmadd_ps(values[c], _mm256_set1_ps(x[r * job->x_stride + c]), acc[r]);
    }
    for (int r = 0; r < rows; r++) row_store(job, row + r, group * GROUP_ROWS + half * LANES, acc[r]);
}

static void linear_f32(const struct linear_job *job, int64_t group_begin, int64_t group_end, int64_t row_begin,
                       int64_t row_end) {
    for (int64_t g = group_begin * HALVES; g < group_end * HALVES; g++) {
        int64_t row = row_begin;
        for (; row + 8 <= row_end; row += 8) tile_f32(8, job, g / HALVES, (int)(g % HALVES), row);
        for (; row + 2 <= row_end; row += 2) tile_f32(2, job, g / HALVES, (int)(g % HALVES), row);
        if (row < row_end) tile_f32(1, job, g / HALVES, (int)(g % HALVES), row);
    }
}

/* ---- the table ----------------------------------------------------------------------------------------------------
 */

const struct linear_kernels linear_kernels_avx2 = {
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
typedef int linear_avx2_is_not_of_this_architecture;
#endif
