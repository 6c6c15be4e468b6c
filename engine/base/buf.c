#include "engine/base/buf.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "engine/base/check.h"
#include "engine/base/mem.h"

void buf_init(struct buf *buf) {
    *buf = (struct buf){0};
}

void buf_deinit(struct buf *buf) {
    mem_free(buf->data);
    *buf = (struct buf){0};
}

void buf_clear(struct buf *buf) {
    buf->bytes = 0;
    if (buf->data) buf->data[0] = '\0';
}

char *buf_grow(struct buf *buf, size_t bytes) {
    size_t need = buf->bytes + bytes + 1;
    CHECK(need > bytes);
    if (need > buf->capacity) {
        size_t capacity = buf->capacity ? buf->capacity : 64;
        while (capacity < need) capacity *= 2;
        buf->data = mem_realloc(buf->data, capacity);
        buf->capacity = capacity;
    }
    return buf->data + buf->bytes;
}

void buf_append_str(struct buf *buf, const char *text) {
    buf_append(buf, text, strlen(text));
}
void buf_append_char(struct buf *buf, char c) {
    buf_append(buf, &c, 1);
}

void buf_printf(struct buf *buf, const char *format, ...) {
    va_list args, again;
    va_start(args, format);
    va_copy(again, args);
    int n = vsnprintf(NULL, 0, format, args);
    va_end(args);
    CHECK(n >= 0);
    char *to = buf_grow(buf, (size_t)n);
    vsnprintf(to, (size_t)n + 1, format, again);
    va_end(again);
    buf->bytes += (size_t)n;
}
