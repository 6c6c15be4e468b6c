/* A model over several ranks: the same tokens as on one, whatever the step; and a rank that fails, comes late or is
 * elsewhere ends all of them in bounded time with a line that says so. QUIRE_TEST_DEVICE=cuda: over as many GPUs as
 * there are, in bf16, where the same numbers come out but for rounding. */
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
    static const char *const wrong[] = {
        "rank", "rank:1", "rank:1,step:2,", "rank:1,step:2,die", "rank:1,step:2 ", "rank:1,step:2,once:here"};
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
    assert_true(fault_comes(&fault, FAULT_STALL, 0, 3));
    assert_false(fault_comes(&fault, FAULT_STALL, 0, 4) || fault_comes(&fault, FAULT_STALL, 1, 3) ||
                 fault_comes(&fault, FAULT_FAIL, 0, 3));
    char name[] = "/tmp/quire-fault-XXXXXX", text[64];
    close(mkstemp(name));
    snprintf(text, sizeof text, "rank:2,step:5,once:%s", name);
    assert_int_equal(fault_parse(text, &fault, &err), 0);
    assert_false(fault_comes(&fault, FAULT_FAIL, 2, 4));
    assert_true(fault_comes(&fault, FAULT_FAIL, 2, 7));
    assert_false(fault_comes(&fault, FAULT_FAIL, 2, 8)); /* the file is gone */
    assert_int_not_equal(access(name, F_OK), 0);
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_int_equal(fault_parse(wrong[i], &fault, &err), ERR_INVALID);
}

/* ---- the same model over one and over several ranks ----------------------------------------------------------------
 */

enum { VOCAB = 211, SLOTS = 4, STEPS = 14 };

struct shape {
    const char *architecture;
    int n_heads, n_kv_heads, ffn, qkv_bias, qk_norm, tied;
    int32_t ranks[4]; /* 0: no more */
};
static const struct shape shapes[] = {
    {"LlamaForCausalLM", 8, 8, 96, 0, 0, 0, {2, 4, 8}},
    {"LlamaForCausalLM", 8, 2, 64, 0, 0, 1, {2, 4, 8}}, /* KV heads on two and on four ranks each */
    {"LlamaForCausalLM", 9, 3, 72, 0, 0, 1, {3, 9}},
    {"Qwen2ForCausalLM", 8, 4, 128, 1, 0, 1, {4, 8}},
    {"Qwen3ForCausalLM", 4, 1, 80, 0, 1, 0, {2, 4}},
};

static struct tiny_model tiny_of(const struct shape *shape) {
    if (run_on_cuda()) /* its attention has kernels for heads of 64 values and more */
        return (struct tiny_model){.architecture = shape->architecture,
                                   .extra = "",
                                   .layers = 3,
                                   .hidden = 256,
                                   .ffn = shape->ffn * 8,
                                   .n_heads = shape->n_heads,
                                   .n_kv_heads = shape->n_kv_heads,
                                   .head_dim = 64,
                                   .vocab = VOCAB,
                                   .qkv_bias = shape->qkv_bias,
                                   .qk_norm = shape->qk_norm,
                                   .tied = shape->tied,
                                   .dtype = TINY_BF16};
    return (struct tiny_model){.architecture = shape->architecture,
                               .extra = "",
                               .layers = 3,
                               .hidden = 64,
                               .ffn = shape->ffn,
                               .n_heads = shape->n_heads,
                               .n_kv_heads = shape->n_kv_heads,
                               .head_dim = 16,
                               .vocab = VOCAB,
                               .qkv_bias = shape->qkv_bias,
                               .qk_norm = shape->qk_norm,
                               .tied = shape->tied,
                               .dtype = TINY_BF16};
}

static const struct model_options tiny_options = {.limits = {.max_num_seqs = SLOTS,
                                                             .max_num_batched_tokens = 64,
                                                             .max_model_len = 128,
                                                             .page_size = 16,
                                                             .kv_dtype = DTYPE_F32},
                                                  .pages_total = 40};

static struct ranks *ranks_start(const struct model_files *files, int32_t count, int64_t timeout_ns) {
    struct ranks_options options = {
        .backend = run_device(2, CPU_ACTIVATIONS_F32), .count = count, .timeout_ns = timeout_ns};
    struct model_options model = tiny_options;
    struct ranks *ranks;
    struct err err = {0};
    for (int32_t i = 0; i < count; i++) options.ordinals[i] = i;
    if (run_on_cuda()) model.limits.kv_dtype = DTYPE_BF16;
    if (ranks_open(&options, &ranks, &err)) fail_msg("%d ranks: %s", count, err.text);
    if (ranks_load(ranks, (struct model_files *)files, &model, &err)) fail_msg("%d ranks: %s", count, err.text);
    if (ranks_warm(ranks, &err)) fail_msg("%d ranks: %s", count, err.text);
    return ranks;
}

/* What each step's rows drew, and their logits. */
struct trace {
    int32_t rows[STEPS], ids[STEPS][SLOTS];
    float logits[STEPS][SLOTS][VOCAB];
};

/* The work of one step: prompts whole and in pieces, decodes, and both at once. A decode is of the token that was drawn
 * last, unless rounding may have chosen another one (`forced`). */
static int32_t step_feeds(int32_t step, const int32_t *ids, bool forced, struct feed *feeds) {
    static const int32_t drawn = -1;
    const int32_t *last = forced ? &ids[step] : &drawn;
    switch (step) {
    case 0: /* a whole prompt; the first piece of another */
        feeds[0] = (struct feed){0, 0, 19, 1, ids};
        feeds[1] = (struct feed){1, 0, 33, 0, ids + 20};
        return 2;
    case 1: /* a decode beside the last piece */
        feeds[0] = (struct feed){0, 19, 1, 1, last};
        feeds[1] = (struct feed){1, 33, 30, 1, ids + 53};
        return 2;
    case 2: /* pieces alone: nothing is drawn */
        feeds[0] = (struct feed){2, 0, 7, 0, ids + 3};
        return 1;
    default:
        feeds[0] = (struct feed){0, 17 + step, 1, 1, last};
        feeds[1] = (struct feed){1, 60 + step, 1, 1, last};
        feeds[2] = step == 3 ? (struct feed){2, 7, 5, 1, ids + 10} : (struct feed){2, 8 + step, 1, 1, last};
        return 3;
    }
}

/* Rank 0's view; all other ranks must have the very same bits. */
static void step_record(const struct ranks *ranks, const struct batch *batch, const struct sample_result *results,
                        int32_t step, struct trace *trace) {
    trace->rows[step] = batch->rows;
    for (int32_t r = 0; r < ranks_count(ranks); r++) {
        const float *logits = model_logits(ranks_model(ranks, r), batch);
        for (int32_t row = 0; row < batch->rows; row++) {
            const float *from = logits + (size_t)row * VOCAB;
            if (r == 0) memcpy(trace->logits[step][row], from, sizeof trace->logits[step][row]);
            assert_memory_equal(trace->logits[step][row], from, sizeof trace->logits[step][row]);
        }
    }
    for (int32_t row = 0; row < batch->rows; row++) trace->ids[step][row] = results[row].id;
}

/* `ahead`: a step is launched before the one before it is waited for. Closes the ranks. */
static void trace_run(struct ranks *ranks, bool forced, bool ahead, struct trace *trace) {
    struct run book = {.limits = tiny_options.limits, .pages_total = tiny_options.pages_total, .next_page = 1};
    struct arena arenas[2] = {0};
    struct err err = {0};
    struct feed feeds[SLOTS];
    int32_t ids[100];
    const struct batch *batches[2];
    const struct sample_result *results;
    book.max_pages = book.limits.max_model_len / book.limits.page_size;
    book.pages = mem_zalloc((size_t)(SLOTS * book.max_pages), sizeof *book.pages);
    book.shared = mem_zalloc(SLOTS, sizeof *book.shared);
    for (int32_t i = 0; i < 100; i++) ids[i] = (i * 37 + 11) % VOCAB;
    for (int32_t step = 0; step <= STEPS; step++) {
        if (step < STEPS) {
            struct arena *arena = &arenas[step & 1];
            arena_reset(arena);
            batches[step & 1] = run_batch(&book, arena, feeds, step_feeds(step, ids, forced, feeds));
            if (ranks_launch(ranks, batches[step & 1], arena, &err)) fail_msg("step %d: %s", step, err.text);
        }
        const int32_t due = ahead ? step - 1 : step;
        if (due < 0 || due >= STEPS) continue;
        if (ranks_wait(ranks, batches[due & 1], &results, &err)) fail_msg("step %d: %s", due, err.text);
        if (!ahead) step_record(ranks, batches[due & 1], results, due, trace);
        for (int32_t row = 0; ahead && row < batches[due & 1]->rows; row++) trace->ids[due][row] = results[row].id;
    }
    ranks_close(ranks);
    arena_deinit(&arenas[0]);
    arena_deinit(&arenas[1]);
    mem_free(book.pages);
    mem_free(book.shared);
}

/* The largest difference of logits. Other tokens only where the best two are closer than twice that. */
static float traces_compare(const struct trace *got, const struct trace *wanted, const char *what) {
    float worst = 0;
    for (int32_t step = 0; step < STEPS; step++) {
        assert_int_equal(got->rows[step], wanted->rows[step]);
        for (int32_t row = 0; row < got->rows[step]; row++) {
            const float *logits = wanted->logits[step][row];
            const int32_t id = got->ids[step][row], best = wanted->ids[step][row];
            float off = 0;
            for (int32_t i = 0; i < VOCAB; i++) off = fmaxf(off, fabsf(got->logits[step][row][i] - logits[i]));
            worst = fmaxf(worst, off);
            if (id != best && !(logits[best] - logits[id] <= 2 * off))
                fail_msg("%s: step %d row %d drew %d, wanted %d by %g (logits are off by %g)", what, step, row, id,
                         best, (double)(logits[best] - logits[id]), (double)off);
        }
    }
    return worst;
}

static float largest(const struct trace *trace) {
    float most = 0;
    for (int32_t step = 0; step < STEPS; step++)
        for (int32_t row = 0; row < trace->rows[step]; row++)
            for (int32_t i = 0; i < VOCAB; i++) most = fmaxf(most, fabsf(trace->logits[step][row][i]));
    return most;
}

static void compare_ranks(const struct model_files *files, int32_t count, const struct trace *one, const char *what) {
    static struct trace many, drawn, ahead;
    const int64_t timeout_ns = 60 * NS_PER_SECOND;
    struct ranks *ranks = ranks_start(files, count, timeout_ns);
    print_message("%s, %d ranks, %s: ", what, count, ranks_comm_name(ranks));
    assert_string_not_equal(ranks_comm_name(ranks), "local");
    trace_run(ranks, run_on_cuda(), false, &many);
    const float worst = traces_compare(&many, one, what), most = largest(one);
    print_message("logits up to %.1f are off by %.2g at most\n", (double)most, (double)worst);
    assert_true(worst < most * (run_on_cuda() ? 0.08f : 1e-5f));
    trace_run(ranks_start(files, count, timeout_ns), false, false, &drawn);
    trace_run(ranks_start(files, count, timeout_ns), false, true, &ahead);
    for (int32_t step = 0; step < STEPS; step++)
        assert_memory_equal(ahead.ids[step], drawn.ids[step], (size_t)drawn.rows[step] * sizeof(int32_t));
}

static int32_t gpus; /* looked at before anything else is done */

static void test_same_tokens(void **state) {
    static struct trace one;
    char what[96];
    for (size_t s = 0; s < sizeof shapes / sizeof *shapes; s++) {
        struct tiny_model m = tiny_of(&shapes[s]);
        struct model_files *files;
        struct err err = {0};
        tiny_make(&m, 77 + s);
        if (model_files_open(m.folder, &files, &err)) fail_msg("%s", err.text);
        struct ranks *single = ranks_start(files, 1, NS_PER_SECOND);
        assert_string_equal(ranks_comm_name(single), "local");
        trace_run(single, run_on_cuda(), false, &one);
        snprintf(what, sizeof what, "%s, %d heads, %d KV heads", shapes[s].architecture, m.n_heads, m.n_kv_heads);
        for (const int32_t *count = shapes[s].ranks; *count; count++)
            if (!run_on_cuda() || *count <= gpus) compare_ranks(files, *count, &one, what);
        model_files_close(files);
        tiny_free(&m);
    }
}

/* ---- faults -------------------------------------------------------------------------------------------------------
 */

/* A decode that goes on until an error ends it. */
static int decode_until(struct ranks *ranks, int32_t steps, struct err *err) {
    struct run book = {.limits = tiny_options.limits, .pages_total = tiny_options.pages_total, .next_page = 1};
    struct arena arena = {0};
    const struct sample_result *results;
    const int32_t first = 5, last = -1;
    int rc = 0;
    book.max_pages = book.limits.max_model_len / book.limits.page_size;
    book.pages = mem_zalloc((size_t)(SLOTS * book.max_pages), sizeof *book.pages);
    book.shared = mem_zalloc(SLOTS, sizeof *book.shared);
    for (int32_t step = 0; rc == 0 && step < steps; step++) {
        const struct feed feed = {0, step, 1, 1, step ? &last : &first};
        arena_reset(&arena);
        const struct batch *batch = run_batch(&book, &arena, &feed, 1);
        rc = ranks_launch(ranks, batch, &arena, err);
        if (rc == 0) rc = ranks_wait(ranks, batch, &results, err);
    }
    arena_deinit(&arena);
    mem_free(book.pages);
    mem_free(book.shared);
    return rc;
}

static const struct fault_case {
    const char *fault, *says; /* on a GPU a fault may say itself in other words */
    double seconds;           /* at most, on a machine that is busy with other things */
} fault_cases[] = {
    {"rank:1,step:9", "rank 1: a device call failed", 3},
    {"rank:0,step:9", "rank 0: a device call failed", 3},
    {"rank:1,step:1,fail", "rank 1: a device call failed", 3},
    {"rank:1,step:9,stall", "for the other ranks: ", 6},
    {"rank:1,step:9,batch", "ranks disagree", 3},
    {"rank:1,step:9,result", "rank 1: step 9 drew other tokens", 3},
    {"rank:2,step:9,fail", "rank 2: a device call failed", 3},
    {"rank:2,step:9,stall", "for the other ranks: 2 of 3 came", 6},
};
enum { FAULT_CASES = sizeof fault_cases / sizeof *fault_cases };

static void fault_check(const struct model_files *files, int32_t count, const struct fault_case *c) {
    struct err err = {0}, after = {0};
    setenv("QUIRE_FAULT", c->fault, 1);
    struct ranks *ranks = ranks_start(files, count, NS_PER_SECOND / 2);
    unsetenv("QUIRE_FAULT");
    const int64_t begin_ns = clock_now_ns();
    assert_int_equal(decode_until(ranks, 30, &err), ERR_FATAL);
    assert_int_equal(err.code, ERR_FATAL);
    const double seconds = (double)(clock_now_ns() - begin_ns) * 1e-9;
    print_message("%s: \"%s\" after %.3f s\n", c->fault, err.text, seconds);
    if (!run_on_cuda() && !strstr(err.text, c->says)) fail_msg("%s says \"%s\"", c->fault, err.text);
    assert_true(seconds < c->seconds);
    assert_int_equal(decode_until(ranks, 1, &after), ERR_FATAL); /* dead it stays, for the same reason */
    assert_string_equal(after.text, err.text);
    ranks_close(ranks);
    assert_true((double)(clock_now_ns() - begin_ns) * 1e-9 < c->seconds + 3);
}

/* A device that a fault has ended serves no more in its process: on a GPU one case alone, which QUIRE_TEST_FAULT names
 * by its number. */
static void test_faults(void **state) {
    const char *only = getenv("QUIRE_TEST_FAULT");
    const int32_t count = run_on_cuda() ? 2 : 3;
    struct tiny_model m = tiny_of(&shapes[run_on_cuda() ? 0 : 2]);
    struct model_files *files;
    struct err err = {0};
    if (run_on_cuda() && !only) skip();
    tiny_make(&m, 3);
    if (model_files_open(m.folder, &files, &err)) fail_msg("%s", err.text);
    for (int32_t i = 0; i < FAULT_CASES; i++)
        if (!only || strtol(only, NULL, 10) == i) fault_check(files, count, &fault_cases[i]);
    model_files_close(files);
    tiny_free(&m);
}

/* What cannot be opened or loaded ends with the reason, and no rank waits for another. */
static void test_refusals(void **state) {
    struct ranks_options options = {.backend = {.device = DEVICE_CPU, .threads = 1}, .count = 4, .timeout_ns = 1};
    struct tiny_model m = tiny_of(&shapes[2]);
    struct model_files *files;
    struct ranks *ranks;
    struct err err = {0};
    tiny_make(&m, 3);
    if (model_files_open(m.folder, &files, &err)) fail_msg("%s", err.text);
    assert_int_equal(ranks_open(&options, &ranks, &err), 0);
    assert_int_equal(ranks_load(ranks, files, &tiny_options, &err), ERR_UNSUPPORTED); /* 9 heads over 4 */
    print_message("%s\n", err.text);
    assert_non_null(strstr(err.text, "1, 3, 9"));
    assert_null(strstr(err.text, "rank 1")); /* it is the model's fault, not a rank's */
    ranks_close(ranks);
    options.count = COMM_RANKS_MAX + 1;
    assert_int_equal(ranks_open(&options, &ranks, &err), ERR_INVALID);
    options.count = 2;
    options.backend.cpu_isa = "abacus";
    assert_int_equal(ranks_open(&options, &ranks, &err), ERR_UNSUPPORTED);
    options.backend.cpu_isa = NULL;
    options.backend.device = DEVICE_CUDA;
    assert_int_equal(ranks_open(&options, &ranks, &err), ERR_UNSUPPORTED); /* twice on device 0 */
    assert_non_null(strstr(err.text, "both"));
    setenv("QUIRE_FAULT", "rank", 1);
    options.backend.device = DEVICE_CPU;
    assert_int_equal(ranks_open(&options, &ranks, &err), ERR_INVALID);
    unsetenv("QUIRE_FAULT");
    model_files_close(files);
    tiny_free(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_batch_hash),  cmocka_unit_test(test_results_hash),
                                       cmocka_unit_test(test_fault_parse), cmocka_unit_test(test_refusals),
                                       cmocka_unit_test(test_same_tokens), cmocka_unit_test(test_faults)};
    const struct CMUnitTest fault[] = {cmocka_unit_test(test_faults)};
    if (run_on_cuda() && (gpus = backend_cuda_devices()) < 2) {
        printf("skipped: %d GPUs, 2 are needed\n", gpus);
        return 0;
    }
    if (getenv("QUIRE_TEST_FAULT")) return cmocka_run_group_tests(fault, NULL, NULL);
    return cmocka_run_group_tests(tests, NULL, NULL);
}
