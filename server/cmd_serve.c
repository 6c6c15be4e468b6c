/* `quire serve`: signals, then the port, then the engines and the text side by side, then requests; the way down in the
 * order that leaves nobody with half an answer. */
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
#include "server/devices.h"
#include "server/engine_setup.h"
#include "server/serve.h"

#define MEMORY_TIDY_BYTES ((size_t)8 * 1024 * 1024)
#define DRAIN_TICK_MS     20
#define DRAIN_GRACE_NS    (5 * NS_PER_SECOND) /* beyond the limit, for the engine to end what it was told to end */
#define DRAIN_HURRY_NS    (NS_PER_SECOND / 2) /* after a second signal */
#define DRAIN_READ_NS     (NS_PER_SECOND / 4) /* for clients to read what is written and close */
#define TEXT_FAILED_TICKS 2                   /* seconds for the engines to say more than that the text is bad */
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
    log_info("stopped", "requests_cut=%llu",
             (unsigned long long)serve->app.requests_cut + (unsigned long long)api_running(&serve->app));
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
    replicas_drain(serve->app.replicas, serve->drain_until_ns);
    uv_timer_start(&serve->drain, on_drain_tick, 0, DRAIN_TICK_MS);
}

/* The second signal: what runs is cut now, and streams still get their last event. The third does not even wait for
 * that. */
static void drain_hurry(struct serve *serve, int signum) {
    int64_t now_ns = clock_now_ns();
    if (serve->hurried) {
        loop_stop(serve, SERVE_EXIT_OK);
        return;
    }
    serve->hurried = true;
    log_warning("second signal: ending now", "signal=%d running=%d", signum, api_running(&serve->app));
    serve->drain_until_ns = now_ns + DRAIN_HURRY_NS - DRAIN_GRACE_NS;
    replicas_drain(serve->app.replicas, now_ns);
}

/* A thread that loads can be neither interrupted nor waited for, and owns nothing outside of this process. */
static bool thread_loads(const struct serve *serve) {
    if (serve->options.engine_process || !serve->app.replicas) return false;
    for (int32_t i = 0; i < replicas_count(serve->app.replicas); i++)
        if (replicas_state(serve->app.replicas, i) == REPLICA_STARTING) return true;
    return false;
}

static void on_signal(uv_signal_t *handle, int signum) {
    struct serve *serve = handle->data;
    if (thread_loads(serve)) _exit(SERVE_EXIT_OK);
    if (!serve->ready) {
        log_info("stopped while loading", "signal=%d", signum);
        loop_stop(serve, SERVE_EXIT_OK);
    } else if (serve->app.draining) {
        drain_hurry(serve, signum);
    } else {
        drain_begin(serve, signum);
    }
}

/* Every second: health, the line of rates. */

/* Of all engines together; one that was started anew begins at 0. */
static struct engine_stats stats_sum(const struct health_replica *replicas, int32_t count) {
    struct engine_stats sum = {0};
    for (int32_t i = 0; i < count; i++) {
        const struct engine_stats *e = &replicas[i].stats;
        if (!replicas[i].known) continue;
        sum.running += e->running;
        sum.waiting += e->waiting;
        sum.pages_total += e->pages_total;
        sum.pages_held += e->pages_held;
        sum.prompt_tokens += e->prompt_tokens;
        sum.generation_tokens += e->generation_tokens;
        sum.prefix_hit_tokens += e->prefix_hit_tokens;
        sum.prefix_queried_tokens += e->prefix_queried_tokens;
        sum.preemptions += e->preemptions;
    }
    return sum;
}

static void rates_log(struct serve *serve, const struct engine_stats *stats, int64_t now_ns) {
    struct serve_rates last = serve->rates;
    serve->rates = (struct serve_rates){now_ns, stats->prompt_tokens, stats->generation_tokens};
    if (stats->prompt_tokens < last.prompt_tokens || stats->generation_tokens < last.generation_tokens) return;
    uint64_t prompt = stats->prompt_tokens - last.prompt_tokens;
    uint64_t generation = stats->generation_tokens - last.generation_tokens;
    double seconds = (double)(now_ns - last.at_ns) * 1e-9;
    if (prompt + generation == 0 && stats->running + stats->waiting == 0) return;
    log_info("throughput",
             "prompt_tokens_per_s=%.1f generation_tokens_per_s=%.1f running=%d waiting=%d kv_usage=%.3f "
             "prefix_hit_rate=%.3f preemptions=%llu replicas_up=%d connections=%d",
             (double)prompt / seconds, (double)generation / seconds, stats->running, stats->waiting,
             stats->pages_total > 0 ? (double)stats->pages_held / stats->pages_total : 0.0,
             stats->prefix_queried_tokens ? (double)stats->prefix_hit_tokens / (double)stats->prefix_queried_tokens
                                          : 0.0,
             (unsigned long long)stats->preemptions, replicas_up(serve->app.replicas),
             http_server_connections(serve->app.http));
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

static void text_failed(struct serve *serve);

static void on_second(uv_timer_t *timer) {
    struct serve *serve = timer->data;
    struct health_replica replicas[HEALTH_REPLICAS_MAX];
    int64_t now_ns = clock_now_ns();
    orphans_reap(&serve->orphans);
    serve->seconds++;
    if (serve->text_failed && serve->seconds >= serve->text_failed + TEXT_FAILED_TICKS) text_failed(serve);
    if (!serve->ready) return;
    int32_t count = serve_replicas(serve, replicas);
    struct engine_stats sum = stats_sum(replicas, count);
    health_tick(&serve->health, replicas, count, now_ns);
    memory_tidy(serve, &sum);
    if (!serve->app.draining)
        notify_status(serve->notify, "%s: %d running, %d waiting, %d of %d engines up", serve->app.model_name,
                      sum.running, sum.waiting, replicas_up(serve->app.replicas), count);
    if (serve->seconds % 10 == 0) rates_log(serve, &sum, now_ns);
}

/* For the service manager's watchdog: this loop runs, and what it serves lives. */
static bool serve_alive(void *user) {
    struct serve *serve = user;
    struct health_replica replicas[HEALTH_REPLICAS_MAX];
    struct buf body = {0};
    int32_t count = serve_replicas(serve, replicas);
    int status =
        health_answer(&serve->health, HEALTH_LIVE, replicas, count, serve->app.draining, clock_now_ns(), &body);
    buf_deinit(&body);
    return status == 200;
}

/* Starting. */

static const char *shown_name(const struct serve *serve) {
    return serve->options.served_names.count ? serve->options.served_names.items[0] : serve->model.name;
}

/* The one line of a start that failed. A device that is not there: what serves instead. */
static void failure_print(const char *failed_at, const struct err *err) {
    bool device = strcmp(err->field, "device") == 0;
    bool told = strstr(err->text, "--device cpu") != NULL;
    fprintf(stderr, "quire: %s: %s%s\n", device ? "--device" : failed_at, err->text,
            device && !told ? "; --device cpu serves without it" : "");
}

static void text_failed(struct serve *serve) {
    if (serve->ending) return;
    failure_print("tokenizer", &serve->load.err);
    loop_stop(serve, serve_exit_code(&serve->load.err));
}

/* The engine opens the text too: a fault of that is told as what it is. */
static void on_refused(void *user, int32_t replica, const struct err *why) {
    struct serve *serve = user;
    if (serve->ending) return;
    if (serve->ready) {
        log_error("giving up", "why=%s", log_quote(why->text).text);
        fprintf(stderr, "quire: %s\n", why->text);
    } else {
        serve_load_join(serve);
        bool text = serve->load.err.code && strcmp(serve->load.err.text, why->text) == 0;
        failure_print(text ? "tokenizer" : "model", why);
    }
    loop_stop(serve, serve_exit_code(why));
}

static void flags_report(const struct serve *serve) {
    const struct options *o = &serve->options;
    const struct backend_info *backend = &serve->app.info->backend;
    if (o->enforce_eager && !backend->graphs)
        log_info("--enforce-eager changes nothing: the CPU has no device graphs", "");
    if (o->cuda_kernels != OPTION_KERNELS_AUTO && backend->device != DEVICE_CUDA)
        log_info("--cuda-kernels changes nothing: the CPU serves", "");
}

/* Serves from when the text is there and every engine is up, or died at least once and is started again while another
 * one is up. */
static void ready_check(struct serve *serve) {
    bool text = atomic_load(&serve->load.finished) && !serve->load.err.code;
    if (serve->ready || serve->ending || !text || !replicas_up(serve->app.replicas) ||
        !replicas_settled(serve->app.replicas))
        return;
    serve->app.text = serve->load.text;
    serve->app.info = replicas_info(serve->app.replicas);
    serve->app.model_name = shown_name(serve);
    metrics_set_model(serve->metrics, serve->app.model_name, serve->app.info->max_model_len);
    int64_t now_ns = clock_now_ns();
    serve->rates.at_ns = now_ns;
    serve->start_seconds = (double)(now_ns - serve->begun_ns) * 1e-9;
    serve->ready = serve->health.started = true;
    serve_report(serve);
    flags_report(serve);
    log_info("ready", "model=%s replicas=%d seconds=%.3f", log_quote(serve->app.model_name).text,
             replicas_up(serve->app.replicas), serve->start_seconds);
    notify_ready(serve->notify);
    notify_status(serve->notify, "serves %s", serve->app.model_name);
}

static void on_text(uv_async_t *async) {
    struct serve *serve = async->data;
    if (!atomic_load(&serve->load.finished)) return;
    serve_load_join(serve);
    uv_unref((uv_handle_t *)async);
    if (serve->load.err.code)
        serve->text_failed = serve->seconds + 1;
    else
        ready_check(serve);
}

static void on_replica(void *user, int32_t replica, enum replica_state state) {
    struct serve *serve = user;
    if (serve->app.replicas) ready_check(serve);
}

static void on_events(void *user, const void *records, size_t bytes) {
    struct serve *serve = user;
    api_on_events(&serve->app, records, bytes);
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
    if (engine_setup_refuse(o, serve->model.path, err)) return err->code;
    const struct replicas_callbacks engines = {on_events, on_replica, on_refused, serve};
    if (replicas_open(&serve->loop, o, serve->model.path, &engines, &serve->app.replicas, err)) return err->code;
    return serve_load_start(serve, on_text, err);
}

/* Clients first (their requests are cancelled), then the engines, then the rest. */
static void serve_end(struct serve *serve) {
    sigset_t set; /* one more signal, when libuv no longer takes them, would end the process by itself */
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    pthread_sigmask(SIG_BLOCK, &set, NULL);
    for (int i = 0; i < 2; i++) uv_close((uv_handle_t *)&serve->signals[i], NULL);
    uv_close((uv_handle_t *)&serve->second, NULL);
    uv_close((uv_handle_t *)&serve->drain, NULL);
    notify_close(serve->notify);
    if (serve->app.http) http_server_close(serve->app.http);
    while (api_running(&serve->app) > 0 && uv_run(&serve->loop, UV_RUN_ONCE)) {
    } /* what a worker still reads */
    replicas_close(serve->app.replicas);
    serve->app.replicas = NULL;
    if (serve->load.started && !atomic_load(&serve->load.finished)) _exit(serve->exit_code); /* owns nothing outside */
    serve_load_join(serve);
    if (serve->load.done.data) uv_close((uv_handle_t *)&serve->load.done, NULL);
    uv_run(&serve->loop, UV_RUN_DEFAULT);
    api_close(&serve->app);
    uv_loop_close(&serve->loop);
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
        code = devices_settle(&serve->options, serve->model.path, &err) ? say(&err) : serve_run(serve);
    }
    options_deinit(&serve->options);
    mem_free(serve);
    return code;
}
