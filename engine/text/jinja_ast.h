/* jinja_ast.h: what the parser makes and the interpreter walks. Immutable once parsed, so any thread may walk it. Names
 * are interned: a symbol is a small number. Inside engine/text/jinja*.c only. */
#ifndef QUIRE_TEXT_JINJA_AST_H
#define QUIRE_TEXT_JINJA_AST_H

#include "engine/text/jinja_value.h"

/* An operator as a number: its first character, and its second times 256. */
#define JINJA_OP(a, b) ((a) | (b) << 8)

enum jinja_node_kind {
    /* expressions */
    JINJA_CONST,   /* value */
    JINJA_NAME,    /* symbol, text */
    JINJA_ITEMS,   /* kids: a list, or a tuple when op is ( */
    JINJA_PAIRS,   /* kids: key, value, key, value, … */
    JINJA_ATTR,    /* a . text */
    JINJA_ITEM,    /* a [ b ] */
    JINJA_SLICE,   /* a [ kids[0] : kids[1] : kids[2] ], each may be NULL */
    JINJA_CALL,    /* a ( args ) */
    JINJA_FILTER,  /* a | text ( args ); a is NULL for what a block hands in */
    JINJA_TEST,    /* a is text ( args ) */
    JINJA_NOT,     /* a */
    JINJA_AND,     /* a, b */
    JINJA_OR,      /* a, b */
    JINJA_NEGATE,  /* a */
    JINJA_POSITE,  /* +a */
    JINJA_BINARY,  /* a op b */
    JINJA_CONCAT,  /* kids */
    JINJA_COMPARE, /* a, then ops[i] kids[i] */
    JINJA_COND,    /* b if a else c (c may be NULL) */
    JINJA_NS_ATTR, /* target: symbol . text */
    /* statements */
    JINJA_DATA,         /* value */
    JINJA_OUTPUT,       /* a */
    JINJA_IF,           /* kids: condition (NULL: else) */
    JINJA_FOR,          /* target, a: iterable, b: filter or NULL, body, orelse */
    JINJA_SET,          /* target, a */
    JINJA_SET_BLOCK,    /* target, a: chain of filters or NULL, body */
    JINJA_MACRO_DEF,    /* text, symbol, params, body */
    JINJA_CALL_BLOCK,   /* a: the call; params and body of its caller() */
    JINJA_FILTER_BLOCK, /* a: chain of filters, body */
    JINJA_WITH,         /* kids: target, value, target, value, …; body (generation blocks have no kids) */
    JINJA_BREAK,
    JINJA_CONTINUE,
};

struct jinja_block {
    struct jinja_node **nodes; /* [count] */
    size_t count;
};

struct jinja_call_args {
    struct jinja_node **positional; /* [positional_count] */
    size_t positional_count;
    struct jinja_str *names; /* [named_count] */
    struct jinja_node **named;
    size_t named_count;
    struct jinja_node *star, *star_star; /* *args, **kwargs, or NULL */
};

struct jinja_param {
    struct jinja_str name;
    int symbol;
    struct jinja_node *otherwise; /* its default, or NULL */
};

struct jinja_node {
    enum jinja_node_kind kind;
    uint32_t line;
    uint32_t height; /* of the tree beneath: bounds the recursion of the interpreter */
    int op;          /* JINJA_OP */
    int symbol;
    struct jinja_str text;
    struct jinja_value value;
    struct jinja_node *a, *b, *c, *target;
    struct jinja_node **kids; /* [kids_count] */
    size_t kids_count;
    int *ops;                     /* [kids_count] of COMPARE; JINJA_OP, 'i' in, 'n' not in */
    struct jinja_block *blocks;   /* [kids_count] of IF; otherwise [0] is the body and [1] the else */
    struct jinja_call_args *args; /* NULL: none */
    struct jinja_param *params;   /* [params_count] */
    size_t params_count;
    bool takes_varargs, takes_kwargs;        /* a macro that names them */
    const struct jinja_function *function;   /* NAME, FILTER, TEST: ours of that name, or NULL */
    const struct jinja_function *methods[3]; /* ATTR: of strings, lists, dicts */
};

/* Symbols that every template has. */
enum { JINJA_SYM_LOOP, JINJA_SYM_CALLER, JINJA_SYM_VARARGS, JINJA_SYM_KWARGS };

enum { JINJA_METHODS_STR, JINJA_METHODS_LIST, JINJA_METHODS_DICT };

/* A template: its nodes, and the names behind the symbols. */
struct jinja {
    struct jinja_heap heap; /* holds everything below; not used after compile */
    struct jinja_block body;
    struct jinja_str *symbols; /* [symbols_count] */
    size_t symbols_count, symbols_capacity;
};

/* Parses into `jinja`; jumps to the heap's landing point on error. */
void jinja_parse(struct jinja *jinja, struct jinja_str source);

/* Tables of the interpreter; NULL when there is no such name. */
const struct jinja_function *jinja_filter_find(struct jinja_str name);
const struct jinja_function *jinja_test_find(struct jinja_str name);
const struct jinja_function *jinja_method_find(int of, struct jinja_str name);
const struct jinja_function *jinja_global_find(struct jinja_str name);

#endif
