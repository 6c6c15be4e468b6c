/* stops.h: stop strings, matched on text as it grows. Nothing of a stop string is ever given out, and no more is held
 * back than the longest tail that is a proper prefix of one. One sample's state; the engine thread owns it. */
#ifndef QUIRE_TEXT_STOPS_H
#define QUIRE_TEXT_STOPS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"

struct stop_string {
    const char *text; /* the caller's, must outlive the matcher */
    size_t bytes;     /* 1 .. 256 */
};

struct stops {
    const struct stop_string *strings; /* [count] */
    int32_t count;
    struct buf held; /* text seen and not given out */
};

void stops_init(struct stops *stops, const struct stop_string *strings, int32_t count);
void stops_deinit(struct stops *stops);

/* Takes new text; appends to `out` what can be given out now. Returns the index of the string that matched, or -1. The
 * match that ends first counts, so the answer does not depend on how the text was cut; of several that end there the
 * longest, of equals the first listed. After a match `out` has everything before it, and with `keep` the match too; the
 * rest is dropped. */
int32_t stops_push(struct stops *stops, const char *text, size_t bytes, bool keep, struct buf *out);

/* The end came without a match: gives out what was held. */
void stops_flush(struct stops *stops, struct buf *out);

#endif
