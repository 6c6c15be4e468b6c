#include "server/replicas.h"

#include <string.h>

#include "engine/base/clock.h"
#include "engine/base/mem.h"
#include "server/replicas_private.h"

#define TICK_MS 100 /* as often as an engine's heart beats */

const char *replica_state_name(enum replica_state state) {
    static const char *const names[] = {[REPLICA_STARTING] = "starting",
                                        [REPLICA_UP] = "up",
                                        [REPLICA_DRAINING] = "draining",
                                        [REPLICA_WAITING] = "waiting",
                                        [REPLICA_GONE] = "gone"};
    return names[state];
}

/* ---- life ------------------------------------------------------------------------------------------------------- */

static void on_tick(uv_timer_t *timer) {
    struct replicas *all = timer->data;
    int64_t now_ns = clock_now_ns();
    for (int32_t i = 0; i < all->count; i++) replica_tick(&all->items[i], now_ns);
    replicas_held_release(all, now_ns);
}

int replicas_open(uv_loop_t *loop, const struct options *options, const char *model_path,
                  const struct replicas_callbacks *callbacks, struct replicas **out, struct err *err) {
    struct replicas *all = mem_zalloc(1, sizeof *all);
    all->loop = loop;
    all->options = options;
    all->model_path = model_path;
    all->callbacks = *callbacks;
    all->count = options->data_parallel_size;
    all->items = mem_zalloc((size_t)all->count, sizeof *all->items);
    all->session_key = hash_key_random();
    all->prefix_key = hash_key_random();
    table_init(&all->pendings);
    uv_timer_init(loop, &all->tick);
    all->tick.data = all;
    uv_timer_start(&all->tick, on_tick, TICK_MS, TICK_MS);
    *out = all;
    for (int32_t i = 0; i < all->count; i++) {
        all->items[i] = (struct replica){.all = all, .index = i, .state = REPLICA_WAITING};
        if (replica_start(&all->items[i], err)) return err->code; /* the caller closes what was started */
    }
    return 0;
}

static void on_closed(uv_handle_t *handle) {
    mem_free(handle->data);
}

void replicas_close(struct replicas *all) {
    if (!all) return;
    replicas_end(all);
    replicas_requests_free(all);
    if (all->route) route_close(all->route);
    buf_deinit(&all->out);
    mem_free(all->items);
    uv_close((uv_handle_t *)&all->tick, on_closed);
}

/* ---- what there is ---------------------------------------------------------------------------------------------- */

int32_t replicas_count(const struct replicas *all) {
    return all->count;
}

int32_t replicas_up(const struct replicas *all) {
    int32_t up = 0;
    for (int32_t i = 0; i < all->count; i++) up += all->items[i].state == REPLICA_UP;
    return up;
}

bool replicas_settled(const struct replicas *all) {
    for (int32_t i = 0; i < all->count; i++)
        if (all->items[i].state == REPLICA_STARTING && all->items[i].starts == 1) return false;
    return true;
}

enum replica_state replicas_state(const struct replicas *all, int32_t replica) {
    return all->items[replica].state;
}

const struct engine_info *replicas_info(const struct replicas *all) {
    return all->info.page_size ? &all->info : NULL;
}

bool replicas_stats(const struct replicas *all, int32_t replica, struct engine_stats *out) {
    const struct replica *r = &all->items[replica];
    return r->remote && !r->dying && remote_stats(r->remote, out);
}

void replicas_report(const struct replicas *all, int32_t replica, struct replica_report *out) {
    const struct replica *r = &all->items[replica];
    *out = (struct replica_report){
        .state = r->state,
        .pid = r->remote ? remote_pid(r->remote) : 0,
        .starts = r->starts,
        .deaths = r->deaths,
        .requests_retried = r->retried,
        .requests_failed = r->failed,
        .running = r->pendings,
        .up_since_ns = r->up_since_ns,
        .next_start_ns = r->state == REPLICA_WAITING ? r->next_start_ns : 0,
        .last_start_seconds = r->start_seconds,
    };
    memcpy(out->last_death, r->last_death.text, sizeof out->last_death - 1);
}

/* ---- orders to all ---------------------------------------------------------------------------------------------- */

uint64_t replicas_session(const struct replicas *all, const char *value) {
    if (!value || !value[0]) return 0;
    return hash_bytes(all->session_key, value, strlen(value)).lo | 1;
}

void replicas_drain(struct replicas *all, int64_t deadline_ns) {
    all->draining = true;
    for (int32_t i = 0; i < all->count; i++)
        if (all->items[i].remote && !all->items[i].dying) remote_drain(all->items[i].remote, deadline_ns);
}

void replicas_reset_prefix_cache(struct replicas *all) {
    for (int32_t i = 0; i < all->count; i++)
        if (all->items[i].remote && !all->items[i].dying) remote_reset_prefix_cache(all->items[i].remote);
}

/* Until the engine is back, as far as that can be known. */
static double start_wait_s(const struct replica *r, int64_t now_ns) {
    double load = r->start_seconds > 0 ? r->start_seconds : 5;
    if (r->state == REPLICA_WAITING && r->next_start_ns > now_ns)
        return load + (double)(r->next_start_ns - now_ns) / 1e9;
    if (r->state == REPLICA_STARTING) load -= (double)(now_ns - r->started_ns) / 1e9;
    return load;
}

/* The time that the tokens promised to its requests take at the measured rates: when a newcomer would surely find room.
 * Half of the promised output is counted, since most samples end before max_tokens. */
static double room_wait_s(const struct replica *r) {
    struct engine_stats stats;
    double seconds = 0;
    if (!remote_stats(r->remote, &stats)) return 1;
    if (stats.prefill_tokens_per_s > 0) seconds += (double)r->prompt_tokens / stats.prefill_tokens_per_s;
    if (stats.decode_tokens_per_s > 0) seconds += 0.5 * (double)r->output_tokens / stats.decode_tokens_per_s;
    return seconds;
}

int32_t replicas_retry_after_s(const struct replicas *all) {
    int64_t now_ns = clock_now_ns();
    bool up = replicas_up(all) > 0;
    double least = 600;
    for (int32_t i = 0; i < all->count; i++) {
        const struct replica *r = &all->items[i];
        if (up && r->state != REPLICA_UP) continue;
        double seconds = up ? room_wait_s(r) : start_wait_s(r, now_ns);
        if (seconds < least) least = seconds;
    }
    return least < 1 ? 1 : (int32_t)(least + 0.999);
}

int replicas_restart(struct replicas *all, int32_t replica, int64_t deadline_ns, struct err *err) {
    if (replica < 0 || replica >= all->count)
        return err_set(err, ERR_NOT_FOUND, "there is no replica %d: they are 0 to %d", replica, all->count - 1);
    struct replica *r = &all->items[replica];
    if (all->draining || r->state != REPLICA_UP)
        return err_set(err, ERR_CLOSED, "replica %d is %s: only one that is up can be restarted", replica,
                       all->draining ? "ending with the server" : replica_state_name(r->state));
    replica_drain(r, deadline_ns);
    return 0;
}
