/* added.h: tokens that are matched as whole text before anything else: control tokens (`special`) and those that
 * somebody added to a vocabulary. Filled, sorted once, then immutable and used by any thread. Knows no merges. */
#ifndef QUIRE_TEXT_ADDED_H
#define QUIRE_TEXT_ADDED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/text/jinja.h"

#define ADDED_TOKEN_BYTES_MAX 1024

struct added_token {
    uint32_t text; /* offset into added_set.text */
    uint32_t bytes;
    int32_t id;
    bool special;
    bool lstrip, rstrip; /* takes the white space on its left, right with it */
    bool single_word;    /* only where no word goes on to its left or right */
};

struct added_set {
    struct buf text;
    struct added_token *tokens; /* [count] sorted by text once added_sort has run */
    int32_t count, capacity;
    int32_t first[257]; /* tokens that begin with byte b are first[b] .. first[b + 1] - 1 */
};

void added_init(struct added_set *set);
void added_deinit(struct added_set *set);

/* Takes the token's text (1 .. ADDED_TOKEN_BYTES_MAX bytes). Of two with the same text the first counts. */
void added_add(struct added_set *set, struct added_token token, const char *text, size_t bytes);
void added_sort(struct added_set *set);

struct added_search {
    const struct added_set *set;
    const char *text; /* [bytes] */
    size_t bytes;
    bool parse_special;
    /* [untrusted_count] or NULL: byte ranges, ascending, that no special token may touch: what users wrote */
    const struct jinja_span *untrusted;
    size_t untrusted_count;
    size_t at;      /* the search goes on here */
    size_t span_at; /* the first untrusted span that ends beyond `at` */
    size_t given;   /* text up to here belongs to what was found before */
};

/* The next token: its id, and in [*start, *end) its text with the white space it takes along; -1: no more. Leftmost
 * first, the longest of those, as Hugging Face finds them. *start may be below search->given by white space that two
 * tokens claim; the first has it. */
int32_t added_next(struct added_search *search, size_t *start, size_t *end);

#endif
