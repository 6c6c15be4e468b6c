/* The life of an engine as its front sees it: started, watched, killed when it is stuck, started again. */
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "engine/base/arith.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/mem.h"
#include "server/replicas_private.h"

#define HEARTBEAT_NS     (2 * NS_PER_SECOND) /* it beats ten times a second, idle too */
#define BACKOFF_FIRST_NS (NS_PER_SECOND / 10)
#define BACKOFF_MOST_NS  (10 * NS_PER_SECOND)
#define STEADY_NS        (60 * NS_PER_SECOND) /* up so long: its next death is a first one again */
#define STARTS_MAX       10                   /* failed ones in a row, of every replica */
#define DRAIN_GRACE_NS   (2 * NS_PER_SECOND)  /* beyond a restart's limit, for the engine to end what it has */
#define CLOSE_NS         (5 * NS_PER_SECOND)  /* for an engine to end when told to */
#define TICK_MS          100

static void state_set(struct replica *r, enum replica_state state) {
    struct replicas *all = r->all;
    if (r->state == state) return;
    r->state = state;
    if (all->route) route_set_up(all->route, r->index, state == REPLICA_UP);
    all->callbacks.on_state(all->callbacks.user, r->index, state);
}

/* ---- watching --------------------------------------------------------------------------------------------------- */

static void replica_look(struct replica *r, int64_t now_ns);

static void on_watch_closed(uv_handle_t *handle) {
    struct watch *watch = handle->data;
    if (--watch->handles == 0) mem_free(watch);
}

static void on_wake(uv_poll_t *poll, int status, int events) {
    struct watch *watch = poll->data;
    replica_look(watch->replica, clock_now_ns());
}

static void watch_one(struct replica *r, uv_poll_t *poll, int fd) {
    uv_poll_init(r->all->loop, poll, fd);
    poll->data = r->watch;
    uv_poll_start(poll, UV_READABLE, on_wake);
    r->watch->handles++;
}

static void watch_open(struct replica *r) {
    r->watch = mem_zalloc(1, sizeof *r->watch);
    r->watch->replica = r;
    watch_one(r, &r->watch->wake, remote_wake_fd(r->remote));
    if (remote_pidfd(r->remote) >= 0) watch_one(r, &r->watch->died, remote_pidfd(r->remote));
}

static void watch_close(struct replica *r) {
    struct watch *watch = r->watch;
    if (!watch) return;
    r->watch = NULL;
    int handles = watch->handles; /* the last close may free it, though not before the loop runs */
    uv_close((uv_handle_t *)&watch->wake, on_watch_closed);
    if (handles == 2) uv_close((uv_handle_t *)&watch->died, on_watch_closed);
}

/* Has it come to its end, so that reaping waits for nothing? */
static bool replica_ended(const struct replica *r) {
    struct pollfd fd = {.fd = remote_pidfd(r->remote), .events = POLLIN};
    if (fd.fd >= 0) return poll(&fd, 1, 0) > 0;
    enum link_phase phase = remote_phase(r->remote);
    return phase == LINK_FAILED || phase == LINK_DEAD || phase == LINK_ENDED;
}

static void replica_reap(struct replica *r) {
    watch_close(r);
    remote_free(r->remote);
    r->remote = NULL;
    r->dying = r->closing = false;
}

/* ---- starting --------------------------------------------------------------------------------------------------- */

/* Of the first that is up: what routes are made for, and what the front knows of all. */
static void info_take(struct replicas *all, const struct replica *r) {
    const struct options *o = all->options;
    if (all->info.page_size) return;
    all->info = *remote_info(r->remote);
    if (all->count == 1) return;
    struct route_options options = {
        .replicas = all->count,
        .policy = (enum route_policy)o->routing_policy,
        .page_size = all->info.page_size,
        .pages_total = all->info.pages_total,
        .balance_tokens = 4 * all->info.max_num_batched_tokens,
        .balance_ratio = 1.5,
    };
    route_open(&options, &all->route);
}

static void replica_up(struct replica *r, int64_t now_ns) {
    r->up_since_ns = now_ns;
    r->start_seconds = (double)(now_ns - r->started_ns) * 1e-9;
    r->failed_starts = 0;
    info_take(r->all, r);
    log_info("engine up", "replica=%d pid=%d seconds=%.3f", r->index, remote_pid(r->remote), r->start_seconds);
    state_set(r, REPLICA_UP);
}

int replica_start(struct replica *r, struct err *err) {
    r->started_ns = clock_now_ns();
    r->next_start_ns = r->up_since_ns = 0;
    int rc = replica_spawn(r, err);
    if (rc) return rc;
    r->starts++;
    watch_open(r);
    state_set(r, REPLICA_STARTING);
    return 0;
}

/* ---- dying ------------------------------------------------------------------------------------------------------ */

static void refuse(struct replicas *all, int32_t replica, const struct err *why) {
    if (all->refused) return;
    all->refused = true;
    all->callbacks.on_refused(all->callbacks.user, replica, why);
}

static void backoff_next(struct replica *r, int64_t now_ns) {
    if (r->up_since_ns && now_ns - r->up_since_ns >= STEADY_NS) r->backoff_ns = 0;
    r->backoff_ns = r->backoff_ns ? i64_min(2 * r->backoff_ns, BACKOFF_MOST_NS) : BACKOFF_FIRST_NS;
    r->next_start_ns = now_ns + r->backoff_ns;
}

/* Every one of them failed to start again and again. */
static void give_up_check(struct replicas *all, const struct replica *last) {
    struct err err;
    for (int32_t i = 0; i < all->count; i++)
        if (all->items[i].failed_starts < STARTS_MAX) return;
    err_set(&err, ERR_FATAL, "no engine starts any more, %d times in a row; the last one: %.300s", STARTS_MAX,
            last->last_death.text);
    refuse(all, last->index, &err);
}

/* It is dead or must be. Its requests are answered now; what is left of it is reaped when it can be. */
static void replica_lost(struct replica *r, const struct err *why, int64_t now_ns) {
    struct replicas *all = r->all;
    bool refusal = remote_phase(r->remote) == LINK_FAILED && r->starts == 1 && !r->up_since_ns;
    int pid = remote_pid(r->remote);
    remote_take(r->remote, replica_news, r); /* what it still said; nonsense ends it either way */
    if (!r->closing) {
        r->last_death = *why;
        r->deaths++;
        r->failed_starts += r->state == REPLICA_STARTING;
        backoff_next(r, now_ns);
        if (refusal)
            r->next_start_ns = INT64_MAX;
        else
            log_error("the engine died", "replica=%d pid=%d reason=%s up_seconds=%.1f next_start_ms=%lld", r->index,
                      pid, log_quote(why->text).text, r->up_since_ns ? (double)(now_ns - r->up_since_ns) * 1e-9 : 0.0,
                      (long long)(r->backoff_ns / NS_PER_MS));
    }
    r->up_since_ns = 0;
    r->dying = true;
    if (r->watch) uv_poll_stop(&r->watch->wake); /* nobody reads what it still says */
    state_set(r, all->draining ? REPLICA_GONE : REPLICA_WAITING);
    remote_kill(r->remote);
    if (!pid && !replica_ended(r)) {
        /* A stuck thread can be neither killed nor joined: whoever watches this process starts it again. */
        log_error("a thread that is stuck cannot be ended: the server ends", "replica=%d", r->index);
        _exit(3);
    }
    replica_requests_lost(r, why);
    if (refusal)
        refuse(all, r->index, why);
    else
        give_up_check(all, r);
    if (replica_ended(r)) replica_reap(r);
}

/* ---- looking ---------------------------------------------------------------------------------------------------- */

/* Told to end after its requests did: starts anew at once. */
static void closing_look(struct replica *r, int64_t now_ns) {
    if (replica_ended(r)) {
        replica_reap(r);
        r->next_start_ns = now_ns;
        state_set(r, r->all->draining ? REPLICA_GONE : REPLICA_WAITING);
        replica_tick(r, now_ns);
    } else if (now_ns >= r->close_until_ns) {
        struct err err;
        err_set(&err, ERR_FATAL, "it did not end when told to");
        replica_lost(r, &err, now_ns);
    }
}

void replica_drain(struct replica *r, int64_t deadline_ns) {
    log_info("an engine is taken out to be started anew", "replica=%d running=%d", r->index, r->pendings);
    r->drain_until_ns = deadline_ns;
    remote_drain(r->remote, deadline_ns);
    state_set(r, REPLICA_DRAINING);
}

static void drained_look(struct replica *r, int64_t now_ns) {
    if (r->pendings && now_ns < r->drain_until_ns + DRAIN_GRACE_NS) return;
    r->closing = true;
    r->close_until_ns = now_ns + CLOSE_NS;
    replica_requests_lost(r, NULL); /* what did not end in time */
    remote_close(r->remote);
}

/* Takes its news, and sees whether it lives. */
static void replica_look(struct replica *r, int64_t now_ns) {
    struct err err = {0};
    if (r->dying) {
        if (replica_ended(r)) replica_reap(r);
        return;
    }
    bool sane = remote_take(r->remote, replica_news, r);
    if (r->closing) {
        closing_look(r, now_ns);
        return;
    }
    enum link_phase phase = remote_phase(r->remote);
    if (!sane) {
        err_set(&err, ERR_FATAL, "it wrote nonsense into its link");
        replica_lost(r, &err, now_ns);
    } else if (phase == LINK_FAILED || phase == LINK_DEAD) {
        remote_failure(r->remote, &err);
        replica_lost(r, &err, now_ns);
    } else if (remote_check(r->remote, now_ns, (int64_t)(r->all->options->step_timeout_s * 1e9), HEARTBEAT_NS, &err)) {
        replica_lost(r, &err, now_ns);
    } else if (phase == LINK_READY && r->state == REPLICA_STARTING) {
        replica_up(r, now_ns);
    } else if (r->state == REPLICA_DRAINING) {
        drained_look(r, now_ns);
    }
}

void replica_tick(struct replica *r, int64_t now_ns) {
    struct err err = {0};
    if (r->remote) {
        replica_look(r, now_ns);
        return;
    }
    if (r->all->draining || r->all->refused || now_ns < r->next_start_ns) return;
    if (replica_start(r, &err) == 0) return;
    r->failed_starts++;
    r->last_death = err;
    backoff_next(r, now_ns);
    log_error("an engine cannot be started", "replica=%d why=%s", r->index, log_quote(err.text).text);
    give_up_check(r->all, r);
}

/* ---- the end ---------------------------------------------------------------------------------------------------- */

/* A process that was told to end: it is killed when its time is over, or when it does not even live. */
static void end_await(struct replica *r, int64_t until_ns) {
    struct pollfd fd = {.fd = remote_pidfd(r->remote), .events = POLLIN};
    struct err err;
    while (fd.fd >= 0 && poll(&fd, 1, TICK_MS) <= 0) {
        int64_t now_ns = clock_now_ns();
        if (now_ns < until_ns && remote_check(r->remote, now_ns, INT64_MAX, HEARTBEAT_NS, &err) == 0) continue;
        remote_kill(r->remote);
        return;
    }
}

/* Those that load own nothing outside of their process and are killed; the others are told to end and have some seconds
 * for it. A thread that loads cannot be ended: see cmd_serve.c. */
void replicas_end(struct replicas *all) {
    int64_t until_ns = clock_now_ns() + CLOSE_NS;
    for (int32_t i = 0; i < all->count; i++) {
        struct replica *r = &all->items[i];
        r->state = REPLICA_GONE;
        if (!r->remote) continue;
        if (remote_phase(r->remote) == LINK_READY && !r->dying)
            remote_close(r->remote);
        else
            remote_kill(r->remote);
    }
    for (int32_t i = 0; i < all->count; i++) {
        struct replica *r = &all->items[i];
        if (!r->remote) continue;
        end_await(r, until_ns);
        replica_reap(r);
    }
}
