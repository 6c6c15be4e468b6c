/* pool.c: pages of one group in their four places, and the moves between them. */
#include "engine/base/check.h"
#include "kvcache/private.h"

void list_push(struct kv_pool *pool, struct page_list *list, int32_t page) {
    struct kv_page *p = &pool->pages[page];
    p->prev = list->last;
    p->next = 0;
    if (list->last)
        pool->pages[list->last].next = page;
    else
        list->first = page;
    list->last = page;
    list->count++;
}

void list_remove(struct kv_pool *pool, struct page_list *list, int32_t page) {
    struct kv_page *p = &pool->pages[page];
    if (p->prev)
        pool->pages[p->prev].next = p->next;
    else
        list->first = p->next;
    if (p->next)
        pool->pages[p->next].prev = p->prev;
    else
        list->last = p->prev;
    p->prev = p->next = 0;
    list->count--;
}

/* Nobody holds the page and no step touches it: cached if the index knows it, else free. */
static void page_settle(struct kv_pool *pool, int32_t page) {
    struct kv_page *p = &pool->pages[page];
    p->place = p->indexed ? PAGE_CACHED : PAGE_FREE;
    list_push(pool, p->indexed ? &pool->cached : &pool->free, page);
}

/* The last freed is the first reused: it is warm, and memory that was never needed stays untouched. */
int32_t page_alloc(struct kv_pool *pool) {
    int32_t page = pool->free.last;
    if (page) {
        list_remove(pool, &pool->free, page);
    } else {
        page = pool->cached.first;
        CHECK(page);
        CHECK_MSG(pool->pages[page].children == 0, "page %d evicted before its children", page);
        list_remove(pool, &pool->cached, page);
        index_remove(pool, page);
        pool->evictions++;
    }
    struct kv_page *p = &pool->pages[page];
    CHECK(p->refs == 0 && !p->indexed);
    p->refs = 1;
    p->place = PAGE_HELD;
    p->fence = 0;
    return page;
}

void page_take(struct kv_pool *pool, int32_t page) {
    struct kv_page *p = &pool->pages[page];
    if (p->refs++ > 0) return;
    CHECK(p->indexed && p->place != PAGE_FREE);
    list_remove(pool, p->place == PAGE_CACHED ? &pool->cached : &pool->limbo, page);
    p->place = PAGE_HELD;
}

/* Pages leave limbo in the order they came, so children stay ahead of their parents; hence nothing overtakes limbo. */
void page_drop(struct kv_pool *pool, int32_t page, uint64_t until_step, uint64_t completed) {
    struct kv_page *p = &pool->pages[page];
    CHECK(page > 0 && p->refs > 0);
    if (until_step > p->fence) p->fence = until_step;
    if (--p->refs > 0) return;
    if (p->fence > completed || pool->limbo.count > 0) {
        p->place = PAGE_LIMBO;
        list_push(pool, &pool->limbo, page);
    } else {
        page_settle(pool, page);
    }
}

void pool_complete(struct kv_pool *pool, uint64_t step) {
    while (pool->limbo.first && pool->pages[pool->limbo.first].fence <= step) {
        int32_t page = pool->limbo.first;
        list_remove(pool, &pool->limbo, page);
        page_settle(pool, page);
    }
}
