/* http_chunk.h: a chunked body (RFC 9112 §7.1), strictly: CR LF only, hexadecimal sizes of at most eight digits, sizes,
 * extensions and trailers within budgets. A pure state machine over bytes; whatever the split, it stops at the same
 * byte. The connection owns it. */
#ifndef QUIRE_SERVER_HTTP_CHUNK_H
#define QUIRE_SERVER_HTTP_CHUNK_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"

enum http_chunk_state {
    CHUNK_SIZE,      /* in the digits */
    CHUNK_EXTENSION, /* after them, up to CR */
    CHUNK_SIZE_LF,
    CHUNK_DATA,
    CHUNK_DATA_CR,
    CHUNK_DATA_LF,
    CHUNK_TRAILER, /* in a trailer line, or at its start */
    CHUNK_TRAILER_LF,
    CHUNK_DONE,
};

struct http_chunked {
    enum http_chunk_state state;
    int32_t digits;
    uint64_t left;     /* of the present chunk */
    int32_t chunks;    /* seen */
    size_t line_bytes; /* of the present trailer line */
    size_t framing;    /* bytes that were not data */
    int32_t chunks_max;
    size_t framing_max, body_max;
};

void http_chunked_init(struct http_chunked *chunked, int32_t chunks_max, size_t body_max);

/* Takes bytes, appends data to `body`, returns how many it took; stops behind the body's last byte or at the byte that
 * decides an error. *status is 0, or 400 or 413 with *why. */
size_t http_chunked_take(struct http_chunked *chunked, const char *data, size_t bytes, struct buf *body, int *status,
                         const char **why);

#endif
