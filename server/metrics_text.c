#include "server/metrics_text.h"

#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>

#include "engine/base/clock.h"
#include "engine/base/mem.h"

/* One scrape in the making. */
struct scrape {
    const struct metrics *metrics;
    const struct metrics_scrape *from;
    struct buf *out;
};

static void head(struct scrape *s, const char *name, const char *type, const char *help) {
    buf_printf(s->out, "# HELP %s %s\n# TYPE %s %s\n", name, help, name, type);
}

static void engine_value(struct scrape *s, int32_t engine, const char *name, const char *labels, double value) {
    buf_printf(s->out, "%s{model_name=\"%s\",engine=\"%d\"%s%s} %.17g\n", name, s->metrics->model, engine,
               labels[0] ? "," : "", labels, value);
}

/* What the front counts itself stands under the first engine, as with one server alone. */
static void model_value(struct scrape *s, const char *name, const char *labels, double value) {
    engine_value(s, 0, name, labels, value);
}

/* The snapshot of an engine, NULL while it has none. */
static const struct engine_stats *stats_of(const struct scrape *s, int32_t engine) {
    return s->from->replicas[engine].known ? &s->from->replicas[engine].stats : NULL;
}

/* A line for each engine; `e` in the expression is its snapshot. */
#define ENGINES(s, name, labels, expression)                                                                           \
    do {                                                                                                               \
        for (int32_t engine_ = 0; engine_ < (s)->from->count; engine_++) {                                             \
            const struct engine_stats *e = stats_of(s, engine_);                                                       \
            if (e) engine_value(s, engine_, name, labels, (double)(expression));                                       \
        }                                                                                                              \
    } while (0)

#define GAUGE(s, name, help, expression)                                                                               \
    do {                                                                                                               \
        head(s, name, "gauge", help);                                                                                  \
        ENGINES(s, name, "", expression);                                                                              \
    } while (0)

#define COUNTER(s, name, help, expression)                                                                             \
    do {                                                                                                               \
        head(s, name, "counter", help);                                                                                \
        ENGINES(s, name, "", expression);                                                                              \
    } while (0)

static void plain(struct scrape *s, const char *name, const char *type, const char *help, double value) {
    head(s, name, type, help);
    buf_printf(s->out, "%s %.17g\n", name, value);
}

/* `engine` -1: without the model's labels. */
static void buckets_write(struct scrape *s, const char *name, int32_t engine, const double *edges, int32_t edge_count,
                          const uint64_t *buckets, double sum) {
    char labels[320] = "";
    uint64_t below = 0;
    if (engine >= 0) snprintf(labels, sizeof labels, "model_name=\"%s\",engine=\"%d\",", s->metrics->model, engine);
    for (int32_t i = 0; i < edge_count; i++) {
        below += buckets[i];
        buf_printf(s->out, "%s_bucket{%sle=\"%.10g%s\"} %llu\n", name, labels, edges[i],
                   edges[i] == (double)(int64_t)edges[i] ? ".0" : "", (unsigned long long)below);
    }
    below += buckets[edge_count];
    size_t used = strlen(labels);
    buf_printf(s->out, "%s_bucket{%sle=\"+Inf\"} %llu\n", name, labels, (unsigned long long)below);
    if (used) labels[used - 1] = '\0'; /* no comma behind the last label */
    const char *open = used ? "{" : "", *close = used ? "}" : "";
    buf_printf(s->out, "%s_sum%s%s%s %.17g\n", name, open, labels, close, sum);
    buf_printf(s->out, "%s_count%s%s%s %llu\n", name, open, labels, close, (unsigned long long)below);
}

static void histograms_write(struct scrape *s) {
    for (int32_t i = 0; i < HIST_COUNT; i++) {
        const struct histogram_form *form = histogram_form((enum metrics_histogram)i);
        const struct histogram *h = &s->metrics->histograms[i];
        int32_t count;
        const double *edges = histogram_edges(s->metrics, (enum metrics_histogram)i, &count);
        head(s, form->name, "histogram", form->help);
        buckets_write(s, form->name, form->model_labels ? 0 : -1, edges, count, h->buckets, h->sum);
    }
}

static void http_write(struct scrape *s) {
    static const char *const classes[] = {"1xx", "2xx", "3xx", "4xx", "5xx"};
    uint64_t by_status[HTTP_LABEL_STATUSES] = {0};
    head(s, "http_requests_total", "counter", "replies by path, method and class of status");
    for (int32_t p = 0; p < HTTP_LABEL_PATHS; p++)
        for (int32_t m = 0; m < HTTP_LABEL_METHODS; m++) {
            uint64_t by_class[5] = {0};
            for (int32_t k = 0; k < HTTP_LABEL_STATUSES; k++) {
                int status = metrics_http_status(k);
                by_class[(status ? status : 500) / 100 - 1] += s->metrics->http[p][m][k];
                by_status[k] += s->metrics->http[p][m][k];
            }
            for (int c = 0; c < 5; c++)
                if (by_class[c])
                    buf_printf(s->out, "http_requests_total{handler=\"%s\",method=\"%s\",status=\"%s\"} %llu\n",
                               metrics_http_path(p), metrics_http_method(m), classes[c],
                               (unsigned long long)by_class[c]);
        }
    head(s, "quire:http_responses_total", "counter", "replies by status; 499: the client left first");
    for (int32_t k = 0; k < HTTP_LABEL_STATUSES; k++)
        if (by_status[k])
            buf_printf(s->out, "quire:http_responses_total{status_code=\"%d\"} %llu\n", metrics_http_status(k),
                       (unsigned long long)by_status[k]);
    plain(s, "quire:http_response_bytes_total", "counter", "bytes of reply bodies", (double)s->metrics->http_bytes);
}

static void finished_write(struct scrape *s) {
    head(s, "vllm:request_success_total", "counter", "admitted requests that ended, by reason; each is counted once");
    for (int r = FINISH_NONE + 1; r < FINISH_REASON_COUNT; r++) {
        char label[64];
        snprintf(label, sizeof label, "finished_reason=\"%s\"", finish_reason_name((enum finish_reason)r));
        ENGINES(s, "vllm:request_success_total", label, e->finished[r]);
    }
}

static void steps_write(struct scrape *s) {
    static const double edges[] = {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};
    const int32_t count = (int32_t)(sizeof edges / sizeof *edges);
    head(s, "vllm:iteration_tokens_total", "histogram", "tokens computed in one step");
    for (int32_t i = 0; i < s->from->count; i++) {
        const struct engine_stats *e = stats_of(s, i);
        if (e)
            buckets_write(s, "vllm:iteration_tokens_total", i, edges, count, e->step_tokens_bucket,
                          (double)e->step_tokens_sum);
    }
    COUNTER(s, "quire:steps_total", "steps of the engine", e->steps);
    COUNTER(s, "quire:step_seconds_total", "time in steps", (double)e->step_ns * 1e-9);
    COUNTER(s, "quire:step_host_seconds_total", "the engine thread's work for steps, waiting left out",
            (double)e->host_ns * 1e-9);
}

static void graphs_write(struct scrape *s) {
    COUNTER(s, "quire:decode_steps_total", "steps that only decode", e->decode_steps);
    COUNTER(s, "quire:graph_replays_total", "decode steps that ran from a recorded graph", e->graph_replays);
    COUNTER(s, "quire:graph_captures_total", "graphs recorded, one for each number of padded rows", e->graph_captures);
    COUNTER(s, "quire:graph_capture_seconds_total", "time spent recording them", (double)e->graph_capture_ns * 1e-9);
    COUNTER(s, "quire:decode_stack_steps_total", "decode steps whose layers ran as one kernel", e->stack_steps);
}

static void pages_write(struct scrape *s) {
    GAUGE(s, "vllm:kv_cache_usage_perc", "share of the KV pages that running requests hold, 0 to 1",
          e->pages_total > 0 ? (double)e->pages_held / e->pages_total : 0);
    head(s, "quire:kv_pages", "gauge", "KV pages by state; free + cached + held = all");
    ENGINES(s, "quire:kv_pages", "state=\"free\"", e->pages_free);
    ENGINES(s, "quire:kv_pages", "state=\"cached\"", e->pages_cached);
    ENGINES(s, "quire:kv_pages", "state=\"held\"", e->pages_held);
    COUNTER(s, "vllm:prefix_cache_queries_total", "prompt tokens looked up in the prefix cache",
            e->prefix_queried_tokens);
    COUNTER(s, "vllm:prefix_cache_hits_total", "prompt tokens found there", e->prefix_hit_tokens);
    COUNTER(s, "vllm:num_preemptions_total", "times a request lost its pages to another", e->preemptions);
}

static void tokens_write(struct scrape *s) {
    COUNTER(s, "vllm:prompt_tokens_total", "prompt tokens served, cached ones too",
            e->prompt_tokens + e->prefix_hit_tokens);
    COUNTER(s, "vllm:prompt_tokens_cached_total", "prompt tokens taken from the cache", e->prefix_hit_tokens);
    head(s, "vllm:prompt_tokens_by_source_total", "counter", "prompt tokens served, by where their KV came from");
    ENGINES(s, "vllm:prompt_tokens_by_source_total", "source=\"local_compute\"", e->prompt_tokens);
    ENGINES(s, "vllm:prompt_tokens_by_source_total", "source=\"local_cache_hit\"", e->prefix_hit_tokens);
    COUNTER(s, "vllm:generation_tokens_total", "tokens drawn", e->generation_tokens);
}

static void engines_write(struct scrape *s) {
    GAUGE(s, "vllm:num_requests_running", "requests being computed", e->running);
    GAUGE(s, "vllm:num_requests_waiting", "requests waiting", e->waiting);
    head(s, "vllm:num_requests_waiting_by_reason", "gauge", "requests waiting, by what for; nothing defers one here");
    ENGINES(s, "vllm:num_requests_waiting_by_reason", "reason=\"capacity\"", e->waiting);
    ENGINES(s, "vllm:num_requests_waiting_by_reason", "reason=\"deferred\"", 0 * e->waiting);
    pages_write(s);
    tokens_write(s);
    finished_write(s);
    COUNTER(s, "quire:requests_submitted_total", "requests the engine took", e->submitted);
    COUNTER(s, "quire:requests_rejected_total", "requests the engine refused", e->refused);
    steps_write(s);
    graphs_write(s);
    GAUGE(s, "quire:prefill_tokens_per_second", "measured rate of prompts", e->prefill_tokens_per_s);
    GAUGE(s, "quire:decode_tokens_per_second", "measured rate of outputs", e->decode_tokens_per_s);
    GAUGE(s, "quire:queued_tokens", "prompt tokens to compute and output tokens promised", e->queued_tokens);
}

/* What the front knows of each replica, whether it lives or not. */
static void replicas_write(struct scrape *s) {
    static const char *const states[] = {"starting", "up", "draining", "waiting", "gone"};
    const struct metrics_replica *r = s->from->replicas;
    int32_t count = s->from->count;
    head(s, "quire:replica_state", "gauge", "1 at the state the replica is in");
    for (int32_t i = 0; i < count; i++) {
        for (size_t k = 0; k < sizeof states / sizeof *states; k++) {
            char label[32];
            snprintf(label, sizeof label, "state=\"%s\"", states[k]);
            engine_value(s, i, "quire:replica_state", label, strcmp(r[i].state, states[k]) == 0);
        }
    }
    head(s, "quire:engine_dead", "gauge", "1 while the replica has no engine: it died and is not started again yet");
    for (int32_t i = 0; i < count; i++) engine_value(s, i, "quire:engine_dead", "", strcmp(r[i].state, "waiting") == 0);
    head(s, "quire:replica_starts_total", "counter", "engines started for this replica");
    for (int32_t i = 0; i < count; i++) engine_value(s, i, "quire:replica_starts_total", "", (double)r[i].starts);
    head(s, "quire:replica_deaths_total", "counter", "engines that died or had to be killed");
    for (int32_t i = 0; i < count; i++) engine_value(s, i, "quire:replica_deaths_total", "", (double)r[i].deaths);
    head(s, "quire:replica_requests_retried_total", "counter", "requests of a dead engine that went to another one");
    for (int32_t i = 0; i < count; i++)
        engine_value(s, i, "quire:replica_requests_retried_total", "", (double)r[i].requests_retried);
    head(s, "quire:replica_requests_failed_total", "counter", "requests that ended with their engine");
    for (int32_t i = 0; i < count; i++)
        engine_value(s, i, "quire:replica_requests_failed_total", "", (double)r[i].requests_failed);
    head(s, "quire:replica_start_seconds", "gauge", "how long its last start took");
    for (int32_t i = 0; i < count; i++) engine_value(s, i, "quire:replica_start_seconds", "", r[i].last_start_seconds);
}

static void info_write(struct scrape *s, const struct engine_info *i, bool prefix_caching) {
    char labels[256];
    snprintf(
        labels, sizeof labels,
        "block_size=\"%d\",num_gpu_blocks=\"%d\",cache_dtype=\"%s\",enable_prefix_caching=\"%s\",max_model_len=\"%d\"",
        i->page_size, i->pages_total, dtype_info(i->kv_dtype)->name, prefix_caching ? "True" : "False",
        i->max_model_len);
    head(s, "vllm:cache_config_info", "gauge", "the KV cache as configured");
    for (int32_t k = 0; k < s->from->count; k++) engine_value(s, k, "vllm:cache_config_info", labels, 1);
    GAUGE(s, "quire:weight_bytes", "bytes of weights", e ? i->weight_bytes : 0);
    GAUGE(s, "quire:kv_bytes", "bytes of the KV cache", e ? i->kv_bytes : 0);
    GAUGE(s, "quire:workspace_bytes", "bytes of workspace", e ? i->workspace_bytes : 0);
}

static int open_files(void) {
    DIR *dir = opendir("/proc/self/fd");
    int count = -3; /* ".", ".." and the folder itself */
    if (!dir) return 0;
    while (readdir(dir)) count++;
    closedir(dir);
    return count;
}

static void process_write(struct scrape *s) {
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double cpu = (double)(usage.ru_utime.tv_sec + usage.ru_stime.tv_sec) +
                 (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) * 1e-6;
    plain(s, "process_cpu_seconds_total", "counter", "processor time of this process", cpu);
    plain(s, "process_resident_memory_bytes", "gauge", "resident memory", (double)mem_resident_bytes());
    plain(s, "process_open_fds", "gauge", "open files and sockets", open_files());
}

static void front_write(struct scrape *s, const struct metrics_scrape *from) {
    static const char *const reasons[] = {"invalid", "overload", "unavailable"};
    head(s, "quire:requests_admitted_total", "counter", "requests handed to an engine");
    model_value(s, "quire:requests_admitted_total", "", (double)s->metrics->admitted);
    head(s, "quire:requests_refused_total", "counter", "requests refused before that, by kind");
    for (int r = 0; r < REFUSED_COUNT; r++) {
        char label[48];
        snprintf(label, sizeof label, "reason=\"%s\"", reasons[r]);
        model_value(s, "quire:requests_refused_total", label, (double)s->metrics->refused[r]);
    }
    plain(s, "quire:http_connections", "gauge", "open connections", from->connections);
    plain(s, "quire:ready", "gauge", "1 when requests are taken", from->ready);
    plain(s, "quire:start_seconds", "gauge", "process start to ready; 0 before", from->start_seconds);
    head(s, "quire:build_info", "gauge", "the version");
    buf_printf(s->out, "quire:build_info{version=\"%s\"} 1\n", QUIRE_VERSION);
}

void metrics_write(const struct metrics *metrics, const struct metrics_scrape *from, struct buf *out) {
    struct scrape s = {metrics, from, out};
    engines_write(&s);
    replicas_write(&s);
    if (from->info) info_write(&s, from->info, from->prefix_caching);
    histograms_write(&s);
    front_write(&s, from);
    http_write(&s);
    process_write(&s);
}
