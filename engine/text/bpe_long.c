/* bpe_long.c: merging pieces of any length. A piece is a list of symbols. Which pair is next comes from a heap, or, for
 * very long pieces and merges in the order of training, from one list of positions for each rank: then no merge makes a
 * pair of a lower rank than its own, so the ranks are gone through once, from the lowest up. */
#include <string.h>

#include "engine/base/mem.h"
#include "engine/text/bpe_private.h"

#define NO_SYMBOL UINT32_MAX

/* From so many symbols on the lists by rank (4 bytes for each rank of the table, cleared) cost less than the heap. */
#define LISTS_SYMBOLS 4096

struct symbol {
    int32_t id;          /* -1: merged into the one before */
    uint32_t prev, next; /* NO_SYMBOL at the ends */
    uint32_t rank;       /* of the pair with next; BPE_NO_RANK: they do not merge */
};

struct merge_state {
    const struct bpe *bpe;
    struct symbol *symbols; /* [count] */
    uint32_t count;
    /* The heap: [heap_count] rank << 32 | position. Each merge puts two and takes one, so 2 * count is enough. A pair
     * that changed since it was put there is known by its rank and dropped when it comes up. */
    uint64_t *heap;
    size_t heap_count;
    /* The lists: the first position of each rank, and at each position its neighbours in the list of its rank. */
    uint32_t *heads; /* [ranks] or NO_SYMBOL */
    struct link {
        uint32_t before, after;
    } *links; /* [count] */
};

static void symbols_fill(struct merge_state *state, const char *piece, size_t bytes) {
    state->symbols = mem_alloc(bytes * sizeof *state->symbols);
    for (size_t i = 0; i < bytes; i++) {
        int32_t id = state->bpe->byte_ids[(unsigned char)piece[i]];
        if (id < 0) continue;
        uint32_t at = state->count++;
        state->symbols[at] = (struct symbol){.id = id, .prev = at == 0 ? NO_SYMBOL : at - 1, .next = at + 1};
    }
    if (state->count > 0) state->symbols[state->count - 1].next = NO_SYMBOL;
}

/* Looks the pair (at, next) up anew; returns whether it merges. */
static bool symbol_rank(struct merge_state *state, uint32_t at) {
    struct symbol *symbol = &state->symbols[at];
    symbol->rank = BPE_NO_RANK;
    if (symbol->next == NO_SYMBOL) return false;
    symbol->rank = bpe_find(state->bpe, symbol->id, state->symbols[symbol->next].id)->rank;
    return symbol->rank != BPE_NO_RANK;
}

/* Makes one symbol of `at` and the one after it. */
static void symbols_join(struct merge_state *state, uint32_t at, int32_t id) {
    struct symbol *symbol = &state->symbols[at], *gone = &state->symbols[symbol->next];
    symbol->id = id;
    symbol->next = gone->next;
    gone->id = -1;
    gone->rank = BPE_NO_RANK;
    if (symbol->next != NO_SYMBOL) state->symbols[symbol->next].prev = at;
}

/* ---- the heap -------------------------------------------------------------- */

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

static void heap_push(struct merge_state *state, uint32_t at) {
    uint64_t value = (uint64_t)state->symbols[at].rank << 32 | at;
    size_t place = state->heap_count++;
    for (; place > 0 && state->heap[(place - 1) / 4] > value; place = (place - 1) / 4)
        state->heap[place] = state->heap[(place - 1) / 4];
    state->heap[place] = value;
}

static uint64_t heap_pop(struct merge_state *state) {
    uint64_t value = state->heap[0];
    state->heap[0] = state->heap[--state->heap_count];
    if (state->heap_count > 0) heap_down(state->heap, state->heap_count, 0);
    return value;
}

static void merge_by_heap(struct merge_state *state) {
    state->heap = mem_alloc(2 * (size_t)state->count * sizeof *state->heap);
    for (uint32_t at = 0; at < state->count; at++)
        if (symbol_rank(state, at)) state->heap[state->heap_count++] = (uint64_t)state->symbols[at].rank << 32 | at;
    for (size_t at = state->heap_count / 4 + 1; at-- > 0;)
        if (at < state->heap_count) heap_down(state->heap, state->heap_count, at);
    while (state->heap_count > 0) {
        uint64_t top = heap_pop(state);
        uint32_t at = (uint32_t)top;
        struct symbol *symbol = &state->symbols[at];
        if (symbol->rank != top >> 32) continue;
        symbols_join(state, at, bpe_find(state->bpe, symbol->id, state->symbols[symbol->next].id)->id);
        if (symbol_rank(state, at)) heap_push(state, at);
        if (symbol->prev != NO_SYMBOL && symbol_rank(state, symbol->prev)) heap_push(state, symbol->prev);
    }
    mem_free(state->heap);
}

/* ---- the lists ------------------------------------------------------------- */

static void list_add(struct merge_state *state, uint32_t at) {
    if (!symbol_rank(state, at)) return;
    uint32_t *head = &state->heads[state->symbols[at].rank];
    state->links[at] = (struct link){.before = NO_SYMBOL, .after = *head};
    if (*head != NO_SYMBOL) state->links[*head].before = at;
    *head = at;
}

static void list_remove(struct merge_state *state, uint32_t at) {
    uint32_t rank = state->symbols[at].rank;
    if (rank == BPE_NO_RANK) return;
    struct link link = state->links[at];
    if (link.before == NO_SYMBOL)
        state->heads[rank] = link.after;
    else
        state->links[link.before].after = link.after;
    if (link.after != NO_SYMBOL) state->links[link.after].before = link.before;
}

static void list_merge(struct merge_state *state, uint32_t at, int32_t id) {
    struct symbol *symbol = &state->symbols[at];
    list_remove(state, at);
    list_remove(state, symbol->next);
    if (symbol->prev != NO_SYMBOL) list_remove(state, symbol->prev);
    symbols_join(state, at, id);
    list_add(state, at);
    if (symbol->prev != NO_SYMBOL) list_add(state, symbol->prev);
}

/* All pairs of one rank. They overlap only when a token merges with itself: then a run of it merges from its left. */
static void merge_rank(struct merge_state *state, uint32_t rank) {
    const struct symbol *symbols = state->symbols;
    uint32_t at = state->heads[rank];
    if (at == NO_SYMBOL) return;
    const int32_t left = symbols[at].id, right = symbols[symbols[at].next].id;
    const int32_t id = bpe_find(state->bpe, left, right)->id;
    for (; (at = state->heads[rank]) != NO_SYMBOL;) {
        if (left != right) {
            list_merge(state, at, id);
            continue;
        }
        while (symbols[at].prev != NO_SYMBOL && symbols[symbols[at].prev].id == left) at = symbols[at].prev;
        for (; at != NO_SYMBOL && symbols[at].id == left && symbols[at].rank == rank; at = symbols[at].next)
            list_merge(state, at, id);
    }
}

static void merge_by_lists(struct merge_state *state) {
    state->heads = mem_alloc(state->bpe->ranks * sizeof *state->heads);
    state->links = mem_alloc(state->count * sizeof *state->links);
    memset(state->heads, 0xff, state->bpe->ranks * sizeof *state->heads);
    for (uint32_t at = state->count; at-- > 0;) list_add(state, at);
    for (uint32_t rank = 0; rank < state->bpe->ranks; rank++) merge_rank(state, rank);
    mem_free(state->heads);
    mem_free(state->links);
}

void bpe_merge_long(const struct bpe *bpe, const char *piece, size_t bytes, struct id_sink *sink) {
    struct merge_state state = {.bpe = bpe};
    symbols_fill(&state, piece, bytes);
    if (bpe->rising && state.count >= LISTS_SYMBOLS)
        merge_by_lists(&state);
    else if (state.count > 1)
        merge_by_heap(&state);
    for (uint32_t at = state.count > 0 ? 0 : NO_SYMBOL; at != NO_SYMBOL; at = state.symbols[at].next)
        sink_push(sink, state.symbols[at].id);
    mem_free(state.symbols);
}
