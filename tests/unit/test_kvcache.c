/* test_kvcache.c: plain cases of the page pool, the tables and the prefix index. The simulator does the rest. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <cmocka.h>

#include "engine/base/mem.h"
#include "kvcache/kvcache.h"

#define PAGE 4

static struct kvcache *cache_open(int32_t pages_total, int32_t groups) {
    struct kvcache_options o = {.page_size = PAGE, .group_count = groups, .prefix_caching = true, .hash_key = {1, 2}};
    struct kvcache *cache = NULL;
    struct err err;
    for (int32_t g = 0; g < groups; g++) o.pages_total[g] = pages_total + g;
    assert_int_equal(kvcache_open(&o, &cache, &err), 0);
    return cache;
}

static struct kv_table *table_open(struct kvcache *cache, int32_t capacity) {
    struct kv_table *table = mem_alloc(sizeof *table + kv_table_bytes(cache, capacity));
    kv_table_init(table, capacity, table + 1);
    return table;
}

static void expect_pages(struct kvcache *cache, int32_t free, int32_t cached, int32_t held) {
    struct kv_stats s;
    kvcache_stats(cache, 0, &s);
    assert_int_equal(s.pages_free, free);
    assert_int_equal(s.pages_cached, cached);
    assert_int_equal(s.pages_held, held);
    assert_int_equal(s.pages_total, free + cached + held);
}

static void expect_sound(struct kvcache *cache, const struct kv_table *const *tables, int32_t count) {
    struct err err = {0};
    if (kvcache_audit(cache, tables, count, &err) != 0) fail_msg("%s", err.text);
}

static const int32_t ids_a[16] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16};

static struct kv_source source_of(const int32_t *ids, int32_t count, uint64_t salt) {
    return (struct kv_source){.prompt = ids, .prompt_count = count, .salt = {salt, 0}};
}

static void refuses_bad_options(void **state) {
    struct kvcache_options o = {.page_size = 0, .group_count = 1, .pages_total = {8}};
    struct kvcache *cache;
    struct err err;
    (void)state;
    assert_int_equal(kvcache_open(&o, &cache, &err), ERR_INVALID);
    o.page_size = 16, o.pages_total[0] = 1;
    assert_int_equal(kvcache_open(&o, &cache, &err), ERR_INVALID);
    o.pages_total[0] = 8, o.group_count = KV_GROUPS_MAX + 1;
    assert_int_equal(kvcache_open(&o, &cache, &err), ERR_INVALID);
}

static void reserves_all_or_nothing(void **state) {
    struct kvcache *cache = cache_open(6, 1); /* 5 usable */
    struct kv_table *a = table_open(cache, 8), *b = table_open(cache, 8);
    (void)state;
    assert_true(kv_reserve(cache, a, 0, 3, 0));
    for (int32_t i = 0; i < 3; i++) assert_true(kv_table_page(a, 0, i) > 0);
    assert_false(kv_reserve(cache, b, 0, 3, 0));
    expect_pages(cache, 2, 0, 3);
    assert_false(kv_reserve(cache, b, 0, 2, 1)); /* one must stay */
    assert_true(kv_reserve(cache, b, 0, 2, 0));
    expect_pages(cache, 0, 0, 5);
    expect_sound(cache, (const struct kv_table *const[]){a, b}, 2);
    kv_release(cache, a, 0);
    assert_true(kv_reserve(cache, b, 2, 5, 0)); /* grows */
    expect_pages(cache, 0, 0, 5);
    kv_release(cache, b, 0);
    expect_pages(cache, 5, 0, 0);
    expect_sound(cache, NULL, 0);
    mem_free(a), mem_free(b), kvcache_close(cache);
}

static void shares_published_pages(void **state) {
    struct kvcache *cache = cache_open(9, 1);
    struct kv_table *a = table_open(cache, 4), *b = table_open(cache, 4);
    struct kv_source source = source_of(ids_a, 16, 0), other = source_of(ids_a, 16, 7);
    (void)state;
    assert_true(kv_reserve(cache, a, 0, 4, 0));
    assert_int_equal(kv_match(cache, b, &source, 4), 0); /* not yet published */
    assert_int_equal(kv_publish(cache, a, &source, 3, 0), INT32_MAX);
    assert_int_equal(kv_match(cache, b, &other, 4), 0); /* another salt */
    b->key_count = 0;                                   /* the keys of that salt */
    assert_int_equal(kv_match(cache, b, &source, 4), 3);
    assert_true(kv_reserve(cache, b, 3, 4, 0));
    for (int32_t i = 0; i < 3; i++) {
        assert_int_equal(kv_table_page(a, 0, i), kv_table_page(b, 0, i));
        assert_int_equal(kv_page_refs(cache, 0, kv_table_page(a, 0, i)), 2);
    }
    assert_int_not_equal(kv_table_page(a, 0, 3), kv_table_page(b, 0, 3));
    expect_pages(cache, 3, 0, 5);
    expect_sound(cache, (const struct kv_table *const[]){a, b}, 2);
    kv_release(cache, a, 0);
    expect_pages(cache, 4, 0, 4);
    kv_release(cache, b, 0);
    expect_pages(cache, 5, 3, 0);
    expect_sound(cache, NULL, 0);
    mem_free(a), mem_free(b), kvcache_close(cache);
}

static void compares_tokens_not_only_keys(void **state) {
    struct kvcache *cache = cache_open(9, 1);
    struct kv_table *a = table_open(cache, 4), *b = table_open(cache, 4);
    int32_t ids_b[16];
    struct kv_source source = source_of(ids_a, 16, 0), liar = source_of(ids_b, 16, 0);
    (void)state;
    memcpy(ids_b, ids_a, sizeof ids_b);
    ids_b[5] = 99;
    assert_true(kv_reserve(cache, a, 0, 4, 0));
    kv_publish(cache, a, &source, 4, 0);
    assert_int_equal(kv_match(cache, b, &liar, 4), 1);
    memcpy(b->keys, a->keys, 4 * sizeof *b->keys); /* a collision of all keys */
    b->key_count = 4;
    assert_int_equal(kv_match(cache, b, &liar, 4), 1);
    mem_free(a), mem_free(b), kvcache_close(cache);
}

static void evicts_children_first_least_recent_first(void **state) {
    struct kvcache *cache = cache_open(7, 1); /* 6 usable */
    struct kv_table *a = table_open(cache, 8), *b = table_open(cache, 8), *c = table_open(cache, 8);
    const int32_t ids_b[8] = {50, 51, 52, 53, 54, 55, 56, 57};
    struct kv_source sa = source_of(ids_a, 12, 0), sb = source_of(ids_b, 8, 0);
    (void)state;
    assert_true(kv_reserve(cache, a, 0, 3, 0));
    kv_publish(cache, a, &sa, 3, 0);
    kv_release(cache, a, 0);
    assert_true(kv_reserve(cache, b, 0, 2, 0));
    kv_publish(cache, b, &sb, 2, 0);
    kv_release(cache, b, 0);
    expect_pages(cache, 1, 5, 0);
    assert_true(kv_reserve(cache, c, 0, 2, 0)); /* the free one, then the tail of a */
    assert_int_equal(kv_match(cache, a, &sa, 3), 2);
    assert_int_equal(kv_match(cache, b, &sb, 2), 2);
    assert_true(kv_reserve(cache, c, 2, 4, 0)); /* the rest of a */
    assert_int_equal(kv_match(cache, a, &sa, 3), 0);
    assert_int_equal(kv_match(cache, b, &sb, 2), 2);
    expect_sound(cache, (const struct kv_table *const[]){c}, 1);
    mem_free(a), mem_free(b), mem_free(c), kvcache_close(cache);
}

static void a_hit_is_not_counted_as_evictable(void **state) {
    struct kvcache *cache = cache_open(5, 1); /* 4 usable */
    struct kv_table *a = table_open(cache, 8);
    struct kv_source source = source_of(ids_a, 16, 0);
    (void)state;
    assert_true(kv_reserve(cache, a, 0, 3, 0));
    kv_publish(cache, a, &source, 3, 0);
    kv_release(cache, a, 0);
    assert_int_equal(kv_match(cache, a, &source, 3), 3);
    assert_false(kv_reserve(cache, a, 3, 5, 0)); /* 1 free and 3 cached, but the 3 are what it takes */
    expect_pages(cache, 1, 3, 0);
    assert_true(kv_reserve(cache, a, 3, 4, 0));
    expect_pages(cache, 0, 0, 4);
    expect_sound(cache, (const struct kv_table *const[]){a}, 1);
    mem_free(a), kvcache_close(cache);
}

static void pages_come_back_after_their_last_step(void **state) {
    struct kvcache *cache = cache_open(5, 1);
    struct kv_table *a = table_open(cache, 8), *b = table_open(cache, 8);
    (void)state;
    assert_true(kv_reserve(cache, a, 0, 3, 0));
    kv_release(cache, a, 7);
    expect_pages(cache, 1, 0, 3);
    assert_int_equal(kv_pending(cache), 3);
    kv_complete(cache, 6);
    assert_false(kv_reserve(cache, b, 0, 2, 0));
    kv_complete(cache, 7);
    assert_int_equal(kv_pending(cache), 0);
    assert_true(kv_reserve(cache, b, 0, 4, 0));
    mem_free(a), mem_free(b), kvcache_close(cache);
}

static void a_shared_page_waits_for_the_last_reader(void **state) {
    struct kvcache *cache = cache_open(5, 1);
    struct kv_table *a = table_open(cache, 8), *b = table_open(cache, 8);
    (void)state;
    assert_true(kv_reserve(cache, a, 0, 2, 0));
    assert_true(kv_fork(cache, a, b, 2, 3, 0));
    expect_sound(cache, (const struct kv_table *const[]){a, b}, 2);
    kv_release(cache, a, 9);      /* still read by step 9 */
    kv_release(cache, b, 0);      /* its last holder goes, idle since long */
    expect_pages(cache, 2, 0, 2); /* its own page is free at once */
    kv_complete(cache, 8);
    assert_int_equal(kv_available(cache), 2);
    kv_complete(cache, 9);
    expect_pages(cache, 4, 0, 0);
    mem_free(a), mem_free(b), kvcache_close(cache);
}

static void equal_pages_become_one(void **state) {
    struct kvcache *cache = cache_open(9, 1);
    struct kv_table *a = table_open(cache, 4), *b = table_open(cache, 4);
    struct kv_source source = source_of(ids_a, 16, 0);
    (void)state;
    assert_true(kv_reserve(cache, a, 0, 3, 0)); /* both computed the same prompt at the same time */
    assert_true(kv_reserve(cache, b, 0, 3, 0));
    assert_int_equal(kv_publish(cache, a, &source, 2, 0), INT32_MAX);
    assert_int_equal(kv_publish(cache, b, &source, 3, 3), 0); /* from page 0 on it maps a's */
    assert_int_equal(kv_table_page(a, 0, 1), kv_table_page(b, 0, 1));
    expect_sound(cache, (const struct kv_table *const[]){a, b}, 2);
    expect_pages(cache, 2, 0, 6);
    kv_complete(cache, 3);
    expect_pages(cache, 4, 0, 4);
    assert_int_equal(kv_publish(cache, a, &source, 3, 3), 2);
    expect_sound(cache, (const struct kv_table *const[]){a, b}, 2);
    kv_release(cache, a, 3);
    kv_release(cache, b, 3);
    expect_pages(cache, 5, 3, 0);
    expect_sound(cache, NULL, 0);
    mem_free(a), mem_free(b), kvcache_close(cache);
}

static void forgets_the_index(void **state) {
    struct kvcache *cache = cache_open(9, 1);
    struct kv_table *a = table_open(cache, 4), *b = table_open(cache, 4);
    struct kv_source source = source_of(ids_a, 16, 0);
    (void)state;
    assert_true(kv_reserve(cache, a, 0, 3, 0));
    kv_publish(cache, a, &source, 2, 0);
    kv_forget(cache);
    assert_int_equal(kv_match(cache, b, &source, 2), 0);
    assert_int_equal(kv_publish(cache, a, &source, 3, 0), INT32_MAX); /* older than the index */
    assert_int_equal(kv_match(cache, b, &source, 3), 0);
    expect_sound(cache, (const struct kv_table *const[]){a}, 1);
    kv_release(cache, a, 0);
    expect_pages(cache, 8, 0, 0);
    mem_free(a), mem_free(b), kvcache_close(cache);
}

static void groups_move_together(void **state) {
    struct kvcache *cache = cache_open(4, 3); /* 3, 4 and 5 usable */
    struct kv_table *a = table_open(cache, 8), *b = table_open(cache, 8);
    struct kv_source source = source_of(ids_a, 16, 0);
    struct kv_stats last;
    (void)state;
    assert_int_equal(kv_available(cache), 3);
    assert_true(kv_reserve(cache, a, 0, 2, 0));
    assert_false(kv_reserve(cache, b, 0, 2, 0)); /* the first group has one left: nobody takes any */
    kvcache_stats(cache, 2, &last);
    assert_int_equal(last.pages_held, 2);
    kv_publish(cache, a, &source, 2, 0);
    assert_int_equal(kv_match(cache, b, &source, 3), 2);
    assert_true(kv_reserve(cache, b, 2, 3, 0));
    expect_sound(cache, (const struct kv_table *const[]){a, b}, 2);
    kv_release(cache, a, 0);
    kv_release(cache, b, 0);
    expect_sound(cache, NULL, 0);
    mem_free(a), mem_free(b), kvcache_close(cache);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(refuses_bad_options),
        cmocka_unit_test(reserves_all_or_nothing),
        cmocka_unit_test(shares_published_pages),
        cmocka_unit_test(compares_tokens_not_only_keys),
        cmocka_unit_test(evicts_children_first_least_recent_first),
        cmocka_unit_test(a_hit_is_not_counted_as_evictable),
        cmocka_unit_test(pages_come_back_after_their_last_step),
        cmocka_unit_test(a_shared_page_waits_for_the_last_reader),
        cmocka_unit_test(equal_pages_become_one),
        cmocka_unit_test(forgets_the_index),
        cmocka_unit_test(groups_move_together),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
