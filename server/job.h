/* job.h: a route whose whole answer is a pure function of its body: done on the loop when the body is small, else on a
 * libuv worker, and dropped when the client leaves meanwhile. The loop thread calls it. */
#ifndef QUIRE_SERVER_JOB_H
#define QUIRE_SERVER_JOB_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/base/buf.h"
#include "engine/base/err.h"
#include "server/app.h"
#include "server/ask.h"

/* Fills `out` with the reply; or returns an error code with `err`. *chat is set when it came to a chat, done or not.
 * Any thread. */
typedef int job_fn(const struct ask_view *view, const char *body, size_t bytes, struct buf *out, bool *chat,
                   struct err *err);

/* `may_chat`: the body may hold a chat, so it goes to a worker where chats do. */
void job_begin(struct app *app, struct http_exchange *exchange, job_fn *fn, bool may_chat);

#endif
