/* pretok.h: cutting text into pieces that merges never cross. A chain of stages as Hugging Face's Sequence: each stage
 * cuts every piece of the stage before as if it were a whole text. Immutable once built; any thread walks it with a
 * walk of its own. Knows no tokens. */
#ifndef QUIRE_TEXT_PRETOK_H
#define QUIRE_TEXT_PRETOK_H

#include <stdbool.h>
#include <stddef.h>

#include "engine/base/err.h"

#define PRETOK_STAGES_MAX 8

enum pretok_kind { PRETOK_GPT2, PRETOK_LLAMA3, PRETOK_QWEN2, PRETOK_DIGITS, PRETOK_DIGIT_RUNS, PRETOK_REGEX };

struct pretok_stage {
    enum pretok_kind kind;
    bool matches_only; /* PRETOK_REGEX: what lies between matches is dropped; else it is a piece too */
    void *code;        /* PRETOK_REGEX: pcre2_code */
};

struct pretok {
    int count; /* 0: the whole text is one piece */
    struct pretok_stage stages[PRETOK_STAGES_MAX];
};

void pretok_deinit(struct pretok *pretok);

/* ERR_UNSUPPORTED when there are too many stages. */
int pretok_add(struct pretok *pretok, enum pretok_kind kind, struct err *err);

/* Adds a stage for a pattern: the hand-written scanner where the pattern is known, else PCRE2 within limits. */
int pretok_add_pattern(struct pretok *pretok, const char *pattern, size_t bytes, bool matches_only, struct err *err);

/* The chain that GGUF files name in tokenizer.ggml.pre. ERR_UNSUPPORTED names what we do not know. */
int pretok_add_named(struct pretok *pretok, const char *name, size_t bytes, struct err *err);

struct pretok_level {
    size_t start, end;       /* the piece that this stage cuts */
    size_t at;               /* what is left of it begins here */
    size_t match, match_end; /* PRETOK_REGEX: the match found, perhaps beyond a gap */
};

struct pretok_walk {
    const struct pretok *pretok;
    const unsigned char *text; /* [bytes] well-formed UTF-8 */
    struct pretok_level levels[PRETOK_STAGES_MAX];
    void *match; /* pcre2_match_data, made when first needed */
    void *limits;
};

void pretok_walk_init(struct pretok_walk *walk, const struct pretok *pretok, const char *text, size_t bytes);
void pretok_walk_deinit(struct pretok_walk *walk);

/* The next piece [*start, *end). 1: there is one; 0: no more; ERR_INVALID: a pattern passed its limits on this text. */
int pretok_next(struct pretok_walk *walk, size_t *start, size_t *end, struct err *err);

#endif
