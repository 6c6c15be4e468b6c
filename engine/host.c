#include "engine/host.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include "engine/base/arith.h"
#include "engine/base/clock.h"
#include "engine/base/log.h"
#include "engine/base/mem.h"
#include "engine/text/text.h"

#define BEAT_MS         50 /* twice as often as is promised, so that a late one is in time */
#define FIGURES_MS      3  /* as old as the front's figures are while there is traffic; a look takes 2 µs */
#define ORDERS_KEEP     ((size_t)1 << 20)
#define ORDER_BYTES_MAX (sizeof(struct order) + 64 + 8 * (size_t)REQUEST_PROMPT_MAX) /* longer than any request */

/* The calling thread keeps the link and the heartbeat; a thread of its own loads, so that the heart beats meanwhile.
 * Events come on the engine's thread, refusals on ours: `mutex` orders their writes. */
struct host {
    struct link *link;
    const struct host_options *options;
    pthread_mutex_t mutex;
    struct buf out; /* under mutex: one news record */
    struct buf orders;
    struct engine *engine;
    struct text *text;
    pthread_t loader;
    atomic_bool loaded;
    int load_code;
    struct err load_err;
    int64_t busy_since_ns; /* since when there is work without a pause; 0: idle */
    bool closing;
    atomic_bool stirred; /* events went since the figures were last published */
    int loaded_fd;
};

/* ---- news ------------------------------------------------------------------------------------------------------- */

static void news_write(struct host *host, enum news_kind kind, const void *body, size_t bytes) {
    struct news head = {(uint32_t)(sizeof head + bytes), kind};
    buf_clear(&host->out);
    buf_append(&host->out, &head, sizeof head);
    buf_append(&host->out, body, bytes);
    link_write(host->link, host->out.data, host->out.bytes);
}

/* On the engine's thread. */
static void on_events(void *user, const void *records, size_t bytes) {
    struct host *host = user;
    atomic_store_explicit(&host->stirred, true, memory_order_relaxed);
    /* Figures first: who reads them when he has an answer finds it counted. */
    struct engine_stats stats;
    pthread_mutex_lock(&host->mutex);
    engine_stats(host->engine, &stats);
    link_set_stats(host->link, &stats);
    news_write(host, NEWS_EVENTS, records, bytes);
    pthread_mutex_unlock(&host->mutex);
}

static void on_keys(void *user, const struct key_change *changes, size_t count) {
    struct host *host = user;
    pthread_mutex_lock(&host->mutex);
    news_write(host, NEWS_KEYS, changes, count * sizeof *changes);
    pthread_mutex_unlock(&host->mutex);
}

/* The engine would not have it although its front thought so: each sample ends with the reason. */
static void refusal_write(struct host *host, const struct request *request, const struct err *why) {
    struct buf events = {0};
    int32_t n = (int32_t)i64_max(1, i64_min(request->n, REQUEST_SAMPLES_MAX));
    for (int32_t i = 0; i < n; i++) {
        struct event_parts parts = {.head = {.sample = i,
                                             .request_id = request->id,
                                             .finish = FINISH_ERROR,
                                             .error_code = why->code == ERR_FATAL ? ERR_CLOSED : why->code},
                                    .text = why->text,
                                    .text_bytes = (uint32_t)strlen(why->text)};
        event_append(&events, &parts);
    }
    pthread_mutex_lock(&host->mutex);
    news_write(host, NEWS_EVENTS, events.data, events.bytes);
    pthread_mutex_unlock(&host->mutex);
    buf_deinit(&events);
}

/* ---- orders ----------------------------------------------------------------------------------------------------- */

static void submit_take(struct host *host, const struct order *order) {
    struct err err;
    size_t bytes = order->bytes - sizeof *order;
    const struct request *request = (const void *)(order + 1);
    if (bytes < sizeof *request || request->bytes > bytes) return; /* not even an id that could be answered */
    if (engine_submit(host->engine, request, &err)) refusal_write(host, request, &err);
}

static void order_take(struct host *host, const struct order *order) {
    if (order->kind == ORDER_CLOSE) host->closing = true;
    if (!host->engine) return; /* none other comes before READY */
    switch (order->kind) {
    case ORDER_SUBMIT:
        submit_take(host, order);
        break;
    case ORDER_CANCEL:
        engine_cancel(host->engine, order->request_id);
        break;
    case ORDER_DRAIN:
        engine_drain(host->engine, order->deadline_ns);
        break;
    case ORDER_RESET_PREFIX:
        engine_reset_prefix_cache(host->engine);
        break;
    default:
        break;
    }
}

/* Takes whole orders; false: they make no sense. */
static bool orders_take(struct host *host) {
    struct buf *in = &host->orders;
    size_t at = 0;
    if (!link_read(host->link, in)) return false;
    while (in->bytes - at >= sizeof(struct order)) {
        const struct order *order = (const void *)(in->data + at);
        if (order->bytes < sizeof *order || order->bytes % 8 || order->bytes > ORDER_BYTES_MAX) return false;
        if (order->bytes > in->bytes - at) break;
        order_take(host, order);
        at += order->bytes;
    }
    if (at) memmove(in->data, in->data + at, in->bytes - at);
    in->bytes -= at;
    if (!in->bytes && in->capacity > ORDERS_KEEP) buf_deinit(in);
    return true;
}

/* ---- state ------------------------------------------------------------------------------------------------------ */

/* The heart is the engine's thread's while it idles. While it works, a turn may take as long as a step may: then our
 * own says that the process lives, and the step's begin how long nothing was finished. */
static void beat(struct host *host, const struct engine_stats *stats) {
    int64_t now_ns = clock_now_ns();
    if (!stats || stats->running + stats->waiting + stats->queued_tokens == 0) {
        host->busy_since_ns = 0;
        link_beat(host->link, stats ? stats->heartbeat_ns : now_ns, 0);
        return;
    }
    if (!host->busy_since_ns) host->busy_since_ns = now_ns;
    link_beat(host->link, now_ns, i64_max(stats->last_step_ns, host->busy_since_ns));
}

static void state_publish(struct host *host, struct engine_stats *stats) {
    pthread_mutex_lock(&host->mutex);
    engine_stats(host->engine, stats);
    link_set_stats(host->link, stats);
    link_flush(host->link);
    pthread_mutex_unlock(&host->mutex);
    beat(host, stats);
}

static void host_wait(struct host *host) {
    struct pollfd fd = {.fd = link_wake_fd(host->link), .events = POLLIN};
    bool stirred = atomic_exchange_explicit(&host->stirred, false, memory_order_relaxed);
    if (link_sleep(host->link)) poll(&fd, 1, stirred ? FIGURES_MS : BEAT_MS);
    link_woken(host->link);
}

static bool orphaned(const struct host *host) {
    return host->options->parent_pid && getppid() != host->options->parent_pid;
}

/* ---- life ------------------------------------------------------------------------------------------------------- */

struct text_load {
    const struct host_options *options;
    struct text *text;
    int code;
    struct err err;
};

static void *text_thread(void *argument) {
    struct text_load *load = argument;
    load->code = load->options->text_open(load->options->user, &load->text, &load->err);
    return NULL;
}

/* Weights and text side by side: neither needs the other until the first request. */
static void *load_thread(void *argument) {
    struct host *host = argument;
    struct engine_options options = host->options->engine;
    struct text_load load = {.options = host->options};
    bool wanted = host->options->text_open != NULL;
    pthread_t text;
    options.on_events = on_events;
    options.on_keys = host->options->keys ? on_keys : NULL;
    options.user = host;
    options.prefix_key = link_prefix_key(host->link);
    bool beside = wanted && pthread_create(&text, NULL, text_thread, &load) == 0;
    host->load_code = engine_open(&options, &host->engine, &host->load_err);
    if (beside)
        pthread_join(text, NULL);
    else if (wanted)
        text_thread(&load);
    host->text = load.text;
    if (!host->load_code && load.code) {
        host->load_code = load.code;
        host->load_err = load.err;
    }
    if (!host->load_code && load.text) host->load_code = engine_set_text(host->engine, load.text, &host->load_err);
    atomic_store(&host->loaded, true);
    uint64_t one = 1;
    if (write(host->loaded_fd, &one, sizeof one) < 0) log_warning("cannot tell that the model is loaded", "");
    return NULL;
}

/* Until the engine is there or could not be opened; false: the front is gone, and nobody waits for either. */
static bool load_wait(struct host *host) {
    while (!atomic_load(&host->loaded)) {
        beat(host, NULL);
        if (orphaned(host)) return false;
        struct pollfd fd = {.fd = host->loaded_fd, .events = POLLIN};
        poll(&fd, 1, BEAT_MS);
    }
    pthread_join(host->loader, NULL);
    return true;
}

/* Serves until it is told to end or cannot go on. */
static int host_serve(struct host *host, struct err *err) {
    struct engine_stats stats;
    link_set_info(host->link, engine_info(host->engine));
    state_publish(host, &stats);
    link_set_phase(host->link, LINK_READY, NULL);
    for (;;) {
        host_wait(host);
        if (orphaned(host)) return err_set(err, ERR_CLOSED, "the front is gone");
        if (!orders_take(host)) return err_set(err, ERR_FATAL, "the front wrote nonsense into the link");
        if (host->closing) return 0;
        state_publish(host, &stats);
        if (stats.dead) return err_set(err, ERR_FATAL, "%s", stats.dead_text);
    }
}

/* What is still to be read by the front has a moment to get there. */
static void events_flush(struct host *host) {
    pthread_mutex_lock(&host->mutex);
    for (int i = 0; i < 100 && link_flush(host->link); i++) poll(NULL, 0, 10);
    pthread_mutex_unlock(&host->mutex);
}

static int host_life(struct host *host, struct err *err) {
    link_set_phase(host->link, LINK_LOADING, NULL);
    int code = pthread_create(&host->loader, NULL, load_thread, host);
    if (code) return err_set(err, ERR_IO, "cannot start a thread: %s", strerror(code));
    if (!load_wait(host)) _exit(0); /* only a process has a parent that can be gone */
    if (host->load_code) {
        *err = host->load_err;
        return host->load_code;
    }
    return host_serve(host, err);
}

int host_run(struct link *link, const struct host_options *options, struct err *err) {
    struct host host = {.link = link, .options = options, .loaded_fd = eventfd(0, EFD_CLOEXEC)};
    pthread_mutex_init(&host.mutex, NULL);
    int rc = host_life(&host, err);
    bool ready = link_phase(link) == LINK_READY;
    if (rc && ready) { /* told at once: an engine with a fault may take long to close, or for ever */
        events_flush(&host);
        link_set_phase(link, LINK_DEAD, err);
        if (options->parent_pid) return rc; /* the process ends as it is */
    }
    if (host.engine) engine_close(host.engine);
    if (host.text) text_close(host.text);
    events_flush(&host);
    if (rc && !ready) link_set_phase(link, LINK_FAILED, err);
    if (!rc) link_set_phase(link, LINK_ENDED, NULL);
    if (host.loaded_fd >= 0) close(host.loaded_fd);
    pthread_mutex_destroy(&host.mutex);
    buf_deinit(&host.out);
    buf_deinit(&host.orders);
    return rc;
}
