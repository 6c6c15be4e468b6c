/* A simulated day of routing, seeded: replicas with caches that evict the least recently used prefix, bursts of
 * requests, and the router that hears of it a little later; hits and load, beside the round robin. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include <cmocka.h>

#include <string.h>

#include "engine/base/clock.h"
#include "server/route.h"

enum {
    PREFIXES_MAX = 64,
    REPLICAS_MAX = 8,
    PAGES = 32, /* of a prefix */
    PAGE = 64,
    OWN_TOKENS = 128,
    OUTPUT_TOKENS = 64,
    REQUESTS_MAX = 4000
};

struct day {
    uint64_t seed;
    enum route_policy policy;
    int32_t replicas, prefixes, cached_max, requests, burst;
    bool uneven; /* prefix k is asked for 1 / (k + 1) as often as the first */
    int32_t dies_at, comes_at;
};

struct running {
    int32_t prefix, replica;
    int32_t left; /* tokens of work */
    struct route_request request;
};

/* One replica: an LRU of whole prefixes, and work done in order of arrival. */
struct server {
    uint64_t used[PREFIXES_MAX]; /* when last; 0: not cached */
    int32_t cached;
    struct running *queue[REQUESTS_MAX];
    int32_t first, count;
    int64_t hits, worked;
};

struct result {
    double hit_rate, best_rate, share_max; /* tokens of prompts; most work of one replica over the even share */
    int64_t ticks, spread;                 /* time until all was done; replicas that computed anything */
};

struct world {
    struct day day;
    struct route *route;
    uint64_t random, clock;
    struct server servers[REPLICAS_MAX];
    struct running running[REQUESTS_MAX];
    struct hash128 keys[PREFIXES_MAX][PAGES];
    bool seen[PREFIXES_MAX], up[REPLICAS_MAX];
    int64_t load_most, gap_most;
};

static uint64_t random_next(struct world *w) {
    uint64_t z = w->random += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static int32_t prefix_draw(struct world *w) {
    if (!w->day.uneven) return (int32_t)(random_next(w) % (uint64_t)w->day.prefixes);
    double sum = 0, at = (double)(random_next(w) >> 11) * 0x1p-53;
    for (int32_t k = 0; k < w->day.prefixes; k++) sum += 1.0 / (k + 1);
    int32_t k = 0;
    for (at *= sum; k + 1 < w->day.prefixes && (at -= 1.0 / (k + 1)) > 0; k++) {
    }
    return k;
}

static void told(struct world *w, int32_t replica, int32_t prefix, bool came) {
    for (int32_t i = 0; i < PAGES; i++) {
        struct hash128 key = w->keys[prefix][came ? i : PAGES - 1 - i];
        if (came)
            route_key_added(w->route, replica, key);
        else
            route_key_removed(w->route, replica, key);
    }
}

/* Takes a prefix into a cache that may have to evict another one for it. Whether it was there. */
static bool cache_use(struct world *w, int32_t replica, int32_t prefix) {
    struct server *s = &w->servers[replica];
    bool hit = s->used[prefix] != 0;
    s->used[prefix] = ++w->clock;
    if (hit) return true;
    if (s->cached++ >= w->day.cached_max) {
        int32_t oldest = -1;
        for (int32_t k = 0; k < w->day.prefixes; k++)
            if (s->used[k] && (oldest < 0 || s->used[k] < s->used[oldest])) oldest = k;
        s->used[oldest] = 0;
        s->cached--;
        told(w, replica, oldest, false);
    }
    told(w, replica, prefix, true);
    return false;
}

static void arrive(struct world *w, struct running *r, int32_t prefix) {
    int32_t hits = 0;
    r->prefix = prefix;
    r->request = (struct route_request){.keys = w->keys[prefix],
                                        .key_count = PAGES,
                                        .prompt_tokens = PAGES * PAGE + OWN_TOKENS,
                                        .output_tokens = OUTPUT_TOKENS};
    r->replica = route_choose(w->route, &r->request, -1, &hits);
    assert_in_range(r->replica, 0, w->day.replicas - 1);
    assert_true(w->up[r->replica]);
    r->request.prompt_tokens -= hits * PAGE; /* as the front counts it: what is cached is no work */
    route_took(w->route, r->replica, &r->request);
    struct server *s = &w->servers[r->replica];
    s->queue[s->count++] = r;
    r->left = -1;
}

/* A tick of one replica: so much work of the oldest request. */
static void work(struct world *w, int32_t replica, int32_t tokens) {
    struct server *s = &w->servers[replica];
    while (tokens > 0 && s->first < s->count) {
        struct running *r = s->queue[s->first];
        if (r->left < 0) {
            bool hit = cache_use(w, replica, r->prefix);
            s->hits += hit;
            r->left = OWN_TOKENS + OUTPUT_TOKENS + (hit ? 0 : PAGES * PAGE);
            s->worked += r->left;
        }
        int32_t done = r->left < tokens ? r->left : tokens;
        r->left -= done;
        tokens -= done;
        if (r->left) break;
        route_done(w->route, replica, &r->request);
        s->first++;
    }
}

/* Its requests go to the others, its cache is lost. */
static void die(struct world *w, int32_t replica) {
    struct server *s = &w->servers[replica];
    w->up[replica] = false;
    route_set_up(w->route, replica, false);
    memset(s->used, 0, sizeof s->used);
    s->cached = 0;
    for (; s->first < s->count; s->first++) arrive(w, s->queue[s->first], s->queue[s->first]->prefix);
}

static void loads_note(struct world *w) {
    int64_t most = 0, least = INT64_MAX;
    for (int32_t i = 0; i < w->day.replicas; i++) {
        if (!w->up[i]) continue;
        int64_t load = route_load_tokens(w->route, i);
        if (load > most) most = load;
        if (load < least) least = load;
    }
    if (most > w->load_most) w->load_most = most;
    if (most - least > w->gap_most) w->gap_most = most - least;
}

static bool all_done(const struct world *w) {
    for (int32_t i = 0; i < w->day.replicas; i++)
        if (w->servers[i].first < w->servers[i].count) return false;
    return true;
}

static void open_world(struct world *w, const struct day *day) {
    struct route_options options = {.replicas = day->replicas,
                                    .policy = day->policy,
                                    .page_size = PAGE,
                                    .pages_total = day->cached_max * PAGES,
                                    .balance_tokens = 4 * 2048,
                                    .balance_ratio = 1.5};
    memset(w, 0, sizeof *w);
    w->day = *day;
    w->random = day->seed;
    assert_int_equal(route_open(&options, &w->route), 0);
    for (int32_t i = 0; i < day->replicas; i++) route_set_up(w->route, i, w->up[i] = true);
    for (int32_t k = 0; k < day->prefixes; k++)
        for (int32_t i = 0; i < PAGES; i++) w->keys[k][i] = (struct hash128){random_next(w), random_next(w)};
}

static struct result result_of(struct world *w, int64_t ticks) {
    struct result r = {.ticks = ticks};
    int32_t used = 0;
    int64_t hits = 0, worked = 0, most = 0;
    for (int32_t k = 0; k < w->day.prefixes; k++) used += w->seen[k];
    for (int32_t i = 0; i < w->day.replicas; i++) {
        hits += w->servers[i].hits;
        worked += w->servers[i].worked;
        r.spread += w->servers[i].worked > 0;
        if (w->servers[i].worked > most) most = w->servers[i].worked;
        assert_int_equal(w->up[i] ? route_load_tokens(w->route, i) : 0, 0);
    }
    r.hit_rate = (double)hits / w->day.requests;
    r.best_rate = 1 - (double)used / w->day.requests;
    r.share_max = (double)most * w->day.replicas / (double)worked;
    return r;
}

/* Requests come in bursts at about nine tenths of what the replicas manage when all prefixes are cached. */
static struct result day_run(const struct day *day) {
    static struct world w;
    const int32_t step = 256;
    int32_t sent = 0;
    int64_t tick = 0, credit = 0;
    open_world(&w, day);
    for (; sent < day->requests || !all_done(&w); tick++) {
        if (day->dies_at && sent >= day->dies_at && w.up[0] && sent < day->comes_at) die(&w, 0);
        if (day->comes_at && sent >= day->comes_at && !w.up[0]) route_set_up(w.route, 0, w.up[0] = true);
        credit += day->replicas * step * 9 / 10;
        for (int64_t burst = (int64_t)day->burst * (OWN_TOKENS + OUTPUT_TOKENS); credit >= burst; credit -= burst)
            for (int32_t i = 0; i < day->burst && sent < day->requests; i++) {
                int32_t prefix = prefix_draw(&w);
                w.seen[prefix] = true;
                arrive(&w, &w.running[sent++], prefix);
            }
        loads_note(&w);
        for (int32_t i = 0; i < day->replicas; i++)
            if (w.up[i]) work(&w, i, step);
        assert_true(tick < 1000000);
    }
    struct result r = result_of(&w, tick);
    print_message("%d replicas, %d prefixes, room for %d, policy %d%s%s: hits %.3f of %.3f, %lld ticks, the busiest "
                  "%.2f of its share, load up to %lld, apart by %lld\n",
                  day->replicas, day->prefixes, day->cached_max, (int)day->policy, day->uneven ? ", uneven" : "",
                  day->dies_at ? ", a death" : "", r.hit_rate, r.best_rate, (long long)r.ticks, r.share_max,
                  (long long)w.load_most, (long long)w.gap_most);
    route_close(w.route);
    return r;
}

/* Sixteen prefixes, two replicas with room for ten each. */
static void test_two(void **state) {
    for (uint64_t seed = 1; seed <= 5; seed++) {
        struct day day = {.seed = seed, .replicas = 2, .prefixes = 16, .cached_max = 10, .requests = 1000, .burst = 8};
        struct result prefix = day_run(&day);
        day.policy = ROUTE_ROUND_ROBIN;
        struct result turns = day_run(&day);
        assert_true(prefix.hit_rate >= 0.95 * prefix.best_rate);
        assert_true(prefix.share_max <= 1.15);
        assert_true(turns.hit_rate < 0.75);
        assert_true((double)turns.ticks >= 1.6 * (double)prefix.ticks);
    }
}

static void test_many(void **state) {
    for (int32_t replicas = 4; replicas <= 8; replicas += 4) {
        struct day day = {.seed = 7,
                          .replicas = replicas,
                          .prefixes = 8 * replicas,
                          .cached_max = 10,
                          .requests = 4000,
                          .burst = 4 * replicas};
        struct result r = day_run(&day);
        assert_true(r.hit_rate >= 0.95 * r.best_rate);
        assert_true(r.share_max <= 1.25);
        assert_int_equal(r.spread, replicas);
    }
}

/* Few prefixes take most of the requests: those lie on several replicas, without pushing the others out. */
static void test_uneven(void **state) {
    for (int32_t replicas = 2; replicas <= 8; replicas *= 2) {
        struct day day = {.seed = 3,
                          .replicas = replicas,
                          .prefixes = 16,
                          .cached_max = 10,
                          .requests = 3000,
                          .burst = 4 * replicas,
                          .uneven = true};
        struct result r = day_run(&day);
        assert_true(r.hit_rate >= 0.93 * r.best_rate);
        assert_true(r.share_max <= 1.3);
    }
}

/* All ask for one thing: one replica could not keep up, so others get it too. */
static void test_one_prefix(void **state) {
    struct day day = {.seed = 1, .replicas = 4, .prefixes = 1, .cached_max = 10, .requests = 2000, .burst = 32};
    struct result r = day_run(&day);
    assert_int_equal(r.spread, 4);
    assert_true(r.share_max <= 1.3);
    assert_true(r.hit_rate >= 0.95);
}

/* The survivor cannot keep up with all of it; what piles up meanwhile must not keep both from finding order again. */
static void test_death(void **state) {
    struct day day = {.seed = 2,
                      .replicas = 2,
                      .prefixes = 16,
                      .cached_max = 10,
                      .requests = 2000,
                      .burst = 8,
                      .dies_at = 600,
                      .comes_at = 800};
    struct result r = day_run(&day);
    assert_int_equal(r.spread, 2);
    assert_true(r.hit_rate >= 0.82 * r.best_rate); /* one with room for ten has 0.63 */
    assert_true(r.share_max <= 1.15);
}

/* Of a prompt of 2048 tokens, with two replicas: printed, and held to a bound that only a slip in it would break. */
static void test_cost(void **state) {
    static struct world w;
    struct day day = {.seed = 1, .replicas = 2, .prefixes = 16, .cached_max = 10};
    enum { TURNS = 20000 };
    open_world(&w, &day);
    for (int32_t k = 0; k < 16; k++) told(&w, k % 2, k, true);
    int64_t begin_ns = clock_now_ns();
    for (int32_t i = 0; i < TURNS; i++) {
        struct route_request r = {.keys = w.keys[i % 16], .key_count = PAGES, .prompt_tokens = 100};
        int32_t hits, chosen = route_choose(w.route, &r, -1, &hits);
        assert_int_equal(chosen, i % 2);
        assert_int_equal(hits, PAGES);
        route_took(w.route, chosen, &r);
        route_done(w.route, chosen, &r);
    }
    double us = (double)(clock_now_ns() - begin_ns) * 1e-3 / TURNS;
    print_message("%.2f us to choose, take and end\n", us);
    assert_true(us < 200);
    route_close(w.route);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_two),        cmocka_unit_test(test_many),  cmocka_unit_test(test_uneven),
        cmocka_unit_test(test_one_prefix), cmocka_unit_test(test_death), cmocka_unit_test(test_cost),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
