#include "server/http_socket.h"

#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>

#include "engine/base/clock.h"
#include "engine/base/mem.h"

#define LINGER_QUIET_NS (2 * NS_PER_SECOND)
#define LINGER_TOTAL_NS (10 * NS_PER_SECOND)
#define WATCH_NS        NS_PER_SECOND

/* Wait lists. */

static void wait_remove(struct http_server *s, struct http_socket *k, enum wait_list list, int link) {
    struct wait_link *l = &k->links[link];
    struct wait_queue *q = &s->waits[list];
    if (l->newer)
        l->newer->links[link].older = l->older;
    else
        q->newest = l->older;
    if (l->older)
        l->older->links[link].newer = l->newer;
    else
        q->oldest = l->newer;
    l->newer = l->older = NULL;
}

static void wait_add(struct http_server *s, struct http_socket *k, enum wait_list list, int link, int64_t now_ns) {
    struct wait_link *l = &k->links[link];
    struct wait_queue *q = &s->waits[list];
    *l = (struct wait_link){.older = q->newest, .since_ns = now_ns};
    if (q->newest)
        q->newest->links[link].newer = k;
    else
        q->oldest = k;
    q->newest = k;
}

static enum wait_list wait_wanted(const struct http_socket *k) {
    switch (k->conn.state) {
    case CONN_IDLE:
        return WAIT_IDLE;
    case CONN_HEAD:
        return WAIT_HEAD;
    case CONN_BODY:
        return WAIT_BODY;
    case CONN_BUSY:
        return WAIT_BUSY;
    case CONN_ENDING:
    case CONN_DEAD:
        break;
    }
    return WAIT_LINGER;
}

void socket_wait(struct http_socket *k, int64_t now_ns, bool fresh) {
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

void socket_close(struct http_socket *k) {
    struct http_server *s = k->server;
    if (k->closing) return;
    k->closing = true;
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

void socket_woken(struct http_conn *conn) {
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
    if (status < 0)
        http_conn_lost(&k->conn);
    else
        http_conn_written(&k->conn);
    socket_woken(&k->conn);
}

/* Bytes of the write that the client's side has not acknowledged. The kernel asks for more only when a third of its
 * buffer of some megabytes is free, so what libuv has left says nothing about a slow reader for a long time. */
static size_t write_unread(const struct http_socket *k) {
    size_t left = uv_stream_get_write_queue_size((const uv_stream_t *)&k->tcp);
    uv_os_fd_t fd;
    int queued = 0;
    if (uv_fileno((const uv_handle_t *)&k->tcp, &fd) == 0 && ioctl(fd, SIOCOUTQ, &queued) == 0 && queued > 0)
        left += (size_t)queued;
    return left;
}

/* Hands what a try could not write to libuv; the buffer moves there. */
static void write_rest(struct http_socket *k, size_t done, int64_t now_ns) {
    struct http_server *s = k->server;
    struct write_op *op = s->spare;
    if (op)
        s->spare = NULL;
    else
        op = mem_zalloc(1, sizeof *op);
    struct buf spare = op->data;
    op->data = k->conn.out;
    k->conn.out = spare;
    op->socket = k;
    op->request.data = op;
    k->write = op;
    k->conn.in_flight = op->data.bytes - done;
    wait_add(s, k, WAIT_WRITE, 1, now_ns);
    uv_buf_t piece = {.base = op->data.data + done, .len = k->conn.in_flight};
    if (uv_write(&op->request, (uv_stream_t *)&k->tcp, &piece, 1, on_written) == 0) {
        k->write_left = write_unread(k);
        return;
    }
    wait_remove(s, k, WAIT_WRITE, 1);
    k->write = NULL;
    k->conn.in_flight = 0;
    write_free(s, op);
    http_conn_lost(&k->conn);
}

static void output_write(struct http_socket *k, int64_t now_ns) {
    struct buf *out = &k->conn.out;
    uv_buf_t piece = {.base = out->data, .len = out->bytes}; /* uv_buf_init would cut it at 4 GiB */
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

static void on_shutdown(uv_shutdown_t *request, int status) {
    mem_free(request);
}

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
    socket_wait(k, now_ns, true);
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
    if (n == UV_EOF)
        http_conn_eof(&k->conn);
    else if (n < 0)
        http_conn_lost(&k->conn);
    else
        http_conn_feed(&k->conn, data->base, (size_t)n, now_ns);
    if (n < 0) k->reading = false;
    bool draining = n > 0 && k->shut;
    if (draining && now_ns > k->linger_until_ns) http_conn_lost(&k->conn);
    socket_wait(k, now_ns, draining);
    if (!http_conn_wants_input(&k->conn) && k->reading) {
        uv_read_stop(stream);
        k->reading = false;
    }
    if (k->conn.state == CONN_DEAD) socket_woken(&k->conn);
}

int socket_read(struct http_socket *k) {
    int code = uv_read_start((uv_stream_t *)&k->tcp, on_alloc, on_read);
    k->reading = code == 0;
    return code;
}

struct http_socket *socket_open(struct http_server *s, int64_t now_ns) {
    struct http_socket *k = mem_zalloc(1, sizeof *k);
    k->server = s;
    uv_tcp_init(s->loop, &k->tcp);
    k->tcp.data = k;
    http_conn_init(&k->conn, &s->core);
    k->conn.now_ns = now_ns; /* of a refusal before any byte came */
    s->connections++;
    k->listed = WAIT_IDLE;
    wait_add(s, k, WAIT_IDLE, 0, now_ns);
    return k;
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
    socket_wait(k, now_ns, false);
    if (!k->reading && !k->conn.input_closed && http_conn_wants_input(&k->conn)) socket_read(k);
}

/* The end of a turn. Flushing may wake others (a finished exchange lets the next begin): they are met in the same pass.
 */
void sockets_flush(struct http_server *s) {
    if (!s->dirty) return;
    int64_t now_ns = clock_now_ns();
    while (s->dirty) {
        struct http_socket *k = s->dirty;
        s->dirty = k->next_dirty;
        k->dirty = false;
        socket_flush(k, now_ns);
    }
}

/* Time-outs. */

/* Calls `expire` for every socket of a list that waits longer than `limit_ns`; `expire` takes it out or renews it. */
static void list_expire(struct http_server *s, enum wait_list list, int link, int64_t now_ns, int64_t limit_ns,
                        void (*expire)(struct http_socket *, int64_t)) {
    struct http_socket *k;
    while ((k = s->waits[list].oldest) && now_ns - k->links[link].since_ns > limit_ns) expire(k, now_ns);
}

/* Idle is who has read the last reply; whoever still reads it is watched by the write list. */
static void expire_idle(struct http_socket *k, int64_t now_ns) {
    if (http_conn_pending(&k->conn))
        socket_wait(k, now_ns, true);
    else
        socket_close(k);
}

static void expire_head(struct http_socket *k, int64_t now_ns) {
    if (!k->conn.scan.something) {
        socket_close(k);
        return;
    }
    http_conn_refuse(&k->conn, 408, "the request head did not arrive in time");
    socket_wait(k, now_ns, true);
}

static void expire_body(struct http_socket *k, int64_t now_ns) {
    http_conn_refuse(&k->conn, 408, "the request body did not arrive in time");
    socket_wait(k, now_ns, true);
}

/* A write that moved since it was last looked at is slow, not stuck. */
static void expire_write(struct http_socket *k, int64_t now_ns) {
    size_t left = write_unread(k);
    if (left >= k->write_left) {
        socket_close(k);
        return;
    }
    k->write_left = left;
    k->conn.in_flight = uv_stream_get_write_queue_size((const uv_stream_t *)&k->tcp);
    wait_remove(k->server, k, WAIT_WRITE, 1);
    wait_add(k->server, k, WAIT_WRITE, 1, now_ns);
}

/* Over the limit while its output waits: the write list watches it, so it is only kept in line here. */
static void expire_linger(struct http_socket *k, int64_t now_ns) {
    if (k->shut)
        socket_close(k);
    else
        socket_wait(k, now_ns, true);
}

/* Has the client's side ended, as far as the kernel knows? */
static bool client_left(const struct http_socket *k) {
    uv_os_fd_t fd;
    if (uv_fileno((const uv_handle_t *)&k->tcp, &fd)) return false;
    struct pollfd look = {.fd = fd, .events = POLLRDHUP};
    return poll(&look, 1, 0) == 1 && (look.revents & (POLLRDHUP | POLLHUP | POLLERR));
}

/* Who has sent so much behind its running request that nothing more is read is not heard leaving; without this its
 * request would run to the end for nobody. What it sent still lies in the kernel, so its end cannot be read, only asked
 * for. */
static void unread_watch(struct http_server *s, int64_t now_ns) {
    if (now_ns - s->watched_ns < WATCH_NS) return;
    s->watched_ns = now_ns;
    for (struct http_socket *k = s->waits[WAIT_BUSY].oldest, *newer; k; k = newer) {
        newer = k->links[0].newer;
        if (!k->reading && k->conn.state == CONN_BUSY && client_left(k)) http_conn_eof(&k->conn);
    }
}

void sockets_expire(struct http_server *s, int64_t now_ns) {
    const struct http_limits *limits = &s->core.limits;
    list_expire(s, WAIT_IDLE, 0, now_ns, limits->idle_timeout_ns, expire_idle);
    list_expire(s, WAIT_HEAD, 0, now_ns, limits->header_timeout_ns, expire_head);
    list_expire(s, WAIT_BODY, 0, now_ns, limits->body_timeout_ns, expire_body);
    list_expire(s, WAIT_LINGER, 0, now_ns, LINGER_QUIET_NS, expire_linger);
    list_expire(s, WAIT_WRITE, 1, now_ns, limits->write_timeout_ns, expire_write);
    unread_watch(s, now_ns);
}
