/* prefix.c: the index of full pages by content. A key is a keyed hash chained over (parent key, salt, tokens); on a hit
 * the parent page, the tokens and, for a first page, the salt are compared as well, so that even a collision shares
 * nothing. */
#include <string.h>

#include "engine/base/check.h"
#include "engine/base/prefix_key.h"
#include "kvcache/private.h"

struct hash128 page_key(const struct kvcache *cache, struct hash128 parent, const int32_t *tokens,
                        struct hash128 salt) {
    return prefix_key(cache->hash_key, parent, salt, tokens, cache->page_size);
}

static void key_tell(const struct kv_pool *pool, struct hash128 key, enum kv_key_change change) {
    if (pool->on_key) pool->on_key(pool->user, key, (int)change);
}

static inline bool hash_same(struct hash128 a, struct hash128 b) {
    return a.lo == b.lo && a.hi == b.hi;
}

int32_t index_find(const struct kv_pool *pool, int32_t page_size, struct hash128 key, int32_t parent,
                   const int32_t *tokens, struct hash128 salt) {
    for (int32_t page = pool->buckets[key.lo & pool->bucket_mask]; page; page = pool->pages[page].chain) {
        const struct kv_page *p = &pool->pages[page];
        if (!hash_same(p->key, key) || p->parent != parent) continue;
        if (!parent && !hash_same(p->salt, salt)) continue;
        const int32_t *have = pool->tokens + (int64_t)page * page_size;
        if (memcmp(have, tokens, (size_t)page_size * sizeof *tokens) == 0) return page;
    }
    return 0;
}

void index_insert(struct kv_pool *pool, int32_t page_size, int32_t page, struct hash128 key, int32_t parent,
                  const int32_t *tokens, struct hash128 salt) {
    struct kv_page *p = &pool->pages[page];
    int32_t *bucket = &pool->buckets[key.lo & pool->bucket_mask];
    CHECK(p->refs > 0 && !p->indexed && (!parent || pool->pages[parent].indexed));
    memcpy(pool->tokens + (int64_t)page * page_size, tokens, (size_t)page_size * sizeof *tokens);
    p->key = key;
    p->salt = salt;
    p->parent = parent;
    p->children = 0;
    p->indexed = true;
    p->chain = *bucket;
    *bucket = page;
    if (parent) pool->pages[parent].children++;
    key_tell(pool, key, KV_KEY_CAME);
}

void index_remove(struct kv_pool *pool, int32_t page) {
    struct kv_page *p = &pool->pages[page];
    int32_t *at = &pool->buckets[p->key.lo & pool->bucket_mask];
    while (*at != page) {
        CHECK(*at);
        at = &pool->pages[*at].chain;
    }
    *at = p->chain;
    p->chain = 0;
    p->indexed = false;
    if (p->parent) pool->pages[p->parent].children--;
    p->parent = 0;
    key_tell(pool, p->key, KV_KEY_LEFT);
}

void index_clear(struct kv_pool *pool) {
    memset(pool->buckets, 0, (size_t)(pool->bucket_mask + 1) * sizeof *pool->buckets);
    for (int32_t page = 1; page < pool->pages_total; page++) {
        struct kv_page *p = &pool->pages[page];
        p->indexed = false;
        p->chain = p->parent = p->children = 0;
    }
    while (pool->cached.first) {
        int32_t page = pool->cached.first;
        list_remove(pool, &pool->cached, page);
        pool->pages[page].place = PAGE_FREE;
        list_push(pool, &pool->free, page);
    }
    key_tell(pool, (struct hash128){0}, KV_KEY_ALL_LEFT);
}
