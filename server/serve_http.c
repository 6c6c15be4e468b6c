/* Between the transport and the routes: who may come in, the small routes that are not an API (health, version,
 * metrics), refusals in the dialect of the path, the log line of a request. */
#include <stdio.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/mem.h"
#include "server/api.h"
#include "server/serve.h"

enum small_route { ROUTE_NONE, ROUTE_LIVE, ROUTE_READY, ROUTE_STARTUP, ROUTE_VERSION, ROUTE_METRICS };

static enum small_route route_find(const char *path) {
    static const struct {
        const char *path;
        enum small_route route;
    } table[] = {
        {"/health", ROUTE_READY},           {"/health/ready", ROUTE_READY}, {"/health/live", ROUTE_LIVE},
        {"/health/startup", ROUTE_STARTUP}, {"/ping", ROUTE_READY},         {"/version", ROUTE_VERSION},
        {"/metrics", ROUTE_METRICS},
    };
    for (size_t i = 0; i < sizeof table / sizeof *table; i++)
        if (strcmp(table[i].path, path) == 0) return table[i].route;
    return ROUTE_NONE;
}

int32_t serve_replicas(const struct serve *serve, struct health_replica out[HEALTH_REPLICAS_MAX]) {
    int32_t count = serve->app.replicas ? replicas_count(serve->app.replicas) : 0;
    for (int32_t i = 0; i < count; i++) {
        struct replica_report report;
        replicas_report(serve->app.replicas, i, &report);
        out[i].known = replicas_stats(serve->app.replicas, i, &out[i].stats);
        out[i].up = report.state == REPLICA_UP;
        out[i].state = replica_state_name(report.state);
        out[i].pid = report.pid;
        out[i].deaths = report.deaths;
    }
    return count;
}

static bool route_open(const struct serve *serve, enum small_route route) {
    if (route == ROUTE_NONE || route == ROUTE_VERSION) return false;
    return route != ROUTE_METRICS || !serve->options.metrics_auth;
}

static bool method_small(enum small_route route, const char *path, enum http_method method) {
    return method == HTTP_GET_ || method == HTTP_HEAD_ ||
           (route == ROUTE_READY && method == HTTP_POST_ && path[1] == 'p');
}

static int on_head(void *user, struct http_exchange *x) {
    struct serve *serve = user;
    const char *path = http_path(x);
    enum small_route route = route_find(path);
    if (!route_open(serve, route) && !auth_allows(&serve->auth, http_header(x, "authorization"))) return 401;
    if (route != ROUTE_NONE) return method_small(route, path, http_method(x)) ? 0 : 405;
    int status = api_known(path, http_method(x));
    if (status) return status;
    bool admin = strncmp(path, "/admin/", 7) == 0 && serve->app.replicas;
    return admin || (serve->ready && !serve->app.draining) ? 0 : 503;
}

static void retry_header(const struct serve *serve, struct http_exchange *x) {
    char seconds[16];
    snprintf(seconds, sizeof seconds, "%d", replicas_retry_after_s(serve->app.replicas));
    http_add_header(x, "Retry-After", seconds);
}

static void health_reply(struct serve *serve, struct http_exchange *x, enum health_probe probe) {
    struct health_replica replicas[HEALTH_REPLICAS_MAX];
    struct buf body = {0};
    int32_t count = serve_replicas(serve, replicas);
    int status = health_answer(&serve->health, probe, replicas, count, serve->app.draining, clock_now_ns(), &body);
    if (status == 503 && serve->health.started && !serve->app.draining) retry_header(serve, x);
    http_reply(x, status, "application/json", body.data, body.bytes);
    buf_deinit(&body);
}

static void metrics_fill(const struct serve *serve, int32_t count, struct metrics_replica *out) {
    for (int32_t i = 0; i < count; i++) {
        struct replica_report report;
        replicas_report(serve->app.replicas, i, &report);
        out[i].known = replicas_stats(serve->app.replicas, i, &out[i].stats);
        out[i].state = replica_state_name(report.state);
        out[i].starts = report.starts;
        out[i].deaths = report.deaths;
        out[i].requests_retried = report.requests_retried;
        out[i].requests_failed = report.requests_failed;
        out[i].last_start_seconds = report.last_start_seconds;
    }
}

static void metrics_reply(struct serve *serve, struct http_exchange *x) {
    struct buf body = {0};
    int32_t count = serve->app.replicas ? replicas_count(serve->app.replicas) : 0;
    struct metrics_replica *replicas = mem_zalloc((size_t)count + 1, sizeof *replicas);
    metrics_fill(serve, count, replicas);
    struct metrics_scrape scrape = {
        .replicas = replicas,
        .count = count,
        .info = serve->app.info,
        .connections = http_server_connections(serve->app.http),
        .ready = serve->ready && !serve->app.draining && replicas_up(serve->app.replicas) > 0,
        .start_seconds = serve->start_seconds,
        .prefix_caching = serve->options.enable_prefix_caching,
    };
    metrics_write(serve->metrics, &scrape, &body);
    http_reply(x, 200, "text/plain; version=0.0.4; charset=utf-8", body.data, body.bytes);
    mem_free(replicas);
    buf_deinit(&body);
}

static void on_request(void *user, struct http_exchange *x) {
    static const char version[] = "{\"version\":\"" QUIRE_VERSION "\"}";
    struct serve *serve = user;
    switch (route_find(http_path(x))) {
    case ROUTE_LIVE:
        health_reply(serve, x, HEALTH_LIVE);
        return;
    case ROUTE_READY:
        health_reply(serve, x, HEALTH_READY);
        return;
    case ROUTE_STARTUP:
        health_reply(serve, x, HEALTH_STARTUP);
        return;
    case ROUTE_VERSION:
        http_reply(x, 200, "application/json", version, sizeof version - 1);
        return;
    case ROUTE_METRICS:
        metrics_reply(serve, x);
        return;
    case ROUTE_NONE:
        break;
    }
    api_handle(&serve->app, x);
}

/* The methods a path has, for the Allow field. */
static void allow_add(struct http_exchange *x) {
    static const char *const names[] = {"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS"};
    char allowed[64] = "";
    const char *path = http_path(x);
    enum small_route route = route_find(path);
    for (int m = HTTP_GET_; m <= HTTP_OPTIONS_; m++) {
        enum http_method method = (enum http_method)m;
        if (route ? !method_small(route, path, method) : api_known(path, method) != 0) continue;
        size_t used = strlen(allowed);
        snprintf(allowed + used, sizeof allowed - used, "%s%s", used ? ", " : "", names[m]);
    }
    http_add_header(x, "Allow", allowed);
}

static const char *refusal_text(const struct serve *serve, struct http_exchange *x, int status) {
    switch (status) {
    case 401:
        http_add_header(x, "WWW-Authenticate", "Bearer");
        return "a valid API key is needed: send it as \"Authorization: Bearer KEY\"";
    case 404:
        return "there is no such path on this server";
    case 405:
        allow_add(x);
        return "this path does not have this method";
    case 503:
        http_add_header(x, "Retry-After", serve->app.draining ? "5" : "1");
        return serve->app.draining ? "the server is shutting down" : "the model is still loading";
    default:
        return "the request cannot be served";
    }
}

/* The transport says what is too long; the flag that says how long it may be is known here. */
static const char *with_bound(const struct serve *serve, int status, const char *why, char *out, size_t bytes) {
    const struct options *o = &serve->options;
    bool body = status == 413;
    if ((!body && status != 431) || !strstr(why, "than this server takes")) return why;
    snprintf(out, bytes, "%s: %s is %zu", why, body ? "--max-body-bytes" : "--max-header-bytes",
             body ? o->max_body_bytes : o->max_header_bytes);
    return out;
}

static void on_refused(void *user, struct http_exchange *x, int status, const char *why, struct buf *body,
                       const char **content_type) {
    struct serve *serve = user;
    char text[160];
    if (!why[0])
        why = refusal_text(serve, x, status);
    else if (status == 503)
        http_add_header(x, "Retry-After", "1");
    api_error_body(http_path(x), status, with_bound(serve, status, why, text, sizeof text), body, content_type);
}

static void on_done(void *user, struct http_exchange *x, int status, size_t bytes_out) {
    struct serve *serve = user;
    int64_t took_ns = clock_now_ns() - http_arrival_ns(x);
    metrics_http(serve->metrics, http_method_name(x), http_path(x), status, bytes_out, took_ns);
    if (!serve->options.enable_log_requests) return;
    struct log_quoted path = log_quote(http_path(x));
    const char *note = http_note(x);
    log_info("request", "id=%llu method=%s path=%s status=%d bytes=%zu ms=%.1f%s%s",
             (unsigned long long)http_exchange_id(x), http_method_name(x), path.text, status, bytes_out,
             (double)took_ns * 1e-6, note[0] ? " " : "", note);
}

void serve_callbacks(struct serve *serve, struct http_callbacks *out) {
    *out = (struct http_callbacks){on_head, on_request, on_refused, on_done, serve};
}
