/* attention_impl.h: the bodies of attention.h, compiled once for each instruction set by the file that includes a
 * simd_*.h header and then this one. Register tiles are functions with constant bounds that the compiler unrolls. */

#include "kernels/cpu/attention.h"

#define TILE    static inline __attribute__((always_inline))
#define QUADS   (SIMD_LANES / 4)
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

/* A dot product is four sums, of the values d = 0, 1, 2, 3 modulo 4, each over rising d; then (0 + 2) + (1 + 3). A
 * vector holds such quads of several keys, and four vectors those of SIMD_LANES keys: quad j of vector v belongs to key
 * 4 j + v, so that adding up the quads of the four leaves the scores in order. Packed keys lie in the order in which
 * this reads them: [keys / SIMD_LANES][head_dim / 4][4 vectors][SIMD_LANES]. */
enum key_layout { KEYS_F32, KEYS_F16, KEYS_PACKED };

/* Vector v, values d .. d + 3 of keys i .. i + SIMD_LANES - 1. Past the run's last key that is taken again: the extra
 * scores lie outside the block or are written over by the next run. */
TILE vf load_keys(const struct attention_run *run, int32_t i, int v, int32_t d, int32_t head_dim,
                  enum key_layout layout, bool whole) {
    if (layout == KEYS_PACKED) return vf_load((const float *)run->data + (int64_t)i * head_dim + (d + v) * SIMD_LANES);
    const float *wide[QUADS];
    const uint16_t *half[QUADS];
    for (int j = 0; j < QUADS; j++) {
        int32_t key = i + 4 * j + v;
        if (!whole && key >= run->count) key = run->count - 1;
        wide[j] = (const float *)run->data + (int64_t)key * head_dim + d;
        half[j] = (const uint16_t *)run->data + (int64_t)key * head_dim + d;
    }
    return layout == KEYS_F16 ? vf_load_quads_f16(half) : vf_load_quads(wide);
}

TILE void scores_tile(const float *q, int64_t q_stride, int rows, int32_t head_dim, const struct attention_run *run,
                      enum key_layout layout, int32_t i, bool whole, float *scores) {
    vf sum[SIMD_ROWS_MAX][4];
    if (layout != KEYS_PACKED && run->ahead)
        for (int j = 0; j < SIMD_LANES; j++) run_prefetch(run, i + j, head_dim, layout == KEYS_F16);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < 4; v++) sum[r][v] = vf_zero();
    for (int32_t d = 0; d < head_dim; d += 4) {
        vf row[SIMD_ROWS_MAX];
        for (int r = 0; r < rows; r++) row[r] = vf_repeat_quad(q + r * q_stride + d);
        for (int v = 0; v < 4; v++) {
            vf k = load_keys(run, i, v, d, head_dim, layout, whole);
            for (int r = 0; r < rows; r++) sum[r][v] = vf_fma(row[r], k, sum[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        vf_store(scores + r * ATTENTION_SCORE_STRIDE + i, vf_sum_quads(sum[r][0], sum[r][1], sum[r][2], sum[r][3]));
}

TILE void scores_rows(const float *q, int64_t q_stride, int rows, int32_t head_dim, const struct attention_run *run,
                      enum key_layout layout, float *scores) {
    int32_t i = 0;
    for (; i + SIMD_LANES <= run->count; i += SIMD_LANES)
        scores_tile(q, q_stride, rows, head_dim, run, layout, i, true, scores);
    if (i < run->count) scores_tile(q, q_stride, rows, head_dim, run, layout, i, false, scores);
}

TILE void scores_any(const float *q, int64_t q_stride, int32_t rows, int32_t head_dim, const struct attention_run *run,
                     enum key_layout layout, float *scores) {
    for (; rows >= SIMD_ROWS_MAX; rows -= SIMD_ROWS_MAX) {
        scores_rows(q, q_stride, SIMD_ROWS_MAX, head_dim, run, layout, scores);
        q += SIMD_ROWS_MAX * q_stride;
        scores += SIMD_ROWS_MAX * ATTENTION_SCORE_STRIDE;
    }
    if (SIMD_ROWS_MAX > 3 && rows >= 3) {
        scores_rows(q, q_stride, 3, head_dim, run, layout, scores);
        q += 3 * q_stride;
        scores += 3 * ATTENTION_SCORE_STRIDE;
        rows -= 3;
    }
    if (rows == 2) scores_rows(q, q_stride, 2, head_dim, run, layout, scores);
    if (rows == 1) scores_rows(q, q_stride, 1, head_dim, run, layout, scores);
}

/* The usual width gets loops of known length. */
static void scores(const float *q, int64_t q_stride, int32_t rows, int32_t head_dim, const struct attention_run *keys,
                   float *out) {
    if (keys->packed && head_dim == 64)
        scores_any(q, q_stride, rows, 64, keys, KEYS_PACKED, out);
    else if (keys->packed)
        scores_any(q, q_stride, rows, head_dim, keys, KEYS_PACKED, out);
    else if (keys->f16 && head_dim == 64)
        scores_any(q, q_stride, rows, 64, keys, KEYS_F16, out);
    else if (keys->f16)
        scores_any(q, q_stride, rows, head_dim, keys, KEYS_F16, out);
    else
        scores_any(q, q_stride, rows, head_dim, keys, KEYS_F32, out);
}

static void pack(const struct attention_run *run, int32_t head_dim, int32_t first, float *out) {
    for (int32_t i = 0; i < run->count; i++) {
        int32_t key = first + i, lane = key % SIMD_LANES;
        const void *row = run_row(run, i, run->f16);
        float *to = out + (int64_t)(key - lane) * head_dim + lane % 4 * SIMD_LANES + lane / 4 * 4;
        int32_t d = 0;
        for (; d + SIMD_LANES <= head_dim; d += SIMD_LANES)
            vf_store_quads(to + (int64_t)d * SIMD_LANES, 4 * SIMD_LANES, load_kv(row, d, run->f16), QUADS);
        if (SIMD_LANES > 8 && d < head_dim)
            vf_store_quads(to + (int64_t)d * SIMD_LANES, 4 * SIMD_LANES, load_kv_n(row, d, run->f16, head_dim - d),
                           (head_dim - d) / 4);
    }
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
    SIMD_ROWS_MAX, scores, weights, values, fold, finish, pack, widen,
};
