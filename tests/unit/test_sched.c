/* test_sched.c: plain cases of the scheduler: the door, the steps, the ends; most of them failures that other servers
 * had. The simulator does the rest. */
#include "tests/unit/sched_world.h"

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
    struct sched_stats stats;
    sched_stats(w.sched, &stats);
    assert_int_equal(stats.queued, 8);
    turn(&w); /* four of them run now */
    sched_stats(w.sched, &stats);
    assert_int_equal(stats.queued, 4);
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

static void steps_with_decodes_are_shorter(void **state) {
    struct world w;
    struct err err = {0};
    struct sched_options o = options_small();
    (void)state;
    o.max_num_mixed_tokens = 6;
    world_open(&w, &o);
    submit(&w, (struct ask){.prompt = 16, .max_tokens = 40, .first_id = 1}, &err);
    assert_int_equal(turn(&w)->tokens, 16); /* nobody waits: the whole budget */
    submit(&w, (struct ask){.prompt = 13, .max_tokens = 40, .first_id = 200}, &err);
    assert_int_equal(turn(&w)->tokens, 6);
    assert_int_equal(turn(&w)->tokens, 6);
    assert_int_equal(turn(&w)->tokens, 4);
    for (int i = 0; i < 2; i++) submit(&w, (struct ask){.prompt = 3, .max_tokens = 40, .first_id = 300 + i}, &err);
    while (turn(&w)->prefill_tokens > 0) continue;
    run_to_end(&w, 300);
    o.max_num_mixed_tokens = 2; /* less than the decodes: prompts go on all the same */
    world_close(&w);
    world_open(&w, &o);
    for (int i = 0; i < 3; i++) submit(&w, (struct ask){.prompt = 3, .max_tokens = 40, .first_id = 100 * i + 1}, &err);
    while (turn(&w)->decode_tokens < 3) continue;
    submit(&w, (struct ask){.prompt = 5, .max_tokens = 2, .first_id = 900}, &err);
    assert_int_equal(turn(&w)->tokens, 4);
    run_to_end(&w, 300);
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

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refuses_what_never_fits),
        cmocka_unit_test(the_queue_is_bounded),
        cmocka_unit_test(decodes_go_first_and_the_budget_holds),
        cmocka_unit_test(steps_with_decodes_are_shorter),
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
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
