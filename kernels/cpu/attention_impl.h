/* attention_impl.h: the bodies of attention.h, compiled once for each instruction set by the file that includes a
 * simd_*.h header and then this one. Register tiles are functions with constant bounds that the compiler unrolls. */

#include "kernels/cpu/attention.h"

#define TILE    static inline __attribute__((always_inline))
#define KEYS    4 /* keys of a tile of scores: vf_hsum4 adds four dot products at once */
#define COLUMNS 4 /* vectors of head_dim of a tile of values */

TILE vf load_kv(const void *row, int64_t d, bool f16) {
    return f16 ? vf_load_f16((const uint16_t *)row + d) : vf_load((const float *)row + d);
}

TILE vf load_kv_n(const void *row, int64_t d, bool f16, int64_t n) {
    return f16 ? vf_load_f16_n((const uint16_t *)row + d, n) : vf_load_n((const float *)row + d, n);
}

TILE const void *run_row(const struct attention_run *run, int64_t i, bool f16) {
    return (const char *)run->data + i * run->stride * (f16 ? 2 : 4);
}

/* Asks for row i of what comes next; prefetching never faults, so rows past its end do no harm. */
TILE void run_prefetch(const struct attention_run *run, int64_t i, int32_t head_dim, bool f16) {
    const char *row = (const char *)run->ahead + i * run->stride * (f16 ? 2 : 4);
    for (int32_t byte = 0; byte < head_dim * (f16 ? 2 : 4); byte += 64) __builtin_prefetch(row + byte);
}

/* Scores of `rows` rows with all keys of a run, four keys at a time. Past the last key it is taken again: the extra
 * scores lie outside the block or are written over by the next run. */
TILE void scores_rows(const float *q, int64_t q_stride, int rows, int32_t head_dim, const struct attention_run *run,
                      bool f16, float *scores) {
    for (int32_t i = 0; i < run->count; i += KEYS) {
        const void *key[KEYS];
        for (int j = 0; j < KEYS; j++) key[j] = run_row(run, i + j < run->count ? i + j : run->count - 1, f16);
        if (run->ahead)
            for (int j = 0; j < KEYS; j++) run_prefetch(run, i + j, head_dim, f16);
        vf sum[SIMD_ROWS_MAX][KEYS];
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < KEYS; j++) sum[r][j] = vf_zero();
        int32_t d = 0;
        for (; d + SIMD_LANES <= head_dim; d += SIMD_LANES) {
            vf row[SIMD_ROWS_MAX];
            for (int r = 0; r < rows; r++) row[r] = vf_load(q + r * q_stride + d);
            for (int j = 0; j < KEYS; j++) {
                vf k = load_kv(key[j], d, f16);
                for (int r = 0; r < rows; r++) sum[r][j] = vf_fma(row[r], k, sum[r][j]);
            }
        }
        if (SIMD_LANES > 8 && d < head_dim) {
            for (int j = 0; j < KEYS; j++) {
                vf k = load_kv_n(key[j], d, f16, head_dim - d);
                for (int r = 0; r < rows; r++)
                    sum[r][j] = vf_fma(vf_load_n(q + r * q_stride + d, head_dim - d), k, sum[r][j]);
            }
        }
        for (int r = 0; r < rows; r++)
            vf_hsum4(sum[r][0], sum[r][1], sum[r][2], sum[r][3], scores + r * ATTENTION_SCORE_STRIDE + i);
    }
}

TILE void scores_any(const float *q, int64_t q_stride, int32_t rows, int32_t head_dim, const struct attention_run *run,
                     bool f16, float *scores) {
    for (; rows >= SIMD_ROWS_MAX; rows -= SIMD_ROWS_MAX) {
        scores_rows(q, q_stride, SIMD_ROWS_MAX, head_dim, run, f16, scores);
        q += SIMD_ROWS_MAX * q_stride;
        scores += SIMD_ROWS_MAX * ATTENTION_SCORE_STRIDE;
    }
    if (SIMD_ROWS_MAX > 3 && rows >= 3) {
        scores_rows(q, q_stride, 3, head_dim, run, f16, scores);
        q += 3 * q_stride;
        scores += 3 * ATTENTION_SCORE_STRIDE;
        rows -= 3;
    }
    if (rows == 2) scores_rows(q, q_stride, 2, head_dim, run, f16, scores);
    if (rows == 1) scores_rows(q, q_stride, 1, head_dim, run, f16, scores);
}

/* The usual width gets loops of known length: 4 % of a prefill. */
static void scores(const float *q, int64_t q_stride, int32_t rows, int32_t head_dim, const struct attention_run *keys,
                   float *out) {
    if (keys->f16 && head_dim == 64)
        scores_any(q, q_stride, rows, 64, keys, true, out);
    else if (keys->f16)
        scores_any(q, q_stride, rows, head_dim, keys, true, out);
    else if (head_dim == 64)
        scores_any(q, q_stride, rows, 64, keys, false, out);
    else
        scores_any(q, q_stride, rows, head_dim, keys, false, out);
}

static void row_rescale(float *values, int32_t head_dim, float factor) {
    vf f = vf_set1(factor);
    int32_t d = 0;
    for (; d + SIMD_LANES <= head_dim; d += SIMD_LANES) vf_store(values + d, vf_mul(vf_load(values + d), f));
    if (d < head_dim) vf_store_n(values + d, vf_mul(vf_load_n(values + d, head_dim - d), f), head_dim - d);
}

/* The largest score that the row sees in lanes begin .. end - 1 (multiples of SIMD_LANES); what it does not see becomes
 * minus infinity. NaN may or may not win here: the weights keep it. */
static float row_largest(float *s, int32_t begin, int32_t end, int32_t lo, int32_t hi, float soft_cap) {
    vf largest = vf_set1(-INFINITY);
    for (int32_t i = begin; i < end; i += SIMD_LANES) {
        vf x = vf_load(s + i);
        if (soft_cap > 0.0f) x = vf_mul(vf_set1(soft_cap), vf_tanh(vf_div(x, vf_set1(soft_cap))));
        if (lo > i || hi < i + SIMD_LANES) x = vf_keep(x, lo - i, hi - i);
        vf_store(s + i, x);
        largest = vf_max(largest, x);
    }
    return vf_hmax(largest);
}

/* The same where the row sees all and no score changes. */
static float row_largest_plain(const float *s, int32_t begin, int32_t end) {
    vf largest = vf_load(s + begin);
    for (int32_t i = begin + SIMD_LANES; i < end; i += SIMD_LANES) largest = vf_max(largest, vf_load(s + i));
    return vf_hmax(largest);
}

static float row_exp(float *s, int32_t begin, int32_t end, float largest) {
    vf sum = vf_zero(), m = vf_set1(largest);
    for (int32_t i = begin; i < end; i += SIMD_LANES) {
        vf e = vf_exp2_below(vf_sub(vf_load(s + i), m));
        vf_store(s + i, e);
        sum = vf_add(sum, e);
    }
    return vf_hsum(sum);
}

static void weights(float *s, int32_t rows, int32_t head_dim, int32_t key_begin, int32_t key_end, const int32_t *lo,
                    const int32_t *hi, float soft_cap, const struct attention_sums *sums) {
    int32_t begin = key_begin - key_begin % SIMD_LANES;
    int32_t end = (key_end + SIMD_LANES - 1) / SIMD_LANES * SIMD_LANES;
    const bool plain = !lo && soft_cap <= 0.0f && begin == key_begin && end == key_end;
    for (int32_t r = 0; r < rows; r++, s += ATTENTION_SCORE_STRIDE) {
        int32_t from = lo ? lo[r] : key_begin, to = hi ? hi[r] : key_end;
        if (from >= to) {
            for (int32_t i = begin; i < end; i += SIMD_LANES) vf_store(s + i, vf_zero());
            continue;
        }
        float before = sums->largest[r];
        float here = plain ? row_largest_plain(s, begin, end) : row_largest(s, begin, end, from, to, soft_cap);
        float largest = before > here ? before : here;
        float sum = row_exp(s, begin, end, largest);
        if (largest != before) { /* else the factor is exactly 1 */
            float factor[SIMD_LANES];
            vf_store(factor, vf_exp2_below(vf_set1(before - largest)));
            sum += sums->sum[r] * factor[0];
            row_rescale(sums->values + r * sums->values_stride, head_dim, factor[0]);
        } else {
            sum += sums->sum[r];
        }
        sums->largest[r] = largest;
        sums->sum[r] = sum;
    }
}

/* values[rows][columns vectors from d] += weights x run. */
TILE void values_tile(const float *w, int rows, int columns, int64_t d, const struct attention_run *run, bool f16,
                      const struct attention_sums *sums, int64_t row, int32_t head_dim) {
    const bool prefetch = run->ahead && d == 0 && row == 0; /* once */
    vf sum[SIMD_ROWS_MAX][2 * COLUMNS];
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            sum[r][c] = vf_load(sums->values + (row + r) * sums->values_stride + d + c * SIMD_LANES);
    for (int32_t i = 0; i < run->count; i++) {
        const void *v = run_row(run, i, f16);
        if (prefetch) run_prefetch(run, i, head_dim, f16);
        vf weight[SIMD_ROWS_MAX];
        for (int r = 0; r < rows; r++) weight[r] = vf_set1(w[(row + r) * ATTENTION_SCORE_STRIDE + i]);
        for (int c = 0; c < columns; c++) {
            vf x = load_kv(v, d + c * SIMD_LANES, f16);
            for (int r = 0; r < rows; r++) sum[r][c] = vf_fma(weight[r], x, sum[r][c]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int c = 0; c < columns; c++)
            vf_store(sums->values + (row + r) * sums->values_stride + d + c * SIMD_LANES, sum[r][c]);
}

/* The last columns, fewer than a vector (head_dim of 8 more than a multiple of 16). */
TILE void values_rest(const float *w, int rows, int64_t d, int64_t n, const struct attention_run *run, bool f16,
                      const struct attention_sums *sums, int64_t row) {
    for (int r = 0; r < rows; r++) {
        float *out = sums->values + (row + r) * sums->values_stride + d;
        vf sum = vf_load_n(out, n);
        for (int32_t i = 0; i < run->count; i++)
            sum = vf_fma(vf_set1(w[(row + r) * ATTENTION_SCORE_STRIDE + i]), load_kv_n(run_row(run, i, f16), d, f16, n),
                         sum);
        vf_store_n(out, sum, n);
    }
}

/* One row alone takes twice the columns, or there would be too few sums to fill the multipliers' pipeline. */
TILE void values_rows(const float *w, int rows, int32_t head_dim, const struct attention_run *run, bool f16,
                      const struct attention_sums *sums, int64_t row) {
    const int wide = rows == 1 ? 2 * COLUMNS : COLUMNS;
    int64_t d = 0;
    for (; d + wide * SIMD_LANES <= head_dim; d += wide * SIMD_LANES)
        values_tile(w, rows, wide, d, run, f16, sums, row, head_dim);
    for (; d + COLUMNS * SIMD_LANES <= head_dim; d += COLUMNS * SIMD_LANES)
        values_tile(w, rows, COLUMNS, d, run, f16, sums, row, head_dim);
    for (; d + SIMD_LANES <= head_dim; d += SIMD_LANES) values_tile(w, rows, 1, d, run, f16, sums, row, head_dim);
    if (SIMD_LANES > 8 && d < head_dim) values_rest(w, rows, d, head_dim - d, run, f16, sums, row);
}

TILE void values_any(const float *w, int32_t rows, int32_t head_dim, const struct attention_run *run, bool f16,
                     const struct attention_sums *sums) {
    int64_t row = 0;
    for (; row + SIMD_ROWS_MAX <= rows; row += SIMD_ROWS_MAX)
        values_rows(w, SIMD_ROWS_MAX, head_dim, run, f16, sums, row);
    if (SIMD_ROWS_MAX > 3 && row + 3 <= rows) {
        values_rows(w, 3, head_dim, run, f16, sums, row);
        row += 3;
    }
    if (row + 2 <= rows) {
        values_rows(w, 2, head_dim, run, f16, sums, row);
        row += 2;
    }
    if (row < rows) values_rows(w, 1, head_dim, run, f16, sums, row);
}

static void values(const float *w, int32_t rows, int32_t head_dim, const struct attention_run *run,
                   const struct attention_sums *sums) {
    if (run->f16)
        values_any(w, rows, head_dim, run, true, sums);
    else
        values_any(w, rows, head_dim, run, false, sums);
}

static void fold(float *total, float a, const float *x, float b, int32_t count) {
    vf fa = vf_set1(a), fb = vf_set1(b);
    int32_t d = 0;
    for (; d + SIMD_LANES <= count; d += SIMD_LANES)
        vf_store(total + d, vf_fma(vf_load(total + d), fa, vf_mul(vf_load(x + d), fb)));
    if (d < count)
        vf_store_n(total + d, vf_fma(vf_load_n(total + d, count - d), fa, vf_mul(vf_load_n(x + d, count - d), fb)),
                   count - d);
}

static void finish(const float *x, float factor, float *out, int32_t count) {
    vf f = vf_set1(factor);
    int32_t d = 0;
    for (; d + SIMD_LANES <= count; d += SIMD_LANES) vf_store(out + d, vf_fma(vf_load(x + d), f, vf_zero()));
    if (d < count) vf_store_n(out + d, vf_fma(vf_load_n(x + d, count - d), f, vf_zero()), count - d);
}

static void widen(const struct attention_run *run, int32_t head_dim, float *out, int64_t out_stride) {
    for (int32_t i = 0; i < run->count; i++) {
        const uint16_t *row = run_row(run, i, true);
        int32_t d = 0;
        for (; d + SIMD_LANES <= head_dim; d += SIMD_LANES) vf_store(out + d, vf_load_f16(row + d));
        if (d < head_dim) vf_store_n(out + d, vf_load_f16_n(row + d, head_dim - d), head_dim - d);
        out += out_stride;
    }
}

const struct attention_kernels SIMD_NAME(attention_kernels) = {
    SIMD_ROWS_MAX, scores, weights, values, fold, finish, widen,
};
