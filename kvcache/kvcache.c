/* kvcache.c: opening, and the operations on block tables over all groups. */
#include "kvcache/kvcache.h"

#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/check.h"
#include "engine/base/mem.h"
#include "kvcache/private.h"

/* ---- life -------------------------------------------------------------------------------------------------------- */

static int options_check(const struct kvcache_options *o, struct err *err) {
    if (o->page_size < 1 || o->page_size > KV_PAGE_SIZE_MAX)
        return err_set(err, ERR_INVALID, "a page must hold 1 to %d tokens, not %d", KV_PAGE_SIZE_MAX, o->page_size);
    if (o->group_count < 1 || o->group_count > KV_GROUPS_MAX)
        return err_set(err, ERR_INVALID, "there must be 1 to %d page groups, not %d", KV_GROUPS_MAX, o->group_count);
    for (int32_t g = 0; g < o->group_count; g++)
        if (o->pages_total[g] < 2 || o->pages_total[g] > KV_PAGES_MAX)
            return err_set(err, ERR_INVALID, "a page pool must have 2 to %d pages, not %d", KV_PAGES_MAX,
                           o->pages_total[g]);
    return 0;
}

static void pool_init(struct kv_pool *pool, int32_t pages_total, int32_t page_size, bool prefix_caching) {
    size_t token_count = 0;
    CHECK(size_mul((size_t)pages_total, (size_t)page_size, &token_count));
    *pool = (struct kv_pool){.pages_total = pages_total};
    while (pool->bucket_mask + 1 < (uint64_t)pages_total) pool->bucket_mask = pool->bucket_mask * 2 + 1;
    pool->pages = mem_zalloc((size_t)pages_total, sizeof *pool->pages);
    pool->tokens = mem_zalloc(prefix_caching ? token_count : 1, sizeof *pool->tokens);
    pool->buckets = mem_zalloc(pool->bucket_mask + 1, sizeof *pool->buckets);
    for (int32_t page = pages_total - 1; page > 0; page--) list_push(pool, &pool->free, page);
}

int kvcache_open(const struct kvcache_options *options, struct kvcache **out, struct err *err) {
    int rc = options_check(options, err);
    if (rc) return rc;
    struct kvcache *cache = mem_zalloc(1, sizeof *cache);
    cache->page_size = options->page_size;
    cache->group_count = options->group_count;
    cache->prefix_caching = options->prefix_caching;
    cache->hash_key = options->hash_key;
    cache->gather = mem_zalloc((size_t)options->page_size, sizeof *cache->gather);
    for (int32_t g = 0; g < options->group_count; g++)
        pool_init(&cache->pools[g], options->pages_total[g], options->page_size, options->prefix_caching);
    cache->pools[0].on_key = options->on_key;
    cache->pools[0].user = options->user;
    *out = cache;
    return 0;
}

void kvcache_close(struct kvcache *cache) {
    if (!cache) return;
    for (int32_t g = 0; g < cache->group_count; g++) {
        mem_free(cache->pools[g].pages);
        mem_free(cache->pools[g].tokens);
        mem_free(cache->pools[g].buckets);
    }
    mem_free(cache->gather);
    mem_free(cache);
}

void kvcache_stats(const struct kvcache *cache, int32_t group, struct kv_stats *out) {
    const struct kv_pool *pool = &cache->pools[group];
    out->pages_total = pool->pages_total - 1;
    out->pages_free = pool->free.count;
    out->pages_cached = pool->cached.count;
    out->pages_held = out->pages_total - out->pages_free - out->pages_cached;
    out->evictions = pool->evictions;
}

int32_t kv_available(const struct kvcache *cache) {
    int32_t least = INT32_MAX;
    for (int32_t g = 0; g < cache->group_count; g++) {
        int32_t have = cache->pools[g].free.count + cache->pools[g].cached.count;
        if (have < least) least = have;
    }
    return least;
}

int32_t kv_pending(const struct kvcache *cache) {
    int32_t most = 0;
    for (int32_t g = 0; g < cache->group_count; g++)
        if (cache->pools[g].limbo.count > most) most = cache->pools[g].limbo.count;
    return most;
}

/* ---- tables ------------------------------------------------------------------------------------------------------ */

size_t kv_table_bytes(const struct kvcache *cache, int32_t capacity) {
    size_t pages, keys, bytes;
    CHECK(size_mul((size_t)capacity, (size_t)cache->group_count * sizeof(int32_t), &pages) &&
          size_align(pages, 8, &pages) && size_mul((size_t)capacity, sizeof(struct hash128), &keys) &&
          size_add(pages, keys, &bytes));
    return bytes;
}

void kv_table_init(struct kv_table *table, int32_t capacity, void *memory) {
    size_t keys = (size_t)capacity * sizeof(struct hash128);
    *table = (struct kv_table){.capacity = capacity};
    CHECK(((uintptr_t)memory & 7) == 0);
    table->keys = memory;
    table->pages = (int32_t *)(void *)((char *)memory + keys);
}

/* The tokens of page `index`: in place when it lies in the prompt, else gathered. */
static const int32_t *source_page(struct kvcache *cache, const struct kv_source *source, int32_t index) {
    int32_t start = index * cache->page_size;
    if (start + cache->page_size <= source->prompt_count) return source->prompt + start;
    if (start >= source->prompt_count) return source->output + (start - source->prompt_count);
    int32_t head = source->prompt_count - start;
    memcpy(cache->gather, source->prompt + start, (size_t)head * sizeof *cache->gather);
    memcpy(cache->gather + head, source->output, (size_t)(cache->page_size - head) * sizeof *cache->gather);
    return cache->gather;
}

static void table_extend_keys(struct kvcache *cache, struct kv_table *table, const struct kv_source *source,
                              int32_t pages) {
    CHECK(pages <= table->capacity);
    for (int32_t i = table->key_count; i < pages; i++) {
        struct hash128 parent = i > 0 ? table->keys[i - 1] : (struct hash128){0};
        table->keys[i] = page_key(cache, parent, source_page(cache, source, i), source->salt);
    }
    if (pages > table->key_count) table->key_count = pages;
}

static int32_t *table_row(const struct kv_table *table, int32_t group) {
    return table->pages + (int64_t)group * table->capacity;
}

int32_t kv_match(struct kvcache *cache, struct kv_table *table, const struct kv_source *source, int32_t pages_max) {
    CHECK(table->count == 0);
    if (!cache->prefix_caching || pages_max <= 0) return 0;
    table_extend_keys(cache, table, source, pages_max);
    int32_t hits = pages_max;
    for (int32_t g = 0; g < cache->group_count; g++) {
        int32_t *row = table_row(table, g);
        int32_t parent = 0, i = 0;
        for (; i < hits; i++, parent = row[i - 1]) {
            row[i] = index_find(&cache->pools[g], cache->page_size, table->keys[i], parent,
                                source_page(cache, source, i), source->salt);
            if (!row[i]) break;
        }
        hits = i;
    }
    return hits;
}

static bool pool_has(const struct kv_pool *pool, const int32_t *row, int32_t hits, int32_t wanted, int32_t spare) {
    int64_t have = pool->free.count + pool->cached.count;
    if (have < (int64_t)wanted + spare) return false;
    for (int32_t i = 0; i < hits; i++)
        if (pool->pages[row[i]].place == PAGE_CACHED) have--; /* taking a hit uses up one that could be evicted */
    return have >= (int64_t)wanted + spare;
}

bool kv_reserve(struct kvcache *cache, struct kv_table *table, int32_t hits, int32_t pages, int32_t spare) {
    CHECK(pages <= table->capacity && hits <= pages && (table->count == 0 || table->count == hits));
    int32_t take = table->count ? 0 : hits;
    bool empty = table->count == 0;
    for (int32_t g = 0; g < cache->group_count; g++)
        if (!pool_has(&cache->pools[g], table_row(table, g), take, pages - hits, spare)) return false;
    for (int32_t g = 0; g < cache->group_count; g++) {
        int32_t *row = table_row(table, g);
        for (int32_t i = 0; i < take; i++) page_take(&cache->pools[g], row[i]);
        for (int32_t i = hits; i < pages; i++) row[i] = page_alloc(&cache->pools[g]);
    }
    if (empty) {
        table->published = take;
        table->epoch = cache->epoch;
    }
    table->count = pages;
    return true;
}

bool kv_fork(struct kvcache *cache, const struct kv_table *donor, struct kv_table *table, int32_t shared, int32_t pages,
             int32_t spare) {
    CHECK(table->count == 0 && shared <= donor->count && shared <= pages && pages <= table->capacity);
    if (kv_available(cache) < pages - shared + spare) return false;
    for (int32_t g = 0; g < cache->group_count; g++) {
        int32_t *row = table_row(table, g);
        const int32_t *from = table_row(donor, g);
        for (int32_t i = 0; i < shared; i++) page_take(&cache->pools[g], row[i] = from[i]);
        for (int32_t i = shared; i < pages; i++) row[i] = page_alloc(&cache->pools[g]);
    }
    int32_t known = donor->key_count < shared ? donor->key_count : shared;
    if (known > table->key_count) {
        memcpy(table->keys, donor->keys, (size_t)known * sizeof *table->keys);
        table->key_count = known;
    }
    table->count = pages;
    table->epoch = donor->epoch;
    return true;
}

int32_t kv_publish(struct kvcache *cache, struct kv_table *table, const struct kv_source *source, int32_t pages,
                   uint64_t until_step) {
    int32_t changed = INT32_MAX;
    if (!cache->prefix_caching || table->epoch != cache->epoch || pages <= table->published) return changed;
    CHECK(pages <= table->count);
    table_extend_keys(cache, table, source, pages);
    for (int32_t g = 0; g < cache->group_count; g++) {
        struct kv_pool *pool = &cache->pools[g];
        int32_t *row = table_row(table, g);
        int32_t i = table->published;
        for (; i < pages; i++) {
            int32_t own = row[i], parent = i > 0 ? row[i - 1] : 0;
            if (pool->pages[own].indexed) continue;
            const int32_t *tokens = source_page(cache, source, i);
            int32_t twin = index_find(pool, cache->page_size, table->keys[i], parent, tokens, source->salt);
            if (!twin) {
                index_insert(pool, cache->page_size, own, table->keys[i], parent, tokens, source->salt);
                continue;
            }
            page_take(pool, twin);
            row[i] = twin;
            page_drop(pool, own, until_step, cache->completed);
            if (i < changed) changed = i;
        }
    }
    table->published = pages;
    return changed;
}

void kv_release(struct kvcache *cache, struct kv_table *table, uint64_t until_step) {
    for (int32_t g = 0; g < cache->group_count; g++) {
        const int32_t *row = table_row(table, g);
        for (int32_t i = table->count - 1; i >= 0; i--)
            page_drop(&cache->pools[g], row[i], until_step, cache->completed);
    }
    table->count = 0;
    table->published = 0;
}

void kv_complete(struct kvcache *cache, uint64_t step) {
    CHECK(step >= cache->completed);
    cache->completed = step;
    for (int32_t g = 0; g < cache->group_count; g++) pool_complete(&cache->pools[g], step);
}

void kv_forget(struct kvcache *cache) {
    cache->epoch++;
    for (int32_t g = 0; g < cache->group_count; g++) index_clear(&cache->pools[g]);
}

int32_t kv_page_refs(const struct kvcache *cache, int32_t group, int32_t page) {
    return cache->pools[group].pages[page].refs;
}

bool kv_page_indexed(const struct kvcache *cache, int32_t group, int32_t page) {
    return cache->pools[group].pages[page].indexed;
}
