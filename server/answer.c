#include "server/answer.h"

#include <cjson/cJSON.h>
#include <string.h>

#include "engine/base/check.h"
#include "engine/base/json.h"
#include "engine/base/mem.h"
#include "server/dialect.h"

void answer_init(struct answer *answer, const struct ask *ask, const struct text *text) {
    memset(answer, 0, sizeof *answer);
    answer->ask = ask;
    answer->text = text;
    answer->count = ask->prompt_count * (int32_t)ask->n;
    answer->samples = mem_zalloc((size_t)answer->count, sizeof *answer->samples);
}

void answer_deinit(struct answer *answer) {
    for (int32_t i = 0; i < answer->count; i++) {
        struct sample *sample = &answer->samples[i];
        buf_deinit(&sample->text);
        buf_deinit(&sample->ids);
        buf_deinit(&sample->ends);
        buf_deinit(&sample->logprobs);
    }
    mem_free(answer->samples);
    buf_deinit(&answer->prefix);
    memset(answer, 0, sizeof *answer);
}

/* ---- gathering -------------------------------------------------------------------------------------------------- */

/* One packed row: id, logprob, count, then as many pairs as the request asked for (the unused ones are zero). */
static size_t row_bytes(const struct ask *ask) {
    return 12 + (size_t)(ask->logprobs > 0 ? ask->logprobs : 0) * sizeof(struct answer_top);
}

static void logprobs_add(struct sample *sample, const struct ask *ask, const struct event *event) {
    const struct event_logprob *row = record_at(event, event->logprobs);
    size_t bytes = row_bytes(ask);
    for (uint32_t i = 0; i < event->logprobs.count; i++, row++) {
        int32_t most = ask->logprobs > 0 ? ask->logprobs : 0;
        int32_t count = row->top_count < (uint32_t)most ? (int32_t)row->top_count : most;
        char *to = buf_grow(&sample->logprobs, bytes);
        memset(to, 0, bytes);
        memcpy(to, &row->id, 4);
        memcpy(to + 4, &row->logprob, 4);
        memcpy(to + 8, &count, 4);
        for (int32_t k = 0; k < count; k++) {
            struct answer_top top = {.id = row->top_ids[k], .logprob = row->top_logprobs[k]};
            memcpy(to + 12 + (size_t)k * sizeof top, &top, sizeof top);
        }
        sample->logprobs.bytes += bytes;
    }
}

/* Where each token's text ends. What the engine gives out at the end without a token (a held-back begin of a stop
 * string, the rest of a character) belongs to the last one. */
static void ends_add(struct sample *sample, const struct event *event, uint32_t base) {
    const uint32_t *ends = record_at(event, event->text_ends);
    uint32_t count = event->ids.count, bytes = event->text.count;
    bool last = event->finish != FINISH_NONE;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t end = i < event->text_ends.count && ends[i] < bytes ? ends[i] : bytes;
        if (last && i + 1 == count) end = bytes;
        end += base;
        buf_append(&sample->ends, &end, sizeof end);
    }
}

void answer_add(struct answer *answer, int32_t index, const struct event *event) {
    const struct ask *ask = answer->ask;
    struct sample *sample = &answer->samples[index];
    CHECK(index >= 0 && index < answer->count && sample->finish == FINISH_NONE);
    uint32_t base = (uint32_t)sample->text.bytes;
    if (event->finish != FINISH_ERROR) {
        if (event->text.count) buf_append(&sample->text, record_at(event, event->text), event->text.count);
        if (ask->dialect->keeps_ends) ends_add(sample, event, base);
    }
    if (event->ids.count && (ask->dialect->keeps_ids || ask->return_ids || ask->logprobs >= 0))
        buf_append(&sample->ids, record_at(event, event->ids), event->ids.count * sizeof(int32_t));
    if (ask->logprobs >= 0) logprobs_add(sample, ask, event);
    sample->finish = (enum finish_reason)event->finish;
    sample->stop_kind = event->stop_kind;
    sample->stop_value = event->stop_value;
    sample->prompt_tokens = event->prompt_tokens;
    sample->cached_tokens = event->cached_tokens;
    sample->output_tokens = event->output_tokens;
    sample->preemptions = event->preemptions;
    sample->arrival_ns = event->arrival_ns;
    sample->scheduled_ns = event->scheduled_ns;
    sample->first_token_ns = event->first_token_ns;
    sample->last_token_ns = event->last_token_ns;
    answer->finished += sample->finish != FINISH_NONE;
}

/* ---- reading ---------------------------------------------------------------------------------------------------- */

struct answer_logprob answer_logprob_at(const struct answer *answer, const struct sample *sample, size_t at) {
    size_t bytes = row_bytes(answer->ask);
    struct answer_logprob row = {0};
    if ((at + 1) * bytes > sample->logprobs.bytes) { /* the engine gave none for this token */
        row.id = answer_ids(sample)[at];
        return row;
    }
    const char *from = sample->logprobs.data + at * bytes;
    memcpy(&row.id, from, 4);
    memcpy(&row.logprob, from + 4, 4);
    memcpy(&row.top_count, from + 8, 4);
    row.top = (const struct answer_top *)(const void *)(from + 12);
    return row;
}

size_t answer_end_at(const struct sample *sample, size_t at) {
    uint32_t end;
    if ((at + 1) * sizeof end > sample->ends.bytes) return sample->text.bytes;
    memcpy(&end, sample->ends.data + at * sizeof end, sizeof end);
    return end;
}

const char *answer_token(const struct answer *answer, int32_t id, size_t *bytes) {
    return text_token(answer->text, id, bytes);
}

int32_t answer_prompt_of(const struct answer *answer, int32_t index) {
    return index / (int32_t)answer->ask->n;
}

void answer_prompt_text(const struct answer *answer, int32_t prompt, struct buf *out) {
    const struct ask_prompt *p = &answer->ask->prompts[prompt];
    if (p->text) {
        buf_append(out, p->text, p->text_bytes);
    } else {
        text_decode(answer->text, p->ids, p->count, !answer->ask->keep_special, out);
    }
}

void answer_matched(const struct answer *answer, const struct sample *sample, struct buf *out) {
    const struct ask *ask = answer->ask;
    bool string = sample->stop_kind == STOP_STRING && sample->stop_value >= 0 && sample->stop_value < ask->stop_count;
    if (string) {
        json_write_str(out, ask->stops[sample->stop_value], ask->stop_bytes[sample->stop_value]);
    } else if (sample->stop_kind == STOP_ID || sample->stop_kind == STOP_EOS) {
        json_write_i64(out, sample->stop_value);
    } else {
        buf_append_str(out, "null");
    }
}
