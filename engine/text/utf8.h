/* utf8.h: one step of UTF-8 decoding, by Unicode's tables 3-7 (what is well formed) and 3-8, 3-11 (how much of what is
 * not becomes one U+FFFD), on top of engine/base/utf8.h. Pure functions; any thread. Knows nothing of tokens. */
#ifndef QUIRE_TEXT_UTF8_H
#define QUIRE_TEXT_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define UTF8_REPLACEMENT "\xef\xbf\xbd" /* U+FFFD */

/* Looks at the character that begins at text[0]; `bytes` is at least 1.
 * > 0: so many bytes are one whole character, stored in *scalar.
 *   0: all `bytes` are the beginning of a character and more is needed.
 * < 0: so many bytes (negated) are a maximal ill-formed part: one U+FFFD stands for them. */
int utf8_step(const unsigned char *text, size_t bytes, uint32_t *scalar);

/* The offset of the first byte that is not part of a whole character; `bytes` when all of it is well formed. */
size_t utf8_valid_bytes(const char *text, size_t bytes);

/* The character at text[0] of text known to be well formed. */
static inline int utf8_read(const unsigned char *text, uint32_t *scalar) {
    uint32_t lead = text[0];
    if (lead < 0x80) return *scalar = lead, 1;
    if (lead < 0xe0) return *scalar = (lead & 0x1f) << 6 | (text[1] & 0x3fu), 2;
    if (lead < 0xf0) return *scalar = (lead & 0x0f) << 12 | (text[1] & 0x3fu) << 6 | (text[2] & 0x3fu), 3;
    *scalar = (lead & 0x07) << 18 | (text[1] & 0x3fu) << 12 | (text[2] & 0x3fu) << 6 | (text[3] & 0x3fu);
    return 4;
}

#endif
