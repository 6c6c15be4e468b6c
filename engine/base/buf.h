/* buf.h: a growable byte buffer. `data` is always followed by a NUL once anything was appended, so text can be printed.
 * Belongs to one thread at a time. Growth cannot fail (see mem.h); callers bound what they append. */
#ifndef QUIRE_BASE_BUF_H
#define QUIRE_BASE_BUF_H

#include <stddef.h>
#include <string.h>

struct buf {
    char *data;   /* [capacity] or NULL */
    size_t bytes; /* used */
    size_t capacity;
};

void buf_init(struct buf *buf); /* an empty buffer; all-zero is the same */
void buf_deinit(struct buf *buf);
void buf_clear(struct buf *buf);               /* keeps the memory */
char *buf_grow(struct buf *buf, size_t bytes); /* room for `bytes` more; returns where they begin */

/* Most appends are a few bytes into room that is there. */
static inline void buf_append(struct buf *buf, const void *data, size_t bytes) {
    char *to = bytes < buf->capacity - buf->bytes ? buf->data + buf->bytes : buf_grow(buf, bytes);
    if (bytes) memcpy(to, data, bytes);
    to[bytes] = '\0';
    buf->bytes += bytes;
}
void buf_append_str(struct buf *buf, const char *text);
void buf_append_char(struct buf *buf, char c);
void buf_printf(struct buf *buf, const char *format, ...) __attribute__((format(printf, 2, 3)));

#endif
