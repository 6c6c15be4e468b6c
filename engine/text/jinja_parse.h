/* jinja_parse.h: what the two halves of the parser share: the stream of tokens, and making nodes. One thread, one
 * compile. Inside engine/text/jinja*.c only. */
#ifndef QUIRE_TEXT_JINJA_PARSE_H
#define QUIRE_TEXT_JINJA_PARSE_H

#include "engine/text/jinja_ast.h"
#include "engine/text/jinja_lex.h"

struct jinja_parser {
    struct jinja *jinja;
    struct jinja_heap *heap;
    struct jinja_token *tokens; /* the last is END, and is never passed */
    size_t at;
    size_t loops;         /* for loops around, within the macro at hand */
    bool varargs, kwargs; /* named since the macro at hand began */
};

/* A list of nodes while it grows. */
struct jinja_nodes {
    struct jinja_node **nodes;
    size_t count, capacity;
};

static inline struct jinja_token *jinja_token(struct jinja_parser *p) {
    return &p->tokens[p->at];
}
static inline void jinja_next(struct jinja_parser *p) {
    p->heap->line = p->tokens[p->at].line;
    p->at += p->tokens[p->at].kind != JINJA_TOK_END;
}

bool jinja_at_op(struct jinja_parser *p, int op);
bool jinja_at_name(struct jinja_parser *p, const char *name);
bool jinja_take_op(struct jinja_parser *p, int op);
bool jinja_take_name(struct jinja_parser *p, const char *name);
void jinja_expect_op(struct jinja_parser *p, int op);
struct jinja_str jinja_expect_name(struct jinja_parser *p);
_Noreturn void jinja_unexpected(struct jinja_parser *p, const char *wanted);

struct jinja_node *jinja_node_new(struct jinja_parser *p, enum jinja_node_kind kind);
/* Notes that `below` (NULL is allowed) hangs under `node`. */
void jinja_node_hang(struct jinja_parser *p, struct jinja_node *node, const struct jinja_node *below);
void jinja_nodes_add(struct jinja_parser *p, struct jinja_nodes *list, struct jinja_node *node);
int jinja_symbol(struct jinja_parser *p, struct jinja_str name);

/* jinja_expr.c */
struct jinja_node *jinja_parse_expression(struct jinja_parser *p, bool conditional);
/* Expressions with commas between are a tuple. `stop` is a name that ends it (NULL: none). */
struct jinja_node *jinja_parse_tuple(struct jinja_parser *p, bool conditional);
struct jinja_node *jinja_parse_target(struct jinja_parser *p, bool namespaces);
/* A chain of filters: from their first name on, `self` NULL for what a block hands in. */
struct jinja_node *jinja_parse_filters(struct jinja_parser *p, struct jinja_node *self);
struct jinja_node *jinja_parse_primary(struct jinja_parser *p);
struct jinja_node *jinja_parse_postfix(struct jinja_parser *p, struct jinja_node *node);

#endif
