#include "engine/text/stops.h"

#include <string.h>

void stops_init(struct stops *stops, const struct stop_string *strings, int32_t count) {
    stops->strings = strings;
    stops->count = count;
    buf_init(&stops->held);
}

void stops_deinit(struct stops *stops) {
    buf_deinit(&stops->held);
}

/* The longest string that ends at `end`; -1: none. The first listed of equal strings. */
static int32_t match_at(const struct stops *stops, const char *text, size_t end) {
    int32_t best = -1;
    for (int32_t i = 0; i < stops->count; i++) {
        const struct stop_string *stop = &stops->strings[i];
        if (stop->bytes == 0 || stop->bytes > end || stop->text[stop->bytes - 1] != text[end - 1]) continue;
        if (best >= 0 && stops->strings[best].bytes >= stop->bytes) continue;
        if (memcmp(text + end - stop->bytes, stop->text, stop->bytes) == 0) best = i;
    }
    return best;
}

/* Bytes of the longest tail that is a proper prefix of a string. */
static size_t tail_bytes(const struct stops *stops, const char *text, size_t bytes) {
    size_t longest = 0;
    for (int32_t i = 0; i < stops->count; i++) {
        const struct stop_string *stop = &stops->strings[i];
        if (stop->bytes == 0) continue;
        size_t length = stop->bytes - 1 < bytes ? stop->bytes - 1 : bytes;
        for (; length > longest; length--) {
            const char *tail = text + bytes - length;
            if (tail[0] == stop->text[0] && memcmp(tail, stop->text, length) == 0) longest = length;
        }
    }
    return longest;
}

int32_t stops_push(struct stops *stops, const char *text, size_t bytes, bool keep, struct buf *out) {
    if (bytes == 0) return -1;
    if (stops->count == 0) {
        buf_append(out, text, bytes);
        return -1;
    }
    struct buf *held = &stops->held;
    size_t seen = held->bytes; /* no string ends in what was held */
    buf_append(held, text, bytes);
    for (size_t end = seen + 1; end <= held->bytes; end++) {
        int32_t match = match_at(stops, held->data, end);
        if (match < 0) continue;
        size_t given = keep ? end : end - stops->strings[match].bytes;
        if (given > 0) buf_append(out, held->data, given);
        buf_clear(held);
        return match;
    }
    size_t given = held->bytes - tail_bytes(stops, held->data, held->bytes);
    if (given == 0) return -1;
    buf_append(out, held->data, given);
    memmove(held->data, held->data + given, held->bytes - given + 1); /* with the NUL */
    held->bytes -= given;
    return -1;
}

void stops_flush(struct stops *stops, struct buf *out) {
    if (stops->held.bytes > 0) buf_append(out, stops->held.data, stops->held.bytes);
    buf_clear(&stops->held);
}
