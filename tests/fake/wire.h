/* wire.h: a connection without sockets for tests and fuzzing of the transport: bytes go in, replies come out. The route
 * behind it echoes: "/now" replies at once, "/later" at the next turn, "/stream" in three pieces over turns, "/refuse"
 * is refused at the head with 401, "/nobody" with 405. One thread. */
#ifndef QUIRE_TESTS_WIRE_H
#define QUIRE_TESTS_WIRE_H

#include <stdio.h>
#include <string.h>

#include "server/http_conn.h"

struct wire {
    struct http_core core;
    struct http_conn conn;
    struct http_exchange *waiting; /* a reply owed */
    int pieces;                    /* of a stream still to come */
    struct buf out;                /* everything the client would have read */
    int requests, gone, refused, done, last_status;
    bool woken, hold_output; /* hold_output: the client does not read */
};

static void wire_gone(void *user) {
    struct wire *w = user;
    w->gone++;
    w->waiting = NULL;
}

static int wire_head(void *user, struct http_exchange *x) {
    if (strcmp(http_path(x), "/refuse") == 0) return 401;
    if (strcmp(http_path(x), "/nobody") == 0) return 405;
    return 0;
}

static void wire_echo(struct http_exchange *x) {
    struct buf body = {0};
    size_t bytes;
    const char *data = http_body(x, &bytes);
    uint64_t sum = 1469598103934665603u;
    for (size_t i = 0; i < bytes; i++) sum = (sum ^ (unsigned char)data[i]) * 1099511628211u;
    buf_printf(&body, "%s [%s] [%s] %zu %016llx", http_method_name(x), http_path(x), http_query(x), bytes,
               (unsigned long long)sum);
    http_reply(x, 200, "text/plain", body.data, body.bytes);
    buf_deinit(&body);
}

static void wire_request(void *user, struct http_exchange *x) {
    struct wire *w = user;
    w->requests++;
    if (strcmp(http_path(x), "/later") != 0 && strcmp(http_path(x), "/stream") != 0) {
        wire_echo(x);
        return;
    }
    http_set_user(x, w, wire_gone);
    w->waiting = x;
    w->pieces = strcmp(http_path(x), "/stream") == 0 ? 3 : 0;
    if (w->pieces) http_stream_begin(x, 200, "text/event-stream");
}

static void wire_refused(void *user, struct http_exchange *x, int status, const char *why, struct buf *body,
                         const char **type) {
    struct wire *w = user;
    w->refused++;
    buf_printf(body, "%d %s", status, why);
}

static void wire_done(void *user, struct http_exchange *x, int status, size_t bytes_out) {
    struct wire *w = user;
    w->done++;
    w->last_status = status;
}

static void wire_woken(struct http_conn *conn) {
    struct wire *w = (struct wire *)((char *)conn - offsetof(struct wire, conn));
    w->woken = true;
}

static void wire_open(struct wire *w, const struct http_limits *limits) {
    *w = (struct wire){0};
    struct http_callbacks callbacks = {wire_head, wire_request, wire_refused, wire_done, w};
    http_core_init(&w->core, limits, &callbacks);
    w->core.on_wake = wire_woken;
    http_conn_init(&w->conn, &w->core);
}

static void wire_close(struct wire *w) {
    http_conn_deinit(&w->conn);
    http_core_deinit(&w->core);
    buf_deinit(&w->out);
}

/* What the carrier does at the end of a turn. */
static void wire_flush(struct wire *w) {
    for (int i = 0; i < 100000 && w->woken; i++) {
        w->woken = false;
        http_conn_run(&w->conn, 1);
        if (w->hold_output || w->conn.state == CONN_DEAD || !w->conn.out.bytes) continue;
        buf_append(&w->out, w->conn.out.data, w->conn.out.bytes);
        buf_clear(&w->conn.out);
        http_conn_written(&w->conn);
    }
}

/* One turn: the owed reply makes a step. True while there is something to do. */
static bool wire_turn(struct wire *w) {
    struct http_exchange *x = w->waiting;
    if (!x) return false;
    if (w->pieces > 0) {
        http_stream_write(x, "piece\n", 6);
        w->pieces--;
    } else {
        w->waiting = NULL;
        if (x->begun)
            http_stream_end(x);
        else
            wire_echo(x);
    }
    wire_flush(w);
    return true;
}

static void wire_feed(struct wire *w, const char *data, size_t bytes) {
    http_conn_feed(&w->conn, data, bytes, 1);
    w->woken = true;
    wire_flush(w);
}

/* Feeds everything at once and lets all replies come. */
static void wire_settle(struct wire *w) {
    while (wire_turn(w)) {
    }
}

#endif
