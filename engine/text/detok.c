#include "engine/text/detok.h"

#include <string.h>

#include "engine/text/utf8.h"

void detok_init(struct detok *detok, bool skip_special) {
    memset(detok, 0, sizeof *detok);
    detok->skip_special = skip_special;
}

/* One more byte after an unfinished tail. A tail is always a proper beginning of a character, so a byte that does not
 * continue it ends an ill-formed part in front of it, and may itself begin a character. */
static void push_byte(struct detok *detok, unsigned char byte, struct buf *out) {
    detok->tail[detok->tail_bytes++] = byte;
    uint32_t scalar;
    int step = utf8_step(detok->tail, detok->tail_bytes, &scalar);
    if (step == 0) return;
    if (step > 0) {
        buf_append(out, detok->tail, detok->tail_bytes);
        detok->tail_bytes = 0;
        return;
    }
    buf_append_str(out, UTF8_REPLACEMENT);
    bool kept = -step < detok->tail_bytes;
    detok->tail_bytes = 0;
    if (kept) push_byte(detok, byte, out); /* now the first byte of the tail: one level deep */
}

void detok_bytes(struct detok *detok, const char *data, size_t bytes, struct buf *out) {
    const unsigned char *p = (const unsigned char *)data;
    size_t at = 0;
    while (at < bytes) {
        if (detok->tail_bytes > 0) {
            push_byte(detok, p[at++], out);
            continue;
        }
        size_t valid = utf8_valid_bytes(data + at, bytes - at);
        if (valid > 0) buf_append(out, data + at, valid);
        at += valid;
        if (at < bytes) push_byte(detok, p[at++], out);
    }
}

void detok_push(struct detok *detok, const struct text *text, int32_t id, struct buf *out) {
    if (detok->skip_special && text_token_special(text, id)) return;
    size_t bytes;
    const char *token = text_token(text, id, &bytes);
    detok_bytes(detok, token, bytes, out);
}

void detok_flush(struct detok *detok, struct buf *out) {
    if (detok->tail_bytes > 0) buf_append_str(out, UTF8_REPLACEMENT);
    detok->tail_bytes = 0;
}
