/* The ops of ops.h that join several others. Where a device has nothing better they run as those others, with the same
 * arithmetic; where it has, it must come to the same within its dtype. Also the ops that only a GPU has a reason for.
 */
#include "kernels/ops_private.h"

/* ---- feed-forward: gate and up ------------------------------------------------------------------------------------
 */

static int linear_gated_apart(struct backend *backend, const struct op_linear_gated_args *args, struct err *err) {
    const int64_t width = args->w->rows;
    const struct op_linear_args linear = {.x = args->x,
                                          .w = args->w,
                                          .bias = args->bias,
                                          .y = args->gate_up,
                                          .rows = args->rows,
                                          .x_stride = args->x_stride,
                                          .y_stride = width};
    const struct op_gated_act_args act = {args->gate_up, args->out, args->rows, width / 2, args->activation};
    int rc = op_linear(backend, &linear, err);
    return rc ? rc : op_gated_act(backend, &act, err);
}

int op_linear_gated(struct backend *backend, const struct op_linear_gated_args *args, struct err *err) {
    CONTRACT(args->w && (args->w->flags & WEIGHT_GATED) && args->rows >= 0);
    const int64_t rows = args->rows, in = args->w->cols, width = args->w->rows;
    CONTRACT(aligned_act(backend, args->x) && aligned_act(backend, args->gate_up) && aligned_act(backend, args->out));
    CONTRACT(args->x_stride >= in && (!args->bias || aligned4(args->bias)));
    CONTRACT(args->activation == ACTIVATION_SILU || args->activation == ACTIVATION_GELU_TANH);
    CONTRACT(apart(backend, args->x, span(rows, in, args->x_stride), args->out, rows * (width / 2)));
    CONTRACT(apart(backend, args->gate_up, rows * width, args->out, rows * (width / 2)));
    CONTRACT(apart(backend, args->x, span(rows, in, args->x_stride), args->gate_up, rows * width));
    if (!backend->table->linear_gated) return linear_gated_apart(backend, args, err);
    int64_t begin = launch_begin(backend);
    int rc = backend->table->linear_gated(backend, args, err);
    launch_end(backend, OP_LINEAR_GATED, begin, (int64_t)args->w->bytes + act_bytes(backend) * rows * (in + width / 2),
               2 * rows * in * width + 10 * rows * width);
    return rc;
}

/* ---- q, k and v ---------------------------------------------------------------------------------------------------
 */

/* A call takes rows of one stride: head by head over all tokens, or token by token over all heads, whichever is fewer
 * calls. */
static int heads_norm(struct backend *backend, const struct op_qkv_finish_args *args, unsigned char *at, int64_t heads,
                      const float *weight, struct err *err) {
    const int64_t dim = args->kv.head_dim, bytes = act_bytes(backend), tokens = args->shape.tokens;
    const bool by_token = tokens < heads;
    const int64_t calls = by_token ? tokens : heads, apart = by_token ? args->qkv_stride : dim;
    const int64_t stride = by_token ? dim : args->qkv_stride;
    int rc = 0;
    for (int64_t i = 0; rc == 0 && i < calls; i++) {
        void *x = at + i * apart * bytes;
        const struct op_rms_norm_args norm = {.x = x,
                                              .weight = weight,
                                              .out = x,
                                              .rows = by_token ? heads : tokens,
                                              .dim = dim,
                                              .x_stride = stride,
                                              .out_stride = stride,
                                              .eps = args->norm_eps,
                                              .weight_offset = args->norm_weight_offset};
        rc = op_rms_norm(backend, &norm, err);
    }
    return rc;
}

int qkv_finish_apart(struct backend *backend, const struct op_qkv_finish_args *args, struct err *err) {
    const int64_t dim = args->kv.head_dim, n_kv = args->kv.n_kv_heads, bytes = act_bytes(backend);
    unsigned char *q = args->qkv, *k = q + args->n_heads * dim * bytes, *v = k + n_kv * dim * bytes;
    int rc = 0;
    if (args->q_norm) rc = heads_norm(backend, args, q, args->n_heads, args->q_norm, err);
    if (rc == 0 && args->k_norm) rc = heads_norm(backend, args, k, n_kv, args->k_norm, err);
    if (rc == 0 && args->rope != ROPE_NONE) {
        const struct op_rope_args rope = {.q = q,
                                          .k = k,
                                          .positions = args->positions,
                                          .cos_sin = args->cos_sin,
                                          .tokens = args->shape.tokens,
                                          .n_heads = args->n_heads,
                                          .n_kv_heads = n_kv,
                                          .head_dim = dim,
                                          .rotary_dim = args->rotary_dim,
                                          .q_stride = args->qkv_stride,
                                          .k_stride = args->qkv_stride,
                                          .kind = args->rope};
        rc = op_rope(backend, &rope, err);
    }
    const struct op_kv_write_args write = {.k = k,
                                           .v = v,
                                           .kv_stride = args->qkv_stride,
                                           .positions = args->positions,
                                           .shape = args->shape,
                                           .kv = args->kv,
                                           .table = args->table};
    return rc ? rc : op_kv_write(backend, &write, err);
}

int op_qkv_finish(struct backend *backend, const struct op_qkv_finish_args *args, struct err *err) {
    const int64_t width = (args->n_heads + 2 * (int64_t)args->kv.n_kv_heads) * args->kv.head_dim;
    CONTRACT(kv_layer_valid(backend, &args->kv) && attention_shape_valid(&args->shape) && args->n_heads > 0);
    CONTRACT(aligned_act(backend, args->qkv) && args->qkv_stride >= width);
    CONTRACT(!args->q_norm == !args->k_norm);
    CONTRACT(args->rotary_dim >= 0 && args->rotary_dim % 2 == 0 && args->rotary_dim <= args->kv.head_dim);
    CONTRACT(args->rope == ROPE_NONE || args->rope == ROPE_NEIGHBOURS || args->rope == ROPE_HALVES);
    CONTRACT(args->rope == ROPE_NONE || aligned4(args->cos_sin));
    CONTRACT(args->shape.tokens == 0 || (args->positions && args->table.pages && args->table.max_pages > 0));
    if (!backend->table->qkv_finish) return qkv_finish_apart(backend, args, err);
    int64_t begin = launch_begin(backend), kv_width = 2 * (int64_t)args->kv.n_kv_heads * args->kv.head_dim;
    int rc = backend->table->qkv_finish(backend, args, err);
    launch_end(backend, OP_QKV_FINISH, begin,
               args->shape.tokens *
                   (2 * act_bytes(backend) * width + dtype_info(args->kv.dtype)->block_bytes * kv_width),
               6 * args->shape.tokens * width);
    return rc;
}

/* ---- page table ---------------------------------------------------------------------------------------------------
 */

int op_table_update(struct backend *backend, const struct op_table_update_args *args, struct err *err) {
    CONTRACT(aligned4(args->pages) && args->slots > 0 && args->max_pages > 0 && args->capacity >= 0);
    CONTRACT(args->capacity == 0 || (args->deltas && args->count));
    int64_t begin = launch_begin(backend);
    int rc = backend->table->table_update(backend, args, err);
    launch_end(backend, OP_TABLE_UPDATE, begin, 16 * (int64_t)args->capacity, 0);
    return rc;
}

/* ---- plans --------------------------------------------------------------------------------------------------------
 */

const struct attention_plan *attention_plan_make(struct backend *backend, const struct attention_plan_options *options,
                                                 struct arena *arena) {
    struct attention_plan_options full = *options;
    if (full.workers == 0) full.workers = backend->info.threads;
    return backend->table->plan_make(backend, &full, arena);
}

size_t attention_workspace_bytes(const struct backend *backend, int32_t tokens_max, int32_t seqs_max,
                                 int32_t kv_len_max, int32_t n_heads, int32_t head_dim) {
    return backend->table->attention_bytes(backend, tokens_max, seqs_max, kv_len_max, n_heads, head_dim);
}

size_t attention_plan_step_bytes(const struct backend *backend, int32_t tokens_max, int32_t seqs_max,
                                 int32_t kv_len_max, int32_t n_heads, int32_t head_dim) {
    return backend->table->plan_step_bytes(backend, tokens_max, seqs_max, kv_len_max, n_heads, head_dim);
}

/* ---- whole decode steps -------------------------------------------------------------------------------------------
 */

size_t decode_stack_bytes(const struct backend *backend, const struct decode_stack_options *options,
                          enum dtype weight_dtype, int32_t *rows_served) {
    *rows_served = 0;
    return backend->table->stack_bytes ? backend->table->stack_bytes(backend, options, weight_dtype, rows_served) : 0;
}

int decode_stack_open(struct backend *backend, const struct decode_stack_options *options, struct decode_stack **out,
                      struct err *err) {
    *out = NULL;
    return backend->table->stack_open ? backend->table->stack_open(backend, options, out, err) : 0;
}

void decode_stack_close(struct backend *backend, struct decode_stack *stack) {
    if (stack) backend->table->stack_close(backend, stack);
}

int32_t decode_stack_rows(const struct decode_stack *stack) {
    return stack ? stack->rows_max : 0;
}

int op_decode_stack(struct backend *backend, const struct op_decode_stack_args *args, struct err *err) {
    const struct decode_stack *stack = args->stack;
    CONTRACT(stack && args->rows > 0 && args->rows <= stack->rows_max);
    CONTRACT(args->shape.seqs == args->rows && args->shape.tokens == args->rows && attention_shape_valid(&args->shape));
    CONTRACT(aligned_act(backend, args->x) && aligned4(args->logits) && args->positions && args->plan);
    int64_t begin = launch_begin(backend);
    int rc = backend->table->decode_stack(backend, args, err);
    launch_end(backend, OP_DECODE_STACK, begin,
               (int64_t)(stack->bytes + stack->bytes_per_token * (size_t)args->plan->keys) +
                   4 * (int64_t)args->rows * stack->vocab,
               (int64_t)stack->flops_per_row * args->rows);
    return rc;
}
