/* api.h: every route that reads a prompt or speaks of the model, in all dialects; the transport's way in. Health,
 * metrics and version are not here. The loop thread calls everything. Knows no sockets: it reads exchanges and writes
 * replies through http.h. */
#ifndef QUIRE_SERVER_API_H
#define QUIRE_SERVER_API_H

#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "server/app.h"
#include "server/http.h"

/* Makes app->generations; before the first exchange. */
void api_open(struct app *app);
/* Frees it. Every exchange is gone or answered, and the engines are closed. */
void api_close(struct app *app);

/* Is it a path of ours, with this method? 0, 404 (not ours) or 405. */
int api_known(const char *path, enum http_method method);

/* Takes a complete request whose api_known is 0; answers it now or later. */
void api_handle(struct app *app, struct http_exchange *exchange);

/* Fills `body` with an error in the envelope of the dialect that lives at `path`; for refusals of the transport. */
void api_error_body(const char *path, int status, const char *message, struct buf *body, const char **content_type);

/* Event records of the engines (engine_events_fn's), checked, on the loop thread. */
void api_on_events(struct app *app, const void *records, size_t bytes);

/* Requests that have a generation running or being prepared: 0 means that a drain may end. */
int32_t api_running(const struct app *app);

#endif
