/* The carrier on real sockets: what a request must not wait for, and that nothing is left open. Time limits are short
 * here, and the clients sit in the same thread. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <arpa/inet.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "engine/base/clock.h"
#include "server/http.h"

struct host {
    uv_loop_t loop;
    struct http_server *server;
    int port, requests, done, gone, last_status;
    struct http_exchange *held; /* "/hold": a stream the test writes to */
};

static void on_gone(void *user) {
    struct host *h = user;
    h->gone++;
    h->held = NULL;
}

static void on_request(void *user, struct http_exchange *x) {
    struct host *h = user;
    h->requests++;
    if (strcmp(http_path(x), "/hold") != 0) {
        http_reply(x, 200, "text/plain", "ok", 2);
        return;
    }
    h->held = x;
    http_set_user(x, h, on_gone);
    http_stream_begin(x, 200, "text/event-stream");
}

static void on_refused(void *user, struct http_exchange *x, int status, const char *why, struct buf *body,
                       const char **type) {
    buf_printf(body, "%s", why);
}

static void on_done(void *user, struct http_exchange *x, int status, size_t bytes_out) {
    struct host *h = user;
    h->done++;
    h->last_status = status;
}

static void host_open(struct host *h) {
    struct http_limits limits = http_limits_default;
    struct http_callbacks callbacks = {
        .on_request = on_request, .on_refused = on_refused, .on_done = on_done, .user = h};
    struct err err = {0};
    *h = (struct host){0};
    limits.header_timeout_ns = limits.body_timeout_ns = limits.idle_timeout_ns = 300 * NS_PER_MS;
    limits.write_timeout_ns = 600 * NS_PER_MS;
    limits.output_bytes = 8 * 1024 * 1024;
    signal(SIGPIPE, SIG_IGN);
    uv_loop_init(&h->loop);
    assert_int_equal(http_server_open(&h->loop, &limits, &callbacks, &h->server, &err), 0);
    assert_int_equal(http_server_listen(h->server, "127.0.0.1", 0, &h->port, &err), 0);
    assert_true(h->port > 0);
}

static void host_run(struct host *h, int ms) {
    int64_t end_ns = clock_now_ns() + ms * NS_PER_MS;
    while (clock_now_ns() < end_ns) {
        uv_run(&h->loop, UV_RUN_NOWAIT);
        usleep(1000);
    }
}

static void host_close(struct host *h) {
    http_server_close(h->server);
    uv_run(&h->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&h->loop), 0); /* busy when a handle were left open */
}

static int client_open(struct host *h, const char *text) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)h->port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0), small = 4096;
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &small, sizeof small);
    assert_int_equal(connect(fd, (struct sockaddr *)&address, sizeof address), 0);
    assert_int_equal(send(fd, text, strlen(text), MSG_NOSIGNAL), strlen(text));
    fcntl(fd, F_SETFL, O_NONBLOCK);
    return fd;
}

/* What has come, with a NUL; -1 when the connection is reset, and *ended at its end. */
static ssize_t client_read(int fd, char *text, size_t room, bool *ended) {
    ssize_t n = recv(fd, text, room - 1, 0);
    *ended = n == 0;
    text[n > 0 ? n : 0] = '\0';
    return n;
}

static void expect_end(struct host *h, const char *sent, int ms, const char *wanted) {
    char text[1024];
    bool ended;
    int fd = client_open(h, sent);
    host_run(h, ms);
    ssize_t n = client_read(fd, text, sizeof text, &ended);
    if (wanted[0]) {
        assert_true(n > 0);
        assert_non_null(strstr(text, wanted));
        client_read(fd, text, sizeof text, &ended);
    }
    assert_true(ended);
    close(fd);
    host_run(h, 50);
    assert_int_equal(http_server_connections(h->server), 0);
}

#define H "Host: a\r\n"

static void test_timeouts(void **state) {
    struct host h;
    host_open(&h);
    expect_end(&h, "", 900, "");
    expect_end(&h, "\r\n", 900, "");
    expect_end(&h, "GET /now HT", 900, "HTTP/1.1 408 ");
    expect_end(&h, "POST /now HTTP/1.1\r\n" H "Content-Length: 5\r\n\r\nab", 900, "HTTP/1.1 408 ");
    expect_end(&h, "GET /now HTTP/1.1\r\n" H "\r\n", 900, "HTTP/1.1 200 ");
    assert_int_equal(h.requests, 1);
    host_close(&h);
}

/* A client that drips bytes of a head gets no more time than one that is silent. */
static void test_drip(void **state) {
    struct host h;
    char text[512];
    bool ended;
    host_open(&h);
    int fd = client_open(&h, "GET /now HTTP/1.1\r\n");
    for (int i = 0; i < 16; i++) {
        send(fd, "a", 1, MSG_NOSIGNAL);
        host_run(&h, 50);
    }
    assert_true(client_read(fd, text, sizeof text, &ended) > 0);
    assert_non_null(strstr(text, " 408 "));
    close(fd);
    host_close(&h);
}

static void test_stuck_reader(void **state) {
    struct host h;
    static char block[256 * 1024];
    memset(block, 'x', sizeof block);
    host_open(&h);
    int fd = client_open(&h, "GET /hold HTTP/1.1\r\n" H "\r\n");
    host_run(&h, 50);
    assert_non_null(h.held);
    for (int i = 0; i < 24; i++) http_stream_write(h.held, block, sizeof block); /* more than the kernel keeps */
    host_run(&h, 300);
    assert_int_equal(h.gone, 0);
    assert_true(http_stream_pending(h.held) > 0);
    assert_int_equal(http_server_unfinished(h.server), 1);
    host_run(&h, 1200);
    assert_int_equal(h.gone, 1);
    assert_int_equal(h.last_status, 499);
    assert_int_equal(http_server_connections(h.server), 0);
    close(fd);
    host_close(&h);
}

/* Sends 6.4 MB down a held stream, ends it, and reads it back slowly. Returns the bytes that came. */
static size_t slow_read(struct host *h, int fd, bool *ended) {
    static char block[64 * 1024], text[64 * 1024];
    static const char last[] = "\r\n0\r\n\r\n";
    size_t got = 0;
    bool whole = false;
    *ended = false;
    memset(block, 'x', sizeof block);
    for (int i = 0; i < 100; i++) http_stream_write(h->held, block, sizeof block);
    struct http_exchange *x = h->held;
    h->held = NULL;
    http_stream_end(x);
    for (int i = 0; i < 4000 && !*ended && !whole; i++) {
        ssize_t n = client_read(fd, text, sizeof text, ended);
        if (n > 0) got += (size_t)n;
        whole = n >= (ssize_t)sizeof last - 1 && strcmp(text + n - (sizeof last - 1), last) == 0;
        host_run(h, 2);
    }
    return got;
}

/* A slow reader who does read is never dropped, and gets every byte. */
static void test_slow_reader(void **state) {
    struct host h;
    const size_t block = 64 * 1024;
    bool ended;
    host_open(&h);
    int fd = client_open(&h, "GET /hold HTTP/1.0\r\n\r\n");
    host_run(&h, 50);
    size_t got = slow_read(&h, fd, &ended);
    assert_true(ended);
    assert_true(got > 100 * block && got < 100 * block + 512);
    assert_int_equal(h.gone, 0);
    close(fd);
    host_close(&h);
}

/* Nor is one whose connection stays open: it is not idle while its reply is still on the way. */
static void test_slow_reader_who_stays(void **state) {
    struct host h;
    bool ended;
    host_open(&h);
    int fd = client_open(&h, "GET /hold HTTP/1.1\r\nHost: x\r\n\r\n");
    host_run(&h, 50);
    size_t got = slow_read(&h, fd, &ended);
    assert_true(got > 100 * (size_t)64 * 1024);
    host_run(&h, 800);
    assert_int_equal(http_server_connections(h.server), 0); /* now it is */
    close(fd);
    host_close(&h);
}

static void test_gone_at_once(void **state) {
    struct host h;
    host_open(&h);
    int fd = client_open(&h, "GET /hold HTTP/1.1\r\n" H "\r\n");
    host_run(&h, 50);
    close(fd);
    host_run(&h, 20);
    assert_int_equal(h.gone, 1);
    assert_int_equal(h.done, 1);
    /* While a request waits the server closes: told too. */
    fd = client_open(&h, "GET /hold HTTP/1.1\r\n" H "\r\n");
    host_run(&h, 50);
    host_close(&h);
    assert_int_equal(h.gone, 2);
    close(fd);
}

/* Reading has stopped, so the end of the connection is never read. */
static void test_gone_behind_pipelined_input(void **state) {
    struct host h;
    static char block[96 * 1024];
    memset(block, 'x', sizeof block);
    host_open(&h);
    int fd = client_open(&h, "GET /hold HTTP/1.1\r\n" H "\r\n");
    host_run(&h, 50);
    size_t sent = 0;
    for (int i = 0; i < 100 && sent < sizeof block; i++) {
        ssize_t n = send(fd, block + sent, sizeof block - sent, MSG_NOSIGNAL);
        if (n > 0) sent += (size_t)n;
        host_run(&h, 5);
    }
    assert_int_equal(sent, sizeof block);
    host_run(&h, 1300);
    assert_int_equal(h.gone, 0); /* who is still there is left alone */
    shutdown(fd, SHUT_WR);
    host_run(&h, 1500);
    assert_int_equal(h.gone, 1);
    assert_int_equal(h.last_status, 499);
    assert_int_equal(http_server_connections(h.server), 0);
    close(fd);
    host_close(&h);
}

static void test_drain(void **state) {
    struct host h;
    char text[1024];
    bool ended;
    host_open(&h);
    int busy = client_open(&h, "GET /hold HTTP/1.1\r\n" H "\r\n"),
        idle = client_open(&h, "GET /now HTTP/1.1\r\n" H "\r\n");
    host_run(&h, 50);
    http_server_drain(h.server);
    host_run(&h, 20);
    client_read(idle, text, sizeof text, &ended);
    client_read(idle, text, sizeof text, &ended);
    assert_true(ended);
    int late = client_open(&h, "GET /now HTTP/1.1\r\n" H "\r\n"); /* still answered, then closed */
    host_run(&h, 50);
    assert_true(client_read(late, text, sizeof text, &ended) > 0);
    assert_non_null(strstr(text, "Connection: close"));
    http_server_stop(h.server);
    host_run(&h, 20);
    struct http_exchange *x = h.held;
    h.held = NULL;
    http_stream_write(x, "bye", 3);
    http_stream_end(x);
    host_run(&h, 50);
    assert_true(client_read(busy, text, sizeof text, &ended) > 0);
    assert_non_null(strstr(text, "bye"));
    close(busy);
    close(idle);
    close(late);
    host_run(&h, 50);
    assert_int_equal(http_server_connections(h.server), 0);
    host_close(&h);
}

static void test_listen_errors(void **state) {
    struct host h;
    struct err err = {0};
    struct http_server *second;
    struct http_callbacks callbacks = {.on_request = on_request, .on_refused = on_refused};
    host_open(&h);
    assert_int_equal(http_server_open(&h.loop, &http_limits_default, &callbacks, &second, &err), 0);
    assert_int_equal(http_server_listen(second, "127.0.0.1", h.port, NULL, &err), ERR_IO);
    assert_non_null(strstr(err.text, "in use"));
    http_server_close(second);
    assert_int_equal(http_server_open(&h.loop, &http_limits_default, &callbacks, &second, &err), 0);
    assert_int_equal(http_server_listen(second, "not an address", 0, NULL, &err), ERR_INVALID);
    http_server_close(second);
    host_close(&h);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_timeouts),
        cmocka_unit_test(test_drip),
        cmocka_unit_test(test_stuck_reader),
        cmocka_unit_test(test_slow_reader),
        cmocka_unit_test(test_slow_reader_who_stays),
        cmocka_unit_test(test_gone_at_once),
        cmocka_unit_test(test_gone_behind_pipelined_input),
        cmocka_unit_test(test_drain),
        cmocka_unit_test(test_listen_errors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
