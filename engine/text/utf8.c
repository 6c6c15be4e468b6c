#include "engine/text/utf8.h"

#include <string.h>

#include "engine/base/utf8.h"

int utf8_step(const unsigned char *text, size_t bytes, uint32_t *scalar) {
    if (utf8_char((const char *)text, bytes) > 0) return utf8_read(text, scalar);
    size_t bad = utf8_bad_part((const char *)text, bytes);
    bool begins = text[0] >= 0xc2 && text[0] <= 0xf4;
    return begins && bad == bytes ? 0 : -(int)bad; /* nothing after the part: more bytes could complete it */
}

size_t utf8_valid_bytes(const char *text, size_t bytes) {
    size_t at = 0;
    while (at < bytes) {
        uint64_t word;
        while (at + 8 <= bytes && (memcpy(&word, text + at, 8), (word & 0x8080808080808080u) == 0)) at += 8;
        if (at == bytes) break;
        size_t step = utf8_char(text + at, bytes - at);
        if (step == 0) break;
        at += step;
    }
    return at;
}
