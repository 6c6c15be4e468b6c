#include "engine/engine.h"

#include <string.h>

#include "engine/base/check.h"
#include "engine/base/clock.h"
#include "engine/base/mem.h"
#include "engine/engine_private.h"

/* ---- life ---------------------------------------------------------------------------------------------------------
 */

static void engine_free(struct engine *engine) {
    if (engine->sched) sched_close(engine->sched);
    ranks_close(engine->ranks);
    if (engine->files) model_files_close(engine->files);
    arena_deinit(&engine->arenas[0]);
    arena_deinit(&engine->arenas[1]);
    buf_deinit(&engine->events);
    buf_deinit(&engine->keys);
    queue_deinit(&engine->inbox);
    pthread_cond_destroy(&engine->answered);
    pthread_mutex_destroy(&engine->mutex);
    mem_free(engine);
}

int engine_open(const struct engine_options *options, struct engine **out, struct err *err) {
    struct engine *engine = mem_zalloc(1, sizeof *engine);
    engine->options = *options;
    queue_init(&engine->inbox);
    pthread_mutex_init(&engine->mutex, NULL);
    pthread_cond_init(&engine->answered, NULL);
    arena_init(&engine->arenas[0]);
    arena_init(&engine->arenas[1]);
    int rc = engine_build(engine, err);
    if (!rc && options->text) rc = engine_take_text(engine, options->text, err);
    if (rc) goto fail;
    atomic_store(&engine->heartbeat_ns, clock_now_ns());
    if (pthread_create(&engine->thread, NULL, engine_thread, engine) != 0) {
        rc = err_set(err, ERR_IO, "cannot start the engine's thread");
        goto fail;
    }
    *out = engine;
    return 0;
fail:
    engine_free(engine);
    return rc;
}

static struct message *message_new(enum message_kind kind) {
    struct message *message = mem_zalloc(1, sizeof *message);
    message->kind = kind;
    return message;
}

void engine_close(struct engine *engine) {
    if (!engine) return;
    atomic_store(&engine->closed, true);
    queue_push(&engine->inbox, &message_new(MESSAGE_CLOSE)->node);
    pthread_join(engine->thread, NULL);
    engine_free(engine);
}

/* Pushes a message that is answered, waits for the answer and frees it. */
static int message_ask(struct engine *engine, struct message *message, struct err *err) {
    message->err = err;
    queue_push(&engine->inbox, &message->node);
    pthread_mutex_lock(&engine->mutex);
    while (!message->done) pthread_cond_wait(&engine->answered, &engine->mutex);
    pthread_mutex_unlock(&engine->mutex);
    int rc = message->result;
    mem_free(message);
    return rc;
}

int engine_set_text(struct engine *engine, const struct text *text, struct err *err) {
    struct message *message = message_new(MESSAGE_TEXT);
    message->text = text;
    return message_ask(engine, message, err);
}

/* Rows of the model's table beyond the tokenizer's ids are padding: never drawn, never taken from a client. */
int engine_take_text(struct engine *engine, const struct text *text, struct err *err) {
    int32_t vocab = text_info(text)->vocab;
    int rc = 0;
    engine->options.text = text;
    if (vocab < engine->info.vocab) {
        engine->info.vocab = vocab;
        rc = ranks_set_sample_vocab(engine->ranks, vocab, err);
    }
    return rc ? rc : ranks_warm(engine->ranks, err);
}

const struct engine_info *engine_info(const struct engine *engine) {
    return &engine->info;
}

/* ---- requests -----------------------------------------------------------------------------------------------------
 */

int engine_submit(struct engine *engine, const struct request *request, struct err *err) {
    int rc = request_check(request, request->bytes, engine->info.vocab, err);
    const struct engine_info *info = &engine->info;
    if (!rc) rc = request_fits(request, info->max_model_len, info->page_size, info->pages_total, err);
    if (!rc && atomic_load(&engine->closed)) rc = err_set(err, ERR_CLOSED, "the server takes no new requests");
    if (!rc &&
        atomic_load(&engine->inbox_requests) + atomic_load(&engine->queued) >= engine->options.max_queued_requests)
        rc = err_set(err, ERR_EXHAUSTED, "the queue is full: %d requests wait", engine->options.max_queued_requests);
    if (rc) {
        atomic_fetch_add(&engine->refused, 1);
        return rc;
    }
    struct message *message = message_new(MESSAGE_SUBMIT);
    message->request = mem_alloc(request->bytes);
    memcpy(message->request, request, request->bytes);
    atomic_fetch_add(&engine->submitted, 1);
    atomic_fetch_add(&engine->inbox_requests, 1);
    atomic_fetch_add(&engine->prompt_tokens_left, request->prompt.count);
    atomic_fetch_add(&engine->output_tokens_left, (int64_t)request->n * request->max_tokens);
    queue_push(&engine->inbox, &message->node);
    return 0;
}

void engine_cancel(struct engine *engine, uint64_t request_id) {
    struct message *message = message_new(MESSAGE_CANCEL);
    message->request_id = request_id;
    queue_push(&engine->inbox, &message->node);
}

void engine_drain(struct engine *engine, int64_t deadline_ns) {
    struct message *message = message_new(MESSAGE_DRAIN);
    message->deadline_ns = deadline_ns;
    atomic_store(&engine->closed, true);
    queue_push(&engine->inbox, &message->node);
}

void engine_reset_prefix_cache(struct engine *engine) {
    queue_push(&engine->inbox, &message_new(MESSAGE_RESET_PREFIX)->node);
}

int engine_audit(struct engine *engine, struct err *err) {
    return message_ask(engine, message_new(MESSAGE_AUDIT), err);
}

/* ---- figures ------------------------------------------------------------------------------------------------------
 */

void engine_stats(struct engine *engine, struct engine_stats *out) {
    pthread_mutex_lock(&engine->mutex);
    *out = engine->snapshot;
    pthread_mutex_unlock(&engine->mutex);
    out->submitted = atomic_load(&engine->submitted);
    out->refused = atomic_load(&engine->refused);
    out->heartbeat_ns = atomic_load(&engine->heartbeat_ns);
    out->waiting += atomic_load(&engine->inbox_requests);
    out->queued_tokens = atomic_load(&engine->prompt_tokens_left) + atomic_load(&engine->output_tokens_left);
}

/* The time that the tokens promised to requests in the engine take at the measured rates: when a newcomer would surely
 * find room. Half of the promised output is counted, since most samples end before max_tokens. */
int32_t engine_retry_after_s(struct engine *engine) {
    struct engine_stats stats;
    engine_stats(engine, &stats);
    double seconds = 0;
    if (stats.prefill_tokens_per_s > 0)
        seconds += (double)atomic_load(&engine->prompt_tokens_left) / stats.prefill_tokens_per_s;
    if (stats.decode_tokens_per_s > 0)
        seconds += 0.5 * (double)atomic_load(&engine->output_tokens_left) / stats.decode_tokens_per_s;
    if (seconds < 1) return 1;
    return seconds > 600 ? 600 : (int32_t)(seconds + 0.999);
}
