#include "engine/text/bpe.h"

#include <string.h>

#include "engine/base/check.h"
#include "engine/base/mem.h"
#include "engine/text/bpe_private.h"

/* Up to so many symbols the lowest rank is found by looking at all of them; 64 * 64 steps at worst. */
#define SHORT_SYMBOLS 64

#define BPE_MERGES_MAX ((size_t)VOCAB_MAX)

bool bpe_merges_add(struct bpe_merges *merges, const char *left, size_t left_bytes, const char *right,
                    size_t right_bytes) {
    struct bpe_merge merge = {.at = (uint32_t)merges->text.bytes};
    CHECK(merges->text.bytes <= INT32_MAX && merges->count < BPE_MERGES_MAX);
    if (!vocab_letters_to_bytes(left, left_bytes, &merges->text)) return false;
    merge.left_bytes = (uint32_t)merges->text.bytes - merge.at;
    if (!vocab_letters_to_bytes(right, right_bytes, &merges->text)) return false;
    merge.right_bytes = (uint32_t)merges->text.bytes - merge.at - merge.left_bytes;
    if (merges->count == merges->room) {
        merges->room = merges->room ? 2 * merges->room : 1024;
        merges->list = mem_realloc(merges->list, merges->room * sizeof *merges->list);
    }
    merges->list[merges->count++] = merge;
    return merge.left_bytes > 0 && merge.right_bytes > 0;
}

void bpe_merges_deinit(struct bpe_merges *merges) {
    buf_deinit(&merges->text);
    mem_free(merges->list);
    *merges = (struct bpe_merges){0};
}

/* Adding a merge misses the cache at every step, so a few are added at a time and ask for their memory ahead. */
#define BATCH 16

struct batch {
    struct bpe_pair pairs[BATCH];
    int32_t next_id; /* the one after what the last merge made: in most vocabularies ids rise with ranks */
    uint8_t *joined; /* [vocab] 1: a merge so far joins this token */
};

static int resolve(struct bpe *bpe, struct batch *batch, const char *text, struct bpe_merge merge,
                   struct bpe_pair *pair, struct err *err) {
    size_t bytes = merge.left_bytes + merge.right_bytes, next_bytes;
    const char *next = vocab_token(bpe->vocab, batch->next_id, &next_bytes);
    bool is_next = next_bytes == bytes && memcmp(next, text, bytes) == 0 &&
                   (bpe->vocab->flags[batch->next_id] & (VOCAB_ADDED | VOCAB_TEXT)) == 0;
    pair->id = is_next ? batch->next_id : vocab_find(bpe->vocab, text, bytes);
    pair->left = vocab_find(bpe->vocab, text, merge.left_bytes);
    pair->right = vocab_find(bpe->vocab, text + merge.left_bytes, merge.right_bytes);
    batch->next_id = pair->id + 1;
    if (pair->left < 0 || pair->right < 0)
        return err_set(err, ERR_INVALID, "merge %u joins what is no token", pair->rank);
    return pair->id < 0 ? err_set(err, ERR_INVALID, "merge %u makes what is no token", pair->rank) : 0;
}

static void store(struct bpe *bpe, struct batch *batch, const struct bpe_pair *pair) {
    struct bpe_pair *place = bpe_find(bpe, pair->left, pair->right);
    if (place->left >= 0) return;
    *place = *pair;
    bpe->ranks = pair->rank + 1;
    batch->joined[pair->left] = batch->joined[pair->right] = 1;
    if (batch->joined[pair->id]) bpe->rising = false;
}

static int add_batch(struct bpe *bpe, struct batch *batch, const struct bpe_merges *merges, size_t first, size_t count,
                     struct err *err) {
    for (size_t i = 0; i < count; i++) {
        const struct bpe_merge *merge = &merges->list[first + i];
        vocab_prefetch(bpe->vocab, merges->text.data + merge->at, merge->left_bytes);
        vocab_prefetch(bpe->vocab, merges->text.data + merge->at + merge->left_bytes, merge->right_bytes);
    }
    for (size_t i = 0; i < count; i++) {
        const struct bpe_merge *merge = &merges->list[first + i];
        struct bpe_pair *pair = &batch->pairs[i];
        pair->rank = (uint32_t)(first + i);
        int code = resolve(bpe, batch, merges->text.data + merge->at, *merge, pair, err);
        if (code != 0) return code;
        __builtin_prefetch(&bpe->pairs[bpe_slot(bpe, pair->left, pair->right)], 1);
    }
    for (size_t i = 0; i < count; i++) store(bpe, batch, &batch->pairs[i]);
    return 0;
}

int bpe_init(struct bpe *bpe, const struct vocab *vocab, const struct bpe_merges *merges, struct err *err) {
    *bpe = (struct bpe){.vocab = vocab, .rising = true};
    uint32_t slots = 64;
    while (slots < merges->count * 2) slots *= 2;
    bpe->mask = slots - 1;
    bpe->pairs = mem_alloc(slots * sizeof *bpe->pairs);
    memset(bpe->pairs, 0xff, slots * sizeof *bpe->pairs);
    bpe->whole = mem_zalloc((size_t)vocab->count + 1, 1);
    for (int i = 0; i < 256; i++) bpe->byte_ids[i] = vocab_find(vocab, &(char){(char)i}, 1);
    struct batch batch = {.next_id = -1, .joined = mem_zalloc((size_t)vocab->count + 1, 1)};
    int code = 0;
    for (size_t first = 0; code == 0 && first < merges->count; first += BATCH) {
        size_t left = merges->count - first;
        code = add_batch(bpe, &batch, merges, first, left < BATCH ? left : BATCH, err);
    }
    mem_free(batch.joined);
    return code;
}

void bpe_deinit(struct bpe *bpe) {
    mem_free(bpe->pairs);
    mem_free(bpe->whole);
    *bpe = (struct bpe){0};
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
