#include "server/api.h"

#include <string.h>

#include "engine/base/check.h"
#include "server/api_model.h"
#include "server/api_replicas.h"
#include "server/dialect.h"
#include "server/generation.h"

enum route_kind { ROUTE_GENERATION, ROUTE_JOB, ROUTE_PLAIN };

struct route {
    const char *path; /* "…/" at its end matches what follows too */
    enum http_method method;
    enum route_kind kind;
    enum ask_route ask;
    job_fn *job;
    void (*plain)(struct app *app, struct http_exchange *exchange);
    const struct dialect *dialect; /* whose errors */
};

static const struct route routes[] = {
    {"/v1/chat/completions", HTTP_POST_, ROUTE_GENERATION, ASK_CHAT, NULL, NULL, &dialect_chat},
    {"/v1/completions", HTTP_POST_, ROUTE_GENERATION, ASK_COMPLETIONS, NULL, NULL, &dialect_completions},
    {"/generate", HTTP_POST_, ROUTE_GENERATION, ASK_GENERATE, NULL, NULL, &dialect_vllm},
    {"/generate", HTTP_PUT_, ROUTE_GENERATION, ASK_GENERATE, NULL, NULL, &dialect_vllm}, /* SGLang takes both */
    {"/generate_stream", HTTP_POST_, ROUTE_GENERATION, ASK_GENERATE_STREAM, NULL, NULL, &dialect_tgi},
    {"/", HTTP_POST_, ROUTE_GENERATION, ASK_TGI_ROOT, NULL, NULL, &dialect_tgi},
    {"/tokenize", HTTP_POST_, ROUTE_JOB, 0, api_tokenize, NULL, &dialect_completions},
    {"/detokenize", HTTP_POST_, ROUTE_JOB, 0, api_detokenize, NULL, &dialect_completions},
    {"/v1/models", HTTP_GET_, ROUTE_PLAIN, 0, NULL, api_models, &dialect_completions},
    {"/v1/models/", HTTP_GET_, ROUTE_PLAIN, 0, NULL, api_model, &dialect_completions},
    {"/info", HTTP_GET_, ROUTE_PLAIN, 0, NULL, api_tgi_info, &dialect_tgi},
    {"/model_info", HTTP_GET_, ROUTE_PLAIN, 0, NULL, api_model_info, &dialect_sglang},
    {"/get_model_info", HTTP_GET_, ROUTE_PLAIN, 0, NULL, api_model_info, &dialect_sglang},
    {"/load", HTTP_GET_, ROUTE_PLAIN, 0, NULL, api_load, &dialect_completions},
    {"/abort_request", HTTP_POST_, ROUTE_PLAIN, 0, NULL, api_abort, &dialect_sglang},
    {"/flush_cache", HTTP_POST_, ROUTE_PLAIN, 0, NULL, api_cache_reset, &dialect_sglang},
    {"/reset_prefix_cache", HTTP_POST_, ROUTE_PLAIN, 0, NULL, api_cache_reset, &dialect_completions},
    {"/admin/replicas", HTTP_GET_, ROUTE_PLAIN, 0, NULL, api_replicas, &dialect_completions},
    {"/admin/replicas/", HTTP_POST_, ROUTE_PLAIN, 0, NULL, api_replica_restart, &dialect_completions},
};
#define ROUTE_COUNT (sizeof routes / sizeof *routes)

static bool path_matches(const struct route *route, const char *path) {
    size_t bytes = strlen(route->path);
    if (bytes > 1 && route->path[bytes - 1] == '/') return strncmp(path, route->path, bytes) == 0 && path[bytes];
    return strcmp(path, route->path) == 0;
}

/* The route, or NULL with *status 404 or 405. */
static const struct route *route_find(const char *path, enum http_method method, int *status) {
    *status = 404;
    for (size_t i = 0; i < ROUTE_COUNT; i++) {
        const struct route *route = &routes[i];
        if (!path_matches(route, path)) continue;
        if (route->method == method || (route->method == HTTP_GET_ && method == HTTP_HEAD_)) {
            *status = 0;
            return route;
        }
        *status = 405;
    }
    return NULL;
}

void api_open(struct app *app) {
    app->generations = generations_open(app);
}

void api_close(struct app *app) {
    generations_close(app->generations);
    app->generations = NULL;
}

int api_known(const char *path, enum http_method method) {
    int status;
    route_find(path, method, &status);
    return status;
}

void api_handle(struct app *app, struct http_exchange *exchange) {
    int status;
    const struct route *route = route_find(http_path(exchange), http_method(exchange), &status);
    CHECK(route);
    switch (route->kind) {
    case ROUTE_GENERATION:
        generation_begin(app, exchange, route->ask);
        break;
    case ROUTE_JOB:
        job_begin(app, exchange, route->job, route->job == api_tokenize);
        break;
    case ROUTE_PLAIN:
        route->plain(app, exchange);
        break;
    }
}

void api_error_body(const char *path, int status, const char *message, struct buf *body, const char **content_type) {
    const struct dialect *dialect = &dialect_completions;
    struct err err;
    for (size_t i = 0; i < ROUTE_COUNT; i++)
        if (path_matches(&routes[i], path)) dialect = routes[i].dialect;
    err_set(&err, ERR_INVALID, "%s", message);
    dialect->error(status, &err, body);
    *content_type = "application/json";
}

void api_on_events(struct app *app, const void *records, size_t bytes) {
    generation_events(app, records, bytes);
}

int32_t api_running(const struct app *app) {
    return generation_count(app);
}
