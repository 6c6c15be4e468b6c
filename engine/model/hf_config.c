/* Hugging Face config.json to struct model_spec. An architecture is a row of class defaults; the fields are read once.
 */
#include <cjson/cJSON.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/json.h"
#include "engine/model/model_files.h"

enum { WINDOW_NEVER, WINDOW_ALWAYS, WINDOW_IF_USED };

static const struct hf_architecture {
    const char *name;
    bool qkv_bias;       /* biases on q, k and v that no field announces */
    bool attention_bias; /* reads attention_bias, for q, k, v and o */
    bool mlp_bias;       /* reads mlp_bias */
    bool qk_norm;
    bool tied;  /* the class's default of tie_word_embeddings */
    int window; /* what sliding_window means */
    int32_t no_rope_step;
    bool scales; /* Granite's multipliers */
} architectures[] = {
    {"LlamaForCausalLM", false, true, true, false, false, WINDOW_NEVER, 0, false},
    {"MistralForCausalLM", false, false, false, false, false, WINDOW_ALWAYS, 0, false},
    {"Qwen2ForCausalLM", true, false, false, false, false, WINDOW_IF_USED, 0, false},
    {"Qwen3ForCausalLM", false, true, false, true, false, WINDOW_IF_USED, 0, false},
    {"SmolLM3ForCausalLM", false, true, true, false, true, WINDOW_IF_USED, 4, false},
    {"GraniteForCausalLM", false, true, true, false, false, WINDOW_NEVER, 0, true},
};

/* Reads with the first error kept; an absent or null member leaves *out alone. */
struct config {
    const struct cJSON *root;
    struct err *err;
    int rc;
};

static void read_i32(struct config *c, const struct cJSON *object, const char *key, int32_t *out) {
    int64_t value = *out;
    if (c->rc == 0) c->rc = json_read_i64(object, key, 0, INT32_MAX, &value, c->err);
    *out = (int32_t)value;
}

static void read_f64(struct config *c, const struct cJSON *object, const char *key, double *out) {
    if (c->rc == 0) c->rc = json_read_f64(object, key, -1e30, 1e30, out, c->err);
}

static void read_f32(struct config *c, const char *key, float *out) {
    double value = (double)*out;
    read_f64(c, c->root, key, &value);
    *out = (float)value;
}

static void read_bool(struct config *c, const char *key, bool *out) {
    if (c->rc == 0) c->rc = json_read_bool(c->root, key, out, c->err);
}

static void require(struct config *c, const char *key) {
    if (c->rc == 0 && !json_get_set(c->root, key))
        c->rc = err_set_field(c->err, ERR_INVALID, key, "%s is missing", key);
}

static void unsupported(struct config *c, const char *key, const char *what) {
    if (c->rc == 0) c->rc = err_set_field(c->err, ERR_UNSUPPORTED, key, "%s: %s", key, what);
}

/* A client's or file's word for a sentence: printable and short. */
static const char *shown(const char *text, char out[48]) {
    size_t i;
    for (i = 0; text[i] && i < 47; i++) out[i] = (unsigned char)text[i] < 0x20 || text[i] == 0x7f ? '?' : text[i];
    out[i] = '\0';
    return out;
}

/* Fields that change the arithmetic in ways the forward pass does not know. */
static void refuse_unknown(struct config *c, const struct hf_architecture *row) {
    static const char *const counts[] = {"num_local_experts",
                                         "num_experts",
                                         "n_routed_experts",
                                         "moe_intermediate_size",
                                         "num_experts_per_tok",
                                         "kv_lora_rank",
                                         "num_kv_shared_layers",
                                         "attn_logit_softcapping",
                                         "final_logit_softcapping",
                                         "query_pre_attn_scalar",
                                         "attention_chunk_size",
                                         "clip_qkv",
                                         "logit_scale"};
    static const char *const scales[] = {"embedding_multiplier", "residual_multiplier", "attention_multiplier",
                                         "logits_scaling"};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        const struct cJSON *item = json_get_set(c->root, counts[i]);
        if (item && !(cJSON_IsNumber(item) && item->valuedouble == 0) && !cJSON_IsFalse(item))
            unsupported(c, counts[i], "is set, which this version does not support for this architecture");
    }
    for (size_t i = 0; i < sizeof scales / sizeof *scales && !row->scales; i++) {
        const struct cJSON *item = json_get_set(c->root, scales[i]);
        if (item && !(cJSON_IsNumber(item) && item->valuedouble == 1))
            unsupported(c, scales[i], "is set, which this architecture does not have");
    }
    if (json_get_set(c->root, "quantization_config"))
        unsupported(c, "quantization_config",
                    "quantised safetensors are not supported; use GGUF or unquantised weights");
}

/* ---- rope -------------------------------------------------------------------------------------------------------- */

/* Attention factor of yarn: given, or 0.1 ln(factor) + 1, or DeepSeek's ratio of two such terms. */
static double yarn_attention(struct config *c, const struct cJSON *rope, double factor) {
    double given = 0, mscale = 0, mscale_all = 0;
    read_f64(c, rope, "attention_factor", &given);
    read_f64(c, rope, "mscale", &mscale);
    read_f64(c, rope, "mscale_all_dim", &mscale_all);
    double step = factor > 1 ? 0.1 * log(factor) : 0;
    if (given != 0) return given;
    if (mscale != 0 && mscale_all != 0) return (step * mscale + 1) / (step * mscale_all + 1);
    return step + 1;
}

static void read_yarn(struct config *c, const struct cJSON *rope, struct model_spec *spec) {
    const struct cJSON *truncate = json_get_set(rope, "truncate");
    if (truncate && cJSON_IsFalse(truncate)) unsupported(c, "truncate", "yarn without truncation is not supported");
    spec->rope_scaling = ROPE_SCALING_YARN;
    spec->rope_beta_fast = 32;
    spec->rope_beta_slow = 1;
    spec->rope_original_context = spec->context;
    read_i32(c, rope, "original_max_position_embeddings", &spec->rope_original_context);
    read_f64(c, rope, "beta_fast", &spec->rope_beta_fast);
    read_f64(c, rope, "beta_slow", &spec->rope_beta_slow);
    if (!json_get_set(rope, "factor") && spec->rope_original_context > 0)
        spec->rope_factor = (double)spec->context / (double)spec->rope_original_context;
    spec->rope_attn_factor = yarn_attention(c, rope, spec->rope_factor);
    double reach = (double)spec->rope_original_context * spec->rope_factor;
    if (reach > (double)spec->context && reach < (double)(1 << 27)) spec->context = (int32_t)reach;
}

static void read_rope_type(struct config *c, const struct cJSON *rope, const char *type, struct model_spec *spec) {
    char word[48], what[128];
    read_f64(c, rope, "factor", &spec->rope_factor);
    if (strcmp(type, "default") == 0) return;
    if (strcmp(type, "linear") == 0) {
        spec->rope_scaling = ROPE_SCALING_LINEAR;
    } else if (strcmp(type, "llama3") == 0) {
        spec->rope_scaling = ROPE_SCALING_LLAMA3;
        read_f64(c, rope, "low_freq_factor", &spec->rope_low_freq_factor);
        read_f64(c, rope, "high_freq_factor", &spec->rope_high_freq_factor);
        read_i32(c, rope, "original_max_position_embeddings", &spec->rope_original_context);
    } else if (strcmp(type, "yarn") == 0) {
        read_yarn(c, rope, spec);
    } else {
        snprintf(what, sizeof what, "\"%s\" is not supported (default, linear, llama3 and yarn are)",
                 shown(type, word));
        unsupported(c, "rope_type", what);
    }
}

/* rope_parameters (transformers 5) or rope_theta with rope_scaling (before). */
static void read_rope(struct config *c, struct model_spec *spec) {
    const struct cJSON *rope = json_get_set(c->root, "rope_parameters");
    const char *type = NULL;
    double partial = 1;
    spec->rope_kind = ROPE_HALVES;
    spec->rope_base = 10000;
    spec->rope_factor = spec->rope_attn_factor = 1;
    read_f64(c, c->root, "rope_theta", &spec->rope_base);
    read_f64(c, c->root, "partial_rotary_factor", &partial);
    if (!rope) rope = json_get_set(c->root, "rope_scaling");
    if (rope && !cJSON_IsObject(rope)) {
        c->rc = err_set_field(c->err, ERR_INVALID, "rope_parameters", "rope parameters must be an object");
        return;
    }
    if (rope && (json_get(rope, "full_attention") || json_get(rope, "sliding_attention")))
        unsupported(c, "rope_parameters", "rope by layer type is not supported");
    if (rope) {
        read_f64(c, rope, "rope_theta", &spec->rope_base);
        read_f64(c, rope, "partial_rotary_factor", &partial);
        if (c->rc == 0) c->rc = json_read_str(rope, "rope_type", &type, c->err);
        if (c->rc == 0 && !type) c->rc = json_read_str(rope, "type", &type, c->err);
        if (c->rc == 0) read_rope_type(c, rope, type ? type : "default", spec);
    }
    if (c->rc == 0 && !(partial > 0 && partial <= 1))
        c->rc =
            err_set_field(c->err, ERR_INVALID, "partial_rotary_factor", "partial_rotary_factor must be from 0 to 1");
    if (c->rc == 0) spec->rotary_dim = (int32_t)((double)spec->head_dim * partial);
}

/* ---- windows and layers ------------------------------------------------------------------------------------------ */

static void read_windows(struct config *c, const struct hf_architecture *row, struct model_spec *spec) {
    const struct cJSON *types = json_get_set(c->root, "layer_types");
    bool used = row->window == WINDOW_ALWAYS;
    int32_t first = 0, window = 0, count = 0;
    if (row->window == WINDOW_NEVER) return;
    if (row->window == WINDOW_IF_USED) read_bool(c, "use_sliding_window", &used);
    if (row->window == WINDOW_IF_USED) read_i32(c, c->root, "max_window_layers", &first);
    read_i32(c, c->root, "sliding_window", &window);
    if (c->rc || !used || window == 0) return;
    spec->window = window;
    for (int32_t i = 0; i < spec->layers; i++) spec->windowed[i] = i >= first;
    if (!types) return;
    if (!cJSON_IsArray(types)) {
        c->rc = err_set_field(c->err, ERR_INVALID, "layer_types", "layer_types must be an array");
        return;
    }
    for (const struct cJSON *item = types->child; item; item = item->next, count++) {
        bool sliding = cJSON_IsString(item) && strcmp(item->valuestring, "sliding_attention") == 0;
        bool full = cJSON_IsString(item) && strcmp(item->valuestring, "full_attention") == 0;
        if (!sliding && !full)
            unsupported(c, "layer_types", "holds a type other than full_attention and sliding_attention");
        if (count < spec->layers) spec->windowed[count] = sliding;
    }
    if (c->rc == 0 && count != spec->layers)
        c->rc = err_set_field(c->err, ERR_INVALID, "layer_types", "layer_types has %d entries for %d layers", count,
                              spec->layers);
}

/* no_rope_layers holds 1 where a layer has rope; or every no_rope_layer_interval-th has none. */
static void read_no_rope(struct config *c, const struct hf_architecture *row, struct model_spec *spec) {
    const struct cJSON *flags = json_get_set(c->root, "no_rope_layers");
    int32_t step = row->no_rope_step, count = 0;
    if (row->no_rope_step == 0) {
        if (flags) unsupported(c, "no_rope_layers", "is set, which this architecture does not have");
        return;
    }
    read_i32(c, c->root, "no_rope_layer_interval", &step);
    for (int32_t i = 0; i < spec->layers; i++) spec->no_rope[i] = step > 0 && (i + 1) % step == 0;
    if (!flags || c->rc) return;
    for (const struct cJSON *item = flags->child; item; item = item->next, count++)
        if (count < spec->layers) spec->no_rope[count] = !(cJSON_IsNumber(item) && item->valuedouble != 0);
    if (!cJSON_IsArray(flags) || count != spec->layers)
        c->rc =
            err_set_field(c->err, ERR_INVALID, "no_rope_layers", "no_rope_layers must have %d entries", spec->layers);
}

/* ---- the whole --------------------------------------------------------------------------------------------------- */

static void read_activation(struct config *c, struct model_spec *spec) {
    const char *name = "silu";
    char word[48], what[128];
    if (c->rc == 0) c->rc = json_read_str(c->root, "hidden_act", &name, c->err);
    if (c->rc) return;
    if (strcmp(name, "silu") == 0 || strcmp(name, "swish") == 0) {
        spec->activation = ACTIVATION_SILU;
    } else if (strcmp(name, "gelu_pytorch_tanh") == 0) {
        spec->activation = ACTIVATION_GELU_TANH;
    } else {
        snprintf(what, sizeof what, "\"%s\" is not supported (silu and gelu_pytorch_tanh are)", shown(name, word));
        unsupported(c, "hidden_act", what);
    }
}

static void read_shape(struct config *c, struct model_spec *spec) {
    static const char *const required[] = {"num_hidden_layers", "hidden_size", "intermediate_size",
                                           "num_attention_heads", "vocab_size"};
    double eps = 1e-6;
    for (size_t i = 0; i < sizeof required / sizeof *required; i++) require(c, required[i]);
    spec->context = 2048; /* transformers' default where the field is missing */
    read_i32(c, c->root, "num_hidden_layers", &spec->layers);
    read_i32(c, c->root, "hidden_size", &spec->hidden);
    read_i32(c, c->root, "intermediate_size", &spec->ffn);
    read_i32(c, c->root, "num_attention_heads", &spec->n_heads);
    read_i32(c, c->root, "vocab_size", &spec->vocab);
    read_i32(c, c->root, "max_position_embeddings", &spec->context);
    spec->n_kv_heads = spec->n_heads;
    read_i32(c, c->root, "num_key_value_heads", &spec->n_kv_heads);
    spec->head_dim = spec->n_heads > 0 ? spec->hidden / spec->n_heads : 0;
    read_i32(c, c->root, "head_dim", &spec->head_dim);
    read_f64(c, c->root, "rms_norm_eps", &eps);
    spec->norm_eps = (float)eps;
    if (c->rc == 0 && (spec->layers < 1 || spec->layers > MODEL_LAYERS_MAX))
        c->rc = err_set_field(c->err, ERR_INVALID, "num_hidden_layers",
                              "num_hidden_layers must be from 1 to %d, not %d", MODEL_LAYERS_MAX, spec->layers);
}

static void read_scales(struct config *c, const struct hf_architecture *row, struct model_spec *spec) {
    float divisor = 1;
    spec->embed_scale = spec->residual_scale = spec->logit_scale = 1;
    spec->attn_scale = spec->head_dim > 0 ? (float)(1 / sqrt((double)spec->head_dim)) : 0;
    if (!row->scales) return;
    read_f32(c, "embedding_multiplier", &spec->embed_scale);
    read_f32(c, "residual_multiplier", &spec->residual_scale);
    read_f32(c, "attention_multiplier", &spec->attn_scale);
    read_f32(c, "logits_scaling", &divisor);
    spec->logit_scale = 1 / divisor;
}

static void read_biases(struct config *c, const struct hf_architecture *row, struct model_spec *spec) {
    bool attention = false, mlp = false;
    read_bool(c, "attention_bias", &attention);
    read_bool(c, "mlp_bias", &mlp);
    if (attention && !row->attention_bias)
        unsupported(c, "attention_bias", "is set, which this architecture does not have");
    if (mlp && !row->mlp_bias) unsupported(c, "mlp_bias", "is set, which this architecture does not have");
    spec->qkv_bias = row->qkv_bias || attention;
    spec->output_bias = attention;
    spec->mlp_bias = mlp;
}

static const struct hf_architecture *architecture_find(struct config *c, struct model_spec *spec) {
    const struct cJSON *list = json_get_set(c->root, "architectures");
    const struct cJSON *first = cJSON_IsArray(list) ? list->child : NULL;
    char word[48];
    if (!first || !cJSON_IsString(first)) {
        c->rc = err_set_field(c->err, ERR_INVALID, "architectures", "architectures must be an array with one name");
        return NULL;
    }
    for (size_t i = 0; i < sizeof architectures / sizeof *architectures; i++)
        if (strcmp(first->valuestring, architectures[i].name) == 0) {
            snprintf(spec->architecture, sizeof spec->architecture, "%s", architectures[i].name);
            return &architectures[i];
        }
    c->rc = err_set_field(c->err, ERR_UNSUPPORTED, "architectures",
                          "architecture \"%s\" is not supported (the "
                          "ForCausalLM classes of Llama, Mistral, Qwen2, Qwen3, SmolLM3 and Granite are)",
                          shown(first->valuestring, word));
    return NULL;
}

static int config_fill(struct config *c, struct model_spec *spec) {
    if (!cJSON_IsObject(c->root)) return err_set(c->err, ERR_INVALID, "must be an object");
    const struct hf_architecture *row = architecture_find(c, spec);
    if (!row) return c->rc;
    spec->qk_norm = row->qk_norm;
    spec->tied_output = row->tied;
    read_shape(c, spec);
    read_activation(c, spec);
    read_bool(c, "tie_word_embeddings", &spec->tied_output);
    read_biases(c, row, spec);
    if (c->rc == 0) read_rope(c, spec);
    if (c->rc == 0) read_windows(c, row, spec);
    if (c->rc == 0) read_no_rope(c, row, spec);
    read_scales(c, row, spec);
    if (c->rc == 0) refuse_unknown(c, row);
    return c->rc;
}

int hf_config_read(const char *text, size_t bytes, struct model_spec *spec, struct err *err) {
    struct cJSON *root = NULL;
    int rc = json_parse(text, bytes, json_limits_file, &root, err);
    if (rc == 0) {
        struct config c = {.root = root, .err = err};
        rc = config_fill(&c, spec);
        cJSON_Delete(root);
    }
    return rc ? err_prefix(err, "config.json") : 0;
}

int hf_config_dtype(const char *text, size_t bytes, enum dtype *out, struct err *err) {
    static const struct {
        const char *name;
        enum dtype dtype;
    } names[] = {{"bfloat16", DTYPE_BF16}, {"float16", DTYPE_F16}, {"float32", DTYPE_F32}};
    struct cJSON *root = NULL;
    const char *name = "bfloat16";
    char word[48];
    int rc = json_parse(text, bytes, json_limits_file, &root, err);
    if (rc == 0) rc = json_read_str(root, "torch_dtype", &name, err);
    if (rc == 0) rc = json_read_str(root, "dtype", &name, err); /* its newer name */
    size_t i = 0;
    while (rc == 0 && i < 3 && strcmp(name, names[i].name) != 0) i++;
    if (rc == 0 && i == 3)
        rc =
            err_set_field(err, ERR_UNSUPPORTED, "torch_dtype",
                          "torch_dtype \"%s\" is not supported (bfloat16, float16 and float32 are)", shown(name, word));
    if (rc == 0) *out = names[i].dtype;
    cJSON_Delete(root);
    return rc ? err_prefix(err, "config.json") : 0;
}
