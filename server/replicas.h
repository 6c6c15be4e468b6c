/* replicas.h: the engines behind one front: started side by side, watched, restarted with back-off when they die, and
 * seen by the routes as one. Keeps a copy of each request until its first news, so that a request whose replica died
 * before anything was streamed goes to another one; one that was streaming ends with an error event. The loop thread
 * owns it; its handles live in the loop.
 *
 * A replica is STARTING (process up, loading), UP, DRAINING (a restart was asked for: takes nothing new), WAITING
 * (dead, until its back-off is over) or GONE (the server ends). */
#ifndef QUIRE_SERVER_REPLICAS_H
#define QUIRE_SERVER_REPLICAS_H

#include <uv.h>

#include "engine/remote.h"
#include "server/options.h"

struct replicas; /* opaque */

enum replica_state { REPLICA_STARTING, REPLICA_UP, REPLICA_DRAINING, REPLICA_WAITING, REPLICA_GONE };
const char *replica_state_name(enum replica_state state);

struct replicas_callbacks {
    /* Whole event records, as engine_events_fn, checked; request ids are the front's own. */
    void (*on_events)(void *user, const void *records, size_t bytes);
    /* A replica changed its state. */
    void (*on_state)(void *user, int32_t replica, enum replica_state state);
    /* Nothing will serve as it is: a replica refused its very first start (the flags, the files, the device), or each
     * one failed to start so many times in a row that no further start will help. Called once. */
    void (*on_refused)(void *user, int32_t replica, const struct err *why);
    void *user;
};

int replicas_open(uv_loop_t *loop, const struct options *options, const char *model_path,
                  const struct replicas_callbacks *callbacks, struct replicas **out, struct err *err);
void replicas_close(struct replicas *replicas); /* ends the engines; then run the loop once more */

int32_t replicas_count(const struct replicas *replicas);
int32_t replicas_up(const struct replicas *replicas);
/* None is in its first start any more: each was up, or died and is started again. */
bool replicas_settled(const struct replicas *replicas);
enum replica_state replicas_state(const struct replicas *replicas, int32_t replica);
const struct engine_info *replicas_info(const struct replicas *replicas); /* of the first that was UP; NULL: none yet */
/* False while there is no process, or none that has said anything. */
bool replicas_stats(const struct replicas *replicas, int32_t replica, struct engine_stats *out);

/* What happened to one replica, for health and metrics. */
struct replica_report {
    enum replica_state state;
    int pid;                                                    /* 0: a thread, or none */
    uint64_t starts, deaths, requests_retried, requests_failed; /* by deaths */
    int32_t running;                                            /* requests sent to it that have not ended */
    int64_t up_since_ns, next_start_ns;                         /* 0: is not so */
    double last_start_seconds;
    char last_death[256];
};
void replicas_report(const struct replicas *replicas, int32_t replica, struct replica_report *out);

/* Routes and sends it. ERR_CLOSED: none is up, or draining; ERR_EXHAUSTED: the chosen one's queue is full and so are
 * the others'; ERR_INVALID as in engine_submit. `session` 0: none. */
int replicas_submit(struct replicas *replicas, const struct request *request, uint64_t session, struct err *err);
uint64_t replicas_session(const struct replicas *replicas,
                          const char *value); /* of a session header's value; NULL: 0 */
void replicas_cancel(struct replicas *replicas, uint64_t request_id);
void replicas_drain(struct replicas *replicas, int64_t deadline_ns);
void replicas_reset_prefix_cache(struct replicas *replicas);
int32_t replicas_retry_after_s(const struct replicas *replicas);

/* Takes a replica out of the rotation, lets its requests end until deadline_ns, and starts it anew; the others go on.
 * ERR_NOT_FOUND: no such replica; ERR_CLOSED: it is not UP, or the server ends. */
int replicas_restart(struct replicas *replicas, int32_t replica, int64_t deadline_ns, struct err *err);

#endif
