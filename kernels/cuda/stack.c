/* The host side of the decode stack: which models it serves, its memory, the tensor maps of all weights and pages, and
 * the op. One block of MEMORY_WORKSPACE holds everything; a step changes only the addresses of its inputs. */
#include "kernels/cuda/stack.h"

#include <cudaTypedefs.h>
#include <string.h>

#include "engine/base/mem.h"
#include "kernels/cuda/cuda_ops.h"
#include "kernels/cuda/cuda_weight.h"
#include "kernels/cuda/stack_layers.h"

#define STACK_ALIGN     ((size_t)256)
#define STACK_PAGES_MAX ((cuuint64_t)1 << 24) /* a bound for the tensor map alone: pages are never counted here */

struct cuda_stack {
    struct decode_stack head;
    struct stack_args args;
    struct stack_layers *layers; /* for more rows than the one kernel takes, or NULL */
    unsigned char *memory;
    size_t memory_bytes;
    uint32_t *error; /* pinned: read after a fault, when device memory no longer answers */
};

/* Where things lie in the stack's block. */
struct stack_layout {
    size_t maps, layers, residual, qkv, gate_up, squares, part, part_stats, barrier, wide, bytes;
};

static size_t layout_take(struct stack_layout *layout, size_t bytes) {
    const size_t at = layout->bytes;
    layout->bytes += (bytes + STACK_ALIGN - 1) / STACK_ALIGN * STACK_ALIGN;
    return at;
}

/* rows: of all; the one kernel has room for its own. */
static struct stack_layout layout_of(const struct decode_stack_options *o, int32_t rows_all, int sms) {
    const int32_t rows = rows_all < STACK_ROWS_SERVED ? rows_all : STACK_ROWS_SERVED;
    const size_t row_count = (size_t)rows, layers = (size_t)o->layer_count, hidden = (size_t)o->hidden;
    const size_t width = ((size_t)o->n_heads + 2 * (size_t)o->n_kv_heads) * (size_t)o->head_dim;
    const size_t slots = row_count * (size_t)o->n_kv_heads + (size_t)sms, group = (size_t)(o->n_heads / o->n_kv_heads);
    struct stack_layout l = {0};
    l.maps = layout_take(&l, (layers * STACK_MAPS + 1) * sizeof(CUtensorMap));
    l.layers = layout_take(&l, layers * sizeof(struct stack_layer));
    l.residual = layout_take(&l, row_count * hidden * sizeof(float));
    l.qkv = layout_take(&l, row_count * width * sizeof(float));
    l.gate_up = layout_take(&l, row_count * 2 * (size_t)o->ffn * sizeof(float));
    l.squares = layout_take(&l, (2 * layers + 1) * STACK_ROWS_MAX * sizeof(float));
    l.part = layout_take(&l, slots * group * (size_t)o->head_dim * sizeof(float));
    l.part_stats = layout_take(&l, slots * group * 2 * sizeof(float));
    l.barrier = layout_take(&l, sizeof(uint64_t));
    l.wide = layout_take(&l, rows_all > rows ? stack_layers_bytes(o, rows_all) : 0);
    return l;
}

/* ---- what is served -----------------------------------------------------------------------------------------------
 */

static bool layer_served(const struct decode_stack_options *o, const struct decode_stack_layer *layer) {
    const struct kv_layer *kv = &layer->kv, *first = &o->layers[0].kv;
    if (layer->q_norm || layer->k_norm || layer->qkv_bias || layer->o_bias || layer->gate_up_bias || layer->down_bias)
        return false;
    if (layer->window > 0 || kv->dtype != DTYPE_BF16) return false;
    if (kv->n_kv_heads != o->n_kv_heads || kv->head_dim != o->head_dim || kv->page_size != first->page_size)
        return false;
    if (kv->page_size != 16 && kv->page_size != 32 && kv->page_size != 64 && kv->page_size != 128) return false;
    return layer->rope == ROPE_NONE || o->rotary_dim == o->head_dim;
}

static int32_t rows_served(const struct backend *backend, const struct decode_stack_options *o, enum dtype dtype) {
    const struct cuda *cuda = backend->cuda;
    if (cuda->kernels != CUDA_KERNELS_SM90A || cuda->batch_invariant || cuda->sms > STACK_CTAS_MAX) return 0;
    if (dtype != DTYPE_BF16 && dtype != DTYPE_F16 && dtype != DTYPE_F32) return 0; /* the last two become bf16 */
    if (o->layer_count < 1 || (o->head_dim != 64 && o->head_dim != 128) || o->activation != ACTIVATION_SILU) return 0;
    if (o->n_kv_heads < 1 || o->n_heads % o->n_kv_heads || o->n_heads / o->n_kv_heads > STACK_GROUP_MAX) return 0;
    if (o->n_heads / o->n_kv_heads * o->head_dim > STACK_GROUP_VALUES) return 0;
    if (o->hidden % STACK_TILE_COLS || o->ffn % STACK_TILE_COLS || o->rows_max < 1) return 0;
    if (o->attn_soft_cap != 0.f || o->logit_soft_cap != 0.f || o->logit_scale != 1.f || o->residual_scale != 1.f)
        return 0;
    for (int32_t i = 0; i < o->layer_count; i++)
        if (!layer_served(o, &o->layers[i])) return 0;
    const int32_t wide = stack_layers_rows(backend, o), one = STACK_ROWS_SERVED;
    return wide > one ? wide : o->rows_max < one ? o->rows_max : one;
}

size_t cuda_stack_bytes(const struct backend *backend, const struct decode_stack_options *options,
                        enum dtype weight_dtype, int32_t *rows) {
    *rows = rows_served(backend, options, weight_dtype);
    return *rows > 0 ? layout_of(options, *rows, backend->cuda->sms).bytes : 0;
}

static bool weight_served(const struct weight *weight, int64_t rows, int64_t cols, bool gated) {
    return weight && weight->rows == rows && weight->cols == cols && cuda_weight_plain(weight) &&
           gated == ((weight->flags & WEIGHT_GATED) != 0);
}

static bool weights_served(const struct decode_stack_options *o) {
    const int64_t wide = (int64_t)o->n_heads * o->head_dim, narrow = (int64_t)o->n_kv_heads * o->head_dim;
    for (int32_t i = 0; i < o->layer_count; i++) {
        const struct decode_stack_layer *l = &o->layers[i];
        if (!weight_served(l->qkv, wide + 2 * narrow, o->hidden, false) ||
            !weight_served(l->o, o->hidden, wide, false) ||
            !weight_served(l->gate_up, 2 * (int64_t)o->ffn, o->hidden, true) ||
            !weight_served(l->down, o->hidden, o->ffn, false))
            return false;
    }
    return weight_served(o->output, o->vocab, o->hidden, false);
}

/* ---- tensor maps --------------------------------------------------------------------------------------------------
 */

static PFN_cuTensorMapEncodeTiled_v12000 map_encoder(struct backend *backend, struct err *err) {
    void *entry = NULL;
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
#if CUDART_VERSION >= 12050
    const cudaError_t rc =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t rc = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &entry, cudaEnableDefault, &found);
#endif
    if (cuda_failed(backend, rc, "cuTensorMapEncodeTiled", __FILE__, __LINE__, err)) return NULL;
    if (found != cudaDriverEntryPointSuccess || !entry) {
        err_set(err, ERR_UNSUPPORTED, "the CUDA driver has no cuTensorMapEncodeTiled: it is older than 12.0");
        return NULL;
    }
    PFN_cuTensorMapEncodeTiled_v12000 encode;
    memcpy(&encode, &entry, sizeof encode);
    return encode;
}

static int map_failed(CUresult rc, const char *what, struct err *err) {
    return rc == CUDA_SUCCESS ? 0 : err_set(err, ERR_FATAL, "tensor map of %s: CUDA driver error %d", what, (int)rc);
}

/* [rows, cols] bf16 in boxes of 128 rows of 64 columns, swizzled as wgmma reads them. With promotion to 128 bytes, what
 * a box is wide, a bare stream of such boxes reads 4.49 TB/s; to 256 bytes 4.35. */
static int map_weight(PFN_cuTensorMapEncodeTiled_v12000 encode, const struct weight *weight, CUtensorMap *out,
                      struct err *err) {
    const struct cuda_weight *w = cuda_weight_of(weight);
    const cuuint64_t dims[2] = {(cuuint64_t)w->base.cols, (cuuint64_t)w->base.rows};
    const cuuint64_t strides[1] = {(cuuint64_t)w->pitch * 2};
    const cuuint32_t box[2] = {STACK_TILE_COLS, STACK_TILE_ROWS}, step[2] = {1, 1};
    return map_failed(encode(out, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, w->segments[0].data, dims, strides, box, step,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                      "a weight", err);
}

/* [pages, K or V and head, page_size, head_dim] bf16 in boxes of what a unit takes of one page, 64 values wide. */
static int map_pages(PFN_cuTensorMapEncodeTiled_v12000 encode, const struct kv_layer *kv, CUtensorMap *out,
                     struct err *err) {
    const int32_t unit = stack_unit_tokens(kv->head_dim), tokens = kv->page_size < unit ? kv->page_size : unit;
    const cuuint64_t row = (cuuint64_t)kv->head_dim * 2;
    const cuuint64_t dims[4] = {(cuuint64_t)kv->head_dim, (cuuint64_t)kv->page_size, 2 * (cuuint64_t)kv->n_kv_heads,
                                STACK_PAGES_MAX};
    const cuuint64_t strides[3] = {row, row * (cuuint64_t)kv->page_size, kv->page_stride_bytes};
    const cuuint32_t box[4] = {64, (cuuint32_t)tokens, 1, 1}, step[4] = {1, 1, 1, 1};
    return map_failed(encode(out, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, kv->base, dims, strides, box, step,
                             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
                      "the pages of a layer", err);
}

static int maps_fill(struct backend *backend, const struct decode_stack_options *o, CUtensorMap *maps,
                     struct err *err) {
    const PFN_cuTensorMapEncodeTiled_v12000 encode = map_encoder(backend, err);
    if (!encode) return err->code;
    int rc = map_weight(encode, o->output, maps + (size_t)o->layer_count * STACK_MAPS, err);
    for (int32_t i = 0; rc == 0 && i < o->layer_count; i++) {
        const struct decode_stack_layer *l = &o->layers[i];
        CUtensorMap *m = maps + (size_t)i * STACK_MAPS;
        rc = map_weight(encode, l->qkv, &m[STACK_MAP_QKV], err);
        if (rc == 0) rc = map_pages(encode, &l->kv, &m[STACK_MAP_KV], err);
        if (rc == 0) rc = map_weight(encode, l->o, &m[STACK_MAP_O], err);
        if (rc == 0) rc = map_weight(encode, l->gate_up, &m[STACK_MAP_GATE_UP], err);
        if (rc == 0) rc = map_weight(encode, l->down, &m[STACK_MAP_DOWN], err);
    }
    return rc;
}

/* ---- open and close -----------------------------------------------------------------------------------------------
 */

static int tables_upload(struct backend *backend, const struct decode_stack_options *o, const struct stack_layout *at,
                         unsigned char *memory, struct err *err) {
    const size_t maps_bytes = ((size_t)o->layer_count * STACK_MAPS + 1) * sizeof(CUtensorMap);
    const size_t layers_bytes = (size_t)o->layer_count * sizeof(struct stack_layer);
    CUtensorMap *maps = mem_map(maps_bytes); /* aligned to 64 bytes, as the driver wants them */
    if (!maps) return err_set(err, ERR_NOMEM, "no memory for %zu bytes of tensor maps", maps_bytes);
    struct stack_layer *layers = mem_zalloc((size_t)o->layer_count, sizeof *layers);
    for (int32_t i = 0; i < o->layer_count; i++) {
        const struct decode_stack_layer *l = &o->layers[i];
        layers[i] = (struct stack_layer){.attn_norm = l->attn_norm,
                                         .ffn_norm = l->ffn_norm,
                                         .kv = l->kv.base,
                                         .page_stride_bytes = l->kv.page_stride_bytes,
                                         .rope = (int32_t)l->rope};
    }
    int rc = maps_fill(backend, o, maps, err);
    if (rc == 0) rc = backend_upload(backend, memory + at->maps, maps, maps_bytes, err);
    if (rc == 0) rc = backend_upload(backend, memory + at->layers, layers, layers_bytes, err);
    mem_free(layers);
    mem_unmap(maps, maps_bytes);
    return rc;
}

static struct stack_args args_of(const struct decode_stack_options *o, const struct stack_layout *at,
                                 unsigned char *memory) {
    return (struct stack_args){.maps = (const CUtensorMap *)(void *)(memory + at->maps),
                               .layers = (const struct stack_layer *)(void *)(memory + at->layers),
                               .output_norm = o->output_norm,
                               .cos_sin = o->cos_sin,
                               .pages = o->table.pages,
                               .residual = (float *)(void *)(memory + at->residual),
                               .qkv = (float *)(void *)(memory + at->qkv),
                               .gate_up = (float *)(void *)(memory + at->gate_up),
                               .squares = (float *)(void *)(memory + at->squares),
                               .part = (float *)(void *)(memory + at->part),
                               .part_stats = (float *)(void *)(memory + at->part_stats),
                               .barrier = (uint64_t *)(void *)(memory + at->barrier),
                               .layer_count = o->layer_count,
                               .hidden = o->hidden,
                               .ffn = o->ffn,
                               .n_heads = o->n_heads,
                               .n_kv_heads = o->n_kv_heads,
                               .head_dim = o->head_dim,
                               .vocab = o->vocab,
                               .page_size = o->layers[0].kv.page_size,
                               .max_pages = o->table.max_pages,
                               .norm_eps = o->norm_eps,
                               .norm_weight_offset = o->norm_weight_offset,
                               .attn_scale = o->attn_scale};
}

static void head_fill(struct decode_stack *head, const struct decode_stack_options *o, int32_t rows) {
    size_t bytes = o->output->bytes;
    for (int32_t i = 0; i < o->layer_count; i++) {
        const struct decode_stack_layer *l = &o->layers[i];
        bytes += l->qkv->bytes + l->o->bytes + l->gate_up->bytes + l->down->bytes;
    }
    *head = (struct decode_stack){
        .rows_max = rows,
        .vocab = o->vocab,
        .bytes = bytes,
        .bytes_per_token = (size_t)o->layer_count * 4 * (size_t)o->n_kv_heads * (size_t)o->head_dim,
        .flops_per_row = bytes, /* two a weight of two bytes */
    };
}

int cuda_stack_open(struct backend *backend, const struct decode_stack_options *options, struct decode_stack **out,
                    struct err *err) {
    const int32_t rows = rows_served(backend, options, DTYPE_BF16);
    if (rows == 0 || !weights_served(options)) return 0;
    const struct stack_layout at = layout_of(options, rows, backend->cuda->sms);
    struct cuda_stack *stack = mem_zalloc(1, sizeof *stack);
    void *memory = NULL;
    void *error = NULL;
    int rc = backend_alloc(backend, MEMORY_PINNED, sizeof *stack->error, &error, err);
    stack->error = error;
    if (rc == 0) rc = backend_alloc(backend, MEMORY_WORKSPACE, at.bytes, &memory, err);
    if (rc == 0) {
        stack->memory = memory;
        stack->memory_bytes = at.bytes;
        rc = tables_upload(backend, options, &at, stack->memory, err);
    }
    if (rc == 0) rc = CUDA_TRY(backend, stack_prepare(), err);
    if (rc == 0 && rows > STACK_ROWS_SERVED)
        rc = stack_layers_open(backend, options, rows, stack->memory + at.wide, &stack->layers, err);
    if (rc) {
        cuda_stack_close(backend, &stack->head);
        return rc;
    }
    stack->args = args_of(options, &at, stack->memory);
    stack->args.error = stack->error;
    backend->cuda->stack_error = stack->error;
    head_fill(&stack->head, options, stack->layers || rows < STACK_ROWS_SERVED ? rows : STACK_ROWS_SERVED);
    *out = &stack->head;
    return 0;
}

void cuda_stack_close(struct backend *backend, struct decode_stack *head) {
    struct cuda_stack *stack = (struct cuda_stack *)(void *)head;
    stack_layers_close(stack->layers);
    if (stack->memory) backend_free(backend, MEMORY_WORKSPACE, stack->memory, stack->memory_bytes);
    if (stack->error && backend->cuda->stack_error == stack->error) backend->cuda->stack_error = NULL;
    backend_free(backend, MEMORY_PINNED, stack->error, sizeof *stack->error);
    mem_free(stack);
}

/* ---- the op -------------------------------------------------------------------------------------------------------
 */

int cuda_op_decode_stack(struct backend *backend, const struct op_decode_stack_args *args, struct err *err) {
    struct cuda_stack *stack = (struct cuda_stack *)(void *)args->stack;
    if (((uintptr_t)args->x | (uintptr_t)args->logits) & 15)
        return err_set(err, ERR_INVALID, "decode_stack: x and logits must lie on 16 bytes");
    if (args->rows > STACK_ROWS_SERVED) return stack_layers_run(backend, stack->layers, args, err);
    struct stack_args a = stack->args;
    a.x = args->x;
    a.logits = args->logits;
    a.positions = CUDA_STEP(backend, int32_t, args->positions);
    a.kv_len = CUDA_STEP(backend, int32_t, args->shape.kv_len);
    a.slots = CUDA_STEP(backend, int32_t, args->shape.slots);
    a.rows = args->rows;
    return CUDA_TRY(backend, stack_launch(&a, backend->cuda->sms, backend->cuda->stream), err);
}
