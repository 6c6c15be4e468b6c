/* Requests under way: where each one is, what to do with it when its replica dies. */
#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/mem.h"
#include "engine/base/prefix_key.h"
#include "server/replicas_private.h"

/* An engine that dies by a fault sends errors first; its phase, or its end, follows within a turn of its host. */
#define HELD_NS (200 * NS_PER_MS)

/* ---- life ------------------------------------------------------------------------------------------------------- */

/* The keys of the prompt's full pages, which say where its prefix may lie. */
static void keys_make(const struct replicas *all, const struct request *request, struct route_request *route) {
    if (all->options->routing_policy != ROUTE_PREFIX || !all->options->enable_prefix_caching ||
        request->flags & REQUEST_NO_PREFIX_CACHE)
        return;
    int32_t page = all->info.page_size, count = (int32_t)request->prompt.count / page;
    const int32_t *ids = request_prompt(request);
    if (!count) return;
    struct hash128 *keys = mem_alloc((size_t)count * sizeof *keys), parent = {0, 0};
    for (int32_t i = 0; i < count; i++)
        keys[i] = parent = prefix_key(all->prefix_key, parent, request->salt, ids + (size_t)i * (size_t)page, page);
    route->keys = keys;
    route->key_count = count;
}

static struct pending *pending_new(struct replicas *all, const struct request *request, uint64_t session) {
    struct pending *p = mem_zalloc(1, sizeof *p);
    p->id = request->id;
    p->n = p->unfinished = request->n;
    p->prompt_tokens = p->route.prompt_tokens = (int32_t)request->prompt.count;
    p->route.output_tokens = request->max_tokens;
    p->route.session = session;
    if (all->count == 1) return p;
    keys_make(all, request, &p->route);
    p->copy = mem_alloc(request->bytes);
    memcpy(p->copy, request, request->bytes);
    return p;
}

static void pending_free(struct pending *p) {
    mem_free((void *)(uintptr_t)p->route.keys);
    mem_free(p->copy);
    mem_free(p->held);
    mem_free(p);
}

static int64_t output_promised(const struct pending *p) {
    return (int64_t)p->n * p->route.output_tokens;
}

static void pending_link(struct replica *r, struct pending *p) {
    p->replica = r->index;
    p->prev = NULL;
    p->next = r->first;
    if (r->first) r->first->prev = p;
    r->first = p;
    r->pendings++;
    r->prompt_tokens += p->route.prompt_tokens;
    r->output_tokens += output_promised(p);
    if (r->all->route && r->state == REPLICA_UP) route_took(r->all->route, r->index, &p->route);
}

static void pending_unlink(struct replica *r, struct pending *p) {
    if (p->next) p->next->prev = p->prev;
    *(p->prev ? &p->prev->next : &r->first) = p->next;
    r->pendings--;
    r->prompt_tokens -= p->route.prompt_tokens;
    r->output_tokens -= output_promised(p);
    if (r->all->route && r->state == REPLICA_UP) route_done(r->all->route, r->index, &p->route); /* else forgotten */
}

/* It has ended; nobody speaks of it any more. */
static void pending_end(struct replica *r, struct pending *p) {
    if (p->held) r->all->held--;
    table_remove(&r->all->pendings, p->id);
    pending_unlink(r, p);
    pending_free(p);
}

void replicas_requests_free(struct replicas *all) {
    for (int32_t i = 0; i < all->count; i++)
        while (all->items[i].first) pending_end(&all->items[i], all->items[i].first);
    table_deinit(&all->pendings);
}

/* ---- sending ---------------------------------------------------------------------------------------------------- */

static int none_up(struct err *err) {
    return err_set(err, ERR_CLOSED, "no engine is up: one is being started, please ask again");
}

/* What lies in the chosen one's cache is no work for it. */
static int32_t pending_choose(struct replicas *all, struct pending *p, int32_t except) {
    int32_t hits = 0;
    if (!all->route) return all->items[0].state == REPLICA_UP ? 0 : -1;
    int32_t chosen = route_choose(all->route, &p->route, except, &hits);
    p->route.prompt_tokens = p->prompt_tokens - hits * all->info.page_size;
    return chosen;
}

/* The one with the least promised that is up and was not tried. */
static int32_t least_loaded(const struct replicas *all, const bool *tried) {
    int32_t best = -1;
    int64_t least = INT64_MAX;
    for (int32_t i = 0; i < all->count; i++) {
        const struct replica *r = &all->items[i];
        int64_t load = r->prompt_tokens + r->output_tokens;
        if (tried[i] || r->state != REPLICA_UP || load >= least) continue;
        least = load;
        best = i;
    }
    return best;
}

/* To the replica that the router chooses, or where that one has no room to any that has. */
static int pending_send(struct replicas *all, struct pending *p, const struct request *request, int32_t except,
                        struct err *err) {
    bool tried[OPTIONS_REPLICAS_MAX] = {false};
    int32_t chosen = pending_choose(all, p, except);
    int rc = 0;
    if (except >= 0) tried[except] = true;
    if (except >= 0 && chosen == except) chosen = -1;
    if (chosen < 0) return none_up(err);
    while (chosen >= 0) {
        tried[chosen] = true;
        rc = remote_submit(all->items[chosen].remote, request, err);
        if (rc == 0) pending_link(&all->items[chosen], p);
        if (rc != ERR_EXHAUSTED && rc != ERR_CLOSED) break;
        chosen = least_loaded(all, tried);
        p->route.prompt_tokens = p->prompt_tokens;
    }
    return rc;
}

int replicas_submit(struct replicas *all, const struct request *request, uint64_t session, struct err *err) {
    if (all->draining) return err_set(err, ERR_CLOSED, "the server is shutting down");
    if (!replicas_up(all)) return none_up(err);
    struct pending *p = pending_new(all, request, session);
    int rc = pending_send(all, p, request, -1, err);
    if (rc)
        pending_free(p);
    else
        table_put(&all->pendings, p->id, p);
    return rc;
}

void replicas_cancel(struct replicas *all, uint64_t request_id) {
    struct pending *p = table_find(&all->pendings, request_id);
    if (!p) return;
    p->cancelled = true;
    remote_cancel(all->items[p->replica].remote, request_id);
}

/* ---- news ------------------------------------------------------------------------------------------------------- */

/* The engine had no room after all: another one may. */
static bool pending_moved(struct replica *r, struct pending *p, const struct event *event) {
    struct err err;
    if (event->finish != FINISH_ERROR || event->error_code != ERR_EXHAUSTED || !p->copy || p->retried || p->cancelled)
        return false;
    p->retried = true;
    pending_unlink(r, p);
    if (pending_send(r->all, p, p->copy, r->index, &err) == 0) return true;
    pending_link(r, p);
    return false;
}

/* Keeps the books of one event. False: it does not go on now. */
static bool event_note(struct replica *r, const struct event *event) {
    struct pending *p = table_find(&r->all->pendings, event->request_id);
    if (!p || p->replica != r->index || p->held) return false;
    if (pending_moved(r, p, event)) return false;
    bool fault = event->finish == FINISH_ERROR && event->error_code == ERR_FATAL;
    if (fault && p->copy && !p->retried && !p->cancelled) {
        p->held = mem_alloc(event->bytes);
        memcpy(p->held, event, event->bytes);
        p->held_ns = clock_now_ns();
        r->all->held++;
        return false;
    }
    if (!p->news) {
        p->news = true;
        mem_free(p->copy);
        p->copy = NULL;
    }
    if (event->finish != FINISH_NONE && --p->unfinished == 0) pending_end(r, p);
    return true;
}

static void events_pass(const struct replicas *all, const char *from, const char *to) {
    if (from < to) all->callbacks.on_events(all->callbacks.user, from, (size_t)(to - from));
}

static void keys_take(struct replica *r, const struct key_change *keys, size_t count) {
    struct route *route = r->all->route;
    if (!route || r->state != REPLICA_UP) return;
    for (size_t i = 0; i < count; i++) {
        struct hash128 key = {keys[i].lo, keys[i].hi};
        if (keys[i].change == 2)
            route_keys_cleared(route, r->index);
        else if (keys[i].change)
            route_key_added(route, r->index, key);
        else
            route_key_removed(route, r->index, key);
    }
}

void replica_news(void *user, const struct news *news) {
    struct replica *r = user;
    const char *at = (const char *)(news + 1), *end = (const char *)news + news->bytes, *from = at;
    if (news->kind == NEWS_KEYS) {
        keys_take(r, (const void *)at, (size_t)(end - at) / sizeof(struct key_change));
        return;
    }
    while (at < end) {
        const struct event *event = (const void *)at;
        const char *next = at + event->bytes;
        if (!event_note(r, event)) {
            events_pass(r->all, from, at);
            from = next;
        }
        at = next;
    }
    events_pass(r->all, from, end);
}

void replicas_held_release(struct replicas *all, int64_t now_ns) {
    struct buf *out = &all->out;
    if (!all->held) return;
    buf_clear(out);
    for (int32_t i = 0; i < all->count; i++) {
        for (struct pending *p = all->items[i].first, *next; p; p = next) {
            next = p->next;
            if (!p->held || now_ns - p->held_ns < HELD_NS) continue;
            buf_append(out, p->held, p->held->bytes);
            if (p->unfinished > 1) remote_cancel(all->items[i].remote, p->id); /* its reader hears of no other sample */
            pending_end(&all->items[i], p);
        }
    }
    if (out->bytes) all->callbacks.on_events(all->callbacks.user, out->data, out->bytes);
}

/* ---- death ------------------------------------------------------------------------------------------------------ */

/* Its last events, in the engine's stead. Samples that have ended hear nothing more: the front drops it. */
static void end_write(const struct pending *p, const char *sentence, struct buf *out) {
    for (int32_t i = 0; i < p->n; i++) {
        struct event_parts parts = {.head = {.sample = i,
                                             .request_id = p->id,
                                             .finish = p->cancelled ? FINISH_ABORT : FINISH_ERROR,
                                             .prompt_tokens = p->prompt_tokens,
                                             .error_code = p->cancelled ? 0 : ERR_CLOSED}};
        if (!p->cancelled) {
            parts.text = sentence;
            parts.text_bytes = (uint32_t)strlen(sentence);
        }
        event_append(out, &parts);
    }
}

/* Nothing of it was shown and there is another one that takes it. */
static bool pending_again(struct replica *lost, struct pending *p) {
    struct err err;
    if (!p->copy || p->retried || p->cancelled || lost->all->draining) return false;
    if (p->held) lost->all->held--;
    mem_free(p->held);
    p->held = NULL;
    p->retried = true;
    p->unfinished = p->n;
    return pending_send(lost->all, p, p->copy, lost->index, &err) == 0;
}

/* Fixed texts: what an engine says of its own end is for the log. */
static const char *end_sentence(const struct err *why) {
    if (why && strcmp(why->field, "step-timeout") == 0)
        return "a step with this request in it took longer than the server allows (--step-timeout): ask for less at "
               "once, or have smaller steps (--max-num-batched-tokens)";
    return "the engine that computed this request ended unexpectedly: please ask again";
}

void replica_requests_lost(struct replica *r, const struct err *why) {
    struct replicas *all = r->all;
    struct pending *p = NULL;
    uint64_t retried = 0, failed = 0;
    buf_clear(&all->out);
    while (r->first) { /* all of them first: the router must not count them while it chooses */
        struct pending *one = r->first;
        pending_unlink(r, one);
        one->next = p;
        p = one;
    }
    for (struct pending *next; p; p = next) {
        next = p->next;
        if (pending_again(r, p)) {
            retried++;
            continue;
        }
        failed += !p->cancelled;
        end_write(p, end_sentence(why), &all->out);
        if (p->held) all->held--;
        table_remove(&all->pendings, p->id);
        pending_free(p);
    }
    r->retried += retried;
    r->failed += failed;
    if (retried + failed)
        log_warning("requests of a dead engine", "replica=%d sent_elsewhere=%llu failed=%llu", r->index,
                    (unsigned long long)retried, (unsigned long long)failed);
    if (all->out.bytes) all->callbacks.on_events(all->callbacks.user, all->out.data, all->out.bytes);
    buf_deinit(&all->out);
}
