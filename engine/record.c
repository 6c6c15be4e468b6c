#include "engine/record.h"

#include <math.h>
#include <string.h>

#include "engine/base/arith.h"
#include "engine/base/buf.h"
#include "engine/base/check.h"
#include "engine/base/mem.h"

static const char *const finish_names[FINISH_REASON_COUNT] = {"none",     "stop",     "length", "abort",
                                                              "deadline", "shutdown", "error"};

const char *finish_reason_name(enum finish_reason reason) {
    CHECK((unsigned)reason < FINISH_REASON_COUNT);
    return finish_names[reason];
}

/* ---- building -----------------------------------------------------------------------------------------------------
 */

/* Copies `count` elements behind what the record holds already, aligned to 8, and returns their span. */
static struct span span_put(struct buf *out, size_t start, const void *data, uint32_t count, size_t element) {
    static const char zeros[8] = {0};
    buf_append(out, zeros, (size_t)(-(out->bytes - start) & 7));
    struct span span = {.offset = (uint32_t)(out->bytes - start), .count = count};
    buf_append(out, data, count * element);
    return span;
}

static int parts_check(const struct request_parts *p, struct err *err) {
    if (p->prompt_count < 1 || p->prompt_count > REQUEST_PROMPT_MAX)
        return err_set_field(err, ERR_INVALID, "prompt", "the prompt must have 1 to %d tokens, this one has %d",
                             REQUEST_PROMPT_MAX, p->prompt_count);
    if (p->stop_count < 0 || p->stop_count > REQUEST_STOPS_MAX)
        return err_set_field(err, ERR_INVALID, "stop", "at most %d stop strings are taken", REQUEST_STOPS_MAX);
    for (int32_t i = 0; i < p->stop_count; i++)
        if (p->stop_bytes[i] < 1 || p->stop_bytes[i] > REQUEST_STOP_BYTES_MAX)
            return err_set_field(err, ERR_INVALID, "stop", "a stop string must have 1 to %d bytes",
                                 REQUEST_STOP_BYTES_MAX);
    if (p->stop_id_count < 0 || p->stop_id_count > REQUEST_STOP_IDS_MAX || p->eos_count < 0 ||
        p->eos_count > REQUEST_STOP_IDS_MAX)
        return err_set_field(err, ERR_INVALID, "stop_token_ids", "at most %d stop ids are taken", REQUEST_STOP_IDS_MAX);
    if (p->bias_count < 0 || p->bias_count > REQUEST_BIAS_MAX)
        return err_set_field(err, ERR_INVALID, "logit_bias", "at most %d biased ids are taken", REQUEST_BIAS_MAX);
    return 0;
}

int request_build(const struct request_parts *p, struct request **out, struct err *err) {
    int rc = parts_check(p, err);
    if (rc) return rc;
    struct request head = p->head;
    struct span stops[REQUEST_STOPS_MAX] = {{0}};
    struct buf block = {0};
    buf_grow(&block, sizeof head + (size_t)p->prompt_count * 4 + 512);
    buf_append(&block, &head, sizeof head);
    head.prompt = span_put(&block, 0, p->prompt, (uint32_t)p->prompt_count, sizeof(int32_t));
    head.eos_ids = span_put(&block, 0, p->eos_ids, (uint32_t)p->eos_count, sizeof(int32_t));
    head.stop_ids = span_put(&block, 0, p->stop_ids, (uint32_t)p->stop_id_count, sizeof(int32_t));
    head.bias_ids = span_put(&block, 0, p->bias_ids, (uint32_t)p->bias_count, sizeof(int32_t));
    head.bias = span_put(&block, 0, p->bias, (uint32_t)p->bias_count, sizeof(float));
    for (int32_t i = 0; i < p->stop_count; i++)
        stops[i] = span_put(&block, 0, p->stops[i], (uint32_t)p->stop_bytes[i], 1);
    head.stops = span_put(&block, 0, stops, (uint32_t)p->stop_count, sizeof stops[0]);
    head.bytes = (uint32_t)block.bytes;
    memcpy(block.data, &head, sizeof head);
    *out = (struct request *)(void *)block.data;
    return 0;
}

void event_append(struct buf *out, const struct event_parts *p) {
    static const char zeros[8] = {0};
    size_t start = out->bytes;
    CHECK((start & 7) == 0);
    struct event head = p->head;
    buf_append(out, &head, sizeof head);
    head.ids = span_put(out, start, p->ids, p->id_count, sizeof(int32_t));
    head.text = span_put(out, start, p->text, p->text_bytes, 1);
    head.logprobs = span_put(out, start, p->logprobs, p->logprobs ? p->id_count : 0, sizeof *p->logprobs);
    head.text_ends = span_put(out, start, p->text_ends, p->text_ends ? p->id_count : 0, sizeof(uint32_t));
    buf_append(out, zeros, (size_t)(-(out->bytes - start) & 7));
    head.bytes = (uint32_t)(out->bytes - start);
    memcpy(out->data + start, &head, sizeof head);
}

/* ---- checking -----------------------------------------------------------------------------------------------------
 */

static bool span_fits(struct span span, size_t head, size_t bytes, size_t element, size_t align, uint32_t count_max) {
    size_t need, end;
    if (span.count > count_max) return false;
    if (span.count == 0) return true;
    return span.offset >= head && span.offset % align == 0 && size_mul(span.count, element, &need) &&
           size_add(span.offset, need, &end) && end <= bytes;
}

static int ids_check(const struct request *r, struct span span, int32_t vocab, const char *field, struct err *err) {
    const int32_t *ids = record_at(r, span);
    for (uint32_t i = 0; i < span.count; i++)
        if (ids[i] < 0 || (vocab > 0 && ids[i] >= vocab))
            return err_set_field(err, ERR_INVALID, field, "token id %d is outside the vocabulary of %d", ids[i], vocab);
    return 0;
}

static int layout_check(const struct request *r, size_t bytes, struct err *err) {
    const size_t head = sizeof *r;
    bool ok = bytes >= head && ((uintptr_t)r & 7) == 0 && r->bytes == bytes &&
              span_fits(r->prompt, head, bytes, 4, 4, REQUEST_PROMPT_MAX) && r->prompt.count >= 1 &&
              span_fits(r->eos_ids, head, bytes, 4, 4, REQUEST_STOP_IDS_MAX) &&
              span_fits(r->stop_ids, head, bytes, 4, 4, REQUEST_STOP_IDS_MAX) &&
              span_fits(r->bias_ids, head, bytes, 4, 4, REQUEST_BIAS_MAX) &&
              span_fits(r->bias, head, bytes, 4, 4, REQUEST_BIAS_MAX) && r->bias.count == r->bias_ids.count &&
              span_fits(r->stops, head, bytes, sizeof(struct span), 4, REQUEST_STOPS_MAX);
    if (!ok) return err_set(err, ERR_INVALID, "the request record is malformed");
    const struct span *stops = record_at(r, r->stops);
    for (uint32_t i = 0; i < r->stops.count; i++)
        if (stops[i].count < 1 || !span_fits(stops[i], head, bytes, 1, 1, REQUEST_STOP_BYTES_MAX))
            return err_set_field(err, ERR_INVALID, "stop", "a stop string must have 1 to %d bytes",
                                 REQUEST_STOP_BYTES_MAX);
    return 0;
}

static int number_check(const char *field, double value, double min, double max, struct err *err) {
    if (isfinite(value) && value >= min && value <= max) return 0;
    return err_set_field(err, ERR_INVALID, field, "%s must be a number from %g to %g", field, min, max);
}

static int sampling_check(const struct request *r, struct err *err) {
    const struct sample_params *s = &r->sampling;
    int rc;
    if ((rc = number_check("temperature", (double)s->temperature, 0, 100, err))) return rc;
    if ((rc = number_check("top_p", (double)s->top_p, 1e-9, 1, err))) return rc;
    if ((rc = number_check("min_p", (double)s->min_p, 0, 1, err))) return rc;
    if ((rc = number_check("typical_p", (double)s->typical_p, 1e-9, 1, err))) return rc;
    if ((rc = number_check("repetition_penalty", (double)s->repetition_penalty, 1e-6, 1e6, err))) return rc;
    if ((rc = number_check("presence_penalty", (double)s->presence_penalty, -100, 100, err))) return rc;
    if ((rc = number_check("frequency_penalty", (double)s->frequency_penalty, -100, 100, err))) return rc;
    if (s->top_k < 0) return err_set_field(err, ERR_INVALID, "top_k", "top_k must be 0 (all) or more");
    const float *bias = record_at(r, r->bias);
    for (uint32_t i = 0; i < r->bias.count; i++)
        if (!isfinite(bias[i])) return err_set_field(err, ERR_INVALID, "logit_bias", "a bias must be a finite number");
    return 0;
}

int request_check(const struct request *r, size_t bytes, int32_t vocab, struct err *err) {
    int rc = layout_check(r, bytes, err);
    if (rc) return rc;
    if (r->n < 1 || r->n > REQUEST_SAMPLES_MAX)
        return err_set_field(err, ERR_INVALID, "n", "n must be from 1 to %d", REQUEST_SAMPLES_MAX);
    if (r->max_tokens < 1) return err_set_field(err, ERR_INVALID, "max_tokens", "max_tokens must be at least 1");
    if (r->min_tokens < 0 || r->min_tokens > r->max_tokens)
        return err_set_field(err, ERR_INVALID, "min_tokens", "min_tokens must be from 0 to max_tokens (%d)",
                             r->max_tokens);
    if (r->logprobs < -1 || r->logprobs > SAMPLE_LOGPROBS_MAX)
        return err_set_field(err, ERR_INVALID, "logprobs", "logprobs must be at most %d", SAMPLE_LOGPROBS_MAX);
    if ((rc = sampling_check(r, err))) return rc;
    if ((rc = ids_check(r, r->prompt, vocab, "prompt", err))) return rc;
    if ((rc = ids_check(r, r->eos_ids, vocab, "stop_token_ids", err))) return rc;
    if ((rc = ids_check(r, r->stop_ids, vocab, "stop_token_ids", err))) return rc;
    return ids_check(r, r->bias_ids, vocab, "logit_bias", err);
}

const char *request_stop(const struct request *request, uint32_t index, size_t *bytes) {
    const struct span *stops = record_at(request, request->stops);
    *bytes = stops[index].count;
    return record_at(request, stops[index]);
}

/* Each token's text ends where the one before it does, or later: what lies between two ends is a length. */
static bool ends_ordered(const struct event *e) {
    const uint32_t *ends = record_at(e, e->text_ends);
    for (uint32_t i = 1; i < e->text_ends.count; i++)
        if (ends[i] < ends[i - 1]) return false;
    return true;
}

int event_check(const struct event *e, size_t bytes, struct err *err) {
    const size_t head = sizeof *e;
    bool ok = bytes >= head && ((uintptr_t)e & 7) == 0 && e->bytes <= bytes && e->bytes >= head &&
              (e->bytes & 7) == 0 && e->finish >= FINISH_NONE && e->finish < FINISH_REASON_COUNT && e->sample >= 0 &&
              e->sample < REQUEST_SAMPLES_MAX && span_fits(e->ids, head, e->bytes, 4, 4, UINT32_MAX) &&
              span_fits(e->text, head, e->bytes, 1, 1, UINT32_MAX) &&
              span_fits(e->logprobs, head, e->bytes, sizeof(struct event_logprob), 4, UINT32_MAX) &&
              span_fits(e->text_ends, head, e->bytes, 4, 4, UINT32_MAX) &&
              (e->logprobs.count == 0 || e->logprobs.count == e->ids.count) &&
              (e->text_ends.count == 0 || e->text_ends.count == e->ids.count) && ends_ordered(e);
    return ok ? 0 : err_set(err, ERR_INVALID, "the event record is malformed");
}

int request_fits(const struct request *request, int32_t max_model_len, int32_t page_size, int32_t pages_total,
                 struct err *err) {
    int64_t total = (int64_t)request->prompt.count + request->max_tokens;
    if (total > max_model_len)
        return err_set_field(
            err, ERR_INVALID, "max_tokens",
            "the model's context is %d tokens, but the prompt has %u and max_tokens is %d, %lld in all", max_model_len,
            request->prompt.count, request->max_tokens, (long long)total);
    int64_t pages = (total - 1 + page_size - 1) / page_size; /* the last token's KV is never needed */
    if (pages > pages_total - 1)
        return err_set_field(err, ERR_INVALID, "max_tokens",
                             "%lld tokens need %lld pages of %d tokens, and the KV pool has %d", (long long)total - 1,
                             (long long)pages, page_size, pages_total - 1);
    return 0;
}
