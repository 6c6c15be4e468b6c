/* A whole engine over several ranks: what a client gets is what one rank gives, and a rank's fault ends the engine with
 * a line and every request with an error.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <cmocka.h>
#include <pthread.h>

#include "engine/base/clock.h"
#include "engine/engine_private.h"
#include "engine/fit.h"
#include "tests/unit/engine_client.h"
#include "tests/unit/tiny_model.h"

enum { VOCAB = 300 };

/* ---- the same answers ---------------------------------------------------------------------------------------------
 */

static struct tiny_model tiny(void) {
    return (struct tiny_model){.architecture = "LlamaForCausalLM",
                               .extra = "",
                               .layers = 2,
                               .hidden = 64,
                               .ffn = 96,
                               .n_heads = 8,
                               .n_kv_heads = 2,
                               .head_dim = 16,
                               .vocab = VOCAB,
                               .dtype = TINY_BF16};
}

/* Greedy and drawn, one sample and two, with penalties and a bias, log-probabilities, stops. Returns its samples. */
static int32_t ask(struct engine *engine, int32_t id) {
    struct request *request;
    struct err err = {0};
    int32_t prompt[80], count = 1 + id * 7 % 79, stops[4];
    for (int32_t i = 0; i < count; i++) prompt[i] = (id % 5 * 31 + i * 13) % VOCAB;
    for (int32_t i = 0; i < 4; i++) stops[i] = (id * 37 + i * 11) % VOCAB;
    const struct request_parts parts = {.head = {.flags = REQUEST_NO_TEXT,
                                                 .id = (uint64_t)id,
                                                 .n = id % 6 == 0 ? SAMPLES : 1,
                                                 .max_tokens = 1 + id * 23 % 60,
                                                 .logprobs = id % 7 == 0 ? 3 : -1,
                                                 .sampling = {.temperature = id % 4 == 0 ? 1 : 0,
                                                              .top_p = 1,
                                                              .typical_p = 1,
                                                              .repetition_penalty = id % 5 == 0 ? 1.2f : 1,
                                                              .seed = (uint64_t)id}},
                                        .prompt = prompt,
                                        .prompt_count = count,
                                        .bias_ids = (int32_t[]){7, 9},
                                        .bias = (float[]){2, -3},
                                        .bias_count = id % 8 == 0 ? 2 : 0,
                                        .stop_ids = stops,
                                        .stop_id_count = id % 3 == 0 ? 4 : 0};
    if (request_build(&parts, &request, &err) || engine_submit(engine, request, &err)) fail_msg("%s", err.text);
    mem_free(request);
    return parts.head.n;
}

static void all_asked(const struct tiny_model *m, int32_t ranks, bool ahead, struct client *c) {
    struct engine_options o = {.block_size = 16,
                               .max_model_len = 160,
                               .max_num_seqs = 12,
                               .max_num_batched_tokens = 64,
                               .max_num_mixed_tokens = 40,
                               /* 12 pages of 16 tokens, f16 k and v of 2 layers: too few for all at once */
                               .kv_cache_bytes = (size_t)12 * 16 * 2 * 2 * 2 * 2 * 16,
                               .ahead = ahead};
    if (ranks > m->n_kv_heads) o.kv_cache_bytes *= (size_t)(ranks / m->n_kv_heads); /* KV heads are there twice */
    struct engine *engine = engine_start(m->folder, c, ranks, o);
    struct engine_stats stats;
    struct err err = {0};
    int32_t samples = 0;
    for (int32_t id = 0; id < REQUESTS_MAX; id++) samples += ask(engine, id);
    client_wait(c, samples);
    if (engine_audit(engine, &err)) fail_msg("%s", err.text);
    engine_stats(engine, &stats);
    assert_false(stats.dead);
    assert_true(stats.preemptions > 0);
    assert_int_equal(engine_info(engine)->pages_total, 13);
    engine_end(engine, c);
}

static void test_same_answers(void **state) {
    static struct client one, many;
    struct tiny_model m = tiny();
    tiny_make(&m, 12);
    all_asked(&m, 1, false, &one);
    for (int32_t ranks = 2; ranks <= 8; ranks *= 2) {
        all_asked(&m, ranks, ranks == 4, &many);
        for (int32_t id = 0; id < REQUESTS_MAX; id++)
            for (int32_t k = 0; k < SAMPLES; k++) {
                const struct sample *got = &many.samples[id][k], *wanted = &one.samples[id][k];
                if (got->count != wanted->count || got->finish != wanted->finish ||
                    memcmp(got->ids, wanted->ids, sizeof got->ids) != 0)
                    fail_msg("%d ranks: request %d sample %d differs", ranks, id, k);
            }
    }
    tiny_free(&m);
}

/* ---- faults -------------------------------------------------------------------------------------------------------
 */

static void test_faults(void **state) {
    static const char *const faults[] = {"rank:1,step:20", "rank:0,step:7", "rank:1,step:12,stall",
                                         "rank:1,step:9,batch", "rank:1,step:15,result"};
    static struct client c;
    struct tiny_model m = tiny();
    struct engine_stats stats;
    tiny_make(&m, 12);
    for (size_t i = 0; i < sizeof faults / sizeof *faults; i++) {
        setenv("QUIRE_FAULT", faults[i], 1);
        struct engine_options o = {.block_size = 16, .max_model_len = 160, .step_timeout_ns = NS_PER_SECOND / 4};
        struct engine *engine = engine_start(m.folder, &c, 2, o);
        unsetenv("QUIRE_FAULT");
        int32_t samples = 0;
        const int64_t begin_ns = clock_now_ns();
        for (int32_t id = 1; id < 12; id++) samples += ask(engine, id);
        client_wait(&c, samples);
        const double seconds = (double)(clock_now_ns() - begin_ns) * 1e-9;
        int32_t errors = 0;
        for (int32_t id = 1; id < 12; id++) errors += c.samples[id][0].finish == FINISH_ERROR;
        assert_true(errors > 0);
        assert_true(seconds < 6); /* on a busy machine */
        int64_t give_up_ns = clock_now_ns() + 10 * NS_PER_SECOND;
        do { /* the snapshot follows the last events */
            nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
            engine_stats(engine, &stats);
        } while (!stats.dead && clock_now_ns() < give_up_ns);
        assert_true(stats.dead);
        print_message("%s: %d requests ended after %.3f s: %s\n", faults[i], errors, seconds, stats.dead_text);
        assert_non_null(strstr(stats.dead_text, "rank"));
        assert_null(strstr(stats.dead_text, "another rank has failed")); /* but which, and why */
        engine_end(engine, &c);
    }
    tiny_free(&m);
}

/* ---- does it fit --------------------------------------------------------------------------------------------------
 */

static struct fit_choice choice(int32_t ranks, size_t weights_mib, int64_t kv_tokens, bool fits) {
    return (struct fit_choice){.ranks = ranks, .weight_bytes = weights_mib << 20, .kv_tokens = kv_tokens, .fits = fits};
}

static void test_fit(void **state) {
    struct fit fit = {.devices = 4, .smallest = 2, .choice_count = 4, .device = {.name = "GPU"}};
    struct engine_options o = {.model_path = NULL, .block_size = 16, .dtype = DTYPE_COUNT, .kv_dtype = DTYPE_COUNT};
    struct tiny_model m = tiny();
    struct err err = {0};
    char text[200];
    int32_t ranks = 0;
    fit.choices[0] = choice(1, 134570, 0, false);
    fit.choices[1] = choice(2, 67285, 388416, true);
    fit.choices[2] = choice(4, 33643, 1163264, true);
    fit.choices[3] = choice(8, 16822, 2700000, true);
    fit_sentence(&fit, 1, text, sizeof text);
    assert_string_equal(text, "--tensor-parallel-size 2 fits (67285 MiB of weights a GPU, 388416 tokens of KV), "
                              "4 (33643 MiB, 1163264 tokens)");
    fit_sentence(&fit, 9, text, sizeof text);
    assert_string_equal(text, "");
    assert_int_equal(fit_choose(&fit, &ranks, &err), 0);
    assert_int_equal(ranks, 2);
    fit.devices = 1;
    assert_int_equal(fit_choose(&fit, &ranks, &err), ERR_UNSUPPORTED);
    assert_non_null(strstr(err.text, "--tensor-parallel-size 2 fits"));
    fit.smallest = 0;
    assert_int_equal(fit_choose(&fit, &ranks, &err), ERR_UNSUPPORTED);
    assert_non_null(strstr(err.text, "no number of devices"));
    /* A process looks at the devices there are. */
    tiny_make(&m, 12);
    o.model_path = m.folder;
    o.backend.device = DEVICE_CPU;
    if (fit_probe(&o, &fit, &err)) fail_msg("%s", err.text);
    assert_int_equal(fit.devices, 1);
    assert_int_equal(fit.smallest, 1);
    assert_true(fit.choices[0].kv_tokens >= 512 && fit.choices[0].weight_bytes > 1000);
    o.model_path = "/nowhere";
    assert_int_equal(fit_probe(&o, &fit, &err), ERR_NOT_FOUND);
    tiny_free(&m);
}

/* A model of 70B in bf16 on GPUs of 141 GB: one does not hold it, two do. The shapes' arithmetic is that of the CPU,
 * whose activations are wider; the memory is a GPU's. */
static void test_fit_large(void **state) {
    static const char config[] =
        "{\"architectures\":[\"LlamaForCausalLM\"],\"num_hidden_layers\":80,\"hidden_size\":8192,"
        "\"intermediate_size\":28672,\"num_attention_heads\":64,\"num_key_value_heads\":8,\"head_dim\":128,"
        "\"vocab_size\":128256,\"max_position_embeddings\":8192,\"rms_norm_eps\":1e-05,\"hidden_act\":\"silu\","
        "\"torch_dtype\":\"bfloat16\"}";
    const struct backend_options cpu = {.device = DEVICE_CPU, .threads = 1};
    struct engine_options o = {.block_size = 64, .dtype = DTYPE_COUNT, .kv_dtype = DTYPE_COUNT, .ranks = 1};
    struct tiny_model m = {0};
    struct model_files *files;
    struct backend *backend;
    struct plan plan;
    struct fit fit;
    struct err err = {0};
    snprintf(m.folder, sizeof m.folder, "/tmp/quire-tiny-XXXXXX");
    assert_non_null(mkdtemp(m.folder));
    tiny_write(&m, "config.json", config, sizeof config - 1);
    if (model_files_open_shapes(m.folder, &files, &err)) fail_msg("%s", err.text);
    if (backend_open(&cpu, &backend, &err)) fail_msg("%s", err.text);
    struct backend_info gpu = *backend_info(backend);
    gpu.device = DEVICE_CUDA;
    gpu.memory_total_bytes = (size_t)143771 << 20;
    gpu.memory_free_bytes = (size_t)143000 << 20;
    options_settle(&o, &gpu);
    fit_choices(&o, files, backend, &gpu, &fit);
    assert_int_equal(fit.smallest, 2);
    assert_int_equal(fit.choices[0].ranks, 1);
    assert_int_equal(fit.choices[0].kv_tokens, 0);
    assert_true(fit.choices[1].kv_tokens > 100000 && fit.choices[2].kv_tokens > 2 * fit.choices[1].kv_tokens);
    assert_int_equal(plan_make(&o, files, backend, &gpu, &plan, &err), ERR_UNSUPPORTED);
    print_message("%s\n", err.text);
    assert_non_null(strstr(err.text, "--tensor-parallel-size 2 fits ("));
    assert_non_null(strstr(err.text, "tokens of KV)"));
    o.ranks = 2;
    if (plan_make(&o, files, backend, &gpu, &plan, &err)) fail_msg("%s", err.text);
    o.ranks = 3;
    assert_int_equal(plan_make(&o, files, backend, &gpu, &plan, &err), ERR_UNSUPPORTED);
    assert_non_null(strstr(err.text, "what does: 1, 2, 4, 8"));
    backend_close(backend);
    model_files_close(files);
    tiny_free(&m);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_fit), cmocka_unit_test(test_fit_large),
                                       cmocka_unit_test(test_same_answers), cmocka_unit_test(test_faults)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
