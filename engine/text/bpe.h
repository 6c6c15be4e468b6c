/* bpe.h: byte pair encoding of one piece of text: the pair of lowest rank first, the leftmost of equals. The merge
 * table is filled once; afterwards any thread encodes at once. Short pieces use no heap; long ones take O(n log n)
 * whatever they are, and O(n) with merges in the order of training. Knows no pieces, no special tokens and no file
 * format. */
#ifndef QUIRE_TEXT_BPE_H
#define QUIRE_TEXT_BPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/base/err.h"
#include "engine/text/vocab.h"

struct bpe_pair {
    int32_t left, right; /* left -1: free */
    int32_t id;          /* what the pair becomes */
    uint32_t rank;
};

struct bpe {
    const struct vocab *vocab;
    int32_t byte_ids[256];  /* the token of a single byte; -1: none, the byte is dropped */
    struct bpe_pair *pairs; /* [mask + 1] */
    uint32_t mask;
    uint32_t ranks;     /* one more than the highest */
    bool rising;        /* every merge comes after all that make its two tokens, as training leaves them */
    uint8_t *whole;     /* [vocab] 0: not known yet, 1: merges make the token of its own bytes, 2: they do not */
    bool ignore_merges; /* a piece that is a token is that token */
};

/* Where ids go. Once `count` passes `capacity` nothing more is written and encoding stops early. */
struct id_sink {
    int32_t *ids; /* [capacity] */
    size_t capacity, count;
};

static inline void sink_push(struct id_sink *sink, int32_t id) {
    if (sink->count < sink->capacity) sink->ids[sink->count] = id;
    sink->count++;
}

/* Merges as a file lists them, lowest rank first, before they are looked up. */
struct bpe_merge {
    uint32_t at, left_bytes, right_bytes; /* left, then right, in bpe_merges.text */
};

struct bpe_merges {
    struct buf text;
    struct bpe_merge *list; /* [count] */
    size_t count, room;
};

/* Adds one, given in byte-level letters. False when it is not, or half of it is empty. */
bool bpe_merges_add(struct bpe_merges *merges, const char *left, size_t left_bytes, const char *right,
                    size_t right_bytes);
void bpe_merges_deinit(struct bpe_merges *merges);

/* The vocabulary is the caller's, complete, and outlives this. ERR_INVALID when a merge joins or makes what is no
 * token. A pair that stands twice keeps its lower rank. bpe_deinit in any case. */
int bpe_init(struct bpe *bpe, const struct vocab *vocab, const struct bpe_merges *merges, struct err *err);
void bpe_deinit(struct bpe *bpe);

void bpe_encode(const struct bpe *bpe, const char *piece, size_t bytes, struct id_sink *sink);

#endif
