#include "server/http_chunk.h"

#include "engine/base/arith.h"

#define CHUNK_DIGITS_MAX 8

void http_chunked_init(struct http_chunked *chunked, int32_t chunks_max, size_t body_max) {
    /* A chunk costs its size line and two line ends, at least 5 bytes; 24 leave room for an extension. 8 KiB for
     * trailers. */
    *chunked = (struct http_chunked){
        .chunks_max = chunks_max, .framing_max = (size_t)chunks_max * 24 + 8192, .body_max = body_max};
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    if (c >= 'a' && c <= 'f') return c - 'a' + 10;
    if (c >= 'A' && c <= 'F') return c - 'A' + 10;
    return -1;
}

static int chunk_fail(const char **why, int status, const char *text) {
    *why = text;
    return status;
}

/* The size line is complete up to its LF. */
static int chunk_begin(struct http_chunked *c, size_t have, const char **why) {
    if (c->left == 0) {
        c->state = CHUNK_TRAILER;
        c->line_bytes = 0;
        return 0;
    }
    if (++c->chunks > c->chunks_max) return chunk_fail(why, 413, "the body has too many chunks");
    if (c->left > c->body_max || have > c->body_max - (size_t)c->left)
        return chunk_fail(why, 413, "the body is larger than this server takes");
    c->state = CHUNK_DATA;
    return 0;
}

static int size_byte(struct http_chunked *c, char ch, const char **why) {
    int digit = hex_digit(ch);
    if (digit >= 0) {
        if (++c->digits > CHUNK_DIGITS_MAX) return chunk_fail(why, 413, "a chunk is larger than this server takes");
        c->left = c->left * 16 + (uint64_t)digit;
        return 0;
    }
    if (c->digits == 0) return chunk_fail(why, 400, "a chunk size must be hexadecimal digits");
    if (ch == '\r')
        c->state = CHUNK_SIZE_LF;
    else if (ch == ';')
        c->state = CHUNK_EXTENSION;
    else
        return chunk_fail(why, 400, "a chunk size must be hexadecimal digits");
    return 0;
}

static int trailer_byte(struct http_chunked *c, char ch, const char **why) {
    if (ch == '\r') {
        c->state = CHUNK_TRAILER_LF;
        return 0;
    }
    if (c->line_bytes == 0 && (ch == ' ' || ch == '\t' || ch == ':'))
        return chunk_fail(why, 400, "a trailer line must begin with a field name");
    c->line_bytes++;
    return 0;
}

/* One byte that is no chunk data. */
static int framing_byte(struct http_chunked *c, char ch, size_t have, const char **why) {
    if (++c->framing > c->framing_max) return chunk_fail(why, 413, "the chunked body has too much beside its data");
    if ((unsigned char)ch < 0x20 && ch != '\r' && ch != '\n' && ch != '\t')
        return chunk_fail(why, 400, "the chunked body has a control character between chunks");
    switch (c->state) {
    case CHUNK_SIZE:
        return size_byte(c, ch, why);
    case CHUNK_EXTENSION:
        if (ch == '\r')
            c->state = CHUNK_SIZE_LF;
        else if (ch == '\n')
            return chunk_fail(why, 400, "a chunk line must end in CR LF");
        return 0;
    case CHUNK_SIZE_LF:
        if (ch != '\n') return chunk_fail(why, 400, "a chunk line must end in CR LF");
        return chunk_begin(c, have, why);
    case CHUNK_DATA_CR:
        if (ch != '\r') return chunk_fail(why, 400, "a chunk must end in CR LF where its size says");
        c->state = CHUNK_DATA_LF;
        return 0;
    case CHUNK_DATA_LF:
        if (ch != '\n') return chunk_fail(why, 400, "a chunk must end in CR LF where its size says");
        c->state = CHUNK_SIZE;
        c->digits = 0;
        c->left = 0;
        return 0;
    case CHUNK_TRAILER:
        if (ch == '\n') return chunk_fail(why, 400, "a trailer line must end in CR LF");
        return trailer_byte(c, ch, why);
    case CHUNK_TRAILER_LF:
        if (ch != '\n') return chunk_fail(why, 400, "a trailer line must end in CR LF");
        c->state = c->line_bytes ? CHUNK_TRAILER : CHUNK_DONE;
        c->line_bytes = 0;
        return 0;
    case CHUNK_DATA:
    case CHUNK_DONE:
        break;
    }
    return chunk_fail(why, 400, "the chunked body is malformed");
}

size_t http_chunked_take(struct http_chunked *chunked, const char *data, size_t bytes, struct buf *body, int *status,
                         const char **why) {
    size_t at = 0;
    *status = 0;
    while (at < bytes && chunked->state != CHUNK_DONE) {
        if (chunked->state == CHUNK_DATA) {
            size_t take = (size_t)i64_min((int64_t)(bytes - at), (int64_t)chunked->left);
            buf_append(body, data + at, take);
            at += take;
            chunked->left -= take;
            if (chunked->left == 0) chunked->state = CHUNK_DATA_CR;
            continue;
        }
        *status = framing_byte(chunked, data[at], body->bytes, why);
        if (*status) break;
        at++;
    }
    return at;
}
