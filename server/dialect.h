/* dialect.h: one row a dialect: how its requests are read and how its answers, chunks and errors are written. Constant
 * tables of pure functions; any thread. A dialect never touches an exchange. */
#ifndef QUIRE_SERVER_DIALECT_H
#define QUIRE_SERVER_DIALECT_H

#include <stdbool.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/base/err.h"
#include "server/answer.h"
#include "server/ask.h"

struct dialect {
    const char *name;
    const char *stream_type; /* content type of a stream */
    int invalid_status;      /* HTTP status of a request that is wrong */
    bool by_step;            /* one chunk a step for all samples, not one for each */
    bool keeps_ids;          /* its answers show ids */
    bool keeps_ends;         /* it writes token by token */
    int32_t row_bytes;      /* the most that one token's log-probability takes, written or gathered, but for its text */
    int32_t row_text_bytes; /* the most that one byte of its text takes in that */
    int32_t rows_more;      /* rows of a token besides its own and its top ones */
    bool clamps;            /* a max_tokens that does not fit is shortened, as this dialect's own server does */

    /* Fills `ask` from ask->tree. */
    int (*read)(struct ask *ask, const struct ask_view *view, struct err *err);
    /* The sentence for a prompt that does not fit; `at_least`: prompt_tokens is a lower bound. */
    int (*too_long)(const struct ask *ask, int64_t context, int64_t prompt_tokens, bool at_least, struct err *err);
    /* An error as a whole reply, and as an event of a running stream (with what must follow it). */
    void (*error)(int status, const struct err *err, struct buf *out);
    void (*error_event)(int status, const struct err *err, struct buf *out);

    /* The whole answer of a request that does not stream. */
    void (*reply)(const struct answer *answer, struct buf *out);
    /* What sample `index` (by_step: all) has that was not sent yet. Nothing when there is nothing to say. */
    void (*chunk)(struct answer *answer, int32_t index, struct buf *out);
    /* After the last chunk of the last sample. */
    void (*end)(struct answer *answer, struct buf *out);
};

extern const struct dialect dialect_vllm, dialect_sglang, dialect_tgi, dialect_completions, dialect_chat;

/* The row that a body on /generate is written in, told by its fields; NULL with the error when it is none or several.
 */
const struct dialect *dialect_of_generate(const struct cJSON *tree, struct err *err);

/* Whose envelope a refusal on a route takes before the body has said more. */
const struct dialect *dialect_of_route(enum ask_route route);

/* HTTP status of an error code in this dialect. */
int dialect_status(const struct dialect *dialect, int code);

/* ---- shared by the OpenAI routes (dialect_openai.c) ---- */

void openai_error(int status, const struct err *err, struct buf *out);
void openai_error_event(int status, const struct err *err, struct buf *out);
int openai_too_long(const struct ask *ask, int64_t context, int64_t prompt_tokens, bool at_least, struct err *err);
int openai_read(struct ask *ask, const struct ask_view *view, struct err *err);
void openai_usage(const struct answer *answer, struct buf *out);
void openai_head(const struct answer *answer, const char *object, struct buf *out); /* {"id":…,"choices": */
/* ,"finish_reason":… and at the end ,"stop_reason":… */
void openai_finish(const struct answer *answer, const struct sample *sample, struct buf *out);
void openai_ids(const struct answer *answer, int32_t index, size_t from, bool prompt, struct buf *out);
void openai_end(struct answer *answer, const char *object, struct buf *out);

#endif
