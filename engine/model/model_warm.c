/* The first launches, before anybody waits for them. */
#include "engine/model/model_private.h"

/* Tokens of the steps: a decode, and prompts whose products take another kernel each. */
static const int32_t warm_tokens[] = {1, 16, 128, 1024};

/* One sequence of so many tokens in the dummy slot, whose only page is page 0. */
static int warm_step(struct model *model, int32_t tokens, uint64_t step, struct arena *arena, struct err *err) {
    const int32_t slot = model_dummy_slot(model), last = tokens - 1;
    const int32_t q_start[2] = {0, tokens};
    const struct sample_row row = {.params = {.top_p = 1, .typical_p = 1, .repetition_penalty = 1},
                                   .slot = slot,
                                   .position = tokens,
                                   .logprobs = -1};
    int32_t *ids = ARENA_ARRAY(arena, int32_t, tokens), *slots = ARENA_ARRAY(arena, int32_t, tokens);
    int32_t *positions = ARENA_ARRAY(arena, int32_t, tokens);
    const struct sample_result *results;
    for (int32_t i = 0; i < tokens; i++) {
        ids[i] = i % model->sample_vocab;
        slots[i] = slot;
        positions[i] = i;
    }
    const struct batch batch = {.step = step,
                                .tokens = tokens,
                                .seqs = 1,
                                .rows = 1,
                                .token_ids = ids,
                                .token_slots = slots,
                                .positions = positions,
                                .slots = &slot,
                                .q_start = q_start,
                                .kv_len = &tokens,
                                .logit_rows = &last,
                                .sampling = &row};
    int rc = model_launch(model, &batch, arena, err);
    return rc ? rc : model_wait(model, &batch, &results, err);
}

int model_warm(struct model *model, struct err *err) {
    struct arena arena;
    int rc = 0;
    if (!backend_info(model->backend)->asynchronous) return 0;
    arena_init(&arena);
    for (size_t i = 0; rc == 0 && i < sizeof warm_tokens / sizeof *warm_tokens; i++) {
        if (warm_tokens[i] > model->limits.max_num_batched_tokens || warm_tokens[i] > model->limits.max_model_len)
            break;
        rc = warm_step(model, warm_tokens[i], i, &arena, err);
        arena_reset(&arena);
    }
    arena_deinit(&arena);
    const struct model_stats recorded = {.graph_captures = model->stats.graph_captures,
                                         .graph_capture_ns = model->stats.graph_capture_ns};
    model->stats = recorded; /* of steps that somebody asked for */
    return rc;
}
