/* jinja_value.h: the values of a template, with Python's meaning: truth, equality, order, lists, dicts, printing. Trees
 * of the input become values as they are touched, an object at a time. One thread. Inside engine/text/jinja*.c only. */
#ifndef QUIRE_TEXT_JINJA_VALUE_H
#define QUIRE_TEXT_JINJA_VALUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "engine/text/jinja_heap.h"
#include "engine/text/jinja_str.h"

struct cJSON;
struct jinja_run;
struct jinja_args;

enum jinja_kind {
    JINJA_UNDEFINED,
    JINJA_NONE,
    JINJA_BOOL,
    JINJA_INT,
    JINJA_FLOAT,
    JINJA_BIG, /* an integer of the input that no int64 holds: printed as it was written */
    JINJA_STRING,
    JINJA_LIST,
    JINJA_TUPLE,
    JINJA_DICT,
    JINJA_NAMESPACE,
    JINJA_MACRO,
    JINJA_FUNCTION, /* range, namespace, … */
    JINJA_METHOD,   /* a method and what it belongs to */
    JINJA_LOOP,
    JINJA_CYCLER,
    JINJA_JOINER,
};

struct jinja_value {
    enum jinja_kind kind;
    union {
        bool b;
        int64_t i;
        double f;
        const struct jinja_str *str;    /* STRING, BIG */
        const struct jinja_str *reason; /* UNDEFINED: the sentence of the error when it is used */
        struct jinja_list *list;        /* LIST, TUPLE */
        struct jinja_dict *dict;        /* DICT, NAMESPACE */
        struct jinja_macro *macro;
        const struct jinja_function *function;
        struct jinja_method *method;
        struct jinja_loop *loop;
        struct jinja_cycler *cycler; /* CYCLER, JOINER */
    };
};

/* How functions, filters, tests and methods look to the interpreter. `self` is what stands before the | or the dot. */
typedef struct jinja_value jinja_call(struct jinja_run *run, struct jinja_value self, const struct jinja_args *args);

struct jinja_function {
    const char *name;
    jinja_call *call;
};

struct jinja_method {
    struct jinja_value self;
    const struct jinja_function *function;
};

struct jinja_list {
    struct jinja_value *items; /* [count] */
    size_t count, capacity;
};

struct jinja_entry {
    struct jinja_value key, value;
    uint64_t hash;
};

/* Keeps the order of insertion. */
struct jinja_dict {
    struct jinja_entry *entries; /* [count] */
    size_t count, capacity;
    uint32_t *index;          /* [slots] entry + 1, or 0; only from 9 entries on */
    size_t slots;             /* a power of two */
    const struct cJSON *tree; /* not NULL: not yet read from the input */
    const struct jinja_input *input;
};

struct jinja_cycler {
    struct jinja_list *items;     /* of a cycler */
    const struct jinja_str *text; /* of a joiner */
    size_t at;
};

static inline struct jinja_value jinja_none(void) {
    return (struct jinja_value){.kind = JINJA_NONE};
}
static inline struct jinja_value jinja_bool(bool b) {
    return (struct jinja_value){.kind = JINJA_BOOL, .b = b};
}
static inline struct jinja_value jinja_int(int64_t i) {
    return (struct jinja_value){.kind = JINJA_INT, .i = i};
}
static inline struct jinja_value jinja_float(double f) {
    return (struct jinja_value){.kind = JINJA_FLOAT, .f = f};
}

struct jinja_value jinja_string(struct jinja_heap *heap, struct jinja_str s);
struct jinja_value jinja_text(struct jinja_heap *heap, const char *text); /* trusted, the text is not copied */
struct jinja_value jinja_undefined(struct jinja_heap *heap, const char *format, ...)
    __attribute__((format(printf, 2, 3)));
struct jinja_value jinja_list_new(struct jinja_heap *heap, enum jinja_kind kind, size_t capacity);
struct jinja_value jinja_dict_new(struct jinja_heap *heap);

/* The value of an input tree; `input` gives the trusted words and must outlive the render. */
struct jinja_value jinja_from_tree(struct jinja_heap *heap, const struct jinja_input *input, const struct cJSON *tree);

void jinja_list_append(struct jinja_heap *heap, struct jinja_list *list, struct jinja_value value);
/* Items of a dict beyond this call are entries[0 .. count). */
void jinja_dict_read(struct jinja_heap *heap, struct jinja_dict *dict);
struct jinja_value *jinja_dict_find(struct jinja_heap *heap, struct jinja_dict *dict, struct jinja_value key);
void jinja_dict_set(struct jinja_heap *heap, struct jinja_dict *dict, struct jinja_value key, struct jinja_value value);
bool jinja_dict_remove(struct jinja_heap *heap, struct jinja_dict *dict, struct jinja_value key);

/* "str", "dict", … as Python names them. */
const char *jinja_type(struct jinja_value v);
bool jinja_truth(struct jinja_heap *heap, struct jinja_value v);
bool jinja_equal(struct jinja_heap *heap, struct jinja_value a, struct jinja_value b);
/* -1, 0, 1; fails as Python does (`sign` is for the sentence) where there is no order. */
int jinja_order(struct jinja_heap *heap, struct jinja_value a, struct jinja_value b, const char *sign);
bool jinja_is_number(struct jinja_value v); /* BOOL, INT, FLOAT */
double jinja_number(struct jinja_value v);  /* of one of those */

/* Ends the render with the sentence of an undefined value; returns for any other. */
void jinja_need_defined(struct jinja_heap *heap, struct jinja_value v);

/* Items of whatever can be iterated (keys of a dict, characters of a string). Shared with `v` when it is a list. */
struct jinja_list *jinja_iterate(struct jinja_heap *heap, struct jinja_value v);

/* (key, value) tuples of a dict. */
struct jinja_list *jinja_dict_items(struct jinja_heap *heap, struct jinja_dict *dict);

/* A new list of `items` in the order of `keys` (as many; equal ones keep their order, in reverse too). */
struct jinja_list *jinja_sort(struct jinja_heap *heap, struct jinja_list *items, struct jinja_list *keys, bool reverse);

/* jinja_print.c. str(v), repr(v), and json.dumps of transformers' tojson. */
struct jinja_json_style {
    int64_t indent; /* < 0: on one line */
    struct jinja_str indent_text, comma, colon;
    bool ensure_ascii, sort_keys;
};
struct jinja_str jinja_to_str(struct jinja_heap *heap, struct jinja_value v);
void jinja_build_value(struct jinja_heap *heap, struct jinja_builder *b, struct jinja_value v, bool repr);
void jinja_build_json(struct jinja_heap *heap, struct jinja_builder *b, struct jinja_value v,
                      const struct jinja_json_style *style, size_t level);

#endif
