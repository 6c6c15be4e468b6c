/* A model over several ranks: the same tokens as on one, whatever the step; and a rank that fails, comes late or is
 * elsewhere ends all of them in bounded time with a line that says so. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <cmocka.h>

#include "engine/base/clock.h"
#include "engine/batch_hash.h"
#include "engine/fault.h"
#include "engine/ranks.h"
#include "tests/unit/model_run.h"
#include "tests/unit/tiny_model.h"

/* ---- what ranks compare -------------------------------------------------------------------------------------------
 */

/* A batch of two sequences with everything that a batch can have; each change of one value must show. */
struct sample_world {
    struct batch batch;
    int32_t ids[5], token_slots[5], positions[5], slots[2], q_start[3], kv_len[2], rows[2], prompt[3], banned[2];
    int32_t bias_ids[2];
    float bias[2];
    struct sample_row sampling[2];
    struct slot_reset resets[1];
    struct page_delta deltas[2];
    struct page_copy copies[1];
};

static void batch_fill(struct sample_world *w) {
    *w = (struct sample_world){.ids = {5, 6, 7, -1, 9},
                               .token_slots = {0, 0, 0, 0, 1},
                               .positions = {0, 1, 2, 3, 8},
                               .slots = {0, 1},
                               .q_start = {0, 4, 5},
                               .kv_len = {4, 9},
                               .rows = {3, 4},
                               .prompt = {1, 2, 3},
                               .banned = {2, 4},
                               .bias_ids = {7, 8},
                               .bias = {0.5f, -1},
                               .deltas = {{0, 0, 3}, {1, 2, 4}},
                               .copies = {{3, 5}}};
    for (int i = 0; i < 2; i++)
        w->sampling[i] = (struct sample_row){.params = {.top_p = 1, .seed = 9},
                                             .slot = i,
                                             .logprobs = i - 1,
                                             .banned = w->banned,
                                             .banned_count = 2,
                                             .bias_ids = w->bias_ids,
                                             .bias = w->bias,
                                             .bias_count = 2};
    w->resets[0] = (struct slot_reset){.slot = 1, .track = true, .prompt = w->prompt, .prompt_count = 3};
    w->batch = (struct batch){.step = 4,
                              .tokens = 5,
                              .seqs = 2,
                              .rows = 2,
                              .token_ids = w->ids,
                              .token_slots = w->token_slots,
                              .positions = w->positions,
                              .slots = w->slots,
                              .q_start = w->q_start,
                              .kv_len = w->kv_len,
                              .logit_rows = w->rows,
                              .sampling = w->sampling,
                              .resets = w->resets,
                              .deltas = w->deltas,
                              .copies = w->copies,
                              .reset_count = 1,
                              .delta_count = 2,
                              .copy_count = 1};
}

static void test_batch_hash(void **state) {
    struct sample_world w, twin;
    batch_fill(&w);
    batch_fill(&twin);
    const uint64_t whole = batch_hash(&w.batch);
    assert_true(whole == batch_hash(&twin.batch)); /* other addresses, the same work */
    int32_t *const ints[] = {&w.ids[4],
                             &w.token_slots[1],
                             &w.positions[2],
                             &w.slots[1],
                             &w.q_start[1],
                             &w.kv_len[0],
                             &w.rows[0],
                             &w.prompt[2],
                             &w.banned[1],
                             &w.bias_ids[0],
                             &w.sampling[1].logprobs,
                             &w.sampling[0].position,
                             &w.resets[0].slot,
                             &w.deltas[1].page,
                             &w.copies[0].dst};
    for (size_t i = 0; i < sizeof ints / sizeof *ints; i++) {
        *ints[i] ^= 64;
        if (batch_hash(&w.batch) == whole) fail_msg("value %zu does not show", i);
        *ints[i] ^= 64;
    }
    w.bias[1] = -1.5f;
    assert_true(batch_hash(&w.batch) != whole);
    w.bias[1] = -1;
    w.batch.step++;
    assert_true(batch_hash(&w.batch) != whole);
    w.batch.step--;
    w.batch.delta_count--;
    assert_true(batch_hash(&w.batch) != whole);
}

static void test_results_hash(void **state) {
    struct sample_world w;
    struct sample_result results[2] = {{.id = 3, .logprob = 1}, {.id = 4, .logprob = -2, .rank = 1}};
    batch_fill(&w);
    const uint64_t whole = batch_results_hash(&w.batch, results);
    results[0].logprob = 7; /* nobody asked for it, and nobody wrote it */
    assert_true(batch_results_hash(&w.batch, results) == whole);
    results[1].logprob = -2.5f;
    assert_true(batch_results_hash(&w.batch, results) != whole);
    results[1].logprob = -2;
    results[0].id = 5;
    assert_true(batch_results_hash(&w.batch, results) != whole);
}

static void test_fault_parse(void **state) {
    static const char *const wrong[] = {"rank", "rank:1", "rank:1,step:2,", "rank:1,step:2,die", "rank:1,step:2 "};
    struct fault fault;
    struct err err = {0};
    assert_int_equal(fault_parse(NULL, &fault, &err), 0);
    assert_int_equal(fault.kind, FAULT_NONE);
    assert_int_equal(fault_parse("rank:1,step:20", &fault, &err), 0);
    assert_int_equal(fault.kind, FAULT_FAIL);
    assert_int_equal(fault.rank, 1);
    assert_int_equal(fault.step, 20);
    assert_int_equal(fault_parse("rank:0,step:3,stall", &fault, &err), 0);
    assert_int_equal(fault.kind, FAULT_STALL);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_int_equal(fault_parse(wrong[i], &fault, &err), ERR_INVALID);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_batch_hash), cmocka_unit_test(test_results_hash),
                                       cmocka_unit_test(test_fault_parse)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
