/* engine_client.h: what a client of a whole engine of one or more CPU ranks gets. Tests only. */
#ifndef QUIRE_TESTS_ENGINE_CLIENT_H
#define QUIRE_TESTS_ENGINE_CLIENT_H

#include <pthread.h>
#include <time.h>

#include "engine/engine.h"
#include "tests/unit/model_run.h"

enum { REQUESTS_MAX = 40, SAMPLES = 2, TOKENS_MAX = 64 };

struct sample {
    int32_t ids[TOKENS_MAX], count, finish, error_code;
};

struct client {
    pthread_mutex_t mutex; /* guards the rest */
    pthread_cond_t moved;
    struct sample samples[REQUESTS_MAX][SAMPLES]; /* by request id */
    int32_t ends;
};

static inline void on_events(void *user, const void *records, size_t bytes) {
    struct client *c = user;
    pthread_mutex_lock(&c->mutex);
    for (size_t at = 0; at < bytes;) {
        const struct event *e = (const struct event *)(const void *)((const char *)records + at);
        struct sample *s = &c->samples[e->request_id][e->sample];
        const int32_t *ids = record_at(e, e->ids);
        for (uint32_t i = 0; i < e->ids.count && s->count < TOKENS_MAX; i++) s->ids[s->count++] = ids[i];
        s->finish = e->finish;
        s->error_code = e->error_code;
        c->ends += e->finish != FINISH_NONE;
        at += e->bytes;
    }
    pthread_cond_signal(&c->moved);
    pthread_mutex_unlock(&c->mutex);
}

/* Until so many samples have ended. */
static inline void client_wait(struct client *c, int32_t ends) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 800; /* sanitizers take their time */
    pthread_mutex_lock(&c->mutex);
    int rc = 0;
    while (c->ends < ends && rc == 0) rc = pthread_cond_timedwait(&c->moved, &c->mutex, &until);
    pthread_mutex_unlock(&c->mutex);
    assert_int_equal(rc, 0);
}

static inline struct engine *engine_start(const char *path, struct client *c, int32_t ranks, struct engine_options o) {
    struct engine *engine;
    struct err err = {0};
    *c = (struct client){0};
    pthread_mutex_init(&c->mutex, NULL);
    pthread_cond_init(&c->moved, NULL);
    o.model_path = path;
    o.backend = (struct backend_options){.device = DEVICE_CPU, .threads = 2, .cpu_activations = CPU_ACTIVATIONS_F32};
    o.on_events = on_events;
    o.user = c;
    o.dtype = o.kv_dtype = DTYPE_COUNT;
    o.max_queued_requests = 1000;
    o.prefix_caching = true;
    o.ranks = ranks;
    if (engine_open(&o, &engine, &err)) fail_msg("%d ranks: %s", ranks, err.text);
    assert_int_equal(engine_info(engine)->ranks, ranks);
    assert_string_equal(engine_info(engine)->comm, ranks == 1 ? "local" : "shm");
    return engine;
}

static inline void engine_end(struct engine *engine, struct client *c) {
    engine_close(engine);
    pthread_cond_destroy(&c->moved);
    pthread_mutex_destroy(&c->mutex);
}

#endif
