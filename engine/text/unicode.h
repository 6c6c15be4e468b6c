/* unicode.h: what kind of character a scalar value is, as Hugging Face's pre-tokenizers see it (tables by
 * unicode_gen.py). Pure; any thread. */
#ifndef QUIRE_TEXT_UNICODE_H
#define QUIRE_TEXT_UNICODE_H

#include <stdint.h>

enum unicode_class {
    UNICODE_LETTER = 1,  /* category L */
    UNICODE_NUMBER = 2,  /* category N */
    UNICODE_SPACE = 4,   /* property White_Space */
    UNICODE_MARK = 8,    /* category M */
    UNICODE_UPPER = 16,  /* categories Lu and Lt */
    UNICODE_LOWER = 32,  /* category Ll */
    UNICODE_WORD = 64,   /* \w: alphabetic, marks, decimal digits, connectors, joiners */
    UNICODE_DIGIT = 128, /* category N in the newer version that the Digits splitter follows */
};

extern const uint8_t unicode_index[0x110000 / 128];
extern const uint8_t unicode_blocks[][128];

static inline unsigned unicode_classes(uint32_t scalar) {
    return unicode_blocks[unicode_index[scalar >> 7]][scalar & 127];
}

#endif
