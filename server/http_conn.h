/* http_conn.h: one HTTP/1.1 connection as a state machine over bytes, without a socket: bytes in, callbacks, bytes out.
 * The carrier (http_server.c, or a test that holds both ends) moves the bytes, keeps the timers and closes. The loop
 * thread owns it. Private to server/http*.c and to their tests.
 *
 * Invariants:
 * 1. At most one exchange is open. Bytes behind it wait in `input` unread, and the carrier stops reading above
 *    HTTP_INPUT_BYTES, so replies are in order and pipelining is bounded.
 * 2. For any byte stream and any split of it into feeds, the replies are the same: every refusal is decided at one
 * byte.
 * 3. An exchange handed to on_request ends exactly once: by the end of its reply or by on_gone.
 * 4. Callbacks of the route may end the exchange; after each of them only the connection is touched.
 * 5. An idle connection holds no buffer. */
#ifndef QUIRE_SERVER_HTTP_CONN_H
#define QUIRE_SERVER_HTTP_CONN_H

#include <llhttp.h>

#include "server/http.h"
#include "server/http_chunk.h"

#define HTTP_INPUT_BYTES  ((size_t)64 * 1024)
#define HTTP_FIELDS_MAX   128
#define HTTP_TARGET_BYTES ((size_t)8192)
#define HTTP_KEEP_BYTES   ((size_t)1024) /* a buffer above this is freed when it is empty */
#define HTTP_POOL_MAX     256            /* exchanges kept for reuse */
#define HTTP_STATUS_GONE  499            /* in on_done: the client left first */

enum conn_state {
    CONN_IDLE,   /* between requests */
    CONN_HEAD,   /* in the request line or the fields */
    CONN_BODY,   /* in the body */
    CONN_BUSY,   /* the request is with the route, its reply not complete */
    CONN_ENDING, /* no further request; `out` goes out, then the connection ends; what still comes in is dropped */
    CONN_DEAD,   /* close now */
};

struct http_conn;

/* What the connections of one server share. */
struct http_core {
    struct http_limits limits;
    struct http_callbacks callbacks;
    void (*on_wake)(struct http_conn *conn); /* there is output, input to go on with, or an end: call http_conn_run */
    struct http_exchange *pool;
    int32_t pool_count;
    uint64_t next_id;
    size_t body_bytes; /* of bodies being read, all connections */
    bool draining;
    char date[48]; /* "Date: …\r\n", kept fresh by the carrier; "" in tests */
};

/* Where the line scan of a head is. */
struct http_scan {
    size_t head_bytes, line_bytes;
    char previous;
    bool first_line; /* a line that is not empty was seen whole */
    bool something;  /* any byte that is no line end */
};

enum http_body_kind { HTTP_BODY_NONE, HTTP_BODY_LENGTH, HTTP_BODY_CHUNKED };

struct http_conn {
    struct http_core *core;
    struct http_exchange *exchange; /* NULL when idle or ending */
    enum conn_state state;
    uint64_t requests; /* begun; with `state` it tells the carrier when to start a timer anew */
    bool broken;       /* too much output: to be dropped by http_conn_run */
    bool input_closed; /* the client sends no more */
    bool over;         /* output is above the limit; on_drained is owed */
    int64_t now_ns;    /* of the present feed */
    size_t in_flight;  /* bytes the carrier took from `out` and has not written yet */
    struct buf input;  /* bytes behind the present exchange */
    size_t input_at;
    struct buf out;
    llhttp_t parser;
    struct http_scan scan;
    union {
        uint64_t length_left;
        struct http_chunked chunked;
    } body;
};

struct http_field {
    uint32_t name, value; /* offsets into head.data */
};

struct http_exchange {
    struct http_conn *conn;
    struct http_exchange *next; /* in the pool */
    uint64_t id;
    int64_t arrival_ns;
    struct buf head; /* target, then names (lower-case) and values, each with a NUL */
    struct http_field fields[HTTP_FIELDS_MAX];
    int32_t field_count;
    struct buf body;
    struct buf extra; /* further header lines of the reply */
    struct buf path;  /* decoded path, NUL, query */
    const char *query;
    char note[160];
    size_t body_counted; /* its share of core->body_bytes */
    enum http_method method;
    enum http_body_kind body_kind;
    bool keep_alive, minor_0, expect_continue;
    bool begun, chunked; /* the reply */
    int status;
    size_t bytes_out;
    void *user;
    void (*on_gone)(void *user);
    void (*on_drained)(void *user);
};

void http_core_init(struct http_core *core, const struct http_limits *limits, const struct http_callbacks *callbacks);
void http_core_deinit(struct http_core *core);

void http_conn_init(struct http_conn *conn, struct http_core *core);
void http_conn_deinit(struct http_conn *conn); /* drops an open exchange: on_gone */

/* Bytes came. */
void http_conn_feed(struct http_conn *conn, const char *data, size_t bytes, int64_t now_ns);
/* The client sends no more. */
void http_conn_eof(struct http_conn *conn);
/* The connection is lost (reset, write time-out): on_gone, dead. */
void http_conn_lost(struct http_conn *conn);
/* Called once a turn after on_wake: goes on with waiting input, drops what is broken. */
void http_conn_run(struct http_conn *conn, int64_t now_ns);
/* The carrier wrote output away: pending has fallen. */
void http_conn_written(struct http_conn *conn);
/* Replies `status` in the dialect of what is known of the path, then ends the connection. 408 and 503 of the carrier.
 */
void http_conn_refuse(struct http_conn *conn, int status, const char *why);
size_t http_conn_pending(const struct http_conn *conn);
/* May the carrier read on? */
bool http_conn_wants_input(const struct http_conn *conn);

/* http_head.c: the head of a request. Takes bytes like http_chunked_take; *done when the head is complete. */
void http_head_begin(struct http_conn *conn);
size_t http_head_take(struct http_conn *conn, const char *data, size_t bytes, bool *done, int *status,
                      const char **why);
/* The complete head: framing, duplicates, target, version. 0 or a status with *why. */
int http_head_check(struct http_exchange *exchange, uint64_t *content_length, const char **why);

/* http_exchange.c */
struct http_exchange *http_exchange_get(struct http_core *core);
void http_exchange_put(struct http_core *core, struct http_exchange *exchange);
/* The reply is complete (or the client gone, with HTTP_STATUS_GONE): on_done, then the connection goes on or ends. */
void http_exchange_finish(struct http_exchange *exchange, int status);
void http_core_count_body(struct http_exchange *exchange);

#endif
