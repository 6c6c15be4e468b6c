/* bench_front: load on the front of a running server, from one thread: keep-alive requests a second, or server-sent
 * events a second. Point it at quire_fake pinned to one core and pin this to another, as tests/bench/front does.
 *
 *   bench_front --port 8000 [--path /health/live] [--body TEXT] [--connections 64] [--depth 1] [--seconds 3]
 *
 * Each connection keeps `depth` requests in flight. A reply is complete by its Content-Length or its last chunk; events
 * are counted as "data:" at the start of a line. */
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include "engine/base/buf.h"
#include "engine/base/clock.h"
#include "engine/base/mem.h"

struct bench {
    int port, connections, depth, seconds;
    const char *path, *body;
    struct buf request; /* `depth` times is sent first, then once a reply */
    uint64_t replies, events, bytes, errors;
};

enum reply_state { REPLY_HEAD, REPLY_LENGTH, REPLY_CHUNK_SIZE, REPLY_CHUNK, REPLY_CHUNK_END };

struct client {
    int fd;
    enum reply_state state;
    bool chunked, line_start, last_chunk;
    size_t left, line_bytes;
    char line[256]; /* of the head, or the chunk size */
    size_t match;   /* letters of "data:" seen at the start of this line */
    int32_t owed;   /* requests to send */
};

static void fail(const char *what) {
    fprintf(stderr, "bench_front: %s: %s\n", what, strerror(errno));
    exit(1);
}

static void events_count(struct bench *b, struct client *c, const char *p, size_t n) {
    static const char word[] = "data:";
    for (size_t i = 0; i < n; i++) {
        if (p[i] == '\n') {
            c->match = 0;
            c->line_start = true;
        } else if (c->line_start) {
            if (p[i] == word[c->match]) {
                if (++c->match == 5) {
                    b->events++;
                    c->line_start = false;
                }
            } else {
                c->line_start = false;
            }
        } else {
            const char *end = memchr(p + i, '\n', n - i);
            if (!end) return;
            i = (size_t)(end - p) - 1;
        }
    }
}

static void reply_done(struct bench *b, struct client *c) {
    b->replies++;
    c->owed++;
    c->state = REPLY_HEAD;
    c->line_bytes = 0;
    c->left = 0;
    c->chunked = false;
    c->line_start = true;
    c->match = 0;
}

static void head_line(struct bench *b, struct client *c) {
    c->line[c->line_bytes] = '\0';
    if (strncmp(c->line, "HTTP/1.1 ", 9) == 0 && strncmp(c->line + 9, "200", 3) != 0) b->errors++;
    if (strncasecmp(c->line, "content-length: ", 16) == 0) c->left = (size_t)atoll(c->line + 16);
    if (strncasecmp(c->line, "transfer-encoding: chunked", 26) == 0) c->chunked = true;
    if (c->line_bytes == 0) {
        c->state = c->chunked ? REPLY_CHUNK_SIZE : REPLY_LENGTH;
        if (!c->chunked && c->left == 0) reply_done(b, c);
    }
    c->line_bytes = 0;
}

static void size_line(struct client *c) {
    c->line[c->line_bytes] = '\0';
    c->left = (size_t)strtoul(c->line, NULL, 16);
    c->last_chunk = c->left == 0;
    c->line_bytes = 0;
    c->state = c->left ? REPLY_CHUNK : REPLY_CHUNK_END;
}

/* Bytes of one connection through the reply grammar. */
static void client_take(struct bench *b, struct client *c, const char *p, size_t n) {
    for (size_t i = 0; i < n;) {
        if (c->state == REPLY_LENGTH || c->state == REPLY_CHUNK) {
            size_t take = n - i < c->left ? n - i : c->left;
            events_count(b, c, p + i, take);
            c->left -= take;
            i += take;
            if (c->left) continue;
            if (c->state == REPLY_CHUNK)
                c->state = REPLY_CHUNK_END;
            else
                reply_done(b, c);
            continue;
        }
        char ch = p[i++];
        if (ch != '\n') {
            if (ch != '\r' && c->line_bytes < sizeof c->line - 1) c->line[c->line_bytes++] = ch;
            continue;
        }
        if (c->state == REPLY_HEAD)
            head_line(b, c);
        else if (c->state == REPLY_CHUNK_SIZE)
            size_line(c);
        else if (c->last_chunk)
            reply_done(b, c);
        else
            c->state = REPLY_CHUNK_SIZE;
    }
}

static void client_send(struct bench *b, struct client *c) {
    struct buf out = {0};
    for (; c->owed > 0; c->owed--) buf_append(&out, b->request.data, b->request.bytes);
    if (out.bytes && send(c->fd, out.data, out.bytes, MSG_NOSIGNAL) != (ssize_t)out.bytes) fail("send");
    buf_deinit(&out);
}

static void client_open(struct bench *b, struct client *c) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)b->port)};
    int one = 1;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    *c = (struct client){.fd = socket(AF_INET, SOCK_STREAM, 0), .owed = b->depth, .line_start = true};
    if (c->fd < 0 || connect(c->fd, (struct sockaddr *)&address, sizeof address) != 0) fail("connect");
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
}

static void bench_run(struct bench *b) {
    static char data[256 * 1024];
    struct client *clients = mem_zalloc((size_t)b->connections, sizeof *clients);
    struct epoll_event events[256];
    int epoll = epoll_create1(0);
    for (int i = 0; i < b->connections; i++) {
        client_open(b, &clients[i]);
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = &clients[i]};
        epoll_ctl(epoll, EPOLL_CTL_ADD, clients[i].fd, &event);
        client_send(b, &clients[i]);
    }
    int64_t begin_ns = clock_now_ns(), end_ns = begin_ns + b->seconds * NS_PER_SECOND;
    while (clock_now_ns() < end_ns) {
        int ready = epoll_wait(epoll, events, 256, 100);
        for (int i = 0; i < ready; i++) {
            struct client *c = events[i].data.ptr;
            ssize_t n = recv(c->fd, data, sizeof data, MSG_DONTWAIT);
            if (n < 0 && errno == EAGAIN) continue;
            if (n <= 0) fail("the server closed a connection");
            b->bytes += (uint64_t)n;
            client_take(b, c, data, (size_t)n);
            client_send(b, c);
        }
    }
    double seconds = (double)(clock_now_ns() - begin_ns) * 1e-9;
    printf("connections %d  depth %d  seconds %.2f  requests/s %.0f  events/s %.0f  MB/s %.1f  not 200: %llu\n",
           b->connections, b->depth, seconds, (double)b->replies / seconds, (double)b->events / seconds,
           (double)b->bytes / seconds / 1e6, (unsigned long long)b->errors);
    for (int i = 0; i < b->connections; i++) close(clients[i].fd);
    close(epoll);
    mem_free(clients);
}

int main(int argc, char **argv) {
    struct bench b = {.port = 8000, .connections = 64, .depth = 1, .seconds = 3, .path = "/health/live"};
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--port") == 0)
            b.port = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--connections") == 0)
            b.connections = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--depth") == 0)
            b.depth = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--seconds") == 0)
            b.seconds = atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--path") == 0)
            b.path = argv[i + 1];
        else if (strcmp(argv[i], "--body") == 0)
            b.body = argv[i + 1];
        else
            return fprintf(stderr, "bench_front: unknown flag %s\n", argv[i]), 2;
    }
    if (b.connections < 1 || b.depth < 1 || b.seconds < 1)
        return fprintf(stderr, "bench_front: numbers must be positive\n"), 2;
    if (b.body)
        buf_printf(&b.request,
                   "POST %s HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s",
                   b.path, strlen(b.body), b.body);
    else
        buf_printf(&b.request, "GET %s HTTP/1.1\r\nHost: bench\r\n\r\n", b.path);
    bench_run(&b);
    buf_deinit(&b.request);
    return b.errors != 0;
}
