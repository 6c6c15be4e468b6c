/* Listening, accepting, and the handles of one server. */
#include <stdio.h>
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/mem.h"
#include "server/http_socket.h"

#define TICK_MS     250
#define BACKLOG     1024
#define REFUSED_MAX 64 /* connections over the limit that may still be told so */

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

static void on_check(uv_check_t *check) {
    sockets_flush(check->data);
}
static void on_prepare(uv_prepare_t *prepare) {
    sockets_flush(prepare->data);
}

static void on_tick(uv_timer_t *timer) {
    struct http_server *s = timer->data;
    date_update(s);
    sockets_expire(s, clock_now_ns());
    sockets_flush(s);
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
    struct http_socket *k = socket_open(s, now_ns);
    if (uv_accept(listener, (uv_stream_t *)&k->tcp) < 0 || s->connections > s->core.limits.connections + REFUSED_MAX) {
        socket_close(k);
        return;
    }
    uv_tcp_nodelay(&k->tcp, 1);
    if (s->connections > s->core.limits.connections) {
        http_conn_refuse(&k->conn, 503, "too many connections are open");
        socket_wait(k, now_ns, true);
    }
    if (socket_read(k)) socket_close(k);
}

int http_server_open(uv_loop_t *loop, const struct http_limits *limits, const struct http_callbacks *callbacks,
                     struct http_server **out, struct err *err) {
    struct http_server *s = mem_zalloc(1, sizeof *s);
    http_core_init(&s->core, limits, callbacks);
    s->core.on_wake = socket_woken;
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
        return err_set(err, ERR_IO, "no permission to listen on port %d of %s: ports below 1024 need privilege", port,
                       host);
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

int32_t http_server_connections(const struct http_server *s) {
    return s->connections;
}

int32_t http_server_unfinished(const struct http_server *s) {
    int32_t count = 0;
    for (int list = 0; list <= WAIT_LINGER; list++)
        for (const struct http_socket *k = s->waits[list].oldest; k; k = k->links[0].newer)
            count += k->conn.state == CONN_BUSY || http_conn_pending(&k->conn) > 0;
    return count;
}
