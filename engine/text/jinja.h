/* jinja.h: chat templates. A small Jinja interpreter with the grammar that chat templates use, rendered as transformers
 * renders them (trim_blocks and lstrip_blocks on, loop controls, its `tojson`, `raise_exception` and `strftime_now`).
 *
 * A template is data of a model file or of a flag, so it is not trusted with time or memory: every render has budgets,
 * and there is nothing in here to escape to (no attribute of a host object, no include, no import, no file). It does
 * say which characters of its output it wrote itself and which came out of the input trees, so that what a user wrote
 * never becomes a control token. Compiled templates are immutable: any number of threads may render one at once. Knows
 * no tokenizer, no request, no model. */
#ifndef QUIRE_TEXT_JINJA_H
#define QUIRE_TEXT_JINJA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/base/buf.h"
#include "engine/base/err.h"

struct cJSON;
struct jinja; /* opaque: a compiled template */

#define JINJA_SOURCE_MAX ((size_t)512 << 10) /* bytes of a template */

/* Parses `source` (UTF-8, copied). ERR_INVALID with the line and what is wrong with it; ERR_UNSUPPORTED for include,
 * import, extends and block. Free with jinja_free. */
int jinja_compile(const char *source, size_t bytes, struct jinja **out, struct err *err);
void jinja_free(struct jinja *jinja); /* NULL is allowed */

enum jinja_var_kind {
    JINJA_VAR_TREE, /* `tree`: its strings and keys are untrusted; a NULL tree is none */
    JINJA_VAR_TEXT, /* `text`: trusted (bos_token, eos_token) */
    JINJA_VAR_BOOL, /* `flag` */
};

/* A variable of the template. Names that are not given are undefined. Everything stays the caller's. */
struct jinja_var {
    const char *name;
    enum jinja_var_kind kind;
    const struct cJSON *tree;
    const char *text;
    bool flag;
};

struct jinja_input {
    const struct jinja_var *vars; /* [count]; of two of one name the later wins */
    size_t count;
    /* [trusted_words_count] strings that are trusted even when an input tree spells them: the role names, because some
     * templates build a control token around the role ('<|' + role + '|>'). Compared whole. */
    const char *const *trusted_words;
    size_t trusted_words_count;
    int64_t unix_s; /* what strftime_now tells, in local time */
};

struct jinja_limits {
    size_t steps;        /* nodes evaluated, items visited, and one for every 32 bytes of text moved */
    size_t output_bytes; /* of the rendered prompt */
    size_t memory_bytes; /* of values alive or not: nothing is given back before the end */
    size_t depth;        /* nested evaluation, macro calls included */
};

/* 1.5 M steps, 16 MiB of output, 64 MiB of memory, depth 250: under 100 ms on one core of a small machine. */
extern const struct jinja_limits jinja_limits_default;

/* Byte ranges [start, end) of the output, ascending, neither empty nor touching. */
struct jinja_span {
    size_t start, end;
};

struct jinja_spans {
    struct jinja_span *spans; /* [count] */
    size_t count, capacity;
};

void jinja_spans_deinit(struct jinja_spans *spans); /* all-zero is an empty one */

/* Appends the rendered template to `out`. `untrusted` (NULL is allowed; must be empty before) gets the ranges of
 * out->data whose characters came from strings of the input trees, through whatever concatenation, slice, filter or
 * macro. ERR_INVALID when a budget is passed (the text says which), when the template misuses a value, or when it
 * raises: then its sentence is the error. On failure `out` is as it was before and `untrusted` is empty. */
int jinja_render(const struct jinja *jinja, const struct jinja_input *input, const struct jinja_limits *limits,
                 struct buf *out, struct jinja_spans *untrusted, struct err *err);

#endif
