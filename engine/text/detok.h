/* detok.h: tokens to text one at a time. Holds back the unfinished tail of a character, so what it gives is always
 * whole, valid UTF-8; broken bytes become U+FFFD as the whole text decoded at once would have them. One sample's state;
 * the engine thread owns it. */
#ifndef QUIRE_TEXT_DETOK_H
#define QUIRE_TEXT_DETOK_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/text/text.h"

struct detok {
    unsigned char tail[4]; /* bytes of a character that is not complete */
    uint8_t tail_bytes;
    bool skip_special;
};

void detok_init(struct detok *detok, bool skip_special);
void detok_push(struct detok *detok, const struct text *text, int32_t id, struct buf *out); /* appends */
void detok_flush(struct detok *detok, struct buf *out); /* what is held back becomes U+FFFD */

/* Appends `bytes` of any bytes as valid UTF-8, keeping an incomplete tail in `detok`. */
void detok_bytes(struct detok *detok, const char *data, size_t bytes, struct buf *out);

#endif
