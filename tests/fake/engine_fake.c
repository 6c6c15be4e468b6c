/* engine.h without a model, for tests and benches of the front: every request yields its max_tokens tokens at a rate
 * set by the environment. Linked before the core library, so that the real engine is left out.
 *
 *   QUIRE_FAKE_STEP_US   pause between steps (0: as fast as the thread runs); every running sample gets a token a step
 *   QUIRE_FAKE_LOAD_MS   how long opening takes
 *   QUIRE_FAKE_DIE_AFTER steps after which the engine is dead (0: never)
 *   QUIRE_FAKE_REFUSE    a file: opening fails while it exists
 *   QUIRE_FAKE_STALL     1: never a step, heartbeat goes on; 2: no heartbeat either
 *
 * Tokens are ids whose text is plain ASCII, taken in turn, so the text of a request is the same every time. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "engine/base/buf.h"
#include "engine/base/check.h"
#include "engine/base/clock.h"
#include "engine/base/mem.h"
#include "engine/engine.h"
#include "engine/text/text.h"

#define FAKE_IDS 64

struct fake_sample {
    uint32_t tokens;
    enum finish_reason finished;
    int64_t first_ns;
    struct buf ids, text, ends, logprobs; /* what a request that does not stream is owed */
};

struct fake_request {
    struct fake_request *next;
    struct request *record;
    struct fake_sample *samples;
    int64_t arrival_ns, scheduled_ns;
    bool cancelled;
    int32_t unfinished;
};

struct engine {
    struct engine_options options;
    struct engine_info info;
    struct engine_stats stats; /* under mutex */
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    struct fake_request *arrived; /* under mutex */
    uint64_t *cancels;            /* under mutex: ids */
    size_t cancel_count, cancel_capacity;
    bool closing, draining, sleeping; /* under mutex */
    int64_t drain_ns;
    struct fake_request *running; /* engine thread */
    struct buf events;
    int32_t ids[FAKE_IDS]; /* ids with ASCII text */
    int32_t id_count;
    int64_t step_us, die_after, stall;
};

static int64_t environment(const char *name) {
    const char *text = getenv(name);
    return text ? atoll(text) : 0;
}

static void sleep_us(int64_t us) {
    struct timespec t = {us / 1000000, (us % 1000000) * 1000};
    nanosleep(&t, NULL);
}

static void sample_keep(struct fake_sample *s, const struct event_parts *p) {
    uint32_t base = (uint32_t)s->text.bytes;
    buf_append(&s->ids, p->ids, p->id_count * sizeof(int32_t));
    buf_append(&s->text, p->text, p->text_bytes);
    for (uint32_t i = 0; i < p->id_count; i++) {
        uint32_t end = base + p->text_ends[i];
        buf_append(&s->ends, &end, sizeof end);
    }
    if (p->logprobs) buf_append(&s->logprobs, p->logprobs, p->id_count * sizeof *p->logprobs);
}

static void sample_kept(const struct fake_sample *s, struct event_parts *p) {
    p->ids = (const int32_t *)(const void *)s->ids.data;
    p->id_count = (uint32_t)(s->ids.bytes / sizeof(int32_t));
    p->text = s->text.data;
    p->text_bytes = (uint32_t)s->text.bytes;
    p->text_ends = (const uint32_t *)(const void *)s->ends.data;
    p->logprobs = s->logprobs.bytes ? (const struct event_logprob *)(const void *)s->logprobs.data : NULL;
}

static void sample_event(struct engine *e, struct fake_request *r, int32_t index, int32_t id, enum finish_reason finish,
                         int64_t now_ns) {
    struct fake_sample *s = &r->samples[index];
    struct event_logprob logprob = {.id = id, .logprob = -0.5f, .rank = 1};
    size_t bytes = 0;
    const char *text = id >= 0 ? text_token(e->options.text, id, &bytes) : "";
    uint32_t end = (uint32_t)bytes;
    if (id >= 0 && s->tokens == 1) s->first_ns = now_ns;
    for (int32_t i = 0; i < r->record->logprobs && i < SAMPLE_LOGPROBS_MAX; i++, logprob.top_count++) {
        logprob.top_ids[i] = e->ids[(uint32_t)(s->tokens + (uint32_t)i) % (uint32_t)e->id_count];
        logprob.top_logprobs[i] = -0.5f - (float)i;
    }
    if (logprob.top_count) logprob.top_ids[0] = id;
    struct event_parts p = {.ids = &id,
                            .id_count = id >= 0,
                            .text = text,
                            .text_bytes = end,
                            .logprobs = r->record->logprobs >= 0 && id >= 0 ? &logprob : NULL,
                            .text_ends = &end};
    if (r->record->flags & REQUEST_FINAL_ONLY) {
        sample_keep(s, &p);
        if (finish == FINISH_NONE) return;
        sample_kept(s, &p);
    }
    p.head = (struct event){.sample = index,
                            .request_id = r->record->id,
                            .finish = (int32_t)finish,
                            .prompt_tokens = (int32_t)r->record->prompt.count,
                            .output_tokens = (int32_t)s->tokens,
                            .error_code = finish == FINISH_ERROR ? ERR_FATAL : 0,
                            .arrival_ns = r->arrival_ns,
                            .scheduled_ns = r->scheduled_ns,
                            .first_token_ns = s->first_ns,
                            .last_token_ns = s->tokens ? now_ns : 0};
    if (finish == FINISH_ERROR) {
        p.text = "the fake engine died";
        p.text_bytes = (uint32_t)strlen(p.text);
        p.id_count = 0;
    }
    event_append(&e->events, &p);
}

static void request_free(struct fake_request *r) {
    for (int32_t i = 0; i < r->record->n; i++) {
        buf_deinit(&r->samples[i].ids);
        buf_deinit(&r->samples[i].text);
        buf_deinit(&r->samples[i].ends);
        buf_deinit(&r->samples[i].logprobs);
    }
    mem_free(r->samples);
    mem_free(r->record);
    mem_free(r);
}

/* One token for every sample of a request, or the end that is due. */
static void request_step(struct engine *e, struct fake_request *r, enum finish_reason end, int64_t now_ns) {
    if (r->scheduled_ns == 0) r->scheduled_ns = now_ns;
    if (end == FINISH_NONE && r->cancelled) end = FINISH_ABORT;
    if (end == FINISH_NONE && r->record->deadline_ns && now_ns >= r->record->deadline_ns) end = FINISH_DEADLINE;
    for (int32_t i = 0; i < r->record->n; i++) {
        struct fake_sample *s = &r->samples[i];
        if (s->finished) continue;
        int32_t id = -1;
        enum finish_reason finish = end;
        if (end == FINISH_NONE) {
            id = e->ids[s->tokens % (uint32_t)e->id_count];
            s->tokens++;
            if ((int32_t)s->tokens >= r->record->max_tokens) finish = FINISH_LENGTH;
        }
        sample_event(e, r, i, id, finish, now_ns);
        if (finish == FINISH_NONE) continue;
        s->finished = finish;
        if (--r->unfinished == 0) end = finish;
    }
}

static enum finish_reason request_reason(const struct fake_request *r) {
    return r->samples[r->record->n - 1].finished;
}

/* All running requests make a step; `end` ends them. */
static void step(struct engine *e, enum finish_reason end) {
    int64_t now_ns = clock_now_ns();
    int32_t running = 0;
    uint64_t tokens = 0, prompt = 0, finished[FINISH_REASON_COUNT] = {0};
    for (struct fake_request **at = &e->running; *at;) {
        struct fake_request *r = *at;
        if (r->scheduled_ns == 0) prompt += r->record->prompt.count;
        tokens += (uint64_t)r->unfinished;
        request_step(e, r, end, now_ns);
        if (r->unfinished) {
            running++;
            at = &r->next;
            continue;
        }
        finished[request_reason(r)]++;
        *at = r->next;
        request_free(r);
    }
    pthread_mutex_lock(&e->mutex);
    e->stats.running = running;
    e->stats.pages_held = running < e->stats.pages_total ? running : e->stats.pages_total;
    e->stats.pages_free = e->stats.pages_total - e->stats.pages_held;
    e->stats.generation_tokens += tokens;
    e->stats.prompt_tokens += prompt;
    e->stats.steps++;
    e->stats.step_tokens_bucket[1]++;
    e->stats.step_tokens_sum += tokens;
    e->stats.last_step_ns = now_ns;
    for (int i = 0; i < FINISH_REASON_COUNT; i++) e->stats.finished[i] += finished[i];
    pthread_mutex_unlock(&e->mutex);
    /* Counted first, as the engine does: who has the last event of a request finds it gone. */
    if (e->events.bytes) e->options.on_events(e->options.user, e->events.data, e->events.bytes);
    buf_clear(&e->events);
}

static void wait_for_work(struct engine *e) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_nsec += 100 * 1000000;
    if (until.tv_nsec >= 1000000000) {
        until.tv_nsec -= 1000000000;
        until.tv_sec++;
    }
    e->sleeping = true;
    pthread_cond_timedwait(&e->wake, &e->mutex, &until);
    e->sleeping = false;
}

/* Leaves the mutex, then wakes the thread if it sleeps: one wake-up for many arrivals. */
static void unlock_and_wake(struct engine *e) {
    bool wake = e->sleeping;
    e->sleeping = false;
    pthread_mutex_unlock(&e->mutex);
    if (wake) pthread_cond_signal(&e->wake);
}

/* Takes arrivals and cancels; called and left with the mutex held. */
static void take_news(struct engine *e) {
    struct fake_request **last = &e->running;
    while (*last) last = &(*last)->next;
    *last = e->arrived;
    for (struct fake_request *r = e->arrived; r; r = r->next) e->stats.waiting--, e->stats.running++;
    e->arrived = NULL;
    for (size_t i = 0; i < e->cancel_count; i++)
        for (struct fake_request *r = e->running; r; r = r->next)
            if (r->record->id == e->cancels[i]) r->cancelled = true;
    e->cancel_count = 0;
}

static void engine_die(struct engine *e) {
    step(e, FINISH_ERROR);
    pthread_mutex_lock(&e->mutex);
    e->stats.dead = true;
    snprintf(e->stats.dead_text, sizeof e->stats.dead_text, "the fake engine was told to die");
    pthread_mutex_unlock(&e->mutex);
}

static void *engine_thread(void *argument) {
    struct engine *e = argument;
    bool closing = false;
    while (!closing) {
        pthread_mutex_lock(&e->mutex);
        bool idle = !e->arrived && !e->running && !e->cancel_count && !e->closing;
        if (idle || (e->stall && !e->closing)) wait_for_work(e);
        if (!e->stats.dead) take_news(e);
        closing = e->closing;
        bool late = e->draining && clock_now_ns() >= e->drain_ns;
        if (e->stall < 2) e->stats.heartbeat_ns = clock_now_ns();
        pthread_mutex_unlock(&e->mutex);
        if (closing || e->stats.dead) continue;
        if (e->stall || !e->running) continue;
        if (e->die_after && (int64_t)e->stats.steps >= e->die_after) {
            engine_die(e);
            continue;
        }
        step(e, late ? FINISH_SHUTDOWN : FINISH_NONE);
        if (e->step_us && e->running) sleep_us(e->step_us);
    }
    step(e, FINISH_SHUTDOWN);
    return NULL;
}

int engine_set_text(struct engine *e, const struct text *text, struct err *err) {
    e->options.text = text;
    e->info.vocab = text_info(text)->vocab;
    for (int32_t id = 0; id < text_info(text)->vocab && e->id_count < FAKE_IDS; id++) {
        size_t bytes;
        const char *token = text_token(text, id, &bytes);
        bool plain = bytes > 0 && bytes < 12 && !text_token_special(text, id);
        for (size_t i = 0; i < bytes && plain; i++) plain = token[i] >= ' ' && token[i] < 0x7f;
        if (plain) e->ids[e->id_count++] = id;
    }
    CHECK(e->id_count > 0);
    return 0;
}

int engine_open(const struct engine_options *options, struct engine **out, struct err *err) {
    const char *refuse = getenv("QUIRE_FAKE_REFUSE");
    if (refuse && access(refuse, F_OK) == 0) return err_set(err, ERR_NOMEM, "the fake engine was told to refuse");
    struct engine *e = mem_zalloc(1, sizeof *e);
    e->options = *options;
    if (!e->options.max_num_seqs) e->options.max_num_seqs = 64;
    if (!e->options.max_num_batched_tokens) e->options.max_num_batched_tokens = 256;
    if (e->options.kv_dtype == DTYPE_COUNT) e->options.kv_dtype = DTYPE_F16;
    e->step_us = environment("QUIRE_FAKE_STEP_US");
    e->die_after = environment("QUIRE_FAKE_DIE_AFTER");
    e->stall = environment("QUIRE_FAKE_STALL");
    sleep_us(environment("QUIRE_FAKE_LOAD_MS") * 1000);
    int32_t context = options->max_model_len ? options->max_model_len : 8192;
    e->info = (struct engine_info){.backend = {.device = DEVICE_CPU, .name = "fake", .isa = "none", .threads = 1},
                                   .architecture = "fake",
                                   .weight_types = "none",
                                   .max_model_len = context,
                                   .model_context = context,
                                   .page_size = options->block_size,
                                   .pages_total = 1024,
                                   .max_num_seqs = e->options.max_num_seqs,
                                   .max_num_batched_tokens = e->options.max_num_batched_tokens,
                                   .kv_dtype = e->options.kv_dtype};
    e->stats = (struct engine_stats){.pages_total = 1024, .pages_free = 1024, .heartbeat_ns = clock_now_ns()};
    pthread_mutex_init(&e->mutex, NULL);
    pthread_cond_init(&e->wake, NULL);
    if (pthread_create(&e->thread, NULL, engine_thread, e) != 0) {
        mem_free(e);
        return err_set(err, ERR_IO, "cannot start a thread");
    }
    if (options->text) engine_set_text(e, options->text, err);
    *out = e;
    return 0;
}

void engine_close(struct engine *e) {
    pthread_mutex_lock(&e->mutex);
    e->closing = true;
    unlock_and_wake(e);
    pthread_join(e->thread, NULL);
    while (e->running) { /* of a dead engine */
        struct fake_request *r = e->running;
        e->running = r->next;
        request_free(r);
    }
    buf_deinit(&e->events);
    mem_free(e->cancels);
    mem_free(e);
}

const struct engine_info *engine_info(const struct engine *e) {
    return &e->info;
}

int engine_submit(struct engine *e, const struct request *request, struct err *err) {
    int code = request_check(request, request->bytes, e->info.vocab, err);
    if (code) return code;
    if ((int64_t)request->prompt.count + 1 > e->info.max_model_len)
        return err_set_field(err, ERR_INVALID, "prompt", "the prompt has %u tokens, the context holds %d",
                             request->prompt.count, e->info.max_model_len);
    pthread_mutex_lock(&e->mutex);
    if (e->draining || e->stats.dead)
        code = err_set(err, ERR_CLOSED, "the engine takes no requests any more");
    else if (e->stats.running + e->stats.waiting >= e->options.max_queued_requests + e->options.max_num_seqs)
        code = err_set(err, ERR_EXHAUSTED, "the queue is full");
    if (code) {
        e->stats.refused++;
        pthread_mutex_unlock(&e->mutex);
        return code;
    }
    struct fake_request *r = mem_zalloc(1, sizeof *r);
    r->record = mem_alloc(request->bytes);
    memcpy(r->record, request, request->bytes);
    r->samples = mem_zalloc((size_t)request->n, sizeof *r->samples);
    r->unfinished = request->n;
    r->arrival_ns = clock_now_ns();
    struct fake_request **last = &e->arrived;
    while (*last) last = &(*last)->next;
    *last = r;
    e->stats.submitted++;
    e->stats.waiting++;
    unlock_and_wake(e);
    return 0;
}

void engine_cancel(struct engine *e, uint64_t request_id) {
    pthread_mutex_lock(&e->mutex);
    if (e->cancel_count == e->cancel_capacity) {
        e->cancel_capacity = e->cancel_capacity ? e->cancel_capacity * 2 : 64;
        e->cancels = mem_realloc(e->cancels, e->cancel_capacity * sizeof *e->cancels);
    }
    e->cancels[e->cancel_count++] = request_id;
    unlock_and_wake(e);
}

void engine_drain(struct engine *e, int64_t deadline_ns) {
    pthread_mutex_lock(&e->mutex);
    e->draining = true;
    e->drain_ns = deadline_ns;
    unlock_and_wake(e);
}

void engine_stats(struct engine *e, struct engine_stats *out) {
    pthread_mutex_lock(&e->mutex);
    *out = e->stats;
    pthread_mutex_unlock(&e->mutex);
}

int32_t engine_retry_after_s(struct engine *e) {
    return 1;
}
void engine_reset_prefix_cache(struct engine *e) {}
int engine_audit(struct engine *e, struct err *err) {
    return 0;
}
