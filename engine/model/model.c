/* A model's life on one device, and a step's frame around the pass: resets, page table, page copies, results. */
#include "engine/model/model.h"

#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/check.h"
#include "engine/base/mem.h"
#include "engine/model/model_private.h"

/* ---- life -------------------------------------------------------------------------------------------------------- */

static int workspace_open(struct model *model, const struct model_files *files, struct err *err) {
    void *p;
    int rc = backend_alloc(model->backend, MEMORY_WORKSPACE, model->at.bytes, &p, err);
    if (rc) return rc;
    model->workspace = p;

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
    return sample_state_open(model->backend, model->limits.max_num_seqs, model->sample_vocab, &model->sample_state,
                             err);
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
    rc = comm_open_local(&model->comm, err);
    if (rc == 0) rc = weights_bind(model, files, options, err);
    if (rc == 0) rc = workspace_open(model, files, err);
    if (rc == 0) rc = kv_open(model, err);
    return rc ? rc : results_open(model, err);
}

int model_set_sample_vocab(struct model *model, int32_t vocab, struct err *err) {
    if (vocab < 1 || vocab > model->spec.vocab)
        return err_set(err, ERR_INVALID, "the tokenizer knows %d tokens, the model only %d", vocab, model->spec.vocab);
    if (vocab == model->sample_vocab) return 0;
    sample_state_close(model->backend, model->sample_state);
    model->sample_state = NULL;
    model->sample_vocab = vocab;
    return sample_state_open(model->backend, model->limits.max_num_seqs, vocab, &model->sample_state, err);
}

int model_open(struct model_files *files, struct backend *backend, const struct model_options *options,
               struct model **out, struct err *err) {
    struct model *model = mem_zalloc(1, sizeof *model);
    model->backend = backend;
    model->spec = files->spec;
    model->limits = options->limits;
    model->pages_total = options->pages_total;
    model->alive_ns = options->alive_ns;
    model->sample_vocab = options->sample_vocab ? options->sample_vocab : model->spec.vocab;
    model->act_bytes = (size_t)dtype_info(backend_info(backend)->activation_dtype)->block_bytes;
    if (options->limits.page_size > 0)
        model->max_pages = i32_ceil_div(options->limits.max_model_len, options->limits.page_size);
    int rc = model_fill(model, files, options, err);
    if (rc) {
        model_close(model);
        return rc;
    }
    *out = model;
    return 0;
}

void model_close(struct model *model) {
    if (!model) return;
    if (model->sample_state) sample_state_close(model->backend, model->sample_state);
    backend_free(model->backend, MEMORY_PINNED, model->results, model->results_bytes);
    backend_free(model->backend, MEMORY_KV, model->kv, model->kv_bytes);
    backend_free(model->backend, MEMORY_WORKSPACE, model->workspace, model->at.bytes);
    weights_free(model);
    comm_close(model->comm);
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

/* Runs of neighbouring entries go up in one copy: a new sequence brings all its pages at once. */
static int page_table_update(struct model *model, const struct batch *batch, struct arena *arena, struct err *err) {
    int32_t *table = model_at(model, model->at.pages); /* device */
    int32_t *run = batch->delta_count ? ARENA_ARRAY(arena, int32_t, batch->delta_count) : NULL;
    int32_t i = 0;
    while (i < batch->delta_count) {
        const struct page_delta *first = &batch->deltas[i];
        int32_t count = 0;
        CHECK(first->slot >= 0 && first->slot < model->limits.max_num_seqs);
        while (i + count < batch->delta_count && first[count].slot == first->slot &&
               first[count].index == first->index + count) {
            CHECK(first[count].page >= 0 && first[count].page < model->pages_total);
            run[count] = first[count].page;
            count++;
        }
        CHECK(first->index >= 0 && first->index + count <= model->max_pages);
        int rc = backend_upload(model->backend, table + (size_t)first->slot * (size_t)model->max_pages + first->index,
                                run, (size_t)count * sizeof *run, err);
        if (rc) return rc;
        i += count;
    }
    return 0;
}

static int pages_copy(struct model *model, const struct batch *batch, struct arena *arena, struct err *err) {
    if (batch->copy_count == 0) return 0;
    int32_t *src = ARENA_ARRAY(arena, int32_t, batch->copy_count),
            *dst = ARENA_ARRAY(arena, int32_t, batch->copy_count);
    for (int32_t i = 0; i < batch->copy_count; i++) {
        src[i] = batch->copies[i].src;
        dst[i] = batch->copies[i].dst;
    }
    int rc = 0;
    for (int32_t layer = 0; rc == 0 && layer < model->spec.layers; layer++) {
        const struct op_kv_copy_args args = {model_kv_layer(model, layer), src, dst, batch->copy_count};
        rc = op_kv_copy(model->backend, &args, err);
    }
    return rc;
}

static struct sample_result *results_of(struct model *model, const struct batch *batch) {
    return model->results + (batch->step & 1) * (size_t)model->limits.max_num_seqs;
}

static int rows_sample(struct model *model, const struct batch *batch, struct arena *arena, struct err *err) {
    if (batch->rows == 0) return 0;
    const struct sample_pack_args pack = {.state = model->sample_state,
                                          .row = batch->sampling,
                                          .rows = batch->rows,
                                          .rows_padded = batch->rows,
                                          .results = results_of(model, batch)};
    struct op_sample_args args = {.state = model->sample_state,
                                  .logits = model_at(model, model->at.logits),
                                  .logits_stride = model->spec.vocab,
                                  .vocab = model->sample_vocab,
                                  .workspace = model_at(model, model->at.sample),
                                  .workspace_bytes = model->at.sample_bytes};
    int rc = sample_pack(model->backend, &pack, arena, &args.batch, err);
    return rc ? rc : op_sample(model->backend, &args, err);
}

int model_launch(struct model *model, const struct batch *batch, struct arena *arena, struct err *err) {
    CHECK(batch->tokens <= model->limits.max_num_batched_tokens && batch->seqs <= model->limits.max_num_seqs &&
          batch->rows <= model->limits.max_num_seqs);
    int rc = slots_reset(model, batch, err);
    if (rc == 0) rc = page_table_update(model, batch, arena, err);
    if (rc == 0) rc = pages_copy(model, batch, arena, err);
    if (rc == 0 && batch->tokens > 0) rc = model_forward(model, batch, arena, err);
    return rc ? rc : rows_sample(model, batch, arena, err);
}

int model_wait(struct model *model, const struct batch *batch, const struct sample_result **results, struct err *err) {
    int rc = backend_sync(model->backend, err);
    if (rc == 0) *results = results_of(model, batch);
    return rc;
}

const float *model_logits(struct model *model, const struct batch *batch) {
    return model_at(model, model->at.logits);
}
