/* The sampling part of ops.h: checks of the contract, then the device's own. */
#include <math.h>

#include "kernels/ops_private.h"

size_t sample_state_bytes(const struct backend *backend, int32_t slots, int32_t vocab) {
    return backend->table->sample_state_bytes(backend, slots, vocab);
}

size_t sample_workspace_bytes(const struct backend *backend, int32_t rows_max, int32_t vocab) {
    return backend->table->sample_workspace(backend, rows_max, vocab);
}

size_t sample_pack_bytes(const struct backend *backend, int32_t rows_padded) {
    return backend->table->sample_pack_bytes(backend, rows_padded);
}

int sample_state_open(struct backend *backend, int32_t slots, int32_t vocab, struct sample_state **out,
                      struct err *err) {
    CONTRACT(slots > 0 && vocab > 0);
    return backend->table->sample_state_open(backend, slots, vocab, out, err);
}

void sample_state_close(struct backend *backend, struct sample_state *state) {
    if (state) backend->table->sample_state_close(backend, state);
}

int32_t *sample_state_last_token(struct backend *backend, struct sample_state *state) {
    return backend->table->sample_last_token(state);
}

static bool ids_valid(const int32_t *ids, int32_t count, int32_t vocab) {
    if (count < 0 || (count > 0 && !ids)) return false;
    for (int32_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= vocab) return false;
    return true;
}

int op_sample_reset(struct backend *backend, const struct op_sample_reset_args *args, struct err *err) {
    CONTRACT(args->state && args->slot >= 0 && args->slot < args->state->slots);
    CONTRACT(!args->track || ids_valid(args->prompt, args->prompt_count, args->state->vocab));
    CONTRACT(!args->track || ids_valid(args->output, args->output_count, args->state->vocab));
    return backend->table->sample_reset(backend, args, err);
}

/* NaN fails every comparison here. */
static bool params_valid(const struct sample_params *p) {
    return p->temperature >= 0.0f && isfinite(p->temperature) && p->top_k >= 0 && p->top_p > 0.0f && p->top_p <= 1.0f &&
           p->min_p >= 0.0f && p->min_p <= 1.0f && p->typical_p > 0.0f && p->typical_p <= 1.0f &&
           p->repetition_penalty > 0.0f && isfinite(p->repetition_penalty) && isfinite(p->presence_penalty) &&
           isfinite(p->frequency_penalty);
}

static bool row_valid(const struct sample_row *row, const struct sample_state *state) {
    return params_valid(&row->params) && row->slot >= 0 && row->slot < state->slots && row->logprobs >= -1 &&
           row->logprobs <= SAMPLE_LOGPROBS_MAX && ids_valid(row->banned, row->banned_count, state->vocab) &&
           ids_valid(row->bias_ids, row->bias_count, state->vocab) && (row->bias_count == 0 || row->bias);
}

int sample_pack(struct backend *backend, const struct sample_pack_args *args, struct arena *arena,
                const struct sample_batch **out, struct err *err) {
    CONTRACT(args->state && args->rows >= 0 && args->rows_padded >= args->rows);
    CONTRACT(args->rows == 0 || (args->row && args->results));
    CONTRACT(args->rows == args->rows_padded || (args->dummy_slot >= 0 && args->dummy_slot < args->state->slots));
    for (int32_t r = 0; r < args->rows; r++) CONTRACT(row_valid(&args->row[r], args->state));
    return backend->table->sample_pack(backend, args, arena, out, err);
}

int op_sample(struct backend *backend, const struct op_sample_args *args, struct err *err) {
    CONTRACT(args->state && args->vocab == args->state->vocab && args->batch);
    const int32_t rows = args->batch->rows_padded;
    CONTRACT(rows == 0 || aligned4(args->logits));
    CONTRACT(args->logits_stride >= args->vocab);
    CONTRACT(aligned4(args->workspace) &&
             args->workspace_bytes >= backend->table->sample_workspace(backend, rows, args->vocab));
    int64_t begin = launch_begin(backend);
    int rc = backend->table->sample(backend, args, err);
    launch_end(backend, OP_SAMPLE, begin, 4 * (int64_t)rows * args->vocab, 0);
    return rc;
}
