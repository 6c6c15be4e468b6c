/* attention.h: the inner kernels of CPU attention, one table an instruction set. They work on one block of at most
 * ATTENTION_BLOCK keys and up to ATTENTION_ROWS rows (a query token and a query head each), and know nothing of pages,
 * sequences or plans. Called inside tiles by any worker.
 *
 * What is computed for a row does not depend on the other rows, nor on where in the block a run of keys begins: dot
 * products add over head_dim in one order, sums of values over keys in rising order, keys beyond a row's range add
 * zero. */
#ifndef QUIRE_KERNELS_CPU_ATTENTION_H
#define QUIRE_KERNELS_CPU_ATTENTION_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/attention_plan.h"
#include "kernels/cpu/machine.h"

/* Floats from one row of scores to the next: the kernels write whole vectors and may pass the block's end by 15; and
 * 320 bytes keep the rows off each other's cache sets. */
#define ATTENTION_SCORE_STRIDE (ATTENTION_BLOCK + 16)

/* A run of keys or values: [count, head_dim] f32 or f16, `stride` elements from one to the next (head_dim for keys).
 * Packed keys are f32 in the order in which `scores` reads them; count is of keys all the same. With few rows a cache
 * that is larger than the processor's comes at the speed of memory, so the kernels ask for what comes next while they
 * work: `ahead` is laid out as `data` is, and is only prefetched. */
struct attention_run {
    const void *data, *ahead; /* ahead: NULL for none */
    int64_t stride;
    int32_t count;
    bool f16, packed;
};

/* What a row has seen so far of its split: the largest score, the sum of 2^(score - largest), and the sum of values
 * weighted alike. Scores are in units of log 2: queries come multiplied by 1 / ln 2, which saves exp a step. */
struct attention_sums {
    float *largest, *sum; /* [rows] */
    float *values;        /* [rows, values_stride] f32 */
    int64_t values_stride;
};

struct attention_kernels {
    int32_t rows; /* how many rows share one load of a key; with more, a block is packed or widened to f32 first */
    /* scores[r * ATTENTION_SCORE_STRIDE + i] = q_r . k_i. q is [rows, q_stride] f32, 64-byte aligned. */
    void (*scores)(const float *q, int64_t q_stride, int32_t rows, int32_t head_dim, const struct attention_run *keys,
                   float *scores);
    /* Turns scores into weights 2^(score - largest) in place, for keys key_begin .. key_end - 1 of the block; row r
     * sees lo[r] <= key < hi[r] of them, the others get weight 0; with lo NULL every row sees all. Brings the sums up
     * to date. soft_cap 0: none. */
    void (*weights)(float *scores, int32_t rows, int32_t head_dim, int32_t key_begin, int32_t key_end,
                    const int32_t *lo, const int32_t *hi, float soft_cap, const struct attention_sums *sums);
    /* values[r] += weights[r][i] * v_i over the run's values in rising order. */
    void (*values)(const float *weights, int32_t rows, int32_t head_dim, const struct attention_run *run,
                   const struct attention_sums *sums);
    /* total = total * a + values * b, [count] */
    void (*fold)(float *total, float a, const float *values, float b, int32_t count);
    /* out = values * factor + 0. The addition turns -0 into 0: a key of weight 0 that only some batches look at may
     * have done so already. */
    void (*finish)(const float *values, float factor, float *out, int32_t count);
    /* Packs a run of keys as the keys first .. of a packed run; out has room for a whole block. */
    void (*pack)(const struct attention_run *run, int32_t head_dim, int32_t first, float *out);
    /* out [count, out_stride] f32 = the run of f16 values. */
    void (*widen)(const struct attention_run *run, int32_t head_dim, float *out, int64_t out_stride);
};

extern const struct attention_kernels attention_kernels_portable, attention_kernels_avx2, attention_kernels_avx512;

#endif
