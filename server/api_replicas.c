#include "server/api_replicas.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/json.h"
#include "engine/base/log.h"
#include "server/dialect.h"
#include "server/options.h"
#include "server/replicas.h"

static void reply(struct http_exchange *exchange, int status, struct buf *out) {
    http_reply(exchange, status, "application/json", out->data, out->bytes);
    buf_deinit(out);
}

static void reply_error(struct http_exchange *exchange, int status, const struct err *err) {
    struct buf out = {0};
    openai_error(status, err, &out);
    reply(exchange, status, &out);
}

static void replica_write(const struct app *app, int32_t i, int64_t now_ns, struct buf *out) {
    struct replica_report r;
    struct engine_stats stats;
    replicas_report(app->replicas, i, &r);
    buf_printf(out,
               "{\"replica\":%d,\"state\":\"%s\",\"pid\":%d,\"starts\":%llu,\"deaths\":%llu,\"requests\":%d,"
               "\"requests_retried\":%llu,\"requests_failed\":%llu,\"up_seconds\":%.3f,\"last_start_seconds\":%.3f",
               i, replica_state_name(r.state), r.pid, (unsigned long long)r.starts, (unsigned long long)r.deaths,
               r.running, (unsigned long long)r.requests_retried, (unsigned long long)r.requests_failed,
               r.up_since_ns ? (double)(now_ns - r.up_since_ns) * 1e-9 : 0.0, r.last_start_seconds);
    if (r.next_start_ns)
        buf_printf(out, ",\"next_start_seconds\":%.3f",
                   r.next_start_ns > now_ns ? (double)(r.next_start_ns - now_ns) * 1e-9 : 0.0);
    if (replicas_stats(app->replicas, i, &stats))
        buf_printf(out, ",\"running\":%d,\"waiting\":%d,\"pages_held\":%d,\"pages_cached\":%d,\"pages_free\":%d",
                   stats.running, stats.waiting, stats.pages_held, stats.pages_cached, stats.pages_free);
    buf_append_str(out, ",\"last_death\":");
    if (r.last_death[0])
        json_write_str(out, r.last_death, strlen(r.last_death));
    else
        buf_append_str(out, "null");
    buf_append_char(out, '}');
}

void api_replicas(struct app *app, struct http_exchange *exchange) {
    struct buf out = {0};
    int64_t now_ns = clock_now_ns();
    buf_append_str(&out, "{\"replicas\":[");
    for (int32_t i = 0; i < replicas_count(app->replicas); i++) {
        if (i) buf_append_char(&out, ',');
        replica_write(app, i, now_ns, &out);
    }
    buf_append_str(&out, "]}");
    reply(exchange, 200, &out);
}

/* The number in "/admin/replicas/{i}/restart"; -1: it is no such path. */
static int32_t path_replica(const char *path) {
    const char *at = path + strlen("/admin/replicas/");
    char *end;
    if (!isdigit((unsigned char)*at)) return -1;
    long i = strtol(at, &end, 10);
    return strcmp(end, "/restart") == 0 && i <= OPTIONS_REPLICAS_MAX ? (int32_t)i : -1;
}

void api_replica_restart(struct app *app, struct http_exchange *exchange) {
    struct err err;
    struct buf out = {0};
    int32_t i = path_replica(http_path(exchange));
    if (app->options->api_keys.count == 0) {
        err_set(&err, ERR_INVALID,
                "without --api-key everyone who reaches this server could do this: set a key to restart replicas");
        reply_error(exchange, 403, &err);
        return;
    }
    if (i < 0) {
        err_set(&err, ERR_NOT_FOUND, "there is no such path: POST /admin/replicas/{i}/restart");
        reply_error(exchange, 404, &err);
        return;
    }
    int64_t deadline_ns = clock_now_ns() + (int64_t)app->options->shutdown_timeout_s * NS_PER_SECOND;
    int rc = replicas_restart(app->replicas, i, deadline_ns, &err);
    if (rc) {
        reply_error(exchange, rc == ERR_NOT_FOUND ? 404 : 409, &err);
        return;
    }
    buf_printf(&out, "{\"replica\":%d,\"state\":\"%s\",\"limit_seconds\":%d}", i,
               replica_state_name(replicas_state(app->replicas, i)), app->options->shutdown_timeout_s);
    reply(exchange, 202, &out);
}
