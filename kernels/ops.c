/* The ops of ops.h but sampling: each checks its contract, measures itself when profiling is on, and dispatches. */
#include "kernels/ops.h"

#include "kernels/attention_plan.h"
#include "kernels/ops_private.h"

int contract_broken(struct err *err, const char *op, const char *condition) {
    return err_set(err, ERR_INVALID, "%s: broken contract: %s", op, condition);
}

const char *op_kind_name(enum op_kind kind) {
    static const char *const names[OP_KIND_COUNT] = {
        [OP_EMBED] = "embed",
        [OP_RMS_NORM] = "rms_norm",
        [OP_LINEAR] = "linear",
        [OP_LINEAR_GATED] = "linear_gated",
        [OP_GATED_ACT] = "gated_act",
        [OP_ROPE] = "rope",
        [OP_KV_WRITE] = "kv_write",
        [OP_QKV_FINISH] = "qkv_finish",
        [OP_TABLE_UPDATE] = "table_update",
        [OP_DECODE_STACK] = "decode_stack",
        [OP_ATTENTION] = "attention",
        [OP_KV_COPY] = "kv_copy",
        [OP_SAMPLE] = "sample",
        [OP_SCALE] = "scale",
        [OP_GATHER_ROWS] = "gather_rows",
    };
    return (unsigned)kind < OP_KIND_COUNT ? names[kind] : "unknown";
}

int op_embed(struct backend *backend, const struct op_embed_args *args, struct err *err) {
    CONTRACT(args->table && (args->table->flags & WEIGHT_LOOKUP));
    CONTRACT(args->tokens >= 0 && args->hidden == args->table->cols);
    CONTRACT(args->tokens == 0 || args->token_ids);
    CONTRACT(aligned_act(backend, args->out));
    int64_t begin = launch_begin(backend), values = args->tokens * args->hidden;
    int rc = backend->table->embed(backend, args, err);
    int64_t row_bytes = (int64_t)args->table->bytes / args->table->rows;
    launch_end(backend, OP_EMBED, begin, args->tokens * row_bytes + act_bytes(backend) * values, values);
    return rc;
}

int op_rms_norm(struct backend *backend, const struct op_rms_norm_args *args, struct err *err) {
    const int64_t rows = args->rows, dim = args->dim, x_span = span(rows, dim, args->x_stride);
    CONTRACT(rows >= 0 && dim > 0);
    CONTRACT(aligned_act(backend, args->x) && aligned4(args->weight) && aligned_act(backend, args->out));
    CONTRACT(args->x_stride >= dim && args->out_stride >= dim);
    if (args->delta) {
        CONTRACT(aligned_act(backend, args->delta) && args->delta_stride >= dim);
        CONTRACT(apart(backend, args->x, x_span, args->delta, span(rows, dim, args->delta_stride)));
        /* A row of out may lie on the same row of delta, which is read before. */
        CONTRACT((args->out == args->delta && args->out_stride == args->delta_stride) ||
                 apart(backend, args->out, span(rows, dim, args->out_stride), args->delta,
                       span(rows, dim, args->delta_stride)));
    }
    CONTRACT((args->out == args->x && args->out_stride == args->x_stride) ||
             apart(backend, args->out, span(rows, dim, args->out_stride), args->x, x_span));
    int64_t begin = launch_begin(backend);
    int rc = backend->table->rms_norm(backend, args, err);
    launch_end(backend, OP_RMS_NORM, begin, act_bytes(backend) * rows * dim * (args->delta ? 4 : 2) + 4 * dim,
               rows * dim * (args->delta ? 5 : 4));
    return rc;
}

int op_linear(struct backend *backend, const struct op_linear_args *args, struct err *err) {
    CONTRACT(args->w && args->rows >= 0);
    const int64_t rows = args->rows, in = args->w->cols, out = args->w->rows;
    CONTRACT(aligned_act(backend, args->x) && aligned_act(backend, args->y) && (!args->bias || aligned4(args->bias)));
    CONTRACT(args->x_stride >= in && args->y_stride >= out);
    CONTRACT(apart(backend, args->x, span(rows, in, args->x_stride), args->y, span(rows, out, args->y_stride)));
    int64_t begin = launch_begin(backend);
    int rc = backend->table->linear(backend, args, err);
    launch_end(backend, OP_LINEAR, begin,
               (int64_t)args->w->bytes + act_bytes(backend) * rows * (in + out * (args->accumulate ? 2 : 1)),
               2 * rows * in * out);
    return rc;
}

int op_gated_act(struct backend *backend, const struct op_gated_act_args *args, struct err *err) {
    const int64_t rows = args->rows, ffn = args->ffn;
    CONTRACT(rows >= 0 && ffn > 0);
    CONTRACT(aligned_act(backend, args->gate_up) && aligned_act(backend, args->out));
    CONTRACT(args->activation == ACTIVATION_SILU || args->activation == ACTIVATION_GELU_TANH);
    CONTRACT(apart(backend, args->gate_up, rows * ffn * 2, args->out, rows * ffn));
    int64_t begin = launch_begin(backend);
    int rc = backend->table->gated_act(backend, args, err);
    launch_end(backend, OP_GATED_ACT, begin, 3 * act_bytes(backend) * rows * ffn, 20 * rows * ffn);
    return rc;
}

int op_gather_rows(struct backend *backend, const struct op_gather_rows_args *args, struct err *err) {
    CONTRACT(args->rows >= 0 && args->dim > 0);
    CONTRACT(aligned_act(backend, args->x) && aligned_act(backend, args->out) && args->x != args->out);
    CONTRACT(args->rows == 0 || args->row_index);
    int64_t begin = launch_begin(backend);
    int rc = backend->table->gather_rows(backend, args, err);
    launch_end(backend, OP_GATHER_ROWS, begin, 2 * act_bytes(backend) * args->rows * args->dim, 0);
    return rc;
}

int op_scale(struct backend *backend, const struct op_scale_args *args, struct err *err) {
    CONTRACT(args->count >= 0 && aligned_act(backend, args->x) && args->cap >= 0.0f);
    int64_t begin = launch_begin(backend);
    int rc = backend->table->scale(backend, args, err);
    launch_end(backend, OP_SCALE, begin, 2 * (args->f32 ? 4 : act_bytes(backend)) * args->count,
               args->count * (args->cap > 0.0f ? 20 : 1));
    return rc;
}

int op_rope(struct backend *backend, const struct op_rope_args *args, struct err *err) {
    const int64_t q_width = args->n_heads * args->head_dim, k_width = args->n_kv_heads * args->head_dim;
    CONTRACT(args->kind == ROPE_NONE || args->kind == ROPE_NEIGHBOURS || args->kind == ROPE_HALVES);
    CONTRACT(args->tokens >= 0 && args->n_heads > 0 && args->n_kv_heads > 0);
    CONTRACT(args->rotary_dim >= 0 && args->rotary_dim % 2 == 0 && args->rotary_dim <= args->head_dim);
    CONTRACT(aligned_act(backend, args->q) && aligned_act(backend, args->k));
    CONTRACT(args->q_stride >= q_width && args->k_stride >= k_width);
    CONTRACT(args->kind == ROPE_NONE || args->tokens == 0 || (args->positions && aligned4(args->cos_sin)));
    int64_t begin = launch_begin(backend);
    int rc = backend->table->rope(backend, args, err);
    int64_t turned = args->tokens * (args->n_heads + args->n_kv_heads) * args->rotary_dim;
    launch_end(backend, OP_ROPE, begin, 2 * act_bytes(backend) * turned + 4 * args->tokens * args->rotary_dim,
               3 * turned);
    return rc;
}

/* What op_kv_write, op_kv_copy and op_attention ask of the cache. */
bool kv_layer_valid(const struct backend *backend, const struct kv_layer *kv) {
    if (!kv->base || ((uintptr_t)kv->base & 63) != 0) return false;
    if (!(backend->info.kv_dtypes >> kv->dtype & 1)) return false;
    if (kv->page_size <= 0 || kv->n_kv_heads <= 0 || kv->head_dim <= 0 || kv->head_dim % 8 != 0) return false;
    size_t page = 2 * (size_t)kv->n_kv_heads * (size_t)kv->page_size * (size_t)kv->head_dim;
    return kv->page_stride_bytes >= page * (size_t)dtype_info(kv->dtype)->block_bytes && kv->page_stride_bytes % 4 == 0;
}

bool attention_shape_valid(const struct attention_shape *shape) {
    if (shape->seqs < 0 || shape->tokens < 0) return false;
    if (shape->tokens == 0) return true;
    return shape->seqs > 0 && shape->q_start && shape->kv_len && shape->slots && shape->q_start[0] == 0 &&
           shape->q_start[shape->seqs] == shape->tokens;
}

int op_kv_write(struct backend *backend, const struct op_kv_write_args *args, struct err *err) {
    const int64_t width = (int64_t)args->kv.n_kv_heads * args->kv.head_dim;
    CONTRACT(kv_layer_valid(backend, &args->kv) && attention_shape_valid(&args->shape));
    CONTRACT(aligned_act(backend, args->k) && aligned_act(backend, args->v) && args->kv_stride >= width);
    CONTRACT(args->shape.tokens == 0 || (args->positions && args->table.pages && args->table.max_pages > 0));
    int64_t begin = launch_begin(backend);
    int rc = backend->table->kv_write(backend, args, err);
    int64_t element = dtype_info(args->kv.dtype)->block_bytes;
    launch_end(backend, OP_KV_WRITE, begin, 2 * args->shape.tokens * width * (act_bytes(backend) + element), 0);
    return rc;
}

int op_kv_copy(struct backend *backend, const struct op_kv_copy_args *args, struct err *err) {
    CONTRACT(kv_layer_valid(backend, &args->kv) && args->count >= 0);
    CONTRACT(args->count == 0 || (args->src_pages && args->dst_pages));
    int64_t begin = launch_begin(backend);
    int rc = backend->table->kv_copy(backend, args, err);
    int64_t values = 2 * (int64_t)args->kv.n_kv_heads * args->kv.page_size * args->kv.head_dim;
    launch_end(backend, OP_KV_COPY, begin, 2 * args->count * values * dtype_info(args->kv.dtype)->block_bytes, 0);
    return rc;
}

int op_attention(struct backend *backend, const struct op_attention_args *args, struct err *err) {
    const struct attention_plan *plan = args->plan;
    const struct kv_layer *kv = &args->kv;
    const int64_t width = (int64_t)args->n_heads * kv->head_dim;
    CONTRACT(kv_layer_valid(backend, kv) && attention_shape_valid(&args->shape) && plan);
    CONTRACT(plan->n_heads == args->n_heads && plan->n_kv_heads == kv->n_kv_heads && plan->head_dim == kv->head_dim);
    CONTRACT(plan->page_size == kv->page_size && plan->window == args->window);
    CONTRACT(plan->tokens == args->shape.tokens && plan->seqs == args->shape.seqs);
    CONTRACT(aligned_act(backend, args->q) && aligned_act(backend, args->out) && args->q_stride >= width &&
             args->out_stride >= width);
    CONTRACT(apart(backend, args->q, span(plan->tokens, width, args->q_stride), args->out,
                   span(plan->tokens, width, args->out_stride)));
    CONTRACT(plan->tokens == 0 || (args->table.pages && args->table.max_pages > 0));
    CONTRACT(args->soft_cap >= 0.0f);
    CONTRACT(plan->workspace_bytes == 0 || (((uintptr_t)args->workspace & 63) == 0 && args->workspace &&
                                            args->workspace_bytes >= plan->workspace_bytes));
    int64_t begin = launch_begin(backend);
    int rc = backend->table->attention(backend, args, err);
    int64_t element = dtype_info(kv->dtype)->block_bytes;
    launch_end(backend, OP_ATTENTION, begin,
               2 * (int64_t)plan->keys_read * kv->n_kv_heads * kv->head_dim * element +
                   2 * act_bytes(backend) * plan->tokens * width,
               4 * (int64_t)plan->keys * width);
    return rc;
}
