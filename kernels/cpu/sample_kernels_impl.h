/* sample_kernels_impl.h: the bodies of sample_kernels.h, compiled once for each instruction set by the file that
 * includes a simd_*.h header and then this one.
 *
 * A stretch is 64 vectors of a row. Lane i of all its vectors is one group, so the maxima of a stretch's groups are one
 * vector and cost no step across lanes. */

#include "kernels/cpu/sample_kernels.h"

#define STRETCH (SAMPLE_GROUP * SIMD_LANES)

/* Values from x; beyond the row's end minus infinity. */
static inline vf load_row(const float *x, int64_t left) {
    return left >= SIMD_LANES ? vf_load(x) : vf_keep(vf_load_n(x, left), 0, (int32_t)left);
}

static int64_t scan(const float *x, int64_t count, float *groups, float *largest) {
    vf all = vf_set1(-INFINITY), check = vf_zero();
    int64_t group_count = 0;
    for (int64_t at = 0; at < count; at += STRETCH) {
        vf most[4] = {vf_set1(-INFINITY), vf_set1(-INFINITY), vf_set1(-INFINITY), vf_set1(-INFINITY)};
        int64_t end = at + STRETCH < count ? at + STRETCH : count, i = at;
        for (; i + 4 * SIMD_LANES <= end; i += 4 * SIMD_LANES) {
            for (int j = 0; j < 4; j++) {
                vf v = vf_load(x + i + j * SIMD_LANES);
                most[j] = vf_max(v, most[j]);
                check = vf_add(check, vf_mul(v, vf_zero())); /* NaN for NaN and for infinity, else 0 */
            }
        }
        for (; i < end; i += SIMD_LANES) {
            vf v = load_row(x + i, end - i);
            most[0] = vf_max(v, most[0]);
            check = vf_add(check, vf_mul(v, vf_zero()));
        }
        vf stretch = vf_max(vf_max(most[0], most[1]), vf_max(most[2], most[3]));
        vf_store(groups + group_count, stretch);
        group_count += SIMD_LANES;
        all = vf_max(all, stretch);
    }
    *largest = vf_hmax(all);
    if (!vf_bits_nan(check)) return group_count;
    uint32_t nan = 0; /* rare: minus infinity is welcome, NaN is not */
    for (int64_t i = 0; i < count; i += SIMD_LANES) nan |= vf_bits_nan(load_row(x + i, count - i));
    return nan ? -1 : group_count;
}

static int64_t find(const float *x, int64_t count, const float *groups, float value) {
    vf wanted = vf_set1(value);
    for (int64_t at = 0; at < count; at += STRETCH, groups += SIMD_LANES) {
        if (!vf_bits_ge(vf_load(groups), wanted)) continue;
        int64_t end = at + STRETCH < count ? at + STRETCH : count;
        for (int64_t i = at; i < end; i += SIMD_LANES) {
            uint32_t bits = vf_bits_eq(load_row(x + i, end - i), wanted);
            if (bits) return i + __builtin_ctz(bits);
        }
    }
    return -1;
}

static int64_t count_above(const float *x, int64_t count, const float *groups, float value) {
    vf wanted = vf_set1(value);
    int64_t above = 0;
    for (int64_t at = 0; at < count; at += STRETCH, groups += SIMD_LANES) {
        if (!vf_bits_gt(vf_load(groups), wanted)) continue;
        int64_t end = at + STRETCH < count ? at + STRETCH : count;
        for (int64_t i = at; i < end; i += SIMD_LANES)
            above += __builtin_popcount(vf_bits_gt(load_row(x + i, end - i), wanted));
    }
    return above;
}

static int64_t collect(const float *x, int64_t count, const float *groups, float threshold, int32_t *ids,
                       float *values) {
    vf wanted = vf_set1(threshold);
    int64_t found = 0;
    for (int64_t at = 0; at < count; at += STRETCH, groups += SIMD_LANES) {
        if (!vf_bits_ge(vf_load(groups), wanted)) continue;
        int64_t end = at + STRETCH < count ? at + STRETCH : count;
        for (int64_t i = at; i < end; i += SIMD_LANES) {
            uint32_t bits = vf_bits_ge(load_row(x + i, end - i), wanted);
            for (; bits; bits &= bits - 1) {
                int64_t id = i + __builtin_ctz(bits);
                if (id >= count) break;
                ids[found] = (int32_t)id;
                values[found++] = x[id];
            }
        }
    }
    return found;
}

static void exps(const float *x, int64_t count, float largest, float scale, float *out) {
    vf m = vf_set1(largest), s = vf_set1(scale);
    int64_t i = 0;
    for (; i + SIMD_LANES <= count; i += SIMD_LANES) vf_store(out + i, vf_exp(vf_mul(vf_sub(vf_load(x + i), m), s)));
    if (i < count) vf_store_n(out + i, vf_exp(vf_mul(vf_sub(vf_load_n(x + i, count - i), m), s)), count - i);
}

static double exp_sums(const float *x, int64_t count, float largest, float scale, float *out, double *blocks) {
    vf m = vf_set1(largest), s = vf_set1(scale);
    double total = 0.0;
    for (int64_t at = 0; at < count; at += SAMPLE_SUM_BLOCK) {
        int64_t end = at + SAMPLE_SUM_BLOCK < count ? at + SAMPLE_SUM_BLOCK : count, i = at;
        vf sum[2] = {vf_zero(), vf_zero()};
        for (; i + 2 * SIMD_LANES <= end; i += 2 * SIMD_LANES) {
            for (int j = 0; j < 2; j++) {
                vf e = vf_exp(vf_mul(vf_sub(vf_load(x + i + j * SIMD_LANES), m), s));
                if (out) vf_store(out + i + j * SIMD_LANES, e);
                sum[j] = vf_add(sum[j], e);
            }
        }
        for (; i < end; i += SIMD_LANES) {
            vf e = vf_exp(vf_mul(vf_sub(load_row(x + i, end - i), m), s));
            if (out) vf_store_n(out + i, e, end - i < SIMD_LANES ? end - i : SIMD_LANES);
            sum[0] = vf_add(sum[0], e);
        }
        *blocks = vf_hsum(vf_add(sum[0], sum[1]));
        total += *blocks++;
    }
    return total;
}

static void masses(const float *weights, int64_t count, const float *thresholds, double *out) {
    vf threshold[SAMPLE_THRESHOLDS];
    for (int j = 0; j < SAMPLE_THRESHOLDS; j++) {
        threshold[j] = vf_set1(thresholds[j]);
        out[j] = 0.0;
    }
    for (int64_t at = 0; at < count; at += SAMPLE_SUM_BLOCK) {
        int64_t end = at + SAMPLE_SUM_BLOCK < count ? at + SAMPLE_SUM_BLOCK : count;
        vf sum[SAMPLE_THRESHOLDS] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
        for (int64_t i = at; i < end; i += SIMD_LANES) {
            vf w = end - i >= SIMD_LANES ? vf_load(weights + i) : vf_load_n(weights + i, end - i);
            for (int j = 0; j < SAMPLE_THRESHOLDS; j++) sum[j] = vf_add(sum[j], vf_zero_below(w, w, threshold[j]));
        }
        for (int j = 0; j < SAMPLE_THRESHOLDS; j++) out[j] += (double)vf_hsum(sum[j]);
    }
}

static int64_t collect_between(const float *weights, int64_t count, float lo, float hi, int32_t *ids, float *values) {
    vf least = vf_set1(lo), most = vf_set1(hi);
    int64_t found = 0;
    for (int64_t i = 0; i < count; i += SIMD_LANES) {
        vf w = load_row(weights + i, count - i);
        uint32_t bits = vf_bits_ge(w, least) & vf_bits_gt(most, w);
        for (; bits; bits &= bits - 1) {
            int64_t id = i + __builtin_ctz(bits);
            ids[found] = (int32_t)id;
            values[found++] = weights[id];
        }
    }
    return found;
}

static double keep_sums(float *weights, int64_t count, float lo, double *blocks) {
    vf least = vf_set1(lo);
    double total = 0.0;
    for (int64_t at = 0; at < count; at += SAMPLE_SUM_BLOCK) {
        int64_t end = at + SAMPLE_SUM_BLOCK < count ? at + SAMPLE_SUM_BLOCK : count;
        vf sum = vf_zero();
        for (int64_t i = at; i < end; i += SIMD_LANES) {
            int64_t n = end - i < SIMD_LANES ? end - i : SIMD_LANES;
            vf w = n == SIMD_LANES ? vf_load(weights + i) : vf_load_n(weights + i, n);
            w = vf_zero_below(w, w, least);
            if (n == SIMD_LANES)
                vf_store(weights + i, w);
            else
                vf_store_n(weights + i, w, n);
            sum = vf_add(sum, w);
        }
        *blocks = vf_hsum(sum);
        total += *blocks++;
    }
    return total;
}

const struct sample_kernels SIMD_NAME(sample_kernels) = {
    scan, find, count_above, collect, exps, exp_sums, masses, collect_between, keep_sums,
};
