#include "server/generation_private.h"

#include <cjson/cJSON.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/check.h"
#include "engine/base/clock.h"
#include "engine/base/mem.h"
#include "server/dialect.h"
#include "server/metrics.h"
#include "server/options.h"
#include "server/replicas.h"

#define OUT_KEEP_BYTES ((size_t)1024 * 1024)

struct generations *generations_open(struct app *app) {
    struct generations *all = mem_zalloc(1, sizeof *all);
    table_init(&all->table);
    all->random = app->options && app->options->seed ? app->options->seed : hash_key_random().k0;
    return all;
}

void generations_close(struct generations *all) {
    CHECK(all->count == 0);
    table_deinit(&all->table);
    buf_deinit(&all->out);
    mem_free(all);
}

int32_t generation_count(const struct app *app) {
    return app->generations->count;
}

struct ask_view generation_view(const struct app *app) {
    const struct engine_info *engine = app->info;
    const struct text_info *text = text_info(app->text);
    const struct options *options = app->options;
    bool named = options->served_names.count > 0;
    int32_t logprobs = options->max_logprobs < SAMPLE_LOGPROBS_MAX ? options->max_logprobs : SAMPLE_LOGPROBS_MAX;
    return (struct ask_view){
        .text = app->text,
        .info = text,
        .vocab = engine->vocab < text->vocab ? engine->vocab : text->vocab,
        .max_model_len = engine->max_model_len,
        .max_logprobs = logprobs,
        .model_defaults = options->generation_config == GENERATION_CONFIG_AUTO,
        .names = named ? options->served_names.items : &app->model_name,
        .name_count = named ? options->served_names.count : 1,
    };
}

/* ---- life ------------------------------------------------------------------------------------------------------- */

static void on_gone(void *user);

struct generation *generation_new(struct app *app, struct http_exchange *exchange) {
    struct generations *all = app->generations;
    struct generation *g = mem_zalloc(1, sizeof *g);
    g->app = app;
    g->exchange = exchange;
    g->next = all->first;
    if (all->first) all->first->prev = g;
    all->first = g;
    all->count++;
    http_set_user(exchange, g, on_gone);
    return g;
}

static void dirty_remove(struct generations *all, struct generation *g) {
    struct generation **at = &all->dirty;
    if (!g->dirty) return;
    while (*at != g) at = &(*at)->dirty_next;
    *at = g->dirty_next;
}

/* What the counters hear of one prompt's request. */
static void prompt_finished(struct generation *g, int32_t prompt) {
    struct metrics_request m = {.finished_ns = clock_now_ns()};
    for (int64_t i = 0; i < g->ask.n; i++) {
        const struct sample *sample = &g->answer.samples[prompt * g->ask.n + i];
        m.output_tokens += sample->output_tokens;
        if (sample->output_tokens > m.max_output_tokens) m.max_output_tokens = sample->output_tokens;
        if (sample->last_token_ns > m.last_token_ns) m.last_token_ns = sample->last_token_ns;
        if (!m.first_token_ns) m.first_token_ns = sample->first_token_ns;
        if (!m.scheduled_ns) m.scheduled_ns = sample->scheduled_ns;
        if (!m.arrival_ns) m.arrival_ns = sample->arrival_ns;
        if (!m.cached_tokens) m.cached_tokens = sample->cached_tokens;
    }
    if (!m.arrival_ns) m.arrival_ns = g->answer.begin_ns;
    m.prompt_tokens = (int32_t)g->ask.prompts[prompt].count;
    metrics_request_finished(g->app->metrics, &m);
}

/* For the request's log line. */
static void tokens_note(struct generation *g) {
    size_t prompt = 0;
    int64_t output = 0;
    char text[80];
    if (!g->submitted) return;
    for (int32_t i = 0; i < g->ask.prompt_count; i++) prompt += (size_t)g->ask.prompts[i].count;
    for (int64_t i = 0; i < g->ask.prompt_count * g->ask.n; i++) output += g->answer.samples[i].output_tokens;
    snprintf(text, sizeof text, "prompt_tokens=%zu output_tokens=%lld", prompt, (long long)output);
    http_set_note(g->exchange, text);
}

void generation_release(struct generation *g, int32_t prompts) {
    for (int32_t i = 0; i < prompts; i++) {
        uint64_t id = g->first_id + (uint64_t)i;
        table_remove(&g->app->generations->table, id);
        if (g->unfinished[i] > 0) replicas_cancel(g->app->replicas, id);
        if (g->unfinished[i] > 0) prompt_finished(g, i);
    }
}

void generation_free(struct generation *g) {
    struct generations *all = g->app->generations;
    if (g->submitted) generation_release(g, g->ask.prompt_count);
    dirty_remove(all, g);
    if (g->next) g->next->prev = g->prev;
    *(g->prev ? &g->prev->next : &all->first) = g->next;
    all->count--;
    answer_deinit(&g->answer);
    ask_deinit(&g->ask);
    mem_free(g->unfinished);
    mem_free(g->body);
    mem_free(g);
}

/* The client left. While a worker reads the body, or while we are inside a call of our own that writes, the one who is
 * busy frees. A body that no worker has begun with is taken out of their queue: clients that send and leave would
 * otherwise fill it faster than it is worked off, and what waits there counts against no limit of the transport. */
static void on_gone(void *user) {
    struct generation *g = user;
    tokens_note(g);
    g->exchange = NULL;
    g->gone = true;
    if (g->working) uv_cancel((uv_req_t *)&g->work); /* too late: on_worked comes all the same */
    if (!g->busy) generation_free(g);
}

/* ---- ends ------------------------------------------------------------------------------------------------------- */

static void retry_header(struct generation *g, int status) {
    char seconds[16];
    if (status != 429 && status != 503) return;
    int32_t wait = !g->app->info || g->app->draining ? 5 : replicas_retry_after_s(g->app->replicas);
    snprintf(seconds, sizeof seconds, "%d", wait);
    http_add_header(g->exchange, "Retry-After", seconds);
}

void generation_fail(struct generation *g, int status, const struct err *err) {
    struct buf *out = &g->app->generations->out;
    struct http_exchange *exchange = g->exchange;
    const struct dialect *dialect = g->ask.dialect;
    buf_clear(out);
    if (!g->submitted) metrics_request_refused(g->app->metrics, status);
    g->busy = true;
    http_set_user(exchange, NULL, NULL);
    if (g->begun) {
        dialect->error_event(status, err, out);
        http_stream_write(exchange, out->data, out->bytes);
        http_stream_end(exchange);
    } else {
        dialect->error(status, err, out);
        retry_header(g, status);
        http_reply(exchange, status, "application/json", out->data, out->bytes);
    }
    generation_free(g);
}

/* Ended by us and not by the model, the limit or the client? 0 when the answer can be shown as it is. */
static int verdict(const struct generation *g, struct err *err) {
    const struct sample *first = &g->answer.samples[0];
    bool cut = first->finish == FINISH_ABORT || first->finish == FINISH_DEADLINE || first->finish == FINISH_SHUTDOWN;
    bool empty = first->output_tokens == 0 && !g->begun;
    if (!cut || (!empty && g->ask.dialect != &dialect_tgi)) return 0;
    err_set(err, ERR_CLOSED, "%s",
            first->finish == FINISH_DEADLINE   ? "the request's deadline passed"
            : first->finish == FINISH_SHUTDOWN ? "the server is shutting down"
                                               : "the request was aborted");
    return first->finish == FINISH_DEADLINE ? 504 : 503;
}

/* TGI's clients and dashboards read these. */
static void timing_headers(const struct generation *g, bool whole) {
    const struct sample *s = &g->answer.samples[0];
    int64_t now = clock_now_ns(), begin = g->answer.begin_ns, ready = g->answer.validated_ns;
    int64_t scheduled = s->scheduled_ns ? s->scheduled_ns : now;
    struct {
        const char *name;
        int64_t value;
    } fields[] = {
        {"x-compute-characters", (int64_t)g->ask.prompts[0].text_bytes},
        {"x-compute-time", (now - begin) / NS_PER_MS},
        {"x-total-time", (now - begin) / NS_PER_MS},
        {"x-validation-time", (ready - begin) / NS_PER_MS},
        {"x-queue-time", scheduled > ready ? (scheduled - ready) / NS_PER_MS : 0},
        {"x-inference-time", (now - scheduled) / NS_PER_MS},
        {"x-time-per-token", s->output_tokens ? (now - scheduled) / NS_PER_MS / s->output_tokens : 0},
        {"x-prompt-tokens", (int64_t)g->ask.prompts[0].count},
        {"x-generated-tokens", s->output_tokens},
    };
    char text[24];
    http_add_header(g->exchange, "x-compute-type", g->app->info->backend.name);
    for (size_t i = 0; i < (whole ? sizeof fields / sizeof *fields : 1); i++) {
        snprintf(text, sizeof text, "%lld", (long long)fields[i].value);
        http_add_header(g->exchange, fields[i].name, text);
    }
}

/* A whole answer may have been many megabytes; the transport has its own copy. */
static void out_settle(struct buf *out) {
    if (out->capacity > OUT_KEEP_BYTES)
        buf_deinit(out);
    else
        buf_clear(out);
}

/* All samples have ended and nothing is held back. Frees g. */
static void generation_finish(struct generation *g) {
    struct buf *out = &g->app->generations->out;
    struct http_exchange *exchange = g->exchange;
    struct err err;
    int status = verdict(g, &err);
    if (status) {
        generation_fail(g, status, &err);
        return;
    }
    buf_clear(out);
    tokens_note(g);
    http_set_user(exchange, NULL, NULL);
    if (g->ask.stream) {
        g->ask.dialect->end(&g->answer, out);
        if (out->bytes) http_stream_write(exchange, out->data, out->bytes);
        http_stream_end(exchange);
    } else {
        g->ask.dialect->reply(&g->answer, out);
        if (g->ask.dialect == &dialect_tgi) timing_headers(g, true);
        http_reply(exchange, 200, "application/json", out->data, out->bytes);
    }
    out_settle(out);
    generation_free(g);
}

/* ---- streaming -------------------------------------------------------------------------------------------------- */

static void on_drained(void *user);

static void stream_begin(struct generation *g) {
    http_add_header(g->exchange, "Cache-Control", "no-cache");
    http_add_header(g->exchange, "X-Accel-Buffering", "no");
    if (g->ask.dialect == &dialect_tgi) timing_headers(g, false);
    http_set_drained(g->exchange, on_drained);
    http_stream_begin(g->exchange, 200, g->ask.dialect->stream_type);
    g->begun = true;
}

/* Writes what sample `index` has to say. False when g was freed because the client is gone. */
static bool chunk_write(struct generation *g, int32_t index) {
    struct buf *out = &g->app->generations->out;
    buf_clear(out);
    g->ask.dialect->chunk(&g->answer, index, out);
    if (!out->bytes) return true;
    g->busy = true;
    if (!g->begun) stream_begin(g);
    size_t pending = g->gone ? 0 : http_stream_write(g->exchange, out->data, out->bytes);
    g->busy = false;
    if (g->gone) {
        generation_free(g);
        return false;
    }
    g->stalled = pending > g->app->options->max_output_bytes;
    return true;
}

/* Writes what all samples have, as far as the client takes it, and ends what has ended. */
static void stream_pump(struct generation *g) {
    int32_t count = g->ask.dialect->by_step ? 1 : g->answer.count;
    for (int32_t i = 0; i < count && !g->stalled; i++)
        if (!chunk_write(g, i)) return;
    if (!g->stalled && g->answer.finished == g->answer.count) generation_finish(g);
}

static void on_drained(void *user) {
    struct generation *g = user;
    g->stalled = false;
    stream_pump(g);
}

/* ---- events ----------------------------------------------------------------------------------------------------- */

/* What the counters hear of an event that sample `now` has taken in already; `before`: how it stood until then. */
static void event_measure(struct generation *g, int32_t prompt, int32_t number, const struct sample *before,
                          const struct sample *now) {
    struct metrics *metrics = g->app->metrics;
    int32_t tokens = now->output_tokens - before->output_tokens;
    if (!before->first_token_ns && now->first_token_ns && number == 0)
        metrics_first_token(metrics, now->arrival_ns, now->first_token_ns);
    if (before->last_token_ns && tokens > 0)
        metrics_further_tokens(metrics, before->last_token_ns, now->last_token_ns, tokens);
    if (!before->last_token_ns && tokens > 1)
        metrics_further_tokens(metrics, now->first_token_ns, now->last_token_ns, tokens - 1);
    if (now->finish == FINISH_NONE || --g->unfinished[prompt] > 0) return;
    g->app->requests_cut += now->finish == FINISH_SHUTDOWN;
    prompt_finished(g, prompt);
}

static void error_event(struct generation *g, const struct event *event) {
    struct err err;
    int code = event->error_code < 0 ? event->error_code : ERR_FATAL;
    err_set(&err, code, "%.*s", (int)event->text.count, (const char *)record_at(event, event->text));
    if (!err.text[0]) err_set(&err, code, "the engine failed");
    if (code == ERR_EXHAUSTED) metrics_request_refused(g->app->metrics, 429); /* it knows best how full it is */
    generation_fail(g, dialect_status(g->ask.dialect, code), &err);
}

static void event_take(struct app *app, const struct event *event) {
    struct generations *all = app->generations;
    struct generation *g = table_find(&all->table, event->request_id);
    if (!g || event->sample >= g->ask.n) return;
    int32_t prompt = (int32_t)(event->request_id - g->first_id), index = prompt * (int32_t)g->ask.n + event->sample;
    struct sample *sample = &g->answer.samples[index];
    if (sample->finish != FINISH_NONE) return;
    const struct sample before = *sample; /* its numbers; the buffers are the sample's */
    answer_add(&g->answer, index, event);
    event_measure(g, prompt, event->sample, &before, sample);
    if (event->finish == FINISH_ERROR) {
        error_event(g, event);
    } else if (g->ask.dialect->by_step && g->ask.stream) {
        if (!g->dirty) {
            g->dirty_next = all->dirty;
            all->dirty = g;
        }
        g->dirty = true;
    } else if (!g->ask.stream) {
        if (g->answer.finished == g->answer.count) generation_finish(g);
    } else if (!g->stalled && chunk_write(g, index) && !g->stalled && g->answer.finished == g->answer.count) {
        generation_finish(g);
    }
}

void generation_events(struct app *app, const void *records, size_t bytes) {
    struct generations *all = app->generations;
    for (size_t at = 0; at < bytes;) { /* checked where they came from another process */
        const struct event *event = (const void *)((const char *)records + at);
        event_take(app, event);
        at += event->bytes;
    }
    while (all->dirty) {
        struct generation *g = all->dirty;
        all->dirty = g->dirty_next;
        g->dirty = false;
        if (!g->stalled) stream_pump(g);
    }
}

/* ---- by name ---------------------------------------------------------------------------------------------------- */

/* Does `label` name prompt i: as the client named the request, as replies show it, or by a name of its own? */
static bool prompt_named(const struct generation *g, int32_t i, const char *label) {
    const struct cJSON *own = g->ask.labels ? cJSON_GetArrayItem(g->ask.labels, i) : NULL;
    return strcmp(g->answer.id, label) == 0 || strcmp(g->answer.id + g->label_at, label) == 0 ||
           (own && strcmp(own->valuestring, label) == 0);
}

int32_t generation_abort(struct app *app, const char *label) {
    struct generation *g;
    int32_t count = 0;
    for (g = app->generations->first; g; g = g->next) {
        bool named = false;
        for (int32_t i = 0; g->submitted && i < g->ask.prompt_count; i++) {
            if (label && !prompt_named(g, i, label)) continue;
            if (g->unfinished[i] > 0) replicas_cancel(app->replicas, g->first_id + (uint64_t)i);
            named = true;
        }
        count += named;
    }
    return count;
}
