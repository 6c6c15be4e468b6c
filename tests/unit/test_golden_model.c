/* The default model against answers recorded from another implementation (tests/golden/README.md), and its bits under
 * every way of cutting and sharing a step. Skipped when the model file is not there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <cjson/cJSON.h>
#include <math.h>
#include <cmocka.h>

#include "engine/base/json.h"
#include "tests/unit/model_path.h"
#include "tests/unit/model_run.h"

enum { PROMPTS_MAX = 32, PROMPT_MAX = 1024, STEPS_MAX = 48, SLOTS = 32, BUDGET = 512, VOCAB = 49152 };

struct golden {
    char name[32];
    int32_t prompt[PROMPT_MAX], prompt_count;
    int32_t greedy[STEPS_MAX], steps;
    double margins[STEPS_MAX];
    int32_t top_ids[10];
    double top_logprobs[10];
};

static struct golden golden[PROMPTS_MAX];
static int32_t golden_count;

/* ---- reading ----------------------------------------------------------------------------------------------------- */

static int32_t read_ids(const cJSON *array, int32_t *out, int32_t room) {
    int32_t count = 0;
    for (const cJSON *item = array->child; item; item = item->next) {
        assert_true(count < room);
        out[count++] = (int32_t)item->valuedouble;
    }
    return count;
}

static void read_line(const char *line) {
    cJSON *root = NULL;
    struct err err = {0};
    struct golden *g = &golden[golden_count++];
    if (json_parse(line, strlen(line), json_limits_file, &root, &err)) fail_msg("%s", err.text);
    snprintf(g->name, sizeof g->name, "%s", json_get(root, "name")->valuestring);
    g->prompt_count = read_ids(json_get(root, "prompt_ids"), g->prompt, PROMPT_MAX);
    g->steps = read_ids(json_get(root, "greedy_ids"), g->greedy, STEPS_MAX);
    const cJSON *item = json_get(root, "margins")->child;
    for (int32_t i = 0; i < g->steps; i++, item = item->next) g->margins[i] = item->valuedouble;
    item = json_get(root, "top10")->child;
    for (int32_t i = 0; i < 10; i++, item = item->next) {
        g->top_ids[i] = (int32_t)item->child->valuedouble;
        g->top_logprobs[i] = item->child->next->valuedouble;
    }
    cJSON_Delete(root);
}

static int read_golden(void **state) {
    FILE *f = fopen("tests/golden/smollm2.jsonl", "r");
    char *line = NULL;
    size_t room = 0;
    if (!f) return -1;
    while (getline(&line, &room, f) > 0) read_line(line);
    free(line);
    fclose(f);
    return golden_count == 14 ? 0 : -1;
}

/* ---- running ----------------------------------------------------------------------------------------------------- */

static bool open_default(struct run *r, enum cpu_activations activations, enum dtype kv, bool invariant) {
    char path[512];
    struct err err = {0};
    struct backend_options backend = run_device(0, activations);
    backend.batch_invariant = invariant;
    struct model_options options = {
        .limits = {SLOTS, BUDGET, 1024, 64, kv, 0}, .pages_total = 600, .no_stack = invariant};
    if (!model_path(path, sizeof path)) return false;
    if (run_open(r, path, &backend, &options, &err)) fail_msg("%s", err.text);
    return true;
}

static const float *step(struct run *r, const struct feed *feeds, int32_t count) {
    struct err err = {0};
    const float *logits = run_step(r, feeds, count, &err);
    if (!logits) fail_msg("%s", err.text);
    return logits;
}

/* Feeds a prompt in steps of at most the budget; the logits behind its last token. */
static const float *prefill(struct run *r, int32_t slot, const int32_t *ids, int32_t count, int32_t chunk) {
    const float *logits = NULL;
    for (int32_t at = 0; at < count; at += chunk) {
        int32_t take = count - at < chunk ? count - at : chunk;
        logits = step(r, &(struct feed){slot, at, take, at + take == count, ids + at}, 1);
    }
    return logits;
}

static double logsumexp(const float *logits) {
    double top = -INFINITY, sum = 0;
    for (int32_t i = 0; i < VOCAB; i++) top = fmax(top, (double)logits[i]);
    for (int32_t i = 0; i < VOCAB; i++) sum += exp((double)logits[i] - top);
    return top + log(sum);
}

static int32_t argmax(const float *logits) {
    int32_t best = 0;
    for (int32_t i = 1; i < VOCAB; i++)
        if (logits[i] > logits[best]) best = i;
    return best;
}

/* What a run over all prompts found. */
struct verdict {
    double top_sum, top_worst; /* |log-probability - recorded| over the top ten behind the prompts */
    int32_t top_count, steps, equal;
    double overturned; /* the largest recorded margin at which argmax differed */
    double
        left_at[PROMPTS_MAX]; /* margin at the first step that differed: where a free run leaves the path; -1 never */
};

static void judge_step(struct verdict *v, int32_t prompt, int32_t at, const float *logits) {
    const struct golden *g = &golden[prompt];
    v->steps++;
    if (argmax(logits) == g->greedy[at]) {
        v->equal++;
        return;
    }
    if (v->left_at[prompt] < 0) v->left_at[prompt] = g->margins[at];
    v->overturned = fmax(v->overturned, g->margins[at]);
}

static void judge_top(struct verdict *v, int32_t prompt, const float *logits) {
    const struct golden *g = &golden[prompt];
    double total = logsumexp(logits);
    for (int32_t i = 0; i < 10; i++) {
        double off = fabs((double)logits[g->top_ids[i]] - total - g->top_logprobs[i]);
        v->top_sum += off;
        v->top_worst = off > v->top_worst || isnan(off) ? off : v->top_worst;
        v->top_count++;
    }
}

/* All prompts, then all of them decoded side by side along the recorded tokens. */
static struct verdict judge(struct run *r) {
    struct verdict v = {0};
    for (int32_t p = 0; p < golden_count; p++) {
        v.left_at[p] = -1;
        const float *logits = prefill(r, p, golden[p].prompt, golden[p].prompt_count, BUDGET);
        judge_top(&v, p, logits);
        judge_step(&v, p, 0, logits);
    }
    for (int32_t at = 1; at < STEPS_MAX; at++) {
        struct feed feeds[PROMPTS_MAX];
        int32_t of[PROMPTS_MAX], count = 0;
        for (int32_t p = 0; p < golden_count; p++) {
            if (at >= golden[p].steps) continue;
            of[count] = p;
            feeds[count++] = (struct feed){p, golden[p].prompt_count + at - 1, 1, 1, &golden[p].greedy[at - 1]};
        }
        const float *logits = step(r, feeds, count);
        for (int32_t i = 0; i < count; i++) judge_step(&v, of[i], at, logits + (size_t)i * VOCAB);
    }
    print_message("top-10: mean %.2e worst %.2e; argmax equal %d of %d, largest margin overturned %.4f\n",
                  v.top_sum / v.top_count, v.top_worst, v.equal, v.steps, v.overturned);
    return v;
}

static void expect_free_paths(const struct verdict *v, double margin) {
    for (int32_t p = 0; p < golden_count; p++)
        if (v->left_at[p] >= margin) fail_msg("%s: leaves the path at a margin of %g", golden[p].name, v->left_at[p]);
}

/* ---- answers ----------------------------------------------------------------------------------------------------- */

static void check_float(enum dtype kv, double tolerance) {
    struct run r;
    if (!open_default(&r, CPU_ACTIVATIONS_F32, kv, false)) skip();
    struct verdict v = judge(&r);
    run_close(&r);
    if (!(v.top_worst <= tolerance)) fail_msg("a log-probability is off by %g, allowed are %g", v.top_worst, tolerance);
    expect_free_paths(&v, 0.01);
}

static void test_f32_activations(void **state) {
    check_float(DTYPE_F32, 1e-3);
}
static void test_f16_cache(void **state) {
    check_float(DTYPE_F16, 0.02);
}

static void test_int8_activations(void **state) {
    struct run r;
    if (!open_default(&r, CPU_ACTIVATIONS_INT8, DTYPE_F16, false)) skip();
    struct verdict v = judge(&r);
    run_close(&r);
    if (!(v.overturned < 0.5)) fail_msg("argmax differs at a margin of %g", v.overturned);
    if (v.equal < v.steps * 0.96) fail_msg("argmax is equal on %d of %d steps only", v.equal, v.steps);
    if (!(v.top_sum / v.top_count <= 0.12))
        fail_msg("log-probabilities are off by %g in the mean", v.top_sum / v.top_count);
    if (!(v.top_worst <= 0.8)) fail_msg("a log-probability is off by %g", v.top_worst);
    expect_free_paths(&v, 0.5);
}

/* ---- the same bits ----------------------------------------------------------------------------------------------- */

enum { LONG = 300 }; /* tokens of the longest prompt that are used here */

static const struct golden *longest(void) {
    const struct golden *g = golden;
    for (int32_t p = 0; p < golden_count; p++)
        if (golden[p].prompt_count > g->prompt_count) g = &golden[p];
    return g;
}

static void expect_bits(const float *got, const float *wanted, const char *what) {
    if (memcmp(got, wanted, VOCAB * sizeof *got) != 0) fail_msg("other bits %s", what);
}

static void check_chunks(struct run *r, const int32_t *ids, const float *alone) {
    static const int32_t chunks[] = {17, 61, 64, 127, 299};
    char what[40];
    for (size_t i = 0; i < sizeof chunks / sizeof *chunks; i++) {
        run_restart(r);
        snprintf(what, sizeof what, "in chunks of %d", chunks[i]);
        expect_bits(prefill(r, 6, ids, LONG, chunks[i]), alone, what);
    }
}

/* The last 12 tokens one by one among 31 others that prefill and decode in the same steps. */
static void check_neighbours(struct run *r, const int32_t *ids, const float *alone) {
    struct feed feeds[SLOTS];
    int32_t at[SLOTS] = {0};
    const float *logits = NULL;
    run_restart(r);
    prefill(r, 11, ids, LONG - 12, 100);
    for (int32_t t = LONG - 12; t < LONG; t++) {
        for (int32_t s = 0; s < SLOTS; s++) {
            int32_t take = (t + s) % 9 == 0 ? 5 + s % 4 : 1;
            feeds[s] = s == 11 ? (struct feed){s, t, 1, 1, ids + t} : (struct feed){s, at[s], take, 1, ids + s + at[s]};
            at[s] += take;
        }
        logits = step(r, feeds, SLOTS);
    }
    expect_bits(logits + (size_t)11 * VOCAB, alone, "among 31 others");
}

static void check_warm(struct run *r, const int32_t *ids, const float *alone) {
    int32_t shared = LONG / 64;
    run_restart(r);
    prefill(r, 1, ids, LONG, 150);
    struct page_delta deltas[LONG / 64];
    for (int32_t i = 0; i < shared; i++) {
        r->pages[2 * r->max_pages + i] = r->pages[r->max_pages + i];
        deltas[i] = (struct page_delta){2, i, r->pages[r->max_pages + i]};
    }
    struct batch table = {.step = ++r->step, .deltas = deltas, .delta_count = shared};
    struct err err = {0};
    assert_int_equal(model_launch(r->model, &table, &r->arena, &err), 0);
    const float *logits = step(r, &(struct feed){2, shared * 64, LONG - shared * 64, 1, ids + shared * 64}, 1);
    expect_bits(logits, alone, "behind a warm prefix");
}

static void test_bits(void **state) {
    static float alone[VOCAB];
    struct run r;
    if (!open_default(&r, CPU_ACTIVATIONS_INT8, DTYPE_F16, false)) skip();
    const int32_t *ids = longest()->prompt;
    prefill(&r, 0, ids, LONG - 20, BUDGET);
    for (int32_t t = LONG - 20; t < LONG; t++)
        memcpy(alone, step(&r, &(struct feed){0, t, 1, 1, ids + t}, 1), sizeof alone);
    check_chunks(&r, ids, alone);
    check_neighbours(&r, ids, alone);
    check_warm(&r, ids, alone);
    run_close(&r);
}

/* ---- on a GPU ---------------------------------------------------------------------------------------------------- */

/* bf16 activations and cache over the same quantised weights; tests/golden/README.md has the row. */
static void cuda_judge(struct run *r, const char *what) {
    run_restart(r);
    struct verdict v = judge(r);
    if (!(v.top_sum / v.top_count <= 0.06))
        fail_msg("%s: log-probabilities are off by %g in the mean", what, v.top_sum / v.top_count);
    if (!(v.top_worst <= 0.4)) fail_msg("%s: a log-probability is off by %g", what, v.top_worst);
    if (!(v.overturned < 0.25)) fail_msg("%s: argmax differs at a margin of %g", what, v.overturned);
    if (v.equal < v.steps * 0.97) fail_msg("%s: argmax is equal on %d of %d steps only", what, v.equal, v.steps);
}

static void test_cuda_golden(void **state) {
    struct run r;
    struct model_stats stats;
    if (!open_default(&r, CPU_ACTIVATIONS_F32, DTYPE_BF16, false)) skip();
    model_set_modes(r.model, false, false);
    cuda_judge(&r, "op by op");
    model_set_modes(r.model, true, false);
    cuda_judge(&r, "recorded");
    cuda_judge(&r, "replayed");
    model_stats(r.model, &stats);
    assert_true(stats.graph_captures > 0 && stats.graph_replays > stats.graph_captures);
    print_message("stack serves %d rows\n", model_stack_rows(r.model));
    if (model_stack_rows(r.model) > 0) {
        model_set_modes(r.model, false, true);
        cuda_judge(&r, "in one op");
        model_set_modes(r.model, true, true);
        cuda_judge(&r, "in one op, recorded");
        cuda_judge(&r, "in one op, replayed");
    }
    run_close(&r);
}

/* What batch invariance promises: the same bits alone and among 31 others. */
static void test_cuda_invariant(void **state) {
    static float alone[VOCAB];
    struct run r;
    if (!open_default(&r, CPU_ACTIVATIONS_F32, DTYPE_BF16, true)) skip();
    const int32_t *ids = longest()->prompt;
    prefill(&r, 0, ids, LONG - 12, 100);
    for (int32_t t = LONG - 12; t < LONG; t++)
        memcpy(alone, step(&r, &(struct feed){0, t, 1, 1, ids + t}, 1), sizeof alone);
    check_neighbours(&r, ids, alone);
    run_close(&r);
}

int main(void) {
    const struct CMUnitTest cuda[] = {cmocka_unit_test(test_cuda_golden), cmocka_unit_test(test_cuda_invariant)};
    if (run_skipped()) return 0;
    if (run_on_cuda()) return cmocka_run_group_tests(cuda, read_golden, NULL);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_f32_activations),
        cmocka_unit_test(test_f16_cache),
        cmocka_unit_test(test_int8_activations),
        cmocka_unit_test(test_bits),
    };
    return cmocka_run_group_tests(tests, read_golden, NULL);
}
