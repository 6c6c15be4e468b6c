/* bridge.h: event records from the engine's thread to the loop thread. The engine's callback copies them behind what
 * waits and wakes the loop; the loop takes all at once. One bridge an engine. */
#ifndef QUIRE_SERVER_BRIDGE_H
#define QUIRE_SERVER_BRIDGE_H

#include <pthread.h>
#include <stddef.h>

#include <uv.h>

#include "engine/base/buf.h"

struct app;

struct bridge {
    struct app *app;
    pthread_mutex_t mutex;
    struct buf filling; /* under mutex */
    struct buf taken;   /* loop thread */
    uv_async_t async;
};

/* Loop thread. The handle is not counted among what keeps the loop running. */
int bridge_init(struct bridge *bridge, struct app *app);
/* An engine_events_fn; `user` is the bridge. */
void bridge_events(void *user, const void *records, size_t bytes);
/* Hands what waits to api_on_events now. Loop thread. */
void bridge_deliver(struct bridge *bridge);
/* Closes the handle; deinit once the loop has run. */
void bridge_close(struct bridge *bridge);
void bridge_deinit(struct bridge *bridge);

#endif
