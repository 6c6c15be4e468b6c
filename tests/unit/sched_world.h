/* sched_world.h: a scheduler with a fake sampler, for the tests that include it. Tokens come from a fixed rule (100 +
 * position), so that a case can name the one that stops it. Every turn ends with a deep audit. */
#ifndef QUIRE_TESTS_SCHED_WORLD_H
#define QUIRE_TESTS_SCHED_WORLD_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <cmocka.h>

#include "engine/base/mem.h"
#include "engine/sched/sched.h"

#define VOCAB         1000
#define STEPS_AT_ONCE 2

struct world {
    struct sched *sched;
    struct arena arenas[STEPS_AT_ONCE];
    struct sample_result results[STEPS_AT_ONCE][64];
    const struct batch *batches[STEPS_AT_ONCE]; /* oldest first */
    int32_t in_flight, lookahead;
    uint64_t turn;
    int64_t now_ns;
    uint64_t next_id;
    int32_t nan_slot; /* -1: none; else its rows answer -1 */
    /* what came out, by request id and sample */
    enum finish_reason finish[64][8];
    int32_t tokens[64][8], events[64][8], preemptions[64][8], cached[64][8];
    int32_t order[512], order_count; /* request ids in the order of their ends */
    int32_t last_ids[64][8][64];
};

static inline struct sched_options options_small(void) {
    return (struct sched_options){.max_num_seqs = 4,
                                  .max_num_batched_tokens = 16,
                                  .max_queued_requests = 8,
                                  .max_model_len = 64,
                                  .page_size = 4,
                                  .pages_total = 33,
                                  .vocab = VOCAB,
                                  .prefix_caching = true,
                                  .hash_key = {3, 4}};
}

static inline void world_open(struct world *w, const struct sched_options *options) {
    struct err err = {0};
    memset(w, 0, sizeof *w);
    w->next_id = 1;
    w->lookahead = options->lookahead;
    w->nan_slot = -1;
    for (int i = 0; i < STEPS_AT_ONCE; i++) arena_init(&w->arenas[i]);
    if (sched_open(options, &w->sched, &err) != 0) fail_msg("%s", err.text);
}

static inline void world_audit(struct world *w) {
    struct err err = {0};
    if (sched_audit(w->sched, true, &err) != 0) fail_msg("%s", err.text);
}

static inline void world_close(struct world *w) {
    world_audit(w);
    sched_close(w->sched);
    for (int i = 0; i < STEPS_AT_ONCE; i++) arena_deinit(&w->arenas[i]);
}

struct ask {
    int32_t prompt, max_tokens, n, min_tokens;
    int32_t first_id; /* of the prompt: ids count up from it; 0: 1 */
    int32_t eos, stop;
    unsigned flags;
    int64_t deadline_ns;
    uint64_t salt;
};

static inline struct request *ask_build(struct world *w, struct ask a) {
    static int32_t prompt[256];
    struct request_parts parts = {.prompt = prompt,
                                  .prompt_count = a.prompt,
                                  .eos_ids = &a.eos,
                                  .eos_count = a.eos != 0,
                                  .stop_ids = &a.stop,
                                  .stop_id_count = a.stop != 0};
    struct request *r = NULL;
    struct err err = {0};
    for (int32_t i = 0; i < a.prompt; i++) prompt[i] = (a.first_id ? a.first_id : 1) + i;
    parts.head = (struct request){.flags = a.flags,
                                  .id = w->next_id++,
                                  .deadline_ns = a.deadline_ns,
                                  .n = a.n ? a.n : 1,
                                  .max_tokens = a.max_tokens,
                                  .min_tokens = a.min_tokens,
                                  .logprobs = -1,
                                  .salt = {a.salt, 0},
                                  .sampling = {.temperature = 0, .top_p = 1, .typical_p = 1, .repetition_penalty = 1}};
    if (request_build(&parts, &r, &err) != 0 || request_check(r, r->bytes, VOCAB, &err) != 0) fail_msg("%s", err.text);
    return r;
}

/* Returns the id, or 0 and the refusal in `err`. */
static inline uint64_t submit(struct world *w, struct ask a, struct err *err) {
    struct request *r = ask_build(w, a);
    uint64_t id = r->id;
    if (sched_submit(w->sched, r, NULL, w->now_ns, err) == 0) return id;
    mem_free(r);
    return 0;
}

static inline void drain_outputs(struct world *w) {
    const struct sched_output *out;
    int32_t count = sched_outputs(w->sched, &out);
    for (int32_t i = 0; i < count; i++) {
        struct sequence *seq = out[i].seq;
        uint64_t id = seq->request->id;
        int32_t k = seq->sample_index;
        w->events[id][k]++;
        w->tokens[id][k] += out[i].token != NULL;
        assert_int_equal(w->finish[id][k], FINISH_NONE);
        if (!out[i].finished) continue;
        w->finish[id][k] = seq->finish;
        w->preemptions[id][k] = seq->preemptions;
        w->cached[id][k] = seq->cached_count;
        w->order[w->order_count++] = (int32_t)id;
        for (int32_t t = 0; t < seq->output_count && t < 64; t++) w->last_ids[id][k][t] = sched_output_ids(seq)[t];
        sched_collect(w->sched, seq);
    }
}

static inline void complete_oldest(struct world *w) {
    const struct batch *b = w->batches[0];
    struct sample_result *results = w->results[b->step % STEPS_AT_ONCE];
    for (int32_t r = 0; r < b->rows; r++)
        results[r] =
            (struct sample_result){.id = b->sampling[r].slot == w->nan_slot ? -1 : 100 + b->sampling[r].position};
    w->batches[0] = w->batches[1];
    w->in_flight--;
    sched_complete(w->sched, b, results, w->now_ns);
    drain_outputs(w);
    world_audit(w);
}

/* Builds a step, and completes one when as many as allowed are under way. Returns the batch, NULL when none was built.
 */
static inline const struct batch *turn(struct world *w) {
    struct arena *arena = &w->arenas[w->turn++ % STEPS_AT_ONCE];
    arena_reset(arena);
    w->now_ns += 1000;
    const struct batch *b = sched_next_batch(w->sched, arena, w->now_ns);
    drain_outputs(w);
    world_audit(w);
    if (b) w->batches[w->in_flight++] = b;
    if (w->in_flight > w->lookahead || (!b && w->in_flight > 0)) complete_oldest(w);
    return b;
}

static inline void run_to_end(struct world *w, int32_t steps_max) {
    while (!sched_idle(w->sched)) {
        assert_true(steps_max-- > 0);
        turn(w);
    }
    drain_outputs(w);
}

static inline void expect_all_pages_back(struct world *w) {
    struct sched_stats s;
    sched_stats(w->sched, &s);
    assert_int_equal(s.pages_held, 0);
    assert_int_equal(s.pages_free + s.pages_cached, s.pages_total);
    assert_int_equal(s.running + s.waiting, 0);
}

#endif
