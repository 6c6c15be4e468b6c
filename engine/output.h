/* output.h: what has come out of one sample so far, on its way to becoming events: token ids, their text with stop
 * strings cut, log-probabilities. The engine thread owns it. Knows no device, no scheduler. */
#ifndef QUIRE_ENGINE_OUTPUT_H
#define QUIRE_ENGINE_OUTPUT_H

#include "engine/base/buf.h"
#include "engine/record.h"
#include "engine/text/detok.h"
#include "engine/text/stops.h"
#include "kernels/sampling.h"

/* One request in the engine; shared by its samples. */
struct admission {
    uint64_t id;
    uint32_t flags;
    int32_t n, samples_left;
    int32_t prompt_tokens, max_tokens, min_tokens, logprobs;
    struct admission *next, *prev; /* all that are alive */
    int32_t *eos_ids;              /* [eos_count], inside `block` */
    int32_t eos_count, stop_count;
    struct stop_string *stops; /* [stop_count], their bytes inside `block` */
    void *block;
};

/* What output_plain and output_emit_plain look at comes first, within 72 bytes. */
struct output {
    struct admission *admission;
    int32_t sample;
    int32_t tokens; /* taken in so far */
    struct detok detok;
    /* Not yet sent: */
    struct buf ids;       /* int32_t */
    struct buf text;      /* UTF-8 */
    struct buf logprobs;  /* struct event_logprob */
    struct buf text_ends; /* uint32_t */
    struct stops stops;
    struct buf piece; /* one token's text on its way to `stops`; kept, so that a token allocates nothing */
    enum stop_kind stop_kind;
    int32_t stop_value;
};

/* Copies what outlives the request record. */
struct admission *admission_open(const struct request *request);
void admission_close(struct admission *admission);

struct output *output_open(struct admission *admission, int32_t sample);
void output_close(struct output *output);

/* Takes in one drawn token. `ends` says that it is the end or stop id that finished the sample: its text is not shown
 * (unless KEEP_STOP). Returns true when a stop string matched: the sample must end now. */
bool output_push(struct output *output, const struct text *text, const struct sample_result *token, bool ends);

/* The sample ended without a stop string: gives out what was held back. */
void output_finish(struct output *output);

/* Nothing is held of it, nobody matches stop strings in it or wants log-probabilities: a token that does not end it can
 * go out at once. */
bool output_plain(const struct output *output);
/* Asks for the memory of it that the two will look at; `admission` is for the caller, some tokens later. */
static inline void output_prefetch(const struct output *output) {
    __builtin_prefetch(output, 1);
    __builtin_prefetch((const char *)output + 64, 1);
}
/* output_push and output_emit in one for such a token. */
void output_emit_plain(struct output *output, const struct text *text, int32_t id, const struct event *head,
                       struct buf *events);

/* Appends what is not yet sent as one event; `head` brings reason, usage and times. */
void output_emit(struct output *output, const struct event *head, struct buf *events);

#endif
