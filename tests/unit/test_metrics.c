/* Metrics: the text is well formed, edges are vLLM's, counts add up, label sets stay closed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "server/auth.h"
#include "server/health.h"
#include "server/metrics.h"

static struct buf scrape(struct metrics *m, const struct engine_stats *stats) {
    struct buf out = {0};
    struct engine_info info = {.page_size = 64, .pages_total = 10, .kv_dtype = DTYPE_F16, .max_model_len = 2048};
    const struct metrics_replica replica = {.known = true,
                                            .state = "up",
                                            .starts = 3,
                                            .deaths = 2,
                                            .requests_retried = 5,
                                            .requests_failed = 1,
                                            .stats = *stats};
    struct metrics_scrape from = {
        .replicas = &replica, .count = 1, .info = &info, .connections = 3, .ready = true, .start_seconds = 0.25};
    metrics_write(m, &from, &out);
    return out;
}

/* The value of the line that begins with `series`; fails when it is not there. */
static double value_of(const struct buf *text, const char *series) {
    size_t n = strlen(series);
    for (const char *line = text->data; line && *line; line = strchr(line, '\n') ? strchr(line, '\n') + 1 : NULL)
        if (strncmp(line, series, n) == 0 && line[n] == ' ') return atof(line + n + 1);
    fail_msg("no series %s", series);
    return -1;
}

static void test_text(void **state) {
    struct metrics *m = metrics_open();
    metrics_set_model(m, "a\"b\\c\nd", 2048);
    struct engine_stats stats = {.running = 2,
                                 .pages_total = 10,
                                 .pages_held = 5,
                                 .pages_free = 5,
                                 .finished = {[FINISH_STOP] = 4, [FINISH_ABORT] = 1}};
    struct buf out = scrape(m, &stats);
    char *copy = strdup(out.data), *rest = copy;
    int lines = 0;
    for (char *line; (line = strsep(&rest, "\n")) && *line; lines++) {
        if (line[0] == '#') continue;
        char *space = strrchr(line, ' ');
        char *end;
        assert_non_null(space);
        strtod(space + 1, &end);
        assert_true(*end == '\0' && end != space + 1);
        char *open = strchr(line, '{');
        if (open) assert_true(space[-1] == '}' && open[1] != '}');
        assert_null(strstr(line, ",}"));
        assert_null(strstr(line, "nan"));
    }
    assert_true(lines > 200);
    assert_non_null(strstr(out.data, "model_name=\"a\\\"b\\\\c d\",engine=\"0\""));
    free(copy);
    buf_deinit(&out);
    metrics_close(m);
}

#define L "{model_name=\"m\",engine=\"0\""

static void test_counts(void **state) {
    struct metrics *m = metrics_open();
    metrics_set_model(m, "m", 2048);
    struct engine_stats stats = {.running = 2,
                                 .waiting = 7,
                                 .pages_total = 10,
                                 .pages_held = 5,
                                 .prompt_tokens = 30,
                                 .prefix_hit_tokens = 12,
                                 .finished = {[FINISH_STOP] = 4},
                                 .steps = 3,
                                 .step_tokens_bucket = {1, 2},
                                 .step_tokens_sum = 9};
    metrics_request_admitted(m, 3, 100);
    metrics_first_token(m, 1000, 1000 + 30 * NS_PER_MS);
    metrics_further_tokens(m, 1000, 1000 + 40 * NS_PER_MS, 4);
    metrics_further_tokens(m, 2000, 1000, 4); /* backwards: not observed */
    metrics_further_tokens(m, 0, 1000, 4);
    struct metrics_request r = {.arrival_ns = 1,
                                .scheduled_ns = 1 + NS_PER_MS,
                                .first_token_ns = 1 + 31 * NS_PER_MS,
                                .last_token_ns = 1 + 131 * NS_PER_MS,
                                .finished_ns = 1 + 132 * NS_PER_MS,
                                .prompt_tokens = 12,
                                .cached_tokens = 4,
                                .output_tokens = 11,
                                .max_output_tokens = 11};
    metrics_request_finished(m, &r);
    struct metrics_request never = {.arrival_ns = 1, .finished_ns = 2};
    metrics_request_finished(m, &never);
    metrics_request_refused(m, 429);
    metrics_http(m, "POST", "/generate", 200, 10, 5 * NS_PER_MS);
    metrics_http(m, "BREW", "/generate/../x", 299, 10, -5);
    struct buf out = scrape(m, &stats);
    assert_true(value_of(&out, "vllm:time_to_first_token_seconds_bucket" L ",le=\"0.02\"}") == 0);
    assert_true(value_of(&out, "vllm:time_to_first_token_seconds_bucket" L ",le=\"0.04\"}") == 1);
    assert_true(value_of(&out, "vllm:time_to_first_token_seconds_bucket" L ",le=\"2560.0\"}") == 1);
    assert_true(value_of(&out, "vllm:time_to_first_token_seconds_count" L "}") == 1);
    assert_true(value_of(&out, "vllm:inter_token_latency_seconds_bucket" L ",le=\"0.01\"}") == 4);
    assert_true(value_of(&out, "vllm:inter_token_latency_seconds_count" L "}") == 4);
    assert_true(value_of(&out, "vllm:request_time_per_output_token_seconds_bucket" L ",le=\"0.01\"}") == 1);
    assert_true(value_of(&out, "vllm:e2e_request_latency_seconds_count" L "}") == 2);
    assert_true(value_of(&out, "vllm:request_queue_time_seconds_count" L "}") == 1);
    assert_true(value_of(&out, "vllm:request_prompt_tokens_bucket" L ",le=\"10.0\"}") == 1);
    assert_true(value_of(&out, "vllm:request_prompt_tokens_bucket" L ",le=\"2000.0\"}") == 2);
    assert_true(value_of(&out, "vllm:request_params_n_sum" L "}") == 3);
    assert_true(value_of(&out, "vllm:num_requests_waiting" L "}") == 7);
    assert_true(value_of(&out, "vllm:num_requests_waiting_by_reason" L ",reason=\"capacity\"}") == 7);
    assert_true(value_of(&out, "vllm:num_requests_waiting_by_reason" L ",reason=\"deferred\"}") == 0);
    assert_true(value_of(&out, "vllm:prompt_tokens_by_source_total" L ",source=\"local_compute\"}") == 30);
    assert_true(value_of(&out, "vllm:prompt_tokens_by_source_total" L ",source=\"local_cache_hit\"}") == 12);
    assert_true(value_of(&out, "vllm:prompt_tokens_total" L "}") == 42);
    assert_true(value_of(&out, "vllm:kv_cache_usage_perc" L "}") == 0.5);
    assert_true(value_of(&out, "vllm:request_success_total" L ",finished_reason=\"stop\"}") == 4);
    assert_true(value_of(&out, "vllm:request_success_total" L ",finished_reason=\"abort\"}") == 0);
    assert_true(value_of(&out, "vllm:iteration_tokens_total_bucket" L ",le=\"8.0\"}") == 3);
    assert_true(value_of(&out, "vllm:iteration_tokens_total_sum" L "}") == 9);
    assert_true(value_of(&out, "http_requests_total{handler=\"/generate\",method=\"POST\",status=\"2xx\"}") == 1);
    assert_true(value_of(&out, "http_requests_total{handler=\"other\",method=\"OTHER\",status=\"5xx\"}") == 1);
    assert_true(value_of(&out, "quire:requests_refused_total" L ",reason=\"overload\"}") == 1);
    buf_deinit(&out);
    metrics_close(m);
}

/* Each engine under its label; one that has no snapshot only with what the front knows of it. */
static void test_replicas(void **state) {
    struct metrics *m = metrics_open();
    struct buf out = {0};
    struct engine_info info = {.page_size = 64, .pages_total = 10, .kv_dtype = DTYPE_F16, .max_model_len = 2048};
    const struct metrics_replica replicas[3] = {
        {.known = true, .state = "up", .starts = 1, .stats = {.running = 4, .steps = 7, .step_tokens_sum = 70}},
        {.known = false, .state = "waiting", .starts = 2, .deaths = 2, .requests_retried = 3, .requests_failed = 9},
        {.known = true, .state = "draining", .starts = 5, .stats = {.running = 1, .finished = {[FINISH_STOP] = 6}}},
    };
    struct metrics_scrape from = {.replicas = replicas, .count = 3, .info = &info, .ready = true};
    metrics_set_model(m, "m", 2048);
    metrics_write(m, &from, &out);
    assert_true(value_of(&out, "vllm:num_requests_running{model_name=\"m\",engine=\"0\"}") == 4);
    assert_true(value_of(&out, "vllm:num_requests_running{model_name=\"m\",engine=\"2\"}") == 1);
    assert_null(strstr(out.data, "vllm:num_requests_running{model_name=\"m\",engine=\"1\"}"));
    assert_true(value_of(&out, "vllm:iteration_tokens_total_sum{model_name=\"m\",engine=\"0\"}") == 70);
    assert_true(value_of(&out, "vllm:request_success_total{model_name=\"m\",engine=\"2\",finished_reason=\"stop\"}") ==
                6);
    assert_true(value_of(&out, "quire:engine_dead{model_name=\"m\",engine=\"1\"}") == 1);
    assert_true(value_of(&out, "quire:replica_state{model_name=\"m\",engine=\"1\",state=\"waiting\"}") == 1);
    assert_true(value_of(&out, "quire:replica_state{model_name=\"m\",engine=\"1\",state=\"up\"}") == 0);
    assert_true(value_of(&out, "quire:replica_starts_total{model_name=\"m\",engine=\"2\"}") == 5);
    assert_true(value_of(&out, "quire:replica_deaths_total{model_name=\"m\",engine=\"1\"}") == 2);
    assert_true(value_of(&out, "quire:replica_requests_retried_total{model_name=\"m\",engine=\"1\"}") == 3);
    assert_true(value_of(&out, "quire:replica_requests_failed_total{model_name=\"m\",engine=\"1\"}") == 9);
    buf_deinit(&out);
    metrics_close(m);
}

/* Without an engine (the model loads) only the front is written. */
static void test_loading(void **state) {
    struct metrics *m = metrics_open();
    struct buf out = {0};
    struct metrics_scrape from = {0};
    metrics_write(m, &from, &out);
    assert_true(value_of(&out, "quire:ready") == 0);
    assert_null(strstr(out.data, "num_requests_running{"));
    buf_deinit(&out);
    metrics_close(m);
}

static void test_auth(void **state) {
    struct auth auth;
    struct option_list keys = {.items = {"alpha", "beta"}, .count = 2}, none = {.count = 0};
    auth_init(&auth, &keys);
    assert_true(auth_allows(&auth, "Bearer alpha"));
    assert_true(auth_allows(&auth, "bearer  beta"));
    assert_false(auth_allows(&auth, "Bearer alph"));
    assert_false(auth_allows(&auth, "Bearer alphaa"));
    assert_false(auth_allows(&auth, "Bearer "));
    assert_false(auth_allows(&auth, "alpha"));
    assert_false(auth_allows(&auth, "Basic alpha"));
    assert_false(auth_allows(&auth, ""));
    assert_false(auth_allows(&auth, NULL));
    auth_init(&auth, &none);
    assert_true(auth_allows(&auth, NULL));
}

static void expect_health(const struct health *h, enum health_probe probe, const struct health_replica *replicas,
                          int32_t count, bool draining, int64_t now_ns, int status, const char *word) {
    struct buf body = {0};
    int got = health_answer(h, probe, replicas, count, draining, now_ns, &body);
    if (got != status || !strstr(body.data, word)) fail_msg("wanted %d %s, got %d %s", status, word, got, body.data);
    buf_deinit(&body);
}

static void test_health(void **state) {
    struct health h = {0};
    int64_t now = 1000 * NS_PER_SECOND;
    struct health_replica r[2] = {{.state = "starting"}, {.state = "starting"}};
    expect_health(&h, HEALTH_LIVE, r, 0, false, now, 200, "ok");
    expect_health(&h, HEALTH_READY, r, 2, false, now, 503, "loading");
    expect_health(&h, HEALTH_STARTUP, r, 2, false, now, 503, "loading");
    r[0] = r[1] = (struct health_replica){.up = true, .known = true, .state = "up", .pid = 77};
    h.started = true;
    expect_health(&h, HEALTH_READY, r, 2, false, now, 200, "{\"replica\":1,\"state\":\"up\",\"pid\":77");
    expect_health(&h, HEALTH_STARTUP, r, 2, true, now, 200, "ok");
    expect_health(&h, HEALTH_READY, r, 2, true, now, 503, "draining");
    expect_health(&h, HEALTH_LIVE, r, 2, true, now, 200, "ok");
    /* One is enough, none is not: the front lives on all the same. */
    r[0] = (struct health_replica){.state = "waiting", .deaths = 3};
    expect_health(&h, HEALTH_READY, r, 2, false, now, 200, "\"state\":\"waiting\",\"pid\":0,\"deaths\":3}");
    expect_health(&h, HEALTH_READY, r, 1, false, now, 503, "no engine is up");
    expect_health(&h, HEALTH_LIVE, r, 1, false, now, 200, "ok");
    expect_health(&h, HEALTH_STARTUP, r, 1, false, now, 200, "ok");
}

/* Work began long after the last step: not stalled. No step since then for too long: stalled. */
static void test_health_stall(void **state) {
    struct health h = {.started = true};
    int64_t now = 1000 * NS_PER_SECOND, late = now + HEALTH_STALL_NS + NS_PER_SECOND;
    struct health_replica r[2] = {{.up = true, .known = true, .state = "up"}, {.state = "waiting"}};
    r[0].stats = (struct engine_stats){.running = 1, .last_step_ns = now - 900 * NS_PER_SECOND};
    health_tick(&h, r, 2, now);
    expect_health(&h, HEALTH_READY, r, 2, false, now + NS_PER_SECOND, 200, "ok");
    health_tick(&h, r, 2, now + NS_PER_SECOND);
    expect_health(&h, HEALTH_READY, r, 2, false, late, 503, "stalled");
    r[1] = (struct health_replica){.up = true, .known = true, .state = "up"};
    expect_health(&h, HEALTH_READY, r, 2, false, late, 200, "ok"); /* the other one moves */
    r[0].stats.last_step_ns = late;
    expect_health(&h, HEALTH_READY, r, 1, false, late, 200, "ok");
    r[0].stats.running = 0;
    health_tick(&h, r, 2, now);
    assert_int_equal(h.busy_since_ns[0], 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text),     cmocka_unit_test(test_counts), cmocka_unit_test(test_loading),
        cmocka_unit_test(test_auth),     cmocka_unit_test(test_health), cmocka_unit_test(test_health_stall),
        cmocka_unit_test(test_replicas),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
