/* kvcache.h: which page holds which tokens. Page numbers only: a free list, reference counts, an index of full pages by
 * content, and the block tables of sequences. Owned by the scheduler, engine thread only; never knows a device, a model
 * or a request. Nothing is allocated after open; a call costs O(1) or O(pages of the table).
 *
 * A page number addresses all layers of one page group (layers of equal KV shape). Every group has its own pool; a
 * table has equally many pages in each. Most models have one group. Page 0 of a group is a dummy that is never given
 * out.
 *
 * Invariants (kvcache_audit):
 *  K1  free + cached + held = total, in each group.
 *  K2  a page is in exactly one place: the free list, the cached list (least recently used first), limbo, or held.
 *  K3  refs(page) = number of tables that map it; free, cached and limbo pages have none.
 *  K4  a page in the index is full, is never written again, and appears under one key.
 *  K5  the parent of an indexed page is indexed; a table that holds an indexed page holds its parent; a page nobody
 *      holds is evicted after all its children.
 *  K6  a page becomes free or cached only after the last step that may read or write it (its fence) is complete.
 *
 * K5 makes every cached page evictable, so that free + cached is what a reservation can have. */
#ifndef QUIRE_KVCACHE_KVCACHE_H
#define QUIRE_KVCACHE_KVCACHE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/err.h"
#include "engine/base/hash.h"

#define KV_GROUPS_MAX    4
#define KV_PAGE_SIZE_MAX 1024
#define KV_PAGES_MAX     (1 << 26)

struct kvcache; /* opaque */

/* A page came into the index of the first group or left it, or all left. Called from inside the call that did it, so it
 * only takes note. */
enum kv_key_change { KV_KEY_LEFT, KV_KEY_CAME, KV_KEY_ALL_LEFT };
typedef void kv_key_fn(void *user, struct hash128 key, int change); /* enum kv_key_change */

struct kvcache_options {
    int32_t page_size; /* tokens a page, the same in every group */
    int32_t group_count;
    int32_t pages_total[KV_GROUPS_MAX]; /* [group_count] the dummy counted in: pages_total - 1 can be given out */
    bool prefix_caching;
    struct hash_key hash_key; /* of the index: nobody outside can choose collisions */
    kv_key_fn *on_key;        /* NULL: nobody wants to know */
    void *user;
};

/* Where a sequence has its pages. The memory is the caller's (kv_table_bytes), the content the cache's. */
struct kv_table {
    int32_t *pages;       /* [group_count, capacity]; page i of group g at g * capacity + i */
    struct hash128 *keys; /* [capacity] chained keys of the full pages, the first key_count computed */
    int32_t capacity;
    int32_t count; /* pages held, in each group */
    int32_t key_count;
    int32_t published; /* pages known to be in the index: where kv_publish goes on */
    uint32_t epoch;    /* of the index when the table was filled; a table older than the index publishes no more */
};

/* The tokens of a sequence: a prompt, then output. Only ever extended while a table lives. */
struct kv_source {
    const int32_t *prompt; /* [prompt_count] */
    const int32_t *output; /* the tokens behind the prompt */
    int32_t prompt_count;
    struct hash128 salt; /* pages are shared under equal salts only */
};

struct kv_stats {
    int32_t pages_total, pages_free, pages_cached, pages_held; /* free + cached + held = total; the dummy not counted */
    uint64_t evictions;
};

int kvcache_open(const struct kvcache_options *options, struct kvcache **out, struct err *err);
void kvcache_close(struct kvcache *cache);
void kvcache_stats(const struct kvcache *cache, int32_t group, struct kv_stats *out);

size_t kv_table_bytes(const struct kvcache *cache, int32_t capacity);
/* Makes an empty table in `memory` (kv_table_bytes, aligned to 8). */
void kv_table_init(struct kv_table *table, int32_t capacity, void *memory);
static inline int32_t kv_table_page(const struct kv_table *table, int32_t group, int32_t index) {
    return table->pages[(int64_t)group * table->capacity + index];
}

/* Pages a reservation can have now: free and cached, the scarcest group. */
int32_t kv_available(const struct kvcache *cache);
/* Pages that nobody holds and whose last step is still under way: they come back when it completes. */
int32_t kv_pending(const struct kvcache *cache);

/* How many leading full pages of the source, at most pages_max, are in the index of every group. Writes their numbers
 * into the empty table without taking them: kv_reserve must follow before anything else, or the answer is void. A
 * caller that needs the last token's logits passes (tokens - 1) / page_size: then the last token is always computed,
 * and a hit never has to write into a shared page. */
int32_t kv_match(struct kvcache *cache, struct kv_table *table, const struct kv_source *source, int32_t pages_max);

/* Makes the table `pages` long: the first `hits` come from kv_match (0 or what it answered; a table that has pages
 * already passes its count), the others are new, evicting cached pages as needed. All or nothing: false changes
 * nothing. At least `spare` pages stay available. */
bool kv_reserve(struct kvcache *cache, struct kv_table *table, int32_t hits, int32_t pages, int32_t spare);

/* As kv_reserve for an empty table, the first `shared` pages being those of `donor`. A donor that is going to publish
 * them has done so (else K5 could break when it takes over an equal page later). */
bool kv_fork(struct kvcache *cache, const struct kv_table *donor, struct kv_table *table, int32_t shared, int32_t pages,
             int32_t spare);

/* Enters the first `pages` pages, full and computed, into the index. Where the index has an equal page already, the
 * table takes that one over and its own goes back after `until_step`. Returns the first index whose page number
 * changed, INT32_MAX for none. */
int32_t kv_publish(struct kvcache *cache, struct kv_table *table, const struct kv_source *source, int32_t pages,
                   uint64_t until_step);

/* Gives all pages back, the last first (so that a page's children are evicted before it); usable by others once step
 * `until_step` is complete. */
void kv_release(struct kvcache *cache, struct kv_table *table, uint64_t until_step);

/* Step `step` and all before it are complete. */
void kv_complete(struct kvcache *cache, uint64_t step);

/* Forgets the index: cached pages become free, held ones stay private for good. */
void kv_forget(struct kvcache *cache);

/* References to a page, and whether it is in the index: for the audit of the owner of the tables. */
int32_t kv_page_refs(const struct kvcache *cache, int32_t group, int32_t page);
bool kv_page_indexed(const struct kvcache *cache, int32_t group, int32_t page);

/* Checks K1 to K6 against all tables there are; ERR_FATAL names the broken one. O(pages). Not on the step path: it
 * allocates. */
int kvcache_audit(const struct kvcache *cache, const struct kv_table *const *tables, int32_t table_count,
                  struct err *err);

#endif
