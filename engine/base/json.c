#include "engine/base/json.h"

#include <string.h>

#include "engine/base/check.h"
#include "engine/base/utf8.h"

const struct json_limits json_limits_request = {.depth = 64, .nodes = 1u << 20};
const struct json_limits json_limits_file = {.depth = 64, .nodes = 64u << 20};

/* What may come next. */
enum json_state {
    EXPECT_VALUE,
    EXPECT_VALUE_OR_END, /* after '[' */
    EXPECT_KEY_OR_END,   /* after '{' */
    EXPECT_COLON,        /* after a key */
    EXPECT_MORE,         /* after a value: ',', the container's end, or the end of the text */
    READ_ALL,
    READ_FAILED,
};

void json_reader_init(struct json_reader *reader, const char *text, size_t bytes, struct json_limits limits) {
    memset(reader, 0, sizeof *reader);
    reader->text = text;
    reader->bytes = bytes;
    reader->limits = limits;
    if (reader->limits.depth > JSON_DEPTH_MAX) reader->limits.depth = JSON_DEPTH_MAX;
    reader->_state = EXPECT_VALUE;
}

void json_reader_deinit(struct json_reader *reader) {
    buf_deinit(&reader->_scratch);
}

static enum json_token fail(struct json_reader *r, size_t at, const char *why) {
    err_set(&r->err, ERR_INVALID, "invalid JSON at byte %zu: %s", at, why);
    r->_state = READ_FAILED;
    return JSON_ERROR;
}

/* ---- strings ---------------------------------------------------------------------------------------------------- */

static int hex4(const char *p) {
    int value = 0;
    for (int i = 0; i < 4; i++) {
        int c = (unsigned char)p[i], lower = c | 0x20;
        if (c >= '0' && c <= '9') {
            value = value * 16 + (c - '0');
        } else if (lower >= 'a' && lower <= 'f') {
            value = value * 16 + (lower - 'a' + 10);
        } else {
            return -1;
        }
    }
    return value;
}

/* Decodes the escape at text[at] (after the backslash) into the scratch; moves *at behind it. NULL or why not. */
static const char *escape_read(struct json_reader *r, size_t *at) {
    static const char from[] = "\"\\/bfnrt", to[] = "\"\\/\b\f\n\r\t";
    if (*at >= r->bytes) return "the string does not end";
    char c = r->text[(*at)++];
    if (c != 'u') {
        const char *found = c ? strchr(from, c) : NULL;
        if (!found) return "unknown escape";
        buf_append_char(&r->_scratch, to[found - from]);
        return NULL;
    }
    if (r->bytes - *at < 4) return "a \\u escape needs four hex digits";
    int high = hex4(r->text + *at), low;
    if (high < 0) return "a \\u escape needs four hex digits";
    *at += 4;
    uint32_t code = (uint32_t)high;
    if (high >= 0xDC00 && high <= 0xDFFF) return "a lone surrogate";
    if (high >= 0xD800 && high <= 0xDBFF) {
        if (r->bytes - *at < 6 || r->text[*at] != '\\' || r->text[*at + 1] != 'u') return "a lone surrogate";
        low = hex4(r->text + *at + 2);
        if (low < 0xDC00 || low > 0xDFFF) return "a lone surrogate";
        *at += 6;
        code = 0x10000 + (((uint32_t)high - 0xD800) << 10) + ((uint32_t)low - 0xDC00);
    }
    char utf8[4];
    buf_append(&r->_scratch, utf8, utf8_put(code, utf8));
    return NULL;
}

/* Moves over what needs no decoding: to the closing quote, a backslash, or the byte at fault. */
static size_t plain_span(const struct json_reader *r, size_t at) {
    const char *text = r->text;
    for (;;) {
        at += utf8_plain_ascii(text + at, r->bytes - at);
        if (at >= r->bytes || (unsigned char)text[at] < 0x80) return at;
        size_t len = utf8_char(text + at, r->bytes - at);
        if (!len) return at;
        at += len;
    }
}

/* Reads the string whose opening quote is at r->at. NULL, or why not with *bad_at set. */
static const char *string_read(struct json_reader *r, size_t *bad_at) {
    size_t begin = r->at + 1, at = begin;
    bool escaped = false;
    for (;;) {
        at = plain_span(r, at);
        *bad_at = at;
        if (at >= r->bytes) return "the string does not end";
        unsigned char c = (unsigned char)r->text[at];
        if (c == '"') break;
        if (c >= 0x80) return "invalid UTF-8";
        if (c < 0x20) return "a raw control character in a string";
        if (!escaped) buf_clear(&r->_scratch);
        escaped = true;
        buf_append(&r->_scratch, r->text + begin, at - begin);
        at++;
        const char *why = escape_read(r, &at);
        if (why) return why;
        begin = at;
    }
    if (escaped) buf_append(&r->_scratch, r->text + begin, at - begin);
    r->str = escaped ? r->_scratch.data : r->text + begin;
    r->str_bytes = escaped ? r->_scratch.bytes : at - begin;
    r->at = at + 1;
    return NULL;
}

/* ---- numbers ---------------------------------------------------------------------------------------------------- */

static size_t digits_span(const struct json_reader *r, size_t at) {
    while (at < r->bytes && r->text[at] >= '0' && r->text[at] <= '9') at++;
    return at;
}

/* The grammar of RFC 8259 section 6, nothing more. */
static const char *number_read(struct json_reader *r) {
    size_t begin = r->at, at = begin, from;
    if (r->text[at] == '-') at++;
    from = at;
    at = digits_span(r, at);
    if (at == from) return "a number needs a digit";
    if (r->text[from] == '0' && at > from + 1) return "a number must not begin with 0";
    if (at < r->bytes && r->text[at] == '.') {
        from = ++at;
        at = digits_span(r, at);
        if (at == from) return "a number needs a digit after its point";
    }
    if (at < r->bytes && (r->text[at] | 0x20) == 'e') {
        at++;
        if (at < r->bytes && (r->text[at] == '+' || r->text[at] == '-')) at++;
        from = at;
        at = digits_span(r, at);
        if (at == from) return "an exponent needs a digit";
    }
    r->str = r->text + begin;
    r->str_bytes = at - begin;
    r->at = at;
    return NULL;
}

/* ---- the machine ------------------------------------------------------------------------------------------------ */

static void space_skip(struct json_reader *r) {
    while (r->at < r->bytes) {
        char c = r->text[r->at];
        if (c != ' ' && c != '\n' && c != '\r' && c != '\t') return;
        r->at++;
    }
}

static enum json_token container_begin(struct json_reader *r, char open) {
    if (r->_depth >= r->limits.depth) {
        err_set(&r->err, ERR_INVALID, "invalid JSON at byte %zu: nested deeper than %zu levels", r->at,
                r->limits.depth);
        r->_state = READ_FAILED;
        return JSON_ERROR;
    }
    r->_stack[r->_depth++] = (uint8_t)open;
    r->at++;
    r->_state = open == '{' ? EXPECT_KEY_OR_END : EXPECT_VALUE_OR_END;
    return open == '{' ? JSON_OBJECT_BEGIN : JSON_ARRAY_BEGIN;
}

static enum json_token container_end(struct json_reader *r) {
    r->at++;
    r->_state = EXPECT_MORE;
    return r->_stack[--r->_depth] == '{' ? JSON_OBJECT_END : JSON_ARRAY_END;
}

static enum json_token literal_read(struct json_reader *r, const char *word, enum json_token token) {
    size_t len = strlen(word);
    if (r->bytes - r->at < len || memcmp(r->text + r->at, word, len) != 0)
        return fail(r, r->at, "unexpected character");
    r->at += len;
    r->_state = EXPECT_MORE;
    return token;
}

static enum json_token value_read(struct json_reader *r) {
    const char *why;
    size_t bad_at = r->at;
    if (r->at >= r->bytes) return fail(r, r->at, "a value is missing");
    if (++r->_nodes > r->limits.nodes) {
        err_set(&r->err, ERR_INVALID, "invalid JSON at byte %zu: more than %zu values", r->at, r->limits.nodes);
        r->_state = READ_FAILED;
        return JSON_ERROR;
    }
    char c = r->text[r->at];
    switch (c) {
    case '{':
    case '[':
        return container_begin(r, c);
    case 't':
        return literal_read(r, "true", JSON_TRUE);
    case 'f':
        return literal_read(r, "false", JSON_FALSE);
    case 'n':
        return literal_read(r, "null", JSON_NULL);
    case '"':
        if ((why = string_read(r, &bad_at))) return fail(r, bad_at, why);
        r->_state = EXPECT_MORE;
        return JSON_STRING;
    default:
        if (c != '-' && (c < '0' || c > '9')) return fail(r, r->at, "unexpected character");
        if ((why = number_read(r))) return fail(r, bad_at, why);
        r->_state = EXPECT_MORE;
        return JSON_NUMBER;
    }
}

static enum json_token key_read(struct json_reader *r) {
    size_t bad_at;
    if (r->at >= r->bytes || r->text[r->at] != '"') return fail(r, r->at, "a key in quotes is missing");
    const char *why = string_read(r, &bad_at);
    if (why) return fail(r, bad_at, why);
    r->_state = EXPECT_COLON;
    return JSON_KEY;
}

/* After a value: a comma leads on, the container's end closes it. */
static enum json_token more_read(struct json_reader *r) {
    if (r->_depth == 0) {
        if (r->at < r->bytes) return fail(r, r->at, "text after the value");
        r->_state = READ_ALL;
        return JSON_END;
    }
    bool object = r->_stack[r->_depth - 1] == '{';
    if (r->at >= r->bytes) return fail(r, r->at, object ? "the object does not end" : "the array does not end");
    char c = r->text[r->at];
    if (c == (object ? '}' : ']')) return container_end(r);
    if (c != ',') return fail(r, r->at, object ? "',' or '}' is missing" : "',' or ']' is missing");
    r->at++;
    space_skip(r);
    return object ? key_read(r) : value_read(r);
}

enum json_token json_next(struct json_reader *r) {
    space_skip(r);
    char c = r->at < r->bytes ? r->text[r->at] : '\0';
    switch ((enum json_state)r->_state) {
    case EXPECT_VALUE:
        return value_read(r);
    case EXPECT_VALUE_OR_END:
        return c == ']' ? container_end(r) : value_read(r);
    case EXPECT_KEY_OR_END:
        return c == '}' ? container_end(r) : key_read(r);
    case EXPECT_COLON:
        if (c != ':') return fail(r, r->at, "':' is missing");
        r->at++;
        space_skip(r);
        return value_read(r);
    case EXPECT_MORE:
        return more_read(r);
    case READ_ALL:
        return JSON_END;
    case READ_FAILED:
        return JSON_ERROR;
    }
    CHECK_MSG(false, "state %d", r->_state);
    return JSON_ERROR;
}

bool json_skip(struct json_reader *reader, enum json_token token) {
    size_t open = 0;
    for (;;) {
        if (token == JSON_ERROR || token == JSON_END) return false;
        if (token == JSON_OBJECT_BEGIN || token == JSON_ARRAY_BEGIN) open++;
        if (token == JSON_OBJECT_END || token == JSON_ARRAY_END) open--;
        if (open == 0 && token != JSON_KEY) return true;
        token = json_next(reader);
    }
}

bool json_str_is(const struct json_reader *reader, const char *text) {
    size_t len = strlen(text);
    return reader->str_bytes == len && memcmp(reader->str, text, len) == 0;
}
