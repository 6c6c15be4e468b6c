/* audit.c: walks every page, list, chain and table and checks K1 to K6. */
#include <string.h>

#include "engine/base/mem.h"
#include "kvcache/private.h"

struct seen {
    int32_t refs;     /* tables that map the page */
    int32_t lists;    /* lists it is in */
    int32_t children; /* indexed pages that name it as parent */
    int32_t chains;   /* bucket chains it is in */
};

static int list_audit(const struct kv_pool *pool, const struct page_list *list, enum page_place place,
                      struct seen *seen, struct err *err) {
    int32_t count = 0, before = 0;
    for (int32_t page = list->first; page; before = page, page = pool->pages[page].next) {
        if (page < 0 || page >= pool->pages_total || ++count > list->count)
            return err_set(err, ERR_FATAL, "K2: the list of place %d is longer than its count %d", place, list->count);
        const struct kv_page *p = &pool->pages[page];
        if (p->prev != before || p->place != place || p->refs != 0)
            return err_set(err, ERR_FATAL, "K2: page %d with %d references is in the list of place %d", page, p->refs,
                           place);
        seen[page].lists++;
    }
    if (count != list->count || list->last != before)
        return err_set(err, ERR_FATAL, "K2: the list of place %d has %d pages, its count says %d", place, count,
                       list->count);
    return 0;
}

static int index_audit(const struct kv_pool *pool, struct seen *seen, struct err *err) {
    for (uint64_t b = 0; b <= pool->bucket_mask; b++) {
        int32_t steps = 0;
        for (int32_t page = pool->buckets[b]; page; page = pool->pages[page].chain) {
            if (page < 0 || page >= pool->pages_total || ++steps > pool->pages_total)
                return err_set(err, ERR_FATAL, "K4: bucket chain without end");
            const struct kv_page *p = &pool->pages[page];
            if (!p->indexed || (p->key.lo & pool->bucket_mask) != b)
                return err_set(err, ERR_FATAL, "K4: page %d is in a bucket that is not its own", page);
            seen[page].chains++;
            if (p->parent) seen[p->parent].children++;
            if (p->parent && !pool->pages[p->parent].indexed)
                return err_set(err, ERR_FATAL, "K5: parent %d of page %d is not in the index", p->parent, page);
            if (p->parent && pool->pages[p->parent].refs < p->refs)
                return err_set(err, ERR_FATAL, "K5: page %d has %d references, its parent %d has %d", page, p->refs,
                               p->parent, pool->pages[p->parent].refs);
        }
    }
    return 0;
}

/* Children before parents, from the end that is evicted first. */
static int order_audit(const struct kv_pool *pool, int32_t *left, struct err *err) {
    for (int32_t page = 1; page < pool->pages_total; page++) left[page] = pool->pages[page].children;
    for (int32_t page = pool->cached.first; page; page = pool->pages[page].next) {
        if (left[page] != 0)
            return err_set(err, ERR_FATAL, "K5: cached page %d would be evicted before its children", page);
        if (pool->pages[page].parent) left[pool->pages[page].parent]--;
    }
    return 0;
}

static int table_audit(const struct kvcache *cache, const struct kv_table *table, int32_t group, struct seen *seen,
                       struct err *err) {
    const struct kv_pool *pool = &cache->pools[group];
    for (int32_t i = 0; i < table->count; i++) {
        int32_t page = kv_table_page(table, group, i);
        if (page <= 0 || page >= pool->pages_total)
            return err_set(err, ERR_FATAL, "K3: a table maps page %d of %d", page, pool->pages_total);
        seen[page].refs++;
        const struct kv_page *p = &pool->pages[page];
        if (p->place != PAGE_HELD) return err_set(err, ERR_FATAL, "K3: a table maps page %d, which is not held", page);
        if (p->indexed && p->parent != (i > 0 ? kv_table_page(table, group, i - 1) : 0))
            return err_set(err, ERR_FATAL, "K5: a table maps page %d without its parent %d", page, p->parent);
    }
    return 0;
}

static int pages_audit(const struct kvcache *cache, const struct kv_pool *pool, const struct seen *seen,
                       struct err *err) {
    for (int32_t page = 1; page < pool->pages_total; page++) {
        const struct kv_page *p = &pool->pages[page];
        if (seen[page].lists != (p->place != PAGE_HELD))
            return err_set(err, ERR_FATAL, "K2: page %d of place %d is in %d lists", page, p->place, seen[page].lists);
        if (seen[page].refs != p->refs || (p->place == PAGE_HELD) != (p->refs > 0))
            return err_set(err, ERR_FATAL, "K3: page %d has %d references, %d tables map it", page, p->refs,
                           seen[page].refs);
        if (seen[page].chains != p->indexed)
            return err_set(err, ERR_FATAL, "K4: page %d is in the index %d times", page, seen[page].chains);
        if (seen[page].children != p->children)
            return err_set(err, ERR_FATAL, "K5: page %d counts %d children, there are %d", page, p->children,
                           seen[page].children);
        if ((p->place == PAGE_FREE && p->indexed) || (p->place == PAGE_CACHED && !p->indexed))
            return err_set(err, ERR_FATAL, "K4: page %d of place %d is %sin the index", page, p->place,
                           p->indexed ? "" : "not ");
        if ((p->place == PAGE_FREE || p->place == PAGE_CACHED) && p->fence > cache->completed)
            return err_set(err, ERR_FATAL, "K6: page %d came back before step %llu completed", page,
                           (unsigned long long)p->fence);
    }
    return 0;
}

static int pool_audit(const struct kvcache *cache, int32_t group, const struct kv_table *const *tables,
                      int32_t table_count, struct seen *seen, int32_t *left, struct err *err) {
    const struct kv_pool *pool = &cache->pools[group];
    int rc;
    memset(seen, 0, (size_t)pool->pages_total * sizeof *seen);
    if ((rc = list_audit(pool, &pool->free, PAGE_FREE, seen, err))) return rc;
    if ((rc = list_audit(pool, &pool->cached, PAGE_CACHED, seen, err))) return rc;
    if ((rc = list_audit(pool, &pool->limbo, PAGE_LIMBO, seen, err))) return rc;
    for (int32_t t = 0; t < table_count; t++)
        if ((rc = table_audit(cache, tables[t], group, seen, err))) return rc;
    if ((rc = index_audit(pool, seen, err))) return rc;
    if ((rc = pages_audit(cache, pool, seen, err))) return rc;
    int32_t held = pool->limbo.count;
    for (int32_t page = 1; page < pool->pages_total; page++) held += pool->pages[page].place == PAGE_HELD;
    if (pool->free.count + pool->cached.count + held != pool->pages_total - 1)
        return err_set(err, ERR_FATAL, "K1: %d free + %d cached + %d held are not %d pages", pool->free.count,
                       pool->cached.count, held, pool->pages_total - 1);
    return order_audit(pool, left, err);
}

int kvcache_audit(const struct kvcache *cache, const struct kv_table *const *tables, int32_t table_count,
                  struct err *err) {
    int rc = 0;
    for (int32_t g = 0; g < cache->group_count && rc == 0; g++) {
        size_t pages = (size_t)cache->pools[g].pages_total;
        struct seen *seen = mem_alloc(pages * sizeof *seen);
        int32_t *left = mem_alloc(pages * sizeof *left);
        rc = pool_audit(cache, g, tables, table_count, seen, left, err);
        mem_free(seen);
        mem_free(left);
    }
    return rc;
}
