/* The forward pass: one pass for every decoder that struct model_spec can say. Everything that a row computes depends
 * on that row alone, so a batch may be cut anywhere without changing a bit. */
#include "engine/base/check.h"
#include "engine/base/clock.h"
#include "engine/model/model_private.h"

/* One step's pass; `rc` keeps the first error and every stage after it is skipped. */
struct pass {
    struct model *model;
    const struct batch *batch;
    struct err *err;
    struct attention_shape shape;
    const struct attention_plan *plan, *window_plan;
    unsigned char *x; /* [tokens, hidden] act; in the tail of the last layer the rows that are sampled */
    void *delta;      /* [tokens, hidden] act: a branch that the next norm adds to x, or NULL */
    int64_t tokens;
    int rc;
};

static void run_norm(struct pass *p, void *x, const float *weight, void *out, int64_t rows, int64_t dim, int64_t stride,
                     const void *delta) {
    const struct model_spec *spec = &p->model->spec;
    if (p->rc) return;
    const struct op_rms_norm_args args = {.x = x,
                                          .delta = delta,
                                          .weight = weight,
                                          .out = out,
                                          .rows = rows,
                                          .dim = dim,
                                          .x_stride = stride,
                                          .delta_stride = stride,
                                          .out_stride = stride,
                                          .eps = spec->norm_eps,
                                          .weight_offset = spec->norm_weight_offset};
    p->rc = op_rms_norm(p->model->backend, &args, p->err);
}

/* The norm of the residual stream, with the branch that waits to be added to it. */
static void norm_stream(struct pass *p, const float *weight, void *out) {
    int64_t hidden = p->model->spec.hidden;
    run_norm(p, p->x, weight, out, p->tokens, hidden, hidden, p->delta);
    p->delta = NULL;
}

static void run_linear(struct pass *p, const void *x, const struct weight *w, const float *bias, void *y, int64_t rows,
                       bool accumulate, bool out_f32) {
    if (p->rc) return;
    const struct op_linear_args args = {.x = x,
                                        .w = w,
                                        .bias = bias,
                                        .y = y,
                                        .rows = rows,
                                        .x_stride = weight_cols(w),
                                        .y_stride = weight_rows(w),
                                        .accumulate = accumulate,
                                        .out_f32 = out_f32};
    p->rc = op_linear(p->model->backend, &args, p->err);
}

static void run_scale(struct pass *p, void *x, int64_t count, float scale, float cap, bool f32) {
    if (p->rc || (scale == 1 && cap == 0)) return;
    const struct op_scale_args args = {.x = x, .count = count, .scale = scale, .cap = cap, .f32 = f32};
    p->rc = op_scale(p->model->backend, &args, p->err);
}

static void run_gather(struct pass *p, const void *x, void *out, int64_t dim) {
    if (p->rc) return;
    const struct op_gather_rows_args args = {x, p->batch->logit_rows, out, p->batch->rows, dim};
    p->rc = op_gather_rows(p->model->backend, &args, p->err);
}

/* Adds residual_scale * (in W^T + bias) to x. With one rank and no multiplier the product is added as it is made; else
 * it is made apart, summed over the ranks, scaled, and added by the norm that follows every branch. */
static void add_branch(struct pass *p, const void *in, const struct weight *w, const float *bias) {
    struct model *model = p->model;
    int64_t count = p->tokens * model->spec.hidden;
    if (!spec_branches_apart(&model->spec, comm_ranks(model->comm))) {
        run_linear(p, in, w, bias, p->x, p->tokens, true, false);
        return;
    }
    p->delta = model_at(model, model->at.delta);
    run_linear(p, in, w, comm_rank(model->comm) == 0 ? bias : NULL, p->delta, p->tokens, false, false);
    if (p->rc == 0) p->rc = comm_all_reduce(model->comm, model->backend, p->delta, count, p->err);
    run_scale(p, p->delta, count, model->spec.residual_scale, 0, false);
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

/* Normalises the q or the k heads inside the qkv rows. A call takes rows of one stride: head by head over all tokens,
 * or token by token over all heads, whichever is fewer calls. */
static void norm_heads(struct pass *p, unsigned char *first, const float *weight, int32_t heads) {
    const struct model_spec *spec = &p->model->spec;
    int64_t width = spec_qkv_rows(spec), dim = spec->head_dim;
    size_t act = p->model->act_bytes;
    if (p->tokens < heads)
        for (int64_t t = 0; t < p->tokens; t++) {
            void *x = first + (size_t)(t * width) * act;
            run_norm(p, x, weight, x, heads, dim, dim, NULL);
        }
    else
        for (int64_t h = 0; h < heads; h++) {
            void *x = first + (size_t)(h * dim) * act;
            run_norm(p, x, weight, x, p->tokens, dim, width, NULL);
        }
}

static void run_rope(struct pass *p, void *q, void *k) {
    const struct model_spec *spec = &p->model->spec;
    if (p->rc) return;
    const struct op_rope_args args = {.q = q,
                                      .k = k,
                                      .positions = p->batch->positions,
                                      .cos_sin = model_at(p->model, p->model->at.rope),
                                      .tokens = p->tokens,
                                      .n_heads = spec->n_heads,
                                      .n_kv_heads = spec->n_kv_heads,
                                      .head_dim = spec->head_dim,
                                      .rotary_dim = spec->rotary_dim,
                                      .q_stride = spec_qkv_rows(spec),
                                      .k_stride = spec_qkv_rows(spec),
                                      .kind = spec->rope_kind};
    p->rc = op_rope(p->model->backend, &args, p->err);
}

static struct kv_table table_of(const struct model *model) {
    return (struct kv_table){model_at(model, model->at.pages), model->max_pages};
}

static void run_kv_write(struct pass *p, int32_t layer, const void *k, const void *v) {
    if (p->rc) return;
    const struct op_kv_write_args args = {.k = k,
                                          .v = v,
                                          .kv_stride = spec_qkv_rows(&p->model->spec),
                                          .positions = p->batch->positions,
                                          .shape = p->shape,
                                          .kv = model_kv_layer(p->model, layer),
                                          .table = table_of(p->model)};
    p->rc = op_kv_write(p->model->backend, &args, p->err);
}

static void run_attention(struct pass *p, int32_t layer, const void *q) {
    const struct model *model = p->model;
    const struct model_spec *spec = &model->spec;
    bool windowed = spec->windowed[layer];
    if (p->rc) return;
    const struct op_attention_args args = {.q = q,
                                           .out = model_at(model, model->at.attn),
                                           .q_stride = spec_qkv_rows(spec),
                                           .out_stride = (int64_t)spec->n_heads * spec->head_dim,
                                           .n_heads = spec->n_heads,
                                           .shape = p->shape,
                                           .kv = model_kv_layer(model, layer),
                                           .table = table_of(model),
                                           .plan = windowed ? p->window_plan : p->plan,
                                           .workspace = model_at(model, model->at.attention),
                                           .workspace_bytes = model->at.attention_bytes,
                                           .scale = spec->attn_scale,
                                           .soft_cap = spec->attn_soft_cap,
                                           .window = windowed ? spec->window : 0};
    p->rc = op_attention(model->backend, &args, p->err);
}

/* Up to the heads' output in `attn`. The last layer of a step that samples nothing ends with its K and V. */
static void attention_half(struct pass *p, int32_t layer) {
    struct model *model = p->model;
    const struct model_spec *spec = &model->spec;
    const struct layer_weights *w = &model->layers[layer];
    unsigned char *q = model_at(model, model->at.qkv);
    unsigned char *k = q + (size_t)spec->n_heads * (size_t)spec->head_dim * model->act_bytes;
    unsigned char *v = k + (size_t)spec->n_kv_heads * (size_t)spec->head_dim * model->act_bytes;
    void *h = model_at(model, model->at.h);
    norm_stream(p, w->attn_norm, h);
    run_linear(p, h, w->qkv, w->qkv_bias, q, p->tokens, false, false);
    if (spec->qk_norm) {
        norm_heads(p, q, w->q_norm, spec->n_heads);
        norm_heads(p, k, w->k_norm, spec->n_kv_heads);
    }
    if (spec->rope_kind != ROPE_NONE && !spec->no_rope[layer]) run_rope(p, q, k);
    run_kv_write(p, layer, k, v);
    if (layer < spec->layers - 1 || p->batch->rows > 0) run_attention(p, layer, q);
}

/* ---- feed-forward ------------------------------------------------------------------------------------------------ */

static void feed_forward_half(struct pass *p, int32_t layer) {
    struct model *model = p->model;
    const struct model_spec *spec = &model->spec;
    const struct layer_weights *w = &model->layers[layer];
    void *h = model_at(model, model->at.h), *gate_up = model_at(model, model->at.gate_up);
    void *act = model_at(model, model->at.act);
    norm_stream(p, w->ffn_norm, h);
    run_linear(p, h, w->gate_up, w->gate_up_bias, gate_up, p->tokens, false, false);
    if (p->rc) return;
    const struct op_gated_act_args args = {gate_up, act, p->tokens, spec->ffn, spec->activation};
    p->rc = op_gated_act(model->backend, &args, p->err);
    add_branch(p, act, w->down, w->down_bias);
}

/* ---- the pass ---------------------------------------------------------------------------------------------------- */

static void embed(struct pass *p) {
    struct model *model = p->model;
    const struct batch *batch = p->batch;
    const struct op_embed_args args = {.table = model->embed,
                                       .token_ids = batch->token_ids,
                                       .token_slots = batch->token_slots,
                                       .last_token = sample_state_last_token(model->backend, model->sample_state),
                                       .tokens = batch->tokens,
                                       .hidden = model->spec.hidden,
                                       .scale = model->spec.embed_scale,
                                       .out = p->x};
    p->rc = op_embed(model->backend, &args, p->err);
}

/* Behind the last attention only the sampled rows are wanted: they move together, the rest is dropped. */
static void keep_sampled_rows(struct pass *p) {
    struct model *model = p->model;
    const struct model_spec *spec = &model->spec;
    void *rows_x = model_at(model, model->at.rows_x);
    run_gather(p, p->x, rows_x, spec->hidden);
    run_gather(p, model_at(model, model->at.attn), model_at(model, model->at.rows_attn),
               (int64_t)spec->n_heads * spec->head_dim);
    p->x = rows_x;
    p->tokens = p->batch->rows;
}

static void run_layer(struct pass *p, int32_t layer) {
    struct model *model = p->model;
    const struct layer_weights *w = &model->layers[layer];
    void *attn = model_at(model, model->at.attn);
    attention_half(p, layer);
    if (layer == model->spec.layers - 1) {
        if (p->batch->rows == 0) return;
        keep_sampled_rows(p);
        attn = model_at(model, model->at.rows_attn);
    }
    add_branch(p, attn, w->o, w->o_bias);
    feed_forward_half(p, layer);
}

static void logits(struct pass *p) {
    struct model *model = p->model;
    const struct model_spec *spec = &model->spec;
    void *out = model_at(model, model->at.logits);
    int64_t rows = p->batch->rows;
    if (rows == 0) return;
    norm_stream(p, model->output_norm, p->x);
    run_linear(p, p->x, model->output, NULL, out, rows, false, true);
    run_scale(p, out, rows * spec->vocab, spec->logit_scale, spec->logit_soft_cap, true);
}

static void plans_build(struct pass *p, struct arena *arena) {
    const struct model *model = p->model;
    const struct model_spec *spec = &model->spec;
    bool full = false, windowed = false;
    for (int32_t i = 0; i < spec->layers; i++) *(spec->windowed[i] ? &windowed : &full) = true;
    struct attention_plan_options options = {.shape = p->shape,
                                             .n_heads = spec->n_heads,
                                             .n_kv_heads = spec->n_kv_heads,
                                             .head_dim = spec->head_dim,
                                             .page_size = model->limits.page_size};
    if (full) p->plan = attention_plan_make(model->backend, &options, arena);
    options.window = spec->window;
    if (windowed) p->window_plan = attention_plan_make(model->backend, &options, arena);
}

int model_forward(struct model *model, const struct batch *batch, struct arena *arena, struct err *err) {
    struct pass p = {.model = model,
                     .batch = batch,
                     .err = err,
                     .x = model_at(model, model->at.x),
                     .tokens = batch->tokens,
                     .shape = {batch->q_start, batch->kv_len, batch->slots, batch->seqs, batch->tokens}};
    plans_build(&p, arena);
    embed(&p);
    for (int32_t layer = 0; p.rc == 0 && layer < model->spec.layers; layer++) {
        run_layer(&p, layer);
        if (model->alive_ns) atomic_store(model->alive_ns, clock_now_ns());
    }
    logits(&p);
    return p.rc;
}
