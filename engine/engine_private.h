/* engine_private.h: the inside of struct engine, shared by engine.c (the boundary, any thread), engine_loop.c (the
 * engine thread) and engine_size.c (planning). Each field names its thread. */
#ifndef QUIRE_ENGINE_PRIVATE_H
#define QUIRE_ENGINE_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "engine/base/arena.h"
#include "engine/base/queue.h"
#include "engine/engine.h"
#include "engine/model/model.h"
#include "engine/output.h"
#include "engine/ranks.h"
#include "engine/sched/sched.h"

enum message_kind {
    MESSAGE_SUBMIT,
    MESSAGE_CANCEL,
    MESSAGE_DRAIN,
    MESSAGE_RESET_PREFIX,
    MESSAGE_AUDIT,
    MESSAGE_TEXT,
    MESSAGE_CLOSE
};

/* One order to the engine thread. Those that are answered (AUDIT, TEXT) belong to the waiting sender; the others are
 * freed there. */
struct message {
    struct queue_node node; /* first */
    enum message_kind kind;
    struct request *request; /* SUBMIT: owned */
    uint64_t request_id;
    int64_t deadline_ns;
    const struct text *text; /* TEXT */
    struct err *err;         /* answered: the sender's */
    int result;
    bool done; /* answered: under engine->mutex, signalled by engine->answered */
};

/* A step that was launched. */
struct step {
    const struct batch *batch; /* in its arena; NULL: none */
    int64_t begin_ns;          /* when its building began */
    /* Work of the engine thread for it, waiting left out: planning and building the batch; launching it (where that
     * does not compute it); taking in its tokens and sending them. */
    int64_t build_ns, launch_ns, finish_ns;
};

struct engine {
    /* Immutable after open. */
    struct engine_options options;
    struct engine_info info;
    struct model_files *files;
    struct ranks *ranks;
    struct sched *sched; /* engine thread only, once it runs */
    pthread_t thread;

    struct queue inbox;        /* any thread → engine thread */
    atomic_int inbox_requests; /* submits on their way */
    atomic_int queued;         /* requests, as the scheduler last said */
    atomic_bool closed;        /* draining, closing or dead: no new requests */
    atomic_uint_fast64_t submitted, refused;
    atomic_int_fast64_t prompt_tokens_left, output_tokens_left; /* of requests in the engine, for Retry-After */
    atomic_int_fast64_t heartbeat_ns;

    pthread_mutex_t mutex; /* guards `snapshot` and the answers to messages */
    pthread_cond_t answered;
    struct engine_stats snapshot;

    /* Engine thread only. */
    struct arena arenas[2];
    struct admission *admissions; /* alive */
    struct buf events;            /* of this turn */
    struct engine_stats stats;
    int64_t drain_deadline_ns; /* 0: not draining */
    bool closing, audited_idle;
    bool recorded;         /* no kind of step is left that could be recorded while idle */
    int64_t idle_since_ns; /* clock time at which there last was work */
    bool ahead;            /* a step is launched before the one before it is waited for; immutable after open */
    struct step in_flight; /* launched and not waited for; only where `ahead` */
    uint64_t launched;     /* steps, ever: which arena is next */
    int64_t done_ns;       /* clock time at which the last step was complete */
};

/* Takes the text and, on a device where that pays, runs each kind of step once, so that what loads on first use is
 * loaded before the first request. Engine thread, or before that runs. */
int engine_take_text(struct engine *engine, const struct text *text, struct err *err);

/* The engine thread's body. */
void *engine_thread(void *engine);

/* Decides limits and pages, opens ranks, model and scheduler, fills engine->info. */
int engine_build(struct engine *engine, struct err *err);

#endif
