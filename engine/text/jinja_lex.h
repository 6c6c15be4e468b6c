/* jinja_lex.h: a template's source to tokens. All white-space control happens here: the `-` and `+` signs, trim_blocks,
 * lstrip_blocks, the one newline dropped at the end. One thread. Inside engine/text/jinja*.c only. */
#ifndef QUIRE_TEXT_JINJA_LEX_H
#define QUIRE_TEXT_JINJA_LEX_H

#include <stddef.h>
#include <stdint.h>

#include "engine/text/jinja_ast.h"

enum jinja_token_kind {
    JINJA_TOK_END,
    JINJA_TOK_DATA,      /* text */
    JINJA_TOK_OUT_BEGIN, /* {{ */
    JINJA_TOK_OUT_END,
    JINJA_TOK_TAG_BEGIN, /* {% */
    JINJA_TOK_TAG_END,
    JINJA_TOK_NAME,
    JINJA_TOK_STRING, /* text: with its escapes resolved */
    JINJA_TOK_INT,
    JINJA_TOK_FLOAT,
    JINJA_TOK_OP,
};

struct jinja_token {
    enum jinja_token_kind kind;
    uint32_t line;
    struct jinja_str text; /* DATA, NAME, STRING, and as written for INT and FLOAT */
    int op;
    union {
        int64_t i;
        double f;
    };
};

/* [*count] tokens, the last of them END. `source` must outlive them. */
struct jinja_token *jinja_lex(struct jinja_heap *heap, struct jinja_str source, size_t *count);

#endif
