#include "server/route.h"

#include "engine/base/mem.h"

/* A page that a replica's index holds, or that requests on their way to it will bring there. */
struct page {
    struct hash128 key; /* keyed hashes: as good as random, so their low bits spread them */
    uint32_t promised;  /* by so many requests */
    bool held, used;
};

/* Open addressing, at most half full, grown as needed: the replica's pool and its requests bound it. */
struct pages {
    struct page *slots; /* [capacity], a power of two */
    size_t capacity, count;
};

struct side {
    bool up;
    int64_t load_tokens;
    struct pages pages;
};

struct route {
    struct route_options options;
    struct side *sides; /* [replicas] */
    uint32_t turn;      /* where ties and the round robin begin */
};

/* ---- pages ------------------------------------------------------------------------------------------------------ */

static bool key_same(struct hash128 a, struct hash128 b) {
    return a.lo == b.lo && a.hi == b.hi;
}

/* The slot of `key`, or the free one where it would go. */
static size_t slot_of(const struct pages *pages, struct hash128 key) {
    size_t mask = pages->capacity - 1, at = (size_t)key.lo & mask;
    while (pages->slots[at].used && !key_same(pages->slots[at].key, key)) at = (at + 1) & mask;
    return at;
}

static void pages_init(struct pages *pages, size_t expected) {
    *pages = (struct pages){.capacity = 64};
    while (pages->capacity < 2 * expected) pages->capacity *= 2;
    pages->slots = mem_zalloc(pages->capacity, sizeof *pages->slots);
}

static const struct page *page_find(const struct pages *pages, struct hash128 key) {
    const struct page *page = &pages->slots[slot_of(pages, key)];
    return page->used ? page : NULL;
}

static struct page *page_add(struct pages *pages, struct hash128 key) {
    if (2 * (pages->count + 1) > pages->capacity) {
        struct pages old = *pages;
        pages_init(pages, old.capacity);
        pages->count = old.count;
        for (size_t i = 0; i < old.capacity; i++)
            if (old.slots[i].used) pages->slots[slot_of(pages, old.slots[i].key)] = old.slots[i];
        mem_free(old.slots);
    }
    struct page *page = &pages->slots[slot_of(pages, key)];
    if (!page->used) {
        *page = (struct page){.key = key, .used = true};
        pages->count++;
    }
    return page;
}

/* Takes a page out that is neither held nor promised; later slots of the same run move back, so that no probe meets a
 * hole. */
static void page_drop(struct pages *pages, size_t hole) {
    size_t mask = pages->capacity - 1;
    if (pages->slots[hole].held || pages->slots[hole].promised) return;
    pages->count--;
    for (size_t at = (hole + 1) & mask; pages->slots[at].used; at = (at + 1) & mask) {
        size_t home = (size_t)pages->slots[at].key.lo & mask;
        if (((at - home) & mask) < ((at - hole) & mask)) continue; /* its home lies behind the hole */
        pages->slots[hole] = pages->slots[at];
        hole = at;
    }
    pages->slots[hole] = (struct page){0};
}

static void pages_forget(struct pages *pages) {
    size_t capacity = pages->capacity;
    mem_free(pages->slots);
    pages_init(pages, capacity / 2);
}

/* ---- life ------------------------------------------------------------------------------------------------------- */

int route_open(const struct route_options *options, struct route **out) {
    struct route *route = mem_zalloc(1, sizeof *route);
    route->options = *options;
    route->sides = mem_zalloc((size_t)options->replicas, sizeof *route->sides);
    for (int32_t i = 0; i < options->replicas; i++) pages_init(&route->sides[i].pages, 0);
    *out = route;
    return 0;
}

void route_close(struct route *route) {
    if (!route) return;
    for (int32_t i = 0; i < route->options.replicas; i++) mem_free(route->sides[i].pages.slots);
    mem_free(route->sides);
    mem_free(route);
}

void route_set_up(struct route *route, int32_t replica, bool up) {
    struct side *side = &route->sides[replica];
    side->up = up;
    if (up) return;
    side->load_tokens = 0;
    pages_forget(&side->pages);
}

/* ---- news ------------------------------------------------------------------------------------------------------- */

/* What a replica says goes no further than its pool: one that says more is not believed. */
void route_key_added(struct route *route, int32_t replica, struct hash128 key) {
    struct pages *pages = &route->sides[replica].pages;
    if (pages->count > 4 * (size_t)route->options.pages_total + 65536 && !page_find(pages, key)) return;
    page_add(pages, key)->held = true;
}

void route_key_removed(struct route *route, int32_t replica, struct hash128 key) {
    struct pages *pages = &route->sides[replica].pages;
    size_t at = slot_of(pages, key);
    if (!pages->slots[at].used) return;
    pages->slots[at].held = false;
    page_drop(pages, at);
}

/* Promises stay: those requests will still bring their pages. */
void route_keys_cleared(struct route *route, int32_t replica) {
    struct pages *pages = &route->sides[replica].pages, old = *pages;
    pages_init(pages, old.capacity / 2);
    for (size_t i = 0; i < old.capacity; i++)
        if (old.slots[i].promised) page_add(pages, old.slots[i].key)->promised = old.slots[i].promised;
    mem_free(old.slots);
}

/* ---- choosing --------------------------------------------------------------------------------------------------- */

static int32_t hits_of(const struct side *side, const struct route_request *request) {
    int32_t hits = 0;
    while (hits < request->key_count && page_find(&side->pages, request->keys[hits])) hits++;
    return hits;
}

/* splitmix64's finish: each (session, replica) has its own weight, so that a session moves only when its own replica
 * goes or comes. */
static uint64_t session_weight(uint64_t session, int32_t replica) {
    uint64_t z = session + 0x9E3779B97F4A7C15u * ((uint64_t)replica + 1);
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

static int32_t session_choose(const struct route *route, uint64_t session, int32_t except) {
    int32_t best = -1;
    uint64_t most = 0;
    for (int32_t i = 0; i < route->options.replicas; i++) {
        uint64_t weight = session_weight(session, i);
        if (!route->sides[i].up || i == except || (best >= 0 && weight <= most)) continue;
        best = i;
        most = weight;
    }
    return best;
}

/* The next one that is up, beginning with the one whose turn it is. */
static int32_t turn_choose(const struct route *route, int32_t except) {
    for (int32_t k = 0; k < route->options.replicas; k++) {
        int32_t i = (int32_t)((route->turn + (uint32_t)k) % (uint32_t)route->options.replicas);
        if (route->sides[i].up && i != except) return i;
    }
    return -1;
}

/* Ties go to whose turn it is. */
static int32_t least_choose(const struct route *route, int32_t except) {
    int32_t best = -1;
    for (int32_t k = 0; k < route->options.replicas; k++) {
        int32_t i = (int32_t)((route->turn + (uint32_t)k) % (uint32_t)route->options.replicas);
        if (!route->sides[i].up || i == except) continue;
        if (best < 0 || route->sides[i].load_tokens < route->sides[best].load_tokens) best = i;
    }
    return best;
}

/* What a replica has to offer to a request. */
struct offer {
    int32_t hits, held; /* pages that are there or on their way; of those in a row that are there */
    int64_t load_tokens;
    uint64_t home; /* the prefix's own weight for this replica, as a session has */
};

static struct offer offer_of(const struct route *route, int32_t replica, const struct route_request *request) {
    const struct side *side = &route->sides[replica];
    struct offer offer = {.hits = hits_of(side, request), .load_tokens = side->load_tokens};
    while (offer.held < offer.hits && page_find(&side->pages, request->keys[offer.held])->held) offer.held++;
    if (offer.hits) offer.home = session_weight(request->keys[offer.hits - 1].lo, replica);
    return offer;
}

/* The longest prefix first. While queues are long every prefix is on its way to every replica, far more than their
 * pools hold: hence what is there already comes before what is on its way, and of what is only on its way each prefix
 * has a home, else all would go on computing all of them. (Simulated, after a death under load: 0.70 hits with neither,
 * 0.82 with the first, 0.87 with both.) Then the least loaded. */
static bool offer_better(const struct offer *a, const struct offer *b) {
    if (a->hits != b->hits) return a->hits > b->hits;
    if (a->held != b->held) return a->held > b->held;
    return a->held < a->hits ? a->home > b->home : a->load_tokens < b->load_tokens;
}

/* The best offer, unless that replica has far more to do than the least loaded. */
static int32_t prefix_choose(const struct route *route, const struct route_request *request, int32_t except) {
    int32_t least = least_choose(route, except), best = least;
    if (least < 0) return least;
    const struct offer low = offer_of(route, least, request);
    struct offer most = low;
    for (int32_t i = 0; i < route->options.replicas; i++) {
        if (!route->sides[i].up || i == except || i == least) continue;
        struct offer offer = offer_of(route, i, request);
        if (!offer_better(&offer, &most)) continue;
        best = i;
        most = offer;
    }
    bool uneven = most.load_tokens - low.load_tokens > route->options.balance_tokens &&
                  (double)most.load_tokens > route->options.balance_ratio * (double)low.load_tokens;
    return uneven ? least : best;
}

static int32_t policy_choose(const struct route *route, const struct route_request *request, int32_t except) {
    if (request->session) return session_choose(route, request->session, except);
    switch (route->options.policy) {
    case ROUTE_ROUND_ROBIN:
        return turn_choose(route, except);
    case ROUTE_PREFIX:
        return prefix_choose(route, request, except);
    case ROUTE_LEAST_LOADED:
        break;
    }
    return least_choose(route, except);
}

int32_t route_choose(struct route *route, const struct route_request *request, int32_t except, int32_t *hit_pages) {
    int32_t chosen = policy_choose(route, request, except);
    if (chosen < 0 && except >= 0) chosen = policy_choose(route, request, -1);
    *hit_pages = chosen < 0 ? 0 : hits_of(&route->sides[chosen], request);
    if (chosen >= 0) route->turn = (uint32_t)(chosen + 1) % (uint32_t)route->options.replicas;
    return chosen;
}

void route_took(struct route *route, int32_t replica, const struct route_request *request) {
    struct side *side = &route->sides[replica];
    side->load_tokens += (int64_t)request->prompt_tokens + request->output_tokens;
    for (int32_t i = 0; i < request->key_count; i++) page_add(&side->pages, request->keys[i])->promised++;
}

void route_done(struct route *route, int32_t replica, const struct route_request *request) {
    struct side *side = &route->sides[replica];
    side->load_tokens -= (int64_t)request->prompt_tokens + request->output_tokens;
    for (int32_t i = 0; i < request->key_count; i++) {
        size_t at = slot_of(&side->pages, request->keys[i]);
        if (!side->pages.slots[at].used || !side->pages.slots[at].promised) continue;
        side->pages.slots[at].promised--;
        page_drop(&side->pages, at);
    }
}

int64_t route_load_tokens(const struct route *route, int32_t replica) {
    return route->sides[replica].load_tokens;
}
