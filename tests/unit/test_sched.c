/* test_sched.c: plain cases of the scheduler, most of them failures that other servers had. Tokens come from a fixed
 * rule (100 + position), so that a case can name the one that stops it. The simulator does the rest. */
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

static struct sched_options options_small(void) {
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

static void world_open(struct world *w, const struct sched_options *options) {
    struct err err = {0};
    memset(w, 0, sizeof *w);
    w->next_id = 1;
    w->lookahead = options->lookahead;
    w->nan_slot = -1;
    for (int i = 0; i < STEPS_AT_ONCE; i++) arena_init(&w->arenas[i]);
    if (sched_open(options, &w->sched, &err) != 0) fail_msg("%s", err.text);
}

static void world_audit(struct world *w) {
    struct err err = {0};
    if (sched_audit(w->sched, true, &err) != 0) fail_msg("%s", err.text);
}

static void world_close(struct world *w) {
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

static struct request *ask_build(struct world *w, struct ask a) {
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
static uint64_t submit(struct world *w, struct ask a, struct err *err) {
    struct request *r = ask_build(w, a);
    uint64_t id = r->id;
    if (sched_submit(w->sched, r, NULL, w->now_ns, err) == 0) return id;
    mem_free(r);
    return 0;
}

static void drain_outputs(struct world *w) {
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

static void complete_oldest(struct world *w) {
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
static const struct batch *turn(struct world *w) {
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

static void run_to_end(struct world *w, int32_t steps_max) {
    while (!sched_idle(w->sched)) {
        assert_true(steps_max-- > 0);
        turn(w);
    }
    drain_outputs(w);
}

static void expect_all_pages_back(struct world *w) {
    struct sched_stats s;
    sched_stats(w->sched, &s);
    assert_int_equal(s.pages_held, 0);
    assert_int_equal(s.pages_free + s.pages_cached, s.pages_total);
    assert_int_equal(s.running + s.waiting, 0);
}

/* ---- the door ---------------------------------------------------------------------------------------------------- */

static void refuses_what_never_fits(void **state) {
    struct world w;
    struct err err = {0};
    struct sched_options o = options_small();
    (void)state;
    o.pages_total = 9; /* 8 usable: 32 tokens */
    world_open(&w, &o);
    assert_int_equal(submit(&w, (struct ask){.prompt = 30, .max_tokens = 20}, &err), 0);
    assert_int_equal(err.code, ERR_INVALID);
    assert_non_null(strstr(err.text, "needs 13 pages of 4 tokens, the pool has 8"));
    assert_int_equal(submit(&w, (struct ask){.prompt = 64, .max_tokens = 1}, &err), 0);
    assert_int_equal(err.code, ERR_INVALID);
    assert_non_null(strstr(err.text, "64"));
    for (int i = 0; i < 5; i++) assert_int_not_equal(submit(&w, (struct ask){.prompt = 3, .max_tokens = 4}, &err), 0);
    run_to_end(&w, 100); /* the ones behind it were not held up */
    assert_int_equal(w.order_count, 5);
    assert_int_not_equal(submit(&w, (struct ask){.prompt = 29, .max_tokens = 4}, &err), 0); /* exactly the pool */
    run_to_end(&w, 100);
    expect_all_pages_back(&w);
    world_close(&w);
}

static void the_queue_is_bounded(void **state) {
    struct world w;
    struct err err = {0};
    struct sched_options o = options_small();
    (void)state;
    world_open(&w, &o);
    for (int i = 0; i < 8; i++) assert_int_not_equal(submit(&w, (struct ask){.prompt = 3, .max_tokens = 4}, &err), 0);
    assert_int_equal(submit(&w, (struct ask){.prompt = 3, .max_tokens = 4}, &err), 0);
    assert_int_equal(err.code, ERR_EXHAUSTED);
    turn(&w); /* four of them run now */
    for (int i = 0; i < 4; i++) assert_int_not_equal(submit(&w, (struct ask){.prompt = 3, .max_tokens = 4}, &err), 0);
    assert_int_equal(submit(&w, (struct ask){.prompt = 3, .max_tokens = 4}, &err), 0);
    run_to_end(&w, 200);
    assert_int_equal(w.order_count, 12);
    expect_all_pages_back(&w);
    world_close(&w);
}

/* ---- steps ------------------------------------------------------------------------------------------------------- */

static void decodes_go_first_and_the_budget_holds(void **state) {
    struct world w;
    struct err err = {0};
    struct sched_options o = options_small();
    (void)state;
    world_open(&w, &o);
    submit(&w, (struct ask){.prompt = 4, .max_tokens = 20, .first_id = 1}, &err);
    turn(&w);
    submit(&w, (struct ask){.prompt = 40, .max_tokens = 4, .first_id = 200}, &err);
    int32_t left = 40;
    while (left > 0) {
        const struct batch *b = turn(&w);
        assert_int_equal(b->decode_tokens, 1); /* the running one never waits for the long prompt */
        assert_true(b->tokens <= 16);
        assert_int_equal(b->positions[0], b->kv_len[0] - 1);
        assert_int_equal(b->rows, left > 15 ? 1 : 2); /* a chunk samples at the end of the prompt only */
        left -= b->prefill_tokens;
    }
    run_to_end(&w, 100);
    assert_int_equal(w.finish[1][0], FINISH_LENGTH);
    assert_int_equal(w.tokens[1][0], 20);
    assert_int_equal(w.tokens[2][0], 4);
    world_close(&w);
}

static void long_prompts_are_capped_a_step(void **state) {
    struct world w;
    struct err err = {0};
    struct sched_options o = options_small();
    (void)state;
    o.long_prefill_threshold = 6;
    world_open(&w, &o);
    submit(&w, (struct ask){.prompt = 20, .max_tokens = 2}, &err);
    submit(&w, (struct ask){.prompt = 5, .max_tokens = 2, .first_id = 300}, &err);
    const struct batch *b = turn(&w);
    assert_int_equal(b->seqs, 2);
    assert_int_equal(b->q_start[1], 6);
    assert_int_equal(b->q_start[2], 11);
    assert_int_equal(b->rows, 1);
    assert_int_equal(b->logit_rows[0], 10);
    run_to_end(&w, 100);
    world_close(&w);
}

static void a_prefix_hit_leaves_the_last_token(void **state) {
    struct world w;
    struct err err = {0};
    struct sched_options o = options_small();
    (void)state;
    world_open(&w, &o);
    submit(&w, (struct ask){.prompt = 16, .max_tokens = 2}, &err);
    run_to_end(&w, 20);
    submit(&w, (struct ask){.prompt = 16, .max_tokens = 2}, &err);
    const struct batch *b = turn(&w);
    assert_int_equal(b->prefill_tokens, 4); /* the last page is computed again, not written into */
    assert_int_equal(b->positions[0], 12);
    run_to_end(&w, 20);
    assert_int_equal(w.cached[2][0], 12);
    submit(&w, (struct ask){.prompt = 16, .max_tokens = 2, .salt = 9}, &err);
    submit(&w, (struct ask){.prompt = 16, .max_tokens = 2, .flags = REQUEST_NO_PREFIX_CACHE}, &err);
    run_to_end(&w, 20);
    assert_int_equal(w.cached[3][0], 0);
    assert_int_equal(w.cached[4][0], 0);
    sched_reset_prefix_cache(w.sched);
    submit(&w, (struct ask){.prompt = 16, .max_tokens = 2}, &err);
    run_to_end(&w, 20);
    assert_int_equal(w.cached[5][0], 0);
    expect_all_pages_back(&w);
    world_close(&w);
}

static void samples_share_the_prompt(void **state) {
    struct world w;
    struct err err = {0};
    struct sched_options o = options_small();
    (void)state;
    world_open(&w, &o);
    submit(&w, (struct ask){.prompt = 10, .max_tokens = 3, .n = 3}, &err);
    const struct batch *b = turn(&w);
    assert_int_equal(b->seqs, 1);
    b = turn(&w);
    assert_int_equal(b->seqs, 3);
    assert_int_equal(b->tokens, 3); /* the others compute the last prompt token only */
    assert_int_equal(b->copy_count, 2);
    assert_int_equal(b->copies[0].src, b->copies[1].src);
    assert_int_not_equal(b->copies[0].dst, b->copies[1].dst);
    struct sched_stats s;
    sched_stats(w.sched, &s);
    assert_int_equal(s.pages_held, 2 + 3);
    run_to_end(&w, 20);
    for (int k = 0; k < 3; k++) assert_int_equal(w.tokens[1][k], 3);
    expect_all_pages_back(&w);
    world_close(&w);
}

static void the_slot_is_reset_for_its_owner(void **state) {
    struct world w;
    struct err err = {0};
    struct sched_options o = options_small();
    (void)state;
    o.max_num_seqs = 1;
    world_open(&w, &o);
    struct request *r = ask_build(&w, (struct ask){.prompt = 5, .max_tokens = 2});
    r->sampling.presence_penalty = 1;
    assert_int_equal(sched_submit(w.sched, r, NULL, 0, &err), 0);
    submit(&w, (struct ask){.prompt = 6, .max_tokens = 1}, &err);
    const struct batch *b = turn(&w);
    assert_int_equal(b->reset_count, 1);
    assert_true(b->resets[0].track);
    assert_int_equal(b->resets[0].prompt_count, 5);
    assert_int_equal(b->resets[0].output_count, 0);
    assert_int_equal(b->delta_count, 2);
    b = turn(&w);
    assert_int_equal(b->reset_count, 0);
    b = turn(&w);
    assert_int_equal(b->reset_count, 1);
    assert_false(b->resets[0].track);
    run_to_end(&w, 10);
    world_close(&w);
}

/* ---- ends -------------------------------------------------------------------------------------------------------- */

static void stops_for_the_right_reason(void **state) {
    struct world w;
    struct err err = {0};
    struct sched_options o = options_small();
    (void)state;
    o.max_model_len = 24;
    world_open(&w, &o);
    /* the token drawn at position p is 100 + p */
    submit(&w, (struct ask){.prompt = 5, .max_tokens = 15, .eos = 107}, &err);
    submit(&w, (struct ask){.prompt = 5, .max_tokens = 15, .stop = 106}, &err);
    submit(&w, (struct ask){.prompt = 5, .max_tokens = 15, .eos = 107, .flags = REQUEST_IGNORE_EOS}, &err);
    submit(&w, (struct ask){.prompt = 5, .max_tokens = 4, .eos = 108}, &err);
    submit(&w, (struct ask){.prompt = 20, .max_tokens = 40}, &err);
    submit(&w, (struct ask){.prompt = 5, .max_tokens = 15, .eos = 107, .min_tokens = 3}, &err);
    run_to_end(&w, 200);
    assert_int_equal(w.finish[1][0], FINISH_STOP);
    assert_int_equal(w.tokens[1][0], 3); /* 105, 106 and the end id itself */
    assert_int_equal(w.last_ids[1][0][2], 107);
    assert_int_equal(w.finish[2][0], FINISH_STOP);
    assert_int_equal(w.tokens[2][0], 2);
    assert_int_equal(w.finish[3][0], FINISH_LENGTH);
    assert_int_equal(w.tokens[3][0], 15);
    assert_int_equal(w.finish[4][0], FINISH_STOP); /* at the limit, but it ended by itself */
    assert_int_equal(w.tokens[4][0], 4);
    assert_int_equal(w.finish[5][0], FINISH_LENGTH); /* the context */
    assert_int_equal(w.tokens[5][0], 4);
    assert_int_equal(w.finish[6][0], FINISH_LENGTH); /* this sampler drew the banned id: not an end before min_tokens */
    world_close(&w);
}

static void ends_are_banned_before_min_tokens(void **state) {
    struct world w;
    struct err err = {0};
    struct sched_options o = options_small();
    (void)state;
    world_open(&w, &o);
    submit(&w, (struct ask){.prompt = 5, .max_tokens = 6, .min_tokens = 2, .eos = 7, .stop = 8}, &err);
    for (int i = 0; i < 6; i++) {
        const struct batch *b = turn(&w);
        assert_int_equal(b->sampling[0].position, 5 + i);
        assert_int_equal(b->sampling[0].banned_count, i < 2 ? 2 : 0);
        if (i >= 2) continue;
        assert_int_equal(b->sampling[0].banned[0], 7);
        assert_int_equal(b->sampling[0].banned[1], 8);
    }
    run_to_end(&w, 1);
    world_close(&w);
}

static void cancel_works_in_every_state(void **state) {
    struct world w;
    struct err err = {0};
    (void)state;
    for (int32_t when = 0; when < 12; when++) {
        for (int32_t lookahead = 0; lookahead < 2; lookahead++) {
            struct sched_options o = options_small();
            o.lookahead = lookahead;
            o.max_num_batched_tokens = 4; /* many chunks */
            world_open(&w, &o);
            for (int i = 0; i < 6; i++) submit(&w, (struct ask){.prompt = 9, .max_tokens = 3, .n = 2}, &err);
            for (int32_t i = 0; i < when; i++) turn(&w);
            for (uint64_t id = 1; id <= 6; id += 2) sched_cancel(w.sched, id, FINISH_ABORT);
            sched_cancel(w.sched, 1, FINISH_ABORT);   /* twice */
            sched_cancel(w.sched, 999, FINISH_ABORT); /* unknown */
            run_to_end(&w, 300);
            for (uint64_t id = 1; id <= 6; id++)
                for (int k = 0; k < 2; k++) {
                    assert_int_not_equal(w.finish[id][k], FINISH_NONE);
                    if (id % 2 == 0) assert_int_equal(w.finish[id][k], FINISH_LENGTH);
                    if (id % 2 == 0) assert_int_equal(w.tokens[id][k], 3);
                }
            expect_all_pages_back(&w);
            world_close(&w);
        }
    }
}

static void cancelled_in_the_queue_computes_nothing(void **state) {
    struct world w;
    struct err err = {0};
    struct sched_options o = options_small();
    struct sched_stats s;
    (void)state;
    world_open(&w, &o);
    for (int i = 0; i < 8; i++) submit(&w, (struct ask){.prompt = 9, .max_tokens = 3}, &err);
    sched_cancel_all(w.sched, FINISH_SHUTDOWN);
    assert_null(turn(&w));
    assert_int_equal(w.order_count, 8);
    assert_int_equal(w.finish[5][0], FINISH_SHUTDOWN);
    sched_stats(w.sched, &s);
    assert_int_equal(s.prompt_tokens_computed, 0);
    assert_true(sched_idle(w.sched));
    world_close(&w);
}

static void deadlines_end_waiting_and_running(void **state) {
    struct world w;
    struct err err = {0};
    struct sched_options o = options_small();
    (void)state;
    o.max_num_seqs = 2;
    world_open(&w, &o);
    assert_true(sched_next_deadline_ns(w.sched) == INT64_MAX);
    submit(&w, (struct ask){.prompt = 5, .max_tokens = 50, .deadline_ns = 5500}, &err);
    submit(&w, (struct ask){.prompt = 5, .max_tokens = 50}, &err);
    submit(&w, (struct ask){.prompt = 5, .max_tokens = 50, .deadline_ns = 3500}, &err);
    assert_true(sched_next_deadline_ns(w.sched) == 3500);
    for (int i = 0; i < 4; i++) turn(&w);
    assert_int_equal(w.finish[3][0], FINISH_DEADLINE);
    assert_int_equal(w.tokens[3][0], 0);
    assert_true(sched_next_deadline_ns(w.sched) == 5500);
    turn(&w), turn(&w);
    assert_int_equal(w.finish[1][0], FINISH_DEADLINE);
    assert_int_equal(w.tokens[1][0], 5);
    assert_true(sched_next_deadline_ns(w.sched) == INT64_MAX);
    run_to_end(&w, 100);
    assert_int_equal(w.finish[2][0], FINISH_LENGTH);
    world_close(&w);
}

static void nan_ends_one_sequence_only(void **state) {
    struct world w;
    struct err err = {0};
    struct sched_options o = options_small();
    (void)state;
    world_open(&w, &o);
    submit(&w, (struct ask){.prompt = 8, .max_tokens = 5}, &err);
    submit(&w, (struct ask){.prompt = 5, .max_tokens = 5, .first_id = 400}, &err);
    w.nan_slot = 0;
    turn(&w);
    w.nan_slot = -1;
    assert_int_equal(w.finish[1][0], FINISH_ERROR);
    assert_int_equal(w.tokens[1][0], 0);
    run_to_end(&w, 20);
    assert_int_equal(w.finish[2][0], FINISH_LENGTH);
    submit(&w, (struct ask){.prompt = 8, .max_tokens = 5}, &err);
    run_to_end(&w, 20);
    assert_int_equal(w.cached[3][0], 0); /* nothing of the bad one was shared */
    expect_all_pages_back(&w);
    world_close(&w);
}

static void one_ahead_drops_the_late_token(void **state) {
    struct world w;
    struct err err = {0};
    struct sched_options o = options_small();
    struct sched_stats s;
    (void)state;
    o.lookahead = 1;
    world_open(&w, &o);
    submit(&w, (struct ask){.prompt = 5, .max_tokens = 15, .eos = 106}, &err);
    const struct batch *b = turn(&w);
    assert_int_equal(b->token_ids[0], 1);
    b = turn(&w);
    assert_int_equal(b->token_ids[0], -1); /* not known yet: read on the device */
    assert_int_equal(w.tokens[1][0], 1);
    b = turn(&w);
    assert_non_null(b); /* built before the stop was known */
    assert_int_equal(w.finish[1][0], FINISH_STOP);
    assert_int_equal(w.tokens[1][0], 2);
    sched_stats(w.sched, &s);
    assert_int_equal(s.pages_held, 2); /* the step under way may write them */
    run_to_end(&w, 5);
    assert_int_equal(w.events[1][0], 2);
    expect_all_pages_back(&w);
    world_close(&w);
}

/* ---- too few pages ----------------------------------------------------------------------------------------------- */

/* Two requests that each hold pages and wait for one more (4 + 1 and 3 + 1 in 7 pages). */
static void hold_and_wait_ends(void **state) {
    struct world w;
    struct err err = {0};
    struct sched_options o = options_small();
    (void)state;
    o.pages_total = 8;
    world_open(&w, &o);
    submit(&w, (struct ask){.prompt = 16, .max_tokens = 5}, &err);
    submit(&w, (struct ask){.prompt = 12, .max_tokens = 5, .first_id = 500}, &err);
    run_to_end(&w, 60);
    assert_int_equal(w.finish[1][0], FINISH_LENGTH);
    assert_int_equal(w.finish[2][0], FINISH_LENGTH);
    assert_int_equal(w.preemptions[1][0], 0); /* the oldest is never the victim */
    expect_all_pages_back(&w);
    world_close(&w);
}

static void preempted_requests_go_on_where_they_were(void **state) {
    struct world w;
    struct err err = {0};
    (void)state;
    for (int32_t lookahead = 0; lookahead < 2; lookahead++) {
        struct sched_options o = options_small();
        struct sched_stats s;
        o.pages_total = 12;
        o.max_queued_requests = 40;
        o.lookahead = lookahead;
        world_open(&w, &o);
        for (int i = 0; i < 30; i++)
            assert_int_not_equal(submit(&w, (struct ask){.prompt = 6, .max_tokens = 20, .first_id = 1 + 20 * i}, &err),
                                 0);
        run_to_end(&w, 3000);
        sched_stats(w.sched, &s);
        assert_true(s.preemptions > 0);
        for (uint64_t id = 1; id <= 30; id++) {
            assert_int_equal(w.tokens[id][0], 20);
            assert_true(w.preemptions[id][0] <= 3);
            for (int t = 0; t < 20; t++) assert_int_equal(w.last_ids[id][0][t], 106 + t);
        }
        assert_int_equal(w.preemptions[1][0], 0);
        expect_all_pages_back(&w);
        world_close(&w);
    }
}

static void equal_requests_are_served_in_order(void **state) {
    struct world w;
    struct err err = {0};
    struct sched_options o = options_small();
    (void)state;
    world_open(&w, &o);
    for (int i = 0; i < 8; i++) submit(&w, (struct ask){.prompt = 6, .max_tokens = 4, .first_id = 1 + 20 * i}, &err);
    run_to_end(&w, 100);
    for (int i = 0; i < 8; i++) assert_int_equal(w.order[i], i + 1);
    world_close(&w);
}

static void the_engine_may_end_a_sequence(void **state) {
    struct world w;
    struct err err = {0};
    (void)state;
    for (int32_t lookahead = 0; lookahead < 2; lookahead++) {
        struct sched_options o = options_small();
        const struct sched_output *out;
        o.lookahead = lookahead;
        world_open(&w, &o);
        submit(&w, (struct ask){.prompt = 6, .max_tokens = 20}, &err);
        while (w.tokens[1][0] < 3) turn(&w);
        /* the sequence is only known from an output: let one more step complete by hand */
        struct arena arena;
        arena_init(&arena);
        const struct batch *b = w.in_flight ? w.batches[0] : sched_next_batch(w.sched, &arena, 0);
        struct sample_result result = {.id = 5};
        sched_complete(w.sched, b, &result, 0);
        w.in_flight = 0;
        assert_int_equal(sched_outputs(w.sched, &out), 1);
        struct sequence *seq = out[0].seq;
        sched_finish(w.sched, seq, FINISH_STOP);
        sched_finish(w.sched, seq, FINISH_ABORT); /* too late */
        assert_int_equal(seq->finish, FINISH_STOP);
        assert_int_equal(sched_outputs(w.sched, &out), 0);
        sched_collect(w.sched, seq);
        assert_true(sched_idle(w.sched));
        expect_all_pages_back(&w);
        world_close(&w);
        arena_deinit(&arena);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refuses_what_never_fits),
        cmocka_unit_test(the_queue_is_bounded),
        cmocka_unit_test(decodes_go_first_and_the_budget_holds),
        cmocka_unit_test(long_prompts_are_capped_a_step),
        cmocka_unit_test(a_prefix_hit_leaves_the_last_token),
        cmocka_unit_test(samples_share_the_prompt),
        cmocka_unit_test(the_slot_is_reset_for_its_owner),
        cmocka_unit_test(stops_for_the_right_reason),
        cmocka_unit_test(ends_are_banned_before_min_tokens),
        cmocka_unit_test(cancel_works_in_every_state),
        cmocka_unit_test(cancelled_in_the_queue_computes_nothing),
        cmocka_unit_test(deadlines_end_waiting_and_running),
        cmocka_unit_test(nan_ends_one_sequence_only),
        cmocka_unit_test(one_ahead_drops_the_late_token),
        cmocka_unit_test(hold_and_wait_ends),
        cmocka_unit_test(preempted_requests_go_on_where_they_were),
        cmocka_unit_test(equal_requests_are_served_in_order),
        cmocka_unit_test(the_engine_may_end_a_sequence),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
