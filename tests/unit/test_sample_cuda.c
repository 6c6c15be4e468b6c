/* The CUDA sampler against the CPU's over many random rows of every kind: the same id but where rounding decides, and
 * the same log-probabilities, ranks and lists. */
#include "sample_world.h"

/* A row of one of several shapes: normal, flat with many equals, peaked over a long tail. */
static void row_logits(uint64_t *seed, float *x, int32_t vocab) {
    int32_t shape = random_below(seed, 4);
    for (int32_t i = 0; i < vocab; i++) {
        x[i] = random_normal(seed, shape == 3 ? 0.2 : 3.0);
        if (shape == 1) x[i] = floorf(x[i] * 0.5f);
    }
    for (int32_t i = 0; shape == 2 && i < 40; i++) x[random_below(seed, vocab)] += 12.0f + random_normal(seed, 3.0);
}

static void row_params(uint64_t *seed, struct sample_row *row) {
    static const float temperatures[] = {0.0f, 0.2f, 0.7f, 1.0f, 1.5f, 5.0f};
    static const int32_t ks[] = {0, 0, 0, 1, 20, 50, 1000, 3000};
    static const float ps[] = {1.0f, 1.0f, 0.9f, 0.95f, 0.5f, 0.999f};
    row->params =
        params_of(temperatures[random_below(seed, 6)], ks[random_below(seed, 8)], ps[random_below(seed, 6)],
                  random_below(seed, 4) ? 0.0f : 0.05f * (float)random_unit(seed), random_below(seed, 6) ? 1.0f : 0.8f);
    if (random_below(seed, 3) == 0) {
        row->params.repetition_penalty = 1.2f;
        row->params.presence_penalty = 0.3f;
        row->params.frequency_penalty = -0.1f;
    }
    row->params.seed = random_next(seed);
    row->position = random_below(seed, 100000);
    row->sample_index = random_below(seed, 3);
    row->logprobs = random_below(seed, 2) ? -1 : random_below(seed, SAMPLE_LOGPROBS_MAX + 1);
}

/* Whether two ids of one draw lie side by side in the running sum, where rounding may decide: what lies between them
 * and what they hold less than a few units in the last place of the sum away from the drawn number. */
static bool border_case(const struct sample_row *row, const float *logits, int32_t vocab, int32_t id) {
    double *z = zeros(vocab, sizeof *z), *p = zeros(vocab, sizeof *p), below = 0.0;
    for (int32_t i = 0; i < vocab; i++) z[i] = logits[i];
    reference(z, vocab, &row->params, p);
    for (int32_t i = 0; i < id; i++) below += p[i];
    double uniform = philox_uniform(row->params.seed, row->sample_index, row->position);
    bool near = uniform > below - 2e-5 && uniform < below + p[id] + 2e-5;
    free(z), free(p);
    return near;
}

static void against_cpu_case(struct backend *backend, uint64_t *seed, int32_t vocab, int32_t rows, int32_t *moved) {
    struct backend *cpu = backend_for(CPU_ISA_PORTABLE, 8);
    TEST_ERR_PASS(backend_step_open(cpu, TEST_STEP_BYTES, err));
    struct world a = world_open(cpu, rows, vocab), b = world_open(backend, rows, vocab);
    struct sample_row *row = zeros(rows, sizeof *row);
    struct sample_result *want = zeros(rows, sizeof *want), *got = zeros(rows, sizeof *got);
    float *logits = zeros((int64_t)rows * vocab, sizeof *logits);
    int32_t prompt[500];
    for (int32_t r = 0; r < rows; r++) {
        row_logits(seed, logits + (int64_t)r * vocab, vocab);
        row_params(seed, &row[r]);
        row[r].slot = r;
        for (size_t i = 0; i < COUNT(prompt); i++) prompt[i] = random_below(seed, vocab);
        struct op_sample_reset_args reset = {NULL, r, r % 2 == 0, prompt, prompt, COUNT(prompt), 100};
        reset.state = a.state;
        TEST_ERR_PASS(op_sample_reset(cpu, &reset, err));
        reset.state = b.state;
        TEST_ERR_PASS(op_sample_reset(backend, &reset, err));
    }
    sample_rows(&a, logits, row, rows, want);
    sample_rows(&b, logits, row, rows, got);
    for (int32_t r = 0; r < rows; r++) {
        const struct sample_params *p = &row[r].params;
        bool penalised = r % 2 == 0 && (p->repetition_penalty != 1.0f || p->presence_penalty != 0.0f);
        if (want[r].id != got[r].id) {
            ++*moved;
            print_message("vocab %d row %d: CPU %d, GPU %d (T %g k %d p %g min %g typ %g)\n", vocab, r, want[r].id,
                          got[r].id, (double)p->temperature, p->top_k, (double)p->top_p, (double)p->min_p,
                          (double)p->typical_p);
            assert_true(p->temperature >= SAMPLE_GREEDY_BELOW && got[r].id >= 0);
            if (!penalised && p->typical_p == 1.0f)
                assert_true(border_case(&row[r], logits + (int64_t)r * vocab, vocab, got[r].id));
            continue;
        }
        assert_int_equal(want[r].rank, got[r].rank);
        assert_int_equal(want[r].top_count, got[r].top_count);
        expect_close("logprob", r, got[r].logprob, want[r].logprob, 1e-5);
        for (int32_t i = 0; i < want[r].top_count; i++) {
            assert_int_equal(want[r].top_ids[i], got[r].top_ids[i]);
            expect_close("top", i, got[r].top_logprobs[i], want[r].top_logprobs[i], 1e-5);
        }
        assert_int_equal(last_token(&b, r), got[r].id);
    }
    world_close(&a), world_close(&b);
    backend_close(cpu);
    free(row), free(want), free(got), free(logits);
}

/* Mixed rows, small vocabularies to large ones, rows that begin at no multiple of 16 bytes among them. */
static void against_cpu_all(struct backend *backend) {
    static const int32_t vocabs[] = {1, 31, 1000, 2049, 32003, 49152, 128256, 262145};
    uint64_t seed = 5;
    int32_t rows = 0, moved = 0;
    if (!on_cuda(backend)) return;
    for (size_t i = 0; i < COUNT(vocabs); i++) {
        int32_t n = vocabs[i] > 100000 ? 64 : 128;
        if (test_quick()) n = 8;
        against_cpu_case(backend, &seed, vocabs[i], n, &moved);
        rows += n;
    }
    print_message("%d rows, %d of them drawn otherwise than on the CPU\n", rows, moved);
    assert_true(moved * 100 <= rows);
}

static void test_against_cpu(void **state) {
    for_each_backend(against_cpu_all);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_against_cpu)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
