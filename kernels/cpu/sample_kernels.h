/* sample_kernels.h: the passes of the CPU sampler over a whole row of logits, one table an instruction set. Pure
 * functions called by any worker; they know no parameters and no state.
 *
 * A group is 64 values of a row (less at its end), and a row of group maxima comes as a by-product of the scan. The
 * later passes use it to skip what cannot matter, and the k-th largest group maximum bounds the k-th largest value from
 * below. */
#ifndef QUIRE_KERNELS_CPU_SAMPLE_KERNELS_H
#define QUIRE_KERNELS_CPU_SAMPLE_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/cpu/machine.h"

#define SAMPLE_GROUP 64

#define SAMPLE_THRESHOLDS 4 /* of one pass of masses */

/* Values of a partial sum: short enough for f32, and what a draw walks through one by one. */
#define SAMPLE_SUM_BLOCK 1024

/* Group maxima a row of `count` values may have: whole vectors of up to 16 groups. */
#define SAMPLE_GROUPS_MAX(count) ((int64_t)(count) / SAMPLE_GROUP + 16)

struct sample_kernels {
    /* The largest of x [count] and the group maxima; returns how many groups, or -1 when x holds NaN. */
    int64_t (*scan)(const float *x, int64_t count, float *groups, float *largest);
    /* The first index whose value is `value`, or -1. */
    int64_t (*find)(const float *x, int64_t count, const float *groups, float value);
    /* How many values are larger. */
    int64_t (*count_above)(const float *x, int64_t count, const float *groups, float value);
    /* All values >= threshold, with their indices, in rising order of index. Returns how many. */
    int64_t (*collect)(const float *x, int64_t count, const float *groups, float threshold, int32_t *ids,
                       float *values);
    /* out = exp((x - largest) * scale) */
    void (*exps)(const float *x, int64_t count, float largest, float scale, float *out);
    /* The sums of exps over each SAMPLE_SUM_BLOCK values; the return value is their sum. With `out` the exps stay
     * there. */
    double (*exp_sums)(const float *x, int64_t count, float largest, float scale, float *out, double *blocks);
    /* masses[j] = sum of the weights >= thresholds[j] */
    void (*masses)(const float *weights, int64_t count, const float *thresholds, double *masses);
    /* All indices with lo <= weight < hi in rising order, and their weights. Returns how many. */
    int64_t (*collect_between)(const float *weights, int64_t count, float lo, float hi, int32_t *ids, float *values);
    /* Makes weights below lo zero; then as exp_sums. */
    double (*keep_sums)(float *weights, int64_t count, float lo, double *blocks);
};

extern const struct sample_kernels sample_kernels_portable, sample_kernels_avx2, sample_kernels_avx512;

const struct sample_kernels *sample_kernels_get(enum cpu_isa isa);

#endif
