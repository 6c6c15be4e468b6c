/* health.h: what the probes say, and that it is true: they read the engine's heartbeat and its last step, never the
 * mere presence of a process. The loop thread owns it. */
#ifndef QUIRE_SERVER_HEALTH_H
#define QUIRE_SERVER_HEALTH_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "server/app.h"

#define HEALTH_HEARTBEAT_NS ((int64_t)5 * 1000000000)  /* the engine says it lives ten times a second */
#define HEALTH_STALL_NS     ((int64_t)20 * 1000000000) /* a step takes well under a second */

enum health_probe { HEALTH_LIVE, HEALTH_READY, HEALTH_STARTUP };

struct health {
    int64_t busy_since_ns; /* since when requests run without a pause as far as the ticks saw; 0: idle */
};

/* Once a second. */
void health_tick(struct health *health, const struct engine_stats *stats, int64_t now_ns);

/* 200 or 503, and a small JSON object. `stats` is NULL while the model loads. */
int health_answer(const struct health *health, enum health_probe probe, const struct engine_stats *stats, bool draining,
                  int64_t now_ns, struct buf *body);

#endif
