/* The carrier: sockets, timers and turns. Each connection waits in one list of its state, oldest first, so that one coarse
 * timer serves all time-outs; output made in a turn of the loop goes out with one write a connection at its end.
 *
 * Invariants:
 * 1. A socket is in exactly one of the wait lists, the one its connection's state asks for, and in the write list besides
 *    while a write is in flight.
 * 2. At most one write request is in flight a socket; its bytes are conn.in_flight.
 * 3. A socket is freed only in its close callback. */
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "engine/base/check.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/mem.h"
#include "server/http_conn.h"

#define TICK_MS          250
#define READ_BYTES       ((size_t)64 * 1024)
#define BACKLOG          1024
#define REFUSED_MAX      64 /* connections over the limit that may still be told so */
#define LINGER_QUIET_NS  (2 * NS_PER_SECOND)
#define LINGER_TOTAL_NS  (10 * NS_PER_SECOND)

enum wait_list { WAIT_IDLE, WAIT_HEAD, WAIT_BODY, WAIT_BUSY, WAIT_LINGER, WAIT_WRITE, WAIT_COUNT };

struct http_socket;

struct wait_link {
    struct http_socket *newer, *older;
    int64_t since_ns;
};

struct write_op {
    uv_write_t request;
    struct http_socket *socket;
    struct buf data;
};

struct http_socket {
    struct http_conn conn; /* first: the core hands conns back */
    struct http_server *server;
    uv_tcp_t tcp;
    struct wait_link links[2]; /* state, write */
    struct http_socket *next_dirty;
    struct write_op *write; /* in flight, or NULL */
    size_t write_left;      /* of it at the last tick */
    int64_t linger_until_ns;
    uint64_t listed_request;
    uint8_t listed; /* enum wait_list of links[0] */
    bool dirty, reading, shut, closing;
};

struct wait_queue {
    struct http_socket *oldest, *newest;
};

struct http_server {
    struct http_core core;
    uv_loop_t *loop;
    uv_tcp_t listener;
    uv_timer_t timer;
    uv_check_t check;
    uv_prepare_t prepare;
    struct wait_queue waits[WAIT_COUNT];
    struct http_socket *dirty;
    int32_t connections, refused;
    bool listening, stopping, closing;
    int handles; /* of this server's own, still open */
    struct log_rate accept_rate;
    struct write_op *spare; /* one kept for reuse */
    time_t date_s;
    char read_buffer[READ_BYTES];
};

/* Wait lists. */

static void wait_remove(struct http_server *s, struct http_socket *k, enum wait_list list, int link) {
    struct wait_link *l = &k->links[link];
    struct wait_queue *q = &s->waits[list];
    if (l->newer) l->newer->links[link].older = l->older;
    else q->newest = l->older;
    if (l->older) l->older->links[link].newer = l->newer;
    else q->oldest = l->newer;
    l->newer = l->older = NULL;
}

static void wait_add(struct http_server *s, struct http_socket *k, enum wait_list list, int link, int64_t now_ns) {
    struct wait_link *l = &k->links[link];
    struct wait_queue *q = &s->waits[list];
    *l = (struct wait_link){.older = q->newest, .since_ns = now_ns};
    if (q->newest) q->newest->links[link].newer = k;
    else q->oldest = k;
    q->newest = k;
}

static enum wait_list wait_wanted(const struct http_socket *k) {
    switch (k->conn.state) {
    case CONN_IDLE: return WAIT_IDLE;
    case CONN_HEAD: return WAIT_HEAD;
    case CONN_BODY: return WAIT_BODY;
    case CONN_BUSY: return WAIT_BUSY;
    case CONN_ENDING:
    case CONN_DEAD: break;
    }
    return WAIT_LINGER;
}

static void wait_update(struct http_socket *k, int64_t now_ns, bool fresh) {
    enum wait_list wanted = wait_wanted(k);
    if (!fresh && wanted == k->listed && k->listed_request == k->conn.requests) return;
    wait_remove(k->server, k, (enum wait_list)k->listed, 0);
    k->listed = (uint8_t)wanted;
    k->listed_request = k->conn.requests;
    wait_add(k->server, k, wanted, 0, now_ns);
}

/* Closing. */

static void socket_closed(uv_handle_t *handle) {
    struct http_socket *k = handle->data;
    mem_free(k);
}

static void socket_close(struct http_socket *k) {
    struct http_server *s = k->server;
    if (k->closing) return;
    k->closing = true;
    k->conn.core = &s->core;
    http_conn_deinit(&k->conn);
    wait_remove(s, k, (enum wait_list)k->listed, 0);
    if (k->write) {
        wait_remove(s, k, WAIT_WRITE, 1);
        k->write->socket = NULL; /* its callback frees it */
        k->write = NULL;
    }
    if (k->dirty) {
        struct http_socket **at = &s->dirty;
        while (*at && *at != k) at = &(*at)->next_dirty;
        if (*at) *at = k->next_dirty;
        k->dirty = false;
    }
    s->connections--;
    uv_close((uv_handle_t *)&k->tcp, socket_closed);
}

/* Writing. */

static void socket_flush(struct http_socket *k, int64_t now_ns);

static void conn_woken(struct http_conn *conn) {
    struct http_socket *k = (struct http_socket *)conn;
    if (k->dirty || k->closing) return;
    k->dirty = true;
    k->next_dirty = k->server->dirty;
    k->server->dirty = k;
}

static void write_free(struct http_server *s, struct write_op *op) {
    if (s && !s->spare && !s->closing && op->data.capacity <= 64 * HTTP_KEEP_BYTES) {
        buf_clear(&op->data);
        op->socket = NULL;
        s->spare = op;
        return;
    }
    buf_deinit(&op->data);
    mem_free(op);
}

static void on_written(uv_write_t *request, int status) {
    struct write_op *op = request->data;
    struct http_socket *k = op->socket;
    if (!k) { /* the socket went first */
        buf_deinit(&op->data);
        mem_free(op);
        return;
    }
    struct http_server *s = k->server;
    wait_remove(s, k, WAIT_WRITE, 1);
    k->write = NULL;
    k->conn.in_flight = 0;
    write_free(s, op);
    if (status < 0) http_conn_lost(&k->conn);
    else http_conn_written(&k->conn);
    conn_woken(&k->conn);
}

/* Hands what a try could not write to libuv; the buffer moves there. */
static void write_rest(struct http_socket *k, size_t done, int64_t now_ns) {
    struct http_server *s = k->server;
    struct write_op *op = s->spare;
    if (op) s->spare = NULL;
    else op = mem_zalloc(1, sizeof *op);
    struct buf spare = op->data;
    op->data = k->conn.out;
    k->conn.out = spare;
    op->socket = k;
    op->request.data = op;
    k->write = op;
    k->conn.in_flight = op->data.bytes - done;
    k->write_left = k->conn.in_flight;
    wait_add(s, k, WAIT_WRITE, 1, now_ns);
    uv_buf_t piece = uv_buf_init(op->data.data + done, (unsigned)k->conn.in_flight);
    if (uv_write(&op->request, (uv_stream_t *)&k->tcp, &piece, 1, on_written) == 0) return;
    wait_remove(s, k, WAIT_WRITE, 1);
    k->write = NULL;
    k->conn.in_flight = 0;
    write_free(s, op);
    http_conn_lost(&k->conn);
}

static void output_write(struct http_socket *k, int64_t now_ns) {
    struct buf *out = &k->conn.out;
    uv_buf_t piece = uv_buf_init(out->data, (unsigned)out->bytes);
    int n = uv_try_write((uv_stream_t *)&k->tcp, &piece, 1);
    if (n < 0 && n != UV_EAGAIN) {
        http_conn_lost(&k->conn);
        return;
    }
    size_t done = n > 0 ? (size_t)n : 0;
    if (done < out->bytes) {
        write_rest(k, done, now_ns);
        return;
    }
    buf_clear(out);
    http_conn_written(&k->conn);
}

static void on_shutdown(uv_shutdown_t *request, int status) { mem_free(request); }

/* All is written and no further request will be read: end our side, then let the client's last bytes drain, so that the
 * kernel does not throw away a reply it has not read yet. */
static void socket_linger(struct http_socket *k, int64_t now_ns) {
    if (k->conn.input_closed) {
        socket_close(k);
        return;
    }
    if (k->shut) return;
    k->shut = true;
    k->linger_until_ns = now_ns + LINGER_TOTAL_NS;
    wait_update(k, now_ns, true);
    uv_shutdown_t *request = mem_zalloc(1, sizeof *request);
    if (uv_shutdown(request, (uv_stream_t *)&k->tcp, on_shutdown) < 0) {
        mem_free(request);
        socket_close(k);
    }
}

static void on_alloc(uv_handle_t *handle, size_t suggested, uv_buf_t *out) {
    struct http_socket *k = handle->data;
    *out = uv_buf_init(k->server->read_buffer, READ_BYTES);
}

static void on_read(uv_stream_t *stream, ssize_t n, const uv_buf_t *data) {
    struct http_socket *k = stream->data;
    if (n == 0 || k->closing) return;
    int64_t now_ns = clock_now_ns();
    if (n == UV_EOF) http_conn_eof(&k->conn);
    else if (n < 0) http_conn_lost(&k->conn);
    else http_conn_feed(&k->conn, data->base, (size_t)n, now_ns);
    if (n < 0) k->reading = false;
    bool draining = n > 0 && k->shut;
    if (draining && now_ns > k->linger_until_ns) http_conn_lost(&k->conn);
    wait_update(k, now_ns, draining);
    if (!http_conn_wants_input(&k->conn) && k->reading) {
        uv_read_stop(stream);
        k->reading = false;
    }
    if (k->conn.state == CONN_DEAD) conn_woken(&k->conn);
}

static void socket_flush(struct http_socket *k, int64_t now_ns) {
    http_conn_run(&k->conn, now_ns);
    if (k->conn.out.bytes && !k->write && k->conn.state != CONN_DEAD) output_write(k, now_ns);
    if (k->conn.state == CONN_DEAD) {
        socket_close(k);
        return;
    }
    if (k->conn.state == CONN_ENDING && http_conn_pending(&k->conn) == 0) {
        socket_linger(k, now_ns);
        return;
    }
    wait_update(k, now_ns, false);
    if (!k->reading && !k->conn.input_closed && http_conn_wants_input(&k->conn))
        k->reading = uv_read_start((uv_stream_t *)&k->tcp, on_alloc, on_read) == 0;
}

/* The end of a turn. Flushing may wake others (a finished exchange lets the next begin): they are met in the same pass. */
static void server_flush(struct http_server *s) {
    if (!s->dirty) return;
    int64_t now_ns = clock_now_ns();
    while (s->dirty) {
        struct http_socket *k = s->dirty;
        s->dirty = k->next_dirty;
        k->dirty = false;
        socket_flush(k, now_ns);
    }
}

static void on_check(uv_check_t *check) { server_flush(check->data); }
static void on_prepare(uv_prepare_t *prepare) { server_flush(prepare->data); }

/* Time-outs. */

static void date_update(struct http_server *s) {
    time_t now = time(NULL);
    struct tm parts;
    if (now == s->date_s || !gmtime_r(&now, &parts)) return;
    s->date_s = now;
    static const char days[] = "SunMonTueWedThuFriSat", months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";
    snprintf(s->core.date, sizeof s->core.date, "Date: %.3s, %02d %.3s %04d %02d:%02d:%02d GMT\r\n",
             days + 3 * parts.tm_wday, parts.tm_mday % 100, months + 3 * parts.tm_mon, (parts.tm_year + 1900) % 10000,
             parts.tm_hour % 100, parts.tm_min % 100, parts.tm_sec % 100);
}

/* Calls `expire` for every socket of a list that waits longer than `limit_ns`; `expire` takes it out or renews it. */
static void list_expire(struct http_server *s, enum wait_list list, int link, int64_t now_ns, int64_t limit_ns,
                        void (*expire)(struct http_socket *, int64_t)) {
    struct http_socket *k;
    while ((k = s->waits[list].oldest) && now_ns - k->links[link].since_ns > limit_ns) expire(k, now_ns);
}

static void expire_close(struct http_socket *k, int64_t now_ns) { socket_close(k); }

static void expire_head(struct http_socket *k, int64_t now_ns) {
    if (!k->conn.scan.something) {
        socket_close(k);
        return;
    }
    http_conn_refuse(&k->conn, 408, "the request head did not arrive in time");
    wait_update(k, now_ns, true);
}

static void expire_body(struct http_socket *k, int64_t now_ns) {
    http_conn_refuse(&k->conn, 408, "the request body did not arrive in time");
    wait_update(k, now_ns, true);
}

/* A write that moved since it was last looked at is slow, not stuck. */
static void expire_write(struct http_socket *k, int64_t now_ns) {
    size_t left = uv_stream_get_write_queue_size((uv_stream_t *)&k->tcp);
    if (left >= k->write_left) {
        socket_close(k);
        return;
    }
    k->write_left = left;
    k->conn.in_flight = left;
    wait_remove(k->server, k, WAIT_WRITE, 1);
    wait_add(k->server, k, WAIT_WRITE, 1, now_ns);
}

/* Over the limit while its output waits: the write list watches it, so it is only kept in line here. */
static void expire_linger(struct http_socket *k, int64_t now_ns) {
    if (k->shut) socket_close(k);
    else wait_update(k, now_ns, true);
}

static void on_tick(uv_timer_t *timer) {
    struct http_server *s = timer->data;
    int64_t now_ns = clock_now_ns();
    const struct http_limits *limits = &s->core.limits;
    date_update(s);
    list_expire(s, WAIT_IDLE, 0, now_ns, limits->idle_timeout_ns, expire_close);
    list_expire(s, WAIT_HEAD, 0, now_ns, limits->header_timeout_ns, expire_head);
    list_expire(s, WAIT_BODY, 0, now_ns, limits->body_timeout_ns, expire_body);
    list_expire(s, WAIT_LINGER, 0, now_ns, LINGER_QUIET_NS, expire_linger);
    list_expire(s, WAIT_WRITE, 1, now_ns, limits->write_timeout_ns, expire_write);
    server_flush(s);
}

/* Accepting. */

static void on_connection(uv_stream_t *listener, int status) {
    struct http_server *s = listener->data;
    int64_t now_ns = clock_now_ns();
    uint64_t suppressed;
    if (status < 0) {
        if (log_rate_pass(&s->accept_rate, now_ns, &suppressed))
            log_warning("a connection could not be accepted", "error=%s suppressed=%llu", uv_err_name(status),
                        (unsigned long long)suppressed);
        return;
    }
    struct http_socket *k = mem_zalloc(1, sizeof *k);
    k->server = s;
    uv_tcp_init(s->loop, &k->tcp);
    k->tcp.data = k;
    http_conn_init(&k->conn, &s->core);
    s->connections++;
    k->listed = WAIT_IDLE;
    wait_add(s, k, WAIT_IDLE, 0, now_ns);
    if (uv_accept(listener, (uv_stream_t *)&k->tcp) < 0 || s->connections > s->core.limits.connections + REFUSED_MAX) {
        socket_close(k);
        return;
    }
    uv_tcp_nodelay(&k->tcp, 1);
    if (s->connections > s->core.limits.connections) {
        http_conn_refuse(&k->conn, 503, "too many connections are open");
        wait_update(k, now_ns, true);
    }
    k->reading = uv_read_start((uv_stream_t *)&k->tcp, on_alloc, on_read) == 0;
    if (!k->reading) socket_close(k);
}

int http_server_open(uv_loop_t *loop, const struct http_limits *limits, const struct http_callbacks *callbacks,
                     struct http_server **out, struct err *err) {
    struct http_server *s = mem_zalloc(1, sizeof *s);
    http_core_init(&s->core, limits, callbacks);
    s->core.on_wake = conn_woken;
    s->loop = loop;
    date_update(s);
    uv_timer_init(loop, &s->timer);
    uv_check_init(loop, &s->check);
    uv_prepare_init(loop, &s->prepare);
    s->timer.data = s->check.data = s->prepare.data = s;
    s->handles = 3;
    uv_timer_start(&s->timer, on_tick, TICK_MS, TICK_MS);
    uv_check_start(&s->check, on_check);
    uv_prepare_start(&s->prepare, on_prepare);
    *out = s;
    return 0;
}

static int host_address(const char *host, int port, struct sockaddr_storage *out, struct err *err) {
    const char *name = strcmp(host, "localhost") == 0 ? "127.0.0.1" : host;
    if (uv_ip4_addr(name, port, (struct sockaddr_in *)out) == 0) return 0;
    if (uv_ip6_addr(name, port, (struct sockaddr_in6 *)out) == 0) return 0;
    return err_set_field(err, ERR_INVALID, "--host", "--host must be an IP address or localhost, not %.100s", host);
}

int http_server_listen(struct http_server *s, const char *host, int port, int *bound_port, struct err *err) {
    struct sockaddr_storage address = {0};
    if (host_address(host, port, &address, err)) return err->code;
    uv_tcp_init(s->loop, &s->listener);
    s->listener.data = s;
    s->handles++;
    s->listening = true;
    int code = uv_tcp_bind(&s->listener, (const struct sockaddr *)&address, 0);
    if (!code) code = uv_listen((uv_stream_t *)&s->listener, BACKLOG, on_connection);
    if (code == UV_EADDRINUSE)
        return err_set(err, ERR_IO, "port %d of %s is in use by another program: choose one with --port", port, host);
    if (code == UV_EACCES)
        return err_set(err, ERR_IO, "no permission to listen on port %d of %s: ports below 1024 need privilege", port, host);
    if (code) return err_set(err, ERR_IO, "cannot listen on port %d of %s: %s", port, host, uv_strerror(code));
    int length = sizeof address;
    if (bound_port && uv_tcp_getsockname(&s->listener, (struct sockaddr *)&address, &length) == 0)
        *bound_port = ntohs(address.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&address)->sin6_port
                                                          : ((struct sockaddr_in *)&address)->sin_port);
    return 0;
}

static void idle_close(struct http_server *s) {
    struct http_socket *k, *newer;
    for (k = s->waits[WAIT_IDLE].oldest; k; k = newer) {
        newer = k->links[0].newer;
        if (http_conn_pending(&k->conn) == 0) socket_close(k);
    }
}

void http_server_drain(struct http_server *s) {
    s->core.draining = true;
    idle_close(s);
}

static void server_handle_closed(uv_handle_t *handle) {
    struct http_server *s = handle->data;
    if (--s->handles || !s->closing) return;
    http_core_deinit(&s->core);
    if (s->spare) {
        buf_deinit(&s->spare->data);
        mem_free(s->spare);
    }
    mem_free(s);
}

void http_server_stop(struct http_server *s) {
    http_server_drain(s);
    if (!s->listening) return;
    s->listening = false;
    uv_close((uv_handle_t *)&s->listener, server_handle_closed);
}

void http_server_close(struct http_server *s) {
    http_server_stop(s);
    s->closing = true;
    for (int list = 0; list <= WAIT_LINGER; list++)
        while (s->waits[list].oldest) socket_close(s->waits[list].oldest);
    uv_close((uv_handle_t *)&s->timer, server_handle_closed);
    uv_close((uv_handle_t *)&s->check, server_handle_closed);
    uv_close((uv_handle_t *)&s->prepare, server_handle_closed);
}

int32_t http_server_connections(const struct http_server *s) { return s->connections; }

int32_t http_server_unfinished(const struct http_server *s) {
    int32_t count = 0;
    for (int list = 0; list <= WAIT_LINGER; list++)
        for (const struct http_socket *k = s->waits[list].oldest; k; k = k->links[0].newer)
            count += k->conn.state == CONN_BUSY || http_conn_pending(&k->conn) > 0;
    return count;
}
