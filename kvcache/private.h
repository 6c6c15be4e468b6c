/* private.h: the inside of kvcache, shared by its own files only. */
#ifndef QUIRE_KVCACHE_PRIVATE_H
#define QUIRE_KVCACHE_PRIVATE_H

#include "kvcache/kvcache.h"

enum page_place { PAGE_FREE, PAGE_HELD, PAGE_LIMBO, PAGE_CACHED };

struct kv_page {
    int32_t refs;
    int32_t prev, next;       /* in the list of its place; 0 ends it */
    int32_t parent, children; /* in the index; parent 0: first page of a sequence */
    int32_t chain;            /* next page in the same bucket */
    uint64_t fence;           /* last step that may touch it */
    struct hash128 key, salt; /* of an indexed page */
    enum page_place place;
    bool indexed;
};

struct page_list {
    int32_t first, last, count;
};

struct kv_pool {
    struct kv_page *pages; /* [pages_total] */
    int32_t *tokens;       /* [pages_total, page_size] of indexed pages */
    int32_t *buckets;      /* [bucket_mask + 1] first page of each chain */
    uint64_t bucket_mask;
    int32_t pages_total; /* the dummy counted in */
    struct page_list free, cached, limbo;
    uint64_t evictions;
    kv_key_fn *on_key; /* NULL: not the first group, or nobody wants to know */
    void *user;
};

struct kvcache {
    int32_t page_size, group_count;
    bool prefix_caching;
    struct hash_key hash_key;
    uint32_t epoch;     /* counts kv_forget */
    uint64_t completed; /* last complete step */
    int32_t *gather;    /* [page_size] tokens of a page that spans prompt and output */
    struct kv_pool pools[KV_GROUPS_MAX];
};

/* pool.c */
void list_push(struct kv_pool *pool, struct page_list *list, int32_t page);
void list_remove(struct kv_pool *pool, struct page_list *list, int32_t page);
int32_t page_alloc(struct kv_pool *pool);
void page_take(struct kv_pool *pool, int32_t page);
void page_drop(struct kv_pool *pool, int32_t page, uint64_t until_step, uint64_t completed);
void pool_complete(struct kv_pool *pool, uint64_t step);

/* prefix.c */
struct hash128 page_key(const struct kvcache *cache, struct hash128 parent, const int32_t *tokens, struct hash128 salt);
int32_t index_find(const struct kv_pool *pool, int32_t page_size, struct hash128 key, int32_t parent,
                   const int32_t *tokens, struct hash128 salt);
void index_insert(struct kv_pool *pool, int32_t page_size, int32_t page, struct hash128 key, int32_t parent,
                  const int32_t *tokens, struct hash128 salt);
void index_remove(struct kv_pool *pool, int32_t page);
void index_clear(struct kv_pool *pool);

#endif
