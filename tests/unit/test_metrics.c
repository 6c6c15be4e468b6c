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
    struct metrics_scrape from = {
        .engine = stats, .info = &info, .connections = 3, .ready = true, .start_seconds = 0.25};
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

/* Without an engine (the model loads) only the front is written. */
static void test_loading(void **state) {
    struct metrics *m = metrics_open();
    struct buf out = {0};
    struct metrics_scrape from = {0};
    metrics_write(m, &from, &out);
    assert_true(value_of(&out, "quire:ready") == 0);
    assert_null(strstr(out.data, "num_requests_running"));
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

static void expect_health(const struct health *h, enum health_probe probe, const struct engine_stats *stats,
                          bool draining, int64_t now_ns, int status, const char *word) {
    struct buf body = {0};
    int got = health_answer(h, probe, stats, draining, now_ns, &body);
    if (got != status || !strstr(body.data, word)) fail_msg("wanted %d %s, got %d %s", status, word, got, body.data);
    buf_deinit(&body);
}

static void test_health(void **state) {
    struct health h = {0};
    int64_t now = 1000 * NS_PER_SECOND;
    struct engine_stats ok = {.heartbeat_ns = now};
    expect_health(&h, HEALTH_LIVE, NULL, false, now, 200, "ok");
    expect_health(&h, HEALTH_READY, NULL, false, now, 503, "loading");
    expect_health(&h, HEALTH_STARTUP, NULL, false, now, 503, "loading");
    expect_health(&h, HEALTH_READY, &ok, false, now, 200, "ok");
    expect_health(&h, HEALTH_STARTUP, &ok, true, now, 200, "ok");
    expect_health(&h, HEALTH_READY, &ok, true, now, 503, "draining");
    expect_health(&h, HEALTH_LIVE, &ok, true, now, 200, "ok");
    struct engine_stats late = {.heartbeat_ns = now - HEALTH_HEARTBEAT_NS - 1};
    expect_health(&h, HEALTH_LIVE, &late, false, now, 503, "no heartbeat");
    struct engine_stats dead = {.heartbeat_ns = now, .dead = true};
    expect_health(&h, HEALTH_LIVE, &dead, false, now, 503, "dead");
    /* Work began long after the last step: not stalled. No step since then for too long: stalled. */
    struct engine_stats busy = {.heartbeat_ns = now, .running = 1, .last_step_ns = now - 900 * NS_PER_SECOND};
    health_tick(&h, &busy, now);
    expect_health(&h, HEALTH_READY, &busy, false, now + NS_PER_SECOND, 200, "ok");
    busy.heartbeat_ns = now + HEALTH_STALL_NS + NS_PER_SECOND;
    health_tick(&h, &busy, now + NS_PER_SECOND);
    expect_health(&h, HEALTH_READY, &busy, false, busy.heartbeat_ns, 503, "stalled");
    busy.last_step_ns = busy.heartbeat_ns;
    expect_health(&h, HEALTH_READY, &busy, false, busy.heartbeat_ns, 200, "ok");
    busy.running = 0;
    health_tick(&h, &busy, now);
    assert_int_equal(h.busy_since_ns, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_text), cmocka_unit_test(test_counts), cmocka_unit_test(test_loading),
        cmocka_unit_test(test_auth), cmocka_unit_test(test_health),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
