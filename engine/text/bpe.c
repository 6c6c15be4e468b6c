#include "engine/text/bpe.h"

#include <string.h>

#include "engine/base/check.h"
#include "engine/base/mem.h"

#define RANK_NONE UINT32_MAX

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

static inline uint32_t pair_slot(const struct bpe *bpe, int32_t left, int32_t right) {
    uint64_t hash = ((uint64_t)(uint32_t)left << 32 | (uint32_t)right) * 0x9e3779b97f4a7c15u;
    hash ^= hash >> 32;
    return (uint32_t)(hash * 0xd6e8feb86659fd93u >> 32) & bpe->mask;
}

/* The pair's entry, or the free one where it would be (its rank is RANK_NONE). */
static inline struct bpe_pair *pair_find(const struct bpe *bpe, int32_t left, int32_t right) {
    for (uint32_t at = pair_slot(bpe, left, right);; at = (at + 1) & bpe->mask) {
        struct bpe_pair *pair = &bpe->pairs[at];
        if ((pair->left == left && pair->right == right) || pair->left < 0) return pair;
    }
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
    struct bpe_pair *pair = pair_find(bpe, left_id, right_id);
    if (pair->left < 0) *pair = (struct bpe_pair){.left = left_id, .right = right_id, .id = id, .rank = rank};
    return 0;
}

/* What lies at [i], [i + 1] when they merge. */
struct short_pair {
    uint32_t rank;
    int32_t id;
};

static inline struct short_pair pair_look(const struct bpe *bpe, int32_t left, int32_t right) {
    const struct bpe_pair *pair = pair_find(bpe, left, right);
    return (struct short_pair){.rank = pair->rank, .id = pair->id};
}

/* Merges `ids` in place; returns how many are left. */
static size_t merge_short(const struct bpe *bpe, int32_t *ids, size_t count) {
    struct short_pair pairs[SHORT_SYMBOLS];
    for (size_t i = 0; i + 1 < count; i++) pairs[i] = pair_look(bpe, ids[i], ids[i + 1]);
    while (count > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < count; i++) best = pairs[i].rank < pairs[best].rank ? i : best;
        if (pairs[best].rank == RANK_NONE) break;
        ids[best] = pairs[best].id;
        memmove(ids + best + 1, ids + best + 2, (count - best - 2) * sizeof *ids);
        if (best + 2 < count) memmove(pairs + best, pairs + best + 1, (count - best - 2) * sizeof *pairs);
        count--;
        if (best > 0) pairs[best - 1] = pair_look(bpe, ids[best - 1], ids[best]);
        if (best + 1 < count) pairs[best] = pair_look(bpe, ids[best], ids[best + 1]);
    }
    return count;
}

/* A long piece: a list of symbols and a heap of pairs, ordered by (rank, position). A pair that changed since it was put
 * on the heap is known by its rank and dropped when it comes up. */
struct symbol {
    int32_t id;        /* -1: merged into the one before */
    uint32_t prev, next;
    uint32_t rank;     /* of the pair with next; RANK_NONE: no merge */
};

struct merge_state {
    const struct bpe *bpe;
    struct symbol *symbols; /* [count] */
    uint32_t count;
    uint64_t *heap; /* [heap_count] rank << 32 | position; each merge puts two and takes one, so 2 * count is enough */
    size_t heap_count;
};

static void heap_down(uint64_t *heap, size_t count, size_t at) {
    uint64_t value = heap[at];
    for (;;) {
        size_t child = 4 * at + 1, least = child;
        if (child >= count) break;
        size_t end = child + 4 < count ? child + 4 : count;
        for (size_t i = child + 1; i < end; i++) least = heap[i] < heap[least] ? i : least;
        if (heap[least] >= value) break;
        heap[at] = heap[least];
        at = least;
    }
    heap[at] = value;
}

static void heap_push(struct merge_state *state, uint64_t value) {
    size_t at = state->heap_count++;
    for (; at > 0 && state->heap[(at - 1) / 4] > value; at = (at - 1) / 4) state->heap[at] = state->heap[(at - 1) / 4];
    state->heap[at] = value;
}

static uint64_t heap_pop(struct merge_state *state) {
    uint64_t value = state->heap[0];
    state->heap[0] = state->heap[--state->heap_count];
    if (state->heap_count > 0) heap_down(state->heap, state->heap_count, 0);
    return value;
}

/* Looks the pair (at, next) up anew; returns whether it merges. */
static bool symbol_rank(struct merge_state *state, uint32_t at) {
    struct symbol *symbol = &state->symbols[at];
    symbol->rank = RANK_NONE;
    if (symbol->next == state->count) return false;
    symbol->rank = pair_find(state->bpe, symbol->id, state->symbols[symbol->next].id)->rank;
    return symbol->rank != RANK_NONE;
}

static void merge_at(struct merge_state *state, uint32_t at) {
    struct symbol *symbol = &state->symbols[at], *gone = &state->symbols[symbol->next];
    symbol->id = pair_find(state->bpe, symbol->id, gone->id)->id;
    symbol->next = gone->next;
    gone->id = -1;
    gone->rank = RANK_NONE;
    if (symbol->next < state->count) state->symbols[symbol->next].prev = at;
    if (symbol_rank(state, at)) heap_push(state, (uint64_t)symbol->rank << 32 | at);
    uint32_t prev = symbol->prev;
    if (prev != RANK_NONE && symbol_rank(state, prev))
        heap_push(state, (uint64_t)state->symbols[prev].rank << 32 | prev);
}

static void merge_long(const struct bpe *bpe, const char *piece, size_t bytes, struct id_sink *sink) {
    struct merge_state state = {.bpe = bpe, .symbols = mem_alloc(bytes * sizeof(struct symbol))};
    for (size_t i = 0; i < bytes; i++) {
        int32_t id = bpe->byte_ids[(unsigned char)piece[i]];
        if (id < 0) continue;
        uint32_t at = state.count++;
        state.symbols[at] = (struct symbol){.id = id, .prev = at == 0 ? RANK_NONE : at - 1, .next = at + 1};
    }
    state.heap = mem_alloc(2 * bytes * sizeof *state.heap);
    for (uint32_t at = 0; at < state.count; at++)
        if (symbol_rank(&state, at)) state.heap[state.heap_count++] = (uint64_t)state.symbols[at].rank << 32 | at;
    for (size_t at = state.heap_count / 4 + 1; at-- > 0;)
        if (at < state.heap_count) heap_down(state.heap, state.heap_count, at);
    while (state.heap_count > 0) {
        uint64_t top = heap_pop(&state);
        uint32_t at = (uint32_t)top;
        if (state.symbols[at].rank == top >> 32) merge_at(&state, at);
    }
    for (uint32_t at = 0; at < state.count; at = state.symbols[at].next) sink_push(sink, state.symbols[at].id);
    mem_free(state.heap);
    mem_free(state.symbols);
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
        merge_long(bpe, piece, bytes, sink);
        return;
    }
    int32_t ids[SHORT_SYMBOLS + 1];
    size_t count = merge_bytes(bpe, piece, bytes, ids);
    if (id >= 0 && whole == 0) __atomic_store_n(&bpe->whole[id], count == 1 && ids[0] == id ? 1 : 2, __ATOMIC_RELAXED);
    for (size_t i = 0; i < count; i++) sink_push(sink, ids[i]);
}
