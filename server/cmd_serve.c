/* `quire serve`: signals, then the port, then the model off the loop, then requests; the way down in the order that
 * leaves nobody with half an answer. */
#include "server/cmd_serve.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/mem.h"
#include "server/api.h"
#include "server/serve.h"

#define MEMORY_TIDY_BYTES ((size_t)8 * 1024 * 1024)
#define DRAIN_TICK_MS     20
#define DRAIN_GRACE_NS    (5 * NS_PER_SECOND) /* beyond the limit, for the engine to end what it was told to end */
#define DRAIN_HURRY_NS    (NS_PER_SECOND / 2) /* after a second signal */
#define DRAIN_READ_NS     (NS_PER_SECOND / 4) /* for clients to read what is written and close */
#define SILENT_SECONDS    30                  /* without a heartbeat the engine is taken for dead */
#define FILES_BESIDE      128                 /* open files that are no connections, and those told 503 */

static int say(const struct err *err) {
    fprintf(stderr, "quire: %s\n", err->text);
    return serve_exit_code(err);
}

static void loop_stop(struct serve *serve, int exit_code) {
    if (serve->ending) return;
    serve->ending = true;
    serve->exit_code = exit_code;
    uv_stop(&serve->loop);
}

/* Draining. */

/* Ends when every answer is written and its reader had a moment to take it, or when the limit is over. */
static void on_drain_tick(uv_timer_t *timer) {
    struct serve *serve = timer->data;
    int64_t now_ns = clock_now_ns();
    bool late = now_ns >= serve->drain_until_ns + DRAIN_GRACE_NS;
    bool idle = api_running(&serve->app) == 0;
    if (!idle && !late) return;
    http_server_stop(serve->app.http);
    bool written = http_server_unfinished(serve->app.http) == 0;
    if (!written)
        serve->written_ns = 0;
    else if (!serve->written_ns)
        serve->written_ns = now_ns;
    bool read =
        http_server_connections(serve->app.http) == 0 || (written && now_ns - serve->written_ns > DRAIN_READ_NS);
    if (!read && !late) return;
    struct engine_stats stats;
    uint64_t cut = (uint64_t)api_running(&serve->app);
    if (serve_stats(serve, &stats)) cut += stats.finished[FINISH_SHUTDOWN];
    log_info("stopped", "requests_cut=%llu", (unsigned long long)cut);
    loop_stop(serve, SERVE_EXIT_OK);
}

static void drain_begin(struct serve *serve, int signum) {
    int64_t now_ns = clock_now_ns();
    serve->app.draining = true;
    serve->drain_until_ns = now_ns + (int64_t)serve->options.shutdown_timeout_s * NS_PER_SECOND;
    log_info("shutting down", "signal=%d running=%d limit_seconds=%d", signum, api_running(&serve->app),
             serve->options.shutdown_timeout_s);
    notify_stopping(serve->notify);
    notify_status(serve->notify, "shutting down: %d running, for up to %d s", api_running(&serve->app),
                  serve->options.shutdown_timeout_s);
    http_server_drain(serve->app.http);
    if (serve->app.engine) engine_drain(serve->app.engine, serve->drain_until_ns);
    uv_timer_start(&serve->drain, on_drain_tick, 0, DRAIN_TICK_MS);
}

/* The second signal: what runs is cut now, and streams still get their last event. The third does not even wait for
 * that. */
static void drain_hurry(struct serve *serve, int signum) {
    int64_t now_ns = clock_now_ns();
    if (serve->hurried || !serve->app.engine) {
        loop_stop(serve, SERVE_EXIT_OK);
        return;
    }
    serve->hurried = true;
    log_warning("second signal: ending now", "signal=%d running=%d", signum, api_running(&serve->app));
    serve->drain_until_ns = now_ns + DRAIN_HURRY_NS - DRAIN_GRACE_NS;
    engine_drain(serve->app.engine, now_ns);
}

static void on_signal(uv_signal_t *handle, int signum) {
    struct serve *serve = handle->data;
    if (serve->load.started && !atomic_load(&serve->load.finished)) {
        log_info("stopped while loading", "signal=%d", signum);
        _exit(SERVE_EXIT_OK); /* the loading thread cannot be interrupted, and owns nothing outside this process */
    }
    if (serve->app.draining)
        drain_hurry(serve, signum);
    else
        drain_begin(serve, signum);
}

/* Every second: health, a dead engine, the line of rates. */

static void rates_log(struct serve *serve, const struct engine_stats *stats, int64_t now_ns) {
    struct serve_rates *last = &serve->rates;
    uint64_t prompt = stats->prompt_tokens - last->prompt_tokens;
    uint64_t generation = stats->generation_tokens - last->generation_tokens;
    double seconds = (double)(now_ns - last->at_ns) * 1e-9;
    *last = (struct serve_rates){now_ns, stats->prompt_tokens, stats->generation_tokens};
    if (prompt + generation == 0 && stats->running + stats->waiting == 0) return;
    log_info("throughput",
             "prompt_tokens_per_s=%.1f generation_tokens_per_s=%.1f running=%d waiting=%d kv_usage=%.3f "
             "prefix_hit_rate=%.3f "
             "preemptions=%llu connections=%d",
             (double)prompt / seconds, (double)generation / seconds, stats->running, stats->waiting,
             stats->pages_total > 0 ? (double)stats->pages_held / stats->pages_total : 0.0,
             stats->prefix_queried_tokens ? (double)stats->prefix_hit_tokens / (double)stats->prefix_queried_tokens
                                          : 0.0,
             (unsigned long long)stats->preemptions, http_server_connections(serve->app.http));
}

/* Counts seconds that this loop ran and saw no heartbeat, so that a stopped process that goes on is not taken for a
 * dead engine. Its thread cannot be joined then: the process ends here, and whoever watches it starts it again. */
static void silence_check(struct serve *serve, const struct engine_stats *stats) {
    if (stats->heartbeat_ns != serve->heartbeat_ns) serve->silent_seconds = 0;
    serve->heartbeat_ns = stats->heartbeat_ns;
    if (serve->silent_seconds++ < SILENT_SECONDS) return;
    log_error("the engine gives no sign of life", "seconds=%d running=%d waiting=%d", serve->silent_seconds,
              stats->running, stats->waiting);
    _exit(SERVE_EXIT_ENGINE);
}

/* Idle, and more resident than when it was last trimmed: what large bodies left in the heap goes back to the system. */
static void memory_tidy(struct serve *serve, const struct engine_stats *stats) {
    size_t resident;
    if (stats->running + stats->waiting > 0 || api_running(&serve->app) > 0) return;
    resident = mem_resident_bytes();
    if (resident < serve->resident_bytes + MEMORY_TIDY_BYTES) return;
    mem_trim();
    serve->resident_bytes = mem_resident_bytes();
}

static void on_second(uv_timer_t *timer) {
    struct serve *serve = timer->data;
    struct engine_stats stats;
    int64_t now_ns = clock_now_ns();
    orphans_reap(&serve->orphans);
    if (!serve_stats(serve, &stats)) return;
    health_tick(&serve->health, &stats, now_ns);
    silence_check(serve, &stats);
    if (stats.dead) {
        /* Its last events reached the clients a second ago at most; nothing is left to serve. */
        log_error("the engine died", "reason=%s", log_quote(stats.dead_text).text);
        loop_stop(serve, SERVE_EXIT_ENGINE);
        return;
    }
    memory_tidy(serve, &stats);
    if (!serve->app.draining)
        notify_status(serve->notify, "%s: %d running, %d waiting", serve->app.model_name, stats.running, stats.waiting);
    if (++serve->seconds % 10 == 0) rates_log(serve, &stats, now_ns);
}

/* For the service manager's watchdog: this loop runs, and what it serves lives. */
static bool serve_alive(void *user) {
    struct serve *serve = user;
    struct engine_stats stats;
    struct buf body = {0};
    int status = health_answer(&serve->health, HEALTH_LIVE, serve_stats(serve, &stats), serve->app.draining,
                               clock_now_ns(), &body);
    buf_deinit(&body);
    return status == 200;
}

/* Starting. */

static const char *shown_name(const struct serve *serve) {
    return serve->options.served_names.count ? serve->options.served_names.items[0] : serve->model.name;
}

/* The one line of a start that failed. A device that is not there: what serves instead. */
static void load_failure_print(const struct serve *serve) {
    const struct err *err = &serve->load.err;
    bool device = strcmp(err->field, "device") == 0;
    bool told = strstr(err->text, "--device cpu") != NULL;
    fprintf(stderr, "quire: %s: %s%s\n", device ? "--device" : serve->load.failed_at, err->text,
            device && !told ? "; --device cpu serves without it" : "");
}

static void on_loaded(uv_async_t *async) {
    struct serve *serve = async->data;
    if (!atomic_load(&serve->load.finished) || serve->ready) return;
    serve_load_join(serve);
    uv_unref((uv_handle_t *)async);
    if (serve->load.err.code) {
        load_failure_print(serve);
        loop_stop(serve, serve_exit_code(&serve->load.err));
        return;
    }
    serve->app.text = serve->load.text;
    serve->app.engine = serve->load.engine;
    serve->app.model_name = shown_name(serve);
    metrics_set_model(serve->metrics, serve->app.model_name, engine_info(serve->app.engine)->max_model_len);
    int64_t now_ns = clock_now_ns();
    serve->rates.at_ns = now_ns;
    serve->start_seconds = (double)(now_ns - serve->begun_ns) * 1e-9;
    serve->ready = true;
    serve_report(serve);
    if (serve->options.enforce_eager && !engine_info(serve->app.engine)->backend.graphs)
        log_info("--enforce-eager changes nothing: the CPU has no device graphs", "");
    if (serve->options.cuda_kernels != OPTION_KERNELS_AUTO &&
        engine_info(serve->app.engine)->backend.device != DEVICE_CUDA)
        log_info("--cuda-kernels changes nothing: the CPU serves", "");
    log_info("ready", "model=%s seconds=%.3f", log_quote(serve->app.model_name).text, serve->start_seconds);
    notify_ready(serve->notify);
    notify_status(serve->notify, "serves %s", serve->app.model_name);
}

/* No core files (they would hold prompts and keys), no new privileges, as many files as the system allows. Returns how
 * many connections that leaves. */
static int32_t process_settle(void) {
    struct rlimit limit = {0, 0};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    setrlimit(RLIMIT_CORE, &limit);
    signal(SIGPIPE, SIG_IGN);
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return INT32_MAX;
    limit.rlim_cur = limit.rlim_max;
    setrlimit(RLIMIT_NOFILE, &limit);
    getrlimit(RLIMIT_NOFILE, &limit);
    if (limit.rlim_cur == RLIM_INFINITY || limit.rlim_cur > INT32_MAX) return INT32_MAX;
    int32_t files = (int32_t)limit.rlim_cur;
    return files > 2 * FILES_BESIDE ? files - FILES_BESIDE : files / 2;
}

static void limits_fill(const struct options *o, int32_t files, struct http_limits *limits) {
    *limits = http_limits_default;
    limits->header_bytes = o->max_header_bytes;
    limits->body_bytes = o->max_body_bytes;
    limits->output_bytes = o->max_output_bytes;
    limits->connections = o->max_connections < files ? o->max_connections : files;
    limits->idle_timeout_ns = (int64_t)o->keep_alive_timeout_s * NS_PER_SECOND;
    if (limits->body_total_bytes < 2 * limits->body_bytes) limits->body_total_bytes = 2 * limits->body_bytes;
}

static bool host_public(const char *host) {
    return strncmp(host, "127.", 4) != 0 && strcmp(host, "::1") != 0 && strcmp(host, "localhost") != 0;
}

static void handles_open(struct serve *serve) {
    static const int numbers[2] = {SIGTERM, SIGINT};
    uv_loop_init(&serve->loop);
    serve->app.loop = &serve->loop;
    for (int i = 0; i < 2; i++) {
        uv_signal_init(&serve->loop, &serve->signals[i]);
        serve->signals[i].data = serve;
        uv_signal_start(&serve->signals[i], on_signal, numbers[i]);
    }
    uv_timer_init(&serve->loop, &serve->second);
    uv_timer_init(&serve->loop, &serve->drain);
    serve->second.data = serve->drain.data = serve;
    uv_timer_start(&serve->second, on_second, 1000, 1000);
    bridge_init(&serve->bridge, &serve->app);
}

static int serve_start(struct serve *serve, struct err *err) {
    struct http_callbacks callbacks;
    struct http_limits limits;
    const struct options *o = &serve->options;
    int port = o->port;
    limits_fill(o, process_settle(), &limits);
    handles_open(serve);
    serve->notify = notify_open(&serve->loop, serve_alive, serve);
    notify_status(serve->notify, "loading %s", serve->model.name);
    serve_callbacks(serve, &callbacks);
    serve->metrics = metrics_open();
    serve->app.metrics = serve->metrics;
    serve->app.options = o;
    serve->app.started_unix_s = clock_unix_s();
    serve->app.next_request_id = 1;
    api_open(&serve->app);
    if (http_server_open(&serve->loop, &limits, &callbacks, &serve->app.http, err)) return err->code;
    if (http_server_listen(serve->app.http, o->host, o->port, &port, err)) return err->code;
    log_info("listening", "address=http://%s%s%s:%d version=%s keys=%d", strchr(o->host, ':') ? "[" : "", o->host,
             strchr(o->host, ':') ? "]" : "", port, QUIRE_VERSION, o->api_keys.count);
    if (host_public(o->host) && o->api_keys.count == 0)
        log_warning("everyone who can reach this address may use the model: set --api-key", "host=%s", o->host);
    return serve_load_start(serve, on_loaded, err);
}

/* Clients first (their requests are cancelled), then the engine, whose last events are still read, then the rest. */
static void serve_end(struct serve *serve) {
    serve_load_join(serve);
    for (int i = 0; i < 2; i++) uv_close((uv_handle_t *)&serve->signals[i], NULL);
    uv_close((uv_handle_t *)&serve->second, NULL);
    uv_close((uv_handle_t *)&serve->drain, NULL);
    notify_close(serve->notify);
    if (serve->load.done.data) uv_close((uv_handle_t *)&serve->load.done, NULL);
    if (serve->app.http) http_server_close(serve->app.http);
    uv_run(&serve->loop, UV_RUN_DEFAULT);
    if (serve->load.engine) engine_close(serve->load.engine);
    serve->app.engine = NULL;
    bridge_deliver(&serve->bridge);
    api_close(&serve->app);
    bridge_close(&serve->bridge);
    uv_run(&serve->loop, UV_RUN_DEFAULT);
    uv_loop_close(&serve->loop);
    bridge_deinit(&serve->bridge);
    if (serve->load.text) text_close(serve->load.text);
    metrics_close(serve->metrics);
}

static int serve_run(struct serve *serve) {
    struct err err = {0};
    auth_init(&serve->auth, &serve->options.api_keys);
    int code = serve_start(serve, &err);
    if (code == 0)
        uv_run(&serve->loop, UV_RUN_DEFAULT);
    else
        serve->exit_code = say(&err);
    serve_end(serve);
    return serve->exit_code;
}

static void help_print(void) {
    struct buf text = {0};
    options_help(&text);
    fputs(text.data, stdout);
    buf_deinit(&text);
}

int cmd_serve(int argc, char *const *argv, int64_t begun_ns) {
    for (int i = 0; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0) {
            help_print();
            return SERVE_EXIT_OK;
        }
    struct err err = {0};
    struct serve *serve = mem_zalloc(1, sizeof *serve);
    serve->begun_ns = begun_ns;
    int code;
    if (options_parse(&serve->options, argc, argv, &err) ||
        model_path_find(serve->options.model, &serve->model, &err)) {
        code = say(&err);
    } else {
        log_set_level((enum log_level)serve->options.log_level);
        code = serve_run(serve);
    }
    options_deinit(&serve->options);
    mem_free(serve);
    return code;
}
