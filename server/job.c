#include "server/job.h"

#include <string.h>

#include "engine/base/check.h"
#include "engine/base/clock.h"
#include "engine/base/mem.h"
#include "server/dialect.h"
#include "server/generation.h"

#define JOB_INLINE_BYTES_MAX 8192

struct job {
    struct http_exchange *exchange; /* NULL once the client is gone */
    job_fn *fn;
    struct ask_view view;
    char *body;
    size_t bytes;
    struct buf out;
    struct err err;
    int rc;
    uv_work_t work;
};

static void job_reply(struct http_exchange *exchange, int rc, const struct err *err, struct buf *out) {
    int status = rc ? dialect_status(&dialect_completions, rc) : 200;
    if (rc) {
        buf_clear(out);
        openai_error(status, err, out);
    }
    http_reply(exchange, status, "application/json", out->data, out->bytes);
}

/* Nobody waits for the answer: when no worker has begun with it, none will. */
static void on_gone(void *user) {
    struct job *job = user;
    job->exchange = NULL;
    uv_cancel((uv_req_t *)&job->work);
}

static void on_work(uv_work_t *work) {
    struct job *job = work->data;
    bool chat = false; /* how long it takes matters on the loop only */
    job->rc = job->fn(&job->view, job->body, job->bytes, &job->out, &chat, &job->err);
}

static void on_worked(uv_work_t *work, int status) {
    struct job *job = work->data;
    if (status) job->rc = err_set(&job->err, ERR_CLOSED, "the server is shutting down");
    if (job->exchange) {
        http_set_user(job->exchange, NULL, NULL);
        job_reply(job->exchange, job->rc, &job->err, &job->out);
    }
    buf_deinit(&job->out);
    mem_free(job->body);
    mem_free(job);
}

static void job_run_here(struct app *app, struct http_exchange *exchange, job_fn *fn, const char *body, size_t bytes) {
    struct ask_view view = generation_view(app);
    struct err err = {0};
    struct buf out = {0};
    bool chat = false;
    int64_t begin_ns = clock_now_ns();
    int rc = fn(&view, body, bytes, &out, &chat, &err);
    if (chat) generation_chat_took(app, clock_now_ns() - begin_ns);
    job_reply(exchange, rc, &err, &out);
    buf_deinit(&out);
}

void job_begin(struct app *app, struct http_exchange *exchange, job_fn *fn, bool may_chat) {
    size_t bytes;
    const char *body = http_body(exchange, &bytes);
    struct err err = {0};
    if (!app->info) {
        struct buf out = {0};
        job_reply(exchange, err_set(&err, ERR_CLOSED, "the model is still loading"), &err, &out);
        buf_deinit(&out);
    } else if (bytes <= JOB_INLINE_BYTES_MAX && (!may_chat || generation_chat_on_loop(app))) {
        job_run_here(app, exchange, fn, body, bytes);
    } else {
        struct job *job = mem_zalloc(1, sizeof *job);
        *job = (struct job){.exchange = exchange, .fn = fn, .view = generation_view(app), .bytes = bytes};
        job->body = mem_alloc(bytes + 1);
        memcpy(job->body, body, bytes);
        job->work.data = job;
        http_set_user(exchange, job, on_gone);
        CHECK(uv_queue_work(app->loop, &job->work, on_work, on_worked) == 0);
    }
}
