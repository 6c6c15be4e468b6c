/* Whole decode steps in one op, where the device has that: what it needs to know of the model. */
#include "engine/base/mem.h"
#include "engine/model/model_private.h"

static void options_fill(const struct model_spec *spec, const struct model_limits *limits,
                         struct decode_stack_layer *layers, struct decode_stack_options *out) {
    for (int32_t i = 0; i < spec->layers; i++) {
        layers[i].rope = spec->no_rope[i] ? ROPE_NONE : spec->rope_kind;
        layers[i].window = spec->windowed[i] ? spec->window : 0;
        layers[i].kv = (struct kv_layer){.dtype = limits->kv_dtype,
                                         .page_size = limits->page_size,
                                         .n_kv_heads = spec->n_kv_heads,
                                         .head_dim = spec->head_dim};
    }
    *out = (struct decode_stack_options){
        .layers = layers,
        .layer_count = spec->layers,
        .hidden = spec->hidden,
        .ffn = spec->ffn,
        .n_heads = spec->n_heads,
        .n_kv_heads = spec->n_kv_heads,
        .head_dim = spec->head_dim,
        .rotary_dim = spec->rotary_dim,
        .vocab = spec->vocab,
        .rows_max = limits->max_num_seqs,
        .kv_len_max = limits->max_model_len,
        .norm_eps = spec->norm_eps,
        .norm_weight_offset = spec->norm_weight_offset,
        .attn_scale = spec->attn_scale,
        .attn_soft_cap = spec->attn_soft_cap,
        .logit_scale = spec->logit_scale,
        .logit_soft_cap = spec->logit_soft_cap,
        .residual_scale = spec->residual_scale,
        .activation = spec->activation,
    };
}

size_t stack_bytes(const struct model_spec *spec, const struct backend *backend, const struct model_limits *limits,
                   enum dtype weight_dtype) {
    if (weight_dtype == DTYPE_COUNT || limits->ranks > 1) return 0;
    struct decode_stack_layer *layers = mem_zalloc((size_t)spec->layers, sizeof *layers);
    struct decode_stack_options options;
    int32_t rows_served;
    options_fill(spec, limits, layers, &options);
    size_t bytes = decode_stack_bytes(backend, &options, weight_dtype, &rows_served);
    mem_free(layers);
    return rows_served > 0 ? bytes : 0;
}

static void layer_fill(const struct model *model, int32_t i, struct decode_stack_layer *out) {
    const struct layer_weights *w = &model->layers[i];
    *out = (struct decode_stack_layer){.qkv = w->qkv,
                                       .o = w->o,
                                       .gate_up = w->gate_up,
                                       .down = w->down,
                                       .attn_norm = w->attn_norm,
                                       .ffn_norm = w->ffn_norm,
                                       .q_norm = w->q_norm,
                                       .k_norm = w->k_norm,
                                       .qkv_bias = w->qkv_bias,
                                       .o_bias = w->o_bias,
                                       .gate_up_bias = w->gate_up_bias,
                                       .down_bias = w->down_bias,
                                       .kv = model_kv_layer(model, i),
                                       .rope = out->rope,
                                       .window = out->window};
}

int stack_open(struct model *model, struct err *err) {
    const struct model_spec *spec = &model->spec;
    struct decode_stack_layer *layers = mem_zalloc((size_t)spec->layers, sizeof *layers);
    struct decode_stack_options options;
    options_fill(spec, &model->limits, layers, &options);
    for (int32_t i = 0; i < spec->layers; i++) layer_fill(model, i, &layers[i]);
    options.output_norm = model->output_norm;
    options.output = model->output;
    options.cos_sin = model_at(model, model->at.rope);
    options.table = model_kv_table(model);
    int rc = decode_stack_open(model->backend, &options, &model->stack, err);
    mem_free(layers);
    return rc;
}
