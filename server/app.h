/* app.h: what the routes of one front share: the engines, the text boundary, the options and the counters. The loop
 * thread owns it; text and options are immutable after start. */
#ifndef QUIRE_SERVER_APP_H
#define QUIRE_SERVER_APP_H

#include <stdbool.h>
#include <stdint.h>

#include <uv.h>

#include "engine/engine.h"
#include "engine/text/text.h"
#include "server/http.h"

struct generations; /* generation.h */
struct metrics;     /* metrics.h */
struct options;     /* options.h: every flag's value */
struct replicas;    /* replicas.h */

struct app {
    uv_loop_t *loop;
    struct http_server *http;
    struct replicas *replicas;
    const struct engine_info *info; /* of every replica; NULL until the first is loaded, and the text */
    const struct text *text;
    const struct options *options;
    struct metrics *metrics;
    const char *model_name; /* what /v1/models says first; further names in options */
    int64_t started_unix_s;
    bool draining;         /* SIGTERM came */
    uint64_t requests_cut; /* that ended with the drain's limit */
    uint64_t next_request_id;
    struct generations *generations; /* the running ones by request id; api_open makes it */
};

#endif
