/* Which replica gets a request: prefixes that are there or on their way, load, turns, sessions. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include <stdlib.h>

#include "server/route.h"

static struct route *open_with(enum route_policy policy, int32_t replicas) {
    struct route_options options = {.replicas = replicas,
                                    .policy = policy,
                                    .page_size = 16,
                                    .pages_total = 1000,
                                    .balance_tokens = 1000,
                                    .balance_ratio = 1.5};
    struct route *route;
    assert_int_equal(route_open(&options, &route), 0);
    for (int32_t i = 0; i < replicas; i++) route_set_up(route, i, true);
    return route;
}

/* Keys of a prompt: page i of document d. */
static void keys_fill(struct hash128 *keys, int32_t count, uint64_t document) {
    for (int32_t i = 0; i < count; i++)
        keys[i] = (struct hash128){document * 0x9E3779B97F4A7C15u + (uint64_t)i * 0xBF58476D1CE4E5B9u, document};
}

static int32_t choose(struct route *route, const struct route_request *request, int32_t except) {
    int32_t hits;
    return route_choose(route, request, except, &hits);
}

static void test_prefix(void **state) {
    struct route *route = open_with(ROUTE_PREFIX, 3);
    struct hash128 keys[8];
    int32_t hits;
    struct route_request r = {.keys = keys, .key_count = 8, .prompt_tokens = 128, .output_tokens = 10};
    keys_fill(keys, 8, 7);
    for (int32_t i = 0; i < 5; i++) route_key_added(route, 2, keys[i]);
    for (int32_t i = 0; i < 3; i++) route_key_added(route, 0, keys[i]);
    assert_int_equal(route_choose(route, &r, -1, &hits), 2);
    assert_int_equal(hits, 5);
    route_key_removed(route, 2, keys[1]); /* a hole: what stands behind it is worth nothing */
    assert_int_equal(route_choose(route, &r, -1, &hits), 0);
    assert_int_equal(hits, 3);
    route_keys_cleared(route, 0);
    route_key_added(route, 2, keys[1]);
    assert_int_equal(choose(route, &r, -1), 2);
    assert_int_not_equal(choose(route, &r, 2), 2);
    route_set_up(route, 2, false); /* forgets */
    assert_int_not_equal(choose(route, &r, -1), 2);
    route_set_up(route, 2, true);
    route_choose(route, &r, -1, &hits);
    assert_int_equal(hits, 0);
    route_close(route);
}

/* What a request on its way will bring counts while it is there, and as long as it was told. */
static void test_promises(void **state) {
    struct route *route = open_with(ROUTE_PREFIX, 2);
    struct hash128 keys[4];
    int32_t hits;
    struct route_request r = {.keys = keys, .key_count = 4, .prompt_tokens = 64, .output_tokens = 10};
    keys_fill(keys, 4, 1);
    int32_t first = choose(route, &r, -1);
    route_took(route, first, &r);
    assert_int_equal(route_choose(route, &r, -1, &hits), first);
    assert_int_equal(hits, 4);
    assert_int_equal(route_load_tokens(route, first), 74);
    route_took(route, first, &r);
    route_key_added(route, first, keys[0]);
    route_done(route, first, &r);
    route_keys_cleared(route, first); /* the second one still runs */
    assert_int_equal(route_choose(route, &r, -1, &hits), first);
    assert_int_equal(hits, 4);
    route_key_added(route, first, keys[0]);
    route_done(route, first, &r);
    assert_int_equal(route_load_tokens(route, first), 0);
    assert_int_equal(route_choose(route, &r, -1, &hits), first);
    assert_int_equal(hits, 1);
    route_close(route);
}

static void test_balance(void **state) {
    struct route *route = open_with(ROUTE_PREFIX, 2);
    struct hash128 keys[4];
    struct route_request r = {.keys = keys, .key_count = 4, .prompt_tokens = 64, .output_tokens = 10};
    struct route_request other = {.prompt_tokens = 900, .output_tokens = 100};
    keys_fill(keys, 4, 1);
    for (int32_t i = 0; i < 4; i++) route_key_added(route, 1, keys[i]);
    route_took(route, 1, &other);
    assert_int_equal(choose(route, &r, -1), 1); /* 1000 above: not more than the threshold */
    route_took(route, 1, &r);
    assert_int_equal(choose(route, &r, -1), 0);
    for (int i = 0; i < 3; i++) route_took(route, 0, &other);
    for (int i = 0; i < 3; i++) route_took(route, 1, &other);
    assert_int_equal(choose(route, &r, -1), 1); /* 4074 to 3000: no 1.5 times */
    route_close(route);
}

static void test_least_and_turns(void **state) {
    struct route_request r = {.prompt_tokens = 50, .output_tokens = 50};
    struct route *route = open_with(ROUTE_LEAST_LOADED, 3);
    for (int i = 0; i < 9; i++) route_took(route, choose(route, &r, -1), &r);
    for (int32_t i = 0; i < 3; i++) assert_int_equal(route_load_tokens(route, i), 300);
    route_done(route, 1, &r);
    assert_int_equal(choose(route, &r, -1), 1);
    assert_int_not_equal(choose(route, &r, 1), 1);
    route_close(route);
    route = open_with(ROUTE_ROUND_ROBIN, 3);
    for (int32_t i = 0; i < 6; i++) assert_int_equal(choose(route, &r, -1), i % 3);
    route_set_up(route, 1, false);
    assert_int_equal(choose(route, &r, -1), 0);
    assert_int_equal(choose(route, &r, -1), 2);
    route_set_up(route, 0, false);
    assert_int_equal(choose(route, &r, 2), 2); /* nothing else is up */
    route_set_up(route, 2, false);
    assert_int_equal(choose(route, &r, -1), -1);
    route_close(route);
}

/* A session moves only when its home goes, and comes back with it. */
static void test_sessions(void **state) {
    struct route *route = open_with(ROUTE_LEAST_LOADED, 4);
    int32_t homes[200], counts[4] = {0}, moved = 0;
    for (uint64_t s = 1; s <= 200; s++) {
        struct route_request r = {.prompt_tokens = 50, .output_tokens = 50, .session = s * 977};
        homes[s - 1] = choose(route, &r, -1);
        route_took(route, homes[s - 1], &r);
        counts[homes[s - 1]]++;
    }
    for (int i = 0; i < 4; i++) assert_in_range(counts[i], 30, 70);
    route_set_up(route, 2, false);
    for (uint64_t s = 1; s <= 200; s++) {
        struct route_request r = {.session = s * 977};
        int32_t now = choose(route, &r, -1);
        moved += now != homes[s - 1];
        if (homes[s - 1] != 2) assert_int_equal(now, homes[s - 1]);
    }
    assert_int_equal(moved, counts[2]);
    route_set_up(route, 2, true);
    for (uint64_t s = 1; s <= 200; s++) {
        struct route_request r = {.session = s * 977};
        assert_int_equal(choose(route, &r, -1), homes[s - 1]);
    }
    route_close(route);
}

/* The set of keys against a plain array, with collisions of the low bits. */
static void test_keys(void **state) {
    enum { KEYS = 400 };
    struct route *route = open_with(ROUTE_PREFIX, 2);
    bool held[KEYS] = {false};
    uint32_t random = 1;
    for (int step = 0; step < 40000; step++) {
        random = random * 1664525u + 1013904223u;
        uint32_t k = (random >> 8) % KEYS;
        struct hash128 key = {(k % 7) << 20 | k % 5, k};
        struct route_request r = {.keys = &key, .key_count = 1};
        int32_t hits;
        if (random >> 31)
            route_key_added(route, 1, key);
        else
            route_key_removed(route, 1, key);
        held[k] = random >> 31;
        if (step % 16) continue;
        for (k = 0; k < KEYS; k++) {
            key = (struct hash128){(k % 7) << 20 | k % 5, k};
            route_choose(route, &r, 0, &hits);
            assert_int_equal(hits, held[k]);
        }
    }
    route_close(route);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_prefix),          cmocka_unit_test(test_promises), cmocka_unit_test(test_balance),
        cmocka_unit_test(test_least_and_turns), cmocka_unit_test(test_sessions), cmocka_unit_test(test_keys),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
