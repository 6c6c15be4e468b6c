/* The head of a request: a line scan of ours that decides limits and line ends byte by byte, llhttp (strict) for the
 * grammar, then a second check of everything that requests have been smuggled through. */
#include <string.h>
#include <strings.h>

#include "engine/base/check.h"
#include "server/http_conn.h"

static int head_fail(const char **why, int status, const char *text) {
    *why = text;
    return status;
}

static int on_url(llhttp_t *parser, const char *at, size_t bytes) {
    struct http_conn *conn = parser->data;
    buf_append(&conn->exchange->head, at, bytes);
    return 0;
}

static int on_url_complete(llhttp_t *parser) {
    struct http_conn *conn = parser->data;
    buf_append_char(&conn->exchange->head, '\0');
    conn->exchange->fields[0].name = (uint32_t)conn->exchange->head.bytes;
    return 0;
}

static int on_field(llhttp_t *parser, const char *at, size_t bytes) {
    struct http_exchange *x = ((struct http_conn *)parser->data)->exchange;
    char *to = buf_grow(&x->head, bytes);
    for (size_t i = 0; i < bytes; i++) to[i] = at[i] >= 'A' && at[i] <= 'Z' ? (char)(at[i] | 0x20) : at[i];
    to[bytes] = '\0';
    x->head.bytes += bytes;
    return 0;
}

static int on_field_complete(llhttp_t *parser) {
    struct http_conn *conn = parser->data;
    struct http_exchange *x = conn->exchange;
    if (x->field_count >= conn->core->limits.header_fields) return -1;
    buf_append_char(&x->head, '\0');
    x->fields[x->field_count].value = (uint32_t)x->head.bytes;
    return 0;
}

static int on_value(llhttp_t *parser, const char *at, size_t bytes) {
    struct http_conn *conn = parser->data;
    buf_append(&conn->exchange->head, at, bytes);
    return 0;
}

static int on_value_complete(llhttp_t *parser) {
    struct http_exchange *x = ((struct http_conn *)parser->data)->exchange;
    size_t start = x->fields[x->field_count].value;
    while (x->head.bytes > start && (x->head.data[x->head.bytes - 1] == ' ' || x->head.data[x->head.bytes - 1] == '\t'))
        x->head.bytes--;
    buf_append_char(&x->head, '\0');
    x->field_count++;
    if (x->field_count < HTTP_FIELDS_MAX) x->fields[x->field_count].name = (uint32_t)x->head.bytes;
    return 0;
}

/* We read bodies ourselves, so the parser stops here. */
static int on_headers_complete(llhttp_t *parser) {
    return HPE_PAUSED;
}

static const llhttp_settings_t head_settings = {
    .on_url = on_url,
    .on_url_complete = on_url_complete,
    .on_header_field = on_field,
    .on_header_field_complete = on_field_complete,
    .on_header_value = on_value,
    .on_header_value_complete = on_value_complete,
    .on_headers_complete = on_headers_complete,
};

void http_head_begin(struct http_conn *conn) {
    llhttp_init(&conn->parser, HTTP_REQUEST, &head_settings);
    conn->parser.data = conn;
    conn->scan = (struct http_scan){0};
}

/* One byte of a head. Returns a status if the byte decides a refusal; sets *done behind the empty line. */
static int scan_byte(struct http_scan *s, char ch, const struct http_limits *limits, bool *done, const char **why) {
    unsigned char u = (unsigned char)ch;
    if (s->previous == '\r' && ch != '\n') return head_fail(why, 400, "the head has a CR that ends no line");
    if (ch == '\n' && s->previous != '\r') return head_fail(why, 400, "the lines of the head must end in CR LF");
    if ((u < 0x20 && ch != '\r' && ch != '\n' && ch != '\t') || u == 0x7f)
        return head_fail(why, 400, "the head has a control character");
    if (s->line_bytes == 0 && (ch == ' ' || ch == '\t'))
        return head_fail(why, 400, "a line of the head begins with a space");
    if (++s->head_bytes > limits->header_bytes)
        return head_fail(why, 431, "the request line and header fields are longer than this server takes");
    s->previous = ch;
    if (ch == '\n') {
        if (s->line_bytes)
            s->first_line = true;
        else if (s->first_line)
            *done = true;
        s->line_bytes = 0;
    } else if (ch != '\r') {
        s->something = true;
        /* The method and the version are at most 32 bytes beside the target. */
        if (++s->line_bytes > HTTP_TARGET_BYTES + 32 && !s->first_line)
            return head_fail(why, 414, "the request target is longer than 8192 bytes");
    }
    return 0;
}

static int parser_status(const struct http_conn *conn, enum llhttp_errno code, const char **why) {
    if (conn->exchange->field_count >= conn->core->limits.header_fields)
        return head_fail(why, 431, "the request has too many header fields");
    switch (code) {
    case HPE_INVALID_METHOD:
        return head_fail(why, 400, "the request does not begin with a method that this server knows");
    case HPE_INVALID_URL:
        return head_fail(why, 400, "the request target is malformed");
    case HPE_INVALID_VERSION:
        return head_fail(why, 505, "the version must be HTTP/1.0 or HTTP/1.1");
    case HPE_INVALID_CONTENT_LENGTH:
    case HPE_UNEXPECTED_CONTENT_LENGTH:
        return head_fail(why, 400, "Content-Length must be one plain number and not meet Transfer-Encoding");
    case HPE_INVALID_TRANSFER_ENCODING:
        return head_fail(why, 400, "Transfer-Encoding must be chunked, alone, without Content-Length");
    case HPE_INVALID_HEADER_TOKEN:
        return head_fail(why, 400, "a header field is malformed");
    default:
        return head_fail(why, 400, "the request head is malformed");
    }
}

size_t http_head_take(struct http_conn *conn, const char *data, size_t bytes, bool *done, int *status,
                      const char **why) {
    size_t good = 0;
    *status = 0;
    *done = false;
    while (good < bytes && !*done) {
        *status = scan_byte(&conn->scan, data[good], &conn->core->limits, done, why);
        if (*status) break;
        good++;
    }
    enum llhttp_errno code = good ? llhttp_execute(&conn->parser, data, good) : HPE_OK;
    enum llhttp_errno wanted = *done ? HPE_PAUSED : HPE_OK;
    if (code != wanted) {
        *done = false;
        *status = parser_status(conn, code, why);
    }
    return good;
}

static int hex_value(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    c = (char)(c | 0x20);
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

/* Decodes the path into x->path, once; the query stays as it is. */
static int target_decode(struct http_exchange *x, const char **why) {
    const char *t = x->head.data;
    if (strncasecmp(t, "http://", 7) == 0 || strncasecmp(t, "https://", 8) == 0) {
        t = strstr(t, "://") + 3;
        t += strcspn(t, "/?#");
        if (*t != '/') t = "/";
    }
    if (*t != '/' && !(x->method == HTTP_OPTIONS_ && strcmp(t, "*") == 0))
        return head_fail(why, 400, "the request target must be a path");
    for (; *t && *t != '?' && *t != '#'; t++) {
        int hi, lo;
        if (*t != '%') {
            buf_append_char(&x->path, *t);
            continue;
        }
        if ((hi = hex_value(t[1])) < 0 || (lo = hex_value(t[2])) < 0 || hi * 16 + lo < 0x20 || hi * 16 + lo == 0x7f)
            return head_fail(why, 400, "the request target has a percent sign that escapes no character");
        buf_append_char(&x->path, (char)(hi * 16 + lo));
        t += 2;
    }
    if (*t == '#') return head_fail(why, 400, "the request target must have no fragment");
    buf_append_char(&x->path, '\0');
    size_t query = x->path.bytes;
    buf_append_str(&x->path, *t == '?' ? t + 1 : "");
    x->query = x->path.data + query;
    return 0;
}

static enum http_method method_of(uint8_t code) {
    switch (code) {
    case HTTP_GET:
        return HTTP_GET_;
    case HTTP_POST:
        return HTTP_POST_;
    case HTTP_PUT:
        return HTTP_PUT_;
    case HTTP_DELETE:
        return HTTP_DELETE_;
    case HTTP_HEAD:
        return HTTP_HEAD_;
    case HTTP_OPTIONS:
        return HTTP_OPTIONS_;
    default:
        return HTTP_OTHER_;
    }
}

/* True when a comma-separated value holds `token` (case does not matter). */
static bool value_has(const char *value, const char *token) {
    size_t len = strlen(token);
    while (*value) {
        value += strspn(value, " \t,");
        size_t word = strcspn(value, " \t,");
        if (word == len && strncasecmp(value, token, len) == 0) return true;
        value += word;
    }
    return false;
}

static bool name_valid(const char *name) {
    if (!*name) return false;
    for (const char *p = name; *p; p++)
        if (!((*p >= 'a' && *p <= 'z') || (*p >= '0' && *p <= '9') || strchr("!#$%&'*+-.^_`|~", *p))) return false;
    return true;
}

/* Fields that must not come twice: two readers could each believe another one. */
static int duplicates_check(const struct http_exchange *x, const char **why) {
    static const char *const once[] = {
        "host", "content-length", "transfer-encoding", "content-type", "content-encoding", "authorization", "expect"};
    uint32_t seen = 0;
    for (int32_t i = 0; i < x->field_count; i++) {
        const char *name = x->head.data + x->fields[i].name;
        if (!name_valid(name)) return head_fail(why, 400, "a header field name has characters that no name may have");
        for (uint32_t k = 0; k < sizeof once / sizeof *once; k++) {
            if (strcmp(name, once[k]) != 0) continue;
            if (seen & (1u << k)) return head_fail(why, 400, "a header field that may come once came twice");
            seen |= 1u << k;
        }
    }
    return 0;
}

static int length_parse(const char *text, uint64_t *out, const char **why) {
    size_t digits = strspn(text, "0123456789");
    if (digits == 0 || text[digits]) return head_fail(why, 400, "Content-Length must be one plain number");
    if (digits > 18) return head_fail(why, 413, "the body is larger than this server takes");
    *out = 0;
    for (size_t i = 0; i < digits; i++) *out = *out * 10 + (uint64_t)(text[i] - '0');
    return 0;
}

/* How the body is framed. */
static int framing_check(struct http_exchange *x, uint64_t *content_length, const char **why) {
    const char *encoding = http_header(x, "transfer-encoding"), *length = http_header(x, "content-length");
    *content_length = 0;
    x->body_kind = HTTP_BODY_NONE;
    if (encoding && length) return head_fail(why, 400, "Content-Length and Transfer-Encoding must not come together");
    if (encoding) {
        if (x->minor_0) return head_fail(why, 400, "HTTP/1.0 has no Transfer-Encoding");
        if (strcasecmp(encoding, "chunked") != 0) return head_fail(why, 501, "the only Transfer-Encoding is chunked");
        x->body_kind = HTTP_BODY_CHUNKED;
    } else if (length) {
        int status = length_parse(length, content_length, why);
        if (status) return status;
        if (*content_length) x->body_kind = HTTP_BODY_LENGTH;
    }
    return 0;
}

int http_head_check(struct http_exchange *x, uint64_t *content_length, const char **why) {
    const llhttp_t *parser = &x->conn->parser;
    x->method = method_of(parser->method);
    if (parser->http_major != 1 || parser->http_minor > 1)
        return head_fail(why, 505, "the version must be HTTP/1.0 or HTTP/1.1");
    x->minor_0 = parser->http_minor == 0;
    for (const unsigned char *p = (const unsigned char *)x->head.data; *p; p++)
        if (*p <= 0x20 || *p >= 0x7f) return head_fail(why, 400, "the request target must be plain ASCII");
    if (strlen(x->head.data) > HTTP_TARGET_BYTES)
        return head_fail(why, 414, "the request target is longer than 8192 bytes");
    int status = target_decode(x, why);
    if (!status) status = duplicates_check(x, why);
    if (!status) status = framing_check(x, content_length, why);
    if (status) return status;
    const char *host = http_header(x, "host"), *connection = http_header(x, "connection");
    if (!x->minor_0 && !host) return head_fail(why, 400, "HTTP/1.1 needs a Host field");
    if (host && strpbrk(host, " \t,/@?#")) return head_fail(why, 400, "the Host field is malformed");
    x->keep_alive = x->minor_0 ? connection && value_has(connection, "keep-alive") && !value_has(connection, "close")
                               : !connection || !value_has(connection, "close");
    const char *expect = http_header(x, "expect"), *coding = http_header(x, "content-encoding");
    if (expect && strcasecmp(expect, "100-continue") != 0)
        return head_fail(why, 417, "the only expectation is 100-continue");
    x->expect_continue = expect && !x->minor_0 && x->body_kind != HTTP_BODY_NONE;
    if (coding && strcasecmp(coding, "identity") != 0)
        return head_fail(why, 415, "the body must not be compressed: Content-Encoding is not supported");
    return 0;
}
