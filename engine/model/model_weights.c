/* From tensors in files to weights on the device. q, k and v become one matrix, gate and up another; each is prepared
 * and its pages of the file dropped before the next is touched, so that two copies never lie in memory at once. */
#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/mem.h"
#include "engine/model/model_private.h"

/* ---- matrices ---------------------------------------------------------------------------------------------------- */

static const struct fused_row {
    enum tensor_role parts[3];
    int32_t part_count;
    unsigned flags;
} fused_rows[FUSED_COUNT] = {
    [FUSED_EMBED] = {{ROLE_EMBED}, 1, WEIGHT_LOOKUP},
    [FUSED_OUTPUT] = {{ROLE_OUTPUT}, 1, 0},
    [FUSED_QKV] = {{ROLE_Q, ROLE_K, ROLE_V}, 3, 0},
    [FUSED_O] = {{ROLE_O}, 1, 0},
    [FUSED_GATE_UP] = {{ROLE_GATE, ROLE_UP}, 2, WEIGHT_GATED},
    [FUSED_DOWN] = {{ROLE_DOWN}, 1, 0},
};

struct fused_parts {
    struct weight_part parts[3];
    struct model_tensor tensors[3];
    int32_t count;
    int64_t cols;
    unsigned flags;
};

static int fused_find(const struct model_files *files, enum fused fused, int32_t layer, const struct shard *shard,
                      struct fused_parts *out, struct err *err) {
    const struct fused_row *row = &fused_rows[fused];
    out->count = row->part_count;
    out->flags = row->flags;
    for (int32_t i = 0; i < row->part_count; i++) {
        int rc = model_files_tensor(files, row->parts[i], layer, &out->tensors[i], err);
        if (rc) return rc;
        shard_tensor(files, row->parts[i], shard, &out->tensors[i], &out->parts[i]);
        out->cols = out->tensors[i].cols;
    }
    return 0;
}

/* Calls `visit` for every fused matrix of a model, in the order in which they lie in most files. */
typedef int fused_visit(void *context, enum fused fused, int32_t layer, struct err *err);

static int fused_each(const struct model_spec *spec, fused_visit *visit, void *context, struct err *err) {
    int rc = visit(context, FUSED_EMBED, 0, err);
    for (int32_t layer = 0; rc == 0 && layer < spec->layers; layer++)
        for (int fused = FUSED_QKV; rc == 0 && fused < FUSED_COUNT; fused++)
            rc = visit(context, (enum fused)fused, layer, err);
    if (rc == 0 && !spec->tied_output) rc = visit(context, FUSED_OUTPUT, 0, err);
    return rc;
}

struct planner {
    const struct model_files *files;
    const struct backend *backend;
    struct shard shard; /* rank 0's is the largest */
    size_t bytes;
    bool mixed, any; /* dtypes of the layers' matrices */
    enum dtype dtype;
};

/* Plain dtypes are one: a device keeps them in its own. */
static void dtypes_note(struct planner *p, const struct fused_parts *parts) {
    for (int32_t i = 0; i < parts->count; i++) {
        enum dtype dtype = parts->parts[i].dtype;
        if (dtype == DTYPE_F32 || dtype == DTYPE_F16) dtype = DTYPE_BF16;
        if (p->any && dtype != p->dtype) p->mixed = true;
        p->dtype = dtype;
        p->any = true;
    }
}

static int plan_one(void *context, enum fused fused, int32_t layer, struct err *err) {
    struct planner *p = context;
    struct fused_parts parts;
    size_t bytes;
    int rc = fused_find(p->files, fused, layer, &p->shard, &parts, err);
    if (rc) return rc;
    if (fused != FUSED_EMBED && fused != FUSED_OUTPUT) dtypes_note(p, &parts);
    if (!weight_prepared_bytes(p->backend, parts.parts, parts.count, parts.cols, parts.flags, &bytes) ||
        !size_add(p->bytes, bytes, &p->bytes))
        return err_set_field(err, ERR_UNSUPPORTED, parts.tensors[0].name,
                             "%s: %s: a matrix of %s cannot be multiplied "
                             "on this device",
                             p->files->label, parts.tensors[0].name, dtype_info(parts.tensors[0].dtype)->name);
    return 0;
}

int weights_plan(const struct model_files *files, const struct backend *backend, int32_t ranks, size_t *bytes,
                 enum dtype *dtype, struct err *err) {
    struct model_spec spec;
    int rc = shard_spec(files, backend, ranks, &spec, err);
    if (rc) return rc;
    struct planner p = {
        .files = files, .backend = backend, .shard = {0, ranks > 1 ? ranks : 1}, .bytes = vectors_bytes(&spec)};
    rc = fused_each(&files->spec, plan_one, &p, err);
    *bytes = p.bytes;
    *dtype = p.mixed ? DTYPE_COUNT : p.dtype;
    return rc;
}

struct binder {
    struct model *model;
    struct model_files *files;
    const struct model_options *options;
    uint64_t made; /* matrices so far: each dummy has its own seed */
};

static struct weight **fused_place(struct model *model, enum fused fused, int32_t layer) {
    switch (fused) {
    case FUSED_EMBED:
        return &model->embed;
    case FUSED_OUTPUT:
        return &model->output;
    case FUSED_QKV:
        return &model->layers[layer].qkv;
    case FUSED_O:
        return &model->layers[layer].o;
    case FUSED_GATE_UP:
        return &model->layers[layer].gate_up;
    default:
        return &model->layers[layer].down;
    }
}

static int prepare(struct binder *b, const struct fused_parts *parts, struct weight **out, struct err *err) {
    return weight_prepare(b->model->backend, parts->parts, parts->count, parts->cols, parts->flags, out, err);
}

/* Random values of the same types, made by the device where it can. */
static int prepare_dummy(struct binder *b, struct fused_parts *parts, struct weight **out, struct err *err) {
    size_t bytes = 0, at = 0;
    uint64_t seed = b->options->seed * 0x9e3779b97f4a7c15u + (++b->made << 32);
    for (int32_t i = 0; i < parts->count; i++) bytes += parts->tensors[i].bytes;
    int rc = weight_dummy(b->model->backend, parts->parts, parts->count, parts->cols, parts->flags, seed, out, err);
    if (rc != ERR_UNSUPPORTED) return rc;
    unsigned char *scratch = mem_try_alloc(bytes);
    if (!scratch) return err_set(err, ERR_NOMEM, "no memory for %zu bytes of random weights", bytes);
    for (int32_t i = 0; i < parts->count; i++) {
        dummy_fill(&parts->parts[i], parts->cols, seed + ((uint64_t)i << 24), scratch + at);
        parts->parts[i].data = scratch + at;
        parts->parts[i].stride_bytes = 0;
        at += parts->tensors[i].bytes;
    }
    rc = prepare(b, parts, out, err);
    mem_free(scratch);
    return rc;
}

/* The whole tensor, of which the rank may have read a part. */
static void tensor_release(const struct model_files *files, enum fused fused, int32_t part, int32_t layer) {
    struct model_tensor tensor;
    if (model_files_tensor(files, fused_rows[fused].parts[part], layer, &tensor, NULL) == 0)
        model_files_release(files, &tensor);
}

static int bind_one(void *context, enum fused fused, int32_t layer, struct err *err) {
    struct binder *b = context;
    struct fused_parts parts = {0};
    size_t bytes = 0;
    struct weight **place = fused_place(b->model, fused, layer);
    int rc = fused_find(b->files, fused, layer, &b->model->shard, &parts, err);
    if (rc == 0) rc = b->options->dummy_weights ? prepare_dummy(b, &parts, place, err) : prepare(b, &parts, place, err);
    if (rc == 0 && weight_prepared_bytes(b->model->backend, parts.parts, parts.count, parts.cols, parts.flags, &bytes))
        b->model->weight_bytes += bytes;
    /* Others may still read it; what they find dropped they read from the page cache again. */
    const bool last = b->model->shard.rank == b->model->shard.ranks - 1;
    for (int32_t i = 0; rc == 0 && i < parts.count && !b->options->dummy_weights && last; i++)
        tensor_release(b->files, fused, i, layer);
    return rc;
}

/* ---- vectors ----------------------------------------------------------------------------------------------------- */

static float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000u) << 16, exponent = h >> 10 & 31u, mantissa = h & 1023u, bits;
    float out;
    if (exponent == 0) { /* zero and subnormals */
        out = (float)mantissa * 0x1p-24f;
        return sign ? -out : out;
    }
    bits = sign | (exponent == 31 ? 255u : exponent + 112u) << 23 | mantissa << 13;
    memcpy(&out, &bits, 4);
    return out;
}

static float element_to_float(enum dtype dtype, const unsigned char *data, size_t i) {
    float out = 0;
    if (dtype == DTYPE_F32) {
        memcpy(&out, data + 4 * i, 4);
    } else {
        uint16_t h;
        memcpy(&h, data + 2 * i, 2);
        uint32_t bits = (uint32_t)h << 16;
        if (dtype == DTYPE_F16) return half_to_float(h);
        memcpy(&out, &bits, 4);
    }
    return out;
}

/* Where each vector of the model goes; fields of a layer by offset, `after` appends to the vector of the role before it
 * (the biases of a fused matrix are one vector). */
static const struct vector_row {
    enum tensor_role role;
    size_t field;
    bool after, norm;
} vector_rows[] = {
    {ROLE_ATTN_NORM, offsetof(struct layer_weights, attn_norm), false, true},
    {ROLE_Q_BIAS, offsetof(struct layer_weights, qkv_bias), false, false},
    {ROLE_K_BIAS, 0, true, false},
    {ROLE_V_BIAS, 0, true, false},
    {ROLE_Q_NORM, offsetof(struct layer_weights, q_norm), false, true},
    {ROLE_K_NORM, offsetof(struct layer_weights, k_norm), false, true},
    {ROLE_O_BIAS, offsetof(struct layer_weights, o_bias), false, false},
    {ROLE_FFN_NORM, offsetof(struct layer_weights, ffn_norm), false, true},
    {ROLE_GATE_BIAS, offsetof(struct layer_weights, gate_up_bias), false, false},
    {ROLE_UP_BIAS, 0, true, false},
    {ROLE_DOWN_BIAS, offsetof(struct layer_weights, down_bias), false, false},
};
#define VECTOR_ROWS  (sizeof vector_rows / sizeof *vector_rows)
#define VECTOR_ALIGN ((size_t)16) /* floats: 64 bytes */

static size_t vector_pad(size_t floats) {
    return (floats + VECTOR_ALIGN - 1) & ~(VECTOR_ALIGN - 1);
}

/* Bytes of all vectors. The spec's bounds keep this far from overflow: 512 layers of less than 2^24 floats. */
size_t vectors_bytes(const struct model_spec *spec) {
    size_t layer = 0;
    for (size_t i = 0; i < VECTOR_ROWS; i++) {
        int64_t rows, cols;
        if (!role_wanted(spec, vector_rows[i].role)) continue;
        role_shape(spec, vector_rows[i].role, &rows, &cols);
        if (!vector_rows[i].after) layer = vector_pad(layer);
        layer += (size_t)cols;
    }
    return (vector_pad(layer) * (size_t)spec->layers + vector_pad((size_t)spec->hidden)) * sizeof(float);
}

/* `to` in the host's copy of the block. */
static int vector_read(const struct binder *b, enum tensor_role role, bool norm, int32_t layer, float *to,
                       int64_t *count, struct err *err) {
    struct model_tensor tensor;
    struct weight_part part;
    int rc = model_files_tensor(b->files, role, layer, &tensor, err);
    if (rc) return rc;
    shard_tensor(b->files, role, &b->model->shard, &tensor, &part);
    for (int64_t i = 0; i < tensor.cols; i++)
        to[i] = b->options->dummy_weights ? (norm ? 1 - b->model->spec.norm_weight_offset : 0)
                                          : element_to_float(tensor.dtype, tensor.data, (size_t)i);
    *count = tensor.cols;
    return 0;
}

/* The block is put together on the host and goes up in one piece. */
static int vectors_bind(struct binder *b, struct err *err) {
    struct model *model = b->model;
    float *host = mem_zalloc(model->vector_bytes, 1);
    size_t at = 0;
    int64_t count = 0;
    int rc = 0;
    for (int32_t layer = 0; layer < model->spec.layers; layer++) {
        at = vector_pad(at);
        for (size_t i = 0; rc == 0 && i < VECTOR_ROWS; i++) {
            const struct vector_row *row = &vector_rows[i];
            if (!role_wanted(&model->spec, row->role)) continue;
            if (!row->after) {
                at = vector_pad(at);
                *(float **)((char *)&model->layers[layer] + row->field) = model->vectors + at;
            }
            rc = vector_read(b, row->role, row->norm, layer, host + at, &count, err);
            at += (size_t)count;
        }
    }
    model->output_norm = model->vectors + vector_pad(at);
    if (rc == 0) rc = vector_read(b, ROLE_OUTPUT_NORM, true, 0, host + vector_pad(at), &count, err);
    if (rc == 0) rc = backend_upload(model->backend, model->vectors, host, model->vector_bytes, err);
    mem_free(host);
    return rc;
}

/* ---- the whole --------------------------------------------------------------------------------------------------- */

int weights_bind(struct model *model, struct model_files *files, const struct model_options *options, struct err *err) {
    struct binder b = {model, files, options, 0};
    void *p;
    size_t bytes = vectors_bytes(&model->spec);
    int rc = backend_alloc(model->backend, MEMORY_WEIGHTS, bytes, &p, err);
    if (rc) return rc;
    model->vectors = p;
    model->vector_bytes = model->weight_bytes = bytes;
    rc = fused_each(&model->spec, bind_one, &b, err);
    if (model->spec.tied_output) model->output = model->embed;
    return rc ? rc : vectors_bind(&b, err);
}

void weights_free(struct model *model) {
    if (model->output != model->embed) weight_free(model->backend, model->output);
    weight_free(model->backend, model->embed);
    for (int32_t i = 0; i < model->spec.layers; i++) {
        weight_free(model->backend, model->layers[i].qkv);
        weight_free(model->backend, model->layers[i].o);
        weight_free(model->backend, model->layers[i].gate_up);
        weight_free(model->backend, model->layers[i].down);
    }
    backend_free(model->backend, MEMORY_WEIGHTS, model->vectors, model->vector_bytes);
}
