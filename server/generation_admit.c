/* From the body of an exchange to requests in the engine: on the loop or over a worker, all prompts or none. */
#include "server/generation_private.h"

#include <stdio.h>
#include <string.h>

#include "engine/base/check.h"
#include "engine/base/clock.h"
#include "engine/base/mem.h"
#include "server/dialect.h"
#include "server/metrics.h"
#include "server/options.h"
#include "server/replicas.h"

/* Bodies up to this many bytes are read on the loop: parsing, rendering, encoding and building took 2 to 100 µs when
 * measured, about what the way to a worker and back costs. A chat template that once took longer than INLINE_CHAT_NS
 * sends every later chat to the workers, here and in /tokenize (job.c), so that no template can hold the loop up twice.
 */
#define INLINE_BYTES_MAX 8192
#define INLINE_CHAT_NS   (2 * NS_PER_MS)

bool generation_chat_on_loop(const struct app *app) {
    return !app->generations->chats_to_workers;
}

void generation_chat_took(struct app *app, int64_t took_ns) {
    if (took_ns > INLINE_CHAT_NS) app->generations->chats_to_workers = true;
}

/* splitmix64: labels and seeds need to differ, not to be secret. */
static uint64_t random_next(struct generations *all) {
    uint64_t z = all->random += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static void label_make(struct generation *g) {
    struct generations *all = g->app->generations;
    const char *prefix = g->ask.dialect == &dialect_chat          ? "chatcmpl-"
                         : g->ask.dialect == &dialect_completions ? "cmpl-"
                                                                  : "";
    const char *header = http_header(g->exchange, "x-request-id");
    g->label_at = strlen(prefix);
    if (!g->ask.label && header && ask_label_ok(header)) g->ask.label = header;
    if (g->ask.label) {
        snprintf(g->answer.id, sizeof g->answer.id, "%s%s", prefix, g->ask.label);
        http_add_header(g->exchange, "X-Request-Id", g->ask.label);
    } else {
        snprintf(g->answer.id, sizeof g->answer.id, "%s%016llx%016llx", prefix, (unsigned long long)random_next(all),
                 (unsigned long long)random_next(all));
    }
    g->ask.label = NULL; /* the header's memory is not ours; answer.id has it */
}

static void answer_make(struct generation *g) {
    answer_init(&g->answer, &g->ask, g->app->text);
    g->answer.begin_ns = http_arrival_ns(g->exchange);
    g->answer.validated_ns = clock_now_ns();
    g->answer.created_unix_s = clock_unix_s();
    g->unfinished = mem_zalloc((size_t)g->ask.prompt_count, sizeof *g->unfinished);
    label_make(g);
}

/* More prompts than the queue holds never fit, however long the client waits: no 429, which would ask it to try again,
 * and none of them is begun. */
static int prompts_check(const struct generation *g, struct err *err) {
    const struct ask *ask = &g->ask;
    int32_t room = g->app->options->max_num_queued_reqs;
    const char *field = ask->dialect != &dialect_sglang ? "prompt" : ask->prompts[0].text ? "text" : "input_ids";
    if (ask->prompt_count <= room) return 0;
    return err_set_field(err, ERR_INVALID, field,
                         "%s must have at most %d prompts, which is what the queue of this server holds "
                         "(--max-num-queued-reqs), got %d",
                         field, room, ask->prompt_count);
}

/* Whose requests stay on one replica, where a header field says so. */
static uint64_t session_of(const struct generation *g) {
    const char *header = g->app->options->session_header;
    return header ? replicas_session(g->app->replicas, http_header(g->exchange, header)) : 0;
}

/* Hands all prompts to the engines, or none. */
static int prompts_submit(struct generation *g, struct err *err) {
    struct app *app = g->app;
    int refused = prompts_check(g, err);
    if (refused) return refused;
    int32_t timeout_s = app->options->request_timeout_s;
    int64_t deadline_ns = timeout_s ? g->answer.begin_ns + timeout_s * NS_PER_SECOND : 0;
    uint64_t session = session_of(g);
    g->first_id = app->next_request_id + 1;
    app->next_request_id += (uint64_t)g->ask.prompt_count;
    for (int32_t i = 0; i < g->ask.prompt_count; i++) {
        struct request *request = g->ask.requests[i];
        request->id = g->first_id + (uint64_t)i;
        request->deadline_ns = deadline_ns;
        int rc = replicas_submit(app->replicas, request, session, err);
        if (rc) {
            generation_release(g, i);
            return rc;
        }
        table_put(&app->generations->table, request->id, g);
        g->unfinished[i] = (int32_t)g->ask.n;
        mem_free(request);
        g->ask.requests[i] = NULL;
        metrics_request_admitted(app->metrics, (int32_t)g->ask.n, (int32_t)g->ask.max_tokens);
    }
    g->submitted = true;
    return 0;
}

/* The body has been read, well or not. */
static void generation_prepared(struct generation *g) {
    if (!g->rc && g->app->draining) g->rc = err_set(&g->err, ERR_CLOSED, "the server is shutting down");
    if (!g->rc) {
        answer_make(g);
        g->rc = prompts_submit(g, &g->err);
    }
    if (g->rc) generation_fail(g, dialect_status(g->ask.dialect, g->rc), &g->err);
}

static void on_work(uv_work_t *work) {
    struct generation *g = work->data;
    g->rc = ask_prepare(&g->ask, &g->view, g->ask.route, g->body, g->body_bytes, &g->err);
}

static void on_worked(uv_work_t *work, int status) {
    struct generation *g = work->data;
    g->busy = g->working = false;
    mem_free(g->body);
    g->body = NULL;
    if (g->gone) {
        generation_free(g);
        return;
    }
    http_drop_body(g->exchange); /* only now: until here it stands for the copy too */
    if (status) g->rc = err_set(&g->err, ERR_CLOSED, "the server is shutting down");
    generation_prepared(g);
}

void generation_begin(struct app *app, struct http_exchange *exchange, enum ask_route route) {
    size_t bytes;
    const char *body = http_body(exchange, &bytes);
    struct generation *g = generation_new(app, exchange);
    g->ask.route = route;
    g->ask.dialect = dialect_of_route(route);
    if (!app->info || app->draining) {
        g->rc = err_set(&g->err, ERR_CLOSED, "%s",
                        app->draining ? "the server is shutting down" : "the model is still loading");
        generation_fail(g, 503, &g->err);
        return;
    }
    g->view = generation_view(app);
    g->view.seed = random_next(app->generations);
    if (bytes <= INLINE_BYTES_MAX && (route != ASK_CHAT || generation_chat_on_loop(app))) {
        int64_t begin_ns = route == ASK_CHAT ? clock_now_ns() : 0;
        g->rc = ask_prepare(&g->ask, &g->view, route, body, bytes, &g->err);
        if (route == ASK_CHAT) generation_chat_took(app, clock_now_ns() - begin_ns);
        generation_prepared(g);
        return;
    }
    g->body = mem_alloc(bytes + 1); /* the exchange may end while the worker reads */
    memcpy(g->body, body, bytes);
    g->body_bytes = bytes;
    g->busy = g->working = true;
    g->work.data = g;
    CHECK(uv_queue_work(app->loop, &g->work, on_work, on_worked) == 0);
}
