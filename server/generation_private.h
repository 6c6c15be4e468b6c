/* generation_private.h: what generation.c and generation_admit.c share. Nobody else includes it. */
#ifndef QUIRE_SERVER_GENERATION_PRIVATE_H
#define QUIRE_SERVER_GENERATION_PRIVATE_H

#include "server/answer.h"
#include "server/generation.h"
#include "server/generation_table.h"

struct generation {
    struct app *app;
    struct http_exchange *exchange; /* NULL once the client is gone */
    struct generation *next, *prev; /* of all */
    struct generation *dirty_next;  /* to be written at the end of this batch of events */
    struct ask ask;
    struct ask_view view;
    struct answer answer;
    size_t label_at; /* of the client's label in answer.id, behind the dialect's prefix */
    uint64_t first_id;   /* prompt i is first_id + i; 0: not submitted */
    int32_t *unfinished; /* [prompts] samples that have not ended */
    bool submitted, begun, stalled, dirty, busy, gone;
    /* The way over a worker */
    bool working; /* from uv_queue_work to on_worked */
    uv_work_t work;
    char *body; /* owned copy, NULL when read on the loop */
    size_t body_bytes;
    int rc;
    struct err err;
};

struct generations {
    struct table table;
    struct generation *first;
    int32_t count;
    uint64_t random; /* state of seeds and labels */
    struct generation *dirty;
    struct buf out; /* one chunk or reply */
    bool chats_to_workers;
};

struct generation *generation_new(struct app *app, struct http_exchange *exchange);
void generation_free(struct generation *generation);

/* Takes the ids of the first `prompts` prompts out of the table; those that run are cancelled. */
void generation_release(struct generation *generation, int32_t prompts);

/* Ends with an error: an event when the stream has begun, else a reply with a status. Frees it. */
void generation_fail(struct generation *generation, int status, const struct err *err);

#endif
