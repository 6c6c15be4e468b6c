/* record.h: what crosses the boundary to a running engine: struct request one way, struct event the other. Flat records
 * without pointers: a fixed head, then arrays in the same block at byte offsets from its start, so that a record can go
 * through a shared-memory ring as it is. The receiver always runs *_check before it believes one. Plain data; any
 * thread. */
#ifndef QUIRE_ENGINE_RECORD_H
#define QUIRE_ENGINE_RECORD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/err.h"
#include "engine/base/hash.h"
#include "kernels/sampling.h"

/* Bounds that every door shares. */
#define REQUEST_SAMPLES_MAX    128
#define REQUEST_STOPS_MAX      16
#define REQUEST_STOP_BYTES_MAX 256
#define REQUEST_STOP_IDS_MAX   64
#define REQUEST_BIAS_MAX       1024
#define REQUEST_PROMPT_MAX     (1 << 20) /* ids */

struct span {
    uint32_t offset; /* bytes from the start of the record */
    uint32_t count;  /* elements */
};

enum request_flags {
    REQUEST_IGNORE_EOS = 1 << 0,
    REQUEST_KEEP_STOP = 1 << 1,       /* the matched stop string stays in the text */
    REQUEST_KEEP_SPECIAL = 1 << 2,    /* special tokens are shown in the text */
    REQUEST_FINAL_ONLY = 1 << 3,      /* one event a sample, at its end (the client does not stream) */
    REQUEST_NO_PREFIX_CACHE = 1 << 4, /* neither look up nor publish */
    REQUEST_NO_TEXT = 1 << 5,         /* ids only */
};

struct request {
    uint32_t bytes; /* of the whole record */
    uint32_t flags;
    uint64_t id;         /* ours, unique; client ids never get here */
    int64_t deadline_ns; /* clock_now_ns() at which it ends with FINISH_DEADLINE; 0: none */
    int32_t n;           /* samples, 1 .. REQUEST_SAMPLES_MAX */
    int32_t max_tokens;  /* >= 1 */
    int32_t min_tokens;  /* 0 .. max_tokens */
    int32_t logprobs;    /* as in struct sample_row */
    struct sample_params sampling;
    struct hash128 salt;  /* cache isolation: zero: shared */
    struct span prompt;   /* int32_t, 1 .. */
    struct span eos_ids;  /* int32_t: the model's end ids, skipped under IGNORE_EOS */
    struct span stop_ids; /* int32_t */
    struct span stops;    /* struct span each: bytes of one stop string */
    struct span bias_ids; /* int32_t */
    struct span bias;     /* float, as many */
};

/* A change of an engine's prefix index, in the order in which they came. */
struct key_change {
    uint64_t lo, hi;
    uint32_t change; /* 0: left, 1: came, 2: all have left */
    uint32_t reserved;
};

enum finish_reason {
    FINISH_NONE,
    FINISH_STOP,     /* an end id, a stop id or a stop string */
    FINISH_LENGTH,   /* max_tokens or the context */
    FINISH_ABORT,    /* the client left or cancelled */
    FINISH_DEADLINE, /* its deadline passed */
    FINISH_SHUTDOWN, /* the drain limit passed */
    FINISH_ERROR,    /* the engine failed; see text */
    FINISH_REASON_COUNT
};
const char *finish_reason_name(enum finish_reason reason); /* "stop", "length", "abort", "deadline", … */

enum stop_kind { STOP_NONE, STOP_EOS, STOP_ID, STOP_STRING };

struct event_logprob {
    int32_t id;
    float logprob;
    int32_t rank;
    uint32_t top_count;
    int32_t top_ids[SAMPLE_LOGPROBS_MAX];
    float top_logprobs[SAMPLE_LOGPROBS_MAX];
};

/* News of one sample of one request. `text` is whole UTF-8 characters, already cut at a stop; joined over the events of
 * a sample it is the sample's text. The last event of a sample has finish != FINISH_NONE; each sample has exactly one.
 */
struct event {
    uint32_t bytes;
    int32_t sample;
    uint64_t request_id;
    int32_t finish;     /* enum finish_reason */
    int32_t stop_kind;  /* enum stop_kind, with FINISH_STOP */
    int32_t stop_value; /* the id, or the index of the stop string */
    int32_t prompt_tokens, cached_tokens;
    int32_t output_tokens; /* of this sample so far */
    int32_t preemptions;
    int32_t error_code; /* enum err_code with FINISH_ERROR; ERR_INVALID: refused at the door */
    int64_t arrival_ns, scheduled_ns, first_token_ns, last_token_ns; /* 0: not yet */
    struct span ids;       /* int32_t: new tokens of the sample, end and stop ids included */
    struct span text;      /* char: new text; the error's sentence with FINISH_ERROR */
    struct span logprobs;  /* struct event_logprob, as many as ids when asked for */
    struct span text_ends; /* uint32_t, as many as ids: bytes of `text` there are after each id */
};

/* What a request record is built from: pointers into the caller's memory. */
struct request_parts {
    struct request head; /* spans and bytes are filled in by request_build */
    const int32_t *prompt;
    int32_t prompt_count;
    const int32_t *eos_ids;
    int32_t eos_count;
    const int32_t *stop_ids;
    int32_t stop_id_count;
    const char *const *stops;
    const size_t *stop_bytes;
    int32_t stop_count;
    const int32_t *bias_ids;
    const float *bias;
    int32_t bias_count;
};

/* One block from mem_alloc. ERR_INVALID when a count is over its bound. */
int request_build(const struct request_parts *parts, struct request **out, struct err *err);

/* Every offset, count, alignment, id and number inside its bound? `vocab` 0: ids are only checked to be >= 0. */
int request_check(const struct request *request, size_t bytes, int32_t vocab, struct err *err);
int event_check(const struct event *event, size_t bytes, struct err *err);

/* Whether one sample of it may ever be computed: tokens and pages that it needs at most, against the context and the
 * pool (pages_total with the dummy). ERR_INVALID with the arithmetic. */
int request_fits(const struct request *request, int32_t max_model_len, int32_t page_size, int32_t pages_total,
                 struct err *err);

static inline const void *record_at(const void *record, struct span span) {
    return (const char *)record + span.offset;
}
static inline const int32_t *request_prompt(const struct request *r) {
    return record_at(r, r->prompt);
}
const char *request_stop(const struct request *request, uint32_t index, size_t *bytes);

struct event_parts {
    struct event head;
    const int32_t *ids;
    uint32_t id_count;
    const char *text;
    uint32_t text_bytes;
    const struct event_logprob *logprobs; /* NULL or [id_count] */
    const uint32_t *text_ends;            /* NULL or [id_count] */
};
struct buf;
/* Appends the encoded event to `out`, 8-byte aligned. */
void event_append(struct buf *out, const struct event_parts *parts);

#endif
