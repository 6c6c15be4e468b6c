/* The route's side of an exchange: reading the request, writing the reply. */
#include <stdio.h>
#include <string.h>

#include "engine/base/check.h"
#include "server/http_conn.h"

static const char *status_reason(int status) {
    switch (status) {
    case 200:
        return "OK";
    case 204:
        return "No Content";
    case 400:
        return "Bad Request";
    case 401:
        return "Unauthorized";
    case 403:
        return "Forbidden";
    case 404:
        return "Not Found";
    case 405:
        return "Method Not Allowed";
    case 408:
        return "Request Timeout";
    case 413:
        return "Content Too Large";
    case 414:
        return "URI Too Long";
    case 415:
        return "Unsupported Media Type";
    case 417:
        return "Expectation Failed";
    case 422:
        return "Unprocessable Content";
    case 424:
        return "Failed Dependency";
    case 429:
        return "Too Many Requests";
    case 431:
        return "Request Header Fields Too Large";
    case 500:
        return "Internal Server Error";
    case 501:
        return "Not Implemented";
    case 503:
        return "Service Unavailable";
    case 504:
        return "Gateway Timeout";
    case 505:
        return "HTTP Version Not Supported";
    default:
        return "Status";
    }
}

enum http_method http_method(const struct http_exchange *x) {
    return x->method;
}

const char *http_method_name(const struct http_exchange *x) {
    static const char *const names[] = {"GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "OTHER"};
    return names[x->method];
}

const char *http_path(const struct http_exchange *x) {
    return x->path.data ? x->path.data : "";
}
const char *http_query(const struct http_exchange *x) {
    return x->query ? x->query : "";
}

const char *http_header(const struct http_exchange *x, const char *name) {
    for (int32_t i = 0; i < x->field_count; i++)
        if (strcmp(x->head.data + x->fields[i].name, name) == 0) return x->head.data + x->fields[i].value;
    return NULL;
}

const char *http_body(const struct http_exchange *x, size_t *bytes) {
    *bytes = x->body.bytes;
    return x->body.data ? x->body.data : "";
}

void http_drop_body(struct http_exchange *x) {
    x->conn->core->body_bytes -= x->body_counted;
    x->body_counted = 0;
    buf_deinit(&x->body);
}

int64_t http_arrival_ns(const struct http_exchange *x) {
    return x->arrival_ns;
}
uint64_t http_exchange_id(const struct http_exchange *x) {
    return x->id;
}

void http_set_user(struct http_exchange *x, void *user, void (*on_gone)(void *user)) {
    x->user = user;
    x->on_gone = on_gone;
}

void *http_user(const struct http_exchange *x) {
    return x->user;
}
void http_set_drained(struct http_exchange *x, void (*on_drained)(void *user)) {
    x->on_drained = on_drained;
}

void http_set_note(struct http_exchange *x, const char *pairs) {
    snprintf(x->note, sizeof x->note, "%s", pairs);
}
const char *http_note(const struct http_exchange *x) {
    return x->note;
}

void http_add_header(struct http_exchange *x, const char *name, const char *value) {
    CHECK(!x->begun);
    for (const unsigned char *p = (const unsigned char *)value; *p; p++)
        if (*p < 0x20 || *p == 0x7f) return; /* a value that could end the line is left out */
    buf_append_str(&x->extra, name);
    buf_append(&x->extra, ": ", 2);
    buf_append_str(&x->extra, value);
    buf_append(&x->extra, "\r\n", 2);
}

static void exchange_wake(struct http_exchange *x) {
    if (x->conn->core->on_wake) x->conn->core->on_wake(x->conn);
}

/* Decimal digits of `value`; returns where they begin in `text`. */
static char *digits_write(char text[24], size_t value) {
    char *p = text + 23;
    *p = '\0';
    do *--p = (char)('0' + value % 10);
    while (value /= 10);
    return p;
}

/* The head of the reply; `length` is SIZE_MAX for a stream. */
static void head_write(struct http_exchange *x, int status, const char *content_type, size_t length) {
    struct http_conn *conn = x->conn;
    struct buf *out = &conn->out;
    char digits[24];
    x->begun = true;
    x->status = status;
    if (conn->core->draining) x->keep_alive = false;
    if (length == SIZE_MAX && x->minor_0) x->keep_alive = false;
    buf_grow(out, 256 + x->extra.bytes + (length == SIZE_MAX ? 256 : length));
    buf_append(out, "HTTP/1.1 ", 9);
    buf_append_str(out, digits_write(digits, (size_t)status));
    buf_append_char(out, ' ');
    buf_append_str(out, status_reason(status));
    buf_append(out, "\r\n", 2);
    buf_append_str(out, conn->core->date);
    if (content_type && content_type[0]) {
        buf_append_str(out, "Content-Type: ");
        buf_append_str(out, content_type);
        buf_append(out, "\r\n", 2);
    }
    if (length != SIZE_MAX) {
        buf_append_str(out, "Content-Length: ");
        buf_append_str(out, digits_write(digits, length));
        buf_append(out, "\r\n", 2);
    } else if (!x->minor_0) {
        buf_append_str(out, "Transfer-Encoding: chunked\r\n");
    }
    if (x->extra.bytes) buf_append(out, x->extra.data, x->extra.bytes);
    if (!x->keep_alive)
        buf_append_str(out, "Connection: close\r\n");
    else if (x->minor_0)
        buf_append_str(out, "Connection: keep-alive\r\n");
    buf_append(out, "\r\n", 2);
}

void http_exchange_finish(struct http_exchange *x, int status) {
    struct http_conn *conn = x->conn;
    struct http_core *core = conn->core;
    if (core->callbacks.on_done) core->callbacks.on_done(core->callbacks.user, x, status, x->bytes_out);
    conn->exchange = NULL;
    conn->state = x->keep_alive ? CONN_IDLE : CONN_ENDING;
    http_exchange_put(core, x);
    if (core->on_wake) core->on_wake(conn);
}

void http_reply(struct http_exchange *x, int status, const char *content_type, const void *body, size_t bytes) {
    CHECK(!x->begun && x->conn->state == CONN_BUSY);
    head_write(x, status, content_type, bytes);
    if (bytes && x->method != HTTP_HEAD_) {
        buf_append(&x->conn->out, body, bytes);
        x->bytes_out += bytes;
    }
    http_exchange_finish(x, status);
}

void http_stream_begin(struct http_exchange *x, int status, const char *content_type) {
    CHECK(!x->begun && x->conn->state == CONN_BUSY);
    head_write(x, status, content_type, SIZE_MAX);
    x->chunked = !x->minor_0;
    exchange_wake(x);
}

static void chunk_write(struct buf *out, const void *data, size_t bytes) {
    char text[20];
    char *p = text + 18;
    size_t value = bytes;
    p[0] = '\r';
    p[1] = '\n';
    do *--p = "0123456789abcdef"[value & 15];
    while (value >>= 4);
    size_t digits = (size_t)(text + 20 - p);
    char *to = buf_grow(out, digits + bytes + 2);
    memcpy(to, p, digits);
    memcpy(to + digits, data, bytes);
    memcpy(to + digits + bytes, "\r\n", 3);
    out->bytes += digits + bytes + 2;
}

size_t http_stream_write(struct http_exchange *x, const void *data, size_t bytes) {
    struct http_conn *conn = x->conn;
    CHECK(x->begun);
    if (bytes == 0 || x->method == HTTP_HEAD_ || conn->broken) return http_conn_pending(conn);
    x->bytes_out += bytes;
    size_t before = http_conn_pending(conn);
    if (x->chunked)
        chunk_write(&conn->out, data, bytes);
    else
        buf_append(&conn->out, data, bytes);
    size_t pending = http_conn_pending(conn), limit = conn->core->limits.output_bytes;
    if (pending > limit) conn->over = true;
    if (pending > 4 * limit && before > limit) {
        /* The route was told to wait and wrote on: the connection is dropped at the end of the turn. A single chunk may
         * be larger (streams that repeat everything so far), and is no fault of a client that reads. */
        conn->broken = true;
        buf_deinit(&conn->out);
    }
    exchange_wake(x);
    return pending;
}

size_t http_stream_pending(const struct http_exchange *x) {
    return http_conn_pending(x->conn);
}

void http_stream_end(struct http_exchange *x) {
    CHECK(x->begun);
    if (x->chunked && x->method != HTTP_HEAD_ && !x->conn->broken) buf_append(&x->conn->out, "0\r\n\r\n", 5);
    http_exchange_finish(x, x->status);
}
