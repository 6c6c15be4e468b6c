/* Judging a spec, whatever container it came from, and the one table that follows from it: rope's. */
#include <math.h>
#include <stddef.h>

#include "engine/model/model_files.h"
#include "kernels/attention_plan.h"

/* Generous bounds: ten times the largest model known, small enough that products of two fit in 62 bits. */
static const struct bound {
    const char *name;
    size_t at; /* offset of an int32_t in struct model_spec */
    int32_t min, max;
} bounds[] = {
    {"layers", offsetof(struct model_spec, layers), 1, MODEL_LAYERS_MAX},
    {"hidden size", offsetof(struct model_spec, hidden), 1, 1 << 18},
    {"feed-forward size", offsetof(struct model_spec, ffn), 1, 1 << 21},
    {"attention heads", offsetof(struct model_spec, n_heads), 1, 4096},
    {"KV heads", offsetof(struct model_spec, n_kv_heads), 1, 4096},
    {"head size", offsetof(struct model_spec, head_dim), 2, 1024},
    {"vocabulary", offsetof(struct model_spec, vocab), 1, 1 << 22},
    {"context length", offsetof(struct model_spec, context), 1, 1 << 27},
    {"sliding window", offsetof(struct model_spec, window), 0, 1 << 30},
};

static int number_check(const char *name, double value, double min, double max, struct err *err) {
    if (value >= min && value <= max) return 0; /* NaN fails */
    return err_set(err, ERR_INVALID, "%s must be from %g to %g, not %g", name, min, max, value);
}

static int rope_check(const struct model_spec *spec, struct err *err) {
    int rc = number_check("rope base", spec->rope_base, 1.0001, 1e12, err);
    if (spec->rope_kind == ROPE_NONE) return 0;
    if (rc == 0 && (spec->rotary_dim < 2 || spec->rotary_dim > spec->head_dim || spec->rotary_dim % 2))
        return err_set(err, ERR_INVALID, "rope dimensions must be even and from 2 to the head size %d, not %d",
                       spec->head_dim, spec->rotary_dim);
    if (rc == 0 && spec->rope_scaling != ROPE_SCALING_NONE)
        rc = number_check("rope scaling factor", spec->rope_factor, 1e-3, 1e6, err);
    if (rc == 0 && spec->rope_scaling == ROPE_SCALING_LLAMA3) {
        rc = number_check("rope low_freq_factor", spec->rope_low_freq_factor, 1e-3, 1e6, err);
        if (rc == 0) rc = number_check("rope high_freq_factor", spec->rope_high_freq_factor, 1e-3, 1e6, err);
        if (rc == 0 && spec->rope_high_freq_factor <= spec->rope_low_freq_factor)
            rc = err_set(err, ERR_INVALID, "rope high_freq_factor must be above low_freq_factor");
    }
    if (rc == 0 && spec->rope_scaling == ROPE_SCALING_YARN) {
        rc = number_check("rope beta_fast", spec->rope_beta_fast, 1e-3, 1e6, err);
        if (rc == 0) rc = number_check("rope beta_slow", spec->rope_beta_slow, 1e-3, 1e6, err);
    }
    if (rc == 0 && (spec->rope_scaling == ROPE_SCALING_LLAMA3 || spec->rope_scaling == ROPE_SCALING_YARN) &&
        (spec->rope_original_context < 1 || spec->rope_original_context > 1 << 27))
        rc = err_set(err, ERR_INVALID, "rope original context must be from 1 to %d, not %d", 1 << 27,
                     spec->rope_original_context);
    return rc ? rc : number_check("rope attention factor", spec->rope_attn_factor, 1e-3, 1e3, err);
}

int model_spec_check(const struct model_spec *spec, struct err *err) {
    for (size_t i = 0; i < sizeof bounds / sizeof *bounds; i++) {
        int32_t value = *(const int32_t *)((const char *)spec + bounds[i].at);
        if (value < bounds[i].min || value > bounds[i].max)
            return err_set(err, ERR_INVALID, "%s must be from %d to %d, not %d", bounds[i].name, bounds[i].min,
                           bounds[i].max, value);
    }
    if (spec->n_heads % spec->n_kv_heads != 0)
        return err_set(err, ERR_INVALID, "%d attention heads do not divide into %d KV heads", spec->n_heads,
                       spec->n_kv_heads);
    int rc = number_check("norm epsilon", (double)spec->norm_eps, 1e-12, 1, err);
    if (rc == 0) rc = rope_check(spec, err);
    if (rc == 0) rc = number_check("attention scale", (double)spec->attn_scale, 1e-6, 1e3, err);
    if (rc == 0) rc = number_check("attention soft cap", (double)spec->attn_soft_cap, 0, 1e6, err);
    if (rc == 0) rc = number_check("logit soft cap", (double)spec->logit_soft_cap, 0, 1e6, err);
    if (rc == 0) rc = number_check("embedding scale", (double)spec->embed_scale, 1e-6, 1e6, err);
    if (rc == 0) rc = number_check("residual scale", (double)spec->residual_scale, 1e-6, 1e6, err);
    if (rc == 0) rc = number_check("logit scale", (double)spec->logit_scale, 1e-9, 1e6, err);
    /* What attention cannot run is refused here. */
    if (rc == 0 && (spec->head_dim % 8 != 0 || spec->head_dim > ATTENTION_HEAD_DIM_MAX))
        rc = err_set(err, ERR_UNSUPPORTED, "a head size of %d is not supported (multiples of 8 up to %d are)",
                     spec->head_dim, ATTENTION_HEAD_DIM_MAX);
    return rc;
}

/* ---- rope -------------------------------------------------------------------------------------------------------- */

/* Llama 3.1: long waves are slowed by the factor, short ones kept, those between blended. */
static double llama3_frequency(const struct model_spec *spec, double f) {
    double wave = 2 * M_PI / f, length = (double)spec->rope_original_context;
    double low = spec->rope_low_freq_factor, high = spec->rope_high_freq_factor;
    if (wave < length / high) return f;
    if (wave > length / low) return f / spec->rope_factor;
    double blend = (length / wave - low) / (high - low);
    return (1 - blend) * f / spec->rope_factor + blend * f;
}

/* The dimension whose wave turns `turns` times in the original context (YaRN, Peng et al. 2023). */
static double yarn_dimension(const struct model_spec *spec, double turns) {
    return (double)spec->rotary_dim * log((double)spec->rope_original_context / (turns * 2 * M_PI)) /
           (2 * log(spec->rope_base));
}

static double yarn_frequency(const struct model_spec *spec, double f, int32_t pair) {
    double low = fmax(floor(yarn_dimension(spec, spec->rope_beta_fast)), 0);
    double high = fmin(ceil(yarn_dimension(spec, spec->rope_beta_slow)), (double)spec->rotary_dim - 1);
    double ramp = ((double)pair - low) / fmax(high - low, 0.001);
    ramp = fmin(fmax(ramp, 0), 1);
    return f / spec->rope_factor * ramp + f * (1 - ramp);
}

static double rope_frequency(const struct model_spec *spec, const float *factors, int32_t pair) {
    double f = pow(spec->rope_base, -2.0 * (double)pair / (double)spec->rotary_dim);
    if (factors) f /= (double)factors[pair];
    switch (spec->rope_scaling) {
    case ROPE_SCALING_LINEAR:
        return f / spec->rope_factor;
    case ROPE_SCALING_LLAMA3:
        return llama3_frequency(spec, f);
    case ROPE_SCALING_YARN:
        return yarn_frequency(spec, f, pair);
    default:
        return f;
    }
}

#define ROPE_BLOCK 64

/* One pair's column in the rows of a block: exact at the first, turned by one angle from row to row. Sixty-four turns
 * in double stay below 1e-14, and the table of a long context takes milliseconds instead of most of a second. */
static void rope_block_fill(const struct model_spec *spec, double f, int32_t pair, int32_t first, int32_t rows,
                            float *out) {
    double c = cos(f * (double)first) * spec->rope_attn_factor, s = sin(f * (double)first) * spec->rope_attn_factor;
    double turn_c = cos(f), turn_s = sin(f);
    for (int32_t i = 0; i < rows; i++) {
        float *row = out + ((size_t)first + (size_t)i) * (size_t)spec->rotary_dim;
        row[pair] = (float)c;
        row[spec->rotary_dim / 2 + pair] = (float)s;
        double next = c * turn_c - s * turn_s;
        s = s * turn_c + c * turn_s;
        c = next;
    }
}

void rope_table_fill(const struct model_spec *spec, const float *factors, int32_t positions, float *out) {
    for (int32_t first = 0; first < positions; first += ROPE_BLOCK) {
        int32_t rows = positions - first < ROPE_BLOCK ? positions - first : ROPE_BLOCK;
        for (int32_t pair = 0; pair < spec->rotary_dim / 2; pair++)
            rope_block_fill(spec, rope_frequency(spec, factors, pair), pair, first, rows, out);
    }
}
