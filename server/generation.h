/* generation.h: requests that are being answered: from the body to the last byte of the reply. One generation an
 * exchange; it holds one engine request a prompt. The loop thread owns everything; only ask_prepare runs on a worker,
 * on memory that nobody else touches meanwhile.
 *
 * 1. A generation is in the table under each of its engine ids from its submission until it ends; an event for an id
 * that is not there is dropped.
 * 2. It ends exactly once: after the reply, after the last chunk, after an error, or when the client is gone. Ids that
 * had not finished are cancelled in the engine then.
 * 3. Prompts are admitted all or none: when the engine refuses one, those before it are cancelled.
 * 4. A stream begins with its first chunk, so whatever is refused before has an HTTP status of its own.
 * 5. While a stream is stalled (the client reads too slowly) nothing is written; news gathers in the answer, which is
 * bounded, and goes out as fewer, longer chunks. */
#ifndef QUIRE_SERVER_GENERATION_H
#define QUIRE_SERVER_GENERATION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "server/app.h"
#include "server/ask.h"
#include "server/http.h"

struct generations; /* opaque */

struct generations *generations_open(struct app *app);
void generations_close(struct generations *generations);

/* Takes a complete request of a generating route. */
void generation_begin(struct app *app, struct http_exchange *exchange, enum ask_route route);

/* Whole, checked event records of the engines. */
void generation_events(struct app *app, const void *records, size_t bytes);

/* Those running or being prepared. */
int32_t generation_count(const struct app *app);

/* Ends those whose label (X-Request-Id, request_id or rid, also as the reply's id shows it) is `label`, of a list with
 * a rid for each prompt the prompts of that name; NULL: all. Returns how many requests it met. */
int32_t generation_abort(struct app *app, const char *label);

/* May a chat be rendered on the loop? No more once a template took long there, which whoever rendered one on the loop
 * tells with generation_chat_took. */
bool generation_chat_on_loop(const struct app *app);
void generation_chat_took(struct app *app, int64_t took_ns);

/* What requests are read against; app->info is there. */
struct ask_view generation_view(const struct app *app);

#endif
