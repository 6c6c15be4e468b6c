/* health.h: what the probes say, and that it is true: they read each engine's state, its heartbeat and its last step,
 * never the mere presence of a process. Live is the front itself; ready is that at least one replica makes progress;
 * started is that it once was ready. The loop thread owns it. */
#ifndef QUIRE_SERVER_HEALTH_H
#define QUIRE_SERVER_HEALTH_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/engine.h"

#define HEALTH_REPLICAS_MAX 64
#define HEALTH_STALL_NS     ((int64_t)20 * 1000000000) /* a step takes well under a second */

enum health_probe { HEALTH_LIVE, HEALTH_READY, HEALTH_STARTUP };

struct health_replica {
    bool up, known; /* known: stats are there */
    const char *state;
    int pid; /* 0: none of its own */
    uint64_t deaths;
    struct engine_stats stats;
};

struct health {
    int64_t busy_since_ns[HEALTH_REPLICAS_MAX]; /* since when requests run without a pause as far as the ticks saw; 0:
                                                   idle */
    bool started;                               /* was ready once */
};

/* Once a second. */
void health_tick(struct health *health, const struct health_replica *replicas, int32_t count, int64_t now_ns);

/* 200 or 503, and a small JSON object that tells each replica. */
int health_answer(const struct health *health, enum health_probe probe, const struct health_replica *replicas,
                  int32_t count, bool draining, int64_t now_ns, struct buf *body);

#endif
