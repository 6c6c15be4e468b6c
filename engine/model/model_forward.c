/* The forward pass: one pass for every decoder that struct model_spec can say. Everything that a row computes depends
 * on that row alone, so a batch may be cut anywhere without changing a bit. */
#include "engine/base/check.h"
#include "engine/base/clock.h"
#include "engine/model/model_private.h"

/* One step's pass; `rc` keeps the first error and every stage after it is skipped. */
struct pass {
    struct model *model;
    const struct inputs *in;
    struct err *err;
    struct attention_shape shape;
    unsigned char *x; /* [tokens, hidden] act; in the tail of the last layer the rows that are sampled */
    void *delta;      /* [tokens, hidden] act: a branch that the next norm adds to x, or NULL */
    bool partial;     /* delta is this rank's part of a sum over all ranks */
    int32_t branches; /* made so far: which of two buffers is next */
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
    const struct model_spec *spec = &p->model->spec;
    if (p->rc == 0 && p->partial) {
        const struct comm_reduce_norm_args args = {.delta = p->delta,
                                                   .x = p->x,
                                                   .weight = weight,
                                                   .out = out,
                                                   .rows = p->tokens,
                                                   .dim = spec->hidden,
                                                   .eps = spec->norm_eps,
                                                   .weight_offset = spec->norm_weight_offset};
        p->rc = comm_reduce_norm(p->model->comm, &args, p->err);
    } else {
        run_norm(p, p->x, weight, out, p->tokens, spec->hidden, spec->hidden, p->delta);
    }
    p->delta = NULL;
    p->partial = false;
}

static void run_linear(struct pass *p, const void *x, const struct weight *w, const float *bias, void *y, int64_t rows,
                       bool accumulate) {
    if (p->rc) return;
    const struct op_linear_args args = {.x = x,
                                        .w = w,
                                        .bias = bias,
                                        .y = y,
                                        .rows = rows,
                                        .x_stride = weight_cols(w),
                                        .y_stride = weight_rows(w),
                                        .accumulate = accumulate};
    p->rc = op_linear(p->model->backend, &args, p->err);
}

static void run_scale(struct pass *p, void *x, int64_t count, float scale, float cap, bool f32) {
    if (p->rc || (scale == 1 && cap == 0)) return;
    const struct op_scale_args args = {.x = x, .count = count, .scale = scale, .cap = cap, .f32 = f32};
    p->rc = op_scale(p->model->backend, &args, p->err);
}

static void run_gather(struct pass *p, const void *x, void *out, int64_t dim) {
    if (p->rc) return;
    const struct op_gather_rows_args args = {x, p->in->logit_rows, out, p->in->rows, dim};
    p->rc = op_gather_rows(p->model->backend, &args, p->err);
}

/* Adds residual_scale * (in W^T + bias) to x. With one rank and no multiplier the product is added as it is made; else
 * it is made apart, and the norm that follows every branch sums it over the ranks and adds it. What is to be multiplied
 * must be whole before. */
static void add_branch(struct pass *p, const void *in, const struct weight *w, const float *bias) {
    struct model *model = p->model;
    int64_t count = p->tokens * model->spec.hidden;
    const bool ranks = model->shard.ranks > 1;
    if (!spec_branches_apart(&model->spec, model->shard.ranks)) {
        run_linear(p, in, w, bias, p->x, p->tokens, true);
        return;
    }
    p->delta = model_at(model, model->at.delta[ranks ? p->branches++ & 1 : 0]);
    run_linear(p, in, w, model->shard.rank == 0 ? bias : NULL, p->delta, p->tokens, false);
    p->partial = ranks && model->spec.residual_scale == 1;
    if (p->rc == 0 && ranks && !p->partial) {
        const struct comm_all_reduce_args args = {p->delta, p->delta, count};
        p->rc = comm_all_reduce(model->comm, &args, p->err);
    }
    run_scale(p, p->delta, count, model->spec.residual_scale, 0, false);
}

/* ---- attention --------------------------------------------------------------------------------------------------- */

/* Between the qkv product and attention: norms of the heads, rope, and K and V into their pages. */
static void finish_qkv(struct pass *p, int32_t layer, void *qkv) {
    const struct model *model = p->model;
    const struct model_spec *spec = &model->spec;
    const struct layer_weights *w = &model->layers[layer];
    if (p->rc) return;
    const struct op_qkv_finish_args args = {.qkv = qkv,
                                            .q_norm = spec->qk_norm ? w->q_norm : NULL,
                                            .k_norm = spec->qk_norm ? w->k_norm : NULL,
                                            .norm_eps = spec->norm_eps,
                                            .norm_weight_offset = spec->norm_weight_offset,
                                            .cos_sin = model_at(model, model->at.rope),
                                            .rope = spec->no_rope[layer] ? ROPE_NONE : spec->rope_kind,
                                            .n_heads = spec->n_heads,
                                            .rotary_dim = spec->rotary_dim,
                                            .qkv_stride = spec_qkv_rows(spec),
                                            .positions = p->in->positions,
                                            .shape = p->shape,
                                            .kv = model_kv_layer(model, layer),
                                            .table = model_kv_table(model)};
    p->rc = op_qkv_finish(model->backend, &args, p->err);
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
                                           .table = model_kv_table(model),
                                           .plan = windowed ? p->in->window_plan : p->in->plan,
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
    void *h = model_at(model, model->at.h), *qkv = model_at(model, model->at.qkv);
    norm_stream(p, w->attn_norm, h);
    run_linear(p, h, w->qkv, w->qkv_bias, qkv, p->tokens, false);
    finish_qkv(p, layer, qkv);
    if (layer < spec->layers - 1 || p->in->rows > 0) run_attention(p, layer, qkv);
}

/* ---- feed-forward ------------------------------------------------------------------------------------------------ */

static void feed_forward_half(struct pass *p, int32_t layer) {
    struct model *model = p->model;
    const struct model_spec *spec = &model->spec;
    const struct layer_weights *w = &model->layers[layer];
    void *h = model_at(model, model->at.h), *gate_up = model_at(model, model->at.gate_up);
    void *act = model_at(model, model->at.act);
    norm_stream(p, w->ffn_norm, h);
    if (p->rc) return;
    const struct op_linear_gated_args args = {.x = h,
                                              .w = w->gate_up,
                                              .bias = w->gate_up_bias,
                                              .gate_up = gate_up,
                                              .out = act,
                                              .rows = p->tokens,
                                              .x_stride = spec->hidden,
                                              .activation = spec->activation};
    p->rc = op_linear_gated(model->backend, &args, p->err);
    add_branch(p, act, w->down, w->down_bias);
}

/* ---- the pass ---------------------------------------------------------------------------------------------------- */

static void embed(struct pass *p) {
    struct model *model = p->model;
    const struct inputs *in = p->in;
    const bool ranks = model->shard.ranks > 1;
    /* Of a model of one layer a step that samples nothing has no other sum between two embeddings: in place. */
    void *part = model->spec.layers > 1 ? model_at(model, model->at.delta[2]) : p->x;
    const struct op_embed_args args = {.table = model->embed,
                                       .token_ids = in->token_ids,
                                       .token_slots = in->token_slots,
                                       .last_token = sample_state_last_token(model->backend, model->sample_state),
                                       .tokens = in->tokens,
                                       .hidden = model->spec.hidden,
                                       .first_id = model->shard.rank * model->vocab_slice,
                                       .vocab = model->spec.vocab,
                                       .scale = model->spec.embed_scale,
                                       .out = ranks ? part : p->x};
    p->rc = op_embed(model->backend, &args, p->err);
    if (p->rc || !ranks) return;
    const struct comm_all_reduce_args sum = {part, p->x, (int64_t)in->tokens * model->spec.hidden};
    p->rc = comm_all_reduce(model->comm, &sum, p->err);
}

/* Behind the last attention only the sampled rows are wanted: they move together, the rest is dropped. Returns where
 * the heads' outputs of those rows are. */
static void *keep_sampled_rows(struct pass *p) {
    struct model *model = p->model;
    const struct model_spec *spec = &model->spec;
    void *attn = model_at(model, model->at.attn), *rows_attn = model_at(model, model->at.rows_attn);
    void *rows_x = model_at(model, model->at.rows_x);
    if (!p->in->logit_rows) return attn; /* all of them, in their order */
    run_gather(p, p->x, rows_x, spec->hidden);
    run_gather(p, attn, rows_attn, (int64_t)spec->n_heads * spec->head_dim);
    p->x = rows_x;
    p->tokens = p->in->rows;
    return rows_attn;
}

static void run_layer(struct pass *p, int32_t layer) {
    struct model *model = p->model;
    const struct layer_weights *w = &model->layers[layer];
    void *attn = model_at(model, model->at.attn);
    attention_half(p, layer);
    if (layer == model->spec.layers - 1) {
        if (p->in->rows == 0) return;
        attn = keep_sampled_rows(p);
    }
    add_branch(p, attn, w->o, w->o_bias);
    feed_forward_half(p, layer);
}

static void logits(struct pass *p) {
    struct model *model = p->model;
    const struct model_spec *spec = &model->spec;
    float *out = model_at(model, model->at.logits);
    void *x = model->shard.ranks > 1 ? model_at(model, model->at.h) : p->x;
    int64_t rows = p->in->rows;
    if (rows == 0) return;
    norm_stream(p, model->output_norm, x);
    if (p->rc) return;
    const struct op_linear_args args = {.x = x,
                                        .w = model->output,
                                        .y = out + (int64_t)model->shard.rank * model->vocab_slice,
                                        .rows = rows,
                                        .x_stride = spec->hidden,
                                        .y_stride = model->logits_stride,
                                        .out_f32 = true};
    p->rc = op_linear(model->backend, &args, p->err);
    if (p->rc == 0 && model->shard.ranks > 1) {
        const struct comm_gather_args gather = {out, rows, model->vocab_slice};
        p->rc = comm_all_gather(model->comm, &gather, p->err);
    }
    run_scale(p, out, rows * model->logits_stride, spec->logit_scale, spec->logit_soft_cap, true);
}

/* On a device that has computed when an op returns, a step of a minute must not look like a dead thread. */
static void layers(struct pass *p) {
    struct model *model = p->model;
    bool note = model->alive_ns && !backend_info(model->backend)->asynchronous;
    for (int32_t layer = 0; p->rc == 0 && layer < model->spec.layers; layer++) {
        run_layer(p, layer);
        if (note) atomic_store(model->alive_ns, clock_now_ns());
    }
    logits(p);
}

/* Embedding and sampling stay apart: the rows in between go through all layers in one op. */
static void stack(struct pass *p) {
    struct model *model = p->model;
    if (p->rc) return;
    const struct op_decode_stack_args args = {.stack = model->stack,
                                              .x = p->x,
                                              .logits = model_at(model, model->at.logits),
                                              .positions = p->in->positions,
                                              .shape = p->shape,
                                              .plan = p->in->plan,
                                              .attention_workspace = model_at(model, model->at.attention),
                                              .attention_workspace_bytes = model->at.attention_bytes,
                                              .rows = p->in->rows};
    p->rc = op_decode_stack(model->backend, &args, p->err);
}

static void sample(struct pass *p) {
    struct model *model = p->model;
    if (p->rc || p->in->rows == 0) return;
    const struct op_sample_args args = {.state = model->sample_state,
                                        .logits = model_at(model, model->at.logits),
                                        .logits_stride = model->logits_stride,
                                        .vocab = model->sample_vocab,
                                        .batch = p->in->sampling,
                                        .workspace = model_at(model, model->at.sample),
                                        .workspace_bytes = model->at.sample_bytes};
    p->rc = op_sample(model->backend, &args, p->err);
}

int model_forward(struct model *model, const struct inputs *in, struct err *err) {
    struct pass p = {.model = model,
                     .in = in,
                     .err = err,
                     .x = model_at(model, model->at.x),
                     .tokens = in->tokens,
                     .shape = {in->q_start, in->kv_len, in->slots, in->seqs, in->tokens}};
    embed(&p);
    if (in->decode && model_stack_serves(model, in->rows))
        stack(&p);
    else
        layers(&p);
    sample(&p);
    return p.rc;
}
