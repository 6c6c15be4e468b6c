/* GGUF metadata to struct model_spec. An architecture is a row; what the rows share is read once. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/model/model_files.h"

static const struct gguf_architecture {
    const char *name;
    enum rope_kind rope_kind; /* the converter permutes q and k of some families so that rope turns neighbours */
    bool qk_norm;
    int32_t no_rope_step; /* every so many layers one without rope; 0: none */
} architectures[] = {
    {"llama", ROPE_NEIGHBOURS, false, 0},   {"qwen2", ROPE_HALVES, false, 0},       {"qwen3", ROPE_HALVES, true, 0},
    {"smollm3", ROPE_NEIGHBOURS, false, 4}, {"granite", ROPE_NEIGHBOURS, false, 0},
};

/* Reads of "ARCH.key", the first error kept. Optional ones leave *out alone when the key is missing. */
struct config {
    const struct gguf *gguf;
    const char *label, *architecture;
    struct err *err;
    int rc;
};

/* What gguf_read_* found wrong, in which a missing key counts as a bad file. */
static void read_failed(struct config *c, int rc) {
    c->rc = rc == ERR_NOT_FOUND ? ERR_INVALID : rc;
    if (c->err) c->err->code = c->rc;
}

static const char *config_key(const struct config *c, const char *key, char out[160]) {
    snprintf(out, 160, "%s.%s", c->architecture, key);
    return out;
}

static void read_i32(struct config *c, const char *key, bool required, int32_t max, int32_t *out) {
    char name[160];
    uint64_t value;
    if (c->rc) return;
    int rc = gguf_read_u64(c->gguf, config_key(c, key, name), 0, (uint64_t)max, &value, c->err);
    if (rc == 0)
        *out = (int32_t)value;
    else if (rc != ERR_NOT_FOUND || required)
        read_failed(c, rc);
}

static void read_f64(struct config *c, const char *key, bool required, double *out) {
    char name[160];
    double value;
    if (c->rc) return;
    int rc = gguf_read_f64(c->gguf, config_key(c, key, name), -1e9, 1e9, &value, c->err);
    if (rc == 0)
        *out = value;
    else if (rc != ERR_NOT_FOUND || required)
        read_failed(c, rc);
}

static void read_f32(struct config *c, const char *key, float *out) {
    double value = (double)*out;
    read_f64(c, key, false, &value);
    *out = (float)value;
}

/* Keys that would change the arithmetic in ways the forward pass does not know: refused by name when set. */
static void refuse_unknown(struct config *c) {
    static const char *const keys[] = {
        "expert_count",
        "expert_used_count",
        "leading_dense_block_count",
        "pooling_type",
        "attention.max_alibi_bias",
        "attention.clamp_kqv",
        "use_parallel_residual",
        "attention.temperature_length",
        "interleave_moe_layer_step",
        "embedding_length_per_layer_input",
        "attention.shared_kv_layers",
        "attention.value_residual_mix_lora_rank",
    };
    char name[160];
    for (size_t i = 0; i < sizeof keys / sizeof *keys && c->rc == 0; i++) {
        double value = 0;
        bool flag = false;
        const char *key = config_key(c, keys[i], name);
        if (!gguf_has(c->gguf, key)) continue;
        int rc = gguf_read_f64(c->gguf, key, -INFINITY, INFINITY, &value, c->err);
        if (rc == ERR_INVALID) rc = gguf_read_bool(c->gguf, key, &flag, c->err);
        if (rc || value != 0 || flag)
            c->rc = err_set_field(c->err, ERR_UNSUPPORTED, key,
                                  "%s: key %s is set, which this version does not "
                                  "support",
                                  c->label, key);
    }
    bool causal = true;
    if (c->rc == 0 && gguf_has(c->gguf, config_key(c, "attention.causal", name))) {
        c->rc = gguf_read_bool(c->gguf, name, &causal, c->err);
        if (c->rc == 0 && !causal)
            c->rc = err_set_field(c->err, ERR_UNSUPPORTED, name,
                                  "%s: attention that is not causal is not "
                                  "supported",
                                  c->label);
    }
}

static void read_heads(struct config *c, struct model_spec *spec) {
    int32_t value_dim = 0;
    read_i32(c, "attention.head_count", true, INT32_MAX, &spec->n_heads);
    spec->n_kv_heads = spec->n_heads;
    read_i32(c, "attention.head_count_kv", false, INT32_MAX, &spec->n_kv_heads);
    if (c->rc) return;
    if (spec->n_heads > 0) spec->head_dim = spec->hidden / spec->n_heads;
    read_i32(c, "attention.key_length", false, INT32_MAX, &spec->head_dim);
    value_dim = spec->head_dim;
    read_i32(c, "attention.value_length", false, INT32_MAX, &value_dim);
    if (c->rc == 0 && value_dim != spec->head_dim)
        c->rc = err_set(c->err, ERR_UNSUPPORTED,
                        "%s: attention.value_length %d differs from attention.key_length %d, "
                        "which this version does not support",
                        c->label, value_dim, spec->head_dim);
    spec->rotary_dim = spec->head_dim;
    read_i32(c, "rope.dimension_count", false, INT32_MAX, &spec->rotary_dim);
}

/* The file's word for a sentence: printable and short. */
static const char *shown(const char *text, size_t bytes, char out[48]) {
    size_t i;
    for (i = 0; i < bytes && i < 47; i++) out[i] = (unsigned char)text[i] < 0x20 || text[i] == 0x7f ? '?' : text[i];
    out[i] = '\0';
    return out;
}

static bool str_is(const char *s, size_t bytes, const char *text) {
    return strlen(text) == bytes && memcmp(s, text, bytes) == 0;
}

static void read_rope_scaling(struct config *c, struct model_spec *spec) {
    char name[160], word[48];
    const char *type = "none";
    size_t bytes = 4;
    if (c->rc == 0 && gguf_has(c->gguf, config_key(c, "rope.scaling.type", name)))
        c->rc = gguf_read_str(c->gguf, name, &type, &bytes, c->err);
    if (c->rc) return;
    spec->rope_factor = 1;
    if (str_is(type, bytes, "none") && !gguf_has(c->gguf, config_key(c, "rope.scale_linear", name))) return;
    if (str_is(type, bytes, "yarn")) {
        spec->rope_scaling = ROPE_SCALING_YARN;
    } else if (str_is(type, bytes, "linear") || str_is(type, bytes, "none")) {
        spec->rope_scaling = ROPE_SCALING_LINEAR;
        read_f64(c, "rope.scale_linear", false, &spec->rope_factor);
    } else {
        c->rc = err_set_field(c->err, ERR_UNSUPPORTED, "rope.scaling.type",
                              "%s: rope scaling \"%s\" is not supported "
                              "(none, linear and yarn are)",
                              c->label, shown(type, bytes, word));
        return;
    }
    read_f64(c, "rope.scaling.factor", false, &spec->rope_factor);
    if (spec->rope_scaling != ROPE_SCALING_YARN) return;
    double attn = 1;
    spec->rope_original_context = spec->context;
    spec->rope_beta_fast = 32;
    spec->rope_beta_slow = 1;
    read_i32(c, "rope.scaling.original_context_length", false, INT32_MAX, &spec->rope_original_context);
    read_f64(c, "rope.scaling.yarn_beta_fast", false, &spec->rope_beta_fast);
    read_f64(c, "rope.scaling.yarn_beta_slow", false, &spec->rope_beta_slow);
    read_f64(c, "rope.scaling.attn_factor", false, &attn);
    spec->rope_attn_factor = attn * (spec->rope_factor > 1 ? 0.1 * log(spec->rope_factor) + 1 : 1);
}

/* Multipliers and caps: 1 and 0 unless the file says otherwise. */
static void read_scales(struct config *c, struct model_spec *spec) {
    float logit_scale = 0, attn_scale = 0;
    spec->embed_scale = spec->residual_scale = spec->logit_scale = 1;
    read_f32(c, "embedding_scale", &spec->embed_scale);
    read_f32(c, "residual_scale", &spec->residual_scale);
    read_f32(c, "logit_scale", &logit_scale);
    read_f32(c, "attention.scale", &attn_scale);
    read_f32(c, "attn_logit_softcapping", &spec->attn_soft_cap);
    read_f32(c, "final_logit_softcapping", &spec->logit_soft_cap);
    if (logit_scale != 0) spec->logit_scale = 1 / logit_scale; /* GGUF's granite divides by it */
    if (attn_scale != 0)
        spec->attn_scale = attn_scale;
    else if (spec->head_dim > 0)
        spec->attn_scale = (float)(1 / sqrt((double)spec->head_dim));
}

static void read_from_tensors(struct config *c, struct model_spec *spec) {
    const struct gguf_tensor *embed = gguf_find_tensor(c->gguf, "token_embd.weight");
    if (c->rc) return;
    if (!embed || embed->dims != 2 || embed->shape[1] > INT32_MAX) {
        c->rc = err_set_field(c->err, ERR_INVALID, "token_embd.weight", "%s: token_embd.weight is missing or no matrix",
                              c->label);
        return;
    }
    spec->vocab = (int32_t)embed->shape[1];
    spec->tied_output = !gguf_find_tensor(c->gguf, "output.weight");
    spec->qkv_bias = gguf_find_tensor(c->gguf, "blk.0.attn_q.bias") != NULL;
    spec->output_bias = gguf_find_tensor(c->gguf, "blk.0.attn_output.bias") != NULL;
    spec->mlp_bias = gguf_find_tensor(c->gguf, "blk.0.ffn_down.bias") != NULL;
}

static const struct gguf_architecture *architecture_find(struct config *c, struct model_spec *spec) {
    const char *name;
    size_t bytes;
    int rc = gguf_read_str(c->gguf, "general.architecture", &name, &bytes, c->err);
    if (rc) {
        read_failed(c, rc);
        return NULL;
    }
    for (size_t i = 0; i < sizeof architectures / sizeof *architectures; i++)
        if (str_is(name, bytes, architectures[i].name)) {
            snprintf(spec->architecture, sizeof spec->architecture, "%s", architectures[i].name);
            return &architectures[i];
        }
    char word[48];
    c->rc = err_set_field(c->err, ERR_UNSUPPORTED, "general.architecture",
                          "%s: architecture \"%s\" is not supported "
                          "(llama, qwen2, qwen3, smollm3 and granite are)",
                          c->label, shown(name, bytes, word));
    return NULL;
}

/* A model cut into several files holds only some of its tensors in each. */
static void refuse_split(struct config *c) {
    uint64_t count = 1;
    if (c->rc || !gguf_has(c->gguf, "split.count")) return;
    int rc = gguf_read_u64(c->gguf, "split.count", 0, UINT32_MAX, &count, c->err);
    if (rc)
        c->rc = rc;
    else if (count > 1)
        c->rc = err_set_field(c->err, ERR_UNSUPPORTED, "split.count",
                              "%s: one of %u files of a split model, which is not supported; merge them into one",
                              c->label, (unsigned)count);
}

int gguf_config_read(const struct gguf *gguf, const char *label, struct model_spec *spec, struct err *err) {
    struct config c = {.gguf = gguf, .label = label, .err = err};
    double eps = 0;
    const struct gguf_architecture *row = architecture_find(&c, spec);
    if (!row) return c.rc;
    c.architecture = row->name;
    spec->rope_kind = row->rope_kind;
    spec->qk_norm = row->qk_norm;
    spec->activation = ACTIVATION_SILU;
    spec->rope_base = 10000;
    spec->rope_attn_factor = 1;
    refuse_split(&c);
    read_i32(&c, "block_count", true, MODEL_LAYERS_MAX, &spec->layers);
    read_i32(&c, "context_length", true, INT32_MAX, &spec->context);
    read_i32(&c, "embedding_length", true, INT32_MAX, &spec->hidden);
    read_i32(&c, "feed_forward_length", true, INT32_MAX, &spec->ffn);
    read_f64(&c, "attention.layer_norm_rms_epsilon", true, &eps);
    spec->norm_eps = (float)eps;
    read_f64(&c, "rope.freq_base", false, &spec->rope_base);
    read_i32(&c, "attention.sliding_window", false, INT32_MAX, &spec->window);
    read_heads(&c, spec);
    read_rope_scaling(&c, spec);
    read_scales(&c, spec);
    read_from_tensors(&c, spec);
    refuse_unknown(&c);
    for (int32_t i = 0; c.rc == 0 && i < spec->layers; i++) {
        spec->windowed[i] = spec->window > 0;
        spec->no_rope[i] = row->no_rope_step > 0 && (i + 1) % row->no_rope_step == 0;
    }
    return c.rc;
}
