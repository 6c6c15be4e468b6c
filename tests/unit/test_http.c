/* The transport over a connection without sockets: grammar, limits, order, back-pressure, and that no split of the
 * bytes changes the replies. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "engine/base/mem.h"
#include "tests/fake/wire.h"

static struct http_limits small_limits(void) {
    struct http_limits limits = http_limits_default;
    limits.header_bytes = 9216;
    limits.header_fields = 8;
    limits.body_bytes = 64;
    limits.chunks = 8;
    limits.output_bytes = 4096;
    return limits;
}

static void wire_all(struct wire *w, const char *text, size_t bytes) {
    wire_feed(w, text, bytes);
    wire_settle(w);
}

static void expect_status(const char *request, int status, bool stays_open) {
    struct http_limits limits = small_limits();
    struct wire w;
    char line[32];
    wire_open(&w, &limits);
    wire_all(&w, request, strlen(request));
    snprintf(line, sizeof line, "HTTP/1.1 %d ", status);
    if (!w.out.bytes || strncmp(w.out.data, line, strlen(line)) != 0)
        fail_msg("for %.60s… wanted %d, got: %.100s", request, status, w.out.bytes ? w.out.data : "nothing");
    assert_int_equal(w.conn.state == CONN_IDLE, stays_open);
    if (!stays_open) assert_non_null(strstr(w.out.data, "Connection: close"));
    wire_close(&w);
}

#define H "Host: a\r\n"

static void test_good(void **state) {
    expect_status("GET /now HTTP/1.1\r\n" H "\r\n", 200, true);
    expect_status("\r\nGET /now HTTP/1.1\r\n" H "\r\n", 200, true);
    expect_status("POST /now?a=b HTTP/1.1\r\n" H "Content-Length: 3\r\n\r\nabc", 200, true);
    expect_status("POST /now HTTP/1.1\r\n" H "Transfer-Encoding: Chunked\r\n\r\n3;x=y\r\nabc\r\n0\r\nT: u\r\n\r\n", 200,
                  true);
    expect_status("GET /now HTTP/1.0\r\n\r\n", 200, false);
    expect_status("GET http://b/now HTTP/1.1\r\n" H "\r\n", 200, true);
    expect_status("GET /now HTTP/1.1\r\n" H "Connection: close\r\n\r\n", 200, false);
    expect_status("GET /now HTTP/1.1\r\n" H "Connection: foo, Close\r\n\r\n", 200, false);
    expect_status("GET /refuse HTTP/1.1\r\n" H "\r\n", 401, true);
    expect_status("POST /nobody HTTP/1.1\r\n" H "Content-Length: 1\r\n\r\n", 405, false);
    expect_status("GET /now HTTP/1.1\r\n" H "Upgrade: h2c\r\nConnection: upgrade\r\n\r\n", 200, true);
    expect_status("GET /now HTTP/1.1\r\n" H "Empty:\r\n\r\n", 200, true);
}

static void test_bad(void **state) {
    static const struct {
        int status;
        const char *request;
    } cases[] = {
        {400, "GET /now HTTP/1.1\r\n\r\n"},              /* no Host */
        {400, "GET /now HTTP/1.1\r\n" H H "\r\n"},       /* two */
        {400, "GET /now HTTP/1.1\r\nHost: a b\r\n\r\n"}, /* malformed */
        {400, "GET /now HTTP/1.1\n" H "\r\n"},           /* bare LF */
        {400, "GET /now HTTP/1.1\r\nHost: a\n\r\n"},
        {400, "GET /now HTTP/1.1\r\nHost: a\r\r\n\r\n"},       /* bare CR */
        {400, "GET /now HTTP/1.1\r\n" H "A: b\r\n c\r\n\r\n"}, /* folded */
        {400, "GET /now HTTP/1.1\r\n" H "A : b\r\n\r\n"},      /* space before colon */
        {400, "GET /now HTTP/1.1\r\n" H "A\x01: b\r\n\r\n"},
        {400, "GET /now HTTP/1.1\r\n" H "A: b\x01\r\n\r\n"},
        {400, "GET /now HTTP/1.1\r\n" H ": b\r\n\r\n"},
        {400, "GET /now HTTP/1.1\r\n" H "nocolon\r\n\r\n"},
        {400, "GET /n\xc3\xa9 HTTP/1.1\r\n" H "\r\n"}, /* not ASCII */
        {400, "GET /%zz HTTP/1.1\r\n" H "\r\n"},
        {400, "GET /%00 HTTP/1.1\r\n" H "\r\n"},
        {400, "GET /%4 HTTP/1.1\r\n" H "\r\n"},
        {400, "GET now HTTP/1.1\r\n" H "\r\n"},
        {400, "GET * HTTP/1.1\r\n" H "\r\n"},
        {400, "CONNECT a:80 HTTP/1.1\r\n" H "\r\n"},
        {400, "get /now HTTP/1.1\r\n" H "\r\n"},
        {400, "BREW /now HTTP/1.1\r\n" H "\r\n"},
        {400, "\x16\x03\x01\x02\x01"}, /* a TLS hello */
        {400, "POST /now HTTP/1.1\r\n" H "Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\nabc"},
        {400, "POST /now HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n"},
        {400, "POST /now HTTP/1.1\r\n" H "Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc"},
        {400, "POST /now HTTP/1.1\r\n" H "Content-Length: +3\r\n\r\nabc"},
        {400, "POST /now HTTP/1.1\r\n" H "Content-Length: 3, 3\r\n\r\nabc"},
        {400, "POST /now HTTP/1.1\r\n" H "Content-Length: 0x3\r\n\r\nabc"},
        {400, "POST /now HTTP/1.1\r\n" H "Content-Length:\r\n\r\nabc"},
        {400, "POST /now HTTP/1.0\r\n" H "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"},
        {400, "POST /now HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n3\nabc\r\n0\r\n\r\n"},
        {400, "POST /now HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\n"},
        {400, "POST /now HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\n0\r\n\r\n"},
        {400, "POST /now HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n-3\r\nabc\r\n0\r\n\r\n"},
        {400, "POST /now HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n0x3\r\nabc\r\n0\r\n\r\n"},
        {400, "POST /now HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n 3\r\nabc\r\n0\r\n\r\n"},
        {400, "POST /now HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n0\r\n a: b\r\n\r\n"},
        {413, "POST /now HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\nfffffffff\r\n"},
        {413, "POST /now HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n41\r\n"},
        {413, "POST /now HTTP/1.1\r\n" H "Content-Length: 65\r\n\r\n"},
        {413, "POST /now HTTP/1.1\r\n" H "Content-Length: 999999999999999999\r\n\r\n"},
        {415, "POST /now HTTP/1.1\r\n" H "Content-Encoding: gzip\r\nContent-Length: 1\r\n\r\n"},
        {417, "POST /now HTTP/1.1\r\n" H "Expect: fireworks\r\nContent-Length: 1\r\n\r\n"},
        {431, "GET /now HTTP/1.1\r\n" H "a:1\r\nb:1\r\nc:1\r\nd:1\r\ne:1\r\nf:1\r\ng:1\r\nh:1\r\n\r\n"},
        {505, "GET /now HTTP/2.0\r\n" H "\r\n"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) expect_status(cases[i].request, cases[i].status, false);
    struct http_limits limits = small_limits();
    struct wire w;
    static const char *const codings[] = {"gzip, chunked",    "identity", "xchunked",
                                          "chunked, chunked", "chunked,", "\"chunked\""};
    for (size_t i = 0; i < sizeof codings / sizeof *codings; i++) {
        char text[200];
        snprintf(text, sizeof text, "POST /now HTTP/1.1\r\n" H "Transfer-Encoding: %s\r\n\r\n0\r\n\r\n", codings[i]);
        wire_open(&w, &limits);
        wire_all(&w, text, strlen(text));
        assert_true(w.last_status == 400 || w.last_status == 501);
        assert_int_equal(w.conn.state, CONN_ENDING);
        wire_close(&w);
    }
}

static void test_long(void **state) {
    struct buf text = {0};
    buf_append_str(&text, "GET /");
    for (int i = 0; i < 9000; i++) buf_append_char(&text, 'a');
    expect_status(text.data, 414, false);
    buf_clear(&text);
    buf_append_str(&text, "GET /now HTTP/1.1\r\n" H "A: ");
    for (int i = 0; i < 9300; i++) buf_append_char(&text, ' ');
    expect_status(text.data, 431, false);
    buf_clear(&text);
    for (int i = 0; i < 5000; i++) buf_append_str(&text, "\r\n");
    expect_status(text.data, 431, false);
    buf_clear(&text);
    buf_append_str(&text, "POST /now HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n1;");
    for (int i = 0; i < 9000; i++) buf_append_char(&text, 'e');
    expect_status(text.data, 413, false);
    buf_clear(&text);
    buf_append_str(&text, "POST /now HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n");
    for (int i = 0; i < 9; i++) buf_append_str(&text, "1\r\na\r\n");
    expect_status(text.data, 413, false);
    buf_deinit(&text);
}

/* The replies to `text`, fed in pieces of `step` bytes, or cut once at `cut`. */
static void replies(const char *text, size_t bytes, size_t step, size_t cut, struct buf *out, int *requests) {
    struct http_limits limits = small_limits();
    struct wire w;
    wire_open(&w, &limits);
    for (size_t at = 0; at < bytes;) {
        size_t take = cut && at < cut ? cut - at : step;
        if (take > bytes - at) take = bytes - at;
        wire_feed(&w, text + at, take);
        at += take;
    }
    wire_settle(&w);
    buf_clear(out);
    if (w.out.bytes) buf_append(out, w.out.data, w.out.bytes);
    *requests = w.requests;
    wire_close(&w);
}

static void test_splits(void **state) {
    static const char *const streams[] = {
        "GET /now HTTP/1.1\r\n" H "\r\nPOST /later HTTP/1.1\r\n" H
        "Content-Length: 5\r\n\r\nhelloGET /stream?x HTTP/1.1\r\n" H "\r\nPOST /now HTTP/1.1\r\n" H
        "Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n1;a=b\r\n!\r\n0\r\nX: y\r\n\r\n"
        "HEAD /now HTTP/1.1\r\n" H "\r\nGET /refuse HTTP/1.1\r\n" H "\r\n\r\nGET /%6eow HTTP/1.0\r\n\r\nGET /now",
        "POST /now HTTP/1.1\r\n" H "Expect: 100-continue\r\nContent-Length: 2\r\n\r\nokGET /now HTTP/1.1\r\nHost: a\nX",
        "POST /later HTTP/1.1\r\n" H "Transfer-Encoding: chunked\r\n\r\n40\r\n"
        "0123456789012345678901234567890123456789012345678901234567890123\r\n1\r\nx\r\n0\r\n\r\n",
        "GET /stream HTTP/1.0\r\n\r\n",
        "GET /now HTTP/1.1\r\n" H "a:1\r\nb:1\r\nc:1\r\nd:1\r\ne:1\r\nf:1\r\ng:1\r\nbad name : 1\r\n\r\n",
        "GET /stream HTTP/1.1\r\n" H "\r\nPOST /refuse HTTP/1.1\r\n" H
        "Content-Length: 4\r\n\r\nGET /now HTTP/1.1\r\n" H "\r\n",
    };
    for (size_t i = 0; i < sizeof streams / sizeof *streams; i++) {
        struct buf whole = {0}, split = {0};
        int whole_requests, split_requests;
        size_t bytes = strlen(streams[i]);
        replies(streams[i], bytes, bytes, 0, &whole, &whole_requests);
        for (size_t cut = 0; cut < bytes; cut++) {
            replies(streams[i], bytes, cut ? bytes : 1, cut, &split, &split_requests);
            assert_int_equal(split_requests, whole_requests);
            assert_int_equal(split.bytes, whole.bytes);
            assert_memory_equal(split.data, whole.data, whole.bytes);
        }
        buf_deinit(&whole);
        buf_deinit(&split);
    }
}

static void test_order(void **state) {
    struct http_limits limits = small_limits();
    struct wire w;
    const char *text =
        "GET /later?1 HTTP/1.1\r\n" H "\r\nGET /now?2 HTTP/1.1\r\n" H "\r\nGET /later?3 HTTP/1.1\r\n" H "\r\n";
    wire_open(&w, &limits);
    wire_feed(&w, text, strlen(text));
    assert_int_equal(w.requests, 1);
    wire_settle(&w);
    assert_int_equal(w.requests, 3);
    assert_int_equal(w.done, 3);
    const char *one = strstr(w.out.data, "[1]"), *two = strstr(w.out.data, "[2]"), *three = strstr(w.out.data, "[3]");
    assert_true(one && two && three && one < two && two < three);
    assert_int_equal(w.conn.state, CONN_IDLE);
    assert_null(w.conn.input.data);
    wire_close(&w);
}

static void test_continue(void **state) {
    struct http_limits limits = small_limits();
    struct wire w;
    const char *head = "POST /now HTTP/1.1\r\n" H "Expect: 100-continue\r\nContent-Length: 2\r\n\r\n";
    wire_open(&w, &limits);
    wire_feed(&w, head, strlen(head));
    assert_string_equal(w.out.data, "HTTP/1.1 100 Continue\r\n\r\n");
    wire_feed(&w, "ok", 2);
    assert_non_null(strstr(w.out.data, "HTTP/1.1 200 OK"));
    wire_close(&w);
    /* Refused before the body: no 100. */
    wire_open(&w, &limits);
    head = "POST /refuse HTTP/1.1\r\n" H "Expect: 100-continue\r\nContent-Length: 2\r\n\r\n";
    wire_feed(&w, head, strlen(head));
    assert_memory_equal(w.out.data, "HTTP/1.1 401", 12);
    wire_close(&w);
}

static void test_head_method(void **state) {
    struct http_limits limits = small_limits();
    struct wire w;
    wire_open(&w, &limits);
    wire_all(&w, "HEAD /now HTTP/1.1\r\n" H "\r\nHEAD /stream HTTP/1.1\r\n" H "\r\n",
             strlen("HEAD /now HTTP/1.1\r\n" H "\r\nHEAD /stream HTTP/1.1\r\n" H "\r\n"));
    assert_non_null(strstr(w.out.data, "Content-Length: "));
    assert_null(strstr(w.out.data, "[/now]"));
    assert_null(strstr(w.out.data, "piece"));
    assert_int_equal(w.conn.state, CONN_IDLE);
    wire_close(&w);
}

static void test_stream_framing(void **state) {
    struct http_limits limits = small_limits();
    struct wire w;
    wire_open(&w, &limits);
    const char *text = "GET /stream HTTP/1.1\r\n" H "\r\n";
    wire_all(&w, text, strlen(text));
    const char *body = strstr(w.out.data, "\r\n\r\n") + 4;
    assert_string_equal(body, "6\r\npiece\n\r\n6\r\npiece\n\r\n6\r\npiece\n\r\n0\r\n\r\n");
    wire_close(&w);
    wire_open(&w, &limits);
    wire_all(&w, "GET /stream HTTP/1.0\r\n\r\n", 24);
    body = strstr(w.out.data, "\r\n\r\n") + 4;
    assert_string_equal(body, "piece\npiece\npiece\n");
    assert_int_equal(w.conn.state, CONN_ENDING);
    wire_close(&w);
}

static void test_gone(void **state) {
    static const char *const paths[] = {"/later", "/stream"};
    struct http_limits limits = small_limits();
    for (int i = 0; i < 4; i++) {
        struct wire w;
        char text[100];
        wire_open(&w, &limits);
        snprintf(text, sizeof text, "GET %s HTTP/1.1\r\n" H "\r\n", paths[i & 1]);
        wire_feed(&w, text, strlen(text));
        if (i & 2)
            http_conn_eof(&w.conn);
        else
            http_conn_lost(&w.conn);
        assert_int_equal(w.gone, 1);
        assert_int_equal(w.done, 1);
        assert_int_equal(w.last_status, HTTP_STATUS_GONE);
        assert_int_equal(w.conn.state, CONN_DEAD);
        wire_close(&w);
        assert_int_equal(w.gone, 1);
    }
    /* The end after a complete reply is no loss. */
    struct wire w;
    wire_open(&w, &limits);
    wire_feed(&w, "GET /now HTTP/1.1\r\n" H "\r\n", strlen("GET /now HTTP/1.1\r\n" H "\r\n"));
    http_conn_eof(&w.conn);
    assert_int_equal(w.gone, 0);
    assert_int_equal(w.conn.state, CONN_ENDING);
    wire_close(&w);
}

static int drained_calls;
static void on_drained(void *user) {
    drained_calls++;
}

static void test_backpressure(void **state) {
    struct http_limits limits = small_limits();
    struct wire w;
    char block[1024];
    memset(block, 'x', sizeof block);
    wire_open(&w, &limits);
    const char *text = "GET /stream HTTP/1.1\r\n" H "\r\n";
    wire_feed(&w, text, strlen(text));
    struct http_exchange *x = w.waiting;
    http_set_drained(x, on_drained);
    drained_calls = 0;
    w.hold_output = true;
    size_t pending = 0;
    for (int i = 0; i < 6; i++) pending = http_stream_write(x, block, sizeof block);
    assert_true(pending > limits.output_bytes);
    assert_int_equal(drained_calls, 0);
    w.hold_output = false;
    wire_flush(&w);
    assert_int_equal(drained_calls, 1);
    assert_int_equal(http_stream_pending(x), 0);
    /* One chunk may be of any size. */
    w.hold_output = true;
    char *large = mem_zalloc(6, limits.output_bytes);
    pending = http_stream_write(x, large, 6 * limits.output_bytes);
    mem_free(large);
    assert_true(pending > 6 * limits.output_bytes);
    w.hold_output = false;
    wire_flush(&w);
    assert_int_equal(drained_calls, 2);
    assert_int_equal(http_stream_pending(x), 0);
    /* Who writes on goes beyond the hard cap, once. */
    w.hold_output = true;
    for (int i = 0; i < 40; i++) pending = http_stream_write(x, block, sizeof block);
    assert_true(pending <= 5 * limits.output_bytes);
    wire_flush(&w);
    assert_int_equal(w.conn.state, CONN_DEAD);
    assert_int_equal(w.gone, 1);
    wire_close(&w);
    assert_int_equal(w.gone, 1);
}

/* A client that sends requests and reads nothing: parsing stops, input is bounded. */
static void test_pipelining_bound(void **state) {
    struct http_limits limits = small_limits();
    struct wire w;
    const char *text = "GET /now HTTP/1.1\r\n" H "\r\n";
    wire_open(&w, &limits);
    w.hold_output = true;
    int fed = 0;
    while (http_conn_wants_input(&w.conn) && fed < 100000) {
        wire_feed(&w, text, strlen(text));
        fed++;
    }
    assert_true(fed < 100000);
    assert_true(http_conn_pending(&w.conn) < limits.output_bytes + 1024);
    w.hold_output = false;
    w.woken = true;
    wire_flush(&w);
    assert_int_equal(w.requests, fed);
    assert_int_equal(w.done, fed);
    assert_int_equal(w.conn.state, CONN_IDLE);
    wire_close(&w);
}

static void test_body_total(void **state) {
    struct http_limits limits = small_limits();
    limits.body_total_bytes = 10;
    struct wire w;
    wire_open(&w, &limits);
    const char *text = "POST /now HTTP/1.1\r\n" H "Content-Length: 20\r\n\r\n0123456789x";
    wire_feed(&w, text, strlen(text));
    assert_int_equal(w.last_status, 503);
    assert_int_equal(w.core.body_bytes, 0);
    wire_close(&w);
}

static void test_headers(void **state) {
    struct http_limits limits = small_limits();
    struct wire w;
    wire_open(&w, &limits);
    const char *text = "POST /later HTTP/1.1\r\nHOST: a\r\nX-Thing:  two words \t\r\n\r\n";
    wire_feed(&w, text, strlen(text));
    assert_string_equal(http_header(w.waiting, "x-thing"), "two words");
    assert_null(http_header(w.waiting, "x-other"));
    http_add_header(w.waiting, "Retry-After", "3");
    http_add_header(w.waiting, "Evil", "a\r\nSet: b");
    wire_settle(&w);
    assert_non_null(strstr(w.out.data, "\r\nRetry-After: 3\r\n"));
    assert_null(strstr(w.out.data, "Evil"));
    wire_close(&w);
}

static void test_sizes(void **state) {
    assert_true(sizeof(struct http_conn) <
                768); /* an idle connection is this, a socket handle and links: below 2 KiB */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_good),
        cmocka_unit_test(test_bad),
        cmocka_unit_test(test_long),
        cmocka_unit_test(test_splits),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_continue),
        cmocka_unit_test(test_head_method),
        cmocka_unit_test(test_stream_framing),
        cmocka_unit_test(test_gone),
        cmocka_unit_test(test_backpressure),
        cmocka_unit_test(test_pipelining_bound),
        cmocka_unit_test(test_body_total),
        cmocka_unit_test(test_headers),
        cmocka_unit_test(test_sizes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
