/* test_sched_pages.c: cases of the scheduler with too few pages or slots: who waits, who is preempted, who goes first.
 */
#include "tests/unit/sched_world.h"

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
        cmocka_unit_test(hold_and_wait_ends),
        cmocka_unit_test(preempted_requests_go_on_where_they_were),
        cmocka_unit_test(equal_requests_are_served_in_order),
        cmocka_unit_test(the_engine_may_end_a_sequence),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
