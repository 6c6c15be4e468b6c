/* How much memory a model takes, computed before any is asked for. */
#include "engine/base/arith.h"
#include "engine/model/model_private.h"

/* A multiple of every vector access and of a TMA descriptor's base. */
#define WORKSPACE_ALIGN ((size_t)256)

/* Changes of the page table that one step memory takes beside the rest: every sequence a new page, and one newcomer
 * with all its pages. A step with more sends them ahead in pieces. */
static int32_t deltas_max(const struct model_limits *limits) {
    int64_t most = (int64_t)limits->max_num_seqs + i32_ceil_div(limits->max_model_len, limits->page_size);
    return most < INT32_MAX / 2 ? (int32_t)most : INT32_MAX / 2;
}

/* Carves [count, bytes] off the workspace; `ok` keeps the first overflow. */
struct carver {
    size_t at;
    bool ok;
};

static size_t carve(struct carver *c, size_t rows, size_t cols, size_t bytes) {
    size_t begin = c->at, need;
    c->ok = c->ok && size_mul(rows, cols, &need) && size_mul(need, bytes, &need) &&
            size_align(need, WORKSPACE_ALIGN, &need) && size_add(c->at, need, &c->at);
    return begin;
}

/* The inputs of the largest step, array by array as inputs_fill and model_launch lay them out. */
static bool step_layout(const struct model_spec *spec, const struct backend *backend, const struct model_limits *limits,
                        struct workspace *out) {
    struct carver c = {0, true};
    size_t tokens = (size_t)limits->max_num_batched_tokens, seqs = (size_t)limits->max_num_seqs + 1;
    size_t pack = sample_pack_bytes(backend, limits->max_num_seqs);
    size_t plan = attention_plan_step_bytes(backend, limits->max_num_batched_tokens, limits->max_num_seqs,
                                            limits->max_model_len, spec->n_heads, spec->head_dim);
    out->deltas_max = deltas_max(limits);
    carve(&c, tokens, 3, sizeof(int32_t));
    carve(&c, seqs, 6, sizeof(int32_t)); /* slots, q_start, kv_len, logit_rows, pages copied from and to */
    carve(&c, 2, 1, plan);
    carve(&c, 1, 1, pack);
    if (pack) carve(&c, seqs, MODEL_LIST_BYTES_ROW, 1); /* else the host's lists are read where they are */
    carve(&c, (size_t)out->deltas_max, sizeof(struct kv_table_delta), 1);
    carve(&c, 32, WORKSPACE_ALIGN, 1); /* roundings */
    out->step_bytes = c.at;
    return c.ok;
}

bool workspace_layout(const struct model_spec *spec, const struct backend *backend, const struct model_limits *limits,
                      struct workspace *out) {
    struct carver c = {0, true};
    size_t act = (size_t)dtype_info(backend_info(backend)->activation_dtype)->block_bytes;
    size_t tokens = (size_t)limits->max_num_batched_tokens, rows = (size_t)limits->max_num_seqs;
    size_t hidden = (size_t)spec->hidden, q = (size_t)spec->n_heads * (size_t)spec->head_dim;
    out->x = carve(&c, tokens, hidden, act);
    out->h = carve(&c, tokens, hidden, act);
    const int32_t ranks = limits->ranks > 1 ? limits->ranks : 1;
    for (int32_t i = 0, count = ranks > 1 ? 3 : spec_branches_apart(spec, 1) ? 1 : 0; i < 3; i++)
        out->delta[i] = carve(&c, i < count ? tokens : 0, hidden, act);
    size_t shared = c.at;
    out->qkv = carve(&c, tokens, (size_t)spec_qkv_rows(spec), act);
    out->attn = carve(&c, tokens, q, act);
    size_t attention_end = c.at;
    c.at = shared;
    out->gate_up = carve(&c, tokens, 2 * (size_t)spec->ffn, act);
    out->act = carve(&c, tokens, (size_t)spec->ffn, act);
    if (c.at < attention_end) c.at = attention_end;
    out->rows_x = carve(&c, rows, hidden, act);
    out->rows_attn = carve(&c, rows, q, act);
    out->logits = carve(&c, rows, (size_t)ranks * (size_t)shard_vocab(spec->vocab, ranks), sizeof(float));
    out->rope = carve(&c, (size_t)limits->max_model_len, (size_t)spec->rotary_dim, sizeof(float));
    out->pages = carve(&c, rows + 1, (size_t)i32_ceil_div(limits->max_model_len, limits->page_size), sizeof(int32_t));
    out->attention_bytes = attention_workspace_bytes(backend, limits->max_num_batched_tokens, limits->max_num_seqs,
                                                     limits->max_model_len, spec->n_heads, spec->head_dim);
    out->attention = carve(&c, 1, 1, out->attention_bytes);
    out->sample_bytes = sample_workspace_bytes(backend, limits->max_num_seqs, spec->vocab);
    out->sample = carve(&c, 1, 1, out->sample_bytes);
    out->bytes = c.at;
    return step_layout(spec, backend, limits, out) && c.ok;
}

bool kv_page_bytes(const struct model_spec *spec, const struct model_limits *limits, size_t *layer_page_bytes) {
    size_t bytes = 2 * (size_t)dtype_info(limits->kv_dtype)->block_bytes;
    return size_mul(bytes, (size_t)spec->n_kv_heads, &bytes) && size_mul(bytes, (size_t)spec->head_dim, &bytes) &&
           size_mul(bytes, (size_t)limits->page_size, &bytes) && size_align(bytes, 64, layer_page_bytes);
}

static int limits_check(const struct backend *backend, const struct model_limits *limits, struct err *err) {
    if (limits->max_num_seqs < 1 || limits->max_num_batched_tokens < 1 || limits->max_model_len < 1 ||
        limits->page_size < 1)
        return err_set(err, ERR_INVALID, "a limit of the model is below 1");
    if (!(backend_info(backend)->kv_dtypes >> limits->kv_dtype & 1))
        return err_set(err, ERR_UNSUPPORTED, "a KV cache of %s is not supported on this device (its own is %s)",
                       dtype_info(limits->kv_dtype)->name, dtype_info(backend_info(backend)->kv_dtype_default)->name);
    return 0;
}

int model_memory_plan(const struct model_files *files, const struct backend *backend, const struct model_limits *limits,
                      struct model_memory *out, struct err *err) {
    struct workspace workspace;
    struct model_spec spec;
    size_t layer_page_bytes;
    int rc = limits_check(backend, limits, err);
    if (rc == 0) rc = shard_spec(files, backend, limits->ranks, &spec, err);
    if (rc) return rc;
    if (!workspace_layout(&spec, backend, limits, &workspace) || !kv_page_bytes(&spec, limits, &layer_page_bytes) ||
        !size_mul(layer_page_bytes, (size_t)files->spec.layers, &out->kv_page_bytes))
        return err_set(err, ERR_INVALID, "the limits asked for need more memory than can be counted");
    out->kv_token_bytes = out->kv_page_bytes / (size_t)limits->page_size;
    enum dtype dtype;
    if ((rc = weights_plan(files, backend, limits->ranks, &out->weight_bytes, &dtype, err))) return rc;
    const struct comm_options comm = {.ranks = limits->ranks > 1 ? limits->ranks : 1};
    size_t step_bytes, state = sample_state_bytes(backend, limits->max_num_seqs + 1, files->spec.vocab);
    if (!size_add(workspace.bytes, state, &out->workspace_bytes) ||
        !backend_step_device_bytes(backend, workspace.step_bytes, &step_bytes) ||
        !size_add(out->workspace_bytes, step_bytes, &out->workspace_bytes) ||
        !size_add(out->workspace_bytes, stack_bytes(&spec, backend, limits, dtype), &out->workspace_bytes) ||
        !size_add(out->workspace_bytes, comm_device_bytes(&comm, backend), &out->workspace_bytes))
        return err_set(err, ERR_INVALID, "the limits asked for need more memory than can be counted");
    return 0;
}
