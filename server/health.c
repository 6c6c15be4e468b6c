#include "server/health.h"

#include "engine/base/arith.h"

void health_tick(struct health *health, const struct engine_stats *stats, int64_t now_ns) {
    if (!stats || stats->running == 0)
        health->busy_since_ns = 0;
    else if (health->busy_since_ns == 0)
        health->busy_since_ns = now_ns;
}

/* Time without a finished step while there was work; 0 when idle. */
static int64_t stall_ns(const struct health *health, const struct engine_stats *stats, int64_t now_ns) {
    if (stats->running == 0 || health->busy_since_ns == 0) return 0;
    return i64_max(0, now_ns - i64_max(stats->last_step_ns, health->busy_since_ns));
}

static const char *status_word(const struct health *health, enum health_probe probe, const struct engine_stats *stats,
                               bool draining, int64_t now_ns) {
    if (!stats) return probe == HEALTH_LIVE ? "ok" : "loading";
    if (probe == HEALTH_STARTUP) return "ok";
    if (stats->dead) return "dead";
    if (now_ns - stats->heartbeat_ns > HEALTH_HEARTBEAT_NS) return "no heartbeat";
    if (stall_ns(health, stats, now_ns) > HEALTH_STALL_NS) return "stalled";
    if (draining && probe == HEALTH_READY) return "draining";
    return "ok";
}

int health_answer(const struct health *health, enum health_probe probe, const struct engine_stats *stats, bool draining,
                  int64_t now_ns, struct buf *body) {
    const char *word = status_word(health, probe, stats, draining, now_ns);
    buf_printf(body, "{\"status\":\"%s\"", word);
    if (stats)
        buf_printf(body, ",\"running\":%d,\"waiting\":%d,\"heartbeat_age_seconds\":%.3f,\"stalled_seconds\":%.3f",
                   stats->running, stats->waiting, (double)i64_max(0, now_ns - stats->heartbeat_ns) * 1e-9,
                   (double)stall_ns(health, stats, now_ns) * 1e-9);
    buf_append_char(body, '}');
    return word[0] == 'o' ? 200 : 503;
}
