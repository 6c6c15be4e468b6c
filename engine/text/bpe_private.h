/* bpe_private.h: the merge table's look-up, for the two files that merge. */
#ifndef QUIRE_TEXT_BPE_PRIVATE_H
#define QUIRE_TEXT_BPE_PRIVATE_H

#include "engine/text/bpe.h"

#define BPE_NO_RANK UINT32_MAX

static inline uint32_t bpe_slot(const struct bpe *bpe, int32_t left, int32_t right) {
    uint64_t hash = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
    return (uint32_t)(hash * 0xd6e8feb86659fd93u >> 32) & bpe->mask;
}

/* The pair's entry, or the free one where it would be (its rank is BPE_NO_RANK). */
static inline struct bpe_pair *bpe_find(const struct bpe *bpe, int32_t left, int32_t right) {
    for (uint32_t at = bpe_slot(bpe, left, right);; at = (at + 1) & bpe->mask) {
        struct bpe_pair *pair = &bpe->pairs[at];
        if ((pair->left == left && pair->right == right) || pair->left < 0) return pair;
    }
}

/* Encodes a piece of any length in O(n log n), or O(n) where the table allows. */
void bpe_merge_long(const struct bpe *bpe, const char *piece, size_t bytes, struct id_sink *sink);

#endif
