/* jinja_str.h: the strings of a template. Immutable views of bytes, and beside them which bytes came from the input
 * trees (taint). A slice shares its bytes; a concatenation whose left side ends where its builder ends goes on in
 * place, so that `text = text + more` in a loop stays linear. Positions that templates see count code points, as
 * Python's do. One thread. Inside engine/text/jinja*.c only. */
#ifndef QUIRE_TEXT_JINJA_STR_H
#define QUIRE_TEXT_JINJA_STR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "engine/text/jinja_heap.h"

enum jinja_taint {
    JINJA_TRUSTED,
    JINJA_UNTRUSTED,
    JINJA_MIXED, /* `mask` says it byte by byte */
};

struct jinja_str {
    const char *data;    /* [bytes], not NUL-terminated */
    const uint8_t *mask; /* [bytes] enum jinja_taint of each byte; only when JINJA_MIXED */
    size_t bytes;
    struct jinja_builder *builder; /* whose bytes these are, or NULL */
    enum jinja_taint taint;
    bool markup; /* went through `safe` or `escape`: + escapes what it joins to it, as Jinja's Markup does */
};

/* Where strings are put together. */
struct jinja_builder {
    char *data;    /* [capacity] */
    uint8_t *mask; /* [capacity] once JINJA_MIXED */
    size_t bytes, capacity;
    enum jinja_taint taint;
};

static inline struct jinja_str jinja_str_of(const char *data, size_t bytes) {
    return (struct jinja_str){.data = data, .bytes = bytes};
}
static inline struct jinja_str jinja_str_lit(const char *text) {
    return jinja_str_of(text, strlen(text));
}

/* The taint of the byte at `at`. */
static inline enum jinja_taint jinja_str_taint(const struct jinja_str *s, size_t at) {
    return s->taint == JINJA_MIXED ? (enum jinja_taint)s->mask[at] : s->taint;
}

struct jinja_str jinja_str_cut(struct jinja_str s, size_t start, size_t end); /* byte positions */
struct jinja_str jinja_str_concat(struct jinja_heap *heap, struct jinja_str a, struct jinja_str b);
bool jinja_str_equal(struct jinja_str a, struct jinja_str b);
bool jinja_str_is(struct jinja_str a, const char *text);
int jinja_str_compare(struct jinja_str a, struct jinja_str b); /* by code point, which is by byte */

/* First byte position >= from where `needle` begins; -1: none. Empty needles are found at once. */
ptrdiff_t jinja_str_find(struct jinja_heap *heap, struct jinja_str s, struct jinja_str needle, size_t from);

size_t jinja_str_length(struct jinja_heap *heap, struct jinja_str s);                /* in code points */
size_t jinja_str_offset(struct jinja_heap *heap, struct jinja_str s, size_t points); /* of that code point, in bytes */
size_t jinja_str_points(struct jinja_heap *heap, struct jinja_str s, size_t offset); /* the other way round */

/* Bytes of the code point at `at`, and its value (U+FFFD for what is none). */
size_t jinja_str_decode(struct jinja_str s, size_t at, uint32_t *point);
size_t jinja_utf8_encode(uint32_t point, char out[4]);

enum jinja_strip { JINJA_STRIP_LEFT = 1, JINJA_STRIP_RIGHT = 2 };

/* Without the white space (chars NULL) or the code points of `chars` at its ends. */
struct jinja_str jinja_str_strip(struct jinja_heap *heap, struct jinja_str s, const struct jinja_str *chars, int sides);
bool jinja_space(uint32_t point); /* as Python's str.isspace */

enum jinja_case { JINJA_UPPER, JINJA_LOWER, JINJA_CAPITALIZE, JINJA_TITLE, JINJA_TITLE_WORDS, JINJA_SWAP };

/* JINJA_TITLE is str.title (after anything that is no letter), JINJA_TITLE_WORDS the filter's (after white space, - and
 * opening brackets). */
struct jinja_str jinja_str_case(struct jinja_heap *heap, struct jinja_str s, enum jinja_case how);

/* `count` < 0: all. */
struct jinja_str jinja_str_replace(struct jinja_heap *heap, struct jinja_str s, struct jinja_str from,
                                   struct jinja_str to, int64_t count);
struct jinja_str jinja_str_escape(struct jinja_heap *heap, struct jinja_str s); /* & < > ' " for HTML */
struct jinja_str jinja_str_repeat(struct jinja_heap *heap, struct jinja_str s, int64_t times);

void jinja_build(struct jinja_heap *heap, struct jinja_builder *b, struct jinja_str s);
void jinja_build_text(struct jinja_heap *heap, struct jinja_builder *b, const char *text);
void jinja_build_bytes(struct jinja_heap *heap, struct jinja_builder *b, const char *data, size_t bytes,
                       enum jinja_taint taint);
struct jinja_str jinja_build_end(struct jinja_heap *heap, struct jinja_builder *b);

#endif
