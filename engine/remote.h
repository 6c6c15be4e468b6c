/* remote.h: an engine in another process (or, for tests and --engine-process=false, on a thread of this one) as the
 * front sees it: start it, hand in requests, take its news, see that it lives, end it. The front's loop thread owns it.
 * Nothing here blocks but remote_free. Holds no request: what became of those is the owner's to know. */
#ifndef QUIRE_ENGINE_REMOTE_H
#define QUIRE_ENGINE_REMOTE_H

#include "engine/host.h"

struct remote; /* opaque */

struct remote_options {
    /* A process: argv[0] is the program (/proc/self/exe), NULL-terminated; it finds the link's fds in its environment
     * as QUIRE_LINK=memory,orders,events. NULL: a thread runs host_run with `host`. */
    char *const *argv;
    const struct host_options *host; /* for a process too: what its queue holds, the key of its prefix index */
};

/* From the thread that lives as long as the process: a child dies with the thread that made it. */
int remote_start(const struct remote_options *options, struct remote **out, struct err *err);

int remote_pid(const struct remote *remote);     /* 0: a thread */
int remote_pidfd(const struct remote *remote);   /* readable when it has died; -1: a thread */
int remote_wake_fd(const struct remote *remote); /* readable when news is there or its phase has changed */

enum link_phase remote_phase(const struct remote *remote);
const struct engine_info *remote_info(const struct remote *remote);       /* from READY on */
bool remote_stats(const struct remote *remote, struct engine_stats *out); /* false: it never gave any */
void remote_failure(const struct remote *remote, struct err *out);

/* Checks as engine_submit does (record, context, pool, queue) from the engine's info and figures; then sends it. After
 * 0 each of its n samples gets exactly one last event, unless the engine dies. */
int remote_submit(struct remote *remote, const struct request *request, struct err *err);
void remote_cancel(struct remote *remote, uint64_t request_id);
void remote_drain(struct remote *remote, int64_t deadline_ns);
void remote_reset_prefix_cache(struct remote *remote);
void remote_close(struct remote *remote); /* asks it to end */

/* Hands whole, checked news on; call it when remote_wake_fd is readable. False: nonsense came; it is to be killed. */
typedef void remote_news_fn(void *user, const struct news *news);
bool remote_take(struct remote *remote, remote_news_fn *fn, void *user);

/* Dead or stuck by now? 0: it lives. Else the reason in err: exited (with code or signal), a step longer than
 * step_timeout_ns, no heartbeat for heartbeat_ns. Does not kill. Call it at least every 100 ms and when the pidfd is
 * readable. Time in which this process itself was stopped does not count. */
int remote_check(struct remote *remote, int64_t now_ns, int64_t step_timeout_ns, int64_t heartbeat_ns, struct err *err);

void remote_kill(struct remote *remote); /* SIGKILL, a process only */
/* Reaps (waits for a killed or ended process, ten seconds at most, or joins a thread) and gives everything back. */
void remote_free(struct remote *remote);

#endif
