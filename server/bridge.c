#include "server/bridge.h"

#include "server/api.h"

#define BRIDGE_KEEP_BYTES ((size_t)4 * 1024 * 1024)

void bridge_deliver(struct bridge *bridge) {
    pthread_mutex_lock(&bridge->mutex);
    struct buf full = bridge->filling;
    bridge->filling = bridge->taken;
    pthread_mutex_unlock(&bridge->mutex);
    bridge->taken = full;
    if (full.bytes) api_on_events(bridge->app, full.data, full.bytes);
    if (bridge->taken.capacity > BRIDGE_KEEP_BYTES)
        buf_deinit(&bridge->taken);
    else
        buf_clear(&bridge->taken);
}

static void on_async(uv_async_t *async) {
    bridge_deliver(async->data);
}

int bridge_init(struct bridge *bridge, struct app *app) {
    *bridge = (struct bridge){.app = app};
    pthread_mutex_init(&bridge->mutex, NULL);
    bridge->async.data = bridge;
    int code = uv_async_init(app->loop, &bridge->async, on_async);
    if (code == 0) uv_unref((uv_handle_t *)&bridge->async);
    return code;
}

void bridge_events(void *user, const void *records, size_t bytes) {
    struct bridge *bridge = user;
    pthread_mutex_lock(&bridge->mutex);
    buf_append(&bridge->filling, records, bytes);
    pthread_mutex_unlock(&bridge->mutex);
    uv_async_send(&bridge->async);
}

void bridge_close(struct bridge *bridge) {
    uv_close((uv_handle_t *)&bridge->async, NULL);
}

void bridge_deinit(struct bridge *bridge) {
    pthread_mutex_destroy(&bridge->mutex);
    buf_deinit(&bridge->filling);
    buf_deinit(&bridge->taken);
}
