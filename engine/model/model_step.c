/* A step's inputs on their way to the device. The order of allocations is fixed and so, for a decode step of so many
 * padded rows, are their sizes: a recorded step finds the new values where it found the old ones. What varies (page
 * copies, changes of the page table) is allocated by model.c behind all this. */
#include <string.h>

#include "engine/base/check.h"
#include "engine/model/model_private.h"

bool batch_is_decode(const struct batch *batch) {
    if (batch->tokens == 0 || batch->tokens != batch->seqs || batch->rows != batch->seqs) return false;
    for (int32_t i = 0; i < batch->rows; i++)
        if (batch->logit_rows[i] != i) return false;
    return true;
}

struct sample_result *model_results(const struct model *model, const struct batch *batch) {
    return model->results + (batch->step & 1) * (size_t)model->limits.max_num_seqs;
}

/* An array of step memory: the batch's values, then `pad` up to `padded`. The memory is sized for every step that the
 * limits allow, so it is never full here. */
static const int32_t *array_put(struct model *model, const int32_t *from, int32_t count, int32_t padded, int32_t pad) {
    int32_t *to = backend_step_alloc(model->backend, (size_t)padded * sizeof *to);
    CHECK_MSG(to, "step memory of %zu bytes is full", model->at.step_bytes);
    memcpy(to, from, (size_t)count * sizeof *to);
    for (int32_t i = count; i < padded; i++) to[i] = pad;
    return to;
}

/* A padded sequence has one token: its rows go on from the last one's end. */
static const int32_t *starts_put(struct model *model, const struct batch *batch, int32_t seqs) {
    int32_t *to = backend_step_alloc(model->backend, ((size_t)seqs + 1) * sizeof *to);
    CHECK_MSG(to, "step memory of %zu bytes is full", model->at.step_bytes);
    memcpy(to, batch->q_start, ((size_t)batch->seqs + 1) * sizeof *to);
    for (int32_t i = batch->seqs; i < seqs; i++) to[i + 1] = to[i] + 1;
    return to;
}

static int plans_put(struct model *model, struct arena *arena, struct inputs *in, struct err *err) {
    const struct model_spec *spec = &model->spec;
    bool full = false, windowed = false;
    for (int32_t i = 0; i < spec->layers; i++) *(spec->windowed[i] ? &windowed : &full) = true;
    struct attention_plan_options options = {
        .shape = {in->q_start, in->kv_len, in->slots, in->seqs, in->tokens},
        .n_heads = spec->n_heads,
        .n_kv_heads = spec->n_kv_heads,
        .head_dim = spec->head_dim,
        .page_size = model->limits.page_size,
    };
    if (full && !(in->plan = attention_plan_make(model->backend, &options, arena)))
        return err_set(err, ERR_FATAL, "step memory of %zu bytes is full", model->at.step_bytes);
    options.window = spec->window;
    if (windowed && !(in->window_plan = attention_plan_make(model->backend, &options, arena)))
        return err_set(err, ERR_FATAL, "step memory of %zu bytes is full", model->at.step_bytes);
    return 0;
}

int inputs_fill(struct model *model, const struct batch *batch, int32_t rows, struct arena *arena, struct inputs *out,
                struct err *err) {
    int32_t padded = rows - batch->rows, dummy = model_dummy_slot(model);
    *out = (struct inputs){
        .tokens = batch->tokens + padded, .seqs = batch->seqs + padded, .rows = rows, .decode = batch_is_decode(batch)};
    CHECK(padded == 0 || (padded > 0 && out->decode));
    out->token_ids = array_put(model, batch->token_ids, batch->tokens, out->tokens, 0);
    out->token_slots = array_put(model, batch->token_slots, batch->tokens, out->tokens, dummy);
    out->positions = array_put(model, batch->positions, batch->tokens, out->tokens, 0);
    out->slots = array_put(model, batch->slots, batch->seqs, out->seqs, dummy);
    out->kv_len = array_put(model, batch->kv_len, batch->seqs, out->seqs, 1);
    out->q_start = starts_put(model, batch, out->seqs);
    if (!out->decode) out->logit_rows = array_put(model, batch->logit_rows, batch->rows, batch->rows, 0);
    int rc = plans_put(model, arena, out, err);
    if (rc || rows == 0) return rc;
    const struct sample_pack_args pack = {.state = model->sample_state,
                                          .row = batch->sampling,
                                          .rows = batch->rows,
                                          .rows_padded = rows,
                                          .dummy_slot = dummy,
                                          .results = model_results(model, batch)};
    return sample_pack(model->backend, &pack, arena, &out->sampling, err);
}
