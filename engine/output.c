#include "engine/output.h"

#include <string.h>

#include "engine/base/mem.h"

struct admission *admission_open(const struct request *request) {
    struct admission *a = mem_zalloc(1, sizeof *a);
    a->id = request->id;
    a->flags = request->flags;
    a->n = a->samples_left = request->n;
    a->prompt_tokens = (int32_t)request->prompt.count;
    a->max_tokens = request->max_tokens;
    a->min_tokens = request->min_tokens;
    a->logprobs = request->logprobs;
    a->eos_count = (int32_t)request->eos_ids.count;
    a->stop_count = (int32_t)request->stops.count;
    size_t stops_bytes = request->stops.count * sizeof(struct stop_string), eos_bytes = request->eos_ids.count * 4;
    size_t bytes = stops_bytes + eos_bytes, one;
    for (uint32_t i = 0; i < request->stops.count; i++) request_stop(request, i, &one), bytes += one;
    a->block = mem_alloc(bytes);
    a->stops = a->block;
    a->eos_ids = (int32_t *)(void *)((char *)a->block + stops_bytes);
    if (eos_bytes) memcpy(a->eos_ids, record_at(request, request->eos_ids), eos_bytes);
    char *at = (char *)a->block + stops_bytes + eos_bytes;
    for (uint32_t i = 0; i < request->stops.count; i++) {
        const char *stop = request_stop(request, i, &one);
        memcpy(at, stop, one);
        a->stops[i] = (struct stop_string){.text = at, .bytes = one};
        at += one;
    }
    return a;
}

void admission_close(struct admission *admission) {
    mem_free(admission->block);
    mem_free(admission);
}

struct output *output_open(struct admission *admission, int32_t sample) {
    struct output *o = mem_zalloc(1, sizeof *o);
    o->admission = admission;
    o->sample = sample;
    detok_init(&o->detok, !(admission->flags & REQUEST_KEEP_SPECIAL));
    stops_init(&o->stops, admission->stops, admission->stop_count);
    return o;
}

void output_close(struct output *o) {
    stops_deinit(&o->stops);
    buf_deinit(&o->piece);
    buf_deinit(&o->ids);
    buf_deinit(&o->text);
    buf_deinit(&o->logprobs);
    buf_deinit(&o->text_ends);
    mem_free(o);
}

static void logprob_push(struct output *o, const struct sample_result *token) {
    struct event_logprob lp = {
        .id = token->id, .logprob = token->logprob, .rank = token->rank, .top_count = (uint32_t)token->top_count};
    memcpy(lp.top_ids, token->top_ids, sizeof lp.top_ids);
    memcpy(lp.top_logprobs, token->top_logprobs, sizeof lp.top_logprobs);
    buf_append(&o->logprobs, &lp, sizeof lp);
}

static void stop_id_note(struct output *o, int32_t id) {
    o->stop_kind = STOP_ID;
    o->stop_value = id;
    if (o->admission->flags & REQUEST_IGNORE_EOS) return;
    for (int32_t i = 0; i < o->admission->eos_count; i++)
        if (o->admission->eos_ids[i] == id) o->stop_kind = STOP_EOS;
}

/* Text of one token through the detokenizer and the stop strings. Stop strings do not count before min_tokens. */
static bool text_push(struct output *o, const struct text *text, int32_t id) {
    const struct admission *a = o->admission;
    if (a->stop_count == 0 || o->tokens <= a->min_tokens) {
        detok_push(&o->detok, text, id, &o->text);
        return false;
    }
    int32_t match = -1;
    buf_clear(&o->piece);
    detok_push(&o->detok, text, id, &o->piece);
    if (o->piece.bytes)
        match = stops_push(&o->stops, o->piece.data, o->piece.bytes, a->flags & REQUEST_KEEP_STOP, &o->text);
    if (match < 0) return false;
    o->stop_kind = STOP_STRING;
    o->stop_value = match;
    return true;
}

bool output_push(struct output *o, const struct text *text, const struct sample_result *token, bool ends) {
    const uint32_t flags = o->admission->flags;
    bool matched = false;
    o->tokens++;
    buf_append(&o->ids, &token->id, sizeof token->id);
    if (o->admission->logprobs >= 0) logprob_push(o, token);
    if (ends) stop_id_note(o, token->id);
    if (!(flags & REQUEST_NO_TEXT) && (!ends || (flags & REQUEST_KEEP_STOP))) matched = text_push(o, text, token->id);
    uint32_t end = (uint32_t)o->text.bytes;
    buf_append(&o->text_ends, &end, sizeof end);
    return matched;
}

void output_finish(struct output *o) {
    struct buf tail = {0};
    detok_flush(&o->detok, &tail);
    if (tail.bytes && stops_push(&o->stops, tail.data, tail.bytes, false, &o->text) >= 0) {
        buf_deinit(&tail);
        return;
    }
    buf_deinit(&tail);
    stops_flush(&o->stops, &o->text);
}

bool output_plain(const struct output *o) {
    const struct admission *a = o->admission;
    return a->logprobs < 0 && a->stop_count == 0 && !(a->flags & REQUEST_FINAL_ONLY) && o->ids.bytes == 0 &&
           o->text.bytes == 0;
}

/* The record is written where it will be sent from: the head, the id, where its text ends, the text. A step of 256
 * tokens takes 256 of these, so none of the output's own buffers is touched. */
void output_emit_plain(struct output *o, const struct text *text, int32_t id, const struct event *head,
                       struct buf *events) {
    static const char zeros[8] = {0};
    struct event e = *head;
    const size_t start = events->bytes;
    const int32_t tail[2] = {id, 0}; /* the id, the end of its text */
    e.request_id = o->admission->id;
    e.sample = o->sample;
    e.output_tokens = ++o->tokens;
    e.prompt_tokens = o->admission->prompt_tokens;
    e.ids = (struct span){(uint32_t)sizeof e, 1};
    e.text_ends = (struct span){(uint32_t)sizeof e + 4, 1};
    buf_append(events, &e, sizeof e);
    buf_append(events, tail, sizeof tail);
    const size_t text_at = events->bytes;
    if (!(o->admission->flags & REQUEST_NO_TEXT)) detok_push(&o->detok, text, id, events);
    const uint32_t text_bytes = (uint32_t)(events->bytes - text_at);
    buf_append(events, zeros, (size_t)(-(events->bytes - start) & 7));
    struct event *written = (struct event *)(void *)(events->data + start);
    if (text_bytes) written->text = (struct span){(uint32_t)(text_at - start), text_bytes};
    written->bytes = (uint32_t)(events->bytes - start);
    memcpy(events->data + start + sizeof e + 4, &text_bytes, 4);
}

void output_emit(struct output *o, const struct event *head, struct buf *events) {
    struct event_parts parts = {.head = *head};
    parts.head.request_id = o->admission->id;
    parts.head.sample = o->sample;
    parts.head.output_tokens = o->tokens;
    parts.head.prompt_tokens = o->admission->prompt_tokens;
    if (head->finish == FINISH_STOP) {
        parts.head.stop_kind = (int32_t)o->stop_kind;
        parts.head.stop_value = o->stop_value;
    }
    parts.ids = (const int32_t *)(const void *)o->ids.data;
    parts.id_count = (uint32_t)(o->ids.bytes / sizeof(int32_t));
    parts.text = o->text.data;
    parts.text_bytes = (uint32_t)o->text.bytes;
    if (o->admission->logprobs >= 0) parts.logprobs = (const struct event_logprob *)(const void *)o->logprobs.data;
    parts.text_ends = (const uint32_t *)(const void *)o->text_ends.data;
    event_append(events, &parts);
    buf_clear(&o->ids);
    buf_clear(&o->text);
    buf_clear(&o->logprobs);
    buf_clear(&o->text_ends);
}
