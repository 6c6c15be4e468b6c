/* A decode step by three kernels a layer: rope and the cache's write, attention, and one with the products that lie
 * between one attention and the next. */
#include "kernels/cuda/stack_layers.h"

#include <string.h>

#include "engine/base/mem.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/cuda_weight.h"
#include "kernels/cuda/stack_chain.h"

#define LAYERS_ALIGN ((size_t)256)
/* Below it products are so short that the waits between them are what takes time, here as one by one (1B at 16 rows:
 * 0.83 and 0.85 ms). */
#define CHAIN_HIDDEN_MIN 4096

struct stack_layers {
    struct decode_stack_options options; /* with layers of its own */
    struct decode_stack_layer *layers;
    int clusters;
    unsigned char *h, *qkv, *attn, *act; /* [rows, hidden], [rows, heads of q, k, v], [rows, wide], [rows, ffn] bf16 */
    float *squares;                      /* see struct chain */
    unsigned *counters;
};

/* Where things lie in the block. */
struct places {
    size_t h, qkv, attn, act, squares, counters, bytes;
};

static size_t place_take(struct places *p, size_t bytes) {
    const size_t at = p->bytes;
    p->bytes += (bytes + LAYERS_ALIGN - 1) / LAYERS_ALIGN * LAYERS_ALIGN;
    return at;
}

static int32_t wide_of(const struct decode_stack_options *o) {
    return o->n_heads * o->head_dim;
}

static int32_t width_of(const struct decode_stack_options *o) {
    return (o->n_heads + 2 * o->n_kv_heads) * o->head_dim;
}

static struct places places_of(const struct decode_stack_options *o, int32_t rows) {
    const size_t row = 2 * (size_t)rows;
    struct places p = {0};
    p.h = place_take(&p, row * (size_t)o->hidden);
    p.qkv = place_take(&p, row * (size_t)width_of(o));
    p.attn = place_take(&p, row * (size_t)wide_of(o));
    p.act = place_take(&p, row * (size_t)o->ffn);
    p.squares = place_take(&p, ((size_t)o->hidden + 15) / 16 * CHAIN_ROWS_MAX * sizeof(float));
    p.counters = place_take(&p, CHAIN_COUNTERS * sizeof(unsigned));
    return p;
}

int32_t stack_layers_rows(const struct backend *backend, const struct decode_stack_options *options) {
    const struct linear_sm90 *sm90 = &backend->cuda->linear->sm90;
    if (sm90->clusters < 1 || options->hidden < CHAIN_HIDDEN_MIN) return 0;
    return options->rows_max < CHAIN_ROWS_MAX ? options->rows_max : CHAIN_ROWS_MAX;
}

size_t stack_layers_bytes(const struct decode_stack_options *options, int32_t rows) {
    return places_of(options, rows).bytes;
}

int stack_layers_open(struct backend *backend, const struct decode_stack_options *options, int32_t rows, void *memory,
                      struct stack_layers **out, struct err *err) {
    const struct places at = places_of(options, rows);
    unsigned char *base = memory;
    struct stack_layers *s = mem_zalloc(1, sizeof *s);
    *out = s;
    s->options = *options;
    s->layers = mem_zalloc((size_t)options->layer_count, sizeof *s->layers);
    memcpy(s->layers, options->layers, (size_t)options->layer_count * sizeof *s->layers);
    s->options.layers = s->layers;
    s->h = base + at.h, s->qkv = base + at.qkv, s->attn = base + at.attn, s->act = base + at.act;
    s->squares = (float *)(void *)(base + at.squares), s->counters = (unsigned *)(void *)(base + at.counters);
    int rc = CUDA_TRY(backend, (cudaError_t)chain_open(&backend->cuda->linear->sm90, &s->clusters), err);
    if (rc == 0)
        rc = CUDA_TRY(backend,
                      cudaMemsetAsync(s->counters, 0, CHAIN_COUNTERS * sizeof(unsigned), backend->cuda->stream), err);
    if (rc == 0 && s->clusters < 1) { /* a part of a GPU */
        stack_layers_close(s);
        *out = NULL;
    }
    return rc;
}

void stack_layers_close(struct stack_layers *layers) {
    if (!layers) return;
    mem_free(layers->layers);
    mem_free(layers);
}

/* ---- a step -------------------------------------------------------------------------------------------------------
 */

static struct chain_product product_of(const struct weight *w, const void *x, void *y, enum chain_kind kind) {
    const struct cuda_weight *from = cuda_weight_of(w);
    return (struct chain_product){.w = from->segments[0].data,
                                  .x = x,
                                  .y = y,
                                  .pitch = from->pitch,
                                  .out = (int32_t)w->rows,
                                  .cols = (int32_t)w->cols,
                                  .kind = kind};
}

/* From the heads' output of layer l to q, k and v of the next. */
static int products_run(struct backend *backend, const struct stack_layers *s, int32_t l, void *x, int32_t rows,
                        struct err *err) {
    const struct decode_stack_options *o = &s->options;
    const struct decode_stack_layer *layer = &s->layers[l];
    struct cuda *cuda = backend->cuda;
    struct chain c = {.count = 3,
                      .rows = rows,
                      .hidden = o->hidden,
                      .residual = x,
                      .squares = s->squares,
                      .counters = s->counters,
                      .norm_eps = o->norm_eps,
                      .norm_offset = o->norm_weight_offset};
    c.products[0] = product_of(layer->o, s->attn, s->h, CHAIN_RESIDUAL);
    c.products[1] = product_of(layer->gate_up, s->h, s->act, CHAIN_GATED);
    c.products[2] = product_of(layer->down, s->act, s->h, CHAIN_RESIDUAL);
    c.products[0].norm = layer->ffn_norm, c.products[1].scaled = true, c.products[2].norm = o->output_norm;
    if (l + 1 < o->layer_count) {
        c.products[2].norm = layer[1].attn_norm;
        c.products[3] = product_of(layer[1].qkv, s->h, s->qkv, CHAIN_PLAIN);
        c.products[3].scaled = true, c.count = 4;
    }
    return CUDA_TRY(backend, (cudaError_t)chain_launch(&cuda->linear->sm90, s->clusters, cuda->stream, &c), err);
}

static int norm_run(struct backend *backend, const struct stack_layers *s, const float *weight, void *x, int32_t rows,
                    struct err *err) {
    const struct decode_stack_options *o = &s->options;
    const struct op_rms_norm_args args = {.x = x,
                                          .weight = weight,
                                          .out = s->h,
                                          .rows = rows,
                                          .dim = o->hidden,
                                          .x_stride = o->hidden,
                                          .delta_stride = o->hidden,
                                          .out_stride = o->hidden,
                                          .eps = o->norm_eps,
                                          .weight_offset = o->norm_weight_offset};
    return cuda_op_rms_norm(backend, &args, err);
}

static int linear_run(struct backend *backend, const struct stack_layers *s, const struct weight *w, void *y,
                      int32_t rows, bool f32, struct err *err) {
    const struct op_linear_args args = {.x = s->h,
                                        .w = w,
                                        .y = y,
                                        .rows = rows,
                                        .x_stride = s->options.hidden,
                                        .y_stride = weight_rows(w),
                                        .out_f32 = f32};
    return cuda_op_linear(backend, &args, err);
}

static int attention_run(struct backend *backend, const struct stack_layers *s, int32_t l,
                         const struct op_decode_stack_args *args, struct err *err) {
    const struct decode_stack_options *o = &s->options;
    const struct decode_stack_layer *layer = &s->layers[l];
    const struct op_qkv_finish_args finish = {.qkv = s->qkv,
                                              .norm_eps = o->norm_eps,
                                              .norm_weight_offset = o->norm_weight_offset,
                                              .cos_sin = o->cos_sin,
                                              .rope = layer->rope,
                                              .n_heads = o->n_heads,
                                              .rotary_dim = o->rotary_dim,
                                              .qkv_stride = width_of(o),
                                              .positions = args->positions,
                                              .shape = args->shape,
                                              .kv = layer->kv,
                                              .table = o->table};
    const struct op_attention_args attention = {.q = s->qkv,
                                                .out = s->attn,
                                                .q_stride = width_of(o),
                                                .out_stride = wide_of(o),
                                                .n_heads = o->n_heads,
                                                .shape = args->shape,
                                                .kv = layer->kv,
                                                .table = o->table,
                                                .plan = args->plan,
                                                .workspace = args->attention_workspace,
                                                .workspace_bytes = args->attention_workspace_bytes,
                                                .scale = o->attn_scale};
    const int rc = cuda_op_qkv_finish(backend, &finish, err);
    return rc ? rc : cuda_op_attention(backend, &attention, err);
}

int stack_layers_run(struct backend *backend, const struct stack_layers *s, const struct op_decode_stack_args *args,
                     struct err *err) {
    const struct decode_stack_options *o = &s->options;
    int rc = norm_run(backend, s, s->layers[0].attn_norm, args->x, args->rows, err);
    if (rc == 0) rc = linear_run(backend, s, s->layers[0].qkv, s->qkv, args->rows, false, err);
    for (int32_t l = 0; rc == 0 && l < o->layer_count; l++) {
        rc = attention_run(backend, s, l, args, err);
        if (rc == 0) rc = products_run(backend, s, l, args->x, args->rows, err);
    }
    if (rc == 0) rc = norm_run(backend, s, o->output_norm, args->x, args->rows, err);
    return rc ? rc : linear_run(backend, s, o->output, args->logits, args->rows, true, err);
}
