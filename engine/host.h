/* host.h: serves one engine behind a link: the life of an engine process (or of the thread that stands for one). Opens
 * the engine, passes orders to it and its news back, keeps the link's state and heartbeat fresh, closes it when told or
 * when the front is gone. */
#ifndef QUIRE_ENGINE_HOST_H
#define QUIRE_ENGINE_HOST_H

#include "engine/link.h"

struct host_options {
    struct engine_options engine; /* on_events, user and text are the host's to fill */
    /* Opens the text beside the engine; NULL: the engine gets none. The host closes it. */
    int (*text_open)(void *user, struct text **out, struct err *err);
    void *user;
    bool keys;      /* tells of its prefix index */
    int parent_pid; /* a process: ends when this is no longer its parent; 0: a thread */
};

/* Returns when the engine was closed, failed to start (the link says why) or died: 0, or the error. A process exits
 * with it. */
int host_run(struct link *link, const struct host_options *options, struct err *err);

#endif
