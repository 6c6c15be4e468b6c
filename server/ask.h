/* ask.h: what one client asks for, in whatever dialect it was written, turned into request records of the engine.
 *
 * Pure: body bytes in, records or one sentence of refusal out. Reads only things that never change after start, so it
 * runs on the loop for small bodies and on a libuv worker for large ones. Every dialect fills the same struct and
 * passes the same checks; those run after the defaults are filled in. Never knows exchanges, the engine's handle, or
 * how a reply looks. */
#ifndef QUIRE_SERVER_ASK_H
#define QUIRE_SERVER_ASK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/base/err.h"
#include "engine/record.h"
#include "engine/text/text.h"

#define ASK_PROMPTS_MAX        256
#define ASK_SAMPLES_MAX        1024                 /* n times prompts of one HTTP request */
#define ASK_ANSWER_BYTES_MAX   ((int64_t)256 << 20) /* what the longest answer may take, gathered or written */
#define ASK_LABEL_MAX          128                  /* bytes of a client's request id */
#define ASK_TRUNCATE_BYTES_MAX ((size_t)4 << 20)    /* a text that is to be truncated is encoded whole first */

struct cJSON;
struct dialect;

enum ask_route { ASK_GENERATE, ASK_GENERATE_STREAM, ASK_TGI_ROOT, ASK_COMPLETIONS, ASK_CHAT, ASK_ROUTE_COUNT };

/* What a request is read against. Immutable while a request is read. */
struct ask_view {
    const struct text *text;
    const struct text_info *info;
    int32_t vocab, max_model_len, max_logprobs;
    bool model_defaults;      /* generation_config.json speaks where a request of the OpenAI routes says nothing */
    const char *const *names; /* [name_count], the first is shown */
    int32_t name_count;
    uint64_t seed; /* for a request that brings none */
};

struct ask_prompt {
    const char *text; /* [text_bytes], in the tree; NULL when it came as ids or messages */
    size_t text_bytes;
    int32_t *ids; /* [count], owned */
    size_t count;
};

/* NaN or the named value: not said. */
struct ask_sampling {
    double temperature, top_p, min_p, typical_p, repetition_penalty, presence_penalty, frequency_penalty;
    int64_t top_k; /* -1: all, INT64_MIN: not said */
    bool seeded;
    uint64_t seed;
};

struct ask {
    const struct dialect *dialect;
    enum ask_route route;
    struct cJSON *tree;         /* the body, once prepared only what strings below point into */
    const char *model;          /* as the reply names it */
    const char *label;          /* the client's id for this request, or NULL */
    const struct cJSON *labels; /* SGLang: an id for each prompt, or NULL */

    struct ask_prompt *prompts; /* [prompt_count] */
    int32_t prompt_count;
    bool batch;       /* the prompt came as a list */
    bool add_special; /* bos and the like in front of a text prompt */
    int64_t truncate; /* keep the last so many prompt tokens; 0: all; -1: as many as fit */

    struct ask_sampling sampling;
    int64_t n, max_tokens /* 0: not said */, min_tokens;
    bool max_tokens_default; /* max_tokens is not the client's: shortened where it does not fit */
    int32_t logprobs;        /* what the engine is asked; -1: none */
    bool ignore_eos, keep_stop, keep_special;
    const char *stops[REQUEST_STOPS_MAX];
    size_t stop_bytes[REQUEST_STOPS_MAX];
    int32_t stop_count;
    int32_t stop_ids[REQUEST_STOP_IDS_MAX];
    int32_t stop_id_count;
    int32_t *bias_ids; /* [bias_count], owned */
    float *bias;       /* [bias_count], owned */
    int32_t bias_count;
    struct hash128 salt;

    /* How the answer is shown */
    bool stream, include_usage, continuous_usage;
    bool echo;             /* the prompt's text in front */
    bool return_ids;       /* token_ids and prompt_token_ids */
    bool tokens_as_ids;    /* log-probabilities name tokens "token_id:N" */
    bool text_in_logprobs; /* SGLang */
    bool details;          /* TGI */
    bool array;            /* TGI on "/": an array of one */
    int32_t top_logprobs;  /* shown beside each token */
    int32_t best_of;       /* TGI: the best of so many is shown; 1: off */

    struct request **requests; /* [prompt_count], ids and deadlines still 0; owned until taken */
};

/* Reads, checks, encodes and builds. On an error ask->dialect still says whose envelope the refusal takes. ERR_INVALID,
 * ERR_NOT_FOUND (the model), ERR_UNSUPPORTED. Call ask_deinit in any case. */
int ask_prepare(struct ask *ask, const struct ask_view *view, enum ask_route route, const char *body, size_t bytes,
                struct err *err);
void ask_deinit(struct ask *ask);

/* What a token of the answer may take, gathered or written as JSON. Log-probabilities are reckoned at their longest,
 * the text at what is usual. */
int64_t ask_token_bytes(const struct ask *ask, const struct ask_view *view);

/* ---- for the dialects' readers (ask_fields.c) ---- */

/* A number's bounds; open ends are not part of it. HUGE_VAL: no bound but finite. */
struct ask_range {
    double min, max;
    bool min_open, max_open;
};
int ask_read_number(const struct cJSON *object, const char *key, struct ask_range range, double *out, struct err *err);
int ask_read_i32(const struct cJSON *object, const char *key, int32_t min, int32_t max, int32_t *out, struct err *err);
int ask_read_stops(struct ask *ask, const struct cJSON *object, const char *key, int32_t count_max, struct err *err);
int ask_read_stop_ids(struct ask *ask, const struct ask_view *view, const struct cJSON *object, struct err *err);
int ask_read_bias(struct ask *ask, const struct ask_view *view, const struct cJSON *object, struct err *err);
int ask_read_salt(struct ask *ask, const struct cJSON *object, const char *key, struct err *err);
int ask_read_label(const struct cJSON *object, const char *key, const char **out, struct err *err);
int ask_read_model(struct ask *ask, const struct ask_view *view, const struct cJSON *object, struct err *err);
int ask_read_chat(struct ask *ask, const struct ask_view *view, struct err *err);
/* vLLM's flat names, which its demo server and the OpenAI routes share. */
int ask_read_flat(struct ask *ask, const struct ask_view *view, struct err *err);
/* 400 for the first of `keys` (NULL ends) that asks for something: not null, false, empty or 0. */
int ask_refuse(const struct cJSON *object, const char *const *keys, struct err *err);
/* Is it a label that we repeat: 1 to ASK_LABEL_MAX letters, digits and -_.:/ ? */
bool ask_label_ok(const char *label);

/* ---- for the dialects' readers (ask_prompt.c) ---- */

enum ask_prompt_kinds { ASK_TEXT = 1, ASK_TEXTS = 2, ASK_IDS = 4, ASK_ID_LISTS = 8 };
int ask_read_prompts(struct ask *ask, const struct ask_view *view, const char *key, unsigned kinds, struct err *err);
/* One array of ids, each inside the vocabulary. */
int ask_read_ids(const struct cJSON *array, const char *key, int32_t vocab, size_t count_max, int32_t **ids,
                 size_t *count, struct err *err);
/* Takes `ids` for the only prompt (chat). */
void ask_set_prompt(struct ask *ask, int32_t *ids, size_t count);
/* Encodes what came as text and fits everything into the context. */
int ask_encode(struct ask *ask, const struct ask_view *view, struct err *err);
/* The fewest tokens that so many bytes of text can have. */
size_t ask_tokens_least(const struct ask_view *view, size_t bytes);
/* Is a text of so many bytes too long for the context whatever its tokens are? */
bool ask_text_absurd(const struct ask_view *view, size_t bytes);

#endif
