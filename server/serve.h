/* serve.h: one running `quire serve`: the loop, its timers and signals, the engines and the text. Private to
 * server/serve*.c and cmd_serve.c. The loop thread owns it; the loading thread writes `load` until it says done. */
#ifndef QUIRE_SERVER_SERVE_H
#define QUIRE_SERVER_SERVE_H

#include <pthread.h>
#include <stdatomic.h>

#include <uv.h>

#include "server/app.h"
#include "server/auth.h"
#include "server/health.h"
#include "server/metrics.h"
#include "server/model_path.h"
#include "server/notify.h"
#include "server/options.h"
#include "server/orphans.h"
#include "server/replicas.h"

#define SERVE_EXIT_OK          0
#define SERVE_EXIT_ENVIRONMENT 1
#define SERVE_EXIT_USAGE       2
#define SERVE_EXIT_ENGINE      3

/* What the loading thread makes: the front's own text. The engines open theirs themselves. */
struct serve_load {
    pthread_t thread;
    bool started;
    uv_async_t done; /* sent once, at its end */
    atomic_bool finished;
    struct text *text;
    double seconds;
    struct err err; /* code 0: it is there */
};

/* The last look at the engines, for rates. */
struct serve_rates {
    int64_t at_ns;
    uint64_t prompt_tokens, generation_tokens;
};

struct serve {
    struct app app;
    struct options options;
    struct model_path model;
    struct auth auth;
    struct health health;
    struct metrics *metrics;
    struct serve_load load;
    struct serve_rates rates;
    struct notify *notify; /* NULL: no service manager listens */
    struct orphans orphans;
    uv_loop_t loop;
    uv_signal_t signals[2];
    uv_timer_t second, drain;
    int64_t begun_ns;       /* process start */
    int64_t drain_until_ns; /* after it running requests are cut */
    int64_t written_ns;     /* draining: since when every answer is written */
    size_t resident_bytes;  /* when the heap was last tidied */
    double start_seconds;   /* to ready */
    int32_t seconds;        /* ticks, for the line every ten */
    int32_t text_failed;    /* 1 + the tick at which the text could not be opened; 0: it could, or is not yet */
    int exit_code;
    bool ready, ending, hurried; /* hurried: a second signal came */
};

/* serve_http.c: the transport's callbacks; `user` is the struct serve. */
void serve_callbacks(struct serve *serve, struct http_callbacks *out);
/* A snapshot of each replica; returns how many there are, 0 before they are started. */
int32_t serve_replicas(const struct serve *serve, struct health_replica out[HEALTH_REPLICAS_MAX]);

/* serve_load.c */
int serve_load_start(struct serve *serve, uv_async_cb on_done, struct err *err);
/* Joins the thread; at once after `finished`. */
void serve_load_join(struct serve *serve);
/* Start-up lines: memory, configuration, phases. */
void serve_report(const struct serve *serve);
int serve_exit_code(const struct err *err);

#endif
