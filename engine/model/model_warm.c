/* The first launches, before anybody waits for them. */
#include "engine/model/model_private.h"

/* Tokens of the steps: a decode, and prompts whose products take another kernel each. */
static const int32_t warm_tokens[] = {1, 16, 128, 1024};

/* A step of so many sequences of so many tokens each, all of them in the dummy slot, whose only page is page 0. */
static int warm_step(struct model *model, int32_t seqs, int32_t tokens, uint64_t step, struct err *err) {
    const int32_t slot = model_dummy_slot(model), total = seqs * tokens;
    struct arena arena;
    arena_init(&arena);
    int32_t *ids = ARENA_ARRAY(&arena, int32_t, total), *token_slots = ARENA_ARRAY(&arena, int32_t, total);
    int32_t *positions = ARENA_ARRAY(&arena, int32_t, total), *slots = ARENA_ARRAY(&arena, int32_t, seqs);
    int32_t *q_start = ARENA_ARRAY(&arena, int32_t, seqs + 1), *kv_len = ARENA_ARRAY(&arena, int32_t, seqs);
    int32_t *rows = ARENA_ARRAY(&arena, int32_t, seqs);
    struct sample_row *sampling = ARENA_ARRAY(&arena, struct sample_row, seqs);
    const struct sample_result *results;
    for (int32_t i = 0; i < total; i++) {
        ids[i] = i % model->sample_vocab;
        token_slots[i] = slot;
        positions[i] = i % tokens;
    }
    for (int32_t s = 0; s < seqs; s++) {
        slots[s] = slot;
        q_start[s] = s * tokens;
        kv_len[s] = tokens;
        rows[s] = (s + 1) * tokens - 1;
        sampling[s] = (struct sample_row){.params = {.top_p = 1, .typical_p = 1, .repetition_penalty = 1},
                                          .slot = slot,
                                          .position = tokens,
                                          .logprobs = -1};
    }
    q_start[seqs] = total;
    const struct batch batch = {.step = step,
                                .tokens = total,
                                .seqs = seqs,
                                .rows = seqs,
                                .token_ids = ids,
                                .token_slots = token_slots,
                                .positions = positions,
                                .slots = slots,
                                .q_start = q_start,
                                .kv_len = kv_len,
                                .logit_rows = rows,
                                .sampling = sampling};
    const struct model_stats before = model->stats;
    int rc = model_launch(model, &batch, &arena, err);
    if (rc == 0) rc = model_wait(model, &batch, &results, err);
    const struct model_stats after = model->stats;
    model->stats = before; /* of steps that somebody asked for, and of what is recorded */
    model->stats.graph_captures = after.graph_captures;
    model->stats.graph_capture_ns = after.graph_capture_ns;
    arena_deinit(&arena);
    return rc;
}

int model_warm(struct model *model, struct err *err) {
    int rc = 0;
    if (!backend_info(model->backend)->asynchronous) return 0;
    for (size_t i = 0; rc == 0 && i < sizeof warm_tokens / sizeof *warm_tokens; i++) {
        if (warm_tokens[i] > model->limits.max_num_batched_tokens || warm_tokens[i] > model->limits.max_model_len)
            break;
        rc = warm_step(model, 1, warm_tokens[i], i, err);
    }
    return rc;
}

/* Rows up to which decode steps are recorded while nothing else is to do; more rows wait for their first step. */
#define RECORD_ROWS_MAX 256

bool model_record_next(struct model *model, int *rc, struct err *err) {
    const int32_t most = model->limits.max_num_seqs < RECORD_ROWS_MAX ? model->limits.max_num_seqs : RECORD_ROWS_MAX;
    *rc = 0;
    while (model->graphs_on && model->rows_recorded < most) {
        int32_t rows = decode_rows(model->rows_recorded + 1, most);
        model->rows_recorded = rows;
        if (graph_is_recorded(model, rows)) continue;
        *rc = warm_step(model, rows, 1, 0, err);
        /* What nobody asked for ends no engine; but of several ranks the others have made the step's collectives. */
        if (*rc == ERR_NOMEM && model->shard.ranks == 1) {
            graphs_give_up(model, err);
            *rc = 0;
        }
        return true;
    }
    return false;
}
