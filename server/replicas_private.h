/* replicas_private.h: the inside of struct replicas, shared by replicas.c (the boundary), replicas_life.c (start,
 * watch, death, restart) and replicas_requests.c (what is under way). Nobody else includes it. The loop thread owns
 * all.
 *
 * 1. A request is in the table from replicas_submit until the last event of its last sample was handed on.
 * 2. A replica with `remote` NULL has nothing that lives outside of this struct.
 * 3. A dead engine's requests are answered or sent elsewhere when its death is seen; its process is reaped when the
 *    kernel is done with it, which with much device memory takes longer, and only then is the next one started.
 * 4. While records are handed on, requests may come and be cancelled; no replica dies or starts meanwhile. */
#ifndef QUIRE_SERVER_REPLICAS_PRIVATE_H
#define QUIRE_SERVER_REPLICAS_PRIVATE_H

#include "engine/base/buf.h"
#include "server/engine_setup.h"
#include "server/generation_table.h"
#include "server/replicas.h"
#include "server/route.h"

struct replica;

/* A request under way. */
struct pending {
    struct pending *next, *prev; /* of its replica */
    uint64_t id;
    int32_t replica, n, unfinished; /* samples */
    bool news, retried, cancelled;
    struct request *copy; /* until its first news, where there is another replica */
    struct event *held;   /* an error that may be its replica's death, kept until that is known */
    int64_t held_ns;
    int32_t prompt_tokens;
    struct route_request route; /* owns the keys; its prompt_tokens are those that are left to compute */
};

/* The handles of one engine; outlives the replica's interest in it until libuv has closed them. */
struct watch {
    struct replica *replica;
    uv_poll_t wake, died;
    int handles;
};

struct replica {
    struct replicas *all;
    int32_t index;
    enum replica_state state;
    struct engine_setup setup; /* a thread reads it */
    struct remote *remote;
    struct watch *watch;
    bool dying;   /* dead for us; waits to be reaped */
    bool closing; /* was told to end, to be started anew */
    struct pending *first;
    int32_t pendings;
    int64_t prompt_tokens, output_tokens; /* promised to those */
    int64_t started_ns, up_since_ns, next_start_ns, backoff_ns, drain_until_ns, close_until_ns;
    int32_t failed_starts; /* in a row */
    uint64_t starts, deaths, retried, failed;
    double start_seconds;
    struct err last_death;
};

struct replicas {
    uv_loop_t *loop;
    const struct options *options;
    const char *model_path;
    struct replicas_callbacks callbacks;
    struct replica *items; /* [count] */
    int32_t count;
    bool draining, refused;
    uv_timer_t tick;
    struct engine_info info; /* of the first that was up; page_size 0: none yet */
    struct route *route;     /* NULL: one replica, or none was up yet */
    struct hash_key session_key, prefix_key;
    struct table pendings;
    int32_t held;
    struct buf out; /* events made here */
};

/* replicas_spawn.c: starts the process or the thread. */
int replica_spawn(struct replica *replica, struct err *err);

/* replicas_life.c */
int replica_start(struct replica *replica, struct err *err);
/* What is due by now. */
void replica_tick(struct replica *replica, int64_t now_ns);
/* Takes nothing new; is ended and started anew when its requests have ended. */
void replica_drain(struct replica *replica, int64_t deadline_ns);
/* Ends all engines and gives them back; waits for them, some seconds at most. */
void replicas_end(struct replicas *replicas);

/* replicas_requests.c */
void replica_news(void *replica, const struct news *news); /* a remote_news_fn */
/* The replica is dead: its requests go elsewhere or end. */
void replica_requests_lost(struct replica *replica, const struct err *why); /* why NULL: told to end */
/* Errors held back whose replica did not die after all go on. */
void replicas_held_release(struct replicas *replicas, int64_t now_ns);
void replicas_requests_free(struct replicas *replicas);

#endif
