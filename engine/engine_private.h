/* engine_private.h: the inside of struct engine, shared by engine.c (the boundary, any thread), engine_loop.c (the
 * engine thread), engine_size.c (opening) and engine_plan.c (sizes). Each field names its thread. */
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
    struct buf keys;              /* struct key_change of this turn */
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

/* ---- engine_plan.c: the sizes of everything, before anything is loaded ------------------------------------------- */

/* What a plan takes and may take on a device, in bytes; on the CPU, whose memory is one, of all ranks together. */
struct memory_sum {
    size_t weights, workspace, overhead;
    size_t kv;             /* asked for, or kv_least */
    size_t kv_least, page; /* of one context; of one page */
    size_t share;          /* what --gpu-memory-utilization allows; SIZE_MAX where it has no say */
    size_t free;
};
struct memory_sum memory_add(const struct engine_options *options, const struct backend_info *device,
                             const struct model_limits *limits, const struct model_memory *memory);
size_t memory_left(const struct memory_sum *sum); /* for the pool */

struct plan {
    struct model_limits limits;
    struct model_memory memory; /* on one rank */
    int32_t pages_total;        /* page 0 is the dummy */
};

/* Fills in what was left to the device; refuses by name what the device cannot do. */
void options_settle(struct engine_options *options, const struct backend_info *device);
int options_refuse(const struct engine_options *options, const struct backend_info *device, struct err *err);
/* From settled options. ERR_UNSUPPORTED: it does not fit, with the arithmetic and what would help. */
int limits_decide(const struct engine_options *options, const struct model_spec *spec, struct model_limits *limits,
                  struct err *err);
int plan_make(const struct engine_options *options, const struct model_files *files, const struct backend *backend,
              const struct backend_info *device, struct plan *out, struct err *err);

/* Takes the text and, on a device where that pays, runs each kind of step once, so that what loads on first use is
 * loaded before the first request. Engine thread, or before that runs. */
int engine_take_text(struct engine *engine, const struct text *text, struct err *err);

/* The engine thread's body. */
void *engine_thread(void *engine);

/* The devices that the options name. */
struct ranks_options devices_options(const struct engine_options *options);

/* Decides limits and pages, opens ranks, model and scheduler, fills engine->info. */
int engine_build(struct engine *engine, struct err *err);

#endif
