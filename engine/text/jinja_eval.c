/* Expressions. Every node is a step and a level of depth. */
#include "engine/text/jinja_run.h"

bool jinja_arg(const struct jinja_args *args, size_t position, const char *name, struct jinja_value *out) {
    if (position < args->count) {
        *out = args->positional[position];
        return true;
    }
    for (size_t i = 0; i < args->named_count; i++)
        if (jinja_str_is(args->named[i].name, name)) {
            *out = args->named[i].value;
            return true;
        }
    return false;
}

struct jinja_value jinja_arg_need(struct jinja_run *run, const struct jinja_args *args, size_t position,
                                  const char *name) {
    struct jinja_value value;
    if (!jinja_arg(args, position, name, &value)) jinja_fail(&run->heap, "missing argument '%s'", name);
    return value;
}

int64_t jinja_to_int(struct jinja_run *run, struct jinja_value v) {
    jinja_need_defined(&run->heap, v);
    if (v.kind == JINJA_BOOL) return v.b;
    if (v.kind != JINJA_INT) jinja_fail(&run->heap, "'%s' object cannot be interpreted as an integer", jinja_type(v));
    return v.i;
}

int64_t jinja_arg_int(struct jinja_run *run, const struct jinja_args *args, size_t position, const char *name,
                      int64_t otherwise) {
    struct jinja_value value;
    if (!jinja_arg(args, position, name, &value) || value.kind == JINJA_NONE) return otherwise;
    return jinja_to_int(run, value);
}

bool jinja_arg_bool(struct jinja_run *run, const struct jinja_args *args, size_t position, const char *name,
                    bool otherwise) {
    struct jinja_value value;
    return jinja_arg(args, position, name, &value) ? jinja_truth(&run->heap, value) : otherwise;
}

struct jinja_str jinja_arg_str(struct jinja_run *run, const struct jinja_args *args, size_t position, const char *name,
                               const char *otherwise) {
    struct jinja_value value;
    if (!jinja_arg(args, position, name, &value)) return jinja_str_lit(otherwise);
    jinja_need_defined(&run->heap, value);
    if (value.kind != JINJA_STRING)
        jinja_fail(&run->heap, "argument '%s' must be str, not %s", name, jinja_type(value));
    return *value.str;
}

static struct jinja_value eval_name(struct jinja_run *run, const struct jinja_node *node) {
    struct jinja_value *found = jinja_scope_find(run, node->symbol);
    if (found) return *found;
    if (node->function) return (struct jinja_value){.kind = JINJA_FUNCTION, .function = node->function};
    return jinja_undefined(&run->heap, "'%.*s' is undefined", (int)node->text.bytes, node->text.data);
}

static struct jinja_value eval_items(struct jinja_run *run, const struct jinja_node *node) {
    struct jinja_value list = jinja_list_new(&run->heap, node->op == '(' ? JINJA_TUPLE : JINJA_LIST, node->kids_count);
    for (size_t i = 0; i < node->kids_count; i++)
        jinja_list_append(&run->heap, list.list, jinja_eval(run, node->kids[i]));
    return list;
}

static struct jinja_value eval_pairs(struct jinja_run *run, const struct jinja_node *node) {
    struct jinja_value dict = jinja_dict_new(&run->heap);
    for (size_t i = 0; i + 1 < node->kids_count; i += 2) {
        struct jinja_value key = jinja_eval(run, node->kids[i]);
        jinja_dict_set(&run->heap, dict.dict, key, jinja_eval(run, node->kids[i + 1]));
    }
    return dict;
}

static struct jinja_value eval_slice(struct jinja_run *run, const struct jinja_node *node) {
    struct jinja_value object = jinja_eval(run, node->a), parts[3];
    for (size_t i = 0; i < 3; i++) parts[i] = node->kids[i] ? jinja_eval(run, node->kids[i]) : jinja_none();
    return jinja_slice(run, object, parts);
}

static void args_star(struct jinja_run *run, struct jinja_args *args, const struct jinja_node *star) {
    struct jinja_list *more = jinja_iterate(&run->heap, jinja_eval(run, star));
    struct jinja_value *all = jinja_alloc(&run->heap, args->count + more->count, sizeof *all);
    jinja_step(&run->heap, more->count);
    if (args->count) memcpy(all, args->positional, args->count * sizeof *all);
    if (more->count) memcpy(all + args->count, more->items, more->count * sizeof *all);
    args->positional = all;
    args->count += more->count;
}

static void args_star_star(struct jinja_run *run, struct jinja_args *args, const struct jinja_node *star_star) {
    struct jinja_value more = jinja_eval(run, star_star);
    if (more.kind != JINJA_DICT)
        jinja_fail(&run->heap, "argument after ** must be a mapping, not %s", jinja_type(more));
    jinja_dict_read(&run->heap, more.dict);
    struct jinja_named *all = jinja_alloc(&run->heap, args->named_count + more.dict->count, sizeof *all);
    if (args->named_count) memcpy(all, args->named, args->named_count * sizeof *all);
    args->named = all;
    for (size_t i = 0; i < more.dict->count; i++) {
        struct jinja_value key = more.dict->entries[i].key;
        if (key.kind != JINJA_STRING) jinja_fail(&run->heap, "keywords must be strings");
        all[args->named_count++] = (struct jinja_named){*key.str, more.dict->entries[i].value};
    }
}

struct jinja_args jinja_eval_args(struct jinja_run *run, const struct jinja_call_args *from) {
    struct jinja_args args = {0};
    if (!from) return args;
    if (from->positional_count) {
        args.positional = jinja_alloc(&run->heap, from->positional_count, sizeof *args.positional);
        for (size_t i = 0; i < from->positional_count; i++) args.positional[i] = jinja_eval(run, from->positional[i]);
        args.count = from->positional_count;
    }
    if (from->named_count) {
        args.named = jinja_alloc(&run->heap, from->named_count, sizeof *args.named);
        for (size_t i = 0; i < from->named_count; i++)
            args.named[i] = (struct jinja_named){from->names[i], jinja_eval(run, from->named[i])};
        args.named_count = from->named_count;
    }
    if (from->star) args_star(run, &args, from->star);
    if (from->star_star) args_star_star(run, &args, from->star_star);
    return args;
}

/* cycler.next() is written as a call of the attribute; joiner() as a call of the value. */
static struct jinja_value joiner_call(struct jinja_run *run, struct jinja_cycler *joiner) {
    if (joiner->at++ == 0) return jinja_text(&run->heap, "");
    return jinja_string(&run->heap, *joiner->text);
}

struct jinja_value jinja_call_value(struct jinja_run *run, struct jinja_value callee, const struct jinja_args *args) {
    jinja_need_defined(&run->heap, callee);
    switch (callee.kind) {
    case JINJA_MACRO:
        return jinja_macro_call(run, callee.macro, args);
    case JINJA_FUNCTION:
        return callee.function->call(run, jinja_none(), args);
    case JINJA_METHOD:
        return callee.method->function->call(run, callee.method->self, args);
    case JINJA_JOINER:
        return joiner_call(run, callee.cycler);
    default:
        jinja_fail(&run->heap, "'%s' object is not callable", jinja_type(callee));
    }
}

static struct jinja_value eval_call(struct jinja_run *run, const struct jinja_node *node) {
    const struct jinja_node *callee = node->a;
    if (callee->kind == JINJA_ATTR) { /* a method, called without being made a value */
        struct jinja_value self = jinja_eval(run, callee->a);
        const struct jinja_function *method = jinja_method_of(self, callee->methods);
        struct jinja_value function = method ? jinja_none() : jinja_attr(run, self, callee->value, callee->methods);
        struct jinja_args args = jinja_eval_args(run, node->args);
        return method ? method->call(run, self, &args) : jinja_call_value(run, function, &args);
    }
    struct jinja_value function = jinja_eval(run, callee);
    struct jinja_args args = jinja_eval_args(run, node->args);
    return jinja_call_value(run, function, &args);
}

struct jinja_value jinja_eval_filters(struct jinja_run *run, const struct jinja_node *node, struct jinja_value self) {
    jinja_enter(&run->heap);
    if (node->a)
        self = node->a->kind == JINJA_FILTER ? jinja_eval_filters(run, node->a, self) : jinja_eval(run, node->a);
    if (!node->function) jinja_fail(&run->heap, "no filter named '%.*s'", (int)node->text.bytes, node->text.data);
    struct jinja_args args = jinja_eval_args(run, node->args);
    self = node->function->call(run, self, &args);
    jinja_leave(&run->heap);
    return self;
}

static struct jinja_value eval_test(struct jinja_run *run, const struct jinja_node *node) {
    struct jinja_value self = jinja_eval(run, node->a);
    if (!node->function) jinja_fail(&run->heap, "no test named '%.*s'", (int)node->text.bytes, node->text.data);
    struct jinja_args args = jinja_eval_args(run, node->args);
    return node->function->call(run, self, &args);
}

static struct jinja_value eval_concat(struct jinja_run *run, const struct jinja_node *node) {
    struct jinja_builder b = {0};
    for (size_t i = 0; i < node->kids_count; i++)
        jinja_build_value(&run->heap, &b, jinja_eval(run, node->kids[i]), false);
    return jinja_string(&run->heap, jinja_build_end(&run->heap, &b));
}

static struct jinja_value eval_comparison(struct jinja_run *run, const struct jinja_node *node) {
    struct jinja_value left = jinja_eval(run, node->a);
    for (size_t i = 0; i < node->kids_count; i++) {
        struct jinja_value right = jinja_eval(run, node->kids[i]);
        if (!jinja_compare(run, node->ops[i], left, right)) return jinja_bool(false);
        left = right;
    }
    return jinja_bool(true);
}

static struct jinja_value eval_cond(struct jinja_run *run, const struct jinja_node *node) {
    if (jinja_truth(&run->heap, jinja_eval(run, node->a))) return jinja_eval(run, node->b);
    if (node->c) return jinja_eval(run, node->c);
    return jinja_undefined(&run->heap, "the inline if-expression evaluated to false and has no else");
}

static struct jinja_value eval_node(struct jinja_run *run, const struct jinja_node *node) {
    struct jinja_heap *heap = &run->heap;
    struct jinja_value a;
    switch (node->kind) {
    case JINJA_CONST:
        return node->value;
    case JINJA_NAME:
        return eval_name(run, node);
    case JINJA_ITEMS:
        return eval_items(run, node);
    case JINJA_PAIRS:
        return eval_pairs(run, node);
    case JINJA_ATTR:
        return jinja_attr(run, jinja_eval(run, node->a), node->value, node->methods);
    case JINJA_ITEM:
        a = jinja_eval(run, node->a);
        return jinja_item(run, a, jinja_eval(run, node->b));
    case JINJA_SLICE:
        return eval_slice(run, node);
    case JINJA_CALL:
        return eval_call(run, node);
    case JINJA_FILTER:
        return jinja_eval_filters(run, node, jinja_none());
    case JINJA_TEST:
        return eval_test(run, node);
    case JINJA_NOT:
        return jinja_bool(!jinja_truth(heap, jinja_eval(run, node->a)));
    case JINJA_AND:
        a = jinja_eval(run, node->a);
        return jinja_truth(heap, a) ? jinja_eval(run, node->b) : a;
    case JINJA_OR:
        a = jinja_eval(run, node->a);
        return jinja_truth(heap, a) ? a : jinja_eval(run, node->b);
    case JINJA_NEGATE:
        return jinja_negate(run, jinja_eval(run, node->a));
    case JINJA_POSITE:
        return jinja_negate(run, jinja_negate(run, jinja_eval(run, node->a)));
    case JINJA_BINARY:
        a = jinja_eval(run, node->a);
        return jinja_binary(run, node->op, a, jinja_eval(run, node->b));
    case JINJA_CONCAT:
        return eval_concat(run, node);
    case JINJA_COMPARE:
        return eval_comparison(run, node);
    default:
        return eval_cond(run, node);
    }
}

struct jinja_value jinja_eval(struct jinja_run *run, const struct jinja_node *node) {
    jinja_step(&run->heap, 1);
    jinja_enter(&run->heap);
    struct jinja_value value = eval_node(run, node);
    jinja_leave(&run->heap);
    return value;
}
