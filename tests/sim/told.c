/* told.c: what a router would know of the prefix index, from what it is told alone, held against the index. */
#include "engine/base/mem.h"
#include "kvcache/private.h"
#include "tests/sim/sim.h"

void told_open(struct sim *sim) {
    sim->told.keys = mem_zalloc((size_t)sim->plan.options.pages_total, sizeof *sim->told.keys);
}

void told_close(struct sim *sim) {
    mem_free(sim->told.keys);
}

static int32_t told_find(const struct sim_keys *told, struct hash128 key) {
    int32_t i = 0;
    while (i < told->count && !hash_equal(told->keys[i], key)) i++;
    return i;
}

/* Called from inside the cache: only takes note of what is wrong. */
void told_change(void *user, struct hash128 key, int change) {
    struct sim *sim = user;
    struct sim_keys *told = &sim->told;
    int32_t at = told_find(told, key);
    sim->coverage->keys_told++;
    switch (change) {
    case KV_KEY_CAME:
        if (at < told->count)
            told->wrong = "a key came that was there";
        else if (at == sim->plan.options.pages_total)
            told->wrong = "more keys came than there are pages";
        else
            told->keys[told->count++] = key;
        break;
    case KV_KEY_LEFT:
        if (at == told->count)
            told->wrong = "a key left that was not there";
        else
            told->keys[at] = told->keys[--told->count];
        break;
    default:
        told->count = 0;
    }
}

static bool index_has(const struct kv_pool *pool, struct hash128 key) {
    int32_t page = pool->buckets[key.lo & pool->bucket_mask];
    while (page && !hash_equal(pool->pages[page].key, key)) page = pool->pages[page].chain;
    return page != 0;
}

/* No key is told twice, so as many, and each of them in the index, is the same set. */
void told_check(struct sim *sim) {
    const struct kv_pool *pool = &sim->sched->cache->pools[0];
    const struct sim_keys *told = &sim->told;
    int32_t indexed = 0;
    SIM_CHECK(sim, !told->wrong, "told of the index: %s", told->wrong);
    for (int32_t page = 1; page < pool->pages_total; page++) indexed += pool->pages[page].indexed;
    SIM_CHECK(sim, indexed == told->count, "%d pages are in the index, it was told of %d", indexed, told->count);
    for (int32_t i = 0; i < told->count; i++)
        SIM_CHECK(sim, index_has(pool, told->keys[i]), "a key that was told of is not in the index");
}
