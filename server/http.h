/* http.h: HTTP/1.1 over libuv and llhttp: connections, requests read whole, replies and streams written with
 * back-pressure. The loop thread owns everything here. Knows no route, no JSON, no engine.
 * A client that closes its sending side counts as gone while its reply is not complete: nothing tells it from one that
 * left, and its pages are worth more than the rare client that half-closes.
 *
 * Life of an exchange: the head and the body are read (limits enforced while reading) → handler(exchange) → either
 * http_reply once, or http_stream_begin, http_stream_write …, http_stream_end. If the client vanishes first, on_gone is
 * called once; after it, and after the last reply call, the exchange must not be touched. Replies of pipelined requests
 * go out in order. */
#ifndef QUIRE_SERVER_HTTP_H
#define QUIRE_SERVER_HTTP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <uv.h>

#include "engine/base/buf.h"
#include "engine/base/err.h"

struct http_server;   /* opaque */
struct http_exchange; /* opaque: one request and its reply */

struct http_limits {
    size_t header_bytes;   /* request line and fields, 16 KiB; over: 431 (414 for the target over 8 KiB) */
    int32_t header_fields; /* 100 */
    size_t body_bytes;     /* over, by Content-Length or while reading: 413 */
    /* Buffered for one connection: a stream over it is told to wait; one that writes on, beyond 4 times, is closed. */
    size_t output_bytes;
    int32_t connections; /* over: 503 and close */
    int32_t chunks;      /* of a chunked body */
    size_t body_total_bytes; /* of all bodies in memory, from the first byte until they are dropped; over: 503 */
    int64_t header_timeout_ns, body_timeout_ns, idle_timeout_ns, write_timeout_ns;
};
extern const struct http_limits http_limits_default;

enum http_method { HTTP_GET_, HTTP_POST_, HTTP_PUT_, HTTP_DELETE_, HTTP_HEAD_, HTTP_OPTIONS_, HTTP_OTHER_ };

struct http_callbacks {
    /* The head is complete, no body yet. Return 0 to go on, or an HTTP status to refuse now (401, 404, 405): the reply
     * is then made by on_refused. */
    int (*on_head)(void *user, struct http_exchange *exchange);
    /* The whole request is here. */
    void (*on_request)(void *user, struct http_exchange *exchange);
    /* A reply that the transport itself must make (400, 408, 413, 414, 415, 431, 503 …): fills the body in the dialect
     * of the path. `why` is one sentence. */
    void (*on_refused)(void *user, struct http_exchange *exchange, int status, const char *why, struct buf *body,
                       const char **content_type);
    /* Every finished reply, for logs and counters. */
    void (*on_done)(void *user, struct http_exchange *exchange, int status, size_t bytes_out);
    void *user;
};

int http_server_open(uv_loop_t *loop, const struct http_limits *limits, const struct http_callbacks *callbacks,
                     struct http_server **out, struct err *err);
/* Binds and listens; port 0 picks one. ERR_IO in one sentence (in use, no permission). */
int http_server_listen(struct http_server *server, const char *host, int port, int *bound_port, struct err *err);
/* From now on every reply says "Connection: close" and idle connections end; still listens, so that new requests can be
 * answered with 503 and health with the truth. */
void http_server_drain(struct http_server *server);
/* Listens no more; connections end after their present exchange. */
void http_server_stop(struct http_server *server);
/* Closes everything; the loop must run until done. */
void http_server_close(struct http_server *server);
int32_t http_server_connections(const struct http_server *server);
/* Connections with a request at a route or with output that is not written yet. */
int32_t http_server_unfinished(const struct http_server *server);

enum http_method http_method(const struct http_exchange *exchange);
const char *http_method_name(const struct http_exchange *exchange);
const char *http_path(const struct http_exchange *exchange);                     /* decoded once, no query */
const char *http_query(const struct http_exchange *exchange);                    /* after '?', or "" */
const char *http_header(const struct http_exchange *exchange, const char *name); /* lower-case name; NULL: absent */
const char *http_body(const struct http_exchange *exchange, size_t *bytes);      /* NUL follows it */
/* The route has read the body: its memory is freed and counts against body_total_bytes no more. */
void http_drop_body(struct http_exchange *exchange);
int64_t http_arrival_ns(const struct http_exchange *exchange);                   /* of its first byte */
uint64_t http_exchange_id(const struct http_exchange *exchange);                 /* unique in this process */

/* Data of the route; on_gone is called once if the client leaves before the reply is complete. */
void http_set_user(struct http_exchange *exchange, void *user, void (*on_gone)(void *user));
void *http_user(const struct http_exchange *exchange);

/* Further header fields of the reply, before it begins. Values are checked for line breaks. */
void http_add_header(struct http_exchange *exchange, const char *name, const char *value);

/* Further "key=value" pairs for the log line of this request (counts, ids; never prompt text). Replaces an earlier
 * note. */
void http_set_note(struct http_exchange *exchange, const char *pairs);
const char *http_note(const struct http_exchange *exchange); /* "" when there is none */

/* A whole reply. The body is copied. Ends the exchange. */
void http_reply(struct http_exchange *exchange, int status, const char *content_type, const void *body, size_t bytes);

/* A streamed reply (chunked; HTTP/1.0 clients get it until close). Writes made in one turn of the loop go out together.
 */
void http_stream_begin(struct http_exchange *exchange, int status, const char *content_type);
/* Buffers and sends. Returns the bytes that wait for the client; above limits.output_bytes the route should hold back.
 */
size_t http_stream_write(struct http_exchange *exchange, const void *data, size_t bytes);
size_t http_stream_pending(const struct http_exchange *exchange);
/* Called (if set) when a stream that was over the limit has drained below half of it. */
void http_set_drained(struct http_exchange *exchange, void (*on_drained)(void *user));
void http_stream_end(struct http_exchange *exchange);

#endif
