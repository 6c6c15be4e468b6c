/* A model's life on one device, and a step's frame around the pass: resets, page table, page copies, results. */
#include "engine/model/model.h"

#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/check.h"
#include "engine/base/clock.h"
#include "engine/base/mem.h"
#include "engine/model/model_private.h"

/* Each part of a reserved piece begins at a multiple of this. */
#define RESERVE_ROUNDING ((size_t)512)

/* ---- life -------------------------------------------------------------------------------------------------------- */

/* The other ranks know of it and have tried it out before anything lies there. */
static int workspace_open(struct model *model, struct err *err) {
    void *p;
    int rc = backend_alloc(model->backend, MEMORY_WORKSPACE, model->at.bytes, &p, err);
    if (rc) return rc;
    model->workspace = p;
    rc = comm_share(model->comm, model->workspace, model->at.bytes, err);
    return rc ? rc : comm_warm(model->comm, err);
}

static int rope_open(struct model *model, const struct model_files *files, struct err *err) {
    int rc = 0;
    float *factors = NULL;
    struct model_tensor tensor;
    if (model_files_has(files, ROLE_ROPE_FACTORS, 0)) {
        rc = model_files_tensor(files, ROLE_ROPE_FACTORS, 0, &tensor, err);
        if (rc) return rc;
        factors = mem_alloc(tensor.bytes);
        memcpy(factors, tensor.data, tensor.bytes);
    }
    size_t bytes = (size_t)model->limits.max_model_len * (size_t)model->spec.rotary_dim * sizeof(float);
    float *table = mem_try_alloc(bytes);
    if (!table) rc = err_set(err, ERR_NOMEM, "no memory for %zu bytes of rope angles", bytes);
    if (table) rope_table_fill(&model->spec, factors, model->limits.max_model_len, table);
    if (table) rc = backend_upload(model->backend, model_at(model, model->at.rope), table, bytes, err);
    mem_free(table);
    mem_free(factors);
    return rc;
}

static int kv_open(struct model *model, struct err *err) {
    void *p;
    if (!kv_page_bytes(&model->spec, &model->limits, &model->kv_page_stride) ||
        !size_mul(model->kv_page_stride, (size_t)model->pages_total, &model->kv_layer_stride) ||
        !size_mul(model->kv_layer_stride, (size_t)model->spec.layers, &model->kv_bytes))
        return err_set(err, ERR_INVALID, "a KV pool of %d pages needs more memory than can be counted",
                       model->pages_total);
    int rc = backend_alloc(model->backend, MEMORY_KV, model->kv_bytes, &p, err);
    if (rc == 0) model->kv = p;
    return rc;
}

static int results_open(struct model *model, struct err *err) {
    void *p;
    model->results_bytes = 2 * (size_t)model->limits.max_num_seqs * sizeof *model->results;
    int rc = backend_alloc(model->backend, MEMORY_PINNED, model->results_bytes, &p, err);
    if (rc) return rc;
    model->results = p;
    return sample_state_open(model->backend, model->limits.max_num_seqs + 1, model->sample_vocab, &model->sample_state,
                             err);
}

/* One piece of device memory for each kind. The slack is for what an allocator rounds each of its parts up by. */
static int memory_reserve(struct model *model, const struct model_memory *memory, struct err *err) {
    size_t parts = 4 * (size_t)model->spec.layers + 64, slack = parts * RESERVE_ROUNDING;
    size_t kv = memory->kv_page_bytes * (size_t)model->pages_total;
    int rc = backend_reserve(model->backend, MEMORY_WEIGHTS, memory->weight_bytes + slack, err);
    if (rc == 0) rc = backend_reserve(model->backend, MEMORY_WORKSPACE, memory->workspace_bytes + slack, err);
    return rc ? rc : backend_reserve(model->backend, MEMORY_KV, kv + RESERVE_ROUNDING, err);
}

static int model_fill(struct model *model, struct model_files *files, const struct model_options *options,
                      struct err *err) {
    struct model_memory memory;
    int rc = model_memory_plan(files, model->backend, &model->limits, &memory, err); /* checks the limits too */
    if (rc) return rc;
    if (options->pages_total < 2) return err_set(err, ERR_INVALID, "a KV pool needs at least 2 pages");
    if (options->sample_vocab < 0 || options->sample_vocab > model->spec.vocab)
        return err_set(err, ERR_INVALID, "the tokenizer knows %d tokens, the model only %d", options->sample_vocab,
                       model->spec.vocab);
    CHECK(workspace_layout(&model->spec, model->backend, &model->limits, &model->at));
    size_t kv_bytes;
    if (!size_mul(memory.kv_page_bytes, (size_t)options->pages_total, &kv_bytes))
        return err_set(err, ERR_INVALID, "a KV pool of %d pages needs more memory than can be counted",
                       options->pages_total);
    rc = memory_reserve(model, &memory, err);
    if (rc == 0) rc = weights_bind(model, files, options, err);
    if (rc == 0) rc = workspace_open(model, err);
    if (rc == 0) rc = rope_open(model, files, err);
    if (rc == 0) rc = kv_open(model, err);
    if (rc == 0) rc = backend_step_open(model->backend, model->at.step_bytes, err);
    if (rc == 0 && !options->no_stack) rc = stack_open(model, err);
    return rc ? rc : results_open(model, err);
}

/* The rank's place, and what it computes of the whole. */
static int shard_settle(struct model *model, const struct model_files *files, const struct model_options *options,
                        struct err *err) {
    int rc = options->comm ? 0 : comm_open_local(&model->own_comm, err);
    if (rc) return rc;
    model->comm = options->comm ? options->comm : model->own_comm;
    model->shard = (struct shard){comm_rank(model->comm), comm_ranks(model->comm)};
    model->limits.ranks = model->shard.ranks;
    model->vocab_slice = shard_vocab(files->spec.vocab, model->shard.ranks);
    model->logits_stride = (int64_t)model->vocab_slice * model->shard.ranks;
    return shard_spec(files, model->backend, model->shard.ranks, &model->spec, err);
}

int model_set_sample_vocab(struct model *model, int32_t vocab, struct err *err) {
    if (vocab < 1 || vocab > model->spec.vocab)
        return err_set(err, ERR_INVALID, "the tokenizer knows %d tokens, the model only %d", vocab, model->spec.vocab);
    if (vocab == model->sample_vocab) return 0;
    graphs_free(model); /* recorded with the addresses of the old state */
    sample_state_close(model->backend, model->sample_state);
    model->sample_state = NULL;
    model->sample_vocab = vocab;
    return sample_state_open(model->backend, model->limits.max_num_seqs + 1, vocab, &model->sample_state, err);
}

int model_open(struct model_files *files, struct backend *backend, const struct model_options *options,
               struct model **out, struct err *err) {
    struct model *model = mem_zalloc(1, sizeof *model);
    model->backend = backend;
    model->spec = files->spec;
    model->limits = options->limits;
    model->pages_total = options->pages_total;
    model->alive_ns = options->alive_ns;
    model->graphs_on = backend_info(backend)->graphs && !options->eager;
    model->stack_on = !options->no_stack;
    model->sample_vocab = options->sample_vocab ? options->sample_vocab : model->spec.vocab;
    model->act_bytes = (size_t)dtype_info(backend_info(backend)->activation_dtype)->block_bytes;
    if (options->limits.page_size > 0)
        model->max_pages = i32_ceil_div(options->limits.max_model_len, options->limits.page_size);
    int rc = shard_settle(model, files, options, err);
    if (rc == 0) rc = model_fill(model, files, options, err);
    if (rc) {
        model_close(model);
        return rc;
    }
    *out = model;
    return 0;
}

void model_close(struct model *model) {
    if (!model) return;
    graphs_free(model);
    decode_stack_close(model->backend, model->stack);
    if (model->sample_state) sample_state_close(model->backend, model->sample_state);
    mem_free(model->logits_copy);
    backend_free(model->backend, MEMORY_PINNED, model->results, model->results_bytes);
    backend_free(model->backend, MEMORY_KV, model->kv, model->kv_bytes);
    backend_free(model->backend, MEMORY_WORKSPACE, model->workspace, model->at.bytes);
    weights_free(model);
    comm_close(model->own_comm);
    mem_free(model);
}

size_t model_weight_bytes(const struct model *model) {
    return model->weight_bytes;
}

/* ---- a step ------------------------------------------------------------------------------------------------------ */

static int slots_reset(struct model *model, const struct batch *batch, struct err *err) {
    int rc = 0;
    for (int32_t i = 0; rc == 0 && i < batch->reset_count; i++) {
        const struct slot_reset *reset = &batch->resets[i];
        const struct op_sample_reset_args args = {model->sample_state, reset->slot,   reset->track,
                                                  reset->prompt,       reset->output, reset->prompt_count,
                                                  reset->output_count};
        rc = op_sample_reset(model->backend, &args, err);
    }
    return rc;
}

/* Changed entries of the page table, in step memory. */
struct deltas {
    struct kv_table_delta *entries; /* [capacity] */
    int32_t *count;
    int32_t capacity;
};

static struct deltas deltas_put(struct model *model, const struct page_delta *from, int32_t count) {
    struct deltas d = {.capacity = count};
    if (count == 0) return d;
    d.entries = backend_step_alloc(model->backend, (size_t)count * sizeof *d.entries);
    d.count = backend_step_alloc(model->backend, sizeof *d.count);
    CHECK_MSG(d.entries && d.count, "step memory of %zu bytes is full", model->at.step_bytes);
    *d.count = count;
    for (int32_t i = 0; i < count; i++) {
        const struct page_delta *delta = &from[i];
        CHECK(delta->slot >= 0 && delta->slot < model->limits.max_num_seqs);
        CHECK(delta->index >= 0 && delta->index < model->max_pages);
        CHECK(delta->page >= 0 && delta->page < model->pages_total);
        d.entries[i] = (struct kv_table_delta){delta->slot, delta->index, delta->page};
    }
    return d;
}

static int table_update(struct model *model, const struct deltas *d, struct err *err) {
    if (d->capacity == 0) return 0;
    const struct op_table_update_args args = {.pages = model_at(model, model->at.pages),
                                              .slots = model->limits.max_num_seqs + 1,
                                              .max_pages = model->max_pages,
                                              .deltas = d->entries,
                                              .count = d->count,
                                              .capacity = d->capacity};
    return op_table_update(model->backend, &args, err);
}

/* Changes beyond what a step's memory is sized for (many newcomers at once, with many cached pages each) go ahead of
 * it. Returns how many went in *sent. */
static int deltas_ahead(struct model *model, const struct batch *batch, int32_t *sent, struct err *err) {
    *sent = 0;
    while (batch->delta_count - *sent > model->at.deltas_max) {
        int rc = backend_step_begin(model->backend, err);
        if (rc) return rc;
        struct deltas d = deltas_put(model, batch->deltas + *sent, model->at.deltas_max);
        rc = backend_step_commit(model->backend, err);
        if (rc == 0) rc = table_update(model, &d, err);
        if (rc) return rc;
        *sent += model->at.deltas_max;
    }
    return 0;
}

/* Pages to copy, in step memory: src [count], dst [count]. */
struct copies {
    int32_t *src, *dst, count;
};

static struct copies copies_put(struct model *model, const struct batch *batch) {
    struct copies c = {.count = batch->copy_count};
    if (c.count == 0) return c;
    CHECK(c.count <= model->limits.max_num_seqs);
    c.src = backend_step_alloc(model->backend, (size_t)c.count * sizeof *c.src);
    c.dst = backend_step_alloc(model->backend, (size_t)c.count * sizeof *c.dst);
    CHECK_MSG(c.src && c.dst, "step memory of %zu bytes is full", model->at.step_bytes);
    for (int32_t i = 0; i < c.count; i++) {
        c.src[i] = batch->copies[i].src;
        c.dst[i] = batch->copies[i].dst;
    }
    return c;
}

static int pages_copy(struct model *model, const struct copies *c, struct err *err) {
    int rc = 0;
    for (int32_t layer = 0; rc == 0 && c->count > 0 && layer < model->spec.layers; layer++) {
        const struct op_kv_copy_args args = {model_kv_layer(model, layer), c->src, c->dst, c->count};
        rc = op_kv_copy(model->backend, &args, err);
    }
    return rc;
}

/* Recorded steps have padded rows; nobody else needs them. */
static int32_t rows_padded(const struct model *model, const struct batch *batch) {
    if (!model->graphs_on || !batch_is_decode(batch)) return batch->rows;
    return decode_rows(batch->rows, model->limits.max_num_seqs);
}

/* Adds the time since *since_ns to *sum. */
static void lap(uint64_t *sum, int64_t *since_ns) {
    int64_t now_ns = clock_now_ns();
    *sum += (uint64_t)(now_ns - *since_ns);
    *since_ns = now_ns;
}

int model_launch(struct model *model, const struct batch *batch, struct arena *arena, struct err *err) {
    CHECK(batch->tokens <= model->limits.max_num_batched_tokens && batch->seqs <= model->limits.max_num_seqs &&
          batch->rows <= model->limits.max_num_seqs);
    struct inputs in = {0};
    int64_t since_ns = clock_now_ns();
    int32_t sent;
    int rc = deltas_ahead(model, batch, &sent, err);
    if (rc == 0) rc = backend_step_begin(model->backend, err);
    if (rc) return rc;
    if (batch->tokens > 0) rc = inputs_fill(model, batch, rows_padded(model, batch), arena, &in, err);
    struct deltas deltas = deltas_put(model, batch->deltas + sent, batch->delta_count - sent);
    struct copies copies = copies_put(model, batch);
    lap(&model->stats.inputs_ns, &since_ns);
    int commit = backend_step_commit(model->backend, rc ? NULL : err);
    if (rc || commit) return rc ? rc : commit;
    lap(&model->stats.commit_ns, &since_ns);
    rc = slots_reset(model, batch, err);
    if (rc == 0) rc = table_update(model, &deltas, err);
    if (rc == 0) rc = pages_copy(model, &copies, err);
    lap(&model->stats.ahead_ns, &since_ns);
    if (rc == 0 && in.decode) rc = model_decode(model, &in, err);
    if (rc == 0 && in.tokens > 0 && !in.decode) rc = model_forward(model, &in, err);
    if (rc == 0) rc = backend_fence(model->backend, (int)(batch->step & 1), err);
    lap(&model->stats.pass_ns, &since_ns);
    return rc;
}

int model_wait(struct model *model, const struct batch *batch, const struct sample_result **results, struct err *err) {
    int rc = backend_fence_wait(model->backend, (int)(batch->step & 1), err);
    if (rc == 0) *results = model_results(model, batch);
    return rc;
}

const float *model_logits(struct model *model, const struct batch *batch) {
    const float *logits = model_at(model, model->at.logits); /* [rows, vocab] f32 device */
    const size_t vocab = (size_t)model->spec.vocab, stride = (size_t)model->logits_stride, rows = (size_t)batch->rows;
    if (!backend_info(model->backend)->asynchronous && stride == vocab) return logits;
    if (!model->logits_copy)
        model->logits_copy = mem_zalloc((size_t)model->limits.max_num_seqs, stride * sizeof(float));
    if (backend_download(model->backend, model->logits_copy, logits, rows * stride * sizeof(float), NULL)) return NULL;
    for (size_t row = 1; row < rows && stride > vocab; row++)
        memmove(model->logits_copy + row * vocab, model->logits_copy + row * stride, vocab * sizeof(float));
    return model->logits_copy;
}

void model_stats(const struct model *model, struct model_stats *out) {
    *out = model->stats;
}

void model_set_modes(struct model *model, bool graphs, bool stack) {
    model->graphs_on = graphs && backend_info(model->backend)->graphs;
    model->stack_on = stack;
}

int32_t model_stack_rows(const struct model *model) {
    return decode_stack_rows(model->stack);
}
