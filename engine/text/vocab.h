/* vocab.h: ids and the bytes that they stand for. Filled once, in order of ids, then immutable and used by any thread.
 * Knows no merges and no file format. */
#ifndef QUIRE_TEXT_VOCAB_H
#define QUIRE_TEXT_VOCAB_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"

#define VOCAB_MAX             (1 << 22) /* ids; the largest vocabularies in use have 2^18 */
#define VOCAB_TOKEN_BYTES_MAX (1 << 16) /* of one token */

enum vocab_flags {
    VOCAB_SPECIAL = 1, /* control: found only where special tokens are parsed, left out where they are skipped */
    VOCAB_ADDED = 2,   /* matched as whole text in front of everything else; never made by merges */
    VOCAB_HOLE = 4,    /* an id that no token has */
    VOCAB_TEXT = 8,    /* not written in byte-level letters: stands for its own text, and no merge makes it */
};

/* Tokens of up to 8 bytes, which is most of them, are found without leaving the slot. */
struct vocab_slot {
    uint64_t head; /* the first 8 bytes, zeros behind a shorter token */
    uint32_t tag;  /* of the hash, with min(length, 255) in its low byte */
    int32_t id;    /* -1: free */
};

struct vocab {
    struct buf text;   /* all tokens, one after the other */
    uint32_t *offsets; /* [count + 1] into text */
    uint8_t *flags;    /* [count] of enum vocab_flags */
    int32_t count, capacity;
    int32_t token_bytes_max;
    struct vocab_slot *slots; /* [mask + 1] tokens that are not special, by their bytes */
    uint32_t mask;
};

void vocab_init(struct vocab *vocab, int32_t capacity); /* room for ids 0 .. capacity-1 */
void vocab_deinit(struct vocab *vocab);

/* The next id stands for these bytes. */
void vocab_add(struct vocab *vocab, const char *bytes, size_t count, uint8_t flags);

/* The same for a token written in GPT-2's letters for bytes. One with any other character stands for itself. */
void vocab_add_letters(struct vocab *vocab, const char *letters, size_t bytes, uint8_t flags);

/* After the last token: vocab_find works from here on. It never finds special tokens, and added ones only where no
 * other token has the same bytes. */
void vocab_index(struct vocab *vocab);

/* Byte-level letters to bytes, appended to `out`. False, with `out` as it was, when a character is no such letter. */
bool vocab_letters_to_bytes(const char *letters, size_t bytes, struct buf *out);

/* The id of these bytes (the first, when several tokens share them) or -1. */
int32_t vocab_find(const struct vocab *vocab, const char *bytes, size_t count);

/* Asks for the memory that vocab_find of these bytes will look at. */
void vocab_prefetch(const struct vocab *vocab, const char *bytes, size_t count);

static inline const char *vocab_token(const struct vocab *vocab, int32_t id, size_t *bytes) {
    if (id < 0 || id >= vocab->count) return *bytes = 0, "";
    *bytes = vocab->offsets[id + 1] - vocab->offsets[id];
    return *bytes ? vocab->text.data + vocab->offsets[id] : "";
}

#endif
