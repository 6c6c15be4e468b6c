#include "server/metrics.h"

#include <string.h>

#include "engine/base/mem.h"
#include "server/metrics_text.h"

static const double edges_ttft[] = {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5,  .75,
                                    1,    2.5,  5,   7.5, 10,  20,  40,  80, 160, 640, 2560};
static const double edges_itl[] = {.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80};
static const double edges_phase[] = {.3, .5, .8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                                     30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
static const double edges_n[] = {1, 2, 5, 10, 20};
static const double edges_fine[] = {.0005, .001, .002, .003, .004, .005, .0075, .01, .015, .02,
                                    .03,   .05,  .1,   .2,   .3,   .5,   1,     2,   5,    10};
static const double edges_http[] = {.001, .0025, .005, .01, .025, .05, .075, .1,  .25, .5, .75,
                                    1,    1.5,   2,    2.5, 3,    4,   5,    7.5, 10,  30, 60};

#define EDGES(table) table, (int32_t)(sizeof table / sizeof *table)

static const struct histogram_form forms[HIST_COUNT] = {
    [HIST_TTFT] = {"vllm:time_to_first_token_seconds", "from arrival to the first token", EDGES(edges_ttft), true},
    [HIST_ITL] = {"vllm:inter_token_latency_seconds", "between two tokens of a sample", EDGES(edges_itl), true},
    [HIST_TPOT] = {"vllm:request_time_per_output_token_seconds",
                   "mean time per output token of a request, the first left out", EDGES(edges_itl), true},
    [HIST_E2E] = {"vllm:e2e_request_latency_seconds", "from arrival to the end of a request", EDGES(edges_phase), true},
    [HIST_QUEUE] = {"vllm:request_queue_time_seconds", "from arrival to the first step", EDGES(edges_phase), true},
    [HIST_INFERENCE] = {"vllm:request_inference_time_seconds", "from the first step to the last token",
                        EDGES(edges_phase), true},
    [HIST_PREFILL] = {"vllm:request_prefill_time_seconds", "from the first step to the first token", EDGES(edges_phase),
                      true},
    [HIST_DECODE] = {"vllm:request_decode_time_seconds", "from the first token to the last", EDGES(edges_phase), true},
    [HIST_PROMPT] = {"vllm:request_prompt_tokens", "prompt tokens of a request", NULL, 0, true},
    [HIST_GENERATION] = {"vllm:request_generation_tokens", "output tokens of a request", NULL, 0, true},
    [HIST_GENERATION_MAX] = {"vllm:request_max_num_generation_tokens", "output tokens of a request's longest sample",
                             NULL, 0, true},
    [HIST_COMPUTED] = {"vllm:request_prefill_kv_computed_tokens", "prompt tokens of a request that were not cached",
                       NULL, 0, true},
    [HIST_PARAMS_N] = {"vllm:request_params_n", "n of a request", EDGES(edges_n), true},
    [HIST_PARAMS_MAX] = {"vllm:request_params_max_tokens", "max_tokens of a request", NULL, 0, true},
    [HIST_ITL_FINE] = {"quire:inter_token_latency_seconds", "between two tokens of a sample, finer edges",
                       EDGES(edges_fine), true},
    [HIST_QUEUE_FINE] = {"quire:request_queue_time_seconds", "from arrival to the first step, finer edges",
                         EDGES(edges_fine), true},
    [HIST_HTTP] = {"http_request_duration_highr_seconds", "from a request's first byte to the end of its reply",
                   EDGES(edges_http), false},
};

const struct histogram_form *histogram_form(enum metrics_histogram which) {
    return &forms[which];
}

const double *histogram_edges(const struct metrics *metrics, enum metrics_histogram which, int32_t *count) {
    if (forms[which].edges) {
        *count = forms[which].edge_count;
        return forms[which].edges;
    }
    *count = metrics->token_edge_count;
    return metrics->token_edges;
}

static void observe(struct metrics *metrics, enum metrics_histogram which, double value, uint64_t times) {
    int32_t count, i = 0;
    const double *edges = histogram_edges(metrics, which, &count);
    struct histogram *h = &metrics->histograms[which];
    while (i < count && value > edges[i]) i++;
    h->buckets[i] += times;
    h->count += times;
    h->sum += value * (double)times;
}

/* A span of clock times; one that never began or runs backwards is not observed. */
static void observe_span(struct metrics *metrics, enum metrics_histogram which, int64_t from_ns, int64_t to_ns) {
    if (from_ns > 0 && to_ns >= from_ns) observe(metrics, which, (double)(to_ns - from_ns) * 1e-9, 1);
}

struct metrics *metrics_open(void) {
    struct metrics *metrics = mem_zalloc(1, sizeof *metrics);
    metrics_set_model(metrics, "", 0);
    return metrics;
}

void metrics_close(struct metrics *metrics) {
    mem_free(metrics);
}

void metrics_set_model(struct metrics *metrics, const char *model_name, int32_t max_model_len) {
    static const double steps[] = {1, 2, 5};
    double limit = max_model_len > 0 ? max_model_len : 1e6;
    int32_t n = 0;
    for (double scale = 1; n < HISTOGRAM_EDGES_MAX && scale <= limit; scale *= 10)
        for (int i = 0; i < 3 && n < HISTOGRAM_EDGES_MAX && steps[i] * scale <= limit; i++)
            metrics->token_edges[n++] = steps[i] * scale;
    metrics->token_edge_count = n;
    size_t used = 0;
    for (const char *p = model_name; *p && used + 3 < sizeof metrics->model; p++) {
        if (*p == '"' || *p == '\\') metrics->model[used++] = '\\';
        metrics->model[used++] = *p == '\n' ? ' ' : *p;
    }
    metrics->model[used] = '\0';
}

void metrics_request_admitted(struct metrics *metrics, int32_t n, int32_t max_tokens) {
    metrics->admitted++;
    observe(metrics, HIST_PARAMS_N, n, 1);
    observe(metrics, HIST_PARAMS_MAX, max_tokens, 1);
}

void metrics_request_refused(struct metrics *metrics, int http_status) {
    metrics->refused[http_status == 429   ? REFUSED_OVERLOAD
                     : http_status >= 500 ? REFUSED_UNAVAILABLE
                                          : REFUSED_INVALID]++;
}

void metrics_first_token(struct metrics *metrics, int64_t arrival_ns, int64_t first_token_ns) {
    observe_span(metrics, HIST_TTFT, arrival_ns, first_token_ns);
}

void metrics_further_tokens(struct metrics *metrics, int64_t from_ns, int64_t to_ns, int32_t tokens) {
    if (tokens <= 0 || from_ns <= 0 || to_ns < from_ns) return;
    double each = (double)(to_ns - from_ns) * 1e-9 / tokens;
    observe(metrics, HIST_ITL, each, (uint64_t)tokens);
    observe(metrics, HIST_ITL_FINE, each, (uint64_t)tokens);
}

void metrics_request_finished(struct metrics *metrics, const struct metrics_request *r) {
    observe_span(metrics, HIST_E2E, r->arrival_ns, r->finished_ns);
    observe(metrics, HIST_PROMPT, r->prompt_tokens, 1);
    observe(metrics, HIST_COMPUTED, r->prompt_tokens - r->cached_tokens, 1);
    observe(metrics, HIST_GENERATION, r->output_tokens, 1);
    observe(metrics, HIST_GENERATION_MAX, r->max_output_tokens, 1);
    if (r->scheduled_ns <= 0) return;
    observe_span(metrics, HIST_QUEUE, r->arrival_ns, r->scheduled_ns);
    observe_span(metrics, HIST_QUEUE_FINE, r->arrival_ns, r->scheduled_ns);
    if (r->first_token_ns <= 0) return;
    observe_span(metrics, HIST_PREFILL, r->scheduled_ns, r->first_token_ns);
    observe_span(metrics, HIST_DECODE, r->first_token_ns, r->last_token_ns);
    observe_span(metrics, HIST_INFERENCE, r->scheduled_ns, r->last_token_ns);
    if (r->max_output_tokens > 1 && r->last_token_ns >= r->first_token_ns)
        observe(metrics, HIST_TPOT, (double)(r->last_token_ns - r->first_token_ns) * 1e-9 / (r->max_output_tokens - 1),
                1);
}

/* Label sets are closed: what a client sends never makes a new time series. */
static const char *const http_paths[HTTP_LABEL_PATHS] = {
    "other",
    "/generate",
    "/generate_stream",
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/health",
    "/health/live",
    "/health/ready",
    "/health/startup",
    "/metrics",
    "/ping",
    "/version",
    "/",
    "/info",
    "/model_info",
    "/load",
    "/abort_request",
    "/flush_cache",
    "/reset_prefix_cache",
    "/admin/replicas",
};
static const char *const http_methods[HTTP_LABEL_METHODS] = {"GET",  "POST",    "PUT",  "DELETE",
                                                             "HEAD", "OPTIONS", "OTHER"};
static const int http_statuses[HTTP_LABEL_STATUSES] = {200, 202, 204, 400, 401, 403, 404, 405, 408, 409, 413, 414, 415,
                                                       417, 422, 424, 429, 431, 499, 500, 501, 503, 504, 505, 0};

const char *metrics_http_path(int32_t i) {
    return http_paths[i];
}
const char *metrics_http_method(int32_t i) {
    return http_methods[i];
}
int metrics_http_status(int32_t i) {
    return http_statuses[i];
}

void metrics_http(struct metrics *metrics, const char *method, const char *path, int status, size_t bytes_out,
                  int64_t duration_ns) {
    int32_t p = 0, m = 0, s = 0;
    for (int32_t i = 1; i < HTTP_LABEL_PATHS; i++)
        if (strcmp(http_paths[i], path) == 0) p = i;
    while (m < HTTP_LABEL_METHODS - 1 && strcmp(http_methods[m], method) != 0) m++;
    while (s < HTTP_LABEL_STATUSES - 1 && http_statuses[s] != status) s++;
    metrics->http[p][m][s]++;
    metrics->http_bytes += bytes_out;
    observe(metrics, HIST_HTTP, (double)(duration_ns > 0 ? duration_ns : 0) * 1e-9, 1);
}
