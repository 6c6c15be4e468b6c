/* serve.h: one running `quire serve`: the loop, its timers and signals, the loaded model. Private to server/serve*.c
 * and cmd_serve.c. The loop thread owns it; the loading thread writes `load` until it says done. */
#ifndef QUIRE_SERVER_SERVE_H
#define QUIRE_SERVER_SERVE_H

#include <pthread.h>
#include <stdatomic.h>

#include <uv.h>

#include "server/app.h"
#include "server/auth.h"
#include "server/bridge.h"
#include "server/health.h"
#include "server/metrics.h"
#include "server/model_path.h"
#include "server/notify.h"
#include "server/options.h"
#include "server/orphans.h"

#define SERVE_EXIT_OK          0
#define SERVE_EXIT_ENVIRONMENT 1
#define SERVE_EXIT_USAGE       2
#define SERVE_EXIT_ENGINE      3

/* What the loading thread makes. */
struct serve_load {
    pthread_t thread;
    bool started;
    uv_async_t done; /* sent once, at its end */
    atomic_bool finished;
    struct text *text;
    struct engine *engine;
    double text_seconds, engine_seconds;
    int text_code;
    struct err text_err;   /* with text_code */
    struct err err;        /* code 0: both are there */
    const char *failed_at; /* "tokenizer" or "model" */
};

/* The last look at the engine, for rates. */
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
    struct bridge bridge;
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
    int64_t heartbeat_ns;   /* the last one seen, and for how many seconds there was no other */
    int32_t silent_seconds;
    size_t resident_bytes; /* when the heap was last tidied */
    double start_seconds;  /* to ready */
    int32_t seconds;      /* ticks, for the line every ten */
    int exit_code;
    bool ready, ending, hurried; /* hurried: a second signal came */
};

/* serve_http.c: the transport's callbacks; `user` is the struct serve. */
void serve_callbacks(struct serve *serve, struct http_callbacks *out);
/* A snapshot; NULL while the model loads. */
const struct engine_stats *serve_stats(struct serve *serve, struct engine_stats *out);

/* serve_load.c */
int serve_load_start(struct serve *serve, uv_async_cb on_done, struct err *err);
/* Joins the thread; the loop thread calls it after `finished`. */
void serve_load_join(struct serve *serve);
/* Start-up lines: memory, configuration, phases. */
void serve_report(const struct serve *serve);
int serve_exit_code(const struct err *err);

#endif
