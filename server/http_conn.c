#include "server/http_conn.h"

#include <stdio.h>
#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/check.h"
#include "engine/base/clock.h"
#include "engine/base/mem.h"

const struct http_limits http_limits_default = {
    .header_bytes = (size_t)16 * 1024,
    .header_fields = 100,
    .body_bytes = (size_t)16 * 1024 * 1024,
    .output_bytes = (size_t)1024 * 1024,
    .connections = 8192,
    .chunks = 65536,
    .body_total_bytes = (size_t)256 * 1024 * 1024,
    .header_timeout_ns = 30 * NS_PER_SECOND,
    .body_timeout_ns = 120 * NS_PER_SECOND,
    .idle_timeout_ns = 75 * NS_PER_SECOND,
    .write_timeout_ns = 30 * NS_PER_SECOND,
};

void http_core_init(struct http_core *core, const struct http_limits *limits, const struct http_callbacks *callbacks) {
    *core = (struct http_core){.limits = *limits, .callbacks = *callbacks, .next_id = 1};
    if (core->limits.header_fields > HTTP_FIELDS_MAX) core->limits.header_fields = HTTP_FIELDS_MAX;
}

static void exchange_free(struct http_exchange *x) {
    buf_deinit(&x->head);
    buf_deinit(&x->body);
    buf_deinit(&x->extra);
    buf_deinit(&x->path);
    mem_free(x);
}

void http_core_deinit(struct http_core *core) {
    while (core->pool) {
        struct http_exchange *x = core->pool;
        core->pool = x->next;
        exchange_free(x);
    }
}

static void buf_reset(struct buf *buf, size_t keep) {
    if (buf->capacity > keep)
        buf_deinit(buf);
    else
        buf_clear(buf);
}

struct http_exchange *http_exchange_get(struct http_core *core) {
    struct http_exchange *x = core->pool;
    if (x) {
        core->pool = x->next;
        core->pool_count--;
    } else {
        x = mem_zalloc(1, sizeof *x);
    }
    x->id = core->next_id++;
    return x;
}

void http_exchange_put(struct http_core *core, struct http_exchange *x) {
    core->body_bytes -= x->body_counted;
    if (core->pool_count >= HTTP_POOL_MAX) {
        exchange_free(x);
        return;
    }
    struct buf head = x->head, body = x->body, extra = x->extra, path = x->path;
    memset(x, 0, sizeof *x);
    buf_reset(&head, 4 * HTTP_KEEP_BYTES);
    buf_reset(&body, 8 * HTTP_KEEP_BYTES);
    buf_reset(&extra, HTTP_KEEP_BYTES);
    buf_reset(&path, HTTP_KEEP_BYTES);
    x->head = head;
    x->body = body;
    x->extra = extra;
    x->path = path;
    x->next = core->pool;
    core->pool = x;
    core->pool_count++;
}

/* What the body buffer really holds is what counts, not what the client announces. */
void http_core_count_body(struct http_exchange *x) {
    x->conn->core->body_bytes += x->body.bytes - x->body_counted;
    x->body_counted = x->body.bytes;
}

void http_conn_init(struct http_conn *conn, struct http_core *core) {
    *conn = (struct http_conn){.core = core, .state = CONN_IDLE};
}

void http_conn_deinit(struct http_conn *conn) {
    http_conn_lost(conn);
    buf_deinit(&conn->input);
    buf_deinit(&conn->out);
}

size_t http_conn_pending(const struct http_conn *conn) {
    return conn->out.bytes + conn->in_flight;
}

bool http_conn_wants_input(const struct http_conn *conn) {
    return conn->state != CONN_DEAD && conn->input.bytes - conn->input_at < HTTP_INPUT_BYTES;
}

static void conn_wake(struct http_conn *conn) {
    if (conn->core->on_wake) conn->core->on_wake(conn);
}

static void conn_begin(struct http_conn *conn) {
    struct http_exchange *x = http_exchange_get(conn->core);
    x->conn = conn;
    x->arrival_ns = conn->now_ns;
    conn->exchange = x;
    conn->requests++;
    conn->state = CONN_HEAD;
    http_head_begin(conn);
}

void http_conn_refuse(struct http_conn *conn, int status, const char *why) {
    if (conn->state == CONN_ENDING || conn->state == CONN_DEAD || conn->state == CONN_BUSY) return;
    if (!conn->exchange) conn_begin(conn);
    struct http_exchange *x = conn->exchange;
    struct buf body = {0};
    const char *type = "text/plain; charset=utf-8";
    x->keep_alive = false;
    conn->state = CONN_BUSY;
    if (!x->path.data) buf_append_char(&x->path, '\0');
    if (!x->query) x->query = "";
    conn->core->callbacks.on_refused(conn->core->callbacks.user, x, status, why, &body, &type);
    http_reply(x, status, type, body.data, body.bytes);
    buf_deinit(&body);
}

/* A refusal by the route: the connection can go on when no body is under way. */
static void head_refused(struct http_conn *conn, int status) {
    struct http_exchange *x = conn->exchange;
    struct buf body = {0};
    const char *type = "text/plain; charset=utf-8";
    if (x->body_kind != HTTP_BODY_NONE) x->keep_alive = false;
    conn->state = CONN_BUSY;
    conn->core->callbacks.on_refused(conn->core->callbacks.user, x, status, "", &body, &type);
    http_reply(x, status, type, body.data, body.bytes);
    buf_deinit(&body);
}

static void request_complete(struct http_conn *conn) {
    struct http_exchange *x = conn->exchange;
    conn->state = CONN_BUSY;
    buf_grow(&x->body, 0)[0] = '\0';
    http_core_count_body(x);
    conn->core->callbacks.on_request(conn->core->callbacks.user, x);
}

static void head_complete(struct http_conn *conn) {
    struct http_exchange *x = conn->exchange;
    struct http_core *core = conn->core;
    const char *why = "";
    uint64_t length = 0;
    int status = http_head_check(x, &length, &why);
    if (status) {
        http_conn_refuse(conn, status, why);
        return;
    }
    status = core->callbacks.on_head ? core->callbacks.on_head(core->callbacks.user, x) : 0;
    if (status) {
        head_refused(conn, status);
        return;
    }
    if (length > core->limits.body_bytes) {
        http_conn_refuse(conn, 413, "the body is larger than this server takes");
        return;
    }
    if (x->body_kind == HTTP_BODY_NONE) {
        request_complete(conn);
        return;
    }
    if (x->body_kind == HTTP_BODY_LENGTH)
        conn->body.length_left = length;
    else
        http_chunked_init(&conn->body.chunked, core->limits.chunks, core->limits.body_bytes);
    conn->state = CONN_BODY;
    if (x->expect_continue) {
        buf_append_str(&conn->out, "HTTP/1.1 100 Continue\r\n\r\n");
        conn_wake(conn);
    }
}

static size_t head_take(struct http_conn *conn, const char *data, size_t bytes) {
    bool done;
    int status;
    const char *why = "";
    size_t took = http_head_take(conn, data, bytes, &done, &status, &why);
    if (status)
        http_conn_refuse(conn, status, why);
    else if (done)
        head_complete(conn);
    return took;
}

static size_t body_take(struct http_conn *conn, const char *data, size_t bytes) {
    struct http_exchange *x = conn->exchange;
    size_t took;
    int status = 0;
    bool done;
    const char *why = "";
    if (x->body_kind == HTTP_BODY_LENGTH) {
        took = (size_t)i64_min((int64_t)bytes, (int64_t)conn->body.length_left);
        buf_append(&x->body, data, took);
        conn->body.length_left -= took;
        done = conn->body.length_left == 0;
    } else {
        took = http_chunked_take(&conn->body.chunked, data, bytes, &x->body, &status, &why);
        done = conn->body.chunked.state == CHUNK_DONE;
    }
    http_core_count_body(x);
    if (status) {
        http_conn_refuse(conn, status, why);
    } else if (conn->core->body_bytes > conn->core->limits.body_total_bytes) {
        http_conn_refuse(conn, 503, "too many request bodies are being read at once");
    } else if (done) {
        request_complete(conn);
    }
    return took;
}

/* Consumes what can be consumed now; returns how much. */
static size_t conn_pump(struct http_conn *conn, const char *data, size_t bytes) {
    size_t at = 0;
    while (at < bytes) {
        if (conn->state == CONN_ENDING || conn->state == CONN_DEAD) {
            at = bytes;
        } else if (conn->state == CONN_BUSY) {
            break;
        } else if (conn->state == CONN_IDLE) {
            if (http_conn_pending(conn) > conn->core->limits.output_bytes) break;
            conn_begin(conn);
        } else if (conn->state == CONN_HEAD) {
            at += head_take(conn, data + at, bytes - at);
        } else {
            at += body_take(conn, data + at, bytes - at);
        }
    }
    return at;
}

static void input_run(struct http_conn *conn) {
    if (conn->input.bytes == 0) return;
    conn->input_at += conn_pump(conn, conn->input.data + conn->input_at, conn->input.bytes - conn->input_at);
    if (conn->input_at == conn->input.bytes) {
        buf_reset(&conn->input, 0);
        conn->input_at = 0;
    }
}

void http_conn_feed(struct http_conn *conn, const char *data, size_t bytes, int64_t now_ns) {
    conn->now_ns = now_ns;
    size_t took = 0;
    if (conn->input.bytes == 0) took = conn_pump(conn, data, bytes);
    if (took == bytes) return;
    if (conn->input_at) {
        memmove(conn->input.data, conn->input.data + conn->input_at, conn->input.bytes - conn->input_at);
        conn->input.bytes -= conn->input_at;
        conn->input_at = 0;
    }
    buf_append(&conn->input, data + took, bytes - took);
    input_run(conn);
}

void http_conn_run(struct http_conn *conn, int64_t now_ns) {
    conn->now_ns = now_ns;
    if (conn->broken) {
        http_conn_lost(conn);
        return;
    }
    input_run(conn);
}

void http_conn_eof(struct http_conn *conn) {
    conn->input_closed = true;
    if (conn->state == CONN_IDLE) {
        conn->state = CONN_ENDING;
        conn_wake(conn);
    } else if (conn->state != CONN_ENDING) {
        http_conn_lost(conn);
    } else {
        conn_wake(conn);
    }
}

void http_conn_lost(struct http_conn *conn) {
    struct http_exchange *x = conn->exchange;
    bool handed_out = conn->state == CONN_BUSY;
    conn->state = CONN_DEAD;
    buf_reset(&conn->input, 0);
    conn->input_at = 0;
    if (x) {
        if (x->on_gone) x->on_gone(x->user);
        if (handed_out && conn->core->callbacks.on_done)
            conn->core->callbacks.on_done(conn->core->callbacks.user, x, HTTP_STATUS_GONE, x->bytes_out);
        conn->exchange = NULL;
        http_exchange_put(conn->core, x);
    }
    conn_wake(conn);
}

void http_conn_written(struct http_conn *conn) {
    size_t pending = http_conn_pending(conn);
    if (conn->out.bytes == 0) buf_reset(&conn->out, HTTP_KEEP_BYTES);
    if (pending > conn->core->limits.output_bytes / 2) return;
    if (conn->input.bytes && conn->state == CONN_IDLE) conn_wake(conn);
    if (!conn->over) return;
    conn->over = false;
    if (conn->exchange && conn->exchange->on_drained) conn->exchange->on_drained(conn->exchange->user);
}
