#include "engine/text/bpe.h"

#include <string.h>

#include "engine/base/check.h"
#include "engine/base/mem.h"
#include "engine/text/bpe_private.h"

/* Up to so many symbols the lowest rank is found by looking at all of them; 64 * 64 steps at worst. */
#define SHORT_SYMBOLS 64

void bpe_init(struct bpe *bpe, const struct vocab *vocab, size_t merges) {
    CHECK(merges <= VOCAB_MAX * (size_t)4);
    *bpe = (struct bpe){.vocab = vocab};
    uint32_t slots = 64;
    while (slots < merges * 2) slots *= 2;
    bpe->mask = slots - 1;
    bpe->pairs = mem_alloc(slots * sizeof *bpe->pairs);
    memset(bpe->pairs, 0xff, slots * sizeof *bpe->pairs);
    bpe->whole = mem_zalloc((size_t)vocab->count + 1, 1);
    for (int i = 0; i < 256; i++) bpe->byte_ids[i] = vocab_find(vocab, &(char){(char)i}, 1);
}

void bpe_deinit(struct bpe *bpe) {
    mem_free(bpe->pairs);
    mem_free(bpe->whole);
    *bpe = (struct bpe){0};
}

int bpe_add(struct bpe *bpe, uint32_t rank, const char *left, size_t left_bytes, const char *right, size_t right_bytes,
            struct err *err) {
    char joined[256];
    size_t bytes = left_bytes + right_bytes;
    char *whole = bytes <= sizeof joined ? joined : mem_alloc(bytes);
    if (left_bytes) memcpy(whole, left, left_bytes);
    if (right_bytes) memcpy(whole + left_bytes, right, right_bytes);
    int32_t left_id = vocab_find(bpe->vocab, left, left_bytes), right_id = vocab_find(bpe->vocab, right, right_bytes);
    int32_t id = vocab_find(bpe->vocab, whole, bytes);
    if (whole != joined) mem_free(whole);
    if (left_id < 0 || right_id < 0) return err_set(err, ERR_INVALID, "merge %u joins what is no token", rank);
    if (id < 0) return err_set(err, ERR_INVALID, "merge %u makes what is no token", rank);
    struct bpe_pair *pair = bpe_find(bpe, left_id, right_id);
    if (pair->left < 0) *pair = (struct bpe_pair){.left = left_id, .right = right_id, .id = id, .rank = rank};
    return 0;
}

void bpe_finish(struct bpe *bpe) {
    const int32_t vocab = bpe->vocab->count;
    uint32_t *made = mem_zalloc((size_t)vocab + 1, sizeof *made); /* 1 + the highest rank that makes the token */
    bpe->rising = true;
    for (uint32_t at = 0; at <= bpe->mask; at++) {
        const struct bpe_pair *pair = &bpe->pairs[at];
        if (pair->left < 0) continue;
        if (pair->rank >= made[pair->id]) made[pair->id] = pair->rank + 1;
        if (pair->rank >= bpe->ranks) bpe->ranks = pair->rank + 1;
    }
    for (uint32_t at = 0; at <= bpe->mask; at++) {
        const struct bpe_pair *pair = &bpe->pairs[at];
        if (pair->left >= 0 && (made[pair->left] > pair->rank || made[pair->right] > pair->rank)) bpe->rising = false;
    }
    mem_free(made);
}

/* What lies at [i], [i + 1] when they merge. */
struct short_pair {
    uint32_t rank;
    int32_t id;
};

static inline struct short_pair pair_look(const struct bpe *bpe, int32_t left, int32_t right) {
    const struct bpe_pair *pair = bpe_find(bpe, left, right);
    return (struct short_pair){.rank = pair->rank, .id = pair->id};
}

/* Merges `ids` in place; returns how many are left. */
static size_t merge_short(const struct bpe *bpe, int32_t *ids, size_t count) {
    struct short_pair pairs[SHORT_SYMBOLS];
    for (size_t i = 0; i + 1 < count; i++) pairs[i] = pair_look(bpe, ids[i], ids[i + 1]);
    while (count > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < count; i++) best = pairs[i].rank < pairs[best].rank ? i : best;
        if (pairs[best].rank == BPE_NO_RANK) break;
        ids[best] = pairs[best].id;
        memmove(ids + best + 1, ids + best + 2, (count - best - 2) * sizeof *ids);
        if (best + 2 < count) memmove(pairs + best, pairs + best + 1, (count - best - 2) * sizeof *pairs);
        count--;
        if (best > 0) pairs[best - 1] = pair_look(bpe, ids[best - 1], ids[best]);
        if (best + 1 < count) pairs[best] = pair_look(bpe, ids[best], ids[best + 1]);
    }
    return count;
}

static size_t merge_bytes(const struct bpe *bpe, const char *piece, size_t bytes, int32_t *ids) {
    size_t count = 0;
    for (size_t i = 0; i < bytes; i++) {
        ids[count] = bpe->byte_ids[(unsigned char)piece[i]];
        count += ids[count] >= 0;
    }
    return merge_short(bpe, ids, count);
}

void bpe_encode(const struct bpe *bpe, const char *piece, size_t bytes, struct id_sink *sink) {
    int32_t id = bytes <= (size_t)bpe->vocab->token_bytes_max ? vocab_find(bpe->vocab, piece, bytes) : -1;
    /* Nearly every word of a text is a token that its own merges make; whether they do is found out once. Threads that
     * find it out at the same time write the same answer. */
    uint8_t whole = id < 0 ? 2 : bpe->ignore_merges ? 1 : __atomic_load_n(&bpe->whole[id], __ATOMIC_RELAXED);
    if (whole == 1) {
        sink_push(sink, id);
        return;
    }
    if (bytes > SHORT_SYMBOLS) {
        bpe_merge_long(bpe, piece, bytes, sink);
        return;
    }
    int32_t ids[SHORT_SYMBOLS + 1];
    size_t count = merge_bytes(bpe, piece, bytes, ids);
    if (id >= 0 && whole == 0) __atomic_store_n(&bpe->whole[id], count == 1 && ids[0] == id ? 1 : 2, __ATOMIC_RELAXED);
    for (size_t i = 0; i < count; i++) sink_push(sink, ids[i]);
}
