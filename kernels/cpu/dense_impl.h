/* dense_impl.h: the bodies of dense.h, compiled once for each instruction set by the file that includes a simd_*.h
 * header and then this one. */

#include <math.h>

#include "kernels/cpu/dense.h"

/* Four sums a lane, so that a row of any length is added in one fixed order and the additions overlap. */
static float square_sum(const float *x, int64_t dim) {
    vf sum[4] = {vf_zero(), vf_zero(), vf_zero(), vf_zero()};
    int64_t i = 0;
    for (; i + 4 * SIMD_LANES <= dim; i += 4 * SIMD_LANES) {
        for (int j = 0; j < 4; j++) {
            vf v = vf_load(x + i + j * SIMD_LANES);
            sum[j] = vf_fma(v, v, sum[j]);
        }
    }
    for (; i < dim; i += SIMD_LANES) {
        vf v = i + SIMD_LANES <= dim ? vf_load(x + i) : vf_load_n(x + i, dim - i);
        sum[0] = vf_fma(v, v, sum[0]);
    }
    return vf_hsum(vf_add(vf_add(sum[0], sum[1]), vf_add(sum[2], sum[3])));
}

static void rms_norm(float *x, const float *delta, const float *weight, float *out, int64_t dim, float eps,
                     float offset) {
    int64_t whole = dim - dim % SIMD_LANES, rest = dim - whole;
    if (delta) {
        for (int64_t i = 0; i < whole; i += SIMD_LANES) vf_store(x + i, vf_add(vf_load(x + i), vf_load(delta + i)));
        if (rest) vf_store_n(x + whole, vf_add(vf_load_n(x + whole, rest), vf_load_n(delta + whole, rest)), rest);
    }
    float inverse = 1.0f / sqrtf(square_sum(x, dim) / (float)dim + eps);
    vf factor = vf_set1(inverse), shift = vf_set1(offset);
    for (int64_t i = 0; i < whole; i += SIMD_LANES)
        vf_store(out + i, vf_mul(vf_mul(vf_load(x + i), factor), vf_add(vf_load(weight + i), shift)));
    if (rest)
        vf_store_n(out + whole,
                   vf_mul(vf_mul(vf_load_n(x + whole, rest), factor), vf_add(vf_load_n(weight + whole, rest), shift)),
                   rest);
}

/* silu(g) = g / (1 + exp(-g)); gelu_tanh(g) = g / (1 + exp(-2 sqrt(2/pi) (g + 0.044715 g^3))), since
 * (1 + tanh(u)) / 2 = 1 / (1 + exp(-2u)). */
static inline vf gate(vf g, enum activation activation) {
    vf u = g;
    if (activation == ACTIVATION_GELU_TANH) {
        vf cubic = vf_mul(vf_mul(g, g), g);
        u = vf_mul(vf_set1(1.5957691216f), vf_fma(vf_set1(0.044715f), cubic, g));
    }
    return vf_div(g, vf_add(vf_set1(1.0f), vf_exp(vf_sub(vf_zero(), u))));
}

static void gated_act(const float *gates, const float *up, float *out, int64_t count, enum activation activation) {
    int64_t whole = count - count % SIMD_LANES, rest = count - whole;
    for (int64_t i = 0; i < whole; i += SIMD_LANES)
        vf_store(out + i, vf_mul(gate(vf_load(gates + i), activation), vf_load(up + i)));
    if (rest)
        vf_store_n(out + whole, vf_mul(gate(vf_load_n(gates + whole, rest), activation), vf_load_n(up + whole, rest)),
                   rest);
}

static inline vf scale_cap(vf x, vf factor, float cap) {
    x = vf_mul(x, factor);
    if (cap > 0.0f) x = vf_mul(vf_set1(cap), vf_tanh(vf_div(x, vf_set1(cap))));
    return x;
}

static void scale(float *x, int64_t count, float factor, float cap) {
    int64_t whole = count - count % SIMD_LANES, rest = count - whole;
    for (int64_t i = 0; i < whole; i += SIMD_LANES) vf_store(x + i, scale_cap(vf_load(x + i), vf_set1(factor), cap));
    if (rest) vf_store_n(x + whole, scale_cap(vf_load_n(x + whole, rest), vf_set1(factor), cap), rest);
}

/* Angles of one token, spread for neighbours: cos_i cos_i and -sin_i sin_i, side by side. */
#define ROPE_SPREAD_MAX 512

static void rope_head_neighbours(float *x, const float *cosines, const float *sines, int64_t rotary_dim) {
    int64_t i = 0;
    for (; i + SIMD_LANES <= rotary_dim; i += SIMD_LANES) {
        vf v = vf_load(x + i);
        vf_store(x + i, vf_fma(vf_swap_pairs(v), vf_load(sines + i), vf_mul(v, vf_load(cosines + i))));
    }
    if (i < rotary_dim) {
        vf v = vf_load_n(x + i, rotary_dim - i);
        vf turned = vf_fma(vf_swap_pairs(v), vf_load_n(sines + i, rotary_dim - i),
                           vf_mul(v, vf_load_n(cosines + i, rotary_dim - i)));
        vf_store_n(x + i, turned, rotary_dim - i);
    }
}

static void rope_neighbours(float *x, const float *cos_sin, int64_t heads, int64_t head_dim, int64_t rotary_dim) {
    float cosines[ROPE_SPREAD_MAX], sines[ROPE_SPREAD_MAX];
    for (int64_t begin = 0; begin < rotary_dim; begin += ROPE_SPREAD_MAX) {
        int64_t count = rotary_dim - begin < ROPE_SPREAD_MAX ? rotary_dim - begin : ROPE_SPREAD_MAX;
        for (int64_t i = 0; i < count / 2; i++) {
            cosines[2 * i] = cosines[2 * i + 1] = cos_sin[begin / 2 + i];
            sines[2 * i] = -cos_sin[(rotary_dim + begin) / 2 + i];
            sines[2 * i + 1] = cos_sin[(rotary_dim + begin) / 2 + i];
        }
        for (int64_t h = 0; h < heads; h++) rope_head_neighbours(x + h * head_dim + begin, cosines, sines, count);
    }
}

static void rope_halves(float *x, const float *cos_sin, int64_t heads, int64_t head_dim, int64_t rotary_dim) {
    const int64_t half = rotary_dim / 2;
    const float *cosines = cos_sin, *sines = cos_sin + half;
    for (int64_t h = 0; h < heads; h++, x += head_dim) {
        for (int64_t i = 0; i < half; i++) {
            float a = x[i], b = x[half + i];
            x[i] = a * cosines[i] - b * sines[i];
            x[half + i] = a * sines[i] + b * cosines[i];
        }
    }
}

static void rope(float *x, const float *cos_sin, int64_t heads, int64_t head_dim, int64_t rotary_dim,
                 enum rope_kind kind) {
    if (kind == ROPE_NEIGHBOURS)
        rope_neighbours(x, cos_sin, heads, head_dim, rotary_dim);
    else
        rope_halves(x, cos_sin, heads, head_dim, rotary_dim);
}

static void narrow(const float *x, uint16_t *out, int64_t count) {
    const vf hi = vf_set1(65504.0f), lo = vf_set1(-65504.0f);
    int64_t whole = count - count % SIMD_LANES, rest = count - whole;
    for (int64_t i = 0; i < whole; i += SIMD_LANES) vf_store_f16(out + i, vf_min(hi, vf_max(lo, vf_load(x + i))));
    if (rest) vf_store_f16_n(out + whole, vf_min(hi, vf_max(lo, vf_load_n(x + whole, rest))), rest);
}

const struct dense_kernels SIMD_NAME(dense_kernels) = {rms_norm, gated_act, scale, rope, narrow};
