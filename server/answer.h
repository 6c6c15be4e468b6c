/* answer.h: what the engine has said so far to one request: its samples, gathered from event records. Owned by one
 * generation on the loop thread. Knows no exchange and no engine; dialects read it. */
#ifndef QUIRE_SERVER_ANSWER_H
#define QUIRE_SERVER_ANSWER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/record.h"
#include "engine/text/text.h"
#include "server/ask.h"

/* Everything is kept until the request ends: ask_prepare has bounded it (ASK_ANSWER_BYTES_MAX). */
struct answer_top {
    int32_t id;
    float logprob;
};
struct answer_logprob {
    int32_t id;
    float logprob;
    int32_t top_count;
    const struct answer_top *top; /* [top_count] */
};

struct sample {
    struct buf text;
    size_t text_sent;    /* bytes of it in chunks */
    struct buf ids;      /* int32_t; kept when the dialect or the request shows ids */
    struct buf ends;     /* uint32_t each: bytes of text after each id; kept by dialects that write token by token */
    struct buf logprobs; /* packed rows of answer_logprob_at; kept when asked for */
    size_t ids_sent;     /* ids that chunks have spoken of */
    size_t chars_sent;   /* characters of token texts before them, for text_offset */
    int32_t output_tokens, prompt_tokens, cached_tokens, preemptions;
    enum finish_reason finish;
    int32_t stop_kind, stop_value;
    bool began; /* its first chunk went out */
    bool done;  /* its last chunk went out */
    int64_t arrival_ns, scheduled_ns, first_token_ns, last_token_ns;
};

struct answer {
    const struct ask *ask;
    const struct text *text;
    struct sample *samples; /* [count]: prompt * n + sample */
    int32_t count, finished;
    int64_t created_unix_s, begin_ns, end_ns; /* of the exchange: first byte in, last event */
    int64_t validated_ns;                     /* when the request was ready for the engine */
    char id[ASK_LABEL_MAX + 16];              /* as shown, prefix of the dialect included */
    struct buf prefix;                        /* the unchanging begin of a chunk; the dialect's, made by its first */
};

void answer_init(struct answer *answer, const struct ask *ask, const struct text *text);
void answer_deinit(struct answer *answer);

/* Adds an event's news to sample `index`. The event has passed event_check. */
void answer_add(struct answer *answer, int32_t index, const struct event *event);

/* The sample's text from byte `from` on; never NULL. */
static inline const char *answer_text(const struct sample *sample, size_t from) {
    return sample->text.data ? sample->text.data + from : "";
}
static inline size_t answer_id_count(const struct sample *sample) {
    return sample->ids.bytes / sizeof(int32_t);
}
static inline const int32_t *answer_ids(const struct sample *sample) {
    return (const int32_t *)(const void *)sample->ids.data;
}
/* The log-probability of the sample's token `at`, counted over all its tokens. */
struct answer_logprob answer_logprob_at(const struct answer *answer, const struct sample *sample, size_t at);
/* Absolute end of the text of token `at`. */
size_t answer_end_at(const struct sample *sample, size_t at);

/* Text of one token alone, valid UTF-8 once written as JSON. */
const char *answer_token(const struct answer *answer, int32_t id, size_t *bytes);
int32_t answer_prompt_of(const struct answer *answer, int32_t index);
/* Appends the prompt's text as echoes show it. */
void answer_prompt_text(const struct answer *answer, int32_t prompt, struct buf *out);
/* The stop string or id that ended the sample, as JSON; null when none did. */
void answer_matched(const struct answer *answer, const struct sample *sample, struct buf *out);

#endif
