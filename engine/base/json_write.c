/* Writing JSON text. On the path of every streamed token, so strings are copied in runs and never through a tree. */
#include "engine/base/json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/base/utf8.h"

/* At most six bytes: the escape of a control character, a quote or a backslash. */
static void escape_write(struct buf *out, unsigned char c) {
    static const char hex[] = "0123456789abcdef";
    static const char from[] = "\"\\\b\f\n\r\t", to[] = "\"\\bfnrt";
    const char *found = c ? strchr(from, c) : NULL;
    char text[6] = {'\\', 'u', '0', '0', hex[c >> 4], hex[c & 15]};
    if (found) text[1] = to[found - from];
    buf_append(out, text, found ? 2 : 6);
}

void json_write_str(struct buf *out, const char *text, size_t bytes) {
    size_t at = 0, begin = 0;
    buf_grow(out, bytes + 2);
    buf_append_char(out, '"');
    while (at < bytes) {
        at += utf8_plain_ascii(text + at, bytes - at);
        if (at >= bytes) break;
        size_t len = (unsigned char)text[at] >= 0x80 ? utf8_char(text + at, bytes - at) : 0;
        if (len) {
            at += len;
            continue;
        }
        buf_append(out, text + begin, at - begin);
        if ((unsigned char)text[at] < 0x80) {
            escape_write(out, (unsigned char)text[at++]);
        } else {
            at += utf8_bad_part(text + at, bytes - at);
            buf_append(out, "\xEF\xBF\xBD", 3);
        }
        begin = at;
    }
    buf_append(out, text + begin, bytes - begin);
    buf_append_char(out, '"');
}

void json_write_i64(struct buf *out, int64_t value) {
    char text[20], *p = text + sizeof text;
    uint64_t rest = value < 0 ? 0 - (uint64_t)value : (uint64_t)value;
    do {
        *--p = (char)('0' + rest % 10);
        rest /= 10;
    } while (rest);
    if (value < 0) *--p = '-';
    buf_append(out, p, (size_t)(text + sizeof text - p));
}

/* Typed readers want to see that a number is a floating-point one. */
static void float_write(struct buf *out, char text[40], int len) {
    if (!strpbrk(text, ".e")) {
        text[len++] = '.';
        text[len++] = '0';
    }
    buf_append(out, text, (size_t)len);
}

void json_write_f64(struct buf *out, double value) {
    char text[40];
    int len = 0;
    if (!isfinite(value)) {
        buf_append(out, "null", 4);
        return;
    }
    for (int digits = 15; digits <= 17; digits++) {
        len = snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) break;
    }
    float_write(out, text, len);
}

void json_write_f32(struct buf *out, float value) {
    char text[40];
    int len = 0;
    if (!isfinite(value)) {
        buf_append(out, "null", 4);
        return;
    }
    for (int digits = 6; digits <= 9; digits++) {
        len = snprintf(text, sizeof text, "%.*g", digits, (double)value);
        if (strtof(text, NULL) == value) break;
    }
    float_write(out, text, len);
}
