#include "server/health.h"

#include "engine/base/arith.h"

void health_tick(struct health *health, const struct health_replica *replicas, int32_t count, int64_t now_ns) {
    for (int32_t i = 0; i < count; i++) {
        int64_t *since = &health->busy_since_ns[i];
        if (!replicas[i].known || replicas[i].stats.running == 0)
            *since = 0;
        else if (*since == 0)
            *since = now_ns;
    }
}

/* Time without a finished step while there was work; 0 when idle. */
static int64_t stall_ns(const struct health *health, const struct health_replica *replicas, int32_t i, int64_t now_ns) {
    const struct engine_stats *stats = &replicas[i].stats;
    if (!replicas[i].known || stats->running == 0 || health->busy_since_ns[i] == 0) return 0;
    return i64_max(0, now_ns - i64_max(stats->last_step_ns, health->busy_since_ns[i]));
}

static const char *status_word(const struct health *health, enum health_probe probe,
                               const struct health_replica *replicas, int32_t count, bool draining, int64_t now_ns) {
    int32_t up = 0, moving = 0;
    if (probe == HEALTH_LIVE) return "ok";
    if (!health->started) return "loading";
    if (probe == HEALTH_STARTUP) return "ok";
    if (draining) return "draining";
    for (int32_t i = 0; i < count; i++) {
        up += replicas[i].up;
        moving += replicas[i].up && stall_ns(health, replicas, i, now_ns) <= HEALTH_STALL_NS;
    }
    return moving ? "ok" : up ? "stalled" : "no engine is up";
}

static void replica_write(const struct health *health, const struct health_replica *replicas, int32_t i, int64_t now_ns,
                          struct buf *body) {
    const struct health_replica *r = &replicas[i];
    buf_printf(body, "{\"replica\":%d,\"state\":\"%s\",\"pid\":%d,\"deaths\":%llu", i, r->state, r->pid,
               (unsigned long long)r->deaths);
    if (r->known)
        buf_printf(body, ",\"running\":%d,\"waiting\":%d,\"heartbeat_age_seconds\":%.3f,\"stalled_seconds\":%.3f",
                   r->stats.running, r->stats.waiting, (double)i64_max(0, now_ns - r->stats.heartbeat_ns) * 1e-9,
                   (double)stall_ns(health, replicas, i, now_ns) * 1e-9);
    buf_append_char(body, '}');
}

int health_answer(const struct health *health, enum health_probe probe, const struct health_replica *replicas,
                  int32_t count, bool draining, int64_t now_ns, struct buf *body) {
    const char *word = status_word(health, probe, replicas, count, draining, now_ns);
    int32_t running = 0, waiting = 0;
    for (int32_t i = 0; i < count; i++) {
        if (!replicas[i].known) continue;
        running += replicas[i].stats.running;
        waiting += replicas[i].stats.waiting;
    }
    buf_printf(body, "{\"status\":\"%s\",\"running\":%d,\"waiting\":%d,\"replicas\":[", word, running, waiting);
    for (int32_t i = 0; i < count; i++) {
        if (i) buf_append_char(body, ',');
        replica_write(health, replicas, i, now_ns, body);
    }
    buf_append_str(body, "]}");
    return word[0] == 'o' ? 200 : 503;
}
