/* jinja_run.h: one render at work: its scopes, where its output goes, and the functions that walk the tree. One thread.
 * Inside engine/text/jinja*.c only. */
#ifndef QUIRE_TEXT_JINJA_RUN_H
#define QUIRE_TEXT_JINJA_RUN_H

#include "engine/text/jinja_ast.h"

struct jinja_binding {
    int symbol;
    struct jinja_value value;
};

struct jinja_scope {
    struct jinja_scope *parent;
    struct jinja_binding *vars; /* [count] */
    size_t count, capacity;
    bool captured; /* a macro remembers it: not to be used again */
};

struct jinja_macro {
    const struct jinja_node *node;
    struct jinja_scope *scope; /* where it was defined */
};

struct jinja_loop {
    struct jinja_list *items;
    size_t count, index;
    struct jinja_value changed; /* what loop.changed saw last */
};

struct jinja_named {
    struct jinja_str name;
    struct jinja_value value;
};

/* Evaluated arguments of a call. */
struct jinja_args {
    struct jinja_value *positional; /* [count] */
    size_t count;
    struct jinja_named *named; /* [named_count] */
    size_t named_count;
};

struct jinja_run {
    struct jinja_heap heap;
    const struct jinja *jinja;
    const struct jinja_input *input;
    struct jinja_scope *scope;
    struct jinja_builder *capture; /* where output goes within macros and blocks; NULL: to `out` */
    struct buf *out;
    size_t out_start; /* what was in it before */
    struct jinja_spans *spans;
};

/* jinja_exec.c */
void jinja_exec_template(struct jinja_run *run);
struct jinja_value *jinja_scope_find(struct jinja_run *run, int symbol);
void jinja_scope_set(struct jinja_run *run, int symbol, struct jinja_value value);
void jinja_assign(struct jinja_run *run, const struct jinja_node *target, struct jinja_value value);
struct jinja_value jinja_macro_call(struct jinja_run *run, const struct jinja_macro *macro,
                                    const struct jinja_args *args);

/* jinja_eval.c */
struct jinja_value jinja_eval(struct jinja_run *run, const struct jinja_node *node);
struct jinja_value jinja_eval_filters(struct jinja_run *run, const struct jinja_node *node, struct jinja_value self);
struct jinja_args jinja_eval_args(struct jinja_run *run, const struct jinja_call_args *args);
struct jinja_value jinja_call_value(struct jinja_run *run, struct jinja_value callee, const struct jinja_args *args);

/* jinja_ops.c */
struct jinja_value jinja_binary(struct jinja_run *run, int op, struct jinja_value a, struct jinja_value b);
struct jinja_value jinja_negate(struct jinja_run *run, struct jinja_value v);
bool jinja_contains(struct jinja_run *run, struct jinja_value container, struct jinja_value item);
bool jinja_compare(struct jinja_run *run, int op, struct jinja_value a, struct jinja_value b);
struct jinja_value jinja_item(struct jinja_run *run, struct jinja_value object, struct jinja_value key);
struct jinja_value jinja_attr(struct jinja_run *run, struct jinja_value object, struct jinja_value name,
                              const struct jinja_function *const methods[3]);
struct jinja_value jinja_slice(struct jinja_run *run, struct jinja_value object, const struct jinja_value parts[3]);
/* "a.b.0" as the attribute arguments of filters have it. */
struct jinja_value jinja_attr_path(struct jinja_run *run, struct jinja_value object, struct jinja_value path);
/* The method of that kind of value among those of its name, or NULL. */
const struct jinja_function *jinja_method_of(struct jinja_value object, const struct jinja_function *const methods[3]);

/* jinja_format.c: 'text %s' % values, and 'text {}'.format(values). */
struct jinja_str jinja_format_percent(struct jinja_run *run, struct jinja_str format, const struct jinja_args *args);
struct jinja_str jinja_format_braces(struct jinja_run *run, struct jinja_str format, const struct jinja_args *args);

/* Arguments. By position or by name; false when it was not given. */
bool jinja_arg(const struct jinja_args *args, size_t position, const char *name, struct jinja_value *out);
struct jinja_value jinja_arg_need(struct jinja_run *run, const struct jinja_args *args, size_t position,
                                  const char *name);
int64_t jinja_arg_int(struct jinja_run *run, const struct jinja_args *args, size_t position, const char *name,
                      int64_t otherwise);
bool jinja_arg_bool(struct jinja_run *run, const struct jinja_args *args, size_t position, const char *name,
                    bool otherwise);
struct jinja_str jinja_arg_str(struct jinja_run *run, const struct jinja_args *args, size_t position, const char *name,
                               const char *otherwise);
int64_t jinja_to_int(struct jinja_run *run, struct jinja_value v); /* of an int or bool; fails for others */

/* Looks a name up in a table that ends with a NULL name. */
const struct jinja_function *jinja_function_find(const struct jinja_function *table, struct jinja_str name);

/* Tables that end with a NULL name. */
extern const struct jinja_function jinja_filters_list[], jinja_methods_str[];
extern const struct jinja_function jinja_loop_methods[], jinja_cycler_methods[]; /* jinja_globals.c */

#endif
