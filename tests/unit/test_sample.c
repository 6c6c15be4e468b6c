/* op_sample against a plain reference that sorts whole rows in double precision; the distribution of draws; and the
 * promise that a row's token depends on nothing but its logits, parameters, seed, sample index and position. */
#include "sample_world.h"

#include "kernels/cpu/sample_select.h"

/* ---- distribution --------------------------------------------------------------------------------------------------
 */

/* Draws many times and compares with the reference: nothing outside the kept set, and chi-square within 5 deviations.
 */
static void distribution_case(struct backend *backend, int32_t vocab, double spread, struct sample_params params) {
    enum { ROWS = 64 };
    const int32_t rounds = test_quick() ? 8 : 320;
    uint64_t seed = (uint64_t)vocab + 17;
    struct world w = world_open(backend, ROWS, vocab);
    float *one = random_values(&seed, vocab, spread), *logits = zeros((int64_t)ROWS * vocab, sizeof *logits);
    double *z = zeros(vocab, sizeof *z), *p = zeros(vocab, sizeof *p);
    int32_t *drawn = zeros(vocab, sizeof *drawn);
    for (int32_t r = 0; r < ROWS; r++) memcpy(logits + (int64_t)r * vocab, one, (size_t)vocab * sizeof *one);
    for (int32_t i = 0; i < vocab; i++) z[i] = one[i];
    reference(z, vocab, &params, p);
    logits_set(&w, logits, (int64_t)ROWS * vocab);
    struct sample_row rows[ROWS];
    struct sample_result results[ROWS];
    for (int round = 0; round < rounds; round++) {
        for (int32_t r = 0; r < ROWS; r++) {
            params.seed = (uint64_t)r * 0x100000001u; /* both halves of the seed count */
            rows[r] = (struct sample_row){
                .params = params, .slot = r, .sample_index = round % 3, .position = round, .logprobs = -1};
        }
        rows_draw(&w, rows, ROWS, results);
        for (int32_t r = 0; r < ROWS; r++) {
            assert_in_range(results[r].id, 0, vocab - 1);
            drawn[results[r].id]++;
        }
    }
    double chi = 0.0, rest_expected = 0.0, rest_drawn = 0.0, total = ROWS * rounds;
    int32_t cells = 0;
    for (int32_t i = 0; i < vocab; i++) {
        if (p[i] == 0.0 && drawn[i]) fail_msg("id %d was drawn and should have been filtered", i);
        if (p[i] * total < 10.0) { /* rare ids share one cell */
            rest_expected += p[i] * total;
            rest_drawn += drawn[i];
            continue;
        }
        chi += pow(drawn[i] - p[i] * total, 2.0) / (p[i] * total);
        cells++;
    }
    if (rest_expected >= 10.0) {
        chi += pow(rest_drawn - rest_expected, 2.0) / rest_expected;
        cells++;
    }
    if (cells > 1 && chi > cells - 1 + 5.0 * sqrt(2.0 * (cells - 1)) + 5.0)
        fail_msg("chi-square %.1f over %d cells, vocabulary %d", chi, cells, vocab);
    world_close(&w);
    free(one), free(logits), free(z), free(p), free(drawn);
}

static void distribution_all(struct backend *backend) {
    distribution_case(backend, 7, 1.0, params_of(1.0f, 0, 1.0f, 0.0f, 1.0f));
    distribution_case(backend, 3000, 2.0, params_of(0.7f, 0, 1.0f, 0.0f, 1.0f));
    distribution_case(backend, 3000, 2.0, params_of(1.0f, 40, 1.0f, 0.0f, 1.0f));
    distribution_case(backend, 1531, 2.0, params_of(0.8f, 0, 0.9f, 0.0f, 1.0f));
    distribution_case(backend, 3000, 2.0, params_of(1.3f, 50, 0.8f, 0.02f, 1.0f));
    distribution_case(backend, 700, 2.0, params_of(1.0f, 0, 1.0f, 0.1f, 1.0f));
    distribution_case(backend, 500, 2.0, params_of(1.0f, 0, 1.0f, 0.0f, 0.5f));
    distribution_case(backend, 500, 2.0, params_of(0.9f, 200, 0.95f, 0.0f, 0.7f));
}

static void test_distribution(void **state) {
    for_each_backend(distribution_all);
}

/* ---- every processor, id for id -------------------------------------------------------------------------------------
 */

/* The id that the reference gives: the inverse of the distribution function in rising order of id. False where the
 * target is too close to a border for two ways of rounding to agree on. */
static bool reference_draw(const double *p, int32_t vocab, double uniform, int32_t *id) {
    double sum = 0.0, last = 0.0;
    for (int32_t i = 0; i < vocab; i++) {
        if (p[i] == 0.0) continue;
        last = sum;
        sum += p[i];
        *id = i;
        if (sum > uniform) break;
    }
    return fabs(sum - uniform) > 1e-6 && fabs(last - uniform) > 1e-6;
}

static void penalise(double *z, int32_t vocab, const struct sample_params *p, const int32_t *prompt, int32_t prompts,
                     const int32_t *output, int32_t outputs) {
    for (int32_t i = 0; i < vocab; i++) {
        int32_t in_prompt = 0, drawn = 0;
        for (int32_t j = 0; j < prompts; j++) in_prompt += prompt[j] == i;
        for (int32_t j = 0; j < outputs; j++) drawn += output[j] == i;
        if (in_prompt || drawn)
            z[i] = z[i] > 0.0 ? z[i] / (double)p->repetition_penalty : z[i] * (double)p->repetition_penalty;
        z[i] -= (double)p->frequency_penalty * drawn + (drawn ? (double)p->presence_penalty : 0.0);
    }
}

static void processors_round(struct backend *backend, uint64_t *seed, int32_t *compared) {
    enum { PROMPT = 60, OUTPUT = 25, LISTED = 9 };
    static const float temperatures[] = {0.0f, 0.01f, 0.3f, 1.0f, 1.7f, 50.0f};
    int32_t vocab = 300 + random_below(seed, 5000), prompt[PROMPT], output[OUTPUT], banned[LISTED], ids[LISTED];
    float *logits = random_values(seed, vocab, 3.0), bias[LISTED];
    double *z = zeros(vocab, sizeof *z), *p = zeros(vocab, sizeof *p);
    struct sample_params params =
        params_of(temperatures[random_below(seed, 6)],
                  random_below(seed, 2) ? random_below(seed, 2 * vocab) : random_below(seed, 30),
                  random_below(seed, 2) ? 1.0f : 0.3f + 0.69f * (float)random_unit(seed),
                  random_below(seed, 3) ? 0.0f : 0.2f * (float)random_unit(seed),
                  random_below(seed, 3) ? 1.0f : 0.2f + 0.7f * (float)random_unit(seed));
    if (random_below(seed, 2)) {
        params.repetition_penalty = 0.8f + (float)random_unit(seed);
        params.presence_penalty = (float)random_unit(seed) - 0.3f;
        params.frequency_penalty = (float)random_unit(seed) - 0.3f;
    }
    params.seed = random_next(seed);
    for (int i = 0; i < PROMPT; i++) prompt[i] = random_below(seed, vocab);
    for (int i = 0; i < OUTPUT; i++) output[i] = random_below(seed, i % 3 ? 5 : vocab);
    for (int i = 0; i < LISTED; i++) {
        banned[i] = random_below(seed, vocab);
        ids[i] = random_below(seed, vocab);
        bias[i] = random_normal(seed, 4.0);
    }
    struct sample_row row = {.params = params,
                             .slot = 1,
                             .sample_index = random_below(seed, 4),
                             .position = random_below(seed, 5000),
                             .logprobs = -1,
                             .banned = banned,
                             .banned_count = random_below(seed, LISTED),
                             .bias_ids = ids,
                             .bias = bias,
                             .bias_count = random_below(seed, LISTED)};
    for (int32_t i = 0; i < vocab; i++) z[i] = logits[i];
    for (int32_t i = 0; i < row.bias_count; i++) z[ids[i]] += (double)bias[i];
    for (int32_t i = 0; i < row.banned_count; i++) z[banned[i]] = -INFINITY;
    struct world w = world_open(backend, 2, vocab);
    struct op_sample_reset_args reset = {w.state, 1, true, prompt, output, PROMPT, OUTPUT - 1};
    TEST_ERR_PASS(op_sample_reset(backend, &reset, err));
    /* The last output token is drawn by the op itself, so that its count is the op's. */
    struct sample_row force = {.params = plain,
                               .slot = 1,
                               .logprobs = -1,
                               .bias_ids = &output[OUTPUT - 1],
                               .bias = (float[]){1000.0f},
                               .bias_count = 1};
    assert_int_equal(sample_one(&w, logits, &force).id, output[OUTPUT - 1]);
    assert_int_equal(last_token(&w, 1), output[OUTPUT - 1]);
    penalise(z, vocab, &params, prompt, PROMPT, output, OUTPUT);
    struct sample_result got = sample_one(&w, logits, &row);
    int32_t want = 0;
    if (params.temperature < SAMPLE_GREEDY_BELOW) {
        for (int32_t i = 1; i < vocab; i++)
            if (z[i] > z[want]) want = i;
        assert_int_equal(got.id, want);
        ++*compared;
    } else {
        reference(z, vocab, &params, p);
        if (reference_draw(p, vocab, philox_uniform(params.seed, row.sample_index, row.position), &want)) {
            assert_int_equal(got.id, want);
            ++*compared;
        }
    }
    assert_int_equal(got.top_count, 0);
    world_close(&w);
    free(logits), free(z), free(p);
}

static void processors_all(struct backend *backend) {
    uint64_t seed = 11;
    int32_t compared = 0;
    const int32_t rounds = test_quick() ? 8 : 200;
    for (int round = 0; round < rounds; round++) processors_round(backend, &seed, &compared);
    assert_true(compared > rounds * 9 / 10);
}

static void test_processors(void **state) {
    for_each_backend(processors_all);
}

/* ---- log-probabilities ----------------------------------------------------------------------------------------------
 */

static void logprobs_case(struct backend *backend, int32_t vocab, bool ties) {
    uint64_t seed = (uint64_t)vocab;
    float *logits = random_values(&seed, vocab, 3.0);
    if (ties)
        for (int32_t i = 0; i < vocab; i++) logits[i] = (float)random_below(&seed, 3);
    struct entry *e = zeros(vocab, sizeof *e);
    double sum = 0.0;
    for (int32_t i = 0; i < vocab; i++) {
        e[i] = (struct entry){logits[i], 0, i, true};
        sum += exp((double)logits[i]);
    }
    qsort(e, (size_t)vocab, sizeof *e, entry_compare);
    struct world w = world_open(backend, 1, vocab);
    for (int32_t k = 0; k <= SAMPLE_LOGPROBS_MAX; k++) {
        struct sample_row row = {.params = params_of(2.0f, 0, 1.0f, 0.0f, 1.0f), .logprobs = k, .position = k};
        row.bias_ids = (int32_t[]){3}, row.bias = (float[]){5.0f},
        row.bias_count = k % 2; /* not in log-probabilities */
        struct sample_result got = sample_one(&w, logits, &row);
        int32_t want_count = k < vocab ? k : vocab, rank = 1;
        for (int32_t i = 0; i < vocab; i++) rank += logits[i] > logits[got.id];
        assert_int_equal(got.rank, rank);
        expect_close("logprob", k, got.logprob, (double)logits[got.id] - log(sum), 3e-6);
        assert_int_equal(got.top_count, want_count);
        for (int32_t i = 0; i < want_count; i++) {
            assert_int_equal(got.top_ids[i], e[i].id);
            expect_close("top", i, got.top_logprobs[i], e[i].order - log(sum), 3e-6);
        }
    }
    world_close(&w);
    free(logits), free(e);
}

static void logprobs_all(struct backend *backend) {
    logprobs_case(backend, 5, false);
    logprobs_case(backend, 1000, false);
    logprobs_case(backend, 1000, true);
    logprobs_case(backend, 49152, false);
}

static void test_logprobs(void **state) {
    for_each_backend(logprobs_all);
}

/* ---- independence ---------------------------------------------------------------------------------------------------
 */

static void result_expect_same(const struct sample_result *a, const struct sample_result *b) {
    assert_int_equal(a->id, b->id);
    assert_int_equal(a->rank, b->rank);
    assert_int_equal(a->top_count, b->top_count);
    assert_memory_equal(&a->logprob, &b->logprob, sizeof a->logprob);
    if (a->top_count <= 0) return;
    assert_memory_equal(a->top_ids, b->top_ids, (size_t)a->top_count * sizeof *a->top_ids);
    assert_memory_equal(a->top_logprobs, b->top_logprobs, (size_t)a->top_count * sizeof *a->top_logprobs);
}

enum { INDEPENDENT_ROWS = 40, INDEPENDENT_VOCAB = 5000 };

/* Rows of every kind of sampling, their logits beside them. */
static float *independent_rows(struct sample_row *rows) {
    uint64_t seed = 21;
    for (int32_t r = 0; r < INDEPENDENT_ROWS; r++) {
        rows[r] = (struct sample_row){.slot = r, .sample_index = r % 2, .position = 100 + r, .logprobs = r % 4 - 1};
        rows[r].params =
            params_of((float)(r % 5) * 0.4f, r % 3 ? 0 : 20, r % 2 ? 0.9f : 1.0f, 0.0f, r % 7 ? 1.0f : 0.8f);
        rows[r].params.seed = (uint64_t)r * 77;
    }
    return random_values(&seed, INDEPENDENT_ROWS * INDEPENDENT_VOCAB, 2.0);
}

/* The same rows in another order, alone, and with padded rows behind them give the same results, bit for bit; `first`
 * is filled from the first backend that comes here with id -2 in it. */
static void independence_check(struct backend *backend, struct sample_result *first) {
    enum { ROWS = INDEPENDENT_ROWS, VOCAB = INDEPENDENT_VOCAB };
    struct sample_row rows[ROWS], moved[ROWS];
    struct sample_result second[ROWS];
    float *logits = independent_rows(rows), *shuffled = zeros(ROWS * VOCAB, sizeof *shuffled);
    struct world w = world_open(backend, ROWS + 1, VOCAB);
    if (first[0].id == -2) sample_rows(&w, logits, rows, ROWS, first);
    for (int32_t r = 0; r < ROWS; r++) {
        int32_t to = (r * 7 + 3) % ROWS;
        moved[to] = rows[r];
        memcpy(shuffled + to * VOCAB, logits + r * VOCAB, VOCAB * sizeof *logits);
    }
    sample_rows(&w, shuffled, moved, ROWS, second);
    for (int32_t r = 0; r < ROWS; r++) {
        struct sample_result alone = sample_one(&w, logits + r * VOCAB, &rows[r]);
        result_expect_same(&first[r], &second[(r * 7 + 3) % ROWS]);
        result_expect_same(&first[r], &alone);
    }
    logits_set(&w, logits, ROWS * VOCAB);
    memset(w.results, 0x55, results_bytes(&w));
    TEST_ERR_PASS(rows_issue(&w, rows, 5, ROWS, err));
    TEST_ERR_PASS(backend_sync(backend, err));
    for (int32_t r = 0; r < 5; r++) result_expect_same(&first[r], &w.results[r]);
    assert_int_equal(w.results[5].id, 0x55555555); /* of padded rows nothing is written */
    assert_in_range(last_token(&w, ROWS), 0, VOCAB - 1);
    world_close(&w);
    free(logits), free(shuffled);
}

static void independence_all(struct backend *backend) {
    struct sample_result first[INDEPENDENT_ROWS] = {{.id = -2}};
    independence_check(backend, first);
}

static void test_independence(void **unused) {
    struct sample_result first[INDEPENDENT_ROWS] = {{.id = -2}};
    for_each_backend(independence_all);
    for (int32_t threads = 1; threads <= 20; threads += threads < 3 ? 1 : 17) {
        struct backend *backend = backend_for(CPU_ISA_PORTABLE, threads);
        TEST_ERR_PASS(backend_step_open(backend, TEST_STEP_BYTES, err));
        independence_check(backend, first);
        backend_close(backend);
    }
}

/* A graph recorded with some rows replays with others: the parameters, the number of rows, lists and the place of the
 * results are those of the step being replayed. */
static void graph_all(struct backend *backend) {
    enum { ROWS = INDEPENDENT_ROWS, VOCAB = INDEPENDENT_VOCAB, PADDED = 16 };
    if (!backend_info(backend)->graphs) return;
    struct sample_row rows[ROWS];
    struct sample_result want[ROWS];
    float *logits = independent_rows(rows);
    struct world w = world_open(backend, ROWS, VOCAB);
    struct graph *graph = NULL;
    rows[3].banned = (int32_t[]){1, 2, 3};
    rows[3].banned_count = 3;
    sample_rows(&w, logits, rows, ROWS, want);
    for (int32_t begin = 0; begin < ROWS; begin += 11) {
        struct arena arena;
        int32_t n = ROWS - begin < 11 ? ROWS - begin : 11;
        struct sample_pack_args pack = {w.state, rows + begin, n, PADDED, 0, w.results + begin};
        struct op_sample_args args = {
            w.state, w.logits, VOCAB, VOCAB, NULL, w.workspace, sample_workspace_bytes(backend, ROWS, VOCAB)};
        arena_init(&arena);
        logits_set(&w, logits + begin * VOCAB, n * VOCAB);
        TEST_ERR_PASS(backend_step_begin(backend, err));
        TEST_ERR_PASS(sample_pack(backend, &pack, &arena, &args.batch, err));
        TEST_ERR_PASS(backend_step_commit(backend, err));
        if (!graph) {
            TEST_ERR_PASS(backend_graph_begin(backend, err));
            TEST_ERR_PASS(op_sample(backend, &args, err));
            TEST_ERR_PASS(backend_graph_end(backend, &graph, err));
        }
        memset(w.results, 0x55, results_bytes(&w));
        TEST_ERR_PASS(backend_graph_launch(backend, graph, err));
        TEST_ERR_PASS(backend_sync(backend, err));
        for (int32_t r = begin; r < begin + n; r++) result_expect_same(&want[r], &w.results[r]);
        for (int32_t r = 0; r < ROWS; r++)
            if (r < begin || r >= begin + n) assert_int_equal(w.results[r].id, 0x55555555);
        arena_deinit(&arena);
    }
    backend_graph_free(backend, graph);
    world_close(&w);
    free(logits);
}

static void test_graph(void **unused) {
    for_each_backend(graph_all);
}

/* ---- edges ----------------------------------------------------------------------------------------------------------
 */

static void edges_all(struct backend *backend) {
    enum { VOCAB = 1100 };
    struct world w = world_open(backend, 1, VOCAB);
    float logits[VOCAB];
    struct sample_row greedy = {.params = params_of(0.0f, 0, 1.0f, 0.0f, 1.0f), .logprobs = -1};
    struct sample_row drawn = {.params = plain, .logprobs = -1};
    for (int i = 0; i < VOCAB; i++) logits[i] = i % 10 == 7 ? 2.0f : 1.0f;
    assert_int_equal(sample_one(&w, logits, &greedy).id, 7); /* the lowest among equals */
    greedy.banned = (int32_t[]){7, 17};
    greedy.banned_count = 2;
    assert_int_equal(sample_one(&w, logits, &greedy).id, 27);
    greedy.banned_count = 0;
    greedy.params.top_p = 0.01f; /* filters do not move the greedy token */
    assert_int_equal(sample_one(&w, logits, &greedy).id, 7);

    drawn.params = params_of(1.0f, 1, 1.0f, 0.0f, 1.0f); /* top_k 1 among equals: the lowest id */
    assert_int_equal(sample_one(&w, logits, &drawn).id, 7);
    drawn.params = params_of(1.0f, 0, 1e-6f, 0.0f, 1.0f);
    assert_int_equal(sample_one(&w, logits, &drawn).id, 7);
    drawn.params = params_of(1e-4f, 0, 1.0f, 0.0f, 1.0f); /* cold: only the largest have weight */
    for (drawn.position = 0; drawn.position < 50; drawn.position++)
        assert_int_equal(sample_one(&w, logits, &drawn).id % 10, 7);
    drawn.params = params_of(3e38f, 0, 1.0f, 0.0f, 1.0f); /* hot: flat, banned ids still are */
    drawn.banned = (int32_t[]){7};
    drawn.banned_count = 1;
    for (drawn.position = 0; drawn.position < 200; drawn.position++)
        assert_int_not_equal(sample_one(&w, logits, &drawn).id, 7);
    drawn.params.top_p = 0.5f;
    for (drawn.position = 0; drawn.position < 50; drawn.position++)
        assert_in_range(sample_one(&w, logits, &drawn).id, 0, VOCAB - 1);
    drawn.banned_count = 0;

    const float bad[] = {NAN, INFINITY};
    for (size_t b = 0; b < COUNT(bad); b++) {
        for (int at = 0; at < VOCAB; at += 1099) {
            float was = logits[at];
            logits[at] = bad[b];
            assert_int_equal(sample_one(&w, logits, &greedy).id, -1);
            assert_int_equal(sample_one(&w, logits, &drawn).id, -1);
            assert_int_equal(last_token(&w, 0), 0);
            struct sample_row banned = greedy; /* not hidden by a ban */
            banned.banned = (int32_t[]){at};
            banned.banned_count = 1;
            banned.logprobs = 5;
            struct sample_result result = sample_one(&w, logits, &banned);
            assert_int_equal(result.id, -1);
            assert_int_equal(result.top_count, 0);
            logits[at] = was;
        }
    }
    for (int i = 0; i < VOCAB; i++) logits[i] = -INFINITY;
    assert_int_equal(sample_one(&w, logits, &greedy).id, -1);
    assert_int_equal(sample_one(&w, logits, &drawn).id, -1);
    logits[1050] = -3e38f; /* one finite value is enough */
    drawn.params = params_of(1.0f, 30, 0.9f, 0.0f, 0.9f);
    assert_int_equal(sample_one(&w, logits, &greedy).id, 1050);
    assert_int_equal(sample_one(&w, logits, &drawn).id, 1050);
    world_close(&w);
}

static void test_edges(void **state) {
    for_each_backend(edges_all);
}

/* Reset forgets, and a slot that does not track has no penalties. */
static void reset_all(struct backend *backend) {
    enum { VOCAB = 100 };
    struct world w = world_open(backend, 2, VOCAB);
    float logits[VOCAB] = {0};
    logits[10] = 1.0f, logits[20] = 0.9f;
    struct sample_row row = {.params = plain, .slot = 1, .logprobs = -1};
    row.params.temperature = 0.0f;
    row.params.presence_penalty = 0.5f;
    struct op_sample_reset_args reset = {w.state, 1, true, NULL, (int32_t[]){10}, 0, 1};
    TEST_ERR_PASS(op_sample_reset(backend, &reset, err));
    assert_int_equal(sample_one(&w, logits, &row).id, 20);
    assert_int_equal(sample_one(&w, logits, &row).id, 10); /* 0.5 against 0.4 */
    reset.output_count = 0;
    TEST_ERR_PASS(op_sample_reset(backend, &reset, err));
    assert_int_equal(last_token(&w, 1), 0);
    assert_int_equal(sample_one(&w, logits, &row).id, 10);
    reset.track = false;
    TEST_ERR_PASS(op_sample_reset(backend, &reset, err));
    for (int i = 0; i < 3; i++) assert_int_equal(sample_one(&w, logits, &row).id, 10);
    struct err refused = {0};
    reset.slot = 2;
    assert_int_equal(op_sample_reset(backend, &reset, &refused), ERR_INVALID);
    reset = (struct op_sample_reset_args){w.state, 0, true, (int32_t[]){VOCAB}, NULL, 1, 0};
    assert_int_equal(op_sample_reset(backend, &reset, &refused), ERR_INVALID);
    world_close(&w);
}

static void test_reset(void **state) {
    for_each_backend(reset_all);
}

/* Ids of any length are counted in, however many pieces they take, before the ops behind the reset. */
static void long_prompt_all(struct backend *backend) {
    enum { VOCAB = 1000, PROMPT = 300000, OUTPUT = 20000 };
    struct world w = world_open(backend, 1, VOCAB);
    int32_t *prompt = zeros(PROMPT, sizeof *prompt), *output = zeros(OUTPUT, sizeof *output);
    float *logits = zeros(VOCAB, sizeof *logits);
    struct sample_row row = {.params = plain, .logprobs = -1};
    row.params.temperature = 0.0f;
    row.params.repetition_penalty = 2.0f;
    row.params.frequency_penalty = 0.001f;
    for (int i = 0; i < VOCAB; i++) logits[i] = 1000.0f;
    for (int i = 0; i < PROMPT; i++) prompt[i] = i == PROMPT - 1 ? 0 : 2 + i % (VOCAB - 2);
    for (int i = 0; i < OUTPUT; i++) output[i] = i == OUTPUT - 1 ? 1 : 2 + i % 7;
    for (int round = 0; round < 3; round++) {
        struct op_sample_reset_args reset = {w.state, 0, true, prompt, output, PROMPT - (round == 0), OUTPUT};
        TEST_ERR_PASS(op_sample_reset(backend, &reset, err));
        if (round == 0) { /* 0 is the only one that no list names */
            assert_int_equal(sample_one(&w, logits, &row).id, 0);
            continue;
        }
        row.params.repetition_penalty = round == 1 ? 1.0f : 2.0f; /* then 0 is in the prompt alone, never drawn */
        assert_int_equal(sample_one(&w, logits, &row).id, 0);
        assert_int_equal(sample_one(&w, logits, &row).id, 9); /* 0 has now been drawn once, 9 never */
    }
    world_close(&w);
    free(prompt), free(output), free(logits);
}

static void test_long_prompt(void **state) {
    for_each_backend(long_prompt_all);
}

static void contract_all(struct backend *backend) {
    enum { VOCAB = 8 };
    struct world w = world_open(backend, 1, VOCAB);
    float logits[VOCAB] = {0};
    struct sample_row row = {.params = plain};
    struct err refused = {0};
    logits_set(&w, logits, VOCAB);
    assert_int_equal(rows_issue(&w, &row, 1, 1, &refused), 0);
    const struct sample_params wrong[] = {params_of(NAN, 0, 1, 0, 1),      params_of(-1, 0, 1, 0, 1),
                                          params_of(INFINITY, 0, 1, 0, 1), params_of(1, -1, 1, 0, 1),
                                          params_of(1, 0, 0, 0, 1),        params_of(1, 0, NAN, 0, 1),
                                          params_of(1, 0, 1, 2, 1),        params_of(1, 0, 1, 0, 0)};
    for (size_t i = 0; i < COUNT(wrong); i++) {
        row.params = wrong[i];
        assert_int_equal(rows_issue(&w, &row, 1, 1, &refused), ERR_INVALID);
    }
    row.params = plain;
    row.logprobs = SAMPLE_LOGPROBS_MAX + 1;
    assert_int_equal(rows_issue(&w, &row, 1, 1, &refused), ERR_INVALID);
    row.logprobs = -1;
    row.banned = (int32_t[]){VOCAB};
    row.banned_count = 1;
    assert_int_equal(rows_issue(&w, &row, 1, 1, &refused), ERR_INVALID);
    row.banned_count = 0;
    row.slot = 1;
    assert_int_equal(rows_issue(&w, &row, 1, 1, &refused), ERR_INVALID);
    world_close(&w);
}

static void test_contract(void **state) {
    for_each_backend(contract_all);
}

/* ---- parts ----------------------------------------------------------------------------------------------------------
 */

/* The vectors that come with the generator's own library (Random123). */
static void test_philox(void **state) {
    struct philox r = philox4x32_10((struct philox){{0, 0, 0, 0}}, 0, 0);
    const uint32_t zero[] = {0x6627e8d5u, 0xe169c58du, 0xbc57ac4cu, 0x9b00dbd8u};
    assert_memory_equal(r.word, zero, sizeof zero);
    r = philox4x32_10((struct philox){{~0u, ~0u, ~0u, ~0u}}, ~0u, ~0u);
    const uint32_t ones[] = {0x408f276du, 0x41c83b0eu, 0xa20bc7c6u, 0x6d5451fdu};
    assert_memory_equal(r.word, ones, sizeof ones);
    r = philox4x32_10((struct philox){{0x243f6a88u, 0x85a308d3u, 0x13198a2eu, 0x03707344u}}, 0xa4093822u, 0x299f31d0u);
    const uint32_t pi[] = {0xd16cfe09u, 0x94fdccebu, 0x5001e420u, 0x24126ea1u};
    assert_memory_equal(r.word, pi, sizeof pi);
}

static void test_cut(void **state) {
    const float order[] = {1.0f, -0.0f, 3.0f, 0.0f, 3.0f, -5.0f, -INFINITY};
    for (int k = 1; k <= 7; k++) {
        struct sample_cut cut = sample_cut_find(order, NULL, 7, k);
        const int best[] = {2, 4, 0, 1, 3, 5, 6};
        bool kept[7] = {0};
        for (int i = 0; i < 7; i++) kept[i] = sample_cut_keeps(&cut, order[i]);
        for (int i = 0; i < 7; i++) assert_int_equal(kept[best[i]], i < k);
    }
    struct sample_cut all = sample_cut_find(order, NULL, 7, 100.0);
    for (int i = 0; i < 7; i++) assert_true(sample_cut_keeps(&all, order[i]));
    const float values[] = {0.0f, 1.5f, -1.5f, 3e38f, -3e38f, 1e-40f};
    for (size_t i = 0; i < COUNT(values); i++) assert_true(sample_key_value(sample_key(values[i])) == values[i]);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_philox),       cmocka_unit_test(test_cut),         cmocka_unit_test(test_edges),
        cmocka_unit_test(test_reset),        cmocka_unit_test(test_contract),    cmocka_unit_test(test_logprobs),
        cmocka_unit_test(test_independence), cmocka_unit_test(test_processors),  cmocka_unit_test(test_distribution),
        cmocka_unit_test(test_graph),        cmocka_unit_test(test_long_prompt),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
