/* text.h: text to token ids and back, and messages to a prompt. The second, pure boundary: opened by the front from the
 * model's files, immutable afterwards, used by any thread at once. Knows no device, no request, no HTTP. */
#ifndef QUIRE_TEXT_TEXT_H
#define QUIRE_TEXT_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/base/err.h"
#include "engine/base/hash.h"

struct text; /* opaque */
struct cJSON;

struct text_options {
    const char *chat_template; /* Jinja source that replaces the model's, or NULL */
    /* A folder without tokenizer.json gets a stand-in, of as many ids as its config.json says: ids below 256 are the
     * bytes, every other id is a space. For random weights, where only the numbers of tokens count. */
    bool stand_in;
};

/* What generation_config.json asks for where a request says nothing; NaN or -1: not said. */
struct generation_defaults {
    double temperature, top_p, min_p, repetition_penalty;
    int32_t top_k;
};

#define TEXT_EOS_MAX 16

struct text_info {
    int32_t vocab; /* ids 0 .. vocab-1 have a token */
    int32_t token_bytes_max;
    int32_t bos_id; /* -1: none */
    int32_t eos_ids[TEXT_EOS_MAX];
    int32_t eos_count;
    bool add_bos; /* completion prompts get bos in front (TEXT_ADD_SPECIAL) */
    bool has_chat_template;
    const char *chat_template_error; /* why the model's template cannot be read; NULL: it can, or there is none */
    struct generation_defaults defaults;
};

/* `model_path` is a GGUF file or a Hugging Face folder. Errors name the file and what is wrong. */
int text_open(const char *model_path, const struct text_options *options, struct text **out, struct err *err);
void text_close(struct text *text);
const struct text_info *text_info(const struct text *text);

enum text_encode_flags {
    TEXT_PARSE_SPECIAL = 1, /* special tokens written out in the text become their ids; off for what users wrote */
    TEXT_ADD_SPECIAL = 2,   /* bos (and what the tokenizer's post-processor adds) as the model wants it */
};

/* Encodes UTF-8 (ERR_INVALID if it is not). Writes at most `capacity` ids and sets *count to how many there are; more
 * than capacity is ERR_EXHAUSTED with *count a lower bound, found without encoding all of an absurd text. bytes + 8 ids
 * are enough, 3 * bytes + 8 where the tokenizer normalises (some characters have no composed form and become three).
 * Linear time in `bytes`, whatever they are. */
int text_encode(const struct text *text, const char *utf8, size_t bytes, unsigned flags, int32_t *ids, size_t capacity,
                size_t *count, struct err *err);

/* The bytes a token stands for (not always whole characters); "" for unknown ids. Special tokens give their name. */
const char *text_token(const struct text *text, int32_t id, size_t *bytes);
bool text_token_special(const struct text *text, int32_t id);

/* Ask for the memory that these two will look at, some tokens ahead of it: first where the token lies, then, a few
 * tokens later, what lies there. Any id may be given. */
void text_prefetch(const struct text *text, int32_t id);
void text_prefetch_bytes(const struct text *text, int32_t id);

/* Appends the text of `ids`; broken UTF-8 becomes U+FFFD (Unicode table 3-8). */
void text_decode(const struct text *text, const int32_t *ids, size_t count, bool skip_special, struct buf *out);

/* Input of a chat template. The trees stay the caller's. */
struct chat_input {
    const struct cJSON *messages;  /* array of {role, content, …} */
    const struct cJSON *tools;     /* array or NULL */
    const struct cJSON *documents; /* array or NULL */
    const struct cJSON *kwargs;    /* object of further variables or NULL */
    bool add_generation_prompt;
    bool continue_final_message; /* the last message is left open */
};

/* Renders the model's chat template into `out`, within its step, output and depth budgets (ERR_INVALID when it passes
 * them, or when the template itself raises: its sentence is the error). ERR_UNSUPPORTED: the model has no template, or
 * one that cannot be read. */
int text_render_chat(const struct text *text, const struct chat_input *input, struct buf *out, struct err *err);

/* Renders and encodes in one go: the template's own markers become special ids, what stands in message contents does
 * not. ids as in text_encode. */
int text_encode_chat(const struct text *text, const struct chat_input *input, int32_t **ids, size_t *count,
                     size_t count_max, struct err *err);

/* 128-bit keys of the full pages of a prompt, chained over (parent, tokens, salt); the same ids give the same keys.
 * Writes count / page_size keys. The front compares keys only. */
void text_prefix_keys(struct hash_key key, struct hash128 salt, const int32_t *ids, size_t count, int32_t page_size,
                      struct hash128 *out);

#endif
